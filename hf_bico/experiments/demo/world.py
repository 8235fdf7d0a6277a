"""Builds the small world: real open_clip models, trained in seconds and kept as repo folders, with their data sets.

Knows nothing about task vectors.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
from open_clip.transform import PreprocessCfg
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from hf_bico.errors import OutputError, OutputExistsError
from hf_bico.experiments.demo import digits, training
from hf_bico.experiments.demo.digits import (
    CONTEXT_LENGTH,
    IMAGE_SIZE,
    PIXEL_MEAN,
    PIXEL_STD,
    SHIFTED_TASKS,
    Wording,
    build_tokenizer,
    find_task,
    load_splits,
)
from hf_bico.models.checkpoints import save_tensors
from hf_bico.runtime.output import atomic_folder
from hf_bico.utils.progress import Progress, silent

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
SEED_FILE = "small-world.json"


@dataclass(frozen=True)
class Shape:
    """The size of a visual tower."""

    width: int
    layers: int


SHAPES = {
    "narrow": Shape(width=32, layers=2),
    "wide": Shape(width=48, layers=2),
    "deep": Shape(width=48, layers=4),
    "twin": Shape(width=32, layers=2),
}
TASK_NAMES = tuple(task.name for task in SHIFTED_TASKS)


@dataclass(frozen=True)
class World:
    """Folders of the models and data sets of one seed."""

    folder: Path

    def base(self, shape: str) -> Path:
        return self.folder / "models" / shape

    def fine_tuned(self, shape: str, task: str) -> Path:
        return self.folder / "models" / f"{shape}-{task}"

    def data(self, task: str) -> Path:
        return self.folder / "data" / task


def pretrain(folder: Path, shape: str, *, seed: int, progress: Progress = silent) -> Path:
    """Train a model of that shape from scratch, write it as an open_clip repo and return the folder.

    Seed and shape determine the initial weights, the images and the wording of the captions.
    """
    if shape not in SHAPES:
        raise ValueError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    tokenizer = build_tokenizer()
    config = _model_config(SHAPES[shape], len(tokenizer))
    own_seed = _generator_seed("pretrain", shape, seed)
    with atomic_folder(folder) as draft, training.quiet_torch(own_seed):
        model = open_clip.CLIP(**config)
        wording = Wording.draw(random.Random(own_seed), training.WORDING_SIZE)
        step_done = partial(progress, f"pretraining {shape}")
        training.pretrain_on_captions(model, tokenizer, load_splits()["train"], wording, step_done)
        _save(draft, model, tokenizer, config)
    return folder


def fine_tune(folder: Path, base: Path, task: str, *, seed: int) -> Path:
    """Fine-tune a model's visual tower on a task, write the whole model and return the folder."""
    domain = find_task(task).domain
    config = json.loads((base / CONFIG_FILE).read_text())["model_cfg"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    with atomic_folder(folder) as draft, training.quiet_torch(_generator_seed("fine-tune", task, seed)):
        model = open_clip.CLIP(**config)
        model.load_state_dict(load_file(base / WEIGHTS_FILE))
        training.fine_tune_on_domain(model, tokenizer, load_splits()["train"], domain)
        _save(draft, model, tokenizer, config)
    return folder


def write_data(folder: Path, task: str, *, seed: int) -> Path:
    """Write a task as a data set folder that `datasets.load_dataset` reads, and return the folder.

    The splits `train` and `test` have the columns image (8x8 RGB PNG) and label; the seed shuffles the rows.
    """
    domain = find_task(task).domain
    with atomic_folder(folder) as draft:
        digits.write_parquet(draft / "data", domain, seed=_generator_seed("data", task, seed))
    return folder


def build(
    folder: Path,
    *,
    seed: int = 0,
    shapes: Sequence[str] = ("narrow", "wide"),
    tasks: Sequence[str] = TASK_NAMES,
    progress: Progress = silent,
) -> World:
    """Build the given models and data sets in `folder`, which holds one seed's; existing ones are kept."""
    _require_own(folder, seed)
    world = World(folder)
    for task in tasks:
        if not world.data(task).exists():
            progress(f"writing the data set {task}", 0, 1)
            write_data(world.data(task), task, seed=seed)
            progress(f"writing the data set {task}", 1, 1)
    for shape in shapes:
        if not world.base(shape).exists():
            pretrain(world.base(shape), shape, seed=seed, progress=progress)
        for task in tasks:
            if not world.fine_tuned(shape, task).exists():
                progress(f"fine-tuning {shape} on {task}", 0, 1)
                fine_tune(world.fine_tuned(shape, task), world.base(shape), task, seed=seed)
                progress(f"fine-tuning {shape} on {task}", 1, 1)
    return world


def _require_own(folder: Path, seed: int) -> None:
    """Record the seed in a new folder; refuse a folder of another seed, or with other content."""
    note = folder / SEED_FILE
    try:
        if not note.is_file():
            if folder.exists() and any(folder.iterdir()):
                raise OutputExistsError(f"'{folder}' is not empty, and no small world", "name another folder")
            folder.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps({"seed": seed}) + "\n", encoding="utf-8")
        own_seed = json.loads(note.read_text(encoding="utf-8"))["seed"]
    except OSError as error:
        raise OutputError(f"'{folder}' cannot be written: {error.strerror}", "name another folder") from error
    except (ValueError, KeyError, TypeError) as error:
        raise OutputExistsError(
            f"'{note}' is not what this tool writes", "remove it, or name another folder"
        ) from error
    if own_seed != seed:
        raise OutputExistsError(f"'{folder}' holds the small world of seed {own_seed}", "name another folder")


def _generator_seed(purpose: str, name: str, seed: int) -> int:
    return zlib.crc32(f"{purpose} {name} {seed}".encode())


def _model_config(shape: Shape, vocabulary: int) -> dict[str, Any]:
    return {
        "embed_dim": 32,
        "vision_cfg": {
            "image_size": IMAGE_SIZE,
            "patch_size": 4,
            "width": shape.width,
            "layers": shape.layers,
            "head_width": 16,
            "mlp_ratio": 2.0,
        },
        "text_cfg": {
            "context_length": CONTEXT_LENGTH,
            "vocab_size": vocabulary,
            "hf_tokenizer_name": "small-world",
            "width": 32,
            "heads": 2,
            "layers": 1,
            "mlp_ratio": 2.0,
        },
    }


def _save(folder: Path, model: open_clip.CLIP, tokenizer: PreTrainedTokenizerFast, config: dict[str, Any]) -> None:
    preprocess = PreprocessCfg(size=IMAGE_SIZE, mean=(PIXEL_MEAN,) * 3, std=(PIXEL_STD,) * 3)
    text = json.dumps({"model_cfg": config, "preprocess_cfg": asdict(preprocess)}, indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    save_tensors(model.state_dict(), folder / WEIGHTS_FILE)
    tokenizer.save_pretrained(folder)
