"""muGraphs: one program at the kernel, block and thread levels (Mirage, OSDI'25, section 2), with named axes.

Every dimension of every tensor has a named *axis*, unified through operators as einsum does. A schedule is then an
assignment of axes to {grid, loop, inside the tile}, and the paper's maps are read off instead of searched:

* imap: a load is divided over the blocks along every grid axis that it has, and replicated along the others;
* fmap: it is divided over the loop steps if it has the loop axis, and is the same in each step otherwise;
* omap: a store has every grid axis, so blocks write disjoint slices.

Axis names: ``k``; ``k'`` is another axis of the same extent (a bound or renamed copy); ``k.g`` counts the parts into
which a split axis ``k`` is divided over the grid (split-K, split-KV). If ``k.g`` is in a kernel's grid, ``k`` means
"inside the part".

Kernel graph = `KernelGraph`: library operators (`Library`, left to XLA) and graph-defined kernels (`BlockGraph`) over
device tensors (`Tensor`). Block graph: input iterators (`Load`), operators (`Op`), accumulators (operators ``acc``,
``accs``, ``last``; the carried ``shift``), output savers (`Store`), a grid and at most one loop axis. The thread
graph is derived by rule: chains of elementwise operators stay in registers (`mugraph.passes.thread_fusion`). Sizes of
tiles are not part of a muGraph but of a `Schedule`, so one structure serves every shape.

Where an operator runs is derived too (`BlockGraph.stages`): an operator is in the *body* of the loop if it depends on
a load that has the loop axis, other than through an accumulator; its *depth* is the number of accumulators below it.
Body operators of depth d run in loop number d, so a graph may pass over its data more than once.

A loop may have *bounds* (`LoopBounds`): steps outside do not run. So causal attention does half of the
work.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from itertools import count
from textwrap import indent

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.dtypes import SIXTEEN_BIT_FLOATS

type Axis = str
type Attr = Fraction | int | str | tuple[Axis, ...]

SCALED = ("acc", "accs", "affine", "mul", "div")  # what keeps relative errors as they are

PART_SUFFIX = ".g"  # ends the name of an axis that counts parts


def part_axis(axis: Axis) -> Axis:
    """``k -> k.g``: the axis that counts the parts of a split axis."""
    return axis + PART_SUFFIX


def split_axis(axis: Axis) -> Axis:
    """``k.g -> k``: the axis whose parts are counted; every other axis is its own."""
    return axis.removesuffix(PART_SUFFIX)


def is_part(axis: Axis) -> bool:
    """Tell part axes (``k.g``, and their copies) from others."""
    return origin(axis).endswith(PART_SUFFIX)


@functools.cache
def origin(axis: Axis) -> Axis:
    """The axis that a copy was made from: ``k'' -> k``. Copies share the extent of their origin."""
    return axis.rstrip("'")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in device memory, row-major in the order of its axes. dtype: f16 bf16 f32 f64 i32 bool."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(self.axes)}]"


@dataclass(frozen=True, slots=True)
class Load:
    """Input iterator: value `name` is tensor `tensor`, its dimensions seen under the names `axes` (equal extents)."""

    name: str
    tensor: str
    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"%{self.name} = load {self.tensor}[{','.join(self.axes)}]"


@dataclass(frozen=True, slots=True)
class Op:
    """Value `name` over `axes` = registered operator `op` of the values `args`."""

    name: str
    op: str
    args: tuple[str, ...]
    axes: tuple[Axis, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()  # sorted by key

    @property
    def attributes(self) -> dict[str, Attr]:
        """Attributes by name."""
        return dict(self.attrs)

    def number(self, name: str, default: Fraction | int = 1) -> Fraction:
        """An attribute that is a number."""
        value = self.attributes.get(name, default)
        assert isinstance(value, Fraction | int), f"{self}: {name}"
        return Fraction(value)

    def head(self) -> str:
        """Operator and attributes, ``dot{axes=(k)}``."""
        attrs = ", ".join(f"{k}={_attr(v)}" for k, v in self.attrs)
        return self.op + (f"{{{attrs}}}" if attrs else "")

    def __str__(self) -> str:
        args = "".join(f" %{a}" for a in self.args)
        return f"%{self.name}[{','.join(self.axes)}] = {self.head()}{args}"


def _attr(value: Attr) -> str:
    return f"({','.join(value)})" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Store:
    """Output saver: device tensor `tensor` receives value `value`."""

    tensor: Tensor
    value: str

    def __str__(self) -> str:
        return f"store {self.tensor} = %{self.value}"


@dataclass(frozen=True, slots=True)
class LoopBounds:
    """Which steps of a loop over n run: those with an index n for which the block has an index i of its grid axis
    `axis` such that ``low <= n - i <= high`` (None: unbounded). Indices count from the start of the whole axis, also
    where n is split into parts. Sums over no step at all are zero.
    """

    axis: Axis
    low: int | None
    high: int | None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise GraphError(f"loop bounds around {self.axis} without a bound")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise GraphError(f"loop bounds {self} are empty")

    def __str__(self) -> str:
        """``i-127..i+0``"""
        return "..".join("" if bound is None else f"{self.axis}{bound:+}" for bound in (self.low, self.high))

    @property
    def bounds(self) -> tuple[int, ...]:
        """Both as cuts: ``i - n <= -low`` and ``n - i <= high``."""
        return tuple(s * b for s, b in ((-1, self.low), (1, self.high)) if b is not None)

    def meets(self, loop: range, grid: range) -> bool:
        """Is there such a pair?"""
        return (self.low is None or loop.stop - 1 - grid.start >= self.low) and (
            self.high is None or loop.start - (grid.stop - 1) <= self.high
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a value is computed: before/after loops (body False) or inside loop number `depth` (body True)."""

    depth: int
    body: bool


def stage_of(op: Op, known: Mapping[str, Stage], loop: Axis | None) -> Stage:
    """Stage of an operator, given the stages of its arguments.

    A loop-invariant value may be consumed at any depth; a body value that also needs a finished accumulator belongs
    to a later loop, which is what the maximum over the arguments says.
    """
    args = [known[a] for a in op.args]
    depth = max((s.depth for s in args), default=0)
    if op.op in ("acc", "accs", "last"):
        return Stage(depth + 1, False)
    in_body = loop in op.axes if op.op == "iota" else any(s.body for s in args)
    return Stage(depth, in_body)


@dataclass(frozen=True)
class Library:
    """One operator over whole tensors, left to XLA (a predefined operator of the paper's kernel graph)."""

    loads: tuple[Load, ...]
    op: Op
    result: Tensor

    @property
    def name(self) -> str:
        """A library operator is called like its result."""
        return self.result.name

    @property
    def operands(self) -> tuple[Load, ...]:
        """The loads in the order in which the operator takes them; one that it takes twice comes twice."""
        loads = {x.name: x for x in self.loads}
        return tuple(loads[a] for a in self.op.args)

    @property
    def grid(self) -> tuple[Axis, ...]:
        """None: XLA divides the work."""
        return ()

    @property
    def loop(self) -> None:
        """None, as `grid`."""
        return None

    @property
    def divided(self) -> tuple[Axis, ...]:
        """None, as `grid`."""
        return ()

    @property
    def loop_bounds(self) -> None:
        """None, as `grid`."""
        return None

    @property
    def ops(self) -> tuple[Op, ...]:
        """The one operator."""
        return (self.op,)

    @property
    def stores(self) -> tuple[Store, ...]:
        """The result, stored."""
        return (Store(self.result, self.op.name),)

    def __str__(self) -> str:
        seen = {load.name: f"{load.tensor}[{','.join(load.axes)}]" for load in self.loads}
        return f"library {self.result} = {self.op.head()} {' '.join(seen[a] for a in self.op.args)}".rstrip()


@dataclass(frozen=True)
class BlockGraph:
    """A graph-defined kernel. `ops` are in dependency order; names of loads and ops are unique in the kernel."""

    name: str
    grid: tuple[Axis, ...]
    loop: Axis | None
    loads: tuple[Load, ...]
    ops: tuple[Op, ...]
    stores: tuple[Store, ...]
    loop_bounds: LoopBounds | None = None

    @property
    def divided(self) -> tuple[Axis, ...]:
        """Axes that blocks and loop steps see a tile of at a time."""
        return (*self.grid, self.loop) if self.loop else self.grid

    @functools.cached_property
    def axes_of(self) -> Mapping[str, tuple[Axis, ...]]:
        """Axes of every value by name."""
        return {v.name: v.axes for v in (*self.loads, *self.ops)}

    @functools.cached_property
    def stages(self) -> Mapping[str, Stage]:
        """Stage of every value by name; see the module's docstring."""
        out: dict[str, Stage] = {}
        for load in self.loads:
            out[load.name] = Stage(0, self.loop is not None and self.loop in load.axes)
        for op in self.ops:
            out[op.name] = stage_of(op, out, self.loop)
        return out

    def below(self, values: Iterable[str]) -> set[str]:
        """Loads and operators that these values depend on, and these."""
        args = {op.name: op.args for op in self.ops}
        found, todo = set[str](), list(values)
        while todo:
            if (name := todo.pop()) not in found:
                found.add(name)
                todo += args.get(name, ())
        return found

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the operators that read each value (stores excluded)."""
        out: dict[str, list[str]] = {n: [] for n in self.axes_of}
        for op in self.ops:
            for a in op.args:
                out[a].append(op.name)
        return {k: tuple(v) for k, v in out.items()}

    def only_scaled(self, name: str) -> frozenset[str]:
        """Follow a value through operators that only scale it. Empty if anything is added, which might cancel."""
        scaled = {op.name: op.op in SCALED and not op.attributes.get("offset") for op in self.ops}
        found, todo = set[str](), {name}
        while todo:
            users = set(self.users[value := todo.pop()])
            if not all(map(scaled.__getitem__, users)):
                return frozenset()
            found.add(value)
            todo |= users - found
        return frozenset(found)

    def ends_narrow(self, name: str) -> bool:
        """Is all that comes of a value tensors of 16 bits? Then what rounding before it does is lost in the rounding of
        the result.
        """
        values = self.only_scaled(name)
        return bool(values) and all(s.tensor.dtype in SIXTEEN_BIT_FLOATS for s in self.stores if s.value in values)

    def __str__(self) -> str:
        head = f"kernel {self.name} grid({','.join(self.grid)})"
        if self.loop:
            head += f" loop({self.loop} in {self.loop_bounds})" if self.loop_bounds else f" loop({self.loop})"
        body = "\n".join(str(x) for x in (*self.loads, *self.ops, *self.stores))
        return head + " {\n" + indent(body, "  ") + "\n}"


type Kernel = Library | BlockGraph


def mentioned_axes(kernel: Kernel) -> set[Axis]:
    """Collect the axes of a kernel's values and tensors, of its grid, and those that it reduces."""
    values = [v.axes for v in (*kernel.loads, *kernel.ops)]
    reduced = [v for op in kernel.ops for v in op.attributes.values() if isinstance(v, tuple)]
    return set(kernel.grid).union(*values, *reduced, *(s.tensor.axes for s in kernel.stores))


def renamed_axes(axes: tuple[Axis, ...], names: Mapping[Axis, Axis]) -> tuple[Axis, ...]:
    """Rename the axes that `names` mentions."""
    return tuple(names.get(a, a) for a in axes)


def seen_from(reader: Load, k: Library, load: Load) -> Load:
    """A load of the library operator k, its axes named as in `reader`, which reads k's result."""
    return replace(load, axes=renamed_axes(load.axes, dict(zip(k.result.axes, reader.axes, strict=True))))


def unused_name(prefix: str, taken: Container[str]) -> str:
    """The first of prefix0, prefix1, .. that is not taken."""
    return next(name for n in count() if (name := f"{prefix}{n}") not in taken)


def without_unread(graph: KernelGraph) -> KernelGraph:
    """Drop the kernels whose results no other kernel reads, and which are no outputs."""
    read, kept = set(graph.outputs), list[Kernel]()
    for kernel in reversed(graph.kernels):
        if not read.isdisjoint(s.tensor.name for s in kernel.stores):
            kept.append(kernel)
            read |= {x.tensor for x in kernel.loads}
    return replace(graph, kernels=tuple(reversed(kept)))


def carried(kernel: BlockGraph, op: Op) -> bool:
    """Is it a maximum whose value moves from step to step?"""
    axes = op.attributes.get("axes", ())
    return op.op in ("shift", "max") and kernel.stages[op.name].body and isinstance(axes, tuple) and kernel.loop in axes


@dataclass(frozen=True)
class KernelGraph:
    """Kernels in execution order over device tensors. `outputs` names tensors; `extents` gives each axis its full size.

    The extent of a part axis ``k.g`` is not in `extents`: it belongs to the `Schedule`.
    """

    inputs: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]
    outputs: tuple[str, ...]
    extents: tuple[tuple[Axis, int], ...]

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every device tensor by name: inputs and results of kernels."""
        out = {t.name: t for t in self.inputs}
        for k in self.kernels:
            for s in k.stores:
                if s.tensor.name in out:
                    raise GraphError(f"tensor {s.tensor.name} is written twice; each tensor has one producer")
                out[s.tensor.name] = s.tensor
        return out

    @functools.cached_property
    def sizes(self) -> Mapping[Axis, int]:
        """Extents by axis."""
        return dict(self.extents)

    def extent(self, axis: Axis) -> int:
        """Full extent of an axis; a copy is as long as its origin."""
        try:
            return self.sizes[origin(axis)]
        except KeyError:
            raise GraphError(f"axis {axis} has no extent; known axes: {', '.join(sorted(self.sizes))}") from None

    @functools.cached_property
    def waves(self) -> tuple[tuple[int, ...], ...]:
        """Block graphs, by position, in groups that do not wait for each other: each kernel is in the first wave that
        comes after all that it reads. Library operators are waves of their own.
        """
        level: dict[str, int] = {}
        waves: dict[tuple[int, int], list[int]] = {}
        for n, kernel in enumerate(self.kernels):
            own = 1 + max((level.get(x.tensor, 0) for x in kernel.loads), default=0)
            level |= {s.tensor.name: own for s in kernel.stores}
            waves.setdefault((own, n if isinstance(kernel, Library) else -1), []).append(n)
        return tuple(tuple(waves[key]) for key in sorted(waves))

    def with_extents(self, extents: Mapping[Axis, int]) -> KernelGraph:
        """The same structure at other sizes."""
        return replace(self, extents=tuple(sorted(extents.items())))

    @property
    def split_axes(self) -> tuple[Axis, ...]:
        """Axes ``k`` for which a part axis ``k.g`` occurs in some kernel's grid."""
        return tuple(sorted({split_axis(g) for k in self.kernels for g in k.grid if is_part(g)}))

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self.kernels)

    def __str__(self) -> str:
        """The text form; `mugraph.parser.parse` reads it back to an equal graph."""
        lines = [f"extents {' '.join(f'{a}={n}' for a, n in self.extents)}"]
        lines += [f"input {t}" for t in self.inputs]
        lines += [str(k) for k in self.kernels]
        lines += [f"output {' '.join(self.outputs)}"]
        return "mugraph {\n" + indent("\n".join(lines), "  ") + "\n}"


class Precision(IntEnum):
    """How precise operands of matrix products are, and exponentials of softmaxes.

    Matrix units cut float32 off to TF32. Rounding operands before that halves the error. Splitting makes two numbers of
    an operand: the rounded value and the rest (Markidis et al., 2018, section 5). Computed ones of 16-bit products are
    split into 16-bit numbers, all of float32 products into TF32. It costs a product for each half.
    """

    FAST = 0
    ROUNDED = 1  # operands of float32 products
    SPLIT_FLOAT32_RESULTS = 2  # only where the result is not rounded to 16 bits anyway
    SPLIT_ALL = 3
    FLOAT32 = 4  # products of float32 without matrix units


@dataclass(frozen=True, slots=True)
class KernelSchedule:
    """Sizes for one kernel: elements per tile of each grid axis and of the loop axis, and launch parameters.

    Axes that are neither grid nor loop lie whole inside the tile. Part axes ``k.g`` always have tile 1.

    specialized: one warp more only loads, and each four of the `num_warps` compute on rows of their own
    (`lower.hopper.kernel`). programs: so many share the blocks of the grid, if it has more; 0: each block has its own.
    """

    tiles: tuple[tuple[Axis, int], ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    precise: Precision = Precision.FAST
    specialized: bool = False
    programs: int = 0

    def tile(self, axis: Axis) -> int:
        """Elements per tile of a grid or loop axis.

        Raises:
            GraphError: the schedule has none.
        """
        for a, t in self.tiles:
            if a == axis:
                return t
        raise GraphError(f"schedule has no tile for axis {axis}; it has {dict(self.tiles)}")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes for a kernel graph: number of parts of every split axis, and one `KernelSchedule` per kernel, in order.

    joint: kernels that do not wait for each other are one launch (`KernelGraph.waves`).
    """

    kernels: tuple[KernelSchedule, ...]
    parts: tuple[tuple[Axis, int], ...] = ()  # split axis k -> number of parts, i.e. the extent of k.g
    joint: bool = False

    def waves(self, graph: KernelGraph) -> tuple[tuple[int, ...], ...]:
        """Kernels of the graph, by position, of one launch each."""
        return graph.waves if self.joint else tuple((n,) for n in range(len(graph.kernels)))

    @property
    def part_counts(self) -> dict[Axis, int]:
        """Number of parts by split axis."""
        return dict(self.parts)
