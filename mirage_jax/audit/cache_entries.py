"""A campaign of cache entries that were changed on disk, by accident and on purpose.

Bytes are damaged. Values, graphs and schedules are edited, and the digest is recomputed, as anybody can. An entry that
no longer carries the user's seal may be refused, or used if it is right; it may not lead to a wrong result.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mirage_jax import cache as caches
from mirage_jax.audit.stress import CASES, Case, Stress, listening, options, stress_campaign
from mirage_jax.cache import Cache, CacheKey, Entry, canonical, encode
from mirage_jax.compiler import Compiler
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.winner import Winner
from mirage_jax.errors import CacheError
from mirage_jax.progress import Say

TYPES = ("f32", "f16", "bf16", "bool", "i8", "u8", "i32", "f64")
ODD: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 33, 2**31, 10**40, 1e39, 1e-39, 1e308, 0.5, "", "x", "win", "xla", "structures", "kernels",
    "\x1b[2J", "\u202e", "mugraph {}", [], [[]], [0], {}, {"a": 1}, "9" * 5000, [1] * 5000,
)  # fmt: skip
WORDS = (
    "dot", "add", "mul", "sub", "max", "exp", "affine{scale=2}", "affine{scale=1e39}", "affine{offset=1000000000}",
    "sum{axes=(k)}", "library", "input", "output", "extents", "i", "j", "k", "m0", "t1", "x0", "48", "8", "1",
)  # fmt: skip
GATED_HERE = re.compile(r"passed on \d+ input classes")  # what the whole float gate says

type Make = Callable[[random.Random, "StoredTarget"], bytes]


@dataclass
class StoredTarget:
    """A case whose decision is on disk."""

    case: Case
    key: CacheKey
    entry: Entry
    path: Path
    raw: bytes
    verdicts: dict[str, str] = field(default_factory=dict)  # problem of the result of a graph, by its text


class Remembering(Compiler):
    """Checks the winner of somebody else once, and then remembers the answer: many edits leave the graph alone."""

    known: dict[str, str | Exception] = {}  # noqa: RUF012  (of the process)

    def _check_foreign(self, subject: RegionOnDevice, winner: Winner, devices: Any) -> str:
        text = f"{winner.graph}\n{winner.schedule}\n{winner.family}"
        if text not in self.known:
            try:
                self.known[text] = super()._check_foreign(subject, winner, devices)
            except CacheError as why:
                self.known[text] = why
        if isinstance(found := self.known[text], Exception):
            raise found
        return found


# ---------------------------------------------------------------------- changes of an entry


def damaged(rng: random.Random, s: StoredTarget) -> bytes:
    """Change, add or remove some bytes."""
    a, b = sorted(rng.choices(range(len(s.raw) + 1), k=2))
    if rng.random() < 0.7:
        b = min(b, a + 4)
    return s.raw[:a] + rng.randbytes(rng.randrange(6)) + s.raw[b:]


def resealed(body: bytes) -> bytes:
    """Add the digest that belongs to the body."""
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def damaged_and_resealed(rng: random.Random, s: StoredTarget) -> bytes:
    """Change or remove some bytes, and recompute the digest."""
    body = s.raw[: s.raw.rindex(b',"sha256":"')]
    at = rng.randrange(len(body))
    return resealed(body[:at] + rng.randbytes(rng.randrange(3)) + body[at + rng.randrange(3) :])


def _of(s: StoredTarget, entry: dict[str, Any]) -> bytes:
    """A file with this entry, the seals of the one that was there, and the digest recomputed."""
    whole = json.loads(s.raw)
    return resealed(canonical({"entry": entry, "key": whole["key"], "seals": whole["seals"]})[:-1])


def values(rng: random.Random, s: StoredTarget) -> bytes:
    """Replace, remove or add any value of the entry."""
    entry = json.loads(s.raw)["entry"]
    node, places = entry, []
    while isinstance(node, dict | list) and node and (not places or rng.random() < 0.7):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        places.append((node, key))
        node = node[key]
    holder, key = places[-1]
    match rng.randrange(4):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("extra", "\x1b[0m", str(key) * 2))] = rng.choice(ODD)
        case _:
            holder[key] = rng.choice(ODD)
    return _of(s, entry)


def types(rng: random.Random, s: StoredTarget) -> bytes:
    """Give intermediate results other types."""
    entry = json.loads(s.raw)["entry"]
    entry["graph"] = re.sub(r"(library \S+: )(\w+)", lambda m: m[1] + _maybe(rng, m[2], TYPES), entry["graph"])
    return _of(s, entry)


def _maybe(rng: random.Random, value: str, others: tuple[str, ...]) -> str:
    return rng.choice(others) if rng.random() < 0.5 else value


def tokens(rng: random.Random, s: StoredTarget) -> bytes:
    """Replace, remove or exchange words of the graph."""
    entry = json.loads(s.raw)["entry"]
    parts = re.split(r"(\W+)", entry["graph"])
    for _ in range(rng.randrange(1, 3)):
        at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        match rng.randrange(4):
            case 0:
                parts[at] = rng.choice((*WORDS, *TYPES))
            case 1:
                parts[at], parts[other] = parts[other], parts[at]
            case 2:
                parts[at] = ""
            case _:
                parts[at] = parts[other]
    entry["graph"] = "".join(parts)
    return _of(s, entry)


PAIRS = (  # of operators that undo each other over the reals
    (f"affine{{offset={10**9}}}", f"affine{{offset=-{10**9}}}"),
    (f"affine{{scale={10**39}}}", f"affine{{scale=1/{10**39}}}"),
    (f"affine{{scale=1/{10**44}}}", f"affine{{scale={10**44}}}"),
    ("affine{scale=3}", "affine{scale=1/3}"),
    ("affine{offset=1/7}", "affine{offset=-1/7}"),
)


def in_vain(rng: random.Random, s: StoredTarget) -> bytes:
    """Add lines: operators that undo each other, results that nobody reads, lines twice."""
    entry = json.loads(s.raw)["entry"]
    lines = entry["graph"].splitlines()
    at = rng.choice([n for n, line in enumerate(lines) if line.startswith("  library")])
    name, rest = re.fullmatch(r"  library (\S+)(: .*)", lines[at]).groups()  # type: ignore[union-attr]
    match rng.randrange(3):
        case 0:
            kind = rest[2:].partition(" ")[0]
            axes, dtype = kind[kind.index("[") :], _maybe(rng, kind[: kind.index("[")], TYPES)
            first, second = rng.choice(PAIRS)
            lines[at : at + 1] = [
                f"  library e0{rest}",
                f"  library e1: {dtype}{axes} = {first} e0{axes}",
                f"  library {name}: {kind} = {second} e1{axes}",
            ]
        case 1:
            lines[at : at + 1] = [lines[at], *(f"  library d{n}{rest}" for n in range(rng.choice((1, 2, 300))))]
        case _:
            lines.insert(rng.randrange(len(lines)), lines[at])
    entry["graph"] = "\n".join(lines)
    count = sum(line.startswith("  library") for line in lines)
    entry["schedule"]["kernels"] = entry["schedule"]["kernels"][:1] * count
    return _of(s, entry)


def schedules(rng: random.Random, s: StoredTarget) -> bytes:
    """Change a size."""
    entry = json.loads(s.raw)["entry"]
    kernel = rng.choice(entry["schedule"]["kernels"])
    kernel[rng.choice(list(kernel))] = rng.choice((*ODD, [["i", 64]], [["i", 7]], [["i", 2**40]]))
    return _of(s, entry)


def unsealed(rng: random.Random, s: StoredTarget) -> bytes:
    """Leave the entry as it was, with somebody else's seal."""
    return encode(s.key, s.entry, {rng.randbytes(8).hex(): "made:" + rng.randbytes(32).hex()})


MUTATIONS: dict[str, tuple[Make, float]] = {  # and how often
    "bytes damaged": (damaged, 3),
    "bytes damaged, digest recomputed": (damaged_and_resealed, 2),
    "values edited, digest recomputed": (values, 4),
    "types of intermediates edited, digest recomputed": (types, 3),
    "words of the graph edited, digest recomputed": (tokens, 4),
    "lines added to the graph, digest recomputed": (in_vain, 2),
    "sizes edited, digest recomputed": (schedules, 1),
    "as it was, sealed by somebody else": (unsealed, 0.5),
}


@stress_campaign("entries")
def campaign(found: Stress, folder: Path, count: int, say: Say) -> None:
    """Change `count` entries; a compiler that makes do with stored decisions reads each."""
    with listening() as lines:
        stored = [_stored(case, folder) for case in CASES]
        for n in range(count):
            rng = random.Random(f"{found.seed}/{n}")
            (name,) = rng.choices(list(MUTATIONS), [weight for _, weight in MUTATIONS.values()])
            target = rng.choice(stored)
            _change(rng, name, target)
            found.attempt(name, lines, partial(_read, target))
            if n % 100 == 0:
                say(f"entries | {n:,} of {count:,} | {len(Remembering.known)} graphs passed their proof")


def _stored(case: Case, folder: Path) -> StoredTarget:
    key, entry = case.store(folder)
    path = Cache(folder).path(key)
    return StoredTarget(case, key, entry, path, path.read_bytes())


def _change(rng: random.Random, name: str, s: StoredTarget) -> None:
    temporary = s.path.with_suffix(".new")
    temporary.write_bytes(MUTATIONS[name][0](rng, s))
    temporary.chmod(0o600)
    os.replace(temporary, s.path)
    caches._checked_here.clear()
    caches._complained.clear()


def _read(s: StoredTarget) -> tuple[bool, str]:
    """Whether a program that reads the entry uses it, and the problem of its result."""
    decision = s.case.decide(Remembering(options(s.path.parents[2])))
    return decision.winner is not None, _problem(s, decision) if decision.winner is not None else ""


def _problem(s: StoredTarget, decision: Any) -> str:
    text = f"{decision.winner.graph}\n{decision.winner.schedule}"
    if text not in s.verdicts:
        s.verdicts[text] = s.case.problem(s.case.run(decision))
    if not s.verdicts[text] and GATED_HERE.match(decision.gate) and s.path.read_bytes() != s.raw:
        return f"{s.case.name}: it says that it passed here: {decision.gate}"
    return s.verdicts[text]
