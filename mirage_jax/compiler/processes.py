"""Processes that run one program agree on its code: the first decides, and the others take what it decided.

XLA wants the same program of all processes whose devices compute it; where they differ, they wait for each other for
ever. What is decided depends on times and on stored files, so one process decides. A process that cannot use a decision
says so, and then nobody does. Values pass through the key-value store of `jax.distributed`, as JSON.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import jax

from mirage_jax.errors import in_one_line
from mirage_jax.jaxpr_frontend import jax_compat

log = logging.getLogger("mirage_jax")

POLL_MILLISECONDS = 2000  # that one look at the store takes at most: an interrupt is noticed in between
NOTICE_SECONDS = 60.0  # after which whoever waits says so again
FOLDER = "mirage_jax"  # of the store

_exchanged = Counter[tuple[int, str]]()  # exchanges of a process by name: all count alike, lowering the same programs
_counting = threading.Lock()

type Offer = Mapping[str, object]  # decisions as values of JSON


class KeyValueStore(Protocol):
    """What is needed of the client of `jax.distributed`."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Return a value when it is there. Raises an error that says DEADLINE_EXCEEDED if that takes too long."""
        ...


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that run a program, in order, and the number of this one."""

    processes: Sequence[int]
    me: int
    store: KeyValueStore

    @classmethod
    def of(cls, processes: Sequence[int]) -> Self | None:
        """The group of several processes that can tell each other something; else None."""
        store = jax_compat.key_value_store() if len(processes) > 1 else None
        return None if store is None else cls(processes, jax.process_index(), store)

    def agree(self, name: str, offer: Callable[[], Offer], take: Callable[[Offer], Collection[str]]) -> frozenset[str]:
        """Pass decisions from the first process to the others; return the keys of what all of them use.

        Args:
            name: what the decisions are about; equal in all processes.
            offer: makes the decisions, by key. The first process calls it.
            take: uses decisions, and returns the keys of what it cannot use. The other processes call it.
        """
        place = f"{FOLDER}/{'-'.join(map(str, self.processes))}/{name}"
        with _counting:
            _exchanged[self.me, place] += 1
            place = f"{place}/{_exchanged[self.me, place]}"
        first, *others = self.processes
        refused: dict[int, Collection[str]] = {}
        offered: Offer = {}
        if self.me == first:
            try:
                offered = offer()
            finally:  # or the others would wait for ever
                self.store.key_value_set(f"{place}/offer", json.dumps(offered))
        else:
            offered = json.loads(self._wait_for(f"{place}/offer", first))
            refused[self.me] = _taken(take, offered)
            self.store.key_value_set(f"{place}/{self.me}", json.dumps(sorted(refused[self.me])))
        for other in others:
            if other != self.me:
                refused[other] = json.loads(self._wait_for(f"{place}/{other}", other))
        return frozenset(offered).difference(*refused.values())

    def _wait_for(self, key: str, process: int) -> str:
        """A value that another process stores. It may tune for minutes; if it dies, so do all."""
        started = noticed = time.monotonic()
        while True:
            try:
                return self.store.blocking_key_value_get(key, POLL_MILLISECONDS)
            except Exception as why:
                if "DEADLINE_EXCEEDED" not in str(why):
                    raise
            if (now := time.monotonic()) > noticed + NOTICE_SECONDS:
                noticed = now
                log.warning("process %d has waited for process %d for %.0f s", self.me, process, now - started)


def _taken(take: Callable[[Offer], Collection[str]], offered: Offer) -> Collection[str]:
    try:
        return take(offered)
    except Exception as why:
        log.warning("decisions of another process are not used: %s", in_one_line(why))
        return list(offered)
