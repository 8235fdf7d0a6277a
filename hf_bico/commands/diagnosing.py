"""The command that looks at two models layer by layer: diagnose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hf_bico.edge.completing import complete_data, complete_folder, complete_methods, complete_model
from hf_bico.edge.ending import edge
from hf_bico.edge.options import (
    CALIBRATION_DATA,
    Choice,
    aligning_options,
    base_option,
    data_options,
    folder_option,
    hub_options,
    last_name,
    limit_options,
    output_options,
    read_methods,
    read_settings,
    target_option,
)
from hf_bico.edge.sections import METHOD, MODELS, OUTPUT, RUNNING, SAMPLES, SectionedHelp
from hf_bico.settings import DEFAULT_SAMPLES, METHOD_NAMES, TOWERS


@click.command(cls=SectionedHelp, short_help="Look at two models layer by layer, before and after alignment.")
@click.argument("source", shell_complete=complete_model)
@target_option
@base_option
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
@SAMPLES.option("--data", shell_complete=complete_data, help=CALIBRATION_DATA)
@SAMPLES.option("--split", help="Split to calibrate on; train by default.")
@SAMPLES.option("-n", "n", type=int, help=f"Samples in all; {DEFAULT_SAMPLES} by default.")
@SAMPLES.option("-k", "per_class", type=int, help="Samples of each class, instead of -n.")
@METHOD.option(
    "--method", default="bico", show_default=True, type=Choice(METHOD_NAMES), help="Whose maps are looked at."
)
@METHOD.option(
    "--methods",
    default="input-only,theseus,bico",
    show_default=True,
    shell_complete=complete_methods,
    help="With --fine-tuned: the methods whose models are held against it.",
)
@METHOD.option("--tower", type=Choice(TOWERS), help="Of a CLIP: which tower; by default what the source changed.")
@data_options
@limit_options
@aligning_options
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
def diagnose(source: str, target: str, base: str | None, data: str | None, **options: Any) -> None:
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
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    output, overwrite, beside = options.pop("output"), options.pop("overwrite"), options.pop("beside")
    job = {name: options.pop(name) for name in ("fine_tuned", "checkpoints", "token", "allow_pickle")}
    with edge():
        methods = read_methods(options.pop("methods"))
        settings = read_settings(options)
        folder = Path(output or f"{last_name(source)}-to-{last_name(target)}-diagnosed").expanduser()
        from hf_bico.experiments.diagnose.diagnosis import Diagnosis, require_own

        require_own(folder, overwrite)
        others = [Diagnosis.load(place) for place in beside]
        from hf_bico.edge.bars import shown_progress
        from hf_bico.experiments.diagnose.diagnosis import seconds_line
        from hf_bico.experiments.diagnose.run import diagnose as look
        from hf_bico.runtime.output import claimed

        asked = {name: value for name, value in vars(settings).items() if name != "evaluate"}
        with claimed(folder), shown_progress(quiet or as_json) as progress:
            found = look(source, target, base=base, data=data, methods=methods, progress=progress, **job, **asked)
            found.save(folder, others, overwrite)
        if as_json:
            click.echo(json.dumps({"folder": str(folder), "diagnosis": json.loads(found.to_json())}))
        elif not quiet:
            click.echo(f"{found.title}: {found.samples} samples of {found.data}\n\n{found.table()}\n")
            click.echo(seconds_line(found.cost), err=True)  # what is on stdout is the same every time
            click.echo(f"Written to {folder}")
