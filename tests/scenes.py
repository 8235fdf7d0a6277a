"""Whole situations on disk: a base, its fine-tune, a target and a data set, for tests of the pipeline and the CLI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from toys import CLASS_NAMES, WRITERS, Toy, random_state

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


def make_scene(
    folder: Path, libraries: tuple[str, str] = ("open_clip", "open_clip"), dtype: torch.dtype = torch.float32
) -> Scene:
    """Random models; the fine-tune changed every tensor of its visual tower a little."""
    source, target = libraries
    state = random_state(SOURCE, 0)
    generator = torch.Generator().manual_seed(5)
    tuned = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) if name.startswith("visual.") else tensor
        for name, tensor in state.items()
    }
    return Scene(
        folder,
        WRITERS[source](folder / "tuned", SOURCE, tuned),
        WRITERS[source](folder / "base", SOURCE, state),
        WRITERS[target](folder / "target", TARGET, random_state(TARGET, 1, dtype)),
        write_images(folder / "pictures"),
    )


def write_images(folder: Path, size: int = 20) -> Path:
    """An image folder: 12 training and 5 test images of each class."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 5)):
        for name in CLASS_NAMES:
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    return folder
