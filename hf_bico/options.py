"""The command line's options, in groups, and what was typed read back as data. Runs nothing."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_bico.errors import UsageError
from hf_bico.settings import (
    COMPLETIONS,
    DTYPES,
    EVALUATIONS,
    FORMATS,
    LABELS,
    SAMPLINGS,
    SIGNS,
    Settings,
    read_layers,
    read_rank,
)
from hf_bico.sizes import read_size

if TYPE_CHECKING:
    from hf_bico.push_checks import PushOptions

Command = Callable[..., Any]

target_option = click.option("--to", "target", required=True, help="The pretrained model to carry to.")
base_option = click.option("--base", help="The model that was fine-tuned; by default what card or configuration say.")
device_option = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
format_option = click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="A model, a PEFT adapter, or only the change; by default a LoRA gives an adapter, anything else a model.",
)
rank_option = click.option(
    "--rank",
    help="Of an adapter: a whole number, or a share of each layer's energy such as 0.95; by default a LoRA keeps its "
    "rank and anything else is exact.",
)
CALIBRATION_DATA = "Calibration data: a Hub id, a folder of images or parquet files; by default what the card says."


def output_options(command: Command) -> Command:
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(command)
    return click.option("-q", "--quiet", is_flag=True, help="Print only errors and warnings.")(command)


def hub_options(command: Command) -> Command:
    for option in (
        click.option(
            "--allow-pickle", is_flag=True, help="Read pickled weights, tensors alone, where nothing else is."
        ),
        click.option("--token", help="Hub token; by default the one of 'hf auth login' or HF_TOKEN."),
    ):
        command = option(command)
    return command


def push_options(command: Command) -> Command:
    for option in reversed(
        [
            click.option(
                "--private/--public",
                "private",
                default=None,
                help="Visibility of a new repo; by default private unless all it was made from is public on the Hub.",
            ),
            click.option("--create-pr", is_flag=True, help="Open a pull request on an existing repo."),
            click.option("--revision", help="Branch to push to; main by default."),
            click.option("--message", help="Commit message."),
        ]
    ):
        command = option(command)
    return command


def data_options(command: Command) -> Command:
    for option in reversed(
        [
            click.option("--config", help="Configuration of the data set, where it has several."),
            click.option(
                "--max-download",
                default="2GB",
                show_default=True,
                help="Most to download of a data set; large ones are sampled.",
            ),
            click.option("--image-column", help="The column with the images, when it cannot be found by its type."),
            click.option("--label-column", help="The column with the labels, when it cannot be found by its type."),
            click.option("--class-names", type=click.Path(dir_okay=False), help="File with one class name a line."),
            click.option("--templates", type=click.Path(dir_okay=False), help="File with one prompt a line, {} in it."),
            click.option("--seed", default=0, show_default=True, help="Seed of the sampling."),
            click.option(
                "--batch-size",
                default=32,
                show_default=True,
                help="Samples at a time; halved by itself when the GPU's memory runs out.",
            ),
            device_option,
            click.option(
                "--dtype",
                default="auto",
                show_default=True,
                type=click.Choice(DTYPES),
                help="Precision to run the models in; auto is float32.",
            ),
        ]
    ):
        command = option(command)
    return command


def method_options(command: Command) -> Command:
    """How to carry, and what with."""
    for option in reversed(
        [
            click.option(
                "--completion",
                default="drop",
                show_default=True,
                type=click.Choice(COMPLETIONS),
                help="What the maps do where calibration saw nothing: drop it, or complete it arbitrarily by the SVD.",
            ),
            click.option("--alpha", default=1.0, show_default=True, help="How much of the task vector to add."),
            click.option(
                "--layers",
                default="index",
                show_default=True,
                metavar="index|similarity|LIST",
                help="Which source block each target block takes; a list such as 0,0,1,1 says it for each.",
            ),
            click.option(
                "--sampling",
                default="random",
                show_default=True,
                type=click.Choice(SAMPLINGS),
                help="How calibration samples are chosen.",
            ),
            click.option(
                "--labels",
                default="auto",
                show_default=True,
                type=click.Choice(LABELS),
                help="The data set's, or what the fine-tuned source predicts (pseudo); auto: the former if any.",
            ),
            click.option(
                "--augment",
                type=int,
                metavar="COPIES",
                help="Altered copies of each sample; by default 7 for bico-path below 50 samples, else none.",
            ),
            click.option("--path-steps", default=2, show_default=True, help="Steps of bico-path."),
            click.option(
                "--signs",
                default="mean",
                show_default=True,
                type=click.Choice(SIGNS),
                help="gradfix: signs of the mean gradient, or of the majority of the samples' gradients.",
            ),
            click.option("--learning-rate", default=1e-5, show_default=True, help="Of fewshot and finetune."),
            click.option("--weight-decay", default=0.1, show_default=True, help="Of fewshot and finetune."),
            click.option("--train-steps", default=2000, show_default=True, help="Of finetune."),
            click.option("--train-batch", default=128, show_default=True, help="Of finetune."),
            click.option("--warmup", default=200, show_default=True, help="Steps of finetune."),
            click.option(
                "--evaluation",
                default="zero-shot",
                show_default=True,
                type=click.Choice(EVALUATIONS),
                help="How models are measured; a probe is a linear classifier fitted to the calibration samples.",
            ),
        ]
    ):
        command = option(command)
    return command


def read_settings(options: dict[str, Any]) -> Settings:
    """The settings: files read, and checked before anything heavy is imported."""
    if options.get("rank") is not None:
        options["rank"] = read_rank(options["rank"])
    if "layers" in options:
        options["layers"] = read_layers(options["layers"])
    options["max_download"] = read_size(options["max_download"], "--max-download")
    if "no_eval" in options:
        options["evaluate"] = not options.pop("no_eval")
    for name in ("class_names", "templates"):
        file = options.pop(name)
        if file is not None:
            options[name] = _lines(file, name.replace("_", "-"))
    return Settings(**options)


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
    from hf_bico.push_checks import PushOptions

    own = {name: options.pop(name) for name in ("private", "create_pr", "revision", "message", "overwrite")}
    return PushOptions(**own, force=options["force"])


def typed_line(command: str, leave_out: Sequence[str]) -> str:
    """The command line as it was typed, without some of its options."""
    context = click.get_current_context()
    words = ["hf-bico", command]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params[str(parameter.name)]
        typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not typed or name in leave_out:
            continue
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [str(value)] if isinstance(parameter, click.Argument) else [parameter.opts[0], str(value)]
    return shlex.join(words)
