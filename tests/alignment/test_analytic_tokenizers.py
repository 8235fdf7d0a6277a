"""A rotated copy of a decoder with a tokenizer of its own: the port must find the coordinates all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_bico
from support.language_toys import piece_tokenizer, sentences, vocabulary_size, write_decoder
from support.paper import PAPER
from support.rotated_language import InDouble, Turn, observe, rotated_copy, with_plain_norms

WIDTH, NEURONS, SAMPLES = 32, 64, 4
ENDS = ("s.", "d.")
"""What the sentences end with."""
PIECES = (*ENDS, "ed ", " ki", "war", "ld", " m", "tw", "o c", "lu", "ngs")


@dataclass
class Pair:
    """A decoder, and its rotated copy whose embeddings are in the order of another tokenizer."""

    folder: Path
    tokenizers: tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]

    def __post_init__(self) -> None:
        size = vocabulary_size() + len(PIECES)
        drawn = write_decoder(self.folder / "drawn", width=WIDTH, mlp=NEURONS, vocab_size=size, seed=1)
        self.model = with_plain_norms(AutoModelForCausalLM.from_pretrained(drawn, dtype="auto"))
        self.copy, turns = rotated_copy(self.model, seed=2)
        self.turns: dict[str, Turn] = {name: turn for name, turn in turns.items() if name.startswith("model.layers.")}
        own, other = (tokenizer.get_vocab() for tokenizer in self.tokenizers)
        order = torch.empty(size, dtype=torch.long)
        for piece, number in other.items():
            order[number] = own[piece]
        with torch.no_grad():
            for part in (self.copy.get_input_embeddings(), self.copy.get_output_embeddings()):
                part.weight.copy_(part.weight[order])
        for name, model, tokenizer in zip(("base", "target"), (self.model, self.copy), self.tokenizers, strict=True):
            model.save_pretrained(self.folder / name)
            tokenizer.save_pretrained(self.folder / name)

    @property
    def texts(self) -> list[str]:
        return sentences(SAMPLES)

    def seen_changes(self, read: Sequence[int]) -> dict[str, Tensor]:
        """Random changes of the sites, without what the first `read` tokens of each text do not show."""
        batch = self.tokenizers[0](self.texts, padding=True, return_tensors="pt")
        places = torch.arange(batch.input_ids.shape[1])
        mask = places[None] < torch.tensor(read)[:, None]

        def loss() -> Tensor:
            with InDouble():
                logits = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            labels = batch.input_ids.masked_fill(~mask, -100)
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

        seen, generator, found = observe(self.model, list(self.turns), loss, mask), torch.Generator().manual_seed(5), {}
        for name in self.turns:
            weight = self.model.get_submodule(name).weight
            of_inputs, of_gradients = seen.projectors(name)
            change = 0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            found[name] = of_gradients @ change @ of_inputs
        return found

    def port(self, changes: dict[str, Tensor], target: str = "target") -> hf_bico.Ported:
        tuned = AutoModelForCausalLM.from_pretrained(self.folder / "base", dtype="auto")
        with torch.no_grad():
            for name, change in changes.items():
                tuned.get_submodule(name).weight.add_(change)
        tuned.save_pretrained(self.folder / "tuned")
        rows: list[dict[str, Any]] = [{"text": text} for text in self.texts]
        options = {"n": SAMPLES, "dtype": "float64", "evaluate": False, **PAPER}
        with InDouble():
            return hf_bico.port(
                self.folder / "tuned", to=self.folder / target, base=self.folder / "base", data=rows, **options
            )

    def errors(self, ported: hf_bico.Ported, changes: dict[str, Tensor]) -> list[float]:
        """How far each site's change is from the turned one, as a share of it."""
        wanted = {name: self.turns[name].of_weight(change) for name, change in changes.items()}
        return [
            float((ported.task_vector[f"{name}.weight"].double() - one).norm() / one.norm())
            for name, one in wanted.items()
        ]

    def lengths(self, side: int = 0) -> list[int]:
        return [len(ids) for ids in self.tokenizers[side](self.texts)["input_ids"]]


def test_ids_permuted_are_as_good_as_one_tokenizer(tmp_path: Path) -> None:
    """Also exactly: the same pairs give the same sums, but for the order in which a softmax adds up."""
    own = piece_tokenizer(PIECES, PIECES)
    same, permuted = (
        Pair(tmp_path / "same", (own, own)),
        Pair(tmp_path / "other", (own, piece_tokenizer(PIECES, PIECES, 3))),
    )
    changes = same.seen_changes(same.lengths())
    first, second = same.port(changes), permuted.port(changes)
    assert max(permuted.errors(second, changes)) < 1e-6
    for name, change in first.task_vector.items():
        assert (second.task_vector[name] - change).norm() < 1e-9 * change.norm(), name
    assert first.record.data is not None
    assert first.record.data.pairing is None
    assert second.record.data is not None
    assert second.record.data.pairing is not None
    assert set(vars(second.record.data.pairing).values()) == {1.0}


@pytest.mark.parametrize("finer", ["source", "target"])
def test_where_the_last_piece_of_each_text_is_split_the_rest_is_recovered_exactly(finer: str, tmp_path: Path) -> None:
    whole, split = piece_tokenizer(PIECES, ENDS), piece_tokenizer(PIECES, (), seed=3)
    pair = Pair(tmp_path, (whole, split) if finer == "target" else (split, whole))
    lengths = pair.lengths()
    assert all(abs(one - other) == 1 for one, other in zip(lengths, pair.lengths(1), strict=True))
    changes = pair.seen_changes([length - (1 if finer == "target" else 2) for length in lengths])
    ported = pair.port(changes)
    assert max(pair.errors(ported, changes)) < 1e-6
    assert ported.record.data is not None
    shares = ported.record.data.pairing
    tokens = sum(lengths) + sum(pair.lengths(1))
    assert shares is not None
    assert shares.tokens == pytest.approx((tokens - 3 * SAMPLES) / tokens)


def test_where_pieces_are_split_anywhere_the_error_is_that_of_other_activations(tmp_path: Path) -> None:
    """Of untrained models, the states behind the same bytes have little in common: the error is told, not bounded."""
    used = PIECES[2::2], PIECES[3::2]
    pair = Pair(tmp_path, (piece_tokenizer(PIECES, used[0]), piece_tokenizer(PIECES, used[1], seed=3)))
    changes = pair.seen_changes(pair.lengths())
    ported = pair.port(changes)
    errors = pair.errors(ported, changes)
    print(f"pieces split anywhere: the change of a site is off by {min(errors):.0%} to {max(errors):.0%}")
    assert ported.record.data is not None
    shares = ported.record.data.pairing
    assert shares is not None
    assert 0.3 < shares.tokens < 0.9
    assert max(errors) < 1, "which is what a port that carries nothing is off by"
