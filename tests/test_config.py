"""Options: what is accepted, and that what is refused names what was found and what is allowed."""

import logging
import threading

import pytest

from mirage_jax import config
from mirage_jax.config import Budget, Options, disabled, is_disabled
from mirage_jax.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("500ms", 0.5), ("2m", 120), ("2 min", 120), ("1H", 3600), ("1.5", 1.5), (7, 7), (None, 30)],
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
        ({"remat": "region"}, "remat: 'region'. Did you mean 'regions'[?] Allowed: regions"),
        ({"remat": True}, "remat: True. Allowed: regions"),
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
