"""The command `bench`: times suites of programs, writes their tables, and draws them."""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from rich.console import Console

import mirage_jax
from mirage_jax.bench import (
    compile_suite,
    model_suite,
    peers,
    plot,
    programs,
    search_suite,
    sentinel_suite,
    start,
    steps,
    suite,
)
from mirage_jax.bench.tables import TableReport
from mirage_jax.cli.options import (
    ENVIRONMENT,
    OK,
    PROBLEM,
    add_optimizer_options,
    check_at_least,
    check_file,
    optimizer_options,
    write,
)
from mirage_jax.config import Options, unknown
from mirage_jax.errors import UnsupportedError, UsageError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `bench`."""
    add_optimizer_options(parser)
    suites = ", ".join(f"{name} ({s.content})" if s.content else name for name, s in SUITES.items())
    parser.add_argument("--suite", default="mirage", help=f"{suites} (default: mirage)")
    parser.add_argument("--programs", metavar="A,B", help="these programs instead of a suite")
    parser.add_argument("--small", action="store_true", help="scaled-down extents, to try the command out")
    parser.add_argument("--peers", action="store_true", help="also time cuDNN's attention and, where it is, torch")
    remat = '--suite models: training steps without remat, and with remat="regions"'
    parser.add_argument("--remat", action="store_true", help=remat)
    files = "write FILE, and the same as Markdown and (with matplotlib) as a picture next to it"
    parser.add_argument("--json", type=Path, metavar="FILE", help=files)
    picture = "run nothing: draw FILE, which --json wrote, next to it"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=picture)
    parser.add_argument("--rounds", type=int, help="interleaved rounds per program")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=bench)


def bench(args: Namespace, out: Console, err: Console) -> int:
    """Run a suite; a problem is a candidate of ours that fails, or a function slower than under plain jit."""
    if args.plot is not None:
        return OK if _draw(args.plot, err, "error") else ENVIRONMENT
    chosen = _checked_suite(args)
    names = [name.strip() for name in args.programs.split(",")] if args.programs else []
    result = chosen.run(args, names, None if args.quiet else err, **chosen.how)
    out.print(result.table())
    is_slower = chosen.has_bar and _show_lowest(result, err)
    write(result, args.json, err)
    if isinstance(result, suite.SuiteResult):
        return PROBLEM if _finish(result, args.json, err) or is_slower else OK
    return OK


def _finish(result: suite.SuiteResult, file: Path | None, err: Console) -> bool:
    """Draw the table and print failures; returns whether a candidate of ours failed."""
    if file is not None:
        _draw(file, err, "no picture")
    for line in result.details():
        err.print(line, highlight=False, markup=False)
    return any(label not in peers.PEERS for _, label, _ in result.failures)


def _checked_suite(args: Namespace) -> BenchSuite:
    """The suite that was asked for, if the arguments are right."""
    check_at_least(args, rounds=1)
    check_file(args.json)
    if args.suite not in SUITES:
        raise UsageError(unknown("suite", args.suite, SUITES))
    if args.remat and args.suite != "models":
        raise UsageError(f"--remat: training steps, which only --suite models has; found --suite {args.suite}")
    return SUITES[args.suite]


def _draw(file: Path, err: Console, otherwise: str) -> bool:
    """Draw a stored table, or say why not."""
    try:
        err.print(f"written: {plot.draw(plot.load(file), file)}", highlight=False)
    except UnsupportedError as why:
        err.print(f"{otherwise}: {why}", highlight=False, markup=False)
        return False
    return True


def _show_lowest(result: TableReport, err: Console) -> bool:
    """Print which function gained least over plain jit; returns whether it is slower, by device time."""
    if not isinstance(result, suite.SuiteResult) or result.lowest is None:
        return False
    ratio, program, label = result.lowest
    err.print(f"lowest: {program}, {label}: {ratio} over {suite.BASELINE}", highlight=False, markup=False)
    return result.is_slower and jax.default_backend() == "gpu"


# ---------------------------------------------------------------------- suites


def _run_programs(args: Namespace, names: list[str], console: Console | None) -> TableReport:
    chosen = [programs.program(n, args.small) for n in names] or programs.suite(args.suite, args.small)
    return _run_suite(args, chosen, console, peers=peers.PEERS if args.peers else {})


def _run_steps(args: Namespace, names: list[str], console: Console | None, **how: Any) -> TableReport:
    chosen = [steps.step(args.suite, n, args.small) for n in names] or steps.steps(args.suite, args.small)
    return _run_suite(args, chosen, console, **how)


def _run_suite(
    args: Namespace,
    chosen: list[Any],
    console: Console | None,
    on_miss: str | None = None,
    variants: Mapping[str, dict[str, object]] = MappingProxyType({suite.OURS: {}}),
    **how: Any,
) -> TableReport:
    """Compare `variants` of the optimizer, by options, with XLA; without an option, a miss means `on_miss`."""
    args.on_miss = args.on_miss or on_miss
    with_remat = {suite.OURS: {"remat": None}, model_suite.REMAT: {"remat": "regions"}}
    title = f"{args.programs or args.suite}{', small' if args.small else ''}"
    with tempfile.TemporaryDirectory(prefix="mirage_jax") as folder:
        candidates: dict[str, suite.Transform] = {suite.BASELINE: jax.jit}
        for label, options in (with_remat if args.remat else variants).items():
            alone = {"cache_dir": str(Path(folder, label.replace("/", " ")))} if len(variants) > 1 else {}
            candidates[label] = _optimizer(args, **alone, **options)
        return suite.run_suite(
            chosen, candidates, title=title, rounds=args.rounds, seed=args.seed, console=console, **how
        )


def _optimizer(args: Namespace, **more: object) -> suite.Transform:
    options: dict[str, Any] = optimizer_options(args) | more
    Options.make(options)  # wrong ones are refused before anything is timed
    return lambda fn, **jit_options: mirage_jax.optimize(fn, **options | jit_options)


def _run_search(args: Namespace, names: list[str], console: Console | None) -> TableReport:
    return search_suite.run_search_suite([programs.program(n) for n in names] or programs.suite("all"), console=console)


def _run_start(args: Namespace, names: list[str], console: Console | None) -> TableReport:
    rounds = args.rounds or start.ROUNDS
    return start.run_start_suite(names or start.PROGRAMS, small=args.small, rounds=rounds, console=console)


def _run_sentinels(args: Namespace, names: list[str], console: Console | None) -> TableReport:
    return sentinel_suite.run_sentinel_suite(names, args.rounds or sentinel_suite.ROUNDS, console)


@dataclass(frozen=True)
class BenchSuite:
    """A suite of the command. `how` are keywords of `run`; with `has_bar` no function may be slower than plain jit."""

    run: Callable[..., TableReport]
    content: str = ""
    how: dict[str, Any] = field(default_factory=dict[str, Any])
    has_bar: bool = True


_MODELS = {"run": model_suite.run_step, "notes": model_suite.NOTES}
SUITES = {
    **dict.fromkeys((*programs.SUITES, "all"), BenchSuite(_run_programs)),
    "models": BenchSuite(_run_steps, "some layers", {**_MODELS, "unit": "layer"}),
    "whole": BenchSuite(
        _run_steps, "gradients of single layers", {**_MODELS, "unit": "step", "variants": model_suite.VARIANTS}
    ),
    "fields": BenchSuite(
        _run_steps,
        "programs of other fields, and their gradients",
        {**_MODELS, "unit": "step", "variants": model_suite.RECOMPUTING},
    ),
    "zoo": BenchSuite(
        _run_steps,
        "programs by other libraries, and their gradients",
        {**_MODELS, "unit": "step", "variants": model_suite.RECOMPUTING},
    ),
    "compile": BenchSuite(
        _run_steps,
        "tracing and lowering",
        {"run": compile_suite.run_compile, "unit": "model", "host_clock": "Wall-clock", "notes": compile_suite.NOTES},
        has_bar=False,
    ),
    "different": BenchSuite(
        _run_steps,
        "the same of equations that all differ",
        {
            "run": compile_suite.run_different,
            "unit": "program",
            "host_clock": "Processor",
            "notes": compile_suite.DIFFERENT,
            "on_miss": "fallback",  # searches would take seconds for each of thousands of regions
        },
    ),
    "search": BenchSuite(_run_search, "the search space"),
    "start": BenchSuite(_run_start, "fresh processes"),
    "sentinels": BenchSuite(_run_sentinels, "checks of rows of sentinels"),
}
