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
    "mean": "the sign of the samples' mean gradient",
    "majority": "the sign that most samples' own gradients have",
}
SAMPLING_PHRASES = {
    "class-balanced": "evenly from all classes",
    "centroid-near": "evenly from all classes, nearest to their class mean in the base's features",
    "centroid-far": "evenly from all classes, farthest from their class mean in the base's features",
    "half-class": "from half of the classes",
    "one-class": "from one class",
}
MATCHING_PHRASES = {
    "similarity": "matched by the similarity of the blocks' inputs (linear CKA)",
    "given": "as given",
}


def objective_sentence(record: Record) -> str | None:
    """Describe the loss that was differentiated; None if its name says it, or it is unknown."""
    name, data = record.objective.name, record.data
    if name == "language-modelling":
        return f"the cross-entropy of {_learnt(data)}, summed over the tokens"
    if name == "text-to-text":
        answer = "the completion" if _has(data, "prompt") else "the class name"
        return (
            "the summed cross-entropy of the answer's tokens, computed with each model's own decoder; the answer is "
            f"{answer}. The paper ports T5 encoders and does not name its loss"
        )
    if name == "classification":
        return (
            "the cross-entropy of a head on each pretrained model's own features, fitted to the calibration samples by "
            "ridge regression"
        )
    if name == "contrastive":
        text = "its caption" if _has(data, "caption") else "the prompt of its class"
        return f"each image compared with the texts of all pairs, and each text with all images; the text is {text}"
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
        f"The calibration samples chose {which} as the smallest alpha whose loss is at most {errors} above the "
        "smallest loss."
    )
    loss = _sample_loss(record)
    return f"A{said[1:]} {rule}" + ("" if loss is None else f" The loss is {loss}.")


def _sample_loss(record: Record) -> str | None:
    """Describe the loss by which a sample judges a change; None of the caller's own."""
    name = record.objective.name
    if name == "contrastive":
        return "the contrastive loss among all samples"
    if name in PREDICTING:
        return "the KL divergence between the predictions of the target and of the fine-tuned source"
    of_tokens = name in ("language-modelling", "text-to-text")
    if of_tokens and record.data is not None and record.data.pairing is not None:
        return "the target's own loss on the sample's tokens"
    return (
        "the KL divergence between the token predictions of the target and of the fine-tuned source"
        if of_tokens
        else None
    )


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
        parts.append(f"the values of the table{intervals}.")
    return f"Left: {parts[0]} Right: {parts[1]}" if len(parts) > 1 else f"The picture shows {parts[0]}"


def _curve_sentences(curve: ExpectedCurve, loss: str | None) -> str:
    if curve.unit == ACCURACY:
        shown = (
            f"the expected accuracy by {_scale(curve)}. It is the probability that the fine-tuned source gives to the "
            "target's predictions on the calibration samples"
        )
        error = " with the standard error of its gain" if curve.errors else ""
    else:
        shown, error = f"the loss of the calibration samples by {_scale(curve)}", ""
        shown += "" if loss is None else f", which is {loss}"
        if curve.errors:
            shown += ". The band shows the standard error of the difference from the smallest loss"
    return f"{shown}. The mark shows what was {'written' if curve.of_whole_change else 'chosen'}{error}."


def _scale(curve: ExpectedCurve) -> str:
    return "the scale of the whole change (1 is what was written)" if curve.of_whole_change else "alpha"


def _number(curve: ExpectedCurve, alpha: float) -> str:
    value = curve.values[alpha]
    return f"{value:.1%}" if curve.unit == ACCURACY else f"{value:.3g}"


def head_sentence(record: Record) -> str | None:
    """Describe how a classifier's head was made; None without one."""
    origin = record.objective.head
    if origin == "carried":
        said = (
            "the fine-tuned source's head, carried as W_head M. The affine map M takes the ported model's features of "
            "the calibration samples to the fine-tuned source's (ridge regression, no labels). The unchanged target is "
            "measured with a head that was carried to its own features in the same way"
        )
    elif origin == "fitted" and is_trained(record):
        said = (
            "ridge regression on the target's features of the calibration samples before training; training did not "
            "change the head"
        )
    elif origin == "fitted":
        said = (
            "logistic regression on the ported model's features of the calibration samples. The unchanged target is "
            "measured with a head that was fitted to its own features in the same way"
        )
    else:
        return None
    if record.objective.pooling is not None:
        said += f". It reads {clean(record.objective.pooling, 200)}, as the target's own files define it"
    beside = record.output is not None and record.output.format == "delta"
    return f"{said}. This change of weights does not include the head." if beside else f"{said}."


def loss_sentence(record: Record) -> str | None:
    """Describe a measured loss; None if none was measured."""
    if not any(entry.metric == LOSS and entry.protocol is None for entry in record.evaluation):
        return None
    if record.objective.name == "contrastive":
        return "The loss is the mean contrastive loss of a pair among all of these samples. It depends on their number."
    tokens = {"language-modelling": _learnt(record.data), "text-to-text": "the answers' tokens"}
    of = tokens.get(record.objective.name)
    if of is None:
        return None
    if any(entry.per == "byte" for entry in record.evaluation):
        return (
            f"The loss is the cross-entropy of {of} in nats per byte of text, which can be compared between models "
            "with different tokenizers. Lower is better."
        )
    return f"The loss is the mean cross-entropy of {of}. Lower is better."


def uses_labels(record: Record) -> bool:
    """Return True if the objective uses classes."""
    return record.objective.name != "language-modelling"


def _learnt(data: DataRecord | None) -> str:
    if _has(data, "messages"):
        return "the assistant's tokens"
    return "the answers' tokens without the prompts" if _has(data, "prompt") else "the texts' tokens"


def _has(data: DataRecord | None, role: str) -> bool:
    return data is not None and role in data.columns
