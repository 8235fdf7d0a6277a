"""What a polish costs beside the port, and beside training: seconds by stage, in one process.

    python benchmarks/polish.py [--samples 100] [--runs 1] [--only NAME] [--small]

ViT-B/16 to ViT-B/16-plus on a GPU (on a CPU, or with --small, a smaller pair), loaded from folders and not written. The
port is the default one; the polish takes at most 20 steps, `train` at most 200 on the samples' labels: each as it
comes, with the search of the learning rate on samples left out, and at a learning rate that is given. All are run in
one process after a port as warm-up. The last line is 200 times the median of the training steps of the target that the
ports themselves time, on one calibration batch. The models are random, so the choice of alpha is replaced by 1/4, as in
walk.py; "steps" are those that the samples left out chose.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))

from walk import random_models

RATE = 1e-5
TRAINING = 200
"""Steps of training to compare with."""
TRAIN = {"method": "train", "train_steps": TRAINING}
KINDS: dict[str, dict[str, Any]] = {
    "port": {},
    "port, polish of 20 steps": {"polish": True},
    "port, polish of 20 steps at a given rate": {"polish": True, "learning_rate": RATE},
    f"train, {TRAINING} steps": TRAIN,
    f"train, {TRAINING} steps at a given rate": TRAIN | {"learning_rate": RATE},
}
CARRYING = ("calibrate", "align", "transport", "choose")
TAUGHT = ("readout", "polish", "train")


def one_port(source: Path, where: dict[str, Any]) -> Any:
    """Return the record of one port."""
    from timing import clean_up

    import hf_bico

    clean_up()
    return hf_bico.port(source, **{"method": "bico-path"} | where, evaluate=False).record


def steps_of(record: Any) -> str:
    """Return the steps that were taken, if any were offered."""
    taken = record.method.polish or record.method.training
    return "" if taken is None else str(taken.steps)


@click.command(help=__doc__)
@click.option("--samples", default=100, show_default=True)
@click.option("--runs", default=1, show_default=True, help="Runs of each kind after a warm-up.")
@click.option("--only", "chosen", multiple=True, type=click.Choice(list(KINDS)), help="Beside the port, this alone.")
@click.option("--small", is_flag=True, help="A pair that a CPU ports in seconds.")
def main(samples: int, runs: int, chosen: tuple[str, ...], small: bool) -> None:
    import torch
    from transformers.utils import logging

    from hf_bico.utils.text import format_table

    logging.disable_progress_bar()
    with TemporaryDirectory() as place:
        source, where = random_models(Path(place), samples, small)
        where |= {"n": samples}
        click.echo(f"warm-up: {one_port(source, where).run.seconds}", err=True)
        kinds = {name: how for name, how in KINDS.items() if not chosen or name in ("port", *chosen)}
        found: dict[str, list[Any]] = {name: [] for name in kinds}
        for name, how in [*kinds.items()] * runs:
            found[name].append(one_port(source, where | how))
            click.echo(f"{name}: {found[name][-1].run.seconds}", err=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    click.echo(f"{device}, {samples} samples, medians of {runs}, in seconds")
    lines, port = [["", "carrying", "training", "in all", "/ port", "steps", "peak, GB"]], 0.0
    for name, records in found.items():
        carrying, training = (
            median(sum(record.run.seconds.get(stage, 0.0) for stage in stages) for record in records)
            for stages in (CARRYING, TAUGHT)
        )
        whole = carrying + training
        port = port or whole
        peak = max(record.run.peak_memory for record in records) / 1e9
        cells = [f"{carrying:.2f}", f"{training:.2f}", f"{whole:.2f}", f"{whole / port:.1f}"]
        lines.append([name, *cells, steps_of(records[-1]), f"{peak:.1f}"])
    timed = [record.run for records in found.values() for record in records if record.run.training_step is not None]
    if timed:
        whole, batch = TRAINING * median(run.training_step for run in timed), timed[0].training_batch
        name = f"{TRAINING} training steps on {batch} samples, as timed"
        lines.append([name, "", f"{whole:.2f}", f"{whole:.2f}", f"{whole / port:.1f}", str(TRAINING), ""])
    click.echo(format_table(lines))


if __name__ == "__main__":
    main()
