"""TaskVector: differences, arithmetic, applying, and the delta format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_bico.errors import BaseMismatchError, NonFiniteWeightsError, RecordError
from hf_bico.models.checkpoints import FileCheckpoint, MemoryCheckpoint
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
    with pytest.raises(BaseMismatchError, match="could be of several parts"):
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
