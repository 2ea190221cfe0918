"""muGraphs as users handle them: read from text, run as JAX functions, compared with JAX functions by proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp

from mirage_jax.compiler.winner import Family, Winner
from mirage_jax.errors import GraphError, MirageError, ParseError, UsageError, without_kind
from mirage_jax.hardware.device_model import device_for
from mirage_jax.jaxpr_frontend.jax_compat import default_platform
from mirage_jax.jaxpr_frontend.partition.one_graph import captured_whole
from mirage_jax.limits import brief
from mirage_jax.mugraph.dtypes import DTYPES, numpy_dtype
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Schedule
from mirage_jax.mugraph.passes.aligned import aligned, shape_of
from mirage_jax.mugraph.schedule_json import read_graph
from mirage_jax.mugraph.views import View
from mirage_jax.search.candidates import tiled
from mirage_jax.verify.equivalence.certificate import certify
from mirage_jax.verify.gate import Verdict

type Spec = tuple[tuple[int, ...], str]  # shape, and type as muGraphs name it


@dataclass(frozen=True)
class MuGraph:
    """A muGraph that somebody wrote, or copied from a report. `str` gives its text, which `parse` reads back."""

    graph: KernelGraph
    schedule: Schedule | None = field(default=None, repr=False)  # tile sizes; None: the cost model chooses

    @classmethod
    def parse(cls, text: str, schedule: Any = None) -> Self:
        """Read the text form, as `explain` prints it.

        Args:
            text: ``mugraph { ... }``.
            schedule: tile sizes of the kernels, as values of JSON; None lets the cost model choose on a GPU.

        Raises:
            UsageError: the text is no muGraph, or it is not well formed; the message names the line or the kernel.
        """
        if not isinstance(text, str):
            raise UsageError(f"MuGraph.parse: found {brief(text)}; it takes the text of a muGraph")
        try:
            return cls(*read_graph(text, schedule))
        except (ParseError, GraphError) as why:
            raise UsageError(f"MuGraph.parse: {without_kind(why)}") from None

    def __str__(self) -> str:
        return str(self.graph)

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the inputs, in order."""
        return tuple(jax.ShapeDtypeStruct(shape, numpy_dtype(dtype)) for shape, dtype in self._specs)

    @property
    def _specs(self) -> tuple[Spec, ...]:
        return tuple((shape_of(self.graph, t.axes), t.dtype) for t in self.graph.inputs)

    def as_function(self) -> Callable[..., Any]:
        """Make a function of arrays that runs the graph under `jax.jit`.

        On a GPU its kernels run as Triton kernels; elsewhere everything is plain JAX. The function takes one array for
        each input, in order, of the input's shape and type. It returns an array, or a tuple if the graph has several
        outputs. Nothing checks rounding or speed here.

        The function raises `UsageError` for other arrays, and on a GPU if no tile sizes fit the device.
        """
        graph, specs = self.graph, self._specs
        types = [graph.tensors[name].dtype for name in graph.outputs]

        def run(*arrays: Any) -> Any:
            """Run the muGraph."""
            check_arrays("MuGraph", arrays, specs)
            results = self._winner().run(*map(jnp.asarray, arrays))
            made = tuple(x.astype(numpy_dtype(t)) for x, t in zip(results, types, strict=True))
            return made[0] if len(made) == 1 else made

        return jax.jit(run)

    def _winner(self) -> Winner:
        """The graph as a region's winner, for the platform of this process."""
        graph = self.graph
        platform = "cuda" if default_platform() in ("gpu", "cuda") else "cpu"
        has_kernels = any(isinstance(k, BlockGraph) for k in graph.kernels)
        schedule = self.schedule or Schedule(())
        if platform == "cuda" and has_kernels and self.schedule is None:
            found = tiled(graph, Family.KERNELS, (), device_for(jax.local_devices(backend=platform)[0]))
            if found is None:
                raise UsageError("MuGraph: no tile sizes of a kernel fit this GPU; pass `schedule` to MuGraph.parse")
            schedule = found.schedule
        views = tuple(View(shape, (), shape) for shape, _ in self._specs)
        shapes_out = tuple(shape_of(graph, graph.tensors[name].axes) for name in graph.outputs)
        family = Family.KERNELS if has_kernels else Family.ALGEBRA
        return Winner(graph, schedule, views, shapes_out, family, platform)

    def equals(self, f: Callable[..., Any], *shapes: Any, inputs: Sequence[int] | None = None) -> Verdict:
        """Prove or disprove that the graph computes what a JAX function computes, in exact arithmetic.

        Args:
            f: the function. It has to be one muGraph: no control flow, and arrays as results.
            shapes: the arguments of `f`: arrays, `jax.ShapeDtypeStruct`s, or tuples of sizes, which get the type of
                the graph's input. Without any: the shapes of the graph's inputs.
            inputs: for each input of the graph, the number of the argument that it is, from 0. Default: in order.

        Returns:
            A verdict, true if the graphs are equal. Its text is the certificate, with the probability that it is
            wrong, or the reason.

        Raises:
            UsageError: `f` does not take such arguments, or is not one muGraph.
        """
        if not callable(f):
            raise UsageError(f"MuGraph.equals: found {brief(f)}; it takes a function and the shapes of its arguments")
        order = self._order(inputs)
        specs = _arguments(shapes, self._specs, order)
        found = captured_whole(f, specs)
        reference = _reordered(found.graph, order)
        try:
            return Verdict(True, str(certify(aligned(reference, self.graph), self.graph)))
        except MirageError as why:
            return Verdict(False, without_kind(why) + _hint(found.read_order, order))

    def _order(self, inputs: Sequence[int] | None) -> tuple[int, ...]:
        count = len(self.graph.inputs)
        order = tuple(range(count)) if inputs is None else tuple(inputs)
        if sorted(order) != list(range(count)):
            raise UsageError(f"inputs: found {brief(inputs)}; allowed are the numbers from 0 to {count - 1}, once each")
        return order


def check_arrays(whose: str, arrays: Sequence[Any], specs: Sequence[Spec]) -> None:
    """Check the shapes and types of arrays.

    Raises:
        UsageError: they are others than `whose` inputs.
    """
    wanted = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in specs)
    found = [(jnp.shape(x), jnp.result_type(x)) for x in arrays]
    if found != [(shape, numpy_dtype(dtype)) for shape, dtype in specs]:
        shown = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in found)
        raise UsageError(f"{whose}: found the arrays {shown or 'none'}; its inputs are {wanted}")


def _arguments(shapes: Sequence[Any], inputs: Sequence[Spec], order: Sequence[int]) -> list[Spec]:
    """Shapes and types of the function's arguments."""
    own = [inputs[order.index(n)] for n in range(len(inputs))]
    if not shapes:
        return own
    if len(shapes) != len(own):
        raise UsageError(f"MuGraph.equals: found {len(shapes)} shapes; the graph has {len(own)} inputs")
    return [spec_of("MuGraph.equals", x, dtype) for x, (_, dtype) in zip(shapes, own, strict=True)]


def spec_of(taker: str, x: Any, dtype: str) -> Spec:
    """The shape and type of an array; a tuple of sizes gets the type `dtype`.

    Raises:
        UsageError: it is neither; the message says that `taker` found it.
    """
    if _is_shape(x):
        return tuple(x), dtype
    names = {d.numpy: name for name, d in DTYPES.items()}
    if not hasattr(x, "shape") or getattr(x, "dtype", None) not in names:
        raise UsageError(f"{taker}: found {brief(x)}; allowed are arrays, types, and shapes such as (16, 8)")
    return tuple(x.shape), names[x.dtype]


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple | list) and all(isinstance(n, int) for n in x)


def _reordered(graph: KernelGraph, order: Sequence[int]) -> KernelGraph:
    inputs = tuple(graph.inputs[n] for n in order)
    return KernelGraph(inputs, graph.kernels, graph.outputs, graph.extents)


def _hint(read_order: Sequence[int], order: Sequence[int]) -> str:
    """Where a graph comes from a report, its inputs have another order than the arguments."""
    if tuple(read_order) == tuple(order):
        return ""
    return f" (a graph that `explain` printed has its inputs in another order: pass inputs={tuple(read_order)})"
