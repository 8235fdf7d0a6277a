"""Another fine-tuned model over a model that is known: a checkpoint, or the target that was fine-tuned directly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_bico.errors import BaseMismatchError
from hf_bico.hub.client import Hub, locate
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.deltas import Deltas
from hf_bico.models.low_rank import Factors
from hf_bico.models.model import Model, ModelReference
from hf_bico.resolving import open_source
from hf_bico.task_vector import TaskVector


@dataclass(frozen=True)
class Tuned:
    """What fine-tuning changed; `sha256` tells it from others: of its files, or of what it changes."""

    name: str
    vector: TaskVector
    sha256: Any

    @classmethod
    def over(cls, base: Model, reference: ModelReference, what: str, hub: Hub, allow_pickle: bool) -> Tuned:
        """A model or adapter, downloaded if it must be; `what` says its part in errors."""
        place = locate(reference, what, hub) if isinstance(reference, str | Path) else None
        tuned = open_source(reference, place, base.family.library, hub, allow_pickle).fetched()
        try:
            vector = TaskVector.over(tuned, base)
        except BaseMismatchError as error:
            raise BaseMismatchError(
                f"{what} '{tuned.name}' is no fine-tune of '{base.name}': {error.cause}", f"name one of '{base.name}'"
            ) from error
        return cls(tuned.name, vector, tuned.sha256 or digest_of(parts_of(vector)))


def parts_of(vector: Deltas) -> Iterator[Tensor]:
    """Every tensor that a change is made of."""
    for _, change in vector.changes():
        yield from (change.left, change.right) if isinstance(change, Factors) else (change,)
