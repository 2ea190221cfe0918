"""The short report: what it says of a change of algebra, of kernels, and of what stays with XLA."""

from pathlib import Path

import pytest

from mirage_jax import summary
from mirage_jax.mugraph.chain import formula
from mirage_jax.mugraph.matched_names import with_names_of
from mirage_jax.mugraph.parser import parse
from mirage_jax.report import Decision, RegionReport, Report

PROGRAM = """
mugraph {
  extents i=8 j=4 k=2
  input Q: f32[i,j]
  input K: f32[i,j]
  input V: f32[i,k]
  library S: f32[i,i'] = dot{axes=(j)} Q[i,j] K[i',j]
  library Y: f32[i,k] = dot{axes=(i')} S[i,i'] V[i',k]
  output Y
}
"""
REORDERED = """
mugraph {
  extents i=8 j=4 k=2
  input Q: f32[i,j]
  input K: f32[i,j]
  input V: f32[i,k]
  library M: f32[j,k] = dot{axes=(i)} K[i,j] V[i,k]
  library Y: f32[i,k] = dot{axes=(j)} Q[i,j] M[j,k]
  output Y
}
"""


class Winner:
    def __init__(self, graph, together: str = "") -> None:
        self.graph, self.together = graph, together


def report(winner) -> Report:
    decision = Decision(winner, "because", "search", "cpu", certificate="certified", gate="passed")
    return Report("f", (RegionReport(("model.py:3:1 (f)", "/x/site-packages/flax/a.py:9 (g)"), PROGRAM, decision),))


def test_changed_algebra() -> None:
    text = summary.summarize(report(Winner(parse(REORDERED))))
    assert text.splitlines()[:4] == [
        "f: 1 region, 1 optimized",
        "region 0:",
        "  optimized: because [search]",
        "  source: model.py:3 (f) and 1 more file",
    ]
    assert "the program forms S: f32[i,i'], 64 numbers; the winner never does" in text
    assert "no intermediate result of more than 8 (M: f32[j,k])" in text
    assert "    - library S" in text and "    + library M" in text and "input" not in text
    assert "in one launch" not in text


def test_several_kernels_in_one_launch() -> None:
    found = report(Winner(parse(REORDERED), "k0 + k1"))
    for text in (summary.summarize(found), str(found)):
        assert "  in one launch each: k0 + k1" in text.splitlines()


def test_left_to_xla() -> None:
    text = summary.summarize(report(None))
    assert "kept XLA's code: because [search]" in text and "what changed" not in text


@pytest.mark.parametrize(("program", "graph"), [(PROGRAM, PROGRAM), (REORDERED, PROGRAM)])
def test_says_nothing_of_intermediates_that_are_not_smaller(program, graph) -> None:
    assert summary.never_formed(parse(program), parse(graph)) == ""


def test_the_same_graph_has_no_changes() -> None:
    assert list(summary.changes(parse(PROGRAM), parse(PROGRAM))) == []


HEAD = """
  extents i=4 j=2048 k=32 l=2048 m=32
  input x0: f32[i,j,k]
  input x1: f32[i,l,k]
  input x2: f32[i,l,m]
"""
ATTENTION = f"""
mugraph {{{HEAD}
  library t0: f32[i,j,l] = dot{{axes=(k)}} x0[i,j,k] x1[i,l,k]
  library t1: f32[i,j,m] = dot{{axes=(l)}} t0[i,j,l] x2[i,l,m]
  library t2: f32[i,j,m] = affine{{scale=1/2048}} t1[i,j,m]
  output t2
}}
"""
LINEAR = f"""
mugraph {{{HEAD}
  library m0: f32[i,m,k] = dot{{axes=(l)}} x2[i,l,m] x1[i,l,k]
  library m1: f32[i,j,m] = dot{{axes=(k)}} x0[i,j,k] m0[i,m,k]
  library t2: f32[i,j,m] = affine{{scale=1/2048}} m1[i,j,m]
  output t2
}}
"""


def test_the_formula_and_the_diff_of_the_page() -> None:
    """A value that takes another's place takes its name, so the scale is no change."""
    page = (Path(__file__).parent.parent / "docs" / "debugging.md").read_text()
    decision = Decision(Winner(parse(LINEAR)), "", "search", "cpu", certificate="certified", gate="passed")
    lines = summary.summarize(Report("f", (RegionReport((), ATTENTION, decision),))).splitlines()
    once = with_names_of(parse(ATTENTION), parse(LINEAR))
    assert with_names_of(parse(ATTENTION), once) == once
    assert "  formula: 1/2048 (x0 x1ᵀ) x2 -> 1/2048 x0 (x1ᵀ x2)" in lines
    changed = [line for line in lines if line.startswith(("    - ", "    + "))]
    assert len(changed) == 4 and "\n".join(changed) in page
    assert next(line for line in lines if "formula" in line) in page


def graph(*lines: str) -> str:
    head = ["extents i=4 j=5 k=6 l=7", "input A: f32[i,j]", "input B: f32[j,k]", "input v: f32[k]", "input w: f32[i]"]
    return "\n  ".join(["mugraph {", *head, *lines]) + "\n}"


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (["P: f32[i,k] = dot{axes=(j)} A[i,j] B[j,k]", "Y: f32[i] = dot{axes=(k)} P[i,k] v[k]"], "(A B) v"),
        (["p: f32[j] = dot{axes=(k)} B[j,k] v[k]", "Y: f32[i] = dot{axes=(j)} p[j] A[i,j]"], "A (B v)"),
        (["p: f32[j] = dot{axes=(i)} w[i] A[i,j]", "Y: f32[k] = dot{axes=(j)} p[j] B[j,k]"], "Bᵀ (Aᵀ w)"),
        (["Y: f32[k,i] = dot{axes=(j)} A[i,j] B[j,k]"], "Bᵀ Aᵀ"),
        (["P: f32[i,i'] = dot{axes=(j)} A[i,j] A[i',j]", "Y: f32[i] = dot{axes=(i')} P[i,i'] w[i']"], "(A Aᵀ) w"),
        (["a: f32[i] = affine{scale=-2} w[i]", "Y: f32[j] = dot{axes=(i)} A[i,j] a[i]"], "-2 Aᵀ w"),
        (["a: f32[i] = affine{offset=1} w[i]", "Y: f32[j] = dot{axes=(i)} A[i,j] a[i]"], ""),
        (["P: f32[i,k] = dot{axes=(j)} A[i,j] B[j,k]", "Y: f32[i] = sum{axes=(k)} P[i,k]"], ""),
        (["a: f32[i] = exp w[i]", "Y: f32[j] = dot{axes=(i)} A[i,j] a[i]"], ""),
        (["Y: f32[i,k] = dot{axes=()} w[i] v[k]"], "w vᵀ"),
    ],
)
def test_formulas(lines, want) -> None:
    assert formula(parse(graph(*(f"library {line}" for line in lines), "output Y"))) == want


def test_names_without_a_match_are_new() -> None:
    """`p` is another value in the program, so the winner's `p` gets a name of its own."""
    program = parse(graph("library p: f32[i] = exp w[i]", "library Y: f32[i] = sqrt p[i]", "output Y"))
    found = parse(graph("library p: f32[k] = exp v[k]", "library Y: f32[i] = dot{axes=(k)} q[i,k] p[k]", "output Y")
                  .replace("library Y", "library q: f32[i,k] = dot{axes=(j)} A[i,j] B[j,k]\n  library Y"))  # fmt: skip
    assert [k.name for k in with_names_of(program, found)] == ["m0", "q", "Y"]
    assert "dot{axes=(k)} q[i,k] m0[k]" in str(with_names_of(program, found))


def test_steps_in_another_order_are_no_change() -> None:
    one, two = "library {}: f32[j] = dot{{axes=(i)}} A[i,j] w[i]", "library {}: f32[j] = dot{{axes=(k)}} B[j,k] v[k]"
    program = parse(graph(one.format("a"), two.format("b"), "library Y: f32[j] = mul a[j] b[j]", "output Y"))
    found = parse(graph(one.format("m1"), two.format("m0"), "library Y: f32[j] = mul m0[j] m1[j]", "output Y"))
    assert list(summary.changes(program, found)) == [
        "- library Y: f32[j] = mul a[j] b[j]",
        "+ library Y: f32[j] = mul b[j] a[j]",
    ]
