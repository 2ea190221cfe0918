"""Verdicts on saved muGraphs: what is right is certified, the peer's wrong winners are found, bad input is named."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from mirage_import import mirage
from mirage_import.mirage import Json, Writer, split_attention

from mirage_jax import cli
from mirage_jax.audit.saved import PROGRAMS, Kind, examine, judge
from mirage_jax.bench import programs
from mirage_jax.errors import UsageError
from mirage_jax.mirage_import.file import read_mirage_json
from mirage_jax.mugraph.parser import parse

DATA = Path(__file__).parent.parent / "data" / "mirage"
EVALUATION = ("--data-types", "evaluation")


def verdicts(graph: list[Json], program: str) -> list[Kind]:
    return [v.kind for v in judge(read_mirage_json([graph]), PROGRAMS[program])]


@pytest.mark.parametrize(
    ("file", "program", "kind", "count"),
    [
        ("lora", "lora", Kind.CERTIFIED, 4),
        ("rmsnorm_bs1", "rmsnorm", Kind.CERTIFIED, 18),
        ("qknorm_gqa_bs1", "qknorm_gqa", Kind.DIFFERENT, 3),
    ],
)
def test_saved_graphs(file: str, program: str, kind: Kind, count: int) -> None:
    found = examine(DATA / f"{file}.json", program, PROGRAMS[program], "evaluation").verdicts
    assert [v.kind for v in found] == [kind] * count
    assert all(v.bound is not None and v.bound <= 1e-12 for v in found if v.kind is Kind.CERTIFIED)
    for v in found:
        assert v.graph is not None and str(parse(v.graph)) == v.graph


@pytest.mark.parametrize(
    ("file", "program", "count"),
    [
        ("lora", "lora", 4),
        ("single_lora", "lora", 1),
        ("single_gated_mlp", "gated_mlp", 1),
        ("single_mqa_bs1", "mqa", 1),
    ],
)
def test_saved_graphs_of_the_branch_mpk(file: str, program: str, count: int) -> None:
    """They say themselves that they are float16."""
    found = examine(DATA.with_name("mirage-mpk") / f"{file}.json", program, PROGRAMS[program]).verdicts
    assert [v.kind for v in found] == [Kind.CERTIFIED] * count
    assert all(v.bound is not None and v.bound <= 1e-12 for v in found)


def test_split_attention_is_right() -> None:
    """Also against the safe softmax of JAX, whose shift cancels."""
    graph = split_attention(2, 16, 8, 32, 2, 4).graph
    assert verdicts(graph, "gqa") == [Kind.CERTIFIED]
    (safe,) = judge(read_mirage_json([graph]), programs.attention)
    assert safe.kind is Kind.CERTIFIED
    assert verdicts(graph, "qknorm_gqa") == [Kind.DIFFERENT]


def test_why_the_wrong_ones_passed() -> None:
    """They are right where K counts up, K[k,n] = 4096 k + n, as it did in the test that accepted them."""
    rng = np.random.default_rng(0)
    shapes = [(2, 256, 64), (2, 64, 4096), (2, 4096, 64)]
    q, k, v = (rng.normal(size=s) for s in shapes)
    counting = np.arange(k.size).reshape(k.shape) * 1e-5
    with jax.enable_x64(True):
        for graph in json.loads((DATA / "qknorm_gqa_bs1.json").read_text()):
            for keys, right in ((counting, True), (k, False)):
                (have,) = mirage.evaluate(graph, [q, keys, v])
                want = np.asarray(PROGRAMS["qknorm_gqa"](q, keys, v))
                assert np.allclose(have, want, rtol=1e-6, atol=1e-9) == right


def with_qknorm(norm_of_v: bool) -> list[Json]:
    """QKNorm as it should be, and with one norm forgotten."""
    w = Writer()
    q, k, v = w.input(2, 8, 4), w.input(2, 4, 8), w.input(2, 8, 4)
    block = w.kernel((2, 4, 1), 1)
    e = block.op("exp", block.op("matmul", block.op("rms_norm", block.load(q, (0, 1, -1))), block.load(k, (0, -1, -1))))
    tile = block.load(v, (0, -1, -1))
    tile = block.op("rms_norm", tile) if norm_of_v else tile
    product, total = block.accum("nored", block.op("matmul", e, tile)), block.accum("red_ld_sum", e)
    out = block.store(block.op("div", product, total), (0, 1, -1))
    block.done()
    w.output(out)
    return w.graph


def test_a_qknorm_that_is_right() -> None:
    assert verdicts(with_qknorm(True), "qknorm_gqa") == [Kind.CERTIFIED]
    assert verdicts(with_qknorm(False), "qknorm_gqa") == [Kind.DIFFERENT]


def written(program: str) -> list[Json]:
    """Programs of the peer with its predefined operators, as its benchmark scripts write them."""
    w = Writer()
    if program == "gated_mlp":
        x, a, b = w.input(4, 6), w.input(6, 8), w.input(6, 8)
        out = w.op("mul", w.op("silu", w.op("matmul", x, a)), w.op("matmul", x, b))
    elif program == "ntrans":
        h, x, a = (w.input(4, 8) for _ in "hxa")
        out = w.op("rms_norm", w.op("add", x, w.op("mul", a, w.op("add", w.op("rms_norm", h), x))))
    else:
        q, k, v = w.input(2, 4, 6), w.input(2, 6, 8), w.input(2, 8, 6)
        e = w.op("exp", w.op("matmul", q, k))
        out = w.op("matmul", w.op("div", e, w.op("reduction_2", e)), v)
    w.output(out)
    return w.graph


@pytest.mark.parametrize("program", ["gated_mlp", "ntrans", "gqa", "mha", "mqa"])
def test_programs_of_predefined_operators(program: str) -> None:
    assert verdicts(written(program), program) == [Kind.CERTIFIED]


def test_what_is_added_under_the_root_counts() -> None:
    """The benchmark's own RMS norm adds 1e-6; the peer's does not."""
    (first, *_) = judge(read_mirage_json((DATA / "rmsnorm_bs1.json").read_text(), "evaluation"), programs.rmsnorm)
    assert first.kind is Kind.DIFFERENT


def test_other_outputs() -> None:
    w = Writer()
    x, y = w.input(4, 4), w.input(4, 4)
    w.output(w.op("reduction_1", w.op("matmul", x, y)))
    assert verdicts(w.graph, "rmsnorm") == [Kind.DIFFERENT]  # shape
    w.output(w.op("matmul", x, y))
    assert verdicts(w.graph, "rmsnorm") == [Kind.DIFFERENT]  # number


def test_refused_with_a_reason() -> None:
    w = Writer()
    x = w.input(4, 4)
    w.graph.append({"op_type": "kn_clamp_op", "input_tensors": [x], "output_tensors": [w.tensor((4, 4))]})
    w.output(w.graph[-1]["output_tensors"][0])
    (found,) = judge(read_mirage_json([w.graph]), lambda x: x @ x)
    assert found.kind is Kind.REFUSED and "its bounds are not in the file" in found.detail


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x, "does not take the file's inputs f16[16, 256], f16[256, 4096]"),
        (lambda x, w, a, b: x @ w, "not one muGraph of the file's inputs"),
        (lambda x, w, a, b: x @ a @ b @ x, "does not take the file's inputs"),
    ],
)
def test_programs_that_do_not_fit(fn, message: str) -> None:
    with pytest.raises(UsageError) as error:
        examine(DATA / "lora.json", "it", fn, "evaluation")
    assert message in str(error.value)


# --- the command


def test_command(capsys, tmp_path) -> None:
    out = tmp_path / "verdicts.json"
    code = cli.main(
        ["verify", str(DATA / "qknorm_gqa_bs1.json"), "--program", "qknorm_gqa", "--json", str(out), *EVALUATION]
    )
    text = capsys.readouterr().out
    assert code == cli.PROBLEM
    assert "3 graphs: 0 certified, 3 different, 0 refused" in text and "differs in" in text
    data = json.loads(out.read_text())
    assert [v["kind"] for v in data["verdicts"]] == ["different"] * 3 and data["program"] == "qknorm_gqa"


def test_command_certifies(capsys) -> None:
    function = "mirage_jax.bench.programs:lora"
    assert cli.main(["verify", str(DATA / "lora.json"), "--program", function, *EVALUATION]) == cli.OK
    assert "4 graphs: 4 certified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "program", "message"),
    [
        ("[[", "lora", "not JSON: "),
        ('[[{"op_type": "kn_input_op"}]]', "lora", "graph 0, operator 0 (kn_input_op): no 'input_tensors'"),
        ("[]", "lora", "expected at least one graph"),
        ("[]", "lra", "unknown program 'lra'. Did you mean 'lora'?"),
        ("[]", "nowhere:f", "cannot be imported"),
    ],
)
def test_command_with_bad_input(text: str, program: str, message: str, capsys, tmp_path) -> None:
    file = tmp_path / "graphs.json"
    file.write_text(text)
    assert cli.main(["verify", str(file), "--program", program]) == cli.USAGE
    assert message in capsys.readouterr().err


def test_command_asks_for_data_types(capsys) -> None:
    assert cli.main(["verify", str(DATA / "lora.json"), "--program", "lora"]) == cli.USAGE
    assert "lora.json: data type 941 is f16 (evaluation), bf16 (mpk)" in capsys.readouterr().err


def test_command_without_a_file(capsys, tmp_path) -> None:
    assert cli.main(["verify", str(tmp_path / "none.json"), "--program", "lora"]) == cli.ENVIRONMENT
    assert "none.json" in capsys.readouterr().err
