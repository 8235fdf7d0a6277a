"""Broken and hostile safetensors, of models, adapters and task vectors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.malformed.table import add, put, spoils

SITE = "vision_model.encoder.layers.0.self_attn.q_proj.weight"
MLP = "vision_model.encoder.layers.0.mlp.fc1.weight"
NORM = "vision_model.post_layernorm.weight"


def tuned(scene: Path) -> Path:
    return scene / "transformers" / "tuned" / "model.safetensors"


def delta(scene: Path) -> Path:
    return scene / "delta" / "task_vector.safetensors"


def lora(scene: Path) -> Path:
    return scene / "lora" / "adapter_model.safetensors"


def rebuilt(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file with its header changed."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def change_header(change: Callable[[dict[str, Any]], Any], file: Callable[[Path], Path], scene: Path) -> None:
    put(file(scene), rebuilt(file(scene).read_bytes(), change))


def change_tensors(
    change: Callable[[dict[str, Tensor]], None], file: Callable[[Path], Path], metadata: Any, scene: Path
) -> None:
    tensors = load_file(file(scene))
    change(tensors)
    file(scene).unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file(scene), metadata)


def cut(share: float, file: Callable[[Path], Path], scene: Path) -> None:
    content = file(scene).read_bytes()
    put(file(scene), content[: int(share * len(content))])


def replaced(content: Callable[[bytes], bytes], file: Callable[[Path], Path], scene: Path) -> None:
    put(file(scene), content(file(scene).read_bytes()))


for percent in (1, 5, 30, 60, 99):
    add(f"weights_cut_at_{percent}_percent", "plan", "BrokenWeightsError", partial(cut, percent / 100, tuned))
for name, content in {
    "weights_of_no_bytes": lambda whole: b"",
    "weights_of_seven_bytes": lambda whole: b"\x07" * 7,
    "weights_with_a_byte_more": lambda whole: whole + b"\x00",
    "weights_with_a_header_of_2_to_the_60": lambda whole: (2**60).to_bytes(8, "little") + whole[8:],
    "weights_with_a_header_of_2_to_the_31": lambda whole: (2**31).to_bytes(8, "little") + whole[8:],
    "weights_with_a_header_of_nothing": lambda whole: (0).to_bytes(8, "little") + whole[8:],
    "weights_that_are_a_web_page": lambda whole: b"<!DOCTYPE html><html><body>404</body></html>",
    "weights_that_are_an_lfs_pointer": lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "weights_that_are_a_pickle": lambda whole: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07",
    "weights_that_are_a_zip": lambda whole: b"PK\x03\x04" + bytes(60),
}.items():
    add(name, "plan", "BrokenWeightsError", partial(replaced, content, tuned))


def _set(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[SITE][field] = value

    return change


for name, change in {
    "header_that_is_no_json": lambda header: b"{'a': 1}",
    "header_that_is_a_list": lambda header: b"[]",
    "header_that_is_empty": lambda header: b"{",
    "header_of_other_bytes": lambda header: b'{"\xff\xfe": 1}',
    "header_nested_without_end": lambda header: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "header_with_a_name_twice": lambda header: json.dumps(header).encode().replace(b"{", b'{"a":{},"a":{},', 1),
    "header_with_a_text_for_a_tensor": lambda header: {**header, SITE: "tensor"},
    "header_with_metadata_of_numbers": lambda header: {**header, "__metadata__": {"a": 1}},
    "header_with_an_unknown_type": _set("dtype", "F31"),
    "header_with_a_type_of_python": _set("dtype", "torch.float32"),
    "header_with_a_negative_shape": _set("shape", [-8, -8]),
    "header_with_a_shape_beyond_words": _set("shape", [2**63, 2**63]),
    "header_with_a_shape_of_texts": _set("shape", ["8", "8"]),
    "header_with_offsets_out_of_range": _set("data_offsets", [0, 2**40]),
    "header_with_offsets_that_overlap": _set("data_offsets", [0, 256]),
    "header_with_negative_offsets": _set("data_offsets", [-256, 0]),
    "header_with_offsets_turned_round": _set("data_offsets", [256, 0]),
    "header_without_offsets": lambda header: {**header, SITE: {"dtype": "F32", "shape": [8, 8]}},
}.items():
    add(name, "plan", "BrokenWeightsError", partial(change_header, change, tuned))


def _tensor(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name])

    return change


PT = {"format": "pt"}
for name, error, change in (
    ("weights_that_are_integers", "UnsupportedModelError", _tensor(SITE, lambda tensor: tensor.long())),
    ("weights_that_are_bytes", "UnsupportedModelError", _tensor(SITE, lambda tensor: tensor.to(torch.int8))),
    ("weights_that_are_true_or_false", "UnsupportedModelError", _tensor(SITE, lambda tensor: tensor > 0)),
    ("weights_of_8_bits", "UnsupportedModelError", _tensor(SITE, lambda tensor: tensor.to(torch.float8_e4m3fn))),
    ("weights_that_are_complex", "UnsupportedModelError", _tensor(SITE, lambda tensor: tensor.to(torch.complex64))),
    ("norms_of_8_bits", "BrokenWeightsError", _tensor(NORM, lambda tensor: tensor.to(torch.float8_e5m2))),
    ("norms_that_are_integers", "BrokenWeightsError", _tensor(NORM, lambda tensor: tensor.long())),
    ("weights_that_are_not_numbers", "NonFiniteWeightsError", _tensor(SITE, lambda tensor: tensor * float("nan"))),
    ("weights_that_are_infinite", "NonFiniteWeightsError", _tensor(SITE, lambda tensor: tensor + float("inf"))),
    ("one_norm_that_is_no_number", "NonFiniteWeightsError", _tensor(NORM, lambda tensor: tensor / 0 * 0)),
    ("weights_turned_round", "BaseMismatchError", _tensor(MLP, lambda tensor: tensor.T)),
    ("weights_in_one_row", "RepoError", _tensor(MLP, lambda tensor: tensor.flatten())),
    ("weights_of_no_dimension", "RepoError", _tensor(MLP, lambda tensor: tensor[0, 0])),
    ("weights_with_an_empty_dimension", "BaseMismatchError", _tensor(MLP, lambda tensor: tensor[:0])),
    ("weights_with_a_dimension_more", "RepoError", _tensor(MLP, lambda tensor: tensor[None])),
    ("weights_without_a_site", "BrokenWeightsError", lambda tensors: drop(tensors, MLP)),
    (
        "weights_with_a_block_left_out",
        "BaseMismatchError",
        lambda tensors: _rename(tensors, ".layers.0.", ".layers.7."),
    ),
    ("weights_of_another_model", "BaseMismatchError", lambda tensors: _rename(tensors, "layers", "stages")),
    ("weights_with_a_name_of_thousands_of_letters", "BrokenWeightsError", lambda tensors: _more(tensors, "a" * 5000)),
    ("weights_with_a_name_of_dots", "BrokenWeightsError", lambda tensors: _more(tensors, "." * 20_000)),
):
    add(name, "extract", error, partial(change_tensors, change, tuned, PT))


def drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def _rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def _more(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.zeros(1)


@spoils("extract", "EmptyTaskVectorError")
def weights_that_are_the_base(scene: Path) -> None:
    put(tuned(scene), (scene / "transformers" / "base" / "model.safetensors").read_bytes())


@spoils("extract", "BaseMismatchError")
def weights_of_thousands_of_tensors(scene: Path) -> None:
    """Under names of which any could be a part of any other."""
    file = tuned(scene)
    file.unlink()
    save_file({f"{'a.' * (number % 9)}{number}.weight": torch.zeros(1) for number in range(20_000)}, file)


@spoils("plan", "WeightsNotFoundError")
def a_folder_in_place_of_weights(scene: Path) -> None:
    tuned(scene).unlink()
    tuned(scene).mkdir()


@spoils("plan", "WeightsNotFoundError")
def a_pipe_in_place_of_weights(scene: Path) -> None:
    tuned(scene).unlink()
    os.mkfifo(tuned(scene))


@spoils("plan", "WeightsNotFoundError")
def a_dangling_link_in_place_of_weights(scene: Path) -> None:
    tuned(scene).unlink()
    tuned(scene).symlink_to("nowhere")


@spoils("plan", "WeightsNotFoundError")
def a_link_to_itself_in_place_of_weights(scene: Path) -> None:
    tuned(scene).unlink()
    tuned(scene).symlink_to(tuned(scene).name)


@spoils("extract", "WeightsNotFoundError")
def a_device_in_place_of_weights(scene: Path) -> None:
    tuned(scene).unlink()
    tuned(scene).symlink_to("/dev/zero")


@spoils("load_delta", "RecordError")
def a_pipe_in_place_of_a_task_vector(scene: Path) -> None:
    delta(scene).unlink()
    os.mkfifo(delta(scene))


def _about(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        about = json.loads(header["__metadata__"]["hf_bico"])
        header["__metadata__"] = {"hf_bico": json.dumps(about | fields)}

    return change


for name, change in {
    "a_task_vector_without_metadata": lambda header: header.pop("__metadata__") and None,
    "a_task_vector_of_another_format": _about(format="other"),
    "a_task_vector_of_schema_2": _about(schema=2),
    "a_task_vector_with_metadata_of_no_json": lambda header: {**header, "__metadata__": {"hf_bico": "{"}},
    "a_task_vector_with_metadata_in_a_list": lambda header: {**header, "__metadata__": {"hf_bico": "[]"}},
    "a_task_vector_nested_without_end": lambda header: {**header, "__metadata__": {"hf_bico": "[" * 100_000}},
    "a_task_vector_with_origins_in_a_text": _about(made_from="org/a"),
    "a_task_vector_with_origins_of_lists": _about(made_from=[[["a"], {}]]),
    "a_task_vector_with_factors_of_numbers": _about(low_rank=[1, 2]),
    "a_task_vector_with_factors_that_are_not_there": _about(low_rank=["nothing"]),
    "a_task_vector_with_factors_in_a_mapping": _about(low_rank={"a": 1}),
}.items():
    add(name, "load_delta", "RecordError", partial(change_header, change, delta))
for percent in (2, 50):
    add(
        f"a_task_vector_cut_at_{percent}_percent",
        "load_delta",
        "BrokenWeightsError",
        partial(cut, percent / 100, delta),
    )


def _keeping(change: Callable[[dict[str, Tensor]], None], scene: Path) -> None:
    from safetensors import safe_open

    with safe_open(delta(scene), "pt") as reader:
        metadata = reader.metadata()
    change_tensors(change, delta, metadata, scene)


add("a_task_vector_of_integers", "load_delta", "RecordError", partial(_keeping, _tensor(SITE, lambda t: t.long())))
add(
    "a_task_vector_of_no_numbers",
    "load_delta",
    "NonFiniteWeightsError",
    partial(_keeping, _tensor(SITE, lambda t: t / 0)),
)
add(
    "a_task_vector_of_another_shape", "apply_delta", "BaseMismatchError", partial(_keeping, _tensor(MLP, lambda t: t.T))
)
add(
    "a_task_vector_of_other_names",
    "apply_delta",
    "BaseMismatchError",
    partial(_keeping, lambda t: _rename(t, "vis", "x")),
)

PICKLE = "pytorch_model.bin"


@spoils("extract_pickled", "BrokenWeightsError")
def a_pickle_that_runs_code(scene: Path) -> None:
    put(scene / "pickled" / PICKLE, b"cos\nsystem\n(S'touch pwned'\ntR.")


@spoils("extract_pickled", "BrokenWeightsError")
def a_pickle_of_no_bytes(scene: Path) -> None:
    put(scene / "pickled" / PICKLE, b"")


@spoils("extract_pickled", "BrokenWeightsError")
def a_pickle_cut_short(scene: Path) -> None:
    content = (scene / "pickled" / PICKLE).read_bytes()
    put(scene / "pickled" / PICKLE, content[: len(content) // 2])


@spoils("extract_pickled", "BrokenWeightsError")
def a_pickle_of_random_bytes(scene: Path) -> None:
    put(scene / "pickled" / PICKLE, bytes(range(256)) * 8)


@spoils("extract_pickled", "BrokenWeightsError")
def a_pickle_of_a_list(scene: Path) -> None:
    (scene / "pickled" / PICKLE).unlink()
    torch.save([1, 2], scene / "pickled" / PICKLE)
