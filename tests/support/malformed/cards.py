"""Cards whose metadata are broken, or are made to take time, memory, or a program's place."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from support.malformed.table import add, put, put_json, spoils


def card(scene: Path) -> Path:
    return scene / "transformers" / "tuned" / "README.md"


def _metadata(text: str | bytes, scene: Path) -> None:
    put(card(scene), b"---\n" + (text.encode() if isinstance(text, str) else text) + b"\n---\n# Title\n")


LAUGHS = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))])
MERGES = "\n".join(
    ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 30))]
)
CODE = "base_model: !!python/object/apply:os.system ['touch pwned']"
UNKNOWN: dict[str, str | bytes] = {
    "card_that_is_no_yaml": "base_model: [org/a",
    "card_with_tabs": "base_model:\n\t- org/a",
    "card_that_is_a_list": "- base_model\n- org/a",
    "card_that_is_a_text": "base_model",
    "card_of_other_bytes": b"base_model: \xff\xfe",
    "card_in_utf_16": "base_model: org/a".encode("utf-16"),
    "card_with_nul": "base_model: org/a\x00b",
    "card_that_laughs": LAUGHS,
    "card_that_merges": MERGES,
    "card_that_runs_code": CODE,
    "card_that_makes_an_object": "base_model: !!python/object:os.path {}",
    "card_that_calls_a_name": "base_model: !!python/name:os.system",
    "card_nested_without_end": "base_model: " + "[" * 100_000,
    "card_nested_line_by_line": "\n".join(" " * depth + "a:" for depth in range(3000)),
    "card_of_items_in_items": "base_model: " + "\n" + "- " * 100_000,
    "card_with_a_number_of_sixties": "base_model: 1" + ":1" * 500_000,
    "card_with_an_anchor_to_itself": "base_model: &a [*a]",
    "card_with_an_unknown_anchor": "base_model: *a",
    "card_with_a_date_that_is_none": "base_model: 2024-99-99",
    "card_with_a_base_that_is_a_number": "base_model: 5",
    "card_with_a_base_that_is_a_mapping": "base_model: {org: a}",
    "card_with_bases_of_mappings": "base_model: [{org: a}, {org: b}]",
    "card_with_a_base_that_is_nothing": "base_model:",
    "card_with_a_base_that_is_empty": "base_model: ''",
    "card_with_a_base_that_is_a_folder": "base_model: ../base",
    "card_with_a_base_at_the_root": "base_model: /etc/passwd",
    "card_with_a_base_of_thousands_of_letters": "base_model: " + "a" * 100_000,
    "card_with_a_base_with_a_key_of_a_list": "? [base_model]\n: org/a",
    "card_of_binary": "base_model: !!binary aGVsbG8=",
    "card_of_a_set": "base_model: !!set {a, b}",
    "card_of_newlines": "\n" * 2_000_000,
}
for name, text in UNKNOWN.items():
    add(name, "port_from_card", "BaseUnknownError", partial(_metadata, text))
add(
    "card_with_thousands_of_bases",
    "port_from_card",
    "SeveralBasesError",
    partial(_metadata, "base_model:\n" + "\n".join(f"- org/model-{n}" for n in range(5000))),
)
add(
    "card_with_a_base_that_is_not_there",
    "port_from_card",
    "BaseUnknownError",
    partial(_metadata, "base_model: org/none"),
)
for name, text in {
    "data_that_is_a_number": "datasets: 5",
    "data_that_is_a_mapping": "datasets: {a: b}",
    "data_that_is_a_list_of_lists": "datasets: [[a], [b]]",
    "data_that_is_a_loader": "datasets: imagefolder",
    "data_that_is_a_folder": "datasets: ../pictures",
    "data_of_an_object": "datasets: !!python/object/apply:os.getcwd []",
    "data_that_is_not_there": "datasets: org/none",
}.items():
    add(f"card_with_{name}", "port_data_from_card", "DataUnknownError", partial(_metadata, text))
add(
    "card_with_thousands_of_data_sets",
    "port_data_from_card",
    "SeveralDataSetsError",
    partial(_metadata, "datasets:\n" + "\n".join(f"- org/data-{n}" for n in range(5000))),
)


@spoils("port_from_card", "BaseUnknownError")
def card_of_megabytes(scene: Path) -> None:
    put(card(scene), b"---\nbase_model: org/a\n---\n" + b"a" * 17_000_000)


@spoils("port_from_card", "BaseUnknownError")
def card_without_an_end(scene: Path) -> None:
    put(card(scene), b"---\nbase_model: org/a\n")


@spoils("port_from_card", "BaseUnknownError")
def a_pipe_in_place_of_a_card(scene: Path) -> None:
    os.mkfifo(card(scene))


@spoils("port_from_card", "BaseUnknownError")
def a_config_with_class_names_under_odd_numbers(scene: Path) -> None:
    file = scene / "transformers" / "tuned" / "config.json"
    import json

    content = json.loads(file.read_text())
    put_json(file, content | {"id2label": {"²": "two", "9" * 5000: "many"}})
