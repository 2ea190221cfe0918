"""What a campaign found, as a table for people, as JSON and as Markdown."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from rich.table import Table

from mirage_jax.report import write_beside


@dataclass
class CampaignReport(ABC):
    """The result of a campaign. `header`: names of the columns, of which the first `words` are text."""

    title: ClassVar[str]
    header: ClassVar[tuple[str, ...]]
    words: ClassVar[int]

    @abstractmethod
    def summary(self) -> str:
        """One sentence."""

    @abstractmethod
    def rows(self) -> list[list[str]]: ...

    def details(self) -> list[str]:
        """What went wrong, in full."""
        return []

    def table(self) -> Table:
        table = Table(title=self.summary())
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i < self.words else "right", no_wrap=i == 0)
        for row in self.rows():
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        lines = [f"# {self.title}", "", f"{self.summary()}.", ""]
        lines += [f"| {' | '.join(self.header)} |"]
        lines += ["|" + "---|" * self.words + "---:|" * (len(self.header) - self.words)]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in self.rows()]
        lines += [f"\n```\n{detail}\n```" for detail in self.details()]
        return "\n".join(lines) + "\n"

    def write(self, file: Path) -> Path:
        """Write the JSON to `file` and the Markdown beside it; the Markdown's path."""
        return write_beside(file, json.dumps(asdict(self), indent=1), self.to_markdown())
