"""Outlines of kernels: everything that pricing needs, from a written muGraph or from a DAG that the search considers.

Both describe their loads and operators as `LoadUse` and `OperatorUse`, to which `outlined` applies the same rules.
They name axes as the muGraph does: a loop step is not an axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mirage_jax.mugraph.dtypes import BYTES, SIXTEEN_BIT_FLOATS
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, LoopBounds, Op, is_part
from mirage_jax.mugraph.operators import ACCUMULATORS, operator

# The cost of a product that rounds a computed operand, relative to other products: the float gate may ask for a second.
ROUNDED_PRODUCT_COST = 1.5

# The registers that an operand of a product takes, relative to a result of float32: it has 16 bits.
OPERAND_REGISTERS = 0.5

type Axes = tuple[Axis, ...]
type Live = frozenset[tuple[Axes, float]]  # axes of values in registers, and how many values have these axes


@dataclass(frozen=True)
class Read:
    """One load: the axes under which a tensor is read, bytes per element, the number of loops that read the whole
    tensor, and the axis along which neighbours are adjacent in memory.
    """

    tensor: str
    axes: Axes
    width: int
    passes: int = 1
    last: Axis | None = None


@dataclass(frozen=True)
class Work:
    """One operator: the axes it is evaluated over, FLOPs per point in all loops that repeat it, and whether it is in a
    loop's body. `product`: the axes of rows, of columns and of the depth of a matrix product.
    """

    axes: Axes
    result: Axes
    flops: float
    in_body: bool
    product: tuple[Axes, ...] = ()
    narrow: bool = False  # 16-bit operands
    sums_product: bool = False  # adds matrix products up, which matrix units do on their own
    sums_steps: bool = False  # sums over the loop's axis


@dataclass(frozen=True)
class Outline:
    """The loads, operators and stores of one kernel. `writes`: axes and bytes per element of each store.

    live: values that registers hold while threads do an operator together, such as a product, a sum or a maximum.
    """

    grid: Axes
    loop: Axis | None
    reads: tuple[Read, ...]
    work: tuple[Work, ...]
    writes: tuple[tuple[Axes, int], ...]
    loop_bounds: LoopBounds | None = None
    live: frozenset[Live] = frozenset()

    @property
    def divided(self) -> Axes:
        """Axes that are divided into tiles."""
        return (*self.grid, self.loop) if self.loop else self.grid

    @property
    def axes(self) -> frozenset[Axis]:
        """All axes of the kernel."""
        seen = [r.axes for r in self.reads] + [w.axes for w in self.work] + [axes for axes, _ in self.writes]
        return frozenset(self.divided).union(*seen)

    @property
    def demand(self) -> Hashable:
        """What pricing depends on: neither the names of tensors, nor the order of operators."""
        reads: dict[str, tuple[Hashable, ...]] = {}
        for r in self.reads:
            reads[r.tensor] = (*reads.get(r.tensor, ()), (r.axes, r.width, r.passes, r.last))
        parts = (reads.values(), self.work, self.writes)
        return self.grid, self.loop, self.loop_bounds, self.live, *(frozenset(Counter(part).items()) for part in parts)


# ---------------------------------------------------------------------- from a description of a kernel


@dataclass(frozen=True)
class LoadUse[V: Hashable]:
    """A load, described: `value` is its name among the operators' arguments."""

    value: V
    read: Read  # in one pass
    is_narrow: bool  # matrix units take it as a 16-bit operand
    is_repeated: bool = True  # each loop that needs it loads it again


@dataclass(frozen=True)
class OperatorUse[V: Hashable]:
    """An operator, described: `axes` of its result, `reduced` axes that it removes, FLOPs per point in one loop."""

    value: V
    op: str
    args: tuple[V, ...]
    axes: Axes
    reduced: Axes
    flops: float
    in_body: bool  # its result differs from loop step to loop step
    rounds: bool = False  # as a matrix product, it would round a computed operand

    @property
    def accumulates(self) -> bool:
        """Does it end a loop?"""
        return self.op in ACCUMULATORS


def outlined[V: Hashable](
    grid: Axes,
    loop: Axis | None,
    loads: Sequence[LoadUse[V]],
    ops: Sequence[OperatorUse[V]],
    stored: Sequence[V],
    writes: tuple[tuple[Axes, int], ...],
    loop_bounds: LoopBounds | None,
) -> Outline:
    """Outline a kernel from descriptions of its loads and of its operators, operands first; it stores `stored`."""
    passes = _passes(ops, stored)
    reads = tuple(
        replace(x.read, passes=max(1, passes[x.value])) if x.is_repeated and passes[x.value] > 1 else x.read
        for x in loads
    )
    accumulated = {op.args[0] for op in ops if op.op == "acc"}
    sums = (op.value in accumulated and loop in op.reduced for op in ops)
    work = (replace(w, sums_steps=own) for w, own in zip(_work(loads, ops, passes), sums, strict=True))
    return Outline(grid, loop, reads, tuple(work), writes, loop_bounds, frozenset(_Registers(ops, stored).run()))


def _work[V: Hashable](
    loads: Sequence[LoadUse[V]], ops: Sequence[OperatorUse[V]], passes: Counter[V]
) -> Iterator[Work]:
    widths = {x.value: x.read.width for x in loads}
    narrow_loads = {x.value for x in loads if x.is_narrow}
    axes = {x.value: x.read.axes for x in loads} | {op.value: op.axes for op in ops}
    changing = {op.value for op in ops if op.in_body}
    products = set[V]()
    for op in ops:
        is_narrow = not narrow_loads.isdisjoint(op.args)
        sides = [set(axes[a]) for a in op.args]
        product = matrix_product(op.op, sides, op.reduced, _halves(op, widths, changing))
        flops = op.flops * max(1, passes[op.value])
        if product:
            products.add(op.value)
            flops *= ROUNDED_PRODUCT_COST if is_narrow and op.rounds else 1
        space = tuple(dict.fromkeys((*op.axes, *op.reduced)))
        sums_product = op.op == "acc" and op.args[0] in products
        yield Work(space, op.axes, flops, op.in_body or op.accumulates, product, is_narrow, sums_product)


class _Registers[V: Hashable]:
    """Find the values that registers hold while threads work together, and at the end, where all results are stored.

    Threads do pointwise operators element by element, so these work as late as they can, and hold no tile that no one
    else reads. Loads stay in shared memory. A loop holds all that it carries, or reads in each step, all the time.
    """

    def __init__(self, ops: Sequence[OperatorUse[V]], stored: Sequence[V]) -> None:
        self.ops, self.stored, self.makers = ops, stored, {op.value: op for op in ops}
        self.uses = Counter(a for op in ops for a in op.args)  # that are still to come
        self.done, self.held = set[V](), set[V]()

    def run(self) -> Iterator[Live]:
        """Have all operators work."""
        in_loop = self._kept_in_loop()
        for op in self.ops:
            if op.accumulates:
                self._work(op.value)
            elif op.reduced and op.value not in self.done:
                yield self._together(op, in_loop if op.in_body else set())
        yield self._live(self._results())

    def _kept_in_loop(self) -> set[V]:
        changing = {a for op in self.ops if op.in_body for a in op.args}
        kept = set[V]()
        for op in self.ops:
            is_read_there = not op.in_body and op.value in changing
            if op.accumulates or is_read_there:
                kept.add(op.value)
        return kept

    def _results(self) -> set[V]:
        """Values that are computed and stored after the loop."""
        made = self.makers.keys() & {*self.stored}
        return {v for v in made if not self.makers[v].in_body}

    def _together(self, op: OperatorUse[V], kept: set[V]) -> Live:
        """Have an operator work that threads do together, where they keep other values, too."""
        for a in op.args:
            self._work(a)
        read = self.held & {*op.args}
        self._end(op)
        whole = self.held | kept
        if op.op != "dot":
            whole |= read
        elif self._is_added_up(op):
            whole -= {op.value}
        return self._live(whole, read - whole)

    def _live(self, whole: Iterable[V], operands: Iterable[V] = ()) -> Live:
        count, halves = (Counter(self.makers[v].axes for v in values) for values in (whole, operands))
        return frozenset((axes, count[axes] + OPERAND_REGISTERS * halves[axes]) for axes in count | halves)

    def _is_added_up(self, op: OperatorUse[V]) -> bool:
        """Does a product only add to a sum that a loop carries? Its result takes no registers then."""
        readers = {other.op for other in self.ops if op.value in other.args}
        return readers <= {"acc", "accs"}

    def _work(self, value: V) -> None:
        """Have a pointwise operator work, after all that it reads."""
        if value in self.makers and value not in self.done:
            op = self.makers[value]
            for a in op.args:
                self._work(a)
            self._end(op)

    def _end(self, op: OperatorUse[V]) -> None:
        """Hold a result, and no longer the values that nobody else reads."""
        self.done.add(op.value)
        self.held.add(op.value)
        for a in op.args:
            self.uses[a] -= 1
            if not self.uses[a]:
                self.held.discard(a)


def _halves[V: Hashable](op: OperatorUse[V], widths: Mapping[V, int], changing: set[V]) -> list[bool]:
    """Which operands are 16-bit tensors whose partner is loaded or known before the loop."""
    ready = [a in widths or a not in changing for a in op.args]
    return [widths.get(a) == 2 and other for a, other in zip(op.args, reversed(ready), strict=True)]


def _passes[V: Hashable](ops: Sequence[OperatorUse[V]], stored: Sequence[V]) -> Counter[V]:
    """In how many of a kernel's loops, which run one after the other, each value is needed."""
    depth: dict[V, int] = {}  # how many loops end before the value is known
    for op in ops:
        depth[op.value] = max((depth.get(a, 0) for a in op.args), default=0) + op.accumulates
    body = {op.value: op.args for op in ops if op.in_body}
    ends = [(depth[op.value] - 1, op.args) for op in ops if op.accumulates]
    ends += [(depth.get(v, 0), (v,)) for v in stored if v in body]
    return loop_passes(ends, lambda v: body.get(v, ()))


def loop_passes[V](ends: Iterable[tuple[int, Iterable[V]]], below: Callable[[V], Iterable[V]]) -> Counter[V]:
    """Count the loops in which each value is needed. `ends`: a loop's number with the values it runs for; `below`: the
    operands of a value that its loop computes.
    """
    loops: dict[int, set[V]] = {}
    for depth, names in ends:
        seen, todo = loops.setdefault(depth, set()), list(names)
        while todo:
            n = todo.pop()
            if n not in seen:
                seen.add(n)
                todo += below(n)
    return Counter(n for seen in loops.values() for n in seen)


def matrix_product(
    op: str, sides: Sequence[set[Axis]], reduced: Axes, half: Sequence[bool] = (False, False)
) -> tuple[Axes, ...]:
    """Axes of rows, of columns and of the depth of a matrix product: free on one side, on the other, and reduced; empty
    for other operators.

    Rows may be of several axes: queries and heads that share keys. `half`: which operands are 16-bit tensors whose
    partner is known before the loop. Such an operand is a matrix even if the other is a vector (`lower.tiling.SINGLE`).
    """
    if op != "dot":
        return ()
    rows, columns = tuple(sorted(sides[0] - sides[1])), tuple(sorted(sides[1] - sides[0]))
    is_product = (rows and (columns or half[0])) or (columns and half[1])
    return (rows, columns, reduced) if is_product else ()


# ---------------------------------------------------------------------- of a muGraph's kernel


def outline(kernel: BlockGraph, graph: KernelGraph) -> Outline:
    """Outline a block graph."""
    widths = {x.name: BYTES[graph.tensors[x.tensor].dtype] for x in kernel.loads}
    inputs = {t.name for t in graph.inputs}
    exact = {x.name for x in kernel.loads if x.tensor in inputs or widths[x.name] <= 2}  # products round no others

    def described(op: Op) -> OperatorUse[str]:
        """Describe an operator."""
        reduced = op.attributes.get("axes", ())
        assert isinstance(reduced, tuple)
        rounds = op.op == "dot" and not exact.issuperset(op.args) and not _forgives(kernel, op.name)
        body = kernel.stages[op.name].body
        return OperatorUse(op.name, op.op, op.args, op.axes, reduced, operator(op.op).flops, body, rounds)

    # The constants were fitted with loop-invariant loads repeated too, although kernels load these once.
    loads = [
        LoadUse(x.name, Read(x.tensor, x.axes, n := widths[x.name], last=x.axes[-1] if x.axes else None), n <= 2)
        for x in kernel.loads
    ]
    writes = tuple((s.tensor.axes, BYTES[s.tensor.dtype]) for s in kernel.stores)
    stored = [s.value for s in kernel.stores]
    return outlined(
        kernel.grid, kernel.loop, loads, list(map(described, kernel.ops)), stored, writes, kernel.loop_bounds
    )


def _forgives(kernel: BlockGraph, name: str) -> bool:
    """Is the result only scaled and stored in 16 bits, or a part of a sum? Then rounding before it does not matter."""
    values = kernel.only_scaled(name)
    stored = [s.tensor for s in kernel.stores if s.value in values]
    return bool(values) and all(t.dtype in SIXTEEN_BIT_FLOATS or any(map(is_part, t.axes)) for t in stored)
