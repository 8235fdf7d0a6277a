"""Which source block for which target block, and which source site for which target site.

Works on layouts alone: no weights, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_bico.sites import Layout, SitePair


def blocks_by_index(source_blocks: int, target_blocks: int) -> list[int]:
    """The source block of each target block: round(j (D_A - 1) / (D_B - 1)), halves rounded up.

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


def pair_sites(source: Layout, target: Layout, blocks: Sequence[int]) -> list[SitePair]:
    """Every target site with the source site of the same role in the matched block.

    Target sites whose role the source lacks are left out: nothing was learnt there.
    """
    by_place = {(site.block, site.role): site for site in source.sites}
    pairs = []
    for site in target.sites:
        block = None if site.block is None else blocks[site.block]
        origin = by_place.get((block, site.role))
        if origin is not None:
            pairs.append(SitePair(origin, site))
    return pairs
