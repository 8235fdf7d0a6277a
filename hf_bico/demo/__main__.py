"""`python -m hf_bico.demo FOLDER`: the whole job on the small world, by the commands that a user would type."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from hf_bico.cli import main as hf_bico
from hf_bico.demo.digits import TASKS
from hf_bico.demo.world import build

TASK_NAMES = [task.name for task in TASKS]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--task", default=TASK_NAMES[0], show_default=True, type=click.Choice(TASK_NAMES))
@click.option("--seed", default=0, show_default=True, help="Of the models' pretraining.")
def demo(folder: Path, task: str, seed: int) -> None:
    """Train two small CLIPs on digits, fine-tune one, and carry what it learnt to the other; into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    click.echo(f"Making the small world (seed {seed}): two open_clip models, pretrained and fine-tuned on digits.")
    world = build(Path("world"), seed=seed, tasks=[task], report=lambda step: click.echo(f"  {step}"))
    models = [
        str(world.fine_tuned("narrow", task)),
        "--base",
        str(world.base("narrow")),
        "--to",
        str(world.base("wide")),
    ]
    data, ported = ["--data", str(world.data(task))], f"narrow-{task}-on-wide"
    _run("plan", *models, *data)
    _run("port", *models, *data, "-n", "100", "-o", ported, "--overwrite")
    _run("eval", ported, *data)
    _run("eval", str(world.fine_tuned("wide", task)), *data)
    click.echo("\nThe last line is the target fine-tuned directly: what training, instead of porting, would give.")
    click.echo(f"\nNext, in {folder}:\n  less {ported}/README.md\n  hf-bico port --help")


def _run(*arguments: str) -> None:
    click.secho(f"\n$ hf-bico {shlex.join(arguments)}", bold=True)
    hf_bico(list(arguments), prog_name="hf-bico", standalone_mode=False)


if __name__ == "__main__":
    demo()
