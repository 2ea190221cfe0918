"""A jaxpr opened up: one list of equations over numbered values, with every call replaced by its content.

Values are renamed, never traced again: tracing from shapes would lose shardings and the axes of shard_map. Equations
keep their JAX originals, so that whatever is not optimized is bound exactly as JAX would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mirage_jax.config import DISABLED_SCOPE
from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr, JaxprEqn, Literal
from mirage_jax.jaxpr_frontend.partition.row_indices import into_every_row, is_below_zero
from mirage_jax.jaxpr_frontend.partition.total_sums import as_row_sums

type Atom = int | Literal  # a numbered value, or a literal


@dataclass(slots=True, eq=False)
class FlatEqn:
    """`outputs` = the JAX equation `eqn` applied to `inputs`; `calls` brought it here, outermost first.

    after: values that it has to wait for, though it does not read them. scope: equations of one region have one scope.
    """

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    calls: tuple[JaxprEqn, ...] = ()
    after: tuple[int, ...] = ()
    scope: int = 0
    reads: tuple[int, ...] = field(init=False)  # the numbered values among the inputs
    primitive: str = field(init=False)

    def __post_init__(self) -> None:
        self.reads = tuple([a for a in self.inputs if isinstance(a, int)])
        self.primitive = jax_compat.name_of(self.eqn)

    @property
    def params(self) -> Mapping[str, Any]:
        """Give the parameters of the JAX equation."""
        return self.eqn.params

    @property
    def has_effects(self) -> bool:
        """Tell whether the equation must run, and in its place among others with effects."""
        return jax_compat.has_effects(self.eqn)

    @property
    def out_avals(self) -> list[Any]:
        """Give the types of the results."""
        return [v.aval for v in self.eqn.outvars]

    @property
    def in_avals(self) -> list[Any]:
        """Give the types of the operands, literals among them."""
        return [v.aval for v in self.eqn.invars]

    @property
    def is_disabled(self) -> bool:
        """Tell whether the equation, or a call that brought it here, is inside of ``with mirage_jax.disabled():``."""
        return any(jax_compat.is_in_scope(one, DISABLED_SCOPE) for one in (self.eqn, *self.calls))

    @property
    def where(self) -> str:
        """Find the user's line: of the equation, or of the call if JAX itself wrote the equation."""
        lines = map(jax_compat.source_line, (self.eqn, *reversed(self.calls)))
        return next(filter(None, lines), "unknown line")


@dataclass(frozen=True)
class FlatProgram:
    """Equations in execution order; `constants` are the arrays that the jaxpr closes over.

    again: large values that are made a second time, and the number of the unit (rematerialize.py) that each belongs to.
    """

    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    eqns: tuple[FlatEqn, ...]
    outputs: tuple[Atom, ...]
    avals: Mapping[int, Any] = field(repr=False)
    again: Mapping[int, int] = field(default_factory=dict, repr=False)

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """Map each value to the position of the equation that makes it; inputs and constants have none."""
        return {v: n for n, eqn in enumerate(self.eqns) for v in eqn.outputs}

    @cached_property
    def readers(self) -> Mapping[int, set[int]]:
        """Map each value to the positions of the equations that read it; -1 stands for the program's results."""
        readers: dict[int, set[int]] = {v: set() for v in self.avals}
        for n, eqn in enumerate(self.eqns):
            for v in eqn.reads:
                readers[v].add(n)
        for v in self.results:
            readers[v].add(-1)
        return readers

    @property
    def results(self) -> set[int]:
        """Collect the program's outputs that are values, not literals."""
        return {v for v in self.outputs if isinstance(v, int)}

    def made_by(self, positions: Iterable[int]) -> list[int]:
        """List the values that these equations make, in order."""
        return [v for n in positions for v in self.eqns[n].outputs]

    def read_by(self, positions: Iterable[int]) -> set[int]:
        """Collect the values that these equations read."""
        return {v for n in positions for v in self.eqns[n].reads}

    def upstream(self, values: Iterable[int]) -> Iterator[int]:
        """Yield the positions of all equations that `values` are made of, each once."""
        todo, seen = list(values), set[int]()
        while todo:
            n = self.producers.get(todo.pop())
            if n is not None and n not in seen:
                seen.add(n)
                todo += self.eqns[n].reads
                yield n

    def crossing(self, positions: Collection[int]) -> list[int]:
        """List the values that these equations make and others read, in order."""
        inside = set(positions)
        return [v for v in self.made_by(positions) if not inside >= self.readers[v]]


def bytes_of(aval: Any) -> int:
    """Count the bytes of an array; 0 if it is no array or its size is unknown."""
    size = math.prod(aval.shape) if isinstance(aval, jax_compat.ShapedArray) else None
    return size * aval.dtype.itemsize if isinstance(size, int) else 0


type Bind = Callable[[JaxprEqn, list[Any]], list[Any]]


def evaluate(eqns: Sequence[FlatEqn], values: dict[int, Any], bind: Bind = jax_compat.bind) -> None:
    """Bind equations as JAX would, adding their results to `values`."""
    for eqn in eqns:
        with jax_compat.written_at(eqn.eqn, eqn.calls):
            results = bind(eqn.eqn, operands(eqn, values))
        values.update(zip(eqn.outputs, results, strict=True))


def operands(eqn: FlatEqn, values: Mapping[int, Any]) -> list[Any]:
    """Look up the operands of an equation, held back until the values that it waits for are there."""
    given = [read(values, a) for a in eqn.inputs]
    waits = [values[v] for v in eqn.after if v in values]
    return jax_compat.held_back(given, waits) if waits else given


def read(values: Mapping[int, Any], atom: Atom) -> Any:
    """Look up a value, or take a literal."""
    return values[atom] if isinstance(atom, int) else atom.val


def flatten(jaxpr: Jaxpr, merged: Collection[Any] = ()) -> FlatProgram:
    """Open up every call of `jaxpr` and drop the equations that nobody needs.

    merged: policies of checkpoints that are opened even where they would make values again. XLA then makes these once,
    if both passes are in one program.
    """
    return without_dead_code(_Flattener(merged=merged).program(jaxpr))


def flatten_undifferentiated(jaxpr: Jaxpr) -> FlatProgram:
    """Flatten, but leave calls whole that have a derivative of their own, or a policy for it."""
    return without_dead_code(_Flattener(derivatives=True).program(jaxpr))


class _Flattener:
    def __init__(self, derivatives: bool = False, merged: Collection[Any] = ()) -> None:
        self.derivatives, self.merged = derivatives, merged
        self.avals: dict[int, Any] = {}
        self.constants: dict[int, Any] = {}
        self.eqns: list[FlatEqn] = []
        self.makers: dict[int, tuple[JaxprEqn, tuple[Atom, ...]]] = {}

    def program(self, jaxpr: Jaxpr) -> FlatProgram:
        """Flatten a jaxpr."""
        inputs = tuple(self.new(v.aval) for v in jaxpr.invars)
        outputs = self.inline(jaxpr, inputs)
        return FlatProgram(inputs, self.constants, tuple(self.eqns), outputs, self.avals)

    def new(self, aval: Any) -> int:
        """Number a new value."""
        number = len(self.avals)
        self.avals[number] = aval
        return number

    def inline(self, jaxpr: Jaxpr, args: Sequence[Atom], calls: tuple[JaxprEqn, ...] = ()) -> tuple[Atom, ...]:
        """Add the equations of a jaxpr that is called with `args`, and give its results."""
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            if (counted := jax_compat.as_range(value)) is not None:
                (env[var],) = self.inline(counted, (), calls)
                continue
            env[var] = number = self.new(var.aval)
            self.constants[number] = value
        for eqn in jaxpr.eqns:
            operands = tuple([v if isinstance(v, Literal) else env[v] for v in eqn.invars])
            add = self.opened if jax_compat.name_of(eqn) in jax_compat.OPENED else self.whole
            env.update(zip(eqn.outvars, add(eqn, operands, calls), strict=True))
        return tuple(v if isinstance(v, Literal) else env[v] for v in jaxpr.outvars)

    def whole(self, eqn: JaxprEqn, operands: tuple[Atom, ...], calls: tuple[JaxprEqn, ...]) -> tuple[Atom, ...]:
        """Add an equation as it is."""
        results = tuple([self.new(v.aval) for v in eqn.outvars])
        self.eqns.append(FlatEqn(eqn, operands, results, calls))
        self.makers.update(dict.fromkeys(results, (eqn, operands)))
        return results

    def opened(self, eqn: JaxprEqn, operands: tuple[Atom, ...], calls: tuple[JaxprEqn, ...]) -> tuple[Atom, ...]:
        """Add the content of a call, or one equation for each result, or the equation itself."""
        if (branch := self.known_branch(eqn, operands)) is not None:
            return self.inline(branch, operands[1:], (*calls, eqn))
        called = jax_compat.called_jaxpr(eqn)
        if called is None and self.merged and jax_compat.policy_of(eqn) in self.merged:
            called = eqn.params["jaxpr"]
        if called is not None and not (self.derivatives and jax_compat.is_differentiated_as_one(eqn)):
            return self.inline(called, operands, (*calls, eqn))
        if self.derivatives:
            return self.whole(eqn, operands, calls)
        return self.restated(eqn, operands, calls)

    def restated(self, eqn: JaxprEqn, operands: tuple[Atom, ...], calls: tuple[JaxprEqn, ...]) -> tuple[Atom, ...]:
        """Add equations that mean the same and are easier to translate, or the equation itself."""
        if eqn.primitive.name == "select_n" and is_below_zero(operands[0], self.makers):
            return (operands[1],)
        if eqn.primitive.name in ("gather", "scatter-add"):
            eqn, operands = into_every_row(eqn, operands, self.makers) or (eqn, operands)
        if (apart := jax_compat.as_fill_apart(eqn)) is not None:
            return self.inline(apart, operands, (*calls, eqn))
        chains = jax_compat.as_slices(eqn)
        if (two := as_row_sums(eqn, operands, self.makers, self.avals)) is not None:
            chains = [two]
        if chains is None:
            return self.whole(eqn, operands, calls)
        return tuple([self.chain(chain, operands, calls) for chain in chains])

    def known_branch(self, eqn: JaxprEqn, operands: tuple[Atom, ...]) -> Jaxpr | None:
        """The branch that a `cond` takes whatever the data."""
        maker = self.makers.get(operands[0]) if operands and isinstance(operands[0], int) else None
        return jax_compat.known_branch(eqn, maker and maker[0])

    def chain(self, chain: Sequence[JaxprEqn], operands: tuple[Atom, ...], calls: tuple[JaxprEqn, ...]) -> Atom:
        """Add equations; each reads the results of the one before."""
        for eqn in chain:
            operands = self.whole(eqn, operands, calls)
        (result,) = operands
        return result


def without_dead_code(program: FlatProgram) -> FlatProgram:
    """Drop the equations that have no effect and whose results nobody reads."""
    return replace(program, eqns=needed_for(program.results, program.eqns))


def needed_for(values: Iterable[int], eqns: Sequence[FlatEqn]) -> tuple[FlatEqn, ...]:
    """Select the equations that have an effect or that `values` depend on."""
    needed = set(values)
    kept: list[FlatEqn] = []
    for eqn in reversed(eqns):
        if eqn.has_effects or not needed.isdisjoint(eqn.outputs):
            kept.append(eqn)
            needed.update(eqn.reads)
    return tuple(reversed(kept))


def operands_of(eqns: Sequence[FlatEqn]) -> tuple[int, ...]:
    """List the values that equations read and do not make, in order."""
    made = {v for eqn in eqns for v in eqn.outputs}
    return tuple(dict.fromkeys(v for eqn in eqns for v in eqn.reads if v not in made))


def as_jaxpr(program: FlatProgram, like: Jaxpr) -> Jaxpr:
    """The program, a part or another form of `like`, as a jaxpr. Built, never traced."""
    variables: dict[int, Any] = {}

    def atom(a: Atom) -> Any:
        if not isinstance(a, int):
            return a
        if a not in variables:
            variables[a] = jax_compat.Var(program.avals[a])
        return variables[a]

    invars, constvars = list(map(atom, program.inputs)), list(map(atom, program.constants))
    eqns = [
        jax_compat.renamed(e.eqn, list(map(atom, e.inputs)), list(map(atom, e.outputs)), e.calls) for e in program.eqns
    ]
    return jax_compat.built(like, invars, eqns, list(map(atom, program.outputs)), constvars, program.constants.values())
