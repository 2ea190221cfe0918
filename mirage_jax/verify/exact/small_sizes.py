"""Small extents at which a kernel does all that it does at large ones: the same tiles, only fewer of them.

Input: a kernel of a graph, its sizes and numbers of parts. Output: the graph and the numbers of parts at extents where
every axis that the kernel divides has two tiles, or three, and every axis that it splits two parts. Tile sizes stay,
and so do the lengths of axes that lie whole inside a tile. `ragged`: the last tile is not full wherever it may be so,
else only where it is at the real extents.
"""

from __future__ import annotations

from collections.abc import Mapping

from mirage_jax.lower.tiling import ceil_div
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule, origin, part_axis

PARTS = 2
MAX_WINDOW_ELEMENTS = 512  # windows up to this are reached by more tiles


def small_sizes(
    kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, parts: Mapping[Axis, int], ragged: bool
) -> tuple[KernelGraph, Mapping[Axis, int]]:
    split = {a for a in parts if part_axis(a) in kernel.grid}
    few = {a: min(n, PARTS) if a in split else max(n - ragged, min(n, PARTS)) for a, n in parts.items()}
    extents: dict[Axis, int] = {}
    for a, real in graph.extents:
        count = parts[a] if a in split else 1
        local = _local(a, kernel, sizes, ceil_div(real, count), ragged)
        missing = max(count * ceil_div(real, count) - real, int(ragged)) if a in split and few[a] > 1 else 0
        extents[a] = (few[a] if a in split else 1) * local - min(missing, local - 1)
    return graph.with_extents(_agreeing(extents, kernel, graph)), few


def _agreeing(extents: dict[Axis, int], kernel: BlockGraph, graph: KernelGraph) -> dict[Axis, int]:
    """Axes under which one dimension of a tensor is read are as long as the longest of them."""
    read = [
        (origin(a), origin(b)) for x in kernel.loads for a, b in zip(graph.tensors[x.tensor].axes, x.axes, strict=True)
    ]
    while any(extents[a] != extents[b] for a, b in read if a in extents and b in extents):
        for a, b in read:
            if a in extents and b in extents:
                extents[a] = extents[b] = max(extents[a], extents[b])
    return extents


def _local(axis: Axis, kernel: BlockGraph, sizes: KernelSchedule, real: int, ragged: bool) -> int:
    """Elements of an axis, or of each of its parts, that stand for `real`."""
    tiles = [sizes.tile(a) for a in kernel.divided if origin(a) == axis]
    if not tiles:
        return real - 1 if ragged and real > 2 else real
    tile = min(max(tiles), real)
    far = 0
    if kernel.loop_bounds and kernel.loop and origin(kernel.loop) == axis:
        reach = max(map(abs, kernel.loop_bounds.bounds))
        far = reach // tile * tile if reach <= MAX_WINDOW_ELEMENTS else 0
    if sizes.specialized and kernel.loop and origin(kernel.loop) == axis:
        far += sizes.num_stages * tile  # every place of a ring is filled again
    return max(tile + tile // 3, 2) + far if ragged else min(2 * tile + real % tile + far, real)
