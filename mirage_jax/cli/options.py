"""Arguments that several commands share, and their checks."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mirage_jax.config import BACKENDS, ON_MISS, Budget, directories_in, unknown
from mirage_jax.errors import UsageError

if TYPE_CHECKING:
    from mirage_jax.bench.tables import TableReport

OK, PROBLEM, USAGE, ENVIRONMENT = range(4)  # exit codes

OPTIMIZER_OPTIONS = ("on_miss", "budget", "backend", "cache_dir", "strict", "strict_range", "devices")


def add_optimizer_options(parser: argparse.ArgumentParser, on_miss: Sequence[str] = ON_MISS) -> None:
    """Add the options of `optimize`. on_miss: those values that the command knows."""
    budget = "time for one search: 30s, 2m, ..; 20s/5m: for one, and for all of a function"
    parser.add_argument("--budget", help=budget)
    workers = "processes for a search (default: one for two processors)"
    parser.add_argument("--workers", type=int, metavar="N", help=workers)
    parser.add_argument("--on-miss", choices=on_miss, help="what to do where no winner is stored")
    parser.add_argument("--backend", choices=BACKENDS)
    add_cache_dir(parser)
    strict = {"action": "store_true", "default": None}
    parser.add_argument("--strict", help="raise instead of falling back to XLA", **strict)
    parser.add_argument("--strict-range", help="refuse what overflows before XLA does, in any type", **strict)
    parser.add_argument("--devices", metavar="0,2", help="local devices that measure (default: the first)")


def add_cache_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option for one directory of stored decisions, or several."""
    text = f"where decisions are stored; of several, with {os.pathsep!r} between them, the first is written"
    parser.add_argument("--cache-dir", type=directories_in, metavar="DIR", help=text)


def optimizer_options(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the options of `optimize` that were given on the command line."""
    given = {name: getattr(args, name) for name in OPTIMIZER_OPTIONS}
    if args.workers is not None:
        given["budget"] = replace(Budget.parse(args.budget), workers=args.workers)
    return {name: value for name, value in given.items() if value is not None}


def check_at_least(args: argparse.Namespace, **smallest: int) -> None:
    """Raise `UsageError` for a number that was given and is too small."""
    for name, least in smallest.items():
        if (found := getattr(args, name)) is not None and found < least:
            raise UsageError(f"--{name}: found {found}; allowed is {least} or more")


def check_file(file: Path | None) -> None:
    """Raise `UsageError` if results cannot be written to a file because it is a directory."""
    if file is not None and file.is_dir():
        raise UsageError(f"--json: {str(file)!r} is a directory; allowed is a file")


def load_function(where: str) -> Callable[..., object]:
    """Load ``package.module:function``, importable from the current directory as with ``python -m``.

    Raises `UsageError` if there is no such function.
    """
    module, _, name = where.partition(":")
    if not module or not name:
        raise UsageError(f"function: found {where!r}; allowed is module:function")
    sys.path.insert(0, os.getcwd())
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


def write(result: TableReport, file: Path | None, err: Console) -> None:
    """Write a result to the file that was asked for, if one was."""
    if file is not None:
        err.print(f"written: {file}, {result.write(file)}", highlight=False)
