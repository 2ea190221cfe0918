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
from dataclasses import dataclass, field
from functools import cached_property

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.expressions import Number
from mirage_jax.lower.factors import factors_last
from mirage_jax.lower.frame import DEFAULT, Options
from mirage_jax.lower.logits import scales_last
from mirage_jax.lower.loops import Loops
from mirage_jax.lower.shared_tiles import Descriptor
from mirage_jax.lower.specialized import Specialized
from mirage_jax.lower.tiling import Tiling, stored_shape
from mirage_jax.lower.warpgroups import WARPS
from mirage_jax.lower.writer import identifier
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule

__all__ = ["DEFAULT", "KernelSource", "Options", "emit"]


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

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def emit(
    kernel: BlockGraph,
    graph: KernelGraph,
    schedule: KernelSchedule,
    parts: Mapping[Axis, int],
    options: Options = DEFAULT,
) -> KernelSource:
    """The Triton kernel of `kernel` inside `graph`, at the graph's extents and the schedule's tiles.

    Raises `UnsupportedError` for structures that no text is known for, `LoweringError` for sizes that cannot work.
    """
    if schedule.precise:
        kernel = factors_last(kernel, graph)
    kernel = scales_last(kernel)
    tiling = Tiling(kernel, graph, schedule, parts)
    tiling.check()
    if schedule.specialized:
        return _SpecializedEmitter(tiling, options).kernel()
    if schedule.programs:
        raise UnsupportedError("only programs with specialized warps compute several blocks")
    return _Emitter(tiling, options).kernel()


class _Emitter(Loops):
    """The whole function."""

    def kernel(self) -> KernelSource:
        live = self.live()
        inputs = tuple(dict.fromkeys(load.tensor for load in self.graph.loads if load.name in live))
        outputs = tuple(s.tensor.name for s in self.graph.stores)
        for kind, names in (("in", inputs), ("out", outputs)):
            self.arguments |= {name: self.w.name(f"{kind}{n}") for n, name in enumerate(names)}
        name = self.w.name("mirage_" + identifier(self.graph.name))
        text = self.function(name)
        graph, parts, schedule = self.tiling.graph, self.tiling.parts, self.tiling.schedule
        return KernelSource(
            name, text, (self.tiling.launched,), inputs, outputs,
            tuple(graph.tensors[t].dtype for t in (*inputs, *outputs)),
            tuple(stored_shape(s.tensor, graph, parts) for s in self.graph.stores),
            WARPS if schedule.specialized else schedule.num_warps, schedule.num_stages,
            {x: next(iter(meant)) if len(meant) == 1 else None for x, meant in self.numbers.items()},
            self.descriptors(inputs),
        )  # fmt: skip

    def function(self, name: str) -> str:
        live, tensors = self.live(), self.tiling.graph.tensors
        for text in ("import triton", "import triton.language as tl", "", "", "@triton.jit"):
            self.w.line(text)
        with self.w.block(f"def {name}({', '.join(self.arguments.values())}):"):
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
        return self.w.text()

    def descriptors(self, inputs: Sequence[str]) -> tuple[Descriptor | None, ...]:
        return ()


class _SpecializedEmitter(Specialized, _Emitter):
    """The functions of a kernel with specialized warps."""

    def function(self, name: str) -> str:
        return self.functions(name)

    def descriptors(self, inputs: Sequence[str]) -> tuple[Descriptor | None, ...]:
        known = {t.load.tensor: t.descriptor for t in self.tiles.values()}
        return tuple(map(known.get, inputs))
