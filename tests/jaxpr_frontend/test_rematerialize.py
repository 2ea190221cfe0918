"""``remat="regions"``: the same values and gradients, and no scores between the forward and the backward pass."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import instructions
from jax.ad_checkpoint import checkpoint_name
from jaxpr_frontend.replacing import Picky, Replacing, assert_close, optimized, random

from mirage_jax.jaxpr_frontend.capture.call_primitive import mirage_call_p
from mirage_jax.jaxpr_frontend.capture.lowering import (
    FIRST_CUT,
    OURS,
    PLAIN,
    WITHOUT,
    First,
    LoweringPlan,
    WholeProgram,
    _rounds,
    plan,
    planned,
)
from mirage_jax.jaxpr_frontend.capture.rematerialize import checkpointed, repeated
from mirage_jax.jaxpr_frontend.jax_compat import LoweringTarget, both_passes
from mirage_jax.jaxpr_frontend.partition.program import flatten
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region

T, H, D = 64, 2, 8
SCORES = H * T * T
WEIGHTS = tuple(random(H * D, 3 * H * D, seed=n) for n in range(2)), tuple(random(H * D, H * D, seed=n) for n in (3, 4))
X = random(T, H * D)
QKV = tuple(random(H, T, D, seed=n) for n in range(3))
BIAS = random(1, T, T)


def heads(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x.reshape(T, H, D), 1, 0)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = q @ k.swapaxes(-1, -2) / math.sqrt(D)
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)) @ v


def biased(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.einsum("hqd,hkd->hqk", q, k) + BIAS.astype(q.dtype)
    s = 5 * jnp.tanh(s / 5)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return (e / e.sum(-1, keepdims=True)) @ v


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    one = [jnp.moveaxis(x, 0, 1)[None] for x in (q, k[:1], v[:1])]
    return jnp.moveaxis(jax.nn.dot_product_attention(*one, is_causal=True)[0], 1, 0)


def padded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """JAX shows the mask as large as the scores."""
    is_token = v[0, :, 0] > -1
    one = [jnp.moveaxis(x, 0, 1)[None] for x in (q, k, v)]
    return jnp.moveaxis(jax.nn.dot_product_attention(*one, mask=is_token[None, None, None])[0], 1, 0)


def layer(x: jax.Array, w: jax.Array, out: jax.Array, attend: Callable[..., jax.Array] = attention) -> jax.Array:
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    y = attend(*map(heads, jnp.split(normed @ w, 3, -1)))
    return x + jnp.sin(jnp.moveaxis(y, 0, 1).reshape(T, H * D)) @ out


def loop(x: jax.Array, ws: Any, outs: Any, attend: Callable[..., jax.Array] = attention) -> jax.Array:
    for w, out in zip(ws, outs, strict=True):
        x = layer(x, w, out, attend)
    return x


def scanned(x: jax.Array, ws: Any, outs: Any, each: Callable[..., jax.Array] = layer) -> jax.Array:
    step = lambda c, p: (each(c, *p), None)  # noqa: E731
    return jax.lax.scan(step, x, (jnp.stack(ws), jnp.stack(outs)))[0]


MODELS: dict[str, Callable[..., jax.Array]] = {
    "loop": loop,
    "scan": scanned,
    "scan in scan": lambda x, *p: jax.lax.scan(lambda c, _: (scanned(c, *p), None), x, length=2)[0],
    "biased": lambda x, ws, outs: layer(x, ws[0], outs[0], biased),
    "grouped": lambda x, ws, outs: layer(x, ws[0], outs[0], grouped),
    "padded": lambda x, ws, outs: loop(x, ws, outs, padded),
    "jit inside": jax.jit(loop),
    "checkpoint inside": lambda x, ws, outs: jax.checkpoint(layer)(x, ws[0], outs[0]),
    "checkpoint with policy": lambda x, ws, outs: jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(
        x, ws[0], outs[0]
    ),
    "scan of checkpoint": partial(scanned, each=jax.checkpoint(layer, prevent_cse=False)),
    "cond": lambda x, *p: jax.lax.cond(x[0, 0] > 0, loop, lambda x, *_: x, x, *p),
    "vmap": lambda x, ws, outs: jax.vmap(lambda x: layer(x, ws[0], outs[0]))(jnp.stack([x, 2 * x])),
}
SAVES_THEM = {"checkpoint with policy"}  # as the user says


def square(f: Callable[..., jax.Array], *args: Any) -> jax.Array:
    return (f(*args).astype(jnp.float32) ** 2).sum()


def kept(f: Callable[..., Any], *args: Any) -> int:
    """The most numbers that one value has which is kept for the backward pass."""
    pullback = jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *args)
    return max(x.size for x in jax.tree.leaves(pullback))


def cast(dtype: str) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), (X, *WEIGHTS))


def assert_same_gradients(have: Callable[..., Any], want: Callable[..., Any], args: Any) -> None:
    values = jax.jit(have)(*args), jax.jit(want)(*args)
    assert_close(*values, 1e-4 if args[0].dtype == "float32" else 2e-2)


def gradients(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.value_and_grad(partial(square, f), (0, 1, 2))


CASES = [*((name, "float32") for name in MODELS), ("loop", "float16"), ("biased", "float16")]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_differentiated_from_outside(name: str, dtype: str) -> None:
    args, f, compiler = cast(dtype), MODELS[name], Replacing(checkpoints=True)
    g = optimized(f, compiler)
    assert_same_gradients(gradients(g), gradients(f), args)
    if name not in SAVES_THEM:
        assert kept(g, *args) < SCORES
        assert all(reads_less(region) for region in compiler.regions)
    assert kept(optimized(f), *args) >= SCORES or "checkpoint" in name


def reads_less(region: Any, than: int = SCORES) -> bool:
    """Whether a region neither reads nor makes what has as many elements as scores."""
    graph = region.graph
    tensors = [*graph.inputs, *(graph.tensors[n] for n in graph.outputs)]
    return all(math.prod(map(graph.extent, t.axes)) < than for t in tensors)


@pytest.mark.parametrize(
    ("name", "dtype"), [c for c in CASES if c[0] in ("loop", "biased", "grouped", "padded", "vmap")]
)
def test_function_that_differentiates_itself(name: str, dtype: str) -> None:
    args, step, compiler = cast(dtype), gradients(MODELS[name]), Replacing(checkpoints=True)
    assert_same_gradients(optimized(step, compiler), step, args)
    assert all(reads_less(region) for region in compiler.regions)
    stored = Replacing()
    optimized(step, stored).lower(*args)
    assert not all(reads_less(region) for region in stored.regions)


def kernel_sums(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1) / 2) @ w


@pytest.mark.parametrize("inside", [False, True])
def test_distances_are_made_again(inside: bool) -> None:
    """A sum over a few coordinates expands as a product does, though it is none."""
    args, compiler = (random(T, 3), random(2 * T, 3, seed=1), random(2 * T, seed=2)), Replacing(checkpoints=True)
    step = gradients(kernel_sums)
    have = optimized(step, compiler) if inside else gradients(optimized(kernel_sums, compiler))
    assert_same_gradients(have, step, args)
    distances = 2 * T * T
    assert compiler.regions and all(reads_less(region, distances) for region in compiler.regions)
    if not inside:
        assert kept(optimized(kernel_sums, compiler), *args) < distances <= kept(optimized(kernel_sums), *args)


OUTSIDE = {
    "outside": lambda f: lambda wrap: gradients(wrap(f)),
    "inside": lambda f: lambda wrap: wrap(gradients(f)),
    "vmap of grad": lambda f: lambda wrap: jax.vmap(jax.grad(partial(square, wrap(f))), (None, 0, 0)),
}


@pytest.mark.parametrize("name", ["loop", "scan", "grouped", "checkpoint inside", "cond", "vmap"])
@pytest.mark.parametrize("how", OUTSIDE)
def test_without_kernels_the_program_is_the_one_of_jax(name: str, how: str) -> None:
    x, *rest = cast("float32")
    args = (x, *rest) if how != "vmap of grad" else (x, *jax.tree.map(lambda w: jnp.stack([w, 2 * w]), rest))
    make = OUTSIDE[how](MODELS[name])
    have = jax.jit(make(lambda f: optimized(f, Picky(checkpoints=True))))
    assert instructions(have, *args) == instructions(jax.jit(make(lambda f: f)), *args)


def layers_of_two_kinds(x: jax.Array, wide: jax.Array, narrow: jax.Array) -> jax.Array:
    """Attention with 20 numbers in a head, then with 8."""
    for w in (wide, narrow):
        q, k, v = jnp.split(jnp.sin(x) @ w, 3, -1)
        x = x + jnp.pad(attention(q, k, v), ((0, 0), (0, 32 - q.shape[-1])))
    return x


def is_wide(region: Region) -> bool:
    return 20 in region.graph.sizes.values()


TWO_KINDS = random(T, 32), random(32, 60), random(32, 24)


def test_values_are_made_again_only_for_kernels_that_were_chosen() -> None:
    step = jax.grad(partial(square, layers_of_two_kinds), (0, 1, 2))
    jaxpr, target = jax.make_jaxpr(step)(*TWO_KINDS), LoweringTarget(("cpu",))
    again = {}
    for name, takes in {"all": lambda r: True, "narrow": lambda r: not is_wide(r), "none": lambda r: False}.items():
        compiler = Picky(checkpoints=True, takes=takes)
        again[name] = set(planned(jaxpr, compiler, mirage_call_p, target).program.again.values())
        assert_same_gradients(optimized(step, compiler), step, TWO_KINDS)
    assert (len(again["all"]), len(again["narrow"]), len(again["none"])) == (2, 1, 0)
    assert again["narrow"] < again["all"]


def test_checkpoints_are_there_only_for_kernels_that_were_chosen() -> None:
    loss, counts = partial(square, layers_of_two_kinds), []
    for takes in (lambda r: True, lambda r: not is_wide(r), lambda r: False):
        step = jax.jit(jax.grad(optimized(loss, Picky(checkpoints=True, takes=takes)), (0, 1, 2)))
        assert_same_gradients(step, jax.grad(loss, (0, 1, 2)), TWO_KINDS)
        counts.append(step.lower(*TWO_KINDS).as_text().count("optimization_barrier"))
    assert counts[0] == 2 * counts[1] > counts[2] == 0


def test_what_is_left_to_xla_in_the_end_is_made_once() -> None:
    """Kernels were chosen for the function alone; under `vmap` there are none."""
    loss = partial(square, attention)
    compiler = Picky(checkpoints=True, takes=lambda r: 3 not in r.graph.sizes.values())
    step = jax.vmap(jax.grad(optimized(loss, compiler), (0, 1, 2)))
    args = [jnp.stack([x, 2 * x, 3 * x]) for x in QKV]
    assert instructions(jax.jit(step), *args) == instructions(jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)))), *args)
    assert "optimization_barrier" in jax.jit(jax.grad(optimized(loss, compiler))).lower(*QKV).as_text()


@pytest.mark.parametrize("chosen", [PLAIN, WITHOUT, OURS])
@pytest.mark.parametrize("inside", [True, False])
def test_the_fastest_variant_runs(chosen: str, inside: bool) -> None:
    @dataclass(frozen=True, eq=False)
    class Chooses(Replacing):
        def choose(self, whole: WholeProgram) -> First:
            return First(chosen)

    loss = partial(square, attention)
    wrap = partial(optimized, compiler=Chooses(checkpoints=True))
    step = wrap(jax.grad(loss, (0, 1, 2))) if inside else jax.jit(jax.grad(wrap(loss), (0, 1, 2)))
    assert_same_gradients(step, jax.grad(loss, (0, 1, 2)), QKV)
    if chosen == PLAIN:
        assert instructions(step, *QKV) == instructions(jax.jit(jax.grad(loss, (0, 1, 2))), *QKV)
    if not inside:
        assert ("optimization_barrier" in step.lower(*QKV).as_text()) == (chosen == OURS)


@dataclass(frozen=True)
class Plain(First):
    """Plain jit runs. `lost`: the labels that recomputed and lost before."""

    chosen: str = PLAIN
    lost: tuple[str, ...] = ()

    def after(self, lost: Any, labels: Iterable[str]) -> "Plain":
        return Plain(lost=tuple(labels))


def test_what_lost_is_known_where_regions_are_tuned_once_more() -> None:
    asked = list[WholeProgram]()

    @dataclass(frozen=True, eq=False)
    class Chooses(Replacing):
        def choose(self, whole: WholeProgram) -> First:
            asked.append(whole)
            return Plain()

    step, target = jax.grad(partial(square, attention), (0, 1, 2)), LoweringTarget(("cpu",))
    found = plan(jax.make_jaxpr(step)(*QKV), Chooses(checkpoints=True), mirage_call_p, target)
    (first, *_), (last, *_) = (whole.variants for whole in asked[:2])
    assert found.whole == Plain(lost=(first,)) and WITHOUT in asked[0].variants
    assert asked[0].variants[first]().makes_again and not asked[1].variants[last]().makes_again


@dataclass(frozen=True, eq=False)
class OutOfTime(Picky):
    """Decides no region of a program that was cut before: no time is left. `seen`: what `choose` was asked."""

    decided: set[str] = field(default_factory=set)
    seen: list[WholeProgram] = field(default_factory=list)

    def prepare(self, regions: Any, target: LoweringTarget, again: bool = False) -> None:
        self.decided.update(r.text for r in regions if not again and self.takes(r))

    def compile_region(self, region: Region, platforms: tuple[str, ...] = ()) -> Any:
        return Replacing.compile_region(self, region, platforms) if region.text in self.decided else None

    known_region = compile_region

    def choose(self, whole: WholeProgram) -> First:
        self.seen.append(whole)
        return First(next(iter(whole.variants)))


def first_lost(jaxpr: Any) -> str:
    """A kind of region whose kernel the last round has no place for, if it is the only one."""
    target = LoweringTarget(("cpu",))

    def is_lost(kind: str) -> bool:
        compiler = OutOfTime(checkpoints=True, takes=lambda r: r.text == kind)
        first, *_, last = _rounds(jaxpr, compiler, mirage_call_p, target)
        return not first.kernels <= last.kernels

    kinds = (r.text for r in _rounds(jaxpr, OutOfTime(checkpoints=True), mirage_call_p, target)[0].analysis().regions)
    return next(filter(is_lost, kinds))


@pytest.mark.parametrize("inside", [True, False])
def test_kernels_that_were_found_first_are_not_lost_where_no_time_is_left(inside: bool) -> None:
    """What is left to XLA is cut otherwise then, and a kernel's region with it."""
    loss = partial(square, layers_of_two_kinds)
    step = jax.grad(loss, (0, 1, 2))
    jaxpr = jax.make_jaxpr(step if inside else loss)(*TWO_KINDS)
    kind = first_lost(jaxpr if inside else both_passes(checkpointed(jaxpr)))
    compiler = OutOfTime(checkpoints=True, takes=lambda r: r.text == kind)
    wrap = partial(optimized, compiler=compiler)
    ours = wrap(step) if inside else jax.jit(jax.grad(wrap(loss), (0, 1, 2)))
    assert_same_gradients(ours, step, TWO_KINDS)
    whole = compiler.seen[0]
    assert FIRST_CUT in whole.variants and whole.variants[FIRST_CUT]().replaced
    assert all(plan().replaced for plan in whole.with_kernels.variants.values())
    assert inside or "optimization_barrier" in ours.lower(*TWO_KINDS).as_text()


@dataclass(frozen=True, eq=False)
class InSecondRound(Picky):
    """Takes regions in the second round alone. `rounds`: the regions of each."""

    rounds: list[list[Region]] = field(default_factory=list)

    def prepare(self, regions: Any, target: LoweringTarget, again: bool = False) -> None:
        self.rounds.append(list(regions))

    def compile_region(self, region: Region, platforms: tuple[str, ...] = ()) -> Any:
        return Picky.compile_region(self, region, platforms) if len(self.rounds) == 2 else None

    known_region = compile_region

    def choose(self, whole: WholeProgram) -> First:
        return First(next(iter(whole.variants)))


def lesser(state: jax.Array, action: jax.Array, *weights: jax.Array) -> jax.Array:
    """The lesser of two MLPs' values, as critics of reinforcement learning have it."""

    def mlp(x: jax.Array, *layers: jax.Array) -> jax.Array:
        for w, b in zip(layers[:4:2], layers[1:4:2], strict=True):
            x = jax.nn.relu(x @ w + b)
        return x @ layers[4] + layers[5]

    x = jnp.concatenate([state, action], -1)
    return jnp.minimum(mlp(x, *weights[:6]), mlp(x, *weights[6:]))


def test_kernels_of_a_round_between_the_first_and_the_last_are_not_lost() -> None:
    mlp = ((23, 256), (256,), (256, 256), (256,), (256, 1), (1,))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 17), (4096, 6), *mlp, *mlp)]
    jaxpr = jax.make_jaxpr(jax.grad(partial(square, lesser), (2, 4, 6, 8, 10, 12)))(*args)
    target = LoweringTarget(("cpu",))

    def rounds(kind: str) -> list[LoweringPlan]:
        return _rounds(jaxpr, InSecondRound(checkpoints=True, takes=lambda r: r.text == kind), mirage_call_p, target)

    cut = InSecondRound(checkpoints=True, takes=lambda r: False)
    _rounds(jaxpr, cut, mirage_call_p, target)
    kind = next(r.text for r in cut.rounds[1] if len(rounds(r.text)) > 2)
    first, second, *_, last = rounds(kind)
    assert second.replaced and not first.replaced and not last.replaced
    found = plan(jaxpr, InSecondRound(checkpoints=True, takes=lambda r: r.text == kind), mirage_call_p, target)
    assert found.kernels == second.kernels


SMALL = (X, *(w[0] for w in WEIGHTS))


TRANSFORMATIONS: dict[str, Callable[..., Any]] = {
    "jvp": lambda f: lambda *a: jax.jvp(f, a, a),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
    "vmap of grad": lambda f: jax.vmap(jax.grad(partial(square, f)), (0, None, None)),
    "forward over reverse": lambda f: lambda *a: jax.jvp(jax.grad(partial(square, f)), a, a),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_other_transformations(name: str) -> None:
    g, transform = optimized(attention, Replacing(checkpoints=True)), TRANSFORMATIONS[name]
    q, k, v = QKV
    args = (jnp.stack([q, 2 * q]), k, v) if name.startswith("vmap") else QKV
    assert_same_gradients(transform(g), transform(attention), args)


def test_forward_mode_makes_nothing_again() -> None:
    g = optimized(layer, Replacing(checkpoints=True))
    for f in (g, lambda *a: jax.jvp(g, a, a)):
        assert "optimization_barrier" not in jax.jit(f).lower(*SMALL).as_text()
    assert "optimization_barrier" in jax.jit(gradients(g)).lower(*SMALL).as_text()


def test_derivatives_of_their_own() -> None:
    """What a function says of its derivative is not what follows from its content."""

    @jax.custom_vjp
    def clipped(s):
        return jnp.tanh(s)

    clipped.defvjp(lambda s: (jnp.tanh(s), None), lambda _, g: (3 * g,))

    @jax.custom_jvp
    def doubled(s):
        return s * s

    doubled.defjvp(lambda p, t: (p[0] * p[0], 7 * t[0]))

    def attend(q, k, v):
        return doubled(jax.nn.softmax(clipped(q @ k.swapaxes(-1, -2)))) @ v

    f = partial(layer, attend=attend)
    for step in (
        gradients(optimized(f, Replacing(checkpoints=True))),
        optimized(gradients(f), Replacing(checkpoints=True)),
    ):
        assert_same_gradients(step, gradients(f), SMALL)


def test_what_is_left_as_it_is() -> None:
    """Scores that the user names, that other primitives read, or that are no larger than what they are made of."""

    def named(q, k, v):
        return checkpoint_name(jax.nn.softmax(q @ k.swapaxes(-1, -2)), "weights") @ v

    policy = jax.checkpoint_policies.save_only_these_names("weights")
    f = jax.checkpoint(partial(layer, attend=named), policy=policy)
    assert kept(optimized(f, Replacing(checkpoints=True)), *SMALL) >= SCORES
    assert_same_gradients(gradients(optimized(f, Replacing(checkpoints=True))), gradients(f), SMALL)

    def sorted_scores(q, k, v):
        return jnp.sort(q @ k.swapaxes(-1, -2)) @ v

    step = gradients(partial(layer, attend=sorted_scores))
    assert_same_gradients(optimized(step, Replacing(checkpoints=True)), step, SMALL)
    short = jax.make_jaxpr(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v)(*[jnp.ones((12, 8))] * 3)
    assert checkpointed(short) is short
    program = flatten(short)
    assert repeated(program) is program


@pytest.mark.parametrize("width", [64, 320])
def test_adapters_are_not_made_again(width: int) -> None:
    """x W + x A B: the first product is as large as the sum, and takes long to make if it is wide."""

    def f(x, w, a, b):
        for _ in range(2):
            x = jnp.tanh((x @ w + (x @ a) @ b).astype(jnp.float32)).astype(x.dtype)
        return jnp.sort(x)

    shapes = (64, width), (width, width), (width, 4), (4, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = flatten(jax.make_jaxpr(jax.value_and_grad(partial(square, f), (2, 3)))(*args))
    assert repeated(program) is program


def test_effects_and_constants_around_units() -> None:
    table = np.linspace(0, 1, H * D, dtype="float32")

    def f(x, w, out):
        jax.debug.print("norm {}", jnp.sum(x * table))
        return layer(x * table, w, out)

    g = optimized(f, Replacing(checkpoints=True))
    assert_same_gradients(gradients(g), gradients(f), SMALL)
    assert kept(g, *SMALL) < SCORES
    counted = lambda x, w, out: layer(x, w, out) * jax.new_ref(x)[...]  # noqa: E731
    assert_same_gradients(gradients(optimized(counted, Replacing(checkpoints=True))), gradients(counted), SMALL)


def test_gradients_are_stored_as_they_are_read() -> None:
    """Scores in float32, operands in bfloat16: gradients are cast and transposed within the backward region."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """q, k, v[T, H, D]."""
        s = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=jnp.float32)
        p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
        return jnp.einsum("hts,shd->thd", p, v)

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x).astype(jnp.float32))), argnums=(0, 1, 2))(q, k, v)

    args = [jax.ShapeDtypeStruct((T, H, D), jnp.bfloat16)] * 3
    regions = analyse(jax.make_jaxpr(step)(*args).jaxpr, remat=True).regions
    backward = max(regions, key=lambda r: len(r.graph.kernels))
    assert len(backward.outputs) >= 2
    assert {backward.graph.tensors[name].dtype for name in backward.graph.outputs} == {"bf16"}
    assert {o.shape for o in backward.outputs} == {(T, H, D)}


def test_copies_stand_where_all_that_they_read_is_made() -> None:
    """The gate's gradient reads zeros that JAX writes after the first equation that wants a copy."""

    def gated(x: jax.Array, up: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """x[R, C], up[C, M], a[M, C], b[M, C]."""
        h = x @ up
        return jax.nn.relu(h @ a) * (h @ b)

    step = jax.grad(partial(square, gated), (0, 1, 2, 3))
    args = [random(512, 16), random(16, 31), random(31, 16, seed=1), random(31, 16, seed=2)]
    original = flatten(jax.make_jaxpr(step)(*args).jaxpr)
    program = repeated(original)
    assert program is not original
    made = {*program.inputs, *program.constants}
    for eqn in program.eqns:
        assert made.issuperset((*eqn.reads, *eqn.after))
        made |= {*eqn.outputs}
    assert_same_gradients(optimized(step, Replacing(checkpoints=True)), step, args)
