"""A total over all pairs is a sum of row sums, which a region makes: the matrix of pairs is not stored."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import assert_same, instructions
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from jaxpr_frontend.replacing import Picky, Replacing, optimized

from mirage_jax.jaxpr_frontend.partition.program import evaluate, flatten
from mirage_jax.jaxpr_frontend.partition.regions import analyse

POINTS = 1024


def energy(x: jax.Array, q: jax.Array) -> jax.Array:
    distance = jnp.sqrt(jnp.sum(jnp.square(x[:, None] - x), -1) + 1e-2)
    return 0.5 * jnp.sum(q[:, None] * q * jnp.exp(-distance) / distance)


def discrepancy(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.exp(x @ y.T)) - jnp.mean(jax.nn.sigmoid(x @ x.T))


def normalized(x: jax.Array, y: jax.Array) -> jax.Array:
    """Weights that add up to one over all pairs, not over rows."""
    weights = 1 / (1 + jnp.sum(jnp.square(x[:, None] - y), -1))
    return (weights / jnp.sum(weights)) @ y


def squares(x: jax.Array, y: jax.Array) -> jax.Array:
    """The error of a layer: as large as the layer's operands."""
    return jnp.mean(jnp.square(jnp.tanh(x @ y.T) @ y - x))


def decay(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x)) + jnp.sum(jnp.square(x @ x.T - y @ y.T).astype(jnp.bfloat16), dtype=jnp.bfloat16)


def sums(fn: Any, *args: jax.Array) -> list[tuple[int, ...]]:
    """The shapes of what is summed to one number."""
    eqns = flatten(jax.make_jaxpr(fn)(*args)).eqns
    is_total = lambda e: e.primitive == "reduce_sum" and e.out_avals[0].shape == ()  # noqa: E731
    return [e.in_avals[0].shape for e in eqns if is_total(e)]


def points() -> list[jax.Array]:
    return [jax.random.normal(key, (POINTS, 3)) for key in jax.random.split(jax.random.key(0))]


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (energy, [(POINTS,)]),
        (discrepancy, [(POINTS,), (POINTS,)]),
        (normalized, [(POINTS,)]),
        (squares, [(POINTS, 3)]),
        (decay, [(POINTS, 3), (POINTS, POINTS)]),
    ],
)
def test_totals_of_large_tensors_are_sums_of_rows(fn, shapes) -> None:
    x, y = points()
    args = (x, y[:, 0]) if fn is energy else (x, y)
    assert sums(fn, *args) == shapes
    stored = [r.avals[v].shape for r in analyse(jax.make_jaxpr(fn)(*args)).regions for v in r.results]
    assert stored
    assert (POINTS, POINTS) not in stored or fn in (normalized, decay)


@pytest.mark.parametrize("fn", [energy, discrepancy])
def test_where_xla_makes_the_rows_it_makes_the_total_at_once(fn) -> None:
    x, y = points()
    args = (x, y[:, 0]) if fn is energy else (x, y)
    ours = optimized(fn, Picky())
    assert instructions(ours, *args) == instructions(jax.jit(fn), *args)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_values(shape: list[int], seed: int) -> None:
    """Of any rank; rows are at least as many as are summed side by side, if there are as many."""
    *rest, width = [8 * n for n in shape]
    x = jax.random.normal(jax.random.key(seed), ())

    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.cos(jnp.arange(width) * jnp.full((*rest, width), x)))

    program = flatten(jax.make_jaxpr(fn)(x))
    values: dict[int, Any] = {**program.constants, program.inputs[0]: x}
    evaluate(program.eqns, values)
    assert sum(eqn.primitive == "reduce_sum" for eqn in program.eqns) == 2
    np.testing.assert_allclose(values[program.outputs[0]], fn(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", ["n, 64", "0, 64", "2, 3"])
def test_sizes_that_are_unknown_or_too_small(shape: str) -> None:
    sizes = jax.export.symbolic_shape(shape)

    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.cos(jnp.full(sizes, 2.0) + jnp.arange(sizes[0])[:, None]))

    assert sums(fn, jnp.ones(())) == [sizes]


def test_arrays_on_a_mesh_are_summed_at_once() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, y = map(jax.reshard, points(), (PartitionSpec("i", None), PartitionSpec(None, None)))
        assert sums(lambda x, y: jnp.sum(jnp.exp(x @ y.T)), x, y) == [(POINTS, POINTS)]


def test_gradients() -> None:
    x, y = points()
    step = jax.value_and_grad(discrepancy, (0, 1))
    assert_same(optimized(step, Replacing())(x, y), step(x, y), 1e-3)
