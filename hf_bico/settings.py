"""How to port: every choice that is not a model or a data set, checked on its own. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite
from typing import Any

from hf_bico.errors import RankError, UsageError
from hf_bico.sizes import read_size

METHOD_NAMES = ("bico", "naive")
COMPLETIONS = ("drop", "svd")
FORMATS = ("full", "adapter", "delta")
DTYPES = ("auto", "float32", "float64", "bfloat16")
DEFAULT_SAMPLES = 100
DEFAULT_TEMPLATES = ("a photo of a {}.",)
DEFAULT_DOWNLOAD = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a port.

    Samples: `n` in all (100 by default) or `per_class` of each class, drawn from `split` of the data set's `config` by
    `seed`, with at most `max_download` bytes of it downloaded; `image_column`, `label_column` and `class_names` where
    they cannot be found; prompts from `templates`, with {} for the class.
    Loss: `objective` is "auto" (zero-shot), or a callable (model, batch) -> loss that sums over the samples of
    `batch.pixels` and `batch.labels`.
    Method: "bico", or "naive" for comparison; `completion` says what the maps do where calibration saw nothing: "drop"
    it, or complete it arbitrarily by the "svd"; `alpha` scales what is added.
    Result: `format` is "full", a model, "adapter", for peft, or "delta", the change alone; by default a LoRA gives an
    adapter and anything else a full model. `rank` is an adapter's: a whole number, or a share of each layer's energy
    such as 0.95; by default a LoRA keeps its rank and anything else is exact.
    Run: `batch_size` samples at a time on `device` in `dtype`; `evaluate` measures on held-out samples; `force` goes on
    although the base looks wrong.
    """

    config: str | None = None
    split: str | None = None
    n: int | None = None
    per_class: int | None = None
    seed: int = 0
    objective: str | Callable[..., Any] = "auto"
    method: str = "bico"
    completion: str = "drop"
    alpha: float = 1.0
    format: str | None = None
    rank: int | float | None = None
    image_column: str | None = None
    label_column: str | None = None
    class_names: Sequence[str] | None = None
    templates: Sequence[str] = DEFAULT_TEMPLATES
    max_download: int = DEFAULT_DOWNLOAD
    batch_size: int = 32
    device: str = "auto"
    dtype: str = "auto"
    evaluate: bool = True
    force: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Options by name; one that there is not is said, and sizes may be texts such as 2GB."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, n=1) or (["per_class"] if name == "k" else [])
                raise UsageError(
                    f"there is no option '{name}'",
                    f"did you mean '{near[0]}'?" if near else f"the options are: {', '.join(known)}",
                )
        limit = options.get("max_download")
        size = {"max_download": read_size(limit, "max_download")} if isinstance(limit, str) else {}
        return cls(**{**options, **size})

    def __post_init__(self) -> None:
        _require_one_of("method", self.method, METHOD_NAMES)
        _require_one_of("completion", self.completion, COMPLETIONS)
        _require_one_of("dtype", self.dtype, DTYPES)
        if self.format is not None:
            _require_one_of("format", self.format, FORMATS)
        if require_rank(self.rank) is not None and self.format not in (None, "adapter"):
            raise UsageError(f"--rank was given with --format {self.format}", "use --rank with --format adapter")
        if isinstance(self.objective, str):
            _require_one_of("objective", self.objective, ("auto", "zero-shot"))
        if self.n is not None and self.per_class is not None:
            raise UsageError("-n and -k were both given", "choose the number of samples in all, or per class")
        for option, value in (("-n", self.n), ("-k", self.per_class), ("--batch-size", self.batch_size)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{option} is {value}", "use a whole number of at least 1")
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

    @property
    def zero_shot(self) -> bool:
        """Whether the task loss is the zero-shot one, and not the caller's own."""
        return isinstance(self.objective, str)


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


def _require_one_of(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"--{option} is '{value}'", f"use one of: {', '.join(choices)}")
