"""The base of all model cards: the sections and metadata that they share.

Reads nothing but the record. Unknowns are left out, and local folders are named without their paths.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_bico.reports.model_cards.rendering import render
from hf_bico.reports.model_cards.sections import Licences, Usage, adapter_contents
from hf_bico.reports.record import ChangeRecord, ModelRecord, Record
from hf_bico.reports.results import Report
from hf_bico.utils.text import clean

MAX_TITLE = 200
# the languages that the Hub accepts
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*|code|multilingual")


@dataclass(frozen=True)
class Card(ABC):
    """The facts that templates print; `record` is public, without any local path."""

    template: ClassVar[str]
    record: Record | ChangeRecord
    models: Sequence[tuple[str, ModelRecord]]
    """Every model behind the result, with its part in it."""
    licences: Licences
    use: Usage | None

    def render(self) -> str:
        left = Report((), tuple(self.record.left)).left_by_reason()
        energy = sum(entry.energy for entry in self.record.left)
        shared = {"card": self, "contents": adapter_contents(self.record), "left": left, "left_energy": energy}
        return render(self.template, self.metadata(), **shared, **vars(self), **self.values())

    @property
    def title(self) -> str:
        """The title that was given, or one from the names of the models."""
        given = None if self.record.output is None else self.record.output.title
        return clean(given or "", MAX_TITLE) or self.usual_title

    @property
    @abstractmethod
    def usual_title(self) -> str: ...

    def values(self) -> dict[str, Any]:
        """Return what the template prints beside the fields."""
        return {"change": "change"}

    def metadata(self) -> dict[str, Any]:
        use, target = self.use, self.record.target
        metadata: dict[str, Any] = {}
        if target.commit:
            relation = "adapter" if use and use.over_target else "finetune"
            metadata = {"base_model": target.id, "base_model_relation": relation}
        metadata |= use.metadata() if use else {"library_name": "hf-bico"}
        metadata |= self.licences.metadata(use.repo if use else None)
        return metadata | {"language": [name for name in target.language if _LANGUAGE.fullmatch(name)]}
