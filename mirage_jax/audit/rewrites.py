"""A campaign of true rewrites, which the verifier has to accept: one that refused everything would pass every mutant.

Input: right candidates (`sources`). Each rule of the table `REWRITES` is an identity of real numbers, or another
schedule of the same computation. Some of the places where the left side of a rule occurs are drawn. If float64 finds
the result right, the verifier should certify it. A rule may explain why the verifier misses it; no other rule may be
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from random import Random
from typing import ClassVar

from mirage_jax.audit.mutants import MutationSubject, sound_subjects
from mirage_jax.audit.mutations import (
    Edit,
    Edits,
    Mutation,
    Place,
    Term,
    as_block,
    as_whole,
    like,
    operators,
    term,
    with_kernel,
)
from mirage_jax.audit.report import CampaignReport
from mirage_jax.audit.sources import Source
from mirage_jax.errors import GraphError, VerificationError
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.domains.finite_field import SYMMETRIC
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Op, is_part
from mirage_jax.mugraph.operators import ACCUMULATORS, FUNCTIONS, ONE, ZERO, operator
from mirage_jax.verify.equivalence.certificate import certify

HALF, TWO, MINUS = Fraction(1, 2), Fraction(2), Fraction(-1)


@dataclass(frozen=True)
class Rewrite:
    """`edits.change` is the identity. `missed`: why the verifier does not see it, or not always (`sometimes`)."""

    edits: Mutation
    missed: str = ""
    sometimes: bool = False

    @property
    def name(self) -> str:
        """The identity."""
        return self.edits.change


def _number(p: Place | Op, key: str, default: Fraction = ONE) -> Fraction:
    op = p.op if isinstance(p, Place) else p
    return op.number(key, default)


def _argument(p: Place) -> Term:
    """The argument of a function, s x + o, as a term."""
    return term("affine", p.op.args[0], scale=_number(p, "scale"), offset=_number(p, "offset", ZERO))


# --- sums and products


def _commuted(p: Place) -> Iterator[Term]:
    if p.op.op in ("mul", "dot", *SYMMETRIC):
        yield like(p.op, *p.op.args[::-1])
    if p.op.op == "add":
        yield term("add", *p.op.args[::-1], ca=_number(p, "cb"), cb=_number(p, "ca"))


def _reassociated(p: Place) -> Iterator[Term]:
    inner = p.first_maker(p.op.op) if p.op.op in ("add", "mul") else None
    if inner is None:
        return
    (a, b), c = inner.args, p.op.args[1]
    if p.op.op == "mul":
        yield term("mul", a, term("mul", b, c))
    else:
        outer, ca, cb = _number(p, "ca"), _number(inner, "ca"), _number(inner, "cb")
        yield term("add", a, term("add", b, c, ca=outer * cb, cb=_number(p, "cb")), ca=outer * ca)


def _distributed(p: Place) -> Iterator[Term]:
    if p.op.op in ("mul", "dot"):
        for a, other in (p.op.args, p.op.args[::-1]):
            inner = p.maker(a, "add")
            if inner is not None and (p.op.op == "mul" or _have_reduced_axes(p, inner)):
                yield like(inner, *(like(p.op, x, other) for x in inner.args))


def _have_reduced_axes(p: Place, inner: Op) -> bool:
    """Whether the arguments of an operator have all axes that the place reduces."""
    return all(set(p.reduced) <= p.axes(x) for x in inner.args)


def _scaled_before(p: Place) -> Iterator[Term]:
    """f(x, y) -> f(2 x, y) / 2 for operators linear in x."""
    if p.op.op in ("mul", "div", "dot", "sum", "acc", "accs"):
        doubled = term("affine", p.op.args[0], scale=TWO)
        yield term("affine", like(p.op, doubled, *p.op.args[1:]), scale=HALF)


def _scale_moved(p: Place) -> Iterator[Term]:
    if p.op.op in ("mul", "dot", "sum", "acc", "accs"):
        for i, a in enumerate(p.op.args[: operator(p.op.op).arity - (p.op.op == "accs")]):
            inner = p.maker(a, "affine")
            if inner is not None and not inner.attributes.get("offset", 0):
                yield like(inner, p.with_argument(i, inner.args[0]))


def _coefficients_apart(p: Place) -> Iterator[Term]:
    if p.op.op == "add":
        x, y = p.op.args
        yield term("add", term("affine", x, scale=_number(p, "ca")), term("affine", y, scale=_number(p, "cb")))


def _dot_apart(p: Place) -> Iterator[Term]:
    if p.op.op == "dot":
        yield term("sum", term("mul", *p.op.args), axes=p.reduced)


def _dot_together(p: Place) -> Iterator[Term]:
    inner = p.first_maker("mul") if p.op.op == "sum" else None
    if inner is not None and _have_reduced_axes(p, inner):
        yield term("dot", *inner.args, axes=p.reduced)


def _sum_apart(p: Place) -> Iterator[Term]:
    if p.op.op == "sum" and len(p.reduced) > 1:
        yield term("sum", term("sum", p.op.args[0], axes=p.reduced[:1]), axes=p.reduced[1:])


def _mean_of_constant(p: Place) -> Iterator[Term]:
    """x -> the mean of x over an axis that it does not have."""
    free = [a for a, _ in p.graph.extents if a not in {b for axes in p.kernel.axes_of.values() for b in axes}]
    if p.op.op in ("mul", "add") and free:
        yield term("affine", term("sum", like(p.op), axes=(free[0],)), scale=Fraction(1, p.graph.extent(free[0])))


def _out_of_the_sum(p: Place) -> Iterator[Term]:
    """sum x y -> (sum x) y, where y does not have the axes."""
    inner = p.first_maker("mul", "div") if p.op.op == "sum" else None
    if inner is not None and not set(p.reduced) & p.axes(inner.args[1]):
        x, y = inner.args
        yield like(inner, like(p.op, x), y)


def _into_the_dot(p: Place) -> Iterator[Term]:
    """(dot x y) z -> dot (x z) y"""
    if p.op.op == "mul":
        for x, z in (p.op.args, p.op.args[::-1]):
            inner = p.maker(x, "dot")
            if inner is not None and not set(inner.attributes["axes"]) & p.axes(z):  # type: ignore[arg-type]
                yield like(inner, term("mul", inner.args[0], z), inner.args[1])


def _zero_added(p: Place) -> Iterator[Term]:
    if p.op.op in ("mul", "dot", "sum"):
        yield term("affine", term("affine", like(p.op), offset=HALF), offset=-HALF)
        yield from (
            term("add", like(p.op), term("add", a, a, cb=MINUS)) for a in p.op.args if p.axes(a) == set(p.op.axes)
        )


# --- powers, exponentials, functions


def _quotient(p: Place) -> Iterator[Term]:
    x, *rest = p.op.args or ("",)
    if p.op.op == "div":
        yield term("mul", x, term("pow", *rest, exponent=MINUS))
    if p.op.op == "mul":
        inner = p.maker(rest[0], "pow")
        if inner is not None and (e := _number(inner, "exponent")) < 0:
            yield term("div", x, like(inner, exponent=-e))


def _inverse_apart(p: Place) -> Iterator[Term]:
    """x ** -1/2 -> (x ** 1/2) ** -1"""
    if p.op.op == "pow" and (e := _number(p, "exponent")) < 0:
        yield term("pow", like(p.op, exponent=-e), exponent=MINUS)


def _square(p: Place) -> Iterator[Term]:
    if p.op.op == "mul" and p.op.args[0] == p.op.args[1]:
        yield term("pow", p.op.args[0], exponent=TWO)
    if p.op.op == "pow" and _number(p, "exponent") == 2:
        yield term("mul", _argument(p), _argument(p))


def _root_by_reciprocal(p: Place) -> Iterator[Term]:
    """x ** -1/2 -> x ** 1/2 / x"""
    if p.op.op == "pow" and _number(p, "exponent") == -HALF:
        yield term("div", like(p.op, exponent=HALF), _argument(p))


def _offset_apart(p: Place) -> Iterator[Term]:
    """f(s x + o) -> f(y), y = s x + o"""
    if "offset" in operator(p.op.op).defaults and p.op.op != "affine":
        yield like(p.op, _argument(p), scale=ONE, offset=ZERO)


def _constant_apart(p: Place) -> Iterator[Term]:
    if p.op.op == "affine":
        o, s = (term("const", value=_number(p, k, d)) for k, d in (("offset", ZERO), ("scale", ONE)))
        yield term("add", term("mul", p.op.args[0], s), o)


def _exponential_apart(p: Place) -> Iterator[Term]:
    inner = p.first_maker("add")
    s, o = _number(p, "scale"), _number(p, "offset", ZERO)
    if inner is not None and not o:
        scales = s * _number(inner, "ca"), s * _number(inner, "cb")
        yield term("mul", *(term("exp", x, scale=c) for x, c in zip(inner.args, scales, strict=True)))
    yield term("pow", like(p.op, scale=s / 2, offset=o / 2), exponent=TWO)
    yield term("pow", like(p.op, scale=-s, offset=-o), exponent=MINUS)


def _is_nested(p: Place) -> bool:
    """Whether this exponential's argument contains another one, with nothing uninterpreted between them."""
    tensors: set[str] = set()
    for kernel in map(as_block, p.graph):
        values = {x.name for x in kernel.loads if x.tensor in tensors}
        for op in kernel.ops:
            below = not values.isdisjoint(op.args)
            if (kernel.name, op.name) == (p.kernel.name, p.op.name):
                return below
            is_exponential = op.op in ("exp", "exps") and not below  # the second one is uninterpreted itself
            is_made_with = op.op == "rescale" or (below and not _is_uninterpreted(op))
            if is_exponential or is_made_with:
                values.add(op.name)
        tensors |= {s.tensor.name for s in kernel.stores if s.value in values}
    return False


def _is_uninterpreted(op: Op) -> bool:
    """Given a value that contains an exponential."""
    is_root = op.op == "pow" and _number(op, "exponent").denominator != 1
    return is_root or op.op in FUNCTIONS or op.op in ("exp", "exps", "logs", "lesslogs", "max", "shift")


def _first_apart(p: Place) -> Iterator[Term]:
    if p.op.op == "exp" and not _is_nested(p):
        yield from _exponential_apart(p)


def _second_apart(p: Place) -> Iterator[Term]:
    if p.op.op == "exp" and _is_nested(p):
        yield from _exponential_apart(p)


def _shifted_exponential(p: Place) -> Iterator[Term]:
    if p.op.op == "exps":
        x, m = p.op.args
        yield term("exp", term("add", x, m, ca=_number(p, "scale"), cb=MINUS))
        yield term("mul", term("exp", x, scale=_number(p, "scale")), term("exp", m, scale=MINUS))
    if p.op.op == "rescale":
        x, old, new = p.op.args
        moved = term("add", old, new, cb=MINUS)
        yield term("mul", x, term("exp", moved, scale=_number(p, "degree")))
        yield term("div", term("mul", x, term("exp", old, scale=_number(p, "degree"))), term("exp", new))


def _another_shift(p: Place) -> Iterator[Term]:
    if p.op.op == "shift":
        yield like(p.op, scale=_number(p, "scale") * TWO)
        yield term("affine", like(p.op), offset=ONE) if not _carried(p) else like(p.op, scale=_number(p, "scale") / 2)


def _max_of_positive_multiple(p: Place) -> Iterator[Term]:
    if p.op.op == "max":
        yield term("affine", like(p.op, term("affine", p.op.args[0], scale=TWO)), scale=HALF)


def _carried(p: Place) -> bool:
    return p.kernel.loop in p.reduced


def _computed_again(p: Place) -> Iterator[Term]:
    """One use of a value reads a copy."""
    for i, a in enumerate(p.op.args):
        inner = p.maker(a)
        if inner is not None and inner.op not in ("shift", *ACCUMULATORS):
            yield p.with_argument(i, like(inner))


# --- schedules


def _without_loop(graph: KernelGraph) -> Iterator[Edit]:
    for n, kernel in enumerate(graph):
        if isinstance(kernel, BlockGraph) and kernel.divided and as_whole(kernel) != kernel:
            yield partial(with_kernel, graph, n, as_whole(kernel))


def _as_kernel(graph: KernelGraph) -> Iterator[Edit]:
    """A library operator as a kernel, divided along the axes of its result."""
    for n, kernel in enumerate(graph):
        if not isinstance(kernel, BlockGraph) and not any(map(is_part, kernel.result.axes)):
            yield partial(with_kernel, graph, n, replace(as_block(kernel), grid=kernel.result.axes))


def _looped(graph: KernelGraph) -> Iterator[Edit]:
    """A sum in a kernel of one operator is over a loop."""
    for n, kernel in enumerate(graph):
        block = as_block(kernel)
        op, axes = block.ops[0], Place(graph, block, block.ops[0]).reduced
        is_sum = op.op in ("sum", "dot") and len(block.ops) == 1 and not block.loop
        if is_sum and not is_part(axes[0]):
            inner = replace(op, name="step")
            acc = replace(op, op="acc", args=("step",), attrs=())
            yield partial(with_kernel, graph, n, replace(block, loop=axes[0], ops=(inner, acc)))


def _smaller_grid(graph: KernelGraph) -> Iterator[Edit]:
    for n, kernel in enumerate(graph):
        if isinstance(kernel, BlockGraph):
            needed = kernel.loop_bounds and kernel.loop_bounds.axis
            grids = [tuple(b for b in kernel.grid if b != a) for a in kernel.grid if not is_part(a) and a != needed]
            grids += [kernel.grid[::-1]] if len(kernel.grid) > 1 else []
            yield from (partial(with_kernel, graph, n, replace(kernel, grid=grid)) for grid in grids)


def _wider_loop_bounds(graph: KernelGraph) -> Iterator[Edit]:
    for n, kernel in enumerate(graph):
        if isinstance(kernel, BlockGraph) and kernel.loop_bounds is not None:
            low, high = kernel.loop_bounds.low, kernel.loop_bounds.high
            low, high = None if low is None else low - 1, None if high is None else high + 1
            wider = replace(kernel.loop_bounds, low=low, high=high)
            yield partial(with_kernel, graph, n, replace(kernel, loop_bounds=wider))
            yield partial(with_kernel, graph, n, replace(kernel, loop_bounds=None))


# --- identities that the verifier misses


def _logistic(p: Place) -> Iterator[Term]:
    """1 / (1 + exp(-x))"""
    if p.op.op == "logistic":
        e = term("exp", p.op.args[0], scale=-_number(p, "scale"), offset=-_number(p, "offset", ZERO))
        yield term("pow", e, exponent=MINUS, offset=ONE)


def _negated_condition(p: Place) -> Iterator[Term]:
    if p.op.op == "where":
        c, x, y = p.op.args
        yield term("where", term("not", c), y, x)


def _mask_apart(p: Place) -> Iterator[Term]:
    inner = p.first_maker("and") if p.op.op == "mask" else None
    if inner is not None:
        yield term("mask", inner.args[0], term("mask", inner.args[1], p.op.args[1]))


def _rewrite(name: str, edits: Edits, missed: str = "", sometimes: bool = False) -> Rewrite:
    return Rewrite(Mutation(name, name, edits), missed, sometimes)


OPAQUE = "{} is an uninterpreted function"
NESTED = "a root of a value with roots or exponentials is an uninterpreted function"
SECOND = "a second exponential on one path is an uninterpreted function"
TERMS = "next to a maximum of x + x, which is not seen as 2 x then"
BESIDE = "logistic of exponentials, or in an exponent, is an uninterpreted function"
REWRITES: tuple[Rewrite, ...] = (
    _rewrite("x y = y x", operators(_commuted)),
    _rewrite("(x y) z = x (y z)", operators(_reassociated)),
    _rewrite("(x + y) z = x z + y z", operators(_distributed)),
    _rewrite("f(x) = f(2 x) / 2, f linear", operators(_scaled_before)),
    _rewrite("f(c x) = c f(x), f linear", operators(_scale_moved)),
    _rewrite("a x + b y = (a x) + (b y)", operators(_coefficients_apart)),
    _rewrite("dot x y = sum x y", operators(_dot_apart)),
    _rewrite("sum x y = dot x y", operators(_dot_together)),
    _rewrite("sum over i, k = sum over i of sum over k", operators(_sum_apart)),
    _rewrite("x = mean x over an axis it does not have", operators(_mean_of_constant, whole=True)),
    _rewrite("sum x y = (sum x) y, y the same along the axis", operators(_out_of_the_sum)),
    _rewrite("(sum x y) z = sum (x z) y", operators(_into_the_dot)),
    _rewrite("x = x + c - c", operators(_zero_added)),
    _rewrite("x / y = x y^-1", operators(_quotient)),
    _rewrite("x^-a = 1 / x^a", operators(_inverse_apart)),
    _rewrite("x x = x^2", operators(_square)),
    _rewrite("x^-1/2 = x^1/2 / x", operators(_root_by_reciprocal), NESTED, sometimes=True),
    _rewrite("f(s x + o) = f(y), y = s x + o", operators(_offset_apart)),
    _rewrite("s x + o = x mul s add o", operators(_constant_apart)),
    _rewrite("exp(x + y) = exp x exp y, exp(x) = exp(x / 2)^2 = 1 / exp(-x)", operators(_first_apart)),
    _rewrite("the same of an exponential of exponentials", operators(_second_apart), SECOND),
    _rewrite("exp(x - m) = exp x exp -m", operators(_shifted_exponential)),
    _rewrite("softmax for another shift", operators(_another_shift)),
    _rewrite("max 2 x = 2 max x", operators(_max_of_positive_multiple), TERMS, sometimes=True),
    _rewrite("a value computed twice", operators(_computed_again)),
    _rewrite("one block without a loop", _without_loop),
    _rewrite("a library operator as a kernel", _as_kernel),
    _rewrite("a sum over a loop", _looped),
    _rewrite("another grid", _smaller_grid),
    _rewrite("a longer span, or none", _wider_loop_bounds),
    _rewrite("logistic x = 1 / (1 + exp -x)", operators(_logistic), BESIDE, sometimes=True),
    _rewrite("where(c, x, y) = where(not c, y, x)", operators(_negated_condition), OPAQUE.format("where")),
    _rewrite("mask(a and b, x) = mask(a, mask(b, x))", operators(_mask_apart), OPAQUE.format("mask")),
)


@dataclass
class RewriteReport(CampaignReport):
    """Counts by identity in `rules`: places where it applies, those that were tried, and those that were refused."""

    title: ClassVar[str] = "True rewrites"
    header: ClassVar[tuple[str, ...]] = ("identity", "why it is missed", "places", "tried", "refused")
    words = 2

    seed: int
    sources: int
    rules: dict[str, list[int]] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """How many rewrites were tried."""
        return sum(tried for _, tried, _ in self.rules.values())

    @property
    def refused(self) -> int:
        """How many rewrites were refused."""
        return sum(refused for _, _, refused in self.rules.values())

    @property
    def passed(self) -> bool:
        """Whether every refusal has a reason."""
        return not self.unexplained

    @property
    def share(self) -> float:
        """The share of all places that is refused, estimated by rule from the places drawn.

        A rule that misses and was not drawn counts as refused everywhere. This varies less from draw to draw than
        `refused / tried`, in which the counts of places are left to chance.
        """
        missed = {r.name for r in REWRITES if r.missed}
        refused = (n * (bad / tried if tried else name in missed) for name, (n, tried, bad) in self.rules.items())
        return sum(refused) / max(1, sum(n for n, _, _ in self.rules.values()))

    def summary(self) -> str:
        """Sum the campaign up in one sentence."""
        return (
            f"{self.refused} of {self.tried} true rewrites refused, {100 * self.share:.1f} % of all places, "
            f"{len(self.unexplained)} without a known reason ({self.sources} sources, seed {self.seed}, "
            f"{self.seconds:.0f} s)"
        )

    def rows(self) -> list[list[str]]:
        """Counts by identity."""
        missed = {r.name: r.missed for r in REWRITES}
        return [[name, missed[name], *map(str, counts)] for name, counts in self.rules.items()]

    def findings(self) -> list[str]:
        """Rewrites that were refused without a known reason."""
        return self.unexplained


def rewrite(sources: Sequence[Source], count: int, seed: int, rewrites: Sequence[Rewrite] = REWRITES) -> RewriteReport:
    """Try `count` true rewrites, drawn from all places of all sources, and of their programs, where a rule applies."""
    rng = Random(seed)
    programs = {s.reference: Source(f"the program of {s.name}", s.reference, s.reference) for s in sources}
    subjects = sound_subjects([*sources, *programs.values()], seed)
    places = [(s, rule, edit) for s in subjects for rule in rewrites for edit in rule.edits.edits(s.source.candidate)]
    counts = Counter(rule.name for _, rule, _ in places)
    result = RewriteReport(seed, len(subjects), {r.name: [counts[r.name], 0, 0] for r in rewrites})
    rng.shuffle(places)
    with result.timed():
        for subject, rule, edit in places:
            if result.tried == count:
                break
            graph = edit()
            if not _is_true(subject, graph):
                continue
            result.rules[rule.name][1] += 1
            if why := _refused(subject.source.reference, graph):
                result.rules[rule.name][2] += 1
                if not rule.missed:
                    texts = f"{rule.name}, {subject.source.name}: {why}", str(subject.source.reference), str(graph)
                    result.unexplained.append("\n".join(texts))
    return result


def _refused(reference: KernelGraph, graph: KernelGraph) -> str:
    try:
        certify(reference, graph)
    except VerificationError as why:
        return str(why)
    return ""


def _is_true(subject: MutationSubject, graph: KernelGraph) -> bool:
    """Whether it is well formed, and right for floats."""
    try:
        check_graph(graph)
        return graph != subject.source.candidate and subject.oracle.same(graph)
    except GraphError:
        return False
