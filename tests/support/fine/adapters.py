"""Cases of adapters that look fine: their factors, their scaling, and the base that they were trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from hf_bico.errors import AdapterError, BaseMismatchError, ImplausibleTaskVectorError, UnsupportedAdapterError
from support.fine.cases import TASK, Outcome, Refused, Right, Said, Stage, State, case, reconfigure, rewrite
from support.transformers_world import LoraRecipe, as_transformers, train_lora

ADAPTERS = "Adapters"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RECIPE = LoraRecipe(modules=("q_proj", "v_proj", "out_proj", "fc1", "fc2"))


def _base(stage: Stage) -> Path:
    """The base in transformers' layout."""
    return stage.once("lora base", lambda: as_transformers(stage.base, stage.place("narrow")))


def _lora(stage: Stage, **fields: object) -> Path:
    """A copy of a LoRA that peft trained on it, of rank 8 and alpha 16, with other fields of its configuration."""
    trained = stage.once("lora", lambda: train_lora(_base(stage), stage.place("lora"), TASK, RECIPE))
    folder = stage.copied(trained)
    reconfigure(folder / CONFIG, **fields)
    return folder


def _clean(stage: Stage) -> Outcome:
    return stage.once("clean lora", lambda: stage.port(_lora(stage), base=_base(stage)))


@case(
    ADAPTERS,
    "an adapter whose tensors fit",
    "it was trained on another base of the same shape, and names it",
    Said("lora names the base trained-on, and narrow was given: is it the same model?"),
)
def adapter_names_another_folder(stage: Stage) -> Outcome:
    other = as_transformers(stage.world.fine_tuned("narrow", "rotated-90"), stage.place("trained-on"))
    return stage.port(_lora(stage, base_model_name_or_path=str(other)), base=_base(stage))


@case(
    ADAPTERS,
    "an adapter whose tensors fit",
    "it was trained on another base of the same shape, and names none",
    Said(
        "The fine-tuned source gets 4.9% of 597 samples right, as chance would of 10 classes: "
        "check that it was fine-tuned on these labels and on this base, and that the class names "
        "stand in the labels' order."
    ),
)
def adapter_of_a_stranger(stage: Stage) -> Outcome:
    stranger = stage.once("stranger", lambda: _stranger(stage))
    return stage.port(_lora(stage), base=stranger, evaluate=True)


def _stranger(stage: Stage) -> Path:
    """A model of the base's shape with other directions in every layer: its rows in another order."""
    folder = stage.copied(_base(stage), "stranger")
    generator = torch.Generator().manual_seed(0)

    def turned(state: State) -> State:
        order = torch.randperm(32, generator=generator)
        return {
            name: tensor[:, order]
            if name.startswith("vision") and tensor.ndim == 2 and tensor.shape[1] == 32
            else tensor
            for name, tensor in state.items()
        }

    rewrite(folder / "model.safetensors", turned)
    return folder


@case(
    ADAPTERS,
    "an adapter with all its tensors",
    "its factors A and B have each other's names",
    Refused(
        AdapterError,
        (
            "the factors 'base_model.model.encoder.layers.0.mlp.fc1.lora_A.weight' and "
            "'base_model.model.encoder.layers.0.mlp.fc1.lora_B.weight' of 'lora' are (64, 8) and (8, "
            "32): no product of a plain LoRA"
        ),
    ),
)
def factors_swapped(stage: Stage) -> Outcome:
    folder = _lora(stage)
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}

    def swapped(state: State) -> State:
        return {".".join(other.get(part, part) for part in name.split(".")): t for name, t in state.items()}

    rewrite(folder / WEIGHTS, swapped)
    return stage.port(folder, base=_base(stage))


@case(
    ADAPTERS,
    "an adapter with all its tensors",
    "each of its factors is transposed",
    Refused(
        AdapterError,
        (
            "the factors 'base_model.model.encoder.layers.0.mlp.fc1.lora_A.weight' and "
            "'base_model.model.encoder.layers.0.mlp.fc1.lora_B.weight' of 'lora' are (32, 8) and (8, "
            "64): no product of a plain LoRA"
        ),
    ),
)
def factors_transposed(stage: Stage) -> Outcome:
    folder = _lora(stage)
    rewrite(folder / WEIGHTS, lambda state: {name: tensor.T for name, tensor in state.items()})
    return stage.port(folder, base=_base(stage))


@case(
    ADAPTERS,
    "an adapter's configuration",
    "its rank is not that of the factors",
    Refused(AdapterError, "'encoder.layers.0.mlp.fc1' of 'lora' has rank 8, and its configuration says 16"),
)
def rank_of_another_adapter(stage: Stage) -> Outcome:
    return stage.port(_lora(stage, r=16), base=_base(stage))


@case(
    ADAPTERS,
    "an adapter's configuration",
    "`lora_alpha` is missing, and peft takes 8",
    Right(
        clean=lambda stage: stage.port(_lora(stage, lora_alpha=8), base=_base(stage)),
        because="as peft has it, the change is that of alpha 8",
    ),
)
def alpha_missing(stage: Stage) -> Outcome:
    return stage.port(_lora(stage, lora_alpha=None), base=_base(stage))


@case(
    ADAPTERS,
    "an adapter's configuration",
    "`lora_alpha` is a text",
    Refused(AdapterError, "adapter_config.json of 'lora' is not that of a LoRA: an alpha is '16'"),
)
def alpha_is_a_text(stage: Stage) -> Outcome:
    return stage.port(_lora(stage, lora_alpha="16"), base=_base(stage))


@case(
    ADAPTERS,
    "alpha 16 at rank 8, as ever",
    "`use_rslora`: its scaling is 16 over the root of 8",
    Right(
        clean=lambda stage: stage.port(_lora(stage, lora_alpha=16 * 8**0.5), base=_base(stage)),
        because="the root is taken",
    ),
)
def root_scaled(stage: Stage) -> Outcome:
    return stage.port(_lora(stage, use_rslora=True), base=_base(stage))


@case(
    ADAPTERS,
    "a LoRA's factors",
    "it is a DoRA, whose magnitudes were not saved",
    Refused(UnsupportedAdapterError, "'lora' is a DoRA, which rescales the base's own weights"),
)
def dora(stage: Stage) -> Outcome:
    return stage.port(_lora(stage, use_dora=True), base=_base(stage))


@case(
    ADAPTERS,
    "alpha 16",
    "it is 16000",
    Refused(
        ImplausibleTaskVectorError,
        (
            "the fine-tuned model differs from its base by 11786% of the weights' own norm, which "
            "fine-tuning does not do"
        ),
    ),
)
def alpha_times_a_thousand(stage: Stage) -> Outcome:
    return stage.port(_lora(stage, lora_alpha=16000), base=_base(stage))


@case(
    ADAPTERS,
    "a fine-tuned model's folder",
    "an adapter lies beside the model that it was merged into",
    Said("lora holds a whole model beside its adapter: the adapter was taken."),
)
def adapter_beside_a_model(stage: Stage) -> Outcome:
    folder = _lora(stage)
    for file in _base(stage).iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return stage.port(folder, base=_base(stage))


@case(
    ADAPTERS,
    "an adapter",
    "the base is wider than the one it was trained on",
    Refused(
        BaseMismatchError,
        ("'vision_model.encoder.layers.0.mlp.fc1.weight' is (64, 32) in 'lora' and (96, 48) in its base"),
    ),
)
def adapter_of_another_width(stage: Stage) -> Outcome:
    return stage.port(_lora(stage), base=as_transformers(stage.target, stage.place("wide")))
