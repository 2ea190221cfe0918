"""Huge negative numbers in place of minus infinity, and what a kernel checks before it skips for them.

Many programs mask the logits of a softmax with the most negative float rather than with minus infinity:

    t = where(n <= i, s, -2e38);  m = max[n] t;  p = exp(t - m)

In a row whose maximum m is far above the sentinel, p is exactly zero in floats wherever the sentinel stands. There, and
only there, the sentinel may as well be minus infinity, and a loop over n may leave out the steps that it masks. In a
row that is as low itself (padding that another layer added, say), p is not zero, and every step counts.

So a kernel whose loop has bounds because of sentinels has two forms:

* `usual`: sentinels are minus infinity, and steps outside of the loop bounds do not run. Hardly any row needs more;
* `complete`: the kernel as it is written, with all of its steps.

Each block runs the first, looks at its `guards`, and runs the second if a maximum is not above its bound. A guard on a
tensor that the loop reads in steps (the backward pass reads the maxima of all rows) is about all of that tensor, and is
looked at first. So a kernel with loop bounds computes the same as the kernel without them, on any data.
`verify.equivalence.certificate` describes the proof for both forms.

Loops that take the maximum of a matrix product have two forms as well (`forms_of`), of the same graph: the text of the
first is faster, and wrong for huge logits (`lower.triton.ops.softmax`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from mirage_jax.mugraph.graph import Axis, BlockGraph, Kernel, KernelGraph, KernelSchedule, Op, carried

HIGHEST_SENTINEL = -10_000  # masks are written with numbers from here down
MASKING = 2.0**10  # a number beyond masks values of ordinary size: a sentinel, or a switch times a huge factor
LARGEST_SHIFT = Fraction(2**25)  # beyond it an fma may make exponentials larger than 1 (`lower.triton.ops.softmax`)
SHORT_STEP = 16  # elements of the loop's axis
VANISHING_EXPONENT = -1_000  # exp of this or less is zero in every type of floats


@dataclass(frozen=True, slots=True)
class Guard:
    """What all elements of the value `shift` have to be for the usual form to be right: above `bound`, and of a size
    below `limit`, or minus infinity.
    """

    shift: str
    bound: Fraction | None
    limit: Fraction | None = None


@dataclass(frozen=True)
class Guarded:
    """The two forms of a kernel, and what decides between them.

    `guards` are about values that are there after the loop. `tensor_bounds` are about tensors that the loop reads in
    steps: what all numbers of each have to be above.
    """

    usual: BlockGraph
    complete: BlockGraph
    guards: tuple[Guard, ...]
    tensor_bounds: Mapping[str, Fraction]


def guarded(kernel: Kernel) -> Guarded | None:
    """The forms of a kernel whose loop bounds rest on sentinels; None for any other kernel."""
    if not isinstance(kernel, BlockGraph) or kernel.loop_bounds is None:
        return None
    found = _Sentinels(kernel.ops, {s.value for s in kernel.stores}, partial(_is_seen, kernel))
    if not found.masks:
        return None
    inside: dict[str, Fraction] = {}
    after: dict[str, Fraction] = {}
    tensors = {load.name: load.tensor for load in kernel.loads}
    for shift, bound in found.bounds.items():
        if shift in tensors and kernel.stages[shift].body:
            inside[tensors[shift]] = max(bound, inside.get(tensors[shift], bound))
        else:
            after[shift] = bound
    usual, ends = _with_ends(replace(kernel, ops=found.with_masks()), after)
    return Guarded(
        usual,
        replace(kernel, loop_bounds=None),
        tuple(Guard(ends[shift], bound) for shift, bound in after.items()),
        inside,
    )


def forms_of(kernel: BlockGraph, graph: KernelGraph) -> Guarded | None:
    """The forms in which a kernel of a graph is written; None if there is one only.

    `guarded` says what sentinels ask for. Besides, running maxima of matrix products have guards: exponentials relative
    to them are one fma in a form that is right up to `LARGEST_SHIFT`. Maxima from which another kernel may make the
    same exponentials have none.
    """
    forms = guarded(kernel) or Guarded(kernel, replace(kernel, loop_bounds=None), (), {})
    if forms.tensor_bounds:  # which are looked at before
        return forms
    shifts = _maxima_of_products(forms.usual)
    if _is_read_by_exponentials(kernel, graph):
        shifts = [shift for shift in shifts if not is_stored(kernel, shift)]
    usual, ends = _with_ends(forms.usual, shifts)
    limits = dict.fromkeys((ends[shift] for shift in shifts), LARGEST_SHIFT)
    bounds = {guard.shift: guard.bound for guard in forms.guards}
    guards = tuple(Guard(shift, bounds.get(shift), limits.get(shift)) for shift in {**limits, **bounds})
    return replace(forms, usual=usual, guards=guards) if guards else None


def _maxima_of_products(kernel: BlockGraph) -> list[str]:
    """Shifts of matrix products that a loop carries."""
    ops = {op.name: op for op in kernel.ops}
    shifts = (op for op in kernel.ops if op.op == "shift" and carried(kernel, op))
    return [op.name for op in shifts if _is_product(ops, op.args[0])]


def names_of(kernel: BlockGraph, shift: str) -> set[str]:
    """The names of a shift, and of the last value of a running one."""
    return {shift, *(op.name for op in kernel.ops if op.op == "last" and op.args[0] == shift)}


def is_stored(kernel: BlockGraph, shift: str) -> bool:
    """Is a shift stored, or the last value of a running one?"""
    return not names_of(kernel, shift).isdisjoint(s.value for s in kernel.stores)


def _is_read_by_exponentials(kernel: BlockGraph, graph: KernelGraph) -> bool:
    """May what a kernel stores be the shift of exponentials elsewhere?"""
    stored = {s.tensor.name for s in kernel.stores}
    others = [other for other in graph.kernels if other.name != kernel.name]
    return not stored.isdisjoint(graph.outputs) or any(map(_may_have_exponentials, others))


def _may_have_exponentials(kernel: Kernel) -> bool:
    return not isinstance(kernel, BlockGraph) or any(op.op == "exps" for op in kernel.ops)


def _is_product(ops: Mapping[str, Op], name: str) -> bool:
    """Is a value the result of a matrix product, scaled by a positive number, or masked with minus infinity?"""
    op = ops.get(name)
    if op is None:
        return False
    is_scaled = op.op == "affine" and op.number("scale") > 0 and op.number("offset", 0) == 0
    return op.op == "dot" or ((is_scaled or op.op == "mask") and _is_product(ops, op.args[-1]))


def usual(graph: KernelGraph) -> KernelGraph:
    """The graph with every guarded kernel in its usual form."""
    forms = [(k, guarded(k)) for k in graph.kernels]
    return replace(graph, kernels=tuple(form.usual if form else k for k, form in forms))


def complete(graph: KernelGraph) -> KernelGraph:
    """The graph with every guarded kernel in its complete form."""
    forms = [(k, guarded(k)) for k in graph.kernels]
    return replace(graph, kernels=tuple(form.complete if form else k for k, form in forms))


def with_short_steps(sizes: KernelSchedule, kernel: BlockGraph) -> KernelSchedule:
    """Sizes for the complete form of a kernel. It hardly ever runs, so it may not take more registers than the other
    form, or fewer blocks run at a time. Kernels with specialized warps have all the registers there are.
    """
    if sizes.specialized:
        return sizes
    tiles = tuple((a, min(n, SHORT_STEP) if a == kernel.loop else n) for a, n in sizes.tiles)
    return replace(sizes, tiles=tiles)


def masks_of(kernel: BlockGraph) -> tuple[Op, ...]:
    """The operators of a kernel as its usual form has them, whether or not it has bounds."""
    return _Sentinels(kernel.ops, {s.value for s in kernel.stores}, partial(_is_seen, kernel)).with_masks()


def masks_among(ops: Sequence[Op], stored: Collection[str]) -> tuple[Op, ...]:
    """Do the same before it is known when operators run: for estimates."""
    return _Sentinels(ops, stored, lambda _: True).with_masks()


class _Sentinels:
    """Finds sentinels among operators: `masks` are the names of those that write them, `bounds` what the values have to
    be above from which they are subtracted. `is_seen` says of a shift whether it can be looked at as a whole.
    """

    def __init__(self, ops: Sequence[Op], stored: Collection[str], is_seen: Callable[[str], bool]) -> None:
        self.ops, self.stored, self.is_seen = {op.name: op for op in ops}, stored, is_seen
        self.users: dict[str, list[Op]] = {}
        for op in ops:
            for name in dict.fromkeys(op.args):
                self.users.setdefault(name, []).append(op)
        self.bounds: dict[str, Fraction] = {}
        masks = set[str]()
        for op in ops:
            value = self._sentinel(op)
            bounds = None if value is None else self._bounds(op.name, value)
            if bounds is not None:
                masks.add(op.name)
                _raise(self.bounds, bounds)
        self.masks = frozenset(masks)

    def with_masks(self) -> tuple[Op, ...]:
        """``where c x sentinel -> mask c x``."""
        return tuple(
            replace(op, op="mask", args=op.args[:2]) if op.name in self.masks else op for op in self.ops.values()
        )

    def _sentinel(self, op: Op) -> Fraction | None:
        """The number that an operator puts where its condition does not hold, if that is a sentinel."""
        other = self.ops.get(op.args[2]) if op.op == "where" else None
        value = other.number("value", 0) if other is not None and other.op == "const" else Fraction(0)
        return value if value <= HIGHEST_SENTINEL else None

    def _bounds(self, name: str, value: Fraction) -> dict[str, Fraction] | None:
        """What shifts have to be above for the sentinel to vanish in each use of value `name`; None if it cannot."""
        if name in self.stored:
            return None
        found: dict[str, Fraction] = {}
        for user in self.users.get(name, ()):
            more = self._bounds_of_use(user, name, value)
            if more is None:
                return None
            _raise(found, more)
        return found

    def _bounds_of_use(self, user: Op, name: str, value: Fraction) -> Mapping[str, Fraction] | None:
        scale, offset = user.number("scale"), user.number("offset", 0)
        bound = scale * value / 2  # halfway: what is above it is as far from the sentinel as from zero
        place = user.args.index(name) if user.args.count(name) == 1 else None
        vanishes = scale > 0 and bound <= VANISHING_EXPONENT
        match user.op, place:
            case (("shift" | "exps"), 0) if vanishes:
                shift = user.name if user.op == "shift" else user.args[1]
                return {shift: bound} if self.is_seen(shift) else None
            case "exp", _ if vanishes and scale * value + offset <= VANISHING_EXPONENT:
                return {}
            case (("mask" | "where"), 1):
                return self._bounds(user.name, value)
            case _:
                return None


def _raise(bounds: dict[str, Fraction], more: Mapping[str, Fraction]) -> None:
    """Keep the higher one of two bounds of a shift."""
    for shift, bound in more.items():
        bounds[shift] = max(bound, bounds.get(shift, bound))


def _is_seen(kernel: BlockGraph, shift: str) -> bool:
    """Can a value be looked at as a whole: before the loop, after it, or as a tensor?"""
    op = next((op for op in kernel.ops if op.name == shift), None)
    return op is None or not kernel.stages[shift].body or (op.op == "shift" and carried(kernel, op))


def _with_ends(kernel: BlockGraph, shifts: Iterable[str]) -> tuple[BlockGraph, dict[str, str]]:
    """The kernel with a name for the last value of each shift that its loop carries, and these names."""
    ends = {op.args[0]: op.name for op in kernel.ops if op.op == "last"}
    axes: dict[str, tuple[Axis, ...]] = {op.name: op.axes for op in kernel.ops}
    names = _fresh({*kernel.axes_of})
    new: list[Op] = []
    for shift in shifts:
        if not kernel.stages[shift].body:
            ends[shift] = shift
        elif shift not in ends:
            ends[shift] = next(names)
            new.append(Op(ends[shift], "last", (shift,), axes[shift]))
    return replace(kernel, ops=(*kernel.ops, *new)), ends


def _fresh(taken: set[str]) -> Iterator[str]:
    n = 0
    while True:
        if (name := f"end{n}") not in taken:
            yield name
        n += 1
