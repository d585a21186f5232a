"""Tables of commands."""

from __future__ import annotations

import pytest

from indilog.cli import show

COLUMNS = (
    "log",
    "workflow",
    "failure_rate",
    "failed_steps",
    "cancelled",
    "retries",
    "p95_s",
    "max_s",
)
TEXT = "travel/flow of a long name"
ROW = (TEXT, "reserving", 0.25, 12_345, 2, 3, 0.222, 0.234)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_numbers_and_names_of_columns_are_never_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    monkeypatch.setenv("NO_COLOR", "1")
    show.table("A title that is longer than the table is wide", COLUMNS[:1], [(1,)])
    show.table("Runs", COLUMNS, [ROW])
    text = capsys.readouterr().out.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert text.startswith("A title that is longer than the table is wide\n")
    head, *rows = text.partition("Runs\n")[2].splitlines()
    assert head.split() == [*COLUMNS]
    assert rows[0].split()[-6:] == ["0.250", "12,345", "2", "3", "0.222", "0.234"]
    assert len(rows) == (2 if is_terminal else 1)
    assert (TEXT in rows[0]) is not is_terminal
