"""All stored decisions of a cache directory at once: list, prove, prune, and carry them to another machine.

An archive is a zip file of entries as they lie in the cache, with their kernels for people to read. Seals travel along:
on another machine an entry is somebody else's, and is checked further when it is first read (`compiler.stored`).
"""

from __future__ import annotations

import re
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mirage_jax.cache import (
    MAX_ENTRY_BYTES,
    Cache,
    CacheKey,
    Entry,
    Stored,
    UnsafeDirectory,
    decode,
    encode,
    key_in,
    read_file,
    versions,
    write_file,
)
from mirage_jax.errors import CacheError, MirageError, UsageError, in_one_line
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.verify.equivalence.certificate import certify

MAX_ARCHIVE_ENTRIES = 100_000  # of an archive that is read
TEMPORARY_SECONDS = 86400.0  # seconds after which a file that was not finished is nobody's
_NAME = re.compile(r"v\d+/([0-9a-f]{2})/(\1[0-9a-f]{62})\.(json|py)")


@dataclass(frozen=True)
class StoredFile:
    """A file of the cache with its key and its entry, or the reason why it cannot be used."""

    path: Path
    key: CacheKey | None = None
    stored: Stored | None = None
    problem: str = ""

    @property
    def digest(self) -> str:
        """The digest of the key, as the file's name says."""
        return self.path.stem

    @property
    def entry(self) -> Entry:
        """The stored decision. Raises `CacheError` for a file that cannot be used."""
        if self.stored is None:
            raise CacheError(self.problem)
        return self.stored.entry

    @property
    def ratio(self) -> float | None:
        """XLA's time over ours, of a winner that was measured."""
        times = {} if self.stored is None else self.stored.entry.timings
        return times["xla"] / times["mirage"] if min(times.get("xla", 0), times.get("mirage", 0)) > 0 else None

    @property
    def stale(self) -> str:
        """Why no process with these packages reads the file; empty if one may."""
        if self.stored is None or self.key is None:
            return self.problem
        if self.key.is_read_here:
            return self.entry.outdated(time.time())
        now, then = dict(versions()), dict(self.key.versions)
        changed = [name for name in now if then.get(name) != now[name]]
        return "made with " + ", ".join(f"{name} {then.get(name) or '(none)'}" for name in changed)


def stored_files(cache: Cache) -> Iterator[StoredFile]:
    """Read every entry of a cache."""
    for path in cache.files():
        try:
            yield _parsed(path, read_file(path))
        except (OSError, CacheError) as error:
            yield StoredFile(path, problem=in_one_line(error))


def _parsed(path: Path, raw: bytes) -> StoredFile:
    """Read an entry whose key nobody has given: the key is the one that is stored, and has to fit the file's name."""
    key = key_in(raw)
    if key.digest != path.stem:
        raise CacheError("it belongs to another key")
    return StoredFile(path, key, decode(raw, key))


def find(cache: Cache, digest: str) -> StoredFile:
    """The entry whose key begins with these digits.

    Raises:
        UsageError: there is none, or there are several.
    """
    found = [f for f in stored_files(cache) if f.digest.startswith(digest)]
    if len(found) != 1:
        raise UsageError(f"key: {digest!r} is the beginning of {len(found)} keys; allowed is the beginning of one")
    return found[0]


def proof(file: StoredFile) -> str:
    """Why an entry is right: a winner is certified against its program again.

    Raises:
        MirageError: the entry is damaged, or the winner is another function.
    """
    if file.entry.decision != "win" or file.key is None:
        return "nothing to prove"
    program, ours = simplify_axes(parse(file.key.graph)), parse(file.entry.graph or "")
    check_graph(ours)
    return str(certify(program, ours))


def problems(files: Iterable[StoredFile]) -> Iterator[tuple[StoredFile, str]]:
    """Each entry that cannot be used or proven, and why."""
    for file in files:
        try:
            proof(file)
        except MirageError as error:
            yield file, file.problem or in_one_line(error)


def prune(cache: Cache, dry: bool = False) -> list[tuple[Path, str]]:
    """Remove files that no process with these packages reads; returns them with the reasons. `dry` removes nothing.

    Directories that are only read stay as they are.
    """
    own = (f for f in stored_files(cache) if f.path.is_relative_to(cache.directory))
    gone = [(f.path, f.stale) for f in own if f.stale]
    gone += [(path, "damaged") for path in sorted(cache.root.glob("[0-9a-f][0-9a-f]/*.bad"))]
    for path in sorted(cache.root.glob("[0-9a-f][0-9a-f]/.*.tmp")):
        if time.time() - path.stat().st_mtime > TEMPORARY_SECONDS:
            gone.append((path, "not finished"))
    if not dry:
        for path, _ in gone:
            path.unlink(missing_ok=True)
            path.with_suffix(".py").unlink(missing_ok=True)
    return gone


def export(cache: Cache, archive: Path, device: str = "", any_build: bool = False) -> int:
    """Write the entries that can be used here to a zip file; returns how many. `device`: a part of the kind's name.

    any_build: for every build of this package that writes the same kernels, not for this one alone. What only speeds up
    a search stays here, and so do kernels for people to read.
    """
    count = 0
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for file in stored_files(cache):
            if file.stale or file.key is None or device.lower() not in file.key.device_kind.lower():
                continue
            if not any_build:
                members = [(str(p.relative_to(p.parents[2])), p.read_bytes()) for p in _with_kernels(file.path)]
            elif file.entry.holds_for_any_build:
                key = file.key.any_build
                members = [(str(cache.path(key).relative_to(cache.directory)), encode(key, file.entry))]
            else:
                continue
            count += 1
            for name, raw in members:
                out.writestr(name, raw)
    return count


def _with_kernels(path: Path) -> list[Path]:
    """The files of one entry."""
    return [p for p in (path, path.with_suffix(".py")) if p.is_file()]


def load(cache: Cache, archive: Path) -> tuple[int, list[str]]:
    """Add an archive's entries to a cache; entries that are there stay. Returns the number added, and the refusals.

    Raises:
        UsageError: the file is no archive, or others may write to the cache directory.
    """
    added, refused = 0, list[str]()
    try:
        with zipfile.ZipFile(archive) as found:
            members = [m for m in found.infolist() if m.filename.endswith(".json")][:MAX_ARCHIVE_ENTRIES]
            for member in members:
                try:
                    added += _load(cache, found, member)
                except (CacheError, zipfile.BadZipFile) as error:
                    refused.append(f"{member.filename}: {in_one_line(error)}")
    except zipfile.BadZipFile as error:
        raise UsageError(f"file: {str(archive)!r} is no archive of decisions ({error})") from None
    return added, refused


def _load(cache: Cache, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    name = _NAME.fullmatch(member.filename)
    if name is None or member.file_size > MAX_ENTRY_BYTES:
        raise CacheError("neither its name nor its size is that of an entry")
    raw = archive.read(member)
    file = _parsed(Path(member.filename), raw)
    assert file.key is not None
    path = cache.path(file.key)
    if path.exists():
        return False
    try:
        cache.make_directories(path)
    except UnsafeDirectory as error:
        raise UsageError(f"cache directory: {error}") from None
    write_file(path, raw)
    return True
