"""Which columns make up a sample; class names.

Data sets that are known by name: their columns, classes and the split to measure on. Opens nothing.

Which columns hold texts: messages, a prompt and its answer, a pair of sentences, or one text.

Knows the names and kinds of columns; not what is in the rows.

The columns of a data set: what they hold, which of them make up a sample, and what the classes are called.

Knows rows and their types; neither files nor samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_bico.errors import ClassNamesError, ColumnError, UnreadableSampleError, UsageError
from hf_bico.settings import Settings
from hf_bico.utils.samples import TEXTS


@dataclass(frozen=True)
class KnownTask:
    """A task of sentence pairs: `name` is the word that T5 was taught to know it by, `classes` its label words."""

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
    """The task of a data set, by its configuration (GLUE has one for each) or else its own name.

    A copy elsewhere is known in the same way, as long as it has the columns.

    >>> known_task("nyu-mll/glue", "rte", ("sentence1", "sentence2", "label")).measured_on
    'validation'
    """
    own_name = name.rstrip("/").rpartition("/")[2].lower()
    task = _TASKS.get((config or own_name).lower()) or _TASKS.get(own_name)
    return task if task is not None and {*task.columns, task.label} <= set(columns) else None


STRING, MESSAGES = "string", "messages"
"""The kinds of columns that may hold a text."""
_MESSAGES = ("messages", "conversations", "conversation")
_ANSWERED = (
    *(("prompt", "completion"), ("prompt", "response"), ("prompt", "answer")),
    *(("instruction", "output"), ("instruction", "response"), ("instruction", "completion")),
    *(("question", "answer"), ("question", "response"), ("query", "response"), ("query", "answer")),
    *(("problem", "solution"), ("input", "output")),
)
_INPUTS = ("input", "context")
"""What an instruction may be about, in a column of its own."""
_PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question", "sentence"), ("question1", "question2")),
    *(("text", "text_pair"), ("text1", "text2"), ("sentence_A", "sentence_B"), ("question", "passage")),
)
_ONE = ("text", "sentence", "content", "review", "document", "utterance", "tweet")
_ROLES = (
    *(("text",), ("text", "text_pair"), ("prompt", "completion"), ("prompt", "input", "completion")),
    ("messages",),
)
"""What a sample of texts can be made of."""
REMEDY = "name it with --text-column; two of a pair with a comma between them, or prompt=COLUMN,completion=COLUMN"


def find_texts(kinds: Mapping[str, str], label: str | None, task: KnownTask | None) -> dict[str, str]:
    """The columns of a sample by what they are to it, found by their names and kinds; the `label` is none of them."""
    strings = [name for name, kind in kinds.items() if kind == STRING and name != label]
    if task is not None and set(task.columns) <= set(strings):
        return dict(zip(("text", "text_pair"), task.columns, strict=True))
    for name in _MESSAGES:
        if kinds.get(name) == MESSAGES:
            return {"messages": name}
    for prompt, completion in _ANSWERED:
        if {prompt, completion} <= set(strings):
            about = next((name for name in _INPUTS if name in strings and prompt == "instruction"), None)
            beside = {} if about is None else {"input": about}
            return {"prompt": prompt, **beside, "completion": completion}
    for first, second in _PAIRS:
        if {first, second} <= set(strings):
            return {"text": first, "text_pair": second}
    for name in _ONE:
        if name in strings:
            return {"text": name}
    if len(strings) != 1:
        problem = "several columns could be" if strings else "no column looks like"
        raise ColumnError(f"{problem} the text column; the columns are: {listed(kinds)}", REMEDY)
    return {"text": strings[0]}


def named_texts(kinds: Mapping[str, str], given: str) -> dict[str, str]:
    """The columns that were named: one, two of a pair, or each with what it is: prompt=a,completion=b.

    Two that are usually a prompt and its answer are taken as such, and so are three.
    """
    words = [given] if given in kinds else [word.strip() for word in given.split(",")]
    if all("=" in word and word not in kinds for word in words):
        typed = [word.partition("=") for word in words]
        parts = {role.strip(): name.strip() for role, _, name in typed}
    else:
        parts = dict(zip(_roles(kinds, words), words, strict=False))
    if tuple(parts) not in _ROLES or len(parts) != len(words):
        shapes = "; ".join(",".join(f"{role}=COLUMN" for role in roles) for roles in _ROLES)
        raise ColumnError(f"--text-column is '{given}'", f"give one or two columns, or one of: {shapes}")
    for role, name in parts.items():
        wanted = MESSAGES if role == "messages" else STRING
        if name not in kinds:
            raise ColumnError(f"there is no column '{name}'", f"use one of: {', '.join(kinds)} (--text-column)")
        if kinds[name] != wanted:
            what = "messages" if wanted == MESSAGES else "texts"
            raise ColumnError(f"the column '{name}' holds {kinds[name]}, not {what}", "name another with --text-column")
    return parts


def _roles(kinds: Mapping[str, str], words: Sequence[str]) -> tuple[str, ...]:
    if len(words) == 1:
        return ("messages",) if kinds.get(words[0]) == MESSAGES else ("text",)
    if len(words) == 2:
        return ("prompt", "completion") if tuple(words) in _ANSWERED else ("text", "text_pair")
    return ("prompt", "input", "completion")


def typed_texts(parts: Mapping[str, str]) -> str | None:
    """What to give as --text-column to have these columns; None where they hold no texts of their own.

    >>> typed_texts({"prompt": "a", "completion": "b"}), typed_texts({"image": "a", "caption": "b"})
    ('prompt=a,completion=b', None)
    """
    if "image" in parts:
        return None
    if list(parts) == ["text"]:
        return parts["text"]
    return ",".join(f"{role}={name}" for role, name in parts.items()) or None


def listed(kinds: Mapping[str, str]) -> str:
    """All columns with their kinds, for a message."""
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


Rows = Any
"""Indexable rows: a `datasets.Dataset` or a list of dictionaries."""
NAMES_REMEDY = "give a file with one class name a line: --class-names FILE"
_LABELS = ("label", "labels")
"""What a label column is called, where several could be one."""
_OTHER_LABELS = ("gold_label", "class", "category", "sentiment", "emotion", "intent")
"""What a label column beside texts may be called, too: there other numbers are mostly something else."""
_CAPTIONS = ("caption", "captions", "text", "sentence", "sentences", "description", "title")
_LABEL_KINDS = ("class", "integer", STRING)
_STRINGS = "strings"
_SPEAKERS, _SPEECHES = ("role", "from"), ("content", "value")
_MOST_CLASSES = 1_000_000
_LOOKED_AT = 100
"""In so many rows of a list a value is looked for that says what a column holds."""


@dataclass(frozen=True)
class Columns:
    """The names of the columns that a sample is made of, by what they are to it; without labels there is no `label`.

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
        """All of them."""
        return (*self.parts.values(), *(() if self.label is None else (self.label,)))

    @property
    def by_role(self) -> dict[str, str]:
        """All of them by what they are, the label among them."""
        return {**self.parts, **({} if self.label is None else {"label": self.label})}

    @property
    def is_self_supervised(self) -> bool:
        """Whether a sample without a label has something to learn: texts and captions do, an image alone does not."""
        return tuple(self.parts) != ("image",)

    def without_label(self) -> Columns:
        return replace(self, label=None)


def undecoded(rows: Rows, image: str) -> Rows:
    """The rows with their images as stored, bytes or a path."""
    import datasets

    return rows.cast_column(image, datasets.Image(decode=False))


def column(rows: Rows, name: str) -> list[Any]:
    """All values of one column."""
    try:
        return list(rows[name][:]) if hasattr(rows, "features") else [row[name] for row in rows]
    except (ValueError, KeyError, TypeError) as error:  # bytes that are no text, or rows that are not alike
        raise UnreadableSampleError(f"the column '{name}' cannot be read: {error}", "mend or remove the row") from error


def find_columns(
    kinds: Mapping[str, str],
    settings: Settings,
    reads: str,
    *,
    needs_labels: bool = True,
    task: KnownTask | None = None,
) -> Columns:
    """The columns that were named, else those that hold what the model `reads`, and classes.

    Where labels are not needed, a data set in which no column could hold any is taken as it is.
    """
    of_texts = reads == TEXTS
    label = settings.label_column
    for given, option, fits in (
        (settings.image_column, "--image-column", not of_texts),
        (settings.caption_column, "--caption-column", not of_texts),
        (settings.text_column, "--text-column", of_texts),
    ):
        if given is not None and not fits:
            raise UsageError(f"{option} is '{given}', and the models read {reads}", f"leave {option} out")
    for given, option in (
        (settings.image_column, "--image-column"),
        (settings.caption_column, "--caption-column"),
        (label, "--label-column"),
    ):
        if given is not None and given not in kinds:
            raise ColumnError(f"there is no column '{given}'", f"use one of: {', '.join(kinds)} ({option})")
    if label is not None and kinds[label] not in _LABEL_KINDS:
        raise ColumnError(f"the column '{label}' holds {kinds[label]}, not labels", "name another with --label-column")
    if of_texts:
        return _text_columns(kinds, settings, task, settings.labels == "dataset")
    return _image_columns(kinds, settings, needs_labels)


def _text_columns(kinds: Mapping[str, str], settings: Settings, task: KnownTask | None, needs_labels: bool) -> Columns:
    """Labels beside texts are those that say so by type or name: any other number or text may be anything."""
    label = settings.label_column or _named_label(kinds, (*_LABELS, *_OTHER_LABELS))
    if label is None and "class" in kinds.values():
        label = _only(kinds, ("class",), "label", "name it with --label-column")
    given = settings.text_column
    parts = find_texts(kinds, label, task) if given is None else named_texts(kinds, given)
    if settings.label_column is None and (label in parts.values() or not {"text"} & set(parts)):
        label = None  # an answer is all that a prompt or a chat is to learn
    if label is None and needs_labels:
        remedy = "name it with --label-column, or leave --labels dataset out"
        raise ColumnError(f"no column looks like the label column; the columns are: {listed(kinds)}", remedy)
    known = task if task is not None and tuple(parts.values()) == task.columns else None
    return Columns(parts, label, known)


def _image_columns(kinds: Mapping[str, str], settings: Settings, needs_labels: bool) -> Columns:
    image, label = settings.image_column, settings.label_column
    if image is not None and kinds[image] != "image":
        raise ColumnError(f"the column '{image}' holds {kinds[image]}, not images", "name another with --image-column")
    image = image or _only(kinds, ("image",), "image", "name it with --image-column")
    remedy = "name it with --label-column; in a folder of images, put those of each class into a sub-folder of its name"
    if label is None and "class" in kinds.values():
        label = _named_label(kinds, _LABELS, ("class",)) or _only(kinds, ("class",), "label", remedy)
    label = label or _named_label(kinds, _LABELS)
    caption = _caption(kinds, settings, label)
    if caption is not None:
        return Columns({"image": image, "caption": caption}, label)
    if label is None and not needs_labels and not {"integer", STRING} & set(kinds.values()):
        return Columns({"image": image})
    return Columns({"image": image}, label or _only(kinds, ("integer", STRING), "label", remedy))


def _caption(kinds: Mapping[str, str], settings: Settings, label: str | None) -> str | None:
    """The column of captions: the one that was named, else, where nothing is a label, one of a usual name."""
    given = settings.caption_column
    if given is not None and kinds[given] not in (STRING, _STRINGS):
        raise ColumnError(
            f"the column '{given}' holds {kinds[given]}, not captions", "name another with --caption-column"
        )
    if given is not None or label is not None or settings.labels == "dataset":
        return given
    return next((name for name in _CAPTIONS if kinds.get(name) in (STRING, _STRINGS)), None)


def _named_label(kinds: Mapping[str, str], names: Iterable[str], wanted: Sequence[str] = _LABEL_KINDS) -> str | None:
    return next((name for name in names if kinds.get(name) in wanted), None)


def _only(kinds: Mapping[str, str], wanted: Sequence[str], what: str, remedy: str) -> str:
    found = [name for name, kind in kinds.items() if kind in wanted]
    if len(found) == 1:
        return found[0]
    problem = "several columns could be" if found else "no column looks like"
    raise ColumnError(f"{problem} the {what} column; the columns are: {listed(kinds)}", remedy)


def column_kinds(rows: Rows) -> dict[str, str]:
    """What each column holds, by its declared type or by the first row's value."""
    if hasattr(rows, "features"):
        return feature_kinds(rows.features)
    if len(rows) == 0:
        return {}
    if not isinstance(rows[0], Mapping):
        raise ColumnError(
            f"the rows are of type {type(rows[0]).__name__}, without named columns",
            "give rows as dictionaries: [{'image': ..., 'label': ...}, ...]",
        )
    return {name: _kind_of_value(_first_value(rows, name)) for name in rows[0]}


def _first_value(rows: Rows, name: str) -> Any:
    """The first value of a column that is one."""
    values = (rows[index].get(name) for index in range(min(len(rows), _LOOKED_AT)))
    return next((value for value in values if value is not None), None)


def feature_kinds(features: Mapping[str, Any]) -> dict[str, str]:
    """What columns of these declared types hold."""
    import datasets

    kinds = {}
    for name, feature in features.items():
        if isinstance(feature, datasets.Image):
            kinds[name] = "image"
        elif isinstance(feature, datasets.ClassLabel):
            kinds[name] = "class"
        elif (kind := _kind_of_list(feature)) is not None:
            kinds[name] = kind
        else:
            dtype = str(getattr(feature, "dtype", type(feature).__name__))
            kinds[name] = "integer" if "int" in dtype else "string" if "string" in dtype else dtype
    return kinds


def _kind_of_list(feature: Any) -> str | None:
    """What a list of this declared type holds; None of what is none, or holds anything else."""
    import datasets

    if isinstance(feature, dict):  # a list of dictionaries, turned inside out
        of_lists = all(hasattr(value, "feature") for value in feature.values())
        return MESSAGES if of_lists and _are_messages(feature) else None
    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    if isinstance(inner, dict):
        return MESSAGES if _are_messages(inner) else None
    return _STRINGS if isinstance(inner, datasets.Value) and "string" in inner.dtype else None


def _are_messages(keys: Iterable[str]) -> bool:
    return any(name in keys for name in _SPEAKERS) and any(name in keys for name in _SPEECHES)


def read_messages(value: Any) -> list[tuple[Any, Any]]:
    """(speaker, speech) of each message, of a list of dictionaries or a dictionary of lists."""
    if isinstance(value, Mapping):
        speakers, speeches = (_first_of(value, names) or [] for names in (_SPEAKERS, _SPEECHES))
        return list(zip(speakers, speeches, strict=True))
    return [(_first_of(message, _SPEAKERS), _first_of(message, _SPEECHES)) for message in value]


def _first_of(values: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _kind_of_value(value: Any) -> str:
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


def class_names(
    splits: Any, columns: Columns, settings: Settings, known_names: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Names as given, from the features, the sorted distinct strings of all splits, or known from elsewhere.

    Where an objective needs no names, numbers stand for themselves, and without labels there are none: an image alone
    is told by them, a text only where they are its answer.
    """
    splits, given, label = list(splits), settings.class_names, columns.label
    answers = label is not None and settings.objective == "text-to-text"
    needs_names = answers or (settings.names_classes and not columns.is_self_supervised)
    known_names = known_names if columns.task is None else columns.task.classes
    if label is None:
        return _names_without_labels(given or known_names, needs_names)
    declarations = [getattr(getattr(rows, "features", {}).get(label), "names", None) for rows in splits]
    declared = next((names for names in declarations if names is not None), None)
    if any(names is not None and names != declared for names in declarations):
        raise ClassNamesError(
            f"the splits name the classes of '{label}' differently", "give a data set whose splits agree"
        )
    if given is not None and declared is not None and len(given) != len(declared):
        raise ClassNamesError(
            f"{len(given)} class names were given and the data set has {len(declared)} classes",
            "give one name for each class, in the order of the labels",
        )
    known = given or declared
    if known:
        return tuple(known)
    labels = [column(rows, label) for rows in splits if label in column_kinds(rows)]
    values = _distinct(labels, label)
    if values and all(isinstance(value, str) for value in values):
        return _names_of(values, columns)
    if values and known_names:
        return tuple(known_names)
    if values and not needs_names:
        return _numbered(values, label)
    raise ClassNamesError(
        f"the column '{label}' holds numbers without names",
        f"{NAMES_REMEDY} (class_names=[...] in Python)",
    )


def _distinct(labels: Iterable[Iterable[Any]], name: str) -> set[Any]:
    """The labels that occur, texts or numbers."""
    try:
        values = {value for some in labels for value in some if value is not None}
    except TypeError as error:  # a list, or the like
        raise ColumnError(
            f"the column '{name}' holds more than a label in a row", "name another with --label-column"
        ) from error
    if len({isinstance(value, str) for value in values}) > 1:
        raise ColumnError(f"the column '{name}' holds texts and numbers", "name another with --label-column")
    return values


def _numbered(values: set[Any], name: str) -> tuple[str, ...]:
    """Names for numbers: themselves, up to the largest."""
    try:
        largest = int(max(values))
    except (TypeError, ValueError, OverflowError):
        largest = _MOST_CLASSES
    if largest >= _MOST_CLASSES:
        raise ColumnError(
            f"the column '{name}' holds numbers that count no classes", "name another with --label-column"
        )
    return tuple(str(number) for number in range(largest + 1))


def _names_of(values: set[str], columns: Columns) -> tuple[str, ...]:
    """Sorted, but for the classes of a known task, which have an order."""
    if columns.task is not None and values <= set(columns.task.classes):
        return columns.task.classes
    return tuple(sorted(values))


def _names_without_labels(names: Sequence[str] | None, needs_names: bool) -> tuple[str, ...]:
    if not names and needs_names:
        raise ClassNamesError(
            "no column looks like the label column, and nothing names the classes",
            f"{NAMES_REMEDY}, or name the column with --label-column",
        )
    return tuple(names or ())
