"""Other formats, quantised weights and image generators are refused by name, with what to use instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_bico
from hf_bico.errors import BicoError, UnsupportedAdapterError, UnsupportedModelError, WeightsNotFoundError
from hf_bico.models.model import Model
from hf_bico.porting.planner import plan
from support.hub import Hub
from support.hub_scenes import BASE, SOURCE, TARGET, publish
from support.language_toys import write_decoder

pytestmark = pytest.mark.quick

FORMATS = {
    "GGUF": (["model-Q4_K_M.gguf"], WeightsNotFoundError, "llama.cpp", "that it was made from"),
    "GGML": (["ggml-model-q4_0.bin"], WeightsNotFoundError, "llama.cpp", "that it was made from"),
    "ONNX": (["model.onnx"], WeightsNotFoundError, "ONNX", "exported from"),
    "ONNX in a folder": (["onnx/model.onnx", "onnx/model.onnx_data"], WeightsNotFoundError, "ONNX", "exported from"),
    "OpenVINO": (["openvino_model.xml", "openvino_model.bin"], WeightsNotFoundError, "OpenVINO", "exported from"),
    "TensorFlow": (["tf_model.h5"], WeightsNotFoundError, "TensorFlow", "from_tf=True"),
    "TensorFlow 1": (["bert_model.ckpt.index", "bert_model.ckpt.meta"], WeightsNotFoundError, "TensorFlow", "PyTorch"),
    "Keras": (["model.keras"], WeightsNotFoundError, "TensorFlow", "PyTorch"),
    "Flax": (["flax_model.msgpack"], WeightsNotFoundError, "Flax", "from_flax=True"),
    "Core ML": (["clip.mlpackage/Manifest.json"], WeightsNotFoundError, "Core ML", "exported from"),
    "diffusers": (
        ["model_index.json", "unet/diffusion_pytorch_model.safetensors", "v1-5.safetensors"],
        UnsupportedModelError,
        "an image generator in diffusers' format",
        "not image generators",
    ),
    "a part of diffusers": (["diffusion_pytorch_model.safetensors"], UnsupportedModelError, "diffusers", "generators"),
    "a LoRA of diffusers": (["pytorch_lora_weights.safetensors"], UnsupportedAdapterError, "a LoRA of", "PEFT adapter"),
    "an adapter without its configuration": (
        ["adapter_model.safetensors"],
        WeightsNotFoundError,
        "no adapter_config",
        "",
    ),
}
"""Files, the error, and parts of its cause and of its remedy."""

TENSORS = {
    "kohya": ("lora_unet_down_blocks_0.lora_down.weight", UnsupportedAdapterError, "kohya", "not image generators"),
    "kohya, text encoder": ("lora_te1_text_model_mlp_fc1.alpha", UnsupportedAdapterError, "kohya", "PEFT adapter"),
    "diffusers": ("unet.mid_block.attn.to_q.lora_A.weight", UnsupportedAdapterError, "diffusers", "PEFT adapter"),
    "older diffusers": ("unet.mid.to_q_lora.down.weight", UnsupportedAdapterError, "diffusers", "PEFT adapter"),
    "MLX": ("model.layers.0.self_attn.q_proj.lora_a", UnsupportedAdapterError, "MLX", "mlx_lm.fuse"),
    "Stable Diffusion": ("model.diffusion_model.in.0.weight", UnsupportedModelError, "in one file", "generators"),
    "GPTQ": ("model.layers.0.mlp.up_proj.qweight", UnsupportedModelError, "GPTQ or AWQ", "quantised from"),
    "FSDP": ("_fsdp_wrapped_module._flat_param", WeightsNotFoundError, "FSDP", "full state dict"),
}
"""A tensor's name, the error, and parts of its cause and of its remedy."""


def refusal(call: Callable[[], object]) -> BicoError:
    with pytest.raises(BicoError) as caught:
        call()
    return caught.value


def put(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"{}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("sound") / "llama", width=8, blocks=1, heads=2, kv_heads=1)


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A model's folder without weights."""
    (tmp_path / "other").mkdir()
    for file in llama.glob("*.json"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "other"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_folder_in_another_format(format: str, allow_pickle: bool, folder: Path, llama: Path) -> None:
    names, error, cause, remedy = FORMATS[format]
    put(folder, names)
    others = {
        "the fine-tuned model": lambda: plan(folder, llama, base=llama, allow_pickle=allow_pickle),
        "the base": lambda: plan(llama, llama, base=folder, allow_pickle=allow_pickle),
        "the target": lambda: plan(llama, folder, base=llama, allow_pickle=allow_pickle),
    }
    for part, call in others.items():
        found = refusal(call)
        assert type(found) is error
        assert found.cause.startswith(f"{part} 'other' ")
        assert cause in found.cause
        assert remedy in found.remedy


@pytest.mark.parametrize("format", TENSORS)
def test_tensors_of_another_kind(format: str, folder: Path, llama: Path) -> None:
    name, error, cause, remedy = TENSORS[format]
    save_file({name: torch.ones(2, 2), "model.layers.0.mlp.up_proj.scales": torch.ones(2)}, folder / "x.safetensors")
    calls = [lambda: plan(folder, llama, base=llama), lambda: hf_bico.apply(folder, to=llama)]
    calls.append(lambda: hf_bico.TaskVector.from_adapter(folder, llama))
    for call in calls:
        found = refusal(call)
        assert type(found) is error
        assert cause in found.cause
        assert remedy in found.remedy


@pytest.mark.parametrize("format", ["GGUF", "ONNX", "a LoRA of diffusers"])
def test_another_format_in_place_of_an_adapter(format: str, folder: Path, llama: Path) -> None:
    names, error, cause, _ = FORMATS[format]
    put(folder, names)
    for call in (lambda: hf_bico.apply(folder, to=llama), lambda: hf_bico.TaskVector.from_adapter(folder, llama)):
        found = refusal(call)
        assert type(found) is error
        assert cause in found.cause


def test_a_model_that_mlx_has_quantised(folder: Path, llama: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4}}))
    layer = "model.layers.0.mlp.up_proj"
    packed = {f"{layer}.weight": torch.ones(8, 2, dtype=torch.int32), f"{layer}.scales": torch.ones(8, 1)}
    save_file({**packed, f"{layer}.biases": torch.ones(8, 1)}, folder / "model.safetensors")
    found = refusal(lambda: Model.open(folder, "the model"))
    assert type(found) is UnsupportedModelError
    assert "are quantised" in found.cause


def test_other_formats_beside_safetensors_do_no_harm(folder: Path, llama: Path) -> None:
    put(folder, ["onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "openvino/openvino_model.xml", "a.gguf"])
    (folder / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    assert Model.open(folder, "the model").family.name == "decoder"


def test_safetensors_of_which_nothing_says_what_they_are(folder: Path, llama: Path) -> None:
    for number in (1, 2):
        save_file({"w": torch.ones(2)}, folder / f"model-0000{number}-of-00002.safetensors")
    found = refusal(lambda: Model.open(folder, "the model"))
    assert type(found) is WeightsNotFoundError
    assert "several safetensors (model-00001-of-00002.safetensors, model-00002-of-00002.safetensors)" in found.cause


@pytest.mark.parametrize("part", [SOURCE, BASE, TARGET])
@pytest.mark.parametrize("format", ["GGUF", "ONNX in a folder", "diffusers", "Flax"])
def test_a_repo_in_another_format(format: str, part: str, hub: Hub, tmp_path: Path) -> None:
    names, error, cause, _ = FORMATS[format]
    publish(hub, tmp_path, ("transformers", "transformers"))
    hub.repo(part).commit(dict.fromkeys(names, b"{}"), delete=["model.safetensors"])
    found = refusal(lambda: plan(SOURCE, TARGET))
    assert type(found) is error
    assert f"'{part}' " in found.cause
    assert cause in found.cause


def test_wrapped_names_on_the_hub_are_planned_by_headers_and_renamed_once_they_are_here(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf-home"))
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    state = load_file(scene.target / "model.safetensors")
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
    save_file(wrapped, tmp_path / "wrapped.safetensors", {"format": "pt"})
    hub.repo(TARGET).commit({"model.safetensors": (tmp_path / "wrapped.safetensors").read_bytes()})
    planned = plan(SOURCE, TARGET)
    target = planned.lineage.target
    assert set(target.checkpoint.shapes) == set(state)
    assert target.sha256 == {}
    assert planned.output_bytes
    fetched = planned.fetched().lineage.target
    assert all(torch.equal(fetched.checkpoint.tensor(name), tensor) for name, tensor in state.items())
    assert fetched.load(torch.device("cpu"), torch.float32).layout == fetched.layout
    assert fetched.commit == hub.repo(TARGET).head()
    assert fetched.sha256 == {"model.safetensors": fetched.place.repo.sha256["model.safetensors"]}  # type: ignore[union-attr]
