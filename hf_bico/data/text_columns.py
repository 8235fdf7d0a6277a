"""Which columns hold texts: messages, a prompt and its answer, a pair of sentences, or one text.

Knows the names and kinds of columns; not what is in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_bico.data.known_tasks import KnownTask
from hf_bico.errors import ColumnError

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
