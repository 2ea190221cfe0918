"""The floating-point gate: a candidate must be as accurate as XLA's code, against float64, on many classes of inputs.

Functions of arrays only: the caller runs the three programs. Results that are JAX arrays are compared where they lie:
to compare tens of millions of numbers takes a processor longer than all else that the gate does. Per output, ALL of
(e_x = XLA - r, e_c = candidate - r; r in float64):

1. equal shapes and dtypes; NaN where XLA has NaN, the same infinities (any of these for another where an input has
   some); but what float64 gives, rounded to the output's type, is always allowed (XLA in float16 may make NaN of an
   overflow that is none), and so is finite where only XLA is not, and should be; an infinity may stand for a number so
   close to the largest that rounding decides;
2. max |e_c| <= 2 spread max |e_x| + 2 max |(r + 0.3 - 0.3) - r|, the latter in the type of the output (FlashAttention's
   rule), or c is one of the two numbers of the output's type beside r (faithful rounding: where weights of a softmax
   are all but 0 and 1, XLA is exact, and a sum in another order may still round the other way);
3. rms(e_c) <= 1.5 spread rms(e_x) + 0.5 eps rms(r);
4. the worst row, max |e_c| / max |r| over its elements, is at most 2 spread times XLA's worst row + 4 eps: one wrong
   tile cannot hide; rows in which XLA has no digit right tell nothing, and only rule 2 holds for them;
5. bias: |mean e_c| / spread <= 2 |mean e_x| + 3 rms(e_c) / sqrt(N) + 0.5 eps rms(r) (the last term for inputs whose
   errors are all the same one);
6. |e_c| <= `ceiling`, if given: an a-priori bound, so that a bad XLA does not license a bad candidate;
7. if `exact` is set and XLA is exact, the candidate is exact: integers find wrong indices and masks that tolerances
   hide.

To what rules 2 to 5 allow comes the `noise` of the program itself (`verify.floats.noise`), if given: four times its
maximum in rule 2; in rule 4, of each error, eight times its maximum in the row, or its rms (of many thousand rows some
have little noise by chance), and a row counts as no smaller than its noise; twice its rms in rule 3; its rms in 5.

`written` are errors of the program operation by operation, each of its intermediates rounded to its type. XLA leaves
such roundings out where it makes one kernel of several operations; but the program's text asks for them, so in rules 2
to 5 e_x is the larger of both. It is so only up to `unit`, which is one in the last place of the program's narrowest
type, times the largest number of a row: a bad program licenses no worse.

Next to a number that masks a logit every error is small, in the output and in its row. But a softmax, which another
region may hold, turns that number into zero and keeps the digits of the rest. So the caller has outputs judged a second
time, without numbers beyond `MASKING`, on classes of inputs that mask.

`spread` is 1 for a kernel that keeps the program's order of evaluation, 2 for another order (whose errors are others,
not more of the same), and doubled on classes of inputs that are `DEGENERATE` (`verify.floats.input_classes`), where few
errors are distinct and statistics over many say less. For another order that includes `LOGITS`: without its
exponential, such a class is one large column among small ones. Integer and boolean outputs must equal XLA's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from mirage_jax.mugraph.dtypes import is_float
from mirage_jax.mugraph.passes.sentinels import MASKING
from mirage_jax.verify.floats.comparison import Compared, OnDevice, is_numpy, on, on_the_brink

type Array = np.ndarray


@dataclass(frozen=True)
class GateResult:
    """`ratios`: measured over allowed, per rule; at most 1 where passed."""

    passed: bool
    reasons: tuple[str, ...] = ()
    ratios: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return self.passed


def float_gate(
    reference64: Array,
    xla: Array,
    candidate: Array,
    *,
    exact: bool = False,
    kinds: bool = True,
    ceiling: Array | None = None,
    spread: float = 1.0,
    skips: bool = False,
    noise: Array | None = None,
    written: Array | None = None,
    unit: float = 0.0,
    below: float = math.inf,
    brink: float = math.inf,
) -> GateResult:
    """Is one output of the candidate as good as XLA's?

    `kinds` False: any non-finite value may stand for another (other orders of evaluation meet other infinities).
    `below`: larger numbers are left out of rules 2 to 5 and 7, and so judge no others; `MASKING` leaves logits.
    `brink`: beyond this size of XLA's numbers the candidate's may be infinite or NaN.
    `skips`: a finite value may stand for NaN (a loop that ends early leaves out zeros of a mask times infinities, which
    would be NaN).
    """
    if (early := _without_errors(reference64, xla, candidate)) is not None:
        return early
    there = OnDevice(reference64, xla, candidate, noise, written, unit, below, brink)
    compared = there.on_host() if is_numpy(xla) or ceiling is not None or exact else there
    if strange := compared.strange(kinds, skips):
        return GateResult(False, (strange,))
    limits = _limits(compared, spread)
    if limits is None:
        return GateResult(True)
    if ceiling is not None:
        limits["ceiling"] = (compared.over(ceiling), 1.0)
    if exact and not replace(compared, written=None).totals.ex.largest:
        limits["exact"] = (compared.totals.ec.largest, 0.0)
    reasons = tuple(
        f"{name}: {have:.3g}, allowed {most:.3g}" for name, (have, most) in limits.items() if not have <= most
    )
    return GateResult(not reasons, reasons, tuple((name, _ratio(*limit)) for name, limit in limits.items()))


def has_masks(reference64: Array) -> bool:
    """Is any number of an output beyond `MASKING`? If not, leaving such numbers out changes nothing."""
    return bool(on(reference64, _any_masks)(reference64))


def _any_masks(xp: Any, r: Array) -> Array:
    return (xp.abs(r) >= MASKING).any()


def _without_errors(reference64: Array, xla: Array, candidate: Array) -> GateResult | None:
    """The result where no rounding is to be judged: other types or shapes, integers, no elements. Else None."""
    if xla.shape != candidate.shape or xla.dtype != candidate.dtype or reference64.shape != xla.shape:
        return GateResult(False, (f"{candidate.dtype}{candidate.shape} instead of {xla.dtype}{xla.shape}",))
    if not is_float(xla.dtype):
        same = np.array_equal(xla, candidate)
        return GateResult(same, () if same else (f"{int((xla != candidate).sum())} elements differ from XLA's",))
    return GateResult(True) if xla.size == 0 else None


def _ratio(have: float, most: float) -> float:
    """An error over its limit, which may be zero."""
    if most:
        return have / most
    return np.inf if have else 0.0


LATE = 2.0**64  # numbers of float32 and bfloat16 beyond are near the end of the range: another order may overflow there
ROUNDING = {
    2: 0.1,
    4: 1e-2,
    8: 1e-6,
}  # rms error over rms value that XLA may have on ordinary inputs, by bytes of the narrowest type
LEAST_NORMAL = float(np.finfo(np.float32).smallest_normal)  # numbers below it lose digits, or are flushed to zero
NOISES = 10.0  # times the noise of rounding, which XLA may be off by besides; a wrong rule is off by the values


def misread(reference64: Array, xla: Array, narrowest: int, noise: Array | None = None, rows: bool = True) -> str:
    """Does float64, which evaluates the program *as it was translated*, differ from XLA by more than rounding can
    explain?

    The certificate compares a candidate with the translated program, so the translation itself has to be compared
    with the user's own equations: a wrong rule gives errors of the order of the values. `narrowest`: bytes of the
    narrowest float; `noise`: how far rounding may carry each element, for results whose terms cancel; `rows`: whether
    each row is compared, or all of them together. Returns what was found, or "". Meant for ordinary inputs, where
    rounding stays small.
    """
    if not is_float(xla.dtype):
        return ""
    seen = on(xla, _misreading)(reference64, xla, np.zeros(()) if noise is None else noise)
    beyond, some, size, error, moved = (seen[name].item() for name in ("beyond", "some", "size", "error", "moved"))
    if beyond:  # nothing is in the range of XLA's types and not in that of float64
        r, x = (np.asarray(a, np.float64) for a in (reference64, xla))
        at = tuple(int(i) for i in np.argwhere(np.isfinite(x) & ~np.isfinite(r))[0])
        return f"the translated program gives {r[at]} instead of {x[at]} at {at}"
    if not some:
        return ""
    most = ROUNDING[narrowest]
    if error > most * size + NOISES * moved + LEAST_NORMAL:
        return f"the translated program differs from the user's by {error:.2g}, the values being of size {size:.2g}"
    if not rows:
        return ""
    sizes, errors, noises = (np.asarray(seen[name]) for name in ("sizes", "errors", "noises"))
    if (wrong := np.flatnonzero(errors > most * (sizes + size) + NOISES * noises + LEAST_NORMAL)).size:
        return (
            f"the translated program differs from the user's by {errors[wrong[0]]:.2g} in row {wrong[0]}, the values"
            f" there being of size {sizes[wrong[0]]:.2g}, all of size {size:.2g}"
        )
    return ""


def _misreading(xp: Any, r: Array, x: Array, noise: Array) -> dict[str, Array]:
    """Sizes, errors and noise of what is finite, root mean squares over all and over each row: a rule may be wrong for
    a few elements, the last row of a mask, say.
    """
    r, x = r.astype(xp.float64), x.astype(xp.float64)
    good = xp.isfinite(r) & xp.isfinite(x)
    count, rows = xp.maximum(good.sum(), 1), (-1, r.shape[-1] if r.ndim > 1 else 1)
    off = xp.where(good, x, 0.0) - xp.where(good, r, 0.0)
    squares = [xp.square(xp.where(good & xp.isfinite(a), a, 0.0)) for a in (r, off, noise)]
    size, error, moved = (xp.sqrt(a.sum() / count) for a in squares)
    sizes, errors, noises = (xp.sqrt(xp.mean(a.reshape(rows), axis=1)) for a in squares)
    found = {"beyond": (xp.isfinite(x) & ~good).any(), "some": good.any(), "size": size, "error": error, "moved": moved}
    return {**found, "sizes": sizes, "errors": errors, "noises": noises}


def shorter_range(x: Any, c: Any) -> bool:
    """Is c not finite anywhere where x is, and not on the brink either?"""
    return is_float(x.dtype) and bool(on(x, _shorter)(x, c))


def _shorter(xp: Any, x: Array, c: Array) -> Array:
    lost = xp.isfinite(x) & ~xp.isfinite(c)
    return (lost & ~on_the_brink(x.astype(xp.float64), c.astype(xp.float64), x.dtype, xp)).any()


def _limits(compared: Compared, spread: float) -> dict[str, tuple[float, float]] | None:
    """Rules 2 to 5: measured and allowed. None if nothing is finite."""
    totals = compared.totals
    if not (n := totals.n):
        return None
    eps = float(ml_dtypes.finfo(compared.xla.dtype).eps)
    own_rms, size = totals.noise.rms(n), totals.r.rms(n)
    most = 2 * spread * totals.ex.largest + 2 * totals.floor + 4 * totals.noise.largest
    unfaithful, worst_xla, worst = compared.worst(most, own_rms, eps)
    rms = totals.ec.rms(n)
    bias = 2 * abs(totals.ex.sum) / n + 3 * rms / n**0.5 + 0.5 * eps * size + own_rms
    return {
        "max error": (unfaithful, most),
        "rms error": (rms, 1.5 * spread * totals.ex.rms(n) + 0.5 * eps * size + 2 * own_rms),
        "worst row": (worst, 2 * spread * worst_xla + 4 * eps),
        "bias": (abs(totals.ec.sum) / n / spread, bias),
    }
