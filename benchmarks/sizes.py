"""How large the timed ports are: as real models on a GPU, smaller on a CPU, and tiny to see that everything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pairs import BASE_16, BASE_16_PLUS, LARGE_14, QWEN_1_5B, QWEN_3B, T5_3B, T5_LARGE, ClipShape

Shape = Mapping[str, int]


@dataclass(frozen=True)
class TextPorts:
    """Two language models, and how many texts of how many tokens are used."""

    source: Shape
    target: Shape
    samples: int
    length: int
    vocabulary: int
    memory: str | None = None


@dataclass(frozen=True)
class Growth:
    """Which numbers of samples, widths and depths are timed; what does not grow stands at `samples[1]` and so on.

    Sources are so wide, and targets 7/6 of it; heads are `head` wide.
    """

    samples: tuple[int, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    head: int
    images: tuple[int, int]
    patch: int

    def shapes(self, width: int, depth: int) -> tuple[ClipShape, ClipShape]:
        source, target = (
            ClipShape(own, depth, own // self.head, image, self.patch, 64, 64, 1, 1, 200)
            for own, image in zip((width, width * 7 // 6), self.images, strict=True)
        )
        return source, target


@dataclass(frozen=True)
class Sizes:
    """All ports of one run."""

    name: str
    base: ClipShape
    plus: ClipShape
    large: ClipShape
    plus_samples: int
    large_samples: tuple[int, ...]
    stored_samples: int
    """The most samples of the larger pair whose activations the obvious implementation can hold."""
    t5: TextPorts
    qwen: TextPorts
    growth: Growth
    memory: str | None
    square: int
    """The edge of the matrices whose products give the device's rates."""


FULL = Sizes(
    "real sizes",
    BASE_16,
    BASE_16_PLUS,
    LARGE_14,
    plus_samples=100,
    large_samples=(10, 100, 1000),
    stored_samples=100,
    t5=TextPorts(T5_3B, T5_LARGE, samples=64, length=128, vocabulary=32128),
    qwen=TextPorts(QWEN_1_5B, QWEN_3B, samples=32, length=512, vocabulary=151936, memory="24GB"),
    growth=Growth((50, 100, 200, 400, 800), (384, 768, 1536), (3, 6, 12, 24), 64, (224, 240), 16),
    memory="8GB",
    square=8192,
)
_CPU_TOWER = {"embedding": 64, "text_width": 64, "text_blocks": 1, "text_heads": 2, "vocabulary": 200}
CPU = Sizes(
    "a quarter of the real widths",
    ClipShape(192, 4, 3, 112, 16, **_CPU_TOWER),
    ClipShape(224, 4, 7, 128, 16, **_CPU_TOWER),
    ClipShape(256, 6, 4, 112, 14, **_CPU_TOWER),
    plus_samples=50,
    large_samples=(10, 30, 90),
    stored_samples=100,
    t5=TextPorts(
        {"d_model": 256, "d_ff": 1536, "d_kv": 64, "num_heads": 8, "num_layers": 3},
        {"d_model": 256, "d_ff": 1024, "d_kv": 32, "num_heads": 8, "num_layers": 3},
        **{"samples": 32, "length": 64, "vocabulary": 1000},
    ),
    qwen=TextPorts(
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 6},
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 9, "num_attention_heads": 8},
        **{"samples": 16, "length": 64, "vocabulary": 1000},
    ),
    growth=Growth((25, 50, 100, 200), (96, 192, 288), (2, 4, 8), 16, (64, 80), 16),
    memory=None,
    square=1024,
)
_TINY_TOWER = {"embedding": 16, "text_width": 16, "text_blocks": 1, "text_heads": 1, "vocabulary": 120}
SMALL = Sizes(
    "tiny sizes",
    ClipShape(24, 2, 2, 16, 4, **_TINY_TOWER),
    ClipShape(32, 2, 2, 20, 4, **_TINY_TOWER),
    ClipShape(40, 3, 2, 20, 4, **_TINY_TOWER),
    plus_samples=12,
    large_samples=(4, 8, 12),
    stored_samples=8,
    t5=TextPorts(
        {"d_model": 32, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2},
        {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2},
        **{"samples": 6, "length": 12, "vocabulary": 120},
    ),
    qwen=TextPorts(
        {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"samples": 6, "length": 12, "vocabulary": 120},
    ),
    growth=Growth((4, 8, 16), (24, 48, 96), (1, 2, 3), 4, (16, 20), 4),
    memory=None,
    square=64,
)
