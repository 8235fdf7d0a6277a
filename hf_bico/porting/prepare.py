"""Prepares a port: refuses what cannot work, draws samples, downloads and loads models, and makes their heads.

Does everything before the first statistic; neither carries nor evaluates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import torch

from hf_bico.alignment.methods import make_method
from hf_bico.alignment.methods.aligned import Aligner
from hf_bico.alignment.methods.base import Carrier, Method, Trainer
from hf_bico.alignment.methods.brief import BriefTrainer
from hf_bico.alignment.objectives.base import Heads
from hf_bico.data.classes import folded
from hf_bico.data.dataset import Samples
from hf_bico.data.draw import CalibrationDraw, Unlabelled, draw_unlabelled, evaluation_samples
from hf_bico.errors import (
    ColumnError,
    DataUnknownError,
    EmptyTaskVectorError,
    MissingProcessorError,
    TokenizersDifferError,
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
from hf_bico.models.shared_reading import require_common_pieces
from hf_bico.models.tokenization import no_template, require_known, unknown_notices, unknown_share
from hf_bico.porting.calibration import no_predictions, require_enough_to_mispair
from hf_bico.porting.generation import generated_samples
from hf_bico.porting.heads import make_heads
from hf_bico.porting.lineage import Lineage
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.plan import Plan
from hf_bico.porting.planner import (
    TEXT_TO_TEXT,
    EarlyDraw,
    draw_samples,
    towers_to_carry,
    with_blocks,
    with_model_defaults,
    without_labels,
)
from hf_bico.porting.reading import chance_notices, require_readable
from hf_bico.porting.special_tokens import LANGUAGE, require_no_chats, require_unneeded, special_token_notices
from hf_bico.porting.training_tasks import LABELS, SOURCE, require_common_tokens
from hf_bico.runtime.distributed import ALONE, ProcessGroup, process_count
from hf_bico.runtime.environment import Stopwatch
from hf_bico.settings import AUTO, DEFAULT_MEASURED, Settings
from hf_bico.utils.samples import TEXTS, Answered, Chat, Text

BY_TOKENS = (LANGUAGE, TEXT_TO_TEXT)
"""The objectives that predict tokens."""
FEW_MOVED = 0.05
"""Share of tokens that may have another id in a fine-tune's tokenizer: special tokens are moved at times."""


@dataclass(frozen=True)
class PreparedPort:
    """Loaded models with the task vector, a method, and samples with the models' heads; or no samples."""

    models: ModelPair
    method: Method
    drawn: CalibrationDraw | None = None
    heads: Heads | None = None
    held_out: tuple[str, Samples] | None = None
    """A split, and those of its samples to evaluate on."""
    doubts: tuple[str, ...] = ()
    """Notices about how the models read the samples."""
    cut: tuple[int, int] = (0, 0)
    """The number of calibration samples, and of held-out ones, that are too long to be read whole."""
    asked: Settings = field(default_factory=Settings)
    """The settings as they were given; those of the models have what "auto" stands for."""

    @property
    def settings(self) -> Settings:
        """The models' settings, with the method of this port."""
        return replace(self.models.settings, method=self.method.settings.method)

    @property
    def judges(self) -> bool:
        """True if there are samples that can judge a carried change."""
        return self.drawn is not None and isinstance(self.method, Carrier)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The methods to choose from: where "auto" was asked for, also those that its objective tries.

        Where every shape is equal, a mere copy is one of them.
        """
        settings, pairs = self.settings, self.models.pairs
        if self.asked.method != AUTO or not settings.finds_alpha or not self.judges:
            return (settings.method,)
        equal = all(pair.source.shape == pair.target.shape for pair in pairs)
        return (settings.method, *settings.tried_too, *(("naive",) if equal else ()))

    def with_method(self, name: str) -> PreparedPort:
        """Return the same with another method."""
        return replace(self, method=make_method(name, self.settings))

    @property
    def evaluates(self) -> bool:
        """True if evaluation is requested, and there are samples for it, with labels if classes are predicted."""
        if self.drawn is None or self.held_out is None or not self.settings.evaluate or not len(self.held_out[1]):
            return False
        return self.drawn.data.labelled or self.settings.objective != "classification"

    @property
    def whole_split(self) -> Samples | None:
        """All labelled samples to train on, for a method that trains on the whole split."""
        if self.drawn is None or self.held_out is None or not _trains_on_whole_split(self.method):
            return None
        return training_samples(self.drawn, *self.held_out)

    @property
    def uses_chat_template(self) -> bool | None:
        """True if the target's chat template formats the samples; None if these are neither prompts nor chats."""
        if self.drawn is None:
            return None
        items, _ = next(self.drawn.samples.first(1).batches(1))
        if not isinstance(items[0], Chat | Answered):
            return None
        if isinstance(items[0], Answered) and not self.settings.special_tokens:
            return False
        target = self.models.target  # a T5 reads a prompt as it is, and generates the answer
        return isinstance(target, CausalModel) and _has_template(target.tokenizer)


def prepare(
    planned: Plan,
    settings: Settings,
    hub: Hub,
    watch: Stopwatch,
    device: torch.device,
    team: ProcessGroup = ALONE,
    allow_unchanged: bool = False,
    early: EarlyDraw | None = None,
) -> PreparedPort:
    """Check, draw, download, load, and make the models' heads.

    A source that equals its base is refused, unless `allow_unchanged` or the target is trained. Samples that were drawn
    `early` are not drawn again.
    """
    requested, lineage = settings, planned.lineage
    planned = with_blocks(planned, settings.layers)
    if lineage.data is not None:
        settings = with_model_defaults(settings, *lineage.layouts)
    method = provisional_method(settings)
    require_possible(planned, settings, method)
    require_device_map(settings, device, team.size)
    drawn: CalibrationDraw | None = None
    if early is not None:
        watch.seconds["sample"] = early.seconds
    with watch("sample"):
        if lineage.data is not None and not lineage.writes_data:
            drawn = draw_samples(lineage, settings, hub) if early is None else early.samples
            _require_labels(drawn, settings)
            if _only_captions(drawn):
                settings = without_labels(settings, requested.evaluation)
            if settings.control:
                require_enough_to_mispair(len(drawn.samples))
            require_tokenizers(lineage, [drawn], settings)
    with watch("download"):
        planned = planned.fetched(watch.progress)
    _hash_in_background(planned.lineage)
    allow_unchanged = allow_unchanged or isinstance(method, Trainer)
    models = ModelPair.open(planned, settings, device, watch, team, allow_unchanged)
    if models.source.layout.text_blocks:
        models = _with_carried_towers(models, method, drawn, requested)
    models.settings = settings = models.settings.resolved
    method = make_method(settings.method, settings)
    if drawn is None and not lineage.writes_data:
        return PreparedPort(models, method, asked=requested)
    models.use_common_length()
    if drawn is None:
        drawn = generated_samples(models, settings, hub, watch)
        require_tokenizers(lineage, [drawn], settings)
    drawn = models.choose_samples(drawn)
    held_out = _held_out(drawn, method, settings)
    prepared = PreparedPort(models, method, drawn, held_out=held_out, asked=requested)
    loaded = (models.source, models.target)
    reading = require_readable(loaded, drawn.split, drawn.samples)
    models.pairing = reading.pairing
    if settings.objective in BY_TOKENS and ((settings.polish and settings.polish_on == SOURCE) or _distils(method)):
        require_common_tokens(models)
    cut_held_out = require_readable(loaded, *held_out).cut if prepared.evaluates else 0
    prepared = replace(prepared, cut=(reading.cut, cut_held_out), doubts=tuple(_doubts(models, drawn)))
    with watch("sample"):
        drawn = with_unlabelled(drawn, held_out[1] if prepared.evaluates else None, models, settings, hub)
    if settings.layers == "similarity":
        models = models.with_similar_blocks(drawn.samples)
    heads = make_heads(models, drawn.data.class_names, drawn)
    return replace(prepared, models=models, drawn=models.pseudo_label(drawn, heads), heads=heads)


def with_unlabelled(
    drawn: CalibrationDraw, held_out: Samples | None, models: ModelPair, settings: Settings, hub: Hub
) -> CalibrationDraw:
    """Add the unlabelled samples, if such data was given, without what is measured on; refuse unreadable ones."""
    lineage = models.lineage
    if lineage.unlabelled is None:
        return drawn
    names, reads = lineage.class_names or None, lineage.reads
    unlabelled = draw_unlabelled(lineage.unlabelled, drawn, held_out, settings, hub, known_names=names, reads=reads)
    require_tokenizers(lineage, [unlabelled], settings)
    require_readable((models.source, models.target), unlabelled.split, unlabelled.samples)
    return replace(drawn, unlabelled=unlabelled)


def provisional_method(settings: Settings) -> Method:
    """Return the method that is asked for; bico for "auto", which is decided once the objective is known."""
    return make_method("bico" if settings.method == AUTO else settings.method, settings)


def require_possible(planned: Plan, settings: Settings, method: Method) -> None:
    """Refuse what cannot be done with these models, this data and these settings, before any large download."""
    lineage, name = planned.lineage, settings.method
    lineage.require_same_function(settings.force)
    if settings.objective == "classification" and not isinstance(method, Trainer):
        planned.with_fitted_head(settings.probe).require_head()
    # which towers of a CLIP a fine-tuned model changed is known once it is read
    method.require(*lineage.layouts, planned.main_pairs or planned.pairs)
    chooses = settings.finds_alpha and not isinstance(method, Trainer)
    if lineage.data is None and chooses and not method.looks_at_data and not settings.readout:
        raise DataUnknownError(
            "alpha is chosen by calibration samples, and no data was given", "name it with --data, or use --alpha 1"
        )
    if lineage.data is None and (method.looks_at_data or settings.readout or settings.polish):
        raise lineage.no_data or DataUnknownError("no calibration data was given", "name it with --data")
    if not settings.predicts and (method.needs_predictions or settings.readout):
        raise no_predictions("--readout" if settings.readout else name)
    if process_count() > 1 and isinstance(method, Trainer):
        raise UnsuitableMethodError(f"{name} trains, which several processes do not share", "use one process")
    if settings.own_objective and isinstance(method, Trainer):
        raise UnsuitableMethodError(
            f"{name} trains by an objective of the models' own", "leave the objective out, or use bico"
        )
    _require_writer(lineage, settings)
    require_projection(planned, settings)
    _require_polish(planned, settings, method)
    if settings.tower is not None and "contrastive" not in lineage.base.layout.objectives:
        raise UsageError("--tower chooses between the towers of a CLIP, and the base is none", "leave --tower out")
    if settings.probe and settings.objective not in ("auto", "classification"):
        objective = settings.objective if isinstance(settings.objective, str) else "an objective of the caller's own"
        raise UsageError(f"--probe fits a classifier's head, and these models use {objective}", "leave --probe out")
    if _trains_on_whole_split(method) and settings.labels == "pseudo":
        raise UnsuitableMethodError(
            f"{name} trains on the data set's own labels", "leave --labels pseudo out, or use fewshot"
        )
    if settings.control and not isinstance(method, Aligner):
        raise UnsuitableMethodError(
            f"--control mispairs the two models' samples, and {name} does not pair any",
            "leave --control out, or use a method that aligns, such as bico",
        )
    if settings.control and lineage.reads == TEXTS:
        raise UnsuitableMethodError(
            "--control mispairs samples, and texts of different lengths have no rows to pair", "leave --control out"
        )
    if settings.layers == "similarity" and lineage.data is None:
        raise UsageError("--layers similarity compares what blocks read, and no data was given", "name it with --data")
    require_unneeded(settings, lineage.layouts)


def require_projection(planned: Plan, settings: Settings) -> None:
    """Refuse a readout if the target has no final projection."""
    asked = settings.readout or settings.method == "readout"
    if asked and not any(site.role == "proj" for site in planned.lineage.target.layout.main_sites):
        what, remedy = (
            ("the readout", "use --method distill") if settings.method == "readout" else ("--readout", "leave it out")
        )
        raise UnsuitableMethodError(f"{what} corrects a final projection, and the target has none", remedy)


def _require_polish(planned: Plan, settings: Settings, method: Method) -> None:
    """Refuse a polish where nothing is carried or predicted, and unlabelled samples that nothing reads."""
    brief = isinstance(method, BriefTrainer)
    if settings.polish and not isinstance(method, Carrier):
        raise UnsuitableMethodError(
            f"--polish trains what was carried, and {settings.method} carries nothing", "leave --polish out"
        )
    if settings.polish and (settings.own_objective or settings.objective == "contrastive"):
        raise UnsuitableMethodError(
            "--polish learns classes or tokens that the source predicts, and this objective has neither",
            "leave --polish out, or use --objective zero-shot with data that has labels",
        )
    if (settings.polish or brief) and settings.device_map is not None:
        raise UsageError("--device-map spreads models that are not trained", "leave --device-map out")
    if settings.polish and process_count() > 1:
        raise UnsuitableMethodError("--polish trains, which several processes do not share", "use one process")
    distils = (settings.polish and settings.polish_on == SOURCE) or (brief and settings.method == "distill")
    if planned.lineage.unlabelled is not None and not (distils or settings.readout or settings.method == "readout"):
        raise UsageError(
            "--unlabelled is read by a readout and by what learns the source's predictions, and neither was asked for",
            "add --polish or --readout, use --method distill or readout, or leave it out",
        )


def _distils(method: Method) -> bool:
    return isinstance(method, BriefTrainer) and method.toward == SOURCE


def _require_writer(lineage: Lineage, settings: Settings) -> None:
    """Refuse samples that the source shall write if it does not write, or that nobody writes."""
    if settings.prompts is not None and not lineage.writes_data:
        raise UsageError("--prompts is for texts that the source writes", "add --data generated, or leave it out")
    if lineage.writes_data and LANGUAGE not in lineage.base.layout.objectives:
        raise UsageError(
            "--data generated lets the fine-tuned source write the samples, and one of the family "
            f"{lineage.base.layout.family} writes no texts",
            "name a data set; a folder called generated is ./generated",
        )
    if lineage.writes_data and (settings.per_class is not None or settings.sampling != "random"):
        raise UsageError("generated texts have no classes to sample by", "use -n alone")


def _require_labels(drawn: CalibrationDraw, settings: Settings) -> None:
    """Refuse to learn labels that are not there, before anything is downloaded."""
    learns = settings.method == "train" or (settings.polish and settings.polish_on == LABELS)
    if learns and settings.predicts and drawn.labels != "dataset":
        raise UnsuitableMethodError(
            "there are no labels to train on, or they are not to be used",
            "learn the source's predictions: --method distill, or --polish as it is",
        )


def require_device_map(settings: Settings, device: torch.device, processes: int = 1) -> None:
    """Refuse a device map with --device cpu on a machine with GPUs, or in several processes."""
    if settings.device_map is None:
        return
    if device.type == "cpu" and torch.cuda.is_available():
        raise UsageError("--device-map uses the GPUs, and --device is cpu", "leave one of the two out")
    if processes > 1:
        raise UsageError("--device-map spreads models over all GPUs, and so would every process", "use one process")


def require_tokenizers(lineage: Lineage, draws: Iterable[CalibrationDraw | Unlabelled], settings: Settings) -> None:
    """Refuse tokenizers that do not know the texts, have too little in common on them or cannot take chats.

    Fetches small files only.

    The texts of CLIPs need not pair, so only a fine-tune whose tokenizer is not its base's is refused.
    """
    _require_base_tokens(lineage)
    if lineage.reads != TEXTS:
        return
    models = (lineage.base, lineage.target)
    tokenizers = source, target = [_tokenizer(model) for model in models]
    for drawn in draws:
        items, labels = next(drawn.samples.batches(DEFAULT_MEASURED))  # candidates may be a whole split
        _require_texts(items, labels, drawn)
        require_no_chats(settings, items)
        for model, tokenizer in zip(models, tokenizers, strict=True):
            if any(isinstance(item, Chat) for item in items) and not _has_template(tokenizer):
                raise no_template(model.name)
            require_known(tokenizer, items, model.name)
        require_common_pieces(source, target, items, LANGUAGE in lineage.base.layout.objectives)


def _require_base_tokens(lineage: Lineage) -> None:
    """Refuse a fine-tuned model whose tokenizer gives the base's tokens other ids.

    Added tokens, and other merges of the same tokens, are fine: they come with many fine-tunes.
    """
    tuned = _own_tokenizer(lineage.source)
    base = None if tuned is None else _own_tokenizer(lineage.base)
    if tuned is None or base is None:
        return
    ids, own = base.get_vocab(), tuned.get_vocab()
    shared = [token for token in ids if token in own]
    moved = sum(ids[token] != own[token] for token in shared)
    if moved > FEW_MOVED * len(shared):
        raise TokenizersDifferError(
            f"the tokenizer beside '{lineage.source.name}' is not that of its base '{lineage.base.name}': {moved} of "
            f"{len(shared)} pieces have other numbers",
            "name the model that was fine-tuned with --base, or put its tokenizer beside the fine-tuned model",
        )


def _require_texts(items: Sequence[Any], labels: Sequence[int], drawn: CalibrationDraw | Unlabelled) -> None:
    """Refuse texts that are only the names of their own classes: the wrong column was taken."""
    names, column = drawn.data.class_names, drawn.data.columns.parts.get("text")
    texts = [(item.first, label) for item, label in zip(items, labels, strict=True) if isinstance(item, Text)]
    if not names or not texts or any(label < 0 for _, label in texts):
        return
    if all(folded(text) == folded(names[label]) for text, label in texts):
        raise ColumnError(
            f"every text of the column '{column}' is the name of its own class, such as '{texts[0][0]}'",
            "name the column that holds the texts with --text-column",
        )


def _doubts(models: ModelPair, drawn: CalibrationDraw) -> list[str]:
    """Return notices about texts with unknown tokens, or with special tokens that a model was not trained with."""
    lineage, settings = models.lineage, models.settings
    if not isinstance(models.source, TextModel):
        return []
    items, _ = next(drawn.samples.batches(DEFAULT_MEASURED))
    sides = ((lineage.base.name, models.source), (lineage.target.name, models.target))
    notices = []
    for name, model in sides if models.pairing is not None else sides[:1]:
        if isinstance(model, TextModel):
            notices += unknown_notices(unknown_share(model.tokenizer, items)[0], name)
    if settings.objective != LANGUAGE:
        return notices
    if models.pairing is not None:  # one tokenizer for both models is theirs
        notices += chance_notices(sides, items)
    return [*notices, *special_token_notices(sides, items, settings.special_tokens)]


def _with_carried_towers(
    models: ModelPair, method: Method, drawn: CalibrationDraw | None, requested: Settings
) -> ModelPair:
    """Restrict a CLIP to the towers that are carried, and choose the objective.

    Captions, and a text tower to carry, need the contrastive objective, unless another one was requested.
    """
    settings = models.settings
    captions = drawn is not None and _only_captions(drawn)
    predicted = drawn is not None and drawn.labels == "pseudo" and not captions
    by_classes = predicted or isinstance(method, Trainer) or method.needs_predictions
    by_classes = by_classes or settings.readout or settings.polish
    fixed = by_classes or method.one_tower or requested.objective == "zero-shot" or settings.own_objective
    towers = towers_to_carry(settings, models.changed_towers, vision_only=fixed)
    objective = settings.objective
    if drawn is not None and not settings.own_objective:
        contrast = requested.objective == "contrastive" or (not fixed and (TEXT_SIDE in towers or captions))
        objective = "contrastive" if contrast else "zero-shot"
        if TEXT_SIDE in towers and not contrast:
            raise UnsuitableMethodError(
                f"the text tower needs captions, and {settings.method} needs classes", "use --tower vision, or bico"
            )
    if objective == "contrastive" and settings.control:
        raise UnsuitableMethodError(
            "--control mispairs samples, and captions of different lengths have no rows to pair", "leave --control out"
        )
    carried = models.of_towers(towers, objective)
    if not carried.pairs:
        raise EmptyTaskVectorError(
            f"'{carried.lineage.source.name}' changed nothing that can be carried in the "
            f"{settings.tower or 'vision'} tower of its base",
            "choose another with --tower",
        )
    method.require(*carried.lineage.layouts, carried.pairs)
    return carried


def training_samples(drawn: CalibrationDraw, split: str, held_out: Samples) -> Samples:
    """Return all labelled samples of the calibration split, or all texts, except those to evaluate on.

    There are none if the split has no labels, or they are not to be used.
    """
    taken = set(held_out.indices) if split == drawn.split else set()
    known = drawn.labels == "dataset" or drawn.data.columns.is_self_supervised
    order = drawn.data.order(drawn.split, drawn.strategy.seed) if known else []
    rows = drawn.data.usable_rows(drawn.split, (index for index in order if index not in taken), len(order))
    return drawn.data.samples(drawn.split, rows)


def _held_out(drawn: CalibrationDraw, method: Method, settings: Settings) -> tuple[str, Samples]:
    """Return the split and samples to evaluate on: at most a fifth of a split that is trained on as a whole."""
    split, samples = evaluation_samples(
        drawn.data, drawn.samples, drawn.split, drawn.strategy.seed, settings.eval_samples
    )
    if _trains_on_whole_split(method) and split == drawn.split:
        samples = samples.first(max(1, len(drawn.data.splits[split]) // 5) if settings.evaluate else 0)
    return split, samples


def _trains_on_whole_split(method: Method) -> bool:
    return isinstance(method, Trainer) and method.whole_split


def _only_captions(drawn: CalibrationDraw) -> bool:
    """Return whether samples have no labels, but texts or captions to learn from."""
    return not drawn.data.labelled and drawn.data.columns.is_self_supervised


def _hash_in_background(lineage: Lineage) -> None:
    """Compute the files' SHA-256, which the record needs at the end, while the GPU is busy."""

    def compute() -> None:
        with suppress(OSError):  # reading the file later reports it
            _ = [model.sha256 for model in lineage.models]  # cached by each model

    Thread(target=compute, daemon=True).start()


def _has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _own_tokenizer(source: Model | Adapter) -> Any:
    """Load the tokenizer that is stored with a model or an adapter, or return None."""
    place = source.place
    if place is None or "tokenizer_config.json" not in place.sizes:
        return None
    place.fetch([name for name in TOKENIZER_FILES if name in place.sizes])
    with suppress(MissingProcessorError):  # only this check reads it
        return load_tokenizer(place.folder)
    return None


def _tokenizer(model: Model) -> Any:
    if model.place is not None:
        model.place.fetch(model.side_names)
        return load_tokenizer(model.place.folder)
    live = model.family.wrap(model.module)
    return live.tokenizer if isinstance(live, PretrainedModel) else None
