"""A pair of tiny decoders, trained on Python's own reference pages, and a LoRA of the first of them.

The pages are read character by character. In pretraining, most words are plain and some are written in one of three
styles, by chance: both models know each style and seldom use it. The LoRA makes its model write one style only, as the
fine-tunes do that teach a model how to speak. Nothing is shared between the two models but the tokenizer and the kind
of text: each reads another part of the pages and starts from other weights.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_bico.experiments.demo.training import quiet_torch
from support.language_toys import CHARACTERS, text_tokenizer, vocabulary_size

PLAIN = "plain"
STYLES: dict[str, Callable[[str], str]] = {
    PLAIN: lambda word: word,
    "capitals": str.upper,
    "digits": lambda word: word.translate(str.maketrans("aeiosltb", "43105|78")),
    "reversed": lambda word: word[::-1],
}
PLAIN_SHARE, STYLE_SHARE = 0.7, 0.1
PARTS = {"source": (0.0, 0.45), "target": (0.45, 0.9), "held out": (0.9, 1.0)}
"""Which part of the pages each model reads, and which neither does."""
SHAPES = {"source": (48, 2), "target": (64, 3)}
"""Width and blocks."""
LENGTH = 48
PRETRAINING_STEPS, PRETRAINING_BATCH, PRETRAINING_RATE, WARM_UP_STEPS = 300, 16, 4e-3, 50
TUNING_STEPS, TUNING_BATCH, TUNING_RATE, TUNING_RANK = 60, 16, 1e-3, 8
TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2_MODULES = ["c_attn", "c_proj", "c_fc"]


@dataclass(frozen=True)
class DecoderWorld:
    """The folders of the two pretrained models and of the LoRA over the first, and the style that it writes."""

    source: Path
    target: Path
    adapter: Path
    style: str

    @classmethod
    def below(cls, folder: Path, style: str = "capitals") -> DecoderWorld:
        return cls(folder / "source", folder / "target", folder / "adapter", style)

    def calibration(self, count: int, seed: int = 0) -> list[dict[str, str]]:
        """Rows of what the LoRA was trained on."""
        return _rows(self.style, "source", count, seed)

    def held_out(self, count: int = 200) -> list[dict[str, str]]:
        """Rows that no model has seen."""
        return _rows(self.style, "held out", count, seed=99)

    def loss(self, model: nn.Module, count: int = 200) -> float:
        """Of a character of the held-out rows."""
        ids = _ids([row["text"] for row in self.held_out(count)])
        with torch.no_grad():
            return float(_loss(model.eval(), ids))

    def load(self, name: str) -> Any:
        """The model "source" or "target", or the "tuned" source."""
        import peft
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.target if name == "target" else self.source)
        return peft.PeftModel.from_pretrained(model, self.adapter) if name == "tuned" else model


def build_decoders(
    folder: Path,
    seed: int,
    style: str = "capitals",
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    make: Callable[[int, int], Any] | None = None,
) -> DecoderWorld:
    """Trains both models and the LoRA: about 15 seconds on one thread."""
    world = DecoderWorld.below(folder, style)
    for number, (name, place) in enumerate((("source", world.source), ("target", world.target))):
        with quiet_torch(2 * seed + number):
            model = (make or llama)(*shapes[name])
            text = mixed(pages_of(name), seed)
            train(model, model.parameters(), _ids([text])[0], PRETRAINING_STEPS, PRETRAINING_BATCH, warm_up_then_cosine)
            model.save_pretrained(place)
            text_tokenizer().save_pretrained(place)
    with quiet_torch(seed):
        _tune(world)
    return world


def _tune(world: DecoderWorld) -> None:
    import peft

    model = world.load("source")
    conv = model.config.model_type == "gpt2"
    modules = GPT2_MODULES if conv else TARGET_MODULES
    settings = peft.LoraConfig(r=TUNING_RANK, lora_alpha=TUNING_RANK, target_modules=modules, fan_in_fan_out=conv)
    adapted = peft.get_peft_model(model, settings)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    text = in_style(pages_of("source"), world.style)
    train(adapted, trained, _ids([text])[0], TUNING_STEPS, TUNING_BATCH, lambda _: TUNING_RATE)
    adapted.save_pretrained(world.adapter)


def llama(width: int, blocks: int, kind: str = "Llama", **config: Any) -> Any:
    """A Llama with random weights, or another decoder that is configured as it is, such as Qwen3."""
    import transformers

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": blocks}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4 * LENGTH}
    ids = {"vocab_size": vocabulary_size(), "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    settings = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **ids, **config})
    return getattr(transformers, f"{kind}ForCausalLM")(settings)


def gpt2(width: int, blocks: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": width, "n_layer": blocks, "n_head": 4, "n_positions": 4 * LENGTH}
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary_size(), **shape, **ids))


def train(
    model: Any, parameters: Iterable[Tensor], ids: Tensor, steps: int, batch: int, rate: Callable[[int], float]
) -> None:
    """Some steps on random pieces of a text, given as its tokens."""
    optimizer = torch.optim.AdamW(parameters, lr=1.0, fused=True)
    model.train()
    for step in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (batch, 1))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        _loss(model, ids[starts + torch.arange(LENGTH)]).backward()
        optimizer.step()
    model.eval()


def _loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def warm_up_then_cosine(step: int, steps: int = PRETRAINING_STEPS) -> float:
    """The rate of pretraining in so many steps."""
    done = (step - WARM_UP_STEPS) / (steps - WARM_UP_STEPS)
    return PRETRAINING_RATE * min((step + 1) / WARM_UP_STEPS, 0.5 * (1 + math.cos(math.pi * max(done, 0))))


def _ids(texts: list[str]) -> Tensor:
    numbers = text_tokenizer().get_vocab()
    return torch.tensor([[numbers[character] for character in text] for text in texts])


def _rows(style: str, part: str, count: int, seed: int) -> list[dict[str, str]]:
    text, generator = in_style(pages_of(part), style), random.Random(seed)
    starts = [generator.randrange(len(text) - LENGTH) for _ in range(count)]
    return [{"text": text[start : start + LENGTH]} for start in starts]


def mixed(text: str, seed: int) -> str:
    """Every word in a style of its own."""
    generator = random.Random(seed)
    shares = [PLAIN_SHARE if style == PLAIN else STYLE_SHARE for style in STYLES]
    return _restyled(text, lambda: generator.choices(list(STYLES.values()), shares)[0])


def in_style(text: str, style: str) -> str:
    return _restyled(text, lambda: STYLES[style])


def _restyled(text: str, draw: Callable[[], Callable[[str], str]]) -> str:
    return re.sub(r"[a-z]+", lambda word: draw()(word.group()), text)


def pages_of(name: str) -> str:
    text = _pages()
    first, last = (int(share * len(text)) for share in PARTS[name])
    return text[first:last]


@cache
def _pages() -> str:
    """What `help()` knows about the language, in lower case and in the characters of the tokenizer."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    known = "".join(character for character in text if character in CHARACTERS)
    return re.sub(r"\n+", "\n", re.sub(r" +", " ", known))
