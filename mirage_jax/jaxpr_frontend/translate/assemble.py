"""Nodes -> reference muGraph: one `Library` kernel per elementary operator, under canonical names.

Axes are named in the order in which they first occur. Equal kernels are made once, and unused ones are dropped.
Nothing depends on the user's names: two identical layers give equal graphs, which is what the cache and deduplication
rest on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mirage_jax.jaxpr_frontend.translate.axes import AxisKey
from mirage_jax.jaxpr_frontend.translate.builder import AxisValue, Node, NodeBuilder, Use
from mirage_jax.mugraph.builder import library
from mirage_jax.mugraph.graph import Attr, Axis, KernelGraph, Library, Tensor
from mirage_jax.mugraph.operators import operator

LETTERS = "ijklmnpqrstuvwxyzabcdefgh"
COMMUTATIVE = frozenset({"mul", "dot", "maximum", "minimum", "eq", "and", "or"})
FLOAT_ORDER = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True)
class Assembled:
    """The graph, and where the nodes went: `tensors[node]` is the name of a device tensor, `axes` its axes as keys."""

    graph: KernelGraph
    tensors: dict[int, str]
    axes: dict[str, tuple[AxisKey, ...]]


def assemble(builder: NodeBuilder, inputs: Sequence[int], outputs: Sequence[AxisValue]) -> Assembled:
    """The muGraph that computes the nodes of `outputs` from the input nodes `inputs`."""
    return _ReferenceAssembler(builder, outputs).run(inputs)


class _AxisLetters:
    """Letters for bases, primes for copies, in the order in which they are asked for."""

    def __init__(self, builder: NodeBuilder):
        self.axes = builder.axes
        self.bases: dict[int, Axis] = {}
        self.copies: dict[AxisKey, Axis] = {}

    def __call__(self, keys: Sequence[AxisKey]) -> tuple[Axis, ...]:
        return tuple(map(self._name, self.axes.resolve(keys)))

    def _name(self, key: AxisKey) -> Axis:
        if key not in self.copies:
            n = len(self.bases)
            base = self.bases.setdefault(key.base, LETTERS[n] if n < len(LETTERS) else f"a{n}")
            primes = sum(k.base == key.base for k in self.copies)
            self.copies[key] = base + "'" * primes
        return self.copies[key]

    def extents(self) -> tuple[tuple[Axis, int], ...]:
        """Give the extent of each axis by its name."""
        return tuple(sorted((name, self.axes.extent(AxisKey(base))) for base, name in self.bases.items()))


class _ReferenceAssembler:
    def __init__(self, builder: NodeBuilder, outputs: Sequence[AxisValue]):
        self.builder, self.outputs = builder, outputs
        self.names = _AxisLetters(builder)
        self.tensors: dict[int, str] = {}
        self.axes: dict[str, tuple[AxisKey, ...]] = {}
        self.made: dict[object, str] = {}
        self.kernels: list[Library] = []
        self.live = builder.live(outputs)
        self.dtypes = self._dtypes()
        self.order = self._output_orders()

    def run(self, inputs: Sequence[int]) -> Assembled:
        """Make the graph, from the input nodes that outputs depend on."""
        declared: list[Tensor] = []
        for node in inputs:
            if node in self.live:
                axes = self.builder.nodes[node].axes
                name = self.tensors[node] = f"x{len(declared)}"
                self.axes[name] = self.builder.axes.resolve(axes)
                declared.append(Tensor(name, self.names(axes), self.builder.nodes[node].dtype))
        for n in sorted(self.live):
            if n not in self.tensors:
                self.tensors[n] = self._emit(n, self.builder.nodes[n])
        outputs = tuple(dict.fromkeys(self.tensors[v.node] for v in self.outputs if v.node is not None))
        graph = KernelGraph(tuple(declared), tuple(self.kernels), outputs, self.names.extents())
        return Assembled(graph, self.tensors, self.axes)

    def _dtypes(self) -> dict[int, str]:
        """Stored dtypes: a node that is only ever used after a cast is stored as what it is cast to."""
        used: dict[int, set[str]] = {n: set() for n in self.live}
        for n in self.live:
            for use in self.builder.nodes[n].uses:
                used[use.node].add(use.dtype)
        for v in self.outputs:
            if v.node is not None:
                used[v.node].add(v.dtype)
        out: dict[int, str] = {}
        for n, dtypes in used.items():
            own = self.builder.nodes[n].dtype
            casts = own not in dtypes and {own, *dtypes} <= set(FLOAT_ORDER) and self.builder.nodes[n].op != "input"
            out[n] = max(dtypes, key=FLOAT_ORDER.index) if casts else own
        return out

    def _output_orders(self) -> dict[int, tuple[AxisKey, ...]]:
        """Outputs are stored in the order of their JAX dimensions, so that no transpose follows."""
        order: dict[int, tuple[AxisKey, ...]] = {}
        for v in self.outputs:
            if v.node is not None:
                order.setdefault(v.node, tuple(itertools.chain(*self.builder.dims(v))))
        return order

    def _emit(self, n: int, node: Node) -> str:
        if node.op == "iota":
            return self._emit_iota(node)
        attrs: dict[str, Attr] = dict(node.attrs)
        if node.over:
            attrs["axes"] = self.names(node.over)
        return self._kernel(node.op, node.uses, attrs, self.dtypes[n], self.order.get(n))

    def _emit_iota(self, node: Node) -> str:
        """The index along a split axis is the sum of the indices along its parts: ``n1 * i0 + i1``."""
        keys = self.builder.axes.resolve(node.over)
        name = self._kernel("iota", (), {"axis": self.names(keys[:1])[0]}, node.dtype, over=keys[:1])
        for key in keys[1:]:
            part = self._kernel("iota", (), {"axis": self.names((key,))[0]}, node.dtype, over=(key,))
            extent = Fraction(self.builder.axes.extent(key))
            seen = [(name, self.axes[name]), (part, (key,))]
            name = self._library("add", seen, {"ca": extent}, node.dtype)
        return name

    def _kernel(
        self,
        op: str,
        uses: Sequence[Use],
        attrs: dict[str, Attr],
        dtype: str,
        order: Sequence[AxisKey] | None = None,
        over: tuple[AxisKey, ...] = (),
    ) -> str:
        seen = [(self.tensors[use.node], self._view(use)) for use in uses]
        return self._library(op, seen, attrs, dtype, order, over)

    def _view(self, use: Use) -> tuple[AxisKey, ...]:
        """The axes of a use, in the order in which its tensor is stored."""
        stored = self.axes[self.tensors[use.node]]
        own = self.builder.axes.resolve(self.builder.nodes[use.node].axes)
        seen = dict(zip(own, self.builder.axes.resolve(use.axes), strict=True))
        return tuple(seen[k] for k in stored)

    def _library(
        self,
        op: str,
        seen: Sequence[tuple[str, tuple[AxisKey, ...]]],
        attrs: dict[str, Attr],
        dtype: str,
        order: Sequence[AxisKey] | None = None,
        over: tuple[AxisKey, ...] = (),
    ) -> str:
        args = [(tensor, self.names(keys)) for tensor, keys in seen]
        sorted_attrs = tuple(sorted(attrs.items()))
        is_symmetric = op in COMMUTATIVE or (op == "add" and not attrs)
        key = (op, tuple(sorted(args) if is_symmetric else args), sorted_attrs, dtype)
        if key in self.made:
            return self.made[key]
        name = self.made[key] = f"t{len(self.kernels)}"
        axes = operator(op).infer(tuple(axes for _, axes in args), attrs)
        by_name = {a: k for _, keys in (*seen, ("", over)) for k, a in zip(keys, self.names(keys), strict=True)}
        stored = tuple(by_name[a] for a in axes)
        if order is not None:
            resolved = self.builder.axes.resolve(order)
            stored = tuple(sorted(stored, key=resolved.index))
        self.axes[name] = stored
        self.kernels.append(library(op, args, Tensor(name, self.names(stored), dtype), **attrs))
        return name
