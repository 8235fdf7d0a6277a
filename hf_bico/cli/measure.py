"""Defines the commands that measure models and methods: reproduce, compare, diagnose and eval."""

from __future__ import annotations

import json
from typing import Any

import click

from hf_bico.arguments import options_of
from hf_bico.cli.completion import complete_data, complete_folder, complete_methods, complete_model
from hf_bico.cli.console import echo, echo_json, print_compared
from hf_bico.cli.exit import exit_on_error
from hf_bico.cli.options import (
    MEASURING,
    METHOD,
    MODELS,
    OUTPUT,
    RUNNING,
    SAMPLES,
    TRAINING,
    CarryingCommand,
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
    source_argument,
    target_option,
    unlabelled_option,
)
from hf_bico.cli.progress import EVALUATION_SHARES, progress_bars, progress_bars_and_text, show_comparison
from hf_bico.errors import UsageError
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.reports.results import value_text
from hf_bico.runtime.output import locked_folder
from hf_bico.settings import DEFAULT_SAMPLES, METHODS

_RESUMABLE = "the results so far are in {}, and the same command resumes"


@click.command(cls=SectionedHelp, short_help="Reproduce a table of the paper, beside its own numbers.")
@click.argument("table", required=False)
@SAMPLES.option("--tasks", help="Tasks of the table, such as eurosat,mnist; all by default.")
@SAMPLES.option("--seeds", type=int, help="Number of sample draws; by default as many as in the paper.")
@MODELS.option(
    "--source-of",
    multiple=True,
    metavar="TASK=MODEL",
    shell_complete=complete_model,
    help="Fine-tuned source for a task; tasks without one are fine-tuned with the paper's recipe.",
)
@MODELS.option(
    "--target-of",
    multiple=True,
    metavar="TASK=MODEL",
    help="Directly fine-tuned target for a task, shown on a line of its own.",
)
@SAMPLES.option("--data-of", multiple=True, metavar="TASK=DATA", help="Another copy of the data set of a task.")
@TRAINING.option("--train-target", is_flag=True, help="Also fine-tune the target, shown on a line of its own.")
@settings_of("training")
@SAMPLES.option("--max-download", default="20GB", show_default=True, help="Maximum download per data set.")
@setting("eval_samples")
@setting("batch_size")
@setting("memory")
@setting("device")
@setting("dtype")
@folder_option("Folder of all tables and fine-tunes; ./reproduced by default.")
@RUNNING.option("--dry-run", is_flag=True, help="Show the table and what it would take, and exit.")
@hub_options
@output_options
def reproduce(table: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Reproduce one of the paper's tables, 1 to 5 or A to H, on its own models and data sets.

    It first shows what it will download and about how long it will take. Results are saved as they come: the same
    command resumes an interrupted run, and tables share fine-tuned models. Without TABLE, it lists the tables.

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


@click.command(cls=CarryingCommand, short_help="Compare methods on your own models.")
@source_argument
@target_option
@base_option
@SAMPLES.option(
    "--data",
    multiple=True,
    shell_complete=complete_data,
    help="Data set to calibrate and measure on; can be repeated.",
)
@unlabelled_option
@SAMPLES.option("--split", help="Split to calibrate on; train by default.")
@METHOD.option(
    "--methods",
    shell_complete=complete_methods,
    help="Comma-separated methods, such as theseus@1,bico; 'all'; or 'standard', which shows whether to port, to "
    "polish or to train. NAME runs a method as 'port' does, which may hold it back; NAME@1 runs it at alpha 1; "
    "train@20 trains for at most 20 steps; NAME+polish@20 adds a polish. By default the paper's methods at alpha 1, "
    "bico and bico-path.",
)
@SAMPLES.option("-n", "--samples", "n", help="Numbers of calibration samples, such as the default 10,20,50,100.")
@SAMPLES.option("-k", "--per-class", "per_class", help="Calibration samples per class, such as 1,2,5, instead of -n.")
@SAMPLES.option(
    "--seeds", default=3, show_default=True, help="Number of sample draws, for means and standard deviations."
)
@MODELS.option(
    "--fine-tuned",
    metavar="MODEL",
    shell_complete=complete_model,
    help="Directly fine-tuned target, as a reference.",
)
@MEASURING.option("--with-base", is_flag=True, help="Also measure the base of the source.")
@settings_of("data", "limits", "aligning", "measuring")
@TRAINING.option(
    "--train-steps",
    metavar="N[,N]",
    help="Maximum steps of train and distill, one row per number; 60 by default. For finetune, one number.",
)
@settings_of("training", leave_out=("train_steps",))
@METHOD.option("--polish", is_flag=True, help="Also measure every porting method with a polish.")
@TRAINING.option(
    "--polish-steps", metavar="N[,N]", help="Maximum steps of a polish, one row per number; 20 by default."
)
@setting("polish_on")
@METHOD.option("--readout", is_flag=True, help="Also measure every method, and the target itself, with the readout.")
@MEASURING.option("--control", is_flag=True, help="Also measure every aligning method with mispaired samples.")
@folder_option("Output folder; ./SOURCE-to-TARGET-compared by default.")
@OUTPUT.option("--overwrite", is_flag=True, help="Replace another comparison in the output folder.")
@RUNNING.option("--force", is_flag=True, help="Continue even if the base looks wrong.")
@hub_options
@output_options
def compare(source: str, target: str, data: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Compare methods on your models: the target, every method, and the fine-tuned references.

    Results are saved as they come: the same command resumes an interrupted comparison, and further methods are added
    to it; so are further sizes and seeds, if the data has a test split. The output folder gets comparison.csv, .json,
    .md and .png. If the samples hold a method back, its number is that of the untouched target.

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


@click.command(cls=CarryingCommand, short_help="Compare two models layer by layer, before and after alignment.")
@source_argument
@lineage_options
@MODELS.option(
    "--fine-tuned",
    metavar="MODEL",
    shell_complete=complete_model,
    help="Directly fine-tuned target; the outputs of every layer are compared with its outputs.",
)
@MODELS.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="MODEL",
    shell_complete=complete_model,
    help="Checkpoint of the fine-tuning, to see how layers drift; repeat it in training order.",
)
@SAMPLES.option("--split", help="Split to calibrate on; train by default.")
@SAMPLES.option("-n", "--samples", "n", type=int, help=f"Samples in all; {DEFAULT_SAMPLES} by default.")
@SAMPLES.option("-k", "--per-class", "per_class", type=int, help="Samples per class, instead of -n.")
@METHOD.option(
    "--method", default="bico", show_default=True, type=Choice(tuple(METHODS)), help="The method whose maps are shown."
)
@METHOD.option(
    "--methods",
    default="input-only,theseus,bico",
    show_default=True,
    shell_complete=complete_methods,
    help="With --fine-tuned: the methods to compare with it.",
)
@setting("tower", help="Which tower of a CLIP; by default the one that the fine-tune changed.")
@settings_of("data", "limits", "aligning")
@OUTPUT.option(
    "--beside",
    multiple=True,
    metavar="FOLDER",
    shell_complete=complete_folder,
    help="Folder of an earlier diagnosis to draw in the same pictures; can be repeated.",
)
@folder_option("Output folder; ./SOURCE-to-TARGET-diagnosed by default.")
@OUTPUT.option("--overwrite", is_flag=True, help="Replace an earlier diagnosis.")
@RUNNING.option("--force", is_flag=True, help="Continue even if the base looks wrong.")
@hub_options
@output_options
def diagnose(source: str, target: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Compare two models layer by layer: how similarly they see the samples, and what happens to the task vector.

    It measures linear CKA and cosine of the inputs of every layer, before and after the input-side map; ranks, scores
    and energies; how far layers drift in fine-tuning; and the cost. The output folder gets diagnosis.json, .md and the
    pictures. To compare two models without a fine-tune, give the first one as SOURCE and as --base.

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
    help="A Hub id, or a folder of images, parquet, JSON, CSV or text files; by default the data set named in the "
    "record or the model card.",
)
@MODELS.option(
    "--base",
    shell_complete=complete_model,
    help="The whole model, if MODEL is a vision tower, a task vector or an adapter.",
)
@SAMPLES.option("--split", help="Split to measure on; by default test, else validation, else train.")
@MEASURING.option(
    "-n",
    "--samples",
    "--eval-samples",
    "eval_samples",
    type=int,
    metavar="N",
    help="Maximum number of samples to measure on; by default the whole split.",
)
@MEASURING.option(
    "--probe", type=int, metavar="N", help="Measure with a linear probe, fitted to N samples of the training split."
)
@MEASURING.option(
    "--metric",
    metavar="NAME",
    help="A metric of the `evaluate` library for predicted classes, such as f1, or a local script; by default the "
    "accuracy.",
)
@MEASURING.option("--trust-remote-code", is_flag=True, help="Run the metric's script from the Hub.")
@settings_of("data")
@hub_options
@output_options
def evaluate(model: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Measure MODEL: a CLIP zero-shot, a classifier with its head, a language model by its loss; or by a linear probe.

    \b
    Examples:
      hf-bico eval user/vit-b16-plus-eurosat
      hf-bico eval my-delta --base model-B --data eurosat
      hf-bico eval my-vision-tower --data eurosat --probe 100
    """
    own = ("data", "base", "eval_samples", "probe", "metric", "trust_remote_code", "token", "allow_pickle")
    job = {name: options.pop(name) for name in own}
    with exit_on_error():
        settings = read_settings(options)
        with progress_bars_and_text(quiet or as_json, EVALUATION_SHARES) as (progress, _):
            progress("import", 0, 1)
            from hf_bico.porting.evaluate import evaluate_model

            progress("import", 1, 1)
            result = evaluate_model(model, progress=progress, **options_of(evaluate_model, settings) | job)
        if as_json:
            echo_json({name: value for name, value in vars(result).items() if value not in (None, ())})
        elif not quiet:
            for notice in result.notices:
                echo(f"Notice: {notice}", err=True)
            how = "" if result.trained_on is None else f"by a linear probe on {result.trained_on} samples "
            measured_on = f"{result.n} samples of split {result.split} of {result.data}"
            echo(f"{result.metric} {value_text(result)} {how}({measured_on})")
