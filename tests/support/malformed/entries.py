"""The scene that is spoilt, and what is done with it: every public way in, on models so small that it is quick."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hf_bico
from hf_bico.experiments.compare.cells import Cell
from hf_bico.experiments.compare.comparison import Comparison
from hf_bico.experiments.compare.log import CellLog
from hf_bico.experiments.diagnose.diagnosis import Diagnosis
from hf_bico.porting.task_vector import TaskVector
from support.adapters import Base, lora, other, saved
from support.language_toys import answered_rows, chat_rows, labelled_rows, write_decoder
from support.paper import PAPER
from support.scenes import write_images
from support.toys import WRITERS, Toy, random_state

TOY = Toy(width=8, blocks=1, embedding=4, text_width=8)
METHODS = ("naive",)
IDENTITY = {"target": {"id": "b"}}


def make_scene(folder: Path) -> Path:
    """Everything in good order."""
    state = random_state(TOY, 0)
    generator = torch.Generator().manual_seed(5)
    changed = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) if name.startswith("visual.") else tensor
        for name, tensor in state.items()
    }
    for library in ("transformers", "open_clip"):
        write = WRITERS[library]
        write(folder / library / "base", TOY, state)
        write(folder / library / "tuned", TOY, changed)
        write(folder / library / "target", TOY, random_state(TOY, 1))
    write_images(folder / "pictures", size=8, train=4, test=2)
    _write_shards(folder)
    _write_adapters(folder)
    _write_results(folder)
    _write_texts(folder)
    return folder


def _write_shards(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    shards = folder / "shards"
    shutil.copytree(folder / "transformers" / "tuned", shards)
    whole = load_file(shards / "model.safetensors")
    names = sorted(whole)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: whole[name] for name in own}, shards / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    (shards / "model.safetensors").unlink()
    pickled = folder / "pickled"
    shutil.copytree(folder / "transformers" / "tuned", pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(whole, pickled / "pytorch_model.bin")


def _write_adapters(folder: Path) -> None:
    from transformers import CLIPModel

    base = Base(folder / "transformers" / "base", CLIPModel.from_pretrained)
    saved(base, lora(["q_proj", "v_proj", "fc1"], lora_alpha=1), folder / "lora")
    saved(base, other("LOHA", target_modules=["q_proj"], r=2, alpha=1), folder / "loha")
    for name in ("lora", "loha"):
        (folder / name / "README.md").unlink()
    models = (folder / "transformers" / "tuned", folder / "transformers" / "base")
    TaskVector.from_models(*models).save(folder / "delta")


def _write_results(folder: Path) -> None:
    models = folder / "transformers"
    options: dict[str, Any] = {"base": models / "base", "data": str(folder / "pictures"), "n": 4}
    hf_bico.port(models / "tuned", models / "target", evaluate=False, **options, **PAPER).save(folder / "ported")
    record = json.loads((folder / "ported" / "bico.json").read_text())
    (folder / "ported" / "bico.json").write_text(json.dumps(record | {"command": "hf-bico port tuned --to target"}))
    hf_bico.extract(models / "tuned", models / "base", rank=2).save(folder / "extracted")
    hf_bico.diagnose(models / "tuned", models / "target", **options).save(folder / "diagnosed")
    cells = (Cell("digits", "bico", 0.75, n=10, seed=0), Cell("digits", "target", 0.5))
    Comparison("a", "b", cells).save(folder / "compared")
    with CellLog.open(folder / "measured", IDENTITY) as log:
        for cell in cells:
            log.add(cell)


def _write_texts(folder: Path) -> None:
    write_decoder(folder / "llama", width=8, blocks=1, heads=2, kv_heads=1, chat=True)
    texts = folder / "texts"
    texts.mkdir()
    for name, rows in (("chats", chat_rows(6)), ("answers", answered_rows(6)), ("labelled", labelled_rows(12))):
        (texts / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (texts / "plain.txt").write_text("\n".join(row["text"] for row in labelled_rows(8)) + "\n")
    (texts / "labelled.csv").write_text("".join(f'"{row["text"]}",{row["label"]}\n' for row in labelled_rows(12)))


def copied(good: Path, folder: Path) -> Path:
    """The scene once more, at no cost: a spoiler puts new files in the place of shared ones."""
    shutil.copytree(good, folder, copy_function=os.link)
    return folder


def models_of(scene: Path, library: str = "transformers") -> tuple[Path, Path, Path]:
    return scene / library / "tuned", scene / library / "base", scene / library / "target"


def port(scene: Path, out: Path) -> None:
    _port(scene, out, "transformers", "base", "data")


def port_open_clip(scene: Path, out: Path) -> None:
    _port(scene, out, "open_clip", "base", "data")


def port_from_card(scene: Path, out: Path) -> None:
    """The base is what the card names."""
    _port(scene, out, "transformers", "data")


def port_data_from_card(scene: Path, out: Path) -> None:
    """The data set is what the card names."""
    _port(scene, out, "transformers", "base")


def _port(scene: Path, out: Path, library: str, *named: str) -> None:
    tuned, base, target = models_of(scene, library)
    known: dict[str, Any] = {"base": base, "data": str(scene / "pictures")}
    given = {name: known[name] for name in named}
    hf_bico.port(tuned, target, **given, n=4, evaluate=False, **PAPER).save(out)


def plan(scene: Path, out: Path) -> None:
    tuned, base, target = models_of(scene)
    hf_bico.plan(tuned, target, base=base)


def plan_open_clip(scene: Path, out: Path) -> None:
    tuned, base, target = models_of(scene, "open_clip")
    hf_bico.plan(tuned, target, base=base)


def extract(scene: Path, out: Path) -> None:
    tuned, base, _ = models_of(scene)
    hf_bico.extract(tuned, base, rank=2).save(out)


def extract_shards(scene: Path, out: Path) -> None:
    hf_bico.extract(scene / "shards", models_of(scene)[1], rank=2).save(out)


def extract_pickled(scene: Path, out: Path) -> None:
    hf_bico.extract(scene / "pickled", models_of(scene)[1], rank=2, allow_pickle=True).save(out)


def apply_lora(scene: Path, out: Path) -> None:
    hf_bico.apply(scene / "lora", models_of(scene)[1]).save(out)


def apply_loha(scene: Path, out: Path) -> None:
    hf_bico.apply(scene / "loha", models_of(scene)[1]).save(out)


def apply_delta(scene: Path, out: Path) -> None:
    hf_bico.apply(scene / "delta", models_of(scene)[1]).save(out)


def load_delta(scene: Path, out: Path) -> None:
    vector = TaskVector.load(scene / "delta")
    (0.5 * vector + vector).save(scene / "sum")


def from_adapter(scene: Path, out: Path) -> None:
    dict(TaskVector.from_adapter(scene / "lora", base=models_of(scene)[1]).items())


def evaluate(scene: Path, out: Path) -> None:
    hf_bico.evaluate_model(models_of(scene)[2], str(scene / "pictures"))


def evaluate_chats(scene: Path, out: Path) -> None:
    hf_bico.evaluate_model(scene / "llama", str(scene / "texts" / "chats.jsonl"))


def evaluate_answers(scene: Path, out: Path) -> None:
    hf_bico.evaluate_model(scene / "llama", str(scene / "texts" / "answers.jsonl"))


def evaluate_plain(scene: Path, out: Path) -> None:
    hf_bico.evaluate_model(scene / "llama", str(scene / "texts" / "plain.txt"))


def probe_labelled(scene: Path, out: Path) -> None:
    """Texts with labels."""
    hf_bico.evaluate_model(scene / "llama", str(scene / "texts" / "labelled.jsonl"), probe=4)


def command(*words: str) -> Callable[[Path, Path], None]:
    """A command of the command line, with its error as one of Python's."""

    def run(scene: Path, out: Path) -> None:
        from click.testing import CliRunner

        from hf_bico import errors
        from hf_bico.cli.main import main

        done = CliRunner().invoke(main, [*(word.format(scene=scene, out=out) for word in words), "--json"])
        if done.exit_code == 0:
            return
        told = json.loads(done.stdout)["error"]
        raise getattr(errors, told["kind"], RuntimeError)(told["cause"], told["remedy"])

    return run


def compared(scene: Path, out: Path) -> None:
    Comparison.load(scene / "compared").table()


def measured(scene: Path, out: Path) -> None:
    with CellLog.open(scene / "measured", IDENTITY) as log:
        Comparison("a", "b", log.cells).table()


def diagnosed(scene: Path, out: Path) -> None:
    Diagnosis.load(scene / "diagnosed").table()


ENTRIES: dict[str, Callable[[Path, Path], None]] = {
    **{entry.__name__: entry for entry in (port, port_open_clip, plan, plan_open_clip, extract, extract_shards)},
    **{entry.__name__: entry for entry in (extract_pickled, apply_lora, apply_loha, apply_delta, load_delta)},
    **{entry.__name__: entry for entry in (from_adapter, evaluate, evaluate_chats, evaluate_answers, evaluate_plain)},
    **{entry.__name__: entry for entry in (probe_labelled, compared, measured, diagnosed)},
    "card": command("card", "{scene}/ported"),
    "card of an extract": command("card", "{scene}/extracted"),
    "push": command("push", "{scene}/ported", "user/pushed"),
}
FAILING: dict[str, Callable[[Path, Path], None]] = {
    "port_from_card": port_from_card,
    "port_data_from_card": port_data_from_card,
    "rerun": command("rerun", "{scene}/ported"),
}
"""Entries that need the Hub, or folders by other names, to succeed: only what they refuse before is seen here."""
