"""What a target is trained on: never what it is measured on, and told apart from every other lesson."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_bico
from hf_bico.alignment.methods.training import TrainingTask
from hf_bico.alignment.objectives.clip import ZeroShotHead, zero_shot_head
from hf_bico.data.draw import draw
from hf_bico.models.model import Model
from hf_bico.porting import prepare, transfer
from hf_bico.porting.training_tasks import training_task
from hf_bico.settings import DEFAULT_TEMPLATES, Settings
from support.toys import CLASS_NAMES, Toy, random_rows, random_state, write_open_clip

pytestmark = pytest.mark.quick

TRAINING: dict[str, Any] = {
    "method": "finetune",
    "train_steps": 2,
    "train_batch": 4,
    "learning_rate": 1e-3,
    "warmup": 1,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, toy = tmp_path_factory.mktemp("models"), Toy()
    made = {name: random_state(toy, seed) for seed, name in enumerate(("base", "target"))}
    made["tuned"] = {
        name: tensor + 0.01 * torch.randn(tensor.shape) if name.startswith("visual.") else tensor
        for name, tensor in made["base"].items()
    }
    return {name: write_open_clip(folder / name, toy, state) for name, state in made.items()}


def finetuned(models: dict[str, Path], data: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """The rows that were trained and measured on, and the record."""
    seen: dict[str, Any] = {}

    def spied(function: Callable[..., Any], what: str, pick: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            result = function(*given, **more)
            seen[what] = pick(given, result)
            return result

        return call

    monkeypatch.setattr(
        transfer, "training_task", spied(training_task, "trained", lambda given, _: set(given[2].indices))
    )
    measured = spied(prepare._held_out, "measured", lambda _, result: (result[0], set(result[1].indices)))
    monkeypatch.setattr(prepare, "_held_out", measured)
    ported = hf_bico.port(
        models["tuned"], to=models["target"], base=models["base"], data=data, class_names=CLASS_NAMES, **options
    )
    return {**seen, "record": ported.record}


def test_what_is_measured_on_is_not_trained_on(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = finetuned(models, random_rows(50, 16), monkeypatch, n=8, **TRAINING)
    split, measured = found["measured"]
    assert split == "train"
    assert len(measured) == 10, "a fifth of the split"
    assert found["trained"] == set(range(50)) - measured
    assert found["record"].evaluation[0].n == 10


def test_a_test_split_leaves_all_of_the_training_split(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"train": random_rows(20, 16), "test": random_rows(12, 16, seed=1)}
    found = finetuned(models, data, monkeypatch, n=8, **TRAINING)
    assert found["measured"] == ("test", set(range(12)))
    assert found["trained"] == set(range(20))


def test_alpha_scales_what_training_changed(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**TRAINING, "data": random_rows(20, 16), "class_names": CLASS_NAMES, "n": 8, "evaluate": False}
    whole, half = (
        hf_bico.port(models["tuned"], to=models["target"], base=models["base"], alpha=alpha, **options).task_vector
        for alpha in (1.0, 0.5)
    )
    assert all(torch.allclose(half[name], 0.5 * whole[name]) for name in whole)


def test_pseudo_labels_are_refused_before_anything_is_loaded(models: dict[str, Path]) -> None:
    with pytest.raises(hf_bico.BicoError, match="finetune trains on the data set's own labels"):
        hf_bico.port(
            models["tuned"],
            to=models["target"],
            base=models["base"],
            data=random_rows(20, 16),
            class_names=CLASS_NAMES,
            labels="pseudo",
            **TRAINING,
        )


def test_lessons_are_told_apart(models: dict[str, Path]) -> None:
    model = Model.open(models["target"], "the target").load(torch.device("cpu"), torch.float32)
    other = Model.open(models["base"], "another").load(torch.device("cpu"), torch.float32)
    head = zero_shot_head(model, CLASS_NAMES, DEFAULT_TEMPLATES)
    settings = Settings(n=12, class_names=CLASS_NAMES)
    samples = draw(random_rows(12, 16), settings).samples

    def made(**changed: Any) -> TrainingTask:
        parts: dict[str, Any] = {"model": model, "head": head, "samples": samples, **changed}
        return training_task(parts["model"], parts["head"], parts["samples"])

    lessons = [
        made(),
        made(model=other),
        made(head=ZeroShotHead(head.classes.flip(0), head.scale, None)),
        made(samples=replace(samples, labels=samples.labels[::-1])),
        made(samples=draw(random_rows(12, 16, seed=1), settings).samples),
        made(samples=samples.rotated(1)),
    ]
    assert len({training_task.identity for training_task in lessons}) == len(lessons)
    assert made().identity == lessons[0].identity
