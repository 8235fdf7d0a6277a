"""Weights as training tools leave them: their names, their files, and the sections of those, for every family."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hf_bico
from hf_bico.errors import (
    BicoError,
    BrokenWeightsError,
    PickledWeightsError,
    RepoNotFoundError,
    UnsupportedModelError,
    WeightsNotFoundError,
)
from hf_bico.models.families import unwrapped_names
from hf_bico.models.model import Model
from hf_bico.models.pickles import convert
from hf_bico.porting.planner import plan
from support.language_toys import (
    fine_tuned,
    save_model,
    sentences,
    text_tokenizer,
    vocabulary_size,
    write_decoder,
    write_encoder,
    write_t5,
    write_vit,
)
from support.paper import PAPER
from support.toys import CLASS_NAMES, WRITERS, Toy, changed, open_clip_config, random_rows, random_state

pytestmark = pytest.mark.quick

State = dict[str, Tensor]
TOY = Toy(width=8, blocks=2, embedding=4, text_width=8)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf-home"))
    return tmp_path / "hf-home" / "hf-bico" / "converted"


def write_opt(folder: Path) -> Path:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 8, "ffn_dim": 16, "num_hidden_layers": 2, "word_embed_proj_dim": 8}
    config = OPTConfig(**sizes, num_attention_heads=2, vocab_size=vocabulary_size(), max_position_embeddings=32)
    return save_model(OPTForCausalLM(config), folder, 0, text_tokenizer())


def write_clip(library: str) -> Callable[[Path], Path]:
    return lambda folder: WRITERS[library](folder, TOY, random_state(TOY, 0))


def load_open_clip(folder: Path) -> nn.Module:
    import open_clip

    model: nn.Module = open_clip.CLIP(**open_clip_config(TOY))
    model.load_state_dict(load_file(folder / "open_clip_model.safetensors"), strict=False)
    return model


def by_class(name: str) -> Callable[[Path], nn.Module]:
    def load(folder: Path) -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, name).from_pretrained(folder)
        return model

    return load


FAMILIES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], nn.Module]]] = {
    "llama": (write_decoder, by_class("LlamaForCausalLM")),
    "qwen2, tied": (
        lambda folder: write_decoder(folder, "qwen2", tied=True),
        by_class("Qwen2ForCausalLM"),
    ),
    "gpt2": (lambda folder: write_decoder(folder, "gpt2"), by_class("GPT2LMHeadModel")),
    "t5": (write_t5, by_class("T5ForConditionalGeneration")),
    "bert": (lambda folder: write_encoder(folder, "bert"), by_class("BertModel")),
    "bert, with a head": (
        lambda folder: write_encoder(folder, "bert", 3),
        by_class("BertForSequenceClassification"),
    ),
    "roberta": (lambda folder: write_encoder(folder, "roberta", 3), by_class("RobertaForSequenceClassification")),
    "distilbert": (lambda folder: write_encoder(folder, "distilbert"), by_class("DistilBertModel")),
    "vit": (lambda folder: write_vit(folder, labels=3), by_class("ViTForImageClassification")),
    "opt, generic": (write_opt, by_class("OPTForCausalLM")),
    "transformers CLIP": (write_clip("transformers"), by_class("CLIPModel")),
    "open_clip": (write_clip("open_clip"), load_open_clip),
}


class Wrapped(nn.Module):
    """A training module, as Lightning's are, with a model as one of its parts."""

    def __init__(self, name: str, model: nn.Module, **others: nn.Module) -> None:
        super().__init__()
        for part, module in {name: model, **others}.items():
            self.add_module(part, module)


def fsdp_names(model: nn.Module) -> State:
    """The names that FSDP gives inside: its own wrapper around the root and each block, and a checkpointed one."""
    block = r"((?:^|\.)(?:layers?|h|blocks?|resblocks)\.\d+\.)"
    wrapper = r"\1_fsdp_wrapped_module._checkpoint_wrapped_module."
    return {f"_fsdp_wrapped_module.{re.sub(block, wrapper, name)}": t for name, t in model.state_dict().items()}


NAMES: dict[str, Callable[[nn.Module], State]] = {
    "DDP": lambda model: nn.DataParallel(model).state_dict(),
    "torch.compile": lambda model: torch.compile(model).state_dict(),  # type: ignore[attr-defined]
    "DDP over torch.compile": lambda model: nn.DataParallel(torch.compile(model)).state_dict(),  # type: ignore[arg-type]
    "torch.compile over DDP": lambda model: torch.compile(nn.DataParallel(model)).state_dict(),  # type: ignore[attr-defined]
    "Lightning": lambda model: Wrapped("model", model).state_dict(),
    "Lightning, compiled": lambda model: Wrapped("model", torch.compile(model)).state_dict(),  # type: ignore[arg-type]
    "Lightning, a net": lambda model: Wrapped("net", model).state_dict(),
    "Lightning, another name": lambda model: Wrapped("student_lm", model).state_dict(),
    "Lightning, with a loss": lambda model: Wrapped("model", model, loss=nn.Linear(2, 2)).state_dict(),
    "FSDP": fsdp_names,
}


def emptied(clean: Path, folder: Path) -> Path:
    """The folder without its weights."""
    return Path(shutil.copytree(clean, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md")))


def in_safetensors(state: State, folder: Path) -> None:
    name = "open_clip_model" if (folder / "open_clip_config.json").is_file() else "model"
    save_file({key: t.clone().contiguous() for key, t in state.items()}, folder / f"{name}.safetensors")


def open_clip_training(state: State, folder: Path) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict()
    torch.save({"epoch": 5, "name": "run", "state_dict": state, "optimizer": optimizer}, folder / "epoch_5.pt")


def lightning(state: State, folder: Path) -> None:
    content = {
        **{"epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.4.0", "state_dict": state, "loops": {}},
        **{"callbacks": {}, "optimizer_states": [], "lr_schedulers": [], "hparams_name": "kwargs"},
        "hyper_parameters": {"learning_rate": 0.1},
    }
    torch.save(content, folder / "last.ckpt")


def deepspeed(state: State, folder: Path) -> None:
    content = {
        **{"module": state, "buffer_names": [], "optimizer": None, "param_shapes": None, "lr_scheduler": None},
        **{"global_steps": 100, "dp_world_size": 1, "mp_world_size": 1, "ds_config": {"train_batch_size": 8}},
    }
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


def plain_loop(state: State, folder: Path) -> None:
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}, "epoch": 3}, folder / "checkpoint.pth")


def accelerate(state: State, folder: Path) -> None:
    torch.save(state, folder / "pytorch_model_fsdp.bin")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "scaler.pt", "training_args.bin"):
        torch.save({"state": torch.ones(2)}, folder / name)


FILES = {
    "safetensors": in_safetensors,
    "open_clip's training": open_clip_training,
    "Lightning": lightning,
    "DeepSpeed": deepspeed,
    "a plain loop": plain_loop,
    "accelerate": accelerate,
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            write, _ = FAMILIES[family]
            made[family] = write(tmp_path_factory.mktemp("clean") / "model")
        return made[family]

    return folder_of


def loaded(folder: Path) -> tuple[Model, State]:
    opened = Model.open(folder, "the model", allow_pickle=True).fetched()
    return opened, opened.load(CPU, torch.float32).module.state_dict()


def assert_same(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_training_tools_are_read_as_the_models_own(
    family: str, clean: Callable[[str], Path], tmp_path: Path
) -> None:
    model = FAMILIES[family][1](clean(family))
    sites = Model.open(clean(family), "the model").layout.sites
    for number, (tool, wrapped) in enumerate(NAMES.items()):
        folder = emptied(clean(family), tmp_path / str(number))
        in_safetensors(wrapped(model), folder)
        found = Model.open(folder, "the model")
        assert [site.name for site in found.layout.sites] == [site.name for site in sites], tool
        own = {name: found.checkpoint.tensor(name) for name in found.checkpoint.shapes if not name.startswith("loss.")}
        assert_same(own, model.state_dict())


@pytest.mark.parametrize(("family", "names"), zip(FAMILIES, cycle(NAMES), strict=False))
def test_libraries_load_what_had_other_names(
    family: str, names: str, clean: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = emptied(clean(family), tmp_path / "wrapped")
    in_safetensors(NAMES[names](FAMILIES[family][1](clean(family))), folder)
    assert_same(loaded(folder)[1], loaded(clean(family))[1])


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "open_clip"])
def test_files_of_training_tools_are_found_whatever_they_are_called(
    family: str, files: str, clean: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = emptied(clean(family), tmp_path / "wrapped")
    FILES[files](NAMES["DDP"](FAMILIES[family][1](clean(family))), folder)
    if files != "safetensors":
        with pytest.raises(PickledWeightsError, match="--allow-pickle"):
            Model.open(folder, "the model")
    assert_same(loaded(folder)[1], loaded(clean(family))[1])


def test_clean_names_stay(clean: Callable[[str], Path]) -> None:
    for family in FAMILIES:
        folder = clean(family)
        assert unwrapped_names(Model.open(folder, "it").checkpoint.shapes, folder, "it") == {}, family


def test_the_first_part_of_llamas_own_names_is_kept() -> None:
    layer = {f"layers.0.self_attn.{part}_proj.weight": (8, 8) for part in "qkvo"}
    layer |= {f"layers.0.mlp.{part}_proj.weight": (8, 8) for part in ("gate", "up", "down")}
    shapes = {f"model.{name}": shape for name, shape in layer.items()} | {"model.embed_tokens.weight": (9, 8)}
    assert unwrapped_names(shapes, Path("nowhere"), "it") == {}
    twice = {f"model.{name}": shape for name, shape in shapes.items()}
    assert unwrapped_names(twice, Path("nowhere"), "it") == {f"model.{name}": name for name in shapes}
    two = twice | {f"net.{name}": shape for name, shape in shapes.items()}
    with pytest.raises(
        UnsupportedModelError, match=r"several models, under names that begin with 'net\.' and 'model\.'"
    ):
        unwrapped_names(two, Path("nowhere"), "it")


def ported(source: Path, base: Path, target: Path, **options: Any) -> hf_bico.Ported:
    return hf_bico.port(source, to=target, base=base, allow_pickle=True, evaluate=False, **{**options, **PAPER})


def test_a_llama_of_wrapped_files_is_ported_as_one_of_clean_ones(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    base, target = write_decoder(tmp_path / "base"), write_decoder(tmp_path / "target", width=24, blocks=3, seed=1)
    tuned = fine_tuned(base, tmp_path / "tuned", LlamaForCausalLM)
    rows = [{"text": text} for text in sentences(24)]
    plain = ported(tuned, base, target, data=rows, n=24).save(tmp_path / "plain")
    wrapped = []
    for folder, names, files in (
        (tuned, "Lightning", lightning),
        (base, "FSDP", in_safetensors),
        (target, "DDP over torch.compile", in_safetensors),
    ):
        wrapped.append(emptied(folder, tmp_path / "wrapped" / folder.name))
        files(NAMES[names](LlamaForCausalLM.from_pretrained(folder)), wrapped[-1])
    out = ported(*wrapped, data=rows, n=24).save(tmp_path / "out")
    found, report = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same(found.state_dict(), LlamaForCausalLM.from_pretrained(plain).state_dict())
    assert set(load_file(out / "model.safetensors")) == set(load_file(plain / "model.safetensors"))


def test_a_target_of_open_clips_own_training_is_written_with_open_clips_names(tmp_path: Path) -> None:
    state, large = random_state(TOY, 0), TOY.but(width=16)
    base = WRITERS["open_clip"](tmp_path / "base", TOY, state)
    tuned = WRITERS["open_clip"](tmp_path / "tuned", TOY, changed(state, 9))
    target = WRITERS["open_clip"](tmp_path / "target", large, random_state(large, 1))
    data: dict[str, Any] = {"data": random_rows(24, 16), "n": 24, "class_names": CLASS_NAMES}
    plain = ported(tuned, base, target, **data).save(tmp_path / "plain")
    wrapped = emptied(target, tmp_path / "wrapped" / "target")
    open_clip_training({f"module.{name}": t for name, t in random_state(large, 1).items()}, wrapped)
    out = ported(tuned, base, wrapped, **data).save(tmp_path / "out")
    file = "open_clip_model.safetensors"
    assert_same(load_file(out / file), load_file(plain / file))


def test_a_task_vector_of_wrapped_files_has_the_clean_names(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    base = write_decoder(tmp_path / "base", "gpt2")
    tuned = fine_tuned(base, tmp_path / "tuned", GPT2LMHeadModel)
    wrapped = emptied(tuned, tmp_path / "wrapped")
    accelerate(NAMES["FSDP"](GPT2LMHeadModel.from_pretrained(tuned)), wrapped)
    vector = hf_bico.TaskVector.from_models(wrapped, base, allow_pickle=True)
    assert vector == hf_bico.TaskVector.from_models(tuned, base)


@pytest.fixture
def bert(clean: Callable[[str], Path], tmp_path: Path) -> tuple[Path, State]:
    """A BERT's folder without weights, and its weights."""
    return emptied(clean("bert"), tmp_path / "bert"), load_file(clean("bert") / "model.safetensors")


def refusal(folder: Path | str, allow_pickle: bool = True) -> BicoError:
    with pytest.raises(BicoError) as caught:
        Model.open(folder, "the model", allow_pickle=allow_pickle)
    return caught.value


def test_several_pickles_are_named(bert: tuple[Path, State]) -> None:
    folder, state = bert
    for epoch in (1, 2):
        torch.save({"state_dict": state}, folder / f"epoch_{epoch}.pt")
    error = refusal(folder)
    assert type(error) is WeightsNotFoundError
    assert (
        error.cause == "'bert' holds several pickles (epoch_1.pt, epoch_2.pt), and none has the name of a whole model"
    )
    assert "--allow-pickle" in refusal(folder, allow_pickle=False).remedy


class Setting:
    """An object of a training script."""


def test_what_torch_does_not_read_as_tensors_comes_with_the_line_that_converts_it(
    bert: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = bert
    torch.save({"state_dict": state, "hyper_parameters": Setting()}, folder / "last.ckpt")
    error = refusal(folder)
    assert type(error) is BrokenWeightsError
    assert error.cause.startswith("'last.ckpt' cannot be read as tensors alone: it also holds objects of '")
    assert error.cause.endswith(".Setting'")
    line = error.remedy.partition('python -c "')[2].partition('"')[0]
    monkeypatch.chdir(folder)
    exec(line, {})  # as a user would run it
    (folder / "last.ckpt").unlink()
    assert_same(dict(load_file(folder / "model.safetensors")), state)
    assert loaded(folder)[0].family.name == "encoder"


def test_a_pickle_that_would_run_a_command_is_not_recommended(bert: tuple[Path, State]) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("false",)

    torch.save({"state_dict": bert[1], "more": Evil()}, bert[0] / "last.ckpt")
    error = refusal(bert[0])
    assert type(error) is BrokenWeightsError
    assert "weights_only=False" not in error.remedy


@pytest.mark.parametrize("name", ["epoch_5.pt", "model.safetensors", "last.ckpt", "model.gguf"])
def test_a_file_in_place_of_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    error = refusal(tmp_path / name)
    assert type(error) is RepoNotFoundError
    assert error.remedy == (
        f"name its folder, '{tmp_path}', with the model's config.json (of open_clip: open_clip_config.json) in it"
    )


SHARDS = {
    "ZeRO-3": (["latest", "zero_to_fp32.py", "global_step9/zero_pp_rank_0_mp_rank_00_model_states.pt"], "zero_to_fp32"),
    "ZeRO-2": (
        ["rng_state_0.pth", "global_step9/mp_rank_00_model_states.pt", "global_step9/zero_pp_rank_0_optim_states.pt"],
        "python zero_to_fp32.py . OUT",
    ),
    "its own folder": (["zero_pp_rank_0_mp_rank_00_model_states.pt"], "python zero_to_fp32.py . OUT"),
    "FSDP": (["pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata"], "accelerate merge-weights"),
    "FSDP's own folder": (["__0_0.distcp", ".metadata"], "accelerate merge-weights FOLDER OUT"),
}
"""What training tools leave of a model in parts, and what joins them."""


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_shards_of_a_training_run_are_refused_with_what_joins_them(
    shards: str, allow_pickle: bool, bert: tuple[Path, State]
) -> None:
    names, remedy = SHARDS[shards]
    for name in names:
        (bert[0] / name).parent.mkdir(exist_ok=True)
        (bert[0] / name).write_bytes(b"1")
    error = refusal(bert[0], allow_pickle)
    assert type(error) is WeightsNotFoundError
    assert "the shards of a" in error.cause
    assert remedy in error.remedy


def test_a_plan_of_wrapped_names_reads_no_weights_and_writes_nothing(cache: Path, tmp_path: Path) -> None:
    base = write_decoder(tmp_path / "base")
    wrapped = emptied(base, tmp_path / "wrapped")
    in_safetensors({f"module.{name}": tensor * 1.01 for name, tensor in _state(base).items()}, wrapped)
    planned = plan(wrapped, base, base=base)
    assert not cache.exists()
    assert planned.lineage.source.sha256.keys() == {"model.safetensors"}


def _state(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def test_transformers_loads_a_file_of_another_name(tmp_path: Path) -> None:
    base = write_decoder(tmp_path / "base")
    other = emptied(base, tmp_path / "other")
    shutil.copy(base / "model.safetensors", other / "step_100.safetensors")
    opened, state = loaded(other)
    assert_same(state, loaded(base)[1])
    assert opened.sha256.keys() == {"step_100.safetensors"}


def test_shards_of_wrapped_safetensors_keep_their_index(tmp_path: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    base = write_decoder(tmp_path / "base")
    wrapped = emptied(base, tmp_path / "wrapped")
    save_torch_state_dict({f"module.{name}": t for name, t in _state(base).items()}, wrapped, max_shard_size="5KB")
    opened, state = loaded(wrapped)
    assert_same(state, loaded(base)[1])
    index = json.loads((Path(str(opened.folder)) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(_state(base))


def test_pickles_that_an_earlier_run_converted_under_their_old_names_are_renamed(bert: tuple[Path, State]) -> None:
    folder, state = bert
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, folder / "pytorch_model.bin")
    sides = [file.name for file in folder.iterdir() if file.name != "pytorch_model.bin"]
    convert(folder, ["pytorch_model.bin"], "model.safetensors", sides)
    assert Model.open(folder, "the model", allow_pickle=True).renamed
    opened, _ = loaded(folder)
    assert set(opened.checkpoint.shapes) == set(state)
    assert opened.sha256.keys() == {"pytorch_model.bin"}
