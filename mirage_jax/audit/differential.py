"""Run one program through the whole optimizer and compare it with float64.

Everything that makes results right is the real thing: capture, regions, search, fingerprint, certificate, float gate,
lowering. Only measured speed is replaced: every proven candidate counts as faster than XLA, so that wrong ones would
run. Every candidate that passes the fingerprint is evaluated as well, tile by tile if it has kernels, and
where asked for in Triton's interpreter. On a GPU the kernels themselves run, at tile sizes and with launch parameters
that vary from program to program.

A difference counts only if neither XLA's own error nor the noise of rounding every step of the program (float64.py)
is as large. XLA is asked only if the noise does not explain a difference, which saves a compilation.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from mirage_jax import timing
from mirage_jax.audit import float64, misreadings
from mirage_jax.compiler import Compiler, tuning
from mirage_jax.compiler.tuning import Comparison
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.compiler.whole_function import not_measured
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Budget, Options
from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.hardware.device_model import DEVICES, DeviceModel
from mirage_jax.jaxpr_frontend.capture.call_primitive import capture
from mirage_jax.jaxpr_frontend.capture.lowering import WholeProgram
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.domains.floats import random_integers
from mirage_jax.mugraph.dtypes import FLOATS, is_float, numpy_dtype
from mirage_jax.mugraph.footprint import footprint
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Library, Precision, Schedule, is_part
from mirage_jax.mugraph.parser import parse
from mirage_jax.report import Decision, WholeFunction
from mirage_jax.search.candidates import Candidate, in_one_launch
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret
from mirage_jax.verify.floats.gate import float_gate
from mirage_jax.verify.floats.noise import noisy
from mirage_jax.why_not import Reason

log = logging.getLogger("mirage_jax")

type Function = Callable[..., Any]

SAMPLES = 8  # of rounding noise
MANY_SAMPLES = 128  # before a difference counts: the largest of few samples is no bound where one error in ten is large
SPREAD = 4.0  # how much worse than the noise, or than XLA, a result may be
EXACT = 1e-6  # relative error of a candidate in float64; a wrong one is off by the size of its values
EXPONENT = 700.0  # exponentials of numbers beyond are zero or infinite in float64, and their quotients no numbers
TINY = 1e-12  # the same, relative to the largest value on the way: large terms may cancel in results
DECIDING = 1e-6  # the same, of what rounding may do to a result: ordinary cancellation is a thousandth of that
MOVED = 1e-13  # of inputs and results on the way, relative to each: some units of float64
UNFUSED, RIGHT_UNFUSED = {"xla_disable_hlo_passes": "fusion"}, "right if XLA fuses nothing"  # XLA's options
RAGGED = (2, 3, 5)  # tile sizes that divide next to nothing
MAX_TILES = 4  # of an axis: an axis of a thousand elements in tiles of two says no more, and takes a second
DETERMINED = 0.1  # of a row's largest number: results with errors beyond say nothing, and excuse no others


@dataclass(frozen=True)
class Setting:
    """How a program is examined. `device` names the cost model: with a GPU's there are kernels to check. On `platform`
    "cuda" the program runs on the GPU of this machine, with its cost model.

    `cache_dir` is for decisions on the way, never the user's; by default it is empty and then deleted.
    """

    device: str = "CPU"
    platform: str = "cpu"
    gate: bool = True  # False: the float gate is asked only about differences
    interpret: bool = False  # run kernels in Triton's interpreter
    seconds: float = 5.0
    states: int = 1000
    cache_dir: str | None = None
    seed: int = 0
    strict_range: bool = False  # no value that the program does not have may leave the range of its type
    remat: bool = False  # large values are made again for a backward pass

    @property
    def options(self) -> Options:
        """Options of the optimizer."""
        budget = Budget(self.seconds, self.states, workers=1)
        return Options(
            "search",
            budget,
            cache_dir=self.cache_dir,
            strict=True,
            strict_range=self.strict_range,
            remat="regions" if self.remat else None,
        )


@dataclass
class Outcome:
    """The outcome of one program."""

    problems: list[str] = field(default_factory=list)
    regions: int = 0
    accepted: int = 0  # regions that a candidate replaces
    changed: int = 0  # of these, with other operators, kernels or amounts of work than the program's own
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # why regions stay with XLA
    inaccurate: list[str] = field(default_factory=list)  # inputs on which XLA is no measure, as the gate says


class Trial(TuningSession):
    """An attempt for which every candidate is worth trying, on a device that need not be here."""

    setting: Setting = Setting()
    outcome: Outcome | None = None

    @property
    def description(self) -> DeviceModel:
        """The cost model of the device of the setting."""
        return super().description if self.setting.platform == "cuda" else DEVICES[self.setting.device]

    def promising(self, c: Candidate) -> bool:
        """Try every candidate."""
        return True

    def gate(self, winner: Winner, only: Sequence[str] = ()) -> tuple[bool, str]:
        """Ask the float gate if the setting does."""
        if not self.setting.gate:
            return True, "not asked"
        passed, why = super().gate(winner, only)
        if misreadings.SAID in why and self.outcome is not None:
            self._blame(why, self.outcome)
        return passed, why

    def _blame(self, why: str, outcome: Outcome) -> None:
        """Write down who is wrong where the translated program differs from the user's."""
        values, translated = self._accuracy.translated(why.split(":")[0])
        if wrong := misreadings.wrong(self.xla, values, translated):
            outcome.problems.append(f"a wrong translation: {wrong}; the float gate: {why}")
        elif why not in outcome.inaccurate:  # other candidates may have met the same
            outcome.inaccurate.append(why)


class Unmeasured(Compiler):
    """A compiler for which whatever is proven is fast; checks every candidate that it is shown on the way."""

    def __init__(self, setting: Setting, outcome: Outcome) -> None:
        super().__init__(setting.options)
        self.setting, self.outcome = setting, outcome

    def session(self, region: Region, platform: str, devices: Sequence[Any], until: float = math.inf) -> TuningSession:
        """Start a trial of a region."""
        trial = Trial(region, platform, devices[0], self.options, devices=devices, until=until)
        trial.setting, trial.outcome = self.setting, self.outcome
        return trial

    def choose(self, whole: WholeProgram) -> WholeFunction:
        """Run the optimized program, without measuring."""
        return not_measured(whole, "whatever is proven runs")

    def trials(self, attempt: TuningSession) -> AbstractContextManager[None]:
        """Start no process."""
        return nullcontext()

    def compare(self, attempt: TuningSession, finalists: Sequence[Candidate], precise: Precision) -> Comparison:
        counts, same = self.outcome.counts, timing.Timing((1.0,) * 6)
        for c in finalists if precise == attempt.precisions[0] else ():
            self.outcome.problems += self._wrong(attempt, c)
        sized = [replace(c, schedule=tuning.as_precise(c.schedule, precise)) for c in finalists]
        running = [c for c in sized if _has_text(c, counts)]
        if not running:
            return Comparison(same, (), None)
        turn = self.setting.seed % len(running)  # not always the model's favourite
        turned = [*running[turn:], *running[:turn]]
        own = _work(attempt.reference)
        turned.sort(key=lambda c: _work(c.graph, c.schedule.part_counts) == own)  # a copy of the program shows nothing
        ratio = timing.ratio(same, same)
        winners: Iterable[Winner] = (attempt.winner(c.graph, c.schedule, c.family) for c in turned)
        if self.setting.platform == "cuda":
            kernels_first = sorted(turned, key=lambda c: c.family != "kernels")
            variants = (_variant(attempt, c, self.setting.seed) for c in kernels_first)
            winners = islice((w for w in variants if _launches(attempt, w, counts)), 1)  # each takes time to compile
        faster = tuple((w, same, ratio) for w in winners)
        return Comparison(same, faster, (same, ratio) if faster else None)

    def _wrong(self, attempt: TuningSession, c: Candidate) -> list[str]:
        """The errors of a candidate; none where float64 overflows on the way and the float gate refuses it."""
        counts = self.outcome.counts
        problems = list(check_candidate(attempt.reference, c, self.setting, counts))
        if not problems or _expected(attempt.reference, self.setting.seed).top <= EXPONENT:
            return problems
        passed, _ = TuningSession.gate(attempt, attempt.winner(c.graph, c.schedule, c.family))
        counts["out of float64's range, and refused by the float gate"] += not passed
        return problems if passed else []


# ---------------------------------------------------------------------- candidates


def _has_text(c: Candidate, counts: Counter[str]) -> bool:
    """Whether kernels can be written down; where they run, those that cannot are not measured either."""
    try:
        return c.family != "kernels" or bool(sources(c.graph, c.schedule))
    except (LoweringError, UnsupportedError) as why:
        counts["not lowered"] += 1
        log.info("not lowered: %s", why)
        return False


def _variant(attempt: TuningSession, c: Candidate, seed: int) -> Winner:
    """A candidate at one of the sizes that tuning would try, or near one."""
    rng = np.random.default_rng(seed)
    tiles = list(tuning.tile_variants(c, tuning.TILINGS_PER_FINALIST[0]))
    winner = attempt.winner(c.graph, tiles[rng.integers(len(tiles))], c.family)
    if winner.cuda is None:
        return winner
    near = [winner.schedule, *tuning.neighboring_schedules(winner, attempt.description)]
    schedule = near[rng.integers(len(near))]
    joint = [schedule, *in_one_launch(c.graph, schedule)]
    return replace(winner, schedule=joint[rng.integers(len(joint))])


def _launches(attempt: TuningSession, winner: Winner, counts: Counter[str]) -> bool:
    """Whether a winner compiles and runs; tuning leaves out others, such as those with too much shared memory."""
    try:
        jax.block_until_ready(jax.jit(attempt.ours(winner))(*attempt.inputs(0)))
    except Exception as why:
        counts[f"not compiled: {type(why).__name__}"] += 1
        log.info("not compiled: %s", why)
        return False
    return True


@dataclass(frozen=True)
class _Expected:
    """What a region's program gives for random inputs in float64: results, how far a candidate may be off each, and the
    largest value on the way.
    """

    inputs: Sequence[np.ndarray]
    results: Sequence[np.ndarray]
    slack: Sequence[np.ndarray]
    top: float


@functools.lru_cache(maxsize=4)
def _expected(reference: KernelGraph, seed: int) -> _Expected:
    rng = np.random.default_rng(seed)
    inputs = [_draw(rng, tuple(map(reference.extent, t.axes)), t.dtype) for t in reference.inputs]
    results = evaluate.run(reference, inputs)
    everything = evaluate.run(replace(reference, outputs=tuple(k.name for k in reference.kernels)), inputs)
    top = max(float(np.abs(np.where(np.isfinite(x), x, 0)).max()) for x in everything)
    slack = [np.zeros(())] * len(results)
    for sample in range(SAMPLES):
        moved = [x * (1 + MOVED * rng.uniform(-1, 1, x.shape)) if is_float(x.dtype) else x for x in map(_wide, inputs)]
        again = noisy(reference, moved, sample=sample, half_unit=MOVED)
        slack = [np.maximum(s, _slack(1.0 * a, 1.0 * b, top)) for s, a, b in zip(slack, results, again, strict=True)]
    return _Expected(inputs, results, slack, top)


def check_candidate(reference: KernelGraph, c: Candidate, setting: Setting, counts: Counter[str]) -> Iterator[str]:
    """Find errors of a candidate that passed the fingerprint."""
    counts["candidates"] += 1
    with np.errstate(all="ignore"):
        expected = _expected(reference, setting.seed)
        inputs, want, slack, top = expected.inputs, expected.results, expected.slack, expected.top
        alone = evaluate.run(c.graph, inputs)
        if top > EXPONENT:  # rows of sentinels: 0/0 here, a number over the reals; whether it may run the gate decides
            want = [np.where(np.isfinite(y), r, math.nan) for r, y in zip(want, alone, strict=True)]
        yield from _unequal("a candidate", c.graph, want, slack, alone)
        if any(isinstance(k, BlockGraph) for k in c.graph):
            counts["tiled"] += 1
            schedule = _ragged(c, setting.seed)
            have = evaluate.run(c.graph, inputs, schedule)
            yield from _unequal(f"a candidate in tiles {schedule}", c.graph, want, slack, have)
            if setting.interpret:
                yield from _interpreted(reference, c, inputs, want, top, counts)


def _slack(x: np.ndarray, again: np.ndarray, top: float) -> np.ndarray:
    """How far a candidate may be off x, which was `again` with other roundings; `top` is the largest value on the way.

    Infinite where rounding decides: whether a difference that should be 0 is negative, for one.
    """
    slack = TINY * top + 1e4 * np.abs(x - again)
    size = np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0.0)
    return np.where(slack > max(size, DECIDING * top), math.inf, slack)


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.random(shape) < 0.8
    if dtype not in FLOATS:
        return random_integers(rng, shape, numpy_dtype(dtype))
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if is_float(x.dtype) else x


def _ragged(c: Candidate, seed: int) -> Schedule:
    """Tiles that do not divide extents; numbers of parts as the candidate has them."""

    def size(n: int, axis: str) -> int:
        extent, least = c.graph.extent(axis), RAGGED[(seed + n) % len(RAGGED)]
        sizes = range(max(least, -(-extent // MAX_TILES)), extent)
        return next((size for size in sizes if extent % size), least) if sizes.start > least else least

    kernels = tuple(
        KernelSchedule(
            tuple((a, size(n, a)) for n, a in enumerate(k.divided) if not is_part(a))
            if isinstance(k, BlockGraph)
            else ()
        )
        for k in c.graph.kernels
    )
    return Schedule(kernels, c.schedule.parts)


def _unequal(
    what: str, graph: KernelGraph, want: Sequence[np.ndarray], slack: Sequence[np.ndarray], have: Sequence[np.ndarray]
) -> Iterator[str]:
    for n, (r, s, c) in enumerate(zip(want, slack, have, strict=True)):
        good = np.isfinite(r) & np.isfinite(s)
        if not good.any():
            continue
        size = float(np.abs(np.where(good, r, 0)).max())
        off = np.where(good, np.abs(np.asarray(c, np.float64) - r), 0)  # NaN where the candidate has one
        limit = EXACT * size + float(np.where(good, s, 0).max())
        if not off.max() <= limit:
            yield f"{what} is off by {off.max():.3g}, values of size {size:.3g}, in output {n}\n{graph}"


def _interpreted(
    reference: KernelGraph,
    c: Candidate,
    inputs: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    top: float,
    counts: Counter[str],
) -> Iterator[str]:
    """The text of the kernels, run by Triton's interpreter at the candidate's own tile sizes, in few launches.

    `top` is the largest value on the way: such values may cancel in a result, and types may be too narrow for them.
    Numbers that the graph itself loses in its types say nothing, a comparison of nearly equal numbers for one, or a sum
    of 16-bit numbers that cancel: the gate decides whether such a graph may run. Nor do numbers that the program itself
    loses if it rounds a little differently: Triton's `tanh` is not numpy's.
    """
    narrow = min((numpy_dtype(t.dtype) for t in c.graph.tensors.values() if t.dtype in FLOATS), key=_largest)
    if top > 0.1 * _largest(narrow):
        return

    def library(kernel: Library, tensors: Any) -> np.ndarray:
        arrays = {load.tensor: tensors[load.tensor] for load in kernel.loads}
        alone = KernelGraph(
            tuple(c.graph.tensors[n] for n in arrays), (kernel,), (kernel.result.name,), c.graph.extents
        )
        return evaluate.run(alone, list(arrays.values()), dtype=None, widen=True)[0]

    try:
        schedule = next(in_one_launch(c.graph, c.schedule), c.schedule)
        have = interpret(c.graph, schedule, inputs, library)
    except (LoweringError, UnsupportedError):
        return
    counts["interpreted"] += 1
    yield from _inexact(c.graph, schedule)
    in_own_types = evaluate.run(c.graph, inputs, dtype=None, widen=True)
    for n, (r, y, narrow_y) in enumerate(zip(want, have, in_own_types, strict=True)):
        good = np.isfinite(r) & np.isfinite(narrow_y)
        scale = float(np.abs(np.where(good, r, 0)).max())
        limit = {2: 0.1, 4: 2e-3}.get(min(x.dtype.itemsize for x in (*inputs, y) if is_float(x.dtype)), 2e-3)
        limit *= scale + 0.01 * top
        good &= np.abs(1.0 * narrow_y - r) <= limit
        off = np.where(good, np.abs(y.astype(np.float64) - r), 0)
        if not off.max() <= limit:
            half_unit, wide = float(ml_dtypes.finfo(narrow).eps) / 2, list(map(_wide, inputs))
            rounded = (noisy(reference, wide, sample=i, half_unit=half_unit)[n] for i in range(MANY_SAMPLES))
            off = np.where(_decided(r, rounded, limit), off, 0)
        if not off.max() <= limit:
            what = f"a kernel is off by {off.max():.3g}, values of size {scale:.3g}, in output {n}"
            yield f"{what}\n{c.graph}\n{c.schedule}"


def _decided(r: np.ndarray, rounded: Iterable[np.ndarray], limit: float) -> np.ndarray:
    """Which elements of a result are the same to `limit` however the program rounds."""
    return np.all([np.abs(1.0 * x - r) <= limit for x in rounded], axis=0)


def _inexact(graph: KernelGraph, schedule: Schedule) -> Iterator[str]:
    """Run the exact check. The kernels' text is written from the graph, so a refusal is a fault of ours."""
    try:
        wrong = exact_check(graph, schedule)
    except (LoweringError, UnsupportedError):
        return
    if wrong:
        yield f"the exact check refuses a kernel: {wrong}\n{graph}\n{schedule}"


def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max) if is_float(dtype) else float(np.iinfo(dtype).max)


# ---------------------------------------------------------------------- whole programs


def examine(
    program: Callable[[Callable[[Function], Function]], Function], args: Sequence[Any], setting: Setting
) -> Outcome:
    """Examine a program; `program` makes the wrapped function from an optimizer, which may be plain `jax.jit`.

    With ``setting.gate`` False a result that differs is computed again with the float gate: a refusal is no
    problem. This runs more than the optimizer would, in less time. Where numbers grow so large that another order of
    factors may leave float32, which is no promise without `strict_range`, the program is judged with it. A problem says
    whether the program is right as soon as XLA fuses nothing: then XLA may have compiled it wrongly, or rounded a value
    in two ways.
    """
    plain = jax.jit(program(jax.jit)).trace(*args)
    exact = float64.evaluate(plain.jaxpr, args)
    how = setting.seed, setting.platform == "cuda", setting.strict_range  # noise is drawn
    noise = float64.spread(plain.jaxpr, args, exact, SAMPLES, *how)
    outcome, have = _optimized(program, args, setting)
    if have is None:
        return outcome
    if jax.tree.structure(have) != jax.tree.structure(plain.out_info):
        outcome.problems.append("another structure of results")
        return outcome
    results = jax.tree.leaves(have)
    if any(_differences(exact, noise, None, results)):
        outcome.counts["compared with XLA"] += 1
        xla = jax.tree.map(np.asarray, jax.tree.leaves(plain.lower().compile()(*args)))
        if _differences(exact, noise, xla, results):
            if not setting.gate:
                again = examine(program, args, replace(setting, gate=True))
                again.counts["asked the float gate"] += 1
                return again
            noise = float64.spread(plain.jaxpr, args, exact, MANY_SAMPLES, *how)
            runs = float64.disturbed_runs(plain.jaxpr, args, SAMPLES, *how)
            differences = _differences(exact, noise, xla, results, float64.shifts(runs, exact))
            if differences and not setting.strict_range and float64.grows(plain.jaxpr, args):
                strict = examine(program, args, replace(setting, strict_range=True))
                differences = strict.problems
                outcome.counts["out of range, but not with strict_range"] += not differences
            if differences and setting.platform == "cpu":
                _, unfused = _optimized(program, args, setting, UNFUSED)
                if unfused is not None and not _differences(exact, noise, xla, jax.tree.leaves(unfused)):
                    differences = [f"{why}; {RIGHT_UNFUSED}" for why in differences]
            outcome.problems += differences
    return outcome


def _optimized(
    program: Callable[[Callable[[Function], Function]], Function],
    args: Sequence[Any],
    setting: Setting,
    xla_options: dict[str, Any] | None = None,
) -> tuple[Outcome, Any]:
    """The results of the optimized program; None if it raised an error."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="mirage_jax") as empty:
        # A decision without the gate is none for a run with it.
        folder = Path(
            setting.cache_dir or empty, f"{setting.platform}-{setting.device}-{setting.gate}-{setting.strict_range}"
        )
        compiler = Unmeasured(replace(setting, cache_dir=str(folder)), outcome)
        with _overheard(outcome.problems):
            try:
                ours = jax.jit(program(lambda f: jax.jit(capture(f, compiler))))
                have = jax.tree.map(np.asarray, ours.lower(*args).compile(xla_options)(*args))
            except Exception as why:
                outcome.problems.append(_raised(why))
                return outcome, None
    _count(compiler, outcome)
    return outcome, have


def _raised(why: Exception) -> str:
    where = traceback.extract_tb(why.__traceback__)[-1]
    text = " ".join(str(why).split())[:500]
    return f"raised {type(why).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


def _differences(
    exact: Sequence[np.ndarray],
    noise: Sequence[np.ndarray],
    xla: Sequence[np.ndarray] | None,
    have: Sequence[np.ndarray],
    shifts: Sequence[float] | None = None,
) -> list[str]:
    """Results worse than the noise of rounding, or XLA's error if it is larger. `shifts`: how far noise moves means."""
    out: list[str] = []
    for n, (r, s, c, shift) in enumerate(zip(exact, noise, have, shifts or [0.0] * len(have), strict=True)):
        with np.errstate(all="ignore"):
            x = r.astype(c.dtype) if xla is None else xla[n]
        if not is_float(c.dtype):
            if not np.array_equal(x, c):
                out.append(f"result {n} differs from XLA's in {int((x != c).sum())} elements")
            continue
        if found := judged(r, s, x, c, shift):
            out.append(f"result {n}: {found}")
    return out


def judged(r: np.ndarray, s: np.ndarray, x: np.ndarray, c: np.ndarray, shift: float = 0.0) -> str:
    """Find the error of a result of floats c, given float64's r, the noise s, XLA's x and how far noise moves the mean.

    All elements are judged together first, then the determined ones alone. An element is determined if neither XLA nor
    noise is off by more than a tenth of its row. Others, a row of huge numbers that cancel for one, would excuse any
    error elsewhere, since most rules are about the largest of all. Where XLA or noise gives no number and float64 does,
    nothing is determined: XLA may divide by a count of maxima that it rounded differently. Where float64's number is
    beyond the type and XLA gives none, a number as near as the noise is as good as an infinity. An infinity is as good
    as a number that noise may take beyond the type.
    """
    with np.errstate(all="ignore"):
        x64, ideal = x.astype(np.float64), r.astype(c.dtype)
        error = np.fmax(np.abs(x64 - r), s)
        most = _largest(c.dtype)
        off = r + np.copysign(error, x64 - r)  # on XLA's own side of float64: a mean shift stays one
        off = np.clip(np.where(np.abs(off) <= most, off, r - np.copysign(error, r)), -most, most)
        worst = np.where(np.isfinite(x) & np.isfinite(r), off, x64).astype(c.dtype)
        known = np.isfinite(x) & np.isfinite(error)
        near = ~np.isfinite(s) | (np.abs(c.astype(np.float64) - r) <= SPREAD * s)
        brink = np.isinf(c) & (np.sign(c) == np.sign(r)) & (np.abs(r) + SPREAD * s > most)
        lost = np.isfinite(r) & (~known & (np.isfinite(ideal) | near) | brink)
        rows = np.where(np.isfinite(r), np.abs(r), 0.0).max(-1, keepdims=True, initial=0.0) if r.ndim else np.abs(r)
        unknown = lost | np.isfinite(ideal) & ~(error <= DETERMINED * rows)
    for left_out in (lost, unknown):
        mine, xlas = np.where(left_out, ideal, c), np.where(left_out, ideal, worst)
        verdict = float_gate(r, xlas, mine, kinds=False, spread=SPREAD, skips=True)
        is_shared = {name for name, ratio in verdict.ratios if not ratio <= 1} == {"bias"}
        if not verdict and not (is_shared and abs(float64.mean_error(mine, r)) <= shift):
            return "; ".join(verdict.reasons)
        if not (unknown & ~lost).any():
            break
    return ""


def _count(compiler: Unmeasured, outcome: Outcome) -> None:
    kernels = 0
    for (text, _), d in compiler.decisions.items():
        outcome.regions += 1
        if d.winner is not None:
            outcome.accepted += 1
            outcome.changed += _work(parse(text)) != _work(d.winner.graph, d.winner.schedule.part_counts)
            if d.winner.platform == "cuda" and d.winner.cuda is not None:
                outcome.counts["regions run through Triton"] += 1
                kernels += sum(isinstance(k, BlockGraph) for k in d.winner.graph)
        elif d.gate:
            outcome.refused["by the float gate"] += 1
        else:
            outcome.refused[_kind_of_refusal(d)] += 1
        outcome.counts.update(d.tried)
    if kernels:
        outcome.counts.update({"programs run through Triton": 1, "kernels run through Triton": kernels})


def _kind_of_refusal(d: Decision) -> str:
    """Name the reason without the numbers and names of one program."""
    if d.why_not is None:
        return re.sub(r"\b[a-z]\d+\b|\d+", "_", d.why)
    detail = re.sub(r"\b[a-z]\d+\b|\d+", "_", d.why_not.detail)
    return f"{d.why_not.reason}: {detail}" if d.why_not.reason is Reason.NOT_SEARCHED else str(d.why_not.reason)


def _work(graph: KernelGraph, parts: Mapping[str, int] | None = None) -> tuple[Counter[str], int, float]:
    """Figures that are equal for a program and its copy under other names."""
    operators = Counter(op.op for k in graph.kernels for op in k.ops)
    return operators, len(graph.kernels), footprint(graph, parts or {}).flops


@contextmanager
def _overheard(problems: list[str]) -> Iterator[None]:
    """Make every warning of the optimizer a problem; warnings of Triton about itself are none."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            problems.append(f"logged: {record.getMessage()}")

    listener = Listener(logging.WARNING)
    log.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        ours = [w for w in caught if not {"triton", "jax_triton"} & set(Path(w.filename).parts)]
        problems += [f"warned: {w.category.__name__}: {w.message} ({Path(w.filename).name}:{w.lineno})" for w in ours]
    finally:
        log.removeHandler(listener)
