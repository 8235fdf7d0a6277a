"""Find the columns that make up a sample.

Knows names and types of columns; neither files nor samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hf_bico.data.small_parquet import SmallParquet, StoredType
from hf_bico.errors import ColumnError, UnreadableSampleError, UsageError
from hf_bico.settings import Settings
from hf_bico.utils.samples import IMAGES, TEXTS

RowSequence = Any
"""Indexable rows: a `datasets.Dataset` or a list of dictionaries."""
STRING, MESSAGES = "string", "messages"
"""Kinds of columns that may hold text."""
_MESSAGES = ("messages", "conversations", "conversation")
_ANSWERS = {
    "prompt": ("completion", "response", "answer"),
    "instruction": ("output", "response", "completion"),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
    "problem": ("solution",),
    "input": ("output",),
}
_ANSWERED = tuple((prompt, answer) for prompt, answers in _ANSWERS.items() for answer in answers)
_CONTEXTS = ("input", "context")
"""Columns beside an instruction that hold its input."""
_PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("text", "text_pair"),
    ("text1", "text2"),
    ("sentence_A", "sentence_B"),
    ("question", "passage"),
)
_SINGLE_TEXTS = ("text", "sentence", "content", "review", "document", "utterance", "tweet")
_ROLES = (
    ("text",),
    ("text", "text_pair"),
    ("prompt", "completion"),
    ("prompt", "input", "completion"),
    ("messages",),
)
"""The parts that a text sample can have."""
REMEDY = "name it with --text-column; two of a pair with a comma between them, or prompt=COLUMN,completion=COLUMN"
LABELS = ("label", "labels")
"""Usual names of a label column."""
_OTHER_LABELS = ("gold_label", "class", "category", "sentiment", "emotion", "intent")
"""More names of a label column beside texts, where other numbers are mostly something else."""
_CAPTIONS = ("caption", "captions", "text", "sentence", "sentences", "description", "title")
_LABEL_KINDS = ("class", "integer", STRING)
_STRINGS = "strings"
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")
_ROWS_INSPECTED = 100
"""Rows of a list that are searched for a value to tell a column's kind."""

T = TypeVar("T")


@dataclass(frozen=True)
class KnownTask:
    """A well-known task of sentence pairs: `name` is T5's prefix for it, `classes` are its label words."""

    name: str
    columns: tuple[str, str]
    classes: tuple[str, ...]
    measured_on: str = "validation"
    label: str = "label"


_INFERENCE = ("entailment", "neutral", "contradiction")
_ENTAILMENT = ("entailment", "not_entailment")
_TASKS = {
    task.name: task
    for task in (
        KnownTask("mnli", ("premise", "hypothesis"), _INFERENCE, "validation_matched"),
        KnownTask("qnli", ("question", "sentence"), _ENTAILMENT),
        KnownTask("rte", ("sentence1", "sentence2"), _ENTAILMENT),
        KnownTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        KnownTask("snli", ("premise", "hypothesis"), _INFERENCE, "test"),
    )
}


def known_task(name: str, config: str | None, columns: Collection[str]) -> KnownTask | None:
    """Return the task of a data set, by its configuration (GLUE has one for each) or else its own name.

    A copy in another repo counts, if it has the columns.

    >>> known_task("nyu-mll/glue", "rte", ("sentence1", "sentence2", "label")).measured_on
    'validation'
    """
    own_name = name.rstrip("/").rpartition("/")[2].lower()
    task = _TASKS.get((config or own_name).lower()) or _TASKS.get(own_name)
    return task if task is not None and {*task.columns, task.label} <= set(columns) else None


@dataclass(frozen=True)
class Columns:
    """The columns of a sample by part, and its label column, if any.

    A sample is one of: image; image, caption; text; text, text_pair; prompt, completion; prompt, input, completion;
    messages.
    """

    parts: Mapping[str, str]
    label: str | None = None
    task: KnownTask | None = None

    @property
    def image(self) -> str | None:
        return self.parts.get("image")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_role.values())

    @property
    def by_role(self) -> dict[str, str]:
        """All columns by part, the label included."""
        return {**self.parts, **({} if self.label is None else {"label": self.label})}

    @property
    def is_self_supervised(self) -> bool:
        """True if a sample can be learnt without a label: texts and captions can, an image alone cannot."""
        return tuple(self.parts) != ("image",)


def find_columns(
    kinds: Mapping[str, str],
    settings: Settings,
    reads: str,
    *,
    needs_labels: bool = True,
    task: KnownTask | None = None,
) -> Columns:
    """Return the columns that the settings name, else those that hold what the model `reads`, and classes.

    With `needs_labels` False, a data set without any possible label column is accepted.
    """
    for name, option, read_by in (
        (settings.text_column, "--text-column", TEXTS),
        (settings.image_column, "--image-column", IMAGES),
        (settings.caption_column, "--caption-column", IMAGES),
        (settings.label_column, "--label-column", reads),
    ):
        if name is not None and reads != read_by:
            raise UsageError(f"{option} is '{name}', and the models read {reads}", f"leave {option} out")
        if name is not None and option != "--text-column":  # this one may be a list
            _require_column(name, kinds, option)
    if settings.label_column is not None:
        _require_kind(settings.label_column, kinds, _LABEL_KINDS, "labels", "--label-column")
    if reads == TEXTS:
        return _text_columns(kinds, settings, task, settings.labels == "dataset")
    return _image_columns(kinds, settings, needs_labels)


def find_unlabelled_columns(kinds: Mapping[str, str], calibration: Columns, reads: str) -> Columns:
    """Return the columns of data without labels: those of the calibration data, else those found by name and kind.

    Of captioned images, only the images are read.
    """
    if reads == IMAGES:
        known = calibration.image
        images = _of_kinds(kinds, "image")
        return Columns({"image": known if known in images else _only(images, kinds, "image", _as_calibration(known))})
    parts = dict(calibration.parts)
    if all(kinds.get(name) == (MESSAGES if role == "messages" else STRING) for role, name in parts.items()):
        return Columns(parts, task=calibration.task)
    remedy = _as_calibration(*parts.values())
    try:
        found = find_text_columns(kinds, _named_label(kinds, (*LABELS, *_OTHER_LABELS)), None)
    except ColumnError as error:
        raise ColumnError(error.cause, remedy) from error
    if tuple(found) != tuple(parts):
        cause = f"the unlabelled data has {' and '.join(found)}, and the calibration data {' and '.join(parts)}"
        raise ColumnError(cause, remedy)
    return Columns(found)


def _as_calibration(*names: str | None) -> str:
    return f"name the columns of the unlabelled data as those of the calibration data: {', '.join(filter(None, names))}"


def _text_columns(kinds: Mapping[str, str], settings: Settings, task: KnownTask | None, needs_labels: bool) -> Columns:
    """Take as labels only columns of a usual name or type: beside texts, other numbers may be anything."""
    label = settings.label_column or _named_label(kinds, (*LABELS, *_OTHER_LABELS))
    if label is None and "class" in kinds.values():
        label = _only(_of_kinds(kinds, "class"), kinds, "label", "name it with --label-column")
    given = settings.text_column
    parts = find_text_columns(kinds, label, task) if given is None else parse_text_columns(kinds, given)
    if settings.label_column is None and (label in parts.values() or not {"text"} & set(parts)):
        label = None  # of a prompt or a chat, the answer is learnt
    if label is None and needs_labels:
        remedy = "name it with --label-column, or leave --labels dataset out"
        raise ColumnError(f"no column looks like the label column; the columns are: {_listed(kinds)}", remedy)
    known = task if task is not None and tuple(parts.values()) == task.columns else None
    return Columns(parts, label, known)


def find_text_columns(kinds: Mapping[str, str], label: str | None, task: KnownTask | None) -> dict[str, str]:
    """Find the text columns of a sample by their names and kinds; return them by part."""
    strings = [name for name, kind in kinds.items() if kind == STRING and name != label]
    if task is not None and set(task.columns) <= set(strings):
        return dict(zip(("text", "text_pair"), task.columns, strict=True))
    for name in _MESSAGES:
        if kinds.get(name) == MESSAGES:
            return {"messages": name}
    for prompt, completion in _ANSWERED:
        if {prompt, completion} <= set(strings):
            context = _first_of(name for name in _CONTEXTS if name in strings and prompt == "instruction")
            return {"prompt": prompt, **({"input": context} if context else {}), "completion": completion}
    for first, second in _PAIRS:
        if {first, second} <= set(strings):
            return {"text": first, "text_pair": second}
    single = _first_of(name for name in _SINGLE_TEXTS if name in strings)
    return {"text": single or _only(strings, kinds, "text", REMEDY)}


def parse_text_columns(kinds: Mapping[str, str], given: str) -> dict[str, str]:
    """Parse --text-column: one column, two of a pair, or each with its part: prompt=a,completion=b.

    Two that are usually a prompt and its answer are taken as such, and so are three.
    """
    words = [given] if given in kinds else [word.strip() for word in given.split(",")]
    if all("=" in word and word not in kinds for word in words):
        parts = {role.strip(): name.strip() for role, _, name in (word.partition("=") for word in words)}
    else:
        parts = dict(zip(_roles(kinds, words), words, strict=False))
    if tuple(parts) not in _ROLES or len(parts) != len(words):
        shapes = "; ".join(",".join(f"{role}=COLUMN" for role in roles) for roles in _ROLES)
        raise ColumnError(f"--text-column is '{given}'", f"give one or two columns, or one of: {shapes}")
    for role, name in parts.items():
        _require_column(name, kinds, "--text-column")
        kind, what = (MESSAGES, "messages") if role == "messages" else (STRING, "texts")
        _require_kind(name, kinds, (kind,), what, "--text-column")
    return parts


def _roles(kinds: Mapping[str, str], words: Sequence[str]) -> tuple[str, ...]:
    if len(words) == 1:
        return ("messages",) if kinds.get(words[0]) == MESSAGES else ("text",)
    if len(words) == 2:
        return ("prompt", "completion") if tuple(words) in _ANSWERED else ("text", "text_pair")
    return ("prompt", "input", "completion")


def format_text_columns(parts: Mapping[str, str]) -> str | None:
    """Return the --text-column that gives these columns; None if they are an image's.

    >>> format_text_columns({"prompt": "a", "completion": "b"}), format_text_columns({"image": "a", "caption": "b"})
    ('prompt=a,completion=b', None)
    """
    if "image" in parts:
        return None
    if list(parts) == ["text"]:
        return parts["text"]
    return ",".join(f"{role}={name}" for role, name in parts.items()) or None


def _image_columns(kinds: Mapping[str, str], settings: Settings, needs_labels: bool) -> Columns:
    image, label = settings.image_column, settings.label_column
    if image is not None:
        _require_kind(image, kinds, ("image",), "images", "--image-column")
    image = image or _only(_of_kinds(kinds, "image"), kinds, "image", "name it with --image-column")
    remedy = "name it with --label-column; in a folder of images, put those of each class into a sub-folder of its name"
    if label is None and "class" in kinds.values():
        label = _named_label(kinds, LABELS, ("class",)) or _only(_of_kinds(kinds, "class"), kinds, "label", remedy)
    label = label or _named_label(kinds, LABELS)
    caption, caption_kinds = settings.caption_column, (STRING, _STRINGS)
    if caption is not None:
        _require_kind(caption, kinds, caption_kinds, "captions", "--caption-column")
    elif label is None and settings.labels != "dataset":
        caption = _first_of(name for name in _CAPTIONS if kinds.get(name) in caption_kinds)
    if caption is not None:
        return Columns({"image": image, "caption": caption}, label)
    candidates = _of_kinds(kinds, "integer", STRING)
    if label is None and (needs_labels or candidates):
        label = _only(candidates, kinds, "label", remedy)
    return Columns({"image": image}, label)


def _named_label(kinds: Mapping[str, str], names: Iterable[str], wanted: Sequence[str] = _LABEL_KINDS) -> str | None:
    return _first_of(name for name in names if kinds.get(name) in wanted)


def _of_kinds(kinds: Mapping[str, str], *wanted: str) -> list[str]:
    return [name for name, kind in kinds.items() if kind in wanted]


def _only(candidates: Sequence[str], kinds: Mapping[str, str], what: str, remedy: str) -> str:
    if len(candidates) == 1:
        return candidates[0]
    problem = "several columns could be" if candidates else "no column looks like"
    raise ColumnError(f"{problem} the {what} column; the columns are: {_listed(kinds)}", remedy)


def _require_column(name: str, kinds: Mapping[str, str], option: str) -> None:
    if name not in kinds:
        raise ColumnError(f"there is no column '{name}'", f"use one of: {', '.join(kinds)} ({option})")


def _require_kind(name: str, kinds: Mapping[str, str], wanted: Sequence[str], what: str, option: str) -> None:
    if kinds[name] not in wanted:
        raise ColumnError(f"the column '{name}' holds {kinds[name]}, not {what}", f"name another with {option}")


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def undecoded(rows: RowSequence, image: str) -> RowSequence:
    """Return the rows with images as stored: bytes or a path; rows that are in memory as they are."""
    if isinstance(rows, SmallParquet):
        return replace(rows, as_stored=True)
    if not hasattr(rows, "cast_column"):
        return rows
    import datasets

    return rows.cast_column(image, datasets.Image(decode=False))


def column(rows: RowSequence, name: str) -> list[Any]:
    """Return all values of one column."""
    try:
        return list(rows[name][:]) if hasattr(rows, "features") else [row[name] for row in rows]
    except (ValueError, KeyError, TypeError) as error:  # bytes that are no text, or rows that are not alike
        raise UnreadableSampleError(f"the column '{name}' cannot be read: {error}", "fix or remove the row") from error


def column_kinds(rows: RowSequence) -> dict[str, str]:
    """Return what each column holds, by its declared type or else by its first values."""
    if hasattr(rows, "features"):
        return feature_kinds(rows.features)
    if len(rows) == 0:
        return {}
    if not isinstance(rows[0], Mapping):
        raise ColumnError(
            f"the rows are of type {type(rows[0]).__name__}, without named columns",
            "give rows as dictionaries: [{'image': ..., 'label': ...}, ...]",
        )
    inspected = range(min(len(rows), _ROWS_INSPECTED))
    return {name: _value_kind(_first_of(rows[index].get(name) for index in inspected)) for name in rows[0]}


def feature_kinds(features: Mapping[str, Any]) -> dict[str, str]:
    """Return what columns of these declared types hold."""
    return {name: _feature_kind(feature) for name, feature in features.items()}


def _feature_kind(feature: Any) -> str:
    if isinstance(feature, StoredType):
        return feature.kind
    import datasets

    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, datasets.ClassLabel):
        return "class"
    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    if isinstance(feature, dict) and all(hasattr(value, "feature") for value in feature.values()):
        inner = feature  # a list of dictionaries, turned inside out
    if isinstance(inner, dict) and _are_messages(inner):
        return MESSAGES
    if isinstance(inner, datasets.Value) and "string" in inner.dtype:
        return _STRINGS
    dtype = str(getattr(feature, "dtype", type(feature).__name__))
    return "integer" if "int" in dtype else "string" if "string" in dtype else dtype


def _are_messages(keys: Iterable[str]) -> bool:
    return any(name in keys for name in _ROLE_KEYS) and any(name in keys for name in _CONTENT_KEYS)


def read_messages(value: Any) -> list[tuple[Any, Any]]:
    """Return (role, content) of each message, from a list of dictionaries or a dictionary of lists."""
    if isinstance(value, Mapping):
        roles, contents = (_first_of(map(value.get, keys)) or [] for keys in (_ROLE_KEYS, _CONTENT_KEYS))
        return list(zip(roles, contents, strict=True))
    return [(_first_of(map(one.get, _ROLE_KEYS)), _first_of(map(one.get, _CONTENT_KEYS))) for one in value]


def _first_of(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _value_kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0:  # numpy's and torch's integers too
        return "integer"
    if isinstance(value, str):
        return STRING
    if isinstance(value, Mapping) and _are_messages(value):
        return MESSAGES
    if isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
        return MESSAGES if _are_messages(value[0]) else type(value).__name__
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        return _STRINGS
    is_image = hasattr(value, "convert") or getattr(value, "ndim", 0) == 3  # PIL, or a prepared tensor
    return "image" if is_image else type(value).__name__
