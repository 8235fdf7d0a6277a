"""The card of a port: only what was measured or verified, unknowns left out. Reads nothing but the record.

Every text of a record may be hostile: it is escaped where it is printed, and becomes metadata, a link or code only
once it looks like what it should be. What is not a repo of the Hub is not named at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from hf_bico.reports.model_cards.descriptions import (
    MATCHINGS,
    SAMPLING_SENTENCES,
    SIGN_SENTENCES,
    head_sentence,
    loss_sentence,
    objective_sentence,
    uses_labels,
)
from hf_bico.reports.model_cards.rendering import (
    WORD,
    LinkTarget,
    kind_of,
    public_command,
    render,
    shown,
    shown_output,
    shown_source,
    without_names,
)
from hf_bico.reports.model_cards.sections import (
    AdapterContents,
    Licences,
    Usage,
    card_task,
    held_sites,
    languages,
    measured_task,
)
from hf_bico.reports.pictures import PICTURE_FILE, record_panels
from hf_bico.reports.record import EvaluationRecord, ModelRecord, Record
from hf_bico.reports.results import (
    Report,
    Result,
    control_sentence,
    gap_closed,
    headline,
    is_trained,
    metric_name,
    readout_sentence,
    results,
    sampling_error,
    share_of_gain,
    training_sentence,
    training_steps,
)
from hf_bico.settings import DEFAULT_TEMPLATES, MethodInfo, method_info
from hf_bico.utils.text import clean

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
        change="change" if card.trained else "carried change",
    )


@dataclass(frozen=True)
class Card:
    """What the template prints; `record` names no local folder any more."""

    record: Record
    headline: str | None
    report: Report
    results: tuple[Result, ...]
    gap_closed: float | None
    share_of_gain: float | None
    sampling_error: float | None
    about: MethodInfo
    """The method."""
    calibrated: bool
    """Whether the samples of the record were used to make it."""
    trained: bool
    licences: Licences
    use: Usage | None
    held: AdapterContents | None
    picture: str | None

    @property
    def title(self) -> str:
        source, target, data = self.record.source, self.record.target, self.record.data
        text = f"{source.id}, carried to {target.id}"
        if self.trained:
            text = f"{target.id}, trained on {data.id}" if data else f"{target.id}, trained"
        return text if (target if self.trained else source).commit else "A" + text[1:]

    @property
    def models(self) -> list[tuple[str, ModelRecord]]:
        source, target = self.record.source, self.record.target
        kind = f"source, {kind_of(source)}" + (", for comparison" if self.trained else "")
        parts = ((kind, source), ("its base", source.base), ("target", target))
        return [(part, model) for part, model in parts if model is not None]

    @property
    def measured(self) -> list[EvaluationRecord]:
        """The measurements of the port, one a protocol, where all of them are of the same samples."""
        same = {(result.entry.data, result.entry.split, result.entry.n) for result in self.results}
        return [result.entry for result in self.results if result.entry.model == "ported" and len(same) == 1]

    @property
    def probed(self) -> bool:
        return any(result.entry.protocol is not None for result in self.results)

    @property
    def sentences(self) -> list[str]:
        """What the results say of the control and of the readout."""
        found = (control_sentence(self.record), readout_sentence(self.record))
        return [sentence for sentence in found if sentence]

    @property
    def objective(self) -> str | None:
        return objective_sentence(self.record)

    @property
    def head(self) -> str | None:
        return head_sentence(self.record)

    @property
    def loss(self) -> str | None:
        return loss_sentence(self.record)

    @property
    def classes(self) -> list[str]:
        """Those that were looked at."""
        data = self.record.data
        return data.class_names if data is not None and (uses_labels(self.record) or self.probed) else []

    @property
    def training(self) -> str | None:
        """How the target was trained."""
        return training_sentence(self.record)

    @property
    def steps(self) -> str:
        return training_steps(self.record)

    @property
    def only_predictions(self) -> bool:
        """Whether the source's predictions were used where its task vector was not."""
        data = self.record.data
        return self.record.method.readout is not None or (data is not None and data.labels == "pseudo")

    @property
    def samples_for(self) -> str | None:
        """What the samples of the record are; None where they were drawn and not used."""
        readout = self.record.method.readout is not None
        if self.record.data is None or not (self.calibrated or self.probed):
            return None
        if self.about.trains_on == "samples":
            return "Training samples"
        if self.trained or not self.about.uses_samples:
            found = (("readout", readout), ("head", self.head is not None), ("probe", self.probed))
            used = [name for name, is_used in found if is_used]
            return f"Calibration, for the {' and the '.join(used)} alone" if used else None
        return "Calibration"

    @property
    def labels(self) -> str | None:
        """Whose labels were used, in words."""
        data, of_data = self.record.data, "labels of the data set"
        if data is None:
            return None
        if self.about.trains_on == "split":  # its samples are others, and have the data set's where it has any
            return of_data if data.labels == "dataset" else None
        looked_at = self.about.uses_labels or self.record.objective.head == "fitted"
        if data.labels == "pseudo" and (looked_at or self.probed):
            whose = "labels" if looked_at else "the probe's labels"
            own = f"{whose} are the fine-tuned source's own predictions"
            by_class = data.per_class is not None or data.sampling in SAMPLING_SENTENCES
            return own if by_class else f"{own}; none of the data set's were used to make it"
        if not uses_labels(self.record):
            return f"for the probe alone, {of_data}" if data.labels == "dataset" else None
        if not looked_at:
            return "no label enters the method"
        return {"dataset": of_data, "none": "no labels"}.get(data.labels)

    @property
    def sampling(self) -> str | None:
        return SAMPLING_SENTENCES.get(self.record.data.sampling) if self.record.data else None

    @property
    def matching(self) -> str | None:
        return MATCHINGS.get(self.record.method.matching or "")

    @property
    def signs(self) -> str | None:
        return SIGN_SENTENCES.get(self.record.method.signs or "")

    @property
    def panels(self) -> str:
        """What the picture shows."""
        *first, last = [
            value.replace("_", " ").replace("unseen", "unseen energy") for value in record_panels(self.record)
        ]
        text = " and ".join([", ".join(first), last] if first else [last])
        return text.capitalize()

    @property
    def seconds(self) -> tuple[float, float]:
        """To make the port, and to measure it."""
        measuring = self.record.run.seconds.get("evaluate", 0.0)
        return sum(self.record.run.seconds.values()) - measuring, measuring


def gather(record: Record) -> Card:
    public = _without_local_names(record)
    # what an adapter holds of a site is told in a table of its own
    sites = tuple(replace(site, rank=None, kept=None) for site in record.sites)
    about = method_info(record.method.name)
    required, base = (("source", public.source), ("target", public.target)), public.source.base
    return Card(
        record=public,
        headline=headline(record),
        report=Report(sites, tuple(record.left)),
        results=tuple(results(public)),
        gap_closed=gap_closed(record),
        share_of_gain=share_of_gain(record),
        sampling_error=sampling_error(record),
        about=about,
        calibrated=record.data is not None and (about.uses_samples or _looked_again(record)),
        trained=is_trained(record),
        licences=Licences(required, () if base is None else (("base", base),)),
        use=_usage(public),
        held=_held(public),
        picture=PICTURE_FILE if record_panels(record) else None,
    )


def _looked_again(record: Record) -> bool:
    """Whether something beside the method looked at the samples."""
    return record.method.readout is not None or record.objective.head is not None


def _usage(record: Record) -> Usage | None:
    """How it is used, with class names and a prompt that are short enough for an example."""
    if record.output is None:
        return None
    names = record.data.class_names if record.data else []
    templates = [text for text in record.objective.templates or () if len(text) <= 200]
    used_loss = METHODS.get(record.method.name, UNKNOWN).loss
    task = card_task(record.target.family, record.objective, used_loss)
    shown_names = [name for name in names if 0 < len(name) <= 60][:5]
    has_new_head = record.objective.head is not None
    if has_new_head:
        shown_names = [clean(name, 60) for name in names]
    return Usage(
        record.output, record.target, task, shown_names, (templates or DEFAULT_TEMPLATES)[0], has_new_head=has_new_head
    )


def _held(record: Record) -> AdapterContents | None:
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
    options: dict[str, LinkTarget] = {
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
    kind = () if card.trained else ("task-vector", "training-free")
    names = ("hf-bico", *kind, *(use.tags if use else ()), record.method.name)
    metadata["tags"] = [name for name in names if WORD.fullmatch(name)]
    metadata["metrics"] = sorted({row.entry.metric for row in card.results if WORD.fullmatch(row.entry.metric)})
    metadata["model-index"] = _model_index(card)
    return metadata


def _model_index(card: Card) -> list[dict[str, Any]]:
    """The port's own results in the Hub's form, one a protocol."""
    record = card.record
    found = [_index_entry(record, e) for e in card.measured if WORD.fullmatch(e.metric) and isfinite(e.value)]
    repo = record.output.repo if record.output else None
    return [{"name": repo.rpartition("/")[2] if repo else card.title, "results": found}] if found else []


def _index_entry(record: Record, entry: EvaluationRecord) -> dict[str, Any]:
    on_hub = record.data if record.data and record.data.commit and record.data.id == entry.data else None
    data = {
        "type": on_hub.id if on_hub else "local",  # the Hub asks for a word without spaces
        "name": entry.data,
        "config": clean(on_hub.config or "", 60) if on_hub else "",
        "split": clean(entry.split, 60),
        "revision": on_hub.commit if on_hub else None,
    }
    return {
        "task": measured_task(record, entry),
        "dataset": {key: value for key, value in data.items() if value},
        "metrics": [{"type": entry.metric, "value": round(entry.value, 4), "name": metric_name(entry)}],
    }
