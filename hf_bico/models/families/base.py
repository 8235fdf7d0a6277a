"""The family of a model: how one kind of model lays out its blocks, sites, text side and head.

A family reads layouts from names and shapes, without torch, so that a plan needs no weights. Kinds of models that no
family can carry are refused here by name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bico.errors import BrokenWeightsError, RepoError, UnsuitableMethodError, UnsupportedModelError
from hf_bico.models.layout import Layout, Site, Slot, Tokens
from hf_bico.utils.files import folder_name, read_object, without_folder
from hf_bico.utils.samples import IMAGES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_bico.models.families.live import LiveModel


Shapes = Mapping[str, tuple[int, ...]]

NORM, EMBEDDINGS, TIED, NO_SITE = "LayerNorm", "embeddings", "tied weights", "no linear site"
"""Reasons for tensors to stay behind in any kind of model."""
TEXT_TOWER = "text tower"
"""The reason for tensors of a CLIP's text side to stay behind."""
VISION_TOWER = "vision tower"
"""The reason for its other sites, if the text side alone is carried."""
ZERO_SHOT_TASK = "zero-shot-image-classification"
"""The pipeline tag of CLIPs, whose cards show class names as prompts."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
LABELS = ("id2label", "label2id")
"""The fields of a configuration that list as many entries as there are classes."""
MOST_FIELDS = 20_000
"""All others, in sections too: a hundred times those of any real one."""
FIT_INSTEAD = "fit a head to the calibration samples with --probe"
"""The remedy where a classification head cannot be carried."""
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt")


@dataclass(frozen=True)
class DeviceSpread:
    """accelerate's rule for spreading a model over several devices; `memory` is the most bytes on each GPU."""

    rule: str
    memory: int | None = None


@dataclass(frozen=True)
class HeadModules:
    """The classification head of one model type: the class that has it, and the names of its layers there."""

    model_class: str
    out: str = "classifier"
    hidden: str | None = None
    activation: str | None = None
    pooler: str | None = None
    """The layer between the first token and the head, if the class has one: a tanh follows it."""

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.out,) if self.hidden is None else (self.hidden, self.out)

    @property
    def saved_modules(self) -> list[str]:
        """The modules that hold these layers, as peft names what it saves in full."""
        return sorted({re.sub(r"^bert\.", "", name).partition(".")[0] for name in self.layers})

    @property
    def by_pooler(self) -> HeadModules:
        """The same with the pooler as the head's hidden layer, which reads the first token."""
        return replace(self, hidden=self.pooler, activation="tanh")

    def require_room(self, units: int, activation: str | None, width: int) -> None:
        """Refuse a head whose hidden layer has so many units, for a model of this width."""
        if self.activation is None:
            raise UnsuitableMethodError(
                "the source's head has a hidden layer, and a head of the target's class has none", FIT_INSTEAD
            )
        if activation != self.activation:
            raise UnsuitableMethodError("the two models' classes have heads with different activations", FIT_INSTEAD)
        if units > width:
            raise UnsuitableMethodError(
                f"the head's hidden layer has {units} units, and one of the target's class has room for {width}",
                FIT_INSTEAD,
            )


class Family(ABC):
    """One kind of model: everything that hf-bico knows about it, and the cards say."""

    name: ClassVar[str]
    """Recorded in `bico.json`, by which cards find the family again."""
    library: ClassVar[str]
    """`transformers` or `open_clip`: it names the weight files, and is the card's `library_name`."""
    config_file: ClassVar[str]
    processor_files: ClassVar[tuple[str, ...]] = ()
    can_be_spread: ClassVar[bool] = True
    """Whether `load` puts a model on several devices."""
    reads: ClassVar[str | None] = IMAGES
    """IMAGES or TEXTS; None where that differs from model to model."""
    pipeline_tag: ClassVar[str | None] = None
    """The Hub's task of such a model."""
    auto_class: ClassVar[str] = "AutoModel"
    """The class of transformers that loads it for that task."""
    head_modules: ClassVar[Mapping[str, HeadModules]] = {}
    """Classification heads that are written beside a backbone, by the `model_type` of a configuration."""
    packed_attention: ClassVar[bool] = False
    """Whether q, k and v are parts of one tensor, which peft saves exactly only with the whole attention."""

    def task(self, objective: str | None, has_head: bool, used_loss: bool) -> str | None:
        """Return the pipeline tag of a written model; None where it is not known what the model can do.

        `objective` names the loss of the port, `used_loss` says whether its method took gradients of it, and `has_head`
        whether a classification head was written too.
        """
        return self.pipeline_tag

    @abstractmethod
    def recognises(self, shapes: Shapes) -> bool:
        """Tell whether a model with these tensors is of this family."""

    def has_own_names(self, shapes: Shapes) -> bool:
        """Tell whether these are the names that the library itself gives to such a model's tensors."""
        return self.recognises(shapes)

    def accepts(self, model: Path | nn.Module) -> bool:
        """Tell whether this family takes a folder or loaded model that none recognises by its tensors."""
        return False

    @abstractmethod
    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        """Return sites, tokens and what stays behind, from names, shapes and the model's configuration."""

    def read_config(self, folder: Path) -> Mapping[str, Any]:
        """Read the model's configuration file; without a file it is empty."""
        file = folder / self.config_file
        try:
            config = read_object(file) if file.is_file() else {}
            _require_few_fields(config)
            for part in (config, *(value for value in config.values() if isinstance(value, dict))):
                if not isinstance(part.get("model_type", ""), str):  # libraries look it up
                    raise ValueError("its model_type is no text")
            return config
        except (OSError, ValueError) as error:
            raise RepoError(
                f"'{file.name}' in '{folder_name(folder)}' cannot be read: {error}", "copy the file again"
            ) from error

    def config_of(self, module: nn.Module) -> Mapping[str, Any]:
        """Return the configuration of a loaded model; empty if it has none."""
        config: Any = getattr(module, "config", None)
        return config.to_dict() if hasattr(config, "to_dict") else {}

    def filled(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a configuration with the library's defaults for what it leaves out, where the library reads it."""
        return config

    @abstractmethod
    def skeleton(self, folder: Path) -> nn.Module:
        """Build the model's modules without weights, on the meta device, named as `load` names them."""

    @abstractmethod
    def load(
        self, folder: Path, device: torch.device, dtype: torch.dtype, spread: DeviceSpread | None = None
    ) -> LiveModel:
        """Load the model of a folder; `spread` over several devices if it is too large for one."""

    @abstractmethod
    def wrap(self, module: nn.Module) -> LiveModel:
        """Wrap a model that the caller has loaded."""

    @property
    def side_names(self) -> tuple[str, ...]:
        """Files that a written model may need: configuration, processor, tokenizer, licence."""
        return (self.config_file, *self.processor_files, *TOKENIZER_FILES, *LICENCE_FILES)

    def side_files(self, folder: Path) -> list[Path]:
        """Return those of them that a folder has."""
        return [folder / name for name in self.side_names if (folder / name).is_file()]


def _require_few_fields(config: Mapping[str, Any]) -> None:
    """Raise a ValueError for a configuration that libraries would read for minutes."""
    count, parts = 0, [config]
    while parts:
        part = parts.pop()
        count += len(part)
        if count > MOST_FIELDS:
            raise ValueError(f"it has more than {MOST_FIELDS:,} fields")
        parts += [value for name, value in part.items() if isinstance(value, dict) and name not in LABELS]


def weights_do_not_fit(folder: Path, reason: object) -> BrokenWeightsError:
    """Make the error for weights that the configuration beside them does not describe."""
    return BrokenWeightsError(
        f"the weights of '{folder_name(folder)}' do not fit its configuration: {without_folder(reason, folder)[:300]}",
        "copy or download the folder again",
    )


def linear_site(
    shapes: Shapes,
    weight: str,
    bias: str,
    *,
    name: str,
    role: str,
    block: int | None,
    reads: str | None = None,
    share: tuple[int, int] | None = None,
    transposed: bool = False,
) -> Site:
    """Describe the linear map with this weight, and this bias if there is one; `reads` is the site's name by default.

    `share` (number, count) says that it is one of several maps which are packed in the rows.
    """
    first, second = shapes[weight]
    rows, columns = (second, first) if transposed else (first, second)
    span = None
    if share is not None:
        number, count = share
        rows //= count
        span = (number * rows, (number + 1) * rows)
    slots = Slot(weight, span, transposed), Slot(bias, span) if bias in shapes else None
    return Site(name, role, block, reads or name, (rows, columns), *slots)


def block_sites(
    shapes: Shapes, stem: str, name: str, block: int, modules: Mapping[str, str], *, transposed: bool = False
) -> list[Site]:
    """Describe one block, whose names in files and canonical names begin with `stem` and `name`.

    `modules` maps each role to what precedes "weight" and "bias" in its names; roles of one module are packed in its
    rows, one after another. q, k and v read the same activation, and so do a gate and what it gates.
    """
    sites = []
    for role, module in modules.items():
        packed = [other for other, its_module in modules.items() if its_module == module]
        reads = None
        if role in ("attn.q", "attn.k", "attn.v"):
            reads = f"{name}attn.in"
        elif role in ("mlp.gate", "mlp.up") and "mlp.gate" in modules:
            reads = f"{name}mlp.in"
        site = linear_site(
            shapes,
            f"{stem}{module}weight",
            f"{stem}{module}bias",
            name=name + role,
            role=role,
            block=block,
            reads=reads,
            share=None if len(packed) == 1 else (packed.index(role), len(packed)),
            transposed=transposed,
        )
        sites.append(site)
    return sites


def prefix_before(shapes: Shapes, ending: str) -> str | None:
    """Return what precedes `ending` in the one name that ends so; None if no or several names do."""
    found = [name[: -len(ending)] for name in shapes if name == ending or name.endswith("." + ending)]
    return found[0] if len(found) == 1 else None


def count_blocks(shapes: Shapes, stem: str) -> int:
    """Count the numbered blocks under `stem`."""
    pattern = re.compile(re.escape(stem) + r"(\d+)\.")
    return len({match.group(1) for name in shapes if (match := pattern.match(name))})


def patch_tokens(positions: int, patch: int, image_size: Any, prefix: int, what: str) -> Tokens:
    """Return the token grid: from the configured image size if known, otherwise the square of all positions."""
    patches = positions - prefix
    side = isqrt(patches)
    grid = (side, side)
    if image_size is not None:
        height, width = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)[:2]
        grid = (height // patch, width // patch)
    if grid[0] * grid[1] != patches:
        raise UnsupportedModelError(
            f"{what} has {patches} patch positions, which is not the grid {grid[0]} x {grid[1]} of its configuration",
            "check the image size in the model's configuration",
        )
    return Tokens(prefix, grid)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The fields of configurations that count experts."""


def require_dense(called: str, shapes: Shapes, config: Mapping[str, Any]) -> None:
    """Refuse quantised weights, and mixtures of experts."""
    if config.get("quantization_config") or config.get("quantization"):  # the second is MLX's
        raise UnsupportedModelError(
            f"the weights of {called} are quantised, and not kept as its layers multiply by them",
            "name the model that it was quantised from",
        )
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    counts = [part.get(key) for part in parts for key in _EXPERTS]
    counted = any(type(count) is int and count > 0 for count in counts)
    if counted or any(".experts." in f".{name}" for name in shapes):
        raise UnsupportedModelError(
            f"{called} is a mixture of experts, whose experts see different tokens in the two models: "
            "their rows do not pair",
            "use a dense model of the same family",
        )
