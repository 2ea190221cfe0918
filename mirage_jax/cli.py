"""The command line: ``python -m mirage_jax`` and one of the commands below.

Results go to standard output, progress and errors to standard error. Exit codes: 0 fine, 1 a problem was found, 2 wrong
usage, 3 the environment does not work.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import mirage_jax
from mirage_jax import doctor, progress
from mirage_jax.audit import campaigns, fuzz, mutants, rewrites, saved
from mirage_jax.audit.report import CampaignReport
from mirage_jax.audit.sources import Source, sources
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
from mirage_jax.bench.suite import Transform
from mirage_jax.cache import versions
from mirage_jax.config import BACKENDS, ON_MISS, Budget, unknown
from mirage_jax.errors import UnsupportedError, UsageError, in_one_line
from mirage_jax.hardware.gpus import GPUS
from mirage_jax.mugraph.dtypes import DTYPES
from mirage_jax.preview import preview
from mirage_jax.summary import summarize

VERSION = dict(versions())["mirage-jax"] or "(not installed)"

TABLE_COLUMNS = 160  # of tables that go to a file or a pipe
OK, PROBLEM, USAGE, ENVIRONMENT = range(4)

_AVAL = re.compile(r"\s*(\w+)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]\s*;?")


def parse_arguments(text: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """``"f32[128,64] bf16[64]"`` as the arguments of a function."""
    found, position = [], 0
    while position < len(text.rstrip()):
        match = _AVAL.match(text, position)
        if match is None:
            raise UsageError(f"arguments: found {text[position:]!r}; allowed are types such as f32[128,64] bf16[64]")
        name, dims = match.groups()
        if name not in DTYPES:
            raise UsageError(f"arguments: {unknown('dtype', name, DTYPES)}")
        found.append(jax.ShapeDtypeStruct(tuple(int(d) for d in dims.split(",") if d.strip()), DTYPES[name].numpy))
        position = match.end()
    return tuple(found)


def load_function(where: str) -> Callable[..., object]:
    """``package.module:function``, importable from the current directory as ``python -m`` would."""
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"function: found {where!r}; allowed is module:function")
    try:
        value: object = importlib.import_module(module)
    except Exception as error:  # of whatever the module does
        raise UsageError(f"function: {where!r} cannot be imported: {type(error).__name__}: {error}") from None
    for part in name.split("."):
        if not hasattr(value, part):
            raise UsageError(f"function: {unknown('name', part, [n for n in dir(value) if not n.startswith('_')])}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(f"function: {where!r} is {type(value).__name__}, which cannot be called")
    return value


def _check_arguments(function: Callable[..., object], arguments: Sequence[object]) -> None:
    """Are there as many as the function takes, and does it take such shapes and types?"""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions may have none
        signature = None
    try:
        if signature is not None:
            signature.bind(*arguments)
    except TypeError as error:
        raise UsageError(f"arguments: found {len(arguments)}; the function takes {signature}: {error}") from None
    try:
        jax.eval_shape(function, *arguments)
    except Exception as error:
        raise UsageError(f"arguments: the function cannot be traced with them: {in_one_line(error)}") from None


OPTIONS = ("on_miss", "budget", "backend", "cache_dir", "strict", "strict_range", "devices")


def _options(args: argparse.Namespace) -> dict[str, object]:
    """The options of `optimize` that were given on the command line."""
    given = {n: getattr(args, n) for n in OPTIONS}
    if args.workers is not None:
        given["budget"] = replace(Budget.parse(args.budget), workers=args.workers)
    return {name: value for name, value in given.items() if value is not None}


def _optimizer(args: argparse.Namespace, **more: Any) -> Transform:
    options = _options(args) | more
    return lambda fn, **jit_options: mirage_jax.optimize(fn, **options, **jit_options)


def _bench_search(args: argparse.Namespace, out: Console, err: Console) -> int:
    names = args.programs.split(",") if args.programs else None
    chosen = [programs.program(n.strip()) for n in names] if names else programs.suite("all")
    result = search_suite.run_search_suite(chosen, console=None if args.quiet else err)
    out.print(result.table())
    if args.json is not None:
        err.print(f"written: {args.json}, {result.write(args.json)}", highlight=False)
    return OK


MODEL_SUITES = {
    "whole": {"run": model_suite.run_step, "unit": "step", "notes": model_suite.NOTES},
    "models": {"run": model_suite.run_step, "unit": "layer", "notes": model_suite.NOTES},
    "compile": {"run": compile_suite.run_compile, "unit": "model", "on_host": True, "notes": compile_suite.NOTES},
    "different": {
        "run": compile_suite.run_different,
        "clock": "Processor",
        "unit": "program",
        "on_host": True,
        "notes": compile_suite.DIFFERENT,
    },
}


def _bench_start(args: argparse.Namespace, out: Console, err: Console) -> int:
    names = [n.strip() for n in args.programs.split(",")] if args.programs else start.PROGRAMS
    result = start.run_start_suite(
        names, small=args.small, rounds=args.rounds or start.ROUNDS, console=None if args.quiet else err
    )
    out.print(result.table())
    if args.json is not None:
        err.print(f"written: {args.json}, {result.write(args.json)}", highlight=False)
    return OK


def _bench_sentinels(args: argparse.Namespace, out: Console, err: Console) -> int:
    names = [n.strip() for n in args.programs.split(",")] if args.programs else ()
    result = sentinel_suite.run_sentinel_suite(names, args.rounds or 5, None if args.quiet else err)
    out.print(result.table())
    if args.json is not None:
        err.print(f"written: {args.json}, {result.write(args.json)}", highlight=False)
    return OK


def _draw(file: Path, err: Console) -> int:
    """Draw a stored table."""
    try:
        err.print(f"written: {plot.draw(plot.load(file), file)}", highlight=False)
    except UnsupportedError as why:
        err.print(f"error: {why}", highlight=False, markup=False)
        return ENVIRONMENT
    return OK


def command_bench(args: argparse.Namespace, out: Console, err: Console) -> int:
    if args.plot is not None:
        return _draw(args.plot, err)
    _check_file(args.json)
    if args.remat and args.suite != "models":
        raise UsageError(f"--remat: training steps, which only --suite models has; found --suite {args.suite}")
    if args.suite == "search":
        return _bench_search(args, out, err)
    if args.suite == "start":
        return _bench_start(args, out, err)
    if args.suite == "sentinels":
        return _bench_sentinels(args, out, err)
    if args.suite == "different" and args.on_miss is None:
        args.on_miss = "fallback"  # searches would take seconds for each of thousands of regions
    title = f"{args.programs or args.suite}{', small' if args.small else ''}"
    console = None if args.quiet else err
    names = [name.strip() for name in args.programs.split(",")] if args.programs else []
    options = {"title": title, "rounds": args.rounds, "seed": args.seed, "console": console}
    if args.suite in steps.SUITES:
        chosen = [steps.step(args.suite, n, args.small) for n in names] or steps.steps(args.suite, args.small)
        options |= MODEL_SUITES[args.suite]
    else:
        chosen = [programs.program(n, args.small) for n in names] or programs.suite(args.suite, args.small)
        options["peers"] = peers.PEERS if args.peers else {}
    with tempfile.TemporaryDirectory(prefix="mirage_jax") as folder:
        result = suite.run_suite(chosen, _candidates(args, Path(folder)), **options)
    out.print(result.table())
    is_slower = args.suite != "compile" and _tell_lowest(result, err)
    if args.json is not None:
        markdown = result.write(args.json)
        err.print(f"written: {args.json}, {markdown}", highlight=False)
        try:
            err.print(f"written: {plot.draw(plot.load(args.json), args.json)}", highlight=False)
        except UnsupportedError as why:
            err.print(f"no picture: {why}", highlight=False, markup=False)
    for row in result.rows:
        for label, why in row.failures.items():
            err.print(f"{row.program}, {label}: {why}", highlight=False, markup=False)
    has_failed = any(row.failures.keys() - peers.PEERS.keys() for row in result.rows)
    return PROBLEM if has_failed or is_slower else OK


def _candidates(args: argparse.Namespace, folder: Path) -> dict[str, Transform]:
    """What a suite compares; `folder` is for caches that no other candidate may find."""
    if args.suite == "whole":
        optimizers = {
            label: _optimizer(args, remat="regions", cache_dir=str(folder / label.replace("/", " ")), **options)
            for label, options in model_suite.BUDGETS.items()
        }
        return {suite.BASELINE: jax.jit, **optimizers}
    candidates = {suite.BASELINE: jax.jit, suite.OURS: _optimizer(args)}
    if args.remat:
        candidates[model_suite.REMAT] = _optimizer(args, remat="regions")
    return candidates


def _tell_lowest(result: suite.SuiteResult, err: Console) -> bool:
    """Say which function gained least over plain jit; whether it is slower, by device time."""
    if result.lowest is None:
        return False
    ratio, program, label = result.lowest
    err.print(f"lowest: {program}, {label}: {ratio} over {suite.BASELINE}", highlight=False, markup=False)
    return result.is_slower and jax.default_backend() == "gpu"


def command_doctor(args: argparse.Namespace, out: Console, err: Console) -> int:
    del err
    checks = doctor.examine()
    if args.json:
        out.print(doctor.to_json(checks), highlight=False, markup=False, soft_wrap=True)
    else:
        doctor.show(checks, out)
    return ENVIRONMENT if any(check.status == "problem" for check in checks) else OK


def command_explain(args: argparse.Namespace, out: Console, err: Console) -> int:
    del err
    sys.path.insert(0, os.getcwd())
    function, arguments = load_function(args.function), parse_arguments(args.arguments)
    _check_arguments(function, arguments)
    report = mirage_jax.optimize(function, **_options(args)).explain(*arguments)
    text = report.to_json() if args.json else summarize(report) if args.brief else str(report)
    out.print(text, highlight=False, markup=False, soft_wrap=True)
    return OK


def command_fuzz(args: argparse.Namespace, out: Console, err: Console) -> int:
    for name in ("programs", "workers"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name}: found {getattr(args, name)}; allowed is 1 or more")
    if args.json is not None and args.json.is_dir():
        raise UsageError(f"--json: {str(args.json)!r} is a directory; allowed is a file")
    platform = {"cpu": "cpu", "gpu": "cuda"}[args.device]
    if skipped := fuzz.skipped(platform):
        err.print(skipped, highlight=False, markup=False, soft_wrap=True)
    with nullcontext(lambda text: None) if args.quiet else progress.line() as say:
        found = fuzz.campaign(args.programs, args.seed, args.out, args.workers, say, platform)
    out.print(found.table())
    if args.json is not None:
        err.print(f"written: {args.json}, {found.write(args.json)}", highlight=False)
    for failure in found.failures:
        text = f"program {failure.number}: {failure.problems[0]}\n  {failure.script}"
        err.print(text, highlight=False, markup=False, soft_wrap=True)
    return PROBLEM if found.failures else OK


def command_preview(args: argparse.Namespace, out: Console, err: Console) -> int:
    del err
    sys.path.insert(0, os.getcwd())
    function, arguments = load_function(args.function), parse_arguments(args.arguments)
    _check_arguments(function, arguments)
    text = preview(function, arguments, args.device, Budget.parse(args.budget))
    out.print(text, highlight=False, markup=False, soft_wrap=True)
    return OK


def _campaign(args: argparse.Namespace, err: Console) -> list[Source]:
    """What every campaign starts from."""
    if args.count < 1:
        raise UsageError(f"--count: found {args.count}; allowed is 1 or more")
    if args.seed < 0:
        raise UsageError(f"--seed: found {args.seed}; allowed is 0 or more")
    _check_file(args.json)
    if not args.quiet:
        err.print("searching for right candidates", highlight=False)
    return sources(args.seed)


def _show(result: CampaignReport, args: argparse.Namespace, out: Console, err: Console) -> None:
    out.print(result.table())
    for detail in result.details():
        out.print(detail, highlight=False, markup=False, soft_wrap=True)
    if args.json is not None:
        err.print(f"written: {args.json}, {result.write(args.json)}", highlight=False)


def command_mutate(args: argparse.Namespace, out: Console, err: Console) -> int:
    found = _campaign(args, err)

    def progress(result: mutants.MutantReport) -> None:
        """A long campaign that is interrupted leaves what it has."""
        if not args.quiet:
            err.print(result.summary(), highlight=False)
        if args.json is not None:
            result.write(args.json)

    result = mutants.mutate(found, args.count, args.seed, notify=progress)
    _show(result, args, out, err)
    return PROBLEM if result.accepted else OK


def command_rewrite(args: argparse.Namespace, out: Console, err: Console) -> int:
    result = rewrites.rewrite(_campaign(args, err), args.count, args.seed)
    _show(result, args, out, err)
    return PROBLEM if result.unexplained else OK


def command_stress(args: argparse.Namespace, out: Console, err: Console) -> int:
    for name, least in (("count", 1), ("seed", 0)):
        if (found := getattr(args, name)) is not None and found < least:
            raise UsageError(f"--{name}: found {found}; allowed is {least} or more")
    _check_file(args.json)
    with nullcontext(lambda text: None) if args.quiet else progress.line() as say:
        result = campaigns.run(args.kind, args.count, args.seed, say)
    _show(result, args, out, err)
    return OK if result.passed else PROBLEM


def _check_file(file: Path | None) -> None:
    if file is not None and file.is_dir():
        raise UsageError(f"--json: {str(file)!r} is a directory; allowed is a file")


def command_verify(args: argparse.Namespace, out: Console, err: Console) -> int:
    if args.program in saved.PROGRAMS:
        function = saved.PROGRAMS[args.program]
    elif ":" in args.program:
        sys.path.insert(0, os.getcwd())
        function = load_function(args.program)
    else:
        raise UsageError(f"--program: {unknown('program', args.program, saved.PROGRAMS)}, or module:function")
    verdicts = saved.examine(args.file, args.program, function)
    out.print(verdicts.table())
    if args.json is not None:
        args.json.write_text(verdicts.to_json())
        err.print(f"written: {args.json}", highlight=False)
    return OK if verdicts.all_certified else PROBLEM


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mirage-jax", description="A superoptimizer for JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mirage-jax {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    optimizing = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    optimizing.add_argument(
        "--budget", help="time for one search: 30s, 2m, ..; 20s/5m: for one, and for all of a function"
    )
    optimizing.add_argument(
        "--workers", type=int, metavar="N", help="processes for a search (default: one for two processors)"
    )
    optimizing.add_argument("--on-miss", choices=ON_MISS, help="what to do where no winner is stored")
    optimizing.add_argument("--backend", choices=BACKENDS)
    optimizing.add_argument("--cache-dir", help="where winners are stored")
    optimizing.add_argument("--strict", action="store_true", default=None, help="raise instead of falling back to XLA")
    optimizing.add_argument(
        "--strict-range", action="store_true", default=None, help="refuse what overflows before XLA does, in any type"
    )

    optimizing.add_argument("--devices", metavar="0,2", help="local devices that measure (default: the first)")

    bench = commands.add_parser("bench", parents=[optimizing], help="time XLA against the optimizer on a suite")
    names = ", ".join(programs.SUITES)
    more = (
        "models: some layers, compile: tracing and lowering, different: the same of equations that all differ,"
        " search: the search space, start: fresh processes"
    )
    suites = f"{names}, all; {more} (default: mirage)"
    bench.add_argument("--suite", default="mirage", help=suites)
    bench.add_argument("--programs", metavar="A,B", help="these programs instead of a suite")
    bench.add_argument("--small", action="store_true", help="scaled-down extents, to try the command out")
    bench.add_argument("--peers", action="store_true", help="also time cuDNN's attention and, where it is, torch")
    bench.add_argument("--remat", action="store_true", help='--suite models: also training steps with remat="regions"')
    beside = "write FILE, and the same as Markdown and (with matplotlib) as a picture beside it"
    bench.add_argument("--json", type=Path, metavar="FILE", help=beside)
    bench.add_argument(
        "--plot", type=Path, metavar="FILE", help="run nothing: draw FILE, which --json wrote, beside it"
    )
    bench.add_argument("--rounds", type=int, help="interleaved rounds per program")
    bench.add_argument("--seed", type=int, default=0, help="of the inputs")
    bench.add_argument("-q", "--quiet", action="store_true", help="no progress")
    bench.set_defaults(run=command_bench)

    check = commands.add_parser("doctor", help="what works on this machine, and the fix for what does not")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.set_defaults(run=command_doctor)

    explain = commands.add_parser("explain", parents=[optimizing], help="what is found for a function")
    explain.add_argument("function", help="module:function")
    explain.add_argument("arguments", help="types of its arguments: 'f32[128,64] bf16[64]'")
    form = explain.add_mutually_exclusive_group()
    form.add_argument("--brief", action="store_true", help="a few lines per region")
    form.add_argument("--json", action="store_true", help="the whole report as JSON")
    explain.set_defaults(run=command_explain)

    campaign = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    campaign.add_argument("--seed", type=int, default=0, help="a number from 0 on")
    campaign.add_argument("--json", type=Path, metavar="FILE", help="write FILE, and the same as Markdown beside it")
    campaign.add_argument("-q", "--quiet", action="store_true", help="no progress")

    wrong = commands.add_parser("mutate", parents=[campaign], help="wrong candidates, which must all be refused")
    wrong.add_argument("--count", type=int, default=3000, help="how many that are not equivalent (default: 3000)")
    wrong.set_defaults(run=command_mutate)

    right = commands.add_parser("rewrite", parents=[campaign], help="right candidates written anew, to be accepted")
    right.add_argument("--count", type=int, default=400, help="how many (default: 400)")
    right.set_defaults(run=command_rewrite)

    stress = commands.add_parser("stress", parents=[campaign], help="stored decisions: files, processes, signals")
    kinds = ", ".join(f"{name} ({count:,})" for name, (_, count) in campaigns.RUNS.items())
    stress.add_argument("--kind", choices=campaigns.RUNS, default="entries", help="what happens to them")
    stress.add_argument("--count", type=int, help=f"how many cases (default: {kinds})")
    stress.set_defaults(run=command_stress)

    random = commands.add_parser("fuzz", parents=[campaign], help="random programs, whole pipeline, against float64")
    random.add_argument("--programs", type=int, default=300, metavar="N", help="how many (default: 300)")
    random.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    where = "where programs run; on a GPU all regions get kernels, and these run (default: cpu)"
    random.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help=where)
    random.add_argument("--out", type=Path, default=Path("fuzz-failures"), metavar="DIR", help="scripts of failures")
    random.set_defaults(run=command_fuzz)

    look = commands.add_parser("preview", help="kernels that would be tried on a GPU, which need not be here")
    look.add_argument("function", help="module:function")
    look.add_argument("arguments", help="types of its arguments: 'f16[128,64] f16[64]'")
    look.add_argument("--device", default="H200", help=f"{', '.join(GPUS)} (default: H200)")
    look.add_argument("--budget", help="time for one search: 30s, 2m, ...")
    look.set_defaults(run=command_preview)

    proof = commands.add_parser("verify", help="are muGraphs saved by CMU's Mirage right?")
    proof.add_argument("file", type=Path, help="a JSON file of saved muGraphs")
    names = f"{', '.join(saved.PROGRAMS)} (as Mirage's benchmark defines them), or module:function"
    proof.add_argument("--program", required=True, metavar="NAME", help=f"what they should compute: {names}")
    proof.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts, with the graphs as text")
    proof.set_defaults(run=command_verify)
    return parser


class _NoGpuIsNoError(logging.Filter):
    """JAX logs a traceback where its CUDA plugin is installed without a GPU, as it is where kernels are built ahead."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "plugin configuration error" not in record.getMessage()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    args = build_parser().parse_args(argv)
    logging.getLogger("jax._src.xla_bridge").addFilter(_NoGpuIsNoError())
    wide = None if sys.stdout.isatty() else TABLE_COLUMNS
    out, err = Console(width=wide), Console(stderr=True)
    try:
        if getattr(args, "rounds", None) is not None and args.rounds < 1:
            raise UsageError(f"--rounds: found {args.rounds}; allowed is 1 or more")
        return args.run(args, out, err)
    except UsageError as error:
        err.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return USAGE
    except OSError as error:
        err.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return ENVIRONMENT
    except KeyboardInterrupt:
        err.print("interrupted")
        return 130


def run() -> None:
    sys.exit(main())
