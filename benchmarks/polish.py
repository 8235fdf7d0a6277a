"""What a polish costs beside the port, and beside training: seconds by stage, in one process.

    python benchmarks/polish.py [--samples 100] [--runs 1] [--small]

ViT-B/16 to ViT-B/16-plus on a GPU (on a CPU, or with --small, a smaller pair), loaded from folders and not written. The
port is the default one; the polish takes at most 20 steps: as it comes, with the search of the learning rate on samples
left out, and at a learning rate that is given. All are run in one process after a port as warm-up. The last line is 200
times the median of the training steps of the target that the ports themselves time, on one calibration batch. The
models are random, so the choice of alpha is replaced by 1/4, as in walk.py.
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
KINDS: dict[str, dict[str, Any]] = {
    "port": {},
    "port, polish of 20 steps": {"polish": True},
    "port, polish of 20 steps at a given rate": {"polish": True, "learning_rate": RATE},
}
CARRYING = ("calibrate", "align", "transport", "choose")
TRAINING = 200
"""Steps of training to compare with."""


def one_port(source: Path, where: dict[str, Any]) -> Any:
    """Return the record of one port."""
    from timing import clean_up

    import hf_bico

    clean_up()
    return hf_bico.port(source, **where, method="bico-path", evaluate=False).record.run


@click.command(help=__doc__)
@click.option("--samples", default=100, show_default=True)
@click.option("--runs", default=1, show_default=True, help="Runs of each kind after a warm-up.")
@click.option("--small", is_flag=True, help="A pair that a CPU ports in seconds.")
def main(samples: int, runs: int, small: bool) -> None:
    import torch
    from transformers.utils import logging

    from hf_bico.utils.text import format_table

    logging.disable_progress_bar()
    with TemporaryDirectory() as place:
        source, where = random_models(Path(place), samples, small)
        where |= {"n": samples}
        one_port(source, where)
        found: dict[str, list[Any]] = {name: [] for name in KINDS}
        for name, how in [*KINDS.items()] * runs:
            found[name].append(one_port(source, where | how))
            click.echo(f"{name}: {found[name][-1].seconds}", err=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    click.echo(f"{device}, {samples} samples, medians of {runs}, in seconds")
    lines, port = [["", "carrying", "polish", "in all", "/ port", "peak, GB"]], 0.0
    for name, some in found.items():
        carrying = median(sum(run.seconds.get(stage, 0.0) for stage in CARRYING) for run in some)
        polish = median(run.seconds.get("polish", 0.0) for run in some)
        port = port or carrying
        peak = max(run.peak_memory for run in some) / 1e9
        whole = carrying + polish
        lines.append([name, f"{carrying:.2f}", f"{polish:.2f}", f"{whole:.2f}", f"{whole / port:.1f}", f"{peak:.1f}"])
    steps = [run.training_step for some in found.values() for run in some if run.training_step is not None]
    if steps:
        step, batch = median(steps), found["port"][0].training_batch
        lines.append(
            [
                f"{TRAINING} training steps on {batch}",
                "",
                "",
                f"{TRAINING * step:.2f}",
                f"{TRAINING * step / port:.1f}",
                "",
            ]
        )
    click.echo(format_table(lines))


if __name__ == "__main__":
    main()
