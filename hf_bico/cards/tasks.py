"""What a model is for, in the Hub's words, and how transformers loads it for that. Reads records; loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from hf_bico.record import EvaluationRecord, ObjectiveRecord, Record
from hf_bico.results import LOSS

CLIP = ("open_clip ViT", "transformers CLIP")
"""The families that classify pictures by texts."""
DECODERS = ("decoder", "GPT-2")
TEXT_FAMILIES = (*DECODERS, "T5", "encoder")
"""The families whose features are of texts."""
LIBRARIES = {"open_clip ViT": "open_clip"} | dict.fromkeys(
    ("transformers CLIP", *TEXT_FAMILIES, "ViT", "generic"), "transformers"
)


@dataclass(frozen=True)
class Task:
    """One of the Hub's tasks, with the class that loads a model for it, and the one that prepares what it reads."""

    type: str
    name: str
    model_class: str = "AutoModel"
    reader: str = "AutoTokenizer"

    @property
    def metadata(self) -> dict[str, str]:
        return {"type": self.type, "name": self.name}


ZERO_SHOT = Task("zero-shot-image-classification", "Zero-Shot Image Classification")
GENERATION = Task("text-generation", "Text Generation", "AutoModelForCausalLM")
TEXT_TO_TEXT = Task("text2text-generation", "Text-to-Text Generation", "AutoModelForSeq2SeqLM")
TEXT_CLASSES = Task("text-classification", "Text Classification", "AutoModelForSequenceClassification")
IMAGE_CLASSES = Task(
    "image-classification", "Image Classification", "AutoModelForImageClassification", "AutoImageProcessor"
)
FEATURES = Task("feature-extraction", "Feature Extraction")


def task_of(family: str | None, objective: ObjectiveRecord | None = None, answers: bool = True) -> Task | None:
    """What a model of a family is for; None where nothing says it.

    `answers` says whether a T5 was asked for answers, which one without a decoder has not.
    """
    name = None if objective is None else objective.name
    if family in CLIP:
        return ZERO_SHOT
    if family in DECODERS or (family == "generic" and name == "language-modelling"):
        return GENERATION
    if family == "T5" and name == "text-to-text" and answers:
        return TEXT_TO_TEXT
    if objective is None or objective.head is None:
        return None
    return {"encoder": TEXT_CLASSES, "ViT": IMAGE_CLASSES}.get(family or "")


def measured_task(record: Record, entry: EvaluationRecord) -> Task:
    """What a measurement is one of: by a probe, a classification of texts or of images."""
    family, data = record.target.family, record.data
    reads_text = family in TEXT_FAMILIES or (family == "generic" and data is not None and "image" not in data.columns)
    if entry.protocol is not None:
        return TEXT_CLASSES if reads_text else IMAGE_CLASSES
    if entry.metric == LOSS and family in CLIP:
        return FEATURES
    return task_of(family, record.objective) or (TEXT_CLASSES if reads_text else IMAGE_CLASSES)
