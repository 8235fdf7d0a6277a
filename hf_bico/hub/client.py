"""Repos pinned to a commit; files fetched through the cache; headers; ranges.

Repos on the Hub: pinned to a commit, their files, the headers of their weights, and downloads through the cache.

Everything that is read from the Hub comes through here, or as a `remote_file`. Knows repos and files; not what is in
them.

Where a repo's files are: a folder of this machine, or the Hub's cache with large files still to be fetched.

Knows file names and sizes; not what a model is.

A file of a Hub repo as a stream, of which only the bytes that are read are downloaded.
"""

from __future__ import annotations

import builtins
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import (
    BrokenWeightsError,
    EmptyRepoError,
    HubUnavailableError,
    NotCachedError,
    RepoError,
    RepoNotFoundError,
    TokenError,
)
from hf_bico.hub.references import HubReference, cached_repo, hub_repo, near_folder, parse
from hf_bico.hub.retries import LOG_IN, failures, is_offline, translated, with_retries
from hf_bico.utils import __version__
from hf_bico.utils.text import near

if TYPE_CHECKING:
    from huggingface_hub import HfApi


MAIN = "main"
CONVERSION_BOT = "SFconvertbot"
_ODD_NAMES = ("..", "\\", "\0")

Downloaded = Callable[[int], None]
"""Called with the number of bytes that have arrived since the last call."""


@dataclass(frozen=True)
class HubRepo:
    """One repo at one commit."""

    id: str
    type: str
    commit: str
    files: Mapping[str, int]
    """The size of each file, by its name."""
    restricted: bool
    """Whether it is private or gated."""
    asked: HubReference
    hub: Hub = field(repr=False, compare=False)
    sha256: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The digests of the large files, as the Hub knows them."""

    @property
    def renamed(self) -> bool:
        """Whether it was asked for by an older name."""
        return self.asked.id != self.id and "/" in self.asked.id

    def cached(self, name: str) -> Path | None:
        """Where the cache holds a file of this commit."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.id, name, revision=self.commit, repo_type=self.type)
        return Path(found) if isinstance(found, str) else None

    def to_download(self, names: Iterable[str]) -> int:
        """The bytes of these files that are not in the cache."""
        return sum(self.files[name] for name in names if self.cached(name) is None)

    def fetch(self, names: Iterable[str], downloaded: Downloaded | None = None) -> Path:
        """Have these files in the cache; returns the folder that they are in."""
        bar = None if downloaded is None else _reporting(downloaded)
        options: dict[str, Any] = {"revision": self.commit, "repo_type": self.type, "tqdm_class": bar}
        try:
            with translated(self.asked, self.type, f"'{self.id}'"):
                for name in names:
                    with_retries(lambda: self.hub.api.hf_hub_download(self.id, name, **options))  # noqa: B023
        except OSError as error:
            if error.errno is None:  # of the client, and not of the disk
                raise HubUnavailableError(
                    f"'{self.id}': a file did not come whole: {str(error).splitlines()[0]}", "try again in a while"
                ) from error
            raise RepoError(
                f"'{self.id}' cannot be put into the cache: {error.strerror}",
                "make room, or set HF_HOME to another folder",
            ) from error
        return self.hub.snapshot(self.id, self.type, self.commit)

    def header(self, name: str) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a safetensors file, by one Range request."""
        from huggingface_hub.errors import SafetensorsParsingError

        try:
            with translated(self.asked, self.type, f"'{self.id}'"):
                where: dict[str, Any] = {"revision": self.commit, "repo_type": self.type}
                metadata = with_retries(lambda: self.hub.api.parse_safetensors_file_metadata(self.id, name, **where))
        except SafetensorsParsingError as error:
            raise BrokenWeightsError(
                f"'{name}' of '{self.id}' cannot be read as safetensors: {error}", "ask its author to upload it again"
            ) from error
        return {tensor: tuple(info.shape) for tensor, info in metadata.tensors.items()}

    def headers(self, names: Iterable[str]) -> list[dict[str, tuple[int, ...]]]:
        """The headers of several files, asked for at the same time."""
        with ThreadPoolExecutor(max_workers=8) as pool:
            return list(pool.map(self.header, names))


class Hub:
    """The Hub as one account sees it: repos are resolved once and stay pinned."""

    def __init__(self, token: str | None = None) -> None:
        self.token = None if token is None else token.strip()
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token):
            raise TokenError("what was given as a token is none: it has odd characters in it, or is empty", LOG_IN)
        self._repos: dict[tuple[str, str, str | None], HubRepo] = {}

    @cached_property
    def api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(token=self.token, library_name="hf-bico", library_version=__version__)

    def repo(self, reference: HubReference, what: str, type: str = "model") -> HubRepo:
        """Resolve a reference to a commit, and make sure that this account may read it; `what` names it in errors."""
        key = (type, reference.id, reference.revision)
        if key not in self._repos:
            try:
                self._repos[key] = self._resolve(reference, what, type)
            except (HubUnavailableError, NotCachedError) as error:
                folder = near_folder(reference.id)
                if folder is None:
                    raise
                raise builtins.type(error)(error.cause, f"did you mean '{folder}'? Else {error.remedy}") from error
        return self._repos[key]

    def _resolve(self, reference: HubReference, what: str, type: str) -> HubRepo:
        if is_offline():
            return self._from_cache(reference, what, type)
        named = f"{what} '{reference}'"
        with translated(reference, type, named, self):
            where: dict[str, Any] = {"revision": reference.revision, "repo_type": type}
            info: Any = with_retries(lambda: self.api.repo_info(reference.id, files_metadata=True, **where))
            if info.gated:
                with_retries(lambda: self.api.auth_check(info.id, repo_type=type))
        files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
        for name in files:
            if any(part in name for part in _ODD_NAMES) or name.startswith("/"):
                raise RepoNotFoundError(f"{named} has a file named {name!r}", "use another repo")
        if not set(files) - {".gitattributes"}:
            raise EmptyRepoError(f"{named} is empty", "check the name, or the revision after an @")
        digests = {file.rfilename: file.lfs.sha256 for file in info.siblings if file.lfs is not None}
        return HubRepo(info.id, type, info.sha, files, bool(info.private or info.gated), reference, self, digests)

    def _from_cache(self, reference: HubReference, what: str, type: str) -> HubRepo:
        folder = self.snapshot(reference.id, type, reference.revision or MAIN)
        if not folder.is_dir():
            raise NotCachedError(
                f"{what}: '{reference}' is not in the cache, and the Hub is off (HF_HUB_OFFLINE)",
                "unset HF_HUB_OFFLINE once, so that it can be downloaded",
            )
        files = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
        # nobody can be asked offline, and nothing can be pushed either
        return HubRepo(reference.id, type, folder.name, files, False, reference, self)

    def remember(self, repo: HubRepo) -> None:
        """Let the cache know which commit the asked revision was, for later runs without a network."""
        revision = repo.asked.revision or MAIN
        if revision == repo.commit or is_offline():
            return
        _note(_cached_repo(repo.id, repo.type) / "refs" / revision, repo.commit)

    @staticmethod
    def snapshot(repo_id: str, type: str, revision: str) -> Path:
        """The folder of the cache for a revision; it may not be there."""
        root = _cached_repo(repo_id, type)
        known = root / "refs" / revision
        return root / "snapshots" / (known.read_text().strip() if known.is_file() else revision)

    def conversion(self, repo: HubRepo) -> HubRepo | None:
        """The Hub's own pull request that adds safetensors to a repo of pickles, open and pinned."""
        if is_offline():
            return self._cached_conversion(repo)
        with translated(repo.asked, repo.type, f"'{repo.id}'"):
            requests = with_retries(
                lambda: list(
                    self.api.get_repo_discussions(repo.id, author=CONVERSION_BOT, discussion_type="pull_request")
                )
            )
        for request in requests:
            # the author is checked again: anybody may open a pull request
            if request.author != CONVERSION_BOT or request.status not in ("open", "draft"):
                continue
            found = self.repo(HubReference(repo.id, f"refs/pr/{request.num}"), "the conversion")
            if any(name.endswith(".safetensors") for name in found.files) and self._parent(found) == repo.commit:
                _note(_conversion_of(repo), found.commit)
                return found
        return None

    def _cached_conversion(self, repo: HubRepo) -> HubRepo | None:
        """The conversion of this commit that an earlier run found and took."""
        noted = _conversion_of(repo)
        if not noted.is_file():
            return None
        return self._from_cache(HubReference(repo.id, noted.read_text().strip()), "the conversion", repo.type)

    def _parent(self, repo: HubRepo) -> str | None:
        """The commit before this one: a conversion of older weights is of no use."""
        with translated(repo.asked, repo.type, f"'{repo.id}'"):
            commits = with_retries(
                lambda: self.api.list_repo_commits(repo.id, repo_type=repo.type, revision=repo.commit)
            )
        return commits[1].commit_id if len(commits) > 1 else None

    def exists(self, repo_id: str, type: str) -> bool:
        """Whether there is such a repo; no, where that cannot be told."""
        try:
            return bool(self.api.repo_exists(repo_id, repo_type=type))
        except failures():
            return False

    def revisions(self, reference: HubReference, type: str) -> list[str]:
        """The branches and tags of a repo; none, where that cannot be told."""
        try:
            found = self.api.list_repo_refs(reference.id, repo_type=type)
        except failures():
            return []
        return [ref.name for ref in (*found.branches, *found.tags)]

    def near(self, reference: HubReference, type: str) -> str | None:
        """The id of a repo whose name is like this one's."""
        name = reference.id.rpartition("/")[2]
        listed = self.api.list_models if type == "model" else self.api.list_datasets
        try:
            found = [info.id for info in listed(search=name, limit=20)]
            if "/" in reference.id:
                found += [info.id for info in listed(author=reference.id.partition("/")[0], limit=200)]
        except failures():  # a hint is not worth an error of its own
            found = []
        by_name = {known.rpartition("/")[2]: known for known in found if known != reference.id}
        last = near(name, by_name, cutoff=0.8)
        return near(reference.id, found, cutoff=0.85) or (None if last is None else by_name[last])


def _cached_repo(repo_id: str, type: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / "--".join([f"{type}s", *repo_id.split("/")])


def _conversion_of(repo: HubRepo) -> Path:
    return _cached_repo(repo.id, repo.type) / "refs" / "hf-bico-conversion" / repo.commit


def _note(file: Path, commit: str) -> None:
    """Keep a commit in the cache; a cache that cannot be written to serves online all the same."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    except OSError:
        return


def _reporting(downloaded: Downloaded) -> Any:
    """A stand-in for the client's progress bar that hands the bytes on."""
    from tqdm.auto import tqdm

    class Reporting(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            downloaded(int(n or 0))
            return None

    return Reporting


SMALL_FILES = ("config.json", "open_clip_config.json", "adapter_config.json", "README.md")
"""What tells about a model without its weights; indices of shards come on top."""
SMALL = 20_000_000


@dataclass(frozen=True)
class RepoFiles:
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


def locate(reference: str | Path, what: str, hub: Hub | None = None) -> RepoFiles:
    """Find a model repo by its reference; of a Hub repo the small files are fetched, and no weight."""
    found = parse(reference, what)
    if isinstance(found, Path):
        place = _cached_place(found, what, hub or Hub())
        if place is not None:
            return place
        return RepoFiles(
            found.name, found, {file.name: file.stat().st_size for file in found.iterdir() if file.is_file()}
        )
    alias = hub_repo(found, what)
    try:
        return at_hub((hub or Hub()).repo(alias or found, what))
    except (HubUnavailableError, NotCachedError) as error:
        if "/" in found.id:
            raise
        raise type(error)(f"there is no folder '{found.id}' here, and {error.cause}", error.remedy) from error


def _cached_place(folder: Path, what: str, hub: Hub) -> RepoFiles | None:
    """A folder of the Hub's own cache as the repo that it is, where that can still be read: its privacy matters."""
    reference = cached_repo(folder)
    try:
        return None if reference is None else at_hub(hub.repo(reference, what))
    except RepoError:
        return None


def at_hub(repo: HubRepo) -> RepoFiles:
    """The place of a resolved Hub repo, with its small files fetched."""
    small = [name for name in repo.files if name in SMALL_FILES or (name.endswith(".index.json") and "/" not in name)]
    small = [name for name in small if repo.files[name] <= SMALL]
    folder = repo.fetch(small)
    repo.hub.remember(repo)
    return RepoFiles(repo.id, folder, repo.files, repo)


class RemoteFile(io.RawIOBase):
    """A file of a repo, of which exactly what is read is asked for, by Range requests."""

    def __init__(self, repo: HubRepo, name: str) -> None:
        self._repo = repo
        self._name = name
        self._size = repo.files[name]
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

        repo, start = self._repo, self._place
        end = self._size if size < 0 else min(start + size, self._size)
        if end <= start:
            return b""
        address = hf_hub_url(repo.id, self._name, repo_type=repo.type, revision=repo.commit)
        headers = {
            **build_hf_headers(token=repo.hub.token, library_name="hf-bico"),
            "Range": f"bytes={start}-{end - 1}",
        }
        response = http_backoff("GET", address, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        hf_raise_for_status(response)
        content: bytes = response.content
        if len(content) != end - start:
            raise HubUnavailableError(
                f"'{repo.id}': {end - start} bytes of '{self._name}' were asked for and {len(content)} came",
                "try again in a while; an endpoint other than the Hub's own must serve Range requests",
            )
        self._place = end
        return content
