"""What every method takes and gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_bico.factors import Change
from hf_bico.procrustes import OrthogonalMap
from hf_bico.settings import Settings
from hf_bico.sites import SitePair
from hf_bico.statistics import Statistics


@dataclass(frozen=True)
class SiteDelta:
    """The change of one site: weight (out, in), maybe as factors, and bias (out,); None where nothing changed."""

    weight: Change | None = None
    bias: Tensor | None = None

    @property
    def is_zero(self) -> bool:
        return self.weight is None and self.bias is None


@dataclass(frozen=True)
class Carried:
    """A site's change in the target's coordinates.

    `unseen` is the share of the weight change's energy that lay where calibration saw nothing.
    """

    delta: SiteDelta
    input_map: OrthogonalMap | None = None
    output_map: OrthogonalMap | None = None
    unseen: float | None = None


class Method(ABC):
    """One way to carry changes: `prepare` sees all pairs once, `carry` handles one."""

    needs_statistics: ClassVar[bool]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def prepare(self, pairs: Sequence[SitePair], statistics: Statistics | None) -> None: ...

    @abstractmethod
    def carry(self, pair: SitePair, delta: SiteDelta) -> Carried: ...
