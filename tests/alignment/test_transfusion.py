"""TransFusion finds the permutations between two copies of one model, and permutes the task vector by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch
from torch import Tensor

from hf_bico.alignment.matching import blocks_by_index, pair_sites
from hf_bico.alignment.methods.base import MethodInputs, Pretrained, SiteDelta
from hf_bico.alignment.methods.transfusion import RESIDUAL, Matching, Term, TransFusion, assign, match_heads
from hf_bico.errors import NonFiniteWeightsError, UnsuitableMethodError
from hf_bico.models.checkpoints import MemoryCheckpoint
from hf_bico.models.families.open_clip import OpenClip
from hf_bico.models.families.transformers_clip import TransformersClip
from hf_bico.models.layout import Layout, Site, SitePair
from hf_bico.models.low_rank import Factors
from hf_bico.settings import Settings
from support.toys import Toy, open_clip_config, random_state, to_transformers, transformers_config

pytestmark = pytest.mark.quick

State = dict[str, Tensor]
TOY = Toy(width=24, heads=3, blocks=2)
TALL = Toy(width=32, heads=4, blocks=4)


def initial_state(toy: Toy, seed: int) -> State:
    """The weights that open_clip itself starts a training from: LayerNorms of ones, biases of zeros."""
    import open_clip

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        state = open_clip.CLIP(**open_clip_config(toy)).state_dict()
    return {name: tensor for name, tensor in state.items() if name != "attn_mask"}


class Shuffle:
    """A random order of everything in the visual tower that may be in any order; called, it reorders a state."""

    def __init__(self, toy: Toy, seed: int) -> None:
        generator = torch.Generator().manual_seed(1000 + seed)

        def order(size: int) -> Tensor:
            return torch.randperm(size, generator=generator)

        def inside(heads: Tensor) -> Tensor:
            size = toy.width // toy.heads
            return torch.cat([head * size + order(size) for head in heads])

        self.groups = {RESIDUAL: order(toy.width)}
        for block in range(toy.blocks):
            heads = order(toy.heads)
            self.groups[f"blocks.{block}.attn.qk"] = inside(heads)
            self.groups[f"blocks.{block}.attn.v"] = inside(heads)
            self.groups[f"blocks.{block}.mlp"] = order(toy.width * toy.mlp_ratio)

    def __call__(self, state: State) -> State:
        return {name: self._reordered(name, tensor).contiguous() for name, tensor in state.items()}

    def _reordered(self, name: str, tensor: Tensor) -> Tensor:
        if not name.startswith("visual."):
            return tensor
        r, own = self.groups[RESIDUAL], name.removeprefix("visual.")
        if own == "positional_embedding":
            return tensor[:, r]
        if not own.startswith("transformer.resblocks."):
            return tensor[r]
        block, _, part = own.removeprefix("transformer.resblocks.").partition(".")
        qk, v, m = (self.groups[f"blocks.{block}.{group}"] for group in ("attn.qk", "attn.v", "mlp"))
        if part.startswith("attn.in_proj"):
            rows = torch.cat([each[order] for each, order in zip(tensor.chunk(3), (qk, qk, v), strict=True)])
            return rows[:, r] if rows.ndim == 2 else rows
        return {
            "attn.out_proj.weight": lambda: tensor[r][:, v],
            "mlp.c_fc.weight": lambda: tensor[m][:, r],
            "mlp.c_fc.bias": lambda: tensor[m],
            "mlp.c_proj.weight": lambda: tensor[r][:, m],
        }.get(part, lambda: tensor[r])()


def noisy(state: State, share: float, seed: int = 5) -> State:
    """Noise of a share of each tensor's own spread."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor
        + share * (tensor.std() if tensor.numel() > 1 else 0.0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in state.items()
    }


def task_vector(state: State, seed: int = 3) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def open_clip_model(toy: Toy, state: State) -> Pretrained:
    checkpoint = MemoryCheckpoint(state)
    return Pretrained(OpenClip().layout(checkpoint.shapes, {"model_cfg": open_clip_config(toy)}), checkpoint)


def transformers_model(toy: Toy, state: State) -> Pretrained:
    checkpoint = MemoryCheckpoint(to_transformers(state))
    return Pretrained(TransformersClip().layout(checkpoint.shapes, transformers_config(toy).to_dict()), checkpoint)


def prepared(source: Pretrained, target: Pretrained) -> tuple[TransFusion, list[SitePair]]:
    method = TransFusion(Settings(method="transfusion"))
    blocks = blocks_by_index(source.layout.blocks, target.layout.blocks)
    pairs = [pair for pair in pair_sites(source.layout, target.layout, blocks) if not pair.target.tower]
    method.require(source.layout, target.layout, pairs)
    method.prepare(pairs, MethodInputs(source, target))
    return method, pairs


def slots_of(site: Site, state: State) -> SiteDelta:
    bias = None if site.bias is None else site.bias.view(state[site.bias.tensor])
    return SiteDelta(site.weight.view(state[site.weight.tensor]), bias)


def features(toy: Toy, state: State) -> Tensor:
    import open_clip

    model = open_clip.CLIP(**open_clip_config(toy)).eval()
    model.load_state_dict(state, strict=False)
    size = toy.image_size
    pixels = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found: Tensor = model.encode_image(pixels)
    return found


MODELS: dict[str, Callable[[Toy, State], Pretrained]] = {
    "open_clip": open_clip_model,
    "transformers": transformers_model,
}
STATES: dict[str, Callable[[Toy, int], State]] = {"trained": random_state, "initial": initial_state}


@pytest.mark.parametrize("toy", [TOY, TOY.but(blocks=3), TALL], ids=lambda toy: f"{toy.blocks}-blocks")
def test_shuffled_model_computes_the_same(toy: Toy) -> None:
    """The permutations that the method looks for are those that change nothing."""
    state = random_state(toy, 0)
    moved = Shuffle(toy, 0)(state)
    assert not torch.equal(moved["visual.proj"], state["visual.proj"])
    assert torch.allclose(features(toy, moved), features(toy, state), atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("weights", STATES)
@pytest.mark.parametrize("library", MODELS)
@pytest.mark.parametrize("toy", [TOY, TOY.but(blocks=3), TALL], ids=lambda toy: f"{toy.blocks}-blocks")
@pytest.mark.parametrize("seed", range(3))
def test_shuffled_model_is_recovered(toy: Toy, library: str, weights: str, noise: float, seed: int) -> None:
    state, shuffle = STATES[weights](toy, seed), Shuffle(toy, seed)
    source = open_clip_model(toy, state)
    target = MODELS[library](toy, noisy(shuffle(state), noise))
    method, pairs = prepared(source, target)
    assert method.permutations.keys() == shuffle.groups.keys()
    for group, order in shuffle.groups.items():
        assert torch.equal(method.permutations[group], order), group
    vector = task_vector(state)
    moved = shuffle(vector) if library == "open_clip" else to_transformers(shuffle(vector))
    assert [pair.target.name for pair in pairs] == [site.name for site in target.layout.main_sites]
    for pair in pairs:
        found, expected = method.carry(pair, slots_of(pair.source, vector)).delta, slots_of(pair.target, moved)
        assert torch.equal(found.weight, expected.weight), pair.target.name
        assert (found.bias is None) == (expected.bias is None)
        assert found.bias is None or torch.equal(found.bias, expected.bias), pair.target.name


def test_a_model_onto_itself_is_left_as_it_is() -> None:
    model = open_clip_model(TOY, random_state(TOY, 0))
    method, _ = prepared(model, model)
    for group, order in method.permutations.items():
        assert torch.equal(order, torch.arange(len(order))), group


def test_a_model_of_equal_parts_is_left_as_it_is() -> None:
    """Where every order is as good as any other, nothing is moved."""
    model = open_clip_model(TOY, {name: torch.ones_like(tensor) for name, tensor in random_state(TOY, 0).items()})
    method, _ = prepared(model, model)
    assert all(torch.equal(order, torch.arange(len(order))) for order in method.permutations.values())


def test_rounds_find_what_the_start_did_not() -> None:
    """The tensors that the residual stream starts from are of little use here: most of its order is in the blocks."""
    toy = Toy(width=24, heads=3, blocks=2, grid=1, patch=1, embedding=2, mlp_ratio=4)
    state, shuffle = random_state(toy, 0), Shuffle(toy, 0)
    target = shuffle(state)
    for name in target:
        if "resblocks" not in name or "ln_" in name:
            target[name] = noisy({name: target[name]}, 0.7)[name]
    source, target_model = open_clip_model(toy, state), open_clip_model(toy, target)
    method, _ = prepared(source, target_model)
    assert len(method.objectives) > 2
    for group, order in shuffle.groups.items():
        assert torch.equal(method.permutations[group], order), group


@pytest.mark.parametrize("seed", range(4))
def test_objective_never_falls_by_a_round(seed: int) -> None:
    """Between two models that have nothing to do with each other; and it is what the docstring says it is."""
    ours, theirs = (random_state(TALL, 10 * seed + which) for which in (1, 2))
    source, target = open_clip_model(TALL, ours), open_clip_model(TALL, theirs)
    method, _ = prepared(source, target)
    found = method.objectives
    assert all(after >= before - 1e-9 * abs(before) for before, after in pairwise(found))
    assert found[-1] > found[0]
    moved = Shuffle(TALL, 0)
    moved.groups = method.permutations
    likeness = sum(
        float((tensor.double() * theirs[name].double()).sum())
        for name, tensor in moved(ours).items()
        if name.startswith("visual.")
    )
    assert found[-1] == pytest.approx(likeness, rel=1e-9)
    again, _ = prepared(source, target)
    assert again.objectives == found


def random_terms(size: int, seed: int, width: int = 9) -> dict[str, Term]:
    """The MLP of one block of a narrow tower, of two models that have nothing to do with each other."""
    generator = torch.Generator().manual_seed(seed)

    def both(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    return {
        "up": Term(*both(size, width), "mlp", RESIDUAL),
        "up.bias": Term(*both(size, 1), "mlp", None),
        "down": Term(*both(width, size), RESIDUAL, "mlp"),
        "class": Term(*both(width, 1), RESIDUAL, None),
    }


@pytest.mark.parametrize("seed", range(4))
def test_objective_never_falls_by_a_step(seed: int) -> None:
    """From anywhere, to where no step finds anything better."""
    matching = Matching(random_terms(30, seed), heads=1)
    generator = torch.Generator().manual_seed(seed)
    for group, order in matching.permutations.items():
        matching.permutations[group] = torch.randperm(len(order), generator=generator)
    found, moved = [matching.objective()], True
    while moved:
        moved = False
        for group in ("mlp", RESIDUAL):
            moved |= matching.improve(group)
            found.append(matching.objective())
    assert all(after >= before - 1e-9 * abs(before) for before, after in pairwise(found))
    assert found[1] > found[0]
    assert found[-3] == found[-1]


@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_step_is_the_best_of_all_permutations(size: int, seed: int) -> None:
    matching = Matching(random_terms(size, seed), heads=1)
    matching.improve(RESIDUAL)
    matching.improve("mlp")
    found = matching.objective()
    every = []
    for order in permutations(range(size)):
        matching.permutations["mlp"] = torch.tensor(order)
        every.append(matching.objective())
    assert found == pytest.approx(max(every), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_heads_are_matched_at_the_least_distance_of_their_singular_values(seed: int) -> None:
    heads, width = 4, 12
    generator = torch.Generator().manual_seed(seed)
    q, k, v, out = (
        Term(*(torch.randn(width, width, generator=generator) for _ in range(2)), None, None) for _ in range(4)
    )

    def spectrum(weight: Tensor, head: int) -> Tensor:
        rows = weight[head * 3 : head * 3 + 3]
        return torch.linalg.eigvalsh((rows @ rows.T).double()).sqrt()

    def cost(order: tuple[int, ...]) -> float:
        matrices = [(term.target, term.source) for term in (q, k, v)] + [(out.target.T, out.source.T)]
        return sum(
            float((spectrum(target, here) - spectrum(source, there)).norm())
            for target, source in matrices
            for here, there in enumerate(order)
        )

    best = min(permutations(range(heads)), key=cost)
    assert match_heads([q, k, v], out, heads).tolist() == list(best)


def test_the_current_permutation_stays_where_none_is_better() -> None:
    current = torch.tensor([2, 0, 1])
    assert torch.equal(assign(torch.ones(3, 3), current), current)
    assert assign(torch.eye(3), current).tolist() == [0, 1, 2]


def test_factors_stay_factors() -> None:
    state, shuffle = random_state(TOY, 0), Shuffle(TOY, 0)
    method, pairs = prepared(open_clip_model(TOY, state), transformers_model(TOY, shuffle(state)))
    generator = torch.Generator().manual_seed(4)
    for pair in pairs:
        rows, columns = pair.source.shape
        lora = Factors(torch.randn(rows, 2, generator=generator), torch.randn(2, columns, generator=generator))
        carried = method.carry(pair, SiteDelta(lora)).delta
        assert carried.bias is None
        assert isinstance(carried.weight, Factors)
        assert carried.weight.rank == 2
        dense = method.carry(pair, SiteDelta(lora.dense())).delta.weight
        assert torch.allclose(carried.weight.dense(), dense, atol=1e-6)


def test_dtype_is_kept() -> None:
    model = open_clip_model(TOY, random_state(TOY, 0, torch.bfloat16))
    method, pairs = prepared(model, model)
    delta = SiteDelta(bias=torch.ones(pairs[0].source.shape[0], dtype=torch.bfloat16))
    carried = method.carry(pairs[0], delta).delta
    assert carried.weight is None
    assert carried.bias.dtype == torch.bfloat16


def test_tower_without_its_projection_is_matched_all_the_same() -> None:
    state, shuffle = random_state(TOY, 0), Shuffle(TOY, 0)
    tower = {name: tensor for name, tensor in state.items() if name != "visual.proj"}
    method, pairs = prepared(open_clip_model(TOY, tower), open_clip_model(TOY, shuffle(state)))
    assert "proj" not in {pair.target.name for pair in pairs}
    assert all(torch.equal(method.permutations[group], order) for group, order in shuffle.groups.items())


def layout_of(toy: Toy) -> Layout:
    return open_clip_model(toy, random_state(toy, 0)).layout


def without(layout: Layout, name: str) -> Layout:
    return replace(layout, residual=tuple(axis for axis in layout.residual if axis.name != name))


OTHER_ARCHITECTURES: dict[str, Callable[[], Layout]] = {
    "blocks: 2 in the source and 3 in the target": lambda: layout_of(TOY.but(blocks=3)),
    "attention heads: 3 in the source and 4 in the target": lambda: layout_of(TOY.but(heads=4)),
    r"the shape of 'blocks.0.attn.q': \(24, 24\) in the source and \(48, 48\)": lambda: layout_of(TOY.but(width=48)),
    "the shape of 'blocks.0.mlp.up'": lambda: layout_of(TOY.but(mlp_ratio=3)),
    "the shape of 'proj'": lambda: layout_of(TOY.but(embedding=8)),
    r"image size: \(16, 16\) in the source and \(20, 20\) in the target": lambda: layout_of(TOY.but(grid=5)),
    "tokens": lambda: layout_of(TOY.but(grid=2, patch=8)),
    "'norm.pre.bias': there in the source and missing": lambda: without(layout_of(TOY), "norm.pre.bias"),
    "the target does not say how many attention heads": lambda: replace(layout_of(TOY), heads=None),
    "the residual stream of the target, of the family generic, is not known": lambda: replace(
        layout_of(TOY), family="generic", residual=()
    ),
}


@pytest.mark.parametrize("cause", OTHER_ARCHITECTURES)
def test_other_architectures_are_refused_by_what_differs(cause: str) -> None:
    source, target = layout_of(TOY), OTHER_ARCHITECTURES[cause]()
    pairs = pair_sites(source, target, blocks_by_index(source.blocks, target.blocks))
    with pytest.raises(UnsuitableMethodError, match=cause) as raised:
        TransFusion(Settings(method="transfusion")).require(source, target, pairs)
    assert "--method bico" in raised.value.remedy


def test_blocks_paired_crosswise_are_refused() -> None:
    layout = layout_of(TOY)
    method = TransFusion(Settings(method="transfusion"))
    with pytest.raises(UnsuitableMethodError, match=r"'blocks.0.attn.q' is paired with the source's 'blocks.1.attn.q'"):
        method.require(layout, layout, pair_sites(layout, layout, [1, 0]))


def test_weights_that_are_not_numbers_are_named() -> None:
    state = random_state(TOY, 0)
    broken = {name: tensor.clone() for name, tensor in state.items()}
    broken["visual.ln_pre.weight"][3] = torch.nan
    with pytest.raises(NonFiniteWeightsError, match=r"'visual.ln_pre.weight' of the target"):
        prepared(open_clip_model(TOY, state), open_clip_model(TOY, broken))
