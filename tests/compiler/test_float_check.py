"""On which inputs the float gate asks: what a region takes roots of is positive."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax.audit.sources import SPACE
from mirage_jax.compiler.float_check import Accuracy, indices_compared, inputs_under_roots, same_bits
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.config import Options
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.graph import KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.search.driver import search
from mirage_jax.verify.floats.input_classes import BELOW_ZERO, FAR, input_classes


def region(fn: Any, *shapes: tuple[int, ...]) -> Region:
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    (found,) = analyse(jax.make_jaxpr(fn)(*args)).regions
    return found


def adamw(x, dy, mean, square, w, correction):
    """The gradient of a product, and what AdamW does with it."""
    g = x.T @ dy
    mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g * g
    return w - 0.01 * (mean / (jnp.sqrt(square / correction) + 1e-8) + 0.1 * w), mean, square


ADAMW = region(adamw, (64, 32), (64, 48), (32, 48), (32, 48), (32, 48), ())


def rms(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) @ w


CASES: list[tuple[Any, list[tuple[int, ...]], list[int]]] = [
    (adamw, [(64, 32), (64, 48), (32, 48), (32, 48), (32, 48), ()], [3, 5]),
    (rms, [(16, 64), (64, 32)], []),  # a square is positive
    (lambda x, r, w: x * jax.lax.rsqrt(r + 1e-6) @ w, [(16, 64), (16, 1), (64, 32)], [1]),
    (lambda x, w: jax.nn.log_softmax(x @ w), [(16, 64), (64, 32)], []),
    (lambda x, w: jnp.log(x @ w), [(16, 64), (64, 32)], [0, 1]),
    (lambda x, w, c: jnp.sqrt(2.0 - x @ w + 3.0 * c), [(16, 64), (64, 32), (16, 32)], [2]),
]


@pytest.mark.parametrize(("fn", "shapes", "positive"), CASES)
def test_what_has_to_be_positive(fn, shapes, positive) -> None:
    r = region(fn, *shapes)
    assert [r.inputs[i].value for i in inputs_under_roots(r)] == positive


def test_classes() -> None:
    specs = [((8, 16), np.float32)] * 2
    plain, classes = input_classes(specs, 0), input_classes(specs, 0, roots=[1])
    assert set(classes) == {*plain, BELOW_ZERO} and BELOW_ZERO in classes.own and not plain.own
    for name in plain:
        np.testing.assert_array_equal(plain[name][0], classes[name][0])
        if name not in ("nan", "inf", "-inf"):
            np.testing.assert_array_equal(np.abs(plain[name][1]), classes[name][1])
    assert set(np.unique(classes[BELOW_ZERO][1])) == {-FAR, FAR} and (classes[BELOW_ZERO][0] < 0).any()
    assert any(np.isneginf(x).any() for x in classes["-inf"])  # what spoils a class spoils it


def test_lengths_and_labels_are_any_that_there_are() -> None:
    """Few keys, and all but a few, where lengths say how many there are."""

    def padded(s, v, length, kind):
        seen = (jnp.arange(200) < length[:, None]) & (kind == 1)[:, None]
        return jnp.where(seen, jnp.exp(s), 0.0) @ v

    shapes = ((64, 200), "float32"), ((200, 16), "float32"), ((64,), "int32"), ((64,), "int32")
    args = [jax.ShapeDtypeStruct(*spec) for spec in shapes]
    (r,) = analyse(jax.make_jaxpr(padded)(*args)).regions
    position = {tuple(r.avals[b.value].shape): i for i, b in enumerate(r.inputs)}
    counts = indices_compared(r)
    assert list(counts.values()) == [200] and len(r.inputs) == 4 and position[64, 200] not in counts
    specs = [(r.avals[b.value].shape, r.avals[b.value].dtype) for b in r.inputs]
    for values in input_classes(specs, 0, counts=counts).values():
        (own,) = (values[i] for i in counts)
        assert own.dtype == np.int32 and 0 <= own.min() < 4 and 150 < own.max() < 200 and (own < 4).sum() > 5
        assert all(
            x.min() >= 0 and x.max() < 4 for i, x in enumerate(values) if x.dtype == np.int32 and i not in counts
        )


def test_no_result_of_an_optimizer_is_nan() -> None:
    """Half of them would be, and rounding would decide which: where (1 - b) g g is all but as large as -b v."""
    accuracy = Accuracy(TuningSession(ADAMW, "cpu", jax.devices()[0], Options()))
    for roots, expected in ((inputs_under_roots(ADAMW), False), ([], True)):
        values = input_classes(accuracy.subject.specs, 0, roots=roots)["normal"]
        results = accuracy.in_float64(accuracy.wide_inputs(values))
        assert any(np.isnan(y).any() for y in results) == expected


def test_what_makes_numbers_of_nan_is_refused() -> None:
    """sqrt(v) sqrt(v) is v only where v is not negative: the class below zero shows it."""
    r = region(lambda v, x, w: jnp.sqrt(v) * (jnp.sqrt(v) * (x @ w)), (16, 32), (16, 64), (64, 32))
    attempt = TuningSession(r, "cpu", jax.devices()[0], Options())
    own, schedule = attempt.reference, Schedule((KernelSchedule(),) * len(attempt.reference.kernels))
    assert attempt.gate(attempt.winner(own, schedule, "algebra"))[0]
    root, last = (re.compile(rf"(library {name}: .* = ).*") for name in ("t0", "t3"))
    text = last.sub(r"\1affine t2[i,j]", root.sub(r"\1affine x0[i,j]", str(own)))
    passed, why = attempt.gate(attempt.winner(parse(text), schedule, "algebra"))
    assert not passed and why.startswith(f"{BELOW_ZERO}: ") and "non-finite" in why


def test_a_kernel_whose_runs_differ_is_refused() -> None:
    """By a bit of one element, which no bound on errors would notice."""
    attempt = TuningSession(ADAMW, "cpu", jax.devices()[0], Options())
    schedule = Schedule((KernelSchedule(),) * len(attempt.reference.kernels))
    winner = attempt.winner(attempt.reference, schedule, "algebra")
    runs: list[int] = []

    def ours(*args):
        runs.append(1)
        *others, last = attempt.xla(*args)
        return [*others, last.at[0, 0].set(jnp.nextafter(last[0, 0], 9.0)) if len(runs) == 2 else last]

    assert attempt._accuracy._on_class(winner, "normal", ours) == "two runs differ"
    assert len(runs) == 2 and attempt._accuracy._on_class(winner, "normal", ours) == ""


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int32"])
def test_same_bits(dtype: str) -> None:
    a = jnp.arange(8).astype(dtype)
    assert same_bits(a, a) and not same_bits(a, a.at[3].set(~a[3] if dtype == "bool" else a[3] + 1))


def test_zeros_of_other_signs_have_other_bits() -> None:
    zeros, nan = jnp.zeros(4), jnp.full(4, jnp.nan)
    assert not same_bits(zeros, -zeros) and same_bits(nan, nan)


def attend(q, k, v):
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_regions_are_compared_on_the_device(dtype: str, monkeypatch) -> None:
    """In every class, with as much noise as it takes, to the same end as on the host."""
    args = [jax.ShapeDtypeStruct((n, 16), dtype) for n in (24, 40, 40)]
    (r,) = analyse(jax.make_jaxpr(attend)(*args)).regions
    attempt = TuningSession(r, "cpu", jax.devices()[0], Options())
    schedule = Schedule((KernelSchedule(),) * len(attempt.reference.kernels))
    winner = attempt.winner(attempt.reference, schedule, "algebra")
    unit = float(jnp.finfo(dtype).eps)
    verdicts: dict[bool, list[str]] = {}
    for on_host in (True, False):
        monkeypatch.setattr(Accuracy, "_on_host", on_host)
        accuracy = Accuracy(attempt)
        for units in (0.0, 2.0, 64.0):
            ours = jax.jit(lambda *xs, e=units: [y * (1 + e * unit) for y in attempt.xla(*xs)])
            verdicts.setdefault(on_host, []).extend(accuracy._on_class(winner, n, ours) for n in accuracy._classes)
        values = accuracy._classes["normal"]
        inputs = accuracy.wide_inputs(values)
        exact = accuracy.in_float64(inputs)
        assert all(isinstance(y, np.ndarray) == on_host and y.dtype == np.float64 for y in exact)
        for found in (accuracy.noise(inputs, exact, 2), accuracy.written_errors(values)):
            assert found is not None and all(y.dtype == np.float64 and np.asarray(y).max() > 0 for y in found)
    assert verdicts[True] == verdicts[False]
    assert "" in verdicts[True] and any(verdicts[True][-len(accuracy._classes) :])


def test_a_sentinel_does_not_excuse_what_rounding_loses_beside_it() -> None:
    """In rows that are wholly masked ``(t - m) - log(l)`` is right in floats, and ``t - (log(l) + m)`` loses log(l)."""

    def masked(s, w):
        i = jnp.arange(32)
        return jnp.exp(jax.nn.log_softmax(jnp.where(i[:, None] > i[None], s, -1e9))) @ w

    r = region(masked, (32, 32), (32, 8))
    assert "logs" in str(r.graph) and "logs" not in str(r.translated)
    attempt = TuningSession(r, "cpu", jax.devices("cpu")[0], Options())
    schedule = Schedule(tuple(KernelSchedule() for _ in attempt.reference.kernels))
    passed, why = attempt.gate(attempt.winner(attempt.reference, schedule, "algebra"))
    assert not passed and "normal" in why


def test_what_reads_no_floats_has_none_to_scale() -> None:
    """Of masks and lengths alone a program makes float16 of its own: its range is that of the ordinary classes."""
    mask = jax.ShapeDtypeStruct((4, 16), "bool")
    jaxpr = jax.make_jaxpr(lambda m: jnp.exp(2 * m.astype("float16")).sum(-1))(mask)
    (r,) = analyse(jaxpr).regions
    attempt = TuningSession(r, "cpu", jax.devices("cpu")[0], Options())
    schedule = Schedule(tuple(KernelSchedule() for _ in attempt.reference.kernels))
    assert attempt.gate(attempt.winner(attempt.reference, schedule, "algebra"))[0]


@pytest.mark.parametrize("largest", ["max", "min"])
def test_differences_to_a_maximum_keep_their_digits(largest: str) -> None:
    """(x - max x) w is exact where a row's numbers are alike; x w - (max x) (sum w) is what rounding leaves there."""
    r = region(lambda x, w: (x - getattr(jnp, largest)(x, -1, keepdims=True)) @ w, (32, 8), (8, 16))
    attempt = TuningSession(r, "cpu", jax.devices("cpu")[0], Options())
    found, _ = search(attempt.reference, DEVICES["CPU"], SPACE, 30.0, 2000, ("algebra",))
    verdicts = {str(c.graph): attempt.gate(attempt.winner(c.graph, c.schedule, c.family)) for c in found}
    distributed = {text: " = add" in text.splitlines()[-3] for text in verdicts}
    assert set(distributed.values()) == {False, True}
    assert all(verdicts[text][0] != wrong for text, wrong in distributed.items()), verdicts
