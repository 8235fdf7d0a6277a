"""Help in sections, commands by their use, and what was meant by a word that is mistyped."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hf_bico.alignment.methods import method_class
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.cli.main import GROUPS, main
from hf_bico.cli.options import SECTIONS, SectionedHelp
from hf_bico.errors import RepoError
from hf_bico.hub.client import Hub as HubClient
from hf_bico.hub.references import HubReference
from hf_bico.settings import METHODS, Settings, option_methods
from support.hub import Hub
from support.hub_scenes import DATA, SOURCE, TARGET, publish

pytestmark = pytest.mark.quick

TITLES = [section.title for section in SECTIONS]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="hf-bico", terminal_width=100)


def by_title(text: str) -> dict[str, list[str]]:
    """The lines of a help text under each of its headings."""
    found: dict[str, list[str]] = {"": []}
    for line in text.splitlines():
        title = re.fullmatch(r"(\w.*):", line)
        if title:
            assert title[1] not in found, "each heading stands once"
            found[title[1]] = []
        else:
            found[list(found)[-1]].append(line)
    return found


def everything(name: str) -> str:
    """The option that shows all options of a command."""
    return "--help-all" if getattr(main.commands[name], "has_many", False) else "--help"


def test_a_command_with_many_options_shows_the_common_ones_on_two_screens() -> None:
    for name in ("port", "compare", "diagnose"):
        short, whole = (run(name, option).output for option in ("--help", "--help-all"))
        assert short.count("\n") <= 80 < whole.count("\n")
        known = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", whole, re.MULTILINE))
        common = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", short, re.MULTILINE))
        assert {"--to", "--data", "--base", "--help-all"} <= common < known
        assert f"{len(known) - len(common)} more options: 'hf-bico {name} --help-all'" in short
    assert "--help-all" not in run("extract", "--help").output


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_option_is_in_exactly_one_section(name: str) -> None:
    command = main.commands[name]
    sections = by_title(run(name, everything(name)).output)
    shown = [line.split()[0].strip(",") for title in TITLES for line in sections.get(title, []) if line[2:3] == "-"]
    wanted = [parameter.opts[0] for parameter in command.params if isinstance(parameter, click.Option)]
    assert sorted(shown) == sorted([*wanted, "-h"])
    assert [title for title in sections if title in TITLES] == [title for title in TITLES if title in sections]


@pytest.mark.parametrize("name", sorted(main.commands))
def test_examples_come_last_and_run_the_command(name: str) -> None:
    command = main.commands[name]
    assert isinstance(command, SectionedHelp)
    sections = by_title(run(name, "--help").output)
    last = list(sections)[-1]
    assert last in ("Example", "Examples")
    assert (last == "Examples") == (len([line for line in sections[last] if line]) > 1)
    assert all(f"hf-bico {name}" in line for line in sections[last] if line)
    assert "Example" not in "".join(sections[""])


def test_every_option_of_ours_says_its_section() -> None:
    for command in main.commands.values():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert getattr(parameter, "section", None) in TITLES, (command.name, parameter.name)


def test_the_first_help_shows_groups_exit_codes_and_where_to_go() -> None:
    sections = by_title(run("--help").output)
    for title, commands in GROUPS.items():
        assert [line.split()[0] for line in sections[title] if line[:3].strip()] == [one.name for one in commands]
    listed = [command for commands in GROUPS.values() for command in commands]
    assert sorted(str(command.name) for command in listed) == sorted(main.commands)
    assert [line.split()[0] for line in sections["Exit codes"] if line] == ["0", "1", "2", "3", "130", "143"]
    assert any("hf-bico COMMAND --help" in line for line in sections["Where to look next"])


def test_no_arguments_show_the_help_and_a_wrong_command_line() -> None:
    result = run()
    assert result.exit_code == 2
    assert result.stderr == run("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["prot"], "port"),
        (["PORT"], "port"),
        (["Compare"], "compare"),
        (["port", "a", "--to", "b", "--method", "biko"], "bico"),
        (["port", "a", "--to", "b", "--method", "BICO"], "bico"),
        (["port", "a", "--to", "b", "--sampling", "clas-balanced"], "class-balanced"),
        (["port", "a", "--to", "b", "--format", "adaptor"], "adapter"),
        (["port", "a", "--to", "b", "--layers", "simlarity"], "similarity"),
        (["apply", "a", "--format", "dleta"], "delta"),
        (["compare", "a", "--to", "b", "--methods", "naive,thesus"], "theseus"),
        (["compare", "a", "--to", "b", "--methods", "al"], "all"),
        (["completion", "bsh"], "bash"),
    ],
)
def test_did_you_mean(arguments: list[str], meant: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"did you mean '{meant}'?" in result.stderr.splitlines()[-1].lower()


def test_options_are_asked_about_by_click_itself() -> None:
    result = run("port", "a", "--to", "b", "--readuot")
    assert result.exit_code == 2
    assert "--readout" in result.stderr


def test_a_word_like_nothing_gets_no_guess() -> None:
    assert "did you mean" not in run("xyzzy").stderr.lower()
    assert "Remedy: use some of: all, standard, bico" in run("compare", "a", "--to", "b", "--methods", "xyzzy").stderr


def test_near_revisions_repos_and_data_sets(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "scene")
    hub.repo(SOURCE).tag("v1.0")
    for words, meant in (
        (["plan", f"{SOURCE}@mian", "--to", TARGET], "main"),
        (["plan", f"{SOURCE}@v1.1", "--to", TARGET], "v1.0"),
        (["plan", SOURCE.replace("eurosat", "eurosta"), "--to", TARGET], SOURCE),
        (["plan", SOURCE, "--to", TARGET, "--data", f"{DATA}@mian"], "main"),
        (["plan", SOURCE, "--to", TARGET, "--data", DATA.replace("eurosat", "eurosta")], DATA),
    ):
        result = run(*words)
        assert result.exit_code == 1, result.output
        assert result.stderr.splitlines()[1].startswith(f"Remedy: did you mean '{meant}'?")
    far = run("plan", f"{SOURCE}@xyzzy", "--to", TARGET)
    assert far.stderr.splitlines()[1] == "Remedy: use a branch, tag or commit of that repo"


@pytest.mark.parametrize("typed", ["modls/narrow", "models/narow", "Models/Narrow"])
@pytest.mark.parametrize("reachable", [True, False])
def test_near_folders_part_by_part(
    hub: Hub, typed: str, reachable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    (tmp_path / "here" / "models" / "narrow").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not reachable)
    result = run("plan", typed, "--to", "x")
    assert result.exit_code == 1
    assert "did you mean 'models/narrow'?" in result.stderr
    with pytest.raises(RepoError, match="did you mean 'models/narrow'?"):
        HubClient().repo(HubReference(typed), "the data set", "dataset")


IGNORED = [
    ("--train-steps", "3", "bico", ["finetune"]),
    ("--train-batch", "3", "fewshot", ["finetune"]),
    ("--warmup", "3", "naive", ["finetune"]),
    ("--checkpoint", "folder", "fewshot", ["finetune"]),
    ("--learning-rate", "0.1", "theseus", ["fewshot", "finetune"]),
    ("--weight-decay", "0.1", "bico-path", ["fewshot", "finetune"]),
    ("--signs", "mean", "bico", ["gradfix"]),
    ("--path-steps", "2", "bico-fisher", ["bico-path"]),
    ("--completion", "drop", "gradfix", ["bico", "theseus"]),
]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(("option", "value", "method", "allowed"), IGNORED)
def test_an_option_that_would_be_ignored_is_refused(
    option: str, value: str, method: str, allowed: list[str], dry: list[str]
) -> None:
    result = run("port", "a", "--to", "b", "--method", method, option, value, *dry)
    assert result.exit_code == 2
    cause, remedy = result.stderr.splitlines()
    assert option in cause
    assert f"the method is {method}" in cause
    assert all(name in remedy for name in allowed)


def test_what_was_not_typed_or_is_looked_at_is_not_refused() -> None:
    for words in ([], ["--method", "finetune", "--train-steps", "3"], ["--method", "gradfix", "--signs", "majority"]):
        result = run("port", "no-such-folder-here/x y", "--to", "b", *words)
        assert result.exit_code == 1
        assert "there is no folder" in result.stderr


def test_options_of_some_methods_are_known_settings_and_methods() -> None:
    aligning = {name for name in METHODS if issubclass(method_class(name), Aligner)}
    assert set(option_methods("completion")) == aligning
    claimed = {option for info in METHODS.values() for option in info.options}
    assert claimed <= set(vars(Settings()))
    assert all(set(option_methods(option)) < set(METHODS) for option in claimed)
    assert option_methods("seed") == tuple(METHODS)
