"""Scores the target on the calibration samples, under several multiples of a change.

Chooses the judge that an objective asks for; does not choose among the multiples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_bico.alignment.objectives.base import Classifier, OwnHead
from hf_bico.alignment.objectives.classification import ClassHead
from hf_bico.alignment.objectives.clip import ContrastHead, images_and_captions, require_clip
from hf_bico.alignment.objectives.judging import (
    CaptionJudge,
    ClassJudge,
    Judge,
    LossJudge,
    OwnJudge,
    RefittedHeadJudge,
    TokenJudge,
)
from hf_bico.alignment.objectives.language import TokenHead
from hf_bico.alignment.scaling import SampleScores, by_sample
from hf_bico.alignment.statistics import Kind
from hf_bico.models.deltas import Deltas
from hf_bico.models.inference import Batched, PreparedSamples, features_of
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.heads import source_head, target_reading
from hf_bico.porting.model_pair import ModelPair
from hf_bico.runtime.environment import Stopwatch, available_memory, halving_batches

PREPARED_AT_ONCE = 128
"""Prepared images that the target reads at once by default: every scale runs over all of them again."""


@dataclass(frozen=True)
class TargetScorer:
    """Scores the target with changes, always on the same samples: those of this process, gathered with the others'."""

    models: ModelPair
    judge: Judge
    samples: Batched
    batch_size: int
    watch: Stopwatch

    def scores(self, change: Deltas, scales: Iterable[float], over: Deltas | None = None) -> dict[float, SampleScores]:
        """Score the target with every multiple of a change, on top of the changes `over`, if any."""
        wanted, team = tuple(scales), self.models.team
        change = self._on_device(change)

        def run(size: int) -> list[list[Tensor]]:
            return [list(self._evidence(*batch, change, wanted)) for batch in self.samples.batches(size)]

        with self.watch("choose"), torch.no_grad(), self.models.with_changes(over or Deltas({})):
            rows = halving_batches(self.batch_size, run)
        seen = team.gather({f"{team.rank}:{number}": evidence for number, evidence in enumerate(rows)}).values()
        return {
            alpha: self.judge.scores(torch.cat([evidence[number] for evidence in seen]))
            for number, alpha in enumerate(wanted)
        }

    def _evidence(
        self, samples: Sequence[Any], labels: Sequence[int], change: Deltas, scales: Sequence[float]
    ) -> Iterator[Tensor]:
        """Yield what the judge sees of one batch under every multiple of the change."""
        source, target, answer = self.models.source, self.models.target, None
        if self.judge.asks_source:
            with self.models.tuned_source(), source.quiet():
                answer = self.judge.source_says(source, samples, labels)
        with target.quiet(), change.scaled_on(target.module) as scale:
            for alpha in scales:
                scale(alpha)
                yield self.judge.evidence(target, samples, labels, answer)

    def _on_device(self, change: Deltas) -> Deltas:
        """Return the change with the loaded target's names, and its tensors on the device if they fit there."""
        models, changes = self.models, dict(change.renamed(self.models.lineage.target.layout.own_names).changes())
        # the changed weights take as much again as the change
        size = 2 * sum(part.numel() * part.itemsize for part in changes.values() if isinstance(part, Tensor))
        if models.device.type == "cpu" or models.target.swapped or size > available_memory(models.device):
            return Deltas(changes)
        return Deltas({name: part.to(models.device) for name, part in changes.items()})


def make_scorer(calibration: Calibration) -> TargetScorer:
    """Return the scorer of a calibration's samples, with the judge that its objective asks for."""
    models, settings, team = calibration.models, calibration.settings, calibration.models.team
    judge, samples, size = _make_judge(calibration), calibration.drawn_samples, settings.batch
    share = samples.select(team.share(range(len(samples))))
    own: Batched = calibration.augmented(share) if isinstance(judge, ClassJudge) else share
    if not judge.asks_source and not isinstance(judge, CaptionJudge):  # they read more than the target's images
        own = PreparedSamples.if_small(models.target, own, size, models.device)
    if isinstance(judge, TokenJudge | LossJudge):  # logits over a vocabulary are large: as many as calibration has
        size = min(size, calibration.memory_plan({Kind.INPUTS, Kind.GRADIENTS}).batch_size)
    if isinstance(own, PreparedSamples) and settings.memory is None:
        size = settings.batch_size or PREPARED_AT_ONCE
    return TargetScorer(models, judge, own, size, calibration.watch)


def _make_judge(calibration: Calibration) -> Judge:
    models, samples, head = calibration.models, calibration.drawn_samples, calibration.heads.target
    if isinstance(head, Classifier):
        by_copy = calibration.predictions.double().softmax(-1)
        probabilities = by_sample(by_copy, calibration.copies)
        if not isinstance(head, ClassHead):
            return ClassJudge(head, probabilities, calibration.copies)
        own = None if calibration.settings.probe else source_head(models, calibration.class_names)
        features = None
        if own is not None:
            with models.tuned_source():
                features = features_of(models.source, samples, calibration.settings.batch, own.reading).double()
        probabilities, reading = by_copy[:: 1 + calibration.copies], target_reading(models, own)
        return RefittedHeadJudge(probabilities, own, features, tuple(samples.labels), reading)
    if isinstance(head, TokenHead):  # distributions over different tokens cannot be compared
        return TokenJudge(head) if models.pairing is None else LossJudge(head)
    if isinstance(head, ContrastHead):
        scale, bias = require_clip(models.target).logit_scale_and_bias()
        batches = samples.batches(calibration.settings.batch)
        captions = [images_and_captions(some, labels, head.class_names, head.templates)[1] for some, labels in batches]
        return CaptionJudge(tuple(chain.from_iterable(captions)), head.class_names, head.templates, scale, bias)
    if isinstance(head, OwnHead):
        return OwnJudge(head)
    raise TypeError(f"samples cannot be judged by a {type(head).__name__}")
