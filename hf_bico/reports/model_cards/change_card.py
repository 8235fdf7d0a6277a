"""Cards of extract, apply and task vectors.

The card of a change that was extracted from a model, or applied to one. Reads nothing but the record.

With the same manners as a port's: every text may be hostile, and what is not a repo of the Hub is not named.

The short card of a task vector that is pushed on its own: over which model it lies, and how to add it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from hf_bico.hub.references import is_hub_id
from hf_bico.reports.model_cards.rendering import (
    LinkTarget,
    kind_of,
    public_command,
    render,
    shown,
    shown_output,
    shown_source,
    without_names,
)
from hf_bico.reports.model_cards.sections import AdapterContents, Licences, Usage, card_task, held_layers, languages
from hf_bico.reports.record import ChangeRecord, ModelRecord
from hf_bico.reports.results import Report

TEMPLATE = "made.md.jinja"
MOST_NAMES = 3
"""So many parts are named in a title."""


@dataclass(frozen=True)
class MadeCard:
    """What the template prints; `record` names no local folder any more."""

    record: ChangeRecord
    use: Usage
    held: AdapterContents | None

    @property
    def extracted(self) -> bool:
        return self.record.job == "extract"

    @property
    def sources(self) -> list[ModelRecord]:
        return [part.model for part in self.record.parts]

    @property
    def title(self) -> str:
        target, names = self.record.target.id, _listed([source.id for source in self.sources])
        text = f"{names} as an adapter of {target}" if self.extracted else f"{target} with {names}"
        return text[:1].upper() + text[1:] if text.startswith("a local") else text

    @property
    def models(self) -> list[tuple[str, ModelRecord]]:
        """Every model behind it, with its part."""
        target = self.record.target
        if self.extracted:
            return [*((f"source, {kind_of(source)}", source) for source in self.sources), ("its base", target)]
        parts = [(_part(part.model, part.weight), part.model) for part in self.record.parts]
        return [*parts, ("the model", target)]

    @property
    def licences(self) -> Licences:
        several = len(self.sources) > 1
        parts = [(f"part {i}" if several else "source", source) for i, source in enumerate(self.sources, 1)]
        return Licences([*parts, ("target", self.record.target)])

    @property
    def left(self) -> list[tuple[str, int, float]]:
        """What the adapter leaves out: reason, tensors, share of the energy."""
        return Report((), tuple(self.record.left)).left_by_reason()


def render_made_card(record: ChangeRecord) -> str:
    """The whole card: metadata, then the body."""
    public = _without_local_names(record)
    use = Usage(public.output, public.target, card_task(public.target.family))
    card = MadeCard(public, use, _held(public))
    return render(
        TEMPLATE,
        _metadata(card),
        card=card,
        record=public,
        models=card.models,
        licences=card.licences,
        use=use,
        held=card.held,
        change="change",
    )


def _held(record: ChangeRecord) -> AdapterContents | None:
    if record.output.format != "adapter":
        return None
    adapters = bool(record.parts) and all(part.model.kind == "adapter" for part in record.parts)
    return held_layers(record.layers, record.output, adapters, record.target.family)


def _listed(names: Sequence[str]) -> str:
    """ "A", "A and B", "A, B, C and 2 more"."""
    shown_names = list(names[:MOST_NAMES])
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    *first, last = [*shown_names, *more] or ["nothing"]
    return f"{', '.join(first)} and {last}" if first else last


def _part(source: ModelRecord, weight: float) -> str:
    kind = kind_of(source).removeprefix("an ").removeprefix("a ")
    return kind if weight == 1.0 else f"{kind}, times {weight:g}"


def _without_local_names(record: ChangeRecord) -> ChangeRecord:
    public = replace(
        record,
        parts=[replace(part, model=shown_source(part.model)) for part in record.parts],
        target=shown(record.target, "a local model"),
        output=shown_output(record.output),
    )
    pairs = [(before, after) for before, after in zip(record.models, public.models, strict=True)]
    notices = [without_names(notice, pairs) for notice in record.notices]
    return replace(public, notices=notices, command=_command(public, record.command))


def _command(public: ChangeRecord, command: str | None) -> str | None:
    word = "FINETUNED" if public.job == "extract" else "VECTOR"
    numbered = len(public.parts) > 1
    given: list[LinkTarget] = [
        (part.model, f"{word}{i}" if numbered else word) for i, part in enumerate(public.parts, 1)
    ]
    options: dict[str, LinkTarget] = {"--base": (public.target, "BASE"), "--to": (public.target, "MODEL")}
    return public_command(command, public.job, given, options)


def _metadata(card: MadeCard) -> dict[str, Any]:
    record, use = card.record, card.use
    metadata: dict[str, Any] = {}
    if record.target.commit:
        metadata = {"base_model": record.target.id, "base_model_relation": "adapter" if use.over_target else "finetune"}
        merged = [source.id for source in card.sources if source.commit]
        if not use.over_target and len(card.sources) > 1 and merged:
            models = list(dict.fromkeys([record.target.id, *merged]))
            metadata = {"base_model": models, "base_model_relation": "merge"}
    metadata |= use.metadata()
    metadata |= card.licences.metadata(use.repo)
    metadata["language"] = languages(record.target)
    metadata["tags"] = ["hf-bico", "task-vector", "training-free", *use.tags]
    return metadata


_IMPORTS = {
    "open_clip": ["import hf_bico", "import open_clip", "from huggingface_hub import snapshot_download"],
    "transformers": ["import hf_bico", "import transformers"],
}
_LOADING = {
    "open_clip": [
        'folder = snapshot_download("{base}", revision="{commit}")',
        'model = open_clip.create_model(f"local-dir:{{folder}}")',
    ],
    "transformers": [
        'base, commit = "{base}", "{commit}"',
        "kind = transformers.AutoConfig.from_pretrained(base, revision=commit).architectures[0]",
        "model = getattr(transformers, kind).from_pretrained(base, revision=commit)",
    ],
}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def render_vector_card(about: Mapping[str, Any], tensors: int, repo_id: str) -> str:
    """Metadata and body, of what the vector's own header knows; names of local folders are left out."""
    base, source = (_hub_id(about, part) for part in ("base", "source"))
    metadata: dict[str, Any] = {"library_name": "hf-bico", "tags": ["hf-bico", "task-vector"]}
    if base:
        metadata = {"base_model": base, "base_model_relation": "adapter", **metadata}
    lines = [
        f"# Task vector over {base or 'a local model'}",
        "",
        f"What fine-tuning changed in {base or 'a local model'}: {tensors} tensors, as differences"
        + (f", taken from {source}." if source else "."),
        "",
        "```python",
        *_usage(about, base, repo_id),
        "```",
    ]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + "\n".join(lines) + "\n"


def _usage(about: Mapping[str, Any], base: str | None, repo_id: str) -> list[str]:
    library = str(about.get("library"))
    imports, loading = ["import hf_bico"], ["model = ...  # the model that it was made for"]
    if base and library in _LOADING:
        imports = _IMPORTS[library]
        loading = [line.format(base=base, commit=about["base_commit"]) for line in _LOADING[library]]
    return [*imports, "", *loading, f'hf_bico.TaskVector.load("{repo_id}").apply_to(model)']


def _hub_id(about: Mapping[str, Any], part: str) -> str | None:
    name, commit = str(about.get(part, "")), str(about.get(f"{part}_commit", ""))
    return name if is_hub_id(name) and _COMMIT.fullmatch(commit) else None
