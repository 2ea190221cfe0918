"""Searches of the parts of a region, one after the other or in processes of their own.

Parts do not depend on each other, so what is found is the same in any order; only a budget of seconds goes further. A
process is this Python, started afresh with ``-m mirage_jax.search``: a fork would take over JAX's threads, and
`multiprocessing` would run the user's main module once more. Tasks and results are text. A process that fails costs
time, not the result: its part is searched here.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mirage_jax.errors import MirageError, UnsupportedError
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import kernel_from_json, kernel_to_json, schedule_from_json, schedule_to_json
from mirage_jax.search.devices import Device
from mirage_jax.search.frontier import Space
from mirage_jax.search.report import Notify, SearchReport, StopReason
from mirage_jax.search.structures import Candidate, kind
from mirage_jax.search.window_search import Search

log = logging.getLogger("mirage_jax")

LEAST = 0.5  # seconds for a part, however late it is
START = 20.0  # seconds that a process may take to begin and to end
TOLD = 32  # candidates of each family that a process tells of, best first, and the best of each kind

type Found = tuple[list[Candidate], SearchReport]


@dataclass(frozen=True)
class Part:
    """One search to be run."""

    graph: KernelGraph
    device: Device
    space: Space
    states: int
    families: Sequence[str]
    seconds: float = LEAST


def search_part(part: Part, notify: Notify | None = None) -> Found:
    """Candidates of one part; none if it has no useful normal form."""
    one = Search(part.graph, part.device, part.space, part.seconds, part.states, part.families, notify=notify)
    try:
        return one.run(), one.report
    except UnsupportedError as why:
        one.report.dropped[str(why)] += 1
        return [], one.report


def search_parts(parts: Sequence[Part], seconds: float, workers: int = 1, notify: Notify | None = None) -> list[Found]:
    """All parts within `seconds`, shared among those that are left."""
    until = time.monotonic() + seconds

    def share(n: int) -> Part:
        """Part number n, with its share of the time that is left when it begins."""
        rounds = -(-(len(parts) - n) // workers)
        return replace(parts[n], seconds=max(LEAST, (until - time.monotonic()) / rounds))

    def elsewhere(n: int) -> Found:
        return _elsewhere(share(n))

    if workers == 1 or len(parts) == 1:
        return [search_part(share(n), notify) for n in range(len(parts))]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(elsewhere, range(len(parts))))


def _elsewhere(part: Part) -> Found:
    """`search_part` in a process of its own, which needs no accelerator."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mirage_jax.search"],
            input=part_to_text(part),
            capture_output=True,
            text=True,
            timeout=part.seconds + START,
            check=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        return found_from_text(done.stdout)
    except (OSError, subprocess.SubprocessError, MirageError, KeyError, TypeError, ValueError) as why:
        detail = getattr(why, "stderr", None) or why
        log.warning("a search process failed, its part is searched here: %s: %s", type(why).__name__, detail)
        return search_part(part)


# --- as text


def part_to_text(part: Part) -> str:
    own = {"graph": str(part.graph), "device": asdict(part.device), "space": asdict(part.space)}
    return json.dumps(_fields(part) | own)


def _fields(x: Part | SearchReport) -> dict[str, Any]:
    return {f.name: getattr(x, f.name) for f in fields(x)}


def part_from_text(text: str) -> Part:
    d: dict[str, Any] = json.loads(text)
    d["graph"], d["device"], d["space"] = parse(d["graph"]), Device(**d["device"]), Space(**d["space"])
    return Part(**d)


def found_to_text(found: Found) -> str:
    candidates, report = found
    told: Counter[object] = Counter()
    rows: list[Any] = []
    for c in candidates:
        own = c.family, kind(c)
        told.update((c.family, own))
        if told[c.family] <= TOLD or told[own] == 1:
            others = [[kernel_to_json(k) for k in ks] for ks in c.alternatives]
            row = {"graph": str(c.graph), "schedule": schedule_to_json(c.schedule), "alternatives": others}
            rows.append({**row, "seconds": c.seconds, "family": c.family, "single": c.single})
    summary = {**_fields(report), "space": asdict(report.space), "stop": report.stop.value}
    return json.dumps({"candidates": rows, "report": summary})


def found_from_text(text: str) -> Found:
    d: dict[str, Any] = json.loads(text)
    candidates = [
        Candidate(
            parse(c["graph"]),
            schedule_from_json(c["schedule"]),
            float(c["seconds"]),
            str(c["family"]),
            tuple(tuple(map(kernel_from_json, ks)) for ks in c["alternatives"]),
            tuple(c["single"]),
        )
        for c in d["candidates"]
    ]
    r: dict[str, Any] = d["report"]
    for name in ("dropped", "pruned", "fired"):
        r[name] = Counter[str](r[name])
    r["space"], r["stop"] = Space(**r["space"]), StopReason(r["stop"])
    return candidates, SearchReport(**r)
