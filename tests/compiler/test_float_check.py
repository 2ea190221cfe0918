"""On which inputs the float gate asks: what a region takes roots of is positive."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax.audit.sources import SPACE
from mirage_jax.compiler import float_check, tuning_session
from mirage_jax.compiler.float_check import (
    Accuracy,
    biases,
    indices_compared,
    inputs_under_roots,
    same_bits,
    scaled_logits,
    switches,
)
from mirage_jax.compiler.isolation.parent import Trials
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.stored import STORED_INPUT_CLASSES
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.config import Options
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.search.driver import search
from mirage_jax.verify.floats.input_classes import (
    BELOW_ZERO,
    CLASSES,
    FAR,
    MASKED,
    SWITCHES,
    InputClasses,
    input_classes,
    masks_with_lowest,
)


def region(fn: Any, *shapes: tuple[int, ...], dtype: str = "float32") -> Region:
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
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
    specs = [((8, 16), np.float32), ((8, 12), np.float32)]
    plain, classes = input_classes(specs, 0), input_classes(specs, 0, roots=[1])
    assert set(classes) == {*plain, BELOW_ZERO} and BELOW_ZERO in classes.own and not plain.own
    for name in plain:
        np.testing.assert_array_equal(plain[name][0], classes[name][0])
        if name not in ("nan", "inf", "-inf"):
            np.testing.assert_array_equal(np.abs(plain[name][1]), classes[name][1])
    assert set(np.unique(classes[BELOW_ZERO][1])) == {-FAR, FAR} and (classes[BELOW_ZERO][0] < 0).any()
    assert any(np.isneginf(x).any() for x in classes["-inf"])  # what spoils a class spoils it


def test_errors_of_a_program_as_written_leave_switches_alone() -> None:
    """A mask that is nearly 1 adds millions, beside which a logit has no digits."""
    r = region(lambda s, m, v: jax.nn.softmax(s + (1 - m) * -1e9, -1) @ v, (8, 16), (8, 16), (16, 4))
    accuracy = Accuracy(TuningSession(r, "cpu", jax.devices()[0], Options()))
    classes = accuracy._classes
    (errors,) = accuracy.written_errors(classes["on or off, all 1"]) or ()
    assert 0 < errors.max() < 1e-5 and switches(r) and "on or off, all 1, small" in classes


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
        results = accuracy.in_float64(values)
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
    verdicts: list[list[str]] = []
    for on_host, large in ((True, math.inf), (False, math.inf), (False, 0.0)):  # large ones keep only one noise
        monkeypatch.setattr(Accuracy, "_on_host", on_host)
        monkeypatch.setattr(float_check, "LARGE_BYTES", large)
        verdicts.append([])
        accuracy = Accuracy(attempt)
        for units in (0.0, 2.0, 64.0):
            ours = jax.jit(lambda *xs, e=units: [y * (1 + e * unit) for y in attempt.xla(*xs)])
            verdicts[-1].extend(accuracy._on_class(winner, n, ours) for n in accuracy._classes)
        values = accuracy._classes["normal"]
        exact = accuracy.in_float64(values)
        assert all(isinstance(y, np.ndarray) == on_host and y.dtype == np.float64 for y in exact)
        for found in (accuracy.noise(values, exact, 2), accuracy.written_errors(values)):
            assert found is not None and all(y.dtype == np.float64 and np.asarray(y).max() > 0 for y in found)
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert "" in verdicts[0] and any(verdicts[0][-len(accuracy._classes) :])


def windowed(q, k, v):
    """Causal attention whose mask is cut out of one for the longest context, as models in `transformers` have it."""
    mask = jnp.tril(jnp.ones((1 << 14, 1 << 14), bool))[: q.shape[0], : k.shape[0]]
    return jax.nn.softmax(jnp.where(mask, q @ k.T, -jnp.inf), axis=-1) @ v


def test_one_operation_after_another_stores_no_mask_that_is_cut() -> None:
    """In a file of the `transformers` the whole mask took 144 GiB of a GPU, and its attention lost its kernels."""
    r = region(windowed, (16, 8), (16, 8), (16, 8))
    session = TuningSession(r, "cpu", jax.devices()[0], Options())
    inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in session.specs]
    plan: Any = jax.jit(session.unfused).lower(*inputs).compile().memory_analysis()
    assert plan.temp_size_in_bytes < 1 << 20


def test_what_float64_holds_in_between_counts_as_memory(monkeypatch) -> None:
    """Attention's results are small, and its scores in float64 are not: two gates of it take turns."""
    r = region(attend, (256, 16), (512, 16), (512, 16))
    accuracy = Accuracy(TuningSession(r, "cpu", jax.devices()[0], Options()))
    monkeypatch.setattr(Accuracy, "_on_host", False)
    before = accuracy._bytes
    accuracy.in_float64(accuracy._classes["normal"])
    assert accuracy._bytes >= before + 8 * 256 * 512


def test_without_memory_nothing_is_run_one_operation_after_another(monkeypatch) -> None:
    """XLA says so where the results are waited for, which may be far from the call."""

    class Failed:
        def block_until_ready(self) -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate 144 GiB")

    r = region(attend, (24, 16), (40, 16), (40, 16))
    accuracy = Accuracy(TuningSession(r, "cpu", jax.devices()[0], Options()))
    monkeypatch.setattr(Accuracy, "_on_host", False)
    monkeypatch.setattr(Accuracy, "_unfused", lambda *args: [Failed()])
    assert accuracy.written_errors(accuracy._classes["normal"]) is None


def shift_added_first(graph: KernelGraph) -> KernelGraph:
    """With ``y - (log(l) + m)`` in place of ``(y - m) - log(l)``."""
    made = re.compile(r"library (\w+): (\w+)\[(\S*)\] = lesslogs (\S+) (\w+)\[(\S*)\] (\S+)$", re.MULTILINE)
    assert made.search(str(graph))
    return parse(
        made.sub(r"library \1_: \2[\6] = logs \5[\6] \7\n  library \1: \2[\3] = add{cb=-1} \4 \1_[\6]", str(graph))
    )


def gated(r: Region, graph: KernelGraph, *only: str) -> tuple[bool, str]:
    attempt = TuningSession(r, "cpu", jax.devices("cpu")[0], Options())
    schedule = Schedule(tuple(KernelSchedule() for _ in graph.kernels))
    return attempt.gate(attempt.winner(graph, schedule, "algebra"), only)


def test_a_sentinel_does_not_excuse_what_rounding_loses_beside_it() -> None:
    """In rows that are wholly masked ``(t - m) - log(l)`` is right in floats, and ``t - (log(l) + m)`` loses log(l)."""

    def masked(s, w):
        i = jnp.arange(32)
        return jnp.exp(jax.nn.log_softmax(jnp.where(i[:, None] > i[None], s, -1e9))) @ w

    r = region(masked, (32, 32), (32, 8))
    assert "lesslogs" in str(r.graph) and "logs" not in str(r.translated)
    assert gated(r, r.graph)[0]
    passed, why = gated(r, shift_added_first(r.graph))
    assert not passed and "normal" in why


def probabilities(x, b, w):
    return jnp.exp(jax.nn.log_softmax(x + b)) @ w


def gradients(x, b, w):
    return jax.grad(lambda *args: jnp.sum(jnp.square(probabilities(*args))), (0, 2))(x, b, w)


def cross_entropy(x, b, w):
    return -jnp.sum(jax.nn.log_softmax(x + b) * (x @ w), -1)


def factored(graph: KernelGraph, huge: float) -> KernelGraph:
    """With ``huge (m + s / huge) - huge`` in place of ``s + huge (m - 1)``."""
    affine = re.compile(r"library (\w+): (\S+) = (affine\S* \S+) (\w+)\[(\S+)\]$", re.MULTILINE)
    added = re.compile(r"library (\w+): (\S+) = add (\w+)\[\S+\] \w+\[\S+\]$", re.MULTILINE)
    masked = affine.search(str(graph))
    assert masked and added.search(str(graph))
    switch, scaled, type_, mask, axes = masked[1], masked[3], masked[2], masked[4], masked[5]
    return parse(
        added.sub(
            rf"library {switch}: {type_} = add{{cb=1/{huge:.0f}}} {mask}[{axes}] \3[{axes}]\n"
            rf"  library \1: \2 = {scaled} {switch}[{axes}]",
            affine.sub("", str(graph)),
        )
    )


@pytest.mark.parametrize("huge", [2.0**100, 2.0**30, 2.0**14])
def test_logits_beside_masks_keep_their_digits_if_the_softmax_is_elsewhere(huge: float) -> None:
    """Next to numbers as large as a mask's, the error of all others would look small."""
    r = region(lambda x, y, m: x @ y.T + huge * (m - 1), (8, 4), (8, 4), (8, 8))
    assert gated(r, r.graph)[0]
    passed, why = gated(r, factored(r.graph, huge), SWITCHES)
    assert not passed and SWITCHES in why
    assert not gated(r, factored(r.graph, huge), *STORED_INPUT_CLASSES)[0]  # nor if somebody else has stored it


def test_small_numbers_beside_masks_of_float16_keep_their_digits() -> None:
    """Where no element is masked, the program adds zero: it loses nothing then, however small the numbers are."""
    r = region(lambda x, y, m: x @ y.T + 65504 * (m - 1), (8, 4), (8, 4), (8, 8), dtype="float16")
    text = str(r.graph).replace("library t0: f16", "library t0: f32")
    text = text.replace(
        "t1: f16[k,i] = affine{offset=-65504, scale=65504} x2", "t1: f32[k,i] = add{ca=65504} x2[k,i] t0"
    )
    moved = parse(text.replace("add t0[k,i] t1[k,i]", "affine{offset=-65504} t1[k,i]"))
    assert gated(r, r.graph)[0]
    assert gated(r, moved, "normal", SWITCHES)[0]
    passed, why = gated(r, moved)
    assert not passed and f"{SWITCHES}, all 1" in why


def test_classes_that_a_program_does_not_have_are_not_asked() -> None:
    r = region(lambda x, y: x @ y.T, (8, 4), (8, 4))
    assert gated(r, r.graph, *STORED_INPUT_CLASSES) == (
        True,
        "passed on 4 input classes, repeated runs equal bit for bit",
    )


def test_classes_of_stored_decisions_have_names() -> None:
    assert {*STORED_INPUT_CLASSES} <= {*CLASSES, SWITCHES, *MASKED}


LOGITS_OF_INPUTS = "masked rows", "masked columns", "masked rows, infinite", "rows far from zero"


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("fn", [probabilities, gradients, cross_entropy])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logarithms_beside_masks_in_inputs(fn: Any, rows: int, dtype: str) -> None:
    """Of few rows as of many: log(l) may not be lost in those that are wholly masked, where it is no noise either."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 8), (rows, 8), (8, 8))]
    (r,) = analyse(jax.make_jaxpr(fn)(*args)).regions
    other, bias = shift_added_first(r.graph), biases(r)[-1]
    assert gated(r, r.graph, *LOGITS_OF_INPUTS, f"all masked by input {bias}") == (True, ANY)
    assert not gated(r, other, f"all masked by input {bias}")[0]
    assert rows == 1 or not gated(r, other, "masked rows")[0]


def potential(x: jax.Array, u: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
    """Log-sum-exps of columns of (x + u) / s, less u, both guarded, as ott-jax writes them: x[N, M], u[M], v[M]."""
    guarded = lambda y: jnp.where(jnp.isfinite(y), y, v)  # noqa: E731
    z = (x + u) / s
    m = guarded(jnp.max(z, 0))
    return guarded(jnp.log(jnp.sum(jnp.exp(z - m), 0)) + m) - 0.5 * guarded(u)


def test_the_lowest_number_may_overflow_in_the_program_itself() -> None:
    """Divided by 0.6 it is -inf in float32, in whose place the guard puts a number, and it is finite in float64."""
    r = region(potential, (16, 8), (8,), (8,), ())
    accuracy = Accuracy(RegionOnDevice(r, "cpu", jax.devices()[0], Options()))
    name = "masked columns"
    run = accuracy._run(accuracy._classes[name], accuracy._xla)
    assert "differs from the user's" in accuracy._misread(run) and masks_with_lowest(name)
    in_range, different = accuracy._read(run, name)
    assert different == "" and in_range.in_range
    low = run.reference[0] < np.finfo(np.float32).min
    assert low.any() and (in_range.reference[0][low] > np.finfo(np.float32).min).all()
    assert gated(r, r.graph, name)[0]
    logarithm = re.search(r"library (\w+): .* = logs", str(r.graph))
    assert logarithm is not None
    guard = re.compile(rf"( = )where \w+\[i\] ({logarithm[1]}\[i\]) .*")
    passed, why = gated(r, parse(guard.sub(r"\1affine \2", str(r.graph))), name)
    assert not passed and "non-finite" in why


def test_logarithms_far_from_zero() -> None:
    """There differences within a row keep their digits, and x - (log(l) + m) has fewer."""
    r = region(lambda x, w: jnp.exp(jax.nn.log_softmax(x)) @ w, (8, 8), (8, 8))
    assert gated(r, r.graph)[0]
    assert not gated(r, shift_added_first(r.graph), "rows far from zero")[0]


def test_one_of_two_inputs_in_logits_is_far_from_zero() -> None:
    """All of them are no help where one is the logarithm of a divisor: beside its e^-1024 nothing else counts."""

    def f(y: jax.Array, t: jax.Array, x: jax.Array) -> jax.Array:
        """Log-sum-exps of columns of x - sum |t / exp(y)|: x[M], t[N, M, 1], y[1]."""
        return jax.nn.logsumexp(x - jnp.sum(jnp.abs(t / jnp.exp(y)), -1), 1)

    r = region(f, (1,), (4, 8, 1), (8,))
    found = re.search(r"library (\w+): f32\[\w+\] = logs \w+\[\w+\] \w+\[\w+\]", str(r.graph))
    logits = re.search(r"library \w+: f32\[(\w+)\] = max\{axes=\((\w+)\)\} (\w+\[\w+,\w+\])", str(r.graph))
    assert found is not None and logits is not None
    row, along, z = logits.groups()
    unshifted = (
        f"library e: f32[{row},{along}] = exp {z}",
        f"library l: f32[{row}] = sum{{axes=({along})}} e[{row},{along}]",
        f"library {found[1]}: f32[{row}] = log l[{row}]",
    )
    wrong = parse(str(r.graph).replace(found[0], "\n  ".join(unshifted)))
    assert gated(r, r.graph)[0]
    passed, why = gated(r, wrong)
    assert not passed and why.startswith("rows far from zero, of input 2 alone: ")


def test_logits_are_large_where_their_factor_is_ordinary() -> None:
    """With all inputs large, a factor exp(-s) is infinite or 0 for one s, and then no softmax needs its maximum."""
    r = region(lambda s, x, w: jax.nn.softmax(x * jnp.exp(-s), -1) @ w, (1,), (16, 8), (8, 4))
    difference = re.search(r"(library \w+: .* = )add\{cb=-1\} (\w+\[\w+,\w+\]) \w+\[\w+\]", str(r.graph))
    assert difference is not None and scaled_logits(r) == [0, 1]
    unshifted = parse(str(r.graph).replace(difference[0], f"{difference[1]}affine {difference[2]}"))
    assert gated(r, r.graph)[0]
    passed, why = gated(r, unshifted)
    assert not passed and why.startswith("large input 1: ")
    assert scaled_logits(region(lambda q, k: jax.nn.softmax(q @ k.T), (16, 8), (16, 8))) == []


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


def spoiled_rows(accuracy: Accuracy, name: str, rows: Any, smallest: float) -> Any:
    """XLA's code, with wrong numbers in some rows where inputs are as large as in the class, or not much smaller."""
    right, largest = accuracy._xla, float(jnp.abs(accuracy._classes[name][0]).max())

    def run(q: jax.Array, *others: jax.Array) -> list[jax.Array]:
        results, size = right(q, *others), float(jnp.abs(q).max())
        return [y.at[rows].multiply(0.95) if size > smallest * largest else y for y in results]

    return run


@pytest.mark.parametrize(
    ("ours", "xla", "found"),
    [(None, 0.7, ""), (None, 0.3, ""), (None, 0.0, "in row 3"), (0.7, 0.7, ""), (0.3, 0.7, "error")],
)
def test_rows_that_rounding_decides_are_compared_on_smaller_inputs(
    ours: float | None, xla: float, found: str, monkeypatch
) -> None:
    """There the translation and the winner have to be right; a wrong translation is wrong there too."""
    args = [jax.ShapeDtypeStruct((n, 16), "float32") for n in (100, 40, 40)]
    (r,) = analyse(jax.make_jaxpr(attend)(*args)).regions
    attempt = TuningSession(r, "cpu", jax.devices()[0], Options())
    schedule = Schedule((KernelSchedule(),) * len(attempt.reference.kernels))
    winner = attempt.winner(attempt.reference, schedule, "algebra")
    accuracy = Accuracy(attempt)
    rounded, other = (spoiled_rows(accuracy, "normal", 3, x or 9.0) for x in (xla or 1e-9, ours))
    monkeypatch.setitem(accuracy.__dict__, "_xla", rounded)
    wrong = accuracy._on_class(winner, "normal", other)
    assert found in wrong if found else not wrong


def test_nan_times_false_is_nan_in_float64() -> None:
    """XLA would take the product for a choice, in place of which a kernel multiplies: neither is wrong."""

    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x * (y == jnp.max(y, 0)).astype(jnp.float32)).sum(0)

    check = Accuracy(RegionOnDevice(region(fn, (64, 8), (64, 8)), "cuda", jax.devices()[0], Options("search")))
    check.is_small = False  # in float64 under XLA
    x, y = np.full((64, 8), np.nan, np.float32), np.ones((64, 8), np.float32)
    y[0] = np.nan
    (found,) = check.in_float64([x, y])
    assert np.isnan(np.asarray(found)).all()
    assert not np.isnan(np.asarray(jax.jit(fn)(x, y))).any(), "XLA does: there would be nothing to test"


def test_what_the_gate_runs_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With XLA's results in place of a candidate's: float64, with noise and without, is compiled before the gate."""
    check = Accuracy(RegionOnDevice(region(rms, (16, 64), (64, 32)), "cuda", jax.devices()[0], Options("search")))
    check.is_small = False
    check.prepare()
    before = dict(check._evaluators)
    assert set(before) == {(True, False), (False, False)}
    check.noise(check._classes["normal"], check._run(check._classes["normal"], check._xla).reference, 8)
    assert check._evaluators == before


def test_another_region_may_be_timed_while_the_gate_draws_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what runs on the device takes a turn: compiling takes most of the time."""
    check = Accuracy(RegionOnDevice(region(rms, (16, 64), (64, 32)), "cuda", jax.devices()[0], Options("search")))
    check.is_small = False
    turns: list[int] = []

    @contextmanager
    def turn(_: Any) -> Iterator[None]:
        turns.append(1)
        yield
        turns.pop()

    def outside[**P, T](work: Callable[P, T]) -> Callable[P, T]:
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            assert not turns
            return work(*args, **kwargs)

        return run

    for name in ("gpu_lock", "process_turn"):
        monkeypatch.setattr(float_check, name, turn)
    for owner, name in ((InputClasses, "__getitem__"), (Accuracy, "_compiled"), (Accuracy, "_on_device")):
        monkeypatch.setattr(owner, name, outside(getattr(owner, name)))
    reference = check.subject.reference
    winner = check.subject.winner(reference, Schedule((KernelSchedule(),) * len(reference.kernels)), "algebra")
    assert check.gate(winner) == (True, ANY)
    assert not turns


def test_what_few_candidates_need_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is drawn while the search runs, and no more after it."""
    check = Accuracy(RegionOnDevice(region(rms, (16, 64), (64, 32)), "cuda", jax.devices()[0], Options("search")))
    check.is_small = False
    asked = iter((False, True))
    monkeypatch.setattr(Accuracy, "_noise_of", lambda *args: pytest.fail("noise is drawn"))
    check.prepare(lambda: next(asked))
    assert set(check._evaluators) == {(True, False), (False, False)} and next(asked, None) is None


def test_the_gate_is_prepared_while_the_search_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread of its own, which whoever measures waits for, XLA's time first; what fails there is left to the
    gate.
    """
    monkeypatch.setattr(tuning_session, "times_of_xla", lambda sessions: [3.0 for _ in sessions])
    session = TuningSession(region(rms, (16, 64), (64, 32)), "cuda", jax.devices()[0], Options("search"))
    session._accuracy.is_small = False
    session.prepare_gate()
    assert session._preparing is None, "nothing runs on this device"
    session.trials = Trials(())
    session.prepare_gate()
    found, _ = search(session.reference, DEVICES["CPU"], SPACE, 2.0, 20_000)
    session.wait_for_gate()
    assert session._preparing is not None and not session._preparing.is_alive()
    assert (True, False) in session._accuracy._evaluators, "with noise as well, if the search took as long"
    assert found and session.xla_seconds == 3.0
    failing = TuningSession(region(rms, (16, 64), (64, 32)), "cuda", jax.devices()[0], Options("search"))
    failing.trials, failing._accuracy.is_small = Trials(()), False
    failing._accuracy._on_device = lambda *_: 1 / 0
    failing.prepare_gate()
    failing.wait_for_gate()


@pytest.mark.parametrize(("strict", "name", "allowed"), [(0, "denormal", 1), (1, "denormal", 0), (0, "small", 0)])
def test_numbers_below_the_normal_range_may_be_flushed_to_zero(strict: bool, name: str, allowed: bool) -> None:
    """As products of matrix units are, unless the range is to be kept."""
    subject = TuningSession(ADAMW, "cpu", jax.devices()[0], Options(strict_range=bool(strict)))
    winner: Any = SimpleNamespace(family="kernels", schedule=Schedule(()), graph=subject.reference)
    accuracy = Accuracy(subject)
    r = np.random.default_rng(0).normal(size=(64, 32)) * 2e-39
    run = float_check._Evaluated([], [r], [r.astype(np.float32)], [np.zeros(r.shape, np.float32)], True)
    accuracy._allowances = lambda run: iter([([None], [None])])
    assert (accuracy._comparison(winner, name)(run) == "") == allowed


@pytest.mark.parametrize(("strict", "name", "allowed"), [(0, "denormal", 1), (1, "denormal", 0), (0, "small", 0)])
def test_so_may_inputs(strict: bool, name: str, allowed: bool) -> None:
    """Where the program then has no finite value: x (1 / s) may stand for x / s, and 1 / 1e-39 is infinite."""
    subject = TuningSession(
        region(lambda x, s: jnp.sum(x / s, -1), (64, 32), (64, 32)),
        "cpu",
        jax.devices()[0],
        Options(strict_range=bool(strict)),
    )
    winner: Any = SimpleNamespace(family="kernels", schedule=Schedule(()), graph=subject.reference)
    accuracy = Accuracy(subject)
    inputs = accuracy._classes[name]
    r = accuracy.in_float64(inputs)
    xla = [np.asarray(y) for y in subject.xla(*inputs)]
    run = float_check._Evaluated(inputs, r, xla, [np.full_like(xla[0], np.inf)], True)
    compared = accuracy._comparison(winner, name)
    assert (compared(accuracy._with_flushed_inputs(run, name)) == "") == allowed
    assert compared(replace(run, results=xla)) == "" != compared(run)


def in_tf32(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, 8, 10) @ jax.lax.reduce_precision(y, 8, 10)


def relu_gradient(dot: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The gradient of three layers by their input."""

    def gradient(x: Any, u: Any, v: Any, w: Any, dy: Any) -> jax.Array:
        h = dot(x, u)
        k = dot(jnp.maximum(h, 0.0), v)
        last = dot(jnp.where(dot(jnp.maximum(k, 0.0), w) > 0, dy, 0.0), w.T)
        return dot(jnp.where(h > 0, dot(jnp.where(k > 0, last, 0.0), v.T), 0.0), u.T)

    return gradient


def test_coarse_products_may_turn_a_relu_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As XLA's in TF32 on a GPU do, which a translation in float64 does not share: no fine rounding ever shows that."""
    shapes = [(512, 64), (64, 64), (64, 64), (64, 64), (512, 64)]
    subject = TuningSession(region(relu_gradient(jnp.matmul), *shapes), "cuda", jax.devices()[0], Options())
    accuracy = Accuracy(subject)
    monkeypatch.setattr(Accuracy, "_on_host", True)
    values = accuracy._classes["normal"]
    xla = np.asarray(jax.jit(relu_gradient(in_tf32))(*values))
    run = float_check._Evaluated(values, accuracy.in_float64(values), [xla], [xla], True)
    assert accuracy._misread(run) == ""
    monkeypatch.setattr(Accuracy, "_noise_of", lambda self, run, samples, half_unit=0.0: [np.zeros(xla.shape)])
    assert "differs from the user's" in accuracy._misread(run)
    wrong = replace(run, xla=[xla[::-1]])
    monkeypatch.undo()
    monkeypatch.setattr(Accuracy, "_on_host", True)
    assert "differs from the user's" in accuracy._misread(wrong)


NORMALIZED = """mugraph {
  extents i=3 j=26 k=31 l=26
  input x0: f32[i,j,k]
  input x1: f32[i,k,l]
  library m0: f32[i,j] = sum{axes=(k)} x0[i,j,k]
  library m1: f32[i,l] = sum{axes=(k)} x1[i,k,l]
  library m2: f32[i,j,l] = dot{axes=(k)} x0[i,j,k] x1[i,k,l]
  library m3: f32[i,j,k] = add{cb=-1/31} x0[i,j,k] m0[i,j]
  library m4: f32[i,j,l] = mul m0[i,j] m1[i,l]
  library m5: f32[i,j,l] = add{cb=-1/31} m2[i,j,l] m4[i,j,l]
  library m6: f32[i,j] = dot{axes=(k)} m3[i,j,k] m3[i,j,k]
  library m7: f32[i,j] = pow{exponent=-1/2, offset=2748779/274877906944, scale=1/31} m6[i,j]
  library t6: f32[i,j,l] = mul m7[i,j] m5[i,j,l]
  output t6
}"""


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_small_products_may_be_of_tf32_in_the_users_program(platform: str, monkeypatch) -> None:
    """x w - mean(x) sum(w) has float32's digits here, as small products have where XLA takes no matrix units."""

    def normalized(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) @ w

    monkeypatch.setattr(RegionOnDevice, "compiled", lambda self, f, options=None: jax.jit(f))
    session = TuningSession(region(normalized, (3, 26, 31), (3, 31, 26)), platform, jax.devices()[0], Options())
    graphs = session.reference, parse(NORMALIZED)
    verdicts = [
        session.gate(session.winner(g, Schedule((KernelSchedule(),) * len(g.kernels)), "algebra")) for g in graphs
    ]
    assert verdicts[0][0] and verdicts[1][0] == (platform == "cpu")
    assert platform == "cpu" or verdicts[1][1].startswith("with products in TF32, constant rows: ")
