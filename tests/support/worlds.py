"""Trained models of the tests, kept between runs in a folder of the checkout that git ignores.

A world is kept under the digest of all that its numbers depend on: the code that trains it, the libraries, the kind of
machine. It counts only with a list of its files that was written last, and as long as they have the digests of that
list: a world whose making was stopped, or that somebody changed, is made again.

`python -m support.worlds` makes all that a run of the tests needs, in two processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from support import KEPT, ROOT

if TYPE_CHECKING:
    from hf_bico.experiments.demo.world import World
    from support.language_gallery import Repos
    from support.language_world import DecoderWorld
    from support.sequence_world import SequenceWorld
    from support.tokenizer_world import TokenizerWorld

SMALL_SEEDS, DECODER_SEEDS, SEQUENCE_SEEDS = (0, 1), (0, 1), (3, 4)
"""What the tests look at. The recipe of the T5s was found on the first three seeds, so others are looked at."""
MORE_SMALL_SEEDS, MORE_DECODER_SEEDS, MORE_SEQUENCE_SEEDS = (0, 1, 2), (0, 1, 2), (3, 4, 5)
"""And what the tests that are marked as slow look at."""
TOKENIZER_SEEDS, MORE_TOKENIZER_SEEDS = (0,), (0, 1, 2)
PLACE = KEPT / "worlds"
_LIST = "kept.json"
_SUPPORT = Path(__file__).parent
_DEMO = tuple(sorted((ROOT / "hf_bico" / "experiments" / "demo").glob("*.py")))
_LIBRARIES = ("torch", "numpy", "transformers", "tokenizers", "open_clip_torch", "peft", "datasets", "scikit-learn")


@dataclass(frozen=True)
class Recipe:
    """What makes one world: the files of its code, and a function that fills a folder."""

    name: str
    sources: tuple[Path, ...]
    make: Callable[[Path], object]

    def folder(self, place: Path = PLACE) -> Path:
        """Where it is kept, if it is."""
        return place / f"{self.name}-{_digest(self.sources)}"

    def kept(self, place: Path = PLACE) -> Path:
        """Its folder; made once, whatever the number of processes that ask for it."""
        folder = self.folder(place)
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / f"{self.name}.lock"):
            if not is_intact(folder):
                for old in place.glob(f"{self.name}-*"):  # of other recipes too: nobody comes back to them
                    shutil.rmtree(old)
                folder.mkdir()
                self.make(folder)
                (folder / _LIST).write_text(json.dumps(_digests(folder)), encoding="utf-8")
        return folder


def small_recipe(seed: int) -> Recipe:
    return Recipe(f"small-{seed}", _DEMO, partial(_make_small_world, seed=seed))


def decoder_recipe(seed: int) -> Recipe:
    sources = (_SUPPORT / "language_world.py", _SUPPORT / "language_toys.py", *_DEMO)
    return Recipe(f"decoders-{seed}", sources, partial(_make_decoders, seed=seed))


def sequence_recipe(seed: int) -> Recipe:
    return Recipe(f"sequences-{seed}", (_SUPPORT / "sequence_world.py", *_DEMO), partial(_make_sequences, seed=seed))


def tokenizer_recipe(seed: int, style: str = "capitals") -> Recipe:
    names = ("tokenizer_world.py", "language_world.py", "language_toys.py")
    sources = (*(_SUPPORT / name for name in names), *_DEMO)
    return Recipe(f"tokenizers-{style}-{seed}", sources, partial(_make_tokenizers, seed=seed, style=style))


def encoder_recipe() -> Recipe:
    sources = (_SUPPORT / "language_gallery.py", _SUPPORT / "language_toys.py", *_DEMO)
    return Recipe("encoders", sources, _make_encoders)


@cache
def small_world(seed: int) -> World:
    """The small world of `hf-bico demo`, with every task."""
    from hf_bico.experiments.demo.world import World

    return World(small_recipe(seed).kept())


@cache
def decoders(seed: int) -> DecoderWorld:
    from support.language_world import DecoderWorld

    return DecoderWorld.below(decoder_recipe(seed).kept())


@cache
def sequences(seed: int) -> SequenceWorld:
    from support.sequence_world import SequenceWorld

    return SequenceWorld.below(sequence_recipe(seed).kept())


@cache
def tokenizers(seed: int, style: str = "capitals") -> TokenizerWorld:
    from support.tokenizer_world import TokenizerWorld

    return TokenizerWorld(tokenizer_recipe(seed, style).kept(), style)


@cache
def encoders() -> Repos:
    """The classifier of the gallery."""
    from support.language_gallery import Repos

    return Repos.below(encoder_recipe().kept())


def _make_small_world(folder: Path, seed: int) -> None:
    from hf_bico.experiments.demo.digits import EASY_TASK, SHIFTED_TASKS
    from hf_bico.experiments.demo.world import build

    build(folder, seed=seed, tasks=[task.name for task in (*SHIFTED_TASKS, EASY_TASK)])


def _make_decoders(folder: Path, seed: int) -> None:
    from support.language_world import build_decoders

    build_decoders(folder, seed)


def _make_tokenizers(folder: Path, seed: int, style: str) -> None:
    from support.tokenizer_world import build_tokenizer_world

    build_tokenizer_world(folder, seed, style)


def _make_sequences(folder: Path, seed: int) -> None:
    from support.sequence_world import build_sequences

    build_sequences(folder, seed)


def _make_encoders(folder: Path) -> None:
    from support.language_gallery import WORLDS

    WORLDS["encoder"](folder)


def is_intact(folder: Path) -> bool:
    """Whether all of a world is there as it was made."""
    try:
        told = json.loads((folder / _LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(told == _digests(folder))


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != _LIST)
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@cache
def _digest(sources: tuple[Path, ...]) -> str:
    from support.measured import machine

    texts = [machine(), platform.python_version(), *(f"{name} {version(name)}" for name in _LIBRARIES)]
    return hashlib.sha256("\0".join([*texts, *(source.read_text() for source in sources)]).encode()).hexdigest()[:16]


def _made(recipe: Recipe) -> str:
    started = time.monotonic()
    recipe.kept()
    return f"{recipe.name}: {time.monotonic() - started:.0f} s"


def main() -> None:
    """Make what is not kept yet, the longest first."""
    os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    recipes = [*map(small_recipe, SMALL_SEEDS), *map(sequence_recipe, SEQUENCE_SEEDS)]
    recipes += [*map(decoder_recipe, DECODER_SEEDS), *map(tokenizer_recipe, TOKENIZER_SEEDS), encoder_recipe()]
    missing = [recipe for recipe in recipes if not is_intact(recipe.folder())]
    if missing:
        print("Training the small models of the tests, once: about four minutes", flush=True)
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            for told in pool.map(_made, missing):
                print(told, flush=True)


if __name__ == "__main__":
    main()
