"""Mutants of generated kernels: small changes of their text, which the interpreter has to find.

The graph's verifier never sees this text. Numbering as in `audit.mutations`: L* are mistakes of code generation, S*
mistakes of a schedule that a graph with named axes cannot express. Not here: missing barriers (there are none to leave
out: Triton places them) and `num_stages`, which is no mistake and which the interpreter does not look at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mirage_jax.lower.triton.emitter import KernelSource
from mirage_jax.lower.triton.two_forms import arguments
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.verify.exact.interpreters.triton import interpret_kernel

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class TextMutation:
    """A change of text. `rounding`: it changes the precision, so results may be right within a tolerance."""

    name: str
    change: str
    edits: Callable[[KernelSource], Iterator[KernelSource]]
    rounding: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.change}"


def _text(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> Callable[[KernelSource], Iterator[KernelSource]]:
    """Each match of a pattern replaced, one at a time; comments are left alone."""

    def edits(source: KernelSource) -> Iterator[KernelSource]:
        for pattern, new in rules:
            for m in re.finditer(pattern, source.text, re.MULTILINE):
                changed = m.expand(new) if isinstance(new, str) else new(m)
                if changed != m[0]:
                    yield replace(source, text=source.text[: m.start()] + changed + source.text[m.end() :])

    return edits


def _smaller_grid(source: KernelSource) -> Iterator[KernelSource]:
    if source.grid[0] > 1:
        yield replace(source, grid=(source.grid[0] - 1,))


def _without_log2e(m: re.Match[str]) -> str:
    return f"{m[1]}{float(m[2]) / LOG2E!r}"


def _one_step_less(m: re.Match[str]) -> str:
    start, stop, step = m.groups()
    return f"range({start}, {stop} - {step} + ({stop} % {step} == 0), {step})"


START = r"(?<= )(\w+_block \* \d+|\w+_start)"
INDEX = r"\w+(?:\[[^\]]*\])?"
LOWERING: tuple[TextMutation, ...] = (
    TextMutation("L1", "two strides exchanged", _text((rf"({INDEX}) \* (\d+) \+ ({INDEX})(?=[,)])", r"\1 + \3 * \2"))),
    TextMutation("L2", "every step reads the first tile", _text((r"(?<= )\w+_start \+ ", "0 + "))),
    TextMutation(
        "L3",
        "a 16-bit accumulator",
        _text((r"(?<== )tl\.dot\(\w+, \w+, \w+(, input_precision=.*)?\)$", r"\g<0>.to(tl.float16).to(tl.float32)")),
        rounding=True,
    ),
    TextMutation("L5", "results added to what is there", _text((r"tl\.store\(", "tl.atomic_add("))),
    TextMutation(
        "L6",
        "another type",
        _text(
            (r"\.to\(tl\.float16\)", ".to(tl.bfloat16).to(tl.float16)"),
            (r"^( +)(\w+) = tl\.load\(.*\)$", r"\g<0>\n\1\2 = \2.to(tl.float16).to(\2.dtype)"),
        ),
        rounding=True,
    ),
    TextMutation("L7", "exp2 without log2(e)", _text((r"(\* -?|tl\.fma\(.*?, )(\d+\.\d{6,})", _without_log2e))),
    TextMutation("L9", "an output not fully written", _smaller_grid),
    TextMutation("L10", "a store off by one", _text((r"tl\.store\(out\d+ \+ ", r"\g<0>1 + "))),
    TextMutation("S3", "the last step skipped", _text((r"range\((\w+), (\w+), (\w+)\)", _one_step_less))),
    TextMutation("S5", "an accumulator that starts at 1", _text((r"(tl\.full\(\([\d, ]+\)), 0\.0,", r"\1, 1.0,"))),
    TextMutation("S6", "not rescaled", _text((r" \* decay\d+(?:\[[^\]]*\])?", ""))),
    TextMutation("S7", "the shift not carried", _text((r"tl\.maximum\(shift\d+, (.*)\)$", r"\1"))),
    TextMutation("S9", "a tile off by one", _text((rf"{START} \+ tl\.arange", r"\1 + 1 + tl.arange"))),
    TextMutation("S10", "a mask removed", _text((r", mask=.*, other=0\.0\)", ")"), (r", mask=[^,]*\)$", ")"))),
    TextMutation("S11", "< -> <=", _text((r"(?<= )(\w+_mask = \w+) < ", r"\1 <= "))),
    TextMutation(
        "S12",
        "0 for -inf in padding, or another number",
        _text(
            (r', float\("-inf"\)\)', ", 0.0)"),
            (r"(tl\.where\(.*, )0\.0\)", r"\g<1>1.0)"),
            (r"other=0\.0", "other=1.0"),
        ),
    ),
)  # fmt: skip


def run(graph: KernelGraph, sources: Sequence[KernelSource], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compute the outputs of the graph with these texts for its kernels. Raises any error of a kernel."""
    env: dict[str, Any] = {t.name: np.asarray(a, order="C") for t, a in zip(graph.inputs, arrays, strict=True)}
    for source in sources:
        env |= zip(source.outputs, interpret_kernel(source, arguments(source.inputs, env)), strict=True)
    return [env[name] for name in graph.outputs]


def mutants(
    sources: Sequence[KernelSource], mutations: Sequence[TextMutation] = LOWERING
) -> Iterator[tuple[TextMutation, list[KernelSource]]]:
    """Change one of the kernels of a graph, in every way."""
    for mutation in mutations:
        for n, source in enumerate(sources):
            for changed in mutation.edits(source):
                yield mutation, [*sources[:n], changed, *sources[n + 1 :]]


def error(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """Measure the largest error over the largest value; infinite if not all is finite."""
    with np.errstate(all="ignore"):
        errors = [np.abs(x.astype(np.float64) - y).max() / np.abs(y).max() for x, y in zip(got, want, strict=True)]
    return max(float(e) if np.isfinite(e) else np.inf for e in errors)
