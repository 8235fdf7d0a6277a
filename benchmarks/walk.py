"""What the default method costs: seconds of the walk with alpha by the samples, beside bico-path at alpha 1.

    python benchmarks/walk.py [--samples 100] [--ports 2] [--memory 8GB] [--small | --demo FOLDER]

ViT-B/16 to ViT-B/16-plus on a GPU (on a CPU, or with --small, a smaller pair), loaded from folders and not written.
All kinds of port are run in turn in one process after a warm-up of each; the medians are printed stage by stage with
their ratio. The models are random, so the samples would choose 0 for every step and skip the last forward passes: the
choice is replaced by 1/4, the passes are all made. With --demo it is the port of `hf-bico demo`; there they do choose.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))

KINDS: dict[str, dict[str, Any]] = {
    "bico@1": {"method": "bico", "alpha": 1.0},
    "bico-path@1": {"method": "bico-path", "alpha": 1.0},
    "bico-path": {"method": "bico-path"},
}


def one_port(source: Path, where: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Return the seconds by stage, and the bytes at the peak."""
    import time

    from timing import clean_up

    import hf_bico

    clean_up()
    start = time.perf_counter()
    ported = hf_bico.port(source, **where, evaluate=False)
    seconds = dict(ported.record.run.seconds)
    seconds["other"] = time.perf_counter() - start - sum(seconds.values())
    seconds.pop("time", None)  # which no port needs
    return seconds, ported.record.run.peak_memory


def random_models(place: Path, samples: int, small: bool) -> tuple[Path, dict[str, Any]]:
    """Return a fine-tuned source, and where it is ported to; the samples choose 1/4 at every step."""
    import torch
    from pairs import clip_pair
    from sizes import CPU, FULL

    from hf_bico.porting import transfer

    transfer.choose_scale = lambda tried, errors: 0.25
    sizes = FULL if torch.cuda.is_available() and not small else CPU
    pair = clip_pair(place, "plus", sizes.base, sizes.plus)
    return pair.tuned, {"to": pair.target, "base": pair.base, "data": pair.rows(samples), **pair.options}


def demo_models(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the demo's fine-tuned source, and where it is ported to; trained in the folder, if they are not there."""
    from hf_bico.experiments.demo.world import build

    world = build(folder, shapes=("narrow", "wide"), tasks=("inverted",))
    where = {"to": world.base("wide"), "base": world.base("narrow"), "data": world.data("inverted")}
    return world.fine_tuned("narrow", "inverted"), where


@click.command(help=__doc__)
@click.option("--samples", default=100, show_default=True)
@click.option("--ports", default=2, show_default=True, help="Ports of each kind after the warm-up.")
@click.option("--memory", help="The limit that each port keeps to.")
@click.option("--small", is_flag=True, help="A pair that a CPU ports in seconds.")
@click.option("--demo", type=click.Path(path_type=Path), help="The demo's models, in this folder.")
def main(samples: int, ports: int, memory: str | None, small: bool, demo: Path | None) -> None:
    import torch
    from transformers.utils import logging

    from hf_bico.utils.text import format_table

    logging.disable_progress_bar()
    with TemporaryDirectory() as place:
        source, where = random_models(Path(place), samples, small) if demo is None else demo_models(demo)
        where |= {"n": samples} | ({} if memory is None else {"memory": memory})
        found: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
        peaks: dict[str, int] = dict.fromkeys(KINDS, 0)
        for number in range(1 + ports):
            for name, how in KINDS.items():
                seconds, peak = one_port(source, where | how)
                click.echo(f"{name}: {sum(seconds.values()):.1f} s", err=True)
                if number:
                    found[name].append(seconds)
                    peaks[name] = max(peaks[name], peak)
    stages = list(dict.fromkeys(stage for runs in found.values() for run in runs for stage in run))
    lines = [["stage", *KINDS, "bico-path / bico-path@1"]]
    medians = {
        name: {stage: median(run.get(stage, 0.0) for run in runs) for stage in stages} for name, runs in found.items()
    }
    for stage in stages:
        lines.append([stage, *(f"{medians[name][stage]:.2f}" for name in KINDS), ""])
    whole = {name: median(sum(run.values()) for run in runs) for name, runs in found.items()}
    ratio = whole["bico-path"] / whole["bico-path@1"]
    lines.append(["in all", *(f"{whole[name]:.2f}" for name in KINDS), f"{ratio:.2f}"])
    lines.append(["peak, GB", *(f"{peaks[name] / 1e9:.2f}" for name in KINDS), ""])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    click.echo(f"{device}, {samples} samples, medians of {ports} ports, in seconds")
    click.echo(format_table(lines))


if __name__ == "__main__":
    main()
