"""The notebooks run as they stand on the small world, show what is stored in them, and push what can be loaded.

Also what the results show of themselves in a notebook, and the bars that are shown there while one waits.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from markdown_it import MarkdownIt
from nbformat import NotebookNode
from transformers import CLIPModel, CLIPVisionModel

import hf_bico
from hf_bico.errors import PickledWeightsError
from hf_bico.experiments.demo.world import World
from support import notebooks
from support.hub import Hub
from support.hub_scenes import upload
from support.measured import drawn_here, is_as_shown, look_alike, measured_here
from support.notebooks import (
    FOLDER,
    LORA_BASE,
    OWNER,
    PARAMETERS,
    PUSHED,
    PUSHED_BEST,
    PUSHED_LORA,
    TARGET,
    TASK,
    execute,
    publish,
    run_cells,
    stored,
)
from support.paper import PAPER
from support.scenes import Scene, make_scene
from support.transformers_world import as_transformers

NAMES = sorted(PARAMETERS)
SENTENCE = (
    "The outputs stored here are of the small world that `hf-bico demo` makes, so that they can be checked; with the "
    "parameters as they stand they will be other numbers."
)
COMMIT = re.compile(r"\b[0-9a-f]{12}\b")
OF_THE_MACHINE = re.compile(r"127\.0\.0\.1|localhost|/tmp|/home|/root|site-packages|\d%\|")


def outputs_of(notebook: NotebookNode) -> list[tuple[str, NotebookNode]]:
    return [(cell.id, output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts_of(notebook: NotebookNode) -> list[tuple[str, str, str]]:
    """(cell, kind, text) of everything that was printed or shown; a commit is that of this machine's weights."""
    found = []
    for cell, output in outputs_of(notebook):
        kinds = {output.name: output.text} if output.output_type == "stream" else output.data
        texts = {kind: text for kind, text in sorted(kinds.items()) if kind != "image/png"}
        found += [(cell, kind, COMMIT.sub("COMMIT", text)) for kind, text in texts.items()]
    return found


def pictures_of(notebook: NotebookNode) -> dict[str, bytes]:
    """The picture that a cell shows."""
    shown = {cell: output.data.get("image/png") for cell, output in outputs_of(notebook) if "data" in output}
    return {cell: base64.b64decode(text) for cell, text in shown.items() if text}


@pytest.mark.parametrize(
    ("name", "repo", "weights"),
    [
        ("01_port_a_clip_finetune", PUSHED, "open_clip_model.safetensors"),
        ("02_port_a_lora", PUSHED_LORA, "adapter_model.safetensors"),
        ("03_compare_and_diagnose", PUSHED_BEST, "open_clip_model.safetensors"),
    ],
)
def test_a_notebook_gives_what_is_stored_and_pushes_what_loads(
    name: str, repo: str, weights: str, hub: Hub, worlds: Callable[[int], World], tmp_path: Path
) -> None:
    """`make notebooks` stores the outputs again, of kernels as people start them."""
    import open_clip
    from peft import PeftModel

    publish(hub, worlds(0), tmp_path / "world", lora=weights.startswith("adapter"))
    ran, kept = execute(name, tmp_path / "run", forked=True), stored(name)
    exact = measured_here(kept.metadata.made_on)
    for one, other in zip(texts_of(ran), texts_of(kept), strict=True):
        assert one[:2] == other[:2]
        assert is_as_shown(other[2].splitlines(), one[2].splitlines(), exact), f"make notebooks stores {one[0]} again"
    drawn, shown = pictures_of(ran), pictures_of(kept)
    assert drawn.keys() == shown.keys()
    same = exact and drawn_here(kept.metadata.made_on)
    assert all(look_alike(drawn[cell], shown[cell], same) for cell in shown)
    assert set(hub.repo(repo).files()) >= {"README.md", "bico.json", "alignment.png", weights}
    if weights.startswith("adapter"):
        PeftModel.from_pretrained(open_clip.create_model(f"hf-hub:{TARGET}"), repo)
    else:
        open_clip.create_model(f"hf-hub:{repo}")
    (ported,) = [one for one in json.loads(hub.repo(repo).read("bico.json"))["evaluation"] if one["model"] == "ported"]
    assert hf_bico.evaluate_model(repo).value == ported["value"]


def test_a_notebook_passes_where_the_base_has_only_a_pickle(
    hub: Hub, worlds: Callable[[int], World], tmp_path: Path
) -> None:
    """As older repos of CLIP have it, with a vision tower alone as the fine-tune: what the parameters name as they
    stand."""
    world, source = worlds(0), f"{OWNER}/narrow-{TASK}-tower"
    publish(hub, world, tmp_path / "world", lora=False)
    tuned = as_transformers(world.fine_tuned("narrow", TASK), tmp_path / "tuned")
    CLIPVisionModel.from_pretrained(tuned).save_pretrained(tmp_path / "tower")
    upload(hub, source, tmp_path / "tower", "---\nlicense: mit\n---\n")
    base = CLIPModel.from_pretrained(tmp_path / "world" / "narrow-hf")
    torch.save({**base.state_dict(), **dict(base.named_buffers())}, tmp_path / "pickle")  # older ones keep buffers too
    hub.repo(LORA_BASE).commit({"pytorch_model.bin": tmp_path / "pickle"}, delete=["model.safetensors"])
    with pytest.raises(PickledWeightsError):
        hf_bico.plan(source, to=TARGET, base=LORA_BASE)
    run_cells(NAMES[0], tmp_path / "run", SOURCE=source, BASE=LORA_BASE)
    record = json.loads(hub.repo(PUSHED).read("bico.json"))
    assert any("pickled" in notice for notice in record["notices"])
    measured = {one["model"]: one["value"] for one in record["evaluation"]}
    assert measured["ported"] > measured["target"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_says_what_its_outputs_are(name: str) -> None:
    notebook = stored(name)
    nbformat.validate(notebook)
    first = notebook.cells[0].source
    assert len(notebook.cells) < 15
    link = f"https://colab.research.google.com/github/hf-bico/hf-bico/blob/main/notebooks/{name}.ipynb"
    assert sum(cell.source.count("colab-badge.svg") for cell in notebook.cells) == 1 == first.count(f"({link})")
    assert SENTENCE in first
    assert 'find_spec("hf_bico") is None' in notebook.cells[1].source
    (parameters,) = notebooks.parameters_cells(notebook)
    assert parameters.source.count("tanganke/") == 2
    assert "PUSH_TO = None" in parameters.source
    # nobody shall take the numbers for those of the models that are named above them
    assert all("small-world/" in output.text for output in parameters.outputs)
    assert parameters.outputs


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_hold_nothing_of_the_machine_or_the_hour(name: str) -> None:
    file = FOLDER / f"{name}.ipynb"
    notebook = stored(name)
    assert file.stat().st_size < 300_000
    assert {output.output_type for _, output in outputs_of(notebook)} <= {"stream", "display_data", "execute_result"}
    assert not [text for _, _, text in texts_of(notebook) if OF_THE_MACHINE.search(text)]
    assert "stderr" not in {kind for _, kind, _ in texts_of(notebook)}
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert set(counts) == {None}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.accelerator == "GPU"
    assert notebook.metadata.language_info == notebooks.LANGUAGE


def test_parameters_are_put_in_by_name_and_comments_stay() -> None:
    notebook = notebooks.with_parameters(stored(NAMES[0]), {"SAMPLES": 7})
    (cell,) = notebooks.parameters_cells(notebook)
    assert "SAMPLES = 7  # images to calibrate on\n" in cell.source
    with pytest.raises(ValueError, match="sets OTHER 0 times"):
        notebooks.with_parameters(notebook, {"OTHER": 1})


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark").enable("table").render(markdown)


def test_a_plan_is_a_line_in_text_and_a_table_in_a_notebook(scene: Scene, tmp_path: Path) -> None:
    hostile = shutil.copytree(scene.tuned, tmp_path / "a|b <i>c")
    planned = hf_bico.plan(hostile, to=scene.target, base=scene.base, data=scene.data)
    assert repr(planned).startswith("Plan of a|b <i>c to target: 13 sites of 2 -> 2 blocks, ")
    assert re.search(r" as a full model, [\d.]+ .?B of memory$", repr(planned))
    page = rendered(planned._repr_markdown_())
    assert page.count("<table>") == 1
    assert "<i>" not in page
    assert re.findall(r"<tr>\n<td>(\w+)</td>\n<td>", page)[:5] == ["source", "base", "target", "data", "blocks"]
    assert "<td>13 sites: attn.q x2," in page


def test_a_port_shows_its_results_and_its_report_a_row_for_each_role(scene: Scene, tmp_path: Path) -> None:
    pictures = shutil.copytree(scene.data, tmp_path / "a *b* <i>c")
    where = {"to": scene.target, "base": scene.base, "data": pictures}
    ported = hf_bico.port(scene.tuned, **where, n=24, control=True, **PAPER)
    page = rendered(ported._repr_markdown_())
    assert re.findall(r"<tr>\n<td>(.+?)</td>", page) == [
        *("target, zero-shot", "control, samples mispaired", "target, ported", "source, fine-tuned")
    ]
    assert "(20 samples of split test of a *b* &lt;i&gt;c)" in page
    assert "The control is the same method" in page
    report = rendered(ported.report._repr_markdown_())
    roles = [line.split()[0] for line in ported.report.table().splitlines()[1:]]
    assert re.findall(r"<tr>\n<td>(.+?)</td>", report) == roles
    assert repr(ported.report) == f"Report of 13 sites: {ported.report.summary()}"


def test_a_port_that_was_not_measured_says_what_it_is(scene: Scene) -> None:
    where = {"to": scene.target, "base": scene.base, "data": scene.data}
    ported = hf_bico.port(scene.tuned, **where, n=24, evaluate=False, **PAPER)
    assert rendered(ported._repr_markdown_()) == "<p>Ported of tuned to target, as full</p>\n"


def test_a_comparison_shows_its_table_and_not_how_it_was_measured(scene: Scene) -> None:
    found = hf_bico.compare(
        scene.tuned, to=scene.target, base=scene.base, data=scene.data, methods=["naive", "bico"], n=[8, 24], seeds=2
    )
    page = rendered(found._repr_markdown_())
    assert page.count("<tr>") == 1 + len(found.rows())
    assert "over 2 draws" in page
    assert "versions" not in page
    assert len(repr(found)) < 200


def test_bars_are_shown_while_a_stage_runs_and_none_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm.auto import tqdm

    show = hf_bico.show_progress()
    show("download", 0, 1)
    show("download", 0, 2_000_000)
    show("download", 1_500_000, 2_000_000)
    (bar,) = tqdm._instances
    assert (bar.n, bar.total, bar.desc) == (1_500_000, 2_000_000, "download")
    show("align", 0, 3)
    assert len(tqdm._instances) == 2
    show("align", 3, 3)
    show("download", 2_000_000, 2_000_000)
    assert not tqdm._instances
    assert "download:" in capsys.readouterr().err


def test_a_port_with_bars_leaves_none(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm.auto import tqdm

    where = {"to": scene.target, "base": scene.base, "data": scene.data}
    hf_bico.port(scene.tuned, **where, n=24, progress=hf_bico.show_progress(), **PAPER)
    assert not tqdm._instances
    assert {"load", "evaluate"} <= set(re.findall(r"(\w+): +\d+%", capsys.readouterr().err))


def test_no_tqdm_is_loaded_before_bars_are_asked_for() -> None:
    code = "import sys, hf_bico.utils.progress; sys.exit('tqdm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
