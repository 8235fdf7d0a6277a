"""How often the models run, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from support.scenes import SOURCE, TARGET

ONE_PASS = ("bico", "bico-fisher", "input-only", "output-only", "gradient-only", "theseus")
CLASSES = 4
TOWERS = {SOURCE.width: "source", TARGET.width: "target"}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Forward passes of either visual tower, and calls of autograd, while inside."""
    counts: Counter[str] = Counter()

    def hook(module: nn.Module, _: Any) -> None:
        if type(module).__name__ == "VisionTransformer":
            counts[TOWERS[module.conv1.out_channels]] += 1  # type: ignore[union-attr, index]

    gradient = torch.autograd.grad

    def grad(*arguments: Any, **options: Any) -> Any:
        counts["backward"] += 1
        return gradient(*arguments, **options)

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        with monkeypatch.context() as context:
            context.setattr(torch.autograd, "grad", grad)
            yield counts
    finally:
        handle.remove()
