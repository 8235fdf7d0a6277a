"""Weight changes by name: arithmetic, adding them to a model, and the file `task_vector.safetensors`.

A vector is a sum of weighted sources that are read on access, so that no difference of two checkpoints is in memory as
a whole. Low-rank changes stay factors, in sums and in the file too. Knows tensors; no kind of model, no Hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from hf_bico.errors import BaseMismatchError, BrokenWeightsError, NonFiniteWeightsError, RecordError, UsageError
from hf_bico.models.checkpoints import (
    Checkpoint,
    FileCheckpoint,
    LazyMapping,
    non_float_tensors,
    open_safetensors,
    save_tensors,
)
from hf_bico.models.derived_tensors import weight_overlap
from hf_bico.models.hooks import offloaded_weights
from hf_bico.models.low_rank import Change, Factors, dense, energy, is_finite, total
from hf_bico.models.name_matching import Overlap, align_names
from hf_bico.utils.files import parse_json

_FIRST = 256
_MOST_QUOTED = 40
_COMPUTED_WITH = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
Terms: TypeAlias = tuple[tuple[float, Mapping[str, Change]], ...]
"""Weighted sources; a vector is their sum."""


class Deltas(Mapping[str, Tensor]):
    """Named weight changes over one base model: dense as a mapping, factors where possible by `change`.

    Two are equal if they change the same tensors by the same values, as factors or not; they cannot be hashed.

    >>> tau = Deltas({"w": torch.ones(2)})
    >>> (0.5 * tau + tau)["w"]
    tensor([1.5000, 1.5000])
    >>> tau / 2 == 0.5 * tau
    True
    """

    __array_ufunc__ = None  # a number of numpy leaves `number * tau` to this class

    def __init__(self, deltas: Mapping[str, Change], overlap: Overlap | None = None) -> None:
        self.terms: Terms = deltas.terms if isinstance(deltas, Deltas) else ((1.0, deltas),)
        self.overlap = overlap or Overlap()

    def __getitem__(self, name: str) -> Tensor:
        return dense(self.change(name))

    def change(self, name: str) -> Change:
        """Return one change, as factors if every source of it has factors."""
        parts = [
            source[name] if weight == 1.0 else weight * source[name] for weight, source in self.terms if name in source
        ]
        if not parts:
            raise KeyError(name)
        return total(parts)

    def changes(self) -> Iterator[tuple[str, Change]]:
        """Yield every name with its change; low-rank ones as factors, unlike `items`."""
        return ((name, self.change(name)) for name in self)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for _, source in self.terms for name in source))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name in source for _, source in self.terms)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one change, without reading it."""
        return next(shape_of(source, name) for _, source in self.terms if name in source)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} tensors"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Deltas):
            return NotImplemented
        return self.keys() == other.keys() and all(
            self.shape(name) == other.shape(name) and _same(self.change(name), other.change(name)) for name in self
        )

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Self) -> Self:
        self._require_summand(other)
        return self._combined(self.terms + other.terms, Overlap(), other)

    def __radd__(self, other: Any) -> Self:
        """Support `sum`, which starts from 0."""
        if type(other) is int and other == 0:
            return self
        raise _no_summand(other)

    def __mul__(self, factor: Any) -> Self:
        number = _factor(factor)
        return self._combined(tuple((_factor(number * weight), source) for weight, source in self.terms), self.overlap)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Self:
        number: float = _factor(divisor)
        if number == 0:
            raise UsageError("a task vector was divided by 0", "divide it by another number")
        return self * (1 / number)

    def __neg__(self) -> Self:
        return -1.0 * self

    def __sub__(self, other: Self) -> Self:
        self._require_summand(other)
        return self + -other

    def __rsub__(self, other: Any) -> Self:
        raise _no_summand(other)

    def _require_summand(self, other: Self) -> None:
        """Refuse what is no such vector, or changes a tensor of the same name and another shape."""
        if not isinstance(other, type(self)):
            raise _no_summand(other)
        for name in self:
            if name in other and self.shape(name) != other.shape(name):
                raise BaseMismatchError(
                    f"'{name}' is {self.shape(name)} in one task vector and {other.shape(name)} in the other",
                    "add task vectors of the same base",
                )

    def renamed(self, names: Mapping[str, str]) -> Deltas:
        """Rename some of the changes; `names` maps old names to new ones."""
        return self._mapped(lambda source: RenamedChanges(source, names)) if names else self

    def without(self, names: Collection[str]) -> Deltas:
        """Drop these changes."""
        if not names:
            return self
        return self._mapped(lambda source: {name: source[name] for name in source if name not in names})

    def _mapped(self, change: Callable[[Mapping[str, Change]], Mapping[str, Change]]) -> Deltas:
        mapped = Deltas({})
        mapped.terms = tuple((weight, change(source)) for weight, source in self.terms)
        return mapped

    def energy(self, name: str) -> float:
        """Return the squared norm of one change."""
        return energy(self.change(name))

    def apply_to(self, model: nn.Module) -> nn.Module:
        """Add the changes to the model's parameters, in place, all or none; return the model."""
        self._apply(model)
        return model

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[nn.Module]:
        """Add the changes inside a `with`; afterwards the model is as before, bit for bit."""
        originals = self._apply(model)
        try:
            yield model
        finally:
            _put_back(originals)

    def places_in(self, tensors: Iterable[str], called: str) -> dict[str, str]:
        """Return the name of each changed tensor in a model, which must have them all."""
        places = align_names(self, tensors)
        unmatched = [name for name in self if name not in places]
        if unmatched:
            raise BaseMismatchError(
                f"{called} has no tensor '{unmatched[0]}' ({len(unmatched)} of {len(self)} changes have no place)",
                "apply the task vector to the model that it was made for",
            )
        return places

    @contextmanager
    def scaled_on(self, model: nn.Module) -> Iterator[Callable[[float], None]]:
        """Yield a function that adds a multiple of the changes, in place of the last one, inside a `with`.

        Afterwards the model is as before, bit for bit. Changes stay on the parameters' devices meanwhile.
        """
        parameters = _parameters(model)
        places = self.places_in(parameters, "the model")
        changed = [(parameters[place], self.change(name), name) for name, place in places.items()]
        originals = [(parameter, parameter.data) for parameter, _, _ in changed]
        changed = [(parameter, change.to(parameter.device), name) for parameter, change, name in changed]

        def scale(alpha: float) -> None:
            for (parameter, original), (_, change, name) in zip(originals, changed, strict=True):
                parameter.data = original if alpha == 0 else add_delta(original, alpha * change, name)

        try:
            yield scale
        finally:
            _put_back(originals)

    def _apply(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Change the parameters; return them with their former data."""
        parameters = _parameters(model)
        places = self.places_in(parameters, "the model")
        originals: list[tuple[Tensor, Tensor]] = []
        try:
            for name, place in places.items():
                parameter = parameters[place]
                changed = add_delta(parameter.data, self.change(name), name)
                originals.append((parameter, parameter.data))
                parameter.data = changed
        except BaseException:
            _put_back(originals)
            raise
        return originals

    def _combined(self, terms: Terms, overlap: Overlap, *others: Self) -> Self:
        """Make a vector of these terms; subclasses learn which `others` it was made of."""
        vector = type(self)({}, overlap)
        vector.terms = terms
        return vector


def finite_number(value: Any) -> float | None:
    """Return a finite real number as a float, also one in an array or tensor without dimensions; None for others.

    >>> finite_number(torch.tensor(0.5)), finite_number(Decimal("0.1")), finite_number(True)
    (0.5, 0.1, None)
    """
    single = getattr(value, "ndim", 0) == 0
    with suppress(OverflowError, RuntimeError, ValueError):  # 10**400, a tensor on the meta device
        item = value.item() if single and hasattr(value, "item") else value
        if isinstance(item, Real | Decimal) and not isinstance(item, bool) and isfinite(item):
            return float(item)
    return None


def _factor(value: Any) -> Any:
    """Return what a vector may be scaled by as a float; a tensor that is learnt stays one, with its graph."""
    number = finite_number(value)
    if number is None:
        raise UsageError(f"a task vector was scaled by {_brief(value)}", "scale it by a finite number")
    return value if getattr(value, "requires_grad", False) else number


def _no_summand(other: object) -> UsageError:
    return UsageError(
        f"a task vector and {_brief(other)} cannot be added", "add task vectors, and multiply them by numbers"
    )


def _brief(value: object) -> str:
    """Name an operand in one line: a number, text or None by itself, anything else by its type."""
    short = isinstance(value, float | complex | str | None) or (isinstance(value, int) and abs(value) < 1e30)
    text = repr(value) if short else ""
    return text if 0 < len(text) <= _MOST_QUOTED else f"a value of type {type(value).__name__}"


def _same(one: Change, other: Change) -> bool:
    """Compare two changes of one shape by value."""
    first = dense(one)
    second = dense(other).to(first.device)
    wide = torch.promote_types(first.dtype, second.dtype)
    return torch.equal(first.to(wide), second.to(wide))


def shape_of(changes: Mapping[str, Change], name: str) -> tuple[int, ...]:
    """Return the shape of one of the changes, which need not be read for it."""
    return changes.shape(name) if isinstance(changes, LazyMapping) else tuple(changes[name].shape)


def _parameters(model: nn.Module) -> dict[str, Any]:
    """Return the model's tensors by name, also those that are kept off its device."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters()), **offloaded_weights(model)}


def _put_back(originals: list[tuple[Tensor, Tensor]]) -> None:
    for parameter, data in originals:
        parameter.data = data


def add_delta(weight: Tensor, delta: Change, name: str) -> Tensor:
    """Return weight + delta, summed in at least float32 and rounded once, to the weight's own dtype."""
    if tuple(weight.shape) != tuple(delta.shape):
        raise BaseMismatchError(
            f"'{name}' is {tuple(weight.shape)} in the model and {tuple(delta.shape)} in the task vector",
            "apply the task vector to the model that it was made for",
        )
    wide = torch.promote_types(torch.promote_types(weight.dtype, delta.dtype), torch.float32)
    delta = delta.to(weight.device, wide)
    if isinstance(delta, Factors):
        return torch.addmm(weight.to(wide), delta.left, delta.right).to(weight.dtype)
    return (weight.to(wide) + delta).to(weight.dtype)


@dataclass
class Difference(LazyMapping[Tensor]):
    """Fine-tuned minus base, by the base's names; computed on access."""

    fine_tuned: Checkpoint
    base: Checkpoint
    overlap: Overlap
    names: dict[str, None]
    """The base's names of the tensors that differ, in order."""
    device: torch.device | None = None
    """The device that computes a delta; None for that of the fine-tuned tensors."""
    _last: tuple[str, Tensor] | None = None
    """The latest delta: q, k and v read the same tensor one after the other."""

    @classmethod
    def between(cls, fine_tuned: Checkpoint, base: Checkpoint, device: torch.device | None = None) -> Difference:
        found = cls(fine_tuned, base, weight_overlap(fine_tuned, base), {}, device)
        found.names = dict.fromkeys(name for name in found.overlap.names if _changed(*found._pair(name), name))
        return found

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Read a tensor of the fine-tuned model and of the base."""
        tuned = self.fine_tuned.tensor(self.overlap.names[name])
        tuned = tuned if self.device is None else tuned.to(self.device)
        return tuned, self.base.tensor(name).to(tuned.device)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shapes[name]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        last = self._last  # once: another thread may read another tensor meanwhile
        if last is None or last[0] != name:
            tuned, start = self._pair(name)
            wide = torch.promote_types(torch.promote_types(tuned.dtype, start.dtype), torch.float32)
            # rounding in a narrower fine-tuned copy is no change
            precision = _precision(tuned)
            start = start.to(precision) if _narrower(precision, start.dtype) else start
            self._last = last = (name, tuned.to(wide) - start.to(wide))
        return last[1]


def _changed(tuned: Tensor, start: Tensor, name: str) -> bool:
    if not tuned.is_floating_point() and not start.is_floating_point():
        return False
    if not {tuned.dtype, start.dtype} <= _COMPUTED_WITH:
        own, base = (str(tensor.dtype).removeprefix("torch.") for tensor in (tuned, start))
        raise BrokenWeightsError(
            f"'{name}' is kept as {own} in the fine-tuned model and as {base} in the base",
            "use copies of both in float32, float16 or bfloat16",
        )
    for tensor, whose in ((tuned, "the fine-tuned model"), (start, "the base")):
        if not is_finite(tensor):
            raise NonFiniteWeightsError(
                f"'{name}' of {whose} holds NaN or infinite values", "use a checkpoint from before training diverged"
            )
    precision = _precision(tuned)
    wide = precision if _narrower(precision, start.dtype) else torch.promote_types(tuned.dtype, start.dtype)
    return not torch.equal(tuned.to(wide), start.to(wide))


def _precision(tuned: Tensor) -> torch.dtype:
    """Return the narrowest dtype that holds the tensor exactly: that of training, if it was widened since."""
    parts = (tuned.flatten()[:_FIRST], tuned)  # the first few values refute it for nearly every tensor
    for narrow in (torch.bfloat16, torch.float16):
        if _narrower(narrow, tuned.dtype) and all(torch.equal(part.to(narrow).to(part.dtype), part) for part in parts):
            return narrow
    return tuned.dtype


def _narrower(one: torch.dtype, other: torch.dtype) -> bool:
    return torch.finfo(one).eps > torch.finfo(other).eps


class RenamedChanges(LazyMapping[Change]):
    """Changes with some names replaced."""

    def __init__(self, source: Mapping[str, Change], names: Mapping[str, str]) -> None:
        self.source = source
        self.names = {names.get(name, name): name for name in source}

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self.source, self.names[name])

    def __getitem__(self, name: str) -> Change:
        return self.source[self.names[name]]


@dataclass
class StoredChanges(LazyMapping[Change]):
    """Changes in a checkpoint, read on access; the names in `low_rank` are stored as two factors."""

    checkpoint: Checkpoint
    low_rank: Collection[str] = ()

    def __post_init__(self) -> None:
        halves = {half for name in self.low_rank for half in factor_names(name)}
        self.names = dict.fromkeys([*(name for name in self.checkpoint.shapes if name not in halves), *self.low_rank])

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = self.checkpoint.shapes
        if name not in self.low_rank:
            return shapes[name]
        left, right = factor_names(name)
        return shapes[left][0], shapes[right][1]

    def __getitem__(self, name: str) -> Change:
        change: Change
        if name in self.low_rank:
            left, right = factor_names(name)
            change = Factors(self.checkpoint.tensor(left), self.checkpoint.tensor(right))
        else:
            change = self.checkpoint.tensor(name)
        _require_finite(change, name)
        return change


def _require_finite(change: Change, name: str) -> None:
    if not is_finite(change):
        raise NonFiniteWeightsError(
            f"the change of '{name}' holds NaN or infinite values", "make the task vector again from sound weights"
        )


def factor_names(name: str) -> tuple[str, str]:
    """Return the names under which the two factors of a change are stored."""
    return f"{name}.left", f"{name}.right"


MADE_FROM = "made_from"
_FORMAT = "hf-bico task vector"
_SCHEMA = 1
_LOW_RANK = "low_rank"


def write_delta(vector: Deltas, about: Mapping[str, Any], file: Path) -> None:
    """Write the changes without loss, with `about` in the file's metadata."""
    tensors: dict[str, Tensor] = {}
    low_rank = []
    for name, change in vector.changes():
        _require_finite(change, name)
        if isinstance(change, Factors):
            low_rank.append(name)
            tensors |= dict(zip(factor_names(name), (change.left, change.right), strict=True))
        else:
            tensors[name] = change
    factors = {_LOW_RANK: low_rank} if low_rank else {}
    header = json.dumps({"format": _FORMAT, "schema": _SCHEMA, **about, **factors}, sort_keys=True)
    # one metadata entry: safetensors does not promise an order of several
    save_tensors(tensors, file, {"hf_bico": header})


def read_delta(file: Path) -> tuple[StoredChanges, dict[str, Any]]:
    """Open the changes of a file, and return them with its metadata."""
    with open_safetensors(file, "pt") as reader:
        about = _read_header((reader.metadata() or {}).get("hf_bico", "{}"), file.name)
    low_rank, checkpoint = about.pop(_LOW_RANK, []), FileCheckpoint([file])
    for name, dtype in non_float_tensors(checkpoint).items():
        raise RecordError(
            f"'{name}' in '{file.name}' is kept as {dtype}, which is not a change", "save it again with this tool"
        )
    for name in low_rank:
        left, right = (checkpoint.shapes.get(half, ()) for half in factor_names(name))
        if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
            raise RecordError(f"'{file.name}' does not hold the factors of '{name}'", "save it again with this tool")
    return StoredChanges(checkpoint, low_rank), about


def _read_header(text: str, name: str) -> dict[str, Any]:
    try:
        header = parse_json(text)
    except ValueError:
        header = None
    known = isinstance(header, dict) and header.pop("format", None) == _FORMAT and header.pop("schema", None) == _SCHEMA
    repos, low_rank = (header.get(key, []) if known else [] for key in (MADE_FROM, _LOW_RANK))
    listed = isinstance(repos, list) and all(
        isinstance(repo, list) and len(repo) == 2 and all(isinstance(part, str) for part in repo) for repo in repos
    )
    named = isinstance(low_rank, list) and all(isinstance(name, str) for name in low_rank)
    if not known or not listed or not named:
        raise RecordError(f"'{name}' is not a task vector of schema {_SCHEMA}", "save it again with this tool")
    about: dict[str, Any] = header
    return about
