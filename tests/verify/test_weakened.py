"""The verifier with something taken out of it does not get through the checks below: each weakening is found out.

Mutants of the verifier itself, named as in mutation testing: what they survive would be what nobody tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from mugraph.graphs import ATTENTION, CAUSAL, GATED_MLP, GRAM, LAYER_NORM, RMSNORM, ROW_SOFTMAX, WINDOW, Program

from mirage_jax.errors import GraphError, VerificationError
from mirage_jax.mugraph.domains import finite_field
from mirage_jax.mugraph.domains.finite_field import Draw, FieldDomain, Pair, PrimeRing, Residues, is_prime
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule
from mirage_jax.verify.equivalence import certificate
from mirage_jax.verify.equivalence.certificate import certify


def pair(program: Program, name: str, *changes: tuple[str, str]) -> tuple[KernelGraph, KernelGraph]:
    text = program.candidates[name]
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return program.graph(program.reference), program.graph(text)


def self_pair(program: Program, text: str) -> tuple[KernelGraph, KernelGraph]:
    return program.graph(text), program.graph(text)


def long(program: Program, name: str) -> tuple[KernelGraph, KernelGraph]:
    """With means over 4096."""
    graphs = (program.graph(t.replace("1/5", "1/4096")) for t in (program.reference, program.candidates[name]))
    reference, candidate = (g.with_extents({**g.sizes, "k": 4096}) for g in graphs)
    return reference, candidate


SHIFTED_INDEX = (
    "%y[h,i,e] = div %o %l",
    "%y0[h,i,e] = div %o %l\n%n0[i] = iota{axis=i}\n%n1[i] = affine{offset=1} %n0\n%y[h,i,e] = mul %y0 %n1",
)
RELATIVE = "library m: f32[i] = shift{axes=(n)} X[i,n]\nlibrary O: f32[i,n] = exps X[i,n] m[i]"
TWINS = Program(
    "twins",
    GRAM.head,
    "library O: f32[i,k] = add X[i,k] Y[i,k]\nlibrary S: f32[i,k] = add{cb=-1} X[i,k] Y[i,k]",
    {
        "one kernel": """
        kernel a grid(i,k) {
          %x = load X[i,k]
          %w = load Y[i,k]
          %y[i,k] = add %x %w
          %z[i,k] = add{cb=-1} %x %w
          store O: f32[i,k] = %y
          store S: f32[i,k] = %z
        }"""
    },
    "O S",
    lambda x, y: (x + y, x - y),
)
TWICE = "library a: f32[i,n] = add{cb=-1} X[i,n] X[i,n]\nlibrary O: f32[i,n] = div X[i,n] a[i,n]"

WRONG: dict[str, tuple[KernelGraph, KernelGraph]] = {
    "an index shifted": pair(ATTENTION, "online", SHIFTED_INDEX),
    "second output": pair(GRAM, "loop", ("ca=-1, cb=2", "ca=-1, cb=3")),
    "first output": pair(GRAM, "loop", ("%e[i,i'] = acc %d", "%e[i,i'] = last %d")),
    "other inputs": pair(GATED_MLP, "one kernel", ("load V", "load Z"), ("load W", "load V"), ("load Z", "load W")),
    "other function": pair(GATED_MLP, "one kernel", ("logistic", "tanh")),
    "operands of a comparison": pair(CAUSAL, "online", ("le %b %a", "le %a %b")),
    "constant + p q of Mirage": pair(RMSNORM, "two loops", ("offset=1/1000", f"offset={1 + 1000 * 167 * 83}/1000")),
    "exponential": pair(ROW_SOFTMAX, "stored in the second loop", ("exps %x %f", "exps{scale=2} %x %f")),
    "last step only": pair(RMSNORM, "two loops", ("acc %d", "last %d")),
    "not rescaled": pair(ATTENTION, "online", ("%o[h,i,e] = accs %u %m", "%o[h,i,e] = acc %u")),
    "a span too short": pair(WINDOW, "online", ("n'-2..", "n'-1..")),
    "divides by zero": self_pair(ROW_SOFTMAX, TWICE),
    "outputs exchanged": pair(TWINS, "one kernel", ("%y[", "%a["), ("%z[", "%y["), ("%a[", "%z[")),
    "depends on a shift": self_pair(ROW_SOFTMAX, RELATIVE),
}  # fmt: skip
RIGHT = [
    pair(ATTENTION, "split keys"), pair(LAYER_NORM, "one loop"), pair(GRAM, "loop"), pair(WINDOW, "online"),
    long(LAYER_NORM, "one loop"),
]  # fmt: skip


def check() -> None:
    """What the suite asks of a verifier, in short: raises if it falls short of it."""
    for what, graphs in WRONG.items():
        with pytest.raises(VerificationError):
            certify(*graphs)
            pytest.fail(f"accepted: {what}")
    for graphs in RIGHT:
        proofs = [certify(*graphs) for _ in range(2)]
        assert len({seed for p in proofs for seed in p.seeds}) == sum(len(p.seeds) for p in proofs) >= 4, "old draws"
        for proof in proofs:
            assert proof.bound <= 1e-12 and len(proof.seeds) >= 2
            assert proof.log2_per_draw > -proof.p_bits, "no draw can be surer than that"
            for p, q in proof.primes:
                assert p.bit_length() == proof.p_bits >= 127 and q.bit_length() == proof.q_bits >= 61
                assert (p - 1) % q == 0 and is_prime(p) and is_prime(q)


def test_the_verifier_as_it_is() -> None:
    check()


# --- weakenings: owner, attribute, what is put in its place (a function of what was there)


def mirages_primes(was: Any) -> Any:
    return lambda rng, p_bits, q_bits: (167, 83)


def some_outputs(choose: Callable[[Sequence[bool]], bool]) -> Callable[[Any], Any]:
    """Outputs are compared, but `choose` says which of the results matter."""

    def make(was: Any) -> Any:
        def test(self: Any, known: Any) -> None:
            have = certificate.evaluate(self.candidate, known.inputs, self._domain(known.draw), self.schedule)
            same = [not certificate._differences(x, y) for x, y in zip(known.want, have, strict=True)]
            if not choose(same):
                raise VerificationError("differs")

        return test

    return make


def any_order(was: Any) -> Any:
    """As in Mirage, where a shadowed variable makes the identity of whichever permutation matched."""

    def test(self: Any, known: Any) -> None:
        for want in permutations(known.want):
            try:
                return was(self, replace(known, want=want))
            except (VerificationError, GraphError):
                continue
        raise VerificationError("differs")

    return test


def passing_zero_divisors(was: Any) -> Any:
    def retry(self: Any, entropy: Any, p_bits: int, q_bits: int) -> Draw:
        draw = Draw(entropy(32), p_bits, q_bits, self.algebraic)
        try:
            return self.draw(draw)
        except finite_field.ZeroDivisor:
            return draw

    return retry


def quotients_by_zero(was: Any) -> Any:
    """x / 0 = x, as in Mirage."""
    return lambda self, x: was(self, x.map(lambda a: np.where(a == 0, 1, a)))


def equal_inputs(was: Any) -> Any:
    """Every input counts 0, 1, 2, ..."""
    return lambda self, modulus, shape: Residues(finite_field._fill(list(range(int(np.prod(shape)))), shape))


def no_shift(was: Any) -> Any:
    def shift(self: FieldDomain, x: Pair, axes: tuple[str, ...]) -> Pair:
        m = was(self, x, axes)
        return m.map(m.axes, lambda a: a * 0)

    return shift


def one_tile(was: Any) -> Any:
    def reduced(*args: Any) -> Any:
        extents, schedule = was(*args)
        kernels = tuple(KernelSchedule(tuple((a, 99) for a, _ in k.tiles)) for k in schedule.kernels)
        return extents, replace(schedule, kernels=kernels, parts=tuple((a, 1) for a, _ in schedule.parts))

    return reduced


def first_row(was: Any) -> Any:
    def differences(x: Pair, y: Pair) -> int:
        def rows(z: Pair) -> Pair:
            return z.map(z.axes, lambda a: a[:1])

        return was(rows(x), rows(y.map(x.axes, lambda a: certificate.arrange(a, y.axes, x.axes))))

    return differences


def unweighed(was: Any) -> Any:
    return lambda self, draw: FieldDomain(draw, {}, scale=self.scale)


def nameless(was: Any) -> Any:
    def hash(self: Draw, name: str, arguments: Any) -> tuple[int, int]:
        self.hashed[name] += 1
        value = was(self, "", arguments)
        del self.hashed[""]
        return value

    return hash


def without_loop_bounds(was: Any) -> Any:
    def scaled(graph: KernelGraph, scale: Any) -> KernelGraph:
        kernels = (replace(k, loop_bounds=None) if isinstance(k, BlockGraph) else k for k in graph)
        return replace(graph, kernels=tuple(kernels))

    return scaled


def hash_of(change: Callable[[str, Any], tuple[str, Any]]) -> Callable[[Any], Any]:
    return lambda was: lambda self, name, arguments: was(self, *change(name, arguments))


COMPARISON = certificate._Comparison
WEAKENED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "weak primes": (finite_field, "random_primes", mirages_primes),
    "small primes": (certificate, "PRIME_BITS", lambda was: ((31, 16),)),
    "one draw": (certificate, "MIN_DRAWS", lambda was: 1),
    "a fixed seed": (COMPARISON, "retry", lambda was: lambda self, entropy, p, q: was(self, lambda n: b"7" * n, p, q)),
    "the last output skipped": (COMPARISON, "test", some_outputs(lambda same: all(same[: max(1, len(same) - 1)]))),
    "returns at the first match": (COMPARISON, "test", some_outputs(any)),
    "outputs in any order": (COMPARISON, "test", any_order),
    "the first row only": (certificate, "_differences", first_row),
    "a zero divisor passes": (COMPARISON, "retry", passing_zero_divisors),
    "x / 0 = x": (PrimeRing, "inverse", quotients_by_zero),
    "all inputs the same": (Draw, "random_residues", equal_inputs),
    "no shift": (FieldDomain, "shift", no_shift),
    "one tile": (certificate, "reduced", one_tile),
    "unweighed sums": (COMPARISON, "_domain", unweighed),
    "functions without names": (Draw, "hash", nameless),
    "functions in any order": (Draw, "hash", hash_of(lambda name, arguments: (name, sorted(arguments)))),
    "constant functions": (Draw, "hash", hash_of(lambda name, arguments: (name, ()))),
    "spans ignored": (certificate, "_scaled", without_loop_bounds),
    "a bound of nothing": (certificate, "error_bound", lambda was: lambda d, p_bits, q_bits: -1000.0),
}  # fmt: skip


@pytest.mark.parametrize("name", WEAKENED)
def test_a_weakened_verifier_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, make = WEAKENED[name]
    monkeypatch.setattr(owner, attribute, make(getattr(owner, attribute)))
    with pytest.raises((AssertionError, VerificationError, pytest.fail.Exception)):
        check()
