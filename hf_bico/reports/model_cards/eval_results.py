"""Write a port's results in the Hub's own format, `.eval_results/*.yaml`, where they are of a registered benchmark.

Reads nothing but the card's facts. https://huggingface.co/docs/hub/eval-results describes the format.
"""

from __future__ import annotations

import re
from math import isfinite

import yaml

from hf_bico.reports.model_cards.port_card import PortCard
from hf_bico.reports.model_cards.rendering import HUB_URL
from hf_bico.reports.record import ACCURACY
from hf_bico.utils.text import clean

_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)")


def eval_results(card: PortCard) -> dict[str, str]:
    """Return the file's content by its name; nothing unless an accuracy was measured on a benchmark of the Hub."""
    from huggingface_hub import EvalResultEntry, constants, eval_result_entries_to_yaml

    record, data = card.record, card.record.data
    if data is None or not data.commit or not data.benchmark:
        return {}
    repo, date = card.use.repo if card.use else None, record.run.started
    entries = [
        EvalResultEntry(
            dataset_id=data.id,
            task_id=clean(data.benchmark, 100),
            value=round(entry.value, 4),
            dataset_revision=data.commit,
            date=date if _DATE.fullmatch(date) else None,
            source_url=f"{HUB_URL}{repo}" if repo else None,
            source_name="Model card" if repo else None,
            notes=f"accuracy from 0 to 1, on {entry.n:,} samples of split {clean(entry.split, 60)}; made by hf-bico",
        )
        for entry in card.measured
        if entry.protocol is None and entry.metric == ACCURACY and entry.data == data.id and isfinite(entry.value)
    ]
    name = f"{constants.EVAL_RESULTS_FOLDER}/{data.id.rpartition('/')[2]}.yaml"
    text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
    return {name: text} if entries else {}
