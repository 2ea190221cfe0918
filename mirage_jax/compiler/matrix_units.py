"""A GPU's products of float32, on a processor: matrix units hold float32 as TF32, with 10 bits of mantissa."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.winner import Winner, as_precise
from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.jaxpr_frontend.jax_compat import JaxprEqn
from mirage_jax.jaxpr_frontend.partition.program import Bind
from mirage_jax.jaxpr_frontend.translate.rules import PRODUCT_PRIMITIVES, asks_for_float32
from mirage_jax.lower.runtime import launch
from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray
from mirage_jax.mugraph.graph import Axis, KernelGraph, Library, Precision


@dataclass(frozen=True)
class _MatrixUnits(FloatDomain):
    """Floats of a GPU, whose matrix units hold float32 as TF32 (`Precision`)."""

    precise: Precision = Precision.FAST

    def dot(self, x: NamedArray, y: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Multiply, with operands of float32 as the units hold them."""
        x, y = self._real(self._of_one_type(x, y)), self._real(self._of_one_type(y, x))
        if x.array.dtype == y.array.dtype == np.float32:
            x, y = (NamedArray(v.axes, _in_tf32(v.array, self.precise)) for v in (x, y))
        return super().dot(x, y, axes)


def _in_tf32(x: jax.Array, precise: Precision) -> jax.Array:
    match precise:
        case Precision.FAST:
            bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
            return lax.bitcast_convert_type(bits, jnp.float32)
        case Precision.ROUNDED:
            return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
        case _:  # the operand, or two numbers that are nearly all of it
            return x


def _bind_in_tf32(bind: Bind, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Evaluate an equation with products of float32 as XLA makes them on a GPU."""
    is_product = eqn.primitive.name in PRODUCT_PRIMITIVES and not asks_for_float32(eqn.params, values)
    if is_product and all(x.dtype == np.float32 for x in values):
        values = [_in_tf32(x, Precision.ROUNDED) for x in values]
    return bind(eqn, values)


@dataclass
class OnMatrixUnits(RegionOnDevice):
    """A region that a processor runs, with products as a GPU rounds them."""

    @property
    def multiplies_in_tf32(self) -> bool:
        """Whether XLA multiplies float32 as TF32."""
        return not self.region.in_float32

    def bound(self, bind: Bind) -> Bind:
        """Round operands of products first."""
        return partial(_bind_in_tf32, bind)

    def runs(self, winner: Winner) -> Callable[..., list[jax.Array]]:
        """Evaluate it as plain JAX, with the products of its kernels."""
        return partial(winner.portable, domain=partial(_MatrixUnits, precise=coarsest(winner)))


def coarsest(winner: Winner) -> Precision:
    """How the coarsest of its kernels multiplies float32: those whose text more precise products would not change use
    no matrix units. Operators that are left to XLA have rounded operands.
    """
    if not winner.has_kernels:
        return Precision.ROUNDED
    own = launch.sources(winner.graph, winner.schedule, winner.options)
    try:
        exact = launch.sources(winner.graph, as_precise(winner.schedule, Precision.FLOAT32), winner.options)
    except (LoweringError, UnsupportedError):  # no such text: all of them may use matrix units
        exact = [None] * len(own)
    kernels = zip(winner.schedule.kernels, own, exact, strict=True)
    return min(
        (Precision.ROUNDED if a is None else k.precise for k, a, b in kernels if a is None or a != b),
        default=Precision.FLOAT32,
    )


def products_left_to_xla(graph: KernelGraph) -> bool:
    """Does a library operator multiply matrices of float32? XLA takes TF32 for some and float32 for others."""
    types = {name: t.dtype for name, t in graph.tensors.items()}
    products = (k for k in graph.kernels if isinstance(k, Library) and k.op.op == "dot")
    return any({types[load.tensor] for load in k.loads} == {"f32"} for k in products)
