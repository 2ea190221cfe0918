"""Short construction of muGraphs, for the frontend, for tests and for people.

Values and tensors are written as in the text form. Axes of results are inferred; attributes may be given as numbers::

    k = KernelBuilder("rms", "i,j", "k")
    x, w = k.load(X), k.load(W)
    k.store(O, k.op("acc", k.op("dot", x, w, axes="k")))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from mirage_jax.mugraph.graph import Attr, Axis, BlockGraph, Library, Load, Op, Store, Tensor
from mirage_jax.mugraph.operators import operator

type Axes = str | Sequence[Axis]
type Given = Attr | float | Sequence[Axis]


def axes_of(text: Axes) -> tuple[Axis, ...]:
    """``"i,k" -> ("i", "k")``; tuples pass through."""
    return tuple(a for a in text.split(",") if a) if isinstance(text, str) else tuple(text)


def tensor(name: str, axes: Axes, dtype: str = "f32") -> Tensor:
    """Describe a tensor: ``tensor("X", "i,k")``."""
    return Tensor(name, axes_of(axes), dtype)


def attributes(given: Mapping[str, Given]) -> tuple[tuple[str, Attr], ...]:
    """Attributes in canonical form: sorted, numbers exact, axes a tuple."""
    return tuple(sorted((k, _attribute(k, v)) for k, v in given.items()))


def _attribute(key: str, value: Given) -> Attr:
    if isinstance(value, str):
        return axes_of(value) if key == "axes" else value
    return Fraction(value) if isinstance(value, int | float | Fraction) else tuple(value)


def library(op: str, args: Sequence[tuple[Tensor | str, Axes]], result: Tensor, **attrs: Given) -> Library:
    """One operator over whole tensors; `args` are tensors, each with the axes under which it is read.

    Loads are named by position, the operator by its result.
    """
    loads = tuple(Load(str(i), t if isinstance(t, str) else t.name, axes_of(a)) for i, (t, a) in enumerate(args))
    return Library(loads, Op(result.name, op, tuple(x.name for x in loads), result.axes, attributes(attrs)), result)


class KernelBuilder:
    """Collects the loads, operators and stores of one kernel."""

    def __init__(self, name: str, grid: Axes = (), loop: Axis | None = None):
        self._name, self._grid, self._loop = name, axes_of(grid), loop
        self._loads: list[Load] = []
        self._ops: list[Op] = []
        self._stores: list[Store] = []
        self._axes: dict[str, tuple[Axis, ...]] = {}

    def load(self, source: Tensor | str, axes: Axes = "", name: str = "") -> str:
        """Input iterator; reads a `Tensor` under its own axes unless others are given."""
        seen = axes_of(axes) or (source.axes if isinstance(source, Tensor) else ())
        load = Load(name or self._fresh(), source if isinstance(source, str) else source.name, seen)
        self._loads.append(load)
        self._axes[load.name] = seen
        return load.name

    def op(self, op: str, *args: str, name: str = "", **attrs: Given) -> str:
        """Append an operator; returns the name of its value, whose axes are inferred."""
        canonical = attributes(attrs)
        axes = operator(op).infer(tuple(self._axes[a] for a in args), dict(canonical))
        node = Op(name or self._fresh(), op, args, axes, canonical)
        self._ops.append(node)
        self._axes[node.name] = axes
        return node.name

    def axes(self, value: str) -> tuple[Axis, ...]:
        """Axes of a value."""
        return self._axes[value]

    def store(self, target: Tensor, value: str) -> None:
        """Save a value to a tensor."""
        self._stores.append(Store(target, value))

    def build(self) -> BlockGraph:
        """Return the kernel."""
        return BlockGraph(self._name, self._grid, self._loop, tuple(self._loads), tuple(self._ops), tuple(self._stores))

    def _fresh(self) -> str:
        return f"v{len(self._loads) + len(self._ops)}"
