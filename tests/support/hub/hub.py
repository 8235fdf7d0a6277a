"""The Hub itself: users and their rights, the repositories by name, the log, the faults, start and stop."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .faults import Fault, Request
from .routes import route
from .server import Server
from .store import Gated, Refusal, Repo, Type

STALE = ("HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "no_proxy")


@dataclass(frozen=True)
class User:
    """Somebody with a token, and the organisations whose repositories they may write to."""

    name: str
    orgs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ticket:
    """The right to store one LFS object, given out by the batch route."""

    repo: Repo
    oid: str
    size: int


class Hub:
    """A Hugging Face Hub on a loopback port, for the real clients.

    >>> with Hub() as hub:
    ...     repo = hub.create("alice/tiny")
    ...     sha = repo.commit({"config.json": "{}"})
    ...     (hub.url.startswith("http://127.0.0.1:"), repo.read("config.json"), sha == repo.head())
    (True, b'{}', True)
    """

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.lock = threading.RLock()
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._disk: Path | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets repositories, users, log and faults."""
        with self.lock:
            self.users: dict[str, User] = {}
            self.tokens: dict[str, tuple[str, str]] = {}
            self.repos: dict[tuple[Type, str], Repo] = {}
            self.moved: dict[tuple[Type, str], str] = {}
            self.tickets: dict[str, Ticket] = {}
            self.log: list[Request] = []
            self._faults: list[Fault] = []
            self._drop_xet()
            self._disk = None

    # -- the server

    def start(self) -> Hub:
        """Listens; a hub that was stopped comes back on the same port."""
        if self._server is None:
            self._server = Server(self, route, self.port)
            self.port = self._server.server_port
            self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Closes the port and every open connection; the repositories stay, without uploads that were not committed."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server.disconnect()
            self._server = self._thread = None
        self._drop_xet()

    def __enter__(self) -> Hub:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The endpoint, without a slash at its end."""
        if not self.port:
            raise RuntimeError("the hub has no address before start()")
        return f"http://127.0.0.1:{self.port}"

    def environment(self, home: Path, token: str | None = None, xet: bool = False) -> dict[str, str]:
        """The environment of a process that talks to this hub, with its own empty `home` and nothing else of HF_*.

        Without `xet` large files go as LFS objects, over HTTP, where the log and the faults see them.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and name not in STALE}
        kept |= {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }
        kept |= {} if xet else {"HF_HUB_DISABLE_XET": "1"}
        return kept | ({"HF_TOKEN": token} if token is not None else {})

    def spool(self) -> Path:
        """A new file name for a large upload, in a folder that goes with the hub."""
        with self.lock:
            if self._disk is None:
                self._disk = Path(tempfile.mkdtemp(prefix="hub-"))
                weakref.finalize(self, shutil.rmtree, self._disk, ignore_errors=True)
            return self._disk / uuid.uuid4().hex

    def xet_folder(self) -> Path:
        """A new folder name for a client of hf_xet; all of them go when the hub stops or is reset."""
        spooled = self.spool()
        return spooled.parent / "xet" / spooled.name

    def _drop_xet(self) -> None:
        with self.lock:
            if self._disk is not None:
                shutil.rmtree(self._disk / "xet", ignore_errors=True)

    # -- the log and the faults

    def add_to_log(self, request: Request) -> None:
        """Remembers a request."""
        with self.lock:
            self.log.append(request)

    def clear_log(self) -> None:
        """Forgets the requests so far."""
        with self.lock:
            self.log = []

    def bytes_sent(self, method: str | None = "GET") -> int:
        """The body bytes sent in answer to a method, or to all."""
        with self.lock:
            return sum(request.sent for request in self.log if method in (None, request.method))

    def inject(self, fault: Fault) -> Fault:
        """Plants a fault; the returned object counts how often it fired."""
        with self.lock:
            self._faults.append(fault)
            return fault

    def forgive(self) -> None:
        """Takes all planted faults away."""
        with self.lock:
            self._faults = []

    @property
    def faults(self) -> list[Fault]:
        """The faults that have not yet fired as often as they should."""
        with self.lock:
            return [fault for fault in self._faults if not fault.spent]

    def due_fault(self, method: str, target: str) -> Fault | None:
        """The first fault that fires for this request."""
        with self.lock:
            return next((fault for fault in self._faults if fault.due(method, target)), None)

    # -- users and rights

    def add_user(self, name: str, token: str, orgs: Sequence[str] = (), role: str = "write") -> User:
        """A user with a token; called again, it adds a token (for instance one of role "read")."""
        with self.lock:
            self.users[name] = User(name, tuple(orgs) or (self.users[name].orgs if name in self.users else ()))
            self.tokens[token] = (name, role)
            return self.users[name]

    def who(self, authorization: str | None) -> tuple[str | None, str]:
        """The user behind a header, None for nobody and for a wrong token, and the role of the token."""
        return self.tokens.get((authorization or "").removeprefix("Bearer ").strip(), (None, "read"))

    def owns(self, user: str | None, namespace: str | None) -> bool:
        """Whether a namespace is the user's own or one of their organisations."""
        return user is not None and namespace in (user, *self.users[user].orgs)

    def sees(self, user: str | None, repo: Repo) -> bool:
        """Whether a repository exists for a user."""
        return not repo.private or self.owns(user, repo.namespace)

    def enters(self, user: str | None, repo: Repo) -> bool:
        """Whether a user is past the gate of a repository that they see."""
        return not repo.gated or user in repo.granted or self.owns(user, repo.namespace)

    # -- repositories

    def create(self, repo_id: str, type: Type = "model", private: bool = False, gated: Gated | bool = False) -> Repo:
        """A new repository, with the Hub's first commit in it."""
        with self.lock:
            if (type, repo_id) in self.repos:
                raise Refusal(409, f"You already created this {type} repo")
            self.moved.pop((type, repo_id), None)
            self.repos[type, repo_id] = Repo(repo_id, type, private, gated)
            return self.repos[type, repo_id]

    def repo(self, repo_id: str, type: Type = "model") -> Repo:
        """The repository of this name."""
        with self.lock:
            if (type, repo_id) not in self.repos:
                raise Refusal(404, "Repository not found", "RepoNotFound")
            return self.repos[type, repo_id]

    def delete(self, repo_id: str, type: Type = "model") -> None:
        """Removes a repository."""
        with self.lock:
            self.repo(repo_id, type)
            del self.repos[type, repo_id]

    def move(self, old: str, new: str, type: Type = "model") -> None:
        """Renames a repository; from then on its old name answers 307."""
        with self.lock:
            repo = self.repo(old, type)
            if (type, new) in self.repos:
                raise Refusal(409, f"{new} exists already")
            del self.repos[type, old]
            self.moved = {key: new if name == old and key[0] == type else name for key, name in self.moved.items()}
            self.moved[type, old] = new
            self.moved.pop((type, new), None)
            repo.id = new
            self.repos[type, new] = repo
