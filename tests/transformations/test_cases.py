"""Every case of the tables gives with `mirage_jax.optimize` what it gives with `jax.jit`, and is optimized."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from transformations import devices, special, transformed
from transformations.cases import (
    DECIDED,
    WINS,
    XLA,
    Case,
)
from transformations.comparing import assert_same

import mirage_jax
from mirage_jax.compiler import tuning_session
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.lower.runtime.launch import kernel_calls

CASES = [*transformed.cases(), *special.cases(), *devices.cases()]
ALGEBRA = {"backend": "jax", "budget": mirage_jax.Budget(60, states=2000)}
KERNELS = {"backend": "triton", "budget": mirage_jax.Budget(20)}
FOUND: dict[tuple[str, ...], Any] = {}


@pytest.fixture(autouse=True)
def _neither_rounding_nor_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """At these tiny sizes the float gate may go either way: every result is compared here anyway. And what is found for
    a region is kept for the cases that have the same one."""
    search = TuningSession.candidates

    def candidates(self: TuningSession, *args: Any) -> Any:
        key = self.options.backend, self.platform, str(self.reference)
        if key not in FOUND:
            FOUND[key] = search(self, *args)
        return FOUND[key]

    monkeypatch.setattr(TuningSession, "candidates", candidates)
    monkeypatch.setattr(TuningSession, "gate", lambda self, winner, only=(): (True, "not asked"))


class Optimizing:
    """`mirage_jax.optimize` with some options; remembers what it made."""

    def __init__(self, **options: Any) -> None:
        self.options = {"on_miss": "heuristic", "strict": True, **options}
        self.made: list[mirage_jax.Optimized] = []

    def __call__(self, f: Any, **options: Any) -> mirage_jax.Optimized:
        self.made.append(mirage_jax.optimize(f, **self.options, **options))
        return self.made[-1]

    @property
    def winners(self) -> list[Any]:
        """What replaces each region that was decided on, or None."""
        return [d.winner for f in self.made for d in f.compiler.decisions.values()]


def lowered(case: Case, jit: Any) -> Any:
    return jax.jit(case.make(jit)).lower(*case.args)


def flops(compiled: Any) -> float:
    return compiled.cost_analysis()["flops"]


def skip_without_devices(case: Case) -> None:
    if jax.device_count() < case.devices:
        pytest.skip(f"needs {case.devices} devices")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    skip_without_devices(case)
    jit = Optimizing(**ALGEBRA)
    if case.eager:
        assert_same(case.make(jit)(*case.args), case.make(jax.jit)(*case.args), case.looser)
    else:
        ours, plain = (lowered(case, j).compile() for j in (jit, jax.jit))
        assert_same(ours(*case.args), plain(*case.args), case.looser)
        assert case.promise is not WINS or flops(ours) < flops(plain)
    assert case.promise is not WINS or any(jit.winners)
    assert case.promise is not DECIDED or jit.winners
    assert case.promise is not XLA or not jit.winners
    if case.why:
        assert case.why in str(jit.made[-1].explain(*case.args))


def differentiated(case: Case, jit: Any) -> Any:
    """Derivatives of a case with respect to all of its arguments."""

    def along(*args: Any) -> Any:
        f = case.make(jit)
        if case.gradient == "forward":
            return jax.jvp(f, args, args)[1]
        y, pullback = jax.vjp(f, *args)
        return pullback(jax.tree.map(jnp.ones_like, y))

    return jax.jit(along)


@pytest.mark.parametrize("case", [c for c in CASES if c.gradient], ids=str)
def test_derivative(case: Case) -> None:
    jit = Optimizing(**ALGEBRA)
    assert_same(differentiated(case, jit)(*case.args), differentiated(case, jax.jit)(*case.args), case.looser)
    assert any(jit.winners)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.gpu], ids=str)
def test_on_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton: algebra alone is not offered."""
    skip_without_devices(case)
    monkeypatch.setattr(tuning_session, "FAMILIES", ("kernels",))
    jit = Optimizing(**KERNELS)
    if not case.eager:
        assert kernel_calls(lowered(case, jit).as_text())
    have, want = (case.make(j)(*case.args) for j in (jit, jax.jit))
    assert_same(have, want, case.looser)
    assert any(w is not None and w.cuda is not None for w in jit.winners)
