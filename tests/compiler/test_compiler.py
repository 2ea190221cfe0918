"""Decisions: made once, kept, proved again when read, and never in the way of the program, whatever fails."""

import gc
import logging
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import N, assert_same, chain, flops, measured, operands, processor_time

import mirage_jax
from mirage_jax import cache as caches
from mirage_jax import progress, timing
from mirage_jax.cache import Cache, CacheKey, Entry, encode
from mirage_jax.compiler import decide, stored, threads
from mirage_jax.compiler import tuning_session as attempts
from mirage_jax.compiler.float_check import Accuracy
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options
from mirage_jax.errors import GraphError, LoweringError, UnsupportedError, UsageError, VerificationError
from mirage_jax.gc_pause import no_collection
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.mugraph.graph import KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json
from mirage_jax.report import Decision, RegionReport
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.verify.equivalence import certificate as certificates
from mirage_jax.verify.exact import exact_check
from mirage_jax.why_not import Reason

ARGS = operands()
CHEAP = 4 * N * N  # two products of a matrix and a vector; the product of the matrices is 2 * N ** 3


@pytest.fixture(autouse=True)
def _wins(monkeypatch):
    """Every candidate is faster, however small the program."""
    with measured(2.0) as calls:
        yield calls
        monkeypatch.undo()  # what a test has put on top is taken away first


def decided(f, *args):
    (region,) = f.explain(*(args or ARGS)).regions
    return region.decision


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# What wins.


def test_the_big_product_is_gone() -> None:
    f = mirage_jax.optimize(chain)
    assert flops(jax.jit(chain), *ARGS) > 2 * N**3
    assert flops(f, *ARGS) <= 1.1 * CHEAP
    assert f"tensor<{N}x{N}xf32>) -> tensor<{N}x{N}xf32>" not in f.lower(*ARGS).as_text()
    assert_same(f(*ARGS), chain(*ARGS))


def test_with_the_clock() -> None:
    """The margin is wide enough for any machine."""
    args = operands(448)
    with pytest.MonkeyPatch.context() as patch, processor_time():
        patch.setattr(timing, "time_wall", REAL_TIME_WALL)
        f = mirage_jax.optimize(chain)
        d = decided(f, *args)
    assert d.winner is not None and d.speedup > 1.03
    assert_same(f(*args), chain(*args))


REAL_TIME_WALL = timing.time_wall


def test_linear_attention() -> None:
    def attention(q, k, v):
        return (q @ k.T) @ v

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 64, 8)), jnp.float32) for _ in range(3))
    f = mirage_jax.optimize(jax.vmap(attention))
    assert flops(f, q, k, v) < flops(jax.jit(jax.vmap(attention)), q, k, v) / 2
    assert_same(f(q, k, v), jax.vmap(attention)(q, k, v))


def test_what_is_not_faster_stays() -> None:
    with measured(1.02):
        f = mirage_jax.optimize(chain)
        d = decided(f)
    assert d.winner is None
    assert "XLA is as fast" in d.why and "1.02x" in d.why
    assert flops(f, *ARGS) > 2 * N**3
    again = decided(mirage_jax.optimize(chain))
    assert (again.winner, again.source, again.why) == (None, "cache", d.why)


def test_no_candidate_compiles(monkeypatch) -> None:
    def broken(self, winner):
        def run(*values):
            raise RuntimeError("does not compile")

        return run

    monkeypatch.setattr(attempts.TuningSession, "ours", broken)
    d = decided(mirage_jax.optimize(chain, strict=True))
    assert d.winner is None
    assert "no candidate could be compiled" in d.why and "does not compile" in d.why
    assert d.tried["not compiled"] >= 1


def test_heuristic_is_not_measured(_wins) -> None:
    f = mirage_jax.optimize(chain, on_miss="heuristic")
    d = decided(f)
    assert d.winner is not None and d.certificate is not None and "not measured" in d.why
    assert not _wins and not d.timings
    assert flops(f, *ARGS) <= 1.1 * CHEAP
    assert decided(mirage_jax.optimize(chain, on_miss="fallback")).winner is None  # it was not stored


def test_candidates_that_are_not_measured_are_tried_for_the_budget() -> None:
    """The first one may take long. A large region has some 20 more."""
    assert list(decide._in_time([1, 2, 3, 4], 1e-9)) == [1, 2]
    assert list(decide._in_time([1, 2, 3, 4], 60)) == [1, 2, 3, 4]


def test_fallback_and_error() -> None:
    f = mirage_jax.optimize(chain, on_miss="fallback")
    assert "on_miss='fallback'" in decided(f).why
    assert_same(f(*ARGS), chain(*ARGS), 0)
    g = mirage_jax.optimize(chain, on_miss="error")
    for use in (g, g.lower, g.explain):
        with pytest.raises(UsageError, match=r"no stored decision .*never decided before"):
            use(*ARGS)
    mirage_jax.tune(g, *ARGS)
    assert flops(g, *ARGS) <= 1.1 * CHEAP


def test_devices_that_measure() -> None:
    a, b = (SimpleNamespace(device_kind=kind) for kind in ("NVIDIA H200", "NVIDIA A100"))
    assert decide.chosen_devices([a, b], ()) == [a] and decide.chosen_devices([a, b, a], (2, 0)) == [a, a]
    with pytest.raises(UsageError, match="found NVIDIA A100, NVIDIA H200; allowed are devices of one kind"):
        decide.chosen_devices([a, b], (0, 1))
    with pytest.raises(UsageError, match=f"devices: found 99; there are {jax.local_device_count()} of this platform"):
        mirage_jax.optimize(chain, devices=(99,))(*ARGS)


def test_a_variable_that_names_devices_stops_no_program(monkeypatch, caplog) -> None:
    monkeypatch.setenv("MIRAGE_JAX_DEVICES", "99")
    assert decided(mirage_jax.optimize(chain)).winner is not None
    assert [w for w in warnings(caplog) if w.startswith("MIRAGE_JAX_DEVICES is ignored: devices: found 99")]


# The cache.


def entry_of(f, *args):
    """The compiler's cache, the key of the only region, its entry and its file."""
    key = None
    lookup = Cache.lookup

    def spy(self, wanted):
        nonlocal key
        key = wanted
        return lookup(self, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "lookup", spy)
        patch.setattr(f.compiler, "decisions", {})
        f.explain(*(args or ARGS))
    assert key is not None
    cache = f.compiler.cache
    return key, cache.get(key), cache.path(key)


def test_the_second_process_reads(tmp_path, monkeypatch) -> None:
    one = mirage_jax.optimize(chain, cache_dir=str(tmp_path / "c"))
    first = decided(one)
    assert first.source == "search"
    two = mirage_jax.optimize(chain, cache_dir=str(tmp_path / "c"), on_miss="error")
    monkeypatch.setattr(attempts, "search", None)
    second = decided(two)
    assert (second.source, second.key, second.why) == ("cache", first.key, first.why)
    assert second.winner == first.winner
    assert second.timings == first.timings
    assert second.certificate.bound <= 1e-12
    assert second.certificate != first.certificate, "proved again, with new primes and points"
    assert flops(two, *ARGS) <= 1.1 * CHEAP
    assert_same(two(*ARGS), chain(*ARGS))


def test_what_misses(tmp_path) -> None:
    make = lambda **k: mirage_jax.optimize(chain, cache_dir=str(tmp_path), **k)  # noqa: E731
    seen = {decided(make()).key}
    others = {
        "shape": lambda: decided(make(on_miss="fallback"), *operands(N + 1)),
        "dtype": lambda: decided(make(on_miss="fallback"), *operands(dtype="bfloat16")),
        "backend": lambda: decided(make(on_miss="fallback", backend="jax")),
    }
    for name, ask in others.items():
        d = ask()
        assert (d.source, d.winner) == ("policy", None), name
        seen.add(d.key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
        seen.add(decided(make(on_miss="fallback")).key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "versions", lambda: (("jax", "99"),))
        seen.add(decided(make(on_miss="fallback")).key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "POLICY", "stricter")
        seen.add(decided(make(on_miss="fallback")).key)
    assert len(seen) == 7
    assert decided(make(on_miss="fallback")).source == "cache"


def garbage(key: CacheKey, entry: Entry) -> bytes:
    return b"garbage"


def torn(key: CacheKey, entry: Entry) -> bytes:
    return encode(key, entry)[:-100]


def of_another_key(key: CacheKey, entry: Entry) -> bytes:
    return encode(replace(key, device_kind="abacus"), entry)


def wrong_graph(key: CacheKey, entry: Entry) -> bytes:
    """Well formed, and sealed by somebody who can: only a proof can tell."""
    return encode(key, replace(entry, graph=entry.graph.replace("dot{axes=(k)} x1[j,k]", "dot{axes=(j)} x1[k,j]")))


def scaled_graph(key: CacheKey, entry: Entry) -> bytes:
    lines = entry.graph.splitlines()
    at, line = next((n, text) for n, text in enumerate(lines) if " t1: " in text)
    lines[at : at + 1] = [line.replace(" t1: ", " t9: "), "  library t1: f32[i] = add{ca=1/2, cb=1/3} t9[i] t9[i]"]
    return encode(key, replace(entry, graph="\n".join(lines)))


def other_outputs(key: CacheKey, entry: Entry) -> bytes:
    return encode(key, replace(entry, graph=entry.graph.replace("output t1", "output m0")))


def no_graph_at_all(key: CacheKey, entry: Entry) -> bytes:
    return encode(key, replace(entry, graph="mugraph { nonsense }"))


def other_extents(key: CacheKey, entry: Entry) -> bytes:
    return encode(key, replace(entry, graph=entry.graph.replace(f"i={N}", f"i={N + 1}")))


def no_reasons(key: CacheKey, entry: Entry) -> bytes:
    return encode(key, replace(entry, reasons=()))


def no_schedule(key: CacheKey, entry: Entry) -> bytes:
    return encode(key, replace(entry, schedule={"kernels": 7}))


def short_schedule(key: CacheKey, entry: Entry) -> bytes:
    return encode(key, replace(entry, schedule={"kernels": [], "parts": []}))


def unknown_family(key: CacheKey, entry: Entry) -> bytes:
    return encode(key, replace(entry, reasons=(*entry.reasons[:2], "oracle", "")))


BAD_ENTRIES = [
    garbage,
    torn,
    of_another_key,
    wrong_graph,
    scaled_graph,
    other_outputs,
    no_graph_at_all,
    other_extents,
    no_reasons,
    no_schedule,
    short_schedule,
    unknown_family,
]


@pytest.mark.parametrize("spoil", BAD_ENTRIES)
def test_bad_entry_is_a_miss(spoil, tmp_path, caplog) -> None:
    options = {"cache_dir": str(tmp_path)}
    key, entry, path = entry_of(mirage_jax.optimize(chain, **options))
    bad = spoil(key, entry)
    assert bad != encode(key, entry)
    path.write_bytes(bad)
    f = mirage_jax.optimize(chain, on_miss="fallback", **options)
    d = decided(f)
    assert d.winner is None and "not usable" in d.why
    (line,) = warnings(caplog)
    assert line.startswith("cache entry") and "\n" not in line
    assert_same(f(*ARGS), chain(*ARGS), 0)

    caplog.clear()
    path.write_bytes(bad)
    g = mirage_jax.optimize(chain, strict=True, **options)  # strict is about the optimizer's own failures
    assert decided(g).source == "search"
    assert len(warnings(caplog)) == 1
    assert flops(g, *ARGS) <= 1.1 * CHEAP
    assert decided(mirage_jax.optimize(chain, **options)).source == "cache"


# Failures.

BREAK = {
    "search": (attempts, "search"),
    "fingerprint": (certificates, "Fingerprint"),
    "certify": (certificates, "certify"),
    "gate": (attempts.TuningSession, "gate"),
    "timing": (timing, "time_wall"),
    "cache lookup": (Cache, "lookup"),
    "cache put": (Cache, "put"),
    "cache key": (CacheKey, "here"),
    "kernel text": (Winner, "readable"),
}


def fail(*args, **kwargs):
    raise RuntimeError("out of\nluck")


@pytest.mark.parametrize("stage", BREAK)
def test_failure(stage, monkeypatch, caplog) -> None:
    monkeypatch.setattr(*BREAK[stage], property(fail) if stage == "kernel text" else fail)
    f = mirage_jax.optimize(chain)
    assert_same(f(*ARGS), chain(*ARGS), 0)
    assert_same(f(*ARGS), chain(*ARGS), 0)
    d = decided(f)
    assert d.winner is None and "RuntimeError: out of" in d.why
    (line,) = warnings(caplog)
    assert line.endswith("RuntimeError: out of") and "deciding.py:" in line
    assert "RuntimeError: out of" in str(f.explain(*ARGS))

    g = mirage_jax.optimize(chain, strict=True)
    for use in (g, g.explain, g.lower):
        with pytest.raises(RuntimeError, match="out of\nluck"):
            use(*ARGS)


def test_too_little_memory_is_no_bug(monkeypatch) -> None:
    def full(*args: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8.00GiB")

    monkeypatch.setattr(Accuracy, "gate", full)
    why = decided(mirage_jax.optimize(chain)).why_not
    assert why.reason is Reason.NO_ROOM and "8.00GiB" in str(why) and "a bug" not in why.advice


def test_refusals_are_no_failures(monkeypatch, caplog) -> None:
    """A candidate that the checks refuse is counted; nothing is raised or logged as a warning, even if strict."""

    def refuse(*args, **kwargs):
        raise VerificationError("not the same")

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "certify", refuse)
        d = decided(mirage_jax.optimize(chain, strict=True))
    assert d.winner is None and d.tried["refused by the certificate"] >= 1
    with monkeypatch.context() as patch:
        patch.setattr(attempts.TuningSession, "gate", lambda self, winner, only: (False, "large: 9 times XLA's error"))
        d = decided(mirage_jax.optimize(chain, strict=True), *operands(N - 1))
    assert d.winner is None and d.tried["refused by the float gate"] >= 1
    assert "9 times" in d.gate
    assert not warnings(caplog)


KERNEL = """mugraph {
  extents i=64 j=96 k=128
  input x: f16[i,k]
  input w: f16[k,j]
  kernel k0 grid(i,j) loop(k) {
    %x = load x[i,k]
    %w = load w[k,j]
    %d[i,j] = dot{axes=(k)} %x %w
    %y[i,j] = acc %d
    store y: f16[i,j] = %y
  }
  output y
}"""


@pytest.mark.filterwarnings("error:overflow")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("factor", [91712, 3.3, -1e30])
def test_factors_are_those_of_the_product_not_of_an_input_of_16_bits(dtype: str, factor: float) -> None:
    """Neither float16 nor bfloat16 holds these."""
    scale = Fraction(factor).limit_denominator()
    lines = ("extents i=3", f"input x: {dtype}[i]", f"library y: f32[i] = affine{{scale={scale}}} x[i]", "output y")
    graph = "\n".join(("mugraph {", *lines, "}"))
    schedule = schedule_to_json(Schedule((KernelSchedule(()),)))
    winner = Winner.from_json(
        {"graph": graph, "schedule": schedule, "family": "algebra", "views": {}, "in_float32": False}, "cpu"
    )
    x = jnp.asarray([1, -0.5, 1 / 64], {"f16": "float16", "bf16": "bfloat16"}[dtype])
    (y,) = winner.portable(x)
    np.testing.assert_allclose(y, factor * np.asarray(x, np.float64), rtol=1e-6)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_kernel_is_refused(wrong: bool, monkeypatch, caplog) -> None:
    """By the exact check of its text, before the float gate, and with a warning: it is an error of ours."""
    pytest.importorskip("triton")
    g = parse(KERNEL)
    region: Any = SimpleNamespace(in_float32=False)
    attempt = attempts.TuningSession(region, "cuda", jax.devices()[0], Options())
    attempt.reference = g
    winner = Winner(g, Schedule((KernelSchedule((("i", 16), ("j", 32), ("k", 32))),)), (), (), "kernels", "cuda")
    monkeypatch.setattr(attempts.TuningSession, "gate", lambda self, winner, only: (True, "not the matter here"))
    if wrong:
        emit = exact_check.emit

        def skip_a_step(*args):
            source = emit(*args)
            return replace(source, text=source.text.replace("in range(0,", "in range(32,"))

        monkeypatch.setattr(exact_check, "emit", skip_a_step)
    d = decide.Decider(Options()).accepted(attempt, Decision(None, "", "search", "cuda"), [winner])
    if wrong:
        assert d.winner is None and attempt.tried["refused by the exact check"] == 1 and not d.gate
        assert "elements of y differ from the graph's" in d.exact and warnings(caplog)
        assert d.why_not.reason is Reason.REFUSED and "(refused by the exact check 1)" in d.why
    else:
        assert d.winner is winner and "bit for bit" in d.exact and d.exact in str(RegionReport((), "", d))


def test_a_kernel_without_text_is_one_candidate_less(monkeypatch, caplog) -> None:
    """Where nothing is measured, the gate is the first that compiles a candidate."""

    def cannot(self, winner, only):
        raise UnsupportedError("4 tile axes; at most 3 are emitted")

    monkeypatch.setattr(attempts.TuningSession, "gate", cannot)
    d = decided(mirage_jax.optimize(chain, on_miss="heuristic", strict=True))
    assert d.winner is None and d.tried["not compiled"] >= 1 and not warnings(caplog)


def test_a_region_that_cannot_be_searched_is_no_failure(monkeypatch, caplog) -> None:
    def unsupported(*args, **kwargs):
        raise UnsupportedError("output t5 is the same all along k")

    monkeypatch.setattr(attempts, "search", unsupported)
    d = decided(mirage_jax.optimize(chain, strict=True))
    assert d.winner is None and "the same all along k" in d.why
    assert decided(mirage_jax.optimize(chain)).source == "cache"
    assert not warnings(caplog)


@pytest.mark.skipif(sys.platform == "win32", reason="modes are another matter there")
def test_unwritable_cache(tmp_path, caplog) -> None:
    caches._complained.clear()
    tmp_path.chmod(0o777)  # anybody could write there: not trusted, not used
    f = mirage_jax.optimize(chain, cache_dir=str(tmp_path), strict=True)
    assert decided(f).winner is not None
    assert_same(f(*ARGS), chain(*ARGS))
    assert warnings(caplog) and all("chmod" in line for line in warnings(caplog))


def test_threads_share_a_decision(monkeypatch) -> None:
    searches = []
    search = attempts.search

    def counted(*args, **kwargs):
        searches.append(threading.get_ident())
        time.sleep(0.05)
        return search(*args, **kwargs)

    monkeypatch.setattr(attempts, "search", counted)
    f = mirage_jax.optimize(chain)
    together = threading.Barrier(8)

    def call(_):
        together.wait()
        return f(*ARGS)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    assert len(searches) == 1
    for y in results:
        assert_same(y, chain(*ARGS))


@pytest.mark.parametrize("where", ["the search", "the caller"])
def test_interrupt(where, monkeypatch) -> None:
    began, running = threading.Event(), threading.active_count()

    def search(*args, **kwargs):
        if where == "the search":
            raise KeyboardInterrupt
        began.set()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)
        raise AssertionError("not interrupted")

    def interrupted(*args):
        assert began.wait(30)
        raise KeyboardInterrupt

    f = mirage_jax.optimize(chain)
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "search", search)
        if where == "the caller":
            patch.setattr(threads, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f(*ARGS)
    assert threading.active_count() == running
    assert decided(f).winner is not None
    assert flops(f, *ARGS) <= 1.1 * CHEAP
    assert_same(f(*ARGS), chain(*ARGS))


def test_an_interrupt_does_not_wait_for_a_compiler(monkeypatch) -> None:
    """What is inside of XLA hears nothing. Whoever is interrupted goes on, and what comes out in the end is dropped."""
    began, over = threading.Event(), threading.Event()

    def compile(*args, **kwargs):
        began.set()
        over.wait()  # like C++, without a look at what happens in Python
        return ()

    f = mirage_jax.optimize(chain)
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "search", compile)
        patch.setattr(threads, "wait", lambda *_: began.wait(30) and signal.raise_signal(signal.SIGINT))
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            f(*ARGS)
        assert time.monotonic() - start < 1 + threads.TIDY_SECONDS
    over.set()
    assert decided(f).winner is not None
    assert_same(f(*ARGS), chain(*ARGS))


def test_schedules_round_trip() -> None:
    s = Schedule((KernelSchedule((("i", 16),), 4, 2),), (("k", 8),))
    assert schedule_from_json(schedule_to_json(s)) == s
    for bad in (None, {}, {"kernels": [{}], "parts": []}, {"kernels": [], "parts": [["k", 0]]}, [1]):
        with pytest.raises(GraphError):
            schedule_from_json(bad)


def test_under_debugging_modes() -> None:
    """Settings for finding bugs in user programs find none in the optimizer's own work."""
    with (
        jax.debug_nans(True),
        jax.debug_infs(True),
        jax.enable_checks(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.checking_leaks(),
    ):
        f = mirage_jax.optimize(chain, strict=True)
        assert decided(f).winner is not None
        assert_same(f(*ARGS), chain(*ARGS))
    jax.config.update("jax_debug_nans", True)
    try:
        assert decided(mirage_jax.optimize(chain, strict=True), *operands(N + 2)).winner is not None
    finally:
        jax.config.update("jax_debug_nans", False)


def test_a_wrong_translation_is_refused(monkeypatch, _wins) -> None:
    """A rule that reads `sub` as `add` deceives the certificate, which compares muGraphs, but not the float gate."""
    monkeypatch.setitem(rules.RULES, "sub", rules.RULES["add"])

    def fn(a, b, v):
        return ((a - b) @ b) @ v

    d = decided(mirage_jax.optimize(fn, strict=True))
    assert d.winner is None and "differs from the user's" in d.gate


@pytest.mark.parametrize("written", ["bfloat16", "float32"])
def test_a_rounding_that_the_program_does_not_ask_for_is_refused(written: str) -> None:
    """Rows of one and the same number: all of a sum's terms are rounded the same way."""

    def fn(x, w):
        return jnp.dot((x * x).astype(written), w.astype(written), preferred_element_type="float32").sum(0)

    x, w = jnp.ones((8, 512)), jnp.ones((512, 8))
    (region,) = analyse(jax.make_jaxpr(fn)(x, w)).regions
    attempt = attempts.TuningSession(region, "cpu", jax.devices()[0], Options())
    own = attempt.reference
    sizes = " ".join(f"{a}={n}" for a, n in own.sizes.items())
    (i, j), (_, k) = own.inputs[0].axes, own.inputs[1].axes
    g = parse(f"""
    mugraph {{
      extents {sizes}
      input x0: f32[{i},{j}]
      input x1: f32[{j},{k}]
      library m0: bf16[{i},{j}] = mul x0[{i},{j}] x0[{i},{j}]
      library m1: f32[{i},{k}] = dot{{axes=({j})}} m0[{i},{j}] x1[{j},{k}]
      library {own.outputs[0]}: f32[{k}] = sum{{axes=({i})}} m1[{i},{k}]
      output {own.outputs[0]}
    }}
    """)
    winner = attempt.winner(g, Schedule((KernelSchedule(),) * 3), "algebra")
    passed, why = attempt.gate(winner, ["constant rows"])
    assert passed == (written == "bfloat16"), why


@pytest.mark.parametrize("stored", ["f32", "f16"])
def test_overflow_where_xla_has_none_is_refused(stored: str) -> None:
    """float16 holds (x @ w) / 64, but not x @ w: a candidate that stores the latter narrow has a shorter range."""

    def fn(x, w):
        return (x / 64) @ w

    x, w = jnp.ones((8, 32), "float16"), jnp.ones((32, 8), "float16")
    (region,) = analyse(jax.make_jaxpr(fn)(x, w)).regions
    attempt = attempts.TuningSession(region, "cpu", jax.devices()[0], Options())
    own = attempt.reference
    i, j, k = own.inputs[0].axes[0], own.inputs[0].axes[1], own.inputs[1].axes[1]
    sizes = " ".join(f"{a}={n}" for a, n in own.sizes.items())
    g = parse(f"""
    mugraph {{
      extents {sizes}
      input x0: f16[{i},{j}]
      input x1: f16[{j},{k}]
      library m0: {stored}[{i},{k}] = dot{{axes=({j})}} x0[{i},{j}] x1[{j},{k}]
      library {own.outputs[0]}: f16[{i},{k}] = affine{{scale=1/64}} m0[{i},{k}]
      output {own.outputs[0]}
    }}
    """)
    passed, why = attempt.gate(attempt.winner(g, Schedule((KernelSchedule(),) * 2), "algebra"))
    assert passed == (stored == "f32") and (passed or "overflow" in why or "non-finite" in why)


@pytest.mark.parametrize("long", [0.0, 1e9])
def test_a_known_structure_is_not_searched_again(monkeypatch, tmp_path, long: float) -> None:
    """On a GPU, kernels that a long search found at one size are tiled for another; the report says so. (The device is
    made up.)
    """
    monkeypatch.setattr(attempts, "device_for", lambda kind: DEVICES["H200"])
    monkeypatch.setattr(attempts, "MIN_REMEMBERED_SEARCH_SECONDS", long)
    families = []
    search = attempts.search

    def recorded(*args):
        families.append(args[5])
        return search(*args)

    monkeypatch.setattr(attempts, "search", recorded)
    cache = Cache(tmp_path / "cache")
    texts = []
    for n in (256, 512):
        args = jnp.zeros((16, n)), jnp.zeros((n, 128))
        (region,) = analyse(jax.make_jaxpr(lambda x, w: jax.nn.silu(x @ w))(*args)).regions
        attempt = attempts.TuningSession(region, "cuda", jax.devices()[0], Options(cache_dir=str(tmp_path / "cache")))
        key = CacheKey.here(
            graph=attempt.text,
            extents=attempt.reference.sizes,
            backend="auto",
            policy="",
            device=attempt.device,
        )
        candidates, text = attempt.candidates(cache, key, progress.silent)
        texts.append(text)
        assert any(c.family == "kernels" for c in attempt.verified(candidates))
    again = ("algebra", "kernels") if long else ("algebra",)
    assert families == [("algebra", "kernels"), again]
    assert ["structures known from other sizes" in text for text in texts] == [False, not long]


# What is no answer is not stored.


@pytest.mark.parametrize("budget", ["30s", "30s/1m"])
def test_an_interrupted_search_is_no_answer(budget: str, monkeypatch) -> None:
    """Nothing is kept of it: neither by this function, nor on disk."""

    def interrupted(self):
        raise KeyboardInterrupt

    f = mirage_jax.optimize(chain, budget=budget)
    with monkeypatch.context() as patch:
        patch.setattr(Search, "_algebra", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f(*ARGS)
    for again in (f, mirage_jax.optimize(chain, budget=budget)):
        assert decided(again).winner is not None


def test_what_the_models_choice_lacks_is_no_answer(monkeypatch) -> None:
    """Unmeasured kernels are tried as they are written first, measured ones also more precisely."""
    with monkeypatch.context() as patch:
        patch.setattr(attempts.TuningSession, "gate", lambda *_: (False, "normal: max error"))
        assert decided(mirage_jax.optimize(chain, on_miss="heuristic")).winner is None
    assert decided(mirage_jax.optimize(chain)).winner is not None


def test_a_text_that_cannot_be_checked_is_refused(monkeypatch) -> None:
    """Our own emitter fails at small sizes; where the interpreter does, or cannot say, the float gate decides alone."""
    found = []
    winner = SimpleNamespace(has_kernels=True, graph=None, schedule=None, options=None)
    for error in (LoweringError("no"), UnsupportedError("no"), RuntimeError("no")):
        monkeypatch.setattr(exact_check, "exact_check", mock.Mock(side_effect=error))
        found.append(exact_check.ExactGate().check(winner).passed)
    assert found == [False, True, True]


def test_settings_of_a_thread_are_those_of_its_helpers() -> None:
    with jax.enable_x64(True), ThreadPoolExecutor(1) as pool:
        assert list(pool.map(threads.as_here(lambda x: jnp.asarray(x).dtype), [1.0])) == [jnp.float64]


def test_the_collector_is_left_as_it_was() -> None:
    """Also where one thread leaves while another one is inside."""
    first, second = no_collection(), no_collection()
    assert gc.isenabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
