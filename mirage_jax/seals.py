"""The key with which this user seals stored decisions, so that a file from somebody else is known as one.

A seal is an HMAC over an entry. Its key lies outside of the cache: in a file of 32 random bytes that only this user can
read, in the user's state directory, made when it is first needed. It is mixed with the identity of the machine, for a
home directory may be shared by several machines. ``MIRAGE_JAX_KEY_FILE`` names another file instead: whoever sets it
vouches for all machines and users that have it.

Where no key can be kept, every stored decision counts as somebody else's: it is checked again in each process.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import platformdirs

from mirage_jax.config import warn_once

log = logging.getLogger("mirage_jax.cache")

KEY_FILE_VARIABLE = "MIRAGE_JAX_KEY_FILE"
KEY_BYTES = 32  # bytes of a key that is made here
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096  # bytes of one that is named
MACHINE_ID_FILE = Path("/etc/machine-id")  # where there is none, the home directory alone tells


class Seal(StrEnum):
    """How this user knows an entry."""

    MADE = "made"  # searched, measured and passed through every gate
    CHECKED = "checked"  # somebody else's, which passed the checks for foreign entries
    FOREIGN = ""  # not at all


@dataclass(frozen=True)
class SealKey:
    """A secret; its name may be known."""

    secret: bytes

    @property
    def name(self) -> str:
        """Tells seals of different keys apart."""
        return hashlib.sha256(b"name" + self.secret).hexdigest()[:16]

    def seal(self, body: bytes, how: Seal) -> str:
        """The seal of an entry, as text."""
        return f"{how}:{self._code(body, how)}"

    def verify(self, body: bytes, seal: str) -> Seal:
        """What the seal of an entry says, if this key made it."""
        how, _, code = seal.partition(":")
        for known in (Seal.MADE, Seal.CHECKED):
            if how == known and hmac.compare_digest(code.encode(), self._code(body, known).encode()):
                return known
        return Seal.FOREIGN

    def _code(self, body: bytes, how: Seal) -> str:
        return hmac.new(self.secret, how.encode() + b"\0" + body, hashlib.sha256).hexdigest()


def own_key() -> SealKey | None:
    """This user's key; None where none can be kept."""
    named = os.environ.get(KEY_FILE_VARIABLE)
    return _named(named) if named else _kept(Path(platformdirs.user_state_dir("mirage_jax", False)) / "key")


@functools.cache
def _named(path: str) -> SealKey | None:
    try:
        with open(path, "rb") as file:
            mode, raw = os.fstat(file.fileno()).st_mode, file.read(MAX_KEY_BYTES + 1)
        if mode & 0o002:
            raise OSError("everybody may write to it")
        if not MIN_KEY_BYTES <= len(raw) <= MAX_KEY_BYTES:
            raise OSError(f"found {len(raw)} bytes; allowed are {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
    except (OSError, ValueError) as why:
        warn_once(f"{KEY_FILE_VARIABLE} is ignored: {path!r} is no key: {why}")
        return None
    return SealKey(hashlib.sha256(raw).digest())


@functools.cache
def _kept(path: Path) -> SealKey | None:
    try:
        secret = _secret(path)
    except (OSError, ValueError) as why:
        log.info("no key can be kept: %s", why)
        return None
    machine = b""
    with suppress(OSError):
        machine = MACHINE_ID_FILE.read_bytes()[:MAX_KEY_BYTES]
    return SealKey(hmac.new(secret, machine, hashlib.sha256).digest())


def _secret(path: Path) -> bytes:
    """What is in the file; a new secret if there is none, or none that only this user knows."""
    if not path.is_absolute():
        raise OSError("there is no home directory")
    if (found := _read(path)) is not None:
        return found
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _only_ours(path.parent.stat(), 0o022, str(path.parent))
    temporary = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):  # that is no key: a torn or an open one
            if path.exists() and _read(path) is None:
                os.unlink(path)
        try:
            os.link(temporary, path)  # of several processes one is first
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    if (found := _read(path)) is None:
        raise OSError(f"{path} is no file that only this user can read")
    return found


def _read(path: Path) -> bytes | None:
    """A key that is fit for use; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        _only_ours(found, 0o077, str(path))
        raw = os.read(fd, KEY_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError:
        return None
    finally:
        os.close(fd)
    return raw if len(raw) == KEY_BYTES else None


def _only_ours(found: os.stat_result, others: int, what: str) -> None:
    if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & others):
        raise OSError(f"{what} belongs to user {found.st_uid}, or others have access to it")
