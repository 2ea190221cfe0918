"""Gaussian processes by tinygp and GPJax."""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.zoo.entries import LibraryEntries, Made, normal

TINYGP, GPJAX = LibraryEntries("tinygp"), LibraryEntries("gpjax")


@TINYGP.entry("4,096 points of 8 coordinates, a length scale each (kin8nm has 8,192)")
def _tinygp_kernel(small: bool) -> Made:
    """The covariance of two sets of points."""
    from tinygp import kernels, transforms

    n, d = (32, 4) if small else (4096, 8)

    def _fn(x: jax.Array, y: jax.Array, log_scale: jax.Array, log_amplitude: jax.Array) -> jax.Array:
        kernel = jnp.exp(log_amplitude) * transforms.Linear(jnp.exp(-log_scale), kernels.ExpSquared(distance=_l2()))
        return kernel(x, y)

    return _fn, normal((n, d), (n, d), (d,), ())


def _l2() -> Any:
    from tinygp.kernels.distance import L2Distance

    return L2Distance()


@TINYGP.entry("means at 4,096 points from 4,096 others of 8 coordinates, by Matern 5/2")
def _tinygp_cross_mean(small: bool) -> Made:
    """A covariance times weights, which predicts means."""
    from tinygp import kernels

    n, d = (32, 4) if small else (4096, 8)
    return lambda x, y, w: kernels.Matern52(scale=1.5, distance=_l2())(x, y) @ w, normal((n, d), (n, d), (n, 1))


@TINYGP.entry("the marginal likelihood of 2,048 points of 8 coordinates")
def _tinygp_likelihood(small: bool) -> Made:
    """A covariance, its Cholesky factor, and a density."""
    import tinygp

    n, d = (32, 4) if small else (2048, 8)

    def _fn(x: jax.Array, y: jax.Array, log_scale: jax.Array) -> jax.Array:
        kernel = tinygp.kernels.ExpSquared(scale=jnp.exp(log_scale), distance=_l2())
        return tinygp.GaussianProcess(kernel, x, diag=0.1).log_probability(y)

    return _fn, normal((n, d), (n,), ())


@TINYGP.entry("a time series of 1,024 points, with a quasiseparable kernel (Foreman-Mackey et al., 2017)")
def _tinygp_celerite(small: bool) -> Made:
    """A likelihood by loops over points, with matrices of two rows."""
    import tinygp

    n = 16 if small else 1024

    def _fn(t: jax.Array, y: jax.Array, log_scale: jax.Array) -> jax.Array:
        kernel = tinygp.kernels.quasisep.Matern32(scale=jnp.exp(log_scale))
        return tinygp.GaussianProcess(kernel, jnp.sort(t), diag=0.1).log_probability(y)

    return _fn, normal((n,), (n,), ())


def _checked(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make values of GPJax's checks, without which no `jit` accepts them, and drop these."""
    from jax.experimental import checkify

    return lambda *args: checkify.checkify(fn)(*args)[1]


def _gpjax_posterior(kernel: Any, n: int) -> Any:
    import gpjax as gpx

    prior = gpx.gps.Prior(kernel=kernel, mean_function=gpx.mean_functions.Zero())
    return prior * gpx.likelihoods.Gaussian(num_datapoints=n, obs_stddev=jnp.array(0.3))


@GPJAX.entry("4,096 points of 8 coordinates, a length scale each")
def _gpjax_cross_covariance(small: bool) -> Made:
    """The covariance of two sets of points, by maps over pairs."""
    import gpjax as gpx

    n, d = (32, 4) if small else (4096, 8)
    kernel = gpx.kernels.RBF(lengthscale=jnp.full(d, 1.5))
    return lambda x, y: kernel.cross_covariance(x, y), normal((n, d), (n, d))


@GPJAX.entry("the marginal likelihood of 2,048 points of 8 coordinates")
def _gpjax_likelihood(small: bool) -> Made:
    """A covariance, its Cholesky factor, and a density."""
    import gpjax as gpx

    n, d = (32, 4) if small else (2048, 8)

    def _fn(x: jax.Array, y: jax.Array) -> jax.Array:
        posterior = _gpjax_posterior(gpx.kernels.Matern32(lengthscale=jnp.array(1.5)), n)
        return gpx.objectives.conjugate_mll(posterior, gpx.Dataset(X=x, y=y))

    return _checked(_fn), normal((n, d), (n, 1))


@GPJAX.entry("a sparse process (Titsias, 2009): 16,384 points of 8 coordinates, 256 inducing points")
def _gpjax_collapsed_elbo(small: bool) -> Made:
    """The bound of a sparse Gaussian process."""
    import gpjax as gpx

    n, m, d = (64, 8, 4) if small else (16384, 256, 8)

    def _fn(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        posterior = _gpjax_posterior(gpx.kernels.RBF(lengthscale=jnp.array(1.5)), n)
        family = gpx.variational_families.CollapsedVariationalGaussian(posterior=posterior, inducing_inputs=z)
        return gpx.objectives.collapsed_elbo(family, gpx.Dataset(X=x, y=y))

    return _checked(_fn), normal((n, d), (n, 1), (m, d))
