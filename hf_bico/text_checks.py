"""What is refused of texts before any is calibrated on, and before weights are fetched where the tokenizers say enough.

Knows models' tokenizers and samples of text; no weights and no losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_bico.bench import Bench
from hf_bico.data.calibration import Drawn
from hf_bico.data.dataset import Samples
from hf_bico.errors import UnreadableSampleError
from hf_bico.families.pretrained import PretrainedModel, load_tokenizer
from hf_bico.families.text_models import CausalModel, TextModel
from hf_bico.models import Model
from hf_bico.resolving import Lineage
from hf_bico.settings import DEFAULT_MEASURED
from hf_bico.sites import TEXTS
from hf_bico.texts import Answered, Chat
from hf_bico.tokenising import no_template, pairable


def require_tokenizers(lineage: Lineage, draws: Iterable[Drawn]) -> None:
    """Refuse tokenizers that cut the texts differently, or cannot take chats; of a Hub repo small files are fetched."""
    if lineage.base.layout.reads != TEXTS:
        return
    models = (lineage.base, lineage.target)
    source, target = tokenizers = [_tokenizer(model) for model in models]
    for drawn in draws:
        items, _ = next(drawn.samples.batches(DEFAULT_MEASURED))  # candidates may be a whole split
        for model, tokenizer in zip(models, tokenizers, strict=True):
            if any(isinstance(item, Chat) for item in items) and not has_template(tokenizer):
                raise no_template(model.name)
        pairable(source, target, items)


def require_readable(bench: Bench, split: str, samples: Samples) -> None:
    """Refuse a row that the loaded models cut differently, or in which one of them finds nothing to learn.

    The latter is told by its number.
    """
    source, target = bench.source, bench.target
    if not isinstance(source, TextModel) or not isinstance(target, TextModel):
        return
    for index, (items, _) in zip(samples.indices, samples.batches(1), strict=True):
        pairable(source.tokenizer, target.tokenizer, items)
        for model in (source, target):
            try:
                model.tokens(items)
            except UnreadableSampleError as error:
                raise UnreadableSampleError(f"row {index} of split '{split}': {error.cause}", error.remedy) from error


def uses_template(bench: Bench, samples: Samples) -> bool | None:
    """Whether the samples go through the models' chat templates; None where they are no prompts and no chats."""
    items, _ = next(samples.first(1).batches(1))
    if not isinstance(items[0], Chat | Answered):
        return None
    models = (bench.source, bench.target)
    # a T5 reads the prompt as it is, and says the answer
    return any(isinstance(model, CausalModel) and has_template(model.tokenizer) for model in models)


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer knows how a chat is written."""
    return bool(getattr(tokenizer, "chat_template", None))


def _tokenizer(model: Model) -> Any:
    if model.place is not None:
        model.place.fetch(model.beside)
        return load_tokenizer(model.place.folder)
    live = model.family.wrap(model.module)
    return live.tokenizer if isinstance(live, PretrainedModel) else None
