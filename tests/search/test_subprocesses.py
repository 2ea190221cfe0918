"""Parts of a region in processes of their own: the same answer, and no harm where a process fails."""

import subprocess
from dataclasses import replace

import jax
import pytest
from search.references import H200, TWO_KERNELS, captured

from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.search.candidates import kind
from mirage_jax.search.decompose import subprocesses
from mirage_jax.search.decompose.subprocesses import SubSearch, search_parts
from mirage_jax.search.driver import is_narrow, search
from mirage_jax.search.report import StopReason


def of(graph: KernelGraph) -> SubSearch:
    return SubSearch(graph, H200, TWO_KERNELS, 1_000_000, ("algebra", "kernels"))


@pytest.fixture(scope="module")
def two() -> list[SubSearch]:
    fns = (lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), lambda x, w, v: (x @ w) @ v.T)
    return [of(captured(fn, (64, 256), (256, 128), (256, 128))) for fn in fns]


def test_same_in_processes(two: list[SubSearch], caplog) -> None:
    here, apart = search_parts(two, 30.0), search_parts(two, 30.0, workers=2)
    assert all(candidates for candidates, _ in here) and not caplog.records
    assert [cs[:8] for cs, _ in here] == [cs[:8] for cs, _ in apart]
    for (all_of, _), (told, _) in zip(here, apart, strict=True):
        assert {(c.family, kind(c)) for c in told} == {(c.family, kind(c)) for c in all_of}, "what the driver looks for"
    for (_, a), (_, b) in zip(here, apart, strict=True):
        assert (a.plans, a.structures, a.stop, b.stop) == (b.plans, b.structures, *[StopReason.EXHAUSTED] * 2)
        assert a.fired == b.fired and a.pruned == b.pruned and a.space == b.space


def test_a_process_that_fails_costs_nothing_but_time(two: list[SubSearch], monkeypatch, caplog) -> None:
    def fails(*args, **kwargs):
        raise subprocess.CalledProcessError(1, "python")

    monkeypatch.setattr(subprocesses.subprocess, "Popen", fails)
    assert [len(cs) for cs, _ in search_parts(two, 30.0, workers=2)] == [len(cs) for cs, _ in search_parts(two, 30.0)]
    assert "a search process failed" in caplog.text


def test_the_driver_divides_what_is_wide(caplog) -> None:
    def three(x, w, v, u):
        def norm(y):
            return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)

        return norm(x @ w) @ norm(x @ v).T @ norm(x @ u)

    graph = captured(three, (64, 48), (48, 40), (48, 40), (48, 40))
    assert not is_narrow(graph, H200, TWO_KERNELS)
    (one, a), (two, b) = (search(graph, H200, TWO_KERNELS, 60.0, workers=n) for n in (1, 2))
    assert a.windows == b.windows > 1
    assert one == two and not caplog.records


def test_the_best_of_each_kind_is_told(two: list[SubSearch], monkeypatch) -> None:
    """However slow it is alone: beside other parts it may be what they are."""
    monkeypatch.setattr(subprocesses, "MAX_RETURNED_CANDIDATES", 1)
    for part in two:
        candidates, report = subprocesses.search_part(replace(part, seconds=30.0))  # to its end, also on a busy machine
        told, _ = subprocesses.found_from_text(subprocesses.found_to_text((candidates, report)))
        best = {(c.family, kind(c)): c for c in reversed(candidates)}
        assert len(best) > 2 and told == sorted(best.values(), key=candidates.index)


def test_small_parts_begin_and_wide_ones_end(two: list[SubSearch], monkeypatch) -> None:
    """Results keep the order of the parts. A wide part has no share until all others have ended."""
    begun: list[SubSearch] = []

    def search_part(part: SubSearch, notify=None):
        begun.append(part)
        return [part], None

    monkeypatch.setattr(subprocesses, "search_part", search_part)
    large, small = two
    parts = [replace(small, is_wide=True), large, small]
    assert [part.graph for (part,), _ in search_parts(parts, 30.0)] == [p.graph for p in parts]
    assert [(p.graph, p.is_wide) for p in begun] == [(small.graph, False), (large.graph, False), (small.graph, True)]
    assert [round(p.seconds) for p in begun] == [15, 30, 30]
