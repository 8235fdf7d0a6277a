"""A sample of the matrix of faults, which meets every request of a port and a push; and what the whole of it showed."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from hf_bico.errors import HubUnavailableError, PushError, PushRefusedError, RepoError, TokenError
from hf_bico.hub import retries
from hf_bico.hub.client import Hub as Client
from hf_bico.hub.client import RemoteFile
from hf_bico.hub.push import PushOptions
from hf_bico.hub.references import HubReference
from hf_bico.porting.publish import push_folder
from support import forks
from support.fault_matrix import CIRCLES, FAULTS, Part, do
from support.hub import Fault, Hub
from support.loopback import TOKEN

REPO = "user/vit-b16-plus-eurosat"
SEEN = r"^(?!(HEAD.*laion/|.*laion/.*/(README|tokenizer)))"
"""Without those requests for the base and the target that are made for the source too."""
OTHERS = r"^GET.*(parquet|index\.json|-of-|adapter)"
"""Requests for parts of data, for shards, and for adapters."""
UNANSWERED = [Fault(kind="lost"), Fault(kind="drop"), Fault(status=503)]


@pytest.mark.usefixtures("hub", "own_client")
@pytest.mark.parametrize("circle", [index for index, _ in enumerate(CIRCLES)], ids=[circle.name for circle in CIRCLES])
def test_each_request_may_fail(circle: int) -> None:
    """Each kind of request with one of the faults; of a second port, those that the first one does not make.

    Faults that pass are met several in a run.
    """
    part = Part(circle, every=len(FAULTS), only=OTHERS if circle == 1 else SEEN, together=6)
    requests, cells = do(part)
    print(Counter((cell.fault, cell.ended) for cell in cells))
    met = {cell.request for cell in cells}
    assert met == {request for request in requests if re.search(part.only, f"{request.method} {request.shown}")}
    assert [(str(cell.request), cell.fault, *cell.bad) for cell in cells if cell.bad] == []


@pytest.fixture
def own_client() -> Iterator[None]:
    """The client of the Hub as new, before and after: a test may make it impatient."""
    from huggingface_hub import close_session

    close_session()
    yield
    close_session()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between tries, which nobody waits for."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("made", ["repos/create", "branch/dev"])
@pytest.mark.parametrize("fault", UNANSWERED, ids=["lost", "drop", "503"])
def test_a_repo_or_a_branch_whose_making_is_not_answered_is_made_once(
    hub: Hub, result: Path, made: str, fault: Fault
) -> None:
    planted = hub.inject(Fault("POST", made, fault.kind, status=fault.status))
    push_folder(result, REPO, PushOptions(revision="dev"))
    assert planted.spent
    assert hub.repo(REPO).read("bico.json", "dev") == (result / "bico.json").read_bytes()


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("made", ["repos/create", "branch/dev"])
def test_what_may_have_been_made_is_taken_back(hub: Hub, result: Path, made: str) -> None:
    """Every try is carried out as far as can be, and none is answered."""
    hub.inject(Fault("POST", made, "lost", times=None))
    with pytest.raises(PushError, match=f"the push failed, and '{REPO}' is as it was"):
        push_folder(result, REPO, PushOptions(revision="dev"))
    assert ("model", REPO) not in hub.repos


@pytest.mark.usefixtures("no_waiting")
def test_a_deletion_that_is_not_answered_is_one(hub: Hub, result: Path) -> None:
    hub.create(REPO).commit({"README.md": "# main"})
    hub.inject(Fault("POST", "/commit/", "status", times=None, status=403))
    lost = hub.inject(Fault("DELETE", "/branch/", "lost"))
    with pytest.raises(PushError, match="is as it was"):
        push_folder(result, REPO, PushOptions(revision="dev", overwrite=True))
    assert lost.spent
    assert set(hub.repo(REPO).branches) == {"main"}


def test_somebody_elses_public_repo_does_not_get_what_is_private(
    hub: Hub, result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our creation is not answered, and before it is tried again somebody makes a public repo of that name."""
    monkeypatch.setattr("time.sleep", lambda seconds: hub.create(REPO))
    hub.inject(Fault("POST", "repos/create", "drop"))
    with pytest.raises(PushRefusedError, match="public: --private does not change that"):
        push_folder(result, REPO, PushOptions(private=True))
    assert set(hub.repo(REPO).files()) == {".gitattributes"}


@pytest.mark.usefixtures("no_waiting")
def test_a_repo_that_one_machine_of_the_hub_does_not_know_yet_gets_all_that_it_should(hub: Hub, result: Path) -> None:
    hub.create(REPO).commit({"README.md": "# old", "model.safetensors": b"old"})
    unknown = {"X-Error-Code": "RepoNotFound"}
    for after in range(8):
        hub.forgive()
        hub.inject(Fault("GET", f"/api/models/{REPO}", status=404, headers=unknown, after=after))
        push_folder(result, REPO, PushOptions(overwrite=True))
        assert "model.safetensors" not in hub.repo(REPO).files(), after
        hub.repo(REPO).commit({"README.md": "# old", "model.safetensors": b"old"})


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("fault", UNANSWERED, ids=["lost", "drop", "503"])
def test_a_pull_request_is_opened_once(hub: Hub, result: Path, fault: Fault) -> None:
    hub.create(REPO).commit({"README.md": "# main"})
    hub.inject(Fault("POST", "/commit/", fault.kind, status=fault.status))
    first = push_folder(result, REPO, PushOptions(create_pr=True))
    second = push_folder(result, REPO, PushOptions(create_pr=True))
    assert (first.changed, second.changed) == (True, False)
    assert first.pull_request == second.pull_request == f"{hub.url}/{REPO}/discussions/1"
    assert list(hub.repo(REPO).pulls) == [1]


@pytest.mark.usefixtures("no_waiting", "own_client")
def test_a_pull_request_that_is_opened_late_is_not_opened_twice(
    hub: Hub, result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "REQUEST_TIMEOUT", 0.5)
    hub.create(REPO).commit({"README.md": "# main"})
    hub.inject(Fault("POST", "/validate-yaml", "slow", seconds=1))  # which may be asked again
    hub.inject(Fault("POST", "/commit/", "slow", seconds=1))
    with pytest.raises(PushError, match="the Hub did not say in time whether the pull request is open"):
        push_folder(result, REPO, PushOptions(create_pr=True))
    started = time.monotonic()
    while not hub.repo(REPO).pulls and time.monotonic() - started < 10:
        threading.Event().wait(0.1)
    assert not push_folder(result, REPO, PushOptions(create_pr=True)).changed
    assert list(hub.repo(REPO).pulls) == [1]


@pytest.mark.usefixtures("no_waiting")
def test_a_branch_that_could_not_be_deleted_is_gone_on_with(hub: Hub, result: Path) -> None:
    hub.create(REPO).commit({"README.md": "# main"})
    hub.inject(Fault("POST", "/commit/", "status", times=None, status=403))
    hub.inject(Fault("DELETE", "/branch/", "status", times=None, status=403))
    with pytest.raises(PushError, match="the empty branch 'dev' that was made for it could not be deleted"):
        push_folder(result, REPO, PushOptions(revision="dev"))
    hub.forgive()
    push_folder(result, REPO, PushOptions(revision="dev"))
    assert hub.repo(REPO).read("README.md") == b"# main"
    assert hub.repo(REPO).read("README.md", "dev") == (result / "README.md").read_bytes()


@pytest.mark.usefixtures("own_client")
def test_an_answer_is_not_waited_for_for_ever(
    hub: Hub, no_waiting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "REQUEST_TIMEOUT", 0.2)
    hub.create("user/model").commit({"README.md": "# here"})
    hub.inject(Fault("GET", "/api/models/user/model", "slow", times=None, seconds=2))
    started = time.monotonic()
    with pytest.raises(HubUnavailableError, match="timed out"):
        Client().repo(HubReference("user/model"), "the model")
    assert time.monotonic() - started < 2
    assert no_waiting == [1, 2, 4]


@pytest.mark.usefixtures("own_client", "no_waiting")
def test_a_time_that_was_set_stays(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header is asked for with the client's own ten seconds."""
    monkeypatch.setattr(retries, "REQUEST_TIMEOUT", 0.2)
    hub.create("user/model").commit({"model.safetensors": save({"weight": torch.ones(2)})})
    repo = Client().repo(HubReference("user/model"), "the model")
    slow = hub.inject(Fault("GET", "/resolve/", "slow", times=None, seconds=0.5))
    assert repo.header("model.safetensors") == {"weight": (2,)}
    assert slow.fired == 1


def test_a_busy_hub_says_how_long_to_wait(hub: Hub, no_waiting: list[float]) -> None:
    hub.create("user/model").commit({"README.md": "# here"})
    hub.inject(Fault("GET", "/api/models/user/model", status=429, headers={"Retry-After": "7"}))
    Client().repo(HubReference("user/model"), "the model")
    assert no_waiting == [7]


@pytest.mark.usefixtures("no_waiting")
def test_a_page_in_place_of_an_answer_is_no_surprise(hub: Hub) -> None:
    hub.create("user/model").commit({"README.md": "# here"})
    page = "<html><body>Log in to this network</body></html>"
    hub.inject(Fault("GET", "/api/", status=200, body=page, times=None))
    with pytest.raises(HubUnavailableError, match="the answer is empty or a web page, and not the Hub's"):
        Client().repo(HubReference("user/model"), "the model")


@pytest.mark.usefixtures("no_waiting")
def test_a_page_in_place_of_a_file_is_not_taken_for_a_full_disk(hub: Hub) -> None:
    hub.create("user/model").commit({"README.md": "# here"})
    hub.inject(Fault("GET", "/resolve/", status=200, body="<html></html>", times=None))
    with pytest.raises(HubUnavailableError, match="'user/model': a file was not downloaded completely"):
        Client().repo(HubReference("user/model"), "the model").fetch(["README.md"])


WEIGHTS = save({"weight": torch.ones(400)})


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault("GET", turned=True), "that the Hub lists"),
        (Fault("HEAD", headers={"X-Repo-Commit": "0" * 40}), "answers with another commit"),
        (Fault("HEAD", kind="elsewhere", instead={"user/model": "user/other"}), "answers with another commit"),
        (Fault("GET", kind="elsewhere", instead={"user/model": "user/other"}), "that the Hub lists"),
    ],
    ids=["bytes", "commit", "repo", "file"],
)
def test_a_file_that_is_not_the_listed_one_is_refused_and_not_kept(
    hub: Hub, fault: Fault, cause: str, name: str
) -> None:
    """Of the same size, so that nobody else notices."""
    files = {"config.json": '{"a": 1}', "model.safetensors": WEIGHTS}
    hub.create("user/model").commit(files)
    hub.create("user/other").commit({"config.json": '{"a": 2}', "model.safetensors": WEIGHTS[:-1] + b"x"})
    repo = Client().repo(HubReference("user/model"), "the model")
    kind = "other" if fault.kind == "status" else fault.kind
    hub.inject(replace(fault, path="/resolve/", kind=kind, times=None))
    with pytest.raises(HubUnavailableError, match=f"'{name}' of 'user/model'.*{cause}"):
        repo.fetch([name])
    assert repo.cached(name) is None
    hub.forgive()
    assert (repo.fetch([name]) / name).read_bytes() == hub.repo("user/model").read(name)


@pytest.mark.usefixtures("no_waiting")
def test_a_commit_that_was_not_asked_for_is_refused(hub: Hub) -> None:
    commit = hub.create("user/model").commit({"config.json": "{}"})
    hub.create("user/other").commit({"config.json": "{}"})
    hub.inject(Fault(path="/api/models", kind="elsewhere", instead={"user/model": "user/other"}))
    with pytest.raises(HubUnavailableError, match="the Hub answers with the commit"):
        Client().repo(HubReference("user/model", commit), "the model")


@pytest.mark.usefixtures("no_waiting")
def test_bytes_of_another_commit_are_refused(hub: Hub) -> None:
    hub.create("user/data", type="dataset").commit({"rows.parquet": bytes(1000)})
    repo = Client().repo(HubReference("user/data"), "the data set", "dataset")
    hub.inject(Fault("GET", "/resolve/", "other", headers={"X-Repo-Commit": "0" * 40}))
    with pytest.raises(HubUnavailableError, match="answers with another commit"):
        RemoteFile(repo, "rows.parquet").read(100)
    assert RemoteFile(repo, "rows.parquet").read(100) == bytes(100)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    "body", ["[]", "{}", "7", "null", '"text"', '{"id": 7}', '{"id": "user/model", "sha": "main"}']
)
def test_an_answer_of_another_shape_is_no_surprise(hub: Hub, result: Path, body: str) -> None:
    hub.create("user/model").commit({"README.md": "# here"})
    hub.inject(Fault("GET", "/api/", "other", body=body, times=None))
    not_of_the_hub = pytest.raises(HubUnavailableError, match="the answer is empty or a web page, and not the Hub's")
    with not_of_the_hub:
        Client().repo(HubReference("user/model"), "the model")
    with not_of_the_hub:
        push_folder(result, REPO, PushOptions())
    with pytest.raises(RepoError):  # 404, and what is near cannot be found out
        Client().repo(HubReference("user/model", "gone"), "the model")
    assert ("model", REPO) not in hub.repos


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("body", ["[]", "{}", "fine"])
@pytest.mark.parametrize("create_pr", [False, True])
def test_a_commit_whose_answer_is_not_of_the_hub_is_made_once(
    hub: Hub, result: Path, body: str, create_pr: bool
) -> None:
    hub.create(REPO).commit({"README.md": "# main"})
    hub.inject(Fault("POST", "/commit/", "other", body=body))
    push_folder(result, REPO, PushOptions(create_pr=create_pr, overwrite=not create_pr))
    assert list(hub.repo(REPO).pulls) == [1] * create_pr
    assert len(hub.repo(REPO).history()) == 3 - create_pr


XET = {
    "503": (Fault(status=503), 0),
    "drop": (Fault(kind="drop"), 0),
    "503 on": (Fault(status=503, times=None), 1),
    "drop on": (Fault(kind="drop", times=None), 1),
    "403": (Fault(status=403, times=None), 1),
    "an object": (Fault(kind="other", body="{}", times=None), 1),
    "no store": (
        Fault(kind="other", body='{"casUrl": "http://127.0.0.1:9", "exp": 4000000000, "accessToken": "x"}'),
        1,
    ),
}


@pytest.mark.parametrize("name", XET)
def test_a_fault_of_xet_is_tried_again_by_xet_alone(name: str, hub: Hub, result: Path, tmp_path: Path) -> None:
    """It waits for minutes, which we do not repeat."""
    fault, code = XET[name]
    hub.inject(replace(fault, method="GET", path="/xet-write-token/"))
    hurried = {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1", "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms"}
    environment = hub.environment(tmp_path / "home", TOKEN, xet=True) | hurried
    done = forks.run("push", str(result), REPO, env=environment)
    assert done.returncode == code, done.stderr
    tokens = [request for request in hub.log if "xet-write-token" in request.path]
    assert 1 <= len(tokens) <= 2
    assert (("model", REPO) in hub.repos) == (code == 0)
    if code:
        cause, remedy = done.stderr.splitlines()
        assert cause.startswith(f"Error: the push failed, and '{REPO}' is as it was: ")
        assert remedy == f"Remedy: go on with: hf-bico push {result} {REPO}"


def test_a_token_that_is_refused_after_the_work_says_the_line_that_goes_on(hub: Hub, result: Path) -> None:
    hub.inject(Fault("GET", "/api/whoami-v2", status=401))
    with pytest.raises(TokenError) as caught:
        push_folder(result, REPO, PushOptions(private=True))
    assert caught.value.remedy == f"{retries.LOG_IN}, then go on with: hf-bico push {result} {REPO} --private"
