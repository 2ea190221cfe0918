"""The short report: what it says of a change of algebra, of kernels, and of what stays with XLA."""

import pytest

from mirage_jax import summary
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
    assert "the program forms S: f32[i,i'], 64 numbers; what runs never does" in text
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
