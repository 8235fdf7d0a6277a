"""What a push makes on the Hub to put its files into: a repo, a branch; taken back where the push fails.

Knows that answers can be lost, and that others push too; not what is pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hf_bico.errors import BicoError
from hf_bico.hub.client import Hub
from hf_bico.hub.faults import PASSING, again, failures
from hf_bico.push_checks import files_of, known_info, remote_files, remote_info

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
            note(tries > 1 or status in PASSING)
            if status != _CONFLICT:
                raise

    note(True)
    again(once)


def _take_back(hub: Hub, repo_id: str, made: CreatedRepo) -> bool:
    """Delete the repo or the branch that this push made and could not fill, unless somebody has filled it since.

    False where that cannot be done: a token may be allowed to write and not to delete.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    with suppress(BicoError, *failures()):
        if made.repo and _is_as_made(hub, repo_id, made):
            again(lambda: hub.api.delete_repo(repo_id, missing_ok=True))
        elif made.branch is not None:
            info = remote_info(hub, repo_id, made.branch)
            if info is not None and info.sha == made.first:
                with suppress(RevisionNotFoundError):  # deleted, and the answer lost
                    again(lambda: hub.api.delete_branch(repo_id, branch=str(made.branch)))
        return True
    return False


def _is_as_made(hub: Hub, repo_id: str, made: CreatedRepo) -> bool:
    """Whether a repo is still empty, and is what this push would have made."""
    info = remote_info(hub, repo_id, None)
    if info is not None and made.private not in (None, bool(info.private)):
        return False
    return not files_of(info) and not (made.branch and remote_files(hub, repo_id, made.branch))
