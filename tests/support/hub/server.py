"""The HTTP side: connections, credentials, faults, ranges, the log. Knows no route."""

from __future__ import annotations

import json
import re
import socket
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep  # a test that has its client not wait changes time.sleep
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from .blobs import Blob, receive
from .faults import Fault, Request
from .store import Refusal

if TYPE_CHECKING:
    from .hub import Hub


@dataclass
class Answer:
    """What goes back: a status, headers, and a blob or the part of it from `start` to `stop`."""

    status: int = 200
    blob: Blob = field(default_factory=lambda: Blob(b""))
    headers: dict[str, str] = field(default_factory=dict)
    start: int = 0
    stop: int | None = None

    @classmethod
    def json(cls, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        """An answer with a JSON body."""
        kind = {"Content-Type": "application/json; charset=utf-8"}
        return cls(status, Blob(json.dumps(content).encode()), kind | dict(headers or {}))

    @classmethod
    def refusal(cls, refusal: Refusal) -> Answer:
        """An answer that says no, in the three places where the clients look for the reason."""
        headers = dict(refusal.headers)
        if refusal.status >= 400:
            headers.setdefault("X-Error-Message", " ".join(refusal.message.split()))
            if refusal.code:
                headers.setdefault("X-Error-Code", refusal.code)
        return cls.json({"error": refusal.message} | refusal.body, refusal.status, headers)

    @property
    def size(self) -> int:
        """The bytes of the body."""
        return (self.blob.size if self.stop is None else self.stop) - self.start


@dataclass
class Call:
    """A request as the routes see it; `parts` are the path's segments, unquoted after the split."""

    hub: Hub
    method: str
    target: str
    headers: Message
    body: Blob
    user: str | None
    role: str

    @cached_property
    def parts(self) -> list[str]:
        """The segments of the path."""
        return [unquote(part) for part in self.target.partition("?")[0].split("/")[1:]]

    @cached_property
    def query(self) -> dict[str, list[str]]:
        """The query's values."""
        return parse_qs(self.target.partition("?")[2], keep_blank_values=True)

    def first(self, name: str, default: str = "") -> str:
        """The first value of a query's name."""
        return self.query.get(name, [default])[0]

    def flag(self, name: str) -> bool:
        """Whether the query says yes."""
        return self.first(name).lower() in ("1", "true")

    def json(self) -> dict[str, Any]:
        """The body as a JSON object."""
        try:
            found = json.loads(self.body.read() or b"{}")
        except ValueError as error:
            raise Refusal(400, f"Invalid JSON: {error}") from error
        if not isinstance(found, dict):
            raise Refusal(400, "Expected a JSON object")
        return found


def ranged(answer: Answer, header: str | None) -> Answer:
    """Narrows a whole answer to the one range that the request asks for."""
    size = answer.blob.size
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if asked is None or asked[0] == "bytes=-":
        return answer
    first, last = asked.groups()
    if first:
        start, stop = int(first), min(int(last) + 1 if last else size, size)
    else:
        start, stop = max(size - int(last), 0), size
    if start >= size or start >= stop:
        raise Refusal(416, "Requested Range Not Satisfiable", headers={"Content-Range": f"bytes */{size}"})
    headers = answer.headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return Answer(206, answer.blob, headers, start, stop)


def _planted(fault: Fault) -> Answer:
    """The answer that a fault gives in place of a route."""
    if fault.body is not None:
        return Answer(fault.status, Blob(fault.body.encode()), {"Content-Type": "text/html", **fault.headers})
    return Answer.refusal(Refusal(fault.status, fault.message, headers=fault.headers))


def _altered(answer: Answer, fault: Fault) -> Answer:
    """The answer with the body and the headers of a fault, where it has some."""
    if fault.body is not None:
        blob = Blob(fault.body.encode())
    else:
        content = b"".join(answer.blob.chunks(answer.start, answer.start + answer.size))
        blob = Blob(content[::-1] if fault.turned else content)
    return Answer(answer.status, blob, {**answer.headers, **fault.headers})


class Server(ThreadingHTTPServer):
    """The listening socket; remembers its connections so that stopping closes them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Hub, route: Callable[[Call], Answer], port: int) -> None:
        self.hub = hub
        self.route = route
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)

    def server_bind(self) -> None:
        """Binds without asking for the host's full name, which may take seconds without a network."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that went away."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def disconnect(self) -> None:
        """Closes what is still open."""
        for connection in list(self.connections):
            hang_up(connection)


def hang_up(connection: socket.socket) -> None:
    """Ends a connection now, whatever its file objects still hold."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class Handler(BaseHTTPRequestHandler):
    """One connection: reads each request whole, plays the fault that is due, answers, logs."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """The log is `hub.log`."""

    def handle_request(self) -> None:
        """Does one request; the log has it before the client can see the answer."""
        hub = self.server.hub
        body = receive(self.rfile, int(self.headers.get("Content-Length") or 0), hub.spool)
        fault = hub.due_fault(self.command, self.path)
        kind = fault.kind if fault else None
        target = fault.target(self.path) if fault and kind == "elsewhere" else self.path
        call = Call(hub, self.command, target, self.headers, body, *hub.who(self.headers.get("Authorization")))
        if fault and kind == "slow":
            sleep(fault.seconds)
        if fault and kind == "status":
            answer = _planted(fault)
        else:
            answer = Answer() if kind == "drop" else self._carry_out(call)
        if fault and kind == "other":
            answer = _altered(answer, fault)
        path, _, query = self.path.partition("?")
        status = 0 if kind in ("drop", "lost") else answer.status
        request = Request(self.command, path, query, status, 0, body.size, self.headers.get("Range"), call.user)
        hub.add_to_log(request)
        if kind in ("drop", "lost"):
            self._hang_up()
        else:
            self._send(answer, request, fault if kind == "cut" else None)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_request

    def _carry_out(self, call: Call) -> Answer:
        try:
            if call.user is None and "Authorization" in self.headers:
                raise Refusal(401, "Invalid credentials in Authorization header")
            return self.server.route(call)
        except Refusal as refusal:
            return Answer.refusal(refusal)
        except Exception:
            trace = traceback.format_exc()
            print(f"{self.command} {self.path}\n{trace}", file=sys.stderr)
            return Answer.refusal(Refusal(500, trace.strip().splitlines()[-1]))

    def _send(self, answer: Answer, request: Request, cut: Fault | None) -> None:
        self.send_response(answer.status)
        headers = {"X-Request-Id": uuid.uuid4().hex, "Content-Length": str(answer.size)} | answer.headers
        for name, value in headers.items():
            self.send_header(name, value.encode("utf-8").decode("latin-1"))
        self.end_headers()
        left = 0 if self.command == "HEAD" else answer.size
        left = cut.body_bytes(left) if cut else left
        for chunk in answer.blob.chunks(answer.start, answer.start + left):
            request.sent += len(chunk)
            self.wfile.write(chunk)
        if cut:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        hang_up(self.connection)
