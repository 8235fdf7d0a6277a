"""From a row to a sample of text: which values become which part of it. Knows rows; neither files nor tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_bico.data.columns import Columns, read_messages
from hf_bico.errors import UnreadableSampleError
from hf_bico.utils.samples import Answered, Chat, Text, TextSample

_SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
"""What others call the two who speak."""


def text_item(row: Mapping[str, Any], columns: Columns, index: int) -> TextSample:
    """The sample of text that a row is; `index` is for errors."""
    parts = columns.parts
    if "messages" in parts:
        return _chat(row[parts["messages"]], parts["messages"], index)
    if "prompt" in parts:
        return _answered(row, columns, index)
    texts = [_string(row[name], name, index) for name in parts.values()]
    task = None if columns.task is None else columns.task.name
    return Text(texts[0], texts[1] if len(texts) > 1 else None, tuple(parts.values()), task)


def teaches(row: Mapping[str, Any], columns: Columns) -> bool:
    """Whether there is anything to learn in a row of text; a broken one is not passed over, but named when it is read.

    Many lines of a book are empty, and some chats end before the assistant speaks.
    """
    try:
        sample = text_item(row, columns, 0)
    except UnreadableSampleError:
        return True
    if isinstance(sample, Chat):
        return any(message["role"] == "assistant" and message["content"].strip() for message in sample.messages)
    learnt = sample.answer if isinstance(sample, Answered) else sample.first + (sample.second or "")
    return bool(learnt.strip())


def caption_of(value: Any, name: str, index: int) -> str:
    """The caption of an image, of several the first."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return _string(value, name, index)


def _answered(row: Mapping[str, Any], columns: Columns, index: int) -> Answered:
    """A prompt stands before its completion as it is; an instruction or a question has a line of its own."""
    parts = columns.parts
    prompt = _string(row[parts["prompt"]], parts["prompt"], index)
    about = row[parts["input"]] if "input" in parts else None
    if about:
        prompt = f"{prompt}\n\n{_string(about, parts['input'], index)}"
    answer = _string(row[parts["completion"]], parts["completion"], index)
    together = parts["completion"] == "completion" or prompt[-1:].isspace() or answer[:1].isspace()
    return Answered(prompt if together else f"{prompt}\n", answer)


def _chat(value: Any, name: str, index: int) -> Chat:
    try:
        messages = read_messages(value) if value is not None else []
    except (TypeError, ValueError, AttributeError):
        messages = []
    if not messages:
        raise _broken(index, name, "no messages")
    for speaker, speech in messages:
        if not isinstance(speaker, str) or not isinstance(speech, str):
            raise _broken(index, name, "a message without a role or a text")
    return Chat(tuple({"role": _SPEAKERS.get(who.lower(), who), "content": said} for who, said in messages))


def _string(value: Any, name: str, index: int) -> str:
    if not isinstance(value, str):
        raise _broken(index, name, "no text" if value is None else f"a {type(value).__name__}, not a text")
    return value


def _broken(index: int, name: str, what: str) -> UnreadableSampleError:
    return UnreadableSampleError(f"row {index} has {what} in column '{name}'", "remove or replace the row")
