"""Jobs in Python: typed arguments, listed where they are asked for, and errors that name them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from click.testing import CliRunner

import hf_bico
from hf_bico import arguments
from hf_bico.arguments import as_written, on_the_command_line
from hf_bico.cli.main import main
from hf_bico.settings import OPTIONS, read_size
from support import ROOT
from support.scenes import Scene, make_scene

JOBS = {
    "port": arguments.PortOptions,
    "compare": arguments.CompareOptions,
    "diagnose": arguments.DiagnoseOptions,
    "evaluate_model": arguments.EvaluateOptions,
    "reproduce": arguments.ReproduceOptions,
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def test_the_options_of_a_port_are_the_settings() -> None:
    wanted = get_type_hints(hf_bico.Settings)
    sizes = {name for name, option in OPTIONS.items() if option.read is read_size}
    assert sizes == {"memory", "max_download"}
    expected = {name: kind | str if name in sizes else kind for name, kind in wanted.items()}
    assert get_type_hints(arguments.PortOptions) == expected


@pytest.mark.parametrize("job", JOBS)
def test_types_and_signature_list_the_same_options(job: str) -> None:
    signature = inspect.signature(getattr(hf_bico, job)).parameters
    typed = get_type_hints(JOBS[job])
    assert [one.kind for one in signature.values()].count(inspect.Parameter.VAR_KEYWORD) == 0
    unwrapped = inspect.unwrap(getattr(hf_bico, job)).__code__
    own = unwrapped.co_varnames[: unwrapped.co_argcount + unwrapped.co_kwonlyargcount]
    assert set(signature) == {*own, *typed}
    assert not {*own} & {*typed}, "named twice, which a type checker refuses"
    defaults = {one.name: one.default for one in fields(hf_bico.Settings)}
    assert {name: signature[name].default for name in typed} == {name: defaults[name] for name in typed}


def test_names_are_completed() -> None:
    from IPython.core.completer import IPCompleter, provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.push({"hf_bico": hf_bico})
    completer = shell.Completer
    assert isinstance(completer, IPCompleter)
    text = "hf_bico.port(per_"
    with provisionalcompleter():
        found = {one.text for one in completer.completions(text, len(text))}
    assert "per_class=" in found


TYPED = """
import hf_bico

ported = hf_bico.port("a/b", to="c/d", per_class=10, alpha="auto", memory="8GB", progress=True, evaluate=False)
accuracy: float | None = ported.accuracy
hf_bico.compare("a/b", "c/d", n=[10, 20], train_steps=[5, 10], readout=True)
hf_bico.diagnose("a/b", "c/d", n=10, method="bico")
hf_bico.evaluate_model("a/b", probe=100, split="test", progress=print)
hf_bico.plan("a/b", "c/d", token="t", memory="8GB")
"""
MISTYPED = {
    'hf_bico.port("a/b", to="c/d", per_class="ten")': r'incompatible type "str"; expected "int \| None"',
    'hf_bico.port("a/b", to="c/d", per_clas=10)': 'Unexpected keyword argument "per_clas"',
    'hf_bico.compare("a/b", to="c/d", format="full")': 'Unexpected keyword argument "format"',
    'hf_bico.evaluate_model("a/b", method="bico")': 'Unexpected keyword argument "method"',
    'hf_bico.plan("a/b", to="c/d", memory=[1])': 'incompatible type "list',
}


def test_a_type_checker_knows_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED + "".join(f"{line}\n" for line in MISTYPED))
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    found = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in found.stdout.splitlines() if ": error: " in line]
    first = TYPED.count("\n") + 1
    expected = [f"typed.py:{first + number}: error: .*{text}" for number, text in enumerate(MISTYPED.values())]
    assert len(lines) == len(expected), found.stdout
    for line, pattern in zip(lines, expected, strict=True):
        assert re.search(pattern, line)


@pytest.mark.parametrize(
    ("job", "given", "remedy"),
    [
        ("port", {"per_clas": 3}, "did you mean 'per_class'?"),
        ("port", {"k": 3}, "did you mean 'per_class'?"),
        ("port", {"fit_head": True}, "did you mean 'probe'?"),
        ("port", {"no_eval": True}, "did you mean 'evaluate'?"),
        ("compare", {"format": "adapter"}, "its arguments are: source, to, base, "),
        ("diagnose", {"polish": True}, "its arguments are: source, to, base, "),
        ("reproduce", {"alpha": 1.0}, "its arguments are: name, tasks, "),
    ],
)
def test_an_unknown_argument_is_refused(job: str, given: dict[str, Any], remedy: str) -> None:
    places = ("1",) if job == "reproduce" else ("source", "target")
    with pytest.raises(hf_bico.errors.UsageError) as told:
        getattr(hf_bico, job)(*places, **given)
    assert told.value.cause == f"{job}() got an unexpected keyword argument '{next(iter(given))}'"
    assert remedy in told.value.remedy


SPELT = {
    "name the model that was fine-tuned with --base": "name the model that was fine-tuned with base=...",
    "name it with --data, or use --alpha 1": "name it with data=..., or use alpha=1",
    "use --method bico, without --readout": 'use method="bico", without readout=True',
    "choose one with --config: few, many": "choose one with config=...: few, many",
    "choose another folder with -o, or replace it with --overwrite": (
        "choose another folder, or replace it with overwrite=True"
    ),
    "-n and -k were both given": "n and per_class were both given",
    "--rank was given with --format full": 'rank was given with format="full"',
    "use -k 3 or less, or -n": "use per_class=3 or less, or n",
    "--layers similarity compares what blocks read": 'layers="similarity" compares what blocks read',
    "give the class names: --class-names FILE": "give the class names: class_names=[...]",
    "--data of/it@refs/convert/parquet": 'data="of/it@refs/convert/parquet"',
    "leave --no-special-tokens out": "leave special_tokens=False out",
    "--control is measured, and --no-eval measures nothing": (
        "control=True is measured, and evaluate=False measures nothing"
    ),
    "measure it: --evaluation probe, or 'hf-bico eval --probe N'": (
        'measure it: evaluation="probe", or hf_bico.evaluate_model(probe=N)'
    ),
    "--probe is 3 and the split has 2": "probe is 3 and the split has 2",
    "fit a head with --probe": "fit a head with probe=True",
    "less by --polish --unlabelled DATA": "less by polish=True unlabelled=...",
    "cannot be repeated: --unlabelled-samples is 20": "cannot be repeated: unlabelled_samples is 20",
    "use a smaller --batch-size, --device cpu": 'use a smaller batch_size, device="cpu"',
    "is public: --private does not change that": "is public: private=True does not change that",
    "allow it with --max-download 3000000000": "allow it with max_download=3000000000",
    "merge it first: 'hf-bico apply ADAPTER -o FOLDER'": "merge it first: hf_bico.apply(ADAPTER).save(FOLDER)",
    "go on with: hf-bico push out user/x --private": "go on with: hf-bico push out user/x --private",
    "download it: hf download user/x --repo-type dataset": "download it: hf download user/x --repo-type dataset",
    "merge it with 'mlx_lm.fuse --de-quantize'": "merge it with 'mlx_lm.fuse --de-quantize'",
    "'a--base' is not a folder": "'a--base' is not a folder",
}


@pytest.mark.parametrize("typed", SPELT)
def test_options_are_spelt_as_arguments(typed: str) -> None:
    assert as_written(typed) == SPELT[typed]
    assert as_written(SPELT[typed]) == SPELT[typed], "an error passes several of our functions"
    with on_the_command_line():
        assert as_written(typed) == typed


Call = Callable[[Scene], object]
TOLD: Mapping[str, tuple[Call, list[str], str, str]] = {
    "no base": (
        lambda scene: hf_bico.port(scene.tuned, to=scene.target, data=scene.data),
        ["port", "TUNED", "--to", "TARGET", "--data", "DATA"],
        "base=...",
        "--base",
    ),
    "no data": (
        lambda scene: hf_bico.port(scene.tuned, to=scene.target, base=scene.base),
        ["port", "TUNED", "--to", "TARGET", "--base", "BASE"],
        "name a data set with data=...",
        "name a data set with --data",
    ),
    "two counts": (
        lambda scene: hf_bico.port(scene.tuned, to=scene.target, n=1, per_class=1),
        ["port", "TUNED", "--to", "TARGET", "-n", "1", "-k", "1"],
        "n and per_class were both given",
        "-n and -k were both given",
    ),
    "a wrong choice": (
        lambda scene: hf_bico.port(scene.tuned, to=scene.target, layers="indx"),
        ["port", "TUNED", "--to", "TARGET", "--layers", "indx"],
        "layers is 'indx'",
        "--layers is 'indx'",
    ),
    "a control that is not measured": (
        lambda scene: hf_bico.port(scene.tuned, to=scene.target, control=True, evaluate=False),
        ["port", "TUNED", "--to", "TARGET", "--control", "--no-eval"],
        "control=True is measured, and evaluate=False measures nothing",
        "--control is measured, and --no-eval measures nothing",
    ),
    "too many samples": (
        lambda scene: hf_bico.compare(scene.tuned, scene.target, base=scene.base, data=scene.data, n=9999),
        ["compare", "TUNED", "--to", "TARGET", "--base", "BASE", "--data", "DATA", "-n", "9999", "-o", "OUT"],
        "use n=",
        "use -n ",
    ),
    "a split that is not there": (
        lambda scene: hf_bico.evaluate_model(scene.target, scene.data, text_column="text"),
        ["eval", "TARGET", "--data", "DATA", "--text-column", "text"],
        "leave text_column out",
        "leave --text-column out",
    ),
    "the base itself": (
        lambda scene: hf_bico.extract(scene.base, base=scene.base),
        ["extract", "BASE", "--base", "BASE", "-o", "OUT"],
        "check that base is not",
        "check that --base is not",
    ),
    "a folder of others": (
        lambda scene: hf_bico.extract(scene.tuned, base=scene.base, rank=1).save(scene.data),
        ["extract", "TUNED", "--base", "BASE", "--rank", "1", "-o", "DATA"],
        "choose another folder",
        "choose another folder with -o",
    ),
}


@pytest.mark.parametrize("what", TOLD)
def test_errors_name_what_the_caller_wrote(what: str, scene: Scene, tmp_path: Path) -> None:
    call, words, argument, option = TOLD[what]
    with pytest.raises(hf_bico.BicoError) as told:
        call(scene)
    assert argument in str(told.value).replace("\nRemedy:", "")
    assert not re.search(r"(^|\s)-{1,2}[a-z]", str(told.value))
    places = {name.upper(): str(getattr(scene, name)) for name in ("tuned", "base", "target", "data")}
    typed = [{**places, "OUT": str(tmp_path / "out")}.get(word, word) for word in words]
    assert option in " ".join(CliRunner().invoke(main, typed).stderr.split())
