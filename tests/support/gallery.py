"""The gallery of model cards: real ports and adapters of small models, between repos of the loopback Hub.

`python -m support.gallery` writes `model_cards/` again; a test holds the cards against their records and runs them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import ROOT
from support.loopback import HUB, TOKEN
from support.paper import PAPER
from support.transformers_world import as_transformers

if TYPE_CHECKING:
    from hf_bico.experiments.demo.world import World
    from hf_bico.porting.result import ChangeResult, Ported
    from support.hub import Hub

GALLERY = ROOT / "model_cards"
OWNER, TASK = "small-world", "inverted"
SHOWN = ("README.md", "bico.json", "outcome.png", "alignment.png")


@dataclass(frozen=True)
class Entry:
    """One card: what is ported, or extracted where there is no target, and under which name it is pushed."""

    name: str
    source: str = f"{OWNER}/narrow-{TASK}"
    target: str | None = f"{OWNER}/wide"
    local: bool = False
    kind: str | None = None
    """Of a language model."""
    prints: str = "%"
    """Something that the card's snippet prints."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def repo(self) -> str:
        return f"{OWNER}/{self.name}"

    @property
    def in_short(self) -> Entry:
        """What is written the same way in a fraction of the time: from few samples, not measured, never held back."""
        form = {name: self.options[name] for name in ("format", "rank") if name in self.options}
        return replace(self, options=form if self.target is None else {**form, **PAPER, "n": 10, "evaluate": False})


def _language(kind: str) -> tuple[str, str]:
    return f"{OWNER}/{kind}-tuned", f"{OWNER}/{kind}-wide"


ENTRIES = (
    Entry("open-clip-port"),
    Entry("transformers-port", f"{OWNER}/narrow-{TASK}-hf", f"{OWNER}/wide-hf", options={"per_class": 10}),
    Entry("port-that-did-not-help", target=f"{OWNER}/wide-{TASK}", options=PAPER),
    Entry("delta-port", options={**PAPER, "format": "delta", "n": 50}),
    Entry("adapter-port", options={**PAPER, "format": "adapter", "rank": 8}),
    Entry("lora-port", f"{OWNER}/narrow-{TASK}-lora", f"{OWNER}/wide-hf"),
    Entry("extracted-adapter", target=None, options={"rank": 8}),
    Entry("port-of-local-folders", local=True),
    Entry(
        "port-with-readout-and-control",
        options={"method": "bico-path", "alpha": 1.0, "n": 20, "readout": True, "control": True},
    ),
    Entry("port-without-labels", options={**PAPER, "labels": "pseudo", "evaluation": "both", "layers": "similarity"}),
    Entry(
        "trained-target",
        options={"method": "finetune", "train_steps": 30, "learning_rate": 1e-3, "warmup": 3, "format": "full"},
    ),
    Entry("decoder-lora-port", *_language("decoder"), kind="decoder", prints="TO DEF"),
    Entry("classifier-port", *_language("encoder"), kind="encoder"),
    Entry("t5-port", *_language("t5"), kind="t5", prints="torch.Size([2, ", options=PAPER),
)


def publish(hub: Hub, world: World, folder: Path, transformers: bool = True) -> None:
    """The models of the small world as repos, and the data set; also in transformers' layout, with a LoRA of rank 4."""
    from hf_bico.porting.task_arithmetic import extract
    from support.hub_scenes import upload

    data = f"{OWNER}/{TASK}"
    models = {"narrow": None, "wide": None, f"narrow-{TASK}": "narrow", f"wide-{TASK}": "wide"}
    for name, base in models.items():
        for suffix in ("", "-hf") if transformers else ("",):
            card = f"---\nlicense: {'mit' if name.startswith('narrow') else 'apache-2.0'}\n"
            card += f"base_model: {OWNER}/{base}{suffix}\ndatasets: [{data}]\n" if base else ""
            files = world.folder / "models" / name
            files = files if not suffix else as_transformers(files, folder / name)
            upload(hub, f"{OWNER}/{name}{suffix}", files, f"{card}---\n# {name}\n")
    if transformers:
        lora = extract(f"{OWNER}/narrow-{TASK}-hf", rank=4, device="cpu").save(folder / "lora")
        about = f"license: mit\nbase_model: {OWNER}/narrow-hf\ndatasets: [{data}]\nlibrary_name: peft\n"
        upload(hub, f"{OWNER}/narrow-{TASK}-lora", lora, f"---\n{about}---\n# A LoRA\n")
    upload(hub, data, world.data(TASK), "---\nlicense: cc-by-4.0\n---\n# Inverted digits\n", type="dataset")


def make(entry: Entry, world: World, folder: Path) -> Path:
    """Port or extract, and push one entry; returns the folder that was pushed."""
    from hf_bico.hub.client import Hub as Client
    from hf_bico.hub.push import PushOptions
    from hf_bico.porting.publish import push_folder

    made = _port(entry, world) if entry.target else _extract(entry)
    written = made.save(folder, repo=entry.repo)
    push_folder(written, entry.repo, PushOptions(force=True, private=False), Client(TOKEN))
    return written


def _port(entry: Entry, world: World) -> Ported:
    import hf_bico

    source, target, local = entry.source, str(entry.target), {}
    if entry.local:
        source, target = str(world.fine_tuned("narrow", TASK)), str(world.base("wide"))
        local = {"base": str(world.base("narrow")), "data": str(world.data(TASK))}
    return hf_bico.port(source, target, device="cpu", **local, **entry.options)


def _extract(entry: Entry) -> ChangeResult:
    from hf_bico.porting.task_arithmetic import extract

    return extract(entry.source, device="cpu", **entry.options)


def main() -> None:
    from support import language_gallery  # what it imports must find the loopback Hub
    from support.worlds import small_world

    HUB.add_user(OWNER, TOKEN)
    os.environ["HF_TOKEN"] = TOKEN
    with tempfile.TemporaryDirectory() as scratch:
        world = small_world(0)
        publish(HUB, world, Path(scratch) / "transformers")
        for entry in ENTRIES:
            if entry.kind is not None:
                language_gallery.publish(HUB, OWNER, entry.kind, Path(scratch) / entry.kind, trained=True)
            written = make(entry, world, Path(scratch) / entry.name)
            shutil.rmtree(GALLERY / entry.name, ignore_errors=True)
            (GALLERY / entry.name).mkdir(parents=True)
            for name in SHOWN:
                if (written / name).is_file():
                    shutil.copyfile(written / name, GALLERY / entry.name / name)
            print(f"{entry.name}: {(written / 'README.md').stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
