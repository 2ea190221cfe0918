"""Lines of source text with indentation, and names that nobody else has taken.

Names come from this counter and never from a graph: a graph may have been read from a file, and its names are not code.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from contextlib import contextmanager

INDENT = "    "
PREFIX = "mirage_"  # of the names of all kernels
RESERVED = frozenset({*keyword.kwlist, *keyword.softkwlist, "tl", "triton", "range", "float", "min", "max"})


def identifier(hint: str) -> str:
    """The nearest identifier: ``k.g -> k_g``, ``k' -> k_``."""
    text = re.sub(r"[^A-Za-z0-9_]", "_", hint) or "x"
    return text if not text[0].isdigit() else "_" + text


class Writer:
    """Collects the lines of functions."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._taken: set[str] = set(RESERVED)
        self._count = 0

    def line(self, text: str = "") -> None:
        """Add a line at the current depth."""
        self._lines.append(INDENT * self._depth + text if text else "")

    @contextmanager
    def block(self, head: str, own: str = "") -> Iterator[None]:
        """``head`` and the lines below it, one level deeper; `own` and names made inside are free again after it."""
        self.line(head)
        self._depth += 1
        taken = self._taken - {own}
        try:
            yield
        finally:
            self._depth -= 1
            self._taken = taken

    def name(self, hint: str) -> str:
        """`hint` itself if it is free, else with the first free number."""
        base = identifier(hint)
        out, n = base, 1
        while out in self._taken:
            n += 1
            out = f"{base}{n}"
        self._taken.add(out)
        return out

    def let(self, hint: str, expression: str) -> str:
        """Assign `expression` to a new numbered name, ``dot3 = ...``."""
        self._count += 1
        out = self.name(f"{identifier(hint)}{self._count}")
        self.line(f"{out} = {expression}")
        return out

    def append(self, other: Writer) -> None:
        """Add the lines of another writer."""
        self._lines += other._lines

    def text(self) -> str:
        """Return all lines."""
        return "\n".join(self._lines) + "\n"
