"""Mutants of generated kernels do not get through the interpreter, unless they compute the very same bits."""

import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
from lower.kernels import Program, attention, gated_mlp, ntrans, rmsnorm, split_attention

pytest.importorskip("triton")

from mirage_jax.audit.lowering import LOWERING, TextMutation, error, mutants, run
from mirage_jax.errors import LoweringError
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.lower.triton.emitter import KernelSource

# program, scale of its first input, tolerance. Only large logits tell a wrong shift, which is none for small ones.
CASES = {
    "rmsnorm": (rmsnorm("f32", i=5, k=50, j=27), 1, 2e-6),
    "gated_mlp": (gated_mlp("f16", i=19, k=40, j=20), 1, 2e-3),
    "attention, large": (attention("f32", i=20, n=50, d=8), 500, 1e-3),
    "split_attention, large": (split_attention("f16", i=9, n=50, d=8, parts=3), 500, 1e-2),
    "ntrans": (ntrans("f32", i=3, k=37), 1, 2e-6),
}


@dataclass
class Case:
    """A program on some inputs: what its kernels compute, and what they should."""

    program: Program
    scale: float
    tolerance: float

    def __post_init__(self) -> None:
        self.texts = [s for s in sources(self.program.graph, self.program.schedule) if s is not None]
        first, *others = self.program.inputs(3)
        self.inputs = [(first * self.scale).astype(first.dtype), *others]
        self.right, self.want = run(self.program.graph, self.texts, self.inputs), [self.program.want(self.inputs)]
        assert error(self.right, self.want) < self.tolerance

    def fate(self, changed: list[KernelSource]) -> str:
        try:
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # about rows that are all NaN
                got = run(self.program.graph, changed, self.inputs)
        except LoweringError:  # writes where it may not
            return "killed"
        if error(got, self.want) >= self.tolerance:
            return "killed"
        same = all(x.tobytes() == y.tobytes() for x, y in zip(got, self.right, strict=True))
        return "the same bits" if same else "other bits"


@pytest.fixture(scope="module")
def fates() -> dict[str, Counter[str]]:
    """By operator: how many are killed (by any input), compute the same bits as before, or get through."""
    best: dict[tuple[str, str], str] = {}
    for case in (Case(*c) for c in CASES.values()):
        for mutation, changed in mutants(case.texts):
            key = str(mutation), "\n".join(s.text for s in changed) + str([s.grid for s in changed])
            best[key] = min(best.get(key, "the same bits"), case.fate(changed), key=FATES.index)
    found = {str(m): Counter[str]() for m in LOWERING}
    for (name, text), fate in best.items():
        rounding = fate == "other bits" and by_name[name].rounding
        found[name]["rounding" if rounding else f"through:\n{text}" if fate == "other bits" else fate] += 1
    return found


FATES = ("killed", "other bits", "the same bits")
by_name: dict[str, TextMutation] = {str(m): m for m in LOWERING}


def test_nothing_gets_through(fates: dict[str, Counter[str]]) -> None:
    through = [f"{m} {fate}" for m, count in fates.items() for fate in count if fate.startswith("through")]
    assert not through, "\n".join(through)


@pytest.mark.parametrize("mutation", LOWERING, ids=str)
def test_every_operator_kills(fates: dict[str, Counter[str]], mutation: TextMutation) -> None:
    assert fates[str(mutation)]["killed"] > 0, fates[str(mutation)]


def test_redzones() -> None:
    """A store one element past the end of an output is no store into somebody else's memory."""
    program = ntrans("f32", i=1, k=16)
    (text,) = [s for s in sources(program.graph, program.schedule) if s is not None]
    (past,) = [s for m, s in mutants([text]) if m.name == "L10"]
    with pytest.raises(LoweringError, match="stores element 16 of output Y"):
        run(program.graph, past, program.inputs())
