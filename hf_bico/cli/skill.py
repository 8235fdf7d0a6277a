"""Writes SKILL.md, which tells an assistant how to use the command line, from the command line's own help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from hf_bico.cli.console import echo, echo_json
from hf_bico.cli.options import COMMON, SectionedHelp, output_options

if TYPE_CHECKING:
    from hf_bico.cli.main import Commands

_HEAD = """\
---
name: hf-bico
description: >-
  Port a fine-tuned model or a LoRA to another pretrained model without training, with the hf-bico command line. Use it
  when a new base model is out and a fine-tune is stuck on the old one (CLIP, LLMs, BERT, ViT, T5), to compare porting
  with training, to extract or merge task vectors, and to push the result to the Hugging Face Hub.
---

# hf-bico

Install: `pip install git+https://github.com/hf-bico/hf-bico`. Every model and data set is a Hub id (`OWNER/NAME`,
`OWNER/NAME@REVISION`) or a folder.

## How to work with it

1. Run `hf-bico plan SOURCE --to TARGET` first. It downloads no weights, and says what is missing and which command to
   run next.
2. Port with `hf-bico port SOURCE --to TARGET`. Leave `--method` and `--alpha` at their defaults.
3. Read the exit code. On 1 and 2, the last lines on stderr are the cause and a remedy: follow the remedy. On 3 the
   samples show no gain and nothing was written: do not force it with `--alpha 1` unless the user asks.
4. Use `--json` to get one JSON object on stdout, and `-q` to silence notices.
5. Report the measured accuracies, never the estimate alone. Do not push to the Hub unless the user asks.
"""


_EVERYWHERE = ("quiet", "as_json", "help_all")
"""The options of every command."""


@click.command(cls=SectionedHelp, short_help="Print a SKILL.md for coding assistants.")
@output_options
def skill(as_json: bool, quiet: bool) -> None:
    """Print SKILL.md: how to use hf-bico, for coding assistants.

    \b
    Example:
      hf-bico skill > SKILL.md
    """
    from hf_bico.cli.main import EXIT_CODES, GROUPS, main

    page = skill_page(main, GROUPS, EXIT_CODES)
    if as_json:
        echo_json({"skill": page})
    elif not quiet:
        echo(*page.rstrip("\n").split("\n"))


def skill_page(main: Commands, groups: Mapping[str, Sequence[click.Command]], codes: Mapping[int, str]) -> str:
    """Return the page, from the commands and their options."""
    lines = [_HEAD, "## Exit codes", ""]
    lines += [f"- `{code}`: {meaning}" for code, meaning in codes.items()]
    parent = click.Context(main, info_name="hf-bico", **main.context_settings)
    for title, commands in groups.items():
        lines += ["", f"## {title}"]
        for command in commands:
            lines += _section(command, parent)
    return "\n".join(lines) + "\n"


def _section(command: click.Command, parent: click.Context) -> Iterator[str]:
    context = command.make_context(str(command.name), [], parent=parent, resilient_parsing=True)
    yield from ("", f"### `{context.command_path} {' '.join(command.collect_usage_pieces(context))}`", "")
    assert isinstance(command, SectionedHelp)
    description, (_, examples) = command.parts()
    yield " ".join(description.split())
    rows = [
        row
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name not in _EVERYWHERE
        if not command.has_many or parameter.name in COMMON
        if (row := parameter.get_help_record(context)) is not None
    ]
    yield ""
    yield from (f"- `{names}`: {' '.join(text.split())}" for names, text in rows)
    if command.has_many:
        yield f"- More options: `{context.command_path} --help-all`"
    if examples:
        yield from ("", "```sh", *examples.split("\n"), "```")
