"""Whatever stands in a file, its reader gives a value or one of our errors; and the inputs that once broke one."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_bico.errors import BicoError
from hf_bico.hub.repo_metadata import base_of, data_of, read_metadata
from hf_bico.models.adapters.config import read_adapter_config
from hf_bico.models.checkpoints import FileCheckpoint
from hf_bico.models.deltas import read_delta
from hf_bico.models.families.open_clip import OpenClip
from hf_bico.models.families.pretrained import require_within
from hf_bico.models.families.transformers_clip import TransformersClip
from hf_bico.reports.model_cards import write_card
from hf_bico.reports.record import read_any, read_record
from support import ROOT
from support.bounds import within
from support.fuzz import ending_of, run
from support.fuzz_readers import READERS, Scenes, corpus, kind_of
from support.mutations import change
from support.records import an_adapter_record

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MUTATIONS = 50
"""Spoilt inputs of each reader in the test suite."""
SECONDS, LARGEST_CARD = 30, 1_000_000
"""Of the card of the largest record that is read, and its bytes."""

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(exclude_categories=()), max_size=20)
    | st.sampled_from(["LORA", "clip", "org/model", "model.safetensors", "../x", "(a+)+$", "\ud800"])
)
names = st.text(string.ascii_lowercase + "_.", max_size=12) | st.sampled_from(
    ["schema", "source", "weight_map", "peft_type", "r", "base_model", "datasets", "vision_config", "model_cfg", "job"]
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=20
)
objects = st.dictionaries(names, anything, max_size=6)


def read_card(folder: Path) -> None:
    origin = read_metadata(folder)
    data_of(origin, "x")
    base_of(origin, "x")


def read_config(folder: Path) -> None:
    shapes = {"a": (2, 3)}
    for family in (TransformersClip(), OpenClip()):
        require_within(family.read_config(folder), shapes, "x")


FILES: dict[str, tuple[tuple[str, ...], Callable[[Path], Any]]] = {
    "record": (("bico.json",), read_any),
    "config": (("config.json", "open_clip_config.json"), read_config),
    "adapter": (("adapter_config.json",), lambda folder: read_adapter_config(folder, "x")),
    "lineage": (("config.json", "adapter_config.json"), read_card),
    "index": (("model.safetensors.index.json",), FileCheckpoint.in_folder),
}
SEEDS = {"record": "record", "config": "config", "adapter": "adapter", "lineage": "config", "index": "index"}


def tried(read: Callable[[Path], Any], folder: Path) -> None:
    """A value or one of our errors, in two lines; anything else passes on and fails the test."""
    told = None
    try:
        read(folder)
    except BicoError as error:
        told = error
    assert told is None or (told.cause.strip() and told.remedy.strip() and "\n" not in told.cause + told.remedy)


@pytest.mark.parametrize("reader", FILES)
@EXAMPLES
@given(value=anything | objects)
def test_any_json_is_read_or_refused(reader: str, value: Any, tmp_path: Path) -> None:
    files, read = FILES[reader]
    for file in files:
        (tmp_path / file).write_text(json.dumps(value))
    tried(read, tmp_path)


@pytest.mark.parametrize("reader", FILES)
@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_a_good_file_with_changes_is_read_or_refused(reader: str, seed: int, tmp_path: Path) -> None:
    files, read = FILES[reader]
    generator = random.Random(seed)
    value = json.loads(generator.choice(corpus_of_json(SEEDS[reader])))
    for _ in range(generator.randint(1, 4)):
        value = change(value, generator)
    for file in files:
        (tmp_path / file).write_text(json.dumps(value))
    tried(read, tmp_path)


def corpus_of_json(reader: str) -> list[bytes]:
    return [file.read_bytes() for file in corpus(reader) if file.name.endswith("-seed.json")]


@EXAMPLES
@given(head=st.text(max_size=300) | anything.map(lambda value: json.dumps(value)), body=st.text(max_size=50))
def test_any_card_is_read_or_refused(head: str, body: str, tmp_path: Path) -> None:
    text = f"---\n{head}\n---\n{body}"
    (tmp_path / "README.md").write_bytes(text.encode(errors="surrogatepass"))
    tried(read_card, tmp_path)


@EXAMPLES
@given(
    header=anything
    | objects
    | st.dictionaries(
        names,
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "X"]),
                "shape": st.lists(st.integers(-2, 2**40), max_size=3),
                "data_offsets": st.lists(st.integers(-2, 2**40), min_size=1, max_size=3),
            }
        ),
        max_size=3,
    ),
    data=st.binary(max_size=64),
)
def test_any_header_of_weights_is_read_or_refused(header: Any, data: bytes, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    for file in ("model.safetensors", "task_vector.safetensors"):
        (tmp_path / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
    tried(lambda folder: read_delta(folder / "task_vector.safetensors"), tmp_path)
    (tmp_path / "task_vector.safetensors").unlink()
    tried(read_tensors, tmp_path)


def read_tensors(folder: Path) -> None:
    checkpoint = FileCheckpoint.in_folder(folder)
    for name in checkpoint.shapes:
        checkpoint.tensor(name)


@pytest.fixture(autouse=True)
def _without_the_last_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is to be seen."""
    monkeypatch.setenv("HF_BICO_DEBUG", "1")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where seconds are the limit, fewer show it too."""
    monkeypatch.setattr("hf_bico.models.tokenization.TEMPLATE_SECONDS", 2.0)


@pytest.fixture(scope="module", params=sorted(READERS))
def scenes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return Scenes(request.param, tmp_path_factory.mktemp("scenes"))


def test_what_was_found_once_is_mended(scenes: Scenes, tmp_path: Path) -> None:
    files = corpus(scenes.reader)
    assert {kind_of(file) for file in files} == set(READERS[scenes.reader]), "there is a seed of every kind"
    for file in files:
        ending = ending_of(scenes, kind_of(file), file.read_bytes(), tmp_path / "scene")
        assert not ending.bad, f"{file}\n{ending.told}"
        if file.stem.endswith("-seed"):
            assert ending.name == "returned", f"{file} is good, and {ending}"


def test_a_short_fuzzing_finds_nothing(scenes: Scenes, tmp_path: Path) -> None:
    report = run(scenes.reader, 60, 0, tmp_path, MUTATIONS)
    assert report.executions == MUTATIONS
    assert report.findings == [], report.text()


def _many_sites(raw: Any) -> None:
    site = {"shape_source": [1, 1], "shape_target": [1, 1], "energy": 0.0, "score_in": 1.0}
    raw["method"]["layers"] = [0] * 512
    places = ((f"blocks.{number % 500}.", f"role{number}") for number in range(20_000))
    raw["sites"] = [{**site, "name": block + role, "role": role, "source": block + role} for block, role in places]


def _many_reasons(raw: Any) -> None:
    raw["left"] = [{"name": "a", "reason": f"reason {number}", "energy": 0.0} for number in range(50_000)]


def _long_texts(raw: Any) -> None:
    raw["notices"] = ["| <b> " * 1600] * 100
    raw["run"]["versions"] = {f"{number:<9000}": "|" * 9000 for number in range(100)}
    raw["data"]["columns"] = {f"{number:<9000}": "`" * 9000 for number in range(100)}
    raw["objective"]["templates"] = ["{}" * 400] * 10_000


def _long_lists(raw: Any) -> None:
    raw["target"]["language"] = ["abc-abcdefgh"] * 10_000
    raw["data"]["indices"] = [1] * 1_000_000
    raw["data"]["parts"] = [{"file": "a", "row_groups": [1] * 1_000_000, "rows": 1}]
    raw["evaluation"] *= 33
    raw["method"]["alpha"] = [1.0] * 10_000


def _many_classes(raw: Any) -> None:
    raw["objective"]["head"] = "carried"
    raw["data"]["class_names"] = ["\N{GREEK SMALL LETTER ALPHA}" * 70] * 100_000


@pytest.mark.parametrize("grow", [_many_sites, _many_reasons, _long_texts, _long_lists, _many_classes])
def test_the_largest_record_gives_a_small_card_soon(grow: Callable[[Any], None], tmp_path: Path) -> None:
    raw = json.loads(an_adapter_record().to_json())
    grow(raw)
    (tmp_path / "bico.json").write_text(json.dumps(raw, ensure_ascii=False))
    with within(SECONDS):
        card = write_card(read_record(tmp_path), tmp_path)
    assert card.stat().st_size < LARGEST_CARD


def test_a_change_of_many_parts_gives_a_small_card_soon(tmp_path: Path) -> None:
    raw = json.loads((ROOT / "model_cards" / "extracted-adapter" / "bico.json").read_text())
    part = raw["parts"][0]
    models = [{**part["model"], "license": f"{number:x>80}"} for number in range(1_000)]
    raw |= {"job": "apply", "parts": [{**part, "weight": 0.1, "model": model} for model in models]}
    raw["layers"] = [{"name": f"layer{number}.weight", "energy": 0.0, "kept": 1.0} for number in range(20_000)]
    (tmp_path / "bico.json").write_text(json.dumps(raw))
    with within(SECONDS):
        card = write_card(read_any(tmp_path), tmp_path)
    assert card.stat().st_size < LARGEST_CARD
