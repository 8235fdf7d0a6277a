"""What a shell offers after a Tab: folders, repos of the local Hub cache, and names after a comma.

Reads names of folders alone, asks nobody, and imports nothing heavy: an answer takes a moment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import click

from hf_bico.settings import METHODS

_CACHED = {"model": "models--", "dataset": "datasets--"}
_HARMLESS = re.compile(r"(?!-)[\w.+@%,-]+")
"""A name that every shell takes as it stands; others are not offered, since a shell would act on what is in them."""


def complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Folders, and the models of the Hub cache."""
    return [*_folders(incomplete), *_starting(incomplete, cached_ids("model"))]


def complete_data(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Folders, and the data sets of the Hub cache."""
    return [*_folders(incomplete), *_starting(incomplete, cached_ids("dataset"))]


def complete_folder(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Folders alone."""
    return _folders(incomplete)


def complete_methods(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The next of some methods with commas between them, without those that are there already."""
    given, comma, last = incomplete.rpartition(",")
    left = [name for name in ("all", *METHODS) if name not in given.split(",")]
    return [f"{given}{comma}{name}" for name in _starting(last, left)]


def cached_ids(type: str) -> list[str]:
    """The ids of the repos of a type in the local Hub cache, by the names of its folders."""
    prefix = _CACHED[type]
    try:
        names = sorted(entry.name for entry in os.scandir(_hub_cache()) if entry.name.startswith(prefix))
    except OSError:
        return []
    return [name.removeprefix(prefix).replace("--", "/") for name in names if _HARMLESS.fullmatch(name)]


def _hub_cache() -> Path:
    """Where the Hub's own client keeps its cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.path.expandvars(os.environ[name])).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def _folders(incomplete: str) -> list[str]:
    """The folders whose path begins so; what is in the only one too, so that the shell does not end the word."""
    found = _folders_here(incomplete)
    return [*found, *_folders_here(found[0])] if len(found) == 1 else found


def _folders_here(incomplete: str) -> list[str]:
    start, slash, name = incomplete.rpartition("/")
    typed = f"{start}{slash}"
    try:
        entries = sorted(entry.name for entry in os.scandir(Path(typed or ".").expanduser()) if entry.is_dir())
    except (OSError, RuntimeError):  # RuntimeError: a home folder of nobody
        return []
    shown = [entry for entry in entries if _HARMLESS.fullmatch(entry) and (name.startswith(".") or entry[0] != ".")]
    return [f"{typed}{entry}/" for entry in shown if entry.startswith(name)]


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
