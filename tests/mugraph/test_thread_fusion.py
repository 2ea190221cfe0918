"""Thread graphs: pointwise operators of one stage that are connected, and nothing else."""

from itertools import pairwise

import pytest
from mugraph.graphs import PROGRAMS

from mirage_jax.mugraph.graph import BlockGraph
from mirage_jax.mugraph.operators import operator
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.thread_fusion import thread_graphs

EXAMPLE = """mugraph {
  extents i=8 j=8 k=64
  input X: f32[i,k]
  input W: f32[k,j]
  kernel k0 grid(i,j) loop(k) {
    %x = load X[i,k]
    %w = load W[k,j]
    %a[i,k] = affine{scale=2} %x
    %b[i,k] = mul %a %x
    %c[i,j] = dot{axes=(k)} %b %w
    %d[i,j] = acc %c
    %s[i] = sum{axes=(k)} %b
    %t[i] = acc %s
    %r[i] = pow{exponent=-1/2} %t
    %o[i,j] = mul %r %d
    %e[i,j] = exp %o
    store O: f32[i,j] = %e
    store R: f32[i,j] = %o
  }
  output O R
}"""


def test_groups_and_borders():
    kernel = parse(EXAMPLE).kernels[0]
    assert isinstance(kernel, BlockGraph)
    body, epilogue = thread_graphs(kernel)
    assert (body.inputs, body.ops, body.outputs) == (("x",), ("a", "b"), ("b",))
    assert (epilogue.inputs, epilogue.ops, epilogue.outputs) == (("t", "d"), ("r", "o", "e"), ("o", "e"))
    assert str(body) == "thread { %x -> %a %b -> %b }"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_partition(program):
    """Each pointwise operator is in exactly one group; groups stay within a stage and keep the order of the kernel."""
    for text in program.candidates.values():
        for kernel in program.graph(text).kernels:
            if not isinstance(kernel, BlockGraph):
                continue
            groups = thread_graphs(kernel)
            order = [op.name for op in kernel.ops]
            inside = [n for g in groups for n in g.ops]
            assert sorted(inside) == sorted(op.name for op in kernel.ops if operator(op.op).pointwise and op.args)
            for g in groups:
                assert len({kernel.stages[n] for n in g.ops}) == 1
                assert all(order.index(a) < order.index(b) for a, b in pairwise(g.ops))
                assert g.outputs
