"""What an adapter holds of a change: by role or layer, its rank and the share of the energy. Reads records alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_bico.models.layout import OTHER_ROLES, role_labels
from hf_bico.record import LayerRecord, OutputRecord, SiteRecord

OPEN_CLIP = "open_clip ViT"
_EXACT = "exact"
_MOST_NAMED = 6


@dataclass(frozen=True)
class HeldRow:
    """Layers of one kind: how many, of which ranks, and the share of their energy that is kept."""

    label: str
    count: int
    rank: str
    kept: float
    energy: float | None = None

    @property
    def exact(self) -> bool:
        return self.rank.endswith(_EXACT)

    @property
    def is_path(self) -> bool:
        """Whether the label is a path of modules, and no words."""
        return " " not in self.label and self.energy is not None


@dataclass(frozen=True)
class Held:
    """What an adapter holds."""

    what: str
    """What a row is of: "role" or "layer"."""
    rows: Sequence[HeldRow]
    asked: str
    """The rank that was asked for, in words."""
    energy_kept: float | None
    in_place: Sequence[str] = ()
    """Tensors that are loaded in place of the base's."""
    whole_attention: bool = False
    """Whether attention modules are saved whole."""


def held_sites(sites: Sequence[SiteRecord], output: OutputRecord, from_adapter: bool, family: str | None) -> Held:
    """By role, of a port."""
    labels = role_labels(site.role for site in sites)
    rows = []
    for label in dict.fromkeys(labels.values()):
        known = [(site.rank, site.kept) for site in sites if labels[site.role] == label and site.kept is not None]
        if known:
            mean = sum(kept for _, kept in known) / len(known)
            rows.append(HeldRow(label, len(known), _ranks([rank for rank, _ in known]), mean))
    exact = {site.role for site in sites if site.rank is None and site.kept is not None}
    attention = family == OPEN_CLIP and any(role.startswith("attn.") for role in exact)
    return Held("role", rows, _asked(output, from_adapter), output.energy_kept, _in_place(output), attention)


def held_layers(layers: Sequence[LayerRecord], output: OutputRecord, from_adapter: bool, family: str | None) -> Held:
    """By layer, whatever its block; a bias counts to its layer."""
    labels = role_labels(_layer(entry.name) for entry in layers)
    rows = []
    for label in dict.fromkeys(labels.values()):
        own = [entry for entry in layers if labels[_layer(entry.name)] == label]
        energy = sum(entry.energy for entry in own)
        kept = sum(entry.energy * entry.kept for entry in own) / energy if energy else 1.0
        weights = [entry.rank for entry in own if not _is_bias(entry.name)]
        count = len({_layer(entry.name) for entry in own})
        name = "other layers" if label == OTHER_ROLES else label
        rows.append(HeldRow(name, count, _ranks(weights or [None]), kept, energy))
    exact = {entry.name for entry in layers if entry.rank is None}
    attention = family == OPEN_CLIP and any(name.endswith(".attn.in_proj_weight") for name in exact)
    return Held("layer", rows, _asked(output, from_adapter), output.energy_kept, _in_place(output), attention)


def _in_place(output: OutputRecord) -> list[str]:
    """The tensors that are loaded in place of the base's, those of all blocks as one."""
    named = list(dict.fromkeys(role_labels(output.replaced).values()))
    return named if len(named) <= _MOST_NAMED else [*named[: _MOST_NAMED - 1], f"{len(named) - _MOST_NAMED + 1} more"]


def _layer(name: str) -> str:
    return re.sub(r"\.(?:weight|bias)$", "", name)


def _is_bias(name: str) -> bool:
    return name.endswith((".bias", "_bias"))


def _ranks(ranks: Sequence[int | None]) -> str:
    """ "4", "4 to 8", "exact", or "4, or exact" where some layers are."""
    known = sorted({rank for rank in ranks if rank is not None})
    span = [] if not known else [f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"]
    return ", or ".join([*span, *([_EXACT] if None in ranks else [])])


def _asked(output: OutputRecord, from_adapter: bool) -> str:
    rank = output.rank
    if rank is None:
        return "as they came, sums at the sum of their ranks" if from_adapter else "exactly"
    if isinstance(rank, float):
        return f"as factors of the rank that keeps {rank:.4g} of each one's energy"
    return f"as factors of rank {rank:,}, or less where a layer is smaller"
