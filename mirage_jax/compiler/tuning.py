"""Which sizes of which candidates are timed, and which of them is the fastest.

Screens, each variant timed once: tile sizes of several kinds of candidates, then warps and pipeline stages of the best
few, then tiles near those of the best one (the model knows a device only roughly), and its launches again if that
helped. What is left is timed against XLA, interleaved, and has to be faster beyond noise.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from mirage_jax import timing
from mirage_jax.compiler.attempt import Attempt
from mirage_jax.compiler.winner import Winner
from mirage_jax.mugraph.graph import Library, Schedule, is_part
from mirage_jax.search.cost import estimate
from mirage_jax.search.devices import Device
from mirage_jax.search.structures import Candidate

log = logging.getLogger("mirage_jax")

MARGIN = 1.03  # lower 95% bound of XLA's time over ours, below which XLA stays
TILES = (6, 4, 3, 2, 2, 2, 2)  # tile sizes per kernel tried for the first, second, ... finalist
FINALISTS = len(TILES)
KEPT = 3  # variants that survive a screen
SECOND = 1.5  # how much slower than its estimate the second candidate of a kind is taken to be
CLIMBS = 2  # how often launches and tiles near the best ones are tried
NEARBY = 1.6  # estimate of a neighbour over that of the best one up to which it is tried
ROUNDS = 10  # of the comparison with XLA


@dataclass(frozen=True)
class Comparison:
    """Times of XLA and of the best variants; `faster` are those that beat XLA beyond noise, fastest first."""

    xla: timing.Timing | None
    faster: tuple[tuple[Winner, timing.Timing, timing.Ratio], ...]
    best: tuple[timing.Timing, timing.Ratio] | None


def compare(attempt: Attempt, finalists: Sequence[Candidate], directory: Path) -> Comparison:
    """Screen all variants of the finalists, then time the best few against XLA."""
    tiles = [(c, s) for i, c in enumerate(finalists) for s in tile_variants(c, TILES[i])]
    log.info("compiling and timing %d variants", len(tiles))
    best = _screen(attempt, [attempt.winner(c.graph, s, c.family, directory) for c, s in tiles])
    for _ in range(CLIMBS):
        best = _screen(attempt, [*best, *(replace(w, schedule=s) for w in best for s in launch_variants(w))])
        top = best[0]
        best = _screen(attempt, [*best, *(replace(top, schedule=s) for s in nearby(top, attempt.description))])
        if best[0] is top:
            break
    timed = attempt.timings(
        {"xla": attempt.xla, **{str(i): attempt.ours(w) for i, w in enumerate(best)}}, rounds=ROUNDS
    )
    xla = timed.get("xla")
    if xla is None:
        return Comparison(None, (), None)
    attempt.record((w, timed[str(i)]) for i, w in enumerate(best) if str(i) in timed)
    rows = [(w, timed[str(i)], timing.ratio(xla, timed[str(i)])) for i, w in enumerate(best) if str(i) in timed]
    rows.sort(key=lambda row: -row[2].value)
    return Comparison(xla, tuple(row for row in rows if row[2].low >= MARGIN), rows[0][1:] if rows else None)


def _screen(attempt: Attempt, winners: Sequence[Winner]) -> list[Winner]:
    """The fastest few of many, timed once."""
    if len(winners) <= KEPT and attempt.trials is None:
        return list(winners)
    timed = attempt.screen(winners)
    attempt.tried["timed"] += len(timed)
    attempt.record((winners[i], t) for i, t in timed.items())
    return [winners[i] for i in sorted(timed, key=lambda i: timed[i].seconds)[:KEPT]]


def diverse(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """At most two of a kind, the second as if it were slower: near the top of the ranking most candidates differ in
    next to nothing.
    """
    kinds: Counter[object] = Counter()
    ranked: list[tuple[float, int, Candidate]] = []
    for n, c in enumerate(found):
        kind = c.family if c.family == "algebra" else tuple((k.grid, k.loop) for k in c.graph.kernels)
        kinds[kind] += 1
        if kinds[kind] <= 2:
            ranked.append((c.seconds * (SECOND if kinds[kind] == 2 else 1.0), n, c))
    return iter(c for *_, c in sorted(ranked, key=lambda row: row[:2]))


def tile_variants(c: Candidate, n: int) -> Iterator[Schedule]:
    """The model's first choice, then other tile sizes, one kernel at a time; each as the model would launch it, and
    once more as most kernels like it.
    """
    seen: set[Schedule] = set()
    for i, alternatives in enumerate(c.alternatives or ((),)):
        for tiles in (*c.schedule.kernels[i : i + 1], *alternatives[:n]):
            for sizes in (tiles, replace(tiles, num_warps=4, num_stages=min(tiles.num_stages, 3))):
                changed = replace(c.schedule, kernels=(*c.schedule.kernels[:i], sizes, *c.schedule.kernels[i + 1 :]))
                if changed not in seen:
                    seen.add(changed)
                    yield changed
    if not seen:
        yield c.schedule


def launch_variants(w: Winner) -> Iterator[Schedule]:
    """Other numbers of warps and pipeline stages, one kernel at a time."""
    for i, (kernel, sizes) in enumerate(zip(w.graph.kernels, w.schedule.kernels, strict=True)):
        if isinstance(kernel, Library):
            continue
        for warps in (2, 4, 8):
            for stages in (2, 3, 4, 5, 6) if kernel.loop else (1,):
                if (warps, stages) != (sizes.num_warps, sizes.num_stages):
                    changed = replace(sizes, num_warps=warps, num_stages=stages)
                    yield replace(w.schedule, kernels=(*w.schedule.kernels[:i], changed, *w.schedule.kernels[i + 1 :]))


def nearby(w: Winner, device: Device) -> Iterator[Schedule]:
    """Tiles of a half or twice the size along one axis, or moved from one axis to another, one kernel at a time."""
    if w.family == "algebra":
        return
    now = estimate(w.graph, w.schedule, device)
    for i, (kernel, sizes) in enumerate(zip(w.graph.kernels, w.schedule.kernels, strict=True)):
        if isinstance(kernel, Library):
            continue
        tiles = dict(sizes.tiles)
        axes = [a for a, n in tiles.items() if n > 1]
        for up, down in product((None, *axes), repeat=2):
            if up == down:
                continue
            moved = {a: n * 2 if a == up else n // 2 if a == down else n for a, n in tiles.items()}
            if any(n >= 2 * w.graph.extent(a) for a, n in moved.items() if not is_part(a)):
                continue
            changed = replace(sizes, tiles=tuple(moved.items()))
            schedule = replace(w.schedule, kernels=(*w.schedule.kernels[:i], changed, *w.schedule.kernels[i + 1 :]))
            if estimate(w.graph, schedule, device) <= NEARBY * now:
                yield schedule
