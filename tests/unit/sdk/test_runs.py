"""The list of runs of several applications: pages are merged, and a cursor continues them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.sdk.runs import RunInfo, RunPage, RunPlace, cursor_of, merged, place_of, with_app

PLACES = st.builds(
    RunPlace,
    time=st.sampled_from([1.0, 2.0, 3.5]),
    app=st.sampled_from(["a", "b"]),
    log=st.sampled_from(["x", "y"]),
    seqnum=st.integers(0, 50),
)


def run_at(place: RunPlace, *, by_end: bool = False) -> RunInfo:
    """Return a run that began, or ended, at a place."""
    run = RunInfo(id="r", workflow="w", state="done", began=0.0, app=place.app, log=place.log)
    if by_end:
        return msgspec.structs.replace(run, ended=place.time, end=place.seqnum)
    return msgspec.structs.replace(run, began=place.time, seqnum=place.seqnum)


def page_of(
    runs: list[RunPlace], after: RunPlace | None, limit: int, looked_at: int, *, by_end: bool
) -> RunPage:
    """Return a page as an application gives it: it looks at few runs only, and keeps to `limit`."""
    left = sorted((r for r in runs if after is None or r.key > after.key), key=lambda r: r.key)
    seen = left[: min(limit, looked_at)]
    found = tuple(run_at(place, by_end=by_end) for place in seen)
    return RunPage(found, seen[-1] if len(seen) < len(left) else None, by_end)


@given(
    st.lists(PLACES, unique_by=lambda place: (place.app, place.log, place.seqnum), max_size=40),
    st.integers(1, 7),
    st.integers(1, 9),
    st.booleans(),
)
def test_pages_of_several_applications_have_each_run_once_and_in_order(
    places: list[RunPlace], limit: int, looked_at: int, by_end: bool
) -> None:
    listed: list[RunPlace] = []
    after: RunPlace | None = None
    for _ in range(len(places) + 1):
        pages = [
            page_of(
                [p for p in places if (p.app, p.log) == source],
                after,
                limit,
                looked_at,
                by_end=by_end,
            )
            for source in sorted({(p.app, p.log) for p in places})
        ]
        page = merged(pages, limit)
        assert len(page.runs) <= limit
        listed += [run.place(by_end=by_end) for run in page]
        if page.next is None:
            break
        after = place_of(cursor_of(page.next))
    assert listed == sorted(places, key=lambda p: (-p.time, p.app, p.log, -p.seqnum))


@given(st.builds(RunPlace, st.floats(allow_nan=False, allow_infinity=False), st.text(), st.text()))
def test_a_cursor_is_the_place_again(place: RunPlace) -> None:
    assert place_of(cursor_of(place)) == place


@pytest.mark.parametrize("cursor", ["", "x", "é", "W10", "bnVsbA", "{}", "!!!!", "A" * 100_000])
def test_another_text_is_no_cursor(cursor: str) -> None:
    with pytest.raises(ValueError, match="is the text `next` of an earlier answer"):
        place_of(cursor)


def test_an_application_is_named_in_its_runs_and_in_its_next_place() -> None:
    page = with_app(RunPage((run_at(RunPlace(1.0)),), RunPlace(1.0)), "shop")
    assert (page.runs[0].app, page.next) == ("shop", RunPlace(1.0, "shop"))
