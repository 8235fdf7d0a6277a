"""What the libraries underneath raise, as our errors: the last net of every public entry.

Most of it is caught where it happens, with a better cause. Knows the libraries' errors by name, and imports none.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
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
from hf_bico.version import __version__

DEBUG = "HF_BICO_DEBUG"
_HERE = Path(__file__).parent
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

Maker = Callable[[str], BicoError]

_KNOWN: dict[str, Maker] = {
    "torch.OutOfMemoryError": lambda said: _no_memory(),
    "builtins.MemoryError": lambda said: _no_memory(),
    "torch.AcceleratorError": lambda said: DeviceError(f"the device failed: {said}", "try again, or use --device cpu"),
    "torch.distributed.DistError": lambda said: ProcessLostError(
        f"the processes of this job lost each other: {said}", "start the job again"
    ),
    "safetensors._safetensors_rust.SafetensorError": lambda said: BrokenWeightsError(
        f"a weight file cannot be read: {said}", "copy or download the model again"
    ),
    "_pickle.UnpicklingError": lambda said: PickledWeightsError(
        f"a pickled file holds more than tensors: {said}", "save the model again as safetensors"
    ),
    "huggingface_hub.errors.GatedRepoError": lambda said: AccessError(
        f"a repo is gated: {said}", "accept its conditions on its page, then log in with 'hf auth login'"
    ),
    "huggingface_hub.errors.RepositoryNotFoundError": lambda said: RepoNotFoundError(
        f"a repo is not on the Hub, or private: {said}", "check the name, or log in with 'hf auth login'"
    ),
    "huggingface_hub.errors.HfHubHTTPError": lambda said: _no_hub(said),
    "huggingface_hub.errors.OfflineModeIsEnabled": lambda said: _no_hub(said),
    "huggingface_hub.errors.LocalEntryNotFoundError": lambda said: _no_hub(said),
    "httpx.HTTPError": lambda said: _no_hub(said),
    "httpx2.HTTPError": lambda said: _no_hub(said),
    "builtins.ConnectionError": lambda said: _no_hub(said),
    "datasets.exceptions.DatasetsError": lambda said: _no_data(said),
    "datasets.exceptions.DatasetGenerationError": lambda said: _no_data(said),
    "pyarrow.lib.ArrowException": lambda said: _no_data(said),
    "PIL.UnidentifiedImageError": lambda said: UnreadableSampleError(
        f"an image cannot be decoded: {said}", "remove it from the data set"
    ),
    "PIL.Image.DecompressionBombError": lambda said: UnreadableSampleError(
        f"an image has too many pixels: {said}", "remove it from the data set"
    ),
    "jinja2.exceptions.TemplateError": lambda said: DataError(
        f"the tokenizer's chat template cannot be used: {said}", "use the fine-tuned model's own tokenizer files"
    ),
    "yaml.error.YAMLError": lambda said: ModelError(f"a card or configuration is no YAML: {said}", "mend that file"),
    "huggingface_hub.errors.StrictDataclassError": lambda said: _no_model(said),
}
"""By the name of the class, or of one that it is derived from."""


@contextmanager
def last_net() -> Iterator[None]:
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
    said = _first_line(error)
    if _is_full(error):
        return OutputError(f"the disk is full: {said}", "free some space, then run the same command again")
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_WORDS):
        return _no_memory()
    for kind in type(error).__mro__:
        maker = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
        if maker is not None:
            return maker(said)
    if isinstance(error, OSError):
        return _of_system(error, said)
    library = _raised_in(error)
    if library in _LOADERS:
        kind, what = _LOADERS[library]
        return kind(
            f"{library} cannot use {what}: {type(error).__name__}{f': {said}' if said else ''}",
            f"see whether {library} itself can; if so, please report it as {bug_id(error)}",
        )
    return UnforeseenError(
        f"unexpected {type(error).__name__}{f': {said}' if said else ''} [{bug_id(error)}]",
        f"please report it by that number, with what the same command prints after {DEBUG}=1",
    )


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


def _of_system(error: OSError, said: str) -> BicoError:
    """Of the system where it has a number; libraries say by the same class what they cannot load."""
    if error.errno is None:
        return _no_model(said)
    what = "a file" if error.filename is None else f"'{error.filename}'"
    return OutputError(f"{what} cannot be read or written: {error.strerror}", "see whose it is, and run it again")


def _no_memory() -> BicoError:
    return MemoryExhaustedError(
        "the memory ran out", "use a smaller --batch-size, --memory, --device cpu, or a machine with more"
    )


def _no_hub(said: str) -> BicoError:
    return HubUnavailableError(f"the Hub cannot be read: {said}", "try again in a while")


def _no_data(said: str) -> BicoError:
    return DataError(
        f"the data set cannot be read: {said}", "open it with datasets.load_dataset to see where it breaks"
    )


def _no_model(said: str) -> BicoError:
    return ModelError(f"a model's files cannot be read: {said}", "load it with its own library to see what is wrong")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:_LONGEST] if lines else ""
