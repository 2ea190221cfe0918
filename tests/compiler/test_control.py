"""The user decides: regions left to XLA by `skip` and `only`, muGraphs by hand, `disabled`, and `bisect`."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from deciding import assert_same, chain, measured, operands

import mirage_jax
from mirage_jax import UsageError
from mirage_jax.compiler.selection import is_line_of
from mirage_jax.config import Options

ARGS = A, B, V = operands()


def two(a, b, v):
    x = chain(a, b, v)
    y = jnp.sort(x)
    return (b @ a) @ y


FIRST = f"deciding.py:{inspect.getsourcelines(chain)[1] + 2}"
SECOND = f"tests/compiler/test_control.py:{inspect.getsourcelines(two)[1] + 3}"


def reports(**options):
    with measured(2.0):
        return mirage_jax.optimize(two, **options).explain(*ARGS)


def regions(**options):
    return reports(**options).regions


def whys(**options):
    return [r.decision.winner is not None or r.decision.why for r in regions(**options)]


SKIPPED = "skipped by the option skip"
NOT_CHOSEN = "skipped by the option only, which does not name it"

# Both regions are one program at two places.


def test_a_line_leaves_its_region_to_xla() -> None:
    assert whys() == [True]
    assert whys(skip=[FIRST]) == [SKIPPED, True]
    assert whys(skip=SECOND) == [True, SKIPPED]
    assert whys(only=[FIRST]) == [True, NOT_CHOSEN]
    assert whys(only=[FIRST, SECOND], skip=[SECOND]) == [True, SKIPPED]
    assert whys(only=[]) == [NOT_CHOSEN]
    with measured(2.0):
        f = mirage_jax.optimize(two, skip=[FIRST])
        text = str(f.explain(*ARGS))
        assert f"kept XLA's code: {SKIPPED}" in text
        assert f.lower(*ARGS).compile().cost_analysis()["flops"] < jax.jit(two).lower(*ARGS).cost_analysis()["flops"]
        assert_same(f(*ARGS), jax.jit(two)(*ARGS), 1e-3)


def test_a_key_leaves_its_regions_to_xla() -> None:
    (region,) = regions()
    key = region.decision.key
    assert whys(skip=[key]) == whys(skip=[key[:8].upper()]) == [SKIPPED]
    assert whys(only=[key]) == [True]
    assert whys(only=["0" * 64]) == [NOT_CHOSEN]


def test_keys_and_stored_decisions_stay() -> None:
    (region,) = regions()
    left = regions(skip=[FIRST], on_miss="error")
    assert {r.decision.key for r in left} == {region.decision.key}
    assert [r.decision.source for r in left] == ["policy", "cache"]
    assert regions(skip=["nowhere.py:1"], on_miss="error")[0].decision.source == "cache"


def test_a_name_that_fits_no_region_is_noted() -> None:
    notes = reports(skip=["nowhere.py:1", FIRST], only=["01234567", SECOND]).notes
    assert [n for n in notes if "names no region" in n] == [
        "skip: 'nowhere.py:1' names no region of this function",
        "only: '01234567' names no region of this function",
    ]


@pytest.mark.parametrize(
    ("selector", "want"),
    [
        ("model.py:41", True),
        ("net/model.py:41", True),
        ("./net/model.py:41", True),
        ("/home/net/model.py:41", True),
        (r"net\model.py:41", True),
        ("model.py:4", False),
        ("del.py:41", False),
        ("other/model.py:41", False),
        ("0123abcd", False),
    ],
)
def test_lines(selector, want) -> None:
    assert is_line_of(selector, ["/home/net/model.py:41:4 (f)", "unknown line"]) is want


@pytest.mark.parametrize("option", ["skip", "only"])
@pytest.mark.parametrize("bad", [41, "model.py", ["model.py:0"], [41], "0123", {"model.py:41": 1}, [None], "a.py:-3"])
def test_what_names_no_region_is_one_line(option, bad) -> None:
    with pytest.raises(UsageError, match=rf"{option}: found .*; allowed .*model.py:41.*cache keys") as caught:
        Options.make({option: bad})
    assert "\n" not in str(caught.value)


def test_a_line_names_a_region_whose_key_cannot_be_made(monkeypatch) -> None:
    def failing(subject):
        raise RuntimeError("no device")

    monkeypatch.setattr("mirage_jax.compiler.compiler.key_of", failing)
    assert whys(skip=[FIRST]) == [SKIPPED, True]


# `with mirage_jax.disabled():` inside of an optimized function.


@mirage_jax.optimize
def inner(b, a, x):
    return (b @ a) @ x


def partly(a, b, v):
    x = chain(a, b, v)
    with mirage_jax.disabled():
        y = inner(b, a, x)
    return chain(a, b, y)


def scanned(a, b, v):
    def step(x, _):
        with mirage_jax.disabled():
            y = (a @ b) @ x
        return chain(b, a, y), None

    x, _ = jax.lax.scan(step, v, length=2)
    with mirage_jax.disabled():
        return jax.lax.scan(lambda x, _: (chain(a, b, x), None), x, length=2)[0]


def loss(f):
    return lambda *args: f(*args).sum()


def test_disabled_inside_of_an_optimized_function() -> None:
    with measured(2.0):
        f = mirage_jax.optimize(partly)
        report = f.explain(*ARGS)
        assert_same(f(*ARGS), jax.jit(partly)(*ARGS), 1e-3)
        assert_same(jax.jit(lambda *args: f(*args))(*ARGS), jax.jit(partly)(*ARGS), 1e-3)
    left = [x for x in report.left_out if x.code == "disabled"]
    assert [x.primitive for x in left] == ["dot_general"] * 2
    assert "written inside of mirage_jax.disabled()" in str(report)
    assert sum(r.occurrences for r in report.regions) == 2


def test_disabled_inside_survives_transformations() -> None:
    with measured(2.0):
        f = mirage_jax.optimize(partly)
        gradients = mirage_jax.optimize(jax.grad(loss(f), argnums=(0, 1, 2)))
        assert len([x for x in gradients.explain(*ARGS).left_out if x.code == "disabled"]) > 4
        assert_same(gradients(*ARGS), jax.grad(loss(partly), argnums=(0, 1, 2))(*ARGS), 1e-2)
        many = mirage_jax.optimize(jax.vmap(partly, (None, None, 0)))
        batch = (A, B, jnp.stack([V, V]))
        assert len([x for x in many.explain(*batch).left_out if x.code == "disabled"]) == 2
        assert_same(many(*batch), jax.vmap(partly, (None, None, 0))(*batch), 1e-3)


def test_disabled_inside_and_around_a_loop() -> None:
    with measured(2.0):
        f = mirage_jax.optimize(scanned)
        report = f.explain(*ARGS)
        assert_same(f(*ARGS), jax.jit(scanned)(*ARGS), 1e-2)
    assert sum(r.occurrences for r in report.regions) == 1
    assert [x.primitive for x in report.left_out if x.code == "disabled"] == ["scan", "dot_general", "dot_general"]


def test_disabled_around_an_optimized_function() -> None:
    with measured(2.0) as seen:
        f = mirage_jax.optimize(two)
        with mirage_jax.disabled():
            assert_same(f(*ARGS), jax.jit(two)(*ARGS), 1e-3)
            assert_same(jax.jit(lambda *args: f(*args))(*ARGS), jax.jit(two)(*ARGS), 1e-3)
            assert f.explain(*ARGS).notes == ("disabled: runs as plain jax.jit",)
    assert not seen
