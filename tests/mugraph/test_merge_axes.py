"""Simplified axes: the same values, fewer names."""

import numpy as np
import pytest

from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.merge_axes import merge_axes, separate_copies, simplify_axes, sink_renames

ROWS = """mugraph {
  extents b=2 j=5 k=4 t=3
  input X: f32[b,t,k]
  input W: f32[k,j]
  library T: f32[b,t,k] = mul X[b,t,k] X[b,t,k]
  library O: f32[b,t,j] = dot{axes=(k)} T[b,t,k] W[k,j]
  output O
}"""
SELF = """mugraph {
  extents c=4 e=2 i=5
  input X: f32[i,c]
  input W: f32[c,e]
  library Q: f32[i,e] = dot{axes=(c)} X[i,c] W[c,e]
  library S: f32[i,i'] = dot{axes=(e)} Q[i,e] Q[i',e]
  library E: f32[i,i'] = exp S[i,i']
  library L: f32[i] = sum{axes=(i')} E[i,i']
  library P: f32[i,i'] = div E[i,i'] L[i]
  library O: f32[i',e] = dot{axes=(i)} Q[i,e] P[i',i]
  output O
}"""


def values(graph: KernelGraph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    return run(graph, [x.reshape([graph.extent(a) for a in t.axes]) for x, t in zip(inputs, graph.inputs, strict=True)])


@pytest.mark.parametrize("simplify", [merge_axes, separate_copies, sink_renames, simplify_axes])
@pytest.mark.parametrize("text", [ROWS, SELF])
def test_same_values(text, simplify):
    graph, rng = parse(text), np.random.default_rng(0)
    inputs = [rng.standard_normal([graph.extent(a) for a in t.axes]) for t in graph.inputs]
    simple = simplify(graph)
    check_graph(simple)
    assert [t.name for t in simple.inputs] == [t.name for t in graph.inputs] and simple.outputs == graph.outputs
    for x, y in zip(values(graph, inputs), values(simple, inputs), strict=True):
        np.testing.assert_allclose(x.ravel(), y.ravel(), rtol=1e-12)


def test_rows_merge():
    simple = merge_axes(parse(ROWS))
    assert simple.sizes == {"b": 6, "k": 4, "j": 5}
    assert [t.axes for t in simple.inputs] == [("b", "k"), ("k", "j")]


def test_axes_that_are_told_apart_stay():
    text = ROWS.replace("mul X[b,t,k] X[b,t,k]", "mul X[b,t,k] M[t,k]").replace(
        "  input W", "  input M: f32[t,k]\n  input W"
    )
    assert merge_axes(parse(text)).sizes == parse(text).sizes


def test_copies_become_axes_and_renames_sink():
    simple = simplify_axes(parse(SELF))
    assert simple.sizes == {"a": 5, "c": 4, "e": 2, "i": 5}
    for kernel in simple.kernels[2:]:  # only the two readings of Q differ
        for load in kernel.loads:
            assert load.axes == simple.tensors[load.tensor].axes or load.tensor == "Q"
