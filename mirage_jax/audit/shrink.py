"""Makes a failing program smaller while it keeps failing: fewer steps, transformations and results, smaller sizes.

Any step may become an argument, because its shape and dtype are known; a program that means nothing is one that does
not fail. Greedy: the first smaller program that still fails is where the next round starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from mirage_jax.audit.fills import NOTHING
from mirage_jax.audit.program import Border, ProgramStep, ProgramValue, RandomProgram, Wrapper


def shrink(program: RandomProgram, fails: Callable[[RandomProgram], bool], trials: int = 150) -> RandomProgram:
    """Find a smaller failing program with at most `trials` trials; returns `program` if nothing smaller fails."""
    tried = {program}
    progress = True
    while progress:
        progress = False
        for candidate in smaller(program):
            if candidate in tried or candidate.cost >= program.cost:
                continue
            if len(tried) > trials:
                return program
            tried.add(candidate)
            if fails(candidate):
                program, progress = candidate, True
                break
    return program


def smaller(p: RandomProgram) -> Iterator[RandomProgram]:
    """Make programs with one thing less, large parts first."""
    yield from _with_fewer_scopes(p)
    yield from _with_less_data(p)
    yield from _with_fewer_outputs(p)
    yield tidy(p)
    yield from _with_fewer_steps(p)
    yield from _with_smaller_sizes(p)


def _with_fewer_scopes(p: RandomProgram) -> Iterator[RandomProgram]:
    """Programs without one of their transformations or borders."""
    for which in ("outer", "inner", "borders"):
        scopes = getattr(p, which)
        for i in range(len(scopes)):
            yield replace(p, **{which: scopes[:i] + scopes[i + 1 :]})


def _with_fewer_outputs(p: RandomProgram) -> Iterator[RandomProgram]:
    """Programs with one result alone, then all but one."""
    if len(p.outputs) > 1:
        for name in p.outputs:
            yield tidy(replace(p, outputs=(name,)))
        for name in p.outputs:
            yield tidy(replace(p, outputs=tuple(n for n in p.outputs if n != name)))


def _with_fewer_steps(p: RandomProgram) -> Iterator[RandomProgram]:
    """Programs that end earlier, and those that are given a value instead of making it."""
    made = {s.value.name: s for s in p.steps}
    for name, read in _read_by(p.outputs, made):
        yield tidy(replace(p, outputs=tuple(read if n == name else n for n in p.outputs)))
    for name in reversed(made):
        if name not in p.outputs:
            yield tidy(as_input(p, name))


def _read_by(names: Sequence[str], made: Mapping[str, ProgramStep]) -> Iterator[tuple[str, str]]:
    """Pairs of a name and a float that some step makes and its step reads."""
    for name in names:
        reads = made[name].reads if name in made else ()
        yield from ((name, read) for read in reads if read in made and made[read].value.is_float)


def _with_smaller_sizes(p: RandomProgram) -> Iterator[RandomProgram]:
    """Programs with shorter dimensions, fewer repeated arguments and shorter loops."""
    sizes = dict(p.sizes)
    for name, n in p.sizes:
        shorter = (less for less in dict.fromkeys((1, 2, n // 2, n - 1)) if 0 < less < n)
        yield from (replace(p, sizes=tuple({**sizes, name: less}.items())) for less in shorter)
    if p.same:
        yield replace(p, same=())
    for which in ("outer", "inner"):
        wrappers = getattr(p, which)
        if any(w.size > 1 for w in wrappers):
            yield replace(p, **{which: tuple(replace(w, size=min(w.size, 1)) for w in wrappers)})


def _with_less_data(p: RandomProgram) -> Iterator[RandomProgram]:
    """Programs whose arguments hold more ordinary numbers; scales come last, and all together."""

    yield p.with_fills(lambda v: NOTHING)
    yield p.with_fills(lambda v: replace(v.fill, power=0))
    yield p.with_fills(lambda v: replace(v.fill, positive=False))
    for one in p.inputs:
        for less in one.fill.simpler:
            yield p.with_fills(lambda v, one=one, less=less: less if v is one else v.fill)
    yield p.with_fills(lambda v: replace(v.fill, power=int(v.fill.power / 2)))


def as_input(p: RandomProgram, name: str) -> RandomProgram:
    """Give a step's value as an argument."""
    step = next(s for s in p.steps if s.value.name == name)
    steps = tuple(s for s in p.steps if s is not step)
    return replace(p, inputs=(*p.inputs, step.value), steps=steps, **_wrappers(p, lambda mapped: (*mapped, True)))


def tidy(p: RandomProgram) -> RandomProgram:
    """Remove steps, arguments and sizes that nothing needs."""
    needed, steps = _needed(p)
    numbers = [i for i, v in enumerate(p.inputs) if v.name in needed] or [0]
    place = {old: new for new, old in enumerate(numbers)}
    inputs = tuple(p.inputs[i] for i in numbers)
    words = _words(steps, inputs)
    return replace(
        p,
        sizes=tuple((name, n) for name, n in p.sizes if name in words),
        inputs=inputs,
        steps=steps,
        same=tuple((place[i], place[j]) for i, j in p.same if i in place and j in place),
        borders=_borders(p.borders, {s.value.name for s in steps}),
        **_wrappers(p, lambda mapped: tuple(mapped[i] for i in numbers)),
    )


def _needed(p: RandomProgram) -> tuple[set[str], tuple[ProgramStep, ...]]:
    """Names that the results depend on, and the steps that make them."""
    needed, steps = set(p.outputs), list[ProgramStep]()
    for step in reversed(p.steps):
        if step.value.name in needed:
            steps.append(step)
            needed.update(step.reads)
    return needed, tuple(reversed(steps))


def _words(steps: Sequence[ProgramStep], inputs: Sequence[ProgramValue]) -> set[str]:
    """Words in the texts of steps and shapes."""
    values = (*inputs, *(s.value for s in steps))
    texts = [*(s.text for s in steps), *(d for v in values for d in v.shape)]
    return set(re.findall(r"\w+", " ".join(texts)))


def _borders(borders: Sequence[Border], steps: Container[str]) -> tuple[Border, ...]:
    """Borders around their remaining steps."""
    left = (replace(b, inside=tuple(n for n in b.inside if n in steps)) for b in borders)
    return tuple(b for b in left if b.inside)


def _wrappers(
    p: RandomProgram, change: Callable[[tuple[bool, ...]], tuple[bool, ...]]
) -> dict[str, tuple[Wrapper, ...]]:
    """Both groups of wrappers with other mapped arguments; one that maps nothing any more is left out."""

    def one(w: Wrapper) -> Wrapper:
        return replace(w, mapped=change(w.mapped)) if w.mapped else w

    changed = {which: tuple(map(one, getattr(p, which))) for which in ("inner", "outer")}
    return {which: tuple(w for w in ws if not w.mapped or any(w.mapped)) for which, ws in changed.items()}
