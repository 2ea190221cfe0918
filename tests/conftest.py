"""Shared test set-up: the platform, eight CPU devices, the `gpu` marker and golden files (``--update-golden`` rewrites
them)."""

import glob
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*")) and os.environ.get("JAX_PLATFORMS") != "cpu"
if not HAS_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: the CUDA plugin is here for lowering only

FLAGS = ["--xla_force_host_platform_device_count=8"]
if not HAS_GPU:  # LLVM's work, not XLA's: nothing means something else, and tests take less time
    FLAGS += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
for flag in FLAGS:
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

GOLDEN = Path(__file__).parent / "golden"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it in what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's winners, and no variable of the user's shell changes a test."""
    for name in [n for n in os.environ if n == "MIRAGE_JAX" or n.startswith("MIRAGE_JAX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # of the key for seals


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`golden(text)` compares with tests/golden/<module>/<test>.txt; `golden(text, "part")` with <test>.part.txt."""
    module = Path(request.path).relative_to(Path(__file__).parent).with_suffix("")
    stem = request.node.name.translate(str.maketrans("[]/ ", "-_--")).rstrip("_")

    def check(text: str, part: str = "") -> None:
        file = GOLDEN / module / (f"{stem}.{part}.txt" if part else f"{stem}.txt")
        text = text if text.endswith("\n") else text + "\n"
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            return
        assert file.exists(), f"no golden file {file}; look at the text, then run with --update-golden\n{text}"
        assert text == file.read_text(), f"differs from {file}; if it is meant to, run with --update-golden"

    return check
