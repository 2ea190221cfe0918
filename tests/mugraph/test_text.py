"""``parse(str(g)) == g``, for hand-written graphs and for random ones; and hashes that survive renaming."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mugraph.graphs import CANDIDATES, PROGRAMS, RMSNORM, Program

from mirage_jax.errors import ParseError
from mirage_jax.mugraph.builder import library
from mirage_jax.mugraph.canonical import canonical, structure_hash
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Library, Load, LoopBounds, Op, Store, Tensor
from mirage_jax.mugraph.operators import OPERATORS
from mirage_jax.mugraph.parser import parse

TEXTS = [(p, p.candidates[n]) for p, n in CANDIDATES] + [(p, p.reference) for p in PROGRAMS]


@pytest.mark.parametrize("program,text", TEXTS, ids=range(len(TEXTS)))
def test_round_trip(program: Program, text: str) -> None:
    graph = program.graph(text)
    again = parse(str(graph))
    assert again == graph
    assert str(again) == str(graph)
    assert hash(again) == hash(graph)


AXES = st.lists(st.sampled_from(["i", "j", "k'", "k.g", "n", "b2"]), unique=True, max_size=4).map(tuple)
NAMES = st.from_regex(r"[A-Za-z_0-9][A-Za-z_0-9.]{0,5}", fullmatch=True)
DTYPES = st.sampled_from(["f16", "bf16", "f32", "f64", "i32", "bool"])
TENSORS = st.builds(Tensor, NAMES, AXES, DTYPES)
AXIS = st.sampled_from(["i", "j", "k", "n'"])
VALUES = st.one_of(st.fractions(max_denominator=10**9), AXES, AXIS)
ATTRS = st.dictionaries(st.sampled_from(["axes", "axis", "degree", "scale", "x_1"]), VALUES, max_size=3)
OPS = st.builds(
    Op, NAMES, st.sampled_from(sorted(OPERATORS)), st.lists(NAMES, max_size=3).map(tuple), AXES,
    ATTRS.map(lambda d: tuple(sorted(d.items()))),
)  # fmt: skip


def some(x: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(x, max_size=3).map(tuple)


BOUNDS = st.none() | st.integers(-(10**4), 10**4)
BOUNDS = st.tuples(AXIS, BOUNDS, BOUNDS).filter(lambda s: s[1:] != (None, None) and (None in s or s[1] <= s[2]))
BLOCKS = st.builds(
    lambda name, grid, loop, *rest, loop_bounds: BlockGraph(name, grid, loop, *rest, loop_bounds if loop else None),
    NAMES, AXES, st.none() | AXIS, some(st.builds(Load, NAMES, NAMES, AXES)), some(OPS),
    some(st.builds(Store, TENSORS, NAMES)), loop_bounds=st.none() | BOUNDS.map(lambda s: LoopBounds(*s)),
)  # fmt: skip
LIBRARIES = st.builds(
    lambda op, args, result, attrs: library(op, args, result, **attrs),
    st.sampled_from(sorted(OPERATORS)), st.lists(st.tuples(NAMES, AXES), max_size=3), TENSORS, ATTRS,
)  # fmt: skip
EXTENTS = st.lists(st.tuples(AXIS, st.integers(1, 10**6)), max_size=3).map(tuple)
GRAPHS = st.builds(KernelGraph, some(TENSORS), some(st.one_of(BLOCKS, LIBRARIES)), some(NAMES), EXTENTS)


@given(GRAPHS)
@settings(max_examples=60, deadline=None)
def test_round_trip_of_random_graphs(graph: KernelGraph) -> None:
    assert parse(str(graph)) == graph


@pytest.mark.parametrize(
    "text,line,expected",
    [
        ("", 0, "closing brace"),
        ("graph {", 1, "mugraph {"),
        ("mugraph {\n  extents i=x\n}", 2, "axis=extent"),
        ("mugraph {\n  input X f32[i]\n}", 2, "input name: dtype"),
        ("mugraph {\n  kernel a grid(i {\n}", 2, "kernel name grid"),
        ("mugraph {\n  kernel a grid(i) {\n    %x load X\n}", 3, "a load, an operator"),
        ("mugraph {\n  kernel a grid(i) {\n    %x[] = exp{scale} %y\n}", 3, "attribute=value"),
        ("mugraph {\n  library X: f32[i] = \n}", 2, "library name"),
        ("mugraph {\n  nonsense\n}", 2, "extents, input"),
        ("mugraph {\n}\nrest", 3, "end of the text"),
        ("mugraph {\n  output O", 2, "closing brace"),
    ],
)
def test_errors_say_where(text: str, line: int, expected: str) -> None:
    with pytest.raises(ParseError, match=rf"line {line}: expected .*{re.escape(expected)}"):
        parse(text)


def test_comments_and_blank_lines() -> None:
    text = str(RMSNORM.graph(RMSNORM.reference))
    assert parse("# a comment\n\n" + text.replace("\n", "\n\n  # another\n")) == parse(text)


def test_library_names_by_position() -> None:
    x = Tensor("x", ("i", "k"), "f32")
    k = library("dot", [(x, "i,k"), (x, "k,i")], Tensor("y", ("i",), "f32"), axes="k")
    assert isinstance(k, Library)
    assert [load.name for load in k.loads] == ["0", "1"]
    assert k.op == Op("y", "dot", ("0", "1"), ("i",), (("axes", ("k",)),))
    assert str(k) == "library y: f32[i] = dot{axes=(k)} x[i,k] x[k,i]"
    c = library("const", [], Tensor("c", (), "f32"), value=0.5)
    assert c.op.attributes == {"value": Fraction(1, 2)}


# --- structure hashes


@pytest.mark.parametrize("program,text", TEXTS, ids=range(len(TEXTS)))
def test_canonical_form_is_stable(program: Program, text: str) -> None:
    graph = program.graph(text)
    assert canonical(canonical(graph)) == canonical(graph)
    assert structure_hash(canonical(graph)) == structure_hash(graph)


def test_renaming_keeps_the_hash() -> None:
    text = str(RMSNORM.graph(RMSNORM.candidates["split k"]))
    renamed = re.sub(r"\bk\b", "zz", text)
    for old, new in (
        ("%e", "%value"),
        ("X", "Input"),
        ("kernel a", "kernel first"),
        ("E:", "Part:"),
        ("load E[", "load Part["),
    ):
        renamed = renamed.replace(old, new)
    assert renamed != text
    assert structure_hash(parse(renamed)) == structure_hash(parse(text))


def test_different_graphs_have_different_hashes() -> None:
    graphs = [p.graph(t) for p, t in TEXTS]
    assert len({structure_hash(g) for g in graphs}) == len(graphs)
    text = RMSNORM.candidates["split k"]
    for old, new in (
        ("1/1000", "1/1001"),
        ("grid(i,j)", "grid(j,i)"),
        ("f32[k.g,i,j]", "f16[k.g,i,j]"),
        ("dot{axes=(k)} %x %w", "dot{axes=(k)} %w %x"),
    ):
        assert structure_hash(RMSNORM.graph(text.replace(old, new))) != structure_hash(RMSNORM.graph(text)), old


def test_extents_count_if_asked() -> None:
    graph = RMSNORM.graph(RMSNORM.reference)
    larger = graph.with_extents({**graph.sizes, "k": 4096})
    assert structure_hash(graph) != structure_hash(larger)
    assert structure_hash(graph, extents=False) == structure_hash(larger, extents=False)
    assert structure_hash(graph) == structure_hash(graph.with_extents({**graph.sizes, "unused": 3}))
