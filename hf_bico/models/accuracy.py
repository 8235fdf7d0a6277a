"""Accuracy as a metric of `evaluate`. Importing this module loads the library, which takes seconds."""

from __future__ import annotations

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """The share of predictions that equal their references."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="The share of predictions that equal their references.",
            citation="",
            inputs_description="predictions and references: one class each a sample, as whole numbers.",
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        right = sum(given == wanted for given, wanted in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
