"""Results on benchmarks of the Hub: written in its own format, pushed, and read back by its client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi, parse_eval_result_entries

import hf_bico
from hf_bico.hub.benchmarks import benchmark_task
from hf_bico.hub.client import Hub as Client
from hf_bico.hub.push import PushOptions
from hf_bico.hub.references import HubReference
from hf_bico.porting.publish import push_folder
from hf_bico.reports.model_cards import write_card
from hf_bico.reports.record import Record
from support.hub import Fault, Hub
from support.paper import PAPER
from support.records import COMMITS, DATA, REPO, a_decoder_record, a_record, measured

pytestmark = pytest.mark.quick
FILE = ".eval_results/eurosat.yaml"
TASKS = [{"id": "rgb-test", "config": "rgb", "split": "test"}, {"id": "plain", "config": "default", "split": "test"}]


def of_benchmark(record: Record, task: str | None = "rgb-test") -> Record:
    assert record.data is not None
    return replace(record, data=replace(record.data, benchmark=task))


def test_the_client_of_the_hub_reads_the_file(tmp_path: Path) -> None:
    write_card(of_benchmark(a_record()), tmp_path)
    (entry,) = parse_eval_result_entries(yaml.safe_load((tmp_path / FILE).read_text()))
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == (DATA, "rgb-test", COMMITS[DATA])
    assert (entry.value, entry.date) == (0.6, "2026-01-01T00:00:00+00:00")
    assert (entry.source_url, entry.source_name) == (f"https://huggingface.co/{REPO}", "Model card")
    assert entry.notes == "accuracy from 0 to 1, on 1,000 samples of split test; made by hf-bico"


@pytest.mark.parametrize(
    "record",
    [
        of_benchmark(a_record(), None),
        of_benchmark(a_decoder_record()),
        of_benchmark(a_record(evaluation=[])),
        of_benchmark(a_record(evaluation=measured(probe_target=0.5, probe_ported=0.6))),
        of_benchmark(a_record(evaluation=[replace(entry, data="x/y") for entry in a_record().evaluation])),
    ],
)
def test_only_an_accuracy_on_a_benchmark_is_written(record: Record, tmp_path: Path) -> None:
    write_card(record, tmp_path)
    assert not (tmp_path / ".eval_results").exists()


# Which task it is


def a_data_set(hub: Hub, tasks: Any = TASKS, benchmark: bool = True) -> Client:
    repo = hub.create(DATA, type="dataset")
    repo.commit({"data.txt": "x"} if tasks is None else {"eval.yaml": yaml.safe_dump({"name": "x", "tasks": tasks})})
    repo.benchmark = benchmark
    return Client()


def task_of(client: Client, config: str | None, split: str) -> str | None:
    return benchmark_task(client.repo(HubReference(DATA), "the data set", "dataset"), config, split)


@pytest.mark.parametrize(
    ("config", "split", "task"),
    [("rgb", "test", "rgb-test"), (None, "test", "plain"), ("rgb", "train", None), ("other", "test", None)],
)
def test_the_task_of_a_split(config: str | None, split: str, task: str | None, hub: Hub) -> None:
    assert task_of(a_data_set(hub), config, split) == task


@pytest.mark.parametrize(
    "tasks", [None, [], "x", [7, {"id": 7}], [{"config": "rgb", "split": "test"}], [TASKS[0], {**TASKS[0], "id": "x"}]]
)
def test_without_exactly_one_task_there_is_none(tasks: Any, hub: Hub) -> None:
    assert task_of(a_data_set(hub, tasks), "rgb", "test") is None


def test_a_data_set_that_the_hub_does_not_list_is_no_benchmark(hub: Hub) -> None:
    assert task_of(a_data_set(hub, benchmark=False), "rgb", "test") is None
    assert [entry.path for entry in hub.log if "benchmark" in str(entry)], "the Hub was asked"


def test_a_data_set_without_tasks_asks_nothing_more_of_the_hub(hub: Hub) -> None:
    client = a_data_set(hub, None)
    client.repo(HubReference(DATA), "the data set", "dataset")
    before = len(hub.log)
    assert task_of(client, "rgb", "test") is None
    assert len(hub.log) == before


def test_a_hub_that_does_not_answer_costs_no_port(hub: Hub) -> None:
    client = a_data_set(hub)
    client.repo(HubReference(DATA), "the data set", "dataset")
    hub.inject(Fault(path=r"/api/datasets\?", status=404, times=99))
    assert task_of(client, "rgb", "test") is None


# The whole way


def test_a_port_measured_on_a_benchmark_brings_its_result_to_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    from support.toys import WRITERS, Toy, random_state

    hub.add_user("user", "hf_user")
    monkeypatch.setenv("HF_TOKEN", "hf_user")
    for split in ("train", "test"):
        for number in range(12):
            place = tmp_path / "data" / split / ("zero", "one")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (number * 20, 90, 60 if split == "test" else 0)).save(place / f"{number}.png")
    data = hub.create("user/pets", type="dataset")
    data.commit_folder(tmp_path / "data")
    data.commit({"eval.yaml": yaml.safe_dump({"tasks": [{"id": "pets", "config": "default", "split": "test"}]})})
    data.benchmark = True
    models = {"base": 0, "target": 1, "tuned": 2}
    base, target, tuned = (
        WRITERS["open_clip"](tmp_path / name, Toy(), random_state(Toy(), models[name])) for name in models
    )
    ported = hf_bico.port(tuned, to=target, base=base, data="user/pets", n=6, force=True, **PAPER)
    assert ported.record.data is not None
    assert ported.record.data.benchmark == "pets"
    folder = ported.save(tmp_path / "out")
    pushed = push_folder(folder, "user/on-target", PushOptions(force=True, private=False), Client())
    info = HfApi().model_info("user/on-target", expand=["evalResults"])
    assert info.eval_results is not None
    (entry,) = info.eval_results
    assert (entry.dataset_id, entry.task_id) == ("user/pets", "pets")
    assert entry.value == pytest.approx(ported.record.value("ported"), abs=1e-4)
    assert entry.source_url == "https://huggingface.co/user/on-target"
    again = push_folder(folder, "user/on-target", PushOptions(force=True, private=False), Client())
    assert (pushed.changed, again.changed) == (True, False)
