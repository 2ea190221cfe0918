"""Programs as the search gets them: captured from plain JAX functions, over as few axes as possible."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax.bench.programs import program
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.product_boundaries import ProductBoundaries
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Schedule
from mirage_jax.mugraph.passes.merge_axes import merge_axes
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.search.report import SearchReport

type Shape = tuple[int, ...]

H200 = DEVICES["H200"]
TWO_KERNELS = Space(max_ops=14, max_kernels=2)
# one program of each structure of the benchmark
NAMES = ["rmsnorm_b1", "lora_b1", "gated_mlp_b1", "ntrans_b1", "gqa_b1", "qknorm_gqa_b1", "mlp", "moe", "abv"]
NAMES += ["linear_attention"]


def region(fn: Callable[..., Any], *shapes: Shape, dtype: str = "float32") -> Region:
    """A function of arrays of these shapes as one region, be it worth it or not; its values are numbered as the
    arguments are.
    """
    specs = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes]
    with patch.object(ProductBoundaries, "pairs", ()), patch.object(ProductBoundaries, "pays", lambda *_: True):
        (only,) = analyse(jax.make_jaxpr(fn)(*specs).jaxpr).regions
    return only


def captured(fn: Callable[..., Any], *shapes: Shape, dtype: str = "float32") -> KernelGraph:
    """Its graph, over as few axes as possible."""
    return merge_axes(region(fn, *shapes, dtype=dtype).graph)


def reference(name: str, small: bool = False) -> KernelGraph:
    """A program of the benchmark at its own sizes, or at those for tests."""
    p = program(name, small)
    return captured(p.fn, *(shape for _, shape in p.shapes), dtype=p.dtype)


def found(graph: KernelGraph, space: Space = TWO_KERNELS) -> tuple[list[Candidate], SearchReport]:
    """Candidates for an H200, best first."""
    return search(graph, H200, space, seconds=120.0)


def kernels_of(candidates: list[Candidate], number: int, split: str | None = None) -> Iterator[KernelGraph]:
    """Graphs of so many graph-defined kernels; with axis `split` divided over the grid, or none."""
    axes = (split,) if split else ()
    for c in candidates:
        if c.family == "kernels" and len(c.graph.kernels) == number and c.graph.split_axes == axes:
            yield c.graph


def blocks(graph: KernelGraph) -> list[BlockGraph]:
    assert all(isinstance(k, BlockGraph) for k in graph.kernels)
    return list(graph.kernels)  # type: ignore[arg-type]


def worst_error(graph: KernelGraph, schedule: Schedule | None, reference: KernelGraph, positive: bool = False) -> float:
    """Largest error of a graph, tile by tile in float64, relative to the reference's largest output."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([reference.extent(a) for a in t.axes]) for t in reference.inputs]
    arrays = [np.abs(x) if positive else x for x in arrays]
    arrays = [x > -1 if t.dtype == "bool" else x for x, t in zip(arrays, reference.inputs, strict=True)]
    have, want = ([1.0 * y for y in run(g, arrays, s)] for g, s in ((graph, schedule), (reference, None)))
    return max(float(np.abs(h - w).max() / (np.abs(w).max() or 1.0)) for h, w in zip(have, want, strict=True))


def ticking(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on so many seconds pass between two looks at the clock, on any machine."""
    began, looks = time.monotonic(), itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: began + seconds * next(looks))
