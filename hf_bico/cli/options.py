"""Options by sections, from the table in settings.

Help in sections: every option says under which heading it stands, and examples come last.

Knows how help is laid out; not what the options mean.

The command line's options, by their sections, and what was typed read back as data. Runs nothing.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_bico.cli.completion import complete_folder, complete_model
from hf_bico.errors import UsageError
from hf_bico.settings import (
    COMPLETIONS,
    DEFAULT_MEASURED,
    DEVICE_MAPS,
    DTYPES,
    EVALUATIONS,
    FORMATS,
    LABELS,
    LAYERS,
    METHOD_NAMES,
    OBJECTIVES,
    OPTION_METHODS,
    SAMPLINGS,
    SIGNS,
    Settings,
    read_layers,
    read_rank,
    read_size,
)
from hf_bico.utils.text import near

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


target_option = MODELS.option(
    "--to", "target", required=True, shell_complete=complete_model, help="The pretrained model to carry to."
)
base_option = MODELS.option(
    "--base",
    shell_complete=complete_model,
    help="The model that was fine-tuned; by default what card or configuration say.",
)
device_option = RUNNING.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
format_option = OUTPUT.option(
    "--format",
    type=Choice(FORMATS),
    help="A model, a PEFT adapter, or only the change; by default a LoRA gives an adapter, anything else a model.",
)
rank_option = OUTPUT.option(
    "--rank",
    help="Of an adapter: a whole number, or a share of each layer's energy such as 0.95; by default a LoRA keeps its "
    "rank and anything else is exact.",
)
token_option = HUB.option("--token", help="Hub token; by default the one of 'hf auth login' or HF_TOKEN.")
CALIBRATION_DATA = (
    "Calibration data: a Hub id, or a folder of images or of parquet, JSON, CSV or text files; by default what the "
    "card says."
)


def folder_option(help: str) -> Callable[[Command], Command]:
    """`-o`, where to write."""
    return OUTPUT.option("-o", "output", shell_complete=complete_folder, help=help)


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order in which they are named."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


output_options = _together(
    GENERAL.option("-q", "--quiet", is_flag=True, help="Print only errors and warnings."),
    GENERAL.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
)

hub_options = _together(
    token_option,
    HUB.option("--allow-pickle", is_flag=True, help="Read pickled weights, tensors alone, where nothing else is."),
)

push_options = _together(
    HUB.option(
        "--private/--public",
        "private",
        default=None,
        help="Visibility of a new repo; by default private unless all it was made from is public on the Hub.",
    ),
    HUB.option("--create-pr", is_flag=True, help="Open a pull request on an existing repo."),
    HUB.option("--revision", help="Branch to push to; main by default."),
    HUB.option("--message", help="Commit message."),
)

_batch_option = RUNNING.option(
    "--batch-size",
    type=int,
    help="Samples at a time; by default as many as are quick. Halved by itself when the GPU's memory runs out.",
)
_memory_option = RUNNING.option(
    "--memory", metavar="SIZE", help="Most memory of the device to use, such as 8GB; by default all."
)
memory_options = _together(_batch_option, _memory_option)
limit_options = _together(
    _memory_option,
    RUNNING.option(
        "--device-map",
        type=Choice(DEVICE_MAPS),
        help="Spread models that are too large for one GPU over all and the main memory, by accelerate.",
    ),
)

dtype_option = RUNNING.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=Choice(DTYPES),
    help="Precision to run the models in; auto is float32.",
)
eval_samples_option = MEASURING.option(
    "--eval-samples",
    default=DEFAULT_MEASURED,
    show_default=True,
    metavar="N",
    help="Held-out samples to measure on, at most.",
)
training_options = _together(
    TRAINING.option("--learning-rate", default=1e-5, show_default=True, help="Of fewshot and finetune."),
    TRAINING.option("--weight-decay", default=0.1, show_default=True, help="Of fewshot and finetune."),
    TRAINING.option("--train-steps", default=2000, show_default=True, help="Of finetune."),
    TRAINING.option("--train-batch", default=128, show_default=True, help="Of finetune."),
    TRAINING.option("--warmup", default=200, show_default=True, help="Steps of finetune."),
)

data_options = _together(
    SAMPLES.option("--config", help="Configuration of the data set, where it has several."),
    SAMPLES.option(
        "--max-download",
        default="2GB",
        show_default=True,
        help="Most to download of a data set; large ones are sampled.",
    ),
    SAMPLES.option("--image-column", help="The column with the images, when it cannot be found by its type."),
    SAMPLES.option("--label-column", help="The column with the labels, when it cannot be found by its type."),
    SAMPLES.option(
        "--text-column",
        metavar="COLUMN[,COLUMN]",
        help="The column with the texts, or the two of a pair, when they cannot be found by their names; "
        "prompt=COLUMN,completion=COLUMN of a prompt and its answer.",
    ),
    SAMPLES.option("--caption-column", help="The column with the images' captions, where there are any."),
    SAMPLES.option(
        "--max-length",
        type=int,
        metavar="TOKENS",
        help="Most tokens of a text; by default what the tokenizer says, and at most 2048.",
    ),
    SAMPLES.option("--class-names", type=click.Path(dir_okay=False), help="File with one class name a line."),
    SAMPLES.option("--templates", type=click.Path(dir_okay=False), help="File with one prompt a line, {} in it."),
    SAMPLES.option("--seed", default=0, show_default=True, help="Seed of the sampling."),
    _batch_option,
    device_option,
    dtype_option,
)

aligning_options = _together(
    METHOD.option(
        "--completion",
        default="drop",
        show_default=True,
        type=Choice(COMPLETIONS),
        help="What the maps do where calibration saw nothing: drop it, or complete it arbitrarily by the SVD.",
    ),
    METHOD.option("--alpha", default=1.0, show_default=True, help="How much of the task vector to add."),
    METHOD.option(
        "--layers",
        default="index",
        show_default=True,
        metavar="index|similarity|LIST",
        help="Which source block each target block takes; a list such as 0,0,1,1 says it for each.",
    ),
    SAMPLES.option(
        "--sampling",
        default="random",
        show_default=True,
        type=Choice(SAMPLINGS),
        metavar="SAMPLING",
        help=f"How calibration samples are chosen. One of: {', '.join(SAMPLINGS)}.",
    ),
    SAMPLES.option(
        "--labels",
        default="auto",
        show_default=True,
        type=Choice(LABELS),
        help="The data set's, or what the fine-tuned source predicts (pseudo); auto: the former if any.",
    ),
    SAMPLES.option(
        "--augment",
        type=int,
        metavar="COPIES",
        help="Altered copies of each sample; by default 7 for bico-path below 50 samples, else none.",
    ),
    METHOD.option(
        "--objective",
        default="auto",
        show_default=True,
        type=Choice(OBJECTIVES),
        metavar="OBJECTIVE",
        help=f"The loss whose gradients are lined up; auto: what the models are made for. One of: "
        f"{', '.join(OBJECTIVES)}.",
    ),
    METHOD.option("--path-steps", default=2, show_default=True, help="Steps of bico-path."),
    METHOD.option(
        "--signs",
        default="mean",
        show_default=True,
        type=Choice(SIGNS),
        help="gradfix: signs of the mean gradient, or of the majority of the samples' gradients.",
    ),
)

method_options = _together(
    aligning_options,
    training_options,
    eval_samples_option,
    MEASURING.option(
        "--evaluation",
        default="auto",
        show_default=True,
        type=Choice(EVALUATIONS),
        help="How models are measured: zero-shot, as the objective asks, or by a probe, a linear classifier fitted to "
        "the calibration samples; auto: a probe for text-to-text, else zero-shot.",
    ),
)


def read_settings(options: dict[str, Any]) -> Settings:
    """The settings: files read, and checked before anything heavy is imported."""
    if options.get("rank") is not None:
        options["rank"] = read_rank(options["rank"])
    if "layers" in options:
        options["layers"] = _layers(options["layers"])
    for name in ("max_download", "memory"):
        if options.get(name) is not None:
            options[name] = read_size(options[name], f"--{name.replace('_', '-')}")
    if "no_eval" in options:
        options["evaluate"] = not options.pop("no_eval")
    for name in ("class_names", "templates"):
        file = options.pop(name)
        if file is not None:
            options[name] = _lines(file, name.replace("_", "-"))
    return Settings(**options)


def read_methods(text: str) -> list[str]:
    """Methods as they are typed: naive,theseus,bico; or all."""
    names, known = [name.strip() for name in text.split(",") if name.strip()], ("all", *METHOD_NAMES)
    for name in names:
        if name not in known:
            meant = near(name, known)
            question = "" if meant is None else f"did you mean '{meant}'? Else "
            raise UsageError(f"there is no method '{name}'", f"{question}use some of: {', '.join(known)}")
    return names


def require_used(method: str) -> None:
    """Refuse what was typed and the method does not look at: it would change nothing."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        methods = OPTION_METHODS.get(name, ())
        if methods and method not in methods and _is_typed(context, name):
            option = parameter.opts[0]
            raise UsageError(
                f"{option} is of {_either(methods, 'and')}, and the method is {method}",
                f"leave {option} out, or use --method {_either(methods, 'or')}",
            )


def _either(names: Sequence[str], word: str) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def _is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _layers(text: str) -> str | tuple[int, ...]:
    meant = near(text, LAYERS)
    if text not in LAYERS and meant is not None:
        raise UsageError(f"--layers is '{text}'", f"did you mean '{meant}'?")
    return read_layers(text)


def _lines(file: str, option: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--{option}: '{file}' cannot be read", "give a text file with one entry a line") from error
    kept = [line for line in lines if line]
    if not kept:
        raise UsageError(f"--{option}: '{file}' is empty", "give a text file with one entry a line")
    return kept


def read_push(options: dict[str, Any]) -> PushOptions:
    """The options of a push, taken out of a port's."""
    from hf_bico.hub.push import PushOptions

    own = {name: options.pop(name) for name in ("private", "create_pr", "revision", "message", "overwrite")}
    return PushOptions(**own, force=options["force"])


def typed_line(command: str, leave_out: Sequence[str]) -> str:
    """The command line as it was typed, without some of its options."""
    context = click.get_current_context()
    words = ["hf-bico", command]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params[str(parameter.name)]
        if not _is_typed(context, name) or name in leave_out:
            continue
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [str(value)] if isinstance(parameter, click.Argument) else [parameter.opts[0], str(value)]
    return shlex.join(words)


def last_name(reference: str) -> str:
    """The last part of a reference, without its revision: what to call an output folder after."""
    return Path(reference.rstrip("/").partition("@")[0]).name or "model"
