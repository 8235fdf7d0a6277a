"""The record to the model card: only what was measured or verified, unknowns left out. Reads nothing but the record.

Every text of a record may be hostile: it is escaped where it is printed, and becomes metadata, a link or code only
once it looks like what it should be. What is not a repo of the Hub is not named at all.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jinja2 import StrictUndefined, Template
from jinja2.sandbox import SandboxedEnvironment

from hf_bico.cards.markdown import Markdown, clean, code, fenced, literal, plain
from hf_bico.cards.plots import PICTURE_FILE, alignment_picture, has_alignment
from hf_bico.hub.references import is_repo_id
from hf_bico.record import DataRecord, EvaluationRecord, ModelRecord, Record
from hf_bico.report import VALUE_NAMES, Report, gap_closed, headline, sampling_error
from hf_bico.settings import DEFAULT_TEMPLATES

CARD_FILE = "README.md"
TEMPLATE = "card.md.jinja"
HUB = "https://huggingface.co/"
TASK = {"type": "zero-shot-image-classification", "name": "Zero-Shot Image Classification"}
LIBRARIES = {"open_clip ViT": "open_clip", "transformers CLIP": "transformers"}
_HEX = re.compile(r"[0-9a-f]{7,64}")
_FILE = re.compile(r"[\w.-]{1,96}", re.ASCII)
_WORD = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*|code|multilingual")
# the licences that the Hub knows by name: it refuses a card with another, which is "other" with a name of its own
_LICENCE = re.compile(
    r"afl-3\.0|agpl-3\.0|apache-2\.0|apple-(?:amlr|ascl)|artistic-2\.0|big(?:code|science)-openrail-m"
    r"|bigscience-bloom-rail-1\.0|bsd(?:-[23]-clause|-3-clause-clear)?|bsl-1\.0|c-uda|cc|cc0-1\.0"
    r"|cc-by-(?:2\.0|2\.5|3\.0|4\.0|nc-[234]\.0|nc-nd-[34]\.0|nc-sa-[234]\.0|nd-4\.0|sa-[34]\.0)"
    r"|cdla-(?:permissive-[12]\.0|sharing-1\.0)|creativeml-openrail-m|deepfloyd-if-license|ecl-2\.0|epl-[12]\.0"
    r"|etalab-2\.0|eupl-1\.1|gemma|gfdl|gpl(?:-[23]\.0)?|isc|lgpl(?:-2\.1|-3\.0|-lr)?|llama(?:2|3(?:\.[123])?|4)"
    r"|lppl-1\.3c|mit|mpl-2\.0|ms-pl|ncsa|odbl|odc-by|ofl-1\.1|openrail(?:\+\+)?|osl-3\.0|pddl|postgresql|unlicense"
    r"|wtfpl|zlib"
)
_OWN_WORDS = frozenset(("", "base", "card", "data", "model", "source", "target"))

Entry = TypeVar("Entry", ModelRecord, DataRecord)


def write_card(record: Record, folder: Path) -> Path:
    """Write the card, and the picture of the alignment where there is one to draw; returns the card's path."""
    picture = alignment_picture(record)
    if picture is not None:
        (folder / PICTURE_FILE).write_bytes(picture)
    file = folder / CARD_FILE
    file.write_text(render_card(record), encoding="utf-8", newline="\n")
    return file


def render_card(record: Record) -> str:
    """The whole card: metadata, then the body."""
    card = gather(record)
    head = yaml.safe_dump(_metadata(card), sort_keys=False, allow_unicode=True, width=float("inf"))
    return f"---\n{head}---\n\n{_template().render(card=card)}"


@cache
def _template() -> Template:
    environment = SandboxedEnvironment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markdown) else plain(value),
    )
    environment.filters |= {filter.__name__: filter for filter in (plain, code, literal, fenced, link, digests)}
    environment.filters |= {
        "percent": lambda value: f"{value:.1%}",
        "count": lambda value: f"{value:,}",
        "seconds": lambda value: f"{value:.1f} seconds" if value < 120 else f"{value / 60:.1f} minutes",
    }
    return environment.from_string(files("hf_bico.cards").joinpath(TEMPLATE).read_text(encoding="utf-8"))


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
    library: str | None
    delta: bool
    calibrated: bool
    stated_licences: bool
    licences_agree: bool
    class_names: tuple[str, ...]
    """A few, short enough for the example."""
    template: str
    picture: str | None

    @property
    def models(self) -> list[tuple[str, ModelRecord]]:
        source, target = self.record.source, self.record.target
        parts = (("source, fine-tuned", source), ("its base", source.base), ("target", target))
        return [(part, model) for part, model in parts if model is not None]

    @property
    def measured(self) -> EvaluationRecord | None:
        """The measurement of the port, where all of them are of the same samples."""
        same = {(entry.data, entry.split, entry.n) for _, entry in self.results}
        return next((entry for _, entry in self.results if entry.model == "ported" and len(same) == 1), None)

    @property
    def target_files(self) -> list[str]:
        """What the target's own library needs of its repo, which may hold its weights several times."""
        return ["*.json", "*.txt", "*.model", *(name for name in self.record.target.sha256 if _FILE.fullmatch(name))]

    @property
    def seconds(self) -> tuple[float, float]:
        """To make the port, and to measure it."""
        measuring = self.record.run.seconds.get("evaluate", 0.0)
        return sum(self.record.run.seconds.values()) - measuring, measuring


def gather(record: Record) -> Card:
    shown = _without_local_names(record)
    names = record.data.class_names if record.data else []
    templates = [text for text in record.objective.templates or () if len(text) <= 200]
    return Card(
        record=shown,
        headline=headline(record),
        report=Report(tuple(record.sites), tuple(record.left)),
        results=tuple((VALUE_NAMES[entry.model], entry) for entry in shown.evaluation if entry.model in VALUE_NAMES),
        gap_closed=gap_closed(record),
        sampling_error=sampling_error(record),
        library=LIBRARIES.get(record.target.family or ""),
        delta=record.output is not None and record.output.format == "delta",
        calibrated=record.data is not None and record.method.name != "naive",
        stated_licences=any(model.license for model in (record.source, record.source.base, record.target) if model),
        licences_agree=len(_licences(record)) == 1,
        class_names=tuple([name for name in names if 0 < len(name) <= 60][:5]),
        template=(templates or DEFAULT_TEMPLATES)[0],
        picture=PICTURE_FILE if has_alignment(record) else None,
    )


# What may be named


def _without_local_names(record: Record) -> Record:
    """The record as anyone may read it: a folder of the maker's machine is "a local model" or "a local data set"."""
    source, data, output = record.source, record.data, record.output
    shown_data = None if data is None else _shown(data, "a local data set")
    base = None if source.base is None else _shown(source.base, "a local model")
    evaluation = [
        replace(entry, data=shown_data.id if data and shown_data and entry.data == data.id else "another data set")
        for entry in record.evaluation
    ]
    shown = replace(
        record,
        source=replace(_shown(source, "a local fine-tuned model"), base=base),
        target=_shown(record.target, "a local model"),
        data=shown_data if shown_data is None or shown_data.commit else replace(shown_data, parts=[]),
        output=output if output is None or is_repo_id(output.repo or "") else replace(output, repo=None),
        evaluation=evaluation,
    )
    pairs = [(source, shown.source), (source.base, base), (record.target, shown.target), (data, shown.data)]
    local = {before.id: after.id for before, after in pairs if before and after and not after.commit}
    notices = [_without_names(notice, local) for notice in record.notices]
    return replace(shown, notices=notices, command=_public_command(shown, record.command))


def _without_names(text: str, local: dict[str, str]) -> str:
    """A sentence with each local name replaced; a folder that is called "base" gives nothing away."""
    for name, instead in local.items():
        quoted = f"'{re.escape(name)}'"
        bare = rf"|(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)" if name not in _OWN_WORDS else ""
        text = re.sub(quoted + bare, instead, text)
    return text


def _shown(entry: Entry, local: str) -> Entry:
    on_hub = _HEX.fullmatch(str(entry.commit)) and is_repo_id(entry.id)
    return entry if on_hub else replace(entry, id=local, commit=None)


def _public_command(shown: Record, command: str | None) -> str | None:
    """The command line with a word in place of each local folder; None where its words cannot be told apart."""
    try:
        typed = shlex.split(command or "")
    except ValueError:
        return None
    words = [part for word in typed for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if words[:2] != ["hf-bico", "port"] or words[2:3] == [] or words[2].startswith("-"):
        return None
    places: dict[str, tuple[ModelRecord | DataRecord | None, str]] = {
        "hf-bico port": (shown.source, "SOURCE"),
        "--base": (shown.source.base, "BASE"),
        "--to": (shown.target, "TARGET"),
        "--data": (shown.data, "DATA"),
        "-o": (None, "FOLDER"),
    }
    public = words[:2]
    for option, word in zip(["hf-bico port", *words[2:]], words[2:], strict=False):
        entry, placeholder = places.get(option, (None, word))
        on_hub = entry is not None and entry.commit and word.partition("@")[0] == entry.id
        public.append(clean(word if on_hub else placeholder, 200))
    return clean(shlex.join(public), 2000)


# Metadata


def _metadata(card: Card) -> dict[str, Any]:
    record, full = card.record, card.record.output is not None and not card.delta
    metadata: dict[str, Any] = {}
    if record.target.commit:
        metadata = {"base_model": record.target.id, "base_model_relation": "adapter" if card.delta else "finetune"}
    metadata["library_name"] = card.library if full and card.library else "hf-bico"
    if full:
        metadata["pipeline_tag"] = TASK["type"]
    metadata |= _licence(record)
    metadata["language"] = [name for name in record.target.language if _LANGUAGE.fullmatch(name)]
    if card.calibrated and record.data and record.data.commit:
        metadata["datasets"] = [record.data.id]
    names = ("hf-bico", "task-vector", "training-free", "clip", record.method.name)
    metadata["tags"] = [name for name in names if _WORD.fullmatch(name)]
    metadata["metrics"] = sorted({entry.metric for _, entry in card.results if _WORD.fullmatch(entry.metric)})
    metadata["model-index"] = _model_index(card)
    return {key: value for key, value in metadata.items() if value}


def _model_index(card: Card) -> list[dict[str, Any]]:
    """The port's own result in the Hub's form."""
    record, entry = card.record, card.measured
    if entry is None or not _WORD.fullmatch(entry.metric) or not isfinite(entry.value):
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


def _licences(record: Record) -> list[str]:
    """The distinct licences of source, base and target; "unstated" counts, save for the base."""
    stated = [
        (model.license_name or f"unnamed {part}") if model.license == "other" else model.license or "unstated"
        for part, model in (("source", record.source), ("target", record.target), ("base", record.source.base))
        if model is not None and (part != "base" or model.license)
    ]
    return list(dict.fromkeys(stated))


def _licence(record: Record) -> dict[str, str]:
    """The licence that source, base and target agree on, else "other" under the names of all."""
    names = _licences(record)
    if record.source.license is None and record.target.license is None:
        return {}
    if len(names) == 1 and _LICENCE.fullmatch(names[0]):
        return {"license": names[0]}
    name = re.sub(r"[^a-z0-9.]+", "-", "-and-".join(clean(name, 40) for name in names).lower()).strip("-.")
    repo = record.output.repo if record.output else None
    return {
        "license": "other",
        "license_name": name or "unnamed",
        "license_link": f"{HUB}{repo}#licences" if repo else "",
    }


# Links


def link(entry: ModelRecord | DataRecord) -> Markdown:
    """A link to a repo and to its commit, or the words for a local one."""
    if not entry.commit:
        return plain(entry.id)
    address = HUB + ("datasets/" if isinstance(entry, DataRecord) else "") + entry.id
    return Markdown(f"[{plain(entry.id)}]({address}) at [`{entry.commit[:7]}`]({address}/tree/{entry.commit})")


def digests(files: dict[str, str], most: int = 4) -> Markdown:
    """The first digits of each file's SHA-256."""
    known = [
        f"{code(name) if _FILE.fullmatch(name) else plain(name, 60)} `{digest[:16]}`"
        for name, digest in files.items()
        if _HEX.fullmatch(digest)
    ]
    more = [f"{len(known) - most} more in `bico.json`"] if len(known) > most else []
    return Markdown(", ".join(known[:most] + more))
