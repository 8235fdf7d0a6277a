"""Behaviour of the installed peft that the adapter code relies on or works around, one fact a test.

A failure here means that a release of peft has changed, not that this package is wrong: look for the code that the
fact shaped, then change both.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.toys import CONTEXT_LENGTH, Toy, open_clip_config, random_state, to_transformers, transformers_config

TOY = Toy()
PREFIX = "base_model.model."
BLOCK = "visual.transformer.resblocks.0."
TEXT_BLOCK = "transformer.resblocks.0."
MLP = r"visual\.transformer\.resblocks\.\d+\.mlp\.(c_fc|c_proj)"
IMAGES = torch.randn(3, 3, TOY.image_size, TOY.image_size, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(3, 20, (2, CONTEXT_LENGTH), generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
SCALING = 2.0  # alpha = 2 r in every configuration below

pytestmark = [
    # peft warns about most of what is pinned here; a test that relies on a warning asks for it
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


class Two(nn.Module):
    """Two linear maps with a LayerNorm between."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x).relu()))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class Others(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.embedding, self.conv = nn.Embedding(10, 6), nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=groups)


def seeded(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make(*args).eval()


def open_clip_model() -> nn.Module:
    import open_clip

    model = open_clip.CLIP(**open_clip_config(TOY))
    model.load_state_dict(random_state(TOY, 0), strict=False)
    return model.eval()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 30, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()


def lora(targets: Any, **fields: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": targets, **fields})


def adapted(model: nn.Module, config: peft.PeftConfig, **options: Any) -> PeftModel:
    """The model with an adapter that no longer is at its initialisation."""
    adapter = get_peft_model(model, config, **options).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return adapter


def saved(adapter: PeftModel, folder: Path) -> dict[str, Tensor]:
    """Save the adapter; its tensors without the prefix that every key has."""
    adapter.save_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all(name.startswith(PREFIX) for name in tensors)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def rewrite(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def product(tensors: dict[str, Tensor], module: str) -> Tensor:
    return SCALING * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=5e-6)


def ranks(adapter: PeftModel) -> dict[str, int]:
    found = {name: layer.r["default"] for name, layer in adapter.named_modules() if isinstance(layer, BaseTunerLayer)}
    return {name.removeprefix(PREFIX): rank for name, rank in found.items()}


def kept(adapter: PeftModel) -> list[str]:
    wrapper = peft.utils.ModulesToSaveWrapper
    return [name.removeprefix(PREFIX) for name, module in adapter.named_modules() if isinstance(module, wrapper)]


# --- nn.MultiheadAttention


def test_multihead_attention_as_target_applies_out_proj_twice(tmp_path: Path) -> None:
    adapter, x = adapted(seeded(Attention), lora(["attn"])), ROWS[None]
    tensors = saved(adapter, tmp_path)
    expected = seeded(Attention)
    expected.attn.in_proj_weight.data += product(tensors, "attn")
    expected.attn.out_proj.weight.data += 2 * product(tensors, "attn.base_layer.out_proj")
    assert close(adapter(x), expected(x))
    assert close(adapter.merge_and_unload()(x), expected(x))


@pytest.mark.parametrize(
    "fields",
    [{"targets": ["attn.out_proj"]}, {"targets": [], "target_parameters": ["attn.out_proj.weight"]}],
    ids=["module", "parameter"],
)
def test_out_proj_alone_has_no_effect_until_merged(fields: dict[str, Any]) -> None:
    adapter, x, base = adapted(seeded(Attention), lora(**fields)), ROWS[None], seeded(Attention)
    assert close(adapter(x), base(x))
    assert not close(adapter.merge_and_unload()(x), base(x))


def test_bias_all_saves_out_proj_bias_but_not_in_proj_bias(tmp_path: Path) -> None:
    tensors = saved(adapted(open_clip_model(), lora(MLP, bias="all")), tmp_path)
    assert f"{BLOCK}attn.out_proj.bias" in tensors
    assert f"{BLOCK}mlp.c_fc.base_layer.bias" in tensors
    assert not [name for name in tensors if name.endswith("in_proj_bias")]


def test_a_whole_attention_is_kept_exactly_by_modules_to_save(tmp_path: Path) -> None:
    adapter = adapted(open_clip_model(), lora(MLP, modules_to_save=[f"{BLOCK}attn"]))
    tensors = saved(adapter, tmp_path)
    expected = open_clip_model()
    state = expected.state_dict()
    for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"):
        state[f"{BLOCK}attn.{name}"].copy_(tensors[f"{BLOCK}attn.{name}"])
    for name in list(tensors):
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            state[f"{module}.weight"] += product(tensors, module)
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(open_clip_model(), tmp_path)
        assert close(loaded.encode_image(IMAGES), expected.encode_image(IMAGES))
        merged = loaded.merge_and_unload()
    assert all(torch.equal(tensor, state[name]) for name, tensor in merged.state_dict().items())


# --- target_parameters


@pytest.mark.parametrize("fields", [{"lora_bias": True}, {"fan_in_fan_out": True}, {"lora_dropout": 0.1}], ids=str)
def test_target_parameters_refuse(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lora.ParamWrapper does not work with"):
        get_peft_model(open_clip_model(), lora([], target_parameters=["visual.proj"], **fields))


@pytest.mark.parametrize(
    ("parameter", "key"),
    [("visual.proj", "visual"), (f"{BLOCK}attn.in_proj_weight", f"{BLOCK}attn")],
    ids=["proj", "in_proj"],
)
def test_target_parameters_are_saved_under_the_name_of_their_module(parameter: str, key: str, tmp_path: Path) -> None:
    adapter = adapted(open_clip_model(), lora([], target_parameters=[parameter]))
    tensors = saved(adapter, tmp_path)
    assert set(tensors) == {f"{key}.lora_A.weight", f"{key}.lora_B.weight"}
    expected = open_clip_model()
    expected.get_parameter(parameter).data += product(tensors, key)
    assert close(adapter.encode_image(IMAGES), expected.encode_image(IMAGES))
    assert close(adapter.merge_and_unload().get_parameter(parameter), expected.get_parameter(parameter))


def test_parameters_of_one_module_nest_with_the_last_outside(tmp_path: Path) -> None:
    fields = {"target_parameters": ["visual.positional_embedding", "visual.proj"]}
    tensors = saved(adapted(open_clip_model(), lora([], **fields)), tmp_path)
    state = random_state(TOY, 0)
    assert product(tensors, "visual").shape == state["visual.proj"].shape
    assert product(tensors, "visual.base_layer").shape == state["visual.positional_embedding"].shape


def test_a_wrapped_tower_renames_what_is_inside_and_is_merged_in_two_calls(tmp_path: Path) -> None:
    inside = f"visual.base_layer.{TEXT_BLOCK}"
    config = lora(MLP, target_parameters=["visual.proj"], modules_to_save=[f"{inside}attn"])
    adapter = adapted(open_clip_model(), config)
    assert {f"{inside}mlp.c_fc.lora_A.weight", f"{inside}attn.in_proj_bias"} <= set(saved(adapter, tmp_path))
    with torch.no_grad():
        unmerged = adapter.encode_image(IMAGES)
        assert f"{BLOCK}mlp.c_fc.weight" not in adapter.merge_and_unload().state_dict()
        merged = adapter.merge_and_unload()
        assert set(merged.state_dict()) == set(open_clip_model().state_dict())
        assert close(merged.encode_image(IMAGES), unmerged)


def test_target_parameters_of_a_module_and_of_one_inside_it_raise() -> None:
    with pytest.raises(AttributeError, match="ParamWrapper has no attribute"):
        get_peft_model(open_clip_model(), lora([], target_parameters=["visual.proj", f"{BLOCK}attn.in_proj_weight"]))


def test_modules_to_save_below_a_wrapped_parameter_are_silently_ignored() -> None:
    fields = {"target_parameters": [f"{BLOCK}attn.in_proj_weight"], "modules_to_save": [f"{BLOCK}attn.out_proj"]}
    assert kept(get_peft_model(open_clip_model(), lora([], **fields))) == []
    fields["modules_to_save"] = [f"{BLOCK}attn.base_layer.out_proj"]
    with pytest.raises(ValueError, match="child of"):
        get_peft_model(open_clip_model(), lora([], **fields))


def test_a_parameter_of_the_model_itself_cannot_be_targeted() -> None:
    with pytest.raises(ValueError, match="top-level module"):
        get_peft_model(open_clip_model(), lora([], target_parameters=["text_projection"]))


# --- biases


def test_lora_bias_is_multiplied_by_the_scaling_and_dropped_unless_configured(tmp_path: Path) -> None:
    from transformers import CLIPModel

    def model() -> nn.Module:
        clip = CLIPModel(transformers_config(TOY))
        clip.load_state_dict(to_transformers(random_state(TOY, 0)))
        return clip.eval()

    name = "vision_model.encoder.layers.0.mlp.fc1"
    adapter = adapted(model(), lora(re.escape(name), lora_bias=True))
    tensors = saved(adapter, tmp_path)
    base = model().get_submodule(name)
    x = torch.randn(3, base.in_features)
    weight, bias = base.weight + product(tensors, name), base.bias + SCALING * tensors[f"{name}.lora_B.bias"]
    assert close(adapter.get_submodule(PREFIX + name)(x), nn.functional.linear(x, weight, bias))
    assert close(adapter.merge_and_unload().get_submodule(name).bias, bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dropped = PeftModel.from_pretrained(model(), rewrite(tmp_path, tensors, lora_bias=False))
    assert torch.equal(dropped.merge_and_unload().get_submodule(name).bias, base.bias)


def test_saved_biases_are_absolute_and_stay_when_the_adapter_is_disabled(tmp_path: Path) -> None:
    tensors = saved(adapted(seeded(Two), lora(["first"], bias="lora_only")), tmp_path)
    loaded = PeftModel.from_pretrained(seeded(Two), tmp_path)
    expected = seeded(Two)
    expected.first.bias.data = tensors["first.base_layer.bias"]
    with loaded.disable_adapter():
        assert close(loaded(ROWS), expected(ROWS))
    assert torch.equal(loaded.merge_and_unload().first.bias, tensors["first.base_layer.bias"])


# --- names


def test_a_string_of_target_modules_is_a_full_match_and_a_list_matches_suffixes() -> None:
    name, other = f"{TEXT_BLOCK}mlp.c_fc", f"{BLOCK}mlp.c_fc"
    assert set(ranks(get_peft_model(open_clip_model(), lora(re.escape(name))))) == {name}
    assert set(ranks(get_peft_model(open_clip_model(), lora([name])))) == {name, other}


@pytest.mark.parametrize(
    ("key", "text", "visual"),
    [
        (f"{TEXT_BLOCK}mlp.c_fc", 7, 7),
        (f"^{TEXT_BLOCK}mlp.c_fc", 7, 2),
        (f"^{BLOCK}mlp.c_fc", 2, 7),
        (f"^{TEXT_BLOCK}mlp.c.fc", 7, 2),
        ("fc", 2, 2),
    ],
    ids=["suffix", "caret", "caret of the longer name", "a dot is a wildcard", "suffix inside a name"],
)
def test_rank_pattern_is_a_regular_expression_for_a_suffix(key: str, text: int, visual: int) -> None:
    name = f"{TEXT_BLOCK}mlp.c_fc"
    adapter = get_peft_model(open_clip_model(), lora([name], rank_pattern={key: 7}, alpha_pattern={key: 14}))
    assert ranks(adapter) == {name: text, f"visual.{name}": visual}


def test_the_first_rank_pattern_that_matches_wins() -> None:
    name = f"{TEXT_BLOCK}mlp.c_fc"
    adapter = get_peft_model(open_clip_model(), lora([name], rank_pattern={name: 7, f"^visual.{name}": 5}))
    assert set(ranks(adapter).values()) == {7}


@pytest.mark.parametrize(("suffix", "rank"), [("attn.in_proj_weight", 7), ("attn", 2)])
def test_rank_pattern_of_a_parameter_has_the_name_of_the_parameter(suffix: str, rank: int) -> None:
    fields = {"target_parameters": [f"{BLOCK}attn.in_proj_weight"], "rank_pattern": {f"^{BLOCK}{suffix}": 7}}
    with pytest.warns(RuntimeWarning, match="did not match any targeted module"):  # false for the parameter's name
        assert ranks(get_peft_model(open_clip_model(), lora([], **fields))) == {f"{BLOCK}attn": rank}


def test_target_parameters_of_the_text_tower_wrap_the_visual_tower_too() -> None:
    adapter = get_peft_model(open_clip_model(), lora([], target_parameters=[f"{TEXT_BLOCK}attn.in_proj_weight"]))
    assert set(ranks(adapter)) == {f"{TEXT_BLOCK}attn", f"{BLOCK}attn"}


def test_modules_to_save_match_the_end_of_any_name_and_miss_no_key(tmp_path: Path) -> None:
    config = lora(MLP, modules_to_save=["former.resblocks.0.ln_1"])
    adapter = adapted(open_clip_model(), config)
    assert sorted(kept(adapter)) == [f"{TEXT_BLOCK}ln_1", f"{BLOCK}ln_1"]
    tensors = saved(adapter, tmp_path)
    text_only = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{BLOCK}ln_1")}
    with pytest.raises(KeyError, match="visual.transformer.resblocks.0.ln_1.weight"):
        PeftModel.from_pretrained(open_clip_model(), rewrite(tmp_path, text_only))


# --- what loading accepts


def test_missing_adapter_keys_warn_and_leave_the_module_alone(tmp_path: Path) -> None:
    tensors = saved(adapted(seeded(Two), lora(["first"])), tmp_path)
    rewrite(tmp_path, tensors, target_modules=["first", "second"])
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        loaded = PeftModel.from_pretrained(seeded(Two), tmp_path).merge_and_unload()
    assert torch.equal(loaded.second.weight, seeded(Two).second.weight)
    assert close(loaded.first.weight, seeded(Two).first.weight + product(tensors, "first"))


def test_keys_without_a_place_are_dropped_in_silence(tmp_path: Path) -> None:
    tensors = saved(adapted(seeded(Two), lora(["first"])), tmp_path)
    surplus = {f"second.lora_{letter}.weight": tensors[f"first.lora_{letter}.weight"].clone() for letter in "AB"}
    rewrite(tmp_path, tensors | surplus | {"nowhere.weight": torch.ones(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = PeftModel.from_pretrained(seeded(Two), tmp_path).merge_and_unload()
    assert torch.equal(loaded.second.weight, seeded(Two).second.weight)


@pytest.mark.parametrize("name", ["visual.proj", "visual.class_embedding", f"{BLOCK}attn.in_proj_bias"])
def test_a_base_tensor_in_the_file_replaces_the_base(name: str, tmp_path: Path) -> None:
    tensors = saved(adapted(open_clip_model(), lora(MLP)), tmp_path)
    dense = torch.randn(random_state(TOY, 0)[name].shape)
    loaded = PeftModel.from_pretrained(open_clip_model(), rewrite(tmp_path, tensors | {name: dense}))
    assert torch.equal(loaded.merge_and_unload().get_parameter(name), dense)


def test_dense_tensors_join_lora_and_parameters_in_one_exact_file(tmp_path: Path) -> None:
    adapter = adapted(open_clip_model(), lora(MLP, target_parameters=[f"{BLOCK}attn.in_proj_weight"]))
    tensors, tuned, state = saved(adapter, tmp_path), random_state(TOY, 5), adapter.merge_and_unload().state_dict()
    wrapped = {f"{BLOCK}attn.{name}": f"{BLOCK}attn.base_layer.{name}" for name in ("in_proj_bias", "out_proj.weight")}
    dense = {name: name for name in ("visual.proj", "visual.ln_post.weight", "text_projection")} | wrapped
    rewrite(tmp_path, tensors | {inside: tuned[name] for name, inside in dense.items()})
    for name in dense:
        state[name].copy_(tuned[name])
    expected = open_clip_model()
    expected.load_state_dict(state)
    loaded = PeftModel.from_pretrained(open_clip_model(), tmp_path)
    assert close(loaded.encode_image(IMAGES), expected.encode_image(IMAGES))
    assert close(loaded.encode_text(TOKENS), expected.encode_text(TOKENS))
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.merge_and_unload().state_dict().items())


@pytest.mark.parametrize(
    ("spelling", "same"),
    [(r"\1.default.", True), (r"\1.other.", False)],
    ids=["the loading adapter's name", "another name"],
)
def test_an_adapter_name_in_the_keys_must_be_the_loading_one(spelling: str, same: bool, tmp_path: Path) -> None:
    adapter = adapted(seeded(Two), lora(["first"]))
    tensors = saved(adapter, tmp_path)
    rewrite(tmp_path, {re.sub(r"(lora_[AB])\.", spelling, name): tensor for name, tensor in tensors.items()})
    loaded = PeftModel.from_pretrained(seeded(Two), tmp_path)
    assert close(loaded(ROWS), adapter(ROWS)) is same


@pytest.mark.parametrize("inner", ["modules_to_save.default.", "modules_to_save.", "original_module."])
def test_only_the_plain_spelling_of_modules_to_save_loads(inner: str, tmp_path: Path) -> None:
    tensors = saved(adapted(seeded(Two), lora(["first"], modules_to_save=["second"])), tmp_path)
    assert {"second.weight", "second.bias"} < set(tensors)
    renamed = {re.sub(r"^second\.", f"second.{inner}", name): tensor for name, tensor in tensors.items()}
    with pytest.raises(KeyError, match="second.weight"):
        PeftModel.from_pretrained(seeded(Two), rewrite(tmp_path, renamed))


# --- what a delta is


@pytest.mark.parametrize(
    ("start", "plain"),
    [
        (True, True),
        (False, True),
        ("gaussian", True),
        ("orthogonal", True),
        ("eva", True),
        ("lora_ga", True),
        ("mica", True),
        ("pissa", False),
        ("pissa_niter_4", False),
        ("olora", False),
    ],
)
def test_initialisations_that_change_the_base_on_loading(start: Any, plain: bool, tmp_path: Path) -> None:
    tensors = saved(adapted(seeded(Two), lora(["first"])), tmp_path)
    loaded = PeftModel.from_pretrained(seeded(Two), rewrite(tmp_path, tensors, init_lora_weights=start))
    base = seeded(Two).first.weight
    assert torch.equal(loaded.get_submodule(f"{PREFIX}first").get_base_layer().weight, base) is plain
    assert close(loaded.merge_and_unload().first.weight, base + product(tensors, "first")) is plain


def test_a_corda_adapter_does_not_load(tmp_path: Path) -> None:
    tensors = saved(adapted(seeded(Two), lora(["first"])), tmp_path)
    with pytest.raises(ValueError, match="eigens"):
        PeftModel.from_pretrained(seeded(Two), rewrite(tmp_path, tensors, init_lora_weights="corda"))


ADDITIVE = {
    "LORA": {"r": 4},
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10, "tinit": 1, "tfinal": 1},
    "ADAMSS": {"r": 4, "num_subspaces": 2},
    "C3A": {"block_size": 8},
    "DEFT": {"r": 4},
    "DELORA": {"r": 4},
    "FOURIERFT": {"n_frequency": 50},
    "FROD": {"progressbar": False},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "LOHA": {"r": 4},
    "LOKR": {"r": 4},
    "OSF": {"effective_rank": 4},
    "PEANUT": {"r": 4},
    "PSOFT": {"r": 4},
    "PVERA": {"r": 4},
    "RANDLORA": {"r": 4},
    "SHIRA": {"r": 4, "random_seed": 1},
    "SUPERTUNING": {"sparsity": 0.5},
    "TINYLORA": {"r": 2, "u": 8},
    "UNILORA": {"r": 4, "theta_d_length": 32},
    "VBLORA": {"r": 4, "num_vectors": 8, "vector_length": 8},
    "VERA": {"r": 4},
    "WAVEFT": {"n_frequency": 50},
}
NOT_ADDITIVE = {
    "LORA": {"r": 4, "use_dora": True},
    "BOFT": {"boft_block_size": 4},
    "HIRA": {"r": 4},
    "HRA": {"r": 4},
    "MISS": {"r": 4},
    "OFT": {"oft_block_size": 4},
}
WITHOUT_DELTA = {
    "BEFT": ({}, {"first.bias", "second.bias"}),
    "GLORA": ({"r": 4}, {"first.weight", "first.bias", "second.weight", "second.bias"}),
    "IA3": ({"feedforward_modules": ["second"]}, {"first.weight", "first.bias", "second.weight"}),
    "LN_TUNING": ({"target_modules": ["norm"]}, {"norm.weight", "norm.bias"}),
    "ROAD": ({"group_size": 8}, {"first.weight", "first.bias", "second.weight", "second.bias"}),
}
UNMERGEABLE = {"LILY", "POLY"}
WITHOUT_WEIGHTS = {
    "ADAPTION_PROMPT",
    "CARTRIDGE",
    "CPT",
    "MULTITASK_PROMPT_TUNING",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "P_TUNING",
    "SHADOW",
    "TRAINABLE_TOKENS",
    "XLORA",
}


def other_adapter(kind: str, fields: dict[str, Any]) -> PeftModel:
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return adapted(seeded(Two), config(**{"target_modules": ["first", "second"], **fields}))


def is_additive(adapter: PeftModel) -> bool:
    """Whether every merged weight is the base's plus what `get_delta_weight` gives, as code that reads it assumes."""
    layers = [name for name, layer in adapter.named_modules() if isinstance(layer, BaseTunerLayer)]
    expected = {}
    for name in layers:
        try:
            delta = adapter.get_submodule(name).get_delta_weight("default")
        except TypeError:
            return False
        if not isinstance(delta, Tensor):
            return False
        assert delta.to_dense().any()
        base = seeded(Two).get_submodule(name.removeprefix(PREFIX)).weight
        expected[name.removeprefix(PREFIX)] = base + delta.detach()
    merged = adapter.merge_and_unload()
    return all(close(merged.get_submodule(name).weight, weight) for name, weight in expected.items())


@pytest.mark.parametrize("kind", ADDITIVE)
def test_get_delta_weight_is_the_difference_for(kind: str) -> None:
    assert is_additive(other_adapter(kind, ADDITIVE[kind]))


@pytest.mark.parametrize("kind", NOT_ADDITIVE)
def test_get_delta_weight_is_not_the_difference_for(kind: str) -> None:
    assert not is_additive(other_adapter(kind, NOT_ADDITIVE[kind]))


@pytest.mark.parametrize("kind", WITHOUT_DELTA)
def test_there_is_no_get_delta_weight_but_merging_changes(kind: str) -> None:
    fields, changed = WITHOUT_DELTA[kind]
    adapter, base = other_adapter(kind, fields), seeded(Two).state_dict()
    assert not [layer for layer in adapter.modules() if hasattr(layer, "get_delta_weight")]
    merged = adapter.merge_and_unload().state_dict()
    assert {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])} == changed


@pytest.mark.parametrize("kind", sorted(UNMERGEABLE))
def test_merging_is_not_implemented_for(kind: str) -> None:
    with pytest.raises(NotImplementedError):
        other_adapter(kind, {"r": 4}).merge_and_unload()


def test_every_kind_of_adapter_is_named_here() -> None:
    named = ADDITIVE.keys() | NOT_ADDITIVE.keys() | WITHOUT_DELTA.keys() | UNMERGEABLE | WITHOUT_WEIGHTS
    assert named == {kind.value for kind in peft.PeftType}


def test_embedding_and_convolution_deltas(tmp_path: Path) -> None:
    adapter = adapted(seeded(Others), lora(["embedding", "conv"]))
    tensors = saved(adapter, tmp_path)
    base, merged = seeded(Others), adapter.merge_and_unload()
    rows = (tensors["embedding.lora_embedding_B"] @ tensors["embedding.lora_embedding_A"]).T
    assert close(merged.embedding.weight, base.embedding.weight + SCALING * rows)
    down, up = tensors["conv.lora_A.weight"], tensors["conv.lora_B.weight"][:, :, 0, 0]
    kernel = torch.einsum("or,rikl->oikl", up, down)
    assert close(merged.conv.weight, base.conv.weight + SCALING * kernel)


def test_a_grouped_convolution_cannot_be_merged() -> None:
    adapter = adapted(seeded(Others, 2), lora(["conv"]))
    with pytest.raises(NotImplementedError, match="groups > 1"):
        adapter.merge_and_unload()


@pytest.mark.parametrize(("targets", "recorded"), [(["c_attn"], True), (["c_attn", "lm_head"], False)], ids=str)
def test_fan_in_fan_out_follows_the_module_whatever_is_recorded(
    targets: list[str], recorded: bool, tmp_path: Path
) -> None:
    model = seeded(gpt2)
    base = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    tensors = saved(adapted(model, lora(targets)), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is recorded
    merged = PeftModel.from_pretrained(seeded(gpt2), tmp_path).merge_and_unload()
    delta = product(tensors, "transformer.h.0.attn.c_attn").T
    assert close(merged.transformer.h[0].attn.c_attn.weight, base + delta)


def test_merging_a_tied_embedding_changes_the_head_that_was_left_alone() -> None:
    adapter, ids = adapted(seeded(gpt2), lora(["wte"])), torch.arange(5)[None]
    with torch.no_grad():
        unmerged = adapter(ids).logits
        assert not close(adapter.merge_and_unload()(ids).logits, unmerged)


@pytest.mark.parametrize(("safe", "exact"), [(False, True), (True, False)], ids=["merge", "safe merge"])
def test_only_the_unsafe_merge_of_a_linear_rounds_once_in_bfloat16(safe: bool, exact: bool, tmp_path: Path) -> None:
    tensors = saved(adapted(seeded(Two), lora(["first"], modules_to_save=["second"])), tmp_path)
    loaded = PeftModel.from_pretrained(seeded(Two).bfloat16(), tmp_path)
    assert loaded.get_submodule(f"{PREFIX}first.lora_A.default").weight.dtype == torch.float32
    merged, base = loaded.merge_and_unload(safe_merge=safe), seeded(Two).bfloat16().first.weight
    rounded_once = (base.float() + product(tensors, "first")).bfloat16()
    rounded_twice = base + product(tensors, "first").bfloat16()
    assert torch.equal(merged.first.weight, rounded_once if exact else rounded_twice)
    assert torch.equal(merged.second.weight, tensors["second.weight"].bfloat16())


def test_target_parameters_round_twice_in_bfloat16(tmp_path: Path) -> None:
    adapter = adapted(open_clip_model().bfloat16(), lora([], target_parameters=["visual.proj"]))
    delta = product(saved(adapter, tmp_path), "visual")
    base = random_state(TOY, 0, torch.bfloat16)["visual.proj"]
    assert torch.equal(adapter.merge_and_unload().visual.proj, base + delta.bfloat16())
    assert not torch.equal(base + delta.bfloat16(), (base.float() + delta).bfloat16())
