"""The licences of what a result was made from, and the one that it can state itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_bico.cards.naming import HUB
from hf_bico.record import ModelRecord
from hf_bico.utils.text import clean

# the licences that the Hub knows by name: it refuses a card with another, which is "other" with a name of its own
_KNOWN = re.compile(
    r"afl-3\.0|agpl-3\.0|apache-2\.0|apple-(?:amlr|ascl)|artistic-2\.0|big(?:code|science)-openrail-m"
    r"|bigscience-bloom-rail-1\.0|bsd(?:-[23]-clause|-3-clause-clear)?|bsl-1\.0|c-uda|cc|cc0-1\.0"
    r"|cc-by-(?:2\.0|2\.5|3\.0|4\.0|nc-[234]\.0|nc-nd-[34]\.0|nc-sa-[234]\.0|nd-4\.0|sa-[34]\.0)"
    r"|cdla-(?:permissive-[12]\.0|sharing-1\.0)|creativeml-openrail-m|deepfloyd-if-license|ecl-2\.0|epl-[12]\.0"
    r"|etalab-2\.0|eupl-1\.1|gemma|gfdl|gpl(?:-[23]\.0)?|isc|lgpl(?:-2\.1|-3\.0|-lr)?|llama(?:2|3(?:\.[123])?|4)"
    r"|lppl-1\.3c|mit|mpl-2\.0|ms-pl|ncsa|odbl|odc-by|ofl-1\.1|openrail(?:\+\+)?|osl-3\.0|pddl|postgresql|unlicense"
    r"|wtfpl|zlib"
)


@dataclass(frozen=True)
class Licences:
    """The models behind a result, each with its part in it.

    What one of the `also` does not state is nothing to worry about: only the difference to it was taken.
    """

    models: Sequence[tuple[str, ModelRecord]]
    also: Sequence[tuple[str, ModelRecord]] = ()

    @property
    def stated(self) -> bool:
        return any(model.license for _, model in (*self.models, *self.also))

    @property
    def agree(self) -> bool:
        return len(self._names) == 1

    def metadata(self, repo: str | None) -> dict[str, str]:
        """The licence that all agree on, else "other" under the names of all."""
        names = self._names
        if all(model.license is None for _, model in self.models):
            return {}
        if len(names) == 1 and _KNOWN.fullmatch(names[0]):
            return {"license": names[0]}
        name = re.sub(r"[^a-z0-9.]+", "-", "-and-".join(clean(name, 40) for name in names).lower()).strip("-.")
        return {
            "license": "other",
            "license_name": name or "unnamed",
            "license_link": f"{HUB}{repo}#licences" if repo else "",
        }

    @property
    def _names(self) -> list[str]:
        """The distinct licences; "unstated" is one."""
        counted = [*self.models, *((part, model) for part, model in self.also if model.license)]
        names = [
            (model.license_name or f"unnamed {part}") if model.license == "other" else model.license or "unstated"
            for part, model in counted
        ]
        return list(dict.fromkeys(names))
