"""Open_clip CLIP.

open_clip's packed self-attention, computed so that its parts can be watched. Knows one module, not the model.

Loaded open_clip models: how their sites are watched, and what they make of images and texts.

Knows open_clip's modules; not how its files are laid out.

open_clip's CLIP with a vision transformer: packed q, k, v in `in_proj_weight`, the projection used as x @ proj.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import MissingProcessorError, MissingTextTowerError, RepoError, UnsupportedModelError
from hf_bico.models.checkpoints import FileCheckpoint
from hf_bico.models.families.base import (
    CLIP_OBJECTIVES,
    TEXT_TOWER,
    WHOLE_MODEL,
    ZERO_SHOT_TASK,
    DeviceSpread,
    Family,
    Shapes,
    count_blocks,
    patch_tokens,
    prefix_before,
    weights_do_not_fit,
)
from hf_bico.models.families.live import ClipModel, LiveModel
from hf_bico.models.families.pretrained import CANNOT_BUILD, TooLargeError, bounded, loadable
from hf_bico.models.layout import TEXT_SIDE, Axis, Layout, Site, Slot, count_heads, residual_axes
from hf_bico.utils.files import folder_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hf_bico.models.hooks import Trace


class ExplicitAttention:
    """Packed self-attention computed with q, k and v apart, so that each can be watched.

    Stands in for the forward of any module that holds `in_proj_weight`: torch's nn.MultiheadAttention and
    open_clip's own attention class alike.
    """

    def __init__(self, attention: Any) -> None:
        if getattr(attention, "logit_scale", None) is not None:
            raise UnsupportedModelError(
                "this transformer uses scaled cosine attention, whose q and k cannot be shown apart",
                "use a model with plain attention",
            )
        if getattr(attention, "in_proj_weight", None) is None:
            raise UnsupportedModelError(
                "this transformer keeps q, k and v in separate tensors of one attention module",
                "use a model with a packed in_proj_weight",
            )
        self.attention = attention
        self.watched: dict[str, tuple[Site, Trace]] = {}
        # torch's module takes (query, key, value) and returns a pair; open_clip's takes x and returns a tensor
        self.returns_pair = "key" in inspect.signature(type(attention).forward).parameters
        self.batch_first = getattr(attention, "batch_first", True)

    def __call__(self, x: Tensor, key: Any = None, value: Any = None, attn_mask: Any = None, **_: Any) -> Any:
        from torch.nn import functional

        attention = self.attention
        if (key is not None and key is not x) or (value is not None and value is not x):
            raise UnsupportedModelError(
                "this transformer uses cross-attention", "use a model with self-attention alone"
            )
        rows = x if self.batch_first else x.transpose(0, 1)
        parts = [
            self._show(role, rows, weight, bias)
            for role, weight, bias in zip(
                ("attn.q", "attn.k", "attn.v"),
                attention.in_proj_weight.chunk(3),
                (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3),
                strict=True,
            )
        ]
        q, k, v = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in parts)
        q, k = _optional(attention, "ln_q")(q), _optional(attention, "ln_k")(k)
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        if getattr(attention, "head_scale", None) is not None:
            heads = heads * attention.head_scale
        mixed = attention.out_proj(_optional(attention, "ln_inner")(heads.transpose(1, 2).flatten(2)))
        mixed = mixed if self.batch_first else mixed.transpose(0, 1)
        return (mixed, None) if self.returns_pair else mixed

    def _show(self, role: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from torch.nn import functional

        y = functional.linear(x, weight, bias)
        if role not in self.watched:
            return y
        site, trace = self.watched[role]
        return trace.tap(site, x, y)


def explicit_attention(attention: Any, stack: ExitStack) -> ExplicitAttention:
    """The explicit form of this module's forward, put in place once and taken away by `stack`."""
    current = attention.__dict__.get("forward")
    if isinstance(current, ExplicitAttention):
        return current
    explicit = ExplicitAttention(attention)
    attention.forward = explicit
    stack.callback(attention.__dict__.pop, "forward")
    return explicit


def _optional(module: Any, name: str) -> Any:
    return getattr(module, name, None) or (lambda x: x)


class OpenClipModel(ClipModel):
    """A loaded open_clip model, or its visual tower alone."""

    transform: Any = None
    tokenizer: Any = None

    @property
    def visual(self) -> Any:
        return getattr(self.module, "visual", self.module)

    def _preprocess(self, images: Sequence[Any]) -> Tensor:
        import torch

        if self.transform is None:
            raise MissingProcessorError(
                "a loaded open_clip model does not know its preprocessing",
                "pass the model's folder, or prepared tensors",
            )
        return torch.stack([self.transform(image) for image in images])

    def image_features(self, pixels: Tensor) -> Tensor:
        output = self.visual(pixels)
        features: Tensor = output[0] if isinstance(output, tuple) else output  # (pooled, tokens) in some models
        if features.ndim != 2:
            raise UnsupportedModelError("this vision transformer does not pool its tokens", "use a model that does")
        return features

    @property
    def text(self) -> Any:
        """The module that holds the text tower: the model itself, unless the tower is a module of its own."""
        return getattr(self.module, "text", self.module)

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        from hf_bico.runtime.environment import to_device

        model: Any = self.module
        features: Tensor = model.encode_text(to_device(self._text_ids(prompts), self.device))
        return features

    def text_tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The row that is pooled counts as real, whatever stands there: some models read a text off its padding."""
        ids = self._text_ids(prompts)
        return ids, _real_tokens(ids, self.tokenizer) | self._pooled_tokens(ids)

    def _text_ids(self, prompts: Sequence[str]) -> Tensor:
        if not hasattr(self.module, "encode_text"):
            raise MissingTextTowerError("the model is a visual tower without a text side", WHOLE_MODEL)
        if self.tokenizer is None:
            raise MissingProcessorError(
                "a loaded open_clip model does not know its tokenizer", "pass its Hub id or folder instead"
            )
        ids: Tensor = self.tokenizer(list(prompts))
        return ids

    def _pooled_tokens(self, ids: Tensor) -> Tensor:
        """Which token of each text is pooled: its end in CLIP's manner, the first or the last in some models."""
        import torch

        text = self.text
        how = getattr(text, "text_pool_type", getattr(text, "pool_type", None))
        end: Any = getattr(text, "text_eos_id", getattr(text, "eos_id", None))
        pooled = torch.zeros_like(ids, dtype=torch.bool)
        if how in ("argmax", "eos"):
            places = ids.argmax(-1) if how == "argmax" else torch.eq(ids, end).int().argmax(-1)
            pooled[torch.arange(len(ids), device=ids.device), places] = True
        elif how in ("first", "last"):
            pooled[:, 0 if how == "first" else -1] = True
        return pooled

    def logit_scale_and_bias(self) -> tuple[Tensor, Tensor | None]:
        model: Any = self.module
        return model.logit_scale.exp(), getattr(model, "logit_bias", None)

    def _watch(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        if site.block is None:
            watch = self._watch_text_projection if site.tower else self._watch_projection
            watch(site, trace, stack)
            return
        block = (self.text if site.tower else self.visual).transformer.resblocks[site.block]
        if site.role in ("attn.q", "attn.k", "attn.v"):
            attention = explicit_attention(block.attn, stack)
            attention.watched[site.role] = (site, trace)
        elif site.role == "attn.out":
            explicit_attention(block.attn, stack)  # nn.MultiheadAttention never calls its out_proj as a module
            self._watch_linear(block.attn.out_proj, site, trace, stack)
        else:
            self._watch_linear(block.mlp.c_fc if site.role == "mlp.up" else block.mlp.c_proj, site, trace, stack)

    def _watch_projection(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """`visual` skips a projection that is None and gives the pooled features; the hook projects them."""
        visual, projection = self.visual, self.visual.proj

        def project(_: nn.Module, __: Any, output: Any) -> Any:
            pooled, *tokens = output if isinstance(output, tuple) else (output,)
            features = trace.tap(site, pooled, pooled @ projection)
            return (features, *tokens) if tokens else features

        visual.proj = None
        stack.callback(setattr, visual, "proj", projection)
        stack.callback(visual.register_forward_hook(project).remove)

    def _watch_text_projection(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """open_clip runs a projection that is an nn.Linear as a module: one with the same weight shadows the tensor."""
        import torch

        text = self.text
        projection = text.text_projection
        if not isinstance(projection, torch.nn.Linear):
            weight = torch.nn.Parameter(projection.detach().T, requires_grad=False)
            projection = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            projection.weight = weight
            text.__dict__["text_projection"] = projection
            stack.callback(text.__dict__.pop, "text_projection")
        self._watch_linear(projection, site, trace, stack)


def _real_tokens(ids: Tensor, tokenizer: Any) -> Tensor:
    """Which tokens are no padding, by the tokenizer: up to its end token, or all but its padding."""
    import torch

    end = getattr(tokenizer, "eot_token_id", None)
    if end is None:
        return torch.ne(ids, tokenizer.tokenizer.pad_token_id)
    is_end = torch.eq(ids, end).long()  # open_clip's own tokenizer pads with 0, which is a word too
    return torch.eq(is_end.cumsum(-1) - is_end, 0)


_ATTENTION_BIAS = "attn.in_proj_bias"
_HEAD_WIDTH = 64
"""What open_clip takes where the configuration does not say."""
_BOUNDED: set[str] = set()
"""Configurations, with the shapes of the weights beside them, that ask for no more than these hold."""
_RESIDUAL = {
    "class_embedding": "class",
    "positional_embedding": "positions",
    "conv1.weight": "stem",
    "ln_pre.weight": "norm.pre.weight",
    "ln_pre.bias": "norm.pre.bias",
    "ln_post.weight": "norm.post.weight",
    "ln_post.bias": "norm.post.bias",
}
_BLOCK_RESIDUAL = {
    "ln_1.weight": "attn.norm.weight",
    "ln_1.bias": "attn.norm.bias",
    "ls_1.gamma": "attn.scale",
    "ln_2.weight": "mlp.norm.weight",
    "ln_2.bias": "mlp.norm.bias",
    "ls_2.gamma": "mlp.scale",
}


class OpenClip(Family):
    name = "open_clip ViT"
    library = "open_clip"
    config_file = "open_clip_config.json"
    can_be_spread = False
    pipeline_tag = ZERO_SHOT_TASK
    packed_attention = True

    def recognises(self, shapes: Shapes) -> bool:
        return _visual_prefix(shapes) is not None

    def layout(self, shapes: Shapes, config: Mapping[str, Any]) -> Layout:
        root = _visual_prefix(shapes)
        if root is None:
            raise ValueError("not an open_clip vision transformer")
        stem = f"{root}transformer.resblocks."
        blocks = count_blocks(shapes, stem)
        sites = [site for block in range(blocks) for site in _block_sites(shapes, f"{stem}{block}.", block)]
        if f"{root}proj" in shapes:
            width, embedding = shapes[f"{root}proj"]
            weight = Slot(f"{root}proj", transposed=True)
            sites.append(Site("proj", "proj", None, "proj", (embedding, width), weight))
        texts = _text_prefix(shapes, root)
        text_sites = [] if texts is None else _text_sites(shapes, texts)
        sites += text_sites
        patch = shapes[f"{root}conv1.weight"][-1]
        positions = shapes[f"{root}positional_embedding"][0]
        vision = _section(_section(config, "model_cfg"), "vision_cfg")
        tokens = patch_tokens(positions, patch, vision.get("image_size"), prefix=1, what="the vision transformer")
        taken = {slot.tensor for site in sites for slot in site.slots}
        others = {name: _reason(name, root) for name in shapes if name not in taken}
        return Layout(
            *(self.name, tuple(sites), blocks, tokens, tokens.image_size(patch), others),
            heads=_heads(vision, shapes[f"{root}conv1.weight"][0]),
            residual=_residual(shapes, root, blocks),
            objectives=CLIP_OBJECTIVES,
            text_blocks=len({site.block for site in text_sites} - {None}),
        )

    def skeleton(self, folder: Path) -> nn.Module:
        import torch

        with torch.device("meta"):
            skeleton: nn.Module = self._bare(folder, torch.device("meta"))
        return skeleton

    def _bare(self, folder: Path, device: torch.device) -> Any:
        """The model that open_clip builds from a folder's configuration, without its weights."""
        import open_clip

        if not _section(self.read_config(folder), "model_cfg"):
            raise RepoError(
                f"'{folder_name(folder)}' has no {self.config_file} with a model_cfg",
                "name a folder in open_clip's Hub layout",
            )
        bare = {"load_weights": False, "pretrained_image": False, "pretrained_text": False}
        try:
            with _silenced_logging(), bounded(FileCheckpoint.in_folder(folder, self.library).shapes):
                return open_clip.create_model(f"local-dir:{folder}", device=device, **bare).eval()
        except CANNOT_BUILD as error:
            raise self._cannot_build(folder, error) from error

    def _cannot_build(self, folder: Path, error: Exception) -> RepoError:
        return RepoError(
            f"open_clip cannot build a model from '{self.config_file}' of '{folder_name(folder)}': {error}",
            "copy the file again, or use the open_clip release that it was made for",
        )

    def load(
        self, folder: Path, device: torch.device, dtype: torch.dtype, spread: DeviceSpread | None = None
    ) -> LiveModel:
        import open_clip
        import torch
        from open_clip.transform import PreprocessCfg, image_transform_v2

        weights = FileCheckpoint.in_folder(folder, self.library).files
        if len(weights) > 1:
            raise UnsupportedModelError(
                f"the open_clip weights of '{folder_name(folder)}' are in shards, which open_clip does not read",
                "save them as one open_clip_model.safetensors",
            )
        self._require_bounded(folder)
        # open_clip itself would choose the file, pickles among them, and round float64 weights to float32
        model = self._bare(folder, torch.device("cpu")).to(device=device, dtype=dtype)
        try:
            transform = image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)
        except CANNOT_BUILD as error:
            raise self._cannot_build(folder, error) from error
        try:
            open_clip.load_checkpoint(model, str(weights[0]))
        except CANNOT_BUILD as error:
            raise weights_do_not_fit(folder, error) from error
        config = self.read_config(folder)
        live = self._live(model, config)
        live.transform = transform
        from_hub_library = _section(_section(config, "model_cfg"), "text_cfg").get("hf_tokenizer_name")
        no_code = {"trust_remote_code": False} if from_hub_library else {}
        with loadable(folder, "tokenizer"):
            live.tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}", **no_code)
        return live

    def _require_bounded(self, folder: Path) -> None:
        """Refuse, before memory is taken for it, a model that is far larger than its weights.

        The fine-tune and its base have one configuration, which is looked at once.
        """
        shapes = FileCheckpoint.in_folder(folder, self.library).shapes
        asked_and_there = json.dumps([self.read_config(folder), shapes], sort_keys=True)
        if asked_and_there in _BOUNDED:
            return
        try:
            self.skeleton(folder)
            _BOUNDED.add(asked_and_there)
        except RepoError as error:
            if isinstance(error.__cause__, TooLargeError):
                raise
            # some models cannot be built without memory: whether this one can be built at all is seen next

    def wrap(self, module: nn.Module) -> LiveModel:
        return self._live(module, {})

    def _live(self, module: nn.Module, config: Mapping[str, Any]) -> OpenClipModel:
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        visual = getattr(module, "visual", module)
        attention = module.get_submodule(f"{_visual_prefix(shapes) or ''}transformer.resblocks.0.attn")
        own = {
            "image_size": getattr(visual, "image_size", None),
            "head_width": getattr(attention, "head_dim", None),
        }
        return OpenClipModel(module, self.layout(shapes, config or {"model_cfg": {"vision_cfg": own}}))


@contextmanager
def _silenced_logging() -> Iterator[None]:
    """open_clip warns on the root logger that a model without weights is random; ours gets its weights next."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _visual_prefix(shapes: Shapes) -> str | None:
    prefix = prefix_before(shapes, "class_embedding")
    stem = "transformer.resblocks.0.attn.in_proj_weight"
    return prefix if prefix is not None and f"{prefix}{stem}" in shapes else None


def _text_prefix(shapes: Shapes, root: str) -> str | None:
    """What stands before the text tower's names, where that is a transformer of open_clip's own that reads tokens."""
    if not root.endswith("visual."):
        return None
    whole = root.removesuffix("visual.")
    needed = ("token_embedding.weight", "transformer.resblocks.0.attn.in_proj_weight")
    for prefix in (whole, f"{whole}text."):
        # with a class embedding, the tower has a row more than tokens
        if all(prefix + name in shapes for name in needed) and f"{prefix}cls_emb" not in shapes:
            return prefix
    return None


def _text_sites(shapes: Shapes, root: str) -> list[Site]:
    stem = f"{root}transformer.resblocks."
    blocks = range(count_blocks(shapes, stem))
    sites = [site for block in blocks for site in _block_sites(shapes, f"{stem}{block}.", block, "text.")]
    name = f"{root}text_projection"
    if name in shapes:
        width, embedding = shapes[name]
        weight, bias = Slot(name, transposed=True), None
        sites.append(Site("text.proj", "proj", None, "text.proj", (embedding, width), weight, bias))
    elif f"{name}.weight" in shapes:  # a projection with a bias is a module
        embedding, width = shapes[f"{name}.weight"]
        weight, bias = Slot(f"{name}.weight"), Slot(f"{name}.bias") if f"{name}.bias" in shapes else None
        sites.append(Site("text.proj", "proj", None, "text.proj", (embedding, width), weight, bias))
    return [replace(site, text=True, tower=TEXT_SIDE) for site in sites]


def _block_sites(shapes: Shapes, stem: str, block: int, tower: str = "") -> list[Site]:
    name = f"{tower}blocks.{block}."
    width = shapes[f"{stem}attn.in_proj_weight"][1]
    sites = []
    for index, role in enumerate(("attn.q", "attn.k", "attn.v")):
        rows = (index * width, (index + 1) * width)
        bias = Slot(stem + _ATTENTION_BIAS, rows) if stem + _ATTENTION_BIAS in shapes else None
        weight = Slot(f"{stem}attn.in_proj_weight", rows)
        sites.append(Site(name + role, role, block, f"{name}attn.in", (width, width), weight, bias))
    for role, module in (("attn.out", "attn.out_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
        rows_out, columns = shapes[f"{stem}{module}.weight"]
        bias = Slot(f"{stem}{module}.bias") if f"{stem}{module}.bias" in shapes else None
        weight = Slot(f"{stem}{module}.weight")
        sites.append(Site(name + role, role, block, name + role, (rows_out, columns), weight, bias))
    return sites


def _heads(vision: Mapping[str, Any], width: int) -> int | None:
    """open_clip configures the width of a head; an empty configuration says nothing."""
    head = vision.get("head_width", _HEAD_WIDTH) if vision else None
    return count_heads(width, width // head) if type(head) is int and head > 0 else None


def _residual(shapes: Shapes, root: str, blocks: int) -> tuple[Axis, ...]:
    """Attentional pooling reads the residual stream in ways of its own, which are not followed here."""
    if any(name.startswith(f"{root}attn_pool") for name in shapes):
        return ()
    names = {root + own: name for own, name in _RESIDUAL.items()}
    return residual_axes(shapes, names, f"{root}transformer.resblocks.", blocks, _BLOCK_RESIDUAL)


def _reason(name: str, root: str) -> str:
    if not name.startswith(root) or name in ("logit_scale", "logit_bias"):
        return TEXT_TOWER
    if name == f"{root}class_embedding":
        return "class token"
    if name == f"{root}positional_embedding":
        return "positions"
    if name.startswith(f"{root}conv1."):
        return "patch stem"
    is_norm = any(part == "ln" or part.startswith("ln_") for part in name.split("."))
    return "LayerNorm" if is_norm else "no linear site"
