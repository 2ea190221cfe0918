"""Two Flax blocks over the bytes of a real text, on the CPU: what `mirage_jax.optimize` does with them, and proves.

The first is a transformer block, multi-head softmax attention and SwiGLU. The second has linear attention, (Q K') V
without a softmax, written the way one thinks of it: scores first. XLA evaluates it as written, at a cost that grows
with the square of the text; the optimizer finds Q (K' V) by itself, proves that it is the same function, and measures
that it is faster. Where it finds nothing faster, XLA's own code runs.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported; unset it to use another device

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import mirage_jax
from mirage_jax import timing
from mirage_jax.summary import summarize

LABELS = ("xla", "mirage")
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


class Stages(logging.Handler):
    """Shows what the optimizer is doing: a spinner on a terminal, and a line with the time everywhere."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console, self.start = console, time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())

    def show(self, what: str) -> None:
        self.console.print(
            f"[dim]{time.perf_counter() - self.start:5.1f} s[/] {escape(what)}", highlight=False, soft_wrap=True
        )


@contextmanager
def stages(console: Console) -> Iterator[Stages]:
    """Inside, the stages that `mirage_jax` logs are shown."""
    handler, log = Stages(console), logging.getLogger("mirage_jax")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class Outcome(NamedTuple):
    """One model under plain `nnx.jit` and under `mirage_jax.optimize`."""

    report: mirage_jax.Report
    times: dict[str, timing.Timing]
    errors: dict[str, float]  # against float64, relative to the largest logit
    memory: dict[str, int]  # bytes for intermediate results, as XLA has planned them

    @property
    def ratio(self) -> timing.Ratio:
        return timing.ratio(self.times["xla"], self.times["mirage"])

    @property
    def accurate(self) -> bool:
        return self.errors["mirage"] <= 2 * self.errors["xla"] + 1e-7


def demonstrate(model: ByteModel, text: jax.Array, options: dict[str, str], rounds: int, console: Console) -> Outcome:
    """Optimize one model, compare it with float64, and time it beside plain `nnx.jit`."""
    plain, optimized = nnx.jit(forward), mirage_jax.optimize(forward, **options)
    with stages(console) as now:
        now.show("capturing the model and cutting out regions")
        report = optimized.explain(model, text)
        now.show("running in float64, to compare with")
        reference = in_float64(model, text)
        now.show("running beside plain nnx.jit")
        results = {"xla": plain(model, text), "mirage": optimized(model, text)}
        calls: dict[str, timing.Call] = {
            "xla": lambda: jax.block_until_ready(plain(model, text)),
            "mirage": lambda: jax.block_until_ready(optimized(model, text)),
        }
        times = timing.time_wall(calls, rounds)
        now.show("done")
    errors = {label: max_error(found, reference) for label, found in results.items()}
    programs = {"xla": plain.lower(model, text), "mirage": optimized.lower(model, text)}
    memory = {label: program.compile().memory_analysis().temp_size_in_bytes for label, program in programs.items()}
    return Outcome(report, times, errors, memory)


def closing_table(outcomes: Mapping[str, Outcome]) -> Table:
    table = Table(
        title="whole models: plain nnx.jit and mirage_jax.optimize", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.caption = "error: the largest against float64, of the largest logit; memory: for intermediate results"
    for column in ("", "XLA", "ours", "speed-up [95%]"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, o in outcomes.items():
        table.add_row(f"{name}, ms", *(f"{o.times[k].seconds * 1e3:.2f}" for k in LABELS), escape(str(o.ratio)))
        table.add_row("  error", *(f"{o.errors[k]:.1e}" for k in LABELS))
        table.add_row("  memory, MB", *(f"{o.memory[k] / 1e6:.1f}" for k in LABELS))
        table.add_row("  regions optimized", "", f"{len(o.report.optimized)} of {len(o.report.regions)}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="bytes of text")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--budget", default="20s", help="time for the search of one region")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds of timing")
    parser.add_argument("--full", action="store_true", help="print the whole reports")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the whole reports to FILE")
    parser.add_argument("--fresh", action="store_true", help="search again, whatever is stored")
    args = parser.parse_args(argv)

    console = Console()
    raw = TEXT.read_bytes()[: args.length]
    text = jnp.asarray(np.frombuffer(raw, np.uint8).astype(np.int32))
    sizes = f"{len(raw)} bytes of {TEXT.name}, width {args.width}, {args.heads} heads, float32"
    console.print(f"{sizes}, on {jax.devices()[0].device_kind}", highlight=False)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as empty:
        options = {"budget": args.budget} | ({"cache_dir": empty} if args.fresh else {})
        for name, attend in (("transformer", softmax_attention), ("linear attention", linear_attention)):
            console.rule(name)
            model = ByteModel(attend, args.width, args.heads, rngs=nnx.Rngs(0))
            outcome = outcomes[name] = demonstrate(model, text, options, args.rounds, console)
            text_of_report = str(outcome.report) if args.full else summarize(outcome.report)
            console.print(text_of_report, markup=False, highlight=False, soft_wrap=True)
    console.rule("summary")
    console.print(closing_table(outcomes))
    if args.report is not None:
        args.report.write_text("\n\n".join(f"{name}\n{o.report}" for name, o in outcomes.items()) + "\n")
        console.print(f"written: {args.report}", highlight=False)
    if not all(o.accurate for o in outcomes.values()):
        console.print("a result is less accurate than XLA's", style="red")
        return 1
    if all(r.decision.source == "cache" for o in outcomes.values() for r in o.report.regions):
        console.print("Decisions came from the cache of an earlier run; --fresh searches again.", highlight=False)
    console.print("--full prints the whole reports: every graph, what was searched, and why.", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
