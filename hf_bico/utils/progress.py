"""Define the progress callback, and show progress as bars. Knows nothing of the jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def show_progress() -> Progress:
    """Return a callback, to pass as `progress`, that draws a bar per stage in a notebook or terminal.

    >>> hf_bico.port("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", progress=show_progress())  # doctest: +SKIP
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
