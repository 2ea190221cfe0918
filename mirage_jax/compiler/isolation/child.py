"""The child process of `compiler.isolation.parent`: ``python -m mirage_jax.compiler.isolation.child [FOLDER]``.

Reads requests from standard input, compiles the variants of each in several threads, runs one after the other, times
those that ran, together, and reports each step on standard output before and after it. Ends when its parent
does, whatever it is doing, and after an error from which the device does not recover.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax import gpu_lock, timing
from mirage_jax.compiler.inputs import Types, one_set
from mirage_jax.compiler.winner import Winner
from mirage_jax.errors import in_one_line
from mirage_jax.lower.runtime import aot, launch
from mirage_jax.mugraph.dtypes import numpy_dtype

type Say = Callable[[Mapping[str, Any]], None]

MAX_BATCH_SECONDS = 2.0  # seconds of runs that are timed together


class Sets(list[tuple[jax.Array, ...]]):
    """Sets of inputs; unlike a list's, references to it may be weak."""


@dataclass(frozen=True, slots=True)
class Run:
    """A compiled variant, which runs on its sets of inputs and waits."""

    compiled: Callable[..., object]
    sets: Sets

    def __call__(self) -> None:
        timing.in_turn(self.compiled, self.sets)()


def serve[R: Callable[[], object]](
    requests: Iterable[str],
    say: Say,
    prepare: Callable[[Mapping[str, Any]], R],
    measure: Callable[[Sequence[R]], Sequence[timing.Timing]],
    healthy: Callable[[], bool],
    turn: Callable[[gpu_lock.Waiting], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Answer requests until there are no more, or until the device is not healthy any more. What `prepare` makes of the
    variants is run one by one, then timed by `measure`, within a `gpu_lock`, since others may use the device.
    """
    for line in requests:
        try:
            count = _answer(json.loads(line), say, prepare, measure, healthy, turn)
        except _DeviceLost:
            return
        say({"done": count})


def _answer[R: Callable[[], object]](
    request: Mapping[str, Any],
    say: Say,
    prepare: Callable[[Mapping[str, Any]], R],
    measure: Callable[[Sequence[R]], Sequence[timing.Timing]],
    healthy: Callable[[], bool],
    turn: Callable[[gpu_lock.Waiting], AbstractContextManager[object]],
) -> int:
    """Answer one request, and return the number of variants. Keep nothing: inputs fill a device's memory."""
    until = time.monotonic() + request.get("seconds", math.inf)
    with ThreadPoolExecutor(request["threads"]) as pool:
        prepare_one = functools.partial(_prepare, say, prepare, until)
        prepared = list(pool.map(prepare_one, itertools.count(), request["variants"]))
    runs = {i: run for i, run in enumerate(prepared) if run is not None}
    with turn(functools.partial(say, {"waiting": True})):
        ran = _run_each(runs, say, healthy)
        for group in _groups(ran) if request["threads"] > 1 else [[i] for i in ran]:
            _time(group, runs, say, measure, healthy)
    return len(prepared)


class _DeviceLost(Exception):
    """An error from which the device does not recover."""


def _run_each(runs: Mapping[int, Callable[[], object]], say: Say, healthy: Callable[[], bool]) -> dict[int, float]:
    """Seconds of a second run of each, where none fails."""
    ran: dict[int, float] = {}
    for i, run in runs.items():
        say({"running": i})
        try:
            run()
            ran[i] = timing.wall(run)
        except Exception as why:
            say({"failed": i, "why": in_one_line(why)})
            if not healthy():
                raise _DeviceLost from why
    return ran


def _time[R](
    group: Sequence[int],
    runs: Mapping[int, R],
    say: Say,
    measure: Callable[[Sequence[R]], Sequence[timing.Timing]],
    healthy: Callable[[], bool],
) -> None:
    """Time several together; each alone, if that fails."""
    say({"timing": list(group)})
    try:
        found = measure([runs[i] for i in group])
    except Exception as why:
        if len(group) == 1:
            say({"failed": group[0], "why": in_one_line(why)})
        if not healthy():
            raise _DeviceLost from why
        for i in group if len(group) > 1 else ():
            _time([i], runs, say, measure, healthy)
    else:
        for i, timed in zip(group, found, strict=True):
            say({"timed": i, "samples": timed.samples, "launches": timed.launches})


def _prepare[R](
    say: Say, prepare: Callable[[Mapping[str, Any]], R], until: float, i: int, variant: Mapping[str, Any]
) -> R | None:
    if i > 0 and time.monotonic() > until:  # the first gets its answer, however late it is
        say({"late": i})
        return None
    say({"compiling": i})
    try:
        run = prepare(variant)
    except Exception as why:  # a kernel that cannot be compiled is one candidate less
        say({"failed": i, "why": in_one_line(why)})
        return None
    say({"compiled": i})
    return run


def _groups(ran: Mapping[int, float]) -> list[list[int]]:
    """Variants in a row that take at most `MAX_BATCH_SECONDS`."""
    groups: list[list[int]] = []
    seconds = math.inf
    for i, own in ran.items():
        if seconds + own > MAX_BATCH_SECONDS:
            groups.append([])
            seconds = 0.0
        groups[-1].append(i)
        seconds += own
    return groups


def prepare_winner(variant: Mapping[str, Any]) -> Run:
    """Compile a `Winner`'s program for the device that is here."""
    device = jax.devices()[0]
    winner = Winner.from_json(variant, "cuda" if device.platform == "gpu" else device.platform)
    types = tuple(
        jax.ShapeDtypeStruct(view.whole, numpy_dtype(t.dtype))
        for t, view in zip(winner.graph.inputs, winner.views, strict=True)
    )
    on_gpu = device.platform == "gpu"
    sets = timing.sets_for(sum(t.size * t.dtype.itemsize for t in types)) if on_gpu else 1
    args = draw(types, sets)
    return Run(jax.jit(winner.run).lower(*types).compile(), args)


def measure(runs: Sequence[Run]) -> list[timing.Timing]:
    """The time of each, for one of its sets."""
    if jax.devices()[0].platform == "gpu":
        return timing.time_once(runs, [len(run.sets) for run in runs])
    return [timing.time_wall({"": run}, rounds=1)[""] for run in runs]


_DRAWING = threading.Lock()
_drawn = weakref.WeakValueDictionary[tuple[Types, int], Sets]()


def draw(types: Types, sets: int) -> Sets:
    """Distinct sets of random inputs, the same for all variants that take such arrays, for as long as one has them.
    (Variants of one region may take different ones: those that read parts of operands in place take whole operands.)
    """
    with _DRAWING:  # or several threads would draw the same
        found = _drawn.get((types, sets))
        if found is None:
            found = _drawn[types, sets] = Sets(one_set(types, i) for i in range(sets))
        return found


def device_is_healthy() -> bool:
    """Does the device still compute? After an illegal access it does not, in this process."""
    try:
        return float(jnp.ones(8).sum()) == 8.0
    except Exception:
        return False


def lines_until_the_parent_ends() -> Iterable[str]:
    """The lines of standard input; where it ends, this process does, even if the device is busy and will be forever."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def channel() -> Say:
    """A function that writes a message to standard output, where from now on nothing else gets: what libraries print
    there goes to standard error.
    """
    out, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        """Write one message."""
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    return say


def main() -> None:
    """Serve the parent process until it ends."""
    say = channel()
    device = jax.devices()[0]
    if device.platform == "gpu" and not launch.missing(*launch.PACKAGES):
        aot.refuse_what_does_not_fit(*sys.argv[1:])
    device_is_healthy()  # makes the context, before anything is timed
    say({"ready": device.device_kind})
    turn = functools.partial(gpu_lock.gpu_lock, device)
    serve(lines_until_the_parent_ends(), say, prepare_winner, measure, device_is_healthy, turn)
    os._exit(1)  # the device is lost: nothing there can be tidied up


if __name__ == "__main__":
    main()
