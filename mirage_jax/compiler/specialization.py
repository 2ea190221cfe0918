"""Sizes at which kernels of a candidate have specialized warps, on devices that have instructions for it.

What can be written so is for the emitter to say (`lower.hopper.kernel`): it is asked with all sizes that are likely,
and the model orders those that it takes. The search knows nothing of it: the same muGraphs get another text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from mirage_jax.cost.roofline import estimate
from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.lower.hopper.warpgroups import WARPGROUP_ROWS, WARPGROUP_WARPS
from mirage_jax.lower.triton.emitter import DEFAULT_OPTIONS, emit
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Schedule, is_part

GROUPS, TILES = (2, 1), (64, 128, 256)
STAGES, DEEPEST = (4, 3, 2), 2  # the deepest pipelines that there is room for: the model does not tell them apart


@functools.lru_cache(256)
def specialized(graph: KernelGraph, schedule: Schedule, device: DeviceModel) -> tuple[Schedule, ...]:
    """The schedule with specialized warps in one of its kernels, and in all where there are several; best first."""
    if not device.wgmma or schedule.joint:
        return ()
    found: dict[int, list[Schedule]] = {}
    for n, (kernel, sizes) in enumerate(zip(graph.kernels, schedule.kernels, strict=True)):
        if isinstance(kernel, BlockGraph) and kernel.loop and any(op.op == "dot" for op in kernel.ops):
            options = [_with(schedule, n, own) for own in _sizes(kernel, graph, sizes, schedule, device)]
            found[n] = sorted(options, key=lambda s: estimate(graph, s, device))
    one = [s for options in found.values() for s in options]
    several = [options[0] for options in found.values() if options]
    if len(several) > 1:
        one.append(replace(schedule, kernels=tuple(_first_changed(ks, schedule, n) for n, ks in _columns(several))))
    return tuple(sorted(one, key=lambda s: estimate(graph, s, device)))


def _columns(schedules: list[Schedule]) -> Iterator[tuple[int, list[KernelSchedule]]]:
    return enumerate(list(ks) for ks in zip(*(s.kernels for s in schedules), strict=True))


def _first_changed(kernels: list[KernelSchedule], schedule: Schedule, n: int) -> KernelSchedule:
    return next((k for k in kernels if k.specialized), schedule.kernels[n])


def _with(schedule: Schedule, n: int, sizes: KernelSchedule) -> Schedule:
    return replace(schedule, kernels=(*schedule.kernels[:n], sizes, *schedule.kernels[n + 1 :]))


def _sizes(
    kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, schedule: Schedule, device: DeviceModel
) -> Iterator[KernelSchedule]:
    """Those that the emitter takes."""
    assert kernel.loop is not None
    tiled = [a for a, _ in sizes.tiles if not is_part(a)]
    for row in (a for a in kernel.grid if a in tiled and graph.extent(a) % WARPGROUP_ROWS == 0):
        choices = [
            [WARPGROUP_ROWS * g for g in GROUPS] if a == row else TILES[:2] if a == kernel.loop else (1, *TILES)
            for a in tiled
        ]
        for tiles in product(*choices):
            own = dict(sizes.tiles) | dict(zip(tiled, tiles, strict=True))
            if any(own[a] > graph.extent(a) for a in tiled):
                continue
            warps = WARPGROUP_WARPS * own[row] // WARPGROUP_ROWS
            programs = (
                device.blocks if own[row] > WARPGROUP_ROWS else 0
            )  # several blocks each: there is room for one at a time
            made = KernelSchedule(tuple(own.items()), warps, specialized=True, programs=programs)
            options = (replace(made, num_stages=s) for s in STAGES)
            yield from islice((x for x in options if is_written(kernel, graph, x, schedule)), DEEPEST)


def is_written(kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, schedule: Schedule) -> bool:
    """Does the emitter write a kernel at such sizes?"""
    try:
        emit(kernel, graph, sizes, schedule.part_counts, DEFAULT_OPTIONS)
    except (LoweringError, UnsupportedError):
        return False
    return True
