"""Refuse by name what is no model in safetensors or pickles: other formats, other trainers' shards, image generators.

Looks at the names of files and tensors only, and says what to use instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hf_bico.errors import BicoError, UnsupportedAdapterError, UnsupportedModelError, WeightsNotFoundError
from hf_bico.hub.client import RepoFiles
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.models.checkpoints import ADAPTER_FILE, listed

_GENERATORS = "hf-bico carries CLIPs, language models, text encoders and image classifiers, not image generators"
_MOST_LISTED = 10_000


@dataclass(frozen=True)
class _Format:
    """What files or tensors with such names are, and what to do instead; `{called}` is the repo."""

    names: re.Pattern[str]
    cause: str
    remedy: str
    error: type[BicoError] = WeightsNotFoundError

    def refusal(self, found: Collection[str], called: str) -> BicoError:
        return self.error(self.cause.format(called=called, found=listed(found, 2)), self.remedy)


def _format(names: str, cause: str, remedy: str, error: type[BicoError] = WeightsNotFoundError) -> _Format:
    return _Format(re.compile(names), cause, remedy, error)


_DIFFUSERS = (
    "{called} is an image generator in diffusers' format ({found})",
    f"{_GENERATORS}: name such a model",
    UnsupportedModelError,
)
_PIPELINES = (
    _format(r"model_index\.json|diffusion_pytorch_model.*", *_DIFFUSERS),
    _format(
        r"pytorch_lora_weights\.(?:safetensors|bin)",
        "{called} is a LoRA of an image generator in diffusers' format ({found})",
        f"{_GENERATORS}: name a PEFT adapter of such a model",
        UnsupportedAdapterError,
    ),
)
"""Formats that are told from a file of that name, whatever else is there."""

_FORMATS = (
    _format(r".*/diffusion_pytorch_model.*", *_DIFFUSERS),
    _format(
        r".*\.gguf|(?:.*/)?ggml.*\.bin",
        "{called} holds its weights in llama.cpp's format ({found}), which is mostly quantised",
        "name the model in safetensors that it was made from; its card usually says which",
    ),
    _format(
        r".*\.distcp",
        "{called} holds the shards of an FSDP training run ({found}), and no whole model",
        "join them: 'accelerate merge-weights FOLDER OUT', with the folder of the .distcp files; then name OUT, with "
        "the model's configuration in it",
    ),
    _format(
        r"(?:.*/)?(?:bf16_|fp16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt",
        "{called} holds the shards of a DeepSpeed training run ({found}), and no whole model",
        "join them with the script that DeepSpeed left there: 'python zero_to_fp32.py . OUT'; then name OUT, with the "
        "model's configuration in it",
    ),
    _format(
        r".*\.onnx|.*\.onnx_data",
        "{called} holds its weights as ONNX ({found}), a graph without the names of layers",
        "name the PyTorch model that it was exported from",
    ),
    _format(
        r"(?:.*/)?openvino_.*\.(?:xml|bin)",
        "{called} holds its weights in OpenVINO's format ({found})",
        "name the PyTorch model that it was exported from",
    ),
    _format(
        r".*\.h5|.*\.keras|.*\.ckpt\.(?:index|meta|data-.*)|(?:.*/)?saved_model\.pb|.*\.tflite",
        "{called} holds its weights in TensorFlow's format ({found})",
        "name a repo that holds the model in PyTorch; or convert it with transformers 4: "
        "AutoModel.from_pretrained(FOLDER, from_tf=True).save_pretrained(OUT)",
    ),
    _format(
        r".*\.msgpack",
        "{called} holds its weights in Flax's format ({found})",
        "name a repo that holds the model in PyTorch; or convert it with transformers 4: "
        "AutoModel.from_pretrained(FOLDER, from_flax=True).save_pretrained(OUT)",
    ),
    _format(
        r".*\.mlmodel|.*\.mlpackage(?:/.*)?",
        "{called} holds its weights in Core ML's format ({found})",
        "name the PyTorch model that it was exported from",
    ),
    _format(
        r".*\.nemo", "{called} is a NeMo archive ({found})", "export the model from NeMo to transformers' format first"
    ),
)
"""Formats that are told where no weights can be read."""

_TENSORS = (
    _format(
        r"lora_(?:unet|te\d?|transformer)_.*|.*\.lora_(?:down|up)\.weight",
        "{called} is a LoRA of an image generator in kohya's format (its tensors look like '{found}')",
        f"{_GENERATORS}: name a PEFT adapter of such a model",
        UnsupportedAdapterError,
    ),
    _format(
        r"(?:unet|text_encoder(?:_\d)?|transformer\.(?:single_)?transformer_blocks)\..*[._]lora[._].*",
        "{called} is a LoRA of an image generator in diffusers' format (its tensors look like '{found}')",
        f"{_GENERATORS}: name a PEFT adapter of such a model",
        UnsupportedAdapterError,
    ),
    _format(
        r".*\.lora_[ab]",
        "{called} is a LoRA in MLX's format (its tensors look like '{found}')",
        "train or save it with peft; or merge it with 'mlx_lm.fuse --de-quantize' and name the whole model",
        UnsupportedAdapterError,
    ),
    _format(
        r"(?:model\.diffusion_model|first_stage_model|double_blocks|joint_blocks)\..*",
        "{called} is an image generator in one file (its tensors look like '{found}')",
        f"{_GENERATORS}: name such a model",
        UnsupportedModelError,
    ),
    _format(
        r".*\.(?:qweight|qzeros)",
        "the weights of {called} are quantised by GPTQ or AWQ (its tensors look like '{found}')",
        "name the model that it was quantised from",
        UnsupportedModelError,
    ),
    _format(
        r"(?:.*\.)?_?flat_param(?:_\d+)?",
        "{called} holds an FSDP training run's weights in one row each (its tensors look like '{found}')",
        "save a full state dict: FSDP's FullStateDictConfig, or accelerate's FULL_STATE_DICT",
        WeightsNotFoundError,
    ),
)


def refuse_pipeline(names: Iterable[str], called: str) -> None:
    """Refuse an image generator, by the names of a repo's files."""
    _refuse(_PIPELINES, names, called)


def refuse_format(place: RepoFiles, called: str) -> None:
    """Refuse a repo without weights that can be read, if it holds some in a known format."""
    names = _listing(place)
    _refuse(_FORMATS, names, called)
    if ADAPTER_FILE in names and ADAPTER_CONFIG not in names:
        raise WeightsNotFoundError(
            f"{called} holds {ADAPTER_FILE} and no {ADAPTER_CONFIG}", "copy or download the adapter again"
        )


def refuse_tensors(names: Iterable[str], called: str) -> None:
    """Refuse tensors that are known by their names to be no model's, or quantised."""
    for one in _TENSORS:
        name = next((name for name in names if one.names.fullmatch(name)), None)
        if name is not None:
            raise one.refusal([name], called)


def _refuse(formats: Iterable[_Format], names: Iterable[str], called: str) -> None:
    for one in formats:
        found = [name for name in names if one.names.fullmatch(name)]
        if found:
            raise one.refusal(found, called)


def _listing(place: RepoFiles) -> list[str]:
    """List a repo's files, of a local folder also those one level below."""
    names = list(place.sizes)
    if place.repo is None:
        for entry in list(os.scandir(place.folder))[:_MOST_LISTED]:
            if os.path.isdir(entry.path) and os.access(entry.path, os.R_OK | os.X_OK):
                names += [f"{entry.name}/{name}" for name in os.listdir(entry.path)[:_MOST_LISTED]]
    return names
