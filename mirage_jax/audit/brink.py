"""Arguments scaled in opposite directions, until a program's own values are about to leave the range of their type.

``q @ (k.T @ v)`` leaves the range of float16 where k and v are large and q is small, though every value of
``(q @ k.T) @ v`` is an ordinary number. Such inputs are ordinary numbers times powers of two, one direction for each.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from mirage_jax.audit import float64
from mirage_jax.audit.program import ProgramValue, RandomProgram
from mirage_jax.verify.floats.range_edges import brink

SAFE = 50  # powers of two, of all arguments together, that keep their products in the range of float32
UP = {"float16": 13, "bfloat16": 120, "float32": 120}  # powers of two by which ordinary numbers stay in range
DOWN = {"float16": 20, "bfloat16": 110, "float32": 110}  # in float16 among numbers that have fewer digits


def scaled(program: RandomProgram, powers: Mapping[str, int]) -> RandomProgram:
    """Multiply arguments, by name, by powers of two."""
    return program.with_fills(lambda v: replace(v.fill, power=powers.get(v.name, 0)))


def scaled_in_pairs(
    program: RandomProgram, rng: random.Random, against: Sequence[str] = (), strict_range: bool = False
) -> RandomProgram:
    """Scale some of the program's floats up and some down, at times without negative numbers.

    The scale is at the brink, or somewhere on the way. `against`, used at every second turn: one argument, and those
    that are scaled the other way. Without `strict_range`, float32 and bfloat16 are scaled by so little that no product
    of arguments leaves float32.
    """
    names = [v.name for v in _scalable(program)]
    if len(names) < 2:
        return program
    if not (len(set(against)) > 2 and set(against) <= set(names) and rng.random() < 0.8):
        against = rng.sample(names, min(len(names), rng.choice((2, 3, 3))))
    directions = _directions(against, rng)
    if rng.random() < 0.6:
        program = program.with_fills(lambda v: replace(v.fill, positive=v.name in names))
    most = _most(program, directions, strict_range)
    if most < 1:
        return program
    power = most if rng.random() < 0.8 else rng.randint(1, most)
    return scaled(program, {n: power * d for n, d in directions.items()})


def _scalable(program: RandomProgram) -> list[ProgramValue]:
    return [v for v in program.inputs if v.is_float and not v.fill.where]


def _most(program: RandomProgram, directions: Mapping[str, int], strict_range: bool) -> int:
    """The largest power of two that is allowed: to the brink where the range is promised, else one that is safe."""
    types = {v.name: v.dtype for v in program.inputs}
    moved = {n: d for n, d in directions.items() if d}
    most = min((UP if d > 0 else DOWN)[types[n]] // abs(d) for n, d in moved.items())
    if strict_range or {v.dtype for v in _scalable(program)} == {"float16"}:
        return to_the_brink(program, directions, most)
    return min(most, SAFE // sum(map(abs, moved.values())))


def _directions(names: Sequence[str], rng: random.Random) -> dict[str, int]:
    """The first argument against the others, by as much as all others together or as each."""
    one, *others = names
    sign, much = rng.choice((-1, 1)), rng.choice((1, len(others)))
    return {one: -sign * much, **dict.fromkeys(others, sign)}


def to_the_brink(program: RandomProgram, directions: Mapping[str, int], most: int) -> int:
    """Find the largest power of two, times directions, that keeps the program's values in range; 0 if there is none."""
    jaxpr = jax.jit(program.function()(jax.jit)).trace(*program.arguments()).jaxpr
    plain = float64.Ranges()
    float64.evaluate(jaxpr, program.arguments(), plain)

    def in_range(power: int) -> bool:
        """Whether values stay in range with these powers."""
        seen = float64.Ranges()
        args = scaled(program, {n: power * d for n, d in directions.items()}).arguments()
        float64.evaluate(jaxpr, args, seen)
        return seen.stays(plain)

    return max(brink(lambda power: power == 0 or in_range(power), most), 0)
