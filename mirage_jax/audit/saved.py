"""Are saved muGraphs of CMU's Mirage right? A verdict on each graph of a file, against a program that is given by name.

Input: a file and a JAX function. The function is captured at the shapes of the file's inputs, and every graph is proven
equal to it (`verify.equivalence.certificate`), found to differ from it, or refused with a reason. `PROGRAMS` are the
eight of the peer's benchmark *as the peer defines them*: nothing is added under the root of an RMS norm, no maximum is
subtracted in a softmax, and nTrans adds where nGPT subtracts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.markup import escape
from rich.table import Table

from mirage_jax.bench.programs import gated_mlp, lora
from mirage_jax.errors import DifferentError, MirageError, ParseError, UsageError
from mirage_jax.jaxpr_frontend.partition.one_graph import captured_whole
from mirage_jax.mirage_import.file import SavedGraph, read_mirage_json
from mirage_jax.mirage_import.graphs import import_graph
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.verify.equivalence.certificate import certify

type Fn = Callable[..., object]


def rms(x: jax.Array) -> jax.Array:
    """Normalize by the root mean square."""
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """exp(Q K) / sum(exp(Q K)) V"""
    weights = jnp.exp(q @ k)
    return weights / jnp.sum(weights, axis=-1, keepdims=True) @ v


def qknorm_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend with normalized queries and values."""
    return attention(rms(q), k, rms(v))


def rmsnorm(x: jax.Array, w: jax.Array) -> jax.Array:
    """rms(x) W"""
    return rms(x) @ w


def ntrans(h: jax.Array, x: jax.Array, a: jax.Array) -> jax.Array:
    """rms(x + a (rms(h) + x))"""
    return rms(x + a * (rms(h) + x))


PROGRAMS: dict[str, Fn] = {
    **dict.fromkeys(("gqa", "mha", "mqa"), attention),
    "qknorm_gqa": qknorm_attention,
    "rmsnorm": rmsnorm,
    "gated_mlp": gated_mlp,
    "ntrans": ntrans,
    "lora": lora,
}


class Kind(StrEnum):
    """The kinds of verdicts."""

    CERTIFIED = "certified"
    DIFFERENT = "different"
    REFUSED = "refused"


@dataclass(frozen=True)
class SavedVerdict:
    """A verdict on a graph. `detail`: the certificate in words, the difference, or the reason for no answer."""

    number: int
    kind: Kind
    detail: str
    bound: float | None = None  # probability that a wrong graph is certified
    graph: str | None = None  # the muGraph in text form


@dataclass(frozen=True)
class SavedVerdicts:
    file: str
    program: str
    verdicts: tuple[SavedVerdict, ...]

    @property
    def all_certified(self) -> bool:
        """Whether every graph is certified."""
        return all(v.kind is Kind.CERTIFIED for v in self.verdicts)

    @property
    def totals(self) -> str:
        """Counts by kind."""
        count = Counter(v.kind for v in self.verdicts)
        return f"{len(self.verdicts)} graphs: " + ", ".join(f"{count[k]} {k}" for k in Kind)

    def table(self) -> Table:
        """Draw the table for a terminal."""
        table = Table(title=f"{self.file} against {self.program}", caption=self.totals)
        table.add_column("graph", justify="right")
        table.add_column("verdict")
        table.add_column("because", overflow="fold")
        for v in self.verdicts:
            table.add_row(str(v.number), v.kind, escape(v.detail))
        return table

    def to_json(self) -> str:
        """Write all verdicts as JSON."""
        return json.dumps(asdict(self) | {"totals": self.totals}, indent=1, sort_keys=True) + "\n"


def examine(file: Path, program: str, fn: Fn, data_types: str | None = None) -> SavedVerdicts:
    """Judge every graph of `file` against `fn`. `data_types` as in `read_mirage_json`.

    Raises:
        UsageError: the file is malformed, does not fit `fn`, or does not tell its types.
    """
    try:
        graphs = read_mirage_json(file.read_text(), data_types)
        return SavedVerdicts(file.name, program, tuple(judge(graphs, fn)))
    except (ParseError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None


def judge(graphs: Iterable[SavedGraph], fn: Fn) -> Iterator[SavedVerdict]:
    """Judge graphs in order; graphs of one interface share a reference."""
    captured = cache(partial(reference_graph, fn))
    for saved in graphs:
        yield _verdict(saved, partial(captured, tuple((t.shape, t.dtype) for t in saved.inputs)))


def _verdict(saved: SavedGraph, reference: Callable[[], KernelGraph]) -> SavedVerdict:
    text = None
    try:
        imported = import_graph(saved, reference())
        text = str(imported.graph)
        certificate = certify(imported.reference, imported.graph)
    except (ParseError, UsageError):
        raise
    except DifferentError as error:
        return SavedVerdict(saved.number, Kind.DIFFERENT, str(error), graph=text)
    except MirageError as error:
        return SavedVerdict(saved.number, Kind.REFUSED, str(error), graph=text)
    return SavedVerdict(
        saved.number, Kind.CERTIFIED, str(certificate).removeprefix("certified: "), certificate.bound, text
    )


def reference_graph(fn: Fn, inputs: tuple[tuple[tuple[int, ...], str], ...]) -> KernelGraph:
    """Capture a function of arrays of these shapes and types as one muGraph. Raises `UsageError` if it cannot be."""
    return captured_whole(fn, inputs, "file's").graph
