"""Named axes: any chain of layout changes and products means the same on the graph as on arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxpr_frontend.replacing import analysis, assert_close, oracle, random

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate.axes import AxisKey, AxisTable


def factorizations(n: int) -> list[tuple[int, ...]]:
    """Shapes of n elements, up to three dimensions, with 1 as an allowed size."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return (
        [(n,)]
        + [(a, n // a) for a in divisors]
        + [(a, b, n // a // b) for a in divisors for b in divisors if n % (a * b) == 0]
    )


def walk(x, data: st.DataObject, steps: int):
    """A random chain of layout changes, broadcasts, sums and products with itself."""
    for _ in range(steps):
        step = data.draw(st.sampled_from(["reshape", "transpose", "broadcast", "sum", "add", "gram", "max"]))
        match step:
            case "reshape":
                x = x.reshape(data.draw(st.sampled_from(factorizations(x.size))))
            case "transpose":
                x = x.transpose(data.draw(st.permutations(range(x.ndim))))
            case "broadcast" if x.size < 200:
                x = jnp.broadcast_to(x[None], (2, *x.shape)).swapaxes(0, -1)
            case "sum" | "max" if x.ndim > 1:
                axis = data.draw(st.integers(0, x.ndim - 1))
                x = x.sum(axis, keepdims=True) if step == "sum" else x.max(axis)
            case "add" if x.ndim > 1 and x.shape[0] == x.shape[-1]:
                x = x + x.swapaxes(0, -1)
            case "gram" if x.ndim == 2 and x.shape[0] < 9:
                x = x @ x.T
            case _:
                x = x * 2 + 1
    return x


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_chains_of_layouts(data: st.DataObject, steps: int) -> None:
    start = random(4, 6, scale=1.0)
    choices: list[object] = []

    class Recorded:
        """Draws once; later traces repeat the same choices."""

        def __init__(self, at: int = 0):
            self.at = at

        def draw(self, strategy):
            if self.at == len(choices):
                choices.append(data.draw(strategy))
            self.at += 1
            return choices[self.at - 1]

    def fn(x):
        y = walk(x, Recorded(), steps)
        return jnp.sum(y, -1) if y.ndim > 1 else jnp.broadcast_to(y * y, (2, *y.shape)).sum(0)

    want = fn(start)
    found = analysis(fn, start)
    assert all(x.code in (Code.LAYOUT, Code.RANK0, Code.NO_HEAVY_OP) for x in found.left_out)
    for region in found.regions:
        values = [random(*region.avals[b.value].shape, seed=7, scale=1.0) for b in region.inputs]
        assert_close(oracle(region, values), region.reference(*values), 1e-5)
    assert want.shape == jax.eval_shape(fn, start).shape


def test_a_reshape_splits_an_axis_everywhere() -> None:
    def fn(x, w):
        return jnp.sum((x @ w).reshape(8, 4, 3), -1)

    (region,) = analysis(fn, random(8, 5), random(5, 12)).regions
    assert [t.axes for t in region.graph.inputs] == [("i", "j"), ("j", "k", "l")]
    assert region.graph.sizes == {"i": 8, "j": 5, "k": 4, "l": 3}


def test_a_reshape_that_is_no_split_ends_the_region() -> None:
    def fn(x, w):
        return (x @ w).reshape(9, 4) @ jnp.ones((4, 2))

    found = analysis(fn, random(6, 5), random(5, 6))
    assert len(found.regions) == 2
    assert [(x.primitive, x.code) for x in found.left_out] == [("reshape", Code.LAYOUT)]
    assert "test_axes.py" in found.left_out[0].where


def test_a_square_of_one_tensor_is_seen_under_two_names() -> None:
    (region,) = analysis(lambda x: jnp.sum(x + x.T, 0), random(4, 4)).regions
    assert "add x0[i,i'] x0[i',i]" in str(region.graph)
    (region,) = analysis(lambda x: x @ x, random(4, 4)).regions
    assert "dot{axes=(i')} x0[i,i'] x0[i',i'']" in str(region.graph)


def test_axis_table() -> None:
    table = AxisTable()
    i, j, k = table.fresh(12), table.fresh(12), table.fresh(3)
    assert table.unify([(i,)], [(j,)]) == {}
    assert table.resolve((j,)) == table.resolve((i,))
    assert table.unify([(i,)], [(table.fresh(4), k)]) == {}  # splits i (and j) into 4 * 3
    assert len(table.resolve((j,))) == 2
    with pytest.raises(NotExpressible):
        table.regroup((table.resolve((i,)),), (6, 2))
    whole, copied = table.fresh(4), table.fresh(4)
    halves = (table.fresh(2), table.fresh(2))
    table.unify([(whole,), (table.copy_of(whole, [whole]),)], [(copied,), halves])  # the second splits the first, too
    assert len(table.resolve((whole,))) == len(table.resolve((copied,))) == 2
    square, other = table.fresh(5), table.fresh(5)
    table.keep_apart((square, other))
    view = table.unify([(square,)], [(other,)])  # one tensor has both: they become copies, and a view tells them apart
    assert view == {AxisKey(square.base, 1): square}
    copy = table.copy_of(AxisKey(k.base), [AxisKey(k.base)])
    assert table.extent(copy) == 3


def test_constants_are_exact() -> None:
    (region,) = analysis(lambda x: jnp.sum(x / 4 * 3 - 0.5, 0), random(4, 2)).regions
    (total, scaled) = region.graph.kernels
    assert total.op.op == "sum"
    assert scaled.op.head() == "affine{offset=-2, scale=3/4}"
    (region,) = analysis(lambda x: jnp.sum(jnp.exp(x * np.float32(0.1)), 0), random(4, 2)).regions
    assert "exp{scale=13421773/134217728}" in str(region.graph)
