"""Read samples as two models with different tokenizers do, so that tokens pair that have read the same bytes.

Both read the same bytes of a sample, and of what follows them both are asked the same. Knows two readers and samples;
neither models nor losses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_bico.errors import TokenizersDifferError
from hf_bico.models.token_places import (
    Encoding,
    Pairs,
    Shares,
    before_same_pieces,
    byte_length,
    encode,
    pair_places,
    places_of,
    same_pieces,
)
from hf_bico.models.tokenization import Reader, SampleTokens, TokenBatch, padded, words_of
from hf_bico.utils.samples import TextSample

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SHARED, NOTABLE_SHARED = 0.2, 0.5
"""Shares of pieces in common below which two tokenizers are refused, and below which a notice says so."""
LOOKED_AT = 10_000
"""Characters of a text that are compared before anything is downloaded."""
_SHOWN, _PIECES = 40, 8


@dataclass(frozen=True)
class PairedTokens:
    """One sample as two models read it, with the tokens whose inputs pair and those whose gradients do.

    With `asks_next`, each model is asked for its next tokens: only where the other is asked for the same piece.
    """

    source: SampleTokens
    target: SampleTokens
    asks_next: bool
    pairs: Pairs
    asked: Pairs

    @classmethod
    def of(cls, source: SampleTokens, target: SampleTokens, asks_next: bool) -> PairedTokens:
        at_ends = pair_places(source.places, target.places)
        same = same_pieces(at_ends, source.places, target.places)
        if not asks_next:
            return cls(source, target, asks_next, same, same)
        asked = before_same_pieces(at_ends, same, (len(source.ids), len(target.ids)))
        follow = [(one + 1, other + 1) for one, other in asked]
        learnt = [pair for pair in follow if _learns(source, pair[0]) and _learns(target, pair[1])]
        source = _learning(source, {one for one, _ in learnt})
        return cls(source, _learning(target, {other for _, other in learnt}), asks_next, same, asked)

    @property
    def shares(self) -> Shares:
        """How much of the sample pairs."""
        widths = [[0 if place is None else place.width for place in side.places] for side in (self.source, self.target)]
        stood_for = self.pairs
        if self.asks_next:  # a gradient stands for the next piece; nobody is asked for the first one
            stood_for = [(one + 1, other + 1) for one, other in self.asked] + [(0, 0)] * ((0, 0) in self.pairs)
        paired, of_gradients = (
            sum(sum(own[pair[side] : pair[side] + 1]) for side, own in enumerate(widths) for pair in some)
            for some in (self.pairs, stood_for)
        )
        tokens, size = sum(map(len, widths)), sum(map(sum, widths))
        return Shares(tokens, size, 2 * len(self.pairs), paired, 2 * len(self.asked), of_gradients)


def _learns(tokens: SampleTokens, number: int) -> bool:
    return number < len(tokens.learnt) and tokens.learnt[number]


def _learning(tokens: SampleTokens, kept: Collection[int]) -> SampleTokens:
    """Return the same tokens, of which only some are learnt."""
    return replace(tokens, learnt=[number in kept for number in range(len(tokens.ids))])


def read_pair(source: Reader, target: Reader, sample: TextSample, asks_next: bool) -> PairedTokens:
    """Read a sample as both models do, cut to what both have room for."""
    own = [reader.tokens(sample, placed=True) for reader in (source, target)]
    own = _from_common_start((source, target), own)
    if any(len(tokens.ids) >= reader.longest for tokens, reader in zip(own, (source, target), strict=True)):
        own = _to_common_ends(own)
    for reader, tokens in zip((source, target), own, strict=True):
        reader.require_learnt(tokens, sample)
    return PairedTokens.of(own[0], own[1], asks_next)


def _from_common_start(readers: Sequence[Reader], own: list[SampleTokens]) -> list[SampleTokens]:
    """Drop the beginning that one of the models has no room for, up to a place from where both go on."""
    begins = [reader.begin(tokens) for reader, tokens in zip(readers, own, strict=True)]
    if not any(begins):
        return own
    pairs = ((one + 1, other + 1) for one, other in pair_places(own[0].places, own[1].places))
    starts = next((pair for pair in pairs if pair[0] >= begins[0] and pair[1] >= begins[1]), begins)
    return [reader.from_token(tokens, start) for reader, tokens, start in zip(readers, own, starts, strict=True)]


def _to_common_ends(own: list[SampleTokens]) -> list[SampleTokens]:
    """Drop what stands behind the last place of each part that both models have read; special tokens stay."""
    last: dict[int, tuple[int, int]] = {}
    for pair in pair_places(own[0].places, own[1].places):
        place = own[0].places[pair[0]]
        if place is not None and place.between is None:
            last[place.part] = pair
    found = []
    for side, tokens in enumerate(own):
        part, kept = -1, []
        for number, place in enumerate(tokens.places):
            part = part if place is None else place.part
            inside = place is None or place.between is None
            if not inside or part not in last or number <= last[part][side]:
                kept.append(number)
        found.append(tokens.only(kept))
    return found


def paired_batches(
    both: Sequence[PairedTokens], source_tokenizer: Any, target_tokenizer: Any
) -> tuple[TokenBatch, TokenBatch]:
    """Make a batch of each side, padded on its own tokenizer's side."""
    return (
        _paired_batch([one.source for one in both], _columns(both, 0), source_tokenizer),
        _paired_batch([one.target for one in both], _columns(both, 1), target_tokenizer),
    )


def _columns(both: Iterable[PairedTokens], side: int) -> list[tuple[list[int], list[int]]]:
    """Return the numbers of one model's tokens that pair, and of those whose gradients do, for each sample."""
    return [([pair[side] for pair in one.pairs], [pair[side] for pair in one.asked]) for one in both]


def _paired_batch(
    rows: Sequence[SampleTokens], numbers: Sequence[tuple[list[int], list[int]]], tokenizer: Any
) -> TokenBatch:
    """Make a batch whose rows know which of their tokens pair."""
    batch = padded(rows, tokenizer)
    marks: list[Tensor] = []
    for column in (0, 1):
        marked = batch.mask.new_zeros(batch.mask.shape)
        for number, own in enumerate(numbers):
            marked[number, batch.mask[number].nonzero().squeeze(1)[own[column]]] = True
        marks.append(marked)
    return replace(batch, on_host=replace(batch.rows, marks=(marks[0], marks[1])))


def shares_of(source: Any, target: Any, texts: Iterable[str], asks_next: bool = True) -> Shares | None:
    """Return how much of these texts two tokenizers pair; None if they cut all of them into the same tokens.

    Reads them without special tokens and templates. The tokenizers may be transformers' or the tokenizers library's.
    """
    total, differ = Shares(), False
    for text in texts:
        own, other = (encode(tokenizer, [text], special=False) for tokenizer in (source, target))
        if own.ids == other.ids:
            total += Shares(*[2 * len(own.ids), 2 * byte_length(text)] * 3)
            continue
        differ = True
        sides = _plain_tokens(source, own, text), _plain_tokens(target, other, text)
        total += PairedTokens.of(*sides, asks_next).shares
    return total if differ else None


def require_common_pieces(
    source: Any, target: Any, samples: Iterable[TextSample | str], asks_next: bool = True
) -> Shares | None:
    """Refuse two tokenizers that have too few of the samples' pieces in common; else return `shares_of` them."""
    texts = [words[:LOOKED_AT] for sample in samples for words in words_of(sample)]
    found = shares_of(source, target, texts, asks_next)
    if found is None or found.gradients[0] >= LEAST_SHARED:
        return found
    text = next(text for text in texts if shares_of(source, target, [text]) is not None)
    cut = " and ".join(_as_cut(tokenizer, text) for tokenizer in (source, target))
    raise TokenizersDifferError(
        f"the two models' tokenizers have {found.gradients[0]:.0%} of the texts' pieces in common, and "
        f"{LEAST_SHARED:.0%} is the least: they cut {text[:_SHOWN]!r} into {cut}",
        "choose a target whose tokenizer cuts these texts more alike",
    )


def _plain_tokens(tokenizer: Any, encoding: Encoding, text: str) -> SampleTokens:
    places = places_of(tokenizer, encoding, [text])
    return SampleTokens(encoding.ids, [True] * len(places), places)


def _as_cut(tokenizer: Any, text: str) -> str:
    pieces = encode(tokenizer, [text[:_SHOWN]], special=False).pieces
    return "|".join(pieces[:_PIECES]) + ("|..." if len(pieces) > _PIECES else "")


def pairing_notices(pairing: Shares | None) -> list[str]:
    """Return a notice about two models that read less than half of the texts alike."""
    if pairing is None or min(*pairing.inputs, *pairing.gradients) >= NOTABLE_SHARED:
        return []
    return [
        f"The two models cut the texts into different tokens: {pairing.inputs[0]:.0%} of these pair for inputs, and "
        f"{pairing.gradients[0]:.0%} for gradients. Less than half is little to line them up by."
    ]
