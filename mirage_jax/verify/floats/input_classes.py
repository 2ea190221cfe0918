"""Classes of inputs for the float gate, from ordinary to hostile: what rounds badly, overflows, cancels or ties."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from mirage_jax.hardware.host import processors
from mirage_jax.interruptible import spread
from mirage_jax.mugraph.domains.floats import random_integers
from mirage_jax.mugraph.dtypes import is_float, lowest
from mirage_jax.mugraph.passes.sentinels import MASKING

type Array = np.ndarray
type Spec = tuple[tuple[int, ...], Any]  # shape, dtype


class InputClasses(Mapping[str, list[Array]]):
    """Classes of inputs by name; made when asked for, since a set of weights is large."""

    def __init__(
        self,
        specs: Sequence[Spec],
        seed: int,
        near: Sequence[float],
        roots: Collection[int],
        counts: Mapping[int, int],
        switches: Collection[int],
        biases: Collection[int],
        scaled: Collection[int],
    ):
        self.specs, self.seed = [(tuple(s), np.dtype(d)) for s, d in specs], seed
        self.roots, self.counts = frozenset(roots), counts
        self.own = {f"near {value:.6g}": _near(value) for value in near}  # classes of this program alone
        self.own |= {BELOW_ZERO: _far_from_zero(self.roots)} if self.roots else {}
        self.own |= _of_switches(frozenset(switches)) if switches else {}
        self.own |= {FALSE_ROWS: _normal} if any(dtype.kind == "b" for _, dtype in self.specs) else {}
        self.groups = _of_same_rows(self.specs)
        self.own |= {SAME_ROWS: _normal} if self.groups else {}
        self.biases = sorted(biases)
        first = self.biases[:MOST_ALONE]
        self.alone: dict[str, tuple[int, Change]] = {}  # one bias is changed: another may hide it
        self.alone |= {f"{ALL_MASKED} by input {i}": (i, _all_lowest) for i in first}
        self.alone |= {f"{FAR_ROWS}, of input {i} alone": (i, _with_far_rows) for i in first if len(first) > 1}
        self.alone |= {f"{INFINITE} {i}": (i, _with_infinity) for i in first}
        self.own |= dict.fromkeys((*MASKED, FAR_ROWS, *self.alone), _normal) if self.biases else {}
        self.own |= {f"large input {i}": _large_alone(i) for i in sorted(scaled)[:MOST_ALONE]}
        self.makers = CLASSES | self.own

    def __getitem__(self, name: str) -> list[Array]:
        rng = np.random.default_rng([self.seed, *name.encode()])
        out = self._drawn(self.makers[name], rng)
        if name == SAME_ROWS:
            _share_rows(out, self.groups)
        if name in LOGITS:
            for i, x in enumerate(out):
                _put_far(x, LOGITS[name], rng, i)
        if name != BELOW_ZERO:
            out = [np.asarray(np.abs(x)) if i in self.roots and is_float(x.dtype) else x for i, x in enumerate(out)]
        if name == FALSE_ROWS:
            out = [_with_false_rows(x) if x.dtype.kind == "b" else x for x in out]
        self._change_biases(out, name, rng)
        if name in SPOILED:
            _spoil(out, rng, SPOILED[name])
        return out

    def __contains__(self, name: object) -> bool:
        return name in self.makers  # a mapping would draw the class to see

    def _drawn(self, make: Maker, rng: np.random.Generator) -> list[Array]:
        """Draw all inputs; those that take long at the same time, each from a stream of its own."""

        def draw(i: int, rng: np.random.Generator) -> Array:
            """Draw one input."""
            shape, dtype = self.specs[i]
            if i in self.counts:
                return _indices(rng, shape, dtype, self.counts[i])
            return _repeated(make, rng, shape, dtype, i)

        large = [i for i, (shape, _) in enumerate(self.specs) if math.prod(shape) > LARGE]
        streams = list(zip(large, rng.spawn(len(large)), strict=True))
        drawn = dict(zip(large, spread(lambda x: draw(*x), streams, processors()), strict=True))
        return [drawn[i] if i in drawn else draw(i, rng) for i in range(len(self.specs))]

    def _change_biases(self, out: list[Array], name: str, rng: np.random.Generator) -> None:
        """Put sentinels or far rows into the inputs that are added to logits, if the class `name` has any."""
        if name in MASKED:
            for turn, i in enumerate(self.biases):
                out[i] = MASKED[name].put(out[i], rng, turn)
        elif name == FAR_ROWS:
            for i in self.biases:
                out[i] = _with_far_rows(out[i], rng)
        elif name in self.alone:
            i, change = self.alone[name]
            out[i] = change(out[i], rng)

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)


def input_classes(
    specs: Sequence[Spec],
    seed: int,
    near: Sequence[float] = (),
    roots: Collection[int] = (),
    counts: Mapping[int, int] = MappingProxyType({}),
    switches: Collection[int] = (),
    biases: Collection[int] = (),
    scaled: Collection[int] = (),
) -> InputClasses:
    """The input classes of the gate for arrays of the given shapes and dtypes, and one for each value in `near`: where
    a program subtracts a constant, inputs that are almost this constant.

    Inputs in `roots`, by position, have no negative numbers, since the program takes roots or logarithms of them (as
    AdamW does of second moments): half of the results would be NaN, and rounding decide which. But in one class more
    they have, far from zero. `counts` has inputs of integers that are compared with indices, by position, and how many
    indices: lengths and labels. `switches` are inputs, by position, with a huge factor: in one class more they are 0 or
    1, as masks that are added to logits are. Where there are masks of booleans, some of their rows are all false in a
    class of its own. `biases` are inputs, by position, that are added to logits: in some classes they hold what masks
    logits, in whole rows and columns and in part, or one of them masks all, or rows of all or of one are far from zero.
    Of inputs in `scaled`, by position, each is large in a class of its own, and all others are ordinary numbers.

    Arrays of floats whose rows are of one length have the same rows in a class of its own: points and themselves, or
    queries that are the keys. Differences are zero there, and a row's largest number is on its diagonal.
    """
    return InputClasses(specs, seed, near, roots, counts, switches, biases, scaled)


type Maker = Callable[[np.random.Generator, tuple[int, ...], int], Array]
type Change = Callable[[Array, np.random.Generator], Array]
LARGE = 1 << 21  # elements of an array that takes long to draw: some of its rows are drawn, again and again
MIN_ROWS = 59  # that are drawn of it


def _indices(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, count: int) -> Array:
    """Any of so many indices; every fourth is one of the first, since few or no elements are a case of their own."""
    few = rng.integers(0, min(4, count), shape)
    return np.asarray(np.where(rng.random(shape) < 0.25, few, rng.integers(0, count, shape)), dtype)


def _draw(make: Maker, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, position: int) -> Array:
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.9)
    if not is_float(dtype):
        return random_integers(rng, shape, dtype)
    most = float(ml_dtypes.finfo(dtype).max)
    return np.asarray(np.clip(make(rng, shape, position), -most, most), dtype)  # an array also where the shape is ()


def _repeated(make: Maker, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, position: int) -> Array:
    """The same; of a large array some rows, again and again. Their number is a prime, so that no tile is another."""
    if math.prod(shape) <= LARGE:
        return _draw(make, rng, shape, dtype, position)
    from sympy import prevprime

    rows = math.prod(shape[:-1])
    few = min(rows, int(prevprime(max(LARGE // shape[-1], MIN_ROWS) + 1)))
    x = _draw(make, rng, (few, shape[-1]), dtype, position)
    return np.take(x, np.arange(rows) % few, 0).reshape(shape)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    return rng.standard_normal(shape)


def _scaled(scale: float) -> Maker:
    return lambda rng, shape, position: scale * rng.standard_normal(shape)


def _large_alone(i: int) -> Maker:
    return lambda rng, shape, position: CLASSES["large" if position == i else "normal"](rng, shape, position)


def _near(value: float) -> Maker:
    return lambda rng, shape, position: value * (1 + 1e-2 * rng.standard_normal(shape))


def _far_from_zero(roots: Collection[int]) -> Maker:
    return lambda rng, shape, position: (
        rng.choice([-FAR, FAR], shape) if position in roots else rng.standard_normal(shape)
    )


def _of_switches(switches: Collection[int]) -> dict[str, Maker]:
    """Some are 0 and some are 1. Then all are the same: other numbers keep their digits where nothing is masked, those
    too that are so small that a mask's would hide them.
    """

    def maker(share: float, size: float) -> Maker:
        return lambda rng, shape, position: (
            (rng.random(shape) < share).astype(np.float64)
            if position in switches
            else size * rng.standard_normal(shape)
        )

    alone = {f"{SWITCHES}, all {n}{size}": maker(n, SIZES[size]) for n in (0, 1) for size in SIZES}
    return {SWITCHES: maker(0.9, 1.0)} | alone


def _of_same_rows(specs: Sequence[Spec]) -> list[list[int]]:
    """Inputs of floats, by position, that may have the same rows: they differ in the number of rows, if at all."""
    groups = defaultdict[Any, list[int]](list)
    for i, (shape, dtype) in enumerate(specs):
        if shape and is_float(dtype) and math.prod(shape) > 1:
            groups[dtype, shape[:-2], shape[-1], len(shape)].append(i)
    return [group for group in groups.values() if len(group) > 1]


def _share_rows(arrays: list[Array], groups: Sequence[Sequence[int]]) -> None:
    """Give each group the rows of its longest array; shorter ones get the first."""
    for group in groups:
        longest = max((arrays[i] for i in group), key=np.size)
        for i in group:
            rows = arrays[i].shape[-2:-1]
            arrays[i] = longest[..., : rows[0], :].copy() if rows else longest.copy()


def _with_false_rows(x: Array) -> Array:
    """With every third row all false, the first one among them."""
    rows = np.arange(math.prod(x.shape[:-1])).reshape((*x.shape[:-1], 1)[: x.ndim])
    return x & (rows % 3 != 0)


def _zero_rows(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    return rng.standard_normal(shape) * (rng.random((*shape[:-1], 1)[: len(shape)]) < 0.5)


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    if not shape or shape[-1] == 0:
        return np.ones(shape)
    return (np.arange(shape[-1]) == rng.integers(0, shape[-1], (*shape[:-1], 1))).astype(np.float64)


def _constant_rows(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    return np.broadcast_to(rng.standard_normal((*shape[:-1], 1)[: len(shape)]), shape)


def _cancelling(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    """Pairs a, -a and a little noise, along the last dimension."""
    x = rng.standard_normal(shape)
    if shape and shape[-1] > 1:
        half = shape[-1] // 2
        x[..., half : 2 * half] = -x[..., :half]
    return x + 1e-3 * rng.standard_normal(shape)


def _put_far(x: Array, dims: Sequence[int], rng: np.random.Generator, position: int) -> None:
    """Set one index of a dimension to +-45: products of two such are near +-2000, spread as usual."""
    dim = dims[min(position, len(dims) - 1)]
    if x.ndim >= 2 and x.shape[dim] > 0 and is_float(x.dtype):
        first = np.moveaxis(x, dim, 0)[0]
        first[...] = 45.0 * (rng.choice([-1.0, 1.0], first.shape) if position == 0 else 1.0)


@dataclass(frozen=True)
class MaskPattern:
    """How an input masks logits: some of its rows or columns entirely, others partly, others not.

    It does so with the lowest number of its type; `infinite`: with minus infinity and -1e9 as well. Inputs take turns:
    a row that one of them masks wholly others do not, or it would be infinite.
    """

    columns: bool
    infinite: bool

    def put(self, x: Array, rng: np.random.Generator, turn: int = 0) -> Array:
        """Mask some of the logits."""
        if not x.ndim:
            return x
        least = lowest(x.dtype)
        numbers = [least, -np.inf, max(least, -1e9)] if self.infinite else [least]
        x = np.swapaxes(x, -1, -2).copy() if self.columns and x.ndim > 1 else x.copy()
        rows = x.reshape(-1, x.shape[-1])
        length = rows.shape[1]
        if self.columns or len(rows) == 1:  # padding on the left, the same in all rows
            rows[:, : -(-length // 4) if length > 1 else 0] = least
        for n in range(min(len(rows), period := 4 * len(numbers)) if len(rows) > 1 else 0):
            number, alike = numbers[(n + 3) // 4 % len(numbers)], rows[n::period]
            match (n + turn) % 4:
                case 0:
                    alike[:] = number
                case 1:
                    alike[:, : length // 2] = number
                case 2:
                    alike[rng.random(alike.shape) < 0.5] = number
        x = rows.reshape(x.shape)
        return np.ascontiguousarray(np.swapaxes(x, -1, -2)) if self.columns and x.ndim > 1 else x


def _all_lowest(x: Array, rng: np.random.Generator) -> Array:
    """The lowest number throughout, in one input alone: the sum of two is infinite."""
    return np.full_like(x, lowest(x.dtype))


def _with_infinity(x: Array, rng: np.random.Generator) -> Array:
    """With one element that is infinite."""
    _spoil([x], rng, np.inf)
    return x


def _with_far_rows(x: Array, rng: np.random.Generator) -> Array:
    """With a number added to each row beside which logarithms lose digits, but differences within a row none."""
    return np.asarray(x + rng.choice([-FAR_AWAY, FAR_AWAY], (*x.shape[:-1], 1)[: x.ndim]), x.dtype)


MASKED = {
    "masked rows": MaskPattern(columns=False, infinite=False),
    "masked columns": MaskPattern(columns=True, infinite=False),
    "masked rows, infinite": MaskPattern(columns=False, infinite=True),
    "masked columns, infinite": MaskPattern(columns=True, infinite=True),
}
ALL_MASKED, MOST_ALONE = "all masked", 4  # of how many inputs at most each has a class of its own
FAR_ROWS, FAR_AWAY = "rows far from zero", 2.0**10
INFINITE = "infinite input"
ORDINARY = ("normal", "uniform")
BELOW_ZERO, FAR = "below zero", 2.0**13  # under roots; sums of products of such numbers are exact
SWITCHES, SIZES = "on or off", {"": 1.0, ", small": 2.0**-10}
FALSE_ROWS = "rows of false"
SAME_ROWS = "same rows"
DENORMAL = "denormal"
CLASSES: dict[str, Maker] = {
    "normal": _normal,
    "small": _scaled(1e-3),
    "large": _scaled(1e3),
    "uniform": lambda rng, shape, position: rng.random(shape),
    "heavy tail": lambda rng, shape, position: rng.standard_t(2, shape),
    "zeros": lambda rng, shape, position: np.zeros(shape),
    "zero rows": _zero_rows,
    "one hot": _one_hot,
    "constant rows": _constant_rows,
    "cancelling": _cancelling,
    "integers": lambda rng, shape, position: rng.integers(-3, 4, shape).astype(np.float64),
    "large logits": _normal,
    "large logits, transposed": _normal,
    DENORMAL: _scaled(1e-39),
    "near overflow": lambda rng, shape, position: rng.choice([-1.0, 1.0], shape) * (6e4 if position == 0 else 1.0),
    "nan": _normal,
    "inf": _normal,
    "-inf": _normal,
}
DEGENERATE = frozenset(
    {"constant rows", "near overflow", "large logits, transposed", "one hot", DENORMAL, "nan", "inf", "-inf"}
)
LOGITS = {"large logits": (-1, -2), "large logits, transposed": (-1,)}  # and the dimensions of the inputs
EXTREME = frozenset({"heavy tail", *LOGITS})  # where exponentials come near the end of a type's range by chance
SPOILED = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}  # classes in which one element of one input has this value


def halved(x: Array, times: int) -> Array:
    """Floats divided by two so often, except numbers that mask; integers and booleans stay."""
    if not times or not is_float(x.dtype):
        return x
    return np.where(np.abs(x) < MASKING, np.asarray(x * x.dtype.type(0.5**times), x.dtype), x)


def masks_with_lowest(name: str) -> bool:
    """Do the inputs of a class mask logits with the lowest number of their type alone?"""
    return name.startswith(ALL_MASKED) or (name in MASKED and not MASKED[name].infinite)


def may_mask(name: str) -> bool:
    """May the inputs of a class mask logits, or leave it to the program's own constants?"""
    return name in (*ORDINARY, *MASKED) or name.startswith((SWITCHES, ALL_MASKED))


def is_spoiled(name: str) -> bool:
    """Does an input of a class hold what is no number, or an infinity that does not mask?"""
    return name in SPOILED or name.startswith(INFINITE)


def _spoil(arrays: Sequence[Array], rng: np.random.Generator, value: float) -> None:
    """Put a value into one element of one array, on the diagonal of its last two dimensions: masks of indices rarely
    hide that.
    """
    eligible = [x for x in arrays if is_float(x.dtype) and x.size]
    if eligible:
        x = eligible[rng.integers(len(eligible))]
        last = x.shape[-2:]
        place = int(rng.integers(min(last, default=1)))
        x[(*(int(rng.integers(n)) for n in x.shape[:-2]), *(place for _ in last))] = value
