"""What rounding may make of results that cancel, and a gate that knows it."""

import jax.numpy as jnp
import numpy as np
from search.references import captured

from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.parser import parse
from mirage_jax.verify.floats.gate import float_gate
from mirage_jax.verify.floats.noise import CUT_OFF, HALF_UNIT, SAMPLES, noisy, unshared

ROWS = 64


def spread_from_mean(x, w):
    """Rows of equal numbers give nothing: x w - mean(x) sum(w)."""
    y = x * w
    return y - jnp.mean(y, axis=-1, keepdims=True)


def noise_of(dtype: str, value: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    graph = parse(str(captured(spread_from_mean, (ROWS, 32), (32,))).replace("f32", dtype))
    sizes = [[graph.extent(a) for a in t.axes] for t in graph.inputs]
    arrays = [np.full(n, value if len(n) > 1 else 3.0) for n in sizes]
    reference = run(graph, arrays)[0]
    return reference, noisy(graph, arrays)[0] - reference


def test_noise_is_of_the_size_of_what_cancels() -> None:
    for value in (1.0, 1e6):
        reference, noise = noise_of("f32", value)
        assert not reference.any()
        assert HALF_UNIT < np.abs(noise).max() / (3 * value) < 4 * HALF_UNIT


def test_indices_and_float64_have_none() -> None:
    reference, noise = noise_of("f64")
    assert not noise.any() and reference.shape == noise.shape
    graph = captured(lambda x: jnp.where(jnp.tril(jnp.ones((32, 32), bool)), x, 0.0).sum(-1), (32, 32))
    x = 1 + np.arange(32.0 * 32).reshape(32, 32)
    assert np.abs(noisy(graph, [x])[0] / run(graph, [x])[0] - 1).max() < 3 * HALF_UNIT


def test_a_product_that_is_used_twice_may_be_computed_twice() -> None:
    """Gradients of a softmax whose weights are all but 0 and 1: a product minus its own weighted mean."""

    def lost(weights, d, v):
        y = d @ v.T
        return weights * (y - jnp.sum(weights * y, axis=-1, keepdims=True))

    graph = captured(lost, (16, 16), (16, 64), (16, 64))
    rng = np.random.default_rng(0)
    d, v = rng.standard_normal((2, 16, 64))
    wide = iter((d, v))
    arrays = [next(wide) if graph.extent(t.axes[1]) == 64 else np.eye(16) for t in graph.inputs]
    (reference,) = run(graph, arrays)
    assert not reference.any()
    noise = np.sqrt(np.mean([np.diag(noisy(graph, arrays, sample=n)[0]) ** 2 for n in range(SAMPLES)], 0))
    terms, cut_off = np.sqrt(np.sum((d * v) ** 2, -1)), CUT_OFF * HALF_UNIT
    assert np.all(noise > 0.3 * cut_off * terms) and np.all(noise < 4 * cut_off * terms)
    copies = unshared(graph)
    assert len(copies.kernels) == len(graph.kernels) + 2 and copies.outputs == graph.outputs
    assert all(np.array_equal(a, b) for a, b in zip(run(copies, arrays), run(graph, arrays), strict=True))


def test_the_gate_forgives_noise_and_no_more() -> None:
    """XLA is exact by luck: it subtracts a number from itself."""
    reference, noise = noise_of("f32")
    xla = np.zeros(reference.shape, np.float32)
    some = np.random.default_rng(0).choice([-1.0, 1.0], xla.shape) * np.sqrt(np.mean(noise**2))
    assert not float_gate(reference, xla, some.astype(np.float32))
    assert float_gate(reference, xla, some.astype(np.float32), noise=noise)
    assert not float_gate(reference, xla, (10 * some).astype(np.float32), noise=noise)
    one = xla.copy()
    one[5, 7] = 1e-3
    assert not float_gate(reference, xla, one, noise=noise)


def test_one_sample_may_have_luck_and_eight_have_not() -> None:
    """Each row has one number and loses it. Somewhere a sample moves the number and the sum alike."""
    graph = captured(lambda x, w: x * w - jnp.sum(x * w, axis=-1, keepdims=True), (4096, 4), (4,))
    x, w = np.eye(4)[np.arange(4096) % 4], np.full(4, 3.0)
    arrays = [x if len(t.axes) == 2 else w for t in graph.inputs]
    (reference,) = run(graph, arrays)
    samples = [np.abs(noisy(graph, arrays, sample=n)[0] - reference) for n in range(SAMPLES)]
    lost = x == 1
    assert not reference[lost].any()
    size = [np.sqrt(np.mean(np.square(samples[:n]), 0))[lost] / (3 * HALF_UNIT) for n in (1, SAMPLES)]
    assert size[0].min() < 0.02 < 0.1 < size[1].min() < size[1].max() < 4


def test_what_is_picked_or_negated_is_as_exact_as_it_was() -> None:
    """The difference to a maximum or a minimum is a number that everybody knows; that to a mean is not."""

    def noise(fn) -> float:
        graph, x = captured(fn, (ROWS, 32)), np.full((ROWS, 32), 3.7)
        return float(np.abs(noisy(graph, [x])[0] - run(graph, [x])[0]).max())

    assert noise(lambda x: x - jnp.max(x, -1, keepdims=True)) == 0
    assert noise(lambda x: x - jnp.min(x, -1, keepdims=True)) == 0
    assert noise(lambda x: 0.5 * x - jnp.max(0.5 * jnp.maximum(x, -x), -1, keepdims=True)) == 0
    assert noise(lambda x: x - jnp.mean(x, -1, keepdims=True)) > HALF_UNIT
    assert noise(lambda x: x * x - jnp.max(x * x, -1, keepdims=True)) > HALF_UNIT
