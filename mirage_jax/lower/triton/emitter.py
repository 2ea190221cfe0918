"""Source text of one kernel from one block graph at concrete sizes (Mirage, section 6).

`emit` is pure: the same graph, sizes and options give the same text, and no name of the graph gets into it unsanitized.
A block graph becomes text in this way:

* every value is a tile whose dimensions follow one order of axes (`tiling`), so broadcasting is indexing with None;
* accumulators are carried by loops (`loops`). Everything else is emitted where it is first needed (`context`), by the
  function of its operator (`ops`): loop-invariant loads before the loop, epilogue operands after it;
* a chain of pointwise operators is a chain of lines over registers: the thread graph;
* all arithmetic is f32, except that matrix products may have 16-bit operands (`ops.products`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mirage_jax.lower.backends import backend_for
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.triton.frame import DEFAULT_OPTIONS, EmitOptions
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule

__all__ = ["DEFAULT_OPTIONS", "EmitOptions", "KernelSource", "emit"]


def emit(
    kernel: BlockGraph,
    graph: KernelGraph,
    schedule: KernelSchedule,
    parts: Mapping[Axis, int],
    options: EmitOptions = DEFAULT_OPTIONS,
) -> KernelSource:
    """Write the text of `kernel` inside `graph`, at the graph's extents and the schedule's tiles.

    Raises `UnsupportedError` for structures that the emitter does not write, `LoweringError` for impossible sizes.
    """
    return backend_for(schedule).emit(kernel, graph, schedule, parts, options)
