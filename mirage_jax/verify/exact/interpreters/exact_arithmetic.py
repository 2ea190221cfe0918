"""The arithmetic of Triton's interpreter on exact numbers (`mugraph.domains.exact`): a kernel's own text with another
meaning.

Tiles of floats of any width become arrays of exact numbers; casts between them do nothing. Indices, masks, addresses
and loops stay what they are. A literal means the number that the emitter recorded for it (`KernelSource.numbers`), else
its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.triton.expressions import Number
from mirage_jax.mugraph.domains import exact

type Patch = tuple[Any, str, Any]

BINARY: Mapping[Callable[..., Any], Callable[..., Any]] = {
    np.add: exact.add,
    np.subtract: exact.subtract,
    np.multiply: exact.multiply,
    np.divide: exact.divide,
    np.maximum: exact.maximum,
    np.fmax: exact.maximum,
    np.minimum: exact.minimum,
    np.fmin: exact.minimum,
    np.less: exact.less,
    np.less_equal: exact.less_equal,
    np.greater: lambda x, y: exact.less(y, x),
    np.greater_equal: lambda x, y: exact.less_equal(y, x),
    np.equal: exact.equal,
    np.not_equal: lambda x, y: ~exact.equal(x, y),
}
UNARY: Mapping[Callable[..., Any], Callable[..., Any]] = {
    np.negative: exact.negative,
    np.exp: exact.exp,
    np.exp2: exact.exp2,
    np.log: exact.log,
    np.log2: exact.log2,
    np.sqrt: exact.sqrt,
    np.sin: exact.sin,
    np.cos: exact.cos,
    np.floor: exact.floor,
}


def meaning(value: float, numbers: Mapping[float, Number | None]) -> exact.Numbers:
    """The number that a literal stands for."""
    if not math.isfinite(value):
        return exact.special(value)
    number = numbers.get(value, Number(Fraction(value)))
    if number is None:
        raise UnsupportedError(f"two constants of the kernel are the same float {value!r}")
    out = exact.constant(number.value)
    for _ in range(abs(number.logs)):
        out = exact.multiply(out, exact.LOG2E) if number.logs > 0 else exact.divide(out, exact.LOG2E)
    return out


def exact_patches(interpreter: Any, tl: Any, numbers: Mapping[float, Number | None]) -> list[Patch]:
    """Replacements under which floats are exact numbers."""
    return [*_types(interpreter), *_constants(interpreter, numbers), *_arithmetic(interpreter, tl)]


def _types(interpreter: Any) -> list[Patch]:
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    plain_type, plain_cast = interpreter._get_np_dtype, builder.cast_impl

    def numpy_type(dtype: Any) -> np.dtype:
        """Hold floats of any width as exact numbers."""
        is_float = not hasattr(dtype.scalar, "element_ty") and dtype.scalar.is_floating()
        return exact.EXACT if is_float else plain_type(dtype)

    def cast(self: Any, x: Any, dtype: Any) -> Any:
        """Cast to and from exact numbers; casts between floats do nothing."""
        to, is_exact = dtype.scalar, x.data.dtype == exact.EXACT
        if to.is_floating():
            return handle(x.data if is_exact else exact.integers(x.data), to)
        if not is_exact:
            return plain_cast(self, x, dtype)
        data = ~exact.equal(x.data, exact.ZERO) if to.is_bool() else x.data["p"].astype(plain_type(to))
        return handle(data, to)

    return [
        (interpreter, "_get_np_dtype", numpy_type),
        (interpreter, "_validate_np_data_size", lambda data, dtype: True),
        (builder, "cast_impl", cast),
        (builder, "create_fp_to_fp", lambda self, x, dtype, rounding: cast(self, x, dtype)),
    ]


def _constants(interpreter: Any, numbers: Mapping[float, Number | None]) -> list[Patch]:
    def constant(dtype: Any) -> Callable[..., Any]:
        """Make the constants of one type."""
        return lambda self, value: interpreter.TensorHandle(meaning(float(value), numbers).reshape(1), dtype)

    tl, builder = interpreter.tl, interpreter.InterpreterBuilder
    types = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32, "fp64": tl.float64}
    known = ((f"get_{name}", dtype) for name, dtype in types.items())  # Triton 3.6 has no bf16 constants
    return [(builder, name, constant(dtype)) for name, dtype in known if hasattr(builder, name)]


def _arithmetic(interpreter: Any, tl: Any) -> list[Patch]:
    handle, builder, reduce = interpreter.TensorHandle, interpreter.InterpreterBuilder, interpreter.ReduceOps
    plain_binary, plain_unary, plain_extremum = builder.binary_op, builder.unary_op, reduce.min_max

    def binary(self: Any, x: Any, y: Any, op: Callable[..., Any]) -> Any:
        """Apply an operator of two exact numbers, or the plain one."""
        if x.data.dtype != exact.EXACT:
            return plain_binary(self, x, y, op)
        result = BINARY[op](x.data, y.data)
        return handle(result, tl.int1 if result.dtype == np.bool_ else x.dtype.scalar)

    def unary(self: Any, x: Any, op: Callable[..., Any]) -> Any:
        """Apply an operator of one exact number, or the plain one."""
        return handle(UNARY[op](x.data), x.dtype.scalar) if x.data.dtype == exact.EXACT else plain_unary(self, x, op)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """Multiply and add, without rounding."""
        return handle(exact.add(exact.multiply(x.data, y.data), z.data), z.dtype.scalar)

    def function(f: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of exact numbers."""
        return lambda self, x: handle(f(x.data), x.dtype.scalar)

    def dot(self: Any, x: Any, y: Any, z: Any, *rest: Any) -> Any:
        """Multiply matrices of exact numbers."""
        return handle(exact.add(exact.matmul(x.data, y.data), z.data), z.dtype.scalar)

    def total(self: Any, x: Any) -> Any:
        """Add exact numbers along the axis."""
        return self.to_tensor(exact.total(x.handle.data, (self.axis,)), x.dtype)

    def largest(self: Any, x: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        """Take the maximum of exact numbers along the axis."""
        if x.handle.data.dtype != exact.EXACT:
            return plain_extremum(self, x, val_reduce_op, idx_reduce_op)
        if val_reduce_op is not np.nanmax or idx_reduce_op is not None:
            raise UnsupportedError("of extrema only tl.max has a meaning on exact numbers")
        return self.to_tensor(exact.largest(x.handle.data, self.axis), x.dtype)

    return [
        (builder, "binary_op", binary),
        (builder, "unary_op", unary),
        (builder, "create_fabs", function(exact.absolute)),
        (builder, "create_erf", function(exact.erf)),
        (builder, "create_rsqrt", function(exact.rsqrt)),
        (builder, "create_fma", fma),
        (builder, "create_dot", dot),
        (reduce, "sum", total),
        (reduce, "min_max", largest),
    ]
