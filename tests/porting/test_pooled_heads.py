"""Ports of classifiers whose base has no pooler, or is a sentence encoder: one accuracy of the source everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, BertForSequenceClassification, BertModel

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import UnsuitableMethodError
from hf_bico.porting.evaluate import evaluate_model
from hf_bico.reports.results import result_rows
from support.language_toys import fine_tuned, sentences, write_encoder

NAMES = ("bad", "fine", "good")
TEXTS = sentences(60)
ROWS = [{"text": text, "label": NAMES[sum(map(ord, text)) % 3]} for text in TEXTS]
DATA = {"train": ROWS[:30], "test": ROWS[30:]}
N = 24


class Scene:
    """An encoder, a classifier that was fine-tuned from it, and targets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = write_encoder(folder / "base", task="ForMaskedLM", width=8)
        self.tuned = self.classifier(self.base, folder / "tuned")
        self.bare = write_encoder(folder / "bare", task="ForMaskedLM", width=24, seed=1)
        self.pooled = write_encoder(folder / "pooled", width=24, seed=2)

    def classifier(self, base: Path, folder: Path, drawn: Sequence[str] = ("bert.pooler.dense", "classifier")) -> Path:
        torch.manual_seed(1)
        labels = dict(enumerate(NAMES))
        start = BertForSequenceClassification.from_pretrained(base, id2label=labels, num_labels=3)
        with torch.no_grad():
            for name in drawn:
                start.get_submodule(name).weight.normal_()
        start.save_pretrained(folder / "start")
        for file in base.glob("tok*"):
            shutil.copy(file, folder / "start")
        return fine_tuned(folder / "start", folder / "end", BertForSequenceClassification)

    def port(self, to: Any, source: Path | None = None, **options: Any) -> hf_bico.Ported:
        given = {"base": self.base, "data": DATA, "n": N, "alpha": 1.0, "method": "bico", **options}
        return hf_bico.port(source or self.tuned, to=to, **given)


def as_sentence_encoder(folder: Path, mode: str, place: Path) -> Path:
    """The same encoder with the files of sentence-transformers that say how it is pooled."""
    shutil.copytree(folder, place)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (place / "modules.json").write_text(json.dumps(listed))
    for path in list(kinds)[1:]:
        (place / path).mkdir()
    (place / "1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 24, "pooling_mode": mode}))
    return place


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("pooled"))


def logits(model: Any, folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        read = tokenizer(TEXTS[30:], padding=True, return_tensors="pt")
        return model.float().eval()(**{name: value for name, value in read.items() if name != "token_type_ids"}).logits


def accuracy(values: torch.Tensor) -> float:
    right = [NAMES[int(row.argmax())] == one["label"] for row, one in zip(values, DATA["test"], strict=True)]
    return sum(right) / len(right)


def values(ported: hf_bico.Ported) -> dict[str, float]:
    return {entry.model: entry.value for entry in ported.record.evaluation}


def source_accuracy(scene: Scene) -> float:
    """By transformers alone."""
    return accuracy(logits(BertForSequenceClassification.from_pretrained(scene.tuned), scene.tuned))


@pytest.mark.parametrize("target", ["bare", "pooled"])
@pytest.mark.parametrize("form", ["full", "adapter"])
def test_a_head_whose_base_has_no_pooler_is_carried_with_it(
    target: str, form: str, scene: Scene, tmp_path: Path
) -> None:
    """The pooler is the head's hidden layer; what is written is what was measured."""
    ported = scene.port(getattr(scene, target), format=form)
    assert ported.record.objective.head == "carried"
    assert values(ported)["source"] == source_accuracy(scene)
    out = ported.save(tmp_path / "out")
    if form == "full":
        loaded: Any = BertForSequenceClassification.from_pretrained(out)
    else:
        loaded = BertForSequenceClassification.from_pretrained(getattr(scene, target), num_labels=3)
        loaded = peft.PeftModel.from_pretrained(loaded, out)
    found = logits(loaded, scene.bare)
    assert (found - logits(ported.model(), scene.bare)).abs().max() < 1e-4 * found.abs().max()
    assert accuracy(found) == pytest.approx(values(ported)["ported"])
    if form == "full":
        assert evaluate_model(out, DATA).value == pytest.approx(values(ported)["ported"])


def test_the_sources_accuracy_is_one_number(scene: Scene, tmp_path: Path) -> None:
    expected = source_accuracy(scene)
    assert values(scene.port(scene.bare))["source"] == expected
    assert values(scene.port(scene.bare, probe=True))["source"] == expected
    assert evaluate_model(scene.tuned, DATA).value == expected
    assert evaluate_model(scene.tuned, DATA, base=scene.base).value == expected
    compared = hf_bico.compare(
        scene.tuned, to=scene.bare, base=scene.base, data=DATA, methods=["theseus"], n=[N], folder=tmp_path / "out"
    )
    [row] = [row for row in compared.rows() if row.method == "source"]
    assert row.average is not None
    assert row.average.mean == pytest.approx(expected)


def test_a_head_without_its_pooler_is_no_head(scene: Scene, tmp_path: Path) -> None:
    """peft did not save the pooler that was drawn for training; then the source's row says what was measured."""
    torch.manual_seed(0)
    start = BertForSequenceClassification.from_pretrained(scene.base, num_labels=3)
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False, task_type="SEQ_CLS")
    adapted = peft.get_peft_model(start, config)
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            tensor *= 0.02 if "lora_B" in name else 1.0
    adapted.save_pretrained(tmp_path / "lora")
    with pytest.raises(UnsuitableMethodError, match="reads a pooler, which neither it nor its base 'base' holds"):
        scene.port(scene.bare, tmp_path / "lora")
    ported = scene.port(scene.bare, tmp_path / "lora", probe=True)
    [entry] = [entry for entry in ported.record.evaluation if entry.model == "source"]
    assert entry.trained_on == N
    rows = [row[0] for row in result_rows(ported.record)]
    assert f"source, fine-tuned, with a head fitted to {N} samples" in rows


@pytest.mark.parametrize("method", ["bico", "bico-path", "theseus"])
def test_poolers_that_lie_unused_in_both_encoders(method: str, scene: Scene, tmp_path: Path) -> None:
    """As sentence-transformers saves a BERT: no gradient reaches them, and the source's head still reads its own."""
    pooled = write_encoder(tmp_path / "pooled", width=8, seed=5)
    tuned = scene.classifier(pooled, tmp_path / "tuned", ["classifier"])
    base = as_sentence_encoder(pooled, "mean", tmp_path / "base")
    target = as_sentence_encoder(scene.pooled, "mean", tmp_path / "target")
    ported = scene.port(target, tuned, base=base, method=method)
    expected = accuracy(logits(BertForSequenceClassification.from_pretrained(tuned), tuned))
    assert values(ported)["source"] == expected == evaluate_model(tuned, DATA).value
    compared = hf_bico.compare(
        tuned, to=target, base=base, data=DATA, methods=[method], n=[N], seeds=1, folder=tmp_path / "out"
    )
    [row] = [row for row in compared.rows() if row.method == "source"]
    assert row.average is not None
    assert row.average.mean == pytest.approx(expected)


def test_a_loaded_sentence_encoder_is_read_as_its_files_say(scene: Scene, tmp_path: Path) -> None:
    target = as_sentence_encoder(scene.pooled, "mean", tmp_path / "target")
    module = BertModel.from_pretrained(target)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    by_folder, by_module = scene.port(target, format="delta"), scene.port(module, format="delta")
    assert values(by_folder) == values(by_module)
    assert (logits(by_folder.model(), target) - logits(by_module.model(), target)).abs().max() < 1e-5
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_a_plan_refuses_the_head_that_a_port_refuses(scene: Scene, tmp_path: Path) -> None:
    """The hidden layer has 8 units, and the target's pooler 6; every command that names --probe has it."""
    narrow = write_encoder(tmp_path / "narrow", width=6, seed=1)
    rows = tmp_path / "data"
    rows.mkdir()
    for name, some in DATA.items():
        (rows / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    line = [str(scene.tuned), "--base", str(scene.base), "--to", str(narrow), "--data", str(rows)]

    def run(*words: str) -> Any:
        return CliRunner().invoke(main, [words[0], *line, *words[1:]])

    planned = run("plan")
    assert "refused     the head's hidden layer has 8 units" in planned.output
    assert "Not yet: the fine-tuned model's head cannot be carried." in planned.output
    assert planned.output.rstrip().endswith(" --probe")
    assert json.loads(run("plan", "--json").output)["refused"].startswith("the head's hidden layer has 8 units")
    out = ["-n", "24", "-o", str(tmp_path / "refused")]
    for command in (["port", "--dry-run"], ["port", *out], ["compare", *out]):
        refused = run(*command)
        assert refused.exit_code == 1
        assert "the head's hidden layer has 8 units" in refused.output
        assert "--probe" in refused.output
    ready = run("port", "--dry-run", "--probe")
    assert "Ready to port." in ready.output
    assert run("port", "--probe", "-n", "24", "--alpha", "1", "-q", "-o", str(tmp_path / "c")).exit_code in (0, 3)
    fitted = run("compare", "--probe", "--methods", "theseus", "-n", "24", "-o", str(tmp_path / "d"))
    assert fitted.exit_code == 0, fitted.output


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
@pytest.mark.parametrize("form", ["full", "adapter"])
def test_a_head_reads_what_a_sentence_encoder_pools(mode: str, form: str, scene: Scene, tmp_path: Path) -> None:
    """The target has a pooler that nobody trained: it is not looked at, and sentence-transformers reads the result."""
    base = as_sentence_encoder(scene.base, mode, tmp_path / "base")
    target = as_sentence_encoder(scene.pooled, mode, tmp_path / "target")
    ported = scene.port(target, base=base, format=form)
    assert values(ported)["source"] == source_accuracy(scene)
    out = ported.save(tmp_path / "out")
    if form == "adapter":
        config = json.loads((out / "adapter_config.json").read_text())
        (out / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(target)}))
    read = SentenceTransformer(str(out), device="cpu").encode(TEXTS[30:], convert_to_tensor=True)
    assert (read - logits(ported.model(), target)).abs().max() < 1e-4 * read.abs().max()
    assert accuracy(read) == pytest.approx(values(ported)["ported"])
    assert "from sentence_transformers import SentenceTransformer" in (out / "README.md").read_text()
    if form == "full":
        assert evaluate_model(out, DATA).value == pytest.approx(values(ported)["ported"])
