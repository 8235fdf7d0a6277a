"""The memory budget: the quickest way that fits, never more than is allowed, and the same result whatever the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hf_bico
from hf_bico.alignment.calibration_pass import Side, collect
from hf_bico.alignment.matching import blocks_by_index, pair_sites
from hf_bico.alignment.memory import (
    BATCH,
    BATCH_ON_CPU,
    FREE_SHARE,
    LEAST_ACTIVATIONS,
    MEMORY_MODES,
    MOST_SAMPLES,
    MOST_SAMPLES_OF_BOTH,
    SPARE_SHARE,
    MemoryLimits,
    MemoryMode,
    MemoryNeeds,
    MemoryPlan,
    ModelFootprint,
    SampleBytes,
    compared_sites,
    needs_of,
    plan_memory,
    solved_together,
    sum_bytes,
)
from hf_bico.alignment.methods import make_method
from hf_bico.alignment.methods.base import Carrier, TransportedSite
from hf_bico.alignment.statistics import Kind, Statistics
from hf_bico.cli.main import main
from hf_bico.errors import MemoryExhaustedError
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.transformers_clip import TransformersClip
from hf_bico.models.hooks import Losses
from hf_bico.models.layout import Layout, Site, SitePair, Slot, Tokens
from hf_bico.porting.calibration import Calibration
from hf_bico.porting.planner import plan
from hf_bico.runtime.environment import Stopwatch
from hf_bico.utils.text import size_text
from support.calibrations import PORTS, SAMPLES, make_calibration
from support.paper import PAPER
from support.scenes import Scene, make_scene

NEEDS = MemoryNeeds(
    weights=(100_000, 200_000),
    sums=(50_000,) * 8,
    solver=80_000,
    carried=40_000,
    samples=(SampleBytes(20_000, 4_000, 1_000, 1_000), SampleBytes(30_000, 5_000, 1_000, 1_000)),
)
"""Of a sample 31 kB at the peak, 6 kB with checkpointing; models and all sums are 700 kB."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def test_without_a_limit_all_is_done_at_once() -> None:
    found = plan_memory(NEEDS)
    assert (found.batch_size, found.groups, found.checkpointing, found.alternating) == (32, (8,), False, False)
    assert found.bytes == 700_000 + 32 * 31_000


@pytest.mark.parametrize(
    ("limit", "batch_size", "passes", "checkpointing", "alternating", "fits"),
    [
        (2_000_000, 32, 1, False, False, True),  # as without a limit
        (1_500_000, 16, 1, False, False, True),  # smaller batches
        (1_200_000, 32, 1, True, False, True),  # activations that are thrown away
        (700_000, 16, 2, True, False, True),  # some pairs at a time
        (580_000, 16, 4, True, False, True),
        (480_000, 16, 4, True, True, True),  # one model at a time
        (300_000, 2, 8, False, True, False),
    ],
)
def test_with_less_memory_it_takes_more_work(
    limit: int, batch_size: int, passes: int, checkpointing: bool, alternating: bool, fits: bool
) -> None:
    found = plan_memory(NEEDS, limit)
    assert found.fits is fits
    assert (found.passes, found.checkpointing, found.alternating) == (passes, checkpointing, alternating)
    assert found.batch_size == batch_size
    assert sum(found.groups) == len(NEEDS.sums)


def test_models_are_in_turn_on_the_device_only_where_they_can_be() -> None:
    assert plan_memory(NEEDS, 480_000).alternating
    assert not plan_memory(NEEDS, 480_000, turns=[False]).fits, "both models stay on the device"
    assert not plan_memory(replace(NEEDS, both_graphs=True), 480_000).alternating, "both models run at once"


def test_a_batch_size_that_is_asked_for_is_kept_while_it_fits() -> None:
    assert plan_memory(NEEDS, batch_size=64).batch_size == 64
    assert plan_memory(NEEDS, 2_000_000, batch_size=3).batch_size == 3
    thrifty = plan_memory(NEEDS, 1_200_000, batch_size=40)
    assert (thrifty.batch_size, thrifty.checkpointing) == (40, True)
    assert plan_memory(NEEDS, 1_200_000, batch_size=128).batch_size == 64, "halved"


def test_mlps_run_once_more_where_batches_would_be_small() -> None:
    whole = LEAST_ACTIVATIONS // 5
    large = SampleBytes(whole, whole, 1, 1, lean=whole // 2)
    found = plan_memory(replace(NEEDS, samples=(large, large)))
    assert (found.lean, found.batch_size) == (True, 9)
    small = replace(large, graph=whole // 8, lean=whole // 16)
    assert not plan_memory(replace(NEEDS, samples=(small, small))).lean, "batches are large anyway"


def test_both_graphs_are_there_at_once_where_they_are_small_beside_what_is_shown() -> None:
    most = LEAST_ACTIVATIONS // 10
    sample = SampleBytes(2 * most, most // 20, most, most)
    found = plan_memory(replace(NEEDS, samples=(sample, sample)))
    assert (found.checkpointing, found.at_once, found.batch_size) == (True, True, 9)
    assert not plan_memory(replace(NEEDS, samples=(sample, sample)), turns=[True]).at_once, "only one model is there"
    loss = replace(sample, checkpointed=most)
    assert not plan_memory(replace(NEEDS, samples=(loss, loss))).at_once, "two graphs take more than what is shown"


def test_nothing_is_run_again_where_small_batches_cost_little() -> None:
    whole = LEAST_ACTIVATIONS // 5
    large = SampleBytes(whole, whole // 8, 1, 1, lean=whole // 2)
    usual, on_cpu = (
        plan_memory(replace(NEEDS, samples=(large, large)), batch_cost=cost) for cost in (BATCH, BATCH_ON_CPU)
    )
    assert (usual.checkpointing, usual.batch_size) == (True, 32)
    assert (on_cpu.checkpointing, on_cpu.lean, on_cpu.batch_size) == (False, False, 4)


def test_graphs_of_both_models_may_take_a_share_of_a_gpu_that_is_free() -> None:
    large = SampleBytes(LEAST_ACTIVATIONS // 10, LEAST_ACTIVATIONS // 10, 1, 1)
    needs = replace(NEEDS, samples=(large, large), both_graphs=True)
    room = 4 * LEAST_ACTIVATIONS
    small, roomy, on_cpu, alone = (
        plan_memory(one, limit, batch_cost=cost).batch_size
        for one, limit, cost in (
            (needs, room, BATCH),
            (needs, int(room / FREE_SHARE), BATCH),
            (needs, int(room / FREE_SHARE), BATCH_ON_CPU),
            (replace(needs, both_graphs=False), int(room / FREE_SHARE), BATCH),
        )
    )
    assert small == 4, "the activations that any batch may take"
    assert small < roomy == int(room * (1 - SPARE_SHARE)) // needs.of_sample(MEMORY_MODES[0])
    assert on_cpu == small, "a batch costs nothing to start there"
    assert alone == 9, "one graph at a time"


def test_batches_are_not_larger_than_is_quick() -> None:
    assert plan_memory(NEEDS).batch_size == MOST_SAMPLES
    assert plan_memory(replace(NEEDS, both_graphs=True)).batch_size == MOST_SAMPLES_OF_BOTH
    heavy = replace(NEEDS, samples=(SampleBytes(*[2 * LEAST_ACTIVATIONS] * 2, 1, 1),) * 2)
    assert plan_memory(heavy).batch_size == 1


def test_what_earlier_passes_have_carried_is_counted() -> None:
    much = replace(NEEDS, carried=150_000)
    one, other = (plan_memory(needs, 700_000, batch_size=1, turns=[False]) for needs in (NEEDS, much))
    assert other.passes > one.passes > 1


def sizes(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most)


samples = st.builds(lambda thrifty, more, *shown: SampleBytes(thrifty + more, thrifty, *shown), *([sizes(50)] * 4))
made_up = st.builds(
    MemoryNeeds,
    weights=st.tuples(sizes(300), sizes(300)),
    sums=st.lists(st.integers(1, 100), min_size=1, max_size=12).map(tuple),
    solver=sizes(200),
    carried=sizes(200),
    samples=st.tuples(samples, samples),
    both_graphs=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(made_up, st.integers(1, 3000), st.integers(0, 1000), st.none() | st.integers(1, 40))
def test_more_memory_never_means_more_work(needs: MemoryNeeds, limit: int, more: int, batch_size: int | None) -> None:
    found, roomy = plan_memory(needs, limit, batch_size), plan_memory(needs, limit + more, batch_size)
    for one, own in ((found, limit), (roomy, limit + more)):
        assert sum(one.groups) == len(needs.sums)
        assert all(one.groups)
        assert one.fits == (one.bytes <= int(own * (1 - SPARE_SHARE)))
        assert plan_memory(needs, max(own, one.limit + 1), batch_size).fits
        assert batch_size is None or one.batch_size <= batch_size
    if not found.fits:
        return
    assert roomy.fits
    assert roomy.alternating <= found.alternating
    if roomy.alternating == found.alternating:
        assert roomy.batch_size >= found.batch_size if batch_size else roomy.work <= found.work
        alike = roomy.checkpointing == found.checkpointing and roomy.batch_size == found.batch_size
        assert not alike or roomy.passes <= found.passes


def sites(width: int, blocks: int = 2) -> list[Site]:
    """q, k and v of each block read the same; a last site outside of the blocks reads alone."""
    parts = [
        Site(f"blocks.{block}.{role}", role, block, f"blocks.{block}.in", (width, width), Slot(f"{block}.{role}"))
        for block in range(blocks)
        for role in ("attn.q", "attn.k", "attn.v")
    ]
    return [*parts, Site("proj", "proj", None, "proj.in", (3, width), Slot("proj"))]


def paired(first: int, second: int) -> list[SitePair]:
    return [SitePair(one, two) for one, two in zip(sites(first), sites(second), strict=True)]


def test_pairs_that_share_a_sum_stay_together() -> None:
    pairs = paired(4, 5)
    groups = solved_together([*pairs[::2], *pairs[1::2]])
    assert sorted(pair.target.name for group in groups for pair in group) == sorted(p.target.name for p in pairs)
    assert sorted(len(group) for group in groups) == [1, 3, 3]
    assert all(len({pair.target.input for pair in group}) == 1 for group in groups)


def test_pairs_of_different_blocks_that_read_the_same_stay_together() -> None:
    first, second = paired(4, 5)[0], paired(4, 5)[3]
    shared = [replace(first.target, input="x"), replace(second.target, input="x")]
    source = replace(first.source, input="y")
    (group,) = solved_together([SitePair(source, site) for site in shared])
    assert len(group) == 2


@pytest.mark.parametrize("kind", Kind)
def test_sums_are_as_large_as_the_budget_says(kind: Kind) -> None:
    pairs = paired(40, 50)
    kinds = {kind, Kind.OUTPUTS}
    held = Statistics.zeros(pairs, kinds, torch.device("cpu"))
    assert sum_bytes(pairs, kinds) == sum(tensor.nbytes for tensor in held.tensors if tensor.ndim)


def test_a_lora_is_carried_as_factors() -> None:
    pairs = paired(40, 50)
    held = [
        ModelFootprint(Layout("", tuple(sites(width)), 2, Tokens(1, (3, 3)), None, {}), {"w": (10, 10)})
        for width in (40, 50)
    ]
    whole = needs_of(pairs, held[0], held[1])
    assert whole.carried == 4 * (6 * 50 * 50 + 3 * 50)
    ranks = {pair.source.weight.tensor: 2 for pair in pairs}
    factors = needs_of(pairs, held[0], held[1], ranks=ranks)
    assert factors.carried == 4 * (6 * 2 * 100 + 2 * 53)
    assert whole.samples[1].checkpointed < whole.samples[1].graph
    assert whole.weights == (400, 400)


@pytest.mark.parametrize(("blocks", "compared"), [(1, {0}), (2, {0, 1}), (12, {0, 6, 11}), (13, {6}), (36, {18})])
def test_few_blocks_are_compared_with_mispaired_rows(blocks: int, compared: set[int]) -> None:
    sites = [
        Site(f"blocks.{block}.{role}", role, block, f"{block}.{role}", (8, 8), Slot(f"{block}.{role}"))
        for block in range(blocks)
        for role in ("attn.q", "mlp.up")
    ]
    found = compared_sites([SitePair(site, site) for site in sites])
    assert found == {f"blocks.{block}.{role}" for block in compared for role in ("attn.q", "mlp.up")}


PAIRED = frozenset({Kind.INPUTS, Kind.GRADIENTS})
TOWERS = ((96, 64), (128, 80))
"""Widths and image sizes of two vision towers."""


def tower(width: int, image: int) -> LiveModel:
    config = transformers.CLIPVisionConfig(
        **{"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 4, "num_hidden_layers": 6},
        **{"image_size": image, "patch_size": 8, "projection_dim": 32},
    )
    return TransformersClip().wrap(transformers.CLIPVisionModelWithProjection(config).eval())


def allocated(run: Callable[[], object], place: Path) -> int:
    """The most bytes that tensors took at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    profiler.export_chrome_trace(str(place))
    events = [event for event in json.loads(place.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    live: dict[int, int] = {}
    most = total = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            live[address] = size
        total += size if size > 0 else -live.pop(address, 0)
        most = max(most, total)
    assert kept is not None
    return most


@pytest.mark.parametrize("kinds", [PAIRED, PAIRED | {Kind.TARGET_GRADIENTS}], ids=["paired", "with signs"])
@pytest.mark.parametrize("way", MEMORY_MODES, ids=str)
def test_a_batch_takes_what_the_budget_says(way: MemoryMode, kinds: frozenset[Kind], tmp_path: Path) -> None:
    """A GPU takes a little more than can be counted, which the budget reckons with."""
    source, target = (tower(*sizes) for sizes in TOWERS)
    pairs = list(pair_sites(source.layout, target.layout, blocks_by_index(6, 6)))
    shapes = [{name: tuple(t.shape) for name, t in live.module.state_dict().items()} for live in (source, target)]
    needs = needs_of(
        pairs, ModelFootprint(source.layout, shapes[0]), ModelFootprint(target.layout, shapes[1]), kinds=kinds
    )
    images = [torch.randn(4, 3, image, image) for _, image in TOWERS]

    def asked(live: LiveModel, pixels: torch.Tensor) -> Callable[[], Losses]:
        return lambda: Losses(live.image_features(pixels).square().sum())

    def run() -> Statistics:
        sides = [Side(live, live.layout.tokens, way.checkpointing, way.lean) for live in (source, target)]
        batches = [(asked(source, images[0]), asked(target, images[1]))] * 2
        return collect(pairs, *sides, batches, kinds, at_once=way.at_once, compared=compared_sites(pairs))

    taken = allocated(run, tmp_path / "trace.json") - sum(needs.sums)
    assert 0.75 < taken / (4 * needs.of_sample(way)) < 1


def carrier(calibration: Calibration) -> Carrier:
    method = make_method(calibration.settings.method, calibration.settings)
    assert isinstance(method, Carrier)
    return method


def squeezed(calibration: Calibration, passes: int) -> Calibration:
    """The same with so little memory that it takes several passes with the same batches."""
    kinds = carrier(calibration).kinds
    memory = calibration.memory_plan(kinds).bytes
    for share in range(200, 0, -1):
        settings = replace(calibration.settings, memory=memory * share // 100)
        found = calibration.models.memory_plan(kinds, calibration.samples, settings)
        if found.passes >= passes and found.batch_size == calibration.settings.batch_size:
            drawn, heads = calibration._drawn, calibration.heads
            return Calibration(calibration.models, drawn, heads, Stopwatch(), settings, keeps=False)
    raise AssertionError("no limit gives several passes")


@contextmanager
def counted(calibration: Calibration) -> Iterator[list[str]]:
    """Forward passes of both models: who reads the samples is noted."""
    seen: list[str] = []
    handles = []
    for name in ("source", "target"):
        parts = dict(getattr(calibration.models, name).module.named_modules())
        first = next((part for part in parts.values() if isinstance(part, nn.Conv2d)), None)
        first = first or parts.get("encoder.embed_tokens") or parts["model.embed_tokens"]
        handles.append(first.register_forward_pre_hook(lambda *_, name=name: seen.append(name)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def largest_difference(one: dict[str, TransportedSite], other: dict[str, TransportedSite]) -> float:
    assert one.keys() == other.keys()
    differences = []
    for name in one:
        first, second = one[name].delta.weight, other[name].delta.weight
        assert isinstance(first, torch.Tensor)
        assert isinstance(second, torch.Tensor)
        differences.append(float((first - second).abs().max() / first.abs().max()))
    return max(differences)


@pytest.mark.parametrize("name", PORTS)
def test_several_passes_carry_the_same(name: str, tmp_path: Path) -> None:
    usual = make_calibration(PORTS[name](tmp_path))
    batches = ceil(SAMPLES / 4)
    with counted(usual) as seen:
        expected = usual.carry(carrier(usual))
    assert seen == ["source", "target"] * batches
    tight = squeezed(usual, passes=2)
    passes = tight.memory_plan(carrier(tight).kinds).passes
    assert passes > 1
    with counted(tight) as seen:
        found = tight.carry(carrier(tight))
    assert seen == ["source", "target"] * (batches * passes)
    assert largest_difference(expected, found) < 1e-6


def test_several_passes_carry_the_same_along_a_path(tmp_path: Path) -> None:
    usual = make_calibration(PORTS["open_clip"](tmp_path), "bico-path")
    tight = squeezed(usual, passes=2)
    assert largest_difference(usual.carry(carrier(usual)), tight.carry(carrier(tight))) < 1e-6


def test_a_port_within_little_memory_is_the_same_port(tmp_path: Path) -> None:
    models = PORTS["open_clip"](tmp_path)
    memory = squeezed(make_calibration(models), passes=2).settings.memory
    options = {"n": SAMPLES, "batch_size": 4, "dtype": "float64", "evaluate": False, "tower": "vision"}
    options |= {**models, **PAPER}
    tuned = options.pop("source")
    usual, tight = (hf_bico.port(tuned, **options, memory=most) for most in (None, memory))
    assert f"--memory {memory}" in str(tight.record.command)
    assert tight.record.run.batch_size == 4
    assert usual.task_vector.keys() == tight.task_vector.keys()
    for name, change in usual.task_vector.items():
        assert torch.allclose(change, tight.task_vector[name], rtol=1e-6, atol=1e-9), name


def test_a_plan_reckons_with_this_machine_where_nothing_is_said(scene: Scene) -> None:
    usual = plan(scene.tuned, scene.target, base=scene.base)
    limited = usual.within(MemoryLimits(memory=10**9))
    assert (usual.memory_estimate.batch_cost, limited.memory_estimate.batch_cost) == (BATCH_ON_CPU, BATCH)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("library", "remedy"),
    [("open_clip", "allow more"), ("transformers", "allow more, or spread the models with --device-map auto")],
)
def test_too_little_memory_is_said_in_two_lines(library: str, remedy: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", (library, library))
    with pytest.raises(MemoryExhaustedError, match=r"takes about \d+ kB in the leanest way, and memory is 1 kB"):
        hf_bico.port(scene.tuned, to=scene.target, base=scene.base, data=scene.data, n=8, memory=1000)
    result = run("port", *scene.arguments, "--memory", "1kB", "-o", tmp_path / "out")
    assert result.exit_code == 1
    cause, said = result.stderr.splitlines()
    assert cause.startswith("Error: a port between these models takes about")
    assert said == f"Remedy: {remedy}"
    assert not (tmp_path / "out").exists()


def test_a_size_that_cannot_be_read_is_a_usage_error(scene: Scene) -> None:
    for command in (["plan", *scene.arguments[:-2]], ["port", *scene.arguments]):
        result = run(*command, "--memory", "much")
        assert result.exit_code == 2
        assert "--memory is 'much'" in result.stderr


def memory_row(result: Result) -> str:
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("memory ")]
    return row.removeprefix("memory ").strip()


@pytest.fixture(scope="module")
def scarce(scene: Scene) -> int:
    """So little memory that the plan takes several passes, in whole kB."""
    planned = plan(scene.tuned, scene.target, base=scene.base)
    limits = range(planned.memory_plan(batch_size=4).bytes // 1000, 0, -5)
    return 1000 * next(limit for limit in limits if planned.memory_plan(1000 * limit, 4).passes > 1)


def test_plan_tells_how_much_memory_it_takes_and_how(scene: Scene, scarce: int) -> None:
    command = ["plan", *scene.arguments[:-2]]
    planned = plan(scene.tuned, scene.target, base=scene.base)
    assert memory_row(run(*command)) == f"about {size_text(planned.memory_plan().bytes)}: fits this machine"
    options = ["--memory", f"{scarce // 1000}kB", "--batch-size", "4"]
    result, found = run(*command, *options), planned.memory_plan(scarce, 4)
    row = memory_row(result)
    assert row.startswith(f"about {size_text(found.bytes)} in {found.passes} passes")
    assert row.endswith(f": fits the {size_text(scarce)} of --memory")
    assert " ".join(options) in result.stdout.splitlines()[-1]
    assert memory_row(run("port", *scene.arguments, "--dry-run", *options)) == row
    result = run(*command, "--memory", "100kB")
    assert memory_row(result).endswith("does NOT fit the 100 kB of --memory")
    assert "Not yet: the models do not fit --memory." in result.stdout


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (MemoryPlan(8, (3,), False, False, 5000), "about 5 kB: "),
        (MemoryPlan(8, (2, 1), False, False, 5000), "about 5 kB in 2 passes: "),
        (MemoryPlan(8, (3,), False, True, 5000), "about 5 kB with activation checkpointing: "),
        (
            MemoryPlan(8, (2, 1), True, True, 5000),
            "about 5 kB in 2 passes and with activation checkpointing and with one model at a time on the GPU: ",
        ),
    ],
)
def test_every_way_has_its_words(found: MemoryPlan, words: str, scene: Scene) -> None:
    planned = plan(scene.tuned, scene.target, base=scene.base)
    vars(planned)["memory_estimate"] = found
    assert dict(planned.rows())["memory"] == f"{words}fits this machine"


def test_plan_as_json_tells_memory(scene: Scene, scarce: int) -> None:
    command = ["plan", *scene.arguments[:-2], "--json"]
    options = ["--memory", f"{scarce // 1000}kB", "--batch-size", "4"]
    usual, tight = (json.loads(run(*command, *more).stdout) for more in ([], options))
    way = {"limit": None, "batch_size": 32, "passes": 1, "checkpointing": False, "in_turn": False}
    assert usual["memory"] == way
    assert usual["fits"]
    assert usual["memory_bytes"] < usual["machine_bytes"]
    assert tight["memory"]["limit"] == scarce
    assert tight["memory"]["passes"] > 1
    assert tight["memory_bytes"] <= scarce
    assert tight["fits"]


def test_a_plan_in_half_precision_takes_less(scene: Scene) -> None:
    planned = plan(scene.tuned, scene.target, base=scene.base)
    assert planned.within(MemoryLimits(itemsize=2)).memory_bytes < planned.memory_bytes
    halves = run("port", *scene.arguments, "--dry-run", "--dtype", "bfloat16")
    assert memory_row(halves) != memory_row(run("port", *scene.arguments, "--dry-run"))
