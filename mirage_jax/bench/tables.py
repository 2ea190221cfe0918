"""Results as a table for people, as JSON, and as Markdown next to it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import jax
from rich.table import Table

from mirage_jax.cache import versions
from mirage_jax.report import write_beside

type Cells = tuple[Sequence[str], list[list[str]]]  # header, rows


class TableReport:
    """A result with a table. Subclasses are dataclasses with a title, and JSON has their fields.

    The first `words` columns hold text, the others numbers. `method` tells how numbers were measured.
    """

    words = 1
    title: Any
    method: Any

    @property
    def heading(self) -> str:
        """The title of the table."""
        return self.title

    @property
    def caption(self) -> str:
        """A sentence under the table, which Markdown has above it."""
        return self.method

    def cells(self) -> Cells:
        """Header and rows of the table."""
        raise NotImplementedError

    def about(self) -> list[str]:
        """Paragraphs between the title and the table in Markdown: date, device, caption, versions."""
        fields = vars(self)
        if "device" not in fields or "versions" not in fields:
            return [f"{self.caption}."]
        installed = [f"{name} {version}" for name, version in fields["versions"].items() if version]
        return [f"{fields['date']}, {fields['device']}. {self.caption}", f"{', '.join(installed)}."]

    def details(self) -> list[str]:
        """Blocks of text after the table."""
        return []

    def table(self) -> Table:
        """Draw the table for a terminal."""
        header, rows = self.cells()
        table = Table(title=self.heading, caption=self.caption)
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < self.words else "right", no_wrap=i == 0)
        for row in rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """Write the table, with where and how it was made, as Markdown."""
        parts = [f"# {self.heading}", *self.about(), markdown_table(*self.cells(), self.words), *self.details()]
        return "\n\n".join(parts) + "\n"

    def record(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(cast(Any, self))

    def to_json(self) -> str:
        """Write all fields as JSON, with null for numbers that are not finite."""
        return json.dumps(_finite(self.record()), indent=1, sort_keys=True, allow_nan=False)

    def write(self, file: Path) -> Path:
        """Write JSON to `file` and Markdown next to it; returns the path of the Markdown."""
        return write_beside(file, self.to_json(), self.to_markdown())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Write a table as Markdown; numbers, in all columns but the first `words`, are aligned to the right."""
    rule = "|" + "---|" * words + "---:|" * (len(header) - words)
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    first, *others = (f"| {' | '.join(row)} |" for row in (header, *escaped))
    return "\n".join((first, rule, *others))


def _finite(value: object) -> object:
    """JSON has no infinity: null stands for it."""
    match value:
        case dict():
            return {k: _finite(v) for k, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
        case float() if not math.isfinite(value):
            return None
    return value


def provenance() -> dict[str, Any]:
    """Look up date, device and versions, which are fields of results."""
    device, now = jax.devices()[0], datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": now, "device": f"{device.platform}: {device.device_kind}", "versions": dict(versions())}
