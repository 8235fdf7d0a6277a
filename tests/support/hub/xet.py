"""Xet: folders that stand in for its storage servers, and the files that are rebuilt from them. Knows no commit.

hf_xet takes an address `local://FOLDER` for a storage server: it puts what it uploads there by itself. A folder serves
one token, because its index is locked for as long as the client that got the token keeps its upload open.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from .blobs import Blob
from .hub import Hub
from .routes import of_repo
from .server import Answer, Call
from .store import Refusal, Repo

LIFETIME = 3600
RECORD = 48
END = b"\xff" * 32
STORE = Path("xet", "xorbs")  # what hf_xet makes in its folder
INDEX = "global_dedup_lookup.redb"

# in a process of its own: hf_xet keeps threads and writes logs, and this hub imports no client
REBUILD = """
import json, sys
from hf_xet import XetFileInfo, XetSession
with XetSession().new_file_download_group(endpoint=sys.argv[1]) as group:
    for name, size, path in json.load(sys.stdin):
        group.start_download_file(XetFileInfo(name, size), path)
"""


@dataclass(frozen=True)
class XetFile:
    """A file as Xet knows it; its name is a hash of its chunks."""

    name: str
    size: int


@of_repo("GET", "xet-write-token", "propose")
def write_token(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """A folder for what this client uploads to the repository."""
    folder = call.hub.xet_folder()
    repo.xet_folders.append(folder)
    return _token(folder)


@of_repo("GET", "xet-read-token", "read")
def read_token(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """A folder with nothing in it: no file is announced as one of Xet's, so clients read all of them by HTTP."""
    return _token(call.hub.xet_folder())


def _token(folder: Path) -> Answer:
    """The token in both forms: hf_xet reads the body, huggingface_hub the headers."""
    address, token, end = f"local://{folder}", f"xet_{uuid.uuid4().hex}", int(time.time()) + LIFETIME
    headers = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(end)}
    return Answer.json({"casUrl": address, "exp": end, "accessToken": token}, headers=headers)


def take_over(hub: Hub, repo: Repo, oids: Collection[str]) -> None:
    """Makes LFS objects of those `oids` that were uploaded to the repository through Xet, and leaves the others out."""
    missing = set(oids) - repo.objects.keys()
    for folder in reversed(repo.xet_folders):
        found = {oid: file for oid, file in _stored(folder).items() if oid in missing}
        if found:
            repo.objects.update(_rebuild(hub, folder, found))
            missing -= found.keys()


def _stored(folder: Path) -> dict[str, XetFile]:
    files: dict[str, XetFile] = {}
    for shard in (folder / STORE / "shards").glob("*.mdb"):
        files |= shard_files(shard.read_bytes())
    return files


def shard_files(shard: bytes) -> dict[str, XetFile]:
    """The files of a shard by their sha256.

    After a header, each file has a record (its name, flags, the number of its segments), its segments, as many
    verification records if bit 31 is set, and a record with its sha256 if bit 30 is; all are of 48 bytes.
    """
    files: dict[str, XetFile] = {}
    place = RECORD
    while not shard.startswith(END, place):
        name, flags, count = _hash(shard, place), *struct.unpack_from("<II", shard, place + 32)
        segments = range(place + RECORD, place + RECORD * (1 + count), RECORD)
        size = sum(struct.unpack_from("<I", shard, segment + 36)[0] for segment in segments)
        place += RECORD * (1 + count * (2 if flags & 1 << 31 else 1))
        if flags & 1 << 30:
            files[_hash(shard, place)] = XetFile(name, size)
            place += RECORD
    return files


def _hash(shard: bytes, place: int) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack_from("<4Q", shard, place))


def _rebuild(hub: Hub, folder: Path, files: Mapping[str, XetFile]) -> dict[str, Blob]:
    """The content of files, through a copy of the folder's index: the client may still hold the lock on the index."""
    view = hub.xet_folder()
    (view / STORE).mkdir(parents=True)
    for part in ("xorbs", "shards"):
        (view / STORE / part).symlink_to(folder / STORE / part)
    shutil.copy(folder / STORE / INDEX, view / STORE / INDEX)
    paths = {oid: hub.spool() for oid in files}
    wanted = [(file.name, file.size, str(paths[oid])) for oid, file in files.items()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    subprocess.run(
        [sys.executable, "-c", REBUILD, f"local://{view}"],
        input=json.dumps(wanted),
        text=True,
        env=environment | {"HF_HOME": str(view)},
        timeout=300,
        check=True,
    )
    shutil.rmtree(view)
    blobs = {oid: Blob(path) for oid, path in paths.items()}
    for oid, blob in blobs.items():
        if blob.sha256 != oid:
            raise Refusal(400, f"The object {oid} has another sha256: {blob.sha256}")
    return blobs
