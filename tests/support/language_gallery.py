"""The language models of the gallery as repos: trained for its cards, or with random weights where only code is run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_bico.experiments.demo.training import quiet_torch
from support.language_toys import answered_rows, labelled_rows, sentences, write_decoder, write_encoder, write_t5
from support.language_world import build_decoders
from support.sequence_world import build_sequences

if TYPE_CHECKING:
    from support.hub import Hub

GLAD = ("likes", "paints", "finds")
"""The verbs of a sentence that the classifier calls glad."""
STEPS, TUNING_STEPS, TUNING_RATE = 80, 60, 1e-3
"""Pretraining is short: a target that tells all words apart has nothing to gain."""


@dataclass(frozen=True)
class Repos:
    """The folders of a fine-tune, its base, a target and the data."""

    source: Path
    base: Path
    target: Path
    data: Path

    @classmethod
    def below(cls, folder: Path) -> Repos:
        return cls(*(folder / name for name in ("tuned", "base", "target", "data")))


def publish(hub: Hub, owner: str, kind: str, folder: Path, trained: bool) -> None:
    """The repos OWNER/KIND, KIND-wide, KIND-tuned and KIND-data."""
    from support.hub_scenes import upload

    repos = WORLDS[kind](folder) if trained else TOYS[kind](folder)
    data = f"{owner}/{kind}-data"
    card = f"---\nlicense: apache-2.0\nbase_model: {owner}/{kind}\ndatasets: [{data}]\n---\n# A fine-tune\n"
    upload(hub, f"{owner}/{kind}", repos.base, "---\nlicense: apache-2.0\nlanguage: en\n---\n# A base\n")
    upload(hub, f"{owner}/{kind}-wide", repos.target, "---\nlicense: apache-2.0\nlanguage: en\n---\n# A newer base\n")
    upload(hub, f"{owner}/{kind}-tuned", repos.source, card)
    upload(hub, data, repos.data, "---\nlicense: cc-by-4.0\n---\n# Texts\n", type="dataset")


# Trained


def _decoders(folder: Path) -> Repos:
    world = build_decoders(folder, seed=0)
    data = _rows(folder / "data", world.calibration(300), world.held_out(200))
    return Repos(world.adapter, world.source, world.target, data)


def _sequences(folder: Path) -> Repos:
    world = build_sequences(folder, seed=0)
    return Repos(world.tuned, world.source, world.target, world.data)


def build_encoders(folder: Path, seed: int = 0, tokenizers: tuple[Any, Any] = (None, None)) -> Repos:
    """Both have learnt to tell the words of a sentence, and the first of them which verbs are glad ones.

    They read characters, unless tokenizers are given.
    """
    places = [folder / name for name in ("base", "target", "tuned")]
    for number, (place, width, cut) in enumerate(zip(places[:2], (24, 32), tokenizers, strict=True), start=3 * seed):
        with quiet_torch(number):
            _teach(write_encoder(place, width=width, seed=number, tokenizer=cut), place, _words_of, 15, STEPS, 2e-3)
    with quiet_torch(3 * seed + 2):
        model = _teach(places[0], places[2], _glad, 2, TUNING_STEPS, TUNING_RATE)
        model.config.id2label, model.config.label2id = {0: "sad", 1: "glad"}, {"sad": 0, "glad": 1}
        model.save_pretrained(places[2])
    rows = [[{"text": text, "label": ("sad", "glad")[_glad(text)[0]]} for text in sentences(n, n)] for n in (300, 400)]
    _rows(folder / "data", *rows)
    return Repos.below(folder)


def _words_of(text: str) -> list[int]:
    """The numbers of name, verb and thing, each of five."""
    from support.language_toys import _NAMES, _THINGS, _VERBS

    name, verb, thing = text.rstrip(".").split(" ", 2)
    return [_NAMES.index(name), 5 + _VERBS.index(verb), 10 + _THINGS.index(thing)]


def _glad(text: str) -> list[int]:
    return [int(text.split()[1] in GLAD)]


def _teach(
    base: Path, place: Path, answers: Callable[[str], Sequence[int]], labels: int, steps: int, rate: float
) -> Any:
    """A classifier over the encoder of a folder; the encoder alone is written where it is pretrained in place."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(base, num_labels=labels)
    tokenizer = AutoTokenizer.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        texts = sentences(32, seed=1000 + step)
        wanted = torch.zeros(len(texts), labels)
        for row, text in enumerate(texts):
            wanted[row, list(answers(text))] = 1
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted).backward()
        optimizer.step()
    (model.bert if place == base else model).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return model


# With random weights


def _toy_decoders(folder: Path) -> Repos:
    import peft

    base, target = write_decoder(folder / "base"), write_decoder(folder / "target", width=24, seed=1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(_loaded(base, "LlamaForCausalLM"), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 0.02 if "lora_B" in name else 1.0
    model.save_pretrained(folder / "tuned")
    return Repos(folder / "tuned", base, target, _rows(folder / "data", answered_rows(120), answered_rows(20, 1)))


def _toy_encoders(folder: Path) -> Repos:
    base, target = write_encoder(folder / "base"), write_encoder(folder / "target", width=24, seed=1)
    tuned = _moved(base, folder / "tuned", "BertForSequenceClassification")
    return Repos(tuned, base, target, _labelled(folder / "data", ("sad", "glad")))


def _toy_sequences(folder: Path) -> Repos:
    base, target = write_t5(folder / "base"), write_t5(folder / "target", width=24, seed=1)
    tuned = _moved(base, folder / "tuned", "T5ForConditionalGeneration")
    return Repos(tuned, base, target, _labelled(folder / "data", ("sad", "glad")))


def _loaded(folder: Path, name: str) -> Any:
    import transformers

    return getattr(transformers, name).from_pretrained(folder)


def _moved(base: Path, place: Path, name: str) -> Path:
    """A copy whose weights are a little elsewhere."""
    shutil.copytree(base, place)
    model = _loaded(base, name)
    with torch.no_grad(), quiet_torch(0):
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(place)
    return place


def _labelled(folder: Path, names: Sequence[str]) -> Path:
    rows = [[{**row, "label": names[row["label"]]} for row in labelled_rows(120, seed=seed)] for seed in (0, 1)]
    return _rows(folder, *rows)


def _rows(folder: Path, train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


WORLDS: dict[str, Callable[[Path], Repos]] = {"decoder": _decoders, "encoder": build_encoders, "t5": _sequences}
TOYS: dict[str, Callable[[Path], Repos]] = {
    "decoder": _toy_decoders,
    "encoder": _toy_encoders,
    "t5": _toy_sequences,
}
