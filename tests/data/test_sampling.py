"""Which rows each way of sampling chooses: counts by class, distances, and the same ones on every machine."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hf_bico.data import sampling
from hf_bico.data.draw import CalibrationDraw, draw, open_data
from hf_bico.data.sampling import RequiredRows, Strategy, centroid_distances, draw_order, even_quotas
from hf_bico.errors import SampleCountError
from hf_bico.settings import SAMPLINGS, Settings

SIZES = [20, 20, 4, 11, 1]
LABELS = [label for label, size in enumerate(SIZES) for _ in range(size)]
NAMES = ["ant", "bee", "cat", "dog", "elk"]


def chosen(name: str, labels: Sequence[int] = LABELS, **options: Any) -> list[int]:
    order = draw_order(len(labels), options.get("seed", 0))
    return Strategy(name, **options).rows(order, dict(enumerate(labels)))


def counts(rows: Sequence[int], labels: Sequence[int] = LABELS) -> Counter[int]:
    return Counter(labels[row] for row in rows)


def drawn(sampling: str, labels: Sequence[int] = LABELS, **options: Any) -> CalibrationDraw:
    rows = [{"image": torch.zeros(3, 2, 2), "label": label} for label in labels]
    return draw(rows, Settings(sampling=sampling, class_names=NAMES, **options))


def features(rows: int, size: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, size)) + 1.0


def test_random_is_the_first_of_the_order() -> None:
    assert chosen("random", n=7, seed=3) == draw_order(56, 3)[:7]


@pytest.mark.parametrize("n", [1, 3, 5, 12, 17, 31, 40, 56])
@pytest.mark.parametrize("seed", [0, 1])
def test_class_balanced_is_as_even_as_the_classes_allow(n: int, seed: int) -> None:
    rows = chosen("class-balanced", n=n, seed=seed)
    assert len(set(rows)) == n
    found = counts(rows)
    quotas = [found[label] for label in range(5)]
    most = max(quotas)
    for quota, size in zip(quotas, SIZES, strict=True):
        assert quota >= most - 1 or quota == size, "only a class that ran out gives less"


def test_inside_a_class_the_order_of_the_seed_decides() -> None:
    rows = chosen("class-balanced", n=25, seed=2)
    order = draw_order(56, 2)
    for label, count in counts(rows).items():
        assert [row for row in rows if LABELS[row] == label] == [row for row in order if LABELS[row] == label][:count]
    assert rows == [row for row in order if row in set(rows)]


def test_the_seed_decides_which_classes_give_one_more() -> None:
    favoured = {max(range(2), key=counts(chosen("class-balanced", n=21, seed=seed)).__getitem__) for seed in range(20)}
    assert favoured == {0, 1}


def test_shared_evenly() -> None:
    assert even_quotas(7, {0: 9, 1: 9, 2: 9}) == {0: 3, 1: 2, 2: 2}
    assert even_quotas(2, {5: 9, 1: 9, 2: 9}) == {5: 1, 1: 1, 2: 0}
    assert even_quotas(9, {0: 1, 1: 0, 2: 3}) == {0: 1, 1: 0, 2: 3}, "no more than there are"
    assert even_quotas(5, {}) == {}


@pytest.mark.parametrize("labels", [LABELS, [0, 2, 4] * 5, [1] * 6])
def test_half_class_is_a_half_of_the_classes_that_have_rows(labels: list[int]) -> None:
    there = sorted(set(labels))
    sizes = Counter(labels)
    halves = set()
    for seed in range(20):
        half = Strategy("half-class", seed=seed).classes(sizes)
        assert len(half) == (len(there) + 1) // 2
        order = [row for row in draw_order(len(labels), seed) if labels[row] in half]
        assert chosen("half-class", labels, n=4, seed=seed) == order[:4]
        assert len(set(chosen("half-class", labels, n=len(order), seed=seed))) == len(order)
        halves.add(tuple(sorted(half)))
    assert len(halves) > 1 or len(there) == 1


def test_one_class_is_of_a_class_that_has_enough() -> None:
    found = [counts(chosen("one-class", n=11, seed=seed)) for seed in range(30)]
    assert all(set(count.values()) == {11} for count in found)
    assert {label for count in found for label in count} == {0, 1, 3}


@pytest.mark.parametrize("name", ["random", "class-balanced"])
def test_per_class_of_all(name: str) -> None:
    labels = [0, 1, 2] * 8
    assert counts(chosen(name, labels, per_class=3), labels) == {0: 3, 1: 3, 2: 3}


def test_per_class_of_some() -> None:
    assert sorted(counts(chosen("half-class", per_class=1)).values()) == [1, 1, 1]
    assert list(counts(chosen("one-class", per_class=12, seed=1)).values()) == [12]


def reference_distances(values: np.ndarray, labels: Sequence[int]) -> list[float]:
    """One pair of vectors after the other."""
    unit = [row / np.sqrt(sum(x * x for x in row)) for row in values]
    distances = []
    for row, label in zip(unit, labels, strict=True):
        same = [other for other, of in zip(unit, labels, strict=True) if of == label]
        centre = sum(same) / len(same)
        distances.append(float(np.sqrt(sum((x - y) ** 2 for x, y in zip(row, centre, strict=True)))))
    return distances


def test_distances_against_a_slow_reference() -> None:
    values = features(56)
    values[3] *= 100  # length does not count
    found = centroid_distances(torch.from_numpy(values), LABELS)
    assert found == pytest.approx(reference_distances(values, LABELS), rel=6e-6, abs=1e-6)
    assert all(float(f"{distance:.6g}") == distance for distance in found)


@pytest.mark.parametrize("name", ["centroid-near", "centroid-far"])
@pytest.mark.parametrize("options", [{"n": 1}, {"n": 18}, {"n": 56}, {"per_class": 1}])
def test_centroids_against_a_slow_reference(name: str, options: dict[str, int]) -> None:
    values = features(56)
    candidates = drawn(name, **options)
    assert candidates.needs_features
    assert sorted(candidates.samples.indices) == list(range(56))
    result = candidates.chosen(torch.from_numpy(values[list(candidates.samples.indices)]))
    assert not result.needs_features
    assert result.chosen(torch.zeros(0)) is result
    rows = result.samples.indices
    assert result.samples.labels == tuple(LABELS[row] for row in rows)
    assert counts(rows) == counts(chosen("class-balanced", **options))
    distances = reference_distances(values, LABELS)
    for label, count in counts(rows).items():
        members = sorted((row for row in range(56) if LABELS[row] == label), key=distances.__getitem__)
        expected = members[:count] if name == "centroid-near" else members[-count:]
        assert {row for row in rows if LABELS[row] == label} == set(expected)
    assert list(rows) == [row for row in draw_order(56, 0) if row in rows]


@pytest.mark.parametrize("name", ["centroid-near", "centroid-far"])
def test_noise_in_the_last_bits_changes_nothing(name: str) -> None:
    """Equal features are equally far, however their arithmetic was rounded: the seed's order decides."""
    values = np.tile(features(4), (14, 1))
    one, other = (
        drawn(name, n=20).chosen(torch.from_numpy(values * (1 + 1e-12 * np.random.default_rng(seed).normal(size=6))))
        for seed in (1, 2)
    )
    assert one.samples.indices == other.samples.indices
    same = drawn(name, n=20).chosen(torch.ones(56, 3) + 1e-9 * torch.rand(56, 3, dtype=torch.float64))
    assert list(same.samples.indices) == chosen("class-balanced", n=20)


def test_features_on_another_scale_and_in_float32() -> None:
    values = torch.from_numpy(features(56))
    one, other = (drawn("centroid-near", n=20).chosen(some) for some in (values, (3 * values).float()))
    assert one.samples.indices == other.samples.indices


def test_features_must_fit_the_candidates() -> None:
    with pytest.raises(ValueError, match="56 candidates"):
        drawn("centroid-near", n=5).chosen(torch.zeros(5, 3))


def test_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampling.CANDIDATES == 2000
    labels = [0, 1] * 3000
    assert chosen("centroid-far", labels, n=7) == draw_order(6000, 0)[:2000]
    assert chosen("centroid-far", labels, n=300) == draw_order(6000, 0)[:3000]
    assert chosen("centroid-far", labels, n=700) == draw_order(6000, 0)
    monkeypatch.setattr(sampling, "CANDIDATES", 10)
    labels = [0] * 990 + [1] * 10
    found = counts(chosen("centroid-near", labels, n=20), labels)
    assert found[1] == 10, "a rare class is there as often as it is wanted"
    assert 190 <= found[0] <= 200


GOLDEN = {
    "random": [9, 0, 2, 15, 3, 23],
    "class-balanced": [9, 0, 2, 15, 3, 4],
    "centroid-near": [9, 7, 12, 10, 11, 8],
    "centroid-far": [23, 18, 19, 20, 16, 21],
    "half-class": [0, 15, 3, 23, 7, 19],
    "one-class": [15, 3, 23, 7, 19, 11],
}


def golden(name: str) -> list[int]:
    labels = [row % 4 for row in range(24)]
    found = drawn(name, labels, n=6, seed=7, evaluate=False)
    if found.needs_features:
        angles = torch.arange(24, dtype=torch.float64)[list(found.samples.indices)] ** 2 / 100
        found = found.chosen(torch.stack([angles.cos(), angles.sin()], 1))
    return list(found.samples.indices)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_a_seed_means_is_fixed_for_ever(name: str) -> None:
    """Literal values: a change of Python, numpy or torch must not change which samples a seed means, nor do the hashes
    of strings, which are others in every run."""
    assert golden(name) == GOLDEN[name]


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if not name.startswith("centroid")])
def test_seeds_change_the_draw(name: str) -> None:
    assert len({tuple(chosen(name, n=4, seed=seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("name", SAMPLINGS)
def test_more_than_there_are(name: str) -> None:
    with pytest.raises(SampleCountError) as caught:
        drawn(name, n=57)
    if name == "one-class":
        assert caught.value.cause == (
            "57 samples of one class were asked for and the largest, 'ant', has 20 in 'train'"
        )
        assert caught.value.remedy == "use -n 20 or less"
    else:
        assert caught.value.cause == "57 samples were asked for and split 'train' of 'data' has 56 with labels"
        assert caught.value.remedy == "use -n 56 or less"


def test_more_than_the_half_has() -> None:
    left = sum(SIZES[label] for label in Strategy("half-class").classes(Counter(LABELS)))
    assert len(drawn("half-class", n=left).samples) == left
    with pytest.raises(SampleCountError, match=f"the half of the classes that was drawn has {left} in") as caught:
        drawn("half-class", n=left + 1)
    assert caught.value.remedy == f"use -n {left} or less"


@pytest.mark.parametrize("name", ["random", "class-balanced", "centroid-near", "centroid-far"])
def test_more_per_class_than_there_are(name: str) -> None:
    with pytest.raises(SampleCountError, match="2 samples a class were asked for and 'elk' has 1 in 'train'") as caught:
        drawn(name, per_class=2)
    assert caught.value.remedy == "use -k 1 or less, or -n"
    with pytest.raises(SampleCountError, match="1 samples a class were asked for and 'elk' has 0"):
        drawn(name, LABELS[:-1], per_class=1)


def test_more_per_class_than_some_have() -> None:
    with pytest.raises(SampleCountError, match="21 samples of one class .* the largest, 'ant', has 20") as caught:
        drawn("one-class", per_class=21)
    assert caught.value.remedy == "use -k 20 or less"
    with pytest.raises(SampleCountError, match="21 samples a class were asked for and"):
        drawn("half-class", per_class=21)
    assert len(drawn("half-class", LABELS[:-1], per_class=4).samples) == 8, "a class without rows is no class"


def test_classes_that_are_wanted_evenly() -> None:
    wanted = Strategy("class-balanced", n=10).requirement([0, 1, 2])
    assert wanted == RequiredRows(10, 4, [0, 1, 2], evenly=True)
    assert wanted.is_met(Counter({0: 4, 1: 3, 2: 3}))
    assert not wanted.is_met(Counter({0: 40, 1: 3}))
    assert wanted.suffices(Counter({0: 40, 1: 3})), "but it need not be"
    assert not wanted.suffices(Counter({0: 4, 1: 3}))
    assert not wanted.may_be_within((0, 0), Counter({0: 40, 1: 3}))
    assert wanted.may_be_within((0, 2), Counter({0: 40, 1: 3}))
    assert Strategy("centroid-far", n=3).requirement(list(range(9))).is_met(Counter({2: 1, 5: 1, 8: 1}))


def test_classes_that_are_not_known_before() -> None:
    wanted = Strategy("one-class", n=10).requirement(NAMES)
    assert wanted.is_met(Counter({"bee": 10}))
    assert not wanted.is_met(Counter({"bee": 9, "cat": 9}))
    half = Strategy("half-class", n=10).requirement(NAMES)
    first = NAMES[Strategy("half-class").classes({0: 1, 1: 1})[0]]
    other = "bee" if first == "ant" else "ant"
    assert half.is_met(Counter({first: 10, other: 1}))
    assert not half.is_met(Counter({first: 9, other: 99}))


def test_importing_is_light() -> None:
    code = "import sys, hf_bico.data.sampling, hf_bico.data.augmentation; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_open_data_is_not_changed_by_a_draw() -> None:
    rows = [{"image": torch.zeros(3, 2, 2), "label": label} for label in LABELS]
    data = open_data(rows, Settings(class_names=NAMES))
    assert data.labelled
    assert data.order("train", 0) == draw_order(56, 0)
