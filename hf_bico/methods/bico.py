"""Bilinear Coordinate Alignment: R_in from the layers' inputs, R_out from the gradients at their outputs."""

from __future__ import annotations

from hf_bico.methods.aligning import Aligner
from hf_bico.statistics import Kind


class Bico(Aligner):
    input_kind = Kind.INPUTS
    output_kind = Kind.GRADIENTS
