"""Campaigns of signals: interrupts while a function is searched and measured, and processes that are killed.

An interrupt has to be noticed within a second, and work that it cut short may not count. A killed process may leave
rubbish behind, but no process and no wrong result.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mirage_jax
from mirage_jax import children
from mirage_jax.audit import crowds
from mirage_jax.audit.stress import Stress, listening, stress_campaign
from mirage_jax.cache import Cache
from mirage_jax.compiler.isolation.parent import Session, TrialFailure
from mirage_jax.compiler.winner import Family, Winner
from mirage_jax.errors import in_one_line
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.mugraph.graph import KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.progress import Say
from mirage_jax.search.decompose.subprocesses import SubSearch, search_parts
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.timing import Timing

MAX_NOTICE_SECONDS = 1.0  # until an interrupt is noticed
MAX_ORPHAN_SECONDS = 3.0  # until a process whose parent was killed has ended
CHECK_EVERY = 4  # interrupts per function that is called again, to its end
SCRIPT_EVERY = 10  # interrupts per script that is interrupted until it ends
PATIENCE = 120.0  # seconds for a process to do anything
MAX_DELAY = 2.5  # seconds from the start of a call to its interrupt
TOLERANCE = 1e-3  # of results

MAKE = "import sys; from mirage_jax.audit import interrupts; interrupts.interrupted(*map(int, sys.argv[1:3]))"
SCRIPT = "import sys; from mirage_jax.audit import interrupts; interrupts.script(int(sys.argv[1]))"
STORE = "import sys; from mirage_jax.audit import interrupts; interrupts.store_for_ever(sys.argv[1], int(sys.argv[2]))"

GRAPH = """mugraph {
  extents i=64 j=48 k=40
  input x: f32[i,j]
  input y: f32[j,k]
  input z: f32[j,k]
  library t: f32[i,k] = dot{axes=(j)} x[i,j] y[j,k]
  library u: f32[i,k] = dot{axes=(j)} x[i,j] z[j,k]
  library v: f32[i,k] = mul t[i,k] u[i,k]
  output v
}"""


def _program(n: int) -> tuple[Callable[..., Any], list[jax.Array]]:
    """Make a program that no process has seen before: its size is its number."""
    rng = np.random.default_rng(n)

    def fn(a: jax.Array, b: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh((a @ b) @ v) @ w + (a @ w.T) @ w

    shapes = ((n, n), (n, n), (n, 8), (8, n))
    a, b, v, w = (jnp.asarray(rng.normal(size=s) / n**0.5, "float32") for s in shapes)
    return fn, [a, b, v, w]


# ---------------------------------------------------------------------- interrupts


@stress_campaign("interrupts")
def interrupts(found: Stress, folder: Path, count: int, say: Say) -> None:
    """Send `count` interrupts at random times to processes in which functions are optimized, then some to scripts."""
    row, again = found.row("interrupts of a first call"), found.row("calls after it")
    row.limit = MAX_NOTICE_SECONDS
    while row.cases < count:
        code, cases = f"{count - row.cases}", row.cases
        with _process(MAKE, folder / f"{cases}", code, str(found.seed + cases)) as (process, lines):
            for line in lines:
                report = json.loads(line)
                (again if report.pop("again") else row).add(**report)
                say(f"interrupts | {row.cases:,} of {count:,} | slowest {row.slowest:.2f} s")
        if process.returncode:
            row.add(used=False, lines=0, problem=f"it ended with code {process.returncode}", crashed=True)
    ends, scripts = found.row("interrupts of a script, until its process has ended"), count // SCRIPT_EVERY
    for n in range(scripts):
        seconds, code = _script(random.Random(f"{found.seed}/{n}"), n, folder / f"script {n}")
        is_over = code == 0  # before the interrupt
        crashed = code not in (0, 1, 130, -signal.SIGINT)
        problem = f"it ended with code {code}" if crashed else ""
        ends.add(used=not is_over, lines=0, problem=problem, crashed=crashed, seconds=0.0 if is_over else seconds)
        say(f"interrupts | {n + 1:,} of {scripts:,} scripts | slowest {ends.slowest:.2f} s")


@contextmanager
def _process(code: str, cache: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """Start a process with a cache of its own; gives the process and the lines that it prints."""
    with subprocess.Popen(
        children.python(code, *args),
        env=children.environment({"JAX_PLATFORMS": "cpu", "MIRAGE_JAX_CACHE_DIR": str(cache)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout


def _script(rng: random.Random, number: int, cache: Path) -> tuple[float, int]:
    """Seconds that a script takes to end after an interrupt from the keyboard, and its exit code."""
    with _process(SCRIPT, cache, str(100 + number)) as (process, lines):
        next(lines, "")
        time.sleep(rng.uniform(0, MAX_DELAY))
        sent = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of its processes
        process.wait()
        return time.monotonic() - sent, process.returncode


def script(number: int) -> None:
    """Do the work of a script that is interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    fn, args = _program(number)
    print("begun", flush=True)
    jax.block_until_ready(mirage_jax.optimize(fn, budget=mirage_jax.Budget(5.0, workers=2))(*args))


def interrupted(count: int, seed: int) -> None:
    """Interrupt calls of this process, and print a report on each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    rng = random.Random(seed)
    out = os.dup(1)

    def say(**report: Any) -> None:
        os.write(out, (json.dumps(report) + "\n").encode())

    with listening() as lines:
        done = number = 0
        while done < count:
            number += 1
            fn, args = _program(64 + (seed * 7 + number) % 1000)
            seconds = _interrupt(mirage_jax.optimize(fn, budget="5s"), args, rng.uniform(0, MAX_DELAY))
            if seconds is None:  # it was done before
                continue
            done += 1
            say(again=False, used=True, lines=len(lines.texts), seconds=seconds)
            lines.take()
            if done % CHECK_EVERY == 0:
                say(again=True, used=True, lines=0, problem=_problem(mirage_jax.optimize(fn, budget="5s"), fn, args))
                lines.take()


def _interrupt(f: Callable[..., Any], args: list[jax.Array], delay: float) -> float | None:
    """Seconds that an interrupt takes to be noticed; None if the call was over before it."""
    sent: list[float] = []

    def send() -> None:
        """Interrupt this process."""
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(delay, send)
    try:
        timer.start()
        jax.block_until_ready(f(*args))
        timer.cancel()
        timer.join()
        if sent:
            time.sleep(1)  # it comes now
        return None
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]


def _problem(f: Callable[..., Any], fn: Callable[..., Any], args: list[jax.Array]) -> str:
    try:
        have, want = np.asarray(f(*args), np.float64), np.asarray(jax.jit(fn)(*args), np.float64)
    except Exception as why:
        return in_one_line(why)
    error = float(np.abs(have - want).max())
    return "" if error <= TOLERANCE else f"error {error:.1e}"


# ---------------------------------------------------------------------- kills


@stress_campaign("kills")
def kills(found: Stress, folder: Path, count: int, say: Say) -> None:
    """Kill `count` processes: in turn one that stores and searches, and a child of each of our kinds."""
    ways = {
        "a process that stores and searches": _kill_parent,
        "a child that searches": _kill_searcher,
        "a child that tries variants": _kill_trier,
    }
    with listening() as lines:
        for n, (name, kill) in zip(range(count), itertools.cycle(ways.items())):
            rng = random.Random(f"{found.seed}/{n}")
            found.attempt(name, lines, lambda kill=kill, rng=rng: (True, kill(rng, folder)))
            say(f"kills | {n + 1:,} of {count:,}")


def store_for_ever(folder: str, seed: int) -> None:
    """Store entries, and have processes search, until this process is killed."""
    rng, cache = random.Random(seed), Cache(folder)
    threading.Thread(target=lambda: _search_in_processes(60.0), daemon=True).start()
    print("begun", flush=True)
    while True:
        key = crowds.key_of(rng.randrange(crowds.KEYS))
        cache.put(key, crowds.entry_of(f"{rng.randrange(100)} " * 3000), kernels="text")


def _search_in_processes(seconds: float) -> list[Any]:
    graph = parse(GRAPH)
    part = SubSearch(graph, DEVICES["H200"], Space(max_ops=14), 2_000_000, ("algebra", "kernels"))
    return search_parts([part] * 2, seconds, workers=2)


def _kill_parent(rng: random.Random, folder: Path) -> str:
    with _process(STORE, folder, str(folder / "cache"), str(rng.randrange(1000))) as (process, lines):
        next(lines, "")
        time.sleep(rng.uniform(0, 3))
        processes = _descendants(process.pid)
        process.kill()
    until = time.monotonic() + MAX_ORPHAN_SECONDS
    while left := [pid for pid in processes if _is_alive(pid)]:
        if time.monotonic() > until:
            return f"{len(left)} of {len(processes)} processes go on"
        time.sleep(0.02)
    cache = Cache(folder / "cache")
    for k in range(crowds.KEYS):
        entry = cache.get(crowds.key_of(k))
        if entry is not None and not crowds.is_whole(entry):
            return "an entry is torn"
    return ""


def _kill_searcher(rng: random.Random, folder: Path) -> str:
    def kill() -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if processes := _descendants(os.getpid()):
                time.sleep(rng.uniform(0, 3))
                with suppress(OSError):
                    os.kill(rng.choice(processes), signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    found = _search_in_processes(20.0)
    thread.join()
    return "" if all(candidates for candidates, _ in found) else "nothing was found"


def _kill_trier(rng: random.Random, folder: Path) -> str:
    graph = parse(GRAPH)
    winner = Winner(graph, Schedule((KernelSchedule(),) * 3), (), (), Family.ALGEBRA, "cpu")
    variants = [{**winner.to_json(), "views": {}}] * 4
    with Session() as session:
        assert session._ready()
        child = session._child

        def kill() -> None:
            time.sleep(rng.uniform(0, 1))
            if child is not None:
                child._process.kill()

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        outcomes = session.times(variants)
        thread.join()
    if len(outcomes) == len(variants) and all(isinstance(x, Timing | TrialFailure) for x in outcomes):
        return ""
    return f"outcomes: {outcomes}"


def _descendants(pid: int) -> list[int]:
    """Processes that a process has started, and theirs (on Linux)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
