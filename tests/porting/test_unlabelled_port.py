"""Unlabelled samples from the command line to calibration, to the record, and from the record back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner, Result

import hf_bico
from hf_bico.cli.main import main
from hf_bico.data import loading as data_files
from hf_bico.data import remote_parquet
from hf_bico.errors import RecordError, SampleCountError, UnreadableSampleError, UsageError
from hf_bico.experiments.compare import run as compare_run
from hf_bico.experiments.compare.log import LOG_FILE
from hf_bico.experiments.compare.run import _identifying
from hf_bico.porting import port as port_module
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.planner import plan
from hf_bico.porting.publish import _repos_of
from hf_bico.reports.record import Record, UnlabelledRecord, read_record
from hf_bico.settings import Settings
from support.hub import Hub
from support.hub_scenes import DATA, SOURCE, TARGET, publish, upload
from support.language_toys import fine_tuned, sentences, write_decoder
from support.paper import PAPER, PAPER_WORDS
from support.scenes import Scene, make_scene, write_images

MORE = "user/more"
PICTURES = {"train": 48, "test": 20}
"""Rows of the scene's data set; those of `write_images` with other numbers are others."""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """The usual one, with more images, which have no labels, in the working folder."""
    made = make_scene(tmp_path)
    write_more(tmp_path / "more")
    monkeypatch.chdir(tmp_path)
    return made


def write_more(folder: Path, count: int = 9) -> Path:
    """Images that the data set does not have, without classes."""
    images = write_images(folder.with_name(f"{folder.name}-labelled"), size=24, train=count, test=0)
    folder.mkdir()
    for number, file in enumerate(sorted(images.rglob("*.png"))):
        file.rename(folder / f"{number:03}.png")
    shutil.rmtree(images)
    return folder


def words(*options: str) -> list[str]:
    named = ["tuned", "--base", "base", "--to", "target", "--data", "pictures"]
    return [*named, "-n", "9", "--device", "cpu", *PAPER_WORDS, *options]


def with_more(data: str) -> tuple[str, ...]:
    """Unlabelled samples, and a readout that reads them."""
    return "--unlabelled", data, "--readout"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def written(folder: Path, *options: str) -> Record:
    done = run("port", *words(*options), "-o", str(folder))
    assert done.exit_code == 0, done.output
    return read_record(folder)


def more_of(record: Record) -> UnlabelledRecord:
    assert record.data is not None
    assert record.data.unlabelled is not None
    return record.data.unlabelled


def port(source: str = SOURCE, target: str = TARGET, **options: Any) -> hf_bico.Ported:
    """With a readout, which reads unlabelled samples."""
    return hf_bico.port(source, target, **{"device": "cpu", "n": 9, "readout": True, **PAPER, **options})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """The calibrations of every port from here on."""
    made: list[Calibration] = []
    transfer = port_module.transfer

    def watched(method: Any, calibration: Calibration, *rest: Any, **more: Any) -> Any:
        made.append(calibration)
        return transfer(method, calibration, *rest, **more)

    monkeypatch.setattr(port_module, "transfer", watched)
    return made


# From the command line to calibration


def test_the_samples_reach_calibration_and_the_record(scene: Scene, tmp_path: Path, seen: list[Calibration]) -> None:
    record = written(tmp_path / "out", *with_more("more"), "--unlabelled-samples", "20")
    samples = seen[0].unlabelled
    assert samples is not None
    assert (len(samples), set(samples.labels)) == (20, {-1})
    more = more_of(record)
    assert more.indices == list(samples.indices)
    assert (more.id, more.split, more.n, more.columns) == ("more", "train", 20, {"image": "image"})
    assert (more.commit, more.config, more.parts) == (None, None, [])
    assert record.command is not None
    assert "--unlabelled more" in record.command
    assert "--unlabelled-samples 20" in record.command
    assert str(tmp_path) not in (tmp_path / "out" / "bico.json").read_text()


def test_without_unlabelled_data_nothing_is_recorded(scene: Scene, tmp_path: Path, seen: list[Calibration]) -> None:
    record = written(tmp_path / "out")
    assert seen[0].unlabelled is None
    assert "unlabelled" not in (tmp_path / "out" / "bico.json").read_text()
    assert record.data is not None
    assert record.data.unlabelled is None


def test_a_readout_reads_them(scene: Scene, tmp_path: Path) -> None:
    """It gives other weights; the seed's calibration and held-out samples, and what is carried, stay the same."""
    one, other = written(tmp_path / "one", "--readout"), written(tmp_path / "other", *with_more("more"))
    assert one.output is not None
    assert other.output is not None
    assert one.output.files.keys() == other.output.files.keys()
    assert one.output.files != other.output.files
    assert one.method.readout != other.method.readout
    assert one.data is not None
    assert other.data is not None
    assert replace(other.data, unlabelled=None) == one.data
    unread = [
        [entry for entry in record.evaluation if entry.model in ("target", "source", "ported, no readout")]
        for record in (one, other)
    ]
    assert len(unread[0]) == 3
    assert unread[0] == unread[1]


@pytest.mark.parametrize(
    "options",
    [(), ("--method", "naive"), ("--method", "train"), ("--method", "fewshot"), ("--polish", "--polish-on", "labels")],
)
def test_a_port_that_reads_none_of_them_is_refused(scene: Scene, tmp_path: Path, options: tuple[str, ...]) -> None:
    refused = run("port", *words("--unlabelled", "more", *options), "-o", str(tmp_path / "out"))
    assert refused.exit_code == 2
    cause, remedy = refused.stderr.splitlines()
    assert cause.startswith("Error: --unlabelled is read by a readout and by what learns the source's predictions")
    assert remedy.startswith("Remedy: add --polish or --readout")
    assert not (tmp_path / "out").exists()


def test_of_the_same_data_what_is_measured_on_is_left_out(scene: Scene, tmp_path: Path) -> None:
    """Here of one split: 9 samples to calibrate on, and 30 to measure on."""
    shutil.rmtree(scene.data)
    write_images(scene.data, train=12, test=0)
    record = written(tmp_path / "out", *with_more("pictures"), "--eval-samples", "30")
    assert record.data is not None
    assert record.evaluation[0].n == 30
    assert more_of(record).n == 48 - 9 - 30
    assert not set(more_of(record).indices) & set(record.data.indices)
    unmeasured = written(tmp_path / "unmeasured", *with_more("pictures"), "--eval-samples", "30", "--no-eval")
    assert more_of(unmeasured).n == 48 - 9, "what nobody measures on may be used"
    refused = run("port", *words(*with_more("pictures")), "-o", str(tmp_path / "none"))
    assert refused.exit_code == 1
    assert "is left as an unlabelled sample" in refused.stderr
    assert hf_bico.rerun(tmp_path / "out", device="cpu").differences == []
    assert hf_bico.rerun(tmp_path / "unmeasured", device="cpu").differences == []


def test_rows_from_python_cannot_be_repeated(scene: Scene, tmp_path: Path, seen: list[Calibration]) -> None:
    import datasets

    rows = datasets.load_dataset("imagefolder", data_dir="more", split="train")
    ported = port("tuned", "target", base="base", data="pictures", unlabelled=rows)
    assert seen[0].unlabelled is not None
    assert ported.record.command is None
    assert more_of(ported.record).id == "data"
    with pytest.raises(RecordError, match="passed from Python"):
        hf_bico.rerun(ported.save(tmp_path / "out"), device="cpu")


def test_texts_are_checked_as_calibration_samples_are(tmp_path: Path, seen: list[Calibration]) -> None:
    base, target = (
        write_decoder(tmp_path / "base", "llama"),
        write_decoder(tmp_path / "target", "llama", seed=1, width=24),
    )
    tuned = fine_tuned(base, tmp_path / "tuned", transformers.AutoModelForCausalLM)
    texts = [{"text": text} for text in sentences(12)]
    more = [{"text": text} for text in sentences(6, seed=9)]
    training = {"method": "distill", "train_steps": 2, "learning_rate": 1e-3}
    options = {"base": base, "data": texts, "n": 6, "device": "cpu", **training}
    hf_bico.port(tuned, target, **options, unlabelled=more)
    assert seen[0].unlabelled is not None
    read = {item.first for item in next(seen[0].unlabelled.batches(9))[0]}
    assert read
    assert read <= {row["text"] for row in more}
    with pytest.raises(UnreadableSampleError, match="has no text in column 'text'"):
        hf_bico.port(tuned, target, **options, unlabelled=[*more, {"text": None}])
    with pytest.raises(hf_bico.errors.BicoError, match="does not know"):
        hf_bico.port(tuned, target, **options, unlabelled=[{"text": "語" * 9}] * 3)


# The plan


def test_a_plan_names_and_pins_the_data(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "scene")
    commit = upload(hub, MORE, write_more(tmp_path / "more"), type="dataset", private=True)
    planned = plan(SOURCE, TARGET, unlabelled=MORE)
    assert planned.lineage.unlabelled_repo is not None
    assert (str(planned.lineage.unlabelled), planned.lineage.unlabelled_repo.commit) == (MORE, commit)
    assert ("unlabelled", f"{MORE} at {commit[:12]}") in planned.rows()
    assert planned.as_dict()["unlabelled"] == {"id": MORE, "commit": commit}
    assert planned.lineage.restricted == [MORE], "what is made from it is not public"
    assert plan(SOURCE, TARGET, unlabelled=tmp_path / "more").lineage.restricted == ["a local folder"]
    usual = plan(SOURCE, TARGET)
    assert "unlabelled" not in {subject for subject, _ in usual.rows()} | set(usual.as_dict())
    shown = run("port", SOURCE, "--to", TARGET, "--unlabelled", MORE, "--readout", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert f"--unlabelled {MORE}" in shown.stdout
    missing = run("port", SOURCE, "--to", TARGET, "--unlabelled", "user/nothing")
    assert missing.exit_code == 1
    assert "user/nothing" in missing.stderr


# From the record back


def test_folders_are_repeated_bit_for_bit(scene: Scene, tmp_path: Path, seen: list[Calibration]) -> None:
    written(tmp_path / "out", *with_more("more"), "--unlabelled-samples", "20", "--seed", "3")
    again = hf_bico.rerun("out", device="cpu", folder=tmp_path / "again")
    assert (again.same, again.differences) == (True, [])
    first, second = (calibration.unlabelled for calibration in seen)
    assert first is not None
    assert second is not None
    assert first.indices == second.indices
    assert more_of(read_record(tmp_path / "again")) == more_of(read_record(tmp_path / "out"))


@pytest.mark.parametrize("large", [False, True])
def test_repos_are_repeated_bit_for_bit(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """Also of a data set that is read in part, and that has fewer rows than were asked for; at the recorded commit."""
    publish(hub, tmp_path / "scene")
    if large:
        monkeypatch.setattr(data_files, "SMALL_REPO", 0)
        monkeypatch.setattr(remote_parquet, "MIN_BUDGET", 1_000)
    files = {
        file.relative_to(tmp_path / "scene" / "pictures").as_posix(): file.read_bytes()
        for file in sorted((tmp_path / "scene" / "pictures").rglob("*.parquet"))
    }
    repo = hub.create(MORE, type="dataset")
    commit = repo.commit(files)
    folder = port(unlabelled=MORE).save(tmp_path / "out")
    more = more_of(read_record(folder))
    assert (more.id, more.commit, more.n) == (MORE, commit, PICTURES["train"] - 9)
    assert bool(more.parts) == large
    repo.commit(dict.fromkeys(files, b"something else"))
    again = hf_bico.rerun(folder, device="cpu", folder=tmp_path / "again")
    assert (again.same, again.differences) == (True, [])
    assert more_of(read_record(tmp_path / "again")) == more


def test_other_samples_are_told(scene: Scene, tmp_path: Path) -> None:
    written(tmp_path / "out", *with_more("more"))
    (tmp_path / "more" / "000.png").unlink()
    assert hf_bico.rerun("out", device="cpu").differences == ["the unlabelled samples differ"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record["data"]["unlabelled"].update(n=10**12),
            "1,000,000,000,000 unlabelled samples and lists 20",
        ),
        (lambda record: record["data"]["unlabelled"].update(n=-1), "'n' is -1"),
        (lambda record: record["data"].update(unlabelled="user/x"), "'unlabelled' is 'user/x'"),
        (lambda record: record["settings"].update(unlabelled_samples=10**9), "1,000,000,000 as unlabelled_samples"),
        (lambda record: record["settings"].update(unlabelled_samples="20"), "unlabelled_samples is 20"),
    ],
)
def test_a_record_cannot_ask_for_work_without_bound(scene: Scene, tmp_path: Path, change: Any, message: str) -> None:
    written(tmp_path / "out", *with_more("more"), "--unlabelled-samples", "20")
    record = json.loads((tmp_path / "out" / "bico.json").read_text())
    change(record)
    (tmp_path / "out" / "bico.json").write_text(json.dumps(record))
    with pytest.raises(RecordError) as caught:
        hf_bico.rerun("out", device="cpu")
    assert message in str(caught.value)


def test_a_record_of_the_hub_reads_no_local_folder(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path / "scene")
    upload(hub, MORE, write_more(tmp_path / "more"), type="dataset")
    saved = port(unlabelled=MORE, evaluate=False).save(tmp_path / "out")
    record = json.loads((saved / "bico.json").read_text())
    record["data"]["unlabelled"]["id"] = "more"
    del record["data"]["unlabelled"]["commit"]
    (saved / "bico.json").write_text(json.dumps(record))
    upload(hub, "user/ported", saved)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match="'more', a folder on its author's machine"):
        hf_bico.rerun("user/ported", device="cpu")


# Cards and pushes


def test_a_card_names_the_last_part_of_a_local_folder(scene: Scene, tmp_path: Path) -> None:
    shutil.copytree("more", "secret/other-pictures")
    written(tmp_path / "out", *with_more("secret/other-pictures"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--unlabelled other-pictures" in card
    assert "secret" not in card


def test_a_card_names_a_repo(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "scene")
    upload(hub, MORE, write_more(tmp_path / "more"), type="dataset")
    folder = port(unlabelled=MORE).save(tmp_path / "out")
    assert f"--unlabelled {MORE}" in (folder / "README.md").read_text()
    assert set(_repos_of(read_record(folder))) >= {("dataset", DATA), ("dataset", MORE)}


def test_what_was_used_is_not_measured_on_later(scene: Scene, tmp_path: Path) -> None:
    """`eval` leaves out the unlabelled samples as it leaves out the calibration samples."""
    record = written(tmp_path / "out", *with_more("pictures"), "--unlabelled-samples", "30")
    assert more_of(record).n == 30
    measured = hf_bico.evaluate_model(tmp_path / "out", data="pictures", split="train", device="cpu")
    assert measured.n == PICTURES["train"] - 9 - 30


# Comparisons


def compared(*options: str, folder: str = "compared") -> Result:
    named = ["tuned", "--base", "base", "--to", "target", "--data", "pictures", "--methods", "theseus@1"]
    return run("compare", *named, "-n", "8,9", "--seeds", "2", "--device", "cpu", "-o", folder, *options)


def identity(folder: str = "compared") -> dict[str, Any]:
    first, *_ = (Path(folder) / LOG_FILE).read_text().splitlines()
    known: dict[str, Any] = json.loads(first)["identity"]
    return known


def test_each_draw_of_a_comparison_has_its_own(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    of = compare_run._Work.of.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, *arguments: Any) -> Any:
        made.append(of(cls, *arguments))
        return made[-1]

    monkeypatch.setattr(compare_run._Work, "of", classmethod(watched))
    done = compared("--unlabelled", "pictures", "--unlabelled-samples", "12", "--eval-samples", "5")
    assert done.exit_code == 0, done.output
    (data,) = made[0].data_sets
    assert len(data.draws) == 4
    for drawn in data.draws.values():
        assert len(drawn.unlabelled.samples) == 12
        assert not set(drawn.unlabelled.samples.indices) & set(drawn.samples.indices)
    samples = [drawn.unlabelled.samples.indices for drawn in data.draws.values()]
    assert len(set(samples)) == 4


def test_a_comparison_leaves_out_what_it_measures_on(scene: Scene) -> None:
    """Without a test split, half of the other rows are measured on."""
    shutil.rmtree(scene.data)
    write_images(scene.data, train=12, test=0)
    done = compared("--unlabelled", "pictures", "--eval-samples", "10", "--json")
    assert done.exit_code == 0, done.output
    options = {"base": "base", "data": "pictures", "methods": ["theseus@1"], "n": 24, "seeds": 1, "device": "cpu"}
    with pytest.raises(SampleCountError, match="is left as an unlabelled sample"):
        hf_bico.compare("tuned", "target", **options, unlabelled="pictures")


def test_unlabelled_data_identifies_a_comparison_only_where_it_is_given(scene: Scene, tmp_path: Path) -> None:
    assert compared().exit_code == 0
    assert "unlabelled" not in json.dumps(identity())
    assert compared("--unlabelled-samples", "1000").exit_code == 0, "a log of earlier versions stays valid"
    refused = compared("--unlabelled", "more")
    assert refused.exit_code == 2
    assert "unlabelled.id was not given, now" in refused.stderr

    assert compared("--unlabelled", "more", folder="with").exit_code == 0
    about = identity("with")["unlabelled"]
    assert (about["id"], about["split"], about["rows"]) == ("more", "train", 36)
    assert str(tmp_path) not in json.dumps(about)
    assert compared("--unlabelled", "more", folder="with").exit_code == 0
    assert compared("--unlabelled", "more", "--seeds", "3", folder="with").exit_code == 0, "more draws go on"
    for options in ((), ("--unlabelled", "more", "--unlabelled-samples", "7"), ("--unlabelled", "pictures")):
        other = compared(*options, folder="with")
        assert other.exit_code == 2, other.output
        assert "holds another comparison" in other.stderr
    shutil.copy("more/001.png", "more/000.png")
    changed = compared("--unlabelled", "more", folder="with")
    assert "unlabelled.content was" in changed.stderr


def test_the_number_identifies_where_it_is_not_the_default() -> None:
    assert "unlabelled_samples" not in _identifying(Settings())
    assert _identifying(Settings(unlabelled_samples=7))["unlabelled_samples"] == 7
    with pytest.raises(UsageError, match="--unlabelled-samples is 0"):
        Settings(unlabelled_samples=0)
