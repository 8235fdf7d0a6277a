"""The situations of `scenes` as repos of the loopback Hub, with cards as people and tools write them."""

from __future__ import annotations

import json
from pathlib import Path

from hf_bico.experiments.demo.world import World
from support.hub import Hub
from support.scenes import Scene, make_scene

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
