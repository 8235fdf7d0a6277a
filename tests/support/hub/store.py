"""Repositories: commits, branches, tags, pull requests. Knows neither users' rights nor HTTP."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from .blobs import GIT_ATTRIBUTES, Blob, File

Type = Literal["model", "dataset", "space"]
Gated = Literal[False, "auto", "manual"]
KEEP_ON_DISK = 8_000_000


class Refusal(Exception):
    """An answer that is not a success: the status, the message, the `X-Error-Code`, more headers, more JSON."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{status} {message}")
        self.status, self.message, self.code = status, message, code
        self.headers, self.body = dict(headers or {}), dict(body or {})


def now() -> str:
    """The time as the Hub writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Commit:
    """A whole tree and where it came from."""

    sha: str
    parent: str | None
    files: Mapping[str, File]
    title: str
    description: str
    author: str
    date: str

    def within(self, folder: str) -> dict[str, File]:
        """The files below a folder ("" is the root)."""
        prefix = f"{folder}/" if folder else ""
        return {path: file for path, file in self.files.items() if path.startswith(prefix)}

    def tree_id(self, path: str) -> str | None:
        """The id of a file or a folder in this commit, None where there is neither."""
        if path in self.files:
            return self.files[path].git_id
        inside = self.within(path)
        text = "".join(f"{name} {file.git_id}\n" for name, file in sorted(inside.items()))
        return hashlib.sha1(text.encode()).hexdigest() if inside else None


@dataclass
class Discussion:
    """A discussion or a pull request; `base` is the commit that a pull request started from."""

    num: int
    title: str
    author: str
    description: str
    pull_request: bool
    status: str
    created: str
    base: str | None = None


class Repo:
    """One repository of the Hub; it begins with one commit that holds `.gitattributes`, as the Hub's do."""

    def __init__(self, repo_id: str, type: Type = "model", private: bool = False, gated: Gated | bool = False) -> None:
        self.id = repo_id
        self.type: Type = type
        self.private = private
        self.gated: Gated = "auto" if gated is True else gated
        self.disabled = False
        self.benchmark = False
        """Whether the Hub lists it as a benchmark; its `eval.yaml` has the tasks."""
        self.downloads = 0
        self.likes = 0
        self.created = now()
        self.granted: set[str] = set()
        self.commits: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.pulls: dict[int, str] = {}
        self.discussions: dict[int, Discussion] = {}
        self.objects: dict[str, Blob] = {}
        self.xet_folders: list[Path] = []
        self.lock = threading.RLock()
        self._begin()

    def _begin(self) -> None:
        files = {".gitattributes": File.of(".gitattributes", GIT_ATTRIBUTES)}
        self.branches["main"] = self._record(None, files, "initial commit", "", self.namespace or "hub").sha

    @property
    def namespace(self) -> str | None:
        """The user or organisation that owns it; a legacy data set such as `mnist` has none."""
        return self.id.split("/")[0] if "/" in self.id else None

    # -- reading

    def head(self, revision: str = "main") -> str:
        """The commit of a branch, tag, pull request, or (shortened) commit id."""
        name = re.sub(r"^refs/(heads|tags)/", "", revision)
        with self.lock:
            if pull := re.fullmatch(r"refs/pr/(\d+)", revision):
                sha = self.pulls.get(int(pull[1]))
            else:
                sha = self.branches.get(name) or self.tags.get(name)
            if sha is None and re.fullmatch(r"[0-9a-f]{7,40}", revision):
                sha = next((known for known in self.commits if known.startswith(revision)), None)
        if sha is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def at(self, revision: str = "main") -> Commit:
        """The commit itself."""
        return self.commits[self.head(revision)]

    def file(self, path: str, revision: str = "main") -> File:
        """The file at a path, or a refusal that still names the commit, as the Hub's does."""
        commit = self.at(revision)
        if path not in commit.files:
            message = f"Entry not found: {path} at {revision}"
            raise Refusal(404, message, "EntryNotFound", {"X-Repo-Commit": commit.sha})
        return commit.files[path]

    def read(self, path: str, revision: str = "main") -> bytes:
        """The content of a file."""
        return self.file(path, revision).blob.read()

    def files(self, revision: str = "main") -> dict[str, int]:
        """The size of every file."""
        return {path: file.size for path, file in sorted(self.at(revision).files.items())}

    def history(self, revision: str = "main") -> list[Commit]:
        """The commits that led here, newest first."""
        return list(self._ancestors(self.at(revision)))

    def _ancestors(self, commit: Commit) -> Iterator[Commit]:
        yield commit
        while commit.parent is not None:
            commit = self.commits[commit.parent]
            yield commit

    def last_change(self, commit: Commit, path: str) -> Commit:
        """The commit that last touched a file or folder."""
        wanted = commit.tree_id(path)
        last = commit
        for ancestor in self._ancestors(commit):
            if ancestor.tree_id(path) != wanted:
                break
            last = ancestor
        return last

    # -- writing

    def commit(
        self,
        files: Mapping[str, bytes | str | Path],
        message: str = "Upload",
        revision: str = "main",
        delete: Collection[str] = (),
        author: str | None = None,
    ) -> str:
        """Commits files (a `Path` is served from disk) and deletions (files or folders); returns the commit's sha."""
        made = {path: File.of(path, content) for path, content in files.items()}
        return self.apply(revision, made, delete, message, author=author or self.namespace or "hub").sha

    def commit_folder(
        self, folder: Path, message: str = "Upload folder", revision: str = "main", delete: Collection[str] = ()
    ) -> str:
        """Commits every file below a folder; only the large ones stay on disk, so the rest may change afterwards."""
        files: dict[str, bytes | str | Path] = {}
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                large = path.stat().st_size > KEEP_ON_DISK
                files[path.relative_to(folder).as_posix()] = path if large else path.read_bytes()
        return self.commit(files, message, revision, delete)

    def apply(
        self,
        revision: str,
        files: Mapping[str, File],
        delete: Collection[str],
        title: str,
        description: str = "",
        author: str = "hub",
        parent: str | None = None,
    ) -> Commit:
        """One commit on a branch or a pull request; refused when `parent` is no longer its head."""
        with self.lock:
            pull = re.fullmatch(r"refs/pr/(\d+)", revision)
            branch = revision.removeprefix("refs/heads/")
            if not pull and branch not in self.branches:
                raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            head = self.head(revision)
            if parent is not None and not head.startswith(parent):
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            made = self._record(head, self._changed(self.commits[head], files, delete), title, description, author)
            if pull:
                self.pulls[int(pull[1])] = made.sha
            else:
                self.branches[branch] = made.sha
            return made

    def _changed(self, commit: Commit, files: Mapping[str, File], delete: Collection[str]) -> dict[str, File]:
        gone: set[str] = set()
        for path in delete:
            found = {path} if path in commit.files else set(commit.within(path.strip("/")))
            if not found or not path.strip("/"):
                raise Refusal(404, f"Entry not found: {path}", "EntryNotFound", {"X-Repo-Commit": commit.sha})
            gone |= found
        return {path: file for path, file in commit.files.items() if path not in gone} | dict(files)

    def _record(
        self, parent: str | None, files: Mapping[str, File], title: str, description: str, author: str
    ) -> Commit:
        names = "".join(f"{path} {file.git_id}\n" for path, file in sorted(files.items()))
        text = f"{self.type} {self.id} {parent} {len(self.commits)} {title} {description} {author}\n{names}"
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, dict(files), title, description, author, now())
        self.objects |= {file.blob.sha256: file.blob for file in files.values() if file.lfs}
        return self.commits[sha]

    def branch(self, name: str, start: str = "main") -> str:
        """Starts a branch; returns its head."""
        with self.lock:
            if name in self.branches:
                raise Refusal(409, f"Reference already exists: refs/heads/{name}")
            self.branches[name] = self.head(start)
            return self.branches[name]

    def tag(self, name: str, revision: str = "main") -> str:
        """Tags a revision; returns the commit."""
        with self.lock:
            if name in self.tags:
                raise Refusal(409, f"Tag reference exists already: refs/tags/{name}")
            self.tags[name] = self.head(revision)
            return self.tags[name]

    def discuss(
        self, title: str, author: str, description: str = "", pull_request: bool = False, status: str = "open"
    ) -> int:
        """Opens a discussion, or a pull request whose `refs/pr/N` starts at main; returns its number."""
        with self.lock:
            num = len(self.discussions) + 1
            base = self.head() if pull_request else None
            self.discussions[num] = Discussion(num, title, author, description, pull_request, status, now(), base)
            if base is not None:
                self.pulls[num] = base
            return num

    def pull_request(
        self, files: Mapping[str, bytes | str | Path], title: str, author: str, description: str = ""
    ) -> int:
        """An open pull request of one commit on top of main; returns its number."""
        with self.lock:
            num = self.discuss(title, author, description, pull_request=True)
            self.commit(files, title, f"refs/pr/{num}", author=author)
            return num

    def grant(self, user: str) -> None:
        """Lets a user into the gated repository."""
        self.granted.add(user)
