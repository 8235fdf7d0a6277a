"""Sentences about methods, objectives, heads and losses.

Reads records; knows neither models nor losses.
"""

from __future__ import annotations

from hf_bico.reports.record import DataRecord, Record
from hf_bico.reports.results import LOSS, is_trained

SIGN_PHRASES = {
    "mean": "the mean gradient of the samples",
    "majority": "the sign that most of the samples' own gradients have",
}
SAMPLING_PHRASES = {
    "class-balanced": "evenly from all classes",
    "centroid-near": "evenly from all classes, those nearest to the mean of their class in the base's features",
    "centroid-far": "evenly from all classes, those farthest from the mean of their class in the base's features",
    "half-class": "from half of the classes",
    "one-class": "from one class",
}
MATCHING_PHRASES = {
    "similarity": "matched by the similarity of what the blocks read (linear CKA)",
    "given": "as they were given",
}


def objective_sentence(record: Record) -> str | None:
    """Describe the loss that was differentiated; None if its name says it, or it is unknown."""
    name, data = record.objective.name, record.data
    if name == "language-modelling":
        return f"the cross-entropy of {_learnt(data)}, summed over the tokens"
    if name == "text-to-text":
        answer = "the completion" if _has(data, "prompt") else "the word of the class"
        return (
            "the cross-entropy of an answer's tokens through each model's own decoder, summed; the answer is "
            f"{answer}. The paper, which carries encoders of T5, does not name its loss"
        )
    if name == "classification":
        return (
            "the cross-entropy of a head on each pretrained model's own features, fitted in closed form (ridge "
            "regression) to the calibration samples"
        )
    if name == "contrastive":
        text = "its caption" if _has(data, "caption") else "the prompt of its class"
        return f"each image against the texts of all pairs, and each text against all images; an image's text is {text}"
    return None


def head_sentence(record: Record) -> str | None:
    """Describe how a classifier's head was made; None without one."""
    origin = record.objective.head
    if origin == "carried":
        said = (
            "the fine-tuned source's, carried: W_head M, with the affine map M (ridge regression, no labels) of the "
            "ported model's features to the fine-tuned source's, of the calibration samples. The untouched target is "
            "measured with one that was carried in the same way to its own"
        )
    elif origin == "fitted" and is_trained(record):
        said = (
            "ridge regression on the features that the target had before it was trained, of the calibration samples; "
            "training left it as it is"
        )
    elif origin == "fitted":
        said = (
            "logistic regression on the ported model's features of the calibration samples. The untouched target is "
            "measured with one that was fitted in the same way to its own"
        )
    else:
        return None
    beside = record.output is not None and record.output.format == "delta"
    return f"{said}. It is not in this change of weights." if beside else f"{said}."


def loss_sentence(record: Record) -> str | None:
    """Describe a measured loss; None if none was measured."""
    if not any(entry.metric == LOSS and entry.protocol is None for entry in record.evaluation):
        return None
    if record.objective.name == "contrastive":
        return "The loss is the mean contrastive one of a pair among all of these, whose number it depends on."
    tokens = {"language-modelling": _learnt(record.data), "text-to-text": "the answers' tokens"}
    of = tokens.get(record.objective.name)
    return None if of is None else f"The loss is the mean cross-entropy of {of}: lower is better."


def uses_labels(record: Record) -> bool:
    """Return True if the objective uses classes."""
    return record.objective.name != "language-modelling"


def _learnt(data: DataRecord | None) -> str:
    if _has(data, "messages"):
        return "the tokens of what the assistant says"
    return "the answers' tokens, prompts left out" if _has(data, "prompt") else "the texts' tokens"


def _has(data: DataRecord | None, role: str) -> bool:
    return data is not None and role in data.columns
