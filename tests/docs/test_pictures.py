"""The drawn pictures of the documentation are what their scripts draw, byte for byte, and show what BiCo computes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_bico.alignment.procrustes import polar
from support import ROOT, forks
from support.measured import STAMP, drawn_here

FOLDER = ROOT / "docs" / "pictures"


def run_script(name: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(FOLDER)  # as Python does for a script
        return runpy.run_path(str(FOLDER / name))


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return run_script("how_it_works.py")


def test_drawing_again_gives_the_same_bytes(script: dict[str, Any], tmp_path: Path) -> None:
    """Here and in another process."""
    once = script["as_bytes"]()
    assert script["as_bytes"]() == once, "nothing of the first drawing is left in the second"
    path = f"sys.path.insert(0, {str(FOLDER)!r})"
    code = f"import runpy, sys; {path}; runpy.run_path({str(FOLDER / 'how_it_works.py')!r}, run_name='__main__')"
    forks.run(str(tmp_path / "drawn.svg"), code=code, check=True)
    assert (tmp_path / "drawn.svg").read_bytes() == once


@pytest.mark.skipif(not drawn_here(STAMP.read_text()), reason="another matplotlib drew the pictures: make docs")
def test_what_is_kept_is_what_is_drawn(script: dict[str, Any]) -> None:
    assert (FOLDER / "how-it-works.svg").read_bytes() == script["as_bytes"]()


def test_the_packages_are_drawn_as_they_import() -> None:
    script = run_script("architecture.py")
    assert {("cli", "experiments"), ("experiments", "porting"), ("porting", "alignment")} <= script["arrows"]()
    if drawn_here(STAMP.read_text()):
        assert (FOLDER / "architecture.svg").read_bytes() == script["as_bytes"]()


def test_the_picture_holds_no_date_and_no_font(script: dict[str, Any]) -> None:
    text = script["as_bytes"]().decode()
    assert "<dc:date>" not in text
    assert "font-family" not in text, "words are drawn as paths: the same on every machine"
    assert script["as_bytes"]("png").startswith(b"\x89PNG")


def test_the_maps_of_the_picture_are_ours(script: dict[str, Any]) -> None:
    shown = {name: torch.from_numpy(np.array(values)) for name, values in script["layer"]().items()}
    for rows, name in (("x", "r_in"), ("g", "r_out")):
        a, b = shown[f"{rows}_a"], shown[f"{rows}_b"]
        [found] = polar([a.T @ b], [float(a.norm() * b.norm())])
        assert torch.allclose(found.matrix, shown[name])
        assert found.score > 0.9, "B's layer is nearly A's in other coordinates"
    assert torch.allclose(shown["r_out"].T @ shown["tau_a"] @ shown["r_in"], shown["tau_b"])
