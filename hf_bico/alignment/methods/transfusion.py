"""TransFusion: match the two pretrained models by permutations, and permute the task vector like the source.

A transformer's function does not depend on the order of its heads, of the dimensions inside a head, of MLP neurons and
of the axes of the residual stream. TransFusion searches, without data, the orders in which the source's weights are
most like the target's. Both models must have one architecture. Knows weights and sites; not models or samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bico.alignment.methods.base import Carrier, MethodInputs, Pretrained, SiteDelta, TransportedSite
from hf_bico.errors import NonFiniteWeightsError, UnsuitableMethodError
from hf_bico.models.layout import Layout, Site, SitePair
from hf_bico.models.low_rank import Factors
from hf_bico.settings import Settings

MOST_ROUNDS = 100
"""Never reached in practice: the objective rises in every round but the last, and a handful is enough."""
RESIDUAL = "residual"
"""The permutation group of the residual stream, one for the whole tower."""
_ROUNDING = 1e-12
_REMEDY = "use --method bico, which carries between different models"


class TransFusion(Carrier):
    """After `prepare`, `permutations` holds one permutation per group, and `objectives` the value after each round.

    Index j of the target's group is index permutation[j] of the source's.
    """

    one_tower = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.permutations: dict[str, Tensor] = {}
        self.objectives: list[float] = []

    def require(self, source: Layout, target: Layout, pairs: Sequence[SitePair]) -> None:
        for layout, which in ((source, "source"), (target, "target")):
            if not layout.residual:
                raise _unsuitable(f"the residual stream of the {which}, of the family {layout.family}, is not known")
            if layout.heads is None:
                raise _unsuitable(f"the configuration of the {which} does not say how many attention heads it has")
        for what, ours, theirs in _compared(source, target):
            if ours != theirs:
                raise _unsuitable(f"{what}: {ours} in the source and {theirs} in the target")
        if self.settings.layers == "similarity":
            raise _unsuitable("it pairs blocks of one number, and --layers similarity may pair others")
        for pair in pairs:
            if pair.source.name != pair.target.name and not pair.target.tower:
                raise _unsuitable(f"the target's '{pair.target.name}' is paired with the source's '{pair.source.name}'")

    def prepare(self, pairs: Sequence[SitePair], inputs: MethodInputs) -> None:
        if any(pair.target.tower for pair in pairs):
            raise UnsuitableMethodError(
                "transfusion matches the residual stream of one tower, and a text tower is to be carried too",
                "carry the vision tower alone with --tower vision, or use --method bico",
            )
        matching = Matching(_terms(inputs.source, inputs.target), inputs.target.layout.heads or 1)
        self.objectives = matching.run()
        self.permutations = matching.permutations

    def carry(self, pair: SitePair, delta: SiteDelta) -> TransportedSite:
        rows, columns = (None if group is None else self.permutations[group] for group in _groups(pair.target))
        weight = delta.weight
        if isinstance(weight, Factors):
            weight = Factors(_reordered(weight.left, rows), _reordered(weight.right, columns=columns))
        elif weight is not None:
            weight = _reordered(weight, rows, columns)
        bias = None if delta.bias is None else _reordered(delta.bias, rows)
        return TransportedSite(SiteDelta(weight, bias))


@dataclass(frozen=True)
class Term:
    """A matrix of both models, and the permutation groups of its rows and columns; None where the order is fixed."""

    source: Tensor
    target: Tensor
    rows: str | None
    columns: str | None


class Matching:
    """Maximizes the sum of <permuted source, target> over all terms, by alternating assignment.

    Heads are matched once, by their singular values, which no other permutation changes. The residual stream starts
    from the terms that only it permutes. Then each group in turn gets the best permutation given the others, by the
    Hungarian method.
    """

    def __init__(self, terms: Mapping[str, Term], heads: int) -> None:
        self.terms = terms
        self.heads: dict[str, Tensor] = {}
        """By group, the source's head for each head of the target."""
        self.permutations = {
            group: torch.arange(size)
            for term in terms.values()
            for group, size in zip((term.rows, term.columns), term.target.shape, strict=True)
            if group is not None
        }
        for name, term in terms.items():
            if name.endswith(".attn.q"):
                block = name.removesuffix("q")
                matched = match_heads([terms[block + role] for role in ("q", "k", "v")], terms[f"{block}out"], heads)
                for group in (block + "qk", block + "v"):
                    self.heads[group] = matched
                    inside = torch.arange(term.target.shape[0]).view(heads, -1)
                    self.permutations[group] = inside[matched].flatten()

    def run(self) -> list[float]:
        """Alternate until the residual stream, and so every group, stays the same; return the objective by round."""
        alone = [term for term in self.terms.values() if {term.rows, term.columns} == {RESIDUAL, None}]
        self.improve(RESIDUAL, alone)
        objectives = [self.objective()]
        inner = [group for group in self.permutations if group != RESIDUAL]
        for _ in range(MOST_ROUNDS):
            for group in inner:
                self.improve(group)
            changed = self.improve(RESIDUAL)
            objectives.append(self.objective())
            if not changed:
                break
        return objectives

    def improve(self, group: str, terms: Iterable[Term] | None = None) -> bool:
        """Give a group its best permutation, inside each matched head; return whether it changed."""
        gain = self.gain(group, self.terms.values() if terms is None else terms)
        before = self.permutations[group]
        heads = self.heads.get(group, torch.zeros(1, dtype=torch.long)).tolist()
        size = len(gain) // len(heads)
        parts = []
        for head, matched in enumerate(heads):
            rows, first = slice(head * size, (head + 1) * size), matched * size
            parts.append(first + assign(gain[rows, first : first + size], before[rows] - first))
        self.permutations[group] = torch.cat(parts)
        return not torch.equal(self.permutations[group], before)

    def gain(self, group: str, terms: Iterable[Term]) -> Tensor:
        """Return at [j, i] the gain of the objective by putting the source's index i at the target's index j."""
        size = len(self.permutations[group])
        gain = torch.zeros(size, size, dtype=torch.float64)
        for term in terms:
            if term.rows == group:
                gain += term.target.double() @ _reordered(term.source.double(), columns=self._order(term.columns)).T
            if term.columns == group:
                gain += term.target.double().T @ _reordered(term.source.double(), self._order(term.rows))
        return gain

    def objective(self) -> float:
        return sum(float((self._permuted_source(term) * term.target.double()).sum()) for term in self.terms.values())

    def _permuted_source(self, term: Term) -> Tensor:
        return _reordered(term.source.double(), self._order(term.rows), self._order(term.columns))

    def _order(self, group: str | None) -> Tensor | None:
        return None if group is None else self.permutations[group]


def match_heads(readers: Sequence[Term], writer: Term, heads: int) -> Tensor:
    """Return the source's head for each head of the target, by the Euclidean distances of their singular values.

    `readers` are q, k and v, whose rows belong to heads; `writer` is the output projection, whose columns do.
    """
    cost = torch.zeros(heads, heads, dtype=torch.float64)
    pairs = [(term.target, term.source) for term in readers] + [(writer.target.T, writer.source.T)]
    for target, source in pairs:
        values = [torch.linalg.svdvals(weight.double().unflatten(0, (heads, -1))) for weight in (target, source)]
        cost += (values[0][:, None] - values[1][None]).norm(dim=-1)
    return assign(-cost, torch.arange(heads))


def assign(gain: Tensor, current: Tensor) -> Tensor:
    """Return the permutation p with the largest sum of gain[j, p[j]]; `current` if none is better beyond rounding."""
    from scipy.optimize import linear_sum_assignment

    best = torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])
    rows = torch.arange(len(gain))
    improvement = (gain[rows, best] - gain[rows, current]).sum()
    return best if improvement > _ROUNDING * gain[rows, best].abs().sum() else current


def _compared(source: Layout, target: Layout) -> Iterable[tuple[str, object, object]]:
    """Yield all that must be equal in both models: a description, and its two values."""
    yield "blocks", source.blocks, target.blocks
    yield "attention heads", source.heads, target.heads
    theirs = {site.name: site for site in target.sites}
    for site in source.main_sites:
        if site.name in theirs:
            yield f"the shape of '{site.name}'", site.shape, theirs[site.name].shape
    yield "image size", source.image_size, target.image_size
    yield "tokens", source.tokens, target.tokens
    ours, others = ({axis.name for axis in layout.residual} for layout in (source, target))
    for name in sorted(ours ^ others):
        yield f"'{name}'", *(("there", "missing") if name in ours else ("missing", "there"))


def _unsuitable(cause: str) -> UnsuitableMethodError:
    return UnsuitableMethodError(f"transfusion matches models of one architecture alone; {cause}", _REMEDY)


def _groups(site: Site) -> tuple[str | None, str | None]:
    """Return the groups of a site's rows and columns; q and k share one, as do v and out."""
    block = f"blocks.{site.block}"
    return {
        "attn.q": (f"{block}.attn.qk", RESIDUAL),
        "attn.k": (f"{block}.attn.qk", RESIDUAL),
        "attn.v": (f"{block}.attn.v", RESIDUAL),
        "attn.out": (RESIDUAL, f"{block}.attn.v"),
        "mlp.up": (f"{block}.mlp", RESIDUAL),
        "mlp.down": (RESIDUAL, f"{block}.mlp"),
        "proj": (None, RESIDUAL),
    }[site.role]


def _terms(source: Pretrained, target: Pretrained) -> dict[str, Term]:
    """Return the matrices that both models have, by canonical name."""
    ours, theirs = _matrices(source, "the source"), _matrices(target, "the target")
    groups: dict[str, tuple[str | None, str | None]] = {axis.name: (RESIDUAL, None) for axis in target.layout.residual}
    for site in target.layout.main_sites:
        rows, columns = _groups(site)
        groups |= {site.name: (rows, columns), f"{site.name}.bias": (rows, None)}
    return {
        name: Term(ours[name], theirs[name], *of)
        for name, of in groups.items()
        if name in ours and name in theirs and of != (None, None)
    }


def _matrices(model: Pretrained, whose: str) -> dict[str, Tensor]:
    layout, matrices = model.layout, {}
    sites = layout.main_sites
    names = {slot.tensor for site in sites for slot in site.slots} | {axis.tensor for axis in layout.residual}
    tensors = {name: model.checkpoint.tensor(name).detach().cpu() for name in sorted(names)}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteWeightsError(
                f"'{name}' of {whose} holds NaN or infinite values", "use a checkpoint from before training diverged"
            )
    for site in sites:
        matrices[site.name] = site.weight.view(tensors[site.weight.tensor])
        if site.bias is not None:
            matrices[f"{site.name}.bias"] = site.bias.view(tensors[site.bias.tensor])[:, None]
    for axis in layout.residual:
        stream = tensors[axis.tensor].movedim(axis.axis, 0)
        matrices[axis.name] = stream.reshape(len(stream), -1)
    return matrices


def _reordered(tensor: Tensor, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
    for dim, order in enumerate((rows, columns)):
        if order is not None:
            tensor = tensor.index_select(dim, order.to(tensor.device))
    return tensor
