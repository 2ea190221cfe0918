"""Commands that look at XLA's code: `check-xla`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from mirage_jax.audit import xla
from mirage_jax.cli.functions import add_function, loaded
from mirage_jax.cli.options import OK, PROBLEM
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
