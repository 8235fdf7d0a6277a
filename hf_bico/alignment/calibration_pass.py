"""Both models over a batch; rows paired and summed.

Rows of two models' activations that belong together. Knows tokens and tensors; not what the rows are for.

Collecting statistics: both models run over the same batches, and what their sites show is paired and added up.

The source runs first, and what its sites show is kept for one batch. The target's rows meet it as soon as they are
known, are added up and are gone: inputs during the forward pass, gradients during the backward pass. Knows sites and
sums; neither the models' libraries nor the task.
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
from hf_bico.models.hooks import Heard, Losses, Observable, Pass, Stream, TextRows
from hf_bico.models.layout import Site, SitePair, Tokens
from hf_bico.runtime.environment import exact_float32, to_device


def pair_tokens(source: TextRows, target: TextRows) -> tuple[Tensor, Tensor]:
    """Where equal tokens of the same texts stand in the two models' batches, as positions in the flattened rows.

    They are in order, and in main memory. Padding pairs with nothing, on whatever side it stands. Where the two models
    were given the same tokens, all of them pair in order; where one has more around a text (another chat template),
    only what both have.
    """
    if len(source.ids) != len(target.ids):
        raise ValueError(f"{len(source.ids)} texts of the source and {len(target.ids)} of the target do not pair")
    masks = [side.mask.cpu() for side in (source, target)]
    ids = [side.ids.cpu() for side in (source, target)]
    if torch.equal(*masks) and torch.equal(ids[0] * masks[0], ids[1] * masks[1]):
        places = masks[0].flatten().nonzero().squeeze(1)
        return places, places
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, both in enumerate(zip(*masks, strict=True)):
        own = [mask.nonzero().squeeze(1) for mask in both]
        tokens = [side[number][place] for side, place in zip(ids, own, strict=True)]
        if not torch.equal(*tokens):
            own = [place[kept] for place, kept in zip(own, _in_both(*tokens), strict=True)]
        for side, place, all_found in zip(ids, own, found, strict=True):
            all_found.append(place + number * side.shape[1])
    return torch.cat(found[0]), torch.cat(found[1])


def _in_both(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    blocks = SequenceMatcher(None, source.tolist(), target.tolist(), autojunk=False).get_matching_blocks()
    pairs = [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]
    if not pairs:
        raise ModelError(
            "the two models were given no token in common for a text", "choose a target with the same tokenizer"
        )
    first, second = zip(*pairs, strict=True)
    return torch.tensor(first), torch.tensor(second)


def pair_rows(
    source: Tensor, target: Tensor, source_tokens: Tokens | None, target_tokens: Tokens | None
) -> tuple[Tensor, Tensor]:
    """Rows of both models that belong together, flattened to (rows, width).

    Pooled activations (samples, width) pair by sample. Token activations (samples, tokens, width) pair by token:
    patches are resized bilinearly from the source's grid to the target's; prefix tokens are kept apart, and
    where their counts differ only the first (CLS) pairs. Without a known layout of tokens, all rows pair one by one.
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
        resizing = _resizing(source_tokens, prefix, target_tokens.grid, source.device)
        source = resizing @ source.double()
    else:
        source = _without_others(source, source_tokens, prefix)
    return source.flatten(0, 1), _without_others(target, target_tokens, prefix).flatten(0, 1)


def _without_others(rows: Tensor, tokens: Tokens, prefix: int) -> Tensor:
    """(samples, tokens, width) with so many of the prefix tokens alone."""
    return rows if tokens.prefix == prefix else torch.cat([rows[:, :prefix], rows[:, tokens.prefix :]], dim=1)


@lru_cache(maxsize=8)
def _resizing(tokens: Tokens, prefix: int, grid: tuple[int, int], device: torch.device) -> Tensor:
    """What turns all tokens of a sample into so many prefix tokens and patches on another grid, as a matrix."""
    count = tokens.prefix + tokens.grid[0] * tokens.grid[1]
    each = torch.eye(count, dtype=torch.float64, device=device)
    patches = resize(each[None, tokens.prefix :], tokens.grid, grid)[0]
    return torch.cat([each[:prefix], patches])


def resize(patches: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """(samples, h w, width) patches on another grid: bilinear in 2-D, align_corners=False, no antialiasing."""
    if grid == new_grid:
        return patches
    image = patches.double().transpose(1, 2).unflatten(2, grid)
    resized = functional.interpolate(image, size=new_grid, mode="bilinear", align_corners=False, antialias=False)
    return resized.flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class Side:
    """One of the two models, as calibration sees it."""

    model: Observable
    tokens: Tokens | None
    checkpointing: bool = False
    """Whether blocks run once more in the backward pass, and keep less for it."""
    lean: bool = False
    """Whether their MLPs do."""
    looked_into: bool = False
    """Whether losses may be of what blocks do not return: the caller's own may be of anything."""
    stays: bool = True
    """Whether its weights stay where it runs, and are not moved there for each batch."""


def collect(
    pairs: Sequence[SitePair],
    source: Side,
    target: Side,
    batches: Iterable[tuple[Pass, Pass]],
    kinds: Collection[Kind],
    device: torch.device | None = None,
    at_once: bool = False,
    descents_of: Collection[str] | None = None,
) -> Statistics:
    """Run every batch through both models once, or the target alone where that is enough, and add up what is asked.

    The sums are kept on `device`: the CPU if nothing is said. Descents are those `descents_of` these target sites,
    or of all. With `at_once` the target's forward pass comes before the
    source's backward pass: the source's inputs have gone when its gradients come, and both graphs are there.
    """
    statistics = Statistics.zeros(pairs, kinds, device or torch.device("cpu"), descents_of)

    def add(kind: Kind, pair: SitePair, source_rows: Tensor, target_rows: Tensor) -> None:
        statistics.of(kind, pair).add(source_rows, target_rows)

    show(pairs, source, target, batches, kinds, add, at_once, statistics)
    return statistics


Shown = Callable[[Kind, SitePair, Tensor, Tensor], None]
"""What takes the rows of a kind that a pair of sites shows for one batch: the source's, and the target's."""


def show(
    pairs: Sequence[SitePair],
    source: Side,
    target: Side,
    batches: Iterable[tuple[Pass, Pass]],
    kinds: Collection[Kind],
    shown: Shown,
    at_once: bool = False,
    own: Statistics | None = None,
) -> None:
    """Run every batch through both models, and hand on the rows that belong together.

    Of inputs that several pairs read, one of these pairs stands for all. What the target shows on its own, where that
    is asked for, is added to `own`.
    """
    own = own or Statistics()
    asked = _Asked(pairs, source, target, frozenset(kinds), at_once, own.own_sites)
    with exact_float32(), asked.watched():
        for source_pass, target_pass in batches:
            asked.add(_Batch(asked, shown, own), source_pass, target_pass)


class _Asked:
    """What is asked of which models."""

    def __init__(
        self,
        pairs: Sequence[SitePair],
        source: Side,
        target: Side,
        kinds: frozenset[Kind],
        at_once: bool,
        own: Collection[str],
    ) -> None:
        self.sides, self.kinds, self.own = (source, target), kinds, own
        self.streams = Stream(), Stream()
        self.sites = list({pair.source.name: pair.source for pair in pairs}.values()), [pair.target for pair in pairs]
        self.pair_of = {pair.target.name: pair for pair in pairs}
        by_input = {key_of(Kind.INPUTS, pair): pair for pair in reversed(pairs)}
        self.readers: dict[str, list[SitePair]] = {}
        """For each input of the target, one pair for each input of the source that it meets."""
        for pair in by_input.values():
            self.readers.setdefault(pair.target.input, []).append(pair)
        self.inputs_met = Counter(pair.source.input for pair in by_input.values())
        self.sites_met = Counter(pair.source.name for pair in pairs)
        self.own_inputs = Counter(pair.target.input for pair in pairs if pair.target.name in own)
        """What those of the target's sites read of which something is added up on their own, and how many of them."""
        self.of_task, self.of_expected = bool(OF_TASK_LOSS & kinds), bool(OF_EXPECTED_LOSSES & kinds)
        self.graph = self.of_task or self.of_expected
        self.at_once = at_once or self.of_expected
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}
        """Of both sites of each pair, where gradients pass through them."""
        if Kind.INPUT_GRADIENTS in kinds:
            for pair in pairs:
                both = source.model.weight(pair.source.name), target.model.weight(pair.target.name)
                self.weights[pair.target.name] = both
        self.pairs_gradients = bool({Kind.GRADIENTS, Kind.INPUT_GRADIENTS} & kinds)

    def add(self, batch: _Batch, source_pass: Pass, target_pass: Pass) -> None:
        """Run both models over one batch."""
        if self.kinds <= OF_TARGET:
            with self._target(batch, target_pass) as theirs:
                self._feel_target(batch, theirs)
        elif self.at_once:
            with self._source(batch, source_pass) as ours, self._target(batch, target_pass) as theirs:
                self._feel_source(batch, ours)
                self._feel_target(batch, theirs)
                self._feel_labels(batch, ours, theirs)
        else:
            with self._source(batch, source_pass) as ours:
                self._feel_source(batch, ours)
            with self._target(batch, target_pass) as theirs:
                self._feel_target(batch, theirs)

    @contextmanager
    def _source(self, batch: _Batch, run: Pass) -> Iterator[Losses]:
        """The source's forward pass."""
        reads = {Kind.INPUTS, Kind.WEIGHTED_INPUTS} & self.kinds
        writes = batch.source_writes if Kind.OUTPUTS in self.kinds else None
        self.streams[0].listen(batch.source_reads if reads else None, writes)
        with self._run(0, run) as losses:
            batch.source_text = losses.text
            yield losses

    @contextmanager
    def _target(self, batch: _Batch, run: Pass) -> Iterator[Losses]:
        """The target's forward pass."""
        self.streams[1].listen(batch.target_reads, batch.target_writes if Kind.OUTPUTS in self.kinds else None)
        with self._run(1, run) as losses:
            batch.heard(losses)
            yield losses

    def _feel_source(self, batch: _Batch, losses: Losses) -> None:
        """The gradients of the source's task loss."""
        if self.pairs_gradients:
            self.streams[0].differentiate(losses.task, batch.source_gradient, keep=self.of_expected)

    def _feel_target(self, batch: _Batch, losses: Losses) -> None:
        """The gradients of the target's task loss."""
        if self.of_task:
            self.streams[1].differentiate(losses.task, batch.target_gradient, keep=self.of_expected)

    def _feel_labels(self, batch: _Batch, ours: Losses, theirs: Losses) -> None:
        """The gradients of both models' losses with each label, one after the other."""
        if not self.of_expected:
            return
        for one, other in zip(ours.expected, theirs.expected, strict=True):
            batch.forget_gradients()
            self.streams[0].differentiate(one, batch.source_gradient, keep=True)
            self.streams[1].differentiate(other, batch.target_expected, keep=True)
        batch.weigh_inputs()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the models that stay where they run, over all batches."""
        with ExitStack() as stack:
            for stream in self.streams:
                stack.callback(stream.listen)  # lets go of the last batch, and of the sums
            for number, side in enumerate(self.sides):
                if side.stays and (number or not self.kinds <= OF_TARGET):
                    stack.enter_context(self._observed(number))
            yield

    @contextmanager
    def _observed(self, number: int) -> Iterator[None]:
        side, stream = self.sides[number], self.streams[number]
        thrifty = self.graph and (side.checkpointing or side.lean)
        with ExitStack() as stack:
            stack.enter_context(side.model.observed(self.sites[number], stream))
            if thrifty:
                stack.enter_context(side.model.checkpointed(stream, side.checkpointing, side.looked_into))
            yield

    @contextmanager
    def _run(self, number: int, run: Pass) -> Iterator[Losses]:
        """One pass of one of the models."""
        there = nullcontext() if self.sides[number].stays else self._observed(number)
        with there, torch.set_grad_enabled(self.graph):
            losses = run()
            self.streams[number].require(self.sites[number])
            yield losses


class _Batch:
    """One batch: what the source's sites showed, until the target's rows have met it."""

    source_text: TextRows | None = None

    def __init__(self, asked: _Asked, shown: Shown, own: Statistics) -> None:
        self.asked, self._add, self._own = asked, shown, own
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._met: Counter[tuple[str, str]] = Counter()
        self._target_inputs: dict[str, Tensor] = {}
        self._target_text: TextRows | None = None
        self._heard = False
        self._waiting: list[tuple[Heard, Site, Tensor]] = []
        self._energies: dict[str, tuple[Tensor, Tensor]] = {}
        self._tokens: tuple[Tensor, Tensor] | None = None
        self._places: dict[tuple[int, torch.device], Tensor] = {}
        """Of those tokens, on the devices where they were looked up."""

    # what the source shows is kept

    def source_reads(self, site: Site, x: Tensor) -> None:
        self._inputs[site.input] = x

    def source_writes(self, site: Site, y: Tensor) -> None:
        self._outputs[site.name] = y

    def source_gradient(self, site: Site, gradient: Tensor) -> None:
        self._gradients[site.name] = gradient

    def forget_gradients(self) -> None:
        """Those of another loss come."""
        self._gradients.clear()

    # what the target shows is added up

    def target_reads(self, site: Site, x: Tensor) -> None:
        kinds = self.asked.kinds
        if Kind.WEIGHTED_INPUTS in kinds or site.input in self.asked.own_inputs:
            self._target_inputs[site.input] = x
        if Kind.INPUTS not in kinds or self._is_early(self.target_reads, site, x):
            return
        for pair in self.asked.readers[site.input]:
            self._add(Kind.INPUTS, pair, *self._rows(pair, self._inputs[pair.source.input], x))
            last = self._is_last(Kind.INPUTS, pair.source.input, self.asked.inputs_met)
            if last and Kind.WEIGHTED_INPUTS not in kinds:
                del self._inputs[pair.source.input]

    def target_writes(self, site: Site, y: Tensor) -> None:
        if self._is_early(self.target_writes, site, y):
            return
        pair = self.asked.pair_of[site.name]
        self._add(Kind.OUTPUTS, pair, *self._rows(pair, self._outputs[pair.source.name], y))
        if self._is_last(Kind.OUTPUTS, pair.source.name, self.asked.sites_met):
            del self._outputs[pair.source.name]

    def target_gradient(self, site: Site, gradient: Tensor) -> None:
        pair, kinds = self.asked.pair_of[site.name], self.asked.kinds
        if site.name in self.asked.own:
            self._add_target(site, gradient)
        if pair.source.name not in self._gradients:
            return
        rows = self._rows(pair, self._gradients[pair.source.name], gradient)
        if self._is_last(Kind.GRADIENTS, pair.source.name, self.asked.sites_met):
            del self._gradients[pair.source.name]
        if Kind.GRADIENTS in kinds:
            self._add(Kind.GRADIENTS, pair, *rows)
        if Kind.INPUT_GRADIENTS in kinds:  # what passes through this site to its input
            weights = self.asked.weights[site.name]
            first, second = (one.double() @ two.to(one.device).double() for one, two in zip(rows, weights, strict=True))
            self._add(Kind.INPUT_GRADIENTS, pair, first, second)

    def target_expected(self, site: Site, gradient: Tensor) -> None:
        """Gradients with one of the labels; their energies weigh the inputs in the end."""
        pair = self.asked.pair_of[site.name]
        if pair.source.name not in self._gradients:
            return
        rows = self._rows(pair, self._gradients[pair.source.name], gradient)
        if Kind.EXPECTED_GRADIENTS in self.asked.kinds:
            self._add(Kind.EXPECTED_GRADIENTS, pair, *rows)
        first, second = (one.double().square().sum(-1) for one in rows)
        if site.name in self._energies:
            before = self._energies[site.name]
            first, second = before[0] + first, before[1] + second
        self._energies[site.name] = first, second

    def weigh_inputs(self) -> None:
        """Inputs, each row weighted by the norm of the gradients there over all labels."""
        if Kind.WEIGHTED_INPUTS not in self.asked.kinds:
            return
        for name, energies in self._energies.items():
            pair = self.asked.pair_of[name]
            rows = self._rows(pair, self._inputs[pair.source.input], self._target_inputs[pair.target.input])
            first, second = (one.double() * two.sqrt().unsqueeze(-1) for one, two in zip(rows, energies, strict=True))
            self._add(Kind.WEIGHTED_INPUTS, pair, first, second)

    def heard(self, losses: Losses) -> None:
        """The target's forward pass is over, and with it is known which rows are real tokens."""
        text = losses.text
        self._target_text, self._heard = text, True
        if self._own.task is not None:
            self._own.task.add(losses)
        if self.source_text is not None and text is not None:
            self._tokens = pair_tokens(self.source_text, text)
        waiting, self._waiting = self._waiting, []
        for take, site, rows in waiting:
            take(site, rows)

    def _is_early(self, take: Heard, site: Site, rows: Tensor) -> bool:
        """Rows of texts wait until it is known which of them are real tokens."""
        early = site.text and not self._heard
        if early:
            self._waiting.append((take, site, rows))
        return early

    def _is_last(self, kind: Kind, name: str, uses: Counter[str]) -> bool:
        """Whether what the source showed here has met all of the target's rows that it belongs with."""
        self._met[kind, name] += 1
        return self._met[kind, name] == uses[name] and not self.asked.of_expected

    def _add_target(self, site: Site, gradients: Tensor) -> None:
        inputs, text = self._target_inputs[site.input], self._target_text
        if site.text and text is not None:
            inputs, gradients = (_by_text(rows, text) for rows in (inputs, gradients))
            if gradients.ndim == 3:
                gradients = gradients * to_device(text.mask, gradients.device, gradients.dtype).unsqueeze(-1)
        self._own.add_own(site.name, inputs, gradients)
        if self._is_last(Kind.DESCENT, site.input, self.asked.own_inputs):
            del self._target_inputs[site.input]

    def _rows(self, pair: SitePair, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Both flattened to (rows, width); of text sites real tokens alone, and pooled rows by sample."""
        if not pair.source.text:
            return pair_rows(source, target, *(side.tokens for side in self.asked.sides))
        source, target = _by_text(source, self.source_text), _by_text(target, self._target_text)
        if source.ndim == 2:
            return source, target
        if self._tokens is None:
            raise ObjectiveError(f"the objective does not say which tokens '{pair.source.name}' reads", "tell them")
        return self._real(0, source.flatten(0, 1)), self._real(1, target.flatten(0, 1))

    def _real(self, side: int, rows: Tensor) -> Tensor:
        """Of a side's rows, those of its tokens that pair."""
        assert self._tokens is not None
        places = self._tokens[side]
        if len(places) == len(rows):
            return rows
        if (side, rows.device) not in self._places:
            self._places[side, rows.device] = to_device(places, rows.device)
        return rows[self._places[side, rows.device]]


def _by_text(rows: Tensor, text: TextRows | None) -> Tensor:
    """(samples, tokens, width), also where a module takes the tokens of all texts as one list; pooled rows as they are.

    Where every text is one token, the two are the same.
    """
    if text is None or rows.ndim != 2 or len(rows) != text.ids.numel():
        return rows
    return rows.reshape(*text.ids.shape, -1)
