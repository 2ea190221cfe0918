"""Tile sizes, warps and stages of a kernel: all choices priced at once as arrays, the best kept for the tuner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mirage_jax.cost.outline import Outline
from mirage_jax.cost.roofline import STAGES, WARPS, Arrays, Terms, seconds, terms
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.graph import Axis, KernelSchedule, is_part

GRID_TILES = (1, 16, 32, 64, 128, 256)
LOOP_TILES = (16, 32, 64, 128, 256)
MAX_WHOLE_EXTENT = 4096  # of an axis that one tile of the grid may cover
MAX_TILE_ELEMENTS = 32768  # of one value: 128 f32 registers for each of 256 threads
MAX_TILINGS_PER_KERNEL = 64


@dataclass(frozen=True)
class Tiled:
    """A tiling and its estimate in seconds."""

    seconds: float
    schedule: KernelSchedule


type KnownTilings = dict[object, Sequence[Tiled]]  # of kernels, by all that they depend on


def known_tilings(
    o: Outline, extent: Callable[[Axis], int], single: frozenset[Axis], device: DeviceModel, known: KnownTilings
) -> Sequence[Tiled]:
    """Do what `tilings` does, once for all kernels that ask the same of the device."""
    key = o.demand, single, frozenset((a, extent(a)) for a in o.axes)
    if key not in known:
        known[key] = tilings(o, extent, single, device)
    return known[key]


def tilings(o: Outline, extent: Callable[[Axis], int], single: frozenset[Axis], device: DeviceModel) -> list[Tiled]:
    """Tilings of a kernel that fit the device, best estimate first; axes in `single` have tiles of one element."""
    axes = o.divided
    choices = list(product(*(_tile_options(a, o.loop, extent(a), single) for a in axes)))
    table = np.array(choices, dtype=np.int64).reshape(len(choices), len(axes))
    column = {a: table[:, i] for i, a in enumerate(axes)}
    t = terms(o, extent, column.__getitem__)
    launches = np.array(list(product(WARPS, STAGES if o.loop else (1,))), dtype=np.int64)
    launch, cost = _best_launches(t, launches, len(table), device)
    out: list[Tiled] = []
    for i in _ranked(t, cost, device):
        num_warps, num_stages = map(int, launches[launch[i]])
        tiles = tuple(sorted(zip(axes, map(int, table[i]), strict=True)))
        out.append(Tiled(float(cost[i]), KernelSchedule(tiles, num_warps, num_stages)))
    return out


def _tile_options(axis: Axis, loop: Axis | None, extent: int, single: frozenset[Axis]) -> list[int]:
    """Tile sizes to try along one axis."""
    if axis in single or is_part(axis):
        return [1]
    whole = 1 << (extent - 1).bit_length()
    if axis == loop:
        return [t for t in LOOP_TILES if t < extent] or [whole]
    sizes = {t for t in GRID_TILES if t < extent}
    return sorted(sizes | {whole} if extent <= MAX_WHOLE_EXTENT else sizes)


def _best_launches(t: Terms, launches: Any, rows: int, device: DeviceModel) -> tuple[Any, Any]:
    """For each of `rows` tilings: the position of its best launch among (warps, stages), and that one's seconds."""
    warps, stages = launches[:, :1], launches[:, 1:]
    # Each stage of the pipeline has its own buffers, in addition to the values in use.
    fits = (t.shared + stages * t.streamed <= device.shared_bytes) | (stages <= STAGES[0])
    priced = np.where(fits, seconds(t, device, Arrays, warps, stages), np.inf)
    priced = np.broadcast_to(priced, (len(launches), rows))
    best = priced.argmin(0)
    return best, priced[best, np.arange(rows)]


def _ranked(t: Terms, cost: Any, device: DeviceModel) -> list[int]:
    """Positions of the tilings that fit, cheapest first; at a tie the one with less arithmetic, then less traffic."""

    def per_tiling(x: Any, dtype: Any = None) -> Any:
        """Repeat what does not depend on the tiling."""
        return np.broadcast_to(np.asarray(x, dtype), len(cost))

    matrix_flops = t.narrow_flops + t.wide_flops
    work = per_tiling(t.vector_flops / device.vector_flops + matrix_flops / device.matrix_flops, float)
    fetched = per_tiling(t.fetched, float)
    fits = per_tiling((np.asarray(t.shared) * 2 <= device.shared_bytes) & (np.asarray(t.largest) <= MAX_TILE_ELEMENTS))
    return [i for i in np.lexsort((fetched, work, cost)) if fits[i]][:MAX_TILINGS_PER_KERNEL]
