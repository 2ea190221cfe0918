"""The result of a campaign: a table of counts, and whatever went wrong in full."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import ClassVar

from mirage_jax.bench.tables import Cells, TableReport


@dataclass(kw_only=True)
class CampaignReport(TableReport):
    """The result of a campaign. `header`: names of the columns."""

    header: ClassVar[tuple[str, ...]]

    seconds: float = 0.0
    date: str = field(default_factory=lambda: date.today().isoformat())

    @abstractmethod
    def summary(self) -> str:
        """Sum the campaign up in one sentence."""

    @abstractmethod
    def rows(self) -> Iterable[Sequence[str]]:
        """The body of the table."""

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether nothing is wrong."""

    def findings(self) -> list[str]:
        """Everything that went wrong, in full."""
        return []

    @property
    def caption(self) -> str:
        """The summary."""
        return self.summary()

    def cells(self) -> Cells:
        """Header and rows of the table."""
        return self.header, list(map(list, self.rows()))

    def details(self) -> list[str]:
        """The findings as blocks of Markdown."""
        return [f"```\n{finding}\n```" for finding in self.findings()]

    @contextmanager
    def timed(self) -> Iterator[Callable[[], None]]:
        """Take the time of the block; the function it gives brings `seconds` up to date on the way."""
        began = time.monotonic()

        def update() -> None:
            self.seconds = time.monotonic() - began

        try:
            yield update
        finally:
            update()
