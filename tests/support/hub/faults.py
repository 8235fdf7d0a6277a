"""Faults that a test plants in the server, and the log line of each request. Knows no route."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["status", "cut", "slow", "drop", "lost", "other", "elsewhere"]


@dataclass
class Request:
    """One request that the server saw; `status` is 0 when the connection was closed without an answer.

    `path` is as sent (percent-encoded, without the query), `sent` and `received` count body bytes.
    """

    method: str
    path: str
    query: str = ""
    status: int = 0
    sent: int = 0
    received: int = 0
    range: str | None = None
    user: str | None = None


@dataclass
class Fault:
    """What goes wrong with requests whose method and address (path and query, searched as a regex) match.

    - `status`: answers `status` with `headers`, without carrying the request out; with the `body` that a machine before
      the Hub would send, where one is given.
    - `cut`: sends the headers and `part` of the body (a fraction, or a number of bytes), then closes.
    - `slow`: waits `seconds` before carrying the request out.
    - `drop`: closes without an answer and without carrying the request out.
    - `lost`: carries the request out, then closes without an answer.
    - `other`: carries the request out, and answers with another `body`, or its own with the bytes `turned` round, and
      with `headers` in place of its own.
    - `elsewhere`: carries it out for another repo: of each pair in `instead`, the second for the first.

    The first `after` matching requests pass; then it fires `times` times (None: always).
    """

    method: str | None = None
    path: str = ""
    kind: Kind = "status"
    times: int | None = 1
    after: int = 0
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "planted by the test"
    body: str | None = None
    part: float | int = 0.5
    seconds: float = 1.0
    turned: bool = False
    instead: Mapping[str, str] = field(default_factory=dict)
    fired: int = 0
    passed: int = 0

    def due(self, method: str, target: str) -> bool:
        """Whether the fault fires for this request; counts it either way."""
        if self.spent or (self.method or method) != method or not re.search(self.path, target):
            return False
        if self.passed < self.after:
            self.passed += 1
            return False
        self.fired += 1
        return True

    @property
    def spent(self) -> bool:
        """Whether it has fired as often as it should."""
        return self.times is not None and self.fired >= self.times

    def target(self, target: str) -> str:
        """The address of another repo, at its main branch where a commit is named."""
        other = (target.replace(f"/{one}", f"/{two}", 1) for one, two in self.instead.items() if f"/{one}" in target)
        return re.sub("[0-9a-f]{40}", "main", next(other, target))

    def body_bytes(self, size: int) -> int:
        """How much of a body of this size goes out before the cut."""
        return min(size, self.part) if isinstance(self.part, int) else int(size * self.part)
