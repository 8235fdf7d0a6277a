"""Records and cards of results from pickles name the files that people have, and say once that they are pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_bico
from hf_bico.errors import BaseMismatchError
from hf_bico.reports.record import ModelRecord, read_record
from hf_bico.utils.files import sha256_of
from support.hub import Hub
from support.hub_scenes import BASE, TARGET, publish
from support.language_toys import fine_tuned, sentences, write_decoder
from support.paper import PAPER

pytestmark = pytest.mark.quick

PICKLE = "pytorch_model.bin"


def pickled(folder: Path, shards: int = 1) -> Path:
    """The model with its weights in pickles, as older releases of transformers wrote them."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(state, folder / PICKLE)
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = {name: state[name] for name in sorted(state)[number::shards]}
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path, Path]:
    """A fine-tuned Llama, its base and a target, all pickled, and texts."""
    from huggingface_hub import constants
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.chdir(tmp_path)
    base = write_decoder(tmp_path / "small-lm")
    tuned = fine_tuned(base, tmp_path / "small-tuned", LlamaForCausalLM)
    target = write_decoder(tmp_path / "large-lm", width=24, seed=1)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(40)))
    return pickled(tuned), pickled(base), pickled(target, shards=2), texts


def port(source: Path, base: Path, target: Path, texts: Path) -> hf_bico.Ported:
    options: dict[str, Any] = {"n": 16, "evaluate": False, "allow_pickle": True, **PAPER}
    return hf_bico.port(source, to=target, base=base, data=str(texts), **options)


def test_a_port_names_the_files_that_were_given(scene: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    source, base, target, _ = scene
    folder = port(*scene).save(tmp_path / "out")
    record = read_record(folder)
    over = record.source.base
    assert isinstance(over, ModelRecord)
    for found, given in ((record.source, source), (over, base), (record.target, target)):
        assert found.sha256 == sha256_of(given.glob("*.bin"))
    card = (folder / "README.md").read_text()
    assert f"`{PICKLE}` `{over.sha256[PICKLE][:16]}`" in card
    assert "pytorch_model-00002-of-00002.bin" in card
    assert hf_bico.rerun(folder, allow_pickle=True) == hf_bico.porting.rerun.Rerun({"model.safetensors": True}, [], [])


def test_a_note_stands_once_though_base_and_target_are_one(
    scene: tuple[Path, Path, Path, Path], tmp_path: Path
) -> None:
    source, base, _, texts = scene
    ported = port(source, base, base, texts)
    assert [note for note in ported.record.notices if "small-lm are pickled" in note] == [
        f"The weights of small-lm are pickled: tensors alone were read from {PICKLE}."
    ]


def test_a_card_names_each_pickled_model_once(scene: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    source, base, target, texts = scene
    (target / f"{PICKLE}.index.json").unlink()
    parts = [torch.load(file, weights_only=True) for file in sorted(target.glob("*.bin"))]
    for file in target.glob("*.bin"):
        file.unlink()
    torch.save({name: tensor for part in parts for name, tensor in part.items()}, target / PICKLE)
    folder = port(source, base, target, texts).save(tmp_path / "out")
    notes = [line for line in (folder / "README.md").read_text().splitlines() if "are pickled" in line]
    assert len(notes) == len(set(notes)) == 3


def test_extract_and_apply_say_it_too_and_their_commands_allow_it(
    scene: tuple[Path, Path, Path, Path], tmp_path: Path
) -> None:
    source, base, *_ = scene
    taken = hf_bico.extract(source, base, rank=2, allow_pickle=True)
    assert taken.record.parts[0].model.sha256 == sha256_of([source / PICKLE])
    assert taken.record.target.sha256 == sha256_of([base / PICKLE])
    assert taken.record.command == "hf-bico extract small-tuned --base small-lm --rank 2 --allow-pickle"
    assert [note for note in taken.record.notices if "pickled" in note] == [
        f"The weights of {name} are pickled: tensors alone were read from {PICKLE}."
        for name in ("small-tuned", "small-lm")
    ]
    adapter = taken.save(tmp_path / "adapter")
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    added = hf_bico.apply(adapter, to=base, allow_pickle=True)
    assert added.record.parts[0].model.sha256 == sha256_of([adapter / "adapter_model.bin"])
    assert added.record.command == "hf-bico apply adapter --to small-lm --allow-pickle"
    assert sum("adapter are pickled" in note for note in added.record.notices) == 1
    assert not any("other weights" in note for note in added.record.notices)


def test_a_pickled_target_gets_its_id_only_if_the_pickle_is_the_repos(hub: Hub, tmp_path: Path) -> None:
    from hf_bico.porting.planner import plan

    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    pickled(scene.target)
    hub.repo(TARGET).commit({PICKLE: (scene.target / PICKLE).read_bytes()}, delete=["model.safetensors"])
    named: dict[str, Any] = {"base": scene.base, "data": scene.data, "allow_pickle": True}
    planned = plan(scene.tuned, scene.target, target_id=TARGET, **named)
    assert planned.lineage.target.commit == hub.repo(TARGET).head()
    assert planned.fetched().lineage.target.sha256.keys() == {PICKLE}
    with pytest.raises(BaseMismatchError, match=f"not those of '{BASE}'"):
        plan(scene.tuned, scene.target, target_id=BASE, **named)
