"""What the words of Gluon mean in Triton's interpreter: tasks, barriers, copies and products that take their time.

The text of a kernel with specialized warps (`specialized`) is run as it is, with this module's meaning of its words.
Layouts mean nothing. Each task of `warp_specialize` is a thread, and only one runs at a time; where one waits for a
barrier, another goes on, drawn at random. A copy fills its tile some time later, a product is computed when it is
waited for. Vector clocks (Mattern, 1989) say what a task may know to have happened, from what it waited for; so that a
missing wait, or a tile that is given back too early, is a fault in whatever order tasks ran. Faults are

* a read of a tile that its task does not know to be filled, by a product or as values;
* a copy into a tile that its task does not know to have been read by all that read it;
* more arrivals at a barrier than it counts; tasks that all wait; bytes that nobody expects;
* a copy from outside of its matrix; the use of a product that is not done.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mirage_jax.errors import KernelFault, MirageError

BARRIER = "layout of barriers"


type Clock = Counter[object]  # how many events of each task, and of each copy, are known to have happened


@dataclass(eq=False, kw_only=True)
class Reader:
    """What reads tiles in shared memory."""

    task: object
    done: int = 0  # event of its task


@dataclass(eq=False)
class Slot:
    """A tile in shared memory, the copy that fills it, and its readers since then."""

    words: Words
    value: Any = None
    copy: object = None
    readers: list[Reader] = field(default_factory=list)

    def permute(self, order: Any) -> Transposed:
        """View the tile transposed."""
        return Transposed(self)

    def load(self, layout: Any) -> Any:
        """Read the tile into registers."""
        return self.words.load(self)

    def store(self, value: Any) -> None:
        """Write registers into the tile."""
        self.words.store(self, value)


@dataclass(frozen=True)
class Transposed:
    slot: Slot

    def load(self, layout: Any) -> Any:
        """Read the tile transposed."""
        words = self.slot.words
        return words.tl.trans(words.load(self.slot))


@dataclass(frozen=True)
class Slots:
    """A ring of tiles, or of barriers."""

    items: tuple[Any, ...]

    def index(self, n: Any) -> Any:
        """Take one tile of a multi-stage buffer.

        Raises:
            KernelFault: there is no such tile.
        """
        n = operator.index(n)
        if not 0 <= n < len(self.items):
            raise KernelFault(f"tile {n} of {len(self.items)}")
        return self.items[n]


@dataclass(eq=False)
class Barrier:
    """Arrivals and bytes that complete a phase; the phases so far, and the events that a waiting task then knows."""

    count: int = 0
    missing: int = 0
    bytes: int = 0
    completed: int = 0
    known: Clock = field(default_factory=Counter)
    arriving: Clock = field(default_factory=Counter)  # what will be known when this phase is complete

    def arrived(self, arrivals: int, clock: Clock, expected: int = 0) -> None:
        """Arrivals, or bytes if `expected` is negative."""
        if arrivals > self.missing:
            raise KernelFault(f"{arrivals} arrivals at a barrier that counts {self.missing} more")
        self.missing -= arrivals
        self.bytes += expected
        self.arriving |= clock
        if self.bytes < 0:
            raise KernelFault(f"{-self.bytes} bytes arrive at a barrier that expects none")
        if self.missing == 0 and self.bytes == 0:
            self.completed, self.missing = self.completed + 1, self.count
            self.known |= self.arriving
            self.arriving = Counter()


@dataclass(eq=False, kw_only=True)
class IssuedProduct(Reader):
    """A matrix product that was issued."""

    left: Any
    right: Any
    start: Any  # a tile, a product that is done by then, or None
    value: Any = None


@dataclass
class Tasks:
    """The tasks of one block; only one runs at a time."""

    rng: np.random.Generator
    copies: list[Callable[[], None]] = field(default_factory=list)
    issued: dict[int, list[IssuedProduct]] = field(default_factory=dict)  # by task, those that are not done
    turn: threading.Condition = field(default_factory=threading.Condition)
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)
    running: int | None = None
    failed: MirageError | None = None
    clocks: dict[object, Clock] = field(default_factory=lambda: defaultdict(Counter))
    numbers: dict[int, int] = field(default_factory=dict)  # of tasks, by thread

    @property
    def current(self) -> int:
        """The task that runs."""
        if (n := self.numbers.get(threading.get_ident())) is None:
            raise KernelFault("what only tasks of a block do, outside of them")
        return n

    @property
    def clock(self) -> Clock:
        """The vector clock of the task that runs."""
        return self.clocks[self.current]

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run tasks as threads, one at a time, in random order."""

        def one(n: int, task: Callable[[], None]) -> None:
            try:
                self.take_turn(n)
                task()
            except Exception as why:
                self.fail(why)
            finally:
                with self.turn:
                    del self.waiting[n]
                    self.next_turn()

        self.waiting = {n: (lambda: True) for n in range(len(tasks))}
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(one, n, task), daemon=True)
            for n, task in enumerate(tasks)
        ]
        for thread in threads:
            thread.start()
        with self.turn:
            self.next_turn()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed

    def fail(self, why: Exception) -> None:
        """The first failure counts; the others follow from it."""
        fault = why if isinstance(why, MirageError) else KernelFault(f"a task fails: {type(why).__name__}: {why}")
        self.failed = self.failed or fault

    def take_turn(self, n: int) -> None:
        """Wait until a task may run."""
        self.numbers[threading.get_ident()] = n
        with self.turn:
            while self.running != n:
                self.turn.wait()

    def next_turn(self) -> None:
        """Somebody who can go on, once enough copies have been made for one to be there."""
        while True:
            ready = [n for n, is_ready in self.waiting.items() if self.failed is not None or is_ready()]
            if ready and (not self.copies or self.rng.random() < 0.5):
                self.running = int(self.rng.choice(ready))
                break
            if not self.copies:
                self.running = None
                if self.waiting and self.failed is None:
                    self.failed = KernelFault("all tasks of a block wait for each other")
                    continue
                break
            try:
                self.copies.pop(int(self.rng.integers(len(self.copies))))()
            except Exception as why:
                self.fail(why)
        self.turn.notify_all()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Let others go on until something is so."""
        n = self.current
        with self.turn:
            self.waiting[n] = is_ready
            self.next_turn()
            while self.running != n:
                self.turn.wait()
            self.waiting[n] = lambda: True
        if self.failed is not None:
            raise KernelFault("another task failed")


class Words:
    """The names that the text of a kernel uses. `matrices`: shapes and blocks of descriptors, by address.
    `interpreted`: the form in which Triton's interpreter runs a function.
    """

    def __init__(
        self,
        tl: Any,
        matrices: Mapping[int, tuple[tuple[int, int], tuple[int, int]]],
        interpreted: Callable[[Any], Any],
        seed: int = 0,
    ) -> None:
        self.tl, self.matrices, self.interpreted, self.seed = tl, matrices, interpreted, seed
        self.tasks: Tasks | None = None

    def namespace(self) -> dict[str, Any]:
        """The globals of a kernel's text."""
        nothing = lambda *args, **kwargs: None  # noqa: E731
        layouts = ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout", "NVMMASharedLayout",
                   "SwizzledSharedLayout")  # fmt: skip
        own: dict[str, Any] = {
            "arange": lambda start, end, layout: self.tl.arange(start, end),
            "full": lambda shape, value, dtype, layout: self.tl.full(shape, value, dtype),
            "convert_layout": lambda x, layout: x,
            "to_tensor": lambda x: self.tl.full((), x, self.tl.int32 if isinstance(x, int) else self.tl.float32),
            "allocate_shared_memory": self.allocate,
            "warp_specialize": self.warp_specialize,
        }
        barriers = {name: getattr(self, name) for name in ("init", "invalidate", "expect", "wait", "arrive")}
        return {
            "tl": self.tl,
            "gl": _Language(self.tl, own | dict.fromkeys(layouts, nothing)),
            "mbarrier": SimpleNamespace(MBarrierLayout=lambda: BARRIER, **barriers),
            "copy_tile": self.copy_tile,
            "fence_async_shared": nothing,
            "warpgroup_mma": self.warpgroup_mma,
            "warpgroup_mma_wait": self.warpgroup_mma_wait,
        }

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Slots:
        """Allocate tiles or barriers in shared memory."""
        return Slots(tuple(Barrier() if layout is BARRIER else Slot(self) for _ in range(shape[0])))

    def warp_specialize(self, tasks: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        """Run the tasks of a block side by side."""
        self.tasks = Tasks(np.random.default_rng(self.seed))
        self.tasks.run([functools.partial(self.interpreted(f).rewrite(), *args) for f, args in tasks])
        self.tasks = None

    # --- barriers

    def init(self, barrier: Barrier, count: Any) -> None:
        """Set how many arrivals complete a phase of a barrier."""
        barrier.count = barrier.missing = int(count)

    def invalidate(self, barrier: Barrier) -> None:
        """End a barrier: who waits for it is lost."""
        if barrier.missing < barrier.count or barrier.bytes:
            raise KernelFault("a barrier ends in the middle of a phase")
        barrier.count = barrier.missing = barrier.completed = 0
        barrier.known = Counter()

    def expect(self, barrier: Barrier, amount: Any) -> None:
        """Arrive, and expect bytes of a copy."""
        barrier.arrived(1, self.running.clock, int(amount))

    def arrive(self, barrier: Barrier, count: Any, pred: Any = True) -> None:
        """Arrive at a barrier."""
        if bool(pred):
            barrier.arrived(int(count), self.running.clock)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        """Wait until a phase is complete, and learn what its arrivals knew."""
        parity, tasks = operator.index(phase), self.running
        tasks.wait_until(lambda: barrier.completed & 1 != parity)
        tasks.clocks[tasks.current] |= barrier.known

    @property
    def running(self) -> Tasks:
        """The tasks of this block."""
        if self.tasks is None:
            raise KernelFault("what only tasks of a block do, outside of them")
        return self.tasks

    # --- copies

    def copy_tile(self, pointer: Any, start: Sequence[Any], barrier: Barrier, slot: Slot) -> None:
        """Start the copy of a tile from global to shared memory.

        Raises:
            KernelFault: the tile is not inside of the matrix, or is still read.
        """
        tl, (row, column) = self.tl, map(operator.index, start)
        (rows, columns), (height, width) = self.matrices[int(pointer.handle.data.squeeze())]
        if not (0 <= row <= rows - height and 0 <= column <= columns - width):
            raise KernelFault(f"a block of {height} x {width} at {row}, {column} of a matrix of {rows} x {columns}")
        clock, event = self.running.clock, object()
        if slot.copy is not None and not slot.readers and not clock[slot.copy]:
            raise KernelFault("a copy into a tile that another copy may be filling")
        if any(not x.done or clock[x.task] < x.done for x in slot.readers):
            raise KernelFault("a copy into a tile that may be read still")
        slot.copy, slot.readers, slot.value = event, [], None

        def copy() -> None:
            lines = (row + tl.arange(0, height))[:, None] * columns
            slot.value = tl.load(pointer + (lines + (column + tl.arange(0, width))[None, :]))
            barrier.arrived(0, Counter({event: 1}), -height * width * 2)

        self.running.copies.append(copy)

    # --- reads

    def _read(self, slot: Slot, reader: Reader) -> None:
        if slot.value is None or not self.running.clock[slot.copy]:
            raise KernelFault("a tile is read that may not be there yet")
        slot.readers.append(reader)

    def load(self, slot: Slot) -> Any:
        """A tile as values."""
        task, clock = self.running.current, self.running.clock
        clock[task] += 1
        self._read(slot, Reader(task=task, done=clock[task]))
        return slot.value

    def store(self, slot: Slot, value: Any) -> None:
        """Values that whoever waits for this task may read."""
        slot.copy, slot.value = object(), value
        self.running.clock[slot.copy] += 1

    # --- products

    def _issued(self) -> list[IssuedProduct]:
        return self.running.issued.setdefault(self.running.current, [])

    def warpgroup_mma(
        self, left: Any, right: Any, start: Any, use_acc: bool = True, is_async: bool = False
    ) -> IssuedProduct:
        """Issue a product of two tiles."""
        slots = [x.slot if isinstance(x, Transposed) else x for x in (left, right)]
        product = IssuedProduct(task=self.running.current, left=left, right=right, start=start if use_acc else None)
        for slot in (x for x in slots if isinstance(x, Slot)):
            self._read(slot, product)
        self._issued().append(product)
        return product

    def warpgroup_mma_wait(self, outstanding: int, values: Sequence[Any]) -> Any:
        """Finish all issued products but the last few."""
        issued = self._issued()
        while len(issued) > outstanding:
            self._done(issued.pop(0))
        out = [x.value if isinstance(x, IssuedProduct) and x.value is not None else x for x in values]
        return out[0] if len(out) == 1 else tuple(out)

    def _done(self, product: IssuedProduct) -> None:
        clock = self.running.clock
        clock[product.task] += 1
        product.done = clock[product.task]
        left, right = (self._matrix(x) for x in (product.left, product.right))
        start = product.start.value if isinstance(product.start, IssuedProduct) else product.start
        product.value = self.tl.dot(left, right) if start is None else self.tl.dot(left, right, start)

    def _matrix(self, x: Any) -> Any:
        if isinstance(x, Transposed):
            return self.tl.trans(x.slot.value)
        return x.value if isinstance(x, Slot) else x


class _Language:
    """Triton's language, but for some names."""

    def __init__(self, tl: Any, own: Mapping[str, Any]) -> None:
        self._tl, self._own = tl, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._tl, name)
