"""Pushes: one commit or nothing, as private as what they were made from, and the line that goes on after a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import hf_bico
from hf_bico.errors import (
    BicoError,
    PushError,
    PushRefusedError,
    RecordError,
    RemoteExistsError,
    TokenError,
    UsageError,
)
from hf_bico.hub.client import Hub as Client
from hf_bico.hub.push import PushOptions, require_pushable
from hf_bico.porting.publish import push_folder
from hf_bico.reports.record import read_record
from support.hub import Fault, Hub
from support.hub_scenes import BASE, DATA, SOURCE, TARGET, publish
from support.paper import PAPER

REPO = "user/vit-b16-plus-eurosat"
WEIGHTS = "open_clip_model.safetensors"
FILES = {
    *("README.md", "alignment.png", "outcome.png", "bico.json", "open_clip_config.json", WEIGHTS),
    *("tokenizer.json", "tokenizer_config.json"),
}


def port(source: Any = SOURCE, target: Any = TARGET, **options: Any) -> hf_bico.Ported:
    return hf_bico.port(source, target, **{"n": 24, "device": "cpu", **PAPER, **options})


def remote(hub: Hub, repo_id: str = REPO, revision: str = "main") -> dict[str, bytes]:
    repo = hub.repo(repo_id)
    names = [name for name in repo.files(revision) if name != ".gitattributes"]
    return {name: repo.read(name, revision) for name in names}


def local(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def make_worse(folder: Path) -> None:
    record = json.loads((folder / "bico.json").read_text())
    for entry in record["evaluation"]:
        entry["value"] = {"target": 0.5, "ported": 0.4, "source": 0.9}[entry["model"]]
    (folder / "bico.json").write_text(json.dumps(record))


def test_a_push_is_one_commit_of_every_file_with_the_repos_name_in_the_card(hub: Hub, result: Path) -> None:
    pushed = push_folder(result, REPO)
    assert set(remote(hub)) == FILES
    assert remote(hub) == local(result)
    assert len(hub.repo(REPO).history()) == 2  # the Hub's own first commit, and ours
    assert (pushed.repo, pushed.changed, pushed.private) == (REPO, True, False)
    assert pushed.commit == hub.repo(REPO).head()
    assert f'snapshot_download("{REPO}")' in remote(hub)["README.md"].decode()
    record = read_record(result)
    assert record.output is not None
    assert record.output.repo == REPO


def test_the_same_push_twice_changes_nothing(hub: Hub, result: Path) -> None:
    first = push_folder(result, REPO)
    second = push_folder(result, REPO)
    assert (second.changed, second.commit) == (False, first.commit)
    assert len(hub.repo(REPO).history()) == 2


def test_a_name_without_owner_is_the_users_own(hub: Hub, result: Path) -> None:
    assert push_folder(result, "mine").repo == "user/mine"


def test_an_existing_repo_needs_to_be_asked_for(hub: Hub, result: Path) -> None:
    hub.create(REPO).commit({"README.md": "# mine", "config.json": "{}"})
    before = hub.repo(REPO).head()
    with pytest.raises(RemoteExistsError, match="--overwrite(.|\n)*--create-pr"):
        push_folder(result, REPO)
    assert hub.repo(REPO).head() == before


def test_an_empty_repo_is_filled(hub: Hub, result: Path) -> None:
    hub.create(REPO)
    assert push_folder(result, REPO).changed
    assert set(remote(hub)) == FILES


def test_overwrite_replaces_ours_removes_shadowing_weights_and_keeps_the_rest(hub: Hub, result: Path) -> None:
    hub.create(REPO).commit(
        {
            "README.md": "# old",
            "pytorch_model.bin": b"old",
            "model.safetensors": b"old",
            "model-00001-of-00002.safetensors": b"old",
            "model.safetensors.index.json": "{}",
            "adapter_config.json": "{}",
            "notes.md": "keep me",
            "onnx/model.bin": b"keep me too",
        }
    )
    push_folder(result, REPO, PushOptions(overwrite=True))
    assert set(remote(hub)) == FILES | {"notes.md", "onnx/model.bin"}
    assert len(hub.repo(REPO).history()) == 3
    assert not push_folder(result, REPO).changed


def test_a_pull_request_leaves_main_alone(hub: Hub, result: Path) -> None:
    hub.create("laion/shared").commit({"README.md": "# theirs"})
    before = hub.repo("laion/shared").head()
    pushed = push_folder(result, "laion/shared", PushOptions(create_pr=True))
    assert hub.repo("laion/shared").head() == before
    assert pushed.pull_request is not None
    assert pushed.pull_request.endswith("/discussions/1")
    assert remote(hub, "laion/shared", "refs/pr/1")[WEIGHTS] == (result / WEIGHTS).read_bytes()
    with pytest.raises(UsageError):
        PushOptions(create_pr=True, revision="dev")
    with pytest.raises(PushError, match="no repo 'user/nowhere' to open a pull request on"):
        push_folder(result, "user/nowhere", PushOptions(create_pr=True))


def test_a_branch_and_a_message(hub: Hub, result: Path) -> None:
    hub.create(REPO).commit({"README.md": "# main"})
    push_folder(result, REPO, PushOptions(revision="ported", message="Carried over", overwrite=True))
    assert remote(hub)["README.md"] == b"# main"
    assert remote(hub, revision="ported")[WEIGHTS] == (result / WEIGHTS).read_bytes()
    assert hub.repo(REPO).history("ported")[0].title == "Carried over"


def test_a_card_that_was_edited_stays(hub: Hub, result: Path) -> None:
    text = (result / "README.md").read_text() + "\nMy own words.\n"
    (result / "README.md").write_text(text)
    push_folder(result, REPO)
    assert remote(hub)["README.md"].decode() == text


# who may see it


@pytest.mark.parametrize(
    "restrict",
    [
        lambda hub: setattr(hub.repo(SOURCE), "private", True),
        lambda hub: setattr(hub.repo(BASE), "gated", "auto"),
        lambda hub: setattr(hub.repo(TARGET), "private", True),
        lambda hub: setattr(hub.repo(DATA, "dataset"), "gated", "manual"),
        lambda hub: hub.delete(SOURCE),
    ],
    ids=["source private", "base gated", "target private", "data gated", "source gone"],
)
def test_it_is_private_when_anything_behind_it_is(hub: Hub, result: Path, restrict: Callable[[Hub], None]) -> None:
    restrict(hub)
    assert push_folder(result, REPO).private
    assert hub.repo(REPO).private


def test_public_and_private_can_be_asked_for(hub: Hub, result: Path) -> None:
    hub.repo(SOURCE).private = True
    assert not push_folder(result, "user/shown", PushOptions(private=False)).private
    hub.repo(SOURCE).private = False
    assert push_folder(result, "user/hidden", PushOptions(private=True)).private


def test_nothing_private_goes_into_a_public_repo_unasked(hub: Hub, result: Path) -> None:
    hub.repo(SOURCE).private = True
    hub.create(REPO).commit({"notes.md": "public"})
    before = hub.repo(REPO).head()
    with pytest.raises(PushRefusedError, match="is public(.|\n)*--public"):
        push_folder(result, REPO, PushOptions(overwrite=True))
    assert hub.repo(REPO).head() == before
    assert push_folder(result, REPO, PushOptions(overwrite=True, private=False)).changed


def test_a_port_that_measured_worse_is_not_pushed_without_force(hub: Hub, result: Path) -> None:
    make_worse(result)
    with pytest.raises(PushRefusedError, match="WORSE(.|\n)*--force"):
        push_folder(result, REPO)
    assert (("model", REPO)) not in hub.repos
    assert push_folder(result, REPO, PushOptions(force=True)).changed


# who may push


def test_the_token_is_checked_before_any_work(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_user("reader", "hf_reader", role="read")
    hub.create(REPO).commit({"x": "y"})
    with pytest.raises(TokenError, match="'user', who may not push to 'other/x'(.|\n)*user/..., laion/..."):
        require_pushable("other/x", PushOptions(), Client())
    with pytest.raises(TokenError, match="is read-only"):
        require_pushable("reader/x", PushOptions(), Client("hf_reader"))
    with pytest.raises(TokenError, match="refuses this token"):
        require_pushable("user/x", PushOptions(), Client("hf_nobody"))
    with pytest.raises(RemoteExistsError):
        require_pushable(REPO, PushOptions(), Client())
    with pytest.raises(UsageError, match="cannot be the name of a Hub repo"):
        require_pushable("user/a b", PushOptions(), Client())
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(TokenError, match="needs a token(.|\n)*hf auth login"):
        require_pushable("user/x", PushOptions(), Client())
    assert require_pushable("laion/new", PushOptions(), Client("hf_secretOfUser")) == "laion/new"


def test_a_folder_that_is_not_ours_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    with pytest.raises(RecordError, match="holds no bico.json"):
        push_folder(tmp_path / "foreign", REPO)
    with pytest.raises(PushError, match="no folder"):
        push_folder(tmp_path / "nothing", REPO)


# when it goes wrong


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST", "/commit/", "status", times=None, status=500),
        Fault("POST", "/commit/", "status", status=403, times=None),
        Fault("POST", "/commit/", "drop", times=None),
        Fault("POST", "/preupload/", "status", times=None, status=400),
        Fault("PUT", "/lfs-upload/", "status", times=None, status=403),
        Fault("POST", "/objects/batch", "status", times=None, status=400),
        Fault("POST", "/validate-yaml", "status", times=None, status=500),
    ],
    ids=lambda fault: f"{fault.path} {fault.kind} {fault.status}",
)
@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("exists", [True, False], ids=["old repo", "new repo"])
def test_a_failed_push_leaves_the_remote_as_it_was_and_says_how_to_go_on(
    hub: Hub, result: Path, fault: Fault, exists: bool
) -> None:
    if exists:
        hub.create(REPO).commit({"README.md": "# old", "model.safetensors": b"old"})
    before = remote(hub) if exists else None
    injected = hub.inject(Fault(**{name: value for name, value in vars(fault).items() if name != "fired"}))
    with pytest.raises(PushError, match=f"hf-bico push .*result {REPO}") as caught:
        push_folder(result, REPO, PushOptions(overwrite=exists))
    assert injected.fired > 0
    assert "\n" not in caught.value.cause
    assert (remote(hub) if exists else None) == before
    assert exists or ("model", REPO) not in hub.repos
    hub._faults.clear()
    assert push_folder(result, REPO, PushOptions(overwrite=exists)).changed


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("kind", ["lost", "drop", "status"])
def test_a_commit_whose_answer_is_lost_or_refused_once_is_made_once(hub: Hub, result: Path, kind: str) -> None:
    fault = hub.inject(Fault("POST", "/commit/", kind, status=503))
    pushed = push_folder(result, REPO)
    assert fault.fired == 1
    assert pushed.commit == hub.repo(REPO).head()
    assert remote(hub) == local(result)
    assert len(hub.repo(REPO).history()) == 2


def test_somebody_elses_push_meanwhile_is_not_undone(hub: Hub, result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create(REPO).commit({"README.md": "# old"})
    from hf_bico.hub import push

    made = push._operations

    def slow(*arguments: object) -> object:
        hub.repo(REPO).commit({"README.md": "# theirs"})
        return made(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(push, "_operations", slow)
    with pytest.raises(PushError, match="hf-bico push"):
        push_folder(result, REPO, PushOptions(overwrite=True))
    assert remote(hub) == {"README.md": b"# theirs"}


# from Python


def test_ported_push_to_hub(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    ported = port(evaluate=False)
    pushed = ported.push_to_hub(REPO, private=True)
    assert pushed.private
    assert set(remote(hub)) == FILES - {"outcome.png"}, "nothing was measured"
    delta = ported.push_to_hub("user/delta", format="delta")
    assert set(remote(hub, "user/delta")) >= {"task_vector.safetensors", "bico.json", "README.md"}
    vector = hf_bico.TaskVector.load(delta.repo)
    assert vector.about["base"] == TARGET
    assert vector.about["base_commit"] == hub.repo(TARGET).head()


def test_task_vector_push_and_load(hub: Hub, tmp_path: Path) -> None:
    import torch
    from huggingface_hub import ModelCard

    publish(hub, tmp_path)
    hub.repo(SOURCE).private = True
    vector = hf_bico.TaskVector.from_models(SOURCE)
    assert vector.about["base"] == BASE
    pushed = vector.push_to_hub("user/vector")
    assert pushed.private
    again = hf_bico.TaskVector.load("user/vector")
    assert all(torch.equal(again[name], vector[name]) for name in vector)
    card = ModelCard(remote(hub, "user/vector")["README.md"].decode())
    card.validate()
    assert card.data.base_model == BASE
    code = card.text.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "card", "exec"), {})


def test_a_delta_on_the_hub_is_measured_over_the_model_that_it_was_made_for(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    ported = port()
    ported.push_to_hub("user/delta", format="delta", force=True)
    measured = hf_bico.evaluate_model("user/delta", DATA)
    assert measured.value == pytest.approx(ported.record.value("ported"))


def test_a_local_target_gets_its_id_only_if_the_weights_are_those(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path)
    ported = port(target=scene.target, target_id=TARGET, evaluate=False)
    assert (ported.record.target.id, ported.record.target.commit) == (TARGET, hub.repo(TARGET).head())
    with pytest.raises(BicoError, match=f"not those of '{BASE}'"):
        port(target=scene.target, target_id=BASE, evaluate=False)


# what must never happen


def test_a_pull_request_does_not_show_what_is_private(hub: Hub, result: Path) -> None:
    hub.create("laion/shared").commit({"README.md": "# theirs"})
    hub.repo(SOURCE).private = True
    with pytest.raises(PushRefusedError, match=f"made from {SOURCE}, which is not"):
        push_folder(result, "laion/shared", PushOptions(create_pr=True))
    assert hub.repo("laion/shared").pulls in ({}, [])


def test_asking_for_private_does_not_publish_into_a_public_repo(hub: Hub, result: Path) -> None:
    hub.create(REPO).commit({"notes.md": "public"})
    with pytest.raises(PushRefusedError, match="--private does not change that"):
        push_folder(result, REPO, PushOptions(overwrite=True, private=True))


def test_what_was_never_on_the_hub_is_pushed_private(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path)
    ported = port(scene.tuned, scene.target, base=scene.base, data=DATA)
    pushed = ported.push_to_hub("user/local", force=True)
    assert pushed.private
    assert pushed.because is not None
    assert "a local folder" in pushed.because
    assert not ported.push_to_hub("user/shown", force=True, private=False).private


def test_a_task_vector_is_as_private_as_what_it_is_made_of(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(SOURCE).private = True
    tau = hf_bico.TaskVector.from_models(SOURCE)
    ported = port()
    for index, vector in enumerate((0.5 * tau, tau + tau, -tau, ported.task_vector)):
        assert vector.push_to_hub(f"user/v{index}").private
    loaded = hf_bico.TaskVector.load("user/v0")
    assert loaded.push_to_hub("user/again").private
    assert hf_bico.TaskVector({"w": tau["visual.proj"]}).push_to_hub("user/unknown").private
    hub.repo(SOURCE).private = False
    assert not tau.push_to_hub("user/public").private


def test_a_cached_repo_named_by_its_folder_is_that_repo(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    publish(hub, tmp_path)
    hub.repo(SOURCE).private = True
    ported = port(snapshot_download(SOURCE))
    assert (ported.record.source.id, ported.record.source.commit) == (SOURCE, hub.repo(SOURCE).head())
    assert ported.push_to_hub(REPO, force=True).private


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"other")])
def test_a_folder_without_its_weights_is_not_pushed(hub: Hub, result: Path, damage: Callable[[Path], None]) -> None:
    hub.create(REPO).commit({WEIGHTS: b"theirs"})
    damage(result / WEIGHTS)
    with pytest.raises(PushError, match=f"'{WEIGHTS}' in 'result' is not the file"):
        push_folder(result, REPO, PushOptions(overwrite=True))
    assert remote(hub) == {WEIGHTS: b"theirs"}


def test_overwrite_removes_only_what_a_library_would_load(hub: Hub, result: Path) -> None:
    kept = ["training_args.bin", "embeddings.pt", "vocab.pkl", "controlnet.safetensors", "model.onnx"]
    gone = ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "open_clip_pytorch_model.bin"]
    hub.create(REPO).commit(dict.fromkeys([*kept, *gone], b"x"))
    push_folder(result, REPO, PushOptions(overwrite=True))
    assert set(remote(hub)) == FILES | set(kept)


@pytest.mark.parametrize("repo_id", [SOURCE, BASE, TARGET])
def test_what_it_was_made_from_is_not_replaced(hub: Hub, result: Path, repo_id: str) -> None:
    before = hub.repo(repo_id).head()
    with pytest.raises(PushRefusedError, match="which a push would replace"):
        push_folder(result, repo_id, PushOptions(overwrite=True))
    assert hub.repo(repo_id).head() == before


def create_first(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let somebody else create the repo between the look and the creation."""
    create = huggingface_hub.HfApi.create_repo

    def late(*arguments: Any, **options: Any) -> object:
        if ("model", REPO) not in hub.repos:
            hub.create(REPO)
        return create(*arguments, **options)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", late)


def created(hub: Hub, path: str = "/api/repos/create") -> int:
    return sum(one.method == "POST" and one.path.endswith(path) for one in hub.log)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("refused", ["/commit/", "/api/repos/create"])
def test_a_failed_push_deletes_no_repo_that_it_did_not_make(
    hub: Hub, result: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    create_first(hub, monkeypatch)
    hub.inject(Fault("POST", refused, "status", times=None, status=403))
    with pytest.raises(BicoError):
        push_folder(result, REPO)
    assert created(hub) == 1
    assert ("model", REPO) in hub.repos


@pytest.mark.usefixtures("no_waiting")
def test_a_repo_that_the_hub_does_not_know_yet_is_deleted_after_a_failed_push(hub: Hub, result: Path) -> None:
    unknown = {"X-Error-Code": "RepoNotFound"}
    hub.inject(Fault("GET", f"/api/models/{REPO}", "status", times=None, status=404, headers=unknown))
    with pytest.raises(BicoError) as caught:
        push_folder(result, REPO)
    assert created(hub) == 1
    assert ("model", REPO) not in hub.repos
    assert "could not be deleted" not in caught.value.cause


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    ("path", "info", "looks", "options"),
    [
        ("/api/repos/create", f"/api/models/{REPO}", 2, PushOptions()),
        ("/branch/dev", f"/api/models/{REPO}/revision/dev", 2, PushOptions(revision="dev", overwrite=True)),
    ],
    ids=["repo", "branch"],
)
def test_what_was_never_created_is_not_said_to_be_left(
    hub: Hub, result: Path, path: str, info: str, looks: int, options: PushOptions
) -> None:
    """The creation is refused, and then the Hub cannot be asked about it."""
    if options.revision:
        hub.create(REPO).commit({"README.md": "# main"})
    hub.inject(Fault("POST", path, "status", times=None, status=403))
    hub.inject(Fault("GET", info, "status", times=None, after=looks, status=503))
    with pytest.raises(BicoError) as caught:
        push_folder(result, REPO, options)
    assert created(hub, path) == 1
    assert "could not be deleted" not in caught.value.cause


def test_a_repo_that_is_not_there_is_looked_for_once(hub: Hub, result: Path) -> None:
    require_pushable(REPO, PushOptions(), Client())
    assert [one.path for one in hub.log].count(f"/api/models/{REPO}") == 1


@pytest.mark.usefixtures("no_waiting")
def test_a_failed_push_to_a_branch_leaves_no_branch_and_its_line_goes_on(hub: Hub, result: Path) -> None:
    hub.create(REPO).commit({"README.md": "# main"})
    hub.inject(Fault("POST", "/commit/", "status", times=None, status=500))
    wanted = PushOptions(revision="dev", message="Carried over", private=False, overwrite=True, force=True)
    with pytest.raises(PushError) as caught:
        push_folder(result, REPO, wanted)
    line = f"hf-bico push {result} {REPO} --public --overwrite --force --revision dev --message 'Carried over'"
    assert caught.value.remedy == f"go on with: {line}"
    assert "dev" not in hub.repo(REPO).branches
    hub._faults.clear()
    assert push_folder(result, REPO, wanted).url.endswith(f"{REPO}/tree/dev")
    assert f'snapshot_download("{REPO}", revision="dev")' in remote(hub, revision="dev")["README.md"].decode()
    with pytest.raises(UsageError, match="name a branch"):
        PushOptions(revision="refs/pr/1")


def test_links_out_of_the_folder_are_not_followed(hub: Hub, result: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (result / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(PushError, match=r"'notes.txt' is a link out of the folder"):
        push_folder(result, REPO)
    (result / "notes.txt").unlink()
    (result / "samples").mkdir()
    (result / "samples" / "one.txt").write_text("shown")
    push_folder(result, REPO)
    assert remote(hub)["samples/one.txt"] == b"shown"


def test_an_edited_card_is_said(hub: Hub, result: Path) -> None:
    assert not push_folder(result, "user/one").edited_card
    (result / "README.md").write_text("# my own words")
    assert push_folder(result, "user/two").edited_card


@pytest.mark.usefixtures("no_waiting")
def test_a_hub_that_cannot_tell_about_the_source_counts_as_private(hub: Hub, result: Path) -> None:
    hub.inject(Fault("GET", f"/api/models/{SOURCE}$", "status", times=None, status=500))
    assert push_folder(result, REPO).private


def test_a_worse_port_says_the_line_that_pushes_it(hub: Hub, result: Path) -> None:
    make_worse(result)
    with pytest.raises(PushRefusedError) as caught:
        push_folder(result, REPO)
    assert caught.value.remedy == f"insist with: hf-bico push {result} {REPO} --force"


def test_one_local_part_makes_a_vector_private(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    scene = publish(hub, tmp_path)
    shown = hf_bico.TaskVector.from_models(SOURCE)
    ported = port(scene.tuned, base=BASE, data=DATA)
    on_local_data = port(data=scene.data)
    vectors = [
        hf_bico.TaskVector.from_models(scene.tuned, base=BASE),
        shown + hf_bico.TaskVector({"visual.proj": shown["visual.proj"]}),
        ported.task_vector,
        hf_bico.TaskVector.load(ported.save(tmp_path / "delta", "delta")),
        on_local_data.task_vector,
    ]
    for index, vector in enumerate(vectors):
        assert vector.push_to_hub(f"user/v{index}").private, index
    shown.push_to_hub("user/hidden", private=True)
    file = hf_hub_download("user/hidden", "task_vector.safetensors")
    assert hf_bico.TaskVector.load(file).push_to_hub("user/from-a-file").private
    assert not shown.push_to_hub("user/shown").private


def test_a_vector_may_go_back_to_its_own_repo(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hf_bico.TaskVector.from_models(SOURCE).push_to_hub("user/tv")
    half = 0.5 * hf_bico.TaskVector.load("user/tv")
    assert half.push_to_hub("user/tv", overwrite=True).changed


@pytest.mark.usefixtures("no_waiting")
def test_a_push_that_succeeded_is_never_taken_back(hub: Hub, result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    commit = HfApi.create_commit

    def then_the_hub_goes_down(*arguments: object, **options: object) -> object:
        done = commit(*arguments, **options)  # type: ignore[arg-type]
        hub.inject(Fault("GET", f"/api/models/{REPO}", "status", times=None, status=503))
        return done

    monkeypatch.setattr(HfApi, "create_commit", then_the_hub_goes_down)
    pushed = push_folder(result, REPO, PushOptions(revision="v1"))
    assert pushed.commit == hub.repo(REPO).head("v1")
    assert remote(hub, revision="v1")[WEIGHTS] == (result / WEIGHTS).read_bytes()


@pytest.mark.usefixtures("no_waiting")
def test_a_branch_that_somebody_filled_meanwhile_stays(hub: Hub, result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_bico.hub import push

    hub.create(REPO).commit({"README.md": "# main"})
    made = push._operations

    def slow(*arguments: object) -> object:
        hub.repo(REPO).commit({"theirs.txt": "precious"}, revision="v1")
        return made(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(push, "_operations", slow)
    with pytest.raises(PushError):
        push_folder(result, REPO, PushOptions(revision="v1", overwrite=True))
    assert hub.repo(REPO).read("theirs.txt", "v1") == b"precious"


def test_the_source_is_not_replaced_under_its_old_name(hub: Hub, result: Path, tmp_path: Path) -> None:
    hub.move(SOURCE, "user/renamed")
    folder = port("user/renamed").save(tmp_path / "renamed")
    before = hub.repo("user/renamed").head()
    with pytest.raises(PushRefusedError, match="which a push would replace"):
        push_folder(folder, SOURCE, PushOptions(overwrite=True, force=True))
    assert hub.repo("user/renamed").head() == before


@pytest.mark.parametrize("text", ["\\ud800", "NaN"])
def test_a_record_that_cannot_be_written_again_stays(hub: Hub, result: Path, text: str) -> None:
    record = json.loads((result / "bico.json").read_text())
    if text == "NaN":
        record["evaluation"][0]["value"] = float("nan")
    else:
        record["notices"] = ["\ud800"]
    (result / "bico.json").write_text(json.dumps(record))
    before = (result / "bico.json").read_bytes()
    with pytest.raises(BicoError):
        push_folder(result, REPO)
    assert (result / "bico.json").read_bytes() == before


def test_a_private_delta_is_measured_with_the_token_that_was_given(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path)
    port().push_to_hub("user/delta", format="delta", private=True, force=True)
    monkeypatch.delenv("HF_TOKEN")
    assert hf_bico.evaluate_model("user/delta", DATA, token="hf_secretOfUser").data == DATA


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("revision", [None, "dev"])
def test_what_cannot_be_taken_back_is_said(hub: Hub, result: Path, revision: str | None) -> None:
    """A token may be allowed to write and not to delete."""
    if revision:
        hub.create(REPO).commit({"README.md": "# main"})
    hub.inject(Fault("POST", "/commit/", "status", times=None, status=403))
    hub.inject(Fault("DELETE", "/api/", "status", times=None, status=403))
    with pytest.raises(PushError) as caught:
        push_folder(result, REPO, PushOptions(revision=revision, overwrite=True))
    made = "branch 'dev'" if revision else "repo"
    assert f"the empty {made} that was made for it could not be deleted" in caught.value.cause
    assert "is as it was" not in caught.value.cause
