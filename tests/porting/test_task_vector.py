"""TaskVector: differences, arithmetic, applying, and the delta format."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_bico.errors import BaseMismatchError, NonFiniteWeightsError, OutputExistsError, RecordError, UsageError
from hf_bico.models.checkpoints import FileCheckpoint, MemoryCheckpoint
from hf_bico.models.low_rank import Factors
from hf_bico.porting.task_vector import TaskVector

pytestmark = pytest.mark.quick

State = dict[str, torch.Tensor]


def write(folder: Path, state: State, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / file)
    return folder


@pytest.fixture
def base() -> State:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 3, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}


@pytest.fixture
def tuned(base: State) -> State:
    return {"a.weight": base["a.weight"] + 1, "b.weight": base["b.weight"].clone(), "c.weight": base["c.weight"] * 2}


def test_difference_of_two_folders(base: State, tuned: State, tmp_path: Path) -> None:
    vector = TaskVector.from_models(write(tmp_path / "tuned", tuned), base=write(tmp_path / "base", base))
    assert list(vector) == ["a.weight", "c.weight"], "a tensor that is equal in both does not appear"
    assert torch.equal(vector["c.weight"], tuned["c.weight"] - base["c.weight"])
    assert vector.energy("a.weight") == pytest.approx(12.0, rel=1e-5)


def test_folders_are_read_lazily(base: State, tuned: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = TaskVector.from_models(write(tmp_path / "tuned", tuned), base=write(tmp_path / "base", base))
    read: list[str] = []
    plain = FileCheckpoint.tensor
    monkeypatch.setattr(FileCheckpoint, "tensor", lambda self, name: (read.append(name), plain(self, name))[1])
    combined = 0.5 * vector - vector
    assert read == []
    _ = combined["c.weight"]
    assert set(read) == {"c.weight"}


def test_arithmetic(base: State, tuned: State) -> None:
    one = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    two = TaskVector({"a.weight": torch.full((4, 3), 2.0), "z.weight": torch.ones(2)})
    total = 0.5 * one + two
    assert set(total) == {"a.weight", "c.weight", "z.weight"}
    assert torch.allclose(total["a.weight"], 0.5 * one["a.weight"] + 2)
    assert torch.equal(total["z.weight"], torch.ones(2))
    assert torch.equal((-one)["c.weight"], -one["c.weight"])
    assert not (one - one)["a.weight"].any()
    assert torch.equal((one * 3)["a.weight"], (3 * one)["a.weight"])
    assert torch.equal((one / 2)["c.weight"], 0.5 * one["c.weight"])
    assert torch.equal(sum([one, one])["c.weight"], 2 * one["c.weight"])
    assert repr(total) == "TaskVector of 3 tensors"
    with pytest.raises(KeyError):
        _ = total["b.weight"]


def test_base_minus_and_plus_task_vector_is_the_fine_tuned_model(base: State, tuned: State) -> None:
    model = nn.ModuleDict({name[0]: nn.Linear(3, 4, bias=False) for name in base})
    model.load_state_dict(base)
    vector = TaskVector.from_models(MemoryCheckpoint(tuned), base=model)
    with vector.applied_to(model):
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter, tuned[name])
    assert all(torch.equal(parameter, base[name]) for name, parameter in model.named_parameters())
    assert vector.apply_to(model) is model
    assert torch.allclose(model["c"].weight, tuned["c.weight"])


def test_applying_to_another_model_is_refused(base: State, tuned: State) -> None:
    vector = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    with pytest.raises(BaseMismatchError, match="could belong to several parts"):
        vector.apply_to(nn.Linear(3, 4))
    with pytest.raises(BaseMismatchError, match="1 of 2 changes have no place"):
        vector.apply_to(nn.ModuleDict({"a": nn.Linear(3, 4)}))
    wide = nn.ModuleDict({name[0]: nn.Linear(5, 4, bias=False) for name in base})
    with pytest.raises(BaseMismatchError, match=r"\(4, 5\) in the model and \(4, 3\)"):
        vector.apply_to(wide)


def test_applying_changes_all_or_nothing(base: State, tuned: State) -> None:
    vector = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "c": nn.Linear(5, 4)})
    before = model["a"].weight.detach().clone()
    with pytest.raises(BaseMismatchError, match=r"'c\.weight' is \(4, 5\)"):
        vector.apply_to(model)
    assert torch.equal(model["a"].weight, before)


def test_delta_format_is_lossless(base: State, tuned: State, tmp_path: Path) -> None:
    vector = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    vector.save(tmp_path / "delta", base="somewhere")
    again = TaskVector.load(tmp_path / "delta")
    assert list(again) == list(vector)
    assert all(torch.equal(again[name], vector[name]) for name in vector)
    raw = load_file(tmp_path / "delta" / "task_vector.safetensors")
    assert torch.equal(raw["a.weight"], vector["a.weight"])


def test_files_that_are_no_task_vector_are_refused(base: State, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no task vector"):
        TaskVector.load(tmp_path)
    write(tmp_path, base, "task_vector.safetensors")
    with pytest.raises(RecordError, match="not a task vector"):
        TaskVector.load(tmp_path)


def test_missing_and_extra_tensors_are_reported(base: State, tuned: State) -> None:
    del tuned["c.weight"]
    tuned["head.weight"] = torch.ones(2, 2)
    vector = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    assert vector.overlap.missing == ("c.weight",)
    assert vector.overlap.extra == ("head.weight",)
    assert list(vector) == ["a.weight"]


def test_copy_kept_in_half_precision_is_no_change(base: State) -> None:
    tuned = {name: tensor.bfloat16() for name, tensor in base.items()}
    tuned["a.weight"] = (base["a.weight"] + 1).bfloat16()
    vector = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    assert list(vector) == ["a.weight"]
    assert vector["a.weight"].dtype == torch.float32


def test_rounding_of_a_narrower_copy_is_no_part_of_the_change(base: State) -> None:
    tuned = base["a.weight"].bfloat16()
    tuned[0, 0] += 0.5
    vector = TaskVector.from_models(MemoryCheckpoint({"a.weight": tuned}), base=MemoryCheckpoint(base))
    assert (vector["a.weight"] != 0).sum() == 1
    assert vector["a.weight"][0, 0] == pytest.approx(0.5, abs=0.02)


def test_small_change_over_a_half_precision_base_is_seen(base: State) -> None:
    start = {"a.weight": base["a.weight"].bfloat16()}
    tuned = {"a.weight": start["a.weight"].float() + 1e-5}
    vector = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(start))
    assert torch.allclose(vector["a.weight"], torch.full((4, 3), 1e-5), atol=1e-6)


def test_base_that_does_not_fit(base: State, tuned: State) -> None:
    tuned["a.weight"] = torch.ones(4, 5)
    with pytest.raises(BaseMismatchError, match=r"'a\.weight' is \(4, 5\) .* \(4, 3\)"):
        TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    with pytest.raises(BaseMismatchError, match="no tensor name in common"):
        TaskVector.from_models(MemoryCheckpoint({"q": torch.ones(1)}), base=MemoryCheckpoint(base))


@pytest.mark.parametrize("whose", ["base", "fine-tuned"])
def test_non_finite_weights_are_named(whose: str, base: State, tuned: State) -> None:
    (base if whose == "base" else tuned)["c.weight"][1, 1] = float("nan")
    with pytest.raises(NonFiniteWeightsError, match=rf"'c\.weight' of the {whose}"):
        TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_applying_keeps_the_models_dtype_and_rounds_once(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 4, bias=False).to(dtype)
    start = model.weight.detach().clone()
    delta = torch.randn(4, 3)
    TaskVector({"weight": delta}).apply_to(model)
    assert model.weight.dtype == dtype
    assert torch.equal(model.weight, (start.float() + delta).to(dtype))


@pytest.mark.parametrize(
    "header", ["[]", "null", "{", "{}", '{"format": "hf-bico task vector", "schema": 1, "made_from": 3}']
)
def test_a_file_with_another_header_is_no_task_vector(tmp_path: Path, header: str) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "task_vector.safetensors", metadata={"hf_bico": header})
    with pytest.raises(RecordError, match="is not a task vector"):
        TaskVector.load(tmp_path)


SMALL = TaskVector({"a.weight": torch.tensor([[1.0, 3.0]])})
NO_FACTORS: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": -float("inf"),
    "an integer beyond every float": 10**5000,
    "a complex number": 1j,
    "a bool": True,
    "a text": "2",
    "nothing": None,
    "a list": [1],
    "numpy's NaN": np.float32("nan"),
    "numpy's bool": np.bool_(True),
    "an array of one number": np.ones(1),
    "an array": np.ones(2),
    "a tensor of one number": torch.ones(1),
    "a tensor": torch.ones(1, 2),
    "a tensor of NaN": torch.tensor(float("nan")),
    "a tensor of bool": torch.tensor(True),
    "a tensor without values": torch.tensor(0.5, device="meta"),
    "a task vector": SMALL,
}


@pytest.mark.parametrize("name", NO_FACTORS)
def test_what_is_no_finite_number_scales_nothing(name: str) -> None:
    for scale in (lambda factor: factor * SMALL, lambda factor: SMALL * factor, lambda factor: SMALL / factor):
        with pytest.raises(UsageError, match="a task vector was scaled by") as caught:
            scale(NO_FACTORS[name])
        assert caught.value.remedy == "scale it by a finite number"


@pytest.mark.parametrize(
    "factor",
    [
        np.float64(0.5),
        np.float32(0.5),
        np.float16(0.5),
        np.array(0.5),
        torch.tensor(0.5),
        Fraction(1, 2),
        Decimal("0.5"),
    ],
    ids=lambda factor: type(factor).__name__,
)
def test_every_kind_of_number_scales(factor: Any) -> None:
    half = 0.5 * SMALL
    assert factor * SMALL == SMALL * factor == half
    assert SMALL / factor == 2 * SMALL
    assert np.int64(2) * SMALL == 2 * SMALL
    assert (factor * SMALL)["a.weight"].dtype == torch.float32


def test_factors_that_are_finite_apart_and_infinite_together() -> None:
    with pytest.raises(UsageError, match="scaled by inf"):
        1e300 * (1e300 * SMALL)
    with pytest.raises(UsageError, match="divided by 0"):
        SMALL / 0
    with pytest.raises(UsageError, match="scaled by inf"):
        SMALL / 5e-324


def test_learnt_coefficient_keeps_its_graph() -> None:
    alpha = torch.tensor(0.5, requires_grad=True)
    (alpha * SMALL + SMALL)["a.weight"].sum().backward()
    assert alpha.grad == 4.0


@pytest.mark.parametrize(
    "other", [1, 1.0, 0.0, False, None, "0", np.float64(0), torch.zeros(()), {}, [SMALL]], ids=repr
)
def test_a_sum_is_of_task_vectors(other: Any) -> None:
    for add in (lambda: SMALL + other, lambda: other + SMALL, lambda: SMALL - other, lambda: other - SMALL):
        with pytest.raises(UsageError, match="a task vector and .* cannot be added") as caught:
            add()
        assert caught.value.remedy == "add task vectors, and multiply them by numbers"
    assert sum([SMALL, SMALL]) == sum([SMALL], start=SMALL) == 2 * SMALL


def test_sum_over_other_shapes_is_refused_before_a_weight_is_read(
    base: State, tuned: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = TaskVector.from_models(write(tmp_path / "tuned", tuned), base=write(tmp_path / "base", base))
    wide = TaskVector({"c.weight": Factors(torch.ones(4, 1), torch.ones(1, 5))})
    stored = [TaskVector.load(one.save(tmp_path / name)) for name, one in (("one", vector), ("two", wide))]
    monkeypatch.setattr(FileCheckpoint, "tensor", lambda self, name: pytest.fail("a weight was read"))
    for one, other in ((vector, wide), (wide, vector), stored, (vector, stored[1]), (2 * stored[0], -wide)):
        with pytest.raises(BaseMismatchError, match=r"'c\.weight' is \(4, \d\) in one task vector and \(4, \d\)"):
            one + other
        with pytest.raises(BaseMismatchError, match="in one task vector"):
            one - other


def test_sum_over_other_bases_is_refused(base: State, tuned: State, tmp_path: Path) -> None:
    folders = {
        name: write(tmp_path / name, state) for name, state in {"base": base, "copy": base, "tuned": tuned}.items()
    }
    others = write(tmp_path / "other", {name: 2 * tensor for name, tensor in base.items()})
    one, same, far = (
        TaskVector.from_models(folders["tuned"], base=start) for start in (folders["base"], folders["copy"], others)
    )
    unknown = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    loaded = TaskVector.load(far.save(tmp_path / "far"))
    for other in (far, loaded, pickle.loads(pickle.dumps(far)), 0.5 * far + far):
        for add in (
            lambda other=other: one + other,
            lambda other=other: other - one,
            lambda other=other: sum([one, unknown, other]),
        ):
            with pytest.raises(BaseMismatchError, match="made for different weights, of '.*' and of '.*'") as caught:
                add()
            assert "hf_bico.apply([...], to=MODEL)" in caught.value.remedy
    assert one + same == 2 * one, "a copy of the base is the base"
    assert one + unknown == 2 * one, "nothing speaks against it"
    assert TaskVector(one) + TaskVector(far) == TaskVector(far) + TaskVector(one), "on purpose"


def test_vectors_of_other_tensors_over_one_base_have_a_sum(base: State, tuned: State, tmp_path: Path) -> None:
    start = write(tmp_path / "base", base)
    parts = [{**base, name: tuned[name]} for name in ("a.weight", "c.weight")]
    first, second = (TaskVector.from_models(write(tmp_path / str(n), part), base=start) for n, part in enumerate(parts))
    assert (list(first), list(second)) == (["a.weight"], ["c.weight"])
    whole = TaskVector.from_models(write(tmp_path / "tuned", tuned), base=start)
    assert first + second == whole
    assert (first + second).about["base_sha256"] == whole.about["base_sha256"]


def test_equal_by_value(base: State, tuned: State, tmp_path: Path) -> None:
    one = TaskVector.from_models(MemoryCheckpoint(tuned), base=MemoryCheckpoint(base))
    assert one == TaskVector.load(one.save(tmp_path / "one"))
    assert one == TaskVector({name: tensor.double() for name, tensor in one.items()})
    assert one != 2 * one
    assert one != TaskVector({"a.weight": one["a.weight"]})
    assert TaskVector({"w": torch.ones(2, 1)}) != TaskVector({"w": torch.ones(1, 2)})
    assert TaskVector({"w": torch.ones(2, 3)}) == TaskVector({"w": Factors(torch.ones(2, 1), torch.ones(1, 3))})
    assert one != dict(one)
    assert one in [SMALL, one]
    assert (bool(one), bool(TaskVector({})), len(one - one)) == (True, False, 2)
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_vectors_of_their_own(
    copied: Callable[[TaskVector], TaskVector], base: State, tuned: State, tmp_path: Path
) -> None:
    one = TaskVector.from_models(write(tmp_path / "tuned", tuned), base=write(tmp_path / "base", base))
    again = copied(0.5 * one)
    assert 2 * again == one
    again.about["base"] = "another"
    assert one.about["base"] == "base"
    assert again.about["base_sha256"] == one.about["base_sha256"]


def test_pickle_holds_no_token(base: State, tuned: State, tmp_path: Path) -> None:
    folders = write(tmp_path / "tuned", tuned), write(tmp_path / "base", base)
    assert b"hf_secret" not in pickle.dumps(TaskVector.from_models(*folders, token="hf_secret"))


def test_change_beyond_every_float_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteWeightsError, match=r"the change of 'a\.weight' holds NaN or infinite values"):
        (1e300 * SMALL).save(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_saving_never_writes_into_a_folder_of_others(
    base: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "model", base)
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    for place in (model, tmp_path / "link", tmp_path / "file", tmp_path, Path(), tmp_path / "here"):
        for overwrite in (False, True):
            with pytest.raises(OutputExistsError):
                SMALL.save(place, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert load_file(model / "model.safetensors").keys() == base.keys()


def test_saving_replaces_a_vector_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "vector").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "vector")
    SMALL.save(tmp_path / "link")
    with pytest.raises(OutputExistsError, match="exists"):
        (2 * SMALL).save(tmp_path / "vector")
    assert TaskVector.load(tmp_path / "vector") == SMALL
    for place in ("vector", "link"):
        loaded = TaskVector.load(tmp_path / "vector")
        (2 * loaded).save(tmp_path / place, overwrite=True)
        assert TaskVector.load(tmp_path / "vector") == 2 * loaded
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "vector"]
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "vector" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="was not written by hf-bico"):
        SMALL.save(tmp_path / "vector", overwrite=True)
