"""Searches of the parts of a region, one after the other or in subprocesses.

Parts do not depend on each other, so the results are the same in any order; only a budget of seconds goes further. A
subprocess is this Python, started afresh as `mirage_jax.search`: a fork would take over JAX's threads, and
`multiprocessing` would run the user's main module once more. Tasks and results are text. A process that fails costs
time, not the result: its part is searched here. Machines of a cluster take parts, too. One that is lost costs its part
the time so far: another process searches it again.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mirage_jax import children
from mirage_jax.cluster import ENDED, Machine
from mirage_jax.errors import MirageError, UnsupportedError, in_one_line, printable
from mirage_jax.gc_pause import no_collection
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.interruptible import POLL_SECONDS, spread
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import kernel_from_json, kernel_to_json, schedule_from_json, schedule_to_json
from mirage_jax.search.candidates import Candidate, kind
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.search.report import Notify, SearchReport, StopReason

log = logging.getLogger("mirage_jax.search")

MIN_SEARCH_SECONDS = 0.5  # for a part, however late it is
PROCESS_OVERHEAD_SECONDS = 20.0  # that a process may take to begin and to end
FAR_START_SECONDS = 10.0  # the same, until another machine has a processor for it
MAX_RETURNED_CANDIDATES = 32  # of each family from a process, best first; the best of each kind is added

WORKER = "mirage_jax.search"

type Found = tuple[list[Candidate], SearchReport]


@dataclass(frozen=True)
class SubSearch:
    """One search to be run."""

    graph: KernelGraph
    device: DeviceModel
    space: Space
    states: int
    families: Sequence[str]
    seconds: float = MIN_SEARCH_SECONDS
    whole: KernelGraph | None = None  # the region of which the graph is a part
    is_wide: bool = False  # too wide to be exhausted, and other parts cover what it does


@no_collection()  # until the tables of the search are gone
def search_part(part: SubSearch, notify: Notify | None = None) -> Found:
    """Search one part; no candidates if it has no useful normal form."""
    one = Search(
        part.graph, part.device, part.space, part.seconds, part.states, part.families, notify=notify, whole=part.whole
    )
    try:
        return one.run(), one.report
    except UnsupportedError as why:
        one.report.dropped[str(why)] += 1
        return [], one.report


def search_parts(
    parts: Sequence[SubSearch],
    seconds: float,
    workers: int = 1,
    notify: Notify | None = None,
    machines: Sequence[Machine] = (),
) -> list[Found]:
    """Search all parts within `seconds`; each gets its share of the time that is left.

    With other machines, there are `workers` processes here and more there.

    Small parts begin: most are exhausted at once, and leave their time to larger ones. Wide ones take the rest.
    """
    until = time.monotonic() + seconds
    order = sorted(range(len(parts)), key=lambda n: (parts[n].is_wide, len(parts[n].graph.kernels)))
    narrow = sum(not part.is_wide for part in parts)
    places = [None] * workers + [m for m in machines for _ in range(m.parts)]
    processes = _Processes(places)

    def share(place: int) -> SubSearch:
        """A part by its place in the order, with its share of the time that is left when it begins."""
        waiting = (narrow if place < narrow else len(parts)) - place
        rounds = -(-waiting // len(places))
        return replace(parts[order[place]], seconds=max(MIN_SEARCH_SECONDS, (until - time.monotonic()) / rounds))

    def elsewhere(place: int) -> Found:
        """Search a part in a subprocess."""
        return processes.search(share(place))

    if len(places) == 1 or len(parts) <= 1:
        found = [search_part(share(place), notify) for place in range(len(parts))]
    else:
        found = spread(elsewhere, range(len(parts)), len(places), processes.end)
    return [found[order.index(n)] for n in range(len(parts))]


class _Processes:
    """The subprocesses that search, here (None) or on other machines; an interrupt ends all."""

    def __init__(self, places: Sequence[Machine | None] = (None,)) -> None:
        self._places = queue.SimpleQueue[Machine | None]()
        for place in places:
            self._places.put(place)
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def end(self) -> None:
        """Kill all processes, and start no more."""
        self._ended = True
        for process in list(self._running):
            process.kill()

    def search(self, part: SubSearch) -> Found:
        """`search_part` in a process of its own, which needs no accelerator."""
        text = part_to_text(part)
        while (place := self._take()) is not None:
            with suppress(_LostPlace):  # it is not asked again
                return self._found(part, text, place)
        return self._found(part, text, place)

    def _take(self) -> Machine | None:
        """Wait for a place that is free. Those here are never lost, so that there will be one."""
        while not self._ended:
            with suppress(queue.Empty):
                place = self._places.get(timeout=POLL_SECONDS)
                if place is None or place.parts:
                    return place
        raise BrokenPipeError

    def _found(self, part: SubSearch, text: str, place: Machine | None) -> Found:
        try:
            found = found_from_text(self._answer(text, part.seconds + PROCESS_OVERHEAD_SECONDS, place))
        except (OSError, subprocess.SubprocessError, MirageError, KeyError, TypeError, ValueError) as why:
            if self._ended:
                raise
            detail = (
                in_one_line(why) if not (said := getattr(why, "stderr", None)) else printable(said.splitlines()[-1])
            )
            if place is not None and getattr(why, "returncode", None) != ENDED:
                place.leave_out("parts", detail)
                raise _LostPlace from why
            self._places.put(place)
            log.warning("a search process failed, its part is searched here: %s", detail)
            return search_part(part)
        self._places.put(place)
        return found

    def _answer(self, text: str, seconds: float, place: Machine | None) -> str:
        """What a process prints when it is given a line. It ends when its standard input does, as it does with us."""
        own = {"JAX_PLATFORMS": "cpu"}
        environment = children.environment(own)
        command = children.module(WORKER)
        if place is not None:
            code, more = children.running(WORKER), {"processors": 1.0, "seconds": FAR_START_SECONDS}
            command = place.command(code, environment=own, **more)
        # In a session of its own: an interrupt from the keyboard is for this process, which ends the other.
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process:
            self._running.add(process)
            try:
                stdin, process.stdin = process.stdin, None  # which `communicate` would close
                assert stdin is not None
                with stdin:
                    if self._ended:
                        raise BrokenPipeError
                    stdin.write(text + "\n")
                    stdin.flush()
                    out, err = process.communicate(timeout=seconds)
            finally:
                process.kill()
                self._running.discard(process)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command[:1], out, err)
        return out


class _LostPlace(Exception):
    """A machine does not answer any more, or not in time."""


# --- as text


def part_to_text(part: SubSearch) -> str:
    """Write a part as one line of JSON."""
    graphs = {"graph": str(part.graph), "whole": part.whole and str(part.whole)}
    nested = {**graphs, "device": asdict(part.device), "space": asdict(part.space)}
    return json.dumps(_fields(part) | nested)


def _fields(x: SubSearch | SearchReport) -> dict[str, Any]:
    return {f.name: getattr(x, f.name) for f in fields(x)}


def part_from_text(text: str) -> SubSearch:
    """Read a part from a line of JSON."""
    d: dict[str, Any] = json.loads(text)
    d["graph"], d["device"], d["space"] = parse(d["graph"]), DeviceModel(**d["device"]), Space(**d["space"])
    d["whole"] = parse(d["whole"]) if d["whole"] else None
    return SubSearch(**d)


def found_to_text(found: Found) -> str:
    """Write candidates and report as one line of JSON."""
    candidates, report = found
    counts: Counter[object] = Counter()
    rows: list[Any] = []
    for c in candidates:
        its_kind = c.family, kind(c)
        counts.update((c.family, its_kind))
        if counts[c.family] <= MAX_RETURNED_CANDIDATES or counts[its_kind] == 1:
            others = [[kernel_to_json(k) for k in ks] for ks in c.alternatives]
            row = {"graph": str(c.graph), "schedule": schedule_to_json(c.schedule), "alternatives": others}
            rows.append({**row, "seconds": c.seconds, "family": c.family, "single": c.single, "loses": c.loses_digits})
    summary = {**_fields(report), "space": asdict(report.space), "stop": report.stop.value}
    return json.dumps({"candidates": rows, "report": summary})


def found_from_text(text: str) -> Found:
    """Read candidates and report from a line of JSON. Raises `KeyError`, `TypeError` or `ValueError` for other text."""
    d: dict[str, Any] = json.loads(text)
    candidates = [
        Candidate(
            parse(c["graph"]),
            schedule_from_json(c["schedule"]),
            float(c["seconds"]),
            str(c["family"]),
            tuple(tuple(map(kernel_from_json, ks)) for ks in c["alternatives"]),
            tuple(c["single"]),
            bool(c["loses"]),
        )
        for c in d["candidates"]
    ]
    r: dict[str, Any] = d["report"]
    for name in ("dropped", "pruned", "fired"):
        r[name] = Counter[str](r[name])
    r["space"], r["stop"] = Space(**r["space"]), StopReason(r["stop"])
    return candidates, SearchReport(**r)
