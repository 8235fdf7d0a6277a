"""A pair of tiny T5s, and a fine-tune of the first one's encoder on pairs of sentences: the paper's protocol in small.

A sentence is a name, a verb and a thing. The verb of the hypothesis decides the label: it keeps to what was seen
(entailment), tells something else (neutral) or denies it (contradiction). Pretraining asks for several things about a
pair, each by a word in front: the verb of the hypothesis also has a colour and a tone. Without that word it asks for
any of them, or for the label, which is then often wrong. So both models know what the labels depend on, their encoders
show it among much else, and fine-tuning on true labels brings it out. In half of the batches the decoder reads the mean
of the encoder's output alone, which a linear probe will read too.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from hf_bico.experiments.demo.training import quiet_torch

VERBS = {
    "entailment": "sees spots notices watches views finds meets greets knows",
    "neutral": "wants paints sells names counts lends builds draws fixes",
    "contradiction": "misses ignores avoids overlooks forgets skips loses hides drops",
}
LABEL_OF = {verb: label for label, verbs in VERBS.items() for verb in verbs.split()}
NAMES = ["ada", "ben", "cleo", "dora", "emil"]
PREMISE_VERBS = ["has", "holds", "keeps"]
THINGS = ["kites", "maps", "loaves", "cats", "cups"]
RELATIONS = {"entailment": "close", "neutral": "far", "contradiction": "against"}
COLOURS = ["red", "green", "blue", "grey"]
TONES = ["low", "high", "flat", "sharp"]
_drawn = random.Random(0)
COLOUR_OF = {verb: _drawn.choice(COLOURS) for verb in LABEL_OF}
TONE_OF = {verb: _drawn.choice(TONES) for verb in LABEL_OF}

QUESTIONS: dict[str, Callable[[str, str], str]] = {
    "label": lambda name, verb: LABEL_OF[verb],
    "relation": lambda name, verb: RELATIONS[LABEL_OF[verb]],
    "colour": lambda name, verb: COLOUR_OF[verb],
    "tone": lambda name, verb: TONE_OF[verb],
    "who": lambda name, verb: name,
}
"""What is asked about the hypothesis, by the word in front of the pair."""
LABEL, WRONG_SHARE = "label", 0.6
"""Of the labels in pretraining, so many are drawn by chance."""
ASKED = {("", LABEL): 0.5} | {("", name): 0.3 for name in ("colour", "tone", "who")}
ASKED |= {(name, name): 0.3 for name in ("relation", "colour", "tone", "who")}
"""How often pretraining asks for what, with which word in front."""

SPECIAL = ("<pad>", "</s>", "<unk>")
WORDS = (
    *(*SPECIAL, "premise:", "hypothesis:", *(name for name in QUESTIONS if name != LABEL), *VERBS, *RELATIONS.values()),
    *(*COLOURS, *TONES, *NAMES, *PREMISE_VERBS, *LABEL_OF, *THINGS),
)
SHAPES = {"source": (48, 2), "target": (64, 2)}
"""Width and blocks of the encoder."""
PRETRAINING_STEPS, PRETRAINING_RATE, TUNING_STEPS, TUNING_RATE, BATCH = 300, 3e-3, 60, 1e-3, 64
POOLED_SHARE = 0.5
EMBEDDING_SCALE = 0.3
TEST_ROWS = 400


@dataclass(frozen=True)
class SequenceWorld:
    """The folders of the pretrained models, of the fine-tuned source, and of the labelled pairs (train and test)."""

    source: Path
    target: Path
    tuned: Path
    data: Path

    @classmethod
    def below(cls, folder: Path) -> SequenceWorld:
        return cls(*(folder / name for name in ("source", "target", "tuned", "pairs")))


def build_sequences(folder: Path, seed: int, tokenizers: tuple[Any, Any] | None = None) -> SequenceWorld:
    """Trains both models and the fine-tune: about 18 seconds on one thread. Both read words unless told otherwise."""
    world = SequenceWorld.below(folder)
    both = tokenizers or (build_word_tokenizer(), build_word_tokenizer())
    for number, (name, place, tokenizer) in enumerate(zip(SHAPES, (world.source, world.target), both, strict=True)):
        with quiet_torch(3 * seed + number):
            model = _sequence_model(*SHAPES[name], tokenizer)
            corpus = Corpus(3 * seed + number, tokenizer)
            _train(model, model.parameters(), corpus, PRETRAINING_STEPS, PRETRAINING_RATE)
            _save(model, tokenizer, place)
            if name == "source":
                _tune(model, tokenizer, seed)
                _save(model, tokenizer, world.tuned)
    _write_rows(world.data, seed)
    return world


def _tune(model: T5ForConditionalGeneration, tokenizer: Any, seed: int) -> None:
    """The encoder's layers, on true labels; the decoder stays."""
    layers = [part.weight for part in model.encoder.modules() if isinstance(part, torch.nn.Linear)]
    corpus = Corpus(1000 + seed, tokenizer, {("", LABEL): 1.0}, wrong=0.0)
    _train(model, layers, corpus, TUNING_STEPS, TUNING_RATE)


def build_word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    end = [("</s>", WORDS.index("</s>"))]
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", pair="$A $B </s>", special_tokens=end)
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **special)


@dataclass(frozen=True)
class Pair:
    """Two sentences."""

    premise: tuple[str, str, str]
    hypothesis: tuple[str, str, str]

    @classmethod
    def draw(cls, generator: random.Random) -> Pair:
        premise, hypothesis = (
            (generator.choice(NAMES), generator.choice(verbs), generator.choice(THINGS))
            for verbs in (PREMISE_VERBS, list(LABEL_OF))
        )
        return cls(premise, hypothesis)

    @property
    def row(self) -> dict[str, str]:
        label = LABEL_OF[self.hypothesis[1]]
        return {"premise": " ".join(self.premise), "hypothesis": " ".join(self.hypothesis), "label": label}

    def asked(self, word: str) -> str:
        return f"{word} premise: {' '.join(self.premise)} hypothesis: {' '.join(self.hypothesis)}".strip()


class Corpus:
    """Endless pairs with questions and answers, as tokens."""

    def __init__(
        self, seed: int, tokenizer: Any, asked: dict[tuple[str, str], float] = ASKED, wrong: float = WRONG_SHARE
    ) -> None:
        self.generator, self.asked, self.wrong = random.Random(seed), asked, wrong
        self.tokenizer = tokenizer

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Pairs to read, and answers to say, as tokens with padding."""
        read, said = zip(*self.texts(count), strict=True)
        return self._ids(read), self._ids(said)

    def texts(self, count: int) -> list[tuple[str, str]]:
        kinds = self.generator.choices(list(self.asked), list(self.asked.values()), k=count)
        return [self._one(word, question) for word, question in kinds]

    def _one(self, word: str, question: str) -> tuple[str, str]:
        pair = Pair.draw(self.generator)
        answer = QUESTIONS[question](*pair.hypothesis[:2])
        if question == LABEL and self.generator.random() < self.wrong:
            answer = self.generator.choice(list(VERBS))
        return pair.asked(word), answer

    def _ids(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor(self.tokenizer(list(texts), padding=True)["input_ids"])


def _sequence_model(width: int, blocks: int, tokenizer: Any) -> T5ForConditionalGeneration:
    """Of version 1.1, with embeddings small enough for the blocks to matter beside them."""
    config = T5Config(
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=blocks,
        num_decoder_layers=1,
        num_heads=4,
        vocab_size=len(tokenizer),
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        model.shared.weight.mul_(EMBEDDING_SCALE)
        model.lm_head.weight.normal_(std=width**-0.5)
    return model


def _train(model: Any, parameters: Iterable[Tensor], corpus: Corpus, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True)
    warm_up = steps // 8

    def shape(step: int) -> float:
        done = (step - warm_up) / (steps - warm_up)
        return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * max(done, 0))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    model.train()
    for _ in range(steps):
        read, said = corpus.draw(BATCH)
        optimizer.zero_grad()
        _loss(model, read, said, pooled=corpus.generator.random() < POOLED_SHARE).backward()
        optimizer.step()
        schedule.step()
    model.eval()


def _loss(model: Any, read: Tensor, said: Tensor, pooled: bool) -> Tensor:
    """Of what the decoder says, from all of the encoder's output or from its mean."""
    mask = read != 0
    states = model.encoder(input_ids=read, attention_mask=mask).last_hidden_state
    if pooled:
        states = (states * mask.unsqueeze(-1)).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        mask = mask[:, :1]
    logits = model(encoder_outputs=BaseModelOutput(states), attention_mask=mask, labels=said, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), said.flatten(), ignore_index=0)


def _save(model: T5ForConditionalGeneration, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_rows(folder: Path, seed: int) -> None:
    generator = random.Random(2000 + seed)
    folder.mkdir()
    for split, count in (("train", 600), ("test", TEST_ROWS)):
        rows = [json.dumps(Pair.draw(generator).row) for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
