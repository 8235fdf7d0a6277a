"""Indexes of shards that name what is not there, or should not be read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.malformed.table import add, change_json, deep, put, put_json, spoils

FIRST = "model-00001-of-00002.safetensors"


def index(scene: Path) -> Path:
    return scene / "shards" / "model.safetensors.index.json"


def _put(content: bytes | str, scene: Path) -> None:
    put(index(scene), content)


def _map(value: Any, scene: Path) -> None:
    change_json(index(scene), "weight_map", to=value)


def _entry(shard: Any, scene: Path) -> None:
    change_json(index(scene), "weight_map", "logit_scale", to=shard)


for name, content in {
    "index_of_no_bytes": b"",
    "index_that_is_no_json": "{",
    "index_of_other_bytes": b"\xff\xfe\x00",
    "index_that_is_a_list": "[]",
    "index_nested_without_end": deep(),
    "index_without_weight_map": "{}",
}.items():
    add(name, "extract_shards", "BrokenWeightsError", partial(_put, content))
for name, value in {
    "index_with_a_list_of_weights": ["a"],
    "index_with_a_text_of_weights": "a",
    "index_with_no_weights": {},
    "index_with_numbers_for_files": {"a": 1},
    "index_with_lists_for_files": {"a": ["b"]},
    "index_with_nothing_for_a_file": {"a": None},
}.items():
    add(name, "extract_shards", "BrokenWeightsError", partial(_map, value))
for name, shard in {
    "index_that_points_out": "../transformers/tuned/model.safetensors",
    "index_that_points_to_the_root": "/etc/passwd",
    "index_that_points_to_nothing": "model-00003-of-00002.safetensors",
    "index_that_points_to_the_folder": ".",
    "index_with_a_nul_in_a_file": "model\x00.safetensors",
    "index_with_no_name_for_a_file": "",
    "index_that_points_to_another_file": "config.json",
    "index_with_half_a_character": "\ud800",
    "index_with_the_wrong_shard": FIRST.replace("00001-", "00002-"),
}.items():
    add(name, "extract_shards", "BrokenWeightsError", partial(_entry, shard))


@spoils("extract_shards", "BrokenWeightsError")
def index_of_megabytes(scene: Path) -> None:
    put_json(index(scene), {"weight_map": dict.fromkeys(map(str, range(1_500_000)), "x")})


@spoils("extract_shards", "BrokenWeightsError")
def index_with_a_tensor_more(scene: Path) -> None:
    change_json(index(scene), "weight_map", "nothing.weight", to=FIRST)


@spoils("extract_shards", "BrokenWeightsError")
def a_tensor_in_two_shards(scene: Path) -> None:
    file = scene / "shards" / FIRST
    tensors = load_file(file)
    file.unlink()
    second = load_file(scene / "shards" / FIRST.replace("00001-", "00002-"))
    save_file({**tensors, next(iter(second)): torch.zeros(1)}, file)


@spoils("extract_shards", "BrokenWeightsError")
def a_shard_that_is_missing(scene: Path) -> None:
    (scene / "shards" / FIRST).unlink()


@spoils("extract_shards", "BrokenWeightsError")
def a_shard_that_is_cut(scene: Path) -> None:
    put(scene / "shards" / FIRST, (scene / "shards" / FIRST).read_bytes()[:-9])


@spoils("extract_pickled", "BrokenWeightsError")
def index_of_pickles_that_is_a_list(scene: Path) -> None:
    (scene / "pickled" / "pytorch_model.bin").rename(scene / "pickled" / "one.bin")
    put_json(scene / "pickled" / "pytorch_model.bin.index.json", ["a"])


@spoils("extract_pickled", "BrokenWeightsError")
def index_of_pickles_that_points_out(scene: Path) -> None:
    (scene / "pickled" / "pytorch_model.bin").rename(scene / "pickled" / "one.bin")
    put_json(scene / "pickled" / "pytorch_model.bin.index.json", {"weight_map": {"a": "../../x.bin"}})
