"""Texts as tokens; chat templates.

Chat templates that others wrote, rendered in a process of its own: within seconds and bounded memory, or not at all.

transformers lets a template reach no code of Python's, but it may loop and grow as it likes. Knows templates and
messages, not tokens.

Texts as tokens: batches, which tokens are learnt, and whether two tokenizers cut alike.

Knows tokenizers and samples of text; neither models nor losses.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor

from hf_bico.errors import MissingProcessorError, TokenizersDifferError, UnreadableSampleError
from hf_bico.models.hooks import TextRows
from hf_bico.runtime.environment import to_device
from hf_bico.utils.files import folder_name
from hf_bico.utils.samples import Answered, Chat, Text, TextSample

SECONDS = 5.0
"""How long one chat may take; real templates take thousandths."""
START_SECONDS = 120.0
MEMORY = 2**30
"""Bytes that a rendering may take."""

_RENDERER = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template
try:
    import resource
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + {memory}, resource.RLIM_INFINITY))
except (ImportError, OSError, ValueError):
    pass  # where there are no such limits, time is the limit
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    try:
        rendered, _ = render_jinja_template(**asked)
        text = json.dumps(["text", rendered[0]])
    except Exception as error:
        text = json.dumps(["error", " ".join(f"{{type(error).__name__}}: {{error}}".split())[:300]])
    print(text, flush=True)
"""


class Renderer:
    """A process that renders chats with whatever template; one that does not answer is ended."""

    def __init__(self) -> None:
        code = _RENDERER.format(memory=MEMORY)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._answers: Queue[bytes] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.alive = True
        self._answer(START_SECONDS)

    def render(self, asked: str) -> str:
        """The text of a chat; a ValueError where the template cannot take it, or takes too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(asked.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.end()
            raise ValueError("its process has ended") from None
        kind, text = json.loads(self._answer(SECONDS))
        if kind == "error":
            raise ValueError(text)
        return str(text)

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def _answer(self, seconds: float) -> bytes:
        try:
            answer = self._answers.get(timeout=seconds)
        except Empty:
            answer = b""
        except BaseException:  # an interrupt: the answer would be taken for the next one's
            self.end()
            raise
        if not answer:
            self.end()
            raise ValueError(f"it is not rendered within {SECONDS:g} seconds and {MEMORY >> 30} GiB")
        return answer


_only: list[Renderer] = []
_lock = threading.Lock()


def _render_bounded(asked: str) -> str:
    with _lock:
        if not _only or not _only[0].alive:
            _only[:] = [Renderer()]
        return _only[0].render(asked)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], answering: bool) -> str:
    """The text of a chat by the tokenizer's own template; a ValueError where it cannot be rendered."""
    from transformers import PreTrainedTokenizerBase

    chat = [dict(message) for message in messages]
    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        rendered: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answering)
        return rendered
    asked = {
        **tokenizer.special_tokens_map,
        "conversations": [chat],
        "chat_template": tokenizer.get_chat_template(),
        "add_generation_prompt": answering,
    }
    return _render_bounded(json.dumps(asked, default=str))


@atexit.register
def _end() -> None:
    for renderer in _only:
        renderer.end()


UNLEARNT = -100
"""The label of a token that is not learnt."""
USUAL_LENGTH = 2048
"""Most tokens of a text unless the caller says: some models can take a book, which calibration does not need."""
MOST_CHARACTERS = 10_000_000
"""Of a prompt with its answer, or of a chat: a tokenizer would take minutes over more."""
_LONGEST_TOKEN = 1_000
"""Characters of a token; what stands behind so many of them is not looked at."""
_ASSISTANT = "assistant"
_SHOWN = 60

Message = Mapping[str, str]


@dataclass(frozen=True)
class TokenBatch:
    """Texts as (samples, tokens): their ids, which of them are real, and the labels, -100 where nothing is learnt.

    Labels stand where their tokens do: the shift to the token before is the objective's business.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor
    on_host: TextRows | None = None
    """Ids and mask where they came from: to look at them there does not wait for a device."""

    @property
    def rows(self) -> TextRows:
        return self.on_host or TextRows(self.ids, self.mask)

    def to(self, device: torch.device | str) -> TokenBatch:
        there = torch.device(device)
        return TokenBatch(
            to_device(self.ids, there), to_device(self.mask, there), to_device(self.labels, there), self.rows
        )


@dataclass(frozen=True)
class _Tokens:
    """One text: its tokens, and which of them are learnt."""

    ids: list[int]
    learnt: list[bool]


def tokenise(
    tokenizer: Any, samples: Sequence[TextSample], max_length: int | None, *, special: bool = True
) -> TokenBatch:
    """A batch of texts, each cut to `max_length` tokens, padded on the tokenizer's own side, none packed together.

    A plain text is learnt whole, and loses its end where it is too long; of prompts and chats only the answers are
    learnt, and the beginning is lost. Without `special` tokens, only what the text itself says is there.
    """
    limit = longest(tokenizer) if max_length is None else max_length
    rows = [_tokens(tokenizer, sample, limit, special) for sample in samples]
    for row, sample in zip(rows, samples, strict=True):
        if not any(row.learnt):
            raise _nothing_to_learn(sample, limit)
    return _padded(rows, tokenizer)


def longest(tokenizer: Any) -> int:
    """How many tokens a text may have: what the tokenizer says of itself, and no more than usual."""
    own = getattr(tokenizer, "model_max_length", None)
    return min(own, USUAL_LENGTH) if isinstance(own, int) and own > 0 else USUAL_LENGTH


def text_to_text(text: Text) -> str:
    """What a T5 reads: the name of the task, where it is known, and each text after the name of its column.

    >>> text_to_text(Text("It rains.", "It is wet.", ("premise", "hypothesis"), "mnli"))
    'mnli hypothesis: It is wet. premise: It rains.'
    """
    texts = [text.first] if text.second is None else [text.first, text.second]
    if text.task is None and len(texts) == 1:
        return text.first
    names = text.names or (("sentence",) if len(texts) == 1 else ("sentence1", "sentence2"))
    named = zip(names, texts, strict=True)
    # T5 was taught its own tasks with the columns by name
    said = " ".join(f"{name}: {words}" for name, words in (sorted(named) if text.task is not None else named))
    return said if text.task is None else f"{text.task} {said}"


def pairable(source_tokenizer: Any, target_tokenizer: Any, texts: Iterable[TextSample | str]) -> None:
    """Refuse two tokenizers that cut these texts into different tokens: rows of the two models would not pair."""
    for text in (words for sample in texts for words in _words(sample)):
        found = [
            tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
            for tokenizer in (source_tokenizer, target_tokenizer)
        ]
        if found[0] != found[1]:
            raise _differ(source_tokenizer, target_tokenizer, *found)


def _words(sample: TextSample | str) -> list[str]:
    if isinstance(sample, str):
        return [sample]
    if isinstance(sample, Text):
        return [sample.first] if sample.second is None else [sample.first, sample.second]
    if isinstance(sample, Answered):
        return [sample.prompt, sample.answer]
    return [message["content"] for message in sample.messages]


def _differ(source: Any, target: Any, source_ids: list[int], target_ids: list[int]) -> TokenizersDifferError:
    place = next(
        (place for place, (one, other) in enumerate(zip(source_ids, target_ids, strict=False)) if one != other),
        min(len(source_ids), len(target_ids)),
    )
    one, other = (
        repr(tokenizer.decode(ids[place : place + 1]))[:_SHOWN] if place < len(ids) else "nothing"
        for tokenizer, ids in ((source, source_ids), (target, target_ids))
    )
    which = "the same piece under another number" if one == other else f"{one} here is {other} there"
    before = repr(source.decode(source_ids[max(0, place - 8) : place])[-_SHOWN:])
    return TokenizersDifferError(
        f"the two models' tokenizers cut the calibration texts into different tokens: after {before}, {which}",
        "choose a target with the same tokenizer; rows of different tokens are not paired yet",
    )


def _tokens(tokenizer: Any, sample: TextSample, limit: int, special: bool) -> _Tokens:
    if isinstance(sample, Text):
        return _plain(tokenizer, sample, limit, special)
    if sum(len(words) for words in _words(sample)) > MOST_CHARACTERS:
        raise UnreadableSampleError(
            f"a sample has more than {MOST_CHARACTERS:,} characters", "remove it from the data, or cut it into several"
        )
    if isinstance(sample, Chat):
        return _cut(_chat(tokenizer, sample.messages), tokenizer, limit)
    if getattr(tokenizer, "chat_template", None) and special:
        asked = {"role": "user", "content": sample.prompt.strip()}
        return _cut(_chat(tokenizer, (asked, {"role": _ASSISTANT, "content": sample.answer.strip()})), tokenizer, limit)
    return _cut(_answered(tokenizer, sample, special), tokenizer, limit)


def _plain(tokenizer: Any, text: Text, limit: int, special: bool) -> _Tokens:
    texts = (text.first,) if text.second is None else (text.first, text.second)
    pair = [words[: limit * _LONGEST_TOKEN] for words in texts]
    around = tokenizer.num_special_tokens_to_add(pair=len(pair) > 1) if special else 0
    if limit <= around:
        raise UnreadableSampleError(
            f"--max-length is {limit}, and the tokenizer puts {around} tokens around a text",
            "use a longer --max-length",
        )
    with _cutting_the_end(tokenizer):
        ids = tokenizer(*pair, add_special_tokens=special, truncation=True, max_length=limit)["input_ids"]
    return _Tokens(list(ids), [True] * len(ids))


@contextmanager
def _cutting_the_end(tokenizer: Any) -> Iterator[None]:
    """The tokenizer may be set to cut elsewhere, for what its model was made for."""
    before = tokenizer.truncation_side
    tokenizer.truncation_side = "right"
    try:
        yield
    finally:
        tokenizer.truncation_side = before


def _answered(tokenizer: Any, sample: Answered, special: bool) -> _Tokens:
    """Prompt and answer as one text, and the token that ends it where there is one."""
    text = sample.prompt + sample.answer
    ids, places = _placed(tokenizer, text, special)
    learnt = [end > len(sample.prompt) for _, end in places]
    end = tokenizer.eos_token_id if special else None
    if end is not None and ids[-1:] == [end]:
        learnt[-1] = True
    elif end is not None:
        ids, learnt = [*ids, end], [*learnt, True]
    return _Tokens(ids, learnt)


def no_template(model: str) -> MissingProcessorError:
    """Why chats cannot be read; the model is known by its name, where it has one."""
    whose = f"the tokenizer of '{model}'" if model else "the tokenizer"
    return MissingProcessorError(
        f"the samples are chats, and {whose} has no chat template",
        "use data with prompt and completion columns, or a model whose tokenizer has a template",
    )


def _chat(tokenizer: Any, messages: Sequence[Message]) -> _Tokens:
    """Messages in the tokenizer's own template; all that the assistant says is learnt, and what ends its turn."""
    if not getattr(tokenizer, "chat_template", None):
        raise no_template(folder_name(Path(tokenizer.name_or_path)))
    if not any(message["role"] == _ASSISTANT for message in messages):
        raise UnreadableSampleError("a chat has no message of the assistant", "remove it: there is nothing to learn")
    text = _rendered(tokenizer, messages)
    spans = _spans(tokenizer, messages, text)
    ids, places = _placed(tokenizer, text, False)
    return _Tokens(ids, [any(first < end and begin < last for begin, end in spans) for first, last in places])


def _spans(tokenizer: Any, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """Where in the rendered text the assistant speaks.

    A template that renders the beginning of a chat as the beginning of the whole says it by itself; in any other, what
    was said is marked and rendered once more.
    """
    found = []
    for place, message in enumerate(messages):
        if message["role"] != _ASSISTANT:
            continue
        span = _own_span(tokenizer, messages, place, text) or _marked_span(tokenizer, messages, place, text)
        if span is None:
            raise UnreadableSampleError(
                f"the chat template changes what the assistant says: {message['content'][:_SHOWN]!r}",
                "use data with prompt and completion columns, or remove the chat",
            )
        found.append(span)
    return found


def _own_span(tokenizer: Any, messages: Sequence[Message], place: int, text: str) -> tuple[int, int] | None:
    if place == 0:
        return None
    try:
        before = _rendered(tokenizer, messages[:place], answering=True)
        until = _rendered(tokenizer, messages[: place + 1])
    except UnreadableSampleError:  # half a chat may not be one to the template
        return None
    if not until.startswith(before) or not text.startswith(until):
        return None
    return len(before), len(until.rstrip())


def _marked_span(tokenizer: Any, messages: Sequence[Message], place: int, text: str) -> tuple[int, int] | None:
    """Where one message stands, with the special token behind it, which ends the turn; None where it is changed.

    Its words may stand elsewhere too, even in the template's own: so they are rendered between two marks.
    """
    opening, closing = _marks(text)
    content = messages[place]["content"]
    said = content.strip()
    start = len(content) - len(content.lstrip()) if said else 0
    inside = content[:start] + opening + said + closing + content[start + len(said) :]
    marked = _rendered(tokenizer, [*messages[:place], {**messages[place], "content": inside}, *messages[place + 1 :]])
    before, _, rest = marked.partition(opening)
    spoken, _, behind = rest.partition(closing)
    if spoken != said or before + said + behind != text:
        return None
    following = behind.lstrip()
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    ending = max((token for token in special if following.startswith(token)), key=len, default=None)
    end = len(before) + len(said)
    return (len(before), end) if ending is None else (len(before), len(text) - len(following) + len(ending))


def _marks(text: str) -> tuple[str, str]:
    """Two characters of those that stand for nothing, and are not in the text."""
    unused = (chr(number) for number in range(0xE000, 0xF900) if chr(number) not in text)
    return next(unused), next(unused)


def _rendered(tokenizer: Any, messages: Sequence[Message], answering: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        return render_chat(tokenizer, messages, answering)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnreadableSampleError(
            f"the chat template cannot take a chat: {error}",
            "remove it, or use data with prompt and completion columns",
        ) from error


def _placed(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a text, and from where to where in it each of them stands."""
    if not tokenizer.is_fast:
        raise MissingProcessorError(
            f"a {type(tokenizer).__name__} does not say where in a text its tokens stand",
            "use a model with a fast tokenizer (tokenizer.json), or data of plain texts",
        )
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, truncation=False, verbose=False)
    return list(found["input_ids"]), [tuple(place) for place in found["offset_mapping"]]


def _cut(tokens: _Tokens, tokenizer: Any, limit: int) -> _Tokens:
    """The end of a text, behind the token that begins every text where there is one: models lean on it."""
    over = len(tokens.ids) - limit
    if over <= 0:
        return tokens
    kept = 1 if limit > 1 and tokens.ids[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id) else 0
    rest = over + kept
    return _Tokens(tokens.ids[:kept] + tokens.ids[rest:], tokens.learnt[:kept] + tokens.learnt[rest:])


def _padded(rows: Sequence[_Tokens], tokenizer: Any) -> TokenBatch:
    width = max((len(row.ids) for row in rows), default=0)
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    ids = torch.full((len(rows), width), next((number for number in known if number is not None), 0))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    labels = torch.full((len(rows), width), UNLEARNT)
    for number, row in enumerate(rows):
        start = width - len(row.ids) if tokenizer.padding_side == "left" else 0
        place = slice(start, start + len(row.ids))
        ids[number, place] = own = torch.tensor(row.ids)
        mask[number, place] = True
        labels[number, place] = own.where(torch.tensor(row.learnt), UNLEARNT)
    return TokenBatch(ids, mask, labels)


def _nothing_to_learn(sample: TextSample, limit: int) -> UnreadableSampleError:
    if isinstance(sample, Text):
        return UnreadableSampleError("a text has no tokens", "remove empty texts from the data")
    return UnreadableSampleError(
        f"nothing of an answer is within the last {limit} tokens of a sample, or it is empty",
        "use a longer --max-length, or remove the sample",
    )
