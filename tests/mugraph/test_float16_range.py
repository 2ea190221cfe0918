"""Values that a program never had, at the ends of a type's range: nothing that XLA computes is lost."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import measured

import mirage_jax
from mirage_jax.audit.sources import SPACE
from mirage_jax.compiler.float_check import biases, inputs_that_meet
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.config import Options
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.graph import BlockGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.driver import search
from mirage_jax.verify.exact.interpreters.triton import interpret
from mirage_jax.verify.floats import range_edges
from mirage_jax.verify.floats.input_classes import input_classes

N, D = 256, 32
RNG = np.random.default_rng(0)


def linear_attention(q, k, v):
    return (q @ k.swapaxes(-1, -2)) @ v / k.shape[-2]


def left(a, b, c):
    return (a @ b) @ c


def right(a, b, c):
    return a @ (b @ c)


def _normal(*shape: int, scale: float = 1.0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(scale * RNG.standard_normal(shape), "float32").astype(dtype)


def _readme() -> tuple[jax.Array, ...]:
    q, k, v = (_normal(2, N, D) for _ in range(3))
    return tuple(x.astype("float16") for x in (q / 40, abs(24 * k), abs(24 * v)))


def _scaled(dtype: str, *scales: float) -> tuple[jax.Array, ...]:
    """a (1 by 64), b (64 by 64) and c (64 by 64): one row, so that (a b) c is cheap, and a (b c) is not."""
    return tuple(_normal(*s, scale=x, dtype=dtype) for s, x in zip([(4, 64), (64, 64), (64, 64)], scales, strict=True))


CASES = {
    "linear attention": (linear_attention, _readme()),
    "large a and b": (right, _scaled("float16", 200, 200, 0.5 / 200)),
    "large b and c": (left, _scaled("float16", 0.5 / 200, 200, 200)),
}


@pytest.mark.parametrize("name", CASES)
def test_float16_is_finite_where_xla_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TuningSession, "promising", lambda *_: True)
    fn, args = CASES[name]
    want = np.asarray(jax.jit(fn)(*args), np.float64)
    exact = np.asarray(fn(*(np.asarray(x, np.float64) for x in args)))
    f = mirage_jax.optimize(fn, backend="jax", strict=True, budget="5s")
    with measured(2.0):
        have = np.asarray(f(*args), np.float64)
        (region,) = f.explain(*args).regions
    assert region.decision.winner is not None, region.decision.why
    assert np.isfinite(have[np.isfinite(want)]).all()
    if np.isfinite(want).all():
        assert np.abs(have - exact).max() <= 2 * np.abs(want - exact).max() + 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scales", [(0.5e-20, 1e20, 1e20), (1e25, 1e-25, 1e-25)])
def test_the_range_of_a_wide_type_is_kept_on_request(
    dtype: str, scales: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(a b) c is in range, and in `a (b c)` b c is not."""
    monkeypatch.setattr(TuningSession, "promising", lambda *_: True)
    args = _scaled(dtype, *scales)

    want = np.asarray(jax.jit(left)(*args), np.float64)
    assert np.isfinite(want).all() and want.any()
    f = mirage_jax.optimize(left, backend="jax", strict=True, budget="5s", strict_range=True)
    with measured(2.0):
        have = np.asarray(f(*args), np.float64)
    np.testing.assert_allclose(have, want, rtol=0.1, atol=0.05 * np.abs(want).max())


def test_kernels_are_finite_where_xla_is() -> None:
    """Under the model of an H200, as the interpreter of kernels runs them, with operands of 16 bits."""
    q, k, v = CASES["linear attention"][1]
    (region,) = analyse(jax.make_jaxpr(linear_attention)(q, k, v)).regions
    graph = simplify_axes(region.graph)
    candidates, _ = search(graph, DEVICES["H200"], SPACE, 60.0, 4000)
    arrays = [np.asarray(x) for x in region.prepare([np.asarray(x) for x in (q, k, v)])]
    want = evaluate.run(graph, arrays)[0]
    whole = [c for c in candidates if all(isinstance(kernel, BlockGraph) for kernel in c.graph)]
    assert any("wide_" in str(c.graph) for c in whole)
    for c in whole[:6]:
        (have,) = interpret(c.graph, c.schedule, arrays)
        assert np.abs(have.astype(np.float64) - want).max() <= 2e-3 * np.abs(want).max()


# ---------------------------------------------------------------------- the gate


def _attempt(fn, *args, **options) -> TuningSession:
    (region,) = analyse(jax.make_jaxpr(fn)(*args)).regions
    return TuningSession(region, "cpu", jax.devices("cpu")[0], Options(**options))


def _gate(attempt: TuningSession, text: str) -> tuple[bool, str]:
    graph = parse(text)
    return attempt.gate(attempt.winner(graph, Schedule((KernelSchedule(),) * len(graph.kernels)), "algebra"))


def _structs(dtype: str, *shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


@pytest.mark.parametrize("shapes", [((64, 8), (8, 64), (64, 8)), ((8, 64), (64, 8), (8, 64))])
@pytest.mark.parametrize("fn", [left, right])
def test_the_gate_finds_what_leaves_float16(fn, shapes) -> None:
    attempt = _attempt(fn, *_structs("float16", *shapes))
    candidates, _ = search(attempt.reference, DEVICES["CPU"], SPACE, 30.0, 2000, ("algebra",))
    others = [str(c.graph) for c in candidates if "m0: f32" in str(c.graph)]
    for text in others:
        assert _gate(attempt, text)[0]
        passed, why = _gate(attempt, text.replace("m0: f32", "m0: f16"))
        assert not passed and "2**" in why


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_asks_the_same_of_other_types_on_request(dtype: str) -> None:
    shapes = (64, 8), (8, 64), (64, 8)
    for strict_range in (False, True):
        attempt = _attempt(left, *_structs(dtype, *shapes), strict_range=strict_range)
        candidates, _ = search(attempt.reference, DEVICES["CPU"], SPACE, 30.0, 2000, ("algebra",))
        text = next(str(c.graph) for c in candidates if "m0" in str(c.graph))
        passed, why = _gate(attempt, text)
        assert passed != strict_range, why
        assert passed or "2**" in why


def test_what_meets() -> None:
    attempt = _attempt(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, *_structs("float16", *[(32, 16)] * 3))
    names = [attempt.region.inputs[i] for i in range(3)]
    assert len(names) == 3 and inputs_that_meet(attempt.region)[0] != ()
    found = set(inputs_that_meet(attempt.region))
    assert found == {(0, 1), (0, 2), (1, 2)}
    assert len(list(range_edges.directions([0, 1, 2], found))) < 50


# ---------------------------------------------------------------------- masks

FM = float(jnp.finfo("float32").min)


def _masked_twice(x, y, t):
    i = jnp.arange(8)
    w = jnp.where(i[:, None] <= i, x[:, None] * y, FM)
    return w @ (w.T @ t)


def test_on_request_a_mask_meets_no_row_that_it_does_not_meet_in_the_program() -> None:
    """The program's sum over i is 0 times t[0]. Its other orders begin with FM t[0], which is infinite."""
    attempt = _attempt(_masked_twice, *_structs("float32", (8,), (8,), (8, 4)), strict_range=True)
    candidates, _ = search(attempt.reference, DEVICES["CPU"], SPACE, 30.0, 2000, ("algebra",))
    found = {"mul x2" in str(c.graph): _gate(attempt, str(c.graph)) for c in candidates}
    assert found[False][0] and not found[True][0]
    assert "the first row of input 2" in found[True][1]


def _weighed_sum(w, x, y):
    return jnp.sum(w * x + w * y, 1)


def test_on_request_the_lowest_numbers_are_not_added_before_a_zero_meets_them() -> None:
    """`(x + y) w` is infinity times zero, or NaN, where both are masked and the weight is zero."""
    attempt = _attempt(_weighed_sum, *_structs("float32", (4, 1), (4, 8), (4, 8)), strict_range=True)
    assert _gate(attempt, str(attempt.reference))[0]
    candidates, _ = search(attempt.reference, DEVICES["CPU"], SPACE, 30.0, 2000, ("algebra",))
    added_first = next(str(c.graph) for c in candidates if " add x" in str(c.graph))
    passed, why = _gate(attempt, added_first)
    assert not passed and "input 0 holds zeros" in why


def _scaled_weights(x, w, scale):
    return x @ (w.astype(jnp.float32) * scale)


def test_weights_of_integers_are_not_zero_at_the_ends_of_the_range() -> None:
    structs = [*_structs("float32", (4, 64)), *_structs("uint8", (64, 8)), *_structs("float32", (8,))]
    attempt = _attempt(_scaled_weights, *structs, strict_range=True)
    candidates, _ = search(attempt.reference, DEVICES["CPU"], SPACE, 30.0, 2000, ("algebra",))
    scaled_last = next(str(c.graph) for c in candidates if str(c.graph) != str(attempt.reference))
    passed, why = _gate(attempt, scaled_last)
    assert not passed and "2**" in why


def _padded(q, k, v, bias):
    i = jnp.arange(q.shape[0])
    s = jnp.where(i[:, None] >= i[None], q @ k.T * 0.25 + bias, FM)
    return jax.nn.softmax(s, -1) @ v


def test_which_inputs_mask_logits() -> None:
    args = _structs("float32", (64, 16), (64, 16), (64, 16), (1, 64))
    for fn in (
        _padded,
        lambda q, k, v, b: jax.nn.softmax(q @ k.T + b[:, ::-1]) @ v,
        lambda q, k, v, b: jax.nn.softmax((q @ k.T + 2 * b) / 4) @ v,
        lambda q, k, v, b: jnp.exp(q @ k.T + b) @ v,
    ):
        for region in analyse(jax.make_jaxpr(fn)(*args)).regions:
            found = [region.avals[region.inputs[i].value].shape for i in biases(region)]
            assert len(found) == 1 and np.prod(found[0]) == 64
    (region,) = analyse(jax.make_jaxpr(lambda q, k, v, b: jax.nn.softmax(q @ k.T) @ (v * b.T))(*args)).regions
    assert not biases(region)


def test_factors_under_a_mask_of_zeros_are_no_logits() -> None:
    """Retention decays scores under a causal mask; what is under such a mask in an exponential is a logit."""
    args = _structs("float32", (64, 16), (64, 16), (64, 16), (64, 64))
    below = jnp.tri(64, dtype=bool)
    for fn, has in (
        (lambda q, k, v, d: (q @ k.T * jnp.where(below, d, 0.0)) @ v, False),
        (lambda q, k, v, d: (q @ k.T * jnp.exp(jnp.where(below, d, 0.0))) @ v, True),
        (lambda q, k, v, d: (q @ k.T * jnp.where(below, d, -1e9)) @ v, True),
    ):
        (region,) = analyse(jax.make_jaxpr(fn)(*args)).regions
        assert bool(biases(region)) == has


def test_a_mask_that_is_no_mask_where_inputs_are_as_low_is_refused() -> None:
    """Left padding: a row all of whose logits are the lowest number weighs all keys alike, also those after it. Minus
    infinity in its place is another program, whether a candidate has it or the translation.
    """
    attempt = _attempt(_padded, *_structs("float32", (64, 16), (64, 16), (64, 16), (1, 64)))
    text = re.sub(r"= where (\S+) (\S+) \S+$", r"= mask \1 \2", str(attempt.reference), flags=re.MULTILINE)
    assert "= mask " in text
    passed, why = _gate(attempt, text)
    assert not passed and why.startswith("masked")


@pytest.mark.parametrize("name", ["masked rows", "masked columns", "masked rows, infinite", "masked columns, infinite"])
def test_masks_in_whole_rows_and_in_part(name: str) -> None:
    classes = input_classes([((8, 16), np.float32), ((8, 16), np.float32), ((16,), np.float32)], 0, biases=[1, 2])
    plain, bias, vector = classes[name]
    assert np.abs(plain).max() < 10
    low = bias < -1e8 if "rows" in name else (bias < -1e8).T
    assert any(row.all() for row in low) and any(0 < row.sum() < row.size for row in low)
    assert not all(row.any() for row in low) or "columns" in name
    assert (vector < -1e8).any() and not (vector < -1e8).all()
    assert np.isinf(bias).any() == ("infinite" in name)
    assert "masked rows" not in input_classes([((8, 16), np.float32)], 0)


@pytest.mark.parametrize("shape", [(1, 2), (2,), (2, 3), (1, 1, 5), (4, 1)])
def test_few_rows_are_masked_wholly_too(shape: tuple[int, ...]) -> None:
    """By one input alone: two lowest numbers add up to minus infinity, of which nothing is asked."""
    classes = input_classes([(shape, np.float32)] * 2, 0, biases=[0, 1])
    for turn in (0, 1):
        low = [x < -1e38 for x in classes[f"all masked by input {turn}"]]
        assert low[turn].all() and not low[1 - turn].any()
    one, other = (x.reshape(-1, shape[-1]) < -1e38 for x in classes["masked rows"])
    assert not (one.all(-1) & other.all(-1)).any()
    assert len(one) == 1 or one.all(-1).any()


def test_rows_far_from_zero() -> None:
    (x,) = input_classes([((8, 16), np.float32)], 0, biases=[0])["rows far from zero"]
    assert (np.abs(x) > 1000).all() and (np.ptp(x, -1) < 10).all() and {*np.sign(x[:, 0])} == {-1, 1}
