"""Model configurations that are broken, contradict the weights, or ask for more than a machine has."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from support.malformed.table import add, change_json, deep, put, spoils, word


def config(scene: Path, which: str = "target") -> Path:
    return scene / "transformers" / which / "config.json"


def open_clip(scene: Path) -> Path:
    return scene / "open_clip" / "target" / "open_clip_config.json"


def _put(content: bytes | str, scene: Path) -> None:
    put(config(scene), content)


def _vision(field: str, value: Any, scene: Path) -> None:
    change_json(config(scene), "vision_config", field, to=value)


def _field(field: str, value: Any, scene: Path) -> None:
    change_json(config(scene), field, to=value)


def _llama(field: str, value: Any, scene: Path) -> None:
    change_json(scene / "llama" / "config.json", field, to=value)


def _open_clip(part: str, field: str, value: Any, scene: Path) -> None:
    change_json(open_clip(scene), "model_cfg", part, field, to=value)


for name, content in {
    "config_of_no_bytes": b"",
    "config_that_is_no_json": "{'a': 1}",
    "config_that_is_a_list": "[]",
    "config_that_is_a_text": '"CLIPModel"',
    "config_nested_without_end": deep(),
    "config_of_other_bytes": b"\xff\xfe{\x00}\x00",
    "config_of_megabytes": '{"a": "' + "a" * 17_000_000 + '"}',
    "config_of_fields_without_end": "{" + ",".join(f'"f{number}": {number}' for number in range(100_000)) + "}",
    "config_with_half_a_character": '{"model_type": "\\ud800"}',
}.items():
    add(name, "port", "RepoError", partial(_put, content))
for name, value, error in (
    ("size_of_a_billion", 10**9, "BrokenWeightsError"),
    ("size_beyond_words", 10**30, "BrokenWeightsError"),
    ("size_that_is_infinite", float("inf"), "BrokenWeightsError"),
    ("size_of_millions", 10**7, "BrokenWeightsError"),
    ("size_that_is_negative", -8, "BrokenWeightsError"),
    ("size_of_zero", 0, "BrokenWeightsError"),
    ("size_that_is_another", 16, "BrokenWeightsError"),
    ("size_in_a_text", "8", "BrokenWeightsError"),
    ("size_in_a_list", [8], "BrokenWeightsError"),
    ("size_that_is_broken", 8.5, "BrokenWeightsError"),
    ("size_that_is_none", None, "BrokenWeightsError"),
):
    add(f"config_with_a_hidden_{name}", "port", error, partial(_vision, "hidden_size", value))
for name, value, error in (
    ("ten_million_layers", 10**7, "BrokenWeightsError"),
    ("a_hundred_thousand_layers", 10**5, "BrokenWeightsError"),
    ("a_layer_more", 2, "BrokenWeightsError"),
    ("minus_one_layer", -1, "BrokenWeightsError"),
    ("layers_in_a_text", "many", "BrokenWeightsError"),
):
    add(f"config_with_{name}", "port", error, partial(_vision, "num_hidden_layers", value))
for name, value, error in (
    ("no_heads", 0, "BrokenWeightsError"),
    ("heads_that_do_not_divide", 3, "BrokenWeightsError"),
    ("heads_in_a_list", [2], "BrokenWeightsError"),
    ("a_billion_heads", 10**9, "BrokenWeightsError"),
):
    add(f"config_with_{name}", "port", error, partial(_vision, "num_attention_heads", value))
for name, value, error in (
    ("of_zero", 0, "UnsupportedModelError"),
    ("of_a_billion", 10**9, "BrokenWeightsError"),
    ("in_a_mapping", {"a": 1}, "RepoError"),
    ("in_a_text", "16", "RepoError"),
    ("of_three_numbers", [16, 16, 16], "BrokenWeightsError"),
):
    add(f"config_with_an_image_{name}", "port", error, partial(_vision, "image_size", value))
for field, value, error in (
    ("vision_config", "small", "RepoError"),
    ("vision_config", [1], "RepoError"),
    ("text_config", 5, "BrokenWeightsError"),
    ("model_type", ["clip"], "RepoError"),
    ("projection_dim", 10**12, "BrokenWeightsError"),
    ("projection_dim", "four", "BrokenWeightsError"),
    ("quantization_config", {"quant_method": "bitsandbytes"}, "UnsupportedModelError"),
    ("quantization_config", "nf4", "UnsupportedModelError"),
    ("num_local_experts", 8, "UnsupportedModelError"),
):
    add(f"config_with_{field}_{word(value)}", "port", error, partial(_field, field, value))
for field, value, error in (
    ("vocab_size", 10**12, "BrokenWeightsError"),
    ("vocab_size", 10**7, "BrokenWeightsError"),
    ("vocab_size", -1, "BrokenWeightsError"),
    ("hidden_size", 10**9, "BrokenWeightsError"),
    ("hidden_size", 4096, "BrokenWeightsError"),
    ("intermediate_size", 10**7, "BrokenWeightsError"),
    ("num_hidden_layers", 10**6, "BrokenWeightsError"),
    ("num_hidden_layers", 10**9, "BrokenWeightsError"),
    ("num_attention_heads", 0, "BrokenWeightsError"),
    ("num_key_value_heads", 3, "BrokenWeightsError"),
    ("head_dim", 10**9, "BrokenWeightsError"),
    ("hidden_act", "__import__", "BrokenWeightsError"),
    ("num_labels", 10**9, "BrokenWeightsError"),
    ("rope_parameters", "none", "BrokenWeightsError"),
    ("architectures", ["NoSuchForCausalLM"], "UnsupportedModelError"),
):
    add(f"language_config_with_{field}_{word(value)}", "evaluate_plain", error, partial(_llama, field, value))
for part, field, value, error in (
    ("vision_cfg", "width", 10**9, "BrokenWeightsError"),
    ("vision_cfg", "width", 10**6, "RepoError"),
    ("vision_cfg", "width", "wide", "RepoError"),
    ("vision_cfg", "layers", 10**5, "RepoError"),
    ("vision_cfg", "layers", [1, 1], "RepoError"),
    ("vision_cfg", "layers", 2, "BrokenWeightsError"),
    ("vision_cfg", "patch_size", 0, "RepoError"),
    ("vision_cfg", "head_width", 0, "RepoError"),
    ("vision_cfg", "head_width", 16, "RepoError"),
    ("vision_cfg", "mlp_ratio", 1e9, "BrokenWeightsError"),
    ("vision_cfg", "no_such_field", 1, "RepoError"),
    ("text_cfg", "vocab_size", 10**12, "BrokenWeightsError"),
    ("text_cfg", "context_length", 10**7, "RepoError"),
    ("text_cfg", "heads", 0, "RepoError"),
):
    add(f"open_clip_{field}_{word(value)}", "port_open_clip", error, partial(_open_clip, part, field, value))


@spoils("port_open_clip", "RepoError")
def open_clip_config_without_a_model(scene: Path) -> None:
    put(open_clip(scene), "{}")


@spoils("plan_open_clip", "RepoError")
def open_clip_config_nested_without_end(scene: Path) -> None:
    put(open_clip(scene), deep())


@spoils("port_open_clip", "UnreadableSampleError")
def open_clip_means_in_a_text(scene: Path) -> None:
    change_json(open_clip(scene), "preprocess_cfg", "mean", to="grey")


@spoils("port", "RepoError")
def a_pipe_in_place_of_a_config(scene: Path) -> None:
    config(scene).unlink()
    os.mkfifo(config(scene))


@spoils("port", "RepoError")
def no_config(scene: Path) -> None:
    config(scene).unlink()


@spoils("evaluate_plain", "UnsupportedModelError")
def a_config_that_names_code(scene: Path) -> None:
    """Which is not run: the folder's own code would leave a file behind."""
    put(scene / "llama" / "evil.py", "open('pwned', 'w')\n")
    file = scene / "llama" / "config.json"
    change_json(file, "auto_map", to={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    change_json(file, "architectures", to=["EvilForCausalLM"])
    change_json(file, "model_type", to="evil")


def _tuned(field: str, value: Any, scene: Path) -> None:
    change_json(config(scene, "tuned"), "vision_config", field, to=value)


for field, value in (
    *(("hidden_act", ["gelu"]), ("hidden_act", {"a": 1}), ("hidden_act", "relu"), ("layer_norm_eps", "small")),
    *(("layer_norm_eps", float("nan")), ("layer_norm_eps", 0.5), ("num_attention_heads", 4)),
):
    add(f"fine_tune_with_{field}_{word(value)}", "port", "BaseMismatchError", partial(_tuned, field, value))
