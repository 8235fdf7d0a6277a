"""Compares the tokenizers of two models on a few samples, for a plan: without torch, and without any weight.

Reads `tokenizer.json` beside the models, and the samples as plain texts; knows no template and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_bico.data.draw import calibration_split, open_data
from hf_bico.errors import BicoError, TokenizersDifferError
from hf_bico.hub.client import Hub
from hf_bico.models.families.pretrained import loadable
from hf_bico.models.model import Model
from hf_bico.models.shared_reading import NOTABLE_SHARED, require_common_pieces
from hf_bico.models.token_places import Shares
from hf_bico.porting.plan import Plan
from hf_bico.settings import Settings
from hf_bico.utils.samples import TEXTS
from hf_bico.utils.text import count_text

TOKENIZER = "tokenizer.json"
SAMPLES = 16
"""How many samples of the data set are read."""
NEUTRAL = (
    "The town lies on the river, and the road to the coast begins behind its market.",
    "In 1998 about 12,400 people lived there; by 2021 there were 15,872, or 28% more.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Dear Anna, thank you for your letter. I shall be back on Friday, so let's meet then!",
)
"""Texts to read where no data is known."""


@dataclass(frozen=True)
class PlannedTokens:
    """How two models read the same texts: None for `pairing` if as the same tokens; `refusal` if too little pairs."""

    read: str
    """What was read, in words."""
    pairing: Shares | None = None
    refusal: TokenizersDifferError | None = None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"too different on {self.read}"
        if self.pairing is None:
            return f"the same tokens on {self.read}"
        inputs, gradients = ("{:.1%} of tokens, {:.1%} of bytes".format(*one) for one in self._shares)
        little = "; less than half is little" if min(map(min, self._shares)) < NOTABLE_SHARED else ""
        return f"other tokens; {inputs} pair for inputs, {gradients} for gradients, on {self.read}{little}"

    @property
    def _shares(self) -> Sequence[tuple[float, float]]:
        return () if self.pairing is None else (self.pairing.inputs, self.pairing.gradients)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        names = ("tokens", "bytes", "gradient_tokens", "gradient_bytes")
        shares = [share for both in self._shares for share in both]
        refused = {} if self.refusal is None else {"refused": self.refusal.cause}
        return {
            "read": self.read,
            "same": not shares and not refused,
            **dict(zip(names, shares, strict=False)),
            **refused,
        }


def with_tokenizers(planned: Plan, settings: Settings, hub: Hub) -> Plan:
    """Return a plan that says how the two models' tokens pair; the same plan if that cannot be told yet."""
    lineage = planned.lineage
    if lineage.reads != TEXTS:
        return planned
    own, other = (_tokenizer_file(model) for model in (lineage.base, lineage.target))
    if own is None or other is None:
        return planned
    texts, read = _texts(planned, settings, hub)
    source, target = _load(own), _load(other)
    asks_next = "language-modelling" in lineage.base.layout.objectives
    try:
        pairing = require_common_pieces(source, target, texts, asks_next)
    except TokenizersDifferError as error:
        return replace(planned, tokens=PlannedTokens(read, refusal=error))
    return replace(planned, tokens=PlannedTokens(read, pairing))


def _tokenizer_file(model: Model) -> Path | None:
    """Return a model's `tokenizer.json`, downloaded if need be; None if it has none."""
    place = model.place
    if place is None or TOKENIZER not in place.sizes:
        return None
    place.fetch([TOKENIZER])
    return place.folder / TOKENIZER


def _load(file: Path) -> Any:
    """Load a tokenizer as it cuts a text that is alone, and not too long."""
    from tokenizers import Tokenizer

    with loadable(file.parent, "tokenizer"):
        found = Tokenizer.from_file(str(file))
    found.no_truncation()
    found.no_padding()
    return found


def _texts(planned: Plan, settings: Settings, hub: Hub) -> tuple[Sequence[Any], str]:
    """Return a few samples of the data set, or neutral texts, and what they are."""
    lineage = planned.lineage
    neutral = f"{count_text(len(NEUTRAL), 'neutral text')}, because no data is known"
    if lineage.data is None or lineage.writes_data:
        return NEUTRAL, neutral
    few = replace(settings, n=SAMPLES, per_class=None, sampling="random", evaluate=False)
    try:
        data = open_data(lineage.data, few, hub, known_names=lineage.class_names or None, reads=TEXTS)
        split = calibration_split(data, settings.split)
        samples = data.samples(split, data.usable_rows(split, range(len(data.splits[split])), SAMPLES))
        items, _ = next(samples.batches(SAMPLES))
    except BicoError:  # which the port will say: the plan is of the models
        return NEUTRAL, neutral
    return items, f"{count_text(len(items), 'sample')} of the data"
