"""Where tokens end in a text, in bytes, and which tokens of two tokenizers pair: on any text, as brute force has it."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import combinations, pairwise
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer

from hf_bico.models.shared_reading import PairedTokens
from hf_bico.models.token_places import Place, encode, part_ends, places_of
from hf_bico.models.tokenization import SampleTokens
from support.real_tokenizers import MAKERS, tokenizer

REAL = tuple(MAKERS)
TRAINED = ("WordPiece", "Unigram", "trimmed", "bytes")
NAMES = (*REAL, *TRAINED)
DROPS_SPACE = ("WordPiece", "Unigram")
"""These read a text without some of its spaces."""
PIECES = (
    *("the", "Hello", " world", "naïve", "e\u0301", "a\u0323\u0307", "ﬁ", "½", "Ⅳ", "İ", "ß", "\u017f", "Å", "\u212b"),
    *("\uac01", "\u1100\u1161\u11a8", "日本語", "ภาษาไทย", "שלום", "مرحبا", "\u202eabc", "\u200d", "\ufeff", "\x00"),
    *("😀", "👩\u200d👩\u200d👧", "🏳️\u200d🌈", "🇩🇪", "\ufffd", " ", "  ", " " * 17, "\t", "\n", "\r\n", "\n\n\n"),
    *(
        "\xa0",
        "\u3000",
        "1",
        "12",
        "2026",
        "3.14159",
        "0" * 12,
        "▁",
        "Ġ",
        "<0x0A>",
        "</s>",
        "##",
        "[UNK]",
        "<unk>",
        "'LL",
    ),
    *("<|endoftext|>", "def f(x):\n    return x", "don't"),
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=12).map("".join)
TOLERANT = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def made(name: str) -> Any:
    return tokenizer(name) if name in REAL else TRAINERS[name]()


def trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """A tokenizer of 300 pieces, of what Python's help says."""
    found = Tokenizer(model)
    found.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        found.normalizer = normalizer
    found.train_from_iterator((topics[name] for name in sorted(topics)[:30]), trainer)
    return found


def word_piece() -> Tokenizer:
    """As that of BERT: lower case, no accents, no spaces, unknown letters."""
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"])
    cut = pre_tokenizers.BertPreTokenizer()
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, cut, normalizers.BertNormalizer(lowercase=True))


def unigram() -> Tokenizer:
    """As that of T5: characters are replaced by what they are compatible with, and runs of spaces by one."""
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>")
    normal = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normal)


def trimmed() -> Tokenizer:
    """As that of RoBERTa: bytes, and offsets that leave out the space in front."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    found = trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=True))
    found.post_processor, found.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
    return found


TRAINERS = {"WordPiece": word_piece, "Unigram": unigram, "trimmed": trimmed, "bytes": ByT5Tokenizer}


def size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def ends_of(name: str, text: str) -> list[int | None]:
    return part_ends(made(name), encode(made(name), [text], special=False), [text])


@TOLERANT
@example("e\u0301 ﬁ ½ 😀👩‍👩‍👧 שלום    12345\n\n x);\n")
@example(" ")
@example("")
@given(TEXTS)
def test_spans_cover_a_text_once_and_in_order(text: str) -> None:
    for name in NAMES:
        known = [end for end in ends_of(name, text) if end is not None]
        assert all(one <= other for one, other in pairwise([0, *known])), name
        if name not in DROPS_SPACE:
            assert (known[-1] if known else 0) in (size(text), size(text.rstrip())), name
        assert not known or known[-1] <= size(text), name


@TOLERANT
@given(TEXTS)
def test_what_the_first_tokens_spell_ends_where_they_do(text: str) -> None:
    """Wherever the tokenizer's own decoder makes exactly the beginning of the text of the first tokens."""
    for name in (*REAL, "trimmed"):
        own, ends = made(name), ends_of(name, text)
        ids = own.encode(text, add_special_tokens=False).ids
        for count, end in enumerate(ends, start=1):
            said = own.decode(ids[:count], skip_special_tokens=False)
            said = said[1:] if name == "trimmed" and not text.startswith(" ") else said
            if "\ufffd" not in said and end is not None and text.startswith(said):
                rest = text[len(said) :]
                # what stands for no byte behind it may be a piece of its own
                assert size(said) == end or (rest and unicodedata.combining(rest[0])), (name, count, said)


@TOLERANT
@given(TEXTS)
def test_offsets_of_whole_characters_are_kept(text: str) -> None:
    """With what follows and is in no token, such as an accent that is left out."""
    for name in ("WordPiece", "Unigram"):
        own = made(name).encode(text, add_special_tokens=False)
        ends = ends_of(name, text)
        for number, (first, last) in enumerate(own.offsets):
            alone = all(first >= stop for _, stop in own.offsets[:number])
            alone &= all(last <= start for start, _ in own.offsets[number + 1 :])
            if alone:
                following = [start for start, _ in own.offsets[number + 1 :]] or [len(text)]
                left_out = re.match(r"\S*", text[last : following[0]])
                assert left_out is not None
                assert ends[number] == size(text[:last] + left_out.group()), (name, number)


@TOLERANT
@given(TEXTS)
def test_pairs_are_those_of_brute_force(text: str) -> None:
    read = {name: places_of(made(name), encode(made(name), [text], special=False), [text]) for name in NAMES}
    for one, other in combinations(NAMES, 2):
        sides = read[one], read[other]
        both = PairedTokens.of(*(SampleTokens([0] * len(side), [True] * len(side), side) for side in sides), True)
        spans = [spans_of(side) for side in sides]
        wanted = [
            (first, second)
            for first, span in enumerate(spans[0])
            for second, same in enumerate(spans[1])
            if span is not None and span == same
        ]
        assert both.pairs == wanted, (one, other)
        stops = [[None if span is None else (span[1], span[2]) for span in side] for side in spans]
        asked = [
            (first, second)
            for first, stop in enumerate(stops[0])
            for second, same in enumerate(stops[1])
            if stop is not None and stop == same and follow(wanted, (first + 1, second + 1), sides)
        ]
        assert both.asked == asked, (one, other)
        if one == other:
            assert both.shares.inputs == both.shares.gradients == (1.0, 1.0)


def spans_of(places: list[Place | None]) -> list[tuple[int, int, int] | None]:
    """Start, end, and how many tokens behind end there too, by looking at all of them."""
    ends = [None if place is None else place.end for place in places]
    return [
        None if place is None else (place.end - place.width, place.end, ends[number + 1 :].count(place.end))
        for number, place in enumerate(places)
    ]


def follow(wanted: list[tuple[int, int]], pair: tuple[int, int], sides: tuple[list[Any], list[Any]]) -> bool:
    return pair in wanted or pair == (len(sides[0]), len(sides[1]))


@pytest.mark.quick
def test_a_piece_may_be_a_part_of_a_character() -> None:
    """Of four bytes, three and one: offsets alone would say that both end behind it."""
    assert made("Llama 4").encode("😀", add_special_tokens=False).offsets == [(0, 1), (0, 1)]
    assert ends_of("Llama 4", "😀") == [3, 4]
    assert ends_of("bytes", "😀") == [1, 2, 3, 4]
    assert ends_of("WordPiece", "a b  ") == [1, 3]
    assert ends_of("Unigram", "½")[-2:] == [None, 2], "of what replaces a character, only the last piece has a place"
    assert ends_of("Mistral v1", "\n") == [0, 1], "a space is put in front, and stands for nothing"
