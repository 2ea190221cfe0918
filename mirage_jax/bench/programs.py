"""The programs of the benchmark: plain JAX functions, their shapes, and the limits of the hardware.

Suite "mirage" has the eight programs of Mirage (OSDI'25, section 8) at batch sizes 1 and 8. "prefill" has such programs
at the size of a prompt, "attention" a prompt's attention, plain and causal, in the usual types and widths. "also" has
programs of the paper's first version. "beyond" has other common programs: layer normalization, a whole gated block, a
loss, gradients, weights of 4 and 8 bits with scales of groups. "algebra" has programs that only another order of
evaluation makes fast, on any device. Data is float16 ("algebra": float32) and normal; a weight is scaled by the root of
its fan-in so that no program overflows. Bytes are uniform.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax.config import unknown
from mirage_jax.errors import UsageError
from mirage_jax.hardware.gpus import GPUS, Gpu


def _wide(x: jax.Array) -> jax.Array:
    """Half precision as float32; float64 stays, so that the program in float64 is a reference."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms(x: jax.Array) -> jax.Array:
    """Normalize by the root mean square."""
    wide = _wide(x)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(Q K) V, for q[H, N, D], k[H, D, M], v[H, M, E]"""
    return jax.nn.softmax(q @ k, axis=-1) @ v


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend to keys up to the query."""
    scores = q @ k
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v


def qknorm_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend with normalized queries and values."""
    return jax.nn.softmax(rms(q) @ k, axis=-1) @ rms(v)


def rmsnorm(x: jax.Array, w: jax.Array) -> jax.Array:
    """rms(x) W"""
    return rms(x) @ w


def gated_mlp(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    """silu(x W1) * (x W2)"""
    return jax.nn.silu(x @ w1) * (x @ w2)


def ntrans(h: jax.Array, x: jax.Array, a: jax.Array) -> jax.Array:
    """rms(x + a (rms(h) - x)): a step of nGPT"""
    return rms(x + a * (rms(h) - x))


def lora(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """x W + x A B"""
    return x @ w + (x @ a) @ b


def exp_mlp(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """exp(x A) B"""
    return jnp.exp(x @ a) @ b


def matrix_matrix_vector(a: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
    """(A B) v"""
    return (a @ b) @ v


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array, w: jax.Array) -> jax.Array:
    """layer_norm(x) W"""
    wide = _wide(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6)
    return (centred * scale * gain + bias).astype(x.dtype) @ w


def gated_block(x: jax.Array, w1: jax.Array, w2: jax.Array, w3: jax.Array) -> jax.Array:
    """A gated MLP with its norm and last product."""
    return gated_mlp(rms(x), w1, w2) @ w3


def lora_rmsnorm(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """LoRA of a normalized input."""
    return lora(rms(x), w, a, b)


def cross_entropy(h: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """Compute the loss of logits h w, which need not be stored, with targets y."""
    return -jnp.sum(y * jax.nn.log_softmax(_wide(h @ w), axis=-1), axis=-1).astype(h.dtype)


def attention_gradients(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
    """Compute dQ, dK and dV from the inputs alone."""
    attend = lambda q, k, v: jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2), axis=-1) @ v  # noqa: E731
    return jnp.stack(jax.vjp(attend, q, k, v)[1](g))


def _scaled(w: jax.Array, scale: jax.Array) -> jax.Array:
    """Weights [k, n] of integers by their scales [groups, n]: k / groups rows in a row share one (AWQ, GPTQ)."""
    groups = w.reshape(scale.shape[0], -1, w.shape[1]).astype(scale.dtype)
    return (groups * scale[:, None]).reshape(w.shape)


def w8a16(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply by weights that are bytes with a zero point of 128."""
    return x @ _scaled(w.astype(jnp.int32) - 128, scale)


def w4a16(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply by weights that are halves of bytes, the low one first, with a zero point of 8."""
    halves = jnp.stack([w & 15, w >> 4], axis=1).reshape(-1, w.shape[1])
    return x @ _scaled(halves.astype(jnp.int32) - 8, scale)


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """(Q K^T) V"""
    return (q @ jnp.swapaxes(k, -1, -2)) @ v


type Shape = tuple[int, ...]
type Fn = Callable[..., jax.Array]


@dataclass(frozen=True)
class BenchProgram:
    """One row of a suite. `scales` are the standard deviations of the arguments; `flops` counts multiply-adds twice."""

    name: str
    suite: str
    fn: Fn
    shapes: tuple[tuple[str, Shape], ...]
    scales: tuple[float, ...]
    flops: int
    dtype: str = "float16"
    packed: tuple[str, ...] = ()  # arguments that are bytes

    @property
    def kind(self) -> str:
        """The function, whatever its sizes; peers know a program by it."""
        return self.fn.__name__

    @property
    def inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the arguments."""
        dtypes = ("uint8" if name in self.packed else self.dtype for name, _ in self.shapes)
        return tuple(jax.ShapeDtypeStruct(s, jnp.dtype(d)) for (_, s), d in zip(self.shapes, dtypes, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes moved if every input is read once and the output written once."""
        output = jax.eval_shape(self.fn, *self.inputs)
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in (*self.inputs, output))

    def limit(self, gpu: Gpu = GPUS["H200"]) -> float:
        """Compute the least seconds that any implementation takes on a GPU (the default is an H200 as measured)."""
        return max(self.bytes / gpu.bandwidth, self.flops / gpu.matrix)

    def draw(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Draw arguments on the default device: on every machine the same for a seed, but for rounding."""
        return _drawn(self.inputs, self.scales, jax.random.key(seed))

    def in_float64(self, args: Iterable[jax.Array]) -> np.ndarray:
        """Evaluate the function in float64 on the same inputs, as the reference for errors."""
        with jax.enable_x64(True):
            wide = (np.asarray(a, np.uint8 if a.dtype == np.uint8 else np.float64) for a in args)
            return np.asarray(jax.jit(self.fn)(*map(jnp.asarray, wide)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drawn(
    inputs: tuple[jax.ShapeDtypeStruct, ...], scales: tuple[float, ...], key: jax.Array
) -> tuple[jax.Array, ...]:
    def one(key: jax.Array, like: jax.ShapeDtypeStruct, scale: float) -> jax.Array:
        if like.dtype == np.uint8:
            return jax.random.bits(key, like.shape, jnp.uint8)
        return (scale * jax.random.normal(key, like.shape, jnp.float32)).astype(like.dtype)

    return tuple(map(one, jax.random.split(key, len(inputs)), inputs, scales))


def _shrunk(size: int) -> int:
    """The extent that stands for `size` in a scaled-down program."""
    return size if size <= 16 else max(16, size // 32)


@dataclass(frozen=True)
class _Registry:
    programs: dict[str, BenchProgram]
    small: dict[str, BenchProgram]

    def add(
        self,
        name: str,
        suite: str,
        fn: Fn,
        flops: Callable[..., int],
        shapes: Mapping[str, Shape],
        *,
        dtype: str = "float16",
        weights: str = "",
        packed: str = "",
    ) -> None:
        """flops takes the shapes by name; `weights` names the arguments that are scaled by the root of their fan-in,
        `packed` those that are bytes.
        """
        if name in self.programs:
            raise UsageError(f"program {name!r} is registered twice")
        for table, size in ((self.programs, int), (self.small, _shrunk)):
            sized = {n: tuple(size(d) for d in s) for n, s in shapes.items()}
            scales = tuple(s[-2] ** -0.5 if n in weights.split() else 1.0 for n, s in sized.items())
            shaped = tuple(sized.items())
            table[name] = BenchProgram(name, suite, fn, shaped, scales, flops(**sized), dtype, tuple(packed.split()))


def _attention_flops(q: Shape, k: Shape, v: Shape) -> int:
    return 2 * math.prod(q) * k[-1] + 2 * math.prod(q[:-1]) * math.prod(v[-2:])


def _causal_flops(q: Shape, k: Shape, v: Shape) -> int:
    """Of as many queries as keys."""
    return _attention_flops(q, k, v) * (k[-1] + 1) // (2 * k[-1])


def _matmul_flops(x: Shape, *ws: Shape) -> int:
    """Of one x times each of the matrices ws."""
    return sum(2 * math.prod(x) * w[-1] for w in ws)


def _lora_flops(x: Shape, w: Shape, a: Shape, b: Shape) -> int:
    return _matmul_flops(x, w, a) + _matmul_flops((x[0], a[1]), b)


def _two_matmuls_flops(x: Shape, a: Shape, b: Shape) -> int:
    return _matmul_flops(x, a) + _matmul_flops((*x[:-1], a[-1]), b)


# Of the best order: a limit must not depend on how the program happens to be written.


def _abv_flops(a: Shape, b: Shape, v: Shape) -> int:
    return 2 * (math.prod(a) + math.prod(b))


def _linear_flops(q: Shape, k: Shape, v: Shape) -> int:
    return 4 * math.prod(q) * v[-1]


def _register(registry: _Registry) -> None:
    def attend(
        name: str, suite: str, heads: int, queries: int, keys: int, d: int = 64, fn: Fn = attention, dtype="float16"
    ) -> None:
        shapes = {"q": (heads, queries, d), "k": (heads, d, keys), "v": (heads, keys, d)}
        flops = _causal_flops if fn is causal_attention else _attention_flops
        registry.add(name, suite, fn, flops, shapes, dtype=dtype)

    def gate(name: str, suite: str, rows: int, inner: int) -> None:
        """Add a gated MLP."""
        shapes = {"x": (rows, 4096), "w1": (4096, inner), "w2": (4096, inner)}
        flops = lambda x, w1, w2: _matmul_flops(x, w1, w2)  # noqa: E731
        registry.add(name, suite, gated_mlp, flops, shapes, weights="w1 w2")

    def norm(name: str, suite: str, rows: int) -> None:
        """Add a norm with its product."""
        shapes = {"x": (rows, 4096), "w": (4096, 6144)}
        registry.add(name, suite, rmsnorm, lambda x, w: _matmul_flops(x, w), shapes, weights="w")

    for b in (1, 8):
        attend(f"gqa_b{b}", "mirage", 2 * b, 256, 4096)
        attend(f"mha_b{b}", "mirage", 32 * b, 16, 4096)
        attend(f"mqa_b{b}", "mirage", b, 1024, 4096)
        attend(f"qknorm_gqa_b{b}", "mirage", 2 * b, 256, 4096, fn=qknorm_attention)
        norm(f"rmsnorm_b{b}", "mirage", 2 * b)
        gate(f"gated_mlp_b{b}", "mirage", 8 * b, 4096)
        vectors = dict.fromkeys("hxa", (8 * b, 4096))
        registry.add(f"ntrans_b{b}", "mirage", ntrans, lambda h, x, a: 12 * math.prod(x), vectors)
        low_rank = {"x": (16 * b, 256), "w": (256, 4096), "a": (256, 16), "b": (16, 4096)}
        registry.add(f"lora_b{b}", "mirage", lora, _lora_flops, low_rank, weights="w a b")

        # Multi-head decoding of the paper's first version is mha above.
        attend(f"mha_prefill_b{b}", "also", 32 * b, 256, 1024)
        attend(f"gqa_decode_b{b}", "also", 2 * b, 8, 4096)
        attend(f"mqa_decode_b{b}", "also", b, 32, 4096)
        attend(f"mqa_prefill_b{b}", "also", b, 4096, 4096)
    mlp = {"x": (16, 8192), "a": (8192, 8), "b": (8, 8192)}
    registry.add("mlp", "also", exp_mlp, _two_matmuls_flops, mlp, weights="a b")
    moe = {"x": (8, 8, 4096), "a": (8, 4096, 4096), "b": (8, 4096, 4096)}
    registry.add("moe", "also", exp_mlp, _two_matmuls_flops, moe, weights="a b")

    _register_beyond(registry)

    attend("prefill_attn", "prefill", 32, 2048, 2048, d=128)
    gate("prefill_gated", "prefill", 2048, 11008)
    norm("prefill_rmsnorm", "prefill", 2048)

    for dtype, short in (("float16", "f16"), ("bfloat16", "bf16")):
        for d in (64, 128):
            attend(f"plain_{short}_d{d}", "attention", 32, 2048, 2048, d, attention, dtype)
            attend(f"causal_{short}_d{d}", "attention", 32, 2048, 2048, d, causal_attention, dtype)

    square = {"a": (2048, 2048), "b": (2048, 2048), "v": (2048,)}
    registry.add("abv", "algebra", matrix_matrix_vector, _abv_flops, square, dtype="float32", weights="a b")
    long = dict.fromkeys("qkv", (8, 2048, 64))
    registry.add("linear_attention", "algebra", linear_attention, _linear_flops, long, dtype="float32", weights="v")


def _register_beyond(registry: _Registry) -> None:
    """Add programs that are not in the paper."""
    wide = {"x": (16, 4096), "gain": (4096,), "bias": (4096,), "w": (4096, 4096)}
    registry.add("layer_norm", "beyond", layer_norm, lambda x, gain, bias, w: _matmul_flops(x, w), wide, weights="w")
    block = {"x": (8, 4096), "w1": (4096, 11008), "w2": (4096, 11008), "w3": (11008, 4096)}
    count = lambda x, w1, w2, w3: _matmul_flops(x, w1, w2) + _matmul_flops((x[0], w3[0]), w3)  # noqa: E731
    registry.add("gated_block", "beyond", gated_block, count, block, weights="w1 w2 w3")
    low_rank = {"x": (16, 4096), "w": (4096, 4096), "a": (4096, 16), "b": (16, 4096)}
    registry.add("lora_rmsnorm", "beyond", lora_rmsnorm, _lora_flops, low_rank, weights="w a b")
    tokens = {"h": (1024, 1024), "w": (1024, 50304), "y": (1024, 50304)}
    registry.add("cross_entropy", "beyond", cross_entropy, lambda h, w, y: _matmul_flops(h, w), tokens, weights="w")
    heads = dict.fromkeys("qkvg", (16, 4096, 64))
    flops = lambda q, k, v, g: 10 * math.prod(q) * k[1]  # noqa: E731
    registry.add("attention_gradients", "beyond", attention_gradients, flops, heads)
    for fn, per_byte in ((w8a16, 1), (w4a16, 2)):
        quantized = {"x": (8, 4096), "w": (4096 // per_byte, 14336), "scale": (32, 14336)}
        flops = lambda x, w, scale: _matmul_flops(x, w)  # noqa: E731
        registry.add(fn.__name__, "beyond", fn, flops, quantized, weights="scale", packed="w")


_REGISTRY = _Registry({}, {})
_register(_REGISTRY)

SUITES = ("mirage", "prefill", "attention", "also", "beyond", "algebra")


def program(name: str, small: bool = False) -> BenchProgram:
    """Find a program; `small` is the same function on extents that a test can afford. Raises `UsageError`."""
    table = _REGISTRY.small if small else _REGISTRY.programs
    if name not in table:
        raise UsageError(unknown("program", name, table))
    return table[name]


def suite(name: str, small: bool = False) -> list[BenchProgram]:
    """List the programs of a suite, in the order of the tables; "all" has every suite's. Raises `UsageError`."""
    if name not in (*SUITES, "all"):
        raise UsageError(unknown("suite", name, (*SUITES, "all")))
    names = [p.name for p in _REGISTRY.programs.values() if name in (p.suite, "all")]
    return [program(n, small) for n in names]
