"""Alpha chosen by the samples: what they do not speak for is held back, and what they chose can be repeated."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import DataUnknownError, HeldBackError
from hf_bico.models.model import Model
from hf_bico.reports.record import read_record
from support.paper import PAPER
from support.rotated_clips import TOY, make_turned_scene
from support.scenes import Scene, make_scene
from support.toys import write_transformers

FEW: dict[str, Any] = {"n": 16, "augment": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Random models of different shapes, between which nothing can be carried that helps."""
    return make_scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_turned_scene(tmp_path_factory.mktemp("turned"))


def port(scene: Scene, **options: Any) -> hf_bico.Ported:
    usual = {"base": scene.base, "data": scene.data, "evaluate": False, **FEW}
    return hf_bico.port(scene.tuned, to=scene.target, **{**usual, **options})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "open_clip_model.safetensors")


# --- what the samples do not speak for


@pytest.mark.parametrize("options", [{}, {"method": "bico"}, {"method": "naive"}, {"force": True}], ids=str)
def test_what_the_samples_do_not_speak_for_is_held_back(
    options: dict[str, Any], scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ported = port(scene, evaluate=True, **options)
    assert ported.held_back
    assert repr(ported) == "Port of tuned to target, held back by the samples"
    assert ported._repr_markdown_().startswith("**Held back: ")
    before = Model.open(scene.target, "the target").load(torch.device("cpu"), torch.float32).module.state_dict()
    after = ported.model().state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    record = ported.record
    assert record.evaluation == []
    assert not any("was measured" in notice for notice in record.notices)
    assert record.outlook is None
    assert record.method.curve
    assert record.method.veto is not None
    assert record.method.veto.mean <= 0.5 * (record.method.veto.error or 0.0)
    for write in (lambda: ported.save(tmp_path / "out"), lambda: ported.push_to_hub("user/port", force=True)):
        with pytest.raises(HeldBackError, match="Held back: ") as told:
            write()
        assert "alpha=1" in told.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("alpha", [1.0, 0.25, 1])
def test_a_number_for_alpha_is_taken_as_it_is(alpha: float, scene: Scene, tmp_path: Path) -> None:
    ported = port(scene, method="bico", alpha=alpha)
    assert not ported.held_back
    method = ported.record.method
    assert (method.alpha, method.curve, method.veto, method.candidates) == (alpha, [], None, [])
    assert ported.record.outlook is not None, "the samples say what they expect all the same"
    out = ported.save(tmp_path / "out")
    whole = port(scene, **PAPER)
    for name, change in whole.task_vector.items():
        assert torch.equal(ported.task_vector[name], alpha * change)
    assert not all(torch.equal(tensor, weights(out)[name]) for name, tensor in weights(scene.target).items())


def test_one_sample_chooses_nothing(turned: Scene) -> None:
    ported = port(turned, n=1)
    assert ported.held_back
    with pytest.raises(HeldBackError, match=r"chosen by 1 sample\. One sample cannot tell a gain from chance"):
        ported.save(turned.folder / "never")


@pytest.mark.parametrize("data", ["given", "not given"])
def test_alpha_is_not_chosen_without_data(data: str, scene: Scene) -> None:
    """A copy needs none, but the choice of its alpha does."""
    if data == "given":
        assert port(scene, method="naive").record.data is not None
        return
    with pytest.raises(DataUnknownError, match="alpha is chosen by calibration samples, and no data was given") as told:
        port(scene, method="naive", data=None)
    assert told.value.remedy == "name it with data=..., or use alpha=1"
    assert not port(scene, method="naive", data=None, alpha=1.0).held_back


# --- what they speak for


def test_all_of_a_change_that_can_be_carried_whole_is_added(turned: Scene) -> None:
    """And after the first step of a path, nothing is left to add."""
    for method, alphas in (("bico", 1.0), ("bico-path", [1.0, 0.0, 0.0, 0.0])):
        ported = port(turned, method=method)
        assert not ported.held_back
        assert ported.record.method.alpha == alphas, method
        outlook, veto = ported.record.outlook, ported.record.method.veto
        assert (outlook.value, outlook.error, outlook.unit) == (veto.mean, veto.error, "accuracy")
        assert outlook.value > 0.3


def test_of_two_methods_the_one_that_the_samples_gain_most_by_is_taken(turned: Scene) -> None:
    method = port(turned).record.method
    assert (method.asked, method.name, method.steps) == ("auto", "bico-path", 4)
    tried = {one.method: one for one in method.candidates}
    assert tried.keys() == {"bico-path", "naive"}
    assert (tried["bico-path"].alpha, tried["bico-path"].held_back) == (method.alpha, False)
    assert tried["naive"].gain < tried["bico-path"].gain == method.veto.mean


METHODS: Sequence[dict[str, Any]] = [{}, {"method": "bico"}, {"method": "bico-path", "bold": True}]


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_a_choice_of_the_samples_is_repeated_to_the_byte(
    options: dict[str, Any], turned: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(turned.folder)
    ported = port(turned, **options)
    out = ported.save(tmp_path / "out")
    again = hf_bico.rerun(out, device="cpu", folder=tmp_path / "again")
    assert again.same
    assert again.differences == []
    assert weights(tmp_path / "again").keys() == weights(out).keys()
    files = [(folder / "open_clip_model.safetensors").read_bytes() for folder in (out, tmp_path / "again")]
    assert files[0] == files[1]
    methods = [read_record(folder).method for folder in (out, tmp_path / "again")]
    assert (methods[0].alpha, methods[0].curve) == (methods[1].alpha, methods[1].curve)


def test_a_repeat_that_the_samples_hold_back_says_so(
    turned: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a target that has become the fine-tuned source itself, and has nothing to gain."""
    shutil.copytree(turned.folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    out = port(turned, method="bico").save(tmp_path / "out")
    shutil.rmtree("target")
    shutil.copytree("tuned", "target")
    again = hf_bico.rerun(out, device="cpu", folder=tmp_path / "again")
    assert not again.same
    assert again.files == {"open_clip_model.safetensors": False}
    assert again.differences[0].startswith("Held back: bico with alpha chosen by 16 samples.")
    assert "the target's weights differ" in again.differences
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("options", "spelt"),
    [
        ({}, "--method bico-path --alpha auto --path-steps 4"),
        ({"method": "bico"}, "--method bico --alpha auto"),
        ({"method": "bico-path", "alpha": 0.5}, "--method bico-path --alpha 0.5 --path-steps 2"),
        (
            {"method": "bico-path", "bold": True, "path_steps": 3},
            "--method bico-path --alpha auto --path-steps 3 --bold",
        ),
    ],
    ids=str,
)
def test_a_recorded_command_spells_the_choice_and_gives_the_same_weights(
    options: dict[str, Any], spelt: str, turned: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(turned.folder)
    ported = port(turned, **options)
    command = shlex.split(str(ported.record.command))
    assert command[:2] == ["hf-bico", "port"]
    words = shlex.split(spelt)
    assert [word for word in command if word in words] == words, ported.record.command
    done = CliRunner().invoke(main, [*command[1:], "--device", "cpu", "--no-eval", "-q", "-o", str(tmp_path / "typed")])
    assert done.exit_code == 0, done.output
    files = [read_record(folder).output.files for folder in (ported.save(tmp_path / "out"), tmp_path / "typed")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        (PAPER, "--method bico --alpha 1"),
        ({**PAPER, "alpha": 0.5}, "--method bico"),
        ({"method": "bico-path", "alpha": 1.0}, "--alpha 1 --path-steps 2"),
    ],
    ids=str,
)
def test_a_record_of_the_first_schema_is_repeated_with_the_alpha_of_then(
    options: dict[str, Any], left_out: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their commands left out what the defaults were then: bico, an alpha of 1, and 2 steps of a path."""
    monkeypatch.chdir(scene.folder)
    out = port(scene, **options).save(tmp_path / "out")
    file = out / "bico.json"
    record = json.loads(file.read_text())
    spelt = record["command"]
    old = {key: value for key, value in record.items() if key not in ("settings", "outlook", "source_lead")}
    old["foresight"] = {"outlook": 0.5, "helps": True, "loss": 1.7, "first_order": -1.3, "agreement": 0.12}
    words = shlex.split(spelt)
    for option in left_out.split()[::2]:
        del words[words.index(option) : words.index(option) + 2]
    file.write_text(json.dumps({**old, "schema": 1, "command": shlex.join(words)}))
    again = hf_bico.rerun(out, device="cpu")
    assert again.same
    assert again.differences == []
    read = read_record(out)
    assert (read.method.alpha, read.method.chosen_by_samples) == (options["alpha"], False)
    typed = str(tmp_path / "typed")
    found = CliRunner().invoke(main, [*shlex.split(str(read.command))[1:], "--device", "cpu", "-q", "-o", typed])
    assert found.exit_code == 0, found.output
    assert read_record(tmp_path / "typed").output.files == read.output.files


# --- adapters


def test_a_lora_grows_by_its_rank_with_each_step_unless_it_is_cut(
    turned: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, lora = 2, tmp_path / "lora"
    folders = {}
    for folder in (turned.tuned, turned.base, turned.target):
        folders[folder.name] = write_transformers(tmp_path / folder.name, TOY, weights(folder))
    hf_bico.extract(folders["tuned"], base=folders["base"], rank=rank).save(lora)
    options: dict[str, Any] = {"base": folders["base"], "data": turned.data, "evaluate": False, **FEW}
    options |= {"to": folders["target"], "method": "bico-path"}

    def ranks(folder: Path) -> set[int]:
        found = load_file(folder / "adapter_model.safetensors")
        return {tensor.shape[0] for name, tensor in found.items() if ".lora_A." in name}

    ported = hf_bico.port(lora, **options)
    taken = sum(alpha > 0 for alpha in ported.record.method.alpha)
    assert ranks(ported.save(tmp_path / "chosen")) == {taken * rank}
    # a path of which the samples take a part of every step
    monkeypatch.setattr("hf_bico.porting.transfer.choose_scale", lambda tried, errors: 0.25)
    whole, cut = hf_bico.port(lora, **options), hf_bico.port(lora, **options, rank=rank)
    assert whole.record.method.alpha == cut.record.method.alpha == [0.25] * 4
    assert ranks(whole.save(tmp_path / "whole")) == {4 * rank}
    assert ranks(cut.save(tmp_path / "cut")) == {rank}
    kept = [read_record(tmp_path / name).output.energy_kept for name in ("whole", "cut")]
    assert kept[0] == 1.0
    assert kept[1] < 1.0


def test_the_outlook_is_that_of_what_is_written(turned: Scene) -> None:
    """A change of a lower rank gains less, and what it gains decides whether it is held back."""
    whole, cut = (port(turned, method="bico", format=form, rank=rank) for form, rank in ((None, None), ("adapter", 1)))
    assert 0 < cut.record.outlook.value < whole.record.outlook.value
    assert cut.record.method.veto.mean == cut.record.outlook.value
