"""Checks that models can read samples as they are given, and says what of them is not read, or not as it should be.

Of two models with different tokenizers, it counts how much of the samples pairs. Knows loaded models and samples;
no changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log
from typing import Any, cast

import torch
from torch import Tensor

from hf_bico.alignment.objectives.judging import LossJudge
from hf_bico.alignment.objectives.language import LanguageHead
from hf_bico.data.dataset import Samples
from hf_bico.errors import UnreadableSampleError
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.families.text_models import TextModel, pairs_of
from hf_bico.models.token_places import Shares
from hf_bico.models.tokenization import USUAL_LENGTH
from hf_bico.porting.model_pair import ModelPair
from hf_bico.utils.samples import Captioned

FAR = 10
"""How far tensors may lie from the values of a model's own preparation, in half the width of these: noise or another
normalisation stays below 4, and pixels of 0 to 255 lie at 100 and more."""
RAW = 20
"""Larger values are hardly those of prepared images, where a model's own preparation is not known."""
JUDGED = 16
"""How many texts are predicted to see whether a model does better than chance."""
MAX_CUT = 0.05
"""Share of texts cut above which a notice says so."""


@dataclass(frozen=True)
class Reading:
    """How two models read samples: how many of them are cut, and how much pairs, if their tokens differ."""

    cut: int = 0
    pairing: Shares | None = None


def require_readable(models: Sequence[LiveModel], split: str, samples: Samples) -> Reading:
    """Refuse rows that the models cannot read as they are; say how they read the others.

    Refused are texts that leave one of the models nothing to learn, and tensors that no preparation of images gives.
    """
    readers = [model for model in models if isinstance(model, TextModel)]
    if not readers:
        require_prepared(models, split, samples)
        return Reading()
    cut, differ = 0, False
    for index, (items, _) in zip(samples.indices, samples.batches(1), strict=True):
        with _of_row(index, split):
            rows = [model.text_rows(items) for model in readers]
        differ |= not rows[0].same_as(rows[-1])
        full = any(int(row.mask.sum()) == model.longest for row, model in zip(rows, readers, strict=True))
        cut += full and any(model.cuts(items[0]) for model in readers)
    if not differ:
        return Reading(cut)
    pairing = Shares()
    for index, (items, _) in zip(samples.indices, samples.batches(1), strict=True):
        with _of_row(index, split):
            pairing += pairs_of(readers[0], readers[-1], items[0]).shares
    return Reading(cut, pairing)


@contextmanager
def _of_row(index: int, split: str) -> Iterator[None]:
    """Name the row in an error about one that cannot be read."""
    try:
        yield
    except UnreadableSampleError as error:
        raise UnreadableSampleError(f"row {index} of split '{split}': {error.cause}", error.remedy) from error


def require_prepared(models: Sequence[LiveModel], split: str, samples: Samples) -> None:
    """Refuse images that are tensors of NaN, of other channels than the models', or of values far from theirs."""
    for index, image in zip(samples.indices, _tensors(samples), strict=False):
        if not image.isfinite().all():
            raise UnreadableSampleError(
                f"the image of row {index} of split '{split}' holds NaN or infinite values", "fix or remove the row"
            )
        for own in (model.black_and_white for model in models if isinstance(model, ImageModel)):
            if own is None:
                continue
            least, greatest = own.aminmax()
            far = (image - (least + greatest) / 2).abs().max() > FAR * (greatest - least) / 2
            if far or len(image) != own.shape[1]:
                what = f"values from {_span(image)}" if far else f"the shape {tuple(image.shape)}"
                usual = f"values from {_span(own)}" if far else f"({own.shape[1]}, height, width)"
                raise UnreadableSampleError(
                    f"the image of row {index} of split '{split}' is a tensor of {what}, and the model takes {usual}",
                    "give PIL images, or tensors prepared as the model takes them",
                )


def _tensors(samples: Samples) -> Iterator[Tensor]:
    """Yield the images of samples that were given as tensors; none if the first is something else."""
    for items, _ in samples.batches(1):
        image = items[0].image if isinstance(items[0], Captioned) else items[0]
        if not isinstance(image, Tensor) or not image.is_floating_point():
            return
        yield image


def _span(values: Tensor) -> str:
    return " to ".join(f"{float(value):.3g}" for value in values.aminmax())


def reading_notices(models: ModelPair, drawn: Samples, held_out: Samples | None, cut: tuple[int, int]) -> list[str]:
    """Return notices about images that are hardly prepared for both models, and about texts that were `cut`."""
    sides = ((cut[0], drawn, "calibration samples"), (cut[1], held_out, "samples that were measured on"))
    many = [(count, some, what) for count, some, what in sides if some and count > MAX_CUT * len(some)]
    return [
        *_tensor_notice(models, drawn),
        *(f"{count} of the {len(some)} {what} were cut to {_limit(models)}." for count, some, what in many),
    ]


def chance_notices(sides: Sequence[tuple[str, LiveModel]], items: Sequence[Any]) -> list[str]:
    """Return a notice for each decoder that predicts the texts worse than by chance: its tokenizer may be another's."""
    found = []
    for name, model in dict(sides).items():
        some, module = items[:JUDGED], cast(Any, model.module)
        with torch.no_grad(), model.quiet():
            loss = float(LossJudge(LanguageHead()).evidence(model, some, [-1] * len(some)).mean())
        chance = log(module.get_input_embeddings().num_embeddings)
        if loss > chance:
            found.append(
                f"{name} predicts the texts' tokens with a loss of {loss:.2f}, and chance has {chance:.2f}: is the "
                "tokenizer beside it its own?"
            )
    return found


def _limit(models: ModelPair) -> str:
    limit = models.source.longest if isinstance(models.source, TextModel) else None
    if limit == models.settings.max_length:
        return f"{limit} tokens, as --max-length asks"
    if models.shorter is None and limit == USUAL_LENGTH:
        return f"{limit} tokens, the most by default: see --max-length"
    return f"{limit} tokens, the most that {models.shorter or 'both models'} can read"


def _tensor_notice(models: ModelPair, samples: Samples) -> list[str]:
    images = [torch.stack(image.aminmax()).cpu() for image in _tensors(samples)]
    if not images:
        return []
    given = torch.stack(images)
    sides = ((models.lineage.base.name, models.source), (models.lineage.target.name, models.target))
    own = {name: live.black_and_white for name, live in sides if isinstance(live, ImageModel)}
    known = {name: _span(values) for name, values in own.items() if values is not None}
    centred = any(values is not None and values.min() < 0 for values in own.values())
    unprepared = given.min() >= 0 and given.max() <= 1 if known else given.max() > RAW
    if len(set(known.values())) < 2 and not (unprepared and (centred or not known)):
        return []
    usual = "".join(f"; {name} prepares images to {span}" for name, span in known.items())
    return [f"The images are tensors of values from {_span(given)}, which both models read as they are{usual}."]
