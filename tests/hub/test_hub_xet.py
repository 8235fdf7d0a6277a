"""Uploads to the loopback Hub as a user's own environment makes them: large files go through hf_xet."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import forks
from support.hub import Fault, Hub, Repo

USERS_OWN = ("HF_ENDPOINT", "HF_HOME", "HF_TOKEN")
PREAMBLE = """
import sys
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

api = HfApi()
here = Path(sys.argv[1])
folder = here / "model"

def commit(repo_id, **kwargs):
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    added = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in paths]
    return api.create_commit(repo_id, added, commit_message="files", **kwargs)

def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except HfHubHTTPError as error:
        return error.response.status_code
    raise AssertionError("not refused")
"""

Run = Callable[..., None]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add_user("alice", "hf_alice")
        hub.add_user("bob", "hf_bob")
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """Runs a script with the endpoint, a token and an empty home in its environment, and nothing else of HF_*."""

    def run(script: str, token: str = "hf_alice") -> None:
        home = tmp_path / f"home-{time.monotonic_ns()}"
        environment = {
            name: value
            for name, value in hub.environment(home, token, xet=True).items()
            if not name.startswith("HF_") or name in USERS_OWN
        }
        code = PREAMBLE + textwrap.dedent(script)
        done = forks.run(str(tmp_path), code=code, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """What a model's folder holds; the second large file is one that Xet compresses."""
    files = {
        "README.md": b"---\nlicense: mit\n---\n# Tiny\n",
        "config.json": b"{}",
        "model.safetensors": os.urandom(3_000_000),
        "sub/zeros.bin": bytes(500_000),
    }
    for path, content in files.items():
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_bytes(content)
    return files


def content(repo: Repo, revision: str = "main") -> dict[str, bytes]:
    """All files but the one that every repository begins with."""
    return {path: repo.read(path, revision) for path in repo.files(revision) if path != ".gitattributes"}


def asked(hub: Hub, part: str) -> list[str]:
    """The requests whose address has this part."""
    return [f"{request.method} {request.path}" for request in hub.log if part in request.path]


def ask(
    hub: Hub, method: str, target: str, token: str | None, body: bytes = b""
) -> tuple[int, Mapping[str, str], bytes]:
    """One bare request: the status, the headers, the body."""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    try:
        connection.request(method, target, body, {"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def lfs_commit(hub: Hub, repo_id: str, oid: str) -> int:
    """The status of a commit that refers to one LFS object."""
    lines = [
        {"key": "header", "value": {"summary": "s"}},
        {"key": "lfsFile", "value": {"path": "x.bin", "algo": "sha256", "oid": oid}},
    ]
    body = "\n".join(json.dumps(line) for line in lines).encode()
    return ask(hub, "POST", f"/api/models/{repo_id}/commit/main", "hf_alice", body)[0]


def test_a_commit_through_xet_comes_back_over_http(hub: Hub, run: Run, files: dict[str, bytes]) -> None:
    run("""
        api.create_repo("alice/tiny")
        made = commit("alice/tiny")
        assert made.oid == api.model_info("alice/tiny").sha
        assert commit("alice/tiny").oid == made.oid
        """)
    repo = hub.repo("alice/tiny")
    assert content(repo) == files
    assert repo.at().files["model.safetensors"].lfs
    assert [commit.title for commit in repo.history()] == ["files", "initial commit"]
    assert asked(hub, "xet-write-token")
    assert not asked(hub, "lfs")
    hub.clear_log()
    run("""
        copy = Path(snapshot_download("alice/tiny"))
        for path in ("README.md", "config.json", "model.safetensors", "sub/zeros.bin"):
            assert (copy / path).read_bytes() == (folder / path).read_bytes(), path
        assert api.get_paths_info("alice/tiny", ["model.safetensors"])[0].xet_hash is None
        """)
    assert "GET" in {request.split()[0] for request in asked(hub, "model.safetensors")}
    assert not asked(hub, "xet")


def test_a_folder_is_uploaded_while_its_client_keeps_xet_open(hub: Hub, run: Run, files: dict[str, bytes]) -> None:
    repo = hub.create("alice/tiny")
    run("""
        made = api.upload_folder(repo_id="alice/tiny", folder_path=folder)
        assert api.upload_folder(repo_id="alice/tiny", folder_path=folder).oid == made.oid
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b"more")
        assert api.upload_folder(repo_id="alice/tiny", folder_path=folder).oid != made.oid
        """)
    assert content(repo) == files | {"model.safetensors": files["model.safetensors"] + b"more"}
    assert len(repo.history()) == 3
    assert not asked(hub, "lfs")


def test_pull_requests_take_files_from_those_who_may_not_write(hub: Hub, run: Run, files: dict[str, bytes]) -> None:
    repo = hub.create("alice/tiny")
    run(
        """
        assert commit("alice/tiny", create_pr=True).pr_num == 1
        api.upload_folder(repo_id="alice/tiny", folder_path=folder, create_pr=True)
        """,
        "hf_bob",
    )
    assert content(repo) == {}
    assert content(repo, "refs/pr/1") == content(repo, "refs/pr/2") == files


def test_a_stranger_is_refused_and_changes_nothing(hub: Hub, run: Run, files: dict[str, bytes]) -> None:
    repo = hub.create("alice/tiny")
    hub.create("alice/secret", private=True)
    hub.add_user("alice", "hf_reader", role="read")
    before = repo.head()
    run(
        """
        assert refused(commit, "alice/tiny") == 403
        assert refused(api.upload_folder, repo_id="alice/tiny", folder_path=folder) == 403
        assert refused(commit, "alice/secret") == 404
        """,
        "hf_bob",
    )
    assert repo.head() == before
    assert not asked(hub, "xet")

    def status(kind: str, repo_id: str, token: str | None) -> int:
        return ask(hub, "GET", f"/api/models/{repo_id}/xet-{kind}-token/main", token)[0]

    assert [status("write", "alice/tiny", token) for token in ("hf_bob", "hf_reader", None)] == [403, 403, 401]
    assert [status("read", "alice/tiny", token) for token in ("hf_bob", "hf_reader", None)] == [200, 200, 200]
    assert [status("read", "alice/secret", token) for token in ("hf_bob", "hf_reader", None)] == [404, 200, 401]


def test_a_client_uploads_while_another_keeps_xet_open(hub: Hub, run: Run, files: dict[str, bytes]) -> None:
    repo = hub.create("alice/tiny")
    slow = hub.inject(Fault("POST", "/commit/", kind="slow", seconds=2))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, "api.upload_folder(repo_id='alice/tiny', folder_path=folder)")
        while not slow.fired and not first.done():
            time.sleep(0.02)
        run("api.upload_file(path_or_fileobj=b'second', path_in_repo='second.bin', repo_id='alice/tiny')")
        first.result()
    assert content(repo) == files | {"second.bin": b"second"}


def test_an_upload_belongs_to_its_repository_and_ends_with_the_hub(
    hub: Hub, run: Run, files: dict[str, bytes], tmp_path: Path
) -> None:
    for name in ("alice/tiny", "alice/other"):
        hub.create(name)
    preupload = """
        added = CommitOperationAdd("x.bin", folder / "model.safetensors")
        api.preupload_lfs_files("alice/tiny", [added])
        """
    run(preupload)
    oid = hashlib.sha256(files["model.safetensors"]).hexdigest()
    assert lfs_commit(hub, "alice/other", oid) == 400
    assert lfs_commit(hub, "alice/tiny", "0" * 64) == 400
    assert lfs_commit(hub, "alice/tiny", oid) == 200
    [folder] = hub.repo("alice/tiny").xet_folders
    assert folder.exists()
    hub.stop()
    assert not folder.parent.exists()
    assert hub.repo("alice/tiny").read("x.bin") == files["model.safetensors"]
    hub.start()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"another")
    run(preupload)
    folder = hub.repo("alice/tiny").xet_folders[-1]
    assert folder.exists()
    hub.reset()
    assert not folder.parent.exists()


def test_a_token_says_the_same_in_its_body_and_in_its_headers(hub: Hub) -> None:
    hub.create("data", type="dataset")
    hub.create("alice/data", type="dataset")
    for target in ("data/xet-read-token/main", "alice/data/xet-write-token/None?create_pr=1"):
        _, headers, body = ask(hub, "GET", f"/api/datasets/{target}", "hf_alice")
        found = json.loads(body)
        assert found == {
            "casUrl": headers["X-Xet-Cas-Url"],
            "exp": int(headers["X-Xet-Token-Expiration"]),
            "accessToken": headers["X-Xet-Access-Token"],
        }
        assert found["casUrl"].startswith("local:///")
        assert found["exp"] > time.time() + 600


def test_the_environment_leaves_xet_on_when_asked(hub: Hub, tmp_path: Path) -> None:
    off, on = hub.environment(tmp_path, "hf_alice"), hub.environment(tmp_path, "hf_alice", xet=True)
    assert off == on | {"HF_HUB_DISABLE_XET": "1"}
    assert "HF_HUB_DISABLE_XET" not in on
