"""What a command costs beside the import of torch: small models, so that nearly all of it is start-up.

    PYTHONPATH=tests python benchmarks/startup.py [--rounds 5] [--only extract,eval]

Each command runs in a process of its own, once unmeasured and then `--rounds` times, in turn with a bare
`python -c "import torch"`. The ratio is that of the medians. Seconds are of the processor (user and system), all
threads together, so that a busy machine changes little; the clock's are beside them. The models are those of the demo
(open_clip), and the same models as transformers' CLIPModel.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.transformers_world import as_transformers
from support.worlds import small_world

BARE = "import torch"


@dataclass
class Timed:
    """One command, with the ratio that it should stay below, and what its runs took."""

    name: str
    words: list[str]
    wanted: float | None = None
    processor: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)

    def run(self, measure: bool) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        before, started = _used(), time.perf_counter()
        done = subprocess.run([sys.executable, *self.words], env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{self.name}: exit code {done.returncode}\n{done.stderr}")
        if measure:
            self.clock.append(time.perf_counter() - started)
            self.processor.append(_used() - before)

    @property
    def seconds(self) -> float:
        return statistics.median(self.processor)


def _used() -> float:
    """Seconds of the processor that ended child processes have used."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def commands(folder: Path) -> list[Timed]:
    world = small_world(0)
    models, data = world.folder / "models", str(world.folder / "data" / "inverted")
    for name in ("narrow", "narrow-inverted", "wide"):
        as_transformers(models / name, folder / name)

    def port(models: Path, *options: str) -> list[str]:
        words = ["-m", "hf_bico", "port", str(models / "narrow-inverted"), "--base", str(models / "narrow")]
        return [
            *words,
            "--to",
            str(models / "wide"),
            "--data",
            data,
            "-o",
            str(folder / "ported"),
            "--overwrite",
            *options,
        ]

    paper = ("--method", "bico", "--alpha", "1")
    extract = ["-m", "hf_bico", "extract", str(models / "narrow-inverted"), "--base", str(models / "narrow")]
    adapter = str(folder / "adapter")
    apply = ["-m", "hf_bico", "apply", adapter, "--to", str(models / "narrow"), "-o", str(folder / "applied")]
    measure = ["-m", "hf_bico", "eval", str(models / "narrow-inverted"), "--data", data]
    return [
        Timed("port, open_clip, bico at alpha 1", port(models, *paper), 4),
        Timed("port, transformers, bico at alpha 1", port(folder, *paper), 3),
        Timed("port, open_clip, default", port(models)),
        Timed("port, transformers, default", port(folder)),
        Timed("extract, open_clip", [*extract, "-o", adapter, "--overwrite"], 1.5),
        Timed("apply, open_clip", [*apply, "--overwrite"], 1.5),
        Timed("eval, open_clip", measure, 2.5),
        Timed("eval, transformers", [*measure[:3], str(folder / "narrow-inverted"), *measure[4:]], 2.5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="parts of names, with commas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        timed = [
            one
            for one in commands(Path(folder))
            if not options.only or any(part in one.name for part in options.only.split(","))
        ]
        bare = Timed("import torch", ["-c", BARE])
        for number in range(options.rounds + 1):
            for one in (bare, *timed):
                one.run(measure=number > 0)
    print("| command | seconds of the processor | on the clock | ratio | wanted |\n|---|---:|---:|---:|---:|")
    for one in (bare, *timed):
        wanted = "" if one.wanted is None else f"{one.wanted:g}"
        clock = statistics.median(one.clock)
        print(f"| {one.name} | {one.seconds:.1f} | {clock:.1f} | {one.seconds / bare.seconds:.2f} | {wanted} |")


if __name__ == "__main__":
    main()
