"""The plan: what a port would carry and leave behind, and what it needs, from metadata alone.

Matches the sites of a resolved lineage by names, shapes and configurations; no weights, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hf_bico.adapters.adapter import Adapter
from hf_bico.checkpoints import FileCheckpoint, HeaderCheckpoint, overlap
from hf_bico.errors import BaseMismatchError, EmptyTaskVectorError, ModelError, NotCachedError, UsageError
from hf_bico.families import require_same_kind
from hf_bico.hub.client import Hub, is_offline
from hf_bico.hub.references import hub_reference, is_hub_id
from hf_bico.matching import blocks_by_index, pair_sites, require_blocks
from hf_bico.models import Model, ModelReference, require_same_family
from hf_bico.progress import Progress, silent
from hf_bico.resolving import Lineage, resolve
from hf_bico.sites import Layout, SitePair

UNMATCHED = "no counterpart in the target"


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
    asked_format: str | None = None
    asked_rank: int | float | None = None

    @property
    def format(self) -> str:
        """In which form the result is written: the one that is asked for, else the source's own."""
        source = self.lineage.source
        usual = "adapter" if isinstance(source, Adapter) and source.low_rank else "full"
        return self.asked_format or ("adapter" if self.asked_rank is not None else usual)

    def in_form(self, format: str | None, rank: int | float | None) -> Plan:
        """The same plan for a result of another form."""
        return replace(self, asked_format=format, asked_rank=rank)

    @property
    def memory_bytes(self) -> int:
        """Both models in float32, the float64 covariances and maps, and the ported vector: an estimate.

        Activations of a batch come on top; they depend on the batch size.
        """
        models = 4 * (_elements(self.lineage.base) + _elements(self.lineage.target))
        inputs = {(p.source.input, p.target.input): (p.source.shape[1], p.target.shape[1]) for p in self.pairs}
        outputs = [(pair.source.shape[0], pair.target.shape[0]) for pair in self.pairs]
        covariances = sum(a * b for a, b in [*inputs.values(), *outputs])
        carried = 4 * sum(pair.target.shape[0] * pair.target.shape[1] for pair in self.pairs)
        # each covariance stands beside the map made from it
        return models + 2 * 8 * covariances + carried

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
            progress("download", 0, total)
        source, base, target = self.lineage.models
        local = replace(
            self.lineage,
            source=source.fetched(downloaded, beside=False),
            base=base.fetched(downloaded),
            target=target.fetched(downloaded),
        )
        return replace(self, lineage=local)

    def matched(self, blocks: str | Sequence[int]) -> Plan:
        """The same plan with these source blocks for the target's; a rule for finding some is no list yet."""
        if isinstance(blocks, str) or tuple(blocks) == self.blocks:
            return self
        return make_plan(self.lineage, blocks).in_form(self.asked_format, self.asked_rank)

    def with_target_id(self, repo_id: str, hub: Hub) -> Plan:
        """The plan with a local target known by its Hub id, which must hold the same weights."""
        target, found = self.lineage.target, hub_reference(repo_id)
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
        return replace(self, lineage=replace(self.lineage, target=named))

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
        packed = {pair.target.block for pair in self.pairs if pair.target.weight.rows is not None}
        outputs = {pair.target.block for pair in self.pairs if pair.target.role == "attn.out"}
        whole = {
            site.name: site.shape[0] * (site.shape[1] + 1)
            for site in self.lineage.target.layout.sites
            if site.block in packed & outputs and site.role.startswith("attn.")
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
        return self.memory_bytes < machine_memory()

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
            "sites": [
                {
                    "name": pair.target.name,
                    "role": pair.target.role,
                    "source": pair.source.name,
                    "shape_source": list(pair.source.shape),
                    "shape_target": list(pair.target.shape),
                }
                for pair in self.pairs
            ],
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
            "format": self.format,
            "ranks": sorted(set(self.ranks.values())),
            "output_bytes": self.output_bytes,
            "fits": self.fits,
        }


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
    return planned if target_id is None else planned.with_target_id(target_id, hub)


def make_plan(lineage: Lineage, blocks: Sequence[int] | None = None) -> Plan:
    """Match blocks, by index if nothing else is said, and sites, and say what stays behind."""
    base, target = lineage.base, lineage.target
    require_same_kind(base.layout, target.layout)
    if blocks is None:
        blocks = blocks_by_index(base.layout.blocks, target.layout.blocks)
    require_blocks(blocks, base.layout.blocks, target.layout.blocks)
    pairs = pair_sites(base.layout, target.layout, blocks)
    if not pairs:
        raise ModelError("the two models have no site in common", "choose a target of a matching kind")
    carried = {slot.tensor for pair in pairs for slot in pair.source.slots}
    left = {slot.tensor: UNMATCHED for slot in base.layout.slots() if slot.tensor not in carried}
    left.update(base.layout.others)
    everything = Plan(lineage, tuple(blocks), tuple(pairs), left, (), ())
    if isinstance(lineage.source, Adapter):
        return _of_adapter(everything, lineage.source)
    return _of_model(everything, lineage.source)


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
    return replace(everything, pairs=tuple(pairs), left=left, extra=changes.extra, ranks=changes.ranks)


def _of_model(everything: Plan, tuned: Model) -> Plan:
    base = everything.lineage.base
    require_same_family(tuned, base)
    shared = overlap(tuned.checkpoint.shapes, base.checkpoint.shapes)
    _require_blocks(base.layout, shared.missing)
    return replace(everything, missing=shared.missing, extra=shared.extra)


def _about(model: Model | Adapter) -> dict[str, str]:
    known = {"license": model.origin.license, "pipeline": model.origin.pipeline}
    return {**_named(model.name, model.commit), **{key: value for key, value in known.items() if value}}


def _named(name: str, commit: str | None) -> dict[str, str]:
    return {"id": name} if commit is None else {"id": name, "commit": commit}


def machine_memory() -> int:
    """Bytes of main memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def _require_blocks(base: Layout, missing: Sequence[str]) -> None:
    lacking = set(missing)
    for site in base.sites:
        if site.block is not None and site.weight.tensor in lacking:
            raise BaseMismatchError(
                f"the fine-tuned model has no '{site.weight.tensor}', which the base has",
                "name the model that was fine-tuned with --base",
            )


def _elements(model: Model) -> int:
    total = 0
    for shape in model.checkpoint.shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total
