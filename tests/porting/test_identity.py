"""A target that is the base, or the fine-tuned model, is said to be, however the two were given."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import CLIPModel

import hf_bico
from hf_bico.porting.identity import BASE, FINE_TUNED
from support.adapters import Base, lora, saved
from support.paper import PAPER
from support.scenes import write_images
from support.toys import WRITERS, Toy, random_state

TOY = Toy(width=8, blocks=1, embedding=4, text_width=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a fine-tune, a LoRA, another model of the same shape, and images."""
    made = tmp_path_factory.mktemp("models")
    state, generator = random_state(TOY, 0), torch.Generator().manual_seed(5)
    changed = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) if name.startswith("visual.") else tensor
        for name, tensor in state.items()
    }
    write = WRITERS["transformers"]
    for name, tensors in (("base", state), ("tuned", changed), ("other", random_state(TOY, 1))):
        write(made / name, TOY, tensors)
    saved(Base(made / "base", CLIPModel.from_pretrained), lora(["q_proj", "v_proj", "fc1"]), made / "lora")
    shutil.copytree(made / "base", made / "again")
    (made / "link").symlink_to(made / "base")
    write_images(made / "pictures", size=8, train=4, test=2)
    return made


def _loaded(folder: Path) -> Any:
    return CLIPModel.from_pretrained(folder)


def _adapted(folder: Path) -> Any:
    return PeftModel.from_pretrained(_loaded(folder / "base"), folder / "lora")


def _nearly(folder: Path) -> Any:
    """The base, with one number in one of its norms changed."""
    model = _loaded(folder / "base")
    model.vision_model.post_layernorm.weight.data[0] += 1e-3
    return model


def _twice(module: Any) -> tuple[Any, Any]:
    return module, module


CASES: dict[str, tuple[Callable[[Path], tuple[Any, Any, Any]], list[str]]] = {
    "a link": (lambda at: (at / "tuned", at / "link", at / "base"), [BASE]),
    "a copy of the folder": (lambda at: (at / "tuned", at / "again", at / "base"), [BASE]),
    "one module": (lambda at: (at / "tuned", *_twice(_loaded(at / "base"))), [BASE]),
    "a copy of the module": (lambda at: (_loaded(at / "tuned"), _loaded(at / "base"), _loaded(at / "base")), [BASE]),
    "a module of the folder": (lambda at: (at / "tuned", _loaded(at / "base"), at / "base"), [BASE]),
    "a rounded module": (lambda at: (at / "tuned", _loaded(at / "base").bfloat16(), at / "base"), [BASE]),
    "the module": (lambda at: (*_twice(_loaded(at / "tuned")), at / "base"), [FINE_TUNED]),
    "its folder": (lambda at: (at / "tuned", _loaded(at / "tuned"), at / "base"), [FINE_TUNED]),
    "a merged adapter": (lambda at: (at / "lora", _adapted(at).merge_and_unload(), at / "base"), [FINE_TUNED]),
    "a loaded adapter, merged": (
        lambda at: (_adapted(at), _adapted(at).merge_and_unload(), _loaded(at / "base")),
        [FINE_TUNED],
    ),
    "another adapter's base": (lambda at: (at / "lora", at / "other", at / "base"), []),
    "another model": (lambda at: (_loaded(at / "tuned"), _loaded(at / "other"), _loaded(at / "base")), []),
    "nearly the base": (lambda at: (at / "tuned", _nearly(at), at / "base"), []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_target_is_is_said(case: str, folder: Path) -> None:
    make, expected = CASES[case]
    source, target, base = make(folder)
    where = {"to": target, "base": base, "data": str(folder / "pictures")}
    assert hf_bico.port(source, **where, n=4, evaluate=False, **PAPER).record.notices == expected


def test_a_plan_says_it_without_reading_weights(folder: Path) -> None:
    tuned, base = _loaded(folder / "tuned"), _loaded(folder / "base")
    assert hf_bico.plan(tuned, base, base=base).lineage.notices == (BASE,)
    assert hf_bico.plan(tuned, tuned, base=base).lineage.notices == (FINE_TUNED,)
    assert hf_bico.plan(tuned, copy.deepcopy(base), base=base).lineage.notices == ()
    assert hf_bico.plan(folder / "tuned", folder / "link", base=folder / "base").lineage.notices == (BASE,)
