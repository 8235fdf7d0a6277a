"""The pipeline as a whole: options, loaded models, evaluation, and runs that repeat to the byte."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import hf_bico
from hf_bico.cli.main import main
from hf_bico.data.dataset import Samples
from hf_bico.errors import (
    BaseMismatchError,
    DataUnknownError,
    EmptyTaskVectorError,
    ImplausibleTaskVectorError,
    MemoryExhaustedError,
    ObjectiveError,
    OutputError,
    UsageError,
)
from hf_bico.hub.client import Hub
from hf_bico.models import inference
from hf_bico.models.model import Model
from hf_bico.porting import evaluate
from hf_bico.porting.evaluate import evaluate_model
from hf_bico.porting.task_vector import FineTune
from support import forks
from support.paper import PAPER
from support.scenes import SOURCE, Scene, make_scene
from support.toys import CLASS_NAMES, build_tokenizer, random_rows


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def port(scene: Scene, **options: object) -> hf_bico.Ported:
    usual: dict[str, object] = {"base": scene.base, "data": scene.data, "n": 24, "evaluate": False}
    return hf_bico.port(scene.tuned, to=scene.target, **{**usual, **PAPER, **options})


TWICE = """
import sys
from hf_bico import TaskVector
from hf_bico.cli.main import main

tuned, base, folder, *words = sys.argv[1:]
TaskVector.from_models(tuned, base=base).save_adapter(f"{folder}/adapter", 0.8, everything=True)
main([*words, "-o", f"{folder}/ported"], standalone_mode=False)
print(hash("an order of sets"))
"""


def test_two_runs_give_the_same_bytes(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port and an adapter, again in another process, with other hashes."""
    one, two = (tmp_path / name for name in ("one", "two"))
    words = ["-c", *map(str, (scene.tuned, scene.base)), str(one), *scene.port_by_paper, "-q"]
    monkeypatch.setattr(sys, "argv", words)
    exec(TWICE, {"__name__": "__main__"})
    words[3] = str(two)
    again = forks.run(*words[1:], code=TWICE, check=True)
    assert int(again.stdout) != hash("an order of sets"), "other hashes"
    adapter = ("adapter/adapter_model.safetensors", "adapter/adapter_config.json")
    for file in ("ported/open_clip_model.safetensors", *adapter):
        assert (one / file).read_bytes() == (two / file).read_bytes()
    records = [json.loads((folder / "ported" / "bico.json").read_text()) for folder in (one, two)]
    for record in records:
        assert record.pop("run")["seconds"].keys() >= {"load", "calibrate", "align", "transport"}
    assert records[0] == records[1]


def test_images_are_read_once_for_all_models_unless_they_take_too_much(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, image = list[int](), Samples._image

    def counted(samples: Samples, value: Any, index: int) -> Any:
        read.append(index)
        return image(samples, value, index)

    monkeypatch.setattr(Samples, "_image", counted)
    once = port(scene, evaluate=True).record.evaluation
    seldom = len(read)
    for module in (evaluate, inference):
        monkeypatch.setattr(module, "MOST_KEPT", 0)
    each_time = port(scene, evaluate=True, batch_size=5).record.evaluation
    assert each_time == once
    often = len(read) - seldom
    timed = (24, 5)  # of a batch that steps are timed on
    assert often - timed[1] == seldom - timed[0] + 5 + 2 * once[0].n, (
        "by the target, by the port and by the source; and a batch to find out"
    )


def test_half_precision_leaves_torch_as_it_was(scene: Scene, recwarn: pytest.WarningsRecorder) -> None:
    """Also on a CPU without bfloat16, where torch itself turns oneDNN off at the first such product, and warns."""
    kinds = [port(scene, dtype=dtype).record.run.dtype for dtype in ("bfloat16", "float32")]
    assert kinds == ["bfloat16", "float32"]
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()
    assert not [one for one in recwarn if "mkldnn" in str(one.message)]


def test_progress_counts_the_steps_of_a_stage_to_its_end(scene: Scene) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    options = {"method": "bico-path", "augment": 0, "batch_size": 10, "evaluate": True}
    ported = port(scene, **options, progress=lambda stage, *steps: told.setdefault(stage, []).append(steps))
    once = [(0, 24), (10, 24), (20, 24), (24, 24)]
    assert told["calibrate"] == [(0, 1), *once, (0, 24), *once], "two steps of the path, each over all samples"
    start, *counted = told["evaluate"]
    assert start == (0, 1)
    assert counted == sorted(counted)
    samples = 3 * ported.record.evaluation[0].n
    assert {of for _, of in counted} == {samples}, "samples of three models"
    assert counted[-1] == (samples, samples)
    assert all(calls[-1][0] == calls[-1][1] for calls in told.values())


def test_alpha_scales_what_is_added(scene: Scene) -> None:
    whole, half = port(scene), port(scene, alpha=0.5)
    for name, delta in whole.task_vector.items():
        assert torch.allclose(half.task_vector[name], 0.5 * delta, atol=1e-7)


def test_completion_changes_only_what_was_not_seen(scene: Scene) -> None:
    drop, svd = port(scene), port(scene, completion="svd")
    for one, other in zip(drop.report.sites, svd.report.sites, strict=True):
        assert (one.rank_in, one.rank_out, one.unseen) == pytest.approx((other.rank_in, other.rank_out, other.unseen))
    energy = [sum(p.task_vector.energy(name) for name in p.task_vector) for p in (drop, svd)]
    assert energy[0] < energy[1], "the completion carries the unseen energy too"


def test_naive_pads_with_zeros(scene: Scene) -> None:
    ported = port(scene, method="naive", data=None)
    tau = hf_bico.TaskVector.from_models(scene.tuned, base=scene.base)
    name = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    rows, columns = tau[name].shape
    assert torch.equal(ported.task_vector[name][:rows, :columns], tau[name])
    assert not ported.task_vector[name][rows:].any()
    assert not ported.task_vector[name][:, columns:].any()
    packed = "visual.transformer.resblocks.0.attn.in_proj_weight"
    for part, origin in zip(ported.task_vector[packed].chunk(3), tau[packed].chunk(3), strict=True):
        assert torch.equal(part[: len(origin), : len(origin)], origin)


def test_default_evaluation_is_what_eval_measures(scene: Scene, tmp_path: Path) -> None:
    ported = port(scene, evaluate=True)
    folder = ported.save(tmp_path / "out")
    values = {entry.model: entry.value for entry in ported.record.evaluation}
    assert values["ported"] == evaluate_model(folder, scene.data).value
    assert values["target"] == evaluate_model(scene.target, scene.data).value
    assert values["source"] == evaluate_model(scene.tuned, scene.data).value


def test_port_compare_and_eval_measure_on_the_same_samples(scene: Scene, tmp_path: Path) -> None:
    some: dict[str, Any] = {"eval_samples": 7, "seed": 3, "device": "cpu"}
    ported = port(scene, evaluate=True, **some)
    alone = evaluate_model(scene.tuned, scene.data, **some)
    assert (alone.n, alone.value) == (7, ported.record.value("source"))
    assert alone.value != evaluate_model(scene.tuned, scene.data, **some | {"eval_samples": 20}).value
    models: dict[str, Any] = {"to": scene.target, "base": scene.base, "data": scene.data}
    compared = hf_bico.compare(scene.tuned, **models, methods=["naive@1"], n=[8], seeds=1, folder=tmp_path, **some)
    assert alone.value in [cell.value for cell in compared.cells if cell.method == "source"]


def test_eval_refuses_two_numbers_of_samples(scene: Scene) -> None:
    with pytest.raises(UsageError, match="eval_samples is 7 and n is 8"):
        evaluate_model(scene.tuned, scene.data, eval_samples=7, n=8)


def test_source_is_measured_with_its_own_text_side(scene: Scene, tmp_path: Path) -> None:
    """A fine-tune that changed its text tower, too: here, the meaning of the class names."""
    tuned = tmp_path / "tuned"
    shutil.copytree(scene.tuned, tuned)
    file = tuned / "open_clip_model.safetensors"
    state = load_file(file)
    words = build_tokenizer().convert_tokens_to_ids(list(CLASS_NAMES))
    state["token_embedding.weight"][words] = state["token_embedding.weight"][words].roll(1, dims=0)
    save_file(state, file)
    shares = [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]  # uneven: a model that always says the same shows which it says
    uneven = [{**row, "label": shares[index % 10]} for index, row in enumerate(random_rows(60, 20))]
    data = {"train": random_rows(24, 20), "test": uneven}
    options = {"class_names": CLASS_NAMES}
    ported = hf_bico.port(tuned, to=scene.target, base=scene.base, data=data, n=24, **PAPER, **options)
    assert ported.record.value("source") == evaluate_model(tuned, data, **options).value
    assert ported.record.value("source") != evaluate_model(scene.tuned, data, **options).value
    assert any(entry.reason == "text tower" and entry.energy > 0 for entry in ported.report.left)


def test_missing_and_extra_tensors_are_said(scene: Scene, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(scene.tuned, tuned)
    state = load_file(tuned / "open_clip_model.safetensors")
    del state["visual.proj"]
    state["head.weight"] = torch.ones(3, 3)
    save_file(state, tuned / "open_clip_model.safetensors")
    ported = hf_bico.port(tuned, to=scene.target, base=scene.base, data=scene.data, n=24, evaluate=False, **PAPER)
    assert ported.record.notices == [
        "Tensors of the base that the fine-tuned model lacks, taken as unchanged: 1 (visual.proj).",
        "Tensors of the fine-tuned model that its base lacks, left behind: 1 (head.weight).",
    ]
    assert "proj" not in [site.name for site in ported.report.sites]
    assert "visual.proj" not in ported.task_vector


def test_model_twice_is_the_same_model(scene: Scene) -> None:
    """Whether the target was a folder or a loaded module, which stays as it was."""
    module = Model.open(scene.target, "").load(torch.device("cpu"), torch.float32).module
    start = module.state_dict()["visual.proj"].clone()
    rows = random_rows(24, 20)

    def loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
        return model.visual(batch.pixels).square().sum()  # type: ignore[attr-defined,operator]

    for target in (scene.target, module):
        ported = hf_bico.port(
            scene.tuned, to=target, base=scene.base, data=rows, n=24, objective=loss, class_names=CLASS_NAMES, **PAPER
        )
        one, two = (ported.model().state_dict()["visual.proj"] for _ in range(2))
        assert torch.equal(one, two)
        assert not torch.equal(one, start)
    assert torch.equal(module.state_dict()["visual.proj"], start)


def test_loaded_transformers_models_find_their_processors(tmp_path: Path) -> None:
    from transformers import CLIPModel

    scene = make_scene(tmp_path, ("transformers", "transformers"))
    folders = (scene.tuned, scene.base, scene.target)
    tuned, base, target = (CLIPModel.from_pretrained(folder) for folder in folders)
    loaded = hf_bico.port(tuned, to=target, base=base, data=scene.data, n=24, **PAPER)
    from_folders = hf_bico.port(scene.tuned, to=scene.target, base=scene.base, data=scene.data, n=24, **PAPER)
    assert loaded.record.evaluation == from_folders.record.evaluation
    for name in from_folders.task_vector:
        assert torch.allclose(loaded.task_vector[name], from_folders.task_vector[name], atol=1e-7)


def test_eval_completes_a_vision_tower_with_its_base(tmp_path: Path) -> None:
    from transformers import CLIPVisionModel

    scene = make_scene(tmp_path, ("transformers", "transformers"))
    whole = evaluate_model(scene.tuned, scene.data)
    tower = tmp_path / "tower"
    CLIPVisionModel.from_pretrained(scene.tuned).save_pretrained(tower)
    # the tower lacks the projection: complete it by a base that has the fine-tuned one
    assert evaluate_model(tower, scene.data, base=scene.tuned).value == whole.value


def test_loaded_models_and_own_objective(scene: Scene) -> None:
    """Modules instead of folders, tensors instead of images, a loss of one's own; all are left as they were."""
    folders = (scene.tuned, scene.base, scene.target)
    modules = [Model.open(path, "").load(torch.device("cpu"), torch.float32).module for path in folders]
    before = [{name: tensor.clone() for name, tensor in module.state_dict().items()} for module in modules]
    sizes = []

    def spread(model: torch.nn.Module, batch: object) -> torch.Tensor:
        sizes.append(len(batch.pixels))  # type: ignore[attr-defined]
        return model.visual(batch.pixels).square().sum()  # type: ignore[attr-defined,operator]

    rows = random_rows(30, SOURCE.image_size)
    options = {"base": modules[1], "data": rows, "n": 30, "objective": spread, "class_names": CLASS_NAMES}
    ported = hf_bico.port(modules[0], to=modules[2], batch_size=20, **PAPER, **options)
    assert sizes == [20, 20, 10, 10] + [1] * 2 * 30, "each sample alone judges the target without and with the change"
    assert ported.record.objective.name == "spread"
    assert ported.record.evaluation == []
    assert all(site.rank_out for site in ported.report.sites)
    for module, state in zip(modules, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    with pytest.raises(OutputError, match="passed as a loaded model"):
        ported.save(scene.folder / "never")
    assert not (scene.folder / "never").exists()


@pytest.mark.parametrize("loss", [lambda model, batch: 1.0, lambda model, batch: batch.pixels.sum((1, 2, 3))])
def test_objective_that_gives_no_loss(loss: object, scene: Scene) -> None:
    with pytest.raises(ObjectiveError, match="not one loss"):
        port(scene, objective=loss)


def test_objective_that_runs_the_model_twice(scene: Scene) -> None:
    with pytest.raises(ObjectiveError, match="more than once"):
        port(scene, objective=lambda model, batch: model.visual(batch.pixels).sum() + model.visual(batch.pixels).sum())


def test_objective_that_skips_a_layer(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, ("transformers", "transformers"))
    with pytest.raises(ObjectiveError, match="does not run 'proj'"):
        port(scene, objective=lambda model, batch: model.vision_model(batch.pixels).pooler_output.sum())


def test_own_objective_needs_no_class_names(scene: Scene) -> None:
    ported = port(scene, data=random_rows(24, 20), objective=lambda model, batch: model.visual(batch.pixels).sum())
    assert ported.record.data is not None
    assert ported.record.data.class_names == ["0", "1", "2", "3"]


def test_eval_leaves_a_loaded_model_alone(scene: Scene, tmp_path: Path) -> None:
    from transformers import CLIPModel

    scene = make_scene(tmp_path, ("transformers", "transformers"))
    delta = port(scene).save(tmp_path / "delta", format="delta")
    model = CLIPModel.from_pretrained(scene.target)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one, two = (evaluate_model(delta, scene.data, base=model).value for _ in range(2))
    assert one == two
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_delta_over_other_weights_is_refused(scene: Scene, tmp_path: Path) -> None:
    from support.scenes import TARGET
    from support.toys import random_state, write_open_clip

    delta = port(scene).save(tmp_path / "delta", format="delta")
    stranger = write_open_clip(tmp_path / "stranger", TARGET, random_state(TARGET, 55))
    with pytest.raises(BaseMismatchError, match="made for other weights"):
        evaluate_model(delta, scene.data, base=stranger)
    assert evaluate_model(delta, scene.data, base=scene.target).n == 20


def test_a_fine_tune_is_not_measured_as_a_base_that_computes_something_else(scene: Scene, tmp_path: Path) -> None:
    tuned = Path(shutil.copytree(scene.tuned, tmp_path / "tuned"))
    config = json.loads((tuned / "open_clip_config.json").read_text())
    config["model_cfg"]["quick_gelu"] = True
    (tuned / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(BaseMismatchError, match="compute different things"):
        evaluate_model(tuned, scene.data, base=scene.base)
    assert evaluate_model(tuned, scene.data).n == 20
    base = Model.open(scene.base, "the base", "open_clip")
    with pytest.raises(BaseMismatchError, match="the checkpoint 'tuned' is not a fine-tune of 'base': .*quick_gelu"):
        FineTune.over(base, tuned, "the checkpoint", Hub(), allow_pickle=False)
    assert FineTune.over(base, scene.tuned, "the checkpoint", Hub(), allow_pickle=False).name == "tuned"


def test_calibrating_on_test_measures_on_what_is_left(scene: Scene) -> None:
    whole = port(scene, split="test", n=20, evaluate=True).record.evaluation[0]
    assert (whole.split, whole.n) == ("train", 48)


def test_target_that_is_the_base_is_said(scene: Scene) -> None:
    ported = hf_bico.port(scene.tuned, to=scene.base, base=scene.base, data=scene.data, n=24, evaluate=False, **PAPER)
    assert ported.record.notices == ["The target is the base itself."]


def test_command_of_the_record_names_every_choice(scene: Scene) -> None:
    plain = "hf-bico port tuned --base base --to target --data pictures --split train -n 24 --seed 0"
    assert port(scene).record.command == f"{plain} --method bico --alpha 1"
    chosen = port(scene, alpha=0.5, completion="svd", templates=["the {}"], dtype="float64").record.command
    assert chosen == f"{plain} --templates FILE --method bico --completion svd --alpha 0.5 --dtype float64"
    assert port(scene, objective=lambda model, batch: model.visual(batch.pixels).sum()).record.command is None


def test_batch_is_halved_when_memory_runs_out(scene: Scene) -> None:
    tried = []

    def hungry(model: torch.nn.Module, batch: object, limit: int = 5) -> torch.Tensor:
        size = len(batch.pixels)  # type: ignore[attr-defined]
        tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError("too large")
        return model.visual(batch.pixels).square().sum()  # type: ignore[attr-defined,operator]

    small = port(scene, objective=hungry, batch_size=16)
    assert tried[:2] == [16, 8]
    assert max(tried[2:]) == 4
    once = port(scene, objective=hungry, batch_size=4)
    for name in once.task_vector:
        assert torch.equal(small.task_vector[name], once.task_vector[name])
    with pytest.raises(MemoryExhaustedError):
        port(scene, objective=lambda model, batch: hungry(model, batch, limit=0))


def test_memory_that_runs_out_elsewhere_is_said(scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 754.00 MiB.")

    monkeypatch.setattr("hf_bico.alignment.methods.aligned.polar", exhausted)
    result = CliRunner().invoke(main, [*scene.port_by_paper, "-o", str(tmp_path / "out"), "-q"])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "Error: the device's memory ran out",
        "Remedy: use --device cpu, or a device with more",
    ]
    assert not (tmp_path / "out").exists()


def test_one_class_goes_on_with_a_notice(scene: Scene, tmp_path: Path) -> None:
    rows = [{"image": row["image"], "label": 1} for row in random_rows(10, 20)]
    ported = port(scene, data=rows, n=10, class_names=CLASS_NAMES)
    assert ported.record.notices == ["All calibration samples are of one class."]
    card = (ported.save(tmp_path / "out", format="delta") / "README.md").read_text()
    assert "of one class" in card


def test_nothing_held_out_is_said(scene: Scene) -> None:
    rows = random_rows(24, 20)
    ported = port(scene, data=rows, class_names=CLASS_NAMES, evaluate=True)
    assert ported.record.evaluation == []
    assert ported.record.notices == ["Nothing was measured: calibration used every labelled sample."]


def test_change_in_an_unmatched_block_only(tmp_path: Path) -> None:
    """A target of one block takes the source's last: what changed in the first cannot be carried."""
    from support.scenes import TARGET
    from support.toys import random_state, write_open_clip

    state = random_state(SOURCE, 0)
    tuned = {
        name: tensor + 0.01 if name.startswith("visual.transformer.resblocks.0.") else tensor
        for name, tensor in state.items()
    }
    folders = {
        "tuned": write_open_clip(tmp_path / "tuned", SOURCE, tuned),
        "base": write_open_clip(tmp_path / "base", SOURCE, state),
        "target": write_open_clip(tmp_path / "target", TARGET.but(blocks=1), random_state(TARGET.but(blocks=1), 1)),
    }
    with pytest.raises(EmptyTaskVectorError, match="only in tensors that are not carried"):
        hf_bico.port(folders["tuned"], to=folders["target"], base=folders["base"], method="naive", alpha=1.0)


def test_blocks_that_share_a_source_count_its_energy_once(tmp_path: Path) -> None:
    from support.scenes import TARGET
    from support.toys import random_state, write_open_clip

    scene = make_scene(tmp_path)
    deep = TARGET.but(blocks=5)
    target = write_open_clip(tmp_path / "deep", deep, random_state(deep, 1))
    models = {"to": target, "base": scene.base, "data": scene.data}
    report = hf_bico.port(scene.tuned, **models, n=24, evaluate=False, **PAPER).report
    shares = [float(line.split()[2].rstrip("%")) for line in report.table().splitlines()[1:]]
    assert sum(shares) == pytest.approx(100 * report.carried_energy, abs=0.5)


def test_equal_models_have_nothing_to_carry(scene: Scene) -> None:
    with pytest.raises(EmptyTaskVectorError, match="differs from its base nowhere"):
        hf_bico.port(scene.base, to=scene.target, base=scene.base, data=scene.data, n=24)


def test_unrelated_base_of_the_same_shape_is_refused(scene: Scene, tmp_path: Path) -> None:
    from support.toys import random_state, write_open_clip

    stranger = write_open_clip(tmp_path / "stranger", SOURCE, random_state(SOURCE, 77))
    with pytest.raises(ImplausibleTaskVectorError, match="which fine-tuning does not do") as caught:
        port(scene, base=stranger)
    assert "base=" in caught.value.remedy
    assert port(scene, base=stranger, force=True).report.sites


def test_bico_needs_data(scene: Scene) -> None:
    with pytest.raises(DataUnknownError, match="no calibration data"):
        port(scene, data=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 5, "per_class": 2}, "n and per_class"),
        ({"n": 0}, "n is 0"),
        ({"method": "magic"}, "method is 'magic'"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"templates": ["a photo"]}, "no place for the class name"),
        ({"device": "abacus"}, "no device 'abacus'"),
        ({"templates": "a {}"}, "templates is one string"),
        ({"class_names": [0, 1, 2, 3]}, "class_names holds 0"),
        ({"n": 2.5}, "n is 2.5"),
    ],
)
def test_contradicting_options(options: dict[str, object], message: str, scene: Scene) -> None:
    with pytest.raises(UsageError, match=message):
        port(scene, **options)


def test_a_notebook_shows_a_port_that_left_most_behind_and_was_not_measured(scene: Scene) -> None:
    ported = port(scene, n=8, layers=[0, 0])
    assert sum(entry.energy for entry in ported.record.left) > 0.5
    assert ported._repr_markdown_() == "Ported of tuned to target, as full"
