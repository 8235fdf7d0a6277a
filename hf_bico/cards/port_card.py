"""The card of a port: only what was measured or verified, unknowns left out. Reads nothing but the record.

Every text of a record may be hostile: it is escaped where it is printed, and becomes metadata, a link or code only
once it looks like what it should be. What is not a repo of the Hub is not named at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from hf_bico.cards.held import Held, held_sites
from hf_bico.cards.licences import Licences
from hf_bico.cards.markdown import clean
from hf_bico.cards.naming import WORD, Place, kind_of, public_command, shown, shown_output, shown_source, without_names
from hf_bico.cards.plots import PICTURE_FILE, has_alignment
from hf_bico.cards.rendering import render
from hf_bico.cards.usage import TASK, Usage, languages
from hf_bico.record import EvaluationRecord, ModelRecord, Record
from hf_bico.report import VALUE_NAMES, Report, gap_closed, headline, sampling_error
from hf_bico.settings import DEFAULT_TEMPLATES

TEMPLATE = "port.md.jinja"


def render_port_card(record: Record) -> str:
    """The whole card: metadata, then the body."""
    card = gather(record)
    return render(
        TEMPLATE,
        _metadata(card),
        card=card,
        record=card.record,
        models=card.models,
        licences=card.licences,
        use=card.use,
        held=card.held,
        change="carried change",
    )


@dataclass(frozen=True)
class Card:
    """What the template prints; `record` names no local folder any more."""

    record: Record
    headline: str | None
    report: Report
    results: tuple[tuple[str, EvaluationRecord], ...]
    """Name and measurement of the target, the port and the source."""
    gap_closed: float | None
    sampling_error: float | None
    calibrated: bool
    licences: Licences
    use: Usage | None
    held: Held | None
    picture: str | None

    @property
    def models(self) -> list[tuple[str, ModelRecord]]:
        source, target = self.record.source, self.record.target
        parts = ((f"source, {kind_of(source)}", source), ("its base", source.base), ("target", target))
        return [(part, model) for part, model in parts if model is not None]

    @property
    def measured(self) -> EvaluationRecord | None:
        """The measurement of the port, where all of them are of the same samples."""
        same = {(entry.data, entry.split, entry.n) for _, entry in self.results}
        return next((entry for _, entry in self.results if entry.model == "ported" and len(same) == 1), None)

    @property
    def seconds(self) -> tuple[float, float]:
        """To make the port, and to measure it."""
        measuring = self.record.run.seconds.get("evaluate", 0.0)
        return sum(self.record.run.seconds.values()) - measuring, measuring


def gather(record: Record) -> Card:
    public = _without_local_names(record)
    # what an adapter holds of a site is told in a table of its own
    sites = tuple(replace(site, rank=None, kept=None) for site in record.sites)
    required, base = (("source", public.source), ("target", public.target)), public.source.base
    return Card(
        record=public,
        headline=headline(record),
        report=Report(sites, tuple(record.left)),
        results=tuple((VALUE_NAMES[entry.model], entry) for entry in public.evaluation if entry.model in VALUE_NAMES),
        gap_closed=gap_closed(record),
        sampling_error=sampling_error(record),
        calibrated=record.data is not None and record.method.name != "naive",
        licences=Licences(required, () if base is None else (("base", base),)),
        use=_usage(public),
        held=_held(public),
        picture=PICTURE_FILE if has_alignment(record) else None,
    )


def _usage(record: Record) -> Usage | None:
    """How it is used, with class names and a prompt that are short enough for an example."""
    if record.output is None:
        return None
    names = record.data.class_names if record.data else []
    templates = [text for text in record.objective.templates or () if len(text) <= 200]
    short = [name for name in names if 0 < len(name) <= 60][:5]
    return Usage(record.output, record.target, short, (templates or DEFAULT_TEMPLATES)[0])


def _held(record: Record) -> Held | None:
    if record.output is None or record.output.format != "adapter":
        return None
    return held_sites(record.sites, record.output, record.source.kind == "adapter", record.target.family)


# What may be named


def _without_local_names(record: Record) -> Record:
    """The record as anyone may read it: a folder of the maker's machine is "a local model" or "a local data set"."""
    source, target, data, output = record.source, record.target, record.data, record.output
    shown_data = None if data is None else shown(data, "a local data set")
    if shown_data is not None and not shown_data.commit:
        shown_data = replace(shown_data, parts=[])
    evaluation = [
        replace(entry, data=shown_data.id if data and shown_data and entry.data == data.id else "another data set")
        for entry in record.evaluation
    ]
    public = replace(
        record,
        source=shown_source(source),
        target=shown(target, "a local model"),
        data=shown_data,
        output=None if output is None else shown_output(output),
        evaluation=evaluation,
    )
    pairs = (
        (source, public.source),
        (source.base, public.source.base),
        (target, public.target),
        (data, public.data),
    )
    notices = [without_names(notice, pairs) for notice in record.notices]
    return replace(public, notices=notices, command=_command(public, record.command))


def _command(public: Record, command: str | None) -> str | None:
    options: dict[str, Place] = {
        "--base": (public.source.base, "BASE"),
        "--to": (public.target, "TARGET"),
        "--data": (public.data, "DATA"),
    }
    return public_command(command, "port", [(public.source, "SOURCE")], options)


# Metadata


def _metadata(card: Card) -> dict[str, Any]:
    record, use = card.record, card.use
    metadata: dict[str, Any] = {}
    if record.target.commit:
        relation = "adapter" if use and use.over_target else "finetune"
        metadata = {"base_model": record.target.id, "base_model_relation": relation}
    metadata |= use.metadata() if use else {"library_name": "hf-bico"}
    metadata |= card.licences.metadata(use.repo if use else None)
    metadata["language"] = languages(record.target)
    if card.calibrated and record.data and record.data.commit:
        metadata["datasets"] = [record.data.id]
    names = ("hf-bico", "task-vector", "training-free", *(use.tags if use else ()), record.method.name)
    metadata["tags"] = [name for name in names if WORD.fullmatch(name)]
    metadata["metrics"] = sorted({entry.metric for _, entry in card.results if WORD.fullmatch(entry.metric)})
    metadata["model-index"] = _model_index(card)
    return metadata


def _model_index(card: Card) -> list[dict[str, Any]]:
    """The port's own result in the Hub's form."""
    record, entry = card.record, card.measured
    if entry is None or not WORD.fullmatch(entry.metric) or not isfinite(entry.value):
        return []
    on_hub = record.data if record.data and record.data.commit and record.data.id == entry.data else None
    data = {
        "type": on_hub.id if on_hub else "local",  # the Hub asks for a word without spaces
        "name": entry.data,
        "config": clean(on_hub.config or "", 60) if on_hub else "",
        "split": clean(entry.split, 60),
        "revision": on_hub.commit if on_hub else None,
    }
    result = {
        "task": dict(TASK),
        "dataset": {key: value for key, value in data.items() if value},
        "metrics": [{"type": entry.metric, "value": round(entry.value, 4), "name": entry.metric}],
    }
    repo = record.output.repo if record.output else None
    name = repo.rpartition("/")[2] if repo else f"{record.source.id}, carried to {record.target.id}"
    return [{"name": name, "results": [result]}]
