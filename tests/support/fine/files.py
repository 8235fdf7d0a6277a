"""Cases of folders, task vectors and records that look fine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import hf_bico
from hf_bico.errors import BaseMismatchError, PushError
from support.fine.cases import FILE, Outcome, Refused, Right, Said, Stage, case, outcome_of, rewrite
from support.paper import PAPER
from support.transformers_world import as_transformers

FILES = "Files"
VECTORS = "Task vectors and records"


@case(
    FILES,
    "a folder with the weights of both libraries",
    "the two files hold different models",
    Said(
        "narrow-inverted holds two different models: open_clip_model.safetensors, which was used,"
        " and model.safetensors."
    ),
)
def two_layouts_that_differ(stage: Stage) -> Outcome:
    tuned = stage.copied(stage.tuned)
    other = as_transformers(stage.world.fine_tuned("narrow", "rotated-90"), stage.place("other"))
    for file in other.iterdir():
        if not (tuned / file.name).exists():
            shutil.copy(file, tuned)
    return stage.port(tuned)


@case(FILES, "a folder with the weights of both libraries", "nothing: the two files hold the same model", Right())
def two_layouts_that_agree(stage: Stage) -> Outcome:
    tuned = stage.copied(stage.tuned)
    for file in as_transformers(stage.tuned, stage.place("other")).iterdir():
        if not (tuned / file.name).exists():
            shutil.copy(file, tuned)
    return stage.port(tuned)


@case(FILES, "a model.safetensors", "stale shards of another model and their index lie beside it", Right())
def stale_shards(stage: Stage) -> Outcome:
    tuned = stage.copied(stage.tuned)
    shard = tuned / "open_clip_model-00001-of-00001.safetensors"
    save_file(load_file(stage.base / FILE), shard)
    names = ",".join(f'"{name}": "{shard.name}"' for name in load_file(shard))
    (tuned / f"{FILE}.index.json").write_text(f'{{"weight_map": {{{names}}}}}')
    return stage.port(tuned)


def _saved_vector(stage: Stage) -> Path:
    vector = hf_bico.TaskVector.from_models(stage.tuned, base=stage.base)
    return vector.save(stage.place("vector")).parent


@case(
    VECTORS,
    "a saved task vector",
    "it was made for another model of the same shape",
    Said("vector was made for other weights than those of narrow-rotated-90."),
)
def vector_of_another_base(stage: Stage) -> Outcome:
    return outcome_of(hf_bico.apply(_saved_vector(stage), to=stage.world.fine_tuned("narrow", "rotated-90")))


@case(
    VECTORS,
    "two saved task vectors",
    "they were made for different models",
    Refused(
        BaseMismatchError, "the task vectors were made for different weights, of 'narrow' and of 'narrow-rotated-90'"
    ),
)
def vectors_of_two_bases(stage: Stage) -> Outcome:
    other = hf_bico.TaskVector.from_models(stage.tuned, base=stage.world.fine_tuned("narrow", "rotated-90"))
    vectors = [_saved_vector(stage), other.save(stage.place("other")).parent]
    sum(hf_bico.TaskVector.load(vector) for vector in vectors)
    raise AssertionError("they were added")


@case(
    VECTORS,
    "a saved task vector",
    "it is written as an adapter of another model of the same shape",
    Refused(BaseMismatchError, "the task vector was made for other weights than those of 'narrow-rotated-90'"),
)
def vector_as_an_adapter_of_another_base(stage: Stage) -> Outcome:
    vector = hf_bico.TaskVector.load(_saved_vector(stage))
    vector.save_adapter(stage.place("adapter"), base=stage.world.fine_tuned("narrow", "rotated-90"))
    raise AssertionError("it was written")


@case(
    VECTORS,
    "an extracted adapter",
    "it was taken over a base that has nothing to do with the fine-tune",
    Said(
        "Is other its base? The fine-tuned model differs from its base by 140% of the weights' "
        "own norm, which fine-tuning does not do."
    ),
)
def extracted_over_a_stranger(stage: Stage) -> Outcome:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        base = stage.altered(
            stage.base,
            lambda state: {n: t[torch.randperm(len(t))] if t.ndim == 2 else t for n, t in state.items()},
            "other",
        )
    return outcome_of(hf_bico.extract(stage.tuned, base, rank=4))


def _written_port(stage: Stage) -> Path:
    where: dict[str, Any] = {"to": stage.target, "base": stage.base, "data": stage.data}
    return hf_bico.port(stage.tuned, **where, n=100, evaluate=False, **PAPER).save(stage.place("ported"))


@case(
    VECTORS,
    "a port with its record",
    "its weights were changed afterwards",
    Refused(PushError, "'open_clip_model.safetensors' in 'ported' is not the file that the record speaks of"),
)
def weights_changed_after_the_record(stage: Stage) -> Outcome:
    from hf_bico.porting.publish import push_folder

    folder = _written_port(stage)
    rewrite(folder / FILE, lambda state: {**state, "logit_scale": state["logit_scale"] + 1})
    push_folder(folder, "user/ported")
    raise AssertionError("it was pushed")
