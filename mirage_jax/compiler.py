"""Decides for each region who computes it: cache, else search -> check -> fingerprint -> measure -> certify -> gate -> cache.

A candidate replaces XLA only if all of this holds: its muGraph is well formed; it equals the region's program over finite
fields, with a certificate whose error bound is computed; its floats are as accurate as XLA's against float64 on every
input class; and it was measured faster than XLA on this device, beyond noise. Whatever fails is dropped and counted, and
where nothing is left the user's own equations run.

Nothing here may break the user's program: `decide` turns every exception into a decision for XLA, unless `strict`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax import timing
from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.config import Options
from mirage_jax.errors import CacheError, MirageError, UsageError
from mirage_jax.jaxpr_frontend.flat import FlatEqn
from mirage_jax.jaxpr_frontend.regions import MAX_OPS
from mirage_jax.jaxpr_frontend.translate import Region
from mirage_jax.lower import launch
from mirage_jax.lower.frame import Options as EmitOptions
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.footprint import footprint
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Library, Schedule
from mirage_jax.mugraph.merge import simplify_axes
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.thread import thread_graphs
from mirage_jax.report import Decision, places
from mirage_jax.search import structures
from mirage_jax.search.devices import Device, device_for
from mirage_jax.search.driver import FAMILIES, search
from mirage_jax.search.frontier import Space
from mirage_jax.search.structures import Candidate
from mirage_jax.verify import certificate as certificates
from mirage_jax.verify import float_gate

log = logging.getLogger("mirage_jax")

POLICY = "certificate 1e-12, float gate 2.1, lower bound of the ratio at least 1.03"
MARGIN = 1.03  # lower 95% bound of XLA's time over ours, below which XLA stays
PROMISING = 0.97  # on CPU only candidates that the model puts below this fraction of XLA's estimate are measured
FINALISTS = 6
STORED = 16  # structures kept for other sizes
# A float32 product that asks for more than the default precision is not captured, and XLA's default on GPUs is tf32 too.
KERNEL_OPTIONS = EmitOptions(dot_precision="tf32")
EVERY_CLASS = 5e8  # operations of a region up to which the float gate runs every class; beyond, float64 takes its time
CORE_CLASSES = ("normal", "large", "heavy tail", "zero rows", "cancelling", "integers", "large logits", "nan", "inf")


@dataclass(frozen=True)
class Winner:
    """A muGraph that runs in place of a region. Takes and returns arrays in the layout of the region's own graph."""

    graph: KernelGraph
    schedule: Schedule
    shapes_in: tuple[tuple[int, ...], ...]  # of the merged graph's inputs and of the region's outputs
    shapes_out: tuple[tuple[int, ...], ...]
    family: str
    platform: str
    directory: Path | None = None

    def portable(self, *arrays: jax.Array) -> list[jax.Array]:
        """As plain JAX: every backend, and the meaning of the kernels."""
        widen = self.platform == "cpu"
        return self._shaped(lambda xs: evaluate.run(self.graph, xs, xp=jnp, dtype=None, widen=widen), arrays)

    def _kernels(self, *arrays: jax.Array) -> list[jax.Array]:
        def run(xs: list[jax.Array]) -> list[jax.Array]:
            libraries = _run_library(self.graph)
            return launch.run_cuda(self.graph, self.schedule, xs, libraries, directory=self.directory, options=KERNEL_OPTIONS)

        return self._shaped(run, arrays)

    @property
    def cuda(self) -> Callable[..., list[jax.Array]] | None:
        """As Triton kernels; None if every operator is a library operator, which XLA runs best itself."""
        return self._kernels if self.family == "kernels" else None

    @property
    def run(self) -> Callable[..., list[jax.Array]]:
        """What runs on the winner's own platform."""
        return self._kernels if self.platform == "cuda" and self.cuda is not None else self.portable

    def _shaped(self, run: Callable[[list[jax.Array]], list[jax.Array]], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        inputs = [jnp.reshape(x, shape) for x, shape in zip(arrays, self.shapes_in, strict=True)]
        return [jnp.reshape(y, shape) for y, shape in zip(run(inputs), self.shapes_out, strict=True)]


def _run_library(graph: KernelGraph) -> Callable[..., Any]:
    """Runs one library operator of a graph with XLA."""

    def run(kernel: Any, tensors: Mapping[str, Any]) -> Any:
        inputs = tuple(graph.tensors[n] for n in dict.fromkeys(load.tensor for load in kernel.loads))
        alone = KernelGraph(inputs, (kernel,), (kernel.result.name,), graph.extents)
        return evaluate.run(alone, [tensors[t.name] for t in inputs], xp=jnp, dtype=None)[0]

    return run


def _shape(graph: KernelGraph, axes: Sequence[str]) -> tuple[int, ...]:
    return tuple(graph.extent(a) for a in axes)


def _product_flops(eqn: FlatEqn) -> float:
    if eqn.primitive != "dot_general":
        return 0.0
    ((contracted, _), _) = eqn.params["dimension_numbers"]
    left, (out,) = eqn.in_avals[0], eqn.out_avals
    return 2.0 * math.prod(out.shape) * math.prod(left.shape[i] for i in contracted)


@dataclass
class _Attempt:
    """One region on one device, on its way to a decision."""

    region: Region
    platform: str
    device: Any
    options: Options
    tried: Counter[str] = field(default_factory=Counter)

    @cached_property
    def reference(self) -> KernelGraph:
        """The region's program over as few axes as possible: what is searched, verified and keyed."""
        return simplify_axes(self.region.graph)

    @cached_property
    def products(self) -> float:
        """Operations of the matrix products in the user's equations; a muGraph may have folded some of them away."""
        return sum(map(_product_flops, self.region.equations))

    def winner(self, graph: KernelGraph, schedule: Schedule, family: str, directory: Path | None = None) -> Winner:
        own = self.region.graph
        shapes_in = tuple(_shape(self.reference, t.axes) for t in self.reference.inputs)
        shapes_out = tuple(_shape(own, own.tensors[n].axes) for n in own.outputs)
        return Winner(graph, schedule, shapes_in, shapes_out, family, self.platform, directory)

    # ------------------------------------------------------------------ functions of the region's JAX values

    def xla(self, *values: jax.Array) -> list[jax.Array]:
        return list(self.region.reference(*values))

    def ours(self, winner: Winner) -> Callable[..., list[jax.Array]]:
        def run(*values: jax.Array) -> list[jax.Array]:
            return list(self.region.finish(winner.run(*self.region.prepare(values))))

        return run

    def oracle(self, values: Sequence[Any]) -> list[np.ndarray]:
        """The region in float64, inputs upcast after rounding to their own dtype."""
        own = self.region.graph
        arrays = [np.asarray(v).reshape(_shape(own, t.axes)) for v, t in zip(values, own.inputs, strict=True)]
        with np.errstate(all="ignore"):  # infinities and NaN are among the inputs
            tensors = dict(zip(own.outputs, evaluate.run(own, arrays), strict=True))

        def outward(b: Any) -> np.ndarray:  # Region.finish without the cast
            x = np.transpose(tensors[b.tensor], b.permutation).reshape(b.spread)
            return np.broadcast_to(x, b.full).reshape(b.shape)

        return [outward(b) for b in self.region.outputs]

    @cached_property
    def specs(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shapes and dtypes of the region's inputs."""
        avals = [self.region.avals[b.value] for b in self.region.inputs]
        return [(tuple(a.shape), np.dtype(a.dtype)) for a in avals]

    # ------------------------------------------------------------------ stages

    @property
    def description(self) -> Device:
        """What the cost model knows of the device."""
        return device_for(self.device.device_kind)

    def candidates(self, cache: Cache, key: CacheKey) -> tuple[list[Candidate], str]:
        """Well-formed candidates, best estimate first, and the search's report.

        Kernels that were found for the same structure at other sizes are tiled for these; only algebra is searched then, because
        what order of evaluation is cheap depends on sizes.
        """
        budget, device = self.options.budget, self.description
        key = replace(key, graph=structures.structure(self.reference), extents=(), policy=f"structures, {SPACE}")
        known = cache.get(key) if device.is_gpu else None
        kernels = [] if known is None else structures.restore(known.schedule, self.reference, device)
        families = ("algebra",) if kernels or self.options.backend == "jax" else FAMILIES
        found, report = search(self.reference, device, SPACE, budget.seconds, budget.states or 2_000_000, families)
        text = str(report)
        if kernels:
            text = f"kernels: {len(kernels)} structures known from other sizes, only their tiles were chosen\nalgebra: {text}"
        elif new := [c for c in found if c.family == "kernels"][:STORED]:
            cache.put(key, Entry("structures", schedule=structures.to_json(new)))
        found = sorted([*kernels, *found], key=lambda c: c.seconds)
        self.tried["found"] = len(found)
        return found, text

    def verified(self, found: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those that are well formed and pass one draw of the fingerprint."""
        for c in found:
            try:
                check_graph(c.graph)
                same = certificates.fingerprint(self.reference, c.graph)
            except MirageError as why:
                self.tried["refused by the checker"] += 1
                log.info("candidate refused: %s", why)
                continue
            if same:
                yield c
            else:
                self.tried["refused by the fingerprint"] += 1

    def inputs(self, seed: int) -> list[jax.Array]:
        """Random inputs of the region, on its device."""
        rng = np.random.default_rng(seed)

        def draw(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            if dtype == bool:
                return rng.random(shape) < 0.9
            return rng.standard_normal(shape).astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else np.zeros(shape, dtype)

        return [jax.device_put(draw(*spec), self.device) for spec in self.specs]

    def timings(self, functions: Mapping[str, Callable[..., Any]], rounds: int) -> dict[str, timing.Timing]:
        """Interleaved times of functions of the region's values; a function that fails is left out and counted."""
        on_gpu = self.platform == "cuda"
        size = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.specs)
        sets = timing.sets_for(size) if on_gpu else 1
        args = [tuple(self.inputs(i)) for i in range(sets)]

        def prepare(item: tuple[str, Callable[..., Any]]) -> tuple[str, timing.Call] | None:
            label, f = item
            try:
                compiled = (timing.chain(f).lower(args) if on_gpu else jax.jit(f).lower(*args[0])).compile()
                call = (lambda: jax.block_until_ready(compiled(args))) if on_gpu else (lambda: jax.block_until_ready(compiled(*args[0])))
                call()
            except Exception as why:  # a kernel that cannot be compiled or launched is one candidate less
                self.tried["not compiled"] += 1
                log.info("%s not compiled: %s: %s", label, type(why).__name__, str(why).partition("\n")[0])
                return None
            return label, call

        with ThreadPoolExecutor(8 if on_gpu else 1) as pool:
            calls = dict(x for x in pool.map(prepare, functions.items()) if x is not None)
        return timing.time_device(calls, sets, rounds) if on_gpu else timing.time_wall(calls, rounds)

    def gate(self, winner: Winner) -> tuple[bool, str]:
        """Are the winner's floats as good as XLA's on every input class?"""
        ours, xla = jax.jit(self.ours(winner)), jax.jit(self.xla)
        passed, reordered = 0, winner.family == "algebra"  # another order meets other roundings, and infinities in another order
        classes = float_gate.input_classes(self.specs, 0)
        small = footprint(self.reference).flops < EVERY_CLASS
        for name in classes if small else CORE_CLASSES:
            values = classes[name]
            args = [jax.device_put(v, self.device) for v in values]
            candidate = [np.asarray(y) for y in ours(*args)]
            if any(not np.array_equal(a, np.asarray(b), equal_nan=True) for a, b in zip(candidate, ours(*args), strict=True)):
                return False, f"{name}: two runs differ"
            results = zip(self.oracle(values), xla(*args), candidate, strict=True)
            for r, x, c in results:
                spread = (2.0 if reordered else 1.0) * (2.0 if name in float_gate.DEGENERATE else 1.0)
                verdict = float_gate.float_gate(r, np.asarray(x), c, kinds=not reordered, spread=spread)
                if not verdict.passed:
                    return False, f"{name}: {'; '.join(verdict.reasons)}"
            passed += 1
        return True, f"passed on {passed} input classes, repeated runs equal bit for bit"


SPACE = Space(max_ops=14)


def diverse(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """At most two of a kind: near the top of the ranking most candidates differ in next to nothing."""
    kinds: Counter[object] = Counter()
    for c in found:
        kind = c.family if c.family == "algebra" else tuple((k.grid, k.loop) for k in c.graph.kernels)
        kinds[kind] += 1
        if kinds[kind] <= 2:
            yield c


def tile_variants(c: Candidate, n: int) -> Iterator[Schedule]:
    """The model's first choice, then other tile sizes, one kernel at a time."""
    seen: set[Schedule] = set()
    for i, alternatives in enumerate(c.alternatives or ((),)):
        for sizes in (*c.schedule.kernels[i : i + 1], *alternatives[:n]):
            changed = replace(c.schedule, kernels=(*c.schedule.kernels[:i], sizes, *c.schedule.kernels[i + 1 :]))
            if changed not in seen:
                seen.add(changed)
                yield changed
    if not seen:
        yield c.schedule


def launch_variants(w: Winner) -> Iterator[Schedule]:
    """Other numbers of warps and pipeline stages, one kernel at a time."""
    for i, (kernel, sizes) in enumerate(zip(w.graph.kernels, w.schedule.kernels, strict=True)):
        if isinstance(kernel, Library):
            continue
        for warps in (2, 4, 8):
            for stages in (2, 3, 4, 5) if kernel.loop else (1,):
                if (warps, stages) != (sizes.num_warps, sizes.num_stages):
                    changed = replace(sizes, num_warps=warps, num_stages=stages)
                    yield replace(w.schedule, kernels=(*w.schedule.kernels[:i], changed, *w.schedule.kernels[i + 1 :]))


class Compiler:
    """Decides for the regions of one optimized function; hashable by identity, so that it can be a parameter of a primitive."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cache = Cache(options.cache_dir)
        self.decisions: dict[tuple[str, str], Decision] = {}
        self._lock = threading.RLock()

    max_ops = MAX_OPS

    @property
    def strict(self) -> bool:
        return self.options.strict

    def compile_region(self, region: Region, platforms: tuple[str, ...]) -> Winner | None:
        """What runs instead of the region's equations, or None: XLA. A program exported for several platforms stays with XLA."""
        if len(platforms) != 1:
            log.info("a program lowered for %s stays with XLA: regions are decided for one platform", ", ".join(platforms))
            return None
        return self.decide(region, platforms[0]).winner

    def decide(self, region: Region, platform: str, on_miss: str | None = None) -> Decision:
        """The decision for a region, made once per process and program text."""
        platform = "cuda" if platform == "gpu" else platform
        memo = (str(region.graph), platform)
        with self._lock:
            if memo in self.decisions and on_miss is None:
                return self.decisions[memo]
            try:
                decision = self._decide(region, platform, on_miss or self.options.on_miss or _default_on_miss())
            except UsageError:
                raise
            except Exception as why:
                if self.strict:
                    raise
                text = _in_one_line(why)
                log.warning("the region at %s stays with XLA: %s", ", ".join(places(region.where)[:1]), text)
                decision = Decision(None, text, "policy", platform)
            self.decisions[memo] = decision
            return decision

    def _decide(self, region: Region, platform: str, on_miss: str) -> Decision:
        try:
            device = jax.local_devices(backend=platform)[0]
        except RuntimeError:
            return Decision(None, f"there is no {platform} device here to measure on", "policy", platform)
        attempt = _Attempt(region, platform, device, self.options)
        key = CacheKey.here(
            graph=str(attempt.reference),
            extents=attempt.reference.sizes,
            backend=self.options.backend,
            policy=POLICY,
            device=device,
        )
        before = footprint(attempt.reference)
        before = replace(before, flops=max(before.flops, attempt.products))
        base = Decision(None, "", "policy", platform, key=key.digest, before=before)
        entry, reason = self.cache.lookup(key)
        if entry is not None:
            try:
                return self._from_cache(attempt, key, entry, base)
            except Exception as why:  # whatever is in a file, it is a miss
                log.warning("cache entry %s is not used: %s", key.digest[:12], _in_one_line(why))
                reason = f"the stored entry is not usable: {_in_one_line(why)}"
        match on_miss:
            case "error":
                raise UsageError(f"on_miss='error': no stored decision for a region of {len(region.equations)} equations ({reason})")
            case "fallback":
                return replace(base, why=f"no stored decision ({reason}) and on_miss='fallback'")
            case _:
                x64 = jax.config.jax_enable_x64
                return apart(lambda: self._search(attempt, key, base, on_miss == "search", x64))

    def _search(self, attempt: _Attempt, key: CacheKey, base: Decision, measure: bool, x64: bool) -> Decision:
        with jax.enable_x64(x64), jax.debug_nans(False), jax.debug_infs(False):  # the gate's inputs have both
            budget = self.options.budget
            operators = len(attempt.reference.kernels)
            log.info("region of %d operators: searching for at most %s", operators, budget)
            found, report = attempt.candidates(self.cache, key)
            base = replace(base, search=report, source="search", tried=attempt.tried)
            if attempt.platform == "cpu":
                found = [c for c in found if self._promising(attempt, base, c)]
            finalists = list(islice(attempt.verified(diverse(found)), FINALISTS))
            if not finalists:
                return self._keep(key, replace(base, why="no candidate promises to beat XLA"))
            log.info("region of %d operators: %d candidates, of which %d are tried", operators, attempt.tried["found"], len(finalists))
            if not measure:
                return self._accept(attempt, key, base, [attempt.winner(c.graph, c.schedule, c.family) for c in finalists], {})
            return self._measure(attempt, key, base, finalists)

    def _promising(self, attempt: _Attempt, base: Decision, c: Candidate) -> bool:
        """Does the model expect an algebraic candidate to do clearly less than the program as it stands?"""
        after = footprint(c.graph)
        device = attempt.description

        def estimate(f: Any) -> float:
            return max(f.flops / device.matrix_flops_f32, f.bytes / device.bandwidth)

        promising = estimate(after) < PROMISING * estimate(base.before)
        attempt.tried["not cheaper than the program"] += not promising
        return promising

    def _measure(self, attempt: _Attempt, key: CacheKey, base: Decision, finalists: Sequence[Candidate]) -> Decision:
        """Screen all variants once, then time the best few against XLA, interleaved."""
        directory = self.cache.kernel_path(key).parent
        tiles = [(c, s) for i, c in enumerate(finalists) for s in tile_variants(c, TILES[i])]
        log.info("compiling and timing %d variants", len(tiles))
        best = self._screen(attempt, [attempt.winner(c.graph, s, c.family, directory) for c, s in tiles], 3)
        launches = [replace(w, schedule=s) for w in best for s in launch_variants(w)]
        best = self._screen(attempt, [*best, *launches], 3)
        variations = {str(i): w for i, w in enumerate(best)}
        best = list(variations)
        measured = attempt.timings({"xla": attempt.xla, **{label: attempt.ours(variations[label]) for label in best}}, rounds=10)
        if "xla" not in measured:
            return replace(base, why="XLA's own code for this region cannot be timed alone")
        ratios = {label: timing.ratio(measured["xla"], measured[label]) for label in best if label in measured}
        order = sorted(ratios, key=lambda label: -ratios[label].value)
        base = replace(base, timings={"xla": measured["xla"].seconds} | {f"candidate {k}": measured[k].seconds for k in order[:1]})
        faster = [label for label in order if ratios[label].low >= MARGIN]
        if not faster:
            top = f"the best candidate is {ratios[order[0]]}" if order else "no candidate could be compiled"
            return self._keep(key, replace(base, why=f"XLA is as fast: {top}"))
        seconds = {label: {"xla": measured["xla"].seconds, "mirage": measured[label].seconds} for label in faster}
        return self._accept(attempt, key, base, [variations[label] for label in faster], dict(zip(faster, seconds.values(), strict=True)), ratios)

    def _screen(self, attempt: _Attempt, winners: Sequence[Winner], keep: int) -> list[Winner]:
        """The fastest few of many, timed once."""
        if len(winners) <= keep:
            return list(winners)
        timed = attempt.timings({str(i): attempt.ours(w) for i, w in enumerate(winners)}, rounds=1)
        attempt.tried["timed"] += len(timed)
        return [winners[int(i)] for i in sorted(timed, key=lambda i: timed[i].seconds)[:keep]]

    def _accept(
        self, attempt: _Attempt, key: CacheKey, base: Decision, winners: Sequence[Winner], seconds: Mapping[str, Any], ratios: Mapping[str, Any] | None = None
    ) -> Decision:
        """The first of the winners, fastest first, that gets a certificate and passes the float gate."""
        labels = list(seconds) or [""] * len(winners)
        for label, winner in zip(labels, winners, strict=True):
            log.info("proving a candidate equal to the program, then comparing its floats with float64")
            try:
                certificate = certificates.certify(attempt.reference, winner.graph)
            except MirageError as why:
                attempt.tried["refused by the certificate"] += 1
                log.info("no certificate: %s", why)
                continue
            passed, gate = attempt.gate(winner)
            if not passed:
                attempt.tried["refused by the float gate"] += 1
                base = replace(base, gate=gate)
                log.info("float gate: %s", gate)
                continue
            why = f"{ratios[label]} over XLA" if ratios else "the model's first choice, not measured (on_miss='heuristic')"
            after = footprint(winner.graph, winner.schedule.part_counts)
            decision = replace(
                base, winner=winner, why=why, after=after, certificate=certificate, gate=gate, timings=seconds.get(label, {})
            )
            return self._keep(key, decision) if ratios else decision
        return self._keep(key, replace(base, why="no candidate passed certificate and float gate"))

    # ------------------------------------------------------------------ the cache

    def _keep(self, key: CacheKey, d: Decision) -> Decision:
        w = d.winner
        entry = Entry(
            decision="xla" if w is None else "win",
            graph=None if w is None else str(w.graph),
            schedule=None if w is None else schedule_to_json(w.schedule),
            certificate=None if d.certificate is None else json.loads(d.certificate.to_json()),
            timings=dict(d.timings),
            reasons=(d.why, d.gate, "" if w is None else w.family),
        )
        kernels = None if w is None else self.readable(w)
        path = self.cache.put(key, entry, kernels)
        return replace(d, kernels=str(path.with_suffix(".py")) if path is not None and kernels else "")

    def readable(self, w: Winner) -> str:
        """The text of a winner's kernels; for algebra, the muGraph that JAX runs operator by operator."""
        threads = [f"{k.name}: {t}" for k in w.graph.kernels if isinstance(k, BlockGraph) for t in thread_graphs(k)]
        head = "".join(f"# {line}\n" for line in (*str(w.graph).splitlines(), *threads))
        if w.cuda is None:
            return head
        return head + "\n\n".join(s.text for s in launch.sources(w.graph, w.schedule, KERNEL_OPTIONS) if s is not None)

    def _from_cache(self, attempt: _Attempt, key: CacheKey, entry: Entry, base: Decision) -> Decision:
        if len(entry.reasons) != 3:
            raise CacheError(f"found {len(entry.reasons)} texts where why, gate and family must be")
        why, gate, family = entry.reasons
        base = replace(base, source="cache", why=why, timings=dict(entry.timings), gate=gate)
        if entry.decision == "xla":
            return base
        graph, schedule = parse(entry.graph or ""), schedule_from_json(entry.schedule)
        check_graph(graph)
        if family not in ("kernels", "algebra") or len(schedule.kernels) != len(graph.kernels):
            raise CacheError(f"family {family!r} or the schedule of {len(schedule.kernels)} kernels does not fit")
        certificate = certificates.certify(attempt.reference, graph)  # proof-carrying: what is read is proved again
        directory = self.cache.kernel_path(key).parent
        winner = attempt.winner(graph, schedule, family, directory)
        after = footprint(graph, schedule.part_counts)
        text = self.cache.kernel_path(key)
        kernels = str(text) if text.is_file() else ""
        return replace(base, winner=winner, after=after, certificate=certificate, kernels=kernels)


PATIENCE = 10.0  # seconds that an interrupted search has to end
TILES = (10, 6, 5, 4, 4, 4)  # tile sizes per kernel tried for the first, second, ... finalist


def apart[T](work: Callable[[], T]) -> T:
    """The result of `work`, done on a thread of its own: JAX operations in a lowering rule are traced, not run.

    An interrupt of the waiting thread is passed on to the working one, and raised when that has ended.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as why:
            done.set_exception(why)

    thread = threading.Thread(target=run, name="mirage_jax", daemon=True)
    thread.start()
    try:
        return done.result()
    finally:
        until = time.monotonic() + PATIENCE
        while thread.is_alive() and time.monotonic() < until:
            if not done.done():
                number = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt))
            thread.join(0.1)


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition('\n')[0]}"


def _default_on_miss() -> str:
    """All processes of one program must lower the same code, so only a single process searches by itself."""
    return "search" if jax.process_count() == 1 else "fallback"


def schedule_to_json(s: Schedule) -> Any:
    kernels = [{"tiles": [list(t) for t in k.tiles], "num_warps": k.num_warps, "num_stages": k.num_stages} for k in s.kernels]
    return {"kernels": kernels, "parts": [list(p) for p in s.parts]}


def schedule_from_json(value: Any) -> Schedule:
    """Raises CacheError unless the value has exactly the form that `schedule_to_json` gives."""

    def pairs(x: Any) -> tuple[tuple[str, int], ...]:
        out = tuple((str(a), int(n)) for a, n in x)
        if any(not 0 < n <= 1 << 20 for _, n in out):
            raise ValueError(out)
        return out

    try:
        kernels = tuple(KernelSchedule(pairs(k["tiles"]), int(k["num_warps"]), int(k["num_stages"])) for k in value["kernels"])
        return Schedule(kernels, pairs(value["parts"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CacheError(f"a stored schedule is malformed ({error})") from None
