"""What the libraries underneath raise, as our errors: the last net of every public entry.

Most of it is caught where it happens, with a better cause. Knows the libraries' errors by name, and imports none.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_bico.errors import (
    AccessError,
    AdapterError,
    BicoError,
    BrokenWeightsError,
    DataError,
    DeviceError,
    HubUnavailableError,
    MemoryExhaustedError,
    ModelError,
    OutputError,
    PickledWeightsError,
    ProcessLostError,
    RepoNotFoundError,
    UnforeseenError,
    UnreadableSampleError,
)
from hf_bico.utils import __version__

DEBUG = "HF_BICO_DEBUG"
_HERE = Path(__file__).parent.parent
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = ("No space left on device", "os error 28)", "Disk quota exceeded", "os error 122)", "File too large")
_MEMORY_WORDS = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")
_LONGEST = 300
_INSTALLED = Path(sysconfig.get_path("purelib")).name
_LOADERS: dict[str, tuple[type[BicoError], str]] = {
    "transformers": (ModelError, "the model"),
    "open_clip": (ModelError, "the model"),
    "timm": (ModelError, "the model"),
    "peft": (AdapterError, "the adapter"),
    "datasets": (DataError, "the data set"),
    "evaluate": (DataError, "the metric"),
    "PIL": (UnreadableSampleError, "an image"),
}
"""What a package was most likely given, where it raises what says little."""


Told = tuple[type[BicoError], str, str]
"""An error of ours, with its cause, which what the library said goes behind, and its remedy."""

_MEMORY: Told = (
    MemoryExhaustedError,
    "the memory ran out",
    "use a smaller --batch-size, --memory, --device cpu, or a machine with more",
)
_HUB: Told = (HubUnavailableError, "the Hub cannot be read", "try again in a while")
_DATA: Told = (DataError, "the data set cannot be read", "see where datasets.load_dataset breaks over it")
_MODEL: Told = (ModelError, "a model's files cannot be read", "load it with its own library to see what is wrong")
_IMAGE: Told = (UnreadableSampleError, "an image cannot be decoded", "remove it from the data set")
_FULL_DISK: Told = (OutputError, "the disk is full", "free some space, then run the same command again")

_KNOWN: dict[str, Told] = {
    "torch.OutOfMemoryError": _MEMORY,
    "builtins.MemoryError": _MEMORY,
    "torch.AcceleratorError": (DeviceError, "the device failed", "try again, or use --device cpu"),
    "torch.distributed.DistError": (
        ProcessLostError,
        "the processes of this job lost each other",
        "start the job again",
    ),
    "safetensors._safetensors_rust.SafetensorError": (
        BrokenWeightsError,
        "a weight file cannot be read",
        "copy or download the model again",
    ),
    "_pickle.UnpicklingError": (
        PickledWeightsError,
        "a pickled file holds more than tensors",
        "save the model again as safetensors",
    ),
    "huggingface_hub.errors.GatedRepoError": (
        AccessError,
        "a repo is gated",
        "accept its conditions on its page, then log in with 'hf auth login'",
    ),
    "huggingface_hub.errors.RepositoryNotFoundError": (
        RepoNotFoundError,
        "a repo is not on the Hub, or private",
        "check the name, or log in with 'hf auth login'",
    ),
    "huggingface_hub.errors.HfHubHTTPError": _HUB,
    "huggingface_hub.errors.OfflineModeIsEnabled": _HUB,
    "huggingface_hub.errors.LocalEntryNotFoundError": _HUB,
    "huggingface_hub.errors.StrictDataclassError": _MODEL,
    "httpx.HTTPError": _HUB,
    "httpx2.HTTPError": _HUB,
    "builtins.ConnectionError": _HUB,
    "datasets.exceptions.DatasetsError": _DATA,
    "datasets.exceptions.DatasetGenerationError": _DATA,
    "pyarrow.lib.ArrowException": _DATA,
    "PIL.UnidentifiedImageError": _IMAGE,
    "PIL.Image.DecompressionBombError": _IMAGE,
    "jinja2.exceptions.TemplateError": (
        DataError,
        "the tokenizer's chat template cannot be used",
        "use the fine-tuned model's own tokenizer files",
    ),
    "yaml.error.YAMLError": (ModelError, "a card or configuration is no YAML", "mend that file"),
}
"""By the name of the class, or of one that it is derived from."""


@contextmanager
def translate_errors() -> Iterator[None]:
    """What the libraries raise inside leaves as our error, and what nobody foresaw as a bug with a short id.

    Errors of the caller's own code, called back from inside, and of a wrong call pass as they are.
    """
    try:
        yield
    except BicoError:
        raise
    except BaseException as error:
        if not is_failure(error) or is_debugging() or _is_callers(error):
            raise
        raise as_ours(error) from error


def is_failure(error: BaseException) -> bool:
    """Whether something went wrong, as against a wish to stop; what panics in Rust is no Exception for Python."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def is_debugging() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get(DEBUG) == "1"


def as_ours(error: BaseException) -> BicoError:
    """The error of ours that one of a library's stands for."""
    said, library = _first_line(error), _raised_in(error)
    found = _told(error)
    if found is not None:
        kind, cause, remedy = found
        return kind(f"{cause}: {said}" if said else cause, remedy)
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if library in _LOADERS:
        kind, given = _LOADERS[library]
        remedy = f"see whether {library} itself can; if so, please report it as {bug_id(error)}"
        return kind(f"{library} cannot use {given}: {what}", remedy)
    return UnforeseenError(
        f"unexpected {what} [{bug_id(error)}]",
        f"please report it by that number, with what the same command prints after {DEBUG}=1",
    )


def _told(error: BaseException) -> Told | None:
    """What is to be told of an error that is known by its class, its number, or its words."""
    if _is_full(error):
        return _FULL_DISK
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_WORDS):
        return _MEMORY
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    known = next((_KNOWN[name] for name in names if name in _KNOWN), None)
    if known is not None or not isinstance(error, OSError):
        return known
    if error.errno is None:  # by the same class libraries say what they cannot load
        return _MODEL
    return OutputError, "a file cannot be read or written", "see whose it is, and run it again"


def bug_id(error: BaseException) -> str:
    """The same for the same bug of the same version on every machine: its kind, and the way to it through our modules.

    >>> bug_id(ValueError("x")) == bug_id(ValueError("y"))
    True
    """
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(_HERE)
    ]
    way = [f"{Path(frame.filename).relative_to(_HERE).as_posix()}:{frame.lineno}" for frame in frames[-3:]]
    found = hashlib.sha256("\n".join([__version__, type(error).__name__, *way]).encode())
    return f"bico-{found.hexdigest()[:8]}"


def _is_callers(error: BaseException) -> bool:
    """Whether it was raised by the call itself, or below code that is neither ours nor a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.filename for frame in frames]
    own = [place for place, name in enumerate(names) if Path(name).is_relative_to(_HERE) and name != __file__]
    if not own:
        return True
    return any(not _is_library(name) for name in names[own[0] :])


def _is_library(file: str) -> bool:
    made = file.startswith("<") and not file.startswith(("<stdin", "<ipython"))  # a data class's, a template's
    return made or file.startswith((str(_HERE), *_LIBRARIES))


def _raised_in(error: BaseException) -> str | None:
    """The innermost installed package that is neither torch nor ours."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    installed = [file.parts[file.parts.index(_INSTALLED) + 1] for file in files if _INSTALLED in file.parts]
    return next((name for name in reversed(installed) if name not in ("torch", _HERE.name)), None)


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(words in str(error) for words in _FULL_WORDS)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:_LONGEST] if lines else ""
