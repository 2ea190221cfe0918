"""A loop that ends early is certified if what it leaves out is masked to zero, and refused if a step too few runs."""

import numpy as np
import pytest
from mugraph.graphs import CAUSAL, CAUSAL_BOUNDS, WINDOW, Program

from mirage_jax.errors import VerificationError
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.verify.equivalence.certificate import certify, fingerprint, reduced, scale_of
from mirage_jax.verify.floats.gate import float_gate

FAR = 128  # a window longer than any reduced axis


def far(program: Program, text: str) -> KernelGraph:
    """Windows and loop bounds of 128 instead of 3, over axes of 1000."""
    text = text.replace("offset=3", f"offset={FAR}").replace("n'-2..", f"n'-{FAR - 1}..")
    graph = program.graph(text)
    return graph.with_extents({**graph.sizes, "n": 1000})


WRONG = [
    (CAUSAL_BOUNDS, "..n'+0", "..n'-1"),
    (CAUSAL_BOUNDS, "..n'+0", "n'+0.."),
    (CAUSAL_BOUNDS, "..n'+0", "n'-3..n'+0"),
    (CAUSAL_BOUNDS, "mask %c %s", "affine %s"),  # loop bounds without the mask are no causal mask: tiles are coarser
    (CAUSAL_BOUNDS, "le %b %a", "lt %b %a"),
    (WINDOW, "n'-2..", "n'-1.."),
    (WINDOW, "n'-2..n'+0", "n'-2..n'-1"),
    (WINDOW, "n'-2..n'+0", "n'+0..n'+2"),
    (WINDOW, "and %g %j", "affine %g"),
    (WINDOW, "offset=3", "offset=4"),
]
LOOSE = [(CAUSAL_BOUNDS, "..n'+0", "..n'+1"), (WINDOW, "n'-2..n'+0", "n'-3..n'+2"), (WINDOW, "n'-2..n'+0", "..n'+0")]


@pytest.mark.parametrize("name", ["online", "split keys"])
@pytest.mark.parametrize("program,old,new", WRONG)
def test_refuses(program: Program, name: str, old: str, new: str) -> None:
    text = program.candidates[name]
    assert old in text
    assert not fingerprint(program.graph(program.reference), program.graph(text.replace(old, new)))


@pytest.mark.parametrize("program,old,new", LOOSE)
def test_accepts_steps_too_many(program: Program, old: str, new: str) -> None:
    text = program.candidates["online"]
    assert fingerprint(program.graph(program.reference), program.graph(text.replace(old, new)))


@pytest.mark.parametrize("name", ["online", "split keys"])
def test_long_windows_are_scaled(name: str) -> None:
    reference, right = far(WINDOW, WINDOW.reference), far(WINDOW, WINDOW.candidates[name])
    proof = certify(reference, right)
    assert "2 for 127 in masks" in proof.schedule and dict(proof.extents)["n"] <= 7
    for off in (FAR - 2, FAR - 3, 3):
        text = str(right).replace(f"n'-{FAR - 1}..", f"n'-{off}..")
        assert not fingerprint(reference, far(WINDOW, WINDOW.candidates[name].replace("n'-2..", f"n'-{off}.."))), text
    assert fingerprint(reference, far(WINDOW, WINDOW.candidates[name].replace("n'-2..", f"n'-{FAR}..")))
    # a mask with another window is another function
    assert not fingerprint(reference, far(WINDOW, WINDOW.candidates[name].replace("offset=3", f"offset={FAR + 1}")))


@pytest.mark.parametrize("name", ["online", "split keys"])
def test_rows_and_columns_may_be_counted_by_one_tensor(name: str) -> None:
    """``t = arange(n); (t[:, None] >= t) & (t > t[:, None] - 128)`` reads one tensor of indices along both axes."""
    ones = WINDOW.reference
    line = next(x for x in ones.splitlines() if "= iota{axis=n'}" in x)
    shared = ones.replace(f"{line}\n", "").replace("a[n']", "b[n']")
    assert shared.count("iota") == 1
    reference, right = far(WINDOW, shared), far(WINDOW, WINDOW.candidates[name])
    assert certify(reference, right).bound <= 1e-12
    wrong = WINDOW.candidates[name].replace("n'-2..", f"n'-{FAR - 2}..")
    assert not fingerprint(reference, far(WINDOW, wrong))


def test_without_loop_bounds_nothing_is_known() -> None:
    """The zeros are there for loop bounds only: other certificates rest on what they rested on before."""
    reference = CAUSAL_BOUNDS.graph(CAUSAL_BOUNDS.reference)
    plain = CAUSAL_BOUNDS.graph(CAUSAL_BOUNDS.candidates["online"].replace(" in ..n'+0", ""))
    assert scale_of(reference, plain) is None
    assert fingerprint(reference, plain)


@pytest.mark.parametrize("third", [True, False], ids=["a circle", "no circle"])
def test_axes_that_are_compared_in_a_circle(third: bool) -> None:
    """From l - n <= a and n - i <= b follows l - i <= a + b, whatever the cuts are moved to: nothing is proven then."""

    def lower(name: str, tensor: str, row: str, column: str, rest: str = "") -> str:
        return f"""  kernel {name} grid({row}) loop({column}{rest}) {{
    %x = load {tensor}[{row},{column}]
    %r[{row}] = iota{{axis={row}}}
    %c[{column}] = iota{{axis={column}}}
    %0[] = const{{value=0}}
    %1[{row},{column}] = le %c %r
    %2[{row},{column}] = where %1 %x %0
    %3[{row}] = sum{{axes=({column})}} %2
    %4[{row}] = acc %3
    store {name}s: f32[{row}] = %4
  }}
"""

    def graph(rest: str) -> KernelGraph:
        names = "a b c" if third else "a b"
        kernels = [lower("a", "x", "i", "n", rest), lower("b", "y", "n", "l"), lower("c", "z", "i", "l")]
        return parse(f"""mugraph {{
  extents i=64 l=64 n=64
  input x: f32[i,n]
  input y: f32[n,l]
  input z: f32[i,l]
{"".join(kernels[: 2 + third])}  output {" ".join(f"{n}s" for n in names.split())}
}}""")

    if third:
        with pytest.raises(VerificationError, match="in a circle"):
            certify(graph(""), graph(" in ..i+0"))
    else:
        assert certify(graph(""), graph(" in ..i+0")).bound <= 1e-12


@pytest.mark.parametrize("low,skips", [(-100, False), (-10_000_000, True)])
def test_a_finite_mask_is_not_zero(low: int, skips: bool) -> None:
    """But a kernel may skip for a sentinel, since it looks at its rows and runs all steps where that is not zero."""
    text = CAUSAL.candidates["online"].replace("loop(n)", "loop(n in ..n'+0)")
    reference, bounded = (CAUSAL.graph(x.replace("-1000000000", str(low))) for x in (CAUSAL.reference, text))
    assert fingerprint(reference, bounded) == skips


def test_tiles_of_the_grid_axis_are_single() -> None:
    reference, candidate = WINDOW.graph(WINDOW.reference), WINDOW.graph(WINDOW.candidates["online"])
    extents, schedule = reduced(reference, candidate, scale_of(reference, candidate))
    assert schedule.kernels[0].tile("n'") == 1 and schedule.kernels[0].tile("n") == 2
    assert extents["n"] >= 5


def test_the_gate_allows_products_that_are_left_out() -> None:
    """Masked zeros times infinities are NaN where they are computed; a loop that ends early does not compute them."""
    nan, one = np.full(4, np.nan, np.float32), np.ones(4, np.float32)
    assert float_gate(nan, nan, one, skips=True)
    assert not float_gate(nan, nan, one)
    assert not float_gate(one, one, nan, skips=True)
    assert not float_gate(np.full(4, np.inf), np.full(4, np.inf, np.float32), one, skips=True)


@pytest.mark.parametrize("program", [CAUSAL_BOUNDS, WINDOW], ids=lambda p: p.name)
def test_a_summed_shift_is_no_last_one(program: Program) -> None:
    """It is the same wherever all steps of a row are in one part, for then the shift cancels whatever it is: some row
    has two steps in one part and one in the other.
    """
    text = program.candidates["split keys"]
    (line,) = [x for x in text.splitlines() if "last %" in x]
    wrong = program.graph(text.replace(line, line.replace("last %", "acc %")))
    assert not fingerprint(program.graph(program.reference), wrong)


ROWS_AND_COLUMNS = """mugraph {
  extents d=3 i=256 n=256
  input s: f32[i,n]
  input v: f32[n,d]
  kernel k grid(i) loop(n) {
    %s = load s[i,n]
    %v = load v[n,d]
    %a[n] = iota{axis=n}
    %b[i] = iota{axis=i}
    %e[] = const{value=50}
    %c[] = const{value=150}
    %f[n] = le %a %c
    %g[i] = le %e %b
    %m[n,i] = and %f %g
    %z[] = const{value=0}
    %p[i,n] = where %m %s %z
    %q[i,d] = dot{axes=(n)} %p %v
    %o[i,d] = acc %q
    store o: f32[i,d] = %o
  }
  output o
}"""


def test_bounds_do_not_add_up() -> None:
    """n <= 150 and i >= 50 imply n - i <= 100, but the order of 49, 51 and 150 would imply n - i <= 51 too."""
    reference = parse(ROWS_AND_COLUMNS)
    assert certify(reference, reference)
    for most in (100, 60, 51):
        with pytest.raises(VerificationError):
            certify(reference, parse(ROWS_AND_COLUMNS.replace("loop(n)", f"loop(n in ..i+{most})")))


def test_coefficients_are_no_differences() -> None:
    twice = ROWS_AND_COLUMNS.replace(
        "%f[n] = le %a %c\n    %g[i] = le %e %b\n    %m[n,i] = and %f %g",
        "%t[n,i] = add{ca=2, cb=-1} %a %b\n    %m[n,i] = le %t %e\n    %f[n] = le %a %c",
    )
    assert certify(parse(twice), parse(twice))
    for most in (25, 10, 1):
        with pytest.raises(VerificationError):
            certify(parse(twice), parse(twice.replace("loop(n)", f"loop(n in ..i+{most})")))


HEADS = """mugraph {
  extents d=16 h=32 i=64 n=128
  input q: f32[h,i,d]
  input k: f32[h,n,d]
  input v: f32[h,n,d]
  kernel attention grid(h,i) loop(nSPAN) {
    %q = load q[h,i,d]
    %k = load k[h,n,d]
    %v = load v[h,n,d]
    %s[h,i,n] = dot{axes=(d)} %q %k
    %a[n] = iota{axis=n}
    %b[i] = iota{axis=i}
    %c[n,i] = le %a %b
    %t[h,i,n] = mask %c %s
    %e[h,i,n] = exp %t
    %l[h,i] = sum{axes=(n)} %e
    %L[h,i] = acc %l
    %o[h,i,d] = dot{axes=(n)} %e %v
    %O[h,i,d] = acc %o
    %y[h,i,d] = div %O %L
    store y: f32[h,i,d] = %y
  }
  output y
}"""


@pytest.mark.parametrize("high", [2, 8, 40])
def test_loop_bounds_around_an_axis_that_no_mask_compares(high: int) -> None:
    """At reduced extents the ends of the axes that masks compare imply nothing about the others."""
    reference = parse(HEADS.replace("SPAN", ""))
    certify(reference, parse(HEADS.replace("SPAN", " in ..i+0")))
    with pytest.raises(VerificationError):
        certify(reference, parse(HEADS.replace("SPAN", f" in ..h+{high}")))


def test_axes_of_one_index_are_one_in_a_circle() -> None:
    program = """mugraph {
      extents e=1 f=1 i=64 n=256
      input x: f32[n]
      kernel k grid(e,f,i) loop(nSPAN) {
        %x = load x[n]
        %n[n] = iota{axis=n}
        %e[e] = iota{axis=e}
        %i[i] = iota{axis=i}
        %f[f] = iota{axis=f}
        %ee[e] = affine{offset=150} %e
        %ii[i] = affine{offset=-50} %i
        %c[n,e] = le %n %ee
        %g[f,i] = le %f %ii
        %z[] = const{value=0}
        %m[n,e] = where %c %x %z
        %w[n,e,f,i] = where %g %m %z
        %s[e,f,i] = sum{axes=(n)} %w
        %y[e,f,i] = acc %s
        store y: f32[e,f,i] = %y
      }
      output y
    }"""
    reference = parse(program.replace("SPAN", ""))
    with pytest.raises(VerificationError):
        certify(reference, parse(program.replace("SPAN", " in ..i+51")))
