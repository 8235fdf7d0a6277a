"""Every method that carries, against the slow reference: all sites, over every kind of pair.

The reference runs in float64, and so does the port unless said otherwise: then the cut at 1e-6 is the same for both,
and nothing has to be left out of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_bico
from hf_bico.alignment.methods import make_method
from hf_bico.alignment.objectives.base import MOST_LABELS
from hf_bico.alignment.objectives.clip import zero_shot_head
from hf_bico.alignment.statistics import Kind, Statistics
from hf_bico.data.augmentation import AugmentedSamples
from hf_bico.data.draw import draw
from hf_bico.errors import UnsuitableMethodError, UsageError
from hf_bico.models.deltas import Deltas
from hf_bico.models.low_rank import Factors
from hf_bico.models.model import Model
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.heads import make_heads
from hf_bico.porting.model_pair import ModelPair
from hf_bico.porting.planner import plan
from hf_bico.porting.transfer import transfer
from hf_bico.runtime.environment import Stopwatch
from hf_bico.settings import DEFAULT_TEMPLATES, METHODS, Settings
from support import reference
from support.adapter_ports import forbid_dense, ported_as_dense, write_lora
from support.adapter_ports import port as port_scene
from support.reference import Alignment, Changes, Fisher, Labelling
from support.scenes import make_scene
from support.toys import CLASS_NAMES, WRITERS, Toy, fit, random_rows, random_state

NARROW, WIDE = Toy(width=16), Toy(width=24, heads=3, embedding=20)
OPEN_CLIP = ("open_clip", "open_clip")
PAIRS: dict[str, tuple[tuple[Toy, Toy], tuple[str, str]]] = {
    "same width": ((NARROW, NARROW), OPEN_CLIP),
    "narrow to wide": ((NARROW, WIDE), OPEN_CLIP),
    "wide to narrow": ((WIDE, NARROW), OPEN_CLIP),
    "shallow to deep": ((NARROW, WIDE.but(blocks=4)), OPEN_CLIP),
    "4x4 to 5x5 tokens": ((NARROW, WIDE.but(grid=5)), OPEN_CLIP),
    "5x5 to 4x4 tokens": ((NARROW.but(grid=5), WIDE), OPEN_CLIP),
    "transformers": ((NARROW, WIDE.but(blocks=3)), ("transformers", "transformers")),
    "transformers to open_clip": ((NARROW, WIDE), ("transformers", "open_clip")),
}
OF_THE_PATH = ("wide to narrow", "shallow to deep", "4x4 to 5x5 tokens", "transformers to open_clip")
"""A path is steps of bico-fisher, which is held against the reference for every pair."""
MANY_NAMES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ink", "paper", "form"),
)
KINDS: dict[str, tuple[str | None, str | None]] = {
    "bico": ("inputs", "gradients"),
    "theseus": ("inputs", "outputs"),
    "input-only": ("inputs", None),
    "output-only": (None, "gradients"),
    "gradient-only": ("input_gradients", "gradients"),
}
"""Which rows the input and the output maps line up."""
ALIGNERS = (*KINDS, "bico-fisher", "bico-path")
SAMPLES = 10
CUT, STRONG = 1e-6, 1e-5
CPU = torch.device("cpu")


class Case:
    """Two pretrained models and a fine-tuned source on disk, and what the reference makes of them.

    All of the source's visual tower was changed; its text side too, where `text` is not 0.
    """

    def __init__(
        self,
        folder: Path,
        shapes: tuple[Toy, Toy],
        libraries: tuple[str, str] = OPEN_CLIP,
        class_names: Sequence[str] = CLASS_NAMES,
        dtype: torch.dtype = torch.float64,
        text: float = 0.0,
    ) -> None:
        self.toys, self.class_names, self.dtype = shapes, tuple(class_names), dtype
        generator = torch.Generator().manual_seed(7)
        start, target = (random_state(toy, seed, dtype) for seed, toy in enumerate(shapes))
        tuned = {
            name: tensor + (0.05 if name.startswith("visual.") else text) * noise(tensor, generator)
            for name, tensor in start.items()
        }
        a, b = shapes
        self.base = WRITERS[libraries[0]](folder / "base", a, start)
        self.tuned = WRITERS[libraries[0]](folder / "tuned", a, tuned)
        self.target = WRITERS[libraries[1]](folder / "target", b, target)
        self.states = [{name: tensor.double() for name, tensor in state.items()} for state in (start, target, tuned)]
        self.rows = [{**row, "image": row["image"].to(dtype)} for row in random_rows(SAMPLES, 16)]
        self._ported = dict[str, Changes]()
        self.classes = cache(self._classes)
        self.seen = cache(self._seen)
        self.expected = cache(lambda method: self.carried(self.maps(method)))
        self.fisher_start = cache(lambda: self.fisher(self.states[0], self.states[1]))

    def _classes(self, folder: Path) -> Tensor:
        model = Model.open(folder, "a toy").load(CPU, torch.float64)
        return zero_shot_head(model, self.class_names, DEFAULT_TEMPLATES).classes

    def pixels(self, side: int, rows: Sequence[dict[str, Any]] | None = None) -> Tensor:
        images = torch.stack([row["image"] for row in (self.rows if rows is None else rows)])
        return fit(images, self.toys[side]).double()

    @property
    def labels(self) -> Tensor:
        return torch.tensor([row["label"] for row in self.rows])

    def _seen(self, side: int, order: tuple[int, ...] | None = None) -> reference.Seen:
        chosen = list(range(SAMPLES) if order is None else order)
        classes = self.classes((self.base, self.target)[side])
        pixels, labels = self.pixels(side)[chosen], self.labels[chosen]
        return reference.observe(self.states[side], self.toys[side], pixels, labels, classes)

    @property
    def change(self) -> dict[str, Tensor]:
        """The task vector."""
        return {name: self.states[2][name] - start for name, start in self.states[0].items()}

    @property
    def sites(self) -> list[str]:
        return list(reference.site_weights(self.states[1], self.toys[1].blocks))

    def origin(self, site: str, blocks: Sequence[int] | None = None) -> str:
        if blocks is None or not site.startswith("blocks."):
            return reference.source_site(site, self.toys[0].blocks, self.toys[1].blocks)
        _, block, role = site.split(".", 2)
        return f"blocks.{blocks[int(block)]}.{role}"

    def carried(self, maps: Callable[[str], tuple[Alignment | None, Alignment | None]], **options: Any) -> Changes:
        """R_out^T tau R_in at every site of the target; a side without a map is padded or cropped."""
        cut, blocks = options.get("cut", CUT), options.get("blocks")
        tau = reference.site_weights(self.change, self.toys[0].blocks)
        shapes = reference.site_weights(self.states[1], self.toys[1].blocks)
        answers: Changes = {}
        for site in self.sites:
            weight, bias = tau[self.origin(site, blocks)]
            (rows, columns), (inside, outside) = shapes[site][0].shape, maps(site)
            weight = fitted_to(weight, 1, columns) if inside is None else weight @ inside.map(cut)
            weight = fitted_to(weight, 0, rows) if outside is None else outside.map(cut).T @ weight
            if bias is not None:
                bias = fitted_to(bias, 0, rows) if outside is None else bias @ outside.map(cut)
            answers[site] = (weight, bias)
        return answers

    def maps(
        self, method: str, blocks: Sequence[int] | None = None, order: tuple[int, ...] | None = None
    ) -> Callable[[str], tuple[Alignment | None, Alignment | None]]:
        """(R_in, R_out) of a target site; with an order, the source sees the samples in that one."""
        a, b = self.toys
        seen = self.seen(0, order), self.seen(1)

        def of(site: str) -> tuple[Alignment | None, Alignment | None]:
            found = [
                None
                if kind is None
                else reference.align(
                    getattr(seen[0], kind)[self.origin(site, blocks)], getattr(seen[1], kind)[site], a.grid, b.grid
                )
                for kind in KINDS[method]
            ]
            return found[0], found[1]

        if method == "bico-fisher":
            return lambda site: self.fisher_start().maps(self.origin(site, blocks), site)
        return of

    def labelling(self, rows: Sequence[dict[str, Any]] | None = None) -> Labelling:
        """What the fine-tuned source predicts, with its own text side."""
        pixels = self.pixels(0, rows)
        found = reference.predictions(self.states[2], self.toys[0], pixels, self.classes(self.tuned))
        return Labelling.likeliest(found, most=10)

    def fisher(
        self,
        source: dict[str, Tensor],
        target: dict[str, Tensor],
        rows: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]] | None = None,
    ) -> Fisher:
        """With these weights; `rows` are what the source and the target see."""
        shown = rows or (self.rows, self.rows)
        labellings = self.labelling(shown[0]), self.labelling(shown[1])
        first, second = (
            reference.label_gradients(state, toy, self.pixels(side, shown[side]), self.classes(folder), labelling)
            for side, (state, toy, folder, labelling) in enumerate(
                zip((source, target), self.toys, (self.base, self.target), labellings, strict=True)
            )
        )
        grids = self.toys[0].grid, self.toys[1].grid
        return Fisher(grids, (first[0], second[0]), (first[1], second[1]), labellings)

    def path(self, steps: int) -> Changes:
        """The weights of both models really changed, step by step."""
        so_far: Changes | None = None
        for step in range(steps):
            source = {name: start + step / steps * self.change[name] for name, start in self.states[0].items()}
            target = {name: tensor.clone() for name, tensor in self.states[1].items()}
            if so_far is not None:
                for site, (weight, bias) in reference.site_weights(target, self.toys[1].blocks).items():
                    weight += so_far[site][0]
                    if bias is not None:
                        bias += so_far[site][1]
            seen = self.fisher(source, target)
            part = self.carried(lambda site, seen=seen: seen.maps(self.origin(site), site))
            so_far = {
                site: (
                    weight / steps + (0.0 if so_far is None else so_far[site][0]),
                    None if bias is None else bias / steps + (0.0 if so_far is None else so_far[site][1]),
                )
                for site, (weight, bias) in part.items()
            }
        assert so_far is not None
        return so_far

    def options(self, **options: Any) -> dict[str, Any]:
        usual = {"n": SAMPLES, "class_names": self.class_names, "evaluate": False, "alpha": 1.0}
        return {**usual, "dtype": str(self.dtype).removeprefix("torch."), **options}

    def port(self, method: str, data: Any = None, **options: Any) -> hf_bico.Ported:
        found = self.rows if data is None else data
        options = self.options(method=method, **options)
        return hf_bico.port(self.tuned, to=self.target, base=self.base, data=found, **options)

    def ported(self, method: str, data: Any = None, **options: Any) -> Changes:
        """Of the usual data, once for all tests."""
        if data is not None:
            return self.by_site(self.port(method, data, **options).task_vector)
        asked = repr((method, sorted(options.items())))
        if asked not in self._ported:
            self._ported[asked] = self.by_site(self.port(method, **options).task_vector)
        return self._ported[asked]

    def by_site(self, vector: Deltas) -> Changes:
        return {
            site.name: (
                site.weight.view(vector[site.weight.tensor]).double(),
                None if site.bias is None else site.bias.view(vector[site.bias.tensor]).double(),
            )
            for site in Model.open(self.target, "the target").layout.main_sites
        }

    def calibration(self, mispaired: bool = False, **options: Any) -> Calibration:
        settings, watch = Settings.of({**self.options(**options), "objective": "zero-shot"}), Stopwatch()
        planned = plan(self.tuned, self.target, base=self.base, data=self.rows).fetched()
        models, drawn = ModelPair.open(planned, settings, CPU, watch), draw(self.rows, settings)
        return Calibration(
            models, drawn, make_heads(models, drawn.data.class_names, drawn), watch, settings, mispaired=mispaired
        )

    def result(self, calibration: Calibration) -> Changes:
        return self.by_site(
            transfer(make_method(calibration.settings.method, calibration.settings), calibration).changes
        )


def noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def fitted_to(change: Tensor, axis: int, size: int) -> Tensor:
    return reference.fitted(change, [*change.shape[:axis], size, *change.shape[axis + 1 :]])


def assert_agree(found: Changes, expected: Changes, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, ours in found.items():
        for part, one, other in zip(("weight", "bias"), ours, expected[name], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert other.norm() > 0, f"{name}: nothing to compare"
                error = float((one - other).norm() / other.norm())
                assert error < tolerance, f"{name}: {part} off by {error:.1e}"


def differ(one: Changes, other: Changes) -> bool:
    return all(float((one[name][0] - other[name][0]).norm() / one[name][0].norm()) > 1e-3 for name in one)


@pytest.fixture(scope="module", params=PAIRS.values(), ids=PAIRS.keys())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"), *request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Other widths and patch grids, deeper too."""
    return Case(tmp_path_factory.mktemp("plain"), (NARROW, WIDE.but(grid=5, blocks=3)))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two models of one shape."""
    return Case(tmp_path_factory.mktemp("twins"), (NARROW, NARROW))


@pytest.mark.parametrize("method", ["bico", "theseus", "bico-fisher"])
def test_port_equals_the_reference(case: Case, method: str) -> None:
    assert_agree(case.ported(method), case.expected(method))


@pytest.mark.parametrize("batch_size", [3])
@pytest.mark.parametrize("method", [*KINDS, "bico-fisher"])
def test_batch_size_does_not_matter(plain: Case, method: str, batch_size: int) -> None:
    assert_agree(plain.ported(method, batch_size=batch_size), plain.expected(method))


@pytest.mark.parametrize("libraries", [OPEN_CLIP, ("transformers", "transformers")], ids=str)
def test_single_precision_agrees_where_the_cut_is_far(libraries: tuple[str, str], tmp_path: Path) -> None:
    """On the directions that are ten times above it, which rounding cannot push across."""
    case = Case(tmp_path, (NARROW, WIDE.but(grid=5)), libraries, dtype=torch.float32)
    for method in (*KINDS, "bico-fisher") if libraries == OPEN_CLIP else ("bico", "bico-fisher"):
        maps = case.maps(method)
        found: Changes = {}
        for site, (weight, bias) in case.ported(method).items():
            inside, outside = maps(site)
            weight = weight if inside is None else weight @ inside.target_projector(STRONG)
            weight = weight if outside is None else outside.target_projector(STRONG) @ weight
            bias = bias if outside is None or bias is None else bias @ outside.target_projector(STRONG)
            found[site] = (weight, bias)
        assert_agree(found, case.carried(maps, cut=STRONG), tolerance=1e-4)


def test_methods_give_different_ports(plain: Case) -> None:
    """Or the comparisons above would not tell them apart."""
    found = [plain.expected(method) for method in (*KINDS, "bico-fisher")]
    for index, one in enumerate(found):
        assert sum(differ(one, other) for other in found[:index]) >= index - 1
        assert all(any(not torch.allclose(one[name][0], other[name][0]) for name in one) for other in found[:index])


def test_scores_and_ranks_are_those_of_the_maps(plain: Case) -> None:
    for method in ("theseus", "gradient-only", "input-only"):
        kinds, maps = KINDS[method], plain.maps(method)
        for site in plain.port(method).report.sites:
            for kind, found, rank, score in zip(
                kinds, maps(site.name), (site.rank_in, site.rank_out), (site.score_in, site.score_out), strict=True
            ):
                if kind is None or found is None:
                    assert rank is None
                    assert score is None
                    continue
                source = getattr(plain.seen(0), kind)[plain.origin(site.name)]
                source = reference.resized(source, plain.toys[0].grid, plain.toys[1].grid)
                norms = source.norm() * getattr(plain.seen(1), kind)[site.name].norm()
                assert score == pytest.approx(float(found.values.sum() / norms), rel=1e-6)
                assert rank == int((found.values > CUT * found.values[0]).sum())


def test_passed_back_gradient_is_the_layers_own(plain: Case) -> None:
    """In the reference, what autograd gives for the clone that a layer reads is g W."""
    for side, state in enumerate(plain.states[:2]):
        seen = plain.seen(side)
        for name, (weight, _) in reference.site_weights(state, plain.toys[side].blocks).items():
            assert torch.allclose(seen.input_gradients[name], seen.gradients[name] @ weight, atol=1e-12), name


def test_predictions_are_of_the_fine_tuned_source_with_its_own_text_side(tmp_path: Path) -> None:
    case = Case(tmp_path, (NARROW, WIDE), text=0.1)
    assert not torch.allclose(case.classes(case.tuned), case.classes(case.base), atol=1e-2)
    assert_agree(case.ported("bico-fisher"), case.expected("bico-fisher"))


def test_of_many_classes_the_likeliest_count(tmp_path: Path) -> None:
    assert len(MANY_NAMES) > MOST_LABELS == 10
    case = Case(tmp_path, (NARROW, WIDE), class_names=MANY_NAMES)
    left_out = 1 - case.labelling().probabilities.sum(-1)
    assert left_out.min() > 1e-3, "what is left out must be worth something"
    assert_agree(case.ported("bico-fisher"), case.expected("bico-fisher"))


def test_fisher_needs_no_labels(plain: Case) -> None:
    rows = [{"image": row["image"]} for row in plain.rows]
    for method, options in (("bico-fisher", {}), ("bico-path", {"augment": 0})):
        with_labels, without = plain.ported(method, **options), plain.ported(method, rows, **options)
        assert_agree(without, with_labels, tolerance=1e-12)


@pytest.mark.parametrize("case", [PAIRS[name] for name in OF_THE_PATH], ids=OF_THE_PATH, indirect=True)
def test_path_equals_the_literal_loop(case: Case) -> None:
    found = case.ported("bico-path", augment=0)
    assert_agree(found, case.path(steps=2))
    assert differ(found, case.expected("bico-fisher"))


def test_path_of_three_steps(plain: Case) -> None:
    found = plain.ported("bico-path", path_steps=3, augment=0, batch_size=7)
    assert_agree(found, plain.path(steps=3))
    assert differ(found, plain.ported("bico-path", path_steps=2, augment=0))


def test_path_of_one_step_is_fisher(plain: Case) -> None:
    found = plain.ported("bico-path", path_steps=1, augment=0)
    assert_agree(found, plain.path(steps=1))
    assert_agree(found, plain.ported("bico-fisher"), tolerance=1e-12)


@pytest.mark.parametrize("method", ["bico", "bico-fisher", "bico-path", "theseus"])
def test_copies_count_as_samples_of_their_own(plain: Case, method: str) -> None:
    """The same rows, passed one by one; what the fine-tuned source predicts is predicted of each."""
    samples = draw(plain.rows, Settings.of(plain.options(seed=3))).samples
    copied = AugmentedSamples(samples, 2, seed=3)
    rows = [{"image": image, "label": label} for [image], [label] in copied.batches(1)]
    assert len(rows) == 3 * SAMPLES
    augmented = plain.ported(method, augment=2, seed=3, batch_size=7)
    assert_agree(augmented, plain.ported(method, rows, n=len(rows), augment=0), tolerance=1e-8)
    assert differ(augmented, plain.ported(method, augment=0))


def test_path_copies_few_samples_on_its_own(plain: Case) -> None:
    assert_agree(plain.ported("bico-path"), plain.ported("bico-path", augment=7), tolerance=1e-12)


def is_key_bias(site: str, part: str) -> bool:
    """A softmax does not feel a bias of the keys: its gradient is rounding, and so is its sign."""
    return part == "bias" and site.endswith("attn.k")


def gradient_signs(case: Case, votes: bool) -> Changes:
    """The mean gradient, or the number of samples whose own one is positive less that of those where it is negative."""
    state, toy, classes = case.states[1], case.toys[1], case.classes(case.target)
    pixels, labels = case.pixels(1), case.labels
    if not votes:
        return reference.parameter_gradients(state, toy, pixels, labels, classes)
    counts: Changes = {}
    for sample in range(SAMPLES):
        here = slice(sample, sample + 1)
        for site, found in reference.parameter_gradients(state, toy, pixels[here], labels[here], classes).items():
            before = counts.get(site, (0, 0))
            counts[site] = tuple(
                None if one is None else so_far + (one > 0).double() - (one < 0).double()
                for one, so_far in zip(found, before, strict=True)
            )  # type: ignore[assignment]
    return counts


@pytest.mark.parametrize("signs", ["mean", "majority"])
@pytest.mark.parametrize("libraries", [OPEN_CLIP, ("transformers", "open_clip")], ids=str)
def test_gradfix_keeps_what_goes_down_the_targets_gradient(
    signs: str, libraries: tuple[str, str], tmp_path: Path
) -> None:
    case = Case(tmp_path, (NARROW, NARROW), libraries)
    found = case.ported("gradfix", signs=signs, batch_size=7)
    gradients = gradient_signs(case, votes=signs == "majority")
    tau = reference.site_weights(case.change, NARROW.blocks)
    compared = 0
    for site in case.sites:
        for part, ours, change, gradient in zip(
            ("weight", "bias"), found[site], tau[site], gradients[site], strict=True
        ):
            if change is None or gradient is None or ours is None or is_key_bias(site, part):
                continue
            assert torch.allclose(ours, reference.masked(change, gradient), rtol=0, atol=1e-12), f"{site}: {part}"
            assert 0 < int((ours != 0).sum()) < ours.numel(), "some of it goes, and some stays"
            compared += 1
    assert compared == 6 * 2 * 2 + 1 - 2


def test_mean_and_majority_differ(twins: Case) -> None:
    one, two = (gradient_signs(twins, votes) for votes in (False, True))
    assert any(bool((one[site][0].sign() != two[site][0].sign()).any()) for site in twins.sites)


def test_gradfix_refuses_other_shapes(plain: Case) -> None:
    with pytest.raises(UnsuitableMethodError, match=r"'blocks.0.attn.q' is 16 x 16 in the source and 24 x 24"):
        plain.port("gradfix")


def test_naive_is_padded_and_cropped(case: Case) -> None:
    ported = case.port("naive")
    assert_agree(case.by_site(ported.task_vector), case.carried(lambda site: (None, None)), tolerance=1e-12)
    assert all(site.score_in is site.score_out is site.unseen is None for site in ported.report.sites)


@pytest.mark.parametrize("method", KINDS)
def test_control_is_a_port_whose_source_saw_other_samples(plain: Case, method: str) -> None:
    """In two ways, one less the other, and in two others for the output side."""
    calibration = plain.calibration(mispaired=True, method=method, batch_size=7)
    found, order = plain.result(calibration), calibration.drawn_samples.indices
    maps = []
    for others in wrong_orders(order):
        assert sorted(order) == sorted(others)
        assert all(one != other for one, other in zip(order, others, strict=True))
        # what the source sees where the target sees sample i
        shown = dict(zip(order, others, strict=True))
        maps.append(plain.maps(method, order=tuple(shown[sample] for sample in range(SAMPLES))))
    assert_agree(found, plain.carried(lambda site: less(*(one(site) for one in maps))))
    assert differ(found, plain.expected(method))


def test_control_of_fisher_weights_each_side_by_its_own_prediction(plain: Case) -> None:
    calibration = plain.calibration(mispaired=True, method="bico-fisher")
    found, order = plain.result(calibration), calibration.drawn_samples.indices
    targets = [plain.rows[index] for index in order]
    seen = [
        plain.fisher(plain.states[0], plain.states[1], ([plain.rows[index] for index in others], targets))
        for others in wrong_orders(order)
    ]
    assert_agree(found, plain.carried(lambda site: less(*(one.maps(plain.origin(site), site) for one in seen))))


def wrong_orders(order: tuple[int, ...]) -> list[tuple[int, ...]]:
    """From the second, third, fourth and fifth sample on."""
    return [order[turn:] + order[:turn] for turn in (1, 2, 3, 4)]


def less(*maps: Any) -> Any:
    """The input map of the first two, and the output map of the others."""
    (first, _), (second, _), (_, third), (_, fourth) = maps
    return (None if first is None else first.less(second), None if third is None else third.less(fourth))


def test_control_needs_five_samples(plain: Case) -> None:
    with pytest.raises(UsageError, match="4 samples cannot be mispaired in four ways"):
        plain.result(plain.calibration(mispaired=True, method="bico", n=4))


def test_control_is_measured_and_refused_where_nothing_is_paired(plain: Case) -> None:
    options: dict[str, Any] = {"n": SAMPLES // 2, "evaluate": True, "control": True}
    ported = plain.port("theseus", **options)
    assert [entry.model for entry in ported.record.evaluation] == ["target", "ported", "source", "control"]
    with pytest.raises(UnsuitableMethodError, match="naive does not pair any"):
        plain.port("naive", **options)


@pytest.mark.parametrize(
    ("method", "libraries"),
    [
        *((method, ("transformers", "transformers")) for method in ("theseus", "output-only", "naive")),
        *((method, ("transformers", "open_clip")) for method in ("bico-fisher", "bico-path")),
    ],
    ids=str,
)
def test_port_of_a_lora_is_the_port_of_its_product(
    method: str, libraries: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(tmp_path / "scene", libraries)
    lora = write_lora(scene, libraries[0], tmp_path / "lora")
    options: dict[str, Any] = {"method": method, "augment": 0, "dtype": "float64"}
    dense = ported_as_dense(monkeypatch, scene, lora, evaluate=False, format="delta", **options).task_vector
    with monkeypatch.context() as context:
        forbid_dense(context)
        ported = port_scene(scene, lora, **options)
        ported.save(tmp_path / "out")
    low_rank = ported.task_vector
    assert set(low_rank) == set(dense)
    parts = 2 if method == "bico-path" else 1
    for name in dense:
        change = low_rank.change(name)
        assert isinstance(change, Factors)
        # q, k and v, each with factors of its own, are three in open_clip's one tensor
        assert change.rank == 3 * parts * (3 if "in_proj" in name else 1)
        assert float((low_rank[name] - dense[name]).norm() / dense[name].norm()) < 1e-5, name


def test_factors_have_a_rank_for_each_step_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(tmp_path / "scene", ("transformers", "transformers"))
    lora = write_lora(scene, "transformers", tmp_path / "lora")
    forbid_dense(monkeypatch)
    ported = port_scene(scene, lora, method="bico-path", path_steps=3, augment=0, evaluate=False).task_vector
    assert {ported.change(name).rank for name in ported} == {9}  # type: ignore[union-attr]


def sums_of(statistics: Statistics) -> dict[tuple[Any, ...], Tensor]:
    """Everything that was added up, by name."""
    found: dict[tuple[Any, ...], Tensor] = {}
    for kind, sums in statistics.sums.items():
        for key, one in sums.items():
            found |= {(kind, key, part): tensor for part, tensor in enumerate(one.tensors)}
    for name, gradient in statistics.target_gradients.items():
        found |= {(name, part): getattr(gradient, part) for part in ("weight", "bias", "weight_votes", "bias_votes")}
    return found


def test_kinds_collected_together_are_those_collected_alone(twins: Case) -> None:
    together = twins.calibration(batch_size=7).statistics(Kind)
    assert together.kinds == set(Kind)
    for kind in Kind:
        alone = twins.calibration(batch_size=7).statistics([kind])
        assert kind in alone.kinds
        everything = sums_of(together)
        for key, found in sums_of(alone).items():
            assert torch.equal(found, everything[key]), key


def test_statistics_do_not_depend_on_the_batch_size(plain: Case) -> None:
    whole, *others = (sums_of(plain.calibration(batch_size=size).statistics(Kind)) for size in (SAMPLES, 1, 7))
    for found in others:
        assert found.keys() == whole.keys()
        for key, one in whole.items():
            if key[-1] in ("bias", "bias_votes") and key[0].endswith("attn.k"):
                continue  # rounding alone
            assert float((found[key] - one).norm()) <= 1e-9 * float(one.norm()), key


@pytest.mark.parametrize("method", METHODS)
def test_only_gradients_need_a_backward_pass(twins: Case, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a gradient was asked for")

    monkeypatch.setattr("hf_bico.porting.port.time_training_step", lambda *_: None)  # which are no part of the port
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    if method in ("theseus", "input-only", "naive", "transfusion", "readout"):
        twins.port(method)
        return
    with pytest.raises(AssertionError, match="a gradient was asked for"):
        twins.port(method, train_steps=2)


@pytest.mark.parametrize("method", ["bico", "bico-fisher"])
def test_layers_as_they_are_named(plain: Case, method: str) -> None:
    for layers in ([1, 1, 0], [0, 0, 0]):
        ported = plain.port(method, layers=layers)
        assert list(ported.record.method.layers) == layers
        assert_agree(plain.by_site(ported.task_vector), plain.carried(plain.maps(method, layers), blocks=layers))


def test_layers_that_there_are_not_are_refused(plain: Case) -> None:
    with pytest.raises(UsageError, match="names 2 blocks and the target has 3"):
        plain.port("bico", layers=[0, 1])
    with pytest.raises(UsageError, match="names block 2 and the source has 2"):
        plain.port("bico", layers=[0, 1, 2])


@pytest.mark.parametrize("libraries", [OPEN_CLIP, ("transformers", "transformers")], ids=str)
def test_layers_by_similarity_are_the_best_of_all_lists(libraries: tuple[str, str], tmp_path: Path) -> None:
    case = Case(tmp_path, (NARROW.but(blocks=3), WIDE.but(blocks=4)), libraries)
    read = [
        [seen.inputs[f"blocks.{block}.attn.q"].mean(1) for block in range(toy.blocks)]
        for seen, toy in ((case.seen(0), case.toys[0]), (case.seen(1), case.toys[1]))
    ]
    blocks = reference.most_similar_blocks(read[0], read[1])
    ported = case.port("bico", layers="similarity", batch_size=7)
    assert list(ported.record.method.layers) == blocks
    assert_agree(case.by_site(ported.task_vector), case.carried(case.maps("bico", blocks), blocks=blocks))


def test_pseudo_labels_are_what_the_fine_tuned_source_says(tmp_path: Path) -> None:
    # by force: the text tower goes further than any fine-tuning, so that the two sources answer differently
    case = Case(tmp_path, (NARROW, WIDE), class_names=MANY_NAMES, text=0.3)
    labels = case.labelling().labels[:, 0].tolist()
    assert labels != case.labels.tolist()
    assert len(set(labels)) > 1
    rows = [{**row, "label": label} for row, label in zip(case.rows, labels, strict=True)]
    expected = case.ported("bico", rows, tower="vision", force=True)
    assert_agree(case.ported("bico", labels="pseudo", force=True), expected, tolerance=1e-12)
    unlabelled = [{"image": row["image"]} for row in case.rows]
    assert_agree(case.ported("bico", unlabelled, force=True), expected, tolerance=1e-12)
    assert differ(case.ported("bico", tower="vision", force=True), expected)


def test_both_protocols_are_measured(plain: Case) -> None:
    ported = plain.port("theseus", n=6, evaluate=True, evaluation="both")
    found = [(entry.model, entry.protocol, entry.trained_on) for entry in ported.record.evaluation]
    assert found == [
        (model, protocol, trained_on)
        for model in ("target", "ported", "source")
        for protocol, trained_on in ((None, None), ("probe", 6))
    ]
    alone = plain.port("theseus", n=6, evaluate=True, evaluation="probe").record.evaluation
    assert [entry for entry in ported.record.evaluation if entry.protocol == "probe"] == list(alone)
    assert all(0 <= entry.value <= 1 for entry in alone)


def test_alpha_scales_a_path_as_a_whole(plain: Case) -> None:
    """The way does not depend on how much of the result is added."""
    whole, half = plain.ported("bico-path", augment=0), plain.ported("bico-path", augment=0, alpha=0.5)
    for site, (weight, bias) in whole.items():
        assert torch.allclose(half[site][0], 0.5 * weight, rtol=1e-9, atol=1e-12)
        assert bias is None or torch.allclose(half[site][1], 0.5 * bias, rtol=1e-9, atol=1e-12)


def test_turned_samples_keep_their_own_predictions(plain: Case) -> None:
    """With altered copies of each, too."""
    from hf_bico.alignment.objectives.base import LikelyLabels
    from hf_bico.data.augmentation import AugmentedSamples
    from hf_bico.models.inference import logits_of

    calibration = plain.calibration(mispaired=True, method="bico-fisher", augment=2)
    turned = AugmentedSamples(calibration.drawn_samples.rotated(7), 2, calibration.settings.seed)
    with calibration.models.vector.applied_to(calibration.models.source.module):
        logits = logits_of(calibration.models.source, calibration.heads.tuned, turned, 32)  # type: ignore[union-attr]
    found = calibration._likely_labels({Kind.EXPECTED_GRADIENTS}, shift=7)
    assert found is not None
    assert torch.allclose(found.probabilities, LikelyLabels.of(logits).probabilities)
