"""The record to the model card: only what was measured or verified, unknowns left out. Reads nothing but the record."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from hf_bico.record import Record
from hf_bico.report import VALUE_NAMES, Report, headline

CARD_FILE = "README.md"
TEMPLATE = "card.md.jinja"
_LIBRARIES = {"open_clip ViT": "open_clip", "transformers CLIP": "transformers"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~])")


def write_card(record: Record, folder: Path) -> Path:
    file = folder / CARD_FILE
    file.write_text(render_card(record), encoding="utf-8")
    return file


def render_card(record: Record) -> str:
    """The whole card: metadata, then the body."""
    environment = SandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["plain"] = plain
    environment.filters["percent"] = lambda value: f"{value:.1%}"
    template = environment.from_string(files("hf_bico").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    body = template.render(
        record=record,
        report=Report(tuple(record.sites), tuple(record.left)),
        headline=headline(record),
        results=[(VALUE_NAMES[entry.model], entry) for entry in record.evaluation],
        library=_library(record),
    )
    metadata = yaml.safe_dump(_metadata(record), sort_keys=False, allow_unicode=True)
    return f"---\n{metadata}---\n\n{body}"


def plain(text: Any) -> str:
    """Free text as one line in which no character means anything to Markdown or HTML.

    >>> print(plain("a|b <c>"))
    a\\|b \\<c\\>
    """
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def _library(record: Record) -> str:
    return _LIBRARIES.get(record.target.family or "", "hf-bico")


def _metadata(record: Record) -> dict[str, Any]:
    full = record.output is not None and record.output.format == "full"
    metadata: dict[str, Any] = {"library_name": _library(record) if full else "hf-bico"}
    if full:
        metadata["pipeline_tag"] = "zero-shot-image-classification"
    metadata["tags"] = ["hf-bico", "task-vector", "training-free", "clip"]
    if record.evaluation:
        metadata["metrics"] = sorted({entry.metric for entry in record.evaluation})
    return metadata
