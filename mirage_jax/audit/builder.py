"""A random program while it grows: its sizes, arguments, steps and borders. Every choice comes from one generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from mirage_jax.audit.fills import NOTHING, Fill
from mirage_jax.audit.program import Border, ProgramStep, ProgramValue, size_of

SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33)
DTYPES = ("float32",) * 7 + ("bfloat16", "float16", "float16")

type Fragment = Callable[[ProgramBuilder, ProgramValue], ProgramValue]


class ProgramBuilder:
    """A program that grows; every choice comes from `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choice(DTYPES)
        self.sizes: dict[str, int] = {}
        self.inputs: list[ProgramValue] = []
        self.steps: list[ProgramStep] = []
        self.borders: list[Border] = []
        self.against: tuple[str, ...] = ()  # a factor, and two whose product the program does not have
        for name in "abcd"[: rng.randint(2, 4)]:
            self.sizes[name] = rng.choice(SIZES)

    def size(self) -> str:
        """Draw the name of a size."""
        return self.rng.choice(list(self.sizes))

    def input(self, shape: Sequence[str], dtype: str | None = None, fill: Fill = NOTHING) -> ProgramValue:
        """A new argument, or at times an earlier one of the same type."""
        dtype = dtype or self.dtype
        known = [v for v in self.inputs if (v.shape, v.dtype, v.fill) == (tuple(shape), dtype, fill)]
        if known and self.rng.random() < 0.15:
            return self.rng.choice(known)
        self.inputs.append(ProgramValue(f"x{len(self.inputs)}", tuple(shape), dtype, fill))
        return self.inputs[-1]

    def step(self, text: str, *reads: ProgramValue, shape: Sequence[str], dtype: str | None = None) -> ProgramValue:
        """Add a step; by default it has the type of the first value it reads."""
        made = ProgramValue(f"t{len(self.steps)}", tuple(shape), dtype or reads[0].dtype)
        self.steps.append(ProgramStep(made, text, tuple(v.name for v in reads)))
        return made

    def like(self, text: str, *reads: ProgramValue) -> ProgramValue:
        """Add a step whose value has the shape of the first value it reads."""
        return self.step(text, *reads, shape=reads[0].shape)

    def elements(self, *shape: str) -> int:
        """Count the elements of a shape."""
        return size_of(shape, self.sizes)

    @property
    def values(self) -> list[ProgramValue]:
        """Arguments and values of steps."""
        return [*self.inputs, *(s.value for s in self.steps)]

    def any(self, rank: int = 0) -> ProgramValue:
        """A value of at least this rank, the newer the likelier; a new input if there is none."""
        found = [v for v in self.values if len(v.shape) >= rank and v.is_float and not v.fill.where]
        if not found or self.rng.random() < 0.2:
            prefix = [self.size()] if self.rng.random() < 0.2 else []
            return self.input([*prefix, *(self.size() for _ in range(max(rank, 2)))])
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))]

    def with_type(self, v: ProgramValue, dtype: str) -> ProgramValue:
        """Cast a value, unless it has the type."""
        return v if v.dtype == dtype else self.step(f"{{0}}.astype({dtype!r})", v, shape=v.shape, dtype=dtype)
