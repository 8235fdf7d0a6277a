"""One port by hf_bico, timed: in this process, or in a fresh one with its imports and files.

    python benchmarks/timing.py ORDER.json

does the latter: the order names folders, samples and options, and what was measured is printed as JSON. Knows neither
the obvious implementation nor the floor.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import CARRYING

if TYPE_CHECKING:
    from pairs import Pair
    from torch import Tensor

PAPER = {"method": "bico", "alpha": 1.0}
"""What is timed unless a pair says otherwise: the paper's recipe."""
STAGES = ("start", "import", "device", "sample", "read", "load", *CARRYING, "form", "write", "other")


@dataclass
class Run:
    """Seconds by stage, `other` being what no stage has; bytes at the peak; samples a batch."""

    seconds: dict[str, float]
    peak: int
    batch_size: int | None
    sites: int
    written: int

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


class Changes:
    """What a port found for the weights of the target."""

    def __init__(self, ported: Any) -> None:
        self.vector = ported.task_vector

    def of(self, name: str) -> Tensor:
        from hf_bico.models.low_rank import dense

        return dense(self.vector[name])

    def difference(self, other: Changes) -> float:
        """The largest of all tensors: how far the other's change is from this one, beside its size."""
        pairs = ((self.of(name).double(), other.of(name).double()) for name in self.vector)
        return max(float((one - two).norm() / one.norm()) for one, two in pairs)


def timed_port(
    pair: Pair, rows: Sequence[Mapping[str, Any]], memory: str | None = None, *, save: bool = True
) -> tuple[Run, Changes]:
    """A port in this process; with `memory`, within a limit that the device enforces where it can."""
    order = {"base": pair.base, "tuned": pair.tuned, "target": pair.target, "options": dict(pair.options)}
    if memory is not None:
        order["options"]["memory"] = memory
    clean_up()
    with enforced(memory):
        return _port(order, rows, save)


def fresh_port(pair: Pair, rows: Sequence[Mapping[str, Any]], place: Path) -> Run:
    """The port of a pair that reads images in a process of its own, from the start of Python to the written files."""
    images = place / "images"
    images.mkdir()
    for number, row in enumerate(rows):
        row["image"].save(images / f"{number:05d}-{row['label']}.png")
    order = {name: str(getattr(pair, name)) for name in ("base", "tuned", "target")}
    order |= {"options": dict(pair.options), "images": str(images), "classes": pair.classes}
    (place / "order.json").write_text(json.dumps(order))
    start = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, str(place / "order.json")], capture_output=True, text=True)
    wall = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"the port in a fresh process failed:\n{done.stderr}")
    found = Run(**json.loads(done.stdout.splitlines()[-1]))
    found.seconds = {"start": wall - found.whole, **found.seconds}
    return found


@contextmanager
def enforced(memory: str | None) -> Iterator[None]:
    """No more than so much of the device's memory may be taken inside the `with`."""
    import torch

    from hf_bico.settings import read_size

    if memory is None or not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(read_size(memory, "memory") / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def clean_up() -> None:
    """Give back what earlier runs held, and count the peak from here."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _port(order: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], save: bool) -> tuple[Run, Changes]:
    import hf_bico

    start = time.perf_counter()
    ported = hf_bico.port(
        order["tuned"],
        to=order["target"],
        base=order["base"],
        data=rows,
        n=len(rows),
        evaluate=False,
        **{**PAPER, **order["options"]},
    )
    done = time.perf_counter()
    run = ported.record.run
    seconds = {stage: taken for stage, taken in run.seconds.items() if stage in STAGES}
    seconds["other"] = done - start - sum(seconds.values()) - run.seconds.get("time", 0.0)  # which no port needs
    size = 0
    if save:
        with tempfile.TemporaryDirectory(dir=Path(order["target"]).parent) as place:
            written = ported.save(Path(place) / "ported")
            seconds["write"] = time.perf_counter() - done
            size = sum(file.stat().st_size for file in written.iterdir() if file.is_file())
    return Run(seconds, run.peak_memory, run.batch_size, len(ported.record.sites), size), Changes(ported)


def _do(order: Mapping[str, Any]) -> Run:
    """An order, with the time of the imports and of the device's own start."""
    start = time.perf_counter()
    import transformers
    from PIL import Image

    import hf_bico

    assert hf_bico.port
    for name in order["classes"]:
        assert getattr(transformers, name)
    imported = time.perf_counter()
    import torch

    transformers.utils.logging.disable_progress_bar()
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    begun = time.perf_counter()
    files = sorted(Path(order["images"]).iterdir())
    rows = [{"image": Image.open(file), "label": int(file.stem.partition("-")[2])} for file in files]
    run, _ = _port(order, rows, save=True)
    run.seconds = {"import": imported - start, "device": begun - imported, **run.seconds}
    return run


if __name__ == "__main__":
    print(json.dumps(vars(_do(json.loads(Path(sys.argv[1]).read_text())))))
