"""`optimize`, `tune`, `explain` and `disabled`: like `jax.jit` in everything but speed."""

import copy
import dataclasses
import functools
import inspect
import io
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import N, assert_same, chain, flops, instructions, measured, operands

import mirage_jax
from mirage_jax import UsageError, api
from mirage_jax.compiler import Compiler
from mirage_jax.compiler.tuning_session import TuningSession, times_of_xla
from mirage_jax.compiler.whole_function import MAX_TUNING_FRACTION
from mirage_jax.config import JIT_OPTIONS, Options
from mirage_jax.jaxpr_frontend.jax_compat import LoweringTarget
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.report import Decision

ARGS = A, B, V = operands()
SMALL = operands(12)
CHEAP = 1.1 * 4 * N * N
quick = functools.partial(mirage_jax.optimize, on_miss="fallback")


def is_replaced(f, *args) -> bool:
    return flops(f, *(args or ARGS)) <= CHEAP


# Using it.


def test_bare_and_factory() -> None:
    @mirage_jax.optimize
    def bare(a, b, v):
        """Doc."""
        return chain(a, b, v)

    @mirage_jax.optimize()
    def empty(a, b, v):
        return chain(a, b, v)

    @mirage_jax.optimize(budget="10s", on_miss="search", backend="jax", strict=True)
    def options(a, b, v):
        return chain(a, b, v)

    with measured(2.0):
        for f in (bare, empty, options, mirage_jax.optimize(lambda a, b, v: chain(a, b, v))):
            assert isinstance(f, mirage_jax.Optimized)
            assert is_replaced(f)
            assert_same(f(*ARGS), chain(*ARGS))
    assert (bare.__name__, bare.__doc__, bare.__module__) == ("bare", "Doc.", __name__)
    assert list(inspect.signature(bare).parameters) == ["a", "b", "v"]
    assert repr(bare) == "mirage_jax.optimize(test_bare_and_factory.<locals>.bare)"
    assert options.options.budget == mirage_jax.Budget(10) and options.options.strict
    assert mirage_jax.optimize(bare) is bare


def test_the_signature_lists_the_options() -> None:
    parameters = inspect.signature(mirage_jax.optimize).parameters
    named = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert named == [f.name for f in dataclasses.fields(Options)]
    assert [*api.Keywords.__annotations__] == [*named, *JIT_OPTIONS]


def test_mirrors_jit() -> None:
    f, j = quick(chain), jax.jit(chain)
    assert f.lower(*SMALL).compile()(*SMALL).shape == (12,)
    assert f.trace(*SMALL).jaxpr.out_avals == j.trace(*SMALL).jaxpr.out_avals
    assert f.trace(*SMALL).lower().out_info == j.trace(*SMALL).lower().out_info
    assert f.eval_shape(*SMALL) == j.eval_shape(*SMALL)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in SMALL]
    assert f.lower(*shapes).as_text() == f.lower(*SMALL).as_text()
    assert_same(f(a=SMALL[0], v=SMALL[2], b=SMALL[1]), chain(*SMALL))
    f.clear_cache()
    assert_same(f(*SMALL), chain(*SMALL))


def test_traces_once() -> None:
    count = 0

    @quick
    def f(x):
        nonlocal count
        count += 1
        return x @ x

    for _ in range(3):
        f(SMALL[0])
    seen = count
    for _ in range(3):
        f(SMALL[0] + 1)
    assert count == seen <= 1


def test_static_arguments() -> None:
    def f(x, n, *, mode="sum", flag=None):
        assert isinstance(n, int) and isinstance(mode, str)
        return getattr(jnp, mode)(x @ x, axis=n)

    names = ["n", "mode", "flag"]
    for options in ({"static_argnums": 1, "static_argnames": names}, {"static_argnames": names}):
        g, j = quick(f, **options), jax.jit(f, **options)
        x = SMALL[0]
        assert_same(g(x, 1), j(x, 1))
        assert_same(g(x, n=0, mode="max", flag=object), j(x, n=0, mode="max", flag=object))
        assert g.explain(x, 1, mode="max").regions
        for call in (g, j):
            with pytest.raises(ValueError, match=r"unhashable|Non-hashable"):
                call(x, [1])


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": "x"}])
def test_donation(options) -> None:
    @functools.partial(quick, **options)
    def step(x, g):
        return x - 0.1 * (g @ x)

    x, g = jnp.ones((16, 16)), jnp.eye(16)
    shapes = jax.ShapeDtypeStruct((16, 16), "float32")
    step.explain(x, g)
    step.explain(shapes, shapes)
    assert not x.is_deleted()
    y = step(x, g)
    assert x.is_deleted() and not g.is_deleted()
    np.testing.assert_allclose(y, 0.9 * np.ones((16, 16)), rtol=1e-5)


def test_sharing_an_argument() -> None:
    f = quick(lambda a, b: a @ b + a)
    assert_same(f(A, A), A @ A + A)


def test_kinds_of_callables() -> None:
    class Scale:
        def __init__(self, s):
            self.s = s

        def __call__(self, x):
            return x @ x * self.s

        def method(self, x):
            return x @ x - self.s

        @staticmethod
        def static(x):
            return x @ x

    x, scale = SMALL[0], Scale(3.0)
    methods = scale, scale.method, Scale.static
    for f in (*methods, functools.partial(chain, x, x), lambda x: x @ x, jnp.linalg.norm, jax.jit(jnp.sum)):
        assert_same(quick(f)(x), f(x))
        assert quick(f).explain(x).name
    assert repr(quick(scale)).endswith("Scale)")
    recursive = quick(lambda x, n: x if n == 0 else recursive(x @ x / 9, n - 1), static_argnums=1)
    assert_same(recursive(x, 2), ((x @ x / 9) @ (x @ x / 9)) / 9)


def test_methods() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: jax.Array

        @quick
        def __call__(self, x):
            return x @ self.w

        @mirage_jax.optimize(on_miss="fallback", static_argnames="n")
        def power(self, x, n):
            """Docs."""
            return x @ jnp.linalg.matrix_power(self.w, n)

    x, layer = SMALL[0], Layer(SMALL[1])
    assert_same(layer(x), x @ layer.w)
    assert_same(layer.power(x, n=2), x @ layer.w @ layer.w)
    assert_same(jax.vmap(layer.__call__)(x), x @ layer.w)
    assert "1 region" in str(layer.power.explain(x, n=1))
    assert layer.power.lower(x, n=1).as_text() and layer.power.trace(x, n=1) and layer.power.eval_shape(x, n=1)
    assert layer.power == layer.power and hash(layer.power) == hash(layer.power)
    assert layer.power != layer.__call__
    assert list(inspect.signature(layer.power).parameters) == ["x", "n"]
    assert layer.power.__doc__ == "Docs."
    assert isinstance(Layer.power, mirage_jax.Optimized)
    assert mirage_jax.tune(layer.power, x, n=1).regions
    assert_same(jax.jit(layer.power, static_argnames="n")(x, n=1), x @ layer.w)


def test_flax() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.linear = nnx.RMSNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def plain(self, x):
            return x + self.linear(self.norm(x))

        @quick
        def __call__(self, x):
            return self.plain(x)

    block, x = Block(nnx.Rngs(0)), jnp.ones((4, 8))
    want = block.plain(x)
    assert_same(block(x), want)
    assert_same(quick(block.plain)(x), want)
    assert_same(quick(Block.plain)(block, x), want)
    linear = quick(block.linear)
    assert_same(linear(x), block.linear(x))
    assert linear.explain(x).name == "Linear"
    text = str(block.__call__.explain(x))
    assert "flax/nnx/nn/linear.py:" in text and "site-packages" not in text
    have = nnx.grad(lambda m, x: m(x).sum())(block, x)
    want = nnx.grad(lambda m, x: m.plain(x).sum())(block, x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), nnx.to_pure_dict(have), nnx.to_pure_dict(want)
    )


def test_linen() -> None:
    linen = pytest.importorskip("flax.linen")
    model, x = linen.Dense(8), jnp.ones((4, 8))
    params = model.init(jax.random.key(0), x)
    assert_same(quick(model.apply)(params, x), model.apply(params, x))


# Explaining and tuning.


def test_explain() -> None:
    f = mirage_jax.optimize(chain)
    with measured(2.0):
        report = f.explain(*ARGS)
    (region,) = report.optimized
    d, text = region.decision, str(report)
    kernels = Path(d.kernels)
    for piece in (
        "chain: 1 region, 1 optimized",
        "optimized: 2.00x [2.00, 2.00] over XLA [search]",
        f"deciding.py:{inspect.getsourcelines(chain)[1] + 2} (chain)",
        f"before: {d.before}",
        f"after:  {d.after}",
        "measured: xla 2,000,000.0 us, mirage 1,000,000.0 us",
        "certificate: certified: ",
        "wrong with probability <= ",
        f"float gate: {d.gate}",
        f"cache key: {d.key}",
        f"kernels to read: {kernels}",
        "search: exhausted the space",
        "the program:\n",
        "runs as:\n",
        str(d.winner.graph).splitlines()[-2],
    ):
        assert piece in text, piece
    assert d.before.flops == pytest.approx(2 * N**3 + 2 * N**2) and d.after.flops == pytest.approx(4 * N**2)
    assert 0 < d.certificate.bound <= 1e-12
    assert kernels.is_relative_to(os.environ["MIRAGE_JAX_CACHE_DIR"]) and kernels.stem == d.key
    source = kernels.read_text()
    compile(source, str(kernels), "exec")
    assert str(d.winner.graph).splitlines()[0] in source

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARGS]
    assert str(f.explain(*shapes)) == text
    again = str(mirage_jax.optimize(chain).explain(*shapes))
    assert "[cache]" in again and d.key in again and str(kernels) in again and "2,000,000.0 us" in again


def test_explain_runs_nothing() -> None:
    def f(x):
        jax.debug.callback(lambda: pytest.fail("was run"))
        return x @ x

    quick(f).explain(SMALL[0])


def test_tune() -> None:
    f = quick(chain)
    f(*ARGS)
    assert not is_replaced(f)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARGS]
    with measured(2.0):
        assert mirage_jax.tune(f, *shapes).optimized
        report = mirage_jax.tune(lambda a, b, *, v: chain(a, b, v), *shapes[:2], v=shapes[2])
    assert report.regions[0].decision.source == "cache"  # the same program, found on disk
    assert is_replaced(f)
    assert is_replaced(quick(chain))
    assert_same(f(*ARGS), chain(*ARGS))
    with pytest.raises(UsageError, match="found 3"):
        mirage_jax.tune(3, *shapes)


def test_time_for_all_regions_goes_where_most_may_be_saved() -> None:
    """Two regions with a border between them; the second of them has the larger product."""

    def both(a: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
        first = jnp.sort(chain(a[:64, :64], b[:64, :64], v[:64]))
        return chain(a, b, v) + first.sum()

    f = mirage_jax.optimize(both, budget=mirage_jax.Budget(5, total=1e-9))
    with measured(2.0):
        compiled = f.lower(*ARGS).compile()
        regions = f.explain(*ARGS).regions
        assert [r.decision.winner is not None for r in regions] == [False, True]
        assert regions[0].decision.why == "no time left of 1e-09 s for tuning all regions"
        assert_same(compiled(*ARGS), both(*ARGS))
        assert all(r.decision.winner for r in mirage_jax.tune(f, *ARGS).regions), "goes on where it ended"
        again = mirage_jax.optimize(both, budget="5s/1h").explain(*ARGS)
        assert all(r.decision.source == "cache" for r in again.regions)


def test_each_region_gets_a_share_of_the_time(monkeypatch) -> None:
    """Three regions that may save 1, 6 and 3 ms, in 100 seconds; each takes 10 on a clock of its own."""
    now, shares, saved = [0.0], [], {32: 1e-3, 48: 6e-3, 40: 3e-3}

    def one(a: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
        return sum(jnp.sort(chain(a[:n, :n], b[:n, :n], v[:n])).sum() for n in saved)

    def decided(self, region, platform, on_miss, until):
        if until < math.inf:
            shares.append(until - now[0])
            now[0] += 10.0
        return Decision(None, "", "policy", platform)

    monkeypatch.setattr(Compiler, "_decided", decided)
    savings = lambda _, regions, *__: {text: saved[min(r.graph.sizes.values())] for text, r in regions.items()}  # noqa: E731
    monkeypatch.setattr(Compiler, "_savings", savings)
    monkeypatch.setattr("mirage_jax.compiler.compiler.time", SimpleNamespace(monotonic=lambda: now[0]))
    mirage_jax.optimize(one, budget=mirage_jax.Budget(5, total=100 / (1 - MAX_TUNING_FRACTION))).lower(*ARGS)
    assert shares == pytest.approx([60.0, 67.5, 80.0])
    shares.clear()
    now[0] = 0.0
    monkeypatch.setattr("mirage_jax.compiler.compiler._processors", lambda _: 64)
    mirage_jax.optimize(one, budget=mirage_jax.Budget(5, total=100 / (1 - MAX_TUNING_FRACTION))).lower(*ARGS)
    assert len(shares) == 3 and max(shares) > 90.0, "the largest has a lane of its own"


def test_regions_are_tuned_side_by_side(monkeypatch) -> None:
    """Two regions in lanes of their own: both are there at the same time, and are decided as one by one."""

    def both(a: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
        first = jnp.sort(chain(a[:64, :64], b[:64, :64], v[:64]))
        return chain(a, b, v) + first.sum()

    together = threading.Barrier(2)
    real = Compiler.decide_region

    def decide_region(self, region, platform, on_miss, until):
        if on_miss == "search":
            together.wait(30)
        assert jax.config.jax_default_matmul_precision == "float32"
        return real(self, region, platform, on_miss, until)

    monkeypatch.setattr(Compiler, "decide_region", decide_region)
    monkeypatch.setattr("mirage_jax.compiler.compiler._processors", lambda _: 64)
    f = mirage_jax.optimize(both, budget="5s/1h", strict=True)
    with measured(2.0), jax.default_matmul_precision("float32"):
        compiled = f.lower(*ARGS).compile()
        assert all(r.decision.winner for r in f.explain(*ARGS).regions)
    assert_same(compiled(*ARGS), both(*ARGS))


def test_an_interrupt_ends_all_lanes(monkeypatch) -> None:
    """The one that waits does so in vain; its thread ends, and nothing is decided."""
    began, ended = threading.Event(), threading.Event()

    def decide_region(self, region, platform, on_miss, until):
        if on_miss != "search":
            return Decision(None, "", "policy", platform)
        if began.is_set():
            raise KeyboardInterrupt
        began.set()
        try:
            for _ in range(600):
                time.sleep(0.05)
        finally:
            ended.set()

    def both(a: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
        return chain(a, b, v) + jnp.sort(chain(a[:64, :64], b[:64, :64], v[:64])).sum()

    monkeypatch.setattr(Compiler, "decide_region", decide_region)
    monkeypatch.setattr("mirage_jax.compiler.compiler._processors", lambda _: 64)
    f = mirage_jax.optimize(both, budget="5s/1h")
    with pytest.raises(KeyboardInterrupt):
        f.lower(*ARGS)
    assert ended.wait(10) and not f.compiler.decisions


def test_on_a_gpu_xla_is_timed_before_time_is_shared_out(monkeypatch) -> None:
    """The model stands where XLA cannot be timed, and for what it puts last."""
    model = {f"region {n}": 1e-3 / (n + 1) for n in range(12)}
    real = {"region 1": 9e-3, "region 3": None}
    attempts = {text: SimpleNamespace(text=text, headroom=lambda xla=None, t=text: xla or model[t]) for text in model}
    monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(device_kind=backend)])
    monkeypatch.setattr(Compiler, "session", lambda self, region, *_: attempts[region])
    times = lambda self, x64, asked: [real.get(a.text, 1e-5) for a in asked]  # noqa: E731
    monkeypatch.setattr(Compiler, "_times_of_xla", times)
    counts = dict.fromkeys(model, 1) | {"region 2": 4}
    found = Compiler(Options())._savings({text: text for text in model}, counts, "cuda")
    assert found["region 1"] == 9e-3 and found["region 3"] == model["region 3"] and found["region 2"] == 4e-5
    last = [f"region {n}" for n in (8, 9, 10, 11)]
    assert [found[text] for text in last] == [model[text] for text in last]


def test_without_a_device_to_measure_on_nothing_is_shared_out() -> None:
    platform = "cuda" if jax.default_backend() == "cpu" else "tpu"
    f = mirage_jax.optimize(chain, budget="5s/1h", strict=True)
    text = f.trace(*ARGS).lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in text and "mirage_region" not in text


def test_what_xla_takes_is_none_where_it_cannot_be_timed() -> None:
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ARGS]
    (region,) = analyse(jax.make_jaxpr(chain)(*args)).regions
    good, bad = (TuningSession(region, "cpu", jax.devices()[0], Options()) for _ in range(2))
    bad.__dict__["compiled_xla"] = lambda *args: 1 / 0
    seconds, nothing = times_of_xla([good, bad])
    assert seconds > 0 and nothing is None


@pytest.mark.parametrize("outside", [True, False], ids=["differentiated", "differentiates"])
def test_remat(outside) -> None:
    """No kernel reads what would be made again: the program is the one that JAX would have run."""

    def loss(x, ws):
        for w in ws:
            q, k, v = jnp.split(jnp.sin(x) @ w, 3, -1)
            x = x + jax.nn.softmax(q @ k.T) @ v
        return jnp.mean(x**2)

    def gradient(**options):
        wrap = functools.partial(quick, strict=True, **options)
        return jax.jit(jax.grad(wrap(loss))) if outside else wrap(jax.grad(loss))

    args = jnp.asarray(np.random.default_rng(0).normal(size=(512, 16)), "float32"), [jnp.eye(16, 48) / 9] * 4
    kept, made = gradient(), gradient(remat="regions")
    assert_same(made(*args), kept(*args))
    assert instructions(made, *args) == instructions(kept, *args)


def test_disabled(monkeypatch) -> None:
    with measured(2.0):
        f, g = mirage_jax.optimize(chain), mirage_jax.optimize(lambda *args: f(*args) + 1)
        assert is_replaced(f)
        with mirage_jax.disabled():
            assert not is_replaced(f) and not is_replaced(g)
            assert "disabled" in str(f.explain(*ARGS)) and not f.explain(*ARGS).regions
            with mirage_jax.disabled():
                assert_same(f(*ARGS), chain(*ARGS), 0)
            assert not is_replaced(f)
        assert is_replaced(f) and is_replaced(g)
        monkeypatch.setenv("MIRAGE_JAX", "off")
        assert not is_replaced(f)
        assert_same(g(*ARGS), chain(*ARGS) + 1, 0)
        monkeypatch.setenv("MIRAGE_JAX", "on")
        assert is_replaced(f)


def test_disabled_helps_where_a_primitive_is_not_known() -> None:
    from jax.experimental import checkify

    def f(x):
        checkify.check(jnp.all(x > 0), "negative")
        return x @ x

    with mirage_jax.disabled():
        error, y = checkify.checkify(quick(f))(jnp.ones((3, 3)))
    assert error.get() is None and y.shape == (3, 3)


def test_nesting() -> None:
    with measured(2.0):
        inner = mirage_jax.optimize(chain)
        for f in (
            mirage_jax.optimize(inner, on_miss="search"),
            mirage_jax.optimize(jax.jit(inner)),
            jax.jit(inner),
            mirage_jax.optimize(lambda *args: inner(*args)),
        ):
            assert is_replaced(f)
            assert_same(f(*ARGS), chain(*ARGS))


# Transformations with real decisions; tests/transformations has the table.


def test_the_backward_pass_is_optimized() -> None:
    def gradient(f):
        return jax.grad(lambda *args: f(*args).sum(), (0, 1, 2))

    args = operands(160)
    plain = jax.jit(gradient(chain))
    assert flops(plain, *args) > 6 * 160**3, "three products of matrices"
    with measured(2.0):
        whole, inside = mirage_jax.optimize(gradient(chain)), jax.jit(gradient(mirage_jax.optimize(chain)))
        assert flops(whole, *args) < 160**3, "none"
        assert flops(inside, *args) < 3 * 160**3, "the one that the forward pass keeps for the backward pass"
        for f in (whole, inside):
            assert_same(f(*args), plain(*args))


def test_export_symbolic() -> None:
    n, m = jax.export.symbolic_shape("n, m")
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(n, m), (m, m), (m,)]]
    f = mirage_jax.optimize(chain, strict=True)
    exported = jax.export.export(f)(*shapes)
    assert_same(exported.call(*SMALL), chain(*SMALL))
    assert "symbolic dimension (shape (n, m))" in str(f.explain(*shapes))


def test_effects_keep_their_order() -> None:
    def f(a, b, v):
        jax.debug.print("first {}", v[0] * 0, ordered=True)
        y = chain(a, b, v)
        jax.debug.print("second {}", y[0] * 0, ordered=True)
        return jax.lax.fori_loop(0, 2, lambda i, y: [jax.debug.print("loop {}", i, ordered=True), a @ y][1], y)

    texts = []
    with measured(2.0):
        for g in (jax.jit(f), mirage_jax.optimize(f, strict=True)):
            with redirect_stdout(io.StringIO()) as out:
                y = g(*ARGS)
                jax.effects_barrier()
            texts.append(out.getvalue())
    assert texts[0] == texts[1] and texts[0].split()[::2] == ["first", "second", "loop", "loop"]
    assert_same(y, jax.jit(f)(*ARGS))
    assert "effect" in str(quick(f).explain(*ARGS))


# Bad input.


async def asynchronous(x):
    return x


def generator(x):
    yield x


async def asynchronous_generator(x):
    yield x


class AsynchronousCall:
    async def __call__(self, x):
        return x


class AClass:
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "found None"),
        (3, "found 3; it takes"),
        ("f", "found 'f'; it takes"),
        (jnp.ones(1000), r"found .* \(ArrayImpl\)"),
        (AClass, "AClass.*, not an instance of it"),
        (asynchronous, "asynchronous"),
        (asynchronous_generator, "asynchronous"),
        (AsynchronousCall(), "asynchronous"),
        (generator, "generator"),
        (functools.partial(generator, 1), "generator"),
    ],
)
def test_what_cannot_be_optimized(bad, message) -> None:
    for use in (mirage_jax.optimize, mirage_jax.optimize(), mirage_jax.tune):
        with pytest.raises(UsageError, match=message) as info:
            use(bad)
        assert "it takes a function, a method or a callable module" in str(info.value)
        assert "\n" not in str(info.value) and len(str(info.value)) < 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buget": 3}, "unknown option 'buget'. Did you mean 'budget'[?] Allowed: on_miss, budget"),
        ({"static_argnumz": 3}, "Did you mean 'static_argnums'"),
        ({"budget": -1}, "budget: found -1; allowed"),
        ({"budget": float("nan")}, "budget: found nan; allowed"),
        ({"budget": "abc"}, "budget: found 'abc'; allowed"),
        ({"on_miss": "explode"}, "on_miss: 'explode'. Allowed: search, heuristic, fallback, error"),
        ({"backend": "Triton"}, "backend: 'Triton'. Did you mean 'triton'"),
        ({"cache_dir": __file__}, "cache_dir: .*test_api.py' exists and is not a directory"),
        ({"strict": 1}, "strict: found 1; allowed are True and False"),
    ],
)
def test_bad_options(options, message) -> None:
    with pytest.raises(UsageError, match=message):
        mirage_jax.optimize(**options)
    with pytest.raises(UsageError, match=message):
        mirage_jax.optimize(chain, **options)


def raised(f, *args, **kwargs) -> tuple[type, str]:
    with pytest.raises(BaseException) as info:
        f(*args, **kwargs)
    return info.type, re.sub("0x[0-9a-f]+", "0x", str(info.value))


class Own(Exception):
    pass


def raises(x):
    raise Own("in the user's function")


def branches(x):
    return x @ x if x.sum() > 0 else x


ERRORS = {
    "the function's own": (raises, (A,), {}),
    "branch on a tracer": (branches, (A,), {}),
    "too few": (chain, (A, B), {}),
    "too many": (chain, (A, B, V, V), {}),
    "unknown keyword": (chain, (A, B), {"w": V}),
    "shapes": (chain, (A, B, V[1:]), {}),
    "not an array": (lambda x: x, ("text",), {}),
    "object": (lambda x: x, (object(),), {}),
    "result": (lambda x: "text", (A,), {}),
    "tree": (lambda x: x["a"] @ x["b"], ([A, B],), {}),
    "dtype": (lambda x: jnp.sin(x) @ jnp.ones((3,), "bfloat16"), (A,), {}),
    "endless": (lambda x: ERRORS["endless"][0](x), (A,), {}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_jit(name) -> None:
    f, args, kwargs = ERRORS[name]
    want, have = raised(jax.jit(f), *args, **kwargs), raised(mirage_jax.optimize(f), *args, **kwargs)
    assert have[0] is want[0]
    assert have[1].partition("\n")[0] == want[1].partition("\n")[0]
    assert "mirage" not in have[1]
    assert raised(mirage_jax.optimize(f).explain, *args, **kwargs)[0] is want[0]


def test_leaked_tracer() -> None:
    kept = []
    quick(lambda x: [kept.append(x), x @ x][1])(A)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        kept[0] + 1


def test_where_the_functions_error_comes_from() -> None:
    with pytest.raises(Own) as info:
        mirage_jax.optimize(raises)(A)
    assert info.traceback[-1].name == "raises"


# Programs that are left as they are.

I8 = jnp.arange(16, dtype="int8").reshape(4, 4)
C64 = jnp.ones((4, 4), "complex64") * 1j
F8 = jnp.ones((4, 4), "float8_e4m3fn")
SQUARE = jnp.arange(16.0).reshape(4, 4)

LEFT = {
    "integers": (lambda x: x @ x, (I8,), "dtype"),
    "complex": (lambda x: x @ x, (C64,), "dtype"),
    "fp8": (lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32), (F8,), "dtype"),
    "no elements": (lambda x: x @ x.T, (jnp.zeros((0, 4)),), "zero size"),
    "no rank": (lambda x: x * x + 1, (jnp.float32(3),), "scalar"),
    "sort": (lambda x: jnp.sort(x @ x), (SQUARE,), "unsupported primitive"),
    "linear algebra": (lambda x: jnp.linalg.inv(x + jnp.eye(4) * 9) @ x, (SQUARE,), "unsupported primitive"),
    "precision": (lambda x: jnp.dot(x, x, precision=jax.lax.DotAlgorithmPreset.F64_F64_F64), (SQUARE,), "precision"),
    "high rank": (lambda x: jnp.sum(x, -1), (jnp.ones((1, 2) * 5),), ""),
    "nothing": (lambda x: x, (SQUARE,), ""),
    "no arguments": (lambda: jnp.ones(3), (), ""),
    "no results": (lambda x: None, (SQUARE,), ""),
    "pointwise": (lambda x: jnp.sin(x) + 1, (SQUARE,), "too little work"),
    "a constant": (lambda x: jnp.eye(4) @ jnp.eye(4), (SQUARE,), ""),
    "nan in a model": (lambda x: x @ x, (SQUARE.at[0, 1].set(jnp.nan),), ""),
    "a large axis of one": (lambda x: (x[:, None] * x).sum(0), (jnp.ones((1,)),), ""),
    "primes": (lambda x: (x @ x.T) @ x, (jnp.ones((7, 13)),), ""),
    "a ref": (lambda x: jax.new_ref(x)[...] @ x, (SQUARE,), ""),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is(name) -> None:
    f, args, why = LEFT[name]
    g = quick(f, strict=True)
    have, want = g(*args), jax.jit(f)(*args)
    jax.tree.map(np.testing.assert_array_equal, have, want)
    assert jax.tree.map(lambda x: (x.dtype, x.weak_type), have) == jax.tree.map(lambda x: (x.dtype, x.weak_type), want)
    assert why in str(g.explain(*args))


@pytest.mark.parametrize(
    "args",
    [
        (2.0, 3),
        (np.float32(2), np.ones((3, 3), "float32")),
        (1, A),
        (True, A),
        (1j, A),
        (np.ones((4, 4), "int32"), 2.5),
        (jnp.asarray(3.0), jnp.ones((2, 2), "bfloat16")),
        (jnp.bfloat16(2), 2.0),
        (np.arange(3.0), np.arange(3)),
    ],
    ids=range(9),
)
def test_scalars_and_weak_types(args) -> None:
    def f(s, x):
        return s * x, s + 1, jnp.atleast_2d(s * x) @ jnp.atleast_2d(s * x).T, {"s": s, "x": x}

    have, want = quick(f)(*args), jax.jit(f)(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), have, want)
    describe = lambda x: (x.dtype, x.weak_type, x.shape)  # noqa: E731
    assert jax.tree.map(describe, have) == jax.tree.map(describe, want)


def test_without_a_file(tmp_path) -> None:
    """``python -O``, code from a string, no home directory."""
    program = textwrap.dedent("""
        import jax.numpy as jnp, mirage_jax
        f = mirage_jax.optimize(lambda x: (x @ x.T) @ x, on_miss="heuristic")
        x = jnp.ones((4, 3))
        assert f(x).shape == (4, 3) or 1 / 0
        print(len(f.explain(x).regions))
    """)
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "MIRAGE_JAX_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-O", "-c", program],
        env=environment | {"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""},
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_malformed_environment(monkeypatch, caplog) -> None:
    monkeypatch.setenv("MIRAGE_JAX", "perhaps")
    monkeypatch.setenv("MIRAGE_JAX_BUDGET", "soon, please")
    f = quick(chain)
    for _ in range(2):
        assert_same(f(*SMALL), chain(*SMALL))
    assert len([r for r in caplog.records if "is ignored" in r.getMessage()]) <= 2
    assert f.options.budget == mirage_jax.Budget()


def _without_arguments() -> jax.Array:
    x = jnp.arange(3.0)
    return x if x.sum() > 0 else -x


def test_disabled_jit_runs_python_whatever_the_arguments() -> None:
    """Without arrays among them, and under a transformation."""

    def branching(v: jax.Array) -> jax.Array:
        return jnp.sin(v).sum() if v.sum() > -1e9 else v.sum()

    with jax.disable_jit():
        assert mirage_jax.optimize(_without_arguments)().tolist() == [0, 1, 2]
        assert mirage_jax.optimize(lambda n: range(n))(3) == range(3)
        assert mirage_jax.optimize(lambda t: 1.0 if jnp.sin(t) > 0 else 2.0)(2.0) == 1.0
        found = jax.grad(mirage_jax.optimize(branching))(jnp.ones(3))
    np.testing.assert_allclose(found, np.cos(np.ones(3)), rtol=1e-6)


def test_what_holds_an_optimized_function_can_be_copied() -> None:
    fn = mirage_jax.optimize(_without_arguments)
    assert copy.deepcopy({"fn": fn})["fn"] is fn


# What static arguments and results are.


def test_static_arguments_are_the_objects_that_were_given() -> None:
    """Numbers of numpy are no operands, and a pytree is not taken apart and put together again."""

    @jax.tree_util.register_pytree_node_class
    @dataclasses.dataclass(frozen=True)
    class Config:
        n: int

        def tree_flatten(self):
            return (), self.n

        @classmethod
        def tree_unflatten(cls, n, _):
            raise AssertionError("not to be made again")

    config = Config(2)

    def f(x, n, given, *, flag):
        assert given is config and isinstance(flag, np.bool_)
        return x[:n] @ x if flag else x

    call = quick(f, static_argnums=(1, 2), static_argnames="flag")
    want = jax.jit(f, static_argnums=(1, 2), static_argnames="flag")(A, np.int64(2), config, flag=np.bool_(True))
    assert_same(call(A, np.int64(2), config, flag=np.bool_(True)), want)


def test_a_result_whose_class_wants_arrays() -> None:
    @jax.tree_util.register_pytree_node_class
    class Boxed:
        def __init__(self, x):
            self.x = jnp.asarray(x)

        def tree_flatten(self):
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    assert_same(quick(lambda x: Boxed(x @ x))(A).x, A @ A)


@pytest.fixture
def begun(monkeypatch) -> list[Region]:
    """Regions that are searched, each for two seconds and in vain."""
    regions: list[Region] = []

    def search(self, session, key, base, measure, x64):
        regions.append(session.region)
        self.spent += 2.0
        return Decision(None, "slow", "search", base.platform)

    monkeypatch.setattr(Compiler, "_search", search)
    return regions


def test_time_for_all_regions_is_that_of_all_programs_of_a_function(begun) -> None:
    """Each shape is a program of its own; when the time is used up, none of its regions is begun."""
    f = mirage_jax.optimize(chain, budget="1s/1s")
    for n in (8, 9, 10):
        f(*operands(n))
    assert len(begun) == 1
    (region,) = f.explain(*operands(10)).regions
    text, _, where = region.decision.why.partition("; it went into ")
    assert text == "no time left of 1 s for tuning all regions"
    assert where.startswith("tests/deciding.py:") and where.endswith(" (chain): slow")


def test_a_program_that_is_cut_again_gets_more_time_once(begun) -> None:
    """Kernels of the first cut won, but their regions are no more: so a focal loss's gradient had no time left."""
    regions = [r for n in (8, 9, 10) for r in analyse(jax.make_jaxpr(chain)(*operands(n))).regions]
    compiler = Compiler(Options("search", budget=mirage_jax.Budget(1, total=1)))
    for region, again in zip(regions, (False, True, True), strict=True):
        compiler.prepare([region], LoweringTarget(("cpu",)), again)
    assert begun == regions[:2]


def test_what_the_function_was_given_is_there() -> None:
    def f(x):
        return x @ x

    f.tag, f.options = "mine", None
    found = quick(f)
    assert found.tag == "mine" and isinstance(found.options, Options)


def test_type_checkers_see_signatures_and_options() -> None:
    """The signature of a function or method stays, and options are keywords with types."""
    file = Path(__file__).parent / "data" / "types_of_optimize.py"
    pyright = [sys.executable, "-m", "pyright"]
    if subprocess.run([*pyright, "--version"], capture_output=True).returncode:
        pytest.skip("pyright is not installed")
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [*pyright, "--outputjson", "--pythonpath", sys.executable, file], capture_output=True, cwd=root
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    wrong = [n for n, line in enumerate(file.read_text().splitlines()) if line.endswith("# error")]
    assert sorted({d["range"]["start"]["line"] for d in found}) == wrong, [d["message"] for d in found]
