"""Altered copies of samples: how they are altered, their order, and that they are the same on every machine."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_bico.data.augmentation import NOISE, SHIFT, AugmentedSamples, augment
from hf_bico.data.dataset import Samples
from hf_bico.data.draw import calibration_samples, open_data
from hf_bico.settings import Settings

pytestmark = pytest.mark.quick

NAMES = ["cat", "dog", "owl"]


class Counted(list[dict[str, Any]]):
    """Rows that count how often they are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)


def ramp(height: int = 16, width: int = 24) -> np.ndarray:
    """A picture in which each pixel says where it was, far from black and white."""
    y, x = np.mgrid[:height, :width]
    return np.stack([100 + 2 * y, 100 + 2 * x, np.full_like(x, 128)], axis=2).astype(np.uint8)


def pictures(count: int = 6) -> Samples:
    rows = Counted({"image": Image.fromarray(ramp() + row), "label": row % 3} for row in range(count))
    return calibration_samples(open_data(rows, Settings(class_names=NAMES)), "train", Settings(n=count))


def tensors(count: int = 6) -> Samples:
    made = torch.Generator().manual_seed(0)
    rows = [{"image": torch.randn(3, 16, 24, generator=made), "label": row % 3} for row in range(count)]
    return calibration_samples(open_data(rows, Settings(class_names=NAMES)), "train", Settings(n=count))


def entries(copies: AugmentedSamples, size: int = 5) -> list[Any]:
    return [image for images, _ in copies.batches(size) for image in images]


def mark(images: list[Any]) -> str:
    return sha256(b"".join(np.asarray(image).tobytes() for image in images)).hexdigest()[:16]


@pytest.mark.parametrize("samples", [pictures(), tensors()], ids=["pictures", "tensors"])
@pytest.mark.parametrize("size", [1, 2, 4, 7, 100])
def test_order_and_batches(samples: Samples, size: int) -> None:
    copies = AugmentedSamples(samples, 3, 0)
    assert len(copies) == 24
    assert copies.origins == tuple(position for position in range(6) for _ in range(4))
    assert copies.labels == tuple(samples.labels[position] for position in copies.origins)
    batches = list(copies.batches(size))
    assert [len(images) for images, _ in batches] == [min(size, 24 - start) for start in range(0, 24, size)]
    assert tuple(label for _, labels in batches for label in labels) == copies.labels
    images = [image for some, _ in batches for image in some]
    originals = [image for some, _ in samples.batches(2) for image in some]
    for position, original in enumerate(originals):
        assert images[4 * position] is original
    assert mark(images) == mark(entries(copies))


def test_no_copies() -> None:
    assert len(AugmentedSamples(pictures(), 0, 0)) == 6
    assert mark(entries(AugmentedSamples(pictures(), 0, 0))) == mark(
        [image for some, _ in pictures().batches(9) for image in some]
    )


def test_each_image_is_decoded_once() -> None:
    samples = pictures()
    samples.rows.read = 0
    entries(AugmentedSamples(samples, 7, 0))
    assert samples.rows.read == 6


def test_a_copy_depends_on_its_row_alone() -> None:
    many = AugmentedSamples(pictures(6), 3, 0)
    few = AugmentedSamples(pictures(2).rotated(1), 1, 0)
    where = {row: position for position, row in enumerate(many.samples.indices)}
    all_of_them, some = entries(many), entries(few)
    for position, row in enumerate(few.samples.indices):
        assert np.array_equal(some[2 * position + 1], all_of_them[4 * where[row] + 1])
    assert mark(entries(AugmentedSamples(pictures(), 3, 1))) != mark(all_of_them)
    copies = [np.asarray(image) for image in all_of_them[:4]]
    assert not any(np.array_equal(copies[i], copies[j]) for i in range(4) for j in range(i))


def test_copies_are_fixed_for_ever() -> None:
    """Literal values: a change of Python or numpy must not change what a copy is."""
    assert mark(entries(AugmentedSamples(pictures(), 2, 0))) == "ea23d2768d41dc19"


def test_shifts_are_up_to_a_sixteenth_in_every_direction() -> None:
    """In the middle of a ramp, a shift shows as a difference; at its edge, what is left free repeats it."""
    assert SHIFT == 1 / 16
    y, x = (torch.arange(64.0).expand(64, 64).T, torch.arange(64.0).expand(64, 64))
    found = []
    for seed in range(200):
        copy = augment(torch.stack([y, x]).double(), np.random.Generator(np.random.Philox(seed)))
        found.append([float((ramp - moved)[8:-8, 8:-8].mean()) for ramp, moved in zip((y, x), copy, strict=True)])
        down, right = found[-1]
        assert max(abs(down), abs(right)) < 4.2
        noise = NOISE * float(torch.stack([y, x]).std(correction=0))
        assert float(copy[0].min()) > -6 * noise, "nothing from outside comes in"
    down, right = np.array(found).T
    assert min(down.max(), -down.min(), right.max(), -right.min()) > 3.5
    assert abs(np.corrcoef(down, right)[0, 1]) < 0.2


def test_noise_of_pictures() -> None:
    grey = Image.fromarray(np.full((200, 200, 3), 128, dtype=np.uint8))
    copy = np.asarray(augment(grey, np.random.Generator(np.random.Philox(0)))).astype(float)
    assert copy.mean() == pytest.approx(128, abs=0.3)
    assert copy.std() == pytest.approx(NOISE * 255, rel=0.02)
    white = Image.fromarray(np.full((50, 50, 3), 255, dtype=np.uint8))
    clipped = np.asarray(augment(white, np.random.Generator(np.random.Philox(0))))
    assert clipped.min() > 150, "what is beyond white is white, and not black"


def test_noise_of_tensors() -> None:
    image = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1)) * 7 + 2
    image[:] = image[:, :1, :1]  # of one colour a channel: shifts do not show
    copy = augment(image, np.random.Generator(np.random.Philox(0)))
    assert copy.dtype == image.dtype
    assert (copy - image).std().item() == pytest.approx(NOISE * image.std(correction=0).item(), rel=0.03)
    assert copy.shape == image.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_keep_their_type(dtype: torch.dtype) -> None:
    copy = augment(torch.ones(3, 8, 8, dtype=dtype), np.random.Generator(np.random.Philox(0)))
    assert copy.dtype == dtype
    assert torch.allclose(copy, torch.ones_like(copy)), "without any deviation there is no noise"


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "CMYK", "LA", "F"])
def test_pictures_of_any_mode(mode: str) -> None:
    image = (
        Image.fromarray(ramp()).convert("L").convert(mode) if mode in "LA F" else Image.fromarray(ramp()).convert(mode)
    )
    copy = augment(image, np.random.Generator(np.random.Philox(0)))
    assert (copy.mode, copy.size) == ("RGB", (24, 16))


def test_the_original_is_left_as_it_was() -> None:
    image, tensor = Image.fromarray(ramp()), torch.ones(3, 8, 8).cumsum(1)
    before = tensor.clone()
    augment(image, np.random.Generator(np.random.Philox(0)))
    augment(tensor, np.random.Generator(np.random.Philox(0)))
    assert np.array_equal(np.asarray(image), ramp())
    assert torch.equal(tensor, before)


def test_a_picture_of_one_pixel() -> None:
    assert augment(Image.new("L", (1, 1)), np.random.Generator(np.random.Philox(0))).size == (1, 1)
