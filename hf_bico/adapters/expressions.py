"""Regular expressions that an adapter's configuration brings along, which may be made never to end.

They are tried on the names first, in a process that can be stopped, by the engine that will match them. Reads
configurations; knows no tensors.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hf_bico.errors import AdapterError

SECONDS = 5.0
"""How long all names of a model may take: those of real adapters take thousandths."""
_PLAIN = re.compile(r"[\w.\- ]*")
_TRIAL = """
import json, re, sys
expressions, names = json.load(sys.stdin)
for expression in expressions:
    try:
        pattern = re.compile(expression)
    except (re.error, OverflowError, RecursionError):
        continue  # who matches it says so
    for name in names:
        pattern.match(name), pattern.fullmatch(name)
"""


def require_quick(raw: Mapping[str, Any], names: Iterable[str], called: str) -> None:
    """Refuse a configuration whose expressions take too long to match these names; a broken one is quick."""
    expressions = _expressions(raw)
    if not expressions:
        return
    # nothing of the user's own packages or settings is loaded for it
    command = [sys.executable, "-I", "-S", "-c", _TRIAL]
    try:
        done = subprocess.run(
            command, input=json.dumps([expressions, list(names)]).encode(), capture_output=True, timeout=SECONDS
        )
        problem = "" if done.returncode == 0 else "cannot be matched"
    except subprocess.TimeoutExpired:
        problem = f"cannot be matched within {SECONDS:g} seconds"
    if problem:
        raise AdapterError(
            f"an expression in the configuration of '{called}' {problem}", "list the names of the modules there instead"
        )


def _expressions(raw: Mapping[str, Any]) -> list[str]:
    """All that peft, or this tool after it, matches with names, as they do it; names that are only names are left."""
    bare = [text for name in ("target_modules", "exclude_modules") for text in _texts(raw.get(name), lists=False)]
    layers = _texts(raw.get("layers_pattern"))
    saved = _texts(raw.get("modules_to_save"))
    patterns = [key for name in ("rank_pattern", "alpha_pattern") for key in _texts(raw.get(name))]
    return [
        *bare,
        *(rf"(?:^|.*\.){text}\.(\d+)\." for text in layers),
        *(rf"(?:^|.*?\.){text}\.(\d+)\." for text in layers),
        *(rf".*\.{text}\.(\d+)\." for text in layers),
        *(rf"(^|.*\.){text}($|\..*)" for text in saved),
        *(rf"(.*\.)?({text})$" for text in patterns),
    ]


def _texts(value: Any, *, lists: bool = True) -> list[str]:
    """The expressions among one text, or those of a list or the keys of a mapping."""
    values = [value] if isinstance(value, str) else list(value) if lists and isinstance(value, list | dict) else []
    return [text for text in values if isinstance(text, str) and _PLAIN.fullmatch(text) is None]
