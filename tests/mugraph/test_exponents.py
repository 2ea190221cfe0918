"""Exponentials of differences from a maximum subtract rounded numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.exponents import with_rounded_exponents
from mirage_jax.verify.equivalence.certificate import certify
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret

HEAD = "mugraph {\n  extents i=5 n=7\n  input x: f32[i,n]\n  input w: f32[n]\n"
LIBRARY = """
  library p: f32[i,n] = mul x[i,n] w[n]
  library m: f32[i] = max{axes=(n)} p[i,n]
  library d: f32[i,n] = add{cb=-1} p[i,n] m[i]
  library O: f32[i,n] = exp d[i,n]
  output O
}"""
KERNEL = """
  kernel k grid(i) {
    %x = load x[i,n]
    %w = load w[n]
    %p[i,n] = mul %x %w
    %m[i] = max{axes=(n)} %p
    %d[i,n] = add{cb=-1} %p %m
    %e[i,n] = exp %d
    store O: f32[i,n] = %e
  }
  output O
}"""
WITHOUT_A_MAXIMUM = """
  library d: f32[i,n] = add{cb=-1} x[i,n] w[n]
  library O: f32[i,n] = exp d[i,n]
  output O
}"""


def operators(graph: KernelGraph) -> set[str]:
    return {op.op for k in graph.kernels for op in k.ops}


@pytest.mark.parametrize("text", [LIBRARY, KERNEL])
@pytest.mark.parametrize("scale", ["", "{scale=3/10}"])
def test_differences_from_a_maximum(text: str, scale: str) -> None:
    graph = parse(HEAD + text.replace("= exp", f"= exp{scale}"))
    rounded = with_rounded_exponents(graph)
    check_graph(rounded)
    certify(graph, rounded)
    assert operators(rounded) == {*operators(graph), "rounded"}
    assert with_rounded_exponents(rounded) == rounded


def test_other_differences_stay() -> None:
    graph = parse(HEAD + WITHOUT_A_MAXIMUM)
    assert with_rounded_exponents(graph) == graph


def test_a_difference_that_is_read_elsewhere_stays() -> None:
    graph = parse((HEAD + LIBRARY).replace("output O", "output O d"))
    rounded = with_rounded_exponents(graph)
    check_graph(rounded)
    assert {"rounded", "add"} <= operators(rounded) and rounded.outputs == graph.outputs


def test_what_is_loaded_is_rounded() -> None:
    graph = parse(HEAD + KERNEL.replace("%x %w", "%x %x").replace("add{cb=-1} %p", "add{cb=-1} %x"))
    assert with_rounded_exponents(graph) == graph


def test_a_difference_that_is_rounded_to_16_bits_stays() -> None:
    graph = parse((HEAD + LIBRARY).replace("d: f32", "d: bf16"))
    assert with_rounded_exponents(graph) == graph


def test_the_largest_exponential_is_one() -> None:
    """However large the products are, with whatever XLA makes of the difference."""
    graph = with_rounded_exponents(parse(HEAD + LIBRARY))
    rng = np.random.default_rng(0)
    x, w = (np.float32(1e4 * rng.standard_normal(shape)) for shape in ((5, 7), 7))
    (y,) = jax.jit(lambda x, w: run(graph, [x, w], xp=jnp, dtype=None))(x, w)
    np.testing.assert_array_equal(np.max(y, -1), 1)


@pytest.mark.parametrize("scale", ["", "{scale=3/10}"])
def test_as_a_kernel(scale: str) -> None:
    """The text of the kernel, in Triton's interpreter."""
    graph = with_rounded_exponents(parse(HEAD + KERNEL.replace("= exp", f"= exp{scale}")))
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype("f4") for shape in ((5, 7), 7)]
    (have,) = interpret(graph, Schedule((KernelSchedule((("i", 2),)),)), inputs)
    (want,) = run(graph, inputs)
    np.testing.assert_allclose(have, want, rtol=1e-5)


def test_a_row_of_minus_infinities_stays_nan() -> None:
    """The program's own maximum is subtracted as it is; a shift of ``exps`` may be any number in such a row."""
    graph = parse(HEAD + KERNEL)
    rounded, tiles = with_rounded_exponents(graph), Schedule((KernelSchedule((("i", 2),)),))
    x = np.ones((5, 7), "f4")
    x[3] = -np.inf
    (have,) = interpret(rounded, tiles, [x, np.ones(7, "f4")])
    np.testing.assert_array_equal(np.isnan(have).any(-1), np.arange(5) == 3)
    assert not exact_check(rounded, tiles)
