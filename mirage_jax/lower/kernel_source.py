"""A kernel as a back end writes it: its text, and how it is launched."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mirage_jax.lower.hopper.shared_memory import Descriptor
from mirage_jax.lower.triton.expressions import Number


@dataclass(frozen=True)
class KernelSource:
    """A kernel ready to be loaded: text, launch grid and the device tensors that it takes, inputs before outputs."""

    name: str
    text: str
    grid: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]  # of inputs, then of outputs
    shapes: tuple[tuple[int, ...], ...]  # of outputs, in memory order
    num_warps: int
    num_stages: int
    numbers: Mapping[float, Number | None] = field(default_factory=dict, compare=False)
    """What literals of the text stand for exactly, where they are not what they say; None: more than one number."""
    descriptors: tuple[Descriptor | None, ...] = ()
    """Of a kernel in Gluon: the inputs that it takes as descriptors for the copy engine."""
    rewrites: bool = False
    """May a program write its results a second time?"""
    backend: str = "triton"
    """The name of the back end that wrote the text, and that launches, compiles and interprets it."""

    @cached_property
    def digest(self) -> str:
        """Name the text by its hash."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]
