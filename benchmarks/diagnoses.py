"""The paper's figures 1, 2, A and B on the small world: diagnoses averaged over tasks and pretrainings, as pictures.

    python benchmarks/diagnoses.py FOLDER [--worlds 3] [--docs docs/small-world]

FOLDER may be one that benchmarks/small_world.py was run on: its models are used, and others trained. The deep model of
one pretraining is the source, and that of the next one the target; for figure B also the narrow model of the next.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import click

from hf_bico.experiments.demo import training
from hf_bico.experiments.demo.world import build, fine_tune
from hf_bico.experiments.diagnose.diagnosis import Diagnosis
from hf_bico.experiments.diagnose.pictures import drift_picture, initial_picture, outputs_picture, similarity_picture
from hf_bico.experiments.diagnose.run import diagnose

TASKS = ("inverted", "rotated-90", "inverted-rotated-180", "rotated-270")
STEPS = (5, 10, 20, 30, 45)
"""Of the fine-tuning, which has 60, where it is looked at."""
METHODS = ("input-only", "theseus", "bico", "bico-path")


def checkpoints(folder: Path, base: Path, task: str, seed: int) -> list[Path]:
    """The model after so many steps of its fine-tuning, which begins with the same samples however long it is."""
    found = []
    for steps in STEPS:
        place = folder / f"{base.parent.parent.name}-{task}-step-{steps}"
        if not place.exists():
            with patch.object(training, "FINE_TUNING_STEPS", steps):
                fine_tune(place, base, task, seed=seed)
        found.append(place)
    return found


def pair(folder: Path, world: int, task: str) -> tuple[Diagnosis, Diagnosis]:
    """From a deep model to the next world's, and to its narrow one."""
    ours, theirs = (
        build(folder / "worlds" / f"seed-{seed}", seed=seed, shapes=("deep", "narrow"), tasks=TASKS)
        for seed in (world, world + 1)
    )
    source = {"base": ours.base("deep"), "data": ours.data(task), "device": "cpu"}
    tuned = ours.fine_tuned("deep", task)
    wide = diagnose(
        tuned,
        to=theirs.base("deep"),
        fine_tuned=theirs.fine_tuned("deep", task),
        methods=METHODS,
        checkpoints=checkpoints(folder / "checkpoints", ours.base("deep"), task, world),
        **source,
    )
    return wide, diagnose(tuned, to=theirs.base("narrow"), **source)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--worlds", default=3, show_default=True, help="Pairs of pretrainings.")
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation's pictures.")
def main(folder: Path, worlds: int, docs: Path | None) -> None:
    found = [pair(folder, world, task) for world in range(worlds) for task in TASKS]
    same, other = (Diagnosis.averaged([one[number] for one in found]) for number in (0, 1))
    same = _by_steps(same)
    click.echo(f"{same.table()}\n\n{other.table()}")
    if docs is None:
        return
    docs.mkdir(parents=True, exist_ok=True)
    pictures = {
        "diagnosis-similarity": similarity_picture(same),
        "diagnosis-outputs": outputs_picture(same),
        "diagnosis-drift": drift_picture(same),
        "diagnosis-initial": initial_picture([same, other]),
    }
    for name, picture in pictures.items():
        assert picture is not None
        (docs / f"{name}.png").write_bytes(picture)
    (docs / "diagnosis.txt").write_text(f"{same.table()}\n\n{other.table()}\n", encoding="utf-8")


def _by_steps(found: Diagnosis) -> Diagnosis:
    """With checkpoints that are called after their steps."""
    steps = [f"step-{number}" for number in (*STEPS, 60)]
    names = dict(zip(found.checkpoints, steps, strict=True))
    drift = [replace(one, checkpoint=names[one.checkpoint]) for one in found.drift]
    return replace(found, checkpoints=steps, drift=drift)


if __name__ == "__main__":
    main()
