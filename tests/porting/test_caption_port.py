"""Whole ports of CLIPs that were fine-tuned on captions: which towers are carried, by what loss, and what is said."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import hf_bico
from hf_bico.cli.console import print_ported
from hf_bico.errors import EmptyTaskVectorError, UnsuitableMethodError
from hf_bico.reports.results import headline, left_behind
from support import language_reference as reference
from support.paper import PAPER
from support.rotated_language import InDouble
from support.toys import CLASS_NAMES, WRITERS, Toy, random_rows, random_state

SOURCE = Toy(width=16, text_blocks=2)
TARGET = Toy(width=24, heads=3, blocks=3, text_width=32, text_blocks=3, embedding=20)
WORDS = [f"{sort} {name}" for sort in ("a photo of a", "the digit", "a blurry") for name in CLASS_NAMES]
STACKS = ("vision_model.encoder.layers", "text_model.encoder.layers")
PROJECTIONS = ("visual_projection", "text_projection")


def rows(captions: bool = True) -> list[dict[str, Any]]:
    """Images with captions, each another; or with labels."""
    found = random_rows(len(WORDS), SOURCE.image_size)
    if not captions:
        return found
    return [{"image": row["image"], "caption": words} for row, words in zip(found, WORDS, strict=True)]


class Scene:
    """A base, a target, and fine-tunes of the base by what they changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = random_state(SOURCE, 0)
        self.base = WRITERS["transformers"](folder / "base", SOURCE, self.state)
        self.target = WRITERS["transformers"](folder / "target", TARGET, random_state(TARGET, 1))

    @cache  # noqa: B019
    def tuned(self, kind: str) -> Path:
        """Of "both" towers, of "vision", of "text", or of "embeddings" far more than of anything else."""
        generator = torch.Generator().manual_seed(5)

        def change(name: str, tensor: Tensor) -> Tensor:
            share = 0.0 if {"vision": not vision(name), "text": vision(name)}.get(kind) or tensor.ndim == 0 else 0.02
            if kind == "embeddings" and name == "token_embedding.weight":
                share = 2.0
            return tensor + share * torch.randn(tensor.shape, generator=generator)

        state = {name: change(name, tensor) for name, tensor in self.state.items()}
        return WRITERS["transformers"](self.folder / kind, SOURCE, state)

    @cache  # noqa: B019
    def port(self, kind: str, captions: bool = True, **options: Any) -> hf_bico.Ported:
        usual = {"data": rows(captions), "n": len(WORDS), "dtype": "float64", "evaluate": False, **PAPER}
        names = {} if captions else {"class_names": CLASS_NAMES}
        with InDouble():
            return hf_bico.port(self.tuned(kind), to=self.target, base=self.base, **{**usual, **names, **options})


def vision(name: str) -> bool:
    return name.startswith("visual")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("captions"))


def towers(ported: hf_bico.Ported) -> set[str]:
    return {"vision" if "vis" in name else "text" for name in ported.task_vector}


def distance(found: Any, expected: Any) -> float:
    assert set(found) == set(expected)
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


# --- against the reference


def slow(scene: Scene, kind: str) -> dict[str, Tensor]:
    """All pairs at once through the library's own contrastive loss; of texts, the rows of real tokens."""
    models = [transformers.CLIPModel.from_pretrained(path).double().eval() for path in (scene.base, scene.target)]
    tuned = transformers.CLIPModel.from_pretrained(scene.tuned(kind)).double()
    before, after = (dict(model.named_parameters()) for model in (models[0], tuned))
    changes = {name: (after[name] - before[name]).detach() for name in before}
    expected: dict[str, Tensor] = {}
    for stack, projection in zip(STACKS, PROJECTIONS, strict=True):
        seen = []
        for folder, model in zip((scene.base, scene.target), models, strict=True):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            texts = tokenizer(WORDS, padding=True, return_tensors="pt")
            pixels = torch.stack([row["image"] for row in rows()]).double()

            def loss(model: Any, _: int, texts: Any = texts, pixels: Tensor = pixels) -> Tensor:
                return model(**texts, pixel_values=pixels, return_loss=True).loss * len(WORDS)

            modules = reference.linear_modules(model, stack, [projection])
            found = reference.observe(model, modules, loss, 1)
            real = texts["attention_mask"].bool().flatten()
            seen.append(found.rows_of(real) if stack == STACKS[1] else found)
        blocks = tuple(len(model.get_submodule(stack)) for model in models)
        expected |= reference.carried(changes, (seen[0], seen[1]), stack, blocks)
    return expected


def test_both_towers_are_carried_as_by_the_slow_reference(scene: Scene) -> None:
    ported = scene.port("both")
    assert ported.record.objective.name == "contrastive"
    assert towers(ported) == {"vision", "text"}
    assert distance(ported.task_vector, slow(scene, "both")) < 1e-5


@pytest.mark.parametrize("size", [1, 5])
def test_the_size_of_batches_counts_for_nothing(scene: Scene, size: int) -> None:
    assert distance(scene.port("both", batch_size=size).task_vector, scene.port("both").task_vector) < 1e-5


# --- which towers


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_a_tower_alone_is_that_of_both(scene: Scene, tower: str) -> None:
    one, both = scene.port("both", tower=tower), scene.port("both", tower="both")
    assert towers(one) == {tower}
    assert one.record.objective.name == "contrastive"
    assert distance(one.task_vector, {name: both.task_vector[name] for name in one.task_vector}) < 1e-9
    reasons = {entry.reason for entry in one.record.left}
    assert ("vision tower" if tower == "text" else "text tower") in reasons


def test_classes_stand_for_captions_where_there_are_none(scene: Scene) -> None:
    """Both towers of a fine-tune are carried by labelled images too, whose captions are the classes' prompts."""
    ported = scene.port("both", captions=False)
    assert towers(ported) == {"vision", "text"}
    said = [{"image": row["image"], "caption": f"a photo of a {CLASS_NAMES[row['label']]}."} for row in rows(False)]
    by_hand = scene.port.__wrapped__(scene, "both", data=said)
    assert distance(ported.task_vector, by_hand.task_vector) < 1e-9


def test_a_source_of_one_tower_is_asked_zero_shot_as_ever(scene: Scene) -> None:
    ported = scene.port("vision", captions=False)
    assert (ported.record.objective.name, towers(ported)) == ("zero-shot", {"vision"})
    asked = scene.port("both", captions=False, objective="zero-shot")
    assert (asked.record.objective.name, towers(asked)) == ("zero-shot", {"vision"})


def test_a_source_of_the_text_tower_alone_carries_that(scene: Scene) -> None:
    assert towers(scene.port("text")) == {"text"}


@pytest.mark.parametrize("options", [{"method": "bico-fisher"}, {"readout": True}])
def test_what_predicts_classes_does_not_carry_a_text_tower(scene: Scene, options: dict[str, Any]) -> None:
    with pytest.raises(UnsuitableMethodError):
        scene.port("both", captions=False, tower="text", **options)


def test_a_tower_that_the_source_did_not_change_is_refused(scene: Scene) -> None:
    for kind, tower in (("vision", "text"), ("text", "vision")):
        with pytest.raises(EmptyTaskVectorError, match=f"changed nothing that can be carried in the {tower} tower"):
            scene.port(kind, tower=tower)


def test_captions_of_different_lengths_are_not_mispaired(scene: Scene) -> None:
    with pytest.raises(UnsuitableMethodError, match="captions of different lengths have no rows to pair"):
        scene.port("both", n=8, evaluate=True, control=True)


# --- what is said


def test_captions_are_measured_by_their_held_out_loss(scene: Scene, tmp_path: Path) -> None:
    ported = scene.port("both", n=8, evaluate=True)
    measured = {entry.model: entry for entry in ported.record.evaluation}
    assert {entry.metric for entry in measured.values()} == {"loss"}
    assert measured.keys() >= {"target", "ported", "source"}
    model = ported.model().eval()
    used = set(ported.record.data.indices)
    rest = [number for number in range(len(WORDS)) if number not in used]
    tokenizer = transformers.AutoTokenizer.from_pretrained(scene.target)
    texts = tokenizer([WORDS[number] for number in rest], padding=True, return_tensors="pt")
    pixels = torch.stack([rows()[number]["image"] for number in rest])
    with torch.no_grad():
        loss = model(**texts, pixel_values=pixels, return_loss=True).loss
    assert measured["ported"].value == pytest.approx(float(loss), rel=1e-4)


def test_that_most_stays_behind_is_said_first(scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ported = scene.port("embeddings", n=8, evaluate=True, force=True)
    said = left_behind(ported.record)
    assert said is not None
    assert said.startswith("MOST of the task vector was left behind")
    assert str(headline(ported.record)).startswith(said)
    out = ported.save(tmp_path / "out")
    body = (out / "README.md").read_text().split("---\n")[2]
    assert "MOST of the task vector was left behind" in [line for line in body.splitlines() if line][1]
    print_ported(ported.record, ported.report, out, pushing=False)
    assert capsys.readouterr().out.startswith(said)
    assert left_behind(scene.port("both").record) is None


def test_a_full_model_has_both_towers_changed(scene: Scene, tmp_path: Path) -> None:
    out = scene.port("both").save(tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (scene.target, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(scene.port("both").task_vector)
    transformers.CLIPModel.from_pretrained(out)
