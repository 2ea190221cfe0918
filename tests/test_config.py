"""Options: what is accepted, and that what is refused names what was found and what is allowed."""

import logging
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax import config
from mirage_jax.config import Budget, Options, disabled, from_environment, is_disabled
from mirage_jax.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("30s", 30), ("500ms", 0.5), ("2m", 120), ("2 min", 120), ("1H", 3600), ("1.5", 1.5), (7, 7), (None, 30)],
        *[("1m30s", 90), ("1h 30m", 5400), ("2m500ms", 120.5), ("1H2M3S", 3723)],
    ],
)
def test_budget_parse(text, seconds) -> None:
    assert Budget.parse(text) == Budget(seconds)


def test_budget_of_one_search_and_of_all() -> None:
    assert Budget.parse("20s/5m") == Budget(20, total=300)
    assert str(Budget.parse("20s/5m")) == "20s, 300s in all" and str(Budget(20)) == "20s"


BAD_BUDGETS = [
    "1s/2s/3s",
    "1s/0",
    "/5s",
    "5s/",
    "abc",
    "",
    "-3s",
    "0s",
    "3 days",
    "1m30",
    "30s1m",
    "m",
    "1m 2m",
    -1,
    0,
    float("nan"),
    float("inf"),
    True,
    [],
    b"3s",
    "9" * 400,
]


@pytest.mark.parametrize("bad", BAD_BUDGETS)
def test_budget_refuses(bad) -> None:
    with pytest.raises(UsageError, match=r"budget: found .* allowed"):
        Budget.parse(bad)


def test_budget_constructor_refuses() -> None:
    with pytest.raises(UsageError, match="positive"):
        Budget(float("nan"))
    with pytest.raises(UsageError, match="states"):
        Budget(1.0, 0)
    with pytest.raises(UsageError, match="total"):
        Budget(1.0, total=0.0)
    with pytest.raises(UsageError, match="at least one worker"):
        Budget(1.0, workers=0)


def test_options_are_values() -> None:
    options = Options.make({"on_miss": "search", "budget": "5s", "strict": None})
    assert options == Options.make({"budget": 5, "on_miss": "search"})
    assert hash(options) == hash(Options.make({"budget": 5, "on_miss": "search"}))
    assert options.budget == Budget(5.0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"buget": "3s"}, "unknown option 'buget'. Did you mean 'budget'[?] Allowed: on_miss, .*static_argnums"),
        ({"on_miss": "serach"}, "on_miss: 'serach'. Did you mean 'search'[?] Allowed: search, heuristic, fall"),
        ({"backend": 3}, "backend: 3. Allowed: auto, jax, triton"),
        ({"backend": []}, "backend"),
        ({"strict": "yes"}, "strict: found 'yes'; allowed are True and False"),
        ({"remat": "region"}, "remat: 'region'. Did you mean 'regions'[?] Allowed: auto, regions"),
        ({"devices": True}, "devices: found True; allowed are different numbers"),
        ({"cache_dir": 7}, "cache_dir: found 7"),
        ({"cache_dir": "/dev/null"}, "not a directory"),
        ({"budget": "soon"}, "budget: found 'soon'"),
        ({"devices": "0,first"}, "devices: found '0,first'; allowed are different numbers"),
        ({"devices": [1, 1]}, "devices: found"),
        ({"devices": -1}, "devices: found -1"),
    ],
)
def test_options_refuse(keywords, message) -> None:
    with pytest.raises(UsageError, match=message):
        Options.make(keywords, also=["static_argnums"])


def test_environment_is_below_arguments_and_above_defaults(monkeypatch) -> None:
    monkeypatch.setenv("MIRAGE_JAX_BUDGET", "7s")
    monkeypatch.setenv("MIRAGE_JAX_ON_MISS", "fallback")
    monkeypatch.setenv("MIRAGE_JAX_STRICT", "1")
    monkeypatch.setenv("MIRAGE_JAX_DEVICES", "0, 2")
    options = Options.make({"on_miss": "search"})
    assert options.devices == Options.make({"devices": (0, 2)}).devices == (0, 2)
    assert (options.budget, options.on_miss, options.strict) == (Budget(7.0), "search", True)


def test_malformed_environment_is_one_warning(monkeypatch, caplog) -> None:
    config.warn_once.cache_clear()
    monkeypatch.setenv("MIRAGE_JAX_BUDGET", "a while")
    monkeypatch.setenv("MIRAGE_JAX", "maybe")
    with caplog.at_level(logging.WARNING, "mirage_jax"):
        for _ in range(3):
            assert Options.make({}).budget == Budget()
            assert not is_disabled()
    assert [r.getMessage().split(" ")[0] for r in caplog.records] == ["MIRAGE_JAX_BUDGET", "MIRAGE_JAX"]


def test_kill_switch(monkeypatch) -> None:
    assert not is_disabled()
    with disabled():
        assert is_disabled()
        with disabled():
            pass
        assert is_disabled()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(is_disabled()))
        thread.start()
        thread.join()
        assert seen == [False]
    assert not is_disabled()
    monkeypatch.setenv("MIRAGE_JAX", "off")
    assert is_disabled()


ARRAYS = [
    np.arange(40.0).reshape(8, 5),
    jnp.ones((3, 3)),
    np.array("search"),
    [[1, 2]],
    {"a": 1},
    {"a": [10**5000]},
    object(),
    10**400,
]


@pytest.mark.parametrize("bad", [*ARRAYS, "soon", True, None, -1, 0, float("nan")])
@pytest.mark.parametrize("field", ["seconds", "states", "workers", "total"])
def test_a_budget_of_something_else_is_one_line(field, bad) -> None:
    if (bad is None and field in ("states", "total")) or (isinstance(bad, int) and bad > 1):
        Budget(**{field: bad})
        return
    with pytest.raises(UsageError, match="budget") as caught:
        Budget(**{field: bad})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("bad", ARRAYS)
@pytest.mark.parametrize("option", ["on_miss", "budget", "backend", "cache_dir", "strict", "remat", "devices"])
def test_an_array_for_an_option_is_one_line(option, bad) -> None:
    if (option, type(bad)) == ("budget", int):
        return
    with pytest.raises(UsageError, match=option) as caught:
        Options.make({option: bad})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_numbers_of_numpy_are_numbers() -> None:
    assert Budget(np.float32(2), workers=np.int64(2)) == Budget(2.0, workers=2)
    assert Budget.parse(np.float32(2)) == Budget(2.0)


def test_a_budget_reads_a_text() -> None:
    assert Budget("3s") == Budget(3.0) and Budget("1m30s", workers=2) == Budget(90.0, workers=2)
    assert Budget("20s/5m") == Budget("20s", total="5m") == Budget(20.0, total=300.0)
    with pytest.raises(UsageError, match="budget: found 'soon'; allowed"):
        Budget("soon")


@pytest.mark.parametrize(
    ("text", "remat"), [("off", None), ("On", "regions"), ("Auto ", "auto"), ("regions", "regions")]
)
def test_recomputation_by_the_environment(text: str, remat: str | None, monkeypatch) -> None:
    monkeypatch.setenv("MIRAGE_JAX_REMAT", text)
    assert from_environment()[0].remat == remat


def test_habits_of_other_tools() -> None:
    assert Options.make({"remat": True}) == Options.make({"remat": "regions"})
    assert Options.make({"remat": False}).remat is None and Options.make({"remat": None}).remat == "auto"
    assert Options.make({"devices": 0}).devices == Options.make({"devices": np.int64(0)}).devices == (0,)
