"""Do exported functions give the same bits where this package is not? Made on a machine without a GPU, run on one.

    python scripts/compare-exports.py write FOLDER        # on a machine without a GPU, with this package
    python scripts/compare-exports.py run FOLDER          # on an H200, with neither this package nor jax-triton
    python scripts/compare-exports.py compare FOLDER TABLE   # there, with this package: exports again, and compares

Kernels are bit for bit the same where one version of Triton writes them, so `write` and `compare` need the same.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
from jax import export

DEVICE = "H200"
PROGRAMS = ("rmsnorm_b1", "lora_b1", "gated_mlp_b8", "gqa_b1", "layer_norm")


def write(folder: Path) -> dict[str, int]:
    """Export each program for a GPU, which need not be here. Returns the calls of kernels in each."""
    from mirage_jax import exporting
    from mirage_jax.bench.programs import program

    folder.mkdir(parents=True, exist_ok=True)
    kernels: dict[str, int] = {}
    for name in PROGRAMS:
        p = program(name)
        made = exporting.exported(p.fn, p.inputs, {}, DEVICE)
        (folder / f"{name}.bin").write_bytes(made.program.serialize())
        kernels[name] = made.kernels
        print(f"{name}: {made.kernels} calls of kernels", flush=True)
    return kernels


def call(folder: Path, name: str) -> jax.Array:
    """Run an exported file on inputs that depend on their shapes and types alone."""
    made = export.deserialize(bytearray((folder / f"{name}.bin").read_bytes()))
    generator = np.random.default_rng(7)
    drawn = [(generator.standard_normal(x.shape) / 8).astype(x.dtype) for x in made.in_avals]
    return jax.jit(made.call)(*drawn)


def run(folder: Path) -> None:
    """Run each file, and keep what it gives."""
    for package in ("mirage_jax", "jax_triton"):
        assert importlib.util.find_spec(package) is None, f"{package} can be imported here"
    for name in PROGRAMS:
        np.save(folder / f"{name}.npy", call(folder, name))
        print(f"{name}: ran without this package", flush=True)


def compare(folder: Path) -> list[str]:
    """A line of a table for each program."""
    here = folder / "here"
    lines = ["| program | calls of kernels | bits with JAX alone, beside an export made here |", "|---|---:|---|"]
    for name, kernels in write(here).items():
        alone, again = np.load(folder / f"{name}.npy"), np.asarray(call(here, name))
        assert np.isfinite(alone).all() and np.abs(alone).max() > 0
        verdict = f"{np.count_nonzero(alone != again):,} of {alone.size:,} numbers differ"
        lines.append(f"| {name} | {kernels} | {verdict} |")
        print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    match sys.argv[1:]:
        case "write", folder:
            write(Path(folder))
        case "run", folder:
            run(Path(folder))
        case "compare", folder, table:
            Path(table).write_text("\n".join(compare(Path(folder))) + "\n")
        case _:
            sys.exit(__doc__)
