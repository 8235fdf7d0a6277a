"""Sections of model cards: adapter contents, task, usage, licences.

Reads records alone; loads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_bico.models.families import family_named
from hf_bico.models.families.base import ZERO_SHOT_TASK
from hf_bico.reports.model_cards.rendering import FILE_NAME, HUB_URL, PROJECT_URL
from hf_bico.reports.record import (
    LOSS,
    ChangeRecord,
    DataRecord,
    EvaluationRecord,
    LayerRecord,
    ModelRecord,
    ObjectiveRecord,
    OutputRecord,
    Record,
    SiteRecord,
)
from hf_bico.reports.results import OTHER_ROLES, by_role, role_labels
from hf_bico.settings import DEFAULT_TEMPLATES
from hf_bico.utils.samples import IMAGES, TEXTS
from hf_bico.utils.text import clean

_EXACT = "exact"
_MAX_NAMED = 6
MAX_EXAMPLE = 300
MAX_CLASSES = 100
"""Classes that a snippet lists; of more it says only how many there are."""


@dataclass(frozen=True)
class ContentsRow:
    """Layers of one kind: their number, their ranks, and the share of their energy that is kept."""

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
        """True if the label is a module path."""
        return " " not in self.label and self.energy is not None


def adapter_contents(record: Record | ChangeRecord) -> dict[str, Any] | None:
    """Return what an adapter holds, for its template: of a port by role, of a change by layer; None without one."""
    output, family = record.output, family_named(record.target.family)
    if output is None or output.format != "adapter":
        return None
    if isinstance(record, Record):
        what, rows = "role", _rows_by_role(record.sites)
        exact = [site.role for site in record.sites if site.rank is None and site.kept is not None]
        exact_attention = any(role.startswith("attn.") for role in exact)
    else:
        what, rows = "layer", _rows_by_layer(record.layers)
        exact = [layer.name for layer in record.layers if layer.rank is None]
        exact_attention = any(name.endswith(".attn.in_proj_weight") for name in exact)
    replaced = list(dict.fromkeys(role_labels(output.replaced).values()))
    if len(replaced) > _MAX_NAMED:
        replaced = [*replaced[: _MAX_NAMED - 1], f"{len(replaced) - _MAX_NAMED + 1} more"]
    return {
        "what": what,
        "rows": rows,
        "storage": _storage(output.rank, record.sources),
        "replaced": replaced,
        "whole_attention": exact_attention and family is not None and family.packed_attention,
    }


def _rows_by_role(sites: Sequence[SiteRecord]) -> list[ContentsRow]:
    rows = []
    for label, own in by_role(sites, lambda site: site.role).items():
        known = [(site.rank, site.kept) for site in own if site.kept is not None]
        if known:
            mean = sum(kept for _, kept in known) / len(known)
            rows.append(ContentsRow(label, len(known), _ranks([rank for rank, _ in known]), mean))
    return rows


def _rows_by_layer(layers: Sequence[LayerRecord]) -> list[ContentsRow]:
    """Return a row per layer of all blocks; a bias counts to its layer."""
    rows = []
    for label, own in by_role(layers, lambda entry: _layer(entry.name)).items():
        energy = sum(entry.energy for entry in own)
        kept = sum(entry.energy * entry.kept for entry in own) / energy if energy else 1.0
        weights = [entry.rank for entry in own if not entry.name.endswith((".bias", "_bias"))]
        count = len({_layer(entry.name) for entry in own})
        name = "other layers" if label == OTHER_ROLES else label
        rows.append(ContentsRow(name, count, _ranks(weights or [None]), kept, energy))
    return rows


def _layer(name: str) -> str:
    return re.sub(r"\.(?:weight|bias)$", "", name)


def _ranks(ranks: Sequence[int | None]) -> str:
    """Return "4", "4 to 8", "exact", or "4, or exact" if some layers are."""
    known = sorted({rank for rank in ranks if rank is not None})
    span = [] if not known else [f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"]
    return ", or ".join([*span, *([_EXACT] if None in ranks else [])])


def _storage(rank: int | float | None, sources: Sequence[ModelRecord]) -> str:
    if rank is None:
        adapters = bool(sources) and all(source.kind == "adapter" for source in sources)
        return "at the rank of the source; for a sum, at the sum of the ranks" if adapters else "exactly"
    if isinstance(rank, float):
        return f"as low-rank factors that keep {rank:.4g} of each layer's energy"
    return f"as factors of rank {rank:,}, or a lower rank where a layer is smaller"


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


@dataclass(frozen=True)
class Example:
    """A sample of a public data set for a snippet: its texts, or where to load its image from."""

    data: DataRecord
    texts: Sequence[str]
    row: int | None

    @classmethod
    def of(cls, data: DataRecord | None) -> Example | None:
        """Return the recorded sample of a data set on the Hub."""
        if data is None or not data.commit or data.example is None:
            return None
        texts, row = [clean(text, MAX_EXAMPLE) for text in data.example.texts], data.example.row
        names = [*data.columns.values(), data.split, data.config or ""]
        is_image = row is not None and "image" in data.columns and max(map(len, names)) <= MAX_EXAMPLE
        return cls(data, texts, row if is_image else None) if is_image or any(texts) else None

    @property
    def image_column(self) -> str:
        return self.data.columns["image"]


@dataclass(frozen=True)
class Usage:
    """Where the weights are, and over which model, for a snippet that runs as it stands; names nothing local."""

    output: OutputRecord
    target: ModelRecord
    task: CardTask | None = None
    """The target's task, if it is known."""
    class_names: Sequence[str] = ()
    """A few, short enough for the example; of a classifier all, in the order of its head."""
    template: str = DEFAULT_TEMPLATES[0]
    has_new_head: bool = False
    """True if a classification head was written that the target lacks."""
    pooled: bool = False
    """True if that head is of dense layers behind a sentence encoder's pooling."""
    example: Example | None = None
    chats: bool = False
    """True if the target's tokenizer has a chat template, by which prompts or chats were read."""

    def inputs(self, *neutral: str) -> list[str]:
        """Return the texts of the example, or neutral ones."""
        return list(self.example.texts if self.example and self.example.texts else neutral)

    @property
    def reads_images(self) -> bool:
        return self.is_clip or (self.runs_as is not None and self.runs_as.processor_class == "AutoImageProcessor")

    @property
    def image(self) -> Example | None:
        """The example whose image the snippet loads; None for a neutral one."""
        runs = self.reads_images and (self.is_clip or self.classifies)
        return self.example if runs and self.example and self.example.row is not None else None

    @property
    def packages(self) -> list[str]:
        """What to install for the snippet."""
        library = "open_clip_torch" if self.library == "open_clip" else "transformers"
        packages = [library] if library == "open_clip_torch" else ["torch", library]
        if self.format == "delta":
            packages = [f"git+{PROJECT_URL}"]
        elif self.pooled:
            packages = ["sentence-transformers"]
        elif self.format == "adapter":
            packages = ["peft", library]
        packages += ["torchvision"] if self.reads_images and library == "transformers" else []
        return [*packages, *(["datasets"] if self.image and self.format != "delta" else [])]

    @property
    def lists_classes(self) -> bool:
        return len(self.class_names) <= MAX_CLASSES

    @property
    def format(self) -> str:
        return self.output.format

    @property
    def noun(self) -> str:
        """The kind of result: "model", "adapter" or "change"."""
        return {"adapter": "adapter", "delta": "change"}.get(self.format, "model")

    @property
    def library(self) -> str | None:
        """The target's library."""
        family = family_named(self.target.family)
        return None if family is None else family.library

    @property
    def is_clip(self) -> bool:
        return self.task is not None and self.task.type == ZERO_SHOT_TASK

    @property
    def runs_as(self) -> CardTask | None:
        """The task to run in the snippet with transformers; None for a change of weights without its head."""
        task = None if self.is_clip else self.task
        return None if self.format == "delta" and task is not None and task.classifies else task

    @property
    def classifies(self) -> bool:
        """True if the loaded model has a classification head."""
        return self.runs_as is not None and self.runs_as.classifies

    @property
    def resizes_head(self) -> bool:
        """True if the target is loaded with a head of the adapter's size."""
        return self.classifies and self.over_target and self.has_new_head

    @property
    def over_target(self) -> bool:
        """True if the target has to be loaded first."""
        return self.noun != "model"

    @property
    def repo(self) -> str | None:
        return self.output.repo

    @property
    def branch(self) -> str | None:
        """The branch of the repo, if it is not main."""
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
        """The files to download of the target's repo, which may hold its weights several times."""
        return ["*.json", "*.txt", "*.model", *(name for name in self.target.sha256 if FILE_NAME.fullmatch(name))]

    def metadata(self) -> dict[str, object]:
        """Return the library and the task."""
        libraries = {"adapter": "peft", "full": "sentence-transformers" if self.pooled else self.library}
        task = self.task if self.format in libraries else None
        return {"library_name": libraries.get(self.format) or "hf-bico", "pipeline_tag": task.type if task else None}

    @property
    def tags(self) -> list[str]:
        """Return the tags of the task, and for an adapter those that peft writes."""
        tags = ["clip"] if self.is_clip else []
        if self.format != "adapter":
            return tags
        over = [f"base_model:adapter:{self.target.id}"] if self.target.commit else []
        return [*over, "lora", *(["transformers"] if self.library == "transformers" else []), *tags]


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
    """The models behind a result by part; those in `also` may state none, as only the difference to them was taken."""

    models: Sequence[tuple[str, ModelRecord]]
    also: Sequence[tuple[str, ModelRecord]] = ()

    @property
    def stated(self) -> bool:
        return any(model.license for _, model in (*self.models, *self.also))

    @property
    def agree(self) -> bool:
        return len(self._names) == 1

    def metadata(self, repo: str | None) -> dict[str, str]:
        """Return the licence that all agree on, else "other" under the names of all."""
        names = self._names
        if all(model.license is None for _, model in self.models):
            return {}
        if len(names) == 1 and _KNOWN.fullmatch(names[0]):
            return {"license": names[0]}
        name = re.sub(r"[^a-z0-9.]+", "-", "-and-".join(clean(name, 40) for name in names).lower()).strip("-.")
        return {
            "license": "other",
            "license_name": name or "unnamed",
            "license_link": f"{HUB_URL}{repo}#licences" if repo else "",
        }

    @property
    def _names(self) -> list[str]:
        """The distinct licences, with "unstated" for a missing one."""
        counted = [*self.models, *((part, model) for part, model in self.also if model.license)]
        names = [
            (model.license_name or f"unnamed {part}") if model.license == "other" else model.license or "unstated"
            for part, model in counted
        ]
        return list(dict.fromkeys(names))
