"""Loaded models: they show their sites during a forward pass, and turn samples into features.

Knows layouts and passes; not how a kind of model is recognised or read from a folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from posixpath import commonpath
from typing import TYPE_CHECKING, Any

from hf_bico.errors import MissingProcessorError, UnreadableSampleError, UnsupportedModelError
from hf_bico.models.layout import Layout, Site
from hf_bico.utils.samples import Captioned

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hf_bico.models.hooks import TextRows, Trace


CLASS, FIRST_TOKEN = "class", "first token"
"""What a classification head may read of a model instead of its features: what heads of the model's class do, or the
first token's last hidden state."""


class LiveModel(ABC):
    """A loaded model: features of samples, and access to its sites."""

    max_length: int | None = None
    """The most tokens of a text; None for the model's own limit."""
    special_tokens: bool = True
    """Whether texts are read with the tokenizer's special tokens."""
    runs_on: torch.device | None = None
    """The device that it runs on, if its weights are not there all the time."""
    swapped: bool = False
    """Whether its weights are moved there for each run, and back afterwards, to leave room for another model."""
    _runs: int = 0

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
        """Return one row (samples, width) for each sample: the input of a linear probe."""

    def read_by(self, reading: str | None, samples: Sequence[Any]) -> Tensor:
        """Return what a head reads that was made for this reading: CLASS, FIRST_TOKEN, or None for the features."""
        return self.features(samples)

    def ready(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Do in advance what takes time and needs no weights."""
        return samples

    def text_rows(self, samples: Sequence[Any]) -> TextRows | None:
        """Return the tokens of texts in main memory, and which are real; None if samples are no texts."""
        return None

    def weight(self, name: str) -> Tensor:
        """Return the current weight of a site as (out, in)."""
        from hf_bico.models.hooks import offloaded_weights

        slot = self.layout.site(name).weight
        parameter: Tensor = self.module.get_parameter(slot.tensor)
        if parameter.is_meta:
            parameter = offloaded_weights(self.module)[slot.tensor]
        found: Tensor = slot.view(parameter.detach())
        return found

    @contextmanager
    def observed(self, sites: Sequence[Site], trace: Trace | None = None) -> Iterator[Trace]:
        """Watch the given sites, by name, during the forward passes inside the `with`.

        The outputs stay the same up to rounding, and the model is left as it was found.
        """
        from hf_bico.models.hooks import Trace

        trace = Trace() if trace is None else trace
        own = {site.name: site for site in self.layout.sites}
        with self.quiet(), ExitStack() as stack:
            for site in sites:
                self._watch(own[site.name], trace, stack)
            yield trace

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Set evaluation mode and no parameter gradients, inside the `with` only."""
        flags = [(parameter, parameter.requires_grad) for parameter in self.module.parameters()]
        training = [module for module in self.module.modules() if module.training]
        try:
            self.module.eval().requires_grad_(False)
            with self._on_device():
                yield
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            for module in training:
                module.training = True

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Move the weights to the device, inside the `with`."""
        if not self.swapped:
            yield
            return
        self._runs += 1
        try:
            self.module.to(self.runs_on)
            yield
        finally:
            self._runs -= 1
            if not self._runs:
                self.module.to("cpu")

    @contextmanager
    def checkpointed(self, trace: Trace, whole_blocks: bool = True) -> Iterator[None]:
        """Keep only the input of each block, or of its MLP, for the backward pass, which runs it again."""
        from hf_bico.models.hooks import recomputed

        with ExitStack() as stack:
            for module in self.module.modules():
                config: Any = getattr(module, "config", None)
                if getattr(config, "use_cache", False):  # a recomputed block would append to the cache again
                    config.use_cache = False
                    stack.callback(setattr, config, "use_cache", True)
            for block in self._parts(whole_blocks):
                own = block.__dict__.get("forward")  # accelerate gives a module one of its own
                block.forward = recomputed(block.forward, trace)
                undo = (delattr, block, "forward") if own is None else (setattr, block, "forward", own)
                stack.callback(*undo)
            yield

    def _parts(self, whole_blocks: bool) -> list[Any]:
        """Return the smallest modules that run and hold all sites of a block, or of its MLP."""
        from torch import nn

        places: dict[tuple[str, int | None], list[str]] = {}
        names = self.layout.own_names
        for site in self.layout.sites:
            if site.block is not None and (whole_blocks or site.role.startswith("mlp.")):
                module = names.get(site.weight.tensor, site.weight.tensor).rpartition(".")[0]
                places.setdefault((site.tower, site.block), []).append(module.replace(".", "/"))
        found = []
        for paths in places.values():
            path = commonpath(paths).replace("/", ".")
            while isinstance(self.module.get_submodule(path), nn.ModuleList | nn.ModuleDict):  # a mere list never runs
                path = path.rpartition(".")[0]
            found.append(path)
        return [self.module.get_submodule(path) for path in dict.fromkeys(found) if path]

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
        """Return one batch on the model's device: PIL images by its own preprocessing, tensors resized to fit.

        Captions are ignored.
        """
        from hf_bico.runtime.environment import to_device

        prepared = self._pixels([image.image if isinstance(image, Captioned) else image for image in images])
        return to_device(prepared, self.device, self.dtype)

    def ready(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Prepare the images, as tensors on the model's device; captions stay with them."""
        pixels = self.pixels(samples)
        return [
            replace(sample, image=image) if isinstance(sample, Captioned) else image
            for sample, image in zip(samples, pixels, strict=True)
        ]

    def _pixels(self, images: Sequence[Any]) -> Tensor:
        import torch
        from torch.nn import functional

        if not isinstance(images[0], torch.Tensor):
            return self._prepared(images)
        if not all(image.is_floating_point() and image.shape == images[0].shape for image in images):
            raise UnreadableSampleError(
                "the images are tensors of integers, or of several shapes",
                "give PIL images, or float tensors of one shape, prepared as the model takes them",
            )
        batch, size = torch.stack(list(images)), self.layout.image_size
        if size is None or tuple(batch.shape[-2:]) == size:
            return batch
        return functional.interpolate(batch, size=size, mode="bilinear", align_corners=False, antialias=True)

    def _prepared(self, images: Sequence[Any]) -> Tensor:
        if not all(hasattr(image, "convert") for image in images):
            raise UnreadableSampleError(
                f"the images are of type {type(images[0]).__name__}", "give PIL images, or prepared float tensors"
            )
        deep = next((image.mode for image in images if image.mode[:1] in ("I", "F")), None)
        if deep is not None:  # PIL clips values above 255 to white
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

    @cached_property
    def black_and_white(self) -> Tensor | None:
        """What its own preparation makes of a black and of a white image; None if it has none."""
        from PIL import Image

        with suppress(MissingProcessorError, UnreadableSampleError, UnsupportedModelError):
            return self._prepared([Image.new("RGB", (64, 64), colour) for colour in ("black", "white")])
        return None

    @property
    def preparation(self) -> object:
        """What decides how PIL images are prepared: models of one class with equal ones prepare them alike."""
        return id(self)

    @abstractmethod
    def _preprocess(self, images: Sequence[Any]) -> Tensor:
        """Apply the model's own preprocessing to RGB images; return one batch."""

    @abstractmethod
    def image_features(self, pixels: Tensor) -> Tensor:
        """Return image features, pooled and projected, not normalised."""


class ClipModel(ImageModel):
    """A loaded CLIP-like model: image features and text features."""

    @abstractmethod
    def text_tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the tokens of prompts, (prompts, tokens), and which are real, both in main memory."""

    @abstractmethod
    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Return text features, pooled and projected, not normalised."""

    @abstractmethod
    def logit_scale_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return exp(logit_scale), and SigLIP's bias if there is one."""
