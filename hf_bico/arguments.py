"""The options of jobs as arguments in Python: typed, listed in signatures, and named in errors as they are written.

The options are those of `Settings`. Knows which job takes which of them; runs none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any, TypedDict, TypeVar

from hf_bico.errors import UsageError
from hf_bico.settings import AUTO, LAYERS, METHODS, OPTIONS, Option, Settings, read_lines
from hf_bico.utils.text import did_you_mean

# What a type checker knows: the fields of `Settings` with their types; a size may also be a text such as "2GB". What a
# job takes is read from the fields themselves.


class DataOptions(TypedDict, total=False):
    """How samples are read, and where models run."""

    split: str | None
    config: str | None
    max_download: int | str
    image_column: str | None
    label_column: str | None
    text_column: str | None
    caption_column: str | None
    max_length: int | None
    special_tokens: bool
    class_names: Sequence[str] | None
    templates: Sequence[str]
    seed: int
    batch_size: int | None
    device: str
    dtype: str


class EvaluateOptions(DataOptions, total=False):
    """The options of `evaluate_model`."""

    objective: str | Callable[..., Any]
    evaluation: str


class RecipeOptions(TypedDict, total=False):
    """How a model is trained."""

    learning_rate: float | None
    weight_decay: float
    train_batch: int
    warmup: int


class AlignOptions(DataOptions, total=False):
    """How two models are lined up, and a change carried."""

    memory: int | str | None
    device_map: str | None
    completion: str
    alpha: float | str
    bold: bool
    layers: str | Sequence[int]
    sampling: str
    labels: str
    augment: int | None
    unlabelled_samples: int
    objective: str | Callable[..., Any]
    path_steps: int | None
    signs: str
    probe: bool
    tower: str | None
    force: bool


class DiagnoseOptions(AlignOptions, total=False):
    """The options of `diagnose`."""

    n: int | None
    per_class: int | None
    method: str


class CompareOptions(AlignOptions, RecipeOptions, total=False):
    """The options of `compare`, beside those that it takes several of."""

    eval_samples: int
    evaluation: str
    readout: bool
    polish: bool
    polish_on: str
    control: bool


class PortOptions(CompareOptions, total=False):
    """The options of `port`."""

    n: int | None
    per_class: int | None
    method: str
    prompts: Sequence[str] | None
    train_steps: int | None
    polish_steps: int
    checkpoint: str | None
    format: str | None
    rank: int | float | None
    evaluate: bool
    calibration_batch: int | None


class ReproduceOptions(RecipeOptions, total=False):
    """The options of `reproduce`: how it runs and trains, and nothing that a table decides."""

    train_steps: int | None
    max_download: int | str
    batch_size: int | None
    memory: int | str | None
    device: str
    dtype: str
    eval_samples: int
    max_length: int | None
    seed: int


Job = TypeVar("Job", bound=Callable[..., Any])
_FIELDS = {one.name: one for one in fields(Settings)}


def takes(*wanted: str) -> Callable[[Job], Job]:
    """List the options of a job in its signature, with their defaults, for `help()` and for completion by Tab.

    `wanted` are names of options, or of their groups.

    >>> def job(source, **options): "Read `options` by settings_of(job, options)."
    >>> str(inspect.signature(takes("limits")(job)))
    "(source, *, memory: 'int | None' = None, device_map: 'str | None' = None)"
    """

    def with_signature(job: Job) -> Job:
        own = inspect.signature(job)
        named = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        more = [
            inspect.Parameter(name, kind, default=field.default, annotation=field.type)
            for name, field in _FIELDS.items()
            if (name in wanted or OPTIONS[name].group in wanted) and name not in own.parameters
        ]
        job.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return job

    return with_signature


def settings_of(job: Callable[..., Any], options: Mapping[str, Any]) -> Settings:
    """Read the options that a job was called with; refuse what its signature does not list."""
    known = list(inspect.signature(job).parameters)
    for name in options:
        if name in known:
            continue
        others = f"its arguments are: {', '.join(known)}"
        raise UsageError(
            f"{job.__name__}() got an unexpected keyword argument '{name}'",
            did_you_mean(_RENAMED.get(name, name), known, others),
        )
    return Settings.of(options)


def options_of(job: Callable[..., Any], settings: Settings) -> dict[str, Any]:
    """Return the settings that a job takes, by name."""
    known = inspect.signature(job).parameters
    return {name: value for name, value in vars(settings).items() if name in known}


_RENAMED = {"k": "per_class", "fit_head": "probe", "no_eval": "evaluate", "target": "to"}
"""What else an argument may be called: by its option, or in earlier releases."""

# errors

_FLAGS = {
    **dict.fromkeys(("allow_pickle", "trust_remote_code", "overwrite", "create_pr", "everything"), True),
    **{"train_target": True, "with_base": True, "private": True, "public": False},
}
"""Arguments that are no options of `Settings`, and are typed without a value."""
_VALUED = (
    *("base", "data", "unlabelled", "target_id", "token", "methods", "seeds", "tasks", "weights", "fine_tuned"),
    *("metric", "source_of", "target_of", "data_of", "revision", "message"),
)
_SHORT = {"-o": "folder", "--output": "folder", "--to": "to", "--target": "to", "-n": "n", "-k": "per_class"}
_FUNCTIONS = {"eval": "evaluate_model"}
"""The functions that are called otherwise than their commands."""

_COMMAND = re.compile(r"'hf-bico (\w+)([^']*)'")
_SHELL = re.compile(r"hf-bico (?:push|card) .*", re.DOTALL)
"""A command about a folder that was written: it stays as it is."""
_FOLDER = re.compile(r" with (?:-o|--output)\b")
_OPTION = re.compile(r"(?<![\w-])(?P<option>--[a-z][a-z-]*|-[nko])(?![\w-])(?P<gap>[ =]?)(?P<word>(?!--)[^\s,;:()'=]*)")
_LITERAL = re.compile(r"[-+]?\d[\w.]*|[A-Z]+|\S*/\S+|generated")

_typed: ContextVar[bool] = ContextVar("typed", default=False)


@contextmanager
def on_the_command_line() -> Iterator[None]:
    """Let errors name options as they are typed, and not arguments."""
    token = _typed.set(True)
    try:
        yield
    finally:
        _typed.reset(token)


def as_written(text: str) -> str:
    """Return an error's text with the names that the caller uses: options where they are typed, else arguments.

    >>> as_written("name it with --base, or use -n 10 and --format full, or --no-eval")
    'name it with base=..., or use n=10 and format="full", or evaluate=False'
    >>> as_written("merge it first: 'hf-bico apply ADAPTER --to MODEL -o FOLDER'")
    'merge it first: hf_bico.apply(ADAPTER, to=MODEL).save(FOLDER)'
    """
    if _typed.get():
        return text
    shell = _SHELL.search(text)
    told, rest = (text, "") if shell is None else (text[: shell.start()], shell[0])
    told = _FOLDER.sub("", _COMMAND.sub(_call, told))
    return "".join((_OPTION.sub(_argument, told), rest))


def _call(command: re.Match[str]) -> str:
    """Return the call that does what a command does."""
    given, folder, words = list[str](), "", iter(command[2].split())
    for word in words:
        if word in ("-o", "--output"):
            folder = f".save({next(words)})"
        elif word.startswith("-"):
            given.append(f"{_name(word)}={next(words)}")
        else:
            given.append(word)
    call = f"hf_bico.{_FUNCTIONS.get(command[1], command[1])}"
    return f"{call}({', '.join(given)}){folder}" if given else call


def _name(option: str) -> str:
    """Return the argument that an option sets."""
    by_flag = {known.flag: name for name, known in OPTIONS.items() if known.flag}
    return _SHORT.get(option) or by_flag.get(option) or option.lstrip("-").replace("-", "_")


def _argument(found: re.Match[str]) -> str:
    """Return an option with what is given to it as an argument."""
    gap, word, name = found["gap"], found["word"], _name(found["option"])
    known = OPTIONS.get(name)
    if known is None and name not in (*_FLAGS, *_VALUED, *_SHORT.values()):
        return found[0]  # an option of another program
    literal = _literal(name, known, word.rstrip("."))
    end = word[len(word.rstrip(".")) :]
    if (known is not None and known.type is bool) or name in _FLAGS:
        if name == "probe" and (literal is not None or word == "is"):  # of `evaluate_model`, it is a number
            return f"probe={literal}{end}" if literal is not None else f"probe is{end}"
        return f"{name}={_FLAGS[name] if known is None else not _FIELDS[name].default}{gap}{word}"
    if literal is not None:
        return f"{name}={literal}{end}"
    before = found.string[: found.start()]
    return f"{name}{'=...' if before.endswith('with ') else ''}{gap}{word}"


def _literal(name: str, known: Option | None, word: str) -> str | None:
    """Return a word behind an option as the value that it is in Python; None if it only goes on with the sentence."""
    words = {"device": ("cpu", "cuda"), "layers": LAYERS, "method": METHODS}.get(name, ())
    if word in words or (known is not None and word in known.all_choices) or (name == "alpha" and word == AUTO):
        return f'"{word}"'
    if not _LITERAL.fullmatch(word):
        return None
    if word.isupper():
        return "[...]" if known is not None and known.read is read_lines else "..."
    return word if word[-1].isdigit() and "/" not in word else f'"{word}"'
