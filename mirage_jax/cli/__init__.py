"""The command line: ``python -m mirage_jax`` and one of the commands below.

Results go to standard output, progress and errors to standard error. Exit codes: 0 fine, 1 a problem was found, 2 wrong
usage, 3 the environment does not work. The module of a command is loaded when the command is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from rich.console import Console

from mirage_jax import log_topics
from mirage_jax.cli.options import ENVIRONMENT, OK, PROBLEM, USAGE
from mirage_jax.errors import UsageError

__all__ = ["ENVIRONMENT", "OK", "PROBLEM", "USAGE", "build_parser", "main", "run"]

TABLE_COLUMNS = 160  # characters in a line of tables that go to a file or a pipe
INTERRUPTED = 130  # exit code, as of a shell's

COMMANDS = {  # name -> module and function that add its arguments, help
    "bench": ("bench:add_arguments", "time XLA against the optimizer on a suite"),
    "cache": ("cache:add_arguments", "stored decisions: list, show, verify, prune, export, import"),
    "check": ("deploy:add_check", "source lines without a stored decision, for continuous integration"),
    "check-xla": ("xla:add_check", "is XLA's own code for a function as accurate as float64 says it can be?"),
    "compile": ("deploy:add_compile", "a file with the kernels of a function, for a GPU that need not be here"),
    "doctor": ("functions:add_doctor", "what works on this machine, and the fix for what does not"),
    "explain": ("functions:add_explain", "what is found for a function"),
    "mutate": ("audit:add_mutate", "wrong candidates, which must all be refused"),
    "rewrite": ("audit:add_rewrite", "right candidates written in another way, to be accepted"),
    "stress": ("audit:add_stress", "stored decisions: files, processes, signals"),
    "fuzz": ("audit:add_fuzz", "random programs, whole pipeline, against float64"),
    "preview": ("functions:add_preview", "kernels that would be tried on a GPU, which need not be here"),
    "trace": ("xla:add_trace", "device time of each region in a whole step, ours beside XLA's"),
    "verify": ("audit:add_verify", "are muGraphs saved by CMU's Mirage right?"),
}


class _CommandParser(argparse.ArgumentParser):
    """The parser of a command, which gets its arguments when the command is asked for."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.where = where

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Load the command, then parse its arguments."""
        if self.where:
            module, _, add = self.where.partition(":")
            getattr(importlib.import_module(f"mirage_jax.cli.{module}"), add)(self)
            self.where = ""
        return super().parse_known_args(args, namespace)


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line; parsed arguments have the function of their command as `run`."""
    parser = argparse.ArgumentParser(prog="mirage-jax", description="A superoptimizer for JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mirage-jax {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=_CommandParser)
    for name, (where, text) in COMMANDS.items():
        commands.add_parser(name, where=where, help=text)
    return parser


def _version() -> str:
    try:
        return metadata.version("mirage-jax")
    except metadata.PackageNotFoundError:
        return "(not installed)"


class _NoGpuIsNoError(logging.Filter):
    """JAX logs a traceback where its CUDA plugin is installed without a GPU, as it is where kernels are built ahead."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop the record of that traceback."""
        return "plugin configuration error" not in record.getMessage()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    log_topics.show_those_of_environment()
    logging.getLogger("jax._src.xla_bridge").addFilter(_NoGpuIsNoError())
    wide = None if sys.stdout.isatty() else TABLE_COLUMNS
    out, err = Console(width=wide), Console(stderr=True)
    args = build_parser().parse_args(argv)
    try:
        return args.run(args, out, err)
    except (UsageError, OSError) as error:
        err.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return USAGE if isinstance(error, UsageError) else ENVIRONMENT
    except KeyboardInterrupt:
        err.print("interrupted")
        return INTERRUPTED


def run() -> None:
    """Run the command of this process, and exit."""
    sys.exit(main())
