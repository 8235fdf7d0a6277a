"""Reading weights: single files, shards, names without torch, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

from hf_bico.errors import BaseMismatchError, BrokenWeightsError, PickledWeightsError, WeightsNotFoundError
from hf_bico.models.checkpoints import FileCheckpoint
from hf_bico.models.name_matching import align_names

pytestmark = pytest.mark.quick

STATE = {f"layer.{index}.weight": torch.randn(50, 50) for index in range(6)}


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    save_torch_state_dict(STATE, tmp_path, max_shard_size="25KB")
    checkpoint = FileCheckpoint.in_folder(tmp_path)
    assert len(checkpoint.files) > 1
    assert checkpoint.shapes == dict.fromkeys(STATE, (50, 50))
    for name, tensor in STATE.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_single_file_is_preferred_to_shards(tmp_path: Path) -> None:
    """As transformers has it: what is planned is what is loaded."""
    save_torch_state_dict(STATE, tmp_path, max_shard_size="25KB")
    save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(FileCheckpoint.in_folder(tmp_path).shapes) == ["other"]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_torch_state_dict(STATE, tmp_path, max_shard_size="25KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(BrokenWeightsError, match=gone.name):
        FileCheckpoint.in_folder(tmp_path)


def test_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file(STATE, tmp_path / "secret.safetensors")
    index = {"weight_map": dict.fromkeys(STATE, "../secret.safetensors")}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenWeightsError, match="not in 'inside'"):
        FileCheckpoint.in_folder(inside)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BrokenWeightsError, match=r"model\.safetensors"):
        FileCheckpoint.in_folder(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    with pytest.raises(PickledWeightsError, match=r"pytorch_model\.bin"):
        FileCheckpoint.in_folder(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFoundError, match="no weights"):
        FileCheckpoint.in_folder(tmp_path)


def test_names_line_up_when_either_side_has_a_prefix() -> None:
    whole = ["vision.a.w", "vision.b.w", "text.a.w"]
    assert align_names(["a.w", "b.w"], whole) == {"a.w": "vision.a.w", "b.w": "vision.b.w"}
    assert align_names(["m.vision.a.w", "m.vision.b.w"], whole) == {
        "m.vision.a.w": "vision.a.w",
        "m.vision.b.w": "vision.b.w",
    }
    assert align_names(whole, whole) == {name: name for name in whole}
    assert align_names(["x"], whole) == {}


def test_exact_names_win_and_ambiguous_ones_are_refused() -> None:
    whole = ["visual.blocks.0.w", "blocks.0.w", "text.blocks.0.v", "other.blocks.0.v"]
    assert align_names(["blocks.0.w"], whole) == {"blocks.0.w": "blocks.0.w"}
    with pytest.raises(BaseMismatchError, match="several parts"):
        align_names(["blocks.0.v"], whole)
