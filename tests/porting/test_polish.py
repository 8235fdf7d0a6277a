"""Ports that are polished, and targets that are trained briefly instead, on models that were really trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import hf_bico
from hf_bico import Ported
from hf_bico.alignment import scaling
from hf_bico.alignment.methods import brief
from hf_bico.alignment.methods.training import LeftOut, Trained
from hf_bico.alignment.scaling import SampleScores
from hf_bico.errors import UnsuitableMethodError, UsageError
from hf_bico.experiments.demo.world import World
from hf_bico.models.low_rank import Factors
from hf_bico.porting import polish as polishing
from hf_bico.reports.record import Record, read_record
from support.transformers_world import LoraRecipe, as_transformers, train_lora
from support.worlds import decoders, encoders, sequences, small_world

TASK = "inverted"
PORT: dict[str, Any] = {"method": "bico", "n": 60, "eval_samples": 100}
QUICK: dict[str, Any] = {**PORT, "learning_rate": 3e-3, "polish_steps": 5}


def where(world: World) -> dict[str, Any]:
    return {"to": world.base("wide"), "base": world.base("narrow"), "data": world.data(TASK)}


@cache
def polished() -> Ported:
    world = small_world(0)
    return hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), polish=True, **QUICK)


@cache
def plain() -> Ported:
    world = small_world(0)
    return hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), **PORT)


def values(record: Record) -> dict[str, float]:
    return {entry.model: entry.value for entry in record.evaluation}


def test_a_polish_adds_to_the_port_and_is_told() -> None:
    record = polished().record
    found, training = values(record), record.method.polish
    assert found["ported, no polish"] == values(plain().record)["ported"]
    assert found["ported"] > found["ported, no polish"] + 0.05
    assert training is not None
    assert training.helped
    assert (training.toward, training.most, training.given, training.samples) == ("source", 5, True, 60)
    assert 0 < training.steps <= 5
    assert training.after is not None
    assert training.before is not None
    assert training.after < training.before
    assert training.left_out == 48
    assert record.outlook is not None
    assert record.outlook.value > 0.1


def test_a_card_never_calls_it_training_free(tmp_path: Path) -> None:
    folder = polished().save(tmp_path / "out")
    card = (folder / "README.md").read_text(encoding="utf-8")
    steps = polished().record.method.polish
    assert steps is not None
    assert "training-free" not in card.partition("## Citation")[0]
    assert "No training step" not in card
    assert "zero training steps" not in card
    assert f"The change was carried, then polished for {steps.steps} steps on 60 unlabelled samples" in card
    plainly = (plain().save(tmp_path / "plain") / "README.md").read_text(encoding="utf-8")
    assert "training-free" in plainly.partition("## Citation")[0]


def test_a_polish_is_repeated_from_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a record's folders are looked for
    world = small_world(0)
    for name in ("narrow", "narrow-inverted", "wide"):
        shutil.copytree(world.base("narrow").parent / name, tmp_path / name)
    shutil.copytree(world.data(TASK), tmp_path / TASK)
    folder = polished().save(tmp_path / "out")
    assert "--polish --polish-steps 5" in json.loads((folder / "bico.json").read_text())["command"]
    assert hf_bico.rerun(folder).same


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A LoRA over a copy of the narrow model in transformers' layout, and that copy."""
    place = tmp_path_factory.mktemp("lora")
    as_transformers(small_world(0).base("narrow"), place / "base")
    train_lora(place / "base", place / "lora", TASK, LoraRecipe(rank=4, steps=60), seed=0)
    return place / "lora", place / "base"


@pytest.mark.parametrize("rank", [None, 2])
def test_factors_of_a_lora_stay_factors(lora: tuple[Path, Path], tmp_path: Path, rank: int | None) -> None:
    adapter, base = lora
    world = small_world(0)
    # labels leave the readout alone, so that all of the polish is steps
    options: dict[str, Any] = {"polish": True, "polish_on": "labels", "rank": rank, "alpha": 1.0, **QUICK}
    ported = hf_bico.port(adapter, **where(world) | {"base": base}, **options)
    assert ported.form.format == "adapter"
    assert ported.record.method.polish is not None
    assert ported.record.method.polish.steps
    assert ported.record.method.polish.rank == (rank or 8)  # q and v stand in one matrix, each with a rank of 4
    changes = [change for _, change in ported.task_vector.changes()]
    assert len(changes) > 4
    for change in changes:
        assert isinstance(change, Factors) or change.ndim == 1
        # q, k and v stand in one matrix, each with factors of its own
        assert change.ndim == 1 if not isinstance(change, Factors) else change.rank <= 3 * (rank or 4)
    saved = json.loads((ported.save(tmp_path / "out") / "adapter_config.json").read_text())
    assert saved["r"] <= 3 * (rank or 4)


@pytest.fixture
def useless_polish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every polish one that the left-out samples lose by."""
    original = brief.train_briefly

    def useless(task: Any, *rest: Any) -> Trained:
        trained = original(task, *rest)
        assert trained.left_out is not None
        worse = SampleScores(trained.left_out.after.losses + 100, trained.left_out.after.accuracies)
        return Trained(trained.changes, 3, 60, None, 1e-3, LeftOut(trained.left_out.samples, worse, worse), True)

    monkeypatch.setattr(polishing, "train_briefly", useless)


@pytest.mark.usefixtures("useless_polish")
def test_a_polish_that_does_not_help_is_dropped_and_said(tmp_path: Path) -> None:
    """Left-out samples that say nothing for it leave the port as it was."""
    world = small_world(0)
    ported = hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), polish=True, **QUICK)
    assert ported.record.method.polish is not None
    assert ported.record.method.polish.helped is False
    assert ported.task_vector == plain().task_vector
    assert ported.record.outlook == plain().record.outlook
    card = (ported.save(tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    assert "The polish was dropped: 48 samples left out of it show no clear gain" in card
    assert "training-free" in card.partition("## Citation")[0]


@pytest.mark.usefixtures("useless_polish")
def test_a_dropped_polish_leaves_a_held_back_port_its_own_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The veto in the record is that of what would have been carried, not that of nothing."""
    monkeypatch.setattr(scaling, "VETO", 1000.0)  # no gain is clear enough
    world = small_world(0)
    source = world.fine_tuned("narrow", TASK)
    held, with_polish = (hf_bico.port(source, **where(world), **how) for how in (PORT, {**QUICK, "polish": True}))
    assert held.held_back
    assert with_polish.held_back
    veto = held.record.method.veto
    assert veto is not None
    assert veto.mean > 0
    assert with_polish.record.method.veto == veto
    assert with_polish.record.outlook == held.record.outlook


def test_a_polish_of_what_was_held_back_is_called_a_training(tmp_path: Path) -> None:
    world = small_world(0)
    few = {**QUICK, "n": 10, "polish_steps": 10}
    ported = hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), polish=True, **few)
    training = ported.record.method.polish
    assert training is not None
    assert (training.helped, training.alone) == (True, True)
    assert not ported.held_back
    assert ported.report.sites == ()
    assert values(ported.record).keys() == {"target", "ported", "source", "target, readout"}
    card = (ported.save(tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    head = card.partition("## Lineage")[0]
    assert f" on 10 samples of `{TASK}` for {training.steps} steps" in head
    assert "The samples spoke against the ported change" in head
    for word in ("ported to", "ported without", "task-vector", "training-free", "## Citation"):
        assert word not in card
    assert read_record(tmp_path / "out").method.trained == training


def test_an_interrupted_polish_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brief, "SAVE_AFTER", 0.0)
    world, calls = small_world(0), 0

    def stop(stage: str, done: int, total: int) -> None:
        nonlocal calls
        calls += stage == "train"
        if calls > 9:
            raise KeyboardInterrupt

    options = {"polish": True, "checkpoint": str(tmp_path / "training"), "evaluate": False, **QUICK}
    with pytest.raises(KeyboardInterrupt):
        hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), **options, progress=stop)
    assert (tmp_path / "training" / "training.safetensors").is_file()
    resumed = hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), **options)
    for name, change in polished().task_vector.items():
        assert torch.equal(resumed.task_vector[name], change)


def test_distilling_is_a_literal_loop_of_open_clip() -> None:
    """All tensors of the vision tower, the KL from the fine-tuned source, AdamW: with open_clip and torch alone."""
    import open_clip

    world = small_world(0)
    options: dict[str, Any] = {"n": 30, "train_steps": 4, "learning_rate": 1e-3, "train_batch": 1000}
    ported = hf_bico.port(
        world.fine_tuned("narrow", TASK), **where(world), method="distill", **options, evaluate=False, dtype="float64"
    )
    training = ported.record.method.training
    assert training is not None
    assert training.steps > 0
    record = ported.record
    assert record.data is not None
    rows = _rows(world)
    pictures = [rows[index] for index in record.data.indices]

    def load(folder: Path) -> tuple[Any, Any, Any]:
        model, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{folder}")
        return model.double().eval(), prepare, open_clip.get_tokenizer(f"local-dir:{folder}")

    def logits(model: Any, prepare: Any, classes: torch.Tensor) -> torch.Tensor:
        pixels = torch.stack([prepare(picture) for picture in pictures]).double()
        features = functional.normalize(model.encode_image(pixels), dim=-1)
        return model.logit_scale.exp() * features @ classes.T

    def classes(model: Any, tokenizer: Any) -> torch.Tensor:
        names = [f"a photo of a {name}." for name in record.data.class_names]  # type: ignore[union-attr]
        with torch.no_grad():
            return functional.normalize(model.encode_text(tokenizer(names)), dim=-1)

    tuned, of_tuned, words = load(world.fine_tuned("narrow", TASK))
    target, of_target, words_of_target = load(world.base("wide"))
    with torch.no_grad():
        wanted = logits(tuned, of_tuned, classes(tuned, words)).softmax(-1)
    fixed = classes(target, words_of_target)
    before = {name: parameter.detach().clone() for name, parameter in target.named_parameters()}
    trained = [parameter for name, parameter in target.named_parameters() if name.startswith("visual.")]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
    for step in range(training.steps):
        loss = functional.kl_div(logits(target, of_target, fixed).log_softmax(-1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + torch.cos(torch.tensor(torch.pi * step / 4)).item()) / 2
        optimizer.step()
    after = dict(target.named_parameters())
    compared = [name for name in ported.task_vector if name.startswith("visual.")]
    assert len(compared) > 20
    for name in compared:
        change, expected = ported.task_vector[name].double(), after[name].detach() - before[name]
        assert (change - expected).norm() <= 1e-5 * expected.norm() + 1e-12, name


def _rows(world: World) -> list[Any]:
    from hf_bico.data.draw import open_data

    data = open_data(world.data(TASK))
    samples = data.samples("train", list(range(len(data.splits["train"]))))
    return [item for items, _ in samples.batches(256) for item in items]


@pytest.mark.parametrize("method", ["train", "distill", "readout"])
def test_what_carries_nothing_is_called_what_it_is(method: str, tmp_path: Path) -> None:
    world = small_world(0)
    options = {"n": 40, "eval_samples": 100} | (
        {} if method == "readout" else {"train_steps": 6, "learning_rate": 3e-3}
    )
    ported = hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), method=method, **options)
    found = values(ported.record)
    assert found["ported"] > found["target"] + 0.1
    folder = ported.save(tmp_path / "out")
    card = (folder / "README.md").read_text(encoding="utf-8")
    head = card.partition("## How it was made")[0]
    assert "ported to" not in head
    assert "task-vector" not in head
    assert "training-free" not in head
    if method == "readout":
        assert "with a corrected readout on" in head
        assert "closed form" in head
    else:
        training = ported.record.method.training
        assert training is not None
        kind = "labelled" if method == "train" else "unlabelled"
        assert f"{training.steps} steps on 40 {kind} samples" in card
        assert ("only its predictions" in head) == (method == "distill")


def test_without_labels_distilling_works_and_training_is_refused() -> None:
    world = small_world(0)
    data = [{"image": picture} for picture in _rows(world)[:60]]
    names = [
        *hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), n=5, evaluate=False).record.data.class_names
    ]  # type: ignore[union-attr]
    options: dict[str, Any] = {
        "n": 40,
        "class_names": names,
        "evaluate": False,
        "learning_rate": 3e-3,
        "train_steps": 3,
    }
    place = where(world) | {"data": data}
    source = world.fine_tuned("narrow", TASK)
    distilled = hf_bico.port(source, **place, method="distill", **options)
    assert distilled.record.method.training is not None
    assert distilled.record.method.training.steps
    with pytest.raises(UnsuitableMethodError, match="no labels") as refused:
        hf_bico.port(source, **place, method="train", **options)
    assert "distill" in refused.value.remedy
    with pytest.raises(UnsuitableMethodError, match="no labels"):
        hf_bico.port(source, **place, polish=True, polish_on="labels", n=40, class_names=names, evaluate=False)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"method": "train", "polish": True}, "polish=True trains what was carried"),
        ({"method": "readout", "polish": True}, "polish=True trains what was carried"),
        ({"polish": True, "objective": lambda model, batch: model(batch.pixels).sum()}, "classes or tokens"),
    ],
)
def test_a_polish_of_nothing_is_refused(options: dict[str, Any], cause: str) -> None:
    world = small_world(0)
    with pytest.raises((UnsuitableMethodError, UsageError), match=cause):
        hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), **options)


def test_unlabelled_samples_are_distilled_and_not_measured_on() -> None:
    world = small_world(0)
    options: dict[str, Any] = {"n": 10, "unlabelled": world.data(TASK), "unlabelled_samples": 200, "eval_samples": 100}
    options["method"] = "bico"
    few = hf_bico.port(
        world.fine_tuned("narrow", TASK), **where(world), **options, polish=True, learning_rate=3e-3, polish_steps=8
    )
    found, training = values(few.record), few.record.method.polish
    assert found["ported"] > found["target"] + 0.25
    assert training is not None
    assert (training.samples, training.unlabelled) == (210, 200)


@pytest.mark.parametrize("how", [{**QUICK, "polish": True}, {"method": "readout"}], ids=["polish", "readout"])
def test_samples_of_another_data_set_are_learnt_from_where_the_datas_own_gain_by_it(
    how: dict[str, Any], tmp_path: Path
) -> None:
    """On plain digits the target is nearly perfect, and what 300 inverted ones teach it would spoil that."""
    world, more = small_world(0), {"n": 10, "unlabelled_samples": 300, "eval_samples": 100}
    models: dict[str, Any] = {"to": world.base("wide"), "base": world.base("narrow")}
    source = world.fine_tuned("narrow", "plain")
    data = {"data": world.data("plain"), "unlabelled": world.data(TASK)}
    assert hf_bico.port(source, **models, **data, **{**how, **more}).held_back
    copied = shutil.copytree(world.data(TASK), tmp_path / "copied")
    kept = hf_bico.port(world.fine_tuned("narrow", TASK), **where(world), unlabelled=copied, **{**how, **more})
    found = values(kept.record)
    assert found["ported"] > found["target"] + 0.25


def _texts(world: Any) -> dict[str, Any]:
    return {"train": world.calibration(60), "test": world.held_out(60)}


LANGUAGE: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "decoder": lambda: (
        decoders(0).adapter,
        {"to": decoders(0).target, "base": decoders(0).source, "data": _texts(decoders(0))},
    ),
    "classifier": lambda: (
        encoders().source,
        {"to": encoders().target, "base": encoders().base, "data": encoders().data},
    ),
    "t5": lambda: (
        sequences(0).tuned,
        {"to": sequences(0).target, "base": sequences(0).source, "data": sequences(0).data},
    ),
}


@pytest.mark.parametrize("kind", LANGUAGE)
@pytest.mark.parametrize("how", ["polish", "distill", "train"])
def test_language_models_are_polished_and_trained(kind: str, how: str) -> None:
    """Tokens of decoders and T5s, classes of classifiers: each towards the source, and by the samples themselves."""
    source, place = LANGUAGE[kind]()
    samples = 40 if kind == "classifier" else 16
    options: dict[str, Any] = {"n": samples, "learning_rate": 3e-3, "eval_samples": 30}
    options |= {"polish": True, "polish_steps": 6, "method": "bico", "alpha": 1.0} if how == "polish" else {}
    options |= {} if how == "polish" else {"method": how, "train_steps": 6}
    ported = hf_bico.port(source, **place, **options)
    training = ported.record.method.polish if how == "polish" else ported.record.method.training
    assert training is not None
    assert training.toward == ("labels" if how == "train" else "source")
    assert training.left_out == samples
    if (kind, how) == ("classifier", "train"):  # its head is fitted to the same labels, which leaves nothing to learn
        assert ported.held_back == (training.steps == 0)
        return
    assert not ported.held_back
    assert training.steps > 0
    found = {(entry.model, entry.metric): entry.value for entry in ported.record.evaluation}
    if kind == "decoder":
        assert found["ported", "loss"] < found["target", "loss"]
        assert ported.form.format == "adapter"
        assert all(isinstance(change, Factors) for _, change in ported.task_vector.changes())
