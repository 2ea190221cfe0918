"""What was found, refused and decided: the text that `explain` prints and the benchmark stores.

A `Decision` is made once per region by `compiler`; a `Report` collects the decisions of one function with what the
capture left to XLA. Source lines are short: one text per file, the user's own files before
installed packages.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol, Self

import numpy as np

from mirage_jax import pins
from mirage_jax.cost.closed_form import closed_forms
from mirage_jax.errors import UsageError
from mirage_jax.html_report import page
from mirage_jax.mugraph.dtypes import DTYPES
from mirage_jax.mugraph.footprint import Footprint
from mirage_jax.mugraph.graph import KernelGraph, Library, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json
from mirage_jax.pins import Choice
from mirage_jax.why_not import WhyNot

MAX_NAMES_PER_FILE = 3  # functions named per file
OWN_FOLDER = str(Path(__file__).parent.parent)  # where this package is
MIN_STEP_FRACTION = 0.02  # of the seconds of tuning, from which on a step is named
MAX_SOURCE_LINES = 20  # of equations left out that are listed


@dataclass(frozen=True)
class Variant:
    """A muGraph that was tried for a region, at its best tile sizes; `RegionReport.pin` takes one.

    text and sizes: the graph, and its schedule as values of JSON: they may come from a file, and are read when asked
    for. seconds: the fastest measured time; None if it was not measured.
    """

    text: str
    sizes: Any = field(hash=False)
    seconds: float | None = None

    @classmethod
    def of(cls, graph: KernelGraph, schedule: Schedule, seconds: float | None = None) -> Self:
        """Make one of a graph and its schedule."""
        return cls(str(graph), schedule_to_json(schedule), seconds)

    @property
    def graph(self) -> KernelGraph:
        """The muGraph.

        Raises:
            ParseError: a stored text is damaged.
        """
        return parse(self.text)

    @property
    def schedule(self) -> Schedule:
        """The tile sizes.

        Raises:
            GraphError: stored sizes are damaged.
        """
        return schedule_from_json(self.sizes)

    @property
    def brief(self) -> str:
        """Time and size in one line."""
        time = "not measured" if self.seconds is None else f"{self.seconds * 1e6:,.1f} us"
        count = len(_KERNEL_LINES.findall(self.text))
        return f"{time} ({count} kernel{'s' * (count != 1)})"

    def __str__(self) -> str:
        return f"{self.brief}\n{self.text}"


_KERNEL_LINES = re.compile(r"^  (?:library|kernel) ", re.MULTILINE)


@dataclass(frozen=True)
class Decision:
    """Who computes a region, why, and the evidence. `winner` is None where XLA's own code stays."""

    winner: Any  # compiler.Winner | None
    why: str
    source: str  # "search" | "cache" | "policy" | "user"
    platform: str
    key: str = ""
    before: Footprint | None = None
    after: Footprint | None = None
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds; "xla" and one per candidate measured
    measured: tuple[tuple[float, float], ...] = ()  # of each variant that was timed: the model's seconds, and real ones
    variants: tuple[Variant, ...] = ()  # that were tried, best first
    certificate: Any = None
    gate: str = ""
    exact: str = ""  # of the text of kernels, on exact numbers
    search: str = ""
    tried: Counter[str] = field(default_factory=Counter)  # what happened to the candidates
    step_seconds: Mapping[str, float] = field(default_factory=dict)  # of tuning
    kernels: str = ""  # path of the readable kernels
    why_not: WhyNot | None = None  # where XLA's own code stays: the numbers behind `why`

    @property
    def verdict(self) -> str:
        """Who computes the region, for a line that goes on with `why`."""
        return "kept XLA's code" if self.winner is None else "optimized"

    @property
    def consequences(self) -> list[str]:
        """Lines about a region that stays: whether it matters, what to do, and where it would be otherwise."""
        if self.why_not is None or self.winner is not None:
            return []
        other = self.why_not.elsewhere
        return [f"what to do: {self.why_not.advice}", *([] if other is None else [f"elsewhere: {other}"])]

    @property
    def speedup(self) -> float | None:
        """XLA's time over the winner's, where both were measured."""
        if self.winner is None or not {"xla", "mirage"} <= self.timings.keys():
            return None
        return self.timings["xla"] / self.timings["mirage"]


@dataclass(frozen=True)
class WholeFunction:
    """Who computes a function, or a part of one that is lowered by itself: plain jit ("xla"), or ours, by label.

    ratio: how many times faster than plain jit the best of ours is: median, and the ends of its 95% interval.
    inside: the label that runs inside of a larger program, where a function called by itself runs under plain jit.
    recomputed: the median ratio of ours with large values recomputed, where that lost and regions were tuned once more.

    It has a hash, for JAX wants one of every parameter of a primitive.
    """

    chosen: str
    why: str
    source: str  # "search" | "cache" | "policy"
    ratio: tuple[float, float, float] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)  # by label
    memory: Mapping[str, int] = field(default_factory=dict, hash=False)  # temporary bytes that XLA plans, by label
    inside: str = ""
    recomputed: float | None = None

    def as_part(self) -> WholeFunction:
        """The decision where a larger program calls the function: starting that takes the host as long either way."""
        if not self.inside or self.ratio is None:
            return self
        why = f"{ratio_as_text(self.ratio)} over plain jit, inside of a larger program"
        return replace(self, chosen=self.inside, why=why, inside="")

    def after(self, lost: Any, labels: Iterable[str]) -> WholeFunction:
        """The same where variants of these labels, which recompute large values, lost before."""
        seconds = [lost.seconds[label] for label in labels if label in lost.seconds]
        return replace(self, recomputed=lost.seconds["xla"] / min(seconds)) if seconds else self

    @property
    def is_plain(self) -> bool:
        """Whether plain jit runs."""
        return self.chosen == "xla"

    @property
    def speedup(self) -> float | None:
        """What the function gains over plain jit, where that is known."""
        return 1.0 if self.is_plain else None if self.ratio is None else self.ratio[0]

    @property
    def brief(self) -> str:
        """For the cell of a table."""
        if self.is_plain:
            return "plain"
        return "not measured" if self.speedup is None else f"{self.speedup:.2f}x"

    def __str__(self) -> str:
        memory = ""
        if not self.is_plain and {"xla", self.chosen} <= self.memory.keys():
            plain, ours = _bytes(self.memory["xla"], self.memory[self.chosen])
            memory = f", temporary memory {plain} -> {ours}"
        lost = "" if self.recomputed is None else f"; {self.recomputed:.2f}x with large values recomputed"
        return f"{self.why}{memory}{lost} [{self.source}]"

    def to_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        return {**asdict(self), "speedup": self.speedup}


def ratio_as_text(ratio: tuple[float, float, float]) -> str:
    """Format a median and the ends of its interval."""
    return "{:.2f}x [{:.2f}, {:.2f}]".format(*ratio)


def _bytes(*counts: int) -> list[str]:
    """Format numbers of bytes in one unit, which only the last text names."""
    unit, name = next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if max(counts) >= u[0]), (1.0, "bytes"))
    texts = [f"{count / unit:.1f}" if unit > 1 else str(count) for count in counts]
    return [*texts[:-1], f"{texts[-1]} {name}"]


def write_beside(file: Path, text: str, markdown: str) -> Path:
    """Write the JSON `text` to `file` and `markdown` next to it; return the Markdown's path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")
    page = file.with_suffix(".md")
    page.write_text(markdown)
    return page


def rank_correlation(measured: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's, of the cost model's estimates with measured times; None if there are too few, or all are equal."""
    if len(measured) < 3 or any(len(set(column)) == 1 for column in zip(*measured, strict=True)):
        return None
    ranks = [_ranks(np.array(column)) for column in zip(*measured, strict=True)]
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(column: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(column, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _rank_text(measured: Sequence[tuple[float, float]]) -> str:
    rank = rank_correlation(measured)
    return "" if rank is None else f"rank correlation {rank:.2f} with the times of {len(measured)} variants"


def _steps_text(steps: Mapping[str, float]) -> str:
    """Seconds of tuning, and of the steps that took most of them."""
    total = sum(steps.values())
    long = [f"{name} {seconds:.1f}" for name, seconds in steps.items() if seconds >= MIN_STEP_FRACTION * total]
    return f"{total:.1f} s: {', '.join(long)}" if total else ""


def preview_command(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Write the command that shows a function's kernels; it names the function and its arguments where it can."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<none>")
    where = f"{module}:{name}" if module not in (None, "__main__") and "<" not in name else "module:function"
    named = {dtype.numpy: short for short, dtype in DTYPES.items()}
    types = [_type_of(x, named) for x in (*args, *kwargs.values())]
    text = " ".join(types) if all(types) and not kwargs else "f32[..] .."
    return f'python -m mirage_jax preview {where} "{text}"'


def _type_of(x: Any, named: Mapping[Any, str]) -> str:
    """``f32[64,16]``; empty for anything but an array."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype") and x.dtype in named):
        return ""
    return f"{named[x.dtype]}[{','.join(map(str, x.shape))}]"


class RegionControl(Protocol):
    """Decides a region of a function that is in use."""

    def choose(self, choice: Choice) -> Decision:
        """Decide the region so from now on."""
        ...

    def choice(self) -> Choice | None:
        """Find how the user has decided the region; None if that is left to the optimizer."""
        ...


@dataclass(frozen=True)
class RegionReport:
    """One region of a function: its place in the user's source, and the decision."""

    where: tuple[str, ...]
    reference: str  # the region's own muGraph, text form
    decision: Decision
    occurrences: int = 1
    control: RegionControl | None = field(default=None, repr=False, compare=False)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The muGraphs that were tried for the region, best first."""
        return self.decision.variants

    def veto(self) -> Self:
        """Leave the region to XLA from now on: calls of this function in this process run XLA's code for it.

        Regions with the same cache key are left to XLA too. A function that `jax.jit` has traced already keeps the
        decisions of that trace.

        Returns:
            The report on the region, as it is decided now.

        Raises:
            UsageError: the report is of another process, or the region is on a device that is not here.
        """
        return self._chosen(Choice(source=source_lines(self.where)))

    def pin(self, graph: Any) -> Self:
        """Run a muGraph for the region from now on, as `veto` leaves it to XLA.

        The graph passes every gate first: the checker of types, the certificate, the exact check of generated kernels,
        a run on the device, and the float gate on all classes of inputs. Its speed is not asked for.

        Args:
            graph: the text of a muGraph, a `mirage_jax.MuGraph`, which may have tile sizes, or one of `variants`. Its
                inputs have the names of the program's inputs. Axes and values may have any names.

        Returns:
            The report on the region, as it is decided now.

        Raises:
            UsageError: the text is no muGraph, or a gate refuses it; the message says which gate, and why. The region
                stays as it was.
        """
        return self._chosen(Choice.of(graph, source_lines(self.where)))

    def _chosen(self, choice: Choice) -> Self:
        if self.control is None:
            raise UsageError("this report is of no function in this process: ask `explain` of an optimized function")
        return replace(self, decision=self.control.choose(choice))

    def __str__(self) -> str:
        d = self.decision
        times = f" ({self.occurrences} times)" if self.occurrences > 1 else ""
        evidence = [
            ("before: ", d.before),
            ("after:  ", d.after),
            ("measured: ", ", ".join(f"{label} {seconds * 1e6:,.1f} us" for label, seconds in d.timings.items())),
            ("variants: ", "; ".join(f"{n}: {v.brief}" for n, v in enumerate(d.variants))),
            ("cost model: ", _rank_text(d.measured)),
            ("candidates: ", ", ".join(f"{outcome} {count}" for outcome, count in d.tried.items())),
            ("search: ", d.search.replace("\n", "\n        ")),
            ("time: ", _steps_text(d.step_seconds)),
            ("certificate: ", d.certificate),
            ("exact check: ", d.exact),
            ("float gate: ", d.gate),
            ("cache key: ", d.key),
            ("kernels to read: ", d.kernels),
        ]
        out = [f"{d.verdict}{times}: {d.why} [{d.source}]", *d.consequences]
        out += [f"source: {place}" for place in self.places]
        out += [f"{label}{value}" for label, value in evidence[:2] if value is not None]
        out += self.closed_forms
        out += [f"{label}{value}" for label, value in evidence[2:] if value is not None and value != ""]
        out += ["the program:", indent(self.reference, "  ")]
        if d.winner is not None:
            out += ["runs as:", indent(str(d.winner.graph), "  ")]
            out += [f"in one launch each: {d.winner.together}"] if d.winner.together else []
        return "\n".join(out)

    @property
    def places(self) -> list[str]:
        """The source lines, one text for each file."""
        return places(self.where)

    @property
    def closed_forms(self) -> tuple[str, ...]:
        """Operations and bytes of the program and of its winner as formulas in the program's sizes.

        Each line also says where the winner has fewer. There are none for a region that stays or has kernels.
        """
        winner = self.decision.winner
        if winner is None or not all(isinstance(k, Library) for k in winner.graph.kernels):
            return ()
        return closed_forms(parse(self.reference), winner.graph)

    def to_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        d = self.decision
        return {
            "where": list(self.where),
            "occurrences": self.occurrences,
            "decision": "xla" if d.winner is None else "mirage",
            "why": d.why,
            "why_not": None if d.why_not is None else d.why_not.to_json(),
            "source": d.source,
            "platform": d.platform,
            "before": None if d.before is None else asdict(d.before),
            "after": None if d.after is None else asdict(d.after),
            "seconds": dict(d.timings),
            "speedup": d.speedup,
            "measured": [list(pair) for pair in d.measured],
            "variants": [{"graph": v.text, "schedule": v.sizes, "seconds": v.seconds} for v in d.variants],
            "certificate": None if d.certificate is None else json.loads(d.certificate.to_json()),
            "gate": d.gate,
            "exact": d.exact,
            "search": d.search,
            "candidates": dict(d.tried),
            "step_seconds": dict(d.step_seconds),
            "key": d.key,
            "kernels": d.kernels,
            "program": self.reference,
            "graph": None if d.winner is None else str(d.winner.graph),
        }


@dataclass(frozen=True, repr=False)
class Report:
    """Everything `mirage_jax` did with one function at given argument shapes; `str()` is for people."""

    name: str
    regions: tuple[RegionReport, ...]
    left_out: tuple[Any, ...] = ()  # jaxpr_frontend.reasons.LeftOut
    notes: tuple[str, ...] = ()
    whole: WholeFunction | None = None
    preview: str = ""  # the command that shows kernels for the device that a region's `elsewhere` names

    @property
    def hints(self) -> list[str]:
        """A line on how to see kernels that cannot run here, if a region that stays might gain by them."""
        staying = [r.decision.why_not for r in self.regions if r.decision.winner is None]
        is_of_use = any(w is not None and w.elsewhere is not None for w in staying)
        return [f"kernels that a GPU would try: {self.preview}"] if self.preview and is_of_use else []

    @property
    def optimized(self) -> tuple[RegionReport, ...]:
        """The regions that have a winner."""
        return tuple(r for r in self.regions if r.decision.winner is not None)

    def __str__(self) -> str:
        n = len(self.regions)
        out = [f"{self.name}: {n} region{'s' * (n != 1)}, {len(self.optimized)} optimized"]
        out += [] if self.whole is None else [f"whole function: {self.whole}"]
        out += [f"note: {note}" for note in self.notes]
        for i, r in enumerate(self.regions):
            out += [f"region {i}:", indent(str(r), "  ")]
        out += self.hints
        if self.left_out:
            out.append(f"equations left to XLA: {count_left_out(self.left_out)}")
            out += [f"  {line}" for line in _left_out(self.left_out)]
        return "\n".join(out)

    def __repr__(self) -> str:
        count = len(self.regions)
        regions = f"{count} region{'s' * (count != 1)}"
        return f"<mirage_jax report: {self.name}, {regions}, {len(self.optimized)} optimized>"

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own."""
        return f'<iframe srcdoc="{escape(page(self))}" style="width:100%;height:40rem;border:0"></iframe>'

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML page, or as JSON or text, as the name of the file ends.

        Raises:
            UsageError: the name ends in none of ``.html``, ``.json`` and ``.txt``.
        """
        path = Path(file)
        forms = {".html": page, ".json": Report.to_json, ".txt": str}
        if path.suffix not in forms:
            raise UsageError(f"save: found {path.name!r}; allowed are names that end in {', '.join(forms)}")
        path.write_text(forms[path.suffix](self), encoding="utf-8")
        return path

    def save_pins(self, file: str | os.PathLike[str]) -> Path:
        """Write the vetoes and pins of this function's regions to a TOML file, for ``optimize(pins=file)``.

        A file that is there keeps its entries about other regions.

        Raises:
            UsageError: the file is there and is malformed, or it cannot be written.
        """
        choices = {r.decision.key: r.control.choice() for r in self.regions if r.control is not None}
        named = {key: replace(choice, function=self.name) for key, choice in choices.items() if choice is not None}
        return pins.save(file, named)

    def to_json(self) -> str:
        """The whole report, for programs."""
        value = {
            "name": self.name,
            "whole": None if self.whole is None else self.whole.to_dict(),
            "notes": list(self.notes),
            "preview": self.preview,
            "regions": [r.to_dict() for r in self.regions],
            "left_out": [
                {"primitive": x.primitive, "code": str(x.code), "why": x.why, "where": x.where} for x in self.left_out
            ],
        }
        return json.dumps(value, indent=1)


def count_left_out(equations: Sequence[Any]) -> str:
    """Count equations and the user's lines, ``18 on 2 lines``."""
    lines = len(_by_line(equations))
    return f"{len(equations)} on {lines} line{'s' * (lines != 1)}"


def _left_out(equations: Sequence[Any]) -> list[str]:
    """One line of text for each source line, then one for each reason, with whether it matters."""
    lines = sorted(_by_line(equations).values(), key=lambda members: _is_installed(members[0].where))
    out = [_source_line(members) for members in lines[:MAX_SOURCE_LINES]]
    out += [f"and {len(lines) - MAX_SOURCE_LINES} more lines"] if len(lines) > MAX_SOURCE_LINES else []
    by_code: dict[str, list[Any]] = {}
    for x in equations:
        by_code.setdefault(str(x.code), []).append(x)
    for code, members in by_code.items():
        out.append(f"{code} ({'; '.join(dict.fromkeys(x.why for x in members))}): {members[0].advice}")
    return out


def _by_line(equations: Iterable[Any]) -> dict[tuple[str, str], list[Any]]:
    """Group equations by file and line."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for x in equations:
        found = _PLACE.fullmatch(x.where)
        groups.setdefault((found["file"], found["line"]) if found else (x.where, ""), []).append(x)
    return groups


def _source_line(members: Sequence[Any]) -> str:
    """``net.py:12 (f): 3 equations (add 2, rem): dtype 2, unsupported primitive``."""
    (place,) = places(x.where for x in members)
    primitives = ", ".join(map(_counted, Counter(x.primitive for x in members).items()))
    codes = Counter(str(x.code) for x in members)
    reasons = ", ".join(map(_counted, codes.items())) if len(codes) > 1 else str(members[0].code)
    return f"{place}: {len(members)} equation{'s' * (len(members) != 1)} ({primitives}): {reasons}"


def _is_installed(where: str) -> bool:
    found = _PLACE.fullmatch(where)
    return found is not None and _short(found["file"])[1]


def _counted(item: tuple[str, int]) -> str:
    name, n = item
    return f"{name} {n}" if n > 1 else name


_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::\d+)?(?: \((?P<function>.*)\))?")
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")


def places(where: Iterable[str]) -> list[str]:
    """``path/file.py:12:4 (f)`` and others, as one ``file.py:12,30 (f, g)`` per file; installed packages come last."""
    lines: dict[str, dict[int, None]] = {}
    names: dict[str, dict[str, None]] = {}
    for text in dict.fromkeys(where):
        found = _PLACE.fullmatch(text)
        file = found["file"] if found else text or "unknown line"
        lines.setdefault(file, {})
        names.setdefault(file, {})
        if found:
            lines[file][int(found["line"])] = None
            if function := (found["function"] or "").replace(".<locals>", "").replace(".<genexpr>", ""):
                names[file][function] = None
    out: dict[str, bool] = {}
    for file, numbers in lines.items():
        short, is_installed = _short(file)
        functions = list(names[file])
        more = [f"{len(functions) - MAX_NAMES_PER_FILE} more"] if len(functions) > MAX_NAMES_PER_FILE else []
        text = short + (":" + ",".join(map(str, sorted(numbers))) if numbers else "")
        out[text + (f" ({', '.join(functions[:MAX_NAMES_PER_FILE] + more)})" if functions else "")] = is_installed
    return sorted(out, key=out.__getitem__)


def source_lines(where: Iterable[str]) -> tuple[str, ...]:
    """``/here/path/file.py:12:4 (f)`` and others, as ``path/file.py:12``, each once; the user's own files only.

    They are selectors of `skip` and `only`.
    """
    found = [m for m in map(_PLACE.fullmatch, where) if m is not None]
    short = [(*_short(m["file"]), m["line"]) for m in found]
    lines = dict.fromkeys(f"{file}:{line}" for file, is_installed, line in short if not is_installed)
    return tuple(lines)[:MAX_SOURCE_LINES]


def _short(file: str) -> tuple[str, bool]:
    """A path as a reader knows it, and whether it belongs to an installed package or to Python itself."""
    if found := _INSTALLED.match(file):
        return file[found.end() :], True
    library = sysconfig.get_path("stdlib") + os.sep
    if file.startswith(library):
        return file[len(library) :], True
    for folder in (os.getcwd(), OWN_FOLDER):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :], False
    return file, False
