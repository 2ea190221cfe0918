"""Optimal transport by OTT."""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.zoo.entries import LibraryEntries, Made, normal

OTT = LibraryEntries("ott-jax")


def _sinkhorn_options(iterations: int) -> dict[str, Any]:
    """Iterate a fixed number of times, as a loop that can be differentiated."""
    return {"min_iterations": iterations, "max_iterations": iterations, "inner_iterations": iterations}


@OTT.entry("Sinkhorn (Cuturi, 2013): 4,096 points of 64 coordinates, 10 iterations")
def _ott_sinkhorn(small: bool) -> Made:
    """Entropic transport between two clouds; the cost and both potentials."""
    from ott.geometry import pointcloud
    from ott.solvers import linear

    n, d = (32, 4) if small else (4096, 64)

    def _fn(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        out = linear.solve(pointcloud.PointCloud(x, y, epsilon=1.0 * d), implicit_diff=None, **_sinkhorn_options(10))
        return out.reg_ot_cost, out.f, out.g

    return _fn, normal((n, d), (n, d))


@OTT.entry("one application of the kernel, 8,192 points of 3 coordinates, online in batches of 1,024")
def _ott_apply_online(small: bool) -> Made:
    """A log-sum-exp over a cost matrix that is never stored whole."""
    from ott.geometry import pointcloud

    n, d, batch = (32, 3, 8) if small else (8192, 3, 1024)

    def _fn(x: jax.Array, y: jax.Array, f: jax.Array, g: jax.Array) -> jax.Array:
        geometry = pointcloud.PointCloud(x, y, epsilon=0.5, batch_size=batch)
        return geometry.update_potential(f, g, jnp.full(n, -jnp.log(n)), axis=0)

    return _fn, normal((n, d), (n, d), (n,), (n,))


@OTT.entry("half a step of Sinkhorn, 8,192 points of 64 coordinates")
def _ott_update_potential(small: bool) -> Made:
    """A potential from the other one."""
    from ott.geometry import pointcloud

    n, d = (32, 4) if small else (8192, 64)

    def _fn(x: jax.Array, y: jax.Array, f: jax.Array) -> jax.Array:
        geometry = pointcloud.PointCloud(x, y, epsilon=1.0 * d)
        return geometry.update_potential(f, jnp.zeros(n), jnp.full(n, -jnp.log(n)), axis=0)

    return _fn, normal((n, d), (n, d), (n,))


@OTT.entry("the transport of values along a plan, 8,192 points of 64 coordinates, 32 values each")
def _ott_apply_transport(small: bool) -> Made:
    """Barycentric projection: a plan from potentials, times values."""
    from ott.geometry import pointcloud

    n, d, e = (32, 4, 3) if small else (8192, 64, 32)

    def _fn(x: jax.Array, y: jax.Array, f: jax.Array, g: jax.Array, v: jax.Array) -> jax.Array:
        geometry = pointcloud.PointCloud(x, y, epsilon=2.0 * d)
        return geometry.apply_transport_from_potentials(f, g, v, axis=1)

    return _fn, normal((n, d), (n, d), (n,), (n,), (e, n))


@OTT.entry("differentiable sorting (Cuturi et al., 2019): 2,048 rows of 128 numbers, 10 iterations")
def _ott_soft_sort(small: bool) -> Made:
    """Soft ranks along the last axis."""
    from ott.tools import soft_sort

    n, d = (4, 8) if small else (2048, 128)
    options = {"implicit_diff": None, "epsilon": 1e-1, **_sinkhorn_options(10)}
    return lambda x: soft_sort.ranks(x, axis=-1, **options), normal((n, d))
