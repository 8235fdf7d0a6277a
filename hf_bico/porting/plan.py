"""A plan as data, in words and as JSON: what a port would carry and leave behind, and what it needs.

Knows what was matched; not how. No weights, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_bico.alignment.memory import (
    BATCH,
    BATCH_ON_CPU,
    CAPTION_TOKENS,
    FLOAT32,
    USUAL_TOKENS,
    MemoryLimits,
    MemoryPlan,
    ModelFootprint,
    needs_of,
    plan_memory,
)
from hf_bico.errors import EmptyTaskVectorError
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import FileCheckpoint, HeaderCheckpoint
from hf_bico.models.families.base import TEXT_TOWER, VISION_TOWER
from hf_bico.models.layout import Site, SitePair
from hf_bico.models.model import Model
from hf_bico.porting.lineage import Lineage
from hf_bico.runtime.output import require_room
from hf_bico.utils.progress import Progress, silent
from hf_bico.utils.samples import TEXTS
from hf_bico.utils.text import machine_memory, markdown_table, size_text


@dataclass(frozen=True)
class Plan:
    """What would be done."""

    lineage: Lineage
    blocks: tuple[int, ...]
    """The source block of each target block."""
    pairs: tuple[SitePair, ...]
    left: dict[str, str]
    """Source tensors that stay behind, by name, with the reason."""
    missing: tuple[str, ...]
    """Tensors of the base that the fine-tuned model lacks."""
    extra: tuple[str, ...]
    """Tensors of the fine-tuned model that the base lacks."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of a LoRA's layers, by the base's tensors."""
    changed: frozenset[str] | None = None
    """The base's tensors that an adapter changes, where that is known; of a fine-tuned model, any may be."""
    asked_format: str | None = None
    asked_rank: int | float | None = None
    limits: MemoryLimits = field(default_factory=MemoryLimits)

    def __repr__(self) -> str:
        source, base, target = self.lineage.models
        blocks = f"{base.layout.blocks} -> {target.layout.blocks} blocks"
        text = f", {len(self.text_pairs)} of the text tower" if self.text_pairs else ""
        sites = f"{len(self.main_pairs)} sites of {blocks}{text}"
        return f"Plan of {source.name} to {target.name}: {sites}, {_written_form(self)}"

    def rows(self) -> list[tuple[str, str]]:
        """The plan in words: (word, what there is to say about it)."""
        return _rows(self)

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return markdown_table([("", "what would be done"), *self.rows()], align="---")

    @property
    def format(self) -> str:
        """In which form the result is written: the one that is asked for, else the source's own."""
        source = self.lineage.source
        usual = "adapter" if isinstance(source, Adapter) and source.low_rank else "full"
        return self.asked_format or ("adapter" if self.asked_rank is not None else usual)

    def in_form(self, format: str | None, rank: int | float | None) -> Plan:
        """The same plan for a result of another form."""
        return replace(self, asked_format=format, asked_rank=rank)

    def within(self, limits: MemoryLimits) -> Plan:
        """The same plan within other limits."""
        return replace(self, limits=limits)

    @property
    def main_pairs(self) -> tuple[SitePair, ...]:
        return tuple(pair for pair in self.pairs if not pair.target.tower)

    @property
    def text_pairs(self) -> tuple[SitePair, ...]:
        """Those of a CLIP's text tower, beside the vision tower that is its main one."""
        return tuple(pair for pair in self.pairs if pair.target.tower)

    @property
    def towers(self) -> tuple[str, ...]:
        """Those that the paired sites are of."""
        return tuple(dict.fromkeys(pair.target.tower for pair in self.pairs))

    def of_towers(self, towers: Sequence[str]) -> Plan:
        """The same plan with the sites of these towers alone; what the others hold stays behind."""
        kept = tuple(pair for pair in self.pairs if pair.target.tower in towers)
        if len(kept) == len(self.pairs):
            return self
        base = self.lineage.base
        left = self.left | {
            slot.tensor: TEXT_TOWER if site.tower else VISION_TOWER
            for site in base.layout.sites
            for slot in site.slots
            if site.tower not in towers and (self.changed is None or slot.tensor in self.changed)
        }
        if not kept:
            reasons = ", ".join(sorted(set(left.values())))
            raise EmptyTaskVectorError(
                f"'{self.lineage.source.name}' changes nothing that can be carried ({reasons})",
                "name the tower that it changes with --tower",
            )
        places = {name: place for place, name in enumerate(base.checkpoint.shapes)}
        return replace(self, pairs=kept, left={name: left[name] for name in sorted(left, key=places.__getitem__)})

    def memory_plan(
        self,
        memory: int | None = None,
        batch_size: int | None = None,
        tokens: int | None = None,
        itemsize: int = FLOAT32,
        turns: Sequence[bool] = (False, True),
        batch_cost: float = BATCH,
    ) -> MemoryPlan:
        """How it would be done with so much memory, and what it would take at its peak: an estimate.

        Of texts, those of `tokens` tokens are reckoned with, and of an adapter's maps all that may be asked for.
        `turns` says whether the models stay on the device, or are there in turn: in the order in which that is tried.
        """
        base, target = (
            ModelFootprint(model.layout, model.checkpoint.shapes, itemsize, tokens or _tokens(model))
            for model in (self.lineage.base, self.lineage.target)
        )
        language = "language-modelling" in self.lineage.base.layout.objectives[:1]
        needs = needs_of(self.main_pairs or self.pairs, base, target, ranks=self.ranks, language=language)
        return plan_memory(needs, memory, batch_size, turns, batch_cost)

    @cached_property
    def fitted(self) -> MemoryPlan:
        """How it would be done within the limits that are asked for, else in this machine's main memory."""
        asked = self.limits
        sizes = (asked.batch_size, asked.tokens, asked.itemsize)
        if asked.memory is None:  # in main memory, both models always are
            return self.memory_plan(machine_memory(), *sizes, turns=(False,), batch_cost=BATCH_ON_CPU)
        return self.memory_plan(asked.memory, *sizes)

    @property
    def memory_bytes(self) -> int:
        """What it takes at its peak: an estimate."""
        return self.fitted.bytes

    @property
    def download_bytes(self) -> int:
        """What is not on this machine yet of the three models; the data set's samples come on top."""
        source, base, target = self.lineage.models
        places = {(model.name, model.commit): (model.place, model.needed()) for model in (base, target)}
        places.setdefault((source.name, source.commit), (source.place, source.needed(beside=False)))
        return sum(place.to_download(names) for place, names in places.values() if place is not None)

    def fetched(self, progress: Progress = silent) -> Plan:
        """The same plan with the models' files on this machine."""
        total, done = self.download_bytes, 0

        def downloaded(count: int) -> None:
            nonlocal done
            done += count
            progress("download", done, total)

        if total:
            from huggingface_hub import constants

            cache = Path(constants.HF_HUB_CACHE)
            require_room(cache, total, "what is to be downloaded", "set HF_HOME to a folder on another disk")
            progress("download", 0, total)
        source, base, target = self.lineage.models
        local = replace(
            self.lineage,
            source=source.fetched(downloaded, beside=False),
            base=base.fetched(downloaded),
            target=target.fetched(downloaded),
        )
        return replace(self, lineage=local)

    @property
    def output_bytes(self) -> int | None:
        """About the size of the result; None for an adapter whose ranks are those that keep a share of the energy."""
        if self.format == "adapter":
            return None if isinstance(self.asked_rank, float) else self._adapter_bytes(self.asked_rank)
        checkpoint = self.lineage.target.checkpoint
        if self.format == "delta":
            return 4 * sum(pair.target.shape[0] * (pair.target.shape[1] + 1) for pair in self.pairs)
        if isinstance(checkpoint, FileCheckpoint | HeaderCheckpoint):
            return checkpoint.size
        return 4 * _elements(self.lineage.target)

    def _adapter_bytes(self, asked: int | None) -> int:
        """Factors and biases; a packed attention whose output changes is saved whole."""
        packed = {_place(pair.target) for pair in self.pairs if pair.target.weight.rows is not None}
        outputs = {_place(pair.target) for pair in self.pairs if pair.target.role == "attn.out"}
        whole = {
            site.name: site.shape[0] * (site.shape[1] + 1)
            for site in self.lineage.target.layout.sites
            if _place(site) in packed & outputs and site.role.startswith("attn.")
        }
        rest = [pair for pair in self.pairs if pair.target.name not in whole]
        factors = 0
        for pair in rest:
            rows, columns = pair.target.shape
            if pair.target.weight.rows is not None:  # q, k and v share a tensor, and the ranks of three LoRAs add up
                joins = asked is None and pair.source.weight.rows is None
                rows, columns = (3 * rows, columns) if joins else (rows, columns // 3)
            factors += self._rank(pair, asked) * (rows + columns)
        return 4 * (factors + sum(whole.values()))

    def _rank(self, pair: SitePair, asked: int | None) -> int:
        """Of a site in an adapter: what is asked for, the LoRA's own, or all that the matrix can have."""
        own = self.ranks.get(pair.source.weight.tensor, min(pair.target.shape))
        return min(own if asked is None else asked, min(pair.target.shape))

    @property
    def fits(self) -> bool:
        return self.fitted.fits

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        lineage = self.lineage
        return {
            "source": {"kind": "adapter" if isinstance(lineage.source, Adapter) else "full", **_about(lineage.source)},
            "base": _about(lineage.base),
            "target": _about(lineage.target),
            "data": None if lineage.data_repo is None else _named(lineage.data_repo.id, lineage.data_repo.commit),
            "notices": list(lineage.notices),
            "families": {"source": lineage.base.family.name, "target": lineage.target.family.name},
            "layers": list(self.blocks),
            "sites": [_about_pair(pair) for pair in self.main_pairs],
            "text_sites": [_about_pair(pair) for pair in self.text_pairs],
            "left": [{"name": name, "reason": reason} for name, reason in self.left.items()],
            "missing": list(self.missing),
            "extra": list(self.extra),
            "tokens": {
                part: None if model.layout.tokens is None else asdict(model.layout.tokens)
                for part, model in (("source", lineage.base), ("target", lineage.target))
            },
            "download_bytes": self.download_bytes,
            "memory_bytes": self.memory_bytes,
            "machine_bytes": machine_memory(),
            "memory": {
                "limit": self.limits.memory,
                "batch_size": self.fitted.batch_size,
                "passes": self.fitted.passes,
                "checkpointing": self.fitted.checkpointing,
                "in_turn": self.fitted.alternating,
            },
            "format": self.format,
            "ranks": sorted(set(self.ranks.values())),
            "output_bytes": self.output_bytes,
            "fits": self.fits,
        }


def _rows(planned: Plan) -> list[tuple[str, str]]:
    lineage, taken = planned.lineage, f"taken from {list(planned.blocks)}"
    rows = [
        ("source", _known(lineage.source)),
        ("base", _known(lineage.base)),
        ("target", _known(lineage.target)),
        ("data", _data(planned)),
        *(("note", notice) for notice in lineage.notices),
        ("blocks", f"{lineage.base.layout.blocks} -> {lineage.target.layout.blocks}, {taken}"),
    ]
    tokens = [model.layout.tokens for model in (lineage.base, lineage.target)]
    grids = [" x ".join(map(str, known.grid)) for known in tokens if known is not None]
    if len(grids) == 2:
        rows.append(("tokens", f"{grids[0]} -> {grids[1]} patches"))
    reasons = Counter(planned.left.values())
    left = ", ".join(f"{reason} ({count})" for reason, count in reasons.items())
    if planned.main_pairs:
        rows += [("carried", _sites(planned.main_pairs)), ("shapes", _shapes(planned.main_pairs))]
    if planned.text_pairs:
        known = "" if planned.changed is not None else ", if the source changed them"
        rows.append(("text", f"{_sites(planned.text_pairs)}; carried with captions{known}"))
    rows.append(("left", left or "nothing"))
    if planned.missing:
        rows.append(
            ("missing", f"{len(planned.missing)} tensors of the base are not in the source: taken as unchanged")
        )
    if planned.extra:
        named = ", ".join(planned.extra[:3])
        rows.append(("extra", f"{len(planned.extra)} tensors of the source are not in the base: {named}"))
    return [
        *rows,
        ("fetches", f"{size_text(planned.download_bytes)} of models{', and samples' if lineage.data_repo else ''}"),
        ("memory", _memory(planned)),
        ("writes", _written_form(planned)),
    ]


def _memory(planned: Plan) -> str:
    """How much it takes, how it is done with so little, and whether there is as much."""
    found, limit = planned.fitted, planned.limits.memory
    ways = [
        f" in {found.passes} passes" if found.passes > 1 else "",
        " with activation checkpointing" if found.checkpointing else "",
        " with one model at a time on the GPU" if found.alternating else "",
    ]
    where = "this machine" if limit is None else f"the {size_text(limit)} of --memory"
    how = " and".join(way for way in ways if way)
    if not found.fits:
        return f"about {size_text(found.limit)}{how}: does NOT fit {where}"
    return f"about {size_text(found.bytes)}{how}: fits {where}"


def _written_form(planned: Plan) -> str:
    """How large the result is, and as what it is written."""
    forms = {"full": "as a full model", "adapter": f"as an adapter{_ranks(planned)}", "delta": "as the change alone"}
    size = "" if planned.output_bytes is None else f"{size_text(planned.output_bytes)} "
    return f"{size}{forms[planned.format]}"


def _ranks(planned: Plan) -> str:
    asked = planned.asked_rank
    if isinstance(asked, float):
        return f" that keeps {asked:g} of each layer's energy"
    ranks = sorted(set(planned.ranks.values())) if asked is None else [asked]
    if not ranks:
        return ", exact"
    return f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {ranks[0]} to {ranks[-1]}"


def _known(model: Model | Adapter) -> str:
    commit = "" if model.commit is None else f" at {model.commit[:12]}"
    licence = f", licence {model.origin.license}" if model.origin.license else ""
    kind = model.family.name if isinstance(model, Model) else f"{model.config.kind} adapter"
    return f"{model.name}{commit} ({kind}{licence})"


def _data(planned: Plan) -> str:
    lineage = planned.lineage
    if lineage.data_repo is not None:
        return f"{lineage.data_repo.id} at {lineage.data_repo.commit[:12]}"
    if lineage.data is None:
        return "not known"
    return Path(str(lineage.data)).name if isinstance(lineage.data, str | Path) else "rows"


def _sites(pairs: Sequence[SitePair]) -> str:
    """How many there are of each role."""
    roles = Counter(pair.target.role for pair in pairs)
    return f"{len(pairs)} sites: {', '.join(f'{role} x{count}' for role, count in roles.items())}"


def _shapes(pairs: Sequence[SitePair]) -> str:
    """The shape of each role, source to target."""
    shapes = {
        pair.target.role: f"{pair.target.role} {_by(pair.source.shape)} -> {_by(pair.target.shape)}" for pair in pairs
    }
    return ", ".join(shapes.values())


def _by(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _place(site: Site) -> tuple[str, int | None]:
    """The block that a site is in."""
    return site.tower, site.block


def _about_pair(pair: SitePair) -> dict[str, Any]:
    return {
        "name": pair.target.name,
        "role": pair.target.role,
        "source": pair.source.name,
        "shape_source": list(pair.source.shape),
        "shape_target": list(pair.target.shape),
    }


def _about(model: Model | Adapter) -> dict[str, str]:
    known = {"license": model.origin.license, "pipeline": model.origin.pipeline}
    return {**_named(model.name, model.commit), **{key: value for key, value in known.items() if value}}


def _named(name: str, commit: str | None) -> dict[str, str]:
    return {"id": name} if commit is None else {"id": name, "commit": commit}


def _tokens(model: Model) -> int:
    return USUAL_TOKENS if model.layout.reads == TEXTS else CAPTION_TOKENS


def _elements(model: Model) -> int:
    total = 0
    for shape in model.checkpoint.shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total
