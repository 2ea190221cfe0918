"""Why XLA keeps a region: numbers and sentences, the same from the cache as when they were found."""

import json
import shlex
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from deciding import chain, measured, operands

import mirage_jax
from mirage_jax.cache import Entry
from mirage_jax.cli import build_parser
from mirage_jax.compiler.tuning_session import SPACE, TuningSession
from mirage_jax.config import Options
from mirage_jax.errors import CacheError
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.mugraph.parser import parse
from mirage_jax.report import Decision, RegionReport, preview_command
from mirage_jax.search.driver import search
from mirage_jax.summary import summarize
from mirage_jax.why_not import ADVICE, Elsewhere, Reason, WhyNot

FULL = WhyNot(
    Reason.SLOWER_BY_MODEL,
    "H200",
    14,
    xla=38e-6,
    best=91e-6,
    asked=66.5e-6,
    limit=22e-6,
    detail="a text",
    elsewhere=Elsewhere("H200", 3e-6, 2e-6),
)


def scores(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def explained(f, *shapes, **options):
    return mirage_jax.optimize(f, **options).explain(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def test_a_region_that_stays_on_a_cpu_says_why() -> None:
    report = explained(scores, (64, 16), (64, 16), (64, 16))
    (region,) = report.regions
    why = region.decision.why_not
    assert why.reason is Reason.NO_CHEAPER_ALGEBRA and not why.tries_kernels and not why.is_measured
    assert why.candidates == region.decision.tried["found"] > 0
    assert 0 < why.limit <= why.xla and why.asked < why.xla and why.best >= why.asked
    assert why.elsewhere.device == "H200" and 0 < why.elsewhere.limit < why.elsewhere.xla < why.xla
    for text in (str(report), summarize(report)):
        assert "kept XLA's code: only other algebra is tried on this CPU; " in text
        assert "  what to do: harmless: " in text and "  elsewhere: on an H200, XLA's code is estimated at " in text
    page = (Path(__file__).parent.parent / "docs" / "debugging.md").read_text()
    assert "\n".join(str(report).splitlines()[3:6]) in page, "docs/debugging.md shows other lines"
    assert json.loads(report.to_json())["regions"][0]["why_not"]["reason"] == "no cheaper algebra"


def test_the_command_that_shows_kernels() -> None:
    """It names functions that can be imported, and stands only where a region might gain."""
    where = f"{scores.__module__}:scores"
    command = f'python -m mirage_jax preview {where} "f32[64,16] f32[64,16] f32[64,16]"'
    report = explained(scores, (64, 16), (64, 16), (64, 16))
    assert report.preview == command
    for text in (str(report), summarize(report)):
        assert f"kernels that a GPU would try: {command}" in text.splitlines()
    _, _, _, *words = shlex.split(command)
    assert build_parser().parse_args(words).function == where
    without = explained(chain, *(x.shape for x in operands()), on_miss="fallback")
    assert "would try" not in str(without)


def test_a_function_without_a_name_gets_the_form_of_the_command() -> None:
    form = 'python -m mirage_jax preview module:function "f32[..] .."'
    assert preview_command(lambda x: x, [2.0], {}) == form
    assert preview_command(lambda x: x, [], {"x": jnp.ones(3)}) == form


@pytest.mark.parametrize("ratio", [None, 1.01])
def test_the_cache_keeps_the_text(ratio) -> None:
    """One that the model refuses, and one that was measured."""
    shapes = [x.shape for x in operands()]

    def lines():
        report = explained(scores, *[(64, 16)] * 3) if ratio is None else explained(chain, *shapes)
        (region,) = report.regions
        d = region.decision
        return d.source, [d.why, *d.consequences], d.why_not

    with measured(ratio or 1.0):
        found, stored = lines(), lines()
    assert (found[0], stored[0]) == ("search", "cache")
    assert stored[1:] == found[1:] and len(stored[1]) == 3


def test_measured_times_are_told() -> None:
    with measured(1.02):
        (region,) = explained(chain, *(x.shape for x in operands())).regions
    why = region.decision.why_not
    assert (why.reason, why.is_measured, why.xla, why.best) == (Reason.AS_FAST, True, 1.02, 1.0)
    assert "takes 1,000,000 us, XLA takes 1,020,000 us" in str(why) and "must reach 1.03x" in str(why)


def test_undecided_regions_say_what_to_do() -> None:
    (region,) = explained(chain, *(x.shape for x in operands()), on_miss="fallback").regions
    assert region.decision.why_not.reason is Reason.UNDECIDED
    assert "what to do: matters if this is hot: run `mirage_jax.tune`" in str(region)


def test_kernels_that_are_slower_by_the_model(monkeypatch) -> None:
    monkeypatch.setattr(TuningSession, "description", DEVICES["H200"])
    session = TuningSession(None, "cuda", None, Options())
    session.reference = parse(PRODUCT)
    session.tried = Counter(found=3)
    found, _ = search(session.reference, session.description, SPACE, 20.0, 100_000, ("kernels",))
    session.slowest = 1e-9
    why = session.not_promising(found)
    assert why.reason is Reason.SLOWER_BY_MODEL and why.tries_kernels and why.elsewhere is None
    assert why.best == min(c.seconds for c in found) > why.asked == 1e-9
    assert session.not_promising([]).reason is Reason.NOTHING_FOUND


PRODUCT = """
mugraph {
  extents i=64 j=64 k=64
  input A: f16[i,k]
  input B: f16[k,j]
  library C: f16[i,j] = dot{axes=(k)} A[i,k] B[k,j]
  library Y: f16[i] = sum{axes=(j)} C[i,j]
  output Y
}
"""


def test_sentences() -> None:
    assert str(FULL) == (
        "the best of 14 candidates is estimated at 91 us, XLA is estimated at 38 us (limit 22 us);"
        " candidates up to 66 us are measured"
    )
    assert FULL.advice.endswith("1.7x of the limit: smaller intermediates or 16-bit types bring it closer")
    assert str(FULL.elsewhere) == (
        "on an H200, XLA's code is estimated at 3 us, and the limit is 2 us: kernels may gain up to 1.5x"
    )
    assert "at its limit too" in str(Elsewhere("H200", 2e-6, 2e-6))


def test_a_limit_that_times_contradict_is_not_told() -> None:
    assert "limit" not in str(WhyNot(Reason.NOTHING_FOUND, xla=2e-6, is_measured=True, limit=3e-6))


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_sentence_and_advice(reason) -> None:
    full, bare = (WhyNot(reason, xla=xla, best=xla, asked=xla, detail="why") for xla in (1e-6, None))
    for why in (full, bare):
        assert str(why).isprintable() and len(str(why)) > 2 and why.advice.startswith(ADVICE[reason])
        assert WhyNot.from_json(json.loads(json.dumps(why.to_json()))) == why


def test_stored_records() -> None:
    stored = json.loads(json.dumps(FULL.to_json()))
    assert WhyNot.from_json(stored) == FULL
    assert WhyNot.from_json(stored | {"version": 2, "more": 1}) is None and WhyNot.from_json(None) is None
    hidden = WhyNot.from_json(stored | {"detail": "\x1b[2J"})
    assert str(RegionReport((), "", Decision(None, hidden.detail, "cache", "cpu", why_not=hidden))).isascii()


@pytest.mark.parametrize(
    "change",
    [
        {"reason": "because"},
        {"reason": ["x"]},
        {"xla": -1.0},
        {"candidates": 1.5},
        {"is_measured": 1},
        {"elsewhere": ["H200", 1.0]},
        {"elsewhere": ["H200", 1.0, 1e99]},
        {"more": 1},
    ],
)
def test_damaged_records_are_refused(change) -> None:
    with pytest.raises(CacheError):
        WhyNot.from_json(FULL.to_json() | change)


def test_entries_from_before_there_were_records() -> None:
    """They load, and they are written as before, so that their seals stay valid."""
    old = Entry("xla", reasons=("nothing was faster", "", "", ""))
    assert "why_not" not in old.to_json()
    assert Entry.from_json(json.loads(json.dumps(old.to_json()))) == old
    new = Entry("xla", reasons=old.reasons, why_not=FULL)
    assert Entry.from_json(json.loads(json.dumps(new.to_json()))) == new
