"""Reports: what people read, and what programs read."""

import json
import os
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import scipy.stats
from deciding import chain, measured, operands

import mirage_jax
from mirage_jax.jaxpr_frontend.partition.reasons import Code, LeftOut
from mirage_jax.report import Decision, RegionReport, Report, places, rank_correlation

HERE = os.path.join(os.getcwd(), "models", "net.py")
NORM = "/usr/lib/python3.12/site-packages/flax/nnx/norm.py"
STANDARD = sysconfig.get_path("stdlib")


@pytest.mark.parametrize(
    ("where", "want"),
    [
        ([f"{HERE}:12:4 (f)"], ["models/net.py:12 (f)"]),
        ([f"{HERE}:12:4 (f)", f"{HERE}:12:9 (f)", f"{HERE}:7:1 (g)"], ["models/net.py:7,12 (f, g)"]),
        ([f"{NORM}:47:2 (_abs_sq)", f"{HERE}:3:1 (f)"], ["models/net.py:3 (f)", "flax/nnx/norm.py:47 (_abs_sq)"]),
        ([r"C:\v\Lib\site-packages\flax\core.py:3:1 (f)"], [r"flax\core.py:3 (f)"]),
        ([f"{STANDARD}/functools.py:9 (w)", "/a.py:1 (f)"], ["/a.py:1 (f)", "functools.py:9 (w)"]),
        (["/home/me/a.py:1:2 (make.<locals>.f.<locals>.<lambda>)"], ["/home/me/a.py:1 (make.f.<lambda>)"]),
        ([f"/m.py:{n} (f{n})" for n in range(1, 6)], ["/m.py:1,2,3,4,5 (f1, f2, f3, 2 more)"]),
        (["/m.py:5"], ["/m.py:5"]),
        (["", "unknown line"], ["unknown line"]),
        ([], []),
        (["<ipython-input-3>:2 (f)"], ["<ipython-input-3>:2 (f)"]),
    ],
)  # fmt: skip
def test_places(where, want) -> None:
    assert places(where) == want


def test_places_in_this_package_name_no_folder_of_the_machine(tmp_path: Path, monkeypatch) -> None:
    """Benchmarks that run elsewhere report their own programs."""
    monkeypatch.chdir(tmp_path)
    assert places([f"{Path(mirage_jax.__file__).parent}/bench/programs.py:40:1 (f)"]) == [
        "mirage_jax/bench/programs.py:40 (f)"
    ]


def test_left_out_is_grouped() -> None:
    def out(primitive, code, why, line):
        return LeftOut(primitive, code, why, f"{HERE}:{line}:1 (f)" if line else "")

    pointwise = Code.NO_HEAVY_OP, "XLA fuses it"
    lines = [
        out("add", *pointwise, 3),
        out("mul", *pointwise, 5),
        out("add", *pointwise, 3),
        out("sort", Code.UNSUPPORTED_PRIMITIVE, "no sum", 0),
        out("lt", Code.DTYPE, "integers", 3),
    ]
    assert str(Report("f", (), tuple(lines))).splitlines() == [
        "f: 0 regions, 0 optimized",
        "equations left to XLA: 5 on 3 lines",
        "  models/net.py:3 (f): 3 equations (add 2, lt): too little work 2, dtype",
        "  models/net.py:5 (f): 1 equation (mul): too little work",
        "  unknown line: 1 equation (sort): unsupported primitive",
        "  too little work (XLA fuses it): harmless: XLA fuses it",
        "  unsupported primitive (no sum): harmless in masks and indices; between products, use primitives of"
        " docs/operators.md",
        "  dtype (integers): harmless in masks and indices; values that feed products should be floats",
    ]


def test_a_remainder_by_data_in_a_mask_is_one_line() -> None:
    """It is ten equations of seven kinds."""

    def f(q, k, m):
        n = q.shape[0]
        mask = (jnp.arange(n)[:, None] - jnp.arange(n)[None, :]) % m == 0
        return jnp.where(mask, q @ k.T, 0.0).sum(-1)

    text = str(mirage_jax.optimize(f, on_miss="fallback").explain(jnp.ones((8, 4)), jnp.ones((8, 4)), jnp.int32(4)))
    (line,) = [line for line in text.splitlines() if "test_report.py:" in line and " equation" in line]
    assert "rem" in line and "equations left to XLA: 10 on 1 line" in text


def test_many_lines_are_counted() -> None:
    lines = [LeftOut("add", Code.RANK0, "small", f"{NORM if n < 2 else HERE}:{n}:1 (f)") for n in range(25)]
    text = str(Report("f", (), tuple(lines)))
    assert "equations left to XLA: 25 on 25 lines" in text and "  and 5 more lines" in text
    assert "net.py:21" in text and "norm.py" not in text  # the user's own come first


@pytest.mark.parametrize("code", Code)
def test_every_code_has_advice(code) -> None:
    assert LeftOut("add", code, "", "").advice


def test_a_region_left_to_xla() -> None:
    d = Decision(None, "XLA is as fast", "search", "cpu", timings={"xla": 2e-3}, tried=Counter(found=3))
    d = replace(d, step_seconds={"search": 2.0, "certificate": 0.01, "variants": 3.04})
    report = Report("f", (RegionReport((f"{HERE}:1:2 (f)",), "mugraph {\n}", d, occurrences=4),), notes=("a note",))
    assert str(report).splitlines() == [
        "f: 1 region, 0 optimized",
        "note: a note",
        "region 0:",
        "  kept XLA's code (4 times): XLA is as fast [search]",
        "  source: models/net.py:1 (f)",
        "  measured: xla 2,000.0 us",
        "  candidates: found 3",
        "  time: 5.0 s: search 2.0, variants 3.0",
        "  the program:",
        "    mugraph {",
        "    }",
    ]
    assert d.speedup is None


def test_json() -> None:
    def f(a, b, v, n):
        return jnp.sort(chain(a, b, v)) + (n @ n)[0, 0]

    shapes = [*operands(), jnp.ones((4, 4), int)]
    with measured(2.0):
        report = mirage_jax.optimize(f).explain(*shapes)
    value = json.loads(report.to_json())
    assert value["name"].endswith("f")
    (region,) = value["regions"]
    (own,) = report.regions
    assert (region["decision"], region["speedup"], region["source"]) == ("mirage", 2.0, "search")
    assert region["before"]["flops"] > 5 * region["after"]["flops"]
    assert region["certificate"] == json.loads(own.decision.certificate.to_json())
    assert region["graph"] == str(own.decision.winner.graph)
    assert {"unsupported primitive", "dtype"} <= {x["code"] for x in value["left_out"]}
    left = json.loads(mirage_jax.optimize(f, on_miss="fallback", backend="jax").explain(*shapes).to_json())
    assert left["regions"][0]["decision"] == "xla" and left["regions"][0]["certificate"] is None


def test_same_regions_are_told_once() -> None:
    def f(a, b, v):
        def layer(x, w):
            return jax.nn.softmax(w @ jnp.sort(x)), None

        x, _ = layer(v, a)
        x, _ = layer(x, b)
        return jax.lax.scan(layer, x, jnp.stack([a, b]))[0]

    report = mirage_jax.optimize(f, on_miss="fallback").explain(*operands(8))
    assert sum(r.occurrences for r in report.regions) == 3
    assert len({r.reference for r in report.regions}) == len(report.regions)


def test_rank_correlation() -> None:
    assert rank_correlation([(1.0, 10.0), (2.0, 11.0), (3.0, 50.0)]) == pytest.approx(1.0)
    assert rank_correlation([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) == pytest.approx(-1.0)
    pairs = [(1.0, 2.0), (2.0, 1.0), (2.0, 3.0), (4.0, 3.0)]
    assert rank_correlation(pairs) == pytest.approx(scipy.stats.spearmanr(pairs).statistic)
    assert rank_correlation(pairs[:2]) is None and rank_correlation([(1.0, 2.0)] * 3) is None
