"""open_clip's CLIP with a vision transformer: packed q, k, v in `in_proj_weight`, the projection used as x @ proj.

Packed attention is computed explicitly while its parts are watched.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bico.errors import MissingProcessorError, MissingTextTowerError, RepoError, UnsupportedModelError
from hf_bico.models.checkpoints import FileCheckpoint
from hf_bico.models.families.base import TEXT_TOWER, DeviceSpread, Shapes, linear_site, weights_do_not_fit
from hf_bico.models.families.clip import WHOLE_MODEL, ClipFamily
from hf_bico.models.families.live import ClipModel, LiveModel
from hf_bico.models.families.pretrained import CANNOT_BUILD, TooLargeError, bounded, loadable
from hf_bico.models.layout import Axis, Site, count_heads
from hf_bico.runtime.turns import changed_together
from hf_bico.utils.files import folder_name, without_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hf_bico.models.hooks import Trace


class ExplicitAttention:
    """Packed self-attention computed with q, k and v apart, so that each can be watched.

    Replaces the forward of any module with an `in_proj_weight`: nn.MultiheadAttention and open_clip's own class.
    """

    def __init__(self, attention: Any) -> None:
        if getattr(attention, "logit_scale", None) is not None:
            raise UnsupportedModelError(
                "this transformer uses scaled cosine attention, whose q and k cannot be separated",
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
        weights = attention.in_proj_weight.chunk(3)
        biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
        parts = []
        for role, weight, bias in zip(("attn.q", "attn.k", "attn.v"), weights, biases, strict=True):
            part = functional.linear(rows, weight, bias)
            if role in self.watched:
                site, trace = self.watched[role]
                part = trace.tap(site, rows, part)
            parts.append(part)
        q, k, v = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in parts)
        q, k = _optional(attention, "ln_q")(q), _optional(attention, "ln_k")(k)
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        if getattr(attention, "head_scale", None) is not None:
            heads = heads * attention.head_scale
        mixed = attention.out_proj(_optional(attention, "ln_inner")(heads.transpose(1, 2).flatten(2)))
        mixed = mixed if self.batch_first else mixed.transpose(0, 1)
        return (mixed, None) if self.returns_pair else mixed


def explicit_attention(attention: Any, stack: ExitStack) -> ExplicitAttention:
    """Replace this module's forward by its explicit form, once; `stack` restores it."""
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

    @property
    def preparation(self) -> object:
        # what the transform was made from; it does not show everything itself
        return id(self) if self.transform is None else repr(self.visual.preprocess_cfg)

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
        """The module of the text tower: the model itself, unless the tower is a module of its own."""
        return getattr(self.module, "text", self.module)

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        from hf_bico.runtime.environment import to_device

        model: Any = self.module
        features: Tensor = model.encode_text(to_device(self._text_ids(prompts), self.device))
        return features

    def text_tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Count the pooled token as real, whatever it is: some models read a text off its padding."""
        import torch

        ids, end = self._text_ids(prompts), getattr(self.tokenizer, "eot_token_id", None)
        if end is None:
            real = torch.ne(ids, self.tokenizer.tokenizer.pad_token_id)
        else:  # open_clip's own tokenizer pads with 0, which is also a token: a text goes up to its end token
            is_end = torch.eq(ids, end).long()
            real = torch.eq(is_end.cumsum(-1) - is_end, 0)
        return ids, real | self._pooled_tokens(ids)

    def _text_ids(self, prompts: Sequence[str]) -> Tensor:
        if not hasattr(self.module, "encode_text"):
            raise MissingTextTowerError("the model is a visual tower without a text encoder", WHOLE_MODEL)
        if self.tokenizer is None:
            raise MissingProcessorError(
                "a loaded open_clip model does not know its tokenizer", "pass its Hub id or folder instead"
            )
        ids: Tensor = self.tokenizer(list(prompts))
        return ids

    def _pooled_tokens(self, ids: Tensor) -> Tensor:
        """Mark the token of each text that is pooled: CLIP's end token, or the first or last in some models."""
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
        """Set the projection to None, so that `visual` gives the pooled features; the hook projects them."""
        visual, projection = self.visual, self.visual.proj

        def project(_: nn.Module, __: Any, output: Any) -> Any:
            pooled, *tokens = output if isinstance(output, tuple) else (output,)
            features = trace.tap(site, pooled, pooled @ projection)
            return (features, *tokens) if tokens else features

        visual.proj = None
        stack.callback(setattr, visual, "proj", projection)
        stack.callback(visual.register_forward_hook(project).remove)

    def _watch_text_projection(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        """Shadow the tensor by an nn.Linear with the same weight, which open_clip runs as a module."""
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


_HEAD_WIDTH = 64
"""open_clip's default."""
_NORM = {"eps": 1e-5}
"""torch's default."""
_BOUNDED: set[str] = set()
"""Configurations with shapes of weights that passed the check of their size; a fine-tune and its base share one."""


class OpenClip(ClipFamily):
    name = "open_clip ViT"
    library = "open_clip"
    config_file = "open_clip_config.json"
    can_be_spread = False
    packed_attention = True
    tower_name = "the vision transformer"
    roots = ("visual.", "")
    stem = "transformer.resblocks."
    modules: ClassVar[Mapping[str, str]] = {
        "attn.q": "attn.in_proj_",
        "attn.k": "attn.in_proj_",
        "attn.v": "attn.in_proj_",
        "attn.out": "attn.out_proj.",
        "mlp.up": "mlp.c_fc.",
        "mlp.down": "mlp.c_proj.",
    }
    residual_names: ClassVar[Mapping[str, str]] = {
        "class_embedding": "class",
        "positional_embedding": "positions",
        "conv1.weight": "stem",
        "ln_pre.weight": "norm.pre.weight",
        "ln_pre.bias": "norm.pre.bias",
        "ln_post.weight": "norm.post.weight",
        "ln_post.bias": "norm.post.bias",
    }
    block_residual_names: ClassVar[Mapping[str, str]] = {
        "ln_1.weight": "attn.norm.weight",
        "ln_1.bias": "attn.norm.bias",
        "ls_1.gamma": "attn.scale",
        "ln_2.weight": "mlp.norm.weight",
        "ln_2.bias": "mlp.norm.bias",
        "ls_2.gamma": "mlp.scale",
    }
    reasons: ClassVar[Mapping[str, str]] = {
        r"^(logit_scale|logit_bias)$": TEXT_TOWER,
        r"^class_embedding$": "class token",
        r"^positional_embedding$": "positions",
        r"^conv1\.": "patch stem",
        r"(^|\.)ln(_[^.]*)?(\.|$)": "LayerNorm",
    }

    def projection_sites(self, shapes: Shapes, root: str) -> list[Site]:
        return _projection(shapes, f"{root}proj", "proj") if f"{root}proj" in shapes else []

    def text_sites(self, shapes: Shapes, root: str) -> list[Site]:
        prefix = _text_prefix(shapes, root)
        if prefix is None:
            return []
        sites = self._tower_sites(shapes, prefix + self.stem, "text.")
        return sites + _projection(shapes, f"{prefix}text_projection", "text.proj")

    def vision_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return _section(_section(config, "model_cfg"), "vision_cfg")

    def heads(self, vision: Mapping[str, Any], width: int) -> int | None:
        """open_clip configures the width of a head; an empty configuration says nothing."""
        head = vision.get("head_width", _HEAD_WIDTH) if vision else None
        return count_heads(width, width // head) if type(head) is int and head > 0 else None

    def residual(self, shapes: Shapes, root: str, blocks: int) -> tuple[Axis, ...]:
        """Attentional pooling reads the residual stream in other ways, which are not followed here."""
        pooled = any(name.startswith(f"{root}attn_pool") for name in shapes)
        return () if pooled else super().residual(shapes, root, blocks)

    def config_of(self, module: nn.Module) -> Mapping[str, Any]:
        """Return what a loaded model shows of its configuration, which open_clip does not keep with it."""
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        root = self.vision_prefix(shapes) or ""
        visual: Any = module.get_submodule(root.removesuffix("."))
        block = visual.transformer.resblocks[0]
        shown = {"image_size": getattr(visual, "image_size", None), "head_width": getattr(block.attn, "head_dim", None)}
        gelu = type(getattr(block.mlp, "gelu", None)).__name__
        model = {"quick_gelu": gelu == "QuickGELU", "vision_cfg": shown | _shown(visual, "pool_type")}
        if self.text_sites(shapes, root):
            whole: Any = module.get_submodule(root.removesuffix("visual.").removesuffix("."))
            text = getattr(whole, "text", whole)
            heads = getattr(text.transformer.resblocks[0].attn, "num_heads", None)
            model["text_cfg"] = {"heads": heads} | _shown(text, "pool_type" if text is not whole else "text_pool_type")
        return {"model_cfg": model}

    def filled(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        from open_clip import CLIPTextCfg, CLIPVisionCfg
        from open_clip.transform import PreprocessCfg

        model = _section(config, "model_cfg")
        parts = {"vision_cfg": CLIPVisionCfg(), "text_cfg": CLIPTextCfg()}
        towers = {name: {**asdict(usual), **model[name]} for name, usual in parts.items() if _section(model, name)}
        for tower in towers.values():
            tower["act_kwargs"] = json.dumps(tower["act_kwargs"] or {}, sort_keys=True)
            tower["norm_kwargs"] = {**_NORM, **_section(tower, "norm_kwargs")}
        prepared = {**asdict(PreprocessCfg()), **_section(config, "preprocess_cfg")}
        prepared.pop("size")  # open_clip takes the model's
        usual = {"quick_gelu": False} if model else {}
        return {**config, "model_cfg": {**usual, **model, **towers}, "preprocess_cfg": prepared}

    def skeleton(self, folder: Path) -> nn.Module:
        from hf_bico.models.families.open_clip_outline import outline

        plain = outline(self.read_config(folder), FileCheckpoint.in_folder(folder, self.library).shapes)
        return self._skeleton(folder) if plain is None else plain

    def _skeleton(self, folder: Path) -> nn.Module:
        """Return the model that open_clip builds, on the meta device."""
        import torch

        with torch.device("meta"):
            skeleton: nn.Module = self._bare(folder, torch.device("meta"))
        return skeleton

    def _bare(self, folder: Path, device: torch.device) -> Any:
        """Build the model of a folder's configuration with open_clip, without its weights."""
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
            f"open_clip cannot build a model from '{self.config_file}' of '{folder_name(folder)}': "
            f"{without_folder(error, folder)}",
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
            with _silenced_logging():
                open_clip.load_checkpoint(model, str(weights[0]))
        except CANNOT_BUILD as error:
            raise weights_do_not_fit(folder, error) from error
        config = self.read_config(folder)
        live = self._live(model, config)
        live.transform = transform
        from_hub_library = _section(_section(config, "model_cfg"), "text_cfg").get("hf_tokenizer_name")
        no_code = {"trust_remote_code": False} if from_hub_library else {}
        with loadable(folder, "tokenizer"), _silenced_logging():
            live.tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}", **no_code)
        return live

    def _require_bounded(self, folder: Path) -> None:
        """Refuse a model that is far larger than its weights, before memory is allocated for it."""
        shapes = FileCheckpoint.in_folder(folder, self.library).shapes
        key = json.dumps([self.read_config(folder), shapes], sort_keys=True)
        if key in _BOUNDED:
            return
        try:
            self._skeleton(folder)
            _BOUNDED.add(key)
        except RepoError as error:
            if isinstance(error.__cause__, TooLargeError):
                raise
            # some models cannot be built on the meta device: the next step builds this one with memory

    def wrap(self, module: nn.Module) -> LiveModel:
        return self._live(module, {})

    def _live(self, module: nn.Module, config: Mapping[str, Any]) -> OpenClipModel:
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        visual = getattr(module, "visual", module)
        attention = module.get_submodule(f"{self.vision_prefix(shapes) or ''}transformer.resblocks.0.attn")
        own = {"image_size": getattr(visual, "image_size", None), "head_width": getattr(attention, "head_dim", None)}
        return OpenClipModel(module, self.layout(shapes, config or {"model_cfg": {"vision_cfg": own}}))


def _shown(tower: Any, pooling: str) -> dict[str, Any]:
    norm = tower.transformer.resblocks[0].ln_1
    known = {"pool_type": getattr(tower, pooling, None), "norm_kwargs": {"eps": getattr(norm, "eps", None)}}
    return {name: value for name, value in known.items() if value is not None}


@changed_together
@contextmanager
def _silenced_logging() -> Iterator[None]:
    """Silence what open_clip says on the root logger, such as that a model without weights is random."""
    nowhere = logging.NullHandler()  # without any handler, Python would give the root logger one for good
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    logging.root.addHandler(nowhere)
    try:
        yield
    finally:
        logging.root.removeHandler(nowhere)
        logging.disable(before)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _text_prefix(shapes: Shapes, root: str) -> str | None:
    """Return what precedes the text tower's names, if it is a transformer of open_clip's own that reads tokens."""
    if not root.endswith("visual."):
        return None
    whole = root.removesuffix("visual.")
    needed = ("token_embedding.weight", "transformer.resblocks.0.attn.in_proj_weight")
    for prefix in (whole, f"{whole}text."):
        # with a class embedding, the tower has one row more than tokens
        if all(prefix + name in shapes for name in needed) and f"{prefix}cls_emb" not in shapes:
            return prefix
    return None


def _projection(shapes: Shapes, tensor: str, name: str) -> list[Site]:
    if tensor in shapes:
        return [linear_site(shapes, tensor, "", name=name, role="proj", block=None, transposed=True)]
    weight = f"{tensor}.weight"  # a projection with a bias is a module
    if weight in shapes:
        return [linear_site(shapes, weight, f"{tensor}.bias", name=name, role="proj", block=None)]
    return []
