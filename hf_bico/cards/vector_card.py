"""The short card of a task vector that is pushed on its own: over which model it lies, and how to add it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from hf_bico.hub.references import is_hub_id

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
