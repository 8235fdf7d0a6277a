"""Push a folder to a model repo of the Hub: in one commit, or the repo stays as it was.

Checks who may push and who would see the result, retries lost answers, and deletes a repo or branch that was created
for a failed push. Knows no records: `porting.publish` reads those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import BicoError, PushError, PushRefusedError, RemoteExistsError, RepoError, TokenError, UsageError
from hf_bico.hub.client import MAIN, Hub, sound, translate_hub_errors
from hf_bico.hub.references import REPO_TYPES, HubReference, RepoName, is_hub_id
from hf_bico.hub.retries import LOG_IN, RETRIED, answered, is_offline, request_errors, with_retries
from hf_bico.utils.files import sha256_of
from hf_bico.utils.text import command_line, typed_path

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

_CONFLICT = 409
_SEARCHED_PULL_REQUESTS = 10
_LOADED = re.compile(
    r"(?:open_clip_)?(?:pytorch_)?model(?:-\d+-of-\d+)?\.(?:safetensors|bin|pt)(?:\.index\.json)?"
    r"|adapter_(?:model\.(?:safetensors|bin)|config\.json)|task_vector\.safetensors"
)
"""Files that a library would load instead of, or beside, our weights."""


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


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    repo: str
    url: str
    commit: str
    private: bool
    changed: bool
    """False if the repo already had exactly these files."""
    pull_request: str | None = None
    because: str | None = None
    """Why the repo was made private without being asked to."""
    edited_card: bool = False
    """Whether the user had edited the card, which was pushed as it is."""


# checks


def require_pushable(repo_id: str, options: PushOptions, hub: Hub) -> str:
    """Check before any work that this account may push there, and return the full id."""
    if is_offline():
        raise TokenError(f"'{repo_id}' cannot be pushed to: offline mode is on", "unset HF_HUB_OFFLINE")
    if not hub.has_token:
        raise TokenError(f"pushing to '{repo_id}' needs a token", f"{LOG_IN}; the token must be allowed to write")
    with translate_hub_errors(HubReference(repo_id), "model", f"'{repo_id}'"):
        name, orgs, role = with_retries(lambda: _account(hub.api.whoami(token=hub.token)))
    full_id = repo_id if "/" in repo_id else f"{name}/{repo_id}"
    if not is_hub_id(full_id):
        raise UsageError(f"'{repo_id}' cannot be the name of a Hub repo", "use OWNER/NAME with letters, digits, . _ -")
    info = remote_info(hub, full_id, None)
    owners = [name, *orgs]
    if full_id.partition("/")[0] not in owners and not options.create_pr:
        request = "" if info is None else ", or open a pull request with --create-pr"
        raise TokenError(
            f"the token is of '{name}', who may not push to '{full_id}'",
            f"push to one of: {', '.join(f'{name}/...' for name in owners)}{request}",
        )
    if role == "read":
        raise TokenError("the token is read-only", "make one that may write, and log in with 'hf auth login'")
    if info is not None:
        full_id = str(info.id)  # a renamed repo answers at its old name
    elif options.create_pr:
        raise PushError(f"there is no repo '{full_id}' to open a pull request on", "push without --create-pr")
    replaces = options.overwrite or options.create_pr
    if info is not None and not replaces and _files(_replaced(hub, full_id, options.revision)):
        raise _already_exists(full_id)
    return full_id


def _account(answer: dict[str, Any]) -> tuple[str, list[str], str | None]:
    """Return the name of a token's owner, the organisations, and what the token may do."""
    name, orgs = answer["name"], [org["name"] for org in answer.get("orgs") or ()]
    if not all(isinstance(one, str) for one in (name, *orgs)):
        raise TypeError("no name")
    return name, orgs, ((answer.get("auth") or {}).get("accessToken") or {}).get("role")


def require_hidden(repo_id: str, options: PushOptions, restricted: Sequence[str], hub: Hub) -> None:
    """Refuse a public repo for a result that is to be private, or that `restricted` repos are behind."""
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
            f"'{repo_id}' is public, and it was made from {', '.join(restricted)}, which is not",
            "push to another repo, or use --public anyway",
        )


def restricted_repos(made_from: Sequence[RepoName], hub: Hub) -> list[str]:
    """Return the repos that are not known to be public: private, gated, unreadable, or not on the Hub."""
    repos = dict.fromkeys(made_from)
    return [name for type, name in repos if type not in REPO_TYPES or not _is_public(hub, type, name)]


def _is_public(hub: Hub, type: str, repo_id: str) -> bool:
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError, *request_errors()):
        info: Any = with_retries(lambda: sound(hub.api.repo_info(repo_id, repo_type=type)))
        return not (info.private or info.gated or info.disabled)
    return False


def _already_exists(repo_id: str) -> RemoteExistsError:
    return RemoteExistsError(
        f"there is a repo '{repo_id}' already", "replace its files with --overwrite, or open a --create-pr"
    )


# the remote repo


def remote_info(hub: Hub, repo_id: str, revision: str | None, *, exists: bool = False) -> Any:
    """Return the Hub's info on a repo with its files; None if there is no such repo or revision.

    With `exists`, a missing repo is requested again, then an error: not every server of the Hub may know it yet.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    missing = (RepositoryNotFoundError, RevisionNotFoundError)
    ask = partial(hub.api.model_info, repo_id, revision=revision, files_metadata=True)
    with translate_hub_errors(HubReference(repo_id, revision), "model", f"'{repo_id}'"):
        try:
            return with_retries(lambda: sound(ask()), lagging=missing if exists else ())
        except missing as error:
            if exists or isinstance(error, GatedRepoError):
                raise
            return None


def _files(info: Any) -> dict[str, Any]:
    """Return the files of a repo by name, without the one that every new repo has."""
    siblings = [] if info is None else info.siblings or []
    return {file.rfilename: file for file in siblings if file.rfilename != ".gitattributes"}


def _replaced(hub: Hub, repo_id: str, revision: str | None) -> Any:
    """Return the info on the files that a push would replace; None on a branch that still equals main."""
    info = remote_info(hub, repo_id, revision)
    is_branch = info is not None and revision not in (None, MAIN)
    return None if is_branch and info.sha == remote_info(hub, repo_id, None, exists=True).sha else info


@dataclass
class _Created:
    """The repo or branch that this push has created, or may have (answers get lost), and has not filled yet."""

    repo: bool = False
    private: bool | None = None
    """Requested visibility of the repo; None for its owner's default."""
    branch: str | None = None
    first_commit: str | None = None
    """The commit that the branch started at."""


@contextmanager
def _deleted_on_failure(hub: Hub, repo_id: str) -> Iterator[_Created]:
    """Delete what was created for a push that fails; if that is impossible, note it on the error."""
    created = _Created()
    try:
        yield created
    except BaseException as error:
        if not _delete(hub, repo_id, created):
            name = "repo" if created.repo else f"branch '{created.branch}'"
            error.add_note(f"the empty {name} that was made for it could not be deleted")
        raise


def _delete(hub: Hub, repo_id: str, created: _Created) -> bool:
    """Delete what this push created, unless somebody has filled it since; return False if that fails.

    A token may be allowed to write and not to delete.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    branch = created.branch
    with suppress(BicoError, *request_errors()):
        if created.repo and _is_untouched(hub, repo_id, created):
            with_retries(lambda: hub.api.delete_repo(repo_id, missing_ok=True))
        elif branch is not None:
            info = remote_info(hub, repo_id, branch)
            if info is not None and info.sha == created.first_commit:
                with suppress(RevisionNotFoundError):  # deleted, and the answer lost
                    with_retries(lambda: hub.api.delete_branch(repo_id, branch=branch))
        return True
    return False


def _is_untouched(hub: Hub, repo_id: str, created: _Created) -> bool:
    """Return whether the repo is still empty, and as this push would have created it; or not known to the Hub yet."""
    info = remote_info(hub, repo_id, None)
    if info is not None and created.private not in (None, bool(info.private)):
        return False
    return not _files(info) and not (created.branch and _files(remote_info(hub, repo_id, created.branch)))


def _create_branch(hub: Hub, repo_id: str, branch: str, created: _Created) -> None:
    """Create the branch where main is now, if it does not exist."""
    if remote_info(hub, repo_id, branch) is not None:
        return
    created.first_commit = str(remote_info(hub, repo_id, None, exists=True).sha)

    def note(ours: bool) -> None:
        created.branch = branch if ours else None

    _create(lambda: hub.api.create_branch(repo_id, branch=branch, revision=created.first_commit), note)


def _create(request: Callable[[], object], note: Callable[[bool], None]) -> None:
    """Create a repo or branch, and `note` whether it is, or may be, of this push.

    One that exists already is somebody else's, unless the answer to an earlier try got lost.
    """
    from huggingface_hub.errors import HfHubHTTPError

    tries = count()

    def attempt() -> None:
        is_retry = next(tries) > 0
        try:
            request()
        except HfHubHTTPError as error:
            status = error.response.status_code
            note(is_retry or status in RETRIED)
            if status != _CONFLICT:
                raise

    note(True)
    with_retries(attempt)


# the push


def push_files(folder: Path, repo_id: str, options: PushOptions, restricted: Sequence[str], hub: Hub) -> Pushed:
    """Push the files of a folder, without its hidden files, to a checked repo id; `restricted` repos are behind it."""
    with _deleted_on_failure(hub, repo_id) as created:
        if remote_info(hub, repo_id, None) is None:
            private = True if options.private is None and restricted else options.private
            created.private = private
            _create(lambda: hub.api.create_repo(repo_id, private=private), partial(setattr, created, "repo"))
        # checked for a new repo too: somebody else may just have created it
        require_hidden(repo_id, options, restricted, hub)
        info = _replaced(hub, repo_id, options.revision)
        files = _files(info)
        if options.create_pr:
            if pushed := _find_pull_request(folder, repo_id, options, hub, changed=False):
                return pushed
        elif _holds(files, folder):
            return _pushed(hub, repo_id, options.revision, info, changed=False)
        elif files and not options.overwrite:
            raise _already_exists(repo_id)
        if options.revision not in (None, MAIN) and not files:
            _create_branch(hub, repo_id, str(options.revision), created)
        return _commit(folder, repo_id, options, hub)


def _commit(folder: Path, repo_id: str, options: PushOptions, hub: Hub) -> Pushed:
    """Make one commit; after a lost answer or a busy Hub, look at the repo before trying again."""

    def attempt() -> Pushed:
        head = remote_info(hub, repo_id, options.revision, exists=True)
        try:
            create = partial(
                hub.api.create_commit,
                repo_id,
                _operations(folder, _files(head)),
                commit_message=_title(folder, options),
                revision=options.revision,
                create_pr=options.create_pr,
                parent_commit=None if options.create_pr else head.sha,
            )
            commit: Any = answered(create)
        except request_errors() as error:
            if pushed := _carried_out(folder, repo_id, options, hub):
                return pushed
            if options.create_pr and _timed_out(error):  # it may still be opened, and a retry would open a second one
                raise PushError(
                    f"'{repo_id}': the Hub did not say in time whether the pull request is open",
                    "look for it there; pushing again opens no second one",
                ) from error
            raise
        pushed = _pushed(hub, repo_id, options.revision, head, changed=commit.oid != head.sha)
        return replace(pushed, commit=commit.oid, pull_request=commit.pr_url)

    return with_retries(attempt)


def _timed_out(error: Any) -> bool:
    """Return whether the commit request timed out, by class name: huggingface_hub has changed its HTTP library."""
    is_timeout = any(kind.__name__ == "TimeoutException" for kind in type(error).__mro__)
    return is_timeout and "/commit/" in str(error.request.url)


def _carried_out(folder: Path, repo_id: str, options: PushOptions, hub: Hub) -> Pushed | None:
    """Return what a commit did that seemed to fail; None if it did nothing, or the Hub does not answer."""
    with suppress(BicoError, *request_errors()):
        if options.create_pr:
            return _find_pull_request(folder, repo_id, options, hub, changed=True)
        info = remote_info(hub, repo_id, options.revision)
        if _holds(_files(info), folder):
            return _pushed(hub, repo_id, options.revision, info, changed=True)
    return None


def _find_pull_request(folder: Path, repo_id: str, options: PushOptions, hub: Hub, changed: bool) -> Pushed | None:
    """Return the open pull request with this title and these files."""
    search = partial(hub.api.get_repo_discussions, repo_id, discussion_type="pull_request", discussion_status="open")
    for request in with_retries(lambda: list(islice(search(), _SEARCHED_PULL_REQUESTS))):
        if request.title == _title(folder, options):
            info = remote_info(hub, repo_id, f"refs/pr/{request.num}")
            if _holds(_files(info), folder):
                return replace(_pushed(hub, repo_id, None, info, changed), pull_request=request.url)
    return None


def _pushed(hub: Hub, repo_id: str, revision: str | None, info: Any, changed: bool) -> Pushed:
    branch = "" if revision in (None, MAIN) else f"/tree/{revision}"
    return Pushed(repo_id, f"{hub.api.endpoint}/{repo_id}{branch}", str(info.sha), bool(info.private), changed)


def _title(folder: Path, options: PushOptions) -> str:
    return options.message or f"Upload {folder.name} with hf-bico"


def _operations(folder: Path, remote: dict[str, Any]) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Add every file of the folder, and delete weights that would be loaded instead of ours."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    ours = _local_files(folder)
    return [
        *(CommitOperationAdd(name, file) for name, file in ours.items()),
        *(CommitOperationDelete(name) for name in _shadowing(remote, ours)),
    ]


def _shadowing(remote: dict[str, Any], ours: dict[str, Path]) -> list[str]:
    return [name for name in remote if name not in ours and _LOADED.fullmatch(name)]


def _local_files(folder: Path) -> dict[str, Path]:
    """Return the files to push by their names in the repo; refuse links out of the folder.

    Hidden files stay here, but for the results that the Hub reads.
    """
    from huggingface_hub import constants

    files = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        parts = name.parts[1:] if name.parts[0] == constants.EVAL_RESULTS_FOLDER else name.parts
        if not file.is_file() or any(part.startswith(".") for part in parts):
            continue
        if not file.resolve().is_relative_to(folder.resolve()):
            raise PushError(f"'{name}' is a link out of the folder '{folder.name}'", "put a copy of the file there")
        files[name.as_posix()] = file
    return files


def _holds(remote: dict[str, Any], folder: Path) -> bool:
    """Return whether the repo has exactly the bytes of this folder, and no weights that would shadow them."""
    ours = _local_files(folder)
    same = all(name in remote and _same(remote[name], file) for name, file in ours.items())
    return same and not _shadowing(remote, ours)


def _same(remote: Any, file: Path) -> bool:
    from huggingface_hub.utils.sha import git_hash

    if remote.size != file.stat().st_size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == sha256_of([file])[file.name])
    return bool(remote.blob_id == git_hash(file.read_bytes()))


# errors


def push_command(folder: Path, repo_id: str, options: PushOptions) -> str:
    """Return the command line of a push."""
    flags = {
        "--private": options.private is True,
        "--public": options.private is False,
        "--create-pr": options.create_pr,
        "--overwrite": options.overwrite,
        "--force": options.force,
    }
    words = ["hf-bico", "push", typed_path(folder), repo_id, *(flag for flag, given in flags.items() if given)]
    for option, value in (("--revision", options.revision), ("--message", options.message)):
        words += [option, value] if value else []
    return command_line(words)


@contextmanager
def suggest_push(command: str | None) -> Iterator[None]:
    """Add the command that pushes a finished result to the remedy of a RepoError."""
    try:
        yield
    except RepoError as error:
        if command is None:
            raise
        raise type(error)(error.cause, f"{error.remedy}, then go on with: {command}") from error


@contextmanager
def translate_push_errors(repo_id: str, options: PushOptions, command: str | None) -> Iterator[None]:
    """Raise any failure of a push as a PushError, which says what state the repo is in and how to push again."""
    state = f"'{repo_id}' is as it was" if not options.create_pr else f"look at '{repo_id}' for a pull request"
    remedy = "push again" if command is None else f"go on with: {command}"
    try:
        with translate_hub_errors(HubReference(repo_id), "model", f"'{repo_id}'"):
            yield
    except PushError:
        raise
    except (BicoError, ValueError, RuntimeError, OSError) as error:  # also an invalid card, or a refused upload
        # a note may be on huggingface_hub's error, which is the cause of ours
        notes = "; ".join(note for one in (error, error.__cause__) for note in getattr(one, "__notes__", ()))
        cause = error.cause if isinstance(error, BicoError) else error
        raise PushError(f"the push failed, and {notes or state}: {cause}", remedy) from error
