"""The short card of a task vector that is pushed on its own: over which model it lies, and how to add it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from hf_bico.hub.references import is_hub_id

_IMPORTS = {"open_clip": "import open_clip", "transformers": "from transformers import AutoModel"}
_LOADING = {
    "open_clip": 'model = open_clip.create_model("hf-hub:{base}")',
    "transformers": 'model = AutoModel.from_pretrained("{base}", revision="{commit}")',
}


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
    imports, loading = ["import hf_bico"], "model = ...  # the model that it was made for"
    if base and library in _LOADING:
        imports = sorted([*imports, _IMPORTS[library]], key=lambda line: line.startswith("from"))
        loading = _LOADING[library].format(base=base, commit=about["base_commit"])
    return [*imports, "", loading, f'hf_bico.TaskVector.load("{repo_id}").apply_to(model)']


def _hub_id(about: Mapping[str, Any], part: str) -> str | None:
    name = str(about.get(part, ""))
    return name if about.get(f"{part}_commit") and is_hub_id(name) else None
