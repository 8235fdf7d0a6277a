"""Sentences about methods, alpha, objectives, heads, losses and pictures.

Reads records; knows neither models nor losses.
"""

from __future__ import annotations

from hf_bico.reports.outcome_picture import ExpectedCurve, Outcome
from hf_bico.reports.record import ACCURACY, LOSS, DataRecord, MethodRecord, Record
from hf_bico.reports.results import is_trained
from hf_bico.reports.verdict import alpha_sentence
from hf_bico.settings import PREDICTING, allowed_errors
from hf_bico.utils.text import clean

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


def place_phrase(device: str) -> str:
    """Return where a run took place.

    >>> place_phrase("NVIDIA H200"), place_phrase("cpu")
    ('on NVIDIA H200', 'on a CPU')
    """
    return "on a CPU" if device == "cpu" else f"on {clean(device, 80)}"


def given_alpha(method: MethodRecord) -> str | None:
    """Return "alpha 1, given"; None if the samples chose it."""
    if method.chosen_by_samples:
        return None
    alphas = [method.alpha] if isinstance(method.alpha, float) else method.alpha
    return f"alpha {', '.join(f'{alpha:g}' for alpha in alphas)}, given"


_ERRORS = {1: "one standard error, as --bold asks,", 2: "two standard errors", 3: "three standard errors"}


def chosen_alpha(record: Record) -> str | None:
    """Describe the alpha that the samples chose, and the rule; None if they did not choose."""
    method, said = record.method, alpha_sentence(record.method)
    if said is None:
        return None
    samples = 0 if record.data is None else record.data.n
    errors = _ERRORS[allowed_errors(samples, method.bold)]
    which = "it" if isinstance(method.alpha, float) else "each"
    rule = (
        f"The calibration samples chose {which}: the smallest alpha whose loss is at most {errors} above the smallest "
        "loss."
    )
    loss = _sample_loss(record)
    return f"A{said[1:]} {rule}" + ("" if loss is None else f" The loss of a sample is {loss}.")


def _sample_loss(record: Record) -> str | None:
    """Describe the loss by which a sample judges a change; None of the caller's own."""
    name = record.objective.name
    if name == "contrastive":
        return "the contrastive one among all samples"
    if name in PREDICTING:
        return "the KL divergence of the target's prediction from the fine-tuned source's"
    of_tokens = name in ("language-modelling", "text-to-text")
    if of_tokens and record.data is not None and record.data.pairing is not None:
        return "the target's own, of the sample's tokens"
    return "the KL divergence of the target's predicted tokens from the fine-tuned source's" if of_tokens else None


def outcome_alt(outcome: Outcome) -> str:
    """Describe the picture of a port's outcome for those who cannot see it."""
    curve, parts = outcome.curve, []
    if curve is not None:
        shown = "expected accuracy" if curve.unit == ACCURACY else "loss"
        parts.append(f"{shown} of the calibration samples by {_scale(curve)}")
        if curve.chosen in curve.values:
            where = "as written" if curve.of_whole_change else f"at the chosen {curve.chosen:.2g}"
            parts[0] += f", {_number(curve, curve.chosen)} {where}"
            parts[0] += f" and {_number(curve, 0.0)} at 0" if curve.chosen and 0.0 in curve.values else ""
    if outcome.bars:
        values = ", ".join(f"{bar.name.replace(', ', ' with ')} {bar.text}" for bar in outcome.bars)
        parts.append(f"held-out {'linear-probe ' if outcome.probed else ''}{outcome.metric}: {values}")
    text = "; right, ".join(parts)
    return f"Left, {text}" if len(parts) > 1 else text[:1].upper() + text[1:]


def outcome_sentence(record: Record, outcome: Outcome) -> str:
    """Explain the picture of a port's outcome."""
    parts = []
    if outcome.curve is not None:
        parts.append(_curve_sentences(outcome.curve, _sample_loss(record)))
    if outcome.bars:
        intervals = " with their 95% intervals" if outcome.metric == ACCURACY else ""
        parts.append(f"values of the table{intervals}.")
    return f"Left: {parts[0]} Right: {parts[1]}" if len(parts) > 1 else f"The picture shows {parts[0]}"


def _curve_sentences(curve: ExpectedCurve, loss: str | None) -> str:
    if curve.unit == ACCURACY:
        shown = (
            f"the accuracy to expect by {_scale(curve)}. It is how likely the fine-tuned source finds the classes that "
            "the target then predicts for the calibration samples"
        )
        error = ", with the standard error of its gain" if curve.errors else ""
    else:
        shown, error = f"the loss of the calibration samples by {_scale(curve)}", ""
        shown += "" if loss is None else f": {loss}"
        if curve.errors:
            shown += ". The band is the standard error of its difference from the smallest loss"
    return f"{shown}. The mark is what was {'written' if curve.of_whole_change else 'chosen'}{error}."


def _scale(curve: ExpectedCurve) -> str:
    return "the scale of the whole change, 1 being what was written" if curve.of_whole_change else "alpha"


def _number(curve: ExpectedCurve, alpha: float) -> str:
    value = curve.values[alpha]
    return f"{value:.1%}" if curve.unit == ACCURACY else f"{value:.3g}"


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
    if record.objective.pooling is not None:
        said += f". It reads {clean(record.objective.pooling, 200)}, as the target's own files say"
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
    if of is None:
        return None
    if any(entry.per == "byte" for entry in record.evaluation):
        return (
            f"The loss is the cross-entropy of {of} in nats per byte of text, which is comparable between models of "
            "different tokenizers: lower is better."
        )
    return f"The loss is the mean cross-entropy of {of}: lower is better."


def uses_labels(record: Record) -> bool:
    """Return True if the objective uses classes."""
    return record.objective.name != "language-modelling"


def _learnt(data: DataRecord | None) -> str:
    if _has(data, "messages"):
        return "the tokens of what the assistant says"
    return "the answers' tokens, prompts left out" if _has(data, "prompt") else "the texts' tokens"


def _has(data: DataRecord | None, role: str) -> bool:
    return data is not None and role in data.columns
