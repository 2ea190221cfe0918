"""A child like `mirage_jax.compiler.isolation.child`, whose variants do what they are told instead of running
kernels."""

import functools
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax import gpu_lock, timing
from mirage_jax.compiler.isolation import child
from mirage_jax.compiler.winner import Winner
from mirage_jax.lower.runtime import launch
from mirage_jax.lower.triton.emitter import KernelSource
from mirage_jax.verify.exact.interpreters.triton import interpret

healthy = True


FAULT = """
import triton
import triton.language as tl

@triton.jit
def fault(x, y):
    tl.store(y + 1099511627776, tl.load(x))
"""


def fault() -> None:
    """On a GPU: write to an address that is nobody's."""
    x = jnp.ones(1)
    source = KernelSource("fault", FAULT, (1,), ("x",), ("y",), ("f32", "f32"), ((1,),), 1, 1)
    jax.block_until_ready(jax.jit(lambda x: launch.call_kernel(source, [x]))(x))


def prepare(variant):
    if variant["do"] == "refuse":
        raise ValueError("cannot be compiled\nsecond line")
    if variant["do"] == "abort while compiling":
        time.sleep(0.05)  # others are being compiled by then
        os.abort()

    if variant["do"] == "compile slowly":
        time.sleep(0.3)

    def run() -> timing.Timing:
        global healthy
        match variant["do"]:
            case "interpret":
                winner = Winner.from_json(variant, "cuda")
                rng = np.random.default_rng(0)
                arrays = [rng.normal(size=view.whole).astype(np.float16) for view in winner.views]
                interpret(winner.graph, winner.schedule, arrays, options=winner.options)
            case "abort":
                print("what a library prints is no message")
                print("illegal access", file=sys.stderr)
                sys.stderr.flush()
                os.abort()
            case "fault":
                fault()
            case "hang once" if not (file := Path(variant["file"])).exists():
                new = file.with_suffix(".new")
                new.write_text(str(os.getppid()))
                new.rename(file)
                time.sleep(600)
            case "hang":
                time.sleep(600)
            case "raise":
                raise RuntimeError("launch failure")
            case "poison":
                healthy = False
                raise RuntimeError("illegal address")
        return timing.Timing((variant["seconds"],), 1.0)

    return run


def measure(runs):
    if len(runs) > 1 and os.environ.get("ABORT_TOGETHER"):
        os.abort()
    return [run() for run in runs]


if __name__ == "__main__":
    if "never ready" in sys.argv:
        sys.exit("no device")
    say = child.channel()
    print("neither is this")
    say({"ready": "fake device"})
    fine = lambda: healthy and child.device_is_healthy()  # noqa: E731
    gpu_lock.NOTICE_SECONDS = float(os.environ.get("OFTEN", gpu_lock.NOTICE_SECONDS))
    shared = os.environ.get("TURNS")
    turn = functools.partial(gpu_lock.alone, Path(shared)) if shared else nullcontext
    child.serve(child.lines_until_the_parent_ends(), say, prepare, measure, fine, turn)
    os._exit(1)
