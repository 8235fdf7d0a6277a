"""One step of fine-tuning on the calibration samples: what the same samples give without a source."""

from __future__ import annotations

from typing import ClassVar

from hf_bico.methods.base import Trainer
from hf_bico.methods.training import Lesson, Trained, learning
from hf_bico.utils.progress import Progress


class Fewshot(Trainer):
    """One step of AdamW on the mean loss over all samples."""

    whole_split: ClassVar[bool] = False

    def train(self, lesson: Lesson, progress: Progress) -> Trained:
        with learning(lesson, self.settings) as learner:
            learner.step(range(lesson.size), self.settings.learning_rate)
            progress("train", 1, 1)
            return Trained(learner.changes(), steps=1, samples=lesson.size, validation=None)
