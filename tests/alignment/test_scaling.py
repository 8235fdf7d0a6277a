"""How much of a change is added: the scale, the veto, the outlook and the walk, against a slow literal reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_bico
from hf_bico.alignment.objectives.clip import zero_shot_head
from hf_bico.alignment.scaling import (
    SCALES,
    Estimate,
    SampleScores,
    by_sample,
    choose_scale,
    class_scores,
    curve,
    outlook,
    passes_veto,
)
from hf_bico.models.model import Model
from hf_bico.settings import DEFAULT_TEMPLATES
from support import reference
from support import walk_reference as literal
from support.language_toys import fine_tuned, labelled_rows, sentences, write_decoder, write_encoder
from support.reference import Changes, Fisher, Labelling
from support.toys import CLASS_NAMES, WRITERS, Toy, fit, random_rows, random_state

CPU, SAMPLES, FEW, CUT = torch.device("cpu"), 20, 12, 1e-6
BOLD, CAREFUL = 1, 2
SHAPES = (Toy(width=16), Toy(width=24, heads=3, embedding=20))


def scores(*losses: float) -> SampleScores:
    return SampleScores(torch.tensor(losses, dtype=torch.float64))


class TestScale:
    def test_the_grid_is_zero_and_powers_of_the_root_of_two(self) -> None:
        assert list(SCALES) == pytest.approx(literal.GRID)
        assert (SCALES[0], SCALES[1], SCALES[-1]) == (0.0, 1 / 32, 2.0)

    def test_the_smallest_scale_that_is_not_clearly_worse_is_taken(self) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(30, generator=generator, dtype=torch.float64)
        noise -= noise.mean()
        tried = {alpha: SampleScores((alpha - 1.2) ** 2 + 2.0 * alpha * noise) for alpha in SCALES}
        plain = {alpha: one.losses.tolist() for alpha, one in tried.items()}
        for errors in (BOLD, CAREFUL, 0.0):
            assert choose_scale(tried, errors) == literal.chosen(plain, errors)
        assert 0.0 < choose_scale(tried, CAREFUL) < choose_scale(tried, BOLD) <= choose_scale(tried, 0.0)

    def test_where_no_fall_is_clear_nothing_is_added(self) -> None:
        tried = {0.0: scores(1.0, 1.0, 1.0), 1.0: scores(0.0, 2.1, 0.8)}
        assert choose_scale(tried, CAREFUL) == 0.0

    def test_of_two_equal_losses_the_smaller_scale_is_taken(self) -> None:
        tried = {0.0: scores(2.0, 3.0), 0.5: scores(1.0, 2.0), 1.0: scores(1.0, 2.0)}
        assert choose_scale(tried, CAREFUL) == 0.5

    def test_one_sample_chooses_nothing(self) -> None:
        assert choose_scale({0.0: scores(5.0), 1.0: scores(0.0)}, CAREFUL) == 0.0

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    def test_a_scale_at_which_the_model_breaks_is_neither_taken_nor_drawn(self, broken: float) -> None:
        tried = {0.0: scores(2.0, 3.0), 0.5: scores(1.0, 2.0), 1.0: scores(broken, 0.0), 2.0: scores(broken, broken)}
        assert choose_scale(tried, CAREFUL) == 0.5
        assert [point.alpha for point in curve(tried)] == [0.0, 0.5]

    def test_the_curve_tells_what_the_choice_rests_on(self) -> None:
        tried = {0.0: scores(2.0, 4.0, 3.0), 1.0: scores(1.0, 2.0, 2.5)}
        first, second = curve(tried, step=2)
        assert (first.alpha, first.mean, first.step) == (0.0, 3.0, 2)
        assert first.error == pytest.approx(literal.standard_error([1.0, 2.0, 0.5]))
        assert second.error == 0.0


class TestVeto:
    @pytest.mark.parametrize(
        ("gains", "passed"),
        [((0.1, 0.2, 0.3), True), ((0.0, 0.0, 0.0), False), ((-0.1, -0.2, 0.0), False), ((1.0, -0.9, 0.0), False)],
    )
    def test_a_change_passes_only_with_a_clear_gain(self, gains: tuple[float, ...], passed: bool) -> None:
        assert passes_veto(Estimate.of(torch.tensor(gains))) is passed
        assert literal.passes(gains) is passed

    def test_one_sample_never_passes(self) -> None:
        assert not passes_veto(Estimate.of(torch.tensor([1.0])))

    def test_gains_are_of_accuracy_where_classes_are_predicted_and_else_of_loss(self) -> None:
        losses = torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0])
        assert outlook(SampleScores(losses[0]), SampleScores(losses[1])).mean == pytest.approx(0.75)
        before, after = (
            SampleScores(loss, torch.tensor([0.1, share])) for loss, share in zip(losses, (0.2, 0.6), strict=True)
        )
        assert outlook(before, after).mean == pytest.approx(0.2)


class TestClassScores:
    def test_they_are_the_formula(self) -> None:
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        p = torch.randn(4, 5, generator=generator, dtype=torch.float64).softmax(-1)
        found = class_scores(logits, p)
        assert found.accuracies is not None
        for row in range(4):
            pair = p[row].tolist(), logits[row].tolist()
            assert float(found.losses[row]) == pytest.approx(literal.divergence(*pair), abs=1e-12)
            assert float(found.accuracies[row]) == literal.expected_accuracy(*pair)

    def test_the_values_of_a_samples_copies_are_averaged_into_it(self) -> None:
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        p = torch.randn(2, 3, generator=generator, dtype=torch.float64).softmax(-1)
        found = class_scores(logits, p, copies=2)
        for sample in range(2):
            own = [logits[3 * sample + copy].tolist() for copy in range(3)]
            expected = literal.mean([literal.divergence(p[sample].tolist(), one) for one in own])
            assert float(found.losses[sample]) == pytest.approx(expected, abs=1e-12)
        assert found.predictions is not None
        assert found.predictions.tolist() == [int(logits[0].argmax()), int(logits[3].argmax())]
        assert torch.equal(by_sample(torch.arange(4.0), 1), torch.tensor([0.5, 2.5]))

    def test_a_probability_of_zero_counts_for_nothing(self) -> None:
        found = class_scores(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]))
        assert float(found.losses) == pytest.approx(literal.divergence([0.0, 1.0], [1.0, 2.0]))


class Clips:
    """A target that is a relative of the source, so that the change helps it; all in float64."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(3)

        def noise(tensor: Tensor, size: float) -> Tensor:
            return size * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

        toy = SHAPES[0]
        base = random_state(toy, 0, torch.float64)
        inside = [name for name in base if name.startswith("visual.")]
        tuned = base | {name: base[name] + noise(base[name], 0.12) for name in inside}
        target = base | {name: base[name] + noise(base[name], 0.05) for name in inside}
        self.toy, self.base, self.tuned, self.target = toy, base, tuned, target
        self.folders = [
            WRITERS["open_clip"](folder / name, toy, state)
            for name, state in (("base", base), ("tuned", tuned), ("target", target))
        ]
        self.rows = [{**row, "image": row["image"].double()} for row in random_rows(SAMPLES, 16)]
        self.pixels = fit(torch.stack([row["image"] for row in self.rows]), toy).double()
        self.classes = [self._classes(path) for path in self.folders]
        self.p = reference.predictions(tuned, toy, self.pixels, self.classes[1])

    def _classes(self, folder: Path) -> Tensor:
        return zero_shot_head(
            Model.open(folder, "a toy").load(CPU, torch.float64), CLASS_NAMES, DEFAULT_TEMPLATES
        ).classes

    def port(self, **options: Any) -> hf_bico.Ported:
        base, tuned, target = self.folders
        given = {
            "n": SAMPLES,
            "dtype": "float64",
            "evaluate": False,
            "class_names": CLASS_NAMES,
            "augment": 0,
            **options,
        }
        return hf_bico.port(tuned, to=target, base=base, data=self.rows, **given)

    def target_with(
        self, changes: Changes | None, step: Changes | None = None, alpha: float = 0.0
    ) -> dict[str, Tensor]:
        state = {name: tensor.clone() for name, tensor in self.target.items()}
        for site, (weight, bias) in reference.site_weights(state, self.toy.blocks).items():
            for part, factor in ((changes, 1.0), (step, alpha)):
                if part is not None:
                    weight += factor * part[site][0]
                    if bias is not None:
                        bias += factor * part[site][1]
        return state

    def values(self, state: dict[str, Tensor]) -> tuple[list[float], list[float]]:
        """KL and expected accuracy of every sample, one forward pass each."""
        losses, accuracies = [], []
        for sample in range(SAMPLES):
            image = self.pixels[sample : sample + 1]
            features, _, _ = reference.vision_transformer(state, self.toy, image, self.toy.blocks)
            logits = reference.logits_of(state, features, self.classes[2])[0].tolist()
            losses.append(literal.divergence(self.p[sample].tolist(), logits))
            accuracies.append(literal.expected_accuracy(self.p[sample].tolist(), logits))
        return losses, accuracies

    def walk(self, schedule: list[float], errors: int) -> tuple[list[float], Changes, list[float]]:
        """Alphas, the whole change, and the gains of the samples."""
        tau = reference.site_weights(
            {name: self.tuned[name] - start for name, start in self.base.items()}, self.toy.blocks
        )
        labelling = Labelling.likeliest(self.p, most=10)
        so_far: Changes = {
            site: (0 * weight, None if bias is None else 0 * bias) for site, (weight, bias) in tau.items()
        }
        alphas = []
        for share in schedule:
            source = {name: start + share * (self.tuned[name] - start) for name, start in self.base.items()}
            seen = [
                reference.label_gradients(state, self.toy, self.pixels, classes, labelling)
                for state, classes in ((source, self.classes[0]), (self.target_with(so_far), self.classes[2]))
            ]
            grids = (self.toy.grid, self.toy.grid)
            fisher = Fisher(grids, (seen[0][0], seen[1][0]), (seen[0][1], seen[1][1]), (labelling, labelling))
            step: Changes = {}
            for site, (weight, bias) in tau.items():
                inside, outside = (one.map(CUT) for one in fisher.maps(site, site))
                step[site] = (outside.T @ weight @ inside, None if bias is None else bias @ outside)
            losses = {alpha: self.values(self.target_with(so_far, step, alpha))[0] for alpha in literal.GRID}
            alpha = literal.chosen(losses, errors)
            alphas.append(alpha)
            so_far = {
                site: (
                    so_far[site][0] + alpha * weight,
                    None if bias is None else so_far[site][1] + alpha * bias,
                )
                for site, (weight, bias) in step.items()
            }
        before, after = (self.values(self.target_with(one))[1] for one in (None, so_far))
        return alphas, so_far, [b - a for a, b in zip(before, after, strict=True)]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Clips:
    return Clips(tmp_path_factory.mktemp("clips"))


@pytest.mark.parametrize(("bold", "schedule"), [(False, [0.0, 0.25, 0.5, 0.75]), (True, [0.0, 0.5, 0.0, 0.5])])
def test_the_walk_is_the_literal_one(clips: Clips, bold: bool, schedule: list[float]) -> None:
    alphas, changes, gains = clips.walk(schedule, errors=BOLD if bold else CAREFUL)
    assert any(alphas), "nothing to compare"
    ported = clips.port(method="bico-path", bold=bold)
    method = ported.record.method
    assert method.alpha == pytest.approx(alphas, abs=1e-12)
    assert method.veto is not None
    assert method.veto.mean == pytest.approx(literal.mean(gains), abs=1e-6)
    assert method.veto.error == pytest.approx(literal.standard_error(gains), abs=1e-6)
    assert ported.held_back is not literal.passes(gains)
    if not ported.held_back:
        assert ported.record.outlook is not None
        assert ported.record.outlook.value == pytest.approx(literal.mean(gains), abs=1e-6)
        for site in Model.open(clips.folders[2], "the target").layout.main_sites:
            found = site.weight.view(ported.task_vector[site.weight.tensor]).double()
            assert float((found - changes[site.name][0]).norm() / changes[site.name][0].norm()) < 1e-6


def test_the_scale_of_a_method_of_one_step_is_the_literal_one(clips: Clips) -> None:
    whole = clips.port(method="bico", alpha=1.0).task_vector
    sites = Model.open(clips.folders[2], "the target").layout.main_sites
    step: Changes = {
        site.name: (
            site.weight.view(whole[site.weight.tensor]).double(),
            None if site.bias is None else site.bias.view(whole[site.bias.tensor]).double(),
        )
        for site in sites
    }
    losses = {alpha: clips.values(clips.target_with(None, step, alpha))[0] for alpha in literal.GRID}
    method = clips.port(method="bico").record.method
    assert method.alpha == literal.chosen(losses, errors=CAREFUL)
    assert [point.mean for point in method.curve] == pytest.approx(
        [literal.mean(losses[alpha]) for alpha in literal.GRID], abs=1e-6
    )


def test_a_number_for_alpha_still_tells_the_outlook(clips: Clips) -> None:
    ported = clips.port(method="bico", alpha=0.5)
    assert ported.record.method.curve == []
    assert ported.record.method.veto is None
    assert ported.record.outlook is not None
    assert ported.record.outlook.unit == "accuracy"


def test_a_decoder_is_judged_by_its_next_token_predictions(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    base = write_decoder(tmp_path / "base")
    tuned = fine_tuned(base, tmp_path / "tuned", LlamaForCausalLM, share=0.3, only="layers")
    target = write_decoder(tmp_path / "target", width=24, heads=4, seed=1)
    texts = sentences(FEW)
    where = {"to": target, "base": base, "data": [{"text": text} for text in texts], "n": FEW}
    options = {"method": "bico", "dtype": "float64", "evaluate": False, **where}
    whole = dict(hf_bico.port(tuned, **options, alpha=1.0).task_vector)

    tokenizer = AutoTokenizer.from_pretrained(target)
    teacher, student = (LlamaForCausalLM.from_pretrained(folder).double().eval() for folder in (tuned, target))

    def loss(model: Any, sample: int) -> float:
        ids = torch.tensor([tokenizer(texts[sample]).input_ids])
        p, z = (one(input_ids=ids).logits[0, :-1] for one in (teacher, model))
        return literal.mean([literal.divergence(a.softmax(-1).tolist(), b.tolist()) for a, b in zip(p, z, strict=True)])

    losses = literal.losses_at(student, whole, loss, FEW)
    method = hf_bico.port(tuned, **options).record.method
    assert method.alpha == literal.chosen(losses, errors=3)
    expected = [literal.mean(losses[alpha]) for alpha in literal.GRID]
    assert [point.mean for point in method.curve] == pytest.approx(expected, abs=1e-6)
    gains = [a - b for a, b in zip(losses[0.0], losses[method.alpha], strict=True)]
    assert method.veto is not None
    assert method.veto.mean == pytest.approx(literal.mean(gains), abs=1e-6)


def test_a_classifier_is_judged_by_a_head_that_did_not_see_the_sample(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertForSequenceClassification, BertModel

    base = write_encoder(tmp_path / "base")
    start = write_encoder(tmp_path / "start", head=3, seed=2)
    copied = BertForSequenceClassification.from_pretrained(start)
    copied.bert.load_state_dict(BertModel.from_pretrained(base).state_dict())
    copied.save_pretrained(start)
    tuned = fine_tuned(start, tmp_path / "tuned", BertForSequenceClassification, share=0.3, only="encoder.layer")
    target = write_encoder(tmp_path / "target", width=24, heads=4, seed=1)
    rows = labelled_rows(SAMPLES, classes=3)
    where = {"to": target, "base": base, "data": rows, "n": SAMPLES, "class_names": ["a", "b", "c"]}
    options = {"method": "bico", "dtype": "float64", "evaluate": False, **where}
    whole = dict(hf_bico.port(tuned, **options, alpha=1.0).task_vector)

    tokenizer = AutoTokenizer.from_pretrained(target)
    teacher = BertForSequenceClassification.from_pretrained(tuned).double().eval()
    student = BertModel.from_pretrained(target).double().eval()

    def features(model: Any, text: str) -> Tensor:
        return model(**tokenizer(text, return_tensors="pt")).pooler_output[0]

    with torch.no_grad():
        own = torch.stack([features(teacher.bert, row["text"]) for row in rows])
        logits = teacher.classifier(own)
    names = {name.removeprefix("bert."): change for name, change in whole.items()}
    means = []
    for alpha in literal.GRID:
        changed = literal.changed(student, names, alpha)
        with torch.no_grad():
            seen = torch.stack([features(changed, row["text"]) for row in rows])
        left_out = literal.left_out_predictions(seen, logits)
        pairs = zip(logits.softmax(-1).tolist(), left_out, strict=True)
        means.append(literal.mean([literal.divergence(p, z) for p, z in pairs]))
    method = hf_bico.port(tuned, **options).record.method
    assert [point.mean for point in method.curve] == pytest.approx(means, abs=1e-6)
