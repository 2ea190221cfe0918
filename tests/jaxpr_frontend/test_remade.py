"""A cut between two regions stores rows, not the matrices that are made of them in a moment."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.replacing import Replacing

from mirage_jax.jaxpr_frontend.capture.call_primitive import mirage_call_p
from mirage_jax.jaxpr_frontend.capture.lowering import LoweringTarget, planned
from mirage_jax.jaxpr_frontend.partition.regions import Analysis, analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region

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


def matern(x: jax.Array, y: jax.Array) -> jax.Array:
    """Sums of a kernel of distances, which are the sums of absolute differences where points coincide."""
    difference = x[:, None] - y
    squares = jnp.sum(jnp.square(difference), -1)
    same = squares == 0
    distance = jnp.where(same, jnp.sum(jnp.abs(difference), -1), jnp.sqrt(jnp.where(same, 1, squares)))
    return jnp.sum(jnp.square(((1 + distance + distance**2 / 3) * jnp.exp(-distance)) @ y))


def farthest(x: jax.Array, y: jax.Array) -> jax.Array:
    """Distances to the farthest points: a gradient compares distances with their maximum."""
    distance = jnp.sum(jnp.square(x[:, None] - y), -1)
    return jnp.sum(jnp.square(jnp.max(distance, -1))) + jnp.sum(jnp.exp(-distance) @ y)


def bonds(x: jax.Array, y: jax.Array) -> jax.Array:
    """Energies of pairs, whose differences would be a piece by themselves, without a product."""
    difference = x[:, None, :3] - y[None, :, :3]
    square = jnp.sum(jnp.square(difference), -1) + 0.1
    inverse = 1 / (square * square * square)
    return jnp.sum(4 * x[:, 3:4] * (inverse * inverse - inverse) * y[:, 3])


def cut(fn, width: int, remat: bool, most: int) -> Analysis:
    args = [jax.ShapeDtypeStruct((POINTS, width), "float32")] * 2
    return analyse(jax.make_jaxpr(jax.grad(fn, (0, 1)))(*args), max_ops=most, remat=remat)


def largest_read(found: Analysis) -> int:
    """Elements of the largest value that a region reads."""
    return max(r.avals[b.value].size for r in found.regions for b in r.inputs)


@pytest.mark.parametrize(("fn", "width"), [(pairs, 64), (pulled, 8), (matern, 8), (bonds, 8)])
@pytest.mark.parametrize("most", [12, 16, 20, 24])
def test_no_matrix_crosses_a_cut(fn, width: int, most: int) -> None:
    """However small the regions are."""
    found = cut(fn, width, remat=True, most=most)
    assert len(found.regions) > 1 or most == 24
    assert largest_read(found) <= POINTS * max(width, 8)


@pytest.mark.parametrize("most", [6, 8, 12, 24])
def test_what_is_compared_with_its_maximum_is_made_once(most: int) -> None:
    """Made twice, distances may be rounded in two ways, and the maximum of one equals none of the others."""
    found = cut(farthest, 8, remat=True, most=most)
    made = Counter(v for r in found.regions for v in {v for eqn in r.equations for v in eqn.outputs})
    maxima = (eqn for r in found.regions for eqn in r.equations if eqn.primitive == "reduce_max")
    maximum = {eqn.outputs[0]: eqn.reads[0] for eqn in maxima}
    assert maximum and all(made[m] == 1 and made[distance] <= 1 for m, distance in maximum.items())


def test_without_rematerialization_it_does() -> None:
    assert largest_read(cut(pairs, 64, remat=False, most=12)) >= POINTS**2


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


@dataclass(frozen=True, eq=False)
class TakesSome(Replacing):
    """Replaces regions with so many outputs."""

    outputs: int = 0
    checkpoints: bool = True

    def compile_region(self, region: Region, platforms: tuple[str, ...] = ()) -> Any:
        return super().compile_region(region, platforms) if len(region.outputs) == self.outputs else None


def test_only_kernels_that_were_chosen_make_values_again() -> None:
    """Where the region after a cut stays with XLA, it reads what the one before stores, as in JAX's program."""
    args = [jax.ShapeDtypeStruct((POINTS, 64), "float32")] * 2
    jaxpr = jax.make_jaxpr(jax.grad(pairs, (0, 1)))(*args)
    target = LoweringTarget(("cpu",))
    before, after = cut(pairs, 64, remat=True, most=16).regions
    assert len(before.outputs) != len(after.outputs)
    for taken, crosses in ((after, False), (before, True)):
        plan = planned(jaxpr, TakesSome(max_ops=16, outputs=len(taken.outputs)), mirage_call_p, target)
        assert any(r.avals[b.value].size >= POINTS**2 for r in plan.regions for b in r.outputs) == crosses
        assert plan.makes_again != crosses
