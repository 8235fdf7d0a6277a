"""That losses of texts are those of the same tokens: whatever the padding, the batch and the other model's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, T5ForConditionalGeneration

import hf_bico
from hf_bico.alignment.objectives.base import LossBatch
from hf_bico.alignment.objectives.language import LanguageHead
from hf_bico.errors import UnsupportedModelError
from hf_bico.models.model import Model
from hf_bico.porting.evaluate import evaluate_model
from hf_bico.utils.samples import Text
from support.language_toys import fine_tuned, labelled_rows, sentences, write_decoder, write_encoder, write_t5
from support.paper import PAPER

pytestmark = pytest.mark.quick

TEXTS = [*sentences(7), "a", "the last of them is longer than all of the others"]
ROWS = [{"text": text} for text in sentences(24)]


class Batches:
    """Texts without labels, as a data set gives them."""

    labels = (-1,) * len(TEXTS)

    def __len__(self) -> int:
        return len(TEXTS)

    def batches(self, size: int) -> Any:
        for start in range(0, len(TEXTS), size):
            some = [Text(text) for text in TEXTS[start : start + size]]
            yield some, [-1] * len(some)


def padded(folder: Path, side: str) -> Any:
    live = Model.open(folder, "a model").load(torch.device("cpu"), torch.float64)
    live.tokenizer.padding_side = side
    return live


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_loss_does_not_depend_on_padding(kind: str, tmp_path: Path) -> None:
    folder, head = write_decoder(tmp_path / "model", kind), LanguageHead()
    found = [head.measure(padded(folder, side), Batches(), size) for side in ("left", "right") for size in (1, 4, 9)]
    assert found == pytest.approx([found[0]] * 6, rel=1e-9)
    sums = [
        head.losses(padded(folder, side), LossBatch(*next(Batches().batches(9)))).task for side in ("left", "right")
    ]
    assert sums[0].item() == pytest.approx(sums[1].item(), rel=1e-9)


def test_both_models_read_as_much_as_the_shorter_takes(tmp_path: Path) -> None:
    base, target = write_decoder(tmp_path / "base", "llama"), write_decoder(tmp_path / "target", "llama", seed=1)
    tuned = fine_tuned(base, tmp_path / "tuned", AutoModelForCausalLM)
    asked = hf_bico.port(tuned, to=target, base=base, data=ROWS, n=8, max_length=12, **PAPER)
    config = tmp_path / "target" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"model_max_length": 64', '"model_max_length": 12'))
    found = hf_bico.port(tuned, to=target, base=base, data=ROWS, n=8, **PAPER)
    assert [entry.value for entry in found.record.evaluation] == [entry.value for entry in asked.record.evaluation]


def test_plan_refuses_models_that_are_asked_in_different_ways(tmp_path: Path) -> None:
    encoder, decoder = write_encoder(tmp_path / "encoder"), write_decoder(tmp_path / "decoder", "llama")
    with pytest.raises(UnsupportedModelError, match="they have none in common"):
        hf_bico.plan(encoder, to=decoder, base=encoder)


def test_a_plain_mlp_pairs_with_the_gate_of_a_gated_one(tmp_path: Path) -> None:
    """Both are what the activation follows; the gated one's other branch has no counterpart."""
    plain, gated = write_t5(tmp_path / "plain"), write_t5(tmp_path / "gated", True)
    roles = {(pair.source.role, pair.target.role) for pair in hf_bico.plan(plain, to=gated, base=plain).pairs}
    assert {pair for pair in roles if "mlp" in pair[0]} == {("mlp.up", "mlp.gate"), ("mlp.down", "mlp.down")}
    back = hf_bico.plan(gated, to=plain, base=gated)
    assert ("mlp.gate", "mlp.up") in {(pair.source.role, pair.target.role) for pair in back.pairs}
    assert any("wi_1" in name for name in back.left)


def test_eval_measures_a_t5_as_a_port_does(tmp_path: Path) -> None:
    base, target = write_t5(tmp_path / "base"), write_t5(tmp_path / "target", seed=1)
    tuned = fine_tuned(base, tmp_path / "tuned", T5ForConditionalGeneration, only="encoder")
    rows = {"train": labelled_rows(120), "test": labelled_rows(40, seed=1)}
    names = ["no", "yes"]
    ported = hf_bico.port(tuned, to=target, base=base, data=rows, n=20, class_names=names, **PAPER)
    out = ported.save(tmp_path / "out")
    found = evaluate_model(out, rows, class_names=names)
    assert (found.metric, found.protocol, found.trained_on) == ("accuracy", "probe", 100)
    plain = {"test": [{"prompt": row["text"], "completion": names[row["label"]]} for row in rows["test"]]}
    assert evaluate_model(out, plain).metric == "loss"


def test_eval_passes_over_texts_without_words(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "model", "llama")
    blank = [ROWS[0], {"text": " "}, *ROWS[1:4], {"text": ""}]
    found = evaluate_model(folder, {"test": blank})
    assert found.n == 4
    assert found.value == pytest.approx(evaluate_model(folder, {"test": ROWS[:4]}).value)
