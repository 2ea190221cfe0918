"""From plans to muGraphs: name values, write loads and stores, and make exponentials relative to a running maximum.

The search knows a value's shift degree (`shift_degrees`), not its shift. Here the shift becomes explicit operators, so
that a muGraph's meaning stands by itself and the verifier need not trust the search:

* an exponential of degree 1 becomes ``m = shift x; p = exps x m``. The shift reduces every axis over which the plan
  sums values of the group; inside a loop over such an axis it is carried (online softmax);
* accumulators of degree d become ``accs v m {degree=d}``: rescaled whenever m moves;
* a later loop uses exponentials relative to the final shift, ``exps x (last m)``;
* so does a later kernel that computes them again and also loads their sums;
* the logarithm of a value of degree d is ``logs v m {degree=d}``, which has degree 0;
* a stored value of degree d comes with its shift. A kernel that sums over the parts of a split axis first moves the
  loaded values to a common shift: ``M = shift m; v' = rescale v m M``. The combine kernel is one more loop step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from mirage_jax.cost.outline import matrix_product
from mirage_jax.errors import UnsupportedError
from mirage_jax.mugraph.builder import library
from mirage_jax.mugraph.graph import (
    Attr,
    Axis,
    BlockGraph,
    Kernel,
    KernelGraph,
    Library,
    Load,
    Op,
    Stage,
    Store,
    Tensor,
    is_part,
    origin,
    part_axis,
    stage_of,
)
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.enumerate.axioms import Decomposition, kind
from mirage_jax.search.enumerate.kernels import Dag, KernelTables, Leaves
from mirage_jax.search.enumerate.normal_form import Poly
from mirage_jax.search.enumerate.pricing import Priced
from mirage_jax.search.enumerate.shift_degrees import Degree
from mirage_jax.search.loop_bounds import with_loop_bounds


@dataclass(frozen=True)
class Target:
    """A region output: tensor = scale * value + offset."""

    tensor: Tensor
    value: Poly
    scale: Fraction
    offset: Fraction

    @property
    def scaling(self) -> dict[str, Fraction]:
        """Attributes of the operator that scales the value; empty if none is needed."""
        defaults = operator("affine").defaults
        return {k: v for k, v in (("scale", self.scale), ("offset", self.offset)) if v != defaults[k]}

    @property
    def is_plain(self) -> bool:
        """Is the value stored as it is?"""
        return not self.scaling


type Reduced = Mapping[int, frozenset[Axis]]  # of each shifted group: the axes over which it is summed


@dataclass(frozen=True)
class Cuts:
    """Facts about all kernels of a plan: for each the axes over which groups are summed, and loaded values."""

    reduced: Sequence[Reduced]
    loaded: Leaves


def common(tables: KernelTables, kernels: Sequence[tuple[Dag, Leaves, Leaves]]) -> Cuts:
    """Collect `Cuts` over the kernels of a plan; of each, its values, what it stores and what it loads.

    All terms of a sum share one shift, unless it cancels in each term. Exponentials times their own reciprocals may
    have another shift in every row, and need it: rows far below the largest would be lost. Kernels that pass no value
    of a group on to each other need no common shift: a softmax of rows and one of columns have two.
    """
    own = [_reduced(tables, dag) for dag, _, _ in kernels]
    groups = set[int]().union(*own)
    passed = {g: [_relative(tables, outs | leaves, g) for _, outs, leaves in kernels] for g in groups}
    reduced = [{g: _of_all(own, g, _together(n, passed[g])) for g in groups} for n in range(len(kernels))]
    return Cuts(reduced, frozenset[Poly]().union(*(leaves for _, _, leaves in kernels)))


def _of_all(own: Sequence[Reduced], group: int, kernels: Iterable[int]) -> frozenset[Axis]:
    """The axes over which some kernels sum a group."""
    return frozenset[Axis]().union(*(own[n].get(group, ()) for n in kernels))


def _reduced(tables: KernelTables, dag: Dag) -> dict[int, frozenset[Axis]]:
    """The axes over which a kernel sums values of each group, in the kernel's own names: a copy is another axis."""
    found: dict[int, frozenset[Axis]] = {}
    for _, s in dag:
        powers: Counter[int] = Counter()
        for a in s.args:
            powers.update(dict(tables.shift_degrees.degree(a) or ()))
        axes = frozenset(x for x in s.reduced if kind(x) != "l")
        for group in (g for g, power in powers.items() if power):
            found[group] = found.get(group, frozenset()) | axes
    return found


def _relative(tables: KernelTables, values: Leaves, group: int) -> Leaves:
    """Those values that are relative to the shift of a group."""
    return frozenset(p for p in values if dict(tables.shift_degrees.degree(p) or ()).get(group))


def _together(number: int, passed: Sequence[Leaves]) -> set[int]:
    """The kernels to which a kernel passes values or from which it gets them, directly or not, and itself."""
    found, values = {number}, passed[number]
    while more := {n for n, own in enumerate(passed) if n not in found and own & values}:
        found |= more
        values = values.union(*(passed[n] for n in more))
    return found


class Scaling(NamedTuple):
    """The program takes the maximum of ``scale * x + offset``, where the search has x."""

    scale: Fraction
    offset: Fraction

    @property
    def inverse(self) -> Scaling:
        """From that maximum to the maximum of x."""
        return Scaling(1 / self.scale, -self.offset / self.scale)

    @property
    def attributes(self) -> dict[str, Attr]:
        """Of the operator `affine`."""
        offset: dict[str, Attr] = {"offset": self.offset} if self.offset else {}
        return {"scale": self.scale, **offset}


@dataclass
class Extractor:
    """Writes the kernels of one plan, first kernel first; tensors get names in that order."""

    tables: KernelTables
    reference: KernelGraph
    targets: tuple[Target, ...]
    cuts: Cuts
    narrow: str  # dtype of intermediates that are neither partial nor shifted
    wide: str  # dtype of all others
    maxima: Mapping[Poly, Scaling] = field(default_factory=dict[Poly, Scaling])  # what the program takes maxima of
    tensors: dict[Poly, Tensor] = field(default_factory=dict[Poly, Tensor])
    shift_of: dict[Poly, Tensor] = field(default_factory=dict[Poly, Tensor])
    count: int = 0

    def __post_init__(self) -> None:
        tensors = [*(r.tensor for r in self.targets), *self.reference.inputs]
        axes = [*(a for t in tensors for a in t.axes), *self.reference.sizes]
        self.rank = {a: i for i, a in enumerate(dict.fromkeys(map(origin, axes)))}
        self.rank |= dict.fromkeys(map(part_axis, self.rank), -1)

    def fresh(self) -> str:
        """Make a name for an intermediate that no tensor of the reference has."""
        while True:
            self.count += 1
            if (name := f"m{self.count - 1}") not in self.reference.tensors:
                return name

    def kernel(
        self, outs: Leaves, leaves: Leaves, loop: Axis | None, grid: tuple[Axis, ...], dag: Dag, number: int
    ) -> BlockGraph:
        """Write one kernel of the plan."""
        inside = {self.tables.in_loop(p, loop): p for p in leaves}
        return _KernelWriter(self, loop, grid, inside, self.cuts.reduced[number]).write(outs, dag, f"k{number}")

    def graph(self, kernels: Sequence[Kernel]) -> KernelGraph:
        """Put the plan's kernels in place of the reference's."""
        r = self.reference
        return KernelGraph(r.inputs, tuple(kernels), r.outputs, r.extents)


@dataclass
class _KernelWriter:
    """Writes one kernel operator by operator; values have their number as their name."""

    x: Extractor
    loop: Axis | None
    grid: tuple[Axis, ...]
    leaves: Mapping[Poly, Poly]  # as seen inside the kernel -> kernel-level value
    reduced: Reduced
    loads: dict[tuple[str, tuple[Axis, ...]], Load] = field(default_factory=dict[tuple[str, tuple[Axis, ...]], Load])
    ops: list[Op] = field(default_factory=list[Op])
    values: dict[Poly, str] = field(default_factory=dict[Poly, str])
    axes: dict[str, tuple[Axis, ...]] = field(default_factory=dict[str, tuple[Axis, ...]])
    shifts: dict[int, str] = field(default_factory=dict[int, str])  # group -> value that holds its current shift
    exponentials: dict[int, Poly] = field(default_factory=dict[int, Poly])
    stages: dict[str, Stage] = field(default_factory=dict[str, Stage])
    degrees: dict[str, Degree] = field(default_factory=dict[str, Degree])
    final: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # shift, or value relative to it -> the same after the loop
    scaled: dict[Poly, tuple[str, Scaling]] = field(default_factory=dict[Poly, tuple[str, Scaling]])  # maxima

    # ------------------------------------------------------------------ parts

    def emit(self, op: str, *args: str, **attrs: Attr) -> str:
        """Append an operator; returns the name of its result."""
        if op in ("dot", "mul"):  # commutative: outer axes of the result first, for people and for memory order
            reduced: Any = attrs.get("axes", ())
            args = tuple(sorted(args, key=lambda v: (self._ranks(v, reduced), v)))
        axes = operator(op).infer(tuple(self.axes[a] for a in args), attrs)
        name = str(len(self.ops))
        made = Op(name, op, args, axes, tuple(sorted(attrs.items())))
        self.ops.append(made)
        self.axes[name] = axes
        self.stages[name] = stage_of(made, self.stages, self.loop)
        return name

    def _ranks(self, value: str, reduced: Sequence[Axis]) -> list[int]:
        return [self.x.rank[origin(a)] for a in self.axes[value] if a not in reduced] or [99]

    def load(self, tensor: str, axes: tuple[Axis, ...]) -> str:
        """Load a tensor under these axes, once; returns the name of the value."""
        key = (tensor, axes)
        if key not in self.loads:
            self.loads[key] = Load(f"x{len(self.loads)}", tensor, axes)
            name = self.loads[key].name
            self.axes[name] = axes
            self.stages[name] = Stage(0, self.loop is not None and self.loop in axes)
        return self.loads[key].name

    def value(self, p: Poly) -> str:
        """Name an operand: a region input, an intermediate, or a value made before."""
        f = self.x.tables
        if p not in self.values and p in self.scaled:
            name, scaling = self.scaled[p]
            self.values[p] = self.emit("affine", name, **scaling.inverse.attributes)
        if p in self.values:
            return self.values[p]
        if f.axioms.is_input(p):
            tensor, axes = f.axioms.atom(p)
            self.values[p] = self.load(tensor, self._raw_axes(axes))
            return self.values[p]
        whole = self.leaves[p]
        tensor = self.x.tensors[whole]
        name = self.load(tensor.name, tensor.axes)
        degree = f.shift_degrees.degree(whole)
        if degree:
            name = self._to_common_shift(name, self.x.shift_of[whole], *self._one_group(degree))
        self.values[p] = name
        return name

    def _raw_axes(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """A region input keeps its dimensions: loop steps and parts of an axis are no dimensions."""
        for a in axes:
            if is_part(a) and (a != origin(a) or a not in self.grid):
                raise UnsupportedError(f"a region input is read along {a}, which is not an axis of the grid")
        return tuple(a for a in axes if kind(a) == "t")

    @staticmethod
    def _one_group(degree: tuple[tuple[int, Fraction], ...]) -> tuple[int, Fraction]:
        if len(degree) != 1:
            raise UnsupportedError("a value is relative to the shifts of two softmaxes")
        return degree[0]

    def _to_common_shift(self, name: str, shift: Tensor, group: int, degree: Fraction) -> str:
        """Move a loaded value from `shift` to one shift for all parts that this plan sums over."""
        m = self.load(shift.name, shift.axes)
        gone = tuple(a for a in shift.axes if a in self.reduced.get(group, ()) and a not in self.grid)
        if not gone:
            known = self.shifts.setdefault(group, m)
            if known != m:
                raise UnsupportedError("a kernel loads values relative to different shifts")
            return name
        key = f"{m} {gone}"
        if group not in self.shifts:
            self.shifts[group] = self.emit("shift", m, axes=gone)
            self._moved_from = key
        elif self._moved_from != key:
            raise UnsupportedError("a kernel loads values relative to different shifts")
        return self.emit("rescale", name, m, self.shifts[group], **({} if degree == 1 else {"degree": degree}))

    _moved_from: str = ""

    # ------------------------------------------------------------------ steps

    def step(self, p: Poly, s: Decomposition) -> None:
        """Write the operator of one step."""
        if (scaling := self._scaling(s)) is not None:
            self.scaled[p] = self._scaled_maximum(s, scaling), scaling
            return
        degree = self.x.tables.shift_degrees.degree(p)
        attrs: dict[str, Any] = dict(s.attrs)
        if s.op == "acc":
            name = self._accumulate(s, degree)
        elif s.op == "last":
            name = self.emit("last", self.value(s.args[0]))
        elif s.op in ("log", "logs") and (relative := self.x.tables.shift_degrees.degree(s.args[0])):
            name = self._logarithm(s, *self._one_group(relative))
        elif s.op == "exp" and degree:
            group, power = self._one_group(degree)
            of_maximum = self.x.tables.shift_degrees.is_of_maximum(p)
            name = self._of_maximum(s, group, power) if of_maximum else self._exponential(p, s, group, power)
        else:
            if "axes" in attrs:
                attrs["axes"] = tuple(attrs["axes"])
            args = [self.value(a) for a in s.args]
            depth = max((self.stages[a].depth for a in args), default=0)
            name = self.emit(s.op, *(self._in_loop(a, depth) for a in args), **attrs)
        if s.times != 1:
            name = self.emit("affine", name, scale=s.times)
        self.values[p] = name
        self.degrees[name] = degree or ()

    def _scaling(self, s: Decomposition) -> Scaling | None:
        """How the program scales what a step takes the maximum of: nobody proves max(2 x) = 2 max(x)."""
        if s.op not in ("max", "last"):
            return None
        (x,) = s.args
        return self.scaled[x][1] if x in self.scaled else self._maxima.get(x) if s.times == 1 else None

    def _scaled_maximum(self, s: Decomposition, scaling: Scaling) -> str:
        (x,) = s.args
        name = self.scaled[x][0] if x in self.scaled else self.emit("affine", self.value(x), **scaling.attributes)
        return self.emit("last", name) if s.op == "last" else self.emit("max", name, axes=tuple(s.attr("axes")))

    @cached_property
    def _maxima(self) -> dict[Poly, Scaling]:
        return {self.x.tables.in_loop(p, self.loop): scaling for p, scaling in self.x.maxima.items()}

    def _in_loop(self, name: str, depth: int) -> str:
        """Prepare a value for loop number `depth`: one relative to a carried shift is made again in a later loop."""
        stage = self.stages[name]
        if not self.degrees.get(name) or not stage.body or stage.depth == depth or name in self.final:
            return self.final.get(name, name)
        op = self.ops[int(name)]
        if op.op == "exps":
            x, m = op.args
            if not self._is_carried(m):
                return name
            made = self.emit("exps", x, self._last(m), **op.attributes)
        else:
            made = self.emit(op.op, *(self._in_loop(a, depth) for a in op.args), **op.attributes)
        self.final[name] = made
        return made

    def _is_carried(self, shift: str) -> bool:
        """Does the shift move from loop step to loop step?"""
        op = self.ops[int(shift)] if shift.isdigit() else None
        return op is not None and op.op == "shift" and self.loop is not None and self.loop in op.attributes["axes"]  # type: ignore[operator]

    def _last(self, shift: str) -> str:
        if shift not in self.final:
            self.final[shift] = self.emit("last", shift)
        return self.final[shift]

    def _accumulate(self, s: Decomposition, degree: Any) -> str:
        value = self.value(s.args[0])
        if not degree:
            return self.emit("acc", value)
        group, d = self._one_group(degree)
        if self._is_carried(self.shifts[group]) and self.stages[value].depth > 0:
            return self.emit("acc", value)  # of a later loop: relative to the final shift, which moves no more
        return self.emit("accs", value, self.shifts[group], **({} if d == 1 else {"degree": d}))

    def _exponential(self, p: Poly, s: Decomposition, group: int, degree: Fraction) -> str:
        if degree != 1 or self.exponentials.setdefault(group, p) != p:
            raise UnsupportedError("several exponentials of one exp group in a kernel")
        x, attrs = self._scaled(self.value(s.args[0]), s)
        if group not in self.shifts:
            self.shifts[group] = self._new_shift(x, group, attrs)
        elif not set(self.axes[self.shifts[group]]) <= set(self.axes[x]):
            raise UnsupportedError("an exponential made anew would be relative to several shifts")
        return self.emit("exps", x, self.shifts[group], **attrs)

    def _new_shift(self, x: str, group: int, attrs: Mapping[str, Attr]) -> str:
        reduced = self.reduced.get(group, ())
        over = tuple(a for a in self.axes[x] if a in reduced and not is_part(a))
        if not set(over).isdisjoint(self.grid):
            raise UnsupportedError("a shift would have to reduce an axis of the grid")
        return self.emit("shift", x, axes=over, **attrs)

    def _of_maximum(self, s: Decomposition, group: int, degree: Fraction) -> str:
        """The exponential of a maximum: relative to the shift, when that moves no more, and then to its power."""
        x, m = self.value(s.args[0]), self.shifts.get(group)
        if m is None:
            raise UnsupportedError("an exponential of a maximum has no shift")
        if not set(self.axes[m]) <= set(self.axes[x]):
            raise UnsupportedError("an exponential of a maximum would be relative to several shifts")
        x, attrs = self._scaled(x, s, degree)
        made = self.emit("exps", x, self._last(m) if self._is_carried(m) else m, **attrs)
        return made if degree == 1 else self.emit("pow", made, exponent=degree)

    def _scaled(self, x: str, s: Decomposition, degree: Fraction = Fraction(1)) -> tuple[str, dict[str, Fraction]]:
        """The operand of an exponential to the power of 1 / `degree`, and the operator's attributes."""
        scale, offset = s.attr("scale", Fraction(1)) / degree, s.attr("offset", Fraction(0)) / degree
        if offset:
            x, scale = self.emit("affine", x, scale=scale, offset=offset), Fraction(1)
        return x, {} if scale == 1 else {"scale": scale}

    def _logarithm(self, s: Decomposition, group: int, degree: Fraction) -> str:
        x, m = self.value(s.args[0]), self.shifts[group]
        if scale := s.attr("scale"):
            x = self.emit("affine", x, scale=scale)
        if self._is_carried(m) and not self.stages[x].body:
            m = self._last(m)
        for of_row in s.args[1:]:
            m = self.emit("add", m, self.value(of_row), **({} if degree == 1 else {"ca": degree}))
            degree = Fraction(1)
        return self.emit("logs", x, m, **({} if degree == 1 else {"degree": degree}))

    # ------------------------------------------------------------------ the kernel

    def write(self, outs: Leaves, dag: Dag, name: str) -> BlockGraph:
        """Write the block graph that computes `outs` by a DAG."""
        x = self.x
        for p in sorted(self.leaves, key=x.tables.order):
            if x.tables.shift_degrees.degree(self.leaves[p]):
                self.value(p)  # loads its shift too, to which exponentials computed again are relative
        for p, s in dag:
            self.step(p, s)
        stores = [store for p in sorted(outs, key=x.tables.order) for store in self._stores(p)]
        stores += self._shift_stores(outs)
        loads = tuple(self.loads.values())
        kernel = BlockGraph(name, self.grid, self.loop, loads, tuple(self.ops), tuple(stores))
        return with_loop_bounds(negated_after_sums(kernel))

    def _stores(self, p: Poly) -> Iterator[Store]:
        """Stores of an output: the region's outputs that it gives, and an intermediate if a kernel loads one."""
        x = self.x
        inside = self.value(x.tables.in_loop(p, self.loop))
        groups = [g for g, _ in x.tables.shift_degrees.degree(p) or ()]
        if self.stages[inside].body and any(self._is_carried(self.shifts[g]) for g in groups):
            raise UnsupportedError("a value relative to a moving shift would be stored")
        targets = [r for r in x.targets if r.value == p]
        for r in targets:
            if r.is_plain:
                yield Store(r.tensor, inside)
                x.tensors.setdefault(p, r.tensor)
            else:
                yield Store(r.tensor, self.emit("affine", inside, **r.scaling))
        if (p in x.cuts.loaded and p not in x.tensors) or not targets:
            yield self._store_intermediate(p, inside)

    def _store_intermediate(self, p: Poly, value: str) -> Store:
        x = self.x
        axes = self._memory_order(value)
        wide = bool(x.tables.shift_degrees.degree(p)) or any(map(is_part, axes))
        dtype = "bool" if x.tables.axioms.is_truth(p) else x.wide if wide else x.narrow
        x.tensors[p] = Tensor(x.fresh(), axes, dtype)
        return Store(x.tensors[p], value)

    def _memory_order(self, value: str) -> tuple[Axis, ...]:
        """Axes of an intermediate: parts (which tile values leave implicit), batch axes, then as computed."""
        axes = self.axes[value]
        parts = [a for a in self.grid if is_part(a) and a not in axes]
        return (*parts, *sorted(axes, key=lambda a: (not is_part(a), a not in self.x.tables.batch)))

    def _shift_stores(self, outs: Leaves) -> list[Store]:
        x, out = self.x, dict[int, Store]()
        for p in sorted(outs, key=x.tables.order):
            degree = x.tables.shift_degrees.degree(p)
            if not degree:
                continue
            group, _ = self._one_group(degree)
            if group not in out:
                if (m := self.shifts.get(group)) is None:
                    raise UnsupportedError("a value is relative to a shift that the kernel does not make")
                value = self._last(m) if self._is_carried(m) else m
                axes = self._memory_order(value)
                if not set(self.grid) <= set(axes):
                    raise UnsupportedError("a stored shift does not have every axis of the grid")
                out[group] = Store(Tensor(x.fresh(), axes, x.wide), value)
            x.shift_of[p] = out[group].tensor
        return list(out.values())


def negated_after_sums(kernel: BlockGraph) -> BlockGraph:
    """``acc(-x) -> -acc(x)``: a loop carries the tiles of a sum that it reads right away."""
    values = {op.name: op for op in kernel.ops}
    stored = {s.value for s in kernel.stores}
    negated: dict[str, Op] = {}  # by the accumulator that alone reads them
    for op in kernel.ops:
        if op.op == "affine" and dict(op.attrs) == {"scale": -1} and op.name not in stored:
            users = [values[user] for user in kernel.users[op.name]]
            negated |= {user.name: op for user in users if user.op == "acc" and len(users) == 1}
    ops: list[Op] = []
    for op in kernel.ops:
        if (before := negated.get(op.name)) is not None:
            ops += [replace(op, name=before.name, args=before.args), replace(before, name=op.name, args=(before.name,))]
        elif op not in negated.values():
            ops.append(op)
    return replace(kernel, ops=tuple(ops))


def block_plan(extractor: Extractor, kernels: Sequence[Priced]) -> KernelGraph:
    """Write the muGraph of a plan whose kernels are given in execution order."""
    blocks = [extractor.kernel(k.outs, k.leaves, k.loop, k.grid, k.dag, i) for i, k in enumerate(kernels)]
    return extractor.graph(blocks)


def library_plan(extractor: Extractor, dag: Dag, outs: Leaves) -> KernelGraph:
    """Write a DAG with every operator as a library operator: pure algebra, left to XLA to fuse."""
    block = extractor.kernel(outs, frozenset(), None, (), dag, 0)
    tensor_of = {load.name: (load.tensor, load.axes) for load in block.loads}
    finals = {s.value: s.tensor for s in block.stores}
    if len(finals) < len(block.stores):
        raise UnsupportedError("two outputs are the same value")
    kernels: list[Kernel] = []
    for op in block.ops:
        dtype = extractor.narrow if op.op == "dot" else extractor.wide
        result = finals.get(op.name) or Tensor(extractor.fresh(), op.axes, dtype)
        loads = tuple(Load(str(i), *tensor_of[a]) for i, a in enumerate(op.args))
        out = Op(result.name, op.op, tuple(load.name for load in loads), result.axes, op.attrs)
        kernels.append(Library(loads, out, result))
        tensor_of[op.name] = (result.name, result.axes)
    return widened(extractor.graph(kernels), extractor.narrow, extractor.wide)


def widened(graph: KernelGraph, narrow: str, wide: str) -> KernelGraph:
    """Make narrow intermediates wide unless they are operands of matrix products, whose units want them narrow.

    The program does not have these values: it scales them later, or they are sums of some of its terms. In float16 they
    overflow where its own values do not, and their rounding adds to the program's.
    """
    fixed = {t.name for t in graph.inputs}.union(graph.outputs, *map(_product_operands, graph.kernels))

    def changed(t: Tensor) -> Tensor:
        """The tensor with its type as stored."""
        return replace(t, dtype=wide) if t.dtype == narrow and t.name not in fixed else t

    kernels = (
        replace(k, stores=tuple(replace(s, tensor=changed(s.tensor)) for s in k.stores))
        if isinstance(k, BlockGraph)
        else replace(k, result=changed(k.result))
        for k in graph.kernels
    )
    return replace(graph, kernels=tuple(kernels))


def _product_operands(kernel: Kernel) -> set[str]:
    """Tensors that a kernel loads as operands of matrix products."""
    tensors = {load.name: load.tensor for load in kernel.loads}
    axes = {v.name: set(v.axes) for v in (*kernel.loads, *kernel.ops)}
    products = [op for op in kernel.ops if matrix_product(op.op, [axes[a] for a in op.args], ())]
    return {tensors[a] for op in products for a in op.args if a in tensors}


def with_libraries(graph: KernelGraph) -> KernelGraph | None:
    """Leave kernels that are one matrix product to XLA; None unless these are some, but not all, of the kernels."""
    kernels = [_as_library(k) if isinstance(k, BlockGraph) and _is_one_product(k) else k for k in graph.kernels]
    left = sum(isinstance(k, BlockGraph) for k in kernels)
    return replace(graph, kernels=tuple(kernels)) if 0 < left < len(kernels) else None


def _is_one_product(kernel: BlockGraph) -> bool:
    """Does a kernel compute one matrix product, which is not split over the grid?"""
    names = [op.op for op in kernel.ops]
    is_split = any(map(is_part, (*kernel.grid, *kernel.stores[0].tensor.axes)))
    return names in (["dot"], ["dot", "acc"]) and len(kernel.stores) == 1 and not is_split


def _as_library(kernel: BlockGraph) -> Kernel:
    product = kernel.ops[0]
    seen = {load.name: (load.tensor, load.axes) for load in kernel.loads}
    axes = product.attributes["axes"]
    assert isinstance(axes, tuple)
    return library("dot", [seen[a] for a in product.args], kernel.stores[0].tensor, axes=axes)
