"""The grid: which numbers a comparison asks for. Knows methods and settings by name; measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hf_bico.alignment.methods import METHODS
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.alignment.methods.base import Carrier, Trainer
from hf_bico.comparison.cells import LOSS, CellKey
from hf_bico.errors import UsageError
from hf_bico.settings import METHOD_NAMES, PROBE, Settings

USUAL_METHODS = ("naive", "transfusion", "gradfix", "fewshot", "theseus", "bico", "bico-fisher", "bico-path")
USUAL_SIZES = (10, 20, 50, 100)
USUAL_SEEDS = 3
BY_LOSS = ("language-modelling", "text-to-text")
"""The objectives whose own measure is a loss."""


@dataclass(frozen=True)
class Draw:
    """So many calibration samples, in all or of each class, drawn by a seed."""

    size: int
    seed: int


@dataclass(frozen=True)
class Variant:
    """A method as it is, with the two models' samples mispaired, or with the readout corrected."""

    control: bool = False
    readout: bool = False


PLAIN = Variant()


@dataclass(frozen=True)
class Grid:
    """Methods, each with so many samples in all or of each class, drawn by each of the seeds."""

    methods: tuple[str, ...]
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    per_class: bool
    settings: Settings

    @classmethod
    def of(
        cls,
        methods: Sequence[str],
        n: int | Sequence[int] | None,
        per_class: int | Sequence[int] | None,
        seeds: int | Sequence[int],
        settings: Settings,
    ) -> Grid:
        """What was asked for, as it may be written: one number or several, "all" methods, so many seeds or which."""
        for option, given in (("-n", n), ("-k", per_class), ("--seeds", seeds)):
            numbers = [given] if isinstance(given, int | float | str) else given or ()
            for number in numbers:
                if type(number) is not int:
                    raise UsageError(f"{option} is {number!r}", "give a whole number, or several")
        if n is not None and per_class is not None:
            raise UsageError("-n and -k were both given", "choose the number of samples in all, or per class")
        sizes = per_class if per_class is not None else USUAL_SIZES if n is None else n
        counted = range(settings.seed, settings.seed + seeds) if isinstance(seeds, int) else seeds
        names = [methods] if isinstance(methods, str) else methods
        return cls(
            tuple(dict.fromkeys(one for name in names for one in (METHOD_NAMES if name == "all" else [name]))),
            (sizes,) if isinstance(sizes, int) else tuple(dict.fromkeys(sizes)),
            tuple(dict.fromkeys(counted)),
            per_class is not None,
            settings,
        )

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in METHOD_NAMES:
                raise UsageError(f"there is no method '{name}'", f"use some of: all, {', '.join(METHOD_NAMES)}")
        size = "-k" if self.per_class else "-n"
        for option, values in (("--methods", self.methods), (size, self.sizes), ("--seeds", self.seeds)):
            if not values:
                raise UsageError(f"{option} leaves nothing to compare", "give at least one")
        for draw in self.draws():
            self.settings_of(draw)  # refuses sizes that are none

    def draws(self) -> list[Draw]:
        return [Draw(size, seed) for size in self.sizes for seed in self.seeds]

    @property
    def largest(self) -> Draw:
        return Draw(max(self.sizes), self.settings.seed)

    def settings_of(self, draw: Draw | None) -> Settings:
        """Those of one draw; variants are cells of their own."""
        settings = replace(self.settings, readout=False, control=False)
        if draw is None:
            return settings
        n, per_class = (None, draw.size) if self.per_class else (draw.size, None)
        return replace(settings, n=n, per_class=per_class, seed=draw.seed)

    def variants(self, name: str) -> list[Variant]:
        """Those of a method or reference that were asked for and make sense."""
        found = [PLAIN]
        if self.settings.control and name in METHODS and issubclass(METHODS[name], Aligner):
            found.append(Variant(control=True))
        if self.settings.readout and (name in METHODS or name == "target"):
            found.append(Variant(readout=True))
        return found

    def keys(self, data: str, name: str, variant: Variant, draw: Draw | None) -> list[CellKey]:
        """The numbers of one method or reference that depend on this draw; without one, those that depend on none.

        A probe depends on the draw, whatever is probed.
        """
        of_draw = takes_samples(name) or variant.readout or self._pairs_by_samples(name)
        protocols: list[str | None] = []
        if self.settings.evaluation != PROBE and of_draw == (draw is not None):
            protocols.append(LOSS if self.settings.objective in BY_LOSS else None)
        if self.settings.evaluation != "zero-shot" and draw is not None:
            protocols.append(PROBE)
        size, seed = (None, None) if draw is None else (draw.size, draw.seed)
        n, per_class = (None, size) if self.per_class else (size, None)
        return [
            CellKey(data, name, n, per_class, seed, variant.control, variant.readout, protocol)
            for protocol in protocols
        ]

    def _pairs_by_samples(self, name: str) -> bool:
        """Whether the samples say which blocks are paired, and a method carries between these."""
        return self.settings.layers == "similarity" and name in METHODS and issubclass(METHODS[name], Carrier)

    def cells(self, data: str, names: Sequence[str]) -> Iterator[tuple[Draw | None, str, Variant, list[CellKey]]]:
        """Everything about one data set, in the order in which it is measured."""
        for draw in (None, *self.draws()):
            for name in names:
                for variant in self.variants(name):
                    keys = self.keys(data, name, variant, draw)
                    if keys:
                        yield draw, name, variant, keys


def takes_samples(name: str) -> bool:
    """Whether what a method does depends on the calibration samples; references do nothing."""
    method = METHODS.get(name)
    if method is None or (issubclass(method, Trainer) and method.whole_split):
        return False
    return method.looks_at_data
