"""The part of a program over explicitly divided arrays that one device runs.

With explicit mesh axes (`jax.sharding.AxisType.Explicit`) the type of every value says which of its dimensions are
divided among devices. An equation is *local* where no divided dimension is summed over, counted or taken apart: then a
device's part of the result is the same equation of its parts of the operands (`is_local`). A region of local equations
is turned into the region that one device sees (`one_device`), which is searched like any other, and runs on all of them
under a `shard_map`. Beside such arrays, a value that was never placed on a mesh counts as replicated. With automatic
axes types say nothing, and nothing is local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.jaxpr_frontend.translate.translate import Region, TranslationRefused, translate

type Division = tuple[tuple[str, ...], ...]  # for each dimension the mesh axes that divide it

_SHAPES = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}  # parameters that hold the result's


@dataclass(frozen=True)
class Shards:
    """A region as one device sees it, and how the operands and results of all devices are divided."""

    region: Region
    mesh: Any
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]

    def mapped(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, a function of one device's parts, over whole arrays."""
        return jax.shard_map(run, mesh=self.mesh, in_specs=self.operands, out_specs=list(self.results), check_vma=False)


def is_explicit(program: FlatProgram) -> bool:
    """Whether a program has arrays on a mesh. Without any, XLA may divide its values as it likes."""
    return any(_is_placed(a) for eqn in program.eqns for a in (*eqn.in_avals, *eqn.out_avals))


def is_local(eqn: FlatEqn) -> bool:
    """Whether each device can make its part of the result from its parts of the operands alone."""
    given, made = [_division(a) for a in eqn.in_avals], [_division(a) for a in eqn.out_avals]
    if len(made) != 1 or made[0] is None or any(d is None for d in given):
        return False
    rule = _RULES.get(eqn.primitive, _keeps_dimensions if eqn.primitive in rules.RULES else _divides_nothing)
    return rule(eqn, [d for d in given if d is not None], made[0])


def one_device(region: Region) -> Shards | None:
    """Make the region that one device sees of a region of local equations; None if it is no region there, or if nothing
    in it is on a mesh.
    """
    outputs = [b.value for b in region.outputs]
    local = _translated_part(region)
    if local is None or [b.value for b in local.outputs] != outputs:
        return None
    meshes = (a.sharding.mesh for a in region.avals.values() if _is_placed(a))
    if (mesh := next(meshes, None)) is None:
        return None
    operands = tuple(_spec(region.avals[b.value]) for b in local.inputs)
    return Shards(local, mesh, operands, tuple(_spec(region.avals[v]) for v in outputs))


def _spec(aval: Any) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in _division(aval) or ()))


def _translated_part(region: Region) -> Region | None:
    eqns = tuple(map(_local, region.equations))
    avals = {v: _part(a) for v, a in region.avals.items()}
    try:
        return translate(FlatProgram(region.operands, {}, eqns, region.results, avals), eqns, region.results)
    except TranslationRefused:
        return None


def _division(aval: Any) -> Division | None:
    """How a value is divided; None if its type does not say."""
    sharding = aval.sharding
    kinds = set(sharding.mesh.axis_types)
    if kinds - {jax.sharding.AxisType.Explicit}:
        return None
    spec = sharding.spec
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None
    return tuple(map(_mesh_axes, (*spec, *[None] * (aval.ndim - len(spec)))))


def _is_placed(aval: Any) -> bool:
    """Whether a value's type names a mesh: tokens and references have no sharding."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _part(aval: Any) -> Any:
    """The type of one device's part."""
    sizes, division = aval.sharding.mesh.shape, _division(aval) or ()
    shape = (n // math.prod(sizes[a] for a in axes) for n, axes in zip(aval.shape, division, strict=True))
    return jax_compat.ShapedArray(tuple(shape), aval.dtype, weak_type=aval.weak_type)


def _local(eqn: FlatEqn) -> FlatEqn:
    """The equation of one device's parts."""
    (out,) = eqn.out_avals
    params = {k: None if isinstance(v, jax.sharding.Sharding) else v for k, v in eqn.params.items()}
    if eqn.primitive in _SHAPES:
        params[_SHAPES[eqn.primitive]] = _part(out).shape
    return replace(eqn, eqn=jax_compat.with_avals(eqn.eqn, [*map(_part, eqn.in_avals)], [_part(out)], params))


# When an equation is local: of the equation, the divisions of its operands, and that of its result.


def _divides_nothing(eqn: FlatEqn, given: Sequence[Division], made: Division) -> bool:
    return not any(axes for division in (*given, made) for axes in division)


def _keeps_dimensions(eqn: FlatEqn, given: Sequence[Division], made: Division) -> bool:
    """Operands have the result's dimensions, some of size one, or are scalars."""
    return all(_spreads(a.shape, d, made) for a, d in zip(eqn.in_avals, given, strict=True))


def _spreads(shape: Sequence[int], division: Division, onto: Sequence[tuple[str, ...]]) -> bool:
    return not shape or all(a == b or (n == 1 and not a) for n, a, b in zip(shape, division, onto, strict=True))


def _broadcast(eqn: FlatEqn, given: Sequence[Division], made: Division) -> bool:
    return _spreads(eqn.in_avals[0].shape, given[0], _at(made, eqn.params["broadcast_dimensions"]))


def _transpose(eqn: FlatEqn, given: Sequence[Division], made: Division) -> bool:
    return made == _at(given[0], eqn.params["permutation"])


def _reshape(eqn: FlatEqn, given: Sequence[Division], made: Division) -> bool:
    """Divided dimensions stay as they are: the same size, with as much before them."""
    (before,), (after,) = eqn.in_avals, eqn.out_avals
    return _divided(before.shape, given[0]) == _divided(after.shape, made)


def _divided(shape: Sequence[int], division: Division) -> list[tuple[int, int, tuple[str, ...]]]:
    return [(math.prod(shape[:d]), shape[d], axes) for d, axes in enumerate(division) if axes]


def _reduce(eqn: FlatEqn, given: Sequence[Division], made: Division) -> bool:
    over, (whole,) = eqn.params["axes"], given
    return not any(_at(whole, over)) and made == _without(whole, over)


def _product(eqn: FlatEqn, given: Sequence[Division], made: Division) -> bool:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    x, y = given
    batch = _at(x, left_batch)
    if any(_at(x, left)) or any(_at(y, right)) or batch != _at(y, right_batch):
        return False
    return made == (*batch, *_without(x, (*left, *left_batch)), *_without(y, (*right, *right_batch)))


def _at(division: Division, dimensions: Sequence[int]) -> Division:
    return tuple(division[d] for d in dimensions)


def _without(division: Division, dimensions: Sequence[int]) -> Division:
    return tuple(axes for d, axes in enumerate(division) if d not in dimensions)


def _counts(eqn: FlatEqn, given: Sequence[Division], made: Division) -> bool:
    return not made[eqn.params["dimension"]]


_RULES: dict[str, Callable[[FlatEqn, Sequence[Division], Division], bool]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_or": _reduce,
    "reduce_and": _reduce,
    "dot_general": _product,
    "iota": _counts,
    **dict.fromkeys(rules.SLICING_PRIMITIVES, _divides_nothing),
}
