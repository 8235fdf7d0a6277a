"""Repos on the Hub: pinned to a commit, their files, the headers of their weights, and downloads through the cache.

Everything that is read from the Hub comes through here, or as a `remote_file`. Knows repos and files; not what is in
them.
"""

from __future__ import annotations

import builtins
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hf_bico.errors import (
    AccessError,
    BrokenWeightsError,
    EmptyRepoError,
    HubUnavailableError,
    NotCachedError,
    RepoError,
    RepoNotFoundError,
    RevisionNotFoundError,
    TokenError,
    WrongRepoTypeError,
)
from hf_bico.hub import open_clip_names
from hf_bico.hub.references import HubReference, near_folder
from hf_bico.spelling import did_you_mean
from hf_bico.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"
MAIN = "main"
CONVERSION_BOT = "SFconvertbot"
_PASSING = (408, 429, 500, 502, 503, 504)
_WAITS = (1.0, 2.0, 4.0)
_ODD_NAMES = ("..", "\\", "\0")
_KINDS = {"model": "model", "dataset": "data set"}

Downloaded = Callable[[int], None]
"""Called with the number of bytes that have arrived since the last call."""

Result = TypeVar("Result")


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
                    again(lambda: self.hub.api.hf_hub_download(self.id, name, **options))  # noqa: B023
        except OSError as error:
            raise RepoError(
                f"'{self.id}' cannot be put into the cache: {error.strerror or error}",
                "make room, or set HF_HOME to another folder",
            ) from error
        return self.hub.snapshot(self.id, self.type, self.commit)

    def header(self, name: str) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a safetensors file, by one Range request."""
        from huggingface_hub.errors import SafetensorsParsingError

        try:
            with translated(self.asked, self.type, f"'{self.id}'"):
                where: dict[str, Any] = {"revision": self.commit, "repo_type": self.type}
                metadata = again(lambda: self.hub.api.parse_safetensors_file_metadata(self.id, name, **where))
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
            info: Any = again(lambda: self.api.repo_info(reference.id, files_metadata=True, **where))
            if info.gated:
                again(lambda: self.api.auth_check(info.id, repo_type=type))
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
            requests = again(
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
            commits = again(lambda: self.api.list_repo_commits(repo.id, repo_type=repo.type, revision=repo.commit))
        return commits[1].commit_id if len(commits) > 1 else None

    def exists(self, repo_id: str, type: str) -> bool:
        """Whether there is such a repo; no, where that cannot be told."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        try:
            return bool(self.api.repo_exists(repo_id, repo_type=type))
        except HTTPError:
            return False

    def revisions(self, reference: HubReference, type: str) -> list[str]:
        """The branches and tags of a repo; none, where that cannot be told."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        try:
            found = self.api.list_repo_refs(reference.id, repo_type=type)
        except HTTPError:
            return []
        return [ref.name for ref in (*found.branches, *found.tags)]

    def near(self, reference: HubReference, type: str) -> str | None:
        """The id of a repo whose name is like this one's."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        name = reference.id.rpartition("/")[2]
        listed = self.api.list_models if type == "model" else self.api.list_datasets
        try:
            found = [info.id for info in listed(search=name, limit=20)]
            if "/" in reference.id:
                found += [info.id for info in listed(author=reference.id.partition("/")[0], limit=200)]
        except HTTPError:  # a hint is not worth an error of its own
            found = []
        by_name = {known.rpartition("/")[2].lower(): known for known in found if known != reference.id}
        whole = get_close_matches(reference.id, found, n=1, cutoff=0.8)
        last = get_close_matches(name.lower(), by_name, n=1, cutoff=0.8)
        return whole[0] if whole else by_name[last[0]] if last else None


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


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def again(call: Callable[[], Result]) -> Result:
    """The call, repeated with growing waits while the Hub is only busy: not all that the client asks is."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    for wait in _WAITS:
        try:
            return call()
        except HfHubHTTPError as error:
            if error.response.status_code not in _PASSING:
                raise
            asked = error.response.headers.get("Retry-After", "")
            time.sleep(min(float(asked), 60.0) if asked.isdigit() else wait)
        except HTTPError:
            time.sleep(wait)
    return call()


@contextmanager
def translated(reference: HubReference, type: str, named: str, hub: Hub | None = None) -> Iterator[None]:
    """Turn what the client raises into our errors; with `hub`, a repo that is not found gets near names."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError as AnyHTTPError  # type: ignore[attr-defined]

    try:
        yield
    except errors.GatedRepoError as error:
        raise AccessError(
            f"{named} is gated, and this account has not been let in",
            f"accept its conditions on {_address(reference, type)}, then {LOG_IN}",
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
                f"{named} is not whole in the cache, and the Hub is off (HF_HUB_OFFLINE)",
                "unset HF_HUB_OFFLINE once, so that it can be downloaded",
            ) from error
        raise _unavailable(named, error.__cause__ or error) from error
    except errors.EntryNotFoundError as error:
        raise RepoNotFoundError(f"{named}: a file is missing: {error}", "name another revision after an @") from error
    except errors.HFValidationError as error:
        raise RepoNotFoundError(f"{named} is not an id of the Hub: {error}", "use OWNER/NAME") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise TokenError(f"{named}: the Hub refuses this token ({_reason(error)})", LOG_IN) from error
        raise _unavailable(named, error) from error
    except (AnyHTTPError, ConnectionError) as error:
        raise _unavailable(named, error) from error


def _not_found(reference: HubReference, type: str, named: str, hub: Hub | None) -> RepoError:
    if hub is None:
        return RepoNotFoundError(f"{named} is not on the Hub", "check the name")
    other = "dataset" if type == "model" else "model"
    if hub.exists(reference.id, other):
        return WrongRepoTypeError(f"{named} is a {_KINDS[other]}, not a {_KINDS[type]}", f"name a {_KINDS[type]} there")
    near = hub.near(reference, type) or near_folder(reference.id)
    if near is None and type == "model":
        near = open_clip_names.near(reference)
    hint = f"did you mean '{near}'?" if near else "check the name."
    if not _has_token(hub):
        hint += f" If it is private, {LOG_IN}"
    elif not near:
        hint += " If it is private, use a token that may read it"
    place = "neither on the Hub nor a folder here" if "/" not in reference.id else "not on the Hub"
    return RepoNotFoundError(f"{named} is {place}", hint)


def _has_token(hub: Hub) -> bool:
    from huggingface_hub import get_token

    return bool(hub.token or get_token())


def _address(reference: HubReference, type: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if type == 'dataset' else ''}{reference.id}"


def _unavailable(named: str, error: BaseException) -> HubUnavailableError:
    from huggingface_hub import constants

    return HubUnavailableError(
        f"{named}: the Hub at {constants.ENDPOINT} cannot be read: {_reason(error)}", "try again in a while"
    )


def _reason(error: BaseException) -> str:
    """The first line of an error, without addresses and request numbers."""
    message = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return str(message).splitlines()[0][:200]


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
