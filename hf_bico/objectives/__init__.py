"""The task losses that calibration differentiates, one file an objective."""

from hf_bico.objectives.base import Classifier, Head, Heads, LikelyLabels, Question, class_losses
from hf_bico.objectives.contrastive import CaptionHead, ContrastHead, caption_head
from hf_bico.objectives.language import AnswerHead, LanguageHead
from hf_bico.objectives.own import Batch, OwnHead
from hf_bico.objectives.zero_shot import ZeroShotHead, zero_shot_head

__all__ = [
    "AnswerHead",
    "Batch",
    "CaptionHead",
    "ContrastHead",
    "Classifier",
    "Head",
    "Heads",
    "LanguageHead",
    "LikelyLabels",
    "OwnHead",
    "Question",
    "ZeroShotHead",
    "caption_head",
    "class_losses",
    "zero_shot_head",
]
