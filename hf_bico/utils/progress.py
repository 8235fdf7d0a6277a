"""How far a job is: told to whoever wants to show it, or shown as bars. Knows nothing of the jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""


def silent(stage: str, done: int, total: int) -> None:
    """No progress shown."""


def show_progress() -> Progress:
    """A bar for each stage while it runs, in a notebook or a terminal; pass what it returns as `progress`.

    >>> hf_bico.port("user/vit-b16-eurosat", to="laion/ViT-B-16-plus", progress=show_progress())  # doctest: +SKIP
    """
    from tqdm.auto import tqdm

    bars: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            counted = {"unit": "B", "unit_scale": True} if stage == "download" else {}
            bars[stage] = tqdm(desc=stage, total=total, leave=False, **counted)
        bar = bars[stage]
        if bar.total != total:
            bar.reset(total)
        bar.update(done - bar.n)
        if done >= total:
            bars.pop(stage).close()

    return show
