"""Source text of one Triton kernel from one block graph at concrete sizes (Mirage, section 6).

`emit` is pure: the same graph, sizes and options give the same text, and no name of the graph gets into it unsanitized.
How a block graph becomes text:

* every value is a tile whose dimensions follow one order of axes (`tiling`), so broadcasting is indexing with None;
* accumulators are carried by loops (`loops`), everything else is emitted where it is first needed (`values`):
  loop-invariant loads before the loop, epilogue operands after it. Chains of pointwise operators are lines over
  registers: the thread graph;
* all arithmetic is f32; operands of a matrix product are 16-bit if one of them comes from a 16-bit tensor;
* for every padded axis of a value we track what its padded lanes hold, by evaluating the operators' own meaning on the
  constants there (a masked load holds 0). A reduction selects only where that is not already neutral;
* exponentials are ``exp2`` with log2(e) folded into the scale. A shift m is kept as ``text * unit`` (see `Value.unit`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.hopper.kernel import Specialized
from mirage_jax.lower.hopper.shared_memory import Descriptor
from mirage_jax.lower.hopper.warpgroups import WARPGROUP_WARPS
from mirage_jax.lower.tiling import Tiling, stored_shape
from mirage_jax.lower.triton.expressions import Number, TileVariable, meanings, reduction
from mirage_jax.lower.triton.factors import factors_last
from mirage_jax.lower.triton.frame import DEFAULT_OPTIONS, PLAIN, EmitOptions, Form
from mirage_jax.lower.triton.logits import scales_last
from mirage_jax.lower.triton.loops import Loops
from mirage_jax.lower.triton.ops.softmax import lows
from mirage_jax.lower.triton.two_forms import is_clear, least, write_choice
from mirage_jax.lower.triton.writer import Writer, identifier
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule
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
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def emit(
    kernel: BlockGraph,
    graph: KernelGraph,
    schedule: KernelSchedule,
    parts: Mapping[Axis, int],
    options: EmitOptions = DEFAULT_OPTIONS,
) -> KernelSource:
    """The Triton kernel of `kernel` inside `graph`, at the graph's extents and the schedule's tiles.

    Raises `UnsupportedError` for structures that no text is known for, `LoweringError` for sizes that cannot work.
    """

    def written(kernel: BlockGraph, form: Form = PLAIN) -> _Emitter:
        if schedule.precise:
            kernel = factors_last(kernel, graph)
        sizes = with_short_steps(schedule, kernel) if form.is_complete else schedule
        tiling = Tiling(scales_last(kernel), graph, sizes, parts)
        tiling.check()
        if schedule.programs and not schedule.specialized:
            raise UnsupportedError("only programs with specialized warps compute several blocks")
        return (_SpecializedEmitter if schedule.specialized else _Emitter)(tiling, options, form)

    forms = guarded(kernel)
    if forms is None:
        return written(kernel).kernel()
    if not options.skips:
        return written(kernel, Form("_complete", is_complete=True)).kernel()
    complete = Form("_complete", is_complete=True, fresh="fresh" if forms.guards else "")
    skipping = Form("_skipping", forms.guards)
    return written(forms.skipping, skipping).with_other(written(kernel, complete), forms.tensor_guards)


class _Emitter(Loops):
    """The whole function."""

    def with_other(self, complete: _Emitter, guards: Sequence[Guard]) -> KernelSource:
        """This form of a kernel, and in blocks where it is not right its complete form."""
        own, other = self.kernel(), complete.kernel()
        inputs = tuple(dict.fromkeys((*own.inputs, *other.inputs)))
        names = {name: f"in{n}" for n, name in enumerate((*inputs, *(least(g.shift) for g in guards)))}
        outputs = {name: f"out{n}" for n, name in enumerate(own.outputs)}
        skipping, remaining = (
            f"{source.name}({', '.join([*((names | outputs)[t] for t in (*source.inputs, *source.outputs)), *fresh])})"
            for source, fresh in ((own, ()), (other, ["low - 1"] if self.form.guards else ()))
        )
        name, w = own.name.removesuffix(self.form.suffix), Writer()
        clear = is_clear(guards, names)
        write_choice(w, name, (*names.values(), *outputs.values()), skipping, remaining, clear, bool(self.form.guards))
        types = dict(zip((*own.inputs, *own.outputs, *other.inputs), (*own.dtypes, *other.dtypes), strict=False))
        return replace(
            own,
            name=name,
            text=own.text + "\n\n" + other.text[other.text.index("@triton.jit") :] + w.text(),
            inputs=tuple(names),
            dtypes=tuple(types.get(t, "f32") for t in (*names, *outputs)),
            numbers=meanings([own.numbers, other.numbers]),
        )

    def kernel(self) -> KernelSource:
        self.name_arguments()
        name = self.w.name(self.name)
        return self.source(name, self.function(name))

    @property
    def name(self) -> str:
        return "mirage_" + identifier(self.graph.name) + self.form.suffix

    def name_arguments(self) -> None:
        """Names for device tensors: inputs, then outputs."""
        for kind, names in (("in", self.inputs), ("out", self.outputs)):
            self.arguments |= {name: self.w.name(f"{kind}{n}") for n, name in enumerate(names)}

    @property
    def inputs(self) -> tuple[str, ...]:
        live = self.live()
        return tuple(dict.fromkeys(load.tensor for load in self.graph.loads if load.name in live))

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(s.tensor.name for s in self.graph.stores)

    def source(self, name: str, text: str) -> KernelSource:
        graph, parts, schedule = self.tiling.graph, self.tiling.parts, self.tiling.schedule
        return KernelSource(
            name, text, (self.tiling.launched,), self.inputs, self.outputs,
            tuple(graph.tensors[t].dtype for t in (*self.inputs, *self.outputs)),
            tuple(stored_shape(s.tensor, graph, parts) for s in self.graph.stores),
            WARPGROUP_WARPS if schedule.specialized else schedule.num_warps, schedule.num_stages,
            {x: next(iter(meant)) if len(meant) == 1 else None for x, meant in self.numbers.items()},
            self.descriptors(self.inputs), bool(self.form.guards),
        )  # fmt: skip

    def function(self, name: str) -> str:
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
                self.w.line(f"return {self.w.let('low', self.any_low())}")
        return self.w.text()

    def any_low(self) -> str:
        """More than 0 if a guard does not hold in this block. It is asked for after the stores, which take no time of
        their own: all warps wait for the answer.
        """
        dims = {shift: self.tiling.dims(self.graph.axes_of[shift]) for shift in lows(self)}
        return " | ".join(reduction("tl.max", TileVariable(text, dims[s]), dims[s]) for s, text in lows(self).items())

    def descriptors(self, inputs: Sequence[str]) -> tuple[Descriptor | None, ...]:
        return ()


class _SpecializedEmitter(Specialized, _Emitter):
    """The functions of a kernel with specialized warps."""

    def function(self, name: str) -> str:
        return self.functions(name)

    def with_other(self, complete: _Emitter, guards: Sequence[Guard]) -> KernelSource:
        assert isinstance(complete, _SpecializedEmitter)
        self.name_arguments()
        complete.name_arguments()
        if complete.arguments != self.arguments:
            raise UnsupportedError("specialized warps: the forms of a kernel take other tensors")
        name, lows = self.name.removesuffix(self.form.suffix), {least(g.shift): f"low{n}" for n, g in enumerate(guards)}
        text = self.both(name, complete, list(lows.values()), is_clear(guards, lows))
        source, ins = self.source(name, text), len(self.inputs)
        return replace(
            source,
            inputs=(*source.inputs, *lows),
            dtypes=(*source.dtypes[:ins], *("f32" for _ in lows), *source.dtypes[ins:]),
            numbers=meanings([source.numbers, complete.source(name, text).numbers]),
            descriptors=(*source.descriptors, *(None for _ in lows)),
        )

    def descriptors(self, inputs: Sequence[str]) -> tuple[Descriptor | None, ...]:
        known = {t.load.tensor: t.descriptor for t in self.tiles.values()}
        return tuple(map(known.get, inputs))
