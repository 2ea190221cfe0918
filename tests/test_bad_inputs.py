"""Wrong uses of everything public: the message says what was found, and what is allowed or how to fix it."""

import logging
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax import Budget, MuGraph, UsageError, bisect, cli, config, export, optimize, superoptimize, tune
from mirage_jax.report import Decision, RegionReport

X = jnp.ones((4, 4))
TEXT = """mugraph {
  extents i=4 j=4
  input x: f32[i,j]
  library y: f32[i] = sum{axes=(j)} x[i,j]
  output y
}"""
GRAPH = MuGraph.parse(TEXT)
SOURCE = "source lines such as 'model.py:41'"
NUMBERS = "different numbers from 0 on, such as 0"
SECONDS = "a positive number of seconds or a text such as"


def cube(x):
    return (x @ x) @ x


async def asynchronous(x):
    return x


def generator(x):
    yield x


def edited(old: str, new: str) -> Callable[[], object]:
    """Parse the text with one part replaced."""
    assert old in TEXT
    return lambda: MuGraph.parse(TEXT.replace(old, new))


def option(**options: object) -> Callable[[], object]:
    return lambda: optimize(cube, **options)


F = optimize(cube, on_miss="fallback")
REGION = RegionReport((), "", Decision(None, "", "policy", "cpu"))

# what is called, what the message says was found, and what it says is allowed or to be done
CALLS: list[tuple[Callable[[], object], str, str]] = [
    (lambda: optimize(3), "found 3", "takes a function, a method or a callable module"),
    (lambda: optimize("cube"), "found 'cube'", "takes a function"),
    (lambda: optimize(None), "found None", "takes a function"),
    (lambda: optimize((cube, cube)), "(tuple)", "takes a function"),
    (lambda: optimize(np), "module 'numpy'", "takes a function"),
    (lambda: optimize(dict), "<class 'dict'>", "not an instance of it"),
    (lambda: optimize(asynchronous), "asynchronous", "optimize the function that it awaits for"),
    (lambda: optimize(generator), "a generator", "return its values instead"),
    (option(buget="3s"), "unknown option 'buget'", "Did you mean 'budget'?"),
    (option(static_argnum=1), "'static_argnum'", "Did you mean 'static_argnums'?"),
    (option(zzz=1), "'zzz'", "Allowed: on_miss, budget"),
    (option(budget=0), "budget: found 0", SECONDS),
    (option(budget=-1.5), "budget: found -1.5", SECONDS),
    (option(budget=float("nan")), "budget: found nan", SECONDS),
    (option(budget=float("inf")), "budget: found inf", SECONDS),
    (option(budget=True), "budget: found True", SECONDS),
    (option(budget="soon"), "budget: found 'soon'", "'30s', '500ms', '1m30s'"),
    (option(budget=""), "budget: found ''", SECONDS),
    (option(budget="30 parsecs"), "found '30 parsecs'", SECONDS),
    (option(budget="1s/2s/3s"), "found '1s/2s/3s'", "'20s/5m' for one search and for all"),
    (option(budget=[30]), "[30] (list)", SECONDS),
    (option(budget=jnp.ones(3)), "Array([1., 1., 1.]", SECONDS),
    (option(on_miss="serach"), "'serach'", "Did you mean 'search'?"),
    (option(on_miss=1), "on_miss: 1", "Allowed: search, heuristic, fallback, error"),
    (option(backend="cuda"), "'cuda'", "Allowed: auto, jax, triton"),
    (option(backend=["jax"]), "['jax']", "Allowed: auto, jax, triton"),
    (option(remat="region"), "'region'", "Did you mean 'regions'?"),
    (option(remat=3), "remat: 3", "Allowed: auto, regions"),
    (option(check="once"), "'once'", "Allowed: first, always"),
    (option(check=True), "check: True", "Allowed: first, always"),
    (option(strict=1), "strict: found 1", "True and False"),
    (option(strict_range="yes"), "strict_range: found 'yes'", "True and False"),
    (option(devices="gpu"), "devices: found 'gpu'", NUMBERS),
    (option(devices=-1), "devices: found -1", NUMBERS),
    (option(devices=[0, 0]), "devices: found [0, 0]", NUMBERS),
    (option(devices=0.5), "devices: found 0.5", NUMBERS),
    (option(cache_dir=7), "cache_dir: found 7", "a path"),
    (option(cache_dir="a\0b"), "cache_dir: found", "a path as text"),
    (option(cache_dir=__file__), "test_bad_inputs.py", "exists and is not a directory"),
    (option(cache_dir="gs://bucket/decisions"), "found 'gs://bucket/decisions'", "mount the bucket, or copy a file"),
    (option(cache_dir=("a", "s3://bucket")), "found 's3://bucket'", "cache export"),
    (option(cache_dir=()), "cache_dir: found ()", "or several: the first is written"),
    (option(cache_dir=("a", 7)), "cache_dir: found 7", "a path"),
    (lambda: export(3, X, device="sm_90"), "found 3", "takes a function"),
    (lambda: export(cube, X, device="sm_9"), "'sm_9'", "Did you mean 'sm_90'?"),
    (lambda: export(cube, (4, 4), device="H200"), "found the argument (4, 4)", "jax.ShapeDtypeStruct((4, 4)"),
    (lambda: export(cube, X), "no GPU here", "device='sm_90' or device='H200'"),
    (option(skip=41), "skip: found 41", SOURCE),
    (option(skip="model.py"), "skip: found 'model.py'", SOURCE),
    (option(skip=["0f3a"]), "skip: found '0f3a'", "at least 8 digits"),
    (option(only=[None]), "only: found None", SOURCE),
    (option(only={"model.py:0"}), "only: found 'model.py:0'", SOURCE),
    (option(pins=3), "pins: found 3", "allowed is a path"),
    (option(pins="nowhere.toml"), "nowhere.toml cannot be read", "report.save_pins writes such a file"),
    (option(pins="."), "cannot be read (Is a directory)", "report.save_pins writes such a file"),
    (option(pins=__file__), "test_bad_inputs.py is no TOML", "write the file by report.save_pins"),
    (lambda: REGION.veto(), "no function in this process", "ask `explain` of an optimized function"),
    (lambda: REGION.pin(3), "pin: found 3", "the text of a muGraph, a MuGraph, or one of the region's variants"),
    (lambda: REGION.pin("hello"), "found 'hello'", "expected 'mugraph {'"),
    (lambda: REGION.pin(TEXT.replace("output y", "output z")), "pin: output z", "is not a tensor"),
    (lambda: Budget(-1), "found -1", "a positive number of seconds"),
    (lambda: Budget(1, states="many"), "found 'many'", "a positive number or None"),
    (lambda: Budget(1, workers="2"), "found '2'", "at least one worker"),
    (lambda: optimize(cube, devices=99, on_miss="search")(X), "found 99", "counted from 0"),
    (lambda: F.explain((8, 8)), "found the argument (8, 8)", "jax.ShapeDtypeStruct((8, 8), 'float32')"),
    (lambda: F.explain([4, 4]), "found the argument [4, 4]", "allowed are arrays"),
    (lambda: F.explain("f32[4,4]"), "found the argument 'f32[4,4]'", "allowed are arrays, or shapes such as"),
    (lambda: Budget("30s", total="later"), "found 'later'", SECONDS),
    (lambda: tune(cube, (4, 4)), "found the argument (4, 4)", "jax.ShapeDtypeStruct((4, 4), 'float32')"),
    (lambda: tune(cube, X, budget="3s"), "budget is an option of optimize", "optimize(f, budget='3s')"),
    (lambda: tune(3, X), "found 3", "takes a function"),
    (lambda: bisect(3, X), "found 3", "takes a function"),
    (lambda: bisect(F, X, check=3), "check: found 3", "a function of two results"),
    (lambda: superoptimize(3, (4, 4)), "found 3", "a function and the shapes of its arguments"),
    (lambda: superoptimize(cube, "f32"), "found 'f32'", "allowed are arrays, types, and shapes"),
    (lambda: superoptimize(cube, (4, 4), (4, 4)), "does not take the given inputs", "f32[4, 4], f32[4, 4]"),
    (lambda: superoptimize(jnp.sort, (4,)), "not one muGraph", "sort"),
    (lambda: superoptimize(cube, (4, 4), grid=3), "grid: found 3", "allowed are axes of the program: "),
    (lambda: superoptimize(cube, (4, 4), grid="z"), "grid: found 'z'", "allowed are axes of the program: "),
    (lambda: superoptimize(cube, (4, 4), tiles=[16]), "tiles: found [16]", "sizes by axis"),
    (lambda: superoptimize(cube, (4, 4), tiles={"i": 0}), "tiles of i: found 0", "one or several sizes"),
    (lambda: superoptimize(cube, (4, 4), kernels=0), "kernels: found 0", "a whole number from 1 on"),
    (lambda: superoptimize(cube, (4, 4), device="H999"), "'H999'", "Allowed: "),
    (lambda: superoptimize(cube, (4, 4), budget="soon"), "budget: found 'soon'", SECONDS),
    (lambda: MuGraph.parse(3), "found 3", "the text of a muGraph"),
    (lambda: MuGraph.parse("hello"), "line 1: expected 'mugraph {'", "found 'hello'"),
    (lambda: MuGraph.parse(""), "found the end of the text", "expected a closing brace"),
    (edited("sum{axes=(j)}", "summ{axes=(j)}"), "unknown operator 'summ'", "known: abs, "),
    (edited("f32[i,j]", "f33[i,j]"), "unknown dtype 'f33'", "known: f16, bf16, f32"),
    (edited("output y", "output z"), "z", "output"),
    (edited("i=4", "i=-4"), "line 2", "-4"),
    (lambda: MuGraph.parse(TEXT, schedule={"a": 1}), "schedule", "malformed"),
    (lambda: GRAPH.as_function()(jnp.ones((3, 4))), "float32[3, 4]", "its inputs are f32[4, 4]"),
    (lambda: GRAPH.as_function()(), "the arrays none", "its inputs are f32[4, 4]"),
    (lambda: GRAPH.as_function()(jnp.ones((4, 4), jnp.int32)), "int32[4, 4]", "its inputs are f32[4, 4]"),
    (lambda: GRAPH.equals(3), "found 3", "a function and the shapes of its arguments"),
    (lambda: GRAPH.equals(cube, inputs=(3,)), "found (3,)", "the numbers from 0 to 0"),
    (lambda: GRAPH.equals(lambda x, y: x), "missing 1 required positional argument", "the graph's inputs f32[4, 4]"),
]

COMMANDS: list[tuple[str, str, str]] = [
    ("explain nomod:f f32[2]", "'nomod:f'", "cannot be imported"),
    ("explain math f32[2]", "found 'math'", "module:function"),
    ("explain math:sinn f32[2]", "'sinn'", "Did you mean 'sin'?"),
    ("explain math:sin f99[2]", "'f99'", "Allowed: f16, bf16, f32"),
    ("explain math:sin f32[2", "found 'f32[2'", "f32[128,64] bf16[64]"),
    ("preview jax.numpy:sin f32[2] --device H999", "'H999'", "Allowed:"),
    ("check jax.numpy:sin f32[2] --for H999", "'H999'", "Allowed: sm_70"),
    ("check jax.numpy:sin f32[2", "found 'f32[2'", "f32[128,64] bf16[64]"),
    ("check jax.numpy:sin f32[2] --cache-dir gs://bucket", "found 'gs://bucket'", "mount the bucket"),
    ("compile math:sinn f32[2] --for sm_90 --out a", "'sinn'", "Did you mean 'sin'?"),
    ("compile jax.numpy:sin f32[2] --for sm_91 --out a", "'sm_91'", "Did you mean 'sm_90'?"),
    ("compile jax.numpy:sin f32[2] --for sm_90 --out tests", "found 'tests'", "allowed is a file"),
    ("compile jax.numpy:sin f32[2] --for sm_90 --out no/a", "found 'no/a'", "in a folder that exists"),
    ("cache list --cache-dir gs://bucket", "found 'gs://bucket'", "mount the bucket"),
    ("check-xla jax.numpy:sin f32[2] --inputs normall", "'normall'", "Did you mean 'normal'?"),
    ("check-xla jax.numpy:sin f32[2", "found 'f32[2'", "f32[128,64] bf16[64]"),
    ("check-xla jax.random:PRNGKey i32[]", "random_seed", "the float64 reference does not know"),
    ("check-xla jax.numpy.linalg:inv f32[2,2]", "custom_linear_solve", "it has a body"),
    ("check-xla jax.numpy.fft:fft f32[4]", "fft", "it has complex numbers"),
    ("trace jax.numpy:sin f32[2] --out README.md", "'README.md' is a file", "allowed is a folder"),
    ("trace jax.numpy:sin f32[2] --budget soon", "found 'soon'", SECONDS),
    ("bench --suite nope", "'nope'", "Allowed: mirage, prefill"),
    ("bench --programs nope", "'nope'", "Allowed: gqa_b1"),
    ("bench --budget soon --programs abv --small", "found 'soon'", SECONDS),
    ("bench --json .", "is a directory", "allowed is a file"),
    ("fuzz --programs -1", "found -1", "allowed is 1 or more"),
    ("cache show zz", "'zz'", "the beginning of one"),
]


@pytest.mark.parametrize(("call", "found", "allowed"), CALLS, ids=range(len(CALLS)))
def test_calls(call, found: str, allowed: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    text = str(error.value)
    assert found in text and allowed in text and len(text.splitlines()) == 1, text


@pytest.mark.parametrize(("line", "found", "allowed"), COMMANDS, ids=[line.split()[0] for line, *_ in COMMANDS])
def test_commands(line: str, found: str, allowed: str, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", str(tmp_path))
    assert cli.main(line.split()) == cli.USAGE
    err = capsys.readouterr().err
    assert err.startswith("error: ") and found in err and allowed in err


def test_there_are_enough() -> None:
    assert len(CALLS) + len(COMMANDS) >= 60


def test_a_back_end_without_its_device_is_one_warning(caplog, tmp_path: Path) -> None:
    config.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "mirage_jax"):
        for scale in (2.0, 3.0):
            f = optimize(lambda x, s=scale: s * cube(x), backend="triton", on_miss="fallback", cache_dir=tmp_path)
            assert np.array_equal(f(X), scale * jax.jit(cube)(X))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "backend='triton' makes kernels for GPUs; on this cpu only other algebra is tried" in line


def test_errors_of_the_function_itself_stay() -> None:
    """What is wrong with the user's program is said by Python and JAX, as under `jax.jit`."""
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        F.explain()
    with pytest.raises(TypeError, match="contracting dimensions"):
        F(jnp.ones((2, 3)))
