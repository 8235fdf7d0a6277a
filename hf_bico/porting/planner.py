"""Makes a plan by matching names, shapes and configurations, and chooses defaults that depend on the models.

Reads no weights and imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from hf_bico.alignment.matching import blocks_by_index, pair_sites, require_blocks
from hf_bico.alignment.memory import FLOAT32, FLOAT64, MemoryLimits
from hf_bico.data.draw import CalibrationDraw, draw
from hf_bico.errors import (
    BaseMismatchError,
    EmptyTaskVectorError,
    ModelError,
    NotCachedError,
    UnsupportedModelError,
    UsageError,
)
from hf_bico.hub.client import Hub
from hf_bico.hub.references import hub_reference, is_hub_id
from hf_bico.hub.retries import is_offline
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.derived_tensors import is_buffer, planned_overlap
from hf_bico.models.families.base import TEXT_TOWER
from hf_bico.models.families.generic import require_same_kind
from hf_bico.models.layout import TEXT_SIDE, Layout, SitePair
from hf_bico.models.model import Model, ModelReference, require_same_family
from hf_bico.porting.lineage import Lineage, resolve
from hf_bico.porting.plan import Plan
from hf_bico.porting.planned_tokens import with_tokenizers
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.settings import AUTO, PROBE, Settings

TEXT_TO_TEXT = "text-to-text"
UNMATCHED = "no counterpart in the target"


@translate_errors()
def plan(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    unlabelled: Any = None,
    target_id: str | None = None,
    split: str | None = None,
    config: str | None = None,
    format: str | None = None,
    rank: int | float | None = None,
    memory: int | str | None = None,
    batch_size: int | None = None,
    token: str | None = None,
    hub: Hub | None = None,
    allow_pickle: bool = False,
) -> Plan:
    """Plan a port between these models: resolve and open them, without reading any weight.

    Two tokenizers are compared on a few samples. `memory` is the most to plan with, in bytes or as a text such as
    "8GB"; the arguments of samples and of the result are those of `port`. `hub` is a client to use in place of one
    with this `token`.

    >>> hf_bico.plan("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", memory="8GB").fits  # doctest: +SKIP
    """
    given = {"split": split, "config": config, "format": format, "rank": rank, "memory": memory}
    settings, hub = Settings.of({**given, "batch_size": batch_size}), hub or Hub(token)
    named = {"base": base, "data": data, "unlabelled": unlabelled, "target_id": target_id}
    planned = with_tokenizers(plan_port(source, to, **named, hub=hub, allow_pickle=allow_pickle), settings, hub)
    return planned.in_format(format, rank).reading(split, config).within(memory_limits(settings))


def memory_limits(settings: Settings) -> MemoryLimits:
    """Return the bounds that the settings ask for."""
    size = {"float64": FLOAT64, "bfloat16": FLOAT64 // 4}.get(settings.dtype, FLOAT32)
    return MemoryLimits(settings.memory, settings.batch_size, settings.max_length, size)


@translate_errors()
def plan_port(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    unlabelled: Any = None,
    target_id: str | None = None,
    hub: Hub | None = None,
    allow_pickle: bool = False,
) -> Plan:
    """Plan a port that is going to be run: no sample is read."""
    hub = hub or Hub()
    named = {"base": base, "data": data, "unlabelled": unlabelled}
    planned = make_plan(resolve(source, to, **named, hub=hub, allow_pickle=allow_pickle))
    return planned if target_id is None else _with_target_id(planned, target_id, hub)


def make_plan(lineage: Lineage, blocks: Sequence[int] | None = None, towers: Sequence[str] | None = None) -> Plan:
    """Match blocks, by index unless given, and sites, of all common towers unless given; list what stays behind."""
    base, target = lineage.layouts
    require_same_kind(base, target)
    require_common_objective(base, target)
    if blocks is None:
        blocks = blocks_by_index(base.blocks, target.blocks)
    require_blocks(blocks, base.blocks, target.blocks)
    pairs = pair_sites(base, target, blocks)
    if not pairs:
        raise ModelError("the two models have no site in common", "choose a target of a matching kind")
    carried = {slot.tensor for pair in pairs for slot in pair.source.slots}
    paired_towers = {pair.target.tower for pair in pairs}
    left = {
        slot.tensor: TEXT_TOWER if site.tower and site.tower not in paired_towers else UNMATCHED
        for site in base.sites
        for slot in site.slots
        if slot.tensor not in carried
    }
    method = method_sentence(base, target, pairs)
    shapes = lineage.base.checkpoint.shapes
    others = {name: reason for name, reason in base.others.items() if not is_buffer(name, shapes.get(name, ()))}
    everything = Plan(lineage, tuple(blocks), tuple(pairs), left | others, (), (), method=method)
    source = lineage.source
    planned = _of_adapter(everything, source) if isinstance(source, Adapter) else _of_model(everything, source)
    return planned if towers is None else planned.of_towers(towers)


def method_sentence(base: Layout, target: Layout, pairs: Sequence[SitePair], alpha: float | str = AUTO) -> str:
    """Say which method "auto" is for two models that are asked by their usual objective, and why.

    Nothing is known of models without an objective of their own. With a number for alpha, nothing else is tried.
    """
    if not set(base.objectives) & set(target.objectives):
        return ""
    settings = with_model_defaults(Settings(), base, target).resolved
    predicts = "predicts" if settings.predicts else "does not predict"
    why = f"because the objective, {settings.objective}, {predicts} classes"
    if alpha != AUTO:
        return f"{settings.method}, {why}; alpha {alpha:g}"
    main = [pair for pair in pairs if not pair.target.tower] or pairs
    copies = all(pair.source.shape == pair.target.shape for pair in main)
    also = "; a plain copy is tried too, because all shapes are equal" if copies else ""
    first, *others = (settings.method, *settings.tried_too)
    which = f"{first} or {' or '.join(others)}, as the samples choose" if others else first
    return f"{which}, {why}; alpha by the samples{also}"


def _of_adapter(everything: Plan, adapter: Adapter) -> Plan:
    """Restrict a plan to what the adapter changes."""
    lineage = everything.lineage
    changes = adapter.changes(lineage.base)
    if changes is None:  # which layers it changes only peft can tell, with the models loaded
        unknown = (
            f"Which layers '{adapter.name}' changes is known only once peft has read it: "
            "the plan lists all that it may."
        )
        notices = [notice for notice in lineage.notices if notice != unknown]
        return replace(everything, lineage=replace(lineage, notices=(*notices, unknown)))
    pairs = [pair for pair in everything.pairs if any(slot.tensor in changes for slot in pair.source.slots)]
    if not pairs:
        reasons = sorted({everything.left.get(name, UNMATCHED) for name in changes})
        raise EmptyTaskVectorError(
            f"'{adapter.name}' changes nothing that can be carried ({', '.join(reasons) or 'nothing at all'})",
            "use an adapter of the tower's linear layers",
        )
    return replace(
        everything,
        pairs=tuple(pairs),
        left={name: reason for name, reason in everything.left.items() if name in changes},
        extra=changes.overlap.extra,
        ranks=changes.ranks,
        changed=frozenset(name for name in lineage.base.checkpoint.shapes if name in changes),
    )


def _of_model(everything: Plan, tuned: Model) -> Plan:
    """Restrict a plan to the towers that the fine-tuned model has."""
    base = everything.lineage.base
    require_same_family(tuned, base)
    shared = planned_overlap(tuned, base)
    missing = set(shared.missing)
    for site in base.layout.sites:
        if site.block is not None and not site.tower and site.weight.tensor in missing:
            raise BaseMismatchError(
                f"the fine-tuned model has no '{site.weight.tensor}', which the base has",
                "name the model that was fine-tuned with --base",
            )
    planned = replace(everything, missing=shared.missing, extra=shared.extra)
    return planned.of_towers({pair.target.tower for pair in planned.pairs if pair.source.weight.tensor not in missing})


def with_blocks(planned: Plan, blocks: str | Sequence[int]) -> Plan:
    """Return the plan with these source blocks for the target's; unchanged if `blocks` only names a rule."""
    if isinstance(blocks, str) or tuple(blocks) == planned.blocks:
        return planned
    rematched = make_plan(planned.lineage, blocks, planned.towers)
    return rematched.in_format(planned.requested_format, planned.requested_rank).within(planned.limits)


def _with_target_id(planned: Plan, repo_id: str, hub: Hub) -> Plan:
    """Name a local target by its Hub id, which must hold the same weights."""
    target, reference = planned.lineage.target, hub_reference(repo_id)
    if target.place is None or target.place.repo is not None or reference is None or not is_hub_id(reference.id):
        raise UsageError(f"--target-id is '{repo_id}'", "give the OWNER/NAME of a target that is a folder")
    if is_offline():
        raise NotCachedError(f"whether the target is '{repo_id}' cannot be checked offline", "unset HF_HUB_OFFLINE")
    repo = hub.repo(reference, "the target's id")
    if any(repo.sha256.get(name) != digest for name, digest in target.sha256.items()):
        raise BaseMismatchError(
            f"the weights of the folder '{target.place.name}' are not those of '{repo.id}' on the Hub",
            "give the id, or OWNER/NAME@REVISION, that the folder was downloaded from",
        )
    named = replace(target, name=repo.id, place=replace(target.place, name=repo.id, repo=repo))
    return replace(planned, lineage=replace(planned.lineage, target=named))


def with_model_defaults(settings: Settings, source: Layout, target: Layout) -> Settings:
    """Choose an objective that both models support, and its usual evaluation, where the settings say "auto"."""
    if isinstance(settings.objective, str):
        settings = replace(settings, objective=_objective(settings.objective, source, target))
    if settings.evaluation != "auto":
        return settings
    # the paper measures an encoder by a probe of its features
    return replace(settings, evaluation=PROBE if settings.objective == TEXT_TO_TEXT else "zero-shot")


@dataclass(frozen=True)
class EarlyDraw:
    """Calibration samples that were drawn before a port began, and the seconds that it took."""

    samples: CalibrationDraw
    seconds: float


def draw_early(planned: Plan, settings: Settings, hub: Hub) -> EarlyDraw | None:
    """Draw samples from a local folder before torch is imported, so that mistakes about them are said at once."""
    lineage, started = planned.lineage, perf_counter()
    if not isinstance(lineage.data, Path):
        return None
    return EarlyDraw(
        draw_samples(lineage, with_model_defaults(settings, *lineage.layouts), hub), perf_counter() - started
    )


def draw_samples(lineage: Lineage, settings: Settings, hub: Hub) -> CalibrationDraw:
    """Draw the calibration samples of a port."""
    return draw(lineage.data, settings, hub, known_names=lineage.class_names or None, reads=lineage.reads)


def without_labels(settings: Settings, requested_evaluation: str) -> Settings:
    """Replace a default probe, which is fitted to labels, for data without any; refuse a requested one."""
    if settings.evaluation == "zero-shot" or not settings.evaluate:
        return settings
    if requested_evaluation != "auto":
        raise UsageError(
            f"--evaluation {requested_evaluation} fits a linear probe to labels, and the data has none",
            "use data with labels, or leave --evaluation out",
        )
    return replace(settings, evaluation="zero-shot")


def towers_to_carry(settings: Settings, changed: Collection[str], vision_only: bool) -> tuple[str, ...]:
    """Return the requested towers of a CLIP, else those that the source changed, or the vision tower only."""
    if settings.tower is not None:
        return {"vision": ("",), "text": (TEXT_SIDE,), "both": ("", TEXT_SIDE)}[settings.tower]
    return tuple(changed) if TEXT_SIDE in changed and not vision_only else ("",)


def _objective(requested: str, source: Layout, target: Layout) -> str:
    shared = [name for name in source.objectives if name in target.objectives]
    if requested == "auto" and shared:
        return shared[0]
    if requested in shared:
        return requested
    if shared:
        raise UnsupportedModelError(
            f"these models do not support the objective '{requested}'", f"use one of: auto, {', '.join(shared)}"
        )
    require_common_objective(source, target)
    without = next((layout for layout in (source, target) if not layout.objectives), source)
    kind = f"a {without.kind}" if without.kind else f"a model of the family {without.family}"
    raise UnsupportedModelError(
        f"{kind} has no loss of its own, which the objective '{requested}' needs",
        "port from Python, with objective= a callable (model, batch) -> loss",
    )


def require_common_objective(source: Layout, target: Layout) -> None:
    """Refuse two models that have objectives, but none in common."""
    if source.objectives and target.objectives and not set(source.objectives) & set(target.objectives):
        raise UnsupportedModelError(
            f"the base ({source.family}) has the objective {source.objectives[0]} and the target ({target.family}) "
            f"has {target.objectives[0]}: they have none in common",
            "choose a target of the base's kind",
        )
