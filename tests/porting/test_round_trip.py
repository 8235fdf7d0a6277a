"""What is written loads in the library that users will use, and gives what was computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_bico
from hf_bico.errors import OutputError
from hf_bico.models.model import Model
from hf_bico.reports.record import read_record
from support.paper import PAPER
from support.scenes import TARGET, Scene, make_scene
from support.toys import CLASS_NAMES, build_tokenizer, random_rows

PIXELS = torch.randn(4, 3, TARGET.image_size, TARGET.image_size, generator=torch.Generator().manual_seed(0))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def port(scene: Scene, **options: object) -> hf_bico.Ported:
    usual: dict[str, object] = {"base": scene.base, "data": scene.data, "n": 24, "evaluate": False}
    return hf_bico.port(scene.tuned, to=scene.target, **{**usual, **PAPER, **options})


def site_tensors(folder: Path) -> set[str]:
    return {slot.tensor for site in Model.open(folder, "a model").layout.main_sites for slot in site.slots}


def assert_rest_is_the_targets(scene: Scene, written: Path, file: str) -> None:
    before, after = load_file(scene.target / file), load_file(written / file)
    assert before.keys() == after.keys()
    sites = site_tensors(scene.target)
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        same = torch.equal(tensor.flatten().view(torch.uint8), before[name].flatten().view(torch.uint8))
        assert same == (name not in sites), name


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_open_clip_loads_a_full_port(dtype: torch.dtype, tmp_path: Path) -> None:
    import open_clip

    scene = make_scene(tmp_path, dtype=dtype)
    ported = port(scene)
    folder = ported.save(tmp_path / "out")
    assert_rest_is_the_targets(scene, folder, "open_clip_model.safetensors")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    assert preprocess is not None
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(["a photo of a two."])
    assert tokens[0, :2].tolist() == build_tokenizer()("a photo of a two.")["input_ids"][:2]
    with torch.no_grad():
        found, expected = model.eval().encode_image(PIXELS), ported.model().visual(PIXELS)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # ported.model() adds in float32, the file is rounded
    assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transformers_loads_a_full_port(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoProcessor

    scene = make_scene(tmp_path, ("open_clip", "transformers"), dtype)
    ported = port(scene)
    folder = ported.save(tmp_path / "out")
    assert_rest_is_the_targets(scene, folder, "model.safetensors")
    AutoProcessor.from_pretrained(folder)
    model, information = AutoModel.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not information["missing_keys"]
    assert not information["unexpected_keys"]
    assert model.dtype == dtype
    with torch.no_grad():
        found = model.float().get_image_features(PIXELS).pooler_output
        expected = ported.model().get_image_features(PIXELS).pooler_output
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("libraries", [("open_clip", "open_clip"), ("transformers", "transformers")])
def test_delta_applied_to_the_target_is_the_full_port(libraries: tuple[str, str], tmp_path: Path) -> None:
    scene = make_scene(tmp_path, libraries)
    ported = port(scene, alpha=0.7)
    full, delta = ported.save(tmp_path / "full"), ported.save(tmp_path / "delta", format="delta")
    target = Model.open(scene.target, "the target").load(torch.device("cpu"), torch.float32)
    hf_bico.TaskVector.load(delta).apply_to(target.module)
    expected = Model.open(full, "the port").load(torch.device("cpu"), torch.float32)
    for name, tensor in expected.module.state_dict().items():
        assert torch.equal(target.module.state_dict()[name], tensor), name


def test_sharded_target_stays_sharded(tmp_path: Path) -> None:
    from transformers import CLIPModel

    scene = make_scene(tmp_path, ("open_clip", "transformers"))
    whole = port(scene).save(tmp_path / "whole")
    model = CLIPModel.from_pretrained(scene.target)
    (scene.target / "model.safetensors").unlink()
    model.save_pretrained(scene.target, max_shard_size="20KB")
    shards = sorted(file.name for file in scene.target.glob("model-*.safetensors"))
    assert len(shards) > 2
    folder = port(scene).save(tmp_path / "sharded")
    assert sorted(file.name for file in folder.glob("*.safetensors")) == shards
    ours, theirs = (CLIPModel.from_pretrained(path).state_dict() for path in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_header_and_metadata_are_the_targets(tmp_path: Path) -> None:
    """safetensors itself writes several metadata entries in a random order."""
    scene = make_scene(tmp_path)
    file = scene.target / "open_clip_model.safetensors"
    save_file(load_file(file), file, metadata=dict.fromkeys(("format", "source", "step", "author"), "value"))
    ported = port(scene)
    one, two = (ported.save(tmp_path / name) / file.name for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert one.read_bytes()[:length] == file.read_bytes()[:length]
    assert one.read_bytes() != file.read_bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_rounding_takes_away_is_measured(dtype: torch.dtype, tmp_path: Path) -> None:
    scene = make_scene(tmp_path, dtype=dtype)
    ported = port(scene, alpha=0.02)
    folder = ported.save(tmp_path / "out")
    lost = read_record(folder).output.rounding_lost  # type: ignore[union-attr]
    if dtype == torch.float32:
        assert lost is None
        return
    before, after = (load_file(path / "open_clip_model.safetensors") for path in (scene.target, folder))
    vector = ported.task_vector
    assert all(delta.dtype == torch.float32 for delta in vector.values()), "the vector itself is not rounded"
    missing = sum(float((after[n].float() - before[n].float() - vector[n]).square().sum()) for n in vector)
    assert lost == pytest.approx(missing / sum(vector.energy(name) for name in vector), rel=1e-3)
    assert (lost > 0.05) == any("lost by rounding" in notice for notice in read_record(folder).notices)
    delta = read_record(ported.save(tmp_path / "delta", format="delta"))
    assert delta.output is not None
    assert delta.output.rounding_lost is None
    assert not delta.notices, "a delta loses nothing"
    assert str(delta.command).endswith(" --format delta")
    assert dtype != torch.bfloat16 or lost > 0.05


def test_evaluation_measures_the_rounded_model(tmp_path: Path) -> None:
    """Over enough samples that rounding flips some predictions."""
    scene = make_scene(tmp_path, dtype=torch.bfloat16)
    data = {"train": random_rows(24, 20), "test": random_rows(1000, 20, seed=1)}
    options = {"class_names": CLASS_NAMES}
    ported = port(scene, data=data, alpha=5.0, evaluate=True, **options)
    written = hf_bico.evaluate_model(ported.save(tmp_path / "out"), data, **options)
    assert written.value == ported.record.value("ported")
    exact = tmp_path / "exact"
    shutil.copytree(tmp_path / "out", exact)
    state = {name: tensor.float() for name, tensor in load_file(scene.target / "open_clip_model.safetensors").items()}
    added = {name: state[name] + delta for name, delta in ported.task_vector.items()}
    save_file({**state, **added}, exact / "open_clip_model.safetensors")
    assert hf_bico.evaluate_model(exact, data, **options).value != written.value, "rounding must show in this test"


def test_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ported = port(make_scene(tmp_path / "scene"))
    place = tmp_path / "place"
    place.mkdir()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_bico.porting.result.write_card", full_disk)
    with pytest.raises(OutputError, match="No space left on device"):
        ported.save(place / "out")
    assert list(place.iterdir()) == []
    monkeypatch.undo()
    ported.save(place / "out")
    before = {file.name: file.read_bytes() for file in (place / "out").iterdir()}
    monkeypatch.setattr("hf_bico.porting.result.write_card", full_disk)
    with pytest.raises(OutputError):
        ported.save(place / "out", overwrite=True)
    assert {file.name: file.read_bytes() for file in (place / "out").iterdir()} == before
    assert [path.name for path in place.iterdir()] == ["out"]


def test_old_result_stays_when_it_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ported = port(make_scene(tmp_path / "scene"))
    out = ported.save(tmp_path / "out")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if Path(target) == out and self.name != "old":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OutputError, match="Input/output error"):
        ported.save(out, overwrite=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "scene"]


def test_old_result_that_cannot_be_put_back_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ported = port(make_scene(tmp_path / "scene"))
    out = ported.save(tmp_path / "out")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if Path(target) == out:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OutputError):
        ported.save(out, overwrite=True)
    [aside] = [path for path in tmp_path.iterdir() if path.name.startswith(".out.hf-bico-")]
    assert (aside / "old" / "bico.json").is_file()


def test_record_reads_back_and_names_no_path(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    ported = port(scene, evaluate=True)
    folder = ported.save(tmp_path / "out")
    record = read_record(folder)
    assert record.sites == ported.record.sites
    assert record.output is not None
    assert record.to_json() == (folder / "bico.json").read_text()
    for file in ("bico.json", "README.md"):
        assert str(tmp_path) not in (folder / file).read_text()


def test_record_has_every_field_of_the_schema(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    ported = port(scene, evaluate=True)
    raw = json.loads((ported.save(tmp_path / "out") / "bico.json").read_text())
    assert raw["schema"] == 2
    assert raw["source"].keys() == {"id", "sha256", "family", "kind", "base"}
    assert raw["source"]["base"].keys() == {"id", "sha256", "family"}
    assert raw["target"].keys() == {"id", "sha256", "family"}
    data = {"id", "split", "n", "sampling", "seed", "indices", "columns", "labels", "class_names"}
    assert raw["data"].keys() == data
    assert raw["objective"] == {"name": "zero-shot", "templates": ["a photo of a {}."]}
    assert raw["method"] == {"name": "bico", "completion": "drop", "alpha": 1.0, "layers": [0, 1]}
    assert raw["sites"][0].keys() == {
        *("name", "role", "source", "shape_source", "shape_target", "energy"),
        *("rank_in", "rank_out", "score_in", "score_out", "unseen", "mispaired_in", "mispaired_out"),
    }
    assert {entry["reason"] for entry in raw["left"]} == {"LayerNorm", "class token", "positions", "patch stem"}
    assert raw["output"]["files"].keys() == {"open_clip_model.safetensors"}
    assert [entry["model"] for entry in raw["evaluation"]] == ["target", "ported", "source"]
    run = ("started", "seconds", "peak_memory", "device", "dtype", "batch_size", "processes", "versions")
    assert raw["run"].keys() == {*run, "training_step", "training_batch"}


def test_card_says_what_was_measured(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    ported = port(scene, evaluate=True)
    card = (ported.save(tmp_path / "out") / "README.md").read_text()
    for entry in ported.record.evaluation:
        assert f"{entry.value:.1%}" in card
    assert "hf-bico port tuned --base base --to target --data pictures --split train -n 24 --seed 0" in card
    assert "measured on the same 20 samples of split `test`" in card
