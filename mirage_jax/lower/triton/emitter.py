"""Source text of one kernel from one block graph at concrete sizes (Mirage, section 6).

`emit` is pure: the same graph, sizes and options give the same text, and no name of the graph gets into it unsanitized.
A block graph becomes text in this way:

* every value is a tile whose dimensions follow one order of axes (`tiling`), so broadcasting is indexing with None;
* accumulators are carried by loops (`loops`). Everything else is emitted where it is first needed (`context`), by the
  function of its operator (`ops`): loop-invariant loads before the loop, epilogue operands after it;
* a chain of pointwise operators is a chain of lines over registers: the thread graph;
* all arithmetic is f32, except that matrix products may have 16-bit operands (`ops.products`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.hopper.kernel import GluonKernel
from mirage_jax.lower.hopper.shared_memory import Descriptor
from mirage_jax.lower.hopper.warpgroups import WARPGROUP_WARPS
from mirage_jax.lower.tiling import Tiling, stored_shape
from mirage_jax.lower.triton.expressions import Number, TileVariable, meanings, reduction
from mirage_jax.lower.triton.frame import DEFAULT_OPTIONS, PLAIN, EmitOptions, Form
from mirage_jax.lower.triton.loops import Loops
from mirage_jax.lower.triton.ops.softmax import lows
from mirage_jax.lower.triton.rewrites import move_factors_after_products, move_scales_into_exponentials
from mirage_jax.lower.triton.two_forms import is_clear, minimum_of, write_choice
from mirage_jax.lower.triton.writer import Writer
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule, Precision
from mirage_jax.mugraph.passes.sentinels import Guard, guarded, with_short_steps

__all__ = ["DEFAULT_OPTIONS", "EmitOptions", "KernelSource", "emit"]


@dataclass(frozen=True)
class KernelSource:
    """A kernel ready to be loaded: text, launch grid and the device tensors that it takes, inputs before outputs."""

    name: str
    text: str
    grid: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]  # of inputs, then of outputs
    shapes: tuple[tuple[int, ...], ...]  # of outputs, in memory order
    num_warps: int
    num_stages: int
    numbers: Mapping[float, Number | None] = field(default_factory=dict, compare=False)
    """What literals of the text stand for exactly, where they are not what they say; None: more than one number."""
    descriptors: tuple[Descriptor | None, ...] = ()
    """Of a kernel in Gluon: the inputs that it takes as descriptors for the copy engine."""
    rewrites: bool = False
    """May a program write its results a second time?"""

    @cached_property
    def digest(self) -> str:
        """Name the text by its hash."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def emit(
    kernel: BlockGraph,
    graph: KernelGraph,
    schedule: KernelSchedule,
    parts: Mapping[Axis, int],
    options: EmitOptions = DEFAULT_OPTIONS,
) -> KernelSource:
    """Write the text of `kernel` inside `graph`, at the graph's extents and the schedule's tiles.

    Raises `UnsupportedError` for structures that the emitter does not write, `LoweringError` for impossible sizes.
    """

    def writer(kernel: BlockGraph, form: Form = PLAIN) -> TritonKernel | GluonKernel:
        if schedule.precise > Precision.FAST:
            kernel = move_factors_after_products(kernel, graph)
        sizes = with_short_steps(schedule, kernel) if form.is_complete else schedule
        tiling = Tiling(move_scales_into_exponentials(kernel), graph, sizes, parts)
        tiling.check()
        if schedule.programs and not schedule.specialized:
            raise UnsupportedError("only programs with specialized warps compute several blocks")
        return (GluonKernel if schedule.specialized else TritonKernel)(tiling, options, form)

    forms = guarded(kernel)
    if forms is None:
        return _write(writer(kernel))
    if not options.skips:
        return _write(writer(kernel, Form("_complete", is_complete=True)))
    skipping = writer(forms.skipping, Form("_skipping", forms.guards))
    complete = writer(kernel, Form("_complete", is_complete=True, fresh="fresh" if forms.guards else ""))
    if isinstance(skipping, GluonKernel) and isinstance(complete, GluonKernel):
        return _both_gluon_forms(skipping, complete, forms.tensor_guards)
    return _both_triton_forms(skipping, complete, forms.tensor_guards)


class TritonKernel(Loops):
    """One function whose warps all do the same."""

    def function(self, name: str) -> str:
        """Write the function: indices, then loops by depth, then the stores after them."""
        live, tensors = self.live(), self.tiling.graph.tensors
        for text in ("import triton", "import triton.language as tl", "", "", "@triton.jit"):
            self.w.line(text)
        fresh = [self.w.name(self.form.fresh)] if self.form.fresh else []
        with self.w.block(f"def {name}({', '.join((*self.arguments.values(), *fresh))}):"):
            self.header([tensors[t] for t in self.arguments])
            self.blocks()
            for axis in self.axes.values():
                if axis.axis != self.graph.loop:
                    self.index(axis)
            for depth in sorted({self.graph.stages[n].depth for n in self.targets(live)}):
                for group in self.loops(depth, live):
                    self.loop(group)
            for store in self.graph.stores:
                if not self.graph.stages[store.value].body:
                    self.store(store)
            if self.form.guards:
                self.w.line(f"return {self.w.let('low', self._any_low())}")
        return self.w.text()

    def _any_low(self) -> str:
        """More than 0 if a guard fails in this block. It comes after the stores, because all warps wait for it."""
        dims = {shift: self.tiling.dims(self.graph.axes_of[shift]) for shift in lows(self)}
        return " | ".join(reduction("tl.max", TileVariable(text, dims[s]), dims[s]) for s, text in lows(self).items())


type Kernel = TritonKernel | GluonKernel


def _write(kernel: Kernel) -> KernelSource:
    kernel.name_arguments()
    name = kernel.w.name(kernel.name)
    return _source(kernel, name, kernel.function(name))


def _source(kernel: Kernel, name: str, text: str) -> KernelSource:
    """The source of a kernel whose text is written."""
    tiling, inputs, outputs = kernel.tiling, kernel.inputs, kernel.outputs
    graph, schedule = tiling.graph, tiling.schedule
    return KernelSource(
        name, text, (tiling.launched,), inputs, outputs,
        tuple(graph.tensors[t].dtype for t in (*inputs, *outputs)),
        tuple(stored_shape(s.tensor, graph, tiling.parts) for s in kernel.graph.stores),
        WARPGROUP_WARPS if schedule.specialized else schedule.num_warps, schedule.num_stages,
        {x: next(iter(meant)) if len(meant) == 1 else None for x, meant in kernel.numbers.items()},
        kernel.descriptors if isinstance(kernel, GluonKernel) else (), bool(kernel.form.guards),
    )  # fmt: skip


def _both_triton_forms(skipping: Kernel, complete: Kernel, guards: Sequence[Guard]) -> KernelSource:
    """Two functions and one that calls them: the skipping form, and the complete one for blocks where it is wrong."""
    own, other = _write(skipping), _write(complete)
    inputs = tuple(dict.fromkeys((*own.inputs, *other.inputs)))
    names = {name: f"in{n}" for n, name in enumerate((*inputs, *(minimum_of(g.shift) for g in guards)))}
    outputs = {name: f"out{n}" for n, name in enumerate(own.outputs)}
    looks = bool(skipping.form.guards)
    run_skipping, run_complete = (
        f"{source.name}({', '.join([*((names | outputs)[t] for t in (*source.inputs, *source.outputs)), *fresh])})"
        for source, fresh in ((own, ()), (other, ["low - 1"] if looks else ()))
    )
    name, w = own.name.removesuffix(skipping.form.suffix), Writer()
    write_choice(
        w, name, (*names.values(), *outputs.values()), run_skipping, run_complete, is_clear(guards, names), looks
    )
    types = dict(zip((*own.inputs, *own.outputs, *other.inputs), (*own.dtypes, *other.dtypes), strict=False))
    return replace(
        own,
        name=name,
        text=own.text + "\n\n" + other.text[other.text.index("@triton.jit") :] + w.text(),
        inputs=tuple(names),
        dtypes=tuple(types.get(t, "f32") for t in (*names, *outputs)),
        numbers=meanings([own.numbers, other.numbers]),
    )


def _both_gluon_forms(skipping: GluonKernel, complete: GluonKernel, guards: Sequence[Guard]) -> KernelSource:
    """One kernel whose tasks run both forms."""
    skipping.name_arguments()
    complete.name_arguments()
    if complete.arguments != skipping.arguments:
        raise UnsupportedError("specialized warps: the forms of a kernel take other tensors")
    name = skipping.name.removesuffix(skipping.form.suffix)
    minima = {minimum_of(g.shift): f"low{n}" for n, g in enumerate(guards)}
    text = skipping.both_forms(name, complete, list(minima.values()), is_clear(guards, minima))
    source, ins = _source(skipping, name, text), len(skipping.inputs)
    return replace(
        source,
        inputs=(*source.inputs, *minima),
        dtypes=(*source.dtypes[:ins], *("f32" for _ in minima), *source.dtypes[ins:]),
        numbers=meanings([source.numbers, _source(complete, name, text).numbers]),
        descriptors=(*source.descriptors, *(None for _ in minima)),
    )
