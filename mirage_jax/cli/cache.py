"""The command ``cache``: looks at stored decisions, and carries them to other machines."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mirage_jax import cache_files
from mirage_jax.cache import Cache
from mirage_jax.cache_files import StoredFile
from mirage_jax.cli.options import OK, PROBLEM, add_cache_dir
from mirage_jax.config import Options
from mirage_jax.errors import UsageError

DIGITS = 12  # of a key, that a table shows


def add_arguments(parser: ArgumentParser) -> None:
    """Add the actions of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action", parser_class=ArgumentParser)

    def action(name: str, run: object, text: str) -> ArgumentParser:
        found = actions.add_parser(name, help=text, allow_abbrev=False)
        add_cache_dir(found)
        found.set_defaults(run=run)
        return found

    action("list", run_list, "all decisions, with their times")
    action("show", run_show, "one decision").add_argument("key", help="the beginning of a key")
    action("verify", run_verify, "read every file, and prove every winner again")
    prune = action("prune", run_prune, "remove what no process with these packages reads")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    export = action("export", run_export, "write decisions to one file")
    export.add_argument("file", type=Path, help="a zip file to be made")
    export.add_argument("--device", default="", help="only of devices whose name has this part, such as H100")
    text = "for every build of this package that writes the same kernels, such as in a package of decisions"
    export.add_argument("--any-build", action="store_true", help=text)
    action("import", run_import, "add the decisions of a file").add_argument("file", type=Path, help="made by export")


def _cache(args: Namespace) -> Cache:
    """The cache that was asked for. Raises `UsageError` if it cannot be one."""
    return Cache(Options.make({"cache_dir": args.cache_dir}).cache_dir)


def run_list(args: Namespace, out: Console, err: Console) -> int:
    """Print a table of all decisions."""
    cache = _cache(args)
    table = Table(title=os.pathsep.join(map(str, cache.directories)))
    for name in ("key", "decision", "device", "made", "by", "note"):
        table.add_column(name, no_wrap=name == "key")
    for file in cache_files.stored_files(cache):
        table.add_row(*_row(file))
    out.print(table)
    return OK


def _row(file: StoredFile) -> tuple[str, ...]:
    if file.stored is None or file.key is None:
        return file.digest[:DIGITS], "-", "-", "-", "-", file.problem
    ratio = f" {file.ratio:.2f}x" if file.entry.decision == "win" and file.ratio else ""
    made = datetime.fromtimestamp(file.entry.created, UTC).strftime("%Y-%m-%d %H:%M")
    by = str(file.stored.own) or "somebody else"
    return file.digest[:DIGITS], file.entry.decision + ratio, file.key.device_kind, made, by, file.stale


def run_show(args: Namespace, out: Console, err: Console) -> int:
    """Print one decision."""
    file = cache_files.find(_cache(args), args.key)
    lines = [f"key: {file.digest}", f"file: {file.path}"]
    if file.key is not None:
        lines += [
            f"device: {file.key.device_kind} {file.key.compute_capability}".rstrip(),
            f"policy: {file.key.policy}",
        ]
        lines += [f"made with: {', '.join(f'{name} {v}' for name, v in (*file.key.versions, *file.key.settings) if v)}"]
        lines += [f"read here: {f'no, {file.stale}' if file.stale else 'yes'}", "the program:", file.key.graph]
    if file.stored is not None:
        times = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in file.entry.timings.items())
        lines += [f"decision: {file.entry.decision}", f"measured: {times or 'nothing'}"]
        lines += [f"note: {text}" for text in file.entry.reasons if text]
        lines += ["runs as:", file.entry.graph] if file.entry.graph else []
    out.print(
        "\n".join([*lines, *([f"problem: {file.problem}"] if file.problem else [])]), markup=False, highlight=False
    )
    return PROBLEM if file.problem else OK


def run_verify(args: Namespace, out: Console, err: Console) -> int:
    """Prove every stored winner again."""
    files = list(cache_files.stored_files(_cache(args)))
    wrong = list(cache_files.problems(files))
    for file, why in wrong:
        out.print(f"{file.path}: {why}", markup=False, highlight=False, soft_wrap=True)
    winners = sum(file.stored is not None and file.entry.decision == "win" for file in files)
    out.print(f"{len(files)} entries, {winners} winners, {len(wrong)} that cannot be used", highlight=False)
    return PROBLEM if wrong else OK


def run_prune(args: Namespace, out: Console, err: Console) -> int:
    """Remove files that no process reads."""
    gone = cache_files.prune(_cache(args), args.dry_run)
    for path, why in gone:
        out.print(f"{path}: {why}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"{len(gone)} files {'would be removed' if args.dry_run else 'removed'}", highlight=False)
    return OK


def run_export(args: Namespace, out: Console, err: Console) -> int:
    """Write an archive."""
    if args.file.exists():
        raise UsageError(f"file: {str(args.file)!r} exists; allowed is a new file")
    count = cache_files.export(_cache(args), args.file, args.device, args.any_build)
    out.print(f"{count} entries in {args.file}", markup=False, highlight=False, soft_wrap=True)
    return OK if count else PROBLEM


def run_import(args: Namespace, out: Console, err: Console) -> int:
    """Add the entries of an archive."""
    added, refused = cache_files.load(_cache(args), args.file)
    for line in refused:
        err.print(f"refused: {line}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"{added} entries added, {len(refused)} refused", highlight=False)
    return PROBLEM if refused else OK
