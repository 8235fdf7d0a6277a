"""What a port costs, beside the obvious implementation and the least that this device could take, in one run.

    python benchmarks/speed.py [--only vit-plus,growth] [--json FILE] [--picture] [--readme]

Real sizes on a GPU, a quarter of the widths on a CPU, tiny ones with `--small`. Models have random weights: the numbers
say what a port costs, not how good it is. `--from FILE` measures nothing, and shows what was measured before. What the
tables mean is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obvious
import torch
from figures import Figures, Limited, Port, carrying
from floor import Rates, Work, measure_rates, tower_of, work_of
from growth import draw, timed_growth
from pairs import CLASSES, LORA_RANK, Pair, clip_pair, qwen_pair, t5_pair, tensor_bytes
from sizes import CPU, FULL, SMALL, Sizes
from speed_tables import (
    A_SHAPE,
    IN_FULL,
    growth_table,
    limits_table,
    ports_table,
    rates_table,
    sections,
    write_readme,
)
from timing import Run, clean_up, fresh_port, timed_port

from hf_bico.runtime.environment import exact_float32

HERE = Path(__file__).parent
ATTENTION = "q_proj,k_proj,v_proj,o_proj"


@dataclass
class Session:
    """One run: on what, how large, and what was measured so far."""

    device: torch.device
    sizes: Sizes
    options: argparse.Namespace
    place: Path
    figures: Figures
    plain: dict[tuple[str, int], obvious.Timed] = field(default_factory=dict)
    """What the obvious implementation took, by pair and samples: one that is scaled up is not run again."""

    @property
    def rates(self) -> Rates:
        """Measured once."""
        if not self.figures.rates:
            clean_up()
            self.figures.rates = measure_rates(self.device, self.place, self.sizes.square).as_dict()
            say(rates_table(self.figures.rates))
        return Rates(**self.figures.rates)

    def samples(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        return self.options.samples or usual

    def measured(
        self,
        pair: Pair,
        rows: Sequence[Mapping[str, Any]],
        run: tuple[Run, Any],
        *,
        full: bool,
        stored: int | None = None,
        fresh: Run | None = None,
        limit: str | None = None,
    ) -> Port:
        """A port of ours beside the obvious implementation, over at most `stored` samples, and the floor."""
        ours, changes = run
        held = rows if stored is None else rows[:stored]
        times = len(rows) / len(held)
        key = (pair.title, len(held))
        if key not in self.plain:
            clean_up()
            self.plain[key] = obvious.run(pair, held, self.device, changes.of, full)
        plain = self.plain[key]
        seconds = dict(plain.seconds)
        seconds["calibrate"] *= times
        how = IN_FULL if full else A_SHAPE
        if times > 1:
            how = (
                f"{len(held)} samples passed, times {times:g}, as the activations of all do not fit; of the sites one "
                "of each shape timed, times their number"
            )
        precision = pair.options.get("dtype", "float32")
        work = self._work(pair, len(rows), ours)
        port = Port(
            pair=pair.title,
            samples=len(rows),
            sites=ours.sites,
            ours=ours.seconds,
            obvious=seconds,
            floor=work.seconds(self.rates, precision),
            how=how,
            difference=None if times > 1 else max(plain.differences),
            stored_bytes=plain.stored_bytes,
            peak=ours.peak,
            batch_size=ours.batch_size,
            weights=run_weights(pair),
            preparing=preparing(pair, rows) if pair.kind == "clip" else None,
            fresh=None if fresh is None else fresh.seconds,
            limit=limit,
        )
        self.figures.ports.append(port)
        say(ports_table([port]))
        return port

    def _work(self, pair: Pair, samples: int, ours: Run) -> Work:
        length = pair.options.get("max_length", 0)
        # the word of a class with its end, all as long as the longest
        answer = max(map(len, CLASSES)) + 1
        configs = [json.loads((folder / "config.json").read_text()) for folder in (pair.base, pair.target)]
        towers = [tower_of(config, length, answer) for config in configs]
        sample_bytes = 2 * 8 * length
        if pair.kind == "clip":
            sample_bytes = sum(4 * 3 * config["vision_config"]["image_size"] ** 2 for config in configs)
        lora = pair.kind == "qwen"
        return work_of(
            *towers,
            samples,
            weights=tensor_bytes(pair.base) + tensor_bytes(pair.target),
            written=ours.written,
            sample_bytes=sample_bytes,
            rank=LORA_RANK if lora else None,
            modules=tuple(self.options.modules.split(",")) if lora else None,
        )


def vit_plus(session: Session) -> None:
    """ViT-B/16 to ViT-B/16-plus: the whole command in a fresh process, a warm port, and one within a limit."""
    sizes, (samples, *_) = session.sizes, session.samples((session.sizes.plus_samples,))
    pair = clip_pair(session.place / "plus", "ViT-B/16 to ViT-B/16-plus", sizes.base, sizes.plus)
    rows = pair.rows(samples)
    fresh = fresh_port(pair, rows, session.place)
    timed_port(pair, rows, save=False)  # the device's libraries are loaded by the first port
    run = timed_port(pair, rows)
    session.measured(pair, rows, run, full=True, fresh=fresh)
    limit = session.options.memory or sizes.memory
    if limit is not None:
        found, changes = timed_port(pair, rows, limit)
        enforced = session.device.type == "cuda"
        difference = run[1].difference(changes)
        how = (pair.title, samples, limit, enforced, found.peak, found.seconds, found.batch_size, difference)
        session.figures.limited.append(Limited(*how))
        say(limits_table(session.figures.limited[-1:]))


def vit_large(session: Session) -> None:
    """ViT-B/16 to ViT-L/14 by several numbers of samples."""
    sizes = session.sizes
    pair = clip_pair(session.place / "large", "ViT-B/16 to ViT-L/14", sizes.base, sizes.large)
    numbers = session.samples(sizes.large_samples)
    rows = pair.rows(max(numbers))
    timed_port(pair, rows[: min(numbers)], save=False)  # the device's libraries are loaded by the first port
    for samples in numbers:
        some = rows[:samples]
        session.measured(pair, some, timed_port(pair, some), full=False, stored=sizes.stored_samples)


def t5(session: Session) -> None:
    """T5-3B's encoder to T5-Large's, by classes that a decoder of one block names."""
    sizes = session.sizes.t5
    shapes = (sizes.source, sizes.target, sizes.length, sizes.vocabulary)
    pair = t5_pair(session.place / "t5", "T5-3B to T5-Large, encoders", *shapes)
    (samples, *_) = session.samples((sizes.samples,))
    rows = pair.rows(samples)
    session.measured(pair, rows, timed_port(pair, rows), full=False)


def qwen(session: Session) -> None:
    """Qwen2.5-1.5B to 3B with a LoRA, in bfloat16, within a limit of memory."""
    sizes, modules = session.sizes.qwen, session.options.modules.split(",")
    shapes = (sizes.source, sizes.target, sizes.length, modules, sizes.vocabulary)
    pair = qwen_pair(session.place / "qwen", "Qwen2.5-1.5B to 3B, LoRA", *shapes)
    (samples, *_) = session.samples((sizes.samples,))
    rows = pair.rows(samples)
    limit = sizes.memory
    run = timed_port(pair, rows, limit)
    session.measured(pair, rows, run, full=False, limit=limit)


def growth(session: Session) -> None:
    """Samples, width and depth grow one at a time."""
    for line in timed_growth(session.sizes.growth, session.place / "growth"):
        session.figures.growth.append(line)
        say(growth_table([line]))


def polar(session: Session) -> None:
    """The polar factor beside torch.linalg.svd, on covariances of real passes."""
    from polar import SMALL as FEWER
    from polar import Sizes as Maps
    from polar import measured

    session.figures.polar = measured(Maps() if session.sizes is FULL else FEWER, session.device)


PARTS: dict[str, Callable[[Session], None]] = {
    **{"polar": polar, "vit-plus": vit_plus, "qwen": qwen},
    **{"growth": growth, "vit-large": vit_large, "t5": t5},
}


def preparing(pair: Pair, rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of both models' image processors over the samples."""
    from transformers import CLIPImageProcessor

    processors = [CLIPImageProcessor.from_pretrained(folder) for folder in (pair.base, pair.target)]
    start = time.perf_counter()
    for processor in processors:
        processor(images=[row["image"] for row in rows], return_tensors="pt")
    return time.perf_counter() - start


def run_weights(pair: Pair) -> int:
    """Bytes of both models as they ran: a T5 is kept in bfloat16 and runs in float32."""
    return (tensor_bytes(pair.base) + tensor_bytes(pair.target)) * (2 if pair.kind == "t5" else 1)


def asked(figures: Figures) -> str:
    """What a run on a GPU must show, and what it showed."""
    lines = []
    for port in figures.ports:
        named, ours = f"{port.pair}, N = {port.samples}", carrying(port.ours)
        if port.fresh is not None:
            room = port.weights + 4e9
            lines += [
                f"{named}: {ours / carrying(port.floor):.2f} times the floor (asked: 3)",
                f"{named}: {carrying(port.obvious) / ours:.1f} times faster than the obvious (asked: 10)",
                f"{named}: peak {port.peak / 1e9:.2f} GB (asked: weights in float32 + 4 GB = {room / 1e9:.2f})",
            ]
        if port.limit is not None:
            whole = sum(port.ours.values())
            lines.append(f"{named}: {whole:.1f} s in all (asked: 90), peak {port.peak / 1e9:.2f} GB of {port.limit}")
    lines += [
        f"{one.pair} within {one.limit}: peak {one.peak / 1e9:.2f} GB, change differs by {one.difference:.1e}"
        for one in figures.limited
    ]
    lines += [
        f"exponent in {line.what}: {line.exponent():.2f}{'' if line.what == 'width' else ' (asked: 1)'}"
        for line in figures.growth
    ]
    return "\n".join(lines)


def say(*texts: str) -> None:
    print("\n\n".join(text for text in texts if text), end="\n\n", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--samples", type=lambda text: tuple(map(int, text.split(","))), help="such as 10,100")
    parser.add_argument("--memory", help="the limit of the limited ViT-B/16 port, such as 8GB")
    parser.add_argument("--modules", default=ATTENTION, help="the layers of the LoRA")
    parser.add_argument("--json", nargs="?", type=Path, const=HERE / "speed.json", help="write the figures")
    parser.add_argument("--from", dest="source", type=Path, help="figures that were written before")
    parser.add_argument("--picture", nargs="?", type=Path, const=HERE / "growth.png", help="draw the growth")
    parser.add_argument("--readme", nargs="?", type=Path, const=HERE / "README.md", help="write the tables into it")
    options = parser.parse_args()
    options.parts = options.only.split(",")
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    return options


def _command(options: argparse.Namespace) -> str:
    """What measures the same again."""
    words = ["python benchmarks/speed.py"]
    words += [] if options.parts == list(PARTS) else [f"--only {options.only}"]
    words += ["--small"] if options.small else []
    words += [f"--samples {','.join(map(str, options.samples))}"] if options.samples else []
    words += [f"--memory {options.memory}"] if options.memory else []
    words += [f"--modules {options.modules}"] if options.modules != ATTENTION else []
    return " ".join(words)


def _measured(options: argparse.Namespace) -> Figures:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    sizes = SMALL if options.small else FULL if device.type == "cuda" else CPU
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    figures = Figures(_command(options), sizes.name, name, versions)
    say(f"{name}, {sizes.name}, " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for part in (part for part in PARTS if part in options.parts):
        start = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as place, exact_float32():
                PARTS[part](Session(device, sizes, options, Path(place), figures))
        except Exception:  # an hour of a rented machine is not lost by one part; the command fails in the end
            figures.failed.append(part)
            traceback.print_exc()
        clean_up()
        say(f"({part}: {time.perf_counter() - start:.0f} s)")
        if options.json:
            figures.write(options.json)
    return figures


def main() -> None:
    options = _options()
    figures = _measured(options) if options.source is None else Figures.read(options.source)
    for title, text in sections(figures):
        say(f"### {title}", text)
    say(asked(figures))
    if options.picture is not None and figures.growth:
        draw(figures.growth, options.picture, figures.device)
    if figures.failed:
        raise SystemExit(f"failed: {', '.join(figures.failed)}")
    if options.readme is not None:  # of the file, whose numbers are rounded
        write_readme(Figures.read(options.json) if options.json else figures, options.readme)


if __name__ == "__main__":
    main()
