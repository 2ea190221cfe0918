"""Axes of a few elements are written out: right values, in float32, without tiles of three dimensions."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lower.kernels import Block, Program, graph, schedule, tensor
from lower.test_programs import error as interpreted_error

from mirage_jax.compiler.winner import KERNEL_EMIT_OPTIONS
from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.graph import Store
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret

N, M = 40, 50  # points, in tiles of 16


def text(program: Program) -> str:
    (source,) = sources(program.graph, program.schedule, KERNEL_EMIT_OPTIONS)
    assert source is not None and compile_for(source, 90).fits
    return source.text


def error(program: Program) -> float:
    """The error in the interpreter; on exact numbers there is none."""
    check_graph(program.graph)
    assert exact_check(program.graph, program.schedule) == ""
    return interpreted_error(program)


def points(b: Block, dtype: str, stored: str, narrow: int, expected) -> Program:
    """A program of points X[i,j] and Y[k,j], by blocks of i in a loop over k."""
    inputs = [tensor("X", "i j", dtype), tensor("Y", "k j", dtype)]
    return Program(graph(inputs, [b], stored, {"i": N, "k": M, "j": narrow}), schedule({"i": 16, "k": 16}), expected)


def distances(b: Block) -> str:
    gap = b.add(b.load("X", "i j"), b.load("Y", "k j"), cb=-1)
    return b.dot(gap, gap, axes="j")


def nearest(dtype: str, narrow: int) -> Program:
    b = Block("nearest", "i", "k")
    b.store(tensor("Z", "i", "f32"), b.last(b.max(b.affine(distances(b), scale=-1), axes="k")))
    return points(b, dtype, "Z", narrow, lambda x, y: -np.square(x[:, None] - y).sum(-1).min(1))


def forces(dtype: str, narrow: int) -> Program:
    b = Block("forces", "i", "k")
    gap = b.add(b.load("X", "i j"), b.load("Y", "k j"), cb=-1)
    near = b.exp(b.affine(b.dot(gap, gap, axes="j"), scale=-1))
    b.store(tensor("Z", "i j", "f32"), b.acc(b.dot(near, gap, axes="k")))

    def expected(x, y):
        gap = x[:, None] - y
        return np.einsum("ik,ikj->ij", np.exp(-np.square(gap).sum(-1)), gap)

    return points(b, dtype, "Z", narrow, expected)


def products(dtype: str, narrow: int) -> Program:
    b = Block("products", "i", "k")
    near = b.exp(b.affine(b.dot(b.load("X", "i j"), b.load("Y", "k j"), axes="j"), scale=-1))
    b.store(tensor("Z", "i", "f32"), b.acc(b.sum(near, axes="k")))
    return points(b, dtype, "Z", narrow, lambda x, y: np.exp(-x @ y.T).sum(-1))


def largest(dtype: str, narrow: int) -> Program:
    """The largest coordinate of each gap, weighted by its number; and a sum over both axes at once."""
    b = Block("largest", "i", "k")
    gap = b.add(b.load("X", "i j"), b.load("Y", "k j"), cb=-1)
    top = b.max(b.mul(gap, b.iota(axis="j")), axes="j")
    b.store(tensor("Z", "i", "f32"), b.add(b.acc(b.sum(top, axes="k")), b.acc(b.sum(gap, axes="k j"))))

    def expected(x, y):
        gap = x[:, None] - y
        return (gap * np.arange(gap.shape[-1])).max(-1).sum(1) + gap.sum((1, 2))

    return points(b, dtype, "Z", narrow, expected)


def means(dtype: str, narrow: int) -> Program:
    """The points of Y, weighted by how near they are: a matrix product of which the axis is a side."""
    b = Block("means", "i", "k")
    y = b.load("Y", "k j")
    gap = b.add(b.load("X", "i j"), y, cb=-1)
    near = b.exp(b.affine(b.dot(gap, gap, axes="j"), scale=-1))
    b.store(tensor("Z", "i j", "f32"), b.acc(b.dot(near, y, axes="k")))
    return points(b, dtype, "Z", narrow, lambda x, y: np.exp(-np.square(x[:, None] - y).sum(-1)) @ y)


PROGRAMS = [nearest, forces, products, largest, means]


@pytest.mark.parametrize("program", PROGRAMS)
def test_values(program) -> None:
    for narrow in (2, 3, 8):
        assert error(program("f32", narrow)) < 1e-5


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_tile_has_the_axis(program) -> None:
    """No lanes for it, no sum over it, and no product that rounds to TF32."""
    written = text(program("f32", 3))
    assert not re.search(r"arange\(0, (2|4|8)\)|None, None|tf32|tl\.dot", written)
    assert written.count("tl.load") == 6


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(PROGRAMS), st.integers(2, 16))
def test_any_number_of_elements(program, narrow: int) -> None:
    assert exact_check(program("f32", narrow).graph, program("f32", narrow).schedule) == ""


def test_what_stays_a_tile() -> None:
    """16-bit products have matrix units; long axes, and axes of rows alone, are read as they lie in memory."""
    assert "tl.dot" in text(products("f16", 8))
    assert "tl.dot" in text(products("f32", 12)) and "tl.dot" not in text(products("f32", 8))
    assert "tl.dot" in text(means("f32", 12)) and "tl.dot" not in text(means("f32", 8))
    assert text(nearest("f32", 16)).count("tl.load") == 32 and text(nearest("f32", 17)).count("tl.load") == 2
    b = Block("rows", "i")
    x = b.load("X", "i j")
    b.store(tensor("Z", "i j", "f32"), b.mul(x, b.sum(x, axes="j")))
    rows = Program(
        graph([tensor("X", "i j", "f32")], [b], "Z", {"i": N, "j": 3}),
        schedule({"i": 16}),
        lambda x: x * x.sum(-1, keepdims=True),
    )
    assert text(rows).count("tl.load") == 1 and error(rows) < 1e-6


def test_outputs_are_named_once() -> None:
    program = forces("f32", 3)
    (source,) = sources(program.graph, program.schedule)
    assert source is not None and source.outputs == ("Z",) and source.shapes == ((N, 3),)
    assert source.text.count("tl.store") == 3
    assert [type(s) for s in program.graph.kernels[0].stores] == [Store]  # the graph itself is as it was


def test_maxima_are_reduced_after_the_loop() -> None:
    """And NaN is kept: each lane has its own."""
    program = nearest("f32", 3)
    loop = text(program).split("for ")[1]
    inside, after = loop.split("\n    lost", 1)
    assert "tl.max(" not in inside and "tl.max(" in after
    x, y = (np.zeros((n, 3), np.float32) for n in (N, M))
    y[37, 1] = np.nan
    (z,) = interpret(program.graph, program.schedule, [x, y])
    assert np.isnan(z).all()
