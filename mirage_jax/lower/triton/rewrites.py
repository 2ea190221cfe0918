"""Rewrites of a block graph before its text is emitted: scale factors move to places where they cost or round less."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from mirage_jax.lower.triton.expressions import number, reduced
from mirage_jax.mugraph.dtypes import SIXTEEN_BIT_FLOATS
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Op
from mirage_jax.mugraph.operators import ACCUMULATORS


def move_factors_after_products(kernel: BlockGraph, graph: KernelGraph) -> BlockGraph:
    """Multiply the results of matrix products by factors, instead of their operands.

    before -> after:  dot(mul(factor, tile), other)  ->  mul(factor, dot(tile, other))

    `tile` comes from a 16-bit tensor and `factor` lacks the summed axes. The product then reads the tile as it is, with
    no operand to round or split. It costs a multiplication per element of the result, so only kernels that
    split operands are written this way. Products that are accumulated in place stay as they are.
    """
    summed = {op.args[0] for op in kernel.ops if op.op in ACCUMULATORS}
    tiles = {x.name for x in kernel.loads if graph.tensors[x.tensor].dtype in SIXTEEN_BIT_FLOATS}
    out: list[Op] = []
    for op in kernel.ops:
        if op.op == "dot" and op.name not in summed:
            out += _with_factors_last(kernel, op, tiles)
        else:
            out.append(op)
    return replace(kernel, ops=tuple(out))


def _with_factors_last(kernel: BlockGraph, dot: Op, tiles: set[str]) -> list[Op]:
    """A product of tiles, then the multiplications by the factors of its operands."""
    found = [_tile_and_factor(kernel, dot, a, tiles) for a in dot.args]
    factors = [factor for _, factor in found if factor]
    names = [f"{dot.name}f{n}" for n in range(len(factors))] + [dot.name]
    product = replace(dot, name=names[0], args=tuple(tile for tile, _ in found))
    return [product, *(Op(names[n + 1], "mul", (names[n], f), dot.axes) for n, f in enumerate(factors))]


def _tile_and_factor(kernel: BlockGraph, dot: Op, arg: str, tiles: set[str]) -> tuple[str, str]:
    """The tile and the factor of an operand that is their product; the operand itself and "" otherwise."""
    scaled = next((op for op in kernel.ops if op.name == arg and op.op == "mul"), None)
    for tile, factor in zip(scaled.args, scaled.args[::-1], strict=True) if scaled else ():
        has_all_axes = set(kernel.axes_of[tile]) == set(kernel.axes_of[arg])
        if tile in tiles and has_all_axes and not set(kernel.axes_of[factor]) & set(reduced(dot)):
            return tile, factor
    return arg, ""


def move_scales_into_exponentials(kernel: BlockGraph) -> BlockGraph:
    """Let the maxima and exponentials of logits apply the scale of the logits.

    before -> after:  s = affine{scale=c} x; t = mask p s; m = shift t;        p = exps t m
                      t = mask p x;                        m = shift{scale=c} t; p = exps{scale=c} t m

    x is a matrix product and c positive. The exponential of a logit straight from a matrix product costs one fma and
    one exp2 (`ops.softmax`), with c folded into the constant of the fma.
    """
    ops = {op.name: op for op in kernel.ops}
    scales: dict[str, Fraction] = {}
    products: dict[str, str] = {}  # by the names of the scaled ones
    for op in kernel.ops:
        if _is_scaled_product(op, ops) and (logits := _logits(kernel, op.name)):
            scales |= dict.fromkeys(logits, _scale(op))
            products[op.name] = op.args[0]

    def scaled(op: Op) -> Op:
        attributes = op.attributes
        if op.op in ("shift", "exps") and op.args[0] in scales:
            attributes["scale"] = _scale(op) * scales[op.args[0]]
        args = tuple(products.get(a, a) for a in op.args)
        return replace(op, args=args, attrs=tuple(sorted(attributes.items())))

    return replace(kernel, ops=tuple(scaled(op) for op in kernel.ops if op.name not in products))


def _is_scaled_product(op: Op, ops: dict[str, Op]) -> bool:
    if op.op != "affine" or op.attributes.get("offset") or op.args[0] not in ops:
        return False
    return ops[op.args[0]].op == "dot" and _scale(op) > 0


def _logits(kernel: BlockGraph, name: str) -> set[str]:
    """A value and its masked forms, if only maxima and exponentials read them; else nothing."""
    if any(s.value == name for s in kernel.stores):
        return set()
    found = {name}
    for user in (op for op in kernel.ops if op.name in kernel.users[name]):
        if user.op == "mask" and user.args[0] != name:
            masked = _logits(kernel, user.name)
            if not masked:
                return set()
            found |= masked
        elif user.op not in ("shift", "exps") or name in user.args[1:]:
            return set()
    return found


def _scale(op: Op) -> Fraction:
    return number(op, "scale", 1).value
