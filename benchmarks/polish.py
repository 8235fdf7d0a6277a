"""What a polish costs beside the port, and beside training: seconds by stage, in one process.

    python benchmarks/polish.py [--samples 100] [--runs 2] [--small]

ViT-B/16 to ViT-B/16-plus on a GPU (on a CPU, or with --small, a smaller pair), loaded from folders and not written. The
port is the default one, and with at most 20 steps of polish: as it comes, with the search of the learning rate on
samples left out, and at a learning rate that is given. `train` takes at most 200 steps on the same samples at a given
rate, and again on two folds, which choose how many. All are run in turn after a warm-up of each; the medians are
printed, with their ratio to the port. The models are random, so the choice of alpha is replaced by 1/4, as in walk.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))

from walk import one_port, random_models

RATE = 1e-5
KINDS: dict[str, dict[str, Any]] = {
    "port": {"method": "bico-path"},
    "port, polish of 20 steps": {"method": "bico-path", "polish": True},
    "port, polish at a given rate": {"method": "bico-path", "polish": True, "learning_rate": RATE},
    "train, 200 steps at a given rate": {"method": "train", "train_steps": 200, "learning_rate": RATE},
}
WORK = ("calibrate", "align", "transport", "choose", "polish", "train")


@click.command(help=__doc__)
@click.option("--samples", default=100, show_default=True)
@click.option("--runs", default=2, show_default=True, help="Runs of each kind after the warm-up.")
@click.option("--small", is_flag=True, help="A pair that a CPU ports in seconds.")
def main(samples: int, runs: int, small: bool) -> None:
    import torch
    from transformers.utils import logging

    from hf_bico.utils.text import format_table

    logging.disable_progress_bar()
    with TemporaryDirectory() as place:
        source, where = random_models(Path(place), samples, small)
        where |= {"n": samples}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
        peaks: dict[str, int] = dict.fromkeys(KINDS, 0)
        for number in range(1 + runs):
            for name, how in KINDS.items():
                seconds, peak = one_port(source, where | how)
                click.echo(f"{name}: {sum(seconds.values()):.1f} s", err=True)
                if number:
                    found[name].append(seconds)
                    peaks[name] = max(peaks[name], peak)
    work = {name: median(sum(run.get(stage, 0.0) for stage in WORK) for run in some) for name, some in found.items()}
    lines = [["", "carrying", "polish", "training", "in all", "/ port", "peak, GB"]]
    for name, some in found.items():
        parts = {stage: median(run.get(stage, 0.0) for run in some) for stage in WORK}
        carrying = sum(parts[stage] for stage in WORK[:4])
        stages = (carrying, parts["polish"], parts["train"], work[name])
        ratio = f"{work[name] / work['port']:.1f}"
        lines.append([name, *(f"{value:.2f}" for value in stages), ratio, f"{peaks[name] / 1e9:.2f}"])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    click.echo(f"{device}, {samples} samples, medians of {runs} runs, in seconds")
    click.echo(format_table(lines))


if __name__ == "__main__":
    main()
