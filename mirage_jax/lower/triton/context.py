"""The context of a kernel's emission: its values as f32 tiles, loads and stores, and the registry of operators.

Every value is emitted where it is first needed, by the function that `rule` registered for its operator (`ops`). For
each padded axis of a value we track the number in its padded lanes, by evaluating the operators' own meaning on the
constants there (a masked load gives 0). Reductions then select only where that number is not already neutral.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import numpy as np

from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.lower.tiling import SINGLE
from mirage_jax.lower.triton.expressions import (
    UNIT,
    TileVariable,
    literal,
    number,
)
from mirage_jax.lower.triton.frame import Frame
from mirage_jax.mugraph.dtypes import DTYPES, FLOATS
from mirage_jax.mugraph.graph import Axis, Load, Op, Store, Tensor, split_axis
from mirage_jax.mugraph.operators import ACCUMULATORS, FUNCTIONS, operator

TRITON_TYPES = {name: dtype.triton for name, dtype in DTYPES.items() if dtype.triton}

type Rule = Callable[[Context, Op], TileVariable]

RULES: dict[str, Rule] = {}  # by operator; "*": operators with a Triton template in their record


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register the function that emits an operator."""

    def register(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return register


class Lanes:
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
        """Raises `ArithmeticError` where a finite number's exponential is lost: as a number it is not 0."""
        result = float(np.exp(np.float64(x)))
        if result == 0 and np.isfinite(x):
            raise ArithmeticError
        return result

    def function(self, name: str, args: Sequence[float]) -> float:
        return float(FUNCTIONS[name].value(np, *map(np.float64, args)))


class Context(Frame):
    """The state that functions of operators share: tiles by the name of their value."""

    def raw(self, load: Load, use: str, single: bool = False) -> TileVariable:
        """The tile of a load in the tensor's own type, once per kind of use: a load that feeds a matrix product and
        pointwise operators alike would not be pipelined. Different eviction policies keep the two from being merged."""
        twice = {(load.name, "dot"), (load.name, "tile")} <= self.uses
        key = ("raw", load.name, use if twice else "", single)
        if key not in self.env:
            tensor = self.tiling.graph.tensors[load.tensor]
            if tensor.dtype not in TRITON_TYPES:
                raise UnsupportedError(
                    f"tensor {tensor} has type {tensor.dtype}; kernels take {', '.join(TRITON_TYPES)}"
                )
            axes = (*load.axes, SINGLE) if single else load.axes
            dims = self.tiling.dims(axes)
            text = f"tl.load({self.pointer(tensor, load.axes, dims)}"
            if mask := self.mask(axes, dims):
                text += f", mask={mask}, other={'0.0' if tensor.dtype in FLOATS else '0'}"
            if twice:
                text += ', eviction_policy="evict_last"' if use == "dot" else ""
            pads = {a: 0.0 for a in load.axes if self.axes[a].ragged}
            self.env[key] = TileVariable(self.w.let("load", text + ")"), dims, pads)
        return self.env[key]

    def store(self, store: Store) -> None:
        """Store a value in the type of its tensor. Raises `LoweringError` if blocks would overwrite each other."""
        value = self.natural(store.value)
        axes = store.tensor.axes
        for a, n in self.tiling.programs:
            if n > 1 and a not in axes and split_axis(a) not in axes:
                raise LoweringError(f"{store}: blocks differ along {a}, but the tensor does not have it")
        dims = self.tiling.dims(axes)
        text = self.cast_to(store.tensor, self.at(value, dims))
        mask = self.mask(axes, dims)
        self.write(store.tensor, dims, text, f", mask={mask}" if mask else "")

    def cast_to(self, tensor: Tensor, text: str) -> str:
        """A tile in the type of a tensor."""
        if tensor.dtype == "bool":
            return f"({text} != 0)"
        if tensor.dtype not in TRITON_TYPES:
            raise UnsupportedError(f"tensor {tensor} has type {tensor.dtype}; kernels store {', '.join(TRITON_TYPES)}")
        if tensor.dtype == "f32":
            return text
        return f"{text if text.isidentifier() else f'({text})'}.to({TRITON_TYPES[tensor.dtype]})"

    def write(self, tensor: Tensor, dims: tuple[Axis, ...], text: str, mask: str) -> None:
        """Write a tile to memory."""
        self.w.line(f"tl.store({self.pointer(tensor, tensor.axes, dims)}, {text}{mask})")

    def value(self, name: str) -> TileVariable:
        """The f32 tile of a value; emits it, and what it needs, if it is not in scope yet."""
        key = ("value", name)
        if key not in self.env:
            if name in self.loads:
                self.env[key] = self.loaded(self.loads[name])
            else:
                op = self.ops[name]
                if op.op in ACCUMULATORS or (self.graph.stages[name].body and len(self.env.maps) == 1):
                    raise LoweringError(f"{op}: is needed outside of the loop that makes it")
                same = self.unmasked(name)
                self.env[key] = self.value(same) if same != name else RULES.get(op.op, RULES["*"])(self, op)
        return self.env[key]

    def unmasked(self, name: str) -> str:
        """What a value is where the predicates hold that mask it."""
        op = self.ops.get(name)
        if op is None or op.op not in ("mask", "where") or op.args[0] not in self.holding:
            return name
        has_all_axes = set(op.axes) <= set(self.graph.axes_of[op.args[1]])  # or it is not as large as what is masked
        return self.unmasked(op.args[1]) if has_all_axes else name

    def operand_axes(self, op: Op) -> tuple[Axis, ...]:
        """The axes of all operands, once each."""
        return tuple(dict.fromkeys(a for arg in op.args for a in self.graph.axes_of[arg]))

    def dtype_of(self, load: Load) -> str:
        """The type of the tensor that is loaded."""
        return self.tiling.graph.tensors[load.tensor].dtype

    def loaded(self, load: Load) -> TileVariable:
        """The tile of a load, as float32."""
        raw = self.raw(load, "tile")
        if self.dtype_of(load) == "f32":
            return raw
        return TileVariable(self.w.let("x", f"{raw.text}.to(tl.float32)"), raw.dims, raw.pads)

    def natural(self, name: str) -> TileVariable:
        """A value in the graph's own unit."""
        return self.in_natural_unit(self.value(name))

    def in_natural_unit(self, value: TileVariable) -> TileVariable:
        """The same number in the graph's own unit."""
        if value.unit == UNIT:
            return value
        key = ("natural", value.text)
        if key not in self.env:
            self.env[key] = TileVariable(
                self.w.let("natural", f"{value.text} * {self.literal(value.unit)}"), value.dims
            )
        return self.env[key]

    def zeroed(self, value: TileVariable, axes: Iterable[Axis], neutral: float = 0.0) -> TileVariable:
        """`value` with `neutral` in the padded lanes along `axes`."""
        axes = tuple(a for a in axes if self.axes[a].ragged and value.pads.get(a) != neutral)
        axes = tuple(a for a in axes if self.env.get(("mask", a)))
        if not axes:
            return value
        key = ("neutral", value.text, axes, neutral)
        if key not in self.env:
            mask = self.mask(axes, value.dims)
            text = f"tl.where({mask}, {value.text}, {literal(neutral)})"
            pads = {**value.pads, **dict.fromkeys(axes, neutral)}
            self.env[key] = TileVariable(self.w.let("masked", text), value.dims, pads, value.unit)
        return self.env[key]

    def pads(self, op: Op, args: Sequence[TileVariable]) -> dict[Axis, float]:
        """What padded lanes of a pointwise operator hold, axis by axis."""
        out: dict[Axis, float] = {}
        for a in op.axes:
            lanes = [v.pads.get(a, v.constant) for v in args]
            if not self.axes[a].ragged or None in lanes or any(v.unit != UNIT for v in args):
                continue
            try:
                with np.errstate(all="ignore"):
                    out[a] = operator(op.op).meaning(Lanes(), *lanes, **op.attributes)
            except (ArithmeticError, AttributeError):
                continue
        return out

    def made(self, op: Op, text: str, args: Sequence[TileVariable]) -> TileVariable:
        """Assign the result of a pointwise operator."""
        return TileVariable(self.w.let(op.op, text), self.tiling.dims(op.axes), self.pads(op, args))

    def affine(self, op: Op, value: TileVariable, dims: tuple[Axis, ...]) -> str:
        """``scale * x + offset`` as an operand: a name, or an expression in parentheses."""
        scale, offset = number(op, "scale", 1), number(op, "offset", 0)
        text = self.at(value, dims)
        if float(scale) != 1.0:
            text = f"{text} * {self.literal(scale)}"
        if float(offset) != 0.0:
            text = f"{text} + {self.literal(offset)}"
        return text
