"""Small campaigns against stored decisions; `python -m mirage_jax stress` runs large ones."""

import json
import random

from mirage_jax import seals
from mirage_jax.audit import cache_entries, campaigns, crowds, faults, interrupts
from mirage_jax.audit.stress import CASES, Stress, Tally
from mirage_jax.cli import OK, USAGE, main
from mirage_jax.compiler import stored


def assert_fine(result: Stress) -> None:
    assert result.passed, result.details()


def test_changed_entries() -> None:
    result = cache_entries.campaign(160, 1)
    assert_fine(result)
    rows = {row.what: row for row in result.table_rows}
    assert set(rows) == set(cache_entries.MUTATIONS)
    assert rows["as it was, sealed by somebody else"].used == rows["as it was, sealed by somebody else"].cases
    assert rows["bytes damaged"].used == 0


def test_changed_entries_that_nobody_checks_are_wrong(monkeypatch) -> None:
    """The campaign can fail."""
    monkeypatch.setattr(cache_entries.Remembering, "_check_foreign", lambda *_: "not checked")
    monkeypatch.setattr(stored, "_check_size", lambda *_: None)
    monkeypatch.setattr(stored, "GATES_FOR_STORED", ())
    result = cache_entries.campaign(120, 1)
    assert any(row.wrong for row in result.table_rows) and not result.passed


def test_an_edited_entry_does_not_say_that_it_passed_here(monkeypatch) -> None:
    """Whatever seal a file has, one that was changed and passes for this user's own is found."""
    monkeypatch.setattr(seals.SealKey, "verify", lambda *_: seals.Seal.MADE)
    result = cache_entries.campaign(40, 2)
    assert "it says that it passed here" in str(result.details())


def test_faults_of_file_systems() -> None:
    assert_fine(result := faults.campaign(len(faults.FAULTS) + len(faults.CALLS) + 2, 0))
    assert len(result.table_rows) >= 20


def test_processes_that_share_a_cache() -> None:
    result = crowds.processes(10, 0, workers=6)
    assert_fine(result)
    assert result.table_rows[0].cases == 60 and result.table_rows[0].used > 20


def test_a_torn_entry_would_be_seen() -> None:
    entry = crowds.entry_of("7 " * 100)
    assert crowds.is_whole(entry) and not crowds.is_whole(crowds.entry_of("7 7 8"))


def test_threads_that_share_functions() -> None:
    assert_fine(crowds.threads(3, 0))


def test_interrupts() -> None:
    assert_fine(interrupts.interrupts(4, 0))


def test_kills() -> None:
    assert_fine(interrupts.kills(3, 0))


def test_what_fails_a_campaign() -> None:
    fine = Stress("entries", 0, [Tally("a", 3, 3, 0, 0, 1)])
    assert fine.passed
    for bad in (
        Tally("b", 1, 0, 1),
        Tally("b", 1, 0, 0, 1),
        Tally("b", 1, 0, 0, 0, 2),
        Tally("b", 1, slowest=2.0, limit=1.0),
    ):
        assert not Stress("entries", 0, [*fine.table_rows, bad]).passed


def test_the_command(tmp_path, capsys) -> None:
    assert main(["stress", "--count", "0"]) == USAGE
    assert main(["stress", "--kind", "threads", "--count", "1", "-q", "--json", str(tmp_path / "t.json")]) == OK
    assert json.loads((tmp_path / "t.json").read_text())["kind"] == "threads"
    assert "0 crashes, 0 wrong" in (tmp_path / "t.md").read_text() and "0 crashes" in capsys.readouterr().out
    assert set(campaigns.RUNS) == {"entries", "faults", "processes", "threads", "interrupts", "kills"}


def test_cases_are_right_to_begin_with(tmp_path) -> None:
    """A limit that a right result passes and a wrong one does not."""
    rng = random.Random(0)
    for case in CASES:
        key, entry = case.store(tmp_path)
        assert entry.decision == "win" and key.backend == "jax"
        exact = case.exact.copy()
        assert not case.problem(exact)
        exact.flat[rng.randrange(exact.size)] += 100 * case.xla_error
        assert case.problem(exact)
