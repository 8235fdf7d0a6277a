"""The methods that bring a task to another model, each one small file, behind one registry.

A carrier turns the source's change at each matched site into a change of the target's site; a trainer trains the target
instead, for comparison. They know sites, statistics and tensors; not models, files or the Hub.
"""

from __future__ import annotations

from hf_bico.methods.base import Carried, Carrier, Method, Pretrained, Seen, SiteDelta, Trainer
from hf_bico.methods.bico import Bico
from hf_bico.methods.bico_fisher import BicoFisher
from hf_bico.methods.bico_path import BicoPath
from hf_bico.methods.fewshot import Fewshot
from hf_bico.methods.finetune import Finetune
from hf_bico.methods.gradfix import GradFix
from hf_bico.methods.gradient_only import GradientOnly
from hf_bico.methods.input_only import InputOnly
from hf_bico.methods.naive import Naive
from hf_bico.methods.output_only import OutputOnly
from hf_bico.methods.theseus import Theseus
from hf_bico.methods.transfusion import TransFusion

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

__all__ = ["METHODS", "Bico", "Carried", "Carrier", "Method", "Naive", "Pretrained", "Seen", "SiteDelta", "Trainer"]
