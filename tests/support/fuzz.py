"""Feeds a reader spoilt copies of kept inputs, for as long as one likes: it may return or raise a BicoError, no more.

    python -m support.fuzz READER --minutes 10 [--seed N]
    python -m support.fuzz READER --repeat FILE

What ends otherwise, takes more than 10 seconds or gigabytes of memory is a finding: its input is kept in
`tests/support/corpus/READER`, where the test suite reads it again from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import support.loopback  # noqa: F401  before the libraries read their environment
from support import ROOT
from support.bounds import within
from support.fuzz_readers import CORPUS, READERS, Scenes, corpus, kind_of
from support.mutations import spoilt

SECONDS = 10
START_SECONDS = 600
"""Until the first input: models are made for it."""
MEMORY = 4 * 2**30
"""Bytes of address space that reading may take beside what is taken already."""
POOL = 400
"""So many inputs are spoilt further: the kept ones, and those that ended in a new way."""


@dataclass(frozen=True)
class Ending:
    """How reading ended: the class of the error and where it was raised, or that there was none."""

    name: str
    place: str = ""
    bad: bool = False
    told: str = ""


def ending_of(scenes: Scenes, kind: str, content: bytes, place: Path) -> Ending:
    """Read an input, and say how that ended."""
    from hf_bico.errors import BicoError, UnforeseenError

    scenes.good(kind)  # is made without a limit
    try:
        with within(SECONDS):
            scenes.read(kind, content, place)
    except BicoError as error:
        crooked = not error.cause.strip() or not error.remedy.strip() or "\n" in error.cause + error.remedy
        bad = isinstance(error, UnforeseenError) or crooked
        told = "".join(traceback.format_exception(error)) if bad else ""
        return Ending(type(error).__name__, _place(error), bad, told)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return Ending(type(error).__name__, _place(error), True, "".join(traceback.format_exception(error)))
    return Ending("returned")


def _place(error: BaseException) -> str:
    """The innermost line of the tool itself, or of a test, on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT / "hf_bico")]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


@dataclass
class Report:
    """What a run of a fuzzer gave."""

    executions: int
    seconds: float
    endings: Counter[tuple[str, str]]
    findings: list[str]

    def text(self) -> str:
        rate = self.executions / max(self.seconds, 1e-9)
        counted = [f"{count:8,}  {' '.join(key)}" for key, count in self.endings.most_common()]
        head = f"{self.executions:,} executions in {self.seconds:.0f} s, {rate:.1f} a second; distinct endings:"
        return "\n".join([head, *counted, f"{len(self.findings)} findings", *self.findings])


def run(reader: str, seconds: float, seed: int, keep: Path, most: int | None = None) -> Report:
    """Fuzz in this process until the time is over, or so many executions are made."""
    generator = random.Random(f"{reader} {seed}")
    report = Report(0, 0.0, Counter(), [])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        scenes = Scenes(reader, Path(scratch))
        pool = [(kind_of(file), file.read_bytes()) for file in corpus(reader)]
        seeds = [(kind, scenes.seed(kind)) for kind in READERS[reader]]
        while time.monotonic() - start < seconds and (most is None or report.executions < most):
            kind, content = generator.choice(pool if generator.random() < 0.4 else seeds)
            changed = spoilt(content, generator, [other for own, other in pool if own == kind])
            _note(kind, changed)
            ending = ending_of(scenes, kind, changed, Path(scratch) / "scene")
            report.executions += 1
            if not report.endings[ending.name, ending.place]:
                if len(pool) < POOL:
                    pool.append((kind, changed))
                if ending.bad:
                    report.findings.append(kept(reader, kind, changed, ending.told, keep))
            report.endings[ending.name, ending.place] += 1
    report.seconds = time.monotonic() - start
    return report


_current: Path | None = None


def _note(kind: str, content: bytes) -> None:
    """Leave what is about to be read where another process finds it, should this one not survive it."""
    if _current is not None:
        _current.write_bytes(kind.encode() + b"-" + content)


def kept(reader: str, kind: str, content: bytes, told: str, folder: Path) -> str:
    """Keep the input of a finding, and say how to repeat it."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = next(iter(file.suffix for file in corpus(reader) if kind_of(file) == kind), "")
    file = folder / f"{kind}-{hashlib.sha256(content).hexdigest()[:10]}{suffix}"
    file.write_bytes(content)
    shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    command = f"python -m support.fuzz {reader} --repeat {shown}"
    print(f"{told}\nfinding kept in {shown}; repeat it with:\n  {command}\n", flush=True)
    return command


def _worker(reader: str, seconds: float, seed: int, keep: Path, current: Path, sender: Any) -> None:
    global _current
    _current = current
    os.dup2(os.open(current.with_name("stderr"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
    found = run(reader, seconds, seed, keep)
    sender.send((found.executions, json.dumps([[*key, n] for key, n in found.endings.items()]), found.findings))


def supervised(reader: str, seconds: float, seed: int, keep: Path) -> Report:
    """Fuzz in processes of their own: one that dies, or cannot even be interrupted, is a finding too."""
    import hf_bico.models.model
    import hf_bico.porting.task_vector  # noqa: F401  once for all processes

    total = Report(0, 0.0, Counter(), [])
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        current = Path(scratch) / "current"
        while time.monotonic() < end - 1:
            receiver, sender = context.Pipe(duplex=False)
            current.write_bytes(b"")
            slice_of_time = min(120.0, end - time.monotonic())
            process = context.Process(target=_worker, args=(reader, slice_of_time, seed, keep, current, sender))
            begun = time.monotonic()
            process.start()
            sender.close()
            told = _told(process, receiver, current)
            if not isinstance(told, str):
                executions, endings, findings = told
                total.executions += executions
                total.endings.update({(name, place): count for name, place, count in json.loads(endings)})
                total.findings += findings
            else:
                kind, _, content = current.read_bytes().partition(b"-")
                total.findings.append(kept(reader, kind.decode(), content, told, keep))
            total.seconds += time.monotonic() - begun
            process.join()
            seed += 1_000_003
    return total


def _told(process: Any, receiver: Any, current: Path) -> Any:
    """What a process tells at its end, or in words why it does not."""
    while not receiver.poll(1.0):
        patience = 6 * SECONDS if current.stat().st_size else START_SECONDS
        if time.time() - current.stat().st_mtime > patience:
            process.kill()
            return f"the process did not come back within {patience} seconds"
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return f"{current.with_name('stderr').read_text()[-2000:]}\nthe process died with {process.exitcode}"


def repeat(reader: str, file: Path) -> int:
    """Read one kept input again."""
    with tempfile.TemporaryDirectory() as scratch:
        scenes = Scenes(reader, Path(scratch))
        scenes.good(kind_of(file))
        ending = ending_of(scenes, kind_of(file), file.read_bytes(), Path(scratch) / "scene")
    print(ending.told or f"{ending.name} {ending.place}")
    return int(ending.bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=sorted(READERS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=Path)
    parser.add_argument("--keep", type=Path, help="where findings are kept, if not in the corpus")
    asked = parser.parse_args()
    os.environ["HF_BICO_DEBUG"] = "1"  # what only the last net would catch is a finding
    if asked.repeat is not None:
        return repeat(asked.reader, asked.repeat)
    report = supervised(asked.reader, 60 * asked.minutes, asked.seed, asked.keep or CORPUS / asked.reader)
    print(report.text())
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.exit(main())
