"""Campaigns of many readers and writers: processes that share a cache, and threads that share a function."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

from mirage_jax import cache as caches
from mirage_jax import children
from mirage_jax.audit.stress import CASES, Fast, Lines, Stress, listening, options
from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.errors import in_one_line
from mirage_jax.progress import Say

PROCESSES, THREADS = 64, 8
KEYS = 4  # that they share
PATIENCE = 3600.0  # seconds
LENGTHS = (1, 100, 3000)  # how often a process writes its own number into an entry
FORK = "import sys; from mirage_jax.audit import crowds; crowds.fork(*sys.argv[1:2], *map(int, sys.argv[2:]))"


# ---------------------------------------------------------------------- processes


def processes(count: int, seed: int, say: Say = lambda _: None, workers: int = PROCESSES) -> Stress:
    """So many rounds in each of many processes, which store, read and vouch for entries of the same few keys."""
    found, start = Stress("processes", seed), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mirage_jax") as folder:
        say(f"processes | {workers} of {count:,} rounds each")
        command = children.python(FORK, folder, str(workers), str(count), str(seed))
        environment = children.environment({"JAX_PLATFORMS": "cpu"})
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE, cwd=folder
        )
        row = found.row(f"{workers} processes, {count:,} rounds each")
        reports = [json.loads(line) for line in done.stdout.splitlines()]
        for report in reports:
            counts = Counter(report["counts"])
            row.cases += counts["rounds"]
            row.used += counts["found"]
            row.wrong += counts["wrong"]
            row.lines = max(row.lines, report["lines"])
            row.problems += report["problems"][:1]
        row.crashes = workers - len(reports)
        row.problems += done.stderr.strip().splitlines()[-1:] if row.crashes else []
        left = [path.name for path in Path(folder).rglob("*.tmp")]
        if left:
            row.wrong += 1
            row.problems.append(f"{len(left)} files that were being written are left: {left[0]}")
    found.seconds = time.perf_counter() - start
    return found


def fork(folder: str, workers: int, count: int, seed: int) -> None:
    """In a process of its own: become many, each of which prints what it found."""
    warnings.simplefilter("ignore")  # JAX's, of forks: none of them computes anything
    pids: list[int] = []
    for n in range(workers):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                text = json.dumps(hammer(folder, n, count, seed)) + "\n"
                os.write(1, text.encode())
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def hammer(folder: str, number: int, count: int, seed: int) -> dict[str, object]:
    """Rounds of one process."""
    lines, logger = Lines(), logging.getLogger("mirage_jax")
    logger.addHandler(lines)
    cache, rng, counts, problems = Cache(folder), random.Random(f"{seed}/{number}"), Counter[str](), list[str]()
    for _ in range(count):
        key = key_of(rng.randrange(KEYS))
        mark = f"{number} " * rng.choice(LENGTHS)
        match rng.randrange(3):
            case 0:
                if cache.put(key, entry_of(mark), kernels=mark) is None:
                    problems.append("nothing stored")
            case 1:
                if (found := cache.get(key)) is not None:
                    cache.vouch(key, replace(found))
            case _:
                pass
        entry = cache.get(key)
        counts["rounds"] += 1
        counts["found"] += entry is not None
        if entry is not None and not is_whole(entry):
            problems.append(f"not what anybody wrote: {entry.reasons}")
    counts["wrong"] = len(problems)
    return {"counts": counts, "problems": problems, "lines": lines.take()}


def key_of(n: int) -> CacheKey:
    """One of a few keys."""
    return CacheKey("graph", (("k", n),), "jax", "stress", "cpu: cpu")


def entry_of(mark: str) -> Entry:
    """An entry of which every part says who wrote it."""
    return Entry("win", graph=f"mugraph {mark}", reasons=(mark[:100],), timings={"xla": 1.0})


def is_whole(entry: Entry) -> bool:
    """Whether all of it is of one writer."""
    words = (entry.graph or "").split()[1:]
    return len(words) in LENGTHS and len(set(words)) == 1 and entry.reasons[0].split()[0] == words[0]


# ---------------------------------------------------------------------- threads


def threads(count: int, seed: int, say: Say = lambda _: None) -> Stress:
    """So many rounds in each of several threads, which decide and run the same functions, stored and not."""
    found, start = Stress("threads", seed), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mirage_jax") as folder, listening() as lines:
        row, lock = found.row(f"{THREADS} threads, {count:,} rounds each"), threading.Lock()
        for case in CASES:  # what is computed once is not what is tried
            assert case.region and case.xla_error >= 0
        shared = {n: Fast(options(Path(folder) / str(n), "search")) for n in range(2)}

        def work(number: int) -> None:
            rng = random.Random(f"{seed}/{number}")
            for n in range(count):
                case, kind = rng.choice(CASES), rng.randrange(3)
                problem, crashed = "", False
                try:  # a compiler that others use, one of its own with the same cache, or one that finds nothing
                    compiler = shared[kind] if kind < 2 else Fast(options(Path(folder) / "0"))
                    problem = case.problem(case.run(case.decide(compiler)))
                except Exception as why:
                    problem, crashed = in_one_line(why), True
                with lock:
                    row.add(used=True, lines=0, problem=problem, crashed=crashed)
                if number == 0:
                    say(f"threads | {n + 1:,} of {count:,} rounds")

        all_threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
        for thread in all_threads:
            thread.start()
        for thread in all_threads:
            thread.join()
        row.lines = lines.take()
        row.problems += lines.last[:2]
    caches._checked_here.clear()
    found.seconds = time.perf_counter() - start
    return found
