"""The cost model's estimate of a kernel as a formula in extents and tile sizes, for people and for reuse over shapes.

It evaluates `roofline` over sympy expressions. It is a module of its own because no search needs sympy, which takes
longer to import than the rest of the package.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy  # pyright: ignore[reportMissingTypeStubs]

from mirage_jax.cost.outline import outline
from mirage_jax.cost.roofline import STAGES, WARPS, Number, seconds, terms
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph


class Symbols:
    """Arithmetic on sympy expressions."""

    @staticmethod
    def ceil(a: Number, b: Number) -> Number:
        """Divide and round up."""
        return sympy.ceiling(sympy.sympify(a) / b)  # pyright: ignore[reportUnknownArgumentType]

    maximum = sympy.Max
    minimum = sympy.Min


def formula(
    kernel: BlockGraph, graph: KernelGraph, device: DeviceModel, warps: int = WARPS[0], stages: int = STAGES[1]
) -> sympy.Expr:
    """Write a kernel's seconds as a sympy expression: ``k`` is an extent, ``T_k`` the tile of a divided axis."""

    def symbol(prefix: str) -> Callable[[Axis], sympy.Symbol]:
        """Name sizes along axes."""
        return lambda a: sympy.Symbol(prefix + a, positive=True, integer=True)

    return seconds(terms(outline(kernel, graph), symbol(""), symbol("T_"), Symbols), device, Symbols, warps, stages)
