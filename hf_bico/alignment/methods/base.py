"""Define what a method is: a `Carrier` transports changes site by site, a `Trainer` trains the target instead.

Knows sites, statistics and tensors; not models, files or the Hub.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hf_bico.alignment.statistics import OF_EXPECTED_LOSSES, OF_TASK_LOSS, Kind, Statistics
from hf_bico.models.checkpoints import Checkpoint
from hf_bico.models.layout import Layout, SitePair
from hf_bico.models.low_rank import Change
from hf_bico.settings import Settings, method_info
from hf_bico.utils.progress import Progress

if TYPE_CHECKING:
    from hf_bico.alignment.methods.training import Trained, TrainingTask


@dataclass(frozen=True)
class SiteDelta:
    """The change of one site: weight (out, in), dense or low-rank, and bias (out,); None where nothing changed."""

    weight: Change | None = None
    bias: Tensor | None = None

    @property
    def is_zero(self) -> bool:
        return self.weight is None and self.bias is None

    def to(self, where: torch.device | torch.dtype) -> SiteDelta:
        return self._map(lambda part: part.to(where))

    def scaled(self, factor: float) -> SiteDelta:
        return self if factor == 1 else self._map(lambda part: factor * part)

    def _map(self, function: Callable[[Any], Any]) -> SiteDelta:
        return SiteDelta(*(None if part is None else function(part) for part in (self.weight, self.bias)))


@dataclass(frozen=True)
class MapQuality:
    """Numerical rank of an orthogonal map, how well it aligns the rows, and how well one aligns `mispaired` rows."""

    rank: int
    score: float
    mispaired: float | None = None


@dataclass(frozen=True)
class TransportedSite:
    """A site's change in the target's coordinates, and the quality of its maps.

    `unseen` is the share of the weight change's energy in directions without calibration data.
    """

    delta: SiteDelta
    input_map: MapQuality | None = None
    output_map: MapQuality | None = None
    unseen: float | None = None


@dataclass(frozen=True)
class Pretrained:
    """Layout and stored weights of a pretrained model."""

    layout: Layout
    checkpoint: Checkpoint


@dataclass(frozen=True)
class MethodInputs:
    """Weights of both pretrained models, and the statistics that the method requested."""

    source: Pretrained
    target: Pretrained
    statistics: Statistics = field(default_factory=Statistics)


class Method:
    """A way to bring a task to the target."""

    keeps_factors: ClassVar[bool] = True
    """Whether a low-rank change stays low-rank."""
    needs_predictions: ClassVar[bool] = False
    """Whether it needs an objective that predicts classes."""
    one_tower: ClassVar[bool] = False
    """Whether it carries only the vision tower of a CLIP by default."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def looks_at_data(self) -> bool:
        """Whether it needs samples."""
        return method_info(self.settings.method).uses_samples

    def require(self, source: Layout, target: Layout, pairs: Sequence[SitePair]) -> None:
        """Raise UnsuitableMethodError for models between which this method cannot carry."""
        return


class Carrier(Method, ABC):
    """Transports the source's changes: `prepare` is called with several pairs, then `carry` with each of them.

    With several steps in its `schedule`, statistics are collected again before each, at the source with that share of
    the task vector and at the target with what was added so far; each step carries the same `part` of the task vector.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset()
    """The statistics that it needs."""
    by_site: ClassVar[bool] = False
    """Whether a pair needs only its own statistics, so that `prepare` may get a few pairs at a time."""

    @property
    def schedule(self) -> tuple[float, ...]:
        """The share of the task vector that is in the source at each step."""
        return (0.0,)

    @property
    def part(self) -> float:
        """How much of the task vector a step carries."""
        return 1.0

    @property
    def differentiates(self) -> bool:
        """Whether it uses gradients of the target's loss."""
        return bool((OF_TASK_LOSS | OF_EXPECTED_LOSSES) & self.kinds)

    @abstractmethod
    def prepare(self, pairs: Sequence[SitePair], inputs: MethodInputs) -> None: ...

    @abstractmethod
    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite: ...


class Trainer(Method, ABC):
    """Trains the target, as a baseline; ignores the source's change."""

    keeps_factors = False

    @property
    def whole_split(self) -> bool:
        """Whether it trains on the whole split instead of the calibration samples."""
        return self.settings.trains_on_all

    @abstractmethod
    def train(self, training_task: TrainingTask, progress: Progress) -> Trained: ...
