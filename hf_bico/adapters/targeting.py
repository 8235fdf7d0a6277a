"""Which modules a LoRA's configuration targets: peft leaves out the factors of any other without a word.

Follows peft's own rules on names; no tensors, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hf_bico.adapters.keys import parameters_of
from hf_bico.errors import AdapterError

_EVERY_LINEAR = "all-linear"


def require_targeted(modules: Iterable[str], raw: Mapping[str, Any], called: str) -> None:
    """Refuse factors of a module that the configuration does not target."""
    try:
        missed = [module for module in modules if not _is_targeted(module, raw)]
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise AdapterError(
            f"what '{called}' targets cannot be read from its configuration: {error}", "save the adapter again"
        ) from error
    if missed:
        raise AdapterError(
            f"'{called}' holds factors of '{missed[0]}' ({len(missed)} in all), which are none of its targets",
            "save the adapter again with peft, which would leave them out",
        )


def _is_targeted(module: str, raw: Mapping[str, Any]) -> bool:
    if parameters_of(module, [str(target) for target in raw.get("target_parameters") or ()]):
        return True
    targets = raw.get("target_modules")
    if targets is None or (isinstance(targets, str) and targets.lower() == _EVERY_LINEAR):
        return True  # old files do not say, and which layers are linear the names do not tell
    if raw.get("exclude_modules") and _matches(module, raw["exclude_modules"]):
        return False
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", module) for saved in raw.get("modules_to_save") or ()):
        return False
    return _matches(module, targets) and _in_layers(module, raw, exact=module in targets)


def _matches(module: str, targets: Any) -> bool:
    """A text is an expression for whole names, a list names whole names or their ends."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _in_layers(module: str, raw: Mapping[str, Any], exact: bool) -> bool:
    layers, patterns = raw.get("layers_to_transform"), raw.get("layers_pattern")
    if layers in (None, []) or exact or isinstance(raw.get("target_modules"), str):
        return True
    named = [patterns] if isinstance(patterns, str) else list(patterns or ())
    # the number of the outermost list that fits; older releases took the innermost one
    ways = [[rf"(?:^|.*?\.){one}\.(\d+)\.", rf"(?:^|.*\.){one}\.(\d+)\."] for one in named]
    ways = ways or [[r".*?\.[^.]*\.(\d+)\.", r".*\.[^.]*\.(\d+)\."]]
    found = {int(match[1]) for way in ways for one in way if (match := re.match(one, module))}
    return bool(found & set([layers] if isinstance(layers, int) else layers))
