"""How often the models run: one pass over the samples serves every method that reads its statistics."""

from __future__ import annotations

from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_bico
from hf_bico.alignment.methods import make_method
from hf_bico.alignment.methods.base import Carrier
from hf_bico.alignment.scaling import SCALES
from hf_bico.data.draw import draw
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.heads import make_heads
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.planner import plan
from hf_bico.porting.transfer import transfer
from hf_bico.runtime.environment import Stopwatch
from hf_bico.settings import Settings
from support.paper import PAPER
from support.passes import CLASSES, ONE_PASS, counted
from support.scenes import Scene, make_scene

SAMPLES, BATCH = 24, 7
BATCHES = ceil(SAMPLES / BATCH)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def make_calibration(scene: Scene, target: Path | None = None) -> Calibration:
    settings = Settings(n=SAMPLES, batch_size=BATCH, objective="zero-shot", **PAPER)
    planned = plan(scene.tuned, target or scene.target, base=scene.base, data=scene.data).fetched()
    models = ModelPair.open(planned, settings, torch.device("cpu"), Stopwatch())
    drawn = draw(scene.data, settings)
    return Calibration(models, drawn, make_heads(models, drawn.data.class_names, drawn), Stopwatch(), settings)


def carrier(name: str, calibration: Calibration) -> Carrier:
    method = make_method(name, calibration.settings)
    assert isinstance(method, Carrier)
    return method


def test_one_pass_serves_all_methods(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = make_calibration(scene)
    methods = [carrier(name, calibration) for name in ONE_PASS]
    kinds = {kind for method in methods for kind in method.kinds}
    with counted(monkeypatch) as counts:
        calibration.statistics(kinds)
    # the source also predicts, with its fine-tuned weights; a backward with the labels, and one for each class
    assert counts == {"source": 2 * BATCHES, "target": BATCHES, "backward": 2 * BATCHES * (1 + CLASSES)}
    with counted(monkeypatch) as counts:
        outcomes = [transfer(method, calibration) for method in methods]
    assert not counts
    assert all(len(result.changes) for result in outcomes)


def test_gradfix_reads_the_same_pass(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two models of one shape."""
    calibration = make_calibration(scene, target=scene.base)
    methods = [carrier(name, calibration) for name in (*ONE_PASS, "gradfix")]
    with counted(monkeypatch) as counts:
        calibration.statistics({kind for method in methods for kind in method.kinds})
    # both towers are as wide as the source's here: predictions, source and target
    assert counts == {"source": 3 * BATCHES, "backward": 2 * BATCHES * (1 + CLASSES)}
    with counted(monkeypatch) as counts:
        assert all(len(transfer(method, calibration).changes) for method in methods)
    assert not counts


def test_what_was_seen_is_not_collected_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = make_calibration(scene)
    for first, second in (("bico", "output-only"), ("theseus", "input-only"), ("bico-fisher", "bico-fisher")):
        transfer(carrier(first, calibration), calibration)
        with counted(monkeypatch) as counts:
            transfer(carrier(second, calibration), calibration)
        assert not counts, second


PASSES = {
    "naive": {"source": BATCHES, "target": 2 * BATCHES},
    "theseus": {"source": 2 * BATCHES, "target": 3 * BATCHES},
    "input-only": {"source": 2 * BATCHES, "target": 3 * BATCHES},
    "bico": {"source": 2 * BATCHES, "target": 3 * BATCHES, "backward": 2 * BATCHES},
    "gradient-only": {"source": 2 * BATCHES, "target": 3 * BATCHES, "backward": 2 * BATCHES},
    "bico-fisher": {"source": 2 * BATCHES, "target": 3 * BATCHES, "backward": 2 * BATCHES * CLASSES},
    "bico-path": {"source": 3 * BATCHES, "target": 4 * BATCHES, "backward": 2 * 2 * BATCHES * CLASSES},
}
"""With what the outlook takes: the fine-tuned source's predictions, and the target without and with the change."""


def without_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the training steps that say what a port cost: they are no part of it."""
    monkeypatch.setattr("hf_bico.porting.port.time_training_step", lambda *_: None)


def passes_of(scene: Scene, method: str, alpha: float | str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    options: dict[str, Any] = {"n": SAMPLES, "batch_size": BATCH, "augment": 0, "evaluate": False, "path_steps": 2}
    models = {"to": scene.target, "base": scene.base, "data": scene.data}
    without_timed_steps(monkeypatch)
    with counted(monkeypatch) as counts:
        hf_bico.port(scene.tuned, **models, method=method, alpha=alpha, **options)
    return counts


@pytest.mark.parametrize("method", PASSES)
def test_port_runs_each_model_as_often_as_it_must(scene: Scene, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes_of(scene, method, 1.0, monkeypatch) == PASSES[method]


@pytest.mark.parametrize(("method", "steps"), [("naive", 1), ("bico", 1), ("bico-path", 2)])
def test_choosing_alpha_takes_one_pass_of_the_target_for_each_scale_and_no_gradient(
    scene: Scene, method: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = passes_of(scene, method, "auto", monkeypatch)
    chosen["target"] -= steps * len(SCALES) * BATCHES
    assert chosen == PASSES[method]
