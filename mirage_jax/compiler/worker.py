"""The child process of `compiler.trials`: ``python -m mirage_jax.compiler.worker``.

Reads requests from standard input, compiles the variants of each in several threads, then runs and times one after the
other, and says on standard output what it is about to do and what came of it. Ends when its parent does, whatever it
is doing, and after an error from which the device does not recover.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax import timing
from mirage_jax.compiler.inputs import Types, one_set
from mirage_jax.compiler.trials import LOCK
from mirage_jax.compiler.winner import Winner
from mirage_jax.lower import aot
from mirage_jax.mugraph.arrays import numpy_dtype

type Say = Callable[[Mapping[str, Any]], None]
type Prepare = Callable[[Mapping[str, Any]], Callable[[], timing.Timing]]  # variant -> what runs and times it


def serve(
    requests: Iterable[str],
    say: Say,
    prepare: Prepare,
    healthy: Callable[[], bool],
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Answer requests until there are no more, or until the device is not healthy any more. Variants are run within
    `turn`, since others may use the device.
    """
    for line in requests:
        request = json.loads(line)
        with ThreadPoolExecutor(request["threads"]) as pool:
            prepare_one = functools.partial(_prepare, say, prepare)
            prepared = list(pool.map(prepare_one, itertools.count(), request["variants"]))
        for i, run in enumerate(prepared):
            if run is None:
                continue
            with turn():
                say({"running": i})
                try:
                    found = run()
                except Exception as why:
                    say({"failed": i, "why": _in_one_line(why)})
                    if not healthy():
                        return
                else:
                    say({"timed": i, "samples": found.samples, "launches": found.launches})
        say({"done": len(prepared)})


def _prepare(say: Say, prepare: Prepare, i: int, variant: Mapping[str, Any]) -> Callable[[], timing.Timing] | None:
    say({"compiling": i})
    try:
        run = prepare(variant)
    except Exception as why:  # a kernel that cannot be compiled is one candidate less
        say({"failed": i, "why": _in_one_line(why)})
        return None
    say({"compiled": i})
    return run


@contextmanager
def alone(lock: str) -> Iterator[None]:
    """While no other process has a lock on this file; it ends with the process that has it."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def turns() -> Callable[[], AbstractContextManager[object]]:
    """What makes this process wait for its turn on the device, if it shares that."""
    lock = os.environ.get(LOCK)
    return functools.partial(alone, lock) if lock else nullcontext


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition('\n')[0]}"


def prepare_winner(variant: Mapping[str, Any]) -> Callable[[], timing.Timing]:
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
    compiled = timing.chain(winner.run).lower(args).compile()

    def run() -> timing.Timing:
        call = lambda: jax.block_until_ready(compiled(args))  # noqa: E731
        return timing.time_once(call, sets) if on_gpu else timing.time_wall({"": call}, rounds=1)[""]

    return run


_DRAWING = threading.Lock()


def draw(types: Types, sets: int) -> list[tuple[jax.Array, ...]]:
    """Distinct sets of random inputs, the same for all variants of a region."""
    with _DRAWING:  # or several threads would draw the same
        return _draw(types, sets)


@functools.lru_cache(maxsize=1)
def _draw(types: Types, sets: int) -> list[tuple[jax.Array, ...]]:
    return [one_set(types, jax.random.key(i)) for i in range(sets)]


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
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    return say


def main() -> None:
    say = channel()
    device = jax.devices()[0]
    if device.platform == "gpu":
        aot.refuse_what_does_not_fit()
    device_is_healthy()  # makes the context, before anything is timed
    say({"ready": device.device_kind})
    serve(lines_until_the_parent_ends(), say, prepare_winner, device_is_healthy, turns())
    os._exit(1)  # the device is lost: nothing there can be tidied up


if __name__ == "__main__":
    main()
