"""The base of all model cards: the sections and metadata that they share.

Reads nothing but the record. Unknowns are left out, and no local folder is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_bico.reports.model_cards.rendering import render
from hf_bico.reports.model_cards.sections import Licences, Usage, adapter_contents, languages
from hf_bico.reports.record import ChangeRecord, ModelRecord, Record


@dataclass(frozen=True)
class Card:
    """The facts that templates print; `record` is public, without any local name."""

    template: ClassVar[str]
    record: Record | ChangeRecord
    models: Sequence[tuple[str, ModelRecord]]
    """Every model behind the result, with its part in it."""
    licences: Licences
    use: Usage | None

    def render(self) -> str:
        contents = adapter_contents(self.record)
        return render(self.template, self.metadata(), card=self, contents=contents, **vars(self), **self.values())

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
        return metadata | {"language": languages(target)}
