"""What is refused of texts before any is calibrated on, and before weights are fetched where the tokenizers say enough.

Knows models' tokenizers and samples of text; no weights and no losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from hf_bico.bench import Bench
from hf_bico.data.dataset import Samples
from hf_bico.data.draw import Drawn
from hf_bico.errors import ColumnError, MissingProcessorError, TokenizersDifferError, UnreadableSampleError
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.families.base import TOKENIZER_FILES
from hf_bico.models.families.pretrained import PretrainedModel, load_tokenizer
from hf_bico.models.families.text_models import CausalModel, TextModel
from hf_bico.models.model import Model
from hf_bico.models.tokenization import no_template, pairable
from hf_bico.resolving import Lineage
from hf_bico.settings import DEFAULT_MEASURED
from hf_bico.utils.samples import TEXTS, Answered, Chat, Text

FEW_MOVED = 0.05
"""The share of pieces that may have another number in a fine-tune's tokenizer: special tokens are moved at times."""


def require_tokenizers(lineage: Lineage, draws: Iterable[Drawn]) -> None:
    """Refuse tokenizers that cut the texts differently, or cannot take chats; of a Hub repo small files are fetched.

    Of CLIPs, whose texts need not pair, only that of a fine-tune which is not its base's.
    """
    _require_base_tokens(lineage)
    if lineage.base.layout.reads != TEXTS:
        return
    models = (lineage.base, lineage.target)
    source, target = tokenizers = [_tokenizer(model) for model in models]
    for drawn in draws:
        items, labels = next(drawn.samples.batches(DEFAULT_MEASURED))  # candidates may be a whole split
        _require_texts(items, labels, drawn)
        for model, tokenizer in zip(models, tokenizers, strict=True):
            if any(isinstance(item, Chat) for item in items) and not has_template(tokenizer):
                raise no_template(model.name)
        pairable(source, target, items)


def _require_texts(items: Sequence[Any], labels: Sequence[int], drawn: Drawn) -> None:
    """Refuse texts that are nothing but the names of their own classes: a column was mistaken for another."""
    names, column = drawn.data.class_names, drawn.data.columns.parts.get("text")
    known = [(item.first, label) for item, label in zip(items, labels, strict=True) if isinstance(item, Text)]
    if not names or not known or any(label < 0 for _, label in known):
        return
    if all(text.strip().casefold() == names[label].strip().casefold() for text, label in known):
        raise ColumnError(
            f"every text of the column '{column}' is the name of its own class, such as '{known[0][0]}'",
            "name the column that holds the texts with --text-column",
        )


def _require_base_tokens(lineage: Lineage) -> None:
    """Refuse a fine-tuned model whose own tokenizer has the base's pieces under other numbers: it learnt other tokens.

    Added tokens, and other ways to cut a text into the same pieces, are no reason: they come with many fine-tunes.
    """
    tuned = _own_tokenizer(lineage.source)
    base = None if tuned is None else _own_tokenizer(lineage.base)
    if tuned is None or base is None:
        return
    numbers, own = base.get_vocab(), tuned.get_vocab()
    shared = [piece for piece in numbers if piece in own]
    moved = sum(numbers[piece] != own[piece] for piece in shared)
    if moved > FEW_MOVED * len(shared):
        raise TokenizersDifferError(
            f"the tokenizer beside '{lineage.source.name}' is not that of its base '{lineage.base.name}': {moved} of "
            f"{len(shared)} pieces have other numbers",
            "name the model that was fine-tuned with --base, or put its tokenizer beside the fine-tuned model",
        )


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


def _own_tokenizer(source: Model | Adapter) -> Any:
    """The tokenizer beside a fine-tuned model's or an adapter's weights; None where there is none to be loaded."""
    place = source.place
    names = [name for name in TOKENIZER_FILES if place is not None and name in place.sizes]
    if place is None or "tokenizer_config.json" not in names:
        return None
    place.fetch(names)
    with suppress(MissingProcessorError):  # nothing reads it but this check
        return load_tokenizer(place.folder)
    return None


def _tokenizer(model: Model) -> Any:
    if model.place is not None:
        model.place.fetch(model.beside)
        return load_tokenizer(model.place.folder)
    live = model.family.wrap(model.module)
    return live.tokenizer if isinstance(live, PretrainedModel) else None
