"""Defines the commands that carry a task vector: port, plan and rerun.

A port that was stopped before or during its push is recognised by a digest of its command line, and only pushed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from hf_bico.cli import console
from hf_bico.cli.completion import complete_model
from hf_bico.cli.exit import HELD_BACK, Ending, exit_on_error, finish_alone, require_no_device_number
from hf_bico.cli.options import (
    HUB,
    OUTPUT,
    RUNNING,
    CarryingCommand,
    SectionedHelp,
    folder_option,
    hub_options,
    last_name,
    lineage_options,
    output_folder,
    output_options,
    push_options,
    read_push,
    read_settings,
    require_used,
    setting,
    settings_of,
    source_argument,
    title_option,
    typed_line,
    unlabelled_option,
)
from hf_bico.cli.progress import PORT_SHARES, progress_bars, progress_bars_and_text, status
from hf_bico.errors import LineageError
from hf_bico.models.families.base import FIT_INSTEAD
from hf_bico.reports.record import ModelRecord, Record, read_record
from hf_bico.reports.results import headline, is_worse
from hf_bico.reports.verdict import held_back_sentence
from hf_bico.runtime.distributed import is_first_process
from hf_bico.runtime.output import RECORD_FILE, atomic_folder, require_apart, require_writable, reserved
from hf_bico.settings import AUTO, Settings, method_info
from hf_bico.utils.text import command_line, typed_path

if TYPE_CHECKING:
    from hf_bico.hub.client import Hub
    from hf_bico.hub.push import PushOptions
    from hf_bico.models.adapters.adapter import Adapter
    from hf_bico.models.model import Model
    from hf_bico.porting.plan import Plan
    from hf_bico.porting.result import Ported

_REFUSABLE = ("readout", "polish", "control", "probe", "tower", "special_tokens", "prompts")
"""The options that some models refuse, whatever the method."""
_DIGEST_FILE = ".hf-bico-line"
"""Hidden: it is not pushed."""


@click.command(cls=CarryingCommand, short_help="Port a fine-tune to another pretrained model.")
@source_argument
@lineage_options
@unlabelled_option
@settings_of("port", "data", "limits", "aligning", "training", "measuring")
@folder_option("Output folder; ./SOURCE-to-TARGET by default.")
@HUB.option("--push-to", metavar="REPO", help="Push the result to this Hub repo.")
@push_options
@HUB.option("--target-id", metavar="REPO", help="Hub id of a target that is a local folder, for the model card.")
@title_option
@OUTPUT.option("--overwrite", is_flag=True, help="Replace an existing output folder, and the files of a Hub repo.")
@RUNNING.option("--dry-run", is_flag=True, help="Show the plan and exit.")
@hub_options
@output_options
def port(source: str, target: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Port SOURCE, a fine-tuned model or an adapter, to the pretrained model TARGET.

    Every model and data set is a Hub id or a folder. TARGET can also be given with --to.

    \b
    Examples:
      hf-bico port user/vit-b16-eurosat --to laion/ViT-B-16-plus
      hf-bico port user/vit-b16-eurosat --to laion/ViT-B-16-plus --push-to user/vit-b16-plus-eurosat
      hf-bico port my-finetune --base model-A --to model-B --data eurosat -k 10 -o out --json
      hf-bico port user/my-lora --to model-B
      hf-bico port my-finetune --base model-A --to model-B --data eurosat --format adapter --rank 16
    """
    where = {name: options.pop(name) for name in ("base", "data", "unlabelled", "target_id", "allow_pickle")}
    token, output, push_to, dry_run = (options.pop(name) for name in ("token", "output", "push_to", "dry_run"))
    title = options.pop("title")
    with exit_on_error() as ending:
        require_no_device_number(options["device"])
        push = read_push(options)
        settings = read_settings(options)
        require_used(settings)
        with status(as_json or quiet or not is_first_process(), "reading configurations"):
            from hf_bico.hub.client import Hub
            from hf_bico.hub.push import require_hidden, require_pushable
            from hf_bico.porting.planned_tokens import with_tokenizers
            from hf_bico.porting.planner import plan_port

        hub = where["hub"] = Hub(token)
        command = typed_line("port", leave_out=("dry_run", "token", "as_json", "quiet"))

        def planned_port() -> Plan:
            with status(as_json or quiet or not is_first_process(), "reading configurations"):
                return plan_port(source, target, **where)

        if dry_run:
            planned, needs_data = _plan_for_settings(planned_port(), settings)
            planned = with_tokenizers(planned, settings, hub)
            _print_plan(planned, as_json, quiet, command, needs_data)
            return
        if not is_first_process():  # which prints, writes and pushes
            push_to, quiet = None, True
        folder = output_folder(output, f"{last_name(source)}-to-{last_name(target)}")
        digest = None if push_to is None or push.overwrite else _written_digest(folder)
        if push_to is not None and digest is None:
            push_to = require_pushable(push_to, push, hub)
        planned = planned_port()
        if digest is not None and digest == _digest(command, planned.lineage.models):
            ending.interrupted = f"the result is in {folder}"
            if not (as_json or quiet):
                console.echo(f"This port is in {folder} already: it is pushed as it is.")
        else:
            if push_to is not None:
                require_hidden(push_to, push, planned.lineage.restricted, hub)
            result = planned.in_format(settings.format, settings.rank)
            require_apart(folder, None if result.format == "full" else planned.lineage.target.folder)
            with reserved(folder, push.overwrite, result.output_bytes) if is_first_process() else nullcontext():
                destination = _Destination(folder, push_to, push, command, title)
                ported = _port(planned, settings, hub, destination, ending, silent=quiet or as_json)
            if ported.held_back:
                _end_held_back(ported.record, as_json, quiet)
        if is_first_process():
            _publish(folder, push_to, push, hub, as_json, quiet)


@dataclass(frozen=True)
class _Destination:
    """Output folder of a port, the repo to push it to, and the card's title; `command` is its command line."""

    folder: Path
    repo: str | None
    push: PushOptions
    command: str
    title: str | None = None

    def write(self, ported: Ported) -> None:
        from hf_bico.porting.result import CardNames

        with atomic_folder(self.folder, self.push.overwrite) as scratch:
            ported.write(scratch, named=CardNames(self.repo, self.push.revision, self.title))
            if self.repo is not None:
                digest = _digest(self.command, ported.record.models)
                (scratch / _DIGEST_FILE).write_text(f"{digest}\n", encoding="ascii")


def _digest(command: str, models: Sequence[Model | Adapter | ModelRecord]) -> str:
    """Return what tells one port from another: a digest of its command line and of the models' exact versions."""
    versions = [model.commit or sorted(model.sha256.items()) for model in models]
    return hashlib.sha256(json.dumps([command, *versions]).encode()).hexdigest()


def _written_digest(folder: Path) -> str | None:
    file = folder / _DIGEST_FILE
    if not file.is_file() or not (folder / RECORD_FILE).is_file():
        return None
    return file.read_text(encoding="ascii", errors="replace").strip()


def _port(
    planned: Plan, settings: Settings, hub: Hub, destination: _Destination, ending: Ending, silent: bool
) -> Ported:
    own_checkpoint = settings.trains and settings.checkpoint is None
    if own_checkpoint:  # so that a long training can be resumed
        settings = replace(settings, checkpoint=f"{destination.folder}.training")
        ending.interrupted = "the same command resumes the training"
    if settings.checkpoint is not None and not os.path.exists(settings.checkpoint):
        require_writable(Path(settings.checkpoint))
    from hf_bico.porting.planner import draw_early

    with progress_bars_and_text(silent, PORT_SHARES) as (progress, write):
        early = draw_early(planned, settings, hub)
        progress("import", 0, 1)
        from hf_bico.porting.port import run_port  # slow: it comes after the checks of what was typed

        progress("import", 1, 1)
        on_outlook = partial(console.print_outlook, write=write)
        ported = run_port(planned, settings, hub, progress, on_outlook, early)
        if not is_first_process():
            return ported
        finish_alone()
        if not ported.held_back:
            destination.write(ported)
    if own_checkpoint:
        from hf_bico.alignment.methods.saved_training import remove_checkpoint

        remove_checkpoint(Path(str(settings.checkpoint)))
    if ported.held_back:
        return ported
    ending.interrupted = f"the result is in {destination.folder}"
    if not silent:
        pushing = destination.repo is not None
        with suppress(BrokenPipeError) if pushing else nullcontext():  # it is pushed all the same
            console.print_ported(read_record(destination.folder), ported.report, destination.folder, pushing=pushing)
    return ported


def _end_held_back(record: Record, as_json: bool, quiet: bool) -> NoReturn:
    """Report a port that the samples spoke against, which is a result and no error, and exit with its own code."""
    if is_first_process():
        if as_json:
            plain = json.loads(record.to_json())
            method = plain["method"]
            figures = {name: method.get(name) for name in ("alpha", "curve", "veto", "candidates") if name in method}
            console.echo_json({"held_back": True, "reason": held_back_sentence(record), **figures, "record": plain})
        else:
            console.print_held_back(record, quiet)
    sys.exit(HELD_BACK)


def _publish(folder: Path, push_to: str | None, push: PushOptions, hub: Hub, as_json: bool, quiet: bool) -> None:
    """Print warnings, push the folder if a repo was given, and print where it is."""
    from hf_bico.porting.publish import push_folder

    record = read_record(folder)
    if as_json or quiet:
        warnings = [f"Warning: {headline(record)}"] if is_worse(record) else []
        warnings += [f"Notice: {notice}" for notice in record.notices if not as_json]
        for warning in warnings:
            console.echo(warning, err=True)
    pushed = None if push_to is None else push_folder(folder, push_to, push, hub)
    if as_json:
        content = {"folder": str(folder), "held_back": False, "record": json.loads(record.to_json())}
        console.echo_json(content if pushed is None else {**content, "pushed": vars(pushed)})
    elif pushed is not None and not quiet:
        console.print_pushed(pushed)


@click.command(cls=CarryingCommand, short_help="Show what a port would do, without downloading weights.")
@source_argument
@lineage_options
@setting("format")
@setting("rank")
@setting("batch_size")
@setting("memory")
@hub_options
@output_options
def plan(source: str, target: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Show what a port would do and what it would leave behind, without downloading or reading weights.

    \b
    Examples:
      hf-bico plan user/vit-b16-eurosat --to laion/ViT-B-16-plus
      hf-bico plan my-finetune --base model-A --to model-B --memory 8GB
    """
    command = ["hf-bico", "port", typed_path(source)]
    values = {"to": target, **options}
    for name in ("base", "to", "data", "format", "rank", "memory", "batch_size"):
        command += [f"--{name.replace('_', '-')}", str(values[name])] if values[name] else []
    command += ["--allow-pickle"] if options["allow_pickle"] else []
    with exit_on_error():
        from hf_bico.porting.planner import plan as make_plan

        where = {name: options.pop(name) for name in ("base", "data", "allow_pickle", "token")}
        settings = read_settings(options)
        wanted = {name: getattr(settings, name) for name in ("format", "rank", "memory", "batch_size")}
        planned = make_plan(source, target, **where, **wanted)
        _print_plan(planned, as_json, quiet, command_line(command))


@click.command(cls=SectionedHelp, short_help="Repeat a port from its record and compare the weights.")
@click.argument("ported", shell_complete=complete_model)
@folder_option("Keep the result in this folder.")
@OUTPUT.option("--overwrite", is_flag=True, help="Replace an output folder that hf-bico wrote.")
@setting("max_download", help="Most to download of the data set, whatever the record says.")
@setting("device")
@setting("force", help="Go on although the base looks wrong.")
@hub_options
@output_options
def rerun(ported: str, output: str | None, overwrite: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Repeat a port from its record alone, and compare the weights' SHA-256.

    PORTED is a folder or Hub repo that hf-bico wrote. Exit code 1 when a file differs.

    \b
    Example:
      hf-bico rerun user/vit-b16-plus-eurosat
    """
    with exit_on_error():
        limits = read_settings({name: options.pop(name) for name in ("max_download", "device", "force")})
        options |= {"max_download": limits.max_download, "device": limits.device, "force": limits.force}
        from hf_bico.porting.rerun import rerun as run

        folder = None if output is None else output_folder(output, output)
        reservation = nullcontext() if folder is None else reserved(folder, overwrite)
        with reservation, progress_bars(quiet or as_json) as progress:
            again = run(ported, folder=folder, overwrite=overwrite, progress=progress, **options)
        if as_json:
            console.echo_json({"same": again.same, **vars(again)})
        elif not quiet or not again.same:
            console.print_rerun(again)
        sys.exit(0 if again.same else 1)


def _plan_for_settings(planned: Plan, settings: Settings) -> tuple[Plan, bool]:
    """Return the plan with the chosen method, which may refuse these models, and True if the method needs data."""
    from hf_bico.porting.planner import memory_limits, method_sentence, with_blocks, with_model_defaults

    planned = with_blocks(planned, settings.layers).within(memory_limits(settings))
    planned = planned.reading(settings.split, settings.config)
    planned.lineage.require_same_function(settings.force)
    planned = replace(planned, lineage=replace(planned.lineage, other_function=None))  # let through with --force
    planned = planned.with_fitted_head(settings.probe)
    if method_info(settings.method).trains_on is None and settings.objective in (AUTO, "classification"):
        planned.require_head()
    if planned.lineage.data is not None:
        settings = with_model_defaults(settings, *planned.lineage.layouts)
    trains = method_info(settings.method).trains_on is not None
    chooses = settings.finds_alpha and not trains
    if settings.method == AUTO:
        how = planned.method and method_sentence(*planned.lineage.layouts, planned.pairs, settings.alpha)
    else:
        alpha = "" if trains else "; alpha by the samples" if chooses else f"; alpha {settings.alpha:g}"
        how = f"{settings.method}, as asked for{alpha}"
    planned = replace(planned, method=how)
    refusable = (
        planned.lineage.unlabelled
        or planned.lineage.writes_data
        or any(getattr(settings, name) != getattr(Settings, name) for name in _REFUSABLE)
    )
    if settings.method in (AUTO, "bico") and not refusable:  # and no torch is imported
        return planned.in_format(settings.format, settings.rank), True
    from hf_bico.porting.prepare import provisional_method, require_possible

    method = provisional_method(settings)
    with suppress(LineageError):  # the printed verdict says that no data is known
        require_possible(planned, settings, method)
    usual = None if method.keeps_factors or settings.rank is not None else "full"
    needs_data = method.looks_at_data or settings.readout or settings.polish or chooses
    return planned.in_format(settings.format or usual, settings.rank), needs_data


def _print_plan(planned: Plan, as_json: bool, quiet: bool, command: str, needs_data: bool = True) -> None:
    if needs_data and planned.lineage.data is None:
        command += " --data DATA"
    if planned.head_refusal is not None and planned.head_refusal.remedy == FIT_INSTEAD:
        command += " --probe"
    if as_json:
        console.echo_json({**planned.as_dict(), "command": command})
    elif not quiet:
        console.print_plan(planned, command, needs_data)
