"""Adapter contents, usage, task, licences.

What an adapter holds of a change: by role or layer, its rank and the share of the energy. Reads records alone.

What a model is for, in the Hub's words, and how transformers loads it for that. Reads records; loads nothing.

How a result is used: what the snippet of a card needs to know to run as it stands.

The licences of what a result was made from, and the one that it can state itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_bico.models.families import family_named
from hf_bico.models.families.base import ZERO_SHOT_TASK
from hf_bico.reports.model_cards.rendering import FILE_NAME, HUB
from hf_bico.reports.record import (
    EvaluationRecord,
    LayerRecord,
    ModelRecord,
    ObjectiveRecord,
    OutputRecord,
    Record,
    SiteRecord,
)
from hf_bico.reports.results import LOSS, OTHER_ROLES, role_labels
from hf_bico.settings import DEFAULT_TEMPLATES
from hf_bico.utils.samples import IMAGES, TEXTS
from hf_bico.utils.text import clean



_EXACT = "exact"
_MOST_NAMED = 6


@dataclass(frozen=True)
class ContentsRow:
    """Layers of one kind: how many, of which ranks, and the share of their energy that is kept."""

    label: str
    count: int
    rank: str
    kept: float
    energy: float | None = None

    @property
    def exact(self) -> bool:
        return self.rank.endswith(_EXACT)

    @property
    def is_path(self) -> bool:
        """Whether the label is a path of modules, and no words."""
        return " " not in self.label and self.energy is not None


@dataclass(frozen=True)
class AdapterContents:
    """What an adapter holds."""

    what: str
    """What a row is of: "role" or "layer"."""
    rows: Sequence[ContentsRow]
    asked: str
    """The rank that was asked for, in words."""
    energy_kept: float | None
    in_place: Sequence[str] = ()
    """Tensors that are loaded in place of the base's."""
    whole_attention: bool = False
    """Whether attention modules are saved whole."""


def held_sites(
    sites: Sequence[SiteRecord], output: OutputRecord, from_adapter: bool, family: str | None
) -> AdapterContents:
    """By role, of a port."""
    labels = role_labels(site.role for site in sites)
    rows = []
    for label in dict.fromkeys(labels.values()):
        known = [(site.rank, site.kept) for site in sites if labels[site.role] == label and site.kept is not None]
        if known:
            mean = sum(kept for _, kept in known) / len(known)
            rows.append(ContentsRow(label, len(known), _ranks([rank for rank, _ in known]), mean))
    exact = {site.role for site in sites if site.rank is None and site.kept is not None}
    attention = _is_packed(family) and any(role.startswith("attn.") for role in exact)
    return AdapterContents("role", rows, _asked(output, from_adapter), output.energy_kept, _in_place(output), attention)


def held_layers(
    layers: Sequence[LayerRecord], output: OutputRecord, from_adapter: bool, family: str | None
) -> AdapterContents:
    """By layer, whatever its block; a bias counts to its layer."""
    labels = role_labels(_layer(entry.name) for entry in layers)
    rows = []
    for label in dict.fromkeys(labels.values()):
        own = [entry for entry in layers if labels[_layer(entry.name)] == label]
        energy = sum(entry.energy for entry in own)
        kept = sum(entry.energy * entry.kept for entry in own) / energy if energy else 1.0
        weights = [entry.rank for entry in own if not _is_bias(entry.name)]
        count = len({_layer(entry.name) for entry in own})
        name = "other layers" if label == OTHER_ROLES else label
        rows.append(ContentsRow(name, count, _ranks(weights or [None]), kept, energy))
    exact = {entry.name for entry in layers if entry.rank is None}
    attention = _is_packed(family) and any(name.endswith(".attn.in_proj_weight") for name in exact)
    return AdapterContents("layer", rows, _asked(output, from_adapter), output.energy_kept, _in_place(output), attention)


def _is_packed(name: str | None) -> bool:
    family = family_named(name)
    return family is not None and family.packed_attention


def _in_place(output: OutputRecord) -> list[str]:
    """The tensors that are loaded in place of the base's, those of all blocks as one."""
    named = list(dict.fromkeys(role_labels(output.replaced).values()))
    return named if len(named) <= _MOST_NAMED else [*named[: _MOST_NAMED - 1], f"{len(named) - _MOST_NAMED + 1} more"]


def _layer(name: str) -> str:
    return re.sub(r"\.(?:weight|bias)$", "", name)


def _is_bias(name: str) -> bool:
    return name.endswith((".bias", "_bias"))


def _ranks(ranks: Sequence[int | None]) -> str:
    """ "4", "4 to 8", "exact", or "4, or exact" where some layers are."""
    known = sorted({rank for rank in ranks if rank is not None})
    span = [] if not known else [f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"]
    return ", or ".join([*span, *([_EXACT] if None in ranks else [])])


def _asked(output: OutputRecord, from_adapter: bool) -> str:
    rank = output.rank
    if rank is None:
        return "as they came, sums at the sum of their ranks" if from_adapter else "exactly"
    if isinstance(rank, float):
        return f"as factors of the rank that keeps {rank:.4g} of each one's energy"
    return f"as factors of rank {rank:,}, or less where a layer is smaller"

_CLASSIFICATION = ("text-classification", "image-classification")
_TASK_NAMES = {
    ZERO_SHOT_TASK: "Zero-Shot Image Classification",
    "text2text-generation": "Text-to-Text Generation",
}


@dataclass(frozen=True)
class CardTask:
    """One of the Hub's tasks, with the classes of transformers that load a model and its processor for it."""

    type: str
    model_class: str = "AutoModel"
    processor_class: str = "AutoTokenizer"

    @property
    def classifies(self) -> bool:
        return self.type in _CLASSIFICATION


def card_task(family: str | None, objective: ObjectiveRecord | None = None, used_loss: bool = True) -> CardTask | None:
    """Return the task of a model of a family; None where nothing says it.

    `used_loss` says whether the port's method took gradients of the objective.
    """
    known = family_named(family)
    name, head = (None, None) if objective is None else (objective.name, objective.head)
    tag = None if known is None else known.task(name, head is not None, used_loss)
    if known is None or tag is None:
        return None
    return CardTask(tag, known.auto_class, "AutoImageProcessor" if known.reads == IMAGES else "AutoTokenizer")


def measured_task(record: Record, entry: EvaluationRecord) -> dict[str, str]:
    """Return the task of a measurement as `model-index` has it: by a probe, a classification of texts or of images."""
    family, data = family_named(record.target.family), record.data
    reads = IMAGES if family is None else family.reads
    if reads is None:
        reads = TEXTS if data is not None and "image" not in data.columns else IMAGES
    classification = "text-classification" if reads == TEXTS else "image-classification"
    task = card_task(record.target.family, record.objective)
    tag = classification if entry.protocol is not None or task is None else task.type
    if tag == ZERO_SHOT_TASK and entry.metric == LOSS:
        tag = "feature-extraction"
    return {"type": tag, "name": _TASK_NAMES.get(tag, tag.replace("-", " ").title())}



_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*|code|multilingual")
NOUNS = {"adapter": "adapter", "delta": "change"}


@dataclass(frozen=True)
class Usage:
    """Where the weights are, and over which model; `target` and `output` name nothing local any more."""

    output: OutputRecord
    target: ModelRecord
    task: CardTask | None = None
    """What the target is for; None where nothing says it."""
    class_names: Sequence[str] = ()
    """A few, short enough for the example; of a classifier all, in the order of its head."""
    template: str = DEFAULT_TEMPLATES[0]
    has_new_head: bool = False
    """Whether a classification head was written too, which the target has not."""

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
        family = family_named(self.target.family)
        return None if family is None else family.library

    @property
    def is_clip(self) -> bool:
        return self.task is not None and self.task.type == ZERO_SHOT_TASK

    @property
    def runs_as(self) -> CardTask | None:
        """What the snippet shows beside loading, in transformers: a change of weights alone has no head."""
        task = None if self.is_clip else self.task
        return None if self.format == "delta" and task is not None and task.classifies else task

    @property
    def classifies(self) -> bool:
        """Whether what is loaded has a classification head."""
        return self.runs_as is not None and self.runs_as.classifies

    @property
    def resizes_head(self) -> bool:
        """Whether the target is loaded with a head of the adapter's size."""
        return self.classifies and self.over_target and self.has_new_head

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
        task = self.task if self.format in ("full", "adapter") else None
        return {"library_name": library, "pipeline_tag": task.type if task else None}

    @property
    def tags(self) -> list[str]:
        return [*(["lora"] if self.format == "adapter" else []), *(["clip"] if self.is_clip else [])]


def languages(target: ModelRecord) -> list[str]:
    """Those of the target that the Hub takes."""
    return [name for name in target.language if _LANGUAGE.fullmatch(name)]


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
