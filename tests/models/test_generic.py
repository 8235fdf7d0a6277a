"""Two models of one transformers class that no family knows: sites by module path, losses by the caller."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hf_bico
from hf_bico.alignment.calibration_pass import Side, collect, pair_rows
from hf_bico.alignment.matching import blocks_by_index, pair_sites
from hf_bico.alignment.objectives.base import Batch
from hf_bico.alignment.statistics import Kind
from hf_bico.errors import (
    BrokenWeightsError,
    ModelError,
    ObjectiveError,
    RepoError,
    UnknownFamilyError,
    UnsupportedModelError,
)
from hf_bico.models import families
from hf_bico.models.families.generic import Generic, require_same_kind
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.modules import module_layout
from hf_bico.models.hooks import Losses
from hf_bico.models.layout import SitePair
from hf_bico.models.model import Model
from hf_bico.reports.results import MAX_ROLES, OTHER_ROLES, role_labels
from hf_bico.utils.samples import TEXTS
from support.paper import PAPER
from support.rotated_clips import random_rotation, rotation_fixing_ones
from support.toys import WRITERS, Toy, random_rows, random_state

CLASSES, VOCABULARY, SIZE = 4, 40, 16
CPU = torch.device("cpu")
CLIPS = ("open_clip ViT", "transformers CLIP")


@pytest.fixture(autouse=True)
def only_clip_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models below stand for those that no family knows."""
    known = tuple(family for family in families._BUILT_IN if family.name in CLIPS)
    monkeypatch.setattr(families, "_BUILT_IN", known)


def vit(width: int = 16, blocks: int = 2, classes: int = CLASSES, patch: int = 4, **more: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        intermediate_size=2 * width,
        image_size=SIZE,
        patch_size=patch,
        num_labels=classes,
        **more,
    )
    return ViTForImageClassification(config)


def bert(width: int = 16, blocks: int = 2) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "intermediate_size": 2 * width}
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCABULARY, num_attention_heads=2, num_labels=CLASSES, **sizes)
    )


def gpt2(width: int = 16, blocks: int = 2, tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": width, "n_layer": blocks, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, tie_word_embeddings=tied, **sizes, **ends))


def t5(kind: str, width: int = 16, blocks: int = 2) -> nn.Module:
    import transformers

    sizes = {"d_model": width, "d_kv": 8, "d_ff": 2 * width, "num_layers": blocks, "num_heads": 2}
    config = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    built: nn.Module = getattr(transformers, kind)(config)
    return built


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with random weights, larger than at initialisation so that every part matters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = build()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "norm" in name.lower() or ".ln_" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif parameter.ndim == 2:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.normal_(std=0.2)
    return module.eval()


def run(module: Any, seed: int = 1) -> Any:
    """A forward pass over a small batch of whatever the model takes."""
    generator = torch.Generator().manual_seed(seed)
    if hasattr(module, "vit"):
        pixels = torch.randn(3, 3, SIZE, SIZE, generator=generator)
        return module(pixel_values=pixels.to(next(module.parameters()).dtype))
    tokens = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    decoder = {"decoder_input_ids": tokens[:, :5]} if hasattr(module, "decoder") else {}
    return module(input_ids=tokens, **decoder)


BLOCK_SITES = {
    "vit": ["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2"],
    "bert": [f"attention.self.{name}" for name in ("query", "key", "value")]
    + ["attention.output.dense", "intermediate.dense", "output.dense"],
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "t5": [f"layer.0.SelfAttention.{name}" for name in "qkvo"]
    + ["layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wo"],
}


@dataclass(frozen=True)
class Case:
    """A model, and what its layout must hold."""

    build: Callable[[], nn.Module]
    blocks: int
    roles: list[str]
    outside: list[str] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)


CASES = {
    "ViT": Case(vit, 2, BLOCK_SITES["vit"], ["classifier"], {"LayerNorm", "convolution", "no linear site"}),
    "BERT": Case(bert, 2, BLOCK_SITES["bert"], ["bert.pooler.dense", "classifier"], {"LayerNorm", "embeddings"}),
    "GPT-2": Case(gpt2, 2, BLOCK_SITES["gpt2"], [], {"LayerNorm", "embeddings", "tied weights"}),
    "GPT-2, untied": Case(lambda: gpt2(tied=False), 2, BLOCK_SITES["gpt2"], ["lm_head"], {"LayerNorm", "embeddings"}),
    "T5 encoder": Case(lambda: t5("T5EncoderModel"), 2, BLOCK_SITES["t5"], [], {"LayerNorm", "embeddings"}),
    "T5": Case(
        lambda: t5("T5ForConditionalGeneration"),
        0,
        [],
        [f"encoder.block.{block}.{role}" for block in range(2) for role in BLOCK_SITES["t5"]]
        + [
            f"decoder.block.{block}.layer.{layer}.{role}"
            for block in range(2)
            for layer, role in [
                *((0, f"SelfAttention.{name}") for name in "qkvo"),
                *((1, f"EncDecAttention.{name}") for name in "qkvo"),
                *((2, f"DenseReluDense.{name}") for name in ("wi", "wo")),
            ]
        ],
        {"LayerNorm", "embeddings", "tied weights"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sites_are_all_the_linear_maps(name: str) -> None:
    case, module = CASES[name], made(CASES[name].build)
    layout = Generic().wrap(module).layout
    expected = [(block, role) for block in range(case.blocks) for role in case.roles]
    expected += [(None, role) for role in case.outside]
    assert sorted(((site.block, site.role) for site in layout.sites), key=str) == sorted(expected, key=str)
    assert layout.blocks == case.blocks
    assert set(layout.others.values()) == case.reasons
    taken = {slot.tensor for slot in layout.slots()}
    assert not taken & layout.others.keys()
    assert taken | layout.others.keys() == module.state_dict().keys()
    assert layout.kind == type(module).__name__
    assert len({site.input for site in layout.sites}) == len(layout.sites)
    for site in layout.sites:
        assert site.name == site.weight.tensor.removesuffix(".weight"), "the canonical name is the module path"


@pytest.mark.parametrize("name", CASES)
def test_site_weights_are_what_the_site_multiplies_by(name: str) -> None:
    """y = x W^T + b with W and b read through the site's slots, transposed or plain, at every site."""
    module = made(CASES[name].build)
    live, state = Generic().wrap(module), module.state_dict()
    seen = {}

    def note(path: str) -> Callable[..., None]:
        return lambda _, inputs, output: seen.update({path: (inputs[0].detach(), output.detach().clone())})

    hooks = [module.get_submodule(s.name).register_forward_hook(note(s.name)) for s in live.layout.sites]
    with live.observed(live.layout.sites) as trace:
        watched = run(module)[0]
    for hook in hooks:
        hook.remove()
    assert trace.outputs.keys() == seen.keys() == {site.name for site in live.layout.sites}
    for site in live.layout.sites:
        x, y = seen[site.name]
        assert torch.equal(trace.inputs[site.input], x)
        assert torch.equal(trace.outputs[site.name], y)
        weight = site.weight.view(state[site.weight.tensor])
        assert tuple(weight.shape) == site.shape
        bias = 0 if site.bias is None else site.bias.view(state[site.bias.tensor])
        assert torch.allclose(y, x @ weight.T + bias, atol=1e-5), site.name
    with torch.no_grad():
        assert torch.allclose(run(module)[0], watched, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_saved_model_has_the_same_sites_in_its_own_tensors(name: str, tmp_path: Path) -> None:
    """The names in a file are not those of the modules: each slot must be the very tensor that is loaded there."""
    module = made(CASES[name].build)
    module.save_pretrained(tmp_path / "model")
    opened = Model.open(tmp_path / "model", "a model")
    assert opened.family.name == "generic"
    live = opened.load(CPU, torch.float32)
    assert [site.name for site in opened.layout.sites] == [s.name for s in Generic().wrap(module).layout.sites]
    state = live.module.state_dict()
    for ours, theirs in zip(opened.layout.slots(), live.layout.slots(), strict=True):
        assert torch.equal(opened.checkpoint.tensor(ours.tensor), state[theirs.tensor]), ours.tensor
    stored = set(opened.checkpoint.shapes)
    assert {slot.tensor for slot in opened.layout.slots()} | opened.layout.others.keys() == stored


def test_checkpoint_of_the_bare_model_fits_the_class_with_a_head(tmp_path: Path) -> None:
    """As the first GPT-2 repos have it: tensors without the prefix, under a configuration that names the whole."""
    module = made(gpt2)
    module.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file, {"format": "pt"})
    opened = Model.open(tmp_path / "model", "a model")
    assert {site.weight.tensor for site in opened.layout.sites if site.role == "mlp.c_fc"} == {
        "h.0.mlp.c_fc.weight",
        "h.1.mlp.c_fc.weight",
    }
    assert opened.load(CPU, torch.float32).layout.sites


def skeleton_folders(folder: Path) -> dict[str, Path]:
    toy = Toy()
    folders = {library: WRITERS[library](folder / library, toy, random_state(toy, 0)) for library in WRITERS}
    for name, case in CASES.items():
        folders[name] = folder / name
        case.build().save_pretrained(folders[name])  # type: ignore[operator]
    return folders


def test_skeletons_have_the_names_of_the_loaded_models(tmp_path: Path) -> None:
    seen = set()
    for name, folder in skeleton_folders(tmp_path).items():
        model = Model.open(folder, name)
        seen.add(model.family.name)
        skeleton, loaded = model.family.skeleton(folder), model.load(CPU, torch.float32).module
        if name == "open_clip":  # an outline, without modules that hold nothing
            both = [
                [n for n, part in one.named_modules() if next(part.parameters(), None) is not None]
                for one in (skeleton, loaded)
            ]
            assert set(both[0]) == set(both[1])
        for kind in () if name == "open_clip" else ("named_modules", "named_parameters", "named_buffers"):
            assert [n for n, _ in getattr(skeleton, kind)()] == [n for n, _ in getattr(loaded, kind)()], (name, kind)
        shapes = [{n: t.shape for n, t in module.state_dict().items()} for module in (skeleton, loaded)]
        assert shapes[0] == shapes[1], name
        assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}, name
    assert seen == {*CLIPS, "generic"}


def test_tensor_that_two_linear_maps_share_is_none_of_them() -> None:
    module = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3), "three": nn.Linear(3, 3)})
    module["two"].weight = module["one"].weight
    layout = module_layout("generic", module)
    assert [site.name for site in layout.sites] == ["three"]
    assert layout.others["one.weight"] == layout.others["two.weight"] == "tied weights"


def test_what_only_looks_linear_is_no_site() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    parts = {"attention": nn.MultiheadAttention(4, 2), "doubled": Doubled(4, 4), "named": Named(4, 4)}
    parts["normed"] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert [site.name for site in module_layout("generic", nn.ModuleDict(parts)).sites] == ["named"]


class InPlace(nn.Module):
    """Overwrites what its linear map gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).relu_()


def test_overwritten_activations_are_noticed() -> None:
    live = Generic().wrap(InPlace())
    with pytest.raises(UnsupportedModelError, match="changes in place what 'second' reads or writes"):  # noqa: SIM117
        with live.observed(live.layout.sites):
            live.module(torch.randn(2, 4))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_kept_of_a_pass(checkpointing: bool) -> None:
    live = Generic().wrap(made(vit))
    written: list[weakref.ref[Tensor]] = []
    linear = live.module.get_submodule(live.layout.sites[0].weight.tensor.removesuffix(".weight"))
    linear.register_forward_hook(lambda _, inputs, output: written.append(weakref.ref(output)))
    left: list[int] = []

    def batches() -> Iterator[Any]:
        for _ in range(3):
            left.append(sum(one() is not None for one in written))
            yield (lambda: Losses(run(live.module).logits.sum()),) * 2

    pairs = [SitePair(site, site) for site in live.layout.main_sites]
    collect(pairs, *[Side(live, None, checkpointing)] * 2, batches(), {Kind.TARGET_GRADIENTS})
    assert left == [0, 0, 0]
    assert len(written) == 3 * (1 + checkpointing)


# --- porting, with an objective of the caller's own


def cross_entropy(module: Any, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(module(batch.pixels).logits, batch.labels, reduction="sum")


def changed(module: nn.Module, changes: dict[str, Tensor]) -> nn.Module:
    import copy

    tuned = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if name in changes:
                parameter.add_(changes[name])
    return tuned


def noise(module: nn.Module, scale: float = 0.05, seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        slot.tensor: scale * torch.randn(module.state_dict()[slot.tensor].shape, generator=generator).to(CPU)
        for slot in Generic().wrap(module).layout.slots()
    }


class Turned:
    """A ViT and its copy in other coordinates (row vectors, x' = x Q), which commute with its plain LayerNorms.

    Heads are turned freely, neurons permuted.
    """

    heads = 2

    def __init__(self) -> None:
        self.module = made(vit).double()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        generator = torch.Generator().manual_seed(9)
        config: Any = self.module.config
        self.residual = rotation_fixing_ones(config.hidden_size, generator)
        self.blocks = [self._block(config, generator) for _ in range(config.num_hidden_layers)]
        self.copy = made(vit).double()
        self.copy.load_state_dict(self._turned(self.module.state_dict()))

    def _block(self, config: Any, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        head = config.hidden_size // self.heads

        def per_head() -> Tensor:
            return torch.block_diag(*(random_rotation(head, generator) for _ in range(self.heads)))

        order = torch.randperm(config.intermediate_size, generator=generator)
        return per_head(), per_head(), torch.eye(len(order), dtype=torch.float64)[order]

    def of_site(self, name: str) -> tuple[Tensor, Tensor]:
        """(input, output) coordinates of a site."""
        if name == "classifier":
            return self.residual, torch.eye(CLASSES, dtype=torch.float64)
        block, role = int(name.split(".")[2]), name.split(".", 3)[3]
        queries, values, neurons = self.blocks[block]
        return {
            "attention.q_proj": (self.residual, queries),
            "attention.k_proj": (self.residual, queries),
            "attention.v_proj": (self.residual, values),
            "attention.o_proj": (values, self.residual),
            "mlp.fc1": (self.residual, neurons),
            "mlp.fc2": (neurons, self.residual),
        }[role]

    def _turned(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        turned = {}
        for name, tensor in state.items():
            path, _, kind = name.rpartition(".")
            if any(path == site.name for site in Generic().wrap(self.module).layout.sites):
                q_in, q_out = self.of_site(path)
                turned[name] = q_out.T @ tensor @ q_in if kind == "weight" else tensor @ q_out
            elif "norm" in path:
                turned[name] = tensor
            elif "projection" in path and kind == "weight":
                turned[name] = (self.residual.T @ tensor.flatten(1)).view_as(tensor)
            else:  # class token, positions, the bias of the stem
                turned[name] = tensor @ self.residual
        return turned

    def logits(self, module: Any, rows: list[dict[str, Any]]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = module(torch.stack([row["image"] for row in rows]).double()).logits
        return logits


def test_turned_copy_of_a_vit_is_recovered_exactly() -> None:
    turned, rows = Turned(), random_rows(160, SIZE)
    before = turned.logits(turned.module, rows)
    assert (before - turned.logits(turned.copy, rows)).abs().max() < 1e-10, "the copy is the same function"
    assert before.std() > 0.1, "a model whose logits do not vary would prove nothing"

    # a change that calibration sees whole: of the form sum of g^T x over its own rows
    live = Generic().wrap(turned.module)
    labels = torch.tensor([row["label"] for row in rows])
    batch = Batch(torch.stack([row["image"] for row in rows]).double(), labels)
    with live.observed(live.layout.sites) as trace:
        gradients = torch.autograd.grad(cross_entropy(turned.module, batch), list(trace.outputs.values()))
    changes = {}
    for site, gradient in zip(trace.outputs, gradients, strict=True):
        x, g = trace.inputs[site].flatten(0, -2), gradient.flatten(0, -2)
        weight, bias = g.T @ x, g.sum(0)
        changes[f"{site}.weight"], changes[f"{site}.bias"] = 0.5 * weight / weight.norm(), 0.1 * bias / bias.norm()
    tuned = changed(turned.module, changes)
    ported = hf_bico.port(
        *(tuned, turned.copy),
        **{"base": turned.module, "data": rows, "n": len(rows), "objective": cross_entropy, "evaluate": False, **PAPER},
    )

    for site in live.layout.sites:
        q_in, q_out = turned.of_site(site.name)
        weight, bias = changes[f"{site.name}.weight"], changes[f"{site.name}.bias"]
        assert (ported.task_vector[f"{site.name}.weight"] - q_out.T @ weight @ q_in).norm() < 1e-7 * weight.norm()
        assert (ported.task_vector[f"{site.name}.bias"] - bias @ q_out).norm() < 1e-7 * bias.norm()
    after = turned.logits(tuned, rows)
    assert (after - before).norm() > 0.1 * before.norm(), "the change must matter"
    assert (turned.logits(ported.model().double(), rows) - after).norm() < 1e-5 * after.norm()  # it comes in float32
    assert ported.report.unseen_energy == pytest.approx(0.0, abs=1e-9)


PORTS = {
    "wider and deeper": (lambda: vit(16, 2), lambda: vit(24, 3), [0, 1, 1]),
    "narrower and shallower, fewer classes": (lambda: vit(24, 3), lambda: vit(16, 2, classes=3), [0, 2]),
}


@pytest.mark.parametrize("name", PORTS)
def test_other_widths_and_depths(name: str) -> None:
    source, target = made(PORTS[name][0]), made(PORTS[name][1], seed=1)
    rows = [{**row, "label": index % 3} for index, row in enumerate(random_rows(30, SIZE))]
    tuned = changed(source, noise(source))
    names = ["a", "b", "c"]
    ported = hf_bico.port(
        tuned, to=target, base=source, data=rows, n=30, class_names=names, objective=cross_entropy, **PAPER
    )
    layout = Generic().wrap(target).layout
    assert ported.record.method.layers == PORTS[name][2]
    assert set(ported.task_vector) == {slot.tensor for slot in layout.slots()}
    for tensor, delta in ported.task_vector.items():
        assert delta.shape == target.state_dict()[tensor].shape
        assert torch.isfinite(delta).all()
        assert delta.any()
    assert torch.isfinite(run(ported.model())[0]).all()
    table = ported.report.table()
    assert [line.split()[0] for line in table.splitlines()] == ["role", *BLOCK_SITES["vit"], "classifier"]


@pytest.mark.parametrize("build", [bert, gpt2], ids=["BERT", "GPT-2"])
def test_texts_of_one_length_through_two_widths(build: Callable[..., nn.Module]) -> None:
    models = [Generic().wrap(made(lambda: build(16, 2))), Generic().wrap(made(lambda: build(24, 3), seed=1))]
    source, target = models
    pairs = pair_sites(source.layout, target.layout, blocks_by_index(2, 3))
    assert len(pairs) == len(target.layout.sites)
    passes = [tuple(lambda live=live: Losses(run(live.module)[0].square().sum()) for live in models)]
    kinds = {Kind.INPUTS, Kind.GRADIENTS}
    statistics = collect(pairs, Side(source, None), Side(target, None), passes, kinds)
    for pair in pairs:
        assert tuple(statistics.of(Kind.INPUTS, pair).total.shape) == (pair.source.shape[1], pair.target.shape[1])
        assert tuple(statistics.of(Kind.GRADIENTS, pair).total.shape) == (pair.source.shape[0], pair.target.shape[0])
        assert statistics.of(Kind.GRADIENTS, pair).total.any()


def test_other_depths_of_two_stacks_leave_what_has_no_namesake() -> None:
    shallow, deep = (
        Generic().wrap(made(lambda blocks=blocks: t5("T5ForConditionalGeneration", blocks=blocks))).layout
        for blocks in (1, 2)
    )
    names = {site.name for site in shallow.sites}
    for source, target in ((shallow, deep), (deep, shallow)):
        pairs = pair_sites(source, target, blocks_by_index(source.blocks, target.blocks))
        assert {pair.target.name for pair in pairs} == {pair.source.name for pair in pairs} == names


def test_two_stacks_are_shown_in_few_lines(tmp_path: Path) -> None:
    """Token ids travel as prepared images of one line; the objective makes whole numbers of them."""

    def loss(module: Any, batch: Batch) -> Tensor:
        tokens = batch.pixels.long().flatten(1)
        logits = module(input_ids=tokens, decoder_input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")

    source = made(lambda: t5("T5ForConditionalGeneration"))
    target = made(lambda: t5("T5ForConditionalGeneration", width=24), seed=1)
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(0, VOCABULARY, (12, 1, 1, 6), generator=generator).float()
    rows = [{"image": text, "label": index % 2} for index, text in enumerate(texts)]
    ported = hf_bico.port(
        changed(source, noise(source)),
        to=target,
        base=source,
        data=rows,
        n=12,
        class_names=["a", "b"],
        objective=loss,
        **PAPER,
    )
    lines = [line.split()[:2] for line in ported.report.table().splitlines()[1:]]
    assert ["encoder.block.*.layer.*.SelfAttention.q", "2"] in lines
    assert len(lines) == 6 + 10
    assert sum(int(count) for _, count in lines) == len(ported.report.sites) == 2 * 6 + 2 * 10
    assert (ported.save(tmp_path / "out", format="delta") / "alignment.png").is_file()


def test_very_many_roles_share_a_last_line() -> None:
    roles = [f"part_{letter}.{name}" for letter in "abcdefgh" for name in ("up", "gate", "down", "out")]
    labels = role_labels([*roles, "mlp.up", "not | a path"])
    lines = list(dict.fromkeys(labels.values()))
    assert len(lines) == MAX_ROLES
    assert (lines[0], lines[-1]) == ("mlp.up", OTHER_ROLES)
    assert labels["not | a path"] == labels[roles[-1]] == OTHER_ROLES


def test_folder_to_folder_keeps_every_tensor_that_was_not_touched(tmp_path: Path) -> None:
    source, target = made(lambda: vit(16, 2)), made(lambda: vit(24, 3), seed=1)
    for name, module in (("base", source), ("tuned", changed(source, noise(source))), ("target", target)):
        module.save_pretrained(tmp_path / name)  # type: ignore[operator]
    ported = hf_bico.port(
        tmp_path / "tuned",
        to=tmp_path / "target",
        base=tmp_path / "base",
        data=random_rows(30, SIZE),
        class_names=["a", "b", "c", "d"],
        n=30,
        objective=cross_entropy,
        **PAPER,
    )
    folder = ported.save(tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "target", folder))
    layout = Model.open(folder, "the port").layout
    touched = {slot.tensor for slot in layout.slots()}
    assert {name for name in before if not torch.equal(before[name], after[name])} == touched
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["ViTForImageClassification"]
    from transformers import ViTForImageClassification

    assert torch.isfinite(run(ViTForImageClassification.from_pretrained(folder))[0]).all()
    assert (folder / "alignment.png").is_file()


def test_plan_prints_no_tokens(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from hf_bico.cli.main import main

    for name, build in (("base", lambda: vit(16, 2)), ("tuned", lambda: vit(16, 2)), ("target", lambda: vit(24, 3))):
        made(build).save_pretrained(tmp_path / name)  # type: ignore[operator]
    words = ["plan", str(tmp_path / "tuned"), "--base", str(tmp_path / "base"), "--to", str(tmp_path / "target")]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert "carried     19 sites" in shown.output
    assert not any(line.startswith("tokens") for line in shown.output.splitlines())
    data = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert data["tokens"] == {"source": None, "target": None}
    assert data["families"] == {"source": "generic", "target": "generic"}


# --- what is refused


def test_zero_shot_is_refused_before_anything_is_done() -> None:
    source, target, stages = made(vit), made(lambda: vit(24), seed=1), []
    with pytest.raises(UnsupportedModelError, match="has no loss of its own") as caught:
        hf_bico.port(
            changed(source, noise(source)),
            to=target,
            base=source,
            data=random_rows(8, SIZE),
            n=8,
            class_names=["a", "b", "c", "d"],
            progress=lambda stage, *_: stages.append(stage),
        )
    assert "objective=" in caught.value.remedy
    assert not stages, "nothing was sampled, downloaded or loaded before"


def test_live_model_has_no_features() -> None:
    with pytest.raises(UnsupportedModelError, match="features of a generic model"):
        Generic().wrap(made(vit)).features([torch.zeros(3, SIZE, SIZE)])


def test_models_of_other_classes_are_refused(tmp_path: Path) -> None:
    one, other = (Generic().wrap(made(build)).layout for build in (vit, bert))
    require_same_kind(one, Generic().wrap(made(lambda: vit(24, 3))).layout)
    with pytest.raises(ModelError, match="ViTForImageClassification and the target BertForSequenceClassification"):
        require_same_kind(one, other)
    clip = Model.open(WRITERS["transformers"](tmp_path / "clip", Toy(), random_state(Toy(), 0)), "a CLIP").layout
    require_same_kind(clip, clip)
    with pytest.raises(ModelError, match="target of the family transformers CLIP"):
        require_same_kind(one, clip)
    with pytest.raises(ModelError, match="base reads images and the target texts"):
        require_same_kind(clip, replace(clip, reads=TEXTS))


def test_rows_that_do_not_pair_are_named() -> None:
    source, target = pair_rows(torch.ones(2, 3, 5, 4), torch.ones(2, 3, 5, 6), None, None)
    assert (source.shape, target.shape) == ((30, 4), (30, 6))
    with pytest.raises(ModelError, match=r"\(2, 5, 4\) and the target of \(2, 9, 6\)"):
        pair_rows(torch.ones(2, 5, 4), torch.ones(2, 9, 6), None, None)
    rows, patches = random_rows(8, SIZE), made(lambda: vit(patch=8), seed=1)
    with pytest.raises(ModelError, match="do not pair one by one"):
        hf_bico.port(
            changed(made(vit), noise(made(vit))), to=patches, base=made(vit), data=rows, n=8, objective=cross_entropy
        )


@pytest.mark.parametrize("architectures", [None, [], ["NoSuchModel"], ["AutoModel"], [7], "ViTModel"])
def test_folder_without_a_known_class_is_of_no_family(architectures: Any, tmp_path: Path) -> None:
    made(vit).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": architectures}))
    with pytest.raises(UnknownFamilyError, match="the target 'model' does not belong to a known family") as caught:
        Model.open(tmp_path / "model", "the target")
    assert "open_clip ViT, transformers CLIP" in caught.value.remedy


def test_module_without_linear_maps_is_of_no_family() -> None:
    with pytest.raises(UnknownFamilyError, match="does not belong to a known family"):
        Model.open(nn.Sequential(nn.Conv2d(3, 3, 3)), "the target")


def test_code_of_a_repo_is_never_run(tmp_path: Path) -> None:
    made(vit).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    marker = tmp_path / "marker"
    (tmp_path / "model" / "mine.py").write_text(f"from pathlib import Path\nPath('{marker}').touch()\n")
    file = tmp_path / "model" / "config.json"
    names = {"AutoConfig": "mine.Mine", "AutoModelForImageClassification": "mine.Mine"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": names}))
    live = Model.open(tmp_path / "model", "a model").load(CPU, torch.float32)
    assert type(live.module).__module__.startswith("transformers.")
    assert not marker.exists()


def test_weights_that_lack_a_tensor_are_not_completed_at_random(tmp_path: Path) -> None:
    made(bert).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    del state["bert.embeddings.LayerNorm.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(BrokenWeightsError, match=r"bert\.embeddings\.LayerNorm\.weight"):
        Model.open(tmp_path / "model", "a model").load(CPU, torch.float32)


def test_configuration_that_describes_no_model(tmp_path: Path) -> None:
    made(vit).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": "wide"}))
    with pytest.raises(RepoError, match=r"config\.json of the target 'model' does not describe a model"):
        Model.open(tmp_path / "model", "the target")
    with pytest.raises(RepoError, match="cannot build a ViTForImageClassification"):
        Generic().skeleton(tmp_path / "model")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    made(vit).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    file = tmp_path / "model" / "config.json"
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantised}))
    with pytest.raises(UnsupportedModelError, match="quantised"):
        Model.open(tmp_path / "model", "the target")


def test_module_that_runs_twice_cannot_be_watched() -> None:
    live = Generic().wrap(made(vit))
    with live.observed(live.layout.sites):
        run(live.module)
        with pytest.raises(ObjectiveError, match="more than once"):
            run(live.module)


# --- images


def live_with_processor(folder: Path) -> LiveModel:
    from transformers import ViTImageProcessor

    made(vit).save_pretrained(folder)  # type: ignore[operator]
    ViTImageProcessor(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return Model.open(folder, "a model").load(CPU, torch.float32)


def test_images_by_the_models_own_processor_and_tensors_as_they_are(tmp_path: Path) -> None:
    live = live_with_processor(tmp_path / "model")
    assert live.pixels([Image.new(mode, (30, 20)) for mode in ("RGB", "L")]).shape == (2, 3, SIZE, SIZE)
    odd = [torch.randn(3, 11, 7), torch.randn(3, 11, 7)]
    assert torch.equal(live.pixels(odd), torch.stack(odd))


def test_planning_known_families_imports_no_torch(tmp_path: Path) -> None:
    path = WRITERS["transformers"](tmp_path / "model", Toy(), random_state(Toy(), 0))
    code = (
        "import sys; from hf_bico.models.model import Model; "
        f"Model.open({str(path)!r}, 'a model'); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
