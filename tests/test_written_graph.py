"""muGraphs by hand: text to graph and back, as JAX functions, and judged against JAX functions."""

import jax
import jax.numpy as jnp
import pytest
from deciding import assert_same, chain, measured, operands

import mirage_jax
from mirage_jax import MuGraph, UsageError

TEXT = """mugraph {
  extents d=8 e=4 m=16 n=32
  input q: f32[m,d]
  input k: f32[n,d]
  input v: f32[n,e]
  library kv: f32[d,e] = dot{axes=(n)} k[n,d] v[n,e]
  library out: f32[m,e] = dot{axes=(d)} q[m,d] kv[d,e]
  output out
}"""
BLOCKS = """mugraph {
  extents d=8 e=4 m=16 n=32
  input q: f32[m,d]
  input k: f32[n,d]
  input v: f32[n,e]
  kernel k0 grid(m) loop(n) {
    %q = load q[m,d]
    %k = load k[n,d]
    %v = load v[n,e]
    %s[m,n] = dot{axes=(d)} %q %k
    %o[m,e] = dot{axes=(n)} %s %v
    %a[m,e] = acc %o
    store out: f32[m,e] = %a
  }
  output out
}"""


def attend(q, k, v):
    return (q @ k.T) @ v


def arrays(dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, [(16, 8), (32, 8), (32, 4)], strict=True)]


@pytest.mark.parametrize("text", [TEXT, BLOCKS])
def test_text_runs_and_is_proven(text) -> None:
    graph = MuGraph.parse(text)
    assert str(graph) == text and MuGraph.parse(str(graph)) == graph
    assert [s.shape for s in graph.shapes] == [(16, 8), (32, 8), (32, 4)]
    f = graph.as_function()
    assert_same(f(*arrays()), attend(*arrays()))
    assert_same(jax.jit(lambda *a: f(*a) + 1)(*arrays()), attend(*arrays()) + 1)
    gradients = [jax.grad(lambda *a, g=g: g(*a).sum(), argnums=(0, 1, 2))(*arrays()) for g in (f, attend)]
    assert_same(*gradients)
    verdict = graph.equals(attend, (16, 8), (32, 8), (32, 4))
    assert verdict and verdict.why.startswith("certified: ")
    assert graph.equals(attend) and graph.equals(attend, *arrays()) and graph.equals(attend, *graph.shapes)


def test_another_function_is_refused() -> None:
    graph = MuGraph.parse(TEXT)
    verdict = graph.equals(lambda q, k, v: 2 * attend(q, k, v))
    assert not verdict and "differs in" in verdict.why
    shapes = graph.equals(attend, (16, 8), (64, 8), (64, 4))
    assert not shapes and "has shape [32, 8], in the program f32[64, 8]" in shapes.why
    transposed = graph.equals(lambda q, k, v: attend(q, k, v).T)
    assert not transposed and "outputs differ" in transposed.why


def test_arguments_in_another_order() -> None:
    graph = MuGraph.parse(TEXT)
    assert graph.equals(lambda v, q, k: attend(q, k, v), inputs=(1, 2, 0))
    square = MuGraph.parse("""mugraph {
      extents i=8 j=8 k=8
      input a: f32[i,j]
      input b: f32[j,k]
      library c: f32[i,k] = dot{axes=(j)} a[i,j] b[j,k]
      output c
    }""")
    assert square.equals(lambda a, b: a @ b)
    assert not square.equals(lambda a, b: b @ a)
    assert square.equals(lambda a, b: b @ a, inputs=(1, 0))


def test_a_program_of_a_report_is_read_back() -> None:
    def swapped(a, b, v):
        return chain(b, a, v)

    with measured(2.0):
        (region,) = mirage_jax.optimize(swapped).explain(*operands()).regions
    program, winner = MuGraph.parse(region.reference), MuGraph.parse(str(region.decision.winner.graph))
    a, b, v = operands()
    refused = program.equals(swapped, a, b, v)
    assert not refused and "pass inputs=(1, 0, 2)" in refused.why, refused.why
    for graph in (program, winner):
        assert graph.equals(swapped, a, b, v, inputs=(1, 0, 2))
        assert_same(graph.as_function()(b, a, v), swapped(a, b, v), 1e-3)


def test_types_are_kept() -> None:
    half = MuGraph.parse(TEXT.replace("f32", "bf16"))
    result = half.as_function()(*arrays("bfloat16"))
    assert result.dtype == jnp.bfloat16
    assert half.equals(attend)
    assert not MuGraph.parse(TEXT).equals(attend, *arrays("bfloat16"))


def test_several_results() -> None:
    graph = MuGraph.parse(TEXT.replace("output out", "output kv out"))
    first, second = graph.as_function()(*arrays())
    assert (first.shape, second.shape) == ((8, 4), (16, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (3, "found 3; it takes the text of a muGraph"),
        ("", "line 0: expected"),
        ("mugraph {\n  extends i=3\n}", "line 2: expected extents, input"),
        (TEXT.replace("dot{axes=(n)}", "dott"), "unknown operator 'dott'"),
        (TEXT.replace("output out", "output nothing"), "output nothing is not a tensor"),
        (TEXT.replace("f32[n,e]", "f33[n,e]", 1), "unknown dtype 'f33'"),
    ],
)
def test_bad_texts_are_one_line(text, message) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        MuGraph.parse(text)
    assert "\n" not in str(caught.value)


def test_bad_arguments_are_one_line() -> None:
    graph = MuGraph.parse(TEXT)
    q, k, v = arrays()
    bad = [
        (lambda: graph.as_function()(q, k), r"found the arrays float32\[16, 8\], float32\[32, 8\]; its inputs are f32"),
        (lambda: graph.as_function()(k, q, v), "its inputs are"),
        (lambda: graph.as_function()(q.astype("bfloat16"), k, v), "found the arrays bfloat16"),
        (lambda: graph.equals(3), "found 3; it takes a function"),
        (lambda: graph.equals(attend, (16, 8)), "found 1 shapes; the graph has 3 inputs"),
        (lambda: graph.equals(attend, "f32", (32, 8), (32, 4)), "found 'f32'; allowed are arrays"),
        (lambda: graph.equals(attend, inputs=(0, 0, 1)), "inputs: found .* allowed are the numbers from 0 to 2"),
        (lambda: graph.equals(lambda q, k, v: jnp.sort(q)), "not one muGraph of the graph's inputs"),
        (lambda: graph.equals(lambda q: q), "does not take the graph's inputs"),
        (lambda: MuGraph.parse(TEXT, schedule={"kernels": []}), "MuGraph.parse: .*schedule"),
    ]
    for call, message in bad:
        with pytest.raises(UsageError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
