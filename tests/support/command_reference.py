"""docs/commands.md: the help of every command as a terminal shows it, the same on every machine."""

from __future__ import annotations

import click
from click.testing import CliRunner

from support import ROOT

PAGE = ROOT / "docs" / "commands.md"
WIDTH = 100


def command_reference() -> str:
    """The page, from what `--help` prints now."""
    from hf_bico.cli.main import main

    names = main.list_commands(click.Context(main))
    about = {name: main.commands[name].get_short_help_str(limit=200) for name in names}
    parts = [
        "# Commands",
        "What `--help` prints for every command, or `--help-all` where there are more options. This page is\n"
        "generated: `make docs` writes it again.",
        "\n".join(f"- [`hf-bico {name}`](#hf-bico-{name}): {text}" for name, text in about.items()),
        "## hf-bico",
        _help([]),
    ]
    for name in names:
        parts += [f"## hf-bico {name}", _help([name])]
    return "\n\n".join(parts) + "\n"


def _help(command: list[str]) -> str:
    from hf_bico.cli.main import main

    has_many = bool(command) and main.commands[command[0]].has_many
    option = "--help-all" if has_many else "--help"
    result = CliRunner().invoke(
        main, [*command, option], prog_name="hf-bico", terminal_width=WIDTH, color=False, catch_exceptions=False
    )
    lines = [line.rstrip() for line in click.unstyle(result.stdout).strip().splitlines()]
    return "\n".join(["```text", *lines, "```"])
