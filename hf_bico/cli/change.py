"""Defines the commands of task arithmetic, which need no calibration: extract and apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hf_bico.cli.completion import complete_model
from hf_bico.cli.console import echo, echo_json, print_change
from hf_bico.cli.exit import exit_on_error
from hf_bico.cli.options import (
    METHOD,
    MODELS,
    OUTPUT,
    Choice,
    SectionedHelp,
    base_option,
    folder_option,
    hub_options,
    last_name,
    output_folder,
    output_options,
    setting,
)
from hf_bico.cli.progress import progress_bars
from hf_bico.errors import UsageError
from hf_bico.reports.record import read_change_record
from hf_bico.runtime.output import reserved
from hf_bico.settings import FORMATS, read_rank, require_rank
from hf_bico.utils.text import command_line, typed_path

overwrite_option = OUTPUT.option("--overwrite", is_flag=True, help="Replace an output folder that hf-bico wrote.")


@click.command(cls=SectionedHelp, short_help="Extract a fine-tune's change as a PEFT adapter.")
@click.argument("finetuned", shell_complete=complete_model)
@base_option
@setting("rank")
@OUTPUT.option("--everything", is_flag=True, help="Include norms, embeddings and other small tensors, stored in full.")
@setting("device")
@folder_option("Output folder; ./FINETUNED-adapter by default.")
@overwrite_option
@hub_options
@output_options
def extract(finetuned: str, rank: str | None, output: str | None, **options: Any) -> None:
    """Extract the difference between FINETUNED and its base as a PEFT adapter.

    \b
    Examples:
      hf-bico extract user/vit-b16-eurosat --rank 16
      hf-bico extract my-finetune --base model-A --rank 0.95 -o my-lora
    """
    with exit_on_error():
        adapter_rank = None if rank is None else read_rank(rank)
        folder = output_folder(output, f"{last_name(finetuned)}-adapter")
        _run("extract", finetuned, folder, rank=adapter_rank, **options)


@click.command(cls=SectionedHelp, short_help="Add adapters or task vectors to a model.")
@click.argument("vectors", nargs=-1, required=True, shell_complete=complete_model)
@MODELS.option(
    "--to",
    "--target",
    "to",
    shell_complete=complete_model,
    help="The model to change; by default the base of the first VECTOR.",
)
@METHOD.option("--alpha", default=1.0, show_default=True, help="How much of the sum to add.")
@METHOD.option("--weights", help="Comma-separated weights, one per VECTOR, such as 0.7,0.3; by default 1 each.")
@OUTPUT.option(
    "--format",
    default="full",
    show_default=True,
    type=Choice(FORMATS),
    help="Write a full model, a PEFT adapter, or only the change.",
)
@setting("rank")
@setting("device")
@folder_option("Output folder; ./VECTOR-applied by default.")
@overwrite_option
@hub_options
@output_options
def apply(vectors: tuple[str, ...], rank: str | None, weights: str | None, output: str | None, **options: Any) -> None:
    """Add adapters or task vectors to a model; use it to rescale a port without calibrating again.

    VECTORS are adapters, or what 'port' writes with --format adapter or --format delta. For a full model, run 'extract'
    first.

    \b
    Examples:
      hf-bico apply my-lora -o merged
      hf-bico apply user/lora-a user/lora-b --weights 0.7,0.3 --alpha 0.8 -o merged
      hf-bico apply my-ported-lora --alpha 0.5 --format adapter -o halved
    """
    with exit_on_error():
        adapter_rank = None if rank is None else read_rank(rank)
        if require_rank(adapter_rank) is not None and options["format"] != "adapter":
            raise UsageError(f"--rank was given with --format {options['format']}", "use --rank with --format adapter")
        factors = None if weights is None else _numbers(weights, len(vectors))
        folder = output_folder(output, f"{last_name(vectors[0])}-applied")
        _run("apply", vectors, folder, weights=factors, rank=adapter_rank, **options)


def _numbers(text: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise UsageError(f"--weights is '{text}'", f"give {count} comma-separated numbers, one per VECTOR")
    return numbers


def _run(job: str, given: Any, folder: Path, overwrite: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Run a job of task arithmetic, save its result and print what it is."""
    with reserved(folder, overwrite), progress_bars(quiet or as_json) as progress:
        from hf_bico.porting import task_arithmetic

        getattr(task_arithmetic, job)(given, progress=progress, **options).save(folder, overwrite)
    record = read_change_record(folder)
    if as_json:
        echo_json({"folder": str(folder), "record": json.loads(record.to_json())})
    elif quiet:
        for notice in record.notices:
            echo(f"Notice: {notice}", err=True)
    else:
        print_change(record, folder)
        echo(f"Next: {command_line(['hf-bico', 'push', typed_path(folder), 'REPO'])}")
