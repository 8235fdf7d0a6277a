"""The obvious implementation of a port, which ours is timed against. Knows transformers' models, not hf_bico.

Forward hooks store what every layer reads and writes, for all samples, on the device. Then, one site at a time: the two
cross-covariances in float32, `torch.linalg.svd` of each, and the change turned through both maps. Nothing is shared
between sites, nothing is streamed, and nothing is solved in a batch.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pairs import CLASSES, TEMPLATE, Pair, linear_layers
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

CUT = 1e-6
"""Singular values below this share of the largest are dropped, as ours are."""
WELL_ABOVE = 1e-2
"""The directions above this share are where two float32 computations must agree."""
BATCH = {"clip": 50, "t5": 16, "qwen": 4}
"""Samples a pass: the graph of all of them at once would not fit."""


@dataclass(frozen=True)
class Map:
    """The directions of both sides that the covariance has shown, and how strongly."""

    source: Tensor
    target: Tensor
    values: Tensor

    @property
    def matrix(self) -> Tensor:
        return self.source @ self.target.T

    def well_above(self) -> tuple[Tensor, Tensor]:
        kept = self.values > WELL_ABOVE * self.values[0]
        return self.source[:, kept], self.target[:, kept]


@dataclass(frozen=True)
class Solved:
    """One site: its change in the target's coordinates, and the maps that turned it."""

    before: Tensor
    change: Tensor
    input_map: Map
    output_map: Map

    def difference(self, other: Tensor) -> float:
        """How far another computation's change is from this one, on the directions well above the cut."""
        (source_in, target_in), (source_out, target_out) = self.input_map.well_above(), self.output_map.well_above()
        wanted = source_out.T @ self.before @ source_in
        found = target_out.T @ other.to(self.before) @ target_in
        return float((found - wanted).norm() / wanted.norm())


@dataclass
class Timed:
    """Seconds by stage; `counted` says that one site of each shape was timed, times their number."""

    device: torch.device
    counted: bool
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sites: int = 0
    stored_bytes: int = 0
    differences: list[float] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str, times: int = 1) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[name] += times * (self._now() - start)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def run(
    pair: Pair, rows: Sequence[Mapping[str, Any]], device: torch.device, ours: Callable[[str], Tensor], full: bool
) -> Timed:
    """The whole port, timed; or all passes and one site of each shape, where `full` would take too long.

    `ours` gives the change that hf_bico found for a weight of the target; the two are compared outside of the times.
    """
    timed = Timed(device, counted=not full)
    with timed.stage("load"):
        source, target = (_loaded(pair, folder, device) for folder in (pair.base, pair.target))
    with timed.stage("calibrate"):
        seen_source, seen_target = (_stored(pair, one, rows) for one in (source, target))
    timed.stored_bytes = _bytes(seen_source) + _bytes(seen_target)
    changes, sites = _Changes(pair), list(_sites(source, target))
    timed.sites = len(sites)
    shapes = Counter(_shape(source, target, site) for site in sites)
    for site in sites if full else _one_of_each(sites, lambda site: _shape(source, target, site)):
        times = 1 if full else shapes[_shape(source, target, site)]
        with timed.stage("read", times):
            weight, bias = changes.of(site[0], device)
        with timed.stage("align", times):
            input_map, output_map = (
                _map(*_paired(source, target, one, other))
                for one, other in zip(seen_source[site[0]], seen_target[site[1]], strict=True)
            )
        with timed.stage("transport", times):
            change = (output_map.matrix.T @ weight @ input_map.matrix).cpu()
            if bias is not None:
                bias = (bias @ output_map.matrix).cpu()
        found = Solved(weight, change, input_map, output_map)
        timed.differences.append(found.difference(ours(f"{site[1]}.weight").to(device)))
    return timed


@dataclass(frozen=True)
class _Loaded:
    """A model on the device, with what turns rows into its inputs."""

    model: Any
    layers: dict[str, Any]
    inputs: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]
    loss: Callable[[dict[str, Tensor]], Tensor]
    grid: int | None


def _loaded(pair: Pair, folder: Path, device: torch.device) -> _Loaded:
    import transformers

    dtype = getattr(torch, pair.options.get("dtype", "float32"))
    model = getattr(transformers, pair.classes[0]).from_pretrained(folder, dtype=dtype).to(device)
    model.eval().requires_grad_(False)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    layers = dict(linear_layers(model, pair.layers))
    length = pair.options.get("max_length")

    def read(texts: Sequence[str]) -> Tensor:
        ids: Tensor = tokens(list(texts), truncation=True, max_length=length, return_tensors="pt")["input_ids"]
        return ids.to(device)

    if pair.kind == "qwen":

        def next_token(inputs: dict[str, Tensor]) -> Tensor:
            logits = model(input_ids=inputs["ids"], use_cache=False).logits[:, :-1].float()
            return functional.cross_entropy(logits.flatten(0, 1), inputs["ids"][:, 1:].flatten(), reduction="sum")

        return _Loaded(model, layers, lambda rows: {"ids": read([row["text"] for row in rows])}, next_token, None)
    if pair.kind == "t5":
        words = tokens([*CLASSES], padding=True, return_tensors="pt").to(device)

        def answer(inputs: dict[str, Tensor]) -> Tensor:
            wanted = words["input_ids"][inputs["labels"]]
            said = functional.pad(wanted[:, :-1], (1, 0))
            asked = {"decoder_attention_mask": words["attention_mask"][inputs["labels"]], "use_cache": False}
            logits = model(input_ids=inputs["ids"], decoder_input_ids=said, **asked).logits
            return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum")

        return _Loaded(
            model,
            layers,
            lambda rows: {"ids": read([row["text"] for row in rows]), "labels": _labels(rows, device)},
            answer,
            None,
        )
    return _loaded_clip(model, layers, tokens, folder, device)


def _loaded_clip(model: Any, layers: dict[str, Any], tokens: Any, folder: Path, device: torch.device) -> _Loaded:
    from transformers import CLIPImageProcessor

    processor = CLIPImageProcessor.from_pretrained(folder)
    prompts = tokens([TEMPLATE.format(name) for name in CLASSES], padding=True, return_tensors="pt").to(device)
    with torch.no_grad():
        texts = model.text_projection(model.text_model(**prompts).pooler_output)
        classes = model.logit_scale.exp() * functional.normalize(texts, dim=-1)

    def inputs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        pixels = processor(images=[row["image"] for row in rows], return_tensors="pt")["pixel_values"]
        return {"pixels": pixels.to(device), "labels": _labels(rows, device)}

    def zero_shot(inputs: dict[str, Tensor]) -> Tensor:
        features = model.visual_projection(model.vision_model(pixel_values=inputs["pixels"]).pooler_output)
        logits = functional.normalize(features, dim=-1) @ classes.T
        return functional.cross_entropy(logits, inputs["labels"], reduction="sum")

    vision = model.config.vision_config
    return _Loaded(model, layers, inputs, zero_shot, vision.image_size // vision.patch_size)


def _labels(rows: Sequence[Mapping[str, Any]], device: torch.device) -> Tensor:
    return torch.tensor([row["label"] for row in rows], device=device)


def _stored(pair: Pair, loaded: _Loaded, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Tensor, Tensor]]:
    """What each layer reads, and the loss's gradient with respect to what it writes, over all samples."""
    inputs: dict[str, list[Tensor]] = {name: [] for name in loaded.layers}
    gradients: dict[str, list[Tensor]] = {name: [] for name in loaded.layers}
    for start in range(0, len(rows), BATCH[pair.kind]):
        outputs: dict[str, Tensor] = {}
        hooks = [module.register_forward_hook(_hook(name, inputs, outputs)) for name, module in loaded.layers.items()]
        loss = loaded.loss(loaded.inputs(rows[start : start + BATCH[pair.kind]]))
        for name, gradient in zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True):
            gradients[name].append(gradient)
        for hook in hooks:
            hook.remove()
    return {name: (torch.cat(inputs.pop(name)), torch.cat(gradients.pop(name))) for name in loaded.layers}


def _hook(name: str, inputs: dict[str, list[Tensor]], outputs: dict[str, Tensor]) -> Callable[..., None]:
    def hook(_: Any, read: tuple[Tensor, ...], written: Tensor) -> None:
        if not written.requires_grad:
            written.requires_grad_()
        inputs[name].append(read[0].detach())
        outputs[name] = written

    return hook


def _sites(source: _Loaded, target: _Loaded) -> Iterator[tuple[str, str]]:
    """Each layer of the target with that of the source whose change it takes."""
    depths = [1 + max(_block(name) for name in one.layers) for one in (source, target)]
    for name in target.layers:
        block = _block(name)
        if block < 0:
            yield name, name
            continue
        taken = int(block * (depths[0] - 1) / max(1, depths[1] - 1) + 0.5)
        yield re.sub(rf"\.{block}\.", f".{taken}.", name, count=1), name


def _block(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else -1


def _shape(source: _Loaded, target: _Loaded, site: tuple[str, str]) -> tuple[int, ...]:
    return (*source.layers[site[0]].weight.shape, *target.layers[site[1]].weight.shape)


def _one_of_each(sites: Sequence[tuple[str, str]], key: Callable[[tuple[str, str]], Any]) -> list[tuple[str, str]]:
    """Of every shape one site, from the middle of the model."""
    found: dict[Any, list[tuple[str, str]]] = {}
    for site in sites:
        found.setdefault(key(site), []).append(site)
    return [group[len(group) // 2] for group in found.values()]


def _paired(source: _Loaded, target: _Loaded, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that belong together; patches are resized from the source's grid to the target's."""
    one, other = one.float(), other.float()
    if source.grid is not None and target.grid is not None and one.ndim == 3:
        patches = one[:, 1:].transpose(1, 2).unflatten(2, (source.grid, source.grid))
        resized = functional.interpolate(patches, size=(target.grid, target.grid), mode="bilinear")
        one = torch.cat([one[:, :1], resized.flatten(2).transpose(1, 2)], dim=1)
    return one.flatten(0, -2), other.flatten(0, -2)


def _map(source: Tensor, target: Tensor) -> Map:
    left, values, right = torch.linalg.svd(source.T @ target, full_matrices=False)
    kept = values > CUT * values[0]
    return Map(left[:, kept], right[kept].T, values[kept])


class _Changes:
    """The weights' changes, as fine-tuning or a LoRA's factors give them, read one by one."""

    def __init__(self, pair: Pair) -> None:
        self.base, self.tuned = _Weights(pair.base), _Weights(pair.tuned)

    def of(self, layer: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Of a layer's weight, and of its bias where it has one that changed."""
        stem = f"base_model.model.{layer}.lora_"
        if f"{stem}A.weight" in self.tuned.files:
            down, up = (self.tuned.tensor(f"{stem}{part}.weight").to(device) for part in "AB")
            return up @ down, None
        weight, bias = (self._less(f"{layer}.{part}", device) for part in ("weight", "bias"))
        if weight is None:
            raise ValueError(f"the fine-tuned model has no {layer}")
        return weight, bias

    def _less(self, name: str, device: torch.device) -> Tensor | None:
        if name not in self.tuned.files:
            return None
        return self.tuned.tensor(name).to(device).float() - self.base.tensor(name).to(device).float()


class _Weights:
    """The tensors of a folder."""

    def __init__(self, folder: Path) -> None:
        self.files = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                self.files |= dict.fromkeys(weights.keys(), file)

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as weights:
            found: Tensor = weights.get_tensor(name)
            return found


def _bytes(stored: Mapping[str, tuple[Tensor, Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for both in stored.values() for tensor in both)
