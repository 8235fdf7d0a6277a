"""What reports and cards say of a polish, and of the case that a port is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hf_bico.reports.model_cards import render_card
from hf_bico.reports.record import DataRecord, ReadoutRecord, Record, TrainingRecord, UnlabelledRecord
from hf_bico.reports.results import (
    carries,
    few_samples_sentence,
    headline,
    is_trained,
)
from hf_bico.reports.training import polish_sentence, situation_sentence
from hf_bico.reports.verdict import held_back_remedy, held_back_sentence
from support.records import a_classifier_record, a_decoder_record, a_scaled_record, a_trained_record, text_of

pytestmark = pytest.mark.quick

HELPED = TrainingRecord(
    1e-3, 0.1, 14, 100, 128, toward="source", most=20, left_out=40, before=1.5, after=0.5, helped=True
)
NO_STEP = replace(HELPED, steps=0)
DROPPED = replace(HELPED, after=1.49, helped=False)
READOUT = ReadoutRecord(True, 7.0, 5.0, 0.1)


def polished(polish: TrainingRecord, kind: Callable[[], Record] = a_scaled_record) -> Record:
    record = kind()
    readout = READOUT if polish.helped else None
    return replace(record, method=replace(record.method, polish=polish, readout=readout))


def with_samples(record: Record, n: int, unlabelled: int | None = None) -> Record:
    assert record.data is not None
    data: DataRecord = replace(record.data, n=n, indices=list(range(n)))
    if unlabelled is not None:
        data = replace(
            data,
            unlabelled=UnlabelledRecord("alice/more", "train", unlabelled, list(range(unlabelled)), {"image": "x"}),
        )
    return replace(record, data=data)


@pytest.mark.parametrize(
    ("polish", "sentence", "ending"),
    [
        (
            HELPED,
            "The change was carried, then polished for 14 steps on 100 unlabelled samples (AdamW, learning rate 0.001, "
            "chosen by samples left out; at most 20 steps): the loss of 40 samples left out fell from 1.5 to 0.5. Its "
            "readout was corrected last.",
            ", carried and then polished for 14 training steps",
        ),
        (
            NO_STEP,
            "The change was carried and its readout corrected. The samples left out showed no gain from a polish step.",
            ", carried, and its readout corrected",
        ),
        (
            DROPPED,
            "The polish was dropped: 40 samples left out of it show no clear gain (loss 1.5 to 1.49).",
            ", with no training step",
        ),
        (
            replace(HELPED, alone=True),
            "The samples spoke against the ported change, so the polish started from the unchanged target.",
            ", after 14 training steps",
        ),
        (
            replace(NO_STEP, alone=True),
            "The samples spoke against the ported change, so the polish started from the unchanged target.",
            ", with no training step",
        ),
    ],
)
def test_a_polish_is_told_as_it_was(polish: TrainingRecord, sentence: str, ending: str) -> None:
    record = polished(polish)
    assert polish_sentence(record) == sentence
    assert ending in str(headline(record))
    assert sentence in text_of(render_card(record))


@pytest.mark.parametrize(
    ("polish", "carried", "trained", "free"),
    [
        (HELPED, True, False, False),
        (NO_STEP, True, False, False),
        (DROPPED, True, False, True),
        (replace(HELPED, alone=True), False, True, False),
        (replace(NO_STEP, alone=True), False, False, False),
        (replace(DROPPED, alone=True), True, False, True),
    ],
)
def test_a_card_calls_it_carried_or_training_free_only_where_it_is(
    polish: TrainingRecord, carried: bool, trained: bool, free: bool
) -> None:
    record = polished(polish)
    assert (carries(record), is_trained(record)) == (carried, trained)
    card = render_card(record).partition("## Citation")[0]
    assert (" ported to " in card) == carried
    assert ("task-vector" in card) == carried
    assert ("training-free" in card) == free


@pytest.mark.parametrize(
    ("record", "case"),
    [
        (
            with_samples(a_scaled_record(), 10),
            "only 10 samples, and no training. More samples, even without labels, gained more on small models: "
            "--polish --unlabelled DATA.",
        ),
        (
            with_samples(a_scaled_record(), 100),
            "100 samples, and no training. If training is allowed, a few steps without labels gained more on small "
            "models: --polish.",
        ),
        (
            with_samples(polished(HELPED), 100),
            "100 samples, and a polish. More samples, even without labels, gained more on small models: "
            "--unlabelled DATA.",
        ),
        (
            with_samples(polished(HELPED), 10, 1000),
            "only 10 samples, 1,000 more without labels, and a polish. Only fine-tuning on many labels gained more on "
            "small models.",
        ),
        (
            with_samples(polished(replace(HELPED, alone=True)), 10),
            "only 10 samples, and a polish. More samples, even without labels, gained more on small models: "
            "--unlabelled DATA.",
        ),
        (
            with_samples(a_decoder_record(), 10),
            "only 10 samples, and no training. If training is allowed, a few steps gained more on small models: "
            "--polish.",
        ),
        (
            with_samples(polished(HELPED, a_decoder_record), 100),
            "100 samples, and a polish. On small models, the same number of steps on the texts themselves gained more: "
            "--method train.",
        ),
        (
            with_samples(a_classifier_record(), 100),
            "100 samples, and no training. To measure whether training gains more on your models, run "
            "'hf-bico compare --methods standard'.",
        ),
    ],
)
def test_the_case_of_a_port_names_what_gains_more(record: Record, case: str) -> None:
    assert situation_sentence(record) == f"Your case: {case}"


def test_no_case_is_told_where_none_was_measured() -> None:
    record = a_scaled_record()
    contrast = replace(record, objective=replace(record.objective, name="contrastive"))
    for other in (a_trained_record("train"), contrast, replace(record, data=None)):
        assert situation_sentence(other) is None


def test_unlabelled_samples_count_where_a_polish_was_judged_by_them() -> None:
    few = with_samples(polished(replace(HELPED, unlabelled=1000)), 10, 1000)
    assert few_samples_sentence(few) is None
    assert few_samples_sentence(with_samples(polished(replace(DROPPED, unlabelled=1000)), 10, 1000)) is not None
    assert few_samples_sentence(with_samples(polished(HELPED), 10)) is not None


def test_a_port_that_is_held_back_with_its_polish_says_both() -> None:
    record = polished(replace(DROPPED, alone=True))
    assert held_back_sentence(record).endswith("The polish did not help on the samples left out.")
    assert "--polish" not in held_back_remedy(record)
    assert "--polish --unlabelled DATA" in held_back_remedy(a_scaled_record())
