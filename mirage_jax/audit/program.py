"""A random program as data: steps over named values, wrapped in JAX transformations.

A step is a line of Python over earlier values, with its shape and dtype. Shapes are texts over named sizes (``"n"``,
``"n * h"``), so that sizes can change while the steps stay. The same text of the function runs, is printed in
scripts, and is taken apart by the shrinker.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax.audit import wrappers
from mirage_jax.audit.fills import NOTHING, Fill, filled
from mirage_jax.verify.floats.input_classes import input_classes

type Function = Callable[..., Any]

SENTINELS = re.compile(r"finfo|-1e9|-1e30|-jnp\.inf|-6e4|is_causal")  # in the text of a step


@dataclass(frozen=True)
class ProgramValue:
    """A named array. Its shape is a tuple of texts over the program's sizes. `fill`: its contents as an argument."""

    name: str
    shape: tuple[str, ...]
    dtype: str
    fill: Fill = NOTHING

    @property
    def is_float(self) -> bool:
        """Whether its numbers are floats."""
        return self.dtype in ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ProgramStep:
    """``value = text``, where {0}, {1}, .. in the text are the values that it reads."""

    value: ProgramValue
    text: str
    reads: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.value.name} = {self.text.format(*self.reads)}"


@dataclass(frozen=True)
class Wrapper:
    """One transformation; `mapped` are the arguments to which vmap and scan add a leading dimension of `size`."""

    name: str
    mapped: tuple[bool, ...] = ()
    size: int = 0

    def __str__(self) -> str:
        texts = {
            "vmap": f"jax.vmap({{}}, in_axes={tuple(0 if m else None for m in self.mapped)})",
            "scan": f"scanned({{}}, mapped={self.mapped})",
            "grad": "gradients({})",
            "checkpoint": "jax.checkpoint({})",
            "jit": "jax.jit({})",
        }
        return texts[self.name]


@dataclass(frozen=True)
class Border:
    """Consecutive steps, by the names of their values, that run in a scope of their own.

    Kind "layers": a loop that carries along an argument, which result `carried[1]` replaces; without these two names
    it is a loop over constants.
    """

    kind: str
    inside: tuple[str, ...]
    carried: tuple[str, str] = ("", "")

    def call(self, reads: Sequence[str], results: Sequence[str]) -> str:
        """Write the expression of the wrapped part; {} is its name."""
        texts = {
            "jit": "jax.jit({})",
            "checkpoint": "jax.checkpoint({})",
            "cond": "branched({})",
            "while": "awaited({})",
            "layers": "looped({}, 'constants')",
        }
        if self.kind == "layers" and self.carried[0] in reads and self.carried[1] in results:
            return f"layered({{}}, {reads.index(self.carried[0])}, {results.index(self.carried[1])})"
        return texts.get(self.kind, f"looped({{}}, {self.kind!r})")


@dataclass(frozen=True)
class RandomProgram:
    """`inner` wrappers stand between the function and the optimizer, `outer` ones around it, innermost first. `same`:
    arguments that are given the array of an earlier one. `kind`: the class of input values. `borders` do not overlap.
    """

    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[ProgramValue, ...]
    steps: tuple[ProgramStep, ...]
    outputs: tuple[str, ...]
    inner: tuple[Wrapper, ...] = ()
    outer: tuple[Wrapper, ...] = ()
    same: tuple[tuple[int, int], ...] = ()
    kind: str = "normal"
    seed: int = 0
    borders: tuple[Border, ...] = ()

    @property
    def values(self) -> dict[str, ProgramValue]:
        """Arguments and values of steps, by name."""
        return {v.name: v for v in (*self.inputs, *(s.value for s in self.steps))}

    @property
    def cost(self) -> tuple[int, ...]:
        """Measures that a shrinker makes smaller, the most important first."""
        sizes = dict(self.sizes)
        elements = sum(size_of(v.shape, sizes) for v in self.values.values())
        scopes = len(self.inner + self.outer + self.borders)
        said, powers = (sum(v.fill.cost[n] for v in self.inputs) for n in (0, 1))
        return (len(self.steps), scopes, len(self.outputs), len(self.inputs), said, len(sizes), elements, powers)

    @property
    def features(self) -> tuple[str, ...]:
        """Unusual properties: a table of failures has a row for each."""
        has = {
            "a sentinel in its data": any(v.fill.low for v in self.inputs),
            "a sentinel in its text": any(SENTINELS.search(s.text) for s in self.steps),
            "scales": any(v.fill.power for v in self.inputs),
            "a border": bool(self.borders),
        }
        return tuple(what for what, holds in has.items() if holds)

    # ------------------------------------------------------------------ text

    def source(self) -> str:
        """Write the function and the sizes that it reads."""
        names = ", ".join(v.name for v in self.inputs)
        sizes = [f"{name} = {n}" for name, n in self.sizes]
        body = [f"    {line}" for line in self._lines()]
        return "\n".join([*sizes, "", "", f"def f({names}):", *body, f"    return {', '.join(self.outputs)},", ""])

    def _lines(self) -> Iterator[str]:
        border_of = {name: border for border in self.borders for name in border.inside}
        written: set[Border] = set()
        for step in self.steps:
            border = border_of.get(step.value.name)
            if border is None:
                yield str(step)
            elif border not in written:
                yield from self._part(border, f"part{len(written)}")
                written.add(border)

    def _part(self, border: Border, name: str) -> Iterator[str]:
        """A function of the steps within a border, and its call."""
        inside = [s for s in self.steps if s.value.name in border.inside]
        reads, results = self._interface(inside)
        yield f"def {name}({', '.join(reads)}):"
        for step in inside:
            yield f"    {step}"
        yield f"    return {', '.join(results)},"
        yield f"{', '.join(results)}, = {border.call(reads, results).format(name)}({', '.join(reads)})"

    def _interface(self, inside: Sequence[ProgramStep]) -> tuple[list[str], list[str]]:
        """Names that some steps read from others, and names of theirs that are read elsewhere: the last at least."""
        made = [s.value.name for s in inside]
        read_inside = [name for s in inside for name in s.reads]
        read_outside = {name for s in self.steps if s not in inside for name in s.reads}.union(self.outputs)
        results = [name for name in made if name in read_outside]
        return [name for name in dict.fromkeys(read_inside) if name not in made], results or made[-1:]

    def wrapped(self, around: str = "optimize({})") -> str:
        """Write the expression of the wrapped function; `around` takes the place of the optimizer."""
        text = "f"
        for wrapper in (*map(str, self.inner), around, *map(str, self.outer)):
            text = wrapper.format(text)
        return text

    def script(self, setting: object, title: str = "", environment: Mapping[str, str] = MappingProxyType({})) -> str:
        """Write a file that runs the program alone and prints differences; `environment`: variables that it sets."""
        specs = ", ".join(f"({shape}, {dtype!r})" for shape, dtype in self.specs)
        text = self.source() + self.wrapped()
        helpers = [inspect.getsource(h) for name, h in wrappers.HELPERS.items() if f"{name}(" in text]
        return "\n".join(
            [
                *(f"# {line}" for line in title.splitlines()),
                "import os",
                "import sys",
                "",
                *(f"os.environ.setdefault({name!r}, {value!r})" for name, value in environment.items()),
                "",
                "import jax",
                "import jax.numpy as jnp",
                "",
                "from mirage_jax.audit.differential import Setting, examine",
                *(["from mirage_jax.audit.fills import Fill"] if self.fills else []),
                "from mirage_jax.audit.program import arguments",
                "",
                *(f"\n{h}" for h in helpers),
                self.source(),
                "",
                "def program(optimize):  # plain JAX if optimize = jax.jit",
                f"    return {self.wrapped()}",
                "",
                "",
                f"args = arguments([{specs}], {self.kind!r}, {self.seed}, {self.same}, {self.fills})",
                f"outcome = examine(program, args, {setting!r})",
                'print("\\n".join(outcome.problems) or "agrees with float64 as well as plain jax.jit does")',
                "sys.exit(bool(outcome.problems))",
                "",
            ]
        )

    # ------------------------------------------------------------------ function and arguments

    @property
    def specs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the arguments of the wrapped function."""
        sizes = dict(self.sizes)
        out: list[tuple[tuple[int, ...], str]] = []
        for n, v in enumerate(self.inputs):
            leading = [w.size for w in reversed(self.inner + self.outer) if w.mapped and w.mapped[n]]
            out.append(((*leading, *shape_of(v.shape, sizes)), v.dtype))
        return out

    def with_fills(self, change: Callable[[ProgramValue], Fill]) -> RandomProgram:
        """Give every argument another fill."""
        return replace(self, inputs=tuple(replace(v, fill=change(v)) for v in self.inputs))

    @property
    def fills(self) -> dict[int, Fill]:
        """Fills of arguments, by number."""
        return {i: v.fill for i, v in enumerate(self.inputs) if v.fill != NOTHING}

    def function(self) -> Callable[[Function], Function]:
        """Build a function from an optimizer, or plain `jax.jit`, to the wrapped function."""
        scope: dict[str, Any] = {"jax": jax, "jnp": jnp, **wrappers.HELPERS}
        exec(compile(self.source(), "<random program>", "exec"), scope)
        build = eval(f"lambda optimize: {self.wrapped()}", scope)
        return build

    def arguments(self) -> list[np.ndarray]:
        """Draw the arguments."""
        return arguments(self.specs, self.kind, self.seed, self.same, self.fills)


def size_of(shape: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Count the elements of a shape."""
    return math.prod(shape_of(shape, sizes))


def shape_of(shape: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluate the texts of a shape, which the generator wrote."""
    return tuple(sizes[d] if d in sizes else int(eval(d, {"__builtins__": {}}, dict(sizes))) for d in shape)


def arguments(
    specs: Sequence[tuple[tuple[int, ...], str]],
    kind: str,
    seed: int,
    same: Sequence[tuple[int, int]] = (),
    fills: Mapping[int, Fill] = MappingProxyType({}),
) -> list[np.ndarray]:
    """Draw arrays of the given shapes, dtypes and fills; for ``(i, j)`` in `same`, array i is array j."""
    out = input_classes([(shape, jnp.dtype(dtype)) for shape, dtype in specs], seed)[kind]
    for i, fill in fills.items():
        out[i] = filled(out[i], fill, np.random.default_rng([seed, i]))
    for i, j in same:
        out[i] = out[j]
    return out
