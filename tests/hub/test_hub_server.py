"""The loopback Hub of `tests/support/hub`, as the real clients see it; each script runs in a process of its own."""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support import ROOT, forks
from support.hub import Fault, Hub, Refusal
from support.hub.card import judge

PREAMBLE = """
import json, os, sys, time, warnings
from pathlib import Path
from huggingface_hub import *
from huggingface_hub.errors import *

waits = []
time.sleep = waits.append
api = HfApi()
here = Path(sys.argv[1])

def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("no error")
"""
GOOD_CARD = "---\nlicense: mit\ntags: [vision]\nbase_model: openai/clip\ndatasets: [mnist]\n---\n# Tiny\n"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add_user("alice", "hf_alice", orgs=["acme"])
        hub.add_user("bob", "hf_bob")
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path):
    """Runs a script against the hub as a user with a token, or as nobody."""

    def run(script: str, token: str | None = "hf_alice", extra: Mapping[str, str] | None = None) -> None:
        home = tmp_path / f"home-{time.monotonic_ns()}"
        code = PREAMBLE + textwrap.dedent(script)
        environment = hub.environment(home, token) | dict(extra or {})
        done = forks.run(str(tmp_path), code=code, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def safetensors_bytes(**shapes: tuple[int, ...]) -> bytes:
    """A safetensors file of zeros, written by hand."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


# -- the circle


def test_what_is_pushed_comes_back(hub: Hub, run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text(GOOD_CARD)
    (folder / "config.json").write_text('{"model_type": "clip", "architectures": ["CLIPModel"]}')
    (folder / "sub" / "a b.json").write_text("{}")
    (folder / "empty.txt").write_text("")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(a=(1000, 5000), b=(7,)))
    run("""
        assert api.whoami()["name"] == "alice" and api.whoami()["orgs"][0]["name"] == "acme"
        url = api.create_repo("alice/tiny", private=True)
        assert url.repo_id == "alice/tiny" and api.create_repo("alice/tiny", exist_ok=True) == url
        made = api.upload_folder(repo_id="alice/tiny", folder_path=here / "model", commit_message="first")

        info = api.model_info("alice/tiny", files_metadata=True)
        assert info.sha == made.oid and info.private and info.gated is False and info.author == "alice"
        assert info.card_data.license == "mit" and info.config["model_type"] == "clip"
        assert info.safetensors.parameters == {"F32": 5_000_007} and info.library_name == "transformers"
        assert {"vision", "license:mit", "base_model:openai/clip", "dataset:mnist", "safetensors"} <= set(info.tags)
        files = {file.rfilename: file for file in info.siblings}
        assert files["model.safetensors"].lfs.size == files["model.safetensors"].size > 20_000_000
        assert files["config.json"].lfs is None and files["empty.txt"].size == 0
        some = api.model_info("alice/tiny", expand=["safetensors", "baseModels"])
        assert some.safetensors.total == 5_000_007 and some.sha is None
        assert some.base_models["relation"] == "finetune"

        header = api.parse_safetensors_file_metadata("alice/tiny", "model.safetensors")
        assert header.tensors["b"].shape == [7]
        assert api.get_safetensors_metadata("alice/tiny").parameter_count == {"F32": 5_000_007}

        copy = Path(snapshot_download("alice/tiny"))
        assert copy.name == made.oid
        for path in ("README.md", "config.json", "sub/a b.json", "empty.txt", "model.safetensors"):
            assert (copy / path).read_bytes() == (here / "model" / path).read_bytes(), path

        api.create_branch("alice/tiny", branch="dev/x")
        api.create_tag("alice/tiny", tag="v1", revision="dev/x")
        assert error_of(api.create_branch, "alice/tiny", branch="dev/x").response.status_code == 409
        proposed = api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id="alice/tiny", create_pr=True)
        assert proposed.pr_num == 1
        assert Path(hf_hub_download("alice/tiny", "x.txt", revision="refs/pr/1")).read_bytes() == b"x"
        assert not api.file_exists("alice/tiny", "x.txt")
        refs = api.list_repo_refs("alice/tiny", include_pull_requests=True)
        assert [ref.name for ref in refs.branches] == ["main", "dev/x"] and refs.tags[0].target_commit == made.oid
        assert [ref.name for ref in refs.pull_requests] == ["refs/pr/1"]
        api.delete_branch("alice/tiny", branch="dev/x")
        api.delete_tag("alice/tiny", tag="v1")

        card = ModelCard.load("alice/tiny")
        card.data.tags.append("new")
        card.validate()
        card.push_to_hub("alice/tiny")
        assert ModelCard.load("alice/tiny").data.tags == ["vision", "new"]
        """)
    repo = hub.repo("alice/tiny")
    assert repo.read("model.safetensors") == (folder / "model.safetensors").read_bytes()
    assert [commit.title for commit in repo.history()][1:] == ["first", "initial commit"]
    assert set(repo.branches) == {"main"}
    assert not repo.tags
    run("api.delete_repo('alice/tiny'); api.delete_repo('alice/tiny', missing_ok=True)")
    with pytest.raises(Refusal, match="404"):
        hub.repo("alice/tiny")


def test_pushing_the_same_again_changes_nothing(hub: Hub, run) -> None:
    repo = hub.create("alice/tiny")
    sha = repo.commit({"config.json": "{}", "model.safetensors": safetensors_bytes(a=(5,))})
    run("""
        folder = snapshot_download("alice/tiny")
        again = api.upload_folder(repo_id="alice/tiny", folder_path=folder)
        assert again.oid == api.model_info("alice/tiny").sha
        """)
    assert repo.head() == sha
    assert not [request for request in hub.log if request.method == "PUT"]


def test_the_headers_of_shards_are_read(hub: Hub, run) -> None:
    index = {"metadata": {"total_size": 28}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.create("alice/sharded").commit(
        {
            "model.safetensors.index.json": json.dumps(index),
            "model-1.safetensors": safetensors_bytes(a=(3,)),
            "model-2.safetensors": safetensors_bytes(b=(4,)),
        }
    )
    hub.create("alice/broken").commit({"model.safetensors": b"not at all"})
    run("""
        for read in (api.get_safetensors_metadata, api.get_sharded_safetensors_metadata):
            found = read("alice/sharded")
            assert found.sharded and found.weight_map["b"] == "model-2.safetensors"
            assert found.parameter_count == {"F32": 7} and found.metadata == {"total_size": 28}
        assert api.model_info("alice/sharded").safetensors.total == 7
        assert api.model_info("alice/broken").safetensors is None
        """)


def test_commits_delete_copy_and_refuse(hub: Hub, run) -> None:
    repo = hub.create("acme/tiny")
    first = repo.commit({"a.txt": "a", "dir/b.txt": "b", "dir/c.bin": b"c" * 50})
    run(
        f"first = {first!r}\n"
        + """
from huggingface_hub import CommitOperationAdd as Add, CommitOperationCopy as Copy, CommitOperationDelete as Delete
def commit(*operations, **kwargs):
    return api.create_commit("acme/tiny", list(operations), commit_message="change", **kwargs)
commit(Copy("dir/c.bin", "d.bin"), Delete("a.txt"), Add("e.txt", b"e"), parent_commit=first)
assert api.list_repo_files("acme/tiny") == [".gitattributes", "d.bin", "dir/b.txt", "dir/c.bin", "e.txt"]
assert error_of(commit, Add("f.txt", b"f"), parent_commit=first).response.status_code == 412
assert isinstance(error_of(commit, Delete("nowhere.txt")), RemoteEntryNotFoundError)
assert isinstance(error_of(commit, Add("f.txt", b"f"), revision="nowhere"), RevisionNotFoundError)
commit(Delete("dir/"))
assert [entry.path for entry in api.list_repo_tree("acme/tiny")] == [".gitattributes", "d.bin", "e.txt"]
assert [entry.path for entry in api.get_paths_info("acme/tiny", ["d.bin", "no"], expand=True)] == ["d.bin"]
assert [commit.title for commit in api.list_repo_commits("acme/tiny")][:2] == ["change", "change"]
assert isinstance(error_of(api.upload_file, path_or_fileobj=b"---\\ntags: x\\n---\\n", path_in_repo="README.md",
                           repo_id="acme/tiny"), ValueError)
"""
    )
    assert repo.read("d.bin") == b"c" * 50
    assert repo.read("a.txt", first) == b"a"


def test_an_lfs_object_that_was_never_sent_is_refused(hub: Hub, tmp_path: Path) -> None:
    repo = hub.create("alice/tiny")
    lines = [
        {"key": "header", "value": {"summary": "s"}},
        {"key": "lfsFile", "value": {"path": "x.bin", "algo": "sha256", "oid": "0" * 64, "size": 3}},
    ]
    body = b"\n".join(json.dumps(line).encode() for line in lines)
    status, _, answer = ask(hub, "POST", "/api/models/alice/tiny/commit/main", body, "hf_alice")
    assert status == 400
    assert b"was not uploaded" in answer
    assert len(repo.history()) == 1


# -- rights and errors


def test_errors_become_the_clients_exceptions(hub: Hub, run) -> None:
    hub.create("alice/tiny").commit({"a.txt": "a"})
    hub.create("alice/secret", private=True)
    hub.create("alice/off").disabled = True
    script = """
        assert type(error_of(api.model_info, "alice/none")) is RepositoryNotFoundError
        assert type(error_of(api.model_info, "alice/secret")) is RepositoryNotFoundError
        assert type(error_of(hf_hub_download, "alice/none", "a.txt")) is RepositoryNotFoundError
        assert type(error_of(hf_hub_download, "alice/tiny", "a.txt", revision="no")) is RevisionNotFoundError
        assert type(error_of(hf_hub_download, "alice/tiny", "b.txt")) is RemoteEntryNotFoundError
        assert type(error_of(api.list_repo_tree("alice/tiny", "no").__next__)) is RemoteEntryNotFoundError
        assert type(error_of(snapshot_download, "alice/none")) is RepositoryNotFoundError
        assert type(error_of(hf_hub_download, "alice/off", "a.txt").__cause__) is DisabledRepoError
        """
    run(script, "hf_bob")
    run(script, None)
    run(
        """
        assert error_of(api.create_repo, "alice/new").response.status_code == 403
        assert api.create_repo("alice/tiny", exist_ok=True).repo_id == "alice/tiny"
        upload = dict(path_or_fileobj=b"b", path_in_repo="b.txt", repo_id="alice/tiny")
        assert error_of(api.upload_file, **upload).response.status_code == 403
        assert api.upload_file(**upload, create_pr=True).pr_num == 1
        assert error_of(api.delete_repo, "alice/tiny").response.status_code == 403
        assert error_of(api.auth_check, "alice/tiny", write=True).response.status_code == 403
        assert api.auth_check("alice/tiny") is None
        """,
        "hf_bob",
    )
    assert "b.txt" not in hub.repo("alice/tiny").files()
    assert hub.repo("alice/tiny").read("b.txt", "refs/pr/1") == b"b"
    run(
        """
        upload = dict(path_or_fileobj=b"b", path_in_repo="b.txt", repo_id="alice/tiny")
        assert error_of(api.create_repo, "alice/new").response.status_code == 401
        assert isinstance(error_of(api.upload_file, **upload), RepositoryNotFoundError)
        error = error_of(api.model_info, "alice/tiny", token="hf_wrong")
        assert type(error) is HfHubHTTPError and "Invalid credentials" in str(error)
        """,
        None,
    )
    hub.add_user("alice", "hf_read", role="read")
    run("assert error_of(api.create_repo, 'alice/new').response.status_code == 403", "hf_read")


def test_gated_private_and_renamed(hub: Hub, run) -> None:
    gated = hub.create("acme/gated", gated="manual")
    gated.commit({"config.json": "{}"})
    hub.create("alice/secret", private=True).commit({"a.txt": "a"})
    hub.create("alice/old").commit({"a.txt": "old"})
    hub.move("alice/old", "acme/new")
    refused = """
        assert api.model_info("acme/gated").gated == "manual"
        assert type(error_of(hf_hub_download, "acme/gated", "config.json")) is GatedRepoError
        assert type(error_of(snapshot_download, "acme/gated")) is GatedRepoError
        assert type(error_of(api.auth_check, "acme/gated")) is GatedRepoError
        assert error_of(hf_hub_download, "acme/gated", "config.json").response.status_code == STATUS
        """
    run(refused.replace("STATUS", "401"), None)
    run(refused.replace("STATUS", "403"), "hf_bob")
    gated.grant("bob")
    run("hf_hub_download('acme/gated', 'config.json')", "hf_bob")
    run("""
        hf_hub_download("acme/gated", "config.json")
        hf_hub_download("alice/secret", "a.txt")
        assert api.model_info("alice/old").id == "acme/new"
        assert Path(hf_hub_download("alice/old", "a.txt")).read_text() == "old"
        assert Path(snapshot_download("alice/old"), "a.txt").read_text() == "old"
        api.move_repo("acme/new", "alice/newer")
        assert api.model_info("alice/old").id == api.model_info("acme/new").id == "alice/newer"
        api.update_repo_settings("alice/newer", visibility="private", gated="auto")
        """)
    repo = hub.repo("alice/newer")
    assert (repo.private, repo.gated) == (True, "auto")


def test_the_conversion_bots_pull_request_is_found_and_read(hub: Hub, run) -> None:
    repo = hub.create("alice/old")
    main = repo.commit({"pytorch_model.bin": b"pickle"})
    number = repo.pull_request({"model.safetensors": safetensors_bytes(a=(3,))}, "Adding `safetensors`", "SFconvertbot")
    repo.discuss("a question", "bob")
    run(
        f"main = {main!r}\n"
        + """
found = {discussion.title: discussion for discussion in api.get_repo_discussions("alice/old")}
bot = found["Adding `safetensors`"]
assert (bot.author, bot.status, bot.is_pull_request, bot.git_reference) == ("SFconvertbot", "open", True, "refs/pr/1")
assert not found["a question"].is_pull_request
only = api.get_repo_discussions("alice/old", author="SFconvertbot", discussion_type="pull_request")
assert [discussion.num for discussion in only] == [1]
assert api.get_discussion_details("alice/old", 1).target_branch == "refs/heads/main"
assert api.list_repo_commits("alice/old", revision=bot.git_reference)[1].commit_id == main
header = api.parse_safetensors_file_metadata("alice/old", "model.safetensors", revision=bot.git_reference)
assert list(header.tensors) == ["a"]
draft = api.create_pull_request("alice/old", title="mine")
assert (draft.num, draft.status) == (3, "draft")
"""
    )
    assert number == 1
    assert "model.safetensors" not in repo.files()


# -- listings and cards


def test_listings_search_filter_and_turn_pages(hub: Hub, run) -> None:
    for name in ("clip-a", "clip-b", "bert"):
        hub.create(f"alice/{name}").commit({"README.md": GOOD_CARD if name == "bert" else "# none"})
    hub.create("acme/clip-c")
    hub.create("bob/clip-private", private=True)
    hub.create("acme/many").commit({f"dir/{index:04}.txt": "" for index in range(1100)})
    run("""
        assert {model.id for model in api.list_models(search="CLIP")} == {"alice/clip-a", "alice/clip-b", "acme/clip-c"}
        assert {model.id for model in api.list_models(author="acme", search="clip")} == {"acme/clip-c"}
        assert [model.id for model in api.list_models(filter="license:mit")] == ["alice/bert"]
        assert len(list(api.list_models(limit=2))) == 2
        assert len(list(api.list_datasets())) == 0
        assert next(iter(api.list_models(search="bert", full=True))).siblings is not None
        assert len(api.list_repo_files("acme/many")) == 1101
        assert len(list(api.list_repo_tree("acme/many", "dir"))) == 1100
        """)
    pages = [request for request in hub.log if request.path.endswith("/tree/main") or "tree/main/dir" in request.path]
    assert len(pages) == 4


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("license: [mit", "Invalid YAML"),
        ("license: 3", '"license"'),
        ("license: my-own", '"license"'),
        ("tags: vision", '"tags" must be an array'),
        ("tags: [1]", '"tags[0]"'),
        ("base_model: {a: b}", '"base_model"'),
        ("base_model: /home/me/model", '"base_model"'),
        ("datasets: {a: b}", '"datasets"'),
        ("pipeline_tag: [a]", '"pipeline_tag"'),
        ("model-index: {}", '"model-index" must be an array'),
        ("model-index: [{results: []}]", '"model-index[0].name" is required'),
        ("model-index: [{name: m, results: [{}]}]", '"model-index[0].results[0].task" is required'),
        (
            "model-index: [{name: m, results: [{task: {type: t}, dataset: {type: d}, metrics: []}]}]",
            '"model-index[0].results[0].dataset.name" is required',
        ),
        (
            "model-index: [{name: m, results: [{task: {type: t}, dataset: {type: d, name: n}, metrics: [{type: a}]}]}]",
            '"model-index[0].results[0].metrics[0].value" is required',
        ),
    ],
)
def test_a_bad_card_is_judged(block: str, complaint: str) -> None:
    errors, _ = judge(f"---\n{block}\n---\ntext")
    assert any(complaint in error for error in errors), errors


def test_a_good_card_passes_and_a_missing_one_is_warned_of(hub: Hub, run) -> None:
    assert judge(GOOD_CARD) == ([], [])
    hub.create("alice/tiny")
    run("""
        result = EvalResult("image-classification", "mnist", "MNIST", "accuracy", 0.5)
        data = ModelCardData(model_name="m", eval_results=[result], license="mit", base_model=["a/b", "c/d"])
        ModelCard(f"---\\n{data.to_yaml()}\\n---\\n# m").push_to_hub("alice/tiny")
        assert api.model_info("alice/tiny").model_index[0]["name"] == "m"
        assert isinstance(error_of(ModelCard("---\\nlicense: 3\\n---\\n").validate), ValueError)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            api.upload_file(path_or_fileobj=b"# none", path_in_repo="README.md", repo_id="alice/tiny")
        assert any("empty or missing yaml metadata" in str(warning.message) for warning in caught)
        """)


# -- faults


def test_planted_statuses_are_met(hub: Hub, run) -> None:
    hub.create("alice/tiny").commit({"a.txt": "a"})
    head = hub.inject(Fault("HEAD", "/resolve/", status=503))
    info = hub.inject(Fault("GET", "/api/models/alice/tiny$", status=500, after=1))
    tree = hub.inject(Fault("GET", "/tree/", status=429, headers={"Retry-After": "3"}))
    repo = hub.inject(Fault("GET", "/refs", status=404, headers={"X-Error-Code": "RepoNotFound"}))
    run("""
        hf_hub_download("alice/tiny", "a.txt")
        api.model_info("alice/tiny")
        assert error_of(api.model_info, "alice/tiny").response.status_code == 500
        waits.clear()
        assert "a.txt" in api.list_repo_files("alice/tiny") and waits == [4]
        assert type(error_of(api.list_repo_refs, "alice/tiny")) is RepositoryNotFoundError
        """)
    assert [fault.fired for fault in (head, info, tree, repo)] == [1, 1, 1, 1]
    assert hub.faults == []


def test_a_cut_download_is_resumed(hub: Hub, run) -> None:
    content = os.urandom(1 << 20) * 25
    hub.create("alice/tiny").commit({"big.bin": content})
    hub.inject(Fault("GET", "/big.bin", kind="cut", part=0.9))
    run("""
        import hashlib
        path = hf_hub_download("alice/tiny", "big.bin")
        assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == api.get_paths_info(
            "alice/tiny", ["big.bin"])[0].lfs.sha256
        """)
    gets = [request for request in hub.log if request.method == "GET" and request.path.endswith("/big.bin")]
    assert [request.status for request in gets] == [200, 206]
    assert gets[0].sent == int(len(content) * 0.9)
    assert hub.bytes_sent() >= len(content)


def test_dropped_lost_and_slow_requests(hub: Hub, run) -> None:
    repo = hub.create("alice/tiny")
    repo.commit({"a.txt": "a"})
    before = len(repo.history())
    hub.inject(Fault("POST", "/commit/", kind="drop"))
    run("error_of(api.upload_file, path_or_fileobj=b'b', path_in_repo='b.txt', repo_id='alice/tiny')")
    assert len(repo.history()) == before
    hub.inject(Fault("POST", "/commit/", kind="lost"))
    run("error_of(api.upload_file, path_or_fileobj=b'b', path_in_repo='b.txt', repo_id='alice/tiny')")
    assert repo.read("b.txt") == b"b"
    assert [request.status for request in hub.log if "/commit/" in request.path] == [0, 0]
    hub.inject(Fault("GET", "/api/models/alice/tiny", kind="slow", seconds=0.5))
    hub.inject(Fault("GET", "/tree/", kind="drop"))
    run("""
        started = time.monotonic()
        api.model_info("alice/tiny")
        assert time.monotonic() - started > 0.5
        assert "b.txt" in api.list_repo_files("alice/tiny") and waits
        """)
    assert hub.faults == []


# -- the other libraries


def test_datasets_reads_parquet_images_and_legacy_names(hub: Hub, run) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", "b", "c"], "label": [0, 1, 0]}), table)
    picture = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(picture, "PNG")
    parquet = {"data/train-00000-of-00001.parquet": table.getvalue()}
    hub.create("alice/rows", type="dataset").commit(parquet)
    hub.create("alice/pictures", type="dataset").commit(
        {f"{split}/{label}/0.png": picture.getvalue() for split in ("train", "test") for label in ("cat", "dog")}
    )
    hub.create("small", type="dataset").commit(parquet)
    hub.create("mnist", type="dataset").commit(parquet)
    hub.move("mnist", "ylecun/mnist", type="dataset")
    run(
        """
        from datasets import Dataset, load_dataset
        from datasets.exceptions import DatasetNotFoundError
        assert load_dataset("alice/rows", split="train")["text"][:] == ["a", "b", "c"]
        assert [row["label"] for row in load_dataset("alice/rows", split="train", streaming=True)] == [0, 1, 0]
        pictures = load_dataset("alice/pictures")
        assert pictures["test"].features["label"].names == ["cat", "dog"]
        assert pictures["train"][0]["image"].size == (4, 4)
        for name in ("small", "mnist"):
            hf_hub_download(name, "data/train-00000-of-00001.parquet", repo_type="dataset")
            snapshot_download(name, repo_type="dataset")
        # load_dataset("mnist") itself fails: huggingface_hub 2 refuses hf:// addresses without a namespace
        assert api.dataset_info("small").id == "small" and api.dataset_info("mnist").id == "ylecun/mnist"
        assert load_dataset(api.dataset_info("mnist").id, split="train").num_rows == 3
        assert isinstance(error_of(load_dataset, "alice/none"), DatasetNotFoundError)
        Dataset.from_dict({"x": [1, 2]}).push_to_hub("alice/pushed")
        assert load_dataset("alice/pushed", split="train")["x"][:] == [1, 2]
        """
    )
    assert "data/train-00000-of-00001.parquet" in hub.repo("alice/pushed", "dataset").files()


def test_transformers_peft_and_open_clip_read_and_push(hub: Hub, run) -> None:
    run(
        """
        import open_clip, torch
        from peft import LoraConfig, PeftModel, get_peft_model
        from transformers import CLIPVisionConfig, CLIPVisionModel
        config = CLIPVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                  image_size=8, patch_size=4)
        model = CLIPVisionModel(config)
        model.push_to_hub("alice/vision")
        again = CLIPVisionModel.from_pretrained("alice/vision")
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
        adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        adapter.push_to_hub("alice/adapter")
        PeftModel.from_pretrained(again, "alice/adapter")
        assert "peft" in api.model_info("alice/adapter").config

        tiny = {"embed_dim": 8, "vision_cfg": {"image_size": 8, "layers": 1, "width": 64, "patch_size": 4},
                "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1}}
        folder = here / "clip"
        folder.mkdir()
        from safetensors.torch import save_file
        first = open_clip.CLIP(**tiny)
        save_file(first.state_dict(), folder / "open_clip_model.safetensors")
        (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": tiny, "preprocess_cfg": {}}))
        api.create_repo("alice/clip")
        api.upload_folder(repo_id="alice/clip", folder_path=folder)
        second, _ = open_clip.create_model_from_pretrained("hf-hub:alice/clip")
        assert torch.equal(first.visual.proj, second.visual.proj)
        """,
    )
    assert hub.repo("alice/adapter").files()["adapter_model.safetensors"]


# -- the wire


def ask(
    hub: Hub, method: str, target: str, body: bytes = b"", token: str | None = None, **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    """One bare request: the status, the headers, the body."""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    try:
        connection.request(method, target, body, headers | ({"Authorization": f"Bearer {token}"} if token else {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def test_ranges(hub: Hub) -> None:
    hub.create("alice/tiny").commit({"a.bin": b"0123456789"})
    target = "/alice/tiny/resolve/main/a.bin"
    for span, content in (("0-3", b"0123"), ("7-", b"789"), ("-2", b"89"), ("8-100", b"89")):
        status, headers, body = ask(hub, "GET", target, Range=f"bytes={span}")
        assert (status, body) == (206, content)
        assert headers["Content-Range"].endswith("/10")
    assert ask(hub, "GET", target, Range="bytes=10-")[0] == 416
    status, headers, body = ask(hub, "HEAD", target)
    assert (status, headers["Content-Length"], body) == (200, "10", b"")
    assert headers["X-Repo-Commit"] == hub.repo("alice/tiny").head()
    assert [request.range for request in hub.log[:2]] == ["bytes=0-3", "bytes=7-"]


def test_a_file_on_disk_is_served_without_being_read_into_memory(hub: Hub, tmp_path: Path) -> None:
    size = 200_000_000
    path = tmp_path / "big.bin"
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 4)
        file.write(b"tail")
    tracemalloc.start()
    repo = hub.create("alice/big")
    repo.commit({"big.bin": path})
    status, _, body = ask(hub, "GET", "/alice/big/resolve/main/big.bin", Range=f"bytes={size - 6}-")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (status, body) == (206, b"\0\0tail")
    assert peak < 10_000_000
    assert repo.files()["big.bin"] == size
    assert hub.bytes_sent() == 6


def test_segments_are_split_before_they_are_unquoted(hub: Hub) -> None:
    repo = hub.create("alice/tiny")
    repo.branch("dev/x")
    repo.commit({"sub/a b.txt": "dev"}, revision="dev/x")
    assert ask(hub, "GET", "/alice/tiny/resolve/dev%2Fx/sub/a%20b.txt")[2] == b"dev"
    status, _, body = ask(hub, "GET", "/api/models/alice/tiny/tree/dev%2Fx/sub?recursive=false")
    assert (status, json.loads(body)[0]["path"]) == (200, "sub/a b.txt")


def test_a_renamed_repository_answers_307_with_a_relative_address(hub: Hub) -> None:
    hub.create("data", type="dataset").commit({"a.txt": "a"})
    hub.move("data", "alice/data", type="dataset")
    for old, new in (
        ("/api/datasets/data/tree/main?recursive=true", "/api/datasets/alice/data/tree/main?recursive=true"),
        ("/datasets/data/resolve/main/a.txt", "/datasets/alice/data/resolve/main/a.txt"),
    ):
        status, headers, _ = ask(hub, "HEAD", old)
        assert (status, headers["Location"]) == (307, new)
        assert ask(hub, "HEAD", new)[0] == 200


def test_connections_stay_open_and_end_with_the_hub(hub: Hub) -> None:
    hub.create("alice/tiny")
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    for _ in range(2):
        connection.request("GET", "/api/models/alice/tiny")
        connection.getresponse().read()
        socket = connection.sock
    assert socket is not None
    port = hub.port
    hub.stop()
    assert socket.recv(1) == b""
    assert hub.start().port == port
    assert ask(hub, "GET", "/api/models/alice/tiny")[0] == 200
    hub.reset()
    assert ask(hub, "GET", "/api/models/alice/tiny")[0] == 401
    assert [request.status for request in hub.log] == [401]


def test_telemetry_is_taken(hub: Hub) -> None:
    assert ask(hub, "HEAD", "/api/telemetry/hf_hub/test")[0] == 200


def test_the_environment_holds_nothing_of_the_tests_own(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "mine")
    found = {name: value for name, value in hub.environment(tmp_path).items() if name.startswith("HF_")}
    assert found == {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    assert hub.environment(tmp_path, "hf_alice")["HF_TOKEN"] == "hf_alice"


def test_importing_the_hub_imports_no_client() -> None:
    heavy = ("huggingface_hub", "torch", "datasets")
    code = f"import support.hub, sys; sys.exit(any(name in sys.modules for name in {heavy!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", check=True)
