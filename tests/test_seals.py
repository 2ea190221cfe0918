"""The key of a user: made once, kept to this user, and missed without harm."""

import os
import stat
import threading

import pytest

from mirage_jax import config, seals
from mirage_jax.seals import Seal, SealKey, own_key


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the key is kept; nothing is remembered of other tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for remembered in (seals._kept, seals._named, config.warn_once):
        remembered.cache_clear()
    yield tmp_path / "state" / "mirage_jax" / "key"
    seals._kept.cache_clear()


def again() -> SealKey | None:
    seals._kept.cache_clear()
    return own_key()


def test_a_key_is_made_once_for_this_user_alone(path) -> None:
    key = own_key()
    assert key is not None and again() == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(path.read_bytes()) == seals.KEY_BYTES and list(path.parent.iterdir()) == [path]


def test_a_seal_is_of_these_bytes_and_of_what_was_done() -> None:
    key, other = SealKey(b"a" * 32), SealKey(b"b" * 32)
    seal = key.seal(b"entry", Seal.CHECKED)
    assert key.verify(b"entry", seal) is Seal.CHECKED
    forged = [seal.replace("checked", "made"), seal[:-1], seal + "0", "", ":", "made:", "checked:ü", "made:" + "0" * 64]
    assert all(key.verify(b"entry", x) is Seal.FOREIGN for x in forged)
    assert key.verify(b"entry2", seal) is other.verify(b"entry", seal) is Seal.FOREIGN


def _short(path) -> None:
    path.write_bytes(b"short")


def _open(path) -> None:
    path.chmod(0o644)


def _symlink(path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [_short, _open, _symlink])
def test_a_key_that_others_may_know_is_replaced(spoil, path, caplog) -> None:
    before = own_key()
    spoil(path)
    after = again()
    assert after is not None and before != after and again() == after and not caplog.records


def _directory(path) -> None:
    path.unlink()
    path.mkdir()


def _open_directory(path) -> None:
    path.unlink()
    path.parent.chmod(0o777)


def _file_for_directory(path) -> None:
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize("spoil", [_directory, _open_directory, _file_for_directory])
def test_where_no_key_can_be_kept_nothing_happens(spoil, path, caplog) -> None:
    own_key()
    spoil(path)
    before = len(os.listdir("/proc/self/fd"))
    assert again() is None and again() is None and not caplog.messages
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_home(path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(seals.platformdirs, "user_state_dir", lambda *_: "~/.local/state/mirage_jax")
    assert own_key() is None and not caplog.messages


def test_machines_that_share_a_home_have_keys_of_their_own(path, tmp_path, monkeypatch) -> None:
    one = own_key()
    (tmp_path / "machine").write_text("another")
    monkeypatch.setattr(seals, "MACHINE_ID_FILE", tmp_path / "machine")
    assert again() != one


def test_a_named_key(path, tmp_path, monkeypatch, caplog) -> None:
    """Of containers that trust each other: wherever the file is, it is the same key."""
    found = []
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"x" * 40)
        monkeypatch.setenv(seals.KEY_FILE_VARIABLE, str(tmp_path / name))
        found.append(own_key())
    assert found[0] is not None and found[0] == found[1] and not path.exists()
    for spoil in (lambda p: p.write_bytes(b"short"), lambda p: p.unlink()):
        spoil(tmp_path / "two")
        seals._named.cache_clear()
        config.warn_once.cache_clear()
        caplog.clear()
        assert own_key() is None and len(caplog.messages) == 1


def test_threads_that_make_a_key_at_once_agree(path) -> None:
    found, together = [], threading.Barrier(8)

    def make() -> None:
        together.wait()
        found.append(seals._kept.__wrapped__(path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(found)) == 1 and len(found) == 8 and os.listdir(path.parent) == ["key"]
