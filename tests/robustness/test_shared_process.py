"""What a process shares is as it was after every job, and threads may port at the same time."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import evaluate
import matplotlib.backends.backend_agg
import matplotlib.figure
import open_clip
import peft
import pytest
import sklearn.linear_model
import sklearn.pipeline
import sklearn.preprocessing
import torch
from transformers import CLIPModel

import hf_bico
from hf_bico.data.loading import readable
from hf_bico.errors import OutputError, SampleCountError
from hf_bico.models.families.open_clip import _silenced_logging
from hf_bico.models.families.pretrained import bounded
from hf_bico.porting.result import Ported
from hf_bico.runtime.output import atomic_folder
from support.paper import PAPER
from support.process_state import differences, module_state, process_state
from support.scenes import Scene, make_scene

LIBRARIES = (evaluate, matplotlib, open_clip, peft, sklearn)
"""Imported before anything is looked at: libraries set filters and loggers of their own when they are imported."""
Job = Callable[[Scene, Path], object]
WAIT = 0.3
"""Seconds that a thread waits for another one, which may not come."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    folder = tmp_path_factory.mktemp("shared")
    return {name: make_scene(folder / name, (name, name)) for name in ("open_clip", "transformers")}


def port(scene: Scene, **options: Any) -> Ported:
    given: dict[str, Any] = {"base": scene.base, "data": scene.data, "n": 24, "device": "cpu", **PAPER, **options}
    return hf_bico.port(given.pop("source", scene.tuned), given.pop("to", scene.target), **given)


def assert_same(one: Ported, other: Ported) -> None:
    assert one.task_vector == other.task_vector
    assert one.record.evaluation == other.record.evaluation


# --- after a job


JOBS: dict[str, Job] = {
    "plan": lambda scene, out: hf_bico.plan(scene.tuned, scene.target, base=scene.base, data=scene.data),
    "port": lambda scene, out: port(scene).save(out / "port"),
    "port in bfloat16": lambda scene, out: port(scene, dtype="bfloat16"),
    "port in float64, as the samples choose": lambda scene, out: port(
        scene, dtype="float64", method="bico", alpha="auto", augment=0, evaluate=False
    ),
    "port by training": lambda scene, out: port(scene, method="fewshot", train_steps=2, evaluation="probe"),
    "rerun": lambda scene, out: hf_bico.rerun(port(scene, evaluate=False).save(out / "port"), device="cpu"),
    "the model of a port": lambda scene, out: port(scene, evaluate=False).model(),
    "evaluate": lambda scene, out: hf_bico.evaluate_model(scene.tuned, scene.data, device="cpu"),
    "evaluate by a probe": lambda scene, out: hf_bico.evaluate_model(scene.tuned, scene.data, probe=9, device="cpu"),
    "compare": lambda scene, out: hf_bico.compare(
        scene.tuned,
        scene.target,
        base=scene.base,
        data=scene.data,
        n=8,
        seeds=1,
        methods=["bico"],
        folder=out / "cells",
    ),
    "diagnose": lambda scene, out: hf_bico.diagnose(
        scene.tuned, scene.target, base=scene.base, data=scene.data, n=8
    ).save(out / "diagnosed"),
    "extract and apply": lambda scene, out: hf_bico.apply(
        hf_bico.extract(scene.tuned, scene.base, rank=2).save(out / "lora"), scene.base
    ).save(out / "applied"),
}


@pytest.mark.parametrize("name", JOBS)
def test_everything_is_as_it_was(
    name: str, scenes: dict[str, Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For open_clip, which draws weights at random, and says so on the root logger."""
    monkeypatch.chdir(scenes["open_clip"].folder)  # records name folders, not paths
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest has put some there
    before = process_state()
    JOBS[name](scenes["open_clip"], tmp_path)
    assert differences(before, process_state()) == []


@pytest.mark.parametrize("stage", ["sample", "load", "calibrate", "form", "evaluate", None])
def test_everything_is_as_it_was_after_a_failure(stage: str | None, scenes: dict[str, Scene]) -> None:
    """The callers' modules too, whichever stage fails."""
    scene = scenes["transformers"]
    modules = {part: CLIPModel.from_pretrained(getattr(scene, part)) for part in ("base", "target")}
    modules["base"].train()
    modules["target"].logit_scale.requires_grad_(False)
    given = {"base": modules["base"], "to": modules["target"]}
    before, whole = process_state(), {name: module_state(module) for name, module in modules.items()}

    def fail(reached: str, *_: object) -> None:
        if reached == stage:
            raise ZeroDivisionError(stage)

    if stage is None:
        with pytest.raises(SampleCountError):
            port(scene, n=10_000, **given)
    else:
        with pytest.raises(ZeroDivisionError, match=stage):
            port(scene, progress=fail, **given)
    assert differences(before, process_state()) == []
    assert {name: module_state(module) for name, module in modules.items()} == whole


def test_no_model_is_kept_alive(scenes: dict[str, Scene]) -> None:
    modules = {part: CLIPModel.from_pretrained(getattr(scenes["transformers"], part)) for part in ("base", "target")}
    kept = [weakref.ref(module) for module in modules.values()]
    port(scenes["transformers"], base=modules["base"], to=modules["target"])
    del modules
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


# --- whatever the caller has set


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def products_in_bfloat16() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "no memory by default": lambda: torch.device("meta"),
    "products in bfloat16": products_in_bfloat16,
}


@pytest.fixture(scope="module")
def usual(scenes: dict[str, Scene]) -> dict[str, Ported]:
    return {library: port(scene) for library, scene in scenes.items()}


@pytest.mark.parametrize(
    ("library", "context"),
    [
        *(("open_clip", name) for name in CONTEXTS),
        ("transformers", "float16 by default"),
        ("transformers", "no memory by default"),
    ],
)
def test_a_port_is_the_same_whatever_the_caller_has_set(
    library: str, context: str, scenes: dict[str, Scene], usual: dict[str, Ported]
) -> None:
    with CONTEXTS[context]():
        before = process_state()
        found = port(scenes[library])
        assert differences(before, process_state()) == []
    assert_same(found, usual[library])


def test_products_are_exact_during_a_job() -> None:
    from hf_bico.runtime.environment import exact_float32

    backends: Any = torch.backends
    parts = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.cuda.matmul, backends.cudnn.conv)
    with products_in_bfloat16(), exact_float32():
        assert [part.fp32_precision for part in parts] == ["ieee"] * 4


def test_a_port_inside_of_a_running_loop(scenes: dict[str, Scene], usual: dict[str, Ported]) -> None:
    async def main() -> Ported:
        return port(scenes["open_clip"])

    assert_same(asyncio.run(main()), usual["open_clip"])


# --- two threads


def overlapping(first: Callable[..., Ported], second: Callable[..., Ported]) -> tuple[Ported, Ported]:
    """Run both in threads of their own: the second begins when the first has read, and ends after it if it can."""
    inside, beside, done = Event(), Event(), Event()

    def of_first(stage: str, *_: object) -> None:
        inside.set()
        if stage == "load":
            beside.wait(WAIT)

    def of_second(stage: str, *_: object) -> None:
        beside.set()
        if stage == "record":
            done.wait(10)

    def run_first() -> Ported:
        try:
            return first(progress=of_first)
        finally:
            inside.set()
            done.set()

    def run_second() -> Ported:
        inside.wait(60)
        return second(progress=of_second)

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(run) for run in (run_first, run_second)]
        return results[0].result(), results[1].result()


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_two_threads_port_between_folders(library: str, scenes: dict[str, Scene], tmp_path: Path) -> None:
    other = make_scene(tmp_path, (library, library))
    alone = [port(scenes[library], seed=1), port(other, seed=2, dtype="bfloat16")]
    before = process_state()
    together = overlapping(
        lambda **how: port(scenes[library], seed=1, **how), lambda **how: port(other, seed=2, dtype="bfloat16", **how)
    )
    assert differences(before, process_state()) == []
    for one, two in zip(alone, together, strict=True):
        assert_same(one, two)


def test_two_threads_port_between_the_same_loaded_models(scenes: dict[str, Scene]) -> None:
    scene = scenes["transformers"]
    tuned, base, target = (CLIPModel.from_pretrained(place) for place in (scene.tuned, scene.base, scene.target))
    given: dict[str, Any] = {"source": tuned, "base": base, "to": target}
    alone = [port(scene, seed=seed, **given) for seed in (1, 2)]
    before, modules = process_state(), [module_state(module) for module in (tuned, base, target)]
    together = overlapping(
        lambda **how: port(scene, seed=1, **given, **how), lambda **how: port(scene, seed=2, **given, **how)
    )
    assert differences(before, process_state()) == []
    assert [module_state(module) for module in (tuned, base, target)] == modules
    for one, two in zip(alone, together, strict=True):
        assert_same(one, two)


def test_a_loaded_model_is_read_when_no_port_is_changing_it(scenes: dict[str, Scene]) -> None:
    scene = scenes["transformers"]
    target = CLIPModel.from_pretrained(scene.target)
    true = target.visual_projection.weight.detach().clone()
    changed, read = Event(), Event()

    def objective(model: Any, batch: Any) -> torch.Tensor:
        if model is target and not torch.equal(model.visual_projection.weight, true) and not changed.is_set():
            changed.set()
            read.wait(WAIT)
        return model.get_image_features(batch.pixels).pooler_output.square().sum()

    def difference() -> hf_bico.TaskVector:
        assert changed.wait(60)
        try:
            return hf_bico.TaskVector.from_models(scene.target, base=target)
        finally:
            read.set()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(difference)
        port(scene, to=target, objective=objective, evaluate=False)
        assert list(found.result()) == [], "the target differs from its own folder in nothing"


def test_two_threads_do_not_write_one_folder(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as scratch, ThreadPoolExecutor(1) as pool:
        (scratch / "file").touch()
        second = pool.submit(hf_bico.TaskVector({"w": torch.ones(2)}).save, tmp_path / "out")
        with pytest.raises(OutputError, match="another run is writing into"):
            second.result()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]


@pytest.mark.parametrize(
    "part",
    [lambda: readable("data"), _silenced_logging, lambda: bounded({})],
    ids=["the log of datasets", "the root logger", "torch's initialisation"],
)
def test_threads_may_silence_a_library_at_the_same_time(part: Callable[[], AbstractContextManager[None]]) -> None:
    """The first to come is the first to leave: each would put back what it found."""
    before = process_state()
    inside, beside = Event(), Event()

    def first() -> None:
        with part():
            inside.set()
            beside.wait(WAIT)

    def second() -> None:
        inside.wait(60)
        with part():
            beside.set()
            leaving.result()

    with ThreadPoolExecutor(2) as pool:
        leaving = pool.submit(first)
        pool.submit(second).result()
    assert differences(before, process_state()) == []


def test_models_that_other_threads_build_do_not_count() -> None:
    with bounded({}), ThreadPoolExecutor(1) as pool:
        pool.submit(torch.nn.Linear, 2**13, 2**13, device="meta").result()


def test_permissions_of_files_need_no_other_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usual").touch()
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("files of other threads would be made with it"))
    file = hf_bico.TaskVector({"w": torch.ones(2)}).save(tmp_path / "vector")
    assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode
