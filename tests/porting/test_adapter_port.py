"""LoRA in, LoRA out: a port of an adapter is that of its product, factor by factor, and is written as an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import EmptyTaskVectorError, UsageError
from hf_bico.hub.client import locate
from hf_bico.models.adapters.adapter import Adapter
from hf_bico.models.low_rank import Factors
from hf_bico.models.model import Model
from hf_bico.reports.record import read_record
from support.adapter_ports import CPU, forbid_dense, port, ported_as_dense, write_lora
from support.scenes import Scene, make_scene
from support.toys import random_rows

PAIRS = [(source, target) for source in ("transformers", "open_clip") for target in ("transformers", "open_clip")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_port_of_a_lora_is_the_port_of_its_product(
    source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(tmp_path / "scene", (source, target))
    lora = write_lora(scene, source, tmp_path / "lora")
    low_rank = port(scene, lora, evaluate=False).task_vector
    dense = ported_as_dense(monkeypatch, scene, lora, evaluate=False, format="delta").task_vector
    assert set(low_rank) == set(dense)
    assert not any(isinstance(dense.change(name), Factors) for name in dense)
    worst = max(float((low_rank[name] - dense[name]).norm() / dense[name].norm()) for name in dense)
    print(f"\n{source} to {target}: worst relative difference {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_no_dense_change_is_formed_on_the_way(
    source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(tmp_path / "scene", (source, target))
    lora = write_lora(scene, source, tmp_path / "lora")
    forbid_dense(monkeypatch)
    ported = port(scene, lora)
    ported.save(tmp_path / "out")
    assert [entry.model for entry in ported.record.evaluation] == ["target", "ported", "source"]
    assert all(isinstance(ported.task_vector.change(name), Factors) for name in ported.task_vector)


def test_the_test_above_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(tmp_path / "scene")
    lora = write_lora(scene, "open_clip", tmp_path / "lora")
    forbid_dense(monkeypatch)
    with pytest.raises(AssertionError, match="a dense change of shape"):
        port(scene, lora, evaluate=False, format="full")


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_rank_is_unchanged(source: str, target: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", (source, target))
    # where three LoRAs of q, k and v meet in one packed tensor, their ranks add up
    only = {"target_modules": r"vision_model\..*\.(fc1|fc2)"} if (source, target) == PAIRS[1] else {}
    ported = port(scene, write_lora(scene, source, tmp_path / "lora", rank=3, **only), evaluate=False)
    changes = [ported.task_vector.change(name) for name in ported.task_vector]
    assert {change.rank for change in changes if isinstance(change, Factors)} == {3}
    out = ported.save(tmp_path / "out")
    factors = [tensor for name, tensor in load_file(out / "adapter_model.safetensors").items() if ".lora_A." in name]
    assert {tensor.shape[0] for tensor in factors} == {3}
    output = read_record(out).output
    assert output is not None
    assert (output.format, output.rank, output.energy_kept) == ("adapter", None, 1.0)
    assert all(site.kept == 1.0 for site in read_record(out).sites)


def test_port_of_a_generic_lora_is_the_port_of_its_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ViTs of one transformers class, with a loss of the caller's own."""
    from transformers import ViTConfig, ViTForImageClassification

    def vit(width: int, seed: int) -> Path:
        torch.manual_seed(seed)
        shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = ViTForImageClassification(ViTConfig(**shape, image_size=16, patch_size=4, num_labels=4))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / f"vit-{width}")
        return tmp_path / f"vit-{width}"

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(pixel_values=batch.pixels).logits, batch.labels, reduction="sum")

    base, target = vit(16, 0), vit(24, 1)
    adapted = peft.get_peft_model(
        ViTForImageClassification.from_pretrained(base), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "lora")
    scene = Scene(tmp_path, tmp_path / "lora", base, target, random_rows(40, 16))  # type: ignore[arg-type]
    options: dict[str, Any] = {"objective": loss, "class_names": ["a", "b", "c", "d"], "evaluate": False}
    dense = ported_as_dense(monkeypatch, scene, tmp_path / "lora", format="delta", **options).task_vector
    forbid_dense(monkeypatch)
    ported = port(scene, tmp_path / "lora", **options)
    out = ported.save(tmp_path / "out")
    monkeypatch.undo()
    assert set(ported.task_vector) == set(dense)
    assert len(dense) >= 12
    for name in dense:
        change = ported.task_vector.change(name)
        assert isinstance(change, Factors)
        assert change.rank == 2
        assert float((change.dense() - dense[name]).norm() / dense[name].norm()) < 1e-5
    # what peft reads from it is what our own model computes
    plain = ViTForImageClassification.from_pretrained(target)
    pixels = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        ours = ported.model().eval()(pixel_values=pixels).logits
        theirs = peft.PeftModel.from_pretrained(plain, out).eval()(pixel_values=pixels).logits
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("target", ["transformers", "open_clip"])
def test_the_written_adapter_gives_what_the_full_model_gives(target: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", target))
    lora = write_lora(scene, "transformers", tmp_path / "lora")
    ported = port(scene, lora)
    adapter, full = ported.save(tmp_path / "adapter"), ported.save(tmp_path / "full", format="full")
    plain = Model.open(scene.target, "the target", target).load(CPU, torch.float32)
    whole = Model.open(full, "the port", target).load(CPU, torch.float32)
    pixels = torch.randn(4, 3, *whole.layout.image_size)
    with torch.no_grad():
        expected = whole.image_features(pixels)
        adapted = peft.PeftModel.from_pretrained(plain.module, adapter).eval()
        unmerged = type(plain)(adapted.base_model.model, plain.layout).image_features(pixels)
        merged = type(plain)(adapted.merge_and_unload(), plain.layout).image_features(pixels)
    assert torch.allclose(unmerged, expected, atol=1e-5)
    assert torch.allclose(merged, expected, atol=1e-5)
    measured = hf_bico.evaluate_model(adapter, scene.data, base=scene.target, split="test")
    assert measured.value == ported.record.value("ported")


def test_full_fine_tune_as_an_adapter_of_a_rank_is_measured_as_that(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    ported = port(scene, scene.tuned, rank=2)
    out = ported.save(tmp_path / "out")
    record = read_record(out)
    assert record.output is not None
    assert record.output.energy_kept is not None
    assert (record.output.format, record.output.rank) == ("adapter", 2)
    assert 0.1 < record.output.energy_kept < 0.9
    held = {site.role: (site.rank, site.kept) for site in record.sites}
    assert held["attn.q"][0] == 2
    assert held["attn.q"][1] is not None
    assert held["attn.q"][1] < 0.9
    assert held["proj"] == (None, 1.0), "a layer without a bias among layers with biases is saved whole"
    assert "rank" in ported.report.table()
    assert "kept" in ported.report.table()
    measured = hf_bico.evaluate_model(out, scene.data, base=scene.target, split="test")
    assert measured.value == record.value("ported")
    read = hf_bico.TaskVector.from_adapter(out, base=scene.target)
    lost = sum(float((ported.task_vector[name] - read[name]).square().sum()) for name in ported.task_vector)
    total = sum(ported.task_vector.energy(name) for name in ported.task_vector)
    assert record.output.energy_kept == pytest.approx(1 - lost / total, abs=1e-6)
    assert "--format adapter --rank 2" in str(record.command)


def test_saving_in_another_form_than_was_measured_says_so(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    ported = port(scene, scene.tuned)
    out = ported.save(tmp_path / "out", rank=0.5)
    record = read_record(out)
    assert record.output is not None
    assert record.output.energy_kept is not None
    assert record.output.energy_kept >= 0.5
    assert any("measured before" in notice for notice in record.notices)
    with pytest.raises(UsageError, match="a rank was given for the format 'full'"):
        ported.save(tmp_path / "other", format="full", rank=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("library", ["transformers", "open_clip"])
def test_rounding_of_a_full_port_is_measured_and_an_adapter_loses_nothing(
    library: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    scene = make_scene(tmp_path / "scene", (library, library), dtype)
    ported = port(scene, scene.tuned, alpha=0.02, evaluate=False)
    out = ported.save(tmp_path / "full")
    record, name = read_record(out), {"transformers": "model", "open_clip": "open_clip_model"}[library]
    before, after = (load_file(folder / f"{name}.safetensors") for folder in (scene.target, out))
    exact = {key: ported.task_vector[key] for key in ported.task_vector}
    lost = sum(float((after[key].float() - before[key].float() - exact[key]).square().sum()) for key in exact)
    total = sum(float(delta.square().sum()) for delta in exact.values())
    assert record.output is not None
    assert record.output.rounding_lost is not None
    assert record.output.rounding_lost == pytest.approx(lost / total, rel=1e-3)
    told = any("--format adapter is written without loss" in notice for notice in record.notices)
    assert told == (record.output.rounding_lost > 0.05)
    assert told or dtype is torch.float16, "bfloat16 loses half of so small a change"
    adapter = ported.save(tmp_path / "adapter", format="adapter")
    read = hf_bico.TaskVector.from_adapter(adapter, base=scene.target)
    assert max(float((read[key] - exact[key]).norm() / exact[key].norm()) for key in exact) < 1e-4


def test_rank_typed_without_a_format_means_an_adapter(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    words = ["--rank", "4", "-o", str(tmp_path / "out"), "--no-eval"]
    result = CliRunner().invoke(main, [*scene.port_by_paper, *words])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert "of the carried change's energy" in result.stdout


def test_plan_of_an_adapter_says_which_sites_and_ranks(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    only = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["visual_projection"]}
    lora = write_lora(scene, "transformers", tmp_path / "lora", **only)
    arguments = ["plan", str(lora), "--base", str(scene.base), "--to", str(scene.target)]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.output
    assert "source      lora (LORA adapter)" in shown.stdout
    assert "carried     5 sites: attn.q x2, attn.v x2, proj x1" in shown.stdout
    assert "text        2 sites: attn.q x1, attn.v x1" in shown.stdout, (
        "q_proj and v_proj are names of the text tower too"
    )
    assert "not carried nothing" in shown.stdout
    assert "as an adapter of rank 3" in shown.stdout
    planned = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert (planned["source"]["kind"], planned["format"], planned["ranks"]) == ("adapter", "adapter", [3])


def test_planned_size_of_an_adapter_is_about_what_is_written(tmp_path: Path) -> None:
    for library in ("transformers", "open_clip"):
        scene = make_scene(tmp_path / library, ("transformers", library))
        lora = write_lora(scene, "transformers", tmp_path / library / "lora")
        planned = hf_bico.plan(lora, scene.target, base=scene.base)
        out = port(scene, lora, evaluate=False).save(tmp_path / library / "out")
        written = sum(tensor.nbytes for tensor in load_file(out / "adapter_model.safetensors").values())
        assert 0.8 < planned.output_bytes / written < 1.25, library


def test_adapter_of_the_text_tower_alone_has_nothing_for_the_vision_tower(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    lora = write_lora(scene, "transformers", tmp_path / "lora", target_modules=r"text_model\..*\.q_proj")
    planned = hf_bico.plan(lora, scene.target, base=scene.base)
    assert [pair.target.name for pair in planned.pairs] == ["text.blocks.0.attn.q"]
    with pytest.raises(EmptyTaskVectorError, match=r"changes nothing that can be carried \(text tower\)"):
        planned.of_towers([""])


def test_loaded_peft_model_is_a_source_too(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    lora = write_lora(scene, "transformers", tmp_path / "lora")
    model = Model.open(scene.base, "the base").load(CPU, torch.float32).module
    loaded = peft.PeftModel.from_pretrained(model, lora)
    one, two = (port(scene, source, evaluate=False).task_vector for source in (loaded, lora))  # type: ignore[arg-type]
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in two)
    direct = hf_bico.TaskVector.from_adapter(loaded, base=scene.base)
    assert all(torch.equal(direct[name], hf_bico.TaskVector.from_adapter(lora, scene.base)[name]) for name in direct)


def test_delta_format_of_a_lora_keeps_its_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    lora = write_lora(scene, "transformers", tmp_path / "lora")
    forbid_dense(monkeypatch)
    ported = port(scene, lora, evaluate=False, format="delta")
    out = ported.save(tmp_path / "out")
    read = hf_bico.TaskVector.load(out)
    for name in ported.task_vector:
        one, two = ported.task_vector.change(name), read.change(name)
        assert isinstance(one, Factors)
        assert isinstance(two, Factors)
        assert torch.equal(one.left, two.left)
        assert torch.equal(one.right, two.right)


def test_lora_of_the_projection_goes_into_the_transposed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "open_clip"))
    only = {"target_modules": ["visual_projection"]}
    lora = write_lora(scene, "transformers", tmp_path / "lora", **only)
    ported = port(scene, lora, evaluate=False)
    dense = ported_as_dense(monkeypatch, scene, lora, evaluate=False, format="delta").task_vector
    assert list(ported.task_vector) == ["visual.proj"]
    assert isinstance(ported.task_vector.change("visual.proj"), Factors)
    assert torch.allclose(ported.task_vector["visual.proj"], dense["visual.proj"], atol=1e-6)


def test_energy_kept_of_q_k_and_v_is_that_of_their_own_rows(tmp_path: Path) -> None:
    """Three LoRAs of different size meet in one packed tensor, and the small one loses most."""
    scene = make_scene(tmp_path / "scene", ("transformers", "open_clip"))
    only = {"target_modules": r"vision_model\..*\.(q_proj|v_proj)"}
    lora = write_lora(scene, "transformers", tmp_path / "lora", **only)
    weights = load_file(lora / "adapter_model.safetensors")
    smaller = {name: 0.2 * tensor if "v_proj" in name else tensor for name, tensor in weights.items()}
    save_file(smaller, lora / "adapter_model.safetensors", metadata={"format": "pt"})
    ported = port(scene, lora, evaluate=False, rank=2)
    kept = {site.name: site.kept for site in ported.report.sites}
    assert ported.form.fitted is not None
    for block in (0, 1):
        name = f"visual.transformer.resblocks.{block}.attn.in_proj_weight"
        asked, held = ported.task_vector[name], ported.form.fitted.changes[name]
        for role, part in (("q", slice(0, 24)), ("v", slice(48, 72))):
            lost = float((asked[part] - held[part]).square().sum() / asked[part].square().sum())
            assert kept[f"blocks.{block}.attn.{role}"] == pytest.approx(1 - lost, abs=1e-5)
        assert kept[f"blocks.{block}.attn.v"] < kept[f"blocks.{block}.attn.q"]  # type: ignore[operator]


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
def test_what_an_adapter_loses_over_a_half_precision_model_is_said(library: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", (library, library), torch.bfloat16)
    ported = port(scene, scene.tuned, alpha=0.02, evaluate=False)
    record = read_record(ported.save(tmp_path / "out", format="adapter"))
    plain = Model.open(scene.target, "the target", library).load(CPU, torch.bfloat16).module
    before = {name: tensor.float() for name, tensor in plain.state_dict().items()}
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
    routes = ported._in_format("adapter", None).fitted.routes  # type: ignore[union-attr]
    state = {name.replace("modules_to_save.default.", ""): tensor for name, tensor in loaded.state_dict().items()}
    lost = 0.0
    for name in routes.exact:
        found = state[f"base_model.model.{name}"].float() - before[name]
        lost += float((found - ported.task_vector[name]).square().sum())
    total = sum(ported.task_vector.energy(name) for name in ported.task_vector)
    assert record.output is not None
    assert record.output.rounding_lost == pytest.approx(lost / total, rel=1e-3)
    told = any("Over a model in half precision" in notice for notice in record.notices)
    assert told == (lost / total > 0.05)


def test_layer_whose_factors_cancel_is_no_change(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    lora = write_lora(scene, "transformers", tmp_path / "lora", rank=2)
    weights = load_file(lora / "adapter_model.safetensors")
    a = next(name for name in weights if name.endswith("layers.0.mlp.fc1.lora_A.weight"))
    weights[a] = torch.tensor([[1.0] * 16, [0.0] * 16])
    b = a.replace("lora_A", "lora_B")
    weights[b] = torch.stack([torch.zeros(32), torch.ones(32)], 1)
    save_file(weights, lora / "adapter_model.safetensors", metadata={"format": "pt"})
    ported = port(scene, lora, evaluate=False)
    assert len(ported.report.sites) == 11


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rank", "4"], "kB as an adapter of rank 4"),
        (["--rank", "0.9"], "as an adapter that keeps 0.9 of each layer's energy"),
        (["--format", "delta"], "kB as the change alone"),
        (["--format", "adapter"], "kB as an adapter, exact"),
        ([], "kB as a full model"),
    ],
    ids=str,
)
def test_plan_says_the_form_that_was_asked_for(options: list[str], said: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    arguments = [*scene.arguments[:-2], *options]
    for command in (["plan", *arguments], ["port", *arguments, "--dry-run"]):
        shown = CliRunner().invoke(main, command)
        assert shown.exit_code == 0, shown.output
        assert said in shown.stdout
    if options == ["--rank", "4"]:
        planned = hf_bico.plan(scene.tuned, scene.target, base=scene.base).in_format(None, 4)
        out = port(scene, scene.tuned, evaluate=False, rank=4).save(tmp_path / "out")
        written = sum(tensor.nbytes for tensor in load_file(out / "adapter_model.safetensors").values())
        assert planned.output_bytes is not None
        assert 0.7 < planned.output_bytes / written < 1.4


def test_open_clip_lora_finds_its_layout_in_a_folder_with_two(tmp_path: Path) -> None:
    both = make_scene(tmp_path / "open_clip")
    other = make_scene(tmp_path / "transformers", ("transformers", "transformers"))
    lora = write_lora(both, "open_clip", tmp_path / "lora")
    for file in other.base.iterdir():
        (both.base / file.name).write_bytes(file.read_bytes())
    assert Adapter.open(locate(lora, "the adapter")).library == "open_clip"
    assert all(name.startswith("visual.") for name in hf_bico.TaskVector.from_adapter(lora, base=both.base))
