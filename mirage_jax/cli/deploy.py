"""Commands that prepare a function for other machines: compile and check."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console

import mirage_jax
from mirage_jax import exporting
from mirage_jax.cli.functions import add_function, loaded
from mirage_jax.cli.options import OK, PROBLEM, add_optimizer_options, optimizer_options
from mirage_jax.errors import UsageError
from mirage_jax.hardware.gpus import CAPABILITIES, GPUS
from mirage_jax.report import RegionReport
from mirage_jax.why_not import Reason

UNASKED = " and on_miss='fallback'"  # a reason that is this command's own
EXAMPLE = "f16[128,64] f16[64]"


def _add_gpu(parser: ArgumentParser, required: bool) -> None:
    text = f"a GPU that need not be here: sm_{max(CAPABILITIES)}, sm_90, ..., or {', '.join(GPUS)}"
    parser.add_argument("--for", dest="gpu", metavar="GPU", required=required, help=text)


def add_compile(parser: ArgumentParser) -> None:
    """Add the arguments of `compile`."""
    add_optimizer_options(parser)
    add_function(parser, EXAMPLE)
    _add_gpu(parser, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the file to write, for jax.export.deserialize")
    parser.set_defaults(run=compile_function)


def compile_function(args: Namespace, out: Console, err: Console) -> int:
    """Write a function with its kernels to a file, and print how each region was decided."""
    del err
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise UsageError(f"--out: found {str(args.out)!r}; allowed is a file in a folder that exists")
    function, arguments = loaded(args)
    found = exporting.exported(mirage_jax.optimize(function, **optimizer_options(args)), arguments, {}, args.gpu)
    data = found.program.serialize()
    args.out.write_bytes(data)
    lines = [*_decisions(found, args), f"written: {args.out}, {len(data):,} bytes, {found.kernels} calls of kernels"]
    lines.append(f"to run it: jax {jax.__version__} with its CUDA plugin, on {found.gpu}")
    out.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    return OK if found.kernels else PROBLEM


def _decisions(found: exporting.Exported, args: Namespace) -> Iterator[str]:
    """Lines about all regions, and what could not be checked."""
    yield from map(_decided, found.report.regions)
    if found.report.whole is not None:
        yield f"whole function: {found.report.whole}"
    yield from (f"note: {note}" for note in found.report.notes)
    evidence = [text for r in found.report.regions for text in (r.decision.gate, r.decision.exact)]
    if any(exporting.NOT_RUN in text for text in evidence):
        yield (
            "note: kernels cannot run here, so the float gate saw some as plain JAX, and nothing was measured here;"
            f" on such a GPU, this tests and measures them: {_deciding(args)}"
        )


def _decided(region: RegionReport) -> str:
    """One line about a region: where it is, who computes it, why, and the evidence."""
    d = region.decision
    evidence = [f"certificate: {d.certificate}", f"exact check: {d.exact}", f"float gate: {d.gate}"] if d.winner else []
    return "; ".join([f"{_place(region)}: {d.verdict}: {d.why} [{d.source}]", *evidence])


def _place(region: RegionReport) -> str:
    return ", ".join(region.places) or "unknown line"


def add_check(parser: ArgumentParser) -> None:
    """Add the arguments of `check`."""
    add_optimizer_options(parser, on_miss=("error", "fallback"))
    add_function(parser, EXAMPLE)
    _add_gpu(parser, required=False)
    parser.set_defaults(run=check_decisions)


def check_decisions(args: Namespace, out: Console, err: Console) -> int:
    """Print regions that no stored decision is about. That is a problem, unless on_miss is "fallback"."""
    del err
    function, arguments = loaded(args)
    options = optimizer_options(args)
    options["on_miss"] = "fallback"  # which decides nothing, and goes on with the next region
    f = mirage_jax.optimize(function, **options)
    report = (exporting.for_gpu(f, args.gpu) if args.gpu else f).explain(*arguments)
    missing = [r for r in report.regions if r.decision.why_not and r.decision.why_not.reason is Reason.UNDECIDED]
    lines = [f"{_place(region)}: {region.decision.why.removesuffix(UNASKED)}" for region in missing]
    lines.append(f"{len(report.regions)} regions, {len(missing)} without a stored decision")
    if missing:
        where = f" on {args.gpu}" if args.gpu else ""
        lines.append(f"to decide them{where}: {_deciding(args)}")
    out.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    return PROBLEM if missing and args.on_miss != "fallback" else OK


def _deciding(args: Namespace) -> str:
    """The command that decides the same regions, with those options that are part of their keys."""
    words = ["python", "-m", "mirage_jax", "explain", args.function, args.arguments, "--on-miss", "search"]
    words += ["--backend", args.backend] if args.backend else []
    words += ["--strict-range"] if args.strict_range else []
    if args.cache_dir:
        words += ["--cache-dir", args.cache_dir if isinstance(args.cache_dir, str) else os.pathsep.join(args.cache_dir)]
    return shlex.join(words)
