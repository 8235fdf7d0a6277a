"""The figures of a diagnosis show what was found, stay readable, and are the same bytes each time."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from hf_bico.experiments.compare.picture import method_style
from hf_bico.experiments.diagnose import pictures
from hf_bico.experiments.diagnose.diagnosis import Diagnosis
from hf_bico.experiments.diagnose.findings import Cost, Drift, InputLikeness, OutputLikeness, SitePlace, by_place
from hf_bico.experiments.diagnose.pictures import (
    drift_picture,
    initial_picture,
    outputs_picture,
    similarity_picture,
    sites_picture,
)
from hf_bico.reports.pictures import alignment_picture, png
from hf_bico.reports.record import SiteRecord

READS = {"attn.in": ["attn.q", "attn.k", "attn.v"], "mlp.mid": ["mlp.down"]}
MODELS = ("target", "input-only", "theseus", "bico")
STEPS = ("run/checkpoint-100", "run/checkpoint-200", "run/checkpoint-400")
HOSTILE = "$x$ a|b\n<b> \u202e" + "very-long-" * 60 + "end"


def a_diagnosis(
    blocks: int = 3,
    wider: bool = False,
    checkpoints: Sequence[str] = STEPS,
    models: Sequence[str] = MODELS,
    towers: Sequence[str] = ("",),
) -> Diagnosis:
    """Two activations in each block and one outside, no two numbers of them alike."""
    places = [(tower, block, name) for tower in towers for block in range(blocks) for name in READS]
    places += [(tower, None, "proj") for tower in towers]
    inputs, outputs, drift, sites = [], [], [], []
    for number, (tower, block, name) in enumerate(places):
        depth, odd = number / len(places), math.sin(number) / 50
        at: dict[str, Any] = {"name": f"{tower}.{block}.{name}", "block": block, "tower": tower}
        width = 4 if name == "mlp.mid" else 1
        alike = InputLikeness(
            source=name,
            roles=READS.get(name, ["proj"]),
            widths=(768 * width, (1024 if wider else 768) * width),
            rows=500,
            cka=0.95 - 0.4 * depth + odd,
            cka_aligned=0.96 - 0.4 * depth + odd,
            cosine_aligned=0.9 - 0.2 * depth + odd,
            cosine=None if wider else 0.05 + depth / 10 + odd,
            **at,
        )
        inputs.append(alike)
        outputs += [
            OutputLikeness(model=model, cosine=0.9 + 0.02 * rank - 0.02 * depth + odd / 10, **at)
            for rank, model in enumerate(models)
        ]
        drift += [
            Drift(checkpoint=checkpoint, direction=0.1 * time + 0.2 * depth, magnitude=0.05 * time + depth / 50, **at)
            for time, checkpoint in enumerate(checkpoints, 1)
        ]
        full = "proj" if block is None else f"blocks.{block}.mlp.down"
        sites.append(SiteRecord(full, "proj" if block is None else "mlp.down", full, (8, 8), (8, 8), 0.1, 8, 8, 0.5))
    return Diagnosis(
        hf_bico="0.3.0",
        source="me/tuned",
        base="org/base",
        target="org/wide" if wider else "org/target",
        data="eurosat",
        split="train",
        samples=100,
        method="bico",
        completion="drop",
        inputs=inputs,
        sites=sites,
        layers=list(range(blocks)),
        cost=Cost((1, 1), (1, 1), 1, 1, 1, 1, 1, 1),
        outputs=outputs,
        checkpoints=list(checkpoints),
        drift=drift,
    )


def initial_of_two(diagnosis: Diagnosis) -> bytes | None:
    return initial_picture([diagnosis, a_diagnosis(4, wider=True)])


ALL: list[Callable[[Diagnosis], bytes | None]] = [
    similarity_picture,
    initial_of_two,
    outputs_picture,
    drift_picture,
    sites_picture,
]


def drawn(draw: Callable[..., Figure], *of: Any) -> Figure:
    """The figure that a picture is made of, laid out."""
    kept: list[Figure] = []

    def keep() -> Figure:
        kept.append(draw(*of))
        return kept[0]

    png(keep, dpi=50)
    kept[0].draw_without_rendering()  # at its own resolution
    return kept[0]


def similarity(diagnosis: Diagnosis) -> tuple[Axes, Axes]:
    before, after = drawn(pictures._draw_similarity, diagnosis).axes
    return before, after


def initial(*diagnoses: Diagnosis) -> Figure:
    return drawn(pictures._draw_initial, pictures._towers(diagnoses))


def values(axes: Axes) -> list[list[float]]:
    return [np.asarray(line.get_ydata(), dtype=float).tolist() for line in axes.lines]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def x_labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def legend(figure: Figure) -> list[str]:
    found = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return [text.get_text() for one in found for text in one.get_texts()]


def means(found: Any, value: str) -> list[float]:
    return list(by_place(found, lambda one: getattr(one, value)).values())


# All of them


@pytest.mark.parametrize("blocks", [1, 80])
@pytest.mark.parametrize("picture", ALL)
def test_a_picture_is_a_png_of_card_width_with_the_same_bytes_each_time(picture: Any, blocks: int) -> None:
    found = picture(a_diagnosis(blocks))
    assert found is not None
    assert found == picture(a_diagnosis(blocks))
    assert found.startswith(b"\x89PNG\r\n")
    assert b"Software" not in found
    width, height = (int.from_bytes(found[at : at + 4]) for at in (16, 20))
    assert width == 1440
    assert 150 < height < width


@pytest.mark.parametrize("picture", ALL)
def test_a_users_own_style_changes_no_picture(picture: Any) -> None:
    import matplotlib

    plain = picture(a_diagnosis())
    style = {"lines.linewidth": 9, "axes.facecolor": "black", "savefig.dpi": 30, "font.size": 20, "text.usetex": True}
    with matplotlib.rc_context(style):
        assert picture(a_diagnosis()) == plain
        assert matplotlib.rcParams["axes.facecolor"] == "black"


def test_nothing_is_drawn_of_nothing() -> None:
    empty = replace(a_diagnosis(), inputs=[], outputs=[], drift=[], sites=[])
    assert [picture(empty) for picture in (similarity_picture, outputs_picture, drift_picture, sites_picture)] == [
        *(None, None, None, None),
    ]
    assert initial_picture([]) is None
    assert initial_picture([empty, empty]) is None
    assert drift_picture(replace(a_diagnosis(), checkpoints=[])) is None
    assert initial_picture([empty, a_diagnosis()]) == initial_picture([a_diagnosis()])


@pytest.mark.parametrize("wider", [False, True])
def test_names_of_any_kind_and_length_are_drawn_within_the_picture(wider: bool) -> None:
    hostile = a_diagnosis(2, wider, [HOSTILE, HOSTILE + "2"], [*MODELS, HOSTILE], ["", HOSTILE])
    hostile = replace(hostile, base=HOSTILE, target=HOSTILE)
    figures = [
        drawn(pictures._draw_similarity, hostile),
        initial(hostile, replace(hostile, data=HOSTILE)),
        drawn(pictures._draw_outputs, hostile),
        drawn(pictures._draw_drift, hostile),
    ]
    for figure in figures:
        for text in figure.findobj(Text):
            box = text.get_window_extent()
            inside = figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1
            assert inside or not text.get_visible() or not text.get_text(), text.get_text()
        assert min(axes.bbox.width for axes in figure.axes if axes.lines) > 0.3 * figure.bbox.width, (
            "room for the lines"
        )
        assert "\u202e" not in "".join(texts(figure))
        assert not any(text.get_parse_math() for text in figure.findobj(Text)), "a dollar is a dollar"
    assert any("$x$" in text for text in texts(figures[1]))


def test_importing_the_module_is_light() -> None:
    code = "import sys, hf_bico.experiments.diagnose.pictures as _; print({'torch', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(("blocks", "most"), [(24, 15), (48, 11), (80, 11)])
def test_labels_of_many_blocks_do_not_run_into_each_other(blocks: int, most: int) -> None:
    for axes in similarity(a_diagnosis(blocks)):
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(before.x1 + 2 < after.x0 for before, after in pairwise(boxes))
        assert 4 < len(boxes) <= most
        assert x_labels(axes)[0] == "0"
        assert x_labels(axes)[-1] == "out"


# Figure 1


def test_similarity_shows_the_means_over_what_the_sites_of_a_block_read() -> None:
    diagnosis = a_diagnosis()
    before, after = similarity(diagnosis)
    assert values(before) == [means(diagnosis.inputs, "cka"), means(diagnosis.inputs, "cosine")]
    assert values(after) == [means(diagnosis.inputs, "cka_aligned"), means(diagnosis.inputs, "cosine_aligned")]
    by_hand = (diagnosis.inputs[0].cka + diagnosis.inputs[1].cka) / 2
    assert values(before)[0][0] == pytest.approx(by_hand)
    assert (before.get_title("left"), after.get_title("left")) == ("before alignment", "after input-side alignment")
    assert x_labels(before) == ["0", "1", "2", "out"]
    assert before.get_xlabel() == "target block"
    assert legend(before.figure) == ["linear CKA", "mean cosine"]
    assert before.get_ylim() == (0, 1)
    assert not any("n/a" in text for text in texts(before.figure))


def test_lines_differ_in_colour_marker_and_dashes() -> None:
    for axes in similarity(a_diagnosis()):
        cka, cosine = axes.lines
        assert cka.get_color() != cosine.get_color()
        assert cka.get_marker() != cosine.get_marker()
        assert cka.is_dashed() != cosine.is_dashed()


def test_across_widths_the_cosine_before_alignment_is_said_to_be_missing() -> None:
    diagnosis = a_diagnosis(wider=True)
    before, after = similarity(diagnosis)
    assert values(before) == [means(diagnosis.inputs, "cka")]
    assert values(after)[1] == means(diagnosis.inputs, "cosine_aligned")
    (note,) = (text for text in before.texts if "n/a across widths" in text.get_text())
    assert note.get_text() == "cosine: n/a across widths\n768 to 1024, 3072 to 4096"
    assert note.get_window_extent().y0 >= before.bbox.y1, "above the panel, where no line is"
    assert note.get_window_extent().x0 > before._left_title.get_window_extent().x1
    assert legend(before.figure) == ["linear CKA", "mean cosine"]


def test_a_cosine_below_zero_is_on_the_axis() -> None:
    diagnosis = a_diagnosis()
    below = [replace(one, cosine=-0.03) for one in diagnosis.inputs]
    before, after = similarity(replace(diagnosis, inputs=below))
    assert before.get_ylim() == after.get_ylim() == (-0.05, 1)


def test_the_legend_stands_beside_the_panels() -> None:
    diagnosis = a_diagnosis()
    for figure in (drawn(pictures._draw_similarity, diagnosis), initial(diagnosis)):
        (found,) = figure.legends
        assert found.get_window_extent().y0 >= max(axes.bbox.y1 for axes in figure.axes)
    figure = drawn(pictures._draw_outputs, diagnosis)
    assert figure.axes[0].get_legend().get_window_extent().x0 >= figure.axes[0].bbox.x1


def test_towers_stand_apart_and_have_one_entry_in_the_legend() -> None:
    diagnosis = a_diagnosis(towers=("", "text"))
    before, _ = similarity(diagnosis)
    cka = by_place(diagnosis.inputs, lambda one: one.cka)
    for line, tower in zip(before.lines[:2], ("", "text"), strict=True):
        assert np.asarray(line.get_ydata()).tolist() == [cka[place] for place in cka if place.tower == tower]
    assert max(before.lines[0].get_xdata()) + 1 < min(before.lines[1].get_xdata())
    assert before.lines[0].get_color() == before.lines[1].get_color()
    assert x_labels(before) == ["0", "1", "2", "out", "0\ntext", "1", "2", "out"]
    assert legend(before.figure) == ["linear CKA", "mean cosine"]


def test_what_is_not_known_of_a_block_is_a_gap() -> None:
    diagnosis = a_diagnosis()
    some = [replace(one, cosine=None) if one.block == 1 else one for one in diagnosis.inputs]
    before, _ = similarity(replace(diagnosis, inputs=some))
    assert [math.isnan(value) for value in values(before)[1]] == [False, True, False, False]


# Figure B


def test_initial_similarity_of_pairs_of_one_depth_is_by_block() -> None:
    same, wider = a_diagnosis(), a_diagnosis(wider=True)
    figure = initial(same, wider)
    (axes,) = figure.axes
    expected = [means(same.inputs, "cka"), means(same.inputs, "cosine"), means(wider.inputs, "cka")]
    assert values(axes) == expected
    assert x_labels(axes) == ["0", "1", "2", "out"]
    assert axes.get_xlabel() == "target block"
    names = ["org/base to org/target: CKA", "org/base to org/target: cosine", "org/base to org/wide: CKA"]
    assert legend(figure) == names
    first, second, third = axes.lines
    assert first.get_color() == second.get_color() != third.get_color()
    assert first.is_dashed() != second.is_dashed()
    assert first.get_marker() != third.get_marker()


def test_initial_similarity_of_pairs_of_different_depth_is_by_relative_depth() -> None:
    (axes,) = initial(a_diagnosis(2), a_diagnosis(4, wider=True)).axes
    first, *_, last = (np.asarray(line.get_xdata()).tolist() for line in axes.lines)
    assert first == [0, 0.5, 1]
    assert last == [0, 0.25, 0.5, 0.75, 1]
    assert "relative depth" in axes.get_xlabel()


def test_the_same_pair_on_other_data_is_named_with_the_data() -> None:
    figure = initial(a_diagnosis(wider=True), replace(a_diagnosis(wider=True), data="cars"))
    assert legend(figure) == ["org/base to org/wide on eurosat: CKA", "org/base to org/wide on cars: CKA"]


# Figure 2


def test_outputs_show_each_model_in_the_style_of_the_comparison() -> None:
    diagnosis = a_diagnosis()
    figure = drawn(pictures._draw_outputs, diagnosis)
    (axes,) = figure.axes
    assert x_labels(axes) == ["0", "1", "2", "out"]
    for line, model in zip(axes.lines, MODELS, strict=True):
        of_model = [one for one in diagnosis.outputs if one.model == model]
        assert np.asarray(line.get_ydata()).tolist() == means(of_model, "cosine")
        assert (line.get_color(), line.get_marker()) == method_style(model)
    assert len({line.get_color() for line in axes.lines}) == len(MODELS)
    assert legend(figure) == ["BiCo", "THESEUS", "input maps only", "target, pretrained"], "as the lines end"


@pytest.mark.parametrize(("scale", "least"), [(1, 0.87), (1e-3, 0.9998), (1e-5, 0.999998), (0, 0.99)])
def test_the_axis_of_outputs_fits_the_data_and_ends_at_one(scale: float, least: float) -> None:
    diagnosis = a_diagnosis(models=["target", "bico"])
    close = [replace(one, cosine=1 - scale * (1 - one.cosine)) for one in diagnosis.outputs]
    (axes,) = drawn(pictures._draw_outputs, replace(diagnosis, outputs=close)).axes
    low, high = axes.get_ylim()
    assert least < low < min(map(min, values(axes)))
    assert max(map(max, values(axes))) <= high <= 1
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert axes.yaxis.get_offset_text().get_text() == "", "numbers as they are"
    assert len(set(ticks)) == len(ticks)


# Figure A


def drift_of(checkpoints: Sequence[str], **fields: Any) -> Figure:
    return drawn(pictures._draw_drift, a_diagnosis(checkpoints=checkpoints, **fields))


def test_drift_begins_with_the_base_at_zero_and_goes_by_the_numbers_of_checkpoints() -> None:
    diagnosis = a_diagnosis()
    direction, magnitude, bar = drawn(pictures._draw_drift, diagnosis).axes
    for axes, value in ((direction, "direction"), (magnitude, "magnitude")):
        by_step = [means([d for d in diagnosis.drift if d.checkpoint == step], value) for step in STEPS]
        assert values(axes) == [[0.0, *steps] for steps in zip(*by_step, strict=True)]
        assert all(np.asarray(line.get_xdata()).tolist() == [0, 100, 200, 400] for line in axes.lines)
        assert x_labels(axes)[0] == "base"
        assert axes.get_title("left") == value
        assert axes.get_ylim()[0] == 0
    colours = [line.get_color() for line in direction.lines]
    assert len(set(colours)) == len(colours) == 4
    lightness = [np.dot(colour[:3], (0.2126, 0.7152, 0.0722)) for colour in colours]
    assert lightness == sorted(lightness), "deeper is lighter, in grey too"
    assert lightness[-1] < 0.75, "and can be seen on white"
    assert bar.get_ylabel() == "block"
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "1", "2", "out"]


@pytest.mark.parametrize(
    "checkpoints",
    [("early", "late"), ("step-100", "final"), ("a@step20", "b@step10"), ("a-1", "b-1"), ("step-0", "step-1")],
)
def test_checkpoints_without_growing_numbers_stand_by_name(checkpoints: tuple[str, ...]) -> None:
    axes = drift_of(checkpoints).axes[0]
    assert x_labels(axes) == ["base", *checkpoints]
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [0, 1, 2]


def test_long_names_of_checkpoints_keep_their_ends_and_many_are_thinned_out() -> None:
    axes = drift_of([f"{'long' * 20}-{number}-th" for number in range(40)]).axes[0]
    labels = x_labels(axes)
    assert labels[0] == "base"
    assert len(labels) <= 9
    assert all(label.startswith("…") and label.endswith("-th") and len(label) <= 14 for label in labels[1:])
    assert len(set(labels)) == len(labels)


def test_a_number_beyond_reason_is_part_of_a_name() -> None:
    assert x_labels(drift_of(("step-1", "step-" + "9" * 40)).axes[0])[1] == "step-1"


def test_of_one_checkpoint_the_drift_is_shown_by_block() -> None:
    diagnosis = a_diagnosis(checkpoints=["me/tuned"])
    figure = drawn(pictures._draw_only_drift, diagnosis)
    assert {axes.get_xlabel() for axes in figure.axes} == {"source block"}
    assert [values(axes) for axes in figure.axes] == [
        [means(diagnosis.drift, "direction")],
        [means(diagnosis.drift, "magnitude")],
    ]
    assert x_labels(figure.axes[0]) == ["0", "1", "2", "out"]
    several = a_diagnosis(checkpoints=["me/tuned", "me/later"])
    known = [one for one in several.drift if one.checkpoint == "me/tuned"]
    assert drift_picture(replace(several, drift=known)) is not None, "nothing is known of the second"


def test_one_place_needs_no_bar_and_towers_a_legend() -> None:
    diagnosis = a_diagnosis(1)
    alone = replace(diagnosis, drift=[one for one in diagnosis.drift if one.place == SitePlace("", 0)])
    assert len(drawn(pictures._draw_drift, alone).axes) == 2
    figure = drift_of(STEPS, towers=("", "text"))
    assert legend(figure) == ["main tower", "text tower"]
    main, text = figure.axes[0].lines[0], figure.axes[0].lines[4]
    assert main.get_color() == text.get_color()
    assert main.is_dashed() != text.is_dashed()


# The sites


def test_sites_are_drawn_as_on_the_card() -> None:
    diagnosis = a_diagnosis()
    found = sites_picture(diagnosis)
    assert found is not None
    assert found == alignment_picture(diagnosis.sites, 3)
    better = [replace(site, score_in=1.0) for site in diagnosis.sites]
    assert found != sites_picture(replace(diagnosis, sites=better))
    bare = [replace(site, score_in=None) for site in diagnosis.sites]
    assert sites_picture(replace(diagnosis, sites=bare)) is None
