"""Whether a result may be pushed: to where, by whom, and who would see it. Asks the Hub; changes nothing there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hf_bico.errors import PushError, PushRefusedError, RemoteExistsError, TokenError, UsageError
from hf_bico.hub.client import MAIN, Hub
from hf_bico.hub.faults import LOG_IN, again, failures, is_offline, translated
from hf_bico.hub.references import REPO_TYPES, HubReference, RepoName, is_hub_id


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
    with translated(HubReference(repo_id), "model", f"'{repo_id}'"):
        account: dict[str, Any] = again(lambda: hub.api.whoami(token=hub.token))
    return account


def restricted_among(made_from: Sequence[RepoName], hub: Hub) -> list[str]:
    """Those of the repos that are private or gated, or of which that cannot be told; what is no repo counts too."""
    return [
        name for type, name in dict.fromkeys(made_from) if type not in REPO_TYPES or not _is_public(hub, type, name)
    ]


def _is_public(hub: Hub, type: str, repo_id: str) -> bool:
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError, *failures()):
        info: Any = again(lambda: hub.api.repo_info(repo_id, repo_type=type))
        return not (info.private or info.gated or info.disabled)
    return False


def remote_info(hub: Hub, repo_id: str, revision: str | None) -> Any:
    """The Hub's answer about a repo; None where there is none."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    with translated(HubReference(repo_id, revision), "model", f"'{repo_id}'"):
        try:
            return again(lambda: hub.api.model_info(repo_id, revision=revision, files_metadata=True))
        except GatedRepoError:
            raise
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return None


def known_info(hub: Hub, repo_id: str, revision: str | None) -> Any:
    """The Hub's answer about a repo and a revision that are there."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    missing = (RepositoryNotFoundError, RevisionNotFoundError)
    with translated(HubReference(repo_id, revision), "model", f"'{repo_id}'"):
        return again(lambda: hub.api.model_info(repo_id, revision=revision, files_metadata=True), lagging=missing)


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
