"""Cases of texts, tokenizers and language models that look fine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_bico.errors import (
    BaseMismatchError,
    ColumnError,
    MissingProcessorError,
    TokenizersDifferError,
    UnreadableSampleError,
    UnsupportedModelError,
)
from support.fine.cases import Outcome, Refused, Right, Said, Stage, case, reconfigure, rewrite
from support.language_toys import (
    CHARACTERS,
    fine_tuned,
    labelled_rows,
    sentences,
    text_tokenizer,
    trained_without_special_tokens,
    write_decoder,
    write_encoder,
)

TEXTS = "Texts and language models"


def _rows() -> list[dict[str, Any]]:
    return [{"text": text} for text in dict.fromkeys(sentences(400))]


def decoders(stage: Stage, kind: str = "llama") -> dict[str, Any]:
    """A random decoder, a copy that was changed a little, and a wider one."""
    from transformers import AutoModelForCausalLM

    tied = kind == "gpt2"
    base = stage.once(f"{kind} base", lambda: write_decoder(stage.place("base"), kind, tied=tied))
    tuned = stage.once(
        f"{kind} tuned", lambda: fine_tuned(base, stage.place("tuned"), AutoModelForCausalLM, only="mlp")
    )
    target = stage.once(
        f"{kind} target", lambda: write_decoder(stage.place("target"), kind, width=24, seed=1, tied=tied)
    )
    return {"source": tuned, "base": base, "to": target, "data": _rows(), "n": 24}


def _clean(kind: str) -> Any:
    return lambda stage: stage.once(f"clean {kind}", lambda: stage.port(**decoders(stage, kind)))


def _with(stage: Stage, inputs: dict[str, Any], part: str = "source") -> tuple[dict[str, Any], Path]:
    folder = stage.copied(inputs[part])
    return {**inputs, part: folder}, folder


def _scrambled(folder: Path) -> Path:
    """Put the words of a model's tokenizer under other numbers: as many, but another tokenizer."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    words = [word for word in vocabulary if not word.startswith("<") or len(word) == 1]
    content["model"]["vocab"] |= dict(zip(words, [vocabulary[word] for word in words][::-1], strict=True))
    file.write_text(json.dumps(content))
    return folder


@case(
    TEXTS,
    "a target with as large a vocabulary",
    "its tokenizer is that of another model",
    Said(
        "target predicts the texts' tokens with a loss of 7.71, and chance has 4.43: is the tokenizer beside it its "
        "own?"
    ),
)
def tokenizer_of_another_model(stage: Stage) -> Outcome:
    inputs, folder = _with(stage, _trained(stage), "to")
    return stage.port(**{**inputs, "to": _scrambled(folder)}, special_tokens=False)


@case(
    TEXTS,
    "a fine-tune with its tokenizer",
    "it is another than its base's, of the same size",
    Refused(
        TokenizersDifferError,
        ("the tokenizer beside 'tuned' is not that of its base 'base': 78 of 84 pieces have other numbers"),
    ),
)
def fine_tune_with_another_tokenizer(stage: Stage) -> Outcome:
    inputs, folder = _with(stage, decoders(stage))
    _scrambled(folder)
    return stage.port(**inputs)


@case(
    TEXTS,
    "a fine-tune",
    "tokens were added: its embedding is larger than its base's",
    Refused(BaseMismatchError, "'lm_head.weight' is (86, 16) in the fine-tuned model and (84, 16) in the base"),
)
def vocabulary_resized(stage: Stage) -> Outcome:
    from transformers import AutoModelForCausalLM

    inputs, folder = _with(stage, decoders(stage))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + 2)
    model.save_pretrained(folder)
    return stage.port(**inputs)


@case(TEXTS, "a fine-tune with tied embeddings", "they are saved twice, and equal", Right(clean=_clean("gpt2")))
def tied_weights_twice(stage: Stage) -> Outcome:
    inputs, folder = _with(stage, decoders(stage, "gpt2"))
    rewrite(
        folder / "model.safetensors", lambda state: {**state, "lm_head.weight": state["transformer.wte.weight"].clone()}
    )
    return stage.port(**inputs)


@case(
    TEXTS,
    "a fine-tune with tied embeddings",
    "they are saved twice, and differ",
    Said("Tensors of the fine-tuned model that its base lacks, left behind: 1 (lm_head.weight)."),
)
def tied_weights_that_differ(stage: Stage) -> Outcome:
    inputs, folder = _with(stage, decoders(stage, "gpt2"))
    rewrite(
        folder / "model.safetensors", lambda state: {**state, "lm_head.weight": 2 * state["transformer.wte.weight"]}
    )
    return stage.port(**inputs)


def _long_rows() -> list[dict[str, Any]]:
    """Texts of which every other one is long."""
    plain = list(dict.fromkeys(sentences(400)))
    return [{"text": " ".join(plain[row : row + 1 + 3 * (row % 2)])} for row in range(len(plain) - 4)]


@case(
    TEXTS,
    "a base that reads long texts",
    "the target reads shorter ones, to which they are cut for both",
    Said("14 of the 24 calibration samples were cut to 32 tokens, the most that target can read."),
)
def texts_cut_by_the_target(stage: Stage) -> Outcome:
    inputs, folder = _with(stage, {**decoders(stage), "data": _long_rows()}, "to")
    reconfigure(folder / "config.json", max_position_embeddings=32)
    return stage.port(**inputs)


@case(
    TEXTS,
    "texts that both models can read",
    "--max-length is shorter than many of them",
    Said("24 of the 24 calibration samples were cut to 8 tokens, as --max-length asks."),
)
def texts_cut_by_an_option(stage: Stage) -> Outcome:
    return stage.port(**{**decoders(stage), "data": _long_rows(), "max_length": 8})


@case(
    TEXTS,
    "a GPT-2 with a vocabulary beside it",
    "it is vocab.txt, of another tokenizer than the configuration asks for",
    Refused(
        MissingProcessorError,
        "'base' holds vocab.txt, the vocabulary of a WordPiece tokenizer, and its configuration asks for a "
        "GPT2Tokenizer, which reads vocab.json and merges.txt",
    ),
)
def vocabulary_of_another_tokenizer(stage: Stage) -> Outcome:
    inputs, folder = _with(stage, decoders(stage, "gpt2"), "base")
    for file in folder.glob("tok*"):
        file.unlink()
    (folder / "vocab.txt").write_text("[UNK]\nThe\nred\n")
    return stage.port(**inputs)


def _of_other_letters(stage: Stage, drop: str) -> Outcome:
    """Models whose tokenizer, of the same size, lacks some letters."""
    inputs = decoders(stage)
    for part in ("source", "base", "to"):
        inputs, folder = _with(stage, inputs, part)
        text_tokenizer(drop=drop).save_pretrained(folder)
    return stage.port(**inputs)


@case(
    TEXTS,
    "texts in the language of the models",
    "their tokenizer knows hardly a letter of them",
    Refused(
        UnreadableSampleError,
        "the tokenizer of 'base' does not know 80% of the texts' tokens: 'cleo paints blue glass.' is read as "
        "'<unk><unk><unk><unk> <unk><unk><unk><unk><unk><unk> <unk><un'",
    ),
)
def texts_of_unknown_letters(stage: Stage) -> Outcome:
    return _of_other_letters(stage, "".join(letter for letter in CHARACTERS if letter.isalpha()))


@case(
    TEXTS,
    "texts in the language of the models",
    "their tokenizer does not know some of the letters",
    Said("The tokenizer of base does not know 24% of the texts' tokens: is it the model's own?"),
)
def texts_of_some_unknown_letters(stage: Stage) -> Outcome:
    return _of_other_letters(stage, "es")


@case(
    TEXTS,
    "a decoder with its tokenizer",
    "the tokenizer puts tokens around each text that the decoder was not trained with",
    Said(
        "base predicts the texts' own tokens with a loss of 2.09 behind the tokenizer's special tokens, and of 0.96 "
        "without them, on 16 samples: it reads these texts better without, see --no-special-tokens."
    ),
)
def special_tokens_of_another_model(stage: Stage) -> Outcome:
    return stage.port(**_trained(stage))


def _trained(stage: Stage) -> dict[str, Any]:
    """Decoders that learnt the texts as they are, without their tokenizer's special tokens."""
    from transformers import AutoModelForCausalLM

    base = stage.once("trained base", lambda: trained_without_special_tokens(stage.place("base")))
    tuned = fine_tuned(base, stage.place("tuned"), AutoModelForCausalLM, only="mlp")
    target = stage.once(
        "trained target", lambda: trained_without_special_tokens(stage.place("target"), width=24, seed=1)
    )
    return {"source": tuned, "base": base, "to": target, "data": _rows(), "n": 24}


def encoders(stage: Stage) -> dict[str, Any]:
    from transformers import AutoModelForSequenceClassification

    base = stage.once("bert base", lambda: write_encoder(stage.place("base"), head=2))
    tuned = stage.once("bert tuned", lambda: fine_tuned(base, stage.place("tuned"), AutoModelForSequenceClassification))
    target = stage.once("bert target", lambda: write_encoder(stage.place("target"), width=24, heads=3, seed=1))
    return {"source": tuned, "base": base, "to": target, "data": labelled_rows(40), "n": 24}


@case(
    TEXTS,
    "a column of texts and one of labels",
    "the texts are the names of the labels",
    Refused(ColumnError, "every text of the column 'text' is the name of its own class, such as 'positive'"),
)
def texts_are_the_labels(stage: Stage) -> Outcome:
    names = ("negative", "positive")
    rows = [{"text": names[index % 2], "label": index % 2} for index in range(40)]
    return stage.port(**{**encoders(stage), "data": rows, "class_names": names})


@case(
    TEXTS,
    "a target that reads texts",
    "it is of another family, without a common objective",
    Refused(
        UnsupportedModelError,
        (
            "the base (decoder) has the objective language-modelling and the target (encoder) has classification: "
            "they have none in common"
        ),
    ),
)
def target_of_another_family(stage: Stage) -> Outcome:
    inputs = decoders(stage)
    return stage.port(**{**inputs, "to": encoders(stage)["to"]})


@case(
    TEXTS,
    "a CLIP with its tokenizer",
    "beside the base lies that of another model, as large",
    Refused(
        TokenizersDifferError,
        ("the tokenizer beside 'narrow-inverted' is not that of its base 'narrow': 50 of 55 pieces have other numbers"),
    ),
)
def clip_with_another_tokenizer(stage: Stage) -> Outcome:
    return stage.port(base=_scrambled(stage.copied(stage.base)))
