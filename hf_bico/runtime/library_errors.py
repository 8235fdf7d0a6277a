"""Translate library errors into ours, at every public entry point.

Most errors are caught where they happen, with a better cause; these are the rest. Knows the libraries' error classes
by name, and imports none of them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hf_bico.arguments import as_written
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
from hf_bico.runtime.limits import RAISE_LIMIT, address_limit
from hf_bico.utils import __version__
from hf_bico.utils.text import size_text

DEBUG = "HF_BICO_DEBUG"
_PACKAGE = Path(__file__).parent.parent
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_DISK_FULL_ERRNO = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_FULL_WORDS = ("No space left on device", "os error 28)", "Disk quota exceeded", "os error 122)", "File too large")
_MEMORY_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "out of memory",
    "failed to map segment from shared object",
    "std::bad_alloc",
)
_NO_THREAD = ("can't start new thread", "Failed to launch worker thread")
_OPEN_FILES_ERRNO = (errno.EMFILE, errno.ENFILE)
_MAX_MESSAGE = 300
_SITE_PACKAGES = Path(sysconfig.get_path("purelib")).name
_LOADERS: dict[str, tuple[type[BicoError], str]] = {
    **dict.fromkeys(("transformers", "open_clip", "timm"), (ModelError, "the model")),
    "peft": (AdapterError, "the adapter"),
    "datasets": (DataError, "the data set"),
    "evaluate": (DataError, "the metric"),
    "PIL": (UnreadableSampleError, "an image"),
}
"""For unknown errors: by package, the error class and the thing that it most likely was loading."""

Translation = tuple[type[BicoError], str, str]
"""Our error class, its cause (the library's message is appended) and its remedy."""

_MORE_MEMORY = "use a smaller --batch-size, --memory, --device cpu, or a machine with more"
_MEMORY = (MemoryExhaustedError, "the memory ran out", _MORE_MEMORY)
_THREADS = (DeviceError, "this machine gives no further thread", "close other programs, or raise 'ulimit -u'")
_FILES = (DeviceError, "too many files are open", "close other programs, or raise the limit with 'ulimit -n 4096'")
_PROCESSES = (ProcessLostError, "the processes of this job lost each other", "start the job again")
_WEIGHTS = (BrokenWeightsError, "a weight file cannot be read", "copy or download the model again")
_PICKLE = (PickledWeightsError, "a pickled file holds more than tensors", "save the model again as safetensors")
_GATED = (AccessError, "a repo is gated", "accept its conditions on its page, then log in with 'hf auth login'")
_NO_REPO = (RepoNotFoundError, "a repo is not on the Hub, or private", "check the name, or log in with 'hf auth login'")
_CHAT = (DataError, "the tokenizer's chat template cannot be used", "use the fine-tuned model's own tokenizer files")
_HUB = (HubUnavailableError, "the Hub cannot be read", "try again later")
_DATA = (DataError, "the data set cannot be read", "load it with datasets.load_dataset to see what is wrong")
_MODEL = (ModelError, "a model's files cannot be read", "load it with its own library to see what is wrong")
_IMAGE = (UnreadableSampleError, "an image cannot be decoded", "remove it from the data set")
_NO_TEMPORARY = (OutputError, "no folder for temporary files is writable", "set TMPDIR to a folder that is writable")
_FULL_DISK = (OutputError, "the disk is full", "free some space, then run the same command again")

_BY_CLASS: dict[str, Translation] = {
    "torch.OutOfMemoryError": _MEMORY,
    "builtins.MemoryError": _MEMORY,
    "torch.AcceleratorError": (DeviceError, "the device failed", "try again, or use --device cpu"),
    "torch.distributed.DistError": _PROCESSES,
    "safetensors._safetensors_rust.SafetensorError": _WEIGHTS,
    "_pickle.UnpicklingError": _PICKLE,
    "huggingface_hub.errors.GatedRepoError": _GATED,
    "huggingface_hub.errors.RepositoryNotFoundError": _NO_REPO,
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
    "jinja2.exceptions.TemplateError": _CHAT,
    "yaml.error.YAMLError": (ModelError, "a card or configuration is not valid YAML", "fix that file"),
}
"""By the qualified name of the error's class or of one of its base classes."""


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise library errors as ours, and unexpected ones as a bug with a short id.

    Unless a command line was typed, the errors name arguments and not options.
    Errors of the caller's own callbacks and of a wrong call pass unchanged.
    """
    try:
        yield
    except BicoError as error:
        known = as_bico_error(error)
        known.reword(as_written)
        if known is error:
            raise
        raise known from error
    except BaseException as error:
        if not is_failure(error) or is_debugging() or _is_callers(error):
            raise
        known = as_bico_error(error)
        known.reword(as_written)
        raise known from error


def is_failure(error: BaseException) -> bool:
    """Tell a failure from a request to stop; a panic in Rust is not an Exception in Python."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def is_debugging() -> bool:
    """Return whether the user wants tracebacks."""
    return os.environ.get(DEBUG) == "1"


def as_bico_error(error: BaseException) -> BicoError:
    """Translate a library's error; one of ours stays, unless a limit on memory or threads of this process is behind."""
    limit = address_limit()
    if limit is not None and (short := _shortage(error, ("MemoryError", *_MEMORY_WORDS, *_NO_THREAD))):
        message = next(iter(str(short).strip().splitlines()), type(short).__name__)[:_MAX_MESSAGE]
        cause = f"the {size_text(limit)} of address space are too little: {message}"
        return MemoryExhaustedError(cause, RAISE_LIMIT)
    if isinstance(error, BicoError):
        short = _shortage(error, _NO_THREAD)
        if short is None or isinstance(short, BicoError):
            return error
        error = short
    message = next(iter(str(error).strip().splitlines()), "")[:_MAX_MESSAGE]
    if translation := _translation(error):
        kind, cause, remedy = translation
        return kind(f"{cause}: {message}" if message else cause, remedy)
    description = f"{type(error).__name__}: {message}" if message else type(error).__name__
    library = _raised_in(error)
    if library in _LOADERS:
        kind, given = _LOADERS[library]
        remedy = f"see whether {library} itself can; if so, please report it as {bug_id(error)}"
        return kind(f"{library} cannot use {given}: {description}", remedy)
    return UnforeseenError(
        f"unexpected {description} [{bug_id(error)}]",
        f"please report it by that number, with what the same command prints after {DEBUG}=1",
    )


def _shortage(error: BaseException | None, words: Sequence[str]) -> BaseException | None:
    """Return the first error behind this one that says in these words that something is not given."""
    while error is not None and not isinstance(error, MemoryExhaustedError):
        if any(word in f"{type(error).__name__}: {error}" for word in words):
            return error.__cause__ if isinstance(error, BicoError) and error.__cause__ is not None else error
        error = error.__cause__ or error.__context__
    return None


def _translation(error: BaseException) -> Translation | None:
    """Look an error up by its errno, its words or its class."""
    if isinstance(error, OSError) and error.errno in _OPEN_FILES_ERRNO:
        return _FILES
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return _NO_TEMPORARY
    has_no_room = isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNO
    if has_no_room or any(words in str(error) for words in _DISK_FULL_WORDS):
        return _FULL_DISK
    if isinstance(error, RuntimeError | ImportError) and any(words in str(error) for words in _MEMORY_WORDS):
        return _MEMORY
    if any(words in str(error) for words in _NO_THREAD):
        return _THREADS
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    known = next((_BY_CLASS[name] for name in names if name in _BY_CLASS), None)
    if known is not None or not isinstance(error, OSError):
        return known
    if error.errno is None:  # libraries raise plain OSError for files that they cannot load
        return _MODEL
    return (
        OutputError,
        "a file cannot be read or written",
        "check its owner and permissions, then run the same command again",
    )


def bug_id(error: BaseException) -> str:
    """Return an id from version, error class and our last frames: the same for the same bug on every machine.

    >>> bug_id(ValueError("x")) == bug_id(ValueError("y"))
    True
    """
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    path = [f"{Path(frame.filename).relative_to(_PACKAGE).as_posix()}:{frame.lineno}" for frame in frames[-3:]]
    digest = hashlib.sha256("\n".join([__version__, type(error).__name__, *path]).encode())
    return f"bico-{digest.hexdigest()[:8]}"


def _is_callers(error: BaseException) -> bool:
    """Return whether it comes from the call itself, or from below code that is neither ours nor a library's."""
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [index for index, name in enumerate(names) if Path(name).is_relative_to(_PACKAGE) and name != __file__]
    return not own or any(not _is_library(name) for name in names[own[0] :])


def _is_library(file: str) -> bool:
    # code of a data class or a template, but not what a user types
    generated = file.startswith("<") and not file.startswith(("<stdin", "<ipython"))
    return generated or file.startswith((str(_PACKAGE), *_LIBRARIES))


def _raised_in(error: BaseException) -> str | None:
    """Return the innermost installed package on the traceback that is neither torch nor ours."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    installed = [file.parts[file.parts.index(_SITE_PACKAGES) + 1] for file in files if _SITE_PACKAGES in file.parts]
    return next((name for name in reversed(installed) if name not in ("torch", _PACKAGE.name)), None)
