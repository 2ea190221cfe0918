"""Logarithms of sums of exponentials: the shift that keeps them finite is put back where it cancels.

Programs subtract a row's maximum before they exponentiate, and put it back after the logarithm. Written so, the result
depends on *which* number was subtracted as far as any of our algebra can see, for it knows nothing of logarithms. As
one operator ``logs l m = log(l * exp(m))`` it does not: ``l * exp(m)`` is the plain sum of exponentials.

before -> after:  l = sum exp(c (x - m));  log(l) + c m        ->  logs{degree=c} l m
                  l = sum exp(c (x - m));  c (y - m) - log(l)  ->  lesslogs{degree=c} (c y) l m
                  abs(l)  ->  l,  where l is made of exponentials, products and sums (jax.nn.logsumexp has one)
              where(0 <= l, y, 0) - where(0 <= l, 0, y)  ->  y,  of such an l that y is made of (abs has this gradient)

All four are identities of real numbers, whatever m is. ``lesslogs y l m`` is y - log(l * exp(m)), computed as the
program did: ``y - (log(l) + m)`` loses log(l) where m is huge, as it is in rows that are wholly masked. The search
knows no order of subtractions, so `differences_first` puts its candidates into that one. Only where m is subtracted
inside exponentials that l is made of: elsewhere a logarithm is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain

from mirage_jax.mugraph.graph import (
    Attr,
    BlockGraph,
    KernelGraph,
    Library,
    Load,
    Op,
    Tensor,
    seen_from,
    unused_name,
    without_unread,
)

POSITIVE = frozenset({"exp", "abs", "logistic"})
KEEP_NAN = frozenset({"mul", "div", "affine", "pow"})  # of any argument; no exponent is 0
KEEP_SIGN = frozenset({"mul", "div", "sum", "dot", "max"})  # of arguments that are not negative


def join_shifts(graph: KernelGraph) -> KernelGraph:
    """The same program with logarithms relative to shifts; a graph of library operators."""
    return _Joiner(graph).run()


def differences_first(graph: KernelGraph, program: KernelGraph) -> KernelGraph:
    """A candidate with ``y - logs l m`` as ``lesslogs y l m`` where one kernel, or XLA, makes both.

    The candidate itself where the program has no such difference: ``x - logsumexp(x)`` rounds the sum as it is written.
    """
    if not any(op.op == "lesslogs" for k in program.kernels for op in k.ops):
        return graph
    made = {k.name: k for k in graph.kernels if isinstance(k, Library) and k.op.op == "logs"}
    kernels = [_in_kernel(k) if isinstance(k, BlockGraph) else _of_library(k, made) for k in graph.kernels]
    read = {*graph.outputs, *(load.tensor for k in kernels for load in k.loads)}
    return replace(graph, kernels=tuple(k for k in kernels if k.name not in made or k.name in read))


def _in_kernel(k: BlockGraph) -> BlockGraph:
    logs = {op.name: op for op in k.ops if op.op == "logs"}
    ops = [_op_in_kernel(op, logs) for op in k.ops]
    read = {*(a for op in ops for a in op.args), *(s.value for s in k.stores)}
    return replace(k, ops=tuple(op for op in ops if op.name not in logs or op.name in read))


def _op_in_kernel(op: Op, logs: Mapping[str, Op]) -> Op:
    n, scale = _subtracted(op, [a in logs for a in op.args])
    if n is None:
        return op
    log = logs[op.args[n]]
    return _less(op, scale, (op.args[1 - n], *log.args), log)


def _of_library(k: Library, made: Mapping[str, Library]) -> Library:
    n, scale = _subtracted(k.op, [x.tensor in made for x in k.operands])
    if n is None:
        return k
    log, y = k.operands[n], replace(k.operands[1 - n], name="0")
    logs = made[log.tensor]
    total, m = (seen_from(log, logs, x) for x in logs.operands)
    others = (replace(total, name="1"), replace(m, name="2"))
    return replace(k, loads=(y, *others), op=_less(k.op, scale, ("0", "1", "2"), logs.op))


def _subtracted(op: Op, logarithms: Sequence[bool]) -> tuple[int | None, Fraction]:
    """Which operand is a logarithm that is subtracted from the other one, and the factor of their difference."""
    factors = [op.number(name) for name in ("ca", "cb")]
    n = logarithms.index(True) if op.op == "add" and sum(factors) == 0 and any(logarithms) else None
    return n, factors[0] if n is None else factors[1 - n]


def _less(op: Op, scale: Fraction, args: tuple[str, ...], logs: Op) -> Op:
    attributes: dict[str, Attr] = {**logs.attributes, **({} if scale == 1 else {"scale": scale})}
    return replace(op, op="lesslogs", args=args, attrs=tuple(sorted(attributes.items())))


class _Joiner:
    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self.made = {k.name: k for k in graph.kernels if isinstance(k, Library)}
        self.before: dict[str, Library] = {}  # what a kernel reads that the program did not have, by its name

    def run(self) -> KernelGraph:
        """Drop needless abs and signs, join logarithms with shifts, and drop kernels that nothing reads any more."""
        if {"log", "le"}.isdisjoint(k.op.op for k in self.made.values()):
            return self.graph
        for change in (self._without_copies, self._joined):
            for k in list(self.made.values()):
                self.made[k.name] = change(k)
        kernels = chain.from_iterable((self.before.get(name), k) for name, k in self.made.items())
        return without_unread(replace(self.graph, kernels=tuple(filter(None, kernels))))

    # --- abs

    def _is_nonnegative(self, tensor: str) -> bool:
        k = self.made.get(tensor)
        if k is None or k.op.op in POSITIVE:
            return k is not None
        return k.op.op in KEEP_SIGN and all(self._is_nonnegative(x.tensor) for x in k.loads)

    def _without_copies(self, k: Library) -> Library:
        """Reads what an abs or a sign would only copy."""
        return replace(k, loads=tuple(self._past_sign(self._past_abs(x)) for x in k.loads))

    def _past_abs(self, x: Load) -> Load:
        source = self.made.get(x.tensor)
        if source is None or source.op.op != "abs" or not _is_plain(source):
            return x
        (inner,) = source.loads
        same_type = source.result.dtype == self.graph.tensors[inner.tensor].dtype
        if not same_type or not self._is_nonnegative(inner.tensor):
            return x
        return replace(seen_from(x, source, inner), name=x.name)

    # --- signs

    def _past_sign(self, x: Load) -> Load:
        """Reads what a sign that is always plus would only copy: NaN is in both, since y is made of it, too."""
        k = self.made.get(x.tensor)
        y = None if k is None else self._with_sign(k)
        if k is None or y is None or k.result.dtype != self.graph.tensors[y.tensor].dtype:
            return x
        return replace(seen_from(x, k, y), name=x.name)

    def _with_sign(self, k: Library) -> Load | None:
        """y, of ``where(c, y, 0) - where(c, 0, y)``, if c always holds for numbers."""
        if k.op.op != "add" or (k.op.number("ca"), k.op.number("cb")) != (1, -1):
            return None
        match [self._chosen(load) for load in k.operands]:
            case [(plus, y, other), (minus, zero, same)] if (plus, y) == (minus, same):
                are_zero = self._is_zero(zero) and self._is_zero(other)
                return y if are_zero and self._is_plus(plus.tensor, y) else None
            case _:
                return None

    def _chosen(self, x: Load) -> tuple[Load, Load, Load] | None:
        """What a choice reads, as seen from who reads it; without names."""
        k = self.made.get(x.tensor)
        if k is None or k.op.op != "where":
            return None
        c, y, z = (replace(seen_from(x, k, load), name="") for load in k.operands)
        return c, y, z

    def _is_zero(self, x: Load) -> bool:
        k = self.made.get(x.tensor)
        return k is not None and k.op.op == "const" and k.op.number("value", 0) == 0

    def _is_plus(self, condition: str, y: Load) -> bool:
        """Does a condition say that a sum of exponentials that y is made of is not negative?"""
        k = self.made.get(condition)
        if k is None or k.op.op != "le":
            return False
        zero, total = k.operands
        return self._is_zero(zero) and self._is_nonnegative(total.tensor) and self._is_made_of(y.tensor, total.tensor)

    def _is_made_of(self, tensor: str, part: str) -> bool:
        """Is one tensor NaN wherever another one is? By products, quotients and powers of elements."""
        k = self.made.get(tensor)
        if tensor == part or k is None:
            return tensor == part
        return k.op.op in KEEP_NAN and any(self._is_made_of(x.tensor, part) for x in k.loads)

    # --- logarithms

    def _joined(self, k: Library) -> Library:
        """``log(l) + c m`` as one operator; of ``c (y - m) - log(l)``, one that subtracts it from c y."""
        if k.op.op != "add":
            return k
        (x, y), ca, cb = k.operands, k.op.number("ca"), k.op.number("cb")
        for log, own, m, degree in ((x, ca, y, cb), (y, cb, x, ca)):
            if own == 1 and (total := self._logarithm(log, m, degree)) is not None:
                args = (Load("0", total.tensor, total.axes), Load("1", m.tensor, m.axes))
                return self._with(k, "logs", args, degree)
        return self._subtracted(k, x, ca, y) if cb == -1 else k

    def _subtracted(self, k: Library, x: Load, factor: Fraction, log: Load) -> Library:
        """``c x - log(l)`` where x is ``y - m``, as c y minus one logarithm."""
        difference = self.made.get(x.tensor)
        if difference is None or difference.op.op != "add" or difference.op.attributes != {"cb": -1}:
            return k
        y, m = (seen_from(x, difference, load) for load in difference.operands)
        total = self._logarithm(log, m, factor)
        if total is None:
            return k
        y = y if factor == 1 else self._scaled(k, y, factor)
        parts = (replace(y, name="0"), replace(total, name="1"), replace(m, name="2"))
        return self._with(k, "lesslogs", parts, factor)

    def _scaled(self, k: Library, y: Load, factor: Fraction) -> Load:
        """A multiple of a value, made for kernel k."""
        name = unused_name(f"{k.name}y", self.graph.tensors)
        op = Op(name, "affine", (y.name,), y.axes, (("scale", factor),))
        self.before[k.name] = Library((y,), op, Tensor(name, y.axes, k.result.dtype))
        return Load(y.name, name, y.axes)

    def _with(self, k: Library, op: str, loads: tuple[Load, ...], degree: Fraction) -> Library:
        args, attrs = tuple(x.name for x in loads), () if degree == 1 else (("degree", degree),)
        return Library(loads, Op(k.result.name, op, args, k.result.axes, attrs), k.result)

    def _logarithm(self, log: Load, m: Load, degree: Fraction) -> Load | None:
        """What `log` is the logarithm of, if that is a sum of exponentials relative to a multiple of `m`; axes as seen
        from `log`.
        """
        k = self.made.get(log.tensor)
        if k is None or k.op.op != "log" or k.op.attributes:
            return None
        total = seen_from(log, k, k.loads[0])
        fits = m.tensor != log.tensor and set(m.axes) <= set(log.axes)
        return total if fits and (m.tensor, degree) in self._shifts(total.tensor) else None

    def _shifts(self, tensor: str) -> Iterator[tuple[str, Fraction]]:
        """Shifts, and how many times each is subtracted in the exponentials whose sum of products a tensor is."""
        k = self.made.get(tensor)
        if k is None:
            return
        if k.op.op == "exp" and not k.op.attributes.get("offset"):
            inner = self.made.get(k.loads[0].tensor)
            if inner is not None and inner.op.op == "add" and inner.op.attributes.get("cb") == -1:
                yield inner.operands[1].tensor, k.op.number("scale")
        elif k.op.op in KEEP_SIGN - {"max"}:
            for x in k.loads:
                yield from self._shifts(x.tensor)


def _is_plain(k: Library) -> bool:
    """Does a function act on its operand as it is, without scale or offset?"""
    return k.op.attributes.get("offset", 0) == 0 and k.op.attributes.get("scale", 1) == 1
