"""Copying or aligning: ports between a base and its own continued pretraining, beside an unrelated twin.

    python benchmarks/relatives.py FOLDER [--worlds 3]

The target has the shape of the source's base. It is that base after 100 or 1,400 more steps of pretraining, on other
draws of images and with other captions, or a twin that was trained from scratch. `auto` is what `port` does by default:
it tries a copy (`naive`) and the walk on the samples and takes the better one. `prior k` is the walk with maps that are
drawn towards the identity, polar(C + k |C| I): k = 0 is the walk itself, and a large k is a copy.
"""

from __future__ import annotations

import json
import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch

import hf_bico
from hf_bico.alignment.methods.aligned import BicoPath
from hf_bico.alignment.methods.base import MethodInputs
from hf_bico.alignment.procrustes import polar
from hf_bico.alignment.statistics import key_of
from hf_bico.experiments.demo import training, world
from hf_bico.models.layout import SitePair
from hf_bico.utils.text import format_table

TASKS = ("inverted", "rotated-90")
STEPS = {"100 more steps": 100, "1,400 more steps": 1400}
PRIORS = (0.03, 0.1, 0.3, 1.0)
SAMPLES = 100
VARIANTS: dict[str, dict[str, Any]] = {
    "naive@1": {"method": "naive", "alpha": 1.0},
    "naive": {"method": "naive"},
    "bico@1": {"method": "bico", "alpha": 1.0},
    "bico-path": {"method": "bico-path"},
    **{f"prior {k:g}": {"method": f"prior-{k:g}"} for k in PRIORS},
    "auto": {},
}


def with_prior(k: float) -> type[BicoPath]:
    """Return the walk with maps drawn towards the identity."""

    class Prior(BicoPath):
        def prepare(self, pairs: Sequence[SitePair], inputs: MethodInputs) -> None:
            sums = {(kind, key_of(kind, p)): inputs.statistics.of(kind, p) for p in pairs for kind in self.kinds}
            drawn = [one.total + k * one.total.norm() * torch.eye(*one.shape).to(one.total) for one in sums.values()]
            norms = torch.stack([one.norms for one in sums.values()]).tolist()
            maps = dict(zip(sums, polar(drawn, norms, self.settings.completion), strict=True))
            self.maps = {
                pair.target.name: tuple(maps[kind, key_of(kind, pair)] for kind in (self.input_kind, self.output_kind))
                for pair in pairs
            }

    return Prior


def continued(base: Path, folder: Path, steps: int, seed: int) -> Path:
    """Train a base for more steps, with images and captions of its own."""
    if folder.is_dir():
        return folder
    from open_clip import CLIP
    from safetensors.torch import load_file

    config = json.loads((base / world.CONFIG_FILE).read_text())["model_cfg"]
    tokenizer, own = world.build_tokenizer(), 7000 + seed
    usual = training.PRETRAINING_STEPS
    with world.atomic_folder(folder) as draft, training.quiet_torch(own):
        model = CLIP(**config)
        model.load_state_dict(load_file(base / world.WEIGHTS_FILE))
        wording = world.Wording.draw(random.Random(own), training.WORDING_SIZE)
        training.PRETRAINING_STEPS = steps
        try:
            images = world.load_splits()["train"]
            training.pretrain_on_captions(model, tokenizer, images, wording, lambda done, total: None)
        finally:
            training.PRETRAINING_STEPS = usual
        world._save(draft, model, tokenizer, config)
    return folder


def measured(made: world.World, target: Path, task: str, how: dict[str, Any]) -> tuple[float, hf_bico.Ported]:
    """Return the gain in points of what a user gets, and the port."""
    where = {"to": target, "base": made.base("narrow"), "data": made.data(task), "n": SAMPLES, "device": "cpu"}
    ported = hf_bico.port(made.fine_tuned("narrow", task), **where, **how)
    if ported.held_back:
        return 0.0, ported
    values = {entry.model: entry.value for entry in ported.record.evaluation}
    return 100 * (values["ported"] - values["target"]), ported


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--worlds", default=3, show_default=True, help="Pretrainings of the base.")
@click.option("--first", default=10, show_default=True, help="Number of the first of them.")
def main(folder: Path, worlds: int, first: int) -> None:
    torch.set_num_threads(1)
    for k in PRIORS:
        hf_bico.register_method(f"prior-{k:g}", with_prior(k), uses_labels=False, options=("completion", "path_steps"))
    gains: dict[tuple[str, str], list[float]] = {}
    distances: dict[str, list[float]] = {}
    taken: dict[str, list[str]] = {}
    for seed in range(first, first + worlds):
        place = folder / "worlds" / f"seed-{seed}"
        made = world.build(place, seed=seed, shapes=("narrow", "twin"), tasks=TASKS)
        targets = {
            name: continued(made.base("narrow"), folder / f"{seed}-{steps}", steps, seed)
            for name, steps in STEPS.items()
        }
        targets["a twin, unrelated"] = made.base("twin")
        for name, target in targets.items():
            for task in TASKS:
                for variant, how in VARIANTS.items():
                    gain, ported = measured(made, target, task, how)
                    gains.setdefault((name, variant), []).append(gain)
                taken.setdefault(name, []).append("held back" if ported.held_back else ported.record.method.name)
                apart = [site.distance for site in ported.record.sites if site.distance is not None]
                distances.setdefault(name, []).append(fmean(apart))
                click.echo(f"world {seed}, {name}, {task}", err=True)
    lines = [["target", "distance", *VARIANTS, "auto took"]]
    for name in distances:
        shown = [f"{fmean(gains[name, variant]):+.1f}" for variant in VARIANTS]
        lines.append([name, f"{fmean(distances[name]):.2f}", *shown, ", ".join(sorted(set(taken[name])))])
    click.echo(format_table(lines))


if __name__ == "__main__":
    main()
