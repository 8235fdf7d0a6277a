"""Augment samples with shifted and noisy copies, the same ones on every machine.

Knows samples and their images; neither data sets nor models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

from hf_bico.data.dataset import Samples
from hf_bico.errors import UsageError
from hf_bico.utils.samples import Answered, Captioned, Chat, Text

if TYPE_CHECKING:
    from numpy.random import Generator


SHIFT = 1 / 16
"""Largest shift of a copy, as a share of its width and height."""
NOISE = 0.05
"""Standard deviation of a copy's noise, as a share of the full range, or of a prepared tensor's own deviation."""


@dataclass(frozen=True)
class AugmentedSamples:
    """Samples, each followed by `copies` augmented copies of it.

    A copy depends on the seed, its row and its number alone, whatever else was drawn.
    """

    samples: Samples
    copies: int
    seed: int

    def __len__(self) -> int:
        return len(self.samples) * (1 + self.copies)

    @cached_property
    def origins(self) -> tuple[int, ...]:
        """For each entry, the position of its sample."""
        return tuple(position for position in range(len(self.samples)) for _ in range(1 + self.copies))

    @cached_property
    def labels(self) -> tuple[int, ...]:
        return tuple(self.samples.labels[position] for position in self.origins)

    def batches(self, size: int) -> Iterator[tuple[list[Any], list[int]]]:
        """Yield (images, labels), `size` at a time."""
        images = self._images()
        for start in range(0, len(self), size):
            labels = list(self.labels[start : start + size])
            yield list(islice(images, len(labels))), labels

    def _images(self) -> Iterator[Any]:
        import numpy as np

        for row, ([image], _) in zip(self.samples.indices, self.samples.batches(1), strict=True):
            yield image
            for number in range(1, 1 + self.copies):
                digest = blake2b(f"{self.seed}:{row}:{number}".encode(), digest_size=16).digest()
                yield augment(image, np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))))


def augment(image: Any, generator: Generator) -> Any:
    """Return a shifted and noisy copy of a PIL image, as RGB, or of a prepared tensor (channels, height, width).

    Shifts by parts of a pixel interpolate linearly and repeat the edge; captions stay as they are.
    """
    import numpy as np
    import torch
    from PIL import Image

    if isinstance(image, Captioned):
        return replace(image, image=augment(image.image, generator))
    if isinstance(image, Text | Answered | Chat):
        raise UsageError("altered copies are of images, and the samples are texts", "leave --augment out")
    if isinstance(image, torch.Tensor):
        pixels = image.double().cpu().numpy()
        copy = _shift_and_add_noise(pixels, (-2, -1), NOISE * pixels.std(), generator)
        return torch.from_numpy(copy).to(image)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64)
    copy = _shift_and_add_noise(pixels, (0, 1), NOISE * 255, generator)
    return Image.fromarray(copy.round().clip(0, 255).astype(np.uint8))


def _shift_and_add_noise(pixels: Any, axes: tuple[int, int], noise: float, generator: Generator) -> Any:
    import numpy as np
    from scipy import ndimage

    shift = np.zeros(pixels.ndim)
    for axis in axes:
        shift[axis] = SHIFT * pixels.shape[axis] * generator.uniform(-1, 1)
    return ndimage.shift(pixels, shift, order=1, mode="nearest") + noise * generator.standard_normal(pixels.shape)
