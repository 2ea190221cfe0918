"""A compiler that replaces every region by an evaluation of its reference muGraph, and remembers what it saw."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax.bench import compile_suite
from mirage_jax.jaxpr_frontend.capture.call_primitive import capture
from mirage_jax.jaxpr_frontend.partition.regions import MAX_REGION_OPERATORS, Analysis, analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.dtypes import numpy_dtype
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse


@dataclass(frozen=True)
class Evaluated(compile_suite.Evaluated):
    """A reference graph evaluated without rounding in between: in f32, or f64 if it has any."""

    def portable(self, *tensors: Any) -> list[Any]:
        kinds = {t.name: numpy_dtype(t.dtype) for t in self.graph.tensors.values()}
        wide = "float64" if np.float64 in kinds.values() else "float32"
        results = run(self.graph, tensors, xp=jnp, dtype=wide)
        return [jnp.asarray(x, kinds[name]) for x, name in zip(results, self.graph.outputs, strict=True)]


@dataclass(frozen=True, eq=False)
class Replacing(compile_suite.ReplacesAll):
    """Replaces all regions. `regions` grows with every region that is lowered."""

    regions: list[Region] = field(default_factory=list)

    def compile_region(self, region: Region, platforms: tuple[str, ...] = ()) -> Evaluated:
        self.regions.append(region)
        check(region.graph)
        return Evaluated(region.graph)


@dataclass(frozen=True, eq=False)
class Picky(Replacing):
    """Replaces only regions that it `takes`."""

    takes: Callable[[Region], bool] = lambda region: False

    def compile_region(self, region: Region, platforms: tuple[str, ...] = ()) -> Any:
        return super().compile_region(region, platforms) if self.takes(region) else None


def check(graph: KernelGraph) -> None:
    check_graph(graph)
    assert parse(str(graph)) == graph


def optimized(fn: Callable[..., Any], compiler: Replacing | None = None, **jit_options: Any) -> Any:
    return jax.jit(capture(fn, compiler or Replacing()), **jit_options)


def analysis(fn: Callable[..., Any], *args: Any, max_ops: int = MAX_REGION_OPERATORS) -> Analysis:
    found = analyse(jax.make_jaxpr(fn)(*args), max_ops)
    for region in found.regions:
        check(region.graph)
    return found


def random(*shape: int, dtype: Any = "float32", seed: int = 0, scale: float = 0.3) -> jax.Array:
    rng = np.random.default_rng((seed, *shape))
    return jnp.asarray(rng.normal(size=shape) * scale, dtype)


def assert_close(have: Any, want: Any, tolerance: float = 1e-4) -> None:
    def one(a: Any, b: Any) -> None:
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max(initial=0))))

    jax.tree.map(one, have, want)


def oracle(region: Region, operands: Sequence[Any]) -> list[Any]:
    """Results of the region's graph in float64."""
    tensors = [np.asarray(x) for x in region.prepare(operands)]
    return region.finish([jnp.asarray(t) for t in run(region.graph, tensors)])
