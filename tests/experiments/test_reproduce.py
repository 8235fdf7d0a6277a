"""Reproducing tables of the paper in small: stand-ins by the same Hub ids, killed and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import hf_bico
from hf_bico.cli.progress import show_comparison
from hf_bico.errors import ClassNamesError, OutputExistsError, UsageError
from hf_bico.experiments.compare.cells import Cell
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.reproduce import paper
from hf_bico.experiments.reproduce.reproduction import Reproduction
from hf_bico.experiments.reproduce.run import Job, estimate
from hf_bico.reports.record import read_record
from hf_bico.settings import Settings
from support.dying import kill
from support.forks import Running, start
from support.hub import Hub
from support.hub_scenes import upload
from support.paper_world import publish_data, publish_language, publish_vision

RECIPE = ("--train-steps", "30", "--train-batch", "16", "--warmup", "3", "--learning-rate", "0.003")
OPTIONS: dict[str, Any] = {
    **{"train_steps": 30, "train_batch": 16, "warmup": 3, "learning_rate": 0.003},
    **{"seeds": 1, "eval_samples": 40, "device": "cpu"},
}
TOKEN = "hf_secretOfUser"


def own(hub: Hub, folder: Path) -> dict[str, Any]:
    """A directory, and an environment with nothing of the Hub's but the endpoint, the token and a home."""
    folder.mkdir(exist_ok=True)
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    environment |= {"HOME": str(folder), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "hf-home")}
    return {"cwd": folder, "env": environment}


def started(hub: Hub, folder: Path, *arguments: str) -> Running:
    return start("reproduce", *arguments, "--device", "cpu", **own(hub, folder))


def finished(process: Running) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.wait(), out, err


def numbers(folder: Path, table: str) -> list[Any]:
    """What a run measured: all of it but times."""
    content = json.loads((folder / "reproduced" / f"table-{table}" / "reproduction.json").read_text())
    return [(row["method"], row.get("n"), row["here"], row["here_average"]) for row in content["rows"]]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first who asks for table 1 makes, for all."""
    return tmp_path_factory.mktemp("once") / "out"


@pytest.fixture
def of_table_1(hub: Hub, once: Path, tmp_path: Path) -> dict[str, Any]:
    """How to go on with a folder in which table 1 is whole for MNIST."""
    publish_vision(hub, tmp_path, "1", ("mnist",))
    folder = tmp_path / "out"
    if once.exists():
        shutil.copytree(once, folder)
    else:
        hf_bico.reproduce("1", ["mnist"], folder=folder, **OPTIONS)
        shutil.copytree(folder, once)
    return {"folder": folder, **OPTIONS}


def test_a_table_of_images_killed_twice_and_gone_on_with(hub: Hub, tmp_path: Path) -> None:
    publish_vision(hub, tmp_path, "1", ("mnist", "svhn"))
    asked = ("1", "--tasks", "svhn,mnist", *RECIPE, "--eval-samples", "40")
    code, printed, err = finished(started(hub, tmp_path / "whole", *asked))
    assert code == 0, err
    assert "Downloads: models" in err.splitlines()[0]
    assert "Fine-tunes first: CLIP-ViT-B-16-laion2B-s34B-b88K on SVHN" in err
    assert "About " in err
    assert "Table 1: Width scaling" in printed
    for cell in ("37.77", "57.02", "78.63", "92.93"):  # the paper's
        assert cell in printed

    broken, out = tmp_path / "broken", tmp_path / "broken" / "reproduced"
    training = out / "fine-tuned" / "CLIP-ViT-B-16-laion2B-s34B-b88K-svhn-training" / "training.safetensors"
    kill("checkpoint", 1, "reproduce", *asked, "--device", "cpu", **own(hub, broken))
    assert training.is_file()
    kill("cell", 16, "reproduce", *asked, "--device", "cpu", **own(hub, broken))
    log = out / "table-1" / "mnist" / "random" / "cells.jsonl"
    kept = log.read_bytes()
    assert len(kept.splitlines()) == 1 + 5
    tuned = (out / "fine-tuned" / "CLIP-ViT-B-16-laion2B-s34B-b88K-svhn" / "bico.json").read_bytes()
    code, again, err = finished(started(hub, broken, *asked))
    assert code == 0, err
    assert "Fine-tunes first" not in err, "both are there"
    assert log.read_bytes().startswith(kept), "what was measured is not measured again"
    assert len(log.read_bytes()) > len(kept)
    assert numbers(broken, "1") == numbers(tmp_path / "whole", "1")
    assert again == printed
    assert (out / "fine-tuned" / "CLIP-ViT-B-16-laion2B-s34B-b88K-svhn" / "bico.json").read_bytes() == tuned
    assert not training.exists()
    measured = {row[0]: row[2] for row in numbers(broken, "1")}
    assert set(measured["bico"]) == set(measured["naive"]) == {"mnist", "svhn"}
    assert measured["target fine-tuned"] == {}, "it was neither given nor trained"


def test_a_table_of_texts_killed_and_gone_on_with(hub: Hub, tmp_path: Path) -> None:
    publish_language(hub, tmp_path, ("rte",))
    asked = ("2", "--tasks", "rte", *RECIPE, "--eval-samples", "40", "--json")
    code, out, err = finished(started(hub, tmp_path / "whole", *asked))
    assert code == 0, err
    found = json.loads(out)["reproduction"]
    rows = {(row["method"], row.get("n")): row for row in found["rows"]}
    for method in ("base", "target", "theseus", "bico"):
        assert set(rows[method, 100]["here"]) == {"rte"}
    assert rows["bico", 50]["cells"] == list(paper.table("2").rows[5].cells)
    assert rows["source", None]["here"]["rte"]["mean"] > 0, "by a probe on the largest number of samples"

    broken = tmp_path / "broken"
    kill("cell", 4, "reproduce", *asked, "--device", "cpu", **own(hub, broken))
    assert finished(started(hub, broken, *asked))[0] == 0
    assert numbers(broken, "2") == numbers(tmp_path / "whole", "2")


def test_given_models_are_used_and_tables_share_what_was_trained(hub: Hub, tmp_path: Path) -> None:
    publish_vision(hub, tmp_path, "1", ("mnist",))
    how: dict[str, Any] = {"folder": tmp_path / "out", **OPTIONS}
    first = hf_bico.reproduce("1", ["mnist"], train_target=True, **how)
    made = tmp_path / "out" / "fine-tuned"
    stamps = {file: file.stat().st_mtime_ns for file in made.rglob("*.safetensors")}
    assert len(stamps) == 2
    assert first.measured(first.table.rows[1])["mnist"].mean > 0, "the target was trained too"

    sampled = hf_bico.reproduce("B", ["mnist"], **how)
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*.safetensors")} == stamps
    ways = {row.sampling: sampled.measured(row) for row in sampled.table.rows if row.sampling}
    assert [way for way, values in ways.items() if not values] == ["one-class"], "no class has 100 samples"
    assert "not measured: mnist: bico: N = 100: 100 samples of one class were asked for" in sampled.text()
    assert ways["random"]["mnist"].mean == first.measured(first.table.rows[-1])["mnist"].mean, (
        "the same number as in table 1"
    )

    source = made / "CLIP-ViT-B-16-laion2B-s34B-b88K-mnist"
    given = hf_bico.reproduce("1", ["mnist"], source_of={"mnist": str(source)}, **{**how, "folder": tmp_path / "other"})
    assert not (tmp_path / "other" / "fine-tuned").exists()
    row = given.table.rows[-1]
    assert given.measured(row)["mnist"] == first.measured(row)["mnist"]
    record = read_record(source)
    assert record.method.training is not None
    assert record.method.training.samples == 270, "nine tenths of the whole training split"


def test_a_target_that_is_trained_later_adds_its_line(of_table_1: dict[str, Any], tmp_path: Path) -> None:
    before = hf_bico.reproduce("1", ["mnist"], **of_table_1)
    hf_bico.reproduce("D", ["mnist"], **of_table_1)  # whose source is the target here
    added = hf_bico.reproduce("1", ["mnist"], **of_table_1)
    tuned = added.table.rows[1]
    assert tuned.method == "target fine-tuned"
    assert not before.measured(tuned)
    assert added.measured(tuned)
    assert all(added.measured(row) == before.measured(row) for row in added.table.rows if row != tuned)
    with pytest.raises(UsageError, match="holds another comparison: fine_tuned"):
        hf_bico.reproduce("1", ["mnist"], target_of={"mnist": str(tmp_path / "target")}, **of_table_1)


def test_data_is_the_same_whatever_its_reference(
    of_table_1: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "out" / "table-1" / "mnist" / "random" / "cells.jsonl"
    before = log.read_bytes()
    first = hf_bico.reproduce("1", ["mnist"], data_of={"mnist": "ylecun/mnist@main"}, **of_table_1)
    assert log.read_bytes() == before, "nothing is measured again"
    again = hf_bico.reproduce("1", ["mnist"], **of_table_1)
    assert again.text() == first.text()
    monkeypatch.chdir(tmp_path / "mnist")
    local = {"data_of": {"mnist": "."}, **of_table_1, "folder": tmp_path / "local"}
    assert hf_bico.reproduce("1", ["mnist"], **local).text() == hf_bico.reproduce("1", ["mnist"], **local).text()
    with pytest.raises(OutputExistsError, match="was fine-tuned on 'ylecun/mnist', not on '.'"):
        hf_bico.reproduce("1", ["mnist"], data_of={"mnist": "."}, **of_table_1)


def test_all_of_the_training_split_is_trained_on(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the repo: a large one is else read in part."""
    publish_vision(hub, tmp_path, "1", ("mnist",))
    monkeypatch.setattr("hf_bico.data.loading.SMALL_REPO", 0)
    hf_bico.reproduce("1", ["mnist"], folder=tmp_path / "out", **OPTIONS)
    record = read_record(tmp_path / "out" / "fine-tuned" / "CLIP-ViT-B-16-laion2B-s34B-b88K-mnist")
    assert record.method.training is not None
    assert record.method.training.samples == 270, "nine tenths of 300"


def test_two_processes_do_not_train_one_model(hub: Hub, tmp_path: Path) -> None:
    publish_vision(hub, tmp_path, "1", ("mnist",))
    asked = ("1", "--tasks", "mnist", *RECIPE, "--train-steps", "20000")
    first = started(hub, tmp_path / "both", *asked)
    training = tmp_path / "both" / "reproduced" / "fine-tuned" / "CLIP-ViT-B-16-laion2B-s34B-b88K-mnist-training"
    deadline = time.monotonic() + 300
    while not (training / "training.safetensors").is_file():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, _, err = finished(started(hub, tmp_path / "both", *asked))
    first.kill()
    first.communicate()
    assert code == 1
    assert "another run is writing into" in err


@pytest.mark.usefixtures("of_table_1")
def test_the_papers_settings_are_what_is_run(tmp_path: Path) -> None:
    log = tmp_path / "out" / "table-1" / "mnist" / "random" / "cells.jsonl"
    identity = json.loads(log.read_text().splitlines()[0])["identity"]
    settings = identity["settings"]
    assert (settings["completion"], settings["labels"], settings["alpha"]) == ("svd", "dataset", 1.0)
    assert settings["templates"] == list(paper.task("mnist").templates)
    assert settings["class_names"] == list(paper.task("mnist").classes)
    assert identity["base"]["id"] == paper.table("1").source


def test_another_recipe_or_other_classes_are_refused(of_table_1: dict[str, Any], hub: Hub, tmp_path: Path) -> None:
    publish_data(hub, tmp_path, "dtd")
    with pytest.raises(OutputExistsError, match="by another recipe \\(30 steps"):
        hf_bico.reproduce("1", ["mnist"], **{**of_table_1, "train_steps": 31})
    with pytest.raises(ClassNamesError, match="has 47 classes, and the paper's MNIST has 10"):
        hf_bico.reproduce("1", ["mnist"], data_of={"mnist": paper.task("dtd").data}, **of_table_1)


def test_what_is_asked_for_wrongly(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no table '9'"):
        hf_bico.reproduce("9", folder=tmp_path)
    for seeds in (0, -1, []):
        with pytest.raises(UsageError, match="seeds is"):
            hf_bico.reproduce("1", seeds=seeds, folder=tmp_path)
    with pytest.raises(UsageError, match="tasks names 'eurosat', and table 2 has no such task"):
        hf_bico.reproduce("2", ["eurosat"], folder=tmp_path)
    with pytest.raises(UsageError, match="source_of names 'rte', and table 1 has no such task"):
        hf_bico.reproduce("1", source_of={"rte": "user/model"}, folder=tmp_path)
    with pytest.raises(UsageError, match="table 5 has no line of the fine-tuned target"):
        hf_bico.reproduce("5", train_target=True, folder=tmp_path)
    with pytest.raises(UsageError, match="table B has no line of the fine-tuned target\nRemedy: leave target_of out"):
        hf_bico.reproduce("B", target_of={"mnist": "user/model"}, folder=tmp_path)
    for option in ({"alpha": 0.5}, {"n": 50}, {"completion": "drop"}):
        with pytest.raises(UsageError, match="got an unexpected keyword argument"):
            hf_bico.reproduce("1", folder=tmp_path, **option)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_said_before_anything_is_trained(hub: Hub, tmp_path: Path) -> None:
    publish_vision(hub, tmp_path, "1", ("eurosat", "mnist"))
    with pytest.raises(hf_bico.BicoError, match="user/mistyped"):
        hf_bico.reproduce("1", ["eurosat", "mnist"], source_of={"mnist": "user/mistyped"}, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copy_in_a_folder_has_no_configurations(tmp_path: Path) -> None:
    svhn = paper.task("svhn")
    assert (svhn.options()["config"], svhn.options("user/svhn")["config"]) == ("cropped_digits", "cropped_digits")
    assert svhn.options(str(tmp_path))["config"] is None


def test_a_line_for_every_number_of_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks of one data set, as GLUE's, have cells of the same key."""
    comparison = Comparison("a", "b", (Cell("nyu-mll/glue", "bico", 0.5, n=10, seed=0),))
    with show_comparison(off=False) as (_, show):
        for part in ("MNLI", "MNLI", "QNLI"):
            show(comparison, part)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["MNLI", "QNLI"]


def test_tasks_may_be_written_as_the_paper_does(tmp_path: Path) -> None:
    job = Job.of("1", ["MNIST", "EuroSAT"], tmp_path, source_of={"EuroSAT": "user/model"})
    given_to = [(one.name, job.source_of(one) == "user/model") for one in job.tasks]
    assert given_to == [
        ("eurosat", True),
        ("mnist", False),
    ]


def test_a_dry_run_downloads_no_weight(hub: Hub, tmp_path: Path) -> None:
    publish_vision(hub, tmp_path, "1", ("mnist",))
    code, out, err = finished(started(hub, tmp_path / "dry", "1", "--tasks", "mnist", "--dry-run"))
    assert code == 0, err
    assert "Downloads: models" in out
    assert "92.93" in out
    assert not list((tmp_path / "dry").rglob("*.safetensors"))
    assert not (tmp_path / "dry" / "reproduced").exists()


def test_downloads_are_those_of_the_models_that_are_given_too(hub: Hub, tmp_path: Path) -> None:
    publish_vision(hub, tmp_path, "1", ("mnist",))
    upload(hub, "user/mnist", tmp_path / "source")
    job = Job.of("1", ["mnist"], tmp_path / "out", source_of={"mnist": "user/mnist"})
    found = estimate(job, Settings())
    assert found.models["user/mnist"] == (tmp_path / "source" / "open_clip_model.safetensors").stat().st_size
    assert found.trainings == []


def test_the_tables_are_listed(hub: Hub, tmp_path: Path) -> None:
    code, out, _ = finished(started(hub, tmp_path / "list"))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:13]] == list(paper.TABLES)


def job(name: str, **options: Any) -> Job:
    return Job.of(name, None, "reproduced", **options)


def test_every_row_of_every_table_is_asked_for() -> None:
    for name in paper.TABLES:
        asked = {
            (method, sampling, size)
            for sampling, grid in job(name).comparisons()
            for method in grid["methods"]
            for size in grid.get("n", grid.get("per_class"))
        }
        for row in paper.table(name).rows:
            size = row.n or row.per_class
            if row.method in ("target", "source", "base", "target fine-tuned"):
                continue
            sampling = row.sampling or "random"
            assert any((row.method, sampling, one) in asked for one in paper.table(name).sizes if size in (None, one))
    [(_, few), (_, many)] = list(job("F").comparisons())
    assert few["per_class"] == [1, 2, 5]
    assert "gradfix" not in few["methods"], "the table has no such cell"
    assert many["per_class"] == [10, 20]
    assert {"gradfix", "theseus", "bico"} <= set(many["methods"])


def test_contradicting_averages_are_told_and_computed() -> None:
    shown = Reproduction(paper.table("H"), paper.table("H").tasks)
    text = shown.text()
    assert "* The paper prints an average of 70.29; its own cells have 72.96." in text
    assert "† The paper prints an average of 73.88; its own cells have 71.96." in text
    assert "72.96" in text.splitlines()[4]
    assert "70.29" not in text.splitlines()[4]
    assert "target, zero-shot*" in text
    assert "THESEUS†" in text


def test_a_line_shows_means_deviations_and_the_papers_own() -> None:
    cells = tuple(Cell("mnist", "bico", value, n=10, seed=seed) for seed, value in enumerate((0.5, 0.7)))
    found = Reproduction(paper.table("A"), ("mnist",), {("mnist", "random"): Comparison("s", "t", cells)})
    rows = found.rows()
    assert rows[0] == ["", "N", "", "MNIST", "average"]
    assert rows[3] == ["BiCo", "10", "here", "60.00 ± 14.14", "60.00"]
    assert rows[4] == ["", "", "paper", "79.55 ± 3.69", "79.55"]
    assert rows[5] == ["BiCo", "20", "here", "-", "-"]
    averages = Reproduction(paper.table("5"), ("mnist",)).rows()
    assert averages[2][-1] == "-", "the paper has only the average of all tasks"
