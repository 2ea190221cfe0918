"""All decisions of a cache: listed, proven, pruned, exported and imported, by the functions and by the command."""

import json
import logging
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from deciding import measured, operands

import mirage_jax
from mirage_jax import cache as cache_module
from mirage_jax import cache_files, cli
from mirage_jax.cache import Cache, CacheKey, Entry, encode
from mirage_jax.compiler.winner import Winner
from mirage_jax.errors import UsageError

ARGS = operands(16)


def decided(folder: Path, scale: float = 1.0) -> mirage_jax.Report:
    f = mirage_jax.optimize(lambda a, b, v: scale * ((a @ b) @ v), cache_dir=folder, backend="jax")
    with measured(2.0):
        return f.explain(*ARGS)


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    decided(folder)
    cache = Cache(folder)
    (file,) = cache_files.stored_files(cache)
    cache.put(replace(file.key, graph="old", versions=(("jax", "0.1"),)), Entry("xla"))
    cache.put(replace(file.key, graph="too old"), Entry("xla", created=1.0))
    return folder


def run(capsys, *argv: object) -> tuple[int, str]:
    code = cli.main(["cache", *map(str, argv)])
    return code, capsys.readouterr().out


def test_list_and_show(filled, capsys) -> None:
    code, out = run(capsys, "list", "--cache-dir", filled)
    assert code == cli.OK and "win 2.00x" in out and "made with jax 0.1" in out and "too long ago" in out
    (winner,) = (f for f in cache_files.stored_files(Cache(filled)) if f.entry.decision == "win")
    code, out = run(capsys, "show", winner.digest[:8], "--cache-dir", filled)
    assert code == cli.OK and "read here: yes" in out and out.count("mugraph {") == 2 and f"key: {winner.digest}" in out
    assert cli.main(["cache", "show", "", "--cache-dir", str(filled)]) == cli.USAGE
    assert "the beginning of 3 keys" in capsys.readouterr().err


def test_verify_proves_winners_again(filled, tmp_path, capsys) -> None:
    assert run(capsys, "verify", "--cache-dir", filled) == (cli.OK, "3 entries, 1 winners, 0 that cannot be used\n")
    cache = Cache(tmp_path)
    decided(tmp_path)
    (file,) = cache_files.stored_files(cache)
    name = file.entry.graph.rpartition("output ")[2].split()[0]
    axes = file.entry.graph.rpartition(f"{name}: f32[")[2].split("]")[0]
    wrong = file.entry.graph.replace(
        f"output {name}", f"library twice: f32[{axes}] = affine{{scale=2}} {name}[{axes}]\n  output twice"
    )
    cache.put(file.key, replace(file.entry, graph=wrong))
    (tmp_path / "v3" / "ab").mkdir(exist_ok=True, mode=0o700)
    (tmp_path / "v3" / "ab" / f"ab{'0' * 62}.json").write_text("{}")
    code, out = run(capsys, "verify", "--cache-dir", tmp_path)
    assert code == cli.PROBLEM and "2 that cannot be used" in out and "DifferentError" in out


def test_of_several_directories_all_are_listed_and_one_is_pruned(filled, tmp_path, capsys) -> None:
    both = f"{tmp_path / 'own'}{os.pathsep}{filled}"
    code, out = run(capsys, "list", "--cache-dir", both)
    assert code == cli.OK and "win 2.00x" in out and "too long ago" in out
    assert run(capsys, "export", tmp_path / "all.zip", "--cache-dir", both)[1].startswith("1 entries in ")
    assert "0 files removed" in run(capsys, "prune", "--cache-dir", both)[1]
    assert "1 entries added" in run(capsys, "import", tmp_path / "all.zip", "--cache-dir", both)[1]
    assert len(list(Cache(tmp_path / "own").files())) == 1


def test_prune_removes_what_nobody_reads(filled, tmp_path, capsys) -> None:
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for path in Cache(filled).files():
            out.write(path, str(path.relative_to(filled)))
    folder = tmp_path / "copy"
    assert cache_files.load(Cache(folder), archive) == (3, [])
    (bad := next(Cache(folder).files()).with_suffix(".bad")).write_text("torn")
    assert "3 files would be removed" in run(capsys, "prune", "--dry-run", "--cache-dir", folder)[1]
    assert len(list(Cache(folder).files())) == 3
    assert "3 files removed" in run(capsys, "prune", "--cache-dir", folder)[1]
    (left,) = cache_files.stored_files(Cache(folder))
    assert left.entry.decision == "win" and not bad.exists()


def test_decisions_travel(filled, tmp_path, capsys) -> None:
    """An imported decision is used, after the checks for entries that others made."""
    archive, folder = tmp_path / "decisions.zip", tmp_path / "elsewhere"
    assert run(capsys, "export", archive, "--cache-dir", filled)[1].startswith("1 entries in ")
    assert run(capsys, "export", tmp_path / "none.zip", "--device", "H100", "--cache-dir", filled)[0] == cli.PROBLEM
    assert run(capsys, "import", archive, "--cache-dir", folder) == (cli.OK, "1 entries added, 0 refused\n")
    assert run(capsys, "import", archive, "--cache-dir", folder) == (cli.OK, "0 entries added, 0 refused\n")
    (region,) = decided(folder).regions
    assert region.decision.source == "cache" and region.decision.winner is not None
    assert cli.main(["cache", "export", str(archive)]) == cli.USAGE


@pytest.fixture
def another_build(monkeypatch) -> None:
    """As after a change of this package: its own version and the digest of its source are others."""
    other = tuple((name, "changed" if name in cache_module.BUILD else v) for name, v in cache_module.versions())
    monkeypatch.setattr(cache_module, "versions", lambda: other)
    cache_module._checked_here.clear()  # it is another process


def test_what_is_exported_for_any_build_outlives_a_change(filled, tmp_path, capsys, request, caplog) -> None:
    """Another build finds and proves it, and keeps it as its own. What one build exports for itself is not found."""
    own, lasting = tmp_path / "own.zip", tmp_path / "lasting.zip"
    assert run(capsys, "export", own, "--cache-dir", filled)[0] == cli.OK
    assert run(capsys, "export", lasting, "--any-build", "--cache-dir", filled)[1].startswith("1 entries in ")
    request.getfixturevalue("another_build")
    for archive, source in ((own, "search"), (lasting, "cache"), (lasting, "cache")):
        folder = tmp_path / archive.stem
        cache_files.load(Cache(folder), archive)
        (region,) = decided(folder).regions
        assert region.decision.source == source and region.decision.winner is not None
    assert "as measured elsewhere" in region.decision.why and "elsewhere" in region.decision.gate
    assert [f.stale for f in cache_files.stored_files(Cache(tmp_path / "lasting"))] == ["", ""], "ours, and theirs"
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_kernels_that_nobody_measured_are_a_miss(filled, tmp_path, monkeypatch, request) -> None:
    """A build that writes other kernels for a muGraph does not believe the times."""
    cache_files.export(Cache(filled), tmp_path / "lasting.zip", any_build=True)
    cache_files.load(Cache(tmp_path / "c"), tmp_path / "lasting.zip")
    request.getfixturevalue("another_build")
    monkeypatch.setattr(Winner, "kernel_digest", "another")
    options = {"cache_dir": tmp_path / "c", "backend": "jax", "on_miss": "fallback"}
    f = mirage_jax.optimize(lambda a, b, v: 1.0 * ((a @ b) @ v), **options)
    (region,) = f.explain(*ARGS).regions
    assert region.decision.winner is None and "other kernels" in region.decision.why


def test_what_cannot_be_told_for_another_build_stays(tmp_path, filled) -> None:
    cache = Cache(tmp_path / "c")
    (key,) = (f.key for f in cache_files.stored_files(Cache(filled)) if f.entry.decision == "win")
    cache.put(replace(key, graph="a"), Entry("structures", schedule=[]))
    cache.put(replace(key, graph="b"), Entry("whole"))
    assert cache_files.export(cache, tmp_path / "none.zip", any_build=True) == 0
    assert cache_files.export(cache, tmp_path / "all.zip") == 2


def test_what_is_no_entry_is_refused(filled, tmp_path, capsys) -> None:
    (first, *_) = Cache(filled).files()
    archive = tmp_path / "evil.zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("../../escaped.json", "{}")
        out.writestr(f"v3/ab/ab{'0' * 62}.json", first.read_bytes())
        out.writestr(f"v3/cd/cd{'0' * 62}.json", "[" * 10_000)
        out.writestr(f"v3/ef/ef{'0' * 62}.json", b"0" * (2 << 20))
        (key,) = (f.key for f in cache_files.stored_files(Cache(filled)) if f.key.graph == "old")
        moving = replace(key, device_kind="\x1b[2J")
        out.writestr(f"v3/{moving.digest[:2]}/{moving.digest}.json", encode(moving, Entry("xla")))
    assert cache_files.load(Cache(tmp_path / "new"), archive)[0] == 0
    assert not list(tmp_path.rglob("escaped*")) and not list(Cache(tmp_path / "new").files())
    code = cli.main(["cache", "import", str(archive), "--cache-dir", str(tmp_path / "new")])
    assert code == cli.PROBLEM and capsys.readouterr().err.count("refused: ") == 5
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(UsageError, match="is no archive of decisions"):
        cache_files.load(Cache(tmp_path), tmp_path / "text")


def test_a_miss_says_what_differs(tmp_path, monkeypatch) -> None:
    decided(tmp_path)
    (file,) = cache_files.stored_files(Cache(tmp_path))
    moved = replace(file.key, versions=(*file.key.versions[1:], ("jax", "0.1")), device_kind="gpu: H100")
    Cache(tmp_path).put(moved, Entry("xla"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    f = mirage_jax.optimize(lambda a, b, v: 1.0 * ((a @ b) @ v), cache_dir=tmp_path, backend="jax", on_miss="fallback")
    (region,) = f.explain(*ARGS).regions
    assert "decided before with XLA_FLAGS" in region.decision.why and "(here --xla_something=1)" in region.decision.why
    assert "H100" not in region.decision.why, "that key differs more"
    f = mirage_jax.optimize(lambda a, b, v: 3.0 * ((a @ b) @ v), cache_dir=tmp_path, backend="jax", on_miss="error")
    with pytest.raises(UsageError, match="never decided before"):
        f(*ARGS)


def test_keys_are_read_as_they_were_written(filled) -> None:
    for path in Cache(filled).files():
        assert CacheKey.from_json(json.loads(path.read_bytes())["key"]).digest == path.stem
    key = CacheKey.here(graph="g", extents={"a": 2}, backend="jax", policy="p", device=jax.devices()[0])
    assert CacheKey.from_json(json.loads(key.preimage)) == key


def test_a_directory_that_others_may_write_gets_nothing(filled, tmp_path) -> None:
    cache_files.export(Cache(filled), tmp_path / "decisions.zip")
    (folder := tmp_path / "open").mkdir()
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by other users; fix with: chmod go-w"):
        cache_files.load(Cache(folder), tmp_path / "decisions.zip")
