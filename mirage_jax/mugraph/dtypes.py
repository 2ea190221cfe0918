"""The types of elements: one record each, read by every stage. To support another type, add a record here."""

# ml_dtypes and numpy type what they know of types partially.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy

from mirage_jax.errors import GraphError


@dataclass(frozen=True, slots=True)
class DType:
    """A type by the name that muGraphs have for it."""

    name: str  # "bf16"
    numpy: Any
    triton: str = ""  # as kernels' texts call it; "" if kernels have no tensors of it
    signature: str = ""  # as signatures of compiled kernels call it, if kernels have tensors of it
    in_programs: bool = True  # whether arrays of captured programs may have it

    @property
    def long_name(self) -> str:
        """Name the type as JAX and numpy do: ``"bfloat16"``."""
        return self.numpy.name

    @property
    def bytes(self) -> int:
        """Bytes of one element; kernels too store a truth value in one."""
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        """Tell floats from integers and truth values."""
        return self.numpy.kind == "f" or self.numpy == ml_dtypes.bfloat16

    @property
    def range(self) -> tuple[float, float]:
        """Bound the finite numbers of the type."""
        if self.name == "bool":
            return 0.0, 1.0
        info: Any = ml_dtypes.finfo(self.numpy) if self.is_float else numpy.iinfo(self.numpy)
        return float(info.min), float(info.max)


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("f16", numpy.dtype("float16"), "tl.float16", "fp16"),
        DType("bf16", numpy.dtype(ml_dtypes.bfloat16), "tl.bfloat16", "bf16"),
        DType("f32", numpy.dtype("float32"), "tl.float32", "fp32"),
        DType("f64", numpy.dtype("float64")),
        DType("i32", numpy.dtype("int32"), "tl.int32", "i32"),
        DType("i64", numpy.dtype("int64"), in_programs=False),
        DType("i8", numpy.dtype("int8"), "tl.int8", "i8"),
        DType("u8", numpy.dtype("uint8"), "tl.uint8", "u8"),
        DType("bool", numpy.dtype("bool"), "tl.int1", "i1"),
    )
}
BYTES = {name: dtype.bytes for name, dtype in DTYPES.items()}
FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype.is_float)
SIXTEEN_BIT_FLOATS = tuple(name for name in FLOATS if BYTES[name] == 2)
# 16-bit floats hold all of their numbers
SMALL_INTEGERS = tuple(
    name for name in DTYPES if name not in FLOATS and BYTES[name] == 1
)  # 16-bit floats hold them all


def numpy_dtype(short: str) -> Any:
    """``"f16" -> dtype("float16")``.

    Raises:
        GraphError: there is no such type.
    """
    try:
        return DTYPES[short].numpy
    except KeyError:
        raise GraphError(f"unknown dtype {short!r}; known: {', '.join(DTYPES)}") from None


def is_float(dtype: Any) -> bool:
    """Tell numpy's types of floats, bfloat16 included, from its other types."""
    return numpy.dtype(dtype) in [DTYPES[name].numpy for name in FLOATS]


def is_sixteen_bit_float(dtype: Any) -> bool:
    """Tell float16 and bfloat16 from numpy's other types."""
    return numpy.dtype(dtype) in [DTYPES[name].numpy for name in SIXTEEN_BIT_FLOATS]


def is_small_integer(dtype: Any) -> bool:
    """Tell the types whose numbers every type of floats holds from numpy's other types."""
    return numpy.dtype(dtype) in [DTYPES[name].numpy for name in SMALL_INTEGERS]


def holds(dtype: Any, number: Fraction) -> bool:
    """Is a number one of the type's own, so that nothing is rounded?"""
    with numpy.errstate(all="ignore"):
        own = float(numpy.asarray(float(number)).astype(dtype))
    return math.isfinite(own) and Fraction(own) == number


def is_power_of_two(x: Fraction) -> bool:
    """Is a product with it exact in every binary float?"""
    return x > 0 and all(n & (n - 1) == 0 for n in x.as_integer_ratio())


def lowest(dtype: Any) -> float:
    """The most negative finite number of numpy's type of floats."""
    return float(ml_dtypes.finfo(dtype).min)
