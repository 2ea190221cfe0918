"""Block graphs that no benchmark has, one feature each: what the search may hand over."""

import itertools
import re
from fractions import Fraction as Q

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lower.kernels import Block, Program, graph, schedule, softmax, tensor
from lower.test_programs import error as interpreted_error

from mirage_jax.compiler.tuning import as_precise
from mirage_jax.compiler.winner import KERNEL_EMIT_OPTIONS
from mirage_jax.errors import GraphError, LoweringError, UnsupportedError
from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime.launch import run_cuda, sources
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Library, Load, Op, Precision, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret


def one(block: Block, inputs, extents, tiles, expected, parts=None) -> Program:
    return Program(graph(inputs, [block], block.stores[0].tensor.name, extents), schedule(tiles, parts=parts), expected)


def error(program: Program) -> float:
    """The error in the interpreter, for a graph that the compiler takes as well; on exact numbers there is none."""
    try:
        check_graph(program.graph)
        assert exact_check(program.graph, program.schedule) == ""
    except GraphError:
        pass  # the emitter takes some graphs that the checker does not
    for source in sources(program.graph, program.schedule):
        assert source is None or compile_for(source, 90).fits
    return interpreted_error(program)


def f32(name: str, axes: str):
    return tensor(name, axes, "f32")


@pytest.mark.parametrize("masked", [-(10**9), Q(int(np.finfo(np.float32).min))], ids=["1e9", "min"])
@pytest.mark.parametrize("n", [32, 41])
def test_causal_attention(masked, n: int) -> None:
    """A mask of index comparisons: the first rows see whole tiles of masked keys, by numbers that overflow in log2."""
    b = Block("causal", "i", "n")
    q, k, v = b.load("Q", "i d"), b.load("K", "d n"), b.load("V", "n e")
    seen = b.le(b.iota(axis="n"), b.iota(axis="i"))
    s = b.where(seen, b.dot(q, k, axes="d"), b.const(value=masked))
    m = b.shift(s, axes="n", scale=Q(1, 4))
    p = b.exps(s, m, scale=Q(1, 4))
    total, o = b.accs(b.sum(p, axes="n"), m), b.accs(b.dot(p, v, axes="n"), m)
    b.store(f32("Y", "i e"), b.div(o, total))
    inputs = [f32("Q", "i d"), f32("K", "d n"), f32("V", "n e")]

    def expected(q, k, v):
        s = np.where(np.tri(n, n, dtype=bool), q @ k, -1e9) / 4
        return softmax(s) @ v

    assert error(one(b, inputs, {"i": n, "n": n, "d": 16, "e": 16}, {"i": 16, "n": 16}, expected)) < 1e-5


@pytest.mark.parametrize("n", [32, 41])
@pytest.mark.parametrize("scale", [Q(1, 8), Q(3), Q(-1, 8)], ids=str)
def test_scales_of_masked_logits(scale: Q, n: int) -> None:
    """A positive one becomes part of the exponentials' constants if nothing else is made of the logits. The stored
    maximum is that of the scaled logits all the same.
    """

    def program(also_summed: bool) -> KernelGraph:
        b = Block("scaled", "i", "n")
        q, k, v = b.load("Q", "i d"), b.load("K", "d n"), b.load("V", "n e")
        logits = b.affine(b.dot(q, k, axes="d"), scale=scale)
        s = b.mask(b.le(b.iota(axis="n"), b.iota(axis="i")), logits)
        m = b.shift(s, axes="n")
        p = b.exps(s, m, scale=Q(2))
        b.store(f32("Y", "i e"), b.div(b.accs(b.dot(p, v, axes="n"), m), b.accs(b.sum(p, axes="n"), m)))
        last = b.last(m)
        b.store(f32("M", "i"), b.add(last, b.acc(b.sum(logits, axes="n"))) if also_summed else last)
        inputs = [f32("Q", "i d"), f32("K", "d n"), f32("V", "n e")]
        return graph(inputs, [b], "Y M", {"i": n, "n": n, "d": 16, "e": 16})

    rng = np.random.default_rng(0)
    q, k, v = arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((n, 16), (16, n), (n, 16))]
    logits = q.astype(np.float64) @ k * float(scale)
    seen = np.where(np.tri(n, dtype=bool), logits, -np.inf)
    for also_summed in (False, True):
        made, sizes = program(also_summed), schedule({"i": 16, "n": 16})
        check_graph(made)
        assert exact_check(made, sizes) == ""
        (source,) = sources(made, sizes)
        assert source is not None and compile_for(source, 90).fits
        assert ("affine" in source.text) == (also_summed or scale < 0)
        y, m = interpret(made, sizes, arrays)
        assert np.abs(y - softmax(2 * seen) @ v).max() < 1e-5
        assert np.abs(m - seen.max(-1) - also_summed * logits.sum(-1)).max() < 1e-4


def test_statistics_of_rows_are_reduced_along_columns() -> None:
    """Of scores alone no product says which axis comes first: maxima and sums do, whatever order operands are given in.
    A few rows past which a matrix is streamed stay columns.
    """
    b = Block("statistics", "i", "n")
    k, q = b.load("K", "n d"), b.load("Q", "i d")
    s = b.dot(k, q, axes="d")
    m = b.shift(s, axes="n")
    b.store(f32("Y", "i"), b.accs(b.sum(b.exps(s, m), axes="n"), m))
    b.store(f32("M", "i"), b.last(m))
    made = graph([f32("K", "n d"), f32("Q", "i d")], [b], "Y M", {"i": 128, "n": 128, "d": 16})
    (source,) = sources(made, schedule({"i": 64, "n": 32}))
    assert source is not None and "axis=1" in source.text and "axis=0" not in source.text


def weights_by_stored_statistics(n: int, d: int, scale: Q, masked: bool) -> KernelGraph:
    """softmax(scale * Q K), by one kernel for maxima and sums and another one for what is divided by them."""

    def logits(b: Block) -> str:
        s = b.affine(b.dot(b.load("Q", "i d"), b.load("K", "d n"), axes="d"), scale=scale)
        return b.mask(b.le(b.iota(axis="n"), b.iota(axis="i")), s) if masked else s

    b = Block("statistics", "i", "n")
    s = logits(b)
    m = b.shift(s, axes="n")
    b.store(f32("M", "i"), b.last(m))
    b.store(f32("L", "i"), b.accs(b.sum(b.exps(s, m), axes="n"), m))
    c = Block("weights", "i", "n")
    s = logits(c)
    c.store(f32("Y", "i n"), c.div(c.exps(s, c.load("M", "i")), c.load("L", "i")))
    return graph([tensor("Q", "i d", "bf16"), tensor("K", "d n", "bf16")], [b, c], "Y", {"i": n, "n": n, "d": d})


large_logits = pytest.mark.parametrize(
    ("scale", "masked", "precise"),
    [
        (scale, masked, precise)
        for scale in (Q(1), Q(1, 8), Q(3, 31))
        for masked in (False, True)
        for precise in (Precision.FAST, Precision.SPLIT_FLOAT32_RESULTS)
    ],
    ids=str,
)


def rows_of_large_logits(n: int, d: int) -> list[np.ndarray]:
    """For these a maximum that another kernel rounds otherwise moves each weight by a percent. They are integers whose
    products have no rounding, in whatever order they are added up.
    """
    rng = np.random.default_rng(0)
    return [rng.integers(-255, 256, shape).astype(ml_dtypes.bfloat16) for shape in ((n, d), (d, n))]


@large_logits
def test_large_logits_by_stored_statistics(scale: Q, masked: bool, precise: Precision) -> None:
    """Weights add up to one, bit for bit the exponentials that were added up."""
    made = weights_by_stored_statistics(32, 16, scale, masked)
    check_graph(made)
    sizes = as_precise(schedule({"i": 16, "n": 16}, {"i": 16, "n": 16}), precise)
    (y,) = interpret(made, sizes, rows_of_large_logits(32, 16))
    assert np.abs(y.sum(-1) - 1).max() < 1e-4


def huge_logits() -> list[KernelGraph]:
    """Softmaxes of 3/31 Q K in one kernel: times V, and times a temperature of each row."""
    inputs, extents = [f32("Q", "i d"), f32("K", "d n"), f32("V", "n e")], {"i": 64, "n": 64, "d": 16, "e": 16}
    graphs = []
    for temperature in (False, True):
        b = Block("attention", "i", "n")
        s = b.dot(b.load("Q", "i d"), b.load("K", "d n"), axes="d")
        s, scale = (b.mul(s, b.load("T", "i")), Q(1)) if temperature else (s, Q(3, 31))
        m = b.shift(s, axes="n", scale=scale)
        p = b.exps(s, m, scale=scale)
        total, out = b.accs(b.sum(p, axes="n"), m), b.accs(b.dot(p, b.load("V", "n e"), axes="n"), m)
        b.store(f32("Y", "i e"), b.div(out, total))
        graphs.append(graph([*inputs, *([f32("T", "i")] if temperature else [])], [b], "Y", extents))
    return graphs


def huge_arrays(size: float) -> list[np.ndarray]:
    """Inputs of which Q and K are of a size; all temperatures are 3/31."""
    rng = np.random.default_rng(0)
    q, k, v = (np.float32(rng.standard_normal(s)) for s in ((64, 16), (16, 64), (64, 16)))
    return [q * np.float32(size), k * np.float32(size), v, np.full(64, 3 / 31, np.float32)]


sizes_of_logits = pytest.mark.parametrize("size", [1e3, 1e5, 1e8])


@sizes_of_logits
def test_the_largest_exponential_is_one(size: float) -> None:
    """An fma does not round the product of the largest logit, but its maximum is rounded: half a unit of logits of 1e10
    is more than an exponent may be.
    """
    arrays = huge_arrays(size)
    for made in huge_logits():
        inputs = arrays[: len(made.inputs)]
        (y,) = interpret(made, schedule({"i": 32, "n": 32}), inputs)
        assert np.isfinite(y).all() and np.abs(y).max() <= np.abs(arrays[2]).max() * 1.0001
        portable = jax.jit(lambda *xs, made=made: run(made, xs, xp=jnp, dtype=None))
        assert np.isfinite(portable(*inputs)[0]).all()
    sizes = schedule({"i": 16, "n": 16}, {"i": 16, "n": 16})
    halves = [np.asarray(x, ml_dtypes.bfloat16) for x in (arrays[0][:32], arrays[1][:, :32])]
    for scale, masked in itertools.product((Q(1), Q(3, 31)), (False, True)):
        (y,) = interpret(weights_by_stored_statistics(32, 16, scale, masked), sizes, halves)
        assert np.abs(y.sum(-1) - 1).max() < 1e-4


def attention_in_parts(scale: Q) -> KernelGraph:
    """softmax(scale Q K) V, where two kernels' parts are moved to one maximum."""
    a = Block("parts", "i n.g", "n")
    s = a.dot(a.load("Q", "i d"), a.load("K", "d n"), axes="d")
    m = a.shift(s, axes="n", scale=scale)
    p = a.exps(s, m, scale=scale)
    a.store(f32("L", "n.g i"), a.accs(a.sum(p, axes="n"), m))
    a.store(f32("O", "n.g i e"), a.accs(a.dot(p, a.load("V", "n e"), axes="n"), m))
    a.store(f32("M", "n.g i"), a.last(m))
    b = Block("whole", "i")
    part = b.load("M", "n.g i")
    top = b.shift(part, axes="n.g")
    total = b.sum(b.rescale(b.load("L", "n.g i"), part, top), axes="n.g")
    out = b.sum(b.rescale(b.load("O", "n.g i e"), part, top), axes="n.g")
    b.store(f32("Y", "i e"), b.div(out, total))
    extents = {"i": 32, "n": 64, "d": 64, "e": 16}
    return graph([f32("Q", "i d"), f32("K", "d n"), f32("V", "n e")], [a, b], "Y", extents)


@pytest.mark.parametrize("power", [0, 10, 20, 24, 27, 28, 29, 30, 60, 100, 126])
@pytest.mark.parametrize("scale", [Q(1), Q(3, 31), Q(1, 8), Q(1, 2**40)])
def test_logits_of_any_size(scale: Q, power: int) -> None:
    """Neighbouring floats around a maximum of 2^power, of both signs: logits that any rounding of a product loses, and
    maxima that pass from one factor to the other.
    """
    rng = np.random.default_rng(power)
    size = np.float32(2.0**power) * rng.choice([-1, 1], (32, 1)).astype("f4")
    steps = np.sort(rng.integers(-3, 4, (32, 64)), -1) * rng.choice([0, 1, 2**20], (32, 1))
    q = (size * (1 + steps.astype("f4") * np.float32(2.0**-23))).astype("f4")
    q[::4] = np.sort(q[::4] * rng.uniform(0.2, 1.5, (8, 64)).astype("f4"), -1)
    v = rng.standard_normal((64, 16)).astype("f4")
    logits = q.astype(np.float64) * float(scale)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ v
    made = attention_in_parts(scale)
    sizes = schedule({"i": 16, "n": 16}, {"i": 16}, parts={"n": 2})
    (y,) = interpret(made, sizes, [q, np.eye(64, dtype="f4"), v])
    near = 2.0 ** max(power - 24, -20) * float(scale)  # a stored maximum is rounded
    np.testing.assert_allclose(y, want, atol=1e-5 + (0 if scale.numerator == 1 else min(near, 1) * 4))


@pytest.mark.gpu
@sizes_of_logits
def test_the_largest_exponential_is_one_on_a_gpu(size: float) -> None:
    """Whatever products a compiler joins to sums."""
    for made in huge_logits():
        call = jax.jit(
            lambda *xs, made=made: run_cuda(made, schedule({"i": 32, "n": 32}), xs, None, options=KERNEL_EMIT_OPTIONS)
        )
        (y,) = call(*huge_arrays(size)[: len(made.inputs)])
        assert np.isfinite(y).all() and np.abs(y).max() <= np.abs(huge_arrays(size)[2]).max() * 1.0001


@pytest.mark.gpu
@large_logits
def test_large_logits_by_stored_statistics_on_a_gpu(scale: Q, masked: bool, precise: Precision) -> None:
    """Whatever the tiles, and whatever the compiler makes of each kernel."""
    made = weights_by_stored_statistics(256, 64, scale, masked)
    sizes = as_precise(schedule({"i": 128, "n": 64}, {"i": 32, "n": 128}), precise)
    run = jax.jit(lambda *xs: run_cuda(made, sizes, xs, None, options=KERNEL_EMIT_OPTIONS))
    (y,) = run(*rows_of_large_logits(256, 64))
    assert np.abs(np.asarray(y).sum(-1) - 1).max() < 1e-4


def test_rows_without_any_key_are_uniform() -> None:
    """softmax over equal huge negative numbers is 1/n in JAX; it must not become 0/0 here."""
    b = Block("masked", "i", "n")
    x, keep = b.load("X", "i n"), b.load("keep", "i n")
    s = b.where(keep, x, b.const(value=Q(int(np.finfo(np.float32).min))))
    m = b.shift(s, axes="n", scale=Q(2))
    b.store(f32("Y", "i"), b.accs(b.sum(b.exps(s, m, scale=Q(2)), axes="n"), m))
    g = graph([f32("X", "i n"), tensor("keep", "i n", "bool")], [b], "Y", {"i": 4, "n": 37})
    (y,) = interpret(g, schedule({"i": 4, "n": 16}), [np.ones((4, 37), np.float32), np.zeros((4, 37), bool)])
    np.testing.assert_array_equal(y, 37.0)


@pytest.mark.parametrize("n", [64, 50])
def test_running_maximum_of_a_product(n: int) -> None:
    """A maximum over the axis of the loop is carried; padded lanes of the last step are not in it."""
    b = Block("row_max", "i", "n")
    q, k = b.load("Q", "i d"), b.load("K", "d n")
    squares = b.dot(b.mul(q, q), b.mul(k, k), axes="d")
    b.store(f32("Y", "i"), b.last(b.max(b.affine(squares, scale=-1), axes="n")))
    program = one(
        b, [f32("Q", "i d"), f32("K", "d n")], {"i": 24, "d": 16, "n": n}, {"i": 16, "n": 16},
        lambda q, k: -(q * q @ (k * k)).min(-1),
    )  # fmt: skip
    assert error(program) < 1e-6


@pytest.mark.parametrize("n", [64, 50])
def test_logarithm_of_a_sum_of_exponentials(n: int) -> None:
    """In one pass over logits that are never stored."""
    b = Block("logsumexp", "i", "n")
    q, k = b.load("Q", "i d"), b.load("K", "d n")
    s = b.dot(q, k, axes="d")
    m = b.shift(s, axes="n", scale=Q(8))
    total = b.accs(b.sum(b.exps(s, m, scale=Q(8)), axes="n"), m)
    b.store(f32("Y", "i"), b.logs(total, b.last(m)))

    def expected(q, k):
        s = 8 * (q @ k)
        return s.max(-1) + np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1))

    inputs = [f32("Q", "i d"), f32("K", "d n")]
    assert error(one(b, inputs, {"i": 24, "d": 16, "n": n}, {"i": 16, "n": 16}, expected)) < 1e-6


@pytest.mark.parametrize("scale", [Q(1), Q(-1, 2)])
@pytest.mark.parametrize("n", [64, 50])
def test_logarithms_of_weights_in_two_passes(n: int, scale: Q) -> None:
    """The maximum is subtracted before the logarithm: of rows a million from zero both keep their digits."""
    b = Block("log_softmax", "i", "n")
    x = b.load("X", "i n")
    m = b.shift(x, axes="n")
    total = b.accs(b.sum(b.exps(x, m), axes="n"), m)
    b.store(f32("Y", "i n"), b.lesslogs(x, total, b.last(m), scale=scale))

    def expected(x):
        s = x - x.max(-1, keepdims=True)
        return float(scale) * (s - np.log(np.exp(s).sum(-1, keepdims=True)))

    program = one(b, [f32("X", "i n")], {"i": 24, "n": n}, {"i": 16, "n": 16}, expected)
    assert error(program) < 1e-6
    far = np.random.default_rng(0).standard_normal((24, n)).astype(np.float32)
    far[::2] += np.float32(1e6)
    far[1] = np.finfo(np.float32).min
    (have,) = interpret(program.graph, program.schedule, [far])
    np.testing.assert_allclose(have, expected(far.astype(np.float64)), atol=1e-5)


@pytest.mark.parametrize("k", [64, 50])
def test_second_loop(k: int) -> None:
    """A body value of the second loop needs an accumulator of the first."""
    b = Block("two_loops", "i j", "k")
    x, w = b.load("X", "i k"), b.load("W", "k j")
    scale = b.pow(b.acc(b.dot(x, x, axes="k")), scale=Q(1, k), offset=Q(1, 10**6), exponent=Q(-1, 2))
    b.store(f32("Y", "i j"), b.acc(b.dot(b.mul(x, scale), w, axes="k")))
    program = one(
        b, [f32("X", "i k"), f32("W", "k j")], {"i": 16, "k": k, "j": 16}, {"i": 16, "j": 16, "k": 16},
        lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) @ w,
    )  # fmt: skip
    assert sources(program.graph, program.schedule)[0].text.count("for ") == 2
    assert error(program) < 2e-6


@pytest.mark.parametrize("n", [64, 50])
def test_store_in_each_step(n: int) -> None:
    """Row-tiled softmax: the first loop finds shift and sum, the second recomputes and stores."""
    b = Block("softmax", "i", "n")
    x = b.load("X", "i n")
    m = b.shift(x, axes="n")
    total, top = b.accs(b.sum(b.exps(x, m), axes="n"), m), b.last(m)
    b.store(f32("Y", "i n"), b.div(b.exps(x, top), total))
    assert error(one(b, [f32("X", "i n")], {"i": 3, "n": n}, {"i": 1, "n": 16}, softmax)) < 2e-6


def test_several_contracted_axes() -> None:
    b = Block("joint", "i j")
    b.store(f32("Y", "i j"), b.dot(b.load("X", "k i l"), b.load("W", "l j k"), axes="k l"))
    inputs, extents = [f32("X", "k i l"), f32("W", "l j k")], {"i": 20, "j": 9, "k": 3, "l": 5}
    program = one(b, inputs, extents, {"i": 16, "j": 16}, lambda x, w: np.einsum("kil,ljk->ij", x, w))
    assert error(program) < 2e-6


def test_batched_elementwise_product() -> None:
    """Three tile axes: a product with a shared free axis is a sum of products, not a matrix product."""
    b = Block("batched", "h")
    b.store(f32("Y", "h i"), b.dot(b.load("X", "h i k"), b.load("W", "h i k"), axes="k"))
    program = one(b, [f32("X", "h i k"), f32("W", "h i k")], {"h": 6, "i": 5, "k": 7}, {"h": 4},
                  lambda x, w: np.einsum("hik,hik->hi", x, w))  # fmt: skip
    assert error(program) < 2e-6


def test_transposed_operands_and_copies() -> None:
    """X Xᵀ: one tensor under two names, and a result whose transpose is stored as well."""
    b = Block("gram", "i i'", "k")
    y = b.acc(b.dot(b.load("X", "i k"), b.load("X", "i' k"), axes="k"))
    b.store(f32("Y", "i' i"), y)
    program = one(b, [f32("X", "i k")], {"i": 20, "k": 40}, {"i": 16, "i'": 16, "k": 16}, lambda x: x @ x.T)
    assert error(program) < 2e-6


def test_sum_after_unreduced_accumulator() -> None:
    b = Block("late", "i", "k")
    x = b.load("X", "i k")
    b.store(f32("Y", "i"), b.sum(b.acc(b.exp(x, scale=Q(1, 2), offset=1)), axes="k"))
    program = one(b, [f32("X", "i k")], {"i": 5, "k": 50}, {"i": 2, "k": 16}, lambda x: np.exp(x / 2 + 1).sum(-1))
    assert error(program) < 2e-6


def test_sum_over_an_absent_axis_counts() -> None:
    b = Block("count", "i")
    b.store(f32("Y", "i"), b.sum(b.load("X", "i"), axes="k"))
    assert error(one(b, [f32("X", "i")], {"i": 5, "k": 7}, {"i": 4}, lambda x: 7 * x)) < 2e-6


def test_scalars_and_whole_reductions() -> None:
    b = Block("scalar", "")
    x, s = b.load("X", "i k"), b.load("s", "")
    b.store(f32("Y", ""), b.mul(b.sum(x, axes="i k"), b.pow(b.affine(s, offset=3), exponent=-1)))
    assert error(one(b, [f32("X", "i k"), f32("s", "")], {"i": 5, "k": 7}, {}, lambda x, s: x.sum() / (s + 3))) < 2e-6


def test_running_maximum() -> None:
    b = Block("maximum", "i", "k")
    b.store(f32("Y", "i"), b.last(b.max(b.load("X", "i k"), axes="k")))
    assert (
        error(one(b, [f32("X", "i k")], {"i": 5, "k": 50}, {"i": 4, "k": 16}, lambda x: x.max(-1) - 0 * x[:, 0])) < 1e-6
    )


@pytest.mark.parametrize("tile", [1, 2, 16])
def test_running_maximum_of_short_parts(tile: int) -> None:
    """What lies beyond the last part is no number of the row, also where a step is a single element."""
    b = Block("parts", "k.g i", "k")
    b.store(f32("P", "k.g i"), b.last(b.max(b.affine(b.load("X", "i k"), scale=-1, offset=-5), axes="k")))
    c = Block("combine", "i")
    c.store(f32("Y", "i"), c.max(c.load("P", "k.g i"), axes="k.g"))
    g = graph([f32("X", "i k")], [b, c], "Y", {"i": 5, "k": 50})
    sizes = schedule({"i": 4, "k": tile}, {"i": 4}, parts={"k": 4})
    assert error(Program(g, sizes, lambda x: (-x - 5).max(-1))) < 1e-6


def test_index_inside_a_part() -> None:
    """An index is global, also where its axis is divided into parts."""
    b = Block("ramp", "i k.g", "k")
    x = b.load("X", "i k")
    b.store(f32("P", "i k.g"), b.acc(b.sum(b.mul(x, b.iota(axis="k")), axes="k")))
    c = Block("combine", "i")
    c.store(f32("Y", "i"), c.sum(c.load("P", "i k.g"), axes="k.g"))
    g = graph([f32("X", "i k")], [b, c], "Y", {"i": 3, "k": 50})
    program = Program(g, schedule({"i": 1, "k": 8}, {"i": 2}, parts={"k": 3}), lambda x: x @ np.arange(50))
    assert error(program) < 2e-6


def test_every_function_of_the_table_has_text_that_runs() -> None:
    from mirage_jax.mugraph.operators import FUNCTIONS

    for f in FUNCTIONS.values():
        b = Block("pointwise", "i")
        names = [f"x{n}" for n in range(f.arity)]
        b.store(f32("Y", "i"), b.op(f.name, *(b.load(n, "i") for n in names)))
        g = graph([f32(n, "i") for n in names], [b], "Y", {"i": 40})
        rng = np.random.default_rng(0)
        xs = [rng.standard_normal(40).round(1).astype(np.float32) for _ in names]
        if f.name in ("log", "log1p", "power"):
            xs = [np.abs(x) + np.float32(1e-3) for x in xs]
        if f.name in ("asin", "acos"):
            xs = [np.tanh(x) for x in xs]
        if f.name == "acosh":
            xs = [1 + np.abs(x) for x in xs]
        sizes = schedule({"i": 16})
        (y,) = interpret(g, sizes, xs)
        assert compile_for(sources(g, sizes)[0], 90).fits
        want = np.asarray(f.value(np, *(x.astype(np.float64) for x in xs)), np.float64)
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6, err_msg=f.name)


@pytest.mark.parametrize("exponent", [-2, -1, Q(-1, 2), Q(1, 2), 2, 3, Q(3, 2), Q(-3, 2), Q(1, 3), 11])
def test_powers(exponent) -> None:
    b = Block("power", "i")
    b.store(f32("Y", "i"), b.pow(b.load("X", "i"), exponent=exponent, scale=2, offset=Q(1, 2)))
    g = graph([f32("X", "i")], [b], "Y", {"i": 40})
    x = np.random.default_rng(0).random(40).astype(np.float32)
    (y,) = interpret(g, schedule({"i": 16}), [x])
    assert compile_for(sources(g, schedule({"i": 16}))[0], 90).fits
    np.testing.assert_allclose(y, (2 * x.astype(np.float64) + 0.5) ** float(exponent), rtol=4e-6)


def test_padded_lanes_never_reach_a_sum() -> None:
    """1/x is infinite in padded lanes; the sums must not see them."""
    b = Block("reciprocal", "i", "k")
    r = b.pow(b.load("X", "i k"), exponent=-1)
    b.store(f32("Y", "i j"), b.acc(b.dot(r, b.load("W", "k j"), axes="k")))
    b.store(f32("Z", "i"), b.acc(b.sum(r, axes="k")))
    g = graph([f32("X", "i k"), f32("W", "k j")], [b], "Y Z", {"i": 5, "k": 21, "j": 5})
    rng = np.random.default_rng(0)
    x, w = (1 + rng.random((5, 21))).astype(np.float32), rng.random((21, 5)).astype(np.float32)
    y, z = interpret(g, schedule({"i": 5, "k": 16}), [x, w])
    np.testing.assert_allclose(y, 1 / x.astype(np.float64) @ w, rtol=2e-6)
    np.testing.assert_allclose(z, (1 / x.astype(np.float64)).sum(-1), rtol=2e-6)


def test_library_operators_run_between_kernels() -> None:
    b = Block("square", "i")
    x = b.load("X", "i k")
    b.store(f32("S", "i k"), b.mul(x, x))
    s = Load("s", "S", ("i", "k"))
    total = Library((s,), Op("t", "sum", ("s",), ("i",), (("axes", ("k",)),)), f32("Y", "i"))
    g = KernelGraph((f32("X", "i k"),), (b.build(), total), ("Y",), (("i", 3), ("k", 5)))
    data = np.arange(15, dtype=np.float32).reshape(3, 5)
    (y,) = interpret(g, schedule({"i": 2}, {}), [data], lambda kernel, env: env["S"].sum(-1))
    np.testing.assert_array_equal(y, (data**2).sum(-1))


def test_large_tensors_have_wide_offsets() -> None:
    b = Block("copy", "i k")
    b.store(f32("Y", "i k"), b.affine(b.load("X", "i k"), scale=2))
    g = graph([f32("X", "i k")], [b], "Y", {"i": 1 << 16, "k": 1 << 15})
    (source,) = sources(g, schedule({"i": 1, "k": 1024}))
    assert ".to(tl.int64)" in source.text and source.grid == (1 << 21,)


def test_names_are_not_code() -> None:
    """A graph may come from a file: its names do not get into the text."""
    evil = 'x"\n    import os  #'
    b = Block(evil, "i")
    b.store(f32(evil, "i"), b.exp(b.load("X", "i")))
    g = graph([f32("X", "i")], [b], "Y", {"i": 4})
    g = KernelGraph(g.inputs, g.kernels, (evil,), g.extents)
    (source,) = sources(g, schedule({"i": 4}))
    assert "import os" not in source.text


def test_refusals() -> None:
    def emit_of(block: Block, inputs, extents, tiles) -> None:
        sources(graph(inputs, [block], block.stores[0].tensor.name, extents), schedule(tiles))

    b = Block("wide", "")
    b.store(f32("Y", "a b c d"), b.affine(b.load("X", "a b c d"), scale=2))
    with pytest.raises(UnsupportedError, match="tile axes"):
        emit_of(b, [f32("X", "a b c d")], dict.fromkeys("abcd", 32), {})
    b = Block("double", "")
    b.store(tensor("Y", "a", "f64"), b.affine(b.load("X", "a"), scale=2))
    with pytest.raises(UnsupportedError, match="f64"):
        emit_of(b, [tensor("X", "a", "f64")], {"a": 4}, {})
    b = Block("leak", "i", "k")
    b.store(f32("Y", "i"), b.sum(b.load("X", "i k"), axes="k"))
    with pytest.raises(LoweringError):
        emit_of(b, [f32("X", "i k")], {"i": 4, "k": 32}, {"i": 4, "k": 16})
    b = Block("race", "i k")
    b.store(f32("Y", "i"), b.affine(b.load("X", "i"), scale=2))
    with pytest.raises(LoweringError, match="blocks differ"):
        emit_of(b, [f32("X", "i")], {"i": 4, "k": 32}, {"i": 4, "k": 16})
    b = Block("huge", "")
    b.store(f32("Y", "i k"), b.affine(b.load("X", "i k"), scale=2))
    with pytest.raises(LoweringError, match="elements per tile"):
        emit_of(b, [f32("X", "i k")], {"i": 2048, "k": 2048}, {})


NEAREST = """mugraph {
  extents i=16 k=4 l=4
  input x: f32[i,k]
  input y: f32[l,k]
  kernel k0 grid(i) {
    %x = load x[i,k]
    %y = load y[l,k]
    %0[i,k,l] = add{cb=-1} %x %y
    %1[i,l] = dot{axes=(k)} %0 %0
    %2[i,l] = affine{scale=-1} %1
    %3[i] = max{axes=(l)} %2
    %4[i] = affine{scale=-1} %3
    %5[i,l] = eq %1 %4
    %6[i,k,l] = mul %0 %5
    %7[i,k] = sum{axes=(l)} %6
    store r: f32[i,k] = %7
  }
  output r
}"""


@pytest.mark.parametrize("warps", [1, 8])
@pytest.mark.parametrize("compared", [True, False])
def test_threads_that_sum_together_agree_on_what_is_compared(compared: bool, warps: int) -> None:
    """Joined with the first addition, a product is rounded in one thread and not in the other."""
    pytest.importorskip("triton")
    text = NEAREST if compared else NEAREST.replace("eq %1 %4", "affine{offset=1} %2")
    g = parse(text)
    sizes = Schedule((KernelSchedule((("i", 1),), num_warps=warps, num_stages=1),))
    (source,) = sources(g, sizes)
    assert source is not None and exact_check(g, sizes) == ""
    ptx = compile_for(source, 90).ptx
    received = re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+)", ptx)
    joined = [r for r in received if re.search(rf"fma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, {r};", ptx)]
    assert bool(joined) != compared
