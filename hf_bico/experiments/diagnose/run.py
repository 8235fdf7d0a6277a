"""Compares two models layer by layer, before and after alignment, and returns a `Diagnosis`. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor

from hf_bico.alignment.calibration_pass import RowConsumer, Side, pass_rows
from hf_bico.alignment.memory import FLOAT64
from hf_bico.alignment.methods import make_method, method_class
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.alignment.methods.base import Carrier
from hf_bico.alignment.objectives.base import Head, LossBatch
from hf_bico.alignment.procrustes import polar
from hf_bico.alignment.similarity import ActivationDrift, Likeness, RunningMean, cosine_distances
from hf_bico.alignment.statistics import Kind, key_of
from hf_bico.arguments import DiagnoseOptions, settings_of, takes
from hf_bico.errors import UnsuitableMethodError, UsageError
from hf_bico.experiments.diagnose.diagnosis import Diagnosis
from hf_bico.experiments.diagnose.findings import UNTOUCHED_TARGET, Drift, InputLikeness, OutputLikeness, cost_of
from hf_bico.hub.client import Hub, locate
from hf_bico.hub.references import HubReference, parse
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import LiveModel
from hf_bico.models.hooks import Pass, Trace
from hf_bico.models.layout import Site, SitePair
from hf_bico.models.model import Model, ModelReference
from hf_bico.porting.calibration import Calibration, no_predictions
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import plan_port, with_model_defaults
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
from hf_bico.settings import AUTO, METHODS, Settings
from hf_bico.utils import __version__
from hf_bico.utils.progress import ShownProgress, callback_of

COMPARED = ("input-only", "theseus", "bico")
"""The methods whose outputs are compared with the fine-tuned target's by default."""
TUNED_TARGET, A_CHECKPOINT = "the fine-tuned target", "a checkpoint"
"""Names of these models in error messages."""
Sums = TypeVar("Sums")


@torch.inference_mode(False)
@enough_memory()
@exact_float32()
@translate_errors()
@takes("split", "data", "limits", "aligning", "tower", "force", "n", "per_class", "method")
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
    progress: ShownProgress = None,
    **options: Unpack[DiagnoseOptions],
) -> Diagnosis:
    """Compare `base` and `to` layer by layer on some samples, and diagnose the transport of the task vector.

    Returns linear CKA and mean cosine of the sites' inputs, before and after the input-side map; rank, score, energy
    and unseen energy of every site; the drift of the inputs of the source's sites, from the base to each of the
    `checkpoints` and to `source`; and the cost. With `fine_tuned`, the target fine-tuned directly, the outputs of
    every layer are compared with its own, for the untouched target and each of the `methods`. To compare two models
    that were not fine-tuned, give the base as the source too. The other options are those of `hf_bico.Settings`.

    >>> hf_bico.diagnose("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", n=100).table()  # doctest: +SKIP
    """
    settings, hub = _at_given_alpha(replace(settings_of(diagnose, options), evaluate=False)), Hub(token)
    if not issubclass(method_class(settings.method), Aligner):
        raise UsageError(f"{settings.method} finds no maps to diagnose", "use a method that aligns, such as bico")
    methods = [methods] if isinstance(methods, str) else methods
    names = _carriers(methods)
    planned = plan_port(source, to, base=base, data=data, hub=hub, allow_pickle=allow_pickle)
    if fine_tuned is not None:
        names = _suitable(names, planned, settings, skip_others="all" in methods)
    for role, references in ((TUNED_TARGET, [fine_tuned]), (A_CHECKPOINT, checkpoints)):
        for reference in references:
            if isinstance(reference, str | Path):  # a missing model is refused before any large download
                locate(reference, role, hub)
    watch, device = Stopwatch(callback_of(progress)), choose_device(settings.device)
    ready = prepare(planned, settings, hub, watch, device, allow_unchanged=True)
    measurement, lineage = _Measurement(ready, watch), ready.models.lineage
    tuned = None
    if fine_tuned is not None:
        tuned = FineTune.over(lineage.target, fine_tuned, TUNED_TARGET, hub, allow_pickle)
    steps = [
        _named_by_revision(FineTune.over(lineage.base, one, A_CHECKPOINT, hub, allow_pickle), one)
        for one in checkpoints
    ]
    return measurement.diagnosis(tuned, names, steps)


def _at_given_alpha(settings: Settings) -> Settings:
    """Return the settings with the paper's method and alpha, where models and samples would choose them."""
    method, alpha = "bico" if settings.method == AUTO else settings.method, settings.alpha
    return replace(settings, method=method, alpha=1.0 if settings.finds_alpha else alpha, bold=False)


def _carriers(methods: Sequence[str]) -> list[str]:
    """Expand "all" and refuse methods that carry no task vector."""
    known = [name for name in METHODS if issubclass(method_class(name), Carrier)]
    names = list(dict.fromkeys(one for name in methods for one in (known if name == "all" else [name])))
    for name in names:
        if name not in known:
            raise UsageError(f"'{name}' carries no task vector", f"name some of: all, {', '.join(known)}")
    if not names:
        raise UsageError("no method is named", f"name some of: all, {', '.join(known)}")
    return names


def _suitable(names: Sequence[str], planned: Plan, settings: Settings, skip_others: bool) -> list[str]:
    """Return the methods that can carry between these models; skip or refuse the others."""
    suitable, lineage = [], planned.lineage
    resolved = with_model_defaults(settings, *lineage.layouts)
    for name in names:
        method = make_method(name, settings)
        try:
            method.require(*lineage.layouts, planned.main_pairs or planned.pairs)
            if method.needs_predictions and not resolved.predicts:
                raise no_predictions(name)
            suitable.append(name)
        except UnsuitableMethodError:
            if not skip_others:
                raise
    return suitable


class _Measurement:
    """Measures two models on one draw of samples."""

    def __init__(self, ready: PreparedPort, watch: Stopwatch) -> None:
        if ready.drawn is None or ready.heads is None:
            raise TypeError("a diagnosis needs samples")
        self.models, self.settings, self.watch = ready.models, ready.settings, watch
        self.drawn, self.heads = ready.drawn, ready.heads
        self.calibration = self._calibration(watch, self.settings)

    def _calibration(self, watch: Stopwatch, settings: Settings, keeps: bool = False) -> Calibration:
        kept = {"keeps": keeps, "compares": not keeps}
        return Calibration(self.models, self.drawn, self.heads, watch, settings, **kept)

    def diagnosis(self, tuned: FineTune | None, methods: Sequence[str], checkpoints: Sequence[FineTune]) -> Diagnosis:
        lineage, settings = self.models.lineage, self.settings
        port_watch = Stopwatch(self.watch.callback)
        carried = self._calibration(port_watch, settings).carry(self._carrier(settings.method))
        report = energy_report(self.models.vector, carried, self.models.pairs, self.models.planned.left)
        inputs = self.inputs()
        steps = _with_unique_names([*checkpoints, FineTune(lineage.source.name, self.models.vector, None)])
        paired, samples = max(one.rows for one in inputs), len(self.calibration.samples)
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
                self.models.pairs,
                parameters=(_parameters(lineage.base), _parameters(lineage.target)),
                rows=(_rows(self.models.source, samples, paired), _rows(self.models.target, samples, paired)),
                paired=paired,
                seconds=port_watch.seconds,
            ),
            fine_tuned=None if tuned is None else tuned.name,
            outputs=[] if tuned is None else list(self.outputs(tuned, methods)),
            checkpoints=[step.name for step in steps],
            drift=[drift for step in steps for drift in self.drift(step)],
            seed=settings.seed,
            device=device_name(self.models.device),
            versions=installed_versions(),
        )

    def _carrier(self, name: str) -> Carrier:
        method = make_method(name, self.settings)
        assert isinstance(method, Carrier)
        return method

    # both pretrained models

    def inputs(self) -> list[InputLikeness]:
        """Measure CKA and cosine of all inputs of sites, in groups that fit into a quarter of the memory."""
        by_input = {key_of(Kind.INPUTS, pair): pair for pair in reversed(self.models.pairs)}
        pairs = list(reversed(by_input.values()))
        likeness: dict[Any, Likeness] = {}
        memory = self.settings.memory or available_memory(self.models.device)
        for number, group in enumerate(groups := _memory_groups(pairs, memory // 4)):
            self.watch.progress("similarity", number, len(groups))
            likeness |= self._likeness(group)
        return [self._input_likeness(pair, likeness[key_of(Kind.INPUTS, pair)]) for pair in pairs]

    def _likeness(self, pairs: Sequence[SitePair]) -> dict[Any, Likeness]:
        statistics = self.calibration.collect_statistics({Kind.INPUTS}, pairs)
        sums = {key_of(Kind.INPUTS, pair): statistics.of(Kind.INPUTS, pair) for pair in pairs}
        norms = torch.stack([one.norms for one in sums.values()]).tolist()
        maps = polar([one.evidence for one in sums.values()], norms, self.settings.completion)

        def begin() -> tuple[dict[Any, Likeness], RowConsumer]:
            likeness = {key: Likeness(one.matrix) for key, one in zip(sums, maps, strict=True)}
            return likeness, lambda kind, pair, x, y: likeness[key_of(kind, pair)].add(x, y)

        return self.calibration.show_rows(Kind.INPUTS, pairs, begin)

    def _input_likeness(self, pair: SitePair, likeness: Likeness) -> InputLikeness:
        readers = [one.target for one in self.models.pairs if one.target.input == pair.target.input]
        return InputLikeness(
            **_position(pair.target, pair.target.input),
            source=pair.source.input,
            roles=[site.label for site in readers],
            widths=likeness.widths,
            rows=likeness.rows,
            cka=likeness.cka,
            cka_aligned=likeness.cka_aligned,
            cosine=likeness.cosine,
            cosine_aligned=likeness.cosine_aligned,
        )

    # one model with two different changes

    def outputs(self, tuned: FineTune, methods: Sequence[str]) -> Iterator[OutputLikeness]:
        """Measure the cosine of every site's outputs to those of the fine-tuned target."""
        target, layout = self.models.target, self.models.lineage.target.layout
        tuned_changes = tuned.vector.renamed(layout.own_names)
        carriers = {name: self._carrier(name) for name in methods if len(self.models.vector)}
        calibrations = self._calibrations(carriers)
        sites = [pair.target for pair in self.models.pairs]
        for number, name in enumerate((UNTOUCHED_TARGET, *carriers)):
            self.watch.progress("outputs", number, 1 + len(carriers))
            changes = Deltas({}) if name == UNTOUCHED_TARGET else transfer(carriers[name], calibrations[name]).changes

            def begin() -> tuple[dict[str, RunningMean], RowConsumer]:
                means = {site.name: RunningMean() for site in sites}
                return means, lambda _, pair, x, y: means[pair.target.name].add(
                    1 - cosine_distances(x.double(), y.double())
                )

            both = (changes.renamed(layout.own_names), tuned_changes)
            means = self._compare_changes(target, self.heads.target, sites, both, Kind.OUTPUTS, begin)
            for site in sites:
                yield OutputLikeness(**_position(site, site.name), model=name, cosine=means[site.name].value)

    def _calibrations(self, carriers: Mapping[str, Carrier]) -> dict[str, Calibration]:
        """Calibrate for each method; methods with the same number of augmented copies share their statistics."""
        samples = len(self.drawn.samples)
        copies = {name: self.models.copies(carrier.settings, samples) for name, carrier in carriers.items()}
        shared = {}
        for number in dict.fromkeys(copies.values()):
            sharing = [carrier for name, carrier in carriers.items() if copies[name] == number]
            shared[number] = self._calibration(self.watch, sharing[0].settings, keeps=True)
            kinds = {kind for carrier in sharing for kind in carrier.kinds}
            if kinds and shared[number].memory_plan(kinds).passes == 1:
                shared[number].statistics(kinds)
        return {name: shared[number] for name, number in copies.items()}

    def drift(self, checkpoint: FineTune) -> Iterator[Drift]:
        """Measure how far the inputs of the source's sites move from the base to a checkpoint."""
        sites = list({pair.source.input: pair.source for pair in reversed(self.models.pairs)}.values())[::-1]

        def begin() -> tuple[dict[str, ActivationDrift], RowConsumer]:
            moved = {site.input: ActivationDrift() for site in sites}
            return moved, lambda _, pair, x, y: moved[pair.target.input].add(x, y)

        both = (Deltas({}), self.models.source_names(checkpoint.vector))
        self.watch.progress("drift", 0, 1)
        by_input = self._compare_changes(self.models.source, self.heads.source, sites, both, Kind.INPUTS, begin)
        for site in sites:
            moved, at = by_input[site.input], _position(site, site.input)
            yield Drift(**at, checkpoint=checkpoint.name, direction=moved.direction, magnitude=moved.magnitude)

    def _compare_changes(
        self,
        model: LiveModel,
        head: Head,
        sites: Sequence[Site],
        both: tuple[Deltas, Deltas],
        kind: Kind,
        begin: Callable[[], tuple[Sums, RowConsumer]],
    ) -> Sums:
        """Run one model with each of two changes over the same samples."""
        pairs = [SitePair(site, site) for site in sites]
        first, second = (Side(_Changed(model, changes), model.layout.tokens, stays=False) for changes in both)

        def passes(size: int) -> Iterator[tuple[Pass, Pass]]:
            done = 0
            for samples, labels in self.calibration.samples.batches(size):
                losses = partial(head.losses, model, LossBatch(model.ready(samples), labels, first=done))
                yield losses, losses
                done += len(labels)

        def run(size: int) -> Sums:
            result, take = begin()
            pass_rows(pairs, first, second, passes(size), {kind}, take)
            return result

        return halving_batches(self.settings.batch, run)


@dataclass(frozen=True)
class _Changed:
    """A model that has its changes only while it is observed."""

    model: LiveModel
    changes: Deltas

    @contextmanager
    def observed(self, sites: Sequence[Site], trace: Trace) -> Iterator[Trace]:
        with self.changes.applied_to(self.model.module), self.model.observed(sites, trace):
            yield trace

    def checkpointed(self, trace: Trace, whole_blocks: bool) -> AbstractContextManager[None]:
        return self.model.checkpointed(trace, whole_blocks)

    def weight(self, name: str) -> Tensor:
        return self.model.weight(name)


def _position(site: Site, name: str) -> dict[str, Any]:
    return {"name": name, "block": site.block, "tower": site.tower}


def _named_by_revision(checkpoint: FineTune, reference: ModelReference) -> FineTune:
    """Add the revision to the name: several checkpoints may be revisions of one repo."""
    parsed = parse(reference, A_CHECKPOINT) if isinstance(reference, str) else None
    return replace(checkpoint, name=str(parsed)) if isinstance(parsed, HubReference) else checkpoint


def _with_unique_names(checkpoints: Sequence[FineTune]) -> list[FineTune]:
    """Number checkpoints of the same name: folders may share one, and loaded models have that of their class."""
    names = [one.name for one in checkpoints]
    counts = [names[:end].count(name) for end, name in enumerate(names, start=1)]
    numbered = zip(checkpoints, counts, strict=True)
    return [one if count == 1 else replace(one, name=f"{one.name} ({count})") for one, count in numbered]


def _memory_groups(pairs: Sequence[SitePair], memory: int) -> list[list[SitePair]]:
    """Group pairs whose sums of products fit into the memory together, at least one pair per group."""
    groups: list[list[SitePair]] = [[]]
    used = 0
    for pair in pairs:
        source, target = pair.source.shape[1], pair.target.shape[1]
        size = FLOAT64 * (source**2 + target**2 + 3 * source * target)
        if groups[-1] and used + size > memory:
            groups.append([])
            used = 0
        groups[-1].append(pair)
        used += size
    return groups


def _parameters(model: Model) -> int:
    return sum(map(prod, model.checkpoint.shapes.values()))


def _rows(model: LiveModel, samples: int, paired: int) -> int:
    """Count the tokens of these samples in a model; of texts, those that were paired."""
    tokens = model.layout.tokens
    return paired if tokens is None else samples * tokens.count
