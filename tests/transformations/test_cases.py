"""Every case of the tables gives with `mirage_jax.optimize` what it gives with `jax.jit`, and is optimized."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from transformations import devices, special, transformed
from transformations.cases import DECIDED, WINS, XLA, Case
from transformations.comparing import assert_same

import mirage_jax
from mirage_jax.compiler.attempt import Attempt

CASES = [*transformed.cases(), *special.cases(), *devices.cases()]


class Optimizing:
    """`mirage_jax.optimize` with some options; remembers what it made."""

    def __init__(self, **options: Any) -> None:
        self.options, self.made = options, list[mirage_jax.Optimized]()

    def __call__(self, f: Any, **options: Any) -> mirage_jax.Optimized:
        self.made.append(mirage_jax.optimize(f, **self.options, **options))
        return self.made[-1]

    @property
    def replaced(self) -> list[bool]:
        """Of each region that was decided on, whether it is replaced."""
        return [d.winner is not None for f in self.made for d in f.compiler.decisions.values()]


OPTIONS: dict[str, Any] = {
    "on_miss": "heuristic",
    "backend": "jax",
    "strict": True,
    "budget": mirage_jax.Budget(60, states=2000),
}
FOUND: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _neither_rounding_nor_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """At these tiny sizes the float gate may go either way: every result is compared here anyway. And what is found for
    a region is kept for the cases that have the same one."""
    search = Attempt.candidates

    def candidates(self: Attempt, *args: Any) -> Any:
        key = f"{self.platform} {self.reference}"
        if key not in FOUND:
            FOUND[key] = search(self, *args)
        return FOUND[key]

    monkeypatch.setattr(Attempt, "candidates", candidates)
    monkeypatch.setattr(Attempt, "gate", lambda self, winner: (True, "not asked"))


def compiled(case: Case, jit: Any) -> Any:
    return jax.jit(case.make(jit)).lower(*case.args).compile()


def flops(compiled: Any) -> float:
    return compiled.cost_analysis()["flops"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    jit = Optimizing(**OPTIONS)
    if case.eager:
        assert_same(case.make(jit)(*case.args), case.make(jax.jit)(*case.args), case.looser)
    else:
        ours, plain = compiled(case, jit), compiled(case, jax.jit)
        assert_same(ours(*case.args), plain(*case.args), case.looser)
        if case.promise is WINS:
            assert flops(ours) < flops(plain)
    assert any(jit.replaced) or case.promise is not WINS
    assert jit.replaced or case.promise is not DECIDED
    assert not jit.replaced or case.promise is not XLA
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
    jit = Optimizing(**OPTIONS)
    assert_same(differentiated(case, jit)(*case.args), differentiated(case, jax.jit)(*case.args), case.looser)
    assert any(jit.replaced)
