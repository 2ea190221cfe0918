"""Kernels on exact numbers: their own text agrees with the graph in every bit, and no wrong text does."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction as Q

import numpy as np
import pytest
from lower.kernels import (
    PROGRAMS,
    RAGGED,
    Block,
    Program,
    attention,
    graph,
    rmsnorm,
    schedule,
    split_attention,
    tensor,
)
from lower.test_loop_bounds import sized, tiles
from mugraph.graphs import CAUSAL_BOUNDS, WINDOW

from mirage_jax.errors import KernelFault, UnsupportedError
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.lower.tiling import Tiling
from mirage_jax.lower.triton.emitter import EmitOptions, emit
from mirage_jax.mugraph.domains import exact
from mirage_jax.mugraph.domains.exact_domain import ExactDomain
from mirage_jax.mugraph.domains.floats import NamedArray
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.operators import FUNCTIONS
from mirage_jax.mugraph.parser import parse
from mirage_jax.verify.exact.exact_check import Twin, disagreement, exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret_kernel
from mirage_jax.verify.exact.small_sizes import small_sizes

pytest.importorskip("triton")


def check(g: KernelGraph, sizes: Schedule, change: Callable[[str], str] = str) -> str:
    """The first disagreement of a kernel of the graph, at its own extents; `change` rewrites the texts."""
    for kernel, tiling in zip(g.kernels, sizes.kernels, strict=True):
        assert isinstance(kernel, BlockGraph)
        source = emit(kernel, g, tiling, sizes.part_counts)
        source = replace(source, text=change(source.text))
        if wrong := disagreement(kernel, g, tiling, sizes.part_counts, source):
            return f"{kernel.name}: {wrong}"
    return ""


@pytest.mark.parametrize("ragged", [False, True], ids=["divisible", "ragged"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_agrees(name: str, dtype: str, ragged: bool) -> None:
    program = PROGRAMS[name](dtype, **(RAGGED[name] if ragged else {}))
    assert check(program.graph, program.schedule) == ""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_agrees_at_any_sizes(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    sizes = {axis: rng.randint(3, 40) for axis in ("i", "k", "j", "n", "d", "r") if axis in RAGGED[name]}
    program = PROGRAMS[name]("f32" if seed % 2 else "f16", **sizes)
    kernels = tuple(
        replace(k, tiles=tuple((a, 1 if a == "h" else rng.choice([1, 3, 4, 8, 16, 32])) for a, _ in k.tiles))
        for k in program.schedule.kernels
    )
    parts = tuple((a, rng.randint(1, 2)) for a, _ in program.schedule.parts)
    assert check(program.graph, Schedule(kernels, parts)) == ""


@pytest.mark.parametrize("n,rows,columns", [(64, 16, 16), (50, 16, 16), (70, 32, 16), (70, 16, 32), (16, 16, 16)])
@pytest.mark.parametrize("name,parts", [("online", 1), ("split keys", 2), ("split keys", 3)])
@pytest.mark.parametrize("program", [CAUSAL_BOUNDS, WINDOW], ids=lambda p: p.name)
def test_agrees_under_loop_bounds(program, name: str, parts: int, n: int, rows: int, columns: int) -> None:
    g = sized(program, name, n)
    assert check(g, tiles(g, rows, columns, parts)) == ""


def pointwise(build: Callable[[Block, list[str]], str], arity: int, dtypes: tuple[str, ...] = ()) -> Program:
    """A kernel of one operator on vectors of 40 elements."""
    b = Block("pointwise", "i")
    inputs = [tensor(f"x{n}", "i", t) for n, t in enumerate(dtypes or ("f32",) * arity)]
    b.store(tensor("Y", "i", "f32"), build(b, [b.load(t.name, "i") for t in inputs]))
    return Program(graph(inputs, [b], "Y", {"i": 40}), schedule({"i": 16}), lambda: np.zeros(0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_of_the_table(name: str) -> None:
    program = pointwise(lambda b, xs: b.op(name, *xs), FUNCTIONS[name].arity)
    assert check(program.graph, program.schedule) == ""


@pytest.mark.parametrize("name,offset,constant", [("sin", 0, 0), ("erf", 0, 0), ("log", 1, 0), ("cos", 0, -1)])
def test_functions_that_are_zero_in_padded_lanes(name: str, offset: int, constant: int) -> None:
    """A sum over 5 of 8 lanes, which nothing has to mask: sin(0) = 0."""
    b = Block("sums", "i")
    value = b.affine(b.op(name, b.load("X", "i j"), offset=offset), offset=constant)
    b.store(tensor("Y", "i", "f32"), b.sum(value, axes="j"))
    g = graph([tensor("X", "i j", "f32")], [b], "Y", {"i": 4, "j": 5})
    assert "tl.where" not in sources(g, schedule({"i": 2}))[0].text
    assert exact_check(g, schedule({"i": 2})) == ""


@pytest.mark.parametrize("exponent", [-2, -1, Q(-1, 2), Q(1, 2), 2, 3, Q(3, 2), Q(-3, 2), Q(1, 3), 11, 12])
def test_powers(exponent) -> None:
    program = pointwise(lambda b, xs: b.pow(*xs, exponent=exponent, scale=2, offset=Q(1, 3)), 1)
    assert check(program.graph, program.schedule) == ""


def test_integers_and_truth_values() -> None:
    program = pointwise(lambda b, xs: b.where(b.eq(*xs[:2]), *xs[2:]), 4, ("i32", "i32", "bool", "f16"))
    assert check(program.graph, program.schedule) == ""


def test_constants_that_are_one_float() -> None:
    """A third, and the float next to it: the text cannot tell which is meant."""
    program = pointwise(lambda b, xs: b.affine(b.affine(*xs, scale=Q(1, 3)), scale=Q(1 / 3)), 1)
    with pytest.raises(UnsupportedError, match="same float"):
        check(program.graph, program.schedule)


# --- wrong texts

ATTENTION = attention(i=20, n=50, d=24, scale=Q(1, 4))
SPLIT = split_attention(i=20, n=50, d=24, parts=3, scale=Q(1, 4))
RMSNORM = rmsnorm(i=5, k=50, j=27)
LORA = PROGRAMS["lora"](**RAGGED["lora"])
WINDOWED = (g := sized(WINDOW, "split keys", 70), tiles(g, 16, 16, 2))

# name: program, its text with "#" for any number, the wrong text
BUGS = {
    "mask one lane too long": (RMSNORM, "k_mask = k < 50", "k_mask = k <= 50"),
    "mask of the rows dropped": (RMSNORM, "mask=i_mask[:, None] & j_mask[None, :])", "mask=j_mask[None, :])"),
    "mask of a tail dropped": (ATTENTION, "mask=n_mask[:, None] & e_mask", "mask=e_mask"),
    "stride of the wrong axis": (RMSNORM, "in1 + k[:, None] * 27 + j", "in1 + k[:, None] * 50 + j"),
    "strides swapped": (ATTENTION, "d[:, None] * 50 + n[None, :]", "d[:, None] + n[None, :] * 24"),
    "loop one step short": (LORA, "range(0, 50, 32)", "range(0, 32, 32)"),
    "loop one step long": (PROGRAMS["lora"](), "range(0, 64, 32)", "range(0, 96, 32)"),
    "first step skipped": (LORA, "range(0, 50, 32)", "range(32, 50, 32)"),
    "step too small": (LORA, "range(0, 50, 32)", "range(0, 50, 16)"),
    "accumulator starts at one": (LORA, "0.0, tl.float32", "1.0, tl.float32"),
    "one product too few": (LORA, "acc# = tl.dot(load#, load#, acc#)", r"acc\1 = tl.dot(load\2, load\3)"),
    "no rescaling": (ATTENTION, "acc# * decay#[:, None]", r"acc\1"),
    "rescaled twice": (ATTENTION, "acc# * decay# + ", r"acc\1 * decay\2 * decay\2 + "),
    "maximum not carried": (ATTENTION, "tl.maximum(shift#, ", "("),
    "stale maximum": (ATTENTION, "    shift# = shift#\n", ""),
    "maximum of padded lanes": (ATTENTION, 'dot#, float("-inf")', r"dot\1, 9.0"),
    "padded lanes in a sum": (ATTENTION, "exps#, 0.0", r"exps\1, 1.0"),
    "base of the exponential": (ATTENTION, ", 0.36067376022224085,", ", 0.25,"),
    "constant in the wrong place": (RMSNORM, "* 0.02 + 1e-06", "* (0.02 + 1e-06)"),
    "load hoisted out of the loop": (LORA, "k = k_start + ", "k = 0 * k_start + "),
    "offset of a part": (SPLIT, "n = n_g_block * 17 + ", "n = n_g_block * 16 + "),
    "end of a part": (SPLIT, "tl.minimum(n_g_block * 17 + 17, 50)", "50"),
    "block of another axis": (SPLIT, "i_block = pid % 2", "i_block = pid % 3"),
    "other unit": (SPLIT, "= shift# * 0.6931471805599453", r"= shift\1 * 0.25"),
    "part not written": (SPLIT, "tl.store(out1 + n_g_block * 40", "tl.store(out1 + 0 * n_g_block"),
    "window starts late": (WINDOWED, "35 - 2, 0)", "35 + 13, 0)"),
    "window ends early": (WINDOWED, "35 + 16, 35)", "35 - 1, 35)"),
    "other comparison": (WINDOWED, "((iota#[:, None]) < ", r"((iota\1[:, None]) <= "),
    "index inside of the part": (WINDOWED, "iota# = n.to", r"iota\1 = (n - n_g_block * 35).to"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_finds(bug: str) -> None:
    program, right, wrong = BUGS[bug]
    g, sizes = (program.graph, program.schedule) if isinstance(program, Program) else program
    pattern = re.compile(re.escape(right).replace(r"\#", r"(\d+)"))
    found = 0

    def change(text: str) -> str:
        nonlocal found
        text, n = pattern.subn(wrong, text)
        found += n
        return text

    assert check(g, sizes, change)
    assert found, f"no kernel has the text {right}"


def test_finds_what_no_tolerance_sees() -> None:
    """One masked lane too many, in a sum of fifty thousand."""
    b = Block("total", "i", "k")
    b.store(tensor("Y", "i", "f16"), b.acc(b.sum(b.exp(b.load("X", "i k")), axes="k")))
    g = graph([tensor("X", "i k", "f16")], [b], "Y", {"i": 2, "k": 50_000})
    sizes = schedule({"i": 1, "k": 1024})
    assert not check(g, sizes)

    def off_by_one(text: str) -> str:
        return text.replace("k < 50000", "k < 49999")

    assert "2 of 2 elements of Y differ" in check(g, sizes, off_by_one)
    (source,) = sources(g, sizes)
    x = np.random.default_rng(0).standard_normal((2, 50_000)).astype(np.float16)
    right, wrong = (interpret_kernel(s, [x])[0] for s in (source, replace(source, text=off_by_one(source.text))))
    np.testing.assert_array_equal(right, wrong)


# --- memory

COPY = pointwise(lambda b, xs: b.affine(*xs, scale=2), 1)


@pytest.mark.parametrize(
    "right,wrong,message",
    [
        (", mask=i_mask, other=0.0)", ")", "loads element 40 of input x0, which has 40"),
        ("affine2, mask=i_mask)", "affine2)", "stores element 40 of output Y, which has 40"),
        ("out0 + i", "out0 + i - 1", "stores element -1 of output Y"),
        ("out0 + i", "out0 + i // 2", "of output Y is written twice"),
        ("tl.store(out0", "tl.store(in0", "stores into input x0"),
        ("mask=i_mask)", "mask=i_mask & (i != 7))", r"1 of 40 elements of output Y are never written, .* \(7,\)"),
    ],
)
def test_memory_is_guarded(right: str, wrong: str, message: str) -> None:
    (source,) = sources(COPY.graph, COPY.schedule)
    assert right in source.text, source.text
    with pytest.raises(KernelFault, match=message):
        interpret_kernel(replace(source, text=source.text.replace(right, wrong)), [np.ones(40, np.float32)])


# --- at small sizes


@pytest.mark.parametrize("name", PROGRAMS)
def test_large_programs_at_small_sizes(name: str) -> None:
    """Extents of which no interpreter would see the end."""
    large = {"i": 4096, "k": 4096, "j": 14336, "n": 8192, "d": 64, "r": 16, "parts": 16}
    program = PROGRAMS[name](
        "f16",
        **{a: n for a, n in large.items() if a in RAGGED[name]} | ({"i": 4096, "k": 1024} if name == "ntrans" else {}),
    )
    assert exact_check(program.graph, program.schedule) == ""


REGRESSION = parse("""
mugraph {
  extents i=1024 j=3 k=4096 l=8
  input x0: f32[i,j]
  input x1: f32[k,j]
  input x2: f32[k,l]
  kernel k0 grid(k.g,i) loop(k) {
    %x0 = load x0[i,j]
    %x1 = load x1[k,j]
    %x2 = load x2[k,l]
    %0[i,j,k] = add{cb=-1} %x0 %x1
    %1[i,k] = dot{axes=(j)} %0 %0
    %2[i] = shift{axes=(k), scale=-1} %1
    %3[i,k] = exps{scale=-1} %1 %2
    %4[i] = sum{axes=(k)} %3
    %5[i] = accs %4 %2
    %6[i,l] = dot{axes=(k)} %3 %x2
    %7[i,l] = accs %6 %2
    %8[i] = last %2
    store m0: f32[k.g,i] = %5
    store m1: f32[k.g,i,l] = %7
    store m2: f32[k.g,i] = %8
  }
  kernel k1 grid(i,l) {
    %x0 = load m0[k.g,i]
    %x1 = load m2[k.g,i]
    %x2 = load m1[k.g,i,l]
    %0[i] = shift{axes=(k.g)} %x1
    %1[k.g,i] = rescale %x0 %x1 %0
    %2[k.g,i,l] = rescale %x2 %x1 %0
    %3[i] = sum{axes=(k.g)} %1
    %4[i,l] = sum{axes=(k.g)} %2
    %5[i] = pow{exponent=-1} %3
    %6[i,l] = mul %5 %4
    store t6: f32[i,l] = %6
  }
  output t6
}""")


def test_squares_as_huge_as_sentinels_are_numbers() -> None:
    """Those of 1e200 are infinite, and minus infinity is a masked row."""
    first = KernelSchedule((("i", 128), ("k", 64), ("k.g", 1)), num_warps=8, num_stages=4)
    sizes = Schedule((first, KernelSchedule((("i", 1), ("l", 8)))), (("k", 16),))
    assert exact_check(REGRESSION, sizes) == ""


BIASED_LOG_SOFTMAX = """mugraph {
  extents i=17 k=2 l=17
  input bias: f32[k]
  input x: f32[i,k]
  input w: f32[l,k]
  kernel k0 grid(l) loop(i) {
    %b = load bias[k]
    %x = load x[i,k]
    %w = load w[l,k]
    %s[k,i] = add %b %x
    %t[i,l] = dot{axes=(k)} %s %w
    %m[l] = shift{axes=(i), scale=1/4} %t
    %e[i,l] = exps{scale=1/4} %t %m
    %z[l] = sum{axes=(i)} %e
    %a[l] = accs %z %m
    %n[l] = last %m
    %d[l] = logs %a %n
    %y[i,l] = add{ca=1/4, cb=-1} %t %d
    store y: f32[i,l] = %y
  }
  output y
}"""


def test_equal_logits_are_no_error() -> None:
    """Beside a bias as huge as a sentinel, floats lose all that the logits of a row differ by."""
    sizes = Schedule((KernelSchedule((("i", 16), ("l", 1)), 8, 3),))
    assert exact_check(parse(BIASED_LOG_SOFTMAX), sizes) == ""


NEAREST = """mugraph {
  extents i=2 j=7 k=17
  input x: f32[i,j]
  input y: f32[k,j]
  kernel k0 grid(i) loop(k) {
    %x = load x[i,j]
    %y = load y[k,j]
    %d[i,j,k] = add{cb=-1} %x %y
    %s[i,k] = dot{axes=(j)} %d %d
    %t[i,k] = affine{scale=-1} %s
    %m[i] = shift{axes=(k), scale=-1} %s
    %e[i,k] = exps{scale=-1} %s %m
    %max[i] = max{axes=(k)} %t
    %top[i] = last %max
    %sum[i] = sum{axes=(k)} %e
    %z[i] = accs %sum %m
    %n[i] = last %m
    %w[i] = exps %top %n
    %p[i] = div %w %z
    store p: f32[i] = %p
  }
  output p
}"""
NEAREST_SIZES = Schedule((KernelSchedule((("i", 1), ("k", 16)), 8, 3),))


def test_a_point_as_far_as_sentinels_is_as_far_from_all() -> None:
    """Differences to it are equal as floats, so the nearest point may be any."""
    assert exact_check(parse(NEAREST), NEAREST_SIZES) == ""


def test_what_depends_on_the_nearest_is_checked_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the form that only rows of huge numbers take is still found."""
    emitted = Twin.emit

    def wrong(twin: Twin, options: EmitOptions) -> KernelSource:
        source = emitted(twin, options)
        usual, complete = source.text.split("_complete(", 1)
        return replace(source, text=f"{usual}_complete({complete.replace('tl.exp2(', '2.0 * tl.exp2(', 1)}")

    monkeypatch.setattr(Twin, "emit", wrong)
    assert "differ from the graph's" in exact_check(parse(NEAREST), NEAREST_SIZES)


MAXIMA_BESIDE_SENTINELS = """mugraph {
  extents i=64 j=2 k=33
  input x: f32[j,i,k]
  input mask: bool[i]
  kernel k0 grid(j,i) loop(k) {
    %x = load x[j,i,k]
    %m = load mask[i]
    %low[j,i,k] = affine{offset=-238197632505765400042357716465536204800} %x
    %s[i,j,k] = where %m %x %low
    %max[i,j] = max{axes=(k)} %s
    %top[i,j] = last %max
    %is[i,j,k] = eq %s %top
    store t: bool[i,j,k] = %is
  }
  output t
}"""


def test_a_sentinel_that_is_added_leaves_the_order_of_logits() -> None:
    """Several logits of a row would be equal as floats, and tiles choose others of them than the whole row does."""
    sizes = Schedule((KernelSchedule((("i", 1), ("j", 1), ("k", 16)), 8, 3),))
    assert exact_check(parse(MAXIMA_BESIDE_SENTINELS), sizes) == ""


PADDED_CAUSAL_ATTENTION = """mugraph {
  extents i=17 j=17
  input q: f32[i]
  input k: f32[j]
  input v: f32[j]
  kernel k0 grid(i) loop(j in ..i+0) {
    %k = load k[j]
    %q = load q[i]
    %v = load v[j]
    %3[] = const{value=3}
    %masked[] = const{value=-238197632505765400042357716465536204800}
    %i[i] = iota{axis=i}
    %j[j] = iota{axis=j}
    %s[i,j] = mul %q %k
    %biased[i,j] = affine{offset=-340282346638528859811704183484516925440} %s
    %padding[j] = lt %j %3
    %causal[j,i] = le %j %i
    %t[j,i] = where %padding %biased %s
    %u[j,i] = where %causal %t %masked
    %m[i] = shift{axes=(j)} %u
    %e[j,i] = exps %u %m
    %sum[i] = sum{axes=(j)} %e
    %z[i] = accs %sum %m
    %o[i] = dot{axes=(j)} %e %v
    %a[i] = accs %o %m
    %y[i] = div %a %z
    store y: f32[i] = %y
  }
  output y
}"""


def test_rows_of_the_lowest_number_take_the_complete_form() -> None:
    """Their maximum is a constant of the program, not a huge product: it is compared with the bound in their order."""
    sizes = Schedule((KernelSchedule((("i", 32), ("j", 16)), 8, 3),))
    assert exact_check(parse(PADDED_CAUSAL_ATTENTION), sizes) == ""


def test_constants_keep_their_order() -> None:
    values = [0.0, 1e-9, 1.0, 1e9, 2.0**30, 2.0**30 + 1, 1e10, 1e20, 1e30, 2.38e38, 3.4e38, 1e300]
    real = [float(exact.constant(Q(x))["real"]) for x in values]
    assert real == sorted(set(real)) and real[:5] == values[:5] and real[-1] < 2.0**35
    assert [float(exact.constant(Q(-x))["real"]) for x in values] == [-x for x in real]


def test_a_row_in_which_all_is_masked_keeps_the_usual_form() -> None:
    domain = ExactDomain()
    masked = NamedArray(("i", "j"), np.full((2, 3), exact.MINUS_INFINITY))
    assert domain.all_allowed(domain.shift(masked, ("j",)), None, Q(100))
    assert not domain.all_allowed(domain.constant(Q(-200)), None, Q(100))


@pytest.mark.parametrize("ragged", [False, True])
def test_small_sizes_keep_tiles(ragged: bool) -> None:
    program = split_attention(h=4, i=1000, n=4096, d=64, parts=16)
    kernel, sizes = program.graph.kernels[0], program.schedule.kernels[0]
    g, parts = small_sizes(kernel, program.graph, sizes, program.schedule.part_counts, ragged)
    assert parts == {"n": 2} and g.sizes["d"] == (63 if ragged else 64)
    assert g.sizes["i"] == (21 if ragged else 40) and g.sizes["n"] == (41 if ragged else 64)
    small, real = (Tiling(kernel, x, sizes, p) for x, p in ((g, parts), (program.graph, program.schedule.part_counts)))
    assert {a: t.block for a, t in small.axes.items()} == {a: t.block for a, t in real.axes.items()}


def test_a_tensor_read_under_two_names() -> None:
    """x x: a row of x in one operand is a column in the other, so both names have to have one length."""
    b = Block("square", "i a", "k")
    x, y = b.load("X", "i k"), b.load("X", "k a")
    b.store(tensor("Y", "i a", "f32"), b.acc(b.dot(x, y, axes="k")))
    g = graph([tensor("X", "i k", "f32")], [b], "Y", {"i": 64, "a": 64, "k": 64})
    assert exact_check(g, schedule({"i": 16, "a": 32, "k": 16})) == ""


COMPARED = """mugraph {
  extents i=16 n=16
  input s: i32[i]
  input t: i32[n]
  input x: f32[i,n]
  kernel k grid(i) {
    %s = load s[i]
    %t = load t[n]
    %x = load x[i,n]
    %m[i,n] = OP %s %t
    %z[] = const{value=0}
    %p[i,n] = where %m %x %z
    %r[i] = sum{axes=(n)} %p
    store o: f32[i] = %r
  }
  output o
}"""


@pytest.mark.parametrize(("op", "first"), [("eq", 2**24), ("lt", 2**31 - 16), ("le", -(2**31))])
def test_integers_are_compared_as_they_are(op: str, first: int) -> None:
    """Float32 rounds neighbours beyond 2**24 to one number."""
    g, sizes = parse(COMPARED.replace("OP", op)), KernelSchedule((("i", 16),))
    (kernel,) = g.kernels
    assert isinstance(kernel, BlockGraph)
    source = emit(kernel, g, sizes, {})
    s = (first + np.arange(16)).astype(np.int32)
    values = {"s": s, "t": s, "x": np.ones((16, 16), np.float32)}
    (found,) = interpret_kernel(source, [values[name] for name in source.inputs])
    compare = {"eq": np.equal, "lt": np.less, "le": np.less_equal}[op]
    assert found.tolist() == compare(s[:, None], s[None, :]).sum(1).tolist()
