"""The methods that bring a task to another model, each one small file, behind one registry.

A carrier turns the source's change at each matched site into a change of the target's site; a trainer trains the target
instead, for comparison. They know sites, statistics and tensors; not models, files or the Hub.
"""

from __future__ import annotations

from hf_bico.alignment.methods.aligned import Bico, BicoFisher, BicoPath, GradientOnly, InputOnly, OutputOnly, Theseus
from hf_bico.alignment.methods.base import Method
from hf_bico.alignment.methods.finetuning import Fewshot, Finetune
from hf_bico.alignment.methods.naive import GradFix, Naive
from hf_bico.alignment.methods.transfusion import TransFusion

METHODS: dict[str, type[Method]] = {
    "bico": Bico,
    "bico-fisher": BicoFisher,
    "bico-path": BicoPath,
    "input-only": InputOnly,
    "output-only": OutputOnly,
    "gradient-only": GradientOnly,
    "theseus": Theseus,
    "naive": Naive,
    "transfusion": TransFusion,
    "gradfix": GradFix,
    "fewshot": Fewshot,
    "finetune": Finetune,
}
