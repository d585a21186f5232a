"""The objects in the log `orders` (orders, stock and settings), and the transactions over them.

Each transaction may run again after a crash, or late in a paused process. So each transaction first
reads the order's status, which shows whether there is anything left to do. The functions and the
workflow in `app` call this module.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Final

from bokistore import Store, Transaction
from indilog import Context

LOG: Final = "orders"
ACCEPTED: Final = "accepted"
WAITING: Final = "waiting"
CHARGED: Final = "charged"
UNDOING: Final = "undoing"
PAID: Final = "paid"
REJECTED: Final = "rejected"
CANCELLED: Final = "cancelled"
ENDED: Final = frozenset({PAID, REJECTED, CANCELLED})
"""Every order ends in one of these statuses, and keeps it."""
LINES_MAX: Final = 20
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""An id is part of the keys that go to other services in a header, so it is plain ASCII."""
_NAME_LENGTH_MAX: Final = 128
_ASKED: Final = "cancelled by the customer"


@dataclass(frozen=True)
class Order:
    """An order, as placed by a customer.

    Attributes:
        lines: number of pieces of each item.
        card: token of the customer's card, from the payment service.
    """

    id: str
    customer: str
    lines: dict[str, int]
    card: str
    city: str


@dataclass(frozen=True)
class Sale:
    """An order and its state, as stored under `order:{id}`. The card is left out, so no function
    can show it.

    Attributes:
        total: price of all pieces, in cents.
        status: `accepted`, `waiting`, `charged`, `undoing`, or one of `ENDED`; `placed`: the run
            has not stored the order yet.
        why: why the order was rejected or cancelled.
        ends: the status in which an order that is being undone ends; empty: `cancelled`.
        holds: whether the pieces are taken from the stock.
        approval_s: seconds in which a person must approve the order; 0: no approval is needed.
    """

    id: str
    customer: str
    lines: dict[str, int]
    city: str
    total: int = 0
    status: str = "placed"
    why: str = ""
    ends: str = ""
    holds: bool = False
    approval_s: float = 0.0


@dataclass(frozen=True)
class Goods:
    """An item of the stock; the price in cents."""

    price: int
    pieces: int


@dataclass(frozen=True)
class Settings:
    """The settings of the shop.

    Attributes:
        services: base URL of the services for payments, parcels and mails.
        approval_above: orders with a larger total, in cents, need an approval.
        approval_s: seconds within which the approval must come (0 to a week).
        mails_per_s: largest number of mails sent in a second, over all processes.
        keep_days: days for which ended orders are kept; None: forever, so that the demo's check can
            replay the whole log.
    """

    services: str = ""
    approval_above: int = 50_000
    approval_s: float = 86_400.0
    mails_per_s: float = 50.0
    keep_days: int | None = None


_DEFAULTS: Final = Settings()


def sale_of(order: Order) -> Sale:
    """Return the first state of an order."""
    return Sale(order.id, order.customer, order.lines, order.city)


def store_of(ctx: Context) -> Store:
    """Return the store of the log `orders`."""
    return Store(ctx.log(LOG))


async def settings_of(store: Store) -> Settings:
    """Return the settings; before the first `load`, the defaults."""
    return await store.get("settings", Settings) or _DEFAULTS


def check_order(order: Order) -> None:
    """Raise for an order that cannot be placed.

    Raises:
        ValueError: the sentence names the field and its limit.
    """
    if not _ID.fullmatch(order.id):
        raise ValueError(
            "An order's id must be 1 to 64 letters, digits, dots, hyphens and underscores, not "
            f"{order.id!r:.80}."
        )
    for what, text in (("customer", order.customer), ("card", order.card), ("city", order.city)):
        check_name(what, text)
    if not 1 <= len(order.lines) <= LINES_MAX:
        raise ValueError(f"An order has 1 to {LINES_MAX} lines, not {len(order.lines)}.")
    for item, pieces in order.lines.items():
        check_name("item", item)
        if pieces < 1:
            raise ValueError(f"An order has at least one piece of an item, not {pieces} {item!r}.")


def check_name(what: str, text: str) -> None:
    """Raise for a name that is empty, too long or not printable.

    Raises:
        ValueError: the sentence says what is allowed.
    """
    if not text or len(text) > _NAME_LENGTH_MAX or not text.isprintable():
        raise ValueError(f"A {what} must be 1 to {_NAME_LENGTH_MAX} characters, not {text!r:.80}.")


# --- transactions


async def accept(txn: Transaction, order: Order) -> Sale:
    """Store the order, and take all its pieces from the stock. If some pieces are missing, take
    none and reject the order.

    A known order is returned unchanged: an earlier run with this id, which is no longer kept, has
    sold it.
    """
    known = await txn.get(f"order:{order.id}")
    if known:
        return Sale(**known.value)
    settings = Settings(**(await txn.get("settings")).value)
    goods = {item: await txn.get(f"stock:{item}") for item in order.lines}
    missing = [item for item, n in order.lines.items() if goods[item].get("left", 0) < n]
    total = sum(goods[item].get("price", 0) * n for item, n in order.lines.items())
    sale = replace(
        sale_of(order),
        total=total,
        status=REJECTED if missing else ACCEPTED,
        why=f"out of stock: {', '.join(missing)}" if missing else "",
        holds=not missing,
        approval_s=settings.approval_s if total > settings.approval_above else 0.0,
    )
    if sale.holds:
        for item, pieces in order.lines.items():
            goods[item].increment("left", -pieces)
    txn.put(f"order:{order.id}", asdict(sale), tags=[f"customer:{order.customer}"])
    return sale


async def advance(txn: Transaction, order: str, status: str) -> Sale | None:
    """Set the status and return the order; None: the order has ended or is being undone."""
    sale = await txn.get(f"order:{order}")
    if sale["status"] in ENDED | {UNDOING}:
        return None
    sale.set("status", status)
    return Sale(**sale.value)


async def finish(txn: Transaction, order: str) -> bool:
    """Set the status to `paid`; return False if the order is being undone.

    This transaction and `begin_undo` exclude each other: the one that the log orders first decides.
    """
    sale = await txn.get(f"order:{order}")
    if sale["status"] == UNDOING:
        return False
    sale.set("status", PAID)
    return True


async def begin_undo(txn: Transaction, order: str) -> bool:
    """Set the status to `undoing`; return False if the order was never accepted or has ended. So a
    paid order stays paid.
    """
    sale = await txn.get(f"order:{order}")
    if not sale or sale["status"] in ENDED:
        return False
    sale.set("status", UNDOING)
    return True


async def put_back(txn: Transaction, order: Order) -> None:
    """Return the pieces to the stock, once, unless the order is paid."""
    if not await begin_undo(txn, order.id):
        return
    sale = await txn.get(f"order:{order.id}")
    if sale["holds"]:
        sale.set("holds", value=False)
        for item, pieces in order.lines.items():
            txn.increment(f"stock:{item}", "left", pieces)


async def note_refusal(txn: Transaction, order: str, ends: str, why: str) -> None:
    """Store in which status the order is to end, and why."""
    sale = await txn.get(f"order:{order}")
    sale.set("ends", ends)
    sale.set("why", why)


async def end_undone(txn: Transaction, order: Order) -> None:
    """Set the last status of an order that was undone, unless the order has already ended."""
    sale = await txn.get(f"order:{order.id}")
    if not sale:  # cancelled before it was accepted
        cancelled = replace(sale_of(order), status=CANCELLED, why=_ASKED)
        txn.put(sale.name, asdict(cancelled), tags=[f"customer:{order.customer}"])
    elif sale["status"] not in ENDED:
        sale.set("status", sale["ends"] or CANCELLED)
        sale.set("why", sale["why"] or _ASKED)
