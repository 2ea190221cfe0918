"""Windows that do not overlap. Convolutions over them are matrix products: 1 x 1, patches, and their gradients for
weights. Sums and maxima over them, as pooling takes them, are sums and maxima over axes.

Each dimension that windows move along is divided in two. One part meets the window:

    window = stride (1 x 1: both are 1)    h = (result, window)    sum over the window
    window = the whole dimension           h = (1, window)         the same
    window dilated by its dilation         h = (window, result)    the same: the gradient for weights of a patch

All other windows overlap, and stay with XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible

WHOLE, KEPT, SUMMED = "whole", "kept", "summed"  # what becomes of a dimension of the operand, or of a part of it
# How windows move: parameters of `conv_general_dilated` and of `reduce_window_sum`, in one order.
MOVES_OF_CONVOLUTIONS = ("window_strides", "rhs_dilation", "lhs_dilation", "padding")
MOVES_OF_REDUCTIONS = ("window_strides", "window_dilation", "base_dilation", "padding")


@dataclass(frozen=True)
class Product:
    """A convolution as a reshape of its operand, a product, and a transposition of the result.

    `sums`: dimensions of the reshaped operand and of the weights that are summed, in pairs.
    """

    shape: tuple[int, ...]
    sums: tuple[tuple[int, ...], tuple[int, ...]]
    permutation: tuple[int, ...]


def as_product(params: Mapping[str, Any], shape: Sequence[int], weights: Sequence[int]) -> Product:
    """Take a `conv_general_dilated` of an operand and weights of such shapes apart.

    Raises:
        NotExpressible: its windows overlap, or it has groups.
    """
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        raise NotExpressible(Code.PARAMETERS, "a convolution in groups")
    numbers = params["dimension_numbers"]
    (batch, features, *places), (_, given, *windows) = numbers.lhs_spec, numbers.rhs_spec
    sizes = map(shape.__getitem__, places), map(weights.__getitem__, windows)
    moves = zip(*sizes, *map(params.__getitem__, MOVES_OF_CONVOLUTIONS), strict=True)
    halves = {d: _halves(*move) for d, move in zip(places, moves, strict=True)}
    parts = [(d, role) for d in range(len(shape)) for role in halves.get(d, (WHOLE,))]
    at = {part: n for n, part in enumerate(parts)}
    sums = [at[features, WHOLE], *(at[d, SUMMED] for d in places)]
    kept = [n for n in range(len(parts)) if n not in sums]  # by the product, which puts the new features last
    results = [kept.index(at[batch, WHOLE]), len(kept), *(kept.index(at[d, KEPT]) for d in places)]
    return Product(
        tuple(shape[d] if role == WHOLE else halves[d][role] for d, role in parts),
        (tuple(sums), (given, *windows)),
        tuple(results[numbers.out_spec.index(d)] for d in range(len(results))),
    )


def as_reduction(params: Mapping[str, Any], shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Take a `reduce_window_sum`, or `_max` or `_min`, of an operand of this shape apart: the operand reshaped so, and
    then reduced over these dimensions.

    Raises:
        NotExpressible: its windows overlap.
    """
    moves = zip(shape, params["window_dimensions"], *map(params.__getitem__, MOVES_OF_REDUCTIONS), strict=True)
    parts = [part for move in moves for part in _halves(*move).items()]
    return tuple(size for _, size in parts), tuple(n for n, (role, _) in enumerate(parts) if role == SUMMED)


def windows_overlap(primitive: str, params: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> bool:
    """Is an equation on operands of these shapes no product, and no reduction of axes, because of its windows?"""
    if primitive not in WINDOWED:
        return False
    try:
        WINDOWED[primitive](params, *shapes)
    except NotExpressible:
        return True
    return False


def _halves(size: int, window: int, stride: int, dilation: int, spread: int, padding: Sequence[int]) -> dict[str, int]:
    """Two factors of a dimension of the operand, in order: one is summed by the window, one is kept.

    dilation, spread: the steps between elements of the window, and of the operand.
    """
    is_whole = window == size
    is_patch = window == stride and size % window == 0
    is_dilated_whole = stride == 1 and window * dilation == size
    if spread == 1 and tuple(padding) == (0, 0):
        if dilation == 1 and (is_whole or is_patch):
            return {KEPT: size // window, SUMMED: window}
        if dilation > 1 and is_dilated_whole:
            return {SUMMED: window, KEPT: dilation}
    raise NotExpressible(Code.PARAMETERS, f"windows of {window} that overlap")


WINDOW_REDUCTIONS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min")
WINDOWED: dict[str, Callable[..., Any]] = {  # how the primitives that have windows are taken apart
    "conv_general_dilated": as_product,
    **dict.fromkeys(WINDOW_REDUCTIONS, as_reduction),
}
