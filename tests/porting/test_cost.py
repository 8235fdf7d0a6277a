"""What a port cost in training steps of the target: timed without a trace, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import hf_bico
from hf_bico.alignment.methods.training import Learner
from hf_bico.alignment.objectives.clip import ContrastHead
from hf_bico.cli.main import main
from hf_bico.porting import cost, port
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.cost import TrainingStep, time_training_step
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.prepare import PreparedPort
from hf_bico.porting.transfer import trained_parameters
from hf_bico.reports.cost import cost_sentence
from hf_bico.reports.model_cards import render_card
from hf_bico.reports.record import Record, read_record
from hf_bico.runtime.environment import exact_float32, keep_bfloat16_off_onednn
from support.calibrations import PORTS
from support.paper import PAPER
from support.records import a_record, a_trained_record, text_of
from support.scenes import Scene, make_scene

FEW: dict[str, Any] = {"n": 12, "batch_size": 8, "evaluate": False, "device": "cpu"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def ported(scene: Scene, **options: Any) -> hf_bico.Ported:
    usual: dict[str, Any] = {"base": scene.base, "data": scene.data, **FEW, **PAPER}
    return hf_bico.port(scene.tuned, to=scene.target, **{**usual, **options})


def step_of(record: Record) -> tuple[float | None, int | None]:
    return record.run.training_step, record.run.training_batch


class Timed:
    """A port whose steps are timed once more, with something changed."""

    def __init__(self) -> None:
        self.prepared: PreparedPort
        self.calibration: Calibration

    def keep(self, prepared: PreparedPort, calibration: Calibration, processes: int) -> TrainingStep | None:
        assert processes == 1
        self.prepared, self.calibration = prepared, calibration
        return None

    def again(self, prepared: PreparedPort | None = None, processes: int = 1) -> TrainingStep | None:
        with exact_float32():  # as a port does
            keep_bfloat16_off_onednn(self.models.target.module)
            return time_training_step(prepared or self.prepared, self.calibration, processes)

    @property
    def models(self) -> ModelPair:
        return self.prepared.models


@pytest.fixture
def timed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timed]:
    def of(**options: Any) -> Timed:
        found = Timed()
        with monkeypatch.context() as patch:
            patch.setattr(port, "time_training_step", found.keep)
            ported(scene, **options)
        return found

    return of


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The parameters after every step."""
    seen: list[dict[str, Tensor]] = []
    step = Learner.step

    def noted(learner: Learner, *given: Any) -> None:
        step(learner, *given)
        seen.append({name: part.detach().clone() for name, part in learner.training_task.parameters.items()})

    monkeypatch.setattr(Learner, "step", noted)
    return seen


def bits(model: torch.nn.Module) -> dict[str, list[int]]:
    parts = (*model.named_parameters(), *model.named_buffers())
    return {name: part.detach().contiguous().flatten().view(torch.uint8).tolist() for name, part in parts}


# --- the timing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_target_is_left_bit_for_bit_as_it_was(
    dtype: str, timed: Callable[..., Timed], steps: list[dict[str, Tensor]]
) -> None:
    found = timed(dtype=dtype)
    module = found.models.target.module
    before, flags = bits(module), [part.requires_grad for part in module.parameters()]
    step = found.again()
    assert step is not None
    assert step.samples == 8
    assert step.seconds > 0
    assert bits(module) == before
    assert [part.requires_grad for part in module.parameters()] == flags
    assert all(part.grad is None for part in module.parameters())
    assert len(steps) == 1 + 3
    name = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    assert not torch.equal(steps[0][name], steps[-1][name]), "meanwhile it was trained"
    assert not any(name.startswith("transformer.") for name in steps[0]), "but not the text tower"


def test_the_port_is_the_same_with_and_without(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ported(scene, evaluate=True)
    monkeypatch.setattr(port, "time_training_step", lambda *given: None)
    without = ported(scene, evaluate=True)
    assert step_of(usual.record) != (None, None)
    assert step_of(without.record) == (None, None)
    assert usual.record.evaluation == without.record.evaluation
    assert all(torch.equal(change, without.task_vector[name]) for name, change in usual.task_vector.items())


def test_a_long_first_step_is_the_only_one(
    timed: Callable[..., Timed], steps: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = timed()
    monkeypatch.setattr(cost, "PATIENCE", 1e-9)
    assert found.again() is not None
    assert len(steps) == 1


def test_the_median_of_the_steps_after_the_first_counts(
    timed: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, clock = timed(), iter([0.0, 9.0, 9.0, 9.3, 10.0, 10.1, 20.0, 20.2])
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert found.again() == TrainingStep(0.2, 8)


def test_fewer_samples_than_a_batch_are_counted_as_they_are(scene: Scene) -> None:
    assert ported(scene, n=5).record.run.training_batch == 5


@pytest.mark.parametrize("options", [{"labels": "pseudo"}, {"method": "naive"}], ids=str)
def test_other_ports_of_clips_are_timed_too(options: dict[str, Any], scene: Scene) -> None:
    assert ported(scene, **options).record.run.training_batch == 8


@pytest.mark.parametrize("kind", ["decoder", "t5", "transformers"])
def test_other_models_are_timed_in_their_own_loss(kind: str, tmp_path: Path) -> None:
    models = PORTS[kind](tmp_path)
    found = hf_bico.port(models.pop("source"), **models, **{**FEW, "n": 8, "batch_size": 4, **PAPER})
    assert found.record.run.training_batch == 4


# --- where nothing is timed


def own_objective(model: Any, batch: Any) -> Tensor:
    found: Tensor = model.visual(batch.pixels).square().sum()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"objective": own_objective},
        {"objective": "contrastive"},
        {"method": "naive", "data": None},
        {"method": "fewshot"},
        {"method": "finetune", "train_steps": 2, "train_batch": 4},
    ],
    ids=["own objective", "contrastive", "no samples", "fewshot", "finetune"],
)
def test_a_port_whose_steps_cannot_be_timed_says_nothing(options: dict[str, Any], scene: Scene) -> None:
    record = ported(scene, **options).record
    assert step_of(record) == (None, None)
    assert "time" not in record.run.seconds
    assert cost_sentence(record) is None


def test_what_is_held_back_is_not_timed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "time_training_step", None)
    found = ported(scene, method="bico", alpha="auto", augment=0)
    assert found.held_back
    assert step_of(found.record) == (None, None)


def test_several_processes_are_not_timed(timed: Callable[..., Timed]) -> None:
    found = timed()
    assert found.again(processes=2) is None
    assert found.again() is not None


def test_swapped_offloaded_and_spread_models_are_not_timed(
    timed: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = timed()
    found.models.target.swapped = True
    assert found.again() is None
    found.models.target.swapped = False
    with monkeypatch.context() as patch:
        patch.setattr(ModelPair, "offloaded", True)
        assert found.again() is None
    models = replace(found.models, settings=replace(found.models.settings, device_map="auto"))
    assert found.again(replace(found.prepared, models=models)) is None
    assert found.again() is not None


def test_samples_without_labels_are_not_timed(timed: Callable[..., Timed]) -> None:
    found = timed()
    drawn = found.prepared.drawn
    assert drawn is not None
    assert found.again(replace(found.prepared, drawn=drawn.with_labels([-1] * len(drawn.samples)))) is None
    assert "time" not in found.calibration.watch.seconds


def test_a_contrastive_head_is_not_timed(timed: Callable[..., Timed]) -> None:
    found = timed()
    heads = found.prepared.heads
    assert heads is not None
    assert found.again(replace(found.prepared, heads=replace(heads, target=ContrastHead()))) is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), RuntimeError("can't allocate memory")], ids=repr)
def test_memory_that_runs_out_leaves_the_target_as_it_was(
    error: Exception, timed: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, taken, step = timed(), count(), Learner.step
    before = bits(found.models.target.module)

    def fail(learner: Learner, *given: Any) -> None:
        step(learner, *given)
        if next(taken) == 2:
            raise error

    monkeypatch.setattr(Learner, "step", fail)
    assert found.again() is None
    assert next(taken) == 3
    assert bits(found.models.target.module) == before


def test_steps_need_room_in_the_memory_that_is_allowed(scene: Scene) -> None:
    """A port between the toys fits into a megabyte; with the optimiser's state, half of that is too little."""
    assert step_of(ported(scene, memory="1MB").record) == (None, None)
    assert step_of(ported(scene, memory="10MB").record) != (None, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_need_room_for_five_copies_of_the_weights(
    dtype: str, timed: Callable[..., Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weights before, gradients and their sum, and two averages: in float32, whatever the weights are in."""
    found = timed(dtype=dtype)
    models = found.models
    held = sum(part.nbytes for one in (models.source, models.target) for part in one.module.parameters())
    needed = held + 5 * 4 * sum(part.numel() for part in trained_parameters(models.target).values())
    monkeypatch.setattr(cost.ModelFootprint, "sample", lambda *given: SimpleNamespace(graph=0))
    for free, fits in ((2 * needed - 1, False), (2 * needed, True)):
        monkeypatch.setattr(cost, "available_memory", lambda device, free=free: free)
        assert (found.again() is not None) is fits


# --- what is recorded


def test_the_record_has_both_numbers_and_reads_back(scene: Scene, tmp_path: Path) -> None:
    found = ported(scene)
    folder = found.save(tmp_path / "out")
    raw = json.loads((folder / "bico.json").read_text())["run"]
    assert list(raw)[-2:] == ["training_step", "training_batch"]
    assert raw["training_step"] > 0
    assert raw["training_batch"] == 8
    assert step_of(read_record(folder)) == (raw["training_step"], raw["training_batch"])
    assert read_record(folder).run == found.record.run


def test_a_record_without_the_numbers_reads(scene: Scene, tmp_path: Path) -> None:
    folder = ported(scene).save(tmp_path / "out")
    raw = json.loads((folder / "bico.json").read_text())
    for name in ("training_step", "training_batch"):
        del raw["run"][name]
    (folder / "bico.json").write_text(json.dumps(raw))
    assert step_of(read_record(folder)) == (None, None)
    assert cost_sentence(read_record(folder)) is None


def test_the_peak_of_memory_is_that_of_the_port(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(port, "peak_memory", lambda device: len(done))
    monkeypatch.setattr(port, "time_training_step", lambda *given: done.append("timed"))
    assert ported(scene).record.run.peak_memory == 0
    assert done == ["timed"]


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopwatch that counts how often it is looked at."""
    clock = count()
    monkeypatch.setattr("hf_bico.runtime.environment.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))


@pytest.mark.usefixtures("ticks")
def test_a_control_belongs_to_the_evaluation(scene: Scene) -> None:
    plain, control = (ported(scene, evaluate=True, control=control).record.run.seconds for control in (False, True))
    carrying = ("calibrate", "align", "transport")
    assert [control[stage] for stage in carrying] == [plain[stage] for stage in carrying]
    assert control["evaluate"] > plain["evaluate"]


@pytest.mark.usefixtures("ticks")
def test_a_readout_is_a_stage_of_its_own(scene: Scene) -> None:
    assert ported(scene, readout=True).record.run.seconds["readout"] == 1


# --- what is said


def with_run(seconds: dict[str, float], step: float | None, batch: int | None = 32, **changes: Any) -> Record:
    record = a_record(**changes)
    return replace(record, run=replace(record.run, seconds=seconds, training_step=step, training_batch=batch))


CARRIED = {"load": 50.0, "calibrate": 0.7, "align": 0.3, "transport": 0.1, "choose": 0.1, "evaluate": 9.0, "time": 7.0}


@pytest.mark.parametrize(
    ("seconds", "step", "batch", "expected"),
    [
        (CARRIED, 0.0343, 32, "1.2 s on this machine, as long as 35 training steps of the target on 32 samples each."),
        (CARRIED, 1.0, 32, "1.2 s on this machine, as long as one training step of the target on 32 samples."),
        (CARRIED, 0.6, 1, "1.2 s on this machine, as long as 2 training steps of the target on 1 sample each."),
        (CARRIED, 1.3, 8, "1.2 s on this machine, less than one training step of the target on 8 samples."),
        (CARRIED, 0.0004, 4, "1.2 s on this machine, as long as 3,000 training steps of the target on 4 samples each."),
        (
            {"transport": 0.01, "evaluate": 3.0},
            0.1,
            1200,
            "less than 0.1 s on this machine, less than one training step of the target on 1,200 samples.",
        ),
        (
            {"calibrate": 150.0, "readout": 30.0},
            6.0,
            32,
            "3.0 min on this machine, as long as 30 training steps of the target on 32 samples each.",
        ),
    ],
)
def test_the_sentence(seconds: dict[str, float], step: float, batch: int, expected: str) -> None:
    assert cost_sentence(with_run(seconds, step, batch)) == f"Carrying it took {expected}"


@pytest.mark.parametrize(
    "record",
    [
        with_run(CARRIED, None),
        with_run(CARRIED, 0.1, None),
        with_run(CARRIED, 0.0),
        with_run(CARRIED, 0.1, 0),
        with_run(CARRIED, 5e-324),
        with_run({"load": 1.0, "evaluate": 2.0, "time": 3.0}, 0.1),
        replace(a_trained_record(), run=with_run({**CARRIED, "train": 2.0}, 0.1).run),
    ],
    ids=["no step", "no batch", "no time", "no sample", "too many steps", "nothing carried", "trained"],
)
def test_nothing_is_said_without_both_sides(record: Record) -> None:
    assert cost_sentence(record) is None
    assert "Carrying it took" not in render_card(record)


@pytest.mark.parametrize(("device", "where"), [("NVIDIA H200", "on NVIDIA H200"), ("cpu", "on a CPU")])
def test_the_card_says_where(device: str, where: str) -> None:
    record = with_run(CARRIED, 0.0343)
    card = text_of(render_card(replace(record, run=replace(record.run, device=device))))
    assert f"Carrying it took 1.2 s {where}, as long as 35 training steps of the target on 32 samples each." in card


def test_the_time_to_make_a_port_is_without_the_timing() -> None:
    assert "No training step. Time: 51.2 seconds, plus 9.0 seconds to measure it" in text_of(
        render_card(with_run(CARRIED, 1.0))
    )


def test_a_device_of_any_name_is_plain_text() -> None:
    record = with_run(CARRIED, 0.0343)
    evil = "[x](https://evil.example) " * 1000
    card = render_card(replace(record, run=replace(record.run, device=evil)))
    assert "as long as 35 training steps" in text_of(card)
    assert "[x](https" not in card


def test_the_report_and_the_card_of_a_port_say_it(scene: Scene, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*scene.port_by_paper, "--no-eval", "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    record = read_record(tmp_path / "out")
    sentence = cost_sentence(record)
    assert sentence is not None
    spent, said = result.stderr.splitlines()
    assert spent.startswith("seconds: ")
    assert said == sentence
    assert "Carrying" not in result.stdout, "which is the same every time"
    assert sentence.replace("on this machine", "on a CPU") in text_of((tmp_path / "out" / "README.md").read_text())


def test_a_report_without_it(scene: Scene, tmp_path: Path) -> None:
    words = [*scene.port_by_paper, "--method", "fewshot", "--no-eval", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "Carrying it took" not in result.output
