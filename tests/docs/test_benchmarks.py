"""The benchmarks count what is really computed, and compare with something that gives the same port."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from support import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import speed  # noqa: E402
from figures import Figures, Line  # noqa: E402
from floor import tower_of  # noqa: E402
from pairs import ClipShape, linear_layers  # noqa: E402
from speed_tables import BEGIN, END, sections, write_readme  # noqa: E402
from timing import STAGES  # noqa: E402


def counted(model: Any, layers: str, loss: Any) -> tuple[int, int]:
    """The operations of a forward pass, and of the way back to what the first layers write."""
    outputs: list[Any] = []

    def hook(_: Any, __: Any, output: Any) -> None:
        if not output.requires_grad:
            output.requires_grad_()
        outputs.append(output)

    model.eval().requires_grad_(False)
    for _, module in linear_layers(model, layers):
        module.register_forward_hook(hook)
    with FlopCounterMode(display=False) as forward:
        found = loss(model)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(found, outputs)
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.py")), ids=lambda file: file.stem)
def test_what_a_benchmark_imports_of_ours_is_there(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "hf_bico":
            module = import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}")


def test_the_count_of_a_vision_towers_passes_is_what_torch_counts() -> None:
    from transformers import CLIPModel

    config = ClipShape(48, 3, 3, 32, 8, 24, 24, 1, 2, 50).config()
    model = CLIPModel._from_config(config, attn_implementation="eager")
    pixels = torch.randn(1, 3, 32, 32)
    found = counted(
        model,
        r"vision_model\.encoder\.layers\.|visual_projection",
        lambda it: it.visual_projection(it.vision_model(pixel_values=pixels).pooler_output).sum(),
    )
    tower = tower_of(config.to_dict())
    assert found == (tower.forward, tower.backward)


def test_the_count_of_an_encoder_with_its_decoder_is_what_torch_counts() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=60, d_model=32, d_ff=96, d_kv=8, num_heads=3, num_layers=3, num_decoder_layers=1)
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    ids, said = torch.randint(60, (1, 11)), torch.randint(60, (1, 4))
    found = counted(
        model,
        r"encoder\.block\.",
        lambda it: functional.cross_entropy(it(input_ids=ids, decoder_input_ids=said).logits[0], said[0]),
    )
    tower = tower_of(config.to_dict(), tokens=11, answer=4)
    assert found == (tower.forward, tower.backward)


def test_the_count_of_a_decoder_is_what_torch_counts() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=60,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager")
    ids = torch.randint(60, (1, 11))
    found = counted(model, r"model\.layers\.", lambda it: functional.cross_entropy(it(input_ids=ids).logits[0], ids[0]))
    tower = replace(tower_of(config.to_dict(), tokens=11), causal=False)  # torch counts the masked half too
    assert found == pytest.approx((tower.forward, tower.backward), rel=1e-3)  # and the angles of the positions


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a run of all parts with tiny models has written: figures, picture and page."""
    place = tmp_path_factory.mktemp("speed")
    (place / "README.md").write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    parts = ["--only", "vit-plus,vit-large,t5,qwen,growth", "--small"]
    files = ["--json", "figures.json", "--picture", "growth.png", "--readme", "README.md"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["speed.py", *parts, *files])
        speed.main()
    return place


def test_the_obvious_implementation_gives_the_same_port(run: Path) -> None:
    ports = Figures.read(run / "figures.json").ports
    assert [port.pair.split()[0] for port in ports] == ["ViT-B/16", "Qwen2.5-1.5B", *["ViT-B/16"] * 3, "T5-3B"]
    differences = [port.difference for port in ports]
    assert differences.pop(4) is None  # it did not see all samples
    assert all(difference is not None and 0 < difference < 1e-4 for difference in differences)


def test_every_stage_of_the_whole_command_is_timed(run: Path) -> None:
    port = Figures.read(run / "figures.json").ports[0]
    assert port.fresh is not None
    assert set(port.fresh) == set(STAGES)
    assert min(port.fresh.values()) >= 0
    assert set(port.ours) == set(STAGES) - {"start", "import", "device"}


def test_growth_is_timed_and_drawn(run: Path) -> None:
    lines = Figures.read(run / "figures.json").growth
    assert [line.what for line in lines] == ["samples", "width", "depth"]
    assert all(len(line.values) == len(line.seconds) >= 3 for line in lines)
    with Image.open(run / "growth.png") as picture:
        assert picture.getpixel((0, 0))[:3] == (255, 255, 255)
        assert len(picture.convert("RGB").getcolors(10**6) or ()) > 10


def test_a_page_takes_its_tables_from_the_figures(run: Path) -> None:
    page = (run / "README.md").read_text()
    assert page.startswith(f"# Before\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nafter\n")
    assert "old" not in page
    figures = Figures.read(run / "figures.json")
    for _, text in sections(figures):
        assert text in page


def test_an_exponent_is_the_power_that_the_time_grows_with() -> None:
    seconds = [{"calibrate": 3.0 * n**2, "align": 0.0, "transport": 0.0} for n in (10, 20, 80)]
    assert Line("width", "", (10, 20, 80), seconds).exponent() == pytest.approx(2.0)


def test_the_projects_page_shows_the_projects_figures(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text((BENCHMARKS / "README.md").read_text())
    write_readme(Figures.read(BENCHMARKS / "speed.json"), page)
    assert page.read_text() == (BENCHMARKS / "README.md").read_text()
