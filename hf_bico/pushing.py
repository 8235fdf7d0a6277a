"""Pushing a result to the Hub: one commit with every file, or the repo stays as it was.

The only module that writes to the Hub. Knows folders and records; not how they were made.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.cards.card import CARD_FILE, render_card, write_card
from hf_bico.checkpoints import PICKLES, sha256_of
from hf_bico.errors import (
    BicoError,
    PushError,
    PushRefusedError,
    RemoteExistsError,
    TokenError,
    UsageError,
)
from hf_bico.hub.client import LOG_IN, MAIN, Hub, again, is_offline, translated
from hf_bico.hub.references import HubReference, is_hub_id
from hf_bico.record import RECORD_FILE, Record, read_record
from hf_bico.report import headline, is_worse

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

_TRIES = 3
_FINAL = (400, 401, 403, 404, 409, 412, 413)
"""Answers that do not change by asking again: refused, or somebody else pushed meanwhile."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin.index.json", *PICKLES)
_SHADOWS = ("adapter_config.json",)


RepoName = tuple[str, str]
"""The type and id of a Hub repo."""


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """How to push.

    `private` is True, False, or None for the rule: private when anything that it was made from is private or gated.
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
        raise TokenError(
            f"the token is of '{account['name']}', who may not push to '{whole}'",
            f"push to one of: {', '.join(f'{name}/...' for name in owners)}, or open a pull request with --create-pr",
        )
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise TokenError("the token may only read", "make one that may write, and log in with 'hf auth login'")
    exists = _info(hub, whole, None) is not None
    if options.create_pr and not exists:
        raise PushError(f"there is no repo '{whole}' to open a pull request on", "push without --create-pr")
    if exists and not (options.overwrite or options.create_pr) and _files(hub, whole, options.revision):
        raise _exists(whole)
    return whole


def push_folder(
    folder: Path,
    repo_id: str,
    options: PushOptions | None = None,
    hub: Hub | None = None,
    made_from: Sequence[RepoName] | None = None,
) -> Pushed:
    """Push a folder that this tool wrote; the same push twice changes nothing.

    `made_from` are the Hub repos behind it where the folder has no record.
    """
    options, hub = options or PushOptions(), hub or Hub()
    if not folder.is_dir():
        raise PushError(f"there is no folder '{folder}'", "name a folder that 'hf-bico port' wrote")
    record = read_record(folder) if (folder / RECORD_FILE).is_file() else None
    if record is None and made_from is None:
        read_record(folder)  # says what is missing
    if record is not None and is_worse(record) and not options.force:
        raise PushRefusedError(f"{headline(record)} It is not pushed.", "insist with --force")
    whole = require_pushable(repo_id, replace(options, overwrite=True), hub)
    if record is not None:
        record = _made_for(whole, record, folder)
    private = _private(options, _repos_of(record) if record else made_from or [], hub)
    with _goes_on(folder, whole, options):
        return _push(folder, whole, options, private, hub)


def _push(folder: Path, repo_id: str, options: PushOptions, private: bool | None, hub: Hub) -> Pushed:
    before = _info(hub, repo_id, None)
    if before is not None:
        if private and not before.private and not options.create_pr:
            raise PushRefusedError(
                f"'{repo_id}' is public, and what this was made from is private or gated",
                "push to another repo, or insist with --public",
            )
        if not options.create_pr and _is_there(hub, repo_id, options.revision, folder):
            return _pushed(hub, repo_id, options.revision, changed=False)
        if not (options.overwrite or options.create_pr) and _files(hub, repo_id, options.revision):
            raise _exists(repo_id)
    else:
        again(lambda: hub.api.create_repo(repo_id, private=private, exist_ok=True))
    try:
        return _commit(folder, repo_id, options, hub)
    except BaseException:
        if before is None:
            _take_back(hub, repo_id)
        raise


def _commit(folder: Path, repo_id: str, options: PushOptions, hub: Hub) -> Pushed:
    """One commit; where the answer is lost or the Hub is busy, what it holds now decides whether to try again."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    if options.revision not in (None, MAIN):
        again(lambda: hub.api.create_branch(repo_id, branch=str(options.revision), exist_ok=True))
    for attempt in range(_TRIES):
        head = _info(hub, repo_id, options.revision)
        try:
            done: Any = hub.api.create_commit(
                repo_id,
                _operations(folder, _files(hub, repo_id, options.revision)),
                commit_message=options.message or f"Upload {folder.name} with hf-bico",
                revision=options.revision,
                create_pr=options.create_pr,
                parent_commit=None if options.create_pr or head is None else head.sha,
            )
            return replace(
                _pushed(hub, repo_id, options.revision, changed=head is None or done.oid != head.sha),
                commit=done.oid,
                pull_request=done.pr_url,
            )
        except (HTTPError, ConnectionError) as error:
            if not options.create_pr and _is_there(hub, repo_id, options.revision, folder):
                return _pushed(hub, repo_id, options.revision, changed=True)
            refused = isinstance(error, HfHubHTTPError) and error.response.status_code in _FINAL
            if refused or options.create_pr or attempt == _TRIES - 1:
                raise
            time.sleep(2.0**attempt)
    raise AssertionError("unreachable")


def _operations(folder: Path, remote: dict[str, Any]) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Every file of the folder, and the removal of weights in the repo that would be loaded instead of ours."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    ours = _local_files(folder)
    stale = [name for name in remote if name not in ours and (name.endswith(_WEIGHTS) or name in _SHADOWS)]
    return [
        *(CommitOperationAdd(name, file) for name, file in ours.items()),
        *(CommitOperationDelete(name) for name in stale if "/" not in name),
    ]


def _local_files(folder: Path) -> dict[str, Path]:
    return {file.name: file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.startswith(".")}


def _files(hub: Hub, repo_id: str, revision: str | None) -> dict[str, Any]:
    """The files of a repo by name, but for what every new repo has; empty where there is no such revision."""
    info = _info(hub, repo_id, revision)
    siblings = [] if info is None else info.siblings or []
    return {file.rfilename: file for file in siblings if file.rfilename != ".gitattributes"}


def _is_there(hub: Hub, repo_id: str, revision: str | None, folder: Path) -> bool:
    """Whether the repo holds exactly the bytes of this folder, and no weights that would shadow them."""
    remote, ours = _files(hub, repo_id, revision), _local_files(folder)
    return all(name in remote and _same(remote[name], file) for name, file in ours.items()) and not any(
        "/" not in name and name.endswith(_WEIGHTS) and name not in ours for name in remote
    )


def _same(remote: Any, file: Path) -> bool:
    if remote.size != file.stat().st_size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == sha256_of([file])[file.name])
    content = file.read_bytes()
    return bool(remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())


def _pushed(hub: Hub, repo_id: str, revision: str | None, changed: bool) -> Pushed:
    info = _info(hub, repo_id, revision)
    url = f"{hub.api.endpoint}/{repo_id}"
    return Pushed(repo_id, url, str(info.sha), bool(info.private), changed)


def _info(hub: Hub, repo_id: str, revision: str | None) -> Any:
    """The Hub's answer about a repo; None where there is none."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return again(lambda: hub.api.model_info(repo_id, revision=revision, files_metadata=True))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None


def _take_back(hub: Hub, repo_id: str) -> None:
    """Delete a repo that this push created and could not fill."""
    try:
        if not _files(hub, repo_id, None):
            hub.api.delete_repo(repo_id, missing_ok=True)
    except Exception:  # the first error is the one to show
        return


def _account(hub: Hub, repo_id: str) -> dict[str, Any]:
    from huggingface_hub import get_token

    if not (hub.token or get_token()):
        raise TokenError(f"pushing to '{repo_id}' needs a token", f"{LOG_IN}; the token must be allowed to write")
    with translated(HubReference(repo_id), "model", f"'{repo_id}'"):
        account: dict[str, Any] = again(lambda: hub.api.whoami(token=hub.token))
    return account


def _private(options: PushOptions, made_from: Sequence[RepoName], hub: Hub) -> bool | None:
    """What was asked for; else private if anything behind it is, or can no longer be seen; else as the Hub does."""
    if options.private is not None:
        return options.private
    return True if any(_is_restricted(hub, *repo) for repo in made_from) else None


def _is_restricted(hub: Hub, type: str, repo_id: str) -> bool:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info: Any = again(lambda: hub.api.repo_info(repo_id, repo_type=type))
    except RepositoryNotFoundError:
        return True
    return bool(info.private or info.gated)


def _repos_of(record: Record) -> list[RepoName]:
    """The Hub repos that a result was made from, with their types."""
    models = [record.source, record.source.base, record.target]
    repos = [("model", model.id) for model in models if model is not None and model.commit is not None]
    if record.data is not None and record.data.commit is not None:
        repos.append(("dataset", record.data.id))
    return repos


def _made_for(repo_id: str, record: Record, folder: Path) -> Record:
    """The folder's record and card, with the repo's name in them; a card that somebody edited stays as it is."""
    if record.output is None or record.output.repo == repo_id:
        return record
    named = replace(record, output=replace(record.output, repo=repo_id))
    card = folder / CARD_FILE
    if not card.is_file() or card.read_text(encoding="utf-8") == render_card(record):
        write_card(named, folder)
    named.write(folder)
    return named


@contextmanager
def _goes_on(folder: Path, repo_id: str, options: PushOptions) -> Iterator[None]:
    """Any failure of a push says what to run to go on."""
    line = _push_line(folder, repo_id, options)
    state = f"'{repo_id}' is as it was" if not options.create_pr else f"look at '{repo_id}' for a pull request"
    try:
        with translated(HubReference(repo_id), "model", f"'{repo_id}'"):
            yield
    except PushError:
        raise
    except BicoError as error:
        raise PushError(f"the push failed, and {state}: {error.cause}", f"go on with: {line}") from error
    except (ValueError, RuntimeError, OSError) as error:  # an invalid card, an upload that was refused
        raise PushError(f"the push failed, and {state}: {error}", f"go on with: {line}") from error


def _push_line(folder: Path, repo_id: str, options: PushOptions) -> str:
    words = ["hf-bico", "push", str(folder), repo_id]
    for option, given in (
        ("--private", options.private is True),
        ("--public", options.private is False),
        ("--create-pr", options.create_pr),
        ("--overwrite", options.overwrite),
        ("--force", options.force),
    ):
        words += [option] if given else []
    words += ["--revision", options.revision] if options.revision else []
    return shlex.join(words)


def _exists(repo_id: str) -> RemoteExistsError:
    return RemoteExistsError(
        f"there is a repo '{repo_id}' already", "replace its files with --overwrite, or open a --create-pr"
    )
