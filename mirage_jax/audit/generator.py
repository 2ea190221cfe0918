"""Random programs: fragments that occur in models, put together, with random glue and in random transformations.

A *policy* is a weighting of fragments: programs that mean nothing but look like attention, norms, MLPs, LoRA or chains
of products find more than a uniform choice of operators, which would mostly end outside of every region. Each
fragment takes a value of the program (or a new input) and gives a new one; glue reads anything at hand. Everything is
drawn from the generator that is passed in: same seed, same program.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from mirage_jax.audit.brink import scaled_in_pairs
from mirage_jax.audit.builder import DTYPES, Fragment, ProgramBuilder
from mirage_jax.audit.padding import BORDERS, padded
from mirage_jax.audit.program import Border, ProgramStep, ProgramValue, RandomProgram, Wrapper, size_of

MAX_ELEMENTS = 1 << 16  # of one value: everything stays fast
MAX_STEPS = 24
KINDS = ("normal",) * 12 + ("uniform", "large", "zero rows", "one hot", "constant rows", "integers", "small", "nan")
SENTINEL_SHARE, SCALED_SHARE = 1 / 6, 1 / 6  # of programs: with sentinels in their data, with scales
ALONE_SHARE = 0.75  # of these programs: with little else between sentinels or scales and the result
BORDER_SHARE = 0.1  # of other programs: with a part in a scope of its own
ACTIVATIONS = (
    "jax.nn.silu({0})", "jax.nn.gelu({0})", "jax.nn.gelu({0}, approximate=False)", "jax.nn.relu({0})",
    "jnp.square(jax.nn.relu({0}))", "jax.nn.sigmoid({0})", "jnp.tanh({0})", "4 * jnp.tanh({0} / 4)",
    "jnp.exp(-jnp.square({0}))", "{0} / (1 + jnp.abs({0}))",
)  # fmt: skip
NORMS = (
    "{0} * jax.lax.rsqrt(jnp.mean(jnp.square({0}), -1, keepdims=True) + 1e-6)",
    "{0} / jnp.sqrt(jnp.mean({0} * {0}, -1, keepdims=True) + 1e-3)",
    "({0} - jnp.mean({0}, -1, keepdims=True)) * jax.lax.rsqrt(jnp.var({0}, -1, keepdims=True) + 1e-5)",
    "{0} / (jnp.sqrt(jnp.sum({0} * {0}, -1, keepdims=True)) + 1e-3)",
    "jax.nn.softmax({0}, -1)",
    "jax.nn.log_softmax({0}, -1)",
    "{0} - jnp.max({0}, -1, keepdims=True)",
    "{0} / (1 + jnp.sum(jnp.abs({0}), -1, keepdims=True))",
)
POINTWISE = (
    "-{0}", "{0} * 0.5", "{0} + 1", "{0} / 3", "2 - {0}", "{0} * {0}", "jnp.exp({0} * 0.25)",
    "jnp.sqrt({0} * {0} + 1)", "1 / ({0} * {0} + 1)", "jnp.where({0} > 0, {0}, 0.1 * {0})", "jnp.maximum({0}, -1)",
    "jnp.log1p({0} * {0})", "jax.nn.elu({0})", "jnp.round(4 * {0}) / 4", *ACTIVATIONS,
)  # fmt: skip
TOTAL_SHARE = 1 / 24  # of programs: with a sum over all pairs of numbers in rows of the last result
# Smooth at 0: rounding decides whether a number less itself is negative.
TOTAL = "jnp.sum(jnp.exp(-jnp.square({0}[..., None] - {0}[..., None, :])))"
RARE_SHARE = 1 / 8  # of programs: with some of these in place of other functions
RARE = (
    "jnp.arctan({0})", "jnp.arcsin({0} / (1 + jnp.abs({0})))", "jnp.arccos({0} / (2 + jnp.abs({0})))",
    "jnp.sinh({0} / 4)", "jnp.cosh({0} / 4)", "jnp.arcsinh({0})", "jnp.arccosh(1 + {0} * {0})",
    "jnp.arctanh({0} / (2 + jnp.abs({0})))", "jnp.abs({0}) ** 1.7",
    "jnp.arctan2({0}, 1 - {0} * {0})", "(1 + jnp.abs({0})) ** jnp.tanh({0})",
)  # fmt: skip
RARE_BINARY = ("jnp.arctan2({0}, {1})", "(1 + jnp.abs({0})) ** jnp.tanh({1})")
BINARY = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / (2 + jnp.abs({1}))", "jnp.maximum({0}, {1})", "{0} + 0.5 * {1}")
REDUCTIONS = ("jnp.sum({0}, -1)", "jnp.mean({0}, -1)", "jnp.max({0}, -1)", "jnp.sum({0} * {0}, -1)", "jnp.var({0}, -1)")
LENGTHS = ("jnp.sum({0} ** 2, -1)", "jnp.sum({0} * {0}, -1)", "jnp.sum(jnp.abs({0}), -1)")  # of differences

# ---------------------------------------------------------------------- fragments


def attention(b: ProgramBuilder, q: ProgramValue) -> ProgramValue:
    """Attend with softmax, unsafe softmax or none; scaled, soft-capped, biased and masked in several ways, or not."""
    rng, (*batch, n, d) = b.rng, q.shape
    m, e = b.size(), b.size()
    k, v = b.input([*batch, m, d], q.dtype), b.input([*batch, m, e], q.dtype)
    s = b.step("{0} @ jnp.swapaxes({1}, -1, -2)", q, k, shape=[*batch, n, m])
    if rng.random() < 0.6:
        s = b.like(f"{{0}} * {d} ** -0.5", s)
    if rng.random() < 0.15:
        s = b.like("8 * jnp.tanh({0} / 8)", s)
    if rng.random() < 0.3:
        s = b.like(
            rng.choice(("{0} + {1}", "{0} * {1}")), s, b.input(rng.choice(([n, m], [m], [*batch, n, m])), q.dtype)
        )
    if rng.random() < 0.45:
        s = masked(b, s, n, m)
    flavour = rng.random()
    if flavour < 0.55:
        s = b.like("jax.nn.softmax({0}, -1)", s)
    elif flavour < 0.7:
        s = b.like("jnp.exp({0})", b.like("jnp.minimum({0}, 4)", s))
        if rng.random() < 0.5:
            s = b.like("{0} / (1e-6 + jnp.sum({0}, -1, keepdims=True))", s)
    return b.step("{0} @ {1}", s, v, shape=[*batch, n, e])


MASKS_BY_NUMBERS = (  # a mask that becomes numbers, and a mask again
    "jnp.where({0}, 1.0, 0.0) == 1", "~(jnp.where({0}, 1.0, 0.0) == 0)", "{0}.astype('bfloat16').astype(bool)",
    "{0}.astype('int32') > 0", "0.5 <= jnp.where({0}, 0.7, 0.1)",
)  # fmt: skip


def masked(b: ProgramBuilder, s: ProgramValue, n: str, m: str) -> ProgramValue:
    """Keep scores where a mask holds, and put something large and negative elsewhere."""
    rng = b.rng
    low = rng.choice(("-jnp.inf", "-1e9" if s.dtype != "float16" else "-6e4", f"jnp.finfo('{s.dtype}').min"))
    choice = rng.random()
    if choice < 0.35:
        mask = b.step(f"jnp.tril(jnp.ones(({n}, {m}), bool))", shape=[n, m], dtype="bool")
    elif choice < 0.6:
        mask = b.step(f"jnp.arange({n})[:, None] >= jnp.arange({m})[None, :]", shape=[n, m], dtype="bool")
    elif choice < 0.7:
        behind = f"jnp.arange({n})[:, None] - jnp.arange({m})"
        mask = b.step(f"({behind} >= 0) & ({behind} < 3)", shape=[n, m], dtype="bool")
    elif choice < 0.85:
        i, j = f"jnp.arange({n})[:, None]", f"jnp.arange({m})"
        texts = ("({i} - {j}) % 3 == 0", "{i} % 3 == {j} % 3", "{i} // 3 == {j} // 3", "3 * {i} + 5 >= 2 * {j}")
        mask = b.step(rng.choice(texts).format(i=i, j=j), shape=[n, m], dtype="bool")
    else:
        mask = b.input(rng.choice(([n, m], [m])), "bool")
    if rng.random() < 0.25:
        mask = b.step(rng.choice(MASKS_BY_NUMBERS), mask, shape=mask.shape, dtype="bool")
    return b.step(f"jnp.where({{1}}, {{0}}, {low})", s, mask, shape=s.shape)


def norm(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Normalize along the last dimension, with a gain and a product behind, or not."""
    wide = b.with_type(x, "float32") if b.rng.random() < 0.4 else x
    y = b.with_type(b.like(b.rng.choice(NORMS), wide), x.dtype)
    if b.rng.random() < 0.5:
        y = b.like("{0} * {1}", y, b.input([x.shape[-1]], x.dtype))
    return linear(b, y) if b.rng.random() < 0.6 else y


def linear(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Multiply by weights, and add a bias or not."""
    *rest, d = x.shape
    out = b.size()
    kind = b.rng.random()
    wide = kind < 0.1
    asked = "preferred_element_type='float32'" if wide else "precision='highest'" if kind < 0.25 else ""
    text = f"jnp.matmul({{0}}, {{1}}, {asked})" if asked else "{0} @ {1}"
    dtype = "float32" if wide else x.dtype
    y = b.step(text, x, b.input([d, out], x.dtype), shape=[*rest, out], dtype=dtype)
    return b.like("{0} + {1}", y, b.input([out], dtype)) if b.rng.random() < 0.25 else y


def mlp(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Put one or two products around an activation, gated or not."""
    *rest, d = x.shape
    hidden = b.size()
    up = b.step("{0} @ {1}", x, b.input([d, hidden], x.dtype), shape=[*rest, hidden])
    y = b.like(b.rng.choice(ACTIVATIONS), up)
    if b.rng.random() < 0.5:
        gate = b.step("{0} @ {1}", x, b.input([d, hidden], x.dtype), shape=[*rest, hidden])
        y = b.like("{0} * {1}", y, gate)
    return linear(b, y) if b.rng.random() < 0.6 else y


def lora(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Multiply by weights with an update of low rank."""
    *rest, d = x.shape
    rank, out = b.size(), b.size()
    w, p, q = b.input([d, out], x.dtype), b.input([d, rank], x.dtype), b.input([rank, out], x.dtype)
    text = b.rng.choice(
        ("{0} @ {1} + ({0} @ {2}) @ {3}", "{0} @ ({1} + 0.5 * ({2} @ {3}))", "{0} @ {1} + 2 * ({0} @ ({2} @ {3}))")
    )
    return b.step(text, x, w, p, q, shape=[*rest, out])


CONVOLUTION = (  # over rows, with windows that do not overlap
    "jax.lax.conv_general_dilated({0}.reshape(-1, *{0}.shape[-2:]), {1}, ({2},), 'VALID', "
    "dimension_numbers=('NWC', 'WIO', 'NWC')).reshape(*{0}.shape[:-2], -1, {1}.shape[-1])"
)
ROWS_AND_MORE = "jnp.concatenate([{0}, jnp.sin({0})], -2)"


def chain(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Chain products that associativity, distributivity and scaling can rearrange."""
    *rest, n, d = x.shape
    m, e = b.size(), b.size()
    k, v, w, u = [m, d], [m, e], [d, e], [e]
    texts: list[tuple[str, list[list[str]], list[str]]] = [
        ("({0} @ {1}.T) @ {2}", [k, v], [*rest, n, e]),
        ("({0} @ {1}.T) @ {2} / (1 + {3})", [k, v, [e]], [*rest, n, e]),
        ("({0} @ {1}) @ {2}", [w, u], [*rest, n]),
        ("{0} @ {1} + {0} @ {2}", [w, w], [*rest, n, e]),
        ("({0} * {1}) @ {2}", [[d], w], [*rest, n, e]),
        ("({0} @ {1}) * {2}", [w, u], [*rest, n, e]),
        ("jnp.sum({0} @ {1}, -1)", [w], [*rest, n]),
        ("jnp.mean({0} @ {1}, -2)", [w], [*rest, e]),
        ("jnp.swapaxes({0}, -1, -2) @ ({0} @ {1})", [w], [*rest, d, e]),
        ("jnp.einsum('...nd,md,me->...ne', {0}, {1}, {2})", [k, v], [*rest, n, e]),
        ("jnp.einsum('...nd,...nd->...n', {0}, {0} * {1})", [[d]], [*rest, n]),
        ("jnp.einsum('...nd,de->...en', {0}, {1})", [w], [*rest, e, n]),
        ("jnp.sum({0}[..., None] * {1}, -2)", [w], [*rest, n, e]),
        ("({0} - jnp.mean({0}, -2, keepdims=True)) @ {1}", [w], [*rest, n, e]),
        ("({0} @ {1}) @ ({2}.T @ {2})", [w, v], [*rest, n, e]),
        (CONVOLUTION.format("{0}", "{1}[None]", 1), [w], [*rest, n, e]),
        (CONVOLUTION.format(ROWS_AND_MORE, "jnp.stack([{1}, {2}])", 2), [w, w], [*rest, n, e]),
    ]
    text, shapes, out = b.rng.choice(texts)
    return b.step(text, x, *(b.input(s, x.dtype) for s in shapes), shape=out)


def distances(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Sum over pairs of rows: kernels of distances, mixtures, the nearest row, weights by distance, forces."""
    *rest, n, d = x.shape
    if b.rng.random() < 0.3:  # of rows of one matrix, so that a sum over all pairs has every pair twice
        m, y = n, x
    else:
        m = b.size()
        y = b.input([m, d], x.dtype)
    w = b.input([m], x.dtype)
    gap = b.step("{0}[..., None, :] - {1}[..., None, :, :]", x, y, shape=[*rest, n, m, d])
    if b.rng.random() < 0.25:  # a deviation: an exponential, at times within another one
        gap = b.step("{0} / jnp.exp({1})", gap, b.input([d], x.dtype), shape=[*rest, n, m, d])
    length = b.step(b.rng.choice(LENGTHS), gap, shape=[*rest, n, m])
    texts: list[tuple[str, list[str]]] = [
        ("jnp.exp(-{0} / 2) @ {1}", [*rest, n]),
        ("jax.nn.logsumexp({1} - {0}, -1)", [*rest, n]),
        ("jnp.min({0}, -1)", [*rest, n]),
        ("jax.nn.softmax(-{0}, -1) @ {2}", [*rest, n, d]),
        ("jnp.sum({3} / (1 + {0})[..., None], -2)", [*rest, n, d]),
        ("1 / (1 + {0})", [*rest, n, m]),
        ("jnp.sum({1}[:, None] * jnp.square({3}), (-3, -2))", [*rest, d]),
    ]
    text, shape = b.rng.choice(texts)
    return b.step(text, length, w, y, gap, shape=shape)


def pairs(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Compare every row with all rows of another matrix, and keep the diagonal, as contrastive losses do."""
    *rest, n, d = x.shape
    scale = b.rng.choice(("", "3 * ", "0.25 * "))
    s = b.step(f"{scale}({{0}} @ {{1}}.T)", x, b.input([n, d], x.dtype), shape=[*rest, n, n])
    texts = (
        "jax.nn.log_softmax({0}, -1)",
        "jax.nn.log_softmax({0}, -2)",
        "jax.nn.log_softmax({0}, -1) + jax.nn.log_softmax({0}, -2)",
        "2 * {0} - jax.nn.logsumexp(2 * {0}, -1, keepdims=True)",
        "jnp.tanh({0})",
    )
    y = b.like(b.rng.choice(texts), s)
    kept = ("jnp.diagonal({0}, axis1=-2, axis2=-1)", "jnp.where(jnp.eye({0}.shape[-1], dtype=bool), {0}, 0).sum(-2)")
    return b.step(b.rng.choice(kept), y, shape=[*rest, n])


def triple(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Multiply three factors, mostly in the cheaper order; the other order has another intermediate value."""
    *rest, n, d = x.shape
    m, e = b.size(), b.size()
    rows, wide, inner, out = (b.elements(*names) for names in ((*rest, n), (d,), (m,), (e,)))
    right_is_cheaper = wide * inner * out + rows * wide * out < rows * wide * inner + rows * inner * out
    left_first = b.rng.random() < (0.9 if right_is_cheaper else 0.1)
    middle, turned = b.rng.choice(((["d", "m"], "{1}"), (["m", "d"], "{1}.T")))
    shapes = [[{"d": d, "m": m}[name] for name in middle], [m, e]]
    texts = [f"({{0}} @ {turned}) @ {{2}}", f"{{0}} @ ({turned} @ {{2}})"]
    if b.rng.random() < 0.2:
        shapes = [[d], [d, e]]
        texts = ["({0} * {1}) @ {2}", "{0} @ ({1}[:, None] * {2})"]
    factors = [x, *(b.input(s, x.dtype) for s in shapes)]
    names = [v.name for v in factors]
    b.against = tuple(names) if left_first else (names[2], *names[:2])
    return b.step(texts[not left_first], *factors, shape=[*rest, n, e])


def quantized(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Multiply by weights of 8 bits, or of 4 bits in bytes, scaled before the product or after it."""
    *rest, d = x.shape
    out = b.size()
    scale = b.input([out], x.dtype)
    texts = (
        ("{0} @ ({1}.astype({0}.dtype) * 0.01 * {2})", "int8"),
        ("({0} @ {1}.astype({0}.dtype)) * 0.01 * {2}", "int8"),
        ("{0} @ (({1}.astype({0}.dtype) - 128) * (0.01 * {2}))", "uint8"),
        ("{0} @ ((({1} & 15).astype('int8') - 8).astype({0}.dtype) * {2})", "uint8"),
        ("{0} @ ((({1} << 4) >> 4).astype({0}.dtype) * {2}) + {0} @ ({1} >> 4).astype({0}.dtype)", "int8"),
        (
            "jnp.concatenate([{0}, {0}], -1) @ "
            f"(jnp.stack([{{1}} & 15, {{1}} >> 4], 1).reshape(-1, {out}).astype({{0}}.dtype) * {{2}})",
            "uint8",
        ),
    )
    text, dtype = b.rng.choice(texts)
    return b.step(text, x, b.input([d, out], dtype), scale, shape=[*rest, out])


def labelled(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Take logits at labels, as a cross-entropy does, or one element of every row."""
    *rest, d = x.shape
    n = b.size()
    y = b.step("{0} @ {1}", x, b.input([d, n], x.dtype), shape=[*rest, n])
    y = b.like(b.rng.choice(("jax.nn.log_softmax({0}, -1)", "jnp.tanh({0})", "jnp.exp({0} * 0.25)", "2 * {0}")), y)
    label = b.input(rest, "int32")
    rows = [f"jnp.arange({r}).reshape({', '.join(['-1', *'1' * (len(rest) - d - 1)])})" for d, r in enumerate(rest)]
    texts = (
        f"jnp.take_along_axis({{0}}, {{1}}[..., None] % {n}, -1)",
        f"{{0}}[{', '.join([*rows, f'{{1}} % {n}'])}][..., None]",
    )
    return b.step(b.rng.choice(texts), y, label, shape=[*rest, "1"])


def reduction(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Reduce a value, and often combine it with the result."""
    rng = b.rng
    *rest, d = x.shape
    r = b.step(rng.choice(REDUCTIONS), x, shape=rest)
    if rng.random() < 0.6:
        y = b.step(rng.choice(BINARY).replace("{1}", "{1}[..., None]"), x, r, shape=[*rest, d])
        return linear(b, y) if rng.random() < 0.6 else y
    return r


def reuse(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Read one value several times, and combine the results."""
    y = b.like(b.rng.choice(POINTWISE), x)
    left, right = linear(b, y), b.like(b.rng.choice(BINARY), y, x)
    found = [v for v in b.values if v.shape == left.shape and v.dtype == left.dtype and v.name != left.name]
    if found:
        return b.like(b.rng.choice(BINARY), left, b.rng.choice(found))
    return b.step("jnp.sum({0}, -1) * jnp.sum({1}, -1)", left, right, shape=left.shape[:-1])


def layout(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Transpose, reshape or broadcast; at times reverse, which ends a region."""
    rng = b.rng
    *rest, n, d = x.shape
    texts: list[tuple[str, list[str]]] = [
        ("jnp.swapaxes({0}, -1, -2)", [*rest, d, n]),
        (f"{{0}}.reshape({', '.join([*rest, f'({n}) * ({d})'])})", [*rest, f"({n}) * ({d})"]),
        (f"{{0}}[..., None, :] + jnp.zeros((2, {d}), {{0}}.dtype)", [*rest, n, "2", d]),
        (f"jnp.broadcast_to({{0}}, (2, {', '.join(x.shape)}))", ["2", *x.shape]),
        ("{0}[..., ::-1]", list(x.shape)),
        ("jnp.moveaxis({0}, -1, 0)", [d, *rest, n]),
    ]
    text, shape = rng.choices(texts, (4, 3, 2, 2, 1, 2))[0]
    return b.step(text, x, shape=shape)


def parts(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Slice and concatenate, as in gates and rotary embeddings, and mostly before a product."""
    rng = b.rng
    *rest, n, d = x.shape
    half, twice, row = f"({d} + 1) // 2", f"2 * ({d})", f"({n} + 1) // 2"
    texts: list[tuple[str, list[str]]] = [
        (f"{{0}}[..., : {half}]", [*rest, n, half]),
        (f"{{0}}[..., -({row}) :, :]", [*rest, row, d]),
        (f"{{0}}[..., : {half}] * jnp.tanh({{0}}[..., -({half}) :])", [*rest, n, half]),
        ("jnp.concatenate([{0}, jnp.sin({0})], -1)", [*rest, n, twice]),
        (f"jnp.concatenate([-{{0}}[..., {half} :], {{0}}[..., : {half}]], -1) + {{0}}", [*rest, n, d]),
        ("jnp.stack([{0}, 2 * {0}], -1).reshape(*{0}.shape[:-1], -1)", [*rest, n, twice]),
        (f"jnp.concatenate([{{0}}, {{0}}], -1)[..., {d} // 2 : {d} // 2 + {d}]", [*rest, n, d]),
        ("jnp.pad({0}, [(0, 0)] * ({0}.ndim - 1) + [(1, 2)])", [*rest, n, f"({d}) + 3"]),
        ("jnp.concatenate([{0}, {0}], -1)[..., ::2]", [*rest, n, d]),
        ("sum(jnp.split(jnp.concatenate([{0}, {0} * {0}], -2), 2, -2))", [*rest, n, d]),
    ]
    text, shape = rng.choice(texts)
    y = b.step(text, x, shape=shape)
    return linear(b, y) if rng.random() < 0.5 else y


def pointwise(b: ProgramBuilder, x: ProgramValue) -> ProgramValue:
    """Combine a value with another of its shape, mask it, cast it, or apply a function."""
    rng = b.rng
    mates = [v for v in b.values if v.shape == x.shape and v.dtype == x.dtype]
    if len(mates) > 1 and rng.random() < 0.5:
        return b.like(rng.choice(BINARY), x, rng.choice(mates))
    if rng.random() < 0.2:
        return b.like("jnp.where({1}, {0}, 0)", x, b.input(x.shape[-1:], "bool"))
    if rng.random() < 0.15:
        return b.with_type(x, rng.choice(DTYPES))
    return b.like(rng.choice(POINTWISE), x)


HEAVY: tuple[Fragment, ...] = (
    attention, norm, mlp, lora, chain, reduction, reuse, quantized, labelled, distances, pairs,
)  # fmt: skip
GLUE: tuple[Fragment, ...] = (layout, parts, pointwise, pointwise)
POLICIES: dict[str, tuple[float, ...]] = {  # weights of HEAVY
    "attention": (6, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1),
    "norm": (0, 6, 1, 0, 1, 1, 0, 0, 0, 0, 0),
    "mlp": (0, 1, 6, 1, 0, 0, 1, 1, 0, 0, 0),
    "lora": (0, 1, 0, 6, 1, 0, 0, 1, 0, 0, 0),
    "algebra": (1, 0, 0, 1, 6, 1, 1, 0, 0, 0, 0),
    "reductions": (0, 1, 0, 0, 1, 6, 1, 0, 2, 2, 2),
    "reuse": (1, 1, 1, 1, 1, 1, 6, 0, 0, 0, 0),
    "anything": (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    "products": (3, 0, 1, 2, 6, 1, 0, 1, 0, 0, 0),
    "distances": (0, 1, 0, 0, 1, 1, 0, 0, 0, 6, 2),
}
SCALED_POLICIES = ("products", "algebra", "lora", "anything")


# ---------------------------------------------------------------------- whole programs


def generate(rng: random.Random, seed: int = 0, strict_range: bool = False) -> RandomProgram:
    """Draw a random program; its input values come from `seed`.

    strict_range: arguments may be scaled to the brink of float32 and bfloat16, too, not only of float16.
    """
    b, share = ProgramBuilder(rng), rng.random()
    sentinels, scales = share < SENTINEL_SHARE, SENTINEL_SHARE <= share < SENTINEL_SHARE + SCALED_SHARE
    if scales and rng.random() < 0.8:
        b.dtype = "float16"
    if sentinels:
        _grow_alone(b, padded)
    elif scales and rng.random() < ALONE_SHARE:
        _grow_alone(b, triple)
    else:
        _grow_at_random(b, SCALED_POLICIES if scales else list(POLICIES))
    if not b.borders and rng.random() < BORDER_SHARE:
        _close_off(b)
    program = _finished(b, rng.choice(("normal", "normal", "uniform") if scales else KINDS), seed)
    if not scales or rng.random() < 0.5:  # gradients have many values, which leave little room for scales
        program = _wrapped(rng, program)
    if scales:
        return scaled_in_pairs(program, rng, b.against, strict_range)
    program = _with_rare_functions(rng, program) if rng.random() < RARE_SHARE else program
    return _with_total(program) if rng.random() < TOTAL_SHARE else program


def _with_rare_functions(rng: random.Random, program: RandomProgram) -> RandomProgram:
    """Put rare functions in place of some others. (Drawn last: the rest of a program does not depend on it.)"""
    rare = dict.fromkeys(POINTWISE, RARE) | dict.fromkeys(BINARY, RARE_BINARY)
    steps = [
        replace(s, text=rng.choice(rare[s.text])) if s.text in rare and s.value.is_float and rng.random() < 0.5 else s
        for s in program.steps
    ]
    return replace(program, steps=tuple(steps))


def _with_total(program: RandomProgram) -> RandomProgram:
    """Sum over all pairs of numbers in each row of the last result, if they are not too many."""
    last, sizes = program.values[program.outputs[-1]], dict(program.sizes)
    if size_of((*last.shape, *last.shape[-1:]), sizes) > MAX_ELEMENTS or not last.is_float:
        return program
    total = ProgramStep(ProgramValue(f"t{len(program.steps)}", (), last.dtype), TOTAL, (last.name,))
    return replace(program, steps=(*program.steps, total), outputs=(*program.outputs[:-1], total.value.name))


def _grow_alone(b: ProgramBuilder, fragment: Fragment) -> None:
    """Add a fragment, and mostly nothing else."""
    _grow(b, fragment)
    if b.rng.random() > ALONE_SHARE:
        _grow_at_random(b, SCALED_POLICIES if fragment is triple else list(POLICIES))


def _grow_at_random(b: ProgramBuilder, policies: Sequence[str]) -> None:
    """Add one to three fragments of a policy, and glue around them."""
    weights = POLICIES[b.rng.choice(policies)]
    for _ in range(b.rng.choice((1, 1, 1, 2, 2, 3))):
        if b.rng.random() < 0.25:
            _grow(b, b.rng.choice(GLUE))
        _grow(b, b.rng.choices(HEAVY, weights)[0])
        while b.rng.random() < 0.35:
            _grow(b, b.rng.choice(GLUE))


def _finished(b: ProgramBuilder, kind: str, seed: int) -> RandomProgram:
    """Make a program of the steps, with the arguments that they need."""
    outputs = _outputs(b)
    used = {*outputs, *(n for s in b.steps for n in s.reads)}
    return RandomProgram(
        sizes=tuple(b.sizes.items()),
        inputs=tuple(v for v in b.inputs if v.name in used),
        steps=tuple(b.steps),
        outputs=outputs,
        kind=kind,
        seed=seed,
        borders=tuple(b.borders),
    )


def _close_off(b: ProgramBuilder) -> None:
    """Some consecutive steps in a scope of their own."""
    if b.steps:
        first = b.rng.randrange(len(b.steps))
        last = b.rng.randrange(first, len(b.steps))
        b.borders.append(Border(b.rng.choice(BORDERS), tuple(s.value.name for s in b.steps[first : last + 1])))


def _grow(b: ProgramBuilder, fragment: Fragment) -> None:
    """Add a fragment; undone if a value gets too large."""
    inputs, steps, borders = list(b.inputs), list(b.steps), list(b.borders)
    fragment(b, b.any(rank=2))
    new = [v for v in b.values if v not in inputs]
    if len(b.steps) > MAX_STEPS or any(b.elements(*v.shape) > MAX_ELEMENTS or len(v.shape) > 4 for v in new):
        b.inputs, b.steps, b.borders = inputs, steps, borders


def _outputs(b: ProgramBuilder) -> tuple[str, ...]:
    """Take mostly the last value, at times several; other values may be dead code."""
    floats = [s.value.name for s in b.steps if s.value.is_float] or [b.any().name]
    extra = [n for n in floats[:-1] if b.rng.random() < 0.5] if b.rng.random() < 0.3 else []
    return (*extra, floats[-1])


def _wrapped(rng: random.Random, p: RandomProgram) -> RandomProgram:
    """Put up to three transformations around and inside of the optimizer, and give an input twice."""
    wrappers: list[Wrapper] = []
    grad = "" if any(border.kind == "while" for border in p.borders) else "grad"  # such loops have no gradients
    for name in rng.choices(("", "jit", grad, "vmap", "scan", "checkpoint"), (9, 1, 3, 3, 2, 1), k=3):
        if name in ("vmap", "scan"):
            mapped = [rng.random() < 0.6 for _ in p.inputs]
            mapped[rng.randrange(len(mapped))] = True
            wrappers.append(Wrapper(name, tuple(mapped), rng.choice((1, 2, 3))))
        elif name and not (name == "grad" and _has_gradient(wrappers)):
            wrappers.append(Wrapper(name))
    if _has_gradient(wrappers) and not any(v.is_float for v in p.inputs):
        wrappers = []
    cut = rng.randint(0, len(wrappers))
    p = replace(p, inner=tuple(wrappers[:cut]), outer=tuple(wrappers[cut:]))
    pairs = _equal_pairs(p.specs)
    return replace(p, same=(rng.choice(pairs),)) if pairs and rng.random() < 0.15 else p


def _equal_pairs(items: Sequence[object]) -> list[tuple[int, int]]:
    """Numbers of equal items, the later one first."""
    return [(i, j) for i, a in enumerate(items) for j, b in enumerate(items[:i]) if a == b]


def _has_gradient(wrappers: Sequence[Wrapper]) -> bool:
    return any(w.name == "grad" for w in wrappers)
