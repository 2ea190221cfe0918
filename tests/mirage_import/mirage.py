"""Saved muGraphs of CMU's Mirage without the importer: what they compute, in numpy, and a writer of small ones.

`evaluate` is written from the file format alone (numbered dimensions, block by block, step by step) and shares no code
with the package, so that what the importer makes of a file can be held against it.
"""

import copy
import itertools
import math
from typing import Any

import numpy as np

type Json = dict[str, Any]
UNARY = {
    "exp": np.exp,
    "square": np.square,
    "sqrt": np.sqrt,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "matmul": np.matmul}


def fold(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """A dimension D seen as (D / size, size), summed over the first."""
    shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return x.reshape(shape).sum(axis)


def apply(kind: str, xs: list[np.ndarray], dimx: int) -> np.ndarray:
    """An operator that is no accumulator."""
    if kind in UNARY:
        return UNARY[kind](*xs)
    if kind in BINARY:
        return BINARY[kind](*xs)
    if kind == "rms_norm":
        return xs[0] / np.sqrt(np.mean(xs[0] ** 2, axis=-1, keepdims=True))
    if kind.startswith("concat_") and kind[7:].isdigit():
        return np.concatenate(xs, int(kind[7:]))
    if kind == "concat_then_matmul":
        return np.concatenate(xs[:2], -1) @ np.concatenate(xs[2:], -2)
    axis = int(kind.removeprefix("reduction_")[0])
    return fold(xs[0], axis, dimx if kind.endswith("to_dimx") else 1)


def accumulate(kind: str, steps: list[np.ndarray], dimx: int) -> np.ndarray:
    """Operand by step -> value after the loop."""
    if kind == "nored":
        return sum(steps[1:], steps[0])
    last = np.concatenate(steps, -1)
    return {
        "red_ld_sum": lambda: last.sum(-1, keepdims=True),
        "red_ld_mean": lambda: last.mean(-1, keepdims=True),
        "red_ld_rms": lambda: np.sqrt((last**2).mean(-1, keepdims=True)),
        "redtox_ld_sum": lambda: fold(last, -1 % last.ndim, dimx),
    }[kind]()


def shape(tensor: Json) -> tuple[int, ...]:
    return tuple(tensor["dim"][: tensor["num_dims"]])


def cut(n: int, sizes: list[tuple[int, int]], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices by dimension; `sizes` are (dimension or -1, number of parts), `n` the numbers of the parts."""
    out = [(0, d) for d in shape]
    for number, (dim, parts) in zip(n, sizes, strict=True):
        if dim >= 0:
            start, length = out[dim]
            out[dim] = start + number * (length // parts), length // parts
    return tuple(slice(start, start + length) for start, length in out)


def block(graph: Json, values: dict[int, np.ndarray], at: tuple[int, ...]) -> dict[int, np.ndarray]:
    """What one block stores, by guid of device tensor."""
    grid, steps = [graph["grid_dim"][a] for a in "xyz"], graph["forloop_range"]
    seen: dict[int, list[np.ndarray]] = {}  # by guid: the value in each step
    after: dict[int, np.ndarray] = {}
    stored = {}
    for op in graph["operators"]:
        kind = op["op_type"][3:-3].replace("forloop_accum_", "accum_")
        args = [t["guid"] for t in op["input_tensors"]]
        if kind == "input":
            x = values[op["dtensor"]["guid"]]
            by = [*zip([op["input_map"][a] for a in "xyz"], grid, strict=True), (op["forloop_dim"], steps)]
            seen[op["output_tensors"][0]["guid"]] = [x[cut((*at, i), by, x.shape)] for i in range(steps)]
        elif kind == "output":
            stored[op["dtensor"]["guid"]] = after[args[0]]
        elif kind.startswith("accum_"):
            after[op["output_tensors"][0]["guid"]] = accumulate(kind[6:], seen[args[0]], graph["reduction_dimx"])
        elif args[0] in after:
            after[op["output_tensors"][0]["guid"]] = apply(kind, [after[a] for a in args], graph["reduction_dimx"])
        else:
            seen[op["output_tensors"][0]["guid"]] = [
                apply(kind, [seen[a][i] for a in args], graph["reduction_dimx"]) for i in range(steps)
            ]
    return stored


def customized(op: Json, values: dict[int, np.ndarray]) -> None:
    graph = op["bgraph"]
    grid = [graph["grid_dim"][a] for a in "xyz"]
    savers = [o for o in graph["operators"] if o["op_type"] == "tb_output_op"]
    for o in savers:
        values[o["dtensor"]["guid"]] = np.full(shape(o["dtensor"]), np.nan)
    for at in itertools.product(*map(range, grid)):
        stored = block(graph, values, at)
        for o in savers:
            x = values[o["dtensor"]["guid"]]
            by = list(zip([o["output_map"][a] for a in "xyz"], grid, strict=True))
            x[cut(at, by, x.shape)] = stored[o["dtensor"]["guid"]]


def evaluate(graph: list[Json], inputs: list[np.ndarray]) -> list[np.ndarray]:
    values: dict[int, np.ndarray] = {}
    given, outputs = iter(inputs), []
    for op in graph:
        args = [values[t["guid"]] for t in op["input_tensors"]]
        match op["op_type"][3:-3]:
            case "input":
                values[op["output_tensors"][0]["guid"]] = next(given)
            case "output":
                outputs += args
            case "customized":
                customized(op, values)
            case kind:
                values[op["output_tensors"][0]["guid"]] = apply(kind, args, 1)
    return outputs


def input_shapes(graph: list[Json]) -> list[tuple[int, ...]]:
    return [shape(op["output_tensors"][0]) for op in graph if op["op_type"] == "kn_input_op"]


def triple(values: tuple[int, ...]) -> Json:
    return dict(zip("xyz", values, strict=True))


class Writer:
    """Writes one graph, an operator at a time, as the peer does; shapes of results are those that numpy has."""

    guids = itertools.count(10_000_000)

    def __init__(self) -> None:
        self.graph: list[Json] = []

    def tensor(self, shape: tuple[int, ...], after: bool | None = None) -> Json:
        dims = [*shape, 0, 0, 0, 0][:4]
        out = {"guid": next(self.guids), "num_dims": len(shape), "dim": dims, "data_type": 921, "layout": "RowMajor"}
        return out if after is None else out | {"after_accum": after, "smem_offset": 0}

    def input(self, *shape: int) -> Json:
        self.graph.append({"op_type": "kn_input_op", "input_tensors": [], "output_tensors": [self.tensor(shape)]})
        return self.graph[-1]["output_tensors"][0]

    def op(self, kind: str, *xs: Json) -> Json:
        found = apply(kind, [np.ones(shape(x)) for x in xs], 1)
        out = self.tensor(found.shape)
        self.graph.append({"op_type": f"kn_{kind}_op", "input_tensors": list(xs), "output_tensors": [out]})
        return out

    def output(self, x: Json) -> None:
        self.graph.append({"op_type": "kn_output_op", "input_tensors": [x], "output_tensors": []})

    def kernel(self, grid: tuple[int, int, int], steps: int, dimx: int = 64) -> "BlockWriter":
        return BlockWriter(self, grid, steps, dimx)


class BlockWriter:
    """Writes one block graph; `done` makes it an operator of the kernel graph."""

    def __init__(self, writer: Writer, grid: tuple[int, int, int], steps: int, dimx: int):
        self.writer, self.grid, self.steps, self.dimx = writer, grid, steps, dimx
        self.ops: list[Json] = []
        self.loads: list[Json] = []
        self.stores: list[Json] = []

    def load(self, x: Json, imap: tuple[int, int, int] = (-1, -1, -1), fmap: int = -1) -> Json:
        tile = list(shape(x))
        for dim, parts in (*zip(imap, self.grid, strict=True), (fmap, self.steps)):
            if dim >= 0:
                tile[dim] //= parts
        out = self.writer.tensor(tuple(tile), after=False)
        self.loads += [x] if x not in self.loads else []
        self._add("tb_input_op", [], [out], dtensor=x, input_map=triple(imap), forloop_dim=fmap)
        return out

    def op(self, kind: str, *xs: Json) -> Json:
        found = apply(kind, [np.ones(shape(x)) for x in xs], self.dimx)
        out = self.writer.tensor(found.shape, after=xs[0]["after_accum"])
        self._add(f"tb_{kind}_op", list(xs), [out])
        return out

    def accum(self, kind: str, x: Json) -> Json:
        found = accumulate(kind, [np.ones(shape(x))], self.dimx)
        out = self.writer.tensor(found.shape, after=True)
        self._add(f"tb_forloop_accum_{kind}_op", [x], [out])
        return out

    def store(self, x: Json, omap: tuple[int, int, int] = (-1, -1, -1)) -> Json:
        whole = list(shape(x))
        for dim, parts in zip(omap, self.grid, strict=True):
            if dim >= 0:
                whole[dim] *= parts
        out = self.writer.tensor(tuple(whole))
        self.stores.append(out)
        self._add("tb_output_op", [x], [], dtensor=out, output_map=triple(omap))
        return out

    def done(self) -> None:
        graph = {
            "graph_level": "thread_block_graph",
            "grid_dim": triple(self.grid),
            "block_dim": triple((128, 1, 1)),
            "forloop_range": self.steps,
            "reduction_dimx": self.dimx,
            "smem_offset": 0,
            "operators": self.ops,
        }
        self.writer.graph.append(
            {
                "op_type": "kn_customized_op",
                "input_tensors": self.loads,
                "output_tensors": self.stores,
                "bgraph": graph,
            }
        )

    def _add(self, op_type: str, inputs: list[Json], outputs: list[Json], **rest: Any) -> None:
        self.ops.append({"op_type": op_type, "input_tensors": inputs, "output_tensors": outputs, **rest})


def checkpoint(*graphs: list[Json]) -> Json:
    """A checkpoint of a search, as early versions saved it: outputs and sums over loops are not marked."""

    def early(x: Any) -> Any:
        if isinstance(x, list):
            return [early(y) for y in x]
        return {k: early(y) for k, y in x.items() if k != "after_accum"} if isinstance(x, dict) else x

    found = [[op for op in copy.deepcopy(graph) if op["op_type"] != "kn_output_op"] for graph in graphs]
    for block in (op["bgraph"] for graph in found for op in graph if "bgraph" in op):
        sums = {op["output_tensors"][0]["guid"]: op for op in block["operators"] if "accum" in op["op_type"]}
        block["operators"] = [op for op in block["operators"] if "accum" not in op["op_type"]]
        for op in block["operators"]:
            if op["op_type"] == "tb_output_op":
                total = sums[op["input_tensors"][0]["guid"]]
                assert total["op_type"] == "tb_forloop_accum_nored_op"
                op["input_tensors"], op["output_tensors"] = total["input_tensors"], total["output_tensors"]
    return {"computation_graph": [], "generated_graphs": early(found), "callstack": []}


def split_attention(heads: int, queries: int, d: int, keys: int, parts: int, steps: int) -> Writer:
    """The peer's winner for attention: keys divided over blocks, a second kernel that combines (no maximum)."""
    w = Writer()
    q, k, v = w.input(heads, queries, d), w.input(heads, d, keys), w.input(heads, keys, d)
    first = w.kernel((heads, parts, 2), steps, dimx=d)
    q1, k1, v1 = first.load(q, (0, -1, 1)), first.load(k, (0, 2, -1), 2), first.load(v, (0, 1, -1), 1)
    e = first.op("exp", first.op("matmul", q1, k1))
    sums = first.store(first.accum("red_ld_sum", e), (0, 2, 1))
    products = first.store(first.accum("nored", first.op("matmul", e, v1)), (0, 2, 1))
    first.done()
    second = w.kernel((heads, 4, 1), 1, dimx=d)
    total = second.accum("red_ld_sum", second.load(sums, (0, 1, -1)))
    whole = second.accum("redtox_ld_sum", second.load(products, (0, 1, -1)))
    out = second.store(second.op("div", whole, total), (0, 1, -1))
    second.done()
    w.output(out)
    return w
