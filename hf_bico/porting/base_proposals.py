"""Proposes the base of a fine-tune whose own base cannot be had: by its name, and by the sizes of its layers.

A proposal is only ever said: the user names it. Asks the Hub whether it is there, and reads small files; no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any

from hf_bico.errors import AccessError, BicoError, HubUnavailableError, NotCachedError, RepoError
from hf_bico.hub.client import Hub, RepoFiles, fetch_small_files
from hf_bico.hub.references import HubReference, is_hub_id
from hf_bico.hub.repo_metadata import read_metadata
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.checkpoints import is_adapter
from hf_bico.utils.files import read_object

MOST = 3
"""How many bases are proposed at most."""
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_QUANTISED = re.compile(
    r"(?i)[-_.](unsloth-bnb-4bit|bnb-4bit|bnb-8bit|4bit|8bit|int4|int8|w4a16|awq(-int4)?|gptq(-int[48])?|fp8"
    r"|fp8-dynamic|gguf|mlx|qat|nf4)$"
)
_NO_NAME = re.compile(r"(?i)[0-9a-f]{40}|snapshots|models?|base|final|merged|output|outputs|checkpoint-?\d*|\W*")
_OWNERS = (
    (r"(meta-)?llama-?[234]", "meta-llama"),
    (r"qwen", "Qwen"),
    (r"(mistral|mixtral|ministral|codestral)-", "mistralai"),
    (r"gemma", "google"),
    (r"phi-", "microsoft"),
    (r"smollm", "HuggingFaceTB"),
    (r"tinyllama", "TinyLlama"),
    (r"deepseek", "deepseek-ai"),
    (r"olmo", "allenai"),
    (r"granite", "ibm-granite"),
    (r"falcon", "tiiuae"),
    (r"yi-", "01-ai"),
)
"""Who publishes the models whose names begin so."""
_OPEN_COPIES = "unsloth"
"""Publishes copies of gated models under their own names."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder, as far as an adapter's layers or a configuration tell them."""

    width: int | None = None
    blocks: int | None = None
    mlp: int | None = None
    queries: int | None = None
    keys: int | None = None

    def fits(self, other: Sizes) -> bool:
        """Tell whether all sizes that both know are the same."""
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return all(None in pair or pair[0] == pair[1] for pair in pairs)

    @property
    def tells(self) -> bool:
        """True if enough is known to tell one model from another."""
        return None not in (self.width, self.blocks) and (self.mlp, self.keys) != (None, None)


KNOWN: dict[str, Sizes] = {
    "meta-llama/Llama-2-7b-hf": Sizes(4096, 32, 11008, 4096, 4096),
    "meta-llama/Llama-2-13b-hf": Sizes(5120, 40, 13824, 5120, 5120),
    "meta-llama/Llama-3.1-8B": Sizes(4096, 32, 14336, 4096, 1024),
    "mistralai/Mistral-7B-v0.3": Sizes(4096, 32, 14336, 4096, 1024),
    "meta-llama/Llama-3.1-70B": Sizes(8192, 80, 28672, 8192, 1024),
    "meta-llama/Llama-3.2-1B": Sizes(2048, 16, 8192, 2048, 512),
    "meta-llama/Llama-3.2-3B": Sizes(3072, 28, 8192, 3072, 1024),
    "TinyLlama/TinyLlama_v1.1": Sizes(2048, 22, 5632, 2048, 256),
    "Qwen/Qwen2.5-0.5B": Sizes(896, 24, 4864, 896, 128),
    "Qwen/Qwen2.5-1.5B": Sizes(1536, 28, 8960, 1536, 256),
    "Qwen/Qwen2.5-3B": Sizes(2048, 36, 11008, 2048, 256),
    "Qwen/Qwen2.5-7B": Sizes(3584, 28, 18944, 3584, 512),
    "Qwen/Qwen2.5-14B": Sizes(5120, 48, 13824, 5120, 1024),
    "Qwen/Qwen2.5-32B": Sizes(5120, 64, 27648, 5120, 1024),
    "Qwen/Qwen2.5-72B": Sizes(8192, 80, 29568, 8192, 1024),
    "Qwen/Qwen3-0.6B-Base": Sizes(1024, 28, 3072, 2048, 1024),
    "Qwen/Qwen3-1.7B-Base": Sizes(2048, 28, 6144, 2048, 1024),
    "Qwen/Qwen3-4B-Base": Sizes(2560, 36, 9728, 4096, 1024),
    "Qwen/Qwen3-8B-Base": Sizes(4096, 36, 12288, 4096, 1024),
    "Qwen/Qwen3-14B-Base": Sizes(5120, 40, 17408, 5120, 1024),
    "google/gemma-2-2b": Sizes(2304, 26, 9216, 2048, 1024),
    "google/gemma-2-9b": Sizes(3584, 42, 14336, 4096, 2048),
    "google/gemma-2-27b": Sizes(4608, 46, 36864, 4096, 2048),
    "HuggingFaceTB/SmolLM2-135M": Sizes(576, 30, 1536, 576, 192),
    "HuggingFaceTB/SmolLM2-360M": Sizes(960, 32, 2560, 960, 320),
    "HuggingFaceTB/SmolLM2-1.7B": Sizes(2048, 24, 8192, 2048, 2048),
    "HuggingFaceTB/SmolLM3-3B-Base": Sizes(2048, 36, 11008, 2048, 512),
}
"""Sizes of well-known bases; their instruction-tuned siblings have the same."""


def proposed_bases(place: RepoFiles, named: str, hub: Hub) -> list[str]:
    """Return Hub ids that may be the base of a fine-tune which names `named`, or nothing; the likeliest first.

    Each is on the Hub, as far as that can be asked, and has the sizes of the fine-tune's layers.
    """
    sizes = adapter_sizes(place) if is_adapter(place.sizes) else config_sizes(_config(place))
    by_name = [name for name in dict.fromkeys(names_like(named)) if name != named]
    by_size = [name for name, known in KNOWN.items() if sizes.tells and sizes.fits(known)]
    try:
        found = [name for name in by_name if _may_be(name, sizes, hub)]
        found = found or [name for name in by_size if _may_be(name, sizes, hub)]
    except (HubUnavailableError, NotCachedError):
        found = by_name or by_size
    return found[:MOST]


def names_like(named: str) -> Iterator[str]:
    """Yield Hub ids that a folder's path, or the name of a quantised copy, may stand for.

    >>> list(names_like("/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B/snapshots/0123"))
    ['Qwen/Qwen2.5-7B']
    >>> list(names_like("unsloth/llama-3-8b-bnb-4bit"))
    ['unsloth/llama-3-8b', 'meta-llama/llama-3-8b']
    """
    cached = _CACHED.search(named)
    if cached is not None:
        yield from _whole(f"{cached[1]}/{cached[2]}")
        return
    parts = [part for part in PurePosixPath(named.replace("\\", "/")).parts if not _NO_NAME.fullmatch(part)]
    if not parts:
        return
    name = _QUANTISED.sub("", parts[-1])
    owners = [owner for beginning, owner in _OWNERS if re.match(beginning, name.lower())]
    if len(parts) > 1 and is_hub_id("/".join(parts[-2:])):
        known = {*(owner for _, owner in _OWNERS), _OPEN_COPIES}
        if parts[-2] in known or is_hub_id(named):
            yield from _whole("/".join(parts[-2:]))
    for owner in owners:
        yield from _whole(f"{owner}/{name}")


def _whole(name: str) -> Iterator[str]:
    """Yield the name without what says that it was quantised."""
    whole = _QUANTISED.sub("", name)
    if is_hub_id(whole):
        yield whole


def open_copies(named: str, hub: Hub) -> list[str]:
    """Return copies of a gated model that this account may download."""
    copy = f"{_OPEN_COPIES}/{named.rpartition('/')[2]}"
    try:
        return [copy] if copy != named and _may_be(copy, Sizes(), hub, gated=False) else []
    except (HubUnavailableError, NotCachedError):
        return []


def _may_be(name: str, sizes: Sizes, hub: Hub, gated: bool = True) -> bool:
    """Tell whether a repo is on the Hub, with these sizes and its whole weights; not known if it is `gated`."""
    try:
        place = fetch_small_files(hub.repo(HubReference(name), "the base"))
    except (HubUnavailableError, NotCachedError):
        raise
    except AccessError:
        return gated
    except RepoError:
        return False
    quantized = read_metadata(place.folder, place.name).quantized
    return not quantized and sizes.fits(config_sizes(_config(place)))


def _config(place: RepoFiles) -> Mapping[str, Any]:
    try:
        return read_object(place.folder / "config.json")
    except (OSError, ValueError):
        return {}


def config_sizes(config: Mapping[str, Any]) -> Sizes:
    """Read the sizes of a decoder's configuration."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    width, blocks, mlp, heads, groups = (
        value if type(value := config.get(name)) is int and value > 0 else None for name in names
    )
    own = config.get("head_dim")
    head = own if type(own) is int else None if width is None or heads is None else width // heads
    queries = None if head is None or heads is None else head * heads
    keys = queries if groups is None else None if head is None else head * groups
    return Sizes(width, blocks, mlp, queries, keys)


def adapter_sizes(place: RepoFiles) -> Sizes:
    """Read the sizes of the model that an adapter's LoRA layers belong to; unknown ones are None."""
    try:
        shapes = Adapter.open(place).checkpoint.shapes
    except BicoError:  # reading the adapter reports it
        return Sizes()
    reads, writes = (
        {
            role: _only(
                shape[axis] for name, shape in shapes.items() if f".{role}_proj.{part}" in name and len(shape) == 2
            )
            for role in ("q", "k", "v", "o", "gate", "up", "down")
        }
        for part, axis in (("lora_A", 1), ("lora_B", 0))
    )
    blocks = [int(found[1]) for name in shapes if (found := re.search(r"\.layers\.(\d+)\.", name))]
    return Sizes(
        width=_only(
            filter(None, (*(reads[role] for role in ("q", "k", "v", "gate", "up")), writes["o"], writes["down"]))
        ),
        blocks=max(blocks) + 1 if blocks else None,
        mlp=_only(filter(None, (writes["gate"], writes["up"], reads["down"]))),
        queries=_only(filter(None, (writes["q"], reads["o"]))),
        keys=_only(filter(None, (writes["k"], writes["v"]))),
    )


def _only(values: Iterable[int | None]) -> int | None:
    """Return the value that all of these share; None if they differ, or there are none."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
