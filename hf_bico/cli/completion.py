"""Completes words for the shell: folders, repos of the local Hub cache, and names after a comma.

Reads only names of folders and imports nothing heavy, to answer at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import click

from hf_bico.settings import METHODS

_SAFE_NAME = re.compile(r"(?!-)[\w.+@%,-]+")
"""A name that needs no quotes in any shell; others are not offered, because a shell would interpret them."""


def complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Offer folders, and the models of the Hub cache."""
    return [*_folders(incomplete), *_starting(incomplete, cached_ids("model"))]


def complete_data(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Offer folders, and the data sets of the Hub cache."""
    return [*_folders(incomplete), *_starting(incomplete, cached_ids("dataset"))]


def complete_folder(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Offer folders only."""
    return _folders(incomplete)


def complete_methods(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Offer the methods that a list with commas does not contain yet."""
    given, comma, last = incomplete.rpartition(",")
    left = [name for name in ("all", *METHODS) if name not in given.split(",")]
    return [f"{given}{comma}{name}" for name in _starting(last, left)]


def cached_ids(type: str) -> list[str]:
    """Return the ids of all repos of a type in the local Hub cache, from the names of its folders."""
    prefix = f"{type}s--"
    try:
        names = sorted(entry.name for entry in os.scandir(_hub_cache()) if entry.name.startswith(prefix))
    except OSError:
        return []
    return [name.removeprefix(prefix).replace("--", "/") for name in names if _SAFE_NAME.fullmatch(name)]


def _hub_cache() -> Path:
    """Return the cache folder of huggingface_hub, without importing it."""
    given = os.environ.get
    home = given("HF_HOME") or f"{given('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(cache)).expanduser()


def _folders(incomplete: str) -> list[str]:
    """Return matching folders; with a single one also its sub-folders, so that the shell does not end the word."""
    matches = _matching_folders(incomplete)
    return [*matches, *_matching_folders(matches[0])] if len(matches) == 1 else matches


def _matching_folders(incomplete: str) -> list[str]:
    start, slash, name = incomplete.rpartition("/")
    typed = f"{start}{slash}"
    try:
        entries = sorted(entry.name for entry in os.scandir(Path(typed or ".").expanduser()) if entry.is_dir())
    except (OSError, RuntimeError):  # RuntimeError: a home folder of nobody
        return []
    offered = [entry for entry in entries if _SAFE_NAME.fullmatch(entry) and (name.startswith(".") or entry[0] != ".")]
    return [f"{typed}{entry}/" for entry in _starting(name, offered)]


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
