"""Foretelling a port from its calibration pass: gradients that are autograd's, and a slope that is the loss's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from torch import Tensor, nn
from torch.nn import functional

import hf_bico
from hf_bico.alignment.calibration_pass import collect
from hf_bico.alignment.memory import MemoryPlan
from hf_bico.alignment.methods import make_method
from hf_bico.alignment.methods.base import SiteDelta, SiteLossChange
from hf_bico.alignment.objectives.base import LossBatch
from hf_bico.alignment.objectives.clip import zero_shot_head
from hf_bico.alignment.statistics import Kind, LossGradient, Statistics, TaskLossTotals
from hf_bico.alignment.transport import descent_along
from hf_bico.cli.main import main
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import LiveModel
from hf_bico.models.hooks import Losses
from hf_bico.models.layout import Site, SitePair, Slot, descent_sites
from hf_bico.models.low_rank import Factors
from hf_bico.models.model import Model
from hf_bico.porting import transfer
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.transfer import DOUBTFUL, forecast
from hf_bico.reports.record import ForecastRecord, read_record
from hf_bico.reports.results import forecast_sentence
from hf_bico.runtime.output import RECORD_FILE
from hf_bico.settings import DEFAULT_TEMPLATES, METHODS
from support import reference
from support.adapter_ports import forbid_dense, ported_as_dense, write_lora
from support.adapter_ports import port as port_scene
from support.calibrations import PORTS, make_calibration
from support.language_toys import fine_tuned, sentences, write_decoder
from support.rotated_language import InDouble
from support.scenes import SOURCE, Scene, make_scene
from support.toys import CLASS_NAMES, Toy, changed, random_rows, random_state, write_open_clip

CPU = torch.device("cpu")


# The gradients of the target's weights


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Calibration]:
    """The round of a pair of models, made once."""
    made: dict[str, Calibration] = {}

    def of(name: str) -> Calibration:
        if name not in made:
            made[name] = make_calibration(PORTS[name](tmp_path_factory.mktemp(name)))
        return made[name]

    return of


def by_autograd(calibration: Calibration) -> dict[str, tuple[Tensor, Tensor | None]]:
    """The gradients of the summed loss by weight and bias of every site of the target, from one plain pass."""
    model, layout = calibration.models.target, calibration.models.target.layout
    parameters = dict(model.module.named_parameters())
    asked = {name: parameter.requires_grad for name, parameter in parameters.items()}
    model.module.requires_grad_(True)
    try:
        samples, labels = next(iter(calibration.samples.batches(len(calibration.samples))))
        loss = calibration.heads.target.losses(model, LossBatch(model.ready(samples), labels)).task
        assert loss is not None
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(asked[name])
    gradients = dict(zip(parameters, found, strict=True))

    def of(slot: Slot) -> Tensor:
        gradient = gradients[layout.own_names.get(slot.tensor, slot.tensor)]
        assert gradient is not None
        return slot.view(gradient)  # type: ignore[no-any-return]

    sites = [pair.target for pair in calibration.models.pairs]
    return {site.name: (of(site.weight), None if site.bias is None else of(site.bias)) for site in sites}


def collected(
    calibration: Calibration,
    kinds: Collection[Kind],
    at_once: bool = False,
    descents_of: Collection[str] | None = None,
    **sides: bool,
) -> dict[str, LossGradient]:
    """Three samples at a time, so that batches of texts are padded and the last one is smaller."""
    source, target = calibration._sides(**sides)
    batches = calibration._passes(3, set(kinds), 0)
    return collect(
        calibration.models.pairs, source, target, batches, kinds, at_once=at_once, descents_of=descents_of
    ).descents


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


PAIRED = {Kind.INPUTS, Kind.GRADIENTS, Kind.DESCENT}
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"kinds": {Kind.DESCENT}},
    "with the others": {"kinds": PAIRED},
    "checkpointing": {"kinds": PAIRED, "checkpointing": True},
    "mlps again": {"kinds": PAIRED, "lean": True},
    "at once": {"kinds": PAIRED, "at_once": True},
    "at once, checkpointing": {"kinds": PAIRED, "at_once": True, "checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PORTS)
def test_descent_is_the_gradient_that_autograd_gives(name: str, way: str, rounds: Callable[[str], Calibration]) -> None:
    calibration = rounds(name)
    expected, found = by_autograd(calibration), collected(calibration, **WAYS[way])
    assert found.keys() == expected.keys()
    weights = max(float(weight.abs().max()) for weight, _ in expected.values())
    for site, (weight, bias) in expected.items():
        assert weight.abs().max() > 0, site
        assert largest_error(found[site].weight, weight) < 1e-5, site
        if bias is not None:  # a softmax does not feel the keys' bias, whose gradient is rounding
            assert (found[site].bias.double() - bias).abs().max() < 1e-6 * weights, site


def test_descent_is_what_the_signed_gradients_are_summed_to(rounds: Callable[[str], Calibration]) -> None:
    calibration = rounds("open_clip")
    source, target = calibration._sides()
    kinds = {Kind.TARGET_GRADIENTS, Kind.DESCENT, Kind.INPUTS}
    statistics = collect(calibration.models.pairs, source, target, calibration._passes(3, kinds, 0), kinds)
    assert statistics.kinds == kinds
    for name, descent in statistics.descents.items():
        assert largest_error(descent.weight, statistics.target_gradients[name].weight) < 1e-6, name


def test_descent_is_added_up_beside_the_losses_with_every_label(rounds: Callable[[str], Calibration]) -> None:
    calibration = rounds("open_clip")
    kinds = {Kind.EXPECTED_GRADIENTS, Kind.WEIGHTED_INPUTS, Kind.DESCENT}
    expected, found = by_autograd(calibration), collected(calibration, kinds)
    assert all(largest_error(found[site].weight, weight) < 1e-5 for site, (weight, _) in expected.items())


def test_only_the_sites_that_are_felt_are_added_up(rounds: Callable[[str], Calibration]) -> None:
    calibration = rounds("open_clip")
    names = {"proj", "blocks.1.attn.k"}
    expected, found = by_autograd(calibration), collected(calibration, PAIRED, descents_of=names)
    assert found.keys() == names
    assert all(largest_error(found[site].weight, expected[site][0]) < 1e-5 for site in names)


def a_pair(role: str, name: str) -> SitePair:
    site = Site(name, role, 0, f"{name}.in", (2, 2), Slot(name))
    return SitePair(site, site)


def test_mlps_are_felt_only_where_nothing_else_is() -> None:
    mlps = [a_pair("mlp.up", "up"), a_pair("mlp.gate", "gate"), a_pair("mlp.down", "down")]
    assert descent_sites([*mlps, a_pair("attn.q", "q"), a_pair("proj", "proj")]) == {"q", "proj"}
    assert descent_sites(mlps) == {"up", "gate", "down"}
    assert descent_sites([]) == set()


def test_the_target_is_asked_how_it_does_in_the_same_pass(rounds: Callable[[str], Calibration]) -> None:
    calibration = rounds("decoder")
    source, target = calibration._sides()
    task = collect(calibration.models.pairs, source, target, calibration._passes(3, PAIRED, 0), PAIRED).task
    assert task is not None
    texts = sentences(len(calibration.samples))
    assert task.answers == sum(len(text) - 1 for text in texts), "each token but a text's first is foretold"
    assert 0 < task.wrong <= task.answers
    nothing = collect(calibration.models.pairs, source, target, calibration._passes(3, {Kind.INPUTS}, 0), {Kind.INPUTS})
    assert nothing.task is None
    assert nothing.descents == {}


# The slope of the loss along what is carried


NARROW, WIDE = Toy(), Toy(width=24, heads=3)
SAMPLES = 12


class Case:
    """A pair of models with a task, and the mean loss of the target on it by plain means."""

    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, folder: Path, source: Path, base: Path, target: Path, rows: list[dict[str, Any]]) -> None:
        self.folder, self.source, self.base, self.target, self.rows = folder, source, base, target, rows
        self.live: LiveModel = Model.open(target, "the target").load(CPU, torch.float64)

    def port(self, source: Path | None = None, **options: Any) -> hf_bico.Ported:
        asked: dict[str, Any] = {"to": self.target, "base": self.base, "data": self.rows, "n": len(self.rows)}
        asked |= {"dtype": "float64", "augment": 0, "evaluate": False, **self.options, **options}
        return hf_bico.port(source or self.source, **asked)

    def foresight(self, source: Path | None = None, **options: Any) -> ForecastRecord:
        found = self.port(source, **options).record.foresight
        assert found is not None
        return found

    def answers(self) -> tuple[Tensor, Tensor]:
        """Logits and labels of all answers."""
        raise NotImplementedError

    def loss(self) -> float:
        logits, labels = self.answers()
        return float(functional.cross_entropy(logits, labels))

    def slope(self, change: Deltas, step: float = 1e-4) -> float:
        """By a central difference."""
        ends = []
        for share in (-step, step):
            with (share * change).applied_to(self.live.module):
                ends.append(self.loss())
        return (ends[1] - ends[0]) / (2 * step)


class Images(Case):
    options = MappingProxyType({"class_names": CLASS_NAMES})

    def answers(self) -> tuple[Tensor, Tensor]:
        head = zero_shot_head(self.live, CLASS_NAMES, DEFAULT_TEMPLATES)
        state = {name: tensor.detach() for name, tensor in self.live.module.state_dict().items()}
        pixels = torch.stack([row["image"] for row in self.rows]).double()
        features, _, _ = reference.vision_transformer(state, WIDE, pixels, WIDE.blocks)
        labels = torch.tensor([row["label"] for row in self.rows])
        return reference.logits_of(state, features.detach(), head.classes), labels


class Texts(Case):
    def answers(self) -> tuple[Tensor, Tensor]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.target)
        logits, labels = [], []
        with torch.no_grad(), InDouble():
            for row in self.rows:
                ids = tokenizer(row["text"], return_tensors="pt").input_ids
                logits.append(self.live.module(input_ids=ids).logits[0, :-1])
                labels.append(ids[0, 1:])
        return torch.cat(logits), torch.cat(labels)

    def port(self, source: Path | None = None, **options: Any) -> hf_bico.Ported:
        with InDouble():
            return super().port(source, **options)


def images(folder: Path) -> Case:
    base, target = random_state(NARROW, 0, torch.float64), random_state(WIDE, 1, torch.float64)
    folders = [
        write_open_clip(folder / name, toy, state)
        for name, toy, state in (
            ("tuned", NARROW, changed(base, 2, 0.1)),
            ("base", NARROW, base),
            ("target", WIDE, target),
        )
    ]
    return Images(folder, folders[0], folders[1], folders[2], random_rows(SAMPLES, NARROW.image_size))


def texts(folder: Path) -> Case:
    base, target = write_decoder(folder / "base"), write_decoder(folder / "target", width=24, blocks=3, seed=1)
    tuned = fine_tuned(base, folder / "tuned", transformers.AutoModelForCausalLM)
    return Texts(folder, tuned, base, target, [{"text": text} for text in sentences(SAMPLES)])


@pytest.fixture(scope="module", params=[images, texts], ids=["images", "texts"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    made: Case = request.param(tmp_path_factory.mktemp("case"))
    return made


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One of images."""
    return images(tmp_path_factory.mktemp("images"))


def of_mlps(ported: hf_bico.Ported) -> set[str]:
    return {name for name in ported.task_vector if ".mlp." in name}


def test_first_order_is_the_slope_of_the_mean_loss_along_what_is_carried_outside_of_mlps(case: Case) -> None:
    ported = case.port()
    found = ported.record.foresight
    assert found is not None
    mlps = of_mlps(ported)
    assert mlps
    outside = ported.task_vector.without(mlps)
    assert found.first_order == pytest.approx(case.slope(outside), rel=1e-3)
    assert found.first_order != pytest.approx(case.slope(ported.task_vector), rel=1e-2), "MLPs would add to it"


STEP = 0.01


@pytest.fixture(scope="module")
def downhill(tmp_path_factory: pytest.TempPathFactory) -> tuple[ForecastRecord, float]:
    """What is foretold of a step down a model's own gradient that is carried to itself, and how far that goes down."""
    folder = tmp_path_factory.mktemp("downhill")
    state = random_state(NARROW, 0, torch.float64)
    base = write_open_clip(folder / "base", NARROW, state)
    rows = random_rows(SAMPLES, NARROW.image_size)
    pixels, labels = torch.stack([row["image"] for row in rows]).double(), torch.tensor([row["label"] for row in rows])
    live = Model.open(base, "the base").load(CPU, torch.float64)
    classes = zero_shot_head(live, CLASS_NAMES, DEFAULT_TEMPLATES).classes
    gradients = reference.parameter_gradients(state, NARROW, pixels, labels, classes)
    tuned = {name: tensor.clone() for name, tensor in state.items()}
    fall = 0.0
    for name, parts in reference.site_weights(tuned, NARROW.blocks).items():
        for part, gradient in zip(parts, gradients[name], strict=True):
            if part is not None and gradient is not None:
                part -= STEP * gradient
                fall += 0.0 if ".mlp." in name else STEP * float(gradient.square().sum())
    source = write_open_clip(folder / "tuned", NARROW, tuned)
    where: dict[str, Any] = {"to": base, "base": base, "data": rows, "n": SAMPLES, "class_names": CLASS_NAMES}
    found = hf_bico.port(source, **where, dtype="float64", evaluate=False).record.foresight
    assert found is not None
    return found, fall


def test_a_step_down_the_own_gradient_goes_down_by_its_energy(downhill: tuple[ForecastRecord, float]) -> None:
    """All of it was seen: gradients are sums of what calibration sees."""
    found, fall = downhill
    assert found.first_order == pytest.approx(-fall, rel=1e-3)
    assert found.unseen == pytest.approx(0.0, abs=1e-5)
    assert found.outlook == pytest.approx(fall, rel=1e-3)


def test_a_step_down_the_own_gradient_agrees_with_it(downhill: tuple[ForecastRecord, float]) -> None:
    assert downhill[0].agreement == pytest.approx(1.0, abs=1e-3)


def test_loss_and_headroom_are_those_of_the_untouched_target(case: Case) -> None:
    found = case.foresight()
    logits, labels = case.answers()
    wrong = int((logits.argmax(-1) != labels).sum())
    assert found.loss == pytest.approx(case.loss(), rel=1e-6)
    assert found.headroom == pytest.approx(wrong / len(labels), abs=1e-12)
    assert wrong > 0


def test_batches_do_not_show(case: Case) -> None:
    alone, some, all_of_them = (case.foresight(batch_size=size) for size in (1, 5, SAMPLES))
    for one in (alone, some):
        assert one.first_order == pytest.approx(all_of_them.first_order, rel=1e-5)
        assert one.agreement == pytest.approx(all_of_them.agreement, rel=1e-5)
        assert one.outlook == pytest.approx(all_of_them.outlook, rel=1e-5)
        assert one.loss == pytest.approx(all_of_them.loss, rel=1e-9)
        assert one.headroom == all_of_them.headroom


def test_a_change_of_mlps_alone_is_looked_at_in_the_mlps(seen: Case, tmp_path: Path) -> None:
    base = random_state(NARROW, 0, torch.float64)
    moved = changed(base, 2, 0.1, only="visual.transformer.resblocks.")
    source = write_open_clip(tmp_path / "mlps", NARROW, {n: moved[n] if ".mlp." in n else base[n] for n in base})
    ported = seen.port(source)
    found = ported.record.foresight
    assert found is not None
    assert set(ported.task_vector) == of_mlps(ported)
    assert found.first_order == pytest.approx(seen.slope(ported.task_vector), rel=1e-3)


def test_alpha_scales_the_slope_and_the_agreement_keeps_its_size(seen: Case) -> None:
    once, back, twice = (seen.foresight(alpha=alpha) for alpha in (1.0, -1.0, 2.0))
    assert back.first_order == pytest.approx(-once.first_order, rel=1e-9)
    assert back.agreement == pytest.approx(-once.agreement, rel=1e-9)
    assert twice.first_order == pytest.approx(2 * once.first_order, rel=1e-9)
    assert twice.agreement == pytest.approx(once.agreement, rel=1e-9)
    assert back.loss == once.loss


def test_altered_copies_are_samples_too(seen: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = []

    def noted(sites: Iterable[SiteLossChange], task: TaskLossTotals, *others: Any) -> ForecastRecord:
        tasks.append(task)
        return forecast(sites, task, *others)

    monkeypatch.setattr(transfer, "forecast", noted)
    found, plain = seen.foresight(augment=2), seen.foresight()
    assert [task.answers for task in tasks] == [3 * SAMPLES, SAMPLES]
    assert found.loss != plain.loss
    assert found.loss == pytest.approx(plain.loss, rel=0.5), "a mean, and no sum over copies"


def test_all_of_a_path_is_seen_in_the_same_batches(seen: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is foretold at its start takes memory, so that fewer samples may fit; one number repeats it."""
    sizes, fit, steps = [], ModelPair.memory_plan, 3

    def fewer_with_descents(self: ModelPair, kinds: Collection[Kind], *others: Any) -> MemoryPlan:
        return replace(fit(self, kinds, *others), batch_size=3 if Kind.DESCENT in kinds else 4)

    def noted(self: Calibration, size: int, *others: Any) -> Any:
        sizes.append(size)
        return passes(self, size, *others)

    passes = Calibration._passes
    monkeypatch.setattr(ModelPair, "memory_plan", fewer_with_descents)
    monkeypatch.setattr(Calibration, "_passes", noted)
    ported = seen.port(method="bico-path", path_steps=steps)
    assert sizes == [3] * steps
    assert ported.record.run.batch_size == 3


def test_a_path_is_foretold_from_where_it_starts(seen: Case) -> None:
    """Its first step is that of bico-fisher, of a part of the change."""
    path, fisher = seen.foresight(method="bico-path", path_steps=3), seen.foresight(method="bico-fisher")
    assert path.first_order == pytest.approx(fisher.first_order, rel=1e-6)
    assert path.agreement == pytest.approx(fisher.agreement, rel=1e-6)
    assert (path.loss, path.headroom) == (fisher.loss, fisher.headroom)


# A low-rank change


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
def test_the_foresight_of_a_lora_is_that_of_its_product(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(tmp_path / "scene", (library, library))
    source = write_lora(scene, library, tmp_path / "lora")
    dense = ported_as_dense(monkeypatch, scene, source, evaluate=False).record.foresight
    forbid_dense(monkeypatch)
    factored = port_scene(scene, source, evaluate=False).record.foresight
    assert dense is not None
    assert factored is not None
    assert factored.first_order != 0
    for name, value in vars(dense).items():
        assert getattr(factored, name) == pytest.approx(value, rel=1e-5), name


def settled(weight: Tensor, bias: Tensor) -> LossGradient:
    """As it is kept while maps are solved."""
    statistics = Statistics(descents={"site": LossGradient(weight, bias)})
    statistics.finalize_descents()
    return statistics.descents["site"]


def test_inner_product_with_factors_is_that_with_their_product() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 2), (2, 4), (5, 4), (5,))
    left, right, weight, bias = (torch.randint(-9, 10, size, generator=generator).float() for size in shapes)
    descent = settled(weight, bias)
    whole = descent_along(SiteDelta(left @ right, bias), descent)
    thin = descent_along(SiteDelta(Factors(left, right), bias), descent)
    assert whole.change == pytest.approx(float((weight * (left @ right)).sum() + bias.square().sum()), rel=1e-6)
    assert thin.change == pytest.approx(whole.change, rel=1e-6)
    assert thin.delta == pytest.approx(whole.delta, rel=1e-6)
    assert (
        whole.gradient == thin.gradient == pytest.approx(float(weight.square().sum() + bias.square().sum()), rel=1e-6)
    )
    nothing = descent_along(SiteDelta(), descent)
    assert (nothing.change, nothing.delta) == (0.0, 0.0)


# Which methods are foretold


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


TRAINING = {"fewshot": {"learning_rate": 0.01}, "finetune": {"train_steps": 1, "warmup": 0}}
UNTOLD = ("naive", "theseus", "input-only", "fewshot", "finetune")


@pytest.mark.parametrize("method", UNTOLD)
def test_what_looks_at_no_gradient_of_the_target_is_not_foretold(method: str, scene: Scene) -> None:
    options: dict[str, Any] = {"method": method, **TRAINING.get(method, {})}
    record = port_scene(scene, scene.tuned, evaluate=False, **options).record
    assert record.foresight is None
    assert "foresight" not in json.loads(record.to_json())


@pytest.mark.parametrize("method", sorted(set(METHODS) - {*UNTOLD, "transfusion"}))
def test_what_looks_at_gradients_is_foretold(method: str, scene: Scene) -> None:
    target = write_twin(scene) if method == "gradfix" else scene.target  # which needs two models of one shape
    twin = replace(scene, target=target)
    found = port_scene(twin, scene.tuned, evaluate=False, method=method, augment=0).record.foresight
    assert found is not None
    assert found.first_order != 0
    assert found.headroom is not None
    assert abs(found.agreement) < 1


def test_one_class_cannot_tell_where_classes_are_the_answers(tmp_path: Path) -> None:
    case = images(tmp_path)
    case.rows = [{**row, "label": 1} for row in case.rows]
    assert case.port().record.foresight is None


def test_one_class_of_texts_that_are_only_read_is_foretold(tmp_path: Path) -> None:
    case = texts(tmp_path)
    case.rows = [{**row, "label": 1} for row in case.rows]
    assert case.port(class_names=("one", "two")).record.foresight is not None


def write_twin(scene: Scene) -> Path:
    return write_open_clip(scene.folder / "twin", SOURCE, random_state(SOURCE, 3))


def test_a_control_does_not_show_in_what_is_foretold(scene: Scene) -> None:
    plain, controlled = (port_scene(scene, scene.tuned, control=control).record for control in (False, True))
    assert "control" in {entry.model for entry in controlled.evaluation}
    assert controlled.foresight == plain.foresight is not None


def test_an_objective_of_the_callers_own_has_no_answers(scene: Scene) -> None:
    def total(module: nn.Module, batch: hf_bico.porting.port.Batch) -> Tensor:
        return module.encode_image(batch.pixels).square().sum()  # type: ignore[operator, no-any-return]

    found = port_scene(scene, scene.tuned, objective=total, evaluate=False).record.foresight
    assert found is not None
    assert found.headroom is None
    assert found.loss > 0
    assert "answers wrong" not in forecast_sentence(found)


def test_a_loss_that_stands_in_for_another_is_not_told(scene: Scene) -> None:
    found = port_scene(scene, scene.tuned, objective="contrastive", evaluate=False).record.foresight
    assert found is not None
    assert found.loss is None
    assert found.headroom is None
    assert "calibration loss moves by" in forecast_sentence(found)


def test_a_round_foretells_only_where_it_is_told_to(rounds: Callable[[str], Calibration]) -> None:
    calibration = rounds("open_clip")
    method = make_method("bico", calibration.settings)
    assert all(one.descent is None for one in calibration.carry(method).values())
    assert calibration.task is None
    again = Calibration(
        calibration.models,
        calibration._drawn,
        calibration.heads,
        calibration.watch,
        calibration.settings,
        keeps=False,
        forecasts=True,
    )
    found = again.carry(method)
    assert {name for name, one in found.items() if one.descent is not None} == descent_sites(calibration.models.pairs)
    assert again.task is not None


# What is made of the numbers


def task(loss: float = 20.0, answers: int = 10, wrong: int = 4) -> TaskLossTotals:
    found = TaskLossTotals.zeros(CPU)
    found.add(Losses(torch.tensor(loss), answers=torch.tensor(answers), wrong=torch.tensor(wrong)))
    return found


def outlook(
    change: float, unseen: float | None = 0.0, alpha: float = 1.0, of: TaskLossTotals | None = None
) -> ForecastRecord:
    """Of two sites that change the summed loss by so much together."""
    sites = [SiteLossChange(change / 2, 4.0, 9.0), SiteLossChange(change / 2, 12.0, 0.0)]
    return forecast(sites, of or task(), 10, unseen, alpha)


def test_the_outlook_is_the_fall_of_the_mean_loss() -> None:
    found = outlook(-3.0)
    assert found.first_order == pytest.approx(-0.3)
    assert found.outlook == pytest.approx(0.3)
    assert (found.loss, found.headroom) == (2.0, 0.4)


def test_the_outlook_is_never_above_what_the_target_gets_wrong() -> None:
    assert outlook(-30.0).outlook == pytest.approx(0.4)
    assert outlook(-30.0).first_order == pytest.approx(-3.0), "the slope is told as it is"
    assert outlook(-30.0, of=task(wrong=0)).outlook == 0.0


def test_the_outlook_of_a_loss_that_rises_is_negative_whatever_is_unseen() -> None:
    assert outlook(3.0).outlook == pytest.approx(-0.3)
    assert outlook(3.0, unseen=0.5).outlook == pytest.approx(-0.3)
    assert outlook(30.0).outlook == pytest.approx(-3.0), "what is wrong bounds a gain alone"


def test_the_outlook_shrinks_with_what_is_unseen() -> None:
    assert outlook(-3.0, unseen=0.25).outlook == pytest.approx(0.3 * 0.75)
    assert outlook(-30.0, unseen=0.25).outlook == pytest.approx(0.4 * 0.75)
    assert outlook(-3.0, unseen=None).outlook == pytest.approx(0.3)


def test_alpha_turns_and_scales_the_change() -> None:
    assert outlook(-3.0, alpha=-1.0).first_order == pytest.approx(0.3)
    assert outlook(-3.0, alpha=-1.0).outlook == pytest.approx(-0.3)
    assert outlook(-1.0, alpha=2.0).outlook == pytest.approx(0.2)
    assert outlook(-3.0, alpha=0.0).outlook == 0.0


def test_agreement_is_the_cosine_of_the_change_and_the_way_down() -> None:
    assert outlook(-3.0).agreement == pytest.approx(3.0 / (16.0 * 9.0) ** 0.5)
    assert outlook(-3.0, alpha=-2.0).agreement == pytest.approx(-3.0 / 12.0)
    gradient = torch.tensor([[3.0, -4.0]])
    down = descent_along(SiteDelta(-2 * gradient), settled(gradient, torch.zeros(1)))
    assert forecast([down], task(), 10, None, 1.0).agreement == pytest.approx(1.0)
    assert forecast([SiteLossChange(0.0, 0.0, 0.0)], task(), 10, None, 1.0).agreement == 0.0


def test_where_no_answers_are_told_losses_are_those_of_samples() -> None:
    untold = TaskLossTotals.zeros(CPU)
    for _ in range(2):
        untold.add(Losses(torch.tensor(10.0)))
    untold.add(Losses())
    found = outlook(-30.0, of=untold)
    assert (found.loss, found.headroom) == (2.0, None)
    assert found.outlook == pytest.approx(3.0), "there is no bound"


def test_a_small_outlook_is_doubtful() -> None:
    few = task(answers=1000, wrong=500)
    assert outlook(-1000 * DOUBTFUL, of=few).helps
    assert not outlook(-1000 * DOUBTFUL + 1, of=few).helps
    assert "likely to help" in forecast_sentence(outlook(-3.0))
    assert "doubtful" in forecast_sentence(outlook(3.0))
    assert "gets 40% of the calibration answers wrong" in forecast_sentence(outlook(3.0))


# What is printed and kept


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def ported(scene: Scene) -> tuple[Result, Path]:
    out = scene.folder / "ported"
    return run("port", *scene.arguments, "-o", out), out


def test_the_outlook_is_printed_before_the_results(ported: tuple[Result, Path]) -> None:
    result, out = ported
    assert result.exit_code == 0, result.output
    found = read_record(out).foresight
    assert found is not None
    first, *rest = result.stdout.splitlines()
    assert first == forecast_sentence(found)
    assert first.startswith("Outlook: ")
    assert "target, zero-shot" in "\n".join(rest)
    assert result.output.count("Outlook:") == 1


def test_the_outlook_is_told_before_anything_is_measured(scene: Scene) -> None:
    from hf_bico.hub.client import Hub
    from hf_bico.porting.planner import plan
    from hf_bico.porting.port import run_port
    from hf_bico.settings import Settings

    told: list[object] = []
    planned = plan(scene.tuned, scene.target, base=scene.base, data=scene.data)
    record = run_port(planned, Settings(n=8), Hub(), lambda *at: told.append(at[0]), told.append).record
    assert record.evaluation
    assert told.index(record.foresight) < told.index("evaluate")


@pytest.mark.parametrize("option", ["-q", "--json"])
def test_the_outlook_is_not_printed_where_little_is(
    option: str, scene: Scene, ported: tuple[Result, Path], tmp_path: Path
) -> None:
    result = run("port", *scene.arguments, option, "-o", tmp_path / "out", "--no-eval")
    assert result.exit_code == 0, result.output
    assert "Outlook:" not in result.output
    assert read_record(tmp_path / "out").foresight == read_record(ported[1]).foresight
    if option == "--json":
        raw = json.loads(result.stdout)["record"]["foresight"]
        assert raw == json.loads((tmp_path / "out" / RECORD_FILE).read_text())["foresight"]
        assert ForecastRecord(**raw) == read_record(ported[1]).foresight


def test_a_method_that_is_not_foretold_prints_no_outlook(scene: Scene, tmp_path: Path) -> None:
    result = run("port", *scene.arguments, "--method", "theseus", "--no-eval", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Outlook:" not in result.output


def test_a_record_of_before_is_still_read(ported: tuple[Result, Path], tmp_path: Path) -> None:
    raw = json.loads((ported[1] / RECORD_FILE).read_text())
    assert raw.pop("foresight")
    (tmp_path / RECORD_FILE).write_text(json.dumps(raw))
    old, new = read_record(tmp_path), read_record(ported[1])
    assert old.foresight is None
    assert replace(new, foresight=None) == old


def test_a_port_that_is_repeated_is_foretold_the_same(
    scene: Scene, ported: tuple[Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scene.folder)  # a record does not tell where a folder was
    result = run("rerun", ported[1], "-o", tmp_path / "again", "-q")
    assert result.exit_code == 0, result.output
    assert read_record(tmp_path / "again").foresight == read_record(ported[1]).foresight
