"""Choose a sample for the usage snippet of a card: only of data sets that anybody can read on the Hub.

Does not know the snippet.
"""

from __future__ import annotations

from textwrap import shorten

from hf_bico.data.draw import CalibrationDraw
from hf_bico.data.loading import CONVERTED
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.text_models import CausalModel, TextModel
from hf_bico.reports.record import ExampleRecord
from hf_bico.utils.samples import Answered, Text, TextSample

MAX_TEXT, MAX_BEGINNING = 200, 60
"""Most characters of a text, and of the beginning of a text that a language model goes on from."""


def example_record(target: LiveModel, drawn: CalibrationDraw) -> ExampleRecord | None:
    """Return the first sample, shortened, or the row of an image; None if the data set is not known to be public."""
    repo = drawn.data.repo
    if repo is None or repo.restricted or not len(drawn.samples):
        return None
    if drawn.data.columns.image is not None:
        # `load_dataset` reads neither an id without an owner nor the layout of the Hub's own parquet copies
        loads = "/" in repo.id and repo.requested.revision != CONVERTED
        row = 0 if drawn.split in drawn.data.parts else min(drawn.samples.indices)
        return ExampleRecord(row=row) if loads else None
    items, _ = next(drawn.samples.first(1).batches(1))
    texts = _inputs(target, items[0])
    return ExampleRecord(texts) if texts and all(texts) else None


def _inputs(target: LiveModel, sample: TextSample) -> list[str]:
    """Return what a user of the model types: a text or a pair, or the prompt alone."""
    if isinstance(target, TextModel):
        [sample] = target.as_read([sample])
    if isinstance(sample, Answered):
        return [_shortened(sample.prompt, MAX_TEXT)]
    if isinstance(sample, Text):
        most = MAX_BEGINNING if isinstance(target, CausalModel) else MAX_TEXT
        return [_shortened(text, most) for text in (sample.first, sample.second) if text is not None]
    asked = [message["content"] for message in sample.messages if message["role"] == "user"]
    return [_shortened(text, MAX_TEXT) for text in asked[:1]]


def _shortened(text: str, most: int) -> str:
    """Return whole words on one line, or the first characters if the first word is too long.

    >>> _shortened("The  sun is\\nout.", 12), _shortened("x" * 100, 5)
    ('The sun is', 'xxxxx')
    """
    return shorten(text, most, placeholder="") or text.strip()[:most]
