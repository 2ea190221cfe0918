"""Lets processes that share a GPU take turns, so that one does not slow down what another one times.

A turn is a lock (`flock`) on a file in the folder for temporary files, one file for each GPU and user; it ends with the
process that has it. Processes that know the GPU by another name (a number, a UUID) do not wait for each other. Nor does
anybody wait for ever: a turn is about how good figures are, never about whether a program runs.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

try:
    import fcntl
except ImportError:  # on Windows, where JAX knows no GPU either
    fcntl = None

log = logging.getLogger("mirage_jax.timing")

POLL_SECONDS = 0.01  # seconds between two looks at a lock that another process has
NOTICE_SECONDS = 10.0  # seconds after which whoever waits says so again
MAX_WAIT_SECONDS = 300.0  # seconds after which nobody waits any longer: the other process may have been stopped

type Waiting = Callable[[], object]  # called from time to time until it is one's turn

LARGE_SHARE = 0.25  # of a GPU's memory: two threads that want as much each may not have room beside each other

_filling = threading.RLock()  # held by a thread that wants such a share
_within = threading.RLock()  # of the threads of a process one has a turn at a time; it may take it again
_held: set[Path] = set()


@contextmanager
def gpu_lock(device: Any = None, waiting: Waiting = lambda: None) -> Iterator[None]:
    """While no other process of this user has its turn on `device`, JAX's default one if none is named. Devices that
    are no GPUs are free for all. Within a turn nothing may wait for another thread of this process that wants one too,
    as the lowering of an optimized function does.
    """
    device = _default_device() if device is None else device
    if device.platform != "gpu" or fcntl is None:
        yield
        return
    file = Path(tempfile.gettempdir()) / f"mirage_jax-{os.getuid()}-gpu-{visible_name(device).replace('/', '-')}.lock"
    with alone(file, waiting):
        yield


@contextmanager
def process_turn(device: Any) -> Iterator[None]:
    """While no other thread of this process has its turn on a GPU. Other processes go on: a profile, which times what
    runs, shows what this process runs and nothing else.
    """
    if device.platform != "gpu":
        yield
        return
    with _within:
        yield


@contextmanager
def memory_turn(device: Any, wanted: float) -> Iterator[None]:
    """While no other thread of this process fills a GPU. Who wants few bytes of its memory does not wait.

    A thread takes this turn first, and `gpu_lock` or `process_turn` within.
    """
    stats = device.memory_stats() if device.platform == "gpu" and hasattr(device, "memory_stats") else None
    if wanted < LARGE_SHARE * (stats or {}).get("bytes_limit", math.inf):
        yield
        return
    with _filling:
        yield


@contextmanager
def alone(path: Path, waiting: Waiting = lambda: None) -> Iterator[None]:
    """While no other process has a lock on this file, which is made if there is none."""
    with _within, ExitStack() as stack:
        if path not in _held:
            try:  # nothing is written, nor a link followed: others may make files in that folder
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                stack.callback(_release, handle)
                _wait_for(handle, path, waiting)
            except OSError as why:  # some file systems have no locks
                log.info("processes on one GPU do not wait for each other: %s: %s", type(why).__name__, why)
            _held.add(path)
            stack.callback(_held.discard, path)
        yield


def _release(handle: int) -> None:
    """Unlocks before it closes: a process that was forked meanwhile has the file open, too."""
    assert fcntl is not None
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _wait_for(handle: int, path: Path, waiting: Waiting) -> None:
    """Lock the file, or give up."""
    assert fcntl is not None
    started = said = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
        if now > started + MAX_WAIT_SECONDS:
            log.warning("another process has had %s for %g s: times may be wrong from now on", path, MAX_WAIT_SECONDS)
            return
        if now > said + NOTICE_SECONDS:
            said = now
            waiting()
        time.sleep(POLL_SECONDS)


def visible_name(device: Any) -> str:
    """What CUDA_VISIBLE_DEVICES calls a GPU of this process: the same in all processes that set it equally."""
    ordinal = device.local_hardware_id
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[ordinal] if ordinal < len(visible) else str(ordinal)


def _default_device() -> Any:
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]
