"""Gather the cards of changes: extracted from a model, applied to one, or pushed alone as a task vector.

Reads nothing but the record, or the vector's header. Every text may be hostile, and no path is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_bico.hub.references import is_commit, is_hub_id
from hf_bico.reports.model_cards import rendering
from hf_bico.reports.model_cards.card import Card
from hf_bico.reports.model_cards.sections import Licences, Usage, card_task
from hf_bico.reports.record import ChangeRecord, Summand

MAX_NAMES = 3
"""Parts that a title names."""
_LOADING = {
    "open_clip": [
        "import open_clip",
        "from huggingface_hub import snapshot_download",
        "",
        'folder = snapshot_download("{base}", revision="{commit}")',
        'model = open_clip.create_model(f"local-dir:{{folder}}")',
    ],
    "transformers": [
        "import transformers",
        "",
        'base, commit = "{base}", "{commit}"',
        "kind = transformers.AutoConfig.from_pretrained(base, revision=commit).architectures[0]",
        "model = getattr(transformers, kind).from_pretrained(base, revision=commit)",
    ],
}


@dataclass(frozen=True)
class ChangeCard(Card):
    """The card of a change that was extracted from a model or applied to one."""

    template = "change.md.jinja"
    record: ChangeRecord
    use: Usage

    @property
    def extracted(self) -> bool:
        return self.record.job == "extract"

    @property
    def usual_title(self) -> str:
        target, names = self.record.target.id, _listed([source.id for source in self.record.sources])
        text = f"{names} as an adapter of {target}" if self.extracted else f"{target} with {names}"
        return text[:1].upper() + text[1:] if text.startswith("a local") else text

    def metadata(self) -> dict[str, Any]:
        metadata, target, sources = super().metadata(), self.record.target, self.record.sources
        merged = [source.id for source in sources if source.commit]
        if target.commit and not self.use.over_target and len(sources) > 1 and merged:
            models = list(dict.fromkeys([target.id, *merged]))
            metadata |= {"base_model": models, "base_model_relation": "merge"}
        return metadata | {"tags": ["hf-bico", "task-vector", "training-free", *self.use.tags]}


def change_card(record: ChangeRecord) -> ChangeCard:
    """Gather the facts of a change's card."""
    public = _public_record(record)
    sources, target = public.sources, public.target
    models = [(_part(part, public.job), part.model) for part in public.parts]
    names = [f"part {number}" for number, _ in enumerate(sources, 1)] if len(sources) > 1 else ["source"]
    return ChangeCard(
        record=public,
        models=[*models, ("its base" if public.job == "extract" else "the model", target)],
        licences=Licences([*zip(names, sources, strict=False), ("target", target)]),
        use=Usage(public.output, target, card_task(target.family)),
    )


def _listed(names: Sequence[str]) -> str:
    """Return "A", "A and B", "A, B, C and 2 more"."""
    more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    *first, last = [*names[:MAX_NAMES], *more] or ["nothing"]
    return f"{', '.join(first)} and {last}" if first else last


def _part(part: Summand, job: str) -> str:
    if job == "extract":
        return f"source, {rendering.kind_of(part.model)}"
    kind = rendering.kind_of(part.model).removeprefix("an ").removeprefix("a ")
    return kind if part.weight == 1.0 else f"{kind}, times {part.weight:g}"


def _public_record(record: ChangeRecord) -> ChangeRecord:
    public = replace(
        record,
        parts=[replace(part, model=rendering.public_source(part.model)) for part in record.parts],
        target=rendering.public_entry(record.target, "a local model"),
        output=rendering.public_output(record.output),
    )
    word = "FINETUNED" if record.job == "extract" else "VECTOR"
    arguments: list[rendering.CommandWord] = [
        (source, f"{word}{number}" if len(public.sources) > 1 else word)
        for number, source in enumerate(public.sources, 1)
    ]
    options: dict[str, rendering.CommandWord] = {"--base": (public.target, "BASE"), "--to": (public.target, "MODEL")}
    return replace(public, command=rendering.public_command(record.command, record.job, arguments, options))


def render_vector_card(header: Mapping[str, Any], tensors: int, repo_id: str) -> str:
    """Return the short card of a task vector that is pushed alone, from the vector's own header."""
    base, source = (_hub_id(header, part) for part in ("base", "source"))
    metadata: dict[str, Any] = {"library_name": "hf-bico", "tags": ["hf-bico", "task-vector"]}
    if base:
        metadata = {"base_model": base, "base_model_relation": "adapter", **metadata}
    loading = _LOADING.get(str(header.get("library"))) if base else None
    loading = loading or ["", "model = ...  # the model that it was made for"]
    lines = [
        f"# Task vector over {base or 'a local model'}",
        "",
        f"What fine-tuning changed in {base or 'a local model'}: {tensors} tensors, as differences"
        + (f", taken from {source}." if source else "."),
        "",
        "```python",
        "import hf_bico",
        *(line.format(base=base, commit=header.get("base_commit")) for line in loading),
        f'hf_bico.TaskVector.load("{repo_id}").apply_to(model)',
        "```",
    ]
    return rendering.with_metadata(metadata, "\n".join(lines) + "\n")


def _hub_id(header: Mapping[str, Any], part: str) -> str | None:
    name, commit = str(header.get(part, "")), str(header.get(f"{part}_commit", ""))
    return name if is_hub_id(name) and is_commit(commit) else None
