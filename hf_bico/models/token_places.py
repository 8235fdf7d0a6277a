"""Find what of a sample has been read where each of its tokens ends, in bytes, and pair two models' tokens by that.

Offsets that tokenizers give are of characters, and a piece may be part of one: so pieces are spelled out as bytes
wherever they are exactly the text. Needs no torch. Knows tokenizers; neither models nor losses.
"""

from __future__ import annotations

import string
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import Any, NamedTuple

from hf_bico.errors import MissingProcessorError

Span = tuple[int, int]
Pairs = Sequence[tuple[int, int]]
"""The numbers of tokens that pair, of the source's and of the target's."""


class Place(NamedTuple):
    """Where a token ends in a sample, and how wide it is."""

    part: int
    """The number of the text or message; of what stands between two of them, the number of the one before."""
    between: str | None
    """What of a template follows behind the token, up to the next part; nothing for a special token around the parts;
    None inside of a part."""
    end: int
    """The bytes of the part that have been read; of special tokens, how many stood there before."""
    width: int
    """The bytes that the token stands for."""
    more: int = 0
    """How many tokens follow that end there too, as those do that stand for no byte."""

    @property
    def read(self) -> tuple[int, str | None, int, int]:
        """What has been read at its end: two tokens of which this is equal have read the same."""
        return self.part, self.between, self.end, self.more


@dataclass(frozen=True)
class Encoding:
    """Texts as a tokenizer cuts them, with the special tokens that it puts around them."""

    ids: list[int]
    pieces: list[str]
    parts: list[int | None]
    """The text that each token is of; None for special tokens around the texts."""
    offsets: list[Span] | None
    """Start and end of each token in its text, in characters, if the tokenizer knows them."""
    added: frozenset[str]
    """Pieces that are written in the text as they are, whatever the tokenizer's alphabet."""


def encode(tokenizer: Any, texts: Sequence[str], special: bool = True, limit: int | None = None) -> Encoding:
    """Cut one text, or a pair, with a tokenizer of transformers or of the tokenizers library."""
    if not hasattr(tokenizer, "is_fast"):
        found = tokenizer.encode(*texts, add_special_tokens=special)
        added = frozenset(token.content for token in tokenizer.get_added_tokens_decoder().values())
        return Encoding(found.ids, found.tokens, found.sequence_ids, found.offsets, added)
    options = {"add_special_tokens": special, "truncation": limit is not None, "max_length": limit, "verbose": False}
    added = frozenset(tokenizer.get_added_vocab())
    if tokenizer.is_fast:
        found = tokenizer(*texts, **options).encodings[0]
        return Encoding(found.ids, found.tokens, found.sequence_ids, found.offsets, added)
    found = tokenizer(*texts, **options, return_special_tokens_mask=True)
    ids, around = list(found["input_ids"]), found["special_tokens_mask"]
    first = len(tokenizer(texts[0], add_special_tokens=False, verbose=False)["input_ids"])
    if len(texts) > 1 and limit is not None and len(ids) >= limit:
        raise cannot_tell(tokenizer)  # where the second text begins, after both were cut
    before = accumulate((not one for one in around), initial=0)
    parts = [None if one else int(count >= first) for one, count in zip(around, before, strict=False)]
    return Encoding(ids, list(tokenizer.convert_ids_to_tokens(ids)), parts, None, added)


def cannot_tell(tokenizer: Any) -> MissingProcessorError:
    """Make the error for a tokenizer that does not know where its tokens stand."""
    return MissingProcessorError(
        f"a {type(tokenizer).__name__} does not say where in a text its tokens stand",
        "use a model with a fast tokenizer (tokenizer.json)",
    )


def places_of(tokenizer: Any, encoding: Encoding, texts: Sequence[str]) -> list[Place | None]:
    """Return the place of each token; None for one that ends inside of a character that was replaced by others."""
    found: list[Place | None] = []
    part, stood, before = -1, 0, 0
    for own, end in zip(encoding.parts, part_ends(tokenizer, encoding, texts), strict=True):
        if own is None:
            found.append(Place(part, "", stood, 0))
            stood += 1
            continue
        before = before if own == part else 0
        part, stood = own, 0
        found.append(None if end is None else Place(part, None, end, end - before))
        before = before if end is None else end
    return _numbered(found)


def places_between(
    tokenizer: Any, text: str, said: Sequence[Span], encoding: Encoding, special: Collection[str]
) -> list[Place | None]:
    """Return the places of a rendered chat's tokens: in the messages at `said`, or in what stands between them.

    There, a token is known by what follows up to the next message, which templates share more often than what precedes.
    But a special token right behind a message ends it in every template.
    """
    spans, data = [(byte_length(text[:begin]), byte_length(text[:end])) for begin, end in said], _bytes(text)
    begins = [*(begin for begin, _ in spans), len(data)]
    found, before = list[Place | None](), 0
    for piece, end in zip(encoding.pieces, part_ends(tokenizer, encoding, [text]), strict=True):
        if end is None:
            found.append(None)
            continue
        number = bisect_left(begins, end) - 1
        behind = spans[number][1] if number >= 0 else 0
        if number >= 0 and end <= behind:
            found.append(Place(number, None, end - begins[number], end - before))
        elif number >= 0 and before == behind and piece in special:
            found.append(Place(number, "", 0, 0))
        else:
            rest = data[end : begins[number + 1]].decode(errors="replace")
            found.append(Place(number, f"...{rest}", 0, end - before))
        before = end
    return _numbered(found)


def token_spans(tokenizer: Any, encoding: Encoding, text: str) -> list[Span]:
    """Return start and end of each token of one text, in bytes; a special token around it stands nowhere.

    Pieces of a replaced character all end where it does.
    """
    found, behind = list[Span](), 0
    ends = part_ends(tokenizer, encoding, [text])
    for number, (part, end) in enumerate(zip(encoding.parts, ends, strict=True)):
        known = next((one for one in ends[number:] if one is not None), behind) if end is None else end
        found.append((0, 0) if part is None else (behind, known))
        behind = behind if part is None else known
    return found


def part_ends(tokenizer: Any, encoding: Encoding, texts: Sequence[str]) -> list[int | None]:
    """Return for each token the bytes of its own text that have been read at its end; None if unknown or of no text."""
    found: list[int | None] = [None] * len(encoding.ids)
    for number, text in enumerate(texts):
        own = [place for place, part in enumerate(encoding.parts) if part == number]
        offsets = None if encoding.offsets is None else [encoding.offsets[place] for place in own]
        ends = byte_ends(text, [encoding.pieces[place] for place in own], offsets, encoding.added)
        if ends is None:
            raise cannot_tell(tokenizer)
        for place, end in zip(own, ends, strict=True):
            found[place] = end
    return found


def _numbered(places: Sequence[Place | None]) -> list[Place | None]:
    """Number the tokens that end at one place, from the last to the first, so that what has been read tells them."""
    found, seen = list[Place | None](), dict[tuple[int, str | None, int, int], int]()
    for place in reversed(places):
        if place is not None:
            seen[place.read] = seen.get(place.read, -1) + 1
            place = place._replace(more=seen[place.read])
        found.append(place)
    return found[::-1]


def byte_ends(
    text: str, pieces: Sequence[str], offsets: Sequence[Span] | None, added: Collection[str] = ()
) -> list[int | None] | None:
    """Return where in a text's UTF-8 each piece ends; None for all if that cannot be told.

    Of pieces that share a character and are not exactly its bytes, only the last has a place.
    """
    whole = _exact_ends(_bytes(text), pieces, added, swallow=offsets is None)
    if whole is not None:
        return list(whole)
    if offsets is None or not _in_order(offsets, text):
        return None
    # the bytes before each character
    before = list(accumulate((len(_bytes(character)) for character in text), initial=0))
    found, start = list[int | None](), 0
    for first, past in _runs(offsets):
        last = max(stop for _, stop in offsets[first:past])
        following = offsets[past][0] if past < len(offsets) else len(text)
        # marks that were joined with what they stand on, or dropped, are in no offsets
        last += next((place for place, one in enumerate(text[last:following]) if one.isspace()), following - last)
        end = max(start, before[last])
        inner: list[int] | None = None
        if past - first > 1:
            inner = _exact_ends(_bytes(text)[start:end], pieces[first:past], added)
        found += [None] * (past - first - 1) + [end] if inner is None else [start + one for one in inner]
        start = end
    return found


def _in_order(offsets: Sequence[Span], text: str) -> bool:
    """Tell whether offsets stand one after the other within a text, and are not all nothing."""
    ends = [stop for _, stop in offsets]
    ordered = all(one <= other for one, other in pairwise(ends)) and (not ends or ends[-1] <= len(text))
    return ordered and (not text.strip() or not ends or ends[-1] > 0)


def _runs(offsets: Sequence[Span]) -> Iterator[Span]:
    """Yield the tokens, first and past the last, that share characters with each other; most stand alone."""
    first = 0
    for place in range(1, len(offsets) + 1):
        if place == len(offsets) or offsets[place][0] >= max(stop for _, stop in offsets[first:place]):
            yield first, place
            first = place


def _exact_ends(data: bytes, pieces: Sequence[str], added: Collection[str], swallow: bool = False) -> list[int] | None:
    """Return where each piece ends in these bytes if some spelling makes the pieces exactly them.

    Added pieces may `swallow` the spaces around them.
    """
    swallows = [swallow and piece in added for piece in pieces]
    for spell in (_spell_bytes, _spell_words, _spell_latin):
        spelled = [_bytes(piece) if piece in added else spell(piece) for piece in pieces]
        known = [part for part in spelled if part is not None]
        if len(known) < len(spelled):
            continue
        found = _walk(data, known, swallows)
        if found is None and known and known[0].startswith(b" "):  # a space that is put in front of a text
            found = _walk(data, [known[0][1:], *known[1:]], swallows)
        if found is not None:
            return found
    return None


def _walk(data: bytes, parts: Sequence[bytes], swallows: Sequence[bool]) -> list[int] | None:
    """Return where each part ends if together they are the bytes; some may swallow the spaces around them."""
    found, place = list[int](), 0
    for part, around in zip(parts, (one or other for one, other in pairwise([False, *swallows])), strict=True):
        if around and not data.startswith(part, place):
            place += _leading_space(data[place:])
        if not data.startswith(part, place):
            return None
        place += len(part)
        found.append(place)
    if swallows and swallows[-1]:
        place += _leading_space(data[place:])
    return found if place == len(data) else None


def _leading_space(data: bytes) -> int:
    """Return the bytes of the spaces that these begin with."""
    text = data.decode("utf-8", "surrogateescape")
    return byte_length(text[: len(text) - len(text.lstrip())])


def _visible_bytes() -> dict[str, int]:
    """Return the alphabet of byte-level tokenizers: a visible character for each byte."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(others)}


_ALPHABET = _visible_bytes()


def _spell_bytes(piece: str) -> bytes | None:
    """Spell a piece of a byte-level tokenizer."""
    found = [_ALPHABET.get(character) for character in piece]
    return None if None in found else bytes(byte for byte in found if byte is not None)


def _spell_words(piece: str) -> bytes:
    """Spell a piece of SentencePiece, whose spaces are a character of their own and whose rare bytes are numbers."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") and set(piece[3:5]) <= set(string.hexdigits):
        return bytes([int(piece[3:5], 16)])
    return _bytes(piece.replace("\u2581", " "))


def _spell_latin(piece: str) -> bytes | None:
    """Spell a piece of a tokenizer that knows single bytes only, such as that of ByT5."""
    return piece.encode("latin-1") if all(ord(character) < 256 for character in piece) else None


def byte_length(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(_bytes(text))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def pair_places(source: Sequence[Place | None], target: Sequence[Place | None]) -> list[tuple[int, int]]:
    """Pair the tokens behind which both have read the same, in the order of both."""
    known = {place.read: number for number, place in enumerate(source) if place is not None}
    pairs, last = list[tuple[int, int]](), -1
    for number, place in enumerate(target):
        other = -1 if place is None else known.get(place.read, -1)
        if other > last:
            pairs.append((other, number))
            last = other
    return pairs


def same_pieces(pairs: Pairs, source: Sequence[Place | None], target: Sequence[Place | None]) -> list[tuple[int, int]]:
    """Return the pairs of tokens that begin at the same byte, too."""
    widths = [[None if place is None else place.width for place in side] for side in (source, target)]
    return [(one, other) for one, other in pairs if widths[0][one] == widths[1][other]]


def before_same_pieces(pairs: Pairs, same: Pairs, lengths: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the pairs behind which both models predict the same piece, or that both end their sample."""
    known = {*same, lengths}
    return [(one, other) for one, other in pairs if (one + 1, other + 1) in known]


@dataclass(frozen=True)
class Shares:
    """How many of two models' tokens pair, and of the bytes that they stand for; all numbers are of both together.

    Inputs pair where both have read the same piece, gradients where the next piece is the same, if it is asked for.
    """

    tokens: int = 0
    bytes: int = 0
    paired_tokens: int = 0
    paired_bytes: int = 0
    asked_tokens: int = 0
    asked_bytes: int = 0

    def __add__(self, other: Shares) -> Shares:
        return Shares(*map(add, astuple(self), astuple(other)))

    @property
    def inputs(self) -> tuple[float, float]:
        """The shares of tokens and of bytes whose inputs pair."""
        return self.paired_tokens / max(1, self.tokens), self.paired_bytes / max(1, self.bytes)

    @property
    def gradients(self) -> tuple[float, float]:
        """The shares of tokens and of bytes whose gradients pair."""
        return self.asked_tokens / max(1, self.tokens), self.asked_bytes / max(1, self.bytes)
