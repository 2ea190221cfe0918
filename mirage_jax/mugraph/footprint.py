"""Bytes moved and operations done by a muGraph: the figures of reports, and the terms of the cost of library operators.

Input: a kernel graph and, if axes are split over the grid, the number of parts. Output: a `Footprint`. Every kernel
reads each of its tensors from device memory once and writes its results once; of library operators, pointwise ones
are taken to be fused into their neighbours by XLA, so that only matrix products, reductions and the graph's own
outputs move bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mirage_jax.mugraph.dtypes import BYTES
from mirage_jax.mugraph.graph import Axis, Kernel, KernelGraph, Library, Op, Tensor, is_part, origin, split_axis
from mirage_jax.mugraph.operators import operator


@dataclass(frozen=True, slots=True)
class Footprint:
    """Totals of a muGraph: bytes through device memory, floating-point operations, kernels launched."""

    bytes: int
    flops: float
    kernels: int

    def __str__(self) -> str:
        return f"{_si(self.bytes)}B, {_si(self.flops)}FLOP, {self.kernels} kernel{'s' * (self.kernels != 1)}"


def footprint(graph: KernelGraph, parts: Mapping[Axis, int] | None = None) -> Footprint:
    """Count bytes, operations and launches of `graph` at its extents; `parts` has the number of parts by split axis."""
    return Footprint(*totals(graph, partial(_extent, graph, parts or {})))


def totals(graph: KernelGraph, extent: Callable[[Axis], Any]) -> tuple[Any, Any, int]:
    """Count bytes, operations and launches, where `extent` gives numbers or symbols for the sizes of axes."""
    moved, flops, launches = 0, 0.0, 0
    for k in graph.kernels:
        tensors = _moved(graph, k)
        moved += sum(math.prod(map(extent, t.axes)) * BYTES[t.dtype] for t in tensors)
        launches += bool(tensors)
        flops += flops_of(k, extent)
    return moved, flops, launches


def flops_of(kernel: Kernel, extent: Callable[[Axis], Any]) -> Any:
    """Count the operations of a kernel."""
    return sum(operator(op.op).flops * math.prod(map(extent, space)) for op, space in _iteration_spaces(kernel))


def _extent(graph: KernelGraph, parts: Mapping[Axis, int], axis: Axis) -> int:
    return parts.get(split_axis(origin(axis)), 1) if is_part(axis) else graph.extent(axis)


def _moved(graph: KernelGraph, k: Kernel) -> list[Tensor]:
    """Tensors that a kernel reads or writes; XLA fuses pointwise operators, which move only the graph's outputs."""
    if isinstance(k, Library) and operator(k.op.op).pointwise:
        return [k.result] if k.result.name in graph.outputs else []
    read = [graph.tensors[n] for n in dict.fromkeys(load.tensor for load in k.loads)]
    return read + [s.tensor for s in k.stores]


def _iteration_spaces(kernel: Kernel) -> Iterable[tuple[Op, set[Axis]]]:
    """(operator, axes over which it is evaluated) for every operator of a kernel."""
    axes = {v.name: v.axes for v in (*kernel.loads, *kernel.ops)}
    for op in kernel.ops:
        yield op, {*op.axes, *(a for x in op.args for a in axes[x])}


def _si(x: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if x < 1000:
            return f"{x:.3g} {unit}"
        x /= 1000
    return f"{x:.3g} P"
