"""What the Hub's client raises, as our errors with a remedy; and patience while the Hub is only busy.

Knows what can go wrong; asks for no repo itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Any, Protocol, TypeVar

from hf_bico.errors import (
    AccessError,
    HubUnavailableError,
    NotCachedError,
    RepoError,
    RepoNotFoundError,
    RevisionNotFoundError,
    TokenError,
    WrongRepoTypeError,
)
from hf_bico.hub.references import HubReference, near_folder, near_open_clip
from hf_bico.utils.text import did_you_mean

LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"
PASSING = (408, 429, 500, 502, 503, 504)
"""Answers of a Hub that is only busy; whether it did what was asked is not known."""
ANSWER = 60.0
"""Seconds for which an answer is waited for; the client itself would wait for ever."""
_CONNECTION = 20.0
_WAITS = (1.0, 2.0, 4.0)
_LONGEST = 60.0
_KINDS = {"model": "model", "dataset": "data set"}

Result = TypeVar("Result")


class Neighbours(Protocol):
    """Whoever can tell what else is on the Hub, where a name leads nowhere."""

    @property
    def token(self) -> str | None: ...
    def exists(self, repo_id: str, type: str) -> bool: ...
    def revisions(self, reference: HubReference, type: str) -> list[str]: ...
    def near(self, reference: HubReference, type: str) -> str | None: ...


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def failures() -> tuple[type[Exception], ...]:
    """What the client raises where the Hub fails: refusals, broken connections, a page where an answer should be."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return (HTTPError, ConnectionError, JSONDecodeError)


def with_retries(call: Callable[[], Result], lagging: tuple[type[Exception], ...] = ()) -> Result:
    """The call, repeated with growing waits while the Hub is only busy: not all that the client asks is.

    So is what ends in `lagging`, of things that are known to be there: not every machine of the Hub may know them yet.
    A call that changes something must bear that it was done before: an answer can be lost.
    """
    for wait in _WAITS:
        _wait_not_for_ever()
        try:
            return call()
        except failures() as error:
            if not (isinstance(error, lagging) or _passes(error)):
                raise
            time.sleep(_asked_wait(error) or wait)
    _wait_not_for_ever()
    return call()


def _passes(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    return not isinstance(error, HfHubHTTPError) or error.response.status_code in PASSING


def _asked_wait(error: Exception) -> float | None:
    """The seconds that a busy Hub asks for."""
    response = getattr(error, "response", None)
    asked = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(asked), _LONGEST) if asked.isdigit() else None


def _wait_not_for_ever() -> None:
    """Let a request that nobody answers end."""
    from huggingface_hub import get_session

    before_each = get_session().event_hooks["request"]  # of a new session, where a broken connection closed it
    if _end_in_time not in before_each:
        before_each.append(_end_in_time)


def _end_in_time(request: Any) -> None:
    """Give a request the times that neither the client nor the user has set for it."""
    usual = {"connect": min(ANSWER, _CONNECTION), "read": ANSWER, "write": ANSWER, "pool": ANSWER}
    given = request.extensions.get("timeout", {})
    times = {kind: limit if given.get(kind) is None else given[kind] for kind, limit in usual.items()}
    request.extensions = {**request.extensions, "timeout": times}


@contextmanager
def translated(reference: HubReference, type: str, named: str, hub: Neighbours | None = None) -> Iterator[None]:
    """Turn what the client raises into our errors; with `hub`, a repo that is not found gets near names."""
    from huggingface_hub import errors

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
    except JSONDecodeError as error:
        raise _unavailable(named, ValueError("what it answers is a page, or nothing, and not of the Hub")) from error
    except failures() as error:
        raise _unavailable(named, error) from error


def _not_found(reference: HubReference, type: str, named: str, hub: Neighbours | None) -> RepoError:
    if hub is None:
        return RepoNotFoundError(f"{named} is not on the Hub", "check the name")
    other = "dataset" if type == "model" else "model"
    if hub.exists(reference.id, other):
        return WrongRepoTypeError(f"{named} is a {_KINDS[other]}, not a {_KINDS[type]}", f"name a {_KINDS[type]} there")
    near = hub.near(reference, type) or near_folder(reference.id)
    if near is None and type == "model":
        near = near_open_clip(reference)
    hint = f"did you mean '{near}'?" if near else "check the name."
    if not _has_token(hub):
        hint += f" If it is private, {LOG_IN}"
    elif not near:
        hint += " If it is private, use a token that may read it"
    place = "neither on the Hub nor a folder here" if "/" not in reference.id else "not on the Hub"
    return RepoNotFoundError(f"{named} is {place}", hint)


def _has_token(hub: Neighbours) -> bool:
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
