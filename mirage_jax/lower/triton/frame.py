"""What surrounds the arithmetic of a kernel: which block this is, indices and masks of its tile, addresses of tensors.

`Frame.env` says what is in scope, under keys such as ("value", name), ("index", axis) or ("mask", axis); a loop opens a
scope of its own.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.lower.tiling import (
    L2_GROUP_BLOCKS,
    SINGLE,
    TileAxis,
    Tiling,
    element_number,
    extent,
    stored_axes,
    stored_shape,
)
from mirage_jax.lower.triton.expressions import Number, TileVariable, literal, reduction, rounded_product
from mirage_jax.lower.triton.writer import PREFIX, Writer, identifier
from mirage_jax.mugraph.comparisons import comparisons
from mirage_jax.mugraph.graph import Axis, BlockGraph, LoopBounds, Tensor, part_axis
from mirage_jax.mugraph.passes.sentinels import Guard
from mirage_jax.mugraph.views import View, row_major

INT64_OFFSET_ELEMENTS = 1 << 31  # from this many elements on, offsets need 64 bits
L2_RESIDENT_BYTES = 4 << 20  # an operand this large is worth keeping in L2 for several blocks


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """What the emitter may do; part of the text, hence of its hash."""

    dot_precision: str = "ieee"  # of f32 matrix products: ieee, tf32 or tf32x3
    split_loops: bool = True  # independent accumulators that need one load in two layouts get a loop each
    views: tuple[tuple[str, View], ...] = ()  # inputs of the graph that are read as parts of larger arrays
    first: int = 0  # number of the kernel's first block in its launch
    skips: bool = True  # kernels may leave out steps for sentinels, where these vanish; False: in no block


DEFAULT_OPTIONS = EmitOptions()


def name_in_text(kernel: BlockGraph) -> str:
    """What a kernel is called in its text."""
    return PREFIX + identifier(kernel.name)


@dataclass(frozen=True, slots=True)
class Form:
    """Which form of a kernel is written (`mugraph.passes.sentinels`). `guards`: what has to be above which bound for
    what the usual form stores to be right. `is_complete`: no step is left out, though blocks come in the order of the
    loop bounds. `fresh`: an argument that is 0, which the compiler does not know. It is added to the block's number: so
    nothing that depends on the block is the same in both forms, which would be kept in registers through the loops of
    the first. It is added to the end of the loop too: where ptxas (13.4, sm_90) knew the complete form's number of
    steps, it ordered the loops of the first otherwise. Added to lanes it hides that these follow one another:
    only kernels that read through the copy engine have it there.
    """

    suffix: str = ""
    guards: tuple[Guard, ...] = ()
    is_complete: bool = False
    fresh: str = ""


PLAIN = Form()


class Frame:
    """State of one emission, and the text around the values."""

    def __init__(self, tiling: Tiling, options: EmitOptions, form: Form = PLAIN) -> None:
        self.tiling, self.options, self.form = tiling, options, form
        self.views = dict(options.views)
        self.graph = tiling.kernel
        self.w = Writer()
        self.ops = {op.name: op for op in self.graph.ops}
        self.loads = {load.name: load for load in self.graph.loads}
        self.env: ChainMap[Any, Any] = (
            ChainMap()
        )  # what is in scope: ("value", name), ("index", axis), ("mask", axis) ..
        self.arguments: dict[str, str] = {}
        self.numbers: dict[float, set[Number]] = {}  # what the literals of the text stand for
        self.holding: frozenset[str] = frozenset()  # predicates that are true in all steps of the loop being emitted
        self.uses: set[tuple[str, str]] = set()  # how the loop that is being emitted uses each load: "dot" or "tile"

    @property
    def axes(self) -> Mapping[Axis, TileAxis]:
        """Tiles by axis."""
        return self.tiling.axes

    @property
    def loop_bounds(self) -> LoopBounds | None:
        """Which steps of the loop run; None: all."""
        return None if self.form.is_complete else self.graph.loop_bounds

    @property
    def name(self) -> str:
        """The name of the kernel, an identifier."""
        return name_in_text(self.graph) + self.form.suffix

    @property
    def inputs(self) -> tuple[str, ...]:
        """Device tensors that the kernel reads."""
        live = self.live()
        return tuple(dict.fromkeys(load.tensor for load in self.graph.loads if load.name in live))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Device tensors that the kernel writes."""
        return tuple(dict.fromkeys(s.tensor.name for s in self.graph.stores))

    def name_arguments(self) -> None:
        """Name the arguments of device tensors: inputs, then outputs."""
        for kind, names in (("in", self.inputs), ("out", self.outputs)):
            self.arguments |= {name: self.w.name(f"{kind}{n}") for n, name in enumerate(names)}

    # --- the function ---------------------------------------------------------------------------------------------

    def header(self, tensors: Iterable[Tensor]) -> None:
        """Describe the arguments in comments: type, axes and extents."""
        graph, parts = self.tiling.graph, self.tiling.parts
        for tensor in tensors:
            shape = stored_shape(tensor, graph, parts)
            axes = ", ".join(f"{identifier(a)}={n}" for a, n in zip(stored_axes(tensor, graph), shape, strict=True))
            view = self.views.get(tensor.name)
            whole = f", a part of {list(view.whole)}" if view else ""
            self.w.line(f"# {self.arguments[tensor.name]}: {tensor.dtype}[{axes}]{whole}")

    def live(self) -> set[str]:
        """Loads and operators that some store or guard depends on."""
        return self.graph.below([*(s.value for s in self.graph.stores), *(g.shift for g in self.form.guards)])

    @property
    def number(self) -> str:
        """Of the block that is computed."""
        first = f" - {self.options.first}" if self.options.first else ""
        return f"tl.program_id(0){first}" + (f" + {self.form.fresh}" if self.form.fresh else "")

    def blocks(self) -> None:
        """Which block it is, per grid axis; the first of `Tiling.programs` varies fastest."""
        many = [(a, n) for a, n in self.tiling.programs if n > 1]
        for a, n in self.tiling.programs:
            if n == 1:
                self.env["block", a] = "0"
        if not many:
            return
        program = self.number
        names = {a: self.w.name(f"{identifier(a)}_block") for a, _ in many}
        self.env |= {("block", a): name for a, name in names.items()}
        if len(many) == 1:
            self.w.line(f"{names[many[0][0]]} = {program}")
            self.longest_first()
            return
        pid = self.w.name("pid")
        self.w.line(f"{pid} = {program}")
        (fast, wide), (slow, deep), *outer = many
        if wide > L2_GROUP_BLOCKS and self.tiling.shared_bytes(slow) > L2_RESIDENT_BYTES and not self.tiling.by_length:
            self.grouped(pid, names[fast], wide, names[slow], deep, bool(outer))
            many, step = outer, wide * deep
        else:
            step = 1
        for n, (a, count) in enumerate(many):
            text = pid if step == 1 else f"{pid} // {step}"
            self.w.line(f"{names[a]} = {text}" + (f" % {count}" if n < len(many) - 1 else ""))
            step *= count
        self.longest_first()

    def longest_first(self) -> None:
        """Where loops get longer from block to block, the last block goes first: no long loop is left at the end."""
        loop_bounds = self.graph.loop_bounds
        if loop_bounds is not None and loop_bounds.low is None and (name := self.env["block", loop_bounds.axis]) != "0":
            self.w.line(f"{name} = {self.axes[loop_bounds.axis].count - 1} - {name}")

    def grouped(self, pid: str, fast: str, wide: int, slow: str, deep: int, outer: bool) -> None:
        """Blocks in groups of `L2_GROUP_BLOCKS` along the fast axis, so that both operands are reused while they are in
        L2."""
        area, inner = wide * deep, f"{pid} % {wide * deep}" if outer else pid
        if wide % L2_GROUP_BLOCKS == 0:
            width = str(L2_GROUP_BLOCKS)
        else:
            width = self.w.let(
                "width",
                f"tl.minimum({wide} - {inner} // {L2_GROUP_BLOCKS * deep} * {L2_GROUP_BLOCKS}, {L2_GROUP_BLOCKS})",
            )
        member = self.w.let(
            "member", f"{pid} % {area} % {L2_GROUP_BLOCKS * deep}" if outer else f"{pid} % {L2_GROUP_BLOCKS * deep}"
        )
        self.w.line(f"{fast} = {inner} // {L2_GROUP_BLOCKS * deep} * {L2_GROUP_BLOCKS} + {member} % {width}")
        self.w.line(f"{slow} = {member} // {width}")

    def index(self, axis: TileAxis, step: str = "") -> None:
        """Define the index along an axis, and the mask of its real lanes if it has padded ones."""
        if (element := element_number(axis.axis)) is not None:
            self.env["index", axis.axis] = str(element)
            return
        part = self.env.get(("block", axis.part), "0")
        starts = self.starts(axis)
        if step:  # a tensor also in the interpreter, whose loops count with Python's integers
            starts.append(step if axis.block > 1 else f"{self.full((), '0', 'tl.int32')} + {step}")
        if axis.block == 1 and not axis.ragged and len(starts) <= 1:
            text = starts[0] if starts else "0"
            self.env["index", axis.axis] = text if text.isidentifier() or text == "0" else self.let_axis(axis, text)
            return
        lanes = [self.lanes(axis)] if axis.block > 1 else []
        self.env["index", axis.axis] = index = self.let_axis(axis, " + ".join(starts + lanes) or "0")
        self.env["mask", axis.axis] = ""
        if axis.ragged:
            end = self.end(axis, part, starts)
            self.env["mask", axis.axis] = name = self.w.name(f"{index}_mask")
            self.w.line(f"{name} = {index} < {end}")

    def starts(self, axis: TileAxis) -> list[str]:
        """Terms of the index of this block's first element along an axis."""
        block, part = self.env.get(("block", axis.axis), "0"), self.env.get(("block", axis.part), "0")
        starts = [f"{part} * {axis.local}"] if part != "0" else []
        return starts + ([f"{block} * {axis.size}" if axis.size > 1 else block] if block != "0" else [])

    def lanes(self, axis: TileAxis) -> str:
        """The numbers of an axis' lanes."""
        return f"tl.arange(0, {axis.block})"

    def full(self, dims: tuple[Axis, ...], number: str, dtype: str = "tl.float32") -> str:
        """A tile of one number."""
        return f"tl.full({tuple(self.axes[a].block for a in dims)}, {number}, {dtype})"

    def reduction(self, function: str, value: TileVariable, axes: Iterable[Axis]) -> str:
        """A tile reduced over some of its axes."""
        return reduction(function, value, axes)

    def product(self, x: str, y: str) -> str:
        """``x * y``, of tiles."""
        return rounded_product(x, y) if self.compares_sums else f"{x} * {y}"

    @cached_property
    def compares_sums(self) -> bool:
        """Whether numbers are compared with their own maximum, or with others that come from these.

        Threads that sum together have a copy each of the result. A compiler that joins a product with the first sum
        makes these copies differ: ``fma(a, a, b b)`` in one thread, ``fma(b, b, a a)`` in another. So the product is
        rounded before, by a sum of its own.
        """
        return any(c.shared for c in comparisons(self.tiling.graph) if c.kernel.name == self.tiling.kernel.name)

    def let_axis(self, axis: TileAxis, text: str) -> str:
        """Assign the index along an axis."""
        name = self.w.name("single" if axis.axis == SINGLE else identifier(axis.axis))
        self.w.line(f"{name} = {text}")
        return name

    def end(self, axis: TileAxis, part: str, starts: list[str]) -> str:
        """First index that this tile does not cover: the end of the axis, of the part or of the tile."""
        ends = []
        if axis.block != axis.size and axis.count > 1:
            ends.append(" + ".join([*starts, str(axis.size)]))
        if axis.part is None:
            ends += [str(axis.full)] if axis.local % axis.size or axis.count == 1 else []
        else:
            overrun = axis.local % axis.size or (axis.block != axis.size and axis.count == 1)
            ends += [f"{part} * {axis.local} + {axis.local}"] if overrun else []
            ends += [str(axis.full)] if axis.short_part else []
        text = ends[-1]
        for end in ends[:-1]:
            text = f"tl.minimum({end}, {text})"
        return text

    def expand(self, text: str, own: tuple[Axis, ...], dims: tuple[Axis, ...]) -> str:
        """`text` over the dimensions `own`, made broadcastable to `dims`: ``m -> m[:, None]``."""
        if not own or own == dims:
            return text
        if set(own) - set(dims):
            raise LoweringError(f"a value over {own} is used where only {dims} remain")
        if not text.isidentifier():
            text = f"({text})"
        return f"{text}[{', '.join(':' if a in own else 'None' for a in dims)}]"

    def literal(self, number: Number, written: float | None = None) -> str:
        """The nearest float, or `written`; what it stands for is kept for whoever runs the text on exact numbers."""
        value = float(number) if written is None else written
        self.numbers.setdefault(value, set()).add(number)
        return literal(value)

    def at(self, value: TileVariable, dims: tuple[Axis, ...]) -> str:
        """A tile, broadcastable to `dims`."""
        return self.expand(value.text, value.dims, dims)

    def mask(self, axes: Iterable[Axis], dims: tuple[Axis, ...]) -> str:
        """Conjunction of the masks of the padded ones of `axes`, or ""."""
        names = [(a, self.env["mask", a]) for a in dict.fromkeys(axes) if self.env.get(("mask", a))]
        return " & ".join(self.expand(name, self.tiling.dims((a,)), dims) for a, name in names)

    def placed(self, tensor: Tensor, shape: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
        """Elements of the array in which a tensor of this shape lies, before its first one, and between neighbours."""
        view = self.views.get(tensor.name)
        place = view.place if view else (0, row_major(shape))
        if place is None or (view and view.shape != tuple(shape)):
            raise LoweringError(f"tensor {tensor} of shape {list(shape)} cannot be read as {view}")
        offset, strides = place
        return prod(view.whole if view else shape), offset, strides

    def pointer(self, tensor: Tensor, axes: tuple[Axis, ...], dims: tuple[Axis, ...]) -> str:
        """Address of a tile; `axes` names the tensor's dimensions in the kernel's words."""
        graph, parts = self.tiling.graph, self.tiling.parts
        sizes = dict(zip(tensor.axes, axes, strict=True))
        if any(part_axis(a) in sizes for a in sizes):
            raise UnsupportedError(f"tensor {tensor} has a split axis and its parts at once")
        stored = stored_axes(tensor, graph)
        shape = [extent(a, graph, parts) for a in stored]
        elements, offset, strides = self.placed(tensor, shape)
        wide = elements >= INT64_OFFSET_ELEMENTS
        scalars, vectors = [str(offset)] if offset else [], []
        if SINGLE in dims:  # all lanes but one are masked: their addresses do not matter, as long as they look aligned
            vectors.append(f"{self.expand(self.env['index', SINGLE], (SINGLE,), dims)} * 64")
        for a, n, stride in zip(stored, shape, strides, strict=True):
            index = self.env["index", sizes[a]]
            if index == "0" or n == 1:
                continue
            own = self.tiling.dims((sizes[a],))
            text = self.expand(index, own, dims) + (".to(tl.int64)" if wide else "")
            (vectors if own else scalars).append(text if stride == 1 else f"{text} * {stride}")
        return " + ".join([self.arguments[tensor.name], *scalars, *vectors])
