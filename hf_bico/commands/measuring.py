"""The command that measures: eval."""

from __future__ import annotations

import json
from typing import Any

import click

from hf_bico.edge import edge
from hf_bico.options import data_options, hub_options, output_options, read_settings


@click.command("eval")
@click.argument("model")
@click.option("--data", help="A Hub id, a folder of images or parquet files; by default what record or card say.")
@click.option("--base", help="The whole model, where MODEL is a vision tower, a task vector or an adapter.")
@click.option("--split", help="Split to measure on; test by default, else validation, else train.")
@click.option("-n", "n", type=int, help="Samples at most; all of the split by default.")
@data_options
@hub_options
@output_options
def evaluate(model: str, data: str | None, base: str | None, n: int | None, **options: Any) -> None:
    """Measure the zero-shot accuracy of MODEL.

    \b
    Examples:
      hf-bico eval user/vit-b16-plus-eurosat
      hf-bico eval my-delta --base model-B --data eurosat
    """
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    hub = {"token": options.pop("token"), "allow_pickle": options.pop("allow_pickle")}
    with edge():
        settings = read_settings({**options, "n": n})
        from hf_bico.evaluation import evaluate_model

        result = evaluate_model(model, data, base=base, **hub, **vars(settings))
        if as_json:
            click.echo(json.dumps(vars(result)))
        elif not quiet:
            click.echo(
                f"{result.metric} {result.value:.1%} ({result.n} samples of split {result.split} of {result.data})"
            )
