"""What a whole process shares, as far as this package or a library under it could change it."""

from __future__ import annotations

import locale
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import warnings
from typing import Any

import datasets
import huggingface_hub.utils
import matplotlib
import numpy as np
import PIL.Image
import PIL.ImageFile
import torch
import transformers
from torch import nn
from torch.nn.modules import module as torch_module


def process_state() -> dict[str, Any]:
    """Return everything by name, in values that can be compared."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        **_torch_state(),
        **{f"logger {name}": value for name, value in _loggers().items()},
        "warnings.filters": list(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "logging.disable": logging.root.manager.disable,
        "datasets' progress bars": datasets.are_progress_bars_disabled(),
        "huggingface_hub's progress bars": huggingface_hub.utils.are_progress_bars_disabled(),
        "transformers' progress bars": transformers.utils.logging.is_progress_bar_enabled(),
        "matplotlib's settings": dict(matplotlib.rcParams),
        "Pillow's limits": (PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES),
        "the random numbers of Python": random.getstate(),
        "the random numbers of numpy": str(np.random.get_state()),
        "numpy's errors": np.geterr(),
        "the environment": dict(os.environ),
        "the current folder": os.getcwd(),
        "the umask": umask,
        "the locale": locale.setlocale(locale.LC_ALL),
        "the temporary folder": tempfile.gettempdir(),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks of Python": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "sys.path": list(sys.path),
        "limits of Python": (sys.getrecursionlimit(), sys.getswitchinterval(), socket.getdefaulttimeout()),
    }


def _torch_state() -> dict[str, Any]:
    backends: Any = torch.backends
    flags = {
        f"torch.backends.{path}": _read(backends, path)
        for path in (
            *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.fp32_precision"),
            *("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "cudnn.allow_tf32"),
            *("cuda.matmul.fp32_precision", "cuda.matmul.allow_tf32"),
            *("cuda.matmul.allow_fp16_reduced_precision_reduction", "fp32_precision"),
            *("mkldnn.enabled", "mkldnn.deterministic", "mkldnn.fp32_precision"),
            *("mkldnn.conv.fp32_precision", "mkldnn.matmul.fp32_precision"),
        )
    }
    return {
        **flags,
        "torch's precision": torch.get_float32_matmul_precision(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch's modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch's autocast": tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        "torch's determinism": torch.are_deterministic_algorithms_enabled(),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "torch's hooks": {name: dict(hooks) for name, hooks in vars(torch_module).items() if _is_hooks(name, hooks)},
        "torch's initialisation": {name: vars(nn.init)[name] for name in dir(nn.init) if name.endswith("_")},
        "transformers' initialisation": transformers.PreTrainedModel.init_weights,
    }


def _is_hooks(name: str, value: object) -> bool:
    return name.startswith("_global") and isinstance(value, dict)


def _read(place: Any, path: str) -> object:
    try:
        for part in path.split("."):
            place = getattr(place, part)
        return place
    except (AttributeError, RuntimeError) as error:  # not in old torch; or refused once it was set by its new name
        return f"{type(error).__name__}: {error}"[:60]


def _loggers() -> dict[str, Any]:
    found = {"root": logging.root, **logging.root.manager.loggerDict}
    return {
        name: (one.level, one.disabled, one.propagate, list(one.handlers), list(one.filters))
        for name, one in found.items()
        if isinstance(one, logging.Logger)
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of what is not as it was; loggers that were made meanwhile do not count."""
    return [name for name, value in before.items() if after.get(name) != value]


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return what can be seen of a loaded model: weights, flags, hooks, gradients, places, attributes."""
    found: dict[str, Any] = {"state": {name: (id(t), t._version) for name, t in module.named_parameters()}}
    for name, part in module.named_modules():
        found[name] = {key: _seen(value) for key, value in vars(part).items()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found[f"{name} flags"] = (tensor.requires_grad, tensor.dtype, tensor.device, tensor.data_ptr(), tensor.grad)
        found[f"{name} hooks"] = tensor._backward_hooks
    config: Any = getattr(module, "config", None)
    return {**found, "config": config.to_dict() if hasattr(config, "to_dict") else None}


def _seen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: id(inner) for key, inner in value.items()}
    return value if isinstance(value, bool | int | float | str | None) else id(value)
