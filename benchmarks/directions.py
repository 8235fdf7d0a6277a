"""Up and down: ports from narrow to wide models and back, by every aligning method, and what makes the difference.

    python benchmarks/directions.py FOLDER [--part decoders] [--worlds 3] [--workers 2]

Llamas and GPT-2s with a LoRA and with a full fine-tune, in two ratios of widths, and CLIPs of the small world. A gain
is the fall of the held-out loss as a share of what fine-tuning did for the source's own base; of CLIPs, the rise of the
held-out accuracy in points. Beside the methods stand what may be the cause: the last block's output maps from outputs,
and maps whose null space is completed. Every port is kept in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.alignment.methods.aligned import Aligner, Bico, Theseus
from hf_bico.alignment.methods.base import Carrier, MethodInputs, SiteDelta, TransportedSite
from hf_bico.models.layout import SitePair
from hf_bico.settings import METHODS, register_method
from hf_bico.utils.text import format_table

FIRST_HELD_OUT = 30
SIZES = (10, 100)
DECODERS = {
    f"{kind} {narrow[0]} x {narrow[1]}, {wide[0]} x {wide[1]}": (kind, narrow, wide)
    for kind in ("Llama", "GPT-2")
    for narrow, wide in (((48, 2), (64, 3)), ((32, 2), (96, 3)))
}
"""Kind, width and blocks of both models."""
CLIPS = {"32 x 2, 48 x 2": ("narrow", "wide"), "32 x 2, 48 x 4": ("narrow", "deep")}
TASKS = ("inverted", "rotated-90", "inverted-rotated-180")
UP, DOWN = "up", "down"
METHOD_NAMES = {"decoders": ("theseus", "bico", "bico-last"), "clips": ("theseus", "bico", "bico-path")}


@dataclass(frozen=True)
class DirectedPort:
    """One port: its gain, the scales that were chosen, and how much of its maps and of the change was seen."""

    part: str
    pair: str
    direction: str
    world: int
    task: str
    n: int
    variant: str
    gain: float
    held_back: bool
    alphas: list[float]
    took: str
    rank_out: float
    unseen: float


class LastByOutputs(Carrier):
    """The contrary of bico-last: R_out from outputs in the last block, and from gradients before it."""

    by_site = True
    kinds = Bico.kinds | Theseus.kinds

    def prepare(self, pairs: Sequence[SitePair], inputs: MethodInputs) -> None:
        self.last = inputs.target.layout.blocks - 1
        self.parts: tuple[Aligner, Aligner] = Bico(self.settings), Theseus(self.settings)
        for part in self.parts:
            part.prepare(pairs, inputs)

    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite:
        return self.parts[pair.target.block in (self.last, None)].carry(pair, delta)


def variants(part: str, n: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in METHOD_NAMES[part]:
        found[f"{name}@1"] = {"method": name, "alpha": 1.0}
        found[name] = {"method": name}
    found["auto"] = {}
    if n == max(SIZES):
        found["last block by outputs"] = {"method": "last-by-outputs"}
        found["completed"] = {"method": "bico", "completion": "svd"}
        if part == "clips":
            found["bico-last"] = {"method": "bico-last"}
    return found


def decoder_ports(folder: Path, pair: str, world: int, style: str) -> Iterator[DirectedPort]:
    from support import language_world as decoders

    place = folder / f"decoders-{_slug(pair)}-{world}-{style}"
    kind, narrow, wide = DECODERS[pair]
    up = decoders.DecoderWorld.below(place, style)
    down = decoders.DecoderWorld(up.target, up.source, place / "adapter-down", style)
    if not (place / "full-down").is_dir():
        make = decoders.gpt2 if kind == "GPT-2" else decoders.llama
        decoders.build_decoders(place, world, style, {"source": narrow, "target": wide}, make)
        with decoders.quiet_torch(world):
            decoders._tune(down)
        for one, name in ((up, "full-up"), (down, "full-down")):
            tune_fully(one, place / name, world)
    for direction, made in ((UP, up), (DOWN, down)):
        for form, source in (("LoRA", made.adapter), ("full", place / f"full-{direction}")):
            gain = LossGain.of(made, source)
            for n in SIZES:
                where = {"to": made.target, "base": made.source, "data": made.calibration(n), "n": n, "evaluate": False}
                for name, how in variants("decoders", n).items():
                    known = ("decoders", pair, direction, world, f"{style}, {form}", n, name)
                    yield measured(source, where, how, gain, known)


@dataclass(frozen=True)
class LossGain:
    """The fall of the target's held-out loss, as a share of what fine-tuning did for the source's own base."""

    world: Any
    before: float
    own: float

    @classmethod
    def of(cls, world: Any, source: Path) -> LossGain:
        own = world.loss(world.load("source")) - world.loss(tuned(world, source))
        return cls(world, world.loss(world.load("target")), own)

    def __call__(self, model: Any) -> float:
        return (self.before - self.world.loss(model)) / self.own


def tune_fully(world: Any, place: Path, seed: int) -> None:
    from hf_bico.experiments.demo.training import quiet_torch
    from support import language_world as decoders

    with quiet_torch(seed):
        model = world.load("source")
        text = decoders._in_style(decoders._part("source"), world.style)
        steps, batch, rate = decoders.TUNING_STEPS, decoders.TUNING_BATCH, decoders.TUNING_RATE
        decoders._train(model, model.parameters(), text, steps, batch, lambda _: rate)
    model.save_pretrained(place)


def tuned(world: Any, source: Path) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    if (source / "adapter_config.json").is_file():
        return peft.PeftModel.from_pretrained(world.load("source"), source)
    return AutoModelForCausalLM.from_pretrained(source)


def measured(source: Any, where: dict[str, Any], how: dict[str, Any], gain_of: Any, known: Any) -> DirectedPort:
    from hf_bico.porting.port import port

    ported = port(source, **where, **how)
    record = ported.record
    alphas = [record.method.alpha] if isinstance(record.method.alpha, float) else list(record.method.alpha)
    ranks = [site.rank_out / min(site.shape_source[0], site.shape_target[0]) for site in record.sites if site.rank_out]
    unseen = [site.unseen for site in record.sites if site.unseen is not None]
    gain = 0.0 if ported.held_back else gain_of(ported.model()) if gain_of else clip_gain(record)
    return DirectedPort(
        *known,
        gain,
        ported.held_back,
        alphas,
        record.method.name,
        fmean(ranks) if ranks else 0.0,
        fmean(unseen) if unseen else 0.0,
    )


def clip_gain(record: Any) -> float:
    values = {entry.model: entry.value for entry in record.evaluation}
    return 100 * (values["ported"] - values["target"])


def clip_ports(folder: Path, pair: str, world: int, task: str) -> Iterator[DirectedPort]:
    from hf_bico.experiments.demo.world import build

    made = build(folder / "clips" / f"seed-{world}", seed=world, shapes=(), tasks=())
    for direction, (source, target) in ((UP, CLIPS[pair]), (DOWN, CLIPS[pair][::-1])):
        where = {"to": made.base(target), "base": made.base(source), "data": made.data(task), "device": "cpu"}
        for n in SIZES:
            for name, how in variants("clips", n).items():
                known = ("clips", pair, direction, world, task, n, name)
                yield measured(made.fine_tuned(source, task), {**where, "n": n}, how, None, known)


def train_clips(folder: Path, world: int) -> None:
    from hf_bico.experiments.demo.world import build

    shapes = dict.fromkeys(shape for pair in CLIPS.values() for shape in pair)
    build(folder / "clips" / f"seed-{world}", seed=world, shapes=tuple(shapes), tasks=TASKS)


def job(folder: Path, part: str, pair: str, world: int, task: str) -> list[DirectedPort]:
    """Measure one pair of models, unless it is kept."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if "last-by-outputs" not in METHODS:
        register_method("last-by-outputs", LastByOutputs, options=("completion",))
    kept = folder / "ports" / f"{part}-{_slug(pair)}-{world}-{task}.json"
    if not kept.is_file():
        ports = (decoder_ports if part == "decoders" else clip_ports)(folder, pair, world, task)
        found = [asdict(one) for one in ports]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found), encoding="utf-8")
    return [DirectedPort(**one) for one in json.loads(kept.read_text(encoding="utf-8"))]


def _slug(pair: str) -> str:
    return pair.replace(" ", "").replace(",", "-")


def table(ports: list[DirectedPort]) -> str:
    """One line for each pair, kind of source, direction and number of samples, with a column for each method.

    A cell has the mean gain, in % of the fine-tune's own or in points, and the mean alpha.
    """
    groups: dict[tuple[str, ...], dict[str, list[DirectedPort]]] = {}
    for one in ports:
        kind = one.task.rpartition(", ")[2] if one.part == "decoders" else "full"
        line = groups.setdefault((one.part, one.pair, kind, one.direction, str(one.n)), {})
        line.setdefault(one.variant, []).append(one)
    tables = []
    for part in dict.fromkeys(key[0] for key in groups):
        some = {key: line for key, line in groups.items() if key[0] == part}
        names = list(dict.fromkeys(name for line in some.values() for name in line))
        lines = [["pair", "source", "way", "samples", "ports", *names, "auto took"]]
        for key, line in sorted(some.items()):
            took = Counter(one.took for one in line["auto"])
            counts = ", ".join(f"{name} {count}" for name, count in took.items())
            cells = [_cell(line.get(name, []), 100 if part == "decoders" else 1) for name in names]
            lines.append([*key[1:], str(len(line["auto"])), *cells, counts])
        tables.append(format_table(lines))
    return "\n\n".join(tables)


def _cell(ports: list[DirectedPort], times: int) -> str:
    if not ports:
        return ""
    alphas = [alpha for one in ports for alpha in one.alphas]
    return f"{times * fmean(one.gain for one in ports):+.1f} ({fmean(alphas):.2f})"


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--part", type=click.Choice(["decoders", "clips"]), multiple=True, default=["decoders", "clips"])
@click.option("--worlds", default=3, show_default=True, help="Pretrainings of each pair.")
@click.option("--workers", default=2, show_default=True, help="Processes, one thread each.")
def main(folder: Path, part: tuple[str, ...], worlds: int, workers: int) -> None:
    from support.language_world import PLAIN, STYLES

    numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + worlds)
    styles = [style for style in STYLES if style != PLAIN]
    jobs = [("decoders", pair, world, style) for pair in DECODERS for world in numbers for style in styles]
    jobs += [("clips", pair, world, task) for pair in CLIPS for world in numbers for task in TASKS]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        trained = [pool.submit(train_clips, folder, world) for world in numbers if "clips" in part]
        early = {one: pool.submit(job, folder, *one) for one in jobs if one[0] == "decoders" and one[0] in part}
        for one in trained:
            one.result()
        late = {one: pool.submit(job, folder, *one) for one in jobs if one[0] == "clips" and one[0] in part}
        found = [port for one in (*early.values(), *late.values()) for port in one.result()]
    click.echo(table(found))


if __name__ == "__main__":
    main()
