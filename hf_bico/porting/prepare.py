"""What is refused; samples, models, heads made ready.

What is refused of texts before any is calibrated on, and before weights are fetched where the tokenizers say enough.

Knows models' tokenizers and samples of text; no weights and no losses.

From a plan to models, samples and questions: all that is done before the first statistic.

Draws the samples, downloads and loads the models, and finds out how they are asked. Neither carries nor measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch

from hf_bico.alignment.methods import make_method
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.alignment.methods.base import Method, Trainer
from hf_bico.alignment.objectives.base import Heads
from hf_bico.data.dataset import Samples
from hf_bico.data.draw import CalibrationDraw, draw, evaluation_samples
from hf_bico.errors import (
    ColumnError,
    DataUnknownError,
    EmptyTaskVectorError,
    MissingProcessorError,
    TokenizersDifferError,
    UnreadableSampleError,
    UnsuitableMethodError,
    UsageError,
)
from hf_bico.hub.client import Hub
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.families.base import TOKENIZER_FILES
from hf_bico.models.families.pretrained import PretrainedModel, load_tokenizer
from hf_bico.models.families.text_models import CausalModel, TextModel
from hf_bico.models.layout import TEXT_SIDE
from hf_bico.models.model import Model
from hf_bico.models.tokenization import no_template, pairable
from hf_bico.porting.calibration import no_predictions, require_enough_to_mispair
from hf_bico.porting.heads import heads_of
from hf_bico.porting.lineage import Lineage
from hf_bico.porting.model_pair import ModelPair, similar_blocks
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import matched, towers_of, with_model_defaults, without_labels
from hf_bico.runtime.distributed import ALONE, ProcessGroup, process_count
from hf_bico.runtime.environment import Stopwatch
from hf_bico.settings import DEFAULT_MEASURED, Settings
from hf_bico.utils.samples import TEXTS, Answered, Chat, Text

FEW_MOVED = 0.05
"""The share of pieces that may have another number in a fine-tune's tokenizer: special tokens are moved at times."""


def require_tokenizers(lineage: Lineage, draws: Iterable[CalibrationDraw]) -> None:
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


def _require_texts(items: Sequence[Any], labels: Sequence[int], drawn: CalibrationDraw) -> None:
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


def require_readable(models: ModelPair, split: str, samples: Samples) -> None:
    """Refuse a row that the loaded models cut differently, or in which one of them finds nothing to learn.

    The latter is told by its number.
    """
    source, target = models.source, models.target
    if not isinstance(source, TextModel) or not isinstance(target, TextModel):
        return
    for index, (items, _) in zip(samples.indices, samples.batches(1), strict=True):
        pairable(source.tokenizer, target.tokenizer, items)
        for model in (source, target):
            try:
                model.tokens(items)
            except UnreadableSampleError as error:
                raise UnreadableSampleError(f"row {index} of split '{split}': {error.cause}", error.remedy) from error


def uses_template(models: ModelPair, samples: Samples) -> bool | None:
    """Whether the samples go through the models' chat templates; None where they are no prompts and no chats."""
    items, _ = next(samples.first(1).batches(1))
    if not isinstance(items[0], Chat | Answered):
        return None
    both = (models.source, models.target)
    # a T5 reads the prompt as it is, and says the answer
    return any(isinstance(model, CausalModel) and has_template(model.tokenizer) for model in both)


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


@dataclass(frozen=True)
class PreparedPort:
    """The loaded models with the task vector, the samples, and how the models are asked about them; or no samples.

    `held_out` is a split, and those of its samples that are measured on.
    """

    models: ModelPair
    method: Method
    drawn: CalibrationDraw | None = None
    heads: Heads | None = None
    held_out: tuple[str, Samples] | None = None

    @property
    def settings(self) -> Settings:
        return self.models.settings


def prepare(
    planned: Plan,
    settings: Settings,
    hub: Hub,
    watch: Stopwatch,
    device: torch.device,
    team: ProcessGroup = ALONE,
    unchanged: bool = False,
) -> PreparedPort:
    """Draw, download, load, and settle how the models are asked.

    A source that differs nowhere from its base is refused, unless it may be `unchanged`, or the target is trained.
    """
    planned, asked, measured_by = matched(planned, settings.layers), settings.objective, settings.evaluation
    settings = _settled(planned, settings)
    method = make_method(settings.method, settings)
    require_possible(planned, settings, method)
    with watch("sample"):
        drawn = _draw(planned, settings, hub)
        if drawn is not None:
            if not drawn.data.labelled and drawn.data.columns.teaches_itself:
                settings = without_labels(settings, measured_by)
            if settings.control:
                require_enough_to_mispair(len(drawn.samples))
            require_tokenizers(planned.lineage, [drawn])
    with watch("download"):
        planned = planned.fetched(watch.progress)
    _hash_meanwhile(planned.lineage)
    models = ModelPair.open(planned, settings, device, watch, team, unchanged or isinstance(method, Trainer))
    models = _with_towers(models, method, drawn, asked)
    return PreparedPort(models, method) if drawn is None else _asked_about(models, drawn, method)


def _hash_meanwhile(lineage: Lineage) -> None:
    """Find the files' SHA-256, which the record tells in the end, while the GPU is busy."""

    def find() -> None:
        with suppress(OSError):  # what cannot be read is told by who reads it
            _ = [model.sha256 for model in lineage.models]  # each keeps its own

    Thread(target=find, daemon=True).start()


def _asked_about(models: ModelPair, drawn: CalibrationDraw, method: Method) -> PreparedPort:
    """The samples as they are used, how the models are asked about them, and what is held out to measure on."""
    models.agree_on_length()
    drawn = models.chosen(drawn)
    held_out = _held_out(drawn, method, models.settings)
    require_readable(models, drawn.split, drawn.samples)
    if measures(models.settings, drawn, held_out[1]):
        require_readable(models, *held_out)
    heads = heads_of(models, drawn.data.class_names, drawn)
    drawn = models.labelled(drawn, heads)
    if models.settings.layers == "similarity":
        models = models.matched(similar_blocks(models, drawn.samples))
    return PreparedPort(models, method, drawn, heads, held_out)


def measures(settings: Settings, drawn: CalibrationDraw, samples: Samples) -> bool:
    """Whether measuring is asked for, and there are samples for it, with labels where classes are told apart."""
    known = drawn.data.labelled or settings.objective != "classification"
    return settings.evaluate and len(samples) > 0 and known


def _with_towers(models: ModelPair, method: Method, drawn: CalibrationDraw | None, asked: Any) -> ModelPair:
    """The bench with those towers of a CLIP that are carried, and the objective that asks both of them.

    A data set of captions, or a text tower to carry, is asked by contrast, unless something else was `asked` for.
    """
    settings = models.settings
    if not models.source.layout.text_blocks:
        return models
    captions = drawn is not None and not drawn.data.labelled and drawn.data.columns.teaches_itself
    predicted = drawn is not None and drawn.labels == "pseudo" and not captions
    by_classes = predicted or isinstance(method, Trainer) or method.needs_predictions or settings.readout
    fixed = by_classes or method.one_tower or asked == "zero-shot" or settings.own_objective
    towers = towers_of(settings, models.changed_towers, fixed)
    objective = settings.objective
    if drawn is not None and not settings.own_objective:
        contrast = asked == "contrastive" or (not fixed and (TEXT_SIDE in towers or captions))
        objective = "contrastive" if contrast else "zero-shot"
        if TEXT_SIDE in towers and not contrast:
            raise UnsuitableMethodError(
                f"the text tower is asked by captions, and {settings.method} by classes", "use --tower vision, or bico"
            )
    if objective == "contrastive" and settings.control:
        raise UnsuitableMethodError(
            "--control mispairs samples, and captions of different lengths have no rows to pair", "leave --control out"
        )
    found = models.of_towers(towers, objective)
    lineage = found.planned.lineage
    if not found.pairs:
        raise EmptyTaskVectorError(
            f"'{lineage.source.name}' changed nothing that can be carried in the "
            f"{settings.tower or 'vision'} tower of its base",
            "choose another with --tower",
        )
    method.require(lineage.base.layout, lineage.target.layout, found.pairs)
    return found


def require_possible(planned: Plan, settings: Settings, method: Method) -> None:
    """Refuse, before anything large is downloaded, what cannot be done with these models and this data."""
    lineage = planned.lineage
    # which towers of a CLIP a fine-tuned model changed is known once it is read
    method.require(lineage.base.layout, lineage.target.layout, planned.main_pairs or planned.pairs)
    if lineage.data is None and (method.looks_at_data or settings.readout):
        raise lineage.no_data or DataUnknownError("no calibration data was given", "name it with --data")
    if not settings.predicts and (method.needs_predictions or settings.readout):
        raise no_predictions("--readout" if settings.readout else settings.method)
    if process_count() > 1 and isinstance(method, Trainer):
        raise UnsuitableMethodError(
            f"{settings.method} trains, which several processes do not share", "use one process"
        )
    if settings.own_objective and isinstance(method, Trainer):
        raise UnsuitableMethodError(
            f"{settings.method} trains by an objective of the models' own", "leave the objective out, or use bico"
        )
    require_projection(planned, settings)
    if settings.tower is not None and "contrastive" not in lineage.base.layout.objectives:
        raise UsageError("--tower chooses between the towers of a CLIP, and the base is none", "leave --tower out")
    if settings.fit_head and settings.objective not in ("auto", "classification"):
        raise UsageError(
            f"--probe fits a classifier's head, and these models are asked by {_asked_by(settings)}",
            "leave --probe out",
        )
    if isinstance(method, Trainer) and method.whole_split and settings.labels == "pseudo":
        raise UnsuitableMethodError(
            f"{settings.method} trains on the data set's own labels", "leave --labels pseudo out, or use fewshot"
        )
    if settings.control and not isinstance(method, Aligner):
        raise UnsuitableMethodError(
            f"--control mispairs the two models' samples, and {settings.method} does not pair any",
            "leave --control out, or use a method that aligns, such as bico",
        )
    if settings.control and lineage.base.layout.reads == TEXTS:
        raise UnsuitableMethodError(
            "--control mispairs samples, and texts of different lengths have no rows to pair", "leave --control out"
        )
    if settings.layers == "similarity" and lineage.data is None:
        raise UsageError("--layers similarity compares what blocks read, and no data was given", "name it with --data")


def _settled(planned: Plan, settings: Settings) -> Settings:
    """The settings for these models; what calibrates on nothing asks nothing."""
    lineage = planned.lineage
    return (
        settings if lineage.data is None else with_model_defaults(settings, lineage.base.layout, lineage.target.layout)
    )


def _asked_by(settings: Settings) -> str:
    return settings.objective if isinstance(settings.objective, str) else "an objective of the caller's own"


def require_projection(planned: Plan, settings: Settings) -> None:
    """Refuse a readout where there is nothing that it could correct."""
    if settings.readout and not any(site.role == "proj" for site in planned.lineage.target.layout.main_sites):
        raise UnsuitableMethodError("--readout corrects a final projection, and the target has none", "leave it out")


def _draw(planned: Plan, settings: Settings, hub: Hub) -> CalibrationDraw | None:
    data = planned.lineage.data
    known = planned.lineage.source.origin.class_names
    reads = planned.lineage.base.layout.reads
    return None if data is None else draw(data, settings, hub, known_names=known or None, reads=reads)


def training_samples(drawn: CalibrationDraw, split: str, held_out: Samples) -> Samples:
    """All labelled samples of the split that was drawn from, but for those that are measured on; of texts all of them.

    There are none where its labels are not there, or are not to be used.
    """
    taken = set(held_out.indices) if split == drawn.split else set()
    known = drawn.labels == "dataset" or drawn.data.columns.teaches_itself
    order = drawn.data.order(drawn.split, drawn.strategy.seed) if known else []
    rows = drawn.data.first_of(drawn.split, (index for index in order if index not in taken), len(order))
    return drawn.data.samples(drawn.split, rows)


def _held_out(drawn: CalibrationDraw, method: Method, settings: Settings) -> tuple[str, Samples]:
    """What is measured on; of a split that is trained on whole, a fifth at most, and nothing where none is measured."""
    split, samples = evaluation_samples(
        drawn.data, drawn.samples, drawn.split, drawn.strategy.seed, settings.eval_samples
    )
    if isinstance(method, Trainer) and method.whole_split and split == drawn.split:
        samples = samples.first(max(1, len(drawn.data.splits[split]) // 5) if settings.evaluate else 0)
    return split, samples
