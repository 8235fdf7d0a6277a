"""Whole ports of language models: against a slow reference, as written results, and by the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from torch import Tensor

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import (
    MissingProcessorError,
    TokenizersDifferError,
    UnreadableSampleError,
    UnsuitableMethodError,
    UnsupportedModelError,
    UsageError,
)
from support import language_reference as reference
from support.adapters import Base, saved
from support.hub import Hub
from support.hub_scenes import upload
from support.language_toys import (
    answered_rows,
    chat_rows,
    fine_tuned,
    save_model,
    sentences,
    text_tokenizer,
    vocabulary_size,
    word_tokenizer,
    write_decoder,
    write_encoder,
    write_t5,
)
from support.paper import PAPER, PAPER_WORDS
from support.rotated_language import InDouble

LONG = "emil finds blue glass. dora sells old maps. cleo."
TEXTS = [*sentences(5), LONG, *sentences(2, seed=3)]
"""One is more than twice as long as the others, so that these are padded to twice their length beside it."""
PLAIN = [{"text": text} for text in TEXTS]
LABELLED = [{"text": text, "label": number % 2} for number, text in enumerate(TEXTS)]
WORDS = ("no", "yes")
UNLEARNT = -100


def write_opt(folder: Path, width: int = 16, blocks: int = 2, seed: int = 0) -> Path:
    """A decoder that no family knows, and that takes the tokens of a batch as one long list in its MLP."""
    settings = transformers.OPTConfig(
        **{"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": 4, "ffn_dim": 2 * width},
        **{"word_embed_proj_dim": width, "vocab_size": vocabulary_size(), "max_position_embeddings": 64},
        **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
    )
    return save_model(transformers.OPTForCausalLM(settings), folder, seed, text_tokenizer())


@dataclass(frozen=True)
class Kind:
    """Two models of one kind that differ in width, depth and heads, and where its blocks are."""

    source: Callable[[Path], Path]
    target: Callable[[Path], Path]
    stack: str = "model.layers"
    auto: Any = transformers.AutoModelForCausalLM

    @property
    def answers(self) -> bool:
        return self.auto is transformers.AutoModelForSeq2SeqLM


def decoder(kind: str, *, tied: bool = False, stack: str = "model.layers", **target: Any) -> Kind:
    shape = {"width": 24, "blocks": 3, "heads": 6, "kv_heads": 3, **target}
    return Kind(
        lambda folder: write_decoder(folder, kind, tied=tied),
        lambda folder: write_decoder(folder, kind, seed=1, tied=tied, **shape),
        stack,
    )


def sequence(gated: bool) -> Kind:
    return Kind(
        lambda folder: write_t5(folder, gated),
        lambda folder: write_t5(folder, gated, width=24, blocks=3, heads=3, seed=1),
        "encoder.block",
        transformers.AutoModelForSeq2SeqLM,
    )


KINDS = {
    "llama": decoder("llama", blocks=1),
    "mistral": decoder("mistral", tied=True),
    "qwen2": decoder("qwen2", tied=True, kv_heads=2),
    "qwen3": decoder("qwen3", head_width=6),
    "gpt2": decoder("gpt2", stack="transformer.h"),
    "opt": Kind(write_opt, lambda folder: write_opt(folder, 24, 3, seed=1), "model.decoder.layers"),
    "t5": sequence(False),
    "t5, gated": sequence(True),
}


class Case:
    """A base, its fine-tune and a target on disk, with what the slow reference and the package make of them."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder, self.kind = folder, kind
        self.base, self.target = kind.source(folder / "base"), kind.target(folder / "target")
        self.tuned = fine_tuned(self.base, folder / "tuned", kind.auto)
        self.rows = LABELLED if kind.answers else PLAIN

    def port(self, source: Path | None = None, **options: Any) -> hf_bico.Ported:
        usual = {"data": self.rows, "n": len(TEXTS), "base": self.base, "evaluate": False, "dtype": "float64", **PAPER}
        words = {"class_names": WORDS} if self.kind.answers else {}
        asked = {"to": self.target, **usual, **words, **options}
        with InDouble() if asked["dtype"] == "float64" else nullcontext():
            return hf_bico.port(source or self.tuned, **asked)

    @cached_property
    def ported(self) -> hf_bico.Ported:
        return self.port()

    @property
    def changes(self) -> dict[str, Tensor]:
        """What the port adds, by the names in the loaded target."""
        return dict(self.ported.task_vector.renamed(self.ported.target.layout.own_names))

    def load(self, folder: Path) -> Any:
        return self.kind.auto.from_pretrained(folder).double().eval()

    def loss(self, model: Any, number: int) -> Tensor:
        """The library's own loss of one text, summed over its label tokens."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.target)
        ids = tokenizer(TEXTS[number], return_tensors="pt")["input_ids"]
        if not self.kind.answers:
            return model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1)
        answer = tokenizer(WORDS[number % 2], return_tensors="pt")["input_ids"]
        return model(input_ids=ids, labels=answer).loss * answer.shape[1]

    def expected(self, losses: Sequence[reference.Loss] = (), extra: int = 0) -> dict[str, Tensor]:
        """By other losses of the two models if given; the target's first `extra` tokens are none of the source's."""
        models = [self.load(folder) for folder in (self.base, self.target)]
        stack, count = self.kind.stack, len(TEXTS)
        source, target = (
            reference.observe(model, reference.linear_modules(model, stack), loss, count)
            for model, loss in zip(models, losses or (self.loss, self.loss), strict=True)
        )
        seen = source, target.without_first(extra)
        blocks = tuple(len(model.get_submodule(stack)) for model in models)
        before, after = dict(models[0].named_parameters()), dict(self.load(self.tuned).named_parameters())
        changes = {name: (after[name] - before[name]).detach() for name in before}
        return reference.carried(changes, seen, stack, blocks)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            made[name] = Case(tmp_path_factory.mktemp("case"), KINDS[name])
        return made[name]

    return make


def distance(ported: hf_bico.Ported, expected: dict[str, Tensor]) -> float:
    """The largest error of a tensor, relative to its size; the same tensors are changed by both."""
    found = ported.task_vector.renamed(ported.target.layout.own_names)
    assert set(found) == set(expected)
    return max(float((found[name] - wanted).norm() / wanted.norm()) for name, wanted in expected.items())


# --- against the reference


@pytest.mark.parametrize("name", KINDS)
def test_a_port_is_that_of_the_slow_reference(name: str, case: Callable[[str], Case]) -> None:
    """One sample at a time without padding there, all in one batch here: padding and batches count for nothing."""
    assert distance(case(name).ported, case(name).expected()) < 1e-5


def test_bico_last_is_bico_in_the_last_block_and_theseus_before_it(case: Callable[[str], Case]) -> None:
    found = case("gpt2")
    whole, outputs, last = (found.port(method=name).task_vector for name in ("bico", "theseus", "bico-last"))
    for name in last:
        expected = whole if name.startswith("transformer.h.2.") else outputs
        assert (last[name] - expected[name]).norm() <= 1e-9 * expected[name].norm()
    assert any((whole[name] - outputs[name]).norm() > 0.1 * whole[name].norm() for name in whole)


def test_auto_tries_both_on_a_decoder_and_takes_what_the_samples_gain_most_by(case: Callable[[str], Case]) -> None:
    found = case("gpt2")
    ported = found.port(method="auto", alpha="auto")
    tried = {one.method: one for one in ported.record.method.candidates}
    assert set(tried) == {"bico", "bico-last"}
    best = max(tried.values(), key=lambda one: (not one.held_back, one.gain))
    assert ported.record.method.name == best.method
    assert "bico or bico-last, as the samples choose" in hf_bico.plan(found.tuned, found.target, base=found.base).method
    assert found.port(method="auto").record.method.candidates == []  # with a number for alpha, nothing is chosen


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_names_all_linear_sites_of_the_blocks(name: str, case: Callable[[str], Case]) -> None:
    found = case(name)
    planned = hf_bico.plan(found.tuned, to=found.target, base=found.base, data=found.rows)
    carried = {pair.target.weight.tensor for pair in planned.pairs}
    model = found.load(found.target)
    modules = reference.linear_modules(model, found.kind.stack)
    assert carried == {f"{module}.weight" for module in modules}
    packed = sum(module.endswith(reference.PACKED) for module in modules)
    assert len(planned.pairs) == len(modules) + 2 * packed


def padding_on(folder: Path, side: str, copy: Path) -> Path:
    """The same model with a tokenizer that pads on one side."""
    shutil.copytree(folder, copy)
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "padding_side": side}))
    assert transformers.AutoTokenizer.from_pretrained(copy).padding_side == side
    return copy


@pytest.mark.parametrize(
    ("name", "sides"),
    [*((name, ("left", "right")) for name in ("llama", "gpt2", "opt", "t5")), ("llama", ("left", "left"))],
)
def test_the_side_of_padding_counts_for_nothing(
    name: str, sides: tuple[str, str], case: Callable[[str], Case], tmp_path: Path
) -> None:
    found = case(name)
    base, target = (
        padding_on(folder, side, tmp_path / folder.name)
        for folder, side in zip((found.base, found.target), sides, strict=True)
    )
    assert distance(found.port(base=base, to=target), found.changes) < 1e-5


@pytest.mark.parametrize(("name", "size"), [("llama", 1), ("llama", 3), ("gpt2", 3), ("opt", 3), ("t5", 3)])
def test_the_size_of_batches_counts_for_nothing(name: str, size: int, case: Callable[[str], Case]) -> None:
    assert distance(case(name).port(batch_size=size), case(name).changes) < 1e-5


def test_in_single_precision_padding_changes_what_is_added_by_rounding_alone(case: Callable[[str], Case]) -> None:
    """As people run it; the norms and the softmax of the library round there."""
    found = case("llama")
    ports = [
        hf_bico.port(
            *(found.tuned, found.target),
            **{"base": found.base, "data": PLAIN, "n": len(TEXTS), "evaluate": False, "batch_size": size, **PAPER},
        )
        for size in (1, 8)
    ]
    for name in ports[0].task_vector:
        one, other = (ported.task_vector[name] for ported in ports)
        assert (one - other).norm() < 1e-3 * one.norm()


# --- what is learnt


def learning(base: Path, parts: Callable[[int], Sequence[tuple[str, bool]]]) -> reference.Loss:
    """The loss of texts that are put together by hand, from parts that are learnt or not."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)

    def loss(model: Any, number: int) -> Tensor:
        ids, labels = list[int](), list[int]()
        for text, learnt in parts(number):
            own = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += own
            labels += own if learnt else [UNLEARNT] * len(own)
        found = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        return found * sum(label != UNLEARNT for label in labels[1:])

    return loss


def test_of_a_prompt_and_its_answer_the_answer_alone_is_learnt(case: Callable[[str], Case]) -> None:
    found, rows = case("llama"), answered_rows(len(TEXTS))
    loss = learning(
        found.base, lambda number: [(rows[number]["prompt"], False), (rows[number]["completion"] + "</s>", True)]
    )
    ported = found.port(data=rows)
    assert distance(ported, found.expected((loss, loss))) < 1e-5
    assert distance(ported, found.changes) > 0.1


GREETING = "hello there.\n"


@pytest.fixture(scope="module")
def chatting(case: Callable[[str], Case], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The llama and its target with chat templates; the target's begins with a greeting."""
    folder = tmp_path_factory.mktemp("chatting")
    tokenizers = [text_tokenizer(chat=True), text_tokenizer(chat=True)]
    tokenizers[1].chat_template = GREETING + str(tokenizers[1].chat_template)
    for name, tokenizer in zip(("base", "target"), tokenizers, strict=True):
        shutil.copytree(case("llama").folder / name, folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "base", folder / "target"


@pytest.mark.parametrize("greeting", ["", GREETING])
def test_of_a_chat_the_assistant_is_learnt_and_equal_tokens_pair(
    greeting: str, case: Callable[[str], Case], chatting: tuple[Path, Path]
) -> None:
    """What one model's template says and the other's does not pairs with nothing."""
    found, rows = case("llama"), chat_rows(len(TEXTS))
    base, target = chatting

    def said(before: str) -> Callable[[int], list[tuple[str, bool]]]:
        def parts(number: int) -> list[tuple[str, bool]]:
            asked, answer = (message["content"] for message in rows[number]["messages"])
            return [(f"{before}<|user|>{asked}</s>\n<|assistant|>", False), (f"{answer}</s>", True), ("\n", False)]

        return parts

    # what the tokenizer says of itself would cut the longer one
    ported = found.port(base=base, to=target if greeting else base_of(found, base), data=rows, max_length=99)
    losses = learning(base, said("")), learning(base, said(greeting))
    assert distance(ported, found.expected(losses, extra=len(greeting))) < 1e-5
    assert ported.record.data.chat_template is True


def base_of(found: Case, chatting: Path) -> Path:
    """The target with the source's own template."""
    folder = chatting.parent / "same"
    shutil.copytree(found.target, folder, dirs_exist_ok=True)
    for file in (*chatting.glob("tok*"), *chatting.glob("*.jinja")):
        shutil.copy(file, folder)
    return folder


def test_texts_are_cut_to_a_length(case: Callable[[str], Case]) -> None:
    found = case("llama")
    loss = learning(found.base, lambda number: [(TEXTS[number][:9], True)])
    assert distance(found.port(max_length=9), found.expected((loss, loss))) < 1e-5


def test_texts_that_are_cut_to_nothing_to_predict_are_not_measured(case: Callable[[str], Case]) -> None:
    with pytest.raises(UnreadableSampleError, match="is predicted from another") as told:
        case("llama").port(n=5, max_length=1, evaluate=True)
    assert "a longer max_length" in told.value.remedy


@pytest.fixture
def of_words(case: Callable[[str], Case], tmp_path: Path) -> Path:
    """A target that reads whole words, where the source reads characters."""
    return write_decoder(tmp_path / "of words", width=24, blocks=3, seed=4, tokenizer=word_tokenizer())


def test_tokenizers_with_nothing_in_common_are_refused_before_anything_is_calibrated(
    case: Callable[[str], Case], of_words: Path
) -> None:
    stages = set[str]()
    with pytest.raises(TokenizersDifferError, match="have 10% of the texts' pieces in common, and 20%") as raised:
        case("llama").port(to=of_words, progress=lambda stage, *_: stages.add(stage))
    assert re.search(r"they cut '\w+ .*' into \w\|\w\|.*\.\.\. and \w+\| \w+\| ", raised.value.cause)
    assert raised.value.remedy == "choose a target whose tokenizer cuts these texts more alike"
    assert not {"download", "load", "calibrate"} & stages


@pytest.mark.parametrize("task", ["port", "compare"])
def test_of_a_target_at_the_hub_with_another_tokenizer_no_weight_is_downloaded(
    task: str, case: Callable[[str], Case], hub: Hub, of_words: Path
) -> None:
    found = case("llama")
    upload(hub, "user/other", of_words)
    how = {"base": found.base, "data": PLAIN, "n": 6}
    with pytest.raises(TokenizersDifferError, match="of the texts' pieces in common"):
        getattr(hf_bico, task)(found.tuned, to="user/other", **how)
    read = [entry for entry in hub.log if entry.method == "GET"]
    assert any(entry.path.endswith("/tokenizer.json") for entry in read)
    assert not any(entry.range is None and entry.path.endswith(".safetensors") for entry in read)


def test_chats_without_a_template_are_refused_by_the_models_name_before_it_is_loaded(
    case: Callable[[str], Case], chatting: tuple[Path, Path]
) -> None:
    found, stages = case("llama"), set[str]()
    with pytest.raises(MissingProcessorError, match="the tokenizer of 'target' has no chat template"):
        found.port(base=chatting[0], data=chat_rows(8), progress=lambda stage, *_: stages.add(stage))
    assert not {"download", "load", "calibrate"} & stages


@pytest.mark.parametrize(("split", "row"), [("train", 3), ("test", 1)])
def test_a_row_whose_answer_is_cut_away_is_named_before_anything_is_calibrated(
    split: str, row: int, case: Callable[[str], Case], chatting: tuple[Path, Path]
) -> None:
    """Nothing of an answer is left where the user speaks at length behind it."""
    found, stages, base = case("llama"), set[str](), chatting[0]
    data = {"train": chat_rows(8), "test": chat_rows(4, seed=1)}
    data[split][row]["messages"].append({"role": "user", "content": LONG * 2})
    with pytest.raises(UnreadableSampleError, match=f"row {row} of split '{split}': nothing of an answer") as raised:
        found.port(
            **{"base": base, "to": base_of(found, base), "data": data, "evaluate": True, "max_length": 60},
            progress=lambda stage, *_: stages.add(stage),
        )
    assert "a longer max_length" in raised.value.remedy
    assert "calibrate" not in stages
    how: dict[str, Any] = {"base": base, "to": base_of(found, base), "data": data, "n": 8, "max_length": 60}
    with pytest.raises(UnreadableSampleError, match=f"row {row} of split '{split}'"):
        hf_bico.compare(found.tuned, **how, methods=["bico"], seeds=1)


# --- how it is measured


def test_without_labels_a_t5_is_measured_by_its_loss(case: Callable[[str], Case]) -> None:
    """A probe is fitted to labels: without any, all samples would be of one class, and right."""
    found, rows = case("t5"), answered_rows(len(TEXTS))
    ported = found.port(data=rows, n=5, evaluate=True, class_names=None)
    measured = {entry.model: entry for entry in ported.record.evaluation}
    assert {(entry.metric, entry.protocol) for entry in measured.values()} == {("loss", None)}
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.target)
    total, count = 0.0, 0
    model = found.load(found.target)
    for number in set(range(len(TEXTS))) - set(ported.record.data.indices):
        asked = tokenizer(rows[number]["prompt"], return_tensors="pt")["input_ids"]
        answer = tokenizer(rows[number]["completion"], return_tensors="pt")["input_ids"]
        with torch.no_grad(), InDouble():
            total += float(model(input_ids=asked, labels=answer).loss) * answer.shape[1]
        count += answer.shape[1]
    assert measured["target"].value == pytest.approx(total / count, rel=1e-5)


def test_with_labels_a_t5_is_measured_by_a_probe(case: Callable[[str], Case]) -> None:
    found = case("t5").port(n=5, evaluate=True)
    assert {(entry.metric, entry.protocol) for entry in found.record.evaluation} == {("accuracy", "probe")}


@pytest.mark.parametrize("evaluation", ["probe", "both"])
def test_a_probe_of_data_without_labels_is_refused(evaluation: str, case: Callable[[str], Case]) -> None:
    with pytest.raises(UsageError, match="fits a linear probe to labels, and the data has none"):
        case("llama").port(n=5, evaluate=True, evaluation=evaluation)


def test_methods_are_compared_by_probes_where_there_are_labels(case: Callable[[str], Case]) -> None:
    found = case("t5")
    how: dict[str, Any] = {"to": found.target, "base": found.base, "n": 4, "methods": ["bico"], "seeds": 1}
    with pytest.raises(UsageError, match="a linear probe is fitted to labels, and 'data' has none") as told:
        hf_bico.compare(found.tuned, data=answered_rows(10), **how)
    assert 'evaluation="zero-shot"' in told.value.remedy
    compared = hf_bico.compare(found.tuned, data=answered_rows(10), evaluation="zero-shot", **how)
    assert {row.protocol for row in compared.rows()} == {"loss"}


def test_held_out_losses_are_those_of_the_library(case: Callable[[str], Case]) -> None:
    found = case("llama")
    ported = found.port(n=5, evaluate=True)
    measured = {entry.model: entry.value for entry in ported.record.evaluation}
    rest = sorted(set(range(len(TEXTS))) - set(ported.record.data.indices))
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.target)
    tokens = sum(len(tokenizer(TEXTS[number])["input_ids"]) - 1 for number in rest)
    for name, folder in (("target", found.target), ("base", found.base), ("source", found.tuned)):
        model = found.load(folder)
        with torch.no_grad(), InDouble():
            total = sum(float(found.loss(model, number)) for number in rest)
        assert measured[name] == pytest.approx(total / tokens, rel=1e-5)
    assert measured.keys() == {"target", "base", "source", "ported"}


def test_texts_without_labels_are_enough_to_fine_tune_on(case: Callable[[str], Case]) -> None:
    ported = case("llama").port(
        n=5,
        evaluate=True,
        dtype="float32",
        method="finetune",
        train_steps=20,
        train_batch=4,
        warmup=1,
        learning_rate=0.01,
    )
    measured = {entry.model: entry.value for entry in ported.record.evaluation}
    assert measured["ported"] < measured["target"] - 0.1
    assert ported.record.method.training is not None


# --- what is written

LORAS = {
    "llama": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj"], task_type="CAUSAL_LM"),
    "gpt2": peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    "opt": peft.LoraConfig(r=2, target_modules=["q_proj", "fc1"], task_type="CAUSAL_LM"),
    "t5": peft.LoraConfig(r=2, target_modules=r".*encoder.*SelfAttention\.(q|v)", task_type="SEQ_2_SEQ_LM"),
}


def logits(case: Case, model: Any) -> Tensor:
    ids = torch.arange(6, 26).reshape(2, 10)
    more = {"decoder_input_ids": ids[:, :3]} if case.kind.answers else {}
    with torch.no_grad():
        return model.float().eval()(input_ids=ids, **more).logits


def require_same(found: Tensor, wanted: Tensor, target: Tensor) -> None:
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert (wanted - target).norm() > 1e-3 * wanted.norm(), "otherwise nothing was carried"


def written(model: Any) -> Tensor:
    return model.generate(input_ids=torch.tensor([[6, 7, 8]]), max_new_tokens=3, min_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("name", KINDS)
def test_a_full_model_is_what_the_library_loads(name: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case(name)
    out = found.ported.save(tmp_path / "out")
    loaded = found.kind.auto.from_pretrained(out)
    before = logits(found, found.kind.auto.from_pretrained(found.target))
    require_same(logits(found, loaded), logits(found, found.ported.model()), before)
    assert written(loaded).shape[1] >= 3
    assert transformers.AutoTokenizer.from_pretrained(out)("ada").input_ids[:3] == text_tokenizer()("ada").input_ids


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_of_all_ranks_is_the_full_model(name: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case(name)
    out = found.ported.save(tmp_path / "out", rank=48)
    base = found.kind.auto.from_pretrained(found.target)
    before = logits(found, base)
    loaded = peft.PeftModel.from_pretrained(base, out)
    require_same(logits(found, loaded), logits(found, found.ported.model()), before)


@pytest.mark.quick
@pytest.mark.parametrize("name", LORAS)
def test_a_lora_stays_one_of_its_rank(name: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case(name)
    base = Base(found.base, found.kind.auto.from_pretrained)
    ported = found.port(saved(base, LORAS[name], tmp_path / "lora"))
    out = ported.save(tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config.get("rank_pattern") or {}) == (2, {})
    target = found.kind.auto.from_pretrained(found.target)
    before = logits(found, target)
    loaded = peft.PeftModel.from_pretrained(target, out)
    require_same(logits(found, loaded), logits(found, ported.model()), before)
    assert written(loaded).shape[1] >= 3


def test_a_port_in_half_precision_is_one_but_for_rounding(case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case("llama")
    lora = saved(Base(found.base, found.kind.auto.from_pretrained), LORAS["llama"], tmp_path / "lora")
    usual = {"to": found.target, "base": found.base, "data": PLAIN, "n": len(TEXTS), "evaluate": False, **PAPER}
    half, single = (hf_bico.port(lora, **usual, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert (half.record.run.dtype, single.record.run.dtype) == ("bfloat16", "float32")
    assert len(half.record.sites) == 3
    for site in half.record.sites:
        scores = torch.tensor([site.score_in, site.score_out, site.unseen])
        assert bool(scores.isfinite().all()), site.name
    assert set(half.task_vector) == set(single.task_vector)
    for name, exact in single.task_vector.items():
        rough = half.task_vector[name]
        assert rough.dtype == torch.float32
        assert 0 < (rough - exact).norm() < 0.2 * exact.norm(), name
    out = half.save(tmp_path / "out")
    assert json.loads((out / "bico.json").read_text())["run"]["dtype"] == "bfloat16"


def test_an_adapter_of_a_lower_rank_holds_what_its_form_says(case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case("gpt2")
    ported = found.port(rank=3, dtype="float32")
    out = ported.save(tmp_path / "out")
    base = found.kind.auto.from_pretrained(found.target)
    truth = ported.form.changes.apply_to(found.kind.auto.from_pretrained(found.target))
    loaded = peft.PeftModel.from_pretrained(base, out)
    require_same(logits(found, loaded), logits(found, truth), logits(found, ported.model()))


# --- what is refused


@pytest.mark.parametrize(
    ("options", "kind", "cause"),
    [
        ({"method": "bico-fisher"}, UnsuitableMethodError, "bico-fisher needs an objective that predicts classes"),
        ({"readout": True}, UnsuitableMethodError, "readout=True needs an objective that predicts classes"),
        ({"control": True, "evaluate": True}, UnsuitableMethodError, "texts of different lengths"),
        ({"labels": "pseudo"}, UsageError, "pseudo-labels"),
        ({"tower": "text"}, UsageError, "tower chooses between the towers of a CLIP"),
        ({"probe": True}, UsageError, "probe=True fits a classifier's head, .* use language-modelling"),
        ({"objective": "zero-shot"}, UnsupportedModelError, "do not support the objective 'zero-shot'"),
        ({"objective": "classification"}, UnsupportedModelError, "'classification'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_a_decoder_cannot_give_is_refused(
    options: dict[str, Any], kind: type[Exception], cause: str, case: Callable[[str], Case]
) -> None:
    stages = set[str]()
    with pytest.raises(kind, match=cause):
        case("llama").port(**options, progress=lambda stage, *_: stages.add(stage))
    assert "calibrate" not in stages


def test_a_decoder_is_not_carried_to_an_encoder(case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case("llama")
    for name, other in (("bert", write_encoder(tmp_path / "bert")), ("t5", write_t5(tmp_path / "t5"))):
        with pytest.raises(hf_bico.BicoError) as raised:
            found.port(to=other)
        assert "(decoder) has the objective language-modelling and the target" in raised.value.cause, name
        assert "choose a target of the base's kind" in raised.value.remedy


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantised"),
        ({"num_local_experts": 8}, "mixture of experts"),
    ],
)
def test_what_no_family_can_carry_is_refused_by_name(
    fields: dict[str, Any], cause: str, case: Callable[[str], Case], tmp_path: Path
) -> None:
    found = case("llama")
    other = tmp_path / "other"
    shutil.copytree(found.target, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(UnsupportedModelError, match=cause):
        hf_bico.plan(found.tuned, to=other, base=found.base)


# --- the command line


@dataclass(frozen=True)
class Shell:
    """A folder in which a LoRA of a decoder is carried by typed commands, and what the port printed there."""

    folder: Path
    printed: str

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "out" / "bico.json").read_text())

    def value(self, model: str) -> float:
        return next(entry["value"] for entry in self.record["evaluation"] if entry["model"] == model)


PORT = " ".join(("port lora --base base --to target --data texts -n 12 --max-length 40", *PAPER_WORDS))


def run(line: str) -> Result:
    """What a typed line gives."""
    return CliRunner().invoke(main, line.split())


@pytest.fixture(scope="module")
def shell(case: Callable[[str], Case], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    found, folder = case("llama"), tmp_path_factory.mktemp("shell")
    for name in ("base", "target"):
        shutil.copytree(found.folder / name, folder / name)
    saved(Base(found.base, found.kind.auto.from_pretrained), LORAS["llama"], folder / "lora")
    (folder / "texts").mkdir()
    for split, seed in (("train", 0), ("test", 1)):
        lines = [json.dumps(row) for row in answered_rows(20, seed)]
        (folder / "texts" / f"{split}.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = run(f"{PORT} -o out")
        assert done.exit_code == 0, done.output
        yield Shell(folder, done.stdout)


def test_a_port_prints_the_losses_and_what_became_of_them(shell: Shell) -> None:
    outlook, _, first, *_ = shell.printed.splitlines()
    assert outlook.startswith("Outlook: ")
    assert "eld-out loss" in first
    for model in ("target", "ported", "source", "base"):
        assert f"{shell.value(model):.3f}" in shell.printed
    assert "20 samples of split test of texts" in shell.printed
    assert first.partition(" (")[0] in (shell.folder / "out" / "README.md").read_text()


def test_the_record_says_how_texts_were_read(shell: Shell) -> None:
    record = shell.record
    assert record["objective"]["name"] == "language-modelling"
    assert record["data"]["max_length"] == 40
    assert record["data"]["columns"] == {"prompt": "prompt", "completion": "completion"}
    assert record["data"]["chat_template"] is False
    assert record["source"]["kind"] == "adapter"
    assert json.loads((shell.folder / "out" / "adapter_config.json").read_text())["r"] == 2


def test_measuring_the_result_gives_the_recorded_loss(shell: Shell) -> None:
    done = run("eval out --base target --data texts --max-length 40 --json")
    assert done.exit_code == 0, done.output
    measured = json.loads(done.stdout)
    assert (measured["metric"], measured["n"], measured["split"]) == ("loss", 20, "test")
    assert measured["value"] == pytest.approx(shell.value("ported"), rel=1e-5)
    target = json.loads(run("eval target --data texts --max-length 40 --json").stdout)
    assert target["value"] == pytest.approx(shell.value("target"), rel=1e-6)
    assert target["value"] != pytest.approx(measured["value"], rel=1e-5)


def test_a_repeat_gives_the_same_weights(shell: Shell) -> None:
    done = run("rerun out --json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["same"] is True
    assert json.loads(done.stdout)["differences"] == []


def test_a_port_as_json_is_one_object(shell: Shell) -> None:
    done = run(f"{PORT} -o again --json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["record"]["output"]["files"] == shell.record["output"]["files"]


def test_a_plan_of_a_decoder_loads_no_torch(shell: Shell) -> None:
    code = (
        "import sys\nfrom hf_bico.cli.main import main\n"
        "main(['plan', 'lora', '--base', 'base', '--to', 'target', '--data', 'texts'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=shell.folder)
    assert "carried     3 sites" in done.stdout
    assert "Ready to port." in done.stdout
    assert done.stdout.endswith("False\n")


def test_a_port_that_reads_no_sample_needs_no_tokenizer(case: Callable[[str], Case], tmp_path: Path) -> None:
    found, folders = case("llama"), {}
    for name, place in (("tuned", found.tuned), ("base", found.base), ("target", found.target)):
        folders[name] = Path(shutil.copytree(place, tmp_path / "bare" / name, ignore=shutil.ignore_patterns("tok*")))
    ported = hf_bico.port(
        folders["tuned"], to=folders["target"], base=folders["base"], method="naive", alpha=1.0, device="cpu"
    )
    assert len(ported.task_vector)
    assert ported.record.data is None
