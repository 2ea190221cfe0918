"""Which kernels have two forms because of sentinels, what their guards ask for, and what the forms compute."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lower.kernels import attention, split_attention

from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.sentinels import LARGEST_SHIFT, complete, forms_of, guarded, usual

LEAST = -(2**127)
N = 9
ATTENTION = f"""mugraph {{
  extents d=2 i={N} n={N}
  input s: f32[i,n]
  input b: f32[n]
  input V: f32[n,d]
  kernel k0 grid(i) loop(n in ..i+0) {{
    %s = load s[i,n]
    %b = load b[n]
    %v = load V[n,d]
    %z[] = const{{value={LEAST}}}
    %i[i] = iota{{axis=i}}
    %n[n] = iota{{axis=n}}
    %c[n,i] = le %n %i
    %a[i,n] = add %s %b
    %t[n,i] = where %c %a %z
    %m[i] = shift{{axes=(n)}} %t
    %p[n,i] = exps %t %m
    %l0[i] = sum{{axes=(n)}} %p
    %l[i] = accs %l0 %m
    %o0[i,d] = dot{{axes=(n)}} %p %v
    %o[i,d] = accs %o0 %m
    %y[i,d] = div %o %l
    store O: f32[i,d] = %y
  }}
  output O
}}"""
SCHEDULE = Schedule((KernelSchedule((("i", 2), ("n", 2))),))

OTHER_USES = {
    "logits are stored": ("store O", "%w[i] = sum{axes=(n)} %t\n%x[i] = acc %w\nstore X: f32[i] = %x\n    store O"),
    "negative scale": ("exps %t", "exps{scale=-1} %t"),
    "tiny scale": ("exps %t", "exps{scale=1/1000000000000000000000000000000000000000} %t"),
    "a small number": (str(LEAST), "-100"),
    "no loop bounds": (" in ..i+0", ""),
    "also a factor": ("%l0[i]", "%u[n,i] = mul %t %t\n%u0[i] = sum{axes=(n)} %u\n%u1[i] = acc %u0\n%l0[i]"),
}


def changed(*changes: tuple[str, str]) -> KernelGraph:
    text = ATTENTION
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return parse(text)


def attend(s: np.ndarray, b: np.ndarray, v: np.ndarray, low: float = float(LEAST)) -> np.ndarray:
    """What the kernel says, as a program would say it."""
    t = np.where(np.tri(N, dtype=bool), s + b, low)
    with np.errstate(all="ignore"):
        p = np.exp(t - t.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ v


def test_forms() -> None:
    graph = changed()
    forms = guarded(graph.kernels[0])
    assert forms is not None and forms.complete.loop_bounds is None and forms.usual.loop_bounds is not None
    assert "mask %c %a" in str(forms.usual) and "where" in str(forms.complete)
    (guard,) = forms.guards
    assert guard.bound == Fraction(LEAST, 2) and guard.limit is None and not forms.tensor_bounds
    assert forms_of(graph.kernels[0], graph) == forms  # its maxima are of sums
    check_graph(usual(graph))
    check_graph(complete(graph))


def test_forms_for_small_maxima() -> None:
    """Maxima of products, also stored ones, but not where what is stored may be the shift of other exponentials."""
    for program, stored in ((attention(), 0), (split_attention(), 1)):
        kernel = program.graph.kernels[0]
        forms = forms_of(kernel, program.graph)
        assert forms is not None and forms.complete == replace(kernel, loop_bounds=None)
        (guard,) = forms.guards
        assert guard.bound is None and guard.limit == LARGEST_SHIFT
        assert (guard.shift in {s.value for s in kernel.stores}) == bool(stored)
    asked = replace(program.graph, outputs=tuple(s.tensor.name for s in kernel.stores))
    assert forms_of(kernel, asked) is None


@pytest.mark.parametrize("name", OTHER_USES)
def test_no_forms(name: str) -> None:
    """Where something else than a softmax is made of what is masked, the sentinel is a number like others."""
    graph = changed(OTHER_USES[name])
    assert guarded(graph.kernels[0]) is None


def test_exponentials_without_a_maximum_need_no_guard() -> None:
    graph = changed(
        ("%m[i] = shift{axes=(n)} %t\n", ""),
        ("exps %t %m", "exp %t"),
        ("accs %l0 %m", "acc %l0"),
        ("accs %o0 %m", "acc %o0"),
    )
    forms = guarded(graph.kernels[0])
    assert forms is not None and not forms.guards and not forms.tensor_bounds


ROWS = st.sampled_from([0.0, -1e30, float(LEAST) / 2, float(LEAST), float(LEAST) * 1.5, -np.inf])


@settings(max_examples=40)
@given(st.lists(ROWS, min_size=N, max_size=N), st.lists(ROWS, min_size=N, max_size=N), st.integers(0, 9))
def test_any_rows_and_columns(rows: list[float], columns: list[float], seed: int) -> None:
    """Logits and biases of any size, in whole rows and in part: tile by tile the kernel is the program."""
    rng = np.random.default_rng(seed)
    s, v = rng.standard_normal((N, N)) + np.array(rows)[:, None], rng.standard_normal((N, 2))
    b = np.array(columns)
    with np.errstate(all="ignore"):
        (have,) = run(changed(), [s, b, v], SCHEDULE)
    np.testing.assert_allclose(have, attend(s, b, v), rtol=1e-9, atol=1e-9)


def test_the_usual_form_alone_is_not_the_program() -> None:
    """What the guards are for: padding that another layer has added."""
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((N, N)), rng.standard_normal((N, 2))
    b = np.where(np.arange(N) < 4, float(LEAST), 0.0)
    (have,) = run(usual(changed()), [s, b, v], SCHEDULE)
    assert np.abs(have - attend(s, b, v))[:4].max() > 0.1
