"""The options of the commands, under the headings of their help, and what was typed read back as data.

Options of a port are built from their declaration in `hf_bico.settings`; those of one command alone stand with it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_bico.cli.completion import complete_data, complete_folder, complete_model
from hf_bico.cli.console import echo
from hf_bico.errors import OutputError, UsageError
from hf_bico.experiments.compare.cells import ALL, STANDARD, is_polished, read_row, split_method
from hf_bico.runtime.distributed import process_count
from hf_bico.runtime.limits import require_gpu_driver
from hf_bico.runtime.output import require_writable
from hf_bico.settings import AUTO, AUTO_METHODS, METHODS, OF_POLISH, OPTIONS, Settings, option_methods, read_lines
from hf_bico.utils.text import command_line, is_unicode, near, typed_path

if TYPE_CHECKING:
    from hf_bico.hub.push import PushOptions


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
TRAINING = Section("Training")
MEASURING = Section("Measuring")
RUNNING = Section("Running")
OUTPUT = Section("Output")
HUB = Section("Hub")
GENERAL = Section("General")
SECTIONS = (MODELS, SAMPLES, METHOD, TRAINING, MEASURING, RUNNING, OUTPUT, HUB, GENERAL)
"""In the order in which they are shown."""


COMMON = {
    *("target", "base", "data", "n", "per_class", "unlabelled"),
    *("method", "methods", "alpha", "polish", "no_eval", "seeds", "fine_tuned"),
    *("device", "memory", "dry_run", "format", "rank", "output", "overwrite"),
    *("push_to", "private", "token", "quiet", "as_json", "help_all"),
}
"""The options in the short help of a command that has many."""
_MANY = 30
_ALL, _HELP_ALL = "hf_bico.all_options", "Show every option and exit."


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        echo(*ctx.get_help().split("\n"))
        ctx.exit()


class _Formatter(click.HelpFormatter):
    """Breaks lines at spaces alone, not inside of options and names of methods."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, text.replace("-", _UNBROKEN)) for name, text in rows], col_max, col_spacing)

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _UNBROKEN))

    def getvalue(self) -> str:
        return super().getvalue().replace(_UNBROKEN, "-")


_UNBROKEN = "\N{NON-BREAKING HYPHEN}"


class _Context(click.Context):
    formatter_class = _Formatter


class SectionedHelp(click.Command):
    """Shows the description, the options by their sections, then the examples of the docstring.

    A command with many options shows the common ones, and all of them with --help-all.
    """

    context_class = _Context

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.has_many = len(self.params) > _MANY
        if self.has_many:
            show = GENERAL.option(
                "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help=_HELP_ALL
            )
            show(self)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.indentation():
            formatter.write_paragraph()
            formatter.write_text(self.parts()[0])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {section.title: [] for section in SECTIONS}
        short = self.has_many and _ALL not in ctx.meta
        left_out = 0
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None or not isinstance(parameter, click.Option):
                continue
            # click's own, such as --help, have no section
            section = getattr(parameter, "section", None)
            if short and section is not None and parameter.name not in COMMON:
                left_out += 1
                continue
            found[section or GENERAL.title].append(row)
        for title, rows in found.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{left_out} more options: '{ctx.command_path} --help-all'.")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        title, examples = self.parts()[1]
        if examples:
            with formatter.section(title):
                formatter.write_text(f"\b\n{examples}")
        super().format_epilog(ctx, formatter)

    def parts(self) -> tuple[str, tuple[str, str]]:
        """Return the description, and the examples with their heading."""
        text, found, rest = inspect.cleandoc(self.help or "").partition(_EXAMPLES)
        first, _, lines = rest.partition(":\n")
        return text.rstrip(), (f"Example{first}" if found else "", inspect.cleandoc(lines))


class CarryingCommand(SectionedHelp):
    """Takes one source and one target, which is given with --to or as a second name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:
            return rest
        names, target = list(ctx.params["source"]), ctx.params["target"]
        if target is None and len(names) == 2:
            target = names.pop()
            # so that the recorded command names it
            ctx.set_parameter_source("target", click.core.ParameterSource.COMMANDLINE)
        if target is None and len(names) == 1:
            raise click.MissingParameter(ctx=ctx, param=next(one for one in self.params if one.name == "target"))
        if target is None:
            ctx.fail(f"There are {len(names)} models and no --to. Name one source, and the target with --to.")
        if len(names) > 1:
            ctx.fail(
                f"With --to, all {len(names)} names are sources, and '{ctx.info_name}' takes one: "
                "run it once for each source."
            )
        ctx.params |= {"source": names[0], "target": target}
        return rest


Command = Callable[..., Any]


class Choice(click.Choice[str]):
    """One of some words; of one that is mistyped, what may have been meant is said."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return str(super().convert(value, param, ctx))
        except click.BadParameter as error:
            meant = near(str(value), self.choices)
            hint = "" if meant is None else f" Did you mean '{meant}'?"
            self.fail(f"{error.message}{hint}", param, ctx)


def setting(name: str, help: str | None = None) -> Callable[[Command], Command]:
    """Return the click option of a setting as `hf_bico.settings` declares it, maybe with another `help`."""
    known = OPTIONS[name]
    facts: dict[str, Any] = {"metavar": known.metavar, "help": help or known.help}
    if known.type is bool:
        facts["is_flag"] = True
    else:
        default = known.typed_default or _DEFAULTS[name]
        if default is not None and known.read is not read_lines:
            facts |= {"default": default, "show_default": True}
        facts["type"] = known.type if known.read is None else str
    if known.choices is not None:
        facts["type"] = Choice(known.all_choices)
        if known.metavar is not None:
            facts["help"] += f" One of: {', '.join(known.all_choices)}."
    if known.read is read_lines:
        facts["type"] = click.Path(dir_okay=False)
    if known.metavar == "FOLDER":
        facts["shell_complete"] = complete_folder
    if name == "device":
        facts["callback"] = _require_device
    names = [known.typed_as(name), *([] if known.also is None else [known.also])]
    return Section(known.section).option(*names, _parameter(name), **facts)


def _require_device(context: click.Context, parameter: click.Parameter, device: str) -> str:
    """Refuse `--device cuda` on a machine without a GPU before torch is imported; several processes check it later."""
    if process_count() == 1 and not context.resilient_parsing:
        require_gpu_driver(device)
    return device


def _parameter(name: str) -> str:
    """Return the name of a setting's click parameter: `no_eval`, which turns it off, for `evaluate`, on by default."""
    return OPTIONS[name].typed_as(name).removeprefix("--").replace("-", "_") if _DEFAULTS[name] is True else name


def settings_of(*groups: str, leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """Return the options of these groups of settings, in the order of their declaration, as one decorator."""
    names = [name for name, known in OPTIONS.items() if known.group in groups and name not in leave_out]
    return _together(*map(setting, names))


_DEFAULTS = {one.name: one.default for one in fields(Settings)}
target_option = MODELS.option(
    "--to", "--target", "target", shell_complete=complete_model, help="The pretrained model to port to."
)
source_argument = click.argument(
    "source", nargs=-1, required=True, metavar="SOURCE [TARGET]", shell_complete=complete_model
)
base_option = MODELS.option(
    "--base",
    shell_complete=complete_model,
    help="The base model of the fine-tune; by default the one named in its model card or adapter config.",
)
token_option = HUB.option("--token", help="Hub token; by default that of 'hf auth login' or HF_TOKEN.")


title_option = OUTPUT.option("--title", metavar="TEXT", help="Title of the model card; by default the models' names.")


def folder_option(help: str) -> Callable[[Command], Command]:
    """Return `-o`, where to write."""
    return OUTPUT.option("-o", "--output", "output", shell_complete=complete_folder, help=help)


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Join several options into one decorator, in the order in which they are named."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


lineage_options = _together(
    target_option,
    base_option,
    SAMPLES.option(
        "--data",
        shell_complete=complete_data,
        help="Calibration data: a Hub id, or a folder of images or of parquet, JSON, CSV or text files; by default "
        "the data set named in the source's model card.",
    ),
)

unlabelled_option = SAMPLES.option(
    "--unlabelled",
    metavar="DATA",
    shell_complete=complete_data,
    help="More samples without labels, given like --data; samples used for evaluation are left out.",
)

output_options = _together(
    GENERAL.option("-q", "--quiet", is_flag=True, help="Print only errors and warnings."),
    GENERAL.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
)

hub_options = _together(
    token_option,
    HUB.option("--allow-pickle", is_flag=True, help="Read pickled weights (tensors only) if there are no safetensors."),
)

push_options = _together(
    HUB.option(
        "--private/--public",
        "private",
        default=None,
        help="Visibility of a new repo; by default public only if everything it was made from is public on the Hub.",
    ),
    HUB.option("--create-pr", is_flag=True, help="Open a pull request on an existing repo."),
    HUB.option("--revision", help="Branch to push to; main by default."),
    HUB.option("--message", help="Commit message."),
)


def read_settings(options: dict[str, Any]) -> Settings:
    """Read what was typed into settings, which are checked before anything heavy is imported."""
    values: dict[str, Any] = {}
    for name, known in OPTIONS.items():
        if _parameter(name) not in options:
            continue
        value = options.pop(_parameter(name))
        if known.read is not None and value is not None:
            value = known.read(value, known.typed_as(name))
        if value is not None or _DEFAULTS[name] is None:  # what was not typed has its default
            values[name] = not value if _DEFAULTS[name] is True else value
    return Settings(**values, **options)


def read_methods(text: str, with_alphas: bool = False) -> list[str]:
    """Read methods as they are typed: naive,theseus,bico, or all; maybe with alphas of their own, as in bico@1."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    rows = [name if name in (ALL, STANDARD) else read_row(name) for name in names]
    for row in () if with_alphas else rows:
        name, number = split_method(row)
        if number is not None or row == STANDARD or is_polished(row):
            raise UsageError(f"'{row}' is a row of a comparison", f"use {name if name in METHODS else ALL}")
    return rows


def require_used(settings: Settings) -> None:
    """Refuse options that were typed and that neither the method nor a polish reads."""
    context, method = click.get_current_context(), settings.method
    chosen = [replace(settings, method=name) for name in (AUTO_METHODS if method == AUTO else (method,))]
    for parameter in context.command.params:
        name, option = str(parameter.name), parameter.opts[0]
        if name not in OPTIONS or not _is_typed(context, name) or any(one.reads(name) for one in chosen):
            continue
        if name in OF_POLISH:
            raise UsageError(f"{option} works only with --polish", f"add --polish, or leave {option} out")
        methods = option_methods(name)
        raise UsageError(
            f"{option} works only with {_either(methods, 'and')}, and the method is {method}",
            f"leave {option} out, or use --method {_either(methods, 'or')}",
        )


def _either(names: Sequence[str], word: str) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def _is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def read_push(options: dict[str, Any]) -> PushOptions:
    """Take the options of a push out of a port's."""
    from hf_bico.hub.push import PushOptions

    own = {name: options.pop(name) for name in ("private", "create_pr", "revision", "message", "overwrite")}
    return PushOptions(**own, force=options["force"])


def typed_line(command: str, leave_out: Sequence[str]) -> str:
    """Return the command line as it was typed, without some of its options."""
    context = click.get_current_context()
    words = ["hf-bico", command]
    for parameter in context.command.params:
        name = str(parameter.name)
        if not _is_typed(context, name) or name in leave_out:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [typed_path(value)] if isinstance(parameter, click.Argument) else [parameter.opts[0], str(value)]
    return command_line(words)


def output_folder(typed: str | None, default: str) -> Path:
    """Return the folder to write into; refuse one that cannot be made, before any work."""
    path = os.path.expanduser(typed) if typed else default
    if typed and path == typed and typed.startswith("~"):
        raise OutputError(f"the home folder in '{typed}' is not known", "write the folder without ~")
    folder = Path(path)
    if not is_unicode(path):
        raise OutputError(f"'{path}' is not valid UTF-8", "choose another folder")
    if not os.path.exists(folder):
        require_writable(folder)
    return folder


def last_name(reference: str) -> str:
    """Return the last part of a reference, without its revision, to name an output folder after."""
    return Path(reference.rstrip("/").partition("@")[0]).name or "model"
