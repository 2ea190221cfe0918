"""Convolutions whose windows do not overlap, as matrix products: 1 x 1, patches, and their gradients for weights.

Each spatial dimension of the operand is divided in two. One part meets the window:

    window = stride (1 x 1: both are 1)    h = (result, window)    sum over the window
    window = the whole dimension           h = (1, window)         the same
    window dilated by its dilation         h = (window, result)    the same: the gradient for weights of a patch

All other windows overlap, and stay with XLA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible

WHOLE, KEPT, SUMMED = "whole", "kept", "summed"  # what becomes of a dimension of the operand, or of a part of it


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
    halves = {d: _halves(params, n, shape[d], weights[w]) for n, (d, w) in enumerate(zip(places, windows, strict=True))}
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


def has_apart_windows(params: Mapping[str, Any], shape: Sequence[int], weights: Sequence[int]) -> bool:
    """Is a convolution a product (`as_product`)?"""
    try:
        as_product(params, shape, weights)
    except NotExpressible:
        return False
    return True


def _halves(params: Mapping[str, Any], n: int, size: int, window: int) -> dict[str, int]:
    """Two factors of a spatial dimension of the operand, in order: one is summed by the window, one is kept."""
    stride, dilation = params["window_strides"][n], params["rhs_dilation"][n]
    is_whole = window == size
    is_patch = window == stride and size % window == 0
    is_dilated_whole = stride == 1 and window * dilation == size
    if params["lhs_dilation"][n] == 1 and tuple(params["padding"][n]) == (0, 0):
        if dilation == 1 and (is_whole or is_patch):
            return {KEPT: size // window, SUMMED: window}
        if dilation > 1 and is_dilated_whole:
            return {SUMMED: window, KEPT: dilation}
    raise NotExpressible(Code.PARAMETERS, f"a convolution whose windows of {window} overlap")
