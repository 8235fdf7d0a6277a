"""The small world in transformers' layout: its models as `CLIPModel` folders, and LoRAs that peft trains on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

from hf_bico.experiments.demo.digits import CLASS_NAMES, PROMPT, find_task, load_splits, normalise
from hf_bico.experiments.demo.training import FINE_TUNING_BATCH, FINE_TUNING_RATE, FINE_TUNING_STEPS, quiet_torch
from support.toys import to_transformers


def as_transformers(folder: Path, out: Path) -> Path:
    """A model of the small world in transformers' layout."""
    config = json.loads((folder / "open_clip_config.json").read_text())
    model, vision, text = (config["model_cfg"], config["model_cfg"]["vision_cfg"], config["model_cfg"]["text_cfg"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shared = {"hidden_act": "gelu", "projection_dim": model["embed_dim"]}
    vision_config = {
        "hidden_size": vision["width"],
        "intermediate_size": int(vision["width"] * vision["mlp_ratio"]),
        "num_hidden_layers": vision["layers"],
        "num_attention_heads": vision["width"] // vision["head_width"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
    }
    text_config = {
        "hidden_size": text["width"],
        "intermediate_size": int(text["width"] * text["mlp_ratio"]),
        "num_hidden_layers": text["layers"],
        "num_attention_heads": text["heads"],
        "max_position_embeddings": text["context_length"],
        "vocab_size": text["vocab_size"],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    clip = CLIPModel(
        CLIPConfig(text_config={**text_config, **shared}, vision_config={**vision_config, **shared}, **shared)
    )
    state = load_file(folder / "open_clip_model.safetensors")
    clip.load_state_dict(to_transformers({name: tensor for name, tensor in state.items() if name != "attn_mask"}))
    clip.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = vision["image_size"]
    CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=config["preprocess_cfg"]["mean"],
        image_std=config["preprocess_cfg"]["std"],
    ).save_pretrained(out)
    return out


@dataclass(frozen=True)
class LoraRecipe:
    """What of a vision tower a LoRA changes, at which rank, and how long it is trained."""

    modules: tuple[str, ...] = ("q_proj", "v_proj", "fc1", "fc2")
    rank: int = 8
    steps: int = FINE_TUNING_STEPS

    @property
    def config(self) -> LoraConfig:
        return LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules=list(self.modules))


def train_lora(
    base: Path, out: Path, task: str, recipe: LoraRecipe, *, seed: int = 0, base_id: str | None = None
) -> Path:
    """A LoRA that peft trains on the vision tower of a transformers CLIP, with the batches and the learning rate of
    the small world's own fine-tuning; `base_id` is what it shall call its base."""
    digits = load_splits()["train"]
    pixels = normalise(find_task(task).domain.transform(digits.images))
    with quiet_torch(seed):
        clip = CLIPModel.from_pretrained(base)
        classes, scale = _class_embeddings(clip, base), clip.logit_scale.exp().detach()
        tower = get_peft_model(clip.vision_model, recipe.config)
        trained = [parameter for parameter in tower.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=FINE_TUNING_RATE)
        for _ in range(recipe.steps):
            batch = torch.randint(len(digits.labels), (FINE_TUNING_BATCH,))
            features = clip.visual_projection(tower(pixel_values=pixels[batch]).pooler_output)
            logits = scale * functional.normalize(features, dim=-1) @ classes.T
            optimizer.zero_grad()
            functional.cross_entropy(logits, digits.labels[batch]).backward()
            optimizer.step()
    tower.save_pretrained(out)
    (out / "README.md").unlink()  # peft's template; the repo gets a card of its own
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base_id
    config["target_modules"].sort()  # peft holds a set, and writes it in another order every time
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return out


@torch.no_grad()
def _class_embeddings(clip: CLIPModel, folder: Path) -> Tensor:
    prompts = AutoTokenizer.from_pretrained(folder)(
        [PROMPT.format(name) for name in CLASS_NAMES],
        padding="max_length",
        max_length=clip.config.text_config.max_position_embeddings,
    )
    return functional.normalize(clip.get_text_features(torch.tensor(prompts.input_ids)).pooler_output, dim=-1)
