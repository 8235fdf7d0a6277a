"""From a task vector over the source to one over the target, site by site, with an account of its energy.

Knows task vectors, sites and methods; not models, samples or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from hf_bico.checkpoints import Checkpoint
from hf_bico.deltas import Deltas, add_delta
from hf_bico.errors import EmptyTaskVectorError, ImplausibleTaskVectorError, NonFiniteWeightsError
from hf_bico.methods import Carried, SiteDelta
from hf_bico.record import LeftRecord, SiteRecord
from hf_bico.report import Report
from hf_bico.sites import Site, SitePair, Slot

IMPLAUSIBLE = 0.9
"""The median site's |tau| / |W| that fine-tuning does not reach; two unrelated models lie above 1."""


def site_delta(vector: Deltas, site: Site) -> SiteDelta:
    """What the vector changes at one site."""
    return SiteDelta(_read(vector, site.weight), None if site.bias is None else _read(vector, site.bias))


def _read(vector: Deltas, slot: Slot) -> Tensor | None:
    if slot.tensor not in vector:
        return None
    part: Tensor = slot.view(vector[slot.tensor])
    return part if bool(part.any()) else None


def require_plausible(vector: Deltas, sites: Sequence[Site], base: Checkpoint, force: bool) -> None:
    """Refuse a vector that changes nothing that can be carried, or that no fine-tuning would give.

    `sites` are those that it changes.
    """
    if not sites:
        where = "only in tensors that are not carried" if len(vector) else "nowhere"
        raise EmptyTaskVectorError(
            f"the fine-tuned model differs from its base {where}",
            "check that --base is not the fine-tuned model itself",
        )
    ratios = [_ratio(vector, site.weight, base) for site in sites]
    if median(ratios) > IMPLAUSIBLE and not force:
        raise ImplausibleTaskVectorError(
            f"the fine-tuned model differs from its base by {median(ratios):.0%} of the weights' own norm, "
            "which fine-tuning does not do",
            "name the model that was really fine-tuned with --base, or insist with --force",
        )


def _ratio(vector: Deltas, slot: Slot, base: Checkpoint) -> float:
    """|tau| / |W| of one weight."""
    change = _read(vector, slot)
    if change is None:
        return 0.0
    start: Tensor = slot.view(base.tensor(slot.tensor))
    return float(change.norm() / start.to(change.dtype).norm())


def gather(carried: Mapping[str, Carried], pairs: Iterable[SitePair], target: Checkpoint, alpha: float) -> Deltas:
    """alpha times the carried changes, put into the target's tensors."""
    deltas: dict[str, Tensor] = {}
    for pair in pairs:
        delta = carried[pair.target.name].delta
        for slot, change in ((pair.target.weight, delta.weight), (pair.target.bias, delta.bias)):
            if slot is not None and change is not None:
                if slot.tensor not in deltas:
                    wide = torch.promote_types(target.tensor(slot.tensor).dtype, torch.float32)
                    deltas[slot.tensor] = torch.zeros(target.shapes[slot.tensor], dtype=wide)
                slot.view(deltas[slot.tensor]).copy_(alpha * change)
    return Deltas(deltas)


def as_stored(vector: Deltas, target: Checkpoint) -> tuple[Deltas, float | None]:
    """The change that is left once the sum is rounded to the target's own dtype, and the share that is lost.

    The share is None where the target is stored in full precision.
    """
    stored, lost, total = {}, 0.0, 0.0
    for name in vector:
        delta = vector[name]
        start = target.tensor(name).to(delta.device)
        changed = add_delta(start, delta, name)
        if not bool(torch.isfinite(changed).all()):
            raise NonFiniteWeightsError(
                f"the change takes '{name}' beyond what {start.dtype} holds", "add less of it with --alpha"
            )
        stored[name] = changed.to(delta.dtype) - start.to(delta.dtype)
        lost += _energy(stored[name] - delta)
        total += _energy(delta)
    halved = any(target.tensor(name).dtype.itemsize < 4 for name in vector)
    return Deltas(stored), lost / total if halved and total else None


def account(
    vector: Deltas, carried: Mapping[str, Carried], pairs: Iterable[SitePair], left: Mapping[str, str]
) -> Report:
    """Where the task vector's energy went: into which sites, how much unseen, and what stayed behind."""
    total = sum(vector.energy(name) for name in vector)
    sites = []
    for pair in pairs:
        result = carried[pair.target.name]
        energy = sum(_energy(_read(vector, slot)) for slot in pair.source.slots)
        r_in, r_out = result.input_map, result.output_map
        sites.append(
            SiteRecord(
                name=pair.target.name,
                role=pair.target.role,
                source=pair.source.name,
                shape_source=pair.source.shape,
                shape_target=pair.target.shape,
                energy=energy / total,
                rank_in=None if r_in is None else r_in.rank,
                rank_out=None if r_out is None else r_out.rank,
                score_in=None if r_in is None else r_in.score,
                score_out=None if r_out is None else r_out.score,
                unseen=result.unseen,
            )
        )
    stayed = [LeftRecord(name, reason, vector.energy(name) / total) for name, reason in left.items() if name in vector]
    return Report(tuple(sites), tuple(stayed))


def _energy(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.double().square().sum())
