"""Convolutions whose windows do not overlap are products, and pooling is a reduction; all others stay with XLA."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jaxpr_frontend.replacing import Replacing, analysis, assert_close, optimized, random

from mirage_jax.jaxpr_frontend.capture.rematerialize import is_cheap
from mirage_jax.jaxpr_frontend.partition.product_boundaries import DotSizes
from mirage_jax.jaxpr_frontend.partition.program import flatten
from mirage_jax.jaxpr_frontend.partition.reasons import Code

NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def convolution(strides=(1, 1), padding="VALID", numbers=NHWC, **options):
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


PRODUCTS = {
    "1 x 1": (convolution(), (2, 6, 4, 8), (1, 1, 8, 16)),
    "1 x 1, channels first": (convolution(numbers=NCHW), (2, 8, 6, 4), (16, 8, 1, 1)),
    "channels last in, first out": (convolution(numbers=("NHWC", "HWIO", "NCHW")), (2, 6, 4, 8), (1, 1, 8, 16)),
    "patches": (convolution((2, 3)), (2, 6, 12, 4), (2, 3, 4, 16)),
    "patches, channels first": (convolution((4, 4), numbers=NCHW), (2, 3, 8, 8), (16, 3, 4, 4)),
    "patches that need no padding": (convolution((2, 2), "SAME"), (2, 4, 4, 4), (2, 2, 4, 8)),
    "one window": (convolution(), (2, 4, 5, 8), (4, 5, 8, 16)),
    "one dimension": (convolution((4,), numbers=("NWC", "WIO", "NWC")), (2, 16, 8), (4, 8, 16)),
    "three dimensions": (convolution((2, 2, 2), numbers=("NDHWC", "DHWIO", "NDHWC")), (1, 4, 4, 2, 8), (2, 2, 2, 8, 4)),
    "no dimension": (convolution((), numbers=("NC", "IO", "NC")), (4, 8), (8, 16)),
}
OVERLAPPING = {
    "3 x 3": (convolution(padding="SAME"), (2, 6, 6, 4), (3, 3, 4, 8)),
    "a stride less than the window": (convolution((1, 2)), (2, 6, 6, 4), (2, 2, 4, 8)),
    "a stride more than the window": (convolution((2, 2)), (2, 6, 6, 4), (1, 1, 4, 8)),
    "what is cropped": (convolution((2, 2)), (2, 5, 6, 4), (2, 2, 4, 8)),
    "padding": (convolution((2, 2), ((1, 1), (0, 0))), (2, 4, 4, 4), (2, 2, 4, 8)),
    "groups": (convolution(feature_group_count=4), (2, 4, 4, 4), (1, 1, 1, 4)),
    "depthwise": (convolution((2, 2), feature_group_count=8), (2, 4, 4, 8), (2, 2, 1, 8)),
}


def around(f):
    return lambda x, w: jax.nn.relu(f(jnp.tanh(x), w) + 1)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    f, x, w = PRODUCTS[name]
    args, compiler = (random(*x), random(*w, seed=1)), Replacing()
    assert_close(optimized(around(f), compiler)(*args), around(f)(*args))
    (region,) = compiler.regions
    assert "conv_general_dilated" in region.primitives and not analysis(around(f), *args).left_out


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_for_weights(name: str) -> None:
    """They are products too; those for the operand of patches put values apart, and stay with XLA."""
    f, x, w = PRODUCTS[name]
    args = (random(*x), random(*w, seed=1))
    gradient = jax.grad(lambda x, w: jnp.square(around(f)(x, w)).sum(), 1)
    assert_close(optimized(gradient)(*args), gradient(*args), 2e-4)
    assert not [e for e in analysis(gradient, *args).left_out if e.primitive == "conv_general_dilated"]


def test_gradients_of_1_x_1() -> None:
    f, x, w = PRODUCTS["1 x 1"]
    args = (random(*x), random(*w, seed=1))
    gradients = jax.grad(lambda x, w: jnp.square(around(f)(x, w)).sum(), (0, 1))
    for have, want in zip(optimized(gradients)(*args), gradients(*args), strict=True):
        assert_close(have, want, 2e-4)
    assert not {e.primitive for e in analysis(gradients, *args).left_out} & {"conv_general_dilated", "rev"}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_stays(name: str) -> None:
    f, x, w = OVERLAPPING[name]
    args = (random(*x), random(*w, seed=1))
    assert_close(optimized(around(f))(*args), around(f)(*args))
    (left,) = [e for e in analysis(around(f), *args).left_out if e.primitive == "conv_general_dilated"]
    assert left.code is Code.PARAMETERS and ("overlap" in str(left) or "groups" in str(left))


@settings(max_examples=40, deadline=None)
@given(
    st.permutations(range(4)),
    st.permutations(range(4)),
    st.permutations(range(4)),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_any_layout(x, w, y, height, width) -> None:
    """Of arrays and windows of any order of dimensions."""
    numbers = lax.ConvDimensionNumbers(tuple(x), tuple(w), tuple(y))
    shapes = [[0] * 4, [0] * 4]
    for shape, spec, sizes in zip(shapes, (x, w), ((2, 5, 2 * height, 3 * width), (4, 5, height, width)), strict=True):
        for place, size in zip(spec, sizes, strict=True):
            shape[place] = size
    f = lambda x, w: lax.conv_general_dilated(x, w, (height, width), "VALID", dimension_numbers=numbers)  # noqa: E731
    args = (random(*shapes[0]), random(*shapes[1], seed=1))
    assert_close(optimized(f)(*args), f(*args))


def pool(operation, window, strides=None, padding="VALID", **options):
    first = {lax.add: 0.0, lax.max: -jnp.inf, lax.min: jnp.inf}[operation]
    sizes = window if strides is None else strides
    return lambda x: lax.reduce_window(x, first, operation, window, sizes, padding, **options)


POOLS = {
    "mean": (lambda x: pool(lax.add, (1, 2, 3, 1))(x) / 6, (2, 4, 6, 5)),
    "maximum": (pool(lax.max, (1, 2, 2, 1)), (2, 4, 6, 5)),
    "minimum": (pool(lax.min, (1, 2, 2, 1)), (2, 4, 6, 5)),
    "channels first": (pool(lax.max, (1, 1, 2, 2)), (2, 5, 4, 6)),
    "all of an image": (pool(lax.add, (1, 4, 6, 1), (1, 1, 1, 1)), (2, 4, 6, 5)),
    "of rows": (pool(lax.add, (1, 4)), (6, 8)),
    "steps of a whole dimension": (pool(lax.max, (1, 2), (1, 1), window_dilation=(1, 3)), (5, 6)),
}
OTHER_POOLS = {
    "3 x 3 at every second": (pool(lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), (2, 6, 6, 4)),
    "running": (pool(lax.add, (1, 3, 1, 1), (1, 1, 1, 1)), (2, 6, 6, 4)),
    "cropped": (pool(lax.add, (1, 2, 2, 1)), (2, 5, 6, 4)),
    "padded": (pool(lax.max, (1, 2, 2, 1), None, "SAME"), (2, 5, 6, 4)),
    "a spread operand": (pool(lax.add, (1, 2), (1, 2), ((0, 0), (0, 1)), base_dilation=(1, 2)), (4, 6)),
}


def around_pool(f):
    return lambda x, w: jax.nn.relu(f(jnp.tanh(x)) * 2) @ w


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str, dtype: str) -> None:
    f, shape = POOLS[name]
    x = random(*shape, dtype=dtype)
    args, compiler = (x, random(f(x).shape[-1], 8, seed=1, dtype=dtype)), Replacing()
    assert_close(
        optimized(around_pool(f), compiler)(*args), around_pool(f)(*args), 1e-4 if dtype == "float32" else 2e-2
    )
    (region,) = compiler.regions
    assert any(p.startswith("reduce_window_") for p in region.primitives)
    assert not analysis(around_pool(f), *args).left_out


@pytest.mark.parametrize("name", OTHER_POOLS)
def test_pooling_that_stays(name: str) -> None:
    f, shape = OTHER_POOLS[name]
    x = random(*shape)
    args = x, random(f(x).shape[-1], 8, seed=1)
    assert_close(optimized(around_pool(f))(*args), around_pool(f)(*args))
    (left,) = [e for e in analysis(around_pool(f), *args).left_out if e.primitive.startswith("reduce_window_")]
    assert left.code is Code.PARAMETERS and "overlap" in str(left)
    (eqn,) = (e for e in flatten(jax.make_jaxpr(f)(x)).eqns if e.primitive.startswith("reduce_window_"))
    assert not is_cheap(eqn)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    st.sampled_from([lax.add, lax.max]),
)
def test_pooling_of_any_windows(sizes, operation) -> None:
    f = pool(operation, tuple(window for window, _ in sizes))
    x = random(*(window * count for window, count in sizes))
    assert_close(optimized(lambda x: jnp.tanh(f(jnp.sin(x))))(x), jnp.tanh(f(jnp.sin(x))))


def test_sizes_are_those_of_the_product() -> None:
    f, x, w = PRODUCTS["patches"]
    (eqn,) = flatten(jax.make_jaxpr(f)(jnp.zeros(x), jnp.zeros(w))).eqns
    sizes = DotSizes.of(eqn)
    assert (sizes.summed, sizes.batch, sizes.free) == (2 * 3 * 4, 1, (2 * 3 * 4, 16))
    assert sizes.flops == 2 * 2 * 3 * 4 * 16 * 24


def test_a_network_of_patches_and_1_x_1_is_one_region() -> None:
    """As vision transformers and ConvNeXt begin."""
    stem, narrow, wide = (convolution((4, 4)), convolution(), convolution())

    def network(x, w, a, b):
        y = stem(x, w)
        return y + wide(jax.nn.gelu(narrow(y, a)), b)

    shapes = ((2, 16, 16, 3), (4, 4, 3, 32), (1, 1, 32, 64), (1, 1, 64, 32))
    args = tuple(random(*shape, seed=n) for n, shape in enumerate(shapes))
    assert_close(optimized(network)(*args), network(*args), 1e-4)
    found = analysis(network, *args)
    count = sum(e == "conv_general_dilated" for e in itertools.chain(*(r.primitives for r in found.regions)))
    assert count == 3 and not found.left_out


@pytest.mark.parametrize(("name", "found"), [("1 x 1", True), ("3 x 3", False), ("depthwise", False)])
def test_what_regions_may_make_again(name: str, found: bool) -> None:
    """What stays with XLA is kept, however little it sums."""
    f, x, w = (PRODUCTS | OVERLAPPING)[name]
    (eqn,) = flatten(jax.make_jaxpr(f)(jnp.zeros(x), jnp.zeros(w))).eqns
    assert is_cheap(eqn) == found
