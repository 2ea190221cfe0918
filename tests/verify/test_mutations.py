"""No mutant of a right candidate gets a certificate, and every operator of the table makes some that are refused."""

import random

import pytest
from mugraph.graphs import ATTENTION, CAUSAL_BOUNDS, GRAM, RMSNORM, ROW_SOFTMAX, Program

from mirage_jax import cli
from mirage_jax.audit import mutants
from mirage_jax.audit.mutants import Fate, MutantReport, MutationSubject, mutate
from mirage_jax.audit.mutations import MUTATIONS, Mutation
from mirage_jax.audit.oracle import Oracle
from mirage_jax.audit.sources import Source, sources
from mirage_jax.errors import UsageError
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse

NAMES = ["rmsnorm_b1", "gated_mlp_b1", "gqa_b1", "abv", "causal", "window", "log_softmax", "two_outputs", "relu_mlp"]
NAMES += ["exp_of_sum", "gram"]
COUNT = 3000


def by_name(name: str) -> Mutation:
    (found,) = [m for m in MUTATIONS if m.name == name]
    return found


def source(program: Program, name: str) -> Source:
    return Source(program.name, program.graph(program.reference), program.graph(program.candidates[name]))


@pytest.fixture(scope="module")
def campaign() -> MutantReport:
    return mutate(sources(1, NAMES, randoms=8, each=4), COUNT, seed=1)


def test_no_mutant_is_accepted(campaign: MutantReport) -> None:
    assert campaign.wrong >= COUNT
    assert not campaign.accepted, "\n".join(map(str, campaign.accepted))


@pytest.mark.parametrize("operator", MUTATIONS, ids=str)
def test_every_operator_kills(campaign: MutantReport, operator: Mutation) -> None:
    assert campaign.operators[operator.name][Fate.REJECTED.value] > 0


# operator, program, candidate, what all its mutants together must contain
MADE = [
    ("M1", ATTENTION, "online", "div %l %o"),
    ("M3", GRAM, "loop", "output S O"),
    ("M14", RMSNORM, "two loops", "exponent=-1/2"),
    ("M20", RMSNORM, "two loops", "affine{offset=1/1000}"),
    ("M26", ATTENTION, "whole rows", "sum{axes=(n)} %s"),
    ("S3", ATTENTION, "online", "last %t"),
    ("S6", ATTENTION, "online", "acc %t"),
    ("S7", ROW_SOFTMAX, "stored in the second loop", "shift{axes=(n), scale=2}"),
    ("S11", CAUSAL_BOUNDS, "online", "loop(n in ..n'-1)"),
]


@pytest.mark.parametrize("name,program,candidate,text", MADE, ids=[m[0] for m in MADE])
def test_operators(name: str, program: Program, candidate: str, text: str) -> None:
    graph = program.graph(program.candidates[candidate])
    made = list(by_name(name).mutants(graph))
    assert any(text in str(m) for m in made), "\n".join(map(str, made))
    assert all(m != graph and parse(str(m)) == m for m in made)


def test_drawing_is_repeatable() -> None:
    graph = ATTENTION.graph(ATTENTION.candidates["split keys"])
    one, two = ([m.draw(graph, random.Random(5)) for m in MUTATIONS] for _ in range(2))
    assert one == two and sum(g is not None for g in one) > 20


# --- what becomes of a mutant


FATES = [
    ("%o[h,i,e] = accs %u %m", "%o[h,i,e] = acc %u", Fate.REJECTED),
    ("%l[h,i] = accs %t %m", "%l[h,i] = affine %t", Fate.STILLBORN),
    ("shift{axes=(n)} %s", "shift{axes=(n), scale=2} %s", Fate.EQUIVALENT),
]


@pytest.mark.parametrize("old,new,fate", FATES)
def test_fates(old: str, new: str, fate: Fate) -> None:
    subject = MutationSubject(source(ATTENTION, "online"), seed=0)
    assert subject.sound
    mutant = ATTENTION.graph(ATTENTION.candidates["online"].replace(old, new))
    assert subject.fate(mutant) == (fate, "")


@pytest.mark.parametrize(
    "old,new",
    [
        ("shift{axes=(n)} %x", "shift{axes=(n), scale=-1} %x"),
        ("%p[n,n'] = exps %x %m", "%x2[n,n'] = add %x %m\n%p[n,n'] = exps{scale=2} %x %x2"),
    ],
    ids=["an infinite shift", "a difference of infinities"],
)
def test_infinities_are_left_to_the_gate(old: str, new: str) -> None:
    """Right in exact arithmetic, so it is certified; minus infinity makes NaN of it."""
    subject = MutationSubject(source(CAUSAL_BOUNDS, "online"), seed=0)
    mutant = CAUSAL_BOUNDS.graph(CAUSAL_BOUNDS.candidates["online"].replace(old, new))
    assert subject.fingerprint(mutant) and not subject.oracle.same(mutant) and subject.oracle.same(mutant, finite=True)
    assert subject.fate(mutant) == (Fate.GATE, "")


RATIO = """mugraph {
  extents i=4 j=5
  input x: f32[i,j]
  input y: f32[i,j]
  library e: f32[i,j] = exp x[i,j]
  library c: f32[i] = sum{axes=(j)} e[i,j]
  library a: f32[i,j] = mul c[i] x[i,j]
  library b: f32[i,j] = mul c[i] y[i,j]
  library r: f32[i,j] = div a[i,j] b[i,j]
  output r
}"""


def test_divisors_that_are_always_zero_are_left_to_the_gate() -> None:
    """(c x) / (c y) is x / y, but c counts how often two random numbers agree."""
    subject = MutationSubject(Source("ratio", parse(RATIO), parse(RATIO)), seed=0)
    mutant, wrong = (parse(RATIO.replace("exp x[i,j]", f"eq x[i,j] {y}[i,j]")) for y in "yx")
    assert subject.fate(mutant) == (Fate.GATE, "")
    assert subject.fate(wrong) == (Fate.EQUIVALENT, "")  # here c is the number of columns


def test_the_oracle_sees_tiles() -> None:
    """Right as straight-line code, wrong step by step."""
    reference, right = (RMSNORM.graph(t) for t in (RMSNORM.reference, RMSNORM.candidates["two loops"]))
    last = RMSNORM.graph(RMSNORM.candidates["two loops"].replace("acc %d", "last %d"))
    oracle = Oracle(reference, seed=0)
    assert oracle.defined and oracle.same(right) and not oracle.same(last)


def accept_all(reference: KernelGraph, candidate: KernelGraph) -> str:
    return "certified"


def test_what_is_accepted_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    """A verifier that accepts everything is found out by the command."""
    monkeypatch.setattr("mirage_jax.cli.audit.sources", lambda seed: [source(RMSNORM, "two loops")])
    file = tmp_path / "r.json"
    command = ["mutate", "--count", "40", "-q", "--json", str(file)]
    assert cli.main(command) == cli.OK
    assert "0 of 40 non-equivalent mutants accepted" in " ".join(file.with_suffix(".md").read_text().split())
    capsys.readouterr()
    monkeypatch.setattr(mutants, "certify", accept_all)
    monkeypatch.setattr(mutants.Fingerprint, "__call__", lambda self, candidate: True)
    assert cli.main(command) == cli.PROBLEM
    out, _ = capsys.readouterr()
    text = out[out.rindex("mugraph {") :]
    check_graph(parse(text[: text.index("\n}") + 2]))


def test_no_mutants_of_what_is_wrong_already() -> None:
    wrong = RMSNORM.graph(RMSNORM.candidates["two loops"].replace("acc %d", "last %d"))
    with pytest.raises(UsageError, match="none of 1 sources is right"):
        mutate([Source("wrong", RMSNORM.graph(RMSNORM.reference), wrong)], 1, 0)


DIFFERENCE = """mugraph {
  extents i=4 j=5
  input x: f32[i,j]
  input y: f32[i,j]
  library a: f32[i,j] = affine{offset=C} x[i,j]
  library b: f32[i,j] = affine{offset=C} y[i,j]
  library r: f32[i,j] = add{cb=-1} a[i,j] b[i,j]
  output r
}"""


def test_huge_constants_that_cancel_are_left_to_the_gate() -> None:
    """(x + c) - (y + c) is x - y, but not in float64."""
    program, mutant = (parse(DIFFERENCE.replace("C", str(c))) for c in (1, 2**61 - 1))
    wrong = parse(str(mutant).replace(str(2**61 - 1), str(2**61), 1))
    subject = MutationSubject(Source("difference", program, program), seed=0)
    assert not subject.oracle.same(mutant) and subject.oracle.same_in_fractions(mutant)
    assert subject.fate(mutant) == (Fate.GATE, "")
    assert not subject.oracle.same_in_fractions(wrong) and subject.fate(wrong) == (Fate.REJECTED, "")
    exponential = parse(str(program).replace("affine{offset=1}", "exp"))
    assert not Oracle(exponential, 0).same_in_fractions(exponential)  # nobody knows
