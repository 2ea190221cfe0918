"""Decisions for published models, which ./decisions brings: whole, certified, and used by programs of these models."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import mirage_jax
from mirage_jax import cache as cache_module
from mirage_jax import cache_files, exporting
from mirage_jax.bench import steps
from mirage_jax.cache import Cache, brought_by_packages
from mirage_jax.cache_files import StoredFile
from mirage_jax.compiler import stored
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.config import Options
from mirage_jax.hardware.gpus import AbsentGpu
from mirage_jax.jaxpr_frontend.partition.regions import analyse

ROOT = Path(__file__).parent.parent / "decisions"
H200 = AbsentGpu("NVIDIA H200", 90)
MODELS = [
    *("llama_decode_b1", "llama_decode_b8", "llama_prefill", "bert_train", "lora_train", "linear_train"),
    *("ngpt", "chameleon", "vit"),
]


@pytest.fixture(scope="module")
def files() -> list[StoredFile]:
    return list(cache_files.stored_files(Cache(ROOT / "mirage_jax_decisions" / "h200")))


def test_all_winners_are_certified(files) -> None:
    assert len(files) >= 40 and not list(cache_files.problems(files))
    assert {f.key.device_kind for f in files} == {"gpu: NVIDIA H200"}
    assert all(f.key == f.key.any_build and f.entry.holds_for_any_build for f in files)


@pytest.mark.parametrize("model", MODELS)
def test_models_find_winners_with_the_kernels_that_were_measured(files, model: str) -> None:
    """Where a change of a back end writes other kernels for all of a model's winners, they have to be tuned again."""
    step = steps.step("models", model)
    winners = {f.key.graph: f.entry for f in files if f.entry.decision == "win"}
    regions = analyse(jax.make_jaxpr(step.fn)(*jax.eval_shape(step.draw, jax.random.key(0)))).regions
    subjects = [RegionOnDevice(region, "cuda", H200, Options.make({})) for region in regions]
    found = {key: subject for subject in subjects if (key := stored.key_of(subject).graph) in winners}
    proven = {
        key: stored.proven_winner(subject, winners[key], winners[key].reasons[2])[0] for key, subject in found.items()
    }
    assert any(winner.kernel_digest == winners[key].kernels for key, winner in proven.items())


@pytest.fixture
def installed(tmp_path, monkeypatch, files) -> Iterator[None]:
    """The package, as it is installed beside the versions that its keys name."""
    info = tmp_path / "mirage_jax_decisions-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mirage-jax-decisions\nVersion: 0.1.0\n")
    point = '[project.entry-points."mirage_jax.decisions"]\n'
    (line,) = (ROOT / "pyproject.toml").read_text().partition(point)[2].splitlines()[:1]
    (info / "entry_points.txt").write_text(f"[mirage_jax.decisions]\n{line.replace('"', '')}\n")
    (tmp_path / "mirage_jax_decisions").symlink_to(ROOT / "mirage_jax_decisions")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # they are part of a key
    here = dict(files[0].key.versions) | {"source": cache_module.source_digest()}
    monkeypatch.setattr(cache_module, "versions", lambda: tuple(here.items()))
    brought_by_packages.cache_clear()
    yield
    brought_by_packages.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_an_installed_package_is_proven_again_where_it_is_read(installed, files) -> None:
    """Without a GPU: kernels run in the interpreter and compile for the H200; their muGraphs' floats are compared."""
    step = steps.step("models", "llama_decode_b1")
    f = exporting.for_gpu(mirage_jax.optimize(step.fn, on_miss="fallback"), "H200")
    report = f.explain(*jax.eval_shape(step.draw, jax.random.key(0)))
    won = [r.decision for r in report.regions if r.decision.winner is not None]
    assert len(won) >= 3 and {d.source for d in won} == {"cache"}
    for d in won:
        assert "as measured elsewhere" in d.why and d.certificate is not None
        assert "made elsewhere" in d.gate and "kernels agree with the graph bit for bit" in d.exact
