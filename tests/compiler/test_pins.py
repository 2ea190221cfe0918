"""The user decides regions: vetoes, pinned muGraphs, and the file that keeps both."""

import inspect
import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from deciding import assert_same, chain, flops, measured, operands

import mirage_jax
from mirage_jax import MuGraph, UsageError, config, pins
from mirage_jax.compiler.pinned import WrittenRegion, _winners
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.stored import STORED_INPUT_CLASSES
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.mugraph.graph import Precision
from mirage_jax.pins import Choice
from mirage_jax.report import RegionReport, Variant
from mirage_jax.verify.exact.exact_check import exact_check

ARGS = A, B, V = operands()


def two(a, b, v):
    x = chain(a, b, v)
    y = jnp.sort(x)
    return 2 * ((b @ a) @ y)


SECOND = f"tests/compiler/test_pins.py:{inspect.getsourcelines(two)[1] + 3}"
KERNEL = """mugraph {
  extents rows=48 j=48 k=48
  input x2: f32[k]
  input x1: f32[j,k]
  input x0: f32[rows,j]
  kernel k0 grid(j) {
    %b = load x1[j,k]
    %v = load x2[k]
    %d[j] = dot{axes=(k)} %b %v
    store h: f32[j] = %d
  }
  library r: f32[rows] = dot{axes=(j)} x0[rows,j] h[j]
  output r
}"""


@pytest.fixture(autouse=True)
def _timed():
    with measured(2.0):
        yield


def explained(f=None, **options):
    f = f or mirage_jax.optimize(two, **options)
    return f, f.explain(*ARGS)


def whys(report):
    return [r.decision.why.partition(" [")[0] for r in report.regions]


def is_right(f):
    assert_same(f(*ARGS), jax.jit(two)(*ARGS), 1e-3)
    return True


def test_a_vetoed_region_stays_with_xla() -> None:
    f, report = explained()
    before = flops(f, *ARGS)
    vetoed = report.regions[0].veto()
    assert vetoed.decision.winner is None and "vetoed by hand in this process [user]" in str(vetoed)
    assert before < flops(f, *ARGS) and is_right(f), "the next call compiles again"
    report.regions[1].veto()
    assert flops(f, *ARGS) == flops(jax.jit(two), *ARGS)
    assert whys(explained(f)[1]) == ["vetoed by hand in this process"] * 2
    assert mirage_jax.tune(f, *ARGS).regions[0].decision.winner is None, "tune does not ask again"
    assert len(explained()[1].optimized) == 2, "other functions keep their decisions"


def test_a_pinned_graph_runs() -> None:
    f, report = explained()
    region = report.regions[1]
    pinned = region.pin(region.reference)
    d = pinned.decision
    assert d.winner is not None and d.certificate.bound <= 1e-12 and "passed on 19 input classes" in d.gate
    assert d.why == "pinned by hand in this process, not measured" and d.key == region.decision.key
    assert flops(f, *ARGS) > 100_000 and is_right(f), "the program's own order of evaluation runs"
    assert "whole function: not measured: a muGraph is pinned" in str(explained(f)[1])
    region.veto()
    assert explained(f)[1].regions[1].decision.winner is None
    region.pin(region.variants[0])
    assert explained(f)[1].regions[1].decision.winner.graph == region.decision.winner.graph


def test_variants_are_listed(tmp_path: Path) -> None:
    _, report = explained()
    (variant,) = report.regions[0].variants
    assert variant.graph == report.regions[0].decision.winner.graph and variant.seconds == 1.0
    assert "variants: 0: 1,000,000.0 us (2 kernels)" in str(report) and '"variants": [' in report.to_json()
    untimed = mirage_jax.optimize(chain, on_miss="heuristic", cache_dir=tmp_path).explain(*ARGS)
    assert "variants: 0: not measured" in str(untimed)
    assert explained()[1].regions[0].variants == (variant,), "they are stored"


def test_a_damaged_variant_is_an_error() -> None:
    _, report = explained()
    good = report.regions[0].variants[0]
    for bad in (Variant("mugraph", good.sizes), Variant(good.text, {"kernels": 3})):
        assert bad.brief.startswith("not measured")
        with pytest.raises(UsageError, match=r"^pin: "):
            report.regions[0].pin(bad)


@pytest.mark.parametrize("pin", [KERNEL, MuGraph.parse(KERNEL)], ids=["text", "graph"])
def test_names_of_axes_and_the_order_of_inputs_are_free(pin) -> None:
    f, report = explained()
    assert report.regions[0].pin(pin).decision.certificate is not None
    assert is_right(f)


REFUSED = [
    ("x2[k]\n    %d", "x2[k]\n    %e[k] = exp %v\n    %d", "%b %v", "%b %e", "refused by the certificate"),
    ("", "", "output r", "library s: f32[rows] = affine{scale=3} r[rows]\n  output s", "refused by the certificate"),
    ("rows=48", "rows=47", "", "", "input x0: f32[rows,j] has shape [47, 48], in the program f32[48, 48]"),
    ("input x0", "input y", "x0[", "y[", "its inputs are x2, x1, y; allowed are the program's, x0, x1, x2"),
    ("h: f32", "h: bf16", "", "", "refused by the checker"),
]


@pytest.mark.parametrize(("a", "b", "c", "d", "why"), REFUSED)
def test_a_refused_graph_is_an_error_that_names_the_gate(a, b, c, d, why) -> None:
    f, report = explained()
    text = KERNEL.replace(a, b).replace(c, d) if a else KERNEL.replace(c, d)
    with pytest.raises(UsageError) as caught:
        report.regions[0].pin(text)
    message = str(caught.value)
    assert message.startswith("the pin of ") and why in message and "\n" not in message, message
    assert whys(explained(f)[1])[0].startswith("2.00x"), "the region stays as it was"


def test_the_float_gate_and_the_run_are_asked(monkeypatch) -> None:
    _, report = explained()
    monkeypatch.setattr(TuningSession, "gate", lambda self, winner, only=(): (False, f"asked on {len(only)}"))
    with pytest.raises(UsageError, match="refused by the float gate: asked on 0"):
        report.regions[0].pin(KERNEL)


def test_a_file_keeps_decisions(tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    _, report = explained()
    report.regions[0].pin(KERNEL)
    report.regions[1].veto()
    assert report.save_pins(file) == file
    f, again = explained(pins=file)
    assert whys(again) == ["pinned in pins.toml, not measured", "vetoed in pins.toml"] and is_right(f)
    first = file.read_text()
    entry = tomllib.loads(first)["veto"][0]
    assert entry == {"region": report.regions[1].decision.key, "function": "two", "source": [SECOND]}
    again.save_pins(file)
    assert file.read_text() == first, "in the same order"
    again.regions[0].veto()
    again.save_pins(file)
    assert whys(explained(pins=file)[1]) == ["vetoed in pins.toml"] * 2
    assert whys(explained()[1])[0].startswith("2.00x"), "without the file, the optimizer decides"


def test_a_graph_that_passed_before_is_certified_again_and_not_run(tmp_path: Path, monkeypatch) -> None:
    _, report = explained()
    first = report.regions[0].pin(KERNEL).decision
    monkeypatch.setattr(TuningSession, "gate", lambda self, winner, only=(): pytest.fail("it ran"))
    again = explained()[1].regions[0].pin(KERNEL).decision
    assert again.winner == first.winner and again.gate == first.gate and again.certificate.seeds != ()
    assert (again.why, again.source, again.key) == (first.why, "user", first.key)


def test_a_pin_that_somebody_else_passed_runs_again(monkeypatch) -> None:
    _, report = explained()
    report.regions[0].pin(KERNEL)
    monkeypatch.setattr("mirage_jax.cache.own_key", lambda: None)
    asked = []
    monkeypatch.setattr(TuningSession, "gate", lambda self, winner, only=(): asked.append(only) or (True, ""))
    region = explained()[1].regions[0]
    asked.clear()
    region.pin(KERNEL)
    assert asked == [STORED_INPUT_CLASSES]


def test_kernels_of_a_gpu_get_sizes_from_the_model() -> None:
    graph = MuGraph.parse(KERNEL).graph
    region = explained()[1].regions[0].control.region
    gpu = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu")
    place = WrittenRegion.of(RegionOnDevice(region, "cuda", gpu, config.Options()), graph)
    winners = list(_winners(place, None))
    assert winners and all(w.has_kernels for w in winners)
    precisions = [w.schedule.kernels[0].precise for w in winners]
    assert precisions == sorted(precisions) and precisions[0] is Precision.FAST
    assert all(exact_check(w.graph, w.schedule, w.options) == "" for w in winners)


def test_a_file_keeps_entries_of_other_functions(tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    other = mirage_jax.optimize(chain).explain(*operands(16))
    other.regions[0].veto()
    other.save_pins(file)
    _, report = explained()
    report.regions[1].veto()
    report.save_pins(file)
    assert [c.function for c in pins.read(file).values()] == ["chain", "two"]
    assert not [n for n in explained(pins=file)[1].notes if "is not used" in n], "another function's entry is no news"


def test_schedules_are_kept(tmp_path: Path) -> None:
    kernel = {"tiles": [["j", 16]], "num_warps": 4, "num_stages": 1, "precise": 0}
    empty = {"tiles": [], "num_warps": 4, "num_stages": 1, "precise": 0}
    graph = MuGraph.parse(KERNEL, {"kernels": [kernel, empty], "parts": [], "joint": False})
    choice = Choice.of(graph, ["a\x1b.py:3"])
    read = pins.read(pins.save(tmp_path / "p.toml", {"0" * 64: choice}))["0" * 64]
    assert (read.graph, read.schedule) == (graph.graph, graph.schedule)
    assert str(read) == "the pin of a\\x1b.py:3 in p.toml"


def test_lost_entries_are_noted_and_logged_once(tmp_path: Path, caplog) -> None:
    file = tmp_path / "pins.toml"
    file.write_text(f'[[veto]]\nregion = "{"0" * 64}"\nfunction = "two"\nsource = ["{SECOND}"]\n')
    config.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "mirage_jax"):
        f = mirage_jax.optimize(two, pins=file)
        assert is_right(f) and is_right(mirage_jax.optimize(two, pins=file))
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"the veto of {SECOND} in pins.toml is not used: the region there now has the key" in line
    notes = f.explain(*ARGS).notes
    assert f"the veto of {SECOND} in pins.toml is not used: no region of two has the key 000000000000" in notes[0]


def test_entries_for_other_shapes_are_no_news(tmp_path: Path, caplog) -> None:
    file = tmp_path / "pins.toml"
    f = mirage_jax.optimize(two)
    for n in (48, 32):
        f.explain(*operands(n)).regions[1].veto()
        f.explain(*operands(n)).save_pins(file)
    assert len(pins.read(file)) == 2
    with caplog.at_level(logging.WARNING, "mirage_jax"):
        g, report = explained(pins=file)
        assert is_right(g) and report.regions[1].decision.source == "user"
    assert not report.notes and not caplog.records


def test_a_refused_pin_of_a_file_is_an_error(tmp_path: Path) -> None:
    _, report = explained()
    key = report.regions[0].decision.key
    wrong = Choice.of(
        KERNEL.replace("output r", "library s: f32[rows] = affine{scale=3} r[rows]\n  output s"), ["a.py:3"]
    )
    f = mirage_jax.optimize(two, pins=pins.save(tmp_path / "pins.toml", {key: wrong}))
    with pytest.raises(UsageError, match=r"the pin of a\.py:3 in pins\.toml: refused by the certificate"):
        f(*ARGS)


def test_bisect_knows_pins() -> None:
    f, report = explained()
    report.regions[0].pin(KERNEL)
    report.regions[1].veto()
    found = mirage_jax.bisect(f, *ARGS)
    assert not found and found.of == 1


def test_a_report_without_its_function_decides_nothing() -> None:
    region = RegionReport((), "", explained()[1].regions[0].decision)
    with pytest.raises(UsageError, match="no function in this process"):
        region.veto()


GOOD = f'region = "{"0" * 64}"\n'
TEXT = f'graph = """\n{KERNEL}"""\n'
FILES = [
    ("[[veto", "is no TOML (Expected"),
    ("a = \x1b", "is no TOML (Invalid value"),
    (b"\xff\xfe", "is no TOML ('utf-8' codec can't decode"),
    ("veto = " + "[" * 5000, "is no TOML ("),
    ("veto = 3", "veto: found 3; allowed is a list"),
    ("veto = [3]", "veto 1: veto: found 3; allowed is an object"),
    ("[[vetos]]", "unknown table 'vetos'. Did you mean 'veto'? Allowed: veto, pin"),
    ("[[veto]]", "veto 1: region: found None; allowed is the cache key that explain prints"),
    ("[[veto]]\nregion = 'model.py:3'", "region: found 'model.py:3'; allowed is the cache key"),
    ("[[veto]]\n" + GOOD + "graph = ''", "veto 1: unknown field 'graph'. Allowed: region, function, source"),
    ("[[veto]]\n" + GOOD + "[[pin]]\nregion = '00000000'\n" + TEXT, "pin 1: region: found '00000000' after"),
    ("[[veto]]\n" + GOOD + "source = 'model.py:3'", "source: found 'model.py:3'; allowed is a list"),
    ("[[veto]]\n" + GOOD + "source = ['model.py']", "source: found 'model.py'; allowed are lines"),
    ("[[veto]]\n" + GOOD + "function = 3", "function: found 3; allowed is a text"),
    ("[[veto]]\n" + GOOD + "'\\u001b[2J' = 3", "unknown field '\\\\u001b[2J'"),
    ("[[pin]]\n" + GOOD, "pin 1: graph: found None; allowed is the text of a muGraph"),
    ("[[pin]]\n" + GOOD + "graph = 'hello'", "pin 1: line 1: expected 'mugraph {', found 'hello'"),
    ("[[pin]]\n" + GOOD + TEXT + "schedule = 3", "a stored schedule is malformed"),
    ("[[pin]]\n" + GOOD + TEXT + "schedule = {kernels = []}", "a stored schedule is malformed"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=range(len(FILES)))
def test_a_malformed_file_is_one_line(text, message, tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        mirage_jax.optimize(two, pins=file)
    found = str(caught.value)
    assert found.startswith(f"pins: {file}") and message in found and found.endswith(pins.FIX), found
    assert found.isprintable()
    with pytest.raises(UsageError, match="pins: "):
        explained()[1].save_pins(file)
