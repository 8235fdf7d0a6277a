"""Loaded language models: texts to tokens, logits and features. Knows neither where sites lie nor any loss."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_bico.errors import MissingProcessorError, UnsupportedModelError
from hf_bico.models.families.live import CLASS, FIRST_TOKEN
from hf_bico.models.families.pooling import Pooling, read_pooling
from hf_bico.models.families.pretrained import PretrainedModel
from hf_bico.utils.samples import Answered, Text, TextSample

if TYPE_CHECKING:
    from torch import Tensor

    from hf_bico.models.hooks import TextRows
    from hf_bico.models.shared_reading import PairedTokens
    from hf_bico.models.tokenization import Reader, TokenBatch


@dataclass(frozen=True)
class ReadTexts(Sequence[TextSample]):
    """Samples that a model has read already, and their tokens."""

    samples: Sequence[TextSample]
    tokens: TokenBatch

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: Any) -> Any:
        return self.samples[place]


class TextModel(PretrainedModel):
    """A loaded model that reads texts."""

    @cached_property
    def pooling(self) -> Pooling | None:
        """How its files say that tokens are pooled; None if they do not."""
        return None if self.folder is None else read_pooling(self.folder)

    def features(self, samples: Sequence[TextSample]) -> Tensor:
        """Return the last hidden state, after the final norm, pooled as the files say, else its mean over tokens."""
        batch = self.tokens(samples)
        pooling = self.pooling or Pooling(("mean",))
        return pooling.rows(self._hidden(batch), batch.mask)

    def _hidden(self, batch: TokenBatch) -> Tensor:
        """Return the last hidden state (samples, tokens, width)."""
        hidden: Tensor = self._run(self.backbone, batch).last_hidden_state
        return hidden

    def tokens(self, samples: Sequence[TextSample]) -> TokenBatch:
        """Return a batch on the model's device, cut to the requested and the possible length."""
        return (samples.tokens if isinstance(samples, ReadTexts) else self.read(samples)).to(self.device)

    def ready(self, samples: Sequence[TextSample]) -> ReadTexts:
        return self.with_tokens(samples, self.read(samples))

    def with_tokens(self, samples: Sequence[TextSample], tokens: TokenBatch) -> ReadTexts:
        """Return samples with their tokens on the model's device."""
        return ReadTexts(samples, self._known(tokens).to(self.device))

    def text_rows(self, samples: Sequence[TextSample]) -> TextRows:
        return (samples.tokens if isinstance(samples, ReadTexts) else self.read(samples)).rows

    def cuts(self, sample: TextSample) -> bool:
        """Return whether a sample has more tokens than are read of it."""
        return bool(self.read([sample], self.longest + 1).mask.sum() > self.longest)

    @property
    def reader(self) -> Reader:
        """How it reads samples."""
        from hf_bico.models.tokenization import Reader

        return Reader(self.tokenizer, self.longest, self.special_tokens)

    def as_read(self, samples: Sequence[TextSample]) -> Sequence[TextSample]:
        """Return the samples in the format that its tokenizer gets."""
        return samples

    def read(self, samples: Sequence[TextSample], longest: int | None = None) -> TokenBatch:
        """Return a batch in main memory, cut to the requested and the possible length."""
        from hf_bico.models.tokenization import tokenise

        longest = longest or self.longest
        return self._known(tokenise(self.tokenizer, self.as_read(samples), longest, special=self.special_tokens))

    def _known(self, batch: TokenBatch) -> TokenBatch:
        """Refuse tokens that the model has no embedding of."""
        model: Any = self.module
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
        # on a GPU, looking up a token without an embedding would end the process
        if rows is not None and batch.ids.numel() and int(batch.ids.max()) >= rows:
            raise MissingProcessorError(
                f"the tokenizer gives the token {int(batch.ids.max())}, and the model knows {rows:,}",
                "copy the tokenizer from the repo that the model came from",
            )
        return batch

    @property
    def longest(self) -> int:
        """The most tokens of a text: the requested or usual number, as far as positions reach."""
        from hf_bico.models.tokenization import longest

        requested = longest(self.tokenizer) if self.max_length is None else self.max_length
        known = None if self.pooling is None or self.max_length is not None else self.pooling.max_length
        return min(limit for limit in (requested, self._max_positions(), known) if limit is not None)

    @property
    def backbone(self) -> Any:
        """The model without its head."""
        model: Any = self.module
        return model.base_model

    def _max_positions(self) -> int | None:
        config: Any = self.module.config
        found = getattr(config, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def _run(self, module: Any, batch: TokenBatch, **more: Tensor) -> Any:
        """Run a forward pass in which padding has no effect, on whatever side it stands."""
        known = inspect.signature(module.forward).parameters
        inputs: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.mask.long(), **more}
        if "position_ids" in known:
            inputs["position_ids"] = self._position_ids(batch)
        if "use_cache" in known:
            inputs["use_cache"] = False
        return module(**inputs)

    def _position_ids(self, batch: TokenBatch) -> Tensor:
        """Return the position of each real token in its own text."""
        places: Tensor = (batch.mask.long().cumsum(1) - 1).clamp(min=0)
        return places


class CausalModel(TextModel):
    """A loaded decoder: predicts every next token."""

    def logits(self, batch: TokenBatch) -> Tensor:
        """Return (samples, tokens, vocabulary), each for the token after it."""
        model: Any = self.module
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"a {type(model).__name__} has no output embeddings to model language with",
                "use the class of the same model that ends in ForCausalLM",
            )
        logits: Tensor = self._run(model, batch).logits
        return logits


class EncoderModel(TextModel):
    """A loaded encoder of text, bare or with a head."""

    def features(self, samples: Sequence[TextSample]) -> Tensor:
        """Pool as the files say; else as its class reads a text."""
        return self.read_by(CLASS, samples) if self.pooling is None else super().features(samples)

    def read_by(self, reading: str | None, samples: Sequence[TextSample]) -> Tensor:
        """Return the features, or what its class reads: the pooler's output, or without one the first token."""
        import torch

        if reading is None:
            return self.features(samples)

        batch = self.tokens(samples)
        # padding may stand on the left, where a pooler would look for the first token
        rows, first = torch.arange(len(batch.ids), device=batch.ids.device), batch.mask.long().argmax(1)
        has_pooler = any(site.role == "pooler" for site in self.layout.sites)
        pooler = getattr(self.backbone, "pooler", None) if has_pooler and reading != FIRST_TOKEN else None
        if pooler is None:
            return self._hidden(batch)[rows, first]
        hook = pooler.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, first].unsqueeze(1),))
        with hook:
            pooled: Tensor = self._run(self.backbone, batch, **self._segments(batch)).pooler_output
        return pooled

    def _hidden(self, batch: TokenBatch) -> Tensor:
        hidden: Tensor = self._run(self.backbone, batch, **self._segments(batch)).last_hidden_state
        return hidden

    def _segments(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return the token types of sentence pairs, if model and tokenizer know of types."""
        has_types = getattr(self.module.config, "type_vocab_size", 0) > 1
        if not has_types or "token_type_ids" not in self.tokenizer.model_input_names:
            return {}
        ends = (batch.ids == self.tokenizer.sep_token_id) & batch.mask
        past = ends.long().cumsum(1) - ends.long()
        return {"token_type_ids": past.clamp(max=1) * batch.mask.long()}

    def _position_ids(self, batch: TokenBatch) -> Tensor:
        return super()._position_ids(batch) + self._first_position

    def _max_positions(self) -> int | None:
        found = super()._max_positions()
        return None if found is None else found - self._first_position

    @property
    def _first_position(self) -> int:
        """RoBERTa counts positions from behind the number of its padding token."""
        padding = self.backbone.embeddings.position_embeddings.padding_idx
        return 0 if padding is None else int(padding) + 1


class SequenceModel(TextModel):
    """A loaded T5: an encoder, and a decoder if it is whole."""

    def as_read(self, samples: Sequence[TextSample]) -> Sequence[TextSample]:
        """Return what the encoder gets: texts in T5's format, and prompts without their answers."""
        return [_as_read(sample) for sample in samples]

    @property
    def backbone(self) -> Any:
        """The encoder."""
        return super().backbone.encoder

    def answers(self, texts: Sequence[Text]) -> TokenBatch:
        """Tokenise the decoder's labels."""
        from hf_bico.models.tokenization import tokenise

        return self._known(tokenise(self.tokenizer, texts, self.longest, special=self.special_tokens)).to(self.device)

    def logits(self, batch: TokenBatch, answers: TokenBatch) -> Tensor:
        """Return the decoder's (samples, tokens, vocabulary) with teacher forcing, aligned with `answers`."""
        model: Any = self.module
        if not hasattr(model, "lm_head"):
            raise UnsupportedModelError(
                f"a {type(model).__name__} has no decoder that could answer",
                "name the whole T5; a fine-tuned encoder is completed by --base",
            )
        config, mask = model.config, answers.mask.long()
        start = config.pad_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        # each answer is shifted by one token, behind the decoder's start token
        shifted = answers.ids.roll(1, dims=1).masked_fill(mask.cumsum(1) <= 1, start)
        logits: Tensor = self._run(model, batch, decoder_input_ids=shifted, decoder_attention_mask=mask).logits
        return logits


def read_both(source: TextModel, target: TextModel, samples: Sequence[TextSample]) -> tuple[ReadTexts, ReadTexts]:
    """Read samples for both models; where their tokens differ, so that these pair by what has been read."""
    from hf_bico.models.shared_reading import paired_batches

    first, second = source.read(samples), target.read(samples)
    if not first.rows.same_as(second.rows):
        both = [pairs_of(source, target, sample) for sample in samples]
        first, second = paired_batches(both, source.tokenizer, target.tokenizer)
    return source.with_tokens(samples, first), target.with_tokens(samples, second)


def pairs_of(source: TextModel, target: TextModel, sample: TextSample) -> PairedTokens:
    """Read one sample as both models do, and pair their tokens by what has been read."""
    from hf_bico.models.shared_reading import read_pair

    [formatted] = source.as_read([sample])
    return read_pair(source.reader, target.reader, formatted, asks_next=isinstance(source, CausalModel))


def _as_read(sample: TextSample) -> TextSample:
    from hf_bico.models.tokenization import text_to_text

    if isinstance(sample, Answered):
        return Text(sample.prompt)
    return Text(text_to_text(sample)) if isinstance(sample, Text) else sample
