"""The cache under faults: whatever happens to the files, the answer is the stored one or a miss, and nothing raises."""

import errno
import hashlib
import json
import logging
import multiprocessing
import os
import random
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from mirage_jax import cache as cache_module
from mirage_jax.cache import (
    MAX_ENTRY_BYTES,
    XLA_LIFETIME_SECONDS,
    Cache,
    CacheKey,
    Entry,
    brought_by_packages,
    canonical,
    decode,
    encode,
)
from mirage_jax.config import from_environment
from mirage_jax.errors import CacheError
from mirage_jax.limits import MAX_CLOCK_SKEW_SECONDS
from mirage_jax.seals import Seal

KEY = CacheKey(
    graph="graph(x: f32[m,k]) -> y",
    extents=(("k", 64), ("m", 7)),
    backend="jax",
    policy="p1",
    device_kind="cpu: cpu",
    compute_capability="",
    versions=(("jax", "1.2.3"),),
    settings=(("x64", "False"),),
)
WIN = Entry(
    decision="win",
    graph='kernel k: "ünïcode" \\ %a[m] = exp %x',
    schedule={"tiles": {"m": 16, "k": 32}, "warps": 4},
    certificate={"p": 2**61 - 1, "bound": 1e-13},
    timings={"xla": 1.5e-5, "ours": 1.0e-5},
    measured=((1.2e-5, 1.0e-5), (1.1e-5, 1.3e-5)),
    reasons=("1.5x faster",),
    environment={"jax": "1.2.3"},
    created=1e9,
    variants=(("mugraph {\n}", {"kernels": []}, 1.0e-5), ("mugraph {\n}", None, None)),
)


@pytest.fixture
def cache(tmp_path) -> Cache:
    cache_module._complained.clear()
    return Cache(tmp_path / "c", clock=lambda: 1e9)


def test_round_trip(cache, caplog) -> None:
    assert cache.lookup(KEY) == (None, "never decided before", Seal.FOREIGN)
    assert cache.put(KEY, WIN, kernels="def kernel(): ...\n") == cache.path(KEY)
    assert cache.lookup(KEY) == (WIN, "found", Seal.MADE)
    assert cache.kernel_path(KEY).read_text() == "def kernel(): ...\n"
    assert list(cache.files()) == [cache.path(KEY)]
    assert not caplog.records
    for path in cache.directory.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert json.loads(cache.path(KEY).read_text())["entry"]["decision"] == "win"


def test_overwrite(cache) -> None:
    cache.put(KEY, WIN)
    newer = replace(WIN, reasons=("again",))
    cache.put(KEY, newer)
    assert cache.get(KEY) == newer
    assert len(list(cache.path(KEY).parent.iterdir())) == 1


def test_every_part_of_the_key_matters(cache) -> None:
    cache.put(KEY, WIN)
    for part in fields(KEY):
        value = getattr(KEY, part.name)
        other = value + 1 if isinstance(value, int) else value + "x" if isinstance(value, str) else (*value, ("z", 1))
        assert cache.get(replace(KEY, **{part.name: other})) is None, part.name


def test_key_of_this_process() -> None:
    make = lambda k: CacheKey.here(graph="g", extents=k, backend="jax", policy="p", device=jax.devices()[0])  # noqa: E731
    assert make({"a": 1, "b": 2}) == make({"b": 2, "a": 1})
    assert make({"a": 1}).digest != make({"a": 2}).digest
    assert dict(make({}).versions)["jax"] == jax.__version__


def test_settings_are_in_the_key(monkeypatch) -> None:
    before = cache_module.settings("cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    assert cache_module.settings("cpu") != before


def test_what_does_not_change_kernels_is_in_no_key_of_a_gpu(monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    before = cache_module.settings("gpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/hlo  --xla_something=1 --xla_dump_hlo_as_text")
    assert cache_module.settings("gpu") == before
    assert dict(cache_module.settings("cpu"))["cpus"] == "1"


def test_xla_decisions_expire(tmp_path) -> None:
    now = [1e9]
    cache = Cache(tmp_path, clock=lambda: now[0])
    cache.put(KEY, Entry("xla", reasons=("nothing was faster",)))
    now[0] += XLA_LIFETIME_SECONDS - 1
    found = cache.get(KEY)
    assert found is not None and found.created == 1e9
    now[0] += 2
    assert cache.get(KEY) is None
    now[0] = 1e9 - MAX_CLOCK_SKEW_SECONDS + 1  # a clock that went backwards
    assert cache.get(KEY) == found
    now[0] -= 2  # no decision is for ever
    assert cache.lookup(KEY).reason == "that nothing beats XLA was decided by a clock that is ahead"


def test_entry_refuses_nonsense() -> None:
    with pytest.raises(CacheError):
        Entry("maybe")
    with pytest.raises(CacheError):
        Entry("win")
    with pytest.raises(CacheError):
        Entry("xla", graph="g")


# Damage to the bytes.


def test_truncation_at_every_byte() -> None:
    raw = encode(KEY, WIN)
    for length in range(len(raw)):
        with pytest.raises(CacheError):
            decode(raw[:length], KEY)


def test_every_bit_flip() -> None:
    raw = encode(KEY, WIN)
    for position in range(len(raw)):
        for bit in range(8):
            flipped = raw[:position] + bytes([raw[position] ^ 1 << bit]) + raw[position + 1 :]
            with pytest.raises(CacheError):
                decode(flipped, KEY)


def test_random_damage_never_escapes() -> None:
    raw, rng = encode(KEY, WIN), random.Random(0)
    for _ in range(2000):
        a, b = sorted(rng.choices(range(len(raw) + 1), k=2))
        damaged = raw[:a] + rng.randbytes(rng.randrange(8)) + raw[b:]
        if damaged != raw:
            with pytest.raises(CacheError):
                decode(damaged, KEY)


def _sealed(body: bytes) -> bytes:
    """Well sealed bytes, so that what is inside is what gets tested."""
    assert body.endswith(b"}")
    digest = hashlib.sha256(body[:-1]).hexdigest().encode()
    return body[:-1] + b',"sha256":"' + digest + b'"}\n'


def _body(**entry: object) -> bytes:
    whole = json.loads(encode(KEY, WIN))
    return canonical({"entry": whole["entry"] | entry, "key": whole["key"], "seals": {}})


KEY_PART = {"key": json.loads(KEY.preimage), "seals": {}}
BODIES = {
    "empty object": b"{}",
    "not json": b"garbage}",
    "array": b"[]}",
    "deep": b"[" * 100_000 + b"}",
    "deep object": b'{"a":' * 50_000 + b"}",
    "missing entry": canonical(KEY_PART),
    "entry is a list": canonical(KEY_PART | {"entry": []}),
    "extra field": _body(extra=1),
    "unknown decision": _body(decision="perhaps"),
    "decision is a number": _body(decision=1),
    "win without graph": _body(graph=None),
    "graph is a list": _body(graph=["a"]),
    "reasons are text": _body(reasons="abc"),
    "reasons are numbers": _body(reasons=[1]),
    "timings are a list": _body(timings=[1]),
    "timing is a bool": _body(timings={"xla": True}),
    "created is text": _body(created="today"),
    "NaN": _body().replace(b"1.5e-05", b"NaN"),
    "overflow": _body().replace(b"1.5e-05", b"1e999"),
    "not canonical": _body().replace(b'"graph":', b'"graph": '),
    "duplicate key": _body().replace(b'{"entry":', b'{"entry":0,"entry":'),
    "huge integer": _body(created=0).replace(b'"created":0', b'"created":' + b"9" * 5000),
    "invalid utf-8": _body().replace(b"again", b"\xff").replace(b"faster", b"\xff"),
    "a timing of 400 digits": _body(timings={"xla": 10**400}),
    "a timing of a year": _body(timings={"xla": 3e7}),
    "a negative time": _body(measured=[[1.0, -1.0]]),
    "a variant without a time": _body(variants=[["mugraph", None]]),
    "a variant that moves the cursor": _body(variants=[["\x1b[2J", None, 1.0]]),
    "too many variants": _body(variants=[["mugraph", None, 1.0]] * 17),
    "a date of 400 digits": _body(created=10**400),
    "too many reasons": _body(reasons=["x"] * 100),
    "a reason of a megabyte": _body(reasons=["x" * 500_000]),
    "a graph that clears the screen": _body(graph="mugraph \x1b[2J"),
    "too many structures": _body(decision="structures", graph=None, schedule=[1] * 1000),
    "seals are a list": canonical(json.loads(_body()) | {"seals": []}),
    "a thousand seals": canonical(json.loads(_body()) | {"seals": {str(n): "made:0" for n in range(1000)}}),
    "other schema": _body().replace(b'"schema":3', b'"schema":2'),
}


@pytest.mark.parametrize("name", BODIES)
def test_well_sealed_nonsense(name, cache, caplog) -> None:
    cache.put(KEY, WIN)
    cache.path(KEY).write_bytes(_sealed(BODIES[name]))
    assert cache.get(KEY) is None
    assert len(caplog.records) == 1
    assert not cache.path(KEY).exists() and cache.path(KEY).with_suffix(".bad").exists()
    assert cache.put(KEY, WIN)
    assert cache.get(KEY) == WIN


# Damage to the files.


def _empty(path):
    path.write_bytes(b"")


def _garbage(path):
    path.write_bytes(random.Random(1).randbytes(4096))


def _oversize(path):
    with path.open("wb") as file:
        file.truncate(1 << 30)


def _other_key(path):
    path.write_bytes(encode(replace(KEY, backend="triton"), WIN))


def _symlink(path):
    path.rename(path.with_name("kept"))
    path.symlink_to("kept")


def _symlink_outside(path):
    path.unlink()
    path.symlink_to("/etc/passwd")


def _dangling_symlink(path):
    path.unlink()
    path.symlink_to("nowhere")


def _directory(path):
    path.unlink()
    path.mkdir()


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _writable_by_others(path):
    path.chmod(0o666)


FILE_FAULTS = [
    _empty, _garbage, _oversize, _other_key, _symlink, _symlink_outside, _dangling_symlink, _directory, _pipe,
    _writable_by_others,
]  # fmt: skip


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_broken_file_is_one_line_and_a_miss(fault, cache, caplog) -> None:
    cache.put(KEY, WIN)
    fault(cache.path(KEY))
    with caplog.at_level(logging.WARNING):
        assert cache.get(KEY) is None
        assert len(caplog.records) == 1
        assert cache.get(KEY) is None  # moved aside: silent now
        assert len(caplog.records) == 1
        assert cache.put(KEY, WIN)
        assert cache.get(KEY) == WIN


def test_what_another_user_owns_is_read_and_not_written(cache, monkeypatch, caplog) -> None:
    """As in a container whose image has a cache: the caller is told, by the seal, whether it knows the entry."""
    raw = encode(KEY, WIN, {"somebody": "made:0"})
    cache.put(KEY, WIN)
    cache.path(KEY).write_bytes(raw)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert cache.lookup(KEY) == (WIN, "found", Seal.FOREIGN)
    assert cache.put(KEY, WIN) is None
    cache.vouch(KEY, WIN)
    assert cache.path(KEY).read_bytes() == raw
    assert cache.lookup(KEY).seal is Seal.CHECKED  # in this process
    cache.path(KEY).write_bytes(b"damaged")
    assert cache.get(KEY) is None and cache.path(KEY).exists()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 3  # no key, nothing stored, damaged


def test_kernels_that_cannot_be_written_cost_nothing(cache, monkeypatch, caplog) -> None:
    """They are for people."""
    write = cache_module.write_file

    def only_entries(path, raw):
        if path.suffix == ".py":
            raise OSError(errno.EROFS, "EROFS")
        write(path, raw)

    monkeypatch.setattr(cache_module, "write_file", only_entries)
    assert cache.put(KEY, WIN, "text") and cache.get(KEY) == WIN and not caplog.records


# Damage to the directories: one warning, then no cache.


def _expect_no_cache(cache, caplog) -> None:
    for _ in range(3):
        assert cache.get(KEY) is None
        assert cache.put(KEY, WIN) is None
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("place", ["directory", "root", "sub"])
def test_directory_is_a_file(place, cache, caplog) -> None:
    path = {"directory": cache.directory, "root": cache.root, "sub": cache.path(KEY).parent}[place]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("hello")
    _expect_no_cache(cache, caplog)
    assert path.read_text() == "hello"


def test_directory_writable_by_others(cache, caplog) -> None:
    cache.put(KEY, WIN)
    cache.directory.chmod(0o777)
    _expect_no_cache(cache, caplog)
    assert "chmod" in caplog.text


def test_symlinked_subdirectory(cache, caplog, tmp_path) -> None:
    cache.put(KEY, WIN)
    cache.path(KEY).parent.rename(tmp_path / "elsewhere")
    cache.path(KEY).parent.symlink_to(tmp_path / "elsewhere")
    _expect_no_cache(cache, caplog)


def test_symlink_chosen_as_the_cache_directory_is_fine(tmp_path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    cache = Cache(tmp_path / "link")
    assert cache.put(KEY, WIN)
    assert cache.get(KEY) == WIN


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory(cache, caplog) -> None:
    cache.root.mkdir(parents=True)
    cache.root.chmod(0o500)
    assert cache.put(KEY, WIN) is None
    assert cache.put(KEY, WIN) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "mkdir"])
@pytest.mark.parametrize("code", ["ENOSPC", "EACCES", "EROFS", "EBUSY", "EIO", "ESTALE", "EMFILE", "EDQUOT"])
def test_failing_system_call(call, code, cache, caplog, monkeypatch) -> None:
    def fail(*args, **kw):
        raise OSError(getattr(errno, code), code)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert cache.put(KEY, WIN) is None
        assert cache.put(KEY, WIN) is None
    assert len(caplog.records) == 1
    assert not [p for p in cache.directory.rglob("*") if p.is_file()]
    assert cache.put(KEY, WIN)
    assert cache.get(KEY) == WIN


def test_a_full_disk_is_one_warning(cache, caplog, monkeypatch) -> None:
    """Though each file that cannot be written has a name of its own."""
    real = os.open

    def full(path, flags, *more, **kw):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, flags, *more, **kw)

    monkeypatch.setattr(os, "open", full)
    assert cache.put(KEY, WIN) is None and cache.put(replace(KEY, graph="another"), WIN) is None
    (record,) = caplog.records
    assert record.getMessage().endswith("nothing is stored: No space left on device")


def test_a_package_in_an_archive_has_a_digest_of_its_source(tmp_path) -> None:
    digests = []
    for n in range(2):
        archive = tmp_path / f"{n}.zip"
        with zipfile.ZipFile(archive, "w") as file:
            for module in (
                "limits",
                "config",
                "errors",
                "extension_modules",
                "seals",
                "why_not",
                "hardware/host",
                "children",
            ):
                file.write(Path(cache_module.__file__).parent / f"{module}.py", f"mirage_jax/{module}.py")
            file.writestr("mirage_jax/__init__.py", "")
            file.writestr("mirage_jax/hardware/__init__.py", "")
            file.writestr("mirage_jax/cache.py", Path(cache_module.__file__).read_text() + f"# {n}\n")
        command = [sys.executable, "-c", "from mirage_jax import cache; print(cache.__file__, cache.source_digest())"]
        environment = os.environ | {"PYTHONPATH": str(archive)}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        where, digest = done.stdout.split()
        assert where.startswith(str(archive))
        digests.append(digest)
    assert len(set(digests)) == 2


def test_failing_read(cache, caplog, monkeypatch) -> None:
    cache.put(KEY, WIN)

    def fail(*args, **kw):
        raise OSError(5, "EIO")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert cache.get(KEY) is None
        assert cache.get(KEY) is None
    assert len(caplog.records) == 1
    assert cache.get(KEY) == WIN


def test_interrupt_while_writing_leaves_the_old_entry(cache, monkeypatch) -> None:
    cache.put(KEY, WIN)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", interrupt)
        cache.put(KEY, replace(WIN, reasons=("new",)))
    assert cache.get(KEY) == WIN
    assert len(list(cache.path(KEY).parent.iterdir())) == 1


@pytest.mark.parametrize("bad", [{"a": float("nan")}, {"a": object()}, {"a": {1, 2}}])
def test_what_is_not_json_is_not_stored(bad, cache, caplog) -> None:
    assert cache.put(KEY, replace(WIN, schedule=bad)) is None
    assert len(caplog.records) == 1
    assert cache.get(KEY) is None


def test_too_large_to_store(cache, caplog) -> None:
    assert cache.put(KEY, replace(WIN, graph="x" * MAX_ENTRY_BYTES)) is None
    assert "limit" in caplog.text


def test_environment_chooses_the_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", str(tmp_path / "ü b"))
    assert Cache().directory == tmp_path / "ü b"
    assert Cache(tmp_path / "other").directory == tmp_path / "other"
    assert Cache().put(KEY, WIN)
    monkeypatch.delenv("MIRAGE_JAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache().directory == tmp_path / "xdg" / "mirage_jax"


def test_of_several_directories_the_first_is_written_and_all_are_read(tmp_path, monkeypatch) -> None:
    own, team, image = folders = [tmp_path / name for name in ("own", "team", "image")]
    other = replace(KEY, graph="other")
    assert Cache(team).put(KEY, WIN, "text") and Cache(image).put(KEY, replace(WIN, created=5.0))
    assert Cache(image).put(other, WIN)
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", os.pathsep.join(map(str, folders)))
    cache = Cache(clock=lambda: 1e9)
    assert (cache.directory, cache.directories) == (own, (own, team, image))
    assert cache.get(KEY).created == WIN.created and cache.get(other) is not None
    assert cache.kernel_path(KEY).is_relative_to(team) and sorted(p.parents[2].name for p in cache.files()) == [
        "image",
        "team",
    ]
    assert cache.put(other, WIN).is_relative_to(own) and len(list(cache.files())) == 2
    cache.path(KEY).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    cache.path(KEY).write_bytes(b"torn")
    assert cache.get(KEY) is not None and cache.path(KEY).with_suffix(".bad").exists()  # the next one has it


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[Path]:
    """An installed package with a decision, which fails where it is imported; one more names nothing that exists."""
    site, own = tmp_path / "site", tmp_path / "own"
    for name, value in (("tuned", "tuned.h200"), ("lost", "nowhere")):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[mirage_jax.decisions]\n{name} = {value}\n")
    Cache(site / "tuned/h200").put(KEY, WIN)
    (site / "tuned/__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", str(own))
    brought_by_packages.cache_clear()
    yield site / "tuned/h200"
    brought_by_packages.cache_clear()


def test_packages_bring_decisions(package: Path) -> None:
    """They are read after the user's own, and never written; a directory that is asked for stands alone."""
    before = sorted(package.rglob("*"))
    cache = Cache()
    assert cache.directory.name == "own" and package in cache.directories[1:]
    assert cache.get(KEY).created == WIN.created
    other = replace(KEY, graph="other")
    assert cache.put(other, WIN).is_relative_to(cache.directory) and sorted(package.rglob("*")) == before
    asked = cache.directory.with_name("asked for")
    assert Cache(asked).directories == (asked,) and Cache(asked).get(KEY) is None
    assert Cache(from_environment()[0].cache_dir).directories == cache.directories


def test_a_package_that_says_nonsense_is_left_out(package: Path, monkeypatch, caplog) -> None:
    point = SimpleNamespace(value="broken\x1b", dist=None)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    brought_by_packages.cache_clear()
    assert len(Cache().directories) == 1 and caplog.text.count("are not read") == 1 and "\x1b" not in caplog.text


def test_directories_that_are_only_read_stay_as_they_are(tmp_path) -> None:
    team = Cache(tmp_path / "team")
    assert team.put(KEY, WIN)
    team.path(KEY).write_bytes(b"torn")
    assert Cache([tmp_path / "own", team.directory]).lookup(KEY).reason.startswith("the stored entry is not usable")
    assert team.path(KEY).read_bytes() == b"torn"
    read_only = Cache(team.directory, is_read_only=True)
    assert read_only.get(KEY) is None and read_only.put(KEY, WIN) is None
    assert team.path(KEY).read_bytes() == b"torn"


def test_an_address_in_the_environment_makes_no_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", "gs://bucket/decisions")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache().directory == tmp_path / "xdg" / "mirage_jax"


def test_no_home_directory_is_no_cache(caplog, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MIRAGE_JAX_CACHE_DIR")
    monkeypatch.setattr(cache_module.platformdirs, "user_cache_dir", lambda *_: "~/.cache/mirage_jax")
    _expect_no_cache(Cache(), caplog)
    assert not list(tmp_path.iterdir())


# Many writers and readers.


def _hammer(directory: str, seed: int, rounds: int) -> int:
    cache, seen = Cache(directory, clock=lambda: 1e9), 0
    for i in range(rounds):
        cache.put(KEY, replace(WIN, reasons=(f"{seed}.{i}" * 50,)), kernels="x" * 100)
        found = cache.get(KEY)
        if found is None or found.graph != WIN.graph:
            return -1
        seen += 1
    return seen


def test_concurrent_threads(cache, caplog) -> None:
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda s=s: results.append(_hammer(str(cache.directory), s, 25))) for s in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [25] * 8
    assert not caplog.records
    assert len(list(cache.path(KEY).parent.iterdir())) == 2


def test_concurrent_processes(cache) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.starmap(_hammer, [(str(cache.directory), s, 25) for s in range(3)]) == [25] * 3
    assert len(list(cache.path(KEY).parent.iterdir())) == 2
    assert cache.get(KEY) is not None
