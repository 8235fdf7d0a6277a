"""Where a repo's files are: a folder of this machine, or the Hub's cache with large files still to be fetched.

Knows file names and sizes; not what a model is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_bico.errors import HubUnavailableError, NotCachedError, RepoError
from hf_bico.hub.client import Downloaded, Hub, HubRepo
from hf_bico.hub.open_clip_names import hub_repo
from hf_bico.hub.references import cached_repo, parse

SMALL_FILES = ("config.json", "open_clip_config.json", "adapter_config.json", "README.md")
"""What tells about a model without its weights; indices of shards come on top."""
SMALL = 20_000_000


@dataclass(frozen=True)
class Place:
    """The files of one repo; those of a Hub repo are in `folder` once they are fetched."""

    name: str
    """The Hub id, or the folder's name."""
    folder: Path
    sizes: Mapping[str, int]
    repo: HubRepo | None = None

    @property
    def commit(self) -> str | None:
        return None if self.repo is None else self.repo.commit

    def fetch(self, names: Iterable[str], downloaded: Downloaded | None = None) -> None:
        """Have these of its files in `folder`."""
        if self.repo is not None:
            self.repo.fetch(self._away(names), downloaded)

    def to_download(self, names: Iterable[str]) -> int:
        """The bytes of these files that are not on this machine yet."""
        return sum(self.sizes[name] for name in self._away(names))

    def _away(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self.sizes and not (self.folder / name).is_file()]


def locate(reference: str | Path, what: str, hub: Hub | None = None) -> Place:
    """Find a model repo by its reference; of a Hub repo the small files are fetched, and no weight."""
    found = parse(reference, what)
    if isinstance(found, Path):
        place = _cached_place(found, what, hub or Hub())
        if place is not None:
            return place
        return Place(found.name, found, {file.name: file.stat().st_size for file in found.iterdir() if file.is_file()})
    alias = hub_repo(found, what)
    try:
        return at_hub((hub or Hub()).repo(alias or found, what))
    except (HubUnavailableError, NotCachedError) as error:
        if "/" in found.id:
            raise
        raise type(error)(f"there is no folder '{found.id}' here, and {error.cause}", error.remedy) from error


def _cached_place(folder: Path, what: str, hub: Hub) -> Place | None:
    """A folder of the Hub's own cache as the repo that it is, where that can still be read: its privacy matters."""
    reference = cached_repo(folder)
    try:
        return None if reference is None else at_hub(hub.repo(reference, what))
    except RepoError:
        return None


def at_hub(repo: HubRepo) -> Place:
    """The place of a resolved Hub repo, with its small files fetched."""
    small = [name for name in repo.files if name in SMALL_FILES or (name.endswith(".index.json") and "/" not in name)]
    small = [name for name in small if repo.files[name] <= SMALL]
    folder = repo.fetch(small)
    repo.hub.remember(repo)
    return Place(repo.id, folder, repo.files, repo)
