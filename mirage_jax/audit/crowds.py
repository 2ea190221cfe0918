"""Campaigns of many readers and writers: processes that share a cache, and threads that share a function."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import threading
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

from mirage_jax import cache as caches
from mirage_jax import children
from mirage_jax.audit.stress import CASES, Case, Fast, Lines, Stress, listening, options, stress_campaign
from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.errors import in_one_line
from mirage_jax.progress import Say

PROCESSES, THREADS = 64, 8
KEYS = 4  # that they share
PATIENCE = 3600.0  # seconds
LENGTHS = (1, 100, 3000)  # how often a process writes its own number into an entry
FORK = "import sys; from mirage_jax.audit import crowds; crowds.fork(*sys.argv[1:2], *map(int, sys.argv[2:]))"


# ---------------------------------------------------------------------- processes


@stress_campaign("processes")
def processes(found: Stress, folder: Path, count: int, say: Say, workers: int = PROCESSES) -> None:
    """Run `count` rounds in each of many processes, which store, read and vouch for entries of the same few keys."""
    say(f"processes | {workers} of {count:,} rounds each")
    command = children.python(FORK, str(folder), str(workers), str(count), str(found.seed))
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
    if left := [path.name for path in folder.rglob("*.tmp")]:
        row.wrong += 1
        row.problems.append(f"{len(left)} files that were being written are left: {left[0]}")


def fork(folder: str, workers: int, count: int, seed: int) -> None:
    """Become many processes, in a process of its own; each prints its report."""
    warnings.simplefilter("ignore")  # JAX's, of forks, which compute nothing here
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
    """Run the rounds of one process."""
    lines, logger = Lines(), logging.getLogger("mirage_jax")
    logger.addHandler(lines)
    cache, rng, counts, problems = Cache(folder), random.Random(f"{seed}/{number}"), Counter[str](), list[str]()
    for _ in range(count):
        key = key_of(rng.randrange(KEYS))
        mark = f"{number} " * rng.choice(LENGTHS)
        action = rng.randrange(3)  # 2: only read
        if action == 0 and cache.put(key, entry_of(mark), kernels=mark) is None:
            problems.append("nothing stored")
        if action == 1 and (found := cache.get(key)) is not None:
            cache.vouch(key, replace(found))
        entry = cache.get(key)
        counts["rounds"] += 1
        counts["found"] += entry is not None
        if entry is not None and not is_whole(entry):
            problems.append(f"nobody wrote this: {entry.reasons}")
    counts["wrong"] = len(problems)
    return {"counts": counts, "problems": problems, "lines": lines.take()}


def key_of(n: int) -> CacheKey:
    """Make one of a few keys."""
    return CacheKey("graph", (("k", n),), "jax", "stress", "cpu: cpu")


def entry_of(mark: str) -> Entry:
    """Make an entry in which every part says who wrote it."""
    return Entry("win", graph=f"mugraph {mark}", reasons=(mark[:100],), timings={"xla": 1.0})


def is_whole(entry: Entry) -> bool:
    """Whether one writer wrote the whole entry."""
    words = (entry.graph or "").split()[1:]
    return len(words) in LENGTHS and len(set(words)) == 1 and entry.reasons[0].split()[0] == words[0]


# ---------------------------------------------------------------------- threads


@stress_campaign("threads")
def threads(found: Stress, folder: Path, count: int, say: Say) -> None:
    """Run `count` rounds in each of several threads, which decide and run the same functions, stored and not."""
    what, lock = f"{THREADS} threads, {count:,} rounds each", threading.Lock()
    for case in CASES:  # cached properties are not under test
        assert case.region and case.xla_error >= 0
    shared = {n: Fast(options(folder / str(n), "search")) for n in range(2)}

    def round_of(case: Case, kind: int) -> str:
        """Use a compiler of all threads, a new one with the same cache, or a new one that finds nothing."""
        compiler = shared[kind] if kind < 2 else Fast(options(folder / "0"))
        return case.problem(case.run(case.decide(compiler)))

    def work(number: int) -> None:
        rng = random.Random(f"{found.seed}/{number}")
        for n in range(count):
            case, kind = rng.choice(CASES), rng.randrange(3)
            problem, crashed = "", False
            try:
                problem = round_of(case, kind)
            except Exception as why:
                problem, crashed = in_one_line(why), True
            with lock:
                found.row(what).add(used=True, lines=0, problem=problem, crashed=crashed)
            if number == 0:
                say(f"threads | {n + 1:,} of {count:,} rounds")

    with listening() as lines:
        all_threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
        for thread in all_threads:
            thread.start()
        for thread in all_threads:
            thread.join()
        found.row(what).lines = lines.take()
        found.row(what).problems += lines.last[:2]
    caches._checked_here.clear()
