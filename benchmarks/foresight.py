"""How well a port's outlook, foretold from its calibration pass, ranks ports on the small world.

    python benchmarks/foresight.py FOLDER [--worlds 5] [--draws 3] [--workers 2] [--docs docs/small-world]

FOLDER may be one that benchmarks/small_world.py was run on: its models are used, and others trained. Every pair of
models, task (one of them near its ceiling), number of samples and draw is ported twice: as it is, and with the two
models' samples mispaired. The outlook was chosen on the first three worlds: the others are held out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_bico.utils.text import format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAIRS = (("narrow", "wide"), ("narrow", "deep"), ("narrow", "twin"), ("wide", "narrow"))
TASKS = ("inverted", "rotated-90", "inverted-rotated-180", "rotated-270", "plain")
SIZES = (10, 20, 50, 100)
CHOSEN_ON = 3
"""The worlds that the outlook, and where it begins to be doubtful, were chosen on."""
NAME = "foresight"


@dataclass(frozen=True)
class Ported:
    """One port: what was foretold, and what it gained, in points."""

    world: int
    source: str
    target: str
    task: str
    n: int
    draw: int
    mispaired: bool
    outlook: float
    helps: bool
    first_order: float
    headroom: float
    unseen: float
    score_in: float
    score_out: float
    gain: float

    @property
    def harmful(self) -> bool:
        return self.gain < 0


SIGNALS: dict[str, Callable[[Ported], float]] = {
    "outlook": lambda one: one.outlook,
    "fall of the loss, first order": lambda one: -one.first_order,
    "headroom": lambda one: one.headroom,
    "score out": lambda one: one.score_out,
    "score in": lambda one: one.score_in,
    "seen energy": lambda one: -one.unseen,
}


def ports(folder: Path, world: int, pair: tuple[str, str], task: str, draws: int) -> list[Ported]:
    """All ports of one pair of models on one task; kept in the folder, and read from there the next time."""
    source, target = pair
    kept = folder / NAME / f"{world}-{source}-{target}-{task}-{draws}.json"
    if not kept.is_file():
        found = [asdict(one) for one in _ports(folder, world, source, target, task, draws)]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found), encoding="utf-8")
    return [Ported(**_rounded(one)) for one in json.loads(kept.read_text(encoding="utf-8"))]


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    """As they are written: a correlation of ranks sees ties."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}


def _ports(folder: Path, world: int, source: str, target: str, task: str, draws: int) -> Iterator[Ported]:
    import torch

    from hf_bico.experiments.demo.world import build
    from hf_bico.hub.client import Hub
    from hf_bico.porting.calibration import Calibration
    from hf_bico.porting.evaluate import HeldOutEvaluation
    from hf_bico.porting.planner import plan
    from hf_bico.porting.prepare import prepare
    from hf_bico.porting.transfer import UNTOUCHED, transfer
    from hf_bico.runtime.environment import Stopwatch
    from hf_bico.settings import Settings

    made = build(folder / "worlds" / f"seed-{world}", seed=world, shapes=(), tasks=())
    models = (made.fine_tuned(source, task), made.base(target))
    planned = plan(*models, base=made.base(source), data=made.data(task), hub=Hub())
    before: float | None = None
    for n in SIZES:
        for draw in range(draws):
            settings = Settings(n=n, seed=draw, device="cpu")
            ready = prepare(planned, settings, Hub(), Stopwatch(), torch.device("cpu"))
            assert ready.drawn is not None
            assert ready.held_out is not None
            evaluator = HeldOutEvaluation(task, *ready.held_out, ready.drawn.samples, "zero-shot", 256)
            for mispaired in (False, True):
                how = (ready.models, ready.drawn, ready.heads, Stopwatch(), ready.settings)
                calibration = Calibration(*how, mispaired=mispaired, keeps=False, forecasts=True)
                if before is None:
                    before = evaluator.measure_target("target", calibration, UNTOUCHED.changes)[0].value
                result = transfer(ready.method, calibration)
                seen = result.forecast
                assert seen is not None
                after = evaluator.measure_target("ported", calibration, result.changes)[0].value
                scores = [
                    sum(site.energy * (getattr(site, name) or 0.0) for site in result.report.sites)
                    for name in ("score_in", "score_out")
                ]
                yield Ported(
                    *(world, source, target, task, n, draw, mispaired),
                    *(seen.outlook, seen.helps, seen.first_order, seen.headroom or 0.0),
                    *(seen.unseen or 0.0, scores[0], scores[1], 100 * (after - before)),
                )


def train(folder: Path, world: int, shape: str) -> None:
    from hf_bico.experiments.demo.world import build

    build(folder / "worlds" / f"seed-{world}", seed=world, shapes=(shape,) if shape else (), tasks=TASKS)


def rho(found: Sequence[Ported], signal: Callable[[Ported], float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr([signal(one) for one in found], [one.gain for one in found]).statistic)


def groups(found: Sequence[Ported]) -> dict[str, list[Ported]]:
    """What is told apart."""
    parts = {
        "all": list(found),
        f"worlds 0 to {CHOSEN_ON - 1}, chosen on": [one for one in found if one.world < CHOSEN_ON],
        "other worlds, held out": [one for one in found if one.world >= CHOSEN_ON],
        "as they are": [one for one in found if not one.mispaired],
        "mispaired": [one for one in found if one.mispaired],
        "as they are, near the ceiling": [one for one in found if not one.mispaired and one.task == "plain"],
    }
    parts |= {f"as they are, N = {n}": [one for one in found if not one.mispaired and one.n == n] for n in SIZES}
    return {name: some for name, some in parts.items() if some}


def flags(found: Sequence[Ported]) -> list[list[str]]:
    """How many harmful ports are called doubtful, and how many others are."""
    lines = [["ports", "number", "rho", "harmful", "of them flagged", "helpful", "of them flagged"]]
    for name, some in groups(found).items():
        harmful, helpful = [one for one in some if one.gain < 0], [one for one in some if one.gain > 0]
        flagged = [str(sum(not one.helps for one in part)) for part in (harmful, helpful)]
        correlation = f"{rho(some, SIGNALS['outlook']):.2f}"
        lines.append([name, str(len(some)), correlation, str(len(harmful)), flagged[0], str(len(helpful)), flagged[1]])
    return lines


def signals(found: Sequence[Ported]) -> list[list[str]]:
    """Spearman's rho of what is known after calibration, one by one."""
    shown = {"all": found, "as they are": [one for one in found if not one.mispaired]}
    lines = [["Spearman's rho with the gain", *shown]]
    return lines + [[name, *(f"{rho(some, of):.2f}" for some in shown.values())] for name, of in SIGNALS.items()]


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--worlds", default=5, show_default=True, help="Pretrainings of every model.")
@click.option("--draws", default=3, show_default=True, help="Draws of the calibration samples.")
@click.option("--workers", default=2, show_default=True, help="Processes, one thread each.")
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation's tables and pictures.")
def main(folder: Path, worlds: int, draws: int, workers: int, docs: Path | None) -> None:
    shapes = sorted({shape for pair in PAIRS for shape in pair})
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for made in [pool.submit(train, folder, world, "") for world in range(worlds)]:
            made.result()
        for made in [pool.submit(train, folder, world, shape) for world in range(worlds) for shape in shapes]:
            made.result()
        asked = [(world, pair, task) for world in range(worlds) for pair in PAIRS for task in TASKS]
        jobs = [pool.submit(ports, folder, *one, draws) for one in asked]
        found = [one for job in jobs for one in job.result()]
    tables = flags(found), signals(found)
    for table in tables:
        click.echo(f"{format_table(table)}\n")
    if docs is not None:
        write(found, tables, docs)


def write(found: Sequence[Ported], tables: Sequence[list[list[str]]], docs: Path) -> None:
    docs.mkdir(parents=True, exist_ok=True)
    with (docs / f"{NAME}.csv").open("w", encoding="utf-8", newline="") as stream:
        rows = csv.DictWriter(stream, list(asdict(found[0])))
        rows.writeheader()
        rows.writerows(asdict(one) for one in found)
    parts = []
    for head, *rest in tables:
        lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rest]
        parts.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    (docs / f"{NAME}.md").write_text("\n".join(parts), encoding="utf-8")
    (docs / f"{NAME}.png").write_bytes(picture(found))


def picture(found: Sequence[Ported]) -> bytes:
    """The gain of every port against its outlook."""
    from hf_bico.reports.pictures import png

    return png(lambda: draw(found))


def draw(found: Sequence[Ported]) -> Figure:
    from matplotlib.figure import Figure

    from hf_bico.porting.transfer import DOUBTFUL
    from hf_bico.reports.pictures import BLUE, GRID, INK, ORANGE, RED, frame

    kinds = {
        "samples mispaired": ([one for one in found if one.mispaired], ORANGE, "x"),
        "as they are": ([one for one in found if not one.mispaired and one.task != "plain"], BLUE, "o"),
        "near the ceiling": ([one for one in found if not one.mispaired and one.task == "plain"], RED, "^"),
    }
    figure = Figure(figsize=(7, 3.9))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    frame(axes)
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.axvspan(-1, DOUBTFUL, color=GRID, alpha=0.6, linewidth=0)
    for name, (some, colour, marker) in kinds.items():
        where = [one.outlook for one in some], [one.gain for one in some]
        axes.plot(*where, marker, color=colour, markersize=3.2, alpha=0.55, label=name, markeredgewidth=0.7)
    axes.set_xlim(min(one.outlook for one in found) - 0.02, 1)
    axes.set_xlabel("outlook, from calibration alone (grey: called doubtful)")
    axes.set_ylabel("gain, points of accuracy")
    axes.legend(loc="upper left", fontsize=8.5)
    return figure


if __name__ == "__main__":
    main()
