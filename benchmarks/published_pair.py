"""Ports between two published GPT-2s that were trained by others, up and down: IgLM-S (192 x 3) and IgLM (512 x 4).

    pip install --no-deps --target IGLM iglm
    python benchmarks/published_pair.py FOLDER --models IGLM/iglm/trained_models [--device cuda]

The two generate antibody sequences. Each is fine-tuned in full on three tasks made of these (letters swapped, reversed,
without the leading tags), gently and hard, and ported to the other. A gain is the fall of the held-out loss in percent
of what fine-tuning did for the source's own base. A few minutes on a GPU; sequences differ from machine to machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from torch.nn import functional

from hf_bico.porting.port import port
from hf_bico.utils.text import format_table

BASES = {"small": "IgLM-S", "large": "IgLM"}
WAYS = {"down": ("large", "small"), "up": ("small", "large")}
SIZES = (10, 100)
VARIANTS: dict[str, dict[str, Any]] = {
    "theseus@1": {"method": "theseus", "alpha": 1.0},
    "theseus": {"method": "theseus"},
    "bico@1": {"method": "bico", "alpha": 1.0},
    "bico": {"method": "bico"},
    "bico-last": {"method": "bico-last"},
    "auto": {},
}
LENGTH, BATCH, TRAINED_ON, HELD_OUT = 128, 16, 2000, 300
RECIPES = {"hard": (60, {"small": 3e-4, "large": 1e-4}), "gentle": (15, {"small": 1e-4, "large": 3e-5})}
"""Steps and learning rates."""
_SWAPPED = str.maketrans("LISTDEKRVAFYNQ", "ILTSEDRKAVYFQN")
TASKS: dict[str, Callable[[str, str], str]] = {
    "swapped": lambda tags, letters: tags + letters.translate(_SWAPPED),
    "reversed": lambda tags, letters: tags + letters[::-1],
    "bare": lambda tags, letters: letters,
}


class Pair:
    """Both models in transformers' layout with their tokenizer, and the sequences that they generate."""

    def __init__(self, folder: Path, models: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.vocabulary = (models / "vocab.txt").read_text(encoding="utf-8").split()
        self.tokenizer = _tokenizer(self.vocabulary)
        for name, place in BASES.items():
            if not (folder / name).is_dir():
                self.save(self.load(models / place), folder / name)

    def load(self, place: Path) -> Any:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel.from_pretrained(place).to(self.device)

    def save(self, model: Any, place: Path) -> None:
        model.cpu().save_pretrained(place)
        self.tokenizer.save_pretrained(place)

    def sequences(self, count: int = 64, rounds: int = 4) -> list[tuple[str, str]]:
        """Sequences of both models, each with the tags that it begins with."""
        kept = self.folder / "sequences.json"
        if not kept.is_file():
            torch.manual_seed(0)
            found = [one for name in BASES for _ in range(rounds) for one in self._generated(name, count)]
            random.Random(0).shuffle(found)
            kept.write_text(json.dumps(found), encoding="utf-8")
        return [(tags, letters) for tags, letters in json.loads(kept.read_text(encoding="utf-8"))]

    def _generated(self, name: str, count: int) -> Iterator[tuple[str, str]]:
        model = self.load(self.folder / name).eval()
        numbers = {token: number for number, token in enumerate(self.vocabulary)}
        tags = [f"{chain}{kind}" for chain in ("[HEAVY]", "[LIGHT]") for kind in ("[HUMAN]", "[MOUSE]", "[RAT]")]
        refused = [[number] for number, token in enumerate(self.vocabulary) if "[" in token and token != "[SEP]"]
        for tag in tags:
            start = self.tokenizer(tag, return_tensors="pt", return_token_type_ids=False)["input_ids"]
            options = {"max_length": 140, "do_sample": True, "pad_token_id": 0, "eos_token_id": numbers["[SEP]"]}
            rows = model.generate(start.repeat(count, 1).to(self.device), bad_words_ids=refused, **options)
            for row in rows[:, 2:].tolist():
                letters = "".join(self.vocabulary[number] for number in row if len(self.vocabulary[number]) == 1)
                if len(letters) > 60:
                    yield tag, letters

    def batch(self, texts: Sequence[str]) -> Any:
        options = {"padding": True, "truncation": True, "max_length": LENGTH, "return_token_type_ids": False}
        return self.tokenizer(list(texts), return_tensors="pt", **options).to(self.device)

    def loss(self, model: Any, texts: Sequence[str]) -> float:
        model, total, count = model.float().eval().to(self.device), 0.0, 0
        with torch.no_grad():
            for start in range(0, len(texts), 100):
                batch = self.batch(texts[start : start + 100])
                logits, ids = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
                real = batch["attention_mask"][:, 1:].bool()
                total += float(functional.cross_entropy(logits[real], ids[real], reduction="sum"))
                count += int(real.sum())
        return total / count

    def tuned(self, name: str, task: str, strength: str, texts: Sequence[str]) -> Path:
        """The folder of a fine-tune."""
        place = self.folder / f"{name}-{task}-{strength}"
        if place.is_dir():
            return place
        torch.manual_seed(0)
        steps, rates = RECIPES[strength]
        model, draw = self.load(self.folder / name).train(), random.Random(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rates[name])
        for _ in range(steps):
            batch = self.batch(draw.choices(texts, k=BATCH))
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            optimizer.zero_grad()
            model(**batch, labels=labels).loss.backward()
            optimizer.step()
        self.save(model, place)
        return place


def _tokenizer(vocabulary: Sequence[str]) -> Any:
    """Letters and tags, and nothing around a text."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({token: number for number, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.pre_tokenizer = Split(Regex(r"."), "isolated")
    tags = [token for token in vocabulary if "[" in token and token not in ("[PAD]", "[UNK]")]
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "additional_special_tokens": tags}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def gains(pair: Pair, task: str, strength: str) -> Iterator[tuple[tuple[str, int, str], float]]:
    """Yield the gain of every port, by direction, number of samples and variant."""
    texts = [TASKS[task](tags, letters) for tags, letters in pair.sequences()]
    held_out = texts[TRAINED_ON : TRAINED_ON + HELD_OUT]
    before = {name: pair.loss(pair.load(pair.folder / name), held_out) for name in BASES}
    tuned = {name: pair.tuned(name, task, strength, texts[:TRAINED_ON]) for name in BASES}
    for way, (source, target) in WAYS.items():
        own = before[source] - pair.loss(pair.load(tuned[source]), held_out)
        for n in SIZES:
            rows = [{"text": text} for text in texts[:n]]
            where = {"to": pair.folder / target, "base": pair.folder / source, "data": rows, "n": n}
            for name, how in VARIANTS.items():
                options = {"evaluate": False, "max_length": LENGTH, "device": pair.device, **how}
                ported = port(tuned[source], **where, **options)
                gain = 0.0 if ported.held_back else before[target] - pair.loss(ported.model(), held_out)
                yield (way, n, name), 100 * gain / own


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--models", type=click.Path(path_type=Path, exists=True), required=True, help="The package's models.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--tasks", default=",".join(TASKS), show_default=True)
def main(folder: Path, models: Path, device: str, tasks: str) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder.mkdir(parents=True, exist_ok=True)
    pair = Pair(folder, models, device)
    found: dict[tuple[str, int, str], list[float]] = {}
    for task in tasks.split(","):
        for strength in RECIPES:
            for key, gain in gains(pair, task, strength):
                found.setdefault(key, []).append(gain)
    lines = [["way", "samples", "ports", *VARIANTS]]
    for way in WAYS:
        for n in SIZES:
            cells = [f"{fmean(found[way, n, name]):.0f}" for name in VARIANTS]
            lines.append([way, str(n), str(len(found[way, n, "auto"])), *cells])
    click.echo(format_table(lines))


if __name__ == "__main__":
    main()
