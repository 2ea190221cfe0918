"""Exponentials inside of exponentials: which become functions, and that candidates are certified then."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from search.references import H200, TWO_KERNELS

from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.nested_exponentials import with_inner_functions
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.verify.equivalence.certificate import certify

MIXTURE = """mugraph {
  extents i=64 j=4 k=16
  input x: f32[i,j]
  input m: f32[k,j]
  input s: f32[k,j]
  library d: f32[i,j,k] = add{cb=-1} x[i,j] m[k,j]
  library e: f32[k,j] = exp{scale=-1} s[k,j]
  library z: f32[i,j,k] = mul d[i,j,k] e[k,j]
  library q: f32[i,k] = sum{axes=(j)} z[i,j,k]
  library p: f32[i,k] = exp q[i,k]
  library O: f32[i] = sum{axes=(k)} p[i,k]
  output O
}"""

SUM = "q: f32[i,k] = sum{axes=(j)} z[i,j,k]"


def counted(graph: KernelGraph) -> Counter[str]:
    return Counter(op.op for k in graph.kernels for op in k.ops)


@pytest.mark.parametrize(
    "old,new,inner",
    [
        ("", "", 1),
        ("exp{scale=-1}", "exp", 1),
        ("mul d[i,j,k] e[k,j]", "mul d[i,j,k] d[i,j,k]", 0),  # nothing reads it but what is dropped
        ("p: f32[i,k] = exp q", "p: f32[i,k] = tanh q", 0),  # one exponential on the path
        (SUM, f"y: f32[i,j,k] = tanh z[i,j,k]\nlibrary {SUM.replace('z[', 'y[')}", 0),
        ("i=64", "i=4", 0),  # as large as what it is inside of
    ],
    ids=["scaled", "plain", "aside", "alone", "behind a function", "large"],
)
def test_what_becomes_a_function(old: str, new: str, inner: int) -> None:
    graph = parse(MIXTURE.replace(old, new)) if old else parse(MIXTURE)
    changed = with_inner_functions(graph)
    check_graph(changed)
    assert counted(changed)["inner_exp"] == inner and (inner or changed is graph)
    arrays = [np.random.default_rng(0).standard_normal(tuple(map(graph.extent, t.axes))) for t in graph.inputs]
    for x, y in zip(run(graph, arrays), run(changed, arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


def log_deviations(x: jax.Array, mean: jax.Array, s: jax.Array) -> jax.Array:
    """Log-likelihood of a mixture without its weights: x[N, D], mean[K, D], s[K, D]."""
    z = (x[:, None] - mean) / jnp.exp(s)
    return jax.nn.logsumexp(-0.5 * jnp.sum(jnp.square(z), -1) - jnp.sum(s, -1), -1)


def decays(x: jax.Array, rate: jax.Array, t: jax.Array) -> jax.Array:
    """Weights that fall off at rates of their own, as in state-space models: x[T, C], rate[C], t[N, T]."""
    return jnp.sum(jnp.exp(-jnp.exp(rate) * t[..., None]) * x, 1)


@pytest.mark.parametrize(
    "f,shapes",
    [(log_deviations, ((4096, 8), (32, 8), (32, 8))), (decays, ((128, 64), (64,), (256, 128)))],
    ids=["mixture", "decays"],
)
def test_candidates_are_certified(f, shapes) -> None:
    (region,) = analyse(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))).regions
    assert counted(region.graph)["inner_exp"] == 1
    found = Search(region.graph, H200, TWO_KERNELS, families=("kernels",)).run()
    assert found and certify(region.graph, found[0].graph).bound <= 1e-12
