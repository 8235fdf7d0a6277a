"""May it be pushed; one commit or nothing.

Whether a result may be pushed: to where, by whom, and who would see it. Asks the Hub; changes nothing there.

What a push makes on the Hub to put its files into: a repo, a branch; taken back where the push fails.

Knows that answers can be lost, and that others push too; not what is pushed.

Pushing a result to the Hub: one commit with every file, or the repo stays as it was.

With `push_places`, all that writes to the Hub. Knows folders and records; not how they were made.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import BicoError, PushError, PushRefusedError, RemoteExistsError, RepoError, TokenError, UsageError
from hf_bico.hub.client import MAIN, Hub
from hf_bico.hub.references import REPO_TYPES, HubReference, RepoName, is_hub_id
from hf_bico.hub.retries import LOG_IN, RETRIED, is_offline, request_errors, translate_hub_errors, with_retries
from hf_bico.utils.files import sha256_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """How to push.

    `private` is True, False, or None for the rule: private when anything that it was made from is private or gated, or
    was never on the Hub.
    An existing repo needs `overwrite` (our files replace those of the same name, other weights go, the rest stays) or
    `create_pr`; `revision` is a branch to push to; `force` pushes a port that measured worse than its target.
    """

    private: bool | None = None
    create_pr: bool = False
    revision: str | None = None
    message: str | None = None
    overwrite: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.create_pr and self.revision not in (None, MAIN):
            raise UsageError("--create-pr and --revision were both given", "a pull request goes to the main branch")
        if self.revision is not None and (self.revision.startswith("refs/") or ".." in self.revision):
            raise UsageError(f"--revision is '{self.revision}'", "name a branch; --create-pr opens a pull request")


def require_pushable(repo_id: str, options: PushOptions, hub: Hub) -> str:
    """Make sure, before any work, that this account may push there; returns the whole id."""
    if is_offline():
        raise TokenError(f"'{repo_id}' cannot be pushed to: the Hub is off", "unset HF_HUB_OFFLINE")
    account = _account(hub, repo_id)
    whole = repo_id if "/" in repo_id else f"{account['name']}/{repo_id}"
    if not is_hub_id(whole):
        raise UsageError(f"'{repo_id}' cannot be the name of a Hub repo", "use OWNER/NAME with letters, digits, . _ -")
    owner = whole.partition("/")[0]
    owners = [account["name"], *(org["name"] for org in account.get("orgs") or ())]
    if owner not in owners and not options.create_pr:
        request = ", or open a pull request with --create-pr" if remote_info(hub, whole, None) is not None else ""
        raise TokenError(
            f"the token is of '{account['name']}', who may not push to '{whole}'",
            f"push to one of: {', '.join(f'{name}/...' for name in owners)}{request}",
        )
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise TokenError("the token may only read", "make one that may write, and log in with 'hf auth login'")
    info = remote_info(hub, whole, None)
    exists, whole = info is not None, whole if info is None else str(info.id)  # a renamed repo answers at its old name
    if options.create_pr and not exists:
        raise PushError(f"there is no repo '{whole}' to open a pull request on", "push without --create-pr")
    if exists and not (options.overwrite or options.create_pr) and own_files(hub, whole, options.revision):
        raise already_exists(whole)
    return whole


def require_hidden(repo_id: str, options: PushOptions, restricted: Sequence[str], hub: Hub) -> None:
    """Refuse to put into a public repo what was asked to be private, or is made from what is not public."""
    info = remote_info(hub, repo_id, None)
    if info is None or info.private or options.private is False:
        return
    if options.private:
        raise PushRefusedError(
            f"'{repo_id}' is there already, and public: --private does not change that",
            "push to another repo, or make it private on the Hub first",
        )
    if restricted:
        raise PushRefusedError(
            f"'{repo_id}' is public, and {', '.join(restricted)} behind it is not",
            "push to another repo, or insist with --public",
        )


def _account(hub: Hub, repo_id: str) -> dict[str, Any]:
    from huggingface_hub import get_token

    if not (hub.token or get_token()):
        raise TokenError(f"pushing to '{repo_id}' needs a token", f"{LOG_IN}; the token must be allowed to write")
    with translate_hub_errors(HubReference(repo_id), "model", f"'{repo_id}'"):
        account: dict[str, Any] = with_retries(lambda: hub.api.whoami(token=hub.token))
    return account


def restricted_among(made_from: Sequence[RepoName], hub: Hub) -> list[str]:
    """Those of the repos that are private or gated, or of which that cannot be told; what is no repo counts too."""
    return [
        name for type, name in dict.fromkeys(made_from) if type not in REPO_TYPES or not _is_public(hub, type, name)
    ]


def _is_public(hub: Hub, type: str, repo_id: str) -> bool:
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError, *request_errors()):
        info: Any = with_retries(lambda: hub.api.repo_info(repo_id, repo_type=type))
        return not (info.private or info.gated or info.disabled)
    return False


def remote_info(hub: Hub, repo_id: str, revision: str | None) -> Any:
    """The Hub's answer about a repo; None where there is none."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    with translate_hub_errors(HubReference(repo_id, revision), "model", f"'{repo_id}'"):
        try:
            return with_retries(lambda: hub.api.model_info(repo_id, revision=revision, files_metadata=True))
        except GatedRepoError:
            raise
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return None


def known_info(hub: Hub, repo_id: str, revision: str | None) -> Any:
    """The Hub's answer about a repo and a revision that are there."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    missing = (RepositoryNotFoundError, RevisionNotFoundError)
    with translate_hub_errors(HubReference(repo_id, revision), "model", f"'{repo_id}'"):
        return with_retries(
            lambda: hub.api.model_info(repo_id, revision=revision, files_metadata=True), lagging=missing
        )


def remote_files(hub: Hub, repo_id: str, revision: str | None) -> dict[str, Any]:
    """The files of a repo by name; none where there is no such revision."""
    return files_of(remote_info(hub, repo_id, revision))


def own_files(hub: Hub, repo_id: str, revision: str | None) -> dict[str, Any]:
    """The files that a push would replace; a branch that is where main is has none of its own, like a new one."""
    info = remote_info(hub, repo_id, revision)
    if info is not None and revision not in (None, MAIN) and info.sha == known_info(hub, repo_id, None).sha:
        return {}
    return files_of(info)


def files_of(info: Any) -> dict[str, Any]:
    """The files that an answer about a repo lists, by name, but for what every new repo has."""
    siblings = [] if info is None else info.siblings or []
    return {file.rfilename: file for file in siblings if file.rfilename != ".gitattributes"}


def already_exists(repo_id: str) -> RemoteExistsError:
    return RemoteExistsError(
        f"there is a repo '{repo_id}' already", "replace its files with --overwrite, or open a --create-pr"
    )


_CONFLICT = 409


@dataclass
class CreatedRepo:
    """What this push has made and not filled yet, or may have made: an answer can be lost."""

    repo: bool = False
    private: bool | None = None
    """What the repo was to be; None for its owner's usual."""
    branch: str | None = None
    first: str | None = None
    """The commit that the branch began with."""

    @property
    def name(self) -> str:
        return "repo" if self.repo else f"branch '{self.branch}'"


@contextmanager
def taken_back(hub: Hub, repo_id: str) -> Iterator[CreatedRepo]:
    """After a failure, nothing is left of what was made for the push; where that cannot be done, the error says so."""
    made = CreatedRepo()
    try:
        yield made
    except BaseException as error:
        if not _take_back(hub, repo_id, made):
            error.add_note(f"the empty {made.name} that was made for it could not be deleted")
        raise


def create(hub: Hub, repo_id: str, private: bool | None, made: CreatedRepo) -> None:
    """Have the repo; `made` knows whether it is of this push."""

    made.private = private

    def note(ours: bool) -> None:
        made.repo = ours

    _make(lambda: hub.api.create_repo(repo_id, private=private), note)


def branch_off(hub: Hub, repo_id: str, branch: str, made: CreatedRepo) -> None:
    """Have the branch, begun where the main one is now."""
    if remote_info(hub, repo_id, branch) is not None:
        return
    made.first = str(known_info(hub, repo_id, None).sha)

    def note(ours: bool) -> None:
        made.branch = branch if ours else None

    _make(lambda: hub.api.create_branch(repo_id, branch=branch, revision=made.first), note)


def _make(make: Callable[[], object], note: Callable[[bool], None]) -> None:
    """Make what was not there, and `note` whether it is, or may be, of this push.

    That it is there already says that somebody else was faster, unless an earlier try of ours went without an answer.
    """
    from huggingface_hub.errors import HfHubHTTPError

    tries = 0

    def once() -> None:
        nonlocal tries
        tries += 1
        try:
            make()
        except HfHubHTTPError as error:
            status = error.response.status_code
            note(tries > 1 or status in RETRIED)
            if status != _CONFLICT:
                raise

    note(True)
    with_retries(once)


def _take_back(hub: Hub, repo_id: str, made: CreatedRepo) -> bool:
    """Delete the repo or the branch that this push made and could not fill, unless somebody has filled it since.

    False where that cannot be done: a token may be allowed to write and not to delete.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    with suppress(BicoError, *request_errors()):
        if made.repo and _is_as_made(hub, repo_id, made):
            with_retries(lambda: hub.api.delete_repo(repo_id, missing_ok=True))
        elif made.branch is not None:
            info = remote_info(hub, repo_id, made.branch)
            if info is not None and info.sha == made.first:
                with suppress(RevisionNotFoundError):  # deleted, and the answer lost
                    with_retries(lambda: hub.api.delete_branch(repo_id, branch=str(made.branch)))
        return True
    return False


def _is_as_made(hub: Hub, repo_id: str, made: CreatedRepo) -> bool:
    """Whether a repo is still empty, and is what this push would have made."""
    info = remote_info(hub, repo_id, None)
    if info is not None and made.private not in (None, bool(info.private)):
        return False
    return not files_of(info) and not (made.branch and remote_files(hub, repo_id, made.branch))


_LATEST = 10
"""So many pull requests are looked through for one that was opened before."""
_LOADED = re.compile(
    r"(?:open_clip_)?(?:pytorch_)?model(?:-\d+-of-\d+)?\.(?:safetensors|bin|pt)(?:\.index\.json)?"
    r"|adapter_(?:model\.(?:safetensors|bin)|config\.json)|task_vector\.safetensors"
)
"""What a library would load instead of, or beside, the weights of ours."""


@dataclass(frozen=True)
class Pushed:
    """What a push did."""

    repo: str
    url: str
    commit: str
    private: bool
    changed: bool
    """False where the repo held exactly these files already."""
    pull_request: str | None = None
    because: str | None = None
    """Why it was made private without being asked to."""
    edited_card: bool = False
    """Whether the card was somebody's own, and left as it is."""


def _push(folder: Path, repo_id: str, options: PushOptions, restricted: list[str], hub: Hub) -> Pushed:
    branch = None if options.revision in (None, MAIN) else options.revision
    with taken_back(hub, repo_id) as made:
        if remote_info(hub, repo_id, None) is None:
            private = options.private if options.private is not None else (True if restricted else None)
            create(hub, repo_id, private, made)
        # all that is asked of a repo that was there: a moment ago somebody else may have made it
        require_hidden(repo_id, options, restricted, hub)
        there = own_files(hub, repo_id, options.revision)
        if options.create_pr:
            opened = _opened(folder, repo_id, options, hub)
            if opened is not None:
                return opened
        elif _holds(there, folder):
            return _pushed(hub, repo_id, options.revision, changed=False)
        elif there and not options.overwrite:
            raise already_exists(repo_id)
        if branch is not None and not there:
            branch_off(hub, repo_id, branch, made)
        return _commit(folder, repo_id, options, hub)


def _commit(folder: Path, repo_id: str, options: PushOptions, hub: Hub) -> Pushed:
    """One commit; where the answer is lost or the Hub is busy, what it holds now decides whether to try again."""

    def once() -> Pushed:
        head = known_info(hub, repo_id, options.revision)
        try:
            done: Any = hub.api.create_commit(
                repo_id,
                _operations(folder, files_of(head)),
                commit_message=_title(folder, options),
                revision=options.revision,
                create_pr=options.create_pr,
                parent_commit=None if options.create_pr else head.sha,
            )
        except request_errors() as error:
            found = _carried_out(folder, repo_id, options, hub)
            if found is not None:
                return found
            if options.create_pr and _ran_late(error):  # it may still be opened, and another would be the second
                raise PushError(
                    f"'{repo_id}': nobody said in time whether the pull request is open",
                    "look for it there; to push again opens no second one",
                ) from error
            raise
        url = _address(hub, repo_id, options.revision)
        return Pushed(repo_id, url, done.oid, bool(head.private), done.oid != head.sha, done.pr_url)

    return with_retries(once)


def _ran_late(error: Any) -> bool:
    """Whether nobody said in time if a commit was made; the client's own client has had several names."""
    timed_out = any(kind.__name__ == "TimeoutException" for kind in type(error).__mro__)
    return timed_out and "/commit/" in str(error.request.url)


def _carried_out(folder: Path, repo_id: str, options: PushOptions, hub: Hub) -> Pushed | None:
    """What a commit did that seemed to fail; None where it did nothing, or that cannot be told."""
    with suppress(BicoError, *request_errors()):
        if options.create_pr:
            found = _opened(folder, repo_id, options, hub)
            return None if found is None else replace(found, changed=True)
        if _holds(remote_files(hub, repo_id, options.revision), folder):
            return _pushed(hub, repo_id, options.revision, changed=True)
    return None


def _opened(folder: Path, repo_id: str, options: PushOptions, hub: Hub) -> Pushed | None:
    """The open pull request of this title that holds the files of this folder."""
    asked = partial(hub.api.get_repo_discussions, repo_id, discussion_type="pull_request", discussion_status="open")
    for request in with_retries(lambda: list(islice(asked(), _LATEST))):
        revision = f"refs/pr/{request.num}"
        if request.title == _title(folder, options) and _holds(remote_files(hub, repo_id, revision), folder):
            pushed = _pushed(hub, repo_id, revision, changed=False)
            return replace(pushed, url=_address(hub, repo_id, None), pull_request=request.url)
    return None


def _title(folder: Path, options: PushOptions) -> str:
    return options.message or f"Upload {folder.name} with hf-bico"


def _operations(folder: Path, remote: dict[str, Any]) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Every file of the folder, and the removal of weights in the repo that would be loaded instead of ours."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    ours = _local_files(folder)
    return [
        *(CommitOperationAdd(name, file) for name, file in ours.items()),
        *(CommitOperationDelete(name) for name in _shadowing(remote, ours)),
    ]


def _shadowing(remote: dict[str, Any], ours: dict[str, Path]) -> list[str]:
    return [name for name in remote if name not in ours and _LOADED.fullmatch(name)]


def _local_files(folder: Path) -> dict[str, Path]:
    """The files to push by their names in the repo; hidden ones stay, and none is taken from outside of the folder."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if not file.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        if not file.resolve().is_relative_to(folder.resolve()):
            raise PushError(f"'{name}' is a link out of the folder '{folder.name}'", "put a copy of the file there")
        found[name.as_posix()] = file
    return found


def _holds(remote: dict[str, Any], folder: Path) -> bool:
    """Whether these are exactly the bytes of this folder, and no weights that would shadow them."""
    ours = _local_files(folder)
    same = all(name in remote and _same(remote[name], file) for name, file in ours.items())
    return same and not _shadowing(remote, ours)


def _same(remote: Any, file: Path) -> bool:
    if remote.size != file.stat().st_size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == sha256_of([file])[file.name])
    content = file.read_bytes()
    return bool(remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())


def _pushed(hub: Hub, repo_id: str, revision: str | None, changed: bool) -> Pushed:
    info = known_info(hub, repo_id, revision)
    return Pushed(repo_id, _address(hub, repo_id, revision), str(info.sha), bool(info.private), changed)


def _address(hub: Hub, repo_id: str, revision: str | None) -> str:
    branch = "" if revision in (None, MAIN) else f"/tree/{revision}"
    return f"{hub.api.endpoint}/{repo_id}{branch}"


@contextmanager
def _told_how_to_go_on(line: str | None) -> Iterator[None]:
    """What keeps a finished result from the Hub says how to push it then."""
    try:
        yield
    except RepoError as error:
        if line is None:
            raise
        raise type(error)(error.cause, f"{error.remedy}, then go on with: {line}") from error


@contextmanager
def _goes_on(repo_id: str, options: PushOptions, line: str | None) -> Iterator[None]:
    """Any failure of a push says what to run to go on."""
    state = f"'{repo_id}' is as it was" if not options.create_pr else f"look at '{repo_id}' for a pull request"
    remedy = "push again" if line is None else f"go on with: {line}"
    try:
        with translate_hub_errors(HubReference(repo_id), "model", f"'{repo_id}'"):
            yield
    except PushError:
        raise
    except BicoError as error:
        # what the client raised stands behind ours: either may have been noted on
        left = "; ".join(note for one in (error, error.__cause__) for note in getattr(one, "__notes__", ()))
        raise PushError(f"the push failed, and {left or state}: {error.cause}", remedy) from error
    except (ValueError, RuntimeError, OSError) as error:  # an invalid card, an upload that was refused
        left = "; ".join(getattr(error, "__notes__", ()))
        raise PushError(f"the push failed, and {left or state}: {error}", remedy) from error


def push_line(folder: Path, repo_id: str, options: PushOptions) -> str:
    """The command line of a push."""
    words = ["hf-bico", "push", str(folder), repo_id]
    for option, given in (
        ("--private", options.private is True),
        ("--public", options.private is False),
        ("--create-pr", options.create_pr),
        ("--overwrite", options.overwrite),
        ("--force", options.force),
    ):
        words += [option] if given else []
    for option, value in (("--revision", options.revision), ("--message", options.message)):
        words += [option, value] if value else []
    return shlex.join(words)
