"""README.md and docs/*.md say what is true: their code runs, their transcripts are what is printed, links and options
lead somewhere; and the checker that says so can fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_bico
from hf_bico.experiments.demo.world import World
from hf_bico.models import families
from support import ROOT
from support.command_reference import PAGE as REFERENCE
from support.command_reference import command_reference
from support.measured import STAMP, drawn_here, is_as_shown, look_alike, measured_here
from support.page_text import (
    contract_problems,
    dead_links,
    inline_code,
    links,
    make_targets,
    read_blocks,
    unknown_options,
)
from support.pages import PageRun, all_pages, renewed, run_page, shown_path, world_of_pages

MADE_ON = STAMP.read_text()
EXACT = measured_here(MADE_ON)
"""Whether the numbers of the pages were measured on such a machine as this."""
PAGES = pytest.mark.parametrize("page", all_pages(), ids=shown_path)


@pytest.fixture(autouse=True)
def no_family_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", {})


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of_pages(tmp_path_factory.mktemp("pages") / "world")


@pytest.fixture
def run(world: World, tmp_path: Path) -> Callable[[str], PageRun]:
    """Runs a page made here."""

    def run(text: str) -> PageRun:
        page = tmp_path / "page.md"
        page.write_text(text)
        return run_page(page, world, tmp_path / "folder", exact=True)

    return run


@PAGES
def test_code_runs_and_transcripts_are_what_is_printed(page: Path, world: World, tmp_path: Path) -> None:
    found = run_page(page, world, tmp_path / "folder", EXACT)
    assert not found.failures, "\n\n".join(found.failures)
    assert not found.differences, "make docs writes them again\n" + "\n\n".join(found.differences)
    if drawn_here(MADE_ON):
        for kept, picture in found.pictures.items():
            assert look_alike(kept.read_bytes(), picture, EXACT), f"make docs draws {kept.name} again"


def test_the_numbers_of_the_readme_were_measured() -> None:
    """Percentages in its prose are those of the measured tables, or of the transcripts of it and of the quick start."""
    text = (ROOT / "README.md").read_text()
    blocks = [*read_blocks(text), *read_blocks((ROOT / "docs" / "quick-start.md").read_text())]
    shown = "".join(block.text for block in blocks if block.language == "console")
    tables = "".join(file.read_text() for file in sorted((ROOT / "docs" / "small-world").glob("*.md")))
    known = set(re.findall(r"\d+\.\d", shown + tables))
    prose = text
    for block in read_blocks(text):
        prose = prose.replace(block.text, "")
    for number in map(float, re.findall(r"\d+\.\d(?=%)", prose)):
        assert min(abs(number - float(other)) for other in known) < (0.01 if EXACT else 1), number


@PAGES
def test_code_stands_as_code_stands_in_our_pages(page: Path) -> None:
    assert contract_problems(page.read_text()) == []


@PAGES
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


@PAGES
def test_options_exist(page: Path) -> None:
    assert unknown_options(page.read_text()) == []


@PAGES
def test_targets_of_make_exist(page: Path) -> None:
    named = {target for code in inline_code(page.read_text()) for target in re.findall(r"^make ([a-z-]+)", code)}
    assert named <= make_targets()


def test_links_of_the_gallery_lead_somewhere() -> None:
    assert dead_links(ROOT / "model_cards" / "README.md") == []


@pytest.mark.parametrize("index", ["README.md", "docs/README.md"])
def test_every_page_is_linked(index: str) -> None:
    start = ROOT / index
    linked = {(start.parent / link.partition("#")[0]).resolve() for link in links(start.read_text())}
    linked |= {folder / "README.md" for folder in linked if folder.is_dir()}  # a folder is shown by its own page
    assert [shown_path(page) for page in all_pages()[1:] if page not in {*linked, start}] == []


def test_the_command_reference_is_what_help_prints() -> None:
    assert REFERENCE.read_text() == command_reference(), "python -m support.pages writes it again"


def test_the_command_reference_is_the_same_in_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = command_reference()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert command_reference() == before


# -- the checker can fail

COMMAND = "$ hf-bico eval models/wide-inverted --data data/inverted"


@pytest.fixture(scope="module")
def measured(world: World) -> str:
    """What that command prints here."""
    found = hf_bico.evaluate_model(world.fine_tuned("wide", "inverted"), world.data("inverted"))
    return f"accuracy {100 * found.value:.1f}% (597 samples of split test of inverted)"


def test_a_wrong_number_is_found_and_put_right(run: Callable[[str], PageRun], measured: str) -> None:
    wrong = f"# A page\n\n1. A list\n\n   ```console\n   {COMMAND}\n   accuracy 59.5%\n   ```\n\nand more\n"
    found = run(wrong)
    assert len(found.differences) == 1
    assert "-accuracy 59.5%" in found.differences[0]
    assert found.failures == []
    assert found.text == wrong.replace("accuracy 59.5%", measured)


def test_what_is_right_stays(run: Callable[[str], PageRun], measured: str) -> None:
    shown = [COMMAND, measured, "", f"{COMMAND} \\", "    -n 10 -q", "$ ls models/wide", "...", "tokenizer.json", "..."]
    right = "\n".join(["```console", *shown, "```", ""])
    found = run(right)
    assert found == PageRun(right, exact=True, commands=3)


def test_what_python_prints_is_held_against_its_output_block(run: Callable[[str], PageRun]) -> None:
    page = "```python\nprint('before')\n```\n\n```python\nprint(2 + 2)\n```\n\nIt prints\n\n```output\n{}\n```\n"
    found = run(page.format(5))
    assert "-5\n+4" in found.differences[0]
    assert found.text == page.format(4)


def test_lines_too_few_and_too_many_are_found(run: Callable[[str], PageRun], measured: str) -> None:
    found = run(f"```console\n{COMMAND}\n{measured}\none more\n```\n\n```console\n{COMMAND}\n```\n")
    assert len(found.differences) == 2
    assert found.text.count(measured) == 2
    assert "one more" not in found.text


def test_a_cut_transcript_is_held_to_what_it_shows(run: Callable[[str], PageRun], measured: str) -> None:
    found = run(f"```console\n{COMMAND}\n...\naccuracy 1.0% (597 samples of split test of inverted)\n...\n```\n")
    assert len(found.differences) == 1
    assert found.text == f"```console\n{COMMAND}\n...\n{measured}\n...\n```\n"


def test_commits_of_pushes_may_differ() -> None:
    assert is_as_shown(["Pushed, commit 0123456789ab"], ["Pushed, commit ba9876543210"], exact=True)
    assert not is_as_shown(["Pushed, commit 0123456789ab"], ["Pushed, commit main"], exact=False)


def test_a_page_cut_in_the_middle_is_renewed_around_the_same_lines() -> None:
    shown = ["head 1", "...", "score 0.5", "...", "tail 1"]
    assert renewed(shown, ["head 2", "x", "y", "score 0.7", "z", "tail 2"]) == [
        "head 2",
        "...",
        "score 0.7",
        "...",
        "tail 2",
    ]


@pytest.mark.parametrize("fence", ["sh", "console"])
def test_a_command_that_fails_is_found(fence: str, run: Callable[[str], PageRun]) -> None:
    command = "hf-bico eval nowhere --data data/inverted"
    found = run(f"```{fence}\n{'$ ' * (fence == 'console')}{command}\n```\n")
    assert len(found.failures) == 1
    assert command in found.failures[0]
    assert "exit code 1" in found.failures[0]


def test_python_that_fails_is_found_with_its_line(run: Callable[[str], PageRun]) -> None:
    found = run("# A page\n\n```python\nx = 1\n```\n\nand\n\n```python\nassert x == 1\nassert x == 2\n```\n")
    assert len(found.failures) == 1
    assert 'page.md", line 11' in found.failures[0]


def test_programs_that_could_do_anything_are_not_run(run: Callable[[str], PageRun]) -> None:
    found = run("```console\n$ touch file\n```\n")
    assert len(found.failures) == 1


@pytest.mark.parametrize(("language", "code"), [("json", "{'a': 1}"), ("yaml", "a: [1"), ("console", "no command")])
def test_what_does_not_parse_is_found(language: str, code: str, run: Callable[[str], PageRun]) -> None:
    assert len(run(f"```{language}\n{code}\n```\n").failures) == 1


def test_a_page_runs_on_the_hub_as_the_user(run: Callable[[str], PageRun]) -> None:
    found = run(
        "```sh\nhf-bico port user/eurosat-lora --to laion/ViT-B-16-plus -n 20 --push-to user/new\n```\n\n"
        "```console\n$ hf-bico eval user/new -q\n```\n"
    )
    assert found.failures == []
    assert found.differences == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```bash\nls\n```\n", "'bash'"),
        ("```\nls\n```\n", "''"),
        ("Code:\n\n    ls\n", "indented"),
        ("```sh\nrm -rf /\n```\n", "rm -rf"),
        ("```sh\nmake coffee\n```\n", "coffee"),
        ("```sh\npython benchmarks/nothing.py\n```\n", "nothing.py"),
    ],
)
def test_code_of_another_kind_is_found(text: str, problem: str) -> None:
    (found,) = contract_problems(f"# A page\n\n{text}")
    assert problem in found
    assert found.startswith("line ")


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A title, with `code`\n")
    (tmp_path / "page.md").write_text(
        "# One\n\n[a](there.md) [b](there.md#a-title-with-code) [c](#one) [d](https://huggingface.co)\n"
        "[e](gone.md) [f](there.md#gone) [g](#two) ![h](gone.png)\n"
    )
    assert dead_links(tmp_path / "page.md") == ["gone.md", "there.md#gone", "#two", "gone.png"]


@pytest.mark.parametrize(
    "code",
    [
        "--gone",
        "hf-bico port a --to b --gone",
        "port --gone",
        "--sampling gone",
        "hf-bico gone x",
        "hf-bico card --alpha 1",
    ],
)
def test_options_that_are_gone_are_found(code: str) -> None:
    known = "`--alpha`, `-n`, `--format full|delta`, `--sampling NAME`, `--private/--public`, `pip --no`, `eval -n 3`"
    assert unknown_options(f"{known}, `hf-bico --version`\n") == []
    assert len(unknown_options(f"`{code}`\n")) == 1
    if code.startswith("hf-bico"):
        assert len(unknown_options(f"```sh\n{code}\n```\n")) == 1
