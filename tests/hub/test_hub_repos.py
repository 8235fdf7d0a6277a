"""Models by Hub id: what is found, what is refused and how, and what travels over the wire."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file

from hf_bico.errors import (
    AccessError,
    BicoError,
    BrokenWeightsError,
    EmptyRepoError,
    HubUnavailableError,
    NotCachedError,
    PickledWeightsError,
    RepoError,
    RepoNotFoundError,
    RevisionNotFoundError,
    TokenError,
    WeightsNotFoundError,
    WrongRepoTypeError,
)
from hf_bico.hub.client import Hub as Client
from hf_bico.hub.client import HubRepo, RemoteFile
from hf_bico.hub.references import HubReference
from hf_bico.models.model import Model
from hf_bico.porting.planner import plan
from support import forks
from support.hub import Fault, Hub
from support.hub_scenes import BASE, DATA, SOURCE, TARGET, publish, upload
from support.loopback import TOKEN

WEIGHTS = "open_clip_model.safetensors"
STRANGER = "hf_secretOfStranger"


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits between tries are noted and not waited for."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


def downloads(hub: Hub) -> list[str]:
    """The weight files that were sent whole."""
    return [
        entry.path for entry in hub.log if entry.method == "GET" and entry.range is None and "safetensors" in entry.path
    ]


# what cannot be opened


def test_a_repo_that_is_missing_is_said_with_a_near_name(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    with pytest.raises(RepoNotFoundError, match=f"'user/vit-b16-eurosatt' is not on the Hub(.|\n)*'{SOURCE}'"):
        plan("user/vit-b16-eurosatt", TARGET)


def test_open_clips_own_names_are_suggested(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.delete(TARGET)
    with pytest.raises(RepoNotFoundError, match="did you mean 'ViT-B-16-plus-240/laion400m_e32'"):
        plan(SOURCE, TARGET)


def test_a_private_repo_is_hidden_and_a_token_is_named(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path)
    hub.repo(SOURCE).private = True
    hub.add_user("stranger", STRANGER)
    with pytest.raises(RepoNotFoundError, match="If it is private"):
        plan(SOURCE, TARGET, hub=Client(STRANGER))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RepoNotFoundError, match="hf auth login"):
        plan(SOURCE, TARGET)
    monkeypatch.setenv("HF_TOKEN", "hf_secretOfUser")
    assert plan(SOURCE, TARGET).lineage.source.name == SOURCE


def test_a_gated_repo_says_where_to_ask_and_nothing_is_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path)
    hub.repo(TARGET).gated = "manual"
    hub.add_user("stranger", STRANGER)
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    hub.clear_log()
    with pytest.raises(AccessError, match=f"gated(.|\n)*{TARGET}(.|\n)*hf auth login"):
        plan(SOURCE, TARGET)
    assert not any("safetensors" in entry.path for entry in hub.log)
    hub.repo(TARGET).grant("stranger")
    assert plan(SOURCE, TARGET).lineage.restricted == [TARGET]


def test_a_gated_data_set_is_noticed_before_any_weight(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path)
    hub.repo(DATA, "dataset").gated = "manual"
    hub.add_user("stranger", STRANGER)
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    hub.clear_log()
    with pytest.raises(AccessError, match=f"the data set '{DATA}' is gated(.|\n)*datasets/{DATA}"):
        plan(SOURCE, TARGET)
    assert not any("safetensors" in entry.path for entry in hub.log)


def test_revision_type_emptiness_and_token(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path)
    hub.create("user/empty")
    hub.create("user/words").commit({"README.md": "# words", "config.json": "{}"})
    with pytest.raises(RevisionNotFoundError, match="no revision 'v9'"):
        plan(f"{SOURCE}@v9", TARGET)
    with pytest.raises(WrongRepoTypeError, match="is a data set, not a model"):
        plan(DATA, TARGET)
    with pytest.raises(WrongRepoTypeError, match="is a model, not a data set"):
        plan(SOURCE, TARGET, data=BASE)
    with pytest.raises(EmptyRepoError, match="'user/empty' is empty"):
        plan(SOURCE, "user/empty")
    with pytest.raises(WeightsNotFoundError, match="no weights in 'user/words'"):
        plan(SOURCE, "user/words")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(TokenError, match="refuses this token(.|\n)*hf auth login"):
        plan(SOURCE, TARGET)


def test_an_adapter_as_the_target_is_refused_by_name(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    config = json.dumps({"base_model_name_or_path": BASE, "peft_type": "LORA"})
    hub.create("user/lora").commit({"adapter_config.json": config, "adapter_model.safetensors": b"x"})
    with pytest.raises(RepoError, match="'user/lora' is a PEFT adapter, not a model"):
        plan(SOURCE, "user/lora")
    with pytest.raises(BrokenWeightsError, match="'adapter_model.safetensors' of 'user/lora' cannot be read"):
        plan("user/lora", TARGET)


def test_a_file_name_that_leaves_the_folder_is_refused(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(TARGET).commit({"a/../../evil.json": "{}"})
    with pytest.raises(RepoNotFoundError, match="has a file named"):
        plan(SOURCE, TARGET)


def test_accents_of_either_form_are_names_of_their_own(hub: Hub) -> None:
    """As Linux has it; what was uploaded from a Mac may be of the longer form."""
    names = {"data/caf\u00e9.txt": b"one", "data/cafe\u0301.txt": b"two letters"}
    hub.create("user/data", type="dataset").commit(names)
    repo = Client().repo(HubReference("user/data"), "the data set", "dataset")
    folder = repo.fetch(names)
    assert {name: (folder / name).read_bytes() for name in names} == names
    assert all(RemoteFile(repo, name).read() == content for name, content in names.items())


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/api/models/", lambda repo: Client().repo(repo.requested, "the model")),
        ("/resolve/", lambda repo: repo.fetch(["config.json"])),
        ("/resolve/", lambda repo: RemoteFile(repo, "config.json").read()),
        ("/resolve/", lambda repo: repo.header("model.safetensors")),
        ("/api/repos/create", lambda repo: repo.request(lambda: repo.hub.api.create_repo("user/new"))),
    ],
    ids=["repo", "download", "range", "header", "push"],
)
def test_a_token_does_not_follow_a_redirect(
    hub: Hub, path: str, call: Callable[[HubRepo], object], no_waiting: list[float]
) -> None:
    hub.create("user/model").commit({"config.json": "{}", "model.safetensors": b"x" * 100})
    repo = Client().repo(HubReference("user/model"), "the model")
    with Hub() as other:
        other.add_user("user", TOKEN)
        headers = {"Location": f"{other.url}/elsewhere", "X-Repo-Commit": repo.commit, "ETag": '"0"'}
        hub.inject(Fault(path=path, status=307, headers=headers, times=None))
        with pytest.raises((BicoError, HfHubHTTPError)):
            call(repo)
    assert hub.log[-1].user == "user"
    assert {request.user for request in other.log} == {None}


def test_broken_weights_on_the_hub_are_named(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(TARGET).commit({WEIGHTS: b"\xff" * 200})
    with pytest.raises(BrokenWeightsError, match=f"'{WEIGHTS}' of '{TARGET}'"):
        plan(SOURCE, TARGET)


# a Hub with troubles


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_asked_again(hub: Hub, tmp_path: Path, no_waiting: list[float], status: int) -> None:
    publish(hub, tmp_path)
    hub.inject(Fault("GET", "/api/models/", "status", status=status, headers={"Retry-After": "7"}))
    hub.inject(Fault("GET", "safetensors", "status", status=status, headers={"Retry-After": "7"}))
    assert plan(SOURCE, TARGET).lineage.target.name == TARGET
    assert 7.0 in no_waiting
    assert not hub.faults


@pytest.mark.parametrize("kind", ["status", "drop"])
def test_a_hub_that_stays_away_is_said(hub: Hub, tmp_path: Path, no_waiting: list[float], kind: str) -> None:
    publish(hub, tmp_path)
    hub.inject(Fault("GET", f"/api/models/{TARGET}", kind, times=None, status=503))
    with pytest.raises(HubUnavailableError, match=f"the target '{TARGET}': the Hub at http.* cannot be read"):
        plan(SOURCE, TARGET)
    assert len(no_waiting) >= 3


def test_a_download_that_is_cut_goes_on(hub: Hub, tmp_path: Path, no_waiting: list[float]) -> None:
    scene = publish(hub, tmp_path)
    opened = Model.open(TARGET, "the target")
    hub.inject(Fault("GET", WEIGHTS, "cut"))
    fetched = opened.fetched()
    assert fetched.folder is not None
    assert (fetched.folder / WEIGHTS).read_bytes() == (scene.target / WEIGHTS).read_bytes()


# what travels


def test_only_the_files_that_are_needed_are_fetched_and_once(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(TARGET).commit({"pytorch_model.bin": b"0" * 1000, "examples/big.png": b"1" * 1000, "LICENSE": "MIT"})
    planned = plan(SOURCE, TARGET)
    counted: list[tuple[int, int]] = []
    hub.clear_log()
    total = planned.download_bytes
    fetched = planned.fetched(lambda stage, done, size: counted.append((done, size)))
    names = {entry.path.rpartition("/")[2] for entry in hub.log if entry.method == "GET"}
    assert names == {WEIGHTS, "tokenizer.json", "tokenizer_config.json", "LICENSE"}
    assert len(downloads(hub)) == 3
    assert counted[0] == (0, total)
    assert counted[-1] == (total, total)
    assert fetched.download_bytes == 0
    hub.clear_log()
    assert plan(SOURCE, TARGET).fetched().download_bytes == 0
    assert downloads(hub) == []


def test_it_works_offline_from_the_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path)
    online = plan(SOURCE, TARGET, data=str(tmp_path / "pictures")).fetched()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.clear_log()
    offline = plan(SOURCE, TARGET, data=str(tmp_path / "pictures")).fetched()
    assert [model.commit for model in offline.lineage.models] == [model.commit for model in online.lineage.models]
    assert hub.log == []
    with pytest.raises(NotCachedError, match="not in the cache(.|\n)*HF_HUB_OFFLINE"):
        plan(SOURCE, "laion/never-seen")


def test_offline_without_the_weights_is_said(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path)
    plan(SOURCE, TARGET)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsNotFoundError):
        plan(SOURCE, TARGET, data=str(tmp_path / "pictures"))


def big_model(folder: Path, width: int, size: int) -> dict[str, bytes | str | Path]:
    """A repo whose weights are a hundred megabytes of nothing under a real header."""
    import open_clip

    config = {
        "embed_dim": 512,
        "vision_cfg": {"image_size": 224, "layers": 12, "width": width, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12},
    }
    with torch.device("meta"):
        state = open_clip.CLIP(**config).state_dict()
    header: dict[str, object] = {}
    position = 0
    for name, tensor in state.items():
        header[name] = {
            "dtype": "F16",
            "shape": list(tensor.shape),
            "data_offsets": [position, position + 2 * tensor.numel()],
        }
        position += 2 * tensor.numel()
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    assert (folder / WEIGHTS).stat().st_size > size
    return {WEIGHTS: folder / WEIGHTS, "open_clip_config.json": json.dumps({"model_cfg": config, "preprocess_cfg": {}})}


def test_a_plan_of_large_repos_costs_under_a_megabyte_and_no_torch(hub: Hub, tmp_path: Path) -> None:
    source = big_model(tmp_path / "a", 768, 100_000_000)
    card = f"---\nbase_model: {BASE}\ndatasets: {DATA}\n---\n"
    hub.create(SOURCE).commit({**source, "README.md": card})
    hub.create(BASE).commit(source)
    hub.create(TARGET).commit(big_model(tmp_path / "b", 896, 100_000_000))
    hub.create(DATA, type="dataset").commit({"data/train.parquet": b"0" * 1000})
    hub.clear_log()
    code = (
        "import sys, json\nfrom hf_bico.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "plan", SOURCE, "--to", TARGET, "--json"],
        env=hub.environment(tmp_path / "home", "hf_secretOfUser"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["sites"]) == 12 * 6 + 1
    assert found["download_bytes"] > 300_000_000
    assert found["output_bytes"] > 100_000_000
    assert found["data"]["id"] == DATA
    served = hub.bytes_sent()
    print(f"plan of three repos of {found['download_bytes'] / 1e6:.0f} MB: {served / 1e3:.0f} kB served")
    assert served < 1_000_000


# shards, conversions, pickles, names


def test_shards_are_planned_by_their_headers(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    scene = publish(hub, tmp_path / "s", ("transformers", "transformers"))
    state = load_file(scene.target / "model.safetensors")
    (tmp_path / "sharded").mkdir()
    save_torch_state_dict(state, tmp_path / "sharded", max_shard_size="20KB")
    repo = hub.repo(TARGET)
    repo.commit({file.name: file for file in (tmp_path / "sharded").iterdir()}, delete=["model.safetensors"])
    opened = Model.open(TARGET, "the target")
    assert len(opened.weights.names) > 2  # type: ignore[union-attr]
    assert set(opened.checkpoint.shapes) == set(state)
    fetched = opened.fetched()
    assert all(torch.equal(fetched.checkpoint.tensor(name), tensor) for name, tensor in state.items())


def make_pickled(hub: Hub, folder: Path, repo_id: str = BASE) -> dict[str, torch.Tensor]:
    """Make a repo's weights a pickle, as older repos have them."""
    state = load_file(folder / "model.safetensors")
    torch.save(state, folder.parent / "pickled.bin")
    hub.repo(repo_id).commit(
        {"pytorch_model.bin": (folder.parent / "pickled.bin").read_bytes()}, delete=["model.safetensors"]
    )
    return state


def test_pickles_are_refused_with_the_way_out(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    make_pickled(hub, scene.base)
    with pytest.raises(PickledWeightsError, match=f"'{BASE}' holds only pickled weights(.|\n)*allow_pickle=True"):
        plan(SOURCE, TARGET)


def test_the_hubs_conversion_is_used_and_pinned(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    state = make_pickled(hub, scene.base)
    files = {"model.safetensors": scene.base / "model.safetensors"}
    hub.repo(BASE).pull_request({"model.safetensors": b"evil"}, "Adding `safetensors` variant", "somebody")
    number = hub.repo(BASE).pull_request(files, "Adding `safetensors` variant of this model", "SFconvertbot")
    planned = plan(SOURCE, TARGET).fetched()
    assert planned.lineage.base.commit == hub.repo(BASE).head(f"refs/pr/{number}")
    assert all(torch.equal(planned.lineage.base.checkpoint.tensor(name), value) for name, value in state.items())
    assert any(f"refs/pr/{number}" in notice for notice in planned.lineage.notices)


def test_a_conversion_of_older_weights_is_not_used(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    make_pickled(hub, scene.base)
    files = {"model.safetensors": scene.base / "model.safetensors"}
    hub.repo(BASE).pull_request(files, "Adding `safetensors` variant of this model", "SFconvertbot")
    hub.repo(BASE).commit({"pytorch_model.bin": b"newer"})
    with pytest.raises(PickledWeightsError):
        plan(SOURCE, TARGET)


def test_with_allow_pickle_the_tensors_are_the_same(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    state = make_pickled(hub, scene.base)
    opened = Model.open(BASE, "the base", allow_pickle=True).fetched()
    assert all(torch.equal(opened.checkpoint.tensor(name), value) for name, value in state.items())
    assert opened.load(torch.device("cpu"), torch.float32).layout == opened.layout
    assert "pickled" in (opened.notice or "")
    assert opened.commit == hub.repo(BASE).head()


def test_even_with_allow_pickle_no_code_runs(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path, ("transformers", "transformers"))
    mark = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {mark}",)

    hub.repo(BASE).commit({"pytorch_model.bin": pickle.dumps(Evil())}, delete=["model.safetensors"])
    with pytest.raises(BrokenWeightsError, match="tensors alone"):
        plan(SOURCE, TARGET, allow_pickle=True)
    assert not mark.exists()


def test_names_of_open_clip_stand_for_their_repos(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path)
    name = "timm/vit_base_patch16_plus_clip_240.laion400m_e31"
    upload(hub, name, scene.target)
    assert plan(SOURCE, "ViT-B-16-plus-240/laion400m_e32").lineage.target.name == name
    with pytest.raises(RepoNotFoundError, match="knows no 'nothing' of ViT-B-16-plus-240(.|\n)*laion400m_e31"):
        plan(SOURCE, "ViT-B-16-plus-240/nothing")


def test_a_folder_comes_before_a_hub_id_of_the_same_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = publish(hub, tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laion").mkdir()
    scene.target.rename(tmp_path / TARGET)
    opened = Model.open(TARGET, "the target")
    assert (opened.name, opened.commit) == ("ViT-B-16-plus", None)
    assert Model.open(f"hf-hub:{TARGET}", "the target").commit == hub.repo(TARGET).head()


# what a run pins, and what it leaves for later ones


def test_what_was_planned_is_what_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    """Main moves on between the plan and the download."""
    scene = publish(hub, tmp_path)
    planned = plan(SOURCE, TARGET)
    hub.repo(TARGET).commit({WEIGHTS: (scene.target / WEIGHTS).read_bytes()[:-4] + b"\0\0\0\0"})
    fetched = planned.fetched().lineage.target
    assert fetched.folder is not None
    assert (fetched.folder / WEIGHTS).read_bytes() == (scene.target / WEIGHTS).read_bytes()


def test_offline_sees_the_commit_of_the_last_run(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path)
    planned = plan(SOURCE, TARGET, data=str(tmp_path / "pictures"))
    hub.repo(TARGET).commit({"notes.md": "newer"})
    planned.fetched()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    again = plan(SOURCE, TARGET, data=str(tmp_path / "pictures")).fetched()
    assert again.lineage.target.commit == planned.lineage.target.commit


def test_a_conversion_works_offline_too(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    make_pickled(hub, scene.base)
    files = {"model.safetensors": scene.base / "model.safetensors"}
    hub.repo(BASE).pull_request(files, "Adding `safetensors` variant of this model", "SFconvertbot")
    online = plan(SOURCE, TARGET, data=str(scene.data)).fetched()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    offline = plan(SOURCE, TARGET, data=str(scene.data)).fetched()
    assert offline.lineage.base.commit == online.lineage.base.commit


@pytest.mark.parametrize(("author", "status"), [("somebody-else", "open"), ("SFconvertbot", "closed")])
def test_a_conversion_by_somebody_else_or_a_closed_one_is_not_used(
    hub: Hub, tmp_path: Path, author: str, status: str
) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    make_pickled(hub, scene.base)
    files = {"model.safetensors": scene.base / "model.safetensors"}
    number = hub.repo(BASE).pull_request(files, "Adding `safetensors` variant of this model", author)
    hub.repo(BASE).discussions[number].status = status
    with pytest.raises(PickledWeightsError):
        plan(SOURCE, TARGET)


def pickled_shards(hub: Hub, repo_id: str, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Weights in eight pickles, the last tensors in the last of them."""
    names = sorted(state)
    parts = [names[index::8] for index in range(8)]
    weight_map, files = {}, {}
    for index, part in enumerate(parts):
        file = f"pytorch_model-{index + 1:05d}-of-00008.bin"
        torch.save({name: state[name] for name in part}, folder / file)
        files[file] = (folder / file).read_bytes()
        weight_map |= dict.fromkeys(part, file)
    files["pytorch_model.bin.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    hub.repo(repo_id).commit(files, delete=["model.safetensors"])


def test_pickles_that_differ_in_their_last_shard_are_not_mixed_up(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    state = load_file(scene.base / "model.safetensors")
    pickled_shards(hub, BASE, state, tmp_path)
    assert Model.open(BASE, "the base", allow_pickle=True).fetched().checkpoint.shapes.keys() == state.keys()
    last = sorted(state)[7::8][-1]
    pickled_shards(hub, SOURCE, {**state, last: state[last] + 1}, tmp_path)
    other = Model.open(SOURCE, "the source", allow_pickle=True).fetched().checkpoint
    assert torch.equal(other.tensor(last), state[last] + 1)


def test_what_stands_beside_pickles_is_of_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    make_pickled(hub, scene.base)
    assert Model.open(BASE, "the base", allow_pickle=True).origin.license == "mit"
    hub.repo(BASE).commit({"README.md": "---\nlicense: cc-by-nc-4.0\n---\n"})
    assert Model.open(BASE, "the base", allow_pickle=True).origin.license == "cc-by-nc-4.0"


@pytest.mark.parametrize(
    "files",
    [
        {"pytorch_model.bin.index.json": "not json"},
        {"pytorch_model.bin.index.json": '{"weight_map": {"w": "missing.bin"}}', "x.bin": "0"},
        {"pytorch_model.bin": pickle.dumps([1, 2])},
        {"pytorch_model.bin": b"garbage"},
    ],
)
def test_odd_pickles_are_refused_in_two_lines(hub: Hub, tmp_path: Path, files: dict[str, str | bytes]) -> None:
    publish(hub, tmp_path, ("transformers", "transformers"))
    hub.repo(BASE).commit({"x.bin": b"0", **files}, delete=["model.safetensors"])
    with pytest.raises(BrokenWeightsError):
        plan(SOURCE, TARGET, allow_pickle=True)


def test_pickles_of_the_older_kind_are_read(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    state = load_file(scene.base / "model.safetensors")
    torch.save({"state_dict": state}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    files = {"pytorch_model.bin": (tmp_path / "old.bin").read_bytes()}
    hub.repo(BASE).commit(files, delete=["model.safetensors"])
    opened = Model.open(BASE, "the base", allow_pickle=True)
    assert all(torch.equal(opened.checkpoint.tensor(name), value) for name, value in state.items())


def test_of_two_layouts_the_one_that_source_and_base_share_is_taken(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path / "a")
    both = publish_transformers_too(hub, scene.tuned, tmp_path)
    assert {"model.safetensors", WEIGHTS} <= both
    assert plan(SOURCE, TARGET).lineage.source.family.library == "open_clip"


def publish_transformers_too(hub: Hub, folder: Path, scratch: Path) -> set[str]:
    """The same model in the other layout as well, as many repos have it."""
    from support.scenes import SOURCE as SHAPE
    from support.toys import write_transformers

    other = write_transformers(scratch / "other-layout", SHAPE, load_file(folder / WEIGHTS))
    hub.repo(SOURCE).commit({file.name: file.read_bytes() for file in other.iterdir() if file.name != "README.md"})
    return set(hub.repo(SOURCE).files())


@pytest.mark.parametrize("size", ["20", [20], {"a": 1}])
def test_a_configuration_of_odd_types_is_refused(hub: Hub, tmp_path: Path, size: object) -> None:
    publish(hub, tmp_path)
    config = json.loads(hub.repo(TARGET).read("open_clip_config.json"))
    config["model_cfg"]["vision_cfg"]["image_size"] = size
    hub.repo(TARGET).commit({"open_clip_config.json": json.dumps(config)})
    with pytest.raises(RepoError, match=f"open_clip_config.json of the target '{TARGET}'"):
        plan(SOURCE, TARGET)


@pytest.mark.parametrize("token", ["hf_bad token", "hf_\u00e4", "", "hf_a\nb"])
def test_what_is_no_token_is_not_quoted(token: str) -> None:
    with pytest.raises(TokenError) as caught:
        Client(token)
    assert token == "" or token not in str(caught.value)


def test_a_strangers_pull_request_is_no_conversion_offline_either(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    make_pickled(hub, scene.base)
    altered = (scene.base / "model.safetensors").read_bytes()[:-4] + b"\0\0\0\0"
    number = hub.repo(BASE).pull_request({"model.safetensors": altered}, "Better weights", "mallory")
    Model.open(f"{BASE}@refs/pr/{number}", "the base").fetched()
    Model.open(BASE, "the base", allow_pickle=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    opened = Model.open(BASE, "the base", allow_pickle=True)
    assert opened.pickled


def test_a_snapshot_folder_of_another_cache_opens_though_its_repo_is_gone(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    publish(hub, tmp_path)
    folder = snapshot_download(BASE, cache_dir=tmp_path / "other-cache")
    hub.delete(BASE)
    assert Model.open(folder, "the base").commit is None


def test_a_full_disk_is_said(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(TARGET).commit({"README.md": "x" * 3_000_000})
    environment = hub.environment(tmp_path / "home", "hf_secretOfUser")
    result = forks.run("plan", SOURCE, "--to", TARGET, env=environment, most=1_000_000)
    assert result.returncode == 1
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["Error", "Remedy"], result.stderr
