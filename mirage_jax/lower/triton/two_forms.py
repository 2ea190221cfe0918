"""One kernel of the two forms that `mugraph.passes.sentinels` gives it.

before -> after:  def k_usual(..): .. return low    ->  the same, and
                  def k_complete(..): ..                   def k(..):
                                                               low = k_usual(..)
                                                               if low > 0:
                                                                   k_complete(..)  # stores again

Where a guard is about a tensor that the loop reads in steps, the kernel takes the least number of that tensor as one
argument more, and looks at it first. Such an argument is called ``min(t)`` (`minimum_of`, `arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mirage_jax.lower.triton.expressions import literal
from mirage_jax.lower.triton.writer import Writer


def minimum_of(tensor: str) -> str:
    """The name of the argument that holds the least number of a tensor."""
    return f"min({tensor})"


def minimized_tensor(name: str) -> str | None:
    """The tensor of which an argument holds the least number; None if the argument is a tensor of the graph."""
    return name[4:-1] if name.startswith("min(") else None


def arguments(names: Sequence[str], tensors: Mapping[str, Any]) -> list[Any]:
    """What a kernel takes, from device tensors by name: arrays of JAX or numpy."""
    return [tensors[name] if (t := minimized_tensor(name)) is None else _minimum(tensors[t]) for name in names]


def _minimum(array: Any) -> Any:
    return array.astype(np.float32).min().reshape(1)


def is_clear(bounds: Mapping[str, Fraction], names: Mapping[str, str]) -> str:
    """Whether all numbers of each tensor are above its bound; `names` are those of the arguments."""
    return " & ".join(f"(tl.load({names[minimum_of(x)]}) > {literal(float(bound))})" for x, bound in bounds.items())


def write_choice(
    w: Writer, name: str, arguments: Sequence[str], usual: str, complete: str, clear: str, looks: bool
) -> None:
    """The kernel: `usual` and `complete` are calls of its forms, `clear` says when the first may run, and `looks`
    whether it returns what the second has to be run for.
    """
    for line in ("", "", "@triton.jit"):
        w.line(line)
    with w.block(f"def {name}({', '.join(arguments)}):"):
        if not clear:
            w.line(f"low = {usual}")
        else:
            if looks:
                w.line("low = 1")
            with w.block(f"if {clear}:"):
                w.line(f"low = {usual}" if looks else usual)
            if not looks:
                with w.block("else:"):
                    w.line(complete)
        if looks:
            with w.block("if low > 0:"):
                w.line("tl.debug_barrier()  # other threads may write again what these have written")
                w.line(complete)
