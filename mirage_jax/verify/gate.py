"""The interface that all checks of a candidate share: each looks at the candidate and returns a `Verdict`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from mirage_jax.errors import VerificationError
from mirage_jax.mugraph.graph import KernelGraph


class Verdict(NamedTuple):
    """Whether a candidate passed one gate, and why, as the report prints it."""

    passed: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.passed


class Gate[Candidate](Protocol):
    """A check that a candidate must pass before it may run in place of XLA's code."""

    @property
    def name(self) -> str:
        """Name the gate, as reports and error messages do."""
        ...

    def check(self, candidate: Candidate) -> Verdict:
        """Judge one candidate. Refusals are verdicts, not exceptions."""
        ...


class HasGraph(Protocol):
    """A candidate of the search, or a winner."""

    @property
    def graph(self) -> KernelGraph:
        """The muGraph that may replace the program."""
        ...


def required[Candidate](gate: Gate[Candidate], candidate: Candidate) -> str:
    """Return what a gate says about a candidate that passes.

    Raises:
        VerificationError: the gate refuses it.
    """
    passed, why = gate.check(candidate)
    if not passed:
        raise VerificationError(f"refused by the {gate.name}: {why}")
    return why
