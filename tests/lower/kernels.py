"""muGraphs of the benchmark programs, written by hand, with what they should compute in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction as Q

import ml_dtypes
import numpy as np

from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Load, Op, Schedule, Store, Tensor
from mirage_jax.mugraph.operators import operator

NUMPY = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "i32": np.int32, "bool": np.bool_}
EPS = Q(1, 10**6)


class Block:
    """Short construction of a block graph: ``b.load("X", "ik")``, ``b.dot(x, w, axes="k")``."""

    def __init__(self, name: str, grid: str, loop: str | None = None) -> None:
        self.name, self.grid, self.loop = name, tuple(grid.split()), loop
        self.loads: list[Load] = []
        self.ops: list[Op] = []
        self.stores: list[Store] = []

    def load(self, tensor: str, axes: str) -> str:
        name = f"v{len(self.loads) + len(self.ops)}"
        self.loads.append(Load(name, tensor, tuple(axes.split())))
        return name

    def op(self, name: str, *args: str, **attrs: object) -> str:
        attrs = {k: tuple(v.split()) if k == "axes" else v if isinstance(v, str) else Q(v) for k, v in attrs.items()}
        values = {v.name: v.axes for v in (*self.loads, *self.ops)}
        axes = operator(name).infer(tuple(values[a] for a in args), attrs)
        result = f"v{len(self.loads) + len(self.ops)}"
        self.ops.append(Op(result, name, args, axes, tuple(sorted(attrs.items()))))
        return result

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *args, **attrs: self.op(name, *args, **attrs)

    def store(self, tensor: Tensor, value: str) -> None:
        self.stores.append(Store(tensor, value))

    def build(self) -> BlockGraph:
        return BlockGraph(self.name, self.grid, self.loop, tuple(self.loads), tuple(self.ops), tuple(self.stores))


@dataclass(frozen=True)
class Program:
    """A graph at some sizes, a schedule, and what it should compute."""

    graph: KernelGraph
    schedule: Schedule
    expected: Callable[..., np.ndarray]
    scales: tuple[float, ...] = ()  # of the random inputs, 1 by default

    def inputs(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        scales = self.scales or (1.0,) * len(self.graph.inputs)
        out = []
        for t, scale in zip(self.graph.inputs, scales, strict=True):
            x = rng.standard_normal([self.graph.extent(a) for a in t.axes]) * scale
            out.append((x > 0) if t.dtype == "bool" else x.astype(NUMPY[t.dtype]))
        return out

    def want(self, inputs: list[np.ndarray]) -> np.ndarray:
        return self.expected(*(x.astype(np.float64) for x in inputs))


def tensor(name: str, axes: str, dtype: str) -> Tensor:
    return Tensor(name, tuple(axes.split()), dtype)


def graph(inputs: list[Tensor], kernels: list[Block], outputs: str, extents: Mapping[str, int]) -> KernelGraph:
    return KernelGraph(
        tuple(inputs), tuple(k.build() for k in kernels), tuple(outputs.split()), tuple(sorted(extents.items()))
    )


def schedule(
    *tiles: Mapping[str, int], parts: Mapping[str, int] | None = None, warps: int = 4, stages: int = 2
) -> Schedule:
    kernels = tuple(KernelSchedule(tuple(sorted(t.items())), warps, stages) for t in tiles)
    return Schedule(kernels, tuple(sorted((parts or {}).items())))


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rmsnorm(
    dtype: str = "f16", i: int = 16, k: int = 64, j: int = 32, tiles: Mapping[str, int] | None = None
) -> Program:
    """rms(X) W, the scale applied after the loop."""
    b = Block("rmsnorm", "i j", "k")
    x, w = b.load("X", "i k"), b.load("W", "k j")
    total = b.acc(b.sum(b.mul(x, x), axes="k"))
    product = b.acc(b.dot(x, w, axes="k"))
    scale = b.pow(total, scale=Q(1, k), offset=EPS, exponent=Q(-1, 2))
    b.store(tensor("Y", "i j", dtype), b.mul(product, scale))
    g = graph([tensor("X", "i k", dtype), tensor("W", "k j", dtype)], [b], "Y", {"i": i, "j": j, "k": k})
    tiles = tiles or {"i": 16, "j": 16, "k": 32}
    return Program(g, schedule(tiles), lambda x, w: rms(x) @ w)


def gated_mlp(
    dtype: str = "f16", i: int = 16, k: int = 64, j: int = 32, tiles: Mapping[str, int] | None = None
) -> Program:
    """silu(X W1) * (X W2), two accumulators in one loop."""
    b = Block("gated_mlp", "i j", "k")
    x, w1, w2 = b.load("X", "i k"), b.load("W1", "k j"), b.load("W2", "k j")
    gate, up = b.acc(b.dot(x, w1, axes="k")), b.acc(b.dot(x, w2, axes="k"))
    b.store(tensor("Y", "i j", dtype), b.mul(b.mul(gate, b.logistic(gate)), up))
    inputs = [tensor("X", "i k", dtype), tensor("W1", "k j", dtype), tensor("W2", "k j", dtype)]
    g = graph(inputs, [b], "Y", {"i": i, "j": j, "k": k})
    tiles = tiles or {"i": 16, "j": 16, "k": 32}
    return Program(g, schedule(tiles), lambda x, a, c: (x @ a) / (1 + np.exp(-(x @ a))) * (x @ c), (1.0, 0.3, 0.3))


def lora(
    dtype: str = "f16", i: int = 16, k: int = 64, j: int = 32, r: int = 8, tiles: Mapping[str, int] | None = None
) -> Program:
    """X W + (X A) B in one kernel: both products with X in the loop, the product with B after it."""
    b = Block("lora", "i j", "k")
    x, w, a, c = b.load("X", "i k"), b.load("W", "k j"), b.load("A", "k r"), b.load("B", "r j")
    main, low = b.acc(b.dot(x, w, axes="k")), b.acc(b.dot(x, a, axes="k"))
    b.store(tensor("Y", "i j", dtype), b.add(main, b.dot(low, c, axes="r")))
    inputs = [
        tensor("X", "i k", dtype),
        tensor("W", "k j", dtype),
        tensor("A", "k r", dtype),
        tensor("B", "r j", dtype),
    ]
    g = graph(inputs, [b], "Y", {"i": i, "j": j, "k": k, "r": r})
    tiles = tiles or {"i": 16, "j": 16, "k": 32}
    return Program(g, schedule(tiles), lambda x, w, a, b: x @ w + x @ a @ b, (1.0, 1.0, 0.3, 0.3))


def ntrans(dtype: str = "f16", i: int = 4, k: int = 48, tiles: Mapping[str, int] | None = None) -> Program:
    """rms(X + a (rms(H) - X)), one row per block."""
    b = Block("ntrans", "i")
    h, x, a = b.load("H", "i k"), b.load("X", "i k"), b.load("a", "i k")

    def norm(v: str) -> str:
        return b.mul(v, b.pow(b.sum(b.mul(v, v), axes="k"), scale=Q(1, k), offset=EPS, exponent=Q(-1, 2)))

    b.store(tensor("Y", "i k", dtype), norm(b.add(x, b.mul(a, b.add(norm(h), x, cb=-1)))))
    g = graph([tensor(n, "i k", dtype) for n in "HXa"], [b], "Y", {"i": i, "k": k})
    return Program(g, schedule(tiles or {"i": 1}), lambda h, x, a: rms(x + a * (rms(h) - x)))


def attention_step(b: Block, q: str, k: str, v: str, scale: object) -> tuple[str, str, str]:
    """Online softmax over the loop axis n: (O, l, m), all relative to the running m."""
    s = b.dot(q, k, axes="d")
    m = b.shift(s, axes="n", scale=scale)
    p = b.exps(s, m, scale=scale)
    return b.accs(b.dot(p, v, axes="n"), m), b.accs(b.sum(p, axes="n"), m), m


def attention_inputs(dtype: str) -> list[Tensor]:
    return [tensor("Q", "h i d", dtype), tensor("K", "h d n", dtype), tensor("V", "h n e", dtype)]


def attention_sizes(h: int, i: int, n: int, d: int) -> dict[str, int]:
    return {"h": h, "i": i, "n": n, "d": d, "e": d}


def attention(
    dtype: str = "f16", h: int = 2, i: int = 16, n: int = 64, d: int = 16, scale: object = 1,
    tiles: Mapping[str, int] | None = None, spread: float = 1.0,
) -> Program:  # fmt: skip
    """softmax(scale Q K) V in one kernel."""
    b = Block("attention", "h i", "n")
    q, k, v = b.load("Q", "h i d"), b.load("K", "h d n"), b.load("V", "h n e")
    o, total, _ = attention_step(b, q, k, v, scale)
    b.store(tensor("Y", "h i e", dtype), b.div(o, total))
    g = graph(attention_inputs(dtype), [b], "Y", attention_sizes(h, i, n, d))
    tiles = tiles or {"h": 1, "i": 16, "n": 32}
    return Program(g, schedule(tiles), lambda q, k, v: softmax(float(Q(scale)) * q @ k) @ v, (spread, 1.0, 1.0))


def split_attention(
    dtype: str = "f16", h: int = 2, i: int = 16, n: int = 64, d: int = 16, scale: object = 1, parts: int = 2,
    tiles: Mapping[str, int] | None = None, combine: Mapping[str, int] | None = None,
) -> Program:  # fmt: skip
    """The same, with the keys divided over blocks and a second kernel that combines the parts."""
    b = Block("split", "h i n.g", "n")
    q, k, v = b.load("Q", "h i d"), b.load("K", "h d n"), b.load("V", "h n e")
    o, total, m = attention_step(b, q, k, v, scale)
    b.store(tensor("O", "h i e n.g", "f32"), o)
    b.store(tensor("L", "h i n.g", "f32"), total)
    b.store(tensor("M", "h i n.g", "f32"), b.last(m))
    c = Block("combine", "h i")
    o, total, m = c.load("O", "h i e n.g"), c.load("L", "h i n.g"), c.load("M", "h i n.g")
    top = c.shift(m, axes="n.g")
    o, total = (c.sum(c.rescale(x, m, top), axes="n.g") for x in (o, total))
    c.store(tensor("Y", "h i e", dtype), c.div(o, total))
    g = graph(attention_inputs(dtype), [b, c], "Y", attention_sizes(h, i, n, d))
    sizes = schedule(tiles or {"h": 1, "i": 16, "n": 16}, combine or {"h": 1, "i": 1}, parts={"n": parts})
    return Program(g, sizes, lambda q, k, v: softmax(float(Q(scale)) * q @ k) @ v)


def qknorm_attention(
    dtype: str = "f16", h: int = 2, i: int = 16, n: int = 64, d: int = 16, tiles: Mapping[str, int] | None = None
) -> Program:
    """softmax(rms(Q) K) rms(V): the scale of Q before the loop, that of V on the probabilities."""
    b = Block("qknorm", "h i", "n")
    q, k, v = b.load("Q", "h i d"), b.load("K", "h d n"), b.load("V", "h n e")
    rq = b.pow(b.dot(q, q, axes="d"), scale=Q(1, d), offset=EPS, exponent=Q(-1, 2))
    rv = b.pow(b.dot(v, v, axes="e"), scale=Q(1, d), offset=EPS, exponent=Q(-1, 2))
    s = b.dot(b.mul(q, rq), k, axes="d")
    m = b.shift(s, axes="n")
    p = b.exps(s, m)
    total = b.accs(b.sum(p, axes="n"), m)
    o = b.accs(b.dot(b.mul(p, rv), v, axes="n"), m)
    b.store(tensor("Y", "h i e", dtype), b.div(o, total))
    g = graph(attention_inputs(dtype), [b], "Y", attention_sizes(h, i, n, d))
    tiles = tiles or {"h": 1, "i": 16, "n": 32}
    return Program(g, schedule(tiles), lambda q, k, v: softmax(rms(q) @ k) @ rms(v))


PROGRAMS: dict[str, Callable[..., Program]] = {
    f.__name__: f for f in (rmsnorm, gated_mlp, lora, ntrans, attention, split_attention, qknorm_attention)
}

RAGGED: dict[str, dict[str, object]] = {
    "rmsnorm": {"i": 5, "k": 50, "j": 27},
    "gated_mlp": {"i": 19, "k": 40, "j": 20},
    "lora": {"i": 7, "k": 50, "j": 20, "r": 5},
    "ntrans": {"i": 3, "k": 37},
    "attention": {"i": 20, "n": 50, "d": 24, "scale": Q(1, 4)},
    "split_attention": {"i": 20, "n": 50, "d": 24, "parts": 3, "scale": Q(1, 4)},
    "qknorm_attention": {"i": 20, "n": 50, "d": 24},
}
