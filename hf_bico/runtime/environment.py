"""Where, when and how exactly a run happens: device, precision, stage times, peak memory, versions."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hf_bico.errors import DeviceError, MemoryExhaustedError, UsageError
from hf_bico.utils.progress import Progress, silent

PACKAGES = ("torch", "transformers", "peft", "open_clip_torch", "safetensors", "datasets")

_NO_HALF = "mkldnn_matmul failed"
"""How the warning of a CPU without bfloat16 begins."""

Result = TypeVar("Result")


@dataclass
class Stopwatch:
    """Seconds by stage, in the order in which the stages first ran; beginnings, steps and ends are told on."""

    tell: Progress = silent
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    """Of the stages that counted theirs."""

    def progress(self, stage: str, done: int, total: int) -> None:
        self.steps[stage] = total
        self.tell(stage, done, total)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.tell(stage, 0, self.steps.get(stage, 1))
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - started, 3)
        steps = self.steps.get(stage, 1)
        self.tell(stage, steps, steps)


def choose_device(name: str) -> torch.device:
    """`auto` takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device '{name}'", "use auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"the device '{name}' has no float64, which the maps need", "use --device cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"this machine has no CUDA device '{name}' that torch can use", "use --device cpu")
    return device


def choose_dtype(name: str) -> torch.dtype:
    """`auto` is float32: the models run in it whatever they are stored in."""
    chosen: torch.dtype = getattr(torch, "float32" if name == "auto" else name)
    return chosen


def halving_batches(size: int, run: Callable[[int], Result], leaner: Callable[[int], Result] | None = None) -> Result:
    """`run` with batches of this size; where memory runs out, again with half of it.

    Where it runs out with one sample too, that sample by `leaner`, if there is such a way.
    """
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
    """Where the device's memory runs out, and nothing leaner is left to try, that is said."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryExhaustedError("the device's memory ran out", "use --device cpu, or a device with more") from error


def prefetch(items: Iterator[Result]) -> Iterator[Result]:
    """The items, each made in a thread of its own while the one before it is used.

    >>> list(ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    end = object()
    with ThreadPoolExecutor(max_workers=1) as worker:
        coming = worker.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = worker.submit(next, items, end)
            yield cast(Result, item)


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of main memory on the device, which is not waited for: what it was told before may take its time."""
    tensor = tensor.to(dtype or tensor.dtype)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32 and no autocast, whatever the caller has set: their rounding would show in the maps.

    The first bfloat16 product on a CPU that has none makes torch warn and leave oneDNN for good: nobody is told, and
    afterwards it is used as before.
    """
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    settings: list[tuple[Any, str, Any]] = [
        (mkldnn, "enabled", mkldnn.enabled),
        (cudnn, "deterministic", True),
        (cudnn.conv, "fp32_precision", "ieee"),
        (torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    ]
    before = [(part, name, getattr(part, name)) for part, name, _ in settings]
    try:
        for part, name, value in settings:
            setattr(part, name, value)
        _ignore(_NO_HALF)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def _ignore(message: str) -> None:
    """For good: to put filters back would make Python forget which warnings it has shown."""
    if not any(getattr(pattern, "pattern", None) == message for _, pattern, *_ in warnings.filters):
        warnings.filterwarnings("ignore", message)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU where it did the work, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_memory(device: torch.device) -> int:
    """Bytes that this process can have: of the GPU where it does the work, else of main memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    import psutil

    own = psutil.Process().memory_info()
    # pages of files are available all the same
    return int(psutil.virtual_memory().available) + own.rss - getattr(own, "shared", 0)


def installed_versions() -> dict[str, str]:
    found = {package: _version_of(package) for package in PACKAGES}
    return {package: number for package, number in found.items() if number is not None}


@cache
def _version_of(package: str) -> str | None:
    """Looked up once: it reads through all that is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
