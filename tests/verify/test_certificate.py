"""The verifier accepts what is right and refuses what is wrong; what it refuses is the test of it."""

# ruff: noqa: E501 (tables with one case per line)

import dataclasses
import math

import numpy as np
import pytest
from mugraph.graphs import (
    ATTENTION,
    CANDIDATES,
    CAUSAL,
    GATED_MLP,
    GRAM,
    LAYER_NORM,
    LORA,
    MATRIX_VECTOR,
    MEAN_OF_SHIFTED,
    NTRANS,
    QKNORM,
    RMSNORM,
    ROW_SOFTMAX,
    Program,
    schedule,
)

from mirage_jax.errors import VerificationError
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.verify.equivalence import certificate
from mirage_jax.verify.equivalence.certificate import Certificate, certify, fingerprint, recheck, reduced, replay


@pytest.mark.parametrize("program,name", CANDIDATES, ids=lambda x: getattr(x, "name", x))
def test_accepts(program: Program, name: str) -> None:
    reference, candidate = program.graph(program.reference), program.graph(program.candidates[name])
    assert fingerprint(reference, candidate)
    proof = certify(reference, candidate)
    assert proof.bound <= 1e-12
    assert Certificate.from_json(proof.to_json()) == proof
    replay(proof, reference, candidate)


def test_what_nothing_reads_is_no_matter() -> None:
    """A maximum over the loop that no accumulator needs: loops leave it out, straight-line code does not."""
    reference = parse(
        """
        mugraph {
          extents i=16 k=64
          input X: f32[i,k]
          library t: f32[i] = sum{axes=(k)} X[i,k]
          output t
        }
        """
    )
    candidate = parse(
        """
        mugraph {
          extents i=16 k=64
          input X: f32[i,k]
          kernel a grid(i) loop(k) {
            %x = load X[i,k]
            %m[i] = max{axes=(k)} %x
            %p[i] = sum{axes=(k)} %x
            %s[i] = acc %p
            store t: f32[i] = %s
          }
          output t
        }
        """
    )
    assert certify(reference, candidate).bound <= 1e-12


# program, candidate, text -> wrong text. The number is that of VERIFICATION's table of mutations.
WRONG = [
    ("M1 swapped operands of div", ATTENTION, "online", {"div %o %l": "div %l %o"}),
    ("M2 swapped inputs", GATED_MLP, "one kernel", {"load V[k,j]": "load W[k,j]", "load W[k,j]": "load V[k,j]"}),
    ("M4 dropped the first norm", NTRANS, "three loops", {"mul %e %d": "affine %e"}),
    ("M4 dropped the square", RMSNORM, "two loops", {"mul %x %x": "affine %x"}),
    ("M6 add for sub", NTRANS, "three loops", {"affine{offset=1, scale=-1} %a": "affine{offset=1} %a"}),
    ("M7 mul for div", RMSNORM, "division by the root", {"div %d %r": "mul %d %r"}),
    ("M8 sum for max", ROW_SOFTMAX, "stored in the second loop", {"%f[i] = last %m": "%f[i] = acc %s"}),
    ("M9 exponential dropped", ROW_SOFTMAX, "stored in the second loop", {"exps %x %f": "add{cb=-1} %x %f"}),
    ("M10 other activation", GATED_MLP, "one kernel", {"logistic": "tanh"}),
    ("M11 eps", RMSNORM, "two loops", {"offset=1/1000": "offset=1/1001"}),
    ("M11 scale", RMSNORM, "two loops", {"scale=1/7": "scale=1/8"}),
    ("M11 scale of logits", ATTENTION, "online", {"exps %s": "exps{scale=1/2} %s"}),
    ("M12 constant * (1 + 2^-10)", RMSNORM, "two loops", {"scale=1/7": "scale=1025/7168"}),
    ("M13 sum over the wrong axis", QKNORM, "online", {"[h,n] = dot{axes=(e)} %v %v": "[h,n] = dot{axes=(d)} %k %k"}),
    ("M14 sum before the square", RMSNORM, "two loops", {"%q[i,k] = mul %x %x": "%q0[i] = sum{axes=(k)} %x\n%q[i] = mul %q0 %q0", "sum{axes=(k)} %q": "affine %q"}),
    ("M15 sqrt for rsqrt", RMSNORM, "two loops", {"exponent=-1/2": "exponent=1/2"}),
    ("M16 mean missing", LAYER_NORM, "one loop", {"%p[i,j] = add{cb=-1/5} %f %o": "%p[i,j] = add{cb=0} %f %o"}),
    ("M16 n - 1", LAYER_NORM, "one loop", {"scale=1/5": "scale=1/4"}),
    ("M16 sum for mean", RMSNORM, "split k", {"scale=1/7": "scale=1"}),
    ("M17 transposed operand", GRAM, "loop", {"%x = load X[i,k]\n          %y": "%x = load X[k,i]\n          %y"}),
    ("M19 normalised by column", ROW_SOFTMAX, "stored in the second loop", None),
    ("M20 eps outside of the root", RMSNORM, "division by the root", {"exponent=1/2, offset=1/1000, scale=1/7} %s": "exponent=1/2, scale=1/7} %s\n%ro[i] = affine{offset=1/1000} %r", "div %d %r": "div %d %ro"}),
    ("M21 mask ignored", CAUSAL, "online", {"where %c %s %z": "where %c %s %s"}),
    ("M21 mask dropped", CAUSAL, "online", {"%x[n,n'] = where %c %s %z": "%x[n,n'] = affine %s"}),
    ("M22 causal off by one", CAUSAL, "online", {"le %b %a": "lt %b %a"}),
    ("M22 mask transposed", CAUSAL, "online", {"le %b %a": "le %a %b"}),
    ("M22 mask relative to the tile", CAUSAL, "online", {"iota{axis=n'}": "affine{scale=0} %a0", "%a[n']": "%a0[n'] = iota{axis=n'}\n%a[n']"}),
    ("M23 residual twice", NTRANS, "three loops", {"add %f %j": "add{cb=2} %f %j"}),
    ("M25 ratio of sums", RMSNORM, "two loops", {"%d[i,j] = dot{axes=(k)} %n %w": "%n1[i] = sum{axes=(k)} %n\n%w1[j] = sum{axes=(k)} %w\n%d[i,j] = mul %n1 %w1"}),
    ("M26 exp(a+b) for exp(a)+exp(b)", ATTENTION, "whole rows", {"%t[h,i] = sum{axes=(n)} %p": "%s2[h,i] = sum{axes=(n)} %s\n%t[h,i] = exps %s2 %m"}),
    ("M27 rank one", RMSNORM, "two loops", {"%d[i,j] = dot{axes=(k)} %n %w": "%w1[j] = sum{axes=(k)} %w\n%n1[i] = sum{axes=(k)} %n\n%d[i,j] = mul{} %n1 %w1"}),
    ("distribution over a nonlinearity (M24)", GATED_MLP, "one kernel", {"%e[i,j] = logistic %c": "%e0[i,j] = logistic %a\n%e[i,j] = acc %e0"}),
    ("constant times the wrong extent", MEAN_OF_SHIFTED, "constant outside", {"cb=5": "cb=3"}),
    ("wrong coefficient", GRAM, "loop", {"ca=-1, cb=2": "ca=2, cb=-1"}),
    ("low rank part twice", LORA, "one kernel", {"add %e %h": "add{cb=2} %e %h"}),
    ("S2 parts not summed", MATRIX_VECTOR, "split", {"sum{axes=(k.g)} P[k.g,i]": "max{axes=(k.g)} P[k.g,i]"}),
    ("S3 skipped steps", ATTENTION, "online", {"%l[h,i] = accs %t %m": "%l[h,i] = last %t"}),
    ("S3 last step only", RMSNORM, "two loops", {"acc %d": "last %d"}),
    ("S4 steps counted twice", RMSNORM, "two loops", {"acc %d": "acc %d2", "%e[i,j]": "%d2[i,j] = add %d %d\n%e[i,j]"}),
    ("S5 accumulator starts at 1", RMSNORM, "two loops", {"%r[i] = pow{exponent=-1/2, offset=1/1000, scale=1/7} %t": "%t1[i] = affine{offset=1} %t\n%r[i] = pow{exponent=-1/2, offset=1/1000, scale=1/7} %t1"}),
    ("S6 sum not rescaled", ATTENTION, "online", {"%l[h,i] = accs %t %m": "%l[h,i] = acc %t"}),
    ("S6 output not rescaled", ATTENTION, "online", {"%o[h,i,e] = accs %u %m": "%o[h,i,e] = acc %u"}),
    ("S6 wrong degree", ATTENTION, "online", {"%o[h,i,e] = accs %u": "%o[h,i,e] = accs{degree=2} %u"}),
    ("S6 combine without rescale", ATTENTION, "split keys", {"rescale %l %m %c": "affine %l"}),
    ("S6 combine rescales the wrong way", ATTENTION, "split keys", {"rescale %o %m %c": "rescale %o %c %m"}),
    ("S7 max of a tile stored", ATTENTION, "split keys", {"%f[h,i] = last %m": "%f[h,i] = acc %m"}),
    ("S7 running shift used for the result", ROW_SOFTMAX, "stored in the second loop", {"%f[i] = last %m": "%f[i] = affine %l"}),
    ("S8 tile's sum hoisted", RMSNORM, "scale after the loop", {"%t[i] = acc %s": "%t[i] = last %s"}),
    ("swapped stores", ATTENTION, "split keys", {"store L: f32[h,i,n.g] = %l": "store L: f32[h,i,n.g] = %f", "store M: f32[n.g,h,i] = %f": "store M: f32[n.g,h,i] = %l"}),
]  # fmt: skip


def mutant(program: Program, name: str, changes: dict[str, str] | None) -> KernelGraph:
    text = program.candidates[name]
    if changes is None:  # M19
        text = """
        kernel a grid(n) {
          %x = load X[i,n]
          %m[n] = shift{axes=(i)} %x
          %p[i,n] = exps %x %m
          %l[n] = sum{axes=(i)} %p
          %y[i,n] = div %p %l
          store O: f32[i,n] = %y
        }"""
    for i, (old, new) in enumerate((changes or {}).items()):
        assert old in text, old
        text = text.replace(old, f"<{i}>", 1) if len(changes or {}) > 1 else text.replace(old, new)
    for i, new in enumerate((changes or {}).values()):
        text = text.replace(f"<{i}>", new)
    return program.graph(text)


@pytest.mark.parametrize("what,program,name,changes", WRONG, ids=[w[0] for w in WRONG])
def test_refuses(what: str, program: Program, name: str, changes: dict[str, str] | None) -> None:
    reference, candidate = program.graph(program.reference), mutant(program, name, changes)
    xs = program.inputs()
    want = run(reference, xs)
    with np.errstate(invalid="ignore"):
        have = run(candidate, xs, schedule(candidate))
    gap = max(float(np.max(np.abs(x - y))) for x, y in zip(want, have, strict=True))
    assert not gap < 1e-6, "not a mutant: it computes the same"
    assert not fingerprint(reference, candidate)
    with pytest.raises(VerificationError, match=r"differs in \d+ of"):
        certify(reference, candidate)


# --- well-formed is checked first


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("store O: f16", "store O: f32", "outputs differ"),
        ("store O: f16[h,i,e]", "store O: f16[i,h,e]", "outputs differ"),
        ("load Q[h,i,d]", "load Q[i,h,n]", "loads Q"),
        ("%l[h,i] = accs %t %m", "%l[h,i] = affine %t", "needs an accumulator"),
        ("grid(h,i)", "grid(h)", None),
    ],
)
def test_interface(old: str, new: str, message: str | None) -> None:
    reference, text = ATTENTION.graph(ATTENTION.reference), ATTENTION.candidates["online"]
    candidate = ATTENTION.graph(text.replace(old, new))
    if message is None:
        certify(reference, candidate)
        return
    assert not fingerprint(reference, candidate)
    with pytest.raises(VerificationError, match=message):
        certify(reference, candidate)


def test_outputs_in_order() -> None:
    reference = GRAM.graph(GRAM.reference)
    swapped = dataclasses.replace(GRAM.graph(GRAM.candidates["loop"]), outputs=("S", "O"))
    with pytest.raises(VerificationError, match="outputs differ"):
        certify(reference, swapped)
    twice = dataclasses.replace(MATRIX_VECTOR.graph(MATRIX_VECTOR.reference), outputs=("O", "O"))
    certify(twice, twice)


def test_inputs_and_extents_must_match() -> None:
    reference = RMSNORM.graph(RMSNORM.reference)
    candidate = RMSNORM.graph(RMSNORM.candidates["two loops"])
    with pytest.raises(VerificationError, match="inputs differ"):
        certify(reference, dataclasses.replace(candidate, inputs=candidate.inputs[::-1]))
    with pytest.raises(VerificationError, match="extent 7, in the candidate 8"):
        certify(reference, candidate.with_extents({**candidate.sizes, "k": 8}))


# --- square roots


SQUARES = Program(
    "squares",
    "extents i=1 k=5\ninput X: f32[i,k]\ninput Y: f32[i,k]",
    """
    library a: f32[i] = dot{axes=(k)} X[i,k] X[i,k]
    library r: f32[i] = pow{exponent=-1/2, offset=1/1000} a[i]
    library x: f32[i,k] = mul X[i,k] r[i]
    library y: f32[i,k] = mul Y[i,k] r[i]
    library O: f32[i,k] = mul x[i,k] y[i,k]
    """,
    {
        "division": """
        library a: f32[i] = dot{axes=(k)} X[i,k] X[i,k]
        library b: f32[i] = affine{offset=1/1000} a[i]
        library c: f32[i,k] = mul X[i,k] Y[i,k]
        library O: f32[i,k] = div c[i,k] b[i]""",
    },
    "O",
    lambda x, y: x * y / ((x * x).sum(-1, keepdims=True) + 1e-3),
)


def test_square_of_a_root() -> None:
    """sqrt(x)**2 == x is seen, at the price of more draws, for signs of roots are arbitrary."""
    reference, candidate = SQUARES.graph(SQUARES.reference), SQUARES.graph(SQUARES.candidates["division"])
    assert fingerprint(reference, candidate)
    proof = certify(reference, candidate)
    assert proof.algebraic == ("power 1/2",)
    assert proof.bound <= 1e-12
    assert len(proof.seeds) == 40
    replay(proof, reference, candidate)
    assert not certify(reference, reference).algebraic
    with pytest.raises(VerificationError):
        certify(reference, SQUARES.graph(SQUARES.candidates["division"].replace("1/1000", "1/1001")))


def test_logistic_by_its_formula() -> None:
    """logistic x is 1 / (1 + exp(-x)), which is assumed only where it is needed."""
    reference = GATED_MLP.graph(GATED_MLP.reference)
    formula = "library e: f32[i,j] = exp{scale=-1} a[i,j]\nlibrary c: f32[i,j] = pow{exponent=-1, offset=1} e[i,j]"
    apart = GATED_MLP.reference.replace("library c: f32[i,j] = logistic a[i,j]", formula)
    candidate = GATED_MLP.graph(apart)
    assert fingerprint(reference, candidate)
    proof = certify(reference, candidate)
    assert proof.algebraic == ("logistic",)
    replay(proof, reference, candidate)
    assert certify(reference, reference).algebraic == ()
    for wrong in (apart.replace("scale=-1", "scale=1"), apart.replace("offset=1", "offset=2")):
        assert not fingerprint(reference, GATED_MLP.graph(wrong))
        with pytest.raises(VerificationError):
            certify(reference, GATED_MLP.graph(wrong))


def test_no_roots_of_what_has_none() -> None:
    """x = sqrt(x) sqrt(x) where x is not negative, and what has no root is in no certificate."""
    head = "extents i=3\ninput X: f32[i]"
    twice = "library a: f32[i] = pow{exponent=1/2} X[i]\nlibrary O: f32[i] = mul a[i] a[i]"
    plain = "library O: f32[i] = affine X[i]"
    program = Program("root", head, twice, {"plain": plain}, "O", abs)
    certify(program.graph(twice), program.graph(plain))
    with pytest.raises(VerificationError, match="takes roots"):
        certify(program.graph(plain), program.graph(twice))
    assert not fingerprint(program.graph(plain), program.graph(twice))


@pytest.mark.parametrize("seed", range(5))
def test_root_of_a_square(seed: int) -> None:
    """|x| is not x, though a single element passes one draw in two."""
    head = "extents i=1\ninput X: f32[i]"
    root = Program(
        "root", head, "library a: f32[i] = mul X[i] X[i]\nlibrary O: f32[i] = pow{exponent=1/2} a[i]", {}, "O", abs
    )
    graphs = root.graph(root.reference), root.graph("library O: f32[i] = affine X[i]")
    with pytest.raises(VerificationError, match="differs"):
        certify(*graphs)
    rng = np.random.default_rng(seed)
    assert any(fingerprint(*graphs, entropy=rng.bytes) for _ in range(30))


# --- what the certificate says


def test_real_extents_count() -> None:
    """1/4096 is right for an axis of 4096 elements though only a few are tested, and wrong for one of 4095."""
    reference, candidate = (
        RMSNORM.graph(t.replace("1/7", "1/4096")) for t in (RMSNORM.reference, RMSNORM.candidates["split k"])
    )
    certify(*(g.with_extents({"i": 16, "j": 6144, "k": 4096}) for g in (reference, candidate)))
    layer = [
        LAYER_NORM.graph(t.replace("1/5", "1/4096")) for t in (LAYER_NORM.reference, LAYER_NORM.candidates["one loop"])
    ]
    certify(*(g.with_extents({"i": 16, "j": 6144, "k": 4096}) for g in layer))
    with pytest.raises(VerificationError):
        certify(*(g.with_extents({"i": 16, "j": 6144, "k": 4095}) for g in layer))


def test_free_shift_in_the_result() -> None:
    """A program whose result depends on a shift has no meaning: it does not even equal itself."""
    text = "kernel a grid(i) {\n%x = load X[i,n]\n%m[i] = shift{axes=(n)} %x\n%y[i,n] = exps %x %m\nstore O: f32[i,n] = %y\n}"
    graph = ROW_SOFTMAX.graph(text)
    with pytest.raises(VerificationError, match="differs"):
        certify(graph, graph)


def test_divides_by_zero() -> None:
    text = "library a: f32[i,n] = add{cb=-1} X[i,n] X[i,n]\nlibrary O: f32[i,n] = div X[i,n] a[i,n]"
    graph = ROW_SOFTMAX.graph(text)
    with pytest.raises(VerificationError, match="divides by zero"):
        certify(graph, graph)
    assert not fingerprint(graph, graph)


def test_bounds_beyond_floats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a softmax at hashed logits has up to 2^1024 exponentials and more: 2.0**1024 is no float."""
    graph = ROW_SOFTMAX.graph(ROW_SOFTMAX.reference)
    monkeypatch.setattr(certificate, "error_bound", lambda difference, p_bits, q_bits: 2000.0)
    with pytest.raises(VerificationError, match="error bound misses"):
        certify(graph, graph)


def test_sums_of_many_fractions() -> None:
    """27 denominators of three exponentials each, cubed, and as many logistics: that takes larger primes."""
    text = """
mugraph {
  extents a=64 b=64 c=64 l=64
  input x: f32[l,a,c,b]
  input y: f32[l,a,c]
  library e: f32[l,a,c,b] = exp x[l,a,c,b]
  library s: f32[l,a,c] = sum{axes=(b)} e[l,a,c,b]
  library p: f32[l,a,c,b] = div e[l,a,c,b] s[l,a,c]
  library r: f32[l,a,c,b] = div p[l,a,c,b] s[l,a,c]
  library f: f32[l,a,c] = logistic y[l,a,c]
  library g: f32[l,a,c] = div f[l,a,c] s[l,a,c]
  library t: f32[b] = dot{axes=(a,c,l)} r[l,a,c,b] g[l,a,c]
  output t
}"""
    graph = parse(text)
    assert certify(graph, graph).q_bits > 253


def test_reduced_extents_are_ragged() -> None:
    reference, candidate = (ATTENTION.graph(t) for t in (ATTENTION.reference, ATTENTION.candidates["split keys"]))
    sizes = {"h": 16, "i": 64, "d": 128, "e": 128, "n": 4096}
    extents, tiles = reduced(*(g.with_extents(sizes) for g in (reference, candidate)))
    assert extents == {"h": 3, "i": 3, "d": 3, "e": 3, "n": 7}
    assert dict(tiles.kernels[0].tiles) == {"h": 2, "i": 2, "n": 2}
    assert dict(tiles.parts) == {"n": 2}
    small, _ = reduced(*(g.with_extents({**sizes, "h": 1, "n": 16}) for g in (reference, candidate)))
    assert small["h"] == 1
    assert small["n"] == small["h"] * 7


@pytest.mark.parametrize("n", [2, 4, 5])
def test_short_axes_have_tiles_of_several_elements(n: int) -> None:
    """exp(sum s) for sum(exp s) within a tile is wrong, however short the axis; with tiles of one it would be right."""
    reference = ATTENTION.graph(ATTENTION.reference)
    sizes = {**reference.sizes, "n": n}
    right, wrong = (
        ATTENTION.graph(ATTENTION.candidates["split keys"].replace(*change)).with_extents(sizes)
        for change in (("", ""), ("%t[h,i] = sum{axes=(n)} %p", "%t0[h,i] = sum{axes=(n)} %s\n%t[h,i] = exps %t0 %m"))
    )
    assert certify(reference.with_extents(sizes), right).bound <= 1e-12
    assert not fingerprint(reference.with_extents(sizes), wrong)


def test_fresh_randomness() -> None:
    reference, candidate = (RMSNORM.graph(t) for t in (RMSNORM.reference, RMSNORM.candidates["split k"]))
    one, two = certify(reference, candidate), certify(reference, candidate)
    assert not set(one.seeds) & set(two.seeds)
    assert not {p for p, _ in one.primes} & {p for p, _ in two.primes}
    fixed = [certify(reference, candidate, entropy=lambda n: b"7" * n) for _ in range(2)]
    assert fixed[0] == fixed[1]


def test_target(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, candidate = (ATTENTION.graph(t) for t in (ATTENTION.reference, ATTENTION.candidates["split keys"]))
    strict = certify(reference, candidate, target=1e-60)
    assert strict.bound <= 1e-60
    assert len(strict.seeds) > len(certify(reference, candidate).seeds)
    monkeypatch.setattr(certificate, "MAX_DRAWS", 2)
    with pytest.raises(VerificationError, match="misses 1e-300"):
        certify(reference, candidate, target=1e-300)


def test_recheck() -> None:
    reference, candidate = (ATTENTION.graph(t) for t in (ATTENTION.reference, ATTENTION.candidates["online"]))
    proof = certify(reference, candidate)
    recheck(proof, reference, candidate)
    with pytest.raises(VerificationError, match="another candidate"):
        recheck(proof, reference, ATTENTION.graph(ATTENTION.candidates["unsafe"]))
    with pytest.raises(VerificationError, match="claims"):
        recheck(dataclasses.replace(proof, bound=1e-200), reference, candidate)
    with pytest.raises(VerificationError, match="other primes"):
        replay(dataclasses.replace(proof, primes=proof.primes[::-1]), reference, candidate)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": 99}', '{"version": 1}'])
def test_broken_json(text: str) -> None:
    with pytest.raises(VerificationError):
        Certificate.from_json(text)


def test_str() -> None:
    reference, candidate = (GATED_MLP.graph(t) for t in (GATED_MLP.reference, GATED_MLP.candidates["one kernel"]))
    proof = certify(reference, candidate)
    assert "wrong with probability <=" in str(proof)
    assert proof.hashed == 3 * 9  # the reference, the candidate as straight-line code and tile by tile
    assert math.isclose(proof.bound, 2 ** (proof.log2_per_draw * len(proof.seeds)))


INDICES = {
    "a sum of indices": ("s: f32[] = sum{axes=(n)} i[n]", "o: f32[n] = mul x[n] s[]", "o: f32[n] = affine{scale=128} x[n]"),
    "a cube of small indices": (
        "c: f32[n] = pow{exponent=3} i[n]",
        "o: f32[n] = mul x[n] c[n]",
        "q: f32[n] = mul i[n] i[n]\nlibrary t: f32[n] = add{ca=3, cb=-2} q[n] i[n]\nlibrary o: f32[n] = mul x[n] t[n]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INDICES)
def test_indices_are_not_those_of_reduced_axes(name: str) -> None:
    """Of 0, 1 and 2 is true what is not true of 0 to 127."""
    known, right, wrong = INDICES[name]
    head = f"mugraph {{\nextents n=128\ninput x: f32[n]\nlibrary i: f32[n] = iota{{axis=n}}\nlibrary {known}\nlibrary "
    reference = parse(f"{head}{right}\noutput o\n}}")
    assert certify(reference, reference).bound < 1e-12
    with pytest.raises(VerificationError):
        certify(reference, parse(f"{head}{wrong}\noutput o\n}}"))
