"""Prices of kernels in a search: bounds hold, equal demands are priced once, and nothing outlives a search."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
from search.references import H200, captured, found

from mirage_jax.bench.programs import attention, gated_mlp, lora, rmsnorm
from mirage_jax.cost.outline import Outline, outline
from mirage_jax.cost.roofline import extents_inside, least_seconds, terms
from mirage_jax.cost.tilings import known_tilings, tilings
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.search.enumerate.window_search import Search

PROGRAMS = {
    "rmsnorm": (rmsnorm, [(16, 512), (512, 384)]),
    "lora": (lora, [(16, 256), (256, 512), (256, 16), (16, 512)]),
    "gated_mlp": (gated_mlp, [(8, 512), (512, 512), (512, 512)]),
    "attention": (attention, [(2, 64, 64), (2, 64, 512), (2, 512, 64)]),
}


@pytest.fixture(params=PROGRAMS)
def reference(request: pytest.FixtureRequest):
    fn, shapes = PROGRAMS[request.param]
    return captured(fn, *shapes, dtype="float16")


def first_outline(reference: KernelGraph) -> Outline:
    """Of the best kernel."""
    return next(outline(k, c.graph) for c in found(reference)[0] for k in c.graph.kernels if isinstance(k, BlockGraph))


def renamed(o: Outline) -> Outline:
    """The same kernel with other names, and its operators in another order."""
    return replace(o, reads=tuple(replace(r, tensor=f"other_{r.tensor}") for r in o.reads), work=o.work[::-1])


def test_equal_demands_have_equal_tilings_and_bounds_hold(reference) -> None:
    known = {}
    for c in found(reference)[0]:
        parts = dict(c.schedule.parts)
        for kernel in c.graph.kernels:
            if not isinstance(kernel, BlockGraph):
                continue
            o, extent = outline(kernel, c.graph), extents_inside(kernel, c.graph, parts)
            alone = tilings(o, extent, frozenset(c.single), H200)
            assert alone == list(known_tilings(o, extent, frozenset(c.single), H200, known))
            assert renamed(o).demand == o.demand
            again = tilings(renamed(o), extent, frozenset(c.single), H200)
            assert sorted(t.seconds for t in again) == pytest.approx(sorted(t.seconds for t in alone), rel=1e-9)
            blocks = math.prod(map(extent, kernel.grid))
            for t in alone:
                traffic = terms(o, extent, dict(t.schedule.tiles).__getitem__).traffic
                assert t.seconds >= least_seconds(traffic, blocks, H200) * (1 - 1e-9)


def test_other_demands_are_told_apart(reference) -> None:
    o = first_outline(reference)
    others = [
        replace(o, grid=o.grid[::-1]) if len(o.grid) > 1 else replace(o, grid=()),
        replace(o, reads=(replace(o.reads[0], width=o.reads[0].width + 1), *o.reads[1:])),
        replace(o, work=(*o.work, o.work[-1])),
        replace(o, writes=()),
        replace(o, loop="another"),
    ]
    assert all(x.demand != o.demand for x in others)


def test_a_tensor_that_is_read_twice_is_one_tensor(reference) -> None:
    """It goes through memory once: two tensors of its size ask for more."""
    o = first_outline(reference)
    twice = replace(o, reads=(*o.reads, o.reads[0]))
    two = replace(o, reads=(*o.reads, replace(o.reads[0], tensor="another")))
    assert twice.demand != two.demand


def test_nothing_outlives_a_search(reference) -> None:
    """Millions of tuples in cycles would be walked over by the garbage collector, again and again."""
    search = Search(reference, H200, Space(max_ops=9))
    gc.disable()
    try:
        assert search.run()
        tables = [weakref.ref(x) for x in (search, search.e, search.tables[-1])]
        del search
        assert not any(x() for x in tables)
    finally:
        gc.enable()
