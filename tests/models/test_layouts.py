"""One and the same CLIP in either library's layout, by any spelling of names, gives the same port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_bico
from hf_bico.models.families import all_families
from hf_bico.models.model import Model
from support.paper import PAPER
from support.toys import CLASS_NAMES, WRITERS, Toy, random_rows, random_state, weights_of

pytestmark = pytest.mark.quick

SOURCE, TARGET = Toy(width=16), Toy(width=24, heads=3, blocks=3, grid=5)
ROWS = random_rows(48, 20)


def fine_tuned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def port(source: Path, base: Path, target: Path, **options: Any) -> hf_bico.Ported:
    options |= {"n": 48, "class_names": CLASS_NAMES, "evaluate": False, **PAPER}
    return hf_bico.port(source, to=target, base=base, data=ROWS, **options)


def write_pair(folder: Path, library: str) -> tuple[Path, Path]:
    state = random_state(SOURCE, 0)
    write = WRITERS[library]
    return write(folder / f"{library}-tuned", SOURCE, fine_tuned(state)), write(
        folder / f"{library}-base", SOURCE, state
    )


def written(ported: hf_bico.Ported, folder: Path) -> dict[str, torch.Tensor]:
    return weights_of(ported.save(folder), random_state(TARGET, 1))


def test_four_library_pairs_give_the_same_weights(tmp_path: Path) -> None:
    results = {}
    for theirs in WRITERS:
        target = WRITERS[theirs](tmp_path / f"{theirs}-target", TARGET, random_state(TARGET, 1))
        for ours in WRITERS:
            source, base = write_pair(tmp_path / f"{ours}-{theirs}", ours)
            results[ours, theirs] = written(port(source, base, target), tmp_path / f"out-{ours}-{theirs}")
    start = random_state(TARGET, 1)
    expected = results["open_clip", "open_clip"]
    for pair, weights in results.items():
        for name, tensor in weights.items():
            change = (expected[name] - start[name]).norm()
            error = (tensor - expected[name]).norm()
            assert error <= 1e-5 * max(change, tensor.norm()), f"{pair}: {name} off by {error:.1e}"
    assert sum(not torch.equal(expected[name], start[name]) for name in start) >= 6 * TARGET.blocks


@pytest.mark.parametrize("spelling", ["vision_model.", "", "model.vision_model."])
def test_vision_tower_alone_over_a_whole_base(spelling: str, tmp_path: Path) -> None:
    """Fine-tunes often hold the vision tower only, with or without the prefix of the whole model."""
    source, base = write_pair(tmp_path, "transformers")
    target = WRITERS["open_clip"](tmp_path / "target", TARGET, random_state(TARGET, 1))
    whole = port(source, base, target, tower="vision")

    state = load_file(source / "model.safetensors")
    tower = {
        spelling + name.removeprefix("vision_model."): tensor
        for name, tensor in state.items()
        if name.startswith("vision_model.")
    }
    save_file(tower, source / "model.safetensors", metadata={"format": "pt"})
    alone = port(source, base, target)
    assert alone.task_vector.keys() == whole.task_vector.keys() - {"visual.proj"}
    for name in alone.task_vector:
        assert torch.equal(alone.task_vector[name], whole.task_vector[name])
    missing = hf_bico.plan(source, to=target, base=base).missing
    assert "visual_projection.weight" in missing


@pytest.mark.parametrize("kind", ["CLIPVisionModel", "CLIPVisionModelWithProjection"])
def test_vision_classes_load_and_show_their_sites(kind: str, tmp_path: Path) -> None:
    import transformers

    whole = WRITERS["transformers"](tmp_path / "whole", SOURCE, random_state(SOURCE, 0))
    getattr(transformers, kind).from_pretrained(whole).save_pretrained(tmp_path / kind)
    model = Model.open(tmp_path / kind, "a tower")
    expected = [site.name for site in Model.open(whole, "the whole").layout.main_sites]
    if kind == "CLIPVisionModel":
        expected.remove("proj")
    assert [site.name for site in model.layout.sites] == expected
    live = model.load(torch.device("cpu"), torch.float32)
    with live.observed(model.layout.sites) as trace:
        live.image_features(torch.randn(2, 3, 16, 16))
    assert list(trace.outputs) == expected


def test_others_are_named_by_their_reason() -> None:
    state = random_state(SOURCE, 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    layout = next(family for family in all_families() if family.recognises(shapes)).layout(shapes, {})
    assert layout.others["visual.ln_pre.weight"] == "LayerNorm"
    assert layout.others["visual.transformer.resblocks.0.ln_1.bias"] == "LayerNorm"
    assert layout.others["visual.class_embedding"] == "class token"
    assert layout.others["visual.positional_embedding"] == "positions"
    assert layout.others["visual.conv1.weight"] == "patch stem"
    assert layout.others["token_embedding.weight"] == "text tower"
    assert layout.others["transformer.resblocks.0.ln_1.weight"] == "text tower"
    covered = {slot.tensor for slot in layout.slots()} | set(layout.others)
    assert covered == set(shapes)


def test_both_layouts_in_one_folder_follow_the_source(tmp_path: Path) -> None:
    folder = WRITERS["transformers"](tmp_path / "both", TARGET, random_state(TARGET, 1))
    other = WRITERS["open_clip"](tmp_path / "other", TARGET, random_state(TARGET, 1))
    for name in ("open_clip_config.json", "open_clip_model.safetensors"):
        (folder / name).write_bytes((other / name).read_bytes())
    for library in WRITERS:
        source, base = write_pair(tmp_path / library, library)
        assert hf_bico.plan(source, to=folder, base=base).lineage.target.family.library == library
