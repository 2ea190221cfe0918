"""The three paths in docs/architecture.md are true: a traced run enters their modules in the order that is told."""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import pytest
from deciding import measured

import mirage_jax
from mirage_jax.report import Report
from mirage_jax.verify.floats import gate

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_MODULES = 12


def steps_of(title: str) -> list[str]:
    """The modules of a numbered list, in order."""
    section = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `(mirage_jax/\S+\.py)`", section, re.MULTILINE)


PATHS = {title: steps_of(title) for title in ("A jaxpr equation", "The option `budget`", "A refusal by the float gate")}


@contextmanager
def entered() -> Iterator[list[str]]:
    """The modules of the package whose functions are called inside, in order, in all new threads."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/mirage_jax/" in file and not frame.f_code.co_name.startswith("<"):
            module = "mirage_jax/" + file.rpartition("/mirage_jax/")[2]
            if not found or found[-1] != module:
                found.append(module)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def passes(modules: Sequence[str], path: Sequence[str]) -> str:
    """The first step of a path that a run does not take after those before it; empty if it takes all."""
    rest = iter(modules)
    return next((step for step in path if step not in rest), "")


def explained(fn: Callable[..., Any], size: int, **options: Any) -> Report:
    q = jax.ShapeDtypeStruct((2, size, 16), "float32")
    report = mirage_jax.optimize(fn, **options).explain(q, q, q)
    assert str(report)
    return report


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return (q @ k.swapaxes(-1, -2)) @ v / k.shape[-2]


@pytest.mark.parametrize("title", PATHS)
def test_paths_are_short_and_lead_through_modules_that_exist(title: str) -> None:
    assert 0 < len(PATHS[title]) <= MAX_MODULES
    assert all((ROOT / module).is_file() for module in PATHS[title])


def test_an_equation() -> None:
    with entered() as modules, measured(2.0):
        report = explained(linear_attention, 512)
    assert report.optimized
    assert not passes(modules, PATHS["A jaxpr equation"])


def test_a_budget() -> None:
    path = PATHS["The option `budget`"]
    with entered() as modules:
        explained(linear_attention, 256, budget="20s")
    wide_only = "mirage_jax/search/decompose/subprocesses.py"  # divides the budget of a region of several parts
    assert wide_only in path and not passes(modules, [step for step in path if step != wide_only])


def test_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that refuses the first comparison of all, with every rule asked before."""
    real = gate.float_gate

    def refuse(*args: Any, **kwargs: Any) -> gate.GateResult:
        real(*args, **kwargs)
        return gate.GateResult(False, ("planted",))

    monkeypatch.setattr(gate, "float_gate", refuse)
    with entered() as modules, measured(2.0):  # nothing that is slower gets to the gate
        report = explained(linear_attention, 768)
    assert "planted" in str(report)
    assert not passes(modules, PATHS["A refusal by the float gate"])


def test_a_path_in_another_order_is_noticed() -> None:
    assert passes(["a", "b", "a", "c"], ["b", "a", "c"]) == ""
    assert passes(["a", "b", "a", "c"], ["c", "b"]) == "b"
