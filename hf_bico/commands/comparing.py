"""The command that compares methods: compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_bico.edge.completing import complete_data, complete_methods, complete_model
from hf_bico.edge.ending import edge
from hf_bico.edge.options import (
    base_option,
    data_options,
    folder_option,
    hub_options,
    last_name,
    limit_options,
    method_options,
    output_options,
    read_methods,
    read_settings,
    target_option,
)
from hf_bico.edge.sections import MEASURING, METHOD, MODELS, OUTPUT, RUNNING, SAMPLES, SectionedHelp
from hf_bico.errors import UsageError

if TYPE_CHECKING:
    from hf_bico.experiments.compare.comparison import Comparison


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
@SAMPLES.option("--split", help="Split to calibrate on; train by default.")
@METHOD.option(
    "--methods",
    shell_complete=complete_methods,
    help="Such as naive,theseus,bico; or all. By default those of the paper, and our own.",
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
@data_options
@limit_options
@method_options
@METHOD.option("--readout", is_flag=True, help="Measure every method with the readout too, and the target itself.")
@MEASURING.option("--control", is_flag=True, help="Measure every aligning method with mispaired samples too.")
@folder_option("Output folder; ./SOURCE-to-TARGET-compared by default.")
@OUTPUT.option("--overwrite", is_flag=True, help="Start anew in the folder of another comparison.")
@RUNNING.option("--force", is_flag=True, help="Go on although the base looks wrong.")
@hub_options
@output_options
def compare(source: str, target: str, base: str | None, data: tuple[str, ...], **options: Any) -> None:
    """Measure methods side by side on your models: the target, every method, and the fine-tuned references.

    Every number is kept as it comes: the same command goes on with an interrupted comparison, and more methods add to
    it; so do more sizes and seeds, if the data has a test split. The folder gets comparison.csv, .json, .md and .png.

    \b
    Examples:
      hf-bico compare user/vit-b16-eurosat --to laion/ViT-B-16-plus
      hf-bico compare my-finetune --base model-A --to model-B --data eurosat --methods theseus,bico -n 10,100 --seeds 5
      hf-bico compare my-finetune --base model-A --to model-B --data eurosat --methods all -k 1,2,5 --control
    """
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    output, fine_tuned = options.pop("output"), options.pop("fine_tuned")
    job = {name: options.pop(name) for name in ("overwrite", "token", "allow_pickle", "seeds", "with_base")}
    methods, n, per_class = (options.pop(name) for name in ("methods", "n", "per_class"))
    with edge() as at:
        settings = read_settings(options)
        chosen = {} if methods is None else {"methods": read_methods(methods)}
        sizes = {
            name: _numbers(text, option) for name, text, option in (("n", n, "-n"), ("per_class", per_class, "-k"))
        }
        folder = Path(output or f"{last_name(source)}-to-{last_name(target)}-compared").expanduser()
        from hf_bico.edge.bars import shown_comparison
        from hf_bico.edge.console import print_compared
        from hf_bico.experiments.compare.run import compare as run

        at.interrupted = "nothing was measured yet"
        silent = quiet or as_json
        asked: dict[str, Any] = {name: value for name, value in vars(settings).items() if name != "method"}
        asked |= {**sizes, **chosen, **job, "base": base, "fine_tuned": fine_tuned, "folder": folder}
        with shown_comparison(silent) as (progress, show):

            def measured(so_far: Comparison) -> None:
                at.interrupted = f"what was measured is in {folder}, and the same command goes on from there"
                show(so_far)

            found = run(source, target, data=list(data) or None, progress=progress, shown=measured, **asked)
        if as_json:
            click.echo(json.dumps({"folder": str(folder), "comparison": json.loads(found.to_json())}))
        elif not quiet:
            print_compared(found, folder)


def _numbers(text: str | None, option: str) -> list[int] | None:
    """Numbers as they are typed: 10,20,50."""
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} is '{text}'", "give whole numbers, such as 10,20,50") from None
