"""Shows the log by topic: ``MIRAGE_JAX_LOG=search,gate`` prints what these topics log, and ``all`` everything.

A topic is a logger, such as ``mirage_jax.search``. The lines go to standard error, unless the program has set up
logging: then only the level of the topics changes.
"""

from __future__ import annotations

import functools
import logging
import os

from mirage_jax.config import unknown, warn_once
from mirage_jax.errors import UsageError

VARIABLE = "MIRAGE_JAX_LOG"
TOPICS = ("search", "cache", "gate", "timing")
ALL = "all"

log = logging.getLogger("mirage_jax")


def parse(text: str) -> tuple[str, ...]:
    """Read topics, separated by commas.

    Raises:
        UsageError: there is no such topic.
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*TOPICS, ALL):
            raise UsageError(unknown("topic", name, (*TOPICS, ALL)))
    return tuple(names)


def loggers(topics: tuple[str, ...]) -> list[logging.Logger]:
    """The loggers of some topics."""
    return [log if topic == ALL else log.getChild(topic) for topic in topics]


@functools.cache
def show(text: str) -> None:
    """Show some topics from now on."""
    try:
        topics = parse(text)
    except UsageError as error:
        return warn_once(f"{VARIABLE} is ignored: {error}")
    for logger in loggers(topics):
        logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)  # which print it already
    log.addHandler(handler)
    return None


def show_those_of_environment() -> None:
    """Show the topics that the environment names."""
    if text := os.environ.get(VARIABLE):
        show(text)
