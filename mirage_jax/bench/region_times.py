"""Device time of each region in a whole step, under XLA and optimized, from one profile of each.

Both programs are lowered with the regions' names around their code. XLA writes these names into its instructions, and a
profile names the instruction of each event. A fusion counts for the region of its last operation. On a GPU both run
without command buffers (CUDA graphs), within which a profile does not tell one instruction from another.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
from jax.profiler import ProfileData

from mirage_jax.api import Optimized
from mirage_jax.bench.tables import Cells, TableReport
from mirage_jax.compiler import Compiler
from mirage_jax.compiler.inputs import one_set
from mirage_jax.compiler.whole_function import not_measured
from mirage_jax.compiler.winner import Winner
from mirage_jax.gpu_lock import gpu_lock
from mirage_jax.jaxpr_frontend.capture.call_primitive import capture
from mirage_jax.jaxpr_frontend.capture.lowering import AsWritten, CompiledRegion, WholeProgram
from mirage_jax.jaxpr_frontend.jax_compat import LoweringTarget
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.report import WholeFunction, places
from mirage_jax.timing import Event, is_stream

type Times = defaultdict[str, float]  # seconds by a region's name; the empty name is for all other operations

STEPS = 10  # calls in a profile
XLA, OURS = "xla", "mirage"  # names of the two profiles
ELSEWHERE, XLAS_CODE = "other operations", "XLA's code"
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
ALONE_ROUNDS = 3
UNNAMED = "the profile of this device names no operations: each region was timed alone"

_SCOPE = re.compile(r"mirage_\w+_[0-9a-f]{6}(?=/|$)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class RegionTime:
    """Seconds of device time in a step."""

    region: str  # its source lines
    scope: str  # its name in profiles
    runs_as: str
    xla: float
    ours: float


@dataclass
class RegionTimes(TableReport):
    """The times of all regions of a function."""

    words: ClassVar[int] = 3

    function: str
    device: str
    whole: str  # what runs as a whole, and why
    method: str = f"device time of a step in microseconds, mean of {STEPS}; names as in the profiles"
    times: list[RegionTime] = field(default_factory=list)
    note: str = ""

    @property
    def title(self) -> str:
        """The heading of the table."""
        return f"{self.function} on {self.device}"

    def cells(self) -> Cells:
        """A row for each region, one for all other operations, and their sum."""
        xla, ours = (sum(getattr(t, name) for t in self.times) for name in ("xla", "ours"))
        rows = [*self.times, RegionTime("all", "", "", xla, ours)]
        cells = [[t.region, t.scope, t.runs_as, *_numbers(t.xla, t.ours)] for t in rows]
        return ("region", "name", "runs as", "XLA", "ours", "ratio"), cells


def _numbers(xla: float, ours: float) -> tuple[str, str, str]:
    return f"{xla * 1e6:,.1f}", f"{ours * 1e6:,.1f}", f"{xla / ours:.2f}x" if xla and ours else "-"


class _Named(Compiler):
    """Runs the winners that are known, or none, and gives every region a name."""

    def __init__(self, known: Compiler, with_winners: bool) -> None:
        super().__init__(replace(known.options, on_miss="fallback"))
        self.decisions = dict(known.decisions)
        self.with_winners = with_winners
        self.seen: dict[str, tuple[Region, Winner | None]] = {}  # by name

    def prepare(self, regions: Sequence[Region], target: LoweringTarget, again: bool = False) -> None:
        """Decide nothing."""

    def compile_region(self, region: Region, platforms: tuple[str, ...]) -> CompiledRegion | None:  # type: ignore[override]
        """The winner, or the equations as they are."""
        winner = super().compile_region(region, platforms) if self.with_winners else None
        self.seen[region.scope] = region, winner
        return winner or AsWritten()

    def choose(self, whole: WholeProgram) -> WholeFunction:
        """Take the first variant."""
        return not_measured(whole, "its regions are timed")


def region_times(f: Optimized, arguments: Sequence[Any], folder: Path) -> RegionTimes:
    """Profile a step of a function under XLA and with its winners.

    Args:
        f: the function; its regions are decided first, as by a call.
        arguments: `jax.ShapeDtypeStruct`s. Floats are normal numbers, integers 0.
        folder: gets the profiles, in ``xla`` and ``mirage``.
    """
    report = f.explain(*arguments)
    compilers = {label: _Named(f.compiler, label == OURS) for label in (XLA, OURS)}
    inputs = one_set(tuple(arguments), 0)
    steps = {label: _Step.of(f, compiler, inputs) for label, compiler in compilers.items()}
    found = {label: step.profiled(folder / label) for label, step in steps.items()}
    result = RegionTimes(f.name, jax.devices()[0].device_kind, str(report.whole or ""))
    seen = compilers[OURS].seen
    named = all(found.values())
    if not named:
        result.note, result.method = UNNAMED, "time of each region alone in microseconds"
        found = _alone(f.compiler, seen)
    for scope, (region, winner) in seen.items():
        runs_as = XLAS_CODE if winner is None else str(winner.family)
        times = (found[label][scope] for label in (XLA, OURS))
        result.times.append(RegionTime(", ".join(places(region.where)), scope, runs_as, *times))
    if named:
        result.times.append(RegionTime(ELSEWHERE, "", XLAS_CODE, *(found[label][""] for label in (XLA, OURS))))
    return result


def _alone(compiler: Compiler, seen: Mapping[str, tuple[Region, Winner | None]]) -> dict[str, Times]:
    """Seconds of each region by itself, by name, under XLA and as it runs."""
    found: dict[str, Times] = {XLA: defaultdict(float), OURS: defaultdict(float)}
    device = jax.local_devices()[0]
    for scope, (region, winner) in seen.items():
        session = compiler.session(region, _platform(), [device])
        functions = {XLA: session.xla} | ({} if winner is None else {OURS: session.ours(winner)})
        times = session.timings(functions, ALONE_ROUNDS)
        for label in times:
            found[label][scope] = times[label].seconds
        if winner is None:
            found[OURS][scope] = found[XLA][scope]
    return found


def _platform() -> str:
    """Name the platform as compilers of regions do."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


@dataclass(frozen=True)
class _Step:
    """A compiled program on its inputs."""

    compiled: Any
    inputs: Sequence[jax.Array]

    @classmethod
    def of(cls, f: Optimized, compiler: Compiler, inputs: Sequence[jax.Array]) -> _Step:
        """Compile a function with the decisions of a compiler."""
        captured = capture(f.__wrapped__, compiler, is_differentiated=False)
        options = NO_GRAPHS if _platform() == "cuda" else None
        return cls(jax.jit(captured).lower(*inputs).compile(options), inputs)

    def run(self) -> None:
        """Run to the end."""
        jax.block_until_ready(self.compiled(*self.inputs))

    def profiled(self, folder: Path) -> Times:
        """Profile some steps; seconds of one by region, empty if the profile names no operation of the program."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        self.run()
        with gpu_lock(), jax.profiler.trace(str(folder), profiler_options=options):
            for _ in range(STEPS):
                self.run()
        scopes = scopes_of(self.compiled.as_text())
        files = sorted(folder.rglob("*.xplane.pb"))
        times: Times = defaultdict(float)
        found = list(operations(ProfileData.from_file(str(files[-1])))) if files else []
        if any(name in scopes for name, _ in found):
            for name, seconds in found:
                times[scopes.get(name, "")] += seconds / STEPS
        return times


def scopes_of(hlo: str) -> dict[str, str]:
    """Map each instruction of a compiled program to the name of its region, or to an empty text.

    XLA leaves some instructions without a name. These have the most frequent one of the computation that they call, or
    else the name of the instruction that reads their result.
    """
    found: dict[str, str] = {}
    inside: dict[str, Counter[str]] = defaultdict(Counter)
    readers: dict[str, str] = {}
    unnamed: list[tuple[str, str]] = []  # instructions, and the computations that they call
    computation = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif instruction := _INSTRUCTION.match(line):
            name = instruction[1]
            found[name] = _scope(line)
            inside[computation].update([found[name]] if found[name] else [])
            for operand in _OPERAND.findall(line, instruction.end()):
                readers.setdefault(operand, name)
            if not _OP_NAME.search(line):
                unnamed.append((name, calls[1] if (calls := _CALLED.search(line)) else ""))
    for name, called in reversed(unnamed):  # readers come after
        found[name] = _most_frequent(inside[called]) or found.get(readers.get(name, ""), "")
    return found


def _scope(line: str) -> str:
    path = _OP_NAME.search(line)
    names = _SCOPE.findall(path[1]) if path else []
    return names[-1] if names else ""


def _most_frequent(names: Counter[str]) -> str:
    return names.most_common(1)[0][0] if names else ""


def operations(data: Any) -> Iterator[tuple[str, float]]:
    """The instructions in a profile, each with its seconds, without the seconds of those that it runs.

    What a GPU runs without the name of an instruction has an empty name: it takes time all the same.
    """
    planes = list(data.planes)
    of_devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in of_devices or planes:  # a CPU is no device of a profile
        for line in plane.lines:
            yield from own_times(_named_events(line, unnamed=is_stream(plane, line)))


def _named_events(line: Any, unnamed: bool) -> list[Event]:
    """Events that name an instruction, or all; of nested ones the innermost, which comes last."""
    with warnings.catch_warnings(action="ignore"):  # JAX's, about a type of its own
        named = [(event, dict(event.stats).get("hlo_op")) for event in line.events]
    return [
        (e.start_ns, e.start_ns + e.duration_ns, str(op or "").rpartition("/")[2])
        for e, op in named
        if unnamed or op is not None
    ]


def own_times(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Give each event's name and its seconds, without the seconds of events within it.

    A kernel may start a little before the one ahead of it has ended. What they share counts for the later one.
    """
    open_events: list[list[Any]] = []
    for start, end, name in sorted(events, key=lambda e: (e[0], -e[1])):
        while open_events and open_events[-1][1] <= start:
            _, _, closed, own = open_events.pop()
            yield closed, own * 1e-9
        if open_events:
            open_events[-1][3] -= min(end, open_events[-1][1]) - start
        open_events.append([start, end, name, end - start])
    yield from ((name, own * 1e-9) for _, _, name, own in open_events)
