"""The bench: both pretrained models, loaded once, with the task vector, and what they say about a draw of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_bico.checkpoints import align_names
from hf_bico.data.calibration import Drawn
from hf_bico.data.dataset import Samples
from hf_bico.deltas import Deltas
from hf_bico.environment import Stopwatch, choose_dtype, halving_batches
from hf_bico.errors import UnsuitableMethodError
from hf_bico.families import LiveModel
from hf_bico.families.blueprints import HEADS
from hf_bico.families.text_models import TextModel
from hf_bico.matching import blocks_by_similarity
from hf_bico.measuring import features_of, logits_of
from hf_bico.methods import Carried, Pretrained
from hf_bico.objectives import Classifier, Heads
from hf_bico.planning import matched
from hf_bico.plans import Plan
from hf_bico.settings import Settings
from hf_bico.similarity import linear_cka
from hf_bico.sites import IMAGES, SitePair
from hf_bico.task_vector import TaskVector
from hf_bico.transport import gather, require_plausible, site_delta


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
            source.max_length = target.max_length = settings.max_length
        return cls(planned, settings, vector, pairs, source, target)

    def agree_on_length(self) -> None:
        """Let both models read as much of a text as the shorter of them takes: they are measured on the same tokens."""
        if isinstance(self.source, TextModel) and isinstance(self.target, TextModel):
            self.source.max_length = self.target.max_length = min(self.source.longest, self.target.longest)

    @property
    def changed_towers(self) -> tuple[str, ...]:
        """Those of whose sites the task vector changes any."""
        return tuple(dict.fromkeys(pair.target.tower for pair in self.pairs))

    def of_towers(self, towers: Sequence[str], objective: str | Callable[..., Any]) -> Bench:
        """The same models with the sites of these towers alone, asked by this objective."""
        planned = self.planned.of_towers(towers)
        settings = replace(self.settings, objective=objective)
        return replace(self, planned=planned, settings=settings, pairs=_changed_pairs(planned, self.vector))

    @property
    def tuning(self) -> Deltas:
        """The task vector by the names that the source's tensors have when it is loaded.

        Without heads that the loaded model has no place for: nothing that it is asked reads them.
        """
        layout = self.planned.lineage.base.layout
        loaded = {name for name, _ in self.source.module.named_parameters()}
        changes = self.vector.renamed(layout.own_names)
        unread = {layout.own_names.get(name, name) for name, reason in layout.others.items() if reason in HEADS}
        placed = align_names(changes, loaded)
        return changes.without({name for name in changes if name in unread and name not in placed})

    def matched(self, blocks: Sequence[int]) -> Bench:
        """The same models with other blocks paired."""
        planned = matched(self.planned, blocks)
        return replace(self, planned=planned, pairs=_changed_pairs(planned, self.vector))

    def chosen(self, drawn: Drawn) -> Drawn:
        """The draw with those of the candidates that the source's features choose."""
        if not drawn.needs_features:
            return drawn
        return drawn.chosen(features_of(self.source, drawn.samples, self.settings.batch_size))

    def labelled(self, drawn: Drawn, heads: Heads) -> Drawn:
        """The draw with the fine-tuned source's predictions as labels where there are none."""
        if drawn.labels != "pseudo" or not isinstance(heads.tuned, Classifier):
            return drawn
        with self.tuning.applied_to(self.source.module):
            found = logits_of(self.source, heads.tuned, drawn.samples, self.settings.batch_size)
        return drawn.with_labels(found.argmax(-1).tolist())

    def copies(self, settings: Settings, samples: int) -> int:
        """How many altered copies of each of so many samples are used; of texts, none unless they are asked for."""
        habit = settings.copies(samples)
        return habit if self.source.layout.reads == IMAGES or settings.augment is not None else 0

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
    first = {site.block: site for site in reversed(model.layout.main_sites) if site.block is not None}
    sites = [first[block] for block in range(model.layout.blocks)]
    if not sites:
        raise UnsuitableMethodError("--layers similarity needs models whose blocks are known", "use --layers index")

    def run(size: int) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in sites]
        for some, _ in samples.batches(size):
            text = model.text_rows(some)
            with torch.no_grad(), model.observed(sites) as trace:
                model.features(some)
            for rows, site in zip(found, sites, strict=True):
                x = trace.inputs[site.input]
                if text is not None and site.text and x.ndim == 3:
                    real = text.mask.to(x).unsqueeze(-1)
                    x = (x * real).sum(1) / real.sum(1)
                rows.append(x.flatten(1, -2).mean(1).cpu() if x.ndim > 2 else x.cpu())
        return [torch.cat(rows) for rows in found]

    return halving_batches(batch_size, run)


def _changed_pairs(planned: Plan, vector: TaskVector) -> list[SitePair]:
    return [pair for pair in planned.pairs if not site_delta(vector, pair.source).is_zero]
