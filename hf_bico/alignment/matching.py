"""Match each target block with a source block, by depth or as given, and each target site with a source site.

Works on layouts alone: no weights, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hf_bico.errors import UsageError
from hf_bico.models.layout import TEXT_SIDE, Layout, SitePair


def blocks_by_index(source_blocks: int, target_blocks: int) -> list[int]:
    """Return the source block of each target block: round(j (D_A - 1) / (D_B - 1)), halves rounded up.

    >>> blocks_by_index(2, 4)
    [0, 0, 1, 1]
    >>> blocks_by_index(12, 12) == list(range(12))
    True
    >>> blocks_by_index(12, 1)
    [11]
    """
    if target_blocks == 1:
        return [source_blocks - 1]
    steps = target_blocks - 1
    # floor(x + 1/2) in whole numbers, so that no rounding of floats decides a block
    return [(2 * j * (source_blocks - 1) + steps) // (2 * steps) for j in range(target_blocks)]


def blocks_by_similarity(scores: Sequence[Sequence[float]]) -> list[int]:
    """Return the source block of each target block, never decreasing, with the largest sum of scores.

    scores[i][j] is the similarity of source block i and target block j. Among equal sums, the one that agrees with
    `blocks_by_index` most often is taken, and then the lowest blocks.

    >>> blocks_by_similarity([[0.9, 0.8, 0.1], [0.2, 0.3, 0.9]])
    [0, 0, 1]
    """
    source_blocks, target_blocks = len(scores), len(scores[0])
    by_index = blocks_by_index(source_blocks, target_blocks)
    # best[j][i]: the (sum, agreements) of target blocks j and after, where none takes a source block before i
    nothing = (Fraction(0), 0)
    best = [[nothing] * source_blocks for _ in range(target_blocks + 1)]
    taken = [[0] * source_blocks for _ in range(target_blocks)]
    for j in reversed(range(target_blocks)):
        for i in reversed(range(source_blocks)):
            total, agreements = best[j + 1][i]
            # exact, so that equal sums are equal in whatever order they were added
            value = (total + Fraction(scores[i][j]), agreements + (by_index[j] == i))
            best[j][i], taken[j][i] = value, i
            if i + 1 < source_blocks and best[j][i + 1] > value:
                best[j][i], taken[j][i] = best[j][i + 1], taken[j][i + 1]
    blocks: list[int] = []
    for j in range(target_blocks):
        blocks.append(taken[j][blocks[-1] if blocks else 0])
    return blocks


def require_blocks(blocks: Sequence[int], source_blocks: int, target_blocks: int) -> None:
    """Raise UsageError unless the list names one block of the source for each block of the target."""
    if len(blocks) != target_blocks:
        raise UsageError(
            f"--layers names {len(blocks)} block{'s' if len(blocks) != 1 else ''} and the target has {target_blocks}",
            "name one source block for each target block",
        )
    for block in blocks:
        if not 0 <= block < source_blocks:
            raise UsageError(
                f"--layers names block {block} and the source has {source_blocks}",
                f"name blocks from 0 to {source_blocks - 1}",
            )


def counterpart(role: str, source_gated: bool, target_gated: bool) -> str | None:
    """Return the source's role for a role of the target; layers that feed an activation function pair.

    In a gated MLP that is the gate; its other branch has no counterpart in a plain MLP.

    >>> counterpart("mlp.up", True, False), counterpart("mlp.gate", False, True), counterpart("mlp.up", False, True)
    ('mlp.gate', 'mlp.up', None)
    """
    if source_gated == target_gated or role not in ("mlp.up", "mlp.gate"):
        return role
    if source_gated:
        return "mlp.gate"
    return "mlp.up" if role == "mlp.gate" else None


def pair_sites(source: Layout, target: Layout, blocks: Sequence[int]) -> list[SitePair]:
    """Pair every target site with the source site of the same role in the matched block.

    `blocks` are those of the main tower; blocks of a text tower beside it are matched by index. Target sites whose role
    the source lacks are left out.
    """
    source_sites = {(site.tower, site.block, site.role): site for site in source.sites}
    gated = tuple(any(site.role == "mlp.gate" for site in layout.sites) for layout in (source, target))
    towers = {"": blocks}
    if source.text_blocks and target.text_blocks:
        towers[TEXT_SIDE] = blocks_by_index(source.text_blocks, target.text_blocks)
    pairs = []
    for site in target.sites:
        if site.tower not in towers:
            continue
        block = None if site.block is None else towers[site.tower][site.block]
        role = counterpart(site.role, *gated)
        origin = None if role is None else source_sites.get((site.tower, block, role))
        if origin is not None:
            pairs.append(SitePair(origin, site))
    return pairs
