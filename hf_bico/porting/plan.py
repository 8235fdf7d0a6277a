"""Describes a plan, as data, in words and as JSON: the sites that a port carries, and what it needs.

Does not know how sites are matched. Imports no torch, and reads weights only to compare two bases that are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from hf_bico.errors import EmptyTaskVectorError, ModelError
from hf_bico.hub.client import HubRepo
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import FileCheckpoint, HeaderCheckpoint, RenamedCheckpoint
from hf_bico.models.families.base import TEXT_TOWER, VISION_TOWER
from hf_bico.models.layout import Site, SitePair
from hf_bico.models.model import Model
from hf_bico.models.weight_distance import WeightDistance, mean_distance, weight_distances
from hf_bico.porting.head_plan import head_refusal
from hf_bico.porting.lineage import Lineage
from hf_bico.runtime.output import require_room
from hf_bico.settings import GENERATED
from hf_bico.utils.html import html_list
from hf_bico.utils.progress import Progress, silent
from hf_bico.utils.samples import TEXTS
from hf_bico.utils.text import machine_memory, markdown_table, size_text

WRITTEN = "texts that the fine-tuned source writes"

if TYPE_CHECKING:
    from pandas import DataFrame

    from hf_bico.porting.planned_tokens import PlannedTokens


@dataclass(frozen=True)
class Plan:
    """A port before anything large is read: matched sites, tensors left behind, and what it needs."""

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
    """Ranks of a LoRA's layers, by the base's tensors."""
    changed: frozenset[str] | None = None
    """The base's tensors that an adapter changes; None if unknown, as for any fine-tuned model."""
    method: str = ""
    """The method that would carry it, and why."""
    fits_head: bool = False
    """Whether a classification head is fitted to the samples, not carried."""
    requested_format: str | None = None
    requested_rank: int | float | None = None
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    split: str | None = None
    config: str | None = None
    """The split and the configuration of the data set that were asked for."""
    tokens: PlannedTokens | None = None
    """How the two models' tokens pair, where both read texts and that was looked at."""

    def __repr__(self) -> str:
        source, base, target = self.lineage.models
        blocks = f"{base.layout.blocks} -> {target.layout.blocks} blocks"
        text = f", {len(self.text_pairs)} of the text tower" if self.text_pairs else ""
        sites = f"{len(self.main_pairs)} sites of {blocks}{text}"
        memory = f"{size_text(self.memory_bytes)} of memory{'' if self.fits else ' (does NOT fit)'}"
        return f"Plan of {source.name} to {target.name}: {sites}, {_written_form(self)}, {memory}"

    def _repr_html_(self) -> str:
        source, _, target = self.lineage.models
        return html_list(f"Plan of {source.name} to {target.name}", self.rows())

    def to_pandas(self) -> DataFrame:
        """Return a DataFrame with a row for each pair of sites: names, role and shapes.

        >>> hf_bico.plan("user/vit-b16-eurosat", to="laion/ViT-B-16-plus").to_pandas()  # doctest: +SKIP
        """
        import pandas

        return pandas.DataFrame([_about_pair(pair, self.distances) for pair in self.pairs])

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan in words: (subject, text) for each line."""
        lineage, base, target = self.lineage, *self.lineage.layouts
        has_unlabelled = lineage.unlabelled is not None
        rows = [
            ("source", _known(lineage.source)),
            ("base", _known(lineage.base)),
            ("target", _known(lineage.target)),
            ("data", WRITTEN if lineage.writes_data else _data(lineage.data, lineage.data_repo)),
            *([("unlabelled", _data(lineage.unlabelled, lineage.unlabelled_repo))] if has_unlabelled else []),
            *(("note", notice) for notice in lineage.notices),
            *(("refused", sentence) for sentence in self.refusals),
            ("blocks", f"{base.blocks} -> {target.blocks}, from source blocks {', '.join(map(str, self.blocks))}"),
        ]
        if base.tokens is not None and target.tokens is not None:
            grids = [" x ".join(map(str, tokens.grid)) for tokens in (base.tokens, target.tokens)]
            rows.append(("tokens", f"{grids[0]} -> {grids[1]} patches"))
        if self.tokens is not None:
            rows.append(("tokenizers", str(self.tokens)))
        if self.main_pairs:
            rows += [("carried", _sites(self.main_pairs)), ("shapes", _shapes(self.main_pairs))]
        if self.distances:
            apart, low, high = mean_distance(self.distances), *_range(one.distance for one in self.distances.values())
            layers = f"{low:.2g} to {high:.2g} by layer; cosine {apart.cosine:.3f}"
            rows.append(("bases", f"weights {apart.distance:.2g} apart, as |B - A| / |A| ({layers})"))
        if self.text_pairs:
            condition = "" if self.changed is not None else ", if the source changed them"
            rows.append(("text", f"{_sites(self.text_pairs)}; carried with captions{condition}"))
        left = ", ".join(f"{reason} ({count})" for reason, count in Counter(self.left.values()).items())
        rows.append(("not carried", left or "nothing"))
        if self.missing:
            rows.append(
                ("missing", f"{len(self.missing)} tensors of the base are not in the source: taken as unchanged")
            )
        if self.extra:
            named = ", ".join(self.extra[:3])
            rows.append(("extra", f"{len(self.extra)} tensors of the source are not in the base: {named}"))
        samples = ", plus samples" if lineage.data_repo else ""
        return [
            *rows,
            ("download", f"{size_text(self.download_bytes)} of models{samples}"),
            ("memory", _memory(self)),
            *([("method", self.method)] if self.method else []),
            ("output", _written_form(self)),
        ]

    def _repr_markdown_(self) -> str:
        """Return the table that a notebook shows."""
        return markdown_table([("", "what would be done"), *self.rows()], align="---")

    @property
    def refusals(self) -> list[str]:
        """What a port would refuse, and how it would not."""
        other, head = self.lineage.other_function, self.head_refusal
        found = [] if other is None else [f"without --force: {other.cause}"]
        tokens = None if self.tokens is None else self.tokens.refusal
        return [*found, *(f"{one.cause}: {one.remedy}" for one in (head, tokens) if one is not None)]

    @cached_property
    def head_refusal(self) -> ModelError | None:
        """Why a classification head cannot be brought to the target, if another is not to be fitted."""
        return head_refusal(self.lineage, self.fits_head)

    def require_head(self) -> None:
        """Refuse a classification head that cannot be brought to the target."""
        if self.head_refusal is not None:
            raise self.head_refusal

    def with_fitted_head(self, fits: bool) -> Plan:
        """Return the same plan with a head that is fitted to the samples, or carried."""
        return replace(self, fits_head=fits)

    @property
    def format(self) -> str:
        """The requested format of the result, else the source's own."""
        source = self.lineage.source
        usual = "adapter" if isinstance(source, Adapter) and source.low_rank else "full"
        return self.requested_format or ("adapter" if self.requested_rank is not None else usual)

    def in_format(self, format: str | None, rank: int | float | None) -> Plan:
        """Return the same plan for a result in another format."""
        return replace(self, requested_format=format, requested_rank=rank)

    def reading(self, split: str | None, config: str | None) -> Plan:
        """Return the same plan for samples of another split or configuration."""
        return replace(self, split=split, config=config)

    def within(self, limits: MemoryLimits) -> Plan:
        """Return the same plan within other memory limits."""
        return replace(self, limits=limits)

    @property
    def main_pairs(self) -> tuple[SitePair, ...]:
        return tuple(pair for pair in self.pairs if not pair.target.tower)

    @property
    def text_pairs(self) -> tuple[SitePair, ...]:
        """Pairs of a CLIP's text tower; its main tower is the vision tower."""
        return tuple(pair for pair in self.pairs if pair.target.tower)

    @cached_property
    def distances(self) -> dict[str, WeightDistance]:
        """How far the two bases' weights are apart at pairs of equal shape; empty until the files are here."""
        base, target = self.lineage.base.checkpoint, self.lineage.target.checkpoint
        return weight_distances(base, target, self.main_pairs or self.pairs)

    @property
    def towers(self) -> tuple[str, ...]:
        """Towers of the paired sites."""
        return tuple(dict.fromkeys(pair.target.tower for pair in self.pairs))

    def of_towers(self, towers: Collection[str]) -> Plan:
        """Return the same plan with the sites of these towers only; those of the others stay behind."""
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
        return replace(self, pairs=kept, left={name: left[name] for name in base.checkpoint.shapes if name in left})

    def memory_plan(
        self,
        memory: int | None = None,
        batch_size: int | None = None,
        tokens: int | None = None,
        itemsize: int = FLOAT32,
        turns: Sequence[bool] = (False, True),
        batch_cost: float = BATCH,
    ) -> MemoryPlan:
        """Estimate how the port runs in this much memory, and its peak.

        Texts are taken to have `tokens` tokens. `turns` lists what to try, in this order: both models on the device
        (False), or one after the other (True).
        """
        tokens = tokens or (USUAL_TOKENS if self.lineage.reads == TEXTS else CAPTION_TOKENS)
        base, target = (
            ModelFootprint(model.layout, model.checkpoint.shapes, itemsize, tokens)
            for model in (self.lineage.base, self.lineage.target)
        )
        language = "language-modelling" in base.layout.objectives[:1]
        needs = needs_of(self.main_pairs or self.pairs, base, target, ranks=self.ranks, language=language)
        return plan_memory(needs, memory, batch_size, turns, batch_cost)

    @cached_property
    def memory_estimate(self) -> MemoryPlan:
        """The memory plan within the requested limits, else within this machine's main memory."""
        limits = self.limits
        sizes = (limits.batch_size, limits.tokens, limits.itemsize)
        if limits.memory is None:  # main memory always holds both models
            return self.memory_plan(machine_memory(), *sizes, turns=(False,), batch_cost=BATCH_ON_CPU)
        return self.memory_plan(limits.memory, *sizes)

    @property
    def memory_bytes(self) -> int:
        """Estimated peak memory."""
        return self.memory_estimate.bytes

    @property
    def download_bytes(self) -> int:
        """Bytes of the three models that are not on this machine yet; samples not included."""
        source, base, target = self.lineage.models
        places = {(model.name, model.commit): (model.place, model.needed()) for model in (base, target)}
        places.setdefault((source.name, source.commit), (source.place, source.needed(beside=False)))
        return sum(place.to_download(names) for place, names in places.values() if place is not None)

    def fetched(self, progress: Progress = silent) -> Plan:
        """Download the models' files, and return the same plan with them on this machine."""
        total, done = self.download_bytes, 0

        def downloaded(count: int) -> None:
            nonlocal done
            done += count
            progress("download", done, total)

        if total:
            from huggingface_hub import constants

            cache = Path(constants.HF_HUB_CACHE)
            require_room(cache, total, "the download", "set HF_HOME to a folder on another disk")
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
        """Approximate size of the result; None for an adapter whose ranks depend on the energy to keep."""
        if self.format == "adapter":
            return None if isinstance(self.requested_rank, float) else self._adapter_bytes(self.requested_rank)
        checkpoint = self.lineage.target.checkpoint
        checkpoint = checkpoint.inner if isinstance(checkpoint, RenamedCheckpoint) else checkpoint
        if self.format == "delta":
            return 4 * sum(pair.target.shape[0] * (pair.target.shape[1] + 1) for pair in self.pairs)
        if isinstance(checkpoint, FileCheckpoint | HeaderCheckpoint):
            return checkpoint.size
        return 4 * sum(map(prod, checkpoint.shapes.values()))

    def _adapter_bytes(self, rank: int | None) -> int:
        """Return the bytes of factors and biases; a packed attention whose output changes is saved in full."""
        packed = {_block(pair.target) for pair in self.pairs if pair.target.weight.rows is not None}
        outputs = {_block(pair.target) for pair in self.pairs if pair.target.role == "attn.out"}
        whole = {
            site.name: site.shape[0] * (site.shape[1] + 1)
            for site in self.lineage.target.layout.sites
            if _block(site) in packed & outputs and site.role.startswith("attn.")
        }
        rest = [pair for pair in self.pairs if pair.target.name not in whole]
        factors = 0
        for pair in rest:
            rows, columns = pair.target.shape
            if pair.target.weight.rows is not None:  # q, k and v share a tensor, and the ranks of three LoRAs add up
                joins = rank is None and pair.source.weight.rows is None
                rows, columns = (3 * rows, columns) if joins else (rows, columns // 3)
            full = min(pair.target.shape)
            own = self.ranks.get(pair.source.weight.tensor, full) if rank is None else rank
            factors += min(own, full) * (rows + columns)
        return 4 * (factors + sum(whole.values()))

    @property
    def fits(self) -> bool:
        return self.memory_estimate.fits

    def _about_data(self) -> dict[str, Any] | None:
        """Say which samples are read: of which data set, named by whom."""
        lineage, repo = self.lineage, self.lineage.data_repo
        if lineage.data is None:
            return None
        if repo is not None:
            about: dict[str, Any] = {"kind": "hub", **_named(repo.id, repo.commit), "restricted": repo.restricted}
        elif lineage.writes_data:
            about = {"kind": GENERATED}
        elif isinstance(lineage.data, str | Path):
            about = {"kind": "folder", "id": Path(str(lineage.data)).name}
        else:
            about = {"kind": "rows", "type": type(lineage.data).__name__}
        asked = {"config": self.config, "split": self.split}
        known = {name: value for name, value in asked.items() if value is not None}
        return {**about, **known, "named_by": "card" if lineage.data_by_card else "argument"}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        lineage, unlabelled = self.lineage, self.lineage.unlabelled_repo
        refusals = lineage.other_function, self.head_refusal, None if self.tokens is None else self.tokens.refusal
        return {
            "source": {"kind": "adapter" if isinstance(lineage.source, Adapter) else "full", **_about(lineage.source)},
            "base": _about(lineage.base),
            "target": _about(lineage.target),
            "data": self._about_data(),
            **({} if unlabelled is None else {"unlabelled": _named(unlabelled.id, unlabelled.commit)}),
            "notices": list(lineage.notices),
            "refused": next((one.cause for one in refusals if one), None),
            **({} if self.tokens is None else {"tokenizers": self.tokens.as_dict()}),
            "families": {"source": lineage.base.family.name, "target": lineage.target.family.name},
            "layers": list(self.blocks),
            "sites": [_about_pair(pair, self.distances) for pair in self.main_pairs],
            "text_sites": [_about_pair(pair, self.distances) for pair in self.text_pairs],
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
                "batch_size": self.memory_estimate.batch_size,
                "passes": self.memory_estimate.passes,
                "checkpointing": self.memory_estimate.checkpointing,
                "in_turn": self.memory_estimate.alternating,
            },
            "method": self.method,
            "format": self.format,
            "ranks": sorted(set(self.ranks.values())),
            "output_bytes": self.output_bytes,
            "fits": self.fits,
        }


def _memory(planned: Plan) -> str:
    estimate, limit = planned.memory_estimate, planned.limits.memory
    ways = [
        f" in {estimate.passes} passes" if estimate.passes > 1 else "",
        " with activation checkpointing" if estimate.checkpointing else "",
        " with one model at a time on the GPU" if estimate.alternating else "",
    ]
    where = "this machine" if limit is None else f"the {size_text(limit)} of --memory"
    how = " and".join(way for way in ways if way)
    size, verdict = (estimate.bytes, "fits") if estimate.fits else (estimate.limit, "does NOT fit")
    return f"about {size_text(size)}{how}: {verdict} {where}"


def _written_form(planned: Plan) -> str:
    formats = {"full": "as a full model", "adapter": f"as an adapter{_ranks(planned)}", "delta": "as the change alone"}
    size = "" if planned.output_bytes is None else f"{size_text(planned.output_bytes)} "
    return f"{size}{formats[planned.format]}"


def _ranks(planned: Plan) -> str:
    requested = planned.requested_rank
    if isinstance(requested, float):
        return f" that keeps {requested:g} of each layer's energy"
    ranks = sorted(set(planned.ranks.values())) if requested is None else [requested]
    if not ranks:
        return ", exact"
    return f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {ranks[0]} to {ranks[-1]}"


def _known(model: Model | Adapter) -> str:
    commit = "" if model.commit is None else f" at {model.commit[:12]}"
    licence = f", licence {model.origin.license}" if model.origin.license else ""
    kind = model.family.name if isinstance(model, Model) else f"{model.config.kind} adapter"
    return f"{model.name}{commit} ({kind}{licence})"


def _data(data: Any, repo: HubRepo | None) -> str:
    if repo is not None:
        return f"{repo.id} at {repo.commit[:12]}"
    if data is None:
        return "not known"
    return Path(str(data)).name if isinstance(data, str | Path) else "rows"


def _sites(pairs: Sequence[SitePair]) -> str:
    """Count the sites of each role."""
    roles = Counter(pair.target.role for pair in pairs)
    return f"{len(pairs)} sites: {', '.join(f'{role} x{count}' for role, count in roles.items())}"


def _shapes(pairs: Sequence[SitePair]) -> str:
    """List the shapes of each role, source to target."""
    by_role = {
        pair.target.role: [f"{site.shape[0]}x{site.shape[1]}" for site in (pair.source, pair.target)] for pair in pairs
    }
    return ", ".join(f"{role} {source} -> {target}" for role, (source, target) in by_role.items())


def _block(site: Site) -> tuple[str, int | None]:
    return site.tower, site.block


def _range(values: Iterable[float]) -> tuple[float, float]:
    known = list(values)
    return min(known), max(known)


def _about_pair(pair: SitePair, distances: Mapping[str, WeightDistance]) -> dict[str, Any]:
    apart = distances.get(pair.target.name)
    return {
        "name": pair.target.name,
        "role": pair.target.role,
        "source": pair.source.name,
        "shape_source": list(pair.source.shape),
        "shape_target": list(pair.target.shape),
        **({} if apart is None else asdict(apart)),
    }


def _about(model: Model | Adapter) -> dict[str, str]:
    known = {"license": model.origin.license, "pipeline": model.origin.pipeline}
    return {**_named(model.name, model.commit), **{key: value for key, value in known.items() if value}}


def _named(name: str, commit: str | None) -> dict[str, str]:
    return {"id": name} if commit is None else {"id": name, "commit": commit}
