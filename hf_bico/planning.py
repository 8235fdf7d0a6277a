"""Making a plan: the sites of a resolved lineage matched by names, shapes and configurations; no weights, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_bico.alignment.matching import blocks_by_index, pair_sites, require_blocks
from hf_bico.choosing import require_kin
from hf_bico.errors import BaseMismatchError, EmptyTaskVectorError, ModelError, NotCachedError, UsageError
from hf_bico.hub.client import Hub
from hf_bico.hub.references import hub_reference, is_hub_id
from hf_bico.hub.retries import is_offline
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.families.base import TEXT_TOWER
from hf_bico.models.families.generic import require_same_kind
from hf_bico.models.layout import Layout
from hf_bico.models.model import Model, ModelReference, require_same_family
from hf_bico.models.name_matching import overlap
from hf_bico.plans import Plan
from hf_bico.resolving import Lineage, resolve
from hf_bico.runtime.library_errors import last_net

UNMATCHED = "no counterpart in the target"


@last_net()
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
