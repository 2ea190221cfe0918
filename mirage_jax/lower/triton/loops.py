"""Loops of a block graph: what each one carries, what is hoisted out of it, and which accumulators share one.

Accumulators of one depth share a loop if they share operators, or use a load in the same way. Sums that feed an
accumulator are carried unreduced where registers allow; products are accumulated in place.

A loop with a mask made of indices runs in up to three parts: in the steps in the middle all that the mask keeps is
there, and nothing is masked (as in FlashAttention-2, Dao 2023, section 3.1).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.lower.tiling import MAX_RANK, TileAxis
from mirage_jax.lower.triton.context import Context
from mirage_jax.lower.triton.expressions import TileVariable, number, reduced
from mirage_jax.lower.triton.ops.products import (
    elementwise_products,
    matrix_product,
    operand,
    operand_type,
    without_single,
)
from mirage_jax.lower.triton.ops.reductions import (
    DEFERRED_REGISTERS,
    deferred_lanes,
    maximum_or_nan,
    running_dims,
)
from mirage_jax.lower.triton.ops.softmax import correction, decay
from mirage_jax.lower.triton.writer import identifier
from mirage_jax.mugraph.domains.index_facts import Band, FactAt, Truth, band, is_band, known
from mirage_jax.mugraph.graph import Axis, Op, Store
from mirage_jax.mugraph.operators import ACCUMULATORS


@dataclass(frozen=True, slots=True)
class Group:
    """What one loop computes: accumulators, stores in each step, body operators, and how each load is used."""

    accumulators: list[Op]
    stores: list[Store]
    body: set[str]
    uses: set[tuple[str, str]]

    def shares(self, other: Group) -> bool:
        """Do two groups need the same operators, or a load in the same layout?"""
        return bool(self.body & other.body or self.uses & other.uses)

    def joined(self, other: Group) -> Group:
        """Both groups in one loop."""
        return Group(
            self.accumulators + other.accumulators, self.stores + other.stores,
            self.body | other.body, self.uses | other.uses,
        )  # fmt: skip


class Loops(Context):
    """Values with accumulators."""

    def function(self, name: str) -> str:
        """Write the function called `name`."""
        raise NotImplementedError

    def targets(self, live: set[str]) -> list[str]:
        """Body values that leave a loop: arguments of accumulators, and values stored in each step."""
        stages = self.graph.stages
        stored = [s.value for s in self.graph.stores if stages[s.value].body]
        fed = [op.args[0] for op in self.graph.ops if op.name in live and op.op in ACCUMULATORS]
        return [*fed, *stored]

    def loops(self, depth: int, live: set[str]) -> list[Group]:
        """Accumulators and stores of one depth, in the loops that they share."""
        stages, groups = self.graph.stages, []
        for op in self.graph.ops:
            if op.name in live and op.op in ACCUMULATORS and stages[op.name].depth == depth + 1:
                groups.append(self.group([op], [], op.args))
        for store in self.graph.stores:
            if stages[store.value].body and stages[store.value].depth == depth:
                groups.append(self.group([], [store], (store.value,)))
        merged: list[Group] = []
        for group in groups:
            for other in [g for g in merged if not self.splits_loops or g.shares(group)]:
                merged.remove(other)
                group = other.joined(group)
            merged.append(group)
        return merged

    @property
    def splits_loops(self) -> bool:
        """Do accumulators that need one load in two layouts get a loop each? Not where one pass waits for memory
        anyway and has room for a second copy of the few rows.
        """
        return self.options.split_loops and not self.tiling.skinny

    def group(self, accumulators: list[Op], stores: list[Store], roots: Sequence[str]) -> Group:
        """Accumulators and stores with all body operators that they need."""
        body: set[str] = set()
        uses: set[tuple[str, str]] = set()
        todo = [r for r in roots if r in self.ops]
        uses |= {(r, "tile") for r in roots if r in self.loads}
        while todo:
            op = self.ops[todo.pop()]
            if op.name in body or not self.graph.stages[op.name].body:
                continue
            body.add(op.name)
            kind = "dot" if self.tiling.product(op) else "tile"
            uses |= {(a, kind) for a in op.args if a in self.loads and self.graph.stages[a].body}
            todo += [a for a in op.args if a in self.ops]
        return Group(accumulators, stores, body, uses)

    def loop(self, group: Group) -> None:
        """Emit one pass over the loop axis; its accumulators are in scope after it."""
        assert self.graph.loop is not None
        body = [op for op in self.graph.ops if op.name in group.body]
        self.hoist(body, group)
        outer, tiling = self.env, self.tiling
        self.env, self.uses = outer.new_child(), group.uses
        narrowed = self.narrow(body, group)
        running, sums = self.start_carried(body, group)
        axis, before = self.axes[self.graph.loop], self.env
        ends: dict[str, TileVariable] = {}
        for first, end, holding in self.parts(axis, body):
            self.env, self.holding = before.new_child(), holding
            step = self.w.name(identifier(axis.axis) + "_start")
            with self.w.block(f"for {step} in {self.range(axis, body, first, end)}:", step):
                self.index(axis, step)
                self.step_body(body, group, sums, running)
                ends = self.update_running(running)
        self.env, self.holding = before, frozenset()  # no mask of the last step is in scope
        self.end_running(running, ends)
        for op in group.accumulators:
            if op.op == "last":
                last = self.last_maximum(op)
                # With loop bounds, the last part of the loop may have no step.
                outer["value", op.name] = replace(last, settled=last.settled and self.loop_bounds is None)
            else:
                total = self.finished(op, self.absorbs(op), sums[op.name])
                outer["value", op.name] = self.widened(total, narrowed, outer)
        self.env, self.uses, self.tiling = outer, set(), tiling

    def start_carried(self, body: Sequence[Op], group: Group) -> tuple[dict[str, str], dict[str, str]]:
        """Define the variables that the loop carries: running maxima and sums, by operator."""
        maxima = [op for op in body if op.op in ("shift", "max") and self.graph.loop in reduced(op)]
        running = {op.name: self.start(running_dims(self, op), op.op, "-inf") for op in maxima}
        added = [op for op in group.accumulators if op.op != "last"]
        sums = {op.name: self.start(self.carrier(op, self.absorbs(op)), "acc", "0.0") for op in added}
        self.env |= {("carried", n): name for n, name in running.items()}
        return running, sums

    def step_body(self, body: Sequence[Op], group: Group, sums: Mapping[str, str], running: Mapping[str, str]) -> None:
        """Emit one step: values, accumulators, and what is stored in each step."""
        axis, needed = self.graph.loop, self.needed(group)
        needed -= {op.args[0] for op in group.accumulators if self.absorbs(op)}
        for op in body:
            if op.name in needed:
                self.value(op.name)
        for op in group.accumulators:
            if op.op != "last":
                self.accumulate(op, self.absorbs(op), sums[op.name], running)
        for store in group.stores:
            if axis is not None and axis not in store.tensor.axes and self.axes[axis].count > 1:
                raise LoweringError(f"{store}: each step of the loop over {axis} would overwrite it")
            self.store(store)

    def update_running(self, running: Mapping[str, str]) -> dict[str, TileVariable]:
        """Assign the running maxima of this step to the variables that the loop carries."""
        ends = {name: self.env["value", name] for name in running}
        for name, variable in running.items():
            self.w.line(f"{variable} = {ends[name].text}")
        return ends

    def end_running(self, running: Mapping[str, str], ends: Mapping[str, TileVariable]) -> None:
        """Keep the running maxima as they are after the loop."""
        self.env |= {("end", name): replace(ends[name], text=variable) for name, variable in running.items()}

    def last_maximum(self, op: Op) -> TileVariable:
        """A running maximum after the loop. Raises `UnsupportedError` if `op` reads anything else."""
        last: TileVariable | None = self.env.get(("end", op.args[0]))
        if last is None:
            raise UnsupportedError(f"{op}: only a running maximum has a last value")
        gone = [a for a in last.dims if a not in op.axes]
        if not gone:
            return last
        return TileVariable(self.w.let("max", maximum_or_nan(self, last, gone)), self.tiling.dims(op.axes))

    def parts(self, axis: TileAxis, body: Sequence[Op]) -> list[tuple[str, str, frozenset[str]]]:
        """Parts of the loop in order: first element, end, and the predicates that hold in all of its steps."""
        first, end = self.bounds(axis)
        whole = [(first, end, frozenset[str]())]
        bounds = self.loop_bounds
        if bounds is None or axis.count == 1 or self.env["block", bounds.axis] == "0":
            return whole
        holding = {n: band for n in self.predicates(body) if (band := self.band(n, axis.axis, bounds.axis)) is not None}
        if not holding:
            return whole
        lows = [low for low, _ in holding.values() if low is not None]
        highs = [high for _, high in holding.values() if high is not None]
        size, start = axis.size, self.row(axis)
        rows = self.axes[bounds.axis].size
        marks, kept = [first], frozenset(holding)
        if lows:  # from here on every element is far enough for the last row
            text = f"{start}{_offset(rows - 1 + max(lows) + size - 1)}"
            inner = f"tl.maximum({text}, 0) // {size} * {size}"
            marks.append(self.w.let("inner", f"tl.minimum(tl.maximum({inner}, {first}), {end})"))
        if highs:  # up to here every element is near enough for the first row
            inner = f"tl.maximum({start}{_offset(min(highs) + 1)}, 0) // {size} * {size}"
            marks.append(self.w.let("inner", f"tl.minimum(tl.maximum({inner}, {marks[-1]}), {end})"))
        marks.append(end)
        nothing = frozenset[str]()
        return [(a, b, kept if n == bool(lows) else nothing) for n, (a, b) in enumerate(pairwise(marks))]

    def needed(self, group: Group) -> set[str]:
        """What of the body is needed in this part of the loop."""
        found = set[str]()
        todo = [a for op in group.accumulators for a in op.args] + [s.value for s in group.stores]
        while todo:
            name = self.unmasked(todo.pop())
            if name in group.body and name not in found:
                found.add(name)
                todo += self.ops[name].args
        return found

    def predicates(self, body: Sequence[Op]) -> list[str]:
        """What masks values of the loop's body that have all of its axes."""
        return [
            op.args[0]
            for op in body
            if op.op in ("mask", "where") and set(op.axes) <= set(self.graph.axes_of[op.args[1]])
        ]

    def band(self, predicate: str, n: Axis, row: Axis) -> Band | None:
        """low and high if a predicate is just ``low <= n - row <= high``."""
        fact = self.facts[predicate].fact if predicate in self.facts else None
        return band(fact.holds, n, row) if isinstance(fact, Truth) and is_band(fact.holds, n, row) else None

    @cached_property
    def facts(self) -> dict[str, FactAt]:
        """Facts about masks that follow from indices alone."""
        return known(self.graph.ops)

    def range(self, axis: TileAxis, body: Sequence[Op], first: str, end: str) -> str:
        """Triton pipelines the loads of matrix products by itself; others must ask for it."""
        count = f"{first}, {end}, {axis.size}"
        twice = any({(name, "dot"), (name, "tile")} <= self.uses for name in self.loads)
        if axis.count == 1 or (any(self.tiling.product(op) for op in body) and not twice):
            return f"range({count})"
        return f"tl.range({count}, num_stages={self.tiling.schedule.num_stages})"

    def bounds(self, axis: TileAxis) -> tuple[str, str]:
        """First element of the first step that is within the loop's bounds, and what lies beyond the last one."""
        bounds, part = self.loop_bounds, self.env.get(("block", axis.part), "0")
        if bounds is None or axis.count == 1:
            return "0", str(axis.local) + (f" + {self.form.fresh}" if self.form.fresh and axis.count > 1 else "")
        around, block = self.axes[bounds.axis], self.env["block", bounds.axis]
        if block == part == "0":  # one block: known here
            first = max(bounds.low or 0, 0) // axis.size * axis.size
            return str(first), str(axis.local if bounds.high is None else min(around.size + bounds.high, axis.local))
        start = self.row(axis)
        first, end = "0", str(axis.local)
        if bounds.low is not None:
            first = self.w.let("first", f"tl.maximum({start}{_offset(bounds.low)}, 0) // {axis.size} * {axis.size}")
        if bounds.high is not None:
            end = self.w.let("end", f"tl.minimum({start}{_offset(around.size + bounds.high)}, {axis.local})")
        return first, end

    def row(self, axis: TileAxis) -> str:
        """The first row of this block, counted as the elements of the loop's axis are: inside of a part."""
        assert self.loop_bounds is not None
        around, block = self.loop_bounds.axis, self.env["block", self.loop_bounds.axis]
        part = self.env.get(("block", axis.part), "0")
        return f"{block} * {self.axes[around].size}" + ("" if part == "0" else f" - {part} * {axis.local}")

    def narrow(self, body: Sequence[Op], group: Group) -> dict[Axis, str]:
        """Give a loop without matrix products tiles of its own, if another loop has matrix products.

        Returns the indices of the axes whose lanes differ.
        """
        tiling = self.tiling
        if not self.is_narrowable(body, group):
            return {}
        values = {op.name for op in body} | {a for op in body for a in op.args}
        own = tiling.pointwise(values, DEFERRED_REGISTERS * 32 * tiling.schedule.num_warps)
        axes = [a for a in tiling.names if a != tiling.kernel.loop and own.axes[a].block != tiling.axes[a].block]
        if self.is_needed_in_both(set(axes), values, group):
            return {}
        self.tiling = own
        for a in axes:
            self.index(self.axes[a])
        return {a: self.env["index", a] for a in axes}

    def is_needed_in_both(self, axes: set[Axis], values: set[str], group: Group) -> bool:
        """Would lanes of some of `axes` have to change at a value from outside the loop, or in a result's matrix?"""
        outside = {a for v in values if not self.graph.stages[v].body for a in self.graph.axes_of[v]}
        matrices = [dims for op in group.accumulators if len(dims := self.tiling.dims(op.axes)) > 1]
        return bool(axes & outside.union(*matrices))

    def is_narrowable(self, body: Sequence[Op], group: Group) -> bool:
        """Does a loop only add up pointwise work, while another loop of the kernel has matrix products?"""
        products = [op for op in self.graph.ops if self.tiling.product(op)]
        only_adds = not group.stores and all(op.op == "acc" for op in group.accumulators)
        return only_adds and any(self.graph.loop in reduced(op) for op in products) and not set(products) & set(body)

    def widened(self, value: TileVariable, narrowed: Mapping[Axis, str], outer: ChainMap[Any, Any]) -> TileVariable:
        """A vector over fewer lanes, spread over the lanes that the rest of the kernel uses."""
        if not set(value.dims) & set(narrowed):
            return value
        (axis,) = value.dims
        same = f"{outer['index', axis]}[:, None] == {narrowed[axis]}[None, :]"
        text = f"tl.sum(tl.where({same}, {value.text}[None, :], 0.0), axis=1)"
        return TileVariable(self.w.let("wide", text), value.dims)

    def hoist(self, body: Sequence[Op], group: Group) -> None:
        """Emit everything that does not change in the loop before it."""
        stages = self.graph.stages
        for op in (*body, *group.accumulators):
            product = self.tiling.product(op)
            for a in op.args:
                if stages[a].body:
                    continue
                if product:
                    is_vector = len(self.tiling.dims(self.graph.axes_of[a])) == len(product.inner)
                    operand(self, a, operand_type(self, op), is_vector)
                else:
                    self.value(a)

    def absorbs(self, op: Op) -> str:
        """How an accumulator takes its argument: "dot" as a product in place, "tile" as an unreduced tile, or ""."""
        x = self.ops.get(op.args[0])
        if x is None or op.op == "last" or x.op not in ("dot", "sum") or not self.is_read_only_by(x.name, op):
            return ""
        if self.tiling.product(x):
            return "dot"
        union, summed = self.operand_axes(x), set(reduced(x))
        is_small = self.tiling.lanes(union) <= deferred_lanes(self, op)
        sums_loop = self.graph.loop in summed and summed <= set(union)
        fits = op.op == "acc" and is_small and len(self.tiling.dims(union)) <= MAX_RANK
        return "tile" if fits and sums_loop else ""

    def is_read_only_by(self, value: str, op: Op) -> bool:
        """Does nothing else read a value, neither an operator nor a store?"""
        return self.graph.users[value] == (op.name,) and all(s.value != value for s in self.graph.stores)

    def carrier(self, op: Op, how: str) -> tuple[Axis, ...]:
        """Dimensions of the variable that the loop carries for an accumulator."""
        x = self.ops.get(op.args[0])
        if x is None or not how:
            return self.tiling.dims(op.axes)
        product = self.tiling.product(x) if how == "dot" else None
        return product.dims if product else self.tiling.dims(self.operand_axes(x))

    def start(self, dims: tuple[Axis, ...], hint: str, value: str) -> str:
        """Define a variable that a loop carries."""
        return self.w.let(hint, self.full(dims, 'float("-inf")' if value == "-inf" else value))

    def accumulate(self, op: Op, how: str, name: str, running: Mapping[str, str]) -> None:
        """Add the value of this step to an accumulator."""
        x = self.ops.get(op.args[0])
        kept = self.decayed(op, name, self.carrier(op, how), running) if op.op == "accs" else name
        if how == "dot" and x is not None:
            product = self.tiling.product(x)
            assert product is not None
            self.w.line(f"{name} = {matrix_product(self, x, product, kept)}")
            return
        if how == "tile" and x is not None:
            if x.op == "dot":
                value = elementwise_products(self, x)
            else:
                value = self.zeroed(self.natural(x.args[0]), reduced(x))
        else:
            value = self.natural(op.args[0])
            if self.graph.loop in op.axes:
                value = self.zeroed(value, (self.graph.loop,))
        self.w.line(f"{name} = {kept} + {value.text}")

    def decayed(self, op: Op, name: str, dims: tuple[Axis, ...], running: Mapping[str, str]) -> str:
        """The accumulator relative to the shift of this step; the running shift may have moved."""
        shift = op.args[1]
        if shift not in running:
            if self.graph.stages[shift].body:
                raise UnsupportedError(f"{op}: its shift changes in the loop but is no running maximum")
            return name
        degree = number(op, "degree", 1)
        if degree.value <= 0:
            raise UnsupportedError(f"{op}: an accumulator of degree {degree.value} starts at 0 * inf")
        key = ("moved", shift, degree)
        if key not in self.env:
            self.env[key] = decay(self, shift, running[shift], degree)
        return f"{name} * {self.at(self.env[key], dims)}"

    def finished(self, op: Op, how: str, name: str) -> TileVariable:
        """The accumulator after the loop; lanes of the loop axis that it kept are all real: masked ones added 0."""
        dims = self.tiling.dims(op.axes)
        if how == "tile":
            x = self.ops[op.args[0]]
            carrier = TileVariable(name, self.carrier(op, how))
            total = TileVariable(self.w.let("acc", self.reduction("tl.sum", carrier, reduced(x))), dims)
        else:
            pads = {self.graph.loop: 0.0} if self.graph.loop in op.axes else {}
            total = without_single(self, TileVariable(name, self.carrier(op, how), pads))
        return self.corrected(op, total) if op.op == "accs" else total

    def corrected(self, op: Op, total: TileVariable) -> TileVariable:
        """A sum of exponentials relative to a running maximum, as it is stored."""
        factor = correction(self, op.args[1], number(op, "degree", 1))
        if factor is None:
            return total
        return replace(total, text=self.w.let("acc", f"{total.text} * {self.at(factor, total.dims)}"))


def _offset(n: int) -> str:
    return f" - {-n}" if n < 0 else f" + {n}" if n else ""
