"""The sentences of a report: what they say of a port, a trained model, a control and a readout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_bico.cli.console import _marks, print_ported
from hf_bico.reports.record import EvaluationRecord, Record
from hf_bico.reports.results import Report, control_sentence, gap_closed, headline, is_worse, readout_sentence, results
from support.records import a_path_record, a_record, a_trained_record, measured

pytestmark = pytest.mark.quick


def _of(values: list[EvaluationRecord]) -> Record:
    return a_record(evaluation=values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (measured(target=0.5, ported=0.6, source=0.9), "Accuracy 60.0%, up from the target's 50.0%: 25% of the way"),
        (measured(target=0.5, ported=0.5), "The port did not change the target's accuracy of 50.0%."),
        (measured(target=0.5, ported=0.4), "The port measured WORSE than the target: accuracy 40.0%, down from 50.0%."),
        (measured(probe_target=0.5, probe_ported=0.6), "Linear-probe accuracy 60.0%, up from the target's 50.0%, with"),
        (
            measured(probe_target=0.5, probe_ported=0.4),
            "The port measured WORSE than the target: linear-probe",
        ),
        (
            measured(probe_target=0.1, probe_ported=0.9, target=0.5, ported=0.6),
            "Accuracy 60.0%, up from the target's",
        ),
    ],
)
def test_headline_is_zero_shot_where_that_was_measured(values: list[EvaluationRecord], said: str) -> None:
    record = _of(values)
    assert str(headline(record)).startswith(said)
    assert is_worse(record) == ("WORSE" in said)


def test_headline_never_mixes_protocols() -> None:
    record = _of(measured(target=0.5, probe_target=0.7, probe_ported=0.6))
    assert headline(record) is None
    assert not is_worse(record)
    assert gap_closed(record) is None


def test_protocol_that_is_not_known_is_no_result() -> None:
    record = _of([replace(entry, protocol="other") for entry in measured(target=0.5, ported=0.6)])
    assert results(record) == []
    assert headline(record) is None


@pytest.mark.parametrize(
    ("ported", "said"),
    [
        (0.6, "Accuracy 60.0%, up from the target's 50.0%, after 30 training steps."),
        (0.5, "Training did not change the target's accuracy of 50.0%."),
        (0.4, "The trained model measured WORSE than the target: accuracy 40.0%, down from 50.0%."),
    ],
)
def test_headline_of_a_trained_model(ported: float, said: str) -> None:
    assert headline(replace(a_trained_record(), evaluation=measured(target=0.5, ported=ported))) == said


@pytest.mark.parametrize(
    ("control", "ported", "said"),
    [
        (0.50, 0.6, "it gains 0.0 points, and the port +10.0. The gain disappears in the control"),
        (0.45, 0.6, "it gains -5.0 points, and the port +10.0. The gain disappears in the control"),
        (0.54, 0.6, "40% of the gain remains in the control"),
        (0.62, 0.6, "The gain does not disappear in the control"),
        (0.50, 0.5, "The port has no gain that could disappear."),
    ],
)
def test_control_says_whether_the_gain_vanishes(control: float, ported: float, said: str) -> None:
    assert said in str(control_sentence(_of(measured(target=0.5, ported=ported, control=control))))


def test_gain_that_is_the_readouts_is_not_the_ports() -> None:
    values = measured(target=0.5, ported=0.7, target_readout=0.72, unread=0.49, control=0.45)
    record = replace(a_path_record(), evaluation=values)
    assert str(headline(record)).endswith("; the readout alone gives 72.0%.")
    assert "gives 72.0%; the port adds nothing to that." in str(readout_sentence(record))
    assert str(control_sentence(record)).endswith("The port has no gain that could disappear.")


def test_console_prints_every_row_with_its_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    values = measured(target=0.5, probe_target=0.8, ported=0.6, probe_ported=0.7, control=0.5)
    record = _of(values)
    print_ported(record, Report(tuple(record.sites), tuple(record.left)), Path("out"), pushing=False)
    lines = capsys.readouterr().out.splitlines()
    table = [line.split("  ")[0] for line in lines[2:8]]
    assert table == [
        *("model", "target, zero-shot", "control, samples mispaired", "target, ported"),
        *("target, unchanged", "target, ported"),
    ]
    assert "linear probe, fitted to 100 calibration samples     80.0%" in lines[6]
    assert any(line.startswith("The control is the same method") for line in lines)


def test_a_terminal_is_told_in_a_word_whether_the_port_is_better() -> None:
    assert _marks(_of(measured(target=0.5, ported=0.6, source=0.9))) == ["", "better", ""]
    assert _marks(_of(measured(target=0.5, ported=0.4))) == ["", "worse"]
    assert _marks(_of(measured(target=0.5, ported=0.5))) == ["", ""]


def test_console_says_that_a_trained_model_was_trained(capsys: pytest.CaptureFixture[str]) -> None:
    print_ported(a_trained_record(), Report((), ()), Path("out"), pushing=False)
    printed = capsys.readouterr().out
    assert "Trained, and nothing carried: 30 training steps of AdamW on 900 samples" in printed
    assert "energy" not in printed
    assert "protocol" not in printed
