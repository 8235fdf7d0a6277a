"""Defines the findings of a diagnosis, layer by layer, and the cost of a port by the paper's formulas.

Knows names, numbers and shapes, not how a number is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, NamedTuple, TypeVar

from hf_bico.models.layout import SitePair
from hf_bico.reports.record import Amount, Count, SiteRecord, Versions
from hf_bico.utils.files import Within

UNTOUCHED_TARGET = "target"
"""The name of the untouched target among the models of `outputs`."""
_MANY = Within(0, 50_000)
"""Findings that are read of a file."""


class SitePlace(NamedTuple):
    """A block of a tower, None for sites outside of the blocks. The main tower is ""."""

    tower: str
    block: int | None

    @property
    def label(self) -> str:
        """
        >>> SitePlace("", 3).label, SitePlace("text", 0).label, SitePlace("", None).label
        ('3', 'text 0', 'out')
        """
        block = "out" if self.block is None else str(self.block)
        return f"{self.tower} {block}" if self.tower else block


@dataclass(frozen=True, kw_only=True)
class _AtSite:
    """A finding about one activation of a model, with its canonical `name` and its place."""

    name: str
    block: int | None = None
    tower: str = ""

    @property
    def place(self) -> SitePlace:
        return SitePlace(self.tower, self.block)


@dataclass(frozen=True, kw_only=True)
class InputLikeness(_AtSite):
    """Similarity of an input in the pretrained source and target, before and after the input-side map.

    `roles` are those of the sites that read it, `source` is its name in the source, `widths` are its widths in both
    models, and `rows` counts the paired rows. `cosine` is None if the widths differ.
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
    """Mean cosine of a site's outputs in some model to those in the target that was fine-tuned directly.

    `model` is "target", untouched, or a method.
    """

    model: str
    cosine: float


@dataclass(frozen=True, kw_only=True)
class Drift(_AtSite):
    """Change of a site's input from the base to a checkpoint, averaged over rows.

    `direction` is 1 - cos, `magnitude` the change of the norm as a share of it.
    """

    checkpoint: str
    direction: float
    magnitude: float


@dataclass(frozen=True)
class Cost:
    """Floating-point operations of a port by the paper's formulas, and the seconds that it took here.

    `parameters` are those of the source's base and of the target, `rows` the rows of their calibration passes.
    `a_pass` is the paper's 6 P_A + 6 P_B, which counts a pass over all samples as one, and `training` its 32,000 P_B of
    2,000 steps counted in the same way. `calibration` is the same pass with every row counted. The other three are the
    paper's terms, summed over the maps and sites, without constant factors: cross-covariances, polar factors, and the
    two products of each site.
    """

    parameters: tuple[Count, Count]
    rows: tuple[Count, Count]
    a_pass: Annotated[int, Within(1)]
    training: Count
    calibration: Count
    covariances: Count
    maps: Count
    products: Count
    seconds: Annotated[dict[str, Amount], Within(0, 100)] = field(default_factory=dict)


Finding = TypeVar("Finding", bound=_AtSite)


def by_place(findings: Iterable[Finding], value: Callable[[Finding], float | None]) -> dict[SitePlace, float]:
    """Return the mean of the known values of each place, in the order of the places.

    >>> two = [OutputLikeness(name=name, block=0, model="bico", cosine=c) for name, c in (("q", 0.5), ("k", 1.0))]
    >>> by_place(two, lambda one: one.cosine)
    {SitePlace(tower='', block=0): 0.75}
    """
    values: dict[SitePlace, list[float]] = {}
    for one in findings:
        if (number := value(one)) is not None:
            values.setdefault(one.place, []).append(number)
    return {place: fmean(numbers) for place, numbers in values.items()}


FORWARD, BACKWARD, UPDATE = 2, 4, 10
"""Operations per parameter of a forward pass, a backward pass, and a step of AdamW."""
TRAINING_STEPS = 2000
"""Steps of the paper's fine-tuning."""


def cost_of(
    pairs: Sequence[SitePair],
    parameters: tuple[int, int],
    rows: tuple[int, int],
    paired: int,
    seconds: Mapping[str, float],
) -> Cost:
    """Compute the cost of carrying these pairs between two models of these `parameters`, run over these `rows`.

    `paired` is the number of rows in the two cross-covariances of each site.

    >>> cost_of([], (10, 20), (3, 4), 0, {}).a_pass
    180
    """
    source, target = parameters
    both_passes = FORWARD + BACKWARD
    shapes = [(pair.source.shape, pair.target.shape) for pair in pairs]
    maps = [(of_source[axis], of_target[axis]) for of_source, of_target in shapes for axis in (0, 1)]
    return Cost(
        parameters=parameters,
        rows=rows,
        a_pass=both_passes * (source + target),
        training=TRAINING_STEPS * (both_passes + UPDATE) * target,
        calibration=both_passes * (source * rows[0] + target * rows[1]),
        covariances=sum(paired * one * other for one, other in maps),
        maps=sum(min(both) ** 2 * max(both) for both in maps),
        # R_out^T tau_A, and that times R_in
        products=sum(out_b * in_a * (out_a + in_b) for (out_a, in_a), (out_b, in_b) in shapes),
        seconds=dict(seconds),
    )


DIAGNOSIS_SCHEMA = 1


@dataclass(frozen=True)
class DiagnosisData:
    """Similarity of two models on some samples, and the quality of a task vector's transport between them.

    `outputs` need a fine-tuned target; `drift` has the order of `checkpoints`, the last of which is the fine-tuned
    source. `sites` describe the maps and the task vector's energy.
    """

    hf_bico: str
    source: str
    base: str
    target: str
    data: str
    split: str
    samples: Count
    method: str
    completion: str
    inputs: Annotated[list[InputLikeness], _MANY]
    sites: Annotated[list[SiteRecord], _MANY]
    layers: Annotated[list[Count], _MANY]
    cost: Cost
    fine_tuned: str | None = None
    outputs: Annotated[list[OutputLikeness], _MANY] = field(default_factory=list)
    checkpoints: Annotated[list[str], Within(0, 1_000)] = field(default_factory=list)
    drift: Annotated[list[Drift], _MANY] = field(default_factory=list)
    seed: int = 0
    device: str = "cpu"
    versions: Versions = field(default_factory=dict)
    schema: int = DIAGNOSIS_SCHEMA

    @property
    def title(self) -> str:
        return f"{self.base} to {self.target}"

    @property
    def models(self) -> list[str]:
        """Names of the models in `outputs`."""
        return list(dict.fromkeys(one.model for one in self.outputs))
