"""The checker names what is wrong with a graph."""

# ruff: noqa: E501 (tables with one case per line)

import dataclasses
import re

import pytest
from mugraph.graphs import ATTENTION, CAUSAL_BOUNDS, GRAM, MATRIX_VECTOR, RMSNORM, ROW_SOFTMAX, Program, schedule

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.graph import KernelSchedule, Schedule

BAD = [
    (RMSNORM, "two loops", "load X[i,k]", "load Y[i,k]", "loads tensor Y, which is not defined"),
    (RMSNORM, "two loops", "load X[i,k]", "load X[k,i]", "loads X: f32[i,k] of extents [3, 7] as [k,i] of extents [7, 3]"),
    (RMSNORM, "two loops", "load X[i,k]", "load X[i,z]", "axis z has no extent"),
    (RMSNORM, "two loops", "load X[i,k]", "load X[i,i]", "axis i is defined twice"),
    (RMSNORM, "two loops", "%w = load W", "%x = load W", "value x is defined twice"),
    (RMSNORM, "two loops", "mul %x %x", "mul %x %zz", "reads zz, which is not defined before it"),
    (RMSNORM, "two loops", "mul %x %x", "mul %x", "mul takes 2 arguments, got 1"),
    (RMSNORM, "two loops", "mul %x %x", "times %x %x", "unknown operator 'times'"),
    (RMSNORM, "two loops", "%q[i,k] = mul", "%q[i] = mul", "has axes [i,k], declared [i]"),
    (RMSNORM, "two loops", "sum{axes=(k)} %q", "sum %q", "sum needs attribute axes"),
    (RMSNORM, "two loops", "sum{axes=(k)} %q", "sum{axes=(k), scale=2} %q", "sum has no attribute scale"),
    (RMSNORM, "two loops", "%d[i,j] = dot{axes=(k)} %n %w", "%d0[j] = dot{axes=(i,k)} %n %w\n%d[i,j] = mul %d0 %r", "dot over i, which only one side has"),
    (RMSNORM, "two loops", "%e[i,j] = acc %d", "%e[i,j] = affine %d", "needs an accumulator"),
    (RMSNORM, "two loops", "%t[i] = acc %s", "%t0[i,k] = acc %q\n%t[i] = acc %s", "still has the loop axis k"),
    (RMSNORM, "two loops", "%e[i,j] = acc %d", "%e0[i] = acc %r\n%e[i,j] = acc %d", "the same in every step"),
    (RMSNORM, "two loops", " loop(k)", "", "accumulates, but the kernel has no loop"),
    (RMSNORM, "two loops", "grid(i,j)", "grid(i)", None),
    (RMSNORM, "two loops", "grid(i,j) loop(k)", "grid(i,j,k) loop(k)", "lacks grid axis k"),
    (RMSNORM, "scale after the loop", "grid(i,j) loop(k)", "grid(i,j,j)", "grid axis j is defined twice"),
    (RMSNORM, "division by the root", "grid(i)", "grid(i,k)", "lacks grid axis k"),
    (RMSNORM, "split k", "store E: f32[i,j,k.g]", "store E: f32[i,j]", "needs axis k.g"),
    (RMSNORM, "split k", "store E: f32[i,j,k.g]", "store O: f32[i,j,k.g]", "loads tensor E"),
    (RMSNORM, "split k", "k.g", "k.g'", "copy k.g' of a part axis"),
    (RMSNORM, "two loops", "store O: f32", "store O: f99", "unknown dtype 'f99'"),
    (RMSNORM, "two loops", "store O: f32[i,j] = %e", "store O: f32[i,j] = %zz", "stores value zz, which is not defined"),
    (RMSNORM, "two loops", "store O: f32[i,j] = %e", "", "stores nothing"),
    (GRAM, "loop", "store S:", "store O:", "tensor O is defined twice"),
    (GRAM, "loop", "%d[i,i'] = dot{axes=(k)} %x %y", "%c[i'] = dot{axes=(k,i)} %x %y\n%d[i,i'] = dot{axes=(k)} %x %y", "dot over i"),
    (GRAM, "loop", "%d[i,i'] = dot{axes=(k)} %x %y", "%c[k] = sum{axes=(i)} %x\n%d[i,i'] = dot{axes=(k)} %x %y", "reduces grid axes i"),
    (ATTENTION, "online", "exps %s %m", "exps %s %l", "reads l, which is not defined before it"),
    (ROW_SOFTMAX, "stored in the second loop", "exps %x %f", "exps %x %m\n%z[i] = add %f %l", "needs"),
    (ROW_SOFTMAX, "stored in the second loop", "%e[i,n] = exps %x %f", "%f2[i] = mul %f %m\n%e[i,n] = exps %x %f2", "uses the running shift m in a later loop"),
    (MATRIX_VECTOR, "split", "loop(k)", "loop(k.g)", "on the grid and the loop"),
    (CAUSAL_BOUNDS, "online", "..n'+0", "..d+0", "d is not on the grid"),
    (CAUSAL_BOUNDS, "split keys", "..n'+0", "..n.g+0", "n.g is not on the grid"),
    (ROW_SOFTMAX, "stored in the second loop", "loop(n)", "loop(n in i-1..)", "would not store it"),
]  # fmt: skip


@pytest.mark.parametrize("program,name,old,new,message", BAD, ids=range(len(BAD)))
def test_refuses(program: Program, name: str, old: str, new: str, message: str | None) -> None:
    text = program.candidates[name]
    assert old in text
    graph = program.graph(text.replace(old, new) if old == "k.g" else text.replace(old, new, 1))
    if message is None or message == "needs":
        check_graph(graph)
        return
    with pytest.raises(GraphError, match=re.escape(message)):
        check_graph(graph)


def test_outputs() -> None:
    graph = RMSNORM.graph(RMSNORM.reference)
    for outputs, message in (((), "no outputs"), (("nowhere",), "output nowhere is not a tensor")):
        with pytest.raises(GraphError, match=message):
            check_graph(dataclasses.replace(graph, outputs=outputs))


def test_extents() -> None:
    graph = RMSNORM.graph(RMSNORM.reference)
    for extents, message in (
        ({"i": 0}, "axis i has extent 0"),
        ({"k.g": 2}, "axis k.g; copies and parts"),
        ({"i'": 3}, "axis i'"),
    ):
        with pytest.raises(GraphError, match=message):
            check_graph(graph.with_extents({**graph.sizes, **extents}))
    with pytest.raises(GraphError, match="axis j has no extent"):
        check_graph(graph.with_extents({"i": 1, "k": 2}))


def test_schedules() -> None:
    graph = RMSNORM.graph(RMSNORM.candidates["split k"])
    good = schedule(graph)
    check_schedule(graph, good)
    for bad, message in (
        (Schedule(good.kernels[:1], good.parts), "1 kernel schedules for 2 kernels"),
        (Schedule(good.kernels), "no number of parts for split axis k"),
        (Schedule((good.kernels[0], KernelSchedule()), good.parts), "no tile for axis i"),
        (
            Schedule((good.kernels[0], KernelSchedule((("i", 0), ("j", 1)))), good.parts),
            "tile of axis i is less than 1",
        ),
        (Schedule(good.kernels, (("k", 8),)), "some part would be empty"),
    ):
        with pytest.raises(GraphError, match=message):
            check_schedule(graph, bad)
