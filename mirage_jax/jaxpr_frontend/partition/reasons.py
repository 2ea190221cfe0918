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
    COLLECTIVE = "collective"
    NO_HEAVY_OP = "too little work"
    LIBRARY = "library"
    LAYOUT = "layout"
    CONTEXT = "context"
    SHARDED = "sharded"
    DISABLED = "disabled"
    INTERNAL = "failed"


ADVICE = {  # does it matter, and what to write instead
    Code.UNSUPPORTED_PRIMITIVE: "harmless in masks and indices; between products, use primitives of docs/operators.md",
    Code.PARAMETERS: "harmless outside of hot chains; there, write it with the primitive's plain parameters",
    Code.DTYPE: "harmless in masks and indices; values that feed products should be floats",
    Code.PRECISION: 'leave `precision` at its default, or at "highest", to have it searched',
    Code.NON_FINITE: "harmless where it is rare; in a mask, use a large finite number such as -1e30",
    Code.ZERO_SIZE: "harmless: there is nothing to compute",
    Code.RANK0: "harmless: one number",
    Code.SYMBOLIC_DIM: "call with concrete shapes to have it searched",
    Code.EFFECT: "take prints and callbacks out of hot code: a region ends at each",
    Code.CONTROL_FLOW: "harmless: its body is searched by itself",
    Code.COLLECTIVE: "expected: regions are programs of one device, and end where it waits for others",
    Code.NO_HEAVY_OP: "harmless: XLA fuses it",
    Code.LIBRARY: "harmless: XLA's library is as fast as it gets",
    Code.LAYOUT: "it costs a pass over memory where it copies: put reshapes and slices before or after the chain",
    Code.CONTEXT: "expected: you placed it yourself",
    Code.SHARDED: "wrap it in `shard_map`, so that each device has a program of its own",
    Code.DISABLED: "as you asked",
    Code.INTERNAL: "a bug of ours: please report it",
}
BY_ITSELF = (Code.PARAMETERS, Code.PRECISION, Code.DTYPE)  # reasons that an equation has whatever is around it


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One equation that XLA keeps: its primitive, the reason, and the user's line."""

    primitive: str
    code: Code
    why: str
    where: str

    @property
    def advice(self) -> str:
        """Whether it matters, and what to write instead."""
        return ADVICE[self.code]

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
