"""Commands about one function or this machine: explain, preview, doctor."""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

import jax
from rich.console import Console

import mirage_jax
from mirage_jax import doctor
from mirage_jax.cli.options import ENVIRONMENT, OK, add_optimizer_options, load_function, optimizer_options
from mirage_jax.config import Budget, unknown
from mirage_jax.errors import UsageError, in_one_line
from mirage_jax.hardware.gpus import GPUS
from mirage_jax.mugraph.dtypes import DTYPES
from mirage_jax.preview import preview
from mirage_jax.summary import summarize

_AVAL = re.compile(r"\s*(\w+)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]\s*;?")


def parse_arguments(text: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Parse types such as ``"f32[128,64] bf16[64]"``. Raises `UsageError` for any other text."""
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


def loaded(args: Namespace) -> tuple[Callable[..., object], tuple[jax.ShapeDtypeStruct, ...]]:
    """Load the function and the types of its arguments, which fit it.

    Raises:
        UsageError: there is no such function, or it does not take such arguments.
    """
    function, arguments = load_function(args.function), parse_arguments(args.arguments)
    _check_arguments(function, arguments)
    return function, arguments


def _check_arguments(function: Callable[..., object], arguments: Sequence[object]) -> None:
    """Raise `UsageError` if the function does not take so many arguments, or not these shapes and types."""
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


def add_function(parser: ArgumentParser, example: str) -> None:
    """Add the arguments that name a function and the types of its arguments."""
    parser.add_argument("function", help="module:function")
    parser.add_argument("arguments", help=f"types of its arguments: {example!r}")


def add_explain(parser: ArgumentParser) -> None:
    """Add the arguments of `explain`."""
    add_optimizer_options(parser)
    add_function(parser, "f32[128,64] bf16[64]")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--brief", action="store_true", help="a few lines per region")
    form.add_argument("--json", action="store_true", help="the whole report as JSON")
    parser.add_argument("--save", metavar="FILE", help="also write the report to a file: .html, .json or .txt")
    parser.set_defaults(run=explain)


def explain(args: Namespace, out: Console, err: Console) -> int:
    """Print the report on a function."""
    del err
    function, arguments = loaded(args)
    report = mirage_jax.optimize(function, **optimizer_options(args)).explain(*arguments)
    text = report.to_json() if args.json else summarize(report) if args.brief else str(report)
    out.print(text, highlight=False, markup=False, soft_wrap=True)
    if args.save is not None:
        report.save(args.save)
    return OK


def add_preview(parser: ArgumentParser) -> None:
    """Add the arguments of `preview`."""
    add_function(parser, "f16[128,64] f16[64]")
    parser.add_argument("--device", default="H200", help=f"{', '.join(GPUS)} (default: H200)")
    parser.add_argument("--budget", help="time for one search: 30s, 2m, ...")
    parser.set_defaults(run=show_preview)


def show_preview(args: Namespace, out: Console, err: Console) -> int:
    """Print the kernels that would be tried for a function."""
    del err
    text = preview(*loaded(args), args.device, Budget.parse(args.budget))
    out.print(text, highlight=False, markup=False, soft_wrap=True)
    return OK


def add_doctor(parser: ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=examine_machine)


def examine_machine(args: Namespace, out: Console, err: Console) -> int:
    """Examine this machine, and print the findings."""
    del err
    checks = doctor.examine()
    if args.json:
        out.print(doctor.to_json(checks), highlight=False, markup=False, soft_wrap=True)
    else:
        doctor.show(checks, out)
    return ENVIRONMENT if any(check.status == "problem" for check in checks) else OK
