"""Slices and concatenations: windows of inputs, reductions and results in pieces, and where they stay with XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jaxpr_frontend.replacing import Replacing, analysis, assert_close, optimized, oracle, random

from mirage_jax.jaxpr_frontend.partition.reasons import Code
from mirage_jax.jaxpr_frontend.translate.translate import Region

X, W = random(16, 32), random(32, 96, seed=1)
QKV = tuple(random(2, 16, 8, seed=n) for n in range(3))
ANGLES = random(16, 4, seed=5), random(16, 4, seed=6)


def rotate_halves(x, c, s):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


def rotate_pairs(x, c, s):
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * c - b * s, b * c + a * s], -1).reshape(x.shape)


def rotate_some(x, c, s):
    """Only the first half of the features."""
    return jnp.concatenate([rotate_halves(x[..., :4], c[:, :2], s[:, :2]), x[..., 4:]], -1)


def attention(q, k, v):
    return jax.nn.softmax(q @ k.mT / 8) @ v


def rotated(rotate: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, *cs: attention(rotate(q, *cs), rotate(k, *cs), v)


def heads(x):
    return x.reshape(16, 4, 8).transpose(1, 0, 2)


def projected(x, w):
    q, k, v = map(heads, jnp.split(x @ w, 3, -1))
    return attention(q, k, v).transpose(1, 0, 2).reshape(16, 32)


def projected_by_index(x, w):
    qkv = (x @ w).reshape(16, 3, 4, 8).transpose(1, 2, 0, 3)
    return attention(qkv[0], qkv[1], qkv[2]).transpose(1, 0, 2).reshape(16, 32)


def llama(x, w, c, s):
    q, k, v = map(heads, jnp.split(x @ w, 3, -1))
    return attention(rotate_halves(q, c, s), rotate_halves(k, c, s), v).transpose(1, 0, 2).reshape(16, 32)


def swiglu(x, w):
    a, b = jnp.split(x @ w, 2, -1)
    return jax.nn.silu(a) * b


def joined(x, y, w):
    return jnp.concatenate([x, y], -1) @ w


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rope": (rotated(rotate_halves), (*QKV, *ANGLES)),
    "rope of pairs": (rotated(rotate_pairs), (*QKV, *ANGLES)),
    "rope of some features": (rotated(rotate_some), (*QKV, *ANGLES)),
    "fused projections": (projected, (X, W)),
    "fused projections by index": (projected_by_index, (X, W)),
    "fused projections, rope": (llama, (X, W, *ANGLES)),
    "swiglu": (swiglu, (X, W)),
    "glu": (jax.nn.glu, (random(3, 8) @ random(8, 8),)),
    "glu of a product": (lambda x, w: jax.nn.glu(x @ w, -1), (X, W)),
    "concatenate then product": (joined, (X, X[:, :5], random(37, 9))),
    "padding": (lambda x, w: jnp.pad(x, ((2, 1), (0, 64))) @ w.T, (X, W)),
    "last rows": (lambda x, w: (x @ w)[-2:], (X, W)),
    "columns of a sum": (lambda x: (x[:, 1:] - x[:, :-1]).sum(0), (X,)),
    "window of a mask": (lambda x: jnp.where(jnp.tri(16, dtype=bool)[4:12, :8], x[4:12, :8], 0).sum(1), (X,)),
}


FUSED = [n for n in PROGRAMS if n.startswith("fused projections")]


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "glu" and n not in FUSED])
def test_one_region(name: str) -> None:
    fn, args = PROGRAMS[name]
    found = analysis(fn, *args)
    (region,) = found.regions
    assert not found.left_out
    assert_close(optimized(fn)(*args), fn(*args))
    values = [random(*region.avals[b.value].shape, seed=7) for b in region.inputs]
    assert_close(oracle(region, values), region.reference(*values), 1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str) -> None:
    fn, args = PROGRAMS[name]
    numbers = tuple(range(len(args)))

    def gradients(wrap):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(wrap(fn)(*a))), numbers)

    assert_close(gradients(optimized)(*args), gradients(lambda f: f)(*args))


@pytest.mark.parametrize("name", ["rope", "rope of pairs", "swiglu", "concatenate then product"])
def test_the_gradient_is_in_regions_too(name: str) -> None:
    fn, args = PROGRAMS[name]
    loss = jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1))
    left_out = [x for x in analysis(loss, *args, max_ops=64).left_out if x.code != Code.NO_HEAVY_OP]
    assert not [x for x in left_out if x.primitive in ("slice", "concatenate", "pad", "stack")]


@pytest.mark.parametrize("name", FUSED)
def test_fused_projections_are_a_border(name: str) -> None:
    """One product for q, k and v, then attention with whatever comes before it: a region each."""
    fn, args = PROGRAMS[name]
    found = analysis(fn, *args)
    assert {(x.primitive, x.code) for x in found.left_out if x.code != Code.NO_HEAVY_OP} == {("slice", Code.LAYOUT)}
    projections, attention = found.regions
    assert [k.op.op for k in projections.graph.kernels] == ["dot"]
    assert sum(k.op.op == "exp" for k in attention.graph.kernels) == 1
    assert_close(optimized(fn)(*args), fn(*args))


# --- what the graphs are


def only_region(fn: Callable[..., Any], *args: Any) -> Region:
    (region,) = analysis(fn, *args).regions
    return region


def test_a_product_of_a_concatenation_is_a_sum_of_products() -> None:
    region = only_region(joined, X, X[:, :5], random(37, 9))
    assert [k.op.op for k in region.graph.kernels] == ["dot", "dot", "add"]
    assert [len(b.tensors) for b in region.inputs] == [1, 1, 2]  # the weights are read in two windows


def test_padding_adds_nothing_to_a_product() -> None:
    region = only_region(lambda x, w: jnp.pad(x, ((0, 0), (8, 56))) @ w.T, X, W)
    assert [k.op.op for k in region.graph.kernels] == ["dot"]
    assert region.graph.extent(region.graph.kernels[0].op.attributes["axes"][0]) == 32


def test_a_part_of_a_product_is_a_product_with_a_part() -> None:
    region = only_region(lambda x, w: (x @ w)[-1:, 3:10], X, W)
    assert region.graph.sizes == {"i": 32, "j": 7}
    assert [b.shape for b in region.outputs] == [(1, 7)]


def test_extents_are_plain_integers() -> None:
    """JAX writes some parameters as numpy's integers, which no JSON file of a decision could hold."""
    region = only_region(lambda x, w: jnp.exp(jnp.pad(x, ((0, 0), (1, 2)))).sum(0) + jnp.split(w[0], [35])[0], X, W)
    assert {type(n) for n in region.graph.sizes.values()} == {int}


def test_windows_are_made_once() -> None:
    region = only_region(lambda x, w: jnp.exp(x[:, :8]) @ w[:8] + jnp.sin(x[:, :8]) @ w[:8], X, W)
    assert [len(b.tensors) for b in region.inputs] == [1, 1]


def test_results_leave_in_pieces() -> None:
    def fn(x, y, w):
        whole = jnp.concatenate([x @ w, jnp.pad(y @ w, ((0, 0), (1, 2)))[:, 1:-2]])
        return jnp.exp(whole), whole.sum(0)

    region = only_region(fn, X, X[:5] + 1, W)
    assert [b.grid for b in region.outputs] == [(2, 1), (1,)]
    assert_close(optimized(fn)(X, X[:5] + 1, W), fn(X, X[:5] + 1, W))


# --- what stays outside


def outside(fn: Callable[..., Any], *args: Any) -> list[str]:
    assert_close(optimized(fn)(*args), fn(*args))
    return [x.primitive for x in analysis(fn, *args).left_out]


def test_taking_results_apart_is_left_to_xla() -> None:
    assert outside(lambda x, w: jnp.split(x @ w, 3, -1), X, W) == ["slice"] * 3
    assert outside(lambda x, w: jnp.concatenate([x @ w, x @ w]).reshape(4, -1), X, W) == ["concatenate", "reshape"]
    assert outside(lambda x, w: jnp.concatenate([x @ w, x @ w]) * 2, X, W) == []


def test_what_is_needed_whole_is_not_computed_in_part_too() -> None:
    def fn(x, w):
        y = x @ w
        return jnp.max(y, 0), jnp.exp(y[:, :7]).sum(0)

    assert "slice" in outside(fn, X, W)
    (left_out,) = analysis(fn, X, W).left_out
    assert left_out.code == Code.LAYOUT
    assert "computed twice" in left_out.why


def test_an_operand_is_no_part_of_a_result() -> None:
    """Nothing would compute that piece, and a muGraph has no operator that copies."""

    def fn(x, w):
        y = jnp.concatenate([x, x @ w[:, :32]])
        return y, jnp.exp(y).sum(0)

    assert outside(fn, X, W) == ["concatenate"]


def test_a_softmax_over_a_concatenation_is_left_whole() -> None:
    """Keys of a cache and new ones: the concatenations stay outside, attention stays one region."""

    def fn(q, k, v, old_k, old_v):
        return attention(q, jnp.concatenate([old_k, k], 1), jnp.concatenate([old_v, v], 1))

    args = (*QKV, random(2, 24, 8), random(2, 24, 8))
    assert outside(fn, *args) == ["concatenate", "concatenate"]
    assert len(only_region(fn, *args).graph.kernels) == 7


@pytest.mark.parametrize(
    ("fn", "primitive", "code"),
    [
        (lambda x: x[:, ::3] @ x[:, ::3].T, "slice", Code.LAYOUT),
        (lambda x: x[::-1] @ W, "rev", Code.UNSUPPORTED_PRIMITIVE),
        (lambda x: jnp.pad(x, 1, constant_values=-jnp.inf).max(0), "pad", Code.PARAMETERS),
        (lambda x: jax.lax.pad(x, x[0, 0], ((0, 1, 0), (0, 0, 0))).sum(0), "pad", Code.PARAMETERS),
        (lambda x: x.reshape(16, 4, 8).sum(1) @ x[:, 3:11].T, "slice", Code.LAYOUT),
    ],
)
def test_reasons(fn: Callable[..., Any], primitive: str, code: Code) -> None:
    assert (primitive, code) in {(x.primitive, x.code) for x in analysis(fn, X).left_out}
    assert_close(jnp.nan_to_num(optimized(fn)(X)), jnp.nan_to_num(fn(X)))


def test_windows_of_both_sides_of_a_product_have_names_of_their_own() -> None:
    """Rows times themselves, in segments: along one side a segment may be the same all along."""

    def gram(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = jnp.pad(jnp.concatenate([x, jnp.ones_like(x[:1])]), ((0, 0), (0, 1)))
        both = jnp.stack([rows, -rows], 2).reshape(-1, 2)
        return both @ both.T, both @ both.T @ random(21, 3, seed=9)

    (region,) = analysis(gram, random(2, 6, scale=1.0)).regions
    values = [random(*region.avals[b.value].shape, seed=7, scale=1.0) for b in region.inputs]
    assert_close(oracle(region, values), region.reference(*values), 1e-3)


# --- random programs

PARTS = ("slice", "stride", "halves", "swap", "concatenate", "pad", "stack")
OTHERS = ("exp", "mul", "transpose", "reshape", "dot", "gram", "sum", "broadcast", "index", "add part")


class Choices:
    """What a random program chose: drawn when it is traced first, repeated after that."""

    def __init__(self, data: st.DataObject):
        self.data, self.made, self.at = data, list[Any](), 0

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any:
        if self.at == len(self.made):
            self.made.append(self.data.draw(strategy))
        self.at += 1
        return self.made[self.at - 1]


def walk(x: Any, choose: Choices, steps: int) -> Any:
    choose.at = 0
    before = x
    for _ in range(steps):
        new = _step(x, before, choose)
        x, before = (new, x) if new.size <= 4096 and new.ndim <= 4 else (x, before)
    return x


def _step(x: Any, before: Any, choose: Choices) -> Any:
    d = choose(st.integers(0, x.ndim - 1))
    n = x.shape[d]
    y = jnp.moveaxis(x, d, 0)
    match choose(st.sampled_from(PARTS + OTHERS)):
        case "slice" if n > 1:
            start = choose(st.integers(0, n - 1))
            y = y[start : choose(st.integers(start + 1, n))]
        case "stride" if n > 3:
            y = y[choose(st.integers(0, 1)) :: 2]
        case "halves" if n % 2 == 0:
            a, b = jnp.split(y, 2)
            y = a * b + a
        case "swap" if n > 1:
            at = choose(st.integers(1, n - 1))
            y = jnp.concatenate([jnp.sin(y[at:]), y[:at]]) * y
        case "concatenate":
            y = jnp.concatenate([y, [y, y * 2, jnp.ones_like(y[:1]), y[-1:]][choose(st.integers(0, 3))]])
        case "pad":
            y = jnp.pad(y, [(choose(st.integers(0, 2)), choose(st.integers(0, 2)))] + [(0, 0)] * (y.ndim - 1))
        case "stack":
            y = jnp.stack([y, -y], choose(st.integers(0, y.ndim)))
            y = y.reshape(-1, *y.shape[2:]) if choose(st.booleans()) else y
        case "exp":
            y = jnp.exp(-y * y)
        case "mul":
            y = y * (y + 1)
        case "reshape":
            y = y.reshape(choose(st.sampled_from([(-1,), (y.shape[0], -1), (-1, y.shape[-1])])))
        case "dot":
            y = jnp.tensordot(random(3, n, seed=n), y, 1)
        case "gram" if y.ndim == 2:
            y = y @ y.T
        case "sum" if y.ndim > 1:
            y = y.sum(0)
        case "broadcast":
            y = y[None] * jnp.arange(1.0, 3.0).reshape(2, *[1] * y.ndim)
        case "index":
            y = y * jnp.arange(float(n)).reshape(n, *[1] * (y.ndim - 1))
        case "add part" if before.shape[1:] == y.shape[1:]:
            k = min(len(before), n)
            y = y[:k] + before[len(before) - k :]
        case _:
            return x * 0.5
    return jnp.moveaxis(y, 0, d) if y.ndim == x.ndim else y


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 7))
def test_random_programs(data: st.DataObject, steps: int) -> None:
    choose = Choices(data)

    def fn(x):
        y = walk(x, choose, steps)
        return y, jnp.tensordot(y, random(y.shape[-1], 3, seed=9), 1)

    x = random(4, 6, scale=1.0)
    fn(x)
    for region in analysis(fn, x).regions:
        values = [random(*region.avals[b.value].shape, seed=7, scale=1.0) for b in region.inputs]
        assert_close(oracle(region, values), region.reference(*values), 1e-3)  # float32, exponentials of sums
    compiler = Replacing()
    assert_close(optimized(fn, compiler)(x), fn(x))


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(2, 5))
def test_gradients_of_random_programs(data: st.DataObject, steps: int) -> None:
    choose = Choices(data)

    def walks(x, w):
        return walk(x, choose, steps), walk(x @ w, choose, steps)

    def fn(x, w):
        y, z = walks(x, w)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(z))

    x, w = random(4, 6, scale=1.0), random(6, 6, seed=3)
    assume(max(float(jnp.abs(y).max()) for y in walks(x, w)) < 1e3)  # in float32, sines of large numbers are noise
    have, want = optimized(jax.grad(fn, (0, 1)))(x, w), jax.grad(fn, (0, 1))(x, w)
    assert_close(have, want, 1e-3)
    assert np.isfinite(np.asarray(want[0])).all()


EDGES = st.tuples(st.integers(-7, 6), st.integers(-7, 6), st.integers(0, 2))  # low, high, interior


def padded(n: int, edges: tuple[int, int, int]) -> int:
    """How many elements `lax.pad` makes of n along one dimension; negative if it refuses."""
    low, high, inner = edges
    return low + n + max(n - 1, 0) * inner + high


def product_of_padded(x, config, part, step, more):
    """A product of padded rows, or of some of them, with others that may be none after them."""
    y = jax.lax.pad(x, jnp.float32(0.5), config)
    y = y[part::step] if part or step > 1 else y
    y = jnp.concatenate([y, x[:more, :1] * jnp.ones((1, y.shape[1])), y[:0]]) if more else y
    return jnp.tanh(y * 2) @ random(y.shape[1], 3, seed=9)


@settings(max_examples=30, deadline=None)
@given(EDGES, EDGES, st.integers(0, 2), st.integers(1, 2), st.integers(0, 2))
@example((-5, 5, 0), (0, 0, 0), 0, 1, 0)  # all of x is cropped
@example((-7, 9, 0), (0, 0, 0), 0, 1, 0)  # more than there is
@example((6, -6, 0), (0, 0, 0), 0, 1, 0)
@example((-1, -10, 2), (0, 0, 0), 0, 1, 0)  # between two elements of x
@example((0, 0, 0), (-4, 2, 1), 0, 1, 2)
@example((-5, 0, 0), (0, 0, 0), 0, 1, 2)  # nothing at all
def test_paddings_crop_as_far_as_they_like(rows, columns, part: int, step: int, more: int) -> None:
    config, x = (rows, columns), random(5, 4, scale=1.0)
    assume(padded(5, rows) >= 0 and padded(4, columns) >= 0)

    def fn(x):
        return product_of_padded(x, config, part, step, more)

    for region in analysis(fn, x).regions:
        cuts = (cut for inward in region.inputs for view in inward.views for cut in view.cuts)
        for start, limit, n in (edges for cut in cuts for edges in zip(cut.starts, cut.limits, cut.shape, strict=True)):
            assert 0 <= start < limit <= n
        values = [random(*region.avals[v].shape, seed=7, scale=1.0) for v in region.operands]
        inputs = [x for v, x in zip(region.operands, values, strict=True) if v in {b.value for b in region.inputs}]
        assert_close(oracle(region, inputs), region.reference(*inputs))
    assert_close(optimized(fn)(x), fn(x))
