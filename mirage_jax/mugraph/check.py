"""Well-formedness of muGraphs and of schedules: what the constructors cannot see. Raises `GraphError`.

Run at each border of a package: after the frontend, after the search, after reading a cache entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.dtypes import numpy_dtype
from mirage_jax.mugraph.evaluate import part_length
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    Kernel,
    KernelGraph,
    Op,
    Schedule,
    Store,
    Tensor,
    carried,
    is_part,
    origin,
    split_axis,
)
from mirage_jax.mugraph.operators import ACCUMULATORS, operator


def check_graph(graph: KernelGraph) -> None:
    """Names are defined before use, axes are as inferred, stores cover their tensors, accumulators end loops."""
    unique((a for a, _ in graph.extents), "axis in extents")
    for axis, n in graph.extents:
        _require(
            not is_part(axis) and "'" not in axis, f"extents name axis {axis}; copies and parts have none of their own"
        )
        _require(n >= 1, f"axis {axis} has extent {n}")
    known: dict[str, Tensor] = {}
    for t in graph.inputs:
        _define(graph, known, t)
    for kernel in graph:
        try:
            _check_kernel(graph, known, kernel)
        except GraphError as e:
            raise GraphError(f"kernel {kernel.name}: {e}") from None
        for s in kernel.stores:
            _define(graph, known, s.tensor)
    _require(bool(graph.outputs), "no outputs")
    for name in graph.outputs:
        _require(name in known, f"output {name} is not a tensor of the graph; known: {', '.join(known)}")


def check_schedule(graph: KernelGraph, schedule: Schedule) -> None:
    """Every divided axis has a tile of at least 1 and no part of a split axis is empty."""
    _require(
        len(schedule.kernels) == len(graph.kernels),
        f"{len(schedule.kernels)} kernel schedules for {len(graph.kernels)} kernels",
    )
    for axis in graph.split_axes:
        _require(axis in schedule.part_counts, f"no number of parts for split axis {axis}")
        part_length(graph.extent(axis), schedule.part_counts[axis])
    for kernel, sizes in zip(graph, schedule.kernels, strict=True):
        for axis in kernel.divided:
            _require(
                is_part(axis) or sizes.tile(axis) >= 1, f"kernel {kernel.name}: tile of axis {axis} is less than 1"
            )


def unique(names: Iterable[str], what: str) -> None:
    """Raise `GraphError` if a name occurs twice."""
    twice = [n for n, count in Counter(names).items() if count > 1]
    _require(not twice, f"{what} {', '.join(twice)} is defined twice")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise GraphError(message)


def _define(graph: KernelGraph, known: dict[str, Tensor], t: Tensor) -> None:
    _require(t.name not in known, f"tensor {t.name} is defined twice; each tensor has one producer")
    unique(t.axes, f"tensor {t.name}: axis")
    numpy_dtype(t.dtype)
    for a in t.axes:
        _extent(graph, a)
    known[t.name] = t


def _extent(graph: KernelGraph, axis: Axis) -> int | Axis:
    """Extent of an axis; a part axis, which has none of its own, stands for itself."""
    if not is_part(axis):
        return graph.extent(axis)
    graph.extent(split_axis(origin(axis)))
    return origin(axis)


def _check_kernel(graph: KernelGraph, known: Mapping[str, Tensor], kernel: Kernel) -> None:
    unique((v.name for v in (*kernel.loads, *kernel.ops)), "value")
    for axis in kernel.grid:
        _require(not (is_part(axis) and axis.endswith("'")), f"copy {axis} of a part axis cannot be on the grid")
    unique((s.tensor.name for s in kernel.stores), "tensor")
    axes: dict[str, tuple[Axis, ...]] = {}
    for load in kernel.loads:
        _require(load.tensor in known, f"loads tensor {load.tensor}, which is not defined before it")
        unique(load.axes, f"load of {load.tensor}: axis")
        have = [_extent(graph, a) for a in known[load.tensor].axes]
        seen = [_extent(graph, a) for a in load.axes]
        _require(
            have == seen, f"loads {known[load.tensor]} of extents {have} as [{','.join(load.axes)}] of extents {seen}"
        )
        axes[load.name] = load.axes
    for op in kernel.ops:
        _check_op(graph, axes, op)
        axes[op.name] = op.axes
    _require(bool(kernel.stores), "stores nothing")
    for store in kernel.stores:
        _require(store.value in axes, f"stores value {store.value}, which is not defined")
        _check_store(kernel.grid, axes[store.value], store)
    if isinstance(kernel, BlockGraph):
        _check_block(graph, kernel)


def _check_op(graph: KernelGraph, axes: Mapping[str, tuple[Axis, ...]], op: Op) -> None:
    record, attrs = operator(op.op), op.attributes
    for a in op.args:
        _require(a in axes, f"value {op.name} = {op.op} reads {a}, which is not defined before it")
    _require(
        len(op.args) == record.arity, f"value {op.name}: {op.op} takes {record.arity} arguments, got {len(op.args)}"
    )
    for key in record.required:
        _require(key in attrs, f"value {op.name}: {op.op} needs attribute {key}")
    for key in attrs:
        known = {*record.required, *record.defaults}
        _require(
            key in known,
            f"value {op.name}: {op.op} has no attribute {key}; it has {', '.join(sorted(known)) or 'none'}",
        )
    _require(op.attrs == tuple(sorted(op.attrs)), f"value {op.name}: attributes are not sorted")
    mentioned = _mentioned(op)
    for axis in mentioned:
        _extent(graph, axis)
    _require(len(set(mentioned)) == len(mentioned), f"value {op.name}: an axis twice in axes=({','.join(mentioned)})")
    want = record.infer(tuple(axes[a] for a in op.args), attrs)
    _require(len(set(op.axes)) == len(op.axes), f"value {op.name}: an axis twice in [{','.join(op.axes)}]")
    _require(
        set(want) == set(op.axes),
        f"value {op.name} = {op.head()} has axes [{','.join(want)}], declared [{','.join(op.axes)}]",
    )
    if op.op == "dot":
        for axis in attrs["axes"]:  # type: ignore[union-attr]
            _require(
                all(axis in axes[a] for a in op.args), f"value {op.name}: dot over {axis}, which only one side has"
            )


def _mentioned(op: Op) -> tuple[Axis, ...]:
    attrs = op.attributes
    reduced = attrs.get("axes", ())
    index = attrs.get("axis")
    return (*(reduced if isinstance(reduced, tuple) else ()), *((index,) if isinstance(index, str) else ()))


def _check_store(grid: Sequence[Axis], have: tuple[Axis, ...], store: Store) -> None:
    parts = {a for a in grid if is_part(a)}
    want = set(store.tensor.axes)
    _require(want - parts == set(have) - parts, f"stores a value over [{','.join(have)}] as {store.tensor}")
    _require(set(have) & parts <= want, f"stores a value over [{','.join(have)}] as {store.tensor}")
    for axis in grid:
        if axis in parts:
            inside = split_axis(axis)
            covers = (axis in want) != (inside in want)
            _require(
                covers,
                f"{store.tensor} needs axis {axis} (one slice per part) or {inside} (the parts side by side), not both",
            )
        else:
            _require(axis in want, f"{store.tensor} lacks grid axis {axis}: blocks would overwrite each other")


def _check_block(graph: KernelGraph, kernel: BlockGraph) -> None:
    unique(kernel.grid, "grid axis")
    for axis in kernel.divided:
        _extent(graph, axis)
        _require(
            axis not in kernel.grid or not is_part(axis) or split_axis(axis) not in kernel.grid,
            f"both {axis} and its inside on the grid",
        )
    _require(kernel.loop not in kernel.grid, f"axis {kernel.loop} is on the grid and the loop")
    _require(kernel.loop is None or not is_part(kernel.loop), f"loop over part axis {kernel.loop}")
    for op in kernel.ops:
        lost = {a for a in _mentioned(op) if op.op not in ("iota",) and a in kernel.grid}
        _require(
            not lost,
            f"value {op.name} = {op.head()} reduces grid axes {', '.join(sorted(lost))}: a block sees one tile",
        )
        if kernel.loop is None:
            _require(op.op not in ACCUMULATORS, f"value {op.name} = {op.op} accumulates, but the kernel has no loop")
        else:
            _check_loop(kernel, op, kernel.loop)
    if kernel.loop_bounds is not None:
        bounds, around = kernel.loop_bounds, kernel.loop_bounds.axis
        _require(kernel.loop is not None, f"loop bounds {bounds}, but the kernel has no loop")
        _require(
            around in kernel.grid and not is_part(around),
            f"loop bounds {bounds}: {around} is not on the grid",
        )
        stored = next((s for s in kernel.stores if kernel.stages[s.value].body), None)
        _require(stored is None, f"{stored}: steps outside of the loop bounds {bounds} would not store it")
    for s in kernel.stores:
        body = kernel.stages[s.value].body
        in_loop = kernel.loop in kernel.axes_of[s.value]
        _require(
            body == in_loop,
            f"store {s.tensor.name}: value {s.value} of the loop body needs an accumulator (or the loop axis)",
        )


def _check_loop(kernel: BlockGraph, op: Op, loop: Axis) -> None:
    stages = kernel.stages
    if op.op in ACCUMULATORS:
        x = op.args[0]
        _require(stages[x].body, f"value {op.name} = {op.op} accumulates {x}, which is the same in every step")
        _require(
            loop not in op.axes,
            f"value {op.name} = {op.op} still has the loop axis {loop}; reduce it within the tile first",
        )
        if op.op == "accs":
            _require(
                set(kernel.axes_of[op.args[1]]) <= set(kernel.axes_of[x]),
                f"value {op.name}: its shift has more axes than its value",
            )
        return
    for a in op.args:
        source = next((o for o in kernel.ops if o.name == a), None)
        early = source is not None and carried(kernel, source) and stages[op.name].depth > stages[a].depth
        _require(not early, f"value {op.name} uses the running shift {a} in a later loop; use its last value")
