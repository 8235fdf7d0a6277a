"""What speaks against the inputs of a port without forbidding it, each as one sentence.

Reads lineages, records and small files; weights only where a folder holds two models.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from hf_bico.models.checkpoints import WEIGHT_FILES, FileCheckpoint
from hf_bico.models.model import Model, Opened
from hf_bico.reports.record import EvaluationRecord
from hf_bico.resolving import Lineage
from hf_bico.utils.files import read_object

ENOUGH_MEASURED = 50
"""Of fewer samples, an accuracy near chance says too little."""
SAME_ENERGY, SAME_ROUNDED = 1e-6, 5e-4
"""How far the energies of one model in two layouts are apart at most, and where only one is in half precision: on the
small worlds of three seeds rounding moved them by up to 1.3e-4, and fine-tuning by 2.6e-3 and more."""
_PREPROCESSING = (("open_clip_config.json", "preprocess_cfg"), ("preprocessor_config.json", None))
_NORMALISED_BY = ("mean", "std", "image_mean", "image_std", "do_normalize", "do_rescale", "rescale_factor")


def chance_notice(evaluation: Iterable[EvaluationRecord], classes: int) -> list[str]:
    """A notice where the fine-tuned source itself answers as chance would: within two standard deviations, or worse.

    What it learnt cannot be told from what the data ask, and the labels enter every map of the outputs. The fine-tunes
    of the small worlds get 89% and more of ten classes right.
    """
    for entry in evaluation:
        if entry.model != "source" or entry.metric != "accuracy" or entry.n < ENOUGH_MEASURED or classes < 2:
            continue
        chance = 1 / classes
        if entry.value <= chance + 2 * sqrt(chance * (1 - chance) / entry.n):
            return [
                f"The fine-tuned source gets {entry.value:.1%} of {entry.n} samples right, as chance would of "
                f"{classes} classes: check that it was fine-tuned on these labels and on this base, and that the class "
                "names stand in the labels' order."
            ]
    return []


def lineage_doubts(lineage: Lineage) -> list[str]:
    """What the files of the three models say against each other, once they are on this machine."""
    own = [notice for model in lineage.models if (notice := _two_models(model)) is not None]
    normalised = _otherwise_normalised(lineage)
    return [*own, *([] if normalised is None else [normalised])]


def _two_models(model: Opened) -> str | None:
    """A folder may hold one model in the layouts of two libraries; whether it is one, the sum of all squares tells."""
    if model.folder is None or not isinstance(model, Model):
        return None
    files = [model.folder / name for name in WEIGHT_FILES.values()]
    if not all(file.is_file() for file in files):
        return None
    kept = [FileCheckpoint([file]) for file in files]
    first, second = (_energy(checkpoint) for checkpoint in kept)
    alike = len({dtype for checkpoint in kept for dtype in _float_types(checkpoint)}) == 1
    if abs(first - second) <= (SAME_ENERGY if alike else SAME_ROUNDED) * max(first, second):
        return None
    used = model.family.library
    other = next(name for library, name in WEIGHT_FILES.items() if library != used)
    return f"{model.name} holds two different models: {WEIGHT_FILES[used]}, which was used, and {other}."


def _float_types(checkpoint: FileCheckpoint) -> set[str]:
    return {dtype for dtype in checkpoint.dtypes.values() if "F" in dtype}


def _energy(checkpoint: FileCheckpoint) -> float:
    from hf_bico.models.low_rank import energy

    tensors = (checkpoint.tensor(name) for name in checkpoint.shapes)
    return sum(energy(tensor) for tensor in tensors if tensor.is_floating_point())


def _otherwise_normalised(lineage: Lineage) -> str | None:
    """A notice where a fine-tuned model's own preprocessing scales images otherwise than its base's, which is used."""
    if lineage.source.folder is None or lineage.base.folder is None or not isinstance(lineage.source, Model):
        return None
    for file, section in _PREPROCESSING:
        own, base = (_values(model, file, section) for model in (lineage.source, lineage.base))
        for name in _NORMALISED_BY:
            if name in own and name in base and own[name] != base[name]:
                return (
                    f"{lineage.source.name} prepares images with {name} {own[name]} and its base with {base[name]}, "
                    "which was used for both."
                )
    return None


def _values(model: Opened, file: str, section: str | None) -> dict[str, object]:
    path = None if model.folder is None else model.folder / file
    if path is None or not path.is_file():
        return {}
    try:
        content = read_object(path)
    except (OSError, ValueError):
        return {}  # who loads the model says so
    part = content if section is None else content.get(section)
    return {name: part[name] for name in _NORMALISED_BY if name in part} if isinstance(part, dict) else {}
