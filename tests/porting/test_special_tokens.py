"""Texts with and without a tokenizer's special tokens, and tokenizers that do not fit their models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertTokenizer

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import MissingProcessorError, UsageError
from hf_bico.models.families.pretrained import load_tokenizer
from hf_bico.models.families.text_models import CausalModel
from hf_bico.models.model import Model
from hf_bico.porting.special_tokens import read_both_ways
from hf_bico.reports.record import read_record
from hf_bico.utils.samples import Text
from support.language_toys import (
    chat_rows,
    fine_tuned,
    labelled_rows,
    sentences,
    trained_without_special_tokens,
    write_decoder,
    write_encoder,
)
from support.paper import PAPER

ROWS = [{"text": text} for text in dict.fromkeys(sentences(400, 5))]


@dataclass(frozen=True)
class Trio:
    base: Path
    tuned: Path
    target: Path

    def port(self, **options: Any) -> hf_bico.Ported:
        usual = {"data": ROWS, "n": 24, "evaluate": False, **PAPER}
        return hf_bico.port(self.tuned, to=self.target, base=self.base, **{**usual, **options})


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    folder = tmp_path_factory.mktemp("trio")
    base = trained_without_special_tokens(folder / "base")
    tuned = fine_tuned(base, folder / "tuned", AutoModelForCausalLM, only="mlp")
    return Trio(base, tuned, trained_without_special_tokens(folder / "target", width=24, seed=1))


def test_special_tokens_that_a_model_was_not_trained_with_are_said(trio: Trio) -> None:
    said = trio.port().record.notices
    assert sum("better without, see --no-special-tokens" in notice for notice in said) == 2, "of base and target"
    assert not any("special" in notice for notice in trio.port(special_tokens=False).record.notices)


def test_both_readings_are_compared_on_the_same_tokens(trio: Trio) -> None:
    model = Model.open(trio.base, "the base").load(torch.device("cpu"), torch.float32)
    assert isinstance(model, CausalModel)
    texts = [row["text"] for row in ROWS[:6]]
    found = read_both_ways(model, [Text(text) for text in texts])
    assert found is not None

    def loss(text: str, special: bool) -> float:
        """The slow way: each token but the first, from what stands before it."""
        ids = model.tokenizer(text, add_special_tokens=special)["input_ids"]
        own = range(1, len(ids)) if not special else range(2, len(ids) - 1)
        logits = [model.module(input_ids=torch.tensor([ids[:place]])).logits[0, -1] for place in own]
        return float(-sum(row.log_softmax(-1)[ids[place]] for row, place in zip(logits, own, strict=True)) / len(own))

    with torch.no_grad():
        for value, special in ((found.behind, True), (found.without, False)):
            assert value == pytest.approx(sum(loss(text, special) for text in texts) / len(texts), rel=1e-4)


def test_the_option_is_kept_measured_by_and_repeated(
    trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(row["text"] for row in ROWS)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text(rows)
    for name in ("base", "tuned", "target"):
        (tmp_path / name).symlink_to(getattr(trio, name))
    line = ["port", "tuned", "--base", "base", "--to", "target", "--data", "texts", "-n", "24", "--no-special-tokens"]
    recipe = ["--method", "bico", "--alpha", "1", "--eval-samples", "20", "--device", "cpu", "-o", "out", "--force"]
    done = CliRunner().invoke(main, [*line, *recipe])
    assert done.exit_code == 0, done.output
    record = read_record(Path("out"))
    assert record.command is not None
    assert "--no-special-tokens" in record.command
    assert record.data is not None
    assert record.data.special_tokens is False
    measured = hf_bico.evaluate_model("out", "texts", eval_samples=20, device="cpu")
    assert measured.value == pytest.approx(record.value("ported"))
    again = CliRunner().invoke(main, ["rerun", "out", "--force"])
    assert again.exit_code == 0, again.output
    with_them = hf_bico.evaluate_model("target", "texts", eval_samples=20, device="cpu")
    assert with_them.value > 1.05 * record.value("target"), "else the option has no effect here"
    assert "--no-special-tokens" in with_them.notices[0]


def test_a_text_is_read_as_it_is(trio: Trio) -> None:
    model = Model.open(trio.base, "the base").load(torch.device("cpu"), torch.float32)
    assert isinstance(model, CausalModel)
    model.special_tokens = False
    assert model.tokenizer.decode(model.tokens([Text("ada sees")]).ids[0]) == "ada sees"


def test_models_that_read_their_special_tokens_keep_them(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder", head=2)
    with pytest.raises(UsageError, match="a head looks at"):
        hf_bico.evaluate_model(encoder, labelled_rows(8), special_tokens=False)
    decoder = write_decoder(tmp_path / "decoder", chat=True)
    with pytest.raises(UsageError, match="the samples are chats"):
        hf_bico.evaluate_model(decoder, chat_rows(8), special_tokens=False)
    with pytest.raises(UsageError, match="a head looks at"):
        hf_bico.compare(encoder, to=encoder, base=encoder, data=labelled_rows(40), special_tokens=False, n=[8])


def test_a_pickled_model_without_a_tokenizer_is_called_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    folder = write_decoder(tmp_path / "old-model", "gpt2", tied=True)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    for file in (folder / "model.safetensors", *folder.glob("tok*")):
        file.unlink()
    with pytest.raises(MissingProcessorError, match="^'old-model' has no tokenizer"):
        hf_bico.evaluate_model(folder, ROWS, allow_pickle=True, device="cpu")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(MissingProcessorError, match="^'old-model' has no tokenizer that can be loaded") as caught:
        hf_bico.evaluate_model(folder, ROWS, allow_pickle=True, device="cpu")
    assert "converted" not in caught.value.cause


@pytest.mark.parametrize(("word", "cased"), [("Red", True), ("red", False)])
def test_the_remedy_for_a_vocabulary_of_another_tokenizer_works(word: str, cased: bool, tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "mine", "gpt2", tied=True)
    for file in folder.glob("tok*"):
        file.unlink()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", word]))
    with pytest.raises(MissingProcessorError, match="holds vocab.txt, the vocabulary of a WordPiece") as caught:
        load_tokenizer(folder)
    assert ("do_lower_case=False" in caught.value.remedy) is cased
    options = {"do_lower_case": False} if cased else {}
    assert f"{BertTokenizer.__name__}.from_pretrained" in caught.value.remedy
    BertTokenizer.from_pretrained(folder, **options).save_pretrained(folder)
    assert load_tokenizer(folder)(word, add_special_tokens=False)["input_ids"] == [5]
