"""Chooses small extents at which a kernel takes all its paths: the same tiles, only fewer.

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
    """Choose small extents for one kernel: the graph with these extents, and the numbers of parts."""
    split = {a for a in parts if part_axis(a) in kernel.grid}
    few = {a: min(n, PARTS) if a in split else max(n - ragged, min(n, PARTS)) for a, n in parts.items()}
    extents = {
        a: _extent_in_parts(a, kernel, sizes, real, (parts[a], few[a]) if a in split else (1, 1), ragged)
        for a, real in graph.extents
    }
    return graph.with_extents(_agreeing(extents, kernel, graph)), few


def _extent_in_parts(
    axis: Axis, kernel: BlockGraph, sizes: KernelSchedule, real: int, parts: tuple[int, int], ragged: bool
) -> int:
    """A small extent for an axis of `real` elements; `parts`: its parts at the real and at the small extent."""
    count, few = parts
    length = ceil_div(real, count)  # of a part
    local = _local(axis, kernel, sizes, length, ragged)
    missing = max(count * length - real, int(ragged)) if few > 1 else 0  # elements by which the last part is shorter
    return few * local - min(missing, local - 1)


def _agreeing(extents: dict[Axis, int], kernel: BlockGraph, graph: KernelGraph) -> dict[Axis, int]:
    """Make axes under which one dimension of a tensor is read equally long: the longest length wins."""
    pairs = [p for x in kernel.loads for p in zip(graph.tensors[x.tensor].axes, x.axes, strict=True)]
    read = [(a, b) for a, b in ((origin(a), origin(b)) for a, b in pairs) if a in extents and b in extents]
    while any(extents[a] != extents[b] for a, b in read):
        for a, b in read:
            extents[a] = extents[b] = max(extents[a], extents[b])
    return extents


def _local(axis: Axis, kernel: BlockGraph, sizes: KernelSchedule, real: int, ragged: bool) -> int:
    """Elements of an axis, or of each of its parts, that stand for `real` elements."""
    tiles = [sizes.tile(a) for a in kernel.divided if origin(a) == axis]
    if not tiles:
        return real - 1 if ragged and real > 2 else real
    tile = min(max(tiles), real)
    is_loop = kernel.loop is not None and origin(kernel.loop) == axis
    more = _more_in_loop(kernel, sizes, tile) if is_loop else 0
    if ragged:
        return max(tile + tile // 3, 2) + more
    return min(2 * tile + real % tile + more, real)


def _more_in_loop(kernel: BlockGraph, sizes: KernelSchedule, tile: int) -> int:
    """Elements of a loop's axis beyond two tiles, so that its window has an inside and each stage is filled again."""
    reach = max(map(abs, kernel.loop_bounds.bounds)) if kernel.loop_bounds else 0
    of_window = reach // tile * tile if reach <= MAX_WINDOW_ELEMENTS else 0
    return of_window + (sizes.num_stages * tile if sizes.specialized else 0)
