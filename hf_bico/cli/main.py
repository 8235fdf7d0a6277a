"""Assembles the command line from its commands. Imports nothing heavy until a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from hf_bico.arguments import on_the_command_line
from hf_bico.cli.change import apply, extract
from hf_bico.cli.console import is_plain
from hf_bico.cli.exit import (
    FAILED,
    HELD_BACK,
    STOPPED,
    TERMINATED,
    WRONG,
    exit_process_on_error,
    require_single_process,
)
from hf_bico.cli.first_steps import completion, demo
from hf_bico.cli.measure import compare, diagnose, evaluate, reproduce
from hf_bico.cli.options import SectionedHelp
from hf_bico.cli.port import plan, port, rerun
from hf_bico.cli.publish import card, push
from hf_bico.cli.skill import skill
from hf_bico.utils import __version__
from hf_bico.utils.text import near

GROUPS: dict[str, Sequence[click.Command]] = {
    "First steps": (demo, completion, skill),
    "Carry a task vector": (port, plan, rerun, compare),
    "Change models": (extract, apply),
    "Measure": (evaluate, diagnose, reproduce),
    "Publish": (card, push),
}
"""The commands under the headings of the help."""
EXIT_CODES = {
    0: "success",
    FAILED: "the job failed: one line of cause and one of remedy, on stderr",
    WRONG: "a wrong command line",
    HELD_BACK: "a port that the samples held back",
    STOPPED: "stopped by Ctrl-C",
    TERMINATED: "stopped by SIGTERM",
}
WHERE_NEXT = (
    ("hf-bico COMMAND --help", "the options of a command, with examples"),
    ("hf-bico demo", "the whole job on small models, without account or download"),
)


class _Interrupted(BaseException):
    """Ctrl-C inside of a command: on KeyboardInterrupt click would print a line of its own."""


class Commands(SectionedHelp, click.Group):
    """Lists commands in the order of use, under headings, and suggests a command for a mistyped one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(str(one.name).ljust(10), one.get_short_help_str(width)) for one in commands])
        super().format_options(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
        with formatter.section("Where to look next"):
            formatter.write_dl(WHERE_NEXT)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not (ctx.resilient_parsing or name.startswith("-")):
            meant = near(name, self.commands)
            ctx.fail(f"No such command '{name}'." + (f" Did you mean '{meant}'?" if meant else ""))
        if not ctx.resilient_parsing:
            require_single_process(name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if standalone_mode:
            with exit_process_on_error(as_json="--json" in words):
                sys.exit(self.main(words, prog_name, complete_var, standalone_mode=False, **extra))
        extra.setdefault("color", False if is_plain(sys.stdout) else None)
        try:
            with on_the_command_line():
                return super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
        except _Interrupted as error:
            raise KeyboardInterrupt from error


@click.group(
    cls=Commands,
    commands=[command for commands in GROUPS.values() for command in commands],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="hf-bico")
def main() -> None:
    """Carry what a fine-tuned model learnt to another pretrained model, without training.

    Models and data sets are Hub ids (OWNER/NAME, OWNER/NAME@REVISION) or folders; models also by open_clip's own names
    (ViT-B-16-plus-240/laion400m_e32).

    \b
    Examples:
      hf-bico plan user/vit-b16-eurosat --to laion/ViT-B-16-plus
      hf-bico port user/vit-b16-eurosat --to laion/ViT-B-16-plus --push-to user/vit-b16-plus-eurosat
      hf-bico eval user/vit-b16-plus-eurosat --data user/eurosat
      hf-bico compare user/vit-b16-eurosat --to laion/ViT-B-16-plus --methods theseus,bico -n 10,100
      hf-bico port user/eurosat-lora --to laion/ViT-B-16-plus
      hf-bico extract user/vit-b16-eurosat --rank 16
      hf-bico apply user/eurosat-lora --alpha 0.5 -o merged
    """
