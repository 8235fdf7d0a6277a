"""Every fault at every request of a whole port and push: how each pair ends, and whether anything is left half done.

    python -m support.fault_matrix [--circle REGEX] [--only REGEX] [--every K] [--processes 2]

One undisturbed run of a circle gives its requests. For each of them, by its place, and each fault, the same command
runs again with an empty cache; then the Hub and the folder are looked at, and after an error the way out that it names
is taken. Prints a table for each circle. Knows the command line and the loopback Hub; not how the port is done.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import click

from support.loopback import HUB, TOKEN

os.environ["HF_HUB_VERBOSITY"] = "error"
# the endpoint stands before the clients are imported
from click.testing import CliRunner  # isort: skip
from support.hub import Fault, Repo  # isort: skip
from support.hub_scenes import BASE, BASE_CARD, DATA, DATA_CARD, SOURCE, SOURCE_CARD, TARGET, TARGET_CARD, upload  # isort: skip
from support.paper import PAPER_WORDS  # isort: skip
from support.scenes import Scene, make_scene  # isort: skip

PUSHED = "user/ported"
LIMIT = 60
"""Seconds after which a command counts as hanging; its waits between tries are not waited for."""
PATIENCE = 0.4
"""Seconds for which an answer is waited for, in place of minutes."""

_NAMES = ("id", "sha", "siblings", "name", "orgs", "url", "files", "commitOid", "commitUrl", "objects", "discussions")
_OTHER_TYPES = {name: [{"path": 7, "rfilename": {}, "oid": 1.5}, None] for name in _NAMES}
FAULTS: dict[str, dict[str, Any]] = {
    "500": {"status": 500},
    "503": {"status": 503},
    "429": {"status": 429, "headers": {"Retry-After": "2"}},
    "502 page": {"status": 502, "body": "<html><body>Bad gateway</body></html>"},
    "cut": {"kind": "cut"},
    "drop": {"kind": "drop"},
    "lost": {"kind": "lost"},
    "slow": {"kind": "slow", "seconds": PATIENCE / 4},
    "stall": {"kind": "slow", "seconds": PATIENCE * 2},
    "401": {"status": 401},
    "403": {"status": 403},
    "404": {"status": 404},
    "gone": {"status": 404, "headers": {"X-Error-Code": "RepoNotFound"}},
    "503 on": {"status": 503, "times": None},
    "drop on": {"kind": "drop", "times": None},
    "200 page": {"status": 200, "body": "<html><body>Log in to this network</body></html>", "times": None},
    "no JSON": {"kind": "other", "body": "fine", "times": None},
    "a list": {"kind": "other", "body": "[]", "times": None},
    "an object": {"kind": "other", "body": "{}", "times": None},
    "other types": {"kind": "other", "body": json.dumps(_OTHER_TYPES), "times": None},
    "other bytes": {"kind": "other", "turned": True, "times": None},
    "other commit": {"kind": "other", "headers": {"X-Repo-Commit": "0" * 40}, "times": None},
    "other repo": {"kind": "elsewhere", "instead": {SOURCE: TARGET, BASE: TARGET, TARGET: BASE}, "times": None},
}
"""What goes wrong, once unless it goes `on`: a Hub that is busy, a connection that breaks, a Hub that refuses, and one
that always answers, but with something else."""
PASSING = ("500", "503", "429", "502 page", "cut", "drop", "lost", "slow", "stall")
"""What is over by itself, and no reason to fail."""

MAY_FAIL = {("POST", f"/api/models/{PUSHED}/commit/main?create_pr=1", "stall")}
"""A pull request of which nobody says in time whether it is open is not asked for twice."""


@dataclass(frozen=True)
class Request:
    """The request of one place in the order of a run: the `nth` of those that look the same."""

    method: str
    pattern: str
    """Of path and query, as `Fault` searches for it."""
    shown: str
    nth: int

    def fault(self, name: str) -> Fault:
        return Fault(self.method, self.pattern, after=self.nth, **FAULTS[name])


@dataclass(frozen=True)
class Circle:
    """A command, and what is on the Hub before it."""

    name: str
    publish: Callable[[Path], None]
    """Makes the repos that the command reads."""
    command: str
    """With {out} for the folder, and {pushed} for the repo."""
    revision: str = "main"
    """Where the result goes."""
    there: bool = False
    """Whether the repo that is pushed to has files before."""
    result: str | None = None
    """The command that makes the folder, where pushing it is all there is."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Constants that are other than in daily use, by their whole name."""


@dataclass(frozen=True)
class Ending:
    """How one command ended."""

    code: int
    kind: str
    cause: str
    remedy: str
    output: str

    @property
    def unexpected(self) -> bool:
        return self.code not in (0, 1) or self.cause.startswith("unexpected ") or "Traceback" in self.output


@dataclass(frozen=True)
class Cell:
    """What one fault at one request led to; `bad` says what is not as it should be."""

    circle: str
    request: Request
    fault: str
    ended: str
    bad: tuple[str, ...]

    def __str__(self) -> str:
        return f"**{self.ended}: {'; '.join(self.bad)}**" if self.bad else self.ended


class Hangs(BaseException):
    """The command did not end in time; no handler of the command's own may take it for an error."""


def passes(request: Request, fault: str) -> bool:
    """Whether it is no reason to fail."""
    return fault in PASSING and (request.method, request.shown, fault) not in MAY_FAIL


# what is on the Hub


def publish_images(folder: Path) -> None:
    """A full fine-tune of open_clip, its base, a target, and a small data set of parquet files."""
    scene = _publish_scene(folder, ("open_clip", "open_clip"))
    upload(HUB, SOURCE, scene.tuned, SOURCE_CARD)
    upload(HUB, TARGET, scene.target, TARGET_CARD)


def publish_shards(folder: Path) -> None:
    """A LoRA over a model of transformers, and a target in shards."""
    import peft
    import torch
    from transformers import CLIPModel

    scene = _publish_scene(folder, ("transformers", "transformers"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc1"])
    adapted = peft.get_peft_model(CLIPModel.from_pretrained(scene.base), config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    adapted.peft_config["default"].base_model_name_or_path = BASE
    adapted.save_pretrained(folder / "lora")
    upload(HUB, SOURCE, folder / "lora", SOURCE_CARD)
    (scene.target / "model.safetensors").rename(folder / "whole.safetensors")
    shutil.copytree(scene.target, folder / "whole")
    (folder / "whole.safetensors").rename(folder / "whole" / "model.safetensors")
    CLIPModel.from_pretrained(folder / "whole").save_pretrained(scene.target, max_shard_size="50KB")
    upload(HUB, TARGET, scene.target, TARGET_CARD)


def _publish_scene(folder: Path, libraries: tuple[str, str]) -> Scene:
    scene = make_scene(folder / "scene", libraries)
    upload(HUB, BASE, scene.base, BASE_CARD)
    upload(HUB, DATA, scene.data, DATA_CARD, type="dataset")
    return scene


_PORT = f"port {SOURCE} --to {TARGET} -n 8 {' '.join(PAPER_WORDS)} --device cpu --json --force -o {{out}}"
_IN_PARTS = {"hf_bico.data.loading.SMALL_REPO": 0, "hf_bico.data.remote_parquet.MIN_BUDGET": 4_000}
CIRCLES = (
    Circle("port and push", publish_images, f"{_PORT} --no-eval --push-to {{pushed}}"),
    Circle(
        "port and push of a LoRA to a target in shards, samples by Range requests",
        publish_shards,
        f"{_PORT} --push-to {{pushed}}",
        settings=_IN_PARTS,
    ),
    Circle("push --overwrite", publish_images, "push {out} {pushed} --overwrite --json --force", "main", True, _PORT),
    Circle(
        "push --revision, to a new branch",
        publish_images,
        "push {out} {pushed} --revision dev --json --force",
        "dev",
        True,
        _PORT,
    ),
    Circle(
        "push --revision, to a new repo",
        publish_images,
        "push {out} {pushed} --revision dev --json --force",
        "dev",
        False,
        _PORT,
    ),
    Circle("push --create-pr", publish_images, "push {out} {pushed} --create-pr --json --force", "pr", True, _PORT),
)


# one command


def run(line: str) -> Ending:
    """A command line in this process."""
    from hf_bico.cli.main import main

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = CliRunner().invoke(main, shlex.split(line))
    if isinstance(done.exception, Hangs):
        return Ending(-1, "HANGS", "", "", done.output)
    try:
        error = json.loads(done.stdout.strip().splitlines()[-1]).get("error", {})
    except (ValueError, IndexError):
        error = {}
    kind = error.get("kind", "" if done.exit_code == 0 else repr(done.exception))
    return Ending(done.exit_code, kind, error.get("cause", ""), error.get("remedy", ""), done.output)


@contextmanager
def hurried(cache: Path, settings: dict[str, Any]) -> Iterator[None]:
    """An empty cache, no waits between tries, short ones for an answer, and an alarm."""
    from huggingface_hub import constants

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hangs

    changed = {
        "huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT": PATIENCE,
        "huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT": PATIENCE,
        "huggingface_hub.file_download._ETAG_RETRY_TIMEOUT": PATIENCE,
        "hf_bico.hub.retries.REQUEST_TIMEOUT": PATIENCE,
        **settings,
    }
    patches = [patch(name, value) for name, value in changed.items()]
    patches += [patch("time.sleep", lambda seconds: None), patch.object(constants, "HF_HUB_CACHE", str(cache))]
    before = signal.signal(signal.SIGALRM, ring)
    for one in patches:
        one.start()
    signal.setitimer(signal.ITIMER_REAL, LIMIT, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for one in reversed(patches):
            one.stop()
        signal.signal(signal.SIGALRM, before)


_sleep = time.sleep
"""As it is while others do not wait."""


# one circle


class Stage:
    """One circle on the Hub of this process, and its cells one after the other."""

    def __init__(self, circle: Circle, folder: Path) -> None:
        self.circle = circle
        self.folder = folder
        HUB.reset()
        HUB.add_user("user", TOKEN, orgs=("laion",))
        os.environ["HF_TOKEN"] = TOKEN
        circle.publish(folder / "published")
        self.sources = _heads()
        self.runs = 0

    @cached_property
    def result(self) -> Path | None:
        """The folder to push, where the circle begins with one."""
        if self.circle.result is None:
            return None
        self._clear()
        out = self.folder / "result"
        with hurried(self.folder / "cache", {}):
            ending = run(self.circle.result.format(out=out))
        assert ending.code == 0, ending.output
        return out

    @cached_property
    def requests(self) -> list[Request]:
        """Those of an undisturbed run, which must end well."""
        with self._prepared() as place, hurried(place / "cache", self.circle.settings):
            ending = run(self._line(place))
            assert ending.code == 0, ending.output
            log = list(HUB.log)
            assert self._remote(place / "out") == "whole"
            self.files = _digests(place / "out")
            if self.result is not None:  # pushed once, it has the repo's name in it
                shutil.rmtree(self.result)
                shutil.copytree(place / "out", self.result)
        seen: Counter[tuple[str, str]] = Counter()
        found = []
        for entry in log:
            address = entry.path + (f"?{entry.query}" if entry.query else "")
            shown = re.sub(r"[0-9a-f]{32,40}", "*", address)
            pattern = "^" + re.escape(shown).replace(r"\*", "[0-9a-f]{32,40}") + "$"
            found.append(Request(entry.method, pattern, shown, seen[entry.method, pattern]))
            seen[entry.method, pattern] += 1
        return found

    def cells(self, pairs: Sequence[tuple[Request, str]]) -> list[Cell]:
        """The command with these faults, all in one run, and what it leaves."""
        self.requests  # noqa: B018 - what whole is, is known from the undisturbed run
        faults = [request.fault(name) for request, name in pairs]
        with self._prepared() as place:
            with hurried(place / "cache", self.circle.settings):
                for fault in faults:
                    HUB.inject(fault)
                ending = run(self._line(place))
            if any(name == "stall" for _, name in pairs):
                _sleep(FAULTS["stall"]["seconds"])  # what was asked for is still carried out
            HUB.forgive()
            misled = any(name == "other repo" for _, name in pairs)
            bad = list(self._wrong(place, ending, misled))
            ended = "well" if ending.code == 0 else ending.kind.removesuffix("Error")
            if self._remote(place / "out") == "empty":
                ended += ", empty"
            if ending.code != 0:
                if all(passes(*pair) for pair in pairs):
                    bad.append(f"fails over what passes: {ending.cause}")
                bad += [] if ending.kind == "HANGS" else self._way_out(place, ending)
            elif self._is_private():
                ended = "well, private"
        unmet = [[] if fault.fired else ["the fault was not met"] for fault in faults]
        return [Cell(self.circle.name, *pair, ended, (*also, *bad)) for pair, also in zip(pairs, unmet, strict=True)]

    @contextmanager
    def _prepared(self) -> Iterator[Path]:
        """A folder of its own, the Hub as it was before, and afterwards nothing."""
        result = self.result
        self._clear()
        self.runs += 1
        place = self.folder / f"run-{self.runs}"
        place.mkdir()
        if result is not None:
            shutil.copytree(result, place / "out")
        try:
            yield place
        finally:
            HUB.forgive()
            shutil.rmtree(place)

    def _clear(self) -> None:
        HUB.forgive()
        HUB.clear_log()
        HUB.repos.pop(("model", PUSHED), None)
        if self.circle.there:
            HUB.create(PUSHED).commit({"README.md": "# old", "model.safetensors": b"old", "notes.md": "kept"})
        self.before = _refs(HUB.repo(PUSHED)) if self.circle.there else None

    def _line(self, place: Path) -> str:
        return self.circle.command.format(out=place / "out", pushed=PUSHED)

    def _wrong(self, place: Path, ending: Ending, misled: bool) -> Iterator[str]:
        """What is not as it should be at the end of a command.

        Where an endpoint misled it with the answers of another repo, a result of that repo will do if it says so.
        """
        if ending.kind == "HANGS" or ending.unexpected:
            yield f"exit code {ending.code}, {ending.cause or ending.kind}"
        if ending.code != 0 and not ending.remedy:
            yield "no remedy"
        if TOKEN in ending.output:
            yield "the token is shown"
        if _heads() != self.sources:
            yield "a source has changed"
        local, remote = self._local(place / "out"), self._remote(place / "out")
        if misled and local.startswith("not whole") and _says_renamed(place / "out"):
            local = "whole"
        if ending.code == 0 and (local, remote) != ("whole", "whole"):
            yield f"the folder is {local}, the repo {remote}"
        if local not in ("whole", "absent"):
            yield f"the folder is {local}"
        if remote == "empty" and "could not be deleted" not in ending.cause:
            yield "an empty repo is left, and not spoken of"
        if remote not in ("whole", "absent", "empty"):
            yield f"the repo is {remote}"
        left = sorted(path.name for path in place.iterdir() if path.name not in ("out", "cache"))
        if left:
            yield f"left beside the folder: {', '.join(left)}"

    def _way_out(self, place: Path, ending: Ending) -> Iterator[str]:
        """Whether what the error names, without the fault, leads to the end."""
        named = re.search(r"hf-bico (push .*)$", ending.remedy)
        if named is None and self.circle.result is None and self._local(place / "out") == "whole":
            yield f"the remedy names no line to go on with: {ending.remedy}"
        line = self._line(place) if named is None else f"{named[1]} --json"
        with hurried(place / "cache", self.circle.settings):
            again = run(line)
        if again.code != 0:
            yield f"'{line.split()[0]}' does not go on: {again.cause or again.kind}"
        elif (states := (self._local(place / "out"), self._remote(place / "out"))) != ("whole", "whole"):
            yield f"gone on with, the folder is {states[0]}, the repo {states[1]}"

    def _local(self, out: Path) -> str:
        if not out.exists():
            return "absent"
        if not hasattr(self, "files"):
            return "whole"
        found = _digests(out)
        return "whole" if found == self.files else f"not whole: {sorted(found.items() ^ self.files.items())}"

    def _remote(self, out: Path) -> str:
        """Absent, where all is as before; whole, where the one revision that was pushed to has all files of ours."""
        repo = HUB.repos.get(("model", PUSHED))
        if repo is None:
            return "absent"
        if _refs(repo) == self.before:
            return "absent"
        changed = {name: sha for name, sha in _refs(repo).items() if (self.before or {}).get(name) != sha}
        if set(changed.values()) <= set((self.before or {}).values()):
            return "empty"  # a branch that is where another is
        expected = {"refs/pr/1"} if self.circle.revision == "pr" else {self.circle.revision}
        if self.before is None:
            expected |= {"main"}
            if self.circle.revision != "main" and set(repo.files()) != {".gitattributes"}:
                return "changed on main"
        if changed.keys() != expected:
            return "empty" if not _has_files(repo) else f"changed at {', '.join(sorted(changed))}"
        revision = "refs/pr/1" if self.circle.revision == "pr" else self.circle.revision
        if not _has_files(repo):
            return "empty"
        ours = {file.name: file.read_bytes() for file in _shown(out)} if out.exists() else {}
        there = {name: repo.read(name, revision) for name in repo.files(revision) if name != ".gitattributes"}
        kept = {"notes.md": b"kept"} if self.circle.there else {}
        if there != ours | kept:
            names = [name for name in there.keys() | ours.keys() if there.get(name) != (ours | kept).get(name)]
            return f"half done: {', '.join(sorted(names))}"
        commits = len(repo.history(revision)) - (2 if self.circle.there else 1)
        return "whole" if commits == 1 else f"whole in {commits} commits"

    def _is_private(self) -> bool:
        return HUB.repo(PUSHED).private


def _heads() -> dict[str, dict[str, str]]:
    """The commits of all repos but the one that is pushed to."""
    return {repo.id: _refs(repo) for repo in HUB.repos.values() if repo.id != PUSHED}


def _refs(repo: Repo) -> dict[str, str]:
    return {**repo.branches, **{f"refs/pr/{num}": sha for num, sha in repo.pulls.items()}}


def _has_files(repo: Repo) -> bool:
    revisions = [*repo.branches, *(f"refs/pr/{num}" for num in repo.pulls)]
    return any(set(repo.files(revision)) - {".gitattributes"} for revision in revisions)


def _shown(folder: Path) -> list[Path]:
    """The files that are pushed."""
    return [file for file in folder.iterdir() if not file.name.startswith(".")]


def _digests(folder: Path) -> dict[str, str]:
    """What must be the same in each run: the names, and the weights' bytes as the record has them."""
    record = json.loads((folder / "bico.json").read_text()) if (folder / "bico.json").is_file() else {}
    named = record.get("output", {}).get("files", {})
    from hf_bico.utils.files import sha256_of

    found = {file.name: "" for file in _shown(folder)}
    for name, digest in named.items():
        file = folder / name
        same = file.is_file() and sha256_of([file])[file.name] == digest
        found[name] = digest if same else "not as recorded"
    return found


def _says_renamed(folder: Path) -> bool:
    """Whether the record says that a repo was renamed: the answers of another one look the same."""
    record = json.loads((folder / "bico.json").read_text())
    return any("' is now '" in notice for notice in record.get("notices", ()))


# all of them


@dataclass(frozen=True)
class Part:
    """Which cells one process does: of a circle, each `parts`-th of those that are wanted."""

    circle: int
    part: int = 0
    parts: int = 1
    only: str = ""
    every: int = 1
    together: int = 1
    """How many of the faults that pass are met in one run, at most."""

    def runs(self, requests: Sequence[Request]) -> list[list[tuple[Request, str]]]:
        wanted = [
            (request, fault)
            for i, request in enumerate(requests)
            for j, fault in enumerate(FAULTS)
            if (i + j) % self.every == 0 and re.search(self.only, f"{request.method} {request.shown} {fault}")
        ]
        runs: list[list[tuple[Request, str]]] = []
        for pair in wanted[self.part :: self.parts]:
            # requests that look the same are told apart by their place, which another one's fault would change
            with_room = (
                run
                for run in runs
                if passes(*pair)
                and len(run) < self.together
                and all(passes(*other) and other[0].pattern != pair[0].pattern for other in run)
            )
            run = next(with_room, None)
            if run is None:
                runs.append([pair])
            else:
                run.append(pair)
        return runs


def do(part: Part) -> tuple[list[Request], list[Cell]]:
    """The requests of a circle, and these of its cells."""
    with tempfile.TemporaryDirectory(prefix="hf-bico-faults-") as folder:
        stage = Stage(CIRCLES[part.circle], Path(folder))
        cells = [cell for run in part.runs(stage.requests) for cell in stage.cells(run)]
        for cell in cells:
            if cell.bad:
                shown = f"{cell.request.method} {cell.request.shown} ({cell.request.nth + 1})"
                print(f"{shown}, {cell.fault}: {cell}", file=sys.stderr)
        return stage.requests, cells


def table(requests: Sequence[Request], cells: Sequence[Cell]) -> str:
    """Requests by faults, in Markdown; faults that nobody asked for are left out."""
    found = {(cell.request, cell.fault): cell for cell in cells}
    faults = [fault for fault in FAULTS if any(cell.fault == fault for cell in cells)]
    lines = [["request", *faults], ["---"] * (1 + len(faults))]
    for request in requests:
        if any((request, fault) in found for fault in faults):
            nth = f" ({request.nth + 1})" if request.nth else ""
            row = [str(found.get((request, fault), "")) for fault in faults]
            lines.append([f"{request.method} {request.shown}{nth}", *row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(cells: Sequence[Cell]) -> str:
    counts = Counter("bad" if cell.bad else cell.ended for cell in cells)
    return f"{len(cells)} pairs: " + ", ".join(f"{count} {ended}" for ended, count in counts.most_common())


@click.command()
@click.option("--circle", default="", help="Only circles whose name matches this expression.")
@click.option("--only", default="", help="Only pairs whose request and fault match this expression.")
@click.option("--every", default=1, help="Only each K-th pair, along the diagonals.")
@click.option("--processes", default=1)
def main(circle: str, only: str, every: int, processes: int) -> None:
    """Print how each pair of request and fault ends."""
    everything: list[Cell] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for index, one in enumerate(CIRCLES):
            if not re.search(circle, one.name):
                continue
            parts = [Part(index, part, processes, only, every) for part in range(processes)]
            done = list(pool.map(do, parts))
            cells = [cell for _, some in done for cell in some]
            everything += cells
            if cells:
                print(f"\n## {one.name}\n\n{summary(cells)}\n\n{table(done[0][0], cells)}", flush=True)
    print(f"\nIn all {summary(everything)}")
    sys.exit(any(cell.bad for cell in everything))


if __name__ == "__main__":
    main()
