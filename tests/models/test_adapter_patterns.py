"""Configurations that list names by the thousand are read in seconds, and as peft reads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_bico.errors import AdapterError
from hf_bico.models.adapters.config import parse_adapter_config
from hf_bico.models.adapters.lora import changes_of
from hf_bico.models.adapters.patterns import Patterns
from hf_bico.models.checkpoints import MemoryCheckpoint
from hf_bico.porting.task_vector import TaskVector
from support.adapters import READ_BY_PEFT, Base, other, rewritten, saved, transformers_base
from support.bounds import within
from support.malformed.adapter_files import CATASTROPHE

MODULES = [f"model.layers.{block}.{name}" for block in range(125) for name in ("q_proj", "v_proj", "up", "down")]
MANY = 23_040
"""The layers of 60 blocks with three in each of 128 experts."""
NAMES = {
    "names": [f"name_{number}" for number in range(MANY)],
    "paths": [f"layers.{number // 384}.mlp.experts.{number % 384}.up_proj" for number in range(MANY)],
    "escaped paths": [rf"^model\.layers\.{number}\.gate" for number in range(MANY)],
}
FIELDS = ["rank_pattern", "alpha_pattern", "modules_to_save", "target_modules", "exclude_modules", "target_parameters"]
PARTS = st.lists(st.sampled_from(["a", "b", "ab", "a-b", "0", "1"]), min_size=1, max_size=5)
TEXTS = st.lists(
    st.lists(st.sampled_from(["a", "b", "-", "0", "1", ".", r"\.", "^", "|", ".*", r"\d+"]), max_size=5).map("".join),
    max_size=6,
)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(texts=TEXTS, parts=PARTS, inside=st.booleans())
@example(texts=["b", "a.b"], parts=["a", "b"], inside=False)
@example(texts=["a.b"], parts=["b", "a-b", "0"], inside=True)
@example(texts=["^b", r"^a\.b"], parts=["a", "b"], inside=False)
def test_the_first_match_is_that_of_the_expressions_which_peft_spells_out(
    texts: list[str], parts: list[str], inside: bool
) -> None:
    name, spelled = ".".join(parts), r"(^|.*\.){}($|\..*)" if inside else r"(.*\.)?({})$"
    expected = next((text for text in texts if re.match(spelled.replace("{}", text), name)), None)
    assert Patterns(texts, inside).first(name) == expected


def test_names_with_dots_at_ever_other_places_are_matched_too() -> None:
    texts = ["".join("." if number >> bit & 1 else "a" for bit in range(9)) for number in range(512)]
    patterns = Patterns(texts)
    assert patterns.expressions, "only so many forms are looked up"
    for name in ("aaaaaaaaa", "x.aaaaaaaab", "bbaaaaaaa", "a.b", "aaaa.aaaa"):
        assert patterns.first(name) == next((text for text in texts if re.match(rf"(.*\.)?({text})$", name)), None)


def _read(**fields: Any) -> dict[str, int]:
    """The ranks of a LoRA over 500 layers with these fields in its configuration."""
    adapter = {
        f"base_model.model.{module}.lora_{part}.weight": torch.ones(2, 4) if part == "A" else torch.ones(4, 2)
        for module in MODULES
        for part in "AB"
    }
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj", "up", "down"], **fields}
    base = MemoryCheckpoint({f"{module}.weight": torch.ones(4, 4) for module in MODULES})
    return changes_of(
        MemoryCheckpoint(adapter), parse_adapter_config(raw, "lora"), base, "lora", lambda tensor: False
    ).ranks


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("field", FIELDS)
def test_a_lora_that_lists_thousands_of_other_names_is_read_in_seconds(field: str, kind: str) -> None:
    names = NAMES[kind]
    value: Any = dict.fromkeys(names, 7) if field.endswith("_pattern") else names
    value = [*names, "q_proj", "v_proj", "up", "down"] if field == "target_modules" else value
    with within(8):
        assert len(_read(**{field: value})) == len(MODULES)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_lora_that_lists_its_own_layers_is_read_in_seconds(field: str) -> None:
    own = {f"^{re.escape(module)}": 2 for module in MODULES}
    with within(8):
        assert len(_read(**{field: {**dict.fromkeys(NAMES["paths"], 7), **own}}, r=2)) == len(MODULES)


def test_hundreds_of_expressions_are_compiled_once() -> None:
    with within(30):
        assert len(_read(alpha_pattern={rf"layers\.({number}|x).*other": 3 for number in range(800)})) == len(MODULES)


@pytest.mark.parametrize("field", ["layers_pattern", "rank_pattern"])
def test_expressions_without_end_are_refused_in_time(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bico.models.adapters.patterns.EXPRESSION_SECONDS", 1.0)
    texts = [f"a{number}.*" for number in range(MANY)]
    fields: dict[str, Any] = {field: dict.fromkeys(texts, 2) if field == "rank_pattern" else [*texts, "layers"]}
    with within(15), pytest.raises(AdapterError, match="cannot be matched within 1 seconds"):
        _read(layers_to_transform=list(range(125)), **fields)


def test_lists_beyond_any_model_are_refused() -> None:
    with pytest.raises(AdapterError, match="lists 100,001 names in 'modules_to_save'"):
        _read(modules_to_save=["a"] * 100_001)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return transformers_base(tmp_path_factory.mktemp("transformers") / "base")


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *(("DELORA", "lambda_pattern"), ("C3A", "block_size_pattern"), ("FOURIERFT", "n_frequency_pattern")),
        *(("LOKR", "alpha_pattern"), ("ADALORA", "modules_to_save")),
    ],
)
def test_expressions_of_other_types_are_tried_before_peft_has_them(
    kind: str, field: str, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_bico.models.adapters.patterns.EXPRESSION_SECONDS", 1.0)
    folder = saved(base, other(kind, target_modules=["q_proj"], **READ_BY_PEFT[kind]), tmp_path)
    rewritten(folder, **{field: [CATASTROPHE] if field == "modules_to_save" else {CATASTROPHE: 2}})
    with within(15), pytest.raises(AdapterError, match="cannot be matched within 1 seconds"):
        len(TaskVector.from_adapter(folder, base=base.folder))


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "modules_to_save", "target_modules"])
def test_more_names_than_peft_itself_matches_in_time_are_refused(field: str) -> None:
    value: Any = dict.fromkeys(NAMES["paths"], 2) if field.endswith("_pattern") else NAMES["paths"]
    with pytest.raises(AdapterError, match=f"lists 23,040 names in '{field}'"):
        parse_adapter_config({"peft_type": "LOHA", field: value}, "loha")
    few = dict.fromkeys(list(value)[:300], 2) if field.endswith("_pattern") else value[:300]
    assert parse_adapter_config({"peft_type": "LOHA", field: few}, "loha").kind == "LOHA"


def test_an_adalora_may_list_the_ranks_of_all_its_layers() -> None:
    ranks = {f"{module}.lora_E": [True, False] for module in MODULES}
    assert parse_adapter_config({"peft_type": "ADALORA", "rank_pattern": ranks}, "adalora").kind == "ADALORA"
