"""The bench: both pretrained models, loaded once, with the task vector, and what they say about a draw of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_bico.alignment.matching import blocks_by_similarity
from hf_bico.alignment.memory import (
    BATCH,
    BATCH_ON_CPU,
    CAPTION_TOKENS,
    MOST_SAMPLES,
    USUAL_TOKENS,
    MemoryPlan,
    ModelFootprint,
    needs_of,
    plan_memory,
)
from hf_bico.alignment.methods.base import Pretrained, TransportedSite
from hf_bico.alignment.objectives.base import Classifier, Heads
from hf_bico.alignment.similarity import linear_cka
from hf_bico.alignment.statistics import OF_EXPECTED_LOSSES, Kind
from hf_bico.alignment.transport import gather, site_delta
from hf_bico.data.dataset import Samples
from hf_bico.data.draw import CalibrationDraw
from hf_bico.errors import MemoryExhaustedError, UnsuitableMethodError, UsageError
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.base import DeviceSpread
from hf_bico.models.families.blueprints import HEADS
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.text_models import TextModel
from hf_bico.models.inference import Batched, features_of, logits_of
from hf_bico.models.layout import SitePair
from hf_bico.models.name_matching import align_names
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import matched
from hf_bico.porting.plausibility import require_plausible
from hf_bico.porting.task_vector import TaskVector
from hf_bico.runtime.distributed import ALONE, ProcessGroup
from hf_bico.runtime.environment import Stopwatch, available_memory, choose_dtype, halving_batches
from hf_bico.settings import Settings
from hf_bico.utils.samples import IMAGES, TEXTS
from hf_bico.utils.text import size_text


@dataclass
class ModelPair:
    """Both pretrained models, the task vector, and the pairs of sites that it changes."""

    planned: Plan
    settings: Settings
    vector: TaskVector
    pairs: list[SitePair]
    source: LiveModel
    target: LiveModel
    device: torch.device
    """Where the models run and sums are kept."""
    team: ProcessGroup = ALONE
    """The processes that share the work."""
    unchanged: bool = False
    """Whether the task vector changes none of the pairs, and they are all that there are."""

    @classmethod
    def open(
        cls,
        planned: Plan,
        settings: Settings,
        device: torch.device,
        watch: Stopwatch,
        team: ProcessGroup = ALONE,
        unchanged: bool = False,
    ) -> ModelPair:
        """Read the task vector of a plan whose files are here, and load its models.

        Where the vector changes nothing, and may leave all `unchanged`, the pairs are all that there are.
        """
        lineage = planned.lineage
        with watch("read"):
            vector = TaskVector.over(lineage.source, lineage.base, None if device.type == "cpu" else device)
            pairs = _changed_pairs(planned, vector)
            unchanged = unchanged and not pairs
            pairs = list(planned.pairs) if unchanged else pairs
            require_plausible(vector, [pair.source for pair in pairs], lineage.base.checkpoint, settings.force)
        with watch("load"):
            dtype = choose_dtype(settings.dtype)
            source, target = _loaded(planned, settings, device, dtype, team)
            if target.module is source.module:  # each is changed on its own
                target = lineage.target.family.wrap(copy.deepcopy(target.module))
            source.max_length = target.max_length = settings.max_length
        return cls(planned, settings, vector, pairs, source, target, device, team, unchanged)

    def agree_on_length(self) -> None:
        """Let both models read as much of a text as the shorter of them takes: they are measured on the same tokens."""
        if isinstance(self.source, TextModel) and isinstance(self.target, TextModel):
            self.source.max_length = self.target.max_length = min(self.source.longest, self.target.longest)

    @property
    def changed_towers(self) -> tuple[str, ...]:
        """Those of whose sites the task vector changes any; the main one where it changes nothing."""
        if self.unchanged:
            return ("",)
        return tuple(dict.fromkeys(pair.target.tower for pair in self.pairs))

    def of_towers(self, towers: Sequence[str], objective: str | Callable[..., Any]) -> ModelPair:
        """The same models with the sites of these towers alone, asked by this objective."""
        planned = self.planned.of_towers(towers)
        settings = replace(self.settings, objective=objective)
        return replace(self, planned=planned, settings=settings, pairs=self._pairs_of(planned))

    def _pairs_of(self, planned: Plan) -> list[SitePair]:
        """Those that the task vector changes, or all where it changes nothing."""
        return list(planned.pairs) if self.unchanged else _changed_pairs(planned, self.vector)

    @property
    def tuning(self) -> Deltas:
        """The task vector by the names that the source's tensors have when it is loaded."""
        return self.on_source(self.vector)

    def on_source(self, vector: Deltas) -> Deltas:
        """A change of the source's base, by the names that its tensors have when it is loaded.

        Without heads that the loaded model has no place for: nothing that it is asked reads them.
        """
        layout = self.planned.lineage.base.layout
        loaded = {name for name, _ in self.source.module.named_parameters()}
        changes = vector.renamed(layout.own_names)
        unread = {layout.own_names.get(name, name) for name, reason in layout.others.items() if reason in HEADS}
        placed = align_names(changes, loaded)
        return changes.without({name for name in changes if name in unread and name not in placed})

    def matched(self, blocks: Sequence[int]) -> ModelPair:
        """The same models with other blocks paired."""
        planned = matched(self.planned, blocks)
        return replace(self, planned=planned, pairs=self._pairs_of(planned))

    def chosen(self, drawn: CalibrationDraw) -> CalibrationDraw:
        """The draw with those of the candidates that the source's features choose."""
        if not drawn.needs_features:
            return drawn
        return drawn.chosen(self.team.agreed(features_of(self.source, drawn.samples, self.settings.batch)))

    def labelled(self, drawn: CalibrationDraw, heads: Heads) -> CalibrationDraw:
        """The draw with the fine-tuned source's predictions as labels where there are none."""
        if drawn.labels != "pseudo" or not isinstance(heads.tuned, Classifier):
            return drawn
        with self.tuning.applied_to(self.source.module):
            found = logits_of(self.source, heads.tuned, drawn.samples, self.settings.batch)
        return drawn.with_labels(self.team.agreed(found.argmax(-1).tolist()))

    def copies(self, settings: Settings, samples: int) -> int:
        """How many altered copies of each of so many samples are used; of texts, none unless they are asked for."""
        habit = settings.copies(samples)
        return habit if self.source.layout.reads == IMAGES or settings.augment is not None else 0

    @property
    def pretrained(self) -> tuple[Pretrained, Pretrained]:
        lineage = self.planned.lineage
        source, target = (Pretrained(model.layout, model.checkpoint) for model in (lineage.base, lineage.target))
        return source, target

    def memory_plan(self, kinds: Collection[Kind], samples: Batched, settings: Settings) -> MemoryPlan:
        """How statistics of these kinds are collected within the memory that there is."""
        pretrained = self.planned.lineage.models[1:]
        held = [
            ModelFootprint(model.layout, stored.checkpoint.shapes, model.dtype.itemsize, _longest(model, samples))
            for model, stored in zip((self.source, self.target), pretrained, strict=True)
        ]
        of_labels, language = bool(OF_EXPECTED_LOSSES & set(kinds)), settings.objective == "language-modelling"
        needs = needs_of(
            *(self.pairs, held[0], held[1]),
            kinds=kinds,
            ranks=self.planned.ranks,
            both_graphs=of_labels,
            language=language,
        )
        descents = needs.descents if self.device.type == "cuda" else 0
        weights = (self._weights_of(self.source), self._weights_of(self.target))
        needs = replace(needs, weights=weights, descents=descents)
        limit = settings.memory or available_memory(self.device)
        size = settings.calibration_batch or settings.batch_size
        cost = BATCH if self.device.type == "cuda" else BATCH_ON_CPU
        found = plan_memory(needs, limit, size, [self.source.visits], cost)
        if settings.memory is not None and not found.fits:
            spread = settings.device_map is None and all(model.family.can_be_spread for model in pretrained)
            raise MemoryExhaustedError(
                f"a port between these models takes about {size_text(found.limit)} in the leanest way, and --memory is "
                f"{size_text(settings.memory)}",
                "allow more, or spread the models with --device-map auto" if spread else "allow more",
            )
        # weights that are fetched when a block runs would all be kept for the backward pass
        return replace(found, checkpointing=True) if self.offloaded else found

    def _weights_of(self, model: LiveModel) -> int:
        """Bytes of its weights on the device, while it runs."""
        here = self.device.type, self.device.index or 0
        return sum(
            parameter.nbytes
            for parameter in model.module.parameters()
            if model.visits or (parameter.device.type, parameter.device.index or 0) == here
        )

    @property
    def offloaded(self) -> bool:
        """Whether some weights are in main memory until they are needed."""
        return any(parameter.is_meta for model in (self.source, self.target) for parameter in model.module.parameters())

    def settled(self, pair: SitePair, carried: TransportedSite) -> TransportedSite:
        """What was carried in the precision in which it is written."""
        dtype = self.planned.lineage.target.checkpoint.tensor(pair.target.weight.tensor).dtype
        return replace(carried, delta=carried.delta.to(torch.promote_types(dtype, torch.float32)))

    def gathered(self, carried: dict[str, TransportedSite], alpha: float) -> Deltas:
        """Changes of sites as changes of the target's tensors."""
        return gather(carried, self.pairs, self.planned.lineage.target.checkpoint, alpha)


def similar_blocks(models: ModelPair, samples: Samples) -> list[int]:
    """The source block of each target block by linear CKA of what the blocks read, averaged over a sample's tokens."""
    source, target = (_block_inputs(model, samples, models.settings.batch) for model in (models.source, models.target))
    return models.team.agreed(blocks_by_similarity([[linear_cka(x, y) for y in target] for x in source]))


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


def _loaded(
    planned: Plan, settings: Settings, device: torch.device, dtype: torch.dtype, team: ProcessGroup
) -> tuple[LiveModel, LiveModel]:
    """Both models where they run, or where they wait for their turn if there is room for only one at a time."""
    base, target = planned.lineage.base, planned.lineage.target
    if settings.device_map is not None:
        if device.type == "cpu" and torch.cuda.is_available():
            raise UsageError("--device-map uses the GPUs, and --device is cpu", "leave one of the two out")
        if team.size > 1:
            raise UsageError("--device-map spreads models over all GPUs, and so would every process", "use one process")
        # half of the memory for the two models' weights, half for sums and activations
        spread = DeviceSpread(settings.device_map, (settings.memory or available_memory(device)) // 4)
        return base.load(device, dtype, spread), target.load(device, dtype, spread)
    if device.type == "cpu" or None in (base.folder, target.folder):  # a module that was passed stays where it is
        return base.load(device, dtype), target.load(device, dtype)
    fitted = planned.memory_plan(
        settings.memory or available_memory(device), settings.batch_size, settings.max_length, dtype.itemsize
    )
    if not fitted.alternating:
        return base.load(device, dtype), target.load(device, dtype)
    found = base.load(torch.device("cpu"), dtype), target.load(torch.device("cpu"), dtype)
    for model in found:
        model.runs_on, model.visits = device, True
    return found


def _longest(model: LiveModel, samples: Batched) -> int:
    """The tokens of the longest of the samples, where they are texts; else of a caption."""
    if model.layout.reads != TEXTS:
        return CAPTION_TOKENS
    texts = (model.text_rows(some) for some, _ in samples.batches(MOST_SAMPLES))
    return max((text.ids.shape[1] for text in texts if text is not None), default=USUAL_TOKENS)


def _changed_pairs(planned: Plan, vector: TaskVector) -> list[SitePair]:
    return [pair for pair in planned.pairs if not site_delta(vector, pair.source).is_zero]
