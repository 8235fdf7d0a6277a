"""Diagnosing two models: every number is that of a slow look at the activations, and nothing is left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, CLIPModel

import hf_bico
from hf_bico.cli.main import main
from hf_bico.errors import (
    BaseMismatchError,
    MemoryExhaustedError,
    OutputExistsError,
    RecordError,
    UnsuitableMethodError,
    UsageError,
)
from hf_bico.experiments.diagnose.diagnosis import (
    INITIAL_FILE,
    JSON_FILE,
    MARKDOWN_FILE,
    NOT_DEFINED,
    PICTURES,
    Diagnosis,
    block_rows,
    cost_lines,
    output_rows,
)
from hf_bico.experiments.diagnose.findings import OutputLikeness, SitePlace, by_place, cost_of
from hf_bico.experiments.diagnose.run import COMPARED, _memory_groups
from hf_bico.models.layout import Site, SitePair, Slot
from support import hub_scenes, reference
from support.hub import Hub
from support.language_toys import fine_tuned, sentences, write_decoder, write_t5
from support.paper import PAPER
from support.rotated_clips import CUT, TOY, Rotated, change_sites
from support.scenes import SOURCE, TARGET, Scene, make_scene
from support.toys import CLASS_NAMES, WRITERS, State, Toy, changed, random_rows, random_state, write_open_clip

ROWS = 24


# A rotated copy of a model


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Rotated:
    return Rotated(tmp_path_factory.mktemp("rotated"), torch.float64)


def of_copy(case: Rotated, source: Path, **options: Any) -> Diagnosis:
    """Of a model and its rotated copy."""
    where: dict[str, Any] = {"to": case.target, "base": case.base, "data": case.rows, "class_names": CLASS_NAMES}
    return hf_bico.diagnose(source, **where, n=len(case.rows), dtype="float64", **options)


@pytest.mark.parametrize("tuned", [False, True], ids=["pretrained alone", "fine-tuned"])
def test_a_rotated_copy_sees_all_alike_once_it_is_turned(rotated: Rotated, tuned: bool, tmp_path: Path) -> None:
    source = rotated.base
    if tuned:
        state = change_sites(rotated.state, rotated.random_changes(), absolute=False)
        source = write_open_clip(tmp_path / "tuned", TOY, state)
    found = of_copy(rotated, source)
    assert len(found.inputs) == 4 * TOY.blocks + 1, "q, k and v read one activation"
    for one in found.inputs:
        assert one.cosine is not None
        assert one.cosine < 0.5, one.name
        assert one.cosine_aligned == pytest.approx(1.0, abs=1e-6), one.name
        assert one.cka == pytest.approx(1.0, abs=1e-6), one.name
        assert one.cka_aligned == pytest.approx(1.0, abs=1e-6), one.name
    assert [site.score_in for site in found.sites] == pytest.approx([1.0] * len(found.sites), abs=1e-6)
    first, *rest = (one.direction for one in found.drift)
    assert first == 0.0, "nothing changed before it"
    assert [direction > 0 for direction in rest] == [tuned] * len(rest)
    assert (sum(site.energy for site in found.sites) > 0.99) is tuned


def test_each_input_tells_who_reads_it_and_how_many_rows_were_paired(rotated: Rotated) -> None:
    found = {one.name: one for one in of_copy(rotated, rotated.base).inputs}
    shared, last = found["blocks.0.attn.in"], found["proj"]
    assert shared.roles == ["attn.q", "attn.k", "attn.v"]
    assert (shared.place, last.place) == (SitePlace("", 0), SitePlace("", None))
    assert (shared.rows, last.rows) == (len(rotated.rows) * 17, len(rotated.rows)), "tokens, and pooled samples"
    assert shared.widths == (16, 16)
    assert found["blocks.2.mlp.down"].widths == (32, 32)


# Two models of other widths and other grids, against literal ones


NARROW, WIDE = Toy(), Toy(width=24, heads=3, grid=2, patch=8, blocks=3)
"""Both take images of 16 x 16."""


class Pair:
    """Two random models, their fine-tuned copies and a checkpoint on the way there, in float64."""

    def __init__(self, folder: Path) -> None:
        self.base, self.target = random_state(NARROW, 0, torch.float64), random_state(WIDE, 1, torch.float64)
        self.tuned, self.tuned_target = changed(self.base, 2, 0.05), changed(self.target, 3, 0.05)
        self.halfway = {name: (tensor + self.tuned[name]) / 2 for name, tensor in self.base.items()}
        states = {
            "base": (NARROW, self.base),
            "target": (WIDE, self.target),
            "tuned": (NARROW, self.tuned),
            "halfway": (NARROW, self.halfway),
            "target-tuned": (WIDE, self.tuned_target),
        }
        self.folders = {name: write_open_clip(folder / name, *how) for name, how in states.items()}
        self.rows = random_rows(ROWS, NARROW.image_size)
        self.pixels = torch.stack([row["image"] for row in self.rows]).double()

    def asked(self, **options: Any) -> dict[str, Any]:
        """What a port or a diagnosis of them is given."""
        where: dict[str, Any] = {"to": self.folders["target"], "base": self.folders["base"], "data": self.rows}
        return {**where, "class_names": CLASS_NAMES, "n": ROWS, "dtype": "float64", **options}

    def diagnosis(self, source: str = "tuned", **options: Any) -> Diagnosis:
        return hf_bico.diagnose(self.folders[source], **self.asked(**options))

    def inputs(self, state: State, toy: Toy = NARROW) -> dict[str, Tensor]:
        """What every site reads, by a literal transformer."""
        _, read, _ = reference.vision_transformer(state, toy, self.pixels, toy.blocks)
        return {name: rows.detach() for name, rows in read.items()}

    def outputs(self, state: State) -> dict[str, Tensor]:
        """What every site of the target writes."""
        _, _, written = reference.vision_transformer(state, WIDE, self.pixels, WIDE.blocks)
        return {name: rows.detach() for name, rows in written.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def diagnosis(pair: Pair) -> Diagnosis:
    """Of all that can be looked at."""
    folders = pair.folders
    return pair.diagnosis(fine_tuned=folders["target-tuned"], checkpoints=[folders["base"], folders["halfway"]])


def site_of(name: str) -> str:
    """A site that reads an activation."""
    return name.replace("attn.in", "attn.k")


def mean_cosine(x: Tensor, y: Tensor) -> float:
    return float(functional.cosine_similarity(x.flatten(0, -2), y.flatten(0, -2), dim=-1).mean())


def test_cka_and_cosines_are_those_of_the_activations(pair: Pair, diagnosis: Diagnosis) -> None:
    source, target = pair.inputs(pair.base), pair.inputs(pair.target, WIDE)
    assert [one.name for one in diagnosis.inputs][:2] == ["blocks.0.attn.in", "blocks.0.attn.out"]
    assert len(diagnosis.inputs) == 4 * WIDE.blocks + 1
    for one in diagnosis.inputs:
        site = site_of(one.name)
        origin = reference.source_site(site, NARROW.blocks, WIDE.blocks)
        assert site_of(one.source) == origin
        x, y = reference.resized(source[origin], NARROW.grid, WIDE.grid), target[site]
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        u, s, v = np.linalg.svd((x.T @ y).numpy(), full_matrices=False)
        turn = torch.from_numpy(u[:, s > CUT * s[0]] @ v[s > CUT * s[0]])
        assert one.rows == len(x)
        assert one.widths == (x.shape[1], y.shape[1])
        assert one.cosine is None
        assert one.cka == pytest.approx(reference.cka(x, y), abs=1e-9), one.name
        assert one.cka_aligned == pytest.approx(reference.cka(x @ turn, y), abs=1e-9), one.name
        assert one.cosine_aligned == pytest.approx(mean_cosine(x @ turn, y), abs=1e-9), one.name
    assert max(one.cka for one in diagnosis.inputs) < 0.9, "two random models are not alike"


def test_cosine_of_one_width_is_that_of_the_coordinates_as_they_are(pair: Pair, tmp_path: Path) -> None:
    state = random_state(NARROW, 5, torch.float64)
    twin = write_open_clip(tmp_path / "twin", NARROW, state)
    source, target = pair.inputs(pair.base), pair.inputs(state)
    for one in pair.diagnosis(to=twin).inputs:
        expected = mean_cosine(source[site_of(one.name)], target[site_of(one.name)])
        assert one.cosine == pytest.approx(expected, abs=1e-9), one.name
        assert one.cosine_aligned > expected, "that is what the map is for"


def test_drift_is_exactly_nothing_where_nothing_changed(pair: Pair, diagnosis: Diagnosis) -> None:
    of_base = [one for one in diagnosis.drift if one.checkpoint == "base"]
    assert len(of_base) == 4 * NARROW.blocks + 1
    assert {(one.direction, one.magnitude) for one in of_base} == {(0.0, 0.0)}
    unchanged = pair.diagnosis("base")
    assert unchanged.checkpoints == ["base"]
    assert {(one.direction, one.magnitude) for one in unchanged.drift} == {(0.0, 0.0)}
    assert len(unchanged.inputs) == len(diagnosis.inputs), "all sites are looked at"
    assert unchanged.inputs == diagnosis.inputs, "what was learnt does not show in the pretrained models"


def test_drift_is_the_mean_of_both_formulas_over_the_activations(pair: Pair, diagnosis: Diagnosis) -> None:
    before = pair.inputs(pair.base)
    assert diagnosis.checkpoints == ["base", "halfway", "tuned"]
    for checkpoint, state in (("halfway", pair.halfway), ("tuned", pair.tuned)):
        now = pair.inputs(state)
        found = [one for one in diagnosis.drift if one.checkpoint == checkpoint]
        assert len(found) == 4 * NARROW.blocks + 1
        for one in found:
            x, y = (rows[site_of(one.name)].flatten(0, -2) for rows in (before, now))
            direction = 1 - functional.cosine_similarity(x, y, dim=-1)
            magnitude = (y.norm(dim=-1) - x.norm(dim=-1)).abs() / x.norm(dim=-1)
            assert one.direction == pytest.approx(float(direction.mean()), rel=1e-8), one.name
            assert one.magnitude == pytest.approx(float(magnitude.mean()), rel=1e-8), one.name
            assert one.direction > 0


def of_model(diagnosis: Diagnosis, name: str) -> dict[str, float]:
    return {one.name: one.cosine for one in diagnosis.outputs if one.model == name}


def test_outputs_of_the_untouched_target_are_as_far_as_fine_tuning_went(pair: Pair, diagnosis: Diagnosis) -> None:
    assert diagnosis.fine_tuned == "target-tuned"
    assert diagnosis.models == ["target", *COMPARED]
    before, tuned = pair.outputs(pair.target), pair.outputs(pair.tuned_target)
    found = of_model(diagnosis, "target")
    assert len(found) == 6 * WIDE.blocks + 1
    for name, cosine in found.items():
        assert cosine == pytest.approx(mean_cosine(before[name], tuned[name]), abs=1e-9), name
        assert cosine < 1


@pytest.mark.parametrize("method", [*COMPARED, "bico-path"])
def test_outputs_of_a_method_are_those_of_what_it_ports(pair: Pair, diagnosis: Diagnosis, method: str) -> None:
    if method not in COMPARED:  # which alone sees altered copies of few samples
        tuned_target = pair.folders["target-tuned"]
        diagnosis = pair.diagnosis(fine_tuned=tuned_target, methods=[*COMPARED, method])
    ported = hf_bico.port(pair.folders["tuned"], **pair.asked(method=method, alpha=1.0, evaluate=False))
    state = {name: tensor.clone() for name, tensor in pair.target.items()}
    for name, change in ported.task_vector.items():
        state[name] += change
    tuned, now = pair.outputs(pair.tuned_target), pair.outputs(state)
    assert of_model(diagnosis, method)
    for name, cosine in of_model(diagnosis, method).items():
        assert cosine == pytest.approx(mean_cosine(now[name], tuned[name]), abs=1e-9), name


def test_a_target_that_is_its_own_fine_tune_writes_the_same(pair: Pair) -> None:
    found = pair.diagnosis(fine_tuned=pair.folders["target"], methods=["bico"])
    assert set(of_model(found, "target").values()) == {1.0}
    assert max(of_model(found, "bico").values()) < 1.0, "what is carried moves it away"


def test_without_a_change_to_carry_the_target_stands_alone_beside_its_fine_tune(pair: Pair) -> None:
    found = pair.diagnosis("base", fine_tuned=pair.folders["target-tuned"])
    assert found.models == ["target"]
    assert max(of_model(found, "target").values()) < 1.0


def test_alpha_is_that_of_the_models_whose_outputs_are_compared(pair: Pair, diagnosis: Diagnosis) -> None:
    nothing = pair.diagnosis(fine_tuned=pair.folders["target-tuned"], methods=["bico"], alpha=1e-12)
    for name, cosine in of_model(nothing, "bico").items():
        assert cosine == pytest.approx(of_model(diagnosis, "target")[name], abs=1e-9)
    assert of_model(nothing, "bico") != of_model(diagnosis, "bico")


@pytest.mark.parametrize("method", ["gradfix", "transfusion"])
def test_a_method_that_cannot_carry_between_these_models_is_refused(pair: Pair, method: str) -> None:
    with pytest.raises(UnsuitableMethodError):
        pair.diagnosis(fine_tuned=pair.folders["target-tuned"], methods=[method])


def test_checkpoints_of_one_name_are_told_apart(pair: Pair, diagnosis: Diagnosis, tmp_path: Path) -> None:
    far = write_open_clip(tmp_path / "tuned", NARROW, changed(pair.base, 2, 0.5))
    head, first, *_ = block_rows(pair.diagnosis(checkpoints=[far]))
    at = head.index("Δdirection")
    assert first[at] == block_rows(diagnosis)[1][at], "that of the source, which is the last"


def test_drift_of_a_deeper_text_tower_is_that_of_the_source_block_which_each_one_takes(tmp_path: Path) -> None:
    shallow, deep = NARROW.but(text_blocks=2), WIDE.but(text_blocks=3)
    base = random_state(shallow, 0)
    folders = [
        write_open_clip(tmp_path / "tuned", shallow, changed(base, 2, 0.05, only="transformer.")),
        write_open_clip(tmp_path / "target", deep, random_state(deep, 1)),
        write_open_clip(tmp_path / "base", shallow, base),
    ]
    rows = [{**row, "label": CLASS_NAMES[row["label"]]} for row in random_rows(8, NARROW.image_size)]
    found = hf_bico.diagnose(folders[0], folders[1], base=folders[2], data=rows, n=8, tower="text")
    head, *table = block_rows(found)
    drift = {row[0]: row[head.index("Δdirection")] for row in table}
    assert drift["text 2"] == drift["text 1"] != drift["text 0"]


def test_ranks_scores_and_energies_are_those_of_the_port(pair: Pair, diagnosis: Diagnosis) -> None:
    ported = hf_bico.port(pair.folders["tuned"], **pair.asked(**PAPER, evaluate=False))
    assert diagnosis.sites == list(ported.report.sites)
    assert diagnosis.layers == [0, 1, 1], "halves are rounded up"


def test_the_maps_are_those_of_the_method_and_completion_that_were_asked_for(pair: Pair, diagnosis: Diagnosis) -> None:
    found = pair.diagnosis(method="theseus", completion="svd")
    assert (found.method, found.completion) == ("theseus", "svd")
    scores = [site.score_out for site in found.sites]
    assert scores != [site.score_out for site in diagnosis.sites], "of outputs, and not of gradients"
    assert found.inputs != diagnosis.inputs, "completed maps drop nothing"
    assert [one.cka for one in found.inputs] == pytest.approx([one.cka for one in diagnosis.inputs], abs=1e-12)


# Limited memory, texts, models of the caller's own


def test_only_as_many_sums_of_products_are_kept_as_there_is_room_for() -> None:
    def site(number: int, width: int) -> Site:
        return Site(f"{number}", "attn.q", number, f"{number}.in", (width, width), Slot(f"{number}"))

    pairs = [SitePair(site(number, 10), site(number, 20)) for number in range(5)]
    each = 8 * (10 * 10 + 20 * 20 + 3 * 10 * 20)
    sizes = {room: [len(some) for some in _memory_groups(pairs, room)] for room in (0, each, 2 * each, 5 * each)}
    assert sizes == {0: [1] * 5, each: [1] * 5, 2 * each: [2, 2, 1], 5 * each: [5]}
    assert [pair for some in _memory_groups(pairs, 2 * each) for pair in some] == pairs


def test_little_memory_gives_the_same_numbers(pair: Pair, diagnosis: Diagnosis) -> None:
    with pytest.raises(MemoryExhaustedError, match="in the leanest way"):
        pair.diagnosis(memory=1000)
    watched: list[tuple[str, int, int]] = []
    tight = pair.diagnosis(memory=1_100_000, progress=lambda *told: watched.append(told))
    assert max(total for stage, _, total in watched if stage == "similarity") > 1, "in several groups"
    assert [one.name for one in tight.inputs] == [one.name for one in diagnosis.inputs]
    for one, other in zip(tight.inputs, diagnosis.inputs, strict=True):
        assert one.cka == pytest.approx(other.cka, abs=1e-12)
        assert one.cka_aligned == pytest.approx(other.cka_aligned, abs=1e-9)
        assert one.cosine_aligned == pytest.approx(other.cosine_aligned, abs=1e-9)


def test_batches_do_not_show_in_any_number(pair: Pair, diagnosis: Diagnosis) -> None:
    found = pair.diagnosis(batch_size=5, fine_tuned=pair.folders["target-tuned"], methods=["bico"])
    assert [one.cka for one in found.inputs] == pytest.approx([one.cka for one in diagnosis.inputs], abs=1e-9)
    assert of_model(found, "bico") == pytest.approx(of_model(diagnosis, "bico"), abs=1e-9)
    assert [one.direction for one in found.drift] == pytest.approx(
        [one.direction for one in diagnosis.drift if one.checkpoint == "tuned"], rel=1e-9
    )


LANGUAGE: dict[str, tuple[Callable[..., Path], Any, Callable[[int, str], dict[str, str]]]] = {
    "decoder": (write_decoder, AutoModelForCausalLM, lambda _, text: {"text": text}),
    "t5": (write_t5, AutoModelForSeq2SeqLM, lambda number, text: {"text": text, "label": ("yes", "no")[number % 2]}),
}


@pytest.mark.parametrize("kind", LANGUAGE)
def test_padding_never_counts(kind: str, tmp_path: Path) -> None:
    write, auto, row = LANGUAGE[kind]
    base, target = write(tmp_path / "base"), write(tmp_path / "target", width=24, blocks=3, seed=1)
    tuned, tuned_target = fine_tuned(base, tmp_path / "tuned", auto), fine_tuned(target, tmp_path / "other", auto)
    texts = sentences(8)
    rows = [row(number, text) for number, text in enumerate(texts)]
    assert len({len(text) for text in texts}) > 2
    alone, together = (
        hf_bico.diagnose(
            *(tuned, target),
            **{"base": base, "data": rows, "n": 8, "dtype": "float64", "batch_size": size},
            **{"fine_tuned": tuned_target, "methods": ["bico"]},
        )
        for size in (1, 4)
    )
    tokens = sum(len(text) + (kind == "t5") for text in texts)  # a T5 also reads the end of a text
    assert {one.rows for one in together.inputs} == {tokens}
    for one, other in zip(alone.inputs, together.inputs, strict=True):
        assert other.cka == pytest.approx(one.cka, abs=1e-9)
        assert other.cka_aligned == pytest.approx(one.cka_aligned, abs=1e-9)
        assert other.cosine_aligned == pytest.approx(one.cosine_aligned, abs=1e-9)
    assert [one.direction for one in together.drift] == pytest.approx([one.direction for one in alone.drift], rel=1e-9)
    for model in ("target", "bico"):
        assert of_model(together, model) == pytest.approx(of_model(alone, model), abs=1e-9)
    assert together.cost.rows == (tokens, tokens)


def test_loaded_models_are_left_bit_for_bit_as_they_were(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, ("transformers", "transformers"))
    models = {name: CLIPModel.from_pretrained(getattr(scene, name)) for name in ("base", "tuned", "target")}
    models["base"].train()
    models["target"].eval()
    before = {name: {key: tensor.clone() for key, tensor in m.state_dict().items()} for name, m in models.items()}
    hf_bico.diagnose(
        models["tuned"],
        to=models["target"],
        base=models["base"],
        fine_tuned=CLIPModel.from_pretrained(
            WRITERS["transformers"](tmp_path / "other", TARGET, changed(random_state(TARGET, 1), 3))
        ),
        checkpoints=[models["tuned"]],
        data=random_rows(8, TARGET.image_size),
        **{"class_names": CLASS_NAMES, "n": 8},
    )
    for name, model in models.items():
        assert all(torch.equal(tensor, before[name][key]) for key, tensor in model.state_dict().items()), name
        assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
        assert not model._forward_hooks
    assert models["base"].training
    assert not models["target"].training


# What it costs


def test_the_cost_of_two_sites_is_that_of_the_formulas() -> None:
    def site(name: str, shape: tuple[int, int]) -> Site:
        return Site(name, name, 0, f"{name}.in", shape, Slot(name))

    pairs = [
        SitePair(site("up", (6, 2)), site("up", (12, 3))),
        SitePair(site("down", (2, 6)), site("down", (3, 12))),
    ]
    found = cost_of(pairs, (100, 300), (7, 5), 5, {"align": 0.5})
    assert found.a_pass == 6 * 100 + 6 * 300
    assert found.training == 32_000 * 300
    assert found.calibration == 6 * (100 * 7 + 300 * 5)
    # maps of 2 x 3 and 6 x 12, once as inputs and once as outputs
    assert found.covariances == 5 * 2 * (2 * 3 + 6 * 12)
    assert found.maps == 2 * (2 * 2 * 3 + 6 * 6 * 12)
    # R_out^T tau_A, then that times R_in
    assert found.products == (12 * 6 * 2 + 12 * 2 * 3) + (3 * 2 * 6 + 3 * 6 * 12)
    assert found.seconds == {"align": 0.5}


def test_the_cost_of_a_diagnosis_counts_the_weights_and_rows_of_its_models(pair: Pair, diagnosis: Diagnosis) -> None:
    cost = diagnosis.cost
    counts = [sum(prod(tensor.shape) for tensor in state.values()) for state in (pair.base, pair.target)]
    assert cost.parameters == tuple(counts)
    assert cost.a_pass == 6 * sum(counts)
    assert cost.training == 32_000 * counts[1]
    assert cost.rows == (ROWS * 17, ROWS * 5), "tokens of either grid"
    assert cost.seconds.keys() == {"calibrate", "align", "transport"}


def test_the_ratio_of_the_costs_follows_from_the_figures_that_are_printed_beside_it(diagnosis: Diagnosis) -> None:
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    said = cost_lines(diagnosis.cost)[0]
    found = re.search(r"P_B = (\S+) (\w) operations, .* 32,000 P_B = (\S+) (\w), (\S+) times", said)
    assert found is not None
    passed, trained = float(found[1]) * units[found[2]], float(found[3]) * units[found[4]]
    assert float(found[5].replace(",", "")) == pytest.approx(trained / passed, rel=0.06)


# Tables and files


def test_the_table_has_the_means_of_every_block(diagnosis: Diagnosis) -> None:
    head, *rows = block_rows(diagnosis)
    assert [row[0] for row in rows] == ["0", "1", "2", "out"]
    at = {name: [row[head.index(name)] for row in rows] for name in head}
    means = by_place(diagnosis.inputs, lambda one: one.cka)
    assert at["CKA"] == [
        f"{means[place]:.3f}" for place in (SitePlace("", 0), SitePlace("", 1), SitePlace("", 2), SitePlace("", None))
    ]
    assert at["cosine"] == [NOT_DEFINED] * 4, "coordinates of other widths do not compare"
    last = by_place((one for one in diagnosis.drift if one.checkpoint == "tuned"), lambda one: one.direction)
    taken = [SitePlace("", 0), SitePlace("", 1), SitePlace("", 1), SitePlace("", None)]
    assert at["Δdirection"] == [f"{last[place]:.3f}" for place in taken], "of the source's block that each one takes"
    text = diagnosis.table()
    assert text.count(NOT_DEFINED) == 4
    assert output_rows(diagnosis)[0] == ["outputs, block", "target, pretrained", "input maps only", "THESEUS", "BiCo"]
    assert "THESEUS" in text


def test_energy_of_a_block_is_that_of_the_source_sites_which_it_takes(diagnosis: Diagnosis) -> None:
    head, *rows = block_rows(diagnosis)
    second = {site.source: site.energy for site in diagnosis.sites if site.name.startswith("blocks.2.")}
    assert rows[2][head.index("energy")] == f"{sum(second.values()):.1%}"
    assert {name.split(".")[1] for name in second} == {"1"}


def test_a_diagnosis_is_read_as_it_was_written(diagnosis: Diagnosis, pair: Pair) -> None:
    for one in (diagnosis, pair.diagnosis("base")):
        assert Diagnosis.from_json(one.to_json()) == one
        assert "NaN" not in one.to_json()


def test_what_is_no_diagnosis_is_said(diagnosis: Diagnosis, tmp_path: Path) -> None:
    raw = json.loads(diagnosis.to_json())
    for text in ("{", "[]", "{}", json.dumps({**raw, "schema": 99}), json.dumps({**raw, "inputs": [{"name": 3}]})):
        with pytest.raises(RecordError, match="diagnosis"):
            Diagnosis.from_json(text)
    with pytest.raises(RecordError, match=r"holds no diagnosis\.json"):
        Diagnosis.load(tmp_path)


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_what_was_found_is_written_with_the_pictures_that_apply(diagnosis: Diagnosis, tmp_path: Path) -> None:
    written = diagnosis.save(tmp_path / "all")
    assert names_in(tmp_path / "all") == {JSON_FILE, MARKDOWN_FILE, *PICTURES} == {file.name for file in written}
    assert Diagnosis.load(tmp_path / "all") == diagnosis
    page = (tmp_path / "all" / MARKDOWN_FILE).read_text()
    assert page.startswith("# base to target")
    assert all(f"({name})" in page for name in PICTURES)
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in written if file.suffix == ".png")
    replace(diagnosis, outputs=[], fine_tuned=None, drift=[], checkpoints=[]).save(tmp_path / "plain")
    assert names_in(tmp_path / "plain") == {JSON_FILE, MARKDOWN_FILE, *PICTURES} - {"outputs.png", "drift.png"}
    assert "outputs.png" not in (tmp_path / "plain" / MARKDOWN_FILE).read_text()


def test_another_diagnosis_beside_it_is_drawn_too(diagnosis: Diagnosis, tmp_path: Path) -> None:
    diagnosis = replace(diagnosis, outputs=[], drift=[], checkpoints=[])
    other = replace(diagnosis, target="other")
    diagnosis.save(tmp_path / "both", beside=[other])
    assert INITIAL_FILE in names_in(tmp_path / "both")
    assert f"({INITIAL_FILE})" in (tmp_path / "both" / MARKDOWN_FILE).read_text()
    diagnosis.save(tmp_path / "both", overwrite=True)
    assert INITIAL_FILE not in names_in(tmp_path / "both"), "nothing of the earlier one is left"


def test_only_its_own_folder_is_replaced_and_only_when_told(diagnosis: Diagnosis, tmp_path: Path) -> None:
    diagnosis = replace(diagnosis, outputs=[], drift=[], checkpoints=[])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match="holds no diagnosis"):
            diagnosis.save(tmp_path / "mine", overwrite=overwrite)
    assert names_in(tmp_path / "mine") == {"notes.txt"}
    diagnosis.save(tmp_path / "own")
    before = (tmp_path / "own" / JSON_FILE).read_text()
    with pytest.raises(OutputExistsError, match="holds a diagnosis"):
        replace(diagnosis, target="another").save(tmp_path / "own")
    assert (tmp_path / "own" / JSON_FILE).read_text() == before
    replace(diagnosis, target="another").save(tmp_path / "own", overwrite=True)
    assert Diagnosis.load(tmp_path / "own").target == "another"


def test_an_output_over_nothing_has_no_rows(diagnosis: Diagnosis) -> None:
    assert output_rows(replace(diagnosis, outputs=[])) == []
    alone = replace(diagnosis, outputs=[OutputLikeness(name="proj", model="target", cosine=0.5)])
    assert output_rows(alone) == [["outputs, block", "target, pretrained"], ["out", "0.500"]]


# The command line


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def tuned_target(scene: Scene) -> Path:
    return write_open_clip(scene.folder / "target-tuned", TARGET, changed(random_state(TARGET, 1), 3))


@pytest.fixture(scope="module")
def earlier(scene: Scene) -> Path:
    """The folder of a diagnosis of a model and itself."""
    state = random_state(SOURCE, 7)
    twin = write_open_clip(scene.folder / "twin", SOURCE, state)
    found = hf_bico.diagnose(scene.base, to=twin, base=scene.base, data=scene.data, n=24)
    found.save(scene.folder / "earlier")
    return scene.folder / "earlier"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diagnose", *map(str, arguments)])


def test_the_table_is_printed_and_the_folder_written(scene: Scene, tuned_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(*scene.arguments, "--fine-tuned", tuned_target, "--checkpoint", scene.tuned, "-o", out)
    assert result.exit_code == 0, result.output
    found = Diagnosis.load(out)
    assert result.stdout == f"base to target: 24 samples of pictures\n\n{found.table()}\n\nWritten to {out}\n"
    assert names_in(out) == {JSON_FILE, MARKDOWN_FILE, *PICTURES}
    assert found.models == ["target", *COMPARED]


def test_the_command_finds_what_python_finds_in_a_folder_of_its_own_name(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*scene.arguments, "--method", "theseus", "--seed", "3", "-q")
    assert (result.exit_code, result.output) == (0, "")
    assert names_in(tmp_path) == {"tuned-to-target-diagnosed"}
    found = Diagnosis.load(tmp_path / "tuned-to-target-diagnosed")
    asked: dict[str, Any] = {"base": scene.base, "data": str(scene.data), "n": 24, "method": "theseus", "seed": 3}
    expected = hf_bico.diagnose(scene.tuned, to=scene.target, **asked)
    seconds = replace(expected.cost, seconds=found.cost.seconds)
    assert found == replace(expected, cost=seconds)


def test_json_is_one_object_and_an_earlier_diagnosis_is_drawn_beside_it(
    scene: Scene, earlier: Path, tmp_path: Path
) -> None:
    result = run(*scene.arguments, "--beside", earlier, "-o", tmp_path / "out", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    raw = json.loads(result.stdout)
    assert raw["folder"] == str(tmp_path / "out")
    assert Diagnosis.from_json(json.dumps(raw["diagnosis"])) == Diagnosis.load(tmp_path / "out")
    assert names_in(tmp_path / "out") == {JSON_FILE, MARKDOWN_FILE, INITIAL_FILE, *PICTURES} - {"outputs.png"}


def broken(folder: Path) -> Path:
    (folder / "broken").mkdir()
    (folder / "broken" / JSON_FILE).write_text("{}")
    return folder / "broken"


MISTAKES: dict[str, tuple[Callable[[Scene, Path], list[object]], int, str]] = {
    "unknown method": (lambda scene, _: ["--method", "bica"], 2, "bica"),
    "no maps": (lambda scene, _: ["--method", "naive"], 2, "naive finds no maps to diagnose"),
    "a trainer": (lambda scene, _: ["--method", "finetune"], 2, "finetune finds no maps to diagnose"),
    "no methods": (lambda scene, _: ["--methods", ","], 2, "no method is named"),
    "unknown methods": (lambda scene, _: ["--methods", "bico,bica"], 2, "there is no method 'bica'"),
    "alphas": (lambda scene, _: ["--methods", "bico@1"], 2, "'bico@1' is a row of a comparison"),
    "polished": (lambda scene, _: ["--methods", "bico+polish"], 2, "'bico+polish' is a row of a comparison"),
    "standard": (lambda scene, _: ["--methods", "standard"], 2, "'standard' is a row of a comparison"),
    "trainers": (lambda scene, _: ["--methods", "bico,fewshot"], 2, "'fewshot' carries no task vector"),
    "nothing beside": (lambda scene, folder: ["--beside", folder / "nowhere"], 1, "holds no diagnosis.json"),
    "broken beside": (lambda scene, folder: ["--beside", broken(folder)], 1, "the diagnosis has schema None"),
    "a port beside": (lambda scene, folder: ["--beside", scene.base], 1, "holds no diagnosis.json"),
    "no checkpoint": (lambda scene, folder: ["--checkpoint", folder / "nowhere"], 1, "nowhere"),
    "another target": (lambda scene, _: ["--fine-tuned", scene.tuned], 1, "is (16,) in the fine-tuned model and (24,)"),
    "too many": (lambda scene, _: ["-n", "1000"], 1, "1000 samples"),
}


@pytest.mark.parametrize(("mistake", "code", "cause"), MISTAKES.values(), ids=list(MISTAKES))
def test_plain_mistakes_leave_nothing_behind(
    mistake: Callable[[Scene, Path], list[object]], code: int, cause: str, scene: Scene, tmp_path: Path
) -> None:
    arguments = mistake(scene, tmp_path)
    before = sorted(tmp_path.iterdir())
    result = run(*scene.arguments, *arguments, "-o", tmp_path / "out")
    assert result.exit_code == code, result.output
    assert cause in result.stderr
    assert "unexpected" not in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_an_error_is_an_object_where_one_is_asked_for(scene: Scene, tmp_path: Path) -> None:
    result = run(*scene.arguments, "--method", "naive", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["kind"] == "UsageError"


def test_a_folder_that_is_taken_is_refused_before_anything_is_done(scene: Scene, earlier: Path, tmp_path: Path) -> None:
    before = (earlier / JSON_FILE).read_bytes()
    result = run("nowhere", "--to", "nowhere", "-o", earlier)
    assert result.exit_code == 1
    assert "holds a diagnosis" in result.stderr
    assert "--overwrite" in result.stderr
    result = run("nowhere", "--to", "nowhere", "-o", scene.base, "--overwrite")
    assert result.exit_code == 1
    assert "holds no diagnosis" in result.stderr
    assert (earlier / JSON_FILE).read_bytes() == before
    copy = tmp_path / "out"
    Diagnosis.load(earlier).save(copy)
    assert run(*scene.arguments, "-o", copy, "--overwrite", "-q").exit_code == 0
    assert Diagnosis.load(copy).target == "target"


def test_what_only_python_can_get_wrong(scene: Scene) -> None:
    where: dict[str, Any] = {"to": scene.target, "base": scene.base, "data": scene.data}
    with pytest.raises(UsageError, match="unexpected keyword argument 'colour'"):
        hf_bico.diagnose(scene.tuned, **where, colour="red")
    with pytest.raises(hf_bico.BicoError, match="no calibration data"):
        hf_bico.diagnose(scene.tuned, to=scene.target, base=scene.base)


def test_an_average_is_of_the_same_layers_and_methods(pair: Pair, diagnosis: Diagnosis) -> None:
    assert Diagnosis.averaged([diagnosis, diagnosis]).inputs == diagnosis.inputs
    tuned = pair.folders["target-tuned"]
    one, other = (
        pair.diagnosis(fine_tuned=tuned, methods=methods) for methods in (["bico", "naive"], ["naive", "bico"])
    )
    for several in ([one, other], [one, diagnosis]):
        with pytest.raises(UsageError, match="differ in what their outputs are of"):
            Diagnosis.averaged(several)
    with pytest.raises(UsageError, match="no diagnosis to average"):
        Diagnosis.averaged([])


def test_an_average_over_tasks_whose_sources_have_other_names(pair: Pair) -> None:
    first, second = pair.diagnosis(n=8), pair.diagnosis("halfway")
    mean = Diagnosis.averaged([first, second])
    assert (first.checkpoints, second.checkpoints, mean.checkpoints) == (["tuned"], ["halfway"], ["checkpoint 1"])
    for name, value in (("inputs", "cka"), ("drift", "direction"), ("sites", "score_in")):
        of_each = ([getattr(one, value) for one in getattr(found, name)] for found in (first, second, mean))
        for one, two, both in zip(*of_each, strict=True):
            assert both == pytest.approx((one + two) / 2)
    assert mean.inputs != first.inputs


def test_all_methods_are_those_that_can_carry_between_these_models(pair: Pair) -> None:
    found = pair.diagnosis(fine_tuned=pair.folders["target-tuned"], methods="all")
    assert {"naive", "theseus", "bico", "bico-path"} <= set(found.models)
    assert not {"gradfix", "transfusion", "fewshot", "finetune"} & set(found.models)


def test_a_model_that_is_no_fine_tune_of_the_target_is_named(pair: Pair) -> None:
    with pytest.raises(BaseMismatchError, match="the fine-tuned target 'base' is not a fine-tune of 'target'"):
        pair.diagnosis(fine_tuned=pair.folders["base"])


def test_from_hub_ids_alone(hub: Hub, tmp_path: Path) -> None:
    """Also the models that are held against others, whose files come with the job."""
    scene = hub_scenes.publish(hub, tmp_path)
    hub_scenes.upload(hub, "user/target-tuned", scene.target)
    found = hf_bico.diagnose(
        hub_scenes.SOURCE,
        to=hub_scenes.TARGET,
        n=8,
        fine_tuned="user/target-tuned",
        checkpoints=[f"{hub_scenes.SOURCE}@main"],
        device="cpu",
    )
    assert {one.cosine for one in found.outputs if one.model == "target"} == {1.0}
    assert found.checkpoints == [f"{hub_scenes.SOURCE}@main", hub_scenes.SOURCE]
    folders = {"base": scene.base, "data": scene.data, "checkpoints": [scene.tuned], "device": "cpu"}
    local = hf_bico.diagnose(scene.tuned, to=scene.target, n=8, fine_tuned=scene.target, **folders)
    assert found.inputs == local.inputs
    assert [one.direction for one in found.drift] == [one.direction for one in local.drift]
