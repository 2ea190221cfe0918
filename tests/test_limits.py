"""What is read is within bounds, whatever was written."""

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirage_jax import limits
from mirage_jax.cache import Entry
from mirage_jax.errors import CacheError, GraphError, in_one_line, printable
from mirage_jax.mugraph.graph import KernelSchedule, Precision, Schedule
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json
from mirage_jax.report import Decision, RegionReport

WIN = Entry("win", graph="mugraph", schedule={}, timings={"xla": 2e-5}, measured=((1.0, 2.0),), reasons=("a", "b"))
SCHEDULE = Schedule((KernelSchedule((("i", 64), ("k", 1)), 8, 3, 1, True, 132),), (("k", 8),), True)

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
    | st.sampled_from([10**400, -(10**400), 1e308, 2**63, 33, 3, 0, -1, "\x1b[2J"])
)  # fmt: skip
values = st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3))


@given(st.sampled_from(list(asdict(WIN))), values)
def test_whatever_an_entry_says_it_is_refused_or_within_bounds(name, value) -> None:
    stored = json.loads(json.dumps(asdict(WIN)))
    try:
        entry = Entry.from_json(stored | {name: value})
    except CacheError as why:
        assert str(why) == printable(str(why))
        return
    times = [*entry.timings.values(), *(t for pair in entry.measured for t in pair), entry.created]
    assert all(isinstance(t, float) and math.isfinite(t) and t >= 0 for t in times)
    shown = str(RegionReport((), "", Decision(None, " ".join(entry.reasons), "cache", "cpu", timings=entry.timings)))
    assert all(line == printable(line) for line in shown.split("\n"))  # spaces of any kind do no harm


@given(st.data())
def test_whatever_a_schedule_says_it_is_refused_or_within_bounds(data) -> None:
    stored = schedule_to_json(SCHEDULE)
    if data.draw(st.booleans()):
        stored |= {data.draw(st.sampled_from(list(stored))): data.draw(values)}
    else:
        kernel = stored["kernels"][0]
        name = data.draw(st.sampled_from(list(kernel)))
        kernel[name] = [["i", data.draw(scalars)]] if name == "tiles" else data.draw(values)
    try:
        found = schedule_from_json(stored)
    except GraphError as why:
        assert str(why).isprintable() and len(str(why)) < 300
        return
    for k in found.kernels:
        assert k.num_warps in (1, 2, 4, 8, 16, 32) and 1 <= k.num_stages <= 8 and k.precise in Precision
        assert all(1 <= t <= limits.MAX_TILE and t & (t - 1) == 0 for _, t in k.tiles)
        assert 0 <= k.programs <= limits.MAX_PROGRAMS
    assert all(1 <= n <= limits.MAX_PARTS for _, n in found.parts) and len(found.kernels) <= limits.MAX_KERNELS


@pytest.mark.parametrize("warps", [0, 3, 64, 4.0, True, "4"])
def test_warps(warps) -> None:
    with pytest.raises(GraphError, match="num_warps"):
        schedule_from_json({"kernels": [schedule_to_json(SCHEDULE)["kernels"][0] | {"num_warps": warps}], "parts": []})


@given(st.text())
def test_what_is_shown_can_be_seen(text) -> None:
    assert all(c.isprintable() or c.isspace() for c in printable(text))
    assert "\x1b" not in in_one_line(ValueError(text)) and "\n" not in in_one_line(ValueError(text))


def test_escapes_of_terminals_and_directions() -> None:
    assert printable("a\x1b[31m\u202eb\r\n\x9b") == "a\\x1b[31m\\u202eb\\r\\n\\x9b"
    assert printable("π ≤ 1e-12, 日本") == "π ≤ 1e-12, 日本"


@given(values)
def test_brief_is_one_short_line(value) -> None:
    assert len(limits.brief(value)) < 200 and limits.brief(value).isprintable()
