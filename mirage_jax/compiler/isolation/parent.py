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

The child may run on another machine (`cluster`). One that is lost there says nothing about the variant at hand, which
is tried again: by another child of that machine, or elsewhere if there can be none. Only a variant at which two are
lost is dropped.
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
from itertools import pairwise, zip_longest
from typing import Any, Self

import jax

from mirage_jax import children, timing
from mirage_jax.cluster import ENDED, Machine
from mirage_jax.errors import TrialError, is_out_of_memory, without_kind
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
MAX_FAR_CHILDREN_PER_DEVICE = 4  # of a device of another machine: each has a relay here, a Python with Ray
MAX_RELAYS = 64  # if that is possible: each device has one child
BATCHES_PER_CHILD = 3  # of the variants for each child: who is done with one takes another one
MAX_LOSSES = 3  # of children on another machine, after which it gets no more
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
    machine: Machine | None = None  # where the child runs, if not here
    _child: _Child | None = field(default=None, repr=False)
    _deaths: int = 0
    _losses: int = 0  # of children that were lost with the machine that they ran on
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

    @property
    def is_open(self) -> bool:
        """Whether it can be asked; where a machine is lost, others are asked instead."""
        return self.machine is None or not self._closed

    @property
    def has_spoken(self) -> bool:
        """Whether the child has started, or ended."""
        return self._child is not None and (self._child.ready or self._child.has_spoken)

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
        threads, lost_at = COMPILE_THREADS, set[int]()
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
            except _Lost as loss:
                self._lose(loss, turn, lost_at)
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

    def _lose(self, loss: _Lost, turn: _Turn, lost_at: set[int]) -> None:
        """Start another child on the machine, unless too many were lost there. `lost_at`: the variants at hand then."""
        if (guilty := turn.guilty) is not None and guilty in lost_at:
            turn.settle(guilty, TrialFailure("crashed", f"two processes were lost at it: {loss}"))
        elif guilty is not None:
            lost_at.add(guilty)
        self._losses += 1
        if self._losses > MAX_LOSSES:
            raise TrialError(f"the process that tries variants there was lost again: {loss}") from None
        log.info("a process that tries variants was lost, and is started again: %s", loss)
        self._start()

    def begin(self) -> None:
        """Wait for the child to start. Raises `TrialError` if it does not."""
        self._ready()

    def _ready(self) -> _Child:
        """The child, when it has started."""
        if self._child is None:
            self._start()
        assert self._child is not None
        if not self._child.ready:
            try:
                message = self._child.receive(self.patience.start)
            except (_Died, _Lost) as death:
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
            self._child = _Child(self.command, self.environment, self.machine is not None)
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
        return not any(s.harmed for s in self.sessions if s.machine is None)

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
        found: dict[int, Outcome] = {}
        while missing := [i for i in range(len(variants)) if i not in found]:  # again, where a machine was lost
            if not (sessions := [s for s in self.sessions if s.is_open]):
                raise TrialError("no process is left that tries variants")
            _Round(variants, notify, until, doomed, found).share(missing, sessions)
        return [found[i] for i in range(len(variants))]


@dataclass
class _Round:
    """Variants that sessions share, with their outcomes so far."""

    variants: Sequence[Variant]
    notify: Notify
    until: float
    doomed: Doomed
    found: dict[int, Outcome]
    todo: queue.SimpleQueue[Sequence[int]] = field(default_factory=queue.SimpleQueue)

    def share(self, missing: Sequence[int], sessions: Sequence[Session]) -> None:
        """Try all that are missing; those stay so that a lost machine had."""
        # Neighbours, which have kernels in common, go to the same child: it compiles these once. Not too many of them:
        # some take the assembler a hundred times as long as others, and while one child compiles another one measures.
        count = max(1, min(len(missing), BATCHES_PER_CHILD * len(sessions)))
        for first, last in pairwise(n * len(missing) // count for n in range(count + 1)):
            self.todo.put(missing[first:last])

        def close() -> None:
            for s in sessions:
                s.close()

        spread(self._work, sessions, len(sessions), close)  # an exception ends all

    def _work(self, session: Session) -> None:
        try:
            if session.machine is not None and not self._joins(session):
                return
            while True:
                try:
                    share = self.todo.get_nowait()
                except queue.Empty:
                    return
                if self.found and time.monotonic() > self.until:
                    self.found.update(dict.fromkeys(share, LATE))
                    continue
                self._try(session, share)
        except TrialError as why:
            if session.machine is None:
                raise
            if session.is_open:  # else whoever has closed it knows why
                session.close()
                session.machine.leave_out("variants", without_kind(why))

    def _joins(self, session: Session) -> bool:
        """Wait for a child on another machine to start; False if the others have done everything by then."""
        until = time.monotonic() + session.patience.start
        while not session.has_spoken and time.monotonic() < until:
            if self.todo.empty():
                return False
            time.sleep(POLL_SECONDS)
        session.begin()
        return True

    def _try(self, session: Session, share: Sequence[int]) -> None:
        """Find out what becomes of some variants. Where that fails, what came before counts."""
        came: dict[int, Outcome] = {}

        def notify(i: int, outcome: Outcome) -> None:
            came[i] = outcome
            self.notify(i, outcome)

        try:
            came |= _tried(session, self.variants, share, notify, self.until, self.doomed)
        finally:
            self.found.update(came)


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
def trials(devices: Sequence[Any], lanes: int = 1, machines: Sequence[Machine] = ()) -> Iterator[Trials | None]:
    """Children on these GPUs, which start while the caller does something else; None where there is no GPU: what XLA
    compiles for a CPU is timed where it will run. `lanes`: so many callers have children of their own. `machines` have
    children on all of their GPUs, if these are of the same kind.
    """
    if not devices or devices[0].platform != "gpu" or not sys.executable:
        yield None
        return
    with ExitStack() as stack:
        try:
            command = children.module(WORKER, *stack.enter_context(kernel_cache.lent_folder()))
            here = [Session(command, environment(d), kind=d.device_kind) for d in devices]
            rounds = [here] * _on_each(processors(), len(devices), lanes)
            far = [m for m in machines if m.gpus and "variants" not in m.left_out]
            most = min(MAX_FAR_CHILDREN_PER_DEVICE, MAX_RELAYS // max(1, sum(m.gpus for m in far))) // lanes
            for m in far:
                rounds = _joined(rounds, far_sessions(m, devices[0], lanes, most))
            sessions = [stack.enter_context(replace(session)) for each in rounds for session in each]
        except TrialError as why:
            log.warning("variants are tried in this process: %s", why)
            yield None
            return
        yield Trials(sessions, len(devices) + sum(m.gpus for m in far), lanes)


def _on_each(processors: int, devices: int, lanes: int) -> int:
    """Children of each device, for a machine with so many of both."""
    return max(1, min(MAX_CHILDREN_PER_DEVICE, processors // (COMPILE_THREADS * devices)) // lanes)


def _joined(rounds: Sequence[list[Session]], more: Sequence[list[Session]]) -> list[list[Session]]:
    return [a + b for a, b in zip_longest(rounds, more, fillvalue=[])]


def far_sessions(machine: Machine, device: Any, lanes: int = 1, most: int = 1, code: str = "") -> list[list[Session]]:
    """Sessions on all GPUs of a machine, which must be of the kind of `device`: one of each, then another of each.

    Args:
        machine: where the children run.
        device: one of this machine, for its kind.
        lanes: so many callers have children of their own.
        most: children of each device at most, for each caller.
        code: what a child runs; `WORKER` if empty.
    """
    on_each = max(1, min(most, _on_each(machine.processors, max(1, machine.gpus), lanes)))
    share = math.floor(1e4 / (on_each * lanes)) / 1e4 if machine.gpus else 0.0  # Ray knows ten-thousandths of a GPU
    own = {name: value for name, value in environment(device).items() if name != "CUDA_VISIBLE_DEVICES"}  # Ray's
    command = machine.command(code or children.running(WORKER), environment=own, gpus=share)
    session = Session(command, kind=device.device_kind, machine=machine)
    return [[session] * max(1, machine.gpus)] * on_each


type Lend = Callable[[], AbstractContextManager[Trials | None]]


@contextmanager
def shared(devices: Sequence[Any], lanes: int = 1, machines: Sequence[Machine] = ()) -> Iterator[Lend]:
    """Lend children on these GPUs, and on other machines' GPUs, to regions: those that another region gave back, if all
    are alive; else new ones, which start in seconds.
    """
    with ExitStack() as stack:
        idle: list[tuple[Trials | None, ExitStack]] = []

        @contextmanager
        def lend() -> Iterator[Trials | None]:
            try:
                found, own = idle.pop()
            except IndexError:
                own = stack.enter_context(ExitStack())
                found = own.enter_context(trials(devices, lanes, machines))
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
                    self.settle(self.numbers[n], timing.Timing(tuple(samples), launches))
                case {"failed": n, "why": why}:
                    kind = "failed to run" if self.running == self.numbers[n] else "not compiled"
                    self.settle(self.numbers[n], TrialFailure(kind, str(why)))
                case {"late": n}:
                    self.found[self.numbers[n]] = LATE
                case {"done": _}:
                    return
                case other:
                    raise TrialError(f"the process that tries variants said {other}")

    def settle(self, number: int, outcome: Outcome) -> None:
        """Keep an outcome, and tell it."""
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


class _Lost(Exception):
    """A child on another machine is lost, by no fault of a variant that anybody knows of."""


class _Child:
    """A process and the lines that it writes."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], is_far: bool = False) -> None:
        self.ready = False
        self._is_far = is_far  # then the process is a relay of `cluster`
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

    @property
    def has_spoken(self) -> bool:
        """Whether there is a message, or will be none."""
        return not self._lines.empty()

    def _death(self) -> _Died | _Lost:
        code = self._process.wait()
        last = self.last_words
        if self._is_far:
            return _Died("crashed", last) if code == ENDED else _Lost(last or f"its relay ended with code {code}")
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
