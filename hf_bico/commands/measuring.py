"""The command that measures: eval."""

from __future__ import annotations

import json
from typing import Any

import click

from hf_bico.edge.completing import complete_data, complete_model
from hf_bico.edge.ending import edge
from hf_bico.edge.options import data_options, hub_options, output_options, read_settings
from hf_bico.edge.sections import MEASURING, MODELS, SAMPLES, SectionedHelp


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
@SAMPLES.option("-n", "n", type=int, help="Samples at most to measure on; all of the split by default.")
@MEASURING.option(
    "--probe", type=int, metavar="N", help="By a linear probe, fitted to N samples of the training split."
)
@data_options
@hub_options
@output_options
def evaluate(model: str, data: str | None, base: str | None, n: int | None, probe: int | None, **options: Any) -> None:
    """Measure MODEL: a CLIP zero-shot, a classifier by its head, a language model by its loss; or by a linear probe.

    \b
    Examples:
      hf-bico eval user/vit-b16-plus-eurosat
      hf-bico eval my-delta --base model-B --data eurosat
      hf-bico eval my-vision-tower --data eurosat --probe 100
    """
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    hub = {"token": options.pop("token"), "allow_pickle": options.pop("allow_pickle")}
    with edge():
        settings = read_settings({**options, "n": n})
        from hf_bico.porting.evaluate import evaluate_model
        from hf_bico.reports.results import value_text

        result = evaluate_model(model, data, base=base, probe=probe, **hub, **vars(settings))
        if as_json:
            click.echo(json.dumps({name: value for name, value in vars(result).items() if value is not None}))
        elif not quiet:
            how = "" if result.trained_on is None else f"by a linear probe on {result.trained_on} samples "
            measured_on = f"{result.n} samples of split {result.split} of {result.data}"
            click.echo(f"{result.metric} {value_text(result)} {how}({measured_on})")
