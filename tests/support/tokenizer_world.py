"""Three pairs of tiny decoders that read the same pages by three tokenizers, and a LoRA of each pair's first.

The tokenizers are trained on the pages: two byte-level ones of 300 and 500 pieces, from different parts, and a Unigram
of 300. So every LoRA can be ported to a model of its own tokenizer, and to two of others. The pages, styles and models
are those of the language world.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_bico.experiments.demo.training import quiet_torch
from support.language_world import (
    PRETRAINING_BATCH,
    SHAPES,
    TARGET_MODULES,
    TUNING_RANK,
    TUNING_RATE,
    TUNING_STEPS,
    in_style,
    llama,
    mixed,
    pages_of,
    train,
    warm_up_then_cosine,
)

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
NAMES = ("bytes 300", "bytes 500", "words 300")
STEPS, CHARACTERS = 600, 150
"""Steps of pretraining, and characters of a sample."""


@dataclass(frozen=True)
class TokenizerWorld:
    """For each tokenizer the folders "source", "target" and "lora", and the style that the LoRA writes."""

    folder: Path
    style: str

    def place(self, tokenizer: str, model: str) -> Path:
        return self.folder / tokenizer / model

    def load(self, tokenizer: str, model: str) -> Any:
        """The model "source" or "target" of a tokenizer, or its "tuned" source."""
        import peft

        base = AutoModelForCausalLM.from_pretrained(self.place(tokenizer, "target" if model == "target" else "source"))
        return peft.PeftModel.from_pretrained(base, self.place(tokenizer, "lora")) if model == "tuned" else base

    def calibration(self, count: int) -> list[dict[str, str]]:
        return self._rows("source", count, seed=0)

    def _rows(self, name: str, count: int, seed: int) -> list[dict[str, str]]:
        text, draw = in_style(pages_of(name), self.style), random.Random(seed)
        starts = [draw.randrange(len(text) - CHARACTERS) for _ in range(count)]
        return [{"text": text[start : start + CHARACTERS]} for start in starts]

    def loss(self, tokenizer: str, model: nn.Module, count: int = 80) -> float:
        """Of a byte of rows that no model has seen, in nats."""
        cut, nats, size = PreTrainedTokenizerFast.from_pretrained(self.place(tokenizer, "source")), 0.0, 0
        with torch.no_grad():
            for row in self._rows("held out", count, seed=99):
                ids = torch.tensor([cut(row["text"])["input_ids"]])
                logits = model.eval()(input_ids=ids).logits
                nats += float(functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
                size += len(row["text"].encode())
        return nats / size

    def shares(self, method: str, samples: int = 50, **options: Any) -> dict[tuple[str, str], float]:
        """By the two tokenizers: how much of what the LoRA did for its own base it does for the target."""
        import hf_bico

        found, before = {}, {name: self.loss(name, self.load(name, "target")) for name in NAMES}
        for one in NAMES:
            at_home = self.loss(one, self.load(one, "source")) - self.loss(one, self.load(one, "tuned"))
            for other in NAMES:
                ported = hf_bico.port(
                    self.place(one, "lora"),
                    to=self.place(other, "target"),
                    base=self.place(one, "source"),
                    data=self.calibration(samples),
                    n=samples,
                    method=method,
                    evaluate=False,
                    **options,
                )
                found[one, other] = (before[other] - self.loss(other, ported.model())) / at_home
        return found


def one_and_other(shares: dict[tuple[str, str], float]) -> tuple[float, float]:
    """The mean share between two models of one tokenizer, and of different ones."""
    same = fmean(share for (one, other), share in shares.items() if one == other)
    return same, fmean(share for (one, other), share in shares.items() if one != other)


def build_tokenizer_world(folder: Path, seed: int, style: str = "capitals") -> TokenizerWorld:
    """Trains six models and three LoRAs: about a minute on one thread."""
    world = TokenizerWorld(folder, style)
    for name in NAMES:
        tokenizer = _tokenizer(name)
        for number, model in enumerate(("source", "target")):
            with quiet_torch(2 * seed + number):
                made = llama(*SHAPES[model], vocab_size=len(tokenizer))
                _train(made, tokenizer, mixed(pages_of(model), seed), STEPS, partial(warm_up_then_cosine, steps=STEPS))
                made.save_pretrained(world.place(name, model))
                tokenizer.save_pretrained(world.place(name, model))
        with quiet_torch(seed):
            _tune(world, name, tokenizer)
    return world


def _tune(world: TokenizerWorld, name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    import peft

    settings = peft.LoraConfig(r=TUNING_RANK, lora_alpha=TUNING_RANK, target_modules=TARGET_MODULES)
    adapted = peft.get_peft_model(world.load(name, "source"), settings)
    _train(adapted, tokenizer, in_style(pages_of("source"), world.style), TUNING_STEPS, lambda _: TUNING_RATE)
    adapted.save_pretrained(world.place(name, "lora"))


def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    kind, pieces = name.split()
    of = "target" if pieces == "500" else "source"
    pages = [mixed(pages_of(of)[start : start + 2000], start) for start in range(0, 200_000, 4000)]
    return learnt_tokenizer(kind, int(pieces), pages)


def learnt_tokenizer(
    kind: str, pieces: int, texts: Sequence[str], special: Sequence[str] = SPECIAL, frame: tuple[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """A tokenizer of "bytes", of "words" as SentencePiece cuts them, or of "wordpieces", trained on these texts.

    A `frame` is what is put around a text, and around a pair of texts.
    """
    options: dict[str, Any] = {"vocab_size": pieces, "special_tokens": list(special), "show_progress": False}
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(**options)
    elif kind == "wordpieces":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**options)
    else:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**options, unk_token="<unk>")
    made.train_from_iterator(texts, trainer)
    if frame is not None:
        numbered = [(token, made.token_to_id(token)) for token in special]
        made.post_processor = processors.TemplateProcessing(single=frame[0], pair=frame[1], special_tokens=numbered)
    called = dict(
        zip(("pad_token", "unk_token", "bos_token", "eos_token", "cls_token", "sep_token"), special, strict=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, **called)


def _train(model: Any, tokenizer: Any, text: str, steps: int, rate: Callable[[int], float]) -> None:
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    train(model, [one for one in model.parameters() if one.requires_grad], ids, steps, PRETRAINING_BATCH, rate)
