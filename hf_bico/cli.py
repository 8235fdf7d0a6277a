"""The command line: parse, call, print. Imports nothing heavy until a command runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_bico.errors import BicoError, UsageError
from hf_bico.settings import COMPLETIONS, DEFAULT_SAMPLES, DTYPES, FORMATS, METHOD_NAMES
from hf_bico.version import __version__

if TYPE_CHECKING:
    from hf_bico.planning import Plan
    from hf_bico.record import Record
    from hf_bico.report import Report

Command = Callable[..., Any]


def _quiet_libraries() -> None:
    """Keep the libraries' own notices and bars off the terminal: what matters is said here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import logging

    logging.getLogger().setLevel(logging.ERROR)


@contextmanager
def _edge() -> Iterator[None]:
    """Turn an error into two lines and an exit code: 2 for the command line itself, 1 for the rest."""
    try:
        _quiet_libraries()
        yield
    except BicoError as error:
        if os.environ.get("HF_BICO_DEBUG") == "1":
            raise
        click.echo(f"Error: {error.cause}", err=True)
        click.echo(f"Remedy: {error.remedy}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        click.echo("Interrupted: nothing was written.", err=True)
        sys.exit(130)


class _Commands(click.Group):
    """Commands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _output_options(command: Command) -> Command:
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(command)
    return click.option("-q", "--quiet", is_flag=True, help="Print only errors and warnings.")(command)


def _data_options(command: Command) -> Command:
    for option in reversed(
        [
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
            click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hf-bico")
def main() -> None:
    """Carry what a fine-tuned model learnt to another pretrained model, without training.

    \b
    Examples:
      hf-bico plan my-finetune --base model-A --to model-B
      hf-bico port my-finetune --base model-A --to model-B --data eurosat -n 100
      hf-bico eval my-finetune-to-model-B --data eurosat
    """


@main.command()
@click.argument("source")
@click.option("--to", "target", required=True, help="The pretrained model to carry to.")
@click.option("--base", help="The pretrained model that SOURCE was fine-tuned from.")
@click.option("--data", help="Calibration data: a folder of images or parquet files, or a parquet file.")
@click.option("--split", help="Split to calibrate on; train by default.")
@click.option("-n", "n", type=int, help=f"Calibration samples in all; {DEFAULT_SAMPLES} by default.")
@click.option("-k", "per_class", type=int, help="Calibration samples of each class, instead of -n.")
@_data_options
@click.option(
    "--method",
    default="bico",
    show_default=True,
    type=click.Choice(METHOD_NAMES),
    help="How to carry; naive adds the task vector as it is, padded by zeros, for comparison.",
)
@click.option(
    "--completion",
    default="drop",
    show_default=True,
    type=click.Choice(COMPLETIONS),
    help="What the maps do where calibration saw nothing: drop it, or complete it arbitrarily by the SVD.",
)
@click.option("--alpha", default=1.0, show_default=True, help="How much of the task vector to add.")
@click.option(
    "--format",
    "format_",
    default="full",
    show_default=True,
    type=click.Choice(FORMATS),
    help="A model that loads in the target's library, or only the change, as task_vector.safetensors.",
)
@click.option("-o", "output", help="Output folder; ./SOURCE-to-TARGET by default.")
@click.option("--no-eval", is_flag=True, help="Skip measuring target, port and source on held-out samples.")
@click.option("--overwrite", is_flag=True, help="Replace an output folder that hf-bico wrote.")
@click.option("--force", is_flag=True, help="Go on although the base looks wrong.")
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@_output_options
def port(source: str, target: str, base: str | None, data: str | None, **options: Any) -> None:
    """Carry SOURCE's task vector to another pretrained model.

    \b
    Examples:
      hf-bico port my-finetune --base model-A --to model-B --data eurosat
      hf-bico port my-finetune --base model-A --to model-B --data eurosat -k 10 -o out --json
      hf-bico port my-finetune --base model-A --to model-B --data eurosat --format delta
    """
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    output, overwrite, format_ = options.pop("output"), options.pop("overwrite"), options.pop("format_")
    if options.pop("dry_run"):
        with _edge():
            _settings(options)
        _show_plan(source, target, base, as_json, quiet, _typed("port", leave_out="dry_run"))
        return
    with _edge():
        settings = _settings(options)
        from hf_bico.checkpoints import expanded
        from hf_bico.models import find_folder

        names = find_folder(source, "the fine-tuned model").name, find_folder(target, "the target").name
        folder = expanded(output or f"{names[0]}-to-{names[1]}")
        # what takes seconds to import comes after what a typo would stop
        from hf_bico import pipeline
        from hf_bico.output import require_free
        from hf_bico.record import read_record
        from hf_bico.report import headline, is_worse

        require_free(folder, overwrite)
        with _progress(quiet or as_json) as progress:
            ported = pipeline.port(source, target, base=base, data=data, progress=progress, **settings)
            ported.save(folder, format_, overwrite)
        record = read_record(folder)
        if as_json:
            click.echo(json.dumps({"folder": str(folder), "record": json.loads(record.to_json())}))
        elif not quiet:
            _print_ported(record, ported.report, folder)
        if (as_json or quiet) and is_worse(record):
            click.echo(f"Warning: {headline(record)}", err=True)


@main.command()
@click.argument("source")
@click.option("--to", "target", required=True, help="The pretrained model to carry to.")
@click.option("--base", help="The pretrained model that SOURCE was fine-tuned from.")
@click.option("--data", help="Calibration data, for the port line at the end.")
@_output_options
def plan(source: str, target: str, base: str | None, data: str | None, as_json: bool, quiet: bool) -> None:
    """Say what a port would carry and leave behind, without reading a weight.

    \b
    Example:
      hf-bico plan my-finetune --base model-A --to model-B
    """
    command = ["hf-bico", "port", source, "--base", str(base), "--to", target, "--data", data or "DATA"]
    _show_plan(source, target, base, as_json, quiet, shlex.join(command))


@main.command("eval")
@click.argument("model")
@click.option("--data", required=True, help="A folder of images or parquet files, or a parquet file.")
@click.option("--base", help="The whole model, where MODEL is a fine-tuned vision tower or a task vector.")
@click.option("--split", help="Split to measure on; test by default, else validation, else train.")
@click.option("-n", "n", type=int, help="Samples at most; all of the split by default.")
@_data_options
@_output_options
def evaluate(model: str, data: str, base: str | None, n: int | None, **options: Any) -> None:
    """Measure the zero-shot accuracy of MODEL.

    \b
    Examples:
      hf-bico eval my-finetune-to-model-B --data eurosat
      hf-bico eval my-delta --base model-B --data eurosat
    """
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    with _edge():
        settings = _settings(options)
        from hf_bico.evaluation import evaluate_model

        result = evaluate_model(model, data, base=base, n=n, **settings)
        if as_json:
            click.echo(json.dumps(vars(result)))
        elif not quiet:
            click.echo(
                f"{result.metric} {result.value:.1%} ({result.n} samples of split {result.split} of {result.data})"
            )


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """Options as `Settings` takes them: files read, and checked before anything heavy is imported."""
    from hf_bico.settings import Settings

    if "no_eval" in options:
        options["evaluate"] = not options.pop("no_eval")
    for name in ("class_names", "templates"):
        file = options.pop(name)
        if file is not None:
            options[name] = _lines(file, name.replace("_", "-"))
    Settings(**options)
    return options


def _lines(file: str, option: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--{option}: '{file}' cannot be read", "give a text file with one entry a line") from error
    kept = [line for line in lines if line]
    if not kept:
        raise UsageError(f"--{option}: '{file}' is empty", "give a text file with one entry a line")
    return kept


def _typed(command: str, leave_out: str) -> str:
    """The command line as it was typed, without one of its options."""
    context = click.get_current_context()
    words = ["hf-bico", command]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params[str(parameter.name)]
        if name == leave_out or context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        words += [] if isinstance(parameter, click.Argument) else [parameter.opts[0]]
        words += [] if value is True else [str(value)]
    return shlex.join(words)


def _show_plan(source: str, target: str, base: str | None, as_json: bool, quiet: bool, command: str) -> None:
    with _edge():
        from hf_bico import planning

        planned = planning.plan(source, target, base=base)
        if as_json:
            click.echo(json.dumps({**planned.as_dict(), "command": command}))
        elif not quiet:
            _print_plan(planned, command)


def _print_plan(planned: Plan, command: str) -> None:
    from collections import Counter

    lineage = planned.lineage
    click.echo(f"source  {lineage.source.name} ({lineage.source.family.name}), fine-tuned from {lineage.base.name}")
    click.echo(f"target  {lineage.target.name} ({lineage.target.family.name})")
    click.echo(
        f"blocks  {lineage.base.layout.blocks} -> {lineage.target.layout.blocks}, taken from {list(planned.blocks)}"
    )
    grids = [" x ".join(map(str, model.layout.tokens.grid)) for model in (lineage.base, lineage.target)]
    click.echo(f"tokens  {grids[0]} -> {grids[1]} patches")
    roles = Counter(pair.target.role for pair in planned.pairs)
    click.echo(f"carried {len(planned.pairs)} sites: " + ", ".join(f"{role} x{count}" for role, count in roles.items()))
    reasons = Counter(planned.left.values())
    click.echo("left    " + (", ".join(f"{reason} ({count})" for reason, count in reasons.items()) or "nothing"))
    if planned.missing:
        click.echo(f"missing {len(planned.missing)} tensors of the base are not in the source: taken as unchanged")
    if planned.extra:
        click.echo(
            f"extra   {len(planned.extra)} tensors of the source are not in the base: {', '.join(planned.extra[:3])}"
        )
    verdict = "fits" if planned.fits else "does NOT fit"
    click.echo(f"memory  about {_size(planned.memory_bytes)} and a batch's activations: {verdict} this machine")
    click.echo(f"writes  {_size(planned.output_bytes)} as a full model")
    click.echo(f"\nNext: {command}")


def _size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _print_ported(record: Record, report: Report, folder: Path) -> None:
    from hf_bico.report import VALUE_NAMES, format_table, headline

    result = headline(record)
    if result:
        click.echo(result + "\n")
        first = record.evaluation[0]
        rows = [("model", first.metric)]
        rows += [(VALUE_NAMES[entry.model], f"{entry.value:.1%}") for entry in record.evaluation]
        click.echo(format_table(rows))
        click.echo(f"({first.n} samples of split {first.split} of {first.data})\n")
    click.echo(report.table())
    click.echo(f"\n{report.summary()}")
    for notice in record.notices:
        click.echo(f"Notice: {notice}")
    seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in record.run.seconds.items() if value >= 0.05)
    click.echo(f"seconds: {seconds}")
    click.echo(f"\nWritten to {folder}")


@contextmanager
def _progress(off: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Bars on stderr when it is a terminal."""
    if off or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        yield show
