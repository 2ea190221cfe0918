"""A primitive built from operators that exist takes one rule: registered here from outside, and taken away again."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jaxpr_frontend.replacing import Replacing, analysis, assert_close, optimized, random

from mirage_jax.jaxpr_frontend.partition.reasons import Code
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.jaxpr_frontend.translate.builder import AxisValue, NodeBuilder

X, W = random(8, 32), random(32, 16, seed=1)
TABLES = (rules.RULES, rules.FOLDS, rules.LAYOUT_PRIMITIVES, rules.VIEWS, rules.TAKES_NON_FINITE)


def tangent(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tan(x @ w) @ w.T


@pytest.fixture
def tan() -> Iterator[None]:
    @rules.rule("tan")
    def _tan(b: NodeBuilder, out: rules.EquationInfo, x: AxisValue) -> AxisValue:
        return b.div(b.unary("sin", x, out.dtype), b.unary("cos", x, out.dtype), out.dtype)

    yield
    rules.unregister("tan")


def test_without_a_rule_xla_keeps_it() -> None:
    assert [x.code for x in analysis(tangent, X, W).left_out if x.primitive == "tan"] == [Code.UNSUPPORTED_PRIMITIVE]


@pytest.mark.usefixtures("tan")
def test_one_rule_is_enough() -> None:
    compiler = Replacing()
    assert_close(optimized(tangent, compiler)(X, W), tangent(X, W), 2e-4)
    (region,) = compiler.regions
    assert "tan" in region.primitives and not analysis(tangent, X, W).left_out


def test_nothing_of_a_rule_is_left() -> None:
    before = [set(table) for table in TABLES]
    rules.rule("tan", view=True, fold=lambda _, x: jnp.tan(x))(lambda b, out, x: x)
    assert all("tan" in table for table in TABLES)
    rules.unregister("tan")
    assert [set(table) for table in TABLES] == before
