"""Choose device and precision, time stages, measure memory, list package versions. Knows no job."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hf_bico.errors import DeviceError, MemoryExhaustedError, UsageError
from hf_bico.runtime.limits import no_device
from hf_bico.runtime.turns import job_turn
from hf_bico.utils.progress import Progress, silent

PACKAGES = ("torch", "transformers", "peft", "open_clip_torch", "safetensors", "datasets")

_IS_OLD_TORCH = not hasattr(torch.backends.cudnn, "conv")
"""Whether torch is older than 2.9, with other names for its precision and its allocator."""

T = TypeVar("T")


@dataclass
class Stopwatch:
    """Seconds by stage, in the order of first use; starts, steps and ends go to the callback."""

    callback: Progress = silent
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    """The number of steps, for stages that report them."""

    def progress(self, stage: str, done: int, total: int) -> None:
        self.steps[stage] = total
        self.callback(stage, done, total)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.callback(stage, 0, self.steps.get(stage, 1))
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - started, 3)
        steps = self.steps.get(stage, 1)
        self.callback(stage, steps, steps)


def choose_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the GPU if there is one.

    Large maps need large pieces of its memory: unless the environment says otherwise, torch takes it in segments that
    grow, so that freed pieces join.
    """
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        setting = "PYTORCH_CUDA_ALLOC_CONF" if _IS_OLD_TORCH else "PYTORCH_ALLOC_CONF"
        os.environ.setdefault(setting, "expandable_segments:True")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device '{name}'", "use auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"the device '{name}' has no float64, which the maps need", "use --device cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise no_device(name)
    return device


def choose_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; `auto` is float32, whatever the models are stored in."""
    chosen: torch.dtype = getattr(torch, "float32" if name == "auto" else name)
    return chosen


def halving_batches(size: int, run: Callable[[int], T], leaner: Callable[[int], T] | None = None) -> T:
    """Call `run` with this batch size, and with half of it each time memory runs out; then `leaner(1)` if given."""
    attempts = [partial(run, size >> halvings) for halvings in range(size.bit_length())]
    if leaner is not None:
        attempts.append(partial(leaner, 1))
    for attempt in attempts:
        with suppress(torch.OutOfMemoryError):
            return attempt()
        torch.cuda.empty_cache()
    raise MemoryExhaustedError("the device has too little memory for the models and one sample", "use --device cpu")


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn torch's out-of-memory error into ours."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryExhaustedError("the device's memory ran out", "use --device cpu, or a device with more") from error


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, computing the next one in a thread while the current one is used.

    >>> list(prefetch(iter("abc")))
    ['a', 'b', 'c']
    """
    end = object()
    with ThreadPoolExecutor(max_workers=1) as worker:
        future = worker.submit(next, items, end)
        while (item := future.result()) is not end:
            future = worker.submit(next, items, end)
            yield cast(T, item)


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy to the device without blocking, through pinned memory."""
    tensor = tensor.to(dtype or tensor.dtype)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute in torch's usual precision, dtype and device, whatever the caller has set: it would show in the maps.

    TF32, bfloat16 in place of float32, and autocast are off. Jobs of several threads take turns. Afterwards all
    settings are as they were.
    """
    exact = _exact_settings()
    with job_turn():
        before = [(part, name, getattr(part, name)) for part, name, _ in exact]
        mkldnn: Any = torch.backends.mkldnn
        before.append((mkldnn, "enabled", mkldnn.enabled))  # a job may turn it off
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        try:
            for part, name, value in exact:
                setattr(part, name, value)
            torch.set_default_dtype(torch.float32)
            with (
                torch.autocast("cpu", enabled=False),
                torch.autocast("cuda", enabled=False),
                nullcontext() if device.type == "cpu" else torch.device("cpu"),
            ):
                yield
        finally:
            torch.set_default_dtype(dtype)
            for part, name, value in before:
                setattr(part, name, value)


def _exact_settings() -> list[tuple[Any, str, Any]]:
    """Return where torch holds each setting of its precision, the setting's name, and its exact value."""
    backends: Any = torch.backends
    deterministic = (backends.cudnn, "deterministic", True)
    if _IS_OLD_TORCH:
        return [deterministic, (backends.cudnn, "allow_tf32", False), (_Products(), "precision", "highest")]
    parts = (backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.conv, backends.mkldnn.matmul)
    return [deterministic, *((part, "fp32_precision", "ieee") for part in parts)]


class _Products:
    """The one precision that torch before 2.9 has for products on all devices."""

    @property
    def precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @precision.setter
    def precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)


def keep_bfloat16_off_onednn(*models: nn.Module) -> None:
    """Turn oneDNN off for the rest of the job if a model is of bfloat16, and this CPU has no such products.

    At the first of them torch would do the same, with a warning; `exact_float32` turns it on again.
    """
    mkldnn: Any = torch.backends.mkldnn
    if mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        mkldnn.enabled &= all(part.dtype is not torch.bfloat16 for model in models for part in model.parameters())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes: of the GPU if that is the device, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, kB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_memory(device: torch.device) -> int:
    """Return the bytes that this process can use: of the GPU if that is the device, else of main memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    import psutil

    own = psutil.Process().memory_info()
    # memory-mapped files (shared) are reclaimable, so they are available already
    return int(psutil.virtual_memory().available) + own.rss - getattr(own, "shared", 0)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    packages = {package: number for package in PACKAGES if (number := _version_of(package)) is not None}
    return {"Python": platform.python_version(), **packages}


@cache  # each lookup scans all installed packages
def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
