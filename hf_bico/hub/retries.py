"""Retry requests while the Hub is busy, and translate huggingface_hub's errors into ours.

Knows what can go wrong; makes no request itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from hf_bico.hub.client import Hub

LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"
RETRIED = (408, 429, 500, 502, 503, 504)
"""Status codes of a busy Hub; the request may have been carried out all the same."""
REQUEST_TIMEOUT = 60.0
"""Seconds to wait for an answer; huggingface_hub itself would wait for ever."""
_CONNECT_TIMEOUT = 20.0
_WAITS = (1.0, 2.0, 4.0)
_MAX_WAIT = 60.0
_TYPE_NAMES = {"model": "model", "dataset": "data set"}

T = TypeVar("T")


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def request_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub raises if a request fails: bad status, lost connection, a page instead of JSON."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return (HTTPError, ConnectionError, JSONDecodeError)


def with_retries(call: Callable[[], T], lagging: tuple[type[Exception], ...] = ()) -> T:
    """Retry with backoff on 408, 429 and 5xx: huggingface_hub retries only some of its requests.

    Also retries errors in `lagging`: a repo that exists may not be known to every server of the Hub yet. A call that
    writes must tolerate being repeated, since an answer can get lost.
    """
    for wait in _WAITS:
        _set_timeouts()
        try:
            return call()
        except request_errors() as error:
            if not (isinstance(error, lagging) or _is_temporary(error)):
                raise
            time.sleep(_retry_after(error) or wait)
    _set_timeouts()
    return call()


def _is_temporary(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    return not isinstance(error, HfHubHTTPError) or error.response.status_code in RETRIED


def _retry_after(error: Exception) -> float | None:
    response = getattr(error, "response", None)
    seconds = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(seconds), _MAX_WAIT) if seconds.isdigit() else None


def _set_timeouts() -> None:
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["request"]  # a lost connection closes the session, and a new one has no hooks
    if _with_timeout not in hooks:
        hooks.append(_with_timeout)


def _with_timeout(request: Any) -> None:
    """Set the timeouts that neither huggingface_hub nor the user has set."""
    connect = min(REQUEST_TIMEOUT, _CONNECT_TIMEOUT)
    defaults = dict.fromkeys(("read", "write", "pool"), REQUEST_TIMEOUT) | {"connect": connect}
    given = {kind: limit for kind, limit in request.extensions.get("timeout", {}).items() if limit is not None}
    request.extensions = {**request.extensions, "timeout": {**defaults, **given}}


@contextmanager
def translate_hub_errors(reference: HubReference, type: str, named: str, hub: Hub | None = None) -> Iterator[None]:
    """Raise huggingface_hub's errors as ours; with `hub`, suggest similar names for a repo that does not exist."""
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
    except request_errors() as error:
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


def _address(reference: HubReference, type: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if type == 'dataset' else ''}{reference.id}"


def _unavailable(named: str, error: BaseException) -> HubUnavailableError:
    from huggingface_hub import constants

    return HubUnavailableError(
        f"{named}: the Hub at {constants.ENDPOINT} cannot be read: {_reason(error)}", "try again in a while"
    )


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without addresses and request ids."""
    message = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return str(message).splitlines()[0][:200]
