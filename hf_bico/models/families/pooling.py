"""How a sentence encoder makes one row of a text's tokens, as sentence-transformers keeps it beside the weights.

`modules.json` lists the modules behind the transformer: a pooling, and maybe dense layers and a normalisation. Dense
layers that end in as many numbers as the configuration names classes are a classification head, and no part of the
features. Knows files and tensors; no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hf_bico.errors import BrokenWeightsError, RepoError, UnsupportedModelError
from hf_bico.utils.files import folder_name, read_json, read_object

if TYPE_CHECKING:
    from torch import Tensor


MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
DENSE_WEIGHTS = "model.safetensors"
LENGTH_FILE = "sentence_bert_config.json"
_NUMBERS, _MOST_MODULES = range(1, 6), 20
SENTENCE_FILES = (
    *(MODULES_FILE, LENGTH_FILE, "config_sentence_transformers.json"),
    *(f"{number}_{kind}/config.json" for number in _NUMBERS for kind in ("Pooling", "Dense", "Normalize")),
    *(f"{number}_Dense/{DENSE_WEIGHTS}" for number in _NUMBERS),
)
"""The files of its modules, under the names that it gives them."""
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES = {
    "cls": "the first token",
    "max": "the maximum over tokens",
    "mean": "the mean over tokens",
    "mean_sqrt_len_tokens": "the sum over tokens by the root of their number",
    "weightedmean": "the mean over tokens, weighted by position",
    "lasttoken": "the last token",
}
_TRANSFORMER, _POOLING, _DENSE, _NORMALIZE, _DROPOUT = "Transformer", "Pooling", "Dense", "Normalize", "Dropout"
ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}
"""The function of torch behind the class that a dense layer names."""


@dataclass(frozen=True)
class DenseLayer:
    """W x + b, and what follows it: a function of torch, by name."""

    weight: Tensor
    bias: Tensor | None
    activation: str | None = None

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Weight and bias; without a bias, zeros."""
        return self.weight, self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias

    def __call__(self, rows: Tensor) -> Tensor:
        import torch

        weight, bias = (part.to(rows) for part in self.parts)
        outputs = rows @ weight.T + bias
        return outputs if self.activation is None else getattr(torch, self.activation)(outputs)


@dataclass(frozen=True)
class Pooling:
    """One row for each text: its tokens pooled in one or several ways, side by side, then dense layers and norms."""

    modes: tuple[str, ...]
    steps: tuple[DenseLayer | None, ...] = ()
    """What follows the pooling: dense layers, and None for a normalisation to length 1."""
    head: tuple[DenseLayer, ...] = ()
    """The dense layers of a classification head, if they end the list."""
    max_length: int | None = None
    """The most tokens that it reads of a text."""

    def __str__(self) -> str:
        return " and ".join(_MODES[mode] for mode in self.modes)

    def rows(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Pool (samples, tokens, width) over the real tokens, in single precision at least."""
        import torch

        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        pooled = torch.cat([_pooled(mode, wide, mask) for mode in self.modes], -1)
        for step in self.steps:
            if step is not None and step.weight.shape[1] != pooled.shape[1]:
                raise BrokenWeightsError(
                    f"a dense layer of the encoder reads {step.weight.shape[1]} numbers, and gets {pooled.shape[1]}",
                    "copy or download the model again",
                )
            pooled = torch.nn.functional.normalize(pooled, dim=-1) if step is None else step(pooled)
        return pooled


def _pooled(mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
    import torch

    rows, real = torch.arange(len(mask), device=mask.device), mask.unsqueeze(-1)
    places = mask.long().cumsum(1)
    if mode == "cls":
        return hidden[rows, mask.long().argmax(1)]
    if mode == "lasttoken":
        return hidden[rows, places.argmax(1)]
    if mode == "max":
        return hidden.masked_fill(~real, float("-inf")).amax(1)
    weights = (places if mode == "weightedmean" else mask.long()).unsqueeze(-1) * real.to(hidden)
    counts = weights.sum(1)
    return (hidden * weights).sum(1) / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)


def declares_pooling(folder: Path, names: Mapping[str, int]) -> bool:
    """Tell whether a model's files say how its tokens are pooled; `names` are those of its repo."""
    return any(name in names or (folder / name).is_file() for name in (MODULES_FILE, POOLING_FILE))


def read_pooling(folder: Path) -> Pooling | None:
    """Read how a model's tokens are pooled; None if its files do not say."""
    if not declares_pooling(folder, {}):
        return None
    try:
        modes, steps = _read_modules(folder)
        length = read_object(folder / LENGTH_FILE).get("max_seq_length") if (folder / LENGTH_FILE).is_file() else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RepoError(
            f"the modules of '{folder_name(folder)}' that sentence-transformers lists cannot be read: {error}",
            f"copy {MODULES_FILE} and the folders that it names again",
        ) from error
    head = _head_of(folder, steps)
    kept = steps[: len(steps) - len(head)]
    return Pooling(modes, tuple(kept), tuple(head), length if type(length) is int and length > 0 else None)


def _read_modules(folder: Path) -> tuple[tuple[str, ...], list[DenseLayer | None]]:
    listed = [{"type": _POOLING, "path": "1_Pooling"}]
    if (folder / MODULES_FILE).is_file():
        listed = list(read_json(folder / MODULES_FILE))
    if len(listed) > _MOST_MODULES:
        raise ValueError(f"there are more than {_MOST_MODULES}")
    modes: tuple[str, ...] = ()
    steps: list[DenseLayer | None] = []
    for module in listed:
        kind, path = str(module["type"]).rpartition(".")[2], PurePosixPath(str(module.get("path", "")))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"'{path}' is no folder of the model")
        if kind == _POOLING and not modes:
            modes = _modes(read_object(folder / path / "config.json"))
        elif kind == _DENSE and modes:
            steps.append(_dense(folder, folder / path))
        elif kind == _NORMALIZE and modes:
            steps.append(None)
        elif kind not in (_TRANSFORMER, _DROPOUT):
            raise UnsupportedModelError(
                f"'{folder_name(folder)}' computes its sentence embeddings with a module of the kind '{kind[:40]}'",
                "use an encoder of a transformer, a pooling, dense layers and a normalisation",
            )
    if not modes:
        raise ValueError("there is no pooling among them")
    return modes, steps


def _modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("pooling_mode", [mode for name, mode in _LEGACY_MODES.items() if config.get(name)] or "mean")
    modes = (given,) if isinstance(given, str) else tuple(given)
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown or not modes:
        raise ValueError(f"the pooling mode is {unknown[:1] or 'missing'}, and none of {', '.join(_MODES)}")
    return modes


def _dense(folder: Path, place: Path) -> DenseLayer:
    from hf_bico.models.checkpoints import FileCheckpoint

    config = read_object(place / "config.json")
    named = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if named not in ACTIVATIONS or config.get("use_residual"):
        raise UnsupportedModelError(
            f"a dense layer of '{folder_name(folder)}' has the activation '{named[:40]}' or a residual connection",
            f"use an encoder with one of: {', '.join(ACTIVATIONS)}",
        )
    if not (place / DENSE_WEIGHTS).is_file():
        raise BrokenWeightsError(
            f"the dense layer '{place.name}' of '{folder_name(folder)}' has no {DENSE_WEIGHTS}",
            "save the model again with sentence-transformers, which writes safetensors",
        )
    stored = FileCheckpoint([place / DENSE_WEIGHTS])
    weight = stored.tensor("linear.weight")
    bias = stored.tensor("linear.bias") if "linear.bias" in stored.shapes else None
    stored.close()
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"'{place.name}' holds no matrix with a bias for each row")
    return DenseLayer(weight, bias, ACTIVATIONS[named])


def _head_of(folder: Path, steps: Sequence[DenseLayer | None]) -> list[DenseLayer]:
    """Return the last dense layers if they are a classification head: linear, with a row for each named class."""
    config = folder / "config.json"
    classes = read_object(config).get("id2label") if config.is_file() else None
    last = steps[-1] if steps else None
    if last is None or not isinstance(classes, dict) or last.activation is not None or len(last.weight) != len(classes):
        return []
    before = steps[-2] if len(steps) > 1 else None
    return [last] if before is None or before.activation is None else [before, last]


def write_head(folder: Path, layers: Sequence[DenseLayer], replacing: Pooling) -> None:
    """Add the layers of a classification head to the modules in a folder, in place of those that it had."""
    from hf_bico.models.checkpoints import save_tensors

    kinds = {None: "linear.Identity", "tanh": "activation.Tanh", "relu": "activation.ReLU"}
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.models.{_TRANSFORMER}"}]
    listed += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": f"sentence_transformers.models.{_POOLING}"}]
    if (folder / MODULES_FILE).is_file():
        listed = list(read_json(folder / MODULES_FILE))
    listed = listed[: len(listed) - len(replacing.head)]
    for layer in layers:
        number = len(listed)
        place = folder / f"{number}_{_DENSE}"
        place.mkdir(exist_ok=True)
        weight, bias = layer.parts
        rows, columns = weight.shape
        save_tensors({"linear.weight": weight, "linear.bias": bias}, place / DENSE_WEIGHTS, {"format": "pt"})
        activation = f"torch.nn.modules.{kinds[layer.activation]}"
        config = {"in_features": columns, "out_features": rows, "bias": True, "activation_function": activation}
        _write(config, place / "config.json")
        kind = f"sentence_transformers.models.{_DENSE}"
        listed.append({"idx": number, "name": str(number), "path": place.name, "type": kind})
    _write(listed, folder / MODULES_FILE)


def _write(content: Any, file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
