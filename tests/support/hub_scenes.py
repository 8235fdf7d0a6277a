"""The situations of `scenes` as repos of the loopback Hub, with cards as people and tools write them."""

from __future__ import annotations

import json
from pathlib import Path

from hf_bico.experiments.demo.world import World
from support.hub import Hub
from support.scenes import Scene, make_scene
from support.transformers_world import as_transformers

SOURCE, BASE, TARGET, DATA = "user/vit-b16-eurosat", "laion/vit-b16", "laion/ViT-B-16-plus", "user/eurosat"

SOURCE_CARD = f"""---
license: mit
base_model: {BASE}
datasets:
- {DATA}
pipeline_tag: zero-shot-image-classification
tags:
- generated_from_trainer
---

# vit-b16-eurosat

This model was fine-tuned on the eurosat data set.
"""
BASE_CARD = "---\nlicense: mit\nlibrary_name: open_clip\n---\n# A base\n"
TARGET_CARD = "---\nlicense: mit\nlibrary_name: open_clip\nlanguage: en\n---\n# A newer base\n"
DATA_CARD = "---\nlicense: cc0-1.0\n---\n# Pictures\n"


def upload(hub: Hub, repo_id: str, folder: Path, card: str | None = None, **options: object) -> str:
    """A folder as a new repo; returns the commit."""
    repo = hub.create(repo_id, **options)  # type: ignore[arg-type]
    files: dict[str, bytes | str | Path] = {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }
    config = folder / "open_clip_config.json"
    if config.is_file():
        content = json.loads(config.read_text())
        # by `hf-hub:` open_clip asks the repo of this name for the tokenizer
        content["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = repo_id
        files[config.name] = json.dumps(content)
    return repo.commit(files if card is None else {**files, "README.md": card})


def publish(hub: Hub, folder: Path, libraries: tuple[str, str] = ("open_clip", "open_clip")) -> Scene:
    """Fine-tune, base, target and data set under the names above."""
    scene = make_scene(folder, libraries)
    upload(hub, SOURCE, scene.tuned, SOURCE_CARD)
    upload(hub, BASE, scene.base, BASE_CARD)
    upload(hub, TARGET, scene.target, TARGET_CARD)
    upload(hub, DATA, scene.data, DATA_CARD, type="dataset")
    return scene


def publish_world(hub: Hub, world: World, task: str = "inverted") -> None:
    """The small world under these names: narrow, fine-tuned on a task, its base, wide, and the data."""
    upload(hub, SOURCE, world.fine_tuned("narrow", task), SOURCE_CARD)
    upload(hub, BASE, world.base("narrow"), BASE_CARD)
    upload(hub, TARGET, world.base("wide"), TARGET_CARD)
    upload(hub, DATA, world.data(task), DATA_CARD, type="dataset")


PUBLISHED = ("tanganke/clip-vit-base-patch16_eurosat", "openai/clip-vit-base-patch16")
"""A fine-tune that is on the Hub, and its base."""
NEWER, TANGANKE_DATA = "laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "tanganke/eurosat"


def publish_real_ids(hub: Hub, world: World, scratch: Path, task: str = "inverted") -> None:
    """The small world under ids of the Hub, in the layouts that these have.

    The fine-tune is a vision tower alone, its base a whole transformers CLIP, and the target open_clip's.
    """
    from transformers import CLIPModel, CLIPVisionModel

    tuned, base = PUBLISHED
    whole = as_transformers(world.base("narrow"), scratch / "base")
    clip = CLIPModel.from_pretrained(as_transformers(world.fine_tuned("narrow", task), scratch / "whole"))
    vision = CLIPVisionModel(clip.config.vision_config)
    getattr(vision, "vision_model", vision).load_state_dict(clip.vision_model.state_dict())
    vision.save_pretrained(scratch / "tuned")
    upload(hub, base, whole, "---\ntags:\n- vision\n---\n# CLIP\n")
    card = f"---\nbase_model:\n- {base}\ndatasets:\n- {TANGANKE_DATA}\nmetrics:\n- accuracy\n---\n# EuroSAT\n"
    upload(hub, tuned, scratch / "tuned", card)
    upload(hub, NEWER, world.base("wide"), "---\nlicense: mit\nlibrary_name: open_clip\n---\n# CLIP\n")
    upload(hub, TANGANKE_DATA, world.data(task), DATA_CARD, type="dataset")
