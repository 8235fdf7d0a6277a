"""Half of BiCo: only the inputs are lined up; the output side is padded or cropped."""

from __future__ import annotations

from hf_bico.methods.aligning import Aligner
from hf_bico.statistics import Kind


class InputOnly(Aligner):
    input_kind = Kind.INPUTS
    output_kind = None
