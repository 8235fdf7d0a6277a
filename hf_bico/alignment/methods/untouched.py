"""The target as it is, with its final projection corrected towards the fine-tuned source's predictions."""

from __future__ import annotations

from hf_bico.alignment.methods.base import Method


class ReadoutAlone(Method):
    """Carries nothing: only the readout is corrected."""

    needs_predictions = True
    one_tower = True
