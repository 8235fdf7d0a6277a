"""The families of language models and image classifiers: their sites, what they show and read, and their adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hf_bico
from hf_bico.errors import BrokenWeightsError, MissingProcessorError, UnsupportedModelError
from hf_bico.models.families import family_of
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.families.text_models import CausalModel, EncoderModel, SequenceModel, TextModel
from hf_bico.models.model import Model
from hf_bico.models.tokenization import TokenBatch
from hf_bico.porting.task_vector import TaskVector
from hf_bico.utils.samples import IMAGES, TEXTS, Answered, Text
from support.adapters import Base, adapted, assert_same, by_peft, lora, saved
from support.language_toys import (
    POSITIONS,
    labelled_rows,
    pair_rows,
    randomise,
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

CPU = torch.device("cpu")
SAMPLES = [Text(text) for text in sentences(3)]
PAIRS = [Text(row["sentence1"], row["sentence2"]) for row in pair_rows(3, seed=4)]
IMAGE_SIZE = 16
GATED = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down")
PLAIN = tuple(role for role in GATED if role != "mlp.gate")


@dataclass(frozen=True)
class Case:
    """A small model, and what its family must find in it."""

    write: Callable[[Path], Path]
    family: str
    stack: str
    """The path of its blocks in the loaded model, behind what its class puts before it."""
    live: type
    roles: tuple[str, ...] = PLAIN
    pooler: bool = False


CASES = {
    "llama": Case(lambda f: write_decoder(f, "llama"), "decoder", "model.layers", CausalModel, GATED),
    "llama, tied": Case(lambda f: write_decoder(f, "llama", tied=True), "decoder", "model.layers", CausalModel, GATED),
    "mistral": Case(lambda f: write_decoder(f, "mistral"), "decoder", "model.layers", CausalModel, GATED),
    "qwen2": Case(lambda f: write_decoder(f, "qwen2", tied=True), "decoder", "model.layers", CausalModel, GATED),
    "qwen3": Case(lambda f: write_decoder(f, "qwen3", head_width=6), "decoder", "model.layers", CausalModel, GATED),
    "gpt2": Case(lambda f: write_decoder(f, "gpt2", tied=True), "GPT-2", "transformer.h", CausalModel),
    "t5": Case(lambda f: write_t5(f), "T5", "encoder.block", SequenceModel),
    "t5, gated": Case(lambda f: write_t5(f, gated=True), "T5", "encoder.block", SequenceModel, GATED),
    "t5 encoder": Case(lambda f: write_t5(f, kind="T5EncoderModel"), "T5", "encoder.block", SequenceModel),
    "bert": Case(lambda f: write_encoder(f), "encoder", "encoder.layer", EncoderModel, pooler=True),
    "bert, for masks": Case(lambda f: write_encoder(f, task="ForMaskedLM"), "encoder", "encoder.layer", EncoderModel),
    "bert, pretrained": Case(
        lambda f: write_encoder(f, task="ForPreTraining"), "encoder", "encoder.layer", EncoderModel, pooler=True
    ),
    "bert, classifier": Case(lambda f: write_encoder(f, head=3), "encoder", "encoder.layer", EncoderModel, pooler=True),
    "roberta": Case(lambda f: write_encoder(f, "roberta"), "encoder", "encoder.layer", EncoderModel),
    "roberta, classifier": Case(lambda f: write_encoder(f, "roberta", 3), "encoder", "encoder.layer", EncoderModel),
    "distilbert": Case(lambda f: write_encoder(f, "distilbert"), "encoder", "transformer.layer", EncoderModel),
    "distilbert, classifier": Case(
        lambda f: write_encoder(f, "distilbert", 3), "encoder", "transformer.layer", EncoderModel
    ),
    "vit": Case(lambda f: write_vit(f), "ViT", "layers", ImageModel),
    "vit, classifier": Case(lambda f: write_vit(f, labels=3), "ViT", "layers", ImageModel),
    "deit, classifier": Case(lambda f: write_vit(f, "deit", labels=3), "ViT", "layers", ImageModel),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: case.write(folder / name) for name, case in CASES.items()}


def opened(folder: Path) -> Model:
    return Model.open(folder, "a model")


def loaded(folder: Path) -> LiveModel:
    return opened(folder).load(CPU, torch.float32)


def run(live: LiveModel) -> Tensor:
    """What a model makes of a few samples, through all of its sites."""
    if isinstance(live, ImageModel):
        pixels = torch.randn(3, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(0))
        return live.image_features(pixels)
    if isinstance(live, CausalModel):
        return live.logits(live.tokens(SAMPLES))
    return live.features(SAMPLES)


def module_of(site: Any) -> str:
    return str(site.weight.tensor.removesuffix(".weight"))


# --- layouts


@pytest.mark.parametrize("name", CASES)
def test_layout_names_every_linear_layer_of_the_blocks(name: str, folders: dict[str, Path]) -> None:
    case, model = CASES[name], opened(folders[name])
    live = model.load(CPU, torch.float32)
    assert model.family.name == case.family
    assert isinstance(live, case.live)
    blocks = [site for site in live.layout.sites if site.block is not None]
    linear = {
        path
        for path, module in live.module.named_modules()
        if f".{case.stack}." in f".{path}" and isinstance(module, nn.Linear | Conv1D)
    }
    assert {module_of(site) for site in blocks} == linear
    assert [site.name for site in blocks] == [f"blocks.{n}.{role}" for n in range(2) for role in case.roles]
    assert [site.role for site in live.layout.sites if site.block is None] == ["pooler"] * case.pooler
    taken = model.layout.tensors
    assert not taken & model.layout.others.keys()
    assert taken | model.layout.others.keys() == set(model.checkpoint.shapes)
    assert model.layout.reads == (IMAGES if case.family == "ViT" else TEXTS)
    assert all(site.text == (case.family != "ViT") for site in model.layout.sites if site.block is not None)
    assert (model.layout.tokens is None) == (case.family != "ViT")


@pytest.mark.parametrize("name", CASES)
def test_every_slot_in_the_file_is_the_tensor_that_is_loaded(name: str, folders: dict[str, Path]) -> None:
    model = opened(folders[name])
    live = model.load(CPU, torch.float32)
    state = live.module.state_dict()
    for ours, theirs in zip(model.layout.slots(), live.layout.slots(), strict=True):
        assert torch.equal(ours.view(model.checkpoint.tensor(ours.tensor)), theirs.view(state[theirs.tensor]))
    skeleton = model.skeleton()
    assert type(skeleton) is type(live.module)
    assert {n: t.shape for n, t in skeleton.state_dict().items()} == {n: t.shape for n, t in state.items()}
    own = {model.layout.own_names.get(name, name) for name in model.layout.tensors}
    assert own == live.layout.tensors


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_model_is_of_the_same_family(name: str, folders: dict[str, Path]) -> None:
    model = opened(folders[name])
    config = json.loads((folders[name] / "config.json").read_text())
    module = getattr(transformers, config["architectures"][0]).from_pretrained(folders[name])
    wrapped = Model.open(module, "a loaded model")
    assert wrapped.family is model.family
    assert [(site.name, site.shape) for site in wrapped.layout.sites] == [
        (site.name, site.shape) for site in model.layout.sites
    ]
    live = model.load(CPU, torch.float32)
    if not isinstance(live, CausalModel):
        assert torch.allclose(run(wrapped.load(CPU, torch.float32)), run(live), atol=1e-6)


NAMED_MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "llama": (
        "model.layers.1.",
        {
            **{"attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj"},
            **{"attn.out": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj"},
            **{"mlp.down": "mlp.down_proj"},
        },
    ),
    "gpt2": (
        "transformer.h.1.",
        {
            **{"attn.q": "attn.c_attn", "attn.k": "attn.c_attn", "attn.v": "attn.c_attn"},
            **{"attn.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
        },
    ),
    "t5": (
        "encoder.block.1.layer.",
        {
            **{"attn.q": "0.SelfAttention.q", "attn.k": "0.SelfAttention.k", "attn.v": "0.SelfAttention.v"},
            **{"attn.out": "0.SelfAttention.o", "mlp.up": "1.DenseReluDense.wi", "mlp.down": "1.DenseReluDense.wo"},
        },
    ),
    "t5, gated": (
        "encoder.block.1.layer.",
        {
            **{"attn.q": "0.SelfAttention.q", "attn.k": "0.SelfAttention.k", "attn.v": "0.SelfAttention.v"},
            **{"attn.out": "0.SelfAttention.o", "mlp.gate": "1.DenseReluDense.wi_0"},
            **{"mlp.up": "1.DenseReluDense.wi_1", "mlp.down": "1.DenseReluDense.wo"},
        },
    ),
    "bert": (
        "encoder.layer.1.",
        {
            **{"attn.q": "attention.self.query", "attn.k": "attention.self.key", "attn.v": "attention.self.value"},
            **{"attn.out": "attention.output.dense", "mlp.up": "intermediate.dense", "mlp.down": "output.dense"},
        },
    ),
    "distilbert": (
        "transformer.layer.1.",
        {
            **{"attn.q": "attention.q_lin", "attn.k": "attention.k_lin", "attn.v": "attention.v_lin"},
            **{"attn.out": "attention.out_lin", "mlp.up": "ffn.lin1", "mlp.down": "ffn.lin2"},
        },
    ),
    "vit": (
        "encoder.layer.1.",
        {
            **{"attn.q": "attention.attention.query", "attn.k": "attention.attention.key"},
            **{"attn.v": "attention.attention.value", "attn.out": "attention.output.dense"},
            **{"mlp.up": "intermediate.dense", "mlp.down": "output.dense"},
        },
    ),
}
"""The modules of the second block in a file, by their roles."""
NAMED_MODULES["mistral"] = NAMED_MODULES["qwen2"] = NAMED_MODULES["qwen3"] = NAMED_MODULES["llama"]
NAMED_MODULES["roberta"] = NAMED_MODULES["bert"]


@pytest.mark.parametrize("name", NAMED_MODULES)
def test_every_role_is_the_module_that_plays_it(name: str, folders: dict[str, Path]) -> None:
    stem, modules = NAMED_MODULES[name]
    layout = opened(folders[name]).layout
    found = {site.role: module_of(site) for site in layout.sites if site.block == 1}
    assert found == {role: stem + module for role, module in modules.items()}
    for site in layout.sites:
        assert site.bias is None or site.bias.tensor == f"{module_of(site)}.bias"


def test_a_packed_layer_holds_queries_keys_and_values_in_turn(folders: dict[str, Path]) -> None:
    """By the model's own attention: it looks everywhere without queries or keys, and feels no bias of the keys."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["gpt2"], attn_implementation="eager").eval()
    sites = {site.role: site for site in opened(folders["gpt2"]).layout.sites if site.block == 0}
    packed = model.transformer.h[0].attn.c_attn
    weight, bias = packed.weight.detach().clone(), packed.bias.detach().clone()

    def attention(role: str, change: Callable[[Tensor, Tensor], None]) -> Tensor:
        """Where the first block looks, once the part of a role is changed."""
        site = sites[role]
        assert site.bias is not None
        with torch.no_grad():
            packed.weight.copy_(weight)
            packed.bias.copy_(bias)
            change(site.weight.view(packed.weight), site.bias.view(packed.bias))
            return model(torch.arange(6, 14)[None], output_attentions=True).attentions[0]

    def emptied(part: Tensor, its_bias: Tensor) -> None:
        part.zero_()
        its_bias.zero_()

    def shifted(_: Tensor, its_bias: Tensor) -> None:
        its_bias += torch.arange(float(len(its_bias)))

    usual = attention("attn.q", lambda *_: None)
    everywhere = torch.ones(8, 8).tril() / torch.arange(1.0, 9)[:, None]
    assert not torch.allclose(usual, everywhere.expand_as(usual), atol=1e-2)
    for role in ("attn.q", "attn.k"):
        assert torch.allclose(attention(role, emptied), everywhere.expand_as(usual), atol=1e-6), role
    assert torch.equal(attention("attn.v", emptied), usual)
    assert torch.allclose(attention("attn.k", shifted), usual, atol=1e-4)
    assert not torch.allclose(attention("attn.q", shifted), usual, atol=1e-2)


REASONS = {
    "llama": {"embeddings": 1, "LayerNorm": 5, "output embeddings": 1},
    "qwen3": {"embeddings": 1, "LayerNorm": 9, "output embeddings": 1},
    "gpt2": {"embeddings": 1, "LayerNorm": 10, "positions": 1},
    "t5, gated": {"embeddings": 1, "LayerNorm": 5, "positions": 1, "decoder": 30},
    "bert, pretrained": {"embeddings": 2, "LayerNorm": 10, "positions": 1, "pretraining head": 7},
    "bert, classifier": {"embeddings": 2, "LayerNorm": 10, "positions": 1, "classification head": 2},
    "roberta": {"embeddings": 2, "LayerNorm": 10, "positions": 1, "unused pooler": 2},
    "roberta, classifier": {"embeddings": 2, "LayerNorm": 10, "positions": 1, "classification head": 4},
    "distilbert, classifier": {"embeddings": 1, "LayerNorm": 10, "positions": 1, "classification head": 4},
    "deit, classifier": {
        **{"class token": 1, "embeddings": 1, "positions": 1, "patch stem": 2},
        **{"LayerNorm": 10, "classification head": 2},
    },
}


@pytest.mark.parametrize("name", REASONS)
def test_what_stays_behind_is_named_by_its_reason(name: str, folders: dict[str, Path]) -> None:
    others = list(opened(folders[name]).layout.others.values())
    assert {reason: others.count(reason) for reason in others} == REASONS[name]


def test_a_tied_output_is_named_where_a_file_holds_it(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "model", "llama", tied=True)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert opened(folder).layout.others["lm_head.weight"] == "tied weights"


def test_sites_that_read_the_same_share_an_input(folders: dict[str, Path]) -> None:
    inputs = {site.role: site.input for site in opened(folders["llama"]).layout.sites if site.block == 0}
    assert inputs["attn.q"] == inputs["attn.k"] == inputs["attn.v"]
    assert inputs["mlp.gate"] == inputs["mlp.up"]
    assert len(set(inputs.values())) == 4
    ungated = {site.role: site.input for site in opened(folders["gpt2"]).layout.sites if site.block == 0}
    assert len(set(ungated.values())) == 4


def test_grouped_queries_give_narrower_keys_and_values(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "model", "qwen3", width=16, heads=4, kv_heads=2, head_width=6, mlp=40)
    shapes = {site.role: site.shape for site in opened(folder).layout.sites}
    assert shapes["attn.q"] == (24, 16)
    assert shapes["attn.k"] == shapes["attn.v"] == (12, 16)
    assert shapes["attn.out"] == (16, 24)
    assert (shapes["mlp.gate"], shapes["mlp.down"]) == ((40, 16), (16, 40))


def test_image_tokens_have_their_prefix_and_grid(folders: dict[str, Path]) -> None:
    vit, deit = (opened(folders[name]).layout for name in ("vit", "deit, classifier"))
    assert vit.tokens is not None
    assert deit.tokens is not None
    assert (vit.tokens.prefix, deit.tokens.prefix) == (1, 2)
    assert vit.tokens.grid == deit.tokens.grid == (4, 4)
    assert vit.image_size == (IMAGE_SIZE, IMAGE_SIZE)


def respelled(folder: Path, rename: Callable[[str], str]) -> Path:
    file = folder / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


SPELLINGS: dict[str, tuple[Callable[[Path], Path], Callable[[str], str]]] = {
    "the first GPT-2s": (lambda f: write_decoder(f, "gpt2", tied=True), lambda n: n.removeprefix("transformer.")),
    "bare BERT under a head's configuration": (
        lambda f: write_encoder(f, task="ForMaskedLM"),
        lambda n: n.removeprefix("bert."),
    ),
    "bare DistilBERT": (
        lambda f: write_encoder(f, "distilbert", task="ForMaskedLM"),
        lambda n: n.removeprefix("distilbert."),
    ),
    "T5 as part of a classifier": (lambda f: write_t5(f, kind="T5ForSequenceClassification"), lambda n: n),
    "ViT by the names of the loaded model": (
        lambda f: write_vit(f, labels=3),
        lambda n: (
            n.replace("encoder.layer.", "layers.")
            .replace("attention.attention.query", "attention.q_proj")
            .replace("attention.attention.key", "attention.k_proj")
            .replace("attention.attention.value", "attention.v_proj")
            .replace("attention.output.dense", "attention.o_proj")
            .replace("intermediate.dense", "mlp.fc1")
            .replace("output.dense", "mlp.fc2")
        ),
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_give_the_same_model(name: str, tmp_path: Path) -> None:
    write, rename = SPELLINGS[name]
    usual, other = write(tmp_path / "usual"), respelled(write(tmp_path / "other"), rename)
    assert opened(other).family is opened(usual).family
    assert torch.equal(run(loaded(other)), run(loaded(usual)))


def test_a_model_with_more_in_its_blocks_is_of_another_kind(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "model", "llama")
    shapes = dict(opened(folder).checkpoint.shapes)
    assert family_of(shapes, "a model", folder).name == "decoder"
    shapes["model.layers.1.linear_attn.in_proj.weight"] = (16, 16)
    assert family_of(shapes, "a model", folder).name == "generic"


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_lack_a_tensor_are_refused(lost: str, tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "model", "llama")
    state = load_file(folder / "model.safetensors")
    del state[lost]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BrokenWeightsError, match=lost):
        loaded(folder)


def test_planning_these_families_imports_no_torch(folders: dict[str, Path]) -> None:
    paths = [str(folders[name]) for name in ("llama", "gpt2", "t5", "bert", "distilbert", "vit, classifier")]
    code = (
        "import sys; from hf_bico.models.model import Model; "
        f"print([Model.open(path, 'a model').family.name for path in {paths!r}], 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "['decoder', 'GPT-2', 'T5', 'encoder', 'encoder', 'ViT'] False"


# --- watching


@pytest.mark.parametrize("name", CASES)
def test_watching_shows_what_each_layer_reads_and_writes(name: str, folders: dict[str, Path]) -> None:
    """Beside plain hooks on the layers: the same inputs, outputs and gradients, and the result is not changed."""
    live = loaded(folders[name])
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(path: str) -> Callable[..., Tensor]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            output.requires_grad_()
            output.retain_grad()
            seen[path] = (inputs[0].detach(), output)
            return output

        return hook

    with live.quiet(), ExitStack() as stack:
        for path in {module_of(site) for site in live.layout.sites}:
            stack.callback(live.module.get_submodule(path).register_forward_hook(note(path)).remove)
        plain = run(live)
        plain.square().sum().backward()
    with live.observed(live.layout.sites) as trace:
        watched = run(live)
        gradients = torch.autograd.grad(watched.square().sum(), list(trace.outputs.values()))
    assert torch.allclose(watched, plain, atol=1e-6)
    assert set(trace.outputs) == {site.name for site in live.layout.sites}
    for site in live.layout.sites:
        x, y = seen[module_of(site)]
        span = slice(*(site.weight.rows or (0, y.shape[-1])))
        assert torch.equal(trace.inputs[site.input], x)
        assert torch.equal(trace.outputs[site.name], y[..., span])
        bias = 0 if site.bias is None else site.bias.view(live.module.get_parameter(site.bias.tensor))
        assert torch.allclose(y[..., span], x @ live.weight(site.name).T + bias, atol=1e-5), site.name
        assert y.grad is not None
        gradient = gradients[list(trace.outputs).index(site.name)]
        assert torch.allclose(gradient, y.grad[..., span], atol=1e-4, rtol=1e-4), site.name
    assert not any(module._forward_hooks for module in live.module.modules()), "the model is left as it was found"


def test_one_part_of_a_packed_layer_is_watched_alone(folders: dict[str, Path]) -> None:
    live = loaded(folders["gpt2"])
    keys = [site for site in live.layout.sites if site.role == "attn.k"]
    with torch.no_grad():
        plain = run(live)
    with live.observed(keys) as trace:
        assert torch.allclose(run(live), plain, atol=1e-6)
    assert list(trace.outputs) == ["blocks.0.attn.k", "blocks.1.attn.k"]


# --- reading


def padded(batch: TokenBatch, left: bool) -> TokenBatch:
    """The same texts with as much padding again, all of it on one side."""
    rows = []
    for ids, mask, labels in zip(batch.ids, batch.mask, batch.labels, strict=True):
        more = 2 * len(ids) - int(mask.sum())
        side = (more, 0) if left else (0, more)
        values = ((ids, 0), (mask, False), (labels, -100))
        rows.append([nn.functional.pad(row[mask], side, value=value) for row, value in values])
    ids, mask, labels = (torch.stack(list(column)) for column in zip(*rows, strict=True))
    return TokenBatch(ids, mask, labels)


TEXT_CASES = [name for name, case in CASES.items() if case.family != "ViT"]


@pytest.mark.parametrize("name", [*TEXT_CASES, "phi3", "opt", "bloom"])
def test_padding_counts_for_nothing_on_either_side(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = loaded(folders[name] if name in folders else write_other_decoder(tmp_path / name, name))
    assert isinstance(live, TextModel)
    batch = live.tokens(SAMPLES)
    assert not batch.mask.all(), "the texts are of several lengths"
    shown = []
    for some in (batch, padded(batch, left=False), padded(batch, left=True)):
        monkeypatch.setattr(live, "tokens", lambda _, some=some: some)
        with torch.no_grad():
            found = [live.features(SAMPLES)]
            if isinstance(live, CausalModel):
                found.append(live.logits(some)[some.mask])
            if isinstance(live, SequenceModel) and hasattr(live.module, "lm_head"):
                found.append(live.logits(some, some)[some.mask])
        shown.append(found)
    for other in shown[1:]:
        for ours, theirs in zip(other, shown[0], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def write_other_decoder(folder: Path, kind: str) -> Path:
    if kind != "bloom":
        return write_decoder(folder, kind)
    config = transformers.BloomConfig(vocab_size=vocabulary_size(), hidden_size=16, n_layer=2, n_head=2)
    return save_model(transformers.BloomForCausalLM(config), folder, 0, text_tokenizer())


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_logits_and_features_are_the_librarys_own(name: str, folders: dict[str, Path]) -> None:
    live = loaded(folders[name])
    assert isinstance(live, CausalModel)
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    text = SAMPLES[0].first
    encoded = live.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        truth = model(**encoded, output_hidden_states=True)
        assert torch.allclose(live.logits(live.tokens([Text(text)])), truth.logits, atol=1e-5)
        assert torch.allclose(live.features([Text(text)]), truth.hidden_states[-1].mean(1), atol=1e-5)


RUN_AS = {
    "bert": "BertModel",
    "bert, for masks": "BertForMaskedLM",
    "bert, classifier": "BertForSequenceClassification",
    "roberta": "RobertaModel",
    "distilbert, classifier": "DistilBertForSequenceClassification",
    "vit, classifier": "ViTForImageClassification",
    "t5": "T5ForConditionalGeneration",
    "t5 encoder": "T5EncoderModel",
    "qwen2": "Qwen2ForCausalLM",
}


@pytest.mark.parametrize("name", RUN_AS)
def test_models_run_by_the_class_that_their_configuration_names(name: str, folders: dict[str, Path]) -> None:
    assert type(loaded(folders[name]).module).__name__ == RUN_AS[name]


def test_a_class_that_the_files_do_not_hold_gives_way_to_the_backbone(tmp_path: Path) -> None:
    """As bert-base-uncased has it: a pooler that the named class lacks; or a head that the files lack."""
    pooled = write_encoder(tmp_path / "pooled", task="ForPreTraining")
    headless = write_encoder(tmp_path / "headless", "roberta")
    for folder, named in ((pooled, "BertForMaskedLM"), (headless, "RobertaForSequenceClassification")):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [named]}))
    live = loaded(pooled)
    assert type(live.module).__name__ == "BertModel"
    assert "pooler" in {site.role for site in live.layout.sites}
    live = loaded(headless)
    assert type(live.module).__name__ == "RobertaModel"
    assert live.module.pooler is None


HEADS = {
    "bert, classifier": "classifier",
    "roberta, classifier": "classifier.dense",
    "distilbert, classifier": "pre_classifier",
    "vit, classifier": "classifier",
    "deit, classifier": "classifier",
}


@pytest.mark.parametrize("name", HEADS)
def test_features_are_what_the_classification_head_reads(name: str, folders: dict[str, Path]) -> None:
    live, folder = loaded(folders[name]), folders[name]
    config = json.loads((folder / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
    read: list[Tensor] = []
    model.get_submodule(HEADS[name]).register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.no_grad():
        if isinstance(live, TextModel):
            texts = [[pair.first, pair.second] for pair in PAIRS]
            encoded = live.tokenizer(texts, return_tensors="pt", padding=True)
            if "distil" in name:  # it knows no types of tokens
                encoded.pop("token_type_ids")
            model(**encoded)
            features = live.features(PAIRS)
        else:
            pixels = torch.randn(3, 3, IMAGE_SIZE, IMAGE_SIZE)
            model(pixel_values=pixels)
            features = live.features(list(pixels))
    assert torch.allclose(features, read[0], atol=1e-5)


def test_the_second_sentence_has_a_type_of_its_own(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    live = loaded(folders["bert"])
    with torch.no_grad():
        typed = live.features(PAIRS)
        monkeypatch.setattr(live.tokenizer, "model_input_names", ["input_ids", "attention_mask"])
        assert not torch.allclose(live.features(PAIRS), typed, atol=1e-3)


@pytest.mark.parametrize("name", ["t5", "t5, gated"])
def test_a_decoders_logits_are_those_of_its_labels(name: str, folders: dict[str, Path]) -> None:
    live = loaded(folders[name])
    assert isinstance(live, SequenceModel)
    batch, answers = live.tokens(SAMPLES), live.answers([Text(word) for word in ("yes", "no", "maybe not")])
    assert not answers.mask.all()
    model: Any = live.module
    with torch.no_grad():
        logits = live.logits(batch, answers)
        truth = model(input_ids=batch.ids, attention_mask=batch.mask.long(), labels=answers.labels)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), answers.labels.flatten(), ignore_index=-100)
    assert torch.allclose(loss, truth.loss, atol=1e-5)


def test_a_t5_reads_the_prompt_alone(folders: dict[str, Path]) -> None:
    live = loaded(folders["t5"])
    assert isinstance(live, SequenceModel)
    assert torch.equal(live.tokens([Answered("who? ", "ada")]).ids, live.tokens([Text("who? ")]).ids)


def test_texts_are_cut_to_what_the_positions_can_take(folders: dict[str, Path]) -> None:
    long = [Text("a" * 500)]
    for name, most in (("gpt2", POSITIONS), ("bert", POSITIONS), ("roberta", POSITIONS), ("llama", POSITIONS)):
        live = loaded(folders[name])
        assert isinstance(live, TextModel)
        assert live.tokens(long).ids.shape == (1, most), name
        live.tokenizer.model_max_length = 10**30
        reach = {"gpt2": POSITIONS, "bert": POSITIONS + 2, "roberta": POSITIONS + 1, "llama": 4 * POSITIONS}[name]
        assert live.tokens(long).ids.shape == (1, reach), name
        with torch.no_grad():
            assert live.features(long).isfinite().all()
        live.max_length = 9
        assert live.tokens(long).ids.shape == (1, 9)


def test_a_loaded_model_without_a_folder_has_no_tokenizer() -> None:
    module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    live = Model.open(module, "a loaded model").load(CPU, torch.float32)
    assert isinstance(live, TextModel)
    with pytest.raises(MissingProcessorError, match="tokenizer"):
        live.tokens(SAMPLES)


# --- decoders that no family knows


@pytest.mark.parametrize("kind", ["phi3", "opt"])
def test_a_decoder_of_no_family_models_language(kind: str, tmp_path: Path) -> None:
    model = opened(write_decoder(tmp_path / kind, kind))
    live = model.load(CPU, torch.float32)
    assert model.family.name == "generic"
    assert isinstance(live, CausalModel)
    assert model.layout.objectives == live.layout.objectives == ("language-modelling",)
    assert model.layout.reads == live.layout.reads == TEXTS
    assert all(site.text for site in model.layout.sites)
    assert model.layout.others["lm_head.weight"] == "output embeddings"
    assert not any(site.name == "lm_head" for site in live.layout.sites)
    with torch.no_grad():
        plain = run(live)
    with live.observed(live.layout.sites) as trace:
        assert torch.allclose(run(live), plain, atol=1e-6)
    assert set(trace.outputs) == {site.name for site in model.layout.sites}


# --- adapters


@dataclass(frozen=True)
class Adapted:
    """A base, and a LoRA as people train them over it."""

    name: str
    kind: str
    config: peft.LoraConfig
    changed: str
    count: int


ADAPTERS = {
    "llama": Adapted(
        "llama",
        "AutoModelForCausalLM",
        lora(["q_proj", "v_proj", "gate_proj", "down_proj"], task_type="CAUSAL_LM"),
        "model.layers.0.self_attn.q_proj.weight",
        8,
    ),
    "gpt2": Adapted(
        "gpt2",
        "AutoModelForCausalLM",
        lora(["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
        "transformer.h.0.attn.c_attn.weight",
        2,
    ),
    "t5": Adapted(
        "t5",
        "AutoModelForSeq2SeqLM",
        lora(r".*encoder.*SelfAttention\.(q|v)", task_type="SEQ_2_SEQ_LM"),
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        4,
    ),
    "bert": Adapted(
        "bert, for masks",
        "AutoModelForMaskedLM",
        lora(["query", "value"]),
        "bert.encoder.layer.0.attention.self.query.weight",
        4,
    ),
    "vit": Adapted(
        "vit, classifier",
        "AutoModelForImageClassification",
        lora(["q_proj", "v_proj"]),
        "vit.encoder.layer.0.attention.attention.query.weight",
        4,
    ),
}


def inputs_of(folder: Path) -> dict[str, Any]:
    if "vit" in folder.name:
        return {"pixel_values": torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(3))}
    ids = torch.randint(6, vocabulary_size(), (2, 9), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, :4]} if folder.name.startswith("t5") else {})}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_read_and_written_as_peft_does(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    case = ADAPTERS[name]
    folder = folders[case.name]
    base = Base(folder, getattr(transformers, case.kind).from_pretrained)
    theirs = saved(base, case.config, tmp_path / "theirs")
    vector = TaskVector.from_adapter(theirs, base=folder)
    assert len(vector) == case.count
    assert case.changed in vector
    assert set(vector) <= opened(folder).layout.tensors
    assert_same(vector, by_peft(theirs, base))

    vector.save_adapter(tmp_path / "ours")
    inputs = inputs_of(folder)
    with torch.no_grad():
        plain = base.model()(**inputs).logits
        truth = peft.PeftModel.from_pretrained(base.model(), theirs).eval()(**inputs).logits
        ours = peft.PeftModel.from_pretrained(base.model(), tmp_path / "ours").eval()(**inputs).logits
    assert not torch.allclose(truth, plain, atol=1e-3)
    assert torch.allclose(ours, truth, atol=1e-5)


def test_a_classifiers_adapter_is_one_of_its_bare_base(folders: dict[str, Path], tmp_path: Path) -> None:
    """What it saves of its own head the base lacks, and that is said."""
    base = Base(folders["bert, pretrained"], transformers.AutoModelForSequenceClassification.from_pretrained)
    theirs = saved(base, lora(["query", "value"], task_type="SEQ_CLS"), tmp_path / "theirs")
    vector = TaskVector.from_adapter(theirs, base=base.folder)
    assert set(vector) == {
        f"bert.encoder.layer.{block}.attention.self.{name}.weight" for block in range(2) for name in ("query", "value")
    }
    assert set(vector.overlap.extra) == {"classifier.weight", "classifier.bias"}


def test_an_adapter_that_spells_the_layers_as_old_files_do(folders: dict[str, Path], tmp_path: Path) -> None:
    base = Base(folders["vit, classifier"], transformers.AutoModelForImageClassification.from_pretrained)
    new = saved(base, lora(["q_proj", "v_proj"]), tmp_path / "new")
    old = saved(base, lora(["q_proj", "v_proj"]), tmp_path / "old")
    names = {"layers.": "encoder.layer.", "q_proj": "attention.query", "v_proj": "attention.value"}
    file, tensors = old / "adapter_model.safetensors", {}
    for name, tensor in load_file(old / "adapter_model.safetensors").items():
        for now, then in names.items():
            name = name.replace(now, then)
        tensors[name] = tensor
    save_file(tensors, file)
    config = json.loads((old / "adapter_config.json").read_text())
    (old / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["query", "value"]}))
    one, other = (TaskVector.from_adapter(folder, base=base.folder) for folder in (new, old))
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_fine_tuned_encoder_over_a_whole_t5(folders: dict[str, Path], tmp_path: Path) -> None:
    tuned = write_t5(tmp_path / "tuned", kind="T5EncoderModel", seed=5)
    vector = TaskVector.from_models(tuned, base=folders["t5"])
    sites = opened(folders["t5"]).layout.tensors
    assert sites < set(vector)
    assert all(name.startswith("decoder.") for name in vector.overlap.missing)
    assert not vector.overlap.extra


@pytest.mark.parametrize("form", ["model", "adapter"])
def test_a_head_that_was_made_anew_is_no_change_of_the_bases_head(form: str, tmp_path: Path) -> None:
    """As of an image classifier that was fine-tuned for other classes than its base tells apart."""
    folder = write_encoder(tmp_path / "base", "roberta", 5)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, ignore_mismatched_sizes=True
    )
    if form == "adapter":
        adapted(model, lora(["query"], task_type="SEQ_CLS")).save_pretrained(tmp_path / form)
        vector = TaskVector.from_adapter(tmp_path / form, base=folder)
    else:
        save_model(model, tmp_path / form, 1)
        vector = TaskVector.from_models(tmp_path / form, base=folder)
    names = {f"classifier.{layer}.{kind}" for layer in ("dense", "out_proj") for kind in ("weight", "bias")}
    assert set(vector.overlap.extra) == names
    assert not names & set(vector)
    live = loaded(folder)
    with vector.applied_to(live.module):
        assert live.features(SAMPLES).shape == (3, 16)


def test_a_port_whose_models_have_other_names_when_they_are_loaded(tmp_path: Path) -> None:
    """The fine-tuned source is measured too, which is the base as it is loaded, with changes by the files' names."""
    base, tuned = write_vit(tmp_path / "base", labels=5), write_vit(tmp_path / "tuned", labels=2, seed=1)
    target = write_vit(tmp_path / "target", "deit", width=24, blocks=3, image_size=20)
    draw = torch.Generator().manual_seed(0)
    rows = [{"image": torch.randn(3, 16, 16, generator=draw), "label": number % 2} for number in range(24)]
    options = {"n": 12, "class_names": ["a", "b"], "force": True, **PAPER}
    ported = hf_bico.port(tuned, base=base, to=target, data=rows, **options)
    assert len(ported.report.sites) == 3 * 6
    assert set(ported.task_vector) == opened(target).layout.tensors


# --- refusals


def mixture(folder: Path) -> Path:
    config = transformers.MixtralConfig(
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"intermediate_size": 16, "num_local_experts": 2, "vocab_size": vocabulary_size()},
        tie_word_embeddings=False,
    )
    return save_model(transformers.MixtralForCausalLM(config), folder, 0, text_tokenizer())


def test_a_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    folder = mixture(tmp_path / "moe")
    for model in (folder, transformers.MixtralForCausalLM.from_pretrained(folder)):
        with pytest.raises(UnsupportedModelError, match="mixture of experts, whose experts see different tokens") as e:
            opened(model)
        assert "dense" in e.value.remedy


def test_experts_in_a_configuration_alone_are_refused(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "model", "llama")
    file = folder / "config.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps({**known, "num_experts": 8}))
    with pytest.raises(UnsupportedModelError, match="a model 'model' is a mixture of experts"):
        opened(folder)
    file.write_text(json.dumps({**known, "num_experts": 0}))
    assert opened(folder).family.name == "decoder"


def test_a_lora_of_a_mixture_is_refused(tmp_path: Path) -> None:
    base = mixture(tmp_path / "moe")
    model = transformers.MixtralForCausalLM.from_pretrained(base)
    adapted(model, lora(["q_proj"])).save_pretrained(tmp_path / "lora")
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        TaskVector.from_adapter(tmp_path / "lora", base=base)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert", "vit"])
def test_quantised_weights_are_refused(name: str, tmp_path: Path) -> None:
    folder = CASES[name].write(tmp_path / "model")
    file = folder / "config.json"
    quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **quantised}))
    with pytest.raises(UnsupportedModelError, match="a model 'model' are quantised") as caught:
        opened(folder)
    assert "quantised from" in caught.value.remedy


def test_an_encoder_without_its_decoder_cannot_answer(folders: dict[str, Path]) -> None:
    live = loaded(folders["t5 encoder"])
    assert isinstance(live, SequenceModel)
    batch = live.tokens(SAMPLES)
    with pytest.raises(UnsupportedModelError, match="no decoder") as caught:
        live.logits(batch, batch)
    assert "--base" in caught.value.remedy


def test_a_decoder_without_its_output_cannot_model_language(folders: dict[str, Path]) -> None:
    module = transformers.LlamaModel.from_pretrained(folders["llama"])
    live = Model.open(module, "a loaded model").load(CPU, torch.float32)
    assert isinstance(live, CausalModel)
    assert live.features(SAMPLES).shape == (3, 16)
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no output embeddings"):
        live.logits(live.tokens(SAMPLES))


def test_a_class_that_only_its_repo_could_run_is_refused(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "model", "llama")
    file = folder / "config.json"
    own = {"architectures": ["OwnForCausalLM"], "model_type": "own"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    with pytest.raises(
        UnsupportedModelError, match="OwnForCausalLM, for which the installed transformers has no class"
    ):
        loaded(folder)


def test_toys_differ_by_their_seed_alone(tmp_path: Path) -> None:
    one, same, other = (write_decoder(tmp_path / str(n), seed=seed) for n, seed in enumerate((0, 0, 1)))
    states = [load_file(folder / "model.safetensors") for folder in (one, same, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not any(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert labelled_rows(4)[1]["label"] == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(one)
    randomise(model, 1)
    assert torch.equal(model.state_dict()["model.norm.weight"], states[2]["model.norm.weight"])
