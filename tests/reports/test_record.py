"""The record: what is written is what is read, of this schema and of the first one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_bico.errors import RecordError
from hf_bico.reports.model_cards import write_card
from hf_bico.reports.record import RECORD_SCHEMA, MethodRecord, Record, read_record
from support.records import (
    COMMAND,
    INSTALL,
    a_decoder_record,
    a_path_record,
    a_record,
    a_scaled_record,
    a_trained_record,
    a_walk_record,
    an_adapter_record,
    fences,
    text_of,
)

pytestmark = pytest.mark.quick

KINDS = (a_record, a_path_record, a_scaled_record, a_walk_record, a_trained_record, a_decoder_record, an_adapter_record)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_written(kind: Callable[[], Record], tmp_path: Path) -> None:
    record = kind()
    text = record.write(tmp_path).read_text(encoding="utf-8")
    assert json.loads(text)["schema"] == RECORD_SCHEMA == 2
    assert read_record(tmp_path) == record
    assert read_record(tmp_path).to_json() == text


def test_alpha_is_a_number_or_one_for_each_step(tmp_path: Path) -> None:
    raw = json.loads(a_walk_record().write(tmp_path).read_text())
    assert raw["method"]["alpha"] == [0.5, 0.25]
    assert [point.get("step") for point in raw["method"]["curve"][::5]] == [1, 2, None]
    assert raw["method"]["candidates"][1] == {"method": "naive", "alpha": 0.25, "gain": 0.01, "held_back": True}
    (tmp_path / "bico.json").write_text(json.dumps({**raw, "method": {**raw["method"], "alpha": 1}}))
    alpha = read_record(tmp_path).method.alpha
    assert (alpha, type(alpha)) == (1.0, float)


@pytest.mark.parametrize("schema", [None, 0, 3, True, 2.0, "2"])
def test_a_record_of_another_schema_is_refused(schema: Any, tmp_path: Path) -> None:
    raw = json.loads(a_record().to_json())
    (tmp_path / "bico.json").write_text(json.dumps({**raw, "schema": schema}))
    with pytest.raises(RecordError, match="this version reads 1 and 2"):
        read_record(tmp_path)


# The first schema


def _first(folder: Path, method: MethodRecord, command: str | None = COMMAND, **more: Any) -> Record:
    """Write a record as the first schema had it, with a forecast that no later one has, and read it."""
    raw = json.loads(a_record(method=method, command=command).to_json())
    raw |= {"schema": 1, "foresight": {"outlook": 0.5, "helps": True, "first_order": -1.3, "agreement": 0.1}, **more}
    (folder / "bico.json").write_text(json.dumps(raw))
    return read_record(folder)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (MethodRecord("bico", 1.0, [0]), "--method bico --alpha 1"),
        (MethodRecord("bico", 0.1, [0]), "--method bico --alpha 0.1"),
        (MethodRecord("bico", 1 / 3, [0]), "--method bico --alpha 0.3333333333333333"),
        (MethodRecord("bico-path", 1.0, [0], steps=2), "--method bico-path --alpha 1 --path-steps 2"),
        (a_trained_record().method, "--method finetune"),
        (MethodRecord("my method", 1.0, [0]), "--method 'my method' --alpha 1"),
    ],
)
def test_the_command_of_the_first_schema_is_spelt_out(method: MethodRecord, said: str, tmp_path: Path) -> None:
    """It left out the defaults of then, which are others now."""
    assert _first(tmp_path, method).command == f"{COMMAND} {said}"


def test_what_is_spelt_already_is_not_spelt_twice(tmp_path: Path) -> None:
    command = f"{COMMAND} --method bico-path --alpha 0.5 --path-steps 3"
    method = MethodRecord("bico-path", 0.5, [0], steps=3)
    once = _first(tmp_path, method, command)
    assert once.command == command
    spelt = _first(tmp_path, MethodRecord("bico", 1.0, [0]))
    spelt.write(tmp_path)
    assert read_record(tmp_path) == spelt


def test_a_record_without_a_command_stays_without(tmp_path: Path) -> None:
    assert _first(tmp_path, MethodRecord("bico", 1.0, [0]), None).command is None


def test_the_command_of_this_schema_stays_as_it_is(tmp_path: Path) -> None:
    a_record().write(tmp_path)
    assert read_record(tmp_path).command == COMMAND


def test_the_first_schema_gives_a_card(tmp_path: Path) -> None:
    record = _first(tmp_path, MethodRecord("bico", 1.0, [0, 1], "drop"))
    assert record == replace(a_record(), schema=1, command=f"{COMMAND} --method bico --alpha 1")
    card = write_card(record, tmp_path).read_text()
    assert "Method: bico, completion drop, alpha 1, given." in text_of(card)
    assert next(block.content for block in fences(card) if block.info == "sh") == f"{INSTALL}{record.command}\n"
    for wrong in ("Outlook", "None", "\n\n\n"):
        assert wrong not in card
    assert {file.name for file in tmp_path.iterdir()} == {"README.md", "bico.json", "alignment.png", "outcome.png"}


def test_rounding_is_no_reason_to_refuse(tmp_path: Path) -> None:
    raw = json.loads(an_adapter_record().to_json())
    raw["sites"][0] |= {
        "score_in": 1.0000001,
        "unseen": -1e-9,
        "kept": 1.0000002,
        "cosine": 1.0000001,
        "energy": -1e-12,
    }
    raw["output"]["energy_kept"] = 1.0000001
    raw["evaluation"][0]["value"], raw["evaluation"][1]["value"] = 0.0, 1.0
    (tmp_path / "bico.json").write_text(json.dumps(raw))
    assert read_record(tmp_path).sites[0].score_in == 1.0000001
