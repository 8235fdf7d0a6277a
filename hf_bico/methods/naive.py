"""The task vector added as it is: cropped where the target is narrower, padded with zeros where it is wider."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_bico.methods.base import Carried, Carrier, Seen, SiteDelta
from hf_bico.models.layout import SitePair
from hf_bico.models.low_rank import Change, Factors


class Naive(Carrier):
    looks_at_data = False

    def prepare(self, pairs: Sequence[SitePair], seen: Seen) -> None:
        """Nothing to prepare: no sample is looked at."""

    def carry(self, pair: SitePair, delta: SiteDelta) -> Carried:
        rows, columns = pair.target.shape
        weight = None if delta.weight is None else _fit_weight(delta.weight, rows, columns)
        bias = None if delta.bias is None else _fit(delta.bias, (rows,))
        return Carried(SiteDelta(weight, bias))


def _fit_weight(change: Change, rows: int, columns: int) -> Change:
    if isinstance(change, Factors):
        return Factors(_fit(change.left, (rows, change.rank)), _fit(change.right, (change.rank, columns)))
    return _fit(change, (rows, columns))


def _fit(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    fitted = tensor.new_zeros(shape)
    shared = tuple(slice(min(have, want)) for have, want in zip(tensor.shape, shape, strict=True))
    fitted[shared] = tensor[shared]
    return fitted
