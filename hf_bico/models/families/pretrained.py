"""Build and load transformers models: the class by its name, weights from a folder, the processor beside them.

A configuration may ask for any size: it is compared with the weights beside it before anything of that size is made.
Knows the library; not what a model is for, nor its sites.
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar

from hf_bico.errors import BrokenWeightsError, MissingProcessorError, RepoError
from hf_bico.models.checkpoints import LIBRARY_ERRORS, FileCheckpoint
from hf_bico.models.families.base import LABELS, TOKENIZER_FILES, DeviceSpread, Family, Shapes, weights_do_not_fit
from hf_bico.models.families.live import LiveModel
from hf_bico.models.layout import Site
from hf_bico.runtime.library_errors import is_failure
from hf_bico.runtime.turns import library_turn
from hf_bico.utils.files import folder_name, without_folder
from hf_bico.utils.text import machine_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hf_bico.models.hooks import Trace


TIMES, ELEMENTS, MODULES = 4, 2**24, 5_000
"""A model may have TIMES the numbers of its weights, as with tied embeddings, and ELEMENTS and MODULES more."""
_SIZE = re.compile(
    r"size|width|dim|layer|depth|block|head|vocab|position|channel|label|num|embd|inner|expert|stage|hidden|context"
    r"|n_ctx|d_model|d_ff|d_kv|ffn|group|ratio|length|patch|rank|levels|token"
)
"""Parts of the names of numbers that are sizes."""
_COUNT, _MOST_COUNTED = re.compile(r"(layer|depth|label|block|stage|head|expert)s?$"), 1_000_000
"""Sizes that transformers counts out one by one when it reads a configuration."""
_NO_SIZE = re.compile(r"theta|base|max_length|max_seq|_id$|_ids$|factor|eps|scal|total|param|seed|flops")
_SIDE = re.compile(r"size|edge|height|width|pixels|crop|pad")
_TIMES_IMAGE, _MOST_SIDE = 8, 4096
"""A processor may enlarge an image before it is cropped, but not beyond these."""
_DEEPEST = 50


class TooLargeError(ValueError):
    """A model under construction outgrows the weights that it is built for."""


def elements_of(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def require_within(config: Mapping[str, Any], shapes: Shapes, called: str) -> None:
    """Refuse a configuration with a size that no part of these weights can have."""
    most = max(elements_of(shapes), ELEMENTS)
    for name, value in _numbers(config):
        if not _SIZE.search(name) or _NO_SIZE.search(name):
            continue
        limit = min(most, _MOST_COUNTED) if _COUNT.search(name) else most
        if not abs(value) <= limit:
            raise BrokenWeightsError(
                f"the configuration of {called} says {name} {_brief(value)}, more than {limit:,}: no part of its "
                "weights has that size",
                "copy or download the configuration again",
            )


def require_drawable(processor: Mapping[str, Any], image_size: tuple[int, int] | None) -> None:
    """Raise a ValueError for a processor that makes far larger images than the model takes."""
    most = max(_TIMES_IMAGE * max(image_size or (0, 0)), _MOST_SIDE)
    for name, value in _numbers(processor):
        if _SIDE.search(name) and not 0 <= value <= most:
            raise ValueError(f"its {name} is {_brief(value)}, and {most:,} is the most for this model")


def _numbers(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, int | float]]:
    """Yield all numbers of a configuration, by their names in lower case."""
    if isinstance(value, Mapping) and depth < _DEEPEST:
        for key, inner in value.items():
            yield from _numbers(inner, str(key), depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEEPEST:
        for inner in value:
            yield from _numbers(inner, name, depth + 1)
    elif type(value) in (int, float):
        yield name.lower()[:60], value


def _brief(value: int | float) -> str:
    return f"{value:.3g}" if abs(value) < 1e300 else "more than 1e300"


@contextmanager
def bounded(shapes: Shapes) -> Iterator[None]:
    """Raise a TooLargeError as soon as a model built inside has far more modules or numbers than these weights.

    On the meta device, nothing of it takes memory until then. Models that other threads build do not count, and
    random numbers that initialise weights are not taken from the caller's.
    """
    import torch
    from torch.nn.modules import module as torch_module

    own_thread = get_ident()
    most_elements = TIMES * elements_of(shapes) + ELEMENTS
    most_modules = TIMES * len(shapes) + MODULES
    elements = modules = 0

    def count_parameter(_: Any, name: str, parameter: Any) -> None:
        nonlocal elements
        elements += 0 if parameter is None or get_ident() != own_thread else parameter.numel()
        if elements > most_elements:
            raise TooLargeError(f"it asks for more than {most_elements:,} numbers, {TIMES} times what the weights hold")

    def count_module(*_: Any) -> None:
        nonlocal modules
        modules += get_ident() == own_thread
        if modules > most_modules:
            raise TooLargeError(f"it asks for more than {most_modules:,} layers, and has {len(shapes):,} tensors")

    with (
        library_turn(),  # transformers changes torch's initialisation and default dtype while it loads
        torch.random.fork_rng(devices=[]),
        torch_module.register_module_parameter_registration_hook(count_parameter),
        torch_module.register_module_module_registration_hook(count_module),
    ):
        yield


_READ_BY = {
    "vocab.txt": ("WordPiece", "BertTokenizer"),
    "vocab.json": ("BPE", "GPT2Tokenizer"),
    "spiece.model": ("SentencePiece", "T5Tokenizer"),
    "tokenizer.model": ("SentencePiece", "LlamaTokenizer"),
    "sentencepiece.bpe.model": ("SentencePiece", "XLMRobertaTokenizer"),
}
"""Files with a vocabulary: the kind of tokenizer that reads them, and a class of it."""
CANNOT_BUILD = (*LIBRARY_ERRORS, MemoryError, SyntaxError)
"""What libraries raise for configurations that are not their own."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def has_class(name: str) -> bool:
    """Tell whether the installed transformers has a model class of that name."""
    import transformers

    found = getattr(transformers, name, None)
    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)


def _class(name: str) -> Any:
    import transformers

    if not has_class(name):
        raise ValueError(f"transformers has no model class '{name}'")
    return getattr(transformers, name)


def first_architecture(config: Mapping[str, Any]) -> str | None:
    """Return the class that a configuration names."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None


def require_config(family: Family, folder: Path) -> Mapping[str, Any]:
    """Read the configuration of a folder, which must have one."""
    if not (folder / family.config_file).is_file():
        raise RepoError(f"'{folder_name(folder)}' has no {family.config_file}", "name a folder in transformers' layout")
    return family.read_config(folder)


def bare_model(name: str, config: Mapping[str, Any], shapes: Shapes, **options: Any) -> nn.Module:
    """Build a model of this class, with its `options`, on the meta device.

    Raises a ValueError if the configuration does not describe one, or one far larger than weights of these shapes.
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
    """Call `bare_model` with a folder's configuration; an error names the folder."""
    try:
        return bare_model(name, config, shapes, **options)
    except ValueError as error:
        raise RepoError(
            f"transformers cannot build a {name} from the configuration of '{folder_name(folder)}': "
            f"{without_folder(error, folder)}",
            "copy or download the folder again",
        ) from error


def load_pretrained(
    folder: Path, name: str, device: torch.device, dtype: torch.dtype, spread: DeviceSpread | None, **options: Any
) -> nn.Module:
    """Load a model of this class, with its `options`, from a folder's safetensors; none may be missing."""
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
    if report["missing_keys"]:  # transformers has initialised these at random
        raise weights_do_not_fit(folder, f"there is no '{min(report['missing_keys'])}'")
    loaded: nn.Module = (module if spread is not None else module.to(device)).eval()
    return loaded


def _spread(spread: DeviceSpread) -> dict[str, Any]:
    """Return transformers' arguments for it; what no GPU has room for stays in main memory, not on disk."""
    import torch

    if spread.memory is None:
        return {"device_map": spread.rule}
    gpus: dict[int | str, int] = dict.fromkeys(range(torch.cuda.device_count()), spread.memory)
    return {"device_map": spread.rule, "max_memory": {**gpus, "cpu": machine_memory()}}


def origin_of(module: nn.Module) -> Path | None:
    """Return the folder that `from_pretrained` read a loaded model from, if known and still there."""
    origin = Path(str(getattr(module, "name_or_path", "")))
    return origin if str(origin) != "." and origin.is_dir() else None


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder; it needs no weights beside it."""
    tokenizer = _from_folder(folder, "AutoTokenizer", "tokenizer", TOKENIZER_FILES, _try_tokenizer)
    with loadable(folder, "tokenizer"):
        is_empty = tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens)
    if is_empty:  # transformers makes one of nothing where its class reads other files than those that are here
        raise _no_vocabulary(folder, tokenizer)
    return tokenizer


def _no_vocabulary(folder: Path, tokenizer: Any) -> MissingProcessorError:
    """Make the error for a folder with the vocabulary of another tokenizer than the model's, or with none."""
    kind = type(tokenizer).__name__
    needed = " and ".join(name for name in tokenizer.vocab_files_names.values() if name != "tokenizer.json")
    found = next((name for name in _READ_BY if (folder / name).is_file()), None)
    if found is None or found in tokenizer.vocab_files_names.values():
        return MissingProcessorError(
            f"the tokenizer of '{folder_name(folder)}' has no vocabulary: a {kind} reads {needed or 'tokenizer.json'}",
            "copy it from the repo that the model came from",
        )
    what, reader = _READ_BY[found]
    cased = ", do_lower_case=False" if found == "vocab.txt" and _is_cased(folder / found) else ""
    return MissingProcessorError(
        f"'{folder_name(folder)}' holds {found}, the vocabulary of a {what} tokenizer, and its configuration asks for "
        f"a {kind}, which reads {needed or 'tokenizer.json'}",
        "save the tokenizer that the model was trained with beside it, by its own class, such as "
        f'transformers.{reader}.from_pretrained("FOLDER"{cased}).save_pretrained("FOLDER")',
    )


def _is_cased(file: Path) -> bool:
    """Tell whether a vocabulary has capitals, other than in special tokens."""
    tokens = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return any(token != token.lower() for token in tokens if not token.startswith("["))


def _try_tokenizer(tokenizer: Any) -> None:
    """Tokenise a text: settings of the wrong type show only then."""
    ids = tokenizer("a b", truncation=True, max_length=16, verbose=False)["input_ids"]
    tokenizer(["a", "b c"], add_special_tokens=False, verbose=False)
    tokenizer.decode(ids)
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise ValueError("its chat template is no text")


def _from_folder(
    folder: Path, loader: str, what: str, files: Sequence[str], trial: Callable[[Any], None] | None = None
) -> Any:
    import transformers

    if not any((folder / name).is_file() for name in files):  # transformers would create an empty one
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
    """Turn a library's errors about the files of a tokenizer or processor into ours."""
    try:
        yield
    except BaseException as error:  # the tokenizers library raises just Exception, or panics
        if not is_failure(error):
            raise
        raise MissingProcessorError(
            f"'{folder_name(folder)}' has no {what} that can be loaded: {without_folder(error, folder)[:200]}",
            "copy it from the repo that the model came from",
        ) from error


class PretrainedModel(LiveModel):
    """A loaded transformers model that may know the folder of its processor and tokenizer."""

    folder: Path | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer beside its weights."""
        return load_tokenizer(self._origin("tokenizer"))

    @cached_property
    def _processor(self) -> Any:
        def trial(processor: Any) -> None:
            require_drawable(processor.to_dict(), self.layout.image_size)

        what = "image processor"
        return _from_folder(self._origin(what), "AutoImageProcessor", what, PROCESSOR_FILES, trial)

    @property
    def preparation(self) -> object:
        return id(self) if self.folder is None else (type(self._processor), repr(self._processor.to_dict()))

    def _preprocess(self, images: Sequence[Any]) -> Tensor:
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
    """A family whose models transformers loads from a folder, by a class that the family knows."""

    library = "transformers"
    config_file = "config.json"
    live: ClassVar[type[PretrainedModel]]

    @abstractmethod
    def model_class(self, folder: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
        """Return the class that runs a folder's model, its configuration, and the class's options."""

    def filled(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import CONFIG_MAPPING

        kind = str(config.get("model_type"))
        if kind not in CONFIG_MAPPING:
            return config
        try:
            given = {name: value for name, value in config.items() if name not in LABELS}
            read = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(given))
            known: Mapping[str, Any] = type(read)().to_dict()
        except (*CANNOT_BUILD, StrictDataclassError):
            return config  # loading the model reports it
        return {name: value for name, value in read.to_dict().items() if name in known or value is not None}

    def skeleton(self, folder: Path) -> nn.Module:
        name, config, options = self.model_class(folder)
        return bare_model_of(folder, name, config, FileCheckpoint.in_folder(folder).shapes, **options)

    def load(
        self, folder: Path, device: torch.device, dtype: torch.dtype, spread: DeviceSpread | None = None
    ) -> LiveModel:
        name, _, options = self.model_class(folder)
        module = load_pretrained(folder, name, device, dtype, spread, **options)
        try:
            live = self._live(module, folder)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise weights_do_not_fit(folder, error) from error
        live.folder = folder
        live.runs_on = None if spread is None else device
        return live

    def wrap(self, module: nn.Module) -> LiveModel:
        live = self._live(module)
        live.folder = origin_of(module)
        return live

    def _live(self, module: nn.Module, folder: Path | None = None) -> PretrainedModel:
        """Wrap a model, which was loaded from `folder` or by the caller."""
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        config: Any = module.config
        return self.live(module, self.layout(shapes, config.to_dict()))
