"""Tries variants in child processes, so that a kernel that faults or hangs does no harm to the user's.

An illegal access poisons the CUDA context of its process for good.

A `Session` keeps one child (`compiler.isolation.child`, started afresh: the user's script is not run again) for as long
as regions are tuned. It gets muGraphs and schedules as text, builds the programs, runs and times each, and announces
each step. If it dies, or is silent for too long, the variant at hand is dropped and counted, and a new child goes on
with the rest. Each device has several children, which share the variants: they compile at the same time (threads would
wait for each other in Python), and take turns on the device (`gpu_lock`).

Messages are JSON, one to a line. To the child: {"variants": [..], "threads": n, "seconds": s}. From it: {"ready":
device kind}, {"compiling": i}, {"compiled": i}, {"waiting": true} (for its turn), {"running": i}, {"timing": [i,
..]}, {"timed": i, ..}, {"failed": i, "why": ..}, {"late": i}, {"done": n}. A request with one thread is one for a
time: its variants are timed alone, too. After so many seconds the child compiles no more; without "seconds" it compiles
all.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

import jax

from mirage_jax import children, timing
from mirage_jax.errors import TrialError, is_out_of_memory
from mirage_jax.gpu_lock import visible_name
from mirage_jax.hardware.host import processors
from mirage_jax.interruptible import spread
from mirage_jax.lower.runtime import kernel_cache

log = logging.getLogger("mirage_jax.timing")

type Variant = Mapping[str, Any]  # a value of JSON that says what to run
type Outcome = timing.Timing | TrialFailure
type Notify = Callable[[int, Outcome], None]  # takes the number of a variant
type Doomed = Callable[[int], TrialFailure | None]  # the same

WORKER = "mirage_jax.compiler.isolation.child"
BATCH_VARIANTS = (
    32  # variants that are compiled before they are run: a crash costs the others at most their compilation
)
COMPILE_THREADS = 2  # that compile in a child: more would wait for each other in Python
MAX_CHILDREN_PER_DEVICE = 8  # of a device at most
BATCHES_PER_CHILD = 3  # of the variants for each child: who is done with one takes another one
POLL_SECONDS = 0.1  # seconds of waiting at a time: an interrupt is noticed in between


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds without a word after which a child is taken to hang, by what it is doing, and how often one may die."""

    start: float = 180.0
    compile: float = 120.0
    run: float = 60.0
    deaths: int = 12


@dataclass(frozen=True, slots=True)
class TrialFailure:
    """Why a variant has no time. `kind` is what the report counts."""

    kind: str  # "not compiled" | "failed to run" | "crashed" | "hung" | "not tried", or that of one below
    why: str

    @property
    def wants_memory(self) -> bool:
        """Whether there was no room on the device, which the parent may have taken for itself."""
        return is_out_of_memory(self.why)


LATE = TrialFailure("left for lack of time", "the budget is spent")
SLOW = TrialFailure("expected to be slow", "as other variants of its muGraph are")


@dataclass
class Session:
    """A child process, and another one whenever it dies."""

    command: Sequence[str] = field(default_factory=lambda: children.module(WORKER))
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: Patience = Patience()
    kind: str | None = None  # of the device that the child must have
    _child: _Child | None = field(default=None, repr=False)
    _deaths: int = 0
    _closed: bool = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def harmed(self) -> bool:
        """Whether a child has died, or the last one was ended."""
        return self._closed or self._deaths > 0

    def close(self) -> None:
        """End the child; there will be no other."""
        self._closed = True
        if self._child is not None:
            self._child.kill()

    def times(
        self, variants: Sequence[Variant], notify: Notify = lambda *_: None, until: float = math.inf
    ) -> list[Outcome]:
        """The time of each variant, or why it has none. Raises `TrialError` if no child can be made to work.

        From `until` on (`time.monotonic`) the child compiles only the first of each batch.
        """
        found: dict[int, Outcome] = {}
        for first in range(0, len(variants), BATCH_VARIANTS):
            self._batch(variants, range(first, min(first + BATCH_VARIANTS, len(variants))), found, notify, until)
        return [found[i] for i in range(len(variants))]

    def _batch(
        self,
        variants: Sequence[Variant],
        numbers: Sequence[int],
        found: dict[int, Outcome],
        notify: Notify,
        until: float,
    ) -> None:
        """Try until each has a result. Every turn gives one to at least one, or narrows the suspects to one."""
        threads = COMPILE_THREADS
        while left := [i for i in numbers if i not in found]:
            if self._deaths > self.patience.deaths:
                found.update(dict.fromkeys(left, TrialFailure("not tried", "too many variants crashed before")))
                return
            turn = _Turn(left, notify)
            try:
                child = self._ready()
                seconds = {} if until == math.inf else {"seconds": until - time.monotonic()}
                child.send({"variants": [variants[i] for i in left], "threads": threads, **seconds})
                turn.listen(child, self.patience)
            except _Died as death:
                self._deaths += 1
                self._start()
                if (guilty := turn.guilty) is not None:
                    found[guilty] = TrialFailure(death.kind, why := f"{death} while {turn.doing(guilty)}")
                    notify(guilty, found[guilty])
                    log.info("variant dropped: the process that tried it %s", why)
                elif not turn.found and threads == 1:
                    raise TrialError(f"the process that tries variants {death}") from None
                else:  # it ended between two of them, or compiling several: one by one it is clear which one it is
                    threads = COMPILE_THREADS if turn.found and not turn.compiling else 1
            found.update(turn.found)

    def _ready(self) -> _Child:
        """The child, when it has started."""
        if self._child is None:
            self._start()
        assert self._child is not None
        if not self._child.ready:
            try:
                message = self._child.receive(self.patience.start)
            except _Died as death:
                raise TrialError(f"no process can be started that tries variants: it {death}") from None
            if "ready" not in message or self.kind not in (None, message["ready"]):
                raise TrialError(f"the process that tries variants has {message}, wanted is a {self.kind}")
            self._child.ready = True
        return self._child

    def _start(self) -> None:
        if self._closed:
            raise TrialError("the trials were ended")
        if self._child is not None:
            self._child.kill()
        try:
            self._child = _Child(self.command, self.environment)
        except OSError as why:
            raise TrialError(f"no process can be started that tries variants: {why}") from None


@dataclass
class Trials:
    """Sessions on several devices of a kind, which share the variants; one of each device, then another one of each."""

    sessions: Sequence[Session]
    devices: int = 1
    lanes: int = 1  # so many such sets of children share the devices

    def with_room(self, needed: float, free: float) -> Trials:
        """As many of each device, but one at least, as find room if each needs so many bytes of those that are free."""
        most = self.devices * max(1, int(free // (needed * self.lanes)))
        return self if most >= len(self.sessions) else replace(self, sessions=self.sessions[:most])

    @property
    def unharmed(self) -> bool:
        """Whether all children are those that were started first."""
        return not any(s.harmed for s in self.sessions)

    def times(
        self,
        variants: Sequence[Variant],
        notify: Notify = lambda *_: None,
        until: float = math.inf,
        doomed: Doomed = lambda _: None,
    ) -> list[Outcome]:
        """As `Session.times`; from `until` on children begin no more, unless none has a result.

        `doomed` is the failure of a variant that need not be tried, as others have shown meanwhile.
        """
        # Neighbours, which have kernels in common, go to the same child: it compiles these once. Not too many of them:
        # some take the assembler a hundred times as long as others, and while one child compiles another one measures.
        count = max(1, min(len(variants), BATCHES_PER_CHILD * len(self.sessions)))
        todo = queue.SimpleQueue[range]()
        for pair in pairwise(n * len(variants) // count for n in range(count + 1)):
            todo.put(range(*pair))
        found: dict[int, Outcome] = {}

        def work(session: Session) -> None:
            while True:
                try:
                    share = todo.get_nowait()
                except queue.Empty:
                    return
                if found and time.monotonic() > until:
                    found.update(dict.fromkeys(share, LATE))
                    continue
                found.update(_tried(session, variants, share, notify, until, doomed))

        def close() -> None:
            for s in self.sessions:
                s.close()

        spread(work, self.sessions, len(self.sessions), close)  # an exception ends all
        return [found[i] for i in range(len(variants))]


def _tried(
    session: Session,
    variants: Sequence[Variant],
    share: Sequence[int],
    notify: Notify,
    until: float,
    doomed: Doomed,
) -> dict[int, Outcome]:
    """What becomes of some of the variants, by number."""
    known: dict[int, Outcome] = {i: failure for i in share if (failure := doomed(i)) is not None}
    for i, failure in known.items():
        notify(i, failure)
    left = [i for i in share if i not in known]
    outcomes = session.times([variants[i] for i in left], lambda n, outcome: notify(left[n], outcome), until)
    return known | dict(zip(left, outcomes, strict=True))


@contextmanager
def trials(devices: Sequence[Any], lanes: int = 1) -> Iterator[Trials | None]:
    """Children on these GPUs, which start while the caller does something else; None where there is no GPU: what XLA
    compiles for a CPU is timed where it will run. `lanes`: so many callers have children of their own.
    """
    if not devices or devices[0].platform != "gpu" or not sys.executable:
        yield None
        return
    with ExitStack() as stack:
        try:
            command = children.module(WORKER, *stack.enter_context(kernel_cache.lent_folder()))
            on_each = min(MAX_CHILDREN_PER_DEVICE, processors() // (COMPILE_THREADS * len(devices))) // lanes
            sessions = [
                stack.enter_context(Session(command, environment(d), kind=d.device_kind))
                for _ in range(max(1, on_each))
                for d in devices
            ]
        except TrialError as why:
            log.warning("variants are tried in this process: %s", why)
            yield None
            return
        yield Trials(sessions, len(devices), lanes)


type Lend = Callable[[], AbstractContextManager[Trials | None]]


@contextmanager
def shared(devices: Sequence[Any], lanes: int = 1) -> Iterator[Lend]:
    """Lend children on these GPUs to regions: those that another region gave back, if all are alive; else new
    ones, which start in seconds.
    """
    with ExitStack() as stack:
        idle: list[tuple[Trials | None, ExitStack]] = []

        @contextmanager
        def lend() -> Iterator[Trials | None]:
            try:
                found, own = idle.pop()
            except IndexError:
                own = stack.enter_context(ExitStack())
                found = own.enter_context(trials(devices, lanes))
            yield found
            if found is None or found.unharmed:
                idle.append((found, own))
            else:
                own.close()

        yield lend


def environment(device: Any) -> dict[str, str]:
    """What a child needs to see this device alone, to take no more of its memory than it uses, and to compute as its
    parent does.
    """
    precision = jax.config.jax_default_matmul_precision
    return {
        "CUDA_VISIBLE_DEVICES": visible_name(device),
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_ENABLE_X64": str(jax.config.jax_enable_x64),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **({"JAX_DEFAULT_MATMUL_PRECISION": str(precision)} if precision else {}),
    }


@dataclass
class _Turn:
    """One request to a child, with the outcome of each variant so far."""

    numbers: Sequence[int]
    notify: Notify
    found: dict[int, Outcome] = field(default_factory=dict)
    compiling: set[int] = field(default_factory=set)
    running: int | None = None

    def listen(self, child: _Child, patience: Patience) -> None:
        """Follow the messages of the child until the request is done."""
        while True:
            seconds = patience.compile if self.running is None else patience.run
            match child.receive(seconds):
                case {"compiling": n}:
                    self.compiling.add(self.numbers[n])
                case {"waiting": _}:  # others have the device: that may take longer than anything else
                    pass
                case {"compiled": n}:
                    self.compiling.discard(self.numbers[n])
                case {"running": n}:
                    self.running = self.numbers[n]
                case {"timing": several}:
                    self.running = self.numbers[several[0]] if len(several) == 1 else None
                case {"timed": n, "samples": samples, "launches": launches}:
                    self._settle(self.numbers[n], timing.Timing(tuple(samples), launches))
                case {"failed": n, "why": why}:
                    kind = "failed to run" if self.running == self.numbers[n] else "not compiled"
                    self._settle(self.numbers[n], TrialFailure(kind, str(why)))
                case {"late": n}:
                    self.found[self.numbers[n]] = LATE
                case {"done": _}:
                    return
                case other:
                    raise TrialError(f"the process that tries variants said {other}")

    def _settle(self, number: int, outcome: Outcome) -> None:
        self.found[number] = outcome
        self.compiling.discard(number)
        self.running = None
        self.notify(number, outcome)

    @property
    def guilty(self) -> int | None:
        """What it was at, if that was one thing."""
        if self.running is not None:
            return self.running
        return next(iter(self.compiling)) if len(self.compiling) == 1 else None

    def doing(self, n: int) -> str:
        """Say what the child did with a variant."""
        return "running" if n == self.running else "compiling"


class _Died(Exception):
    """A child has ended or says nothing any more."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class _Child:
    """A process and the lines that it writes."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.ready = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by kill)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=children.environment(environment),
            start_new_session=True,  # an interrupt from the keyboard is for the parent, which ends the child
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._death() from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for one message, for at most so many seconds."""
        line, until = None, time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                if time.monotonic() > until:
                    raise _Died("hung", f"said nothing for {seconds:g} s") from None
        if line is None:
            raise self._death()
        try:
            return json.loads(line)
        except ValueError:
            raise TrialError(f"the process that tries variants wrote {line[:80]!r}") from None

    def _death(self) -> _Died:
        code = self._process.wait()
        last = self.last_words
        return _Died("crashed", f"ended with code {code}" + (f" ({last})" if last else ""))

    @property
    def last_words(self) -> str:
        """The last line that it wrote to standard error."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4096))
        return (self._errors.read().decode(errors="replace").strip().splitlines() or [""])[-1][:200]

    def kill(self) -> None:
        """End the process, whatever it is doing; may be called twice."""
        if self._process.poll() is None:  # else its number may be another's by now
            with suppress(OSError):  # with what it has started, the assembler say
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdin is not None:
            with suppress(OSError):  # nobody reads the rest
                self._process.stdin.close()
        self._errors.close()
