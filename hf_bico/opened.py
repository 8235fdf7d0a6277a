"""A repo whose weights are known but not read: where they are, what the repo says about itself, and how to have them.

Names and shapes come from headers; files are fetched when asked for. Knows weights; not what kind of model they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from hf_bico.checkpoints import Checkpoint, FileCheckpoint, HeaderCheckpoint, WeightFiles
from hf_bico.errors import BrokenWeightsError
from hf_bico.hub.client import Downloaded, Place
from hf_bico.hub.references import LOCAL, RepoName
from hf_bico.hub.repo_metadata import Origin, read_origin
from hf_bico.utils.files import sha256_of


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Weights by reference."""

    name: str
    checkpoint: Checkpoint
    place: Place | None = None
    """Where its files are; None for a loaded module."""
    weights: WeightFiles | None = None
    notice: str | None = None
    """What a reader of the result should know about how its weights were found."""
    pickled: bool = False
    """Whether its weights had to be read from pickles."""

    @property
    def folder(self) -> Path | None:
        """Where its files are, once they are fetched."""
        return None if self.place is None else self.place.folder

    @property
    def commit(self) -> str | None:
        return None if self.place is None else self.place.commit

    @property
    def repo_name(self) -> RepoName:
        """The Hub repo whose privacy what is made from it inherits, or a word for what is none."""
        repo = None if self.place is None else self.place.repo
        return LOCAL if repo is None else (repo.type, repo.id)

    @cached_property
    def origin(self) -> Origin:
        """What its own card and configuration say about it."""
        return Origin() if self.place is None else read_origin(self.place.folder, self.place.name)

    @property
    def beside(self) -> Sequence[str]:
        """The files beside the weights that may be needed, the configuration first."""
        return ()

    def needed(self, beside: bool = True) -> list[str]:
        """The weight files, and `beside` them those to load the model with; else its configuration alone."""
        if self.place is None or self.weights is None:
            return []
        index = () if self.weights.index is None else (self.weights.index,)
        sides = self.beside if beside else self.beside[:1]
        return [name for name in (*sides, *index, *self.weights.names) if name in self.place.sizes]

    def fetched(self, downloaded: Downloaded | None = None, beside: bool = True) -> Self:
        """The same with its files on this machine."""
        if self.place is None or self.weights is None:
            return self
        self.place.fetch(self.needed(beside), downloaded)
        return replace(self, checkpoint=on_disk(self.place, self.weights))

    @cached_property
    def sha256(self) -> dict[str, str]:
        """The digests of the weight files, by name; empty for a loaded module."""
        return sha256_of(self.checkpoint.files) if isinstance(self.checkpoint, FileCheckpoint) else {}


def known_weights(place: Place, weights: WeightFiles) -> FileCheckpoint | HeaderCheckpoint:
    """Names and shapes of a repo's weights: from its files where they are here, else by what the Hub tells."""
    if all((place.folder / name).is_file() for name in weights.names):
        return on_disk(place, weights)
    if place.repo is None:
        raise BrokenWeightsError(f"'{place.name}' lacks '{weights.names[0]}'", "copy or download the model again")
    shapes = {name: shape for header in place.repo.headers(weights.names) for name, shape in header.items()}
    return HeaderCheckpoint(shapes, sum(place.sizes[name] for name in weights.names))


def on_disk(place: Place, weights: WeightFiles) -> FileCheckpoint:
    index = None if weights.index is None else place.folder / weights.index
    return FileCheckpoint([place.folder / name for name in weights.names], index)
