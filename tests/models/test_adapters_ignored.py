"""What peft would leave out, or compute otherwise, without a word: refused by name, and never added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_bico.errors import AdapterError
from hf_bico.models.adapters.lora_names import require_targeted
from hf_bico.porting.task_vector import TaskVector
from support.adapters import CONFIG, WEIGHTS, Base, adapted, assert_same, by_peft, lora, saved, transformers_base

pytestmark = pytest.mark.quick

VISION = r"vision_model\..*\.(q_proj|v_proj|fc1)"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return transformers_base(tmp_path_factory.mktemp("ignored") / "base")


def with_config(folder: Path, **fields: Any) -> Path:
    file = folder / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*q_proj"},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "v_proj", "fc1"], "layers_to_transform": [0]},
        {"target_modules": ["q_proj", "v_proj", "fc1"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"exclude_modules": r".*fc1"},
        {"exclude_modules": ["fc1"]},
    ],
    ids=str,
)
def test_factors_that_are_no_target_are_refused(fields: dict[str, Any], base: Base, tmp_path: Path) -> None:
    folder = with_config(saved(base, lora(VISION), tmp_path), **fields)
    held = {name for name in load_file(folder / WEIGHTS) if ".lora_A." in name}
    assert len([delta for delta in by_peft(folder, base).values() if delta.any()]) < len(held), "peft leaves some out"
    with pytest.raises(AdapterError, match="which are none of its targets"):
        TaskVector.from_adapter(folder, base=base.folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "fc1"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "fc1"], "layers_to_transform": [0], "layers_pattern": ["layers"]},
        {"target_modules": ["q_proj", "fc1"], "exclude_modules": ["fc1"]},
        {"target_modules": "all-linear", "exclude_modules": r"text_model\..*"},
    ],
    ids=str,
)
def test_what_the_rules_choose_is_read(fields: dict[str, Any], base: Base, tmp_path: Path) -> None:
    folder = saved(base, lora(fields.pop("target_modules"), **fields), tmp_path)
    assert_same(TaskVector.from_adapter(folder, base=base.folder), by_peft(folder, base))


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_tensor_beside_factors_without_the_wrappers_name_is_refused(parameter: str, base: Base, tmp_path: Path) -> None:
    folder = saved(base, lora(VISION), tmp_path)
    tensors = load_file(folder / WEIGHTS)
    layer = next(name for name in tensors if name.endswith("q_proj.lora_A.weight")).removesuffix(".lora_A.weight")
    like = base.model().state_dict()[f"{layer.removeprefix('base_model.model.')}.{parameter}"]
    save_file({**tensors, f"{layer}.{parameter}": torch.ones_like(like)}, folder / WEIGHTS)
    with pytest.raises(AdapterError, match=rf"q_proj.{parameter}' beside factors of the same layer"):
        TaskVector.from_adapter(folder, base=base.folder)


def test_bias_of_an_old_release_is_read(base: Base, tmp_path: Path) -> None:
    folder = saved(base, lora(VISION, bias="lora_only"), tmp_path)
    expected = dict(TaskVector.from_adapter(folder, base=base.folder))
    tensors = {
        name.replace(".base_layer.bias", ".bias"): tensor for name, tensor in load_file(folder / WEIGHTS).items()
    }
    save_file(tensors, folder / WEIGHTS)
    found = TaskVector.from_adapter(folder, base=base.folder)
    assert any(name.endswith(".bias") for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_loaded_model_with_several_adapters_is_refused(base: Base) -> None:
    model = adapted(base.model(), lora(VISION))
    model.add_adapter("other", lora(VISION))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(AdapterError, match="has 2 active adapters"):
        TaskVector.from_adapter(model, base=base.folder)


def test_loaded_model_with_a_rescaled_or_merged_adapter_is_refused(base: Base) -> None:
    rescaled = adapted(base.model(), lora(VISION))
    for module in rescaled.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(0.5)
    with pytest.raises(AdapterError, match="has its adapter rescaled"):
        TaskVector.from_adapter(rescaled, base=base.folder)
    merged = adapted(base.model(), lora(VISION))
    merged.merge_adapter()
    with pytest.raises(AdapterError, match="merged, or switched off"):
        TaskVector.from_adapter(merged, base=base.folder)
    plain = adapted(base.model(), lora(VISION, use_rslora=True))
    assert len(TaskVector.from_adapter(plain, base=base.folder)) == 6


@pytest.mark.parametrize("layers", [None, [], [1], 0, [0, 2]], ids=str)
@pytest.mark.parametrize("pattern", [None, "layers", "h", ["h", "layers"]], ids=str)
@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["c_attn"], r".*q_proj", ["classifier"]], ids=str)
def test_targets_are_those_of_peft(targets: Any, pattern: Any, layers: Any) -> None:
    """Whatever peft adapts is accepted, so that no file of its own is refused."""
    from peft.tuners.tuners_utils import check_target_module_exists

    fields: dict[str, Any] = {"target_modules": targets, "layers_pattern": pattern, "layers_to_transform": layers}
    if layers in (None, []) or isinstance(targets, str):
        fields |= {"layers_pattern": None, "layers_to_transform": None if isinstance(targets, str) else layers}
    config = peft.LoraConfig(**fields, modules_to_save=["head"])
    raw = {**fields, "modules_to_save": ["head"]}
    for module in (
        *(
            "model.layers.1.self_attn.q_proj",
            "layers.0.self_attn.q_proj",
            "h.1.attn.c_attn",
            "transformer.h.0.attn.c_attn",
        ),
        *("model.layers.1.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.2.up_proj", "head.q_proj", "q_proj"),
        *("classifier", "pre_classifier", "model.layers.2.q_proj.other"),
    ):
        if check_target_module_exists(config, module):
            require_targeted([module], raw, "an adapter")
    for module in ("head.q_proj", "pre_classifier", "model.layers.2.q_proj.other"):
        with pytest.raises(AdapterError, match="none of its targets"):
            require_targeted([module], raw, "an adapter")
