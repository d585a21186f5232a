"""The log `orders/events`: each status of each order once, for browsers and for the report.

The workflow in `app` publishes events; `shop` relays them to browsers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from indilog import After, ConditionFailedError, Context, Entry, TrimmedError

from .sales import ENDED, Sale

EVENTS_LOG: Final = "orders/events"
_ENDED_TAG: Final = "ended"
_PAGE: Final = 1000


async def publish(ctx: Context, sale: Sale, status: str) -> None:
    """Append the event that an order has a status, unless the log has the event already.

    The append has a condition, so a repetition is harmless: no other record has the event's tag.
    After `collect` has trimmed the log, the condition considers only the remaining records.
    """
    event = {
        "order": sale.id,
        "customer": sale.customer,
        "status": status,
        "why": sale.why,
        "total": sale.total,
    }
    once = f"event:{sale.id}.{status}"
    tags = [f"order:{sale.id}", once, *([_ENDED_TAG] if status in ENDED else [])]
    entries = [Entry(json.dumps(event).encode(), tags)]
    log = ctx.log(EVENTS_LOG)
    with suppress(ConditionFailedError):
        try:
            await log.append_batch(entries, after=After(once, None))
        except TrimmedError as trimmed:
            await log.append_batch(entries, after=After(once, trimmed.first_seqnum - 1))


async def ended_between(
    ctx: Context, start: float | None, end: float
) -> AsyncIterator[dict[str, Any]]:
    """Yield the ends of orders that the log ordered in [start, end), in seconds since 1970.

    The log assigns the times, so a later call with the same past range yields the same events.

    Args:
        ctx: the context of the function.
        start: the beginning of the range; None: the first event that is kept.
        end: the end of the range, exclusive.
    """
    log = ctx.log(EVENTS_LOG)
    bound = 0 if start is None else await log.find_time(start)
    until = await log.find_time(end)
    while bound < until:
        try:
            page = await log.read_range(_ENDED_TAG, bound=bound, limit=_PAGE)
        except TrimmedError as trimmed:
            bound = trimmed.first_seqnum
            continue
        for record in page:
            if record.seqnum < until:
                yield json.loads(record.data)
        bound = page[-1].seqnum + 1 if page else until


async def summary_between(ctx: Context, start: float, end: float) -> dict[str, int]:
    """Return how many orders ended in each status in [start, end), and the `revenue` in cents."""
    counts: Counter[str] = Counter(dict.fromkeys(ENDED, 0))
    revenue = 0
    async for event in ended_between(ctx, start, end):
        counts[event["status"]] += 1
        revenue += event["total"] if event["status"] == "paid" else 0
    return {**counts, "revenue": revenue}
