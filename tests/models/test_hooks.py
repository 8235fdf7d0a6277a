"""Watching a model's sites: in order, once, with less memory, and with weights that are elsewhere until it runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from click.testing import CliRunner
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_bico
from hf_bico.alignment.calibration_pass import Side, collect
from hf_bico.alignment.objectives.base import LossBatch, OwnHead
from hf_bico.alignment.statistics import Kind
from hf_bico.cli.main import main
from hf_bico.errors import MemoryExhaustedError, ObjectiveError, UnsupportedModelError
from hf_bico.models.deltas import Deltas
from hf_bico.models.families.live import ImageModel, LiveModel
from hf_bico.models.families.text_models import CausalModel
from hf_bico.models.hooks import Losses, Stream, TextRows, offloaded_weights
from hf_bico.models.layout import Site, SitePair, Slot
from hf_bico.models.model import Model
from hf_bico.porting.model_pair import ModelPair
from hf_bico.runtime.environment import halving_batches
from hf_bico.utils.samples import Text
from support.language_toys import fine_tuned, sentences, write_decoder, write_encoder, write_t5, write_vit
from support.paper import PAPER
from support.scenes import Scene, make_scene
from support.toys import WRITERS, Toy, random_state

CPU = torch.device("cpu")
IMAGE = 16
TOY = Toy(width=16)
TEXTS = [Text(text) for text in sentences(4)]

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "open_clip": lambda folder: WRITERS["open_clip"](folder, TOY, random_state(TOY, 0)),
    "clip": lambda folder: WRITERS["transformers"](folder, TOY, random_state(TOY, 0)),
    "llama": lambda folder: write_decoder(folder, "llama"),
    "qwen2": lambda folder: write_decoder(folder, "qwen2", tied=True),
    "gpt2": lambda folder: write_decoder(folder, "gpt2"),
    "t5": write_t5,
    "bert": write_encoder,
    "distilbert": lambda folder: write_encoder(folder, "distilbert"),
    "vit": write_vit,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / name) for name, write in FAMILIES.items()}


def loaded(folder: Path) -> LiveModel:
    return Model.open(folder, "a model").load(CPU, torch.float64)


def batch_of(live: LiveModel) -> list[Any]:
    if isinstance(live, ImageModel):
        generator = torch.Generator().manual_seed(0)
        return list(torch.randn(4, 3, IMAGE, IMAGE, generator=generator, dtype=torch.float64))
    return TEXTS


def loss_of(live: LiveModel, batch: list[Any]) -> Losses:
    """A loss that every site of the main tower feels, and two more as of two labels."""
    made = live.logits(live.tokens(batch)) if isinstance(live, CausalModel) else live.features(batch)
    rows = made.tanh()
    return Losses(rows.square().sum(), (rows.sum(), rows.pow(3).sum()), live.text_rows(batch))


Models = tuple[LiveModel, LiveModel]


def both(folder: Path) -> Models:
    return loaded(folder), loaded(folder)


def statistics_of(
    models: Models, kinds: set[Kind], checkpointing: bool, at_once: bool = False, **options: Any
) -> list[Tensor]:
    """Of a model with itself, over two batches."""
    pairs = [SitePair(site, site) for site in models[0].layout.main_sites]
    source, target = (Side(live, live.layout.tokens, checkpointing, **options) for live in models)
    batch = batch_of(models[0])
    passes = [(partial(loss_of, models[0], batch), partial(loss_of, models[1], batch))] * 2
    return collect(pairs, source, target, passes, kinds, at_once=at_once).tensors


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(first, second, rtol=1e-9) for first, second in zip(one, other, strict=True))


def forwards(live: LiveModel) -> dict[str, Any]:
    """The modules that have a forward of their own, beside their class's."""
    return {
        name: module.__dict__["forward"] for name, module in live.module.named_modules() if "forward" in vars(module)
    }


KINDS = [{Kind.INPUTS, Kind.OUTPUTS, Kind.GRADIENTS}, {Kind.EXPECTED_GRADIENTS, Kind.WEIGHTED_INPUTS}]
"""The first from one loss, the second from several losses of one graph."""


@pytest.mark.parametrize("kinds", KINDS, ids=["one loss", "several"])
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointing_shows_the_same(name: str, kinds: set[Kind], folders: dict[str, Path]) -> None:
    models = both(folders[name])
    before = forwards(models[0])
    usual, thrifty = (statistics_of(models, kinds, checkpointing) for checkpointing in (False, True))
    assert are_equal(usual, thrifty)
    assert are_equal(usual, statistics_of(models, kinds, checkpointing=False, lean=True))
    assert are_equal(usual, statistics_of(models, kinds, checkpointing=True, at_once=True))
    assert all(tensor.abs().max() > 0 for tensor in usual)
    assert forwards(models[0]) == before


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointing_keeps_less(name: str, folders: dict[str, Path]) -> None:
    live = loaded(folders[name])
    batch, weights = batch_of(live), {parameter.data_ptr() for parameter in live.module.parameters()}

    def kept(checkpointing: bool, whole_blocks: bool = True) -> int:
        """Bytes that the graph keeps of the activations."""
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in weights:
                found[tensor.data_ptr()] = tensor.nbytes
            return tensor

        stream = Stream()
        with live.observed(live.layout.main_sites, stream):
            saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            if not checkpointing:
                with saved:
                    loss = loss_of(live, batch).task
            else:
                with live.checkpointed(stream, whole_blocks), saved:
                    loss = loss_of(live, batch).task
            assert loss is not None
        return sum(found.values())

    assert 0 < kept(True) < 0.5 * kept(False)
    assert kept(True) <= kept(True, whole_blocks=False) < kept(False)


def test_forwards_are_restored_after_an_error(folders: dict[str, Path]) -> None:
    for name in ("open_clip", "llama"):
        live = loaded(folders[name])
        before, stream = forwards(live), Stream()

        def broken(live: LiveModel = live, stream: Stream = stream) -> None:
            with live.observed(live.layout.main_sites, stream), live.checkpointed(stream):
                assert forwards(live)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            broken()
        assert forwards(live) == before


def test_a_block_of_one_site_is_checkpointed_too(folders: dict[str, Path]) -> None:
    """Such as a block of which an unknown kind of model shows a single layer."""
    models = both(folders["bert"])
    for live in models:
        first = tuple(site for site in live.layout.main_sites if site.role == "mlp.up")
        live.layout = replace(live.layout, sites=first)
    usual, thrifty = (statistics_of(models, {Kind.GRADIENTS}, checkpointing) for checkpointing in (False, True))
    assert are_equal(usual, thrifty)


class Chain:
    """Two sites that read the same, one that reads what they make, and one that the loss does not feel."""

    names = ("first", "second", "third", "idle")

    def __init__(self) -> None:
        inputs = {"first": "x", "second": "x", "third": "h", "idle": "h"}
        self.sites = {name: Site(name, name, 0, inputs[name], (3, 3), Slot(name)) for name in self.names}
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(3, 3, generator=generator) for name in self.names}
        self.x = torch.randn(5, 3, generator=generator)

    def tapped(self, stream: Stream, name: str, x: Tensor) -> Tensor:
        return stream.tap(self.sites[name], x, x @ self.weights[name].T)

    def run(self, stream: Stream) -> Tensor:
        h = self.tapped(stream, "first", self.x) * self.tapped(stream, "second", self.x)
        self.tapped(stream, "idle", h)
        return self.tapped(stream, "third", h).square().sum()

    def gradients(self) -> dict[str, Tensor]:
        """By the chain rule."""
        first, second = (self.x @ self.weights[name].T for name in ("first", "second"))
        third = 2 * (first * second) @ self.weights["third"].T
        back = third @ self.weights["third"]
        return {"third": third, "second": back * first, "first": back * second}


def test_gradients_are_told_once_for_each_site_and_those_of_later_sites_first() -> None:
    chain, stream, reads, writes = Chain(), Stream(), dict[str, Tensor](), dict[str, Tensor]()
    told: list[tuple[str, Tensor]] = []
    stream.listen(
        lambda site, x: reads.update({f"{site.name} of {site.input}": x}),
        lambda site, y: writes.update({site.name: y}),
    )
    loss = chain.run(stream)
    assert list(reads) == ["first of x", "idle of h"], "an activation that several sites read is told once"
    assert list(writes) == ["first", "second", "idle", "third"]
    assert not any(tensor.requires_grad for tensor in (*reads.values(), *writes.values()))
    for keep in (True, False):
        told.clear()
        stream.differentiate(loss, lambda site, gradient: told.append((site.name, gradient)), keep)
        assert told[0][0] == "third"
        assert sorted(name for name, _ in told[1:]) == ["first", "second"], "what the loss does not feel tells nothing"
        expected = chain.gradients()
        assert all(torch.allclose(gradient, expected[name], rtol=1e-4) for name, gradient in told)


def test_a_site_that_runs_twice_is_refused() -> None:
    chain, stream = Chain(), Stream()
    chain.run(stream)
    with pytest.raises(ObjectiveError, match="ran 'first' more than once on one batch"):
        chain.run(stream)
    stream.listen()
    assert chain.run(stream).requires_grad, "the next batch is another pass"


def test_a_site_that_does_not_run_is_refused() -> None:
    chain, stream = Chain(), Stream()
    chain.tapped(stream, "first", chain.x)
    with pytest.raises(ObjectiveError, match="does not run 'second'"):
        stream.require([chain.sites["first"], chain.sites["second"]])


def test_what_is_recomputed_is_not_seen_again() -> None:
    chain, stream, told = Chain(), Stream(), list[str]()
    stream.listen(lambda site, _: told.append(site.input))
    chain.run(stream)
    again = stream.recomputing()
    for _ in range(2):  # once for every loss of a graph that is kept
        with again, again:
            assert chain.run(stream).requires_grad
    assert told == ["x", "h"]
    with pytest.raises(ObjectiveError):
        chain.run(stream)


def test_a_site_that_the_loss_does_not_feel_adds_nothing(folders: dict[str, Path]) -> None:
    """The pooler of a BERT, and a loss that reads the tokens."""
    models = both(folders["bert"])
    pairs = [SitePair(site, site) for site in models[0].layout.main_sites]
    assert pairs[-1].target.role == "pooler"

    def run(live: LiveModel) -> Losses:
        module: Any = live.module
        out = module(torch.arange(12).reshape(2, 6))
        mask = torch.ones(2, 6, dtype=torch.bool)
        return Losses(out.last_hidden_state.square().sum(), text=TextRows(torch.arange(12).reshape(2, 6), mask))

    source, target = (Side(live, live.layout.tokens) for live in models)
    passes = [(partial(run, models[0]), partial(run, models[1]))]
    found = collect(pairs, source, target, passes, {Kind.GRADIENTS})
    sums = {pair.target.role: found.of(Kind.GRADIENTS, pair).total.abs().max() for pair in pairs}
    assert sums.pop("pooler") == 0
    assert min(sums.values()) > 0


class Moves:
    """Counts where a module is sent."""

    def __init__(self, module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        move = module.to

        def to(where: Any) -> nn.Module:
            self.seen.append(str(where))
            return move(where)

        monkeypatch.setattr(module, "to", to)


def test_a_swapped_model_comes_and_goes_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    live = loaded(folders["llama"])
    live.runs_on, live.swapped = torch.device("cpu", 0), True
    assert live.device == torch.device("cpu", 0)
    moves = Moves(live.module, monkeypatch)
    with live.quiet(), live.observed(live.layout.main_sites):
        live.features(TEXTS[:2])
        assert set(moves.seen) == {"cpu:0"}
    assert moves.seen == ["cpu:0", "cpu:0", "cpu"], "away in the end alone"
    moves.seen.clear()
    with pytest.raises(ZeroDivisionError), live.quiet():
        raise ZeroDivisionError
    assert moves.seen == ["cpu:0", "cpu"]


def change_of(live: LiveModel) -> Deltas:
    generator = torch.Generator().manual_seed(3)
    return Deltas(
        {
            name: 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            for name, parameter in live.module.named_parameters()
        }
    )


def test_changed_weights_are_swapped_too(folders: dict[str, Path]) -> None:
    plain, live = loaded(folders["llama"]), loaded(folders["llama"])
    live.runs_on, live.swapped = CPU, True
    change = change_of(plain)
    before = {name: tensor.clone() for name, tensor in live.module.state_dict().items()}
    with change.applied_to(plain.module), plain.quiet():
        expected = plain.features(TEXTS)
    with change.applied_to(live.module), live.quiet():
        assert torch.equal(live.features(TEXTS), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in live.module.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "clip", "bert"])
def test_weights_that_accelerate_keeps_away_are_changed_and_put_back(name: str, folders: dict[str, Path]) -> None:
    plain, away = loaded(folders[name]), loaded(folders[name])
    change, batch = change_of(plain), batch_of(plain)
    with plain.quiet():
        expected = plain.features(batch)
    with change.applied_to(plain.module), plain.quiet():
        changed = plain.features(batch)
    cpu_offload(away.module, execution_device=CPU)
    away.runs_on = CPU
    assert all(parameter.is_meta for parameter in away.module.parameters())
    assert offloaded_weights(away.module).keys() == dict(away.module.named_parameters()).keys()
    with away.quiet():
        assert torch.equal(away.features(batch), expected)
        with change.applied_to(away.module):
            assert torch.equal(away.features(batch), changed)
        assert torch.equal(away.features(batch), expected)
    site = plain.layout.main_sites[0]
    assert torch.equal(away.weight(site.name), plain.weight(site.name))


def test_statistics_of_weights_that_are_kept_away(folders: dict[str, Path]) -> None:
    plain, away = both(folders["llama"]), both(folders["llama"])
    for live in away:
        cpu_offload(live.module, execution_device=CPU)
        live.runs_on = CPU
    kinds = {Kind.INPUTS, Kind.GRADIENTS, Kind.INPUT_GRADIENTS}
    assert are_equal(statistics_of(plain, kinds, False), statistics_of(away, kinds, checkpointing=True))


def test_statistics_of_models_that_visit(folders: dict[str, Path]) -> None:
    plain, guests = both(folders["llama"]), both(folders["llama"])
    for live in guests:
        live.runs_on, live.swapped = CPU, True
    for kinds in KINDS:
        assert are_equal(statistics_of(plain, kinds, False), statistics_of(guests, kinds, False, stays=False))


def test_a_port_by_a_device_map_is_the_same_port(tmp_path: Path) -> None:
    base, target = write_decoder(tmp_path / "base"), write_decoder(tmp_path / "target", width=24, blocks=3, seed=1)
    tuned = fine_tuned(base, tmp_path / "tuned", AutoModelForCausalLM)
    rows = [{"text": text} for text in sentences(6)]
    options: dict[str, Any] = {"to": target, "base": base, "data": rows, "n": 6, "evaluate": False, **PAPER}
    plain, spread = (hf_bico.port(tuned, **options, device_map=rule) for rule in (None, "auto"))
    for name, change in plain.task_vector.items():
        assert torch.equal(change, spread.task_vector[name]), name


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def test_an_open_clip_model_is_not_spread(scene: Scene) -> None:
    models: dict[str, Any] = {"to": scene.target, "base": scene.base, "data": scene.data}
    with pytest.raises(UnsupportedModelError, match="open_clip ViT are not spread over several devices"):
        hf_bico.port(scene.tuned, **models, n=8, device_map="auto")
    result = CliRunner().invoke(main, ["port", *scene.arguments, "--device-map", "auto"])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "Error: models of the family open_clip ViT are not spread over several devices",
        "Remedy: leave --device-map out",
    ]


def test_an_objective_may_look_inside_while_blocks_run_once_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def objective(module: Any, batch: hf_bico.porting.port.Batch) -> Tensor:
        taken: list[Tensor] = []
        inner = module.visual.transformer.resblocks[0].mlp.c_fc
        handle = inner.register_forward_hook(lambda _, inputs, output: taken.append(output))
        features = module.encode_image(batch.pixels)
        handle.remove()
        return features.square().sum() + taken[0].pow(3).sum()

    def ported() -> hf_bico.TaskVector:
        models: dict[str, Any] = {"to": scene.target, "base": scene.base, "data": scene.data}
        options: dict[str, Any] = {"n": 8, "dtype": "float64", "evaluate": False, **PAPER}
        return hf_bico.port(scene.tuned, **models, **options, objective=objective).task_vector

    usual, fit = ported(), ModelPair.memory_plan
    for way in ({"checkpointing": True, "lean": False}, {"checkpointing": False, "lean": True}):
        with monkeypatch.context() as patch:
            patch.setattr(ModelPair, "memory_plan", lambda *asked, way=way: replace(fit(*asked), **way))
            thrifty = ported()
        assert all(torch.allclose(change, thrifty[name], rtol=1e-6, atol=1e-9) for name, change in usual.items())


def test_one_sample_that_does_not_fit_is_tried_in_the_leaner_way() -> None:
    tried: list[tuple[str, int]] = []

    def run(size: int, way: str = "usual") -> str:
        tried.append((way, size))
        if way == "usual":
            raise torch.OutOfMemoryError
        return way

    assert halving_batches(5, run, partial(run, way="leaner")) == "leaner"
    assert tried == [("usual", 5), ("usual", 2), ("usual", 1), ("leaner", 1)]
    with pytest.raises(MemoryExhaustedError):
        halving_batches(1, run)
    with pytest.raises(MemoryExhaustedError):
        halving_batches(1, run, run)


def test_inputs_that_require_grad_already_hide_no_gradient(folders: dict[str, Path]) -> None:
    """As after `enable_input_require_grads`, which training with adapters calls."""
    models = both(folders["llama"])
    usual = statistics_of(models, {Kind.GRADIENTS}, False)
    for live in models:
        live.module.enable_input_require_grads()
    assert are_equal(usual, statistics_of(models, {Kind.GRADIENTS}, False))


def test_gradients_of_all_branches_are_told() -> None:
    """The input of one requires grad, and that of the other does not."""
    sites = [Site(f"blocks.0.{role}", role, 0, role, (3, 3), Slot(role)) for role in ("attn.q", "attn.k")]
    told: list[str] = []
    stream = Stream()
    inputs = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    outputs = [stream.tap(site, x, x @ torch.eye(3)) for site, x in zip(sites, inputs, strict=True)]
    stream.differentiate((outputs[0] * outputs[1]).sum(), lambda site, _: told.append(site.role))
    assert sorted(told) == ["attn.k", "attn.q"]


def test_sums_are_let_go_of_with_the_last_reference(folders: dict[str, Path]) -> None:
    """Without the garbage collector: a pass that ran out of memory is tried again with what it held."""
    models = both(folders["llama"])
    gc.collect()
    gc.disable()
    try:
        sums = [weakref.ref(tensor) for tensor in statistics_of(models, {Kind.INPUTS, Kind.GRADIENTS}, False)]
        assert not any(one() is not None for one in sums)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_checkpointing_and_an_objective_that_keeps_a_cache(name: str, folders: dict[str, Path]) -> None:
    def loss(module: Any, batch: Any) -> Tensor:
        found: Tensor = module(input_ids=batch.tokens.ids, attention_mask=batch.tokens.mask.long()).logits
        return found.square().sum()

    models = both(folders[name])
    head = OwnHead(loss)
    texts = [Text(text) for text in sentences(3)]
    pairs = [SitePair(site, site) for site in models[0].layout.main_sites]
    found = []
    for thrifty in (False, True):
        sides = [Side(live, None, thrifty) for live in models]
        passes = [tuple(partial(head.losses, live, LossBatch(texts, [-1] * 3)) for live in models)]
        found.append(collect(pairs, *sides, passes, {Kind.GRADIENTS}).tensors)
    assert are_equal(*found)
    assert models[0].module.config.use_cache
