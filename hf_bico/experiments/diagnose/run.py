"""Diagnosing a pair of models: how alike they see the samples, and what becomes of a task vector between them.

Measures layer by layer and returns a `Diagnosis`; prints and writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_bico.alignment.calibration_pass import RowConsumer, Side, pass_rows
from hf_bico.alignment.memory import FLOAT64
from hf_bico.alignment.methods import make_method, method_class
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.alignment.methods.base import Carrier
from hf_bico.alignment.objectives.base import Head, LossBatch
from hf_bico.alignment.procrustes import polar
from hf_bico.alignment.similarity import Likeness, MeanOfRows, Moved, turned_away
from hf_bico.alignment.statistics import Kind, key_of
from hf_bico.errors import UnsuitableMethodError, UsageError
from hf_bico.experiments.diagnose.diagnosis import Diagnosis
from hf_bico.experiments.diagnose.findings import UNTOUCHED, Drift, InputLikeness, OutputLikeness, cost_of
from hf_bico.hub.client import Hub, locate
from hf_bico.hub.references import HubReference, parse
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import LiveModel
from hf_bico.models.hooks import Pass, Trace
from hf_bico.models.layout import Site, SitePair
from hf_bico.models.model import ModelReference
from hf_bico.porting.calibration import Calibration, no_predictions
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import plan, with_model_defaults
from hf_bico.porting.prepare import PreparedPort, prepare
from hf_bico.porting.task_vector import FineTune
from hf_bico.porting.transfer import energy_report, transfer
from hf_bico.runtime.environment import (
    Stopwatch,
    available_memory,
    choose_device,
    device_name,
    enough_memory,
    exact_float32,
    halving_batches,
    installed_versions,
)
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.settings import METHODS, Settings
from hf_bico.utils import __version__
from hf_bico.utils.progress import Progress, silent

COMPARED = ("input-only", "theseus", "bico")
"""The methods whose outputs are held against the fine-tuned target's, unless others are named."""
TUNED_TARGET, A_CHECKPOINT = "the fine-tuned target", "a checkpoint"
"""What these models are called in errors."""
Result = TypeVar("Result")


@torch.inference_mode(False)
@enough_memory()
@exact_float32()
@translate_errors()
def diagnose(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    fine_tuned: ModelReference | None = None,
    methods: Sequence[str] = COMPARED,
    checkpoints: Sequence[ModelReference] = (),
    token: str | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> Diagnosis:
    """How alike `base` and `to` see some samples, layer by layer, and what becomes of the task vector between them.

    Linear CKA and mean cosine of what the sites read, before and after the input-side map; rank, score, energy and
    unseen energy of every site; the drift of what the source's sites read, from the base to each of the `checkpoints`
    and to `source`; and the cost. With `fine_tuned`, the target fine-tuned directly, the outputs of every layer are
    held against its own, for the untouched target and each of the `methods`. Two models that were not fine-tuned yet
    are compared by giving the base as the source too. The other options are those of `hf_bico.Settings`.

    >>> hf_bico.diagnose("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", n=100).table()  # doctest: +SKIP
    """
    settings, hub = Settings.of({**options, "evaluate": False}), Hub(token)
    if not issubclass(method_class(settings.method), Aligner):
        raise UsageError(f"{settings.method} finds no maps to diagnose", "use a method that aligns, such as bico")
    methods = [methods] if isinstance(methods, str) else methods
    names = _carriers(methods)
    planned = plan(source, to, base=base, data=data, hub=hub, allow_pickle=allow_pickle)
    if fine_tuned is not None:
        names = _suitable(names, planned, settings, spares="all" in methods)
    for what, references in ((TUNED_TARGET, [fine_tuned]), (A_CHECKPOINT, checkpoints)):
        for reference in references:
            if isinstance(reference, str | Path):  # what is not there is said before anything large is downloaded
                locate(reference, what, hub)
    watch, device = Stopwatch(progress), choose_device(settings.device)
    ready = prepare(planned, settings, hub, watch, device, allow_unchanged=True)
    found, lineage = _Look(ready, watch), ready.models.lineage
    tuned = None
    if fine_tuned is not None:
        tuned = FineTune.over(lineage.target, fine_tuned, TUNED_TARGET, hub, allow_pickle)
    stops = [
        _by_revision(FineTune.over(lineage.base, one, A_CHECKPOINT, hub, allow_pickle), one) for one in checkpoints
    ]
    return found.diagnosis(tuned, names, stops)


def _carriers(methods: Sequence[str]) -> list[str]:
    """The methods that were named, or all that carry."""
    known = [name for name in METHODS if issubclass(method_class(name), Carrier)]
    names = list(dict.fromkeys(one for name in methods for one in (known if name == "all" else [name])))
    for name in names:
        if name not in known:
            raise UsageError(f"'{name}' carries no task vector", f"name some of: all, {', '.join(known)}")
    if not names:
        raise UsageError("no method is named", f"name some of: all, {', '.join(known)}")
    return names


def _suitable(names: Sequence[str], planned: Plan, settings: Settings, spares: bool) -> list[str]:
    """Those that can carry between these models; one that cannot is refused, unless all were asked for."""
    found, lineage = [], planned.lineage
    asked = with_model_defaults(settings, *lineage.layouts)
    for name in names:
        method = make_method(name, settings)
        try:
            method.require(*lineage.layouts, planned.main_pairs or planned.pairs)
            if method.needs_predictions and not asked.predicts:
                raise no_predictions(name)
            found.append(name)
        except UnsuitableMethodError:
            if not spares:
                raise
    return found


class _Look:
    """One look at two models, on one draw of samples."""

    def __init__(self, ready: PreparedPort, watch: Stopwatch) -> None:
        if ready.drawn is None or ready.heads is None:
            raise TypeError("without samples there is nothing to look at")
        self.models, self.settings, self.watch = ready.models, ready.settings, watch
        self.drawn, self.heads = ready.drawn, ready.heads
        self.calibration = self._round(watch, self.settings)

    def _round(self, watch: Stopwatch, settings: Settings, keeps: bool = False) -> Calibration:
        return Calibration(self.models, self.drawn, self.heads, watch, settings, keeps=keeps)

    def diagnosis(self, tuned: FineTune | None, methods: Sequence[str], checkpoints: Sequence[FineTune]) -> Diagnosis:
        lineage, settings = self.models.lineage, self.settings
        of_port = Stopwatch(self.watch.callback)
        carried = self._round(of_port, settings).carry(self._carrier(settings.method))
        report = energy_report(self.models.vector, carried, self.models.pairs, self.models.planned.left)
        inputs = self.inputs()
        stops = _told_apart([*checkpoints, FineTune(lineage.source.name, self.models.vector, None)])
        paired = max(one.rows for one in inputs)
        parameters = [sum(map(prod, model.checkpoint.shapes.values())) for model in (lineage.base, lineage.target)]
        rows = [
            _rows(model, len(self.calibration.samples), paired) for model in (self.models.source, self.models.target)
        ]
        return Diagnosis(
            hf_bico=__version__,
            source=lineage.source.name,
            base=lineage.base.name,
            target=lineage.target.name,
            data=self.drawn.data.name,
            split=self.drawn.split,
            samples=len(self.drawn.samples),
            method=settings.method,
            completion=settings.completion,
            inputs=inputs,
            sites=list(report.sites),
            layers=list(self.models.planned.blocks),
            cost=cost_of(
                self.models.pairs, (parameters[0], parameters[1]), (rows[0], rows[1]), paired, of_port.seconds
            ),
            fine_tuned=None if tuned is None else tuned.name,
            outputs=[] if tuned is None else list(self.outputs(tuned, methods)),
            checkpoints=[stop.name for stop in stops],
            drift=[drift for stop in stops for drift in self.drift(stop)],
            seed=settings.seed,
            device=device_name(self.models.device),
            versions=installed_versions(),
        )

    def _carrier(self, name: str) -> Carrier:
        method = make_method(name, self.settings)
        assert isinstance(method, Carrier)
        return method

    # what the two pretrained models read

    def inputs(self) -> list[InputLikeness]:
        """CKA and cosine of all that the sites read, as much of it at a time as there is memory for."""
        by_input = {key_of(Kind.INPUTS, pair): pair for pair in reversed(self.models.pairs)}
        pairs = list(reversed(by_input.values()))
        found: dict[Any, Likeness] = {}
        for number, some in enumerate(groups := _affordable(pairs, self._room)):
            self.watch.progress("similarity", number, len(groups))
            found |= self._likeness(some)
        return [self._told(pair, found[key_of(Kind.INPUTS, pair)]) for pair in pairs]

    @property
    def _room(self) -> int:
        """For sums: a quarter of what there is."""
        return (self.settings.memory or available_memory(self.models.device)) // 4

    def _likeness(self, pairs: Sequence[SitePair]) -> dict[Any, Likeness]:
        statistics = self.calibration.collect_statistics({Kind.INPUTS}, pairs)
        sums = {key_of(Kind.INPUTS, pair): statistics.of(Kind.INPUTS, pair) for pair in pairs}
        norms = torch.stack([one.norms for one in sums.values()]).tolist()
        maps = dict(
            zip(sums, polar([one.evidence for one in sums.values()], norms, self.settings.completion), strict=True)
        )

        def begin() -> tuple[dict[Any, Likeness], RowConsumer]:
            likeness = {key: Likeness(one.matrix) for key, one in maps.items()}
            return likeness, lambda kind, pair, x, y: likeness[key_of(kind, pair)].add(x, y)

        return self.calibration.show_rows(Kind.INPUTS, pairs, begin)

    def _told(self, pair: SitePair, likeness: Likeness) -> InputLikeness:
        readers = [one.target for one in self.models.pairs if one.target.input == pair.target.input]
        return InputLikeness(
            name=pair.target.input,
            block=pair.target.block,
            tower=pair.target.tower,
            source=pair.source.input,
            roles=[site.label for site in readers],
            widths=likeness.widths,
            rows=likeness.rows,
            cka=likeness.cka,
            cka_aligned=likeness.cka_aligned,
            cosine=likeness.cosine,
            cosine_aligned=likeness.cosine_aligned,
        )

    # what changed models read and write, beside themselves

    def outputs(self, tuned: FineTune, methods: Sequence[str]) -> Iterator[OutputLikeness]:
        """The cosine of what every site writes, to what it writes in the fine-tuned target."""
        wanted = self.models.target_names(tuned.vector)
        carriers = {name: self._carrier(name) for name in methods if len(self.models.vector)}
        rounds = self._rounds_of(carriers)
        sites = [pair.target for pair in self.models.pairs]
        for number, name in enumerate((UNTOUCHED, *carriers)):
            self.watch.progress("outputs", number, 1 + len(carriers))
            changes = Deltas({}) if name == UNTOUCHED else transfer(carriers[name], rounds[name]).changes

            def begin() -> tuple[dict[str, MeanOfRows], RowConsumer]:
                means = {site.name: MeanOfRows() for site in sites}
                return means, lambda _, pair, x, y: means[pair.target.name].add(1 - turned_away(x.double(), y.double()))

            both = (self.models.target_names(changes), wanted)
            found = self._beside(self.models.target, self.heads.target, sites, both, Kind.OUTPUTS, begin)
            for site in sites:
                yield OutputLikeness(
                    name=site.name, block=site.block, tower=site.tower, model=name, cosine=found[site.name].value
                )

    def _rounds_of(self, carriers: Mapping[str, Carrier]) -> dict[str, Calibration]:
        """A round for each method: those with as many altered copies share one, which has seen what they need."""
        rounds: dict[int, Calibration] = {}
        found = {}
        for name, carrier in carriers.items():
            copies = self.models.copies(carrier.settings, len(self.drawn.samples))
            if copies not in rounds:
                rounds[copies] = self._round(self.watch, carrier.settings, keeps=True)
            found[name] = rounds[copies]
        for calibration in rounds.values():
            kinds = {kind for name, carrier in carriers.items() if found[name] is calibration for kind in carrier.kinds}
            if kinds and calibration.memory_plan(kinds).passes == 1:
                calibration.statistics(kinds)
        return found

    def drift(self, checkpoint: FineTune) -> Iterator[Drift]:
        """How far all that the source's sites read has moved."""
        sites = list({pair.source.input: pair.source for pair in reversed(self.models.pairs)}.values())[::-1]

        def begin() -> tuple[dict[str, Moved], RowConsumer]:
            moved = {site.input: Moved() for site in sites}
            return moved, lambda _, pair, x, y: moved[pair.target.input].add(x, y)

        both = (Deltas({}), self.models.source_names(checkpoint.vector))
        self.watch.progress("drift", 0, 1)
        found = self._beside(self.models.source, self.heads.source, sites, both, Kind.INPUTS, begin)
        for site in sites:
            moved = found[site.input]
            yield Drift(
                name=site.input,
                block=site.block,
                tower=site.tower,
                checkpoint=checkpoint.name,
                direction=moved.direction,
                magnitude=moved.magnitude,
            )

    def _beside(
        self,
        model: LiveModel,
        head: Head,
        sites: Sequence[Site],
        both: tuple[Deltas, Deltas],
        kind: Kind,
        begin: Callable[[], tuple[Result, RowConsumer]],
    ) -> Result:
        """One model with either of two changes, over the same samples."""
        pairs = [SitePair(site, site) for site in sites]
        first, second = (Side(_Changed(model, changes), model.layout.tokens, stays=False) for changes in both)

        def passes(size: int) -> Iterator[tuple[Pass, Pass]]:
            done = 0
            for samples, labels in self.calibration.samples.batches(size):
                asked = partial(head.losses, model, LossBatch(model.ready(samples), labels, first=done))
                yield asked, asked
                done += len(labels)

        def run(size: int) -> Result:
            found, take = begin()
            pass_rows(pairs, first, second, passes(size), {kind}, take)
            return found

        return halving_batches(self.settings.batch, run)


@dataclass(frozen=True)
class _Changed:
    """A model that has its changes while it is watched, and at no other time."""

    model: LiveModel
    changes: Deltas

    @contextmanager
    def observed(self, sites: Sequence[Site], trace: Trace) -> Iterator[Trace]:
        with self.changes.applied_to(self.model.module), self.model.observed(sites, trace):
            yield trace

    def checkpointed(self, trace: Trace, whole_blocks: bool, looked_into: bool) -> AbstractContextManager[None]:
        return self.model.checkpointed(trace, whole_blocks, looked_into)

    def weight(self, name: str) -> Tensor:
        return self.model.weight(name)


def _by_revision(checkpoint: FineTune, reference: ModelReference) -> FineTune:
    """A revision of a repo under a name that tells it: the repo's own would be that of all of them."""
    place = parse(reference, A_CHECKPOINT) if isinstance(reference, str) else None
    return replace(checkpoint, name=str(place)) if isinstance(place, HubReference) else checkpoint


def _told_apart(checkpoints: Sequence[FineTune]) -> list[FineTune]:
    """Under names of their own: folders may share one, and loaded models that of their class."""
    seen: Counter[str] = Counter()
    found = []
    for one in checkpoints:
        seen[one.name] += 1
        found.append(one if seen[one.name] == 1 else replace(one, name=f"{one.name} ({seen[one.name]})"))
    return found


def _affordable(pairs: Sequence[SitePair], room: int) -> list[list[SitePair]]:
    """Pairs whose sums of products fit together, at least one at a time."""
    groups: list[list[SitePair]] = [[]]
    used = 0
    for pair in pairs:
        source, target = pair.source.shape[1], pair.target.shape[1]
        size = FLOAT64 * (source**2 + target**2 + 3 * source * target)
        if groups[-1] and used + size > room:
            groups.append([])
            used = 0
        groups[-1].append(pair)
        used += size
    return groups


def _rows(model: LiveModel, samples: int, paired: int) -> int:
    """How many tokens of these samples run through a model; of texts, those that were paired."""
    tokens = model.layout.tokens
    return paired if tokens is None else samples * (tokens.prefix + prod(tokens.grid))
