"""BiCo without labels, every label counted by how likely it is.

R_out lines up the gradients with every label in turn, weighted by the fine-tuned source's prediction p, the same for
both models: polar(sum_i sum_c p(c | x_i) g_A(x_i, c)^T g_B(x_i, c)). R_in lines up the inputs, each row weighted by the
norms of the layer's own gradients there: polar(sum_t |g_A,t| |g_B,t| x_A,t^T x_B,t).
"""

from __future__ import annotations

from hf_bico.methods.aligning import Aligner
from hf_bico.statistics import Kind


class BicoFisher(Aligner):
    needs_predictions = True
    input_kind = Kind.WEIGHTED_INPUTS
    output_kind = Kind.EXPECTED_GRADIENTS
