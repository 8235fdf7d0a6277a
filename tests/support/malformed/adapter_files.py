"""PEFT adapters with configurations and tensors that do not fit together, or that were never meant to be read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.malformed.table import add, change_json, deep, put, spoils, word
from support.malformed.weight_files import PT, change_header, change_tensors, cut, drop, lora

CATASTROPHE = r"(.*.*)*(.*.*)*(.*.*)*=$"
A = "base_model.model.vision_model.encoder.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


def config(scene: Path, which: str = "lora") -> Path:
    return scene / which / "adapter_config.json"


def _put(content: bytes | str, scene: Path) -> None:
    put(config(scene), content)


def _field(field: str, value: Any, scene: Path, which: str = "lora") -> None:
    change_json(config(scene, which), field, to=value)


for name, content in {
    "of_no_bytes": b"",
    "that_is_no_json": "r: 8",
    "that_is_a_list": "[]",
    "nested_without_end": deep(),
    "of_other_bytes": b"\xff\x00",
    "that_says_nothing": "{}",
    "with_half_a_character": '{"peft_type": "\\ud800"}',
}.items():
    add(f"adapter_config_{name}", "apply_lora", "AdapterError", partial(_put, content))
for field, value, error in (
    ("peft_type", "NO_SUCH", "UnsupportedAdapterError"),
    ("peft_type", "PROMPT_TUNING", "UnsupportedAdapterError"),
    ("peft_type", 7, "AdapterError"),
    ("peft_type", ["LORA"], "AdapterError"),
    ("peft_type", None, "AdapterError"),
    ("r", 0, "AdapterError"),
    ("r", -2, "AdapterError"),
    ("r", 10**9, "AdapterError"),
    ("r", 3, "AdapterError"),
    ("r", "two", "AdapterError"),
    ("r", 2.5, "AdapterError"),
    ("r", True, "AdapterError"),
    ("r", [2], "AdapterError"),
    ("lora_alpha", "six", "AdapterError"),
    ("lora_alpha", float("nan"), "AdapterError"),
    ("lora_alpha", 10**400, "AdapterError"),
    ("lora_alpha", {}, "AdapterError"),
    ("rank_pattern", ["q_proj"], "AdapterError"),
    ("rank_pattern", {"q_proj": "two"}, "AdapterError"),
    ("rank_pattern", {"(": 2}, "AdapterError"),
    ("rank_pattern", {CATASTROPHE: 2}, "AdapterError"),
    ("alpha_pattern", {"q_proj": None}, "AdapterError"),
    ("alpha_pattern", "q_proj", "AdapterError"),
    ("alpha_pattern", {CATASTROPHE: 2}, "AdapterError"),
    ("target_modules", CATASTROPHE, "AdapterError"),
    ("target_modules", "(", "AdapterError"),
    ("target_modules", 5, "AdapterError"),
    ("target_modules", [], "AdapterError"),
    ("target_modules", ["nothing"], "AdapterError"),
    ("exclude_modules", CATASTROPHE, "AdapterError"),
    ("exclude_modules", 5, "AdapterError"),
    ("layers_to_transform", "first", "AdapterError"),
    ("layers_to_transform", [9], "AdapterError"),
    ("modules_to_save", 5, "AdapterError"),
    ("modules_to_save", [CATASTROPHE], "AdapterError"),
    ("target_parameters", 5, "AdapterError"),
    ("use_dora", True, "UnsupportedAdapterError"),
    ("init_lora_weights", "pissa_niter_4", "UnsupportedAdapterError"),
    ("no_such_field", {"a": 1}, "UnsupportedAdapterError"),
):
    add(f"adapter_with_{field}_{word(value)}", "apply_lora", error, partial(_field, field, value))


@spoils("apply_lora", "AdapterError")
def adapter_with_a_catastrophe_for_its_layers(scene: Path) -> None:
    _field("layers_to_transform", [0], scene)
    _field("layers_pattern", CATASTROPHE, scene)


for field, value, error in (
    ("r", 10**9, "AdapterError"),
    ("r", 10**6, "AdapterError"),
    ("r", 0, "AdapterError"),
    ("r", "two", "AdapterError"),
    ("alpha", [], "AdapterError"),
    ("target_modules", CATASTROPHE, "AdapterError"),
    ("target_modules", 5, "AdapterError"),
    ("target_modules", "(", "AdapterError"),
    ("layers_to_transform", "x", "AdapterError"),
    ("no_such_field", 5, "UnsupportedAdapterError"),
    ("peft_type", "LOKR", "AdapterError"),
):
    add(f"loha_with_{field}_{word(value)}", "apply_loha", error, partial(_field, field, value, which="loha"))


def _tensors(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name])

    return partial(change_tensors, change, lora, PT)


def _without(name: str) -> Callable[[Path], None]:
    return partial(change_tensors, lambda tensors: drop(tensors, name), lora, PT)


def _with(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return partial(change_tensors, lambda tensors: tensors.__setitem__(name, tensor), lora, PT)


for name, error, spoil in (
    ("without_its_second_factor", "AdapterError", _without(B)),
    ("without_its_first_factor", "AdapterError", _without(A)),
    ("with_factors_of_two_ranks", "AdapterError", _tensors(A, lambda tensor: tensor[:1])),
    ("with_a_factor_in_one_row", "AdapterError", _tensors(A, lambda tensor: tensor.flatten())),
    ("with_a_factor_of_no_rank", "AdapterError", _tensors(A, lambda tensor: tensor[:0])),
    ("with_a_factor_turned_round", "AdapterError", _tensors(A, lambda tensor: tensor.T)),
    ("with_a_factor_of_another_width", "BaseMismatchError", _tensors(A, lambda tensor: tensor[:, :4])),
    ("with_a_factor_of_integers", "UnsupportedAdapterError", _tensors(A, lambda tensor: tensor.long())),
    ("with_a_factor_of_8_bits", "UnsupportedAdapterError", _tensors(A, lambda tensor: tensor.to(torch.float8_e4m3fn))),
    ("with_a_factor_of_no_numbers", "NonFiniteWeightsError", _tensors(A, lambda tensor: tensor / 0)),
    ("with_a_layer_that_is_not_there", "AdapterError", _with(A.replace("q_proj", "z_proj"), torch.ones(2, 8))),
    ("with_a_foreign_part", "UnsupportedAdapterError", _with(A.replace("lora_A", "lora_magnitude"), torch.ones(8))),
    ("with_two_adapters", "AdapterError", _with(A.replace(".weight", ".other.weight"), torch.ones(2, 8))),
    ("with_a_name_without_end", "BrokenWeightsError", _with("base_model.model." + "a." * 5000 + "x", torch.ones(1))),
    ("that_is_cut", "BrokenWeightsError", partial(cut, 0.5, lora)),
    ("with_a_header_in_a_list", "BrokenWeightsError", partial(change_header, lambda header: b"[]", lora)),
):
    add(f"adapter_{name}", "from_adapter", error, spoil)


@spoils("from_adapter", "AdapterError")
def adapter_without_weights(scene: Path) -> None:
    lora(scene).unlink()


@spoils("from_adapter", "RecordError")
def adapter_beside_a_broken_record(scene: Path) -> None:
    put(scene / "lora" / "bico.json", "{")


@spoils("apply_lora", "AdapterError")
def adapter_with_a_number_for_its_layers(scene: Path) -> None:
    _field("layers_to_transform", [0], scene)
    _field("layers_pattern", 3, scene)


@spoils("apply_lora", "EmptyTaskVectorError")
def adapter_with_nothing(scene: Path) -> None:
    change_tensors(lambda tensors: tensors.clear(), lora, PT, scene)
