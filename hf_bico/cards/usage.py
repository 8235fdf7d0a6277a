"""How a result is used: what the snippet of a card needs to know to run as it stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_bico.cards.naming import FILE_NAME
from hf_bico.record import ModelRecord, OutputRecord
from hf_bico.settings import DEFAULT_TEMPLATES

LIBRARIES = {"open_clip ViT": "open_clip", "transformers CLIP": "transformers", "generic": "transformers"}
CLIP = ("open_clip ViT", "transformers CLIP")
"""The families that classify pictures by texts."""
TASK = {"type": "zero-shot-image-classification", "name": "Zero-Shot Image Classification"}
PROBE_TASK = {"type": "image-classification", "name": "Image Classification"}
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*|code|multilingual")
NOUNS = {"adapter": "adapter", "delta": "change"}


@dataclass(frozen=True)
class Usage:
    """Where the weights are, and over which model; `target` and `output` name nothing local any more."""

    output: OutputRecord
    target: ModelRecord
    class_names: Sequence[str] = ()
    """A few, short enough for the example."""
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
        task = TASK["type"] if self.is_clip and self.format in ("full", "adapter") else None
        return {"library_name": library, "pipeline_tag": task}

    @property
    def tags(self) -> list[str]:
        return [*(["lora"] if self.format == "adapter" else []), *(["clip"] if self.is_clip else [])]


def languages(target: ModelRecord) -> list[str]:
    """Those of the target that the Hub takes."""
    return [name for name in target.language if _LANGUAGE.fullmatch(name)]
