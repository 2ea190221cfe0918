"""Times the kernels that two commits write for the same graphs and sizes: what does a change of the lowering cost?

    python scripts/compare-lowerings.py write DECISIONS FILE    # at each commit, on any machine; DECISIONS is a cache
    python scripts/compare-lowerings.py time BEFORE AFTER TABLE   # on a GPU; the two files are in turn in each profile

Texts that are equal are not timed. Both run by the code of the commit that times them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax

from mirage_jax import timing
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import schedule_from_json

try:
    from mirage_jax.lower.runtime import launch
except ImportError:  # commits before the package
    from mirage_jax.lower import launch


def written(decisions: Path) -> list[dict[str, Any]]:
    """The graph, and the texts, of each winner in a cache; winners with library operators are left out."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(decisions.rglob("*.json")):
        entry = json.loads(file.read_text()).get("entry")
        if not isinstance(entry, dict) or not (entry.get("graph") and entry.get("schedule")):
            continue
        key = json.dumps([entry["graph"], entry["schedule"]], sort_keys=True)
        launches = list(launch.launches(parse(entry["graph"]), schedule_from_json(entry["schedule"])))
        if key not in found and all(hasattr(x, "text") for x in launches):
            found[key] = {"graph": entry["graph"], "kernels": [_fields(x) for x in launches]}
    return [found[key] for key in sorted(found)]


def _fields(x: Any) -> Any:
    if dataclasses.is_dataclass(x):
        fields = (f.name for f in dataclasses.fields(x) if f.name != "numbers")
        return {name: _fields(getattr(x, name)) for name in fields}
    return [_fields(y) for y in x] if isinstance(x, tuple) else x


def source(fields: dict[str, Any]) -> Any:
    """A kernel from its fields. Commits before `backend` said by `descriptors` which language a text is in."""
    from mirage_jax.lower.hopper.shared_memory import Descriptor
    from mirage_jax.lower.kernel_source import KernelSource

    described = [d and Descriptor(*map(tuple, d.values())) for d in fields["descriptors"]]
    backend = fields.get("backend") or ("hopper" if described else "triton")
    lists = {k: tuple(map(tuple, v)) if k == "shapes" else tuple(v) for k, v in fields.items() if isinstance(v, list)}
    return KernelSource(**(fields | lists | {"descriptors": tuple(described), "backend": backend}))


def compiled(graph: Any, kernels: list[dict[str, Any]], args: Any) -> Any:
    """The program of some kernels, for arguments in the order of the graph's inputs."""
    from mirage_jax.lower.triton.two_forms import arguments

    sources = [source(k) for k in kernels]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        env = {t.name: x for t, x in zip(graph.inputs, arrays, strict=True)}
        for s in sources:
            env |= zip(s.outputs, launch.call_kernel(s, arguments(s.inputs, env)), strict=True)
        return [env[name] for name in graph.outputs]

    return jax.jit(run).lower(*args).compile()


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """A line of a table for each winner."""
    from mirage_jax.compiler.isolation.child import draw
    from mirage_jax.mugraph.dtypes import numpy_dtype

    lines = ["| inputs | kernels | before | after | longer by |", "|---|---:|---:|---:|---:|"]
    for old, new in zip(before, after, strict=True):
        assert old["graph"] == new["graph"]
        graph = parse(old["graph"])
        shapes = [tuple(map(graph.extent, t.axes)) for t in graph.inputs]
        title = ", ".join(f"{t.dtype}{list(shape)}" for t, shape in zip(graph.inputs, shapes, strict=True))
        if [k["text"] for k in old["kernels"]] == [k["text"] for k in new["kernels"]]:
            lines.append(f"| {title} | {len(new['kernels'])} | | | the same text |")
            continue
        pairs = zip(shapes, graph.inputs, strict=True)
        types = tuple(jax.ShapeDtypeStruct(shape, numpy_dtype(t.dtype)) for shape, t in pairs)
        sets = timing.sets_for(sum(t.size * t.dtype.itemsize for t in types))
        args = draw(types, sets)
        programs = {name: compiled(graph, x["kernels"], args[0]) for name, x in (("before", old), ("after", new))}
        times = timing.time_steps({n: timing.in_turn(f, args) for n, f in programs.items()}, sets, 8)
        a, b = (times[name].seconds for name in programs)
        lines.append(f"| {title} | {len(new['kernels'])} | {a * 1e6:.2f} us | {b * 1e6:.2f} us | {b / a - 1:+.1%} |")
        print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    match sys.argv[1:]:
        case "write", decisions, file:
            Path(file).write_text(json.dumps(written(Path(decisions))))
        case "time", before, after, table:
            rows = compare(*(json.loads(Path(f).read_text()) for f in (before, after)))
            Path(table).write_text("\n".join(rows) + "\n")
        case _:
            sys.exit(__doc__)
