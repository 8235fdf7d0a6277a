"""Templates to text: metadata, then the body, in which whatever is not known to be Markdown is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import FunctionLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from hf_bico.cards.naming import digests, link
from hf_bico.utils.text import Markdown, code, fenced, literal, plain


def render(template: str, metadata: Mapping[str, Any], **values: Any) -> str:
    """The whole card; metadata without a value is left out."""
    known = {key: value for key, value in metadata.items() if value}
    head = yaml.safe_dump(known, sort_keys=False, allow_unicode=True, width=float("inf"))
    return f"---\n{head}---\n\n{_environment().get_template(template).render(**values)}"


@cache
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(
        loader=FunctionLoader(lambda name: files("hf_bico.cards").joinpath(name).read_text(encoding="utf-8")),
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
        "seconds": _seconds,
    }
    return environment


def _seconds(value: float) -> str:
    if value < 0.05:
        return "less than 0.1 seconds"
    return f"{value:.1f} seconds" if value < 120 else f"{value / 60:.1f} minutes"
