"""How much memory finding maps takes: for those who find them, and for those who reckon with it. Knows no torch."""

from __future__ import annotations

BATCH_BYTES = 2**27
"""How much one batch of covariances may take that is solved together; a single large one may take more."""
COPIES = 15
"""How many times the batch's own bytes the solver takes at its peak, the batch itself and the result included."""
