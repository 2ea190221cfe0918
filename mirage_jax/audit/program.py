"""A random program as data: steps over named values, wrapped in JAX transformations.

A step is a line of Python over earlier values, with its shape and dtype. Shapes are texts over named sizes (``"n"``,
``"n * h"``), so that sizes can change while the steps stay. The text of the function is what runs, what a script
prints and what the shrinker takes apart: there is no second meaning.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax.audit import wrappers
from mirage_jax.verify.input_classes import input_classes

type Function = Callable[..., Any]


@dataclass(frozen=True)
class Value:
    """A named array. Its shape is a tuple of texts over the program's sizes."""

    name: str
    shape: tuple[str, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Step:
    """``value = text``, where {0}, {1}, .. in the text are the values that it reads."""

    value: Value
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
        match self.name:
            case "vmap":
                return f"jax.vmap({{}}, in_axes={tuple(0 if m else None for m in self.mapped)})"
            case "scan":
                return f"scanned({{}}, mapped={self.mapped})"
            case "grad":
                return "gradients({})"
            case "checkpoint":
                return "jax.checkpoint({})"
            case _:
                return "jax.jit({})"


@dataclass(frozen=True)
class Program:
    """`inner` wrappers stand between the function and the optimizer, `outer` ones around it, innermost first. `same`:
    arguments that are given the array of an earlier one. `kind`: the class of input values.
    """

    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    inner: tuple[Wrapper, ...] = ()
    outer: tuple[Wrapper, ...] = ()
    same: tuple[tuple[int, int], ...] = ()
    kind: str = "normal"
    seed: int = 0

    @property
    def values(self) -> dict[str, Value]:
        return {v.name: v for v in (*self.inputs, *(s.value for s in self.steps))}

    @property
    def cost(self) -> tuple[int, ...]:
        """What a shrinker makes smaller."""
        sizes = dict(self.sizes)
        elements = sum(size_of(v.shape, sizes) for v in self.values.values())
        wrappers = len(self.inner + self.outer)
        return (len(self.steps), wrappers, len(self.outputs), len(self.inputs), len(sizes), elements)

    # ------------------------------------------------------------------ text

    def source(self) -> str:
        """The function and the sizes that it reads."""
        names = ", ".join(v.name for v in self.inputs)
        sizes = [f"{name} = {n}" for name, n in self.sizes]
        body = [f"    {step}" for step in self.steps]
        return "\n".join([*sizes, "", "", f"def f({names}):", *body, f"    return {', '.join(self.outputs)},", ""])

    def wrapped(self, around: str = "optimize({})") -> str:
        """The expression of the wrapped function; `around` stands where the optimizer does."""
        text = "f"
        for wrapper in (*map(str, self.inner), around, *map(str, self.outer)):
            text = wrapper.format(text)
        return text

    def script(self, setting: object, title: str = "", environment: Mapping[str, str] = MappingProxyType({})) -> str:
        """A file that runs the program alone and says what differs; `environment`: variables that it sets."""
        specs = ", ".join(f"({shape}, {dtype!r})" for shape, dtype in self.specs)
        used = {w.name for w in self.inner + self.outer}
        helpers = [inspect.getsource(h) for name, h in wrappers.HELPERS.items() if name in used]
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
                "from mirage_jax.audit.program import arguments",
                "",
                *(f"\n{h}" for h in helpers),
                self.source(),
                "",
                "def program(optimize):  # plain JAX if optimize = jax.jit",
                f"    return {self.wrapped()}",
                "",
                "",
                f"args = arguments([{specs}], {self.kind!r}, {self.seed}, {self.same})",
                f"outcome = examine(program, args, {setting!r})",
                'print("\\n".join(outcome.problems) or "agrees with float64 as well as plain jax.jit does")',
                "sys.exit(bool(outcome.problems))",
                "",
            ]
        )

    # ------------------------------------------------------------------ what runs

    @property
    def specs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the arguments of the wrapped function."""
        sizes = dict(self.sizes)
        out: list[tuple[tuple[int, ...], str]] = []
        for n, v in enumerate(self.inputs):
            leading = [w.size for w in reversed(self.inner + self.outer) if w.mapped and w.mapped[n]]
            out.append(((*leading, *shape_of(v.shape, sizes)), v.dtype))
        return out

    def function(self) -> Callable[[Function], Function]:
        """What `optimize` (or plain `jax.jit`) is passed to, giving the wrapped function."""
        scope: dict[str, Any] = {"jax": jax, "jnp": jnp, **{h.__name__: h for h in wrappers.HELPERS.values()}}
        exec(compile(self.source(), "<random program>", "exec"), scope)
        build = eval(f"lambda optimize: {self.wrapped()}", scope)
        return build

    def arguments(self) -> list[np.ndarray]:
        return arguments(self.specs, self.kind, self.seed, self.same)


def size_of(shape: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(shape_of(shape, sizes))


def shape_of(shape: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Numbers for the texts of a shape; the texts are the generator's own."""
    return tuple(sizes[d] if d in sizes else int(eval(d, {"__builtins__": {}}, dict(sizes))) for d in shape)


def arguments(
    specs: Sequence[tuple[tuple[int, ...], str]], kind: str, seed: int, same: Sequence[tuple[int, int]] = ()
) -> list[np.ndarray]:
    """Arrays of the given shapes and dtypes; for ``(i, j)`` in `same`, number i is number j again."""
    out = input_classes([(shape, jnp.dtype(dtype)) for shape, dtype in specs], seed)[kind]
    for i, j in same:
        out[i] = out[j]
    return out
