"""Content and its names: bytes in memory or a file on disk, with its git id and its LFS id. Knows no repository."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

CHUNK = 1 << 20
LFS_ABOVE = 1_000_000
_SUFFIXES = (
    "7z arrow bin bz2 ckpt gguf gif gz h5 jpeg jpg model mp3 mp4 msgpack npy npz onnx parquet pb pickle pkl png pt pth"
    " safetensors tar tflite wav webp xz zip zst"
)
LFS_SUFFIXES = tuple(f".{suffix}" for suffix in _SUFFIXES.split())
GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)


class Blob:
    """One immutable content; a `Path` stays on disk and is read by seeking, never as a whole."""

    def __init__(self, content: bytes | Path) -> None:
        self.content = content
        self.size = len(content) if isinstance(content, bytes) else content.stat().st_size

    @classmethod
    def of(cls, content: bytes | str | Path | Blob) -> Blob:
        """The blob of what a test gives: text is UTF-8, a path is a file on disk."""
        if isinstance(content, Blob):
            return content
        return cls(content.encode() if isinstance(content, str) else content)

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes from start to stop, in pieces."""
        stop = self.size if stop is None else stop
        if isinstance(self.content, bytes):
            view = memoryview(self.content)
            for position in range(start, stop, CHUNK):
                yield bytes(view[position : min(position + CHUNK, stop)])
            return
        with self.content.open("rb") as file:
            file.seek(start)
            while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
                start += len(chunk)
                yield chunk

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes from start to stop, at once."""
        return b"".join(self.chunks(start, stop))

    @functools.cached_property
    def sha256(self) -> str:
        """The LFS id."""
        return self._digest("sha256", b"")

    @functools.cached_property
    def git_id(self) -> str:
        """The id that git gives to this content."""
        return self._digest("sha1", b"blob %d\0" % self.size)

    def _digest(self, algorithm: str, prefix: bytes) -> str:
        if isinstance(self.content, bytes):
            return hashlib.new(algorithm, prefix + self.content).hexdigest()
        stamp = self.content.stat()
        return _file_digest(self.content.resolve(), stamp.st_size, stamp.st_mtime_ns, algorithm, prefix)


@functools.cache
def _file_digest(path: Path, size: int, modified: int, algorithm: str, prefix: bytes) -> str:
    """One pass over a file on disk; size and time of change are part of the key, so an edited file is read again."""
    digest = hashlib.new(algorithm, prefix)
    for chunk in Blob(path).chunks():
        digest.update(chunk)
    return digest.hexdigest()


def is_lfs(path: str, size: int) -> bool:
    """Whether the Hub keeps a file of this name and size in LFS; an empty file never is."""
    return size > 0 and (path.lower().endswith(LFS_SUFFIXES) or size > LFS_ABOVE)


@dataclass(frozen=True)
class File:
    """A blob as a commit holds it: directly, or behind an LFS pointer."""

    blob: Blob
    lfs: bool

    @classmethod
    def of(cls, path: str, content: bytes | str | Path | Blob) -> File:
        """The file of this path and content, in LFS when the Hub would put it there."""
        blob = Blob.of(content)
        return cls(blob, is_lfs(path, blob.size))

    @property
    def size(self) -> int:
        """The real size, also of an LFS file."""
        return self.blob.size

    @property
    def pointer(self) -> bytes:
        """What git itself stores for an LFS file."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.blob.sha256}\nsize {self.size}\n".encode()

    @functools.cached_property
    def git_id(self) -> str:
        """The id of the git blob: of the pointer for an LFS file."""
        return Blob(self.pointer).git_id if self.lfs else self.blob.git_id

    @property
    def etag(self) -> str:
        """The name of the content in the client's cache."""
        return self.blob.sha256 if self.lfs else self.git_id


def receive(stream: BufferedIOBase, length: int, spool: Callable[[], Path]) -> Blob:
    """The blob of a request's body; a large one goes to the file that `spool` names."""
    if length <= 16 * CHUNK:
        return Blob(stream.read(length))
    path = spool()
    with path.open("wb") as file:
        while length and (chunk := stream.read(min(CHUNK, length))):
            length -= len(chunk)
            file.write(chunk)
    return Blob(path)
