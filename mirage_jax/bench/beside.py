"""Helpers of the examples: sizes from flags, and a comparison with plain `jax.jit`.

Both sides make the same few calls from the same arguments. Results of the first are compared; the others are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mirage_jax import timing
from mirage_jax.bench.model_suite import worst_error
from mirage_jax.bench.models.layers import Sizes
from mirage_jax.config import ON_MISS
from mirage_jax.summary import summarize

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}  # between two orders of rounding, of the largest value


class Flags[S: Sizes](NamedTuple):
    """The sizes that were asked for, the options of `mirage_jax.optimize`, and the number of steps."""

    sizes: S
    options: dict[str, Any]
    steps: int


def flags[S: Sizes](argv: Sequence[str] | None, doc: str, published: S, small: S) -> Flags[S]:
    """The command line of an example: ``--small``, one flag for each size, and options of the optimizer."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    for field in fields(published):
        kind = str if field.name == "dtype" else int
        own = getattr(published, field.name)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, metavar="N", help=f"published: {own}")
    parser.add_argument("--steps", type=int, default=3, help="how many steps each side makes")
    parser.add_argument("--budget", default="20s", help="time for the search of one region")
    parser.add_argument("--on-miss", choices=ON_MISS, default="search", help="what to do where no winner is stored")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps: found {args.steps}; allowed is 1 or more")
    given = {f.name: value for f in fields(published) if (value := getattr(args, f.name)) is not None}
    sizes = replace(small if args.small else published, **given)
    return Flags(sizes, {"budget": args.budget, "on_miss": args.on_miss}, args.steps)


def compare(plain: Any, optimized: Any, args: tuple[Any, ...], s: Sizes, steps: int, stateful: bool = False) -> int:
    """Call both functions `steps` times and more, and print a comparison; the exit code is 0 if first results agree.

    stateful: the first argument is donated, and the first result takes its place in the next call.
    """
    console = Console()
    console.print(summarize(optimized.explain(*args)), markup=False, highlight=False, soft_wrap=True)
    runs = {name: _Run.of(f, args, stateful) for name, f in (("jax.jit", plain), ("mirage_jax.optimize", optimized))}
    difference, _ = worst_error(*(run.first for run in runs.values()))
    caption = f"largest difference of all that a call returns, relative to the largest of its kind: {difference:.1e}"
    table = Table(title="summary", caption=caption)
    for column in ("", "ms per call", "the first returns"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, run in runs.items():
        seconds = min(timing.wall(run.call) for _ in range(steps))
        table.add_row(name, f"{seconds * 1e3:,.2f}", _brief(run.first))
    console.print(table)
    return 0 if difference <= TOLERANCE[s.dtype] else 1


@dataclass
class _Run:
    """A function, its first results, and its current arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    stateful: bool
    first: Any = None

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], stateful: bool) -> Self:
        """Copy a donated argument, and call the function once."""
        copied = (jax.tree.map(jnp.copy, args[0]), *args[1:]) if stateful else args
        run = cls(function, copied, stateful)
        run.first = jax.tree.map(np.asarray, run.call())
        return run

    def call(self) -> Any:
        """Call the function; a stateful one goes on from its last state."""
        out = jax.block_until_ready(self.function(*self.args))
        if self.stateful:
            self.args = (out[0], *self.args[1:])
        return out


def _brief(results: Any) -> str:
    """Write single floats, or else the number of arrays."""
    leaves = jax.tree.leaves(results)
    numbers = [f"{float(x):.4f}" for x in leaves if x.ndim == 0 and x.dtype.kind != "i"]
    return ", ".join(numbers) or f"{len(leaves)} array{'s' * (len(leaves) != 1)}"
