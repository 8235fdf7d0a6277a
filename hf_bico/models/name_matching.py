"""Match the tensors of a fine-tuned model with those of its base, by name and shape. Reads no weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hf_bico.errors import BaseMismatchError

_HEADS = ("classifier", "cls_classifier", "distillation_classifier", "classification_head", "score")


@dataclass(frozen=True)
class Overlap:
    """Tensors that a fine-tuned model and its base have in common."""

    names: dict[str, str] = field(default_factory=dict)
    """The name in the fine-tuned model of each tensor that both have, by its name in the base."""
    missing: tuple[str, ...] = ()
    """Tensors of the base that the fine-tuned model lacks: taken as unchanged."""
    extra: tuple[str, ...] = ()
    """Tensors of the fine-tuned model that the base lacks: nothing to compare them with."""


def reinitialised_head(
    places: Mapping[str, str], own: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """Return the head tensors whose shape differs from the base's: re-initialised for other classes.

    >>> reinitialised_head({"classifier.bias": "classifier.bias"}, {"classifier.bias": (3,)}, {"classifier.bias": (7,)})
    {'classifier.bias'}
    """
    heads = {name: name.partition(".")[0] for name in places}
    resized = {heads[name] for name, place in places.items() if place in base and own[name] != base[place]}
    return {name for name, head in heads.items() if head in resized and head in _HEADS}


def overlap(fine_tuned: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> Overlap:
    """Match a fine-tuned model's tensors with its base's; refuse other shapes."""
    base_name_of = align_names(fine_tuned, base)
    if not base_name_of:
        raise BaseMismatchError(
            "the fine-tuned model and its base have no tensor name in common",
            "name the model that was fine-tuned with --base",
        )
    resized_head = reinitialised_head(base_name_of, fine_tuned, base)
    base_name_of = {own: name for own, name in base_name_of.items() if own not in resized_head}
    for own, name in base_name_of.items():
        if fine_tuned[own] != base[name]:
            raise BaseMismatchError(
                f"'{name}' is {fine_tuned[own]} in the fine-tuned model and {base[name]} in the base",
                "name the model that was fine-tuned with --base",
            )
    names = {name: own for own, name in base_name_of.items()}
    return Overlap(
        names,
        missing=tuple(name for name in base if name not in names),
        extra=tuple(name for name in fine_tuned if name not in base_name_of),
    )


def align_names(names: Iterable[str], reference: Iterable[str]) -> dict[str, str]:
    """Map each of `names` to its name in `reference`, which may have a dotted prefix more or less.

    The prefix with the most matches decides, so a bare vision tower is found inside a whole model.

    >>> align_names(["encoder.0.w", "stem"], ["vision.encoder.0.w", "text.encoder.0.w", "vision.stem"])
    {'encoder.0.w': 'vision.encoder.0.w', 'stem': 'vision.stem'}
    """
    agreeing = _by_prefix_change(list(names), set(reference))
    candidates = [agreeing[change] for change in sorted(agreeing)]
    best, exact = max(candidates, key=len), agreeing["", ""]
    if len(exact) == len(best):
        return exact
    if sum(len(candidate) == len(best) for candidate in candidates) > 1:
        raise BaseMismatchError(
            f"'{next(iter(best))}' and similar tensors could belong to several parts of the model",
            "use the tensor names of the whole model",
        )
    return best


def _by_prefix_change(own: list[str], known: set[str]) -> dict[tuple[str, str], dict[str, str]]:
    """Return the matching names for each (dropped, added) prefix."""
    agreeing: dict[tuple[str, str], dict[str, str]] = {("", ""): {name: name for name in own if name in known}}
    asked = set(own)
    longer: dict[str, list[str]] = {}
    for name in known:
        for start in _suffix_starts(name):
            if name[start:] in asked:
                longer.setdefault(name[start:], []).append(name)
    for name in own:
        for other in longer.get(name, ()):
            agreeing.setdefault(("", other[: -len(name)]), {})[name] = other
        for start in _suffix_starts(name):
            if name[start:] in known:
                agreeing.setdefault((name[:start], ""), {})[name] = name[start:]
    return agreeing


def _suffix_starts(name: str) -> list[int]:
    return [index + 1 for index, letter in enumerate(name) if letter == "."]
