"""Retention policies are restored as recorded, and logs are trimmed by size like a naive count."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from indilog.base.log import Record
from indilog.base.retention import AGE_S_MIN, Retention
from indilog.sdk.retention_log import PolicyLog
from indilog.testing import MemoryLogs
from indilog_compute.retention import SizeMarks

names = st.text(st.characters(exclude_characters="\x1f$", codec="utf-8"), min_size=1, max_size=30)
ages = st.none() | st.floats(AGE_S_MIN, 1e12)
sizes = st.none() | st.integers(1, 2**63 - 1)


@given(st.lists(st.tuples(names, ages, sizes), max_size=8))
def test_the_newest_policy_of_each_log_is_restored(
    policies: list[tuple[str, float | None, int | None]],
) -> None:
    async def check() -> None:
        logs = MemoryLogs()
        followed = PolicyLog(logs, logs_max=100)
        for name, age_s, size_bytes in policies:
            await logs.log(name).set_retention(age_s=age_s, size_bytes=size_bytes)
            await followed.catch_up()
        newest = {name: Retention(age_s, size_bytes) for name, age_s, size_bytes in policies}
        for name, retention in newest.items():
            assert await logs.log(name).retention() == retention
        assert followed.newest == {n: r for n, r in newest.items() if r != Retention()}

    asyncio.run(check())


@given(
    st.lists(st.lists(st.integers(0, 3_000), min_size=1, max_size=20), min_size=1, max_size=20),
    st.integers(1, 20_000),
)
def test_the_kept_records_fill_the_size_limit_up_to_a_mark_and_a_record(
    pages: list[list[int]], size_bytes: int
) -> None:
    marks = SizeMarks(size_bytes)
    step = max(1, size_bytes // 1000)
    lengths: list[int] = []
    for page in pages:
        start = len(lengths)
        lengths += page
        found = [Record(start + n, b"log", b"x" * size, 0.0, 0.0) for n, size in enumerate(page)]
        assert marks.take(found) == sum(page) + 3 * len(page)
        kept = lengths[marks.until :]
        assert kept, "the last record stays"
        kept_bytes = sum(kept) + 3 * len(kept)
        if marks.until > 0:
            further = kept_bytes + lengths[marks.until - 1] + 3
            assert further + step > size_bytes
        if (
            kept_bytes > size_bytes
        ):  # the last record is too large, with the records before its mark
            assert kept_bytes - (kept[-1] + 3) < step
