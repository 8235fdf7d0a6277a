"""The command line over Hub ids: every mistake in two lines, and nothing secret in any of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hf_bico.cli.main import main
from support.cards import PEFT_CARD, TRAINER_CARD
from support.hub import Fault, Hub
from support.hub_scenes import BASE, DATA, SOURCE, TARGET, publish
from support.loopback import TOKEN
from support.paper import PAPER_WORDS

REPO = "user/vit-b16-plus-eurosat"
STRANGER = "hf_secretOfStranger"
PORT = ["port", SOURCE, "--to", TARGET, "-n", "24", "--device", "cpu"]
PAPER_PORT = [*PORT, *PAPER_WORDS]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def card(text: str) -> Callable[[Hub, pytest.MonkeyPatch], None]:
    """The source's card is this one."""
    return lambda hub, patch: hub.repo(SOURCE).commit({"README.md": text}) and None


def change(repo_id: str, type: str = "model", **attributes: object) -> Callable[[Hub, pytest.MonkeyPatch], None]:
    """A repo is private or gated, and somebody else is asking."""

    def apply(hub: Hub, patch: pytest.MonkeyPatch) -> None:
        for name, value in attributes.items():
            setattr(hub.repo(repo_id, type), name, value)
        hub.add_user("stranger", STRANGER)
        patch.setenv("HF_TOKEN", STRANGER)

    return apply


def nothing(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    """All is well on the Hub."""


def no_token(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("HF_TOKEN")


def bad_token(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", STRANGER)


def offline(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def down(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("time.sleep", lambda seconds: None)
    hub.inject(Fault("GET", "/api/", "status", times=None, status=503))


def taken(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.create(REPO).commit({"README.md": "# mine"})


def empty(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.create("user/empty")


def no_weights(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.create("user/words").commit({"README.md": "# words"})


def no_data_files(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.create("user/no-data", type="dataset").commit({"README.md": "# no data"})


MISTAKES = [
    (nothing, [*PORT[:3], "laion/ViT-B-16-pluss"], "the target 'laion/ViT-B-16-pluss' is not on the Hub", TARGET),
    (nothing, ["port", f"{SOURCE}@v9", "--to", TARGET], "there is no revision 'v9'", "branch, tag or commit"),
    (nothing, ["plan", DATA, "--to", TARGET], "is a data set, not a model", "name a model"),
    (nothing, [*PORT, "--data", BASE], "is a model, not a data set", "name a data set"),
    (nothing, [*PORT, "--data", "user/nothing"], "the data set 'user/nothing' is not on the Hub", "check the name"),
    (nothing, [*PORT, "--split", "dev"], f"'{DATA}' has no split 'dev'", "train, test"),
    (nothing, [*PORT, "--config", "odd"], f"'{DATA}' has no configuration 'odd'", "--config"),
    (nothing, [*PORT, "--max-download", "10B"], f"'{DATA}'", "--max-download"),
    (nothing, [*PORT, "--push-to", "other/x"], "may not push to 'other/x'", "user/..., laion/..."),
    (nothing, ["push", "no-such-folder", REPO], "there is no folder 'no-such-folder'", "that hf-bico wrote"),
    (nothing, ["rerun", TARGET], f"'{TARGET}' holds no bico.json", "that hf-bico wrote"),
    (nothing, ["eval", TARGET, "--data", "user/nothing"], "'user/nothing' is not on the Hub", "check the name"),
    (empty, [*PORT[:3], "user/empty"], "the target 'user/empty' is empty", "check the name"),
    (no_weights, [*PORT[:3], "user/words"], "no weights in 'user/words'", "safetensors"),
    (no_data_files, [*PORT, "--data", "user/no-data"], "'user/no-data' has no data files", "parquet"),
    (change(SOURCE, private=True), PORT, f"'{SOURCE}' is not on the Hub", "If it is private"),
    (change(TARGET, gated="manual"), PORT, f"the target '{TARGET}' is gated", "accept its conditions on http"),
    (change(DATA, "dataset", gated="auto"), PORT, f"the data set '{DATA}' is gated", f"datasets/{DATA}"),
    (no_token, [*PORT, "--push-to", REPO], f"pushing to '{REPO}' needs a token", "hf auth login"),
    (bad_token, PORT, "the Hub refuses this token", "hf auth login"),
    (offline, PORT, f"'{SOURCE}' is not in the cache", "HF_HUB_OFFLINE"),
    (down, PORT, "cannot be read: planted", "try again"),
    (taken, [*PORT, "--push-to", REPO], f"there is a repo '{REPO}' already", "--overwrite"),
    (card("# by hand, without metadata"), PORT, "does not say which model it was fine-tuned from", "--base"),
    (card("---\nbase_model: [a/b\n---\n"), PORT, "are not YAML", "--base"),
    (card(TRAINER_CARD), PORT, "'openai/clip-vit-base-patch32'", "--base"),
    (card(TRAINER_CARD), [*PORT, "--base", BASE], "only 'imagefolder'", "--data"),
    (card(PEFT_CARD), PORT, "'unsloth/llama-3-8b-bnb-4bit'", "--base"),
    (card(f"---\nbase_model: [{BASE}, {TARGET}]\n---\n"), PORT, f"several bases: {BASE}, {TARGET}", "--base"),
    (card(f"---\nbase_model: {BASE}\ndatasets: [a/b, c/d]\n---\n"), PORT, "several data sets: a/b, c/d", "--data"),
]


@pytest.mark.parametrize(("prepare", "arguments", "cause", "remedy"), MISTAKES, ids=lambda value: None)
def test_a_mistake_is_two_lines_and_leaves_nothing(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Hub, pytest.MonkeyPatch], None],
    arguments: list[str],
    cause: str,
    remedy: str,
) -> None:
    publish(hub, tmp_path / "scene")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = set(hub.repos)
    prepare(hub, monkeypatch)
    made = set(hub.repos) - before
    result = run(*arguments)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Downloading")]
    assert result.exit_code == 1, result.output
    assert [line.partition(":")[0] for line in lines] == ["Error", "Remedy"], result.output
    assert cause in lines[0]
    assert remedy in lines[1]
    assert result.stdout == ""
    assert TOKEN not in result.output
    assert STRANGER not in result.output
    assert list((tmp_path / "here").iterdir()) == []
    assert set(hub.repos) == before | made


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--max-download", "much"], "--max-download is 'much'"),
        (["--create-pr", "--revision", "dev", "--push-to", REPO], "--create-pr and --revision"),
        (["--push-to", "user/a b"], "cannot be the name of a Hub repo"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(hub: Hub, tmp_path: Path, arguments: list[str], cause: str) -> None:
    result = run(*PORT, *arguments)
    assert result.exit_code == 2
    assert cause in result.stderr


def test_json_says_where_it_went(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path / "scene")
    monkeypatch.chdir(tmp_path)
    result = run(*PAPER_PORT, "--push-to", REPO, "--json", "--force")
    found = json.loads(result.stdout)
    assert found["pushed"]["repo"] == REPO
    assert found["pushed"]["commit"] == hub.repo(REPO).head()
    assert found["record"]["output"]["repo"] == REPO
    pushed = json.loads(run("push", found["folder"], REPO, "--json", "--force").stdout)
    assert pushed["changed"] is False
    again = json.loads(run("rerun", REPO, "--json").stdout)
    assert again["same"] is True


def test_card_writes_it_again(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path / "scene")
    monkeypatch.chdir(tmp_path)
    run(*PAPER_PORT, "-o", "out", "-q")
    before = (tmp_path / "out" / "README.md").read_bytes()
    (tmp_path / "out" / "README.md").unlink()
    assert run("card", "out").stdout == "Written to out/README.md\n"
    assert (tmp_path / "out" / "README.md").read_bytes() == before


def test_the_lines_of_a_plan_work_when_they_are_copied(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path / "scene")
    monkeypatch.chdir(tmp_path)
    text = run("plan", SOURCE, "--to", TARGET).stdout
    assert "Ready to port." in text
    line = text.splitlines()[-1].removeprefix("Next: hf-bico ")
    result = run(*line.split(), "-n", "24", *PAPER_WORDS, "-q")
    assert result.exit_code == 0, result.output
    hub.repo(SOURCE).commit({"README.md": f"---\nbase_model: {BASE}\n---\n"})
    text = run("plan", SOURCE, "--to", TARGET).stdout
    assert "Not yet: the data set to calibrate on is not known (--data)." in text
    assert text.endswith("--data DATA\n")


def test_a_plan_is_not_ready_where_a_port_refuses_the_fine_tune(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    config = json.loads((scene.tuned / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "relu"
    (scene.tuned / "config.json").write_text(json.dumps(config))
    line = [str(scene.tuned), "--base", BASE, "--to", TARGET, "--data", DATA]
    refused = run("port", *line, "-o", str(tmp_path / "out"))
    cause = refused.stderr.splitlines()[0].removeprefix("Error: ")
    assert cause.endswith("they compute different things"), refused.output
    text = run("plan", *line).stdout
    assert "Not yet: the fine-tuned model and its base are configured differently (--base, --force)." in text
    assert json.loads(run("plan", *line, "--json").stdout)["refused"] == cause
    forced = run("port", *line, "--force", "--dry-run")
    assert "Ready to port." in forced.stdout, forced.output
    assert "refused" not in forced.stdout


def test_rerun_says_what_differs(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path / "scene")
    monkeypatch.chdir(tmp_path)
    run(*PAPER_PORT, "-o", "out", "-q")
    record = json.loads((tmp_path / "out" / "bico.json").read_text())
    record["method"]["alpha"] = 0.5
    record["run"]["versions"]["torch"] = "1.0"
    (tmp_path / "out" / "bico.json").write_text(json.dumps(record))
    result = run("rerun", "out")
    assert result.exit_code == 1
    assert result.stdout.startswith("Different: open_clip_model.safetensors\n")
    assert "Note: torch was 1.0, is " in result.stdout


def test_a_dry_run_repeats_the_line_without_the_token(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    text = run(*PORT, "--dry-run", "--token", TOKEN, "--push-to", REPO, "--public").stdout
    assert TOKEN not in text
    assert text.endswith(f"Next: hf-bico port {SOURCE} --to {TARGET} -n 24 --device cpu --push-to {REPO} --public\n")
    found = json.loads(run(*PORT, "--dry-run", "--token", TOKEN, "--json").stdout)
    assert found["command"] == f"hf-bico port {SOURCE} --to {TARGET} -n 24 --device cpu"


def test_a_port_is_measured_on_its_own_data_unless_told_otherwise(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path / "scene")
    monkeypatch.chdir(tmp_path)
    stated = json.loads(run(*PAPER_PORT, "--push-to", REPO, "--force", "--json").stdout)["record"]["evaluation"]
    measured = json.loads(run("eval", REPO, "--json").stdout)
    assert measured["value"] == next(entry["value"] for entry in stated if entry["model"] == "ported")
    assert json.loads(run("eval", SOURCE, "--json").stdout)["data"] == DATA
    unknown = run("eval", TARGET)
    assert "--data" in unknown.stderr


def test_a_typo_is_told_before_an_old_result_is(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path / "scene")
    monkeypatch.chdir(tmp_path)
    run(*PAPER_PORT, "-o", "out", "-q")
    assert "no revision 'nope'" in run("port", f"{SOURCE}@nope", "--to", TARGET, "-o", "out").stderr
    assert "the output folder 'out' exists" in run(*PORT, "-o", "out").stderr


def test_private_into_public_is_refused_before_any_work(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(SOURCE).private = True
    hub.create(REPO).commit({"README.md": "# mine"})
    hub.clear_log()
    refused = run(*PORT, "--push-to", REPO, "--overwrite")
    assert f"'{REPO}' is public, and it was made from {SOURCE}, which is not" in refused.stderr
    assert not any(entry.range is None and "safetensors" in entry.path for entry in hub.log)


def test_a_dry_run_checks_the_targets_id_too(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path)
    line = ["port", SOURCE, "--to", str(scene.target), "--dry-run"]
    assert run(*line, "--target-id", TARGET).stdout.splitlines()[2].startswith(f"target      {TARGET} at ")
    assert f"are not those of '{BASE}'" in run(*line, "--target-id", BASE).stderr
