"""The bench: both pretrained models, loaded once, with the task vector, and what they say about a draw of samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_bico.data.calibration import Drawn
from hf_bico.data.dataset import Samples
from hf_bico.deltas import Deltas
from hf_bico.environment import Stopwatch, choose_dtype, halving_batches
from hf_bico.errors import UnsuitableMethodError
from hf_bico.families import LiveModel
from hf_bico.matching import blocks_by_similarity
from hf_bico.measuring import features_of, logits_of
from hf_bico.methods import Carried, Pretrained
from hf_bico.objectives import ZeroShotHead, zero_shot_head
from hf_bico.planning import matched
from hf_bico.plans import Plan
from hf_bico.settings import Settings
from hf_bico.similarity import linear_cka
from hf_bico.sites import SitePair
from hf_bico.task_vector import TaskVector
from hf_bico.transport import gather, require_plausible, site_delta


@dataclass(frozen=True)
class Heads:
    """Zero-shot heads of the two pretrained models, and of the fine-tuned source, whose text side may differ."""

    source: ZeroShotHead
    target: ZeroShotHead
    tuned: ZeroShotHead


@dataclass
class Bench:
    """Both pretrained models, the task vector, and the pairs of sites that it changes."""

    planned: Plan
    settings: Settings
    vector: TaskVector
    pairs: list[SitePair]
    source: LiveModel
    target: LiveModel

    @classmethod
    def open(cls, planned: Plan, settings: Settings, device: torch.device, watch: Stopwatch) -> Bench:
        """Read the task vector of a plan whose files are here, and load its models."""
        lineage = planned.lineage
        with watch("read"):
            vector = TaskVector.over(lineage.source, lineage.base)
            pairs = _changed_pairs(planned, vector)
            require_plausible(vector, [pair.source for pair in pairs], lineage.base.checkpoint, settings.force)
        with watch("load"):
            dtype = choose_dtype(settings.dtype)
            source, target = lineage.base.load(device, dtype), lineage.target.load(device, dtype)
            if target.module is source.module:  # each is changed on its own
                target = lineage.target.family.wrap(copy.deepcopy(target.module))
        return cls(planned, settings, vector, pairs, source, target)

    def matched(self, blocks: Sequence[int]) -> Bench:
        """The same models with other blocks paired."""
        planned = matched(self.planned, blocks)
        return replace(self, planned=planned, pairs=_changed_pairs(planned, self.vector))

    def heads(self, class_names: Sequence[str]) -> Heads:
        templates = self.settings.templates
        source, target = (zero_shot_head(model, class_names, templates) for model in (self.source, self.target))
        with self.vector.applied_to(self.source.module):
            return Heads(source, target, zero_shot_head(self.source, class_names, templates))

    def settled(self, drawn: Drawn, heads: Heads | None) -> Drawn:
        """The draw with what only models can tell: which of the candidates to take, and labels where there are none."""
        size = self.settings.batch_size
        if drawn.needs_features:
            drawn = drawn.chosen(features_of(self.source, drawn.samples, size))
        if drawn.labels != "pseudo" or heads is None:
            return drawn
        with self.vector.applied_to(self.source.module):
            return drawn.with_labels(logits_of(self.source, heads.tuned, drawn.samples, size).argmax(-1).tolist())

    @property
    def pretrained(self) -> tuple[Pretrained, Pretrained]:
        lineage = self.planned.lineage
        source, target = (Pretrained(model.layout, model.checkpoint) for model in (lineage.base, lineage.target))
        return source, target

    def gathered(self, carried: dict[str, Carried], alpha: float) -> Deltas:
        """Changes of sites as changes of the target's tensors."""
        return gather(carried, self.pairs, self.planned.lineage.target.checkpoint, alpha)


def similar_blocks(bench: Bench, samples: Samples) -> list[int]:
    """The source block of each target block by linear CKA of what the blocks read, averaged over a sample's tokens."""
    source, target = (
        _block_inputs(model, samples, bench.settings.batch_size) for model in (bench.source, bench.target)
    )
    return blocks_by_similarity([[linear_cka(x, y) for y in target] for x in source])


def _block_inputs(model: LiveModel, samples: Samples, batch_size: int) -> list[Tensor]:
    first = {site.block: site for site in reversed(model.layout.sites) if site.block is not None}
    sites = [first[block] for block in range(model.layout.blocks)]
    if not sites:
        raise UnsuitableMethodError("--layers similarity needs models whose blocks are known", "use --layers index")

    def run(size: int) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in sites]
        for images, _ in samples.batches(size):
            with torch.no_grad(), model.observed(sites) as trace:
                model.image_features(model.pixels(images))
            for rows, site in zip(found, sites, strict=True):
                x = trace.inputs[site.input]
                rows.append(x.flatten(1, -2).mean(1).cpu() if x.ndim > 2 else x.cpu())
        return [torch.cat(rows) for rows in found]

    return halving_batches(batch_size, run)


def _changed_pairs(planned: Plan, vector: TaskVector) -> list[SitePair]:
    return [pair for pair in planned.pairs if not site_delta(vector, pair.source).is_zero]
