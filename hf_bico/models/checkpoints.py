"""Read a model's named tensors from safetensors, lazily, or from memory; find which files hold them.

Names and shapes come without torch and without reading a weight. Knows files and tensors; no kind of model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from safetensors import SafetensorError, safe_open

from hf_bico.errors import BrokenWeightsError, PickledWeightsError, WeightsNotFoundError
from hf_bico.hub.repo_metadata import ADAPTER_CONFIG
from hf_bico.runtime.turns import job_turn
from hf_bico.utils.files import folder_name, read_object

if TYPE_CHECKING:
    from torch import Tensor, nn


WEIGHT_FILES = {"transformers": "model.safetensors", "open_clip": "open_clip_model.safetensors"}
"""The name that each library saves a whole model under; a folder may hold both."""

DELTA_FILE = "task_vector.safetensors"
"""The file of the delta format."""
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
"""The files of a PEFT adapter."""

_PICKLE = re.compile(r"[^/]+\.(?:bin|pt|pth|ckpt|pkl)")
_NO_WEIGHTS = re.compile(
    r"(?:training_args|optimizer|optim|scheduler|lr_scheduler|scaler|rng_state|random_states|custom_checkpoint"
    r"|adapter_model|openvino|ggml|tokenizer)(?:[._-].*)?|.*(?:zero_pp_rank|optim_states).*"
)
"""The names of pickles beside the weights: a trainer's state, and files of other formats with a pickle's ending."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights that can be computed with directly, as safetensors names them."""
LONGEST_NAME = 500
"""No tensor of a real model has a longer name."""
LIBRARY_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""What the code of libraries raises for broken files, or files that are not its own."""
_LFS_POINTER = b"version https://git-lfs"


class Checkpoint(Protocol):
    """Named tensors with shapes; `tensor` reads one."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> Tensor: ...


Value = TypeVar("Value")


class LazyMapping(Mapping[str, Value]):
    """A mapping with known names whose values are computed on access."""

    names: Mapping[str, Any]
    """The names in order; their values are the subclass's."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value, without computing it."""

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass
class MemoryCheckpoint:
    """Tensors in memory: a state dict."""

    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @classmethod
    def of(cls, module: nn.Module) -> MemoryCheckpoint:
        """Take the weights that a loaded model has once no other thread's port is changing them."""
        with job_turn():
            own = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
            # a tied tensor only once, as in files
            return cls({name: tensor for name, tensor in module.state_dict().items() if name in own})

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def state_dict_checkpoint(tensors: Mapping[str, Any]) -> MemoryCheckpoint:
    """Take a state dict; refuse what only holds one, as the files of training tools do."""
    strange = next((name for name, value in tensors.items() if not hasattr(value, "is_floating_point")), None)
    if strange is not None or not tensors:
        inner = next((name for name, value in tensors.items() if isinstance(value, Mapping)), None)
        raise BrokenWeightsError(
            "the state dict is empty" if strange is None else f"'{strange}' of the state dict is no tensor",
            "pass the tensors by their names" if inner is None else f"pass the state dict in it: checkpoint[{inner!r}]",
        )
    return MemoryCheckpoint(tensors)


@dataclass
class RenamedCheckpoint:
    """A checkpoint with some tensors renamed; `names` maps old names to new ones."""

    inner: Checkpoint
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._old_names = {self.names.get(name, name): name for name in self.inner.shapes}
        self.shapes = {name: self.inner.shapes[old] for name, old in self._old_names.items()}

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in the inner checkpoint."""
        return self._old_names[name]

    def tensor(self, name: str) -> Tensor:
        return self.inner.tensor(self.stored_name(name))


@dataclass(frozen=True)
class HeaderCheckpoint:
    """Names and shapes of weights that are not downloaded yet."""

    shapes: Mapping[str, tuple[int, ...]]
    size: int
    """Bytes of the files."""

    def tensor(self, name: str) -> Tensor:
        raise LookupError(f"'{name}' has not been downloaded")


class FileCheckpoint:
    """The safetensors of one folder, opened lazily: a single file, or shards with their index."""

    def __init__(self, files: Iterable[Path], index: Path | None = None) -> None:
        self.files = tuple(files)
        self.index = index
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        for file in self.files:
            # framework "numpy" reads headers without importing torch
            with open_safetensors(file, "numpy") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    self._require_new(name, file)
                    part = reader.get_slice(name)
                    self._file_of[name] = file
                    self.shapes[name] = tuple(part.get_shape())
                    self.dtypes[name] = part.get_dtype()
        if index is not None:
            for name, shard in weight_map(index, folder_name(index.parent)).items():
                if name not in self._file_of or self._file_of[name].name != shard:
                    raise BrokenWeightsError(
                        f"'{shard}' in '{folder_name(index.parent)}' lacks the tensor '{name[:LONGEST_NAME]}', "
                        f"which '{index.name}' says is there",
                        "copy or download the shard and its index again",
                    )

    def _require_new(self, name: str, file: Path) -> None:
        if len(name) > LONGEST_NAME:
            raise BrokenWeightsError(
                f"'{file.name}' in '{folder_name(file.parent)}' has a tensor with a name of {len(name):,} characters",
                "save the model again",
            )
        if name in self._file_of:
            raise BrokenWeightsError(
                f"'{name}' is in two shards of '{folder_name(file.parent)}', "
                f"'{self._file_of[name].name}' and '{file.name}'",
                "save the model again",
            )

    @classmethod
    def in_folder(cls, folder: Path, library: str = "transformers") -> FileCheckpoint:
        """Open the weights of a folder, in the layout of `library` where there are two; refuse pickles."""
        return cls.of(folder, find_weights(folder, {file.name for file in folder.iterdir()}, library))

    @classmethod
    def of(cls, folder: Path, weights: WeightFiles) -> FileCheckpoint:
        index = None if weights.index is None else folder / weights.index
        return cls([folder / name for name in weights.names], index)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def tensor(self, name: str) -> Tensor:
        file = self.file_of(name)
        if file not in self._open:
            self._open[file] = self._stack.enter_context(open_safetensors(file, "pt"))
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, AttributeError, TypeError, ValueError) as error:
            raise BrokenWeightsError(
                f"'{name}' in '{file.name}' of '{folder_name(file.parent)}' cannot be read as {self.dtypes[name]}: "
                f"{error}",
                "save it again in float32, float16 or bfloat16",
            ) from error
        return tensor

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)

    def close(self) -> None:
        """Unmap the files; reading a tensor opens them again."""
        self._open.clear()
        self._stack.close()


def non_float_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the dtype of each tensor that is not stored as a float of 16 bits or more."""
    if isinstance(checkpoint, RenamedCheckpoint):
        found = non_float_tensors(checkpoint.inner)
        return {checkpoint.names.get(name, name): dtype for name, dtype in found.items()}
    kept = checkpoint.dtypes if isinstance(checkpoint, FileCheckpoint) else {}
    return {name: dtype for name, dtype in kept.items() if dtype not in FLOATS}


def open_safetensors(file: Path, framework: str) -> Any:
    """Call `safe_open`; an error names the file."""
    is_file = os.path.isfile(file)  # opening a pipe would block
    try:
        if not is_file:
            raise OSError("it is not a file")
        return safe_open(str(file), framework=framework)
    except (SafetensorError, OSError, ValueError) as error:
        pointer = is_file and file.open("rb").read(len(_LFS_POINTER)) == _LFS_POINTER
        raise BrokenWeightsError(
            f"'{file.name}' in '{folder_name(file.parent)}' cannot be read as safetensors: {error}",
            "it is a Git LFS pointer: run 'git lfs pull' there" if pointer else "copy or download the file again",
        ) from error


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Call `save_file`, with the permissions of a new file: safetensors writes for the owner only."""
    from safetensors.torch import save_file

    file.touch()  # the umask itself cannot be read without changing it, for all threads
    mode = file.stat().st_mode
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=metadata)
    file.chmod(mode)


def tensor_offsets(file: Path) -> dict[str, int]:
    """Return the first byte of each tensor in a safetensors file, which the library does not tell."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


@dataclass(frozen=True)
class WeightFiles:
    """Names of the files that hold a model's weights."""

    names: tuple[str, ...]
    index: str | None = None


def holds_layout(names: Collection[str], library: str) -> bool:
    """Tell whether these files include weights in a library's layout, pickled or not."""
    stems = {"transformers": ("model", "pytorch_model"), "open_clip": ("open_clip_model", "open_clip_pytorch_model")}
    ends = ("safetensors", "safetensors.index.json", "bin", "bin.index.json", "pt")
    return any(f"{stem}.{end}" in names for stem in stems[library] for end in ends)


def is_adapter(names: Collection[str]) -> bool:
    """Tell whether these files are a PEFT adapter."""
    return ADAPTER_CONFIG in names and (ADAPTER_FILE in names or ADAPTER_PICKLE in names)


def pickle_names(names: Iterable[str]) -> list[str]:
    """Return those of a repo's files that may be pickled weights."""
    return sorted(name for name in names if _PICKLE.fullmatch(name) and not _NO_WEIGHTS.fullmatch(name))


def listed(names: Collection[str], most: int = 4) -> str:
    """Join the names of files for a sentence; of many, the first few."""
    return ", ".join([*sorted(names)[:most], *(["..."] if len(names) > most else [])])


def find_weights(folder: Path, names: Collection[str], library: str, called: str | None = None) -> WeightFiles:
    """Choose a repo's weight files, in the layout of `library` where there are two; refuse pickles.

    Reads only the index of shards, from `folder`: the weights may be elsewhere.
    """
    called = called or folder_name(folder)
    for name in (WEIGHT_FILES[library], *WEIGHT_FILES.values()):
        if name in names:  # transformers prefers it to shards too
            return WeightFiles((name,))
        if f"{name}.index.json" in names:
            return WeightFiles(_shards(folder / f"{name}.index.json", names, called), f"{name}.index.json")
    found = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if len(found) == 1 and found[0] != ADAPTER_FILE:
        return WeightFiles(tuple(found))
    pickles = pickle_names(names)
    if pickles:
        raise PickledWeightsError(
            f"'{called}' holds only pickled weights ({listed(pickles)}), which can run code when loaded",
            "--allow-pickle loads tensors and nothing else from them; or save the model again as safetensors",
        )
    if ADAPTER_CONFIG in names:
        raise WeightsNotFoundError(
            f"'{called}' holds {ADAPTER_CONFIG} and no {ADAPTER_FILE}", "copy or download the adapter again"
        )
    if len(found) > 1:
        raise WeightsNotFoundError(
            f"'{called}' holds several safetensors ({listed(found)}), and neither {' nor '.join(WEIGHT_FILES.values())}"
            " nor an index of shards says which are the model",
            "copy the missing index, or keep only the right file, in a folder with its configuration",
        )
    raise WeightsNotFoundError(
        f"there are no weights in '{called}' (looked for {' and '.join(WEIGHT_FILES.values())})",
        "name a repo or folder that holds the model's safetensors",
    )


def _shards(index: Path, names: Collection[str], called: str) -> tuple[str, ...]:
    shards = sorted(set(weight_map(index, called).values()))
    if not shards:
        raise BrokenWeightsError(f"the index '{index.name}' of '{called}' names no shard", "copy it again")
    for name in shards:
        if Path(name).name != name or name not in names:
            raise BrokenWeightsError(
                f"the index '{index.name}' names the shard '{name}', which is not in '{called}'",
                "copy or download the missing shard",
            )
    return tuple(shards)


def weight_map(index: Path, called: str) -> dict[str, str]:
    """Read the shard of each tensor from an index."""
    try:
        found = read_object(index).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(shard, str) for shard in found.values()):
            raise ValueError("it has no 'weight_map' from names to files")
    except (OSError, ValueError) as error:
        raise BrokenWeightsError(
            f"the index '{index.name}' of '{called}' cannot be read: {error}", "copy it again"
        ) from error
    return found


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Hash the dtypes, shapes and contents of tensors."""
    import torch

    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
