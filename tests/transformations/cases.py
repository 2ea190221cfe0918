"""What a case is: a program written with `jit`, which stands for `jax.jit` or for `mirage_jax.optimize`."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformations.functions import (
    MATRICES,
)

type Jit = Callable[..., Any]


class Promise(Enum):
    """What `optimize` makes of the regions of a case. On a GPU all of them are replaced."""

    WINS = "a region is replaced by less arithmetic"
    DECIDED = "regions are found and decided on"
    XLA = "nothing is decided"


WINS, DECIDED, XLA = Promise


@dataclass(frozen=True)
class Case:
    """`make(jit)` gives the function that is called with `args`, inside of one more `jax.jit` unless `eager`.

    gradient: the whole is also differentiated, in "forward" or "reverse" mode. why: what `explain` says of a region, of
    a function that is called with `args` itself. gpu: one of the subset that runs on a GPU. looser: a factor on the
    tolerance.
    """

    name: str
    make: Callable[[Jit], Callable[..., Any]]
    args: tuple[Any, ...] = MATRICES
    promise: Promise = WINS
    gradient: str = ""
    eager: bool = False
    why: str = ""
    gpu: bool = False
    devices: int = 1
    looser: float = 1.0

    def __str__(self) -> str:
        return self.name
