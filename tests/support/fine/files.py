"""Cases of folders, task vectors and records that look fine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import hf_bico
from hf_bico.errors import (
    BaseMismatchError,
    BicoError,
    BrokenWeightsError,
    PushError,
    UnsupportedAdapterError,
    UnsupportedModelError,
    WeightsNotFoundError,
)
from support.fine.cases import FILE, Outcome, Refused, Right, Said, Stage, case, outcome_of, rewrite
from support.paper import PAPER
from support.transformers_world import as_transformers

FILES = "Files"
VECTORS = "Task vectors and records"


@case(
    FILES,
    "a folder with the weights of both libraries",
    "the two files hold different models",
    Said(
        "narrow-inverted holds two different models: open_clip_model.safetensors, which was used,"
        " and model.safetensors."
    ),
)
def two_layouts_that_differ(stage: Stage) -> Outcome:
    tuned = stage.copied(stage.tuned)
    other = as_transformers(stage.world.fine_tuned("narrow", "rotated-90"), stage.place("other"))
    for file in other.iterdir():
        if not (tuned / file.name).exists():
            shutil.copy(file, tuned)
    return stage.port(tuned)


@case(FILES, "a folder with the weights of both libraries", "nothing: the two files hold the same model", Right())
def two_layouts_that_agree(stage: Stage) -> Outcome:
    tuned = stage.copied(stage.tuned)
    for file in as_transformers(stage.tuned, stage.place("other")).iterdir():
        if not (tuned / file.name).exists():
            shutil.copy(file, tuned)
    return stage.port(tuned)


@case(FILES, "a model.safetensors", "stale shards of another model and their index lie beside it", Right())
def stale_shards(stage: Stage) -> Outcome:
    tuned = stage.copied(stage.tuned)
    shard = tuned / "open_clip_model-00001-of-00001.safetensors"
    save_file(load_file(stage.base / FILE), shard)
    names = ",".join(f'"{name}": "{shard.name}"' for name in load_file(shard))
    (tuned / f"{FILE}.index.json").write_text(f'{{"weight_map": {{{names}}}}}')
    return stage.port(tuned)


@case(FILES, "weights in safetensors", "their names begin with `module._orig_mod.`: DDP around torch.compile", Right())
def names_of_a_training_run(stage: Stage) -> Outcome:
    return stage.port(
        stage.altered(stage.tuned, lambda state: {f"module._orig_mod.{name}": t for name, t in state.items()})
    )


def _without_weights(stage: Stage) -> Path:
    folder = stage.copied(stage.tuned)
    (folder / FILE).unlink()
    return folder


@case(
    FILES,
    "`epoch_5.pt` of open_clip's own training, with `--allow-pickle`",
    "the weights are one section of it, under names that begin with `module.`",
    Right(
        sentence="The weights of narrow-inverted are pickled: tensors alone were read from epoch_5.pt.",
    ),
)
def a_checkpoint_of_open_clips_training(stage: Stage) -> Outcome:
    folder = _without_weights(stage)
    state = {f"module.{name}": tensor for name, tensor in load_file(stage.tuned / FILE).items()}
    torch.save({"epoch": 5, "name": "run", "state_dict": state, "optimizer": {}}, folder / "epoch_5.pt")
    return stage.port(folder, allow_pickle=True)


@case(
    FILES,
    "pickles of a training run, with `--allow-pickle`",
    "there are several, and none is named as the model",
    Refused(
        WeightsNotFoundError,
        "'narrow-inverted' holds several pickles (epoch_1.pt, epoch_2.pt), and none has the name of a whole model",
    ),
)
def several_pickles(stage: Stage) -> Outcome:
    folder = _without_weights(stage)
    for epoch in (1, 2):
        torch.save({"state_dict": load_file(stage.tuned / FILE)}, folder / f"epoch_{epoch}.pt")
    return stage.port(folder, allow_pickle=True)


class Settings:
    """An object that a training script keeps with its weights."""


@case(
    FILES,
    "Lightning's `last.ckpt`, with `--allow-pickle`",
    "it also holds objects of the training script",
    Refused(
        BrokenWeightsError,
        "'last.ckpt' cannot be read as tensors alone: it also holds objects of 'support.fine.files.Settings'",
    ),
)
def objects_beside_the_weights(stage: Stage) -> Outcome:
    folder = _without_weights(stage)
    state = {f"model.{name}": tensor for name, tensor in load_file(stage.tuned / FILE).items()}
    torch.save({"state_dict": state, "hyper_parameters": Settings()}, folder / "last.ckpt")
    return stage.port(folder, allow_pickle=True)


_SOURCE = "the fine-tuned model 'narrow-inverted'"
_OTHERS: dict[str, tuple[str, str, type[BicoError], str]] = {
    "model-q4_k_m.gguf": (
        "a folder for llama.cpp",
        "its weights are GGUF",
        WeightsNotFoundError,
        f"{_SOURCE} holds its weights in llama.cpp's format (model-q4_k_m.gguf), which is mostly quantised",
    ),
    "onnx/model.onnx": (
        "an exported model",
        "its weights are ONNX",
        WeightsNotFoundError,
        f"{_SOURCE} holds its weights as ONNX (onnx/model.onnx), a graph without the names of layers",
    ),
    "tf_model.h5": (
        "a model's repo",
        "its weights are TensorFlow's",
        WeightsNotFoundError,
        f"{_SOURCE} holds its weights in TensorFlow's format (tf_model.h5)",
    ),
    "flax_model.msgpack": (
        "a model's repo",
        "its weights are Flax's",
        WeightsNotFoundError,
        f"{_SOURCE} holds its weights in Flax's format (flax_model.msgpack)",
    ),
    "global_step100/zero_pp_rank_0_mp_rank_00_model_states.pt": (
        "the output of a training with DeepSpeed",
        "each process has written its own part of the weights",
        WeightsNotFoundError,
        f"{_SOURCE} holds the shards of a DeepSpeed training run "
        "(global_step100/zero_pp_rank_0_mp_rank_00_model_states.pt), and no whole model",
    ),
    "pytorch_model_fsdp_0/__0_0.distcp": (
        "the output of a training with FSDP",
        "each process has written its own part of the weights",
        WeightsNotFoundError,
        f"{_SOURCE} holds the shards of an FSDP training run (pytorch_model_fsdp_0/__0_0.distcp), and no whole model",
    ),
    "model_index.json": (
        "a repo of diffusers",
        "it is an image generator",
        UnsupportedModelError,
        f"{_SOURCE} is an image generator in diffusers' format (model_index.json)",
    ),
}


def _in_another_format(file: str, looks: str, is_not: str, error: type[BicoError], sentence: str) -> None:
    def another_format(stage: Stage) -> Outcome:
        folder = _without_weights(stage)
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"{}")
        return stage.port(folder)

    another_format.__name__ = f"another_format_{Path(file).stem}"
    case(FILES, looks, is_not, Refused(error, sentence))(another_format)


for _file, (_looks, _is_not, _error, _sentence) in _OTHERS.items():
    _in_another_format(_file, _looks, _is_not, _error, _sentence)


@case(
    FILES,
    "a LoRA in one file of safetensors",
    "it is an image generator's, in kohya's format",
    Refused(
        UnsupportedAdapterError,
        f"{_SOURCE} is a LoRA of an image generator in kohya's format (its tensors look like "
        "'lora_te_text_model_encoder_layers_0_mlp_fc1.alpha')",
    ),
)
def a_lora_of_kohya(stage: Stage) -> Outcome:
    folder = _without_weights(stage)
    name = "lora_te_text_model_encoder_layers_0_mlp_fc1"
    factors = {f"{name}.lora_down.weight": torch.ones(2, 4), f"{name}.lora_up.weight": torch.ones(4, 2)}
    save_file({f"{name}.alpha": torch.tensor(2.0), **factors}, folder / "style.safetensors")
    return stage.port(folder)


def _saved_vector(stage: Stage) -> Path:
    vector = hf_bico.TaskVector.from_models(stage.tuned, base=stage.base)
    return vector.save(stage.place("vector")).parent


@case(
    VECTORS,
    "a saved task vector",
    "it was made for another model of the same shape",
    Said("vector was made for other weights than those of narrow-rotated-90."),
)
def vector_of_another_base(stage: Stage) -> Outcome:
    return outcome_of(hf_bico.apply(_saved_vector(stage), to=stage.world.fine_tuned("narrow", "rotated-90")))


@case(
    VECTORS,
    "two saved task vectors",
    "they were made for different models",
    Refused(
        BaseMismatchError, "the task vectors were made for different weights, of 'narrow' and of 'narrow-rotated-90'"
    ),
)
def vectors_of_two_bases(stage: Stage) -> Outcome:
    other = hf_bico.TaskVector.from_models(stage.tuned, base=stage.world.fine_tuned("narrow", "rotated-90"))
    vectors = [_saved_vector(stage), other.save(stage.place("other")).parent]
    sum(hf_bico.TaskVector.load(vector) for vector in vectors)
    raise AssertionError("they were added")


@case(
    VECTORS,
    "a saved task vector",
    "it is written as an adapter of another model of the same shape",
    Refused(BaseMismatchError, "the task vector was made for other weights than those of 'narrow-rotated-90'"),
)
def vector_as_an_adapter_of_another_base(stage: Stage) -> Outcome:
    vector = hf_bico.TaskVector.load(_saved_vector(stage))
    vector.save_adapter(stage.place("adapter"), base=stage.world.fine_tuned("narrow", "rotated-90"))
    raise AssertionError("it was written")


@case(
    VECTORS,
    "an extracted adapter",
    "it was taken over a base that has nothing to do with the fine-tune",
    Said(
        "Is other its base? The fine-tuned model differs from its base by 140% of the weights' "
        "own norm, which fine-tuning does not do."
    ),
)
def extracted_over_a_stranger(stage: Stage) -> Outcome:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        base = stage.altered(
            stage.base,
            lambda state: {n: t[torch.randperm(len(t))] if t.ndim == 2 else t for n, t in state.items()},
            "other",
        )
    return outcome_of(hf_bico.extract(stage.tuned, base, rank=4))


def _written_port(stage: Stage) -> Path:
    where: dict[str, Any] = {"to": stage.target, "base": stage.base, "data": stage.data}
    return hf_bico.port(stage.tuned, **where, n=100, evaluate=False, **PAPER).save(stage.place("ported"))


@case(
    VECTORS,
    "a port with its record",
    "its weights were changed afterwards",
    Refused(PushError, "'open_clip_model.safetensors' in 'ported' is not the file that the record speaks of"),
)
def weights_changed_after_the_record(stage: Stage) -> Outcome:
    from hf_bico.porting.publish import push_folder

    folder = _written_port(stage)
    rewrite(folder / FILE, lambda state: {**state, "logit_scale": state["logit_scale"] + 1})
    push_folder(folder, "user/ported")
    raise AssertionError("it was pushed")
