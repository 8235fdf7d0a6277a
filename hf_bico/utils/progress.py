"""Define the progress callback, and show progress as bars. Knows nothing of the jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""


ShownProgress = Progress | bool | None
"""What jobs take as `progress`: a callback, True for bars, or False or None for nothing."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def callback_of(progress: ShownProgress) -> Progress:
    """Return the callback that a caller's `progress` stands for.

    >>> callback_of(None) is silent and callback_of(False) is silent and callback_of(print) is print
    True
    """
    if progress is True:
        return show_progress()
    return progress if callable(progress) else silent


def show_progress() -> Progress:
    """Return a callback that draws a bar per stage in a notebook or terminal, as `progress=True` does.

    >>> hf_bico.port("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", progress=True)  # doctest: +SKIP
    """
    from tqdm.auto import tqdm

    bars: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            unit = {"unit": "B", "unit_scale": True} if stage == "download" else {}
            bars[stage] = tqdm(desc=stage, total=total, leave=False, **unit)
        bar = bars[stage]
        if bar.total != total:
            bar.reset(total)
        bar.update(done - bar.n)
        if done >= total:
            bars.pop(stage).close()

    return show
