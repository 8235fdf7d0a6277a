"""`bico-fisher` along the way from base to fine-tuned: the maps are found anew before each part of the change.

tau_B^0 = 0; for k = 0 .. K-1, maps at (theta_A + (k/K) tau_A, theta_B + tau_B^k), and
tau_B^{k+1} = tau_B^k + R_out^T (tau_A / K) R_in. Nothing is trained: K passes instead of one. The class embeddings
that give the loss stay those of the pretrained models all along.
"""

from __future__ import annotations

from hf_bico.methods.bico_fisher import BicoFisher


class BicoPath(BicoFisher):
    @property
    def steps(self) -> int:
        return self.settings.path_steps
