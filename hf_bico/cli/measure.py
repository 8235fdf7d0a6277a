"""Defines the commands that measure models and methods: reproduce, compare, diagnose and eval."""

from __future__ import annotations

import json
from typing import Any

import click

from hf_bico.arguments import options_of
from hf_bico.cli.completion import complete_data, complete_folder, complete_methods, complete_model
from hf_bico.cli.console import echo, echo_json, print_compared, progress_bars, show_comparison
from hf_bico.cli.exit import exit_on_error
from hf_bico.cli.options import (
    MEASURING,
    METHOD,
    MODELS,
    OUTPUT,
    RUNNING,
    SAMPLES,
    TRAINING,
    Choice,
    SectionedHelp,
    base_option,
    folder_option,
    hub_options,
    last_name,
    lineage_options,
    output_folder,
    output_options,
    read_methods,
    read_settings,
    setting,
    settings_of,
    target_option,
    unlabelled_option,
)
from hf_bico.errors import UsageError
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.reports.results import value_text
from hf_bico.runtime.output import locked_folder
from hf_bico.settings import DEFAULT_SAMPLES, METHODS

_RESUMABLE = "what was measured is in {}, and the same command goes on from there"


@click.command(cls=SectionedHelp, short_help="Repeat a table of the paper, beside its own numbers.")
@click.argument("table", required=False)
@SAMPLES.option("--tasks", help="Some of the table's, such as eurosat,mnist; all by default.")
@SAMPLES.option("--seeds", type=int, help="Draws of the samples; by default as many as the paper has.")
@MODELS.option(
    "--source-of",
    multiple=True,
    metavar="TASK=MODEL",
    shell_complete=complete_model,
    help="A fine-tuned source for a task; what is not given is fine-tuned by the paper's recipe.",
)
@MODELS.option(
    "--target-of", multiple=True, metavar="TASK=MODEL", help="A target that was fine-tuned directly, for its own line."
)
@SAMPLES.option("--data-of", multiple=True, metavar="TASK=DATA", help="Another copy of a task's data set.")
@TRAINING.option("--train-target", is_flag=True, help="Fine-tune the target too, for its own line.")
@settings_of("training")
@SAMPLES.option("--max-download", default="20GB", show_default=True, help="Most to download of a data set.")
@setting("eval_samples")
@setting("batch_size")
@setting("memory")
@setting("device")
@setting("dtype")
@folder_option("Folder of all tables and fine-tunes; ./reproduced by default.")
@RUNNING.option("--dry-run", is_flag=True, help="Only show the table, and what it would take.")
@hub_options
@output_options
def reproduce(table: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Repeat one of the paper's tables, 1 to 5 or A to H, on its own models and data sets.

    First says what it will download and about how long it will take. Everything is kept as it comes: the same command
    goes on with an interrupted run, and tables share the models that were fine-tuned. Without TABLE, lists the tables.

    \b
    Examples:
      hf-bico reproduce
      hf-bico reproduce 1 --tasks eurosat,mnist --dry-run
      hf-bico reproduce 1 --tasks eurosat,mnist
      hf-bico reproduce 3 --source-of eurosat=user/vit-b16-datacomp-eurosat --tasks eurosat
    """
    with exit_on_error() as ending:
        from hf_bico.experiments.reproduce import paper

        if table is None:
            _list_tables(as_json)
            return
        output, dry_run = options.pop("output"), options.pop("dry_run")
        token, allow_pickle = options.pop("token"), options.pop("allow_pickle")
        named = options.pop("tasks")
        tasks = None if named is None else [word.strip() for word in named.split(",")]
        own: dict[str, Any] = {name: options.pop(name) for name in ("seeds", "train_target")}
        own |= {name: _by_task(options.pop(name), name) for name in ("source_of", "target_of", "data_of")}
        settings = read_settings(options)
        folder = output_folder(output, "reproduced")
        paper.table(table)  # refuses a mistyped name before the slow imports
        from hf_bico.experiments.reproduce.run import Job, estimate, run_job

        job = Job.of(table, tasks, folder, **own)
        expected = estimate(job, settings, token, allow_pickle)
        silent = quiet or as_json
        if not silent:
            echo(*expected.lines(), err=not dry_run)
        if dry_run:
            from hf_bico.experiments.reproduce.reproduction import Reproduction

            empty = Reproduction(job.table, job.task_names)
            if as_json:
                echo_json({"expected": expected.as_dict(), "table": json.loads(empty.to_json())})
            elif not quiet:
                echo("", *empty.text().split("\n"))
            return
        ending.interrupted = "nothing was measured yet"
        with show_comparison(silent) as (progress, show):

            def on_number(part: str, comparison: Comparison) -> None:
                ending.interrupted = _RESUMABLE.format(folder)
                show(comparison, part)

            reproduction = run_job(job, settings, token, allow_pickle, progress, on_number)
        if as_json:
            echo_json({"folder": str(job.results), "reproduction": json.loads(reproduction.to_json())})
        elif not quiet:
            echo(*reproduction.text().split("\n"), "", f"Written to {job.results}")


def _list_tables(as_json: bool) -> None:
    from hf_bico.experiments.reproduce import paper

    tables = [paper.table(name) for name in paper.TABLES]
    if as_json:
        fields = ("name", "title", "source", "target", "tasks", "protocol", "seeds")
        echo_json({"tables": [{name: getattr(one, name) for name in fields} for one in tables]})
        return
    echo(*(f"{one.name}  {one.title}" for one in tables), "", "Next: hf-bico reproduce TABLE --dry-run")


def _by_task(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """Parse values of the form TASK=NAME."""
    values = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise UsageError(f"--{option.replace('_', '-')} is '{text}'", "give TASK=NAME, such as eurosat=user/model")
        values[name.strip()] = value.strip()
    return values


@click.command(cls=SectionedHelp, short_help="Measure methods side by side on your own models.")
@click.argument("source", shell_complete=complete_model)
@target_option
@base_option
@SAMPLES.option(
    "--data",
    multiple=True,
    shell_complete=complete_data,
    help="Data set to calibrate and measure on; repeat it for several.",
)
@unlabelled_option
@SAMPLES.option("--split", help="Split to calibrate on; train by default.")
@METHOD.option(
    "--methods",
    shell_complete=complete_methods,
    help="Such as theseus@1,bico; or all; or standard, which answers whether to port, to polish or to train. NAME is "
    "the method as 'port' runs it, which may hold it back; NAME@1 is the method at alpha 1, train@20 at most 20 steps "
    "of training, NAME+polish@20 the method with a polish. By default the paper's methods at alpha 1, bico and "
    "bico-path.",
)
@SAMPLES.option("-n", "n", help="Calibration samples in all, such as 10,20,50,100, which is the default.")
@SAMPLES.option("-k", "per_class", help="Calibration samples of each class, such as 1,2,5, instead of -n.")
@SAMPLES.option("--seeds", default=3, show_default=True, help="Draws of the samples, for means and deviations.")
@MODELS.option(
    "--fine-tuned",
    metavar="MODEL",
    shell_complete=complete_model,
    help="The target fine-tuned directly, as a reference.",
)
@MEASURING.option("--with-base", is_flag=True, help="Measure the source before it was fine-tuned, too.")
@settings_of("data", "limits", "aligning", "measuring")
@TRAINING.option(
    "--train-steps",
    metavar="N[,N]",
    help="Most steps of train and distill, a row each; 60 by default. Of finetune, one.",
)
@settings_of("training", leave_out=("train_steps",))
@METHOD.option("--polish", is_flag=True, help="Measure every method that carries with a polish, too.")
@TRAINING.option("--polish-steps", metavar="N[,N]", help="Most steps of a polish, a row each; 20 by default.")
@setting("polish_on")
@METHOD.option("--readout", is_flag=True, help="Measure every method with the readout too, and the target itself.")
@MEASURING.option("--control", is_flag=True, help="Measure every aligning method with mispaired samples too.")
@folder_option("Output folder; ./SOURCE-to-TARGET-compared by default.")
@OUTPUT.option("--overwrite", is_flag=True, help="Start anew in the folder of another comparison.")
@RUNNING.option("--force", is_flag=True, help="Go on although the base looks wrong.")
@hub_options
@output_options
def compare(source: str, target: str, data: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Measure methods side by side on your models: the target, every method, and the fine-tuned references.

    Every number is kept as it comes: the same command goes on with an interrupted comparison, and more methods add to
    it; so do more sizes and seeds, if the data has a test split. The folder gets comparison.csv, .json, .md and .png.
    Where the samples hold a method back, as they would hold back a port, its number is that of the target as it is.

    \b
    Examples:
      hf-bico compare user/vit-b16-eurosat --to laion/ViT-B-16-plus
      hf-bico compare my-finetune --base model-A --to model-B --data eurosat --methods bico@1,bico -n 10,100 --seeds 5
      hf-bico compare my-finetune --base model-A --to model-B --data eurosat --methods all -k 1,2,5 --control
      hf-bico compare my-finetune --base model-A --to model-B --data eurosat --methods standard -n 100
    """
    names = ("base", "unlabelled", "fine_tuned", "overwrite", "token", "allow_pickle", "seeds", "with_base")
    job = {name: options.pop(name) for name in names}
    output, methods, n, per_class = (options.pop(name) for name in ("output", "methods", "n", "per_class"))
    training, polishing = options.pop("train_steps"), options.pop("polish_steps")
    with exit_on_error() as ending:
        settings = read_settings(options)
        job["methods"] = None if methods is None else read_methods(methods, with_alphas=True)
        job |= {"n": _numbers(n, "-n"), "per_class": _numbers(per_class, "-k")}
        job |= {
            "train_steps": _numbers(training, "--train-steps"),
            "polish_steps": _numbers(polishing, "--polish-steps"),
        }
        folder = output_folder(output, f"{last_name(source)}-to-{last_name(target)}-compared")
        from hf_bico.experiments.compare.run import compare as run

        ending.interrupted = "nothing was measured yet"
        job = options_of(run, settings) | job | {"folder": folder}
        with show_comparison(quiet or as_json) as (progress, show):

            def on_number(comparison: Comparison) -> None:
                ending.interrupted = _RESUMABLE.format(folder)
                show(comparison, None)

            comparison = run(source, target, data=list(data) or None, progress=progress, shown=on_number, **job)
        if as_json:
            echo_json({"folder": str(folder), "comparison": json.loads(comparison.to_json())})
        elif not quiet:
            print_compared(comparison, folder)


def _numbers(text: str | None, option: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} is '{text}'", "give whole numbers, such as 10,20,50") from None


@click.command(cls=SectionedHelp, short_help="Look at two models layer by layer, before and after alignment.")
@click.argument("source", shell_complete=complete_model)
@lineage_options
@MODELS.option(
    "--fine-tuned",
    metavar="MODEL",
    shell_complete=complete_model,
    help="The target fine-tuned directly: every layer's outputs are held against its own.",
)
@MODELS.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="MODEL",
    shell_complete=complete_model,
    help="A checkpoint of the fine-tuning, to see how layers drift; repeat it, in their order.",
)
@SAMPLES.option("--split", help="Split to calibrate on; train by default.")
@SAMPLES.option("-n", "n", type=int, help=f"Samples in all; {DEFAULT_SAMPLES} by default.")
@SAMPLES.option("-k", "per_class", type=int, help="Samples of each class, instead of -n.")
@METHOD.option(
    "--method", default="bico", show_default=True, type=Choice(tuple(METHODS)), help="Whose maps are looked at."
)
@METHOD.option(
    "--methods",
    default="input-only,theseus,bico",
    show_default=True,
    shell_complete=complete_methods,
    help="With --fine-tuned: the methods whose models are held against it.",
)
@setting("tower", help="Of a CLIP: which tower; by default what the source changed.")
@settings_of("data", "limits", "aligning")
@OUTPUT.option(
    "--beside",
    multiple=True,
    metavar="FOLDER",
    shell_complete=complete_folder,
    help="An earlier diagnosis, to be drawn in one picture with this one; repeat it for several.",
)
@folder_option("Output folder; ./SOURCE-to-TARGET-diagnosed by default.")
@OUTPUT.option("--overwrite", is_flag=True, help="Replace an earlier diagnosis.")
@RUNNING.option("--force", is_flag=True, help="Go on although the base looks wrong.")
@hub_options
@output_options
def diagnose(source: str, target: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Look at two models layer by layer: how alike they see the samples, and what becomes of the task vector.

    Linear CKA and cosine of what every layer reads, before and after the input-side map; ranks, scores, energies; how
    far layers drift in fine-tuning; the cost. The folder gets diagnosis.json, .md and the pictures. Two models of which
    none was fine-tuned are compared by giving the first as SOURCE and as --base.

    \b
    Examples:
      hf-bico diagnose user/vit-b16-eurosat --to laion/ViT-B-16-plus
      hf-bico diagnose my-finetune --base model-A --to model-B --data eurosat --fine-tuned model-B-eurosat
      hf-bico diagnose my-finetune --base model-A --to model-B --data eurosat --checkpoint step-1 --checkpoint step-2
      hf-bico diagnose model-A --base model-A --to model-B --data eurosat --beside other-diagnosis
    """
    output, overwrite, beside = options.pop("output"), options.pop("overwrite"), options.pop("beside")
    names = ("base", "data", "fine_tuned", "checkpoints", "token", "allow_pickle")
    job = {name: options.pop(name) for name in names}
    with exit_on_error():
        methods = read_methods(options.pop("methods"))
        settings = read_settings(options)
        folder = output_folder(output, f"{last_name(source)}-to-{last_name(target)}-diagnosed")
        from hf_bico.experiments.diagnose.diagnosis import Diagnosis, require_own, seconds_line

        require_own(folder, overwrite)
        others = [Diagnosis.load(other) for other in beside]
        from hf_bico.experiments.diagnose.run import diagnose as run

        job |= options_of(run, settings)
        with locked_folder(folder), progress_bars(quiet or as_json) as progress:
            diagnosis = run(source, target, methods=methods, progress=progress, **job)
            diagnosis.save(folder, others, overwrite)
        if as_json:
            echo_json({"folder": str(folder), "diagnosis": json.loads(diagnosis.to_json())})
        elif not quiet:
            echo(f"{diagnosis.title}: {diagnosis.samples} samples of {diagnosis.data}", "")
            echo(*diagnosis.table().split("\n"), "")
            echo(seconds_line(diagnosis.cost), err=True)  # what is on stdout is the same every time
            echo(f"Written to {folder}")


@click.command("eval", cls=SectionedHelp, short_help="Measure a model: accuracy, or loss.")
@click.argument("model", shell_complete=complete_model)
@SAMPLES.option(
    "--data",
    shell_complete=complete_data,
    help="A Hub id, or a folder of images, parquet, JSON, CSV or text files; by default what record or card say.",
)
@MODELS.option(
    "--base",
    shell_complete=complete_model,
    help="The whole model, where MODEL is a vision tower, a task vector or an adapter.",
)
@SAMPLES.option("--split", help="Split to measure on; test by default, else validation, else train.")
@MEASURING.option(
    "-n",
    "--eval-samples",
    "eval_samples",
    type=int,
    metavar="N",
    help="Samples to measure on, at most; all of the split by default.",
)
@MEASURING.option(
    "--probe", type=int, metavar="N", help="By a linear probe, fitted to N samples of the training split."
)
@settings_of("data")
@hub_options
@output_options
def evaluate(model: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Measure MODEL: a CLIP zero-shot, a classifier by its head, a language model by its loss; or by a linear probe.

    \b
    Examples:
      hf-bico eval user/vit-b16-plus-eurosat
      hf-bico eval my-delta --base model-B --data eurosat
      hf-bico eval my-vision-tower --data eurosat --probe 100
    """
    job = {name: options.pop(name) for name in ("data", "base", "eval_samples", "probe", "token", "allow_pickle")}
    with exit_on_error():
        settings = read_settings(options)
        from hf_bico.porting.evaluate import evaluate_model

        result = evaluate_model(model, **options_of(evaluate_model, settings) | job)
        if as_json:
            echo_json({name: value for name, value in vars(result).items() if value not in (None, ())})
        elif not quiet:
            for notice in result.notices:
                echo(f"Notice: {notice}", err=True)
            how = "" if result.trained_on is None else f"by a linear probe on {result.trained_on} samples "
            measured_on = f"{result.n} samples of split {result.split} of {result.data}"
            echo(f"{result.metric} {value_text(result)} {how}({measured_on})")
