"""Run a live model over samples: features, logits, accuracy, and accuracy by a linear probe.

Knows neither files nor how samples are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_bico.errors import NonFiniteWeightsError
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.metrics import accuracy
from hf_bico.runtime.environment import halving_batches

MOST_KEPT = 2**29
"""Bytes of images, raw or preprocessed for one model, that are kept in memory to read and prepare them once."""


class Batched(Protocol):
    """Samples that come in batches, and their labels in the same order."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> Sequence[int]: ...

    def batches(self, size: int) -> Iterable[tuple[list[Any], list[int]]]:
        """Yield (samples, labels), `size` at a time."""


class HasLogits(Protocol):
    def features(self, model: LiveModel, samples: Sequence[Any]) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class CachedSamples:
    """Samples whose images were read once, to measure several models."""

    images: Any
    labels: tuple[int, ...]

    @classmethod
    def of(cls, samples: Batched, batch_size: int, most: int) -> Batched:
        """Read all images, unless they take more than `most` bytes: then return the samples as they are.

        The size of all is extrapolated from those read so far, so that few are read in vain.
        """
        images, size = list[Any](), 0
        for some, _ in samples.batches(batch_size):
            images += some
            size += sum(map(_bytes_of, some))
            if size * len(samples) > most * len(images):
                return samples
        return cls(images, tuple(samples.labels))

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int) -> Iterable[tuple[list[Any], list[int]]]:
        for start in range(0, len(self), size):
            yield list(self.images[start : start + size]), list(self.labels[start : start + size])


@dataclass(frozen=True)
class ReportedSamples:
    """Samples that report how many of them were taken, and of how many."""

    samples: Batched
    report: Callable[[int, int], None]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def labels(self) -> Sequence[int]:
        return self.samples.labels

    def batches(self, size: int) -> Iterable[tuple[list[Any], list[int]]]:
        taken = 0
        for items, labels in self.samples.batches(size):
            yield items, labels
            taken += len(items)  # when the next ones are asked for, these are done
            self.report(taken, len(self))


class PreparedSamples(CachedSamples):
    """Samples whose images one model has preprocessed once, as one tensor."""

    @classmethod
    def by(cls, model: ImageModel, samples: Batched, batch_size: int, device: torch.device | str) -> PreparedSamples:
        images = [model.pixels(images).to(device) for images, _ in samples.batches(batch_size)]
        return cls(torch.cat(images), tuple(samples.labels))

    @classmethod
    def if_small(
        cls, model: LiveModel, samples: Batched, batch_size: int, device: torch.device | str = "cpu"
    ) -> Batched:
        """Preprocess the images once, for this model only, unless they take too much memory or are no images."""
        if not isinstance(model, ImageModel) or model.layout.image_size is None or not len(samples):
            return samples
        if len(samples) * 3 * prod(model.layout.image_size) * model.dtype.itemsize > MOST_KEPT:
            return samples
        return cls.by(model, samples, batch_size, device)


def prepare_alike(one: LiveModel, other: LiveModel) -> bool:
    """Return True if two models prepare images in the same way, so that one can read what the other has prepared."""
    return (
        isinstance(one, ImageModel)
        and isinstance(other, ImageModel)
        and type(one) is type(other)
        and (one.layout.image_size, one.dtype) == (other.layout.image_size, other.dtype)
        and one.preparation == other.preparation
    )


def _bytes_of(image: Any) -> int:
    """Return the size of a PIL image or a tensor; texts count as nothing."""
    if isinstance(image, Tensor):
        return image.nbytes
    return image.width * image.height * len(image.getbands()) if hasattr(image, "getbands") else 0


def features_of(model: LiveModel, samples: Batched, batch_size: int, reading: str | None = None) -> Tensor:
    """Return the features (n, d) of the samples, on the CPU, in single precision at least; or what a head reads."""
    return _over(model, samples, batch_size, lambda some: model.read_by(reading, some))


def logits_of(model: LiveModel, head: HasLogits, samples: Batched, batch_size: int) -> Tensor:
    """Return the logits (n, classes) of the samples, on the CPU, in single precision at least."""
    return _over(model, samples, batch_size, lambda some: head.logits(head.features(model, some)))


def probe_accuracy(model: LiveModel, training: Batched, test: Batched, batch_size: int) -> float:
    """Return the accuracy on `test` of a logistic regression on the frozen features of `training`.

    Features are standardised by the mean and deviation of the training ones, so that the regularisation (C = 1) means
    the same for every model. If all training samples are of one class, that class is predicted.
    """
    return accuracy(probe_predictions(model, training, test, batch_size), test.labels)


def probe_predictions(model: LiveModel, training: Batched, test: Batched, batch_size: int) -> list[int]:
    """Return the classes that the same regression predicts for `test`."""
    fitted, measured = (features_of(model, samples, batch_size) for samples in (training, test))
    return _probe(fitted, training.labels, measured)


def _over(model: LiveModel, samples: Batched, batch_size: int, of: Callable[[Sequence[Any]], Tensor]) -> Tensor:
    """Apply `of` to all samples, in batches."""

    def run(size: int) -> Tensor:
        rows = [of(some).cpu() for some, _ in samples.batches(size)]
        found = torch.cat(rows)
        return found.to(torch.promote_types(found.dtype, torch.float32))

    with torch.no_grad(), model.quiet():
        return halving_batches(batch_size, run)


def _probe(fitted: Tensor, labels: Sequence[int], measured: Tensor) -> list[int]:
    """Fit a probe to features with labels, and predict the classes of the measured features."""
    if not (fitted.isfinite().all() and measured.isfinite().all()):
        raise NonFiniteWeightsError("the model's features hold NaN or infinite values", "check its weights")
    if len(set(labels)) == 1:  # scikit-learn refuses a single class
        return [labels[0]] * len(measured)

    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    probe.fit(fitted.double().numpy(), list(labels))
    predicted: list[int] = probe.predict(measured.double().numpy()).tolist()
    return predicted
