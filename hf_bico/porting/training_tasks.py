"""Makes the tasks of a training: which of the target's parameters learn what, from which samples.

A task learns labels or texts by the objective's loss, or the fine-tuned source's predictions. Trains nothing itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_bico.alignment.methods.training import TrainingTask
from hf_bico.alignment.objectives.base import Classifier, Head, LossBatch
from hf_bico.alignment.objectives.judging import LossJudge, TokenJudge
from hf_bico.alignment.objectives.language import TokenHead
from hf_bico.alignment.scaling import SampleScores, class_scores
from hf_bico.data.dataset import Samples
from hf_bico.errors import UnsuitableMethodError
from hf_bico.models.checkpoints import digest_of
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.base import TEXT_TOWER
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.inference import CachedSamples, PreparedSamples
from hf_bico.models.low_rank import Change, Factors, dense, truncated
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.model_pair import ModelPair
from hf_bico.settings import Settings

FINGERPRINTED = 64
"""Number of samples whose content identifies a training task; rows and labels count for all samples."""
SOURCE, LABELS = "source", "labels"
"""What a brief training learns."""


def training_task(model: LiveModel, head: Head, samples: Samples) -> TrainingTask:
    """Train all tensors of a model, except a CLIP's text tower, on the head's loss; without dropout."""

    def loss(numbers: Sequence[int]) -> Tensor:
        [(items, labels)] = samples.select(numbers).batches(len(numbers))
        value = head.losses(model, LossBatch(items, labels)).task
        if value is None:
            raise ValueError("samples without labels give no loss")
        return value

    def accuracy(numbers: Sequence[int]) -> float:
        return head.measure(model, samples.select(numbers), len(numbers))

    parameters = trained_parameters(model)
    identity = _identity(model, head, samples, parameters)
    measured = accuracy if head.metric == "accuracy" else None
    return TrainingTask(parameters, loss, measured, len(samples), json.dumps(identity))


def trained_parameters(model: LiveModel) -> dict[str, nn.Parameter]:
    """Return all parameters of a model by name, except those of a CLIP's text tower."""
    layout = model.layout
    texts = {name for name, reason in layout.others.items() if reason == TEXT_TOWER}
    texts |= {slot.tensor for site in layout.sites if site.tower for slot in site.slots}
    return {name: parameter for name, parameter in model.module.named_parameters() if name not in texts}


def _identity(model: LiveModel, head: Head, samples: Samples, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    first = samples.first(FINGERPRINTED).batches(FINGERPRINTED)
    return {
        "weights": digest_of(parameters.values()),
        "classes": digest_of(head.tensors),
        "samples": digest_of(_model_inputs(model, items) for items, _ in first),
        "rows": hashlib.blake2b(repr((samples.indices, samples.labels)).encode(), digest_size=16).hexdigest(),
    }


def _model_inputs(model: LiveModel, samples: Sequence[Any]) -> Tensor:
    text = model.text_rows(samples)
    if text is not None:
        return text.ids
    return model.pixels(samples) if isinstance(model, ImageModel) else model.features(samples)


def require_common_tokens(models: ModelPair) -> None:
    """Refuse to learn the source's predictions of tokens that the target does not have."""
    if models.pairing is not None:
        raise UnsuitableMethodError(
            "the source predicts other tokens than the target has, which cannot be learnt",
            "learn the texts themselves: --polish-on labels, or --method train",
        )


@dataclass(frozen=True)
class BriefLesson:
    """What a brief training learns by a `head` of the target: the source's predictions, or labels and texts.

    The source's predictions are also learnt from samples without labels, which follow the calibration samples.
    """

    calibration: Calibration
    head: Head
    toward: str = SOURCE

    @property
    def models(self) -> ModelPair:
        return self.calibration.models

    @cached_property
    def parts(self) -> tuple[Samples, ...]:
        more = self.calibration.unlabelled if self.toward == SOURCE else None
        return (self.calibration.drawn_samples, *(() if more is None else (more,)))

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def require(self) -> None:
        """Refuse what cannot be learnt: predictions that no model makes, or labels that are not known."""
        if not isinstance(self.head, Classifier | TokenHead):
            raise UnsuitableMethodError(
                "a brief training needs classes or tokens to predict, and this objective has neither",
                "use data with labels, or another objective",
            )
        if self.toward == SOURCE and isinstance(self.head, TokenHead):
            require_common_tokens(self.models)
        if self.toward == LABELS and isinstance(self.head, Classifier) and not self.calibration.knows_labels:
            raise UnsuitableMethodError(
                "the data set has no labels to train on, or they are not to be used",
                "learn the source's predictions: --method distill, or --polish as it is",
            )

    def task(self, parameters: Mapping[str, nn.Parameter], start: Mapping[str, Change] | None = None) -> TrainingTask:
        """Return the task of training these parameters, from a start on if one is given."""
        self.require()

        def loss(numbers: Sequence[int]) -> Tensor:
            return self.scores(numbers).losses.sum()

        about = {
            **_identity(self.models.target, self.head, self.parts[0], parameters),
            **{f"part {place}": list(part.indices) for place, part in enumerate(self.parts)},
            "toward": self.toward,
            "source": digest_of(self._wanted) if isinstance(self.head, Classifier) else self._source_digest,
            "start": None if start is None else digest_of(_tensors(start)),
        }
        judges = self.calibration.judges if len(self.parts) > 1 else ()
        return TrainingTask(
            parameters, loss, None, self.size, json.dumps(about), scores=self.scores, start=start, judges=judges
        )

    def asking_source(self) -> AbstractContextManager[Any]:
        """Add the task vector to the loaded source inside a `with`, where it is asked for every batch."""
        asks = isinstance(self.head, TokenHead) and self.toward == SOURCE
        return self.models.tuned_source() if asks else nullcontext()

    @property
    def _source_digest(self) -> str:
        return digest_of(parameter for _, parameter in self.models.source.module.named_parameters())

    @cached_property
    def _wanted(self) -> Tensor:
        """The probabilities of classes to learn, a row for each sample."""
        logits = self.calibration.all_predictions if self.toward == SOURCE else None
        if logits is not None:
            return logits[: self.size].double().softmax(-1)
        labels = torch.tensor(self.parts[0].labels)
        return functional.one_hot(labels, len(self.calibration.class_names)).double()

    @cached_property
    def _readers(self) -> tuple[Callable[[Sequence[int]], tuple[list[Any], list[int]]], ...]:
        size, device = self.calibration.settings.batch, self.models.device
        return tuple(_reader(self.models.target, part, size, device) for part in self.parts)

    def _read(self, numbers: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Return samples and labels, which may be of the calibration samples and of those without labels."""
        items, labels, first = list[Any](), list[int](), len(self.parts[0])
        for own, reader, offset in zip(
            ([n for n in numbers if n < first], [n for n in numbers if n >= first]),
            self._readers,
            (0, first),
            strict=False,
        ):
            if own:
                some, theirs = reader([number - offset for number in own])
                items, labels = items + some, labels + theirs
        return items, labels

    def scores(self, numbers: Sequence[int]) -> SampleScores:
        """Score the target on some samples, in the graph of one forward pass."""
        ordered = sorted(numbers)  # calibration samples first
        back = torch.tensor([ordered.index(number) for number in numbers])
        items, labels = self._read(ordered)
        target, head = self.models.target, self.head
        if isinstance(head, Classifier):
            logits = head.logits(head.features(target, items))
            found = class_scores(logits, self._wanted[ordered].to(logits.device))
            back = back.to(logits.device)
            accuracies = None if found.accuracies is None else found.accuracies[back]
            return SampleScores(found.losses[back], accuracies)
        if not isinstance(head, TokenHead):
            raise TypeError(f"a {type(head).__name__} is not trained briefly")
        if self.toward == LABELS:
            return SampleScores(LossJudge(head).evidence(target, items, labels)[back])
        judge = TokenJudge(head)
        with torch.no_grad(), self.models.source.quiet():
            answer = judge.source_says(self.models.source, items, labels)
        return SampleScores(judge.evidence(target, items, labels, answer)[back])


def _tensors(changes: Mapping[str, Change]) -> Iterator[Tensor]:
    for _, change in sorted(changes.items()):
        yield from (change.left, change.right) if isinstance(change, Factors) else (change,)


def _reader(
    model: LiveModel, samples: Samples, size: int, device: torch.device
) -> Callable[[Sequence[int]], tuple[list[Any], list[int]]]:
    """Return a function that reads samples by number; images are prepared once if they are not too large."""
    prepared = PreparedSamples.if_small(model, samples, size, device)

    def read(numbers: Sequence[int]) -> tuple[list[Any], list[int]]:
        if isinstance(prepared, CachedSamples):
            return [prepared.images[number] for number in numbers], [prepared.labels[number] for number in numbers]
        [(items, labels)] = samples.select(numbers).batches(len(numbers))
        return items, labels

    return read


def carried_places(models: ModelPair) -> dict[str, str]:
    """Return the names, in the loaded target, of the tensors that a port changes, by their names in its files."""
    own = models.lineage.target.layout.own_names
    return {slot.tensor: own.get(slot.tensor, slot.tensor) for pair in models.pairs for slot in pair.target.slots}


def fresh_factors(models: ModelPair, rank: int, seed: int) -> dict[str, Change]:
    """Return a change of nothing for every weight that a port changes: factors of a rank, the left one of zeros."""
    generator, parameters = torch.Generator().manual_seed(seed), dict(models.target.module.named_parameters())
    factors = dict[str, Change]()
    for name in dict.fromkeys(carried_places(models).values()):
        if name in parameters and parameters[name].ndim == 2:
            rows, columns = parameters[name].shape
            kept = min(rank, rows, columns)
            right = torch.randn(kept, columns, generator=generator) / sqrt(columns)
            factors[name] = Factors(torch.zeros(rows, kept), right)
    return factors


def start_of(models: ModelPair, changes: Deltas, rank: int | None, settings: Settings) -> dict[str, Change]:
    """Return the carried changes by the loaded target's names, as a training begins with them.

    What a port could have changed and did not begins at nothing. With a `rank` that is factors; carried ones keep
    their own rank, unless another was asked for.
    """
    parameters = dict(models.target.module.named_parameters())
    own = changes.renamed(models.lineage.target.layout.own_names)
    places = own.places_in(parameters, "the target")
    found: dict[str, Change] = {}
    if rank is not None:
        found |= fresh_factors(models, rank, settings.seed)
    else:
        found |= {name: torch.zeros(parameters[name].shape) for name in carried_places(models).values()}
    for name, place in places.items():
        change = own.change(name)
        if rank is not None and isinstance(change, Factors):
            found[place] = truncated(change, settings.rank)
        else:
            found[place] = dense(change)
    return found


def stored_changes(models: ModelPair, changes: Mapping[str, Change]) -> Deltas:
    """Return changes of the loaded target by the names of its files, in main memory."""
    stored = {own: file for file, own in models.lineage.target.layout.own_names.items()}
    return Deltas({stored.get(name, name): change.to("cpu") for name, change in changes.items()})


def factor_rank(models: ModelPair, rank: int | float | None, as_adapter: bool) -> int | None:
    """Return the rank at which factors are trained instead of weights: that of a LoRA, or the one asked for."""
    if not as_adapter or isinstance(rank, float):
        return None
    if rank is not None:
        return rank
    ranks = [change.rank for _, change in models.vector.changes() if isinstance(change, Factors)]
    return max(ranks, default=None)
