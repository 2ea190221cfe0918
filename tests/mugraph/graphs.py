"""muGraphs in text form: programs as a frontend would capture them, right candidates, and what both should compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule, is_part
from mirage_jax.mugraph.parser import parse

Arrays = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """`extents`, `inputs` and `outputs` are shared by the reference and the candidates; so each is only its kernels."""

    name: str
    head: str
    reference: str
    candidates: dict[str, str]
    outputs: str
    value: Arrays

    def graph(self, kernels: str) -> KernelGraph:
        return parse(f"mugraph {{\n{self.head}\n{kernels}\noutput {self.outputs}\n}}")

    def inputs(self, seed: int = 0) -> list[np.ndarray]:
        graph, rng = self.graph(self.reference), np.random.default_rng(seed)
        return [rng.standard_normal([graph.extent(a) for a in t.axes]) for t in graph.inputs]


def schedule(graph: KernelGraph, tile: int = 2, parts: int = 2) -> Schedule:
    """The same tile for every divided axis."""
    kernels = []
    for k in graph:
        kernels.append(KernelSchedule(tuple((a, tile) for a in k.divided if not is_part(a))))
    return Schedule(tuple(kernels), tuple((a, parts) for a in graph.split_axes))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def layer_norm(x: np.ndarray) -> np.ndarray:
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-3)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return softmax(q @ k) @ v


RMSNORM = Program(
    "rmsnorm",
    "extents i=3 j=5 k=7\ninput X: f32[i,k]\ninput W: f32[k,j]",
    """
    library s: f32[i,k] = mul X[i,k] X[i,k]
    library t: f32[i] = sum{axes=(k)} s[i,k]
    library r: f32[i] = pow{exponent=-1/2, offset=1/1000, scale=1/7} t[i]
    library n: f32[i,k] = mul X[i,k] r[i]
    library O: f32[i,j] = dot{axes=(k)} n[i,k] W[k,j]
    """,
    {
        "scale after the loop": """
        kernel a grid(i,j) loop(k) {
          %x = load X[i,k]
          %w = load W[k,j]
          %s[i] = dot{axes=(k)} %x %x
          %t[i] = acc %s
          %d[i,j] = dot{axes=(k)} %x %w
          %e[i,j] = acc %d
          %r[i] = pow{exponent=-1/2, offset=1/1000, scale=1/7} %t
          %y[i,j] = mul %e %r
          store O: f32[i,j] = %y
        }""",
        "two loops": """
        kernel a grid(i,j) loop(k) {
          %x = load X[i,k]
          %w = load W[k,j]
          %q[i,k] = mul %x %x
          %s[i] = sum{axes=(k)} %q
          %t[i] = acc %s
          %r[i] = pow{exponent=-1/2, offset=1/1000, scale=1/7} %t
          %n[i,k] = mul %x %r
          %d[i,j] = dot{axes=(k)} %n %w
          %e[i,j] = acc %d
          store O: f32[i,j] = %e
        }""",
        "division by the root": """
        kernel a grid(i) {
          %x = load X[i,k]
          %w = load W[k,j]
          %s[i] = dot{axes=(k)} %x %x
          %r[i] = pow{exponent=1/2, offset=1/1000, scale=1/7} %s
          %d[i,j] = dot{axes=(k)} %x %w
          %y[i,j] = div %d %r
          store O: f32[i,j] = %y
        }""",
        "split k": """
        kernel a grid(i,j,k.g) loop(k) {
          %x = load X[i,k]
          %w = load W[k,j]
          %s[i] = dot{axes=(k)} %x %x
          %t[i] = acc %s
          %d[i,j] = dot{axes=(k)} %x %w
          %e[i,j] = acc %d
          store T: f32[k.g,i,j] = %t2
          store E: f32[i,j,k.g] = %e
        }
        kernel b grid(i,j) {
          %e = load E[i,j,k.g]
          %t = load T[k.g,i,j]
          %es[i,j] = sum{axes=(k.g)} %e
          %ts[i,j] = sum{axes=(k.g)} %t
          %r[i,j] = pow{exponent=-1/2, offset=1/1000, scale=1/7} %ts
          %y[i,j] = mul %es %r
          store O: f32[i,j] = %y
        }""".replace(
            "store T: f32[k.g,i,j] = %t2",
            "%o[i,j] = affine{scale=0} %e\n%t2[i,j] = add %t %o\nstore T: f32[k.g,i,j] = %t2",
        ),
    },
    "O",
    lambda x, w: rms(x) @ w,
)

LORA = Program(
    "lora",
    "extents i=3 j=4 k=5 r=2\ninput X: f16[i,k]\ninput W: f16[k,j]\ninput A: f16[k,r]\ninput B: f16[r,j]",
    """
    library a: f16[i,j] = dot{axes=(k)} X[i,k] W[k,j]
    library b: f16[i,r] = dot{axes=(k)} X[i,k] A[k,r]
    library c: f16[i,j] = dot{axes=(r)} b[i,r] B[r,j]
    library O: f16[i,j] = add a[i,j] c[i,j]
    """,
    {
        "one kernel": """
        kernel a grid(i,j) loop(k) {
          %x = load X[i,k]
          %w = load W[k,j]
          %a = load A[k,r]
          %b = load B[r,j]
          %d[i,j] = dot{axes=(k)} %x %w
          %e[i,j] = acc %d
          %f[i,r] = dot{axes=(k)} %x %a
          %g[i,r] = acc %f
          %h[i,j] = dot{axes=(r)} %g %b
          %y[i,j] = add %e %h
          store O: f16[i,j] = %y
        }""",
        "undistributed": """
        library ab: f16[k,j] = dot{axes=(r)} A[k,r] B[r,j]
        kernel a grid(j,i) loop(k) {
          %x = load X[i,k]
          %w = load W[k,j]
          %v = load ab[k,j]
          %u[k,j] = add %w %v
          %d[i,j] = dot{axes=(k)} %x %u
          %y[i,j] = acc %d
          store O: f16[i,j] = %y
        }""",
    },
    "O",
    lambda x, w, a, b: x @ w + (x @ a) @ b,
)

GATED_MLP = Program(
    "gated_mlp",
    "extents i=3 j=4 k=5\ninput X: f16[i,k]\ninput V: f16[k,j]\ninput W: f16[k,j]",
    """
    library a: f32[i,j] = dot{axes=(k)} X[i,k] V[k,j]
    library b: f32[i,j] = dot{axes=(k)} X[i,k] W[k,j]
    library c: f32[i,j] = logistic a[i,j]
    library d: f32[i,j] = mul a[i,j] c[i,j]
    library O: f16[i,j] = mul d[i,j] b[i,j]
    """,
    {
        "one kernel": """
        kernel a grid(i,j) loop(k) {
          %x = load X[i,k]
          %v = load V[k,j]
          %w = load W[k,j]
          %a[i,j] = dot{axes=(k)} %x %v
          %b[i,j] = dot{axes=(k)} %x %w
          %c[i,j] = acc %a
          %d[i,j] = acc %b
          %e[i,j] = logistic %c
          %f[i,j] = mul %c %d
          %y[i,j] = mul %f %e
          store O: f16[i,j] = %y
        }""",
    },
    "O",
    lambda x, v, w: silu(x @ v) * (x @ w),
)

SAFE_SOFTMAX = """
    library s: f32[h,i,n] = dot{axes=(d)} Q[h,i,d] K[h,d,n]
    library m: f32[h,i] = shift{axes=(n)} s[h,i,n]
    library p: f32[h,i,n] = exps s[h,i,n] m[h,i]
    library l: f32[h,i] = sum{axes=(n)} p[h,i,n]
    library w: f32[h,i,n] = div p[h,i,n] l[h,i]
    library O: f16[h,i,e] = dot{axes=(n)} w[h,i,n] V[h,n,e]
"""
ONLINE = """
kernel a grid(h,i) loop(n) {
  %q = load Q[h,i,d]
  %k = load K[h,d,n]
  %v = load V[h,n,e]
  %s[h,i,n] = dot{axes=(d)} %q %k
  %m[h,i] = shift{axes=(n)} %s
  %p[h,i,n] = exps %s %m
  %t[h,i] = sum{axes=(n)} %p
  %l[h,i] = accs %t %m
  %u[h,i,e] = dot{axes=(n)} %p %v
  %o[h,i,e] = accs %u %m
  %y[h,i,e] = div %o %l
  store O: f16[h,i,e] = %y
}"""
SPLIT_KV = """
kernel a grid(h,i,n.g) loop(n) {
  %q = load Q[h,i,d]
  %k = load K[h,d,n]
  %v = load V[h,n,e]
  %s[h,i,n] = dot{axes=(d)} %q %k
  %m[h,i] = shift{axes=(n)} %s
  %p[h,i,n] = exps %s %m
  %t[h,i] = sum{axes=(n)} %p
  %l[h,i] = accs %t %m
  %u[h,i,e] = dot{axes=(n)} %p %v
  %o[h,i,e] = accs %u %m
  %f[h,i] = last %m
  store P: f32[h,i,e,n.g] = %o
  store L: f32[h,i,n.g] = %l
  store M: f32[n.g,h,i] = %f
}
kernel b grid(h,i) {
  %o = load P[h,i,e,n.g]
  %l = load L[h,i,n.g]
  %m = load M[n.g,h,i]
  %c[h,i] = shift{axes=(n.g)} %m
  %p[h,i,e,n.g] = rescale %o %m %c
  %r[h,i,n.g] = rescale %l %m %c
  %u[h,i,e] = sum{axes=(n.g)} %p
  %t[h,i] = sum{axes=(n.g)} %r
  %y[h,i,e] = div %u %t
  store O: f16[h,i,e] = %y
}"""

ATTENTION = Program(
    "attention",
    "extents d=3 e=2 h=3 i=3 n=7\ninput Q: f16[h,i,d]\ninput K: f16[h,d,n]\ninput V: f16[h,n,e]",
    SAFE_SOFTMAX,
    {
        "online": ONLINE,
        "split keys": SPLIT_KV,
        "whole rows": ONLINE.replace("loop(n) ", "")
        .replace("accs %t %m", "affine %t")
        .replace("accs %u %m", "affine %u"),
        "unsafe": ONLINE.replace("exps %s %m", "exp %s")
        .replace("accs %t %m", "acc %t")
        .replace("accs %u %m", "acc %u"),
        "normalised partials": ONLINE.replace(
            "%y[h,i,e] = div %o %l", "%r[h,i] = pow{exponent=-1} %l\n%y[h,i,e] = mul %r %o"
        ),
    },
    "O",
    attention,
)

QKNORM = Program(
    "qknorm",
    ATTENTION.head,
    """
    library a: f32[h,i,d] = mul Q[h,i,d] Q[h,i,d]
    library b: f32[h,i] = sum{axes=(d)} a[h,i,d]
    library c: f32[h,i] = pow{exponent=-1/2, offset=1/1000, scale=1/3} b[h,i]
    library q: f32[h,i,d] = mul Q[h,i,d] c[h,i]
    library f: f32[h,n,e] = mul V[h,n,e] V[h,n,e]
    library g: f32[h,n] = sum{axes=(e)} f[h,n,e]
    library j: f32[h,n] = pow{exponent=-1/2, offset=1/1000, scale=1/2} g[h,n]
    library v: f32[h,n,e] = mul V[h,n,e] j[h,n]
    """
    + SAFE_SOFTMAX.replace("Q[", "q[").replace("V[", "v["),
    {
        "online": """
        kernel a grid(h,i) loop(n) {
          %q = load Q[h,i,d]
          %k = load K[h,d,n]
          %v = load V[h,n,e]
          %a[h,i] = dot{axes=(d)} %q %q
          %b[h,i] = pow{exponent=-1/2, offset=1/1000, scale=1/3} %a
          %c[h,i,n] = dot{axes=(d)} %q %k
          %s[h,i,n] = mul %c %b
          %m[h,i] = shift{axes=(n)} %s
          %p[h,i,n] = exps %s %m
          %t[h,i] = sum{axes=(n)} %p
          %l[h,i] = accs %t %m
          %f[h,n] = dot{axes=(e)} %v %v
          %g[h,n] = pow{exponent=-1/2, offset=1/1000, scale=1/2} %f
          %w[h,i,n] = mul %p %g
          %u[h,i,e] = dot{axes=(n)} %w %v
          %o[h,i,e] = accs %u %m
          %y[h,i,e] = div %o %l
          store O: f16[h,i,e] = %y
        }""",
    },
    "O",
    lambda q, k, v: attention(rms(q), k, rms(v)),
)

CAUSAL = Program(
    "causal",
    "extents d=3 e=2 n=7\ninput Q: f32[n',d]\ninput K: f32[n,d]\ninput V: f32[n,e]",
    """
    library s: f32[n',n] = dot{axes=(d)} Q[n',d] K[n,d]
    library a: i32[n'] = iota{axis=n'}
    library b: i32[n] = iota{axis=n}
    library c: bool[n',n] = le b[n] a[n']
    library z: f32[] = const{value=-1000000000}
    library t: f32[n',n] = where c[n',n] s[n',n] z[]
    library m: f32[n'] = shift{axes=(n)} t[n',n]
    library p: f32[n',n] = exps t[n',n] m[n']
    library l: f32[n'] = sum{axes=(n)} p[n',n]
    library w: f32[n',n] = div p[n',n] l[n']
    library O: f32[n',e] = dot{axes=(n)} w[n',n] V[n,e]
    """,
    {
        "online": """
        kernel a grid(n') loop(n) {
          %q = load Q[n',d]
          %k = load K[n,d]
          %v = load V[n,e]
          %s[n',n] = dot{axes=(d)} %q %k
          %a[n'] = iota{axis=n'}
          %b[n] = iota{axis=n}
          %c[n,n'] = le %b %a
          %z[] = const{value=-1000000000}
          %x[n,n'] = where %c %s %z
          %m[n'] = shift{axes=(n)} %x
          %p[n,n'] = exps %x %m
          %t[n'] = sum{axes=(n)} %p
          %l[n'] = accs %t %m
          %u[n',e] = dot{axes=(n)} %p %v
          %o[n',e] = accs %u %m
          %y[n',e] = div %o %l
          store O: f32[n',e] = %y
        }""",
    },
    "O",
    lambda q, k, v: softmax(np.where(np.tri(len(q), dtype=bool), q @ k.T, -1e9)) @ v,
)

# the mask is minus infinity, so steps of the loop in which everything is masked may be left out
CAUSAL_BOUNDS = Program(
    "causal_span",
    CAUSAL.head,
    CAUSAL.reference.replace("library z: f32[] = const{value=-1000000000}\n", "")
    .replace("where c[n',n] s[n',n] z[]", "mask c[n',n] s[n',n]"),
    {
        "online": CAUSAL.candidates["online"]
        .replace("loop(n)", "loop(n in ..n'+0)")
        .replace("%z[] = const{value=-1000000000}\n", "")
        .replace("where %c %s %z", "mask %c %s"),
    },
    "O",
    lambda q, k, v: softmax(np.where(np.tri(len(q), dtype=bool), q @ k.T, -np.inf)) @ v,
)  # fmt: skip
PARTIALS = """
          store P: f32[n.g,n',e] = %o
          store L: f32[n.g,n'] = %l
          store M: f32[n.g,n'] = %f
        }
        kernel b grid(n') {
          %o = load P[n.g,n',e]
          %l = load L[n.g,n']
          %m = load M[n.g,n']
          %c[n'] = shift{axes=(n.g)} %m
          %p[n.g,n',e] = rescale %o %m %c
          %r[n.g,n'] = rescale %l %m %c
          %u[n',e] = sum{axes=(n.g)} %p
          %t[n'] = sum{axes=(n.g)} %r
          %y[n',e] = div %u %t
          store O: f32[n',e] = %y
        }"""
CAUSAL_BOUNDS.candidates["split keys"] = (
    CAUSAL_BOUNDS.candidates["online"]
    .replace("grid(n')", "grid(n',n.g)")
    .replace("%y[n',e] = div %o %l", "%f[n'] = last %m")
    .replace("store O: f32[n',e] = %y\n        }", PARTIALS.strip())
)

WINDOW = Program(
    "window",
    CAUSAL.head,
    CAUSAL_BOUNDS.reference.replace(
        "library c: bool[n',n] = le b[n] a[n']",
        """library f: i32[n] = affine{offset=3} b[n]
        library g: bool[n',n] = le b[n] a[n']
        library j: bool[n',n] = lt a[n'] f[n]
        library c: bool[n',n] = and g[n',n] j[n',n]""",
    ),
    {
        name: text.replace("in ..n'+0", "in n'-2..n'+0").replace(
            "%c[n,n'] = le %b %a",
            "%h[n] = affine{offset=3} %b\n%g[n,n'] = le %b %a\n%j[n,n'] = lt %a %h\n%c[n,n'] = and %g %j",
        )
        for name, text in CAUSAL_BOUNDS.candidates.items()
    },
    "O",
    lambda q, k, v: softmax(np.where(np.tri(len(q)) - np.tri(len(q), k=-3) > 0, q @ k.T, -np.inf)) @ v,
)

NTRANS = Program(
    "ntrans",
    "extents i=3 k=5\ninput H: f32[i,k]\ninput X: f32[i,k]\ninput A: f32[i,k]",
    """
    library a: f32[i,k] = mul H[i,k] H[i,k]
    library b: f32[i] = sum{axes=(k)} a[i,k]
    library c: f32[i] = pow{exponent=-1/2, offset=1/1000, scale=1/5} b[i]
    library d: f32[i,k] = mul H[i,k] c[i]
    library e: f32[i,k] = add{cb=-1} d[i,k] X[i,k]
    library f: f32[i,k] = mul A[i,k] e[i,k]
    library g: f32[i,k] = add X[i,k] f[i,k]
    library h: f32[i,k] = mul g[i,k] g[i,k]
    library l: f32[i] = sum{axes=(k)} h[i,k]
    library m: f32[i] = pow{exponent=-1/2, offset=1/1000, scale=1/5} l[i]
    library O: f32[i,k] = mul g[i,k] m[i]
    """,
    {
        "three loops": """
        kernel a grid(i) loop(k) {
          %h = load H[i,k]
          %x = load X[i,k]
          %a = load A[i,k]
          %b[i] = dot{axes=(k)} %h %h
          %c[i] = acc %b
          %d[i] = pow{exponent=-1/2, offset=1/1000, scale=1/5} %c
          %e[i,k] = mul %a %h
          %f[i,k] = mul %e %d
          %g[i,k] = affine{offset=1, scale=-1} %a
          %j[i,k] = mul %g %x
          %l[i,k] = add %f %j
          %m[i] = dot{axes=(k)} %l %l
          %n[i] = acc %m
          %o[i] = pow{exponent=1/2, offset=1/1000, scale=1/5} %n
          %y[i,k] = div %l %o
          store O: f32[i,k] = %y
        }""",
    },
    "O",
    lambda h, x, a: rms(x + a * (rms(h) - x)),
)

LAYER_NORM = Program(
    "layer_norm",
    "extents i=3 j=4 k=5\ninput X: f32[i,k]\ninput W: f32[k,j]",
    """
    library a: f32[i] = sum{axes=(k)} X[i,k]
    library b: f32[i,k] = add{cb=-1/5} X[i,k] a[i]
    library c: f32[i,k] = mul b[i,k] b[i,k]
    library d: f32[i] = sum{axes=(k)} c[i,k]
    library e: f32[i] = pow{exponent=-1/2, offset=1/1000, scale=1/5} d[i]
    library f: f32[i,k] = mul b[i,k] e[i]
    library O: f32[i,j] = dot{axes=(k)} f[i,k] W[k,j]
    """,
    {
        "one loop": """
        kernel a grid(i,j) loop(k) {
          %x = load X[i,k]
          %w = load W[k,j]
          %a[i] = sum{axes=(k)} %x
          %b[i] = acc %a
          %c[i] = dot{axes=(k)} %x %x
          %d[i] = acc %c
          %e[i,j] = dot{axes=(k)} %x %w
          %f[i,j] = acc %e
          %g[j] = sum{axes=(k)} %w
          %h[j] = acc %g
          %l[i] = mul %b %b
          %m[i] = add{cb=-1/5} %d %l
          %n[i] = pow{exponent=-1/2, offset=1/1000, scale=1/5} %m
          %o[i,j] = mul %b %h
          %p[i,j] = add{cb=-1/5} %f %o
          %y[i,j] = mul %p %n
          store O: f32[i,j] = %y
        }""",
    },
    "O",
    lambda x, w: layer_norm(x) @ w,
)

ROW_SOFTMAX = Program(
    "row_softmax",
    "extents i=3 n=5\ninput X: f32[i,n]",
    """
    library m: f32[i] = shift{axes=(n)} X[i,n]
    library p: f32[i,n] = exps X[i,n] m[i]
    library l: f32[i] = sum{axes=(n)} p[i,n]
    library O: f32[i,n] = div p[i,n] l[i]
    """,
    {
        "stored in the second loop": """
        kernel a grid(i) loop(n) {
          %x = load X[i,n]
          %m[i] = shift{axes=(n)} %x
          %p[i,n] = exps %x %m
          %s[i] = sum{axes=(n)} %p
          %l[i] = accs %s %m
          %f[i] = last %m
          %e[i,n] = exps %x %f
          %y[i,n] = div %e %l
          store O: f32[i,n] = %y
        }""",
    },
    "O",
    softmax,
)

MATRIX_VECTOR = Program(
    "matrix_vector",
    "extents i=4 j=2 k=6\ninput A: f32[i,k]\ninput B: f32[k,j]\ninput v: f32[j]",
    "library a: f32[i,j] = dot{axes=(k)} A[i,k] B[k,j]\nlibrary O: f32[i] = dot{axes=(j)} a[i,j] v[j]",
    {
        "associated": "library b: f32[k] = dot{axes=(j)} B[k,j] v[j]\nlibrary O: f32[i] = dot{axes=(k)} A[i,k] b[k]",
        "split": """
        kernel a grid(k.g) loop(k) {
          %a = load A[i,k]
          %b = load B[k,j]
          %v = load v[j]
          %c[k] = dot{axes=(j)} %b %v
          %d[i] = dot{axes=(k)} %a %c
          %e[i] = acc %d
          store P: f32[k.g,i] = %e
        }
        library O: f32[i] = sum{axes=(k.g)} P[k.g,i]""",
    },
    "O",
    lambda a, b, v: a @ b @ v,
)

GRAM = Program(
    "gram",
    "extents i=5 k=5\ninput X: f32[i,k]\ninput Y: f32[i,k]",
    """
    library O: f32[i,i'] = dot{axes=(k)} X[i,k] X[i',k]
    library S: f32[i,k] = add{ca=2, cb=-1} X[i,k] Y[i,k]
    """,
    {
        "loop": """
        kernel a grid(i,i') loop(k) {
          %x = load X[i,k]
          %y = load X[i',k]
          %d[i,i'] = dot{axes=(k)} %x %y
          %e[i,i'] = acc %d
          store O: f32[i,i'] = %e
        }
        kernel b grid(i,k) {
          %x = load X[i,k]
          %y = load Y[i,k]
          %e[i,k] = add{ca=-1, cb=2} %y %x
          store S: f32[i,k] = %e
        }""",
    },
    "O S",
    lambda x, y: (x @ x.T, 2 * x - y),
)

MEAN_OF_SHIFTED = Program(
    "mean_of_shifted",
    "extents i=3 k=5\ninput X: f32[i,k]\ninput C: f32[i]",
    "library a: f32[i,k] = add X[i,k] C[i]\nlibrary O: f32[i] = sum{axes=(k)} a[i,k]",
    {
        "constant outside": """
        kernel a grid(i) loop(k) {
          %x = load X[i,k]
          %c = load C[i]
          %s[i] = sum{axes=(k)} %x
          %t[i] = acc %s
          %y[i] = add{cb=5} %t %c
          store O: f32[i] = %y
        }""",
        "absent axis": """
        kernel a grid(i) loop(k) {
          %x = load X[i,k]
          %c = load C[i]
          %s[i] = sum{axes=(k)} %x
          %t[i] = acc %s
          %n[i] = sum{axes=(k)} %c
          %y[i] = add %t %n
          store O: f32[i] = %y
        }""",
    },
    "O",
    lambda x, c: x.sum(1) + x.shape[1] * c,
)

PROGRAMS = (
    RMSNORM, LORA, GATED_MLP, ATTENTION, QKNORM, CAUSAL, CAUSAL_BOUNDS, WINDOW, NTRANS, LAYER_NORM, ROW_SOFTMAX,
    MATRIX_VECTOR, GRAM, MEAN_OF_SHIFTED,
)  # fmt: skip
CANDIDATES = [(p, name) for p in PROGRAMS for name in p.candidates]
