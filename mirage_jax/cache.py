"""Winners on disk: one canonical JSON file per key, written whole or not at all, believed only after checking.

    <cache directory>/v3/ab/abcd....json     the decision for one region on one device, with the key's full preimage
    <cache directory>/v3/ab/abcd....py       its kernels, for people to read; nothing here ever runs it

A key names everything that may change the answer: the region's muGraph, extents and equations, the device, versions and
settings. The file's name is the key's digest, but a hit also needs the stored preimage to be equal. A file that is
torn, rotten, foreign to its key, out of `bounds`, oversized, a symlink or open to others is one logged line, moved
aside, and a miss. The checksum is against rot. Whose an entry is, its seals say (`seals`): one that this user has not
sealed on this machine is read too, from a directory of another user as well, and the caller checks it further. Whoever
can write here gets data into the optimizer and never code: a winner is parsed as a muGraph; the caller certifies it and
generates its kernels again.

No failure of the file system reaches the program: there is one warning, and nothing is read or stored while it lasts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import socket
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import platformdirs

from mirage_jax import extension_modules, limits
from mirage_jax.children import source_digest
from mirage_jax.config import directories_in, is_address
from mirage_jax.errors import CacheError, printable
from mirage_jax.hardware.host import processors
from mirage_jax.seals import KEY_FILE_VARIABLE, Seal, own_key
from mirage_jax.why_not import WhyNot

log = logging.getLogger("mirage_jax.cache")

ENTRY_POINTS = "mirage_jax.decisions"  # entry points of packages that bring decisions
SCHEMA = 3
MAX_ENTRY_BYTES = 1 << 20
MAX_COMPARED_KEYS = 512  # newest entries that are compared with a key that has none
MAX_SEALS = 16  # of different users and machines on one entry
XLA_LIFETIME_SECONDS = 30 * 86400.0  # seconds: that nothing won is worth asking again after a month
OPTIONAL = {"why_not", "variants", "kernels"}  # fields that an entry may lack
MAX_VARIANTS = 16  # of an entry
DECISIONS = ("win", "xla", "structures", "whole")
BUILD = ("mirage-jax", "source")  # parts of a key that name one build of this package
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "triton", "jax-triton", BUILD[0])
SETTINGS = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE", "LIBTPU_INIT_ARGS")
DEBUGGING_FLAGS = ("--xla_dump_", "--xla_hlo_profile", "--xla_gpu_dump_")  # beginnings of flags of XLA

_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)  # parsing all of the metadata takes ten times as long

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None


def canonical(value: object) -> bytes:
    """The one spelling of a JSON value; ValueError or TypeError if it is not one (NaN and infinities are not)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Installed versions of every package that can change an answer."""

    def version(name: str) -> str:
        """The version of a package; empty if it is not installed."""
        try:
            text = metadata.distribution(name).read_text("METADATA") or ""
        except metadata.PackageNotFoundError:
            return ""
        return found.group(1) if (found := _VERSION.search(text)) else metadata.version(name)

    return (*((name, version(name)) for name in PACKAGES), (BUILD[1], source_digest()))


def settings(platform: str) -> tuple[tuple[str, str], ...]:
    """Settings outside of the program that change results or times of XLA and of kernels on a platform.

    On a GPU that is not the number of processors. Flags that only dump or log change nothing.
    """
    config = {
        "x64": str(jax.config.jax_enable_x64),
        "matmul_precision": str(jax.config.jax_default_matmul_precision),
    }
    if platform == "cpu":
        config["cpus"] = str(processors())
    if extensions := extension_modules.digest():
        config["extensions"] = extensions
    given = {name: os.environ.get(name, "") for name in SETTINGS}
    given["XLA_FLAGS"] = " ".join(f for f in given["XLA_FLAGS"].split() if not f.startswith(DEBUGGING_FLAGS))
    return tuple(sorted((config | given).items()))


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything that may change the decision for a region. Two keys are the same iff their preimages are."""

    graph: str  # the region's muGraph in text form, with dtypes
    extents: tuple[tuple[str, int], ...]
    backend: str
    policy: str  # names the rules of acceptance: verifier, tolerances, noise margin
    device_kind: str
    compute_capability: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    schema: int = SCHEMA

    @classmethod
    def here(cls, *, graph: str, extents: Mapping[str, int], backend: str, policy: str, device: Any) -> Self:
        """The key of a region on this `jax.Device`, with this process's versions and settings."""
        return cls(
            graph=graph,
            extents=tuple(sorted(extents.items())),
            backend=backend,
            policy=policy,
            device_kind=f"{device.platform}: {device.device_kind}",
            compute_capability=str(getattr(device, "compute_capability", "")),
            versions=versions(),
            settings=settings(device.platform),
        )

    @classmethod
    def from_json(cls, value: object) -> Self:
        """A key as it was stored; raises `CacheError`."""
        if not isinstance(value, dict) or set(value) != {f.name for f in fields(cls)}:
            raise CacheError("the key's fields are not those of this schema")
        text = lambda name: limits.text(name, value[name])  # noqa: E731
        return cls(
            graph=_graph(value["graph"]),
            extents=tuple((limits.text("axis", a), n) for a, n in _pairs("extents", value["extents"])),
            backend=text("backend"),
            policy=text("policy"),
            device_kind=text("device_kind"),
            compute_capability=text("compute_capability"),
            versions=_text_pairs("versions", value["versions"]),
            settings=_text_pairs("settings", value["settings"]),
            schema=limits.whole("schema", value["schema"], 0, SCHEMA),
        )

    @property
    def any_build(self) -> Self:
        """The key under which every build of this package finds an entry whose kernels it would write the same."""
        return replace(self, versions=tuple((name, "" if name in BUILD else v) for name, v in self.versions))

    @property
    def is_read_here(self) -> bool:
        """Whether a process with these packages looks for the key."""
        here = replace(self, versions=versions())
        return self in (here, here.any_build)

    @property
    def preimage(self) -> bytes:
        """The bytes that the digest is made of."""
        return canonical(asdict(self))

    @property
    def digest(self) -> str:
        """SHA-256 of the key, in hex: the name of its file."""
        return hashlib.sha256(self.preimage).hexdigest()


@dataclass(frozen=True)
class Entry:
    """What was decided for a key. "win": `graph` beats XLA, with `schedule` and `certificate`. "xla": nothing does.

    "structures" is no decision: `schedule` holds what a search found, without sizes, for regions of the same structure.
    "whole" is about a whole function (`compiler.whole_function`), and names the variant that runs.
    """

    decision: str
    graph: str | None = None
    schedule: Json = None
    certificate: Json = None
    timings: Mapping[str, float] = field(default_factory=dict)  # label -> seconds
    measured: Sequence[tuple[float, float]] = ()  # of each variant that was timed: the model's seconds, and real ones
    reasons: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # where it was measured; for people
    created: float = 0.0  # seconds since 1970
    why_not: WhyNot | None = None  # of "xla"; entries made before there was such a record lack the field
    variants: tuple[tuple[str, Json, float | None], ...] = ()  # that were tried: graph, schedule, seconds
    kernels: str = ""  # digest of the text that was measured: another build of this package may write another one

    def __post_init__(self) -> None:
        if self.decision not in DECISIONS:
            raise CacheError(f"decision {self.decision!r} is none of {', '.join(DECISIONS)}")
        if (self.decision == "win") != (self.graph is not None):
            raise CacheError("an entry has a winner's graph if and only if something won")

    def outdated(self, now: float) -> str:
        """Say why the decision has to be made again at a time, in seconds since 1970; empty if it stands."""
        age = now - self.created
        if self.decision != "xla" or -limits.MAX_CLOCK_SKEW_SECONDS <= age <= XLA_LIFETIME_SECONDS:
            return ""
        return f"that nothing beats XLA was decided {'too long ago' if age > 0 else 'by a clock that is ahead'}"

    @property
    def holds_for_any_build(self) -> bool:
        """Whether it may serve another build of this package: one for XLA, or one with kernels that can be compared."""
        return self.decision == "xla" or (self.decision in ("win", "whole") and bool(self.kernels))

    def to_json(self) -> dict[str, Any]:
        """As values of JSON. `OPTIONAL` fields without a value are left out, so that old entries keep their seals."""
        found = asdict(replace(self, why_not=None))
        optional: dict[str, Any] = {"variants": [list(v) for v in self.variants], "kernels": self.kernels}
        optional["why_not"] = self.why_not and self.why_not.to_json()
        return {k: v for k, v in found.items() if k not in OPTIONAL} | {k: v for k, v in optional.items() if v}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """An entry as it was stored, every number and text within `bounds`; raises `CacheError`."""
        names = {f.name for f in fields(cls)}
        if not isinstance(value, dict) or set(value) | OPTIONAL != names:
            raise CacheError("the entry's fields are not those of this schema")
        measured = limits.items("measured", value["measured"], limits.MAX_TIMED_VARIANTS)
        pairs = [limits.items("measured", pair, 2) for pair in measured]
        if any(len(pair) != 2 for pair in pairs):
            raise CacheError("a measured variant is not a pair of times")
        reasons = limits.items("reasons", value["reasons"], limits.MAX_TEXTS_PER_FIELD)
        timings = limits.mapping("timings", value["timings"])
        environment = limits.mapping("environment", value["environment"])
        return cls(
            decision=limits.text("decision", value["decision"]),
            graph=None if value["graph"] is None else _graph(value["graph"]),
            schedule=_structures(value["schedule"]),
            certificate=value["certificate"],
            timings={limits.text("label", k): limits.real("timing", v, limits.MAX_SECONDS) for k, v in timings.items()},
            measured=tuple((_seconds(a), _seconds(b)) for a, b in pairs),
            reasons=tuple(limits.text("reason", x) for x in reasons),
            environment={limits.text("name", k): limits.text("environment", v) for k, v in environment.items()},
            created=limits.real("created", value["created"], limits.MAX_UNIX_SECONDS),
            why_not=WhyNot.from_json(value.get("why_not")),
            variants=tuple(map(_variant, limits.items("variants", value.get("variants", []), MAX_VARIANTS))),
            kernels=limits.text("kernels", value.get("kernels", "")),
        )


def _pairs(name: str, value: object) -> Iterator[tuple[Any, Any]]:
    for pair in limits.items(name, value, limits.MAX_TEXTS_PER_FIELD):
        if len(limits.items(name, pair, 2)) != 2:
            raise CacheError(f"{name}: found something else than pairs")
        yield pair[0], pair[1]


def _text_pairs(name: str, value: object) -> tuple[tuple[str, str], ...]:
    return tuple((limits.text(name, a), limits.text(name, b)) for a, b in _pairs(name, value))


def _seconds(value: object) -> float:
    return limits.real("measured", value, limits.MAX_SECONDS)


def _variant(value: object) -> tuple[str, Json, float | None]:
    parts = limits.items("variant", value, 3)
    if len(parts) != 3:
        raise CacheError(f"variant: found {len(parts)} values; allowed are a graph, a schedule and a time")
    return _graph(parts[0]), parts[1], None if parts[2] is None else _seconds(parts[2])


def _graph(value: object) -> str:
    """The text of a muGraph, whose names are shown to people."""
    if not isinstance(value, str) or not all(line.isprintable() for line in value.split("\n")):
        raise CacheError("the graph is not a text of characters that can be seen")
    return value


def _structures(value: Json) -> Json:
    """A schedule, which its own reader bounds, or a list of structures."""
    return list(limits.items("structures", value, limits.MAX_STRUCTURES)) if isinstance(value, list) else value


# File contents: {"entry":{..},"key":{..},"seals":{..},"sha256":".."}\n, canonical. The digest is of all that precedes
# its field, each seal of {"entry":{..},"key":{..}}.

_CHECKSUM = b',"sha256":"'
_TAIL = b'"}\n'
_END_LENGTH = len(_CHECKSUM) + 64 + len(_TAIL)


@dataclass(frozen=True)
class Stored:
    """What a file holds: an entry, and who has sealed it, by the names of their keys."""

    entry: Entry
    body: bytes = b""  # what seals are of
    seals: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> Seal:
        """Who made the entry, as far as this user can tell."""
        if self.body in _checked_here:
            return Seal.CHECKED
        key = own_key() if self.seals else None
        return Seal.FOREIGN if key is None else key.verify(self.body, self.seals.get(key.name, ""))


_complained: set[Path] = set()  # directories that were warned of
_checked_here: set[bytes] = set()  # bodies of entries that were checked in this process


def sealed_part(key: CacheKey, entry: Entry) -> bytes:
    """The bytes that a seal is of."""
    return canonical({"entry": entry.to_json(), "key": asdict(key)})


def encode(key: CacheKey, entry: Entry, seals: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file."""
    body = canonical({"entry": entry.to_json(), "key": asdict(key), "seals": dict(seals or {})})[:-1]
    return body + _CHECKSUM + hashlib.sha256(body).hexdigest().encode() + _TAIL


def own_seals(body: bytes, how: Seal) -> dict[str, str]:
    """This user's seal, by the name of the key; nothing where there is no key."""
    key = own_key()
    return {} if key is None else {key.name: key.seal(body, how)}


def decode(raw: bytes, key: CacheKey) -> Stored:
    """What is in a file's bytes; CacheError if they are damaged or belong to another key."""
    body, end = raw[:-_END_LENGTH], raw[-_END_LENGTH:]
    if end != _CHECKSUM + hashlib.sha256(body).hexdigest().encode() + _TAIL:
        raise CacheError("the checksum does not fit")
    try:
        value = json.loads(body + b"}")
        if canonical(value) != body + b"}" or set(limits.mapping("file", value)) != {"entry", "key", "seals"}:
            raise CacheError("not in canonical form")
        if canonical(value["key"]) != key.preimage:
            raise CacheError("it belongs to another key")
        part = canonical({"entry": value["entry"], "key": value["key"]})
    except (ValueError, TypeError, RecursionError) as error:
        raise CacheError(f"not readable as JSON ({type(error).__name__})") from None
    seals = limits.mapping("seals", value["seals"], MAX_SEALS)
    return Stored(Entry.from_json(value["entry"]), part, {k: limits.text("seal", v) for k, v in seals.items()})


def key_in(raw: bytes) -> CacheKey:
    """The key in a file's bytes, which nobody has given; raises `CacheError`."""
    try:
        return CacheKey.from_json(json.loads(raw)["key"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CacheError(f"not readable as JSON ({type(error).__name__})") from None


class Found(NamedTuple):
    """The answer to a lookup: an entry and its seal, or why there is none."""

    entry: Entry | None
    reason: str
    seal: Seal = Seal.FOREIGN


NEVER = "never decided before"


@functools.cache
def brought_by_packages() -> tuple[Path, ...]:
    """The directories with decisions that installed packages name as `ENTRY_POINTS`. No package is imported."""
    found = list[Path]()
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            dist: Any = point.dist  # None, if the package says nonsense
            found.append(Path(str(dist.locate_file(point.value.replace(".", "/")))))
        except Exception as why:  # of another package, which keeps no program from running
            log.warning("the decisions of %s are not read: %s", printable(point.value), printable(str(why)))
    return tuple(found)


def _paths(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    names = [given] if isinstance(given, str | os.PathLike) else given
    return [Path(os.path.abspath(os.path.expanduser(name))) for name in names]


class Cache:
    """Winners under one directory or several. The first is written; all are read, in their order.

    `get` and `put` never raise for the state of the disk.
    """

    def __init__(
        self,
        directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        clock: Callable[[], float] = time.time,
        is_read_only: bool = False,
    ) -> None:
        """directories: None means ``$MIRAGE_JAX_CACHE_DIR``, else mirage_jax in the user's cache directory. With any of
        these two goes what packages bring.

        is_read_only: write to none of them.
        """
        default = platformdirs.user_cache_dir("mirage_jax", False)  # relative if there is no home directory
        named = os.environ.get("MIRAGE_JAX_CACHE_DIR", "")
        usual = _paths(() if is_address(named) else directories_in(named)) or [Path(default)]
        paths = _paths(directories or ()) or usual
        self.directories = tuple(dict.fromkeys((*paths, *(brought_by_packages() if paths == usual else ()))))
        self.is_read_only = is_read_only
        self._clock = clock

    @property
    def directory(self) -> Path:
        """The directory that is written."""
        return self.directories[0]

    @property
    def root(self) -> Path:
        """The part of it with this version of the format."""
        return self.directory / f"v{SCHEMA}"

    def path(self, key: CacheKey) -> Path:
        """The file of a key's entry in the directory that is written."""
        return self.paths(key)[0]

    def paths(self, key: CacheKey) -> list[Path]:
        """The files of a key's entry, in the order in which they are read."""
        digest = key.digest
        return [d / f"v{SCHEMA}" / digest[:2] / f"{digest}.json" for d in self.directories]

    def kernel_path(self, key: CacheKey) -> Path:
        """Where the readable kernels of a winner are."""
        found = [path.with_suffix(".py") for path in self.paths(key)]
        return next((path for path in found if path.is_file()), found[0])

    def get(self, key: CacheKey) -> Entry | None:
        """Read an entry; None if there is none that can be used."""
        return self.lookup(key).entry

    def lookup(self, key: CacheKey) -> Found:
        """The entry and who made it, or None with the reason why there is none, for a report."""
        misses = list[Found]()
        for path, asked in self._places(key):
            found = self._lookup(path, asked)
            if found.entry is not None:
                return found
            misses.append(found)
        return next((found for found in misses if found.reason != NEVER), misses[0])

    def _places(self, key: CacheKey) -> Iterator[tuple[Path, CacheKey]]:
        """Where an entry may be, and its key there, in the order in which they are read."""
        for asked in (key, key.any_build):
            yield from ((path, asked) for path in self.paths(asked))

    def _lookup(self, path: Path, key: CacheKey) -> Found:
        directory = path.parents[2]
        try:
            self._check_directories(path)
            stored = decode(read_file(path), key)
        except FileNotFoundError:
            return Found(None, NEVER)
        except CacheError as error:
            why = printable(str(error))
            log.warning("cache entry %s is not used: %s", path, why)
            with suppress(OSError, UnsafeDirectory):
                if directory == self.directory and not self.is_read_only:
                    self._check_directories(path, writing=True)
                    os.replace(path, path.with_suffix(".bad"))
            return Found(None, f"the stored entry is not usable: {why}")
        except UnsafeDirectory as error:
            self._tell(f"not used: {error}", directory)
            return Found(None, f"no cache: {error}")
        except (OSError, ValueError) as error:
            self._tell(f"not readable: {_without_path(error)}", directory)
            return Found(None, f"no cache: {error}")
        if outdated := stored.entry.outdated(self._clock()):
            return Found(None, outdated)
        return Found(stored.entry, "found", stored.own)

    def nearest(self, key: CacheKey) -> str:
        """Name the differences to the nearest stored key of the same program; empty if there is no such key."""
        roots = [d / f"v{SCHEMA}" for d in self.directories]
        others = (other for root in roots for other in _keys_by_graph(root).get(key.graph, ()))
        found = [_differences(other, key.any_build if other == other.any_build else key) for other in others]
        return f"decided before with {', '.join(min(found, key=len))}" if found and all(found) else ""

    def device_kinds(self) -> list[tuple[str, str]]:
        """List GPUs for which decisions are stored that can be used here, those with most first.

        Each is JAX's name of its kind, and its compute capability.
        """
        keys = (key for d in self.directories for key in _newest_keys(d / f"v{SCHEMA}"))
        kinds = Counter((k.device_kind, k.compute_capability) for k in keys if k.is_read_here)
        return [(kind[5:], text) for (kind, text), _ in kinds.most_common() if kind.startswith("gpu: ")]

    def put(self, key: CacheKey, entry: Entry, kernels: str | None = None) -> Path | None:
        """Store an entry with the text of its kernels; return the entry's path, or None if it is not stored."""
        if self.is_read_only:
            return None
        path = self.path(key)
        try:
            entry = replace(entry, created=entry.created or self._clock())
            self.make_directories(path)
            if kernels is not None:
                with suppress(OSError):  # it is for people to read
                    write_file(path.with_suffix(".py"), kernels.encode("utf-8", "backslashreplace"))
            self._store(path, key, entry, own_seals(sealed_part(key, entry), Seal.MADE))
        except (OSError, ValueError, TypeError, RecursionError, CacheError, UnsafeDirectory) as error:
            self._tell(f"nothing is stored: {_without_path(error)}", self.directory)
            return None
        return path

    def vouch(self, key: CacheKey, entry: Entry) -> None:
        """Remember that somebody else's entry was checked here: in this process, and on disk if that is possible.

        An entry of a directory that is only read is copied to the one that is written.
        """
        if self.is_read_only:
            return
        path, part = self.path(key), sealed_part(key, entry)
        try:
            there, asked = next((place for place in self._places(key) if place[0].is_file()), (path, key))
            stored = decode(read_file(there), asked)
            if stored.entry != entry:  # another process has stored another one meanwhile
                return
            _checked_here.add(stored.body)
            self.make_directories(path)
            if not (own := own_seals(part, Seal.CHECKED)):
                raise CacheError("no key can be kept")
            others = list(stored.seals.items())[1 - MAX_SEALS :] if part == stored.body else ()
            self._store(path, key, entry, dict(others) | own)
        except (OSError, ValueError, CacheError, UnsafeDirectory) as error:
            why = _without_path(error).partition(";")[0]
            what = f"decisions made elsewhere are checked again in every process ({why}); see {KEY_FILE_VARIABLE}"
            self._tell(what, self.directory)

    def _tell(self, what: str, directory: Path) -> None:
        """Of all that is wrong with a directory, one line in a process."""
        level = logging.INFO if directory in _complained else logging.WARNING
        _complained.add(directory)
        log.log(level, "cache %s: %s", directory, what)

    def _store(self, path: Path, key: CacheKey, entry: Entry, seals: Mapping[str, str]) -> None:
        raw = encode(key, entry, seals)
        if len(raw) > MAX_ENTRY_BYTES:
            raise ValueError(f"an entry of {len(raw)} bytes is over the limit of {MAX_ENTRY_BYTES}")
        write_file(path, raw)

    def files(self) -> Iterator[Path]:
        """The file of every entry that is read, for listing."""
        known = set[str]()
        for directory in self.directories:
            found = files_of(directory)
            yield from (path for path in found if path.name not in known)
            known.update(path.name for path in found)

    def _check_directories(self, path: Path, writing: bool = False) -> None:
        """To be read from, directories may be another user's, but not everybody's; to be written to, ours alone."""
        within, root, top = path.parents[:3]
        if not top.is_absolute():
            raise UnsafeDirectory("there is no home directory; set MIRAGE_JAX_CACHE_DIR")
        for directory in (top, root, within):
            found = directory.stat() if directory == top else directory.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise UnsafeDirectory(f"{directory} is not a directory; remove it or choose another cache directory")
            if writing and (problem := _of_another_user(found)):
                raise UnsafeDirectory(f"{directory} {problem}; choose another cache directory")
            if problem := _open_to_others(found):
                raise UnsafeDirectory(f"{directory} {problem}; fix with: chmod go-w")

    def make_directories(self, path: Path) -> None:
        """Make the directories of an entry, for this user alone."""
        if not self.directory.is_absolute():
            raise UnsafeDirectory("there is no home directory; set MIRAGE_JAX_CACHE_DIR")
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self.directory, self.root, path.parent):
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
        self._check_directories(path, writing=True)


def files_of(directory: Path) -> list[Path]:
    """The file of every entry below one cache directory."""
    with suppress(OSError):
        return sorted((directory / f"v{SCHEMA}").glob("[0-9a-f][0-9a-f]/*.json"))
    return []


@functools.lru_cache(maxsize=4)
def _keys_by_graph(root: Path) -> Mapping[str, Sequence[CacheKey]]:
    """Read the keys of the newest entries once in a process, for messages."""
    found: dict[str, list[CacheKey]] = {}
    for key in _newest_keys(root):
        found.setdefault(key.graph, []).append(key)
    return found


def _newest_keys(root: Path) -> Iterator[CacheKey]:
    with suppress(OSError):
        files = sorted(root.glob("[0-9a-f][0-9a-f]/*.json"), key=lambda path: -path.lstat().st_mtime)
        for path in files[:MAX_COMPARED_KEYS]:
            with suppress(OSError, CacheError):
                yield key_in(read_file(path))


def _differences(stored: CacheKey, here: CacheKey) -> list[str]:
    """List the parts in which two keys of one program differ, as ``jax 0.11.1 (here 0.11.2)``."""
    then, now = ({n: str(v) for n, v in _named_parts(key)} for key in (stored, here))
    names = [name for name in {**then, **now} if then.get(name, "") != now.get(name, "")]
    return [f"{name} {then.get(name) or '(none)'} (here {now.get(name) or '(none)'})" for name in names]


def _named_parts(key: CacheKey) -> Iterator[tuple[str, object]]:
    yield from (("device", key.device_kind), ("compute capability", key.compute_capability))
    yield from (("backend", key.backend), ("policy", key.policy), ("schema", key.schema))
    yield from (*key.versions, *key.settings)


class UnsafeDirectory(Exception):
    """The cache directory is one that somebody else could write to, or is none."""


def _without_path(error: Exception) -> str:
    """Name the error without the file, which differs for every entry: one warning is enough."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _of_another_user(found: os.stat_result) -> str:
    is_ours = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
    return "" if is_ours else f"belongs to user {found.st_uid}"


def _open_to_others(found: os.stat_result) -> str:
    is_open = hasattr(os, "geteuid") and bool(found.st_mode & 0o022)  # Windows has access lists instead of modes
    return "can be written by other users" if is_open else ""


def _flags(*names: str) -> int:
    return functools.reduce(int.__or__, (getattr(os, name, 0) for name in names), 0)


def read_file(path: Path) -> bytes:
    """All of a regular file of at most MAX_BYTES that others cannot write. Follows no symlink, waits for no pipe."""
    try:
        fd = os.open(path, _flags("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    except OSError:
        if path.is_symlink():
            raise CacheError("it is a symbolic link") from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CacheError("it is not a file")
        if problem := _open_to_others(found):
            raise CacheError(f"it {problem}")
        if found.st_size > MAX_ENTRY_BYTES:
            raise CacheError(f"its {found.st_size} bytes are over the limit of {MAX_ENTRY_BYTES}")
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_ENTRY_BYTES + 1)
    finally:
        os.close(fd)


def write_file(path: Path, raw: bytes) -> None:
    """Replace a file in one step that a crash cannot divide: a file of a name nobody else has, synced, then renamed."""
    temporary = path.parent / f".{socket.gethostname()[:32]}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
    fd = os.open(temporary, _flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"), 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    with suppress(OSError):  # the rename is done; some file systems cannot sync a directory
        directory = os.open(path.parent, _flags("O_RDONLY", "O_DIRECTORY", "O_CLOEXEC"))
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
