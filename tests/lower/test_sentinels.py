"""Kernels that skip for sentinels: both forms as texts, the choice between them, and the exact check of all three."""

import re
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.lower.triton.emitter import EmitOptions, KernelSource, emit
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.sentinels import usual
from mirage_jax.verify.exact import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret

LEAST = -(2**127)
HEAD = """mugraph {
  extents d=64 e=64 h=1 i=256 n=256
  input Q: bf16[h,i,d]
  input K: bf16[h,n,d]"""
LOGITS = f"""
    %q = load Q[h,i,d]
    %k = load K[h,n,d]
    %z[] = const{{value={LEAST}}}
    %i[i] = iota{{axis=i}}
    %n[n] = iota{{axis=n}}
    %c[n,i] = le %n %i
    %s[h,i,n] = dot{{axes=(d)}} %q %k
    %a[h,i,n] = affine{{scale=1/8}} %s
    %t[n,i,h] = where %c %a %z"""
FORWARD = f"""{HEAD}
  input V: bf16[h,n,e]
  kernel k0 grid(h,i) loop(n in ..i+0) {{{LOGITS}
    %v = load V[h,n,e]
    %m[i,h] = shift{{axes=(n)}} %t
    %p[n,i,h] = exps %t %m
    %l0[i,h] = sum{{axes=(n)}} %p
    %l[i,h] = accs %l0 %m
    %o0[h,i,e] = dot{{axes=(n)}} %p %v
    %o[h,i,e] = accs %o0 %m
    %r[i,h] = pow{{exponent=-1}} %l
    %y[h,i,e] = mul %o %r
    store O: bf16[h,i,e] = %y
  }}
  output O
}}"""
BACKWARD = f"""{HEAD}
  input G: bf16[h,i,e]
  input M: f32[h,i]
  input R: f32[h,i]
  kernel k0 grid(h,n) loop(i in n+0..) {{{LOGITS}
    %g = load G[h,i,e]
    %m = load M[h,i]
    %r = load R[h,i]
    %p[n,i,h] = exps %t %m
    %w[n,i,h] = mul %p %r
    %v0[h,n,e] = dot{{axes=(i)}} %w %g
    %v[h,n,e] = acc %v0
    store W: bf16[h,n,e] = %v
  }}
  output W
}}"""
GRAPHS = {"forward": parse(FORWARD), "backward": parse(BACKWARD)}
SIZES = {
    "warps alike": {"num_warps": 4},
    "specialized": {"num_warps": 4, "specialized": True},
    "several blocks": {"num_warps": 8, "specialized": True, "programs": 1},
}
CASES = [(name, sizes) for name in GRAPHS for sizes in SIZES]


def schedule(graph: KernelGraph, name: str) -> Schedule:
    (kernel,), sizes = graph.kernels, SIZES[name]
    rows = 64 * sizes["num_warps"] // 4 if "specialized" in sizes else 64
    tiles = {"h": 1, kernel.loop: 64, kernel.grid[-1]: rows}
    return Schedule((KernelSchedule(tuple((a, tiles[a]) for a in kernel.divided), **sizes),))


def inputs(name: str, low: slice, bf16: bool = True) -> list[np.ndarray]:
    """Inputs with rows of which all logits are as low as the sentinel."""
    rng = np.random.default_rng(0)
    q, k, x = (rng.standard_normal((1, 256, 64)) for _ in range(3))
    q[:, low], k = -3e38, np.abs(k)
    narrow = [a.astype(ml_dtypes.bfloat16) for a in (q, k, x)]
    if name == "forward":
        return narrow
    with np.errstate(all="ignore"):
        q, k = (a.astype(np.float64) for a in narrow[:2])
        t = np.where(np.tri(256, dtype=bool), q @ np.swapaxes(k, 1, 2) / 8, float(LEAST))
        m = np.maximum(t.max(-1), np.finfo(np.float32).min)
        r = 1 / np.exp(t - m[..., None]).sum(-1)
    return [*narrow, m.astype(np.float32), r.astype(np.float32)]


@pytest.mark.parametrize("low", [slice(0, 0), slice(70, 75), slice(0, 250)], ids=["none", "some", "all"])
@pytest.mark.parametrize("name,sizes", CASES)
def test_values(name: str, sizes: str, low: slice) -> None:
    """Blocks with a row that is as low as the sentinel give what the program gives, and so do all others."""
    graph = GRAPHS[name]
    xs = inputs(name, low)
    with np.errstate(all="ignore"):
        (want,) = run(graph, [np.asarray(x, np.float64) for x in xs])
    (have,) = interpret(graph, schedule(graph, sizes), xs)
    np.testing.assert_allclose(have.astype(np.float64), want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("sizes", SIZES)
def test_huge_logits(sizes: str) -> None:
    """The usual form leaves their products unrounded beside a rounded maximum; blocks that have them run both."""
    graph = GRAPHS["forward"]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 256, 64)) for _ in range(3))
    xs = [x.astype(ml_dtypes.bfloat16) for x in (1e5 * q, 1e5 * k, v)]
    (want,) = run(graph, [np.asarray(x, np.float64) for x in xs])
    (have,) = interpret(graph, schedule(graph, sizes), xs)
    np.testing.assert_allclose(have.astype(np.float64), want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("name,sizes", CASES)
def test_compiles_and_is_exact(name: str, sizes: str) -> None:
    graph = GRAPHS[name]
    (source,) = sources(graph, schedule(graph, sizes))
    assert source is not None and compile_for(source, 90).fits
    assert exact_check.exact_check(graph, schedule(graph, sizes)) == ""


def test_what_skips_is_said_once() -> None:
    """The text and the graph agree on which maxima are too large: queries that are the keys too have such."""
    graph = parse(FORWARD.replace("\n  input K: bf16[h,n,d]", "").replace("load K[h,n,d]", "load Q[h,n,d]"))
    assert exact_check.exact_check(graph, schedule(graph, "warps alike")) == ""


def test_two_in_one_launch() -> None:
    """Blocks of both may store again."""
    twin = FORWARD[FORWARD.index("  kernel k0") : FORWARD.index("  output O")]
    graph = parse(
        FORWARD.replace("  output O", twin.replace("k0", "k1").replace("store O", "store P") + "  output O P")
    )
    (sizes,) = schedule(GRAPHS["forward"], "warps alike").kernels
    assert exact_check.exact_check(graph, Schedule((sizes, sizes), joint=True)) == ""


def test_the_complete_form_takes_nothing_from_the_other() -> None:
    """It stores as wide, for which its lanes have to follow one another, and its number of steps is not known."""
    sizes = schedule(GRAPHS["forward"], "warps alike")
    (checked,), (alone,) = (
        sources(GRAPHS["forward"], sizes),
        sources(usual(GRAPHS["forward"]), sizes, EmitOptions(skips=False)),
    )
    assert checked is not None and alone is not None
    stores = [re.findall(r"st\.global\S*", compile_for(source, 90).ptx) for source in (checked, alone)]
    assert stores[0] == 2 * stores[1]
    assert "in range(0, 256 + fresh, 16)" in checked.text


def test_the_check_makes_no_kernel_spill() -> None:
    """In a kernel that has all the registers, nothing of the complete form lies in them while the other form runs."""
    sizes = FORWARD.replace("d=64 e=64 h=1 i=256 n=256", "d=128 e=128 h=32 i=4096 n=4096")
    tiles = (("h", 1), ("i", 128), ("n", 128), ("e", 128))
    kernel = KernelSchedule(tiles, num_warps=8, num_stages=2, specialized=True, programs=132)
    (checked,) = sources(parse(sizes), Schedule((kernel,)))
    assert checked is not None and compile_for(checked, 90).spills < 64  # bytes per thread; lanes in common: 684


def test_queries_of_one_number_each() -> None:
    """Rows of the exact check's first input are its elements if it is a vector."""
    narrow = FORWARD.replace("Q[h,i,d]", "Q[i]").replace("K[h,n,d]", "K[n]").replace("Q: bf16[h,i,d]", "Q: bf16[i]")
    narrow = narrow.replace("K: bf16[h,n,d]", "K: bf16[n]").replace("%q[h,i,d]", "%q[i]").replace("%k[h,n,d]", "%k[n]")
    narrow = narrow.replace("%s[h,i,n] = dot{axes=(d)} %q %k", "%s[i,n] = mul %q %k")
    graph = parse(narrow)
    assert exact_check.exact_check(graph, schedule(graph, "warps alike")) == ""


def test_a_kernel_reads_one_number_more_for_a_tensor_that_its_loop_reads() -> None:
    (source,) = sources(GRAPHS["backward"], schedule(GRAPHS["backward"], "warps alike"))
    assert source is not None and source.inputs[-1] == "min(M)" and source.dtypes[len(source.inputs) - 1] == "f32"


ERRORS = {
    "low rows are not looked for": ("low > 0:", "low > 9:"),
    "and not in what warps found": ("found > 0:", "found > 9:"),
    "another bound": (f"{float(LEAST) / 2!r}", "-1e+250"),
    "another sentinel": (f"{float(LEAST)!r}", "-1.5e+38"),
}


def planted(sizes: str) -> Iterator[str]:
    (source,) = sources(GRAPHS["forward"], schedule(GRAPHS["forward"], sizes))
    assert source is not None
    return (name for name, (old, _) in ERRORS.items() if old in source.text)


@pytest.mark.parametrize("sizes,error", [(sizes, error) for sizes in SIZES for error in planted(sizes)])
def test_planted_errors_are_found(sizes: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **kwargs: object) -> KernelSource:
        source = emit(*args, **kwargs)
        return replace(source, text=source.text.replace(*ERRORS[error]))

    monkeypatch.setattr(exact_check, "emit", wrong)
    assert exact_check.exact_check(GRAPHS["forward"], schedule(GRAPHS["forward"], sizes))
