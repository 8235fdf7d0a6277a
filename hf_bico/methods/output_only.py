"""Half of BiCo: only the output gradients are lined up; the input side is padded or cropped."""

from __future__ import annotations

from hf_bico.methods.aligning import Aligner
from hf_bico.statistics import Kind


class OutputOnly(Aligner):
    input_kind = None
    output_kind = Kind.GRADIENTS
