"""A child like `mirage_jax.compiler.worker`, whose variants do what they are told instead of running kernels."""

import os
import sys
import time

import numpy as np

from mirage_jax import timing
from mirage_jax.compiler import worker
from mirage_jax.compiler.winner import Winner
from mirage_jax.lower.triton_interpreter import interpret

healthy = True


def prepare(variant):
    if variant["do"] == "refuse":
        raise ValueError("cannot be compiled\nsecond line")
    if variant["do"] == "abort while compiling":
        time.sleep(0.05)  # others are being compiled by then
        os.abort()

    def run() -> timing.Timing:
        global healthy
        match variant["do"]:
            case "interpret":
                winner = Winner.from_json(variant, "cuda")
                rng = np.random.default_rng(0)
                arrays = [rng.normal(size=s).astype(np.float16) for s in winner.shapes_in]
                interpret(winner.graph, winner.schedule, arrays)
            case "abort":
                print("what a library prints is no message")
                print("illegal access", file=sys.stderr)
                sys.stderr.flush()
                os.abort()
            case "hang":
                time.sleep(600)
            case "raise":
                raise RuntimeError("launch failure")
            case "poison":
                healthy = False
                raise RuntimeError("illegal address")
        return timing.Timing((variant["seconds"],), 1.0)

    return run


if __name__ == "__main__":
    if "never ready" in sys.argv:
        sys.exit("no device")
    say = worker.channel()
    print("neither is this")
    say({"ready": "fake device"})
    worker.serve(worker.lines_until_the_parent_ends(), say, prepare, lambda: healthy)
    os._exit(1)
