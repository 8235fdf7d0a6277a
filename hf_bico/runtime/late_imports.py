"""Postpones imports that take longer than torch itself and that are rarely used.

torchvision, timm, transformers and peft import torch's compiler only to mark functions that it shall leave alone; while
nothing is compiled, such a mark means nothing. transformers imports torch's distributed tensors to ask whether a tensor
is one, flexible attention for models that are compiled, and scipy's optimisers for the losses of object detectors. A
stand-in answers that. The real modules are imported as soon as anything else is asked of them. Knows no command and no
model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ForwardRef, Union

COMPILER = "torch._dynamo"
POSTPONED = (
    *(COMPILER, "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.nn.attention.flex_attention"),
    "scipy.optimize",
)


def postpone_imports() -> None:
    """Let each of the `POSTPONED` be imported when it is first used, unless it has been imported already."""
    known = {finder.package for finder in sys.meta_path if isinstance(finder, _Finder)}
    for package in POSTPONED:
        if package not in sys.modules and package not in known:
            sys.meta_path.insert(0, _Finder(package))


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for the modules of one package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if _is_within(name, self.package) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the stand-in as it is: it has no code."""


class _Module(ModuleType):
    """Stands in for one module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _KNOWN.get((self.__name__, name)) or _Late(self.__name__, name)


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
        if self._names[-1] in _VALUES and not _is_loaded(self._module):
            return _LateValue(self, arguments, settings)
        return self._real()(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name) if name.startswith("__") else _Late(self._module, *self._names, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        # of what is not loaded there are no instances
        return _is_loaded(self._module) and isinstance(instance, self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __or__(self, other: Any) -> Any:
        return Union[_annotation(self), _annotation(other)]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[_annotation(other), _annotation(self)]  # noqa: UP007

    def __bool__(self) -> bool:
        return bool(self._real())

    def __eq__(self, other: object) -> bool:
        return bool(self._real() == other)

    def __hash__(self) -> int:
        return hash(self._real())


class _LateValue(_Late):
    """Stands in for an instance of a postponed class."""

    def __init__(self, kind: _Late, arguments: Sequence[Any], settings: Mapping[str, Any]) -> None:
        super().__init__(kind._module, *kind._names)
        self.__dict__["_make"] = lambda: kind._real()(*arguments, **settings)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._real())

    def _real(self) -> Any:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __bool__(self) -> bool:
        return True


_VALUES = ("Partial", "Replicate", "Shard")
"""Placements of distributed tensors: plain values, of which transformers makes tables when it is imported."""


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a special method that asks the real value."""
    return lambda self, *arguments: getattr(self._real(), name)(*arguments)


for _name in (
    *("len", "iter", "getitem", "contains", "int", "float", "index", "lt", "le", "gt", "ge", "neg"),
    *(side + one for side in ("", "r") for one in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
):  # which Python looks for in the class alone
    setattr(_Late, f"__{_name}__", _forwarded(f"__{_name}__"))


def _annotation(kind: Any) -> Any:
    """Return a type as it may stand in an annotation, where it need not be known."""
    return ForwardRef(".".join((kind._module, *kind._names))) if isinstance(kind, _Late) else kind


def _unmarked(function: Any = None, *_: Any, **settings: Any) -> Any:
    """Return a function that is to be marked for the compiler as it is, or a decorator that does so."""
    return (lambda decorated: decorated) if function is None else function


def _no_break(*_: Any, **settings: Any) -> None:
    """Do nothing: no graph is being compiled."""


_MARKS = ("allow_in_graph", "assume_constant_result", "disable", "disallow_in_graph", "forbid_in_graph")
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    **dict.fromkeys(((COMPILER, mark) for mark in _MARKS), _unmarked),
    (COMPILER, "graph_break"): _no_break,
}
"""What libraries call although nothing is compiled."""


def _package(name: str) -> str:
    """Return the postponed package that a module belongs to."""
    return next(package for package in POSTPONED if _is_within(name, package))


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _is_loaded(name: str) -> bool:
    package = _package(name)
    return all(not isinstance(finder, _Finder) or finder.package != package for finder in sys.meta_path)


def _load(name: str) -> ModuleType:
    """Import a module in earnest, and all of its package from now on."""
    package = _package(name)
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _Finder) or one.package != package]
    for stand_in in [key for key, module in sys.modules.items() if isinstance(module, _Module)]:
        if _is_within(stand_in, package):
            del sys.modules[stand_in]
    parent, _, last = package.rpartition(".")
    if isinstance(vars(sys.modules[parent]).get(last), _Module):  # or the package would find it while it is imported
        delattr(sys.modules[parent], last)
    return import_module(name)
