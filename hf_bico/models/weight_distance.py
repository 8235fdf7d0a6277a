"""Measure how far the weights of two models are apart, site by site, from their files and without torch.

Two models of one lineage have nearly the same weights, and a change of one then fits the other as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from hf_bico.models.checkpoints import Checkpoint, FileCheckpoint, HeaderCheckpoint, RenamedCheckpoint, tensor_offsets
from hf_bico.models.layout import SitePair, Slot

MOST_ROWS = 256
"""Rows of a weight that are compared at most, evenly spread: those of a large model would take minutes to read."""
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class WeightDistance:
    """|W_B - W_A| / |W_A| of two weights of equal shape, and their cosine."""

    distance: float
    cosine: float


def weight_distances(source: Checkpoint, target: Checkpoint, pairs: Iterable[SitePair]) -> dict[str, WeightDistance]:
    """Return the distance at each pair by its target's name; of pairs of equal shape, whose files are here."""
    equal = [pair for pair in pairs if pair.source.shape == pair.target.shape]
    if any(isinstance(_inner(checkpoint), HeaderCheckpoint) for checkpoint in (source, target)):
        return {}
    found, offsets = {}, _Offsets()
    for pair in equal:
        rows = [_rows(*one, offsets) for one in ((source, pair.source.weight), (target, pair.target.weight))]
        if rows[0] is not None and rows[1] is not None:
            found[pair.target.name] = _distance(rows[0], rows[1])
    return found


def mean_distance(distances: Mapping[str, WeightDistance]) -> WeightDistance:
    """Return the root mean square of the distances, and the mean cosine."""
    each = distances.values()
    square = sum(one.distance**2 for one in each) / len(each)
    return WeightDistance(sqrt(square), sum(one.cosine for one in each) / len(each))


def _distance(a: Any, b: Any) -> WeightDistance:
    own, other, inner = (float((x * y).sum()) for x, y in ((a, a), (b, b), (a, b)))
    if not own or not other:
        return WeightDistance(0.0 if own == other else 1.0, 0.0)
    apart = max(0.0, own + other - 2 * inner)
    return WeightDistance(sqrt(apart / own), inner / sqrt(own * other))


def _inner(checkpoint: Checkpoint) -> Checkpoint:
    return _inner(checkpoint.inner) if isinstance(checkpoint, RenamedCheckpoint) else checkpoint


class _Offsets(dict[Path, dict[str, int]]):
    """The first byte of each tensor by file; a file's header is read once."""

    def __missing__(self, file: Path) -> dict[str, int]:
        self[file] = tensor_offsets(file)
        return self[file]


def _rows(checkpoint: Checkpoint, slot: Slot, offsets: _Offsets) -> Any:
    """Return some rows of a slot as float64; None for a dtype that is no float of 16 bits or more."""
    stored = _stored(checkpoint, slot.tensor, offsets)
    if stored is None:
        return None
    whole = slot.view(stored)
    some = whole[:: max(1, -(-len(whole) // MOST_ROWS))]
    return _as_floats(some)


def _stored(checkpoint: Checkpoint, name: str, offsets: _Offsets) -> Any:
    """Return a tensor as an array that is read when it is used."""
    import numpy as np

    if isinstance(checkpoint, RenamedCheckpoint):
        return _stored(checkpoint.inner, checkpoint.stored_name(name), offsets)
    if not isinstance(checkpoint, FileCheckpoint):
        return checkpoint.tensor(name).detach().cpu().double().numpy()
    dtype = _DTYPES.get(checkpoint.dtypes[name])
    if dtype is None:
        return None
    file = checkpoint.file_of(name)
    return np.memmap(file, dtype, "r", offsets[file][name], checkpoint.shapes[name])


def _as_floats(rows: Any) -> Any:
    import numpy as np

    if rows.dtype == np.uint16:  # bfloat16, which numpy lacks, is the upper half of a float32
        return (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return rows.astype(np.float64)
