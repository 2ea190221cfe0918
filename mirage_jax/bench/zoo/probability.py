"""Distributions and models by NumPyro, TensorFlow Probability, Distrax, Dynamax, BlackJAX and JAXopt."""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

import jax
import jax.numpy as jnp

from mirage_jax.bench.zoo.entries import LibraryEntries, Made, normal

NUMPYRO, TFP, DISTRAX = LibraryEntries("numpyro"), LibraryEntries("tfp-nightly"), LibraryEntries("distrax")
DYNAMAX, BLACKJAX, JAXOPT = LibraryEntries("dynamax"), LibraryEntries("blackjax"), LibraryEntries("jaxopt")


@NUMPYRO.entry("65,536 points of 16 coordinates, 64 Gaussians with diagonal covariances")
def _numpyro_mixture(small: bool) -> Made:
    """The log-likelihood of each point under a mixture."""
    import numpyro.distributions as dist

    n, k, d = (64, 4, 4) if small else (65536, 64, 16)

    def _fn(x: jax.Array, logits: jax.Array, mean: jax.Array, log_scale: jax.Array) -> jax.Array:
        parts = dist.Normal(mean, jnp.exp(log_scale)).to_event(1)
        return dist.MixtureSameFamily(dist.Categorical(logits=logits), parts).log_prob(x)

    return _fn, normal((n, d), (k,), (k, d), (k, d))


@NUMPYRO.entry("16,384 points of 16 coordinates, 32 Gaussians with full covariances")
def _numpyro_full_mixture(small: bool) -> Made:
    """The same with Cholesky factors of covariances."""
    import numpyro.distributions as dist

    n, k, d = (32, 4, 4) if small else (16384, 32, 16)

    def _fn(x: jax.Array, logits: jax.Array, mean: jax.Array, raw: jax.Array) -> jax.Array:
        factor = jnp.tril(raw, -1) * 0.1 + jnp.eye(d)
        parts = dist.MultivariateNormal(mean, scale_tril=factor)
        return dist.MixtureSameFamily(dist.Categorical(logits=logits), parts).log_prob(x)

    return _fn, normal((n, d), (k,), (k, d), (k, d, d))


@NUMPYRO.entry("logistic regression on Covertype, as in NumPyro's benchmark: 581,012 points, 55 coordinates")
def _numpyro_logistic(small: bool) -> Made:
    """The joint density of weights and labels."""
    import numpyro
    import numpyro.distributions as dist

    n, d = (64, 5) if small else (581012, 55)

    def model(x: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(d), 1.0).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def _fn(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return numpyro.infer.util.log_density(model, (x, y), {}, {"w": w})[0]

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        w, x = normal((d,), (n, d))(key)
        return w, x, (x[:, 0] > 0).astype(jnp.float32)

    return _fn, draw


@NUMPYRO.entry("a Bayesian network, as in NumPyro's example, at 16,384 points and 64 units")
def _numpyro_network(small: bool) -> Made:
    """The joint density of an MLP's weights and its targets."""
    import numpyro
    import numpyro.distributions as dist

    n, d, h = (32, 3, 4) if small else (16384, 16, 64)

    def model(x: jax.Array, y: jax.Array) -> None:
        w1 = numpyro.sample("w1", dist.Normal(jnp.zeros((d, h)), 1.0))
        w2 = numpyro.sample("w2", dist.Normal(jnp.zeros((h, h)), 1.0))
        w3 = numpyro.sample("w3", dist.Normal(jnp.zeros((h, 1)), 1.0))
        mean = jnp.tanh(jnp.tanh(x @ w1) @ w2) @ w3
        numpyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)

    def _fn(w1: jax.Array, w2: jax.Array, w3: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return numpyro.infer.util.log_density(model, (x, y), {}, {"w1": w1, "w2": w2, "w3": w3})[0]

    return _fn, normal((d, h), (h, h), (h, 1), (n, d), (n, 1))


@NUMPYRO.entry("a Hilbert-space process (Riutort-Mayol et al., 2023): 16,384 points, 16 x 16 functions")
def _numpyro_hsgp(small: bool) -> Made:
    """Basis functions of points times weights."""
    from numpyro.contrib.hsgp.laplacian import eigenfunctions

    n, m = (32, 4) if small else (16384, 16)
    return lambda x, w: eigenfunctions(x, ell=3.0, m=[m, m]) @ w, normal((n, 2), (m * m,))


@TFP.entry("4,096 points of 8 coordinates")
def _tfp_rational_quadratic(small: bool) -> Made:
    """A covariance times weights."""
    from tensorflow_probability.substrates import jax as tfp

    n, d = (32, 4) if small else (4096, 8)

    def _fn(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return tfp.math.psd_kernels.RationalQuadratic(1.2, 1.5).matrix(x, y) @ w

    return _fn, normal((n, d), (n, d), (n, 1))


@TFP.entry("a hidden Markov model of 64 states, 256 steps")
def _tfp_hmm(small: bool) -> Made:
    """The likelihood of a series, by a loop over steps."""
    from tensorflow_probability.substrates import jax as tfp

    t, k = (8, 4) if small else (256, 64)
    d = tfp.distributions

    def _fn(start: jax.Array, move: jax.Array, mean: jax.Array, y: jax.Array) -> jax.Array:
        chain = d.Categorical(logits=start), d.Categorical(logits=move)
        return d.HiddenMarkovModel(*chain, d.Normal(mean, 1.0), num_steps=t).log_prob(y)

    return _fn, normal((k,), (k, k), (k,), (t,))


@DISTRAX.entry("65,536 points of 16 coordinates, 64 Gaussians with diagonal covariances")
def _distrax_mixture(small: bool) -> Made:
    """The log-likelihood of each point under a mixture."""
    import distrax

    n, k, d = (64, 4, 4) if small else (65536, 64, 16)

    def _fn(x: jax.Array, logits: jax.Array, mean: jax.Array, log_scale: jax.Array) -> jax.Array:
        parts = distrax.MultivariateNormalDiag(mean, jnp.exp(log_scale))
        return distrax.MixtureSameFamily(distrax.Categorical(logits), parts).log_prob(x)

    return _fn, normal((n, d), (k,), (k, d), (k, d))


@DYNAMAX.entry("a hidden Markov model of 64 states, 1,024 steps of 8 numbers")
def _dynamax_hmm(small: bool) -> Made:
    """The filter of a series, by a loop over steps."""
    from dynamax.hidden_markov_model import hmm_filter

    t, k, d = (8, 4, 2) if small else (1024, 64, 8)

    def _fn(start: jax.Array, move: jax.Array, mean: jax.Array, y: jax.Array) -> jax.Array:
        likelihood = -0.5 * jnp.sum(jnp.square(y[:, None] - mean), -1)
        posterior = hmm_filter(jax.nn.softmax(start), jax.nn.softmax(move), likelihood)
        return posterior.marginal_loglik

    return _fn, normal((k,), (k, k), (k, d), (t, d))


@BLACKJAX.entry("Stein variational gradients (Liu and Wang, 2016): 2,048 particles of 64 coordinates")
def _blackjax_stein(small: bool) -> Made:
    """The kernel of all pairs of particles, times scores, as in BlackJAX's step."""
    from blackjax.vi.svgd import rbf_kernel

    n, d = (16, 4) if small else (2048, 64)

    def _fn(x: jax.Array, score: jax.Array) -> jax.Array:
        def phi(one: jax.Array) -> jax.Array:
            def from_other(other: jax.Array, its_score: jax.Array) -> jax.Array:
                value, slope = jax.value_and_grad(rbf_kernel)(other, one, d**0.5)
                return value * its_score + slope

            return jnp.mean(jax.vmap(from_other)(x, score), 0)

        return jax.vmap(phi)(x)

    return _fn, normal((n, d), (n, d))


@BLACKJAX.entry("one leapfrog step of logistic regression: 65,536 points, 64 coordinates", gradients=False)
def _blackjax_leapfrog(small: bool) -> Made:
    """A step of a symplectic integrator, with two gradients."""
    from blackjax.mcmc import integrators, metrics

    n, d = (64, 4) if small else (65536, 64)

    def _fn(w: jax.Array, momentum: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        density = lambda w: -jnp.sum(jax.nn.softplus(-y * (x @ w))) - 0.5 * jnp.sum(w * w)  # noqa: E731
        kinetic = metrics.default_metric(jnp.ones(d)).kinetic_energy
        state = integrators.new_integrator_state(density, w, momentum)
        after = integrators.velocity_verlet(density, kinetic)(state, 1e-3)
        return after.position, after.momentum

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        w, momentum, x = normal((d,), (d,), (n, d))(key)
        return w, momentum, x, jnp.sign(x[:, 0])

    return _fn, draw


@JAXOPT.entry("softmax regression on MNIST: 60,000 images of 784 pixels, 10 classes")
def _jaxopt_softmax_regression(small: bool) -> Made:
    """The regularized loss of softmax regression."""
    from jaxopt import objective

    n, d, k = (32, 8, 4) if small else (60000, 784, 10)

    def _fn(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return objective.l2_multiclass_logreg(w, 1e-3, (x, y))

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        k1, k2 = jax.random.split(key)
        w, x = normal((d, k), (n, d))(k1)
        return w * d**-0.5, x, jax.random.randint(k2, (n,), 0, k)

    return _fn, draw
