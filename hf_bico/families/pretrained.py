"""What all transformers models share: the class by its name, weights from a folder, the processor beside them.

Knows the library and its manners; not what a model is for, nor its sites.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bico.checkpoints import FileCheckpoint
from hf_bico.errors import MissingProcessorError, RepoError
from hf_bico.families.base import TOKENIZER_FILES, Family, Shapes, Spread, weights_do_not_fit
from hf_bico.families.extents import bounded, require_drawable
from hf_bico.families.live import LiveModel
from hf_bico.runtime.library_errors import is_failure
from hf_bico.sites import Site
from hf_bico.utils.files import folder_name
from hf_bico.utils.text import machine_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hf_bico.watching import Trace

CANNOT_BUILD = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)
"""What a library's code says about a configuration that is not its own."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def has_class(name: str) -> bool:
    """Whether the installed transformers has a model class of that name."""
    import transformers

    found = getattr(transformers, name, None)
    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)


def _class(name: str) -> Any:
    import transformers

    if not has_class(name):
        raise ValueError(f"transformers has no model class '{name}'")
    return getattr(transformers, name)


def first_architecture(config: Mapping[str, Any]) -> str | None:
    """The class that a configuration names."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None


def require_config(family: Family, folder: Path) -> Mapping[str, Any]:
    """The configuration of a folder, which must have one."""
    if not (folder / family.config_file).is_file():
        raise RepoError(f"'{folder_name(folder)}' has no {family.config_file}", "name a folder in transformers' layout")
    return family.read_config(folder)


def bare_model(name: str, config: Mapping[str, Any], shapes: Shapes, **options: Any) -> nn.Module:
    """A model of this class, with its `options`, on the meta device.

    A ValueError where the configuration does not describe one, or one that is far larger than weights of these shapes.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError

    model_class = _class(name)
    try:
        with torch.device("meta"), bounded(shapes):
            module: nn.Module = model_class(model_class.config_class.from_dict(dict(config)), **options)
    except (*CANNOT_BUILD, StrictDataclassError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return module.eval()


def bare_model_of(folder: Path, name: str, config: Mapping[str, Any], shapes: Shapes, **options: Any) -> nn.Module:
    """`bare_model` of a folder's configuration, with an error that names the folder."""
    try:
        return bare_model(name, config, shapes, **options)
    except ValueError as error:
        raise RepoError(
            f"transformers cannot build a {name} from the configuration of '{folder_name(folder)}': {error}",
            "copy or download the folder again",
        ) from error


def load_pretrained(
    folder: Path, name: str, device: torch.device, dtype: torch.dtype, spread: Spread | None = None, **options: Any
) -> nn.Module:
    """A model of this class, with its `options`, and a folder's safetensors, none of them made up."""
    import torch
    from huggingface_hub.errors import StrictDataclassError

    try:
        with bounded(FileCheckpoint.in_folder(folder).shapes):
            module, report = _class(name).from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **options,
                **({} if spread is None else _spread(spread)),
            )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except (*CANNOT_BUILD, StrictDataclassError) as error:
        raise weights_do_not_fit(folder, error) from error
    if report["missing_keys"]:  # transformers has made these up at random
        raise weights_do_not_fit(folder, f"there is no '{min(report['missing_keys'])}'")
    loaded: nn.Module = (module if spread is not None else module.to(device)).eval()
    return loaded


def _spread(spread: Spread) -> dict[str, Any]:
    """What transformers is told about it; what no GPU has room for stays in main memory, and is not put on disk."""
    import torch

    if spread.memory is None:
        return {"device_map": spread.rule}
    gpus: dict[int | str, int] = dict.fromkeys(range(torch.cuda.device_count()), spread.memory)
    return {"device_map": spread.rule, "max_memory": {**gpus, "cpu": machine_memory()}}


def origin_of(module: nn.Module) -> Path | None:
    """The folder that `from_pretrained` read a loaded model from, where it is known and still there."""
    origin = Path(str(getattr(module, "name_or_path", "")))
    return origin if str(origin) != "." and origin.is_dir() else None


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder; it needs no weights beside it."""
    return _from_folder(folder, "AutoTokenizer", "tokenizer", TOKENIZER_FILES, _try_tokenizer)


def _try_tokenizer(tokenizer: Any) -> None:
    """Have it read a text: settings of the wrong kind show only then."""
    ids = tokenizer("a b", truncation=True, max_length=16, verbose=False)["input_ids"]
    tokenizer(["a", "b c"], add_special_tokens=False, verbose=False)
    tokenizer.decode(ids)
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise ValueError("its chat template is no text")


def _from_folder(
    folder: Path, loader: str, what: str, files: Sequence[str], trial: Callable[[Any], None] | None = None
) -> Any:
    import transformers

    if not any((folder / name).is_file() for name in files):  # transformers would make up an empty one
        raise MissingProcessorError(
            f"'{folder_name(folder)}' has no {what}", "copy it from the repo that the model came from"
        )
    with loadable(folder, what):
        auto = getattr(transformers, loader)
        loaded = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if trial is not None:
            trial(loaded)
    return loaded


@contextmanager
def loadable(folder: Path, what: str) -> Iterator[None]:
    """Whatever a library says about the files of a tokenizer or processor that it cannot use, as our error."""
    try:
        yield
    except BaseException as error:  # the tokenizers library raises just Exception, or panics
        if not is_failure(error):
            raise
        raise MissingProcessorError(
            f"'{folder_name(folder)}' has no {what} that can be loaded: {' '.join(str(error).split())[:200]}",
            "copy it from the repo that the model came from",
        ) from error


class PretrainedModel(LiveModel):
    """A loaded transformers model that may know the folder of its processor and tokenizer."""

    folder: Path | None = None
    _processor: Any = None
    _tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer beside its weights."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._origin("tokenizer"))
        return self._tokenizer

    def _preprocess(self, images: Sequence[Any]) -> Tensor:
        if self._processor is None:
            what = "image processor"
            self._processor = _from_folder(
                self._origin(what),
                "AutoImageProcessor",
                what,
                PROCESSOR_FILES,
                lambda processor: require_drawable(processor.to_dict(), self.layout.image_size),
            )
        batch: Tensor = self._processor(images=list(images), return_tensors="pt")["pixel_values"]
        return batch

    def _origin(self, what: str) -> Path:
        if self.folder is None:
            raise MissingProcessorError(
                f"a loaded model does not know its {what}", "pass its Hub id or folder instead of the loaded model"
            )
        return self.folder

    def _watch(self, site: Site, trace: Trace, stack: ExitStack) -> None:
        name = site.weight.tensor.removesuffix(".weight")
        self._watch_linear(self.module.get_submodule(name), site, trace, stack)


class PretrainedFamily(Family):
    """A family whose models transformers loads from a folder, by the class that the family knows."""

    library = "transformers"
    config_file = "config.json"
    live: ClassVar[type[PretrainedModel]]

    @abstractmethod
    def known(self, folder: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
        """The class by which a folder's model is run, its configuration, and what the class is told when it is made."""

    def skeleton(self, folder: Path) -> nn.Module:
        name, config, options = self.known(folder)
        return bare_model_of(folder, name, config, FileCheckpoint.in_folder(folder).shapes, **options)

    def load(self, folder: Path, device: torch.device, dtype: torch.dtype, spread: Spread | None = None) -> LiveModel:
        name, _, options = self.known(folder)
        module = load_pretrained(folder, name, device, dtype, spread, **options)
        try:
            live = self._live(module)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise weights_do_not_fit(folder, error) from error
        live.folder = folder
        live.runs_on = None if spread is None else device
        return live

    def wrap(self, module: nn.Module) -> LiveModel:
        live = self._live(module)
        live.folder = origin_of(module)
        return live

    def _live(self, module: nn.Module) -> PretrainedModel:
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        config: Any = module.config
        return self.live(module, self.layout(shapes, config.to_dict()))
