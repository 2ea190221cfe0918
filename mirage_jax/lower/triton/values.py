"""Values of a kernel as f32 tiles: loads, stores, pointwise operators and exponentials relative to a shift.

Everything is emitted where it is first needed. For every padded axis of a value we track what its padded lanes hold, by
evaluating the operators' own meaning on the constants there (a masked load holds 0); reductions then select only where
that is not already neutral.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.lower.tiling import SINGLE
from mirage_jax.lower.triton.expressions import (
    OCTAVE,
    PER_OCTAVE,
    UNIT,
    Number,
    TileVariable,
    attr,
    literal,
    number,
    reduced,
)
from mirage_jax.lower.triton.frame import Frame
from mirage_jax.mugraph.dtypes import DTYPES, FLOATS
from mirage_jax.mugraph.graph import Axis, Load, Op, Store, Tensor, split_axis
from mirage_jax.mugraph.operators import ACCUMULATORS, COMPARISONS, FUNCTIONS, KEEPS_NAN, operator

TRITON_TYPES = {name: dtype.triton for name, dtype in DTYPES.items() if dtype.triton}
MAX_FACTORS = 8  # of a power that is written as a product

type Rule = Callable[[Any, Op], TileVariable]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Declare how an operator without a template in its record is emitted."""

    def register(method: Rule) -> Rule:
        RULES[name] = method
        return method

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
        return float(np.exp(np.float64(x)))

    def function(self, name: str, args: Sequence[float]) -> float:
        return float(FUNCTIONS[name].value(np, *map(np.float64, args)))


class Values(Frame):
    """Tiles of values by name."""

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
                self.env[key] = self.value(same) if same != name else RULES.get(op.op, Values.pointwise)(self, op)
        return self.env[key]

    def unmasked(self, name: str) -> str:
        """What a value is where the predicates hold that mask it."""
        op = self.ops.get(name)
        if op is None or op.op not in ("mask", "where") or op.args[0] not in self.holding:
            return name
        has_all_axes = set(op.axes) <= set(self.graph.axes_of[op.args[1]])  # or it is not as large as what is masked
        return self.unmasked(op.args[1]) if has_all_axes else name

    def loaded(self, load: Load) -> TileVariable:
        raw = self.raw(load, "tile")
        if self.tiling.graph.tensors[load.tensor].dtype == "f32":
            return raw
        return TileVariable(self.w.let("x", f"{raw.text}.to(tl.float32)"), raw.dims, raw.pads)

    def _is_integer_load(self, name: str) -> bool:
        return name in self.loads and self.tiling.graph.tensors[self.loads[name].tensor].dtype == "i32"

    def natural(self, name: str) -> TileVariable:
        """A value in the graph's own unit."""
        value = self.value(name)
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
            text = f"-{text}" if float(scale) == -1.0 else f"{text} * {self.literal(scale)}"
        if float(offset) != 0.0:
            text = f"{text} + {self.literal(offset)}"
        return text

    # --- pointwise operators

    def pointwise(self, op: Op) -> TileVariable:
        """Any operator whose record has a Triton template."""
        record = operator(op.op)
        if not record.triton:
            raise UnsupportedError(f"operator {op.op} has no Triton text")
        dims = self.tiling.dims(op.axes)
        if op.op in COMPARISONS and all(map(self._is_integer_load, op.args)):  # float32 would round some to one number
            args = [self.raw(self.loads[a], "tile") for a in op.args]
        else:
            args = [self.natural(a) for a in op.args]
        texts = [self.at(v, dims) for v in args]
        if record.arity == 1:
            texts = [self.affine(op, args[0], dims)]
            if not texts[0].isidentifier() and record.triton != "{0}":
                texts = [self.w.let("scaled", texts[0])]
        return self.made(op, record.triton.format(*texts), args)

    @rule("const")
    def const(self, op: Op) -> TileVariable:
        value = number(op, "value")
        name = self.w.let("const", self.full((), self.literal(value)))
        return TileVariable(name, constant=float(value))

    @rule("iota")
    def iota(self, op: Op) -> TileVariable:
        (axis,) = op.axes
        index = self.env["index", axis]
        if index == "0":
            return TileVariable(self.w.let("iota", self.full((), "0.0")), constant=0.0)
        return TileVariable(self.w.let("iota", f"{index}.to(tl.float32)"), self.tiling.dims((axis,)))

    @rule("add")
    def add(self, op: Op) -> TileVariable:
        dims = self.tiling.dims(op.axes)
        args = [self.natural(a) for a in op.args]
        x, y = (self.at(v, dims) for v in args)
        ca, cb = number(op, "ca", 1), number(op, "cb", 1)
        left = x if float(ca) == 1.0 else f"-{x}" if float(ca) == -1.0 else f"{x} * {self.literal(ca)}"
        right = y if abs(float(cb)) == 1.0 else f"{y} * {self.literal(Number(abs(cb.value)))}"
        return self.made(op, f"{left} {'-' if cb.value < 0 else '+'} {right}", args)

    @rule("pow")
    def pow(self, op: Op) -> TileVariable:
        x = self.natural(op.args[0])
        text = self.affine(op, x, x.dims)
        if not text.isidentifier():
            text = self.w.let("scaled", text)
        return self.made(op, self.power(text, Fraction(attr(op, "exponent"))), [x])

    def power(self, x: str, exponent: Fraction) -> str:
        """``x ** exponent`` for a name `x`: products for integers, roots for halves, exp2 of the logarithm for the
        rest.
        """
        whole, rest = divmod(abs(exponent), 1)
        if rest not in (0, Fraction(1, 2)) or whole > MAX_FACTORS:
            times = self.literal(Number(exponent))
            if exponent.denominator == 1:
                magnitude = f"tl.exp2({times} * tl.log2(tl.abs({x})))"
                return f"tl.where({x} < 0, -{magnitude}, {magnitude})" if exponent % 2 else magnitude
            return f"tl.exp2({times} * tl.log2({x}))"
        factors = [x] * int(whole)
        if exponent == Fraction(-1, 2):
            return f"tl.rsqrt({x})"
        if rest:
            factors.append(f"tl.sqrt({x})")
        text = " * ".join(factors) or "1.0"
        return text if exponent > 0 else f"1.0 / ({text})"

    @rule("exp")
    def exp(self, op: Op) -> TileVariable:
        x = self.natural(op.args[0])
        scale, offset = (number(op, name, default) * PER_OCTAVE for name, default in (("scale", 1), ("offset", 0)))
        text = f"{x.text} * {self.literal(scale)}" + (f" + {self.literal(offset)}" if offset.value else "")
        return self.made(op, f"tl.exp2({text})", [x])

    # --- exponentials relative to a shift

    def finite(self, shift: TileVariable) -> TileVariable:
        """A shift to subtract: 0 where nothing has been seen yet (-inf), since -inf - -inf is no number."""
        if shift.settled:
            return shift
        key = ("finite", shift.text)
        if key not in self.env:
            text = f'tl.where({shift.text} == float("-inf"), 0.0, {shift.text})'
            self.env[key] = TileVariable(self.w.let("finite", text), shift.dims, unit=shift.unit)
        return self.env[key]

    @rule("exps")
    def exps(self, op: Op) -> TileVariable:
        dims = self.tiling.dims(op.axes)
        x, m = self.natural(op.args[0]), self.finite(self.value(op.args[1]))
        scale, text, shift = number(op, "scale", 1), self.at(x, dims), self.at(m, dims)
        if m.unit != UNIT or not self.from_product(op.args[0]):
            moved = self.difference(text, scale, shift, m.unit)
        elif self.tiling.schedule.precise:
            moved = f"({self.fma(text, scale, shift, UNIT)}) * {self.literal(PER_OCTAVE)}"
        else:
            moved = self.fma(text, scale * PER_OCTAVE, shift, PER_OCTAVE)
        return self.made(op, f"tl.exp2({moved})", [x, m])

    def difference(self, x: str, x_unit: Number, y: str, y_unit: Number, degree: Number = UNIT) -> str:
        """``degree * (x * x_unit - y * y_unit) * log2(e)``.

        Equal units are applied after the subtraction, which then cancels exactly.
        """
        a, b = x_unit * degree * PER_OCTAVE, y_unit * degree * PER_OCTAVE
        if a == b:
            return f"{x} - {y}" if a == UNIT else f"({x} - {y}) * {self.literal(a)}"
        return self.fma(x, a, y, b)

    def fma(self, x: str, a: Number, y: str, b: Number) -> str:
        """``x * a - y * b``, where `y` has fewer elements. The compiler has no choice, or it would round in one kernel
        what it does not in another, where both compute the same exponential.
        """
        subtracted = y if b == UNIT else f"({y} * {self.literal(b)})"
        return f"{x} - {subtracted}" if a == UNIT else f"tl.fma({x}, {self.literal(a)}, -{subtracted})"

    @rule("logs")
    def logs(self, op: Op) -> TileVariable:
        dims = self.tiling.dims(op.axes)
        x, m = self.natural(op.args[0]), self.natural(op.args[1])
        shift, degree = self.at(m, dims), float(attr(op, "degree", 1))
        total = f"tl.log({self.at(x, dims)}) + {shift if degree == 1 else f'{shift} * {literal(degree)}'}"
        return self.made(op, f'tl.where({shift} == float("inf"), {shift}, {total})', [x, m])

    @rule("lesslogs")
    def lesslogs(self, op: Op) -> TileVariable:
        dims = self.tiling.dims(op.axes)
        y, x, m = map(self.natural, op.args)
        log = TileVariable(self.w.let("log", f"tl.log({x.text})"), x.dims)
        shift, degree = self.at(m, dims), float(attr(op, "degree", 1))
        moved = f"{self.at(y, dims)} - {shift if degree == 1 else f'{shift} * {literal(degree)}'}"
        text, scale = f"({moved}) - {self.at(log, dims)}", number(op, "scale", 1)
        return self.made(op, text if scale == UNIT else f"({text}) * {self.literal(scale)}", [y, x, m])

    @rule("rescale")
    def rescale(self, op: Op) -> TileVariable:
        dims = self.tiling.dims(op.axes)
        x, old, new = self.natural(op.args[0]), self.value(op.args[1]), self.finite(self.value(op.args[2]))
        degree = number(op, "degree", 1)
        moved = self.difference(self.at(old, dims), old.unit, self.at(new, dims), new.unit, degree)
        return self.made(op, f"{self.at(x, dims)} * tl.exp2({moved})", [x, old, new])

    def from_product(self, name: str) -> bool:
        """Is a value the result of a matrix product, possibly masked with minus infinity?"""
        op = self.ops.get(name)
        return op is not None and (op.op == "dot" or (op.op == "mask" and self.from_product(op.args[1])))

    @rule("shift")
    def shift(self, op: Op) -> TileVariable:
        """The maximum of ``scale * x``, in the unit in which its exponentials need no further rounding.

        Logits straight from a matrix product are kept times log2(e), so that an exponential costs one fma and one exp2.
        Others may be masked with huge numbers, for which that fma would not cancel: these stay in the unit of x.

        A shift that is stored is rounded as it is stored: another kernel that divides exponentials by their sum makes
        them from what was stored, and each must be, bit for bit, what was added up here, or large logits do not cancel.
        """
        x, scale = self.value(op.args[0]), number(op, "scale", 1)
        is_product = self.from_product(op.args[0]) and x.unit == UNIT and scale.value > 0
        if scale.value <= 0:
            x, unit, factor = self.natural(op.args[0]), UNIT, UNIT
            x = TileVariable(self.w.let("scaled", f"{x.text} * {self.literal(scale)}"), x.dims)
        elif is_product and self.is_stored(op.name):
            unit, factor = UNIT, scale
        elif is_product:
            unit, factor = OCTAVE, scale * PER_OCTAVE
        else:
            unit, factor = scale * x.unit, UNIT
        text = self.maximum(op, x)
        if factor != UNIT:
            text = f"{text} * {self.literal(factor)}"
        source = self.ops.get(self.unmasked(op.args[0]))
        settled = (
            is_product
            and (self.loop_bounds is None or bool(self.holding))
            and source is not None
            and source.op == "dot"
            and not any(self.axes[a].short_part for a in reduced(op) if a in self.axes)
        )
        return self.carried(op, text, unit, settled)

    @property
    def lows(self) -> dict[str, str]:
        """By shift, text of which elements are not above their bound (1, else 0), NaN among them."""
        found: dict[str, str] = {}
        for guard in self.form.guards:
            shift = self.value(guard.shift)
            bound = Number(guard.bound / shift.unit.value, -shift.unit.logs)
            text = f"1 - ({shift.text} > {self.literal(bound)}).to(tl.int32)"
            mask = self.mask(self.graph.axes_of[guard.shift], shift.dims)
            found[guard.shift] = f"tl.where({mask}, {text}, 0)" if mask else text
        return found

    def is_stored(self, shift: str) -> bool:
        """Is a shift, or the last value of a running one, there for other kernels?"""
        names = {shift, *(op.name for op in self.graph.ops if op.op == "last" and op.args[0] == shift)}
        return any(s.value in names for s in self.graph.stores)

    @rule("max")
    def max(self, op: Op) -> TileVariable:
        """The maximum, or NaN where there is one: ``tl.max`` leaves it out. (It may be left out of a shift.)"""
        x = self.natural(op.args[0])
        text = self.maximum(op, x)
        if axes := [a for a in reduced(op) if a in x.dims]:
            lost = self.zeroed(TileVariable(self.w.let("lost", f"({x.text} != {x.text}).to(tl.float32)"), x.dims), axes)
            text = f"tl.where({self.reduction('tl.max', lost, axes)} > 0.0, float('nan'), {text})"
        return self.carried(op, text, UNIT)

    def maximum(self, op: Op, x: TileVariable) -> str:
        axes = [a for a in reduced(op) if a in self.graph.axes_of[op.args[0]]]
        return self.reduction("tl.max", self.zeroed(x, axes, -math.inf), axes)

    def carried(self, op: Op, text: str, unit: Number, settled: bool = False) -> TileVariable:
        """A maximum; a running one if it reduces the axis of the loop."""
        dims = self.tiling.dims(op.axes)
        if ("carried", op.name) in self.env:
            keeps_nan = f", {KEEPS_NAN}" if op.op == "max" else ""
            text = f"tl.maximum({self.env['carried', op.name]}, {text}{keeps_nan})"
        return TileVariable(self.w.let(op.op, text), dims, unit=unit, settled=settled)
