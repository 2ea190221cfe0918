"""What an entry of the zoo is: a function of somebody else's library, and how its arguments are made.

An entry is a function `make(small)` under `entry`. It imports its library, and returns the function to time and
``draw(key)``, which makes the tuple of its arguments. Nothing of this runs until the entry does, so that the suite is
listed without any of its libraries. Helpers below make both from modules of Flax, Equinox and Haiku: the weights, drawn
from the key by the library's own initializers, are the first argument.
"""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.suite import NotRun
from mirage_jax.errors import in_one_line

type Made = tuple[Callable[..., Any], Callable[[jax.Array], tuple[Any, ...]]]  # function, draw(key) of arguments
type Shape = tuple[int, ...]

BF16 = "bfloat16"
SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64")


@dataclass(frozen=True)
class ZooEntry:
    """One program of the zoo. `library` is the package to install, `source` the size and where it is published.

    has_gradients: its results depend smoothly on its arguments of floats.
    """

    name: str
    library: str
    source: str
    make: Callable[[bool], Made]
    has_gradients: bool = True
    is_small: bool = False

    def sized(self, small: bool) -> ZooEntry:
        """Give the entry at published sizes, or at sizes that a CPU can afford."""
        return replace(self, is_small=small)

    @cached_property
    def made(self) -> Made:
        """The function and its `draw`, traced once.

        Raises:
            NotRun: the library is not installed, or does not work with this version of JAX.
        """
        try:
            with _same_settings(), jax.ensure_compile_time_eval():  # a constant is none of a trace that asks first
                fn, draw = self.make(self.is_small)
            jax.eval_shape(lambda key: fn(*draw(key)), jax.random.key(0))
            return fn, draw
        except Exception as error:  # whatever another's package raises, here nothing of ours has run
            raise NotRun(f"{self.library}: {in_one_line(error)}") from error

    def draw(self, key: jax.Array) -> tuple[Any, Any]:
        """Make no state and a batch, the arguments of the function."""
        return (), self.made[1](key)

    def forward(self, state: tuple[()], batch: tuple[Any, ...]) -> tuple[tuple[()], Any]:
        """Call the function."""
        return state, self.made[0](*batch)

    def gradients(self, state: tuple[()], batch: tuple[Any, ...]) -> tuple[tuple[()], Any]:
        """Differentiate the mean square of the results by every array of floats among the arguments."""
        leaves, tree = jax.tree.flatten(batch)
        floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

        def loss(chosen: list[jax.Array]) -> jax.Array:
            """Average the squares of the results, as a function of the arrays of floats."""
            every = dict(enumerate(leaves)) | dict(zip(floats, chosen, strict=True))
            return mean_square(self.made[0](*tree.unflatten(every.values())))

        found = dict(zip(floats, jax.grad(loss)([leaves[i] for i in floats]), strict=True))
        return state, tree.unflatten(found.get(i) for i in range(len(leaves)))


@contextmanager
def _same_settings() -> Iterator[None]:
    """Undo settings of JAX that a library makes when it is imported: the next entry is another library's.

    Dynamax, for one, asks for exact products of float32 everywhere.
    """
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def mean_square(results: Any) -> jax.Array:
    """Average the squares of all arrays of floats in a tree, each array with the same weight."""
    arrays = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.mean(jnp.square(x.astype(jnp.float32))) for x in arrays), jnp.zeros(()))


class LibraryEntries:
    """The entries of one library, in the order in which `entry` decorates them."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.entries: list[ZooEntry] = []

    def entry(self, source: str, gradients: bool = True) -> Callable[[Callable[[bool], Made]], Callable[[bool], Made]]:
        """Decorate `make`; the entry has its name without the underscore."""

        def add(make: Callable[[bool], Made]) -> Callable[[bool], Made]:
            """Add the entry."""
            self.entries.append(ZooEntry(make.__name__.lstrip("_"), self.package, source, make, gradients))
            return make

        return add


# ---------------------------------------------------------------------- arguments


def normal(*shapes: Shape, dtype: str = "float32") -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """Make a `draw` of normal numbers."""

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        keys = jax.random.split(key, len(shapes))
        return tuple(jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))

    return draw


def drawn(key: jax.Array, weights: Any, dtype: str) -> Any:
    """Convert weights, and make vectors among them vary.

    Initial scales are ones and biases zeros. Then some gradients are nothing but rounding: the mean square of a
    normalized result is constant.
    """

    def one(number: int, x: jax.Array) -> jax.Array:
        """Convert one array, with noise if it is a vector."""
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        varied = x + 0.1 * jax.random.normal(jax.random.fold_in(key, number), x.shape, x.dtype) if x.ndim == 1 else x
        return varied.astype(dtype)

    leaves, tree = jax.tree.flatten(weights)
    return tree.unflatten(one(number, x) for number, x in enumerate(leaves))


def linen(
    module: Any, *shapes: Shape, dtype: str = "float32", call: Callable[..., Any] | None = None, **options: Any
) -> Made:
    """Make an entry of a Flax Linen module, called with normal inputs. `options` are keywords of the call.

    module: a module, or a function that makes it for the type of its inputs.
    call: of `(module, *inputs)`, how to use it.
    """

    def bound(x: Sequence[jax.Array]) -> Any:
        """Make the module for these inputs."""
        return module if hasattr(module, "init") else module(x[0].dtype)

    def draw(key: jax.Array) -> tuple[Any, ...]:
        """Make the arguments."""
        k1, k2, k3 = jax.random.split(key, 3)
        x = normal(*shapes, dtype=dtype)(k2)
        weights = bound(x).init(k1, *x, method=call, **options)
        return drawn(k3, weights, dtype), *x

    return lambda weights, *x: bound(x).apply(weights, *x, method=call, **options), draw


def nnx(make: Callable[[Any], Any], *shapes: Shape, dtype: str = "float32", call: Any = None) -> Made:
    """Make an entry of a Flax NNX module, which `make(rngs)` returns; `call(module, *inputs)` is how to use it."""
    from flax import nnx as flax_nnx

    structure = flax_nnx.graphdef(flax_nnx.eval_shape(lambda: make(flax_nnx.Rngs(0))))

    def draw(key: jax.Array) -> tuple[Any, ...]:
        """Make the arguments."""
        k1, k2, k3 = jax.random.split(key, 3)
        weights = flax_nnx.state(make(flax_nnx.Rngs(k1)))
        return drawn(k3, flax_nnx.to_pure_dict(weights), dtype), *normal(*shapes, dtype=dtype)(k2)

    def run(weights: Any, *x: jax.Array) -> Any:
        """Put the weights into a module, and call it."""
        state = flax_nnx.eval_shape(lambda: flax_nnx.state(make(flax_nnx.Rngs(0))))
        flax_nnx.replace_by_pure_dict(state, weights)
        module = flax_nnx.merge(structure, state)
        return module(*x) if call is None else call(module, *x)

    return run, draw


def equinox(make: Callable[[jax.Array], Any], call: Callable[..., Any], *shapes: Shape, dtype: str = "float32") -> Made:
    """Make an entry of an Equinox module, which `make(key)` returns; `call(module, *inputs)` is how to use it."""
    import equinox as eqx

    shape = eqx.filter_eval_shape(make, jax.random.key(0))
    abstract, static = eqx.partition(shape, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    structure = jax.tree.structure(abstract)

    def draw(key: jax.Array) -> tuple[Any, ...]:
        """Make the arguments."""
        k1, k2, k3 = jax.random.split(key, 3)
        weights = jax.tree.leaves(eqx.filter(make(k1), eqx.is_array))
        return drawn(k3, weights, dtype), *normal(*shapes, dtype=dtype)(k2)

    def run(weights: Sequence[jax.Array], *x: jax.Array) -> Any:
        """Put the weights into the module, and call it."""
        return call(eqx.combine(jax.tree.unflatten(structure, weights), static), *x)

    return run, draw


def haiku(fn: Callable[..., Any], *shapes: Shape, dtype: str = "float32") -> Made:
    """Make an entry of a function that calls Haiku modules."""
    import haiku as hk

    transformed = hk.without_apply_rng(hk.transform(fn))

    def draw(key: jax.Array) -> tuple[Any, ...]:
        """Make the arguments."""
        k1, k2, k3 = jax.random.split(key, 3)
        x = normal(*shapes, dtype=dtype)(k2)
        return drawn(k3, transformed.init(k1, *x), dtype), *x

    return transformed.apply, draw
