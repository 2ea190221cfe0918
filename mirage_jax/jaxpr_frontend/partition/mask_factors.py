"""Masks that a huge factor makes: ``logits + 1e9 * (mask - 1)``, where the mask is smaller than the logits.

In a region this is one sum, of which the search may take the factor out, or drop the constant from a softmax:
``logits + 1e9 * mask`` is as right over the reals, but float32 has no digit left for the logits. So XLA makes the mask,
and a kernel adds what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mirage_jax.jaxpr_frontend.jax_compat import Literal
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.mugraph.domains.floats import is_float
from mirage_jax.mugraph.passes.sentinels import HIGHEST_SENTINEL

MIN_BROADCAST = 4  # elements of a sum for each of the mask, from where storing the mask costs little


def factors(program: FlatProgram) -> set[int]:
    """Find the equations that multiply by a huge factor, or then add a constant, for a mask that is added to more."""
    found: set[int] = set()
    for n, eqn in enumerate(program.eqns):
        if eqn.primitive == "mul" and _is_huge(eqn) and _is_of_float_inputs(program, eqn):
            chain = list(_with_constants(program, n))
            (mask,) = program.eqns[chain[-1]].outputs
            if _is_added_to_more(program, mask):
                found.update(chain)
    return found


def _is_huge(eqn: FlatEqn) -> bool:
    numbers = [np.asarray(a.val) for a in eqn.inputs if isinstance(a, Literal)]
    return any(is_float(x.dtype) and abs(x.item()) >= -HIGHEST_SENTINEL for x in numbers)


def _is_of_float_inputs(program: FlatProgram, eqn: FlatEqn) -> bool:
    """Whether an equation is made of floats that no contraction made. Conditions become exact masks, and stay."""
    makers = (program.eqns[n] for n in program.upstream(eqn.reads))
    return all(m.primitive not in rules.CONTRACTION_PRIMITIVES and _reads_floats(m) for m in makers)


def _reads_floats(eqn: FlatEqn) -> bool:
    return all(is_float(a.dtype) for a in eqn.in_avals)


def _with_constants(program: FlatProgram, n: int) -> Iterator[int]:
    """An equation, and those after it that only add a constant to its result."""
    yield n
    while (n := _only_reader(program, n)) >= 0 and _adds(program.eqns[n]) and len(program.eqns[n].reads) == 1:
        yield n


def _only_reader(program: FlatProgram, n: int) -> int:
    """The position of the only equation that reads a result; -1 if there is another number of them."""
    (value,) = program.eqns[n].outputs
    readers = program.readers[value]
    return next(iter(readers)) if len(readers) == 1 else -1


def _adds(eqn: FlatEqn) -> bool:
    return eqn.primitive in ("add", "sub")


def _is_added_to_more(program: FlatProgram, mask: int) -> bool:
    """Whether views of a value are added to values of many more elements."""
    least = MIN_BROADCAST * math.prod(program.avals[mask].shape)
    todo = [mask]
    while todo:
        for eqn in (program.eqns[r] for r in program.readers[todo.pop()] if r >= 0):
            if _adds(eqn) and math.prod(eqn.out_avals[0].shape) >= least:
                return True
            todo += eqn.outputs if eqn.primitive in rules.VIEWS else ()
    return False
