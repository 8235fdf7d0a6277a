"""What the libraries raise, each by a real call of theirs, as one of our errors; and a bug with its number."""

from __future__ import annotations

import errno
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

import hf_bico
from hf_bico import errors
from hf_bico.data.loading import readable
from hf_bico.runtime.library_errors import as_bico_error, bug_id, translate_errors
from support.hub import Fault, Hub
from support.scenes import make_scene

pytestmark = pytest.mark.quick


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("it ran",))


def too_much_memory() -> None:
    import torch

    torch.empty(10**15)


def too_much_of_python() -> None:
    bytearray(2**62)


def too_large_a_stack() -> None:
    import threading

    before = threading.stack_size(2**46)
    try:
        threading.Thread(target=print).start()
    finally:
        threading.stack_size(before)


def too_many_files() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        open("/dev/null").close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def a_library_without_room() -> None:
    raise ImportError("libtorch_cpu.so: failed to map segment from shared object")


def out_of_the_device() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def a_device_that_failed() -> None:
    import torch

    if not hasattr(torch, "AcceleratorError"):
        pytest.skip("this torch has no error of its own for it")
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


def a_process_that_is_gone() -> None:
    import torch

    raise torch.distributed.DistNetworkError("Connection reset by peer")


def broken_safetensors(folder: Path) -> None:
    from safetensors import safe_open

    (folder / "x.safetensors").write_bytes(b"\xff" * 32)
    safe_open(str(folder / "x.safetensors"), framework="pt")


def evil_pickle(folder: Path) -> None:
    import torch

    (folder / "x.bin").write_bytes(pickle.dumps(Evil()))
    torch.load(folder / "x.bin", weights_only=True)


def no_config(folder: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(folder)


def odd_config(folder: Path) -> None:
    from transformers import AutoModel, CLIPConfig

    AutoModel.from_config(CLIPConfig(vision_config={"hidden_size": 10, "num_attention_heads": 3}))


def odd_open_clip() -> None:
    import open_clip

    open_clip.create_model("no-such-model")


def odd_peft() -> None:
    import peft
    import torch

    peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig(target_modules=["nothing"]))


def no_data() -> None:
    import datasets

    datasets.load_dataset("user/no-such-data-set")


def odd_parquet(folder: Path) -> None:
    import pyarrow.parquet

    (folder / "x.parquet").write_bytes(b"PAR1 no parquet PAR1")
    pyarrow.parquet.read_table(folder / "x.parquet")


def no_image() -> None:
    from PIL import Image

    Image.open(io.BytesIO(b"text"))


def no_template() -> None:
    import jinja2

    jinja2.Template("{% for %}")


def no_yaml() -> None:
    import yaml

    yaml.safe_load("a: [")


def no_room() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def no_temporary() -> None:
    import tempfile
    from unittest.mock import patch

    with (
        patch.object(tempfile, "tempdir", None),
        patch.object(tempfile, "_candidate_tempdir_list", lambda: ["/no/such"]),
    ):
        tempfile.mkdtemp()


def no_file() -> None:
    Path("/no/such/file").read_text()


def no_right(folder: Path) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(folder))


RAISED: dict[str, tuple[Callable[..., None], type[errors.BicoError]]] = {
    "torch, main memory": (too_much_memory, errors.MemoryExhaustedError),
    "torch, the device's": (out_of_the_device, errors.MemoryExhaustedError),
    "torch, a device": (a_device_that_failed, errors.DeviceError),
    "torch, other processes": (a_process_that_is_gone, errors.ProcessLostError),
    "Python's memory": (too_much_of_python, errors.MemoryExhaustedError),
    "a thread": (too_large_a_stack, errors.DeviceError),
    "open files": (too_many_files, errors.DeviceError),
    "an import": (a_library_without_room, errors.MemoryExhaustedError),
    "safetensors": (broken_safetensors, errors.BrokenWeightsError),
    "torch's unpickler": (evil_pickle, errors.PickledWeightsError),
    "transformers, a file": (no_config, errors.ModelError),
    "transformers, a size": (odd_config, errors.ModelError),
    "open_clip": (odd_open_clip, errors.ModelError),
    "peft": (odd_peft, errors.AdapterError),
    "datasets": (no_data, errors.DataError),
    "pyarrow": (odd_parquet, errors.DataError),
    "Pillow": (no_image, errors.UnreadableSampleError),
    "jinja2": (no_template, errors.DataError),
    "yaml": (no_yaml, errors.ModelError),
    "a full disk": (no_room, errors.OutputError),
    "temporary files": (no_temporary, errors.OutputError),
    "a missing file": (no_file, errors.OutputError),
    "rights": (no_right, errors.OutputError),
}


@pytest.mark.parametrize("name", RAISED)
def test_what_a_library_raises_is_one_of_ours(name: str, tmp_path: Path, hub: Hub, capfd: Any) -> None:
    raises, kind = RAISED[name]
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever the library chooses
        raises(*([tmp_path] if inspect.signature(raises).parameters else []))
    assert not isinstance(raised.value, errors.BicoError)
    ours = as_bico_error(raised.value)
    assert type(ours) is kind
    assert "\n" not in ours.cause + ours.remedy
    assert ours.cause
    assert ours.remedy
    assert "it ran" not in capfd.readouterr().out


ANSWERS: dict[str, tuple[Fault | None, type[errors.BicoError]]] = {
    "503": (Fault(times=None), errors.HubUnavailableError),
    "a dropped connection": (Fault(kind="drop", times=None), errors.HubUnavailableError),
    "gated": (Fault(status=403, headers={"X-Error-Code": "GatedRepo"}, times=None), errors.AccessError),
    "no such repo": (None, errors.RepoNotFoundError),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_hubs_client_raises_is_one_of_ours(name: str, hub: Hub) -> None:
    from huggingface_hub import HfApi

    fault, kind = ANSWERS[name]
    if fault is not None:
        hub.inject(replace(fault))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        HfApi().model_info("user/x")
    assert type(as_bico_error(raised.value)) is kind


def test_a_data_set_is_not_blamed_for_a_limit_on_threads() -> None:
    with pytest.raises(errors.DataNotFoundError) as raised, readable("pictures"):
        raise pyarrow.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable")
    ours = as_bico_error(raised.value)
    assert type(ours) is errors.DeviceError
    assert "ulimit -u" in ours.remedy


def a_bug() -> None:
    raise ZeroDivisionError("of ours")


def test_a_bug_has_a_number_that_depends_on_where_it_is() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        a_bug()
    ours = as_bico_error(raised.value)
    assert type(ours) is errors.UnforeseenError
    assert bug_id(raised.value) in ours.cause
    assert bug_id(raised.value) != bug_id(KeyError())


def test_python_gets_our_errors_with_the_librarys_behind_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(tmp_path)
    exec("def fail(*_): return 1 // 0", made := dict[str, Any]())  # of no file: not taken for the caller's own
    monkeypatch.setattr("hf_bico.porting.planner.require_common_objective", made["fail"])
    with pytest.raises(errors.UnforeseenError, match=r"unexpected ZeroDivisionError.*\[bico-[0-9a-f]{8}\]") as raised:
        hf_bico.plan(scene.tuned, scene.target, base=scene.base)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    monkeypatch.setenv("HF_BICO_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        hf_bico.plan(scene.tuned, scene.target, base=scene.base)


def test_errors_of_the_callers_own_pass_as_they_are(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)

    def watched(*_: Any) -> None:
        raise LookupError("the caller's own")

    with pytest.raises(LookupError, match="the caller's own"):
        hf_bico.port(scene.tuned, scene.target, base=scene.base, data=str(scene.data), n=4, progress=watched)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        hf_bico.port(scene.tuned)  # type: ignore[call-arg]
    with pytest.raises(KeyboardInterrupt), translate_errors():
        raise KeyboardInterrupt


def test_every_function_of_the_api_has_the_net() -> None:
    functions = [getattr(hf_bico, name) for name in hf_bico.__all__ if name.islower()]
    without = {hf_bico.show_progress, hf_bico.register_method, hf_bico.register_family}  # they read and load nothing
    functions = [function for function in functions if function not in without]
    assert len(functions) == 9
    methods = [hf_bico.Ported.save, hf_bico.Ported.model, hf_bico.Ported.push_to_hub, hf_bico.TaskVector.save]
    methods += [hf_bico.TaskVector.from_adapter, hf_bico.TaskVector.from_models, hf_bico.TaskVector.load]
    methods += [hf_bico.TaskVector.save_adapter, hf_bico.TaskVector.push_to_hub, hf_bico.Comparison.load]
    methods += [hf_bico.Comparison.save, hf_bico.Diagnosis.load, hf_bico.Diagnosis.save]
    for function in (*functions, *methods):
        nets = [
            cell
            for cell in _cells(function)
            if getattr(cell.cell_contents, "func", None) is translate_errors.__wrapped__
        ]
        assert nets, function


def _cells(function: Any) -> list[Any]:
    found = []
    while function is not None:
        found += list(getattr(getattr(function, "__func__", function), "__closure__", None) or ())
        function = getattr(function, "__wrapped__", None)
    return found


@pytest.mark.parametrize("kind", [errors.BicoError, errors.RankError, errors.HeldBackError])
def test_an_error_comes_whole_from_another_process(kind: type[errors.BicoError]) -> None:
    sent = pickle.loads(pickle.dumps(kind("there is no 'x'", "check it")))
    assert (type(sent), sent.cause, sent.remedy, str(sent)) == (
        kind,
        "there is no 'x'",
        "check it",
        "there is no 'x'\nRemedy: check it",
    )
