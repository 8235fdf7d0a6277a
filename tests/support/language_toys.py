"""Small language models and image classifiers with random weights, in transformers' own layouts, and texts for them."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>", "<cls>", "<sep>")
CHARACTERS = (*string.ascii_letters, *string.digits, *" .,:;!?'()-|<>/\n")
POSITIONS = 64
"""How many tokens a model with learnt positions can take."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FRAMES = {
    "encoder": ("<cls> $A <sep>", "<cls> $A <sep> $B:1 <sep>:1"),
    "sequence": ("$A </s>", "$A </s> $B </s>"),
    "decoder": ("$A", "$A $B"),
}
"""What each kind of model puts around a text and around a pair of texts."""

_NAMES = ("ada", "ben", "cleo", "dora", "emil")
_VERBS = ("likes", "sees", "paints", "sells", "finds")
_THINGS = ("red kites", "old maps", "warm bread", "two cats", "blue glass")


def text_tokenizer(frame: str = "decoder", chat: bool = False, drop: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, 6 special tokens among its 84; one that lacks `drop` is another tokenizer."""
    tokens = (*SPECIAL, *(character for character in CHARACTERS if character not in drop))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    single, pair = FRAMES[frame]
    special = [(token, vocabulary[token]) for token in SPECIAL]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)
    types = ["token_type_ids"] if frame == "encoder" else []
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", *types, "attention_mask"],
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<cls>",
        sep_token="<sep>",
    )
    if chat:
        made.chat_template = CHAT_TEMPLATE
    return made


def piece_tokenizer(known: Sequence[str], used: Sequence[str] = (), seed: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that knows characters and these pieces, and cuts only by those that are `used`.

    So two of them may have the same vocabulary, and cut texts otherwise; with a `seed`, under other ids.
    """
    ids = list(range(len(SPECIAL), vocabulary_size() + len(known)))
    if seed is not None:
        random.Random(seed).shuffle(ids)
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    vocabulary |= dict(zip((*CHARACTERS, *known), ids, strict=True))
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    cuts = "|".join([*map(re.escape, sorted(used, key=len, reverse=True)), r"[\s\S]"])
    tokenizer.pre_tokenizer, tokenizer.decoder = Split(Regex(cuts), "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **special)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: it has next to nothing in common with one of characters."""
    words = [*_NAMES, *(f" {verb}" for verb in _VERBS), *(f" {thing}." for thing in _THINGS)]
    return piece_tokenizer(words, words)


def qwen2_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """The same characters under the same ids, as transformers' own class of Qwen2 spells them, whatever a file says."""
    from transformers import Qwen2Tokenizer

    bytewise = {" ": "\u0120", "\n": "\u010a"}
    tokens = (*SPECIAL, *(bytewise.get(character, character) for character in CHARACTERS))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = Qwen2Tokenizer(vocabulary, merges=[], model_max_length=POSITIONS, **special)
    if chat:
        made.chat_template = CHAT_TEMPLATE
    return made


def vocabulary_size() -> int:
    return len(SPECIAL) + len(CHARACTERS)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Short sentences, not all of one length."""
    generator = random.Random(seed)
    parts = (_NAMES, _VERBS, _THINGS)
    return [" ".join(generator.choice(words) for words in parts) + "." for _ in range(count)]


def labelled_rows(count: int, classes: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a data set of texts with labels."""
    return [{"text": text, "label": index % classes} for index, text in enumerate(sentences(count, seed))]


def pair_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a data set of pairs of sentences with labels."""
    firsts, seconds = sentences(count, seed), sentences(count, seed + 1)
    return [
        {"sentence1": first, "sentence2": second, "label": index % 2}
        for index, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    ]


def answered_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a data set of prompts and answers."""
    return [{"prompt": f"{text} who?", "completion": f" {text.split()[0]}"} for text in sentences(count, seed)]


def chat_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a data set of conversations."""
    return [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
        for row in answered_rows(count, seed)
    ]


def write_decoder(
    folder: Path,
    kind: str = "llama",
    width: int = 16,
    blocks: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    *,
    mlp: int | None = None,
    head_width: int | None = None,
    tied: bool = False,
    chat: bool = False,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **config: Any,
) -> Path:
    """A decoder of the kind llama, mistral, qwen2, qwen3, gpt2, or any other that transformers spells like Llama."""
    import transformers

    if tokenizer is None:
        tokenizer = qwen2_tokenizer(chat) if kind == "qwen2" else text_tokenizer("decoder", chat)
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    shared = {"vocab_size": len(tokenizer), "tie_word_embeddings": tied, **special, **config}
    if kind == "gpt2":
        shape: dict[str, Any] = {"n_embd": width, "n_layer": blocks, "n_head": heads, "n_positions": POSITIONS}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, n_inner=mlp, **shared))
    else:
        shape = {
            "hidden_size": width,
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": mlp or 2 * width,
            "max_position_embeddings": 4 * POSITIONS,
            "head_dim": head_width or width // heads,
        }
        settings = transformers.AutoConfig.for_model(kind, **shape, **shared)
        model = transformers.AutoModelForCausalLM.from_config(settings)
    return save_model(model, folder, seed, tokenizer)


def write_t5(
    folder: Path,
    gated: bool = False,
    width: int = 16,
    blocks: int = 2,
    heads: int = 2,
    seed: int = 0,
    *,
    mlp: int | None = None,
    head_width: int | None = None,
    kind: str = "T5ForConditionalGeneration",
    **config: Any,
) -> Path:
    """A T5: of version 1.1 where it is `gated`, else of version 1.0."""
    import transformers

    settings = transformers.T5Config(
        d_model=width,
        d_kv=head_width or width // heads,
        d_ff=mlp or 2 * width,
        num_layers=blocks,
        num_decoder_layers=2,
        num_heads=heads,
        vocab_size=vocabulary_size(),
        feed_forward_proj="gated-gelu" if gated else "relu",
        **{"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0} | config,
    )
    return save_model(getattr(transformers, kind)(settings), folder, seed, text_tokenizer("sequence"))


def write_encoder(
    folder: Path,
    kind: str = "bert",
    head: int | None = None,
    width: int = 16,
    blocks: int = 2,
    heads: int = 2,
    seed: int = 0,
    *,
    mlp: int | None = None,
    task: str | None = None,
    tokenizer: Any = None,
    **config: Any,
) -> Path:
    """An encoder of the kind bert, roberta or distilbert: bare, with a classification `head`, or for another `task`.

    A task is the end of a class's name: "ForMaskedLM".
    """
    import transformers

    tokenizer = tokenizer or text_tokenizer("encoder")
    spelling = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}[kind]
    if kind == "distilbert":
        shape = {"dim": width, "n_layers": blocks, "n_heads": heads, "hidden_dim": mlp or 2 * width}
    else:
        shape = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": heads}
        shape["intermediate_size"] = mlp or 2 * width
    shared = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS + 2, "pad_token_id": 0}
    labels = {} if head is None else {"num_labels": head}
    settings = getattr(transformers, f"{spelling}Config")(**{**shape, **shared, **labels, **config})
    ending = task or ("Model" if head is None else "ForSequenceClassification")
    return save_model(getattr(transformers, spelling + ending)(settings), folder, seed, tokenizer)


def write_vit(
    folder: Path,
    kind: str = "vit",
    labels: int | None = None,
    width: int = 16,
    blocks: int = 2,
    heads: int = 2,
    seed: int = 0,
    *,
    image_size: int = 16,
    patch: int = 4,
    mlp: int | None = None,
    task: str | None = None,
    **config: Any,
) -> Path:
    """A ViT or DeiT, bare or with a classification head of so many labels, with the processor of its image size."""
    import transformers

    spelling = {"vit": "ViT", "deit": "DeiT"}[kind]
    shape = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": heads}
    images = {"image_size": image_size, "patch_size": patch, "intermediate_size": mlp or 2 * width}
    settings = getattr(transformers, f"{spelling}Config")(**shape, **images, **config)
    if labels is not None:
        settings.num_labels = labels
    ending = task or ("Model" if labels is None else "ForImageClassification")
    size = {"height": image_size, "width": image_size}
    transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    return save_model(getattr(transformers, spelling + ending)(settings), folder, seed)


def save_model(model: Any, folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """The folder of a model whose weights are drawn anew, larger than at initialisation so that every part matters."""
    randomise(model, seed)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def randomise(model: Any, seed: int) -> None:
    from transformers.pytorch_utils import Conv1D

    generator = torch.Generator().manual_seed(seed)
    transposed = {id(part.weight) for part in model.modules() if isinstance(part, Conv1D)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                entries = parameter.shape[0] if id(parameter) in transposed else parameter[0].numel()
                parameter.copy_(draw * (0.5 if "embed" in name else entries**-0.5))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * draw)
            else:
                parameter.copy_(1 + 0.1 * draw)


def fine_tuned(base: Path, folder: Path, loader: Any, share: float = 0.1, only: str = "") -> Path:
    """A copy of a model in which every matrix and bias whose name holds `only` changed by a share of its size."""
    import shutil

    model = loader.from_pretrained(base)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name and (parameter.ndim == 2 or name.endswith("bias")):
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.add_(share * parameter.std() * draw)
    model.save_pretrained(folder)
    for file in [*base.glob("tok*"), *base.glob("*.jinja"), *base.glob("pre*")]:
        shutil.copy(file, folder)
    return folder


def trained_without_special_tokens(folder: Path, width: int = 16, seed: int = 0) -> Path:
    """A GPT-2 that learnt the sentences as they are, beside a tokenizer that puts <cls> and <sep> around each."""
    from transformers import AutoModelForCausalLM

    write_decoder(folder, "gpt2", width, seed=seed, tied=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), text_tokenizer("encoder")
    optimiser, texts = torch.optim.Adam(model.parameters(), lr=1e-2), sentences(640, seed)
    for start in range(0, len(texts), 16):
        batch = tokenizer(texts[start : start + 16], padding=True, add_special_tokens=False, return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
