"""The packages import downward only, and none of them loads torch when it is only named."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

pytestmark = pytest.mark.quick

FLOORS = (
    ("utils", "errors"),
    ("settings",),
    ("arguments",),
    ("hub", "runtime"),
    ("data", "models"),
    ("alignment", "reports"),
    ("porting",),
    ("experiments",),
    ("cli",),
    ("__init__", "__main__"),
)
HEIGHT = {room: height for height, floor in enumerate(FLOORS) for room in floor}
MODULES = sorted((ROOT / "hf_bico").rglob("*.py"))
PACKAGES = sorted(file.parent for file in MODULES if file.name == "__init__.py")


def room_of(module: str) -> str:
    """The entry of the package's top level that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def imported(file: Path) -> Iterator[str]:
    """Our modules that a file imports, wherever in it, and for types too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "hf_bico")
        elif isinstance(node, ast.ImportFrom) and (node.level or str(node.module).split(".")[0] == "hf_bico"):
            assert node.level == 0, f"{file} imports relatively, which is not followed here"
            whole = node.module == "hf_bico"
            yield from (f"hf_bico.{name.name}" for name in node.names) if whole else [str(node.module)]


def test_the_top_level_is_what_the_floors_name() -> None:
    entries = {
        path.stem for path in (ROOT / "hf_bico").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert entries == set(HEIGHT)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_arrows_run_down(file: Path) -> None:
    own = room_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
    upward = {name for name in imported(file) if room_of(name) != own and HEIGHT[room_of(name)] >= HEIGHT[own]}
    assert upward == set()


def test_no_package_loads_torch() -> None:
    names = ", ".join(".".join(package.relative_to(ROOT).parts) for package in PACKAGES)
    code = f"import sys, {names}; print({{'torch', 'transformers', 'numpy', 'matplotlib'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


PRINTING = {"print", "echo", "secho", "echo_via_pager", "confirm", "prompt", "pause", "Console", "Live", "Progress"}
"""Names by which Python, click and rich write to a terminal; `echo` of ours is called by its bare name."""


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_two_modules_print(file: Path) -> None:
    """Only there is a stranger's text made harmless."""
    if file in [ROOT / "hf_bico" / "cli" / name for name in ("console.py", "progress.py")]:
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            ours = called in ("echo", "console.echo")
            assert ours or called.rpartition(".")[2] not in PRINTING, f"line {node.lineno} calls {called}"
            assert not called.startswith(("sys.stdout.", "sys.stderr.", "sys.__")), f"line {node.lineno} calls {called}"
