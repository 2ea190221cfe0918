"""What this user did not make is checked before it runs: a digest can be recomputed, a seal cannot."""

import logging
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from deciding import N, assert_same, chain, measured, operands

import mirage_jax
from mirage_jax import cache as caches
from mirage_jax import seals
from mirage_jax.cache import Cache, CacheKey, Entry, encode
from mirage_jax.compiler import Compiler
from mirage_jax.compiler import stored as stored_decisions
from mirage_jax.compiler import tuning_session as attempts
from mirage_jax.config import Options
from mirage_jax.errors import VerificationError
from mirage_jax.seals import Seal
from mirage_jax.verify.gate import Verdict

ARGS = operands()


@pytest.fixture
def stored(tmp_path):
    """The cache of a user who has tuned `chain`, its key, entry and file."""
    seen = []
    with measured(2.0), pytest.MonkeyPatch.context() as patch:
        put = Cache.put
        patch.setattr(Cache, "put", lambda self, key, *rest: seen.append(key) or put(self, key, *rest))
        mirage_jax.optimize(chain, cache_dir=str(tmp_path / "c"))(*ARGS)
    (key,), cache = seen, Cache(tmp_path / "c")
    caches._checked_here.clear()
    caches._complained.clear()
    return SimpleNamespace(cache=cache, key=key, entry=cache.get(key), path=cache.path(key))


def read(stored, **options):
    """The decision of a process that only reads, and its function."""
    f = mirage_jax.optimize(chain, cache_dir=str(stored.cache.directory), on_miss="fallback", **options)
    (region,) = f.explain(*ARGS).regions
    return region.decision, f


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_the_user_made_needs_no_gate(stored, monkeypatch) -> None:
    monkeypatch.setattr(attempts.TuningSession, "gate", None)
    d, _ = read(stored)
    assert d.winner is not None and d.gate.startswith("passed on 19 input classes") and "2.00x" in d.why


def test_what_somebody_else_made_is_checked_once_and_says_so(stored, monkeypatch, caplog) -> None:
    stored.path.write_bytes(encode(stored.key, stored.entry))  # the same, without a seal
    asked = []
    gate = attempts.TuningSession.gate
    monkeypatch.setattr(
        attempts.TuningSession, "gate", lambda self, w, only=(): asked.append(only) or gate(self, w, only)
    )
    for _ in range(3):
        d, f = read(stored)
        assert d.winner is not None and d.source == "cache"
        assert "18" not in d.gate and "a few telling input classes" in d.gate and "elsewhere" in d.gate
        assert d.why == "2.00x over XLA, as measured elsewhere"
        assert_same(f(*ARGS), chain(*ARGS))
        caches._checked_here.clear()  # as in another process
    assert asked == [stored_decisions.STORED_INPUT_CLASSES]
    assert stored.cache.lookup(stored.key).seal is Seal.CHECKED and not warnings(caplog)


def test_the_seal_of_another_user_is_none_and_stays(stored, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(seals.KEY_FILE_VARIABLE, str(tmp_path / "other"))
    (tmp_path / "other").write_bytes(b"x" * 32)
    assert stored.cache.lookup(stored.key).seal is Seal.FOREIGN
    assert read(stored)[0].winner is not None
    caches._checked_here.clear()
    assert stored.cache.lookup(stored.key).seal is Seal.CHECKED
    monkeypatch.delenv(seals.KEY_FILE_VARIABLE)
    assert stored.cache.lookup(stored.key).seal is Seal.MADE


EDITS = {
    "bool": lambda g: g.replace("m0: f32[", "m0: bool["),
    "u8": lambda g: g.replace("m0: f32[", "m0: u8["),
    "i8": lambda g: g.replace("m0: f32[", "m0: i8["),
    "bf16": lambda g: g.replace("m0: f32[", "m0: bf16["),
    "overflow": lambda g: behind(g, "affine{scale=%s}" % 10**39, "affine{scale=1/%s}" % 10**39),
    "cancelling": lambda g: behind(g, "affine{offset=1000000000}", "affine{offset=-1000000000}"),
}  # fmt: skip


def behind(graph: str, *operators: str) -> str:
    """The graph with operators behind its first product, which together do nothing to a real number."""
    lines = graph.splitlines()
    at, line = next((n, text) for n, text in enumerate(lines) if " m0: " in text)
    axes = line[line.index("m0: f32") + 7 :].partition(" ")[0]
    names = [f"e{n}" for n in range(len(operators))] + ["m0"]
    lines[at] = line.replace(" m0: ", f" {names[0]}: ")
    for n, operator in enumerate(operators):
        lines.insert(at + n + 1, f"  library {names[n + 1]}: f32{axes} = {operator} {names[n]}{axes}")
    return "\n".join(lines)


def with_schedule(entry: Entry, graph: str) -> Entry:
    """The entry with this graph, and a schedule of as many kernels."""
    count = graph.count("  library ")
    return replace(entry, graph=graph, schedule={**entry.schedule, "kernels": entry.schedule["kernels"][:1] * count})


@pytest.mark.parametrize("rules", [True, False], ids=["by rules", "by the gate"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_is_right_over_the_reals_is_refused(name, rules, stored, caplog, monkeypatch) -> None:
    """Certificates are about real numbers. The digest is recomputed; the seal is made up."""
    if not rules:
        monkeypatch.setattr(stored_decisions, "GATES_FOR_STORED", ())
    graph = EDITS[name](stored.entry.graph)
    assert graph != stored.entry.graph
    edited = with_schedule(stored.entry, graph)
    stored.path.write_bytes(encode(stored.key, edited, {seals.own_key().name: "made:" + "0" * 64}))
    d, f = read(stored)
    assert d.winner is None and "not usable" in d.why
    assert ("has a type" in d.why or "justify" in d.why) if rules else "refused" in d.why
    (line,) = warnings(caplog)
    assert "\n" not in line
    assert_same(f(*ARGS), chain(*ARGS), 0)


def dead(entry: Entry) -> Entry:
    line = next(x for x in entry.graph.splitlines() if " m0: " in x)
    return with_schedule(entry, entry.graph.replace(line, f"{line}\n{line.replace(' m0: ', ' unused: ')}"))


def many(entry: Entry) -> Entry:
    line = next(x for x in entry.graph.splitlines() if " m0: " in x)
    more = [line.replace(" m0: ", f" u{n}: ") for n in range(2000)]
    graph = entry.graph.replace(line, "\n".join([line, *more]))
    return with_schedule(entry, graph)


def long(entry: Entry) -> Entry:
    """A dot over an axis that the program does not have, of 1e13 elements."""
    return with_schedule(
        entry,
        entry.graph.replace("extents ", f"extents big={10**13} ").replace(
            "  output",
            "  library w0: f32[big] = iota{axis=big}\n  library w1: f32[] = sum{axes=(big)} w0[big]\n  output",
        ),
    )


@pytest.mark.parametrize("spoil", [dead, many, long])
def test_work_in_vain_is_refused(spoil, stored, caplog) -> None:
    stored.path.write_bytes(encode(stored.key, spoil(stored.entry)))
    d, _ = read(stored)
    assert d.winner is None and "not usable" in d.why and len(warnings(caplog)) == 1


def test_a_name_that_clears_the_screen_is_not_shown(stored, caplog) -> None:
    graph = stored.entry.graph.replace("m0", "m\x1b[2J0".replace("[", "").replace("\x1b", "\x9b"))
    stored.path.write_bytes(encode(stored.key, replace(stored.entry, graph=graph)))
    d, _ = read(stored)
    assert d.winner is None and d.why.isprintable() and all(map(str.isprintable, warnings(caplog)))


def test_rules_for_stored_graphs_are_asked(stored, monkeypatch) -> None:
    """Also of what the user made: their code may be newer than the entry."""

    refusing = SimpleNamespace(check=lambda winner: Verdict(False, "types"))
    monkeypatch.setattr(stored_decisions, "GATES_FOR_STORED", (lambda reference: refusing,))
    assert "types" in read(stored)[0].why


@pytest.mark.parametrize("runs", [False, True])
def test_kernels_of_somebody_else_run_in_a_child_first(runs, monkeypatch) -> None:
    """Nothing of ours is run before that; one that does not come back is refused."""
    steps = []

    class Recorded(attempts.TuningSession):
        def screen(self, winners):
            steps.append("child" if self.trials == "children" else "here")
            return dict.fromkeys(range(len(winners)), 1.0) if runs else {}

        def exact_gate(self):
            check = lambda winner: steps.append("exact") or Verdict(True, "agree")  # noqa: E731
            return SimpleNamespace(name="exact check", check=check)

        def gate(self, winner, only=()):
            steps.append("gate")
            return True, ""

    class WithChildren(Compiler):
        def session(self, region, platform, devices, until=math.inf):
            return Recorded(region, platform, devices[0], self.options)

        def trials(self, session):
            return nullcontext("children")

    subject = SimpleNamespace(region=None, platform="cuda", device=jax.devices()[0])
    compiler, winner = WithChildren(Options()), SimpleNamespace(has_kernels=True)
    if runs:
        assert compiler._check_foreign(subject, winner, jax.devices()[:1]) == "agree"
        assert steps == ["child", "exact", "gate"]
    else:
        with pytest.raises(VerificationError, match="does not run"):
            compiler._check_foreign(subject, winner, jax.devices()[:1])
        assert steps == ["child"]


def test_a_cache_of_another_user_that_cannot_be_written(stored, monkeypatch, caplog) -> None:
    """As in a container: no home, no key, a cache of root's. It is used, checked, with one line of log."""
    monkeypatch.setattr(caches.os, "geteuid", lambda: 4321)
    monkeypatch.setattr(seals.platformdirs, "user_state_dir", lambda *_: "~/.local/state/mirage_jax")
    seals._kept.cache_clear()
    before = sorted(stored.cache.directory.rglob("*"))
    d, f = read(stored)
    assert d.winner is not None and "elsewhere" in d.gate
    assert_same(f(*ARGS), chain(*ARGS))
    assert read(stored)[0].winner is not None
    (line,) = warnings(caplog)
    assert "checked again in every process" in line
    assert sorted(stored.cache.directory.rglob("*")) == before
    seals._kept.cache_clear()


def test_a_decision_for_xla_of_somebody_else_says_so(stored) -> None:
    entry = Entry("xla", reasons=("XLA is as fast\x1b[2J", "", "", ""), created=stored.entry.created)
    stored.path.write_bytes(encode(stored.key, entry))
    d, _ = read(stored)
    assert d.why == "XLA is as fast\\x1b[2J (decided elsewhere)" and d.source == "cache"


def test_the_key_names_the_schema() -> None:
    assert CacheKey("", (), "", "", "").schema == caches.SCHEMA and N > 1
