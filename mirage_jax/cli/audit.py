"""Commands that try to break the optimizer, and `verify`, which judges muGraphs of CMU's Mirage."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

from mirage_jax import progress
from mirage_jax.audit import campaigns, fuzz, mutants, rewrites, saved
from mirage_jax.audit.report import CampaignReport
from mirage_jax.audit.sources import Source, sources
from mirage_jax.cli.options import OK, PROBLEM, check_at_least, check_file, load_function, write
from mirage_jax.config import unknown
from mirage_jax.errors import UsageError
from mirage_jax.mirage_import.file import DATA_TYPES

type Command = Callable[[Namespace, Console, Console], int]


def _add_campaign(parser: ArgumentParser, run: Command) -> None:
    """Add the arguments that all campaigns have."""
    parser.add_argument("--seed", type=int, default=0, help="a number from 0 on")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write FILE, and the same as Markdown next to it")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run)


def _check(args: Namespace, **smallest: int) -> None:
    check_at_least(args, seed=0, **smallest)
    check_file(args.json)


def _progress(args: Namespace) -> AbstractContextManager[progress.Say]:
    """A line of progress, unless none is wanted."""
    return nullcontext(progress.silent) if args.quiet else progress.line()


def _finish(
    result: CampaignReport, args: Namespace, out: Console, err: Console, findings: Console | None = None
) -> int:
    """Show and write the result of a campaign, its findings on `findings` or else on `out`."""
    out.print(result.table())
    for finding in result.findings():
        (findings or out).print(finding, highlight=False, markup=False, soft_wrap=True)
    write(result, args.json, err)
    return OK if result.passed else PROBLEM


def _sources(args: Namespace, err: Console) -> list[Source]:
    """Right candidates, from which a campaign starts."""
    _check(args, count=1)
    if not args.quiet:
        err.print("searching for right candidates", highlight=False)
    return sources(args.seed)


def add_mutate(parser: ArgumentParser) -> None:
    """Add the arguments of `mutate`."""
    parser.add_argument("--count", type=int, default=3000, help="how many that are not equivalent (default: 3000)")
    _add_campaign(parser, mutate)


def mutate(args: Namespace, out: Console, err: Console) -> int:
    """Try wrong candidates on the verifier."""

    def notify(result: mutants.MutantReport) -> None:
        """Write the report so far: a long campaign may be interrupted."""
        if not args.quiet:
            err.print(result.summary(), highlight=False)
        if args.json is not None:
            result.write(args.json)

    return _finish(mutants.mutate(_sources(args, err), args.count, args.seed, notify=notify), args, out, err)


def add_rewrite(parser: ArgumentParser) -> None:
    """Add the arguments of `rewrite`."""
    parser.add_argument("--count", type=int, default=400, help="how many (default: 400)")
    _add_campaign(parser, rewrite)


def rewrite(args: Namespace, out: Console, err: Console) -> int:
    """Try right candidates on the verifier."""
    return _finish(rewrites.rewrite(_sources(args, err), args.count, args.seed), args, out, err)


def add_stress(parser: ArgumentParser) -> None:
    """Add the arguments of `stress`."""
    kinds = ", ".join(f"{name} ({count:,})" for name, (_, count) in campaigns.RUNS.items())
    parser.add_argument("--kind", choices=campaigns.RUNS, default="entries", help="what happens to them")
    parser.add_argument("--count", type=int, help=f"how many cases (default: {kinds})")
    _add_campaign(parser, stress)


def stress(args: Namespace, out: Console, err: Console) -> int:
    """Run a campaign against stored decisions."""
    _check(args, count=1)
    campaign, published_count = campaigns.RUNS[args.kind]
    with _progress(args) as say:
        result = campaign(args.count or published_count, args.seed, say)
    return _finish(result, args, out, err)


def add_fuzz(parser: ArgumentParser) -> None:
    """Add the arguments of `fuzz`."""
    parser.add_argument("--programs", type=int, default=300, metavar="N", help="how many (default: 300)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    where = "where programs run; on a GPU all regions get kernels, and these run (default: cpu)"
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help=where)
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), metavar="DIR", help="scripts of failures")
    _add_campaign(parser, run_fuzz)


def run_fuzz(args: Namespace, out: Console, err: Console) -> int:
    """Run random programs through the whole optimizer."""
    check_at_least(args, programs=1, workers=1)
    check_file(args.json)
    platform = {"cpu": "cpu", "gpu": "cuda"}[args.device]
    if skipped := fuzz.skipped(platform):
        err.print(skipped, highlight=False, markup=False, soft_wrap=True)
    with _progress(args) as say:
        result = fuzz.campaign(args.programs, args.seed, args.out, args.workers, say, platform)
    return _finish(result, args, out, err, findings=err)


def add_verify(parser: ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    parser.add_argument("file", type=Path, help="a JSON file of saved muGraphs")
    names = f"{', '.join(saved.PROGRAMS)} (as Mirage's benchmark defines them), or module:function"
    parser.add_argument("--program", required=True, metavar="NAME", help=f"what they should compute: {names}")
    parser.add_argument(
        "--data-types", choices=DATA_TYPES, help="the version of Mirage that wrote the file, where it does not tell"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts, with the graphs as text")
    parser.set_defaults(run=verify)


def verify(args: Namespace, out: Console, err: Console) -> int:
    """Judge the muGraphs of a file against a program."""
    if args.program in saved.PROGRAMS:
        function = saved.PROGRAMS[args.program]
    elif ":" in args.program:
        function = load_function(args.program)
    else:
        raise UsageError(f"--program: {unknown('program', args.program, saved.PROGRAMS)}, or module:function")
    verdicts = saved.examine(args.file, args.program, function, args.data_types)
    out.print(verdicts.table())
    if args.json is not None:
        args.json.write_text(verdicts.to_json())
        err.print(f"written: {args.json}", highlight=False)
    return OK if verdicts.all_certified else PROBLEM
