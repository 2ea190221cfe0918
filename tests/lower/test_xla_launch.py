"""Kernels that XLA starts itself, in the real XLA, which compiles for a GPU that is not there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower.kernels import attention, rmsnorm
from lower.test_launch import lowered

import mirage_jax
from mirage_jax.lower.runtime import triton_runtime
from mirage_jax.lower.runtime.launch import kernel_calls, sources
from mirage_jax.lower.runtime.xla_launch import TARGET, without_scratch

pytest.importorskip("jax_triton")
import triton
import triton.language as tl

ENTRY = """
.visible .entry mirage_k0(
	.param .u64 .ptr .global .align 16 mirage_k0_param_0,
	.param .u64 .ptr .global .align 16 mirage_k0_param_1,
	.param .u64 .ptr .global .align 1 mirage_k0_param_2,
	.param .u64 .ptr .global .align 1 mirage_k0_param_3
)
.reqntid 128
{
	ld.param.b64 	%rd1, [mirage_k0_param_0];
	ld.param.b64 	%rd2, [mirage_k0_param_1];
	ret;
}
"""


def test_parameters_for_scratch_memory_are_left_out() -> None:
    found = without_scratch(ENTRY, 2)
    assert re.findall(r"param_\d", found.partition("{")[0]) == ["param_0", "param_1"]
    assert found.partition("\n)")[2] == ENTRY.partition("\n)")[2]


@pytest.mark.parametrize(
    "ptx",
    [
        ENTRY.replace("rd2, [mirage_k0_param_1", "rd2, [mirage_k0_param_2"),
        ENTRY.replace(".u64 .ptr .global .align 16 mirage_k0_param_1", ".align 64 .b8 mirage_k0_param_1[128]"),
        ENTRY.replace(".u64 .ptr .global .align 16 mirage_k0_param_1", ".u32 mirage_k0_param_1"),
        ENTRY.replace(",\n\t.param .u64 .ptr .global .align 1 mirage_k0_param_3", ""),
        "no kernel",
    ],
    ids=["scratch memory is used", "a descriptor", "a number", "another count", "no entry"],
)
def test_other_kernels_stay(ptx: str) -> None:
    assert without_scratch(ptx, 2) == ""


@pytest.mark.parametrize("make", [attention, rmsnorm])
def test_every_kernel_of_addresses_is_started_by_xla(make) -> None:
    program = make("f16")
    text = lowered(program.graph, program.schedule)
    assert text.count(f"@{TARGET}(") == len(program.graph.kernels) and "triton_kernel_call_ffi" not in text
    for source in filter(None, sources(program.graph, program.schedule)):
        grid = (*source.grid, 1, 1)[:3]
        sizes = [f"grid_{axis} = {size} : i32" for axis, size in zip("xyz", grid, strict=True)]
        assert any(all(size in line for size in sizes) for line in text.splitlines() if TARGET in line)


@triton.jit
def copy(source, result):
    at = tl.arange(0, 128)
    tl.store(result + at, tl.load(source + at))


def test_kernels_of_other_packages_stay() -> None:
    """A program may have kernels of its own, which it gives to jax-triton."""
    library = triton_runtime.jax_triton_library()
    x = jax.ShapeDtypeStruct((128,), "float32")
    f = jax.jit(lambda x: library.triton_call(x, kernel=copy, out_type=x, grid=(1,), compute_capability=90))
    text = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call_ffi(") == 1 and TARGET not in text


FIRST_CALLS = """
import sys
import threading
from mirage_jax.lower.runtime import triton_runtime

sys.setswitchinterval(1e-6)
barrier, found = threading.Barrier(8), []

def first():
    barrier.wait()
    try:
        found.append(triton_runtime.jax_triton_library())
    except Exception as why:
        found.append(why)

threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(set(map(id, found))) == 1, found
"""


def test_one_thread_changes_jax_triton() -> None:
    subprocess.run([sys.executable, "-c", FIRST_CALLS], check=True)


def test_a_change_of_jax_triton_that_was_interrupted_begins_again(monkeypatch) -> None:
    """A thread may be told to stop anywhere: what is changed already is not changed once more."""
    program = attention("f16")
    before = lowered(program.graph, program.schedule)
    triton_runtime._changed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(triton_runtime.xla_launch, "launch_type", lambda base: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            triton_runtime.jax_triton_library()
    jax.clear_caches()
    assert lowered(program.graph, program.schedule) == before


H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978892800 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "an H100"
"""
COMPILED_FOR_AN_ABSENT_GPU = """
import sys
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from mirage_jax import optimize
from mirage_jax.compiler.absent_gpu import AbsentGpuCompiler
from mirage_jax.config import Options
from mirage_jax.hardware.gpus import AbsentGpu

gpu = topologies.get_topology_desc("1x1x1", "cuda", target_config=sys.argv[1], topology="1x1x1").devices[0]
norm = lambda x, w: (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ w
ours = optimize(norm).with_compiler(AbsentGpuCompiler(Options(), AbsentGpu("NVIDIA H100", 90)))

def layer(x, w):
    return jnp.sin(x + jnp.sum(ours(x, w), -1, keepdims=True))

def layers(x, w):
    return layer(layer(layer(x, w), w), w)

def loop(x, w):
    return jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=9)[0]

place = SingleDeviceSharding(gpu)
shapes = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")
jax.jit(globals()[sys.argv[2]], in_shardings=place, out_shardings=place).lower(*shapes).compile()
"""


def started(program: str, folder: Path, *flags: str) -> str:
    """How XLA starts a program's kernels, by its own account: those in a line under ``kCommandBuffer`` as one graph."""
    pytest.importorskip("jax_cuda13_plugin")
    from triton.backends.nvidia.compiler import get_ptxas

    environment = os.environ | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no cuDNN, which nothing here needs
        "XLA_FLAGS": " ".join([f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text", *flags]),
        "PATH": os.pathsep.join([str(Path(get_ptxas(90).path).parent), os.environ["PATH"]]),
        "JAX_PLATFORMS": "cpu",
        "MIRAGE_JAX_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-W", "ignore", "-c", COMPILED_FOR_AN_ABSENT_GPU, H100, program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    after = folder.glob(f"*{program}*thunk_sequence_after_thunk_passes.txt")  # there is none where nothing changed
    (file,) = list(after) or folder.glob(f"*{program}*thunk_sequence.txt")
    return file.read_text()


def test_kernels_are_in_the_graph_of_xla(tmp_path: Path) -> None:
    """What XLA starts as one CUDA graph holds its own kernels and ours: all nine of them here."""
    text = started("layers", tmp_path)
    graph, *members = text.splitlines()
    assert "kCommandBuffer" in graph and len(members) == 9
    assert sum(" mirage_" in member for member in members) == 3 and "kCustomCall" not in text


@pytest.mark.parametrize("flags", [(), ("--xla_gpu_graph_min_graph_size=1",)], ids=["as ever", "for short ones"])
def test_a_loop_of_few_kernels_is_no_graph(flags: tuple[str, ...], tmp_path: Path) -> None:
    """XLA makes no graph of fewer than five (docs/limits)."""
    body = started("loop", tmp_path, *flags).partition("body:")[2]
    assert body.count("kCustomKernel") == 4 and " mirage_" in body
    assert ("kCommandBuffer" in body) == bool(flags)


@pytest.mark.gpu
def test_the_same_array_may_come_twice() -> None:
    """XLA passes a kernel of its own each address once, but ours as often as it takes it."""

    def gram(x, y):
        return jax.nn.softmax(x @ y.T, -1) @ y.reshape(x.shape)

    x = jnp.asarray(np.random.default_rng(3).standard_normal((64, 32), np.float32))
    f = mirage_jax.optimize(gram, on_miss="heuristic")
    both = jax.jit(lambda x: f(x, x.reshape(32, 64).reshape(64, 32)))
    assert kernel_calls(both.lower(x).as_text())
    np.testing.assert_allclose(np.asarray(both(x)), np.asarray(gram(x, x)), rtol=2e-2, atol=2e-2)
