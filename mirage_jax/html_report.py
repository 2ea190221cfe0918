"""A report as one HTML page: no script, no network, light and dark, on a phone too.

Per region: the source lines, XLA's time, ours and the limit, the muGraphs before and after as pictures and as
text, the model's estimates against the measured times, the verdict of every gate, and the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mirage_jax.mugraph.graph import BlockGraph, Kernel, KernelGraph
from mirage_jax.mugraph.parser import parse

BOX_WIDTH, BOX_HEIGHT, GAP = 190, 40, 26  # of a node in a picture, and between nodes, in pixels
MAX_NODES = 60  # of a graph that is drawn; a larger one is only written
MAX_KERNEL_BYTES = 1 << 20  # of a file of kernels that is shown
PLOT_SIZE = 260  # pixels of a side of the plot of variants

STYLE = """
:root { color-scheme: light dark; --line: #8888; --ours: #2a7de1; --xla: #d9822b; --limit: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; font-size: 12px; }
section { border-top: 2px solid var(--line); margin-top: 2rem; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; } svg text { font: 11px ui-monospace, monospace; fill: currentColor; }
.box { fill: Canvas; stroke: currentColor; } .kernel { stroke: var(--ours); stroke-width: 2; }
.dot { fill: var(--ours); }
.edge { stroke: currentColor; opacity: .5; fill: none; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
.bar { height: 1.1rem; border-radius: 3px; min-width: 2px; background: var(--ours); }
.xla { background: var(--xla); } .limit { background: var(--limit); }
"""


def page(report: Any) -> str:
    """Write a `Report` as a page."""
    count = f"{len(report.regions)} region{'s' * (len(report.regions) != 1)}, {len(report.optimized)} optimized"
    lines = [f"<p>{escape(count)}</p>"]
    lines += [] if report.whole is None else [f"<p>Whole function: {escape(str(report.whole))}</p>"]
    lines += [f"<p>Note: {escape(note)}</p>" for note in report.notes]
    links = "".join(
        f'<li><a href="#region-{i}">region {i}</a>: {escape(r.decision.verdict)}, {escape(r.decision.why)}</li>'
        for i, r in enumerate(report.regions)
    )
    sections = "".join(f'<section id="region-{i}">{_region(i, r)}</section>' for i, r in enumerate(report.regions))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.name)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(report.name)}</h1>{''.join(lines)}<ul>{links}</ul>{sections}"
        f'<section id="text"><h2>As text</h2><pre>{escape(str(report))}</pre></section></body></html>\n'
    )


def _region(number: int, region: Any) -> str:
    d = region.decision
    winner = None if d.winner is None else d.winner.graph
    facts = {
        "Source": "; ".join(region.places),
        "Decision": f"{d.verdict}: {d.why} [{d.source}]",
        "What to do": "" if d.why_not is None else d.why_not.advice,
        "Elsewhere": str((d.why_not and d.why_not.elsewhere) or ""),
        "Before": str(d.before or ""),
        "After": str(d.after or ""),
        **{
            name[0].upper() + name[1:]: text for name, _, text in (line.partition(": ") for line in region.closed_forms)
        },
        "Certificate": str(d.certificate or ""),
        "Exact check": d.exact,
        "Float gate": d.gate,
        "Candidates": ", ".join(f"{outcome} {count}" for outcome, count in d.tried.items()),
        "Cache key": d.key,
    }
    described = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    graphs = _graph("The program", parse(region.reference))
    graphs += "" if winner is None else _graph("Runs as", winner)
    more = [_bars(_times(d)), f"<dl>{described}</dl>", _plot(d.measured), f'<div class="two">{graphs}</div>']
    return "".join([f"<h2>Region {number}</h2>", *more, _kernels(d)])


def _times(d: Any) -> dict[str, float]:
    """Seconds by label: measured ones, or the model's where a region stays."""
    if d.why_not is None:
        measured: Mapping[str, float] = d.timings
        return {{"xla": "XLA", "mirage": "ours"}.get(label, label): seconds for label, seconds in measured.items()}
    how = "" if d.why_not.is_measured else ", estimated"
    found = {f"XLA{how}": d.why_not.xla, f"best candidate{how}": d.why_not.best, "limit": d.why_not.limit}
    return {label: seconds for label, seconds in found.items() if seconds}


def _bars(times: Mapping[str, float]) -> str:
    """Draw times as bars, the longest first."""
    longest = max(times.values(), default=0.0)
    if longest <= 0:
        return ""
    colours = {"X": "xla", "l": "limit"}  # by the label's first letter
    rows = (
        f"<div>{escape(label)}: {1e6 * seconds:,.1f} us</div>"
        f'<div class="bar {colours.get(label[0], "ours")}" style="width:{100 * seconds / longest:.1f}%"></div>'
        for label, seconds in sorted(times.items(), key=lambda item: -item[1])
    )
    return f"<div>{''.join(rows)}</div>"


def _plot(measured: Sequence[tuple[float, float]]) -> str:
    """Draw the model's estimate of each variant against its measured time; on the line both are equal."""
    points = [(model, real) for model, real in measured if model > 0 and real > 0]
    if len(points) < 2:
        return ""
    most = max(max(point) for point in points)
    dots = "".join(
        f'<circle class="dot" cx="{PLOT_SIZE * model / most:.1f}" cy="{PLOT_SIZE * (1 - real / most):.1f}" r="3"/>'
        for model, real in points
    )
    title = f"{len(points)} variants: estimated (across) against measured (up), to {1e6 * most:,.1f} us"
    return (
        f'<figure><svg viewBox="-6 -6 {PLOT_SIZE + 12} {PLOT_SIZE + 12}" width="{PLOT_SIZE}" role="img">'
        f'<title>{title}</title><path class="edge" d="M0 {PLOT_SIZE}L{PLOT_SIZE} 0"/>'
        f'<path class="box" d="M0 0V{PLOT_SIZE}H{PLOT_SIZE}"/>{dots}</svg><figcaption>{title}</figcaption></figure>'
    )


def _kernels(d: Any) -> str:
    """Show the generated kernels: their file, if it is still there, or the text of kernels that were never stored."""
    try:
        file = Path(d.kernels)
        text = file.read_text(errors="replace") if d.kernels and file.stat().st_size <= MAX_KERNEL_BYTES else ""
    except OSError:
        text = ""
    if not d.kernels and getattr(d.winner, "has_kernels", False):
        text = d.winner.readable
    return f"<details><summary>Kernels</summary><pre>{escape(text)}</pre></details>" if text else ""


# ---------------------------------------------------------------------- graphs


def _graph(title: str, graph: KernelGraph) -> str:
    text = f"<details><summary>muGraph</summary><pre>{escape(str(graph))}</pre></details>"
    return f"<div><h3>{title}</h3>{drawing(graph)}{text}</div>"


def drawing(graph: KernelGraph) -> str:
    """Draw a muGraph as SVG: inputs at the top, then kernels and library operators below all that they read."""
    if len(graph.inputs) + len(graph.kernels) > MAX_NODES:
        return ""
    level = {t.name: 0 for t in graph.inputs}
    rows: dict[int, list[tuple[Kernel | None, list[str]]]] = {0: [(None, [str(t)]) for t in graph.inputs]}
    at: dict[str, tuple[int, int]] = {t.name: (0, n) for n, t in enumerate(graph.inputs)}
    for kernel in graph.kernels:
        own = 1 + max((level[load.tensor] for load in kernel.loads), default=0)
        row = rows.setdefault(own, [])
        for store in kernel.stores:
            level[store.tensor.name], at[store.tensor.name] = own, (own, len(row))
        row.append((kernel, _label(kernel)))
    width = max(map(len, rows.values())) * (BOX_WIDTH + GAP)
    height = (max(rows) + 1) * (BOX_HEIGHT + GAP)
    edges = "".join(_edge(at[load.tensor], place) for kernel, place in _places(rows) for load in kernel.loads)
    boxes = "".join(
        _box(level, n, kernel, label) for level, row in rows.items() for n, (kernel, label) in enumerate(row)
    )
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img"><title>muGraph</title>{edges}{boxes}</svg>'


def _places(rows: Mapping[int, Iterable[tuple[Kernel | None, object]]]) -> Iterator[tuple[Kernel, tuple[int, int]]]:
    for level, row in rows.items():
        for n, (kernel, _) in enumerate(row):
            if kernel is not None:
                yield kernel, (level, n)


def _label(kernel: Kernel) -> list[str]:
    """Two lines: the operator or the kernel, and the tensors that it stores."""
    made = " ".join(str(store.tensor) for store in kernel.stores)
    if isinstance(kernel, BlockGraph):
        loop = f" loop {kernel.loop}" if kernel.loop else ""
        return [f"{kernel.name}: {len(kernel.ops)} operators{loop}", made]
    return [kernel.ops[0].op, made]


def _corner(place: tuple[int, int]) -> tuple[int, int]:
    level, n = place
    return GAP // 2 + n * (BOX_WIDTH + GAP), level * (BOX_HEIGHT + GAP) + GAP // 2


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x0, y0), (x1, y1) = _corner(start), _corner(end)
    return f'<path class="edge" d="M{x0 + BOX_WIDTH // 2} {y0 + BOX_HEIGHT}L{x1 + BOX_WIDTH // 2} {y1}"/>'


def _box(level: int, n: int, kernel: Kernel | None, label: Sequence[str]) -> str:
    x, y = _corner((level, n))
    kind = "box kernel" if isinstance(kernel, BlockGraph) else "box"
    radius = 6 if kernel is not None else BOX_HEIGHT // 2
    lines = "".join(
        f'<text x="{x + BOX_WIDTH // 2}" y="{y + 16 + 14 * i}" text-anchor="middle">{escape(_cut(text))}</text>'
        for i, text in enumerate(label)
    )
    rect = f'<rect class="{kind}" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="{radius}"/>'
    return f"<g><title>{escape(' | '.join(label))}</title>{rect}{lines}</g>"


def _cut(text: str, most: int = 27) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
