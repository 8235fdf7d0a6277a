"""What a port must cost at least: its arithmetic and its bytes, over the rates that this device is measured to have.

Counts from the shapes of the two models; knows neither hf_bico nor the obvious implementation. An operation is one
multiplication or one addition: a product of (m, k) with (k, n) has 2 m k n of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

POLAR_OPERATIONS = 30
"""Times m n^2 for the polar factor of (m, n), m >= n. Two weighted Halley steps by Cholesky (a Gram matrix, a
factorisation, two triangular solutions: 2 + 1/3 + 2 each, and what is around them), then three steps by polynomials of
degree five (a Gram matrix, its square, a product: 6 each), with the check of convergence: what a spectrum needs that
reaches down to 1e-6 of its largest value, in float64."""
_FLOAT32 = 4


@dataclass(frozen=True)
class Site:
    """A linear layer that is carried: what it reads, what it writes, and how many rows of a sample it sees."""

    name: str
    reads: str
    columns: int
    rows: int
    seen: int


@dataclass(frozen=True)
class Tower:
    """A transformer as the count sees it; all numbers are of one sample.

    Blocks attend with queries `inner` wide and keys and values `key` wide, and have `up` layers into the feed-forward
    width. `before` and `after` are the operations of what lies before the first block and behind the last, and
    `after_back` those of the way back through the latter.
    """

    width: int
    inner: int
    key: int
    feedforward: int
    up: int
    blocks: int
    tokens: int
    causal: bool
    before: int
    after: int
    after_back: int
    projection: tuple[int, int] | None = None

    @property
    def _queries(self) -> int:
        return 2 * self.tokens * self.width * (self.inner + 2 * self.key)

    @property
    def _linear(self) -> int:
        return self._queries + 2 * self.tokens * self.width * (self.inner + (self.up + 1) * self.feedforward)

    @property
    def _attention(self) -> int:
        """Scores, and the mixture of values: of causal attention the half that is not masked."""
        seen = self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens**2
        return 4 * seen * self.inner

    @property
    def forward(self) -> int:
        return self.before + self.blocks * (self._linear + self._attention) + self.after

    @property
    def backward(self) -> int:
        """From the loss down to the outputs of the first block's queries, keys and values; no weight has a gradient.

        Every product has one behind it but for attention's, which have two; what lies before those outputs has none.
        """
        return self.after_back + self.blocks * (self._linear + 2 * self._attention) - self._queries

    def sites(self) -> list[Site]:
        """Of all blocks, by the names that `layers_of` chooses from, and the projection behind them."""
        found = []
        for block in range(self.blocks):
            stem, seen = f"{block}.", self.tokens
            found += [
                Site(f"{stem}{name}", f"{stem}attention", self.width, rows, seen)
                for name, rows in (("q", self.inner), ("k", self.key), ("v", self.key))
            ]
            found.append(Site(f"{stem}out", f"{stem}out", self.inner, self.width, seen))
            found += [
                Site(f"{stem}up{number}", f"{stem}mlp", self.width, self.feedforward, seen) for number in range(self.up)
            ]
            found.append(Site(f"{stem}down", f"{stem}down", self.feedforward, self.width, seen))
        if self.projection is not None:
            found.append(Site("projection", "projection", self.projection[1], self.projection[0], 1))
        return found


MODULES = {
    **{"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"},
    **{"gate_proj": "up0", "up_proj": "up1", "down_proj": "down"},
}
"""What the count calls the layers of a LoRA."""


def tower_of(config: Mapping[str, Any], tokens: int = 0, answer: int = 0) -> Tower:
    """From a model's configuration; texts are of so many tokens, and a T5 answers with so many."""
    if "vision_config" in config:
        vision, embedding = config["vision_config"], config["projection_dim"]
        width, patch = vision["hidden_size"], vision["patch_size"]
        patches = (vision["image_size"] // patch) ** 2
        stem, after = 2 * patches * 3 * patch**2 * width, 2 * width * embedding
        sizes = (width, width, width, vision["intermediate_size"], 1, vision["num_hidden_layers"], patches + 1)
        return Tower(*sizes, False, stem, after, after, (embedding, width))
    if "d_ff" in config:
        width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
        # a decoder of one block: what it says goes through its own attention, which no gradient reaches
        crossing = 2 * answer * tokens * inner
        told = 2 * answer * width * (inner + 2 * config["d_ff"] + config["vocab_size"]) + 4 * tokens * width * inner
        own = 2 * answer * width * 5 * inner + 4 * answer**2 * inner
        sizes = (width, inner, inner, config["d_ff"], 1, config["num_layers"], tokens)
        return Tower(*sizes, False, 0, own + told + 2 * crossing, told + 3 * crossing)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    key = width // heads * config["num_key_value_heads"]
    sizes = (width, width, key, config["intermediate_size"], 2, config["num_hidden_layers"], tokens)
    logits = 2 * tokens * width * config["vocab_size"]
    return Tower(*sizes, True, 0, logits, logits)


@dataclass(frozen=True)
class Work:
    """What a port has to do: operations of each kind, and bytes that are moved."""

    passes: int
    covariances: int
    polar: int
    transport: int
    samples: int
    change: int
    carried: int
    weights: int
    written: int

    def seconds(self, rates: Rates, passes_in: str) -> dict[str, float]:
        """The least time of each stage at these rates."""
        return {
            "load": self.weights / rates.read + self.weights / rates.to_device,
            "calibrate": self.passes / getattr(rates, passes_in)
            + self.covariances / rates.float64
            + self.samples / rates.to_device,
            "align": self.polar / rates.float64,
            "transport": self.transport / rates.float64 + self.change / rates.to_device + self.carried / rates.to_host,
            "write": self.written / rates.write,
        }


def work_of(
    source: Tower,
    target: Tower,
    samples: int,
    *,
    weights: int,
    written: int,
    sample_bytes: int,
    rank: int | None = None,
    modules: tuple[str, ...] | None = None,
) -> Work:
    """What it takes to carry the named layers, or all, from one model to the other; with a `rank`, by their factors."""
    of_source = {site.name: site for site in source.sites()}
    pairs = [
        (of_source[_taken(site.name, source.blocks, target.blocks)], site)
        for site in target.sites()
        if modules is None or site.name.partition(".")[2] in {MODULES[name] for name in modules}
    ]
    inputs = {(one.reads, other.reads): (one.columns, other.columns, other.seen) for one, other in pairs}
    outputs = [(one.rows, other.rows, other.seen) for one, other in pairs]
    maps = [*inputs.values(), *outputs]
    used = {one.name: one for one, _ in pairs}.values()

    def numbers(site: Site) -> int:
        return site.rows * site.columns if rank is None else rank * (site.rows + site.columns)

    return Work(
        passes=samples * sum(tower.forward + tower.backward for tower in (source, target)),
        covariances=samples * sum(2 * prod(sizes) for sizes in maps),
        polar=sum(POLAR_OPERATIONS * max(one, other) * min(one, other) ** 2 for one, other, _ in maps),
        transport=sum(_transported(one, other, rank) for one, other in pairs),
        samples=samples * sample_bytes,
        change=_FLOAT32 * sum(numbers(site) for site in used),
        carried=_FLOAT32 * sum(numbers(site) for _, site in pairs),
        weights=weights,
        written=written,
    )


def _taken(name: str, source_blocks: int, target_blocks: int) -> str:
    """The source's site whose change a target's site takes."""
    block, _, rest = name.partition(".")
    if not rest:
        return name
    return f"{int(int(block) * (source_blocks - 1) / max(1, target_blocks - 1) + 0.5)}.{rest}"


def _transported(one: Site, other: Site, rank: int | None) -> int:
    if rank is not None:
        return 2 * rank * (one.rows * other.rows + one.columns * other.columns)
    output_first = other.rows * one.columns * (one.rows + other.columns)
    input_first = one.rows * other.columns * (one.columns + other.rows)
    return 2 * min(output_first, input_first)


@dataclass(frozen=True)
class Rates:
    """Operations and bytes a second, the best of several measurements."""

    float32: float
    bfloat16: float
    float64: float
    to_device: float
    to_host: float
    read: float
    write: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure_rates(device: torch.device, folder: Path, square: int) -> Rates:
    """Products of square matrices, float32 without TF32; pinned copies; a file in the page cache of `folder`'s disk."""
    megabytes = 1024 if device.type == "cuda" else 64
    numbers = torch.empty(megabytes * 2**20 // _FLOAT32, pin_memory=device.type == "cuda").zero_()
    there = torch.empty_like(numbers, device=device)
    file = folder / "rate.bin"
    data = numbers.numpy()

    def read() -> None:
        with file.open("rb", buffering=0) as stream:
            stream.readinto(memoryview(data).cast("B"))

    def write() -> None:
        with file.open("wb", buffering=0) as stream:
            stream.write(memoryview(data).cast("B"))

    moved = numbers.numel() * _FLOAT32
    written = moved / _least_seconds(write, device)
    rates = Rates(
        *(_product_rate(square, dtype, device) for dtype in (torch.float32, torch.bfloat16, torch.float64)),
        to_device=moved / _least_seconds(lambda: there.copy_(numbers, non_blocking=True), device),
        to_host=moved / _least_seconds(lambda: numbers.copy_(there, non_blocking=True), device),
        read=moved / _least_seconds(read, device),
        write=written,
    )
    file.unlink()
    return rates


def _product_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    one = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(one)
    return 2 * size**3 / _least_seconds(lambda: torch.mm(one, one, out=out), device)


def _least_seconds(work: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    least = float("inf")
    for _ in range(times):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        least = min(least, time.perf_counter() - start)
    return least


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
