"""The pairs of models whose ports are timed: folders of random weights in real shapes, fine-tuned sources and samples.

Knows what the models look like and what is asked about them; not how a port is timed, nor what it should cost.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

CLASSES = ("airport", "beach", "castle", "desert", "forest", "harbour", "island", "meadow", "river", "village")
TEMPLATE = "a photo of a {}."
VISION_LAYERS = r"vision_model\.encoder\.layers\.|visual_projection"
ENCODER_LAYERS = r"encoder\.block\."
LORA_RANK = 16
CHANGE = 0.02
"""How large a fine-tuned layer's change is beside the layer."""
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
_CALLED = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}
_WORDS = 40


@dataclass(frozen=True)
class Pair:
    """Two models in folders, what one of them was taught, and how a port between them is asked for.

    `kind` is the models' family: clip, t5 or qwen. `layers` matches the names of the layers that are carried.
    """

    kind: str
    title: str
    base: Path
    tuned: Path
    target: Path
    layers: str
    rows: Callable[[int], list[dict[str, Any]]]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """The transformers classes of model and processor that a port of it imports."""
        return {
            "clip": ("CLIPModel", "CLIPImageProcessor", "AutoTokenizer"),
            "t5": ("T5ForConditionalGeneration", "AutoTokenizer"),
            "qwen": ("Qwen2ForCausalLM", "AutoTokenizer"),
        }[self.kind]


@dataclass(frozen=True)
class ClipShape:
    """A CLIP: its vision tower, its text tower and the width of what both give."""

    width: int
    blocks: int
    heads: int
    image: int
    patch: int
    embedding: int
    text_width: int
    text_blocks: int
    text_heads: int
    vocabulary: int = 49408

    def config(self) -> Any:
        from transformers import CLIPConfig

        shared = {"projection_dim": self.embedding}
        vision = {
            "hidden_size": self.width,
            "intermediate_size": 4 * self.width,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "image_size": self.image,
            "patch_size": self.patch,
        }
        text = {
            "hidden_size": self.text_width,
            "intermediate_size": 4 * self.text_width,
            "num_hidden_layers": self.text_blocks,
            "num_attention_heads": self.text_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 77,
            **{f"{name}_token_id": SPECIAL.index(token) for name, token in _CALLED.items()},
        }
        return CLIPConfig(text_config={**text, **shared}, vision_config={**vision, **shared}, **shared)


BASE_16 = ClipShape(768, 12, 12, 224, 16, 512, 512, 12, 8)
BASE_16_PLUS = ClipShape(896, 12, 14, 240, 16, 640, 640, 12, 10)
LARGE_14 = ClipShape(1024, 24, 16, 224, 14, 768, 768, 12, 12)
T5_3B = {"d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32, "num_layers": 24}
T5_LARGE = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 24}
QWEN_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
QWEN_3B = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}


def clip_pair(place: Path, title: str, source: ClipShape, target: ClipShape) -> Pair:
    """Two CLIPs, the first of them fine-tuned in the linear layers of its vision tower; asked by class names."""
    base, other = (
        _write_clip(place / name, shape, seed) for name, shape, seed in (("base", source, 0), ("target", target, 1))
    )
    tuned = _write_tuned(place / "tuned", base, "CLIPModel", VISION_LAYERS, torch.float32)
    side = max(source.image, target.image)
    options = {"class_names": CLASSES, "templates": (TEMPLATE,), "objective": "zero-shot"}
    return Pair("clip", title, base, tuned, other, VISION_LAYERS, lambda count: images(count, side), options)


def t5_pair(
    place: Path, title: str, source: Mapping[str, int], target: Mapping[str, int], length: int, vocabulary: int = 32128
) -> Pair:
    """Two T5s with a decoder of one block, the first fine-tuned in its encoder; asked for the word of a class."""
    from transformers import T5Config, T5ForConditionalGeneration

    def made(name: str, shape: Mapping[str, int], seed: int) -> Path:
        config = T5Config(
            vocab_size=vocabulary, num_decoder_layers=1, decoder_start_token_id=0, eos_token_id=3, **shape
        )
        return _write(place / name, T5ForConditionalGeneration, config, seed, torch.bfloat16)

    base, other = made("base", source, 0), made("target", target, 1)
    tuned = _write_tuned(place / "tuned", base, "T5ForConditionalGeneration", ENCODER_LAYERS, torch.bfloat16)
    options = {"class_names": CLASSES, "max_length": length}
    return Pair("t5", title, base, tuned, other, ENCODER_LAYERS, lambda count: texts(count, length, True), options)


def qwen_pair(
    place: Path,
    title: str,
    source: Mapping[str, int],
    target: Mapping[str, int],
    length: int,
    modules: Sequence[str],
    vocabulary: int = 151936,
) -> Pair:
    """Two Qwen2 decoders in bfloat16 and a LoRA on the named layers of the first; asked for every next token."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def made(name: str, shape: Mapping[str, int], seed: int) -> Path:
        config = Qwen2Config(vocab_size=vocabulary, num_key_value_heads=2, tie_word_embeddings=True, **shape)
        return _write(place / name, Qwen2ForCausalLM, config, seed, torch.bfloat16)

    base, other = made("base", source, 0), made("target", target, 1)
    lora = _write_lora(place / "lora", base, modules)
    layers = rf"model\.layers\.\d+\.\w+\.({'|'.join(modules)})$"
    options = {"max_length": length, "dtype": "bfloat16"}
    return Pair("qwen", title, base, lora, other, layers, lambda count: texts(count, length, False), options)


def images(count: int, side: int) -> list[dict[str, Any]]:
    """Smooth random images, each with a label."""
    generator = torch.Generator().manual_seed(5)
    rough = torch.randn(count, 3, 14, 14, generator=generator)
    rows = []
    for index, one in enumerate(rough):
        smooth = functional.interpolate(one[None], size=(side, side), mode="bicubic")[0]
        noisy = smooth + 0.3 * torch.randn(3, side, side, generator=generator)
        pixels = (noisy * 40 + 128).clamp(0, 255).byte().permute(1, 2, 0)
        rows.append({"image": Image.fromarray(pixels.numpy()), "label": index % len(CLASSES)})
    return rows


def texts(count: int, length: int, labelled: bool) -> list[dict[str, Any]]:
    """Random letters in words without spaces, which every tokenizer class cuts alike; as many as are read."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(_WORDS)]
    found = ["".join(draw.choices(words, k=length))[:length] for _ in range(count)]
    return [{"text": text, **({"label": index % len(CLASSES)} if labelled else {})} for index, text in enumerate(found)]


def tokenizer() -> Any:
    """Single characters, with an end: what the tokens are does not change what a port costs."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokens = (*SPECIAL, *string.printable)
    made = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    end = ("</s>", SPECIAL.index("</s>"))
    made.post_processor = TemplateProcessing(single="$A </s>", pair="$A $B </s>", special_tokens=[end])
    called = {f"{name}_token": token for name, token in {**_CALLED, "unk": "<unk>"}.items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=["input_ids", "attention_mask"], **called)


def tensor_bytes(folder: Path) -> int:
    """Of a model's weight files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _write(folder: Path, model_class: Any, config: Any, seed: int, dtype: torch.dtype) -> Path:
    torch.manual_seed(seed)
    with torch.device(_device()):
        model = model_class(config).to(dtype)
    model.cpu().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def _write_clip(folder: Path, shape: ClipShape, seed: int) -> Path:
    from transformers import CLIPImageProcessor, CLIPModel

    _write(folder, CLIPModel, shape.config(), seed, torch.float32)
    size = {"height": shape.image, "width": shape.image}
    CLIPImageProcessor(size={"shortest_edge": shape.image}, crop_size=size).save_pretrained(folder)
    return folder


def _write_tuned(folder: Path, base: Path, class_name: str, layers: str, dtype: torch.dtype) -> Path:
    """The base with a small random change of the weights and biases of the layers."""
    import transformers

    model = getattr(transformers, class_name).from_pretrained(base, dtype=dtype)
    model = model.to(_device())
    torch.manual_seed(2)
    with torch.no_grad():
        for _, module in linear_layers(model, layers):
            for parameter in module.parameters():
                scale = CHANGE * parameter.float().std().nan_to_num() + 1e-4
                parameter.add_((torch.randn_like(parameter, dtype=torch.float32) * scale).to(dtype))
    model.cpu().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def linear_layers(model: Any, layers: str) -> list[tuple[str, Any]]:
    """The linear layers of a loaded model whose names match."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and re.match(layers, name)
    ]


def _write_lora(folder: Path, base: Path, modules: Sequence[str]) -> Path:
    """A LoRA both of whose factors are random, small beside the weights."""
    from safetensors import safe_open

    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, Tensor] = {}
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                module = name.removesuffix(".weight")
                if module != name and module.rpartition(".")[2] in modules:
                    rows, columns = weights.get_slice(name).get_shape()
                    stem = f"base_model.model.{module}.lora_"
                    tensors[f"{stem}A.weight"] = torch.randn(LORA_RANK, columns, generator=generator) / columns**0.5
                    tensors[f"{stem}B.weight"] = torch.randn(rows, LORA_RANK, generator=generator) * 1e-3
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": sorted(modules),
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _device() -> str:
    """Where weights are drawn: the CPU takes a minute for a billion of them."""
    return "cuda" if torch.cuda.is_available() else "cpu"
