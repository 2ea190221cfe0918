"""NaN, infinities and numbers too large for 16 bits: kernels make of them what the program does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.replacing import analysis

from mirage_jax.compiler.specialization import specialized
from mirage_jax.compiler.tuning_session import space_for
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.domains import exact
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Precision, Schedule
from mirage_jax.mugraph.operators import FUNCTIONS
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.driver import search
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret, interpret_kernel

POINTWISE = """mugraph {
  extents i=16 j=16 k=16
  input X: f32[i,k]
  input W: f32[k,j]
  kernel a grid(RESULT_AXES) {
    %x = load X[i,k]
    %w = load W[k,j]
    %d[i,j] = dot{axes=(k)} %x %w
    %z[] = const{value=0}
    RESULT
    store Y: f32[RESULT_AXES] = %y
  }
  output Y
}"""
RESULTS = {
    "maximum": ("%y[i,j] = maximum %d %z", "i,j"),
    "maximum, swapped": ("%y[i,j] = maximum %z %d", "i,j"),
    "minimum": ("%y[i,j] = minimum %d %z", "i,j"),
    "sign": ("%y[i,j] = sign %d", "i,j"),
    "max of rows": ("%y[i] = max{axes=(j)} %d", "i"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_no_number_is_not_hidden(name: str) -> None:
    result, axes = RESULTS[name]
    graph = parse(POINTWISE.replace("RESULT_AXES", axes).replace("RESULT", result))
    check_graph(graph)
    schedule = Schedule((KernelSchedule((("i", 16), ("j", 16))),))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((16, 16)).astype(np.float32) for _ in "XW")
    assert exact_check(graph, schedule) == ""
    for source in sources(graph, schedule):
        assert source is not None and compile_for(source, 90).fits
    for strange in (None, np.nan):
        if strange is not None:
            w[4, 3] = strange
        (have,), (want,) = interpret(graph, schedule, [x, w]), evaluate.run(graph, [x, w])
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)  # NaN where there is one
        assert np.isnan(have).any() == (strange is not None)


def test_a_running_maximum_keeps_it() -> None:
    graph = parse("""mugraph {
      extents i=16 k=64
      input X: f32[i,k]
      kernel a grid(i) loop(k) {
        %x = load X[i,k]
        %m[i] = max{axes=(k)} %x
        %y[i] = last %m
        store Y: f32[i] = %y
      }
      output Y
    }""")
    check_graph(graph)
    schedule = Schedule((KernelSchedule((("i", 16), ("k", 16))),))
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    x[3, 5] = x[4, 63] = np.nan
    (have,) = interpret(graph, schedule, [x])
    np.testing.assert_array_equal(have, x.max(1))
    assert exact_check(graph, schedule) == ""


def test_relu_with_specialized_warps() -> None:
    """Gluon's language does not have the constant that says so."""
    types = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((2048, 4096), (4096, 4096))]
    (region,) = analysis(lambda x, w: jax.nn.relu(x @ w) * 2, *types).regions
    reference = simplify_axes(region.graph)
    found, _ = search(reference, DEVICES["H200"], space_for(region), seconds=60.0, states=20_000)
    written = [
        s for c in found if c.family == "kernels" for s in specialized(c.graph, c.schedule, DEVICES["H200"], most=1)
    ]
    graph = next(c.graph for c in found if c.family == "kernels")
    (source,) = sources(graph, written[0])
    assert source is not None and "gl.maximum(" in source.text and "tl.PropagateNan" in source.text
    assert compile_for(source, 90).fits


@pytest.mark.parametrize("offset", ["1/1000000", "1/1000000000000"])
def test_padded_lanes_that_16_bits_do_not_hold(offset: str) -> None:
    """1 / (0 + offset) is infinite in float16: times the zeros of the other operand it would be NaN."""
    graph = parse(f"""mugraph {{
      extents i=16 j=16 k=50
      input X: f16[i,k]
      input W: f16[k,j]
      kernel a grid(i,j) loop(k) {{
        %x = load X[i,k]
        %w = load W[k,j]
        %r[i,k] = pow{{exponent=-1, offset={offset}}} %x
        %d[i,j] = dot{{axes=(k)}} %r %w
        %s[i,j] = acc %d
        store Y: f32[i,j] = %s
      }}
      output Y
    }}""")
    schedule = Schedule((KernelSchedule((("i", 16), ("j", 16), ("k", 32))),))
    rng = np.random.default_rng(0)
    x = (np.abs(rng.standard_normal((16, 50))) + 1).astype(np.float16)
    w = rng.standard_normal((50, 16)).astype(np.float16)
    (have,), (want,) = interpret(graph, schedule, [x, w]), evaluate.run(graph, [x, w])
    np.testing.assert_allclose(have, want, atol=0.02)


SHARED_MASK = """mugraph {
  extents d=16 n=512
  input Q: f32[n',d]
  input K: f32[d,n]
  kernel a grid(n') loop(n in ..n'+0) {
    %q = load Q[n',d]
    %k = load K[d,n]
    %s[n',n] = dot{axes=(d)} %q %k
    %a[n] = iota{axis=n}
    %b[n'] = iota{axis=n'}
    %p[n,n'] = le %a %b
    %z[] = const{value=0}
    %o[] = const{value=1}
    %m[n,n'] = where %p %s %z
    %c[n,n'] = where %p %o %z
    %t[n'] = sum{axes=(n)} %m
    %u[n'] = sum{axes=(n)} %c
    %tt[n'] = acc %t
    %uu[n'] = acc %u
    %y[n'] = div %tt %uu
    store Y: f32[n'] = %y
  }
  output Y
}"""


@pytest.mark.parametrize("n", [512, 500])
def test_a_mask_of_values_with_other_axes(n: int) -> None:
    """Where it holds, what is masked stands for itself, but not a number for a whole tile of them."""
    graph = parse(SHARED_MASK).with_extents({"d": 16, "n": n})
    check_graph(graph)
    schedule = Schedule((KernelSchedule((("n", 128), ("n'", 128))),))
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((n, 16), (16, n))]
    (have,), (want,) = interpret(graph, schedule, values), evaluate.run(graph, values, schedule)
    np.testing.assert_allclose(have, want, atol=1e-5)
    assert exact_check(graph, schedule) == ""


def _masked_mean(q, k, v):
    seen = jnp.arange(len(q))[:, None] >= jnp.arange(len(q))[None, :]
    return (jnp.where(seen, q @ k.T, 0.0) @ v) / jnp.where(seen, 1.0, 0.0).sum(-1)[:, None]


def _decay(q, k, v, g):
    return ((q @ k.T) * jnp.exp(g[:, None] - g[None, :])) @ v


@pytest.mark.parametrize("fn,shapes", [(_masked_mean, [(500, 64)] * 3), (_decay, [*[(512, 16)] * 3, (512,)])])
def test_all_that_is_found_is_written(fn, shapes) -> None:
    """Masks of values with other axes, and exponentials of sums that need no maximum of rows."""
    (region,) = analysis(fn, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).regions
    found, _ = search(simplify_axes(region.graph), DEVICES["H100"], space_for(region), seconds=60.0, states=20_000)
    kernels = [c for c in found if c.family == "kernels"][:30]
    assert kernels
    for c in kernels:
        assert all(s is None or s.text for s in sources(c.graph, c.schedule))


def test_no_step_before_the_second_loop() -> None:
    """The last rows see no key: their maximum is minus infinity, and no exponential of a difference of two."""
    graph = parse("""mugraph {
      extents d=16 n=64
      input Q: f32[n',d]
      input K: f32[d,n]
      kernel a grid(n') loop(n in n'+1..) {
        %q = load Q[n',d]
        %k = load K[d,n]
        %s[n',n] = dot{axes=(d)} %q %k
        %a[n] = iota{axis=n}
        %b[n'] = iota{axis=n'}
        %p[n,n'] = lt %b %a
        %x[n',n] = mask %p %s
        %m[n'] = shift{axes=(n)} %x
        %e[n',n] = exps %x %m
        %t[n'] = sum{axes=(n)} %e
        %l[n'] = accs %t %m
        %mm[n'] = last %m
        %ll[n'] = affine{offset=1} %l
        %e2[n',n] = exps %x %mm
        %w[n',n] = div %e2 %ll
        %ww[n'] = sum{axes=(n)} %w
        %y[n'] = acc %ww
        store Y: f32[n'] = %y
      }
      output Y
    }""")
    schedule = Schedule((KernelSchedule((("n'", 16), ("n", 16))),))
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((64, 16), (16, 64))]
    (have,) = interpret(graph, schedule, values)
    assert np.isfinite(have).all() and have[-1] == 0.0


def pointwise(function: str, arity: int = 1) -> tuple[KernelGraph, Schedule]:
    """A kernel that computes a function of 1,024 numbers, or of as many pairs."""
    inputs, loads = "input X: f32[i]", "%x = load X[i]"
    if arity == 2:
        inputs, loads = f"{inputs}\n      input Z: f32[i]", f"{loads}\n        %z = load Z[i]"
    graph = parse(f"""mugraph {{
      extents i=1024
      {inputs}
      kernel a grid(i) {{
        {loads}
        %y[i] = {function} %x{" %z" if arity == 2 else ""}
        store Y: f32[i] = %y
      }}
      output Y
    }}""")
    return graph, Schedule((KernelSchedule((("i", 1024),)),))


@pytest.mark.parametrize("function", ["tanh", "expm1", "log1p", "erf", "sin", "sinh", "asinh", "atan", "asin"])
def test_small_numbers_keep_their_digits(function: str) -> None:
    """Near 0 these are about their argument: an error of half a unit of 1 is all of it."""
    graph, schedule = pointwise(function)
    assert exact_check(graph, schedule) == ""
    x = np.float32(np.geomspace(1e-20, 1, 1024) * np.tile([1, -1], 512))
    with np.errstate(divide="ignore"):  # log(1 - 1)
        (have,), (want,) = interpret(graph, schedule, [x]), evaluate.run(graph, [x.astype(np.float64)])
    np.testing.assert_allclose(have, want, rtol=2e-6)


SMALL_RESULTS = [
    *(("erfc", 9.0, 1e-5), ("logistic", -80.0, 3e-7), ("inner_exp", -80.0, 2e-7), ("exp", -80.0, 2e-7)),
    *(("exp{scale=-1/2}", 160.0, 2e-7), ("exp{scale=3, offset=-1}", 25.0, 5e-6), ("expm1", -80.0, 2e-6)),
]


@pytest.mark.parametrize(("function", "farthest", "error"), SMALL_RESULTS)
def test_small_results_keep_their_digits(function: str, farthest: float, error: float) -> None:
    """A difference from 1 has none of them. GELU is made of erfc, and its gradient multiplies such results.
    Exponentials of large numbers have them if their product with log2(e), which a GPU takes, is not just rounded.
    """
    graph, schedule = pointwise(function)
    assert exact_check(graph, schedule) == ""
    x = np.float32(np.linspace(-farthest, farthest, 1024))
    (have,), (want,) = interpret(graph, schedule, [x]), evaluate.run(graph, [x.astype(np.float64)])
    np.testing.assert_allclose(have, want, rtol=error)


def test_exponentials_of_a_softmax_are_as_precise_as_asked() -> None:
    text = """mugraph {
      extents i=16 k=64
      input X: f32[i,k]
      kernel a grid(i) {
        %x = load X[i,k]
        %m[i] = shift{axes=(k), scale=3} %x
        %e[i,k] = exps{scale=3} %x %m
        store Y: f32[i,k] = %e
      }
      output Y
    }"""
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32) * 8
    want = np.exp(((x - x.max(1, keepdims=True)) * np.float32(3)).astype(np.float64))
    errors = []
    for precise in (Precision.FAST, Precision.ROUNDED):
        schedule = Schedule((KernelSchedule((("i", 16),), precise=precise),))
        assert exact_check(parse(text), schedule) == ""
        (have,) = interpret(parse(text), schedule, [x])
        errors.append(np.abs(have / want - 1)[want > 1e-30].max())
    assert errors[1] < 3e-7 < 1e-6 < errors[0]


STRANGE = [np.inf, -np.inf, np.nan, 1e30, -1e30, 0.0]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ("erfc", [0, 2, np.nan, 0, 2, 1]),
        ("exp", [np.inf, 0, np.nan, np.inf, 0, 1]),
        ("exp{scale=-2}", [0, np.inf, np.nan, 0, np.inf, 1]),
        ("logistic", [1, 0, np.nan, 1, 0, 0.5]),
        ("sinh", [np.inf, -np.inf, np.nan, np.inf, -np.inf, 0]),
        ("asinh", [np.inf, -np.inf, np.nan, 69.7707, -69.7707, 0]),
        ("acosh", [np.inf, np.nan, np.nan, 69.7707, np.nan, np.nan]),
        ("atan", [np.pi / 2, -np.pi / 2, np.nan, np.pi / 2, -np.pi / 2, 0]),
        ("asin", [np.nan, np.nan, np.nan, np.nan, np.nan, 0]),
        ("acos", [np.nan, np.nan, np.nan, np.nan, np.nan, np.pi / 2]),
    ],
)
def test_functions_of_strange_numbers(function: str, wanted: list[float]) -> None:
    (have,) = interpret(*pointwise(function), [np.resize(np.float32(STRANGE), 1024)])
    np.testing.assert_array_equal(have[:6], np.float32(wanted))


SIDES = np.float32([np.inf, -np.inf, np.nan, 1e30, -1e30, 0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, 2.5, -2.5, 1e-30])


@pytest.mark.parametrize(("function", "error"), [("atan2", 2e-7), ("power", 2e-5)])
def test_functions_of_two_strange_numbers(function: str, error: float) -> None:
    """Zeros have signs, a power of 0 or of what is no number is 1, and no other power of a negative number is one but
    a whole one."""
    x, y = (np.resize(a, 1024) for a in (np.repeat(SIDES, len(SIDES)), np.tile(SIDES, len(SIDES))))
    graph, schedule = pointwise(function, 2)
    assert exact_check(graph, schedule) == ""
    with np.errstate(all="ignore"):
        (have,), (want,) = interpret(graph, schedule, [x, y]), evaluate.run(graph, [x.astype(float), y.astype(float)])
        want = np.float32(want)
    np.testing.assert_allclose(have, want, rtol=error)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(have[numbers]), np.signbit(want[numbers]))


@pytest.mark.parametrize(
    ("function", "lowest", "highest"),
    [("sinh", -80, 80), ("asinh", -9, 9), ("acosh", 1, 9), ("atan", -5, 5), ("asin", -1, 1), ("acos", -1, 1)],
)
def test_functions_keep_float32s_digits(function: str, lowest: float, highest: float) -> None:
    graph, schedule = pointwise(function)
    x = np.float32(np.linspace(lowest, highest, 1024))
    (have,), (want,) = interpret(graph, schedule, [x]), evaluate.run(graph, [x.astype(np.float64)])
    np.testing.assert_allclose(have, want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "function",
    [
        *("log1p", "expm1", "tanh", "erfc", "logistic", "exp", "inner_exp"),
        *("sinh", "asinh", "acosh", "atan", "asin", "acos"),
    ],
)
def test_numbers_with_a_residue_of_zero(function: str) -> None:
    """Of exact numbers one residue may be 0 and the other not: no division by it is a wrong kernel."""
    graph, schedule = pointwise(function)
    (source,) = sources(graph, schedule)
    assert source is not None
    x = exact.integers(np.resize([exact.Q, exact.P, 3 * exact.Q, 7], 1024))
    (have,) = interpret_kernel(source, [x], exact=True)
    record = FUNCTIONS.get(function)
    want = record.exact(x) if record else exact.exp(x)
    for residue in "pq":
        np.testing.assert_array_equal(have[residue], want[residue])
