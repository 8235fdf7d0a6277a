"""README.md and docs/*.md as programs: every transcript, command and Python block of a page is run, in order.

`python -m support.pages [PAGE ...]` writes what the commands print now into those pages (all of them by default), and
docs/commands.md; `tests/docs/test_pages.py` runs them and writes nothing. `page_text` says how code stands in a page.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import click
import pytest
import yaml
from click.testing import CliRunner

from hf_bico.models import families
from hf_bico.settings import METHODS
from support import ROOT
from support.loopback import HUB, TOKEN
from support.measured import STAMP, drawn_here, is_as_shown, measured_here, stamp
from support.page_text import Block, Shown, read_blocks, read_sh, read_transcript

if TYPE_CHECKING:
    from hf_bico.experiments.demo.world import World

COLUMNS = 100
"""The width of the terminal in which the commands of the pages run."""
KEPT = {"docs/quick-start.md": {"compared/comparison.png": "docs/pictures/demo-comparison.png"}}
"""Pictures that the commands of a page draw, and where they are kept to be shown in it."""
ELSEWHERE = "https://huggingface.co"
"""What stands in a page for the address of the loopback Hub."""
READERS = ("ls", "cat", "head")
"""What else a transcript may run: programs that only show files."""
TASKS, SHAPES = ("inverted", "plain"), ("narrow", "wide")
OF_THE_READER = {
    "my-finetune": "models/narrow-inverted",
    "model-A": "models/narrow",
    "model-B": "models/wide",
    "eurosat": "data/inverted",
}


def all_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown_path(page: Path) -> str:
    return str(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page)


@dataclass
class PageRun:
    """What became of a page: its text with what the commands print now, and everything that was not as it says."""

    text: str
    exact: bool
    commands: int = 0
    failures: list[str] = field(default_factory=list)
    """What cannot be put right by writing the page again."""
    differences: list[str] = field(default_factory=list)
    """Transcripts that show something else than what is printed."""
    pictures: dict[Path, bytes] = field(default_factory=dict)
    """What was drawn, by where it is kept."""


def run_page(page: Path, world: World, folder: Path, exact: bool) -> PageRun:
    """Run every block of a page in a fresh folder with the scene of the pages; nothing is written into the page.

    What the page shows is what is printed: exactly, or with numbers as another kind of machine may measure them.
    """
    text = page.read_text(encoding="utf-8")
    run, lines = PageRun(text, exact), text.splitlines()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    moved, said = 0, ""
    # what a page registers is forgotten after it
    with _scene(world, folder, text), patch.dict(METHODS), patch.dict(families._registered):
        for block in read_blocks(text):
            place = f"{shown_path(page)}:{block.fence_line}"
            os.chdir(folder)  # whatever ran before
            if block.language in ("console", "output"):
                if block.language == "console":
                    shown = _run_transcript(block, run, place)
                else:
                    shown = _held_against(block.text.splitlines(), said, run, f"{place}: the Python above")
                fresh = [block.indent + line if line else "" for line in shown]
                start = block.first_line + moved
                lines[start : start + block.length] = fresh
                moved += len(fresh) - block.length
            elif block.language == "sh":
                _run_sh(block, run, place)
            elif block.language == "python":
                said = _run_python(block, run, place, namespace)
            else:
                _parse(block, run, place)
    run.text = "\n".join(lines) + "\n"
    for drawn, kept in KEPT.get(shown_path(page), {}).items():
        run.pictures[ROOT / kept] = (folder / drawn).read_bytes()
    return run


def _run_transcript(block: Block, run: PageRun, place: str) -> list[str]:
    """Run its commands; returns the lines of the block as they should be."""
    fresh: list[str] = []
    for shown in read_transcript(block.text):
        fresh += shown.typed
        if shown.command is None:
            run.failures.append(f"{place}: a transcript begins with a line '$ ...'")
            fresh += shown.output
            continue
        printed = _call(shown.command, run, place)
        what = f"{place}: {shown.command}"
        fresh += shown.output if printed is None else _held_against(shown.output, printed, run, what)
        fresh += [""] * _gap(shown, bool(printed))
    while fresh and not fresh[-1]:
        fresh.pop()
    return fresh


def _held_against(shown: list[str], printed: str, run: PageRun, what: str) -> list[str]:
    """The lines that a page should show; a difference is noted."""
    lines = [line.rstrip() for line in click.unstyle(printed).replace(HUB.url, ELSEWHERE).splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    if is_as_shown(shown, lines, run.exact):
        return shown
    difference = difflib.unified_diff(shown, lines, "the page", "what is printed", lineterm="", n=1)
    run.differences.append("\n".join([what, *difference]))
    return renewed(shown, lines)


def _gap(shown: Shown, printed: bool) -> int:
    """Blank lines after an output: as many as there were, and one before the next command."""
    return max(shown.blank_lines, int(printed and not shown.is_last))


def _run_sh(block: Block, run: PageRun, place: str) -> None:
    for line in read_sh(block.text):
        if line.startswith("hf-bico "):
            _call(line, run, place)


def _run_python(block: Block, run: PageRun, place: str, namespace: dict[str, Any]) -> str:
    """Run a block; returns what it printed."""
    said = io.StringIO()
    code = "\n" * block.first_line + block.text  # so that tracebacks name the page's line
    run.commands += 1
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(code, place.rpartition(":")[0], "exec"), namespace)
    except Exception:
        run.failures.append(f"{place}: {traceback.format_exc(limit=-3)}")
    return said.getvalue()


def _parse(block: Block, run: PageRun, place: str) -> None:
    """json and yaml must parse; the rest is text."""
    try:
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
    except (ValueError, yaml.YAMLError) as error:
        run.failures.append(f"{place}: this {block.language} does not parse: {error}")


def _call(command: str, run: PageRun, place: str) -> str | None:
    """What a command prints on stdout; None, and a problem noted, where it fails."""
    run.commands += 1
    words = shlex.split(command, comments=True)
    if words and words[0] == "hf-bico":
        from hf_bico.cli.main import main

        result = CliRunner().invoke(main, words[1:], prog_name="hf-bico")
        code, out, error = result.exit_code, result.stdout, result.stderr
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            error += "".join(traceback.format_exception(result.exception, limit=-3))
    elif words and words[0] in READERS:
        done = subprocess.run(words, capture_output=True, text=True)
        code, out, error = done.returncode, done.stdout, done.stderr
    else:
        run.failures.append(f"{place}: a transcript runs hf-bico, {', '.join(READERS)}, not '{command}'")
        return None
    if code != 0:
        run.failures.append(f"{place}: '{command}' ended with exit code {code}\n{error}")
        return None
    return str(out)


def renewed(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """What was printed, cut as the page cuts it: as many lines around each line of three dots as there were.

    >>> renewed(["a", "...", "x", "y"], ["b", "c", "d", "e", "f"])
    ['b', '...', 'e', 'f']
    >>> renewed(["a", "...", "accuracy 5%", "..."], ["a", "b", "accuracy 7%", "c"])
    ['a', '...', 'accuracy 7%', '...']
    """
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    if len(parts) == 1:
        return list(printed)
    kept, rest = list(printed[: len(parts[0])]), list(printed[len(parts[0]) :])
    tail = rest[max(0, len(rest) - len(parts[-1])) :] if parts[-1] else []
    for part in parts[1:-1]:
        start = max(range(len(rest) + 1), key=lambda at: _likeness(part, rest[at : at + len(part)]))
        kept += ["...", *rest[start : start + len(part)]]
        rest = rest[start + len(part) :]
    return [*kept, "...", *tail]


def _likeness(shown: Sequence[str], printed: Sequence[str]) -> float:
    return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in zip(shown, printed, strict=False))


@contextlib.contextmanager
def _scene(world: World, folder: Path, text: str) -> Iterator[None]:
    """The folder, the Hub and the environment in which a page runs, with what its text names."""
    from huggingface_hub import constants

    before = Path.cwd()
    shutil.copytree(world.folder, folder)
    for name, what in OF_THE_READER.items():
        shutil.copytree(folder / what, folder / name)
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", f"{home}/hub-cache")
        patch.setattr(constants, "HF_HOME", f"{home}/hf-home")
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.setenv("LC_ALL", "C")  # the order in which ls lists
        _fill_hub(world, Path(home), text)
        try:
            yield
        finally:
            os.chdir(before)
            HUB.reset()


def _fill_hub(world: World, scratch: Path, text: str) -> None:
    """The fine-tune, its base, the target and the data as repos, and, if the text names them, LoRAs and real ids."""
    import hf_bico
    from support.hub_scenes import BASE, DATA, PUBLISHED, SOURCE, publish_real_ids, publish_world, upload

    HUB.reset()
    HUB.add_user("user", TOKEN, orgs=("laion", "openai", "tanganke"))
    publish_world(HUB, world)
    if PUBLISHED[0] in text:
        publish_real_ids(HUB, world, scratch)
    card = f"---\nbase_model: {BASE}\ndatasets:\n- {DATA}\n---\n# A LoRA\n"
    for name, rank in (("user/eurosat-lora", 4), ("user/other-lora", 2)) if "-lora" in text else ():
        made = hf_bico.extract(SOURCE, rank=rank).save(scratch / f"rank-{rank}")
        upload(HUB, name, made, card)


def world_of_pages(folder: Path) -> World:
    """The part of the small world that the pages speak of, as `hf-bico demo` makes it."""
    from hf_bico.experiments.demo.world import World
    from support.worlds import small_world

    whole = small_world(0)
    names = [*SHAPES, *(f"{shape}-{task}" for shape in SHAPES for task in TASKS)]
    for part in (*(f"models/{name}" for name in names), *(f"data/{task}" for task in TASKS)):
        shutil.copytree(whole.folder / part, folder / part)
    shutil.copyfile(whole.folder / "small-world.json", folder / "small-world.json")
    return World(folder)


@click.command()
@click.argument("pages", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(pages: tuple[Path, ...]) -> None:
    """Run PAGES, README.md and docs/*.md by default, and write into them what their commands print now.

    Some of them alone keep numbers that another kind of machine measured, if those are near.
    """
    from support.command_reference import PAGE as REFERENCE
    from support.command_reference import command_reference

    changed = _rewrite(REFERENCE, command_reference())
    click.echo(f"{shown_path(REFERENCE)}: {'written again' if changed else 'as it was'}")
    failed = False
    made_on = STAMP.read_text(encoding="utf-8")
    exact = not pages or measured_here(made_on)
    with tempfile.TemporaryDirectory() as scratch:
        world = world_of_pages(Path(scratch) / "world")
        for number, page in enumerate([page.resolve() for page in pages] or all_pages()):
            started = time.monotonic()
            run = run_page(page, world, Path(scratch) / f"page-{number}", exact)
            click.echo(f"{shown_path(page)}: {run.commands} commands in {time.monotonic() - started:.1f} s")
            for line in _rewrite(page, run.text):
                click.echo(f"  {line}")
            for kept, picture in run.pictures.items():
                if not pages or (exact and drawn_here(made_on)):  # else the stamp would name another
                    kept.write_bytes(picture)
            for failure in run.failures:
                click.echo(f"  FAILED {failure}")
            failed |= bool(run.failures)
    if not pages and not failed:
        STAMP.write_text(stamp(), encoding="utf-8")
    raise SystemExit(1 if failed else 0)


def _rewrite(page: Path, text: str) -> list[str]:
    """Write a page, if it changed; returns the difference."""
    before = page.read_text(encoding="utf-8") if page.is_file() else ""
    if text != before:
        page.write_text(text, encoding="utf-8")
    return list(difflib.unified_diff(before.splitlines(), text.splitlines(), "before", "now", lineterm="", n=0))


if __name__ == "__main__":
    main()
