"""Which objective two models are asked by, and how they are measured, where nobody has said it.

Works on settings and layouts: no weights, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hf_bico.errors import UnsupportedModelError, UsageError
from hf_bico.models.layout import TEXT_SIDE, Layout
from hf_bico.settings import PROBE, Settings

TEXT_TO_TEXT = "text-to-text"


def settled(settings: Settings, source: Layout, target: Layout) -> Settings:
    """The settings with an objective that both models can give, and with its usual way to measure."""
    if isinstance(settings.objective, str):
        settings = replace(settings, objective=_objective(settings.objective, source, target))
    if settings.evaluation != "auto":
        return settings
    # an encoder is measured by what can be read from it, as in the paper
    return replace(settings, evaluation=PROBE if settings.objective == TEXT_TO_TEXT else "zero-shot")


def without_labels(settings: Settings, asked: str) -> Settings:
    """The settings for data without labels, where `asked` is how to measure: a probe is fitted to labels."""
    if settings.evaluation == "zero-shot" or not settings.evaluate:
        return settings
    if asked != "auto":
        raise UsageError(
            f"--evaluation {asked} fits a linear probe to labels, and the data has none",
            "use data with labels, or leave --evaluation out",
        )
    return replace(settings, evaluation="zero-shot")


def towers_of(settings: Settings, changed: Collection[str], predicts: bool) -> tuple[str, ...]:
    """Which towers of a CLIP are carried: those that were asked for, else those that the source changed.

    What `predicts` classes, or was asked to be zero-shot, looks at the vision tower alone.
    """
    if settings.tower is not None:
        return {"vision": ("",), "text": (TEXT_SIDE,), "both": ("", TEXT_SIDE)}[settings.tower]
    return tuple(changed) if TEXT_SIDE in changed and not predicts else ("",)


def _objective(asked: str, source: Layout, target: Layout) -> str:
    shared = [name for name in source.objectives if name in target.objectives]
    if asked == "auto" and shared:
        return shared[0]
    if asked in shared:
        return asked
    if shared:
        raise UnsupportedModelError(
            f"these models cannot be asked by the objective '{asked}'", f"use one of: auto, {', '.join(shared)}"
        )
    require_kin(source, target)
    raise UnsupportedModelError(
        f"{_named(source, target)} cannot be asked anything by itself, as the objective '{asked}' does",
        "port from Python, with objective= a callable (model, batch) -> loss",
    )


def require_kin(source: Layout, target: Layout) -> None:
    """Refuse two models that are asked in ways that have nothing in common."""
    if source.objectives and target.objectives and not set(source.objectives) & set(target.objectives):
        raise UnsupportedModelError(
            f"the base, of the family {source.family}, is asked by {source.objectives[0]} and the target, of the "
            f"family {target.family}, by {target.objectives[0]}: they have no objective in common",
            "choose a target of the base's kind",
        )


def _named(*layouts: Layout) -> str:
    without: Sequence[Layout] = [layout for layout in layouts if not layout.objectives] or layouts
    return f"a {without[0].kind}" if without[0].kind else f"a model of the family {without[0].family}"
