"""What the importer makes of a saved muGraph computes what the file says, right or wrong; malformed files are
errors."""

# ruff: noqa: E501 (tables with one case per line)

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mirage_import import mirage
from mirage_import.mirage import Json, Writer, split_attention

from mirage_jax.errors import ParseError, UsageError
from mirage_jax.mirage_import.file import NOWHERE
from mirage_jax.mirage_import.graphs import Imported, RefusedGraph, from_mirage_json
from mirage_jax.mugraph.evaluate import run

DATA = Path(__file__).parent.parent / "data" / "mirage"


def imported(graph: list[Json], data_types: str | None = None) -> Imported:
    (only,) = from_mirage_json([graph], data_types)
    assert isinstance(only, Imported), only
    return only


def compare(graph: list[Json], found: Imported, scheduled: bool = True, seed: int = 0) -> None:
    """The importer's graph, whole and under the file's own schedule, against the file."""
    rng = np.random.default_rng(seed)
    inputs = [rng.uniform(0.5, 1.5, s) for s in mirage.input_shapes(graph)]  # nothing cancels
    with np.errstate(all="ignore"):
        want = mirage.evaluate(graph, inputs)
        shapes = [tuple(map(found.graph.extent, t.axes)) for t in found.graph.inputs]
        arrays = [x.reshape(s) for x, s in zip(inputs, shapes, strict=True)]
        for schedule in (None, found.schedule) if scheduled else (None,):
            have = run(found.graph, arrays, schedule)
            for x, y in zip(have, want, strict=True):
                np.testing.assert_allclose(x.reshape(y.shape), y, rtol=1e-8, atol=1e-10)


def shrunk(graph: list[Json], sizes: dict[int, int]) -> list[Json]:
    """The same graph with other sizes of dimensions."""
    graph = copy.deepcopy(graph)

    def walk(x: Any) -> None:
        if isinstance(x, dict) and "dim" in x:
            x["dim"] = [sizes.get(n, n) for n in x["dim"]]
        for y in x.values() if isinstance(x, dict) else x if isinstance(x, list) else ():
            walk(y)

    walk(graph)
    return graph


@pytest.mark.parametrize("name", ["lora", "qknorm_gqa_bs1"])
def test_saved_graphs(name: str) -> None:
    graphs = json.loads((DATA / f"{name}.json").read_text())
    for graph, found in zip(graphs, from_mirage_json(graphs, "evaluation"), strict=True):
        assert isinstance(found, Imported)
        compare(graph, found)


def test_saved_rms_norms() -> None:
    """Two columns per block and two rows per step are enough."""
    graphs = json.loads((DATA / "rmsnorm_bs1.json").read_text())
    assert all(isinstance(g, Imported) for g in from_mirage_json(graphs, "evaluation"))
    for graph in (graphs[n] for n in (3, 10, 14, 17)):
        block = graph[2]["bgraph"]
        grid, steps = block["grid_dim"]["x"], block["forloop_range"]
        small = {4096: 2 * steps, 4096 // steps: 2, 6144: 2 * grid, 6144 // grid: 2}
        small = shrunk(graph, small)
        compare(small, imported(small, "evaluation"), scheduled=grid * steps <= 1024)


@pytest.mark.parametrize(("parts", "steps"), [(2, 1), (4, 3), (1, 2)])
def test_split_attention(parts: int, steps: int) -> None:
    """The second kernel divides the queries more finely than the first, and the keys not at all."""
    graph = split_attention(2, 8, 4, 24, parts, steps).graph
    found = imported(graph)
    compare(graph, found)
    assert [k.loop is not None for k in found.graph] == [steps > 1, False]


def test_divided_together() -> None:
    """One grid dimension divides the rows of x and the columns of w: their axes are tied, as in the wrong QKNorm."""
    w = Writer()
    x, y = w.input(6, 4), w.input(2, 3)
    k = w.kernel((3, 1, 1), 1)
    product = k.op("mul", k.accum("red_ld_sum", k.load(x, (0, -1, -1))), k.accum("nored", k.load(y, (1, -1, -1))))
    w.output(k.store(product, (0, -1, -1)))
    k.done()
    w.graph.append(w.graph.pop(-2))  # the output comes last
    found = imported(w.graph)
    compare(w.graph, found)
    (load_x, load_y) = found.graph.kernels[0].loads
    (grid,) = found.graph.kernels[0].grid
    assert grid in load_x.axes and grid in load_y.axes


def test_blocks_that_do_the_same() -> None:
    """Each block writes its own copy of one value; each step counts it once more."""
    w = Writer()
    k = w.kernel((3, 1, 1), 4)
    out = k.store(k.accum("nored", k.load(w.input(2, 5))), (1, -1, -1))
    k.done()
    w.output(out)
    compare(w.graph, imported(w.graph))


def test_predefined_operators() -> None:
    w = Writer()
    x, y = w.input(1, 6), w.input(4, 6)
    for kind in ("exp", "square", "sigmoid", "silu", "gelu", "relu", "rms_norm", "reduction_1", "reduction_0"):
        w.output(w.op(kind, y))
    for kind in ("add", "mul", "div"):
        w.output(w.op(kind, y, x))
    w.output(w.op("reduction_0", x))
    compare(w.graph, imported(w.graph))


def test_concat_then_matmul() -> None:
    w = Writer()
    xs = [w.input(2, 3), w.input(2, 5), w.input(3, 4), w.input(5, 4)]
    k = w.kernel((2, 1, 1), 1)
    tiles = [k.load(x, (-1, -1, -1) if n < 2 else (1, -1, -1)) for n, x in enumerate(xs)]
    out = k.store(k.accum("nored", k.op("concat_then_matmul", *tiles)), (1, -1, -1))
    k.done()
    w.output(out)
    compare(w.graph, imported(w.graph))


# --- random block graphs

OPS = ("matmul", "add", "mul", "div", "exp", "square", "rms_norm", "reduction_0", "reduction_1", "reduction_1_to_dimx")
ACCUMULATORS = ("nored", "red_ld_sum", "red_ld_mean", "red_ld_rms", "redtox_ld_sum")
DIMX = 2
SIZES = st.sampled_from([1, 2, 4])


def fits(kind: str, shapes: list[tuple[int, ...]]) -> bool:
    if kind.endswith(("to_dimx", "redtox_ld_sum")):
        return shapes[0][-1] % DIMX == 0
    try:
        mirage.apply(kind, [np.ones(s) for s in shapes], DIMX)
    except ValueError:
        return False
    return True


@st.composite
def block_graphs(draw: st.DrawFn) -> list[Json]:
    """One kernel over random tiles, with any maps, and a predefined operator after it."""
    w = Writer()
    grid = draw(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.just(1)))
    steps = draw(st.sampled_from([1, 2, 3]))
    maps = st.sampled_from([(x, y, -1) for x in (-1, 0, 1) for y in (-1, 0, 1) if x != y or x < 0])
    loads = []
    for _ in range(draw(st.integers(1, 3))):
        tile, imap, fmap = draw(st.tuples(SIZES, SIZES)), draw(maps), draw(st.sampled_from([-1, 0, 1]))
        whole = list(tile)
        for dim, parts in (*zip(imap, grid, strict=True), (fmap, steps)):
            if dim >= 0:
                whole[dim] *= parts
        loads.append((w.input(*whole), imap, fmap))
    k = w.kernel(grid, steps, DIMX)
    before = [k.load(*x) for x in loads]
    _grow(draw, k, before, draw(st.integers(0, 3)))
    after = [k.accum(draw(st.sampled_from(_kinds(x))), x) for x in before[-2:]]
    _grow(draw, k, after, draw(st.integers(0, 2)))
    omap = draw(st.sampled_from([(0, 1, -1), (1, 0, -1)]))
    stored = [k.store(x, omap) for x in after[-2:]]
    k.done()
    w.output(w.op(draw(st.sampled_from(["exp", "rms_norm", "reduction_1"])), stored[0]))
    w.output(stored[-1])
    return w.graph


def _kinds(x: Json) -> list[str]:
    return [a for a in ACCUMULATORS if a != "redtox_ld_sum" or mirage.shape(x)[-1] % DIMX == 0]


def _grow(draw: st.DrawFn, k: mirage.BlockWriter, values: list[Json], count: int) -> None:
    for _ in range(count):
        kind = draw(st.sampled_from(OPS))
        args = [draw(st.sampled_from(values)) for _ in range(2 if kind in mirage.BINARY else 1)]
        if fits(kind, [mirage.shape(x) for x in args]):
            values.append(k.op(kind, *args))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(block_graphs())
def test_random_block_graphs(graph: list[Json]) -> None:
    (found,) = from_mirage_json([graph])
    if isinstance(found, RefusedGraph):
        assert "the same axis" in found.reason, found.reason
    else:
        compare(graph, found)


# --- what cannot be read


def test_refused() -> None:
    x = Writer()
    w = Writer()
    del x
    tensor = w.input(4, 4)
    w.graph.append({"op_type": "kn_clamp_op", "input_tensors": [tensor], "output_tensors": [w.tensor((4, 4))]})
    w.output(w.graph[-1]["output_tensors"][0])
    (found,) = from_mirage_json(json.dumps([w.graph]))
    assert found == RefusedGraph(0, "graph 0, operator 1 (kn_clamp_op): its bounds are not in the file")


def test_tensors_that_meet_themselves() -> None:
    """x x in one block needs x under two names, which a block graph here gets only by loading it twice."""
    w = Writer()
    x = w.input(4, 4)
    k = w.kernel((1, 1, 1), 1)
    tile = k.load(x)
    out = k.store(k.accum("nored", k.op("matmul", tile, tile)))
    k.done()
    w.output(out)
    (found,) = from_mirage_json([w.graph])
    assert isinstance(found, RefusedGraph) and "two dimensions of one tile are the same axis" in found.reason


def test_divided_in_ways_that_do_not_fit() -> None:
    """Into 2 by one kernel and into 3 by the next."""
    w = Writer()
    x = w.input(6, 1)
    for parts in (2, 3):
        k = w.kernel((parts, 1, 1), 1)
        x = k.store(k.accum("nored", k.load(x, (0, -1, -1))), (0, -1, -1))
        k.done()
    w.output(x)
    (found,) = from_mirage_json([w.graph])
    assert isinstance(found, RefusedGraph) and "divided both into 2 and into 3 parts" in found.reason


def test_blocks_that_overwrite_each_other() -> None:
    w = Writer()
    k = w.kernel((2, 1, 1), 1)
    out = k.store(k.accum("nored", k.load(w.input(4, 4), (0, -1, -1))))
    k.done()
    w.output(out)
    (found,) = from_mirage_json([w.graph])
    assert isinstance(found, RefusedGraph) and "blocks along grid x write over each other" in found.reason


def _tile(graph: list[Json]) -> Json:
    """The first matmul of the kernel."""
    return graph[4]["bgraph"]["operators"][4]


def _set(place: Json, **values: Any) -> None:
    place.update(values)


MALFORMED = {
    "no graphs": ("[]", "the file: expected at least one graph, found []"),
    "not JSON": ("[[{]", "not JSON: "),
    "too deep": ("[" * 100_000, "not JSON: "),
    "not an array": ("1", "the file: expected an array"),
    "not a checkpoint": ('{"graphs": 1}', "the file: no 'generated_graphs'; it has 'graphs'"),
    "not an operator": ("[[1]]", "graph 0[0]: expected an object, found 1"),
    "no operators": ("[[]]", "graph 0: no kn_input_op"),
}
CHANGED = {
    "missing key": (lambda g: g[4]["bgraph"].pop("grid_dim"), "graph 0, operator 4 (kn_customized_op), bgraph: no 'grid_dim'"),
    "missing op_type": (lambda g: g[0].pop("op_type"), "graph 0[0]: no 'op_type'; it has 'input_map'"),
    "unknown operator": (
        lambda g: _set(_tile(g), op_type="tb_fft_op"),
        "graph 0, operator 4 (kn_customized_op), bgraph, operators, operator 4 (tb_fft_op): unknown operator; known: accum",
    ),
    "operator of the other level": (lambda g: _set(_tile(g), op_type="kn_matmul_op"), "expected tb_..._op"),
    "dangling guid": (
        lambda g: _set(_tile(g)["input_tensors"][0], guid=7),
        "operator 4 (tb_matmul_op), input_tensors[0]: tensor 7 is used, and no operator before this one makes it",
    ),
    "made twice": (lambda g: g.insert(0, copy.deepcopy(g[0])), "tensor 10017615 is made a second time"),
    "other shape where used": (
        lambda g: _set(g[5]["input_tensors"][0], dim=[16, 4095, 0, 0]),
        "found f16[16, 4095] (guid 10018375), which was made as f16[16, 4096] (guid 10018375)",
    ),
    "tile of another size": (
        lambda g: _set(g[4]["bgraph"]["operators"][0]["input_map"], x=1),
        "operator 0 (tb_input_op): a tensor is [16, 256] in the file; by the operator it is [16, 16384]",
    ),
    "loop that does not fit": (
        lambda g: _set(g[4]["bgraph"], forloop_range=2) or _set(g[4]["bgraph"]["operators"][0], forloop_dim=0),
        "by the operator it is [32, 256]",
    ),
    "map beyond the rank": (
        lambda g: _set(g[4]["bgraph"]["operators"][0]["input_map"], x=2),
        "input_map, x: expected an integer from -1 to 1, found 2",
    ),
    "no accumulator": (
        lambda g: _set(g[4]["bgraph"]["operators"][8], op_type="tb_exp_op"),
        "operator 8 (tb_exp_op): after_accum is [False] for its inputs and [True] for its outputs",
    ),
    "shape that does not multiply": (
        lambda g: _tile(g)["input_tensors"].reverse(),
        "operator 4 (tb_matmul_op): shapes [256, 64] and [16, 256] do not go together",
    ),
    "too many operands": (lambda g: _tile(g)["input_tensors"].append(_tile(g)["input_tensors"][0]), "3 operands; it takes 2"),
    "output of nothing": (
        lambda g: _set(g[4]["bgraph"]["operators"][9]["dtensor"], guid=8),
        "f16[16, 4096] (guid 8) is not an output of the kernel",
    ),
    "kernel without outputs": (lambda g: g[4]["bgraph"]["operators"].pop(), "its tb_output_op write tensors none"),
    "type": (lambda g: _set(g[0]["output_tensors"][0], data_type=1), "data_type: expected one of 930 (f8)"),
    "dimension of 0": (lambda g: _set(g[0]["output_tensors"][0], dim=[16, 0, 0, 0]), "dim[1]: expected an integer from 1, found 0"),
    "rank": (lambda g: _set(g[0]["output_tensors"][0], num_dims=5), "num_dims: expected an integer from 1 to 4, found 5"),
    "too few dimensions": (lambda g: _set(g[0]["output_tensors"][0], dim=[16]), "dim: expected at least 2 numbers, found [16]"),
    "number as text": (lambda g: _set(g[4]["bgraph"], forloop_range="1"), "forloop_range: expected an integer from 1, found \"1\""),
    "number as truth": (lambda g: _set(g[4]["bgraph"], forloop_range=True), "expected an integer from 1, found true"),
    "no output": (lambda g: g.pop(), "graph 0: no kn_output_op"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_text(name: str) -> None:
    text, message = MALFORMED[name]
    with pytest.raises(ParseError) as error:
        from_mirage_json(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("name", CHANGED)
def test_malformed_graphs(name: str) -> None:
    graphs = json.loads((DATA / "lora.json").read_text())[:1]
    change, message = CHANGED[name]
    change(graphs[0])
    with pytest.raises(ParseError) as error:
        from_mirage_json(graphs, "evaluation")
    assert message in str(error.value)


def test_one_graph_by_itself() -> None:
    graphs = json.loads((DATA / "lora.json").read_text())
    assert from_mirage_json(graphs[0], "evaluation") == from_mirage_json(graphs[:1], "evaluation")


def test_names_of_accumulators_in_older_files() -> None:
    text = (DATA / "rmsnorm_bs1.json").read_text()
    assert "tb_forloop_accum_" in text
    found = from_mirage_json(text.replace("tb_forloop_accum_", "tb_accum_"), "evaluation")
    assert found == from_mirage_json(text, "evaluation")


# --- versions of Mirage


def test_numbers_of_types_that_say_which_they_are() -> None:
    w = Writer()
    w.output(w.op("matmul", w.input(4, 6), w.input(6, 8)))
    for number, dtype in ((921, "f16"), (920, "bf16"), (950, "f32")):
        text = json.dumps([w.graph]).replace('"data_type": 921', f'"data_type": {number}')
        (found,) = from_mirage_json(text)
        assert isinstance(found, Imported) and {t.dtype for t in found.graph.inputs} == {dtype}


@pytest.mark.parametrize("number", [930, 940, 941])
def test_numbers_of_types_that_versions_share_are_asked_for(number: int) -> None:
    w = Writer()
    w.output(w.op("matmul", w.input(4, 6), w.input(6, 8)))
    text = json.dumps([w.graph]).replace('"data_type": 921', f'"data_type": {number}')
    with pytest.raises(ParseError, match=f"data type {number} is .*the file does not say which: name data_types"):
        from_mirage_json(text)
    if number == 941:
        for name, dtype in (("evaluation", "f16"), ("mpk", "bf16")):
            (found,) = from_mirage_json(text, name)
            assert isinstance(found, Imported) and {t.dtype for t in found.graph.inputs} == {dtype}


def test_one_number_tells_what_the_others_mean() -> None:
    """940 is a type of 16 bits or of 64, but not beside 921."""
    w = Writer()
    w.output(w.op("matmul", w.input(4, 6), w.input(6, 8)))
    w.graph[0]["output_tensors"][0]["data_type"] = 940  # the same object is the product's operand
    (found,) = from_mirage_json([w.graph])
    assert isinstance(found, Imported) and [t.dtype for t in found.graph.inputs] == ["f64", "f16"]


def concatenated_lora(steps: int) -> list[Json]:
    """x w + (x a) b as one product of concatenations, as in Mirage's `demo/checkpoint_lora.json`."""
    w = Writer()
    x, weights, a, b = w.input(4, 8), w.input(8, 16), w.input(8, 4), w.input(4, 16)
    block = w.kernel((4, 1, 1), steps)
    if steps == 1:
        tiles = [block.load(x), block.load(weights, (1, -1, -1)), block.load(a), block.load(b, (1, -1, -1))]
    else:  # each step has a part of the columns of `a` and of the rows of `x`; another program
        tiles = [block.load(t, imap, fmap) for t, imap, fmap in zip(
            (x, weights, a, b), [NOWHERE, (1, -1, -1)] * 2, (1, 0, 0, -1), strict=True
        )]  # fmt: skip
    left = block.op("concat_1", tiles[0], block.op("matmul", tiles[0], tiles[2]))
    out = block.accum("nored", block.op("matmul", left, block.op("concat_0", tiles[1], tiles[3])))
    block.store(out, (1, -1, -1))
    block.done()
    w.output(w.graph[-1]["output_tensors"][0])
    return w.graph


@pytest.mark.parametrize("steps", [1, 2])
def test_checkpoints(steps: int) -> None:
    """Outputs are what nobody reads, and a block stores its sum over the loop."""
    plain = Writer()
    plain.output(plain.op("add", plain.op("matmul", plain.input(4, 8), plain.input(8, 16)), plain.input(4, 16)))
    graphs = [plain.graph, concatenated_lora(steps)]
    for graph, found in zip(graphs, from_mirage_json(mirage.checkpoint(*graphs)), strict=True):
        assert isinstance(found, Imported), found
        compare(graph, found)


def test_concatenations_that_no_product_sums() -> None:
    w = Writer()
    x, y = w.input(4, 8), w.input(4, 8)
    w.output(w.op("concat_1", x, y))
    (found,) = from_mirage_json([w.graph])
    assert isinstance(found, RefusedGraph) and "concatenations that no product sums" in found.reason


def test_data_types_that_do_not_exist() -> None:
    with pytest.raises(UsageError, match=r"unknown data_types 'mkp'\. Did you mean 'mpk'"):
        from_mirage_json([[]], "mkp")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_damage_goes_unnoticed_or_crashes(data: st.DataObject) -> None:
    """Whatever is cut out of a file, the answer is graphs, a refusal or `ParseError`."""
    graphs = json.loads((DATA / "lora.json").read_text())[:1]
    place: Any = graphs
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.integers(0, 5)) == 0:
            break
        place = place[key]
    damage = data.draw(st.sampled_from([None, -2, 3, "x", [], {}, "gone"]))
    if damage == "gone":
        del place[key]
    else:
        place[key] = damage
    try:
        found = from_mirage_json(graphs, "evaluation")
    except ParseError:
        return
    for x in found:
        if isinstance(x, Imported):
            compare(graphs[0], x, scheduled=False)
