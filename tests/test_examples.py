"""Every example runs, on sizes that a test can afford, and finds itself as accurate as XLA."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {"quickstart": ["--length", "128", "--width", "32", "--heads", "2", "--budget", "2s", "--rounds", "2"]}
TINY = ["--small", "--layers", "1", "--steps", "1", "--budget", "1s", "--on-miss", "fallback"]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda f: f.stem)
def test_example(file, capsys) -> None:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(SMALL.get(file.stem, TINY)) == 0
    assert "summary" in capsys.readouterr().out


def test_text_is_long_enough() -> None:
    assert len((EXAMPLES / "data" / "alice.txt").read_bytes()) >= 2048
