"""``remat="regions"``: large values that are cheap to make again are not kept for the backward pass.

A contraction *expands* if it makes more numbers than it reads and sums few of them for each: queries times keys. What
pointwise operators make of its result is as large: masked scores, weights. JAX would keep such values from the forward
to the backward pass. Here they form *units*, with the equations that read them (weights times values), and a unit
keeps what it reads instead; a backward kernel makes tiles of the scores anew, as FlashAttention's does (Dao, 2023).
Where a unit would read something small that is shown large, as a mask of lengths, it keeps what is small.

Where the function is differentiated from outside, its units become checkpoints (`checkpointed`), and JAX's own rules do
the rest. Where it differentiates itself, both passes are one program by now; the backward pass gets copies of the
equations (`repeated`), which wait for the cotangents that they meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr
from mirage_jax.jaxpr_frontend.partition.clusters import Dependencies, convex_clusters, in_order
from mirage_jax.jaxpr_frontend.partition.program import (
    FlatEqn,
    FlatProgram,
    as_jaxpr,
    bytes_of,
    flatten,
    flatten_undifferentiated,
    without_dead_code,
)
from mirage_jax.jaxpr_frontend.translate import rules

MAX_CHEAP_SUM_ELEMENTS = (
    256  # numbers summed for one result, up to which that takes no longer than writing and reading it
)


@dataclass(frozen=True)
class Unit:
    """Equations, by position, that make and read large values; `large` are those that they make."""

    equations: tuple[int, ...]
    large: frozenset[int]


class _Units:
    """Finds the units of a program."""

    def __init__(self, program: FlatProgram) -> None:
        self.eqns, self.avals = program.eqns, program.avals
        self.dependencies = Dependencies.of(program)
        self.cheap = {n for n, eqn in enumerate(self.eqns) if _is_cheap(eqn)}
        self.made = program.producers
        self.families = self._families()
        self.members = set[int]().union(*map(self._members, self.families))

    @cached_property
    def clusters(self) -> list[tuple[int, ...]]:
        """Of the equations that make or read large values, those that can be one step each."""
        return convex_clusters(self.dependencies, self.members)

    def run(self) -> list[Unit]:
        """Units in execution order, which do not depend on each other in a circle."""
        large = set[int]().union(*self.families)
        units: list[Unit] = []
        for cluster in self.clusters:
            own = large & {v for n in cluster for v in self.eqns[n].outputs}
            used = {
                v for n in cluster if self.eqns[n].primitive not in rules.LAYOUT_PRIMITIVES for v in self.eqns[n].reads
            }
            if own & used and any(self._expands(self.made[v]) for v in own):
                units.append(Unit(cluster, frozenset(own)))
        return units

    @cached_property
    def free(self) -> set[int]:
        """Equations that are made of nothing but literals and iotas: masks. Every unit makes its own."""
        free: set[int] = set()
        for n, eqn in enumerate(self.eqns):
            if n in self.cheap and all(self.made.get(v) in free for v in eqn.reads):
                free.add(n)
        return free

    @cached_property
    def shown_large(self) -> set[int]:
        """Equations that make more elements than they read, of free ones and of each other, and no sums: masks of
        lengths and segments, broadcast statistics. Every unit makes its own of what is small.
        """
        found: set[int] = set()
        for n in sorted(self.cheap - self.free):
            eqn = self.eqns[n]
            count = min((a.size for a in eqn.out_avals), default=0)
            reads = [v for v in eqn.reads if self.made.get(v) not in self.free]
            small = sum(self.avals[v].size for v in reads if self.made.get(v) not in found)
            least = max((self.avals[v].size for v in reads if self.made.get(v) in found), default=0)
            if eqn.primitive not in rules.CONTRACTION_PRIMITIVES and small < count >= least:
                found.add(n)
        return found

    @cached_property
    def large(self) -> frozenset[int]:
        """What all units make."""
        return frozenset[int]().union(*(unit.large for unit in self.run()))

    def _families(self) -> list[set[int]]:
        """Large values; those that are made of each other are together. What is made of another large value that has
        to be kept is none: keeping the result instead takes no more (x W + x A B).
        """
        families: list[set[int]] = []
        sizes: dict[int, int] = {}
        held = self._held()
        for n in sorted(self.cheap - self.free):
            eqn = self.eqns[n]
            given = {v for v in eqn.reads if v in sizes}
            least = max((sizes[v] for v in given), default=math.inf)
            results = zip(eqn.outputs, eqn.out_avals, strict=True)
            kept = max((held.get(v, 0) for v in eqn.reads if v not in sizes), default=0)
            made = {v: a.size for v, a in results if self._expands(n) or (a.size >= least and kept < bytes_of(a))}
            if made:
                touching = [f for f in families if f & given]
                families = [f for f in families if f not in touching] + [set(made).union(*touching)]
                sizes |= made
        return families

    def _held(self) -> dict[int, int]:
        """The bytes that have to be kept so that a value is there. None for inputs of the program, which are kept
        anyway, and for what is small but shown large; what is pointwise takes as much as its operands.
        """
        held: dict[int, int] = {}
        for n, eqn in enumerate(self.eqns):
            if n in self.free or n in self.shown_large:
                continue
            for v, aval in zip(eqn.outputs, eqn.out_avals, strict=True):
                held[v] = bytes_of(aval)
                if n not in self.cheap or _is_product(eqn):
                    continue
                if alike := [held.get(u, 0) for u in eqn.reads if self.avals[u].size == aval.size]:
                    held[v] = min(held[v], max(alike))
        return held

    def _expands(self, n: int) -> bool:
        eqn = self.eqns[n]
        is_cheap_product = n in self.cheap and n not in self.free and eqn.primitive == "dot_general"
        return is_cheap_product and eqn.out_avals[0].size > sum(a.size for a in eqn.in_avals)

    def _members(self, family: set[int]) -> set[int]:
        """The equations that make or read a family's values, and those between them that make row statistics."""
        makers = {self.made[v] for v in family}
        readers = {
            n
            for n, eqn in enumerate(self.eqns)
            if (n in self.cheap or _is_product(eqn)) and not family.isdisjoint(eqn.reads)
        }
        between = {n for n in self.cheap - self.free if not _is_product(self.eqns[n])}
        above, below = set(makers), set(makers)
        for n in sorted(between):
            if below & self.dependencies.before[n]:
                below.add(n)
        for n in sorted(between | makers, reverse=True):
            if n in above:
                above |= self.dependencies.before[n] & between
        return makers | readers | (above & below)

    def alone(self, unit: Unit) -> set[int]:
        """The cheap equations of a unit, what is shown large to them, and others that read nothing but what these
        make.
        """
        body = self.cheap.intersection(self.sources(unit.equations, self.shown_large))
        for n in sorted(self.cheap - self.free - body):
            reads = {self.made.get(v) for v in self.eqns[n].reads} - self.free
            if reads and reads <= body:
                body.add(n)
        return body

    def sources(self, equations: Iterable[int], of: set[int]) -> list[int]:
        """The equations among `of` that the given ones need, and these."""
        found, todo = set(equations), list(equations)
        while todo:
            more = (self.dependencies.before[todo.pop()] & of) - found
            found |= more
            todo += more
        return sorted(found)


def _is_product(eqn: FlatEqn) -> bool:
    return eqn.primitive == "dot_general" and not eqn.effects


def _summed(shape: Sequence[int], params: Mapping[str, Any]) -> int:
    """How many numbers a product sums for each result, from the shape of its first operand."""
    (over, _), _ = params["dimension_numbers"]
    return math.prod(shape[d] for d in over)


def _is_cheap(eqn: FlatEqn) -> bool:
    """Whether it takes no longer to make the results again than to keep them in memory."""
    known = eqn.primitive in rules.RULES or eqn.primitive == "custom_jvp_call"
    if not known or eqn.effects:
        return False
    if not all(isinstance(n, int) for a in (*eqn.in_avals, *eqn.out_avals) for n in a.shape):
        return False
    if eqn.primitive == "custom_jvp_call":
        body = jax_compat.called_jaxpr(eqn.eqn)
        return body is not None and all(map(_is_cheap, flatten(body).eqns))
    if _is_product(eqn):
        return _summed(eqn.in_avals[0].shape, eqn.params) <= MAX_CHEAP_SUM_ELEMENTS
    return True


# --- a function that is differentiated from outside


@dataclass(frozen=True)
class Keeps:
    """The policy of a unit's checkpoint: what takes longer to make again than to read is kept. Its number names it."""

    unit: int

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        return primitive.name == "dot_general" and _summed(avals[0].shape, params) > MAX_CHEAP_SUM_ELEMENTS


def checkpointed(jaxpr: Jaxpr, only: Collection[Keeps] | None = None) -> Jaxpr:
    """A jaxpr of the same type, with a `checkpoint` around each unit, also in the bodies of its control flow; around
    `only` those units, if they are named.

    Functions with derivatives of their own are never opened: their content may be another function than what is
    differentiated.
    """
    numbers = map(Keeps, itertools.count())

    def policy() -> Keeps | None:
        keeps = next(numbers)
        return keeps if only is None or keeps in only else None

    return _checkpointed(jaxpr, policy)


def _checkpointed(jaxpr: Jaxpr, policy: Callable[[], Keeps | None]) -> Jaxpr:
    """The same with the next unit's policy from `policy`; None for a unit that stays as it is."""
    if jax_compat.is_opaque(jaxpr):
        return jaxpr
    program, changed = _with_bodies(flatten_undifferentiated(jaxpr), policy)
    found = _Units(program)
    named = [(unit, policy()) for unit in found.run()]
    units = {unit.equations[0]: (unit, keeps) for unit, keeps in named if keeps is not None}
    if not units and not changed:
        return jaxpr
    eqns: list[FlatEqn] = []
    for step in in_order(found.dependencies, [unit.equations for unit, _ in units.values()]):
        part = [program.eqns[n] for n in step]
        if step[0] in units:
            results = program.crossing(step)
            body = [program.eqns[n] for n in found.sources(step, found.free | found.shown_large)]
            part = [_as_checkpoint(program, body, results, units[step[0]][1], jaxpr)]
        eqns += part
    return as_jaxpr(replace(program, eqns=tuple(eqns)), jaxpr)


def _with_bodies(program: FlatProgram, policy: Callable[[], Keeps | None]) -> tuple[FlatProgram, bool]:
    """The program with units checkpointed in what it runs in scopes of their own, and whether there are any."""
    eqns: list[FlatEqn] = []
    for eqn in program.eqns:
        if bodies := jax_compat.bodies(eqn.eqn):
            new = eqn.eqn.replace(params=jax_compat.with_bodies(eqn.eqn, partial(_checkpointed_body, policy=policy)))
            if any(a is not b for a, b in zip(jax_compat.bodies(new), bodies, strict=True)):
                eqn = replace(eqn, eqn=new)
        eqns.append(eqn)
    changed = any(new is not old for new, old in zip(eqns, program.eqns, strict=True))
    return replace(program, eqns=tuple(eqns)), changed


def _checkpointed_body(body: Jaxpr, policy: Callable[[], Keeps | None]) -> Jaxpr:
    """The same for a body, which may not close over more arrays than it does."""
    new = _checkpointed(body, policy)
    return new if len(new.consts) <= len(body.consts) else body


def _as_checkpoint(
    program: FlatProgram, body: Sequence[FlatEqn], results: Sequence[int], keeps: Keeps, like: Jaxpr
) -> FlatEqn:
    """`body` as one equation that makes `results`.

    Two checkpoints, one in the other: what JAX evaluates in the forward pass is the content of the outer one. In a scan
    it would take out of that what does not depend on the iteration, and what is made of positions would be data.
    """
    made = {v for eqn in body for v in eqn.outputs}
    operands = tuple(dict.fromkeys(v for eqn in body for v in eqn.reads if v not in made))
    inner = as_jaxpr(FlatProgram(operands, {}, tuple(body), tuple(results), program.avals), like)
    whole = jax_compat.as_checkpoint(inner, keeps, prevent_cse=False)
    outer = as_jaxpr(
        FlatProgram(operands, {}, (FlatEqn(whole, operands, tuple(results)),), tuple(results), program.avals), like
    )
    return FlatEqn(jax_compat.as_checkpoint(outer, keeps), operands, tuple(results))


def makes_again(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has the backward pass of a unit that is checkpointed."""
    return any(
        (isinstance(jax_compat.policy_of(eqn), Keeps) and eqn.params.get("differentiated"))
        or any(map(makes_again, jax_compat.inside(eqn)))
        for eqn in jaxpr.eqns
    )


def made_large(program: FlatProgram, equations: Iterable[FlatEqn]) -> bool:
    """Whether some of the equations make what units of the program call large."""
    large = _Units(program).large
    return any(v in large for eqn in equations for v in eqn.outputs)


# --- a function that differentiates itself


def repeated(program: FlatProgram, left: Collection[int] = ()) -> FlatProgram:
    """The program with units' large values made again for equations that cannot be in the unit: a backward pass. Units
    with the numbers in `left` stay as they are.

    A copy waits for what its first reader reads beside it, so that it is not made early, and has a scope with its
    readers, so that these are a region by themselves.
    """
    found = _Units(program)
    copies = _Copies(program)
    for unit in found.run():
        if unit.equations[0] not in left:
            copies.add(found, unit)
    return copies.program()


class _Copies:
    def __init__(self, program: FlatProgram) -> None:
        self.original = program
        self.avals = dict(program.avals)
        self.before: dict[int, list[FlatEqn]] = {}  # copies, by the position before which they stand
        self.instead: dict[int, dict[int, int]] = {}  # position -> value that is read there -> its copy
        self.scopes: dict[int, int] = {}
        self.again: dict[int, int] = {}

    def add(self, found: _Units, unit: Unit) -> None:
        """Copies of what `unit` makes, if all that would keep it are equations that may be regions."""
        body = found.alone(unit)
        inside = body | set(unit.equations)
        outside = {v: self.original.readers[v] - inside for n in body for v in self.original.eqns[n].outputs}
        large = {v for v in unit.large & outside.keys() if outside[v] <= found.members}
        readers = set[int]().union(*(outside[v] for v in large))
        if not readers:
            return
        there = self._around(found, readers, inside)
        scope = unit.equations[0] + 1
        self.scopes |= dict.fromkeys(there, scope)
        again = {v for v in outside if (v in large or v not in unit.large) and outside[v] & there}
        copied = found.sources({found.made[v] for v in again}, body)
        names = {v: self._new(v) for n in copied for v in self.original.eqns[n].outputs}
        self.again |= {names[v]: unit.equations[0] for v in unit.large & names.keys()}
        read_at = {(n, v) for v in again for n in outside[v] & there}
        for n, v in read_at:
            self.instead.setdefault(n, {})[v] = names[v]
        first, _ = min(read_at)
        known = {v for n in body | found.free for v in self.original.eqns[n].outputs}
        waits = tuple(v for v in self.original.eqns[first].reads if v not in known)
        for eqn in (self.original.eqns[n] for n in copied):
            outputs = tuple(names[v] for v in eqn.outputs)
            copy = replace(_renamed(eqn, names), outputs=outputs, after=waits, scope=scope)
            self.before.setdefault(first, []).append(copy)

    def _around(self, found: _Units, readers: set[int], inside: set[int]) -> set[int]:
        """The steps that the readers are in, the masks that JAX itself makes again for these alone, and the casts and
        transposes of what they make: a region stores its results as they are read.
        """
        there = {n for c in found.clusters if not readers.isdisjoint(c) for n in c} - inside
        for n in reversed(found.sources(there, found.shown_large - inside)):
            needed_by = set[int]().union(*(self.original.readers[v] for v in self.original.eqns[n].outputs))
            if needed_by <= there and found.dependencies.before[n].isdisjoint(inside):
                there.add(n)
        todo = [v for n in there for v in self.original.eqns[n].outputs]
        while todo:
            for n in self.original.readers[todo.pop()] - inside - {-1}:
                if self.original.eqns[n].primitive in rules.VIEWS:
                    there.add(n)
                    todo += self.original.eqns[n].outputs
        return there

    def _new(self, value: int) -> int:
        number = len(self.avals)
        self.avals[number] = self.avals[value]
        return number

    def program(self) -> FlatProgram:
        if not self.before:
            return self.original
        eqns: list[FlatEqn] = []
        for n, eqn in enumerate(self.original.eqns):
            eqns += self.before.get(n, ())
            eqns.append(replace(_renamed(eqn, self.instead.get(n, {})), scope=self.scopes.get(n, 0)))
        return without_dead_code(replace(self.original, eqns=tuple(eqns), avals=self.avals, again=self.again))


def _renamed(eqn: FlatEqn, names: Mapping[int, int]) -> FlatEqn:
    return replace(eqn, inputs=tuple(names.get(a, a) if isinstance(a, int) else a for a in eqn.inputs))
