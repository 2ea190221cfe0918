"""Right muGraphs to start from, found by the search for programs of the benchmark, for others, and for random ones.

Each is found at the program's (small) sizes and then given tiny ones, many equal, so that everything about it can be
evaluated in milliseconds, and so that operands can be transposed and axes taken for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.programs import program
from mirage_jax.errors import MirageError, UnsupportedError
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.builder import library, tensor
from mirage_jax.mugraph.graph import Axis, KernelGraph, Tensor
from mirage_jax.mugraph.operators import operator
from mirage_jax.mugraph.passes.merge_axes import merge_axes
from mirage_jax.search.candidates import structure, with_sizes
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.kernels import Space

SPACE = Space(max_ops=14, max_kernels=2)
SECONDS, STATES = 60.0, 10_000  # states decide: a busy machine is to find the same
SIZES = (4, 5, 7)
BENCHMARK = (
    "rmsnorm_b1", "lora_b1", "gated_mlp_b1", "gqa_b1", "qknorm_gqa_b1", "ntrans_b1", "mlp", "moe", "abv",
    "linear_attention",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A program and a right candidate for it, at the same tiny sizes."""

    name: str
    reference: KernelGraph
    candidate: KernelGraph


def sources(seed: int, names: Sequence[str] | None = None, randoms: int = 40, each: int = 6) -> list[Source]:
    """Find up to `each` candidates for every named program (all by default) and for `randoms` random ones."""
    rng = Random(seed)
    captured = [(n, i, g) for n in names or (*BENCHMARK, *OTHERS) for i, g in enumerate(_captured(n))]
    graphs = {f"{n}.{i}" if i else n: graph for n, i, graph in captured}
    graphs |= {f"random {i}": random_program(rng) for i in range(randoms)}
    return [s for name, graph in graphs.items() for s in _found(name, graph, rng, each)]


def _found(name: str, graph: KernelGraph, rng: Random, each: int) -> Iterator[Source]:
    try:
        candidates, _ = search(graph, DEVICES["H200"], SPACE, SECONDS, STATES)
    except UnsupportedError:  # the search does not cover some random ones
        return
    kernels, algebra = ([c.graph for c in candidates if c.family == f] for f in ("kernels", "algebra"))
    chosen = [*algebra[:1], *rng.sample(kernels, min(each - 1, len(kernels)))]
    for n, candidate in enumerate(chosen):
        sizes = {a: rng.choice(SIZES) for a, _ in graph.extents}
        try:
            yield Source(f"{name} {n}", with_sizes(structure(graph), sizes), with_sizes(structure(candidate), sizes))
        except MirageError:  # a window longer than these axes, for instance
            continue


def _captured(name: str) -> list[KernelGraph]:
    """The regions of a program."""
    fn, shapes, dtype = OTHERS[name] if name in OTHERS else _benchmark(name)
    regions = analyse(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))).regions
    return [merge_axes(region.graph) for region in regions]


def _benchmark(name: str) -> tuple[Callable[..., Any], Sequence[tuple[int, ...]], Any]:
    p = program(name)
    return p.fn, [s for _, s in p.shapes], jnp.dtype(p.dtype)


# --- programs with masks, other norms and activations, several outputs


def _masked(mask: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attend with the mask."""
        i, n = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]
        return jax.nn.softmax(jnp.where(mask(i, n), q @ k.T / 8, -jnp.inf)) @ v

    return attend


def _layer_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    d = x - x.mean(-1, keepdims=True)
    return d * jax.lax.rsqrt((d * d).mean(-1, keepdims=True) + 1e-3) @ w


def _two_outputs(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    h = x @ a
    return jnp.exp(h / 32) @ b, h @ b


def _threshold(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Scores above a threshold only."""
    s = q @ k.T
    return jnp.where(s > 0, s, 0) @ v


OTHERS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]], Any]] = {
    "causal": (_masked(lambda i, n: n <= i), [(1024, 64)] * 3, "float32"),
    "window": (_masked(lambda i, n: (n <= i) & (n > i - 3)), [(1024, 64)] * 3, "float32"),
    "layer_norm": (_layer_norm, [(64, 1024), (1024, 768)], "float32"),
    "log_softmax": (lambda x, w: jax.nn.log_softmax(x @ w), [(64, 512), (512, 768)], "float32"),
    "two_outputs": (_two_outputs, [(64, 1024), (1024, 512), (512, 768)], "float32"),
    "relu_mlp": (lambda x, a, b: jnp.clip(x @ a, 0, 6) @ b, [(64, 512), (512, 1024), (1024, 256)], "float32"),
    "gelu_mlp": (
        lambda x, a, c: jax.nn.gelu(x @ a + c, approximate=False),
        [(64, 1024), (1024, 768), (768,)],
        "float32",
    ),
    "exp_of_sum": (lambda x, y, w: jnp.exp(x / 16 + y) @ w, [(64, 1024), (64, 1024), (1024, 768)], "float32"),
    "gram": (lambda x, y: x @ x.T - y @ y.T, [(64, 1024), (64, 1024)], "float32"),
    "distances": (lambda x, y: ((x[:, None] - y[None]) ** 2).sum(-1), [(256, 512), (768, 512)], "float32"),
    "threshold": (_threshold, [(64, 64), (1024, 64), (1024, 32)], "float32"),
}


# --- random programs

ATOMS = {"a": ("i",), "x": ("i", "j"), "y": ("i", "j"), "w": ("j", "k"), "v": ("k",)}
EXTENTS = (("i", 208), ("j", 1216), ("k", 272))
UNARY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("exp", {"scale": Fraction(1, 8)}),
    ("affine", {"scale": Fraction(-1, 2), "offset": Fraction(1, 3)}),
    ("pow", {"exponent": Fraction(2)}),
    ("tanh", {}),
    ("logistic", {}),
    ("abs", {}),
)
BINARY = ("mul", "mul", "add", "add", "maximum", "div")


def random_program(rng: Random, steps: int = 7) -> KernelGraph:
    """Draw library operators, each on the last value and any value before; the last result has one axis or two."""
    values: list[Tensor] = [tensor(n, axes) for n, axes in ATOMS.items()]
    kernels = []
    last = values[rng.randrange(len(values))]
    while len(kernels) < steps or not last.axes:
        op, others, attrs = _random_operator(rng, last, values)
        args = [(t, t.axes) for t in (last, *others)]
        axes = operator(op).infer(tuple(a for _, a in args), attrs)
        last = tensor(f"t{len(kernels)}", axes)
        kernels.append(library(op, args, last, **attrs))
        values.append(last)
    used = {x.tensor for k in kernels for x in k.loads}
    return KernelGraph(
        tuple(t for t in values if t.name in ATOMS and t.name in used), tuple(kernels), (last.name,), EXTENTS
    )


def _random_operator(rng: Random, last: Tensor, values: list[Tensor]) -> tuple[str, list[Tensor], dict[str, Any]]:
    axes: tuple[Axis, ...] = last.axes
    shared = [t for t in values if set(t.axes) & set(axes)]
    kind = rng.choice(("unary", "binary", "binary", "dot", "dot", "sum"))
    if kind == "sum" and len(axes) > 1:
        return rng.choice(("sum", "sum", "max")), [], {"axes": (rng.choice(axes),)}
    if kind == "dot" and shared:
        other = rng.choice(shared)
        axis = rng.choice(sorted(set(other.axes) & set(axes)))
        if set(other.axes) | set(axes) != {axis}:
            return "dot", [other], {"axes": (axis,)}
    if kind == "unary":
        op, attrs = rng.choice(UNARY)
        return op, [], dict(attrs)
    return rng.choice(BINARY), [rng.choice(values)], {}
