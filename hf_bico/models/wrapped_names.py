"""Take off what training tools put into tensor names: DDP, FSDP, torch.compile, Lightning.

Works on names alone; whether a name is a model's own is the caller's to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from hf_bico.errors import UnsupportedModelError

Shapes = Mapping[str, tuple[int, ...]]

_INSIDE = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_original_module)\."
)
"""Modules of torch and Lightning around others, wherever in a name: no model has a part that is called so."""
_OUTSIDE = ("module", "model", "net", "network", "backbone")
"""What a whole model is called as a part of something else, which may have further parts."""
_MOST_PARTS = 6


def without_wrappers(shapes: Shapes) -> dict[str, str]:
    """Map each name to the one without torch's own wrappers inside.

    >>> without_wrappers({"_orig_mod.h.0._fsdp_wrapped_module.w": (1,)})
    {'_orig_mod.h.0._fsdp_wrapped_module.w': 'h.0.w'}
    """
    return {name: _INSIDE.sub("", name) for name in shapes}


def clean_names(shapes: Shapes, is_own: Callable[[Shapes], bool], called: str) -> dict[str, str]:
    """Map each wrapped name to the model's own, for which `is_own` holds; empty if there is nothing to take off.

    A prefix of all names is taken off whatever it is called; one of most names only if it is a usual one.
    """
    inner = without_wrappers(shapes)
    if len(set(inner.values())) < len(inner):
        return {}
    plain = {inner[name]: shape for name, shape in shapes.items()}
    prefix = _prefix(plain, is_own, called)
    cut = {name: name.removeprefix(prefix) for name in plain}
    if len(set(cut.values())) < len(cut):
        cut = {}
    found = {name: cut.get(plain_name, plain_name) for name, plain_name in inner.items()}
    return {name: own for name, own in found.items() if name != own}


def _prefix(shapes: Shapes, is_own: Callable[[Shapes], bool], called: str) -> str:
    for prefix in ("", *_shared_prefixes(shapes)):
        if is_own(_under(prefix, shapes)):
            return prefix
    usual = [prefix for prefix in _usual_prefixes(shapes) if is_own(_under(prefix, shapes))]
    outermost = [prefix for prefix in usual if not any(prefix != one and prefix.startswith(one) for one in usual)]
    if len(outermost) > 1:
        names = " and ".join(f"'{prefix}'" for prefix in outermost[:2])
        raise UnsupportedModelError(
            f"{called} holds several models, under names that begin with {names}",
            "save only the right one",
        )
    return outermost[0] if outermost else ""


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}


def likely_prefixes(names: Collection[str]) -> list[str]:
    """Return the prefixes that may be a training tool's: those of all names, and the usual ones of some."""
    return list(dict.fromkeys([*_shared_prefixes(names), *_usual_prefixes(names)]))


def _shared_prefixes(names: Iterable[str]) -> list[str]:
    """Return the dotted prefixes that all names have, the shortest first.

    >>> _shared_prefixes(["module.model.a.w", "module.model.b"])
    ['module.', 'module.model.']
    """
    split = [name.split(".")[:-1][:_MOST_PARTS] for name in names]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(f"{shared[-1] if shared else ''}{parts[0]}.")
    return shared


def _usual_prefixes(names: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        prefix = ""
        for part in name.split(".")[:-1][:_MOST_PARTS]:
            if part not in _OUTSIDE:
                break
            prefix += f"{part}."
            found[prefix] = None
    return sorted(found, key=len)
