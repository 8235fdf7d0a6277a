"""Retry requests while the Hub is busy. Knows what passes; makes no request itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from json import JSONDecodeError
from typing import Any, TypeVar

LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"
NOT_OF_THE_HUB = "the answer is empty or a web page, and not the Hub's"
RETRIED = (408, 429, 500, 502, 503, 504)
"""Status codes of a busy Hub; the request may have been carried out all the same."""
REQUEST_TIMEOUT = 60.0
"""Seconds to wait for an answer; huggingface_hub itself would wait for ever."""
_CONNECT_TIMEOUT = 20.0
_WAITS = (1.0, 2.0, 4.0)
_MAX_WAIT = 60.0

T = TypeVar("T")


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def request_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub raises if a request fails: bad status, lost connection, a page instead of JSON."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return (HTTPError, ConnectionError, JSONDecodeError)


def answered(call: Callable[[], T]) -> T:
    """Make a request; an answer that huggingface_hub cannot take apart is raised as a failed request."""
    try:
        return call()
    except (AssertionError, AttributeError, LookupError, TypeError) as error:
        raise ConnectionError(NOT_OF_THE_HUB) from error


def with_retries(call: Callable[[], T], lagging: tuple[type[Exception], ...] = ()) -> T:
    """Retry with backoff on 408, 429 and 5xx: huggingface_hub retries only some of its requests.

    Also retries errors in `lagging`: a repo that exists may not be known to every server of the Hub yet. A call that
    writes must tolerate being repeated, since an answer can get lost.
    """
    for wait in _WAITS:
        _set_timeouts()
        try:
            return answered(call)
        except request_errors() as error:
            if not (isinstance(error, lagging) or _is_temporary(error)):
                raise
            time.sleep(_retry_after(error) or wait)
    _set_timeouts()
    return answered(call)


def _is_temporary(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    if type(error) is ConnectionError and error.__cause__ is None:  # of hf_xet, which has retried for minutes itself
        return False
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
