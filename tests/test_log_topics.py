"""The log by topic: which loggers it turns on, and one line for topics that do not exist."""

import logging
import os
import re
import subprocess
import sys

import pytest

from mirage_jax import UsageError, log_topics

PROGRAM = """
import jax.numpy as jnp, mirage_jax
f = mirage_jax.optimize(lambda a, b, v: (a @ b) @ v, on_miss="heuristic", cache_dir={folder!r})
f(jnp.ones((64, 64)), jnp.ones((64, 64)), jnp.ones(64))
"""


def lines(topics: str, folder: object, setup: str = "") -> list[str]:
    """What a process prints to standard error."""
    program = setup + PROGRAM.format(folder=str(folder))
    environment = os.environ | {
        "MIRAGE_JAX_LOG": topics,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_topics(tmp_path) -> None:
    timed = [re.fullmatch(r"\d\d:\d\d:\d\d (mirage_jax.*)", line) for line in lines("cache,gate", tmp_path)]
    found = [line[1] for line in timed if line]
    assert any(line.startswith("mirage_jax.cache: key ") for line in found)
    assert "mirage_jax.gate: float gate: passed on 19 input classes, repeated runs equal bit for bit" in found
    assert not any(line.startswith("mirage_jax.search") for line in found)


def test_a_program_with_a_log_of_its_own(tmp_path) -> None:
    found = lines("search", tmp_path, "import logging; logging.basicConfig(format='own %(message)s')")
    assert sum("searching for at most" in line for line in found) == 1
    assert all(line.startswith("own ") for line in found if "search" in line)


def test_unknown_topics_are_one_line(tmp_path) -> None:
    (line,) = lines("serach", tmp_path)
    assert "MIRAGE_JAX_LOG is ignored: unknown topic 'serach'. Did you mean 'search'? Allowed: search, cache" in line


def test_parse() -> None:
    assert log_topics.parse(" Search, gate,") == ("search", "gate") and log_topics.parse("") == ()
    with pytest.raises(UsageError, match="unknown topic 'x'"):
        log_topics.parse("search,x")
    assert log_topics.loggers(("all",)) == [logging.getLogger("mirage_jax")]
