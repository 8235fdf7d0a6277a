"""What each command imports: a library that a run does not need costs its user seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.worlds import small_world

COMPILER = "torch._dynamo.eval_frame"
"""A module of torch's compiler that its stand-in does not have."""
OPEN_CLIP = ("open_clip", "torchvision", "timm", "transformers")
"""What the import of open_clip brings with it."""
WATCHED = (COMPILER, "torch", "torchvision", "open_clip", "timm", "transformers", "peft")
WATCHED += ("datasets", "pandas", "evaluate", "sklearn", "matplotlib")


def imported(*words: str) -> set[str]:
    """The watched modules that a process has imported after this command."""
    code = (
        f"import sys\nfrom hf_bico.cli.main import main\nsys.argv = ['hf-bico', *{list(words)!r}]\n"
        f"try:\n    main()\nexcept SystemExit as ending:\n    assert not ending.code, ending.code\n"
        f"print('IMPORTED', *[name for name in {WATCHED!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("IMPORTED")[2].split())


@pytest.fixture(scope="module")
def models() -> Path:
    return small_world(0).folder / "models"


@pytest.fixture(scope="module")
def data() -> str:
    return str(small_world(0).folder / "data" / "inverted")


def test_a_port_of_open_clip_models(models: Path, data: str, tmp_path: Path) -> None:
    source, base, target = (str(models / name) for name in ("narrow-inverted", "narrow", "wide"))
    words = ["port", source, "--base", base, "--to", target, "--data", data, "--method", "bico", "--alpha", "1"]
    found = imported(*words, "-o", str(tmp_path / "out"))
    assert found == {"torch", *OPEN_CLIP}


def test_an_evaluation(models: Path, data: str) -> None:
    found = imported("eval", str(models / "wide"), "--data", data, "-n", "20", "-q")
    assert found == {"torch", *OPEN_CLIP}


def test_extracting_and_applying_an_adapter(models: Path, tmp_path: Path) -> None:
    source, base, adapter = str(models / "narrow-inverted"), str(models / "narrow"), str(tmp_path / "adapter")
    assert imported("extract", source, "--base", base, "--rank", "4", "-o", adapter) == {"torch"}
    assert imported("apply", adapter, "--to", base, "-o", str(tmp_path / "applied")) == {"torch"}


def test_a_plan(models: Path) -> None:
    source, base, target = (str(models / name) for name in ("narrow-inverted", "narrow", "wide"))
    assert imported("plan", source, "--base", base, "--to", target) == set()


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        pytest.param(
            {"--device": "cuda"},
            "no CUDA device 'cuda'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
        ({"-n": "5000"}, "5000 samples were asked for"),
        ({"--data": "no-such-folder/x/y"}, "there is no folder 'no-such-folder/x/y'"),
        ({"--to": "no-such-folder/x/y"}, "there is no folder 'no-such-folder/x/y'"),
        ({"--split": "tran"}, "has no split 'tran'"),
    ],
    ids=["no GPU", "too many samples", "no data", "no target", "no split"],
)
def test_a_mistake_is_said_before_torch_is_imported(
    changed: dict[str, str], cause: str, models: Path, data: str, tmp_path: Path
) -> None:
    source, base, target = (str(models / name) for name in ("narrow-inverted", "narrow", "wide"))
    options = {"--base": base, "--to": target, "--data": data, "-o": str(tmp_path / "out"), **changed}
    words = ["port", source, *(word for pair in options.items() for word in pair)]
    code = (
        f"import sys\nfrom hf_bico.cli.main import main\nsys.argv = ['hf-bico', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as ending:\n    print('ENDED', ending.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert cause in done.stderr
    assert done.stdout.endswith("ENDED 1 False\n")


def run_postponed(*lines: str) -> None:
    """Run these lines in a process that has postponed the compiler."""
    start = ("import sys", "from hf_bico.runtime.late_imports import postpone_imports", "postpone_imports()")
    done = subprocess.run([sys.executable, "-c", "\n".join((*start, *lines))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_compile_works_after_its_import_was_postponed() -> None:
    run_postponed(
        "import open_clip, torch",
        f"assert {COMPILER!r} not in sys.modules",
        "step = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).step",
        "step()",
        f"assert {COMPILER!r} not in sys.modules",
        "compiled = torch.compile(torch.nn.Linear(2, 1), backend='eager')",
        "assert compiled(torch.ones(3, 2)).shape == (3, 1)",
        f"assert {COMPILER!r} in sys.modules",
        "assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)",
    )


def test_a_function_that_is_not_a_mark_is_the_real_one() -> None:
    run_postponed(
        "import torch",
        "def double(x):",
        "    return 2 * x",
        "assert torch._dynamo.assume_constant_result(double) is double",
        f"assert {COMPILER!r} not in sys.modules",
        "explained = torch._dynamo.explain(double)",
        "assert explained is not double",
        f"assert {COMPILER!r} in sys.modules",
    )


def test_stand_ins_are_good_in_annotations_questions_and_tables() -> None:
    run_postponed(
        "import torch",
        "from torch.distributed.tensor import DTensor, Replicate, Shard",
        "from scipy.optimize import linear_sum_assignment",
        "from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE as size",
        "def shown(tensor: DTensor | None, other: None | DTensor = None) -> DTensor | int: ...",
        "assert not isinstance(torch.ones(2), DTensor)",
        "table = {'rows': Shard(0)}",
        "assert table['rows']",
        "real = 'torch.distributed.tensor._api'",
        "assert real not in sys.modules and 'scipy.optimize._lsap' not in sys.modules",
        "assert linear_sum_assignment([[1, 0], [0, 1]])[1].tolist() == [1, 0]",
        "assert 'scipy.optimize._lsap' in sys.modules and real not in sys.modules",
        "assert (300 // size, size + 1) == (2, 129)",
        "assert table['rows'].dim == 0",
        "import torch.distributed.tensor as real_one",
        "assert isinstance(table['rows'], real_one.Shard) and table['rows'] == real_one.Shard(0)",
        "assert type(torch.distributed.tensor._dispatch.__name__) is str",
        "assert type(real_one.DTensor._op_dispatcher).__module__ == 'torch.distributed.tensor._dispatch'",
    )


def test_the_compiler_is_postponed_once() -> None:
    run_postponed(
        "before = len(sys.meta_path)",
        "postpone_imports()",
        "assert len(sys.meta_path) == before",
        "import torch._dynamo",
        "assert len(sys.meta_path) == before",
        "torch._dynamo.reset()",
        "after = len(sys.meta_path)",
        "assert after < before",
        "postpone_imports()",
        "assert len(sys.meta_path) == after",
    )
