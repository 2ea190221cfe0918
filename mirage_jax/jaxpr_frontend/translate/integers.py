"""Integers as numbers. Kernels compute in float32, which must hold them exactly.

Indices and counts are small. A 32-bit input may have any size: it is compared with small integers or with other inputs,
and arithmetic on it is refused. Integers of 8 bits are shifted, masked and wrapped around by `floor` and `fraction`:

    x >> k  ->  floor(x / 2**k)            x & (2**k - 1)  ->  2**k * fraction(x / 2**k)

    x // n      ->  floor((x + 1/2) / n)  x % n             ->  x - n * (x // n), both as they are for -x if x < 0

Half an element more keeps rounding from carrying the quotient over an integer. The shift and the mask hold for signed
and unsigned x (two's complement). Intervals tell which results may leave the range of their type;
4-bit weights taken out of bytes never do. `fraction` is x - floor(x) as one operator: a difference would make sums of
products with weights longer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate.builder import AxisValue, Node, NodeBuilder
from mirage_jax.mugraph.operators import TRUTHS

RANGES = {"i8": (-128, 127), "u8": (0, 255)}
MAX_EXACT_INTEGER = 1 << 22  # beyond, float32 would soon round
MAX_DIVIDEND = 1 << 20  # three roundings of (x + 1/2) / n are less than 1/2n up to here

type Interval = tuple[Fraction, Fraction]


def fitted(b: NodeBuilder, x: AxisValue, dtype: str) -> AxisValue:
    """A result of exact integer arithmetic, modulo 2**8 as its type has it."""
    low, high = RANGES[dtype]
    found = _interval(b, x)
    if found is None or max(map(abs, found)) > MAX_EXACT_INTEGER:
        raise NotExpressible(Code.DTYPE, f"integers of unknown size as {dtype}")
    if not (low <= found[0] and found[1] <= high):
        x = b.scaled(_low_bits(b, b.scaled(x, Fraction(1), Fraction(-low)), 8), Fraction(1), Fraction(low))
    return replace(_without_offset(b, x), dtype=dtype)


def known(b: NodeBuilder, x: AxisValue) -> AxisValue:
    """A result of 32 bits: an input seen in another way, or small for sure."""
    if not _is_input(b, x) and not _is_small(b, x):
        raise NotExpressible(Code.DTYPE, "arithmetic of 32-bit integers that may be large")
    return x


def check_comparison(b: NodeBuilder, x: AxisValue, y: AxisValue) -> None:
    """Refuse to compare integers that float32 may round to one number, or floats that they were cast to.

    Rounding keeps order and small numbers, so an input of any size can be compared with small ones.
    """
    unknown = [v for v in (x, y) if _is_integer_node(b, v) and not _is_small(b, v)]
    if len(unknown) > 1 and not all(_is_input(b, v) for v in unknown):
        raise NotExpressible(Code.DTYPE, "a comparison of 32-bit integers of unknown size, of which one is computed")
    others = [v for v in (x, y) if v.dtype == "i32" and v not in unknown]
    if unknown and x.dtype == "i32" and not all(_is_small(b, v) for v in others):
        raise NotExpressible(Code.DTYPE, f"a comparison of 32-bit integers with numbers beyond {MAX_EXACT_INTEGER}")


def _is_integer_node(b: NodeBuilder, x: AxisValue) -> bool:
    return x.node is not None and b.nodes[x.node].dtype == "i32"


def _is_small(b: NodeBuilder, x: AxisValue) -> bool:
    found = _interval(b, x)
    return found is not None and max(map(abs, found)) <= MAX_EXACT_INTEGER


def _is_input(b: NodeBuilder, x: AxisValue) -> bool:
    return x.dtype == "i32" and b.is_input(x)


def shifted_right(b: NodeBuilder, x: AxisValue, by: AxisValue, is_arithmetic: bool) -> AxisValue:
    """``x >> by``."""
    places = _places(x, by)
    if not is_arithmetic and (found := _interval(b, x)) is not None and found[0] < 0:
        raise NotExpressible(Code.PARAMETERS, f"a logical shift of {x.dtype}, which has a sign")
    return _shifted(b, x, places)


def shifted_left(b: NodeBuilder, x: AxisValue, by: AxisValue) -> AxisValue:
    """``x << by``, before it is brought back into its range."""
    return b.scaled(x, Fraction(2 ** _places(x, by)))


def _places(x: AxisValue, by: AxisValue) -> int:
    places = _literal(x, by, "a shift")
    if places < 0:
        raise NotExpressible(Code.PARAMETERS, f"a shift by {places} places")
    return places


def divided(b: NodeBuilder, x: AxisValue, y: AxisValue) -> AxisValue:
    """``x / y`` for a literal y, rounded towards zero, as XLA divides integers."""
    n, found = _divisor(y), _interval(b, x)
    if found is None or max(map(abs, found)) > MAX_DIVIDEND:
        raise NotExpressible(Code.DTYPE, f"a quotient of 32-bit integers that may be beyond {MAX_DIVIDEND}")
    if found[0] >= 0:
        return _floor_of(b, x, n)
    return b.mul(b.unary("sign", x, "i32"), _floor_of(b, b.unary("abs", x, "i32"), n), "i32")


def remainder(b: NodeBuilder, x: AxisValue, y: AxisValue) -> AxisValue:
    """``x % y`` for a literal y, with the sign of x."""
    return b.add(x, b.scaled(divided(b, x, y), Fraction(-_divisor(y))), "i32")


def _divisor(y: AxisValue) -> int:
    if not y.is_constant or y.offset <= 0:
        raise NotExpressible(Code.PARAMETERS, "a quotient of integers by what is no positive literal")
    return int(y.offset)


def _floor_of(b: NodeBuilder, x: AxisValue, n: int) -> AxisValue:
    return b.unary("floor", b.scaled(x, Fraction(1, n), Fraction(1, 2 * n)), "i32")


def masked(b: NodeBuilder, x: AxisValue, mask: AxisValue) -> AxisValue:
    """``x & mask`` where the ones of the mask are neighbours."""
    bits = _literal(x, mask, "a mask") % 256
    start = (bits & -bits).bit_length() - 1
    count = (bits >> max(start, 0)).bit_length()
    if bits == 0 or bits >> start != (1 << count) - 1:
        raise NotExpressible(Code.PARAMETERS, f"a mask of the bits {bits:#010b}, which are no neighbours")
    low, _ = RANGES[x.dtype]
    field = _shifted(b, x, start)
    if start + count < 8 or low < 0:
        field = _low_bits(b, field, count)
    return b.scaled(field, Fraction(2**start))


def _without_offset(b: NodeBuilder, x: AxisValue) -> AxisValue:
    """``n * x + c -> floor(n * x + c)``, the same integer as one term: a zero point would make sums of products with
    weights longer, and the search for what else computes these."""
    if x.node is None or not x.offset:
        return x
    node = b.nodes[x.node]
    if node.op != "floor" or x.scale != 1:
        return b.unary("floor", x, "i32")
    number = _numbers(node)
    number["offset"] = number.get("offset", Fraction(0)) + x.offset
    return b.value(x.dims, "i32", b.append("floor", node.uses, (), "i32", **number))


def _literal(x: AxisValue, y: AxisValue, what: str) -> int:
    if x.dtype not in RANGES:
        raise NotExpressible(Code.DTYPE, f"{what} of bits of {x.dtype}; known are {', '.join(RANGES)}")
    if not y.is_constant:
        raise NotExpressible(Code.PARAMETERS, f"{what} that is not a literal")
    return int(y.offset)


def _shifted(b: NodeBuilder, x: AxisValue, places: int) -> AxisValue:
    """floor(x / 2**places)."""
    return b.unary("floor", b.scaled(x, Fraction(1, 2**places)), "i32") if places else x


def _low_bits(b: NodeBuilder, x: AxisValue, count: int) -> AxisValue:
    """``2**count * fraction(x / 2**count)``."""
    return b.scaled(b.unary("fraction", b.scaled(x, Fraction(1, 2**count)), "f32"), Fraction(2**count))


# --- intervals


def _interval(b: NodeBuilder, x: AxisValue) -> Interval | None:
    """Bounds of an integer value."""
    if x.node is None:
        return x.offset, x.offset
    interval = _of_node(b, x.node)
    return None if interval is None else _affine(interval, x.scale, x.offset)


def _affine(interval: Interval, scale: Fraction, offset: Fraction) -> Interval:
    low, high = sorted(scale * end + offset for end in interval)
    return low, high


def _of_node(b: NodeBuilder, n: int) -> Interval | None:
    if n not in b.intervals:
        b.intervals[n] = _of_new_node(b, n)
    return b.intervals[n]


def _of_new_node(b: NodeBuilder, n: int) -> Interval | None:
    node = b.nodes[n]
    if n in b.concats:
        parts = [_of_node(b, part.node) for part in b.concats[n].parts]
        known = [interval for interval in parts if interval is not None]
        return _hull(known) if len(known) == len(parts) else None
    if node.op == "input" and node.dtype in RANGES:
        low, high = RANGES[node.dtype]
        return Fraction(low), Fraction(high)
    if node.op in TRUTHS or node.dtype == "bool":
        return Fraction(0), Fraction(1)
    if node.op == "iota":
        return Fraction(0), Fraction(_count(b, node) - 1)
    return _of_operator(b, node)


def _count(b: NodeBuilder, node: Node) -> int:
    """Of the indices that an operator runs over."""
    return math.prod(map(b.axes.extent, b.axes.resolve(node.over)))


def _of_operator(b: NodeBuilder, node: Node) -> Interval | None:
    number = _numbers(node)
    if node.op == "const":
        return number["value"], number["value"]
    if node.op == "fraction":  # of an integer times 1 / n: 0, 1 / n, .. or (n - 1) / n
        return Fraction(0), 1 - number.get("scale", Fraction(1))
    if node.op == "sum":
        number["scale"] = Fraction(_count(b, node))
    operands = [_of_node(b, use.node) for use in node.uses]
    known = [interval for interval in operands if interval is not None]
    return _combined(node.op, known, number) if len(known) == len(operands) else None


def _combined(op: str, operands: Sequence[Interval], number: Mapping[str, Fraction]) -> Interval | None:
    """Bounds of an operator's result from its operands' bounds. number: scales and offsets by name."""
    scaled = [_affine(x, number.get("scale", Fraction(1)), number.get("offset", Fraction(0))) for x in operands]
    match op:
        case "affine" | "sum" | "max":
            return scaled[0]
        case "abs":
            low, high = scaled[0]
            return max(low, -high, Fraction(0)), max(-low, high)
        case "sign":
            return Fraction(-1), Fraction(1)
        case "floor":
            low, high = scaled[0]
            return Fraction(low // 1), Fraction(high // 1)
        case "add":
            terms = zip(operands, ("ca", "cb"), strict=True)
            x, y = (_affine(x, number.get(scale, Fraction(1)), Fraction(0)) for x, scale in terms)
            return x[0] + y[0], x[1] + y[1]
        case "mul":
            ends = [x * y for x, y in itertools.product(*operands)]
            return min(ends), max(ends)
        case "maximum" | "minimum":
            return _hull(operands)
        case "where":
            return _hull(operands[1:])
        case _:
            return None


def _numbers(node: Node) -> dict[str, Fraction]:
    return {k: v for k, v in node.attrs if isinstance(v, Fraction)}


def _hull(intervals: Sequence[Interval]) -> Interval:
    """The smallest interval around others."""
    return min(low for low, _ in intervals), max(high for _, high in intervals)
