"""Texts as tokens: what is real, what is learnt, what is cut, and tokenizers that do not cut alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf_bico.errors import MissingProcessorError, UnreadableSampleError
from hf_bico.models.tokenization import UNLEARNT, TokenBatch, longest, text_to_text, tokenise
from hf_bico.utils.samples import Answered, Chat, Text, TextSample
from support.language_toys import CHARACTERS, POSITIONS, SPECIAL, qwen2_tokenizer, text_tokenizer

pytestmark = pytest.mark.quick

PAD, BOS, EOS, CLS, SEP = (SPECIAL.index(token) for token in ("<pad>", "<s>", "</s>", "<cls>", "<sep>"))
TALK = (
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "hello"},
)


def one(tokenizer: Any, sample: TextSample, max_length: int | None = None, **options: Any) -> TokenBatch:
    return tokenise(tokenizer, [sample], max_length, **options)


def numbers(text: str) -> list[int]:
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


def learnt(tokenizer: Any, batch: TokenBatch, row: int = 0) -> str:
    """What is learnt, as text; tokens that are not are bars, but at the beginning."""
    kept = ["~" if label == UNLEARNT else tokenizer.decode([label]) for label in batch.labels[row].tolist()]
    return "".join(kept).strip("~")


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_padded_on_the_tokenizers_own_side_and_learnt_whole(side: str) -> None:
    tokenizer = text_tokenizer("encoder")
    tokenizer.padding_side = side
    batch = tokenise(tokenizer, [Text("ab"), Text("abcd")], None)
    short, long = [CLS, *numbers("ab"), SEP], [CLS, *numbers("abcd"), SEP]
    assert batch.ids.tolist() == [[PAD, PAD, *short] if side == "left" else [*short, PAD, PAD], long]
    assert batch.mask.tolist() == [[number != PAD for number in row] for row in batch.ids.tolist()]
    assert (batch.ids.dtype, batch.mask.dtype, batch.labels.dtype) == (torch.int64, torch.bool, torch.int64)
    assert batch.labels[batch.mask].equal(batch.ids[batch.mask])
    assert (batch.labels[~batch.mask] == UNLEARNT).all()
    assert batch.to("meta").labels.device.type == "meta"


def test_without_a_padding_token_the_one_that_ends_a_text_pads_and_is_not_learnt() -> None:
    tokenizer = text_tokenizer()
    tokenizer.pad_token = None
    batch = tokenise(tokenizer, [Text("a"), Text("abc")], None)
    assert batch.ids[0].tolist() == [*numbers("a"), EOS, EOS]
    assert batch.labels[0].tolist() == [*numbers("a"), UNLEARNT, UNLEARNT]
    tokenizer.eos_token = None
    assert tokenise(tokenizer, [Text("a"), Text("abc")], None).ids[0].tolist() == [*numbers("a"), 0, 0]


def test_a_pair_is_encoded_as_the_tokenizer_encodes_pairs() -> None:
    batch = one(text_tokenizer("encoder"), Text("ab", "cd"))
    assert batch.ids.tolist() == [[CLS, *numbers("ab"), SEP, *numbers("cd"), SEP]]


@pytest.mark.parametrize("usual", ["left", "right"])
def test_a_plain_text_loses_its_end_and_keeps_what_stands_around_it(usual: str) -> None:
    tokenizer = text_tokenizer("encoder")
    tokenizer.truncation_side = usual
    assert one(tokenizer, Text("abcdefgh"), 5).ids.tolist() == [[CLS, *numbers("abc"), SEP]]
    assert tokenizer.truncation_side == usual
    assert one(tokenizer, Text("abcdefgh")).ids.shape == (1, 10), "and is not cut for ever"
    with pytest.raises(UnreadableSampleError, match="--max-length is 2, and the tokenizer puts 2 tokens around"):
        one(tokenizer, Text("abcdefgh"), 2)


def test_the_length_is_the_tokenizers_own_where_it_knows_one() -> None:
    tokenizer = text_tokenizer()
    assert one(tokenizer, Text("a" * 100)).ids.shape == (1, POSITIONS)
    tokenizer.model_max_length = int(1e30)
    assert longest(tokenizer) == 2048
    assert one(tokenizer, Text("a" * 3000)).ids.shape == (1, 2048)
    assert one(tokenizer, Text("a" * 3000), 2500).ids.shape == (1, 2500)


def test_of_a_prompt_and_an_answer_the_answer_is_learnt_and_the_end_of_it() -> None:
    tokenizer = text_tokenizer()
    batch = one(tokenizer, Answered("who? ", "ada"))
    assert batch.ids.tolist() == [[*numbers("who? ada"), EOS]]
    assert batch.labels.tolist() == [[UNLEARNT] * 5 + [*numbers("ada"), EOS]]
    framed = one(text_tokenizer("sequence"), Answered("who? ", "ada"))
    assert framed.ids.equal(batch.ids), "what ends a text is not there twice"
    assert framed.labels.equal(batch.labels)
    assert one(tokenizer, Answered("who? ", "ada"), special=False).ids.tolist() == [numbers("who? ada")]
    between = one(text_tokenizer("encoder"), Answered("a", "b"))
    assert between.ids.tolist() == [[CLS, *numbers("ab"), SEP, EOS]]
    assert between.labels.tolist() == [[UNLEARNT, UNLEARNT, *numbers("b"), UNLEARNT, EOS]]


def test_a_token_of_both_prompt_and_answer_is_learnt() -> None:
    tokenizer = byte_pairs(("o", "n"), ("n", "e"))
    batch = one(tokenizer, Answered("to ", "one"))
    assert learnt(tokenizer, batch) == "one"
    merged = one(tokenizer, Answered("t o", "ne"))
    assert learnt(tokenizer, merged) == "one"


def byte_pairs(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_letters_of_several_bytes_are_learnt_with_all_their_tokens() -> None:
    tokenizer = byte_pairs()
    batch = one(tokenizer, Answered("größe: ", "läßt…"))
    wanted = [label for label in batch.labels[0].tolist() if label != UNLEARNT]
    assert tokenizer.decode(wanted) == "läßt…"


def test_prompts_lose_their_beginning_so_that_the_answer_stays() -> None:
    tokenizer = text_tokenizer()
    batch = one(tokenizer, Answered("a long prompt ", "yes"), 6)
    assert batch.ids.tolist() == [[*numbers("t yes"), EOS]]
    assert learnt(tokenizer, batch) == "yes</s>"
    framed = one(text_tokenizer("encoder"), Answered("a long prompt ", "yes"), 6)
    assert framed.ids.tolist() == [[CLS, *numbers("yes"), SEP, EOS]], "the token that begins every text stays"


def test_a_prompt_and_an_answer_go_through_the_tokenizers_chat_template() -> None:
    tokenizer = text_tokenizer(chat=True)
    batch = one(tokenizer, Answered("who?\n", " ada"))
    assert tokenizer.decode(batch.ids[0]) == "<|user|>who?</s>\n<|assistant|>ada</s>\n"
    assert learnt(tokenizer, batch) == "ada</s>"


@pytest.mark.parametrize("make", [text_tokenizer, qwen2_tokenizer])
def test_of_a_chat_every_turn_of_the_assistant_is_learnt_with_its_end(make: Any) -> None:
    tokenizer = make(chat=True)
    batch = one(tokenizer, Chat(TALK), 100)
    between = "~" * len("</s>\n<|user|>bye</s>\n<|assistant|>".replace("</s>", "~"))
    assert learnt(tokenizer, batch) == f"hello</s>{between[1:]}hello</s>"
    assert batch.ids[0].tolist().count(EOS) == 5, "special tokens are not there twice"


def test_the_word_of_the_template_is_no_answer_even_where_it_is_the_same() -> None:
    tokenizer = text_tokenizer(chat=True)
    said = ({"role": "user", "content": "assistant"}, {"role": "assistant", "content": "user"})
    assert learnt(tokenizer, one(tokenizer, Chat(said))) == "user</s>"


FORGETFUL = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '(now)' if loop.last else '(past)' }}{{ message['content'] }} </s>"
    "{% else %}:{{ message['content'] }};{% endif %}{% endfor %}"
)


def test_where_a_template_tells_the_past_otherwise_answers_are_found_from_the_end() -> None:
    tokenizer = with_template(FORGETFUL)
    talk = Chat(({"role": "user", "content": "hello"}, *TALK[2:]))
    batch = one(tokenizer, talk)
    assert tokenizer.decode(batch.ids[0]) == ":hello;(past)hello </s>:bye;(now)hello </s>"
    assert learnt(tokenizer, batch) == "hello </s>~~~~~(now)hello </s>", "and not what the user said"
    first = one(tokenizer, Chat(({"role": "assistant", "content": "hello"},)))
    assert learnt(tokenizer, first) == "hello </s>", "there is no chat before a first word"


THOUGHTFUL = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ '(thought)' if loop.last and message['role'] == 'assistant' }}{{ message['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(("first", "then"), [("paris", "why paris?"), ("s", "b"), (" user\n", "is it?"), ("", "hm?")])
def test_words_that_stand_elsewhere_too_are_learnt_where_the_assistant_says_them(first: str, then: str) -> None:
    """The user repeats them, or they are part of the template: what was said last before a place is no answer."""
    tokenizer = with_template(THOUGHTFUL)
    talk = [("user", "capital?"), ("assistant", first), ("user", then), ("assistant", "because")]
    batch = one(tokenizer, Chat(tuple({"role": role, "content": said} for role, said in talk)), 200)
    between = "~" * len(f"<|user|>{then}~<|assistant|>")
    assert learnt(tokenizer, batch) == f"{first.strip()}</s>{between}(thought)because</s>"


def test_an_answer_that_a_template_leaves_out_of_the_past_is_refused() -> None:
    forgetting = with_template(
        THOUGHTFUL.replace("<|{{", "{% if loop.index != 2 %}<|{{").replace("</s>", "</s>{% endif %}")
    )
    talk = ({"role": "user", "content": "hello"}, TALK[2], *TALK[1:3])
    with pytest.raises(UnreadableSampleError, match="changes what the assistant says: 'hello'"):
        one(forgetting, Chat(talk))


def test_what_a_template_changes_is_refused() -> None:
    shouting = with_template(
        "{% for message in messages %}{{ message['content'] | upper }}{{ loop.length }}{% endfor %}"
    )
    with pytest.raises(UnreadableSampleError, match="the chat template changes what the assistant says: 'hello'"):
        one(shouting, Chat(TALK))
    strict = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UnreadableSampleError, match="roles must alternate"):
        one(strict, Chat(TALK))


def test_chats_need_a_template_and_someone_who_answers() -> None:
    with pytest.raises(MissingProcessorError, match="are chats, and the tokenizer has no chat template") as caught:
        one(text_tokenizer(), Chat(TALK))
    named = text_tokenizer()
    named.name_or_path = "hub/models--org--name/snapshots/0123"
    with pytest.raises(MissingProcessorError, match="the tokenizer of 'org/name' has no chat template"):
        one(named, Chat(TALK))
    assert "prompt and completion columns" in caught.value.remedy
    with pytest.raises(UnreadableSampleError, match="no message of the assistant"):
        one(text_tokenizer(chat=True), Chat(TALK[:2]))


def test_a_sample_whose_answer_is_cut_away_is_refused() -> None:
    with pytest.raises(UnreadableSampleError, match="within the last 5 tokens") as caught:
        one(text_tokenizer(chat=True), Chat(TALK[:4]), 5)
    assert "--max-length" in caught.value.remedy
    with pytest.raises(UnreadableSampleError, match="a text has no tokens"):
        one(text_tokenizer(), Text(""))


class Mute(ByT5Tokenizer):
    """Its pieces are not what they stand for, and it knows no offsets."""

    def _convert_id_to_token(self, index: int) -> str:
        return f"piece {index}"


def test_a_slow_tokenizer_says_by_its_pieces_where_they_stand() -> None:
    tokenizer = ByT5Tokenizer()
    assert one(tokenizer, Text("ab")).ids.shape == (1, 3)
    learnt_ids = [label for label in one(tokenizer, Answered("wo? ", "hä")).labels[0] if label >= 0]
    assert tokenizer.decode(learnt_ids) == "hä</s>"


def test_a_tokenizer_that_says_no_places_takes_plain_texts_alone() -> None:
    tokenizer = Mute()
    assert one(tokenizer, Text("ab")).ids.shape == (1, 3)
    with pytest.raises(MissingProcessorError, match="a Mute does not say where in a text its tokens stand"):
        one(tokenizer, Answered("a", "b"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (Text("A.", "B.", ("premise", "hypothesis"), "mnli"), "mnli hypothesis: B. premise: A."),
        (Text("A.", "B.", ("text1", "text2")), "text1: A. text2: B."),
        (Text("A.", "B."), "sentence1: A. sentence2: B."),
        (Text("A.", None, ("sentence",), "sst2"), "sst2 sentence: A."),
        (Text("translate: A.", None, ("text",)), "translate: A."),
    ],
)
def test_text_to_text(text: Text, said: str) -> None:
    assert text_to_text(text) == said
