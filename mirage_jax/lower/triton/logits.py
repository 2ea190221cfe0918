"""Scaled logits as logits whose exponentials are scaled.

before -> after:  s = affine{scale=c} x; t = mask p s; m = shift t;        p = exps t m
                  t = mask p x;                        m = shift{scale=c} t; p = exps{scale=c} t m

for a matrix product x and a positive c: the exponential of a logit straight from a matrix product costs one fma and one
exp2 (`Values.shift`), with c folded into the constant of the fma.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from mirage_jax.lower.triton.expressions import number
from mirage_jax.mugraph.graph import BlockGraph, Op


def scales_last(kernel: BlockGraph) -> BlockGraph:
    """The kernel with scales of logits moved into their maxima and exponentials."""
    ops = {op.name: op for op in kernel.ops}
    stored = {s.value for s in kernel.stores}

    def logits(name: str) -> set[str]:
        """A value, and the same masked, if nothing else than maxima and exponentials is made of it; else nothing."""
        found = {name}
        for user in (ops[u] for u in kernel.users[name]):
            if user.op == "mask" and user.args[0] != name:
                more = logits(user.name)
                if not more:
                    return set()
                found |= more
            elif user.op not in ("shift", "exps") or name in user.args[1:]:
                return set()
        return set() if name in stored else found

    scales: dict[str, Fraction] = {}
    products: dict[str, str] = {}  # by the names of the scaled ones
    for op in kernel.ops:
        x = ops.get(op.args[0]) if op.op == "affine" and not op.attributes.get("offset") else None
        if x is not None and x.op == "dot" and _scale(op) > 0 and (found := logits(op.name)):
            scales |= dict.fromkeys(found, _scale(op))
            products[op.name] = x.name

    def scaled(op: Op) -> Op:
        attributes = op.attributes
        if op.op in ("shift", "exps") and op.args[0] in scales:
            attributes["scale"] = _scale(op) * scales[op.args[0]]
        args = tuple(products.get(a, a) for a in op.args)
        return replace(op, args=args, attrs=tuple(sorted(attributes.items())))

    return replace(kernel, ops=tuple(scaled(op) for op in kernel.ops if op.name not in products))


def _scale(op: Op) -> Fraction:
    return number(op, "scale", 1).value
