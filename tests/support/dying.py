"""Commands that end as by `kill -9` at a known point of their work."""

from __future__ import annotations

import signal
from typing import Any, Literal

from support import forks

CODE = """
import os, signal, sys
from hf_bico.cli.main import main
from hf_bico.alignment.methods import finetuning
from hf_bico.alignment.methods.saved_training import SavedTraining
from hf_bico.experiments.compare.log import CellLog

event, left, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
finetuning.CHECKPOINT_EVERY = 10
owner, name = {"cell": (CellLog, "add"), "checkpoint": (SavedTraining, "save")}[event]
original = getattr(owner, name)

def deadly(*given, **more):
    global left
    original(*given, **more)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, deadly)
main(words, prog_name="hf-bico")
"""


def kill(event: Literal["cell", "checkpoint"], times: int, *words: str, **options: Any) -> None:
    """Run a command until it has written that many numbers of a comparison, or checkpoints of trainings: one each ten
    steps."""
    done = forks.run(event, str(times), *words, code=CODE, **options)
    assert done.returncode == -signal.SIGKILL, done.stderr
