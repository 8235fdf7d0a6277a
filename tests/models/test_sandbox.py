"""The child process that reads what strangers wrote: answers, limits, and what is said where it cannot be started."""

from __future__ import annotations

import gc
import sys
import warnings

import pytest

from hf_bico.errors import DeviceError
from hf_bico.models.adapters.patterns import require_quick
from hf_bico.models.sandbox import Sandbox
from hf_bico.models.tokenization import render_chat
from support.language_toys import text_tokenizer

CODE = """
import os, time
def answer(question):
    if question == "late":
        time.sleep(60)
    if question == "die":
        os._exit(1)
    return [question, 1 / len(question)]
"""

pytestmark = pytest.mark.quick


def test_it_answers_and_says_why_it_cannot() -> None:
    with Sandbox(CODE, "-I", "-S") as one:
        assert one.ask("four", 30) == ["four", 0.25]
        with pytest.raises(ValueError, match="ZeroDivisionError"):
            one.ask("", 30)
        assert one.ask("four", 30) == ["four", 0.25]
    assert not one.alive


@pytest.mark.parametrize(("question", "error"), [("late", TimeoutError), ("die", EOFError)])
def test_one_that_is_late_or_dies_is_ended(question: str, error: type[Exception]) -> None:
    with Sandbox(CODE, "-I", "-S") as one:
        with pytest.raises(error):
            one.ask(question, 0.5 if question == "late" else 30)
        assert not one.alive


def test_nothing_is_left_open() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Sandbox(CODE, "-I", "-S") as one:
            one.ask("four", 30)
        del one
        gc.collect()


@pytest.mark.parametrize("fault", ["no program", "ends at once"])
def test_where_it_cannot_be_started_no_file_is_blamed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "no program":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    else:
        monkeypatch.setattr("hf_bico.models.sandbox._LOOP", "raise SystemExit")
    with pytest.raises(DeviceError, match="no second Python can be started"):
        require_quick(["a.*"], ["a"], "an adapter")
    monkeypatch.setattr("hf_bico.models.tokenization._renderers", [])
    with pytest.raises(DeviceError, match="no second Python can be started"):
        render_chat(text_tokenizer(chat=True), [{"role": "user", "content": "hello"}], answering=False)
