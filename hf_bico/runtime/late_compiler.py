"""Postpones the import of torch's compiler, which takes as long as torch itself and is not used.

torchvision, timm, transformers and peft import `torch._dynamo` only to mark functions that it shall leave alone. While
nothing is compiled such a mark means nothing, so a stand-in takes it. The real modules are imported as soon as anything
else is asked of them. Knows no command and no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


def postpone_compiler() -> None:
    """Let `torch._dynamo` be imported when it is first used, unless it has been imported already."""
    if COMPILER not in sys.modules and not _is_postponed():
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for the compiler's modules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        ours = name == COMPILER or name.startswith(f"{COMPILER}.")
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the stand-in as it is: it has no code."""


class _Module(ModuleType):
    """Stands in for one module of the compiler."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = _WITHOUT_EFFECT.get(name) if self.__name__ == COMPILER else None
        return known or _Late(self.__name__, name)


class _Late:
    """Stands in for an attribute of such a module, or an attribute of that."""

    def __init__(self, module: str, *names: str) -> None:
        self.__dict__.update(_module=module, _names=names)

    def _real(self) -> Any:
        value: Any = _load(self._module)
        for name in self._names:
            value = getattr(value, name)
        return value

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return self._real()(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name) if name.startswith("__") else _Late(self._module, *self._names, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        return not _is_postponed() and isinstance(instance, self._real())  # of what is not loaded there are none

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __bool__(self) -> bool:
        return bool(self._real())

    def __eq__(self, other: object) -> bool:
        return bool(self._real() == other)

    def __hash__(self) -> int:
        return hash(self._real())


def _unmarked(function: Any = None, *_: Any, **settings: Any) -> Any:
    """Return a function that is to be marked for the compiler as it is, or a decorator that does so."""
    return (lambda decorated: decorated) if function is None else function


def _no_break(*_: Any, **settings: Any) -> None:
    """Do nothing: no graph is being compiled."""


_MARKS = ("allow_in_graph", "assume_constant_result", "disable", "disallow_in_graph", "forbid_in_graph")
_WITHOUT_EFFECT: dict[str, Callable[..., Any]] = {**dict.fromkeys(_MARKS, _unmarked), "graph_break": _no_break}
"""What libraries call although nothing is compiled."""


def _is_postponed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _load(name: str) -> ModuleType:
    """Import a module of the compiler in earnest."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for stand_in in [key for key, module in sys.modules.items() if isinstance(module, _Module)]:
        del sys.modules[stand_in]
    return import_module(name)
