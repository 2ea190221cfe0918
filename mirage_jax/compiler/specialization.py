"""Chooses sizes for kernels with specialized warps, on devices that have instructions for them.

The emitter (`lower.hopper.kernel`) knows which sizes it can write, so this asks it with all likely sizes, and orders by
the cost model those that it takes. The search is not involved: the same muGraphs get another text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, product

from mirage_jax.cost.roofline import PricedKernels, estimate
from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.lower.hopper.warpgroups import WARPGROUP_ROWS, WARPGROUP_WARPS, StructureError
from mirage_jax.lower.triton.emitter import DEFAULT_OPTIONS, emit
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule, Schedule, is_part

ROWS = (2 * WARPGROUP_ROWS, WARPGROUP_ROWS)  # rows of a block
TILES = (64, 128, 256)
STAGES = (4, 3, 2)
DEEPEST = 2  # pipelines tried for each tiling, the deepest that fit: the model does not tell them apart


@functools.lru_cache(256)
def specialized(graph: KernelGraph, schedule: Schedule, device: DeviceModel, most: int) -> tuple[Schedule, ...]:
    """Choose schedules with specialized warps in one of the kernels, and in all if there are several: the `most` best
    by estimate, best first. The emitter is asked no more often than that takes: writing a kernel takes milliseconds.
    """
    if not device.wgmma or schedule.joint:
        return ()
    known = PricedKernels()
    price = lambda s: estimate(graph, s, device, known)  # noqa: E731
    of_each: list[list[Schedule]] = []
    for n, (kernel, sizes) in enumerate(zip(graph.kernels, schedule.kernels, strict=True)):
        if isinstance(kernel, BlockGraph) and _has_product_in_loop(kernel):
            options = {_with(schedule, n, own): own for own in _sizes(kernel, graph, sizes, device)}
            likely = sorted(options, key=price)
            written = _written(kernel, graph, [options[s] for s in likely], schedule)
            of_each.append([_with(schedule, n, sizes) for sizes in islice(written, most)])
    best_of_each = [options[0] for options in of_each if options]
    if len(best_of_each) > 1:
        kernels = tuple(_first_changed(ks, schedule, n) for n, ks in _columns(best_of_each))
        of_each.append([replace(schedule, kernels=kernels)])
    return tuple(sorted((s for options in of_each for s in options), key=price)[:most])


def _has_product_in_loop(kernel: BlockGraph) -> bool:
    return kernel.loop is not None and any(op.op == "dot" for op in kernel.ops)


def _columns(schedules: list[Schedule]) -> Iterator[tuple[int, list[KernelSchedule]]]:
    return enumerate(list(ks) for ks in zip(*(s.kernels for s in schedules), strict=True))


def _first_changed(kernels: list[KernelSchedule], schedule: Schedule, n: int) -> KernelSchedule:
    return next((k for k in kernels if k.specialized), schedule.kernels[n])


def _with(schedule: Schedule, n: int, sizes: KernelSchedule) -> Schedule:
    return replace(schedule, kernels=(*schedule.kernels[:n], sizes, *schedule.kernels[n + 1 :]))


def _sizes(
    kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, device: DeviceModel
) -> Iterator[KernelSchedule]:
    """Sizes that a specialized kernel might have: for each tiling, the deepest pipeline first."""
    for rows, tiles in _tilings(kernel, graph, sizes):
        warps = WARPGROUP_WARPS * rows // WARPGROUP_ROWS
        programs = device.blocks if rows > WARPGROUP_ROWS else 0  # persistent where only one block has room at a time
        made = KernelSchedule(tuple(tiles.items()), warps, specialized=True, programs=programs)
        yield from (replace(made, num_stages=s) for s in STAGES)


def _written(
    kernel: BlockGraph, graph: KernelGraph, likely: Iterable[KernelSchedule], schedule: Schedule
) -> Iterator[KernelSchedule]:
    """Sizes that the emitter can write, and at which it can write fewer than `DEEPEST` with more stages."""
    hopeless = set[frozenset[Axis]]()  # by the axes whose tiles have one element
    for sizes in likely:
        single = frozenset(a for a, tile in sizes.tiles if tile == 1)
        if single in hopeless:
            continue
        match _refusal(kernel, graph, sizes, schedule.parts):
            case None:
                deeper = (replace(sizes, num_stages=s) for s in STAGES if s > sizes.num_stages)
                if sum(is_written(kernel, graph, x, schedule) for x in deeper) < DEEPEST:
                    yield sizes
            case StructureError():
                hopeless.add(single)
            case _:
                pass


def _tilings(kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule) -> Iterator[tuple[int, dict[Axis, int]]]:
    """Tilings whose rows fill one or two warpgroups: the number of rows, and the tile of each axis."""
    extents = {a: graph.extent(a) for a, _ in sizes.tiles if not is_part(a)}
    for row in kernel.grid:
        if row in extents and extents[row] % WARPGROUP_ROWS == 0:
            choices = dict.fromkeys(extents, (1, *TILES)) | {row: ROWS, kernel.loop: TILES[:2]}
            for chosen in product(*(choices[a] for a in extents)):
                tiles = dict(zip(extents, chosen, strict=True))
                if all(tile <= extents[a] for a, tile in tiles.items()):
                    yield tiles[row], dict(sizes.tiles) | tiles


def is_written(kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, schedule: Schedule) -> bool:
    """Whether the emitter can write a kernel at these sizes."""
    return _refusal(kernel, graph, sizes, schedule.parts) is None


@functools.lru_cache(1024)
def _refusal(
    kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, parts: tuple[tuple[Axis, int], ...]
) -> LoweringError | UnsupportedError | None:
    """Why the emitter cannot write a kernel at these sizes."""
    try:
        emit(kernel, graph, sizes, dict(parts), DEFAULT_OPTIONS)
    except (LoweringError, UnsupportedError) as why:
        return why.with_traceback(None)
    return None
