"""Attention whose logits get sentinels from an argument or from an earlier part of the program.

Sentinels mark padding, documents, or rows in which everything is masked; attention has a mask of indices in addition.
The origin of a sentinel and its reader may stand on two sides of a border, so that no part of the program shows both.
"""

from __future__ import annotations

import random

from mirage_jax.audit.builder import ProgramBuilder
from mirage_jax.audit.fills import LOW, PLACES, Fill
from mirage_jax.audit.program import Border, ProgramValue

CONDITIONS = (  # of indices i and j; the last three may mask some rows completely
    "{i} >= {j}",
    "{i} >= {j}",
    "({i} >= {j}) & ({i} - {j} < 3)",
    "abs({i} - {j}) < 3",
    "{i} > {j}",
    "({i} >= {j}) & ({j} >= 2)",
    "({i} - {j} >= 1) & ({i} - {j} < 3)",
)
BORDERS = ("constants", "carried", "slices", "layers", "layers", "checkpoint", "jit", "cond", "while")


def padded(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Attend with a bias that holds sentinels; the reader of the bias often stands behind a border."""
    rng, (*batch, n, d) = b.rng, x.shape
    m = n if rng.random() < 0.6 else b.size()
    bias = _bias(b, n, m)
    if rng.random() < 0.25:
        text = rng.choice(("{0}[..., ::-1]", "jax.lax.rev({0}, (0,))", "jnp.flip({0})"))
        bias = b.like(text, bias)
    start = len(b.steps)
    k = x if m == n and rng.random() < 0.2 else b.input([*batch, m, d], x.dtype)
    if len(batch) <= 1 and x.dtype != "float16" and rng.random() < 0.2:  # JAX's own has no float16 on CPUs
        y = _by_jax(b, x, k, bias, m)
    else:
        y = _by_hand(b, x, k, bias, m)
    inside = tuple(s.value.name for s in b.steps[start:])
    if rng.random() < 0.6:
        carried = (x.name, y.name) if y.shape == x.shape else ("", "")
        b.borders.append(Border(rng.choice(BORDERS), inside, carried))
    return y


def _bias(b: ProgramBuilder, n: str, m: str) -> ProgramValue:
    """A bias: an argument, or made from conditions on indices or from an argument that marks elements."""
    rng = b.rng
    shape = rng.choice(([m], [m], [n, m], [n, m], ["1", m], [n, "1"]))
    low = rng.choice((*LOW, "lowest", "lowest", "mixed"))
    origin = rng.random()
    if origin < 0.6:
        return b.input(shape, fill=Fill(low, rng.choice(list(PLACES))))
    text = _text(low, b.dtype, rng)
    if origin < 0.7:
        there = b.input(shape, fill=Fill(where="switch"))
        return b.like(f"(1 - {{0}}) * {text}" if text != "-jnp.inf" else "jnp.log({0})", there)
    if origin < 0.8:
        return b.step(
            f"jnp.where({{0}}, 0, jnp.asarray({text}, {b.dtype!r}))", b.input(shape, "bool"), shape=shape, dtype=b.dtype
        )
    condition = rng.choice((f"jnp.arange({m}) < {rng.randint(1, 4)}", f"jnp.arange({m}) % 3 == {rng.randint(0, 2)}"))
    return b.step(f"jnp.where({condition}, {text}, 0.).astype({b.dtype!r})", shape=[m], dtype=b.dtype)


def _text(low: str, dtype: str, rng: random.Random) -> str:
    """A sentinel in the text of a program; float16 has none but its own."""
    if low == "-inf":
        return "-jnp.inf"
    if low in ("lowest", "mixed") or dtype == "float16":
        return f"jnp.finfo({dtype!r}).min" if rng.random() < 0.8 else f"(0.7 * float(jnp.finfo({dtype!r}).min))"
    return low


def _by_jax(b: ProgramBuilder, q: ProgramValue, k: ProgramValue, bias: ProgramValue, m: str) -> ProgramValue:
    """JAX's own attention, of one head."""
    v = b.input(k.shape, q.dtype)
    new = ", ".join(["None"] * (len(q.shape) + 1 - len(bias.shape)))
    causal = b.rng.random() < 0.8
    heads = ", ".join(f"{{{i}}}[..., None, :]" for i in range(3))
    text = f"jax.nn.dot_product_attention({heads}, bias={{3}}[{new}], is_causal={causal})[..., 0, :]"
    return b.step(text, q, k, v, bias, shape=q.shape)


def _by_hand(b: ProgramBuilder, q: ProgramValue, k: ProgramValue, bias: ProgramValue, m: str) -> ProgramValue:
    rng, (*batch, n, d) = b.rng, q.shape
    e = d if rng.random() < 0.5 else b.size()
    s = b.step("{0} @ jnp.swapaxes({1}, -1, -2)", q, k, shape=[*batch, n, m])
    if rng.random() < 0.6:
        s = b.like(f"{{0}} * {d} ** -0.5", s)
    s = b.like("{0} + {1}", s, bias)
    if rng.random() < 0.15:
        s = b.like("{0} * 0.5", s)
    if rng.random() < 0.85:
        s = _under_a_mask(b, s, n, m)
    v = b.input([*batch, m, e], q.dtype)
    if rng.random() < 0.4:
        w = b.input([e, c := b.size()], q.dtype)
        v, e = b.step("{0} @ {1}", v, w, shape=[*batch, m, c]), c
    return _softmax(b, s, v, [*batch, n, e])


def _under_a_mask(b: ProgramBuilder, s: ProgramValue, n: str, m: str) -> ProgramValue:
    rng = b.rng
    i, j = f"jnp.arange({n})[:, None]", f"jnp.arange({m})"
    condition = rng.choice(CONDITIONS).format(i=i, j=j)
    text = _text(rng.choice((*LOW, "lowest", "lowest", "lowest", "lowest")), s.dtype, rng)
    if rng.random() < 0.5:
        mask = b.step(condition, shape=[n, m], dtype="bool")
        return b.step(f"jnp.where({{1}}, {{0}}, {text})", s, mask, shape=s.shape)
    return b.like(f"jnp.where({condition}, {{0}}, {text})", s)


def _softmax(b: ProgramBuilder, s: ProgramValue, v: ProgramValue, shape: list[str]) -> ProgramValue:
    """The weighted mean, with the weights written in one of several ways."""
    way = b.rng.randrange(5)
    if way == 0:
        p = b.like("jax.nn.softmax({0}, -1)", s)
    elif way == 1:
        p = b.like("jnp.exp({0} - jax.nn.logsumexp({0}, -1, keepdims=True))", s)
    elif way == 2:
        p = b.like("jnp.exp(jax.nn.log_softmax({0}, -1))", s)
    else:
        p = b.like("jnp.exp({0} - jnp.max({0}, -1, keepdims=True))", s)
        if way == 3:
            return b.step("({0} @ {1}) / jnp.sum({0}, -1, keepdims=True)", p, v, shape=shape)
        p = b.like("{0} / jnp.sum({0}, -1, keepdims=True)", p)
    return b.step("{0} @ {1}", p, v, shape=shape)
