"""Commands about XLA's code for one function: `check-xla`, and `trace`, which times each region."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import mirage_jax
from mirage_jax.audit import xla
from mirage_jax.bench.region_times import region_times
from mirage_jax.cli.functions import add_function, loaded
from mirage_jax.cli.options import OK, PROBLEM, add_optimizer_options, optimizer_options
from mirage_jax.errors import UnsupportedError, UsageError


def add_check(parser: ArgumentParser) -> None:
    """Add the arguments of `check-xla`."""
    add_function(parser, "f32[128,64] bf16[64]")
    only = "a class of inputs, such as normal; may be given several times (default: all)"
    parser.add_argument("--inputs", action="append", default=[], metavar="CLASS", help=only)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=check)


def check(args: Namespace, out: Console, err: Console) -> int:
    """Compare XLA's code for a function with float64, and print the findings."""
    del err
    function, arguments = loaded(args)
    try:
        report = xla.check(function, arguments, args.inputs, args.function)
    except UnsupportedError as why:
        raise UsageError(f"check-xla: {why}") from None
    if args.json:
        out.print(report.to_json(), highlight=False, markup=False, soft_wrap=True)
    else:
        out.print(report.table() if report.findings else report.heading, highlight=False)
        for line in report.causes():
            out.print(line, highlight=False, markup=False, soft_wrap=True)
    return PROBLEM if report.findings else OK


def add_trace(parser: ArgumentParser) -> None:
    """Add the arguments of `trace`."""
    add_optimizer_options(parser)
    add_function(parser, "f32[128,64] bf16[64]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the profiles, for xprof or Perfetto")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    parser.set_defaults(run=trace)


def trace(args: Namespace, out: Console, err: Console) -> int:
    """Profile a function under XLA and as it is optimized, and print the times of its regions."""
    function, arguments = loaded(args)
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise UsageError(f"--out: {str(args.out)!r} is a file; allowed is a folder")
    optimized = mirage_jax.optimize(function, **optimizer_options(args))
    with TemporaryDirectory(prefix="mirage_jax") as folder:
        times = region_times(optimized, arguments, args.out or Path(folder))
    if args.json:
        out.print(times.to_json(), highlight=False, markup=False, soft_wrap=True)
        return OK
    for line in filter(None, (times.note, times.whole and f"the whole function: {times.whole}")):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    out.print(times.table())
    if args.out is not None:
        err.print(f"profiles: {args.out}", highlight=False, markup=False, soft_wrap=True)
    return OK
