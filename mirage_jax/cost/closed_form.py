"""Bytes and operations of a program and of its replacement as formulas, and the sizes at which they cross: for people.

Input: two kernel graphs of library operators with the same inputs. Output: lines of text, such as

    FLOP: 4 i^2 j + i j -> 4 i j^2 + i j, fewer where i > j

Axes of equal size share one symbol, so a formula holds for the program at sizes that stay equal. A crossing is a root
of the difference along the largest size. If only the ratio of two sizes matters, the root is a ratio; otherwise the
other sizes keep their values. sympy loads slowly, so only a report with such lines imports it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from mirage_jax.mugraph.footprint import totals
from mirage_jax.mugraph.graph import Axis, KernelGraph, Library
from mirage_jax.mugraph.passes.merge_axes import merge_axes

MAX_FORMULA_CHARACTERS = 60  # a longer formula is not printed; its crossing is
MAX_KERNELS = 60  # of a graph that formulas are made for
MAX_DEGREE = 6  # of a difference whose roots are looked for


@functools.lru_cache(maxsize=64)
def closed_forms(program: KernelGraph, graph: KernelGraph) -> tuple[str, ...]:
    """Write a line for the sizes, one for operations and one for bytes; none if the graphs cannot be compared so."""
    program = merge_axes(program)
    kernels = (*program.kernels, *graph.kernels)
    is_small = len(kernels) <= MAX_KERNELS and all(isinstance(k, Library) for k in kernels)
    names = _names(program)
    if not is_small or program.inputs != graph.inputs or not {size for _, size in graph.extents} <= set(names):
        return ()
    sizes = ", ".join(f"{' = '.join(axes)} = {size:,}" for size, axes in names.items() if size > 1)
    return f"sizes: {sizes}", *_lines(program, graph, {size: axes[0] for size, axes in names.items()})


def _names(graph: KernelGraph) -> dict[int, list[Axis]]:
    """The axes of each size, the largest size first."""
    found: dict[int, list[Axis]] = {}
    for axis, size in sorted(graph.extents, key=lambda item: (-item[1], item[0])):
        found.setdefault(size, []).append(axis)
    return found


def _lines(program: KernelGraph, graph: KernelGraph, names: dict[int, Axis]) -> tuple[str, ...]:
    import sympy  # pyright: ignore[reportMissingTypeStubs]

    symbols = {n: sympy.Symbol(name, positive=True) if n > 1 else sympy.Integer(1) for n, name in names.items()}
    at = {symbol: n for n, symbol in symbols.items() if n > 1}

    def counts(of: KernelGraph) -> list[Any]:
        """Operations and bytes."""
        moved, flops, _ = totals(of, lambda axis: symbols[of.extent(axis)])
        return [sympy.nsimplify(sympy.expand(x), rational=True) for x in (flops, moved)]

    rows = zip(("FLOP", "bytes"), counts(program), counts(graph), strict=True)
    return tuple(f"{name}: {_formulas(before, after)}{_compared(before - after, at)}" for name, before, after in rows)


def _formulas(before: Any, after: Any) -> str:
    texts = [str(x).replace("**", "^").replace("*", " ") for x in (before, after)]
    return "" if max(map(len, texts)) > MAX_FORMULA_CHARACTERS else f"{texts[0]} -> {texts[1]}, "


def _compared(saved: Any, at: dict[Any, int]) -> str:
    """Compare by the sign of the difference `saved` at the sizes `at`; say where it keeps this sign."""
    import sympy

    now = sympy.expand(saved).subs(at)
    if now == 0:
        return "as many"
    word = "fewer" if now > 0 else "more"
    used = sorted(saved.free_symbols, key=lambda s: (-at[s], str(s)))
    if not used:
        return word
    _, poly = sympy.Poly(saved, *used).terms_gcd()  # a common factor is positive
    used = [s for s in used if poly.degree(s) > 0]
    if not used or poly.total_degree() > MAX_DEGREE:
        return f"{word} at {'these' if used else 'all'} sizes"
    return f"{word} {_range(poly.as_expr(), used, at)}"


def _range(saved: Any, used: list[Any], at: dict[Any, int]) -> str:
    """Find the values of the largest size for which `saved` keeps its sign, ``where i > 1.62 j``."""
    import sympy

    largest, *others = used
    if len(others) == 1 and sympy.Poly(saved, *used).is_homogeneous:
        (other,) = others
        ends = _ends(saved.subs(other, 1), at[largest] / at[other], 0.0)
        return _where(str(largest), *ends, f" {other}") or "at all sizes"
    where = _where(str(largest), *_ends(saved.subs({s: at[s] for s in others}), at[largest], 1.0), "")
    if not others:
        return where or "at all sizes"
    return ", ".join([where or f"for all {largest}", "with " + ", ".join(f"{s} = {at[s]:,}" for s in others)])


def _ends(saved: Any, here: float, least: float) -> tuple[float, float]:
    """Find the interval around `here` where a polynomial of one symbol keeps its sign: from 0 to infinity at most."""
    import sympy

    if saved.is_number:
        return 0.0, math.inf
    roots = [float(root) for root, times in sympy.real_roots(saved, multiple=False) if times % 2]
    low = max((x for x in roots if x < here), default=0.0)
    return low if low >= least else 0.0, min((x for x in roots if x > here), default=math.inf)


def _where(name: str, low: float, high: float, unit: str) -> str:
    """``where i > 1.62 j``, ``where i < 40`` or ``where 2 < i < 40``; empty without ends."""
    if high < math.inf:
        return f"where {_times(low, unit) + ' < ' if low else ''}{name} < {_times(high, unit)}"
    return f"where {name} > {_times(low, unit)}" if low else ""


def _times(factor: float, unit: str) -> str:
    """A factor with three digits in front of a size; 1 is left out."""
    text = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
    return unit.strip() if unit and text == "1" else text + unit
