"""Where a huge negative number may be taken for minus infinity, and where it may not."""

# ruff: noqa: E501 (tables with one case per line)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.predicates import UNKNOWN, Condition, Cut, Every, Scale, Some, holds_somewhere, may_hold
from mirage_jax.mugraph.sentinels import sentinels_to_masks

CAUSAL = """mugraph {
  extents e=2 i=7 n=7
  input s: f32[i,n]
  input keep: bool[n]
  input V: f32[n,e]
  library a: i32[i] = iota{axis=i}
  library b: i32[n] = iota{axis=n}
  library c: bool[n,i] = le b[n] a[i]
  library z: f32[] = const{value=-300000000000000000000000000000000000000}
  library t: f32[n,i] = where c[n,i] s[i,n] z[]
  library m: f32[i] = max{axes=(n)} t[n,i]
  library d: f32[n,i] = add{cb=-1} t[n,i] m[i]
  library p: f32[n,i] = exp d[n,i]
  library l: f32[i] = sum{axes=(n)} p[n,i]
  library w: f32[n,i] = div p[n,i] l[i]
  library O: f32[i,e] = dot{axes=(n)} w[n,i] V[n,e]
  output O
}"""

SAME = {
    "causal": {},
    "window": {"= le b[n] a[i]": "= le b[n] a[i]\nlibrary b3: i32[n] = affine{offset=3} b[n]\nlibrary c2: bool[n,i] = lt a[i] b3[n]\nlibrary c3: bool[n,i] = and c[n,i] c2[n,i]", "where c[n,i]": "where c3[n,i]"},
    "the other way": {"le b[n] a[i]": "le a[i] b[n]"},
    "unsafe": {"max{axes=(n)} t[n,i]": "sum{axes=(n)} s[i,n]", "exp d[n,i]": "exp{scale=1/2} t[n,i]", "add{cb=-1} t[n,i] m[i]": "add{cb=-1} s[i,n] m[i]"},
    "maximum used": {"output O": "output O m"},
    "longer rows": {"n=7": "n=9"},
    "weights of masked logits": {"a: i32[i]": "s0: f32[i,n] = mask keep[n] s[i,n]\nlibrary s1: f32[i,n] = exp s0[i,n]\nlibrary a: i32[i]", "where c[n,i] s[i,n]": "where c[n,i] s1[i,n]"},
}  # fmt: skip
DIFFERENT = {
    "rows without a key": {"le b[n] a[i]": "lt b[n] a[i]"},
    "window beyond the end": {"n=7": "n=4", "le b[n] a[i]": "le a[i] b[n]"},
    "padding mask": {"c: bool[n,i] = le b[n] a[i]": "c0: bool[n,i] = le b[n] a[i]\nlibrary c: bool[n,i] = and c0[n,i] keep[n]"},
    "no mask of indices": {"where c[n,i]": "where keep[n]"},
    "small sentinel": {"-300000000000000000000000000000000000000": "-10000"},
    "logits returned": {"output O": "output O t"},
    "differences returned": {"output O": "output O d"},
    "negative scale": {"exp d": "exp{scale=-1} d"},
    "maximum over rows": {"m: f32[i] = max{axes=(n)} t[n,i]": "m: f32[n] = max{axes=(i)} s[i,n]", "d: f32[n,i] = add{cb=-1} t[n,i] m[i]": "d: f32[n,i] = add{cb=-1} t[n,i] m[n]"},
    "multiplied": {"dot{axes=(n)} w[n,i]": "dot{axes=(n)} t[n,i]"},
    "sum": {"cb=-1": "cb=1"},
    "masked logits": {"a: i32[i]": "s0: f32[i,n] = mask keep[n] s[i,n]\nlibrary a: i32[i]", "where c[n,i] s[i,n]": "where c[n,i] s0[i,n]"},
    "logits times what is masked": {"a: i32[i]": "k0: f32[n] = mask keep[n] s0[n]\nlibrary s1: f32[i,n] = mul s[i,n] k0[n]\nlibrary a: i32[i]", "where c[n,i] s[i,n]": "where c[n,i] s1[i,n]", "  input keep": "  input s0: f32[n]\n  input keep"},
    "logarithms": {"a: i32[i]": "s0: f32[i,n] = log s[i,n]\nlibrary a: i32[i]", "where c[n,i] s[i,n]": "where c[n,i] s0[i,n]"},
    "two sentinels": {"library t:": "library s0: f32[n,i] = where keep[n] s[i,n] z[]\nlibrary t:", "where c[n,i] s[i,n]": "where c[n,i] s0[n,i]"},
    "sentinels added": {"library t:": "library s0: f32[n] = affine{scale=300000000000000000000000000000000000000} keep[n]\nlibrary s1: f32[n,i] = add s0[n] s[i,n]\nlibrary t:", "where c[n,i] s[i,n]": "where c[n,i] s1[n,i]"},
}  # fmt: skip


def changed(changes: dict[str, str]):
    text = CAUSAL
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    graph = parse(text)
    check_graph(graph)
    return graph


@pytest.mark.parametrize("name", SAME)
def test_becomes_a_mask(name: str) -> None:
    graph = changed(SAME[name])
    masked = sentinels_to_masks(graph)
    check_graph(masked)
    assert "mask" in str(masked) and "where" not in str(masked) and "-3000" not in str(masked)
    assert sentinels_to_masks(masked) == masked
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal([graph.extent(a) for a in t.axes]) for t in graph.inputs]
    for have, want in zip(run(masked, xs), run(graph, xs), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", DIFFERENT)
def test_stays(name: str) -> None:
    graph = changed(DIFFERENT[name])
    assert sentinels_to_masks(graph) == graph


EXTENTS = {"i": 5, "j": 2, "n": 4}
FORMS = st.sampled_from(
    [{"n": 1}, {"n": -1}, {"i": -1, "n": 1}, {"i": 1, "n": -1}, {"j": -1, "n": 1}, {"j": 1, "n": 1}]
)
CUTS = st.builds(lambda f, t: Cut(tuple(sorted(f.items())), t), FORMS, st.integers(-6, 6))
CONDITIONS = st.recursive(
    CUTS | st.just(UNKNOWN),
    lambda c: st.one_of(*(st.lists(c, max_size=3).map(lambda x, k=k: k(tuple(x))) for k in (Every, Some))),
    max_leaves=4,
)


def holds(c: Condition) -> np.ndarray:
    """Where a condition holds for certain."""
    unknown = c is UNKNOWN
    if isinstance(c, Every | Some):
        join = np.all if isinstance(c, Every) else np.any
        parts = [np.broadcast_to(holds(part), tuple(EXTENTS.values())) for part in c.parts]
        return join(np.array([np.full(tuple(EXTENTS.values()), isinstance(c, Every)), *parts]), axis=0)
    ranges = {a: range(n) for a, n in EXTENTS.items()}
    return np.zeros(tuple(EXTENTS.values()), bool) if unknown else may_hold(c, tuple(EXTENTS), ranges, Scale())


@given(CONDITIONS)
def test_holds_somewhere(c: Condition) -> None:
    if holds_somewhere(c, "n", EXTENTS.__getitem__):
        full = np.broadcast_to(holds(c), tuple(EXTENTS.values()))
        assert full.any(axis=2).all()


@given(st.lists(CUTS.filter(lambda c: dict(c.form).get("j") is None), max_size=3))
def test_holds_somewhere_is_exact_for_bands(parts: list[Cut]) -> None:
    c = Every(tuple(parts))
    full = np.broadcast_to(holds(c), tuple(EXTENTS.values()))
    assert holds_somewhere(c, "n", EXTENTS.__getitem__) == bool(full.any(axis=2).all())
