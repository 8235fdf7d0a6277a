"""The plan: what a port would carry and leave behind, and what it needs, from metadata alone.

Reads names, shapes and configurations; no weights, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_bico.checkpoints import FileCheckpoint, overlap
from hf_bico.errors import BaseMismatchError, BaseUnknownError, ModelError
from hf_bico.matching import blocks_by_index, pair_sites
from hf_bico.models import Model, ModelReference
from hf_bico.sites import Layout, SitePair

UNMATCHED = "no counterpart in the target"


@dataclass(frozen=True)
class Lineage:
    """The three models of a port."""

    source: Model
    base: Model
    target: Model


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
    def output_bytes(self) -> int:
        """Size of the written model; a full port is as large as its target."""
        checkpoint = self.lineage.target.checkpoint
        if isinstance(checkpoint, FileCheckpoint):
            return checkpoint.size
        return 4 * _elements(self.lineage.target)

    @property
    def fits(self) -> bool:
        return self.memory_bytes < machine_memory()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        lineage = self.lineage
        return {
            "source": lineage.source.name,
            "base": lineage.base.name,
            "target": lineage.target.name,
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
            "tokens": {"source": asdict(lineage.base.layout.tokens), "target": asdict(lineage.target.layout.tokens)},
            "memory_bytes": self.memory_bytes,
            "machine_bytes": machine_memory(),
            "output_bytes": self.output_bytes,
            "fits": self.fits,
        }


def plan(source: ModelReference, to: ModelReference, *, base: ModelReference | None = None) -> Plan:
    """What `port` would do with these models; opens them, but reads no weight.

    >>> hf_bico.plan("my-finetune", to="model-B", base="model-A").pairs  # doctest: +SKIP
    """
    if base is None:
        raise BaseUnknownError(
            f"the base of '{source if isinstance(source, str | Path) else type(source).__name__}' is not known",
            "name the model that was fine-tuned with --base",
        )
    tuned = Model.open(source, "the fine-tuned model")
    start = Model.open(base, "the base", tuned.family.library)
    target = Model.open(to, "the target", start.family.library)
    return make_plan(Lineage(tuned, start, target))


def make_plan(lineage: Lineage) -> Plan:
    """Match blocks and sites, and say what stays behind."""
    tuned, base, target = lineage.source, lineage.base, lineage.target
    if tuned.family.name != base.family.name:
        raise BaseMismatchError(
            f"the fine-tuned model is of the family {tuned.family.name} and the base of {base.family.name}",
            "name the base in the library that the fine-tuned model was saved with",
        )
    shared = overlap(tuned.checkpoint.shapes, base.checkpoint.shapes)
    _require_blocks(base.layout, shared.missing)
    blocks = blocks_by_index(base.layout.blocks, target.layout.blocks)
    pairs = pair_sites(base.layout, target.layout, blocks)
    if not pairs:
        raise ModelError("the two models have no site in common", "choose a target of a matching kind")
    carried = {slot.tensor for pair in pairs for slot in pair.source.slots}
    left = {slot.tensor: UNMATCHED for slot in base.layout.slots() if slot.tensor not in carried}
    left.update(base.layout.others)
    return Plan(lineage, tuple(blocks), tuple(pairs), left, shared.missing, shared.extra)


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
