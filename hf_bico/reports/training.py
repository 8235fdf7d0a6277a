"""Say how a target was trained or a port polished, and which case of "port, polish or train?" a port is.

Reads records; measures nothing.
"""

from __future__ import annotations

from hf_bico.reports.record import Record, TrainingRecord
from hf_bico.reports.results import SAFE_SAMPLES, carries, training_steps
from hf_bico.settings import LEARNABLE
from hf_bico.utils.text import count_text


def situation_sentence(record: Record) -> str | None:
    """Say which case of "port, polish or train?" a port is, and what gains more there; None where nothing is known.

    The cases, and what was measured of each, are in docs/when-to-port.md.
    """
    data, method = record.data, record.method
    known = carries(record) or method.polished_alone
    if data is None or not known or record.objective.name not in LEARNABLE:
        return None
    unlabelled, polished = data.unlabelled, method.polished or method.polished_alone
    few, many = data.n < SAFE_SAMPLES, unlabelled is not None and unlabelled.n >= SAFE_SAMPLES
    samples = f"{'only ' if few else ''}{count_text(data.n, 'sample')}"
    samples += f", {unlabelled.n:,} more without labels" if unlabelled is not None else ""
    case = f"Your case: {samples}, and {'a polish' if polished else 'no training'}."
    if record.objective.name != "zero-shot":
        return f"{case} {_text_advice(record.objective.name, polished, few)}"
    if many and polished:
        return f"{case} Only fine-tuning on many labels gained more on small models."
    if polished or few:
        more = "--unlabelled DATA" if polished else "--polish --unlabelled DATA"
        return f"{case} More samples, even without labels, gained more on small models: {more}."
    return f"{case} If training is allowed, a few steps without labels gained more on small models: --polish."


def _text_advice(objective: str, polished: bool, few: bool) -> str:
    """Say what gained more where a model of texts was ported, or how to find out."""
    if objective == "language-modelling" and not polished:
        return "If training is allowed, a few steps gained more on small models: --polish."
    if objective == "language-modelling" and not few:
        return "On small models, the same number of steps on the texts themselves gained more: --method train."
    return "To measure whether training gains more on your models, run 'hf-bico compare --methods standard'."


def training_sentence(record: Record) -> str | None:
    """Describe how the target was trained; None if it was not."""
    training = record.method.trained
    if training is None:
        return None
    if training.toward is not None:
        return _brief_sentence(training)
    text = f"{training_steps(record)} of AdamW on {count_text(training.samples, 'sample')}"
    if training.batch is not None:
        text += f", {training.batch:,} at a time"
    text += f", learning rate {training.learning_rate:g}"
    if training.warmup is not None:
        text += f" after {training.warmup:,} warm-up steps and with cosine decay"
    text += f", weight decay {training.weight_decay:g}"
    if training.validation is not None:
        text += f"; accuracy {training.validation:.1%} on validation samples"
    return f"{text}."


def polish_sentence(record: Record) -> str | None:
    """Describe the polish of what was carried, or why it was dropped; None without one."""
    polish = record.method.polish
    if polish is None:
        return None
    if not polish.helped:
        samples = count_text(polish.left_out or 0, "sample")
        losses = ""
        if polish.before is not None and polish.after is not None:
            losses = f" (loss {polish.before:.3g} to {polish.after:.3g})"
        return f"The polish was dropped: {samples} left out of it show no clear gain{losses}."
    if polish.alone:
        return "The samples spoke against the ported change, so the polish started from the unchanged target."
    if not polish.steps:
        return (
            "The change was carried and its readout corrected. The samples left out showed no gain from a polish step."
        )
    text = f"The change was carried, then polished for {_brief_sentence(polish)}"
    readout = record.method.readout
    return f"{text} Its readout was corrected last." if readout is not None and readout.accepted else text


def _brief_sentence(training: TrainingRecord) -> str:
    """Describe a training that samples left out stopped: "14 steps on 100 unlabelled samples, ..."."""
    kind = "labelled sample" if training.toward == "labels" else "unlabelled sample"
    text = f"{count_text(training.steps, 'step')} on {count_text(training.samples, kind)}"
    if training.rank is not None:
        text += f", as a LoRA of rank {training.rank}"
    chosen = "" if training.given else ", chosen by samples left out"
    text += f" (AdamW, learning rate {training.learning_rate:.2g}{chosen}"
    text += f"; at most {training.most} steps)" if training.most is not None else ")"
    if training.left_out and training.before is not None and training.after is not None:
        samples = count_text(training.left_out, "sample")
        text += f": the loss of {samples} left out fell from {training.before:.3g} to {training.after:.3g}"
    return f"{text}."
