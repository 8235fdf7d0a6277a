"""What goes to PyPI: wheel and source are whole, their page is sound, and the wheel works where it is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from hf_bico.utils import __version__
from support import ROOT

CORPUS = ROOT / "tests" / "support" / "corpus" / "record"
FILES = {
    file.relative_to(ROOT).as_posix()
    for file in (ROOT / "hf_bico").rglob("*")
    if file.is_file() and "__pycache__" not in file.parts
}
"""The package in the checkout."""


def run(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that knows nothing of the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True)


def done(*words: str | Path, cwd: Path | None = None) -> str:
    """What a command says that must go well."""
    result = run(*words, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the source distribution, and of the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"hf_bico-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def page(wheel: Path) -> Message:
    """The metadata, with the description that PyPI shows."""
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"hf_bico-{__version__}.dist-info/METADATA"))


def installed(wheel: Path, folder: Path, *options: str) -> Path:
    """The programs of a new environment with the wheel in it."""
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    done(sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", *options, wheel)
    return programs


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of an environment that sees the packages of this one, and behind the wheel: never the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    programs = installed(wheel, folder, "--no-deps", "--no-index")
    (own,) = folder.glob("lib/python*/site-packages")
    libraries = [place for place in sys.path if place.endswith("site-packages")]
    (own / "libraries.pth").write_text("\n".join(libraries))  # none of the .pth files in there are read
    return programs


def test_wheel_and_source_hold_the_package_and_nothing_else(built: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    about = f"hf_bico-{__version__}.dist-info"
    beside = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert names == FILES | {f"{about}/{name}" for name in beside}
    with tarfile.open(built / f"hf_bico-{__version__}.tar.gz") as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    beside = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", ".gitignore"}
    assert sources == FILES | beside


def test_twine_finds_nothing_to_say(built: Path) -> None:
    done(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())


def test_no_link_of_the_page_is_relative(page: Message) -> None:
    """PyPI shows README outside of the repository."""
    description = page.get_payload()
    assert isinstance(description, str)
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert len(links) > 30
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    own = "https://github.com/hf-bico/hf-bico/blob/main/"
    named = {link.removeprefix(own).partition("#")[0] for link in links if link.startswith(own)}
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
    raw = "https://raw.githubusercontent.com/hf-bico/hf-bico/main/"
    pictures = re.findall(r"!\[[^\]]*\]\((?!https://img\.shields\.io/)([^)]+)\)", description)
    assert pictures
    assert all(link.startswith(raw) and (ROOT / link.removeprefix(raw)).is_file() for link in pictures)


def test_metadata_name_the_licence_and_the_python_versions(page: Message) -> None:
    assert page["License-Expression"] == "Apache-2.0"
    assert page["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in page.get_all("Classifier", [])
    assert not any(line.startswith("License ::") for line in page.get_all("Classifier", []))


def test_mypy_reads_the_types_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "environment", "--no-deps", "--no-index")
    code = tmp_path / "typed.py"
    code.write_text("import hf_bico\n\nreveal_type(hf_bico.Settings().alpha)\nhf_bico.port('source')\n")
    mypy = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--python-executable", programs / "python"]
    told = run(*mypy, code.name, cwd=tmp_path).stdout
    assert re.search(r'Revealed type is ".*float', told), told
    assert 'Missing positional argument "to" in call to "port"' in told


def test_the_wheel_runs_beside_installed_packages(programs: Path, tmp_path: Path) -> None:
    assert done(programs / "hf-bico", "--version", cwd=tmp_path).split()[-1] == __version__
    assert done(programs / "hf-bico", "demo", "--help", cwd=tmp_path).startswith("Usage: hf-bico demo")
    code = "import hf_bico; print(hf_bico.__file__, callable(hf_bico.port))"
    file, is_callable = done(programs / "python", "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(programs.parent)
    assert is_callable == "True"


@pytest.mark.parametrize("record", ["port-seed", "made-seed"])
def test_the_wheel_has_the_templates_of_cards(programs: Path, record: str, tmp_path: Path) -> None:
    (tmp_path / "bico.json").write_bytes((CORPUS / f"{record}.json").read_bytes())
    done(programs / "hf-bico", "card", tmp_path)
    assert (tmp_path / "README.md").read_text().startswith("---\n")


def test_the_wheel_has_the_tables_of_the_paper(programs: Path, tmp_path: Path) -> None:
    tables = json.loads(done(programs / "hf-bico", "reproduce", "--json", cwd=tmp_path))
    assert tables


@pytest.fixture
def large_folder() -> Iterator[Path]:
    """A folder that does not stay: several gigabytes are installed in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_the_wheel_brings_all_that_it_needs(wheel: Path, large_folder: Path) -> None:
    programs = installed(wheel, large_folder / "environment", "--no-cache-dir")
    told = done(programs / "hf-bico", "demo", large_folder / "demo", cwd=large_folder)
    assert (large_folder / "demo").is_dir(), told
