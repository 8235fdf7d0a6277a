"""Metrics of predicted classes: the accuracy, and those of the `evaluate` library, which are scripts.

Knows predictions and labels; no model.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

from hf_bico.errors import UsageError

ACCURACY = "accuracy"


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> float:
    """Return the share of predictions that equal their references.

    >>> accuracy([0, 1, 1, 0], [0, 1, 2, 0])
    0.75
    """
    if len(predictions) != len(references) or not references:
        raise ValueError(f"{len(predictions)} predictions and {len(references)} references have no accuracy")
    return sum(given == wanted for given, wanted in zip(predictions, references, strict=True)) / len(references)


@dataclass(frozen=True)
class Metric:
    """A metric by its name; without a `module` of `evaluate`, the accuracy."""

    name: str = ACCURACY
    module: Any = None

    @classmethod
    def named(cls, name: str, trust_remote_code: bool = False) -> Metric:
        """Load a metric of the Hub, whose script is run, or of a local script."""
        if name == ACCURACY:
            return cls()
        if not (trust_remote_code or _is_local(name)):
            raise UsageError(
                f"the metric '{name}' is a script on the Hub, which would run on this machine",
                "add --trust-remote-code if you trust it, or name a local script",
            )
        import evaluate  # slow, and used for nothing else

        try:
            module = evaluate.load(name, keep_in_memory=True)
        except (OSError, ImportError, ValueError, SyntaxError) as error:
            cause = " ".join(str(error).split())
            raise UsageError(f"the metric '{name}' cannot be loaded: {cause}", "check its name") from error
        return cls(str(module.name), module)

    @property
    def averages(self) -> bool:
        """True if it is computed for each class, and averaged."""
        return self.module is not None and "average" in inspect.signature(self.module._compute).parameters

    def __call__(self, predictions: Sequence[int], references: Sequence[int]) -> float:
        if self.module is None:
            return accuracy(predictions, references)
        options = {"average": "macro"} if self.averages else {}
        try:
            found = self.module.compute(predictions=list(predictions), references=list(references), **options)
        except (TypeError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise UsageError(
                f"the metric '{self.name}' cannot score classes: {cause}", "use another --metric"
            ) from error
        values = found if isinstance(found, dict) else {}
        value = values.get(self.name, next(iter(values.values()), None))
        if not isinstance(value, Real) or not isfinite(value):
            raise UsageError(f"the metric '{self.name}' gave {str(value)[:60]}, not a number", "use another --metric")
        return float(value)


def _is_local(name: str) -> bool:
    """Return True if `evaluate` would find a local script, and ask nobody else."""
    script = name if name.endswith(".py") else os.path.join(name, f"{os.path.basename(name.rstrip(os.sep))}.py")
    return os.path.isfile(script)
