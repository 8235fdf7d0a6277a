"""Help in sections: every option says under which heading it stands, and examples come last.

Knows how help is laid out; not what the options mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

_EXAMPLES = "\n\b\nExample"


class SectionOption(click.Option):
    """An option that knows its heading."""

    def __init__(self, *arguments: Any, section: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.section = section


@dataclass(frozen=True)
class Section:
    """A heading of a command's help; its options are made by it."""

    title: str

    def option(self, *names: str, **settings: Any) -> Callable[[Any], Any]:
        """`click.option`, under this heading."""
        return click.option(*names, cls=SectionOption, section=self.title, **settings)


MODELS = Section("Models")
SAMPLES = Section("Samples")
METHOD = Section("Method")
TRAINING = Section("Training, of fewshot and finetune")
MEASURING = Section("Measuring")
RUNNING = Section("Running")
OUTPUT = Section("Output")
HUB = Section("Hub")
GENERAL = Section("General")
SECTIONS = (MODELS, SAMPLES, METHOD, TRAINING, MEASURING, RUNNING, OUTPUT, HUB, GENERAL)
"""In the order in which they are shown."""


class SectionedHelp(click.Command):
    """Shows the description, the options by their sections, then the examples of the docstring."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.indentation():
            formatter.write_paragraph()
            formatter.write_text(self._told()[0])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {section.title: [] for section in SECTIONS}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None and isinstance(parameter, click.Option):
                # click's own, such as --help, have no section
                found[getattr(parameter, "section", GENERAL.title)].append(row)
        for title, rows in found.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        title, examples = self._told()[1]
        if examples:
            with formatter.section(title):
                formatter.write_text(f"\b\n{examples}")
        super().format_epilog(ctx, formatter)

    def _told(self) -> tuple[str, tuple[str, str]]:
        """The description, and the examples with their heading."""
        text, found, rest = inspect.cleandoc(self.help or "").partition(_EXAMPLES)
        first, _, lines = rest.partition(":\n")
        return text.rstrip(), (f"Example{first}" if found else "", inspect.cleandoc(lines))
