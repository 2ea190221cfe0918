"""Two Flax blocks over the bytes of a real text, on the CPU: what `mirage_jax.optimize` does with them, and proves.

The first is a transformer block, multi-head softmax attention and SwiGLU. The second has linear attention, (Q K') V
without a softmax, written the way one thinks of it: scores first. XLA evaluates it as written, at a cost that grows
with the square of the text; the optimizer finds Q (K' V) by itself, proves that it is the same function, and measures
that it is faster. Where it finds nothing faster, XLA's own code runs.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported; unset it to use another device

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

import mirage_jax
from mirage_jax import timing

TEXT = Path(__file__).parent / "data" / "alice.txt"


def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, axis=-1), v)


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("hqd,hkd->hqk", q, k)
    return jnp.einsum("hqk,hkd->hqd", scores, v) / q.shape[-2]


class Block(nnx.Module):
    """A pre-norm transformer block whose attention is a function of queries, keys and values, [heads, bytes, width]."""

    def __init__(self, attend: Callable[..., jax.Array], width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.attend, self.heads = attend, heads
        linear = lambda m, n: nnx.Linear(m, n, use_bias=False, rngs=rngs)  # noqa: E731
        self.norm_attention, self.norm_mlp = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = linear(width, 4 * width), linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm_attention(x)
        split = lambda y: y.reshape(len(x), self.heads, -1).swapaxes(0, 1)  # noqa: E731
        mixed = self.attend(split(self.query(h)), split(self.key(h)), split(self.value(h)))
        x = x + self.out(mixed.swapaxes(0, 1).reshape(x.shape))
        h = self.norm_mlp(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class ByteModel(nnx.Module):
    """Bytes to logits: embedding, one block, a projection onto the 256 bytes."""

    def __init__(self, attend: Callable[..., jax.Array], width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.block = Block(attend, width, heads, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        return self.head(self.block(self.embed(text)))


def forward(model: ByteModel, text: jax.Array) -> jax.Array:
    return model(text)


def in_float64(model: ByteModel, text: jax.Array) -> np.ndarray:
    """The same model with its weights and all arithmetic in float64: what both errors are measured against."""
    graph, state = nnx.split(model)
    weights = jax.tree.map(np.asarray, state)
    with jax.enable_x64(True):
        wide = nnx.merge(graph, jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), weights))
        return np.asarray(jax.jit(forward)(wide, jnp.asarray(np.asarray(text))))


def max_error(found: jax.Array, reference: np.ndarray) -> float:
    """Relative to the largest logit."""
    return float(np.abs(np.asarray(found, np.float64) - reference).max() / np.abs(reference).max())


@contextmanager
def step(console: Console, what: str) -> Iterator[None]:
    """Shows what is going on: a spinner on a terminal, and a line with the seconds it took everywhere."""
    start = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"{what}: {time.perf_counter() - start:.1f} s", highlight=False)


def demonstrate(
    name: str, model: ByteModel, text: jax.Array, budget: str, rounds: int, console: Console
) -> tuple[list[str], bool]:
    """Optimize one model and print the report; its row of the closing table, and whether it is as accurate as XLA's."""
    console.rule(name)
    plain, optimized = jax.jit(forward), mirage_jax.optimize(forward, budget=budget)
    with step(console, f"{name}: searching, proving, measuring"):
        report = optimized.explain(model, text)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    with step(console, f"{name}: comparing with float64"):
        reference = in_float64(model, text)
        results = {"xla": plain(model, text), "mirage": optimized(model, text)}
        errors = {label: max_error(result, reference) for label, result in results.items()}
    with step(console, f"{name}: timing beside plain jax.jit"):
        calls: dict[str, timing.Call] = {
            "xla": lambda: jax.block_until_ready(plain(model, text)),
            "mirage": lambda: jax.block_until_ready(optimized(model, text)),
        }
        times = timing.time_wall(calls, rounds)
    ratio = timing.ratio(times["xla"], times["mirage"])
    row = [
        name,
        *(f"{times[label].seconds * 1e3:.2f}" for label in ("xla", "mirage")),
        str(ratio),
        *(f"{errors[label]:.1e}" for label in ("xla", "mirage")),
    ]
    return row, errors["mirage"] <= 2 * errors["xla"] + 1e-7


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="bytes of text")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--budget", default="20s", help="time for the search of one region")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds of timing")
    args = parser.parse_args(argv)

    console = Console()
    raw = TEXT.read_bytes()[: args.length]
    text = jnp.asarray(np.frombuffer(raw, np.uint8).astype(np.int32))
    sizes = f"{len(raw)} bytes of {TEXT.name}, width {args.width}, {args.heads} heads, float32"
    console.print(f"{sizes}, on {jax.devices()[0].device_kind}", highlight=False)
    table = Table(title="plain jax.jit beside mirage_jax.optimize", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "milliseconds, interleaved; largest error against float64, of the largest logit"
    for column in ("block", "XLA", "ours", "speed-up [95%]", "error XLA", "error ours"):
        table.add_column(column, justify="left" if column == "block" else "right", no_wrap=True)
    accurate = True
    for name, attend in (("transformer", softmax_attention), ("linear attention", linear_attention)):
        model = ByteModel(attend, args.width, args.heads, rngs=nnx.Rngs(0))
        row, good = demonstrate(name, model, text, args.budget, args.rounds, console)
        table.add_row(*row)
        accurate &= good
    console.rule("summary")
    console.print(table)
    if not accurate:
        console.print("a result is less accurate than XLA's", style="red")
    return 0 if accurate else 1


if __name__ == "__main__":
    raise SystemExit(main())
