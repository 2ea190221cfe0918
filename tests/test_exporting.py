"""Functions exported with their kernels for a GPU that is not here, and read by a process without this package."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import chain, operands

import mirage_jax
from mirage_jax import UsageError, cli, exporting
from mirage_jax.cache import Cache
from mirage_jax.cache_files import stored_files
from mirage_jax.compiler.absent_gpu import NOT_RUN, AbsentGpuCompiler, absent_gpu
from mirage_jax.compiler.matrix_units import coarsest
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.stored import key_of, store
from mirage_jax.config import Options
from mirage_jax.errors import LoweringError
from mirage_jax.hardware.gpus import AbsentGpu
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.lower.runtime import launch, xla_launch
from mirage_jax.mugraph.graph import Precision

pytest.importorskip("jax_triton")
pytest.importorskip("jax_plugins")

HERE = "test_exporting:norm"
TYPES = "f32[16,64] f32[64,32]"
SHAPES = (jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((64, 32), "float32"))
H200 = AbsentGpu("NVIDIA H200", 90)


def norm(x, w):
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ w


@pytest.fixture(scope="module")
def exported() -> exporting.Exported:
    return exporting.exported(norm, SHAPES, {}, "sm_90")


def payload(module: str) -> bytes:
    """What the call of a kernel carries."""
    (text,) = re.findall(r'@__gpu\$xla.gpu.ptx.*?kernel_data = "((?:[^"\\]|\\.)*)"', module)
    return re.sub(rb"\\([0-9A-F]{2}|.)", lambda m: bytes.fromhex(m[1].decode()) if m[1][1:] else m[1], text.encode())


def test_kernels_are_inside(exported: exporting.Exported) -> None:
    made = exported.program
    assert made.platforms == ("cuda",) and exported.kernels == 1
    assert [a.shape for a in made.out_avals] == [(16, 32)]
    ptx = payload(made.mlir_module())
    assert b".target sm_90a" in ptx and b".visible .entry" in ptx
    assert [str(check) for check in made.disabled_safety_checks] == [f"custom_call:{x}" for x in launch.CUSTOM_CALLS]


def test_every_assembler_of_cuda_13_reads_it(exported: exporting.Exported) -> None:
    """Triton 3.9 has an assembler of CUDA 13.4, whose PTX 9.4 the one of CUDA 13.0 refused on an H200."""
    version = re.search(rb"\.version (\d+)\.(\d+)", payload(exported.program.mlir_module()))
    assert version is not None and (int(version[1]), int(version[2])) <= (9, 0)


def test_the_file_is_small_and_names_no_folder(exported: exporting.Exported) -> None:
    data = bytes(exported.program.serialize())
    assert 2_000 < len(data) < 50_000
    folders = [Path(__file__).parent, Path(sys.prefix), Path.home(), Path(jax.__file__).parent, Path.cwd()]
    for text in (data, payload(exported.program.mlir_module())):
        assert not [folder for folder in folders if str(folder).encode() in text]


def test_the_report_says_what_was_not_checked(exported: exporting.Exported) -> None:
    (region,) = exported.report.regions
    d = region.decision
    assert d.winner.has_kernels and d.winner.capability == 90 and d.source == "search"
    assert d.gate.endswith(NOT_RUN) and "bit for bit" in d.exact and d.certificate
    assert exported.gpu == "NVIDIA H100, compute capability 9.0"


def test_the_report_says_why_no_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assembler that may not be executed, for one."""

    def compile_for(*_: object) -> None:
        raise LoweringError("ptxas: permission denied")

    monkeypatch.setattr("mirage_jax.compiler.absent_gpu.compile_for", compile_for)
    (region,) = exporting.exported(norm, SHAPES, {}, "sm_90").report.regions
    assert "no candidate could be compiled" in region.decision.why and "permission denied" in region.decision.why


JAX_ALONE = """
import sys

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("mirage_jax", "jax_triton", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent)
import jax
from jax import export
made = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
"""
READER = """
from jaxlib import xla_client
assert "triton_kernel_call_ffi" in [name for name, *_ in xla_client._custom_callback["CUDA"]]
module = jax.jit(made.call).trace(*made.in_avals).lower(lowering_platforms=("cuda",)).as_text()
assert "@__gpu$xla.gpu.ptx(" in module
"""
RUNNER = """
import numpy as np
with np.load(sys.argv[2]) as file:
    arguments = [file[name] for name in file]
np.save(sys.argv[3], jax.jit(made.call)(*arguments))
"""


def run_with_jax_alone(script: str, *args: Path, **environment: str) -> None:
    """Run a script in a process that finds neither this package nor Triton. Its first argument is the exported file."""
    command = [sys.executable, "-c", JAX_ALONE + script, *map(str, args)]
    subprocess.run(command, check=True, env=os.environ | environment)


def test_a_process_with_jax_alone_reads_it(exported: exporting.Exported, tmp_path: Path) -> None:
    """`import jax` registers the target of the calls where the CUDA plugin is installed."""
    (tmp_path / "norm.bin").write_bytes(exported.program.serialize())
    run_with_jax_alone(READER, tmp_path / "norm.bin", JAX_PLATFORMS="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, "sm_90"])
def test_a_process_with_jax_alone_gets_the_same_bits(device: str | None, tmp_path: Path) -> None:
    """Kernels of an exported file give what they give in the process that made it."""
    arguments = [np.random.default_rng(7).standard_normal(shape.shape, np.float32) for shape in SHAPES]
    f = mirage_jax.optimize(norm, on_miss="heuristic")
    made = exporting.exported(f, SHAPES, {}, device)
    assert made.kernels == 1
    (tmp_path / "norm.bin").write_bytes(made.program.serialize())
    np.savez(tmp_path / "arguments.npz", *arguments)
    files = (tmp_path / "norm.bin", tmp_path / "arguments.npz", tmp_path / "result.npy")
    run_with_jax_alone(RUNNER, *files, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    here = f(*arguments) if device is None else made.program.call(*arguments)
    assert np.load(tmp_path / "result.npy").tobytes() == np.asarray(here).tobytes()


def test_one_target_is_that_of_jax_triton() -> None:
    import jax_triton

    assert launch.CUSTOM_CALLS == (jax_triton.CUSTOM_CALL_TARGET_NAME, xla_launch.TARGET)


def test_gradients_have_kernels_too(exported: exporting.Exported) -> None:
    restored = jax.export.deserialize(exported.program.serialize(vjp_order=1))
    assert f"@{xla_launch.TARGET}(" in restored.vjp().mlir_module()


def test_products_of_float32_round_as_matrix_units_do() -> None:
    """XLA rounds operands to TF32 on the GPU, matrix units cut them off, and the sum of their errors is not zero."""
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    made = exporting.exported(lambda x, y: jax.nn.logsumexp(x @ y.T, -1), (x, x), {}, "H200")
    (region,) = made.report.regions
    winner = region.decision.winner
    assert winner is not None and [k.precise for k in winner.schedule.kernels] == [Precision.ROUNDED]
    (region,) = exporting.exported(norm, SHAPES, {}, "H200").report.regions
    winner = region.decision.winner
    assert winner is not None and coarsest(winner) == Precision.FLOAT32  # sums of products need no matrix units


def test_options_count() -> None:
    assert exporting.exported(mirage_jax.optimize(norm, backend="jax"), SHAPES, {}, "A100").kernels == 0
    made = mirage_jax.export(mirage_jax.optimize(norm, on_miss="fallback"), *SHAPES, device="sm_80")
    assert "triton" not in made.mlir_module() and xla_launch.TARGET not in made.mlir_module()


def test_the_export_of_jax_has_no_kernels(caplog: pytest.LogCaptureFixture) -> None:
    f = mirage_jax.optimize(norm).with_compiler(AbsentGpuCompiler(Options(), H200))
    f.compiler.exports_kernels = False
    text = jax.export.export(f, platforms=["cuda"])(*SHAPES).mlir_module()
    assert "triton" not in text and xla_launch.TARGET not in text


# Decisions that are stored.


@pytest.fixture
def tuned(tmp_path: Path) -> Cache:
    """A cache with a decision of somebody who has an H200."""
    compiler = AbsentGpuCompiler(Options(), H200)
    (region,) = analyse(jax.make_jaxpr(norm)(*SHAPES)).regions
    decision = compiler.decide(region, "cuda")
    subject = RegionOnDevice(region, "cuda", H200, Options())
    cache = Cache(tmp_path / "cache")
    store(cache, key_of(subject), decision)
    return cache


def test_stored_decisions_count(tuned: Cache) -> None:
    assert tuned.device_kinds() == [("NVIDIA H200", "9.0")]
    f = mirage_jax.optimize(norm, cache_dir=tuned.directory, on_miss="error")
    found = exporting.exported(f, SHAPES, {}, "sm_90")
    assert found.kernels == 1 and found.gpu.startswith("NVIDIA H200,")
    assert [r.decision.source for r in found.report.regions] == ["cache"]


def test_decisions_of_others_are_checked_and_get_no_seal(tuned: Cache, monkeypatch, tmp_path: Path) -> None:
    """The float gate cannot run kernels here, so no process with a GPU may trust what it said."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = [path.read_bytes() for path in tuned.files()]
    f = mirage_jax.optimize(norm, cache_dir=tuned.directory, on_miss="error")
    (region,) = exporting.exported(f, SHAPES, {}, "H200").report.regions
    assert region.decision.source == "cache" and "made elsewhere" in region.decision.gate
    assert region.decision.exact.endswith(NOT_RUN)
    assert [path.read_bytes() for path in tuned.files()] == before


def test_names_of_gpus(tuned: Cache) -> None:
    assert absent_gpu("H100", tuned) == AbsentGpu("NVIDIA H100", 90)
    assert absent_gpu("H200", tuned) == absent_gpu("sm_90", tuned) == H200
    assert absent_gpu("sm_121", tuned) == AbsentGpu("NVIDIA sm_121", 121)
    with pytest.raises(UsageError, match="there is no GPU here; name one"):
        mirage_jax.export(norm, *SHAPES)


# The commands.


@pytest.fixture
def command(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run(*argv: object) -> tuple[int, str]:
        code = cli.main([*map(str, argv)])
        return code, capsys.readouterr().out

    return run


def test_compile(command, tmp_path: Path) -> None:
    file = tmp_path / "norm.bin"
    code, out = command("compile", HERE, TYPES, "--for", "sm_90", "--out", file)
    assert code == cli.OK and len(jax.export.deserialize(bytearray(file.read_bytes())).in_avals) == 2
    assert (
        out.endswith(" with its CUDA plugin, on NVIDIA H100, compute capability 9.0\n") and "test_exporting.py:" in out
    )
    assert "certified: " in out and "not measured" in out and "note: kernels cannot run here" in out
    assert f"written: {file}, " in out and " bytes, 1 calls of kernels\n" in out


def test_compile_without_a_kernel_is_a_problem(command, tmp_path: Path) -> None:
    options = ("--for", "sm_90", "--out", tmp_path / "norm.bin", "--on-miss", "fallback")
    code, out = command("compile", HERE, TYPES, *options)
    assert code == cli.PROBLEM and "0 calls of kernels" in out


def test_check_names_lines_without_a_decision(command, tuned: Cache, tmp_path: Path) -> None:
    assert command("check", HERE, TYPES, "--on-miss", "error", "--for", "H200", "--cache-dir", tuned.directory) == (
        cli.OK,
        "1 regions, 0 without a stored decision\n",
    )
    code, out = command("check", HERE, TYPES, "--for", "H100", "--cache-dir", tuned.directory)
    line, count, fix = out.splitlines()
    assert code == cli.PROBLEM and re.search(
        r"test_exporting\.py:\d+ \(norm\): no stored decision \(decided before", line
    )
    assert "device gpu: NVIDIA H200 (here gpu: NVIDIA H100)" in line and count.startswith("1 regions, 1 without")
    asked = f"explain {HERE} '{TYPES}' --on-miss search --cache-dir {tuned.directory}"
    assert fix == f"to decide them on H100: python -m mirage_jax {asked}"
    code, out = command("check", HERE, TYPES, "--on-miss", "fallback", "--cache-dir", tmp_path / "empty")
    assert code == cli.OK and "1 without a stored decision" in out


# Decisions in several directories.


def test_a_team_reads_what_one_of_them_made(tmp_path: Path, monkeypatch, caplog) -> None:
    args = operands(16)
    shared, own = tmp_path / "shared", tmp_path / "own"
    f = mirage_jax.optimize(chain, cache_dir=shared, on_miss="heuristic")
    (region,) = analyse(jax.make_jaxpr(chain)(*args)).regions
    decision = f.compiler.decide(region, "cpu")
    store(Cache(shared), key_of(RegionOnDevice(region, "cpu", jax.devices()[0], f.options)), decision)
    before = [path.read_bytes() for path in Cache(shared).files()]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # of somebody else
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", f"{own}{os.pathsep}{shared}")
    with caplog.at_level(logging.WARNING, "mirage_jax"):
        (found,) = mirage_jax.optimize(chain, on_miss="error").explain(*args).regions
    assert found.decision.source == "cache" and found.decision.winner is not None and not caplog.records
    assert [path.read_bytes() for path in Cache(shared).files()] == before
    assert [file.entry.decision for file in stored_files(Cache(own))] == ["win"]  # checked once, with the user's seal
