"""Measures how long a program takes, and how certain the result is.

On a GPU, *device time*: a compiled program runs on several distinct sets of inputs (`in_turn`), so that weights come
from memory and not from the cache. All runs are profiled. The time of one is (end of its last kernel - start of its
first) on the GPU's stream lines. Wall-clock time would measure the host there. On other devices, the wall-clock time of
a call, several calls to a sample where one is short.

Candidates are always timed in one process and interleaved, forwards then backwards (ABBA), so that drift of the machine
affects all equally. Ratios are formed within a round; their interval comes from the spread of the rounds. A round is
one profile, because starting one takes a tenth of a second. A `_Separator` runs before each call.
"""

from __future__ import annotations

import functools
import glob
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.profiler import ProfileData

from mirage_jax.gpu_lock import gpu_lock
from mirage_jax.hardware.gpus import COLD_BYTES

type Call = Callable[[], object]  # runs something to its end

MAX_SETS = 24
ONCE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}  # XLA's options for code that runs once
MAX_PROFILES = 3  # of one call: now and then a profile has lost all kernels
DELAY_SHAPE = 1 << 22, 1 << 12  # numbers that a `_Separator` counts: 4.4 milliseconds on an H100
SAMPLE_SECONDS = 5e-3  # the least length of one wall-clock sample


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one program, in seconds, one per sample in the order in which they were taken."""

    samples: tuple[float, ...]
    launches: float | None = None  # device kernels per program, where the device tells

    @property
    def seconds(self) -> float:
        """Median of the samples, in seconds."""
        return statistics.median(self.samples)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the median, in seconds."""
        return median_interval(self.samples)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster than a baseline: the median over rounds, and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the true median with 95% confidence, from order statistics (whatever the distribution).

    With fewer than six samples no such interval exists, and the extremes are returned.
    """
    ordered, n = sorted(samples), len(samples)
    if n < 6:
        return ordered[0], ordered[-1]
    tail, k = 0.5**n, 0  # tail = P(Binomial(n, 1/2) <= k)
    while 2 * (grown := tail + math.comb(n, k + 1) * 0.5**n) <= 0.05:
        tail, k = grown, k + 1
    return ordered[k], ordered[n - 1 - k]


def ratio(baseline: Timing, ours: Timing) -> Ratio:
    """Speed-up of `ours` over `baseline`, sample by sample: both were taken in the same rounds."""
    ratios = [b / o for b, o in zip(baseline.samples, ours.samples, strict=True)]
    return Ratio(statistics.median(ratios), *median_interval(ratios))


def sets_for(bytes_per_program: int) -> int:
    """How many input sets a chain needs to be well above the level-2 cache."""
    return max(2, min(MAX_SETS, math.ceil(COLD_BYTES / bytes_per_program)))


def in_turn(compiled: Callable[..., Any], sets: Sequence[Sequence[jax.Array]]) -> Call:
    """A call that runs a compiled function on each set of arguments, one after the other: in as many steps."""
    return lambda: jax.block_until_ready([compiled(*args) for args in sets])


def wall(call: Call, repeats: int = 1) -> float:
    """Measure the seconds of one call, as the mean over repeats."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _rounds[T](
    labels: Iterable[str], rounds: int, measure: Callable[[list[str]], Sequence[T]]
) -> dict[str, list[tuple[T, T]]]:
    """Per label and round, the measurements of the way there and of the way back; `measure` takes both ways."""
    labels = list(labels)
    out: dict[str, list[tuple[T, T]]] = {label: [] for label in labels}
    for _ in range(rounds):
        found = measure([*labels, *reversed(labels)])
        for label, there, back in zip(labels, found, reversed(found), strict=False):
            out[label].append((there, back))
    return out


def time_wall(calls: Mapping[str, Call], rounds: int = 10, sample_seconds: float = SAMPLE_SECONDS) -> dict[str, Timing]:
    """Wall-clock time per call. Every call must wait for its result; each is made once before, to compile."""
    for call in calls.values():
        call()
    repeats = {label: max(1, round(sample_seconds / max(wall(call), 1e-9))) for label, call in calls.items()}
    found = _rounds(calls, rounds, lambda order: [wall(calls[label], repeats[label]) for label in order])
    return {label: Timing(tuple((a + b) / 2 for a, b in pairs)) for label, pairs in found.items()}


@dataclass(frozen=True, slots=True)
class TraceInterval:
    """What one call did on the device."""

    seconds: float
    kernels: int | None  # None where nobody counted them
    names: tuple[str, ...]


_STREAM = re.compile(r"^Stream #\d+")
_TRANSFER = re.compile(r"^Memcpy(H2D|D2H|H2H)|^MemcpyHtoD|^MemcpyDtoH")


type Event = tuple[float, float, str]  # when a kernel starts and ends, in nanoseconds, and its name


def is_stream(plane: Any, line: Any) -> bool:
    """Whether a line of a profile has what a stream of a GPU runs, and nothing else."""
    return plane.name.startswith("/device:GPU:") and bool(_STREAM.match(line.name or ""))


def kernels_of(data: Any) -> list[Event]:
    """The kernels of a `ProfileData` in order, on the first GPU that has any."""
    for plane in data.planes:
        events = [
            (event.start_ns, event.start_ns + event.duration_ns, event.name)
            for line in plane.lines
            if is_stream(plane, line)
            for event in line.events
            if not _TRANSFER.match(event.name)
        ]
        if events:
            return sorted(events)
    return []


def span_of(events: Sequence[Event], steps: int = 1) -> TraceInterval:
    """From the first kernel's start to the last one's end.

    steps: calls of one program in a row. Of these it is the median times their number, without what the device waits
    for the host: between two steps, where a short one with many arguments is dispatched more slowly than it runs, and
    inside of some, where the host falls behind.
    """
    size = len(events) // steps if len(events) % steps == 0 else len(events)
    each = [events[i : i + size] for i in range(0, len(events), size)]
    nanoseconds = statistics.median(max(end for _, end, _ in step) - step[0][0] for step in each)
    return TraceInterval(nanoseconds * len(each) * 1e-9, len(events), tuple(name for *_, name in events))


def split(events: Sequence[Event], separator: str) -> list[list[Event]]:
    """What follows each kernel of this name, up to the next one."""
    found: list[list[Event]] = []
    for event in events:
        if event[2] == separator:
            found.append([])
        elif found:
            found[-1].append(event)
    return found


def _profiled(call: Call) -> list[Event]:
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # what the host does is not asked for, and takes time
    with tempfile.TemporaryDirectory(prefix="mirage_jax") as folder:
        with gpu_lock(), jax.profiler.trace(folder, profiler_options=options):
            call()
        files = glob.glob(os.path.join(glob.escape(folder), "**", "*.xplane.pb"), recursive=True)
        return kernels_of(ProfileData.from_file(files[0])) if files else []


def profile(call: Call, steps: int = 1) -> TraceInterval:
    """Device time of one call, which must be compiled already; of its `steps`, if it is of several."""
    events = next(filter(None, (_profiled(call) for _ in range(MAX_PROFILES))), None)
    if events is None:
        raise RuntimeError("the profile of a call shows no kernel on a GPU")
    return span_of(events, steps)


def profile_each(calls: Sequence[Call], steps: int | Sequence[int] = 1) -> list[TraceInterval]:
    """Device time of each call, as `profile`, but of all in one profile, and none waits for the host. `steps`: of all
    calls, or of each.
    """
    each = [steps] * len(calls) if isinstance(steps, int) else steps
    if (separator := _separator()) is not None:

        def run() -> None:
            for call in calls:
                separator()
                call()

        pieces = separator.calls(_profiled(run))
        if len(pieces) == len(calls) and all(pieces):
            return [span_of(piece, n) for piece, n in zip(pieces, each, strict=True)]
    return [profile(call, n) for call, n in zip(calls, each, strict=True)]  # which kernel is whose cannot be told


@dataclass(frozen=True)
class _Separator:
    """Runs before each call of a profile: a kernel by which calls are told apart, then a long one, then the first.

    While the long one runs, the host starts the kernels of the call, so that these follow each other as fast as the
    device can. Else a call of many short kernels is as slow as the host starts them, and under a profiler that is far
    slower than without one.
    """

    mark: Call
    delay: Call
    kernel: str  # what `mark` runs

    def __call__(self) -> None:
        for run in (self.mark, self.delay, self.mark):
            run()

    def calls(self, events: Sequence[Event]) -> list[list[Event]]:
        """The kernels of each call; none where a mark is missing, which profiles lose now and then."""
        pieces = split(events, self.kernel)
        return pieces[1::2] if len(pieces) % 2 == 0 else []


def _separator() -> _Separator | None:
    """What separates calls on JAX's default device; None if its mark is not one kernel there."""
    return _separator_on(jax.config.jax_default_device)


@functools.cache
def _separator_on(default: Any) -> _Separator | None:
    x = jax.jit(lambda: lax.iota(np.int32, 8))()
    mark = jax.jit(lax.clz).lower(x).compile()  # no region counts leading zeros
    delay = jax.jit(_slow).lower(x).compile()
    jax.block_until_ready((mark(x), delay(x)))
    events = _profiled(lambda: jax.block_until_ready(mark(x)))
    return _Separator(lambda: mark(x), lambda: delay(x), events[0][2]) if len(events) == 1 else None


def _slow(x: jax.Array) -> jax.Array:
    """Take milliseconds and hardly any memory: one kernel that counts what it need not read."""
    i, j = (lax.broadcasted_iota(np.int32, DELAY_SHAPE, axis) for axis in (0, 1))
    return lax.reduce(lax.clz(i * (1 << 16) + j * 31 + x[0]), np.int32(0), lax.add, (1,))


def spans_of(calls: Sequence[Call], steps: int = 1) -> list[TraceInterval]:
    """Device time of calls: their own `span`, where one times itself, else from a profile of those between."""
    found: list[TraceInterval] = []
    with gpu_lock():
        for times_itself, group in groupby(calls, lambda call: hasattr(call, "span")):
            several: list[Any] = list(group)
            found += [call.span() for call in several] if times_itself else profile_each(several, steps)
    return found


def time_steps(
    calls: Mapping[str, Call],
    steps: int,
    rounds: int,
    measure: Callable[[Sequence[Call], int], list[TraceInterval]] = spans_of,
) -> dict[str, Timing]:
    """Device time per step of calls that each make so many, one after the other, as `in_turn` does."""
    for call in calls.values():
        call()
        call()
    found = _rounds(calls, rounds, lambda order: measure([calls[label] for label in order], steps))
    return {label: _of_pairs(pairs, steps) for label, pairs in found.items()}


def time_once(
    calls: Sequence[Call],
    sets: Sequence[int],
    measure: Callable[[Sequence[Call], Sequence[int]], list[TraceInterval]] = profile_each,
) -> list[Timing]:
    """One sample of device time per program for each call, the mean of two, in one profile: to choose from many
    programs those few that are timed better. The calls must have been made before. Each has its own number of sets:
    programs that read parts of larger operands in place are given other arrays than those that do not.
    """
    twice = [(call, n) for call, n in zip(calls, sets, strict=True) for _ in range(2)]
    spans = measure([call for call, _ in twice], [n for _, n in twice])
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return [_of_pairs([pair], n) for pair, n in zip(pairs, sets, strict=True)]


def _of_pairs(pairs: Sequence[tuple[TraceInterval, TraceInterval]], sets: int) -> Timing:
    """Device time per program: each sample is the mean of two calls that each run `sets` programs."""
    return Timing(tuple((a.seconds + b.seconds) / 2 / sets for a, b in pairs), _launches([a for a, _ in pairs], sets))


def _launches(spans: Sequence[TraceInterval], sets: int) -> float | None:
    counted = [s.kernels for s in spans if s.kernels is not None]
    return statistics.median(counted) / sets if counted else None
