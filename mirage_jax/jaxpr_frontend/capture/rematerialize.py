"""Recomputes cheap large values in the backward pass instead of storing them.

A contraction *expands* if it makes more numbers than it reads and sums few of them for each: queries times keys, or the
squared differences of points. Masked scores and weights are as large. JAX would store such values for the backward
pass. Here they form *units* with the equations that read them (weights times values), and a unit stores its operands
instead. A backward kernel recomputes tiles of the scores, as FlashAttention's does (Dao, 2023). A small operand that is
broadcast, such as a mask of lengths, is stored small.

Where the function is differentiated from outside, its units become checkpoints (`checkpointed`), and JAX's own rules do
the rest. Where it differentiates itself, both passes are one program by now; the backward pass gets copies of the
equations (`repeated`), which wait for the cotangents that they meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr
from mirage_jax.jaxpr_frontend.partition.clusters import Dependencies, convex_clusters, in_order
from mirage_jax.jaxpr_frontend.partition.compared import compared
from mirage_jax.jaxpr_frontend.partition.product_boundaries import summed_elements
from mirage_jax.jaxpr_frontend.partition.program import (
    FlatEqn,
    FlatProgram,
    as_jaxpr,
    bytes_of,
    flatten,
    flatten_undifferentiated,
    operands_of,
    without_dead_code,
)
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.jaxpr_frontend.translate.convolutions import windows_overlap

MAX_CHEAP_SUM_ELEMENTS = 256  # numbers summed for one result in the time that it takes to write and read it


@dataclass(frozen=True)
class Unit:
    """Equations, by position, that make and read large values; `large` are those that they make."""

    equations: tuple[int, ...]
    large: frozenset[int]


class _Units:
    """Finds the units of a program."""

    def __init__(self, program: FlatProgram) -> None:
        self.program, self.eqns, self.avals = program, program.eqns, program.avals
        self.dependencies = Dependencies.of(program)
        once = compared(program)
        self.cheap = {n for n, eqn in enumerate(self.eqns) if is_cheap(eqn) and once.isdisjoint(eqn.outputs)}
        self.made = program.producers
        self.families = self._families()
        self.members = set[int]().union(*map(self._members, self.families))

    @cached_property
    def clusters(self) -> list[tuple[int, ...]]:
        """Cluster the equations that make or read large values into steps."""
        return convex_clusters(self.dependencies, self.members)

    def run(self) -> list[Unit]:
        """Units in execution order, which do not depend on each other in a circle."""
        large = set[int]().union(*self.families)
        units: list[Unit] = []
        for cluster in self.clusters:
            own = large.intersection(self.program.made_by(cluster))
            used = self.program.read_by(n for n in cluster if self.eqns[n].primitive not in rules.LAYOUT_PRIMITIVES)
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
        """Find equations that broadcast small values: masks of lengths and segments, row statistics.

        They make more elements than they read, and no sums. Every unit makes its own from the small values.
        """
        found: set[int] = set()
        for n in sorted(self.cheap - self.free):
            if self.eqns[n].primitive not in rules.CONTRACTION_PRIMITIVES and self._shows_large(n, found):
                found.add(n)
        return found

    def _shows_large(self, n: int, shown_large: set[int]) -> bool:
        """Whether an equation makes more elements than it reads of others than `shown_large`, and no fewer of these."""
        eqn = self.eqns[n]
        made = [(self.made.get(v), self.avals[v].size) for v in eqn.reads]
        count = min((a.size for a in eqn.out_avals), default=0)
        small = sum(size for maker, size in made if maker not in self.free and maker not in shown_large)
        return small < count >= max((size for maker, size in made if maker in shown_large), default=0)

    @cached_property
    def large(self) -> frozenset[int]:
        """Collect the large values of all units."""
        return frozenset[int]().union(*(unit.large for unit in self.run()))

    def _families(self) -> list[set[int]]:
        """Sets of large values that are made of each other.

        A value made of a large one that must be stored does not count: storing it instead takes no more (x W + x A B).
        """
        families: list[set[int]] = []
        sizes: dict[int, int] = {}
        held = self._held()
        for n in sorted(self.cheap - self.free):
            eqn = self.eqns[n]
            given = sizes.keys() & eqn.reads
            least = max(map(sizes.__getitem__, given), default=math.inf)
            kept = max((held.get(v, 0) for v in {*eqn.reads} - given), default=0)
            results = zip(eqn.outputs, eqn.out_avals, strict=True)
            made = {v: a.size for v, a in results if self._expands(n) or (a.size >= least and kept < bytes_of(a))}
            if made:
                touching = [f for f in families if f & given]
                families = [f for f in families if f not in touching] + [set(made).union(*touching)]
                sizes |= made
        return families

    def _held(self) -> dict[int, int]:
        """The bytes that must be stored so that each value is there, or can be recomputed pointwise.

        Inputs of the program and broadcast small values take none.
        """
        held: dict[int, int] = {}
        for n, eqn in enumerate(self.eqns):
            if n in self.free or n in self.shown_large:
                continue
            for v, aval in zip(eqn.outputs, eqn.out_avals, strict=True):
                held[v] = bytes_of(aval)
                if n not in self.cheap or _is_product(eqn):
                    continue
                if same_size := [held.get(u, 0) for u in eqn.reads if self.avals[u].size == aval.size]:
                    held[v] = min(held[v], max(same_size))
        return held

    def _expands(self, n: int) -> bool:
        """Whether a product, or a sum of broadcast values as in distances, makes more numbers than it reads."""
        if n not in self.cheap or n in self.free:
            return False
        eqn = self.eqns[n]
        made, read = eqn.out_avals[0].size, sum(a.size for a in eqn.in_avals)
        if _is_product(eqn):
            return made > read
        is_sum = eqn.primitive in rules.CONTRACTION_PRIMITIVES and read <= MAX_CHEAP_SUM_ELEMENTS * made
        shown = self.sources([n], self.shown_large)
        return is_sum and len(shown) > 1 and made > self._size_read(shown)

    def _size_read(self, equations: Collection[int]) -> int:
        """How many numbers equations read that others make."""
        values = {v for n in equations for v in self.eqns[n].reads}
        return sum(self.avals[v].size for v in values if self.made.get(v) not in equations)

    def _members(self, family: set[int]) -> set[int]:
        """The equations that make or read a family's values, and those between them that make row statistics."""
        makers = {self.made[v] for v in family}
        readers = set[int]().union(*map(self.program.readers.__getitem__, family)) - {-1}
        readers = {n for n in readers if n in self.cheap or _is_product(self.eqns[n])}
        return makers | readers | self._between(makers)

    def _between(self, makers: set[int]) -> set[int]:
        """Cheap equations, but no products, on paths from one of some equations to another."""
        cheap = {n for n in self.cheap - self.free if not _is_product(self.eqns[n])}
        above, below = set(makers), set(makers)
        for n in sorted(cheap):
            if below & self.dependencies.before[n]:
                below.add(n)
        for n in sorted(cheap | makers, reverse=True):
            if n in above:
                above |= self.dependencies.before[n] & cheap
        return above & below

    def alone(self, unit: Unit) -> set[int]:
        """Find the cheap equations of a unit, the broadcasts that they read, and readers of these results alone."""
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
    return eqn.primitive in rules.PRODUCT_PRIMITIVES and not eqn.has_effects


def is_cheap(eqn: FlatEqn) -> bool:
    """Whether it takes no longer to make the results again than to keep them in memory."""
    known = eqn.primitive in rules.RULES or eqn.primitive == "custom_jvp_call"
    if not known or eqn.has_effects:
        return False
    sizes = itertools.chain.from_iterable(a.shape for a in (*eqn.in_avals, *eqn.out_avals))
    if not all(isinstance(n, int) for n in sizes):
        return False
    if eqn.primitive == "custom_jvp_call":
        body = jax_compat.called_jaxpr(eqn.eqn)
        return body is not None and all(map(is_cheap, flatten(body).eqns))
    if windows_overlap(eqn.primitive, eqn.params, [a.shape for a in eqn.in_avals]):
        return False  # XLA runs it, which takes longer than its sums tell
    if _is_product(eqn):
        return summed_elements(eqn.primitive, eqn.in_avals, eqn.params) <= MAX_CHEAP_SUM_ELEMENTS
    return True


# --- a function that is differentiated from outside


@dataclass(frozen=True)
class Keeps:
    """The policy of a unit's checkpoint: what takes longer to make again than to read is kept. Its number names it.

    is_settled: the unit is checkpointed even if XLA makes large values again for it.
    """

    unit: int
    is_settled: bool = False

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        is_product = primitive.name in rules.PRODUCT_PRIMITIVES
        return is_product and summed_elements(primitive.name, avals, params) > MAX_CHEAP_SUM_ELEMENTS


def checkpointed(jaxpr: Jaxpr, only: Collection[Keeps] | None = None, is_settled: bool = False) -> Jaxpr:
    """A jaxpr of the same type, with a `checkpoint` around each unit, also in the bodies of its control flow; around
    `only` those units, if they are named.

    is_settled: all of these checkpoints stay.

    Functions with derivatives of their own are never opened: their derivative may not be that of their content.
    """
    numbers = map(Keeps, itertools.count())

    def policy() -> Keeps | None:
        keeps = next(numbers)
        return replace(keeps, is_settled=is_settled) if only is None or keeps in only else None

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

    Two checkpoints, one in the other: JAX evaluates the content of the outer one in the forward pass. Out of a scan it
    would hoist everything that does not depend on the iteration, and masks made of positions would become data.
    """
    operands = operands_of(body)
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

    A copy waits for the other operands of its first reader, so that it is not made early, and has a scope with its
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
        """Copy a unit's large values, if all that would keep them are equations that may be regions."""
        body = found.alone(unit)
        inside = body | set(unit.equations)
        outside = {v: self.original.readers[v] - inside for v in self.original.made_by(body)}
        large = {v for v in unit.large & outside.keys() if outside[v] <= found.members}
        readers = set[int]().union(*map(outside.__getitem__, large))
        if not readers:
            return
        there = self._around(found, readers, inside)
        copied = outside.keys() - (unit.large - large)
        read_at = {(n, v) for v in copied for n in outside[v] & there}
        makers = found.sources({found.made[v] for _, v in read_at}, body)
        names = self._new_names(self.original.made_by(makers))
        for n, v in read_at:
            self.instead.setdefault(n, {})[v] = names[v]
        first, scope = min(read_at)[0], unit.equations[0] + 1
        known = set(self.original.made_by(body | found.free))
        waits = tuple(v for v in self.original.eqns[first].reads if v not in known)
        places = self._places(makers, read_at)
        for n, copy in zip(makers, self._copies(makers, names, waits, scope), strict=True):
            self.before.setdefault(places[n], []).append(copy)
        self.scopes |= dict.fromkeys(there, scope)
        self.again |= {names[v]: unit.equations[0] for v in unit.large & names.keys()}

    def _places(self, makers: Sequence[int], read_at: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Where each equation is copied: before the first that reads its copy. What it reads is made by then, as it is
        for the equation itself.
        """
        first: dict[int, int] = {}  # by value
        for n, v in read_at:
            first[v] = min(n, first.get(v, n))
        places: dict[int, int] = {}
        for n in reversed(makers):
            eqn = self.original.eqns[n]
            places[n] = min(first[v] for v in eqn.outputs if v in first)
            for v in eqn.reads:
                first[v] = min(places[n], first.get(v, places[n]))
        return places

    def _copies(
        self, makers: Iterable[int], names: Mapping[int, int], waits: tuple[int, ...], scope: int
    ) -> Iterator[FlatEqn]:
        for eqn in map(self.original.eqns.__getitem__, makers):
            outputs = tuple(map(names.__getitem__, eqn.outputs))
            yield replace(_renamed(eqn, names), outputs=outputs, after=waits, scope=scope)

    def _new_names(self, values: Iterable[int]) -> dict[int, int]:
        names: dict[int, int] = {}
        for v in values:
            names[v] = len(self.avals)
            self.avals[names[v]] = self.avals[v]
        return names

    def _around(self, found: _Units, readers: set[int], inside: set[int]) -> set[int]:
        """The steps that the readers are in, the masks that JAX itself makes again for these alone, and the casts and
        transposes of what they make: a region stores its results as they are read.
        """
        program = self.original
        there = {n for c in found.clusters if not readers.isdisjoint(c) for n in c} - inside
        for n in reversed(found.sources(there, found.shown_large - inside)):
            needed_by = set[int]().union(*map(program.readers.__getitem__, program.eqns[n].outputs))
            if needed_by <= there and found.dependencies.before[n].isdisjoint(inside):
                there.add(n)
        todo = program.made_by(there)
        while todo:
            readers = program.readers[todo.pop()] - inside - {-1}
            views = {n for n in readers if program.eqns[n].primitive in rules.VIEWS}
            there |= views
            todo += program.made_by(views)
        return there

    def program(self) -> FlatProgram:
        """Give the program with the copies in it."""
        if not self.before:
            return self.original
        eqns: list[FlatEqn] = []
        for n, eqn in enumerate(self.original.eqns):
            eqns += self.before.get(n, ())
            eqns.append(replace(_renamed(eqn, self.instead.get(n, {})), scope=self.scopes.get(n, 0)))
        return without_dead_code(replace(self.original, eqns=tuple(eqns), avals=self.avals, again=self.again))


def _renamed(eqn: FlatEqn, names: Mapping[int, int]) -> FlatEqn:
    return replace(eqn, inputs=tuple(names.get(a, a) if isinstance(a, int) else a for a in eqn.inputs))
