"""Repeating a port from its record alone, whatever the choices were, and what is said when that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file

import hf_bico
from hf_bico.alignment import memory
from hf_bico.cli.main import main
from hf_bico.errors import ImplausibleTaskVectorError, RecordError, RepoError, RepoNotFoundError
from hf_bico.hub.push import PushOptions
from hf_bico.hub.references import recorded_folder
from hf_bico.porting import rerun
from hf_bico.porting.publish import push_folder
from hf_bico.settings import Settings
from support.hub import Hub
from support.hub_scenes import BASE, DATA, SOURCE, TARGET, publish
from support.paper import PAPER

REPO = "user/vit-b16-plus-eurosat"
ANY = PushOptions(force=True, private=False)


def port(source: str = SOURCE, target: str = TARGET, **options: Any) -> hf_bico.Ported:
    return hf_bico.port(source, target, **{"device": "cpu", **PAPER, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"n": 9, "seed": 7, "templates": ["a drawing of {}.", "{}"]},
        {"per_class": 3, "seed": 2, "class_names": ["uno", "tres", "dos", "zero"]},
        {
            **{"n": 9, "split": "test", "batch_size": 2, "dtype": "float64"},
            **{"evaluate": False, "image_column": "image", "label_column": "label"},
        },
        {"method": "bico-fisher", "per_class": 2, "sampling": "one-class"},
        {"method": "gradient-only", "n": 9, "augment": 2, "layers": [1, 0], "control": True, "evaluation": "both"},
        {
            "method": "finetune",
            "n": 9,
            "learning_rate": 0.01,
            "train_steps": 2,
            "train_batch": 5,
            "warmup": 1,
            "seed": 4,
        },
    ],
    ids=lambda options: " ".join(options),
)
def test_choices_of_repos_are_in_the_record(hub: Hub, tmp_path: Path, options: dict[str, Any]) -> None:
    """Those that the command line does not have, and some together; each by itself is in `test_port_options`."""
    publish(hub, tmp_path / "scene")
    folder = port(**options).save(tmp_path / "out")
    again = hf_bico.rerun(folder, device="cpu")
    assert again.same
    assert again.differences == []


@pytest.mark.parametrize("asked", [None, 5])
def test_batches_are_repeated_as_they_were(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None
) -> None:
    """Calibration chooses its own; the rest has those that were asked for, or the usual ones."""
    publish(hub, tmp_path / "scene")
    monkeypatch.setattr(memory, "MOST_SAMPLES", 2)
    seen: list[Settings] = []
    run_port = rerun.run_port

    def watched(planned: Any, settings: Settings, *rest: Any) -> Any:
        seen.append(settings)
        return run_port(planned, settings, *rest)

    ported = port(n=9, readout=True, batch_size=asked)
    monkeypatch.setattr(rerun, "run_port", watched)
    assert hf_bico.rerun(ported.save(tmp_path / "out"), device="cpu").same
    assert [(one.batch_size, one.calibration_batch) for one in seen] == [(asked, asked or 2)]


def test_each_of_these_choices_changes_the_weights(hub: Hub, tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    publish(hub, tmp_path / "scene")
    choices: list[dict[str, Any]] = [
        *({}, {"seed": 7}, {"templates": ["{}"]}, {"split": "test"}, {"class_names": ["uno", "tres", "dos", "zero"]}),
        *({"dtype": "float64"}, {"method": "gradient-only", "augment": 2}, {"layers": [1, 0]}),
    ]
    digests = set()
    for index, options in enumerate(choices):
        ported = port(evaluate=False, **{"n": 9, **options})
        ported.save(tmp_path / str(index))
        digests.add(json.loads((tmp_path / str(index) / "bico.json").read_text())["output"]["files"].popitem()[1])
    assert len(digests) == len(choices)


@pytest.mark.parametrize("format_", ["full", "delta"])
def test_a_repo_is_repeated_at_the_commits_of_its_record(hub: Hub, tmp_path: Path, format_: str) -> None:
    scene = publish(hub, tmp_path / "scene")
    ported = port(n=9)
    push_folder(ported.save(tmp_path / "out", format_, repo=REPO), REPO, ANY)
    # everything moves on
    weights = "open_clip_model.safetensors"
    hub.repo(TARGET).commit({weights: (scene.target / weights).read_bytes()[:-4] + b"\0\0\0\0"})
    hub.repo(BASE).commit({weights: (scene.tuned / weights).read_bytes()})
    hub.repo(SOURCE).commit({weights: (scene.base / weights).read_bytes(), "README.md": "# other"})
    train, test = (next(scene.data.glob(f"data/{split}-*")) for split in ("train", "test"))
    hub.repo(DATA, "dataset").commit({f"data/{train.name}": test.read_bytes()})
    again = hf_bico.rerun(REPO, device="cpu")
    assert (again.same, again.differences) == (True, [])


def test_a_repeat_offline_is_as_good(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path / "scene")
    ported = port(n=9)
    push_folder(ported.save(tmp_path / "out", repo=REPO), REPO, ANY)
    assert hf_bico.rerun(REPO, device="cpu").same
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    again = hf_bico.rerun(REPO, device="cpu")
    assert (again.same, again.differences) == (True, [])


def test_weights_that_were_replaced_are_noticed(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "scene")
    ported = port(n=9)
    push_folder(ported.save(tmp_path / "out", repo=REPO), REPO, ANY)
    hub.repo(REPO).commit({"open_clip_model.safetensors": b"something else"})
    again = hf_bico.rerun(REPO, device="cpu")
    assert not again.same
    assert again.files == {"open_clip_model.safetensors": True}
    assert again.replaced == ["open_clip_model.safetensors"]


def test_folders_are_looked_for_here_and_held_against_the_record(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = publish(hub, tmp_path)
    monkeypatch.chdir(tmp_path)
    ported = port("tuned", "target", base="base", data="pictures", n=9)
    ported.save("out")
    assert hf_bico.rerun("out", device="cpu").same
    weights = "open_clip_model.safetensors"
    (scene.tuned / weights).write_bytes((scene.tuned / weights).read_bytes()[:-4] + b"\0\0\0\0")
    changed = hf_bico.rerun("out", device="cpu")
    assert "the fine-tuned model's weights differ" in changed.differences


def test_a_recorded_name_is_no_pattern_and_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "models" / "tuned").mkdir(parents=True)
    (tmp_path / "beside" / "tuned").mkdir(parents=True)
    (tmp_path / "here" / ".backup" / "tuned").mkdir(parents=True)
    (tmp_path / "here" / "notes").mkdir()
    (tmp_path / "here" / "notes" / "tuned").write_text("no folder")
    monkeypatch.chdir(tmp_path / "here")
    assert recorded_folder("tuned") == Path("models/tuned")
    for hostile in (
        "t*",
        "**",
        "*/tuned",
        "[t]uned",
        "../beside/*",
        "../beside/tuned",
        "models/tuned",
        "..",
        ".",
        "",
        "x" * 300,
    ):
        with pytest.raises(RecordError, match="which is not here"):
            recorded_folder(hostile)


def test_folders_may_lie_one_folder_down(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    publish(hub, tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    models = {"target": "models/target", "base": "models/base", "data": "models/pictures"}
    out = port("models/tuned", **models, n=9).save("out")
    assert hf_bico.rerun(out, device="cpu").same
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "tuned").symlink_to(tmp_path / "models" / "tuned")
    with pytest.raises(RecordError, match="there are 'copies/tuned' and 'models/tuned'"):
        hf_bico.rerun(out, device="cpu")
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(RecordError, match="the local folder 'tuned', which is not here"):
        hf_bico.rerun(tmp_path / "out", device="cpu")


def test_what_was_passed_from_python_cannot_be_repeated(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path / "scene")
    import datasets

    rows = datasets.load_dataset(str(scene.data))
    folder = port(data=rows, n=9).save(tmp_path / "out")
    with pytest.raises(RecordError, match="passed from Python"):
        hf_bico.rerun(folder)
    with pytest.raises(RepoNotFoundError):
        hf_bico.rerun(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: [], "schema None"),
        (lambda record: {**record, "schema": 99}, "schema 99"),
        (lambda record: {**record, "run": {**record["run"], "batch_size": 0}}, "calibration_batch is 0"),
        (lambda record: {**record, "run": {**record["run"], "seconds": "x"}}, "'seconds' is 'x'"),
        (lambda record: {**record, "evaluation": [{"model": 3}]}, "'model' is '3'"),
        (lambda record: {**record, "method": {**record["method"], "alpha": "1"}}, "'alpha' is '1'"),
        (lambda record: {**record, "method": {**record["method"], "alpha": None}}, "alpha'? is '?None"),
        (lambda record: {**record, "method": {**record["method"], "alpha": [1.0, 0.5]}}, r"alpha is \[1.0, 0.5\]"),
        (lambda record: {**record, "method": {**record["method"], "bold": True}}, "bold=True lets the samples choose"),
        (lambda record: {**record, "source": "org/x"}, "'source' is 'org/x'"),
        (lambda record: {key: value for key, value in record.items() if key != "target"}, "target"),
        (lambda record: {key: value for key, value in record.items() if key != "output"}, "does not say what"),
    ],
)
def test_a_record_that_was_tampered_with_is_refused(hub: Hub, tmp_path: Path, change: Any, message: str) -> None:
    publish(hub, tmp_path / "scene")
    folder = port(n=9).save(tmp_path / "out")
    record = json.loads((folder / "bico.json").read_text())
    (folder / "bico.json").write_text(json.dumps(change(record)))
    with pytest.raises(RecordError, match=message):
        hf_bico.rerun(folder, device="cpu")


# A stranger's record


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("data", "max_download"), 2**62, "allow it with max_download=4611686018427387904"),
        (("data", "n"), 10**12, "speaks of 1,000,000,000,000 samples and lists 9"),
        (("data", "per_class"), 10**12, "1,000,000,000,000 of each class, and lists 9"),
        (("data", "indices"), [], "speaks of 9 samples and lists 0"),
        (("data", "max_length"), 10**12, "asks for 1,000,000,000,000 as max_length"),
        (("data", "class_names"), ["a"] * 900_000, "asks for 2,700,000 as class_names"),
        (("method", "steps"), 10**9, "asks for 1,000,000,000 as path_steps"),
        (("method", "copies"), 10**9, "asks for 1,000,000,000 as augment"),
        (("run", "batch_size"), 999_999_999, "asks for 999,999,999 as calibration_batch"),
        (("command",), "hf-bico port a --batch-size 999999999", "asks for 999,999,999 as batch_size"),
        (("output", "rank"), 10**9, "asks for 1,000,000,000 as rank"),
        (("evaluation", 0, "n"), 10**12, "asks for 1,000,000,000,000 as eval_samples"),
        (("method", "training", "steps"), 10**9, "asks for 1,000,000,000 as train_steps"),
        (("method", "training", "batch"), 10**9, "asks for 1,000,000,000 as train_batch"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_record_cannot_ask_for_work_without_bound(
    hub: Hub, tmp_path: Path, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    publish(hub, tmp_path / "scene")
    folder = port(n=9, templates=["{}", "a {}.", "the {}."]).save(tmp_path / "out")
    record = json.loads((folder / "bico.json").read_text())
    if "training" in path:
        training = {"learning_rate": 0.1, "weight_decay": 0.1, "steps": 2, "samples": 9, "batch": 5, "warmup": 1}
        record["method"] |= {"name": "finetune", "training": training}
    if path[-1] == "rank":
        record["output"]["format"] = "adapter"
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "bico.json").write_text(json.dumps(record))
    hub.clear_log()
    with pytest.raises(RecordError) as caught:
        hf_bico.rerun(folder, device="cpu")
    assert message in str(caught.value)
    assert hub.log == [], "it is refused before any request"


def test_a_larger_download_than_usual_is_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "scene")
    folder = port(n=9, max_download=3_000_000_000).save(tmp_path / "out")
    with pytest.raises(RecordError, match=r"up to 3 GB of its data set, and max_download is 2 GB"):
        hf_bico.rerun(folder, device="cpu")
    assert hf_bico.rerun(folder, device="cpu", max_download="3GB").same


def test_what_force_let_through_is_not_let_through_again_unasked(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path / "scene")
    weights = "open_clip_model.safetensors"
    state = load_file(scene.tuned / weights)
    generator = torch.Generator().manual_seed(0)
    towers = {name: tensor for name, tensor in state.items() if name.startswith("visual.")}
    alien = {name: tensor.std() * torch.randn(tensor.shape, generator=generator) for name, tensor in towers.items()}
    save_file(state | alien, scene.tuned / weights)
    hub.repo(SOURCE).commit({weights: (scene.tuned / weights).read_bytes()})
    folder = port(n=9, force=True, evaluate=False).save(tmp_path / "out")
    with pytest.raises(ImplausibleTaskVectorError, match="continue with force=True"):
        hf_bico.rerun(folder, device="cpu")
    assert hf_bico.rerun(folder, device="cpu", force=True).same
    refused = CliRunner().invoke(main, ["rerun", str(folder), "--device", "cpu"])
    assert refused.exit_code == 1
    assert "continue with --force" in refused.stderr
    assert CliRunner().invoke(main, ["rerun", str(folder), "--device", "cpu", "--force"]).exit_code == 0


@pytest.mark.parametrize("part", ["source", "base", "target", "data"])
@pytest.mark.parametrize("where", ["repo", "snapshot", "snapshot of a repo that is gone"])
def test_a_record_of_the_hub_reads_no_local_folder(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, where: str
) -> None:
    """Not even one that has the right name and the right content."""
    publish(hub, tmp_path)
    saved = port(n=9, evaluate=False).save(tmp_path / "out", repo=REPO)
    push_folder(saved, REPO, ANY)
    record = json.loads((saved / "bico.json").read_text())
    entry = record["source"]["base"] if part == "base" else record[part]
    entry["id"] = {"source": "tuned", "data": "pictures"}.get(part, part)
    del entry["commit"]
    hub.repo(REPO).commit({"bico.json": json.dumps(record)})
    monkeypatch.chdir(tmp_path)
    place = REPO if where == "repo" else snapshot_download(REPO)
    if where == "snapshot of a repo that is gone":
        del hub.repos["model", REPO]
    with pytest.raises(RecordError, match=f"'{entry['id']}', a folder on its author's machine"):
        hf_bico.rerun(place, device="cpu")
    if part == "data":
        with pytest.raises(RecordError, match="'pictures', a folder on its author's machine"):
            hf_bico.evaluate_model(place, device="cpu")


@pytest.mark.parametrize("id_", ["tuned", "./tuned", "local-dir:tuned", "../tuned"])
def test_a_recorded_repo_is_no_folder_that_is_called_alike(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, id_: str
) -> None:
    scene = publish(hub, tmp_path)
    commit = "ab" * 20
    scene.tuned.rename(tmp_path / f"tuned@{commit}")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path if id_ != "../tuned" else tmp_path / "here")
    folder = port(n=9, evaluate=False).save(tmp_path / "out")
    record = json.loads((folder / "bico.json").read_text())
    record["source"] |= {"id": id_, "commit": commit}
    (folder / "bico.json").write_text(json.dumps(record))
    with pytest.raises(RepoError if id_ == "tuned" else RecordError):
        hf_bico.rerun(folder, device="cpu")
