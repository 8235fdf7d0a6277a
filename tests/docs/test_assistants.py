"""What assistants are told: SKILL.md is what the command line prints, and AGENTS.md names what exists."""

from __future__ import annotations

import re

import pytest
import yaml
from click.testing import CliRunner

from hf_bico.cli.main import main
from support import ROOT
from support.page_text import dead_links, make_targets

SKILL = ROOT / "skills" / "hf-bico" / "SKILL.md"
AGENTS = ROOT / "AGENTS.md"


def test_the_skill_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(main, ["skill"], prog_name="hf-bico").stdout
    assert SKILL.read_text(encoding="utf-8") == printed, "hf-bico skill > skills/hf-bico/SKILL.md"


def test_the_skill_has_the_head_that_assistants_read_first() -> None:
    _, head, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["name"] == SKILL.parent.name
    assert 100 < len(about["description"]) < 1024
    assert all(f"### `hf-bico {name} " in body for name in main.commands)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_the_skill_shows_the_examples_of_each_command(name: str) -> None:
    section = re.split(r"^### ", SKILL.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (own,) = [part for part in section if part.startswith(f"`hf-bico {name} ")]
    assert f"hf-bico {name}" in own.partition("```sh")[2]


def test_agents_names_what_exists() -> None:
    text = AGENTS.read_text(encoding="utf-8")
    assert dead_links(AGENTS) == []
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= make_targets()
    named = [path for path in re.findall(r"`([\w./-]+/[\w./-]*)`", text) if not path.startswith("/")]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
