"""The inputs of a card's snippet: a real sample of public data alone, and chats through the target's template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import hf_bico
from hf_bico.reports.model_cards import render_card
from hf_bico.reports.record import ExampleRecord, Record, read_record
from support.hub import Hub
from support.language_toys import chat_rows, labelled_rows, text_tokenizer, write_decoder, write_encoder
from support.paper import PAPER
from support.records import (
    COMMITS,
    DATA,
    a_classifier_record,
    a_decoder_record,
    a_language_record,
    a_record,
    python_without_texts,
    snippet,
)
from support.toys import WRITERS, Toy, random_state

pytestmark = pytest.mark.quick
SECRET = "the quick auditor"
MODELS = (("base", 0), ("target", 1), ("tuned", 2))


def _data(record: Record, **changes: Any) -> Record:
    assert record.data is not None
    return replace(record, data=replace(record.data, **changes))


def test_an_image_is_a_row_of_the_data_set_at_its_commit() -> None:
    code = snippet(render_card(_data(a_record(), example=ExampleRecord(row=3))))
    rows = f'    "{DATA}", "rgb", split="train", revision="{COMMITS[DATA]}", streaming=True'
    assert f"rows = load_dataset(\n{rows}\n)\n" in code
    assert 'image = next(iter(rows.skip(3)))["img"].convert("RGB")' in code
    assert "Image.new" not in code
    assert "pip install open_clip_torch datasets`" in render_card(_data(a_record(), example=ExampleRecord(row=3)))
    first = snippet(render_card(_data(a_record(), example=ExampleRecord(row=0))))
    assert "next(iter(rows))" in first


@pytest.mark.parametrize(
    ("record", "texts", "expected"),
    [
        (a_decoder_record(), ["What is it?"], 'tokenizer("What is it?", return_tensors="pt")'),
        (a_classifier_record(), ["It rains."], 'tokenizer("It rains.", truncation=True'),
        (a_classifier_record(), ["It rains.", "It is wet."], 'tokenizer("It rains.", "It is wet.", truncation=True'),
        (a_language_record("T5", "text-to-text"), ["It rains."], 'texts = ["It rains.", "The sun is out."]'),
    ],
)
def test_a_text_is_the_recorded_one(record: Record, texts: list[str], expected: str) -> None:
    assert expected in snippet(render_card(_data(record, example=ExampleRecord(texts))))
    neutral = snippet(render_card(record))
    assert "What is it?" not in neutral
    assert '"It rains."' not in neutral


@pytest.mark.parametrize("commit", [None, "main", "../x"])
def test_an_example_of_a_data_set_that_is_not_on_the_hub_is_not_shown(commit: str | None) -> None:
    for record in (a_record(), a_decoder_record()):
        card = render_card(_data(record, commit=commit, example=ExampleRecord([SECRET], row=3)))
        assert SECRET not in card
        assert "load_dataset" not in card


def test_an_example_is_cut_and_stays_a_text() -> None:
    hostile = 'x"); import os #\n```\n# Evil ' + "y" * 5000
    card = render_card(_data(a_decoder_record(), example=ExampleRecord([hostile])))
    dull = render_card(_data(a_decoder_record(), example=ExampleRecord(["dull"])))
    assert python_without_texts(snippet(card)) == python_without_texts(snippet(dull))
    assert len(card) < len(dull) + 400


@pytest.mark.parametrize("chats", [True, False, None])
def test_a_decoder_that_read_chats_is_asked_through_its_template(chats: bool | None) -> None:
    code = snippet(render_card(_data(a_decoder_record(), chat_template=chats, example=ExampleRecord(["Why?"]))))
    assert ("apply_chat_template" in code) == bool(chats)
    assert ('messages = [{"role": "user", "content": "Why?"}]' in code) == bool(chats)
    assert ('tokenizer("Why?"' in code) == (not chats)


# Ports


def _sample_of(ported: Any) -> ExampleRecord | None:
    example: ExampleRecord | None = ported.record.data.example
    return example


def _publish(hub: Hub, folder: Path, rows: list[dict[str, Any]], private: bool = False, gated: bool = False) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text(text)
    repo = hub.create("user/data", type="dataset", private=private, gated=gated)
    if gated:
        repo.granted.add("user")
    repo.commit_folder(folder)
    return "user/data"


def _classifiers(folder: Path) -> dict[str, Any]:
    import torch
    from transformers import BertForSequenceClassification

    base, target = write_encoder(folder / "base"), write_encoder(folder / "target", width=24, seed=1)
    tuned = write_encoder(folder / "tuned")
    model = BertForSequenceClassification.from_pretrained(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05
    model.save_pretrained(tuned)
    return {"source": tuned, "base": base, "to": target, "n": 10, "evaluate": False, **PAPER}


def _moods(first: str) -> list[dict[str, Any]]:
    rows = [{**row, "label": ("sad", "glad")[row["label"]]} for row in labelled_rows(30)]
    return [{**row, "text": f"{first} {row['text']}"} for row in rows]


def test_a_public_sample_is_recorded_and_shown(hub: Hub, tmp_path: Path) -> None:
    data = _publish(hub, tmp_path / "data", _moods("likes"))
    ported = hf_bico.port(**_classifiers(tmp_path), data=data)
    example = _sample_of(ported)
    assert example is not None
    [text] = example.texts
    assert text.startswith("likes ")
    folder = ported.save(tmp_path / "out")
    assert read_record(folder).data == ported.record.data
    assert f'tokenizer("{text}", truncation=True' in (folder / "README.md").read_text()


@pytest.mark.parametrize("kind", ["private", "gated", "folder", "rows"])
def test_a_sample_that_not_everybody_may_read_is_nowhere(
    kind: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_user("user", "hf_user")
    monkeypatch.setenv("HF_TOKEN", "hf_user")
    rows = _moods(SECRET)
    data: Any = rows
    if kind != "rows":
        data = _publish(hub, tmp_path / "data", rows, private=kind == "private", gated=kind == "gated")
        data = str(tmp_path / "data") if kind == "folder" else data
    ported = hf_bico.port(**_classifiers(tmp_path), data=data)
    assert _sample_of(ported) is None
    folder = ported.save(tmp_path / "out")
    for name in ("README.md", "bico.json"):
        assert SECRET not in (folder / name).read_text()
    assert '"It rains again."' in (folder / "README.md").read_text()


def test_offline_nobody_knows_whether_a_data_set_is_public(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    options = {**_classifiers(tmp_path), "data": _publish(hub, tmp_path / "data", _moods("likes"))}
    assert _sample_of(hf_bico.port(**options)) is not None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert _sample_of(hf_bico.port(**options)) is None


def test_a_snippet_of_a_chat_runs(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    folders = [write_decoder(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("target", 1), ("tuned", 0))]
    for folder in folders:
        text_tokenizer(chat=True).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folders[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05
    model.save_pretrained(folders[2])
    rows = chat_rows(12)
    data = _publish(hub, tmp_path / "data", rows)
    base, target, tuned = folders
    ported = hf_bico.port(tuned, to=target, base=base, data=data, n=4, evaluate=False, **PAPER)
    assert ported.record.data is not None
    assert ported.record.data.chat_template is True
    folder = ported.save(tmp_path / "out")
    code = snippet((folder / "README.md").read_text())
    asked = {message["content"] for row in rows for message in row["messages"] if message["role"] == "user"}
    assert any(f'"content": "{text}"' in code for text in asked)
    monkeypatch.chdir(folder)
    exec(compile(code, "the snippet of the card", "exec"), {})
    printed = capsys.readouterr().out
    assert any(text in printed for text in asked)


def test_a_snippet_loads_its_image_from_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The image is one of the rows that were calibrated on; the repo has moved on since."""
    for name, colour in (("cat", 40), ("dog", 200)):
        for number in range(6):
            place = tmp_path / "data" / "train" / name
            place.mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16), colour + number).save(place / f"{number}.png")
    data = hub.create("user/pictures", type="dataset")
    data.commit_folder(tmp_path / "data")
    folders = [WRITERS["open_clip"](tmp_path / name, Toy(), random_state(Toy(), seed)) for name, seed in MODELS]
    ported = hf_bico.port(
        folders[2], to=folders[1], base=folders[0], data="user/pictures", n=4, evaluate=False, force=True, **PAPER
    )
    example = _sample_of(ported)
    assert ported.record.data is not None
    assert example == ExampleRecord(row=min(ported.record.data.indices))
    data.commit({"train/cat/0.png": "no longer an image"})
    folder = ported.save(tmp_path / "out")
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec(compile(snippet((folder / "README.md").read_text()), "the snippet of the card", "exec"), found)
    assert found["image"].size == (16, 16)
    level = found["image"].getpixel((0, 0))[0]
    assert level == [*range(40, 46), *range(200, 206)][example.row or 0]
    assert "cat" in capsys.readouterr().out
