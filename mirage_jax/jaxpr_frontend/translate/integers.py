"""Integers as numbers. Kernels compute in float32, which has to hold them exactly: indices, counts and what is made of
them are known to be small; of 32-bit integers of unknown size, those of inputs, there is no arithmetic here, and they
are compared with small ones or with each other as they are.

Integers of 8 bits: how they wrap around, are shifted and masked is said with `floor` and `fraction`.

    x >> k  ->  floor(x / 2**k)            x & (2**k - 1)  ->  2**k * fraction(x / 2**k)

for signed and unsigned x alike (two's complement), and a result that may leave the range of its type is brought back
in the same way. Which may, is told by intervals: weights of 4 bits that are taken out of bytes never do. (`fraction` is
x - floor(x) as one operator; as a difference it would make sums of products with weights longer.)
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate.builder import AxisValue, Node, NodeBuilder

RANGES = {"i8": (-128, 127), "u8": (0, 255)}
TRUTHS = frozenset({"lt", "le", "eq", "and", "or", "not", "isfinite"})
MAX_EXACT_INTEGER = 1 << 22  # beyond, float32 would soon round

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

    Rounding keeps order and small numbers, so an input of any size can be compared with what is small.
    """
    unknown = [v for v in (x, y) if v.node is not None and b.nodes[v.node].dtype == "i32" and not _is_small(b, v)]
    if len(unknown) > 1 and not all(_is_input(b, v) for v in unknown):
        raise NotExpressible(Code.DTYPE, "a comparison of 32-bit integers of unknown size, of which one is computed")
    small = [v for v in (x, y) if v.dtype == "i32" and v not in unknown]
    if unknown and x.dtype == "i32" and not all(_is_small(b, v) for v in small):
        raise NotExpressible(Code.DTYPE, f"a comparison of 32-bit integers with numbers beyond {MAX_EXACT_INTEGER}")


def _is_small(b: NodeBuilder, x: AxisValue) -> bool:
    found = _interval(b, x)
    return found is not None and max(map(abs, found)) <= MAX_EXACT_INTEGER


def _is_input(b: NodeBuilder, x: AxisValue) -> bool:
    return x.is_plain and x.dtype == "i32" and x.node is not None and b.nodes[x.node].op == "input"


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
    return _affine(_of_node(b, x.node), x.scale, x.offset)


def _affine(interval: Interval | None, scale: Fraction, offset: Fraction) -> Interval | None:
    if interval is None:
        return None
    low, high = sorted(scale * end + offset for end in interval)
    return low, high


def _of_node(b: NodeBuilder, n: int) -> Interval | None:
    if n not in b.intervals:
        b.intervals[n] = _of_new_node(b, n)
    return b.intervals[n]


def _of_new_node(b: NodeBuilder, n: int) -> Interval | None:
    node = b.nodes[n]
    if n in b.concats:
        return _around([_of_node(b, part.node) for part in b.concats[n].parts])
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
    scale, offset = number.get("scale", Fraction(1)), number.get("offset", Fraction(0))
    match node.op, [_of_node(b, use.node) for use in node.uses]:
        case "const", _:
            return number["value"], number["value"]
        case "affine", [x]:
            return _affine(x, scale, offset)
        case "floor", [x]:
            inside = _affine(x, scale, offset)
            return None if inside is None else (Fraction(inside[0] // 1), Fraction(inside[1] // 1))
        case "fraction", _:
            return Fraction(0), 1 - scale  # of an integer times 1 / n: 0, 1 / n, .. or (n - 1) / n
        case "add", [x, y]:
            x = _affine(x, number.get("ca", Fraction(1)), Fraction(0))
            y = _affine(y, number.get("cb", Fraction(1)), Fraction(0))
            return None if x is None or y is None else (x[0] + y[0], x[1] + y[1])
        case "sum", [x]:
            return _affine(x, Fraction(_count(b, node)), Fraction(0))
        case "max", [x]:
            return x
        case "mul", [(a, c), (e, g)]:
            ends = (a * e, a * g, c * e, c * g)
            return min(ends), max(ends)
        case "maximum" | "minimum", found:
            return _around(found)
        case "where", [_, *found]:
            return _around(found)
        case _:
            return None


def _numbers(node: Node) -> dict[str, Fraction]:
    return {k: v for k, v in node.attrs if isinstance(v, Fraction)}


def _around(intervals: list[Interval | None]) -> Interval | None:
    known = [i for i in intervals if i is not None]
    return (min(i[0] for i in known), max(i[1] for i in known)) if len(known) == len(intervals) else None
