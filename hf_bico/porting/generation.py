"""Lets the fine-tuned source write texts, which become the calibration samples where no data is left.

Each text goes on from a prompt, drawn at a temperature of 1 with a seed. Knows loaded decoders; no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_bico.data.draw import CalibrationDraw, draw
from hf_bico.errors import UnreadableSampleError
from hf_bico.hub.client import Hub
from hf_bico.models.families.text_models import CausalModel
from hf_bico.models.tokenization import render_chat
from hf_bico.porting.model_pair import ModelPair
from hf_bico.runtime.environment import Stopwatch, halving_batches
from hf_bico.settings import DEFAULT_SAMPLES, GENERATED, Settings
from hf_bico.utils.samples import TEXTS

TEMPERATURE, TOKENS, BATCH, ROUNDS = 1.0, 256, 16, 4
"""How texts are drawn, how many tokens of each at most, how many at once, and how often empty ones are drawn again."""
OPENINGS = (
    "The town lies on the river, and",
    "In the spring of that year",
    "Dear Anna, thank you for",
    "Once upon a time there was",
    "The meeting began at nine, when",
    "Water boils at 100 degrees because",
    "def mean(values):\n",
    "# How to install\n\n1.",
    "Question: How do plants grow?\nAnswer:",
    "The price rose from 12 to 15, which",
    "My grandmother used to say that",
    "To make bread you need",
    "The judge asked the witness whether",
    "Scientists have found that",
    "The train to the coast leaves",
    "A good teacher",
    "Light travels faster than sound, so",
    "On the first day of the match",
    "The company said on Monday that",
    "import json\n\n",
    "Chapter 1\n\n",
    "The most important thing about money is",
    "She opened the door and",
    "There are three reasons why",
)
"""Beginnings of texts of many kinds, for models without a chat template."""
QUESTIONS = (
    "Tell me about the town that you come from.",
    "How do plants grow?",
    "Write a short story about a fisherman.",
    "What is 17 times 23? Explain each step.",
    "Write a Python function that returns the mean of a list.",
    "Give me a recipe for bread.",
    "Why is the sky blue?",
    "Summarise the plot of a well-known novel.",
    "Write a polite letter that declines an invitation.",
    "What should I see in a large city in one day?",
    "Explain what a contract is.",
    "Which books would you recommend to a student?",
    "How does a refrigerator work?",
    "Translate 'good morning' into three languages.",
    "What is the difference between weather and climate?",
    "Make a list of things to pack for a journey.",
    "How can I sleep better?",
    "Describe a painting that you like.",
    "What happened in the year 1969?",
    "Explain recursion to a child.",
    "Write a poem about the sea.",
    "What are the rules of chess?",
    "How do I ask for a day off?",
    "Compare two ways to travel to work.",
)
"""What to ask models that have a chat template."""


def generated_samples(models: ModelPair, settings: Settings, hub: Hub, watch: Stopwatch) -> CalibrationDraw:
    """Draw calibration samples that the fine-tuned source writes."""
    wanted = DEFAULT_SAMPLES if settings.n is None else settings.n
    with watch("generate"):
        rows = models.team.broadcast(written_rows(models, settings, wanted, watch))
    drawn = draw(rows, replace(settings, n=wanted, split=None, text_column=None), hub, reads=TEXTS)
    return replace(drawn, data=replace(drawn.data, name=GENERATED, named=True))


def written_rows(models: ModelPair, settings: Settings, wanted: int, watch: Stopwatch) -> list[dict[str, str]]:
    """Return rows of texts that the fine-tuned source writes: chats with an answer, where it has a template."""
    model = models.source
    if not isinstance(model, CausalModel):
        raise TypeError(f"a {type(model).__name__} writes no texts")
    chats = bool(getattr(model.tokenizer, "chat_template", None)) and settings.special_tokens
    prompts, rows = settings.prompts or (QUESTIONS if chats else OPENINGS), list[dict[str, str]]()
    devices = [model.device] if model.device.type == "cuda" else []
    with models.tuned_source(), model.quiet(), torch.no_grad(), torch.random.fork_rng(devices):
        for number in range(ROUNDS * -(-wanted // BATCH)):
            watch.progress("generate", len(rows), wanted)
            start = number * BATCH
            some = [prompts[place % len(prompts)] for place in range(start, start + min(BATCH, wanted - len(rows)))]
            torch.manual_seed(settings.seed * 1_000_003 + number)
            for prompt, text in zip(some, _continued(model, some, chats), strict=True):
                if text.strip():
                    rows.append({"prompt": prompt, "completion": text} if chats else {"text": prompt + text})
            if len(rows) == wanted:
                return rows
    raise UnreadableSampleError(
        f"the fine-tuned source wrote {len(rows)} texts to {wanted} prompts, and nothing to the others",
        "give prompts that it goes on from (--prompts), or data",
    )


def _continued(model: CausalModel, prompts: Sequence[str], chats: bool) -> list[str]:
    """Return what a model writes behind each prompt."""
    tokenizer, room = model.tokenizer, model.longest
    rows = [_prompt_ids(tokenizer, prompt, chats, model.special_tokens)[-max(1, room // 2) :] for prompt in prompts]
    width = max(map(len, rows))
    padding = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
    ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    module: Any = model.module

    def run(size: int) -> list[Any]:
        parts = zip(ids.split(size), mask.split(size), strict=True)
        return [row for part, own in parts for row in _drawn(module, part, own, min(TOKENS, room - width), padding)]

    return [str(tokenizer.decode(row[width:], skip_special_tokens=True)) for row in halving_batches(len(rows), run)]


def _drawn(module: Any, ids: torch.Tensor, mask: torch.Tensor, most: int, padding: int) -> list[list[int]]:
    # all that a model's own generation_config may say is said here
    found: torch.Tensor = module.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        typical_p=1.0,
        repetition_penalty=1.0,
        num_beams=1,
        min_new_tokens=0,
        max_new_tokens=most,
        pad_token_id=padding,
    )
    return found.tolist()


def _prompt_ids(tokenizer: Any, prompt: str, chats: bool, special: bool) -> list[int]:
    """Return a prompt's tokens, without a token that would end the text."""
    if chats:
        rendered = render_chat(tokenizer, ({"role": "user", "content": prompt},), answering=True)
        return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    ids = list(tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"])
    return ids[:-1] if len(ids) > 1 and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id) else ids
