"""Calibration without data: the fine-tuned source writes the samples itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import UsageError
from hf_bico.porting.generation import OPENINGS, QUESTIONS
from support.language_toys import text_tokenizer
from support.worlds import decoders


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_generated_samples_are_nearly_as_good_as_real_ones(tmp_path: Path) -> None:
    """In the language world, of what the LoRA did for its own base; and the samples are the same every time."""
    world = decoders(0)
    loss = {name: world.loss(world.load(name)) for name in ("source", "tuned", "target")}
    shares = {}
    for name, data in (("real", world.calibration(60)), ("generated", "generated")):
        ported = hf_bico.port(
            world.adapter, to=world.target, base=world.source, data=data, n=60, method="bico", alpha=1.0, evaluate=False
        )
        shares[name] = (loss["target"] - world.loss(ported.model())) / (loss["source"] - loss["tuned"])
    print(", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    assert shares["generated"] > 0.6 * shares["real"] > 0.2


def test_a_port_without_data_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = decoders(0)
    monkeypatch.chdir(tmp_path)
    for name, place in (("lora", world.adapter), ("base", world.source), ("target", world.target)):
        shutil.copytree(place, tmp_path / name)
    Path("prompts.txt").write_text("the statement \na name\n")
    words = ["lora", "--base", "base", "--to", "target", "--data", "generated", "-n", "12"]
    assert "texts that the fine-tuned source writes" in run("plan", *words[:-2]).stdout
    done = run("port", *words, "--prompts", "prompts.txt", "--method", "bico", "--alpha", "1", "-o", "out")
    assert done.exit_code == 0, done.output
    assert "Nothing was measured: the source wrote the samples, and none is left." in done.stdout
    record = json.loads(Path("out/bico.json").read_text())
    assert record["data"]["id"] == "generated"
    assert record["data"]["generation"] == {"temperature": 1.0, "tokens": 256, "prompts": ["the statement", "a name"]}
    assert "--data generated" in record["command"]
    assert "--prompts FILE" in record["command"]
    card = Path("out/README.md").read_text()
    assert "The fine-tuned source wrote these texts itself, sampled at temperature 1.0" in card
    assert "from 2 given prompts" in card
    again = run("rerun", "out", "--json")
    assert json.loads(again.stdout)["same"] is True, again.output


def test_a_folder_of_that_name_is_named_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = decoders(0)
    monkeypatch.chdir(tmp_path)
    Path("generated").mkdir()
    Path("generated/texts.txt").write_text("\n".join(row["text"].replace("\n", " ") for row in world.calibration(8)))
    ported = hf_bico.port(
        world.adapter, to=world.target, base=world.source, data="./generated", n=8, alpha=1.0, evaluate=False
    )
    assert ported.record.data is not None
    assert (ported.record.data.id, ported.record.data.generation) == ("generated", None)


def test_prompts_alone_are_refused() -> None:
    world = decoders(0)
    with pytest.raises(UsageError, match="prompts is for texts that the source writes"):
        hf_bico.port(world.adapter, to=world.target, base=world.source, data=world.calibration(8), prompts=["a"], n=8)


@pytest.mark.parametrize("options", [{"per_class": 2}, {"sampling": "class-balanced"}])
def test_generated_texts_have_no_classes(options: dict[str, object]) -> None:
    world = decoders(0)
    with pytest.raises(UsageError, match="generated texts have no classes"):
        hf_bico.port(world.adapter, to=world.target, base=world.source, data="generated", **options)


@pytest.mark.quick
def test_prompts_are_neutral_and_of_many_kinds() -> None:
    assert len(set(OPENINGS)) == len(OPENINGS) >= 24
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 24
    known = set(text_tokenizer().get_vocab())
    assert sum(set(text) <= known for text in OPENINGS) > 12, "the small decoders can read most of them"
