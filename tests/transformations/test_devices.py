"""What `explain` and the log say of programs on eight devices, and what runs on one of them."""

import logging

import jax
import pytest
from transformations.devices import (
    AUTO,
    BATCH,
    EXPLICIT,
    HEADS,
    NOTHING,
    QUERIES,
    batches,
    derivatives,
    mesh,
    placed,
    with_weights,
)
from transformations.functions import (
    normal,
)

import mirage_jax
from mirage_jax.jaxpr_frontend.capture import lowering

DIVIDED = "sharded (XLA divides this program over several devices and cannot divide a kernel)"


@pytest.fixture
def optimize():
    if jax.device_count() != 8:
        pytest.skip("needs eight devices")
    return lambda f, **options: mirage_jax.optimize(f, on_miss="fallback", strict=True, **options)


def test_regions_are_those_of_one_device(optimize) -> None:
    with jax.set_mesh(mesh(EXPLICIT)):
        f, args = optimize(batches), placed(EXPLICIT, (HEADS,) * 3)
        report = f.explain(*args)
        f(*args)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in args]
        assert str(f.explain(*shapes)) == str(report)
    (region,) = report.regions
    assert "extents i=2 j=64 k=4" in region.reference, "two of eight batches, one of two heads"
    assert [text for text, _ in f.compiler.decisions] == [region.reference]
    assert not report.left_out


def test_what_was_never_placed_counts_as_replicated(optimize) -> None:
    args = placed(EXPLICIT, (QUERIES, None, None))
    with jax.set_mesh(mesh(EXPLICIT)):
        there = optimize(batches).explain(*placed(EXPLICIT, (QUERIES, NOTHING, NOTHING)))
    for report in (optimize(batches).explain(*args), there):
        (region,) = report.regions
        assert "extents i=8 j=2 k=8 l=4 m=64 n=4" in region.reference and not report.left_out
    nowhere = optimize(batches).explain(*placed(EXPLICIT, (None,) * 3))
    assert nowhere.regions and "sharded" not in str(nowhere), "on one device"


def test_what_is_summed_over_devices_is_left_out(optimize) -> None:
    with jax.set_mesh(mesh(EXPLICIT)):
        report = optimize(derivatives(with_weights)).explain(*placed(EXPLICIT, (HEADS,) * 3))
    assert report.regions and DIVIDED in str(report)
    assert {x.primitive for x in report.left_out if x.code == "sharded"} == {"reduce_sum"}


def test_divided_by_xla(optimize, caplog: pytest.LogCaptureFixture) -> None:
    lowering.warn_once.cache_clear()
    f, args = optimize(batches), placed(AUTO, (HEADS,) * 3)
    with caplog.at_level(logging.WARNING):
        for g in (f, optimize(derivatives(batches)), jax.jit(lambda *x: f(*x) + 1)):
            g(*args)
    assert not f.compiler.decisions
    assert [r.getMessage() for r in caplog.records] == [DIVIDED.replace(" (", ": ")[:-1]]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in args]
    for report in (f.explain(*args), f.explain(*shapes)):
        assert not report.regions and DIVIDED in str(report)
    assert f.explain(*(normal(8, 2, 64, 4),) * 3).regions, "on one device"
    both = optimize(
        lambda *x: batches(*x) + jax.shard_map(batches, mesh=mesh(AUTO), in_specs=BATCH, out_specs=BATCH)(*x)
    )
    assert len(both.explain(*args).regions) == 1, "shapes are local inside of shard_map"
    assert DIVIDED in str(both.explain(*args))


def test_one_of_many_is_not_divided(optimize) -> None:
    f, args = optimize(batches), [jax.device_put(x, jax.devices()[3]) for x in placed(AUTO, (NOTHING,) * 3)]
    assert f(*args).devices() == {jax.devices()[3]}
    assert f.compiler.decisions and f.explain(*args).regions
