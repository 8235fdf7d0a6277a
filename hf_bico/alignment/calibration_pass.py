"""Run both models over the same batches, pair their activations and gradients by row, and sum them up.

The source runs first, and its rows are kept for one batch. The target's rows are paired with them, added and dropped as
soon as they are computed: inputs during the forward pass, gradients during the backward pass. Knows sites and sums;
neither the models' libraries nor the task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from hf_bico.alignment.statistics import OF_EXPECTED_LOSSES, OF_TARGET, OF_TASK_LOSS, Kind, Statistics, key_of
from hf_bico.errors import ModelError, ObjectiveError
from hf_bico.models.hooks import Losses, Observable, Pass, SiteCallback, Stream, TextRows
from hf_bico.models.layout import Site, SitePair, Tokens
from hf_bico.runtime.environment import exact_float32, to_device


@dataclass(frozen=True)
class TokenPairs:
    """The positions of tokens that pair, in the two models' flattened batches of the same texts, on the CPU."""

    inputs: tuple[Tensor, Tensor]
    gradients: tuple[Tensor, Tensor]


def pair_tokens(source: TextRows, target: TextRows) -> TokenPairs:
    """Pair the tokens of two models that read the same texts, padding with nothing.

    Where both have read the same tokens, all of them pair in order; else those that are marked. Without marks, as in
    captions, only the tokens that both have.
    """
    if len(source.ids) != len(target.ids):
        raise ValueError(f"{len(source.ids)} texts of the source and {len(target.ids)} of the target do not pair")
    if source.marks is not None and target.marks is not None:
        inputs, gradients = zip(map(_positions, source.marks), map(_positions, target.marks), strict=True)
        return TokenPairs(inputs, gradients)
    masks = [side.mask.cpu() for side in (source, target)]
    ids = [side.ids.cpu() for side in (source, target)]
    if source.same_as(target):
        positions = _positions(masks[0])
        return TokenPairs((positions, positions), (positions, positions))
    paired: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, both in enumerate(zip(*masks, strict=True)):
        real = [mask.nonzero().squeeze(1) for mask in both]
        tokens = [side[number][positions] for side, positions in zip(ids, real, strict=True)]
        if not torch.equal(*tokens):
            real = [positions[common] for positions, common in zip(real, _common_tokens(*tokens), strict=True)]
        for side, positions, rows in zip(ids, real, paired, strict=True):
            rows.append(positions + number * side.shape[1])
    found = torch.cat(paired[0]), torch.cat(paired[1])
    return TokenPairs(found, found)


def _common_tokens(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    blocks = SequenceMatcher(None, source.tolist(), target.tolist(), autojunk=False).get_matching_blocks()
    pairs = [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]
    if not pairs:
        raise ModelError(
            "the two models were given no token in common for a text", "choose a target with the same tokenizer"
        )
    first, second = zip(*pairs, strict=True)
    return torch.tensor(first), torch.tensor(second)


def _positions(mask: Tensor) -> Tensor:
    """Return the positions that are marked, in the flattened batch."""
    return mask.cpu().flatten().nonzero().squeeze(1)


def pair_rows(
    source: Tensor, target: Tensor, source_tokens: Tokens | None, target_tokens: Tokens | None
) -> tuple[Tensor, Tensor]:
    """Return corresponding rows of both models, flattened to (rows, width).

    Pooled activations (samples, width) pair by sample. Token activations (samples, tokens, width) pair by token:
    patches are resized bilinearly from the source's grid to the target's; prefix tokens are not resized, and where
    their counts differ only the first (CLS) pairs. Without a known token layout, all rows pair one by one.
    """
    if source_tokens is None or target_tokens is None:
        if source.shape[:-1] != target.shape[:-1]:
            raise ModelError(
                f"the source shows activations of {tuple(source.shape)} and the target of {tuple(target.shape)}, "
                "whose rows do not pair one by one",
                "give both models inputs of one size, and choose a target that cuts them into as many tokens",
            )
        return source.flatten(0, -2), target.flatten(0, -2)
    if source.ndim == 2:
        return source, target
    prefix = min(source_tokens.prefix, target_tokens.prefix)
    if source_tokens.prefix != target_tokens.prefix:
        prefix = min(prefix, 1)
    if source_tokens.grid != target_tokens.grid:
        source = _resizing_matrix(source_tokens, prefix, target_tokens.grid, source.device) @ source.double()
    else:
        source = _with_prefix(source, source_tokens, prefix)
    return source.flatten(0, 1), _with_prefix(target, target_tokens, prefix).flatten(0, 1)


def _with_prefix(rows: Tensor, tokens: Tokens, prefix: int) -> Tensor:
    """Keep only the first `prefix` of the prefix tokens of (samples, tokens, width)."""
    return rows if tokens.prefix == prefix else torch.cat([rows[:, :prefix], rows[:, tokens.prefix :]], dim=1)


@lru_cache(maxsize=8)
def _resizing_matrix(tokens: Tokens, prefix: int, grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return the matrix from a sample's tokens to `prefix` prefix tokens and patches on another grid."""
    each = torch.eye(tokens.count, dtype=torch.float64, device=device)
    image = each[None, tokens.prefix :].transpose(1, 2).unflatten(2, tokens.grid)
    resized = functional.interpolate(image, size=grid, mode="bilinear", align_corners=False, antialias=False)
    return torch.cat([each[:prefix], resized.flatten(2).transpose(1, 2)[0]])


@dataclass(frozen=True)
class Side:
    """One of the two models in a calibration pass."""

    model: Observable
    tokens: Tokens | None
    checkpointing: bool = False
    """Whether blocks use activation checkpointing."""
    lean: bool = False
    """Whether only their MLPs do."""
    stays: bool = True
    """Whether its weights stay on the device between batches."""


def collect(
    pairs: Sequence[SitePair],
    source: Side,
    target: Side,
    batches: Iterable[tuple[Pass, Pass]],
    kinds: Collection[Kind],
    device: torch.device | None = None,
    at_once: bool = False,
    compared: Collection[str] = (),
) -> Statistics:
    """Run every batch through both models, or only the target if that is enough, and sum the requested statistics.

    At the `compared` sites of the target, the rows are also summed mispaired, each with one of another sample of its
    batch, as far as a batch has enough of them.
    The sums are kept on `device`, by default the CPU. With `at_once` the target's forward pass runs before the source's
    backward pass: both graphs are in memory, but the source's inputs are dropped before its gradients are kept.
    """
    statistics = Statistics.zeros(pairs, kinds, device or torch.device("cpu"), compared)

    def add(kind: Kind, pair: SitePair, source_rows: Tensor, target_rows: Tensor) -> None:
        statistics.of(kind, pair).add(source_rows, target_rows)

    pass_rows(pairs, source, target, batches, kinds, add, at_once, statistics)
    return statistics


RowConsumer = Callable[[Kind, SitePair, Tensor, Tensor], None]
"""Takes the paired rows of one kind and pair of sites for one batch: the source's, and the target's."""


def pass_rows(
    pairs: Sequence[SitePair],
    source: Side,
    target: Side,
    batches: Iterable[tuple[Pass, Pass]],
    kinds: Collection[Kind],
    consume: RowConsumer,
    at_once: bool = False,
    statistics: Statistics | None = None,
) -> None:
    """Run every batch through both models, and pass their paired rows to `consume`.

    Inputs that several pairs share are passed once, with one of these pairs. Gradients of the target's parameters are
    added to `statistics`, which is needed if they are requested.
    """
    statistics = statistics or Statistics()
    runner = _Runner(pairs, source, target, frozenset(kinds), at_once)
    with exact_float32(), runner.hooked():
        for source_pass, target_pass in batches:
            runner.run(_Batch(runner, consume, statistics), source_pass, target_pass)


class _Runner:
    """Runs batches through the hooked models, forward and backward as the requested kinds need it."""

    def __init__(
        self, pairs: Sequence[SitePair], source: Side, target: Side, kinds: frozenset[Kind], at_once: bool
    ) -> None:
        self.sides, self.kinds = (source, target), kinds
        self.streams = Stream(), Stream()
        self.sites = list({pair.source.name: pair.source for pair in pairs}.values()), [pair.target for pair in pairs]
        self.pair_of = {pair.target.name: pair for pair in pairs}
        by_input = {key_of(Kind.INPUTS, pair): pair for pair in reversed(pairs)}
        self.readers: dict[str, list[SitePair]] = {}
        """For each input of the target, one pair for each input of the source that it pairs with."""
        for pair in by_input.values():
            self.readers.setdefault(pair.target.input, []).append(pair)
        self.input_uses = Counter(pair.source.input for pair in by_input.values())
        self.site_uses = Counter(pair.source.name for pair in pairs)
        self.target_input_uses = Counter(pair.target.input for pair in pairs)
        self.of_task, self.of_expected = bool(OF_TASK_LOSS & kinds), bool(OF_EXPECTED_LOSSES & kinds)
        self.graph = self.of_task or self.of_expected
        self.at_once = at_once or self.of_expected
        self.weights = {
            pair.target.name: (source.model.weight(pair.source.name), target.model.weight(pair.target.name))
            for pair in (pairs if Kind.INPUT_GRADIENTS in kinds else ())
        }
        """Of both sites of each pair, for the gradients at their inputs."""

    def run(self, batch: _Batch, source_pass: Pass, target_pass: Pass) -> None:
        """Run both models over one batch."""
        if self.kinds <= OF_TARGET:
            with self._forward_target(batch, target_pass) as target:
                self._backward_target(batch, target)
        elif self.at_once:
            with self._forward_source(batch, source_pass) as source, self._forward_target(batch, target_pass) as target:
                self._backward_source(batch, source)
                self._backward_target(batch, target)
                self._backward_labels(batch, source, target)
        else:
            with self._forward_source(batch, source_pass) as source:
                self._backward_source(batch, source)
            with self._forward_target(batch, target_pass) as target:
                self._backward_target(batch, target)

    @contextmanager
    def _forward_source(self, batch: _Batch, run: Pass) -> Iterator[Losses]:
        reads = {Kind.INPUTS, Kind.WEIGHTED_INPUTS} & self.kinds
        writes = batch.source_writes if Kind.OUTPUTS in self.kinds else None
        self.streams[0].listen(batch.source_reads if reads else None, writes)
        with self._forward(0, run) as losses:
            batch.source_text = losses.text
            yield losses

    @contextmanager
    def _forward_target(self, batch: _Batch, run: Pass) -> Iterator[Losses]:
        self.streams[1].listen(batch.target_reads, batch.target_writes if Kind.OUTPUTS in self.kinds else None)
        with self._forward(1, run) as losses:
            batch.end_forward(losses.text)
            yield losses

    def _backward_source(self, batch: _Batch, losses: Losses) -> None:
        if {Kind.GRADIENTS, Kind.INPUT_GRADIENTS} & self.kinds:
            self.streams[0].differentiate(losses.task, batch.source_gradient, keep=self.of_expected)

    def _backward_target(self, batch: _Batch, losses: Losses) -> None:
        if self.of_task:
            self.streams[1].differentiate(losses.task, batch.target_gradient, keep=self.of_expected)

    def _backward_labels(self, batch: _Batch, source: Losses, target: Losses) -> None:
        """Differentiate both models' losses with each label, one after the other."""
        if not self.of_expected:
            return
        for source_loss, target_loss in zip(source.expected, target.expected, strict=True):
            batch.gradients.clear()
            self.streams[0].differentiate(source_loss, batch.source_gradient, keep=True)
            self.streams[1].differentiate(target_loss, batch.target_expected, keep=True)
        batch.weigh_inputs()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook the models that stay on the device, over all batches."""
        with ExitStack() as stack:
            for stream in self.streams:
                stack.callback(stream.listen)  # drops its references to the last batch and the sums
            for number, side in enumerate(self.sides):
                if side.stays and (number or not self.kinds <= OF_TARGET):
                    stack.enter_context(self._hooked(number))
            yield

    @contextmanager
    def _hooked(self, number: int) -> Iterator[None]:
        side, stream = self.sides[number], self.streams[number]
        with ExitStack() as stack:
            stack.enter_context(side.model.observed(self.sites[number], stream))
            if self.graph and (side.checkpointing or side.lean):
                stack.enter_context(side.model.checkpointed(stream, side.checkpointing))
            yield

    @contextmanager
    def _forward(self, number: int, run: Pass) -> Iterator[Losses]:
        hooks = nullcontext() if self.sides[number].stays else self._hooked(number)
        with hooks, torch.set_grad_enabled(self.graph):
            losses = run()
            self.streams[number].require(self.sites[number])
            yield losses


class _Batch:
    """One batch: keeps the source's rows until they are paired with the target's."""

    source_text: TextRows | None = None
    _most_rows = 1
    """Rows of the sample that has most of those that were paired last."""

    def __init__(self, runner: _Runner, consume: RowConsumer, statistics: Statistics) -> None:
        self.runner, self._consume, self._statistics = runner, consume, statistics
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._uses: Counter[tuple[str, str]] = Counter()
        self._target_inputs: dict[str, Tensor] = {}
        self._target_text: TextRows | None = None
        self._forward_ended = False
        self._deferred: list[tuple[SiteCallback, Site, Tensor]] = []
        self._energies: dict[str, tuple[Tensor, Tensor]] = {}
        self._token_pairs: TokenPairs | None = None
        self._positions_on: dict[tuple[int, torch.device], Tensor] = {}
        """Copies of the token positions, by their identity and device."""

    # rows of the source are kept

    def source_reads(self, site: Site, x: Tensor) -> None:
        self._inputs[site.input] = x

    def source_writes(self, site: Site, y: Tensor) -> None:
        self._outputs[site.name] = y

    def source_gradient(self, site: Site, gradient: Tensor) -> None:
        self.gradients[site.name] = gradient

    # rows of the target are paired and added

    def target_reads(self, site: Site, x: Tensor) -> None:
        kinds = self.runner.kinds
        if {Kind.TARGET_GRADIENTS, Kind.WEIGHTED_INPUTS} & kinds:
            self._target_inputs[site.input] = x
        if Kind.INPUTS not in kinds or self._defer(self.target_reads, site, x):
            return
        for pair in self.runner.readers[site.input]:
            self._add(Kind.INPUTS, pair, *self._rows(pair, self._inputs[pair.source.input], x))
            last = self._is_last_use(Kind.INPUTS, pair.source.input, self.runner.input_uses)
            if last and Kind.WEIGHTED_INPUTS not in kinds:
                del self._inputs[pair.source.input]

    def target_writes(self, site: Site, y: Tensor) -> None:
        if self._defer(self.target_writes, site, y):
            return
        pair = self.runner.pair_of[site.name]
        self._add(Kind.OUTPUTS, pair, *self._rows(pair, self._outputs[pair.source.name], y))
        if self._is_last_use(Kind.OUTPUTS, pair.source.name, self.runner.site_uses):
            del self._outputs[pair.source.name]

    def target_gradient(self, site: Site, gradient: Tensor) -> None:
        pair, kinds = self.runner.pair_of[site.name], self.runner.kinds
        if Kind.TARGET_GRADIENTS in kinds:
            self._add_target(site, gradient)
        if pair.source.name not in self.gradients:
            return
        rows = self._rows(pair, self.gradients[pair.source.name], gradient, gradients=True)
        if self._is_last_use(Kind.GRADIENTS, pair.source.name, self.runner.site_uses):
            del self.gradients[pair.source.name]
        if Kind.GRADIENTS in kinds:
            self._add(Kind.GRADIENTS, pair, *rows)
        if Kind.INPUT_GRADIENTS in kinds:  # G W, the part that passes through this site
            weights = self.runner.weights[site.name]
            first, second = (one.double() @ two.to(one.device).double() for one, two in zip(rows, weights, strict=True))
            self._add(Kind.INPUT_GRADIENTS, pair, first, second)

    def target_expected(self, site: Site, gradient: Tensor) -> None:
        """Add gradients of the loss with one label; their summed energies weigh the inputs later."""
        pair = self.runner.pair_of[site.name]
        if pair.source.name not in self.gradients:
            return
        rows = self._rows(pair, self.gradients[pair.source.name], gradient, gradients=True)
        if Kind.EXPECTED_GRADIENTS in self.runner.kinds:
            self._add(Kind.EXPECTED_GRADIENTS, pair, *rows)
        before: Sequence[Tensor | float] = self._energies.get(site.name, (0.0, 0.0))
        first, second = (sums + one.double().square().sum(-1) for sums, one in zip(before, rows, strict=True))
        self._energies[site.name] = first, second

    def weigh_inputs(self) -> None:
        """Add the inputs, each row weighted by the norm of its gradients over all labels."""
        if Kind.WEIGHTED_INPUTS not in self.runner.kinds:
            return
        for name, energies in self._energies.items():
            pair = self.runner.pair_of[name]
            inputs = self._inputs[pair.source.input], self._target_inputs[pair.target.input]
            rows = self._rows(pair, *inputs, gradients=True)
            first, second = (one.double() * two.sqrt().unsqueeze(-1) for one, two in zip(rows, energies, strict=True))
            self._add(Kind.WEIGHTED_INPUTS, pair, first, second)

    def end_forward(self, text: TextRows | None) -> None:
        """Add the rows that waited for the target's tokens, which say which of them are real."""
        self._target_text, self._forward_ended = text, True
        if self.source_text is not None and text is not None:
            self._token_pairs = pair_tokens(self.source_text, text)
        deferred, self._deferred = self._deferred, []
        for take, site, rows in deferred:
            take(site, rows)

    def _defer(self, take: SiteCallback, site: Site, rows: Tensor) -> bool:
        """Defer rows of texts to the end of the forward pass; return whether they were deferred."""
        early = site.text and not self._forward_ended
        if early:
            self._deferred.append((take, site, rows))
        return early

    def _is_last_use(self, kind: Kind, name: str, uses: Counter[str]) -> bool:
        """Count a use of the source's rows, and return whether they can be dropped."""
        self._uses[kind, name] += 1
        return self._uses[kind, name] == uses[name] and not self.runner.of_expected

    def _add(self, kind: Kind, pair: SitePair, source: Tensor, target: Tensor) -> None:
        """Pass paired rows on; where that is asked for, sum them with rows of other samples of the batch too."""
        self._consume(kind, pair, source, target)
        mispaired = self._statistics.mispaired(kind, pair)
        distance = _far(len(target), self._most_rows, even=not pair.source.text)
        if mispaired is not None and distance:
            mispaired.add(source, target.roll(distance, 0))

    def _add_target(self, site: Site, gradients: Tensor) -> None:
        inputs, text = self._target_inputs[site.input], self._target_text
        if site.text and text is not None:
            inputs, gradients = (_by_text(rows, text) for rows in (inputs, gradients))
            if gradients.ndim == 3:
                gradients = gradients * to_device(text.mask, gradients.device, gradients.dtype).unsqueeze(-1)
        self._statistics.target_gradients[site.name].add(inputs, gradients)
        if self._is_last_use(Kind.TARGET_GRADIENTS, site.input, self.runner.target_input_uses):
            del self._target_inputs[site.input]

    def _rows(self, pair: SitePair, source: Tensor, target: Tensor, gradients: bool = False) -> tuple[Tensor, Tensor]:
        """Pair the rows of both models, flattened to (rows, width); of texts, the tokens that both have."""
        if not pair.source.text:
            rows = pair_rows(source, target, *(side.tokens for side in self.runner.sides))
            self._most_rows = len(rows[1]) // len(target)
            return rows
        source, target = _by_text(source, self.source_text), _by_text(target, self._target_text)
        if source.ndim == 2:
            self._most_rows = 1
            return source, target
        if self._token_pairs is None:
            raise ObjectiveError(f"the objective does not say which tokens '{pair.source.name}' reads", "tell them")
        first, second = self._token_pairs.gradients if gradients else self._token_pairs.inputs
        self._most_rows = _most_of_a_text(second, target.shape[1])
        return self._select(first, source.flatten(0, 1)), self._select(second, target.flatten(0, 1))

    def _select(self, positions: Tensor, rows: Tensor) -> Tensor:
        if len(positions) == len(rows):
            return rows
        key = id(positions), rows.device
        if key not in self._positions_on:
            self._positions_on[key] = to_device(positions, rows.device)
        return rows[self._positions_on[key]]


def _far(rows: int, most: int, even: bool) -> int:
    """Return how far to roll a batch's rows so that each meets one of another sample; 0 if one has too many of them.

    Of images, all of which have as many rows, each meets the row of the same place in another.

    >>> _far(8, most=2, even=True), _far(9, most=3, even=True), _far(3, most=3, even=True)
    (4, 3, 0)
    >>> _far(9, most=4, even=False), _far(9, most=5, even=False)
    (4, 0)
    """
    distance = rows // most // 2 * most if even else rows // 2
    return distance if most <= distance else 0


@lru_cache(maxsize=4)
def _most_of_a_text(positions: Tensor, length: int) -> int:
    """Return how many of these positions are in the text that has most of them."""
    return int((positions // length).bincount().max()) if len(positions) else 1


def _by_text(rows: Tensor, text: TextRows | None) -> Tensor:
    """Reshape rows of all texts' tokens to (samples, tokens, width); return pooled rows as they are.

    Where every text is one token, the two are the same.
    """
    if text is None or rows.ndim != 2 or len(rows) != text.ids.numel():
        return rows
    return rows.reshape(*text.ids.shape, -1)
