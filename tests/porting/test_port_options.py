"""Every way to port, from the command line to the record, and from the record back to the same weights."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner, Result

from hf_bico.cli.main import main
from hf_bico.settings import AUTO, METHODS, Settings
from support.paper import PAPER_WORDS
from support.scenes import SOURCE, Scene, make_scene, write_images
from support.toys import CLASS_NAMES, WRITERS, Toy, random_state

DEEP = Toy(width=24, heads=3, blocks=3)
TRAINING = ["--learning-rate", "0.002", "--weight-decay", "0.3"]
BRIEFLY = ["--train-steps", "3", "--train-batch", "5"]
STEPS = [*BRIEFLY, "--warmup", "1"]
TRAINERS = ("fewshot", "finetune", "train", "distill")
SAMPLES = ["-n", "9", "--device", "cpu"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """The usual one, with a target of the source's architecture, a deeper one, and images without labels."""
    made = make_scene(tmp_path_factory.mktemp("scene"))
    WRITERS["open_clip"](made.folder / "twin", SOURCE, random_state(SOURCE, 3))
    WRITERS["open_clip"](made.folder / "deep", DEEP, random_state(DEEP, 4))
    shutil.copytree(write_images(made.folder / "images") / "train" / "one", made.folder / "plain")
    (made.folder / "names").write_text("\n".join(CLASS_NAMES))
    return made


@pytest.fixture(scope="module")
def written() -> dict[str, tuple[str, ...]]:
    """Digests of the weights that were written, by what was asked for."""
    return {}


@pytest.fixture(autouse=True)
def _here(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the models, where the command of a record works as it stands."""
    monkeypatch.chdir(scene.folder)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def words(*options: str, target: str = "target", data: str | None = "pictures") -> list[str]:
    named = [] if data is None else ["--data", data]
    return ["tuned", "--base", "base", "--to", target, *named, *SAMPLES, *PAPER_WORDS, *options]


def ported(folder: Path, *arguments: str) -> dict[str, Any]:
    """The record of a port."""
    result = run("port", *arguments, "-o", str(folder), "--json")
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)["record"]
    return record


def digests_of(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple(record["output"]["files"].values())


def at(record: dict[str, Any], path: str) -> Any:
    """None where nothing is recorded."""
    value: Any = record
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return value


def models(record: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(entry["model"], entry.get("protocol")) for entry in record.get("evaluation", [])]


USUAL = [("target", None), ("ported", None), ("source", None)]
PROBED = [(name, "probe") for name, _ in USUAL]
BOTH = [pair for pairs in zip(USUAL, PROBED, strict=True) for pair in pairs]

METHOD_OPTIONS = {
    "transfusion": {"target": "twin"},
    "gradfix": {"target": "twin"},
}
CHOICES: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
    *(
        (["--method", name], {"method.name": name}, METHOD_OPTIONS.get(name, {}))
        for name in METHODS
        if name not in TRAINERS
    ),
    (["--method", "naive"], {"method.name": "naive", "data": None}, {"data": None}),
    (["--method", "transfusion"], {"data": None}, {"data": None, "target": "twin"}),
    (
        ["--method", "fewshot", *TRAINING],
        {
            "method.name": "fewshot",
            "method.training.learning_rate": 0.002,
            "method.training.weight_decay": 0.3,
            "method.training.steps": 1,
            "method.training.samples": 9,
        },
        {},
    ),
    (
        ["--method", "finetune", *TRAINING, *STEPS],
        {
            "method.name": "finetune",
            "method.training.learning_rate": 0.002,
            "method.training.weight_decay": 0.3,
            "method.training.steps": 3,
            "method.training.batch": 5,
            "method.training.warmup": 1,
        },
        {},
    ),
    *(
        (
            ["--method", name, *BRIEFLY, *rate],
            {
                "method.name": name,
                "method.training.toward": toward,
                "method.training.most": 3,
                "method.training.batch": 5,
                "method.training.given": bool(rate) or None,
                "method.training.left_out": 9,
            },
            {},
        )
        for name, toward, rate in (
            *(("train", "labels", []), ("train", "labels", TRAINING)),
            *(("distill", "source", []), ("distill", "source", TRAINING)),
        )
    ),
    *(
        (
            ["--polish", "--polish-steps", "3", *more],
            {
                "method.name": "bico",
                "method.polish.toward": toward,
                "method.polish.most": 3,
                "method.polish.given": "--learning-rate" in more or None,
            },
            {},
        )
        for toward, more in (
            *(("source", []), ("source", [*TRAINING, "--train-batch", "5"])),
            ("labels", ["--polish-on", "labels", *TRAINING]),
        )
    ),
    *(
        (["--sampling", name], {"data.sampling": name, "data.n": 9}, {})
        for name in ("class-balanced", "centroid-far", "half-class", "one-class")
    ),
    (["--labels", "pseudo"], {"data.labels": "pseudo"}, {}),
    (
        ["--class-names", "names"],
        {"data.labels": "pseudo", "data.class_names": list(CLASS_NAMES), "evaluation": []},
        {"data": "plain"},
    ),
    (["--augment", "2"], {"method.copies": 2}, {}),
    (["--method", "bico-path", "--augment", "0", "--path-steps", "3"], {"method.steps": 3}, {}),
    (["--method", "gradfix", "--signs", "majority"], {"method.signs": "majority"}, {"target": "twin"}),
    (["--layers", "index"], {"method.layers": [0, 1, 1]}, {"target": "deep"}),
    (["--layers", "similarity"], {"method.matching": "similarity"}, {"target": "deep"}),
    (["--method", "bico-path", "--readout", "--augment", "3"], {"method.copies": 3, "method.readout.copies": 3}, {}),
    (["--method", "naive", "--readout", "--augment", "2"], {"method.copies": None, "method.readout.copies": 2}, {}),
    (["--layers", "1,0,1"], {"method.matching": "given", "method.layers": [1, 0, 1]}, {"target": "deep"}),
    (["--completion", "svd", "--alpha", "0.5"], {"method.completion": "svd", "method.alpha": 0.5}, {}),
    (
        ["--readout"],
        {"evaluation": [*USUAL, ("ported, no readout", None), ("target, readout", None)]},
        {},
    ),
    (["--batch-size", "2", "--dtype", "float64"], {"run.batch_size": 2, "run.dtype": "float64"}, {}),
    (["--control"], {"evaluation": [*USUAL, ("control", None)]}, {}),
    (["--evaluation", "probe"], {"evaluation": PROBED}, {}),
    (["--eval-samples", "5"], {"evaluation": USUAL}, {}),
    (["--evaluation", "both"], {"evaluation": BOTH}, {}),
    (["--evaluation", "both", "--no-eval"], {"evaluation": []}, {}),
    (["--method", "finetune", "--readout", *TRAINING, *STEPS], {"method.training.steps": 3}, {}),
    (["--method", "bico-path", "--readout", "--control", "--evaluation", "both"], {"method.copies": 7}, {}),
]


def name_of(choice: tuple[list[str], dict[str, Any], dict[str, Any]]) -> str:
    options, _, where = choice
    return " ".join([*options, *(f"{key}={value}" for key, value in where.items())])


def settings_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What a command asks for, as the port would have it; nothing is ported."""
    asked: list[Settings] = []

    def noted(planned: object, settings: Settings, *_: object) -> NoReturn:
        asked.append(settings)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("hf_bico.porting.port.run_port", noted)
        run("port", *arguments, "-o", "not-written")
    (settings,) = asked
    return settings


@pytest.mark.parametrize(
    ("options", "expected", "where"),
    [pytest.param(*CHOICES[0], marks=pytest.mark.quick), *CHOICES[1:]],
    ids=map(name_of, CHOICES),
)
def test_what_is_asked_for_is_recorded_and_can_be_repeated(
    options: list[str],
    expected: dict[str, Any],
    where: dict[str, Any],
    written: dict[str, tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = " ".join(words(*options, **where))
    if "evaluation" not in expected and not {"--readout", "--control"} & set(options):
        options = [*options, "--no-eval"]  # which would only take time
    record = ported(tmp_path / "out", *words(*options, **where))
    written[asked] = digests_of(record)
    for path, value in expected.items():
        found = models(record) if path == "evaluation" else record.get(path) if path == "data" else at(record, path)
        assert found == value, path
    # the record's own command asks for the same; of a list of names it cannot tell the file
    command = shlex.split(record["command"].replace("--class-names FILE", "--class-names names"))
    assert command[:2] == ["hf-bico", "port"]
    # its device is not recorded, its split always is; without data, nothing is drawn or measured
    same: dict[str, Any] = {"device": "cpu", "split": "train", "evaluate": "evaluation" in record}
    same |= {} if "data" in record else {"n": None}
    wanted = settings_of(words(*options, **where), monkeypatch)
    if wanted.method == "bico-path":  # the steps are spelt, also where they are the usual ones
        wanted = replace(wanted, path_steps=wanted.steps)
    if wanted.method == "readout":  # nothing is carried, so that its command has no alpha
        wanted = replace(wanted, alpha=AUTO)
    assert replace(settings_of(command[2:], monkeypatch), **same) == replace(wanted, **same)
    # and the record alone gives the same
    repeated = run("rerun", str(tmp_path / "out"), "--device", "cpu", "-o", str(tmp_path / "rerun"))
    assert repeated.exit_code == 0, repeated.output
    files = ", ".join(record["output"]["files"])
    assert repeated.stdout == f"Same: {files} (same SHA-256 as recorded).\n"
    now = json.loads((tmp_path / "rerun" / "bico.json").read_text())
    assert (now["method"], now.get("evaluation")) == (record["method"], record.get("evaluation"))


def test_each_of_these_choices_changes_the_weights(tmp_path: Path, written: dict[str, tuple[str, ...]]) -> None:
    """Otherwise the test above could not fail."""
    digests: dict[tuple[str, ...], list[str]] = {}
    for index, options in enumerate(
        [
            *(["--method", name] for name in METHODS if name not in ("transfusion", "gradfix", *TRAINERS)),
            *(["--method", "fewshot", *TRAINING], ["--method", "finetune", *TRAINING, *STEPS]),
            *(["--method", name, *BRIEFLY, *rate] for name in ("train", "distill") for rate in ([], TRAINING)),
            *(["--polish", "--polish-steps", steps] for steps in ("2", "3")),
            ["--polish", "--polish-steps", "3", *TRAINING, "--train-batch", "5"],
            ["--polish", "--polish-steps", "3", "--polish-on", "labels", *TRAINING],
            *(["--sampling", name] for name in ("class-balanced", "centroid-near", "centroid-far", "one-class")),
            *(["--labels", "pseudo"], ["--augment", "2"], ["--layers", "1,0"], ["--readout"]),
            *(["--completion", "svd"], ["--alpha", "0.5"]),
            *(["--method", "bico-path", "--path-steps", "3"], ["--method", "fewshot", "--learning-rate", "0.1"]),
            ["--method", "finetune", *TRAINING, *STEPS, "--warmup", "3"],
            ["--method", "finetune", *TRAINING, *STEPS, "--train-batch", "4"],
            ["--method", "finetune", *TRAINING, *STEPS, "--train-steps", "4"],
        ]
    ):
        asked = " ".join(words(*options))
        if asked not in written:
            written[asked] = digests_of(ported(tmp_path / str(index), *words(*options, "--no-eval")))
        digests.setdefault(written[asked], []).append(" ".join(options))
    assert [same for same in digests.values() if len(same) > 1] == []


@pytest.mark.parametrize(
    ("arguments", "code", "cause", "remedy"),
    [
        (lambda: words("--method", "transfusion"), 1, "attention heads: 2 in the source and 3 in the", "--method bico"),
        (lambda: words("--method", "gradfix"), 1, "gradfix needs two models of one architecture", "--method bico"),
        (lambda: words("--method", "naive", "--control"), 1, "naive does not pair any", "leave --control out"),
        (lambda: words("--method", "fewshot", "--control"), 1, "fewshot does not pair any", "leave --control out"),
        (lambda: words("--control", "-n", "4"), 2, "4 samples cannot be mispaired", "-n 5"),
        (lambda: words("--method", "naive", "--readout", data=None), 1, "no calibration data was given", "--data"),
        (lambda: words("--method", "finetune", data=None), 1, "no calibration data was given", "--data"),
        (lambda: words("--layers", "0,1,1"), 2, "--layers", "one source block for each target block"),
        (lambda: words("--layers", "0,2"), 2, "--layers", "0 to 1"),
        (lambda: words("--layers", "0,-1"), 2, "--layers is [0, -1]", "such as 0,0,1,1"),
        (lambda: words("--layers", "first"), 2, "--layers is 'first'", "index or similarity"),
        (
            lambda: words("--sampling", "class-balanced", "--class-names", "names", data="plain"),
            2,
            "--sampling class-balanced needs labels, and 'plain' has none",
            "--sampling random",
        ),
        (
            lambda: words("--labels", "pseudo", "--sampling", "one-class"),
            2,
            "--sampling one-class needs labels, and --labels pseudo does not look at them",
            "--sampling random",
        ),
        (lambda: words("--labels", "dataset", data="plain"), 1, "label column", "--label-column"),
        (lambda: words("--sampling", "one-class", "-n", "13"), 1, "13 samples of one class were asked for", "-n 12"),
        (lambda: words("--augment", "-1"), 2, "--augment is -1", "at least 0"),
        (lambda: words("--path-steps", "0"), 2, "--path-steps is 0", "at least 1"),
        (lambda: words("--train-steps", "0"), 2, "--train-steps is 0", "at least 1"),
        (lambda: words("--train-batch", "0"), 2, "--train-batch is 0", "at least 1"),
        (lambda: words("--warmup", "-1"), 2, "--warmup is -1", "at least 0"),
        (lambda: words("--learning-rate", "nan"), 2, "--learning-rate is nan", "at least 0"),
        (lambda: words("--weight-decay", "-0.1"), 2, "--weight-decay is -0.1", "at least 0"),
    ],
)
def test_plain_mistakes_get_two_lines(
    arguments: Callable[[], list[str]], code: int, cause: str, remedy: str, tmp_path: Path
) -> None:
    result = run("port", *arguments(), "-o", str(tmp_path / "out"))
    assert result.exit_code == code, result.output
    first, second = result.stderr.splitlines()
    assert first.startswith("Error: ")
    assert cause in first
    assert second.startswith("Remedy: ")
    assert remedy in second
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("option", ["--method", "--sampling", "--labels", "--signs", "--evaluation"])
def test_a_choice_that_there_is_not_is_answered_with_those_that_there_are(option: str) -> None:
    result = run("port", *words(option, "nothing"))
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': 'nothing' is not one of" in result.stderr


def test_a_training_on_the_command_line_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options = ["--method", "finetune", *TRAINING, *STEPS, "--no-eval"]
    plain = ported(tmp_path / "plain", *words(*options))
    for name in ("first", "second"):
        record = ported(tmp_path / name, *words(*options, "--checkpoint", str(tmp_path / "saved")))
        assert record["output"]["files"] == plain["output"]["files"]
        assert record["command"] == plain["command"]
    assert (tmp_path / "saved" / "training.safetensors").is_file()
    other = run("port", *words(*options, "--seed", "1", "--checkpoint", str(tmp_path / "saved")), "-o", "other")
    assert other.exit_code == 2
    assert "belongs to another training" in other.stderr.splitlines()[0]


def test_an_interrupted_training_goes_on_with_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_bico.alignment.methods import finetuning
    from hf_bico.alignment.methods.training import Learner

    steps = ["--train-steps", "6", "--train-batch", "5", "--warmup", "1"]
    arguments = ["port", *words("--method", "finetune", *TRAINING, *steps)]
    whole = ported(tmp_path / "whole", *arguments[1:])
    step, taken = Learner.step, []

    def counted(self: Learner, *how: Any) -> None:
        if len(taken) == 5:
            taken.append("interrupted")
            raise KeyboardInterrupt
        taken.append("step")
        step(self, *how)

    monkeypatch.setattr(finetuning, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(Learner, "step", counted)
    result = run(*arguments, "-o", str(tmp_path / "out"))
    assert result.exit_code == 130
    assert result.stderr == "Interrupted: the same command resumes the training.\n"
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out.training"}
    record = ported(tmp_path / "out", *arguments[1:])
    assert taken.count("step") == 5 + 2, "it went on from the fourth step"
    assert record["output"]["files"] == whole["output"]["files"]
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


def test_only_the_checkpoint_of_a_training_is_removed(tmp_path: Path) -> None:
    """A folder of the user's that is named like it stays, with what is in it."""
    own = tmp_path / "out.training"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    ported(tmp_path / "out", *words("--method", "finetune", *TRAINING, *STEPS))
    assert {path.name for path in own.iterdir()} == {"notes.txt"}


def test_a_method_of_the_future_is_said(tmp_path: Path) -> None:
    ported(tmp_path / "out", *words())
    file = tmp_path / "out" / "bico.json"
    record = json.loads(file.read_text())
    record["method"]["name"] = "bico-next"
    file.write_text(json.dumps(record))
    result = run("rerun", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "cannot be repeated: --method is 'bico-next'" in result.stderr


def test_records_of_earlier_versions_are_followed(tmp_path: Path) -> None:
    """They told of a large data set, in the place of the sampling, that row groups of it were read."""
    ported(tmp_path / "out", *words())
    file = tmp_path / "out" / "bico.json"
    record = json.loads(file.read_text())
    assert record["data"]["sampling"] == "random"
    record["data"]["sampling"] = "row groups"
    file.write_text(json.dumps(record))
    assert run("rerun", str(tmp_path / "out")).stdout.startswith("Same: ")
