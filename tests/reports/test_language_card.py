"""The cards of language models and classifiers: what they say of their task, loss and head, and that they run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

import hf_bico
from hf_bico.reports.model_cards import render_card
from hf_bico.reports.record import LeftRecord, MethodRecord, ObjectiveRecord, Record, TrainingRecord, read_record
from support.hub import Hub
from support.language_toys import labelled_rows, sentences, write_decoder, write_encoder, write_t5, write_vit
from support.loopback import validates_cards
from support.paper import PAPER
from support.records import (
    DATA,
    a_classifier_record,
    a_decoder_record,
    a_language_record,
    a_record,
    an_adapter_record,
    losses,
    measured,
    metadata,
    snippet,
    text_of,
)


def _formed(record: Record, format: str) -> Record:
    assert record.output is not None
    return replace(record, output=replace(record.output, format=format))


@pytest.mark.parametrize(
    ("family", "objective", "head", "task"),
    [
        ("decoder", "language-modelling", None, "text-generation"),
        ("GPT-2", "language-modelling", None, "text-generation"),
        ("generic", "language-modelling", None, "text-generation"),
        ("T5", "text-to-text", None, "text2text-generation"),
        ("encoder", "classification", "carried", "text-classification"),
        ("ViT", "classification", "fitted", "image-classification"),
        ("encoder", "mine", None, None),
        ("T5", "mine", None, None),
        ("generic", "mine", None, None),
    ],
)
def test_metadata_names_library_and_task(family: str, objective: str, head: str | None, task: str | None) -> None:
    record = a_language_record(family, objective, head)
    for format, library in (("full", "transformers"), ("adapter", "peft"), ("delta", "hf-bico")):
        card = render_card(_formed(record, format))
        found = metadata(card)
        assert found["library_name"] == library
        assert found.get("pipeline_tag") == (None if format == "delta" else task)
        if task is not None:
            assert found["model-index"][0]["results"][0]["task"]["type"] == task
        assert "clip" not in found["tags"]
        ast.parse(snippet(card))
        assert ("Image" in snippet(card)) == (family == "ViT" and format != "delta")


@pytest.mark.parametrize(("family", "task"), [("T5", "text-classification"), ("ViT", "image-classification")])
def test_probe_is_a_classification_of_what_the_model_reads(family: str, task: str) -> None:
    card = render_card(
        a_language_record(family, "text-to-text", evaluation=measured(probe_target=0.5, probe_ported=0.6))
    )
    (result,) = metadata(card)["model-index"][0]["results"]
    assert result["task"]["type"] == task
    assert "logistic regression on the model's frozen features" in text_of(card)


@validates_cards
def test_cards_pass_the_hubs_own_validation(hub: Hub) -> None:
    for record in (a_decoder_record(), a_classifier_record(), a_language_record("T5", "text-to-text")):
        ModelCard(render_card(record)).validate()
    assert [entry.path for entry in hub.log if "validate-yaml" in entry.path]


def test_decoder_card_tells_its_loss_and_no_classes() -> None:
    read = text_of(render_card(a_decoder_record()))
    for said in (
        "Held-out loss 2.700, down from the target's 3.000: 60% of the gain that fine-tuning gave the source's own",
        "The port gave the target 60% of the gain that fine-tuning gave the source's own base. It took 3.5 seconds",
        "The loss is the mean cross-entropy of the answers' tokens without the prompts. Lower is better.",
        "question (prompt), answer (completion). Each text is cut to 512 tokens.",
        "Objective: language-modelling, the cross-entropy of the answers' tokens without the prompts, summed over",
    ):
        assert said in read
    for wrong in ("Classes", "label", "accuracy", "gap", "Head:"):
        assert wrong not in read


@pytest.mark.parametrize(
    ("columns", "said"), [({"text": "t"}, "the texts' tokens"), ({"messages": "m"}, "the assistant's tokens")]
)
def test_which_tokens_are_learnt_is_told(columns: dict[str, str], said: str) -> None:
    record = a_decoder_record()
    assert record.data is not None
    read = text_of(render_card(replace(record, data=replace(record.data, columns=columns, max_length=None))))
    assert f"the cross-entropy of {said}" in read
    assert "is cut to" not in read


def test_labels_of_a_decoder_are_the_probes_alone() -> None:
    record = a_decoder_record(evaluation=measured(probe_target=0.5, probe_ported=0.6))
    assert record.data is not None
    data = replace(record.data, class_names=["sad", "glad"], labels="dataset")
    assert "Classes: 2 (sad, glad), for the probe only, labels of the data set." in text_of(
        render_card(replace(record, data=data))
    )


def test_t5_card_says_whose_loss_it_is() -> None:
    read = text_of(render_card(a_language_record("T5", "text-to-text")))
    assert "computed with each model's own decoder; the answer is the class name." in read
    assert "does not name its loss." in read


TRAINED = MethodRecord("fewshot", 1.0, [0, 1], training=TrainingRecord(1e-3, 0.1, 1, 100))


@pytest.mark.parametrize(
    ("head", "method", "said"),
    [
        ("carried", MethodRecord("bico", 1.0, [0, 1]), "carried as W_head M. The affine map M"),
        ("fitted", MethodRecord("bico", 1.0, [0, 1]), "logistic regression on the ported model's features"),
        ("fitted", TRAINED, "ridge regression on the target's features of the calibration samples before training"),
    ],
)
def test_classifier_card_says_how_its_head_came_about(head: str, method: MethodRecord, said: str) -> None:
    record = a_language_record("encoder", "classification", head, method=method)
    assert said in text_of(render_card(record))
    assert "does not include the head" not in text_of(render_card(record))
    assert "This change of weights does not include the head." in text_of(render_card(_formed(record, "delta")))


@pytest.mark.parametrize(("head", "said"), [("carried", "uses no labels"), ("fitted", "labels of the data set")])
def test_samples_of_a_method_without_any_made_the_head(head: str, said: str) -> None:
    naive = MethodRecord("naive", 1.0, [0, 1])
    card = render_card(a_language_record("encoder", "classification", head, method=naive))
    assert "Calibration, for the head only: 100 samples" in text_of(card)
    assert said in text_of(card)
    assert metadata(card)["datasets"] == [DATA]


def test_captions_are_told_without_prompts() -> None:
    full = a_record()
    assert full.data is not None
    data = replace(full.data, columns={"image": "i", "caption": "c"}, class_names=[], labels="none")
    objective = ObjectiveRecord("contrastive", ["a photo of a {}."])
    method = replace(full.method, tower="both")
    card = render_card(
        replace(full, data=data, objective=objective, method=method, evaluation=losses(target=2.0, ported=1.5))
    )
    read = text_of(card)
    assert "Method: bico, tower both, completion drop" in read
    assert "each image compared with the texts of all pairs" in read
    assert "the text is its caption." in read
    assert "prompts" not in read
    assert "contrastive loss of a pair among all of these" in read
    assert metadata(card)["model-index"][0]["results"][0]["task"]["type"] == "feature-extraction"


def test_what_mostly_stayed_behind_is_said_first() -> None:
    record = a_decoder_record(left=[LeftRecord("model.embed_tokens.weight", "embeddings", 0.7)])
    first = render_card(record).split("---\n", 2)[2].split("\n\n")[1]
    assert first.startswith(
        "**MOST of the task vector was left behind: 70% of its energy \\(embeddings: 70%\\). Held-out"
    )


def test_control_of_a_loss_gains_where_the_loss_falls() -> None:
    record = a_decoder_record(evaluation=losses(target=3.0, ported=2.5, control=2.99, source=2.0))
    read = text_of(render_card(record))
    assert (
        "from the target, its loss moves by -0.010, and the port's by -0.500. The gain disappears in the control"
        in read
    )


def test_many_classes_of_an_adapter_are_counted() -> None:
    record = _formed(a_classifier_record(), "adapter")
    assert record.data is not None
    many = replace(record.data, class_names=[f"class {number}" for number in range(300)])
    assert "for number in range(300)]" in snippet(render_card(replace(record, data=many)))
    assert 'names = ["sad", "glad"]' in snippet(render_card(record))


def test_adapter_of_a_clip_keeps_its_task() -> None:
    assert metadata(render_card(an_adapter_record()))["pipeline_tag"] == "zero-shot-image-classification"


# The snippet runs as it stands


def _tuned(base: Path, place: Path, name: str, **options: Any) -> Path:
    import shutil

    import transformers

    shutil.copytree(base, place)
    model = getattr(transformers, name).from_pretrained(base, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05
    model.save_pretrained(place)
    return place


def _texts(folder: Path, write: Callable[..., Path], name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    base, target = write(folder / "base"), write(folder / "target", width=24, seed=1)
    return {"source": _tuned(base, folder / "tuned", name), "base": base, "to": target, "data": rows}


def _moods() -> list[dict[str, Any]]:
    return [{**row, "label": ("sad", "glad")[row["label"]]} for row in labelled_rows(30)]


def _pictures(folder: Path) -> dict[str, Any]:
    rows = [
        {"image": Image.new("RGB", (16, 16), (9 * number, 90, 0)), "label": "ab"[number % 2]} for number in range(20)
    ]
    base, target = write_vit(folder / "base"), write_vit(folder / "target", width=24, seed=1)
    tuned = _tuned(base, folder / "tuned", "ViTForImageClassification", num_labels=2)
    return {"source": tuned, "base": base, "to": target, "data": rows}


SCENES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "decoder": (
        lambda folder: _texts(folder, write_decoder, "LlamaForCausalLM", [{"text": text} for text in sentences(20)]),
        "Once upon a time",
    ),
    "T5": (lambda folder: _texts(folder, write_t5, "T5ForConditionalGeneration", _moods()), "torch.Size([2, 24])"),
    "encoder": (lambda folder: _texts(folder, write_encoder, "BertForSequenceClassification", _moods()), "%  glad"),
    "ViT": (_pictures, "%  b"),
}


@pytest.mark.parametrize("kind", SCENES)
def test_snippets_of_every_format_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From folders; the full model and the adapter print the same."""
    make, expected = SCENES[kind]
    scene = make(tmp_path)
    ported = hf_bico.port(**scene, n=10, evaluate=False, **PAPER)
    assert "left behind" not in str(ported.record.notices), "the head is carried"
    printed = []
    for format in ("full", "adapter", "delta"):
        folder = tmp_path / format
        ported.save(folder, format=format)
        assert read_record(folder).data == ported.record.data
        code = snippet((folder / "README.md").read_text()).replace("path/to/the/model", str(scene["to"]))
        monkeypatch.chdir(folder)
        capsys.readouterr()
        exec(compile(code, "the snippet of the card", "exec"), {})
        printed.append(capsys.readouterr().out)
    assert expected in printed[0]
    assert printed[0] == printed[1]
    assert (printed[2] == printed[0]) == (kind in ("decoder", "T5")), "a change of weights has no head"
