"""Source text of one Triton kernel from one block graph at concrete sizes (Mirage section 6, with one kernel per graph).

`emit` is pure: the same graph, sizes and options give the same text, and no name of the graph gets into it unsanitized.
How a block graph becomes text:

* every value is a tile whose dimensions follow one order of axes (`tiling`), so broadcasting is indexing with None;
* accumulators are carried by loops, everything else is emitted where it is first needed: loop-invariant loads before the
  loop, epilogue operands after it. Chains of pointwise operators are lines over registers: the thread graph;
* all arithmetic is f32; operands of a matrix product are 16-bit if one of them comes from a 16-bit tensor;
* for every padded axis of a value we track what its padded lanes hold, by evaluating the operators' own meaning on the
  constants there (a masked load holds 0). A reduction selects only where that is not already neutral;
* exponentials are ``exp2`` with log2(e) folded into the scale. A shift m is kept as ``text * unit`` (see `Value.unit`).
"""

from __future__ import annotations

import hashlib
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.lower.tiling import GROUP, SINGLE, Product, TileAxis, Tiling, extent, stored_axes, stored_shape
from mirage_jax.lower.writer import Writer, identifier
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule, Load, Op, Store, Tensor
from mirage_jax.mugraph.operators import ACCUMULATORS, FUNCTIONS, operator

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
TRITON_TYPES: Mapping[str, str] = {
    "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32", "i32": "tl.int32", "bool": "tl.int1",
}  # fmt: skip
HALF = ("f16", "bf16")
LARGE = 1 << 31  # from this many elements on, offsets need 64 bits
MANY_BYTES = 4 << 20  # an operand this large is worth keeping in L2 for several blocks
DEFERRED_LANES = 64 * 32  # per warp: a sum may be carried unreduced through a loop up to this many registers


@dataclass(frozen=True, slots=True)
class Options:
    """What the emitter may do; part of the text, hence of its hash."""

    dot_precision: str = "ieee"  # of f32 matrix products: ieee, tf32 or tf32x3
    split_loops: bool = True  # independent accumulators that need one load in two layouts get a loop each


@dataclass(frozen=True)
class KernelSource:
    """A kernel ready to be loaded: text, launch grid and the device tensors that it takes, inputs before outputs."""

    name: str
    text: str
    grid: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]  # of inputs, then of outputs
    shapes: tuple[tuple[int, ...], ...]  # of outputs, in memory order
    num_warps: int
    num_stages: int

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Value:
    """A tile in a variable.

    `pads`: what padded lanes hold, per padded axis, where it is a known constant. `unit`: the value in the graph's
    sense is ``text * unit``; it differs from 1 for shifts only, which are kept in the unit that their exponentials need.
    """

    text: str
    dims: tuple[Axis, ...] = ()
    pads: Mapping[Axis, float] = field(default_factory=dict)
    unit: float = 1.0
    constant: float | None = None  # the same known number in every lane
    settled: bool = False  # a maximum of at least one number that no mask has made -inf


class _Lanes:
    """The domain of one number per value: what an operator makes of the constants in padded lanes."""

    def constant(self, value: Fraction) -> float:
        return float(value)

    def add(self, x: float, y: float) -> float:
        return x + y

    def mul(self, x: float, y: float) -> float:
        return x * y

    def power(self, x: float, exponent: Fraction) -> float:
        return float(np.power(np.float64(x), float(exponent)))

    def exp(self, x: float) -> float:
        return float(np.exp(np.float64(x)))

    def function(self, name: str, args: Sequence[float]) -> float:
        return float(FUNCTIONS[name].value(np, *map(np.float64, args)))


def emit(
    kernel: BlockGraph,
    graph: KernelGraph,
    schedule: KernelSchedule,
    parts: Mapping[Axis, int],
    options: Options = Options(),  # noqa: B008  (frozen)
) -> KernelSource:
    """The Triton kernel of `kernel` inside `graph`, at the graph's extents and the schedule's tiles.

    Raises `UnsupportedError` for structures that no text is known for, `LoweringError` for sizes that cannot work.
    """
    tiling = Tiling(kernel, graph, schedule, parts)
    tiling.check()
    return _Emitter(tiling, options).kernel()


class _Emitter:
    def __init__(self, tiling: Tiling, options: Options) -> None:
        self.tiling, self.options = tiling, options
        self.graph = tiling.kernel
        self.w = Writer()
        self.ops = {op.name: op for op in self.graph.ops}
        self.loads = {load.name: load for load in self.graph.loads}
        self.env: ChainMap[Any, Any] = ChainMap()  # what is in scope: ("value", name), ("index", axis), ("mask", axis) ..
        self.arguments: dict[str, str] = {}
        self.uses: set[tuple[str, str]] = set()  # how the loop that is being emitted uses each load: "dot" or "tile"

    @property
    def axes(self) -> Mapping[Axis, TileAxis]:
        return self.tiling.axes

    # --- the function ---------------------------------------------------------------------------------------------

    def kernel(self) -> KernelSource:
        live = self._live()
        tensors = self.tiling.graph.tensors
        inputs = tuple(dict.fromkeys(load.tensor for load in self.graph.loads if load.name in live))
        outputs = tuple(s.tensor.name for s in self.graph.stores)
        for kind, names in (("in", inputs), ("out", outputs)):
            self.arguments |= {name: self.w.name(f"{kind}{n}") for n, name in enumerate(names)}
        used = [tensors[name] for name in (*inputs, *outputs)]
        name = self.w.name("mirage_" + identifier(self.graph.name))
        for text in ("import triton", "import triton.language as tl", "", "", "@triton.jit"):
            self.w.line(text)
        with self.w.block(f"def {name}({', '.join(self.arguments.values())}):"):
            self._header(used)
            self._blocks()
            for axis in self.axes.values():
                if axis.axis != self.graph.loop:
                    self._index(axis)
            for depth in sorted({self.graph.stages[n].depth for n in self._targets(live)}):
                for group in self._loops(depth, live):
                    self._loop(group)
            for store in self.graph.stores:
                if not self.graph.stages[store.value].body:
                    self._store(store)
        graph, parts, schedule = self.tiling.graph, self.tiling.parts, self.tiling.schedule
        return KernelSource(
            name, self.w.text(), (self.tiling.grid,), inputs, outputs, tuple(t.dtype for t in used),
            tuple(stored_shape(s.tensor, graph, parts) for s in self.graph.stores),
            schedule.num_warps, schedule.num_stages,
        )  # fmt: skip

    def _header(self, tensors: Iterable[Tensor]) -> None:
        graph, parts = self.tiling.graph, self.tiling.parts
        for tensor in tensors:
            shape = stored_shape(tensor, graph, parts)
            axes = ", ".join(f"{identifier(a)}={n}" for a, n in zip(stored_axes(tensor, graph), shape, strict=True))
            self.w.line(f"# {self.arguments[tensor.name]}: {tensor.dtype}[{axes}]")

    def _live(self) -> set[str]:
        """Loads and operators that some store depends on."""
        live: set[str] = set()
        todo = [s.value for s in self.graph.stores]
        while todo:
            name = todo.pop()
            if name not in live:
                live.add(name)
                todo += self.ops[name].args if name in self.ops else ()
        return live

    # --- program ids, indices and masks ---------------------------------------------------------------------------

    def _blocks(self) -> None:
        """Which block this program is, per grid axis; the first of `Tiling.programs` varies fastest."""
        many = [(a, n) for a, n in self.tiling.programs if n > 1]
        for a, n in self.tiling.programs:
            if n == 1:
                self.env["block", a] = "0"
        if not many:
            return
        names = {a: self.w.name(f"{identifier(a)}_block") for a, _ in many}
        self.env |= {("block", a): name for a, name in names.items()}
        if len(many) == 1:
            self.w.line(f"{names[many[0][0]]} = tl.program_id(0)")
            return
        pid = self.w.name("pid")
        self.w.line(f"{pid} = tl.program_id(0)")
        (fast, wide), (slow, deep), *outer = many
        if wide > GROUP and self.tiling.shared_bytes(slow) > MANY_BYTES:
            self._grouped(pid, names[fast], wide, names[slow], deep, bool(outer))
            many, step = outer, wide * deep
        else:
            step = 1
        for n, (a, count) in enumerate(many):
            text = pid if step == 1 else f"{pid} // {step}"
            self.w.line(f"{names[a]} = {text}" + (f" % {count}" if n < len(many) - 1 else ""))
            step *= count

    def _grouped(self, pid: str, fast: str, wide: int, slow: str, deep: int, outer: bool) -> None:
        """Blocks in groups of `GROUP` along the fast axis, so that both operands are reused while they are in L2."""
        area, inner = wide * deep, f"{pid} % {wide * deep}" if outer else pid
        if wide % GROUP == 0:
            width = str(GROUP)
        else:
            width = self.w.let("width", f"tl.minimum({wide} - {inner} // {GROUP * deep} * {GROUP}, {GROUP})")
        member = self.w.let("member", f"{pid} % {area} % {GROUP * deep}" if outer else f"{pid} % {GROUP * deep}")
        self.w.line(f"{fast} = {inner} // {GROUP * deep} * {GROUP} + {member} % {width}")
        self.w.line(f"{slow} = {member} // {width}")

    def _index(self, axis: TileAxis, step: str = "") -> None:
        """Define the index along an axis, and the mask of its real lanes if it has padded ones."""
        block, part = self.env.get(("block", axis.axis), "0"), self.env.get(("block", axis.part), "0")
        starts = [f"{part} * {axis.local}"] if part != "0" else []
        starts += [f"{block} * {axis.size}" if axis.size > 1 else block] if block != "0" else []
        if step:  # a tensor also in the interpreter, whose loops count with Python's integers
            starts.append(step if axis.block > 1 else f"tl.full((), 0, tl.int32) + {step}")
        if axis.block == 1 and not axis.ragged and len(starts) <= 1:
            text = starts[0] if starts else "0"
            self.env["index", axis.axis] = text if text.isidentifier() or text == "0" else self._let_axis(axis, text)
            return
        lanes = [f"tl.arange(0, {axis.block})"] if axis.block > 1 else []
        self.env["index", axis.axis] = index = self._let_axis(axis, " + ".join(starts + lanes) or "0")
        self.env["mask", axis.axis] = ""
        if axis.ragged:
            end = self._end(axis, part, starts)
            self.env["mask", axis.axis] = name = self.w.name(f"{index}_mask")
            self.w.line(f"{name} = {index} < {end}")

    def _let_axis(self, axis: TileAxis, text: str) -> str:
        name = self.w.name("single" if axis.axis == SINGLE else identifier(axis.axis))
        self.w.line(f"{name} = {text}")
        return name

    def _end(self, axis: TileAxis, part: str, starts: list[str]) -> str:
        """First index that this tile does not cover: the end of the axis, of the part or of the tile."""
        ends = []
        if axis.block != axis.size and axis.count > 1:
            ends.append(" + ".join([*starts, str(axis.size)]))
        if axis.part is None:
            ends += [str(axis.full)] if axis.local % axis.size or axis.count == 1 else []
        else:
            overrun = axis.local % axis.size or (axis.block != axis.size and axis.count == 1)
            ends += [f"{part} * {axis.local} + {axis.local}"] if overrun else []
            ends += [str(axis.full)] if axis.short_part else []
        text = ends[-1]
        for end in ends[:-1]:
            text = f"tl.minimum({end}, {text})"
        return text

    def _expand(self, text: str, own: tuple[Axis, ...], dims: tuple[Axis, ...]) -> str:
        """`text` over the dimensions `own`, made broadcastable to `dims`: ``m -> m[:, None]``."""
        if not own or own == dims:
            return text
        if set(own) - set(dims):
            raise LoweringError(f"a value over {own} is used where only {dims} remain")
        if not text.isidentifier():
            text = f"({text})"
        return f"{text}[{', '.join(':' if a in own else 'None' for a in dims)}]"

    def _at(self, value: Value, dims: tuple[Axis, ...]) -> str:
        return self._expand(value.text, value.dims, dims)

    def _mask(self, axes: Iterable[Axis], dims: tuple[Axis, ...]) -> str:
        """Conjunction of the masks of the padded ones of `axes`, or ""."""
        names = [(a, self.env["mask", a]) for a in dict.fromkeys(axes) if self.env.get(("mask", a))]
        return " & ".join(self._expand(name, self.tiling.dims((a,)), dims) for a, name in names)

    # --- loads and stores -----------------------------------------------------------------------------------------

    def _pointer(self, tensor: Tensor, axes: tuple[Axis, ...], dims: tuple[Axis, ...]) -> str:
        """Address of a tile; `axes` names the tensor's dimensions in the kernel's words."""
        graph, parts = self.tiling.graph, self.tiling.parts
        sizes = dict(zip(tensor.axes, axes, strict=True))
        if any(a + ".g" in sizes for a in sizes):
            raise UnsupportedError(f"tensor {tensor} has a split axis and its parts at once")
        stored = stored_axes(tensor, graph)
        shape = [extent(a, graph, parts) for a in stored]
        wide = prod(shape) >= LARGE
        scalars, vectors = [], []
        if SINGLE in dims:  # all lanes but one are masked: their addresses do not matter, as long as they look aligned
            vectors.append(f"{self._expand(self.env['index', SINGLE], (SINGLE,), dims)} * 64")
        for n, a in enumerate(stored):
            index, stride = self.env["index", sizes[a]], prod(shape[n + 1 :])
            if index == "0" or shape[n] == 1:
                continue
            own = self.tiling.dims((sizes[a],))
            text = self._expand(index, own, dims) + (".to(tl.int64)" if wide else "")
            (vectors if own else scalars).append(text if stride == 1 else f"{text} * {stride}")
        return " + ".join([self.arguments[tensor.name], *scalars, *vectors])

    def _raw(self, load: Load, use: str, single: bool = False) -> Value:
        """The tile of a load in the tensor's own type, once per kind of use: a load that feeds a matrix product and
        pointwise operators alike would not be pipelined. Different eviction policies keep the two from being merged."""
        twice = {(load.name, "dot"), (load.name, "tile")} <= self.uses
        key = ("raw", load.name, use if twice else "", single)
        if key not in self.env:
            tensor = self.tiling.graph.tensors[load.tensor]
            if tensor.dtype not in TRITON_TYPES:
                raise UnsupportedError(f"tensor {tensor} has type {tensor.dtype}; kernels take {', '.join(TRITON_TYPES)}")
            axes = (*load.axes, SINGLE) if single else load.axes
            dims = self.tiling.dims(axes)
            text = f"tl.load({self._pointer(tensor, load.axes, dims)}"
            if mask := self._mask(axes, dims):
                text += f", mask={mask}, other={'0' if tensor.dtype in ('i32', 'bool') else '0.0'}"
            if twice:
                text += ', eviction_policy="evict_last"' if use == "dot" else ""
            pads = {a: 0.0 for a in load.axes if self.axes[a].ragged}
            self.env[key] = Value(self.w.let("load", text + ")"), dims, pads)
        return self.env[key]

    def _store(self, store: Store) -> None:
        value = self._natural(store.value)
        axes = store.tensor.axes
        for a, n in self.tiling.programs:
            if n > 1 and a not in axes and a.removesuffix(".g") not in axes:
                raise LoweringError(f"{store}: blocks differ along {a}, but the tensor does not have it")
        dims = self.tiling.dims(axes)
        pointer = self._pointer(store.tensor, axes, dims)
        text = self._at(value, dims)
        if store.tensor.dtype == "bool":
            text = f"({text} != 0)"
        elif store.tensor.dtype not in TRITON_TYPES:
            raise UnsupportedError(f"tensor {store.tensor} has type {store.tensor.dtype}; kernels store {', '.join(TRITON_TYPES)}")
        elif store.tensor.dtype != "f32":
            text = f"{text if text.isidentifier() else f'({text})'}.to({TRITON_TYPES[store.tensor.dtype]})"
        mask = self._mask(axes, dims)
        self.w.line(f"tl.store({pointer}, {text}{f', mask={mask}' if mask else ''})")

    # --- values ---------------------------------------------------------------------------------------------------

    def _value(self, name: str) -> Value:
        """The f32 tile of a value; emits it, and what it needs, if it is not in scope yet."""
        key = ("value", name)
        if key not in self.env:
            if name in self.loads:
                self.env[key] = self._loaded(self.loads[name])
            else:
                op = self.ops[name]
                if op.op in ACCUMULATORS or (self.graph.stages[name].body and len(self.env.maps) == 1):
                    raise LoweringError(f"{op}: is needed outside of the loop that makes it")
                self.env[key] = _RULES.get(op.op, _Emitter._pointwise)(self, op)
        return self.env[key]

    def _loaded(self, load: Load) -> Value:
        raw = self._raw(load, "tile")
        if self.tiling.graph.tensors[load.tensor].dtype == "f32":
            return raw
        return Value(self.w.let("x", f"{raw.text}.to(tl.float32)"), raw.dims, raw.pads)

    def _natural(self, name: str) -> Value:
        """A value in the graph's own unit."""
        value = self._value(name)
        if value.unit == 1.0:
            return value
        key = ("natural", value.text)
        if key not in self.env:
            self.env[key] = Value(self.w.let("natural", f"{value.text} * {value.unit!r}"), value.dims)
        return self.env[key]

    def _zeroed(self, value: Value, axes: Iterable[Axis], neutral: float = 0.0) -> Value:
        """`value` with `neutral` in the padded lanes along `axes`."""
        axes = tuple(a for a in axes if self.axes[a].ragged and value.pads.get(a) != neutral)
        axes = tuple(a for a in axes if self.env.get(("mask", a)))
        if not axes:
            return value
        key = ("neutral", value.text, axes, neutral)
        if key not in self.env:
            mask = self._mask(axes, value.dims)
            text = f"tl.where({mask}, {value.text}, {_number(neutral)})"
            pads = {**value.pads, **dict.fromkeys(axes, neutral)}
            self.env[key] = Value(self.w.let("masked", text), value.dims, pads, value.unit)
        return self.env[key]

    def _pads(self, op: Op, args: Sequence[Value]) -> dict[Axis, float]:
        """What padded lanes of a pointwise operator hold, axis by axis."""
        out: dict[Axis, float] = {}
        for a in op.axes:
            lanes = [v.pads.get(a, v.constant) for v in args]
            if not self.axes[a].ragged or None in lanes or any(v.unit != 1.0 for v in args):
                continue
            try:
                with np.errstate(all="ignore"):
                    out[a] = operator(op.op).meaning(_Lanes(), *lanes, **op.attributes)
            except (ArithmeticError, AttributeError):
                continue
        return out

    def _made(self, op: Op, text: str, args: Sequence[Value]) -> Value:
        """Assign the result of a pointwise operator."""
        return Value(self.w.let(op.op, text), self.tiling.dims(op.axes), self._pads(op, args))

    def _affine(self, op: Op, value: Value, dims: tuple[Axis, ...]) -> str:
        """``scale * x + offset`` as an operand: a name, or an expression in parentheses."""
        scale, offset = float(_attr(op, "scale", 1)), float(_attr(op, "offset", 0))
        text = self._at(value, dims)
        if scale != 1.0:
            text = f"-{text}" if scale == -1.0 else f"{text} * {_number(scale)}"
        if offset != 0.0:
            text = f"{text} + {_number(offset)}"
        return text

    # --- pointwise operators --------------------------------------------------------------------------------------

    def _pointwise(self, op: Op) -> Value:
        """Any operator whose record has a Triton template."""
        record = operator(op.op)
        if not record.triton:
            raise UnsupportedError(f"operator {op.op} has no Triton text")
        dims = self.tiling.dims(op.axes)
        args = [self._natural(a) for a in op.args]
        texts = [self._at(v, dims) for v in args]
        if record.arity == 1:
            texts = [self._affine(op, args[0], dims)]
            if not texts[0].isidentifier() and record.triton != "{0}":
                texts = [self.w.let("scaled", texts[0])]
        return self._made(op, record.triton.format(*texts), args)

    def _const(self, op: Op) -> Value:
        number = float(_attr(op, "value"))
        name = self.w.let("const", f"tl.full((), {_number(number)}, tl.float32)")
        return Value(name, constant=number)

    def _iota(self, op: Op) -> Value:
        (axis,) = op.axes
        index = self.env["index", axis]
        if index == "0":
            return Value(self.w.let("iota", "tl.full((), 0.0, tl.float32)"), constant=0.0)
        return Value(self.w.let("iota", f"{index}.to(tl.float32)"), self.tiling.dims((axis,)))

    def _add(self, op: Op) -> Value:
        dims = self.tiling.dims(op.axes)
        args = [self._natural(a) for a in op.args]
        x, y = (self._at(v, dims) for v in args)
        ca, cb = float(_attr(op, "ca", 1)), float(_attr(op, "cb", 1))
        left = x if ca == 1.0 else f"-{x}" if ca == -1.0 else f"{x} * {_number(ca)}"
        right = y if abs(cb) == 1.0 else f"{y} * {_number(abs(cb))}"
        return self._made(op, f"{left} {'-' if cb < 0 else '+'} {right}", args)

    def _pow(self, op: Op) -> Value:
        x = self._natural(op.args[0])
        text = self._affine(op, x, x.dims)
        if not text.isidentifier():
            text = self.w.let("scaled", text)
        return self._made(op, _power(text, Fraction(_attr(op, "exponent"))), [x])

    def _exp(self, op: Op) -> Value:
        x = self._natural(op.args[0])
        scale, offset = float(_attr(op, "scale", 1)), float(_attr(op, "offset", 0))
        text = f"{x.text} * {_number(scale * LOG2E)}" + (f" + {_number(offset * LOG2E)}" if offset else "")
        return self._made(op, f"tl.exp2({text})", [x])

    # --- exponentials relative to a shift -------------------------------------------------------------------------

    def _finite(self, shift: Value) -> Value:
        """A shift to subtract: 0 where nothing has been seen yet (-inf), since -inf - -inf is no number."""
        if shift.settled:
            return shift
        key = ("finite", shift.text)
        if key not in self.env:
            text = f'tl.where({shift.text} == float("-inf"), 0.0, {shift.text})'
            self.env[key] = Value(self.w.let("finite", text), shift.dims, unit=shift.unit)
        return self.env[key]

    def _exps(self, op: Op) -> Value:
        dims = self.tiling.dims(op.axes)
        x, m = self._natural(op.args[0]), self._finite(self._value(op.args[1]))
        scale = float(_attr(op, "scale", 1))
        return self._made(op, f"tl.exp2({_difference(self._at(x, dims), scale, self._at(m, dims), m.unit)})", [x, m])

    def _rescale(self, op: Op) -> Value:
        dims = self.tiling.dims(op.axes)
        x, old, new = self._natural(op.args[0]), self._value(op.args[1]), self._finite(self._value(op.args[2]))
        degree = float(_attr(op, "degree", 1))
        moved = _difference(self._at(old, dims), old.unit, self._at(new, dims), new.unit, degree)
        return self._made(op, f"{self._at(x, dims)} * tl.exp2({moved})", [x, old, new])

    def _from_product(self, name: str) -> bool:
        """Is a value the result of a matrix product, possibly masked with minus infinity?"""
        op = self.ops.get(name)
        return op is not None and (op.op == "dot" or (op.op == "mask" and self._from_product(op.args[1])))

    def _shift(self, op: Op) -> Value:
        """The maximum of ``scale * x``, in the unit in which its exponentials need no further rounding.

        Logits straight from a matrix product are kept times log2(e), so that an exponential costs one fma and one exp2.
        Others may be masked with huge numbers, for which that fma would not cancel: these stay in the unit of x.
        """
        x, scale = self._value(op.args[0]), float(_attr(op, "scale", 1))
        if scale <= 0.0:
            x, unit, factor = self._natural(op.args[0]), 1.0, 1.0
            x = Value(self.w.let("scaled", f"{x.text} * {_number(scale)}"), x.dims)
        elif self._from_product(op.args[0]) and x.unit == 1.0:
            unit, factor = LN2, scale * LOG2E
        else:
            unit, factor = scale * x.unit, 1.0
        text = self._maximum(op, x)
        if factor != 1.0:
            text = f"{text} * {_number(factor)}"
        settled = unit == LN2 and self.ops[op.args[0]].op == "dot" and not any(self.axes[a].short_part for a in _reduced(op) if a in self.axes)
        return self._carried(op, text, unit, settled)

    def _max(self, op: Op) -> Value:
        return self._carried(op, self._maximum(op, self._natural(op.args[0])), 1.0)

    def _maximum(self, op: Op, x: Value) -> str:
        axes = [a for a in _reduced(op) if a in self.graph.axes_of[op.args[0]]]
        return _reduction("tl.max", self._zeroed(x, axes, -math.inf), axes)

    def _carried(self, op: Op, text: str, unit: float, settled: bool = False) -> Value:
        """A maximum; a running one if it reduces the axis of the loop."""
        dims = self.tiling.dims(op.axes)
        if ("carried", op.name) in self.env:
            text = f"tl.maximum({self.env['carried', op.name]}, {text})"
        return Value(self.w.let(op.op, text), dims, unit=unit, settled=settled)

    # --- reductions -----------------------------------------------------------------------------------------------

    def _sum(self, op: Op) -> Value:
        x = self._natural(op.args[0])
        own = self.graph.axes_of[op.args[0]]
        axes = [a for a in _reduced(op) if a in own]
        x = self._zeroed(x, axes)
        text = _reduction("tl.sum", x, axes)
        if missing := [a for a in _reduced(op) if a not in own]:
            text = f"{text} * {_number(float(prod(map(self._elements, missing))))}"
        return Value(self.w.let(op.op, text), self.tiling.dims(op.axes), self._kept(op, x))

    def _elements(self, axis: Axis) -> int:
        """Elements of an axis that a block sees."""
        if axis not in self.axes:
            return extent(axis, self.tiling.graph, self.tiling.parts)
        if self.axes[axis].short_part:
            raise UnsupportedError(f"the number of elements of axis {axis} differs from part to part")
        return self.axes[axis].local

    def _kept(self, op: Op, x: Value) -> dict[Axis, float]:
        """Lanes that are 0 along an axis stay 0 when other axes are summed."""
        return {a: 0.0 for a in op.axes if x.pads.get(a) == 0.0}

    def _dot(self, op: Op) -> Value:
        product = self.tiling.product(op)
        if product:
            text = f"tl.dot({self._operands(op, product)}{self._precision(op)})"
            return self._single_row(Value(self.w.let("dot", text), product.dims))
        x = self._products(op)
        return Value(self.w.let("dot", _reduction("tl.sum", x, _reduced(op))), self.tiling.dims(op.axes), self._kept(op, x))

    def _products(self, op: Op) -> Value:
        """``x * y`` of a dot that is no matrix product, neutral in the padded lanes of what it sums over."""
        union = tuple(dict.fromkeys(a for arg in op.args for a in self.graph.axes_of[arg]))
        dims = self.tiling.dims(union)
        if len(dims) > 3:
            raise UnsupportedError(f"{op}: neither a matrix product nor a product with at most 3 tile axes, but over {dims}")
        args = [self._natural(a) for a in op.args]
        mul = Op(op.name, "mul", op.args, union)
        return self._zeroed(self._made(mul, " * ".join(self._at(v, dims) for v in args), args), _reduced(op))

    def _single_row(self, value: Value) -> Value:
        """The product of a vector, without the rows (or columns) of zeros that made it a matrix."""
        if SINGLE not in value.dims:
            return value
        mask = self._mask((SINGLE,), value.dims)  # zeros times an infinite operand are not zeros
        text = f"tl.sum(tl.where({mask}, {value.text}, 0.0), axis={value.dims.index(SINGLE)})"
        return Value(self.w.let("row", text), tuple(a for a in value.dims if a != SINGLE))

    def _operands(self, op: Op, product: Product) -> str:
        """``a, b`` and options of tl.dot, in the orientation of the kernel's order."""
        dtype = self._operand_type(op)
        names = op.args[::-1] if product.swapped else op.args
        sides = ((product.row, *product.inner), (*product.inner, product.column))
        values = [self._operand(n, dtype, SINGLE in side) for n, side in zip(names, sides, strict=True)]
        for a in product.inner:
            pads = [v.pads.get(a) for v in values]
            if not (0.0 in pads and all(p is not None and math.isfinite(p) for p in pads)):
                values = [self._zeroed(v, (a,)) for v in values]
        texts = [self._oriented(self._cast(v, n, dtype), side) for v, n, side in zip(values, names, sides, strict=True)]
        return ", ".join(texts)

    def _operand_type(self, op: Op) -> str:
        """16 bits if an operand is a tensor of that type, unless the other one is an f32 input of the program."""
        tensors = [self.tiling.graph.tensors[self.loads[a].tensor] for a in op.args if a in self.loads]
        given = {t.name for t in self.tiling.graph.inputs}
        halves = {t.dtype for t in tensors if t.dtype in HALF}
        exact = any(t.dtype not in HALF and t.name in given for t in tensors)
        return halves.pop() if len(halves) == 1 and not exact else "f32"

    def _operand(self, name: str, dtype: str, single: bool) -> Value:
        """A dot operand before its cast; a vector (`single`) as a matrix of one row and zeros."""
        if name in self.loads and self.tiling.graph.tensors[self.loads[name].tensor].dtype == dtype:
            return self._raw(self.loads[name], "dot", single)
        value = self._natural(name)
        key = ("single", value.text)
        if single and key not in self.env:
            dims = self.tiling.dims((*value.dims, SINGLE))
            text = f"tl.where({self._mask((SINGLE,), dims)}, {self._at(value, dims)}, 0.0)"
            self.env[key] = Value(self.w.let("single", text), dims, value.pads)
        return self.env[key] if single else value

    def _cast(self, value: Value, name: str, dtype: str) -> Value:
        is_raw = name in self.loads and self.tiling.graph.tensors[self.loads[name].tensor].dtype == dtype
        if is_raw or dtype == "f32":
            return value
        key = ("cast", value.text, dtype)
        if key not in self.env:
            text = self.w.let("half", f"{value.text}.to({TRITON_TYPES[dtype]})")
            self.env[key] = Value(text, value.dims, value.pads)
        return self.env[key]

    def _oriented(self, value: Value, side: tuple[Axis, ...]) -> str:
        """A dot operand as a matrix with the dimensions `side`; several inner axes are flattened into one."""
        text = value.text
        if value.dims != side:
            order = ", ".join(str(value.dims.index(a)) for a in side)
            text = f"tl.trans({text})" if len(side) == 2 else f"tl.permute({text}, ({order}))"
        if len(side) == 2:
            return text
        lanes = [self.axes[a].block for a in side]
        shape = (lanes[0], prod(lanes[1:])) if side[0] not in self._inner(side) else (prod(lanes[:-1]), lanes[-1])
        return f"tl.reshape({text}, {shape})"

    def _inner(self, side: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return side[:-1] if side[0] in self._contracted else ()

    @cached_property
    def _contracted(self) -> set[Axis]:
        return {a for op in self.graph.ops if op.op == "dot" for a in _reduced(op)}

    # --- loops ----------------------------------------------------------------------------------------------------

    def _targets(self, live: set[str]) -> list[str]:
        """Body values that leave a loop: arguments of accumulators, and values stored in each step."""
        stages = self.graph.stages
        stored = [s.value for s in self.graph.stores if stages[s.value].body]
        fed = [op.args[0] for op in self.graph.ops if op.name in live and op.op in ACCUMULATORS]
        return [n for n in (*fed, *stored)]

    def _loops(self, depth: int, live: set[str]) -> list[_Group]:
        """Accumulators and stores of one depth, in the loops that they share."""
        stages, groups = self.graph.stages, []
        for op in self.graph.ops:
            if op.name in live and op.op in ACCUMULATORS and stages[op.name].depth == depth + 1:
                groups.append(self._group([op], [], op.args))
        for store in self.graph.stores:
            if stages[store.value].body and stages[store.value].depth == depth:
                groups.append(self._group([], [store], (store.value,)))
        merged: list[_Group] = []
        for group in groups:
            for other in [g for g in merged if not self.options.split_loops or g.shares(group)]:
                merged.remove(other)
                group = other.joined(group)
            merged.append(group)
        return merged

    def _group(self, accumulators: list[Op], stores: list[Store], roots: Sequence[str]) -> _Group:
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
        return _Group(accumulators, stores, body, uses)

    def _loop(self, group: _Group) -> None:
        """One pass over the loop axis."""
        assert self.graph.loop is not None
        body = [op for op in self.graph.ops if op.name in group.body]
        self._hoist(body, group)
        outer, wide = self.env, self.tiling
        self.env, self.uses = outer.new_child(), group.uses
        narrowed = self._narrow(body, group)
        absorbed = {op.args[0]: self._absorbs(op) for op in group.accumulators}
        plans = [(op, absorbed[op.args[0]]) for op in group.accumulators]
        carried = [op for op in body if op.op in ("shift", "max") and self.graph.loop in _reduced(op)]
        running = {op.name: self._start(self.tiling.dims(op.axes), op.op, "-inf") for op in carried}
        sums = {op.name: self._start(self._carrier(op, how), "acc", "0.0") for op, how in plans if op.op != "last"}
        self.env |= {("carried", n): name for n, name in running.items()}
        axis = self.axes[self.graph.loop]
        step = self.w.name(identifier(axis.axis) + "_start")
        with self.w.block(f"for {step} in {self._range(axis, body)}:", step):
            self._index(axis, step)
            for op in body:
                if not absorbed.get(op.name):
                    self._value(op.name)
            for op, how in plans:
                if op.op != "last":
                    self._accumulate(op, how, sums[op.name], running)
            for store in group.stores:
                if axis.axis not in store.tensor.axes and axis.count > 1:
                    raise LoweringError(f"{store}: each step of the loop over {axis.axis} would overwrite it")
                self._store(store)
            ends = {op.name: self.env["value", op.name] for op in carried}
            for name, variable in running.items():
                self.w.line(f"{variable} = {ends[name].text}")
        for op, how in plans:
            if op.op == "last":
                if op.args[0] not in running:
                    raise UnsupportedError(f"{op}: only a running maximum has a last value")
                end = ends[op.args[0]]
                value = replace(end, text=running[op.args[0]])
            else:
                value = self._widened(self._finished(op, how, sums[op.name]), narrowed, outer)
            outer["value", op.name] = value
        self.env, self.uses, self.tiling = outer, set(), wide

    def _range(self, axis: TileAxis, body: Sequence[Op]) -> str:
        """Triton pipelines the loads of matrix products by itself; other loops must ask for it."""
        count = f"0, {axis.local}, {axis.size}"
        if axis.count == 1 or any(self.tiling.product(op) for op in body):
            return f"range({count})"
        return f"tl.range({count}, num_stages={self.tiling.schedule.num_stages})"

    def _narrow(self, body: Sequence[Op], group: _Group) -> dict[Axis, str]:
        """Give a loop without matrix products tiles of its own, if another loop has some; the axes whose lanes differ."""
        tiling, stages = self.tiling, self.graph.stages
        products = any(self.graph.loop in _reduced(op) for op in self.graph.ops if tiling.product(op))
        if not products or group.stores or any(tiling.product(op) for op in body):
            return {}
        if any(op.op != "acc" for op in group.accumulators):
            return {}
        values = {op.name for op in body} | {a for op in body for a in op.args}
        own = tiling.pointwise(values, DEFERRED_LANES * tiling.schedule.num_warps)
        changed = [a for a in tiling.names if a != tiling.kernel.loop and own.axes[a].block != tiling.axes[a].block]
        outside = {a for v in values if not stages[v].body for a in self.graph.axes_of[v]}
        results = [tiling.dims(op.axes) for op in group.accumulators]
        if outside & set(changed) or any(len(dims) > 1 and set(dims) & set(changed) for dims in results):
            return {}
        self.tiling = own
        for a in changed:
            self._index(self.axes[a])
        return {a: self.env["index", a] for a in changed}

    def _widened(self, value: Value, narrowed: Mapping[Axis, str], outer: ChainMap[Any, Any]) -> Value:
        """A vector over fewer lanes, spread over the lanes that the rest of the kernel uses."""
        if not set(value.dims) & set(narrowed):
            return value
        (axis,) = value.dims
        same = f"{outer['index', axis]}[:, None] == {narrowed[axis]}[None, :]"
        text = f"tl.sum(tl.where({same}, {value.text}[None, :], 0.0), axis=1)"
        return Value(self.w.let("wide", text), value.dims)

    def _hoist(self, body: Sequence[Op], group: _Group) -> None:
        """Emit everything that does not change in the loop before it."""
        stages = self.graph.stages
        for op in (*body, *group.accumulators):
            product = self.tiling.product(op)
            for a in op.args:
                if stages[a].body:
                    continue
                if product:
                    self._operand(a, self._operand_type(op), SINGLE in product.dims and len(self.tiling.dims(self.graph.axes_of[a])) == len(product.inner))
                else:
                    self._value(a)

    def _absorbs(self, op: Op) -> str:
        """How an accumulator takes its argument: "dot" into the product's own accumulator, "tile" as an unreduced tile, or ""."""
        x = self.ops.get(op.args[0])
        if x is None or op.op == "last" or self.graph.users[x.name] != (op.name,) or x.op not in ("dot", "sum"):
            return ""
        if any(s.value == x.name for s in self.graph.stores):
            return ""
        if self.tiling.product(x):
            return "dot"
        union = tuple(dict.fromkeys(a for arg in x.args for a in self.graph.axes_of[arg]))
        reduced = _reduced(x)
        small = self.tiling.lanes(union) <= DEFERRED_LANES * self.tiling.schedule.num_warps
        whole = self.graph.loop in reduced and set(reduced) <= set(union)
        return "tile" if op.op == "acc" and whole and small and len(self.tiling.dims(union)) <= 3 else ""

    def _carrier(self, op: Op, how: str) -> tuple[Axis, ...]:
        """Dimensions of the variable that the loop carries for an accumulator."""
        x = self.ops.get(op.args[0])
        product = self.tiling.product(x) if x is not None and how == "dot" else None
        if product:
            return product.dims
        if how == "tile" and x is not None:
            return self.tiling.dims(a for arg in x.args for a in self.graph.axes_of[arg])
        return self.tiling.dims(op.axes)

    def _start(self, dims: tuple[Axis, ...], hint: str, value: str) -> str:
        lanes = tuple(self.axes[a].block for a in dims)
        number = 'float("-inf")' if value == "-inf" else value
        return self.w.let(hint, f"tl.full({lanes}, {number}, tl.float32)")

    def _accumulate(self, op: Op, how: str, name: str, running: Mapping[str, str]) -> None:
        x = self.ops.get(op.args[0])
        kept = self._decayed(op, name, self._carrier(op, how), running) if op.op == "accs" else name
        if how == "dot" and x is not None:
            product = self.tiling.product(x)
            assert product is not None
            self.w.line(f"{name} = tl.dot({self._operands(x, product)}, {kept}{self._precision(x)})")
            return
        if how == "tile" and x is not None:
            if x.op == "dot":
                value = self._products(x)
            else:
                value = self._zeroed(self._natural(x.args[0]), _reduced(x))
        else:
            value = self._natural(op.args[0])
            if self.graph.loop in op.axes:
                value = self._zeroed(value, (self.graph.loop,))
        self.w.line(f"{name} = {kept} + {value.text}")

    def _decayed(self, op: Op, name: str, dims: tuple[Axis, ...], running: Mapping[str, str]) -> str:
        """The accumulator relative to the shift of this step; the running shift may have moved."""
        shift = op.args[1]
        if shift not in running:
            if self.graph.stages[shift].body:
                raise UnsupportedError(f"{op}: its shift changes in the loop but is no running maximum")
            return name
        degree = float(_attr(op, "degree", 1))
        if degree <= 0:
            raise UnsupportedError(f"{op}: an accumulator of degree {degree} starts at 0 * inf")
        value = self._value(shift)
        key = ("moved", shift, degree)
        if key not in self.env:
            moved = _difference(running[shift], value.unit, self._finite(value).text, value.unit, degree)
            self.env[key] = Value(self.w.let("decay", f"tl.exp2({moved})"), value.dims)
        return f"{name} * {self._at(self.env[key], dims)}"

    def _finished(self, op: Op, how: str, name: str) -> Value:
        """The accumulator after the loop; lanes of the loop axis that it kept are all real, masked ones having added 0."""
        dims = self.tiling.dims(op.axes)
        if how == "tile":
            x = self.ops[op.args[0]]
            carrier = Value(name, self._carrier(op, how))
            return Value(self.w.let("acc", _reduction("tl.sum", carrier, _reduced(x))), dims)
        pads = {self.graph.loop: 0.0} if self.graph.loop in op.axes else {}
        return self._single_row(Value(name, self._carrier(op, how), pads))

    def _precision(self, op: Op) -> str:
        return f', input_precision="{self.options.dot_precision}"' if self._operand_type(op) == "f32" else ""


@dataclass(frozen=True, slots=True)
class _Group:
    """What one loop computes: accumulators, stores in each step, body operators, and how each load is used."""

    accumulators: list[Op]
    stores: list[Store]
    body: set[str]
    uses: set[tuple[str, str]]

    def shares(self, other: _Group) -> bool:
        return bool(self.body & other.body or self.uses & other.uses)

    def joined(self, other: _Group) -> _Group:
        return _Group(
            self.accumulators + other.accumulators, self.stores + other.stores,
            self.body | other.body, self.uses | other.uses,
        )  # fmt: skip


_RULES: Mapping[str, Callable[[_Emitter, Op], Value]] = {
    "const": _Emitter._const, "iota": _Emitter._iota, "add": _Emitter._add, "pow": _Emitter._pow, "exp": _Emitter._exp,
    "exps": _Emitter._exps, "rescale": _Emitter._rescale, "shift": _Emitter._shift, "max": _Emitter._max,
    "sum": _Emitter._sum, "dot": _Emitter._dot,
}  # fmt: skip


def _attr(op: Op, name: str, default: Any = None) -> Any:
    return op.attributes.get(name, default)


def _reduced(op: Op) -> tuple[Axis, ...]:
    return tuple(op.attributes["axes"])  # type: ignore[arg-type]


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _reduction(function: str, value: Value, axes: Iterable[Axis]) -> str:
    """``tl.sum`` over several tile dimensions, last dimension first."""
    text = value.text
    for place in sorted((value.dims.index(a) for a in set(axes) if a in value.dims), reverse=True):
        text = f"{function}({text}, axis={place})"
    return text


def _difference(x: str, x_unit: float, y: str, y_unit: float, degree: float = 1.0) -> str:
    """``degree * (x * x_unit - y * y_unit) * log2(e)``; equal units are applied after the subtraction, which is then exact."""
    a, b = x_unit * degree * LOG2E, y_unit * degree * LOG2E
    if math.isclose(a, b, rel_tol=1e-15):
        return f"{x} - {y}" if math.isclose(a, 1.0, rel_tol=1e-15) else f"({x} - {y}) * {_number(a)}"
    left, right = (t if math.isclose(f, 1.0, rel_tol=1e-15) else f"{t} * {_number(f)}" for t, f in ((x, a), (y, b)))
    return f"{left} - {right}"


def _power(x: str, exponent: Fraction) -> str:
    """``x ** exponent`` for a name `x`: products for integers, roots for halves, exp2 of the logarithm for the rest."""
    whole, rest = divmod(abs(exponent), 1)
    if rest not in (0, Fraction(1, 2)) or whole > 8:
        if exponent.denominator == 1:
            magnitude = f"tl.exp2({float(exponent)!r} * tl.log2(tl.abs({x})))"
            return f"tl.where({x} < 0, -{magnitude}, {magnitude})" if exponent % 2 else magnitude
        return f"tl.exp2({float(exponent)!r} * tl.log2({x}))"
    factors = [x] * int(whole)
    if exponent == Fraction(-1, 2):
        return f"tl.rsqrt({x})"
    if rest:
        factors.append(f"tl.sqrt({x})")
    text = " * ".join(factors) or "1.0"
    return text if exponent > 0 else f"1.0 / ({text})"
