"""Counts ports of tiny trained language models that help and that hurt, at alpha 1 and as `port` runs them.

    python benchmarks/language_ports.py FOLDER [--part classifiers] [--worlds 5] [--workers 2]

Decoders with gentle and hard LoRAs, T5s with a fine-tuned encoder, and BERTs with a classification head, on models that
nothing was chosen on. A gain is the fall of the held-out loss as a share of what fine-tuning did for the source's own
base; of classifiers, the rise of the held-out accuracy in points. A port is harmful if the loss rises by more than 1%
of that, or the accuracy falls by more than 1 point. Every port is kept in FOLDER, and read from there the next time.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.utils.text import format_table

FIRST_HELD_OUT = 10
SIZES = (10, 20, 50, 100)
VARIANTS: dict[str, dict[str, Any]] = {"bico@1": {"method": "bico", "alpha": 1.0}, "bico": {"method": "bico"}}
CLASSIFIER_VARIANTS = {**VARIANTS, "bico-path": {"method": "bico-path"}}
PARTS = ("decoders", "sequences", "classifiers")
HARD_STEPS, HARD_RATE = 400, 1e-3
"""A LoRA that is trained far beyond what its task needs."""


@dataclass(frozen=True)
class LanguagePort:
    """One port: its gain if it is written, and the gain that the samples promised, in the same unit."""

    world: int
    kind: str
    style: str
    n: int
    variant: str
    gain: float
    held_back: bool
    outlook: float
    alphas: list[float]

    @property
    def written_gain(self) -> float:
        return 0.0 if self.held_back else self.gain


def decoder_ports(folder: Path, world: int, style: str, hard: bool) -> Iterator[LanguagePort]:
    """Port a LoRA between two decoders; losses are of a character, as shares of the LoRA's own gain."""
    from support import language_world as decoders

    place = folder / f"decoders-{world}-{style}"
    made = decoders.DecoderWorld.below(place, style)
    if not (place / "adapter").is_dir():
        decoders.build_decoders(place, world, style)
    adapter = made.adapter
    if hard:
        adapter = place / "hard"
        if not adapter.is_dir():
            _tune_hard(made, adapter, world)
    tuned = _with_adapter(made, adapter)
    own_gain = made.loss(made.load("source")) - made.loss(tuned)
    before = made.loss(made.load("target"))
    kind = "decoder, hard LoRA" if hard else "decoder, gentle LoRA"
    for n in SIZES:
        where = {"to": made.target, "base": made.source, "data": made.calibration(n), "n": n, "evaluate": False}
        for name, how in VARIANTS.items():
            gain, held_back, outlook, alphas = _port(adapter, where, how, lambda model: before - made.loss(model))
            yield LanguagePort(world, kind, style, n, name, gain / own_gain, held_back, outlook / own_gain, alphas)


def _port(
    source: Any, where: dict[str, Any], how: dict[str, Any], gain_of: Any
) -> tuple[float, bool, float, list[float]]:
    """Return the gain as if it were written, whether it is held back, the outlook and the alphas."""
    from hf_bico.porting.port import port

    ported = port(source, **where, **how)
    method = ported.record.method
    alphas = [method.alpha] if isinstance(method.alpha, float) else method.alpha
    promised = method.veto.mean if method.veto is not None else ported.record.outlook.value
    if not ported.held_back:
        return gain_of(ported.model()), False, promised, alphas
    if not any(alphas):
        return 0.0, True, promised, alphas
    written = port(source, **where, **{**how, "alpha": alphas[0]})
    return gain_of(written.model()), True, promised, alphas


def _tune_hard(world: Any, place: Path, seed: int) -> None:
    import peft

    from hf_bico.experiments.demo.training import quiet_torch
    from support import language_world as decoders

    with quiet_torch(seed):
        rank, modules = decoders.TUNING_RANK, decoders.TARGET_MODULES
        settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=modules)
        adapted = peft.get_peft_model(world.load("source"), settings)
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        text = decoders.in_style(decoders.pages_of("source"), world.style)
        decoders.train(
            adapted, trained, decoders._ids([text])[0], HARD_STEPS, decoders.TUNING_BATCH, lambda _: HARD_RATE
        )
    adapted.save_pretrained(place)


def _with_adapter(world: Any, adapter: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(world.load("source"), adapter)


def sequence_ports(folder: Path, world: int) -> Iterator[LanguagePort]:
    """Port a fine-tuned encoder between two T5s; losses are of an answer's token."""
    from support.sequence_world import SequenceWorld, build_sequences

    place = folder / f"sequences-{world}"
    made = SequenceWorld.below(place) if (place / "pairs").is_dir() else build_sequences(place, world)
    for n in SIZES:
        where = {"to": made.target, "base": made.source, "data": made.data, "n": n, "evaluation": "zero-shot"}
        yield from _measured(made.tuned, where, VARIANTS, world, "T5, encoder", n)


def classifier_ports(folder: Path, world: int) -> Iterator[LanguagePort]:
    """Port a classifier between two BERTs; gains are in points of accuracy."""
    from support import language_gallery

    place = folder / f"encoders-{world}"
    made = language_gallery.Repos.below(place)
    if not (place / "data").is_dir():
        language_gallery.build_encoders(place, world)
    for n in SIZES:
        where = {"to": made.target, "base": made.base, "data": made.data, "n": n}
        yield from _measured(made.source, where, CLASSIFIER_VARIANTS, world, "BERT, classifier", n)


def _measured(
    source: Any, where: dict[str, Any], variants: dict[str, Any], world: int, kind: str, n: int
) -> Iterator[LanguagePort]:
    """Measure ports by the product's own held-out evaluation; one that is held back is measured at its alphas."""
    from hf_bico.porting.port import port

    for name, how in variants.items():
        ported = port(source, **where, **how)
        record, method = ported.record, ported.record.method
        alphas = [method.alpha] if isinstance(method.alpha, float) else list(method.alpha)
        promised = method.veto.mean if method.veto is not None else record.outlook.value
        gain = 0.0 if ported.held_back else gain_of_record(record)
        if ported.held_back and any(alphas) and len(alphas) == 1:
            gain = gain_of_record(port(source, **where, **{**how, "alpha": alphas[0]}).record)
        yield LanguagePort(world, kind, "", n, name, gain, ported.held_back, promised, alphas)


def gain_of_record(record: Any) -> float:
    """Return the gain that a record measured: points of accuracy, or a share of what fine-tuning gave the base."""
    by_model = {entry.model: entry for entry in record.evaluation}
    target, ported = by_model["target"].value, by_model["ported"].value
    if by_model["target"].metric == "accuracy":
        return 100 * (ported - target)
    return (target - ported) / max(1e-9, by_model["base"].value - by_model["source"].value)


def job(folder: Path, part: str, world: int, style: str, hard: bool) -> list[LanguagePort]:
    """Measure one pair of models, unless it is kept."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    kept = folder / "ports" / f"{part}-{world}-{style}-{hard}.json"
    if not kept.is_file():
        makers = {
            "decoders": lambda: decoder_ports(folder, world, style, hard),
            "sequences": lambda: sequence_ports(folder, world),
            "classifiers": lambda: classifier_ports(folder, world),
        }
        found = [asdict(one) for one in makers[part]()]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found), encoding="utf-8")
    return [LanguagePort(**one) for one in json.loads(kept.read_text(encoding="utf-8"))]


def table(ports: list[LanguagePort]) -> str:
    """One line for each kind of source, number of samples and method."""
    lines = [["source", "samples", "method", "ports", "gain", "harmful", "worst", "held back"]]
    groups: dict[tuple[str, int, str], list[LanguagePort]] = {}
    for one in ports:
        groups.setdefault((one.kind, one.n, one.variant), []).append(one)
    for (kind, n, variant), some in sorted(groups.items()):
        points = kind.startswith("BERT")
        gains = [one.written_gain if points else 100 * one.written_gain for one in some]
        unit = "" if points else "%"
        harmful = sum(gain < -1 for gain in gains)
        held_back = sum(one.held_back for one in some)
        shown = [f"{fmean(gains):+.1f}{unit}", str(harmful), f"{min(gains):+.1f}{unit}", str(held_back)]
        lines.append([kind, str(n), variant, str(len(some)), *shown])
    return format_table(lines)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--part", type=click.Choice(PARTS), multiple=True, default=PARTS, help="What to measure; all if left out."
)
@click.option("--worlds", default=5, show_default=True, help="Pretrainings of each pair.")
@click.option("--workers", default=2, show_default=True, help="Processes, one thread each.")
def main(folder: Path, part: tuple[str, ...], worlds: int, workers: int) -> None:
    from support.language_world import PLAIN, STYLES

    numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + worlds)
    styles = [style for style in STYLES if style != PLAIN]
    jobs = [(one, world, "", False) for world in numbers for one in part if one != "decoders"]
    if "decoders" in part:
        jobs += [("decoders", world, style, False) for world in numbers for style in styles]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        found = [one for done in [pool.submit(job, folder, *one) for one in jobs] for one in done.result()]
        hard = [("decoders", world, style, True) for _, world, style, _ in jobs if style]
        found += [one for done in [pool.submit(job, folder, *one) for one in hard] for one in done.result()]
    click.echo(table(found))


if __name__ == "__main__":
    main()
