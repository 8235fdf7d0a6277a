"""Estimate the memory of a port from shapes alone, and plan batches and passes within a limit.

Counts models, covariances, a batch's activations and the solver's work space. Knows layouts; no weights and no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from hf_bico.models.layout import Layout, Site, SitePair

BATCH_BYTES = 2**27
"""Most bytes of the covariances that are solved in one batch; a single large one may take more."""
COPIES = 15
"""Peak memory of the solver over the batch's own bytes, the batch and the result included."""

FLOAT64, FLOAT32 = 8, 4
BESIDE = 1.12
"""Bytes of all activations over those that sites read and write: fitted to ViT-B/16 and ViT-L/14 on an H200."""
RECOMPUTED = 1.25
"""Times the activations of a block, while it is recomputed and its gradients flow."""
WIDENED_ROWS = 256
"""Rows of logits that the loss of a language model takes in float32 at once; of the others there are the logits, in
whose place their gradient comes, and one copy of that."""
USUAL_TOKENS = 512
"""Tokens of a text of unknown length."""
CAPTION_TOKENS = 77
"""Tokens that the text tower of a CLIP reads."""
USUAL_KINDS = ("inputs", "gradients")
"""The statistics that are counted while the method is unknown."""


MOST_COMPARED = 12
"""Blocks of which three are compared with mispaired rows."""


@dataclass(frozen=True)
class MemoryMode:
    """Which activations of a batch are kept, and for how many models at once."""

    checkpointing: bool = False
    """Keep only the inputs of blocks."""
    lean: bool = False
    """Of MLPs, keep only the inputs."""
    at_once: bool = False
    """Keep the graphs of both models at once."""


MEMORY_MODES = (
    MemoryMode(),
    MemoryMode(lean=True),
    MemoryMode(checkpointing=True),
    MemoryMode(checkpointing=True, at_once=True),
)


@dataclass(frozen=True)
class SampleBytes:
    """Bytes of one model's activations for one sample."""

    graph: int
    """All that the backward pass needs."""
    checkpointed: int
    """The same with activation checkpointing: the inputs of blocks, and the activations of one block."""
    site_inputs: int
    site_outputs: int
    """Inputs and outputs of the hooked sites, each once."""
    lean: int | None = None
    """The graph with checkpointed MLPs; None where there are none."""
    block: int = 0
    """Peak of one block in the backward pass."""

    def kept(self, mode: MemoryMode) -> int:
        """Return the bytes that are kept for the backward pass."""
        if mode.checkpointing:
            return self.checkpointed
        return self.lean if mode.lean and self.lean is not None else self.graph


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a port needs: models, sums by group of pairs, activations of one sample, and the carried change."""

    weights: tuple[int, int]
    sums: tuple[int, ...]
    """Of each group of pairs that can be solved on its own."""
    solver: int
    carried: int
    """The transported changes, which stay on the device."""
    samples: tuple[SampleBytes, SampleBytes]
    both_graphs: bool = False
    """Whether both models' graphs are needed at once, as for losses with each label in turn."""
    texts: bool = False
    """Whether inputs wait for the end of the target's forward pass, which says which rows are real tokens."""
    language: bool = False
    """Whether the loss is over a vocabulary."""
    adding: int = 0
    """Rows of one sample of both models in float64, while they are added."""
    kept_inputs: int = 0
    """Inputs of the target's sites that are kept until the backward pass, for its parameter gradients."""

    def of_sample(self, mode: MemoryMode) -> int:
        """Return the activations of one sample at the peak."""
        source, target = self.samples
        graphs = [one.kept(mode) for one in self.samples]
        rows = source.site_inputs + source.site_outputs
        if self.both_graphs:
            return max(1, sum(graphs) + rows + target.site_inputs + self.adding)
        kept = self.kept_inputs
        waiting = source.site_inputs + max(0, target.site_inputs - kept) if self.texts else 0
        last = graphs[1] + source.site_outputs + self.adding + kept
        if mode.at_once:  # the source's inputs shrink as the target's graph grows, its graph as its gradients come
            return max(1, sum(graphs) + kept + max(source.site_inputs, waiting), last)
        # the source's graph shrinks as its gradients come, and its inputs shrink as the target's graph grows
        return max(1, rows + source.block, graphs[0] + source.site_inputs, last + waiting)


def solved_together(pairs: Sequence[SitePair]) -> list[list[SitePair]]:
    """Group the pairs so that groups share no sum: by block, and by the activations that sites read."""
    groups: list[list[SitePair]] = []
    group_of: dict[object, int] = {}
    for pair in pairs:
        keys = [("reads", pair.source.input, pair.target.input)]
        if pair.target.block is not None:
            keys.append(("block", pair.target.tower, str(pair.target.block)))
        number = next((group_of[key] for key in keys if key in group_of), len(groups))
        if number == len(groups):
            groups.append([])
        groups[number].append(pair)
        group_of.update(dict.fromkeys(keys, number))
    return groups


def compared_sites(pairs: Sequence[SitePair]) -> frozenset[str]:
    """Return the target's sites whose rows are mispaired too: of each role those of the first, middle and last block.

    Of more than `MOST_COMPARED` blocks only the middle one: such sums cost as much as those of the paired rows.
    """
    by_role: dict[tuple[str, str], list[str]] = {}
    for pair in pairs:
        by_role.setdefault((pair.target.tower, pair.target.role), []).append(pair.target.name)
    return frozenset(
        names[place]
        for names in by_role.values()
        for place in ((0, len(names) // 2, -1) if len(names) <= MOST_COMPARED else (len(names) // 2,))
    )


def sum_bytes(pairs: Sequence[SitePair], kinds: Collection[str] = USUAL_KINDS) -> int:
    """Return the bytes of these pairs' sums in float64, shared inputs counted once."""
    total = FLOAT64 * sum(map(prod, _covariances(pairs, kinds)))
    if "target gradients" in kinds:  # the sum, and the votes
        total += 2 * FLOAT64 * sum(pair.target.shape[0] * (pair.target.shape[1] + 1) for pair in pairs)
    return total


def solver_bytes(pairs: Sequence[SitePair], kinds: Collection[str] = USUAL_KINDS) -> int:
    """Return the solver's work space, beside the covariances; those of equal shape are solved together."""
    alike = Counter(FLOAT64 * prod(shape) for shape in _covariances(pairs, kinds))
    batches = (size * min(count, max(1, BATCH_BYTES // size)) for size, count in alike.items())
    return COPIES * max(batches, default=0)


def _covariances(pairs: Sequence[SitePair], kinds: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield the shapes of the cross-covariances of these kinds."""
    read = {(pair.source.input, pair.target.input): pair for pair in pairs}
    for kind in kinds:
        if kind == "target gradients":
            continue
        axis = 1 if "inputs" in kind or kind == "input gradients" else 0
        for pair in read.values() if kind == "inputs" else pairs:
            yield pair.source.shape[axis], pair.target.shape[axis]


@dataclass(frozen=True)
class ModelFootprint:
    """Shapes and precision of one of the two models, and how many rows a sample has in it."""

    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]
    itemsize: int = FLOAT32
    tokens: int = USUAL_TOKENS
    """Tokens of a text, if it reads texts."""

    @property
    def weights(self) -> int:
        return self.itemsize * sum(prod(shape) for shape in self.shapes.values())

    def rows(self, site: Site) -> int:
        """Return how many rows of a site belong to one sample."""
        if site.text:
            return self.tokens
        tokens = self.layout.tokens
        return USUAL_TOKENS if tokens is None else tokens.count

    def bytes_of(self, sites: Iterable[Site]) -> tuple[int, int]:
        """Return the bytes of one sample that these sites read, each activation once, and write."""
        sites = list(sites)
        inputs = {site.input: site.shape[1] * self.rows(site) for site in sites}
        outputs = (site.shape[0] * self.rows(site) for site in sites)
        return self.itemsize * sum(inputs.values()), self.itemsize * sum(outputs)

    def sample(self, hooked: Sequence[Site], language: bool) -> SampleBytes:
        """Return the activations of one sample while these sites are hooked."""
        towers = {site.tower for site in hooked}
        running = [site for site in self.layout.sites if site.tower in towers]
        graph = int(BESIDE * sum(self.bytes_of(running)))
        first = {(site.tower, site.block): site for site in reversed(running)}
        entering = int(BESIDE * self.itemsize * sum(site.shape[1] * self.rows(site) for site in first.values()))
        widened = 2 * FLOAT32 * min(self.tokens, WIDENED_ROWS)
        loss = (2 * self.itemsize * self.tokens + widened) * self._vocabulary if language else 0
        block = graph // max(1, len(first))
        inputs, outputs = (int(BESIDE * size) for size in self.bytes_of(hooked))
        return SampleBytes(
            graph=graph + loss,
            checkpointed=min(graph, entering + int(RECOMPUTED * block)) + loss,
            site_inputs=inputs,
            site_outputs=outputs,
            lean=self._lean(running, graph, loss),
            block=min(graph, 2 * block),
        )

    def _lean(self, running: Sequence[Site], graph: int, loss: int) -> int | None:
        """Return the bytes of all but the MLPs, of their inputs, and of one MLP while it is recomputed."""
        inside = [site for site in running if site.role.startswith("mlp.")]
        if not inside:
            return None
        hidden = int(BESIDE * sum(self.bytes_of(inside)))
        entering = int(BESIDE * self.bytes_of(site for site in inside if site.role != "mlp.down")[0])
        count = len({(site.tower, site.block) for site in inside})
        return min(graph, graph - hidden + entering + hidden // count) + loss

    @property
    def _vocabulary(self) -> int:
        """Rows of the longest embedding table."""
        others = self.shapes.keys() - self.layout.tensors
        return max((self.shapes[name][0] for name in others if len(self.shapes[name]) == 2), default=0)


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
    """Return what carrying these pairs needs with statistics of these kinds.

    `ranks` are those of a LoRA by the source's tensors; `language` tells whether the loss is over a vocabulary.
    """
    groups, compared, paired_kinds = solved_together(pairs), compared_sites(pairs), {*kinds} - {"target gradients"}
    sources = list({pair.source.name: pair.source for pair in pairs}.values())
    target_sample = target.sample([pair.target for pair in pairs], language)
    changes = ((pair.target.shape, (ranks or {}).get(pair.source.weight.tensor)) for pair in pairs)
    adding = (
        target.rows(pair.target) * (FLOAT64 * sum(shape) + target.itemsize * shape[1])  # mispaired, they are copied
        for pair in pairs
        for shape in _covariances([pair], kinds)
    )
    return MemoryNeeds(
        weights=(source.weights, target.weights),
        sums=tuple(
            sum_bytes(group, kinds) + sum_bytes([pair for pair in group if pair.target.name in compared], paired_kinds)
            for group in groups
        ),
        solver=max((solver_bytes(group, kinds) for group in groups), default=0),
        # a matrix or two factors for each pair
        carried=FLOAT32 * sum(prod(shape) if rank is None else rank * sum(shape) for shape, rank in changes),
        samples=(source.sample(sources, language), target_sample),
        both_graphs=both_graphs,
        texts=any(pair.target.text for pair in pairs),
        language=language,
        adding=int(BESIDE * max(adding, default=0)),
        kept_inputs=target_sample.site_inputs if "target gradients" in kinds else 0,
    )


LEAST_ACTIVATIONS = 250_000_000
"""Bytes that the activations of a batch may always take."""
ACTIVATIONS = 0.3
"""Most that they take otherwise, as a share of models and sums: so batches do not shrink with depth, and those of
ViT-B/16 take as much as the solver does later."""
ACTIVATIONS_OF_LANGUAGE = 1.0
"""The same for a loss over a vocabulary: small batches of a language model wait for the host, which starts thousands of
kernels for each."""
FREE_SHARE = 0.05
"""Share of a GPU's free memory that the graphs of both models may take in any case: with ten labels, batches of 3 of
ViT-B/16 take five times as long as batches of 13 on an H200."""
BATCH = 8.0
"""Cost of starting a batch, in samples: about ten images for ViT-B/16 on an H200."""
BATCH_ON_CPU = 0.03
"""The same on a CPU: measured with two blocks of ViT-B/16 and -plus on two cores."""
MOST_SAMPLES = 32
"""Largest batch that is chosen by default."""
MOST_SAMPLES_OF_BOTH = 128
"""The same where the graphs of both models are kept, which are gone through once for each label: on small models the
steps of `bico-path` take two thirds of the time."""
SPARE_SHARE = 0.05
"""Share of a limit that is left for the allocator and the libraries' work space."""


@dataclass(frozen=True)
class MemoryLimits:
    """Requested bounds: most memory, batch size, tokens of a text, and bytes of a number."""

    memory: int | None = None
    batch_size: int | None = None
    tokens: int | None = None
    itemsize: int = FLOAT32


@dataclass(frozen=True)
class MemoryPlan:
    """How a port runs within a limit, and its expected peak in bytes."""

    batch_size: int
    groups: tuple[int, ...]
    """How many groups of pairs each pass over the samples sums."""
    alternating: bool
    """Whether the models are on the device in turn."""
    checkpointing: bool
    bytes: int
    fits: bool = True
    lean: bool = False
    """Whether MLPs are checkpointed, which allows larger batches."""
    at_once: bool = False
    """Whether both models' graphs are kept at once, which needs less where they are small."""
    batch_cost: float = BATCH
    """Cost of starting a batch, in samples."""

    @property
    def passes(self) -> int:
        return len(self.groups)

    @property
    def limit(self) -> int:
        """The smallest limit that allows this plan."""
        return ceil(self.bytes / (1 - SPARE_SHARE))

    @property
    def work(self) -> float:
        """Cost per sample in forward passes, a backward pass counting as two, with the cost of starting batches."""
        forward_and_back = 4.0 if self.checkpointing else 3.6 if self.lean else 3.0
        return self.passes * forward_and_back * (1 + self.batch_cost / self.batch_size)


def plan_memory(
    needs: MemoryNeeds,
    limit: int | None = None,
    batch_size: int | None = None,
    turns: Sequence[bool] = (False, True),
    batch_cost: float = BATCH,
) -> MemoryPlan:
    """Return the fastest plan within the limit, or the one that needs least if none fits.

    Plans trade off smaller batches, several passes over the samples and activation checkpointing; a requested batch
    size is kept if any plan with it fits. `turns` lists, in order of preference, whether the models are on the device
    in turn.
    """
    room = None if limit is None else int(limit * (1 - SPARE_SHARE))
    is_costly = batch_cost > BATCH_ON_CPU  # to start a batch, so that larger ones are worth their memory
    free = int(FREE_SHARE * room) if room is not None and needs.both_graphs and is_costly else 0
    can_be_lean = any(one.lean is not None for one in needs.samples)
    too_large: list[MemoryPlan] = []
    for alternating in [False] if needs.both_graphs else turns:
        plans = [
            replace(_plan(needs, room, size, alternating, mode), batch_cost=batch_cost)
            for mode in MEMORY_MODES
            if (not mode.lean or can_be_lean) and not (mode.at_once and (alternating or needs.both_graphs))
            for size in _batch_sizes(needs, batch_size, mode, free, halved=room is not None)
        ]
        fitting = [one for one in plans if one.fits]
        if batch_size is not None:
            largest = max((one.batch_size for one in fitting), default=0)
            fitting = [one for one in fitting if one.batch_size == largest]
        if fitting:
            return min(fitting, key=lambda one: one.work)
        too_large += plans
    return min(too_large, key=lambda one: one.bytes)


def _batch_sizes(needs: MemoryNeeds, requested: int | None, mode: MemoryMode, free: int, halved: bool) -> list[int]:
    """Return the candidates, the largest first."""
    share = ACTIVATIONS_OF_LANGUAGE if needs.language else ACTIVATIONS
    room = max(LEAST_ACTIVATIONS, int(share * (sum(needs.weights) + sum(needs.sums))), free)
    most = MOST_SAMPLES_OF_BOTH if needs.both_graphs else MOST_SAMPLES
    size = requested or max(1, min(most, room // needs.of_sample(mode)))
    return [size >> step for step in range(size.bit_length())] if halved else [size]


def _plan(needs: MemoryNeeds, room: int | None, size: int, alternating: bool, mode: MemoryMode) -> MemoryPlan:
    models = max(needs.weights) if alternating else sum(needs.weights)
    activations = size * needs.of_sample(mode)
    passes, waiting = [list(needs.sums)], 0

    def peak() -> int:
        sums = max(map(sum, passes))
        solved = max(sums, needs.carried - waiting)
        return models + waiting + max(sums + activations, solved + needs.solver)

    if room is not None and peak() > room:
        waiting = needs.carried  # the changes that earlier passes have transported
        passes = _split_passes(needs.sums, room - models - waiting - max(activations, needs.solver))
    bytes_at_peak = peak()
    return MemoryPlan(
        batch_size=size,
        groups=tuple(map(len, passes)),
        alternating=alternating,
        checkpointing=mode.checkpointing,
        bytes=bytes_at_peak,
        fits=room is None or bytes_at_peak <= room,
        lean=mode.lean,
        at_once=mode.at_once,
    )


def _split_passes(sums: Sequence[int], room: int) -> list[list[int]]:
    """Split the sums into passes: as many groups as there is room for in each, at least one."""
    passes: list[list[int]] = [[]]
    for size in sums:
        if passes[-1] and sum(passes[-1]) + size > room:
            passes.append([])
        passes[-1].append(size)
    return passes
