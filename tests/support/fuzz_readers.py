"""The readers that are fuzzed: what each makes of one file, in a folder where all else is in order.

A kept input's name begins with its kind, which says what file it is spoilt from: `llama-seed.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Kind:
    """One kind of file: where it stands in its scene, how a good scene is made, and what reads it."""

    file: str
    make: Callable[[Path], Path]
    """Makes a folder in which the file is good."""
    read: Callable[[Path], object]
    """Reads that folder: returns, or raises a BicoError."""


def make_clip(folder: Path) -> Path:
    import torch

    from support.toys import WRITERS, Toy, random_state

    toy = Toy(width=8, blocks=1, embedding=4, text_width=8)
    return WRITERS["transformers"](folder, toy, random_state(toy, 0, torch.bfloat16))


def make_openclip(folder: Path) -> Path:
    import torch

    from support.toys import WRITERS, Toy, random_state

    toy = Toy(width=8, blocks=1, embedding=4, text_width=8)
    return WRITERS["open_clip"](folder, toy, random_state(toy, 0, torch.bfloat16))


def make_llama(folder: Path) -> Path:
    from support.language_toys import write_decoder

    return write_decoder(folder, width=8, blocks=1, heads=2, kv_heads=1, chat=True)


def make_bert(folder: Path) -> Path:
    from support.language_toys import write_encoder

    return write_encoder(folder, head=2, width=8, blocks=1)


def make_opt(folder: Path) -> Path:
    """A model of no known family, which its modules describe."""
    import transformers

    from support.language_toys import save_model, text_tokenizer, vocabulary_size

    shape = {"hidden_size": 8, "word_embed_proj_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8}
    config = transformers.OPTConfig(**shape, vocab_size=vocabulary_size(), max_position_embeddings=32)
    return save_model(transformers.OPTForCausalLM(config), folder, 0, text_tokenizer())


def make_adapter(folder: Path) -> Path:
    """A LoRA in `lora`, over the model in `base`."""
    from transformers import CLIPModel

    from support.adapters import Base, lora, saved

    base = Base(make_clip(folder / "base"), CLIPModel.from_pretrained)
    targets = lora(["q_proj", "v_proj", "fc1"], rank_pattern={"fc1": 1}, modules_to_save=["visual_projection"])
    saved(base, targets, folder / "lora")
    return folder


def make_loha(folder: Path) -> Path:
    """An adapter that only peft can read."""
    from transformers import CLIPModel

    from support.adapters import READ_BY_PEFT, Base, other, saved

    base = Base(make_clip(folder / "base"), CLIPModel.from_pretrained)
    saved(base, other("LOHA", target_modules=["q_proj"], **READ_BY_PEFT["LOHA"]), folder / "lora")
    return folder


def make_delta(folder: Path) -> Path:
    import torch

    from hf_bico.models.low_rank import Factors
    from hf_bico.porting.task_vector import TaskVector

    folder.mkdir(parents=True)
    TaskVector({"a": torch.ones(2, 3), "b": Factors(torch.ones(4, 1), torch.ones(1, 2))}).save(folder, base="org/x")
    return folder


def make_shards(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    whole = load_file(make_clip(folder) / "model.safetensors")
    names = sorted(whole)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: whole[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return folder


def make_card(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    (folder / "config.json").write_text(json.dumps({"id2label": {"0": "cat", "1": "dog"}}))
    return folder


CARD = """---
base_model: org/base
base_model_relation: finetune
datasets:
- org/pictures
- imagefolder
language: [en, de]
license: other
license_name: my-licence
pipeline_tag: image-classification
tags: &tags
- a
model-index:
- name: x
  results: []
more: *tags
---
# A title

Text.
"""


def make_rows(folder: Path) -> Path:
    from support.language_toys import labelled_rows

    folder.mkdir(parents=True)
    rows = [{**row, "label": ["no", "yes"][row["label"]]} for row in labelled_rows(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_chats(folder: Path) -> Path:
    from support.language_toys import chat_rows

    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(6)))
    return folder


def make_table(folder: Path) -> Path:
    from support.language_toys import labelled_rows

    folder.mkdir(parents=True)
    lines = [f'"{row["text"]}",{row["label"]}' for row in labelled_rows(12)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return folder


def make_parquet(folder: Path) -> Path:
    import datasets

    from support.language_toys import labelled_rows

    folder.mkdir(parents=True)
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    datasets.Dataset.from_list(labelled_rows(8), features).to_parquet(folder / "rows.parquet")
    return folder


def make_picture(folder: Path) -> Path:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    for place in ("one/0.png", "one/1.png", "two/0.png"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / place)
    return folder


def make_data_card(folder: Path) -> Path:
    make_rows(folder)
    fields = "  features:\n  - name: text\n    dtype: string\n  - name: label\n    dtype: string\n"
    head = f"configs:\n- config_name: default\n  data_files: rows.jsonl\ndataset_info:\n{fields}"
    (folder / "README.md").write_text(f"---\n{head}---\nText.\n")
    return folder


def make_zip(folder: Path) -> Path:
    import zipfile

    pictures = make_picture(folder / "pictures")
    with zipfile.ZipFile(folder / "pictures.zip", "w") as archive:
        for file in sorted(pictures.rglob("*.png")):
            archive.write(file, file.relative_to(pictures))
    shutil.rmtree(pictures)
    return folder


def make_gzip(folder: Path) -> Path:
    import gzip

    file = make_rows(folder) / "rows.jsonl"
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    file.unlink()
    return folder


def make_ported(folder: Path) -> Path:
    return _gallery("adapter-port", folder)


def make_made(folder: Path) -> Path:
    return _gallery("extracted-adapter", folder)


def _gallery(name: str, folder: Path) -> Path:
    """The record of a card that is shown."""
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "model_cards" / name / "bico.json", folder)
    return folder


def make_comparison(folder: Path) -> Path:
    from hf_bico.experiments.compare.cells import Cell, Refusal
    from hf_bico.experiments.compare.comparison import Comparison

    cells = [Cell("digits", "bico", 0.75, n=100, seed=seed) for seed in (0, 1)]
    cells += [Cell("digits", "target", 0.5), Cell("digits", "theseus", 0.6, n=10, seed=0)]
    folder.mkdir(parents=True)
    Comparison("a", "b", tuple(cells), (Refusal("naive", "no"),), {"n": 1}).save(folder)
    return folder


def make_log(folder: Path) -> Path:
    from hf_bico.experiments.compare.cells import Cell
    from hf_bico.experiments.compare.log import CellLog

    with CellLog.open(folder, {"target": {"id": "b"}}) as log:
        log.add_reference("fine_tuned", {"id": "c"})
        log.add(Cell("digits", "bico", 0.75, n=100, seed=0))
        log.add(Cell("digits", "target", 0.5))
    return folder


def read_model(folder: Path) -> object:
    from hf_bico.models.model import Model

    model = Model.open(
        folder, "the model", "open_clip" if (folder / "open_clip_config.json").exists() else "transformers"
    )
    return model.skeleton()


def _library(folder: Path) -> str:
    return "open_clip" if (folder / "open_clip_config.json").exists() else "transformers"


def read_weights(folder: Path) -> object:
    from hf_bico.models.deltas import Difference
    from hf_bico.models.model import Model

    model = Model.open(folder, "the model", _library(folder))
    return len(Difference.between(model.checkpoint, model.checkpoint))


def read_shards(folder: Path) -> object:
    from hf_bico.models.checkpoints import FileCheckpoint

    checkpoint = FileCheckpoint.in_folder(folder)
    return [checkpoint.tensor(name).shape for name in checkpoint.shapes]


def read_adapter(folder: Path) -> object:
    from hf_bico.porting.task_vector import TaskVector

    vector = TaskVector.from_adapter(folder / "lora", base=folder / "base")
    return [change.shape for _, change in vector.changes()]


def read_delta(folder: Path) -> object:
    from hf_bico.porting.task_vector import TaskVector

    vector = TaskVector.load(folder)
    return [change.shape for _, change in (vector + vector).changes()], vector.made_from


def read_card(folder: Path) -> object:
    from hf_bico.hub.repo_metadata import base_of, data_of, read_metadata

    origin = read_metadata(folder, "org/own")
    return base_of(origin, "own"), data_of(origin, "own")


def read_texts(folder: Path) -> object:
    return _drawn(folder, "texts", "rows.*")


def read_folder_of_texts(folder: Path) -> object:
    return _drawn(folder, "texts", "")


def read_declared(folder: Path) -> object:
    """A stranger's card, with the files that it declares, and what they unpack to."""
    from hf_bico.data import loading
    from hf_bico.data.unpacking import UnpackedSize

    with loading.readable("x"):
        found = loading._find_files("x", ["rows.jsonl"], folder, None)
        size = UnpackedSize("x", 10**6, 10**9)
        for files in found.splits.values():
            for file in files:
                size.add_file(folder / file, found.reader)
    return found, size.total


def read_images(folder: Path) -> object:
    return _drawn(folder, "images", "")


def _drawn(folder: Path, reads: str, pattern: str) -> object:
    import datasets

    from hf_bico.data.draw import draw
    from hf_bico.settings import Settings

    data = next(folder.glob(pattern)) if pattern else folder
    try:
        drawn = draw(str(data), Settings(n=3), reads=reads)
        return [labels for _, labels in drawn.samples.batches(2)]
    finally:
        shutil.rmtree(datasets.config.HF_DATASETS_CACHE, ignore_errors=True)


def read_record(folder: Path) -> object:
    from hf_bico.reports.model_cards import write_card
    from hf_bico.reports.record import read_any

    record = read_any(folder)
    record.write(folder)
    return write_card(record, folder)


def read_comparison(folder: Path) -> object:
    from hf_bico.experiments.compare.comparison import Comparison

    found = Comparison.load(folder)
    return found.table(), found.to_markdown(), found.to_csv(), found.to_json()


def read_log(folder: Path) -> object:
    from hf_bico.experiments.compare.comparison import Comparison
    from hf_bico.experiments.compare.log import CellLog

    with CellLog.open(folder, {"target": {"id": "b"}}) as log:
        return Comparison("a", "b", log.cells).to_markdown()


def read_chat_tokens(folder: Path) -> object:
    from hf_bico.models.families.pretrained import load_tokenizer
    from hf_bico.models.tokenization import tokenise
    from hf_bico.utils.samples import Chat, Text
    from support.language_toys import chat_rows, sentences

    tokenizer = load_tokenizer(folder)
    tokenise(tokenizer, [Text(text) for text in sentences(2)], None)
    return tokenise(tokenizer, [Chat(tuple(row["messages"])) for row in chat_rows(1)], None).ids.shape


_TOKENIZER = "tokenizer.json"
READERS: dict[str, dict[str, Kind]] = {
    "record": {
        "port": Kind("bico.json", make_ported, read_record),
        "made": Kind("bico.json", make_made, read_record),
    },
    "config": {
        "clip": Kind("config.json", make_clip, read_model),
        "openclip": Kind("open_clip_config.json", make_openclip, read_model),
        "llama": Kind("config.json", make_llama, read_model),
        "bert": Kind("config.json", make_bert, read_model),
        "opt": Kind("config.json", make_opt, read_model),
    },
    "adapter": {
        "lora": Kind("lora/adapter_config.json", make_adapter, read_adapter),
        "loha": Kind("lora/adapter_config.json", make_loha, read_adapter),
    },
    "card": {"card": Kind("README.md", make_card, read_card)},
    "weights": {
        "clip": Kind("model.safetensors", make_clip, read_weights),
        "llama": Kind("model.safetensors", make_llama, read_weights),
        "lora": Kind("lora/adapter_model.safetensors", make_adapter, read_adapter),
        "delta": Kind("task_vector.safetensors", make_delta, read_delta),
    },
    "index": {"shards": Kind("model.safetensors.index.json", make_shards, read_shards)},
    "data": {
        "rows": Kind("rows.jsonl", make_rows, read_texts),
        "chats": Kind("rows.jsonl", make_chats, read_texts),
        "table": Kind("rows.csv", make_table, read_texts),
        "parquet": Kind("rows.parquet", make_parquet, read_texts),
        "picture": Kind("one/0.png", make_picture, read_images),
        "card": Kind("README.md", make_data_card, read_folder_of_texts),
        "declared": Kind("README.md", make_data_card, read_declared),
        "zip": Kind("pictures.zip", make_zip, read_images),
        "gzip": Kind("rows.jsonl.gz", make_gzip, read_folder_of_texts),
    },
    "results": {
        "comparison": Kind("comparison.json", make_comparison, read_comparison),
        "log": Kind("cells.jsonl", make_log, read_log),
    },
    "tokenizer": {
        "tokenizer": Kind(_TOKENIZER, make_llama, read_chat_tokens),
        "settings": Kind("tokenizer_config.json", make_llama, read_chat_tokens),
        "template": Kind("chat_template.jinja", make_llama, read_chat_tokens),
    },
}


def kind_of(file: Path) -> str:
    """The kind that a kept input is of, by its name."""
    return file.name.partition("-")[0]


def corpus(reader: str) -> list[Path]:
    return sorted((CORPUS / reader).glob("*"))


class Scenes:
    """The folders in which one reader's inputs are read, made when they are needed and mended after each."""

    def __init__(self, reader: str, folder: Path) -> None:
        self.reader = reader
        self._folder = folder
        self._good: dict[str, Path] = {}

    def good(self, kind: str) -> Path:
        if kind not in self._good:
            self._good[kind] = READERS[self.reader][kind].make(self._folder / f"{self.reader}-{kind}")
        return self._good[kind]

    def seed(self, kind: str) -> bytes:
        return (self.good(kind) / READERS[self.reader][kind].file).read_bytes()

    def read(self, kind: str, content: bytes, place: Path) -> object:
        """What the reader makes of this content in place of the good one, in a copy of the scene."""
        about = READERS[self.reader][kind]
        shutil.copytree(self.good(kind), place, copy_function=_linked)
        try:
            (place / about.file).unlink()
            (place / about.file).write_bytes(content)
            return about.read(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _linked(source: str, target: str) -> None:
    """A copy that costs nothing; readers that write put new files in the place of old ones."""
    Path(target).hardlink_to(source)


def write_seeds() -> None:
    """Put the good input of every kind into the corpus, where it is not there."""
    import tempfile

    for reader, kinds in READERS.items():
        (CORPUS / reader).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            scenes = Scenes(reader, Path(scratch))
            for kind, about in kinds.items():
                file = CORPUS / reader / f"{kind}-seed{Path(about.file).suffix}"
                if not file.exists():
                    file.write_bytes(scenes.seed(kind))
