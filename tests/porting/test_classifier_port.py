"""Whole ports of classifiers of texts and images: against a slow reference, with their heads, as written results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import hf_bico
from hf_bico.alignment.objectives.classification import RIDGE_STRENGTHS, ClassHead, carried_head, ridge_head
from hf_bico.errors import ClassNamesError, DataNotFoundError, UnsuitableMethodError
from hf_bico.porting.evaluate import evaluate_model
from support import language_reference as reference
from support.adapters import Base, saved
from support.language_toys import fine_tuned, sentences, write_encoder, write_vit
from support.paper import PAPER
from support.rotated_language import InDouble
from support.worlds import encoders

LONG = "emil finds blue glass. dora sells old maps. cleo."
TEXTS = [*sentences(20), LONG, *sentences(19, seed=3)]
NAMES = ("bad", "fine", "good")
LABELS = [sum(map(ord, text)) % 3 for text in TEXTS]
SIZE = 16
CALIBRATED = 24


def text_rows() -> list[dict[str, Any]]:
    return [{"text": text, "label": NAMES[label]} for text, label in zip(TEXTS, LABELS, strict=True)]


def images() -> Tensor:
    rough = torch.randn(len(TEXTS), 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    return torch.nn.functional.avg_pool2d(rough, 3, stride=1, padding=1) * 2


def image_rows() -> list[dict[str, Any]]:
    return [{"image": image, "label": NAMES[label]} for image, label in zip(images(), LABELS, strict=True)]


@dataclass(frozen=True)
class Kind:
    """How a kind of encoder is written, where its blocks are, and its classes without and with a head."""

    write: Callable[..., Path]
    stack: str
    bare: Any
    headed: Any
    pooler: bool = False
    reads_images: bool = False

    def features(self, model: Any, sample: dict[str, Tensor]) -> Tensor:
        out = model(**sample)
        return out.pooler_output if self.pooler else out.last_hidden_state[:, 0]


def texts(kind: str, stack: str, **options: Any) -> Kind:
    spelling = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}[kind]
    classes = [getattr(transformers, spelling + end) for end in ("Model", "ForSequenceClassification")]
    return Kind(lambda folder, **shape: write_encoder(folder, kind, **shape), stack, *classes, **options)


def pictures(kind: str) -> Kind:
    spelling = {"vit": "ViT", "deit": "DeiT"}[kind]
    classes = [getattr(transformers, spelling + end) for end in ("Model", "ForImageClassification")]
    return Kind(lambda folder, **shape: write_vit(folder, kind, **shape), "layers", *classes, reads_images=True)


KINDS = {
    "bert": texts("bert", "encoder.layer", pooler=True),
    "roberta": texts("roberta", "encoder.layer"),
    "distilbert": texts("distilbert", "transformer.layer"),
    "vit": pictures("vit"),
    "deit": pictures("deit"),
}
TWO_LAYERS = {"roberta": "classifier.dense", "distilbert": "pre_classifier"}
"""Kinds whose heads have a hidden layer, and its name."""
OUT = {"roberta": "classifier.out_proj"}
"""Where the last layer of a head is, if not in "classifier"."""


class Case:
    """A bare base, a classifier that was fine-tuned from it, and a wider and deeper bare target."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.kind, self.folder = name, KINDS[name], folder
        self.base = self.kind.write(folder / "base", heads=2, width=8)
        self.target = self.kind.write(folder / "target", heads=3, width=24, blocks=3, seed=1)
        self.rows = image_rows() if self.kind.reads_images else text_rows()
        self.tuned = self.classifier(folder / "tuned")

    def classifier(self, folder: Path, names: tuple[str, ...] = NAMES) -> Path:
        """The base with changed layers and a head that was drawn, its classes in this order."""
        torch.manual_seed(3)
        numbers = dict(enumerate(names))
        labels = {"num_labels": 3, "id2label": numbers, "label2id": {name: n for n, name in numbers.items()}}
        start = self.kind.headed.from_pretrained(self.base, **labels)
        with torch.no_grad():
            for name, parameter in start.named_parameters():
                if "classifier" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        start.save_pretrained(folder / "start")
        for file in [*self.base.glob("tok*"), *self.base.glob("pre*")]:
            shutil.copy(file, folder / "start")
        end = fine_tuned(folder / "start", folder / "end", self.kind.headed)
        tuned = self.kind.headed.from_pretrained(end)
        out = tuned.get_submodule(OUT.get(self.name, "classifier"))
        out.bias.data -= self.logits(tuned).mean(0)  # so that all classes are predicted
        tuned.save_pretrained(end)
        return end

    def port(self, source: Path | None = None, **options: Any) -> hf_bico.Ported:
        usual = {"to": self.target, "base": self.base, "data": self.rows, "n": CALIBRATED, "dtype": "float64"}
        with InDouble():
            return hf_bico.port(source or self.tuned, **{**usual, **PAPER, "evaluate": False, **options})

    @cached_property
    def ported(self) -> hf_bico.Ported:
        return self.port()

    @property
    def changes(self) -> dict[str, Tensor]:
        return bare_names(self.ported)

    def sample(self, number: int) -> dict[str, Tensor]:
        """What the library's own preparation makes of one sample, without padding."""
        if self.kind.reads_images:
            return {"pixel_values": images()[number : number + 1]}
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.target)
        found = tokenizer(TEXTS[number], return_tensors="pt")
        return {name: value for name, value in found.items() if name != "token_type_ids"}

    def batch(self) -> dict[str, Tensor]:
        """All samples, padded by the library."""
        if self.kind.reads_images:
            return {"pixel_values": images()}
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.target)
        found = tokenizer(TEXTS, padding=True, return_tensors="pt")
        return {name: value for name, value in found.items() if name != "token_type_ids"}

    def logits(self, model: Any) -> Tensor:
        with torch.no_grad():
            return model.float().eval()(**self.batch()).logits


def bare_names(ported: hf_bico.Ported) -> dict[str, Tensor]:
    return dict(ported.task_vector.renamed(ported.target.layout.own_names))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            made[name] = Case(tmp_path_factory.mktemp("case"), name)
        return made[name]

    return make


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(found) == set(expected)
    return max(float((found[name] - wanted).norm() / wanted.norm()) for name, wanted in expected.items())


# --- against the reference


def slow(case: Case) -> dict[str, Tensor]:
    """The port by hooks on bare models, one sample at a time; each has a ridge head on its own features."""
    kind, drawn = case.kind, case.ported.record.data.indices
    outside = ["pooler.dense"] if kind.pooler else []
    seen, sizes, changes = [], [], {}
    for folder in (case.base, case.target):
        model = kind.bare.from_pretrained(folder).double().eval()
        samples = [as_double(case.sample(number)) for number in drawn]
        with torch.no_grad(), InDouble():
            features = torch.cat([kind.features(model, sample) for sample in samples])
        head = ridge_head(features, [LABELS[number] for number in drawn], 3)

        def loss(model: Any, number: int, samples: Any = samples, head: ClassHead = head) -> Tensor:
            wanted = torch.tensor([LABELS[drawn[number]]])
            found = kind.features(model, samples[number]) @ head.weight.T + head.bias
            return torch.nn.functional.cross_entropy(found, wanted)

        modules = reference.linear_modules(model, kind.stack, outside)
        seen.append(reference.observe(model, modules, loss, len(drawn)))
        sizes.append(len(model.get_submodule(kind.stack)))
        changes = changes or {name: -parameter.detach() for name, parameter in model.named_parameters()}
    tuned = kind.headed.from_pretrained(case.tuned).base_model.double()
    for name, parameter in tuned.named_parameters():
        if name in changes:
            changes[name] = changes[name] + parameter.detach()
    return reference.carried(changes, (seen[0], seen[1]), kind.stack, (sizes[0], sizes[1]))


def as_double(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in sample.items()}


@pytest.mark.parametrize("name", KINDS)
def test_a_port_is_that_of_the_slow_reference(name: str, case: Callable[[str], Case]) -> None:
    assert distance(case(name).changes, slow(case(name))) < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_names_all_linear_sites_of_the_blocks(name: str, case: Callable[[str], Case]) -> None:
    found = case(name)
    planned = hf_bico.plan(found.tuned, to=found.target, base=found.base, data=found.rows)
    model = found.kind.bare.from_pretrained(found.target)
    modules = reference.linear_modules(model, found.kind.stack, ["pooler.dense"] if found.kind.pooler else [])
    names = planned.lineage.target.layout.own_names
    carried = {names.get(pair.target.weight.tensor, pair.target.weight.tensor) for pair in planned.pairs}
    assert carried == {f"{module}.weight" for module in modules}


@pytest.mark.parametrize(("name", "size"), [("bert", 1), ("roberta", 5)])
def test_padding_and_batches_count_for_nothing(
    name: str, size: int, case: Callable[[str], Case], tmp_path: Path
) -> None:
    """Padded on the left, and less of it in smaller batches: one text is twice as long as the others."""
    found = case(name)
    folders = []
    for folder in (found.base, found.target):
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy)
        file = copy / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "padding_side": "left"}))
        folders.append(copy)
    again = found.port(base=folders[0], to=folders[1], batch_size=size)
    assert distance(bare_names(again), found.changes) < 1e-5


def test_a_fine_tuned_target_with_a_head_of_its_own(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Its classifier changed too, and nothing that is looked at reads it."""
    found = case("bert")
    model = found.kind.headed.from_pretrained(found.target, num_labels=3)
    headed, tuned = tmp_path / "headed", tmp_path / "headed-tuned"
    for folder in (headed, tuned):
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(found.target).save_pretrained(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    where: dict[str, Any] = {"base": found.base, "data": text_rows(), "n": 8, "class_names": NAMES, "device": "cpu"}
    looked = hf_bico.diagnose(found.tuned, to=headed, fine_tuned=tuned, methods=["bico"], **where)
    assert looked.models == ["target", "bico"]
    compared = hf_bico.compare(
        *(found.tuned,), to=headed, fine_tuned=tuned, methods=["naive"], folder=tmp_path / "compared", **where
    )
    assert "target fine-tuned" in {cell.method for cell in compared.cells}


def left_out_predictions(features: Tensor, outputs: Tensor, after: Callable[[Tensor], Tensor]) -> Tensor:
    """The classes of each sample by a ridge regression on the others, of the strength that leaves the least error."""
    x, y = features.double(), outputs.double()
    energy = (x - x.mean(0)).square().sum() / len(x)
    tried = []
    for strength in RIDGE_STRENGTHS:
        found = torch.empty_like(y)
        for number in range(len(x)):
            others = torch.arange(len(x)) != number
            a, b = (rows[others] - rows[others].mean(0) for rows in (x, y))
            weight = torch.linalg.solve(a.T @ a + strength * energy * torch.eye(x.shape[1]).double(), a.T @ b)
            found[number] = y[others].mean(0) + (x[number] - x[others].mean(0)) @ weight
        tried.append((float((found - y).square().sum()), found))
    return after(min(tried, key=lambda one: one[0])[1]).argmax(1)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_the_outlook_asks_heads_that_were_fitted_to_the_other_samples(name: str, case: Callable[[str], Case]) -> None:
    """How sure the fine-tuned source is of what they say of the changed target, and of the target as it is."""
    found = case(name)
    drawn = found.ported.record.data.indices
    batch = {key: value[drawn] for key, value in found.batch().items()}
    tuned = found.kind.headed.from_pretrained(found.tuned).eval()
    with torch.no_grad():
        sure = tuned(**batch).logits.double().softmax(1)
        own = found.kind.features(tuned.base_model, batch)
        first = tuned.pre_classifier if name in TWO_LAYERS else tuned.classifier
        outputs = first(own)
        models = [found.kind.bare.from_pretrained(found.target).eval(), found.ported.model().base_model]
        features = [found.kind.features(model, batch) for model in models]

    def logits(outputs: Tensor) -> Tensor:
        return tuned.classifier(outputs.relu().float()) if name in TWO_LAYERS else outputs

    before, after = (left_out_predictions(some, outputs, logits) for some in features)
    gains = sure.gather(1, after[:, None]) - sure.gather(1, before[:, None])
    outlook = found.ported.record.outlook
    assert outlook.unit == "accuracy"
    assert outlook.value == pytest.approx(float(gains.mean()), abs=1e-5)
    assert outlook.error == pytest.approx(float(gains.std()) / len(gains) ** 0.5, abs=1e-5)
    assert gains.any(), "otherwise nothing was asked"


# --- heads


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "full") for name in KINDS), *((name, "adapter") for name in ("bert", "roberta", "vit"))]
)
def test_what_is_written_predicts_at_once(name: str, form: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case(name)
    out = found.ported.save(tmp_path / "out", format=form)
    if form == "full":
        loaded = found.kind.headed.from_pretrained(out)
        assert loaded.config.id2label == dict(enumerate(NAMES))
    else:
        torch.manual_seed(0)
        loaded = peft.PeftModel.from_pretrained(found.kind.headed.from_pretrained(found.target, num_labels=3), out)
    wanted = found.logits(found.ported.model())
    assert (found.logits(loaded) - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert wanted.std(0).min() > 1e-2 * wanted.abs().max(), "otherwise the head reads nothing"
    measured = evaluate_model(out, found.rows, base=None if form == "full" else found.target, split="train")
    used = set(found.ported.record.data.indices)
    rest = [number for number in range(len(TEXTS)) if number not in used]
    right = [int(wanted[number].argmax()) == LABELS[number] for number in rest]
    assert measured.value == pytest.approx(sum(right) / len(rest))


@pytest.mark.parametrize("name", KINDS)
def test_the_base_itself_as_the_target_predicts_as_the_source(name: str, case: Callable[[str], Case]) -> None:
    """But for what is left behind or was not seen."""
    found = case(name)
    own = found.logits(found.kind.headed.from_pretrained(found.tuned))
    carried = found.logits(found.port(to=found.base).model())
    assert (carried - own).norm() < 0.2 * (own - own.mean(0)).norm()
    assert (carried.argmax(1) == own.argmax(1)).float().mean() >= 0.85


def test_a_trained_classifier_is_of_use_in_the_target_at_once() -> None:
    """Beside the most frequent class, and beside the untouched target with a head that was carried in the same way."""
    repos = encoders()
    ported = hf_bico.port(repos.source, to=repos.target, base=repos.base, data=repos.data)
    measured = {entry.model: entry.value for entry in ported.record.evaluation}
    rows = [json.loads(line) for line in (repos.data / "test.jsonl").read_text().splitlines()]
    usual = sum(row["label"] == "glad" for row in rows) / len(rows)
    print(f"most frequent class {usual:.3f}, {measured}")
    assert measured["source"] > 0.85
    assert measured["ported"] > max(usual, 1 - usual) + 0.1
    assert measured["ported"] > measured["target"] + 0.04
    assert min(site.rank_out for site in ported.record.sites if site.rank_out is not None) > 10


@pytest.mark.parametrize("activation", [None, "tanh", "relu"])
def test_a_carried_head_says_the_same_of_features_that_are_turned_stretched_and_moved(activation: str | None) -> None:
    """For a wider model too, and as it says of samples that it was not carried by."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    head = ClassHead(drawn(3, 8), drawn(3))
    if activation is not None:
        head = ClassHead(drawn(3, 5), drawn(3), (drawn(5, 8), drawn(5)), activation)
    own, turn, moved = drawn(30, 8), torch.linalg.qr(drawn(12, 12))[0][:8], drawn(12)
    other = 0.2 * own @ turn + moved
    wanted = head.logits(own)
    found = carried_head(head, own[:20], other[:20]).logits(other)
    assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()
    again = torch.linalg.qr(drawn(12, 12))[0]
    assert torch.allclose(carried_head(head, own[:20], other[:20] @ again).logits(other @ again), found)


def test_a_carried_head_of_features_that_are_all_the_same_says_the_mean() -> None:
    head = ClassHead(torch.eye(2), torch.zeros(2))
    own = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    assert torch.allclose(carried_head(head, own, torch.ones(2, 4)).logits(torch.ones(1, 4)), own.mean(0))


def test_the_loss_of_classes_that_separate_keeps_a_gradient_for_all_samples() -> None:
    labels = [number % 2 for number in range(40)]
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) * 0.01
    features[:, 0] += 2.0 * torch.tensor(labels) - 1
    sure = ridge_head(features, labels, 2).logits(features).softmax(1).gather(1, torch.tensor(labels)[:, None])
    assert sure.min() > 0.5
    assert sure.max() < 0.9999


@pytest.mark.parametrize("name", ["bert", "distilbert", "vit"])
def test_a_fitted_head_is_a_logistic_regression(name: str, case: Callable[[str], Case]) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    found = case(name)
    ported = found.port(probe=True)
    assert ported.record.objective.head == "fitted"
    assert case(name).ported.record.objective.head == "carried"
    model = ported.model()
    with torch.no_grad():
        features = found.kind.features(model.base_model, found.batch()).double().numpy()
    drawn = ported.record.data.indices
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    probe.fit(features[drawn], [LABELS[number] for number in drawn])
    theirs = torch.from_numpy(probe.predict_proba(features))
    assert (found.logits(model).double().softmax(1) - theirs).abs().max() < 1e-2


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_classes_are_known_by_their_names(name: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    """The source's numbers are others than the data set's, which are those of the sorted names."""
    found = case(name)
    turned = found.classifier(tmp_path / "turned", ("good", "bad", "fine"))
    one = found.port(turned)
    wanted, other = found.logits(one.model()), found.logits(found.ported.model())
    assert one.model().config.id2label == dict(enumerate(NAMES))
    assert (wanted - other[:, [1, 2, 0]]).abs().max() < 1e-4 * other.abs().max()


def test_classes_of_a_loaded_module_are_known_by_their_names(case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case("vit")
    turned = found.classifier(tmp_path / "turned", ("good", "bad", "fine"))
    one = found.port(turned)
    loaded = [
        found.kind.headed.from_pretrained(turned),
        *map(found.kind.bare.from_pretrained, (found.base, found.target)),
    ]
    other = found.port(loaded[0], base=loaded[1].double(), to=loaded[2].double())
    wanted, head = (ported.form.head.tensors for ported in (one, other))
    assert all((wanted[name] - head[name]).abs().max() < 1e-5 * wanted[name].abs().max() for name in wanted)


def test_eval_says_that_only_their_order_pairs_classes_and_what_was_not_measured(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    found = case("vit")
    unnamed = found.classifier(tmp_path / "unnamed", ("LABEL_0", "LABEL_1", "LABEL_2"))
    assert evaluate_model(unnamed, [{**row, "label": NAMES.index(row["label"])} for row in found.rows]).notices == ()
    rows = [row for row in found.rows if row["label"] == "good"]
    assert evaluate_model(unnamed, {"train": found.rows, "test": rows}).notices == (
        f"The {len(rows)} samples that were measured on are of 1 of 3 classes: the results say nothing about the "
        "others.",
        "The fine-tuned model does not name its classes, and the data set's were paired with them in sorted order: "
        "'bad' is its class 0, 'fine' is its class 1, 'good' is its class 2. --class-names gives another order.",
    )


@pytest.mark.parametrize("name", TWO_LAYERS)
def test_a_hidden_layer_that_the_target_has_no_room_for_is_refused(
    name: str, case: Callable[[str], Case], tmp_path: Path
) -> None:
    found = case(name)
    narrow = found.kind.write(tmp_path / "narrow", width=6, heads=2, seed=1)
    with pytest.raises(
        UnsuitableMethodError, match="has 8 units, and one of the target's class has room for 6"
    ) as told:
        found.port(to=narrow)
    assert "probe=True" in told.value.remedy
    assert found.port(to=narrow, probe=True).record.objective.head == "fitted"


def test_a_fitted_head_that_has_no_room_asks_for_a_wider_target(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Through a relu, a linear head takes two units a class."""
    found = case("distilbert")
    narrow = found.kind.write(tmp_path / "narrow", width=4, heads=2, seed=1)
    with pytest.raises(UnsuitableMethodError, match="has 6 units, .* room for 4") as told:
        found.port(to=narrow, probe=True)
    assert told.value.remedy == "choose a wider target"


def test_a_classifiers_lora_keeps_its_rank_and_its_head(case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case("bert")
    config = peft.LoraConfig(
        r=2, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
    )
    torch.manual_seed(5)
    base = Base(found.base, lambda folder: found.kind.headed.from_pretrained(folder, num_labels=3))
    ported = found.port(saved(base, config, tmp_path / "lora"))
    out = ported.save(tmp_path / "out")
    written = json.loads((out / "adapter_config.json").read_text())
    assert (written["r"], written["modules_to_save"]) == (2, ["classifier"])
    loaded = peft.PeftModel.from_pretrained(found.kind.headed.from_pretrained(found.target, num_labels=3), out)
    wanted = found.logits(ported.model())
    assert (found.logits(loaded) - wanted).abs().max() < 1e-4 * wanted.abs().max()


# --- data without labels


def test_without_labels_the_source_names_them_and_nothing_is_measured(case: Callable[[str], Case]) -> None:
    found = case("bert")
    ported = found.port(data=[{"text": text} for text in TEXTS], evaluate=True)
    assert ported.record.data.labels == "pseudo"
    assert ported.record.evaluation == []
    tuned = found.logits(found.kind.headed.from_pretrained(found.tuned))
    said = {"data": [{"text": text, "label": NAMES[int(row.argmax())]} for text, row in zip(TEXTS, tuned, strict=True)]}
    assert distance(bare_names(ported), bare_names(found.port(**said))) < 1e-5
    with pytest.raises(DataNotFoundError, match="has no labels"):
        evaluate_model(found.tuned, [{"text": text} for text in TEXTS])


def test_classes_that_nobody_names_are_asked_for(case: Callable[[str], Case], tmp_path: Path) -> None:
    found = case("vit")
    nameless = found.classifier(tmp_path / "nameless", ("LABEL_0", "LABEL_1", "LABEL_2"))
    with pytest.raises(ClassNamesError, match="neither the data nor the fine-tuned model names the classes"):
        found.port(nameless, data=[{"image": row["image"]} for row in found.rows])


def test_a_head_of_the_targets_own_gives_way_in_whatever_file_it_is(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    """A ViT that tells five other classes apart, in shards: the head that is written must be found, and no other."""
    found = case("vit")
    whole = found.kind.write(tmp_path / "whole", heads=3, width=24, blocks=3, seed=1, labels=5)
    target = tmp_path / "target"
    found.kind.headed.from_pretrained(whole).save_pretrained(target, max_shard_size="20KB")
    for file in whole.glob("pre*"):
        shutil.copy(file, target)
    shards = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert shards["classifier.weight"] != sorted(shards.values())[-1], "the last shard is another one"
    out = found.port(to=target).save(tmp_path / "out")
    names = [name for file in out.glob("*.safetensors") for name in load_file(file)]
    assert names.count("classifier.weight") == names.count("classifier.bias") == 1
    model, told = found.kind.headed.from_pretrained(out, output_loading_info=True)
    assert not told["mismatched_keys"]
    assert tuple(model.classifier.weight.shape) == (3, 24)
    assert model.config.id2label == dict(enumerate(NAMES))
