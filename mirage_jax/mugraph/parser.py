"""Reads the text form of muGraphs back: ``parse(str(g)) == g``.

One statement per line; lines that are empty or start with ``#`` are skipped. Reading checks the grammar only;
`check.check_graph` checks the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NoReturn

from mirage_jax.errors import ParseError
from mirage_jax.mugraph.builder import library
from mirage_jax.mugraph.graph import Attr, Axis, BlockGraph, Kernel, KernelGraph, Load, LoopBounds, Op, Store, Tensor

_NAME = r"[^\s\[\](){}=,:%]+"
_AXES = r"\[([^\[\]]*)\]"
_TENSOR = rf"({_NAME}): ({_NAME}){_AXES}"
_HEAD = rf"({_NAME})(?:\{{(.*)\}})?"
_LOAD = re.compile(rf"%({_NAME}) = load ({_NAME}){_AXES}")
_OP = re.compile(rf"%({_NAME}){_AXES} = {_HEAD}((?: %{_NAME})*)")
_STORE = re.compile(rf"store {_TENSOR} = %({_NAME})")
_INPUT = re.compile(rf"input {_TENSOR}")
_LIBRARY = re.compile(rf"library {_TENSOR} = {_HEAD}((?: {_NAME}{_AXES})*)")
_KERNEL = re.compile(rf"kernel ({_NAME}) grid\(([^()]*)\)(?: loop\(({_NAME})(?: in ({_NAME}))?\))? \{{")
_LOOP_BOUNDS = re.compile(rf"(?:({_NAME}?)([+-]\d+))?\.\.(?:({_NAME}?)([+-]\d+))?")
_EXTENT = re.compile(rf"({_NAME})=(\d+)")
_ATTR = re.compile(rf"({_NAME})=(\([^()]*\)|[^,()\s]+)(?:, |$)")
_NUMBER = re.compile(r"-?\d+(/\d+)?")


def parse(text: str) -> KernelGraph:
    """The graph that `text` denotes; raises `ParseError` with the line."""
    return _Reader(text).graph()


class _Reader:
    def __init__(self, text: str):
        lines = ((n, line.strip()) for n, line in enumerate(text.splitlines(), 1))
        self.lines: Iterator[tuple[int, str]] = ((n, line) for n, line in lines if line and not line.startswith("#"))
        self.number, self.line = 0, ""

    def next(self) -> str:
        """Move to the next line and return it."""
        found = next(self.lines, None)
        if found is None:
            self.fail("a closing brace", "the end of the text")
        self.number, self.line = found
        return self.line

    def fail(self, expected: str, found: str = "") -> NoReturn:
        """Raise `ParseError` at the current line."""
        raise ParseError(f"line {self.number}: expected {expected}, found {found or repr(self.line)}")

    def match(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        """Match the whole current line, or fail."""
        return pattern.fullmatch(self.line) or self.fail(expected)

    def graph(self) -> KernelGraph:
        """Read the whole text."""
        if self.next() != "mugraph {":
            self.fail("'mugraph {'")
        extents: list[tuple[Axis, int]] = []
        inputs: list[Tensor] = []
        kernels: list[Kernel] = []
        outputs: tuple[str, ...] = ()
        while self.next() != "}":
            keyword, *words = self.line.split()
            match keyword:
                case "extents":
                    found = [_EXTENT.fullmatch(w) or self.fail(f"axis=extent instead of {w!r}") for w in words]
                    extents += [(m[1], int(m[2])) for m in found]
                case "input":
                    m = self.match(_INPUT, "input name: dtype[axes]")
                    inputs.append(Tensor(m[1], _axes(m[3]), m[2]))
                case "library":
                    kernels.append(self.library())
                case "kernel":
                    kernels.append(self.kernel())
                case "output":
                    outputs = tuple(words)
                case _:
                    self.fail("extents, input, library, kernel, output or '}'")
        if (rest := next(self.lines, None)) is not None:
            self.number, self.line = rest
            self.fail("the end of the text")
        return KernelGraph(tuple(inputs), tuple(kernels), outputs, tuple(extents))

    def library(self) -> Kernel:
        """Read a library operator: the current line."""
        m = self.match(_LIBRARY, "library name: dtype[axes] = operator{attributes} tensor[axes] ...")
        args = [(a[1], _axes(a[2])) for a in re.finditer(rf"({_NAME}){_AXES}", m[6])]
        return library(m[4], args, Tensor(m[1], _axes(m[3]), m[2]), **self.attributes(m[5]))

    def kernel(self) -> Kernel:
        """Read a kernel, from its head to its brace."""
        head = self.match(_KERNEL, "kernel name grid(axes) loop(axis in bounds) {")
        loads: list[Load] = []
        ops: list[Op] = []
        stores: list[Store] = []
        while self.next() != "}":
            if m := _LOAD.fullmatch(self.line):
                loads.append(Load(m[1], m[2], _axes(m[3])))
            elif m := _OP.fullmatch(self.line):
                args = tuple(a[1:] for a in m[5].split())
                ops.append(Op(m[1], m[3], args, _axes(m[2]), tuple(sorted(self.attributes(m[4]).items()))))
            elif m := _STORE.fullmatch(self.line):
                stores.append(Store(Tensor(m[1], _axes(m[3]), m[2]), m[4]))
            else:
                self.fail("a load, an operator, a store or '}'")
        loop_bounds = self.loop_bounds(head[4]) if head[4] else None
        return BlockGraph(head[1], _axes(head[2]), head[3], tuple(loads), tuple(ops), tuple(stores), loop_bounds)

    def loop_bounds(self, text: str) -> LoopBounds:
        """Read ``i-127..i+0``."""
        m = _LOOP_BOUNDS.fullmatch(text) or self.fail("loop bounds such as i-15..i+0", repr(text))
        if len(names := {m[1], m[3]} - {None}) != 1:
            self.fail("loop bounds around one axis", repr(text))
        low, high = (None if bound is None else int(bound) for bound in (m[2], m[4]))
        return LoopBounds(names.pop(), low, high)

    def attributes(self, text: str | None) -> dict[str, Attr]:
        """Read ``axes=(k), scale=1/2``."""
        out: dict[str, Attr] = {}
        at = 0
        while text and at < len(text):
            m = _ATTR.match(text, at) or self.fail(f"attribute=value at {text[at:]!r}")
            out[m[1]] = _value(m[2])
            at = m.end()
        return out


def _axes(text: str) -> tuple[Axis, ...]:
    return tuple(text.split(",")) if text else ()


def _value(text: str) -> Attr:
    if text.startswith("("):
        return _axes(text[1:-1])
    return Fraction(text) if _NUMBER.fullmatch(text) else text
