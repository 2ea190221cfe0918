"""What runs in the place of a region, on every platform, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp

from mirage_jax.lower import launch
from mirage_jax.lower.frame import Options as EmitOptions
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json
from mirage_jax.mugraph.thread import thread_graphs

# A float32 product that asks for more than the default precision is not captured, and XLA's default on GPUs is tf32
# too.
KERNEL_OPTIONS = EmitOptions(dot_precision="tf32")


@dataclass(frozen=True)
class Winner:
    """A muGraph that runs in place of a region. Takes and returns arrays in the layout of the region's own graph."""

    graph: KernelGraph
    schedule: Schedule
    shapes_in: tuple[tuple[int, ...], ...]  # of the merged graph's inputs and of the region's outputs
    shapes_out: tuple[tuple[int, ...], ...]
    family: str
    platform: str
    directory: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """What another process needs to run it: the graph as text, the schedule and the family."""
        return {"graph": str(self.graph), "schedule": schedule_to_json(self.schedule), "family": self.family}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], platform: str) -> Self:
        """A winner over its graph's own inputs and outputs, without the border of a region."""
        graph = parse(value["graph"])
        tensors = [graph.tensors[n] for n in graph.outputs]
        shapes_in, shapes_out = (tuple(tuple(map(graph.extent, t.axes)) for t in ts) for ts in (graph.inputs, tensors))
        return cls(graph, schedule_from_json(value["schedule"]), shapes_in, shapes_out, str(value["family"]), platform)

    def portable(self, *arrays: jax.Array) -> list[jax.Array]:
        """As plain JAX: every backend, and the meaning of the kernels."""
        widen = self.platform == "cpu"
        return self._shaped(lambda xs: evaluate.run(self.graph, xs, xp=jnp, dtype=None, widen=widen), arrays)

    def _kernels(self, *arrays: jax.Array) -> list[jax.Array]:
        def run(xs: list[jax.Array]) -> list[jax.Array]:
            libraries = _run_library(self.graph)
            return launch.run_cuda(
                self.graph, self.schedule, xs, libraries, directory=self.directory, options=KERNEL_OPTIONS
            )

        return self._shaped(run, arrays)

    @property
    def cuda(self) -> Callable[..., list[jax.Array]] | None:
        """As Triton kernels; None if every operator is a library operator, which XLA runs best itself."""
        return self._kernels if self.family == "kernels" else None

    @property
    def run(self) -> Callable[..., list[jax.Array]]:
        """What runs on the winner's own platform."""
        return self._kernels if self.platform == "cuda" and self.cuda is not None else self.portable

    def _shaped(
        self, run: Callable[[list[jax.Array]], list[jax.Array]], arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        inputs = [jnp.reshape(x, shape) for x, shape in zip(arrays, self.shapes_in, strict=True)]
        return [jnp.reshape(y, shape) for y, shape in zip(run(inputs), self.shapes_out, strict=True)]


def _run_library(graph: KernelGraph) -> Callable[..., Any]:
    """Runs one library operator of a graph with XLA."""

    def run(kernel: Any, tensors: Mapping[str, Any]) -> Any:
        inputs = tuple(graph.tensors[n] for n in dict.fromkeys(load.tensor for load in kernel.loads))
        alone = KernelGraph(inputs, (kernel,), (kernel.result.name,), graph.extents)
        return evaluate.run(alone, [tensors[t.name] for t in inputs], xp=jnp, dtype=None)[0]

    return run


def readable(w: Winner) -> str:
    """The text of a winner's kernels; for algebra, the muGraph that JAX runs operator by operator."""
    threads = [f"{k.name}: {t}" for k in w.graph.kernels if isinstance(k, BlockGraph) for t in thread_graphs(k)]
    head = "".join(f"# {line}\n" for line in (*str(w.graph).splitlines(), *threads))
    if w.cuda is None:
        return head
    return head + "\n\n".join(s.text for s in launch.sources(w.graph, w.schedule, KERNEL_OPTIONS) if s is not None)
