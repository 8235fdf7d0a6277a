"""What the samples chose and expect of a port: its sentences, its part of the card, and the picture."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hf_bico.reports.model_cards import render_card
from hf_bico.reports.outcome_picture import ACCURACY, MAX_POINTS, Outcome, outcome_picture
from hf_bico.reports.record import (
    LOSS,
    CandidateRecord,
    CurveRecord,
    GainRecord,
    MethodRecord,
    ObjectiveRecord,
    OutlookRecord,
    Record,
    SourceLeadRecord,
)
from hf_bico.reports.results import few_samples_sentence, headline
from hf_bico.reports.verdict import (
    alpha_sentence,
    candidates_sentence,
    held_back_remedy,
    held_back_sentence,
    outlook_sentence,
)
from hf_bico.settings import allowed_errors
from support import ROOT
from support.records import (
    ALPHAS,
    a_curve,
    a_decoder_record,
    a_path_record,
    a_record,
    a_scaled_record,
    a_trained_record,
    a_walk_record,
    fences,
    inlines,
    losses,
    measured,
    text_of,
)

pytestmark = pytest.mark.quick


def _chosen(alpha: float, means: tuple[float, ...]) -> MethodRecord:
    points = [CurveRecord(scale, mean, 0.1) for scale, mean in zip(ALPHAS, means, strict=True)]
    return MethodRecord("bico", alpha, [0], curve=points)


def _with_samples(record: Record, n: int) -> Record:
    assert record.data is not None
    return replace(record, data=replace(record.data, n=n))


def _alts(card: str) -> dict[str, str]:
    """What is said of each picture to those who cannot see it."""
    return {str(token.attrs["src"]): token.content for token in inlines(card) if token.type == "image"}


# Sentences


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (_chosen(0.5, (5, 4, 3, 4, 5)), "alpha 0.5: a larger alpha raises the samples' loss."),
        (_chosen(0.5, (5, 4, 3, 2, 5)), "alpha 0.5: a larger alpha does not clearly lower the samples' loss."),
        (_chosen(2.0, (5, 4, 3, 2, 1)), "alpha 2: the samples' loss still falls there, and no larger alpha is tried."),
        (_chosen(0.0, (5, 6, 7, 8, 9)), "alpha 0: no other value clearly lowers the samples' loss."),
        (
            a_walk_record().method,
            "alpha 0.5, 0.25 in 2 steps: the largest values that clearly lower the samples' loss.",
        ),
        (
            replace(a_walk_record().method, alpha=[0.0, 0.0]),
            "alpha 0 in all 2 steps: no step clearly lowers the samples' loss.",
        ),
        (MethodRecord("bico", 1.0, [0]), None),
    ],
)
def test_alpha_is_told_with_its_reason(method: MethodRecord, said: str | None) -> None:
    assert alpha_sentence(method) == said


@pytest.mark.parametrize(
    ("outlook", "said"),
    [
        (OutlookRecord(0.081, "accuracy", 0.02), "Outlook: about +8 points on data like the samples (± 2)."),
        (OutlookRecord(0.007, "accuracy", 0.012), "Outlook: about +0.7 points on data like the samples (± 1.2)."),
        (
            OutlookRecord(0.004, "accuracy", 0.01),
            "Outlook: doubtful, about +0.4 points on data like the samples (± 1).",
        ),
        (OutlookRecord(0.081, "accuracy"), "Outlook: doubtful, about +8 points on data like the samples."),
        (OutlookRecord(-0.081, "accuracy"), "Outlook: doubtful, about -8 points on data like the samples."),
        (OutlookRecord(0.31, "accuracy", 0.12), "Outlook: about +31 points on data like the samples (± 12)."),
        (OutlookRecord(0.25, "loss", 0.1), "Outlook: the loss falls by about 0.25 on data like the samples (± 0.1)."),
        (OutlookRecord(-0.25, "loss"), "Outlook: doubtful, the loss rises by about 0.25 on data like the samples."),
    ],
)
def test_outlook_is_in_points_or_in_loss(outlook: OutlookRecord, said: str) -> None:
    assert outlook_sentence(outlook) == said


def test_candidates_are_told_with_what_the_samples_say_of_each() -> None:
    assert candidates_sentence(a_walk_record().method) == (
        "Tried on the samples: aligning it (bico-path) gains +8 points, "
        "and adding the change unchanged (naive) is held back."
    )
    assert candidates_sentence(a_scaled_record().method) is None


def test_a_source_that_is_no_better_is_told_first() -> None:
    unclear = a_scaled_record(source_lead=SourceLeadRecord(0.52, 0.5, 0.05))
    assert str(headline(unclear)).startswith(
        "The fine-tuned source is NOT clearly better than the target on the samples' labels: 52.0% against 50.0% "
        "(± 5.0 points), so there is little to gain."
    )
    worse = a_scaled_record(source_lead=SourceLeadRecord(0.2, 0.5, 0.05))
    assert str(headline(worse)).startswith("The fine-tuned source is WORSE than the target on the samples' labels: ")
    assert worse.outlook is not None
    assert "doubtful" in outlook_sentence(worse.outlook, worse.source_lead)
    assert "**The fine-tuned source is NOT clearly better" in render_card(unclear)
    assert "NOT" not in render_card(a_scaled_record())


@pytest.mark.parametrize(
    ("n", "changes", "said"),
    [
        (1, {}, "One sample cannot tell a gain from chance."),
        (100, {"alpha": 0.0}, "No scale of the change clearly lowers the samples' loss."),
        (
            100,
            {"veto": GainRecord(0.004, 0.02)},
            "The samples gain +0.4 points (± 2), which is not clearly more",
        ),
        (
            100,
            {"curve": a_curve(predicts=False), "veto": GainRecord(0.04, 0.1)},
            "The samples gain a loss lower by 0.04 (± 0.1",
        ),
    ],
)
def test_a_port_that_is_held_back_says_why_and_what_to_do(n: int, changes: dict[str, Any], said: str) -> None:
    record = _with_samples(a_scaled_record(), n)
    record = replace(record, method=replace(record.method, **changes))
    assert held_back_sentence(record).startswith(f"Held back: bico with alpha chosen by {n} sample")
    assert said in held_back_sentence(record)
    assert "--method theseus" in held_back_remedy(record)
    assert "--method bico" in held_back_remedy(a_walk_record())


@pytest.mark.parametrize("kind", [a_record, a_scaled_record, a_walk_record, a_path_record, a_decoder_record])
@pytest.mark.parametrize("n", [1, 49, 50, 100])
def test_a_port_of_few_samples_says_that_they_are_not_safe(kind: Callable[[], Record], n: int) -> None:
    """Whoever chose its alpha."""
    record = _with_samples(kind(), n)
    said = few_samples_sentence(record)
    assert (said is None) == (n >= 50)
    if said is not None:
        assert said.startswith(f"This port was made from only {n} sample{'s' if n > 1 else ''}. With so few samples")
        assert "LoRA" in said
        assert f"Note: {said}" in text_of(render_card(record))
    else:
        assert "not safe" not in render_card(record)


def test_few_samples_that_made_no_port_are_no_risk() -> None:
    copied = MethodRecord("naive", 1.0, [0])
    for record in (a_trained_record("fewshot"), a_record(method=copied), a_record(data=None)):
        assert few_samples_sentence(_with_samples(record, 10) if record.data else record) is None
    judged = replace(copied, curve=a_curve(), alpha=0.5)
    assert few_samples_sentence(_with_samples(a_record(method=judged), 10)) is not None


# The card


def test_card_tells_how_alpha_was_chosen_and_what_to_expect() -> None:
    read = text_of(render_card(a_scaled_record()))
    for said in (
        "Outlook: about +8 points on data like the samples (± 2). This is estimated from the calibration samples "
        "alone; the results below were measured on other samples.",
        "Method: bico, completion drop. Two orthogonal maps",
        "Alpha 0.5: a larger alpha raises the samples' loss. The calibration samples chose it as the smallest alpha "
        "whose loss is at most two standard errors above the smallest loss. The loss is the KL divergence between the "
        "predictions of the target and of the fine-tuned source.",
    ):
        assert said in read
    assert read.index("Outlook") < read.index("Lineage") < read.index("Results")
    assert "given" not in read
    assert "below" not in text_of(render_card(a_scaled_record(evaluation=[])))


def test_card_of_a_walk_tells_every_step_and_the_candidates() -> None:
    read = text_of(render_card(a_walk_record()))
    for said in (
        "Method: bico-path (auto), completion drop, 2 steps along the path.",
        "Tried on the samples: aligning it (bico-path) gains +8 points, and adding",
        "Alpha 0.5, 0.25 in 2 steps: the largest values that clearly lower the samples' loss. The calibration "
        "samples chose each as the smallest alpha",
    ):
        assert said in read


@pytest.mark.parametrize(
    ("samples", "bold", "said"), [(20, None, "two"), (19, None, "three"), (100, True, "one"), (10, True, "one")]
)
def test_card_tells_the_rule_that_was_used(samples: int, bold: bool | None, said: str) -> None:
    assert ["one", "two", "three"][allowed_errors(samples, bold) - 1] == said
    record = a_scaled_record()
    assert record.data is not None
    drawn = replace(record.data, n=samples)
    read = text_of(render_card(replace(record, data=drawn, method=replace(record.method, bold=bold))))
    assert f"at most {said} standard error" in read


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("classification", " The loss is the KL divergence between the predictions of the target and of the"),
        ("text-to-text", " The loss is the KL divergence between the token predictions of the target"),
        ("contrastive", " The loss is the contrastive loss among all samples."),
        ("my_own_loss", None),
    ],
)
def test_card_tells_by_which_loss_the_samples_chose(objective: str, said: str | None) -> None:
    read = text_of(render_card(a_scaled_record(objective=ObjectiveRecord(objective))))
    assert ("above the smallest loss." + (said or "")) in read
    assert ("smallest loss. The loss is" in read) == (said is not None)


@pytest.mark.parametrize(("alpha", "said"), [(1.0, "alpha 1, given"), (0.25, "alpha 0.25, given")])
def test_an_alpha_that_was_given_is_called_so(alpha: float, said: str) -> None:
    read = text_of(render_card(a_record(method=MethodRecord("bico", alpha, [0, 1], "drop"))))
    assert f"Method: bico, completion drop, {said}. Two" in read
    assert "Outlook" not in read
    assert "given" not in text_of(render_card(a_trained_record()))


def test_a_copy_that_the_samples_chose_is_no_baseline() -> None:
    walk = a_walk_record()
    method = replace(walk.method, name="naive", alpha=0.5, steps=None, completion=None, curve=a_curve())
    read = text_of(render_card(replace(walk, method=method)))
    assert "added the task vector (fine-tuned weights minus base weights) unchanged: the two bases have equal" in read
    assert "Method: naive (auto). The task vector is added unchanged" in read
    assert "Calibration, for alpha only: 100 samples" in read
    assert "calibration used none of them" in read
    assert "baseline" not in read
    assert "This is a baseline for comparison" in text_of(
        render_card(a_record(method=MethodRecord("naive", 1.0, [0, 1])))
    )


def test_card_says_that_the_outlook_leaves_out_the_readout() -> None:
    outlook = OutlookRecord(0.08, "accuracy", 0.02)
    assert "The estimate does not include the readout." in text_of(render_card(a_path_record(outlook=outlook)))


def test_card_explains_distances_where_there_are_any() -> None:
    card = render_card(a_walk_record())
    table = next(block.content for block in fences(card) if not block.info)
    assert table.splitlines()[0].endswith("distance  cosine")
    assert "0.125   0.990" in table
    assert "distance is |W_B - W_A| / |W_A| between the weights of the two bases" in text_of(card)
    assert "cosine" not in render_card(a_record())


def test_card_shows_and_explains_the_picture_once() -> None:
    card = render_card(a_scaled_record())
    assert _alts(card)["outcome.png"] == (
        "Left, expected accuracy of the calibration samples by alpha, 58.0% at the chosen 0.5 and 50.0% at 0; right, "
        "held-out accuracy: target 50.0%, ported 60.0%, source 90.0%"
    )
    read = text_of(card)
    assert "Left: the expected accuracy by alpha." in read
    assert "The mark shows what was chosen with the standard error of its gain. Right: the values of" in read
    walk = text_of(render_card(a_walk_record(evaluation=[])))
    assert "The picture shows the expected accuracy by the scale of the whole change (1 is what was written)." in walk
    assert walk.count("The picture shows") == 1


def test_card_of_a_language_model_speaks_of_losses() -> None:
    method = replace(a_scaled_record().method, curve=a_curve(predicts=False))
    card = render_card(a_decoder_record(method=method, outlook=OutlookRecord(0.8, "loss", 0.1)))
    assert _alts(card)["outcome.png"] == (
        "Left, loss of the calibration samples by alpha, 1.2 at the chosen 0.5 and 2 at 0; right, held-out loss: "
        "target 3.000, ported 2.700, source's base 2.900, source 2.400"
    )
    read = text_of(card)
    assert "the loss of the calibration samples by alpha, which is the KL divergence between the token" in read
    assert "The band shows the standard error of the difference from the smallest loss." in read
    assert "Outlook: the loss falls by about 0.8" in text_of(card)


# The picture

RECORDS: dict[str, Callable[[], Record]] = {
    "one step": a_scaled_record,
    "a walk": a_walk_record,
    "losses": lambda: a_decoder_record(method=replace(a_scaled_record().method, curve=a_curve(predicts=False))),
    "bars alone": a_record,
    "the curve alone": lambda: a_walk_record(evaluation=[]),
    "a readout": a_path_record,
    "a trained target": a_trained_record,
    "a probe": lambda: a_record(evaluation=measured(probe_target=0.5, probe_ported=0.6, probe_source=0.7)),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_picture_is_a_readable_png_with_the_same_bytes_each_time(kind: str) -> None:
    picture = outcome_picture(RECORDS[kind]())
    assert picture is not None
    assert picture == outcome_picture(RECORDS[kind]())
    image = Image.open(io.BytesIO(picture))
    assert (image.format, image.size) == ("PNG", (1440, 540))
    assert len(picture) < 100_000
    assert b"tEXt" not in picture
    assert len({outcome_picture(make()) for make in RECORDS.values()}) == len(RECORDS)


def test_a_port_draws_without_matplotlib() -> None:
    code = (
        "import sys\nfrom support.records import a_walk_record\n"
        "from hf_bico.reports.outcome_picture import outcome_picture\n"
        "assert outcome_picture(a_walk_record())\nassert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "tests", timeout=100)


def test_curve_is_of_the_whole_change_or_of_its_one_step() -> None:
    one, walk = Outcome.of(a_scaled_record()).curve, Outcome.of(a_walk_record()).curve
    assert one is not None
    assert walk is not None
    assert (one.chosen, one.of_whole_change, one.unit) == (0.5, False, ACCURACY)
    assert (walk.chosen, walk.of_whole_change) == (1.0, True)
    assert list(one.values.items())[:2] == [(0.0, 0.5), (0.25, 0.55)]
    assert one.errors == {0.5: 0.02}


def test_losses_have_errors_of_their_own_and_those_that_explode_are_cut() -> None:
    record = RECORDS["losses"]()
    curve = Outcome.of(record).curve
    assert curve is not None
    assert curve.unit == LOSS
    assert len(curve.errors) == len(ALPHAS)
    low, high = curve.span
    assert low < 1.2
    assert 2.0 < high < 4.0


def test_bars_are_of_the_headlines_protocol_and_of_one_metric() -> None:
    both = measured(target=0.5, probe_target=0.8, ported=0.6, probe_ported=0.7, control=0.5, target_readout=0.55)
    outcome = Outcome.of(replace(a_path_record(), evaluation=both))
    assert [(bar.name, bar.text) for bar in outcome.bars] == [
        ("target", "50.0%"),
        ("target, readout", "55.0%"),
        ("ported", "60.0%"),
    ]
    assert outcome.bars[0].half == pytest.approx(0.031, abs=1e-3)
    mixed = Outcome.of(a_record(evaluation=[*measured(target=0.5, ported=0.6), *losses(source=2.0)]))
    assert [bar.name for bar in mixed.bars] == ["target", "ported"]
    assert [bar.name for bar in Outcome.of(a_trained_record()).bars] == ["target", "trained", "source"]


@pytest.mark.parametrize("values", [{}, {"target": 0.5}, {"control": 0.5, "unread": 0.4}])
def test_nothing_is_drawn_where_nothing_is_compared(values: dict[str, float]) -> None:
    record = a_record(evaluation=measured(**values))
    assert outcome_picture(record) is None
    assert "outcome.png" not in render_card(record)


# Hostile numbers

NUMBERS = st.floats() | st.sampled_from([0.0, -1.0, 1.0, 1e-300, 1e9, -1e9, 1e308, 0.5, 0.5 + 1e-12])
POINTS = st.builds(
    CurveRecord, NUMBERS, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, st.none() | st.integers(-1, 3)
)


@settings(max_examples=150, deadline=None)
@given(
    points=st.lists(POINTS, max_size=12),
    alpha=NUMBERS | st.lists(NUMBERS, max_size=4),
    error=st.none() | NUMBERS,
    values=st.lists(NUMBERS, min_size=3, max_size=3),
    n=st.integers(-1, 2**62),
    metric=st.sampled_from(["accuracy", "loss", "</script>"]),
)
def test_no_number_breaks_picture_or_card(
    points: list[CurveRecord], alpha: Any, error: float | None, values: list[float], n: int, metric: str
) -> None:
    method = MethodRecord("bico", alpha, [0, 1], curve=points, veto=GainRecord(0.1, error))
    method = replace(method, candidates=[CandidateRecord("naive", alpha, values[0], False)])
    record = a_record(method=method, outlook=OutlookRecord(values[0], "accuracy", error))
    entries = zip(record.evaluation, values, strict=True)
    record = replace(record, evaluation=[replace(entry, value=value, n=n, metric=metric) for entry, value in entries])
    picture = outcome_picture(record)
    assert picture is None or Image.open(io.BytesIO(picture)).size == (1440, 540)
    assert len(render_card(record)) < 60_000


def test_thousands_of_points_and_steps_take_no_time() -> None:
    points = [CurveRecord(number / 1000, 1.0, 0.1, 0.5) for number in range(100_000)]
    many = a_scaled_record(method=MethodRecord("bico-path", [0.5] * 10_000, [0, 1], curve=points))
    started = time.monotonic()
    assert Outcome.of(many).curve is None
    card = render_card(many)
    assert time.monotonic() - started < 5
    assert len(card) < len(render_card(a_scaled_record())) + 2_000
    enough = replace(many.method, curve=points[:MAX_POINTS])
    assert Outcome.of(replace(many, method=enough)).curve is not None
