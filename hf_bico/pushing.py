"""Pushing a result to the Hub: one commit with every file, or the repo stays as it was.

The only module that writes to the Hub. Knows folders and records; not how they were made.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.cards.card import CARD_FILE, render_card, write_card
from hf_bico.checkpoints import sha256_of
from hf_bico.errors import BicoError, OutputError, PushError, PushRefusedError
from hf_bico.hub.client import MAIN, Hub
from hf_bico.hub.faults import translated
from hf_bico.hub.references import LOCAL, HubReference, RepoName
from hf_bico.push_checks import (
    PushOptions,
    already_exists,
    remote_files,
    remote_info,
    require_hidden,
    require_pushable,
    restricted_among,
)
from hf_bico.record import Made, Record, read_any
from hf_bico.results import headline, is_worse

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

_TRIES = 3
_FINAL = (400, 401, 403, 404, 409, 412, 413)
"""Answers that do not change by asking again: refused, or somebody else pushed meanwhile."""
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


def push_folder(
    folder: Path,
    repo_id: str,
    options: PushOptions | None = None,
    hub: Hub | None = None,
    *,
    made_from: Sequence[RepoName] | None = None,
    kept: bool = True,
) -> Pushed:
    """Push a folder that this tool wrote; the same push twice changes nothing.

    `made_from` are the Hub repos behind it where the folder has no record; a folder that is not `kept` cannot be
    pushed again later.
    """
    options, hub = options or PushOptions(), hub or Hub()
    if not folder.is_dir():
        raise PushError(f"there is no folder '{folder}'", "name a folder that hf-bico wrote")
    record = read_any(folder) if made_from is None else None
    if record is not None:
        _require_whole(folder, record)
        made_from = _repos_of(record)
        if isinstance(record, Record) and is_worse(record) and not options.force:
            line = push_line(folder, repo_id, replace(options, force=True))
            raise PushRefusedError(
                f"{headline(record)} It is not pushed.", f"insist with: {line}" if kept else "insist with force=True"
            )
    whole = require_pushable(repo_id, replace(options, overwrite=True), hub)
    replaces = not options.create_pr and options.revision in (None, MAIN)
    if replaces and record is not None and any(name.lower() == whole.lower() for _, name in made_from or ()):
        raise PushRefusedError(f"this was made from '{whole}', which a push would replace", "push to another repo")
    edited = record is not None and not _made_for(whole, options.revision, record, folder)
    restricted = restricted_among(made_from or [LOCAL], hub)
    with _goes_on(whole, options, push_line(folder, whole, options) if kept else None):
        pushed = _push(folder, whole, options, restricted, hub)
    because = ", ".join(restricted) + " behind it is not public"
    unasked = pushed.private and options.private is None and restricted
    return replace(pushed, because=because if unasked else None, edited_card=edited)


def _push(folder: Path, repo_id: str, options: PushOptions, restricted: list[str], hub: Hub) -> Pushed:
    created = False
    if remote_info(hub, repo_id, None) is None:
        private = options.private if options.private is not None else (True if restricted else None)
        created = _create(hub, repo_id, private)
    if not created:
        require_hidden(repo_id, options, restricted, hub)
        if not options.create_pr and _is_there(hub, repo_id, options.revision, folder):
            return _pushed(hub, repo_id, options.revision, changed=False)
        if not (options.overwrite or options.create_pr) and remote_files(hub, repo_id, options.revision):
            raise already_exists(repo_id)
    branch = None if options.revision in (None, MAIN) else options.revision
    first = None if branch is None else _branch(hub, repo_id, branch)
    try:
        return _commit(folder, repo_id, options, hub)
    except BaseException as error:
        if not _take_back(hub, repo_id, branch, first, created):
            made = f"branch '{branch}'" if branch is not None and not created else "repo"
            error.add_note(f"the empty {made} that was made for it could not be deleted")
        raise


def _create(hub: Hub, repo_id: str, private: bool | None) -> bool:
    """Whether this call made the repo; somebody else may have done so a moment ago."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hub.api.create_repo(repo_id, private=private)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        return False
    return True


def _branch(hub: Hub, repo_id: str, branch: str) -> str | None:
    """Have the branch; its first commit if this call made it."""
    from huggingface_hub.errors import HfHubHTTPError

    if remote_info(hub, repo_id, branch) is not None:
        return None
    try:
        hub.api.create_branch(repo_id, branch=branch)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        return None
    return str(remote_info(hub, repo_id, branch).sha)


def _take_back(hub: Hub, repo_id: str, branch: str | None, first: str | None, created: bool) -> bool:
    """Delete the repo or the branch that this push made and could not fill, unless somebody has filled it since.

    False where that cannot be done: a token may be allowed to write and not to delete.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        filled = remote_files(hub, repo_id, None) or (branch is not None and remote_files(hub, repo_id, branch))
        if created and not filled:
            hub.api.delete_repo(repo_id, missing_ok=True)
        elif branch is not None and first is not None:
            info = remote_info(hub, repo_id, branch)
            if info is not None and info.sha == first:
                hub.api.delete_branch(repo_id, branch=branch)
    except (BicoError, HTTPError):
        return False
    return True


def _commit(folder: Path, repo_id: str, options: PushOptions, hub: Hub) -> Pushed:
    """One commit; where the answer is lost or the Hub is busy, what it holds now decides whether to try again."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    for attempt in range(_TRIES):
        head = remote_info(hub, repo_id, options.revision)
        try:
            done: Any = hub.api.create_commit(
                repo_id,
                _operations(folder, remote_files(hub, repo_id, options.revision)),
                commit_message=options.message or f"Upload {folder.name} with hf-bico",
                revision=options.revision,
                create_pr=options.create_pr,
                parent_commit=None if options.create_pr or head is None else head.sha,
            )
        except (HTTPError, ConnectionError) as error:
            if not options.create_pr and _is_there(hub, repo_id, options.revision, folder):
                return _pushed(hub, repo_id, options.revision, changed=True)
            refused = isinstance(error, HfHubHTTPError) and error.response.status_code in _FINAL
            if refused or options.create_pr or attempt == _TRIES - 1:
                raise
            time.sleep(2.0**attempt)
            continue
        changed = head is None or done.oid != head.sha
        private = head is not None and bool(head.private)
        url = _address(hub, repo_id, options.revision)
        return Pushed(repo_id, url, done.oid, private, changed, done.pr_url)
    raise AssertionError("unreachable")


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


def _require_whole(folder: Path, record: Record | Made) -> None:
    """The folder must hold the weights that its record speaks of."""
    files = record.output.files if record.output is not None else {}
    for name, digest in files.items():
        file = folder / Path(name).name
        if not file.is_file() or sha256_of([file])[file.name] != digest:
            raise PushError(
                f"'{name}' in '{folder.name}' is not the file that the record speaks of",
                "port again, or get it from where the folder was copied",
            )


def _is_there(hub: Hub, repo_id: str, revision: str | None, folder: Path) -> bool:
    """Whether the repo holds exactly the bytes of this folder, and no weights that would shadow them."""
    remote, ours = remote_files(hub, repo_id, revision), _local_files(folder)
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
    info = remote_info(hub, repo_id, revision)
    return Pushed(repo_id, _address(hub, repo_id, revision), str(info.sha), bool(info.private), changed)


def _address(hub: Hub, repo_id: str, revision: str | None) -> str:
    branch = "" if revision in (None, MAIN) else f"/tree/{revision}"
    return f"{hub.api.endpoint}/{repo_id}{branch}"


def _repos_of(record: Record | Made) -> list[RepoName]:
    """The Hub repos that a result was made from, with their types."""
    data = record.data if isinstance(record, Record) else None
    repos = [("model", model.id) for model in record.models if model.commit is not None]
    if data is not None and data.commit is not None:
        repos.append(("dataset", data.id))
    local = any(model.commit is None for model in record.models) or (data is not None and data.commit is None)
    return [*repos, LOCAL] if local else repos


def _made_for(repo_id: str, revision: str | None, record: Record | Made, folder: Path) -> bool:
    """Put the repo's name into record and card; False for a card that somebody edited, which stays as it is."""
    card, output = folder / CARD_FILE, record.output
    ours = not card.is_file() or card.read_bytes() == render_card(record).encode()
    if output is None or (output.repo, output.revision) == (repo_id, revision):
        return ours
    named = replace(record, output=replace(output, repo=repo_id, revision=revision))
    try:
        if ours:
            write_card(named, folder)
        named.write(folder)
    except (OSError, ValueError) as error:
        raise OutputError(f"'{folder.name}' cannot be written: {error}", "push a copy of the folder") from error
    return ours


@contextmanager
def _goes_on(repo_id: str, options: PushOptions, line: str | None) -> Iterator[None]:
    """Any failure of a push says what to run to go on."""
    state = f"'{repo_id}' is as it was" if not options.create_pr else f"look at '{repo_id}' for a pull request"
    remedy = "push again" if line is None else f"go on with: {line}"
    try:
        with translated(HubReference(repo_id), "model", f"'{repo_id}'"):
            yield
    except PushError:
        raise
    except BicoError as error:
        # what the client raised, and what was noted on it, stands behind ours
        left = "; ".join(getattr(error.__cause__ or error, "__notes__", ()))
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
