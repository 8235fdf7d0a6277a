"""Memory needs and how to stay within a limit.

How much memory finding maps takes: for those who find them, and for those who reckon with it. Knows no torch.

What a port needs of memory, by shapes alone: models, covariances, a batch's activations, the solver's work.

An estimate that is held against measured peaks; knows no torch, and no limit.

The memory budget of a port: how what it needs is done within a limit, and in which batches.

Knows bytes and numbers of samples; not models, sites or torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import NamedTuple

from hf_bico.models.layout import Layout, Site, SitePair, descent_sites

BATCH_BYTES = 2**27
"""How much one batch of covariances may take that is solved together; a single large one may take more."""
COPIES = 15
"""How many times the batch's own bytes the solver takes at its peak, the batch itself and the result included."""

FLOAT64, FLOAT32 = 8, 4
BESIDE = 1.12
"""What a batch takes in all, as a multiple of what its sites read and write: fitted to ViT-B/16 and ViT-L/14 on an
H200."""
LOGITS = 14
"""Bytes that the loss of a language model takes for each logit: the logits, their softmax and its gradient."""
USUAL_TOKENS = 512
"""Of a text, while nothing else is known."""
CAPTION_TOKENS = 77
"""Of what the text side of a CLIP reads."""
USUAL_KINDS = ("inputs", "gradients", "descent")
"""Which sums are reckoned with, while the method is not known."""
_OF_TARGET = ("target gradients", "descent")
"""What is added up of the target's parameters, from what its sites read: that is kept until gradients come."""


@dataclass(frozen=True)
class Sample:
    """What one model holds for one sample of a batch, in bytes."""

    graph: int
    """What the backward pass needs."""
    thrifty: int
    """The same with activation checkpointing: what enters each block, and one block's work."""
    shown_inputs: int
    shown_outputs: int
    """What the watched sites read and write, each once."""
    lean: int | None = None
    """As `graph`, but with what enters the MLPs alone; None where there are none."""
    block: int = 0
    """What one block takes while gradients pass through it."""

    def kept(self, checkpointing: bool, lean: bool) -> int:
        """What it keeps for the backward pass."""
        if checkpointing:
            return self.thrifty
        return self.lean if lean and self.lean is not None else self.graph


@dataclass(frozen=True)
class MemoryNeeds:
    """What a port needs, in bytes: models, the sums of each group of pairs, one sample, and the carried change."""

    weights: tuple[int, int]
    sums: tuple[int, ...]
    """Of the covariances of each group of pairs that can be solved on its own."""
    solver: int
    carried: int
    """What was carried so far stays where it was found."""
    samples: tuple[Sample, Sample]
    both_graphs: bool = False
    """Whether the two models' graphs are needed at once, as for labels that are gone through one by one."""

    def of_models(self, alternating: bool) -> int:
        return max(self.weights) if alternating else sum(self.weights)

    texts: bool = False
    """Whether inputs wait for the end of the target's forward pass: then it is known which rows are real tokens."""
    adding: int = 0
    """What is added up at a time, of one sample: the rows of the two models in float64."""
    descents: int = 0
    """Of the sums, those that a GPU keeps in half of the room when the solver begins."""
    kept_inputs: int = 0
    """What the target's sites read and is kept until their gradients come."""

    def of_sample(self, checkpointing: bool, lean: bool = False, at_once: bool = False) -> int:
        """The activations of one sample at the peak."""
        source, target = self.samples
        graphs = [one.kept(checkpointing, lean) for one in self.samples]
        shown = source.shown_inputs + source.shown_outputs
        if self.both_graphs:
            return max(1, sum(graphs) + 2 * shown + target.shown_inputs + self.adding)
        kept = self.kept_inputs
        waiting = source.shown_inputs + max(0, target.shown_inputs - kept) if self.texts else 0
        last = graphs[1] + source.shown_outputs + self.adding + kept
        if at_once:  # the source's inputs go while the target's graph comes, its graph while its gradients come
            return max(1, sum(graphs) + kept + max(source.shown_inputs, waiting), last)
        # the source's graph goes while its gradients come, and its inputs go while the target's graph comes
        return max(1, shown + source.block, graphs[0] + source.shown_inputs, last + waiting)

    @property
    def can_be_lean(self) -> bool:
        return any(one.lean is not None for one in self.samples)


def solved_together(pairs: Sequence[SitePair]) -> list[list[SitePair]]:
    """The pairs in groups that share no sum: those of a block, and whatever reads the same activation."""
    groups: list[list[SitePair]] = []
    place: dict[object, int] = {}
    for pair in pairs:
        keys = [("reads", pair.source.input, pair.target.input)]
        if pair.target.block is not None:
            keys.append(("block", pair.target.tower, str(pair.target.block)))
        number = next((place[key] for key in keys if key in place), len(groups))
        if number == len(groups):
            groups.append([])
        groups[number].append(pair)
        place.update(dict.fromkeys(keys, number))
    return groups


def sum_bytes(
    pairs: Sequence[SitePair], kinds: Collection[str] = USUAL_KINDS, of_descent: Collection[str] | None = None
) -> int:
    """Of the float64 sums of these pairs, inputs that are shared counted once.

    Descents, in float32, are those of all target sites, or of some.
    """
    found = FLOAT64 * sum(map(prod, _covariances(pairs, kinds)))
    parameters = {pair.target.name: pair.target.shape[0] * (pair.target.shape[1] + 1) for pair in pairs}
    if "target gradients" in kinds:  # the sum, and the votes
        found += 2 * FLOAT64 * sum(parameters.values())
    if "descent" in kinds:
        found += FLOAT32 * sum(size for name, size in parameters.items() if of_descent is None or name in of_descent)
    return found


def solver_bytes(pairs: Sequence[SitePair], kinds: Collection[str] = USUAL_KINDS) -> int:
    """The solver's work space, beside the covariances themselves: those of equal shape are solved together."""
    alike = Counter(FLOAT64 * prod(shape) for shape in _covariances(pairs, kinds))
    batches = (size * min(count, max(1, BATCH_BYTES // size)) for size, count in alike.items())
    return COPIES * max(batches, default=0)


def _covariances(pairs: Sequence[SitePair], kinds: Collection[str]) -> Iterator[tuple[int, int]]:
    """The shapes of the cross-covariances of these kinds."""
    read = {(pair.source.input, pair.target.input): pair for pair in pairs}
    for kind in kinds:
        if kind in _OF_TARGET:
            continue
        axis = 1 if "inputs" in kind or kind == "input gradients" else 0
        for pair in read.values() if kind == "inputs" else pairs:
            yield pair.source.shape[axis], pair.target.shape[axis]


@dataclass(frozen=True)
class ModelFootprint:
    """One of the two models as the budget sees it: its tensors, its precision, and how many rows a sample has."""

    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]
    itemsize: int = FLOAT32
    tokens: int = USUAL_TOKENS
    """Of a text, where it reads any."""

    @property
    def weights(self) -> int:
        return self.itemsize * sum(prod(shape) for shape in self.shapes.values())

    def rows(self, site: Site) -> int:
        """How many rows of a site belong to one sample."""
        if site.text:
            return self.tokens
        tokens = self.layout.tokens
        return USUAL_TOKENS if tokens is None else tokens.prefix + prod(tokens.grid)

    def bytes_of(self, sites: Iterable[Site]) -> tuple[int, int]:
        """What these sites read, each activation once, and what they write, for one sample."""
        sites = list(sites)
        read = {site.input: site.shape[1] * self.rows(site) for site in sites}
        return self.itemsize * sum(read.values()), self.itemsize * sum(
            site.shape[0] * self.rows(site) for site in sites
        )

    def sample(self, watched: Sequence[Site], language: bool) -> Sample:
        """What it holds for one sample while these sites are watched."""
        towers = {site.tower for site in watched}
        running = [site for site in self.layout.sites if site.tower in towers]
        graph = int(BESIDE * sum(self.bytes_of(running)))
        first = {(site.tower, site.block): site for site in reversed(running)}
        entering = int(BESIDE * self.itemsize * sum(site.shape[1] * self.rows(site) for site in first.values()))
        loss = LOGITS * self.tokens * self._vocabulary if language else 0
        block = graph // max(1, len(first))
        thrifty = min(graph, entering + block)
        reads, writes = (int(BESIDE * size) for size in self.bytes_of(watched))
        lean = self._lean(running, graph, loss)
        return Sample(graph + loss, thrifty + loss, reads, writes, lean, min(graph, 2 * block))

    def _lean(self, running: Sequence[Site], graph: int, loss: int) -> int | None:
        """What is kept of all but the MLPs, what enters these, and one of them while it runs once more."""
        inside = [site for site in running if site.role.startswith("mlp.")]
        if not inside:
            return None
        hidden = int(BESIDE * sum(self.bytes_of(inside)))
        entering = int(BESIDE * self.bytes_of(site for site in inside if site.role != "mlp.down")[0])
        places = len({(site.tower, site.block) for site in inside})
        return min(graph, graph - hidden + entering + hidden // places) + loss

    @property
    def _vocabulary(self) -> int:
        """The longest table of embeddings."""
        carried = self.layout.tensors
        return max(
            (shape[0] for name, shape in self.shapes.items() if name not in carried and len(shape) == 2), default=0
        )


def needs_of(
    pairs: Sequence[SitePair],
    source: ModelFootprint,
    target: ModelFootprint,
    *,
    kinds: Collection[str] = USUAL_KINDS,
    ranks: Mapping[str, int] | None = None,
    both_graphs: bool = False,
    language: bool = False,
) -> MemoryNeeds:
    """What carrying these pairs needs, by sums of these kinds.

    `ranks` are those of a LoRA by the source's tensors, and `language` says whether the loss is over a vocabulary.
    """
    groups = solved_together(pairs)
    sources = list({pair.source.name: pair.source for pair in pairs}.values())
    adding = (
        FLOAT64 * target.rows(pair.target) * sum(shape) for pair in pairs for shape in _covariances([pair], kinds)
    )
    return MemoryNeeds(
        weights=(source.weights, target.weights),
        sums=tuple(sum_bytes(group, kinds, descent_sites(pairs)) for group in groups),
        solver=max((solver_bytes(group, kinds) for group in groups), default=0),
        carried=FLOAT32 * sum(_carried(pair, (ranks or {}).get(pair.source.weight.tensor)) for pair in pairs),
        samples=(
            source.sample(sources, language),
            target.sample([pair.target for pair in pairs], language),
        ),
        both_graphs=both_graphs,
        texts=any(pair.target.text for pair in pairs),
        descents=sum_bytes(pairs, ("descent",), descent_sites(pairs)) if "descent" in kinds else 0,
        adding=int(BESIDE * max(adding, default=0)),
        kept_inputs=int(BESIDE * target.bytes_of(_read_later(pairs, kinds))[0]),
    )


def _read_later(pairs: Sequence[SitePair], kinds: Collection[str]) -> list[Site]:
    """The target's sites whose inputs meet their gradients."""
    if "target gradients" in kinds:
        return [pair.target for pair in pairs]
    some = descent_sites(pairs) if "descent" in kinds else ()
    return [pair.target for pair in pairs if pair.target.name in some]


def _carried(pair: SitePair, rank: int | None) -> int:
    """The numbers of one change in the target's coordinates: two factors, or a matrix."""
    return prod(pair.target.shape) if rank is None else rank * sum(pair.target.shape)


LEAST_ACTIVATIONS = 250_000_000
"""What the activations of one batch may take in any case."""
ACTIVATIONS = 0.3
"""What they may take where nothing else decides, as a share of models and sums: so batches do not shrink with depth,
and those of ViT-B/16 take what the solver takes later."""
BATCH = 8.0
"""What starting a batch costs, in samples: about that of ten images where ViT-B/16 was timed on an H200."""
BATCH_ON_CPU = 0.03
"""The same where no GPU does the work: measured with two blocks of ViT-B/16 and -plus on two cores."""
MOST_SAMPLES = 32
"""Batches are not larger than this unless it is asked for."""
SPARE = 0.05
"""The share of a limit that is left to the allocator and the libraries' own work space."""


@dataclass(frozen=True)
class MemoryLimits:
    """What is asked for: the most memory, the batch size, the tokens of a text, and the bytes of a number."""

    memory: int | None = None
    batch_size: int | None = None
    tokens: int | None = None
    itemsize: int = FLOAT32


class MemoryMode(NamedTuple):
    """What is kept of a batch: what enters each block, or its MLP, or all; and of one model at a time, or of both."""

    checkpointing: bool = False
    lean: bool = False
    at_once: bool = False


WAYS = (
    MemoryMode(),
    MemoryMode(lean=True),
    MemoryMode(checkpointing=True),
    MemoryMode(checkpointing=True, at_once=True),
)


@dataclass(frozen=True)
class MemoryPlan:
    """How a port is done within a limit, and what it is expected to take at its peak."""

    batch_size: int
    groups: tuple[int, ...]
    """How many groups of pairs each pass over the samples adds up."""
    alternating: bool
    """Whether the models are on the device in turn."""
    checkpointing: bool
    bytes: int
    fits: bool = True
    lean: bool = False
    """Whether MLPs run once more in the backward pass: larger batches are worth it."""
    at_once: bool = False
    """Whether both models' graphs are there at once, which takes less where they are small."""
    batch_cost: float = BATCH
    """What starting a batch costs there, in samples."""

    @property
    def passes(self) -> int:
        return len(self.groups)

    @property
    def limit(self) -> int:
        """The least limit that allows it."""
        return ceil(self.bytes / (1 - SPARE))

    @property
    def work(self) -> float:
        """What the passes cost, in forward passes of one sample: backward counts twice, and each batch has its own."""
        forward_and_back = 4.0 if self.checkpointing else 3.6 if self.lean else 3.0
        return self.passes * forward_and_back * (1 + self.batch_cost / self.batch_size)


def plan_memory(
    needs: MemoryNeeds,
    limit: int | None = None,
    batch_size: int | None = None,
    turns: Sequence[bool] = (False, True),
    batch_cost: float = BATCH,
) -> MemoryPlan:
    """The quickest way to do it within the limit, or the leanest where none fits.

    The choice is between smaller batches, several passes over the samples and activation checkpointing; a batch size
    that is asked for is kept while it fits in any way. `turns` says whether both models stay on the device, or are
    there in turn: in the order in which that is tried.
    """
    room = None if limit is None else int(limit * (1 - SPARE))
    ways: list[MemoryPlan] = []
    for alternating in [False] if needs.both_graphs else turns:
        found = [
            replace(_fit(needs, room, size, alternating, way), batch_cost=batch_cost)
            for way in WAYS
            if (not way.lean or needs.can_be_lean) and not (way.at_once and (alternating or needs.both_graphs))
            for size in _sizes(needs, batch_size, way, halved=room is not None)
        ]
        fitting = [one for one in found if one.fits]
        if batch_size is not None:
            largest = max((one.batch_size for one in fitting), default=0)
            fitting = [one for one in fitting if one.batch_size == largest]
        if fitting:
            return min(fitting, key=lambda one: one.work)
        ways += found
    return min(ways, key=lambda one: one.bytes)


def _sizes(needs: MemoryNeeds, asked: int | None, way: MemoryMode, halved: bool) -> list[int]:
    """The batch sizes that come into question, the largest first."""
    room = max(LEAST_ACTIVATIONS, int(ACTIVATIONS * (sum(needs.weights) + sum(needs.sums))))
    size = asked or max(1, min(MOST_SAMPLES, room // needs.of_sample(*way)))
    return [size >> step for step in range(size.bit_length())] if halved else [size]


def _fit(needs: MemoryNeeds, room: int | None, size: int, alternating: bool, way: MemoryMode) -> MemoryPlan:
    models, activations = needs.of_models(alternating), size * needs.of_sample(*way)
    sums, waiting = sum(needs.sums), 0
    groups: tuple[int, ...] = (len(needs.sums),)

    def peak() -> int:
        halved = needs.descents // 2 * sums // max(1, sum(needs.sums))
        solved = max(sums - halved, needs.carried - waiting)
        return models + waiting + max(sums + activations, solved + needs.solver)

    if room is not None and peak() > room:
        waiting = needs.carried  # what earlier passes have found
        groups = _groups(needs.sums, room - models - waiting - max(activations, needs.solver))
        sums = max(_in_groups(needs.sums, groups), default=0)
    fits = room is None or peak() <= room
    return MemoryPlan(size, groups, alternating, way.checkpointing, peak(), fits, way.lean, way.at_once)


def _groups(sums: Sequence[int], room: int) -> tuple[int, ...]:
    """How many groups each pass takes: as many as there is room for, at least one."""
    counts, used = [0], 0
    for size in sums:
        if counts[-1] and used + size > room:
            counts.append(0)
            used = 0
        counts[-1] += 1
        used += size
    return tuple(counts)


def _in_groups(sizes: Sequence[int], counts: Sequence[int]) -> list[int]:
    found, start = [], 0
    for count in counts:
        found.append(sum(sizes[start : start + count]))
        start += count
    return found
