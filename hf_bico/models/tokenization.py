"""Turn texts, prompts with answers and chats into batches of tokens.

Chat templates are rendered in a sandbox. Only batches need torch. Knows tokenizers and samples of text; neither models
nor losses.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_bico.errors import MissingProcessorError, UnreadableSampleError
from hf_bico.models.sandbox import MEMORY, Sandbox
from hf_bico.models.token_places import (
    Encoding,
    Place,
    Span,
    byte_length,
    encode,
    places_between,
    places_of,
    token_spans,
)
from hf_bico.utils.files import folder_name
from hf_bico.utils.samples import Answered, Chat, Text, TextSample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hf_bico.models.hooks import TextRows

TEMPLATE_SECONDS = 5.0
"""The limit for one chat: real templates take milliseconds."""
_RENDER = """
from transformers.utils.chat_template_utils import render_jinja_template

def answer(options):
    return render_jinja_template(**options)[0][0]
"""
_renderers: list[Sandbox] = []
_lock = threading.Lock()

UNLEARNT = -100
"""The label of a token that is not learnt."""
USUAL_LENGTH = 2048
"""The most tokens of a text by default: some models can take a book, which calibration does not need."""
MOST_CHARACTERS = 10_000_000
"""The limit for a prompt with its answer, or a chat: a tokenizer would take minutes over more."""
_LONGEST_TOKEN = 1_000
"""Characters of a token at most; a text is cut to this many times its tokens before it is tokenised."""
MOST_UNKNOWN, NOTABLE_UNKNOWN = 0.5, 0.05
"""Shares of unknown tokens above which texts are refused, and above which a notice says so."""
_LOOKED_AT = 10_000
"""Characters of a text that are searched for unknown tokens."""
_ASSISTANT = "assistant"
_SHOWN = 60

Message = Mapping[str, str]


@dataclass(frozen=True)
class TokenBatch:
    """Texts as (samples, tokens): their ids, which are real, and the labels, -100 where nothing is learnt.

    A label stands at its own token; objectives shift it to the token before.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor
    on_host: TextRows | None = None
    """Ids and mask in main memory, to read them without a device sync."""

    @property
    def rows(self) -> TextRows:
        from hf_bico.models.hooks import TextRows

        return self.on_host or TextRows(self.ids, self.mask)

    def to(self, device: torch.device | str) -> TokenBatch:
        import torch

        from hf_bico.runtime.environment import to_device

        ids, mask, labels = (to_device(one, torch.device(device)) for one in (self.ids, self.mask, self.labels))
        return TokenBatch(ids, mask, labels, self.rows)


@dataclass(frozen=True)
class SampleTokens:
    """One sample: its tokens, which of them are learnt, and where they end, if that was asked for."""

    ids: list[int]
    learnt: list[bool]
    places: list[Place | None] = field(default_factory=list)

    def only(self, kept: Sequence[int]) -> SampleTokens:
        """Return the tokens of these numbers."""
        ids, learnt = [self.ids[number] for number in kept], [self.learnt[number] for number in kept]
        return SampleTokens(ids, learnt, [self.places[number] for number in kept if self.places])


@dataclass(frozen=True)
class Reader:
    """How a model reads samples: its tokenizer, the most tokens of a text, and whether with special tokens."""

    tokenizer: Any
    longest: int
    special: bool = True

    def read(self, sample: TextSample, placed: bool = False) -> SampleTokens:
        """Return the tokens of a sample that there is room for; refuse one of which nothing is learnt."""
        tokens = self.tokens(sample, placed)
        return self.require_learnt(self.from_token(tokens, self.begin(tokens)), sample)

    def predicted_bytes(self, sample: TextSample) -> int:
        """Return the bytes that the learnt tokens stand for; not the first, which is predicted from nothing."""
        tokens = self.read(sample, placed=True)
        predicted = zip(tokens.learnt[1:], tokens.places[1:], strict=True)
        return sum(place.width for is_learnt, place in predicted if is_learnt and place is not None)

    def tokens(self, sample: TextSample, placed: bool = False) -> SampleTokens:
        """Return the tokens of a sample; those of a plain text without the end that there is no room for."""
        if isinstance(sample, Text):
            return _plain(self.tokenizer, sample, self.longest, self.special, placed)
        if sum(len(words) for words in words_of(sample)) > MOST_CHARACTERS:
            raise UnreadableSampleError(
                f"a sample has more than {MOST_CHARACTERS:,} characters",
                "remove it from the data, or cut it into several",
            )
        if isinstance(sample, Chat):
            return _chat(self.tokenizer, sample.messages, placed)
        if getattr(self.tokenizer, "chat_template", None) and self.special:
            asked = {"role": "user", "content": sample.prompt.strip()}
            return _chat(self.tokenizer, (asked, {"role": _ASSISTANT, "content": sample.answer.strip()}), placed)
        return _answered(self.tokenizer, sample, self.special, placed)

    def begin(self, tokens: SampleTokens) -> int:
        """Return the first token that there is room for, if the beginning is lost; the start token stays besides."""
        over = len(tokens.ids) - self.longest
        return 0 if over <= 0 else over + self._starts(tokens, self.longest)

    def from_token(self, tokens: SampleTokens, first: int) -> SampleTokens:
        """Return the tokens from one on, behind the start token if there is one: models rely on it."""
        if not first:
            return tokens
        start = [0] if self._starts(tokens, self.longest) else []
        return tokens.only([*start, *range(first, len(tokens.ids))])

    def _starts(self, tokens: SampleTokens, room: int) -> bool:
        return room > 1 and tokens.ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id)

    def require_learnt(self, tokens: SampleTokens, sample: TextSample) -> SampleTokens:
        """Refuse a sample of which nothing is learnt."""
        if any(tokens.learnt):
            return tokens
        if isinstance(sample, Text):
            raise UnreadableSampleError("a text has no tokens", "remove empty texts from the data")
        raise UnreadableSampleError(
            f"nothing of an answer is within the last {self.longest} tokens of a sample, or it is empty",
            "use a longer --max-length, or remove the sample",
        )


def tokenise(
    tokenizer: Any, samples: Sequence[TextSample], max_length: int | None, *, special: bool = True
) -> TokenBatch:
    """Tokenise a batch of texts, each cut to `max_length` tokens and padded on the tokenizer's own side.

    A plain text is learnt whole, and loses its end if it is too long; of prompts and chats only the answers are learnt,
    and the beginning is lost. Without `special` tokens, only those of the text itself are there.
    """
    reader = Reader(tokenizer, longest(tokenizer) if max_length is None else max_length, special)
    return padded([reader.read(sample) for sample in samples], tokenizer)


def longest(tokenizer: Any) -> int:
    """Return the most tokens of a text: the tokenizer's own limit, but no more than usual."""
    own = getattr(tokenizer, "model_max_length", None)
    return min(own, USUAL_LENGTH) if isinstance(own, int) and own > 0 else USUAL_LENGTH


def text_to_text(text: Text) -> str:
    """Format a text for T5: the name of the task, if known, and each text after the name of its column.

    >>> text_to_text(Text("It rains.", "It is wet.", ("premise", "hypothesis"), "mnli"))
    'mnli hypothesis: It is wet. premise: It rains.'
    """
    texts = words_of(text)
    if text.task is None and len(texts) == 1:
        return text.first
    names = text.names or (("sentence",) if len(texts) == 1 else ("sentence1", "sentence2"))
    named = zip(names, texts, strict=True)
    # T5 was trained on its own tasks with the columns in order of their names
    said = " ".join(f"{name}: {words}" for name, words in (sorted(named) if text.task is not None else named))
    return said if text.task is None else f"{text.task} {said}"


def unknown_share(tokenizer: Any, texts: Iterable[TextSample | str]) -> tuple[float, str]:
    """Return the share of the texts' tokens that the tokenizer does not know, and the text with the most of them."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return 0.0, ""  # knows every byte, and needs none
    tokens, found, most, worst = 0, 0, 0, ""
    for text in (words[:_LOOKED_AT] for sample in texts for words in words_of(sample)):
        ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        count = ids.count(unknown)
        tokens, found = tokens + len(ids), found + count
        if count > most:
            most, worst = count, text
    return found / max(tokens, 1), worst


def require_known(tokenizer: Any, texts: Sequence[TextSample], model: str) -> float:
    """Refuse texts most of whose tokens the tokenizer does not know; return the share of unknown tokens."""
    share, text = unknown_share(tokenizer, texts)
    if share > MOST_UNKNOWN:
        raise UnreadableSampleError(
            f"the tokenizer of '{model}' does not know {share:.0%} of the texts' tokens: {text[:_SHOWN]!r} is read as "
            f"{_as_read(tokenizer, text)!r}",
            "put the model's own tokenizer beside it, or write the texts as it was trained on them",
        )
    return share


def unknown_notices(share: float, model: str) -> list[str]:
    """Return a notice about texts of which the tokenizer does not know a notable share."""
    if share <= NOTABLE_UNKNOWN:
        return []
    return [f"The tokenizer of {model} does not know {share:.0%} of the texts' tokens: is it the model's own?"]


def _as_read(tokenizer: Any, text: str) -> str:
    ids = tokenizer(text[:_SHOWN], add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return str(tokenizer.decode(ids))[:_SHOWN]


def words_of(sample: TextSample | str) -> list[str]:
    """Return the texts of a sample, without any template."""
    if isinstance(sample, str):
        return [sample]
    if isinstance(sample, Text):
        return [sample.first] if sample.second is None else [sample.first, sample.second]
    if isinstance(sample, Answered):
        return [sample.prompt, sample.answer]
    return [message["content"] for message in sample.messages]


def _plain(tokenizer: Any, text: Text, limit: int, special: bool, placed: bool) -> SampleTokens:
    pair = [words[: limit * _LONGEST_TOKEN] for words in words_of(text)]
    around = tokenizer.num_special_tokens_to_add(pair=len(pair) > 1) if special else 0
    if limit <= around:
        raise UnreadableSampleError(
            f"--max-length is {limit}, and the tokenizer puts {around} tokens around a text",
            "use a longer --max-length",
        )
    side, tokenizer.truncation_side = tokenizer.truncation_side, "right"  # the end is cut
    try:
        if placed:
            found = encode(tokenizer, pair, special, limit)
            return SampleTokens(found.ids, [True] * len(found.ids), places_of(tokenizer, found, pair))
        ids = tokenizer(*pair, add_special_tokens=special, truncation=True, max_length=limit)["input_ids"]
    finally:
        tokenizer.truncation_side = side
    return SampleTokens(list(ids), [True] * len(ids))


def _answered(tokenizer: Any, sample: Answered, special: bool, placed: bool) -> SampleTokens:
    """Tokenise prompt and answer as one text, with the end token if there is one."""
    text, asked = sample.prompt + sample.answer, byte_length(sample.prompt)
    found = encode(tokenizer, [text], special)
    learnt = [end > asked for _, end in token_spans(tokenizer, found, text)]
    places = places_of(tokenizer, found, [text]) if placed else []
    ids, end = found.ids, tokenizer.eos_token_id if special else None
    if end is not None and ids[-1:] == [end]:
        learnt[-1] = True
    elif end is not None:
        ids, learnt = [*ids, end], [*learnt, True]
        places = [*places, Place(0, "", found.parts[::-1].index(0), 0)] if placed else []
    return SampleTokens(ids, learnt, places)


def no_template(model: str) -> MissingProcessorError:
    """Make the error for chats without a template; `model` may be empty."""
    whose = f"the tokenizer of '{model}'" if model else "the tokenizer"
    return MissingProcessorError(
        f"the samples are chats, and {whose} has no chat template",
        "use data with prompt and completion columns, or a model whose tokenizer has a template",
    )


def _chat(tokenizer: Any, messages: Sequence[Message], placed: bool) -> SampleTokens:
    """Tokenise messages in the tokenizer's template; what the assistant says is learnt, with the end of its turn."""
    if not getattr(tokenizer, "chat_template", None):
        raise no_template(folder_name(Path(tokenizer.name_or_path)))
    if not any(message["role"] == _ASSISTANT for message in messages):
        raise UnreadableSampleError("a chat has no message of the assistant", "remove it: it teaches nothing")
    text = _rendered(tokenizer, messages)
    turns = [tuple(byte_length(text[:place]) for place in span) for span in _turns(tokenizer, messages, text)]
    found = encode(tokenizer, [text], special=False)
    spans = token_spans(tokenizer, found, text)
    learnt = [any(first < end and begin < last for first, last in turns) for begin, end in spans]
    return SampleTokens(found.ids, learnt, _chat_places(tokenizer, messages, text, found) if placed else [])


def _chat_places(tokenizer: Any, messages: Sequence[Message], text: str, found: Encoding) -> list[Place | None]:
    """Return the places of a chat's tokens: in its messages, or in what the template puts between them."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    said = _contents(tokenizer, messages, text)
    return places_between(tokenizer, text, said, found, special)


def _turns(tokenizer: Any, messages: Sequence[Message], text: str) -> list[Span]:
    """Find the assistant's turns in the rendered text.

    A template that renders the start of a chat as the start of the whole shows them by itself; with any other, what was
    said is marked and rendered again.
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


def _contents(tokenizer: Any, messages: Sequence[Message], text: str) -> list[Span]:
    """Find what each message says in the rendered text; where the template changes it, it stands nowhere."""
    found, after = list[Span](), 0
    for place in range(len(messages)):
        span = _marked_span(tokenizer, messages, place, text, with_end=False)
        begin, end = span if span is not None and span[0] >= after else (after, after)
        found.append((begin, end))
        after = end
    return found


def _own_span(tokenizer: Any, messages: Sequence[Message], place: int, text: str) -> Span | None:
    if place == 0:
        return None
    try:
        before = _rendered(tokenizer, messages[:place], answering=True)
        until = _rendered(tokenizer, messages[: place + 1])
    except UnreadableSampleError:  # a template may refuse half a chat
        return None
    if not until.startswith(before) or not text.startswith(until):
        return None
    return len(before), len(until.rstrip())


def _marked_span(
    tokenizer: Any, messages: Sequence[Message], place: int, text: str, with_end: bool = True
) -> Span | None:
    """Find one message, with the special token that ends the turn behind it; None if the template changes it.

    Its words may stand elsewhere too, even in the template's own: so they are rendered between two marks.
    """
    unused = (chr(number) for number in range(0xE000, 0xF900) if chr(number) not in text)  # for private use
    opening, closing = next(unused), next(unused)
    content = messages[place]["content"]
    said = content.strip()
    start = len(content) - len(content.lstrip()) if said else 0
    inside = content[:start] + opening + said + closing + content[start + len(said) :]
    marked = _rendered(tokenizer, [*messages[:place], {**messages[place], "content": inside}, *messages[place + 1 :]])
    before, _, rest = marked.partition(opening)
    spoken, _, behind = rest.partition(closing)
    if spoken != said or before + said + behind != text:
        return None
    if not with_end:
        return len(before), len(before) + len(said)
    following = behind.lstrip()
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    ending = max((token for token in special if following.startswith(token)), key=len, default=None)
    end = len(before) + len(said)
    return (len(before), end) if ending is None else (len(before), len(text) - len(following) + len(ending))


def _rendered(tokenizer: Any, messages: Sequence[Message], answering: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        return render_chat(tokenizer, messages, answering)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnreadableSampleError(
            f"the chat template cannot take a chat: {error}",
            "remove it, or use data with prompt and completion columns",
        ) from error


def render_chat(tokenizer: Any, messages: Sequence[Message], answering: bool) -> str:
    """Render a chat by the tokenizer's own template, in a sandbox; a ValueError says why it cannot be rendered.

    transformers lets a template reach no code of Python's, but it may loop and grow as it likes.
    """
    from transformers import PreTrainedTokenizerBase

    chat = [dict(message) for message in messages]
    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        rendered: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answering)
        return rendered
    options = {
        **tokenizer.special_tokens_map,
        "conversations": [chat],
        "chat_template": tokenizer.get_chat_template(),
        "add_generation_prompt": answering,
    }
    with _lock:
        if not _renderers or not _renderers[0].alive:
            _renderers[:] = [Sandbox(_RENDER, "-P")]
        try:
            return str(_renderers[0].ask(options, TEMPLATE_SECONDS))
        except (TimeoutError, EOFError):
            raise ValueError(f"it is not rendered within {TEMPLATE_SECONDS:g} seconds and {MEMORY >> 30} GiB") from None
        except OSError:
            raise ValueError("its process has ended") from None


@atexit.register
def _end() -> None:
    for renderer in _renderers:
        renderer.end()


def padded(rows: Sequence[SampleTokens], tokenizer: Any) -> TokenBatch:
    """Return samples as one batch, padded on the tokenizer's own side."""
    import torch

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
