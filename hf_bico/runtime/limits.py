"""What the machine gives this process, asked without torch: memory that it may address, a driver of a GPU.

Knows no job.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

from hf_bico.errors import DeviceError, MemoryExhaustedError
from hf_bico.utils.text import size_text

_ENOUGH = 2**34
"""Bytes in which the libraries can be loaded on every machine."""
_LIBRARIES = "import torch, torchvision, open_clip, transformers, peft, datasets, sklearn"
RAISE_LIMIT = "raise the limit with 'ulimit -v unlimited', or run on a machine without one"


def address_limit() -> int | None:
    """Return the bytes that this process may address (ulimit -v); None if there is no limit."""
    try:
        import resource
    except ImportError:  # on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def require_gpu_driver(device: str) -> None:
    """Refuse a GPU that torch could not find, because the machine has no driver for one."""
    if not device.startswith("cuda") or sys.platform != "linux" or os.path.exists("/dev/kfd"):  # AMD's
        return
    try:
        ctypes.CDLL("libcuda.so.1")  # as torch does
    except OSError as error:
        raise no_device(device) from error


def no_device(device: str) -> DeviceError:
    return DeviceError(f"this machine has no CUDA device '{device}' that torch can use", "use --device cpu")


def require_address_space() -> None:
    """Refuse a limit within which the libraries cannot be loaded.

    Tried in a second process, because some of them print a line of their own and end theirs.
    """
    limit = address_limit()
    if limit is None or limit >= _ENOUGH:
        return
    try:
        tried = subprocess.run([sys.executable, "-c", _LIBRARIES], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise DeviceError(f"no second Python can be started: {error.strerror}", "close other programs") from error
    if tried.returncode != 0:
        said = next(reversed(tried.stderr.strip().splitlines()), "it ends at once")
        raise MemoryExhaustedError(
            f"the {size_text(limit)} of address space are too little to load torch: {said[:200]}",
            RAISE_LIMIT,
        )
