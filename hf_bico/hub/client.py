"""Read repos of the Hub: pinned to a commit, downloaded through the cache, or by byte ranges.

Errors leave as ours, but for those of `RemoteFile`, which its reader translates. Knows repos and files; not their
content.
"""

from __future__ import annotations

import builtins
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import (
    AccessError,
    BrokenWeightsError,
    EmptyRepoError,
    HubUnavailableError,
    NotCachedError,
    RecordError,
    RepoError,
    RepoNotFoundError,
    RevisionNotFoundError,
    TokenError,
    WrongRepoTypeError,
)
from hf_bico.hub.references import (
    HubReference,
    cached_repo,
    hub_repo,
    is_commit,
    is_repo_id,
    near_folder,
    near_open_clip,
    parse,
    recorded_folder,
    recorded_repo,
)
from hf_bico.hub.retries import LOG_IN, NOT_OF_THE_HUB, T, answered, is_offline, request_errors, with_retries
from hf_bico.utils import __version__
from hf_bico.utils.files import sha256_of
from hf_bico.utils.text import did_you_mean, near

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
SMALL_FILES = ("config.json", "open_clip_config.json", "adapter_config.json", "README.md")
"""Files that describe a model; shard indices come on top."""
_MAX_SMALL_FILE = 20_000_000
_CONVERSION_BOT = "SFconvertbot"
_TYPE_NAMES = {"model": "model", "dataset": "data set"}
_OTHER_ENDPOINT = "try again later; if HF_ENDPOINT is set, ask those who run it"
_UNSAFE_PARTS = ("..", "\\", "\0")

DownloadCallback = Callable[[int], None]
"""Called with the number of bytes downloaded since the last call."""


@dataclass(frozen=True)
class HubRepo:
    """One repo at one commit."""

    id: str
    type: str
    commit: str
    files: Mapping[str, int]
    """File sizes by name."""
    restricted: bool
    """Whether it is private or gated, or not known to be public."""
    requested: HubReference
    hub: Hub = field(repr=False, compare=False)
    sha256: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Digests of the large files, as the Hub gives them."""
    git_ids: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    """Those of the other files."""

    @property
    def renamed(self) -> bool:
        """Whether it was requested by an older name."""
        return self.requested.id != self.id and "/" in self.requested.id

    @property
    def snapshot(self) -> Path:
        """The cache's folder of this commit; it may not exist yet."""
        return _cache_folder(self.id, self.type) / "snapshots" / self.commit

    def request(self, call: Callable[[], T]) -> T:
        """Return the result of a call of `hub.api` about this repo: retried, with its errors raised as ours."""
        with translate_hub_errors(self.requested, self.type, f"'{self.id}'"):
            return with_retries(call)

    def cached(self, name: str) -> Path | None:
        """Return the path of a file in the cache, if it is there."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.id, name, revision=self.commit, repo_type=self.type)
        return Path(path) if isinstance(path, str) else None

    def to_download(self, names: Iterable[str]) -> int:
        """Return the bytes of these files that are not in the cache."""
        return sum(self.files[name] for name in names if self.cached(name) is None)

    def fetch(self, names: Iterable[str], downloaded: DownloadCallback | None = None) -> Path:
        """Download these files into the cache, and return their folder."""
        bar = None if downloaded is None else _progress_bar(downloaded)
        options: dict[str, Any] = {"revision": self.commit, "repo_type": self.type, "tqdm_class": bar}
        try:
            for name in names:
                is_new = self.cached(name) is None
                path = self.request(lambda: self.hub.api.hf_hub_download(self.id, name, **options))  # noqa: B023
                if is_new and not is_offline():
                    self._require_same(name, Path(path))
        except OSError as error:
            if error.errno is None:  # raised by huggingface_hub, not by the disk
                raise HubUnavailableError(
                    f"'{self.id}': a file was not downloaded completely: {str(error).splitlines()[0]}",
                    "try again later",
                ) from error
            raise RepoError(
                f"'{self.id}' cannot be put into the cache: {error.strerror}",
                "make room, or set HF_HOME to another folder",
            ) from error
        return self.snapshot

    def _require_same(self, name: str, file: Path) -> None:
        """Refuse a download that is not the listed file; delete it from the cache."""
        from huggingface_hub.utils.sha import git_hash

        asked = f"'{name}' of '{self.id}'"
        if not (self.snapshot / name).exists():
            cause = f"{asked}: the Hub answers with another commit than '{self.commit}'"
        elif self.files[name] and file.stat().st_size != self.files[name]:  # not every mirror lists sizes
            cause = f"{asked} has {file.stat().st_size:,} bytes, and the Hub lists {self.files[name]:,}"
        elif name in self.sha256 and sha256_of([file])[file.name] != self.sha256[name]:
            cause = f"{asked} does not have the SHA-256 that the Hub lists"
        elif self.git_ids.get(name) and git_hash(file.read_bytes()) != self.git_ids[name]:
            cause = f"{asked} does not have the content that the Hub lists"
        else:
            return
        for path in (file.resolve(), file):
            path.unlink(missing_ok=True)
        raise HubUnavailableError(cause, _OTHER_ENDPOINT)

    def header(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a safetensors file, by one Range request."""
        from huggingface_hub.errors import SafetensorsParsingError

        where: dict[str, Any] = {"revision": self.commit, "repo_type": self.type}
        try:
            metadata = self.request(lambda: self.hub.api.parse_safetensors_file_metadata(self.id, name, **where))
        except SafetensorsParsingError as error:
            raise BrokenWeightsError(
                f"'{name}' of '{self.id}' cannot be read as safetensors: {error}",
                "try again later; if it stays so, ask its author to upload it again",
            ) from error
        return {tensor: tuple(info.shape) for tensor, info in metadata.tensors.items()}

    def headers(self, names: Iterable[str]) -> list[dict[str, tuple[int, ...]]]:
        """Return the headers of several files, requested in parallel."""
        with ThreadPoolExecutor(max_workers=8) as pool:
            return list(pool.map(self.header, names))


class Hub:
    """The Hub as one account sees it; a repo is resolved once and stays pinned."""

    def __init__(self, token: str | None = None) -> None:
        self.token = None if token is None else token.strip()
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token):
            raise TokenError("the token is not valid: it is empty, or has characters that no token has", LOG_IN)
        self._repos: dict[tuple[str, str, str | None], HubRepo] = {}

    @cached_property
    def api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(token=self.token, library_name="hf-bico", library_version=__version__)

    @property
    def has_token(self) -> bool:
        from huggingface_hub import get_token

        return bool(self.token or get_token())

    def repo(self, reference: HubReference, what: str, type: str = "model") -> HubRepo:
        """Resolve a reference to a commit that this account may read; `what` names it in errors."""
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
        with translate_hub_errors(reference, type, named, self):
            where: dict[str, Any] = {"revision": reference.revision, "repo_type": type}
            info: Any = with_retries(lambda: sound(self.api.repo_info(reference.id, files_metadata=True, **where)))
            if info.gated:
                with_retries(lambda: self.api.auth_check(info.id, repo_type=type))
        if is_commit(reference.revision or "") and info.sha != reference.revision:
            raise HubUnavailableError(f"{named}: the Hub answers with the commit '{info.sha}'", _OTHER_ENDPOINT)
        files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
        for name in files:
            if any(part in name for part in _UNSAFE_PARTS) or name.startswith("/"):
                raise RepoNotFoundError(f"{named} has a file named {name!r}", "use another repo")
        if not set(files) - {".gitattributes"}:
            raise EmptyRepoError(f"{named} is empty", "check the name, or the revision after an @")
        digests = {file.rfilename: file.lfs.sha256 for file in info.siblings if file.lfs is not None}
        git_ids = {file.rfilename: file.blob_id for file in info.siblings if file.lfs is None}
        restricted = bool(info.private or info.gated)
        return HubRepo(info.id, type, info.sha, files, restricted, reference, self, digests, git_ids)

    def _from_cache(self, reference: HubReference, what: str, type: str) -> HubRepo:
        root, revision = _cache_folder(reference.id, type), reference.revision or MAIN
        # not by snapshot_download(local_files_only=True): it refuses a snapshot of which some files were not needed
        ref = root / "refs" / revision
        folder = root / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
        if not folder.is_dir():
            raise NotCachedError(
                f"{what}: '{reference}' is not in the cache, and offline mode is on (HF_HUB_OFFLINE)",
                "unset HF_HUB_OFFLINE once, so that it can be downloaded",
            )
        files = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
        # offline nobody knows whether it is public
        return HubRepo(reference.id, type, folder.name, files, True, reference, self)

    def remember(self, repo: HubRepo) -> None:
        """Write to the cache which commit the requested revision was, for later runs offline."""
        revision = repo.requested.revision or MAIN
        if revision != repo.commit and not is_offline():
            _write_ref(_cache_folder(repo.id, repo.type) / "refs" / revision, repo.commit)

    def conversion(self, repo: HubRepo) -> HubRepo | None:
        """Return the Hub's own open pull request that adds safetensors to a repo of pickles."""
        ref = _cache_folder(repo.id, repo.type) / "refs" / "hf-bico-conversion" / repo.commit
        if is_offline():
            if not ref.is_file():
                return None
            return self._from_cache(HubReference(repo.id, ref.read_text().strip()), "the conversion", repo.type)
        search = partial(self.api.get_repo_discussions, author=_CONVERSION_BOT, discussion_type="pull_request")
        for request in repo.request(lambda: list(search(repo.id))):
            # the author is checked again: anybody may open a pull request
            if request.author != _CONVERSION_BOT or request.status not in ("open", "draft"):
                continue
            converted = self.repo(HubReference(repo.id, f"refs/pr/{request.num}"), "the conversion")
            if not any(name.endswith(".safetensors") for name in converted.files):
                continue
            commits = converted.request(partial(self.api.list_repo_commits, repo.id, revision=converted.commit))
            if len(commits) > 1 and commits[1].commit_id == repo.commit:  # older weights are of no use
                _write_ref(ref, converted.commit)
                return converted
        return None

    def exists(self, repo_id: str, type: str) -> bool:
        """Return whether the repo exists; False if the Hub does not answer."""
        try:
            return bool(answered(lambda: self.api.repo_exists(repo_id, repo_type=type)))
        except request_errors():
            return False

    def revisions(self, reference: HubReference, type: str) -> list[str]:
        """Return the branches and tags of a repo; none if the Hub does not answer."""
        try:
            refs = answered(lambda: self.api.list_repo_refs(reference.id, repo_type=type))
        except request_errors():
            return []
        return [ref.name for ref in (*refs.branches, *refs.tags)]

    def similar_repo(self, reference: HubReference, type: str) -> str | None:
        """Return the id of a repo with a similar name; None if the Hub does not answer."""
        owner, _, name = reference.id.rpartition("/")
        list_repos = self.api.list_models if type == "model" else self.api.list_datasets
        try:
            ids = answered(lambda: [info.id for info in list_repos(search=name, limit=20)])
            if owner:
                ids += answered(lambda: [info.id for info in list_repos(author=owner, limit=200)])
        except request_errors():
            return None
        by_name = {other.rpartition("/")[2]: other for other in ids if other != reference.id}
        similar = near(name, by_name, cutoff=0.8)
        return near(reference.id, ids, cutoff=0.85) or (None if similar is None else by_name[similar])


def sound(info: Any) -> Any:
    """Return the Hub's answer about a repo; a TypeError if it holds something else than the Hub says there."""
    named = isinstance(info.id, str) and is_repo_id(info.id) and isinstance(info.sha, str)
    if not named or not is_commit(info.sha):
        raise TypeError("no repo, or no commit")
    for file in info.siblings or ():
        name, size = file.rfilename, file.size
        if not isinstance(name, str) or not isinstance(size, int | None) or (size or 0) < 0:
            raise TypeError("no file")
    return info


def _cache_folder(repo_id: str, type: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type=type)


def _write_ref(file: Path, commit: str) -> None:
    with suppress(OSError):  # a read-only cache still serves online runs
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)


def _progress_bar(downloaded: DownloadCallback) -> Any:
    """Return a silent stand-in for huggingface_hub's progress bar that passes the bytes on."""
    from tqdm.auto import tqdm

    class ProgressBar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            downloaded(int(n or 0))
            return None

    return ProgressBar


@dataclass(frozen=True)
class RepoFiles:
    """The files of a local folder or of a Hub repo; those of a Hub repo are in `folder` once fetched."""

    name: str
    """The Hub id, or the folder's name."""
    folder: Path
    sizes: Mapping[str, int]
    repo: HubRepo | None = None

    @property
    def commit(self) -> str | None:
        return None if self.repo is None else self.repo.commit

    def recorded(self, name: str, commit: str | None) -> str | Path:
        """Return what a record in this place names: a repo at its commit or, unless it is from the Hub, a folder."""
        if commit is not None:
            return recorded_repo(name, commit)
        if self.repo is not None or cached_repo(self.folder) is not None:  # a stranger's, who names no folder here
            raise RecordError(
                f"'{self.name}' was made from '{name}', a folder on its author's machine",
                "name what to use yourself: --data of 'hf-bico eval', or a new 'hf-bico port'",
            )
        return recorded_folder(name)

    def fetch(self, names: Iterable[str], downloaded: DownloadCallback | None = None) -> None:
        """Download these files into `folder`."""
        if self.repo is not None:
            self.repo.fetch(self._missing(names), downloaded)

    def to_download(self, names: Iterable[str]) -> int:
        """Return the bytes of these files that are not on this machine yet."""
        return sum(self.sizes[name] for name in self._missing(names))

    def _missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self.sizes and not (self.folder / name).is_file()]


def locate(reference: str | Path, what: str, hub: Hub | None = None) -> RepoFiles:
    """Find a model repo by its reference; fetch the small files of a Hub repo, and no weights."""
    parsed, hub = parse(reference, what), hub or Hub()
    if isinstance(parsed, Path):
        snapshot = cached_repo(parsed)
        if snapshot is not None:
            with suppress(RepoError):  # a repo that can no longer be read, maybe private, is a mere folder
                return fetch_small_files(hub.repo(snapshot, what))
        sizes = {file.name: file.stat().st_size for file in parsed.iterdir() if file.is_file()}
        return RepoFiles(parsed.name, parsed, sizes)
    try:
        return fetch_small_files(hub.repo(hub_repo(parsed, what) or parsed, what))
    except (HubUnavailableError, NotCachedError) as error:
        if "/" in parsed.id:
            raise
        raise type(error)(f"there is no folder '{parsed.id}' here, and {error.cause}", error.remedy) from error


def fetch_small_files(repo: HubRepo) -> RepoFiles:
    """Fetch the configurations, card and shard indices of a Hub repo."""
    small = [name for name in repo.files if name in SMALL_FILES or (name.endswith(".index.json") and "/" not in name)]
    folder = repo.fetch([name for name in small if repo.files[name] <= _MAX_SMALL_FILE])
    repo.hub.remember(repo)
    return RepoFiles(repo.id, folder, repo.files, repo)


class RemoteFile(io.RawIOBase):
    """A file of a Hub repo; a read requests exactly those bytes, once.

    HfFileSystem would make two more requests for each file that it opens.
    """

    def __init__(self, repo: HubRepo, name: str) -> None:
        self._repo, self._name, self._size = repo, name, repo.files[name]
        self._position = 0
        self._read: dict[tuple[int, int], bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = self._position
        end = self._size if size < 0 else min(start + size, self._size)
        if end <= start:
            return b""
        self._position = end
        if (start, end) not in self._read:
            self._read[start, end] = self._request(start, end)
        return self._read[start, end]

    def _request(self, start: int, end: int) -> bytes:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

        repo = self._repo
        address = hf_hub_url(repo.id, self._name, repo_type=repo.type, revision=repo.commit)
        headers = build_hf_headers(token=repo.hub.token, library_name="hf-bico") | {"Range": f"bytes={start}-{end - 1}"}
        response = http_backoff("GET", address, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        hf_raise_for_status(response)
        commits = [one.headers.get("X-Repo-Commit", repo.commit) for one in (*response.history, response)]
        if set(commits) != {repo.commit}:
            cause = f"'{self._name}' of '{repo.id}': the Hub answers with another commit than '{repo.commit}'"
            raise HubUnavailableError(cause, _OTHER_ENDPOINT)
        content: bytes = response.content
        if len(content) != end - start:
            raise HubUnavailableError(
                f"'{repo.id}': {end - start} bytes of '{self._name}' were requested and {len(content)} came",
                "try again later; an endpoint other than the Hub's own must serve Range requests",
            )
        return content


@contextmanager
def translate_hub_errors(reference: HubReference, type: str, named: str, hub: Hub | None = None) -> Iterator[None]:
    """Raise huggingface_hub's errors as ours; with `hub`, suggest similar names for a repo that does not exist."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        address = f"{constants.ENDPOINT}/{'datasets/' if type == 'dataset' else ''}{reference.id}"
        raise AccessError(
            f"{named} is gated, and this account has no access",
            f"accept its conditions on {address}, then {LOG_IN}",
        ) from error
    except errors.RevisionNotFoundError as error:
        known = [] if hub is None else hub.revisions(reference, type)
        raise RevisionNotFoundError(
            f"{named}: there is no revision '{reference.revision}'",
            did_you_mean(str(reference.revision), known, "use a branch, tag or commit of that repo"),
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _not_found(reference, type, named, hub) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        if is_offline():
            raise NotCachedError(
                f"{named} is not completely in the cache, and offline mode is on (HF_HUB_OFFLINE)",
                "unset HF_HUB_OFFLINE once, so that it can be downloaded",
            ) from error
        raise _unavailable(named, error.__cause__ or error) from error
    except errors.EntryNotFoundError as error:
        raise RepoNotFoundError(f"{named}: a file is missing: {error}", "name another revision after an @") from error
    except errors.HFValidationError as error:
        raise RepoNotFoundError(f"{named} is not an id of the Hub: {error}", "use OWNER/NAME") from error
    except JSONDecodeError as error:
        raise _unavailable(named, ValueError(NOT_OF_THE_HUB)) from error
    except request_errors() as error:
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            raise TokenError(f"{named}: the Hub refuses this token ({_reason(error)})", LOG_IN) from error
        raise _unavailable(named, error) from error


def _not_found(reference: HubReference, type: str, named: str, hub: Hub | None) -> RepoError:
    if hub is None:
        return RepoNotFoundError(f"{named} is not on the Hub", "check the name")
    other = "dataset" if type == "model" else "model"
    if hub.exists(reference.id, other):
        wanted = _TYPE_NAMES[type]
        return WrongRepoTypeError(f"{named} is a {_TYPE_NAMES[other]}, not a {wanted}", f"name a {wanted} there")
    similar = hub.similar_repo(reference, type) or near_folder(reference.id)
    if similar is None and type == "model":
        similar = near_open_clip(reference)
    hint = f"did you mean '{similar}'?" if similar else "check the name."
    if not hub.has_token:
        hint += f" If it is private, {LOG_IN}"
    elif not similar:
        hint += " If it is private, use a token that may read it"
    place = "neither on the Hub nor a folder here" if "/" not in reference.id else "not on the Hub"
    return RepoNotFoundError(f"{named} is {place}", hint)


def _unavailable(named: str, error: BaseException) -> HubUnavailableError:
    from huggingface_hub import constants

    return HubUnavailableError(
        f"{named}: the Hub at {constants.ENDPOINT} cannot be read: {_reason(error)}", "try again later"
    )


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without addresses and request ids."""
    message = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return str(message).splitlines()[0][:200]
