"""Mails: a queue on the log, and one sender over all worker processes, which keeps to a rate.

The queue delivers each mail at least once. The mail service sends one mail for each key. The
workflow in `app` calls `push_mail`, and each worker runs `send_mails` as a service.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Final

from bokiflow import Lock, LockLostError
from bokiqueue import Queue
from bokistore import Store
from indilog import Context

from .sales import CANCELLED, PAID, REJECTED, WAITING, Sale, settings_of, store_of
from .services import ServiceError, send_mail

QUEUE_LOG: Final = "orders/mail"
LOCK_LOG: Final = "orders/locks"
TRIES: Final = 10
"""Deliveries of a mail before it is given up. The pauses between them add up to four minutes."""
_SENDERS: Final = 4
"""Mails that are sent concurrently, because popping a mail takes longer than sending it."""
_WAIT_S: Final = 60.0
_LEASE_S: Final = 5.0
_SUBJECTS: Final = {
    WAITING: "Please approve order {order}",
    PAID: "Order {order} is paid and on its way",
    REJECTED: "Order {order} was rejected: {why}",
    CANCELLED: "Order {order} was cancelled",
}
CLERK: Final = "clerk"
"""The person who approves large orders."""


class Pace:
    """Spreads events evenly: at most `rate` in a second, after the first event."""

    def __init__(self) -> None:
        self._next = 0.0

    def pause_s(self, now: float, rate: float) -> float:
        """Reserve the next free instant; return the seconds until then.

        Args:
            now: seconds of a monotonic clock.
            rate: events per second (more than 0).
        """
        at = max(now, self._next)
        self._next = at + 1 / rate
        return at - now


def queue_of(ctx: Context) -> Queue:
    """Return the queue of mails."""
    return Queue(ctx.log(QUEUE_LOG), "mail", tries=TRIES)


async def push_mail(ctx: Context, sale: Sale, status: str) -> None:
    """If there is a mail about this status, put the mail into the queue. A repeated call may put it
    there twice.
    """
    if status not in _SUBJECTS:
        return
    mail = {
        "order": sale.id,
        "status": status,
        "to": CLERK if status == WAITING else sale.customer,
        "subject": _SUBJECTS[status].format(order=sale.id, why=sale.why),
    }
    await queue_of(ctx).push(json.dumps(mail).encode(), shard_key=sale.id)


async def send_mails(ctx: Context) -> None:
    """Send mails until cancelled. Each worker runs this service, and the holder of the lock sends.

    If the holder's process crashes, another process acquires the lock when the lease has expired. A
    process that was paused may send mails beside the next holder, so for a moment the rate may be
    exceeded.
    """
    while True:
        try:
            async with Lock(ctx.log(LOCK_LOG), "mails", lease=_LEASE_S):
                pace = Pace()
                async with asyncio.TaskGroup() as senders:
                    for _ in range(_SENDERS):
                        senders.create_task(_send(ctx, pace))
        except LockLostError:
            ctx.logger.warning("another process sends the mails now")


async def _send(ctx: Context, pace: Pace) -> None:
    queue, store = queue_of(ctx), store_of(ctx)
    while True:
        try:
            async with queue.pop(wait=_WAIT_S) as message:
                if message is not None:
                    await _send_in_turn(store, pace, message.data)
        except ServiceError as error:
            ctx.logger.warning("a mail was not sent, it is sent again later", error=str(error))


async def _send_in_turn(store: Store, pace: Pace, mail: bytes) -> None:
    settings = await settings_of(store)
    await asyncio.sleep(pace.pause_s(time.monotonic(), settings.mails_per_s))
    await send_mail(store, json.loads(mail))
