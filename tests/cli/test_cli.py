"""The command line: exit codes, what goes to which stream, and messages for what is wrong."""

import json
import re
import subprocess
import sys

import jax
import pytest

import mirage_jax
from mirage_jax import cli, doctor
from mirage_jax.cli import bench, functions
from mirage_jax.errors import UsageError


class Stub:
    """Stands for an optimized function: these tests are about the command line, not about what it calls."""

    def __init__(self, fn, **options) -> None:
        self.options, self.jitted = options, jax.jit(fn)

    def __call__(self, *args):
        return self.jitted(*args)

    def trace(self, *args):
        return self.jitted.trace(*args)

    def explain(self, *args) -> str:
        return f"report [bold]of[/] {len(args)} arguments, {sorted(self.options.items())}"


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(mirage_jax, "optimize", Stub, raising=False)


def test_bench(stub, capsys, tmp_path) -> None:
    file = tmp_path / "r.json"
    code = cli.main(["bench", "--programs", "lora_b1,abv", "--small", "--rounds", "2", "--json", str(file)])
    out, err = capsys.readouterr()
    assert code == cli.OK
    assert "lora_b1" in out and "2/2 abv" in err and "2/2 abv" not in out
    rows = json.loads(file.read_text())["rows"]
    assert [row["program"] for row in rows] == ["lora_b1", "abv"]
    assert rows[0]["results"]["mirage"]["report"].startswith("report")
    assert "| abv |" in file.with_suffix(".md").read_text()


def test_bench_reports_a_failure(capsys, monkeypatch) -> None:
    def broken(fn, **options):
        raise RuntimeError("cannot")

    monkeypatch.setattr(mirage_jax, "optimize", broken, raising=False)
    code = cli.main(["bench", "--programs", "abv", "--small", "--rounds", "1", "-q"])
    assert code == cli.PROBLEM
    assert "abv, mirage: RuntimeError: cannot" in capsys.readouterr().err


def test_training_with_recomputation_is_compared_with_training_without(monkeypatch) -> None:
    """On a GPU ours recomputes by default, too."""
    asked, compared = [], []

    def run_suite(chosen, candidates, **how) -> None:
        compared.extend(candidates)
        raise UsageError("seen enough")

    monkeypatch.setattr(bench, "_optimizer", lambda args, **options: asked.append(options))
    monkeypatch.setattr(bench.suite, "run_suite", run_suite)
    assert cli.main(["bench", "--suite", "models", "--programs", "bert_train", "--small", "--remat", "-q"]) == 2
    assert asked == [{"remat": None}, {"remat": "regions"}] and compared == ["xla", "mirage", "mirage remat"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "--suite", "mirrage"], "Did you mean 'mirage'?"),
        (["bench", "--programs", "gqa_b1,lorra_b8"], "Did you mean 'lora_b8'?"),
        (["bench", "--rounds", "0"], "--rounds: found 0"),
        (["bench", "--json", "."], "is a directory"),
        (["mutate", "--count", "1", "--seed", "-1"], "--seed: found -1"),
        (["bench", "--remat"], "only --suite models has; found --suite mirage"),
        (["explain", "nowhere", "f32[2]"], "allowed is module:function"),
        (["explain", "no.such.module:f", "f32[2]"], "cannot be imported"),
        (["explain", ".relative:f", "f32[2]"], "cannot be imported: TypeError"),
        (["explain", "jax.numpy:matmul", "f32[2,3] f32[2,3]"], "cannot be traced with them: TypeError: "),
        (["preview", "jax.numpy:matmul", "f32[2,3] f32[2,3]"], "cannot be traced with them: TypeError: "),
        (["explain", "math:sqr", "f32[2]"], "Did you mean 'sqrt'?"),
        (["explain", "math:pi", "f32[2]"], "cannot be called"),
        (["explain", "math:exp", "f31[2]"], "unknown dtype 'f31'. Did you mean 'f32'?"),
        (["explain", "math:exp", "f32[2"], "allowed are types such as"),
    ],
)
def test_usage(argv, message, stub, capsys) -> None:
    assert cli.main(argv) == cli.USAGE
    out, err = capsys.readouterr()
    assert message in err and err.startswith("error: ") and not out


@pytest.mark.parametrize("argv", [[], ["benchmark"], ["bench", "--on-miss", "hope"], ["doctor", "--what"]])
def test_usage_of_argparse(argv, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == cli.USAGE
    assert "usage: mirage-jax" in capsys.readouterr().err


def test_explain(stub, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_module.py").write_text("class Model:\n    @staticmethod\n    def f(x, y):\n        return x + y\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["explain", "my_module:Model.f", "f32[2, 3] bf16[]", "--budget", "3s", "--strict"]) == cli.OK
    assert capsys.readouterr().out == "report [bold]of[/] 2 arguments, [('budget', '3s'), ('strict', True)]\n"
    assert cli.main(["explain", "my_module:Model.f", "f32[2, 3] bf16[]", "--budget", "3s", "--workers", "4"]) == cli.OK
    assert "Budget(seconds=3.0, states=None, workers=4, total=None)" in capsys.readouterr().out


ABV = "mirage_jax.bench.programs:matrix_matrix_vector"


@pytest.mark.parametrize(("form", "text"), [("--brief", "what changed"), ("--json", '"why"')])
def test_explain_forms(form, text, capsys, tmp_path) -> None:
    options = ["--on-miss", "heuristic", "--strict", "--cache-dir", str(tmp_path), form]
    assert cli.main(["explain", ABV, "f32[256,256] f32[256,256] f32[256]", *options]) == cli.OK
    out = capsys.readouterr().out
    assert text in out
    if form == "--json":
        assert json.loads(out)["regions"][0]["decision"] == "mirage"


def test_explain_counts_arguments(capsys) -> None:
    assert cli.main(["explain", ABV, "f32[256,256]"]) == cli.USAGE
    assert "found 1; the function takes (a:" in capsys.readouterr().err


LORA = "f16[16,256] f16[256,4096] f16[256,16] f16[16,4096]"


def test_preview(capsys) -> None:
    assert cli.main(["preview", "mirage_jax.bench.programs:lora", LORA, "--budget", "20s"]) == cli.OK
    out = capsys.readouterr().out
    assert "kernel k0 grid(" in out and "certified" in out and "@triton.jit" in out
    assert re.search(r"XLA's code is estimated at .*x of the limit .*; [\d.]+ MB, .*FLOP, \d kernels", out)
    assert re.search(r"x over XLA by the model; [\d.]+ MB, .*FLOP, 1 kernel\n", out)


def test_preview_of_an_unknown_device(capsys) -> None:
    assert cli.main(["preview", "jax.numpy:exp", "f32[2]", "--device", "H20"]) == cli.USAGE
    assert "Did you mean 'H200'?" in capsys.readouterr().err


def test_parse_arguments() -> None:
    found = functions.parse_arguments("f32[128,64];bf16[] i32[ 7 ]")
    assert [(a.shape, str(a.dtype)) for a in found] == [((128, 64), "float32"), ((), "bfloat16"), ((7,), "int32")]
    assert functions.parse_arguments("") == ()
    with pytest.raises(UsageError):
        functions.parse_arguments("f32[-1]")


# The doctor.


def test_doctor_names_a_problem_and_its_fix(monkeypatch, capsys) -> None:
    def missing():
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    def bad():
        raise ValueError("[red]first[/]\nsecond")

    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: doctor.Check("a", "ok", "fine"), "b": missing, "c": bad})
    assert cli.main(["doctor"]) == cli.ENVIRONMENT
    out = capsys.readouterr().out
    assert "ok  a: fine" in out
    assert (
        "problem  b: ModuleNotFoundError: No module named 'triton'\n         fix: pip install --upgrade triton" in out
    )
    assert "ValueError: [red]first[/]\n" in out
    assert cli.main(["doctor", "--json"]) == cli.ENVIRONMENT
    assert [c["status"] for c in json.loads(capsys.readouterr().out)] == ["ok", "problem", "problem"]


@pytest.mark.parametrize(
    "name", ["versions", "devices", "processes", "settings", "cache", "generated kernels", "GPU lowering"]
)
def test_check(name) -> None:
    check = doctor.CHECKS[name]()
    assert check.status == "ok", check
    assert check.name == name


def test_doctor_sees_settings(monkeypatch) -> None:
    monkeypatch.setenv("MIRAGE_JAX_BUDGET", "soon")
    monkeypatch.setenv("MIRAGE_JAX_LOG", "serach")
    assert "MIRAGE_JAX_LOG: unknown topic 'serach'. Did you mean 'search'?" in doctor.check_settings().found
    monkeypatch.delenv("MIRAGE_JAX_LOG")
    assert "MIRAGE_JAX_BUDGET: budget: found 'soon'" in doctor.check_settings().found
    monkeypatch.setenv("MIRAGE_JAX_REMAT", "everything")
    assert "MIRAGE_JAX_REMAT: unknown value for remat" in doctor.check_settings().found
    monkeypatch.delenv("MIRAGE_JAX_REMAT")
    monkeypatch.setenv("MIRAGE_JAX_BUDGET", "3s")
    monkeypatch.setenv("MIRAGE_JAX", "off")
    assert doctor.check_settings().fix == "unset MIRAGE_JAX"


def test_doctor_leaves_no_trace_in_the_cache_and_sees_a_broken_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", str(tmp_path))
    assert doctor.check_cache().status == "ok"
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert doctor.check_cache().status == "problem"


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mirage_jax", "--version"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.startswith("mirage-jax ")


LOADED = """
import contextlib, sys
from mirage_jax import cli
with contextlib.suppress(SystemExit):
    cli.main(sys.argv[1:])
names = ("jax", "bench", "audit", "mirage_import")
print([name for name in names if {name, f"mirage_jax.{name}"} & sys.modules.keys()])
"""


@pytest.mark.parametrize(
    ("argv", "loaded"),
    [
        (["--version"], []),
        (["--help"], []),
        (["bench", "--suite", "none"], ["jax", "bench"]),
        (["doctor", "--help"], ["jax"]),
        (["verify", "--help"], ["jax", "bench", "audit", "mirage_import"]),
    ],
)
def test_a_command_loads_only_its_modules(argv: list[str], loaded: list[str]) -> None:
    command = [sys.executable, "-c", LOADED, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == str(loaded)
