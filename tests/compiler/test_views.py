"""Parts of operands that kernels read where they lie."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.replacing import Replacing, optimized

from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.tuning_session import space_for
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.lower.runtime.launch import kernel_calls
from mirage_jax.mugraph.graph import KernelSchedule, Schedule
from mirage_jax.mugraph.views import View
from mirage_jax.search.driver import search
from mirage_jax.verify.exact import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret

ROWS, WIDTH, HEADS, HEAD = 16, 32, 2, 32


def fused_gate(x, w):
    y = x @ w
    return jax.nn.silu(y[:, :HEAD]) * y[:, HEAD:]


def rotated(x, w, angles):
    """Halves of each head of ``x w``, rotated."""
    left, right = jnp.split((x @ w).reshape(len(x), HEADS, HEAD).astype("float32"), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), "bfloat16")


PROGRAMS = {
    "fused gate": (fused_gate, (normal(ROWS, WIDTH), normal(WIDTH, 2 * HEAD))),
    "rotary": (rotated, (normal(ROWS, WIDTH), normal(WIDTH, HEADS * HEAD), jnp.linspace(0, 1, HEAD // 2))),
    "rotary of one row": (rotated, (normal(1, WIDTH), normal(WIDTH, HEADS * HEAD), jnp.linspace(0, 1, HEAD // 2))),
}


def winner_of(fn, args) -> tuple[Region, Winner]:
    """The best kernels for the only region of a function."""
    (region,) = analyse(jax.make_jaxpr(fn)(*args).jaxpr).regions
    subject = RegionOnDevice(region, "cuda", None, Options())
    found, _ = search(subject.reference, DEVICES["H200"], space_for(region), seconds=60.0, states=20_000)
    c = next(c for c in found if c.family == "kernels")
    return region, subject.winner(c.graph, c.schedule, c.family)


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_read_parts_of_weights(name: str) -> None:
    fn, args = PROGRAMS[name]
    region, winner = winner_of(fn, args)
    cut = {t for b in region.inputs for t, view in b.parts if view.cuts}
    assert len(cut) == 2 and winner.in_place == cut
    values = [args[b.value] for b in region.inputs]
    given = region.prepare(values, winner.in_place)
    assert [x.shape for x, t in zip(given, region.graph.inputs, strict=True) if t.name in cut] == [args[1].shape] * 2
    wanted = [np.asarray(x, np.float32) for x in region.reference(*values)]

    arrays = [
        np.asarray(x) if view.cuts else np.asarray(view.of(x)) for x, view in zip(given, winner.views, strict=True)
    ]
    made = interpret(winner.graph, winner.schedule, arrays, options=winner.options)
    shaped = [jnp.asarray(y).reshape(n) for y, n in zip(made, winner.shapes_out, strict=True)]
    for results in (shaped, winner.portable(*given)):
        for have, want in zip(region.finish(results), wanted, strict=True):
            np.testing.assert_allclose(np.asarray(have, np.float32), want, rtol=0, atol=2e-2 * np.abs(want).max())

    assert Winner.from_json(winner.to_json(), "cuda").options == winner.options
    assert exact_check.exact_check(winner.graph, winner.schedule, winner.options) == ""


def test_a_wrong_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, winner = winner_of(*PROGRAMS["fused gate"])
    place = View.place.func  # type: ignore[attr-defined]
    monkeypatch.setattr(View, "place", property(lambda view: (0, place(view)[1])))
    assert "differ" in exact_check.exact_check(winner.graph, winner.schedule, winner.options)


def test_library_operators_get_parts() -> None:
    """XLA runs them: it knows no places."""
    (region,) = analyse(jax.make_jaxpr(fused_gate)(*PROGRAMS["fused gate"][1]).jaxpr).regions
    subject = RegionOnDevice(region, "cuda", None, Options())
    own = Schedule((KernelSchedule(),) * len(subject.reference.kernels))
    assert not subject.winner(subject.reference, own, "kernels").in_place
    assert not replace(subject, platform="cpu").winner(subject.reference, own, "algebra").in_place


def test_little_of_a_value_is_copied() -> None:
    """XLA makes no more of a value than what is read of it, if it makes it for this."""

    def fn(x, w):
        return jax.nn.softmax(x[-2:] @ w)

    (region,) = analyse(jax.make_jaxpr(fn)(normal(ROWS, WIDTH), normal(WIDTH, WIDTH)).jaxpr).regions
    assert any(view.cuts for b in region.inputs for view in b.views) and not region.partial
    assert region.text == f"{region.graph}\n# equations {region.written}"


def test_in_a_program() -> None:
    """On a CPU the winner runs as JAX; for a GPU its kernel is given all of the weights, and nothing is sliced."""
    fn, args = PROGRAMS["fused gate"]
    _, winner = winner_of(fn, args)

    class Deciding(Replacing):
        def compile_region(self, region, platforms=()):  # type: ignore[override]
            return replace(winner, capability=90)

    f = optimized(fn, Deciding())
    np.testing.assert_allclose(np.asarray(f(*args), "float32"), np.asarray(fn(*args), "float32"), rtol=0.02, atol=0.05)
    text = f.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "slice" not in text and kernel_calls(text) == len(winner.graph.kernels)
