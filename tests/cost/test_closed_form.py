"""Formulas of operations and bytes agree with the counts at any sizes, on both sides of each crossing."""

import subprocess
import sys

import pytest

from mirage_jax.cost.closed_form import closed_forms
from mirage_jax.mugraph.footprint import footprint
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse

SCORES = """mugraph {
  extents i=64 j=8 k=64 l=8
  input x0: f32[i,j]
  input x1: f32[k,j]
  input x2: f32[i,l]
  library t0: f32[k,i] = dot{axes=(j)} x1[k,j] x0[i,j]
  library t1: f32[k,l] = dot{axes=(i)} t0[k,i] x2[i,l]
  output t1
}"""
LINEAR = """mugraph {
  extents i=64 j=8 k=64 l=8
  input x0: f32[i,j]
  input x1: f32[k,j]
  input x2: f32[i,l]
  library m0: f32[l,j] = dot{axes=(i)} x2[i,l] x0[i,j]
  library t1: f32[k,l] = dot{axes=(j)} x1[k,j] m0[l,j]
  output t1
}"""


def at(**sizes: int) -> tuple[KernelGraph, KernelGraph]:
    return tuple(parse(text).with_extents(sizes) for text in (SCORES, LINEAR))


def test_axes_of_one_size_share_a_symbol() -> None:
    assert closed_forms(*at(i=64, j=8, k=64, l=8)) == (
        "sizes: i = k = 64, j = l = 8",
        "FLOP: 4 i^2 j -> 4 i j^2, fewer where i > j",
        "bytes: 8 i^2 + 16 i j -> 16 i j + 8 j^2, fewer where i > j",
    )


def test_the_other_way_has_more() -> None:
    scores, linear = at(i=64, j=8, k=64, l=8)
    assert closed_forms(linear, scores)[1] == "FLOP: 4 i j^2 -> 4 i^2 j, more where i > j"
    scores, linear = at(i=64, j=65, k=64, l=65)
    assert closed_forms(scores, linear)[1] == "FLOP: 4 i^2 j -> 4 i j^2, more where j > i"


@pytest.mark.parametrize(("i", "j", "k", "l", "crossing"), [(300, 32, 200, 48, 21.2), (900, 60, 61, 40, 39.6)])
def test_a_crossing_separates_fewer_from_more(i: int, j: int, k: int, l: int, crossing: float) -> None:  # noqa: E741
    """With all other sizes as they are, the largest size decides."""
    sizes = {"i": i, "j": j, "k": k, "l": l}
    largest = max(sizes, key=lambda a: sizes[a])
    line = closed_forms(*at(**sizes))[1]
    word = "fewer" if footprint(at(**sizes)[0]).flops > footprint(at(**sizes)[1]).flops else "more"
    assert f"{word} " in line
    others = ", ".join(f"{a} = {sizes[a]}" for a in sorted(sizes, key=lambda a: (-sizes[a], a)) if a != largest)
    assert line.endswith(f"{largest} > {crossing:.3g}, with {others}")
    for size in (int(crossing) - 1, int(crossing) + 1):
        scores, linear = (footprint(g).flops for g in at(**{**sizes, largest: size}))
        assert (scores > linear) == ((size > crossing) == (word == "fewer"))


def test_a_difference_without_a_crossing() -> None:
    assert closed_forms(*at(i=900, j=60, k=20, l=40))[1].endswith("more for all i, with j = 60, l = 40, k = 20")


def test_nothing_is_said_of_other_graphs() -> None:
    scores, linear = at(i=64, j=8, k=64, l=8)
    assert closed_forms(scores, linear.with_extents({"i": 64, "j": 4, "k": 64, "l": 8})) == ()
    assert closed_forms(scores, parse(LINEAR.replace("x1", "x3"))) == ()


def test_equal_counts() -> None:
    scores, _ = at(i=64, j=8, k=64, l=8)
    assert closed_forms(scores, scores)[1].endswith(", as many")


def test_sympy_is_loaded_only_for_formulas() -> None:
    program = "import sys, mirage_jax.report, mirage_jax.summary; assert 'sympy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
