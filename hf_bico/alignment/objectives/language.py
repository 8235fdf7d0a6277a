"""Compute the objectives of generative models: language modelling, and text-to-text.

Cross-entropies over label tokens, summed for calibration and averaged over the tokens when measured; over the bytes
that these stand for, where models with different tokenizers are compared. Knows live models and tokens; not sites or
files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.alignment.memory import WIDENED_ROWS
from hf_bico.alignment.objectives.base import Head, LossBatch
from hf_bico.errors import ObjectiveError, UnreadableSampleError
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.text_models import CausalModel, SequenceModel
from hf_bico.models.hooks import Losses
from hf_bico.models.inference import Batched
from hf_bico.models.token_places import byte_length
from hf_bico.models.tokenization import UNLEARNT, TokenBatch
from hf_bico.runtime.environment import halving_batches
from hf_bico.utils.samples import Answered, Text


@dataclass(frozen=True)
class TokenHead(Head):
    """A head whose loss is a sum over tokens, and is measured as the mean of a token, or of a byte."""

    per_byte: bool = field(default=False, kw_only=True)

    @property
    def metric(self) -> str:
        return "loss"

    @property
    def per(self) -> str | None:
        return "byte" if self.per_byte else None

    @abstractmethod
    def run(self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]) -> tuple[Tensor, Tensor, TokenBatch]:
        """Return logits (samples, tokens, vocabulary), their labels, and the tokens that were read."""

    @abstractmethod
    def label_bytes(self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]) -> int:
        """Return how many bytes of text the predicted labels stand for."""

    def losses(self, model: LiveModel, batch: LossBatch) -> Losses:
        logits, labels, tokens = self.run(model, batch.samples, batch.labels)
        return Losses(_summed(logits, labels), text=tokens.rows)

    def measure(self, model: LiveModel, samples: Batched, batch_size: int) -> float:
        """Return the mean loss of a label token, or of a byte."""

        def run(size: int) -> float:
            total, count = 0.0, 0
            for batch, classes in samples.batches(size):
                logits, labels, _ = self.run(model, batch, classes)
                total += float(_summed(logits, labels))
                predicted = int((labels != UNLEARNT).sum())
                count += self.label_bytes(model, batch, classes) if self.per_byte else predicted
            if not count:
                raise UnreadableSampleError(
                    "no token of the samples to measure on is predicted from another",
                    "use longer texts, or a longer --max-length",
                )
            return total / count

        with torch.no_grad(), model.quiet():
            return halving_batches(batch_size, run)


@dataclass(frozen=True)
class LanguageHead(TokenHead):
    """Predicts every label token from those before it."""

    def run(self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]) -> tuple[Tensor, Tensor, TokenBatch]:
        if not isinstance(model, CausalModel):
            raise ObjectiveError(f"a {type(model.module).__name__} is not a language model", "choose another objective")
        batch = model.tokens(samples)
        # the first token of a text is predicted from nothing, also where padding stands before it
        next_tokens = batch.labels[:, 1:].masked_fill(~batch.mask[:, :-1], UNLEARNT)
        return model.logits(batch), functional.pad(next_tokens, (0, 1), value=UNLEARNT), batch

    def label_bytes(self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]) -> int:
        if not isinstance(model, CausalModel):
            raise TypeError(f"a {type(model).__name__} predicts no next token")
        return sum(model.reader.predicted_bytes(sample) for sample in samples)


@dataclass(frozen=True)
class AnswerHead(TokenHead):
    """Decodes a sample's answer, or the word of its class."""

    words: tuple[str, ...]

    def run(self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]) -> tuple[Tensor, Tensor, TokenBatch]:
        if not isinstance(model, SequenceModel):
            raise ObjectiveError(f"a {type(model.module).__name__} has no decoder", "choose another objective")
        batch = model.tokens(samples)
        answers = model.answers([self._answer(sample, label) for sample, label in zip(samples, labels, strict=True)])
        return model.logits(batch, answers), answers.labels, batch

    def label_bytes(self, model: LiveModel, samples: Sequence[Any], labels: Sequence[int]) -> int:
        return sum(byte_length(self._answer(*pair).first) for pair in zip(samples, labels, strict=True))

    def _answer(self, sample: Any, label: int) -> Text:
        if isinstance(sample, Answered):
            return Text(sample.answer)
        if not 0 <= label < len(self.words):
            raise ObjectiveError(
                "a sample has neither an answer nor a label, and text-to-text needs one of them",
                "use data with labels (--label-column), or with prompts and completions",
            )
        return Text(self.words[label])


class _SummedLoss(torch.autograd.Function):
    """The sum of cross-entropies, some rows at a time: logits over a vocabulary are large, and kept in one copy.

    Its gradient takes the logits' place: a linear layer does not need its output again.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows, wanted = logits.detach().flatten(0, 1), labels.flatten()
        total = torch.zeros((), dtype=wide, device=logits.device)
        keeps = context.needs_input_grad[0]
        for some, own in zip(rows.split(WIDENED_ROWS), wanted.split(WIDENED_ROWS), strict=True):
            log_likely = some.to(wide).log_softmax(-1)
            total += functional.nll_loss(log_likely, own, ignore_index=UNLEARNT, reduction="sum")
            if keeps:
                learnt = (own != UNLEARNT).unsqueeze(1)
                gradient = log_likely.exp_().scatter_add_(
                    1, own.clamp(min=0).unsqueeze(1), -torch.ones_like(log_likely[:, :1])
                )
                some.copy_(gradient.mul_(learnt))
        if keeps:
            context.gradient = rows.view_as(logits)
        return total

    @staticmethod
    def backward(context: Any, *of_sum: Tensor) -> tuple[Tensor, None]:
        gradient = context.gradient
        return gradient * of_sum[0].to(gradient.dtype), None


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    found: Tensor = _SummedLoss.apply(logits, labels)
    return found
