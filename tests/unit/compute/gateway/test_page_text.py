"""When a page of records says that there may be more."""

from __future__ import annotations

import pytest

from indilog.base.ids import tag_columns
from indilog.base.log import Record
from indilog.link.byte_budget import ByteBudget
from indilog_compute.gateway.page_text import PageText, RecordLimits

NAMES = tag_columns("l", ("t" * 40,)).names
LIMITS = RecordLimits(page_bytes_max=1500, record_bytes_max=900, batch_records_max=10)


@pytest.mark.parametrize(
    ("data_bytes", "aux_bytes", "may_have_more"),
    [
        (600 - len(NAMES), 0, False),
        (601 - len(NAMES), 0, True),
        (501 - len(NAMES), 100, True),
    ],
)
def test_data_names_and_aux_data_count_towards_the_page_that_the_log_returned(
    data_bytes: int, aux_bytes: int, may_have_more: bool
) -> None:
    """The log ends its page where one more record could be too large, even if none is."""
    page = PageText(ByteBudget(10**6).share(), 100, LIMITS)
    record = Record(7, NAMES, b"x" * data_bytes, 0.0, 0.0, b"x" * aux_bytes or None)
    page.add_range([record])
    assert page.may_have_more == may_have_more
