"""A cut between two regions stores rows, not the matrices that are made of them in a moment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax.jaxpr_frontend.partition.regions import Analysis, analyse

POINTS = 1024


def pairs(x: jax.Array, y: jax.Array) -> jax.Array:
    """A contrastive loss: its logits are needed four times."""
    logits = x @ y.T
    rows, columns = jax.nn.log_softmax(logits, 0), jax.nn.log_softmax(logits, 1)
    return -jnp.mean(jnp.diagonal(rows) + jnp.diagonal(columns))


def pulled(x: jax.Array, y: jax.Array) -> jax.Array:
    """Sums over distances, which are needed for the gradient too."""
    distance = jnp.sum(jnp.square(x[:, None] - y), -1)
    return jnp.sum(jnp.square(jax.nn.softmax(-distance, -1) @ y))


def cut(fn, width: int, remat: bool, most: int) -> Analysis:
    args = [jax.ShapeDtypeStruct((POINTS, width), "float32")] * 2
    return analyse(jax.make_jaxpr(jax.grad(fn, (0, 1)))(*args), max_ops=most, remat=remat)


def largest_between(found: Analysis) -> int:
    """Elements of the largest value that one region makes and another one reads."""
    made = {b.value: r.avals[b.value].size for r in found.regions for b in r.outputs}
    return max((made[b.value] for r in found.regions for b in r.inputs if b.value in made), default=0)


@pytest.mark.parametrize(("fn", "width"), [(pairs, 64), (pulled, 8)])
@pytest.mark.parametrize("most", [12, 16, 20, 24])
def test_no_matrix_crosses_a_cut(fn, width: int, most: int) -> None:
    """However small the regions are."""
    found = cut(fn, width, remat=True, most=most)
    assert len(found.regions) > 1 or most == 24
    assert largest_between(found) <= POINTS * max(width, 8)


def test_without_rematerialization_it_does() -> None:
    assert largest_between(cut(pairs, 64, remat=False, most=12)) >= POINTS**2


def test_regions_compute_what_the_program_does() -> None:
    """Each equation that two regions make is made of the same values in both."""
    found = cut(pairs, 64, remat=True, most=16)
    repeated = [eqn for r in found.regions for eqn in r.equations]
    assert len(repeated) > len(set(map(id, repeated))), "else nothing is made again"
    x, y = np.random.default_rng(0).standard_normal((2, POINTS, 64)).astype(np.float32)
    import mirage_jax

    optimized = mirage_jax.optimize(jax.grad(pairs, (0, 1)), remat="regions", on_miss="fallback")
    for ours, theirs in zip(optimized(x, y), jax.grad(pairs, (0, 1))(x, y), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
