"""What every method takes and gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from hf_bico.alignment.statistics import OF_EXPECTED_LOSSES, OF_TASK_LOSS, Kind, Statistics
from hf_bico.errors import UnsuitableMethodError
from hf_bico.models.checkpoints import Checkpoint
from hf_bico.models.layout import Layout, SitePair
from hf_bico.models.low_rank import Change
from hf_bico.settings import Settings, method_info
from hf_bico.utils.progress import Progress

if TYPE_CHECKING:
    from hf_bico.alignment.methods.training import Trained, TrainingTask


@dataclass(frozen=True)
class SiteDelta:
    """The change of one site: weight (out, in), maybe as factors, and bias (out,); None where nothing changed."""

    weight: Change | None = None
    bias: Tensor | None = None

    @property
    def is_zero(self) -> bool:
        return self.weight is None and self.bias is None

    def to(self, *how: Any) -> SiteDelta:
        """On another device, or in another dtype."""
        return SiteDelta(
            None if self.weight is None else self.weight.to(*how), None if self.bias is None else self.bias.to(*how)
        )

    def scaled(self, factor: float) -> SiteDelta:
        if factor == 1:
            return self
        return SiteDelta(
            None if self.weight is None else factor * self.weight, None if self.bias is None else factor * self.bias
        )


@dataclass(frozen=True)
class MapFacts:
    """What is told of an orthogonal map: its numerical rank, and how well it lines up the rows."""

    rank: int
    score: float


@dataclass(frozen=True)
class SiteLossChange:
    """Of one site: <gradient, change>, by which its change moves the target's loss to first order, and two energies.

    They are those of the gradient and of the change, biases included.
    """

    change: float
    gradient: float
    delta: float

    def scaled(self, factor: float) -> SiteLossChange:
        """Of the same change, so many times."""
        return SiteLossChange(factor * self.change, self.gradient, factor**2 * self.delta)


@dataclass(frozen=True)
class TransportedSite:
    """A site's change in the target's coordinates, and what is told of the maps that brought it there.

    `unseen` is the share of the weight change's energy that lay where calibration saw nothing, `descent` what the
    change does to the target's loss, to first order, where that was looked at.
    """

    delta: SiteDelta
    input_map: MapFacts | None = None
    output_map: MapFacts | None = None
    unseen: float | None = None
    descent: SiteLossChange | None = None


@dataclass(frozen=True)
class Pretrained:
    """One of the two pretrained models as its files have it."""

    layout: Layout
    checkpoint: Checkpoint


@dataclass(frozen=True)
class MethodInputs:
    """What a method may look at: both pretrained models' weights, and the statistics of the kinds it asks for."""

    source: Pretrained
    target: Pretrained
    statistics: Statistics = field(default_factory=Statistics)


class Method:
    """One way to bring a task to the target."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    keeps_factors: ClassVar[bool] = True
    """Whether a low-rank change stays one."""
    needs_predictions: ClassVar[bool] = False
    """Whether it needs an objective that predicts classes, and not just any loss."""

    one_tower: ClassVar[bool] = False
    """Whether it carries a CLIP's vision tower alone, unless another is asked for."""

    @property
    def looks_at_data(self) -> bool:
        """Whether it needs samples."""
        return method_info(self.settings.method).uses_samples

    def require(self, source: Layout, target: Layout, pairs: Sequence[SitePair]) -> None:
        """Refuse, by an UnsuitableMethodError, models between which this method cannot carry."""
        return


class Carrier(Method, ABC):
    """Carries the source's changes, site by site: `prepare` sees pairs, `carry` handles one of them.

    Where `by_site`, a pair needs nothing but its own statistics, and `prepare` sees some pairs at a time; else all.

    With `steps` above 1 that is done so many times, each with a part of the change, and each time with statistics from
    further along the way: the source has taken its earlier parts, and the target what became of them.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset()
    """The statistics that it needs."""
    by_site: ClassVar[bool] = False

    @property
    def steps(self) -> int:
        return 1

    @property
    def differentiates(self) -> bool:
        """Whether it looks at gradients of the target's loss."""
        return bool((OF_TASK_LOSS | OF_EXPECTED_LOSSES) & self.kinds)

    @abstractmethod
    def prepare(self, pairs: Sequence[SitePair], seen: MethodInputs) -> None: ...

    @abstractmethod
    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite: ...


def require_same_shapes(name: str, pairs: Sequence[SitePair]) -> None:
    """Refuse pairs of sites of different shapes, for a method that works on the parameters as they lie."""
    for pair in pairs:
        if pair.source.shape != pair.target.shape:
            shapes = [" x ".join(map(str, site.shape)) for site in (pair.source, pair.target)]
            raise UnsuitableMethodError(
                f"{name} needs two models of one architecture, and '{pair.target.name}' is {shapes[0]} in the source "
                f"and {shapes[1]} in the target",
                "use a method that finds maps between other shapes, such as --method bico",
            )


class Trainer(Method, ABC):
    """Trains the target instead, for comparison; the source's change is not looked at."""

    keeps_factors = False

    @property
    def whole_split(self) -> bool:
        """Whether it trains on all of the split, and not on the calibration samples."""
        return self.settings.trains_on_all

    @abstractmethod
    def train(self, training_task: TrainingTask, progress: Progress) -> Trained: ...
