"""What a family is: how one kind of model lays out its blocks, sites, text side and head.

A family reads layouts from names and shapes alone, without torch, so that a plan needs no weights. Its live
models show their sites during a forward pass and turn images and prompts into features.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from posixpath import commonpath
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bico.checkpoints import folder_name
from hf_bico.errors import BrokenWeightsError, RepoError, UnreadableSampleError, UnsupportedModelError
from hf_bico.sites import Layout, Site, Tokens
from hf_bico.small_files import read_object
from hf_bico.texts import Captioned

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hf_bico.pairing import TextRows
    from hf_bico.watching import Trace

Shapes = Mapping[str, tuple[int, ...]]

TEXT_TOWER = "text tower"
"""Why the tensors of a CLIP's text side stay behind."""
VISION_TOWER = "vision tower"
"""Why those of its sites that read images do, where its text side alone is carried."""
CLIP_OBJECTIVES = ("zero-shot", "contrastive")
WHOLE_MODEL = "name the whole CLIP model; a fine-tuned tower is completed by --base"

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt")


@dataclass(frozen=True)
class Spread:
    """How a model that is too large for one device is spread over several: a rule of accelerate's.

    `memory` is the most that each GPU may take of it, in bytes.
    """

    rule: str
    memory: int | None = None


class Family(ABC):
    """One kind of model."""

    name: ClassVar[str]
    library: ClassVar[str]
    config_file: ClassVar[str]
    processor_files: ClassVar[tuple[str, ...]] = ()
    can_be_spread: ClassVar[bool] = True
    """Whether `load` puts a model on several devices."""

    @abstractmethod
    def recognises(self, shapes: Shapes) -> bool:
        """Whether a model with these tensors is of this family."""

    def accepts(self, model: Path | nn.Module) -> bool:
        """Whether this family takes a folder or loaded model that none recognises by its tensors."""
        return False

    @abstractmethod
    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        """Sites, tokens and what stays behind, from names, shapes and the model's configuration."""

    def read_config(self, folder: Path) -> Mapping[str, Any]:
        """The model's configuration file; empty when there is none."""
        file = folder / self.config_file
        try:
            config = read_object(file) if file.is_file() else {}
            _require_words(config)
            return config
        except (OSError, ValueError) as error:
            raise RepoError(
                f"'{file.name}' in '{folder_name(folder)}' cannot be read: {error}", "copy the file again"
            ) from error

    @abstractmethod
    def skeleton(self, folder: Path) -> nn.Module:
        """The model's modules without weights, on the meta device, by the names that `load` gives them."""

    @abstractmethod
    def load(self, folder: Path, device: torch.device, dtype: torch.dtype, spread: Spread | None = None) -> LiveModel:
        """The model of a folder, ready to run; `spread` over several devices where it is too large for one."""

    @abstractmethod
    def wrap(self, module: nn.Module) -> LiveModel:
        """A model that the caller has loaded."""

    @property
    def side_names(self) -> tuple[str, ...]:
        """The files beside the weights that a written model may need: configuration, tokenizer, processor, licence."""
        return (self.config_file, *self.processor_files, *TOKENIZER_FILES, *LICENCE_FILES)

    def side_files(self, folder: Path) -> list[Path]:
        """Those of them that a folder has."""
        return [folder / name for name in self.side_names if (folder / name).is_file()]


class LiveModel(ABC):
    """A loaded model: what it makes of samples, and a look at its sites."""

    blocks_are_functions: ClassVar[bool] = False
    """Whether a block, and its MLP, is a function of one tensor that gives one, whatever masks it is given too."""
    max_length: int | None = None
    """Of the texts that it reads, in tokens; None for what it can take."""
    runs_on: torch.device | None = None
    """Where it runs, if its weights are not there all the time."""
    visits: bool = False
    """Whether its weights are moved there when it runs, and away when it has run."""
    _visiting: int = 0

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module = module
        self.layout = layout

    @property
    def device(self) -> torch.device:
        return self.runs_on or next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @abstractmethod
    def features(self, samples: Sequence[Any]) -> Tensor:
        """One row (samples, width) for each sample: what a linear probe reads."""

    def ready(self, samples: Sequence[Any]) -> Sequence[Any]:
        """The samples with all done that needs no weights and takes time."""
        return samples

    def text_rows(self, samples: Sequence[Any]) -> TextRows | None:
        """The tokens of the samples in main memory, where they are texts: which rows of text sites are real."""
        return None

    def weight(self, name: str) -> Tensor:
        """The weight of a site as (out, in), as it is now."""
        from hf_bico.offloaded import kept_away

        slot = self.layout.site(name).weight
        parameter: Tensor = self.module.get_parameter(slot.tensor)
        if parameter.is_meta:
            parameter = kept_away(self.module)[slot.tensor]
        found: Tensor = slot.view(parameter.detach())
        return found

    @contextmanager
    def observed(self, sites: Sequence[Site], trace: Trace | None = None) -> Iterator[Trace]:
        """Watch the given sites, by name, during the forward passes inside the `with`.

        The outputs stay the same up to rounding, and the model is left as it was found.
        """
        from hf_bico.watching import Trace

        trace = Trace() if trace is None else trace
        own = {site.name: site for site in self.layout.sites}
        with self.quiet(), ExitStack() as stack:
            for site in sites:
                self._watch(own[site.name], trace, stack)
            yield trace

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Evaluation mode and no parameter gradients, inside the `with` only."""
        flags = [(parameter, parameter.requires_grad) for parameter in self.module.parameters()]
        training = [module for module in self.module.modules() if module.training]
        try:
            self.module.eval().requires_grad_(False)
            with self._visit():
                yield
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            for module in training:
                module.training = True

    @contextmanager
    def _visit(self) -> Iterator[None]:
        """The weights where the model runs, inside the `with`."""
        if not self.visits:
            yield
            return
        self._visiting += 1
        try:
            self.module.to(self.runs_on)
            yield
        finally:
            self._visiting -= 1
            if not self._visiting:
                self.module.to("cpu")

    @contextmanager
    def checkpointed(self, trace: Trace, whole_blocks: bool = True, looked_into: bool = False) -> Iterator[None]:
        """Keep only what enters each block, or its MLP, for the backward pass, which runs it once more.

        Inside the `with` only. `looked_into` says that a loss may be of what the blocks do not return.
        """
        from hf_bico.recomputing import recomputed

        with ExitStack() as stack:
            for module in self.module.modules():
                config: Any = getattr(module, "config", None)
                if getattr(config, "use_cache", False):  # a block that runs once more would append to it again
                    config.use_cache = False
                    stack.callback(setattr, config, "use_cache", True)
            for block in self._parts(whole_blocks):
                own, forward = block.__dict__.get("forward"), block.forward
                block.forward = recomputed(forward, trace, self.blocks_are_functions and not looked_into)
                stack.callback(_put_forward, block, own)
            yield

    def _parts(self, whole_blocks: bool) -> list[Any]:
        """The smallest modules that hold all sites of a block, or of its MLP."""
        places: dict[tuple[str, int | None], list[str]] = {}
        names = self.layout.own_names
        for site in self.layout.sites:
            if site.block is not None and (whole_blocks or site.role.startswith("mlp.")):
                module = names.get(site.weight.tensor, site.weight.tensor).rpartition(".")[0]
                places.setdefault((site.tower, site.block), []).append(module.replace(".", "/"))
        found = [self._running(commonpath(paths).replace("/", ".")) for paths in places.values()]
        return [self.module.get_submodule(path) for path in dict.fromkeys(found) if path]

    def _running(self, path: str) -> str:
        """The module at this path, or the nearest above it that is more than a list of modules, and runs."""
        from torch import nn

        while isinstance(self.module.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            path = path.rpartition(".")[0]
        return path

    @abstractmethod
    def _watch(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """Tap one site; `stack` undoes it."""

    def _watch_linear(self, module: nn.Module, site: Site, trace: Trace, stack: ExitStack) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return trace.tap(site, inputs[0], output)

        stack.callback(module.register_forward_hook(hook).remove)


class ImageModel(LiveModel):
    """A loaded model that reads images."""

    def features(self, samples: Sequence[Any]) -> Tensor:
        return self.image_features(self.pixels(samples))

    def pixels(self, images: Sequence[Any]) -> Tensor:
        """One batch on the model's device: PIL images by its own preprocessing, tensors only resized to fit.

        Of captioned images, the images.
        """
        from hf_bico.environment import sent

        prepared = self._pixels([image.image if isinstance(image, Captioned) else image for image in images])
        return sent(prepared, self.device, self.dtype)

    def ready(self, samples: Sequence[Any]) -> Sequence[Any]:
        """The samples with their images prepared, as tensors on the model's device; captions stay with them."""
        pixels = self.pixels(samples)
        return [
            replace(sample, image=image) if isinstance(sample, Captioned) else image
            for sample, image in zip(samples, pixels, strict=True)
        ]

    def _pixels(self, images: Sequence[Any]) -> Tensor:
        import torch

        if not isinstance(images[0], torch.Tensor):
            return self._prepared(images)
        if not all(image.is_floating_point() and image.shape == images[0].shape for image in images):
            raise UnreadableSampleError(
                "the images are tensors of integers, or of several shapes",
                "give PIL images, or float tensors of one shape, prepared as the model takes them",
            )
        return _fit_to(torch.stack(list(images)), self.layout.image_size)

    def _prepared(self, images: Sequence[Any]) -> Tensor:
        if not all(hasattr(image, "convert") for image in images):
            raise UnreadableSampleError(
                f"the images are of type {type(images[0]).__name__}", "give PIL images, or prepared float tensors"
            )
        deep = next((image.mode for image in images if image.mode[:1] in ("I", "F")), None)
        if deep is not None:  # PIL makes white of whatever is above 255
            raise UnreadableSampleError(
                f"the images have more than 8 bits a channel (PIL's mode '{deep}')",
                "save them as 8-bit images, scaled as the fine-tuned model saw them",
            )
        try:
            # RGB first: a processor may leave grey and transparent images as they are
            batch = self._preprocess([image.convert("RGB") for image in images])
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UnreadableSampleError(
                f"the model's own processor cannot prepare the images: {error}", "check its configuration"
            ) from error
        if self.layout.image_size not in (None, tuple(batch.shape[-2:])):
            raise UnsupportedModelError(
                f"the processor gives images of {tuple(batch.shape[-2:])} and the model takes {self.layout.image_size}",
                "use the processor that belongs to the model",
            )
        return batch

    @abstractmethod
    def _preprocess(self, images: Sequence[Any]) -> Tensor:
        """The model's own preprocessing of RGB images, as one batch."""

    @abstractmethod
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pooled and projected, not normalised."""


class ClipModel(ImageModel):
    """A loaded CLIP-like model: image features and text features."""

    blocks_are_functions = True

    @abstractmethod
    def text_tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The tokens that its text side reads, (prompts, tokens), and which of them are real and no padding.

        Both are in main memory.
        """

    @abstractmethod
    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Pooled and projected, not normalised."""

    @abstractmethod
    def logit_scale_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """exp(logit_scale), and SigLIP's bias where there is one."""


def _require_words(config: Mapping[str, Any]) -> None:
    """A ValueError where the kind of a model, or of a part of it, is no word: libraries look it up."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if not isinstance(part.get("model_type", ""), str):
            raise ValueError("its model_type is no text")


def _put_forward(module: Any, forward: Any) -> None:
    """Give a module its own forward back, or that of its class."""
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def weights_do_not_fit(folder: Path, reason: object) -> BrokenWeightsError:
    """The error for weights that the configuration beside them does not describe."""
    words = " ".join(str(reason).split())
    return BrokenWeightsError(
        f"the weights of '{folder_name(folder)}' do not fit its configuration: {words[:300]}",
        "copy or download the folder again",
    )


def prefix_before(shapes: Shapes, ending: str) -> str | None:
    """What stands before `ending` in the one name that ends so; None when no or several names do."""
    found = [name[: -len(ending)] for name in shapes if name == ending or name.endswith("." + ending)]
    return found[0] if len(found) == 1 else None


def count_blocks(shapes: Shapes, stem: str) -> int:
    """How many numbered blocks stand under `stem`."""
    pattern = re.compile(re.escape(stem) + r"(\d+)\.")
    return len({match.group(1) for name in shapes if (match := pattern.match(name))})


def patch_tokens(positions: int, patch: int, image_size: Any, prefix: int, what: str) -> Tokens:
    """The token grid: from the configured image size where known, else the square that fits the positions."""
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


def _fit_to(batch: Tensor, size: tuple[int, int] | None) -> Tensor:
    from torch.nn import functional

    if size is None or tuple(batch.shape[-2:]) == size:
        return batch
    return functional.interpolate(batch, size=size, mode="bilinear", align_corners=False, antialias=True)
