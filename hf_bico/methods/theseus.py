"""THESEUS: activations on both sides, inputs and outputs as the layers give them; no labels, no gradients."""

from __future__ import annotations

from hf_bico.methods.aligning import Aligner
from hf_bico.statistics import Kind


class Theseus(Aligner):
    input_kind = Kind.INPUTS
    output_kind = Kind.OUTPUTS
