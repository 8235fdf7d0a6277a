"""BiCo with gradients on both sides: R_in from what each layer passes back to its inputs, g W, and R_out from g."""

from __future__ import annotations

from hf_bico.methods.aligning import Aligner
from hf_bico.statistics import Kind


class GradientOnly(Aligner):
    input_kind = Kind.INPUT_GRADIENTS
    output_kind = Kind.GRADIENTS
