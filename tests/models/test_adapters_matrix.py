"""Adapters as peft makes them, kind by kind, option by option, model by model: what is read is what peft merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
from torch import Tensor, nn

from hf_bico.errors import BaseMismatchError
from hf_bico.porting.task_vector import TaskVector
from support.adapters import (
    PREFIX,
    READ_BY_PEFT,
    TOY,
    Base,
    adapted,
    assert_same,
    by_peft,
    lora,
    open_clip_base,
    other,
    renamed,
    rewritten,
    saved,
    saved_base,
    tensors_of,
    transformers_base,
)
from support.toys import Toy

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

QV, MLP = ["q_proj", "v_proj"], r"visual\.transformer\.resblocks\.\d+\.mlp\.(c_fc|c_proj)"
VISION, BLOCK = "vision_model.encoder.layers.", "visual.transformer.resblocks."

OVER_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {"targets": QV},
    "rank and alpha": {"targets": QV, "r": 5, "lora_alpha": 3},
    "rank above the width": {"targets": ["fc1"], "r": 40},
    "dropout": {"targets": QV, "lora_dropout": 0.3},
    "rsLoRA": {"targets": QV, "r": 5, "use_rslora": True},
    "patterns": {"targets": QV, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"self_attn.v_proj": 5}},
    "patterns with a caret": {
        "targets": QV,
        "rank_pattern": {f"^{VISION}0.self_attn.q_proj": 3, "^q_proj": 7},
        "alpha_pattern": {f"^{VISION}1.self_attn.v_proj": 5, "^text_model.*": 1},
    },
    "the first pattern wins": {
        "targets": QV,
        "rank_pattern": {"0.self_attn.q_proj": 3, "q_proj": 4, r".*\.v_proj": 5, "v_proj": 6},
        "alpha_pattern": {r"[qv]_proj": 9, "q_proj": 2},
    },
    "a pattern with a bar": {"targets": QV, "rank_pattern": {"q_proj|v_proj": 3, "v_proj": 4}},
    "patterns that saving puts in another order": {"targets": QV, "alpha_pattern": {"v_proj": 5, r".*v_proj": 9}},
    "rsLoRA with patterns": {"targets": QV, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
    "lora_bias": {"targets": ["q_proj", "fc1"], "lora_bias": True},
    "bias of all": {"targets": QV, "bias": "all"},
    "bias of its own layers": {"targets": QV, "bias": "lora_only"},
    "both kinds of bias": {"targets": QV, "bias": "lora_only", "lora_bias": True},
    "modules_to_save": {"targets": QV, "modules_to_save": ["visual_projection", "layer_norm1"]},
    "a targeted module inside modules_to_save": {"targets": [*QV, "fc1"], "modules_to_save": ["mlp"]},
    "target_parameters": {"targets": [], "target_parameters": ["mlp.fc1.weight", "0.self_attn.q_proj.weight"]},
    "rank of target_parameters": {
        "targets": [],
        "target_parameters": ["mlp.fc1.weight", "mlp.fc2.weight"],
        "rank_pattern": {"fc1.weight": 3},
        "alpha_pattern": {f"^{VISION}0.mlp.fc2.weight": 5},
    },
    "embeddings": {"targets": ["token_embedding", "position_embedding"]},
    "convolution": {"targets": ["patch_embedding"], "use_rslora": True},
    "layers_to_transform": {"targets": QV, "layers_to_transform": [1], "layers_pattern": "layers"},
    "all-linear": {"targets": "all-linear"},
    "exclude_modules": {"targets": QV, "exclude_modules": r"text_model.*"},
    "a regular expression": {"targets": r".*layers\.1\.(self_attn\.k_proj|mlp\.fc2)"},
    "gaussian": {"targets": QV, "init_lora_weights": "gaussian"},
    "orthogonal": {"targets": QV, "init_lora_weights": "orthogonal"},
    "no initialisation": {"targets": QV, "init_lora_weights": False},
    "a task type": {"targets": QV, "task_type": "FEATURE_EXTRACTION"},
}
OVER_OPEN_CLIP: dict[str, dict[str, Any]] = {
    "plain": {"targets": MLP},
    "both towers": {"targets": ["c_fc", "c_proj"], "r": 3, "use_rslora": True},
    "text tower": {"targets": r"transformer\.resblocks\.0\.mlp\.c_fc"},
    "patterns": {
        "targets": ["c_fc"],
        "rank_pattern": {"^transformer.resblocks.0.mlp.c_fc": 3, "resblocks.0.mlp.c_fc": 4},
        "alpha_pattern": {f"^{BLOCK}1.*": 1},
    },
    "lora_bias": {"targets": MLP, "lora_bias": True},
    "bias of all": {"targets": MLP, "bias": "all"},
    "bias of its own layers": {"targets": MLP, "bias": "lora_only"},
    "attention in modules_to_save": {"targets": MLP, "modules_to_save": [f"{BLOCK}0.attn", "ln_post"]},
    "in_proj_weight": {"targets": MLP, "target_parameters": [f"{BLOCK}{n}.attn.in_proj_weight" for n in (0, 1)]},
    "in_proj_weight by its end": {"targets": [], "target_parameters": ["attn.in_proj_weight"], "use_rslora": True},
    "rank of in_proj_weight": {
        "targets": MLP,
        "target_parameters": ["attn.in_proj_weight"],
        "rank_pattern": {f"^{BLOCK}0.attn.in_proj_weight": 5, "attn": 7},
        "alpha_pattern": {"in_proj_weight": 5},
    },
    "in_proj_weight and biases": {"targets": MLP, "target_parameters": ["attn.in_proj_weight"], "bias": "all"},
    "visual.proj": {"targets": [], "target_parameters": ["visual.proj"]},
    "visual.proj around layers": {"targets": MLP, "target_parameters": ["visual.proj"], "rank_pattern": {"c_fc": 3}},
    "visual.proj around an attention": {
        "targets": MLP,
        "target_parameters": ["visual.proj"],
        "modules_to_save": [f"visual.base_layer.transformer.resblocks.{n}.attn" for n in (0, 1)],
    },
    "two parameters of one module": {
        "targets": [],
        "target_parameters": ["visual.positional_embedding", "visual.proj"],
        "rank_pattern": {"visual.proj": 3},
    },
    "embedding and convolution": {"targets": ["token_embedding", "conv1"]},
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 30, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=16, num_labels=3, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=3, **sizes))


BUILDERS = {"gpt2": gpt2, "bert": bert, "vit": vit}
OVER_OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "a square Conv1D", {"targets": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ("gpt2", "fan_in_fan_out forgotten", {"targets": ["attn.c_proj"], "fan_in_fan_out": False}),
    ("gpt2", "a Conv1D with biases", {"targets": ["c_attn", "c_fc"], "bias": "lora_only", "task_type": "CAUSAL_LM"}),
    ("gpt2", "a square Conv1D as a parameter", {"targets": [], "target_parameters": ["attn.c_proj.weight"]}),
    ("gpt2", "all-linear", {"targets": "all-linear", "r": 3, "use_rslora": True}),
    ("gpt2", "a tied embedding", {"targets": ["wte"]}),
    ("bert", "a head", {"targets": ["query", "value"], "modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}),
    ("bert", "a head by the task", {"targets": ["query", "dense"], "task_type": "SEQ_CLS", "bias": "all"}),
    ("bert", "an embedding", {"targets": ["word_embeddings", "key"], "lora_bias": False}),
    ("vit", "renamed layers", {"targets": ["q_proj", "fc1"], "modules_to_save": ["classifier"]}),
    ("vit", "renamed layers with biases", {"targets": ["o_proj"], "bias": "all"}),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    folder = tmp_path_factory.mktemp("bases")
    found = {"transformers": transformers_base(folder / "t"), "open_clip": open_clip_base(folder / "o")}
    return found | {name: saved_base(folder / name, build) for name, build in BUILDERS.items()}


def check(base: Base, config: peft.PeftConfig, folder: Path) -> None:
    saved(base, config, folder)
    assert_same(TaskVector.from_adapter(folder, base=base.folder), by_peft(folder, base))


@pytest.mark.parametrize("case", OVER_TRANSFORMERS)
def test_lora_over_transformers_clip(case: str, bases: dict[str, Base], tmp_path: Path) -> None:
    check(bases["transformers"], lora(**OVER_TRANSFORMERS[case]), tmp_path)


@pytest.mark.parametrize("case", OVER_OPEN_CLIP)
def test_lora_over_open_clip(case: str, bases: dict[str, Base], tmp_path: Path) -> None:
    check(bases["open_clip"], lora(**OVER_OPEN_CLIP[case]), tmp_path)


@pytest.mark.parametrize(("model", "fields"), [pytest.param(m, f, id=f"{m}, {case}") for m, case, f in OVER_OTHERS])
def test_lora_over_other_models(model: str, fields: dict[str, Any], bases: dict[str, Base], tmp_path: Path) -> None:
    check(bases[model], lora(**fields), tmp_path)


@pytest.mark.parametrize("recorded", [True, False, None])
def test_fan_in_fan_out_is_that_of_the_layer_whatever_is_recorded(
    recorded: bool | None, bases: dict[str, Base], tmp_path: Path
) -> None:
    folder = saved(bases["gpt2"], lora(["c_proj", "c_attn"]), tmp_path)
    rewritten(folder, fan_in_fan_out=recorded)
    assert_same(TaskVector.from_adapter(folder, base=bases["gpt2"].folder), by_peft(folder, bases["gpt2"]))


def test_a_lora_may_use_the_names_of_the_base_s_file(bases: dict[str, Base], tmp_path: Path) -> None:
    """transformers calls some layers otherwise than the release that the adapter was trained with."""
    folder = saved(bases["vit"], lora(["q_proj"]), tmp_path)
    truth = by_peft(folder, bases["vit"])
    renamed(folder, lambda name: name.replace("vit.layers.", "vit.encoder.layer.").replace("q_proj", "attention.query"))
    rewritten(folder, target_modules=["query"])
    assert_same(TaskVector.from_adapter(folder, base=bases["vit"].folder), truth)


def test_in_proj_weight_and_visual_proj_in_one_file(bases: dict[str, Base], tmp_path: Path) -> None:
    """peft itself cannot hold both, but what such a file would mean is plain."""
    parts = [["attn.in_proj_weight"], ["visual.proj"]]
    folders = [
        saved(bases["open_clip"], lora([], target_parameters=part), tmp_path / str(index))
        for index, part in enumerate(parts)
    ]
    both: Any = sum(TaskVector.from_adapter(folder, base=bases["open_clip"].folder) for folder in folders)
    expected = dict(both)
    tensors = {name: tensor for folder in folders for name, tensor in tensors_of(folder).items()}
    rewritten(folders[0], tensors, target_parameters=[name for part in parts for name in part])
    with pytest.raises(AttributeError):
        by_peft(folders[0], bases["open_clip"])
    found = TaskVector.from_adapter(folders[0], base=bases["open_clip"].folder)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }


# --- other kinds


@pytest.mark.parametrize("kind", READ_BY_PEFT)
def test_is_read_as_peft_merges_it(kind: str, bases: dict[str, Base], tmp_path: Path) -> None:
    check(bases["transformers"], other(kind, target_modules=["q_proj", "fc1"], **READ_BY_PEFT[kind]), tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("LOHA", {"target_modules": QV, "modules_to_save": ["visual_projection"], "rank_pattern": {"q_proj": 2}}),
        ("LOHA", {"target_modules": ["patch_embedding", "fc2"], "use_effective_conv2d": True}),
        ("LOKR", {"target_modules": ["patch_embedding", "fc2"], "decompose_both": True}),
        ("VERA", {"target_modules": ["q_proj"], "r": 4, "save_projection": False}),
        ("ADALORA", {"target_modules": QV, "total_step": 10, "tinit": 1, "tfinal": 1, "bias": "all"}),
    ],
)
def test_options_of_other_kinds(kind: str, fields: dict[str, Any], bases: dict[str, Base], tmp_path: Path) -> None:
    check(bases["transformers"], other(kind, **fields), tmp_path)


@pytest.mark.parametrize("kind", ["LOHA", "LOKR"])
def test_other_kinds_over_open_clip(kind: str, bases: dict[str, Base], tmp_path: Path) -> None:
    check(bases["open_clip"], other(kind, target_modules=["c_fc"], r=4), tmp_path)


@pytest.mark.parametrize(
    ("model", "kind", "fields"),
    [
        ("gpt2", "VERA", {"target_modules": ["c_attn"], "r": 4}),
        ("gpt2", "VERA", {"target_modules": ["attn.c_proj"], "r": 4, "fan_in_fan_out": True}),
        ("gpt2", "ADALORA", {"target_modules": ["c_attn"], "total_step": 10, "tinit": 1, "tfinal": 1}),
        ("bert", "LOHA", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
        ("vit", "LOKR", {"target_modules": ["q_proj"], "modules_to_save": ["classifier"]}),
    ],
)
def test_other_kinds_over_other_models(
    model: str, kind: str, fields: dict[str, Any], bases: dict[str, Base], tmp_path: Path
) -> None:
    check(bases[model], other(kind, **fields), tmp_path)


# --- towers


def tower(base: Base, name: str) -> nn.Module:
    import transformers

    built: nn.Module = getattr(transformers, name).from_pretrained(base.folder).float().eval()
    return built


TOWERS = {
    "CLIPVisionModel": "encoder.",
    "CLIPVisionModelWithProjection": "vision_model.",
    "CLIPTextModel": "encoder.",
    "CLIPTextModelWithProjection": "text_model.",
}


def tower_adapter(base: Base, name: str, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """An adapter that was trained on one tower, and what it changes by the names of the tower's file."""
    adapted(tower(base, name), lora(["q_proj", "fc1"], modules_to_save=["layer_norm1"])).save_pretrained(folder)
    assert all(key.startswith(PREFIX + TOWERS[name]) for key in tensors_of(folder))
    return folder, by_peft(folder, base, tower(base, name))


@pytest.fixture(scope="module", params=[24, 16], ids=["other widths", "equal widths"])
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A model whose two towers have the same number of blocks, and the same width or not."""
    toy = TOY.but(width=request.param, blocks=1, mlp_ratio=4)
    return transformers_base(tmp_path_factory.mktemp("twins") / "base", toy)


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_s_adapter_finds_its_place_in_the_whole_model(name: str, twins: Base, tmp_path: Path) -> None:
    folder, truth = tower_adapter(twins, name, tmp_path)
    assert_same(TaskVector.from_adapter(folder, base=twins.folder), truth)


def test_towers_that_neither_shape_nor_class_tells_apart_are_an_error(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    twins = transformers_base(tmp_path_factory.mktemp("twins") / "base", TOY.but(blocks=1, mlp_ratio=4))
    folder, _ = tower_adapter(twins, "CLIPVisionModel", tmp_path)
    with pytest.raises(BaseMismatchError, match="several parts of its base") as caught:
        TaskVector.from_adapter(rewritten(folder, auto_mapping=None), base=twins.folder)
    assert "base=" in caught.value.remedy


@pytest.mark.parametrize(
    "fields", [{"targets": ["c_fc"]}, {"targets": [], "target_parameters": ["attn.in_proj_weight"]}]
)
@pytest.mark.parametrize("toy", [TOY.but(blocks=1), TOY.but(width=24), TOY.but(blocks=1, mlp_ratio=4)], ids=str)
def test_the_adapter_of_an_open_clip_tower_finds_its_place(fields: dict[str, Any], toy: Toy, tmp_path: Path) -> None:
    """Its names are those of the text tower, which stands at the top of the whole model."""
    base = open_clip_base(tmp_path / "base", toy)
    adapted(base.model().visual, lora(**fields)).save_pretrained(tmp_path / "adapter")
    truth = by_peft(tmp_path / "adapter", base, base.model().visual)
    vector = TaskVector.from_adapter(tmp_path / "adapter", base=base.folder)
    assert_same(vector, {f"visual.{name}": change for name, change in truth.items()})
