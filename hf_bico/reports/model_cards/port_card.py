"""Gather the card of a port: only what was measured or verified, unknowns left out. Reads nothing but the record.

Every text of a record may be hostile: it is escaped where it is printed, and becomes metadata, a link or code only if
it has the right form. Local folders are named without their paths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any

from hf_bico.reports import results, training, verdict
from hf_bico.reports.cost import MEASURING, cost_sentence
from hf_bico.reports.model_cards import descriptions, rendering
from hf_bico.reports.model_cards.card import Card
from hf_bico.reports.model_cards.sections import MAX_CLASSES, Example, Licences, Usage, card_task, measured_task
from hf_bico.reports.outcome_picture import OUTCOME_FILE, Outcome
from hf_bico.reports.pictures import ALIGNMENT_FILE, record_panels
from hf_bico.reports.record import EvaluationRecord, Record
from hf_bico.reports.results import Report, Result, is_trained, metric_name
from hf_bico.settings import DEFAULT_TEMPLATES, MethodInfo, method_info
from hf_bico.utils.text import clean


@dataclass(frozen=True)
class PortCard(Card):
    """The card of a port, or of a target that was trained for comparison."""

    template = "port.md.jinja"
    record: Record

    def values(self) -> dict[str, Any]:
        record, outcome = self.record, Outcome.of(self.record)
        place = descriptions.place_phrase(record.run.device)
        few = results.few_samples_sentence(record)
        return {
            "change": "carried change" if self.carries and not record.method.polished else "change",
            "headline": results.headline(record),
            "outlook": None if record.outlook is None else verdict.outlook_sentence(record.outlook, record.source_lead),
            "notices": [*([] if few is None else [few]), *record.notices],
            "gap_closed": results.gap_closed(record),
            "share_of_gain": results.share_of_gain(record),
            "sampling_error": results.sampling_error(record),
            "sentences": list(filter(None, (results.control_sentence(record), results.readout_sentence(record)))),
            "objective": descriptions.objective_sentence(record),
            "head": descriptions.head_sentence(record),
            "loss": descriptions.loss_sentence(record),
            "pairing": results.pairing_sentence(record),
            "training": training.training_sentence(record),
            "polish": training.polish_sentence(record),
            "steps": results.training_steps(record),
            "cost": cost_sentence(record, place),
            "place": place,
            "given_alpha": None if self.trained else descriptions.given_alpha(record.method),
            "chosen_alpha": descriptions.chosen_alpha(record),
            "candidates": verdict.candidates_sentence(record.method),
            "sampling": descriptions.SAMPLING_PHRASES.get(record.data.sampling) if record.data else None,
            "matching": descriptions.MATCHING_PHRASES.get(record.method.matching or ""),
            "signs": descriptions.SIGN_PHRASES.get(record.method.signs or ""),
            "picture": ALIGNMENT_FILE,
            "outcome": OUTCOME_FILE if outcome else None,
            "outcome_alt": descriptions.outcome_alt(outcome) if outcome else None,
            "outcome_sentence": descriptions.outcome_sentence(record, outcome) if outcome else None,
        }

    @property
    def about(self) -> MethodInfo:
        return method_info(self.record.method.name)

    @property
    def trained(self) -> bool:
        return is_trained(self.record)

    @property
    def carries(self) -> bool:
        return results.carries(self.record)

    @property
    def calibrated(self) -> bool:
        """True if the method, alpha, the readout or the head came from the samples of the record."""
        record = self.record
        others = record.method.readout is not None or record.objective.head is not None
        return record.data is not None and (self.about.uses_samples or record.method.chosen_by_samples or others)

    @cached_property
    def report(self) -> Report:
        # a table of its own says what an adapter holds of each site
        sites = tuple(replace(site, rank=None, kept=None) for site in self.record.sites)
        return Report(sites, tuple(self.record.left))

    @property
    def tells_distances(self) -> bool:
        """True if the report says how far the two bases' weights are apart."""
        return any(site.distance is not None for site in self.record.sites)

    @property
    def results(self) -> list[Result]:
        return results.results(self.record)

    @property
    def usual_title(self) -> str:
        source, target, data = self.record.source, self.record.target, self.record.data
        text = f"{source.id} ported to {target.id}"
        if not self.carries:
            done = "trained" if self.trained else "with a corrected readout"
            text = f"{target.id}, {done} on {data.id}" if data else f"{target.id}, {done}"
        return f"A{text[1:]}" if text.startswith("a local ") else text

    @property
    def measured(self) -> list[EvaluationRecord]:
        """The port's measurements, one per protocol, if all results are of the same samples."""
        entries = [result.entry for result in self.results]
        same = len({(entry.data, entry.split, entry.n) for entry in entries}) == 1
        return [entry for entry in entries if entry.model == "ported" and same]

    @property
    def probed(self) -> bool:
        return any(result.entry.protocol is not None for result in self.results)

    @property
    def classes(self) -> list[str]:
        """The class names, if any label was used."""
        data, used = self.record.data, descriptions.uses_labels(self.record) or self.probed
        return data.class_names if data is not None and used else []

    @property
    def only_predictions(self) -> bool:
        """True if the source's predictions were used where its task vector was not."""
        data = self.record.data
        trained = self.record.method.trained
        distilled = trained is not None and trained.toward == "source"
        return distilled or self.record.method.readout is not None or (data is not None and data.labels == "pseudo")

    @property
    def samples_for(self) -> str | None:
        """The use of the record's samples; None if they were drawn and not used."""
        record = self.record
        if record.data is None or not (self.calibrated or self.probed):
            return None
        if self.about.trains_on == "samples":
            return "Training samples"
        if self.trained or not self.about.uses_samples:
            uses = {
                "alpha": record.method.chosen_by_samples,
                "the readout": record.method.readout,
                "the head": descriptions.head_sentence(record),
                "the probe": self.probed,
            }
            used = [name for name, is_used in uses.items() if is_used]
            return f"Calibration, for {' and '.join(used)} only" if used else None
        return "Calibration"

    @property
    def labels(self) -> str | None:
        """The origin of the labels that were used, in words."""
        data, of_data = self.record.data, "labels of the data set"
        if data is None:
            return None
        if self.about.trains_on == "split":  # trains on other samples, with the data set's labels if it has any
            return of_data if data.labels == "dataset" else None
        used = self.about.uses_labels or self.record.objective.head == "fitted"
        if data.labels == "pseudo" and (used or self.probed):
            whose = "labels" if used else "the probe's labels"
            own = f"{whose} are the fine-tuned source's own predictions"
            by_class = data.per_class is not None or data.sampling in descriptions.SAMPLING_PHRASES
            return own if by_class else f"{own}; the data set's labels were not used to make it"
        if not descriptions.uses_labels(self.record):
            return f"for the probe only, {of_data}" if data.labels == "dataset" else None
        if not used:
            return "the method uses no labels"
        return {"dataset": of_data, "none": "no labels"}.get(data.labels)

    @cached_property
    def panels(self) -> str:
        """The values in the picture, as words; empty without a picture."""
        names = [name.replace("_", " ").replace("unseen", "unseen energy") for name in record_panels(self.record)]
        return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])).capitalize()

    @property
    def shows_mispaired(self) -> bool:
        """True if the picture compares the scores with those of mispaired samples."""
        scores = ((site.mispaired_in, site.mispaired_out) for site in self.record.sites)
        return any(score is not None for pair in scores for score in pair)

    @property
    def seconds(self) -> tuple[float, float]:
        """Time to make the port, and to measure it."""
        seconds = self.record.run.seconds
        making = sum(taken for stage, taken in seconds.items() if stage not in MEASURING)
        return making, seconds.get("evaluate", 0.0)

    @property
    def repo_name(self) -> str | None:
        return self.use.repo.rpartition("/")[2] if self.use and self.use.repo else None

    def metadata(self) -> dict[str, Any]:
        record, metadata = self.record, super().metadata()
        if self.calibrated and record.data and record.data.commit:
            metadata["datasets"] = [record.data.id]
        kind = ["task-vector"] if self.carries else []
        kind += ["training-free"] if self.carries and not record.method.polished else []
        is_word = rendering.WORD.fullmatch
        method = filter(is_word, [record.method.name])
        metadata["tags"] = ["hf-bico", *kind, *(self.use.tags if self.use else ()), *method]
        metadata["metrics"] = sorted(filter(is_word, {row.entry.metric for row in self.results}))
        entries = [entry for entry in self.measured if is_word(entry.metric) and isfinite(entry.value)]
        if entries:
            name = self.repo_name or self.title
            metadata["model-index"] = [{"name": name, "results": [_index_entry(record, entry) for entry in entries]}]
        return metadata


def port_card(record: Record) -> PortCard:
    """Gather the facts of a port's card."""
    public = _public_record(record)
    source, target, trained = public.source, public.target, is_trained(public)
    kind = f"source, {rendering.kind_of(source)}" + (", for comparison" if trained else "")
    base = () if source.base is None else (source.base,)
    return PortCard(
        record=public,
        models=[(kind, source), *(("its base", model) for model in base), ("target", target)],
        licences=Licences((("source", source), ("target", target)), tuple(("base", model) for model in base)),
        use=_usage(public),
    )


def _usage(record: Record) -> Usage | None:
    """Describe how to load and use the result, with class names and a prompt short enough for an example."""
    if record.output is None:
        return None
    names = record.data.class_names if record.data else []
    templates = [text for text in record.objective.templates or () if len(text) <= 200]
    has_new_head = record.objective.head is not None
    examples = [name for name in names if 0 < len(name) <= 60][:5]
    of_head = [clean(name, 60) for name in names] if len(names) <= MAX_CLASSES else names
    return Usage(
        output=record.output,
        target=record.target,
        task=card_task(record.target.family, record.objective, method_info(record.method.name).uses_loss),
        class_names=of_head if has_new_head else examples,
        template=(templates or DEFAULT_TEMPLATES)[0],
        has_new_head=has_new_head,
        pooled=record.objective.pooling is not None and record.output.format != "delta",
        example=Example.of(record.data),
        chats=bool(record.data and record.data.chat_template),
    )


def _public_record(record: Record) -> Record:
    """Drop the paths of local folders, and all words of a command that were not checked."""
    data = None if record.data is None else rendering.public_entry(record.data, "a local data set")
    if data is not None and not data.commit:
        data = replace(data, parts=[])
    given = None if record.data is None else record.data.unlabelled
    unlabelled = None if given is None else rendering.public_entry(given, "a local data set")
    if data is not None and unlabelled is not None:
        data = replace(data, unlabelled=unlabelled if unlabelled.commit else replace(unlabelled, parts=[]))
    names = {record.data.id: data.id} if record.data and data else {}
    public = replace(
        record,
        source=rendering.public_source(record.source),
        target=rendering.public_entry(record.target, "a local model"),
        data=data,
        output=None if record.output is None else rendering.public_output(record.output),
        evaluation=[replace(entry, data=names.get(entry.data, "another data set")) for entry in record.evaluation],
    )
    options: dict[str, rendering.CommandWord] = {
        "--base": (public.source.base, "BASE"),
        "--to": (public.target, "TARGET"),
        "--data": (data, "DATA"),
        "--unlabelled": (unlabelled, "UNLABELLED"),
    }
    return replace(
        public, command=rendering.public_command(record.command, "port", [(public.source, "SOURCE")], options)
    )


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
