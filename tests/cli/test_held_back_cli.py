"""A port that the samples do not speak for: its own exit code, what is said, and nothing written anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from hf_bico.alignment.scaling import SCALES
from hf_bico.cli.main import main
from support.hub import Hub
from support.hub_scenes import SOURCE, TARGET, publish
from support.scenes import Scene, make_scene
from support.terminals import run_in_terminal

HELD_BACK = 3
FILE = "open_clip_model.safetensors"
REASON = "Held back: bico-path with alpha chosen by 8 samples. No scale of the change clearly lowers the samples' loss."
MODELS = ["tuned", "--base", "base", "--to", "target"]
FEW = ["-n", "8", "--augment", "0"]
PORT = ["port", *MODELS, "--data", "pictures", *FEW, "-o", "out"]
TWIN = ["--to", "twin"]
REPO = "user/ported"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Random models, which have nothing to say to each other; `twin` has gone beyond the fine-tune on its way."""
    made = make_scene(tmp_path_factory.mktemp("scene"))
    shutil.copytree(made.base, made.folder / "twin")
    start, tuned = (load_file(folder / FILE) for folder in (made.base, made.tuned))
    beyond = {name: 2 * tuned[name] - start[name] for name in start}
    save_file(beyond, made.folder / "twin" / FILE, {"format": "pt"})
    return made


@pytest.fixture(autouse=True)
def _here(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which the scene's are, and nothing else."""
    for folder in scene.folder.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="hf-bico")


@pytest.fixture(scope="module")
def held_back(scene: Scene) -> dict[str, Any]:
    """What `--json` prints."""
    result = run(*[str(scene.folder / word) if (scene.folder / word).exists() else word for word in PORT], "--json")
    assert result.exit_code == HELD_BACK, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def require_nothing_written(scene: Scene) -> None:
    """There is no folder, no scratch folder and no lock."""
    assert {path.name for path in Path.cwd().iterdir()} == {path.name for path in scene.folder.iterdir()}


def test_it_is_said_what_was_tried_what_the_samples_say_and_what_to_do(scene: Scene) -> None:
    result = run(*PORT)
    assert result.exit_code == HELD_BACK
    chosen, reason, lead, nothing, following = result.stdout.splitlines()
    assert chosen == "alpha 0 in all 4 steps: no step clearly lowers the samples' loss."
    assert reason == REASON
    assert lead.startswith("The fine-tuned source is NOT clearly better than the target on the samples' labels: ")
    assert nothing == "Nothing was written: the target stays as it is."
    assert following == (
        "Next: use more samples (-n, or unlabelled ones with --polish --unlabelled DATA), compare other methods "
        "('hf-bico compare', or --method bico), or write it anyway with --alpha 1, as the paper does."
    )
    assert "Error" not in result.stderr, "it is a result, not an error"
    assert "Remedy" not in result.stderr
    require_nothing_written(scene)


@pytest.mark.parametrize("method", ["bico", "theseus", "naive"])
def test_a_method_that_was_asked_for_is_held_back_too_and_another_is_named(method: str, scene: Scene) -> None:
    result = run(*PORT, *(TWIN if method == "naive" else []), "--method", method)
    assert result.exit_code == HELD_BACK, result.output
    chosen, reason, *_, following = result.stdout.splitlines()
    assert chosen == "alpha 0: no other value clearly lowers the samples' loss."
    assert reason == REASON.replace("bico-path", method)
    assert ("or --method theseus)" if method == "bico" else "or --method bico)") in following
    require_nothing_written(scene)


def test_both_methods_that_were_tried_are_named(scene: Scene) -> None:
    result = run(*PORT, *TWIN, "--json")
    assert result.exit_code == HELD_BACK
    found = json.loads(result.stdout)
    assert found["reason"] == REASON.replace("bico-path", "bico-path and naive")
    assert [one["method"] for one in found["candidates"]] == ["bico-path", "naive"]
    assert all(one["held_back"] for one in found["candidates"])
    method = found["record"]["method"]
    assert (method["name"], method["asked"], method["steps"]) == ("bico-path", "auto", 4), "the first of two equal ones"
    assert len(method["alpha"]) == method["steps"]
    said = run(*PORT, *TWIN).stdout.splitlines()[0]
    assert said == (
        "Tried on the samples: aligning it (bico-path) is held back, and "
        "adding the change unchanged (naive) is held back."
    )
    require_nothing_written(scene)


def test_one_sample_tells_nothing(scene: Scene) -> None:
    result = run(*PORT, "-n", "1")
    assert result.exit_code == HELD_BACK
    assert (
        "Held back: bico-path with alpha chosen by 1 sample. One sample cannot tell a gain from chance."
        in result.stdout.splitlines()
    )
    require_nothing_written(scene)


def test_quiet_is_one_line_on_stderr(scene: Scene) -> None:
    result = run(*PORT, "-q")
    assert result.exit_code == HELD_BACK
    assert (result.stdout, result.stderr) == ("", f"{REASON}\n")
    require_nothing_written(scene)


def test_no_bar_is_left_on_a_terminal(scene: Scene) -> None:
    seen = run_in_terminal(PORT, 200)
    assert seen.code == HELD_BACK, seen.text
    assert REASON in seen.screen
    assert not [line for line in seen.screen if "━━" in line]
    require_nothing_written(scene)


def test_json_has_the_reason_the_alphas_and_the_gain(held_back: dict[str, Any]) -> None:
    assert held_back["held_back"] is True
    assert held_back["reason"] == REASON
    assert held_back["alpha"] == [0.0] * 4
    assert held_back["veto"] == {"mean": 0.0, "error": 0.0}
    assert "folder" not in held_back
    assert "error" not in held_back


def test_json_has_the_curve_of_every_step(held_back: dict[str, Any]) -> None:
    curve = held_back["curve"]
    assert {point["step"] for point in curve} == {1, 2, 3, 4}
    for step in (1, 2, 3, 4):
        points = [point for point in curve if point["step"] == step]
        assert [point["alpha"] for point in points] == sorted(SCALES)
        assert all(point["mean"] > 0 and 0 <= point["accuracy"] <= 1 for point in points)
        best = min(points, key=lambda point: point["mean"])
        assert best["error"] == 0.0
        assert all(point["error"] > 0 for point in points if point is not best)


def test_json_has_the_record_of_what_was_tried(held_back: dict[str, Any]) -> None:
    record = held_back["record"]
    assert record["schema"] == 2
    assert record["method"]["curve"] == held_back["curve"]
    assert {"evaluation", "outlook", "output"}.isdisjoint(record), "nothing was measured, promised or written"
    assert {"source", "target", "error"} == set(record["source_lead"])
    assert record["command"].endswith("--method bico-path --alpha auto --augment 0 --path-steps 4")


def test_force_does_not_lift_it(scene: Scene) -> None:
    result = run(*PORT, "-q", "--force")
    assert (result.exit_code, result.stderr) == (HELD_BACK, f"{REASON}\n")
    require_nothing_written(scene)


def test_overwrite_leaves_the_older_result(scene: Scene) -> None:
    assert run(*PORT, "-q", "--no-eval", "--alpha", "1").exit_code == 0
    before = {file.name: file.read_bytes() for file in Path("out").iterdir()}
    result = run(*PORT, "-q", "--overwrite")
    assert (result.exit_code, result.stderr) == (HELD_BACK, f"{REASON}\n")
    assert {file.name: file.read_bytes() for file in Path("out").iterdir()} == before
    assert not [path.name for path in Path.cwd().iterdir() if path.name.startswith(".")]


def test_a_number_for_alpha_lifts_it() -> None:
    result = run(*PORT, "--no-eval", "--alpha", "1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["held_back"] is False
    method = found["record"]["method"]
    assert (method["name"], method["asked"], method["alpha"], method["steps"]) == ("bico-path", "auto", 1.0, 2)
    assert "curve" not in method
    assert found["record"]["command"].endswith("--method bico-path --alpha 1 --augment 0 --path-steps 2")
    assert Path("out", "bico.json").is_file()


@pytest.mark.parametrize("options", [[], ["--force", "--overwrite"]])
def test_nothing_is_pushed_and_no_repo_is_made(hub: Hub, options: list[str], scene: Scene) -> None:
    publish(hub, Path.cwd() / "published")
    before = set(hub.repos)
    result = run("port", SOURCE, "--to", TARGET, *FEW, "--push-to", REPO, *options, "--json")
    assert result.exit_code == HELD_BACK, result.output
    assert json.loads(result.stdout)["held_back"] is True
    assert set(hub.repos) == before
    assert not [entry for entry in hub.log if entry.method in ("POST", "PUT", "DELETE") and REPO in entry.path]
    assert not [entry for entry in hub.log if "/repos/create" in entry.path]
    assert not Path("vit-b16-eurosat-to-ViT-B-16-plus").exists()


def test_a_repo_that_is_there_stays_as_it_is(hub: Hub) -> None:
    publish(hub, Path.cwd() / "published")
    hub.create(REPO).commit({"README.md": "# mine"})
    head = hub.repo(REPO).head()
    result = run("port", SOURCE, "--to", TARGET, *FEW, "--push-to", REPO, "--overwrite", "-q")
    assert result.exit_code == HELD_BACK, result.output
    assert hub.repo(REPO).head() == head


WRONG = [
    (["--alpha", "nonsense"], "--alpha is 'nonsense'", "use auto, or a number such as 1 or 0.5"),
    (["--alpha", "inf"], "--alpha is inf", "use auto, or a finite number"),
    (["--bold", "--alpha", "1"], "--bold lets the samples choose larger steps, and --alpha is 1.0", "leave one"),
    (["--signs", "majority"], "--signs works only with gradfix, and the method is auto", "use --method gradfix"),
    (["--path-steps", "3", "--method", "bico"], "--path-steps works only with bico-path", "use --method bico-path"),
]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(("words", "cause", "remedy"), WRONG, ids=lambda value: None)
def test_options_that_contradict_the_choice_are_refused(
    words: list[str], cause: str, remedy: str, dry: list[str], scene: Scene
) -> None:
    result = run(*PORT, *words, *dry)
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first.startswith(f"Error: {cause}")
    assert second.startswith("Remedy: ")
    assert remedy in second
    require_nothing_written(scene)


def test_steps_of_the_walk_are_taken_with_the_method_auto() -> None:
    result = run(*PORT, "--path-steps", "3", "--json")
    assert result.exit_code == HELD_BACK, result.output
    found = json.loads(result.stdout)
    assert found["alpha"] == [0.0] * 3
    assert {point["step"] for point in found["curve"]} == {1, 2, 3}
    assert found["record"]["settings"] == {"n": 8, "augment": 0, "path_steps": 3}


def test_bold_is_taken_and_recorded() -> None:
    found = json.loads(run(*PORT, "--bold", "--json").stdout)
    assert found["record"]["method"]["bold"] is True
    assert "--bold" in found["record"]["command"].split()


# what a plan says of it


def method_row(*words: str) -> str:
    """The row of a plan, in a process that must not import torch."""
    code = f"import sys\nfrom hf_bico.cli.main import main\nmain({list(words)!r}, standalone_mode=False)\n"
    code += "assert 'hf_bico.porting.planner' in sys.modules\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("method ")]
    return row.removeprefix("method").strip()


AUTO_ROW = "bico-path, because the objective, zero-shot, predicts classes; alpha by the samples"


@pytest.mark.parametrize(
    "words", [["plan", *MODELS], ["port", *MODELS, "--dry-run"], [*PORT, "--dry-run"]], ids=["plan", "dry", "data"]
)
def test_a_plan_names_the_method_and_why_without_torch(words: list[str]) -> None:
    assert method_row(*words) == AUTO_ROW


def test_a_plan_for_equal_shapes_names_the_copy_too() -> None:
    row = method_row("plan", *MODELS, *TWIN)
    assert row == f"{AUTO_ROW}; a plain copy is tried too, because all shapes are equal"


TYPED = [
    (["--method", "bico"], "bico, as asked for; alpha by the samples"),
    (["--method", "bico", "--alpha", "1"], "bico, as asked for; alpha 1"),
    (["--method", "theseus"], "theseus, as asked for; alpha by the samples"),
    (["--method", "theseus", "--alpha", "0.5"], "theseus, as asked for; alpha 0.5"),
    (["--method", "fewshot"], "fewshot, as asked for"),
]


@pytest.mark.parametrize(("words", "row"), TYPED, ids=lambda value: None)
def test_a_dry_run_names_the_method_that_was_asked_for(words: list[str], row: str) -> None:
    found = json.loads(run(*PORT, *words, "--dry-run", "--json").stdout)
    assert found["method"] == row


def test_a_dry_run_with_a_number_does_not_say_that_the_samples_choose() -> None:
    found = json.loads(run(*PORT, "--alpha", "0.5", "--dry-run", "--json").stdout)
    assert found["method"].startswith("bico-path, because the objective, zero-shot, predicts classes")
    assert "alpha by the samples" not in found["method"]


def test_a_method_that_needs_no_samples_needs_them_to_choose_alpha(scene: Scene) -> None:
    naive = ["port", *MODELS, *TWIN, "--method", "naive"]
    assert "Not yet: the data set to calibrate on is not known" in run(*naive, "--dry-run").stdout
    refused = run(*naive)
    assert refused.exit_code == 1
    assert refused.stderr.splitlines() == [
        "Error: alpha is chosen by calibration samples, and no data was given",
        "Remedy: name it with --data, or use --alpha 1",
    ]
    require_nothing_written(scene)
    assert run(*naive, "--alpha", "1", "-o", "out", "-q").exit_code == 0


def test_only_weights_that_can_be_carried_are_compared_between_the_bases() -> None:
    """The target's text tower has the base's shapes, and a port of a vision tower does not carry it."""
    assert not [line for line in run("plan", *MODELS).stdout.splitlines() if line.startswith("bases ")]
    twin = run("plan", *MODELS, *TWIN).stdout.splitlines()
    assert len([line for line in twin if line.startswith("bases       weights 0.")]) == 1
