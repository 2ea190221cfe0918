"""Searches that begin before their region's turn: the same candidates, and no harm where one fails or ends early."""

import math
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from search.references import H200, TWO_KERNELS, captured

from mirage_jax.audit.differential import Outcome, Setting, Unmeasured
from mirage_jax.compiler import tuning_session
from mirage_jax.compiler.budget_split import shares
from mirage_jax.compiler.search_ahead import SearchAhead
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.search.decompose import subprocesses
from mirage_jax.search.decompose.subprocesses import SubSearch
from mirage_jax.search.driver import search_region


@contextmanager
def searching(tasks: dict[str, SubSearch], workers: int = 2):
    ahead = SearchAhead(tasks, workers)
    try:
        yield ahead
    finally:
        ahead.end()


@pytest.fixture(scope="module")
def gated() -> SubSearch:
    graph = captured(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (64, 256), (256, 128), (256, 128))
    return SubSearch(graph, H200, TWO_KERNELS, 1_000_000, ("algebra", "kernels"), 30.0, workers=2)


def test_what_is_taken_is_what_a_search_here_finds(gated: SubSearch) -> None:
    here, _ = search_region(gated)
    with searching({"gated": gated}) as ahead:
        assert ahead.best("another") is None and ahead.take("another") is None
        found, report = ahead.take("gated")
        assert [str(c.graph) for c in found[:8]] == [str(c.graph) for c in here[:8]]
        assert report.plans and ahead.best("gated") == min(c.seconds for c in here)


def test_a_region_whose_turn_comes_first_is_searched_by_whoever_asks(gated: SubSearch) -> None:
    with searching({"gated": gated, "waiting": gated}, workers=1) as ahead:
        assert ahead.best("gated") is None
        assert ahead.take("waiting") is None
        assert ahead.take("gated") is not None


def test_a_process_that_fails_leaves_the_search_to_others(gated: SubSearch, monkeypatch) -> None:
    def fails(*args, **kwargs):
        raise subprocess.CalledProcessError(1, "python")

    monkeypatch.setattr(subprocesses.subprocess, "Popen", fails)
    with searching({"gated": gated}) as ahead:
        assert ahead.take("gated") is None and ahead.best("gated") is None


def test_the_end_does_not_wait_for_a_search(gated: SubSearch) -> None:
    began = time.monotonic()
    with searching({"gated": replace(gated, seconds=1000.0), "waiting": gated}, workers=1) as ahead:
        while not ahead._processes._running:
            time.sleep(0.01)
        ahead.end()
        assert ahead.take("gated") is None and ahead.take("waiting") is None
    assert time.monotonic() - began < 30.0


class OnH200(Unmeasured):
    """A compiler that takes this machine for one with an H200."""

    def devices(self, platform: str):
        return super().devices("cpu")


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def test_regions_of_a_function_are_searched_ahead(monkeypatch) -> None:
    def both(q, k, v):
        return jnp.sort(attention(q, k, v)) + jnp.sort(jnp.cumsum(attention(q[:32], k, v)[:1], 1))

    shapes = [jax.ShapeDtypeStruct((64, 16), "float32")] * 3
    regions = {r.text: r for r in analyse(jax.make_jaxpr(both)(*shapes)).regions}
    compiler = OnH200(Setting("H200"), Outcome())
    compiler.options = replace(compiler.options, budget=replace(compiler.options.budget, workers=2))
    assert len(regions) == 2
    with compiler._searching_ahead(regions, "cuda", 20.0):
        assert compiler.ahead is not None

        def never(*args):
            raise AssertionError("searched once more")

        monkeypatch.setattr(tuning_session, "search_region", never)
        sessions = {text: compiler.session(r, "cpu", compiler.devices("cuda")) for text, r in regions.items()}
        taken = {text: compiler.ahead.take(text) for text in regions}
        assert all(found[0] for found in taken.values())
        ahead, known = compiler.ahead, dict.fromkeys(regions, 1.0)
        for text, session in sessions.items():
            session.ahead = ahead
            assert session.searched(session.families, 5.0, lambda *_: None) == taken[text]
            saving = compiler._saving(known, regions, dict.fromkeys(regions, 2), "cpu", text)
            assert saving == pytest.approx(2 * session.headroom(None, ahead.best(text)))
    assert compiler.ahead is None
    assert compiler._saving(known, regions, dict.fromkeys(regions, 2), "cpu", text) == 1.0


def test_what_the_model_does_not_promise_counts_a_little() -> None:
    shapes = [jax.ShapeDtypeStruct((64, 16), "float32")] * 3
    (region,) = analyse(jax.make_jaxpr(attention)(*shapes)).regions
    session = OnH200(Setting("H200"), Outcome()).session(region, "cpu", jax.devices("cpu"))
    possible = session.headroom(1e-3)
    assert session.headroom(1e-3, best=0.9e-3) == pytest.approx(0.1e-3)
    assert session.headroom(1e-3, best=math.inf) == pytest.approx(0.1 * possible)
    assert session.headroom(1e-3, best=0.0) == possible


def test_turns_follow_what_is_known_by_then() -> None:
    known = {"a": 5.0, "b": 3.0, "c": 2.0}
    turns = shares(known, lambda text: known[text])
    assert next(turns) == ("a", 0.5)
    known["c"] = 9.0
    assert list(turns) == [("c", 0.75), ("b", 1.0)]
