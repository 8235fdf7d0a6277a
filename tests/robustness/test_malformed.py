"""Whatever file is broken, the error says so by its own class, in two lines, soon, and nothing is written."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_bico import errors
from support.bounds import within
from support.hub import Hub
from support.malformed import CASES
from support.malformed.entries import ENTRIES, FAILING, copied, make_scene

SECONDS = 20
MEMORY = 600 * 2**10
"""By how many kilobytes the most that was ever taken may grow."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scene(tmp_path_factory.mktemp("malformed") / "scene")


@pytest.fixture(autouse=True)
def _in_scene(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good)
    monkeypatch.delenv("HF_BICO_DEBUG", raising=False)
    # what does not end is given up sooner than for users, whose machines may be busy
    monkeypatch.setattr("hf_bico.models.adapters.patterns.EXPRESSION_SECONDS", 1.0)
    monkeypatch.setattr("hf_bico.models.tokenization.TEMPLATE_SECONDS", 2.0)


@pytest.fixture
def scene(good: Path) -> Iterator[Path]:
    folder = copied(good, good.with_name("spoilt"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_unspoilt_scene_passes(entry: str, scene: Path, hub: Hub, tmp_path: Path) -> None:
    ENTRIES[entry](scene, tmp_path / "out")


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_input_is_refused(name: str, scene: Path, hub: Hub, tmp_path: Path) -> None:
    case = CASES[name]
    case.spoil(scene)
    before, taken = _names(scene), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (tmp_path / "result").mkdir()
    entry = {**ENTRIES, **FAILING}[case.entry]
    with pytest.raises(errors.BicoError) as caught, within(SECONDS):
        entry(scene, tmp_path / "result" / "out")
    error = caught.value
    assert type(error) is getattr(errors, case.error), error
    for line in (error.cause, error.remedy):
        assert line.strip()
        assert len(line.splitlines()) == 1
    assert list((tmp_path / "result").iterdir()) == [], "neither a result nor a scratch folder stays"
    assert _names(scene) == before
    assert not Path("pwned").exists(), "no code of a file was run"
    assert hub.repos.get(("model", "user/pushed")) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - taken < MEMORY


def _names(folder: Path) -> set[str]:
    found = ((root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files))
    return {os.path.join(root, name) for root, name in found if not name.endswith(".lock")}


def test_there_are_many() -> None:
    assert len(CASES) >= 150
    assert "UnforeseenError" not in {case.error for case in CASES.values()}
