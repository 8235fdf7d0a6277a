"""Makes a plan; defaults that depend on the models.

Which objective two models are asked by, and how they are measured, where nobody has said it.

Works on settings and layouts: no weights, no torch.

Making a plan: the sites of a resolved lineage matched by names, shapes and configurations; no weights, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hf_bico.alignment.matching import blocks_by_index, pair_sites, require_blocks
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
from hf_bico.models.families.base import TEXT_TOWER
from hf_bico.models.families.generic import require_same_kind
from hf_bico.models.layout import TEXT_SIDE, Layout
from hf_bico.models.model import Model, ModelReference, require_same_family
from hf_bico.models.name_matching import overlap
from hf_bico.porting.lineage import Lineage, resolve
from hf_bico.porting.plan import Plan
from hf_bico.runtime.library_errors import translate_errors
from hf_bico.settings import PROBE, Settings

TEXT_TO_TEXT = "text-to-text"


def with_model_defaults(settings: Settings, source: Layout, target: Layout) -> Settings:
    """The settings with an objective that both models can give, and with its usual way to measure."""
    if isinstance(settings.objective, str):
        settings = replace(settings, objective=_objective(settings.objective, source, target))
    if settings.evaluation != "auto":
        return settings
    # an encoder is measured by what can be read from it, as in the paper
    return replace(settings, evaluation=PROBE if settings.objective == TEXT_TO_TEXT else "zero-shot")


def without_labels(settings: Settings, asked: str) -> Settings:
    """The settings for data without labels, where `asked` is how to measure: a probe is fitted to labels."""
    if settings.evaluation == "zero-shot" or not settings.evaluate:
        return settings
    if asked != "auto":
        raise UsageError(
            f"--evaluation {asked} fits a linear probe to labels, and the data has none",
            "use data with labels, or leave --evaluation out",
        )
    return replace(settings, evaluation="zero-shot")


def towers_of(settings: Settings, changed: Collection[str], predicts: bool) -> tuple[str, ...]:
    """Which towers of a CLIP are carried: those that were asked for, else those that the source changed.

    What `predicts` classes, or was asked to be zero-shot, looks at the vision tower alone.
    """
    if settings.tower is not None:
        return {"vision": ("",), "text": (TEXT_SIDE,), "both": ("", TEXT_SIDE)}[settings.tower]
    return tuple(changed) if TEXT_SIDE in changed and not predicts else ("",)


def _objective(asked: str, source: Layout, target: Layout) -> str:
    shared = [name for name in source.objectives if name in target.objectives]
    if asked == "auto" and shared:
        return shared[0]
    if asked in shared:
        return asked
    if shared:
        raise UnsupportedModelError(
            f"these models cannot be asked by the objective '{asked}'", f"use one of: auto, {', '.join(shared)}"
        )
    require_kin(source, target)
    raise UnsupportedModelError(
        f"{_named(source, target)} cannot be asked anything by itself, as the objective '{asked}' does",
        "port from Python, with objective= a callable (model, batch) -> loss",
    )


def require_kin(source: Layout, target: Layout) -> None:
    """Refuse two models that are asked in ways that have nothing in common."""
    if source.objectives and target.objectives and not set(source.objectives) & set(target.objectives):
        raise UnsupportedModelError(
            f"the base, of the family {source.family}, is asked by {source.objectives[0]} and the target, of the "
            f"family {target.family}, by {target.objectives[0]}: they have no objective in common",
            "choose a target of the base's kind",
        )


def _named(*layouts: Layout) -> str:
    without: Sequence[Layout] = [layout for layout in layouts if not layout.objectives] or layouts
    return f"a {without[0].kind}" if without[0].kind else f"a model of the family {without[0].family}"


UNMATCHED = "no counterpart in the target"


@translate_errors()
def plan(
    source: ModelReference,
    to: ModelReference,
    *,
    base: ModelReference | None = None,
    data: Any = None,
    target_id: str | None = None,
    hub: Hub | None = None,
    allow_pickle: bool = False,
) -> Plan:
    """What `port` would do with these models; resolves and opens them, but reads no weight.

    >>> hf_bico.plan("user/vit-b16-eurosat", to="laion/ViT-B-16-plus").pairs  # doctest: +SKIP
    """
    hub = hub or Hub()
    planned = make_plan(resolve(source, to, base=base, data=data, hub=hub, allow_pickle=allow_pickle))
    return planned if target_id is None else _with_target_id(planned, target_id, hub)


def _with_target_id(planned: Plan, repo_id: str, hub: Hub) -> Plan:
    """The plan with a local target known by its Hub id, which must hold the same weights."""
    target, found = planned.lineage.target, hub_reference(repo_id)
    if target.place is None or target.place.repo is not None or found is None or not is_hub_id(found.id):
        raise UsageError(f"--target-id is '{repo_id}'", "give the OWNER/NAME of a target that is a folder")
    if is_offline():
        raise NotCachedError(f"whether the target is '{repo_id}' cannot be checked offline", "unset HF_HUB_OFFLINE")
    repo = hub.repo(found, "the target's id")
    if any(repo.sha256.get(name) != digest for name, digest in target.sha256.items()):
        raise BaseMismatchError(
            f"the weights of the folder '{target.place.folder.name}' are not those of '{repo.id}' on the Hub",
            "give the id, or OWNER/NAME@REVISION, that the folder was downloaded from",
        )
    named = replace(target, name=repo.id, place=replace(target.place, name=repo.id, repo=repo))
    return replace(planned, lineage=replace(planned.lineage, target=named))


def matched(planned: Plan, blocks: str | Sequence[int]) -> Plan:
    """The same plan with these source blocks for the target's; a rule for finding some is no list yet."""
    if isinstance(blocks, str) or tuple(blocks) == planned.blocks:
        return planned
    again = make_plan(planned.lineage, blocks, planned.towers)
    return again.in_form(planned.asked_format, planned.asked_rank)


def make_plan(lineage: Lineage, blocks: Sequence[int] | None = None, towers: Sequence[str] | None = None) -> Plan:
    """Match blocks, by index if nothing else is said, and sites, and say what stays behind.

    Sites of all towers that both models have are paired, or of these `towers` alone.
    """
    base, target = lineage.base, lineage.target
    require_same_kind(base.layout, target.layout)
    require_kin(base.layout, target.layout)
    if blocks is None:
        blocks = blocks_by_index(base.layout.blocks, target.layout.blocks)
    require_blocks(blocks, base.layout.blocks, target.layout.blocks)
    pairs = pair_sites(base.layout, target.layout, blocks)
    if not pairs:
        raise ModelError("the two models have no site in common", "choose a target of a matching kind")
    carried = {slot.tensor for pair in pairs for slot in pair.source.slots}
    found = {pair.target.tower for pair in pairs}
    stay = [(site, slot.tensor) for site in base.layout.sites for slot in site.slots if slot.tensor not in carried]
    left = {tensor: TEXT_TOWER if site.tower and site.tower not in found else UNMATCHED for site, tensor in stay}
    left.update(base.layout.others)
    everything = Plan(lineage, tuple(blocks), tuple(pairs), left, (), ())
    if isinstance(lineage.source, Adapter):
        planned = _of_adapter(everything, lineage.source)
    else:
        planned = _of_model(everything, lineage.source)
    return planned if towers is None else planned.of_towers(towers)


def _of_adapter(everything: Plan, adapter: Adapter) -> Plan:
    """What the adapter changes of all that could be carried."""
    changes = adapter.changes(everything.lineage.base)
    if changes is None:  # which layers it changes only peft can tell, with the models loaded
        untold = f"Which layers '{adapter.name}' changes is known once peft has read it: the sites are those it may."
        notices = [notice for notice in everything.lineage.notices if notice != untold]
        return replace(everything, lineage=replace(everything.lineage, notices=(*notices, untold)))
    pairs = [pair for pair in everything.pairs if any(slot.tensor in changes for slot in pair.source.slots)]
    if not pairs:
        reasons = sorted({everything.left.get(name, UNMATCHED) for name in changes})
        raise EmptyTaskVectorError(
            f"'{adapter.name}' changes nothing that can be carried ({', '.join(reasons) or 'nothing at all'})",
            "use an adapter of the tower's linear layers",
        )
    left = {name: reason for name, reason in everything.left.items() if name in changes}
    changed = frozenset(name for name in everything.lineage.base.checkpoint.shapes if name in changes)
    found = replace(everything, pairs=tuple(pairs), left=left, extra=changes.extra)
    return replace(found, ranks=changes.ranks, changed=changed)


def _of_model(everything: Plan, tuned: Model) -> Plan:
    base = everything.lineage.base
    require_same_family(tuned, base)
    shared = overlap(tuned.checkpoint.shapes, base.checkpoint.shapes)
    _require_blocks(base.layout, shared.missing)
    found = replace(everything, missing=shared.missing, extra=shared.extra)
    lacking = set(shared.missing)
    held = {pair.target.tower for pair in found.pairs if pair.source.weight.tensor not in lacking}
    return found.of_towers(tuple(tower for tower in found.towers if tower in held))


def _require_blocks(base: Layout, missing: Sequence[str]) -> None:
    lacking = set(missing)
    for site in base.sites:
        if site.block is not None and not site.tower and site.weight.tensor in lacking:
            raise BaseMismatchError(
                f"the fine-tuned model has no '{site.weight.tensor}', which the base has",
                "name the model that was fine-tuned with --base",
            )
