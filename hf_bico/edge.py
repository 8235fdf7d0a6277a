"""Where a command ends: errors as two lines and an exit code, the libraries' own chatter kept off the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from hf_bico.errors import BicoError, UsageError


def _quiet_libraries() -> None:
    """Keep the libraries' own notices and bars off the terminal: what matters is said here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import logging

    logging.getLogger().setLevel(logging.ERROR)


@dataclass
class Edge:
    """Where a command ends."""

    interrupted: str = "nothing was written"
    """What is true when the user stops it."""


@contextmanager
def edge() -> Iterator[Edge]:
    """Turn an error into two lines and an exit code: 2 for the command line itself, 1 for the rest."""
    at = Edge()
    try:
        _quiet_libraries()
        yield at
    except BicoError as error:
        if os.environ.get("HF_BICO_DEBUG") == "1":
            raise
        click.echo(f"Error: {error.cause}", err=True)
        click.echo(f"Remedy: {error.remedy}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        click.echo(f"Interrupted: {at.interrupted}.", err=True)
        sys.exit(130)
