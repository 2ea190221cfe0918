"""Logarithms of sums of exponentials: the shift that keeps them finite is put back where it cancels.

Programs subtract a row's maximum before they exponentiate, and put it back after the logarithm. Written so, the result
depends on *which* number was subtracted as far as any of our algebra can see, for it knows nothing of logarithms. As
one operator ``logs l m = log(l * exp(m))`` it does not: ``l * exp(m)`` is the plain sum of exponentials.

before -> after:  l = sum exp(x - m);  log(l) + m        ->  logs l m
                  l = sum exp(x - m);  (y - m) - log(l)  ->  y - logs l m
                  abs(l)  ->  l,  where l is made of exponentials, products and sums (jax.nn.logsumexp has one)

All three are identities of real numbers, whatever m is. The second changes the order of two subtractions, and with it
one rounding. Only where m is subtracted inside exponentials that l is made of: elsewhere a logarithm is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mirage_jax.mugraph.graph import KernelGraph, Library, Load, renamed_axes

POSITIVE = frozenset({"exp", "abs", "logistic"})
KEEP_SIGN = frozenset({"mul", "div", "sum", "dot", "max"})  # of arguments that are not negative


def join_shifts(graph: KernelGraph) -> KernelGraph:
    """The same program with logarithms relative to shifts; a graph of library operators."""
    return _Joiner(graph).run()


class _Joiner:
    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self.made = {k.name: k for k in graph.kernels if isinstance(k, Library)}

    def run(self) -> KernelGraph:
        """Drop needless abs, join logarithms with shifts, and drop kernels that nothing reads any more."""
        if not any(k.op.op == "log" for k in self.made.values()):
            return self.graph
        for k in list(self.made.values()):
            self.made[k.name] = self._without_abs(k)
        for k in list(self.made.values()):
            if k.op.op == "add":
                self.made[k.name] = self._joined(k)
        needed = self._needed()
        return replace(self.graph, kernels=tuple(k for n, k in self.made.items() if n in needed))

    def _needed(self) -> set[str]:
        needed = set(self.graph.outputs)
        for name, k in reversed(self.made.items()):
            needed |= {x.tensor for x in k.loads} if name in needed else set()
        return needed

    # --- abs

    def _is_nonnegative(self, tensor: str) -> bool:
        k = self.made.get(tensor)
        if k is None or k.op.op in POSITIVE:
            return k is not None
        return k.op.op in KEEP_SIGN and all(self._is_nonnegative(x.tensor) for x in k.loads)

    def _without_abs(self, k: Library) -> Library:
        """Reads what an abs would only copy."""

        return replace(k, loads=tuple(map(self._past_abs, k.loads)))

    def _past_abs(self, x: Load) -> Load:
        source = self.made.get(x.tensor)
        if source is None or source.op.op != "abs" or not _is_plain(source):
            return x
        (inner,) = source.loads
        same_type = source.result.dtype == self.graph.tensors[inner.tensor].dtype
        if not same_type or not self._is_nonnegative(inner.tensor):
            return x
        return replace(_seen_from(x, source, inner), name=x.name)

    # --- logarithms

    def _joined(self, k: Library) -> Library:
        """``log(l) + m`` as one operator; of ``(y - m) - log(l)``, one that subtracts it from y."""
        attrs = {"ca": 1, "cb": 1} | k.op.attributes
        x, y = (next(load for load in k.loads if load.name == a) for a in k.op.args)
        if (attrs["ca"], attrs["cb"]) == (1, 1):
            for log, m in ((x, y), (y, x)):
                if (total := self._logarithm(log, m)) is not None:
                    args = (Load("0", total.tensor, total.axes), Load("1", m.tensor, m.axes))
                    return self._with(k, "logs", args, {})
        if (attrs["ca"], attrs["cb"]) == (1, -1):
            return self._subtracted(k, x, y)
        return k

    def _subtracted(self, k: Library, x: Load, log: Load) -> Library:
        """``x - log(l)`` where x is ``y - m``, as y minus one logarithm, which becomes a kernel before k."""
        difference = self.made.get(x.tensor)
        if difference is None or difference.op.op != "add" or difference.op.attributes != {"cb": -1}:
            return k
        loads = {load.name: _seen_from(x, difference, load) for load in difference.loads}
        y, m = (loads[a] for a in difference.op.args)
        total = self._logarithm(log, m)
        if total is None:
            return k
        shape = self.made[log.tensor].result
        seen = dict(zip(log.axes, shape.axes, strict=True))
        args = tuple(Load(str(n), x.tensor, renamed_axes(x.axes, seen)) for n, x in enumerate((total, m)))
        joined = f"{log.tensor}_{m.tensor}"
        while joined in self.made and self.made[joined].loads != args:  # m may be read in several ways
            joined += "_"
        if joined not in self.made:
            self._insert_before(k.name, self._with(replace(k, result=replace(shape, name=joined)), "logs", args, {}))
        return self._with(k, "add", (replace(y, name="0"), Load("1", joined, log.axes)), {"cb": -1})

    def _with(self, k: Library, op: str, loads: tuple[Load, ...], attrs: dict[str, int]) -> Library:
        args = tuple(x.name for x in loads)
        made = replace(
            k.op, name=k.result.name, op=op, args=args, axes=k.result.axes, attrs=tuple(sorted(attrs.items()))
        )
        return Library(loads, made, k.result)

    def _insert_before(self, name: str, new: Library) -> None:
        rows = list(self.made.items())
        at = next(i for i, (n, _) in enumerate(rows) if n == name)
        self.made = dict([*rows[:at], (new.name, new), *rows[at:]])

    def _logarithm(self, log: Load, m: Load) -> Load | None:
        """What `log` is the logarithm of, if that is a sum of exponentials relative to `m`; axes as seen from `log`."""
        k = self.made.get(log.tensor)
        if k is None or k.op.op != "log" or k.op.attributes:
            return None
        total = _seen_from(log, k, k.loads[0])
        fits = m.tensor != log.tensor and set(m.axes) <= set(log.axes)
        return total if fits and m.tensor in self._shifts(total.tensor) else None

    def _shifts(self, tensor: str) -> Iterator[str]:
        """What is subtracted inside of the exponentials that a tensor is a sum of products of."""
        k = self.made.get(tensor)
        if k is None:
            return
        if k.op.op == "exp" and not k.op.attributes:
            inner = self.made.get(k.loads[0].tensor)
            if inner is not None and inner.op.op == "add" and inner.op.attributes.get("cb") == -1:
                yield next(x.tensor for x in inner.loads if x.name == inner.op.args[1])
        elif k.op.op in KEEP_SIGN - {"max"}:
            for x in k.loads:
                yield from self._shifts(x.tensor)


def _is_plain(k: Library) -> bool:
    """Does a function act on its operand as it is, without scale or offset?"""
    return k.op.attributes.get("offset", 0) == 0 and k.op.attributes.get("scale", 1) == 1


def _seen_from(reader: Load, k: Library, load: Load) -> Load:
    """A load of kernel k, its axes named as in `reader`, which reads k's result."""
    seen = dict(zip(k.result.axes, reader.axes, strict=True))
    return replace(load, axes=renamed_axes(load.axes, seen))
