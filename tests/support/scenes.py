"""Whole situations on disk: a base, its fine-tune, a target and a data set, for tests of the pipeline and the CLI."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features
from PIL import Image

from hf_bico.data.loading import no_progress_bars
from support.paper import PAPER_WORDS
from support.toys import CLASS_NAMES, WRITERS, Toy, random_state

Pictures = dict[tuple[str, int], Image.Image]
"""By class and number."""
SOURCE, TARGET = Toy(width=16), Toy(width=24, heads=3, grid=5)


@dataclass(frozen=True)
class Scene:
    """Folders of one situation."""

    folder: Path
    tuned: Path
    base: Path
    target: Path
    data: Path

    @property
    def arguments(self) -> list[str]:
        """What `hf-bico port` needs, in few samples."""
        paths = [str(self.tuned), "--base", str(self.base), "--to", str(self.target), "--data", str(self.data)]
        return [*paths, "-n", "24"]

    @property
    def port_by_paper(self) -> list[str]:
        """The words of such a port with the paper's recipe, which holds nothing back."""
        return ["port", *self.arguments, *PAPER_WORDS]


def make_scene(
    folder: Path, libraries: tuple[str, str] = ("open_clip", "open_clip"), dtype: torch.dtype = torch.float32
) -> Scene:
    """Random models; the fine-tune changed every tensor of its visual tower a little."""
    shutil.copytree(_made(libraries, dtype), folder, dirs_exist_ok=True)
    return Scene(folder, *(folder / name for name in ("tuned", "base", "target", "pictures")))


@cache
def _place() -> tempfile.TemporaryDirectory[str]:
    """Of the scenes that were made; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="hf-bico-scenes-")


def forget_scenes() -> None:
    """For a process that ends without its last acts."""
    _place().cleanup()
    _made.cache_clear()
    _place.cache_clear()


@cache
def _made(libraries: tuple[str, str], dtype: torch.dtype) -> Path:
    """Such a scene, to be copied."""
    folder = Path(_place().name) / "-".join([*libraries, str(dtype)])
    source, target = libraries
    state = random_state(SOURCE, 0)
    generator = torch.Generator().manual_seed(5)
    tuned = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) if name.startswith("visual.") else tensor
        for name, tensor in state.items()
    }
    WRITERS[source](folder / "tuned", SOURCE, tuned)
    WRITERS[source](folder / "base", SOURCE, state)
    WRITERS[target](folder / "target", TARGET, random_state(TARGET, 1, dtype))
    write_tables(folder / "pictures")
    return folder


def write_images(folder: Path, size: int = 20, train: int = 12, test: int = 5) -> Path:
    """An image folder: so many images of each class."""
    for split, pictures in _pictures(size, train, test).items():
        for (name, index), picture in pictures.items():
            place = folder / split / name / f"{index}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            picture.save(place)
    return folder


def write_tables(folder: Path, pictures: Mapping[str, Pictures] | None = None) -> Path:
    """The same rows, or others, as parquet files that lie as those of a Hub repo: what is found and read soonest."""
    features = Features({"image": datasets.Image(), "label": ClassLabel(names=sorted(CLASS_NAMES))})
    place = folder / "data"
    place.mkdir(parents=True)
    for split, some in (pictures or _pictures()).items():
        in_order = sorted(some, key=lambda key: (key[0], f"{key[1]}.png"))  # as of the files' paths
        columns = {"image": [some[key] for key in in_order], "label": [name for name, _ in in_order]}
        with no_progress_bars():
            Dataset.from_dict(columns, features=features).to_parquet(place / f"{split}-00000-of-00001.parquet")
    return folder


def _pictures(size: int = 20, train: int = 12, test: int = 5) -> dict[str, Pictures]:
    generator = np.random.default_rng(0)
    return {
        split: {
            (name, index): Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8))
            for name in CLASS_NAMES
            for index in range(count)
        }
        for split, count in (("train", train), ("test", test))
    }
