"""Structural fingerprints: equations compared up to renaming of values, so that equal layers are looked at once.

The form of an equation is a number: primitive, parameters, types and literals. The form of a piece of a program is the
forms of its equations with its values numbered in order of appearance; pieces of one form have the same translation.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import JaxprEqn, Literal, has_context, has_effects
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram

MAX_CONTEXT_EQUATIONS = 5  # steps around an equation that are compared to say that another is like it


class Forms:
    """Forms of a program's equations: `of` has the number of each, by position."""

    def __init__(self, eqns: Sequence[FlatEqn]) -> None:
        self.eqns = eqns
        numbers: dict[Hashable, int] = {}
        known: dict[int, int] = {}  # by identity: calls of one cached function share its equations
        self.of: list[int] = []
        for eqn in eqns:
            if (number := known.get(id(eqn.eqn))) is None:
                key = _key(eqn.eqn)
                try:
                    number = numbers.setdefault(key, len(numbers))
                except TypeError:  # a parameter that has no hash: the equation is like no other
                    number = numbers.setdefault(("alone", id(eqn.eqn)), len(numbers))
                known[id(eqn.eqn)] = number
            self.of.append(number)

    def piece(self, positions: Sequence[int], results: Sequence[int]) -> Hashable:
        """Fingerprint equations in their order, whose `results` are wanted."""
        names: dict[int, int] = {}
        form: list[int] = []
        for n in positions:
            eqn = self.eqns[n]
            form.append(self.of[n])
            for v in eqn.reads:
                form.append(names.setdefault(v, len(names)))
            for v in eqn.outputs:
                names[v] = len(names)
        return tuple(form), tuple([names[v] for v in results])


def by_kind[K](kinds: Sequence[K]) -> tuple[Sequence[K], dict[K, list[int]]]:
    """Return kinds by position, and the positions of each kind."""
    positions: dict[K, list[int]] = {}
    for n, kind in enumerate(kinds):
        positions.setdefault(kind, []).append(n)
    return kinds, positions


def surroundings(program: FlatProgram, kinds: Sequence[Hashable]) -> list[int]:
    """Hash each equation of these kinds with its neighbours, as far as `MAX_CONTEXT_EQUATIONS` away."""
    after = [[r for v in eqn.outputs for r in program.readers[v]] for eqn in program.eqns]
    before = [[program.producers.get(v, -1) for v in eqn.reads] for eqn in program.eqns]
    hashes = list(map(hash, kinds))
    for _ in range(MAX_CONTEXT_EQUATIONS):
        old = [*hashes, 0].__getitem__  # -1: an input or a result of the program
        hashes = [
            hash((old(n), tuple(map(old, before[n])), tuple(sorted(map(old, after[n]))))) for n in range(len(hashes))
        ]
    return hashes


def _key(eqn: JaxprEqn) -> Hashable:
    inputs = tuple([_literal(v) if isinstance(v, Literal) else v.aval for v in eqn.invars])
    outputs = tuple([v.aval for v in eqn.outvars])
    name, params = jax_compat.meaning(eqn)
    return name, tuple(params.items()), inputs, outputs, has_context(eqn), has_effects(eqn)


def _literal(literal: Any) -> Hashable:
    """By its bytes: nan is nan, and -0.0 is not 0.0."""
    value = np.asarray(literal.val)
    return value.dtype, value.tobytes(), literal.aval


def digest(eqns: Sequence[FlatEqn], inputs: Sequence[int], results: Sequence[int]) -> str:
    """Hash the computation of `results` from `inputs`, in any order of the equations, the same in every process.

    Programs with one muGraph may differ: casts and roundings are no operators, masks are found among others.
    """
    known = {v: f"input {n}" for n, v in enumerate(inputs)}
    for eqn in eqns:
        operands = [known.get(a, "no input") if isinstance(a, int) else str(_literal(a)) for a in eqn.inputs]
        described = (_described(eqn.eqn), *operands)
        for n, v in enumerate(eqn.outputs):
            known[v] = hashlib.sha256(repr((*described, n)).encode()).hexdigest()
    return hashlib.sha256(repr([known[v] for v in results]).encode()).hexdigest()[:32]


def fingerprint(program: FlatProgram) -> str:
    """Hash a program's equations in their order, the same in every process.

    Inputs that nobody reads do not count, as JAX drops them. Programs with one hash compute the same, except for
    functions among parameters.
    """
    forms = Forms(program.eqns)
    texts: dict[int, str] = {}
    for form, eqn in zip(forms.of, program.eqns, strict=True):
        if form not in texts:
            literals = [str(_literal(a)) for a in eqn.inputs if not isinstance(a, int)]
            texts[form] = _ADDRESS.sub("", f"{_described(eqn.eqn)} {literals}")
    borders = [(*eqn.reads, *eqn.outputs) for eqn in program.eqns]
    names = {v: n for n, v in enumerate(dict.fromkeys(itertools.chain.from_iterable(borders)))}
    wiring = [[form, *map(names.__getitem__, border)] for form, border in zip(forms.of, borders, strict=True)]
    results = [names.get(a, -1) if isinstance(a, int) else -1 for a in program.outputs]
    whole = repr((list(texts.items()), wiring, results))
    return hashlib.sha256(whole.encode()).hexdigest()


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _described(eqn: JaxprEqn) -> str:
    """Primitive, parameters and types of an equation as text."""
    name, params = jax_compat.meaning(eqn)
    types = [(str(v.aval), getattr(v.aval, "weak_type", False)) for v in (*eqn.invars, *eqn.outvars)]
    return repr((name, [(k, str(params[k])) for k in sorted(params)], types))
