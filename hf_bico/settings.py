"""How to port: every choice that is not a model or a data set, checked on its own. Knows no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from hf_bico.errors import RankError, UsageError
from hf_bico.utils.text import did_you_mean

METHOD_NAMES = (
    *("bico", "bico-fisher", "bico-path", "input-only", "output-only", "gradient-only", "theseus"),
    *("naive", "transfusion", "gradfix", "fewshot", "finetune"),
)
_ALIGNING = METHOD_NAMES[: METHOD_NAMES.index("naive")]
OPTION_METHODS: dict[str, tuple[str, ...]] = {
    "completion": _ALIGNING,
    "path_steps": ("bico-path",),
    "signs": ("gradfix",),
    "learning_rate": ("fewshot", "finetune"),
    "weight_decay": ("fewshot", "finetune"),
    **dict.fromkeys(("train_steps", "train_batch", "warmup", "checkpoint"), ("finetune",)),
}
"""The options that only some methods look at."""
SAMPLINGS = ("random", "class-balanced", "centroid-near", "centroid-far", "half-class", "one-class")
PREDICTING = ("zero-shot", "classification")
"""The objectives that tell classes apart."""
LABELS = ("auto", "dataset", "pseudo")
LAYERS = ("index", "similarity")
TOWERS = ("vision", "text", "both")
SIGNS = ("mean", "majority")
OBJECTIVES = ("auto", "zero-shot", "contrastive", "language-modelling", "text-to-text", "classification")
EVALUATIONS = ("auto", "zero-shot", "probe", "both")
COMPLETIONS = ("drop", "svd")
FORMATS = ("full", "adapter", "delta")
DTYPES = ("auto", "float32", "float64", "bfloat16")
PROBE = "probe"
"""The protocol of a measurement by a linear classifier; without one it is zero-shot."""
DEFAULT_SAMPLES = 100
DEFAULT_MEASURED = 1000
DEFAULT_TEMPLATES = ("a photo of a {}.",)
DEFAULT_DOWNLOAD = 2_000_000_000
USUAL_BATCH = 32
DEVICE_MAPS = ("auto", "balanced", "sequential")
FEW_SAMPLES, COPIES = 50, 7
"""Below so many samples, bico-path adds so many altered copies of each."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a port.

    Samples: `n` in all (100 by default) or `per_class` of each class, drawn from `split` of the data set's `config` by
    `seed`, in the way that `sampling` names (random, class-balanced, centroid-near, centroid-far, half-class,
    one-class), with at most `max_download` bytes of it downloaded; `image_column`, `caption_column`, `text_column`
    (of a pair "a,b", of a prompt and its answer "prompt=a,completion=b"), `label_column` and `class_names` where they
    cannot be found; prompts from `templates`, with {} for the class; texts of up to `max_length` tokens. `labels` are
    the "dataset"'s, or "pseudo": what the fine-tuned source predicts; "auto" takes the data set's where it has any.
    `augment` adds so many altered copies of each sample (by default 7 for bico-path below 50 samples, else none).
    Loss: `objective` is "auto" (what the models are made for), one of OBJECTIVES, or a callable (model, batch) -> loss
    that sums over the samples of `batch.pixels` or `batch.tokens`, and `batch.labels` (each -1 where the data set has
    none).
    Method: `method` is one of METHOD_NAMES; `completion` says what the maps do where calibration saw nothing: "drop"
    it, or complete it arbitrarily by the "svd"; `alpha` scales what is added. `layers` says which source block each
    target block takes: by "index", by "similarity" (CKA), or a list. `tower` says which of a CLIP's two are carried:
    "vision", "text" or "both"; by default those that the source changed. `path_steps` are those of bico-path, `signs`
    how gradfix takes the target's gradient ("mean", or the "majority" of the samples). `readout` corrects the final
    projection towards the fine-tuned source's predictions, in closed form. `fit_head` fits a classifier's head to the
    calibration samples, instead of carrying the source's.
    Training, of fewshot and finetune alone: `learning_rate`, `weight_decay`; of finetune: `train_steps`, `train_batch`,
    `warmup` and `checkpoint`, a folder that an interrupted training goes on from.
    Result: `format` is "full", a model, "adapter", for peft, or "delta", the change alone; by default a LoRA gives an
    adapter and anything else a full model. `rank` is an adapter's: a whole number, or a share of each layer's energy
    such as 0.95; by default a LoRA keeps its rank and anything else is exact.
    Run: on `device` in `dtype`, with at most `memory` bytes of it (or a text such as "8GB"; by default what is free):
    where models and sums do not fit together, the samples are gone through several times. `batch_size` samples at a
    time; by default as many as are quick, and fit; `calibration_batch` of them in calibration, to repeat a port
    exactly. `device_map` "auto" spreads models that are too large for one GPU over all, and the main memory, by
    accelerate. `evaluate` measures on at most `eval_samples` held-out samples, by `evaluation` "zero-shot" (as the
    objective asks, without fitting anything), by a linear "probe" that is fitted to the calibration samples, or "both";
    "auto" is a probe for text-to-text, else zero-shot. `control` also measures a port whose two models saw different
    samples; `force` goes on although the base looks wrong.
    """

    config: str | None = None
    split: str | None = None
    n: int | None = None
    per_class: int | None = None
    seed: int = 0
    sampling: str = "random"
    labels: str = "auto"
    augment: int | None = None
    objective: str | Callable[..., Any] = "auto"
    method: str = "bico"
    completion: str = "drop"
    alpha: float = 1.0
    layers: str | Sequence[int] = "index"
    tower: str | None = None
    path_steps: int = 2
    signs: str = "mean"
    readout: bool = False
    fit_head: bool = False
    learning_rate: float = 1e-5
    weight_decay: float = 0.1
    train_steps: int = 2000
    train_batch: int = 128
    warmup: int = 200
    checkpoint: str | None = None
    format: str | None = None
    rank: int | float | None = None
    image_column: str | None = None
    label_column: str | None = None
    text_column: str | None = None
    caption_column: str | None = None
    max_length: int | None = None
    class_names: Sequence[str] | None = None
    templates: Sequence[str] = DEFAULT_TEMPLATES
    max_download: int = DEFAULT_DOWNLOAD
    batch_size: int | None = None
    calibration_batch: int | None = None
    memory: int | None = None
    device_map: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    evaluate: bool = True
    eval_samples: int = DEFAULT_MEASURED
    evaluation: str = "auto"
    control: bool = False
    force: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Options by name; one that there is not is said, and sizes may be texts such as 2GB."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                meant = "per_class" if name == "k" else name
                remedy = did_you_mean(meant, known, f"the options are: {', '.join(known)}")
                raise UsageError(f"there is no option '{name}'", remedy)
        sizes = {name: options.get(name) for name in ("max_download", "memory")}
        read = {name: read_size(size, name) for name, size in sizes.items() if isinstance(size, str)}
        return cls(**{**options, **read})

    def __post_init__(self) -> None:
        _require_one_of("method", self.method, METHOD_NAMES)
        _require_one_of("completion", self.completion, COMPLETIONS)
        _require_one_of("sampling", self.sampling, SAMPLINGS)
        _require_one_of("labels", self.labels, LABELS)
        _require_one_of("signs", self.signs, SIGNS)
        _require_one_of("evaluation", self.evaluation, EVALUATIONS)
        self._require_layers()
        _require_one_of("dtype", self.dtype, DTYPES)
        if self.device_map is not None:
            _require_one_of("device-map", self.device_map, DEVICE_MAPS)
        if self.tower is not None:
            _require_one_of("tower", self.tower, TOWERS)
        if self.format is not None:
            _require_one_of("format", self.format, FORMATS)
        if require_rank(self.rank) is not None and self.format not in (None, "adapter"):
            raise UsageError(f"--rank was given with --format {self.format}", "use --rank with --format adapter")
        if isinstance(self.objective, str):
            _require_one_of("objective", self.objective, OBJECTIVES)
        if self.labels == "pseudo" and self.objective not in ("auto", *PREDICTING):
            raise UsageError(
                "pseudo-labels are what an objective predicts that tells classes apart, and this one does not",
                "leave one of the two out",
            )
        if self.n is not None and self.per_class is not None:
            raise UsageError("-n and -k were both given", "choose the number of samples in all, or per class")
        for option, value, least in (
            ("-n", self.n, 1),
            ("-k", self.per_class, 1),
            ("--batch-size", self.batch_size, 1),
            ("--memory", self.memory, 1),
            ("calibration_batch", self.calibration_batch, 1),
            ("--augment", self.augment, 0),
            ("--max-length", self.max_length, 1),
            ("--path-steps", self.path_steps, 1),
            ("--train-steps", self.train_steps, 1),
            ("--train-batch", self.train_batch, 1),
            ("--warmup", self.warmup, 0),
            ("--eval-samples", self.eval_samples, 1),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(f"{option} is {value}", f"use a whole number of at least {least}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}", "use a whole number of at least 0, and below 2^63")
        if self.control and not self.evaluate:
            raise UsageError("--control is measured, and --no-eval measures nothing", "leave one of the two out")
        for option, rate in (("--learning-rate", self.learning_rate), ("--weight-decay", self.weight_decay)):
            if not isinstance(rate, int | float) or not isfinite(rate) or rate < 0:
                raise UsageError(f"{option} is {rate}", "use a number of at least 0")
        for name, texts in (("templates", self.templates), ("class_names", self.class_names)):
            if isinstance(texts, str):
                raise UsageError(f"{name} is one string, {texts!r}", "give a list of strings")
        if not isinstance(self.alpha, int | float) or not isfinite(self.alpha):
            raise UsageError(f"--alpha is {self.alpha}", "use a finite number; 1 adds the task vector as it is")
        object.__setattr__(self, "templates", tuple(self.templates))
        for template in self.templates:
            if "{}" not in template:
                raise UsageError(f"the template {template!r} has no place for the class name", "put {} into it")
        if not self.templates:
            raise UsageError("there is no prompt template", "give at least one line with {} in it")

    def _require_layers(self) -> None:
        if isinstance(self.layers, str):
            _require_one_of("layers", self.layers, LAYERS)
            return
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or any(type(block) is not int or block < 0 for block in self.layers):
            raise UsageError(
                f"--layers is {list(self.layers)}", "give the source block of each target block, such as 0,0,1,1"
            )

    def copies(self, samples: int) -> int:
        """How many altered copies of each of so many samples are used."""
        if self.augment is not None:
            return self.augment
        return COPIES if self.method == "bico-path" and samples < FEW_SAMPLES else 0

    @property
    def batch(self) -> int:
        """How many samples are run at a time where nothing is differentiated."""
        return self.batch_size or USUAL_BATCH

    @property
    def trains_on_all(self) -> bool:
        """Whether the method trains on all of the split, and not on some samples."""
        return self.method == "finetune"

    @property
    def own_objective(self) -> bool:
        """Whether the task loss is the caller's own."""
        return not isinstance(self.objective, str)

    @property
    def names_classes(self) -> bool:
        """Whether classes need names: as words of prompts, or as answers."""
        return self.objective in ("auto", "zero-shot", "contrastive", "text-to-text")

    @property
    def predicts(self) -> bool:
        """Whether the objective tells classes apart."""
        return self.objective in PREDICTING


def require_rank(rank: Any) -> int | float | None:
    """A whole number of at least 1, a share of energy between 0 and 1, or None."""
    if rank is None or (type(rank) is int and rank >= 1) or (type(rank) is float and 0.0 < rank < 1.0):
        found: int | float | None = rank
        return found
    which = ": the rank 1, or all of the energy?" if rank == 1.0 and type(rank) is float else ""
    raise RankError(
        f"the rank is {rank!r}{which}",
        "give a whole number of at least 1, or a share of energy between 0 and 1, such as 0.95",
    )


def read_rank(text: str) -> int | float:
    """A rank as it is typed: 16, or 0.95."""
    for kind in (int, float):
        try:
            rank = require_rank(kind(text))
        except ValueError:
            continue
        return 1 if rank is None else rank
    raise RankError(f"--rank is '{text}'", "give a whole number such as 16, or a share of energy such as 0.95")


def read_layers(text: str) -> str | tuple[int, ...]:
    """Layers as they are typed: index, similarity, or 0,0,1,1."""
    if text in LAYERS:
        return text
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(
            f"--layers is '{text}'", f"use {' or '.join(LAYERS)}, or the source block of each target block: 0,0,1,1"
        ) from None


def _require_one_of(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        remedy = did_you_mean(str(value), choices, f"use one of: {', '.join(choices)}")
        raise UsageError(f"--{option} is '{value}'", remedy)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE)


def read_size(text: str, option: str) -> int:
    """What a text such as 500MB means.

    >>> read_size("1.5 GB", "--max-download")
    1500000000
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option} is '{text}'", "use a size such as 500MB or 2GB")
    return int(float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " "))
