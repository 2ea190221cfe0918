"""A campaign of random programs through the whole optimizer, with a script of each that fails.

Program number n of seed S is always the same, whatever the number of workers. Workers are processes that are replaced
after some programs, because JAX keeps everything it compiled. In them LLVM optimizes little, which halves the time and
changes no meaning. The user's cache of decisions is neither read nor written.

On a GPU (platform "cuda") every program is decided for it and runs there, its regions as Triton kernels where there are
any; XLA's flags are the user's.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import jax

from mirage_jax import children
from mirage_jax.audit.differential import Outcome, Setting, examine
from mirage_jax.audit.generator import generate
from mirage_jax.audit.program import RandomProgram
from mirage_jax.audit.report import CampaignReport
from mirage_jax.audit.shrink import shrink
from mirage_jax.cache import versions
from mirage_jax.errors import UsageError
from mirage_jax.lower.runtime import launch
from mirage_jax.progress import Say, silent

LITTLE_LLVM = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "cpu": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(LITTLE_LLVM)},
    "cuda": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # processes share the memory of one GPU
}
CHUNK = 10  # programs per task
CHUNKS = 50  # tasks per process
TRIALS = {"cpu": 150, "cuda": 40}  # programs tried to make one that fails smaller
SHRUNK = 2  # failures per task that are made smaller: where all programs fail, a campaign should end nevertheless
MAX_SHRINK_SECONDS = 180.0  # after which no smaller program is looked for: some take a minute each
STOP = "stop"  # a file of this name tells workers to end
LOST = ("ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "LAUNCH_FAILED")  # CUDA errors that stay
KERNELS_EVERY, GATE_EVERY, INTERPRET_EVERY, STRICT_EVERY, OTHER_REMAT_EVERY = 4, 7, 32, 3, 5  # one program in so many


@dataclass(frozen=True)
class FuzzFailure:
    """A program for which something is wrong, made small."""

    number: int
    problems: tuple[str, ...]
    script: str
    steps: int
    features: tuple[str, ...] = ()  # of the small program


@dataclass
class Campaign(CampaignReport):
    """Counts of a campaign, and its failures."""

    header: ClassVar[tuple[str, ...]] = ("", "")
    words = 2

    seed: int
    programs: int = 0
    hits: int = 0  # programs with a region that a candidate replaces
    changed: int = 0  # programs with one that does other work than the program says
    regions: int = 0
    accepted: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    inaccurate: list[tuple[int, str]] = field(default_factory=list)  # programs on which XLA is, and what the gate says
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[FuzzFailure] = field(default_factory=list)
    device: str = "cpu"

    @property
    def hit_rate(self) -> float:
        """The share of programs with a region that a candidate replaces."""
        return self.hits / self.programs if self.programs else 0.0

    @property
    def passed(self) -> bool:
        """Whether no program failed."""
        return not self.failures

    def add(self, outcome: Outcome) -> None:
        """Count the outcome of a program."""
        self.programs += 1
        self.hits += outcome.accepted > 0
        self.changed += outcome.changed > 0
        self.regions += outcome.regions
        self.accepted += outcome.accepted
        self.counts.update(outcome.counts)
        self.refused.update(outcome.refused)

    def merge(self, other: Campaign) -> None:
        """Add the counts and failures of other programs."""
        for name in ("programs", "hits", "changed", "regions", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.counts.update(other.counts)
        self.refused.update(other.refused)
        self.failures += other.failures
        self.inaccurate += other.inaccurate

    # ------------------------------------------------------------------ the table

    def summary(self) -> str:
        """Sum the campaign up in one sentence."""
        return f"{len(self.failures):,} mismatches and exceptions in {self.programs:,} programs, {self.date}"

    def rows(self) -> Iterator[tuple[str, str]]:
        """Names and values of all counts."""
        yield "programs", f"{self.programs:,}"
        yield "mismatches and exceptions", f"{len(self.failures):,}"
        for what, n in sorted(Counter(what for f in self.failures for what in f.features).items()):
            yield f"of these, made small, with {what}", f"{n:,}"
        yield "with an optimized region (hit rate)", f"{self.hits:,} ({self.hit_rate:.1%})"
        yield "with another program in its place", f"{self.changed:,} ({self.changed / max(self.programs, 1):.1%})"
        yield "regions", f"{self.regions:,}, of which {self.accepted:,} are replaced"
        for why, n in self.refused.most_common():
            yield f"left to XLA: {why}", f"{n:,}"
        if self.inaccurate:
            numbers = ", ".join(str(number) for number in sorted({number for number, _ in self.inaccurate}))
            yield "XLA inaccurate, the translation right: programs", numbers
        for what, n in sorted(self.counts.items()):
            yield what, f"{n:,}"
        yield "seconds", f"{self.seconds:,.0f} ({self.seconds / max(self.programs, 1):.2f} per program)"

    @property
    def heading(self) -> str:
        """The title, with the device."""
        return f"Random programs, seed {self.seed}, on {self.device}"

    def findings(self) -> list[str]:
        """The first problem of each program that failed, and its script."""
        return [f"program {f.number}: {f.problems[0]}\n  {f.script}" for f in self.failures]

    def record(self) -> dict[str, Any]:
        """The fields, with versions and the share of hits."""
        body = {f.name: getattr(self, f.name) for f in fields(self)} | {"failures": list(map(asdict, self.failures))}
        return {"versions": dict(versions()), "hit_rate": self.hit_rate} | body


# ---------------------------------------------------------------------- the programs of a campaign


def program_of(seed: int, number: int, platform: str = "cpu") -> tuple[RandomProgram, Setting]:
    """Draw one program of a campaign, and the setting in which it is examined."""
    strict, has_kernels, is_other = (number % n == 0 for n in (STRICT_EVERY, KERNELS_EVERY, OTHER_REMAT_EVERY))
    program = generate(random.Random(f"{seed}/{number}"), number, strict)
    setting = Setting(
        device="H200" if has_kernels else "CPU",
        platform=platform,
        gate=number % GATE_EVERY == 0,
        interpret=number % INTERPRET_EVERY == 0,
        seed=number,
        strict_range=strict,
        remat=has_kernels != is_other,  # kernels recompute, as on a GPU by default, but for one program in five
    )
    return program, setting


def run_one(program: RandomProgram, setting: Setting) -> Outcome:
    """Examine one program; if plain JAX or the reference refuse it, that is the problem."""
    try:
        return examine(program.function(), program.arguments(), setting)
    except Exception as why:
        return Outcome([f"not examined: {type(why).__name__}: {why}"])


def run_programs(seed: int, numbers: Sequence[int], out: Path, cache_dir: str, platform: str = "cpu") -> Campaign:
    """Examine some programs of a campaign in this process."""
    found = Campaign(seed)
    for number in numbers:
        if Path(cache_dir, STOP).exists():
            break
        program, setting = program_of(seed, number, platform)
        outcome = run_one(program, replace(setting, cache_dir=cache_dir))
        found.add(outcome)
        found.inaccurate += [(number, why) for why in outcome.inaccurate]
        lost = any(word in problem for problem in outcome.problems for word in LOST)
        if outcome.problems:
            trials = 0 if lost or len(found.failures) >= SHRUNK else TRIALS[platform]
            stop = Path(cache_dir, STOP).exists
            found.failures.append(report(seed, number, program, setting, outcome.problems, out, trials, stop))
        if lost:
            os._exit(1)  # nothing runs on the GPU any more in this process
    jax.clear_caches()
    return found


def report(
    seed: int,
    number: int,
    program: RandomProgram,
    setting: Setting,
    problems: Sequence[str],
    out: Path,
    trials: int = TRIALS["cpu"],
    stop: Callable[[], bool] = lambda: False,
) -> FuzzFailure:
    """Shrink a failing program, for `MAX_SHRINK_SECONDS` or until `stop`, and write its script."""
    wanted = kind_of(problems[0])
    until = time.monotonic() + MAX_SHRINK_SECONDS

    def fails(p: RandomProgram) -> bool:
        """Whether a program has the same kind of problem."""
        in_time = time.monotonic() < until and not stop()
        return in_time and any(kind_of(x) == wanted for x in run_one(p, setting).problems)

    small = shrink(program, fails, trials)
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"fuzz_{seed}_{number}.py"
    title = f"Program {number} of seed {seed}, shrunk from {len(program.steps)} steps to {len(small.steps)}:"
    file.write_text(small.script(setting, f"{title}\n{problems[0]}", ENVIRONMENT[setting.platform]))
    return FuzzFailure(number, tuple(problems), str(file), len(small.steps), small.features)


def kind_of(problem: str) -> str:
    """Take the first words of a problem, which a smaller program must have too."""
    return " ".join(problem.split()[:2]).rstrip("0123456789:")


def skipped(platform: str) -> str:
    """Name the part of a campaign that needs a missing package, in one line; "" if none is missing."""
    if platform == "cuda" and (package := launch.missing(*launch.PACKAGES)):
        return f"{package} is not installed: no kernel runs ({launch.INSTALL})"
    if package := launch.missing("triton"):
        return f"{package} is not installed: the text of kernels is not run in its interpreter ({launch.INSTALL})"
    return ""


# ---------------------------------------------------------------------- workers


def find_gpu() -> str:
    """Return the kind of the GPU that campaigns run on. Raises `UsageError` if there is none."""
    os.environ.update(ENVIRONMENT["cuda"])
    try:
        return jax.local_devices(backend="cuda")[0].device_kind
    except RuntimeError as why:
        raise UsageError(f"--device: found gpu; allowed is cpu, where JAX sees no NVIDIA GPU: {why}") from None


def _start_worker(platform: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign ends them
    os.environ.update(ENVIRONMENT[platform])
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    for name in [n for n in os.environ if n == "MIRAGE_JAX" or n.startswith("MIRAGE_JAX_")]:
        del os.environ[name]


def campaign(
    programs: int, seed: int, out: Path, workers: int = 1, say: Say = silent, platform: str = "cpu"
) -> Campaign:
    """Run programs 0, 1, .. of a seed. An interrupt ends the campaign early and keeps what was found so far."""
    device = "cpu" if platform == "cpu" else find_gpu()
    found, start = Campaign(seed, device=device), time.perf_counter()
    todo = [range(n, min(n + CHUNK, programs)) for n in range(0, programs, CHUNK)]
    with found.timed(), suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="mirage_jax") as cache_dir:
        while todo:  # each pool is a fresh one; Python's own way to renew processes can hang (max_tasks_per_child)
            now, todo = todo[: CHUNKS * workers], todo[CHUNKS * workers :]
            more = (out, cache_dir, platform)
            todo = _pool(now, found, more, workers, lambda: say(_line(found, programs, start))) + todo
    found.failures.sort(key=lambda f: f.number)
    return found


def _line(found: Campaign, programs: int, start: float) -> str:
    each = (time.perf_counter() - start) / max(found.programs, 1)
    rate = f"hit rate {found.hit_rate:.0%} | {len(found.failures)} failures | {each:.2f}s each"
    return f"fuzz | {found.programs} of {programs} programs | {rate}"


def _pool(
    todo: list[range], found: Campaign, more: tuple[Path, str, str], workers: int, tell: Callable[[], None]
) -> list[range]:
    """Run tasks in processes; returns the tasks left if a process died. `more`: arguments of `run_programs`."""
    context = multiprocessing.get_context("spawn")
    left = list(todo)
    with children.safe_pool(), ProcessPoolExecutor(workers, context, _start_worker, more[-1:]) as pool:
        tasks: dict[Future[Campaign], range] = {
            pool.submit(run_programs, found.seed, numbers, *more): numbers for numbers in todo
        }
        try:
            for task in as_completed(tasks):
                found.merge(task.result())
                left.remove(tasks[task])
                tell()
        except BrokenProcessPool:
            dead = left.pop(0)  # tasks are taken in order; a task that ran at the same time runs again
            why = f"crashed: a process died in programs {dead.start} to {dead.stop - 1}"
            found.failures.append(FuzzFailure(dead.start, (why,), "", 0))
        except KeyboardInterrupt:
            Path(more[1], STOP).touch()
            pool.shutdown(cancel_futures=True)
            for task, numbers in tasks.items():
                if numbers in left and not task.cancelled() and task.exception() is None:
                    found.merge(task.result())
            raise
    return left
