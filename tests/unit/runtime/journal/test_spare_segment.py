"""The segment that is prepared ahead."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from indilog.runtime.journal import spare_segment
from indilog.runtime.journal.spare_segment import SpareSegment


def test_starved_tells_of_the_last_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = SpareSegment(tmp_path, 4096)
    is_full = False

    def prepared(*_: object) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(spare_segment, "prepare_segment", prepared)
    for is_full in (False, True, True, False, True):
        spare.prepare(1)
        spare.pool.submit(int).result()
        assert [spare.starved, spare.starved] == [is_full] * 2
    spare.pool.shutdown()
