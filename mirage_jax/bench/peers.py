"""Other implementations in the same run: cuDNN's attention from JAX, torch.compile, and torch's attention.

A peer serves the kinds of programs that it names (`Program.kind`) and gets the arguments of a program in the layout
that it likes best: rearranging them is not part of its time. cuDNN's attention and torch's take keys as
[heads, keys, d], where the programs have [heads, d, keys]. JAX peers are timed as every JAX candidate is; torch peers
time themselves, as one CUDA graph over the same sets of inputs, between two events. torch is imported on first use. It
takes its memory from what JAX has left: a quarter of the GPU, or all that is not in use with
``XLA_PYTHON_CLIENT_PREALLOCATE=false``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax import timing
from mirage_jax.bench.programs import BenchProgram
from mirage_jax.errors import UnsupportedError

type Arguments = tuple[jax.Array, ...]


class Peer(ABC):
    """Somebody else's implementation of some kinds of programs."""

    kinds: Collection[str]

    def serves(self, program: BenchProgram) -> bool:
        """Whether the peer runs such programs."""
        return program.kind in self.kinds

    @abstractmethod
    def result(self, program: BenchProgram, args: Arguments) -> np.ndarray:
        """Run the program; the result has the program's layout. Raises any error that keeps the peer from running."""

    @abstractmethod
    def call(self, program: BenchProgram, sets: Sequence[Arguments]) -> timing.Call:
        """Make a call that runs the program on all sets in turn, and waits; with a `span` if it times itself."""


ATTENTION = ("attention", "causal_attention")


# cuDNN from JAX.


def keys_first(q: jax.Array, k: jax.Array, v: jax.Array) -> Arguments:
    """Rearrange Q[h,i,d] K[h,d,n] V[h,n,e] as [batch, length, heads, width], with each head as a batch element."""
    return tuple(jnp.expand_dims(x, 2) for x in (q, k.swapaxes(-1, -2), v))


@dataclass(frozen=True)
class JaxAttention(Peer):
    """`jax.nn.dot_product_attention`, unscaled."""

    implementation: Any = "cudnn"
    kinds: ClassVar = ATTENTION

    def function(self, program: BenchProgram) -> Callable[..., jax.Array]:
        """Compile the attention of a program."""
        options = {"scale": 1.0, "is_causal": program.kind == "causal_attention", "implementation": self.implementation}
        return jax.jit(functools.partial(jax.nn.dot_product_attention, **options))

    def result(self, program: BenchProgram, args: Arguments) -> np.ndarray:
        """Run a program in its own layout."""
        return np.asarray(jnp.squeeze(self.function(program)(*keys_first(*args)), 2))

    def call(self, program: BenchProgram, sets: Sequence[Arguments]) -> timing.Call:
        """Run compiled attention on each set."""
        arranged = jax.block_until_ready([keys_first(*s) for s in sets])
        return timing.in_turn(self.function(program).lower(*arranged[0]).compile(), arranged)


# torch.


def _torch() -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UnsupportedError("torch is not installed") from None
    if not torch.cuda.is_available():
        raise UnsupportedError("torch sees no CUDA device")
    return torch


def _rms(torch: Any, x: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _causal(torch: Any, q: Any, k: Any, v: Any) -> Any:
    scores = q @ k
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


# The programs of `bench.programs` as one writes them in torch, by kind; the module comes first.
SPELLINGS: Mapping[str, Callable[..., Any]] = {
    "attention": lambda torch, q, k, v: torch.softmax(q @ k, -1) @ v,
    "causal_attention": _causal,
    "qknorm_attention": lambda torch, q, k, v: torch.softmax(_rms(torch, q) @ k, -1) @ _rms(torch, v),
    "rmsnorm": lambda torch, x, w: _rms(torch, x) @ w,
    "gated_mlp": lambda torch, x, w1, w2: torch.nn.functional.silu(x @ w1) * (x @ w2),
    "ntrans": lambda torch, h, x, a: _rms(torch, x + a * (_rms(torch, h) - x)),
    "lora": lambda torch, x, w, a, b: x @ w + (x @ a) @ b,
    "exp_mlp": lambda torch, x, a, b: torch.exp(x @ a) @ b,
    "matrix_matrix_vector": lambda torch, a, b, v: (a @ b) @ v,
    "linear_attention": lambda torch, q, k, v: (q @ k.transpose(-1, -2)) @ v,
}


@functools.lru_cache(maxsize=1)
def _compiled(torch: Any, program: BenchProgram) -> Callable[..., Any]:
    """Compiled for the sizes of this program. Without the reset, torch would give up on a kind after a few sizes and
    run its programs operator by operator.
    """
    torch.compiler.reset()
    return torch.compile(functools.partial(SPELLINGS[program.kind], torch), dynamic=False, fullgraph=True)


class TorchPeer(Peer):
    """A torch function of tensors, in the program's layout unless a subclass says otherwise."""

    kinds = SPELLINGS

    def function(self, torch: Any, program: BenchProgram) -> Callable[..., Any]:
        """Compile the torch function of a program."""
        return _compiled(torch, program)

    def arranged(self, torch: Any, args: Arguments) -> tuple[Any, ...]:
        """Convert arguments to tensors in the layout of the function."""
        return tuple(map(torch.from_dlpack, jax.block_until_ready(args)))

    def restored(self, found: Any) -> Any:
        """Restore the layout of the program."""
        return found

    def result(self, program: BenchProgram, args: Arguments) -> np.ndarray:
        """Run a program in its own layout."""
        torch = _torch()
        with torch.no_grad():
            found = self.function(torch, program)(*self.arranged(torch, args))
        return self.restored(found).float().cpu().numpy()

    def call(self, program: BenchProgram, sets: Sequence[Arguments]) -> timing.Call:
        """Capture the runs on all sets as a CUDA graph."""
        torch = _torch()
        return Replay(torch, self.function(torch, program), [self.arranged(torch, args) for args in sets])


class TorchAttention(TorchPeer):
    """`scaled_dot_product_attention`, unscaled; the fastest of its backends is torch's choice."""

    kinds = ATTENTION

    def function(self, torch: Any, program: BenchProgram) -> Callable[..., Any]:
        """Return torch's attention."""
        attend = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(attend, scale=1.0, is_causal=program.kind == "causal_attention")

    def arranged(self, torch: Any, args: Arguments) -> tuple[Any, ...]:
        """Transpose keys, and add a batch dimension."""
        q, k, v = super().arranged(torch, args)
        return tuple(x.contiguous()[None] for x in (q, k.transpose(-1, -2), v))

    def restored(self, found: Any) -> Any:
        """Remove the batch dimension."""
        return found[0]


class Replay:
    """A CUDA graph of a function on every set of arguments, which can time itself."""

    def __init__(self, torch: Any, function: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
        self.torch, self.graph = torch, torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            with torch.cuda.stream(stream):  # libraries choose kernels and take memory before anything is captured
                for args in (*sets, *sets[:1]):
                    function(*args)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=stream):
                self.outputs = [function(*args) for args in sets]

    def __call__(self) -> None:
        self.graph.replay()
        self.torch.cuda.synchronize()

    def span(self) -> timing.TraceInterval:
        """Time the second of two replays, when the host is ahead and the device does not wait."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return timing.TraceInterval(start.elapsed_time(end) * 1e-3, None, ())


PEERS: Mapping[str, Peer] = {"cudnn": JaxAttention(), "torch.compile": TorchPeer(), "torch sdpa": TorchAttention()}

PACKAGES = ("torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def versions() -> dict[str, str]:
    """Look up the versions of the packages that peers run on, as far as they are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
