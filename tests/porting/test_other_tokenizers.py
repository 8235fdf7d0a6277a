"""Ports of LoRAs between decoders with the tokenizers of real models: by the command line, and read back by peft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import UnreadableSampleError
from support.language_toys import fine_tuned, piece_tokenizer, sentences, write_decoder
from support.paper import PAPER, PAPER_WORDS
from support.real_tokenizers import fast_tokenizer

SPECIAL = {
    "Mistral v1": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Mistral v3": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Llama 3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    "Qwen": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}
KINDS = {"Qwen": "qwen2"}
PIECES = ("s.", "d.", "ed ", " ki", "war")
TEXTS = [topics[name][:300] for name in sorted(topics)[:12]]


@dataclass(frozen=True)
class Bases:
    """Two small decoders with random weights and real tokenizers, a LoRA of the first, and texts."""

    folder: Path
    names: tuple[str, str]

    @property
    def words(self) -> list[str]:
        """What to type behind the name of a command."""
        folder = self.folder
        return [
            str(folder / "lora"),
            "--to",
            str(folder / "target"),
            "--base",
            str(folder / "base"),
            "--data",
            self.data,
        ]

    @property
    def data(self) -> str:
        return str(self.folder / "texts.jsonl")

    def make(self) -> None:
        shapes = {"base": {"width": 16, "blocks": 2}, "target": {"width": 24, "blocks": 3}}
        for seed, (part, name) in enumerate(zip(shapes, self.names, strict=True)):
            kind, tokenizer = KINDS.get(name, "llama"), fast_tokenizer(name, **SPECIAL[name])
            write_decoder(self.folder / part, kind, **shapes[part], seed=seed, tokenizer=tokenizer)
        model = AutoModelForCausalLM.from_pretrained(self.folder / "base")
        modules = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=modules))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape) if "lora_B" in name else parameter)
        adapted.save_pretrained(self.folder / "lora")
        Path(self.data).write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))


def run(*words: str) -> Any:
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize(
    ("names", "inputs", "gradients"),
    [(("Mistral v1", "Mistral v3"), (1.0, 1.0), (1.0, 1.0)), (("Llama 3", "Qwen"), (0.98, 0.98), (0.97, 0.97))],
    ids=["Mistral 0.1 to 0.3", "Llama 3 to Qwen"],
)
def test_a_lora_is_ported_between_tokenizers(
    names: tuple[str, str],
    inputs: tuple[float, float],
    gradients: tuple[float, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bases = Bases(tmp_path, names)
    bases.make()
    first, second = (AutoTokenizer.from_pretrained(tmp_path / part) for part in ("base", "target"))
    ids = [one(TEXTS[0], add_special_tokens=False)["input_ids"] for one in (first, second)]
    if names[0].startswith("Mistral"):
        assert [one + 768 for one in ids[0]] == ids[1], "every piece is there, under another id"

    planned = json.loads(run("plan", *bases.words, "--json").stdout)["tokenizers"]
    assert planned["same"] is False
    assert planned["read"] == "12 samples of the data"
    assert planned["tokens"] >= inputs[0]
    assert planned["gradient_bytes"] >= gradients[1]
    told = run("plan", *bases.words).stdout
    assert "tokenizers  other tokens; " in told
    assert told.rstrip().splitlines()[-2] == "Ready to port."

    out = tmp_path / "ported"
    words = ["--max-length", "64", "-n", "8", *PAPER_WORDS, "-o", str(out)]
    said = run("port", *bases.words, *words).stdout
    assert "Held-out loss per byte" in said or "measured WORSE than the target: held-out loss per byte" in said
    assert "perplexity per byte" in said
    assert "The two models tokenize the calibration samples differently: " in said
    record = json.loads((out / "bico.json").read_text())
    shares = record["data"]["pairing"]
    assert shares["tokens"] >= inputs[0] - 0.02
    assert shares["gradient_bytes"] >= gradients[1] - 0.02
    assert {entry["per"] for entry in record["evaluation"]} == {"byte"}
    card = (out / "README.md").read_text()
    assert f"{shares['tokens']:.1%} of the tokens" in card
    assert "in nats per byte of text" in card

    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    before = target(torch.tensor([ids[1]])).logits
    ported = peft.PeftModel.from_pretrained(target, out)
    assert not torch.allclose(ported(torch.tensor([ids[1]])).logits, before, atol=1e-3)
    monkeypatch.chdir(tmp_path)
    assert json.loads(run("rerun", "ported", "--json").stdout)["same"] is True


def test_methods_are_compared_between_tokenizers(tmp_path: Path) -> None:
    """The samples choose alpha by the target's own loss, and losses are of bytes."""
    bases = Bases(tmp_path, ("Mistral v1", "Mistral v3"))
    bases.make()
    words = ["--methods", "bico,bico@1,theseus", "-n", "6", "--seeds", "1", "--max-length", "32", "--json"]
    done = json.loads(run("compare", *bases.words, *words, "-o", str(tmp_path / "compared")).stdout)
    rows = done["comparison"]["rows"]
    assert len(rows) == 6
    assert {row["protocol"] for row in rows} == {"loss per byte"}
    losses = [row["average"]["mean"] for row in rows]
    assert all(0 < loss < 20 for loss in losses), "of a token, a random model of 32,000 pieces has a larger one"
    page = (tmp_path / "compared" / "comparison.md").read_text()
    assert "Held-out loss per byte (less is better)" in page
    assert (tmp_path / "compared" / "comparison.png").stat().st_size > 1000


@pytest.mark.parametrize("words", [("--polish",), ("--method", "distill")])
def test_predictions_of_other_tokens_are_not_learnt(words: tuple[str, ...], tmp_path: Path) -> None:
    folders = [
        write_decoder(tmp_path / "base", tokenizer=piece_tokenizer(PIECES, PIECES)),
        write_decoder(tmp_path / "target", width=24, seed=1, tokenizer=piece_tokenizer(PIECES, (), seed=3)),
    ]
    tuned = fine_tuned(folders[0], tmp_path / "tuned", AutoModelForCausalLM)
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(dict.fromkeys(sentences(40))))
    where = [str(tuned), "--base", str(folders[0]), "--to", str(folders[1]), "--data", str(data), "-n", "12"]
    done = CliRunner().invoke(main, ["port", *where, *words, "-o", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "the source predicts other tokens than the target has" in done.stderr
    assert "--polish-on labels, or --method train" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_row_of_which_both_read_nothing_in_common_is_named(tmp_path: Path) -> None:
    """The source has room for the end of the long answer alone, which is one piece of the target's; nothing follows."""
    long = "warkiwarkiwarki"
    tokenizers = piece_tokenizer((long,)), piece_tokenizer((long,), (long,), seed=3)
    for number, (name, tokenizer) in enumerate(zip(("base", "target"), tokenizers, strict=True)):
        tokenizer.eos_token = None
        write_decoder(tmp_path / name, seed=number, tokenizer=tokenizer)
    tuned = fine_tuned(tmp_path / "base", tmp_path / "tuned", AutoModelForCausalLM)
    rows = [{"prompt": "say ", "completion": text[:5]} for text in dict.fromkeys(sentences(20))]
    rows[3]["completion"] = long
    with pytest.raises(UnreadableSampleError, match="row 3 of split 'train': nothing of an answer") as raised:
        hf_bico.port(
            tuned,
            base=tmp_path / "base",
            to=tmp_path / "target",
            data=rows,
            n=len(rows),
            max_length=10,
            evaluate=False,
            **PAPER,
        )
    assert "a longer max_length" in raised.value.remedy
