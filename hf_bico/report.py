"""What a port carried and how well, as plain tables. Reads records; measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_bico.models.layout import role_labels
from hf_bico.record import LeftRecord, SiteRecord
from hf_bico.utils.text import format_table, markdown_table, plain


@dataclass(frozen=True)
class Report:
    """Per-site ranks, scores and energies, and what was left behind."""

    sites: tuple[SiteRecord, ...]
    left: tuple[LeftRecord, ...]

    @property
    def carried_energy(self) -> float:
        """The share of the task vector that lies in carried sites."""
        return 1.0 - sum(entry.energy for entry in self.left)

    @property
    def unseen_energy(self) -> float | None:
        """The share of the carried sites' energy that lay where calibration saw nothing."""
        takers = Counter(site.source for site in self.sites)
        weighted = [(s.energy / takers[s.source], s.unseen) for s in self.sites if s.unseen is not None]
        total = sum(energy for energy, _ in weighted)
        return sum(energy * unseen for energy, unseen in weighted) / total if total else None

    def left_by_reason(self) -> list[tuple[str, int, float]]:
        """(reason, tensors, share of the energy), the largest first."""
        reasons = dict.fromkeys(entry.reason for entry in self.left)
        rows = [(reason, [entry for entry in self.left if entry.reason == reason]) for reason in reasons]
        summed = [(reason, len(entries), sum(entry.energy for entry in entries)) for reason, entries in rows]
        return sorted(summed, key=lambda row: -row[2])

    def summary(self) -> str:
        """Where the task vector's energy went, in one line."""
        text = f"{self.carried_energy:.1%} of the task vector's energy is in carried sites"
        if self.unseen_energy is not None:
            text += f", of which {self.unseen_energy:.1%} lay where calibration saw nothing"
        left = ", ".join(f"{reason} {energy:.1%}" for reason, _, energy in self.left_by_reason())
        return f"{text}; left behind: {left}" if left else text

    def __repr__(self) -> str:
        return f"Report of {len(self.sites)} sites: {self.summary()}"

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return f"{markdown_table(self.rows())}\n\n{plain(self.summary(), 2000)}"

    def table(self) -> str:
        """One line a role: how many sites, their energy, scores, ranks and unseen energy, as far as they are known."""
        return format_table(self.rows())

    def rows(self) -> list[list[str]]:
        """The table's head, then a row for each role."""
        rows: list[tuple[str, ...]] = [
            ("role", "sites", "energy", "score in", "score out", "rank in", "rank out", "unseen", "rank", "kept")
        ]
        labels = role_labels(site.role for site in self.sites)
        for label in dict.fromkeys(labels.values()):
            rows.append(_role_row(label, [site for site in self.sites if labels[site.role] == label]))
        known = [column for column, _ in enumerate(rows[0]) if any(row[column] != "-" for row in rows[1:])]
        return [[row[column] for column in known] for row in rows]


def _role_row(role: str, sites: Sequence[SiteRecord]) -> tuple[str, ...]:
    # a source site that several target blocks take counts once
    energy = sum({site.source: site.energy for site in sites}.values())
    return (
        role,
        str(len(sites)),
        f"{energy:.1%}",
        _mean(site.score_in for site in sites),
        _mean(site.score_out for site in sites),
        _span(site.rank_in for site in sites),
        _span(site.rank_out for site in sites),
        _mean((site.unseen for site in sites), percent=True),
        _held_rank(sites),
        _mean((site.kept for site in sites), percent=True),
    )


def _held_rank(sites: Sequence[SiteRecord]) -> str:
    """The rank at which an adapter holds these sites; some may be saved as they will be."""
    exact = any(site.kept is not None and site.rank is None for site in sites)
    ranks = _span(site.rank for site in sites)
    return ranks if not exact else "exact" if ranks == "-" else f"{ranks}, exact"


def _mean(values: Iterable[float | None], percent: bool = False) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = sum(known) / len(known)
    return f"{mean:.1%}" if percent else f"{mean:.3f}"


def _span(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return str(low) if low == high else f"{low}-{high}"
