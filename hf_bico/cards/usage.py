"""How a result is used: what the snippet of a card needs to know to run as it stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_bico.cards.naming import FILE_NAME
from hf_bico.cards.tasks import CLIP, IMAGE_CLASSES, LIBRARIES, TEXT_CLASSES, Task
from hf_bico.record import ModelRecord, OutputRecord
from hf_bico.settings import DEFAULT_TEMPLATES

_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*|code|multilingual")
NOUNS = {"adapter": "adapter", "delta": "change"}


@dataclass(frozen=True)
class Usage:
    """Where the weights are, and over which model; `target` and `output` name nothing local any more."""

    output: OutputRecord
    target: ModelRecord
    task: Task | None = None
    """What the target is for; None where nothing says it."""
    class_names: Sequence[str] = ()
    """A few, short enough for the example; of a classifier all, in the order of its head."""
    template: str = DEFAULT_TEMPLATES[0]

    @property
    def format(self) -> str:
        return self.output.format

    @property
    def noun(self) -> str:
        """What was written, in a word."""
        return NOUNS.get(self.format, "model")

    @property
    def library(self) -> str | None:
        """The target's own."""
        return LIBRARIES.get(self.target.family or "")

    @property
    def is_clip(self) -> bool:
        return self.target.family in CLIP

    @property
    def runs_as(self) -> Task | None:
        """What the snippet shows beside loading, in transformers: a change of weights alone has no head."""
        task = None if self.is_clip else self.task
        return None if self.format == "delta" and task in (TEXT_CLASSES, IMAGE_CLASSES) else task

    @property
    def classifies(self) -> bool:
        """Whether what is loaded has a classification head."""
        return self.runs_as in (TEXT_CLASSES, IMAGE_CLASSES)

    @property
    def over_target(self) -> bool:
        """Whether the target has to be loaded first."""
        return self.noun != "model"

    @property
    def repo(self) -> str | None:
        return self.output.repo

    @property
    def branch(self) -> str | None:
        """Of the repo, where it is not the main one."""
        return self.output.revision if self.repo and self.output.revision != "main" else None

    @property
    def base(self) -> str | None:
        """The repo of the model to load; None for a folder."""
        if self.over_target:
            return self.target.id if self.target.commit else None
        return self.repo

    @property
    def base_revision(self) -> str | None:
        return self.target.commit if self.over_target else self.branch

    @property
    def base_files(self) -> list[str]:
        """What the target's own library needs of its repo, which may hold its weights several times."""
        return ["*.json", "*.txt", "*.model", *(name for name in self.target.sha256 if FILE_NAME.fullmatch(name))]

    def metadata(self) -> dict[str, object]:
        """The library and the task."""
        if self.format == "adapter":
            library = "peft"
        else:
            library = self.library if self.format == "full" and self.library else "hf-bico"
        task = self.task if self.format in ("full", "adapter") else None
        return {"library_name": library, "pipeline_tag": task.type if task else None}

    @property
    def tags(self) -> list[str]:
        return [*(["lora"] if self.format == "adapter" else []), *(["clip"] if self.is_clip else [])]


def languages(target: ModelRecord) -> list[str]:
    """Those of the target that the Hub takes."""
    return [name for name in target.language if _LANGUAGE.fullmatch(name)]
