"""Adapters as they come: every kind that peft has, every spelling of keys, the wrong ones, and that LoRA stays thin."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_bico.errors import (
    AdapterError,
    BaseMismatchError,
    BicoError,
    NonFiniteWeightsError,
    PickledWeightsError,
    UnsupportedAdapterError,
)
from hf_bico.hub.references import LOCAL
from hf_bico.models.adapters.config import BY_PEFT, LORA
from hf_bico.models.low_rank import Factors
from hf_bico.porting.task_vector import TaskVector
from support.adapters import (
    CONFIG,
    PREFIX,
    READ_BY_PEFT,
    TOY,
    WEIGHTS,
    Base,
    assert_same,
    by_peft,
    lora,
    open_clip_base,
    other,
    renamed,
    rewritten,
    saved,
    tensors_of,
    transformers_base,
)

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

QV, Q0 = ["q_proj", "v_proj"], "vision_model.encoder.layers.0.self_attn.q_proj"
MERGING = "merge_and_unload"

REFUSED = {
    *("ADAMSS", "ADAPTION_PROMPT", "BEFT", "BOFT", "CARTRIDGE", "CPT", "DEFT", "FROD", "GLORA", "HIRA", "HRA", "IA3"),
    *("LILY", "LN_TUNING", "MISS", "MULTITASK_PROMPT_TUNING", "OFT", "OSF", "PEANUT", "POLY", "PREFIX_TUNING"),
    *("PROMPT_TUNING", "PSOFT", "P_TUNING", "ROAD", "SHADOW", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS"),
    *("UNILORA", "XLORA"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return transformers_base(tmp_path_factory.mktemp("transformers") / "base")


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return open_clip_base(tmp_path_factory.mktemp("open_clip") / "base")


@pytest.fixture(scope="module")
def unspoilt(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(base, lora(QV, modules_to_save=["visual_projection"]), tmp_path_factory.mktemp("unspoilt"))


@pytest.fixture
def plain(unspoilt: Path, tmp_path: Path) -> Path:
    """A LoRA with a module of its own, to be spoilt."""
    return shutil.copytree(unspoilt, tmp_path / "plain")


def read(folder: Path, base: Base, **options: Any) -> TaskVector:
    return TaskVector.from_adapter(folder, base=base.folder, **options)


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


# --- refused


def test_every_kind_of_the_installed_peft_is_read_or_refused() -> None:
    lists = [{LORA}, READ_BY_PEFT.keys(), REFUSED]
    assert sum(map(len, lists)) == len(set().union(*lists))
    assert set().union(*lists) == {kind.value for kind in peft.PeftType}
    assert READ_BY_PEFT.keys() == set(BY_PEFT)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_is_refused_by_name(kind: str, plain: Path, base: Base) -> None:
    with pytest.raises(UnsupportedAdapterError, match=rf"\b{kind}\b") as caught:
        read(rewritten(plain, peft_type=kind), base)
    # what changes no weights cannot be merged either
    assert (MERGING in caught.value.remedy) != ("changes no weights" in caught.value.cause)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_initialisation_that_changes_the_base_is_refused(start: str, plain: Path, base: Base) -> None:
    with pytest.raises(UnsupportedAdapterError, match=start) as caught:
        read(rewritten(plain, init_lora_weights=start), base)
    assert MERGING in caught.value.remedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kasa_config", {"beta": 0.1}),
        ("use_bdlora", {"nblocks": 2}),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 1}),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("monteclora_config", {"sample_scaler": 0.1}),
        ("velora_config", {"rank": 1}),
        ("megatron_config", {"hidden_size": 16}),
        ("use_qalora", True),
        ("ensure_weight_tying", True),
        ("use_frobnication", True),
        ("frobnication", 0.5),
    ],
)
def test_a_field_that_may_change_the_meaning_is_refused(field: str, value: Any, plain: Path, base: Base) -> None:
    with pytest.raises(UnsupportedAdapterError, match=f"'{field}'") as caught:
        read(rewritten(plain, **{field: value}), base)
    assert MERGING in caught.value.remedy


def test_every_field_of_a_lora_is_known_or_at_rest(plain: Path, base: Base) -> None:
    """What peft writes of itself is read, so a field that a new release adds does no harm until it is used."""
    fields = json.loads((plain / CONFIG).read_text())
    assert set(lora(QV).to_dict()) - {"runtime_config"} <= set(fields)
    before = dict(read(plain, base))
    assert same(read(rewritten(plain, use_frobnication=False, frobnication=None), base), before)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_other_initialisations_mean_nothing_once_trained(start: Any, plain: Path, base: Base) -> None:
    before = dict(read(plain, base))
    assert same(read(rewritten(plain, init_lora_weights=start), base), before)


def test_a_dora_is_refused(base: Base, tmp_path: Path) -> None:
    folder = saved(base, lora(QV, use_dora=True), tmp_path)
    with pytest.raises(UnsupportedAdapterError, match="DoRA"):
        read(folder, base)
    with pytest.raises(UnsupportedAdapterError, match="lora_magnitude_vector"):
        read(rewritten(folder, use_dora=False), base)


def test_trainable_tokens_are_refused(base: Base, tmp_path: Path) -> None:
    folder = saved(base, lora(QV, trainable_token_indices={"token_embedding": [1, 3]}), tmp_path)
    with pytest.raises(UnsupportedAdapterError, match="trainable_token_indices"):
        read(folder, base)
    with pytest.raises(UnsupportedAdapterError, match="trainable_tokens"):
        read(rewritten(folder, trainable_token_indices=None), base)


@pytest.mark.parametrize("kind", ["LOHA", "VERA"])
def test_an_unknown_field_of_another_kind_is_refused(kind: str, base: Base, tmp_path: Path) -> None:
    folder = saved(base, other(kind, target_modules=QV, r=4), tmp_path)
    before = dict(read(folder, base))
    assert same(read(rewritten(folder, use_frobnication=False), base), before)
    with pytest.raises(UnsupportedAdapterError, match="use_frobnication"):
        read(rewritten(folder, use_frobnication=True), base)


@pytest.mark.parametrize(
    "config",
    [
        lora(r"visual\.transformer\.resblocks\.0\.attn"),
        lora(["attn.out_proj"]),
        lora([], target_parameters=["attn.out_proj.weight"]),
        other("LOHA", target_modules=["attn.out_proj"], r=4),
    ],
    ids=["the attention", "out_proj", "out_proj as a parameter", "out_proj by another kind"],
)
def test_a_packed_attention_as_target_is_refused(config: peft.PeftConfig, open_clip: Base, tmp_path: Path) -> None:
    folder = saved(open_clip, config, tmp_path)
    with pytest.raises(UnsupportedAdapterError, match=r"attn.*packed attention") as caught:
        read(folder, open_clip)
    assert MERGING in caught.value.remedy


def test_a_grouped_convolution_is_refused(tmp_path: Path, plain: Path, base: Base) -> None:
    """peft cannot merge one either: its second factor has fewer columns than the first has rows."""
    tensors = {
        f"{PREFIX}{Q0}.lora_A.weight": torch.ones(2, 16, 1, 1),
        f"{PREFIX}{Q0}.lora_B.weight": torch.ones(16, 1, 1, 1),
    }
    with pytest.raises(AdapterError, match="no product of a plain LoRA"):
        read(rewritten(plain, tensors), base)


# --- spellings

SPELLINGS: dict[str, Callable[[str], str]] = {
    "the adapter's name": lambda name: re.sub(r"(lora_[AB])\.", r"\1.default.", name),
    "another adapter's name": lambda name: re.sub(r"(lora_[AB])\.", r"\1.mine.", name),
    "without a prefix": lambda name: name.removeprefix(PREFIX),
    "modules_to_save": lambda name: name.replace("visual_projection.", "visual_projection.modules_to_save.default."),
    "modules_to_save without a name": lambda name: name.replace(
        "visual_projection.", "visual_projection.modules_to_save."
    ),
    "base_layer": lambda name: name.replace("encoder.", "encoder.base_layer."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_keys_mean_the_same(spelling: str, plain: Path, base: Base) -> None:
    before = dict(read(plain, base))
    assert f"{Q0}.weight" in before
    assert "visual_projection.weight" in before
    assert same(read(renamed(plain, SPELLINGS[spelling]), base), before)


def test_original_modules_are_the_base_s_own(plain: Path, base: Base) -> None:
    before, tensors = dict(read(plain, base)), tensors_of(plain)
    original = {f"{PREFIX}visual_projection.original_module.weight": torch.zeros(12, 16)}
    assert same(read(rewritten(plain, tensors | original), base), before)


def test_embeddings_under_another_adapter_s_name(base: Base, tmp_path: Path) -> None:
    folder = saved(base, lora(["token_embedding"]), tmp_path)
    before = dict(read(folder, base))
    assert same(read(renamed(folder, lambda name: f"{name}.mine"), base), before)


@pytest.mark.parametrize("other_name", ["mine", ""], ids=["another name", "no name"])
def test_two_adapters_in_one_file_are_an_error(other_name: str, plain: Path, base: Base) -> None:
    tensors = {SPELLINGS["the adapter's name"](name): tensor for name, tensor in tensors_of(plain).items()}
    more = {name.replace(".default.", f".{other_name}." if other_name else "."): t for name, t in tensors.items()}
    with pytest.raises(
        AdapterError, match="several adapters: default, mine" if other_name else "the same tensor twice"
    ):
        read(rewritten(plain, tensors | more), base)


def test_a_base_tensor_in_the_file_replaces_the_base_s(plain: Path, base: Base) -> None:
    tensors = tensors_of(plain) | {
        f"{PREFIX}{Q0}.base_layer.bias": torch.ones(16),
        f"{PREFIX}logit_scale": torch.ones(()),
    }
    rewritten(plain, tensors)
    assert_same(read(plain, base), by_peft(plain, base))


def test_a_copy_of_the_base_s_weight_beside_a_lora_leaves_it_low_rank(base: Base, tmp_path: Path) -> None:
    folder, name = saved(base, lora(["token_embedding"]), tmp_path), "text_model.embeddings.token_embedding"
    own = base.model().get_parameter(f"{name}.weight").detach()
    before = dict(read(folder, base))
    tensors = tensors_of(folder) | {f"{PREFIX}{name}.base_layer.weight": own}
    copied = read(rewritten(folder, tensors), base)
    assert same(copied, before)
    assert isinstance(copied.change(f"{name}.weight"), Factors)
    tensors[f"{PREFIX}{name}.base_layer.weight"] = own + 1
    assert_same(read(rewritten(folder, tensors), base), by_peft(folder, base))


def test_what_the_base_lacks_is_named_and_left(plain: Path, base: Base) -> None:
    before = dict(read(plain, base))
    tensors = tensors_of(plain) | {f"{PREFIX}classifier.weight": torch.ones(3, 12)}
    vector = read(rewritten(plain, tensors), base)
    assert same(vector, before)
    assert vector.overlap.extra == ("classifier.weight",)


def test_a_bias_of_the_second_factor_is_left_where_the_configuration_denies_it(base: Base, tmp_path: Path) -> None:
    folder = saved(base, lora(QV, lora_bias=True), tmp_path)
    vector = read(rewritten(folder, lora_bias=False), base)
    assert not [name for name in vector if name.endswith("bias")]
    assert f"{PREFIX}{Q0}.lora_B.bias" in vector.overlap.extra
    assert_same(vector, by_peft(folder, base))


@pytest.mark.parametrize(
    "wrapped", ["module.{}", "_orig_mod.{}", "_fsdp_wrapped_module.{}", "base_model.model._orig_mod.{}"]
)
def test_names_of_training_tools_are_taken_off(
    wrapped: str, plain: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf-home"))
    before = dict(read(plain, base))
    inside = PREFIX if wrapped.startswith(PREFIX) else ""
    tensors = {wrapped.format(name.removeprefix(inside)): tensor for name, tensor in tensors_of(plain).items()}
    assert same(read(rewritten(plain, tensors), base), before)


def test_pickles_are_read_where_they_are_allowed(
    plain: Path, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf-home"))
    before = dict(read(plain, base))
    torch.save(tensors_of(plain), plain / "adapter_model.bin")
    (plain / WEIGHTS).unlink()
    with pytest.raises(PickledWeightsError, match="adapter_model.bin") as caught:
        read(plain, base)
    assert "allow_pickle=True" in caught.value.remedy
    assert same(read(plain, base, allow_pickle=True), before)


def test_an_adapter_in_bfloat16_is_read_as_peft_reads_it(base: Base, tmp_path: Path) -> None:
    folder = saved(base, lora(QV, lora_bias=True), tmp_path)
    rewritten(folder, {name: tensor.bfloat16() for name, tensor in tensors_of(folder).items()})
    assert_same(read(folder, base), by_peft(folder, base))


def test_a_loaded_base_gives_the_same(plain: Path, base: Base, open_clip: Base, tmp_path: Path) -> None:
    assert same(TaskVector.from_adapter(plain, base=base.model()), read(plain, base))
    folder = saved(open_clip, other("LOHA", target_modules=["c_fc"], r=4), tmp_path / "loha")
    model = open_clip.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert same(TaskVector.from_adapter(folder, base=model), read(folder, open_clip))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- what is wrong


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
@pytest.mark.parametrize("whole", [False, True], ids=["LoRA", "a module of its own"])
def test_a_base_of_another_width_is_named_with_both_shapes(library: str, whole: bool, tmp_path: Path) -> None:
    make, target = {"transformers": (transformers_base, "fc1"), "open_clip": (open_clip_base, "c_fc")}[library]
    keep = {"transformers": "post_layernorm", "open_clip": "ln_post"}[library]
    own, wide = make(tmp_path / "own"), make(tmp_path / "wide", TOY.but(width=24, heads=3))
    fields = {"modules_to_save": [keep]} if whole else {}
    config = lora(rf"(text_model|transformer).*{target}" if whole else rf"vis.*{target}", **fields)
    folder = saved(own, config, tmp_path / "adapter")
    shapes = r"\(16,\).*\(24,\)" if whole else r"\(32, 16\).*\(48, 24\)"
    with pytest.raises(BaseMismatchError, match=rf"'vis.*(weight|bias)' is {shapes}") as caught:
        read(folder, wide)
    assert "base=" in caught.value.remedy


def test_a_base_whose_layer_is_the_other_way_round_does_not_pass(tmp_path: Path) -> None:
    own, turned = transformers_base(tmp_path / "own", TOY.but(mlp_ratio=2)), transformers_base(tmp_path / "turned")
    folder = saved(own, lora(r"vision_model.*fc1"), tmp_path / "adapter")
    swapped = {
        name.replace("lora_A", "x").replace("lora_B", "lora_A").replace("x", "lora_B"): tensor.T
        for name, tensor in tensors_of(folder).items()
    }
    with pytest.raises(BaseMismatchError, match=r"fc1.weight' is \(16, 32\).*\(32, 16\)"):
        read(rewritten(folder, swapped), turned)


def a_half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != f"{PREFIX}{Q0}.lora_B.weight"}


def with_a(value: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {f"{PREFIX}{Q0}.lora_A.weight": value}


def elsewhere(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(Q0, "vision_model.encoder.layers.7.q"): tensor for name, tensor in tensors.items()}


SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], type[BicoError], str]] = {
    "half a pair": (a_half, AdapterError, rf"one of the two factors of '{Q0}'"),
    "a module that the base lacks": (elsewhere, BaseMismatchError, r"layers.7.q' \(1 of \d+ layers\)"),
    "a rank of one factor": (with_a(torch.ones(3, 16)), AdapterError, r"\(3, 16\) and \(16, 2\)"),
    "a scalar": (with_a(torch.ones(())), AdapterError, Q0),
    "a vector": (with_a(torch.ones(2)), AdapterError, Q0),
    "a convolution's factor": (with_a(torch.ones(2, 16, 1, 1)), BaseMismatchError, r"\(16, 16, 1, 1\).*\(16, 16\)"),
    "an empty tensor": (with_a(torch.ones(0, 16)), AdapterError, Q0),
    "a bias of the first factor": (
        lambda tensors: tensors | {f"{PREFIX}{Q0}.lora_A.bias": torch.ones(2)},
        UnsupportedAdapterError,
        "lora_A.bias",
    ),
    "a key of another LoRA": (
        lambda tensors: tensors | {f"{PREFIX}{Q0}.lora_diag.weight": torch.ones(2)},
        UnsupportedAdapterError,
        "lora_diag",
    ),
    "NaN": (with_a(torch.full((2, 16), float("nan"))), NonFiniteWeightsError, Q0),
    "infinite": (with_a(torch.full((2, 16), float("inf"))), NonFiniteWeightsError, Q0),
}


@pytest.mark.parametrize("case", SPOILT)
def test_wrong_tensors_are_named(case: str, plain: Path, base: Base) -> None:
    spoil, error, words = SPOILT[case]
    rewritten(plain, spoil(tensors_of(plain)))
    with pytest.raises(error, match=words) as caught:
        dict(read(plain, base))
    assert caught.value.remedy


def test_two_layers_of_one_parameter_are_refused(open_clip: Base, tmp_path: Path) -> None:
    folder = saved(open_clip, lora([], target_parameters=["visual.proj"]), tmp_path)
    tensors = tensors_of(folder)
    wrapped = {name.replace("visual.", "visual.base_layer."): tensor for name, tensor in tensors.items()}
    with pytest.raises(UnsupportedAdapterError, match="parameters of 'visual'"):
        read(rewritten(folder, tensors | wrapped), open_clip)


@pytest.mark.parametrize("kind", ["LOHA", "C3A"])
def test_wrong_tensors_of_another_kind_are_errors(kind: str, base: Base, tmp_path: Path) -> None:
    fields = {"LOHA": {"r": 4}, "C3A": {"block_size": 8}}[kind]
    folder = saved(base, other(kind, target_modules=QV, **fields), tmp_path)
    tensors = tensors_of(folder)
    first = next(iter(tensors))
    surplus = {f"{PREFIX}nowhere.weight": torch.ones(2)}
    for wrong in ({first: torch.full_like(tensors[first], float("nan"))}, {first: torch.ones(3)}, surplus):
        with pytest.raises(BicoError, match=f"{folder.name}"):
            read(rewritten(folder, tensors | wrong), base)
    del tensors[first]
    with pytest.raises(AdapterError, match=re.escape(first)):
        read(rewritten(folder, tensors), base)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 3}, "has rank 2, and its configuration says 3"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank 2, and its configuration says 4"),
        ({"r": "2"}, "a rank is '2'"),
        ({"r": 0}, "a rank is 0"),
        ({"r": None}, "a rank is None"),
        ({"lora_alpha": "x"}, "an alpha is 'x'"),
        ({"lora_alpha": float("nan")}, "an alpha is nan"),
        ({"rank_pattern": [1]}, "not that of a LoRA"),
        ({"rank_pattern": {"(": 2}}, "a pattern .* is broken"),
        ({"rank_pattern": {"a{99999999999}": 2}}, "a pattern .* is broken"),
        ({"rank_pattern": {"(" * 5000: 2}}, "a pattern .* is broken"),
        ({"alpha_pattern": {"*": 2}}, "a pattern .* is broken"),
        ({"target_parameters": 3}, "not that of a LoRA"),
        ({"peft_type": None}, "has no peft_type"),
        ({"peft_type": ["LORA"]}, "type"),
    ],
)
def test_a_wrong_configuration_is_named(fields: dict[str, Any], words: str, plain: Path, base: Base) -> None:
    with pytest.raises(AdapterError, match=words) as caught:
        read(rewritten(plain, **fields), base)
    assert caught.value.remedy


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"3", b'"LORA"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_configuration_that_is_no_object_is_an_error(content: bytes, plain: Path, base: Base) -> None:
    (plain / CONFIG).write_bytes(content)
    with pytest.raises(AdapterError, match=rf"{CONFIG} of 'plain'"):
        read(plain, base)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 64])
def test_broken_weights_are_an_error(content: bytes, plain: Path, base: Base) -> None:
    (plain / WEIGHTS).write_bytes(content)
    with pytest.raises(BicoError, match=WEIGHTS):
        read(plain, base)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SCALES = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias", "target_parameters"}
"""The fields by which the same tensors mean something else."""


@pytest.fixture(scope="module")
def fuzzed(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(base, lora(QV, bias="all"), tmp_path_factory.mktemp("fuzzed"))


@pytest.fixture(scope="module")
def fuzzed_other(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(base, other("LOHA", target_modules=["q_proj"], r=2), tmp_path_factory.mktemp("fuzzed"))


def with_field(folder: Path, field: str, value: Any, base: Base) -> dict[str, Tensor] | None:
    """What is read with another value in the configuration, for a while; None if that is an error of this package."""
    text = (folder / CONFIG).read_text()
    try:
        return dict(read(rewritten(folder, **{field: value}), base))
    except BicoError:
        return None
    finally:
        (folder / CONFIG).write_text(text)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(field=st.sampled_from(sorted(lora(QV).to_dict())), value=JSON)
def test_whatever_a_field_holds_it_is_an_error_or_the_same_vector(
    field: str, value: Any, base: Base, fuzzed: Path
) -> None:
    found, before = with_field(fuzzed, field, value, base), dict(read(fuzzed, base))
    if found is not None:
        assert list(found) == list(before)
        assert field in SCALES or same(found, before)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(field=st.sampled_from(sorted(other("LOHA", target_modules=QV).to_dict())), value=JSON)
def test_whatever_a_field_of_another_kind_holds_errors_are_of_this_package(
    field: str, value: Any, base: Base, fuzzed_other: Path
) -> None:
    with_field(fuzzed_other, field, value, base)


# --- low rank


@pytest.fixture
def never_dense(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(_: Factors) -> Tensor:
        raise AssertionError("a product was multiplied out")

    return lambda: monkeypatch.setattr(Factors, "dense", refuse)


@pytest.fixture
def two(base: Base, tmp_path: Path) -> tuple[TaskVector, TaskVector]:
    first = saved(base, lora(QV, modules_to_save=["visual_projection"]), tmp_path / "first")
    second = saved(base, lora(["q_proj", "token_embedding"], r=3), tmp_path / "second", seed=2)
    return read(first, base), read(second, base)


ARITHMETIC: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "a mixture": (lambda a, b: 0.5 * a + b - a, 2 + 3 + 2),
    "a sum": (lambda a, b: sum([a, b]), 2 + 3),
    "a negation": (lambda a, b: -a, 2),
    "a quotient": (lambda a, b: a / 4, 2),
    "a product": (lambda a, b: a * -3.0, 2),
}


@pytest.mark.parametrize("case", ARITHMETIC)
def test_arithmetic_keeps_factors_and_equals_the_dense_one(
    case: str, two: tuple[TaskVector, TaskVector], base: Base, never_dense: Callable[[], None]
) -> None:
    compute, rank = ARITHMETIC[case]
    dense = [TaskVector(dict(vector)) for vector in two]
    expected = compute(*dense)
    result = compute(*two)
    expected_model, model = expected.apply_to(base.model()), base.model()
    energies = {name: expected.energy(name) for name in expected}
    expected = dict(expected)
    never_dense()
    found = dict(result.changes())
    assert {name: result.energy(name) for name in result} == pytest.approx(energies, rel=1e-5)
    result.apply_to(model)
    with result.applied_to(base.model()):
        pass
    assert list(found) == list(expected)
    change = found[f"{Q0}.weight"]
    assert isinstance(change, Factors)
    assert change.rank == rank
    for name, part in found.items():
        product = part.left @ part.right if isinstance(part, Factors) else part
        torch.testing.assert_close(product, expected[name], rtol=1e-5, atol=1e-6)
    for (name, one), other_one in zip(model.named_parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(one, other_one, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("fields", "rank"),
    [({}, 2), ({"r": 5}, 5), ({"rank_pattern": {"q_proj": 3}}, 3), ({"target_parameters": ["q_proj.weight"]}, 2)],
)
def test_a_change_is_factors_of_the_adapter_s_rank(
    fields: dict[str, Any], rank: int, base: Base, tmp_path: Path
) -> None:
    targets = [] if "target_parameters" in fields else QV
    vector = read(saved(base, lora(targets, **fields), tmp_path), base)
    change = vector.change(f"{Q0}.weight")
    assert isinstance(change, Factors)
    assert (change.rank, change.shape) == (rank, (16, 16))


def test_reading_and_saving_never_multiply_out(
    two: tuple[TaskVector, TaskVector], tmp_path: Path, never_dense: Callable[[], None]
) -> None:
    never_dense()
    for index, vector in enumerate((*two, 0.5 * two[0] - two[1])):
        loaded = TaskVector.load(vector.save(tmp_path / str(index)))
        assert list(loaded) != []
        assert set(loaded) == set(vector)
        for name, change in vector.changes():
            again = loaded.change(name)
            if isinstance(change, Factors):
                assert isinstance(again, Factors)
                assert torch.equal(again.left, change.left)
                assert torch.equal(again.right, change.right)
            else:
                assert isinstance(again, Tensor)
                assert torch.equal(again, change)


def test_what_is_known_of_a_vector_is_kept(two: tuple[TaskVector, TaskVector], base: Base, tmp_path: Path) -> None:
    one, _ = two
    assert (one.about["source"], one.about["base"], one.about["library"]) == ("first", "base", "transformers")
    assert one.made_from == [LOCAL]
    loaded = TaskVector.load(one.save(tmp_path / "saved"))
    kept = {"source", "base", "library"}
    assert {key: loaded.about[key] for key in kept} == {key: one.about[key] for key in kept}
    assert loaded.made_from == one.made_from
    assert loaded.about["base_sha256"] == one.base_model().sha256
    total = one + two[1]
    assert "source" not in total.about
    assert total.about["base"] == "base"
    assert total.made_from == one.made_from
