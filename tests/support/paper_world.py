"""Stand-ins for the paper's models and data sets, small and by the same Hub ids, on the loopback Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import open_clip
import torch
from PIL.Image import fromarray
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from hf_bico.experiments.reproduce import paper
from support.hub import Hub
from support.hub_scenes import upload
from support.language_toys import pair_rows, text_tokenizer, write_t5

SIZE = 8


def publish_vision(hub: Hub, folder: Path, name: str, tasks: tuple[str, ...]) -> None:
    """The two models of a table, and the data of some of its tasks: digits, whatever the classes are called."""
    table = paper.table(name)
    upload(hub, table.source, _clip(folder / "source", 16, seed=0))
    upload(hub, table.target, _clip(folder / "target", 24, seed=1))
    for one in tasks:
        publish_data(hub, folder, one)


def publish_data(hub: Hub, folder: Path, task: str) -> None:
    upload(hub, paper.task(task).data, _pictures(folder / task, paper.task(task)), type="dataset")


def publish_language(hub: Hub, folder: Path, tasks: tuple[str, ...]) -> None:
    """The two T5s of table 2, and tasks of GLUE in one repo."""
    table = paper.table("2")
    upload(hub, table.source, write_t5(folder / "source", width=24, seed=0))
    upload(hub, table.target, write_t5(folder / "target", width=16, seed=1))
    data = folder / "glue"
    for number, one in enumerate(map(paper.task, tasks)):
        assert one.config is not None
        assert one.text is not None
        for split, count in ((one.split, 230), (one.measured_on, 40)):
            rows = pair_rows(count, seed=10 * number + count)
            renamed = [dict(zip((*one.text, one.label), row.values(), strict=True)) for row in rows]
            names = datasets.ClassLabel(names=list(one.classes))
            table_of = datasets.Dataset.from_list(renamed).cast_column(one.label, names)
            (data / one.config).mkdir(parents=True, exist_ok=True)
            table_of.to_parquet(data / one.config / f"{split}-00000-of-00001.parquet")
    (data / "README.md").write_text(_card(data, [str(paper.task(one).config) for one in tasks]))
    upload(hub, paper.task(tasks[0]).data, data, type="dataset")


def _clip(folder: Path, width: int, seed: int) -> Path:
    """An open_clip repo whose tokenizer knows every letter."""
    tokenizer = text_tokenizer()
    text: dict[str, Any] = {"width": 16, "heads": 2, "layers": 1, "context_length": 40, "vocab_size": len(tokenizer)}
    config = {
        "embed_dim": 12,
        "vision_cfg": {"image_size": SIZE, "patch_size": 4, "width": width, "layers": 2, "head_width": 8},
        "text_cfg": {**text, "hf_tokenizer_name": "letters", "pool_type": "last"},
    }
    torch.manual_seed(seed)
    model = open_clip.CLIP(**config)
    with torch.no_grad():  # classes that are told apart, as those of a trained text tower are
        model.token_embedding.weight.mul_(50)
        for parameter in model.transformer.parameters():
            parameter.mul_(3)
    folder.mkdir()
    preprocess = {"size": SIZE, "mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}))
    save_file(dict(model.state_dict()), folder / "open_clip_model.safetensors")
    tokenizer.save_pretrained(folder)
    return folder


def _pictures(folder: Path, task: paper.PaperTask) -> Path:
    """The digits as a task of images: its own columns, its own names for classes; a config where it has one."""
    found = load_digits()
    names = datasets.ClassLabel(names=list(task.classes))
    features = datasets.Features({str(task.image): datasets.Image(), task.label: names})
    place = folder / (task.config or "data")
    place.mkdir(parents=True)
    classes = min(10, len(task.classes))
    for split, rows in ((task.split, slice(0, 300)), (task.measured_on, slice(300, 400))):
        pictures = [fromarray((16 * image).clip(0, 255).astype("uint8")).convert("RGB") for image in found.images[rows]]
        labels = [int(label) % classes for label in found.target[rows]]
        table = datasets.Dataset.from_dict({str(task.image): pictures, task.label: labels}, features=features)
        table.to_parquet(place / f"{split}-00000-of-00001.parquet")
    if task.config is not None:
        (folder / "README.md").write_text(_card(folder, [task.config]))
    return folder


def _card(folder: Path, configs: list[str]) -> str:
    lines = ["---", "configs:"]
    for config in configs:
        lines += [f"- config_name: {config}", "  data_files:"]
        for file in sorted((folder / config).glob("*.parquet")):
            lines += [f"  - split: {file.name.split('-')[0]}", f"    path: {config}/{file.name}"]
    return "\n".join([*lines, "---", ""])
