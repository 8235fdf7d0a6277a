"""A rotated copy of a language model is the same function in other coordinates: porting to it must be exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import hf_bico
from hf_bico.models.low_rank import Factors
from hf_bico.models.model import Model
from support.language_toys import pair_rows, sentences, write_decoder, write_t5
from support.paper import PAPER
from support.rotated_language import InDouble, Rows, Turn, observe, rotated_copy, with_plain_norms

DECODERS = ("llama", "qwen2", "qwen3")
KINDS = (*DECODERS, "t5", "t5-gated")
WIDTH, NEURONS, RANK = 32, 64, 3
CLASSES = ("no", "yes")
"""The words that a T5 says."""
UNLEARNT = -100


@dataclass
class Case:
    """A base, its rotated copy, a few samples, and what they show of the base."""

    kind: str
    folder: Path
    samples: int = 2
    turns: dict[str, Turn] = field(init=False)

    def __post_init__(self) -> None:
        drawn = self.folder / "drawn"
        if self.is_t5:
            write_t5(drawn, self.kind == "t5-gated", width=WIDTH, mlp=NEURONS, seed=1)
        else:
            write_decoder(drawn, self.kind, width=WIDTH, mlp=NEURONS, tied=self.kind == "qwen2", seed=1)
        self.tokenizer = AutoTokenizer.from_pretrained(drawn)
        self.model = with_plain_norms(self.load(drawn))
        self.copy, self.turns = rotated_copy(self.model, seed=2)
        self.base, self.target = self.save("base", self.model), self.save("target", self.copy)

    @property
    def is_t5(self) -> bool:
        return self.kind.startswith("t5")

    def load(self, folder: Path) -> Any:
        auto = AutoModelForSeq2SeqLM if self.is_t5 else AutoModelForCausalLM
        return auto.from_pretrained(folder, dtype="auto")

    def save(self, name: str, model: Any) -> Path:
        model.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)
        return self.folder / name

    @property
    def sites(self) -> list[str]:
        """The modules that are carried: in the blocks, and of a T5 in those of its encoder."""
        return [name for name in self.turns if name.startswith(("model.layers.", "encoder."))]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return pair_rows(self.samples) if self.is_t5 else [{"text": text} for text in sentences(self.samples)]

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        """The samples as tokens, padded to one length."""
        texts = [row.get("text") or f"sentence1: {row['sentence1']} sentence2: {row['sentence2']}" for row in self.rows]
        read = dict(self.tokenizer(texts, padding=True, max_length=64, truncation=True, return_tensors="pt"))
        if self.is_t5:
            said = self.tokenizer([CLASSES[row["label"]] for row in self.rows], padding=True, return_tensors="pt")
            return read | {"labels": said["input_ids"].masked_fill(said["attention_mask"] == 0, UNLEARNT)}
        return read | {"labels": read["input_ids"].masked_fill(read["attention_mask"] == 0, UNLEARNT)}

    def logits(self, model: Any) -> Tensor:
        with InDouble():
            return model(**self.batch).logits

    def loss(self) -> Tensor:
        """Summed over the label tokens; a decoder's are those of the next position."""
        logits, labels = self.logits(self.model), self.batch["labels"]
        if not self.is_t5:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=UNLEARNT, reduction="sum")

    @cached_property
    def seen(self) -> Rows:
        return observe(self.model, self.sites, self.loss, self.batch["attention_mask"].bool())

    def port(self, source: Path, dtype: str = "float64") -> hf_bico.Ported:
        options: dict[str, Any] = {"n": self.samples, "dtype": dtype, "evaluate": False, **PAPER}
        options |= {"class_names": CLASSES} if self.is_t5 else {}
        with InDouble() if dtype == "float64" else nullcontext():
            return hf_bico.port(source, to=self.target, base=self.base, data=self.rows, **options)

    def random_changes(self) -> dict[str, Tensor]:
        """Of every parameter of a site, by name."""
        generator = torch.Generator().manual_seed(5)
        own = dict(self.model.named_parameters())
        names = [f"{site}.{kind}" for site in self.sites for kind in ("weight", "bias") if f"{site}.{kind}" in own]
        return {name: 0.1 * torch.randn(own[name].shape, generator=generator, dtype=torch.float64) for name in names}

    def seen_changes(self) -> dict[str, Tensor]:
        """The same, without what calibration cannot see."""

        def project(name: str, change: Tensor) -> Tensor:
            of_inputs, of_gradients = self.seen.projectors(name.rpartition(".")[0])
            return of_gradients @ change @ of_inputs if change.ndim == 2 else change @ of_gradients

        return {name: project(name, change) for name, change in self.random_changes().items()}

    def tuned(self, changes: dict[str, Tensor]) -> Any:
        tuned = deepcopy(self.model)
        with torch.no_grad():
            for name, change in changes.items():
                tuned.get_parameter(name).add_(change)
        return tuned

    def expected(self, name: str, change: Tensor) -> Tensor:
        """A change in the coordinates of the copy."""
        turn = self.turns[name.rpartition(".")[0]]
        return turn.of_weight(change) if change.ndim == 2 else turn.of_bias(change)

    def require_same_function(self, ported: hf_bico.Ported, tuned: Any, error: float = 1e-6) -> None:
        """The target with the ported change gives the logits of the fine-tuned source, which are not the target's."""
        before, wanted = self.logits(self.copy), self.logits(tuned)
        changed = deepcopy(self.copy)
        ported.task_vector.apply_to(changed)
        assert (wanted - before).norm() > 0.05 * before.norm(), "the change must matter"
        assert (self.logits(changed) - wanted).abs().max() < error


@pytest.fixture
def case(tmp_path: Path) -> Callable[[str], Case]:
    return lambda kind: Case(kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_copy_is_the_same_function(kind: str, case: Callable[[str], Case]) -> None:
    made = case(kind)
    ours, theirs = made.logits(made.model), made.logits(made.copy)
    assert (ours - theirs).abs().max() < 1e-10
    assert ours.std() > 0.1, "a model whose logits do not vary would prove nothing"
    for name in made.sites:
        own, other = (model.get_submodule(name).weight for model in (made.model, made.copy))
        assert (own - other).norm() > 0.5 * own.norm(), f"{name} was not turned"


@pytest.mark.parametrize("kind", KINDS)
def test_seen_task_vector_is_recovered_exactly(kind: str, case: Callable[[str], Case]) -> None:
    made = case(kind)
    changes = made.seen_changes()
    tuned = made.tuned(changes)
    ported = made.port(made.save("tuned", tuned))
    assert set(ported.task_vector) == set(changes)
    for name, change in changes.items():
        error = (ported.task_vector[name].double() - made.expected(name, change)).norm() / change.norm()
        assert error < 1e-6, f"{name}: {error:.1e}"
    made.require_same_function(ported, tuned)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_in_single_precision(kind: str, case: Callable[[str], Case]) -> None:
    made = case(kind)
    tuned = made.tuned(made.seen_changes())
    made.require_same_function(made.port(made.save("tuned", tuned), "float32"), tuned, error=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_unseen_energy_is_what_the_projectors_lose(kind: str, case: Callable[[str], Case]) -> None:
    made = case(kind)
    changes = made.random_changes()
    report = made.port(made.save("tuned", made.tuned(changes))).report
    layout = Model.open(made.base, "the base").layout
    modules = {site.name: site.weight.tensor.removesuffix(".weight") for site in layout.sites}
    found = {modules[site.source]: site.unseen for site in report.sites}
    wanted = {name: made.seen.unseen(name, changes[f"{name}.weight"]) for name in made.sites}
    assert found == pytest.approx(wanted, abs=1e-6)
    assert min(wanted.values()) < 0.6, "two samples show something of a site"
    assert max(wanted.values()) > 0.2, "two samples do not show all of every site"


@pytest.mark.parametrize("kind", ["llama", "qwen3", "t5"])
def test_lora_is_recovered_exactly_at_its_own_rank(kind: str, case: Callable[[str], Case]) -> None:
    made = case(kind)
    ending = r"encoder\..*\.(q|k|v|o|wi|wo)" if made.is_t5 else r".*\.(q|k|v|o|gate|up|down)_proj"
    settings = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=ending)
    adapted = peft.get_peft_model(deepcopy(made.model), settings).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in made.sites:
            of_inputs, of_gradients = made.seen.projectors(name)
            layer = adapted.get_submodule(f"base_model.model.{name}")
            for part in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
                part.copy_(0.2 * torch.randn(part.shape, generator=generator, dtype=torch.float64))
            layer.lora_A["default"].weight.copy_(layer.lora_A["default"].weight @ of_inputs)
            layer.lora_B["default"].weight.copy_(of_gradients @ layer.lora_B["default"].weight)
    adapted.save_pretrained(made.folder / "lora")
    ported = made.port(made.folder / "lora")
    tuned = adapted.merge_and_unload()
    assert len(ported.task_vector) == len(made.sites)
    for site in made.sites:
        name = f"{site}.weight"
        change = tuned.get_parameter(name) - made.model.get_parameter(name)
        found = ported.task_vector.change(name)
        assert isinstance(found, Factors)
        assert found.rank == RANK
        error = (ported.task_vector[name].double() - made.expected(name, change)).norm() / change.norm()
        assert error < 1e-6, f"{name}: {error:.1e}"
    made.require_same_function(ported, tuned)
