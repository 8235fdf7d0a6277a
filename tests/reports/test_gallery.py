"""The gallery of model cards: true to their records, valid for the Hub, and their snippets run as they stand."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import hf_bico
from hf_bico.experiments.demo.world import World
from hf_bico.reports.model_cards import PICTURES, render_card
from hf_bico.reports.record import Record, read_any
from support import gallery, language_gallery
from support.hub import Hub
from support.loopback import validates_cards
from support.measured import STAMP, drawn_here, look_alike

CARDS = sorted(folder.name for folder in gallery.GALLERY.iterdir() if folder.is_dir())


def test_the_gallery_shows_every_entry() -> None:
    assert sorted(entry.name for entry in gallery.ENTRIES) == CARDS


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_what_its_record_gives(name: str) -> None:
    """`make cards` writes them again."""
    folder = gallery.GALLERY / name
    record = read_any(folder)
    assert (folder / "README.md").read_text(encoding="utf-8") == render_card(record)
    for file, draw in PICTURES.items():
        picture = draw(record) if isinstance(record, Record) else None
        assert (folder / file).is_file() == (picture is not None)
        if picture is not None:
            assert look_alike(picture, (folder / file).read_bytes(), drawn_here(STAMP.read_text()))


@validates_cards
@pytest.mark.parametrize("name", CARDS)
def test_a_card_passes_the_hubs_own_validation(name: str, hub: Hub) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(gallery.GALLERY / name / "README.md")
    card.validate()
    assert [entry.path for entry in hub.log if "validate-yaml" in entry.path]
    assert "local" not in str(card.data.base_model)


def test_a_port_that_did_not_help_says_so_first() -> None:
    body = (gallery.GALLERY / "port-that-did-not-help" / "README.md").read_text().split("---\n", 2)[2]
    lines = [line for line in body.splitlines() if line]
    assert lines[0].startswith("# ")
    assert lines[1].startswith("**The fine-tuned source is WORSE than the target")
    assert "The port measured WORSE than the target" in lines[1]
    assert lines[3].startswith("Outlook: doubtful")


def test_the_port_that_did_not_help_is_held_back_by_default(worlds: Callable[[int], World]) -> None:
    world, task = worlds(0), gallery.TASK
    source, target = (world.fine_tuned(name, task) for name in ("narrow", "wide"))
    ported = hf_bico.port(source, target, base=world.base("narrow"), data=str(world.data(task)), device="cpu")
    assert ported.held_back
    assert not ported.record.evaluation


@pytest.mark.parametrize("entry", gallery.ENTRIES, ids=lambda entry: entry.name)
def test_the_snippet_of_a_card_runs_as_it_stands(
    entry: gallery.Entry, hub: Hub, worlds: Callable[[int], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same repos, ported and pushed anew; the code is that of the card in the gallery.

    Commits are others: language models are random ones here, and another kind of CPU trains the rest a bit otherwise.
    """
    from huggingface_hub import constants

    hub.add_user(gallery.OWNER, gallery.TOKEN)
    if entry.kind is None:
        in_transformers = entry.source.endswith(("-hf", "-lora"))
        gallery.publish(hub, worlds(0), tmp_path / "transformers", in_transformers)
    else:
        language_gallery.publish(hub, gallery.OWNER, entry.kind, tmp_path / entry.kind, trained=False)
    made = gallery.make(entry.in_short, worlds(0), tmp_path / "ported")
    kept = gallery.GALLERY / entry.name
    card = (kept / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    commits = [re.findall(r'"commit": "(\w+)"', (folder / "bico.json").read_text()) for folder in (kept, made)]
    for then, now in zip(*commits, strict=True):
        code = code.replace(then, now)
    assert entry.repo in code
    # a reader has nothing in the cache, and no token
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache-of-a-reader"))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, f"{entry.name}/README.md", "exec"), {"__name__": "__main__"})
    print(printed.getvalue())
    assert entry.prints in printed.getvalue()
