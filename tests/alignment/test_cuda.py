"""On a GPU: the transformers family ports, its maps are the CPU's, and the stage times are printed.

Needs torch, transformers, peft and safetensors only. Run it with `pytest -m cuda -s tests/alignment/test_cuda.py`.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_bico
from hf_bico.alignment.calibration_pass import Side, collect
from hf_bico.alignment.matching import blocks_by_index, pair_sites
from hf_bico.alignment.memory import MemoryPlan
from hf_bico.alignment.methods.aligned import Bico
from hf_bico.alignment.methods.base import MethodInputs
from hf_bico.alignment.statistics import Kind, Statistics
from hf_bico.models.families.base import DeviceSpread
from hf_bico.models.families.transformers_clip import TransformersClip
from hf_bico.models.hooks import Losses
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.plan import Plan
from hf_bico.settings import METHODS, Settings
from support.paper import PAPER

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CLASSES = 10
STRONG = 1e-5
"""Ten times the cut."""
PRETRAINED: Any = None
"""BiCo looks at statistics, and at no weights."""

SMALL = ({"width": 64, "grid": 4}, {"width": 96, "grid": 5, "blocks": 3})
PAIR = (("base", 16, 0), ("target", 24, 1))
"""Folder, width and seed of two language models."""
VIT_B = ({"width": 768, "grid": 14}, {"width": 896, "grid": 15})


def tower(width: int, grid: int, blocks: int = 2, seed: int = 0, patch: int = 16) -> nn.Module:
    """A `CLIPVisionModelWithProjection` with random weights, float32, on the CPU."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(seed)
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks,
        num_attention_heads=width // 32 if width < 768 else width // 64,
        image_size=grid * patch,
        patch_size=patch,
        projection_dim=512 if width >= 768 else 48,
    )
    model = CLIPVisionModelWithProjection(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embedding" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def fine_tuned(model: nn.Module) -> nn.Module:
    tuned = copy.deepcopy(model)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += 0.02 * parameter.std() * torch.randn(parameter.shape)
    return tuned


def rows(count: int, size: int) -> list[dict[str, Any]]:
    images = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))
    return [{"image": image, "label": index % CLASSES} for index, image in enumerate(images)]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy against fixed random class directions."""
    features = nn.functional.normalize(model(pixel_values=batch.pixels).image_embeds, dim=-1)
    classes = torch.randn(CLASSES, features.shape[-1], generator=torch.Generator().manual_seed(2))
    logits = 10 * features @ nn.functional.normalize(classes, dim=-1).to(features).T
    return nn.functional.cross_entropy(logits, batch.labels, reduction="sum")


def statistics_on(device: str, dtype: torch.dtype, models: list[nn.Module], count: int) -> tuple[Statistics, Bico]:
    """The statistics and maps of two models, computed on one device."""
    source, target = (TransformersClip().wrap(model.to(device, dtype)) for model in models)
    blocks = blocks_by_index(source.layout.blocks, target.layout.blocks)
    pairs = [pair for pair in pair_sites(source.layout, target.layout, blocks) if not pair.target.tower]
    samples = rows(count, max(source.layout.image_size))

    def batches() -> Any:
        for start in range(0, count, 16):
            chosen = samples[start : start + 16]

            def run(live: Any, chosen: Any = chosen) -> Losses:
                labels = torch.tensor([row["label"] for row in chosen], device=device)
                batch = type("Batch", (), {"pixels": live.pixels([row["image"] for row in chosen]), "labels": labels})
                return Losses(loss(live.module, batch))

            yield (lambda: run(source)), (lambda: run(target))

    sides = [Side(model, model.layout.tokens) for model in (source, target)]
    statistics = collect(pairs, *sides, batches(), Bico.kinds, torch.device(device))
    method = Bico(Settings())
    method.prepare(pairs, MethodInputs(PRETRAINED, PRETRAINED, statistics))
    return statistics, method


def worst_map_error(shapes: tuple[dict[str, int], ...], dtype: torch.dtype, count: int) -> float:
    """The largest relative difference between the GPU's and the CPU's maps, on strong directions."""
    models = [tower(**shape, seed=seed) for seed, shape in enumerate(shapes)]
    on_gpu, gpu = statistics_on("cuda", dtype, models, count)
    on_cpu, cpu = statistics_on("cpu", dtype, models, count)
    assert next(iter(on_gpu.sums[Kind.GRADIENTS].values())).total.is_cuda
    inputs = {key[1]: covariance for key, covariance in on_cpu.sums[Kind.INPUTS].items()}
    errors = []
    target = TransformersClip().wrap(models[1]).layout
    for site in target.sites:
        for side, covariance in enumerate((inputs[site.input], on_cpu.sums[Kind.GRADIENTS][site.name])):
            left, values, right = torch.linalg.svd(covariance.total, full_matrices=False)
            strong = values > STRONG * values[0]
            difference = gpu.maps[site.name][side].matrix.cpu() - cpu.maps[site.name][side].matrix
            errors.append(float((left[:, strong].T @ difference @ right[strong].T).norm() / strong.sum() ** 0.5))
    return max(errors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_small_maps_equal_the_cpus(dtype: torch.dtype, tolerance: float) -> None:
    error = worst_map_error(SMALL, dtype, count=96)
    print(f"\nsmall pair, {dtype}: worst map error {error:.1e} (tolerance {tolerance:.0e})")
    assert error < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_vit_b_maps_equal_the_cpus(dtype: torch.dtype, tolerance: float) -> None:
    """One block at full width: what the CPU can solve in a minute."""
    shapes = tuple({**shape, "blocks": 1} for shape in VIT_B)
    error = worst_map_error(shapes, dtype, count=32)
    print(f"\nViT-B/16 widths, {dtype}: worst map error {error:.1e} (tolerance {tolerance:.0e})")
    assert error < tolerance


@pytest.mark.parametrize(("shapes", "blocks"), [(SMALL, None), (VIT_B, 12)], ids=["small", "ViT-B/16"])
def test_whole_port_on_the_gpu(shapes: tuple[dict[str, int], ...], blocks: int | None) -> None:
    depth = {} if blocks is None else {"blocks": blocks}
    base, target = (tower(**{**shape, **depth}, seed=seed) for seed, shape in enumerate(shapes))
    tuned = fine_tuned(base)
    ported = hf_bico.port(
        tuned.cuda(),
        to=target.cuda(),
        base=base.cuda(),
        data=rows(100, shapes[0]["grid"] * 16),
        n=100,
        objective=loss,
        class_names=[str(index) for index in range(CLASSES)],
        device="cuda",
        **PAPER,
    )
    run = ported.record.run
    print(f"\n{run.device}, seconds: {run.seconds}, peak memory {run.peak_memory / 1e9:.2f} GB")
    print(ported.report.table())
    assert len(ported.report.sites) == 6 * target.config.num_hidden_layers + 1
    before = target.state_dict()["vision_model.encoder.layers.0.mlp.fc1.weight"].clone()
    after = ported.model("cuda").state_dict()["vision_model.encoder.layers.0.mlp.fc1.weight"]
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)


def test_two_runs_on_the_gpu_give_the_same_bits() -> None:
    def port() -> hf_bico.TaskVector:
        base, target = (tower(**shape, seed=seed).cuda() for seed, shape in enumerate(SMALL))
        options: dict[str, Any] = {"data": rows(64, 64), "n": 64, "objective": loss, "device": "cuda", **PAPER}
        names = [str(index) for index in range(CLASSES)]
        return hf_bico.port(
            fine_tuned(base.cpu()).cuda(), to=target, base=base.cuda(), class_names=names, **options
        ).task_vector

    one, two = port(), port()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_nothing_waits_for_the_gpu_while_samples_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def strict(*arguments: Any) -> Statistics:
        passes.append(arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return collect(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def still(model: nn.Module, batch: Any) -> torch.Tensor:
        features = nn.functional.normalize(model(pixel_values=batch.pixels).image_embeds, dim=-1)
        return nn.functional.cross_entropy(10 * features[:, :CLASSES], batch.labels, reduction="sum")

    monkeypatch.setattr("hf_bico.porting.calibration.collect", strict)
    base, target = (tower(**shape, seed=seed) for seed, shape in enumerate(SMALL))
    hf_bico.port(
        fine_tuned(base).cuda(),
        to=target.cuda(),
        base=base.cuda(),
        data=rows(64, 64),
        n=64,
        batch_size=16,
        objective=still,
        class_names=[str(index) for index in range(CLASSES)],
        device="cuda",
        evaluate=False,
        **PAPER,
    )
    assert len(passes) == 1


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """A PeftModel whose LoRA changes every linear layer of the blocks."""
    import peft

    layers = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    found: nn.Module = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=rank, target_modules=layers))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
    return found


@pytest.mark.parametrize(("shapes", "blocks"), [(SMALL, None), (VIT_B, 12)], ids=["small", "ViT-B/16"])
def test_port_of_a_lora_on_the_gpu(
    shapes: tuple[dict[str, int], ...], blocks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_bico.models.low_rank import Factors

    depth = {} if blocks is None else {"blocks": blocks}
    base, target = (tower(**{**shape, **depth}, seed=seed) for seed, shape in enumerate(shapes))
    options: dict[str, Any] = {"n": 64, "objective": loss, "device": "cuda", "evaluate": False, **PAPER}
    names = [str(index) for index in range(CLASSES)]
    images = rows(64, shapes[0]["grid"] * 16)
    lora = adapted(base, rank=8).cuda()
    merged = copy.deepcopy(lora).merge_and_unload()

    def port(source: nn.Module, **more: Any) -> hf_bico.Ported:
        return hf_bico.port(
            source, to=target.cuda(), base=base.cuda(), data=images, class_names=names, **options, **more
        )

    dense = port(merged, format="delta").task_vector
    with monkeypatch.context() as context:
        context.setattr(Factors, "dense", None)
        ported = port(lora)
        ported.save(tmp_path / "out")
    run = ported.record.run
    print(f"\n{run.device}, seconds: {run.seconds}, peak memory {run.peak_memory / 1e9:.2f} GB")
    assert all(isinstance(ported.task_vector.change(name), Factors) for name in ported.task_vector)
    worst = max(float((ported.task_vector[name] - dense[name]).norm() / dense[name].norm()) for name in dense)
    print(f"port of the LoRA against that of the merged model: {worst:.1e}")
    assert worst < 1e-3, "the merged model's own rounding"


def test_truncation_on_the_gpu_equals_the_cpus() -> None:
    from hf_bico.models.low_rank import energy, truncated

    generator = torch.Generator().manual_seed(0)
    for shape, rank in (((96, 64), 8), ((64, 96), 0.9), ((1200, 1100), 16)):
        scale = torch.logspace(0, -3, min(shape))
        left, right = (torch.randn(extent, min(shape), generator=generator) for extent in shape)
        matrix = (left * scale) @ right.T
        on_cpu, on_gpu = truncated(matrix, rank), truncated(matrix.cuda(), rank)
        assert on_gpu.left.is_cuda
        assert on_gpu.rank == on_cpu.rank
        assert energy(on_gpu) == pytest.approx(energy(on_cpu), rel=1e-4)
        assert torch.allclose(on_gpu.dense().cpu(), on_cpu.dense(), atol=1e-3 * float(matrix.abs().max()))
        again = truncated(matrix.cuda(), rank)
        assert torch.equal(again.left, on_gpu.left)


SAME = ({"width": 64, "grid": 4}, {"width": 64, "grid": 4})
OF_ONE_SHAPE = ("transfusion", "gradfix")


def outcome_on(device: str, name: str, **options: Any) -> Any:
    """What a method makes of the target on one device, in float64, with class embeddings made up."""
    from hf_bico.alignment.methods import make_method
    from hf_bico.alignment.objectives.base import Heads
    from hf_bico.alignment.objectives.clip import ZeroShotHead
    from hf_bico.data.draw import draw
    from hf_bico.porting.calibration import Calibration
    from hf_bico.porting.model_pair import ModelPair
    from hf_bico.porting.transfer import transfer, with_polish
    from hf_bico.runtime.environment import Stopwatch

    shapes = SAME if name in OF_ONE_SHAPE else SMALL
    names = [f"class {index}" for index in range(CLASSES)]
    fixed = {"method": name, "alpha": 1.0, "dtype": "float64", "device": device, "class_names": names}
    settings = Settings(**{**fixed, "n": 24, **options})
    base, target = (tower(**shape, seed=seed).to(device, torch.float64) for seed, shape in enumerate(shapes))
    tuned = fine_tuned(base.cpu()).to(device)
    data = [{**row, "image": row["image"].double()} for row in rows(24, 64)]
    planned = hf_bico.plan(tuned, to=target, base=base.to(device), data=data)
    watch = Stopwatch()
    models = ModelPair.open(planned, settings, torch.device(device), watch)

    def head(seed: int) -> ZeroShotHead:
        classes = torch.randn(CLASSES, 48, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scale = torch.tensor(10.0, dtype=torch.float64, device=device)
        return ZeroShotHead(nn.functional.normalize(classes, dim=-1).to(device), scale, None)

    drawn = draw(data, settings)
    calibration = Calibration(models, drawn, Heads(head(2), head(3), head(2)), watch, settings)
    method = make_method(name, settings)
    result = transfer(method, calibration, drawn.samples)
    return with_polish(result, method, calibration) if settings.polish else result


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_on_the_gpu_what_it_gives_on_the_cpu(name: str) -> None:
    if name == "transfusion":
        pytest.importorskip("scipy")
    # with fewer than ten samples nothing is held back, and measured
    options: dict[str, Any] = {"n": 9, "train_steps": 3, "warmup": 1} if name in ("fewshot", "finetune") else {}
    options |= {"learning_rate": 1e-3, "readout": name in ("bico-path", "fewshot")}
    options |= {"train_steps": 5, "labels": "pseudo"} if name == "distill" else {}
    options |= {"train_steps": 5} if name == "train" else {}
    on_cpu, on_gpu = (outcome_on(device, name, **options) for device in ("cpu", "cuda"))
    assert set(on_cpu.changes) == set(on_gpu.changes)
    worst = (
        max(
            float((on_gpu.changes[tensor].cpu() - change).norm() / change.norm())
            for tensor, change in on_cpu.changes.items()
            if float(change.norm()) > 1e-9
        )
        if on_cpu.changes
        else 0.0
    )
    print(f"\n{name}: {worst:.1e}")
    assert worst < 1e-4
    if on_cpu.trained is not None:
        assert on_gpu.trained.steps == on_cpu.trained.steps
    if on_cpu.readout is not None:
        assert on_gpu.readout.accepted == on_cpu.readout.accepted
        assert on_gpu.readout.left_out == pytest.approx(on_cpu.readout.left_out, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"format": "adapter", "rank": 4}], ids=["weights", "factors"])
def test_a_polish_gives_on_the_gpu_what_it_gives_on_the_cpu(options: dict[str, Any]) -> None:
    options = {"polish": True, "polish_steps": 6, "learning_rate": 1e-3, **options}
    on_cpu, on_gpu = (outcome_on(device, "bico", **options) for device in ("cpu", "cuda"))
    assert on_cpu.polished.trained.steps == on_gpu.polished.trained.steps
    assert on_cpu.polished.trained.finished == on_gpu.polished.trained.finished
    for name, change in on_cpu.polished.changes.items():
        error = (on_gpu.polished.changes[name].cpu() - change).norm() / change.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"
    assert on_cpu.polished.gain.mean == pytest.approx(on_gpu.polished.gain.mean, abs=1e-6)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "t5", "bert"])
def test_language_models_give_on_the_gpu_what_they_give_on_the_cpu(kind: str, tmp_path: Path) -> None:
    """The whole port from folders: tokens, masks and losses on the GPU, in float64 but for norms, which round."""
    import transformers

    from support.language_toys import fine_tuned, labelled_rows, sentences, write_decoder, write_encoder, write_t5

    write = {"t5": write_t5, "bert": write_encoder}.get(kind, write_decoder)
    named = {} if kind == "t5" else {"kind": kind}
    base, target = (write(tmp_path / name, width=width, seed=seed, **named) for name, width, seed in PAIR)
    loader = {"t5": transformers.T5ForConditionalGeneration, "bert": transformers.BertForSequenceClassification}
    tuned = fine_tuned(base, tmp_path / "tuned", loader.get(kind, transformers.AutoModelForCausalLM))
    rows = labelled_rows(24) if kind in ("t5", "bert") else [{"text": text} for text in sentences(24)]
    options: dict[str, Any] = {"n": 16, "dtype": "float64", "class_names": ["no", "yes"], **PAPER}
    options["evaluate"] = kind in ("qwen2", "gpt2")  # accuracies need more packages
    ports = [hf_bico.port(tuned, to=target, base=base, data=rows, device=name, **options) for name in ("cuda", "cpu")]
    for name, change in ports[1].task_vector.items():
        error = (ports[0].task_vector[name].cpu() - change.cpu()).norm() / change.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"
    assert [e.value for e in ports[0].record.evaluation] == pytest.approx([e.value for e in ports[1].record.evaluation])


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A fine-tuned Qwen2, its base and a target."""
    import transformers

    from support.language_toys import fine_tuned, write_decoder

    place = tmp_path_factory.mktemp("decoders")
    base, target = (
        write_decoder(place / name, width=width, seed=seed, blocks=6, kind="qwen2") for name, width, seed in PAIR
    )
    return fine_tuned(base, place / "tuned", transformers.AutoModelForCausalLM), base, target


def decoder_port(models: tuple[Path, Path, Path], **options: Any) -> hf_bico.Ported:
    from support.language_toys import sentences

    tuned, base, target = models
    rows = [{"text": text} for text in sentences(24)]
    usual: dict[str, Any] = {"n": 16, "device": "cuda", "evaluate": False, **PAPER}
    return hf_bico.port(tuned, to=target, base=base, data=rows, **usual, **options)


def furthest(one: hf_bico.Ported, other: hf_bico.Ported) -> float:
    """The largest relative difference of a tensor's change."""
    pairs = ((change.cpu(), other.task_vector[name].cpu()) for name, change in one.task_vector.items())
    return max(float((mine - theirs).norm() / mine.norm()) for mine, theirs in pairs)


def test_models_that_take_turns_on_the_gpu_give_the_same(
    decoders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = decoder_port(decoders)
    visited: list[str] = []
    moved = nn.Module.to

    def to(module: nn.Module, *where: Any, **how: Any) -> nn.Module:
        visited.append(str(where[0]) if where else "")
        return moved(module, *where, **how)

    monkeypatch.setattr(nn.Module, "to", to)
    # models so small have room together in whatever their activations take
    in_turn = MemoryPlan(4, (6,), alternating=True, checkpointing=False, bytes=0)
    monkeypatch.setattr(Plan, "memory_plan", lambda *_, **__: in_turn)
    assert furthest(usual, decoder_port(decoders)) < 1e-5
    assert visited.count("cuda") >= 2
    assert visited[-1] == "cpu"


def test_weights_that_stay_in_main_memory_give_the_same(
    decoders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By accelerate, which brings them to the GPU when they are needed."""
    pytest.importorskip("accelerate")
    usual = decoder_port(decoders)
    assert furthest(usual, decoder_port(decoders, device_map="auto")) < 1e-5
    most = int(0.6 * (decoders[1] / "model.safetensors").stat().st_size)  # the embeddings and some blocks
    monkeypatch.setattr("hf_bico.porting.model_pair.DeviceSpread", lambda rule, _: DeviceSpread(rule, most))
    benches: list[ModelPair] = []
    opened = ModelPair.open

    def watched(*arguments: Any) -> ModelPair:
        benches.append(opened(*arguments))
        return benches[-1]

    monkeypatch.setattr(ModelPair, "open", watched)
    assert furthest(usual, decoder_port(decoders, device_map="auto")) < 1e-5
    assert benches[0].offloaded


SHARED = """
import sys
import hf_bico
from support.language_toys import sentences
from support.paper import PAPER
tuned, base, target, out = sys.argv[1:]
rows = [{"text": text} for text in sentences(24)]
ported = hf_bico.port(tuned, to=target, base=base, data=rows, n=15, device="cuda", evaluate=False, **PAPER)
ported.save(out)
"""


def test_two_processes_share_one_gpu(decoders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    script = tmp_path / "script.py"
    script.write_text(SHARED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    together = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for name, launcher in (("alone", [sys.executable]), ("together", together)):
        words = [*launcher, str(script), *map(str, decoders), str(tmp_path / name)]
        subprocess.run(words, check=True, env=environment, timeout=120)
        found.append(load_file(tmp_path / name / "model.safetensors"))
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])
