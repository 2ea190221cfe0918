"""Arrows point one way: what each part of the package may import, read from the source and not from a convention."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "mirage_jax"
ROOT = Path(__file__).parent.parent / PACKAGE

# A part may import the parts of earlier layers. Parts that share a layer do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "gc_pause", "hardware", "extension_modules"),
    ("limits", "children", "interruptible"),
    ("config", "why_not", "cluster"),
    ("mugraph", "seals", "log_topics"),
    ("cost", "jaxpr_frontend", "lower", "mirage_import", "pins"),
    ("search", "verify", "html_report"),
    ("cache", "progress", "report", "gpu_lock"),
    ("timing", "agreement"),
    ("compiler", "summary", "self_check"),
    ("api", "fallback", "written_graph"),
    ("bisection", "best_graphs", "exporting", "extensions"),
    ("__init__",),
    ("bench", "doctor", "preview", "cache_files"),
    ("audit",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# Imported where they are used: a CPU-only installation has no Triton, muGraphs can be handled without JAX, and only the
# benchmark draws pictures and knows torch.
LAZY = {
    "triton",
    "jax_triton",
    "jax",
    "torch",
    "matplotlib",
    "ray",
    "scipy",
    "sympy",
    "importlib",
}  # slow to load, or optional
# Our own, where nothing else would keep a process whose decisions are stored from loading all that makes them.
DECIDING = {f"{PACKAGE}.compiler.decide", f"{PACKAGE}.compiler.compiler"}
ON_A_MISS = {
    f"{PACKAGE}.compiler.{m}"
    for m in ("float_check", "tuning_session", "isolation.parent", "tuning", "function_timing", "pinned")
} | {f"{PACKAGE}.progress"}
ZOO = f"{PACKAGE}.bench.zoo."  # its entries import their libraries, of which none need be there
PRIVATE_HOME = f"{PACKAGE}.jaxpr_frontend.jax_compat"


def _module_name(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    in_function: bool


def _imports(tree: ast.Module) -> Iterator[Import]:
    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, in_function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative import"
                for alias in child.names:  # `from package import module` imports the module
                    full = f"{child.module}.{alias.name}"
                    # `from jax import _src` must be seen as jax._src too.
                    is_module = full in MODULES or child.module == "jax"
                    yield Import(full if is_module else str(child.module), child.lineno, in_function)
            else:
                nested = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, in_function or nested)

    return walk(tree, False)


IMPORTS = {name: list(_imports(ast.parse(file.read_text(), str(file)))) for name, file in MODULES.items()}


def _part(module: str) -> str:
    """The unit of the layering: ``mirage_jax.search.driver -> search``."""
    return module.split(".")[1] if "." in module else "__init__"


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


def test_the_picture_shows_these_layers() -> None:
    """docs/architecture.md draws them as ``a | b <- c``, without modules that Python names."""
    (picture,) = re.findall(r"\n\n((?:    .*<-.*\n)+)", (ROOT.parent / "docs" / "architecture.md").read_text())
    drawn = [tuple(part.strip() for part in layer.split("|")) for layer in picture.split("<-")]
    assert [set(layer) for layer in drawn] == [set(layer) for layer in LAYERS if not layer[0].startswith("__")]


def test_every_part_has_a_layer() -> None:
    assert {_part(name) for name in MODULES} <= set(LEVEL), "give the new part its place in LAYERS"


@pytest.mark.parametrize("name", MODULES)
def test_import_direction(name: str) -> None:
    for imported in filter(lambda i: _is_ours(i.module), IMPORTS[name]):
        here, there = _part(name), _part(imported.module)
        allowed = here == there or LEVEL[there] < LEVEL[here]
        where = f"{MODULES[name]}:{imported.line}"
        assert allowed, f"{where}: {here} may not import {there}; pass a callable or move the type down"


def test_no_cycle() -> None:
    graph = {name: {i.module for i in found if _is_ours(i.module)} - {name} for name, found in IMPORTS.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", MODULES)
def test_private_jax_names_stay_in_one_module(name: str) -> None:
    if name == PRIVATE_HOME:
        return
    for imported in IMPORTS[name]:
        where = f"{MODULES[name]}:{imported.line}"
        assert not imported.module.startswith("jax._src"), f"{where}: only {PRIVATE_HOME} may do this"
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "_src" and isinstance(node.value, ast.Name):
            assert node.value.id != "jax", f"{MODULES[name]}:{node.lineno}: only {PRIVATE_HOME} may do this"


@pytest.mark.parametrize("name", MODULES)
def test_imports_inside_functions_are_only_of_optional_packages(name: str) -> None:
    for imported in filter(lambda i: i.in_function, IMPORTS[name]):
        top = imported.module.split(".")[0]
        if (name in DECIDING and imported.module in ON_A_MISS) or (name.startswith(ZOO) and not _is_ours(top)):
            continue
        assert top in LAZY, f"{MODULES[name]}:{imported.line}: import {imported.module} at the top of the module"


@pytest.mark.parametrize("name", MODULES)
def test_bytes_are_never_run_as_code(name: str) -> None:
    """Nothing read from disk may become code: no pickle, no marshal, no yaml anywhere in the package."""
    for imported in IMPORTS[name]:
        assert imported.module.split(".")[0] not in {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}


HEAVY = {"scipy", "sympy", "triton", "torch", "flax", "matplotlib"}
NOT_AT_IMPORT = {
    f"{PACKAGE}.{m}" for m in ("search", "bench", "audit", "mirage_import", "compiler.tuning_session", "cli")
}


def test_import_loads_little() -> None:
    """A process whose decisions are stored waits for nothing that only a search needs."""
    program = "import sys, jax; before = set(sys.modules); import mirage_jax; mirage_jax.optimize; "
    program += "print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert f"{PACKAGE}.api" in loaded
    assert not loaded & (HEAVY | NOT_AT_IMPORT)


# Tests of the pipeline or of the repository as a whole; any other file is about the module that it is called after.
WHOLE = {"architecture", "bad_inputs", "docs", "examples", "house", "paths", "programs", "tour", "walkthrough"}
WHOLE |= {"decisions", "without_triton"}
WHOLE_FOLDERS = {"data", "golden", "layers", "transformations"}


def test_tests_mirror_the_package() -> None:
    here = Path(__file__).parent
    files = {file.stem.removeprefix("test_") for file in here.glob("test_*.py")}
    folders = {folder.name for folder in here.iterdir() if folder.is_dir() and not folder.name.startswith("_")}
    assert files - WHOLE <= {file.stem for file in ROOT.glob("*.py")}, "move the file to the folder of its package"
    assert folders - WHOLE_FOLDERS <= {file.parent.name for file in ROOT.glob("*/__init__.py")}
