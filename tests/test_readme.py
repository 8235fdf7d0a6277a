"""README's commands and its Python, as they stand, against the loopback Hub and the small world."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub import Hub
from hub_scenes import BASE, DATA, SOURCE, publish_world, upload

import hf_bico
from hf_bico.cli import main
from hf_bico.demo import World

README = (Path(__file__).parent.parent / "README.md").read_text()


def section(title: str) -> str:
    return README.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_commands_over_the_hub_run_as_they_stand(
    hub: Hub, worlds: Callable[[int], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_world(hub, worlds(0))
    monkeypatch.chdir(tmp_path)
    lines = re.findall(
        r"^hf-bico (.+)$", section("Port a fine-tune") + section("From the Hub, to the Hub"), re.MULTILINE
    )
    ran = []
    for line in lines:
        arguments = shlex.split(line, comments=True)
        if "my-finetune" in arguments:  # folders that the reader has
            continue
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, (line, result.output)
        ran.append(arguments[0])
    assert ran == ["plan", "port", "eval", "push", "card"]
    assert set(hub.repo("user/vit-b16-plus-eurosat").files()) >= {"README.md", "bico.json", "alignment.png"}


def test_the_commands_on_adapters_run_as_they_stand(
    hub: Hub, worlds: Callable[[int], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_world(hub, worlds(0))
    publish_loras(hub, tmp_path)
    monkeypatch.chdir(tmp_path)
    code = section("Adapters").partition("```\n")[2].partition("```")[0]
    for line in re.findall(r"^hf-bico (.+)$", code, re.MULTILINE):
        result = CliRunner().invoke(main, shlex.split(line, comments=True))
        assert result.exit_code == 0, (line, result.output)
    made = {folder.name for folder in tmp_path.iterdir() if (folder / "bico.json").is_file()}
    assert made >= {"adapter", "merged", "half", "vit-b16-eurosat-adapter", "eurosat-lora-to-ViT-B-16-plus"}


def test_the_commands_that_compare_run_as_they_stand(
    hub: Hub, worlds: Callable[[int], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_world(hub, worlds(0))
    monkeypatch.chdir(tmp_path)
    code = section("Compare methods on your own models").partition("```\n")[2].partition("```")[0]
    ran = []
    for line in re.findall(r"^hf-bico (.+)$", code, re.MULTILINE):
        arguments = shlex.split(line, comments=True)
        if "my-finetune" in arguments:
            continue
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, (line, result.output)
        ran.append(arguments[0])
    assert ran == ["compare", "port"]
    written = tmp_path / "vit-b16-eurosat-to-ViT-B-16-plus-compared"
    assert {file.name for file in written.iterdir()} >= {
        f"comparison.{ending}" for ending in ("csv", "json", "md", "png")
    }


@pytest.mark.parametrize("title", ["Adapters", "Compare methods on your own models"])
def test_the_transcript_is_what_is_printed(
    title: str, worlds: Callable[[int], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(0)
    monkeypatch.chdir(tmp_path)
    for name, folder in (
        ("narrow-inverted", world.fine_tuned("narrow", "inverted")),
        ("narrow", world.base("narrow")),
        ("wide", world.base("wide")),
        ("wide-inverted", world.fine_tuned("wide", "inverted")),
        ("digits-inverted", world.data("inverted")),
    ):
        (tmp_path / name).symlink_to(folder)
    transcript = section(title).partition("```\n$ ")[2].partition("```")[0].replace("\\\n", "")
    for shown in transcript.split("\n$ "):
        line, *expected = shown.strip().splitlines()
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
        assert [text for text in expected if text not in result.stdout] == [], result.stdout


def publish_loras(hub: Hub, folder: Path) -> None:
    """Two LoRAs of the world's fine-tune, with a card that names what they were trained on."""
    card = f"---\nbase_model: {BASE}\ndatasets:\n- {DATA}\n---\n# A LoRA\n"
    for name, rank in (("user/eurosat-lora", 4), ("user/other-lora", 2)):
        made = hf_bico.extract(SOURCE, rank=rank).save(folder / f"rank-{rank}")
        upload(hub, name, made, card)


def test_the_python_of_the_readme_runs_line_by_line(
    hub: Hub, worlds: Callable[[int], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    publish_world(hub, worlds(0))
    publish_loras(hub, tmp_path)
    monkeypatch.chdir(tmp_path)
    code = section("From Python").partition("```python\n")[2].partition("```")[0]
    copy = open_clip.create_model(f"hf-hub:{BASE}")
    exec(compile(code, "README.md", "exec"), {"another_copy_of_its_base": copy})
    assert {"user/vit-b16-plus-eurosat", "user/eurosat-task-vector"} <= {name for _, name in hub.repos}
