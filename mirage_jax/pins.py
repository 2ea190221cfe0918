"""Decisions that users make about regions, and the TOML file that keeps them: vetoes and pinned muGraphs.

A region's cache key names it. Reading trusts nothing but the form: whoever uses a pinned muGraph proves it first
(`compiler.pinned`). A malformed file is a `UsageError` of one line, which says where, what was found and how to fix it.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from mirage_jax import limits
from mirage_jax.config import is_cache_key, is_source_line, unknown
from mirage_jax.errors import CacheError, GraphError, ParseError, UsageError, printable, without_kind
from mirage_jax.limits import brief
from mirage_jax.mugraph.graph import KernelGraph, Schedule
from mirage_jax.mugraph.schedule_json import read_graph, schedule_to_json

MAX_FILE_BYTES = 1 << 22  # what follows is not read, and then the form is wrong
MAX_ENTRIES = 4096  # vetoes or pins of one file
FIX = "write the file by report.save_pins, or remove the entry"
HEAD = """\
# Regions that a person decided: mirage_jax.optimize(pins=...) reads this file, report.save_pins writes it.
# veto: XLA's code runs. pin: this muGraph runs, once it is proven again. Entries may be removed, in any order.
"""


@dataclass(frozen=True)
class Choice:
    """A user's decision about a region: its muGraph, or None for XLA's own code.

    schedule: tile sizes; None lets the cost model choose. function and source (lines such as "model.py:41") are for
    people. file: the name of the file that holds the decision; empty if it was made in this process.
    """

    graph: KernelGraph | None = None
    schedule: Schedule | None = None
    function: str = ""
    source: tuple[str, ...] = ()
    file: str = ""

    @classmethod
    def of(cls, graph: Any, source: Sequence[str]) -> Self:
        """Pin a muGraph: a text, or anything that has a `graph` and a `schedule`.

        Raises:
            UsageError: it is neither, or the text is no muGraph.
        """
        try:
            text, sizes = (graph, None) if isinstance(graph, str) else (str(graph.graph), graph.schedule)
            return cls(*read_graph(text, None if sizes is None else schedule_to_json(sizes)), source=tuple(source))
        except (ParseError, GraphError) as why:
            raise UsageError(f"pin: {without_kind(why)}") from None
        except AttributeError:
            allowed = "the text of a muGraph, a MuGraph, or one of the region's variants"
            raise UsageError(f"pin: found {brief(graph)}; allowed are {allowed}") from None

    @property
    def why(self) -> str:
        """Who decided, for a report."""
        what = "vetoed" if self.graph is None else "pinned"
        return f"{what} in {printable(self.file)}" if self.file else f"{what} by hand in this process"

    def __str__(self) -> str:
        """Name the decision, its place and its file, as a terminal may show them."""
        where = ", ".join(map(printable, self.source)) or "an unknown line"
        inside = f" in {printable(self.file)}" if self.file else ""
        return f"the {'veto' if self.graph is None else 'pin'} of {where}{inside}"


def read(file: str | os.PathLike[str]) -> dict[str, Choice]:
    """Read the decisions of a file, by cache key.

    Raises:
        UsageError: there is no such file, or it is malformed.
    """
    shown = printable(os.fspath(file))
    try:
        with open(file, "rb") as opened:
            raw = opened.read(MAX_FILE_BYTES)
        value = tomllib.loads(raw.decode())
    except OSError as why:
        hint = "report.save_pins writes such a file"
        raise UsageError(f"pins: {shown} cannot be read ({why.strerror or 'no file'}); {hint}") from None
    except (ValueError, RecursionError) as why:  # no UTF-8, no TOML, or numbers with too many digits
        raise UsageError(f"pins: {shown} is no TOML ({without_kind(why) or 'too deep'}); {FIX}") from None
    try:
        return dict(_entries(value, os.path.basename(file)))
    except CacheError as why:
        raise UsageError(f"pins: {shown}: {without_kind(why)}; {FIX}") from None


def _entries(value: Mapping[str, Any], file: str) -> Iterator[tuple[str, Choice]]:
    seen = set[str]()
    _check_names("table", value, ("veto", "pin"))
    for kind, fields in (("veto", ("region",)), ("pin", ("region", "graph", "schedule"))):
        for n, entry in enumerate(limits.items(kind, value.get(kind, []), MAX_ENTRIES), 1):
            try:
                _check_names("field", limits.mapping(kind, entry), (*fields, "function", "source"))
                key = _key(entry.get("region"), seen)
                yield key, replace(_choice(kind, entry), file=file)
            except (CacheError, GraphError, ParseError) as why:
                raise CacheError(f"{kind} {n}: {without_kind(why)}") from None


def _check_names(what: str, found: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for name in found:
        if name not in allowed:
            raise CacheError(unknown(what, name, allowed))


def _key(value: object, seen: set[str]) -> str:
    if not isinstance(value, str) or not is_cache_key(value):
        allowed = "the cache key that explain prints, at least 8 digits of it"
        raise CacheError(f"region: found {brief(value)}; allowed is {allowed}")
    key = value.lower()
    if other := next((k for k in seen if k.startswith(key) or key.startswith(k)), None):
        raise CacheError(f"region: found {brief(value)} after {brief(other)}; allowed is one entry for each region")
    seen.add(key)
    return key


def _choice(kind: str, entry: Mapping[str, Any]) -> Choice:
    source = limits.items("source", entry.get("source", []), limits.MAX_TEXTS_PER_FIELD)
    for line in source:
        if not isinstance(line, str) or not is_source_line(line):
            raise CacheError(f"source: found {brief(line)}; allowed are lines such as 'model.py:41'")
    known = Choice(function=limits.text("function", entry.get("function", "")), source=tuple(source))
    if kind == "veto":
        return known
    text = entry.get("graph")
    if not isinstance(text, str):
        raise CacheError(f"graph: found {brief(text)}; allowed is the text of a muGraph")
    graph, schedule = read_graph(text, entry.get("schedule"))
    return replace(known, graph=graph, schedule=schedule)


def unused(choices: Mapping[str, Choice], keys: Collection[str]) -> dict[str, Choice]:
    """The decisions of a file that are about none of the regions with these cache keys.

    Those whose source lines have a decision that is in use are left out: they are for other shapes or devices.
    """
    used = {chosen for chosen in choices if any(key.startswith(chosen) for key in keys)}
    lines = {choices[chosen].source for chosen in used}
    return {k: c for k, c in choices.items() if c.file and k not in used and c.source not in lines}


# ---------------------------------------------------------------------- writing


def save(file: str | os.PathLike[str], choices: Mapping[str, Choice]) -> Path:
    """Write decisions by cache key to a file; a file that is there keeps its decisions about other regions.

    Raises:
        UsageError: the file is there and is malformed, or it cannot be written.
    """
    path = Path(file)
    kept = {k: c for k, c in (read(path) if path.exists() else {}).items() if not _has_prefix(k, choices)}
    try:
        path.write_text(HEAD + "".join(f"\n{text}" for text in map(_entry, *_columns(kept | dict(choices)))), "utf-8")
    except OSError as why:
        raise UsageError(f"save_pins: {printable(str(path))} cannot be written ({why.strerror})") from None
    return path


def _has_prefix(key: str, choices: Mapping[str, Choice]) -> bool:
    return any(other.startswith(key) for other in choices)


def _columns(choices: Mapping[str, Choice]) -> tuple[Sequence[str], Sequence[Choice]]:
    """Keys and decisions in an order that does not change from one writing to the next."""
    ordered = sorted(choices.items(), key=lambda item: (item[1].function, item[1].source, item[0]))
    return [key for key, _ in ordered], [choice for _, choice in ordered]


def _entry(key: str, choice: Choice) -> str:
    fields = {"region": key, "function": printable(choice.function), "source": list(map(printable, choice.source))}
    lines = ["[[veto]]" if choice.graph is None else "[[pin]]"]
    lines += [f"{name} = {_toml(value)}" for name, value in fields.items() if value]
    if choice.graph is not None:
        escaped = str(choice.graph).replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'graph = """\n{escaped}"""')
    if choice.schedule is not None:
        lines.append(f"schedule = {_toml(schedule_to_json(choice.schedule))}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value of JSON without null as TOML in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
