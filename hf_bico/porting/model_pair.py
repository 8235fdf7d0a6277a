"""Loads both pretrained models once, with the task vector to carry between them.

Knows both models as files and as modules, and the memory they need; no method, and no evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

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
from hf_bico.alignment.transport import assemble_changes, site_delta
from hf_bico.data.dataset import Samples
from hf_bico.data.draw import CalibrationDraw
from hf_bico.errors import MemoryExhaustedError, UnsuitableMethodError
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.base import DeviceSpread
from hf_bico.models.families.blueprints import HEAD_REASONS
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.text_models import TextModel, read_both
from hf_bico.models.inference import Batched, features_of, logits_of
from hf_bico.models.layout import SitePair
from hf_bico.models.name_matching import align_names
from hf_bico.models.token_places import Shares
from hf_bico.porting.lineage import Lineage
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import with_blocks
from hf_bico.porting.plausibility import require_plausible
from hf_bico.porting.task_vector import TaskVector
from hf_bico.runtime.distributed import ALONE, ProcessGroup
from hf_bico.runtime.environment import (
    Stopwatch,
    available_memory,
    choose_dtype,
    halving_batches,
    keep_bfloat16_off_onednn,
)
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
    """The base, loaded; `tuned_source` adds the task vector."""
    target: LiveModel
    device: torch.device
    """The device that runs the models and keeps sums."""
    team: ProcessGroup = ALONE
    """The processes that share the work."""
    unchanged: bool = False
    """True if the task vector changes none of the pairs; then `pairs` are all pairs of the plan."""
    shorter: str | None = None
    """The name of the model that reads shorter texts than the other."""
    pairing: Shares | None = None
    """How much of the samples pairs, where the two models cut them into different tokens."""

    @classmethod
    def open(
        cls,
        planned: Plan,
        settings: Settings,
        device: torch.device,
        watch: Stopwatch,
        team: ProcessGroup = ALONE,
        allow_unchanged: bool = False,
    ) -> ModelPair:
        """Read the task vector of a plan whose files are downloaded, and load its models.

        A vector that changes no pair is refused, unless `allow_unchanged`: then all pairs are kept.
        """
        lineage = planned.lineage
        with watch("read"):
            vector = TaskVector.over(lineage.source, lineage.base, None if device.type == "cpu" else device)
            pairs = _changed_pairs(planned, vector)
            unchanged = allow_unchanged and not pairs
            pairs = list(planned.pairs) if unchanged else pairs
            require_plausible(vector, [pair.source for pair in pairs], lineage.base.checkpoint, settings.force)
        with watch("load"):
            source, target = _load(planned, settings, device, choose_dtype(settings.dtype))
            if target.module is source.module:  # each is changed on its own
                target = lineage.target.family.wrap(copy.deepcopy(target.module))
            keep_bfloat16_off_onednn(source.module, target.module)
            source.max_length = target.max_length = settings.max_length
            source.special_tokens = target.special_tokens = settings.special_tokens
        return cls(planned, settings, vector, pairs, source, target, device, team, unchanged)

    @property
    def lineage(self) -> Lineage:
        return self.planned.lineage

    def source_names(self, changes: Deltas) -> Deltas:
        """Rename changes from the base's files to its loaded module, without heads that this module lacks."""
        layout = self.lineage.base.layout
        renamed = changes.renamed(layout.own_names)
        heads = {layout.own_names.get(name, name) for name, reason in layout.others.items() if reason in HEAD_REASONS}
        present = align_names(renamed, {name for name, _ in self.source.module.named_parameters()})
        return renamed.without({name for name in renamed if name in heads and name not in present})

    def with_changes(self, changes: Deltas) -> AbstractContextManager[nn.Module]:
        """Add changes, named as in the target's files, to the loaded target inside a `with`."""
        return changes.renamed(self.lineage.target.layout.own_names).applied_to(self.target.module)

    def tuned_source(self, share: float = 1.0) -> AbstractContextManager[nn.Module]:
        """Add the task vector, or a share of it, to the loaded source inside a `with`."""
        return (share * self.source_names(self.vector)).applied_to(self.source.module)

    def use_common_length(self) -> None:
        """Truncate texts for both models at the shorter of their lengths, so that both read the same tokens."""
        if isinstance(self.source, TextModel) and isinstance(self.target, TextModel):
            source, target = self.source.longest, self.target.longest
            if source != target:
                self.shorter = (self.lineage.base if source < target else self.lineage.target).name
            self.source.max_length = self.target.max_length = min(source, target)

    def ready(self, samples: Sequence[Any], others: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Do in advance what takes time, for the source's samples and the target's; texts are read so as to pair."""
        if isinstance(self.source, TextModel) and isinstance(self.target, TextModel):
            return read_both(self.source, self.target, samples)
        return self.source.ready(samples), self.target.ready(others)

    def leave_team(self) -> None:
        """Continue without the other processes: each has the whole change, and only the first evaluates it."""
        self.team.leave()
        if not self.team.is_first:
            self.settings = replace(self.settings, evaluate=False, control=False)
        self.team = ALONE

    @property
    def changed_towers(self) -> tuple[str, ...]:
        """Towers that the task vector changes; the main one if it changes nothing."""
        if self.unchanged:
            return ("",)
        return tuple(dict.fromkeys(pair.target.tower for pair in self.pairs))

    def of_towers(self, towers: Sequence[str], objective: str | Callable[..., Any]) -> ModelPair:
        """Return the same models with the sites of these towers only, and this objective."""
        settings = replace(self.settings, objective=objective)
        return replace(self._with_plan(self.planned.of_towers(towers)), settings=settings)

    def with_similar_blocks(self, samples: Samples) -> ModelPair:
        """Return the same models with blocks paired by linear CKA of their inputs, averaged over a sample's tokens."""
        source, target = (_block_inputs(model, samples, self.settings.batch) for model in (self.source, self.target))
        blocks = self.team.broadcast(blocks_by_similarity([[linear_cka(x, y) for y in target] for x in source]))
        return self._with_plan(with_blocks(self.planned, blocks))

    def _with_plan(self, planned: Plan) -> ModelPair:
        pairs = list(planned.pairs) if self.unchanged else _changed_pairs(planned, self.vector)
        return replace(self, planned=planned, pairs=pairs)

    def choose_samples(self, drawn: CalibrationDraw) -> CalibrationDraw:
        """Choose among the candidates by the source's features, if the sampling strategy needs them."""
        if not drawn.needs_features:
            return drawn
        return drawn.chosen(self.team.broadcast(features_of(self.source, drawn.samples, self.settings.batch)))

    def pseudo_label(self, drawn: CalibrationDraw, heads: Heads) -> CalibrationDraw:
        """Label the samples by the fine-tuned source's predictions, if they have no labels."""
        if drawn.labels != "pseudo" or not isinstance(heads.tuned, Classifier):
            return drawn
        with self.tuned_source():
            logits = logits_of(self.source, heads.tuned, drawn.samples, self.settings.batch)
        return drawn.with_labels(self.team.broadcast(logits.argmax(-1).tolist()))

    def copies(self, settings: Settings, samples: int) -> int:
        """Return the number of augmented copies of each sample; none of texts, unless requested."""
        if self.source.layout.reads != IMAGES and settings.augment is None:
            return 0
        return settings.copies(samples)

    @property
    def pretrained(self) -> tuple[Pretrained, Pretrained]:
        base, target = self.lineage.base, self.lineage.target
        return Pretrained(base.layout, base.checkpoint), Pretrained(target.layout, target.checkpoint)

    def memory_plan(self, kinds: Collection[Kind], samples: Batched, settings: Settings) -> MemoryPlan:
        """Plan how to collect statistics of these kinds within the available memory."""
        files = (self.lineage.base, self.lineage.target)
        source, target = (
            ModelFootprint(model.layout, stored.checkpoint.shapes, model.dtype.itemsize, _longest(model, samples))
            for model, stored in zip((self.source, self.target), files, strict=True)
        )
        needs = needs_of(
            self.pairs,
            source,
            target,
            kinds=kinds,
            ranks=self.planned.ranks,
            both_graphs=bool(OF_EXPECTED_LOSSES & set(kinds)),
            language=settings.objective == "language-modelling",
        )
        needs = replace(needs, weights=(self._weights_of(self.source), self._weights_of(self.target)))
        limit = settings.memory or available_memory(self.device)
        size = settings.calibration_batch or settings.batch_size
        cost = BATCH if self.device.type == "cuda" else BATCH_ON_CPU
        memory = plan_memory(needs, limit, size, [self.source.swapped], cost)
        if settings.memory is not None and not memory.fits:
            spread = settings.device_map is None and all(model.family.can_be_spread for model in files)
            raise MemoryExhaustedError(
                f"a port between these models takes about {size_text(memory.limit)} in the leanest way, and "
                f"--memory is {size_text(settings.memory)}",
                "allow more, or spread the models with --device-map auto" if spread else "allow more",
            )
        # weights that are fetched when a block runs would all be kept for the backward pass
        return replace(memory, checkpointing=True) if self.offloaded else memory

    def _weights_of(self, model: LiveModel) -> int:
        """Return the bytes of a model's weights on the device while it runs."""
        here = self.device.type, self.device.index or 0
        return sum(
            parameter.nbytes
            for parameter in model.module.parameters()
            if model.swapped or (parameter.device.type, parameter.device.index or 0) == here
        )

    @property
    def offloaded(self) -> bool:
        """True if some weights wait in main memory until a block needs them."""
        return any(parameter.is_meta for model in (self.source, self.target) for parameter in model.module.parameters())

    def in_assembly_precision(self, pair: SitePair, carried: TransportedSite) -> TransportedSite:
        """Convert a site's change to the target's precision, at least float32."""
        dtype = self.lineage.target.checkpoint.tensor(pair.target.weight.tensor).dtype
        return replace(carried, delta=carried.delta.to(torch.promote_types(dtype, torch.float32)))

    def gather_changes(self, carried: dict[str, TransportedSite], alpha: float) -> Deltas:
        """Turn changes of sites into changes of the target's tensors."""
        return assemble_changes(carried, self.pairs, self.lineage.target.checkpoint, alpha)


def _block_inputs(model: LiveModel, samples: Samples, batch_size: int) -> list[Tensor]:
    first = {site.block: site for site in reversed(model.layout.main_sites) if site.block is not None}
    sites = [first[block] for block in range(model.layout.blocks)]
    if not sites:
        raise UnsuitableMethodError("--layers similarity needs models whose blocks are known", "use --layers index")

    def run(size: int) -> list[Tensor]:
        inputs: list[list[Tensor]] = [[] for _ in sites]
        for some, _ in samples.batches(size):
            text = model.text_rows(some)
            with torch.no_grad(), model.observed(sites) as trace:
                model.features(some)
            for rows, site in zip(inputs, sites, strict=True):
                x = trace.inputs[site.input]
                if text is not None and site.text and x.ndim == 3:
                    real = text.mask.to(x).unsqueeze(-1)
                    x = (x * real).sum(1) / real.sum(1)
                rows.append(x.flatten(1, -2).mean(1).cpu() if x.ndim > 2 else x.cpu())
        return [torch.cat(rows) for rows in inputs]

    return halving_batches(batch_size, run)


def _load(planned: Plan, settings: Settings, device: torch.device, dtype: torch.dtype) -> tuple[LiveModel, LiveModel]:
    """Load both models: spread by a device map, on the device, or in main memory if only one fits on the device."""
    base, target = planned.lineage.base, planned.lineage.target
    memory, spread, swapped = settings.memory or available_memory(device), None, False
    if settings.device_map is not None:
        # half of the memory for the two models' weights, half for sums and activations
        spread = DeviceSpread(settings.device_map, memory // 4)
    elif device.type != "cpu" and None not in (base.folder, target.folder):  # a module that was passed stays
        swapped = planned.memory_plan(memory, settings.batch_size, settings.max_length, dtype.itemsize).alternating
    place = torch.device("cpu") if swapped else device
    loaded = base.load(place, dtype, spread), target.load(place, dtype, spread)
    if swapped:
        for model in loaded:
            model.runs_on, model.swapped = device, True
    return loaded


def _longest(model: LiveModel, samples: Batched) -> int:
    """Return the tokens of the longest text among the samples; of images, those of a caption."""
    if model.layout.reads != TEXTS:
        return CAPTION_TOKENS
    texts = (model.text_rows(some) for some, _ in samples.batches(MOST_SAMPLES))
    return max((text.ids.shape[1] for text in texts if text is not None), default=USUAL_TOKENS)


def _changed_pairs(planned: Plan, vector: TaskVector) -> list[SitePair]:
    return [pair for pair in planned.pairs if not site_delta(vector, pair.source).is_zero]
