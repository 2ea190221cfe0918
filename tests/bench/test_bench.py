"""The benchmark measures what it says: limits, errors, order statistics, profiles, interleaving, tables."""

import io
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from mirage_jax import timing
from mirage_jax.bench import calibration, peers, plot, programs, sentinel_suite, start, steps, suite
from mirage_jax.errors import UnsupportedError, UsageError
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse

# The limits of the table of measured peers, in microseconds on one H200.
LIMITS = {
    "gqa_b1": 0.7, "mha_b1": 7.8, "mqa_b1": 1.4, "qknorm_gqa_b1": 0.7, "rmsnorm_b1": 11.7, "gated_mlp_b1": 15.6,
    "ntrans_b1": 0.1, "lora_b1": 0.6, "gqa_b8": 5.5, "mha_b8": 62.7, "mqa_b8": 11.0, "qknorm_gqa_b8": 5.5,
    "rmsnorm_b8": 11.8, "gated_mlp_b8": 15.9, "ntrans_b8": 0.5, "lora_b8": 0.8, "prefill_attn": 88.1,
    "prefill_gated": 473.5, "prefill_rmsnorm": 132.2,
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_limit(name) -> None:
    assert round(programs.program(name).limit() * 1e6, 1) == LIMITS[name]


def test_suites() -> None:
    assert len(programs.suite("mirage")) == 16
    assert len(programs.suite("mirage") + programs.suite("prefill")) == 19
    assert len(programs.suite("all")) == sum(len(programs.suite(s)) for s in programs.SUITES)
    with pytest.raises(UsageError, match=r"'mirag'\. Did you mean 'mirage'"):
        programs.suite("mirag")
    with pytest.raises(UsageError, match=r"'gqa_b2'\. Did you mean 'gqa_b"):
        programs.program("gqa_b2")


SMALL = [p for p in programs.suite("all", small=True) if not p.name.endswith("_b8")]


@pytest.mark.parametrize("program", SMALL, ids=lambda p: p.name)
def test_small_program(program) -> None:
    args = program.draw(1)
    result = np.asarray(jax.jit(program.fn)(*args))
    reference = program.in_float64(args)
    assert str(result.dtype) == program.dtype and reference.dtype == np.float64
    error, error_rms = suite.errors_against(reference, result)
    assert error < {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-5}[program.dtype]
    assert error_rms > 0
    assert program.bytes < 2e6


def test_errors_against() -> None:
    reference = np.array([1.0, -4.0])
    assert suite.errors_against(reference, np.array([1.0, -3.0])) == (0.25, pytest.approx(math.sqrt(0.5 / 8.5)))
    assert suite.errors_against(reference, np.array([1.0, np.nan]))[0] == math.inf
    assert suite.errors_against(reference, np.array([1.0, np.inf]))[0] == math.inf


# Timing.


def test_the_function_that_gains_least() -> None:
    def row(name: str, **ratios: timing.Ratio) -> suite.SuiteRow:
        return suite.SuiteRow(
            name, None, {k: suite.BenchResult(1.0, (1.0, 1.0), ratio=r) for k, r in ratios.items()}, {}
        )

    def result(*rows: suite.SuiteRow) -> suite.SuiteResult:
        return suite.SuiteResult("t", "now", "here", {}, "", rows, peers=("peer",))

    slow, noisy = timing.Ratio(0.97, 0.96, 0.98), timing.Ratio(0.97, 0.80, 1.20)
    rows = row("a", mirage=timing.Ratio(1.5, 1.4, 1.6), peer=slow), row("b", mirage=timing.Ratio(0.99, 0.98, 1.0))
    found = result(*rows)
    assert found.lowest is not None and found.lowest[1:] == ("b", "mirage") and not found.is_slower
    assert result(*rows, row("c", mirage=slow)).is_slower
    assert not result(*rows, row("c", mirage=noisy)).is_slower and not result().is_slower


@pytest.mark.parametrize("step", steps.steps("whole", small=True), ids=lambda step: step.name)
def test_gradients_that_are_timed_as_a_whole(step) -> None:
    args = step.draw(jax.random.key(0))
    _, (loss, gradients) = jax.jit(step.fn)(*args)
    assert math.isfinite(loss)
    gradients = jax.tree.leaves(gradients)
    assert [g.shape for g in gradients] == [x.shape for x in jax.tree.leaves(args[1][0])]
    assert all(float(jnp.abs(g).max()) > 0 for g in gradients)


FIELDS = {s.name: s for s in steps.steps("fields", small=True)}


@pytest.mark.parametrize("step", FIELDS.values(), ids=FIELDS.keys())
def test_programs_of_other_fields(step) -> None:
    """Results and gradients are finite, and no gradient is nothing but zeros."""
    state, batch = step.draw(jax.random.key(0))
    _, result = jax.jit(step.fn)(state, batch)
    arrays = [np.asarray(x, np.float32) for x in jax.tree.leaves(result)]
    assert all(np.isfinite(x).all() and np.abs(x).max() > 1e-6 for x in arrays)
    if step.trains:
        assert [x.shape for x in arrays] == [x.shape for x in batch if x.dtype != bool]


def test_regions_of_programs_of_other_fields() -> None:
    """All have a region: what the optimizer does not see, nobody can tune."""
    without = []
    for name, step in FIELDS.items():
        jaxpr = jax.make_jaxpr(step.fn)(*jax.eval_shape(step.draw, jax.random.key(0)))
        if not analyse(jaxpr, remat=True).regions:
            without.append(name)
    assert not without


def test_median_interval_has_its_confidence() -> None:
    rng, n, trials = random.Random(0), 10, 4000
    covered = 0
    for _ in range(trials):
        low, high = timing.median_interval([rng.expovariate(1.0) for _ in range(n)])
        covered += low <= math.log(2) <= high
    assert covered / trials > 0.95
    assert timing.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert timing.median_interval(list(range(20))) == (5, 14)  # the textbook's interval for n = 20


def test_ratio_is_paired() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    base, ours = timing.Timing(tuple(2 * d for d in drift)), timing.Timing(tuple(drift))
    assert timing.ratio(base, ours) == timing.Ratio(2.0, 2.0, 2.0)
    assert str(timing.ratio(base, ours)) == "2.00x [2.00, 2.00]"


def test_rounds_are_abba() -> None:
    order: list[str] = []
    timing._rounds(["a", "b"], 2, lambda labels: order.extend(labels) or labels)
    assert "".join(order) == "abbaabba"


def test_time_wall(monkeypatch) -> None:
    made: list[float] = []  # what each call takes

    def taking(seconds: float):
        return lambda: made.append(seconds)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: sum(made)))
    found = timing.time_wall({"slow": taking(2e-3), "fast": taking(2e-4)}, rounds=6, sample_seconds=2e-3)
    assert timing.ratio(found["slow"], found["fast"]).value == pytest.approx(10)
    assert found["fast"].interval == pytest.approx((2e-4, 2e-4)) and found["fast"].seconds == pytest.approx(2e-4)
    assert (made.count(2e-3), made.count(2e-4)) == (2 + 12, 2 + 120), "short calls are made several times to a sample"


@pytest.mark.parametrize(("size", "sets"), [(1 << 10, 24), (64 << 20, 4), (1 << 30, 2)])
def test_sets_for(size, sets) -> None:
    assert timing.sets_for(size) == sets


PROFILE = """
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "call" } } }
planes { name: "/device:GPU:0"
  lines { name: "Stream #14(MemcpyH2D)" timestamp_ns: 1000 events { metadata_id: 3 offset_ps: 0 duration_ps: 1000000 } }
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 5000000 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 8000000 duration_ps: 4000000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 1 offset_ps: 0 duration_ps: 90000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "softmax" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyH2D" } }
}
"""


def kernels(text: str = PROFILE) -> list[timing.Event]:
    raw = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    return timing.kernels_of(jax.profiler.ProfileData.from_serialized_xspace(raw))


def test_span_of_a_profile() -> None:
    span = timing.span_of(kernels())
    assert (span.kernels, span.names) == (2, ("gemm", "softmax"))
    assert span.seconds == pytest.approx(7e-6)  # from 5 to 12 microseconds; the copy from the host is no part of it


@pytest.mark.parametrize(("steps", "seconds"), [(1, 7e-6), (2, 6e-6), (3, 7e-6)])
def test_steps_in_a_row(steps: int, seconds: float) -> None:
    """Two steps of a kernel each, of 2 and of 4 microseconds, and one between them. Two kernels are not three steps."""
    span = timing.span_of(kernels(), steps)
    assert span.seconds == pytest.approx(seconds) and span.kernels == 2


def test_a_host_that_falls_behind_in_a_step() -> None:
    """Three steps of two kernels, of 5 ns each; in the last one the second kernel is late."""
    events = [(start + 10 * n, start + 10 * n + 2, "k") for n in range(3) for start in (0, 3)]
    late = [*events[:-1], (60, 62, "k")]
    assert timing.span_of(events, 3).seconds == timing.span_of(late, 3).seconds == pytest.approx(15e-9)


def test_no_kernels_without_a_gpu() -> None:
    assert kernels(PROFILE.replace("/device:GPU:0", "/device:CPU:0")) == []


SEVERAL = [(0, 1, "mark"), (5, 7, "a"), (9, 10, "mark"), (20, 21, "b"), (22, 26, "a"), (30, 31, "mark"), (31, 34, "c")]
SEPARATE = [
    *[(0, 1, "mark"), (1, 90, "delay"), (90, 91, "mark"), (95, 97, "a")],
    *[(109, 110, "mark"), (110, 190, "delay"), (200, 201, "mark"), (220, 221, "b"), (222, 226, "a")],
    *[(230, 231, "mark"), (231, 300, "delay"), (300, 301, "mark"), (301, 304, "c")],
]


def test_kernels_are_told_apart_by_the_one_between() -> None:
    assert timing.split(SEVERAL, "mark") == [[(5, 7, "a")], [(20, 21, "b"), (22, 26, "a")], [(31, 34, "c")]]
    assert timing.split(SEVERAL, "a") == [SEVERAL[2:4], SEVERAL[5:]]


@pytest.mark.parametrize("lost", [None, 4, 12])
def test_calls_in_one_profile(monkeypatch, lost: int | None) -> None:
    """Where a kernel is lost that separates two calls, or a call has none, each is profiled alone."""
    events = [event for i, event in enumerate(SEPARATE) if i != lost]
    profiles: list[int] = []

    def profiled(call):
        call()
        profiles.append(1)
        return events if len(profiles) == 1 else [(0, 5, "alone")]

    none = lambda: None  # noqa: E731
    monkeypatch.setattr(timing, "_separator", lambda: timing._Separator(none, none, "mark"))
    monkeypatch.setattr(timing, "_profiled", profiled)
    found = timing.profile_each([lambda: None] * 3)
    nanoseconds = [round(span.seconds * 1e9) for span in found]
    assert nanoseconds == ([2, 6, 3] if lost is None else [5, 5, 5])
    assert len(profiles) == (1 if lost is None else 4)


def test_a_profile_that_lost_its_kernels_is_made_again(monkeypatch) -> None:
    profiles = iter([[], [(0, 5, "alone")]])
    monkeypatch.setattr(timing, "_profiled", lambda call: next(profiles))
    assert timing.profile(lambda: None).kernels == 1


def test_a_profile_without_a_gpu() -> None:
    if jax.devices()[0].platform == "gpu":
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="no kernel"):
        timing.profile(lambda: jnp.ones(3).block_until_ready())


def test_time_once_is_one_profile() -> None:
    made: list[str] = []

    def measure(calls, steps):
        for call in calls:
            call()
        assert made == ["a", "a", "b", "b"] and steps == [2, 2, 1, 1], "the host is ahead of the device in each call"
        return [timing.TraceInterval(t * 1e-6, n, ()) for t, n in ((5, 6), (3, 6), (1, 2), (3, 2))]

    found = timing.time_once([lambda: made.append("a"), lambda: made.append("b")], [2, 1], measure)  # own sets each
    assert found == [timing.Timing((2e-6,), 3.0), timing.Timing((2e-6,), 2.0)]


def test_time_steps_divides_by_the_steps() -> None:
    spans = {"a": timing.TraceInterval(8e-6, 8, ()), "b": timing.TraceInterval(4e-6, 4, ())}
    calls = {label: lambda label=label: label for label in spans}
    found = timing.time_steps(calls, 4, 3, lambda several, steps: [spans[call()] for call in several])
    assert found["a"] == timing.Timing((2e-6,) * 3, 2.0)
    assert timing.ratio(found["a"], found["b"]).value == 2.0


def test_a_call_may_time_itself() -> None:
    class Timed:
        def __call__(self) -> None:
            pass

        def span(self) -> timing.TraceInterval:
            return timing.TraceInterval(6e-6, None, ())

    found = timing.time_steps({"peer": Timed()}, 3, 2)
    assert found["peer"] == timing.Timing((2e-6, 2e-6), None)


def test_calls_between_those_that_time_themselves_share_a_profile(monkeypatch) -> None:
    class Timed:
        def __call__(self) -> None:
            pass

        def span(self) -> timing.TraceInterval:
            return timing.TraceInterval(1.0, None, ("own",))

    groups: list[int] = []

    def profile_each(calls, steps):
        groups.append(len(calls))
        return [timing.TraceInterval(2.0, 1, ())] * len(calls)

    monkeypatch.setattr(timing, "profile_each", profile_each)
    ours, peer = (lambda: None), Timed()
    found = timing.spans_of([ours, ours, peer, peer, ours, Timed(), ours])
    assert [span.seconds for span in found] == [2.0, 2.0, 1.0, 1.0, 2.0, 1.0, 2.0] and groups == [2, 1, 1]


@pytest.mark.gpu
def test_device_time_of_a_matmul() -> None:
    args = [(jnp.ones((4096, 4096), jnp.float16), jnp.ones((4096, 4096), jnp.float16)) for _ in range(3)]
    call = timing.in_turn(jax.jit(jnp.matmul).lower(*args[0]).compile(), args)
    found = timing.time_steps({"xla": call}, 3, 5)["xla"]
    assert 50e-6 < found.seconds < 5e-3
    assert found.launches is not None and found.launches >= 1


@pytest.mark.gpu
def test_one_profile_tells_what_several_do() -> None:
    """Each call is told its own kernels and its own time; and there is a kernel to tell calls apart.

    The long call takes some thirty times as long as the short one. Other processes may use the GPU while this runs, so
    two profiles of one call can differ, which is why times of the same call are not compared.
    """
    x, y = jnp.ones((4096, 4096), jnp.float16), jnp.ones((512, 512), jnp.float16)
    compiled = [jax.jit(jnp.matmul).lower(a, a).compile() for a in (x, y)]
    calls = [lambda c=c, a=a: jax.block_until_ready(c(a, a)) for c, a in zip(compiled, (x, y), strict=True)]
    for call in calls:
        call()
    assert timing._separator() is not None
    together = timing.profile_each([*calls, *calls])
    assert [t.names for t in together] == 2 * [timing.profile(c).names for c in calls]
    assert min(t.seconds for t in together[::2]) > max(t.seconds for t in together[1::2])


# Suites.


def _run(candidates, **keywords):
    small = [programs.program(n, small=True) for n in ("lora_b1", "abv")]
    return suite.run_suite(small, candidates, rounds=6, **keywords)


def test_run_suite(tmp_path) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    result = _run({"xla": jax.jit, "again": jax.jit}, title="tiny", console=console)
    assert [row.program for row in result.rows] == ["lora_b1", "abv"]
    for row in result.rows:
        assert not row.failures and set(row.results) == {"xla", "again"}
        assert row.results["xla"].ratio is None and row.results["again"].ratio is not None
        assert row.results["xla"].error == row.results["again"].error < 1e-2
    console.print(result.table())
    assert "2/2 abv" in (text := console.export_text()) and "tiny" in text
    markdown = result.write(tmp_path / "deep" / "r.json")
    assert markdown.read_text().count("\n| ") == 3
    stored = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert stored["versions"]["jax"] == jax.__version__ and len(stored["rows"]) == 2


def test_an_interrupt_keeps_complete_rows() -> None:
    def run(program, candidates, **keywords):
        if program.name == "abv":
            raise KeyboardInterrupt
        return suite.run_program(program, candidates, **keywords)

    result = _run({"xla": jax.jit}, run=run, title="cut")
    assert [row.program for row in result.rows] == ["lora_b1"] and "after 1 of 2" in result.title


def test_a_failing_candidate_is_a_row(tmp_path) -> None:
    def broken(fn):
        raise NotImplementedError("no such thing\nsecond line")

    def wrong(fn):
        return jax.jit(lambda *args: fn(*args) * jnp.inf)

    result = _run({"xla": jax.jit, "broken": broken, "wrong": wrong})
    for row in result.rows:
        assert row.failures == {"broken": "NotImplementedError: no such thing"}
        assert row.results["wrong"].error == math.inf
    result.write(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["results"]["wrong"]["error"] is None
    assert "broken: NotImplementedError" in result.to_markdown()


def test_a_candidate_that_fails_when_it_is_timed_is_a_row() -> None:
    made = itertools.count()

    def once(fn, **options):
        def run(*args):
            if next(made) > 0:
                raise RuntimeError("out of memory")
            return fn(*args)

        return run

    result = suite.run_suite([programs.program("abv", small=True)], {"xla": jax.jit, "once": once}, rounds=2)
    (row,) = result.rows
    assert set(row.results) == {"xla"} and row.failures == {"once": "RuntimeError: out of memory"}


def test_the_cost_model_orders_measured_kernels() -> None:
    """Kernels of 27 programs, as they were timed on an H200: a change of the model must not lose their order."""
    (file,) = Path(__file__).parents[2].glob("results/kernels-h200-*.jsonl.gz")
    found = calibration.pairs(calibration.load(file), DEVICES["H200"])
    assert len(found) == 27 and sum(map(len, found.values())) > 4000
    assert calibration.mean_rank(found) > 0.935
    assert calibration.mean_rank(calibration.pairs(calibration.load(file), DEVICES["CPU"])) < 0.9  # of another device


def test_equal_runs() -> None:
    x = jnp.array([1.0, jnp.nan, -0.0], jnp.float16)
    assert suite.equal_runs(lambda x: x, (x,), 5) == 5  # NaN is equal to itself, bit for bit
    runs = iter([x, x, x, jnp.abs(x)])
    assert suite.equal_runs(lambda: next(runs), (), 9) == 2  # the sign of a zero
    row = suite.run_program(programs.program("abv", small=True), {"mirage": jax.jit}, rounds=2, repeats=3)
    assert row.results["mirage"].repeats == 3
    header, (cells,) = suite.SuiteResult("", "", "", {}, "", (row,)).cells()
    assert cells[header.index("equal runs")] == "3"


# Peers.


@pytest.mark.parametrize("name", ["gqa_b1", "causal_f16_d64"])
def test_attention_in_another_layout(name) -> None:
    """What cuDNN gets is the same program: here XLA runs it from the same arguments."""
    program = replace(programs.program(name, small=True), dtype="float32")  # on CPUs it takes no float16
    peer = peers.JaxAttention("xla")
    args = program.draw()
    error, _ = suite.errors_against(program.in_float64(args), peer.result(program, args))
    assert error < 1e-2
    call = peer.call(program, [args, program.draw(1)])
    assert timing.time_wall({"peer": call}, rounds=2)["peer"].seconds > 0


def test_peers_in_the_table(tmp_path) -> None:
    chosen = [replace(programs.program(n, small=True), dtype="float32") for n in ("gqa_b1", "lora_b1")]
    rivals = {"attention": peers.JaxAttention("xla"), "broken": peers.JaxAttention("no such implementation")}
    result = suite.run_suite(chosen, {"xla": jax.jit, "mirage": jax.jit}, rivals, rounds=2)
    gqa, lora = result.rows
    assert gqa.results["attention"].error < 1e-2 and "broken" in gqa.failures and not lora.failures
    label, times = gqa.best
    others = {n: r.seconds for n, r in gqa.results.items() if n != "mirage"}
    assert others[label] == min(others.values()) and times == others[label] / gqa.results["mirage"].seconds
    header, (first, second) = result.cells()
    assert header[1:6] == ["xla", "mirage", "attention", "broken", "mirage over xla"]
    assert first[header.index("broken")] == "failed" and second[header.index("attention")] == "-"
    assert f"({label})" in first[header.index("mirage over the best other")]
    assert "gqa_b1, broken: " in result.to_markdown()
    result.write(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["peers"] == ["attention", "broken"]


def test_every_program_of_the_paper_has_a_torch_spelling() -> None:
    for program in programs.suite("mirage") + programs.suite("prefill") + programs.suite("attention"):
        assert peers.TorchPeer().serves(program)
    assert [p.name for p in programs.suite("mirage") if peers.TorchAttention().serves(p)] == [
        f"{name}_b{b}" for b in (1, 8) for name in ("gqa", "mha", "mqa")
    ]


def test_torch_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    program = programs.program("lora_b1", small=True)
    with pytest.raises(UnsupportedError, match="torch is not installed"):
        peers.TorchPeer().result(program, program.draw())


@pytest.mark.parametrize("kind", peers.SPELLINGS)
def test_torch_spellings_say_what_the_programs_say(kind) -> None:
    torch = pytest.importorskip("torch")
    program = next(p for p in programs.suite("all", small=True) if p.kind == kind)
    args = program.draw()
    found = peers.SPELLINGS[kind](torch, *(torch.from_numpy(np.array(a, np.float32)) for a in args))
    error, _ = suite.errors_against(program.in_float64(args), found.numpy())
    assert error < 1e-4


@pytest.mark.parametrize(("name", "dtype"), [("gqa_b1", "float16"), ("causal_bf16_d64", "bfloat16")])
def test_torch_attention_in_its_own_layout(name, dtype, monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(peers, "_torch", lambda: torch)  # its CPU will do
    program = programs.program(name, small=True)
    args = program.draw()
    found = peers.TorchAttention().result(program, args)
    error, _ = suite.errors_against(program.in_float64(args), found)
    assert found.shape == args[0].shape and error < 3e-2


@pytest.mark.gpu
@pytest.mark.parametrize("label", ["torch.compile", "torch sdpa", "cudnn"])
def test_peers_on_a_gpu(label) -> None:
    if label != "cudnn":
        pytest.importorskip("torch")
    program, peer = programs.program("gqa_b1"), peers.PEERS[label]
    args = program.draw()
    error, _ = suite.errors_against(program.in_float64(args), peer.result(program, args))
    assert error < 2e-2
    call = peer.call(program, [args, program.draw(1)])
    found = timing.time_steps({label: call}, 2, 2)[label]
    assert 1e-6 < found.seconds < 1e-3


# Pictures.

(H200,) = Path(__file__).parents[2].glob("results/h200-mirage-2026-11-24.json")


def test_bars_of_a_stored_table() -> None:
    table = plot.load(H200)
    found = plot.bars(table)
    assert len(found) == 16 and all(b.peer and b.limit for b in found)
    assert plot.geometric_mean([b.speedup for b in found]) == pytest.approx(1.65, abs=0.01)
    table["peers"] = []
    assert all(b.peer is None for b in plot.bars(table))
    table["peers"] = ["slow", "fast", "none"]
    for row in table["rows"]:
        row["results"] |= {"slow": {"seconds": 2.0}, "fast": {"seconds": 1.0}}
    assert {b.peer for b in plot.bars(table)} == {("fast", 1.0)}


@pytest.mark.parametrize("with_peers", [False, True])
def test_a_picture(tmp_path, with_peers) -> None:
    pytest.importorskip("matplotlib")
    table = plot.load(H200)
    if not with_peers:
        table["peers"] = []
    text = plot.draw(table, tmp_path / "t.json").read_text()
    assert text.startswith("<?xml") and "Date" not in text
    for row in table["rows"]:
        assert text.count(f"<!-- {row['program']} -->") == 2
    assert ("<!-- torch.compile -->" in text) == with_peers


def test_what_is_no_table(tmp_path) -> None:
    none = {"program": "p", "limit": None, "results": {"xla": {"seconds": 1.0}}}
    none["results"]["mirage"] = {"seconds": 1.0, "ratio": {"value": 0.0}}  # which has no logarithm
    for text in ("not JSON", "[]", '{"rows": [{}]}', json.dumps({"rows": [none]})):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(UsageError, match=r"is not a table that `bench --json` wrote"):
            plot.load(tmp_path / "t.json")


def test_matplotlib_is_missing(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"mirage-jax\[plot\]"):
        plot.draw(plot.load(H200), tmp_path / "t.json")


# Cold start.


def test_start(tmp_path) -> None:
    result = start.run_start_suite(["abv"], small=True, rounds=1)
    (row,) = result.rows
    for times in (row.call, row.process):
        assert set(times) == {"xla", "mirage"} and min(times.values()) > 0
    assert row.process["xla"] > row.call["xla"] and row.call_ratio.value > 0
    markdown = result.write(tmp_path / "start.json").read_text()
    assert f"| abv | {row.call['xla'] * 1e3:,.0f} |" in markdown and "jax" in markdown


def test_a_process_that_fails() -> None:
    with pytest.raises(UsageError, match=r"abv, mirage: the process ended with code 1: .*no stored decision"):
        start._sample("mirage", "abv", True, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})


def test_an_interrupt_keeps_the_rows_of_the_sentinel_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(name: str, rounds: int) -> Iterator[sentinel_suite.SentinelRow]:
        yield sentinel_suite.SentinelRow(name, "0, tuned", 1e-6, 2e-6, 3e-6)
        raise KeyboardInterrupt

    monkeypatch.setattr(sentinel_suite, "_rows", rows)
    found = sentinel_suite.run_sentinel_suite(("causal_64", "causal_128"))
    assert "interrupted after 1 rows" in found.to_markdown() and [r.program for r in found.rows] == ["causal_64"]
