"""Why an equation stays with XLA: a closed set of codes, and the record that `explain` prints.

Leaving an equation out is a value, never an error: the equation runs as the user wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mirage_jax.errors import UnsupportedError


class Code(StrEnum):
    """The reasons for which an equation is left to XLA."""

    UNSUPPORTED_PRIMITIVE = "unsupported primitive"
    PARAMETERS = "unsupported parameters"
    DTYPE = "dtype"
    PRECISION = "precision"
    NON_FINITE = "non-finite constant"
    ZERO_SIZE = "zero size"
    RANK0 = "scalar"
    SYMBOLIC_DIM = "symbolic dimension"
    EFFECT = "effect"
    CONTROL_FLOW = "control flow"
    NO_HEAVY_OP = "no contraction or reduction"
    LIBRARY = "library"
    LAYOUT = "layout"
    CONTEXT = "context"
    SHARDED = "sharded"
    DISABLED = "disabled"
    INTERNAL = "failed"


BY_ITSELF = (Code.PARAMETERS, Code.PRECISION, Code.DTYPE)  # reasons that an equation has whatever is around it


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One equation that XLA keeps: its primitive, the reason, and the user's line."""

    primitive: str
    code: Code
    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.primitive}: {self.code} ({self.why}) at {self.where}"


class NotExpressible(UnsupportedError):
    """A muGraph cannot say what this equation does; the equation is left out of its region.

    `equation`: its position, where another equation than the one that is being translated is to blame.
    """

    def __init__(self, code: Code, why: str, equation: int | None = None):
        super().__init__(f"{code}: {why}")
        self.code = code
        self.why = why
        self.equation = equation
