"""Findings and costs as data.

What a diagnosis finds, as data: how alike two models see things, layer by layer, and what a port between them costs.

Knows numbers and names; neither models nor how a number is measured.

What a port costs in floating-point operations, by the paper's formulas. Knows shapes; runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, TypeVar

from hf_bico.models.layout import SitePair
from hf_bico.reports.record import SiteRecord

SCHEMA = 1
UNTOUCHED = "target"
"""What outputs call the target as it is, beside the methods."""


class SitePlace(NamedTuple):
    """A block of a tower; None for what stands outside of the blocks. The main tower is ""."""

    tower: str
    block: int | None

    @property
    def label(self) -> str:
        """
        >>> Place("", 3).label, Place("text", 0).label, Place("", None).label
        ('3', 'text 0', 'out')
        """
        block = "out" if self.block is None else str(self.block)
        return f"{self.tower} {block}" if self.tower else block


@dataclass(frozen=True, kw_only=True)
class _AtSite:
    """Something about one activation of a model: its canonical `name`, and where that stands."""

    name: str
    block: int | None = None
    tower: str = ""

    @property
    def place(self) -> SitePlace:
        return SitePlace(self.tower, self.block)


@dataclass(frozen=True, kw_only=True)
class InputLikeness(_AtSite):
    """How alike the pretrained source and target see what some sites read, before and after the input-side map.

    `roles` are those of the sites that read it, `source` what the source calls it, `widths` how wide it is in both and
    `rows` how many rows were paired. Raw coordinates compare only where the widths are one: else `cosine` is None.
    """

    source: str
    roles: list[str]
    widths: tuple[int, int]
    rows: int
    cka: float
    cka_aligned: float
    cosine_aligned: float
    cosine: float | None = None


@dataclass(frozen=True, kw_only=True)
class OutputLikeness(_AtSite):
    """The mean cosine of what a site writes in some model, and in the target that was fine-tuned directly.

    `model` is "target", untouched, or a method.
    """

    model: str
    cosine: float


@dataclass(frozen=True, kw_only=True)
class Drift(_AtSite):
    """How far what a site reads has moved from the base to a checkpoint, averaged over rows.

    `direction` is 1 - cos, `magnitude` the change of the norm as a share of it.
    """

    checkpoint: str
    direction: float
    magnitude: float


@dataclass(frozen=True)
class Cost:
    """What a port costs in floating-point operations, by the paper's formulas, and the seconds that it took here.

    `parameters` are those of the source's base and of the target, `rows` how many they ran over in calibration.
    `a_pass` is the paper's 6 P_A + 6 P_B, which counts a pass over all samples as one, and `training` its 32,000 P_B of
    2,000 steps counted in the same way. `calibration` is the same pass with every row counted. The other three are the
    paper's terms, summed over the maps and sites, without constant factors: cross-covariances, polar factors, and the
    two products of each site.
    """

    parameters: tuple[int, int]
    rows: tuple[int, int]
    a_pass: int
    training: int
    calibration: int
    covariances: int
    maps: int
    products: int
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DiagnosisFindings:
    """How alike two models are on some samples, and how well a task vector is carried between them.

    `outputs` are there where a fine-tuned target was given, `drift` where a checkpoint or the fine-tuned source was
    looked at, in the order of `checkpoints`. `sites` tell of the maps and of the task vector's energy.
    """

    hf_bico: str
    source: str
    base: str
    target: str
    data: str
    split: str
    samples: int
    method: str
    completion: str
    inputs: list[InputLikeness]
    sites: list[SiteRecord]
    layers: list[int]
    cost: Cost
    fine_tuned: str | None = None
    outputs: list[OutputLikeness] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)
    seed: int = 0
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def title(self) -> str:
        return f"{self.base} to {self.target}"

    @property
    def same_width(self) -> bool:
        """Whether raw coordinates compare anywhere."""
        return any(one.cosine is not None for one in self.inputs)

    @property
    def models(self) -> list[str]:
        """Those whose outputs were looked at."""
        return list(dict.fromkeys(one.model for one in self.outputs))


Found = TypeVar("Found", bound=_AtSite)


def by_place(found: Iterable[Found], value: Callable[[Found], float | None]) -> dict[SitePlace, float]:
    """The mean of a value over the sites of each block, in the order of the places; where it is known.

    >>> two = [OutputLikeness(name=name, block=0, model="bico", cosine=c) for name, c in (("q", 0.5), ("k", 1.0))]
    >>> by_place(two, lambda one: one.cosine)
    {Place(tower='', block=0): 0.75}
    """
    values: dict[SitePlace, list[float]] = {}
    for one in found:
        number = value(one)
        if number is not None:
            values.setdefault(one.place, []).append(number)
    return {place: fmean(numbers) for place, numbers in values.items()}


FORWARD, BACKWARD, UPDATE = 2, 4, 10
"""For each parameter: of a forward pass, of a backward pass, and of a step of AdamW."""
TRAINING_STEPS = 2000
"""Of the paper's fine-tuning."""


def cost_of(
    pairs: Sequence[SitePair],
    parameters: tuple[int, int],
    rows: tuple[int, int],
    paired: int,
    seconds: Mapping[str, float],
) -> Cost:
    """Of carrying these pairs between models of so many `parameters`, which ran over so many `rows` of samples.

    `paired` rows of each site met in its two cross-covariances.

    >>> cost_of([], (10, 20), (3, 4), 0, {}).a_pass
    180
    """
    source, target = parameters
    both_passes = FORWARD + BACKWARD
    maps = [(pair.source.shape[axis], pair.target.shape[axis]) for pair in pairs for axis in (0, 1)]
    return Cost(
        parameters=parameters,
        rows=rows,
        a_pass=both_passes * (source + target),
        training=TRAINING_STEPS * (both_passes + UPDATE) * target,
        calibration=both_passes * (source * rows[0] + target * rows[1]),
        covariances=sum(paired * one * other for one, other in maps),
        maps=sum(min(both) ** 2 * max(both) for both in maps),
        products=sum(_products(pair) for pair in pairs),
        seconds=dict(seconds),
    )


def _products(pair: SitePair) -> int:
    """R_out^T tau_A, and that times R_in."""
    (out_a, in_a), (out_b, in_b) = pair.source.shape, pair.target.shape
    return out_b * out_a * in_a + out_b * in_a * in_b
