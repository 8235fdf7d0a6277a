"""Comparing methods: every number is what a port measures, nothing is done twice, and nothing measured is lost."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors.torch import load_file, save_file

import hf_bico
import hf_bico.experiments.compare.measurements
from hf_bico.alignment.methods.training import Learner
from hf_bico.cli.main import main
from hf_bico.data.draw import CalibrationDraw, draw
from hf_bico.errors import SampleCountError, UsageError
from hf_bico.experiments.compare.cells import Cell, CellKey
from hf_bico.experiments.compare.comparison import RESULT_FILES, Comparison
from hf_bico.experiments.compare.log import LOG_FILE
from hf_bico.experiments.compare.measurements import Grid
from hf_bico.experiments.compare.run import _identifying, _usual_rows, _Work
from hf_bico.hub.client import Hub
from hf_bico.models.model import Model
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.planner import plan
from hf_bico.porting.result import Ported
from hf_bico.reports.record import EvaluationRecord
from hf_bico.settings import AUTO, BRIEF, METHODS, Settings, register_method, usual_methods
from hf_bico.utils.progress import silent
from support import forks
from support.dying import kill
from support.passes import CLASSES, ONE_PASS, counted
from support.scenes import SOURCE, Scene, make_scene, write_images, write_tables
from support.toys import CLASS_NAMES, WRITERS, Toy, random_rows, random_state, write_transformers

OPTIONS = {"alpha": 8.0, "learning_rate": 0.005, "train_steps": 3, "train_batch": 8, "warmup": 1, "device": "cpu"}
TYPED = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
"""Large changes, and a short training."""
TRAINED, TESTED = 12, 24
"""Images of each class: to measure on, so many that models are seldom equally good by chance."""
ROWS = TESTED * CLASSES
SIZES, SEEDS = [8, 12], [0, 1]


def write_pictures(folder: Path, seed: int = 0, splits: dict[str, int] | None = None) -> Path:
    """Smooth images, each class around a colour of its own."""
    generator = np.random.default_rng(seed)
    colour = {name: generator.integers(0, 256, 3) for name in CLASS_NAMES}

    def picture(name: str) -> Image.Image:
        colours = 0.4 * colour[name] + 0.6 * generator.integers(0, 256, (2, 2, 3))
        return Image.fromarray(colours.astype(np.uint8)).resize((20, 20))

    counts = splits or {"train": TRAINED, "test": TESTED}
    return write_tables(
        folder,
        {split: {(name, at): picture(name) for name in CLASS_NAMES for at in range(n)} for split, n in counts.items()},
    )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    made = make_scene(tmp_path_factory.mktemp("scene"))
    shutil.rmtree(made.data)
    write_pictures(made.data)
    return made


@pytest.fixture(scope="module")
def twin(scene: Scene) -> Path:
    """Another model of the source's architecture."""
    return WRITERS["open_clip"](scene.folder / "twin", SOURCE, random_state(SOURCE, 3))


def compared(scene: Scene, target: Path | None = None, data: Any = None, **options: Any) -> Comparison:
    where: dict[str, Any] = {"to": target or scene.target, "base": scene.base, "data": data or scene.data}
    return hf_bico.compare(scene.tuned, **where, **{**OPTIONS, **options})


@cache
def ported(scene: Scene, target: Path | None = None, method: str = "bico", **options: Any) -> Ported:
    where: dict[str, Any] = {"to": target or scene.target, "base": scene.base, "data": scene.data}
    return hf_bico.port(scene.tuned, **where, **{**OPTIONS, **options}, method=method)


def measured(scene: Scene, target: Path | None = None, **options: Any) -> list[EvaluationRecord]:
    """What a port measures."""
    return ported(scene, target, **options).record.evaluation


def cell_of(comparison: Comparison, method: str, **key: Any) -> Cell:
    wanted = CellKey("pictures", method, **key)
    (cell,) = (cell for cell in comparison.cells if cell.key == wanted)
    return cell


def value(comparison: Comparison, method: str, **key: Any) -> float:
    return cell_of(comparison, method, **key).value


def of(records: list[EvaluationRecord], model: str, protocol: str | None = None) -> float:
    (found,) = (record.value for record in records if (record.model, record.protocol) == (model, protocol))
    return found


def typed(scene: Scene, target: Path | None = None, data: tuple[Path, ...] | None = None) -> list[str]:
    words = [str(scene.tuned), "--base", str(scene.base), "--to", str(target or scene.target), *TYPED]
    return [*words, *(word for path in (data or (scene.data,)) for word in ("--data", str(path)))]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


def log_lines(folder: Path) -> list[bytes]:
    file = folder / LOG_FILE
    return file.read_bytes().splitlines(keepends=True) if file.is_file() else []


def keys_of(lines: list[bytes]) -> list[CellKey]:
    return [Cell(**json.loads(line)["cell"]).key for line in lines[1:]]


def results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULT_FILES}


# Every number is what a port measures


@pytest.fixture(scope="module")
def everything(scene: Scene) -> Comparison:
    return compared(scene, methods="all", n=SIZES, seeds=2)


@pytest.mark.parametrize(("n", "seed"), zip(SIZES, SEEDS, strict=True))
@pytest.mark.parametrize("method", ["theseus", "bico", "bico-path", "fewshot"])
def test_a_number_is_what_a_port_measures(scene: Scene, everything: Comparison, method: str, n: int, seed: int) -> None:
    records = measured(scene, method=method, n=n, seed=seed)
    assert value(everything, method, n=n, seed=seed) == of(records, "ported")
    assert value(everything, "target") == of(records, "target")
    assert value(everything, "source") == of(records, "source")


@pytest.mark.parametrize("method", ["input-only", "output-only", "gradient-only", "bico-fisher", "naive", "finetune"])
def test_so_is_that_of_any_other_method(scene: Scene, everything: Comparison, method: str) -> None:
    without = method in ("naive", "finetune")
    key = {} if without else {"n": 12, "seed": 1}
    drawn = {"n": 8, "seed": 0} if without else key
    assert value(everything, method, **key) == of(measured(scene, method=method, **drawn), "ported")


@pytest.mark.parametrize(("n", "seed"), zip(SIZES, SEEDS, strict=True))
@pytest.mark.parametrize("method", ["readout", "train", "distill"])
def test_so_is_that_of_what_carries_nothing(
    scene: Scene, everything: Comparison, method: str, n: int, seed: int
) -> None:
    row = f"{method}@{OPTIONS['train_steps']}" if method in BRIEF else method
    cell, port = cell_of(everything, row, n=n, seed=seed), ported(scene, method=method, n=n, seed=seed)
    assert (cell.value, cell.held_back) == (of(port.record.evaluation, "ported"), port.held_back)


@pytest.mark.parametrize("polish_on", ["source", "labels"])
def test_polished_rows_are_polished_ports(scene: Scene, polish_on: str) -> None:
    rows, draw = ["bico", "bico+polish@1", "bico+polish@3", "naive@8+polish@3"], {"n": 12, "seed": 1}
    found = compared(scene, methods=["naive@8", *rows], n=12, seeds=[1], polish_on=polish_on)
    values = {row: value(found, row, **draw) for row in rows}
    for row in rows[1:]:
        method, steps = row.partition("+")[0].removesuffix("@8"), int(row[-1])
        one = measured(scene, method=method, **draw, polish=True, polish_steps=steps, polish_on=polish_on)
        assert values[row] == of(one, "ported"), row
    assert values["naive@8+polish@3"] != value(found, "naive@8"), "or the polish could not be told"
    if polish_on == "source":
        assert len(set(values.values())) == 4, "or its steps could not be told"


def test_standard_rows_answer_whether_to_port_to_polish_or_to_train(scene: Scene) -> None:
    steps: dict[str, Any] = {"train_steps": [1, 2], "polish_steps": 2}
    found = compared(scene, methods="standard", n=8, seeds=1, alpha=AUTO, **steps)
    ours = ["naive@1", "theseus@1", "bico-path", "bico-path+polish@2", "readout"]
    trained = ["train@1", "train@2", "distill@1", "distill@2"]
    assert list(found.methods) == ["target", "source", *ours, *trained]
    assert found.refusals == ()


def test_methods_and_draws_give_different_numbers(everything: Comparison) -> None:
    """Otherwise the tests above could not fail."""
    values = [cell.value for cell in everything.cells if cell.seed is not None]
    assert len(set(values)) > len(values) / 3
    by_method = {row.method: row.average.mean for row in everything.rows() if row.average and row.n in (None, 12)}
    assert len(set(by_method.values())) > len(by_method) - 4


TWIN_METHODS = ["naive", "transfusion", "gradfix", "theseus"]


@pytest.fixture(scope="module")
def twins(scene: Scene, twin: Path) -> Comparison:
    return compared(scene, twin, methods=TWIN_METHODS, n=8, seeds=1)


@pytest.mark.parametrize("method", TWIN_METHODS)
def test_between_models_of_one_architecture_all_methods_are_measured(
    scene: Scene, twin: Path, twins: Comparison, method: str
) -> None:
    assert twins.refusals == ()
    key = {"n": 8, "seed": 0} if method in ("theseus", "gradfix") else {}
    assert value(twins, method, **key) == of(measured(scene, twin, method=method, n=8), "ported")


READ_OUT = ["bico", "bico-path", "naive", "fewshot"]


@pytest.fixture(scope="module")
def read_out(scene: Scene) -> Comparison:
    return compared(scene, methods=READ_OUT, n=8, seeds=[1], readout=True, control=True)


@pytest.mark.parametrize("method", READ_OUT)
def test_readouts_and_controls_are_those_of_a_port(scene: Scene, read_out: Comparison, method: str) -> None:
    draw = {"n": 8, "seed": 1}
    records = measured(scene, method=method, readout=True, **draw)
    assert value(read_out, method, readout=True, **draw) == of(records, "ported")
    assert value(read_out, method, **({} if method == "naive" else draw)) == of(records, "ported, no readout")
    if method != "bico-path":  # whose readout is fitted to the altered copies too
        assert value(read_out, "target", readout=True, **draw) == of(records, "target, readout")
    controls = [cell for cell in read_out.cells if cell.control and cell.method == method]
    if method in ("naive", "fewshot"):
        assert controls == []
    else:
        records = measured(scene, method=method, control=True, **draw)
        assert value(read_out, method, control=True, **draw) == of(records, "control")


def test_controls_stand_beside_methods_that_have_none(scene: Scene, twin: Path) -> None:
    methods = ["gradfix", "transfusion", "theseus"]
    comparison = compared(scene, twin, methods=methods, n=8, seeds=[1], control=True)
    alone = compared(scene, twin, methods=["theseus"], n=8, seeds=[1], control=True)
    assert [cell.method for cell in comparison.cells if cell.control] == ["theseus"]
    assert {cell for cell in comparison.cells if cell.method not in methods[:2]} == set(alone.cells)


@pytest.mark.parametrize("evaluation", ["probe", "both"])
def test_probes_are_those_of_a_port(scene: Scene, evaluation: str) -> None:
    comparison = compared(scene, methods=["naive", "bico"], n=SIZES, seeds=[1], evaluation=evaluation)
    for n in SIZES:
        probe = {"n": n, "seed": 1, "protocol": "probe"}
        for method in ("naive", "bico") if evaluation == "both" else ("bico",):
            records = measured(scene, method=method, n=n, seed=1, evaluation=evaluation)
            assert value(comparison, method, **probe) == of(records, "ported", "probe")
            assert value(comparison, "target", **probe) == of(records, "target", "probe")
            assert value(comparison, "source", **probe) == of(records, "source", "probe")
            if evaluation == "both":
                key = {} if method == "naive" else {"n": n, "seed": 1}
                assert value(comparison, method, **key) == of(records, "ported")
    plain = [cell for cell in comparison.cells if cell.protocol is None]
    assert len(plain) == (0 if evaluation == "probe" else 2 + 1 + len(SIZES))


def test_samples_of_each_class_and_pseudo_labels_and_altered_copies(scene: Scene) -> None:
    for options in ({"per_class": 2}, {"n": 8, "labels": "pseudo"}, {"n": 8, "augment": 2, "sampling": "one-class"}):
        comparison = compared(scene, methods=["bico"], seeds=[1], **options)
        key = {name: options[name] for name in ("n", "per_class") if name in options}
        assert value(comparison, "bico", seed=1, **key) == of(measured(scene, seed=1, **options), "ported")


@pytest.mark.parametrize("layers", ["similarity", (1, 0)])
def test_blocks_are_paired_as_in_a_port(scene: Scene, layers: Any) -> None:
    comparison = compared(scene, methods=["bico", "naive"], n=8, seeds=[1], layers=layers)
    assert value(comparison, "bico", n=8, seed=1) == of(measured(scene, n=8, seed=1, layers=layers), "ported")
    key = {"n": 8, "seed": 1} if layers == "similarity" else {}  # the samples say what is similar
    records = measured(scene, method="naive", n=8, seed=1, layers=layers)
    assert value(comparison, "naive", **key) == of(records, "ported")


# A method without an alpha is what a port does by itself; with one, it is that and no more


CARRIERS = ["naive", "theseus", "bico", "bico-path"]
DRAW: dict[str, Any] = {"n": 8, "seed": 1}


@pytest.fixture(scope="module")
def held(scene: Scene) -> Comparison:
    """Between random models, where the samples speak for nothing."""
    methods = [*CARRIERS, "fewshot", "bico@8", "naive@8"]
    return compared(scene, methods=methods, n=8, seeds=[1], alpha=AUTO, control=True, readout=True)


@pytest.fixture(scope="module")
def kin(scene: Scene) -> Scene:
    """A source that changed much, and a target that is a copy of its base: all samples speak for a port."""
    folder, state = scene.folder / "kin", {**random_state(SOURCE, 0), "logit_scale": torch.tensor(3.0)}
    generator = torch.Generator().manual_seed(5)
    changed = {
        name: tensor + 0.12 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in state.items()
        if name.startswith("visual.transformer.") and tensor.ndim == 2
    }
    models = {"tuned": {**state, **changed}, "base": state, "target": state}
    return Scene(
        folder, *(WRITERS["open_clip"](folder / name, SOURCE, own) for name, own in models.items()), scene.data
    )


CLEAR: dict[str, Any] = {"n": 24, "seed": 1}


@pytest.fixture(scope="module")
def helped(kin: Scene) -> Comparison:
    return compared(kin, methods=CARRIERS, n=24, seeds=[1], alpha=AUTO, augment=1, control=True, readout=True)


@pytest.mark.parametrize("method", CARRIERS)
def test_a_method_is_what_a_port_does_by_itself(kin: Scene, helped: Comparison, method: str) -> None:
    """A control, too, adds as much as the method did: mispaired samples would choose less."""
    one = ported(kin, None, method, **CLEAR, alpha=AUTO, augment=1, readout=True, control=method != "naive")
    for cell in (cell for cell in helped.cells if cell.method == method):
        name = "control" if cell.control else "ported" if cell.readout else "ported, no readout"
        assert (cell.value, cell.held_back) == (of(one.record.evaluation, name), False), name
    assert value(helped, method, **CLEAR) != value(helped, "target"), "or it could have been held back"
    if method in ("theseus", "bico-path"):
        assert value(helped, method, **CLEAR, control=True) != value(helped, method, **CLEAR)


@pytest.mark.parametrize("method", CARRIERS)
def test_what_a_port_would_hold_back_counts_as_the_target(scene: Scene, held: Comparison, method: str) -> None:
    assert ported(scene, method=method, **DRAW, alpha=AUTO).held_back
    cells = [cell for cell in held.cells if cell.method == method]
    assert len(cells) == (2 if method == "naive" else 3), "plain, with a readout, and mispaired"
    for cell in cells:
        assert (cell.held_back, cell.value) == (True, value(held, "target"))
    assert value(held, "target", **DRAW, readout=True) != value(held, "target"), "or the readout could not be told"


def test_only_what_chooses_alpha_is_held_back_and_needs_samples_for_it(held: Comparison) -> None:
    assert {cell.method for cell in held.cells if cell.held_back} == set(CARRIERS)
    assert [cell.n for cell in held.cells if cell.method == "naive"] == [8, 8]
    assert [cell.n for cell in held.cells if cell.method == "naive@8"] == [None, 8], "the second is its readout"


def test_a_method_at_an_alpha_is_that_of_the_option(scene: Scene, held: Comparison) -> None:
    alone = compared(scene, methods=["bico", "naive"], n=8, seeds=[1], alpha=8, control=True, readout=True)
    for variant in ({}, {"control": True}, {"readout": True}):
        assert value(held, "bico@8", **DRAW, **variant) == value(alone, "bico", **DRAW, **variant)
    assert value(held, "naive@8") == value(alone, "naive")
    bold = compared(scene, methods=["bico@8.0", "bico@8"], n=8, seeds=[1], alpha=AUTO, bold=True)
    assert [cell.method for cell in bold.cells] == ["target", "source", "bico@8"], "8.0 is 8"
    assert value(bold, "bico@8", **DRAW) == value(alone, "bico", **DRAW)


def test_rows_of_one_method_share_its_pass(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for methods in (["bico"], ["bico", "bico@1", "bico@2"]):
        with counted(monkeypatch) as counts:
            compared(scene, methods=methods, n=SAMPLES, seeds=1, batch_size=BATCH, alpha=AUTO)
        found.append(counts)
    assert found[0]["backward"] == found[1]["backward"] == 2 * BATCHES
    assert found[0]["source"] == found[1]["source"]
    assert found[1]["target"] - found[0]["target"] == 2 * EVALUATION, "what has an alpha is not scored"


def test_methods_share_what_their_samples_are_scored_by(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = list[int](), hf_bico.experiments.compare.measurements.make_scorer

    def noted(calibration: Calibration) -> Any:
        made.append(calibration.copies)
        return original(calibration)

    monkeypatch.setattr("hf_bico.experiments.compare.measurements.make_scorer", noted)
    compared(scene, methods=CARRIERS, n=8, seeds=1, alpha=AUTO)
    assert made == [0, 7], "bico-path has copies of few samples"


def test_a_control_finds_the_alpha_of_a_number_that_is_in_the_log(
    kin: Scene, helped: Comparison, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"methods": ["theseus"], "n": 24, "seeds": [1], "alpha": AUTO, "augment": 1}
    compared(kin, **how, folder=tmp_path / "out")
    resumed = compared(kin, **how, folder=tmp_path / "out", control=True)
    assert set(resumed.cells) < set(helped.cells)
    assert resumed.cells[-1].control


def test_the_papers_rows_and_what_a_port_does_are_compared_by_default() -> None:
    paper = ["naive@1", "transfusion@1", "gradfix@1", "fewshot", "theseus@1", "bico@1"]
    assert list(usual_methods()) == [*paper, "bico", "bico-path"]
    assert _usual_rows(Settings()) == usual_methods()
    at_alpha = ["naive", "transfusion", "gradfix", "fewshot", "theseus", "bico", "bico-path"]
    assert _usual_rows(Settings(alpha=0.5)) == at_alpha, "a number holds for all of them"


def test_a_method_of_ones_own_is_compared_by_default_if_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bico.settings.METHODS", dict(METHODS))
    register_method("mine", "a:B", usual=True)
    register_method("other", "a:B", usual_at_1=True, row=0)
    register_method("not-mine", "a:B")
    assert usual_methods()[0] == "other@1"
    assert usual_methods()[-1] == "mine"
    assert len(usual_methods()) == 10


def test_settings_identify_a_comparison_as_they_did_before() -> None:
    """So that a log of a number for alpha is gone on with."""
    before = _identifying(Settings(alpha=1.0))
    assert before["path_steps"] == 2
    assert not {"bold", "eval_samples"} & set(before)
    assert _identifying(Settings(alpha=1.0, path_steps=2)) == before
    assert _identifying(Settings()) != _identifying(Settings(path_steps=4)), "bico-path@1 has 2 steps in the first"
    assert _identifying(Settings(bold=True))["bold"]


def test_a_training_is_the_same_in_every_draw(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With readouts or probes fine-tuning has numbers of every draw, but is done once."""
    steps = count_calls(monkeypatch, Learner, "step")
    compared(scene, methods=["finetune"], n=[8], seeds=2, readout=True, evaluation="both")
    assert len(steps) == OPTIONS["train_steps"]


def test_the_fine_tuned_target_is_a_reference(scene: Scene, tmp_path: Path) -> None:
    shutil.copytree(scene.target, tmp_path / "direct")
    file = tmp_path / "direct" / "open_clip_model.safetensors"
    state = load_file(file)
    changed = {name: tensor * 1.5 if name.startswith("visual.") else tensor for name, tensor in state.items()}
    save_file({**state, **changed}, file, metadata={"format": "pt"})
    comparison = compared(scene, methods=["naive"], n=8, seeds=1, fine_tuned=tmp_path / "direct")
    alone = hf_bico.evaluate_model(tmp_path / "direct", scene.data, device="cpu")
    assert alone.n == ROWS
    assert value(comparison, "target fine-tuned") == alone.value != value(comparison, "target")
    out = ["-o", str(tmp_path / "out"), "-n", "8", "--seeds", "1", "--methods", "naive"]
    result = run(*typed(scene), *out, "--fine-tuned", str(tmp_path / "direct"))
    assert result.exit_code == 0, result.output
    assert f"target, fine-tuned  -      {alone.value:.1%}".rstrip("%") in result.stdout
    save_file({**state, **{name: -tensor for name, tensor in changed.items()}}, file, metadata={"format": "pt"})
    other = run(*typed(scene), *out, "--fine-tuned", str(tmp_path / "direct"))
    assert (other.exit_code, "fine_tuned.sha256." in other.stderr) == (2, True), other.stderr


def test_no_sample_that_any_draw_took_is_measured_on(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_pictures(tmp_path / "pictures", splits={"train": TRAINED})
    asked, seen = hf_bico.experiments.compare.measurements.evaluation_samples, list[set[int]]()

    def noted(*arguments: Any) -> Any:
        split, samples = asked(*arguments)
        assert split == "train"
        seen.append(set(samples.indices))
        return split, samples

    monkeypatch.setattr("hf_bico.experiments.compare.measurements.evaluation_samples", noted)
    comparison = compared(scene, data=data, methods=["bico"], n=SIZES, seeds=2)
    draws: list[CalibrationDraw] = [draw(data, Settings(n=n, seed=seed)) for n in SIZES for seed in SEEDS]
    drawn = {index for one in draws for index in one.samples.indices}
    assert seen == [set(range(TRAINED * CLASSES)) - drawn]
    # half of the split at most: the rest is for what trains
    assert comparison.about["evaluation"] == {"pictures": {"split": "train", "samples": TRAINED * CLASSES // 2}}
    with pytest.raises(SampleCountError, match="no labelled sample to measure on"):
        compared(scene, data=data, methods=["bico"], n=TRAINED * CLASSES, seeds=1)


# Nothing is done twice


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What the method `name` is called on, from now on."""
    original, calls = getattr(owner, name), list[Any]()

    def counting(own: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(own)
        return original(own, *arguments, **options)

    monkeypatch.setattr(owner, name, counting)
    return calls


def test_models_are_loaded_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = count_calls(monkeypatch, Model, "load")
    compared(scene, methods=["naive", "theseus", "bico"], n=SIZES, seeds=2)
    assert [model.name for model in loaded] == ["base", "target"]


BATCH, SAMPLES = 7, 24
BATCHES, EVALUATION = ceil(SAMPLES / BATCH), ceil(ROWS / BATCH)


def test_one_pass_serves_all_methods(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as counts:
        compared(scene, methods=ONE_PASS, n=SAMPLES, seeds=1, batch_size=BATCH)
    # the source also predicts, with its fine-tuned weights; a backward with the labels, and one for each class
    assert counts == {
        "source": EVALUATION + 2 * BATCHES,
        "target": EVALUATION * (1 + len(ONE_PASS)) + BATCHES,
        "backward": 2 * BATCHES * (1 + CLASSES),
    }


def test_so_does_one_pass_of_each_control(scene: Scene, twin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["gradfix", "theseus", "input-only"]
    with counted(monkeypatch) as counts:
        compared(scene, twin, methods=methods, n=SAMPLES, seeds=1, batch_size=BATCH, control=True)
    # both towers are as wide as the source's here; a control mispairs in four ways; gradfix alone needs a gradient, and
    # the target's alone
    assert counts == {"source": EVALUATION * (2 + 3 + 2) + (2 + 4 * 2) * BATCHES, "backward": BATCHES}


def test_what_is_in_the_log_is_not_collected_again(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"n": SAMPLES, "seeds": 1, "batch_size": BATCH, "folder": tmp_path / "out"}
    rest = [name for name in ONE_PASS if name != "theseus"]
    compared(scene, methods=rest, **options)
    with counted(monkeypatch) as counts:
        compared(scene, methods=ONE_PASS, **options)
    assert counts == {"source": BATCHES, "target": EVALUATION + BATCHES}, "theseus needs no gradient"
    with counted(monkeypatch) as counts:
        compared(scene, methods=ONE_PASS, **options)
    assert counts == {}


# Nothing measured is lost


GRID = ["--methods", "naive,theseus,bico", "-n", "8,12", "--seeds", "2"]
CELLS = 2 + 1 + 2 * 4


@pytest.fixture(scope="module")
def undisturbed(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    assert run(*typed(scene), *GRID, "-o", str(folder), "-q").exit_code == 0
    return folder


@pytest.mark.parametrize("cells", [1, 7])
def test_a_killed_comparison_goes_on_where_it_was(scene: Scene, undisturbed: Path, tmp_path: Path, cells: int) -> None:
    out = tmp_path / "out"
    arguments = [*typed(scene), *GRID, "-o", str(out), "-q"]
    kill("cell", cells, "compare", *arguments)
    kept = log_lines(out)
    assert len(kept) == 1 + cells
    assert not any((out / name).exists() for name in RESULT_FILES)
    again = run(*arguments)
    assert again.exit_code == 0, again.output
    lines = log_lines(out)
    assert lines[: len(kept)] == kept
    assert set(Counter(keys_of(lines)).values()) == {1}
    assert len(lines) == 1 + CELLS
    assert results(out) == results(undisturbed)
    assert {file.name for file in out.iterdir()} == {file.name for file in undisturbed.iterdir()}


def test_a_killed_training_goes_on_where_it_was_saved(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 40
    typed_options = ["--methods", "finetune,bico", "-n", "8", "--seeds", "1", "-q", "--train-steps", str(steps)]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(*typed(scene), *typed_options, "-o", str(whole)).exit_code == 0
    arguments = [*typed(scene), *typed_options, "-o", str(out)]
    kill("checkpoint", 2, "compare", *arguments)
    assert "finetune" not in {key.method for key in keys_of(log_lines(out))}
    taken = count_calls(monkeypatch, Learner, "step")
    assert run(*arguments).exit_code == 0
    assert len(taken) == steps - 20
    assert results(out) == results(whole)


def test_ctrl_c_says_what_is_kept(scene: Scene, undisturbed: Path, tmp_path: Path) -> None:
    """A real SIGINT, at a known moment: when the fifth number is there."""
    out = tmp_path / "out"
    arguments = ["compare", *typed(scene), *GRID, "-o", str(out), "-q"]
    code = (
        "import signal\nfrom hf_bico.cli.main import main\n"
        "from hf_bico.experiments.compare.log import CellLog\n"
        "add = CellLog.add\n"
        "def interrupted(log, cell):\n"
        "    add(log, cell)\n"
        "    if len(log.cells) == 5:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "CellLog.add = interrupted\n"
        f"main({arguments!r})"
    )
    process = forks.run(code=code)
    assert process.returncode == 130
    assert process.stdout == ""
    said = f"Interrupted: the results so far are in {out}, and the same command resumes.\n"
    assert process.stderr == said
    assert len(log_lines(out)) == 1 + 5
    assert run(*arguments[1:]).exit_code == 0
    assert results(out) == results(undisturbed)


def test_more_methods_sizes_and_seeds_add_to_a_comparison(scene: Scene, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before: list[bytes] = []
    steps = [
        ["--methods", "naive,bico", "-n", "8", "--seeds", "1"],
        ["--methods", "naive,bico", "-n", "8,12", "--seeds", "1"],
        ["--methods", "naive,bico,theseus", "-n", "12", "--seeds", "2"],
        GRID,
    ]
    for options in steps:
        assert run(*typed(scene), *options, "-o", str(out), "-q").exit_code == 0
        lines = log_lines(out)
        assert lines[: len(before)] == before
        assert len(lines) > len(before)
        before = lines
    assert results(out) == results(undisturbed)
    # what is shown is what was asked for
    assert run(*typed(scene), *steps[0], "-o", str(out), "-q").exit_code == 0
    assert log_lines(out) == before
    assert {(cell.method, cell.n) for cell in Comparison.load(out).cells} == {
        *(("target", None), ("source", None), ("naive", None), ("bico", 8)),
    }


def test_another_comparison_is_not_mixed_in(scene: Scene, twin: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    few = ["--methods", "finetune", "-n", "8", "--seeds", "1", "-o", str(out)]
    assert run(*typed(scene), *few, "-q").exit_code == 0
    before = log_lines(out)
    for arguments, what in (
        ([*typed(scene, twin), *few], "target.id was"),
        ([*typed(scene), *few, "--alpha", "0.5"], "settings.alpha was 8.0, now 0.5"),
        ([*typed(scene), *few, "--alpha", "auto"], 'settings.alpha was 8.0, now "auto"'),
        ([*typed(scene), *few, "--train-steps", "2"], "settings.train_steps was 3, now 2"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        first, second = result.stderr.splitlines()
        assert first.startswith(f"Error: '{out}' holds another comparison: ")
        assert what in first
        assert "--overwrite" in second
        assert log_lines(out) == before
    anew = run(*typed(scene), *few, "--train-steps", "2", "--overwrite", "-q")
    assert anew.exit_code == 0, anew.output
    assert log_lines(out)[0] != before[0]
    assert [cell.method for cell in Comparison.load(out).cells] == ["target", "source", "finetune"]


def test_a_folder_with_something_else_is_left_alone(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for options in ([], ["--overwrite"]):
        result = run(*typed(scene), "--methods", "naive", "-n", "8", "-o", str(tmp_path), *options)
        assert result.exit_code == 1
        assert "exists and holds no comparison" in result.stderr.splitlines()[0]
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


# What is printed


FEW = ["--methods", "naive,bico", "-n", "8", "--seeds", "2"]


def test_the_table_is_on_stdout_and_each_number_on_stderr(scene: Scene, tmp_path: Path) -> None:
    result = run(*typed(scene), *FEW, "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    found = Comparison.load(tmp_path / "out")
    assert result.stdout == f"tuned to target\n\n{found.table()}\n\nWritten to {tmp_path / 'out'}\n"
    lines = result.stderr.splitlines()
    assert len(lines) == len(found.cells) == 5
    assert lines[0].startswith("pictures: target, zero-shot: ")
    assert lines[-1].startswith("pictures: BiCo, N = 8, seed 1: ")
    labels = [line.partition("  ")[0] for line in result.stdout.splitlines()[2:-2] if line]
    assert labels == ["model", "target, zero-shot", "source, fine-tuned", "naive (padded)", "BiCo"]


def test_json_is_one_object(scene: Scene, tmp_path: Path) -> None:
    result = run(*typed(scene), *FEW, "-o", str(tmp_path / "out"), "--json")
    assert result.stderr == ""
    raw = json.loads(result.stdout)
    assert raw["folder"] == str(tmp_path / "out")
    assert raw["comparison"] == json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert len(raw["comparison"]["cells"]) == 5


def test_quiet_prints_nothing_and_the_folder_has_a_name(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*typed(scene), *FEW, "-q")
    assert (result.exit_code, result.output) == (0, "")
    names = {file.name for file in (tmp_path / "tuned-to-target-compared").iterdir()}
    assert names >= {LOG_FILE, *RESULT_FILES}


def test_all_methods_but_those_that_cannot_carry(scene: Scene, tmp_path: Path) -> None:
    result = run(*typed(scene), "--methods", "all", "-k", "1", "--seeds", "1", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    found = Comparison.load(tmp_path / "out")
    assert {refusal.method for refusal in found.refusals} == {"transfusion", "gradfix"}
    steps = OPTIONS["train_steps"]
    rows = {f"{name}@{steps}" if name in BRIEF else name for name in METHODS}
    assert {"readout", f"train@{steps}", f"distill@{steps}"} < rows
    assert set(found.methods) == {"target", "source", *rows} - {"transfusion", "gradfix"}
    assert {(cell.n, cell.per_class) for cell in found.cells} == {(None, None), (None, 1)}
    refused = [line for line in result.stdout.splitlines() if line.startswith("not measured: ")]
    assert len(refused) == 2
    assert "not measured: GradFix: gradfix needs two models of one architecture" in refused[1]


def test_several_data_sets(scene: Scene, tmp_path: Path) -> None:
    other = write_pictures(tmp_path / "others", seed=1)
    out = tmp_path / "out"
    result = run(*typed(scene, data=(scene.data, other)), *FEW, "-o", str(out))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[2].split() == ["model", "N", "pictures", "others", "average", "gain"]
    found = Comparison.load(out)
    assert found.data_sets == ("pictures", "others")
    alone = [compared(scene, data=data, methods=["naive", "bico"], n=8, seeds=2) for data in (scene.data, other)]
    assert found.cells == tuple(cell for one in alone for cell in one.cells)
    # python takes a list too
    both = compared(scene, data=[scene.data, str(other)], methods=["naive"], n=8, seeds=1)
    assert both.data_sets == ("pictures", "others")


def test_without_a_folder_nothing_is_written(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []
    found = compared(scene, methods=["naive"], n=8, seeds=1, shown=lambda so_far: seen.append(len(so_far.cells)))
    assert seen == [1, 2, 3]
    assert len(found.cells) == 3
    assert list(tmp_path.iterdir()) == []


# Plain mistakes


def same_names(scene: Scene, folder: Path) -> list[str]:
    return [*typed(scene), "--data", str(write_pictures(folder / "other" / "pictures", splits={"train": 4}))]


def unlabelled(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(write_images(folder / "images") / "train" / "one", folder / "plain")
    (folder / "names").write_text("\n".join(CLASS_NAMES))
    return [*typed(scene, data=(folder / "plain",)), "-n", "8", "--class-names", str(folder / "names")]


def no_data(scene: Scene, folder: Path) -> list[str]:
    at = typed(scene).index("--data")
    return typed(scene)[:at]


def with_options(*options: str) -> Callable[[Scene, Path], list[str]]:
    return lambda scene, folder: [*typed(scene), *options]


MISTAKES: dict[str, tuple[Callable[[Scene, Path], list[str]], int, str, str]] = {
    "two of one name": (same_names, 2, "two of the data sets have one name", "rename a folder"),
    "unlabelled": (unlabelled, 1, "'plain' has no labelled sample to measure on", "use data with labels"),
    "no data": (no_data, 1, "no calibration data was given", "--data"),
    "unknown method": (with_options("--methods", "bico,bica"), 2, "there is no method 'bica'", "all, standard, bico, "),
    "unknown at an alpha": (with_options("--methods", "bica@1"), 2, "no method 'bica'", "mean 'bico@1'? Else use"),
    "no number": (with_options("--methods", "bico@one"), 2, "'bico@one' has no number after @", "use bico@1, or bico"),
    "no end": (with_options("--methods", "bico@inf"), 2, "'bico@inf' has no number after @", "use bico@1, or bico"),
    "trained at": (
        with_options("--methods", "fewshot@1"),
        2,
        "an alpha to a method that carries nothing",
        "use fewshot",
    ),
    "corrected at": (with_options("--methods", "readout@1"), 2, "a method that carries nothing", "use readout"),
    "no steps": (with_options("--methods", "train@0"), 2, "'train@0' has no number of training steps", "use train@20"),
    "half a step": (with_options("--methods", "distill@0.5"), 2, "no number of training steps", "or distill"),
    "polished at": (with_options("--methods", "bico+polish@0"), 2, "no number of polishing steps", "bico+polish@20"),
    "polished training": (
        with_options("--methods", "train+polish"),
        2,
        "polishes a method that carries nothing",
        "use train,",
    ),
    "all at": (with_options("--methods", "all@2"), 2, "'all@2' gives an alpha to several", "use all, with --alpha 2"),
    "standard at": (with_options("--methods", "standard@2"), 2, "to several methods", "use standard, with --alpha 2"),
    "beside all": (with_options("--methods", "all,bica"), 2, "there is no method 'bica'", "all, standard, bico, "),
    "no method": (with_options("--methods", ","), 2, "--methods leaves nothing to compare", "at least one"),
    "n and k": (with_options("-n", "8", "-k", "2"), 2, "-n and -k were both given", "choose"),
    "words for n": (with_options("-n", "8,many"), 2, "-n is '8,many'", "10,20,50"),
    "nothing for n": (with_options("-n", ""), 2, "-n is ''", "10,20,50"),
    "words for k": (with_options("-k", "1;2"), 2, "-k is '1;2'", "10,20,50"),
    "no samples": (with_options("-n", "8,0"), 2, "-n is 0", "at least 1"),
    "no seeds": (with_options("--seeds", "0"), 2, "--seeds leaves nothing to compare", "at least one"),
    "too many": (with_options("-n", "8,49"), 1, "49 samples were asked for", "use -n 48 or less"),
    "layers": (with_options("--layers", "0,1,1"), 2, "--layers", "one source block for each target block"),
}


@pytest.mark.parametrize(("mistake", "code", "cause", "remedy"), MISTAKES.values(), ids=list(MISTAKES))
def test_plain_mistakes_get_two_lines(
    mistake: Callable[[Scene, Path], list[str]], code: int, cause: str, remedy: str, scene: Scene, tmp_path: Path
) -> None:
    arguments = mistake(scene, tmp_path)
    before = sorted(tmp_path.iterdir())
    result = run(*arguments, "-o", str(tmp_path / "out"))
    assert result.exit_code == code, result.output
    first, second = result.stderr.splitlines()
    assert first.startswith("Error: ")
    assert cause in first
    assert second.startswith("Remedy: ")
    assert remedy in second
    assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"


def test_what_only_python_can_get_wrong(scene: Scene) -> None:
    with pytest.raises(UsageError, match="'method' is an option of a port"):
        compared(scene, method="bico")
    with pytest.raises(UsageError, match="objective of the models. own"):
        compared(scene, objective=lambda model, batch: 0)
    with pytest.raises(UsageError, match="'bico@' has no number after @"):
        compared(scene, methods=["bico@"])
    with pytest.raises(UsageError, match="there is no method 'None'"):
        compared(scene, methods=[None])
    with pytest.raises(UsageError, match="unexpected keyword argument 'colour'"):
        compared(scene, colour="red")
    with pytest.raises(hf_bico.BicoError, match="has no rows"):
        hf_bico.compare(scene.tuned, to=scene.target, base=scene.base, data=[], n=8)


def test_other_models_and_other_images_are_another_comparison(tmp_path: Path) -> None:
    """Also where nothing but their contents differs: modules of one class, rows of one number."""
    from transformers import CLIPModel

    folders = {
        name: write_transformers(tmp_path / name, Toy(), random_state(Toy(), seed)) for seed, name in enumerate("ABC")
    }
    base, target = (CLIPModel.from_pretrained(folders[name]) for name in "AB")
    tuned = CLIPModel.from_pretrained(folders["A"])
    with torch.no_grad():
        tuned.visual_projection.weight += 0.01
    rows = {"train": random_rows(12, 16), "test": random_rows(12, 16, seed=1)}

    def identity(**changed: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"source": tuned, "to": target, "base": base, "data": rows, **changed}
        planned = plan(given["source"], given["to"], base=given["base"], data=given["data"])
        settings = Settings(class_names=CLASS_NAMES, device="cpu", objective="zero-shot")
        return _Work.of([planned], Grid.of(["naive"], 4, None, 1, settings), Hub(), silent).identity

    first = identity()
    assert identity() == first
    assert identity(to=CLIPModel.from_pretrained(folders["C"])) != first
    changed = copy.deepcopy(tuned)
    with torch.no_grad():
        changed.visual_projection.weight[0, 0] += 0.01
    assert identity(source=changed) != first
    assert identity(data={**rows, "test": random_rows(12, 16, seed=2)}) != first
