"""Products of scaled tiles as scaled products.

before -> after:  dot(mul(factor, tile), other)  ->  mul(factor, dot(tile, other))

where `tile` comes from a 16-bit tensor and `factor` does not depend on what is summed: the matrix product then reads
the tile as it is, and nothing is rounded or made two halves for its sake. It costs a multiplication for every element
of the result, so only precise kernels are written this way.
"""

from __future__ import annotations

from dataclasses import replace

from mirage_jax.lower.triton.expressions import reduced
from mirage_jax.mugraph.dtypes import SIXTEEN_BIT_FLOATS
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Op
from mirage_jax.mugraph.operators import ACCUMULATORS


def factors_last(kernel: BlockGraph, graph: KernelGraph) -> BlockGraph:
    """The kernel with factors taken out of its products; those that are summed up in place stay as they are."""
    ops = {op.name: op for op in kernel.ops}
    summed = {op.args[0] for op in kernel.ops if op.op in ACCUMULATORS}
    halves = {x.name for x in kernel.loads if graph.tensors[x.tensor].dtype in SIXTEEN_BIT_FLOATS}
    out: list[Op] = []
    for op in kernel.ops:
        args, factors = list(op.args), list[str]()
        for n, a in enumerate(op.args if op.op == "dot" and op.name not in summed else ()):
            pair = ops[a].args if a in ops and ops[a].op == "mul" else ()
            for tile, factor in zip(pair, pair[::-1], strict=True):
                whole = set(kernel.axes_of[tile]) == set(ops[a].axes)
                if tile in halves and whole and not set(kernel.axes_of[factor]) & set(reduced(op)):
                    args[n] = tile
                    factors.append(factor)
                    break
        names = [f"{op.name}f{n}" for n in range(len(factors))] + [op.name]
        out.append(replace(op, name=names[0], args=tuple(args)))
        out += [
            Op(name, "mul", (names[n], f), op.axes) for n, (name, f) in enumerate(zip(names[1:], factors, strict=True))
        ]
    return replace(kernel, ops=tuple(out))
