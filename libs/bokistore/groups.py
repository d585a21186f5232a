"""Groups of transactions that share one record. The transactions of a line commit in groups.

A transaction that has its turn (`bokistore.lines`) does not append if others are in line. It passes
its turn on, and the next one runs on top of its writes. The last one appends the writes of all as
one transaction. The reads of this combined transaction are those of all members, as of the snapshot
of the first member. So a line costs one append per group instead of one per transaction, and
replays need no rule for groups.

The transactions of a group commit together, or conflict together and stand in line again. None of
them returns before the commit. `Store.transact` begins a group, and `Transaction` joins it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from bokistore.lines import MEMBERS_MAX, Contender
from indilog import AppendOutcomeUnknownError, ConflictError, TooLargeError
from indilog.sdk import Event

NAMES_MAX: Final = 24
"""Largest number of objects that a group writes; each object uses a tag."""
BYTES_MAX: Final = 256 * 1024
"""Largest number of bytes of the writes and results in a group."""


_MemberT = TypeVar("_MemberT", bound="Combined")


class Combined(Protocol):
    """A transaction to which others can be added (`bokistore.transaction`)."""

    def can_add(self, member: Self, names_max: int) -> bool:
        """Tell whether a transaction can be added, so that the record writes at most `names_max`
        objects.
        """

    def add(self, member: Self) -> None:
        """Add the writes and the id of a transaction."""

    async def commit(self) -> None:
        """Append the record."""


class Group(Generic[_MemberT]):
    """Transactions with one record.

    Args:
        whole: one transaction with the reads and writes of all members so far; its commit appends
            the record.
    """

    def __init__(self, whole: _MemberT) -> None:
        self.whole = whole
        self._members = 0
        self._bytes = 0
        self._done = Event()
        self._is_committing = False
        self._error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether no transaction can join."""
        return self._is_committing

    async def join(self, member: _MemberT, contender: Contender, size: int) -> None:
        """Add a transaction with writes of `size` bytes, pass the turn on, and return when the
        record has committed.

        Raises:
            ConflictError: the group conflicted; or this transaction does not fit in, and must run
                again with a record of its own.
        """
        if self._is_committing:
            raise ConflictError("The transaction's group has committed without it; run it again.")
        if self._bytes + size > BYTES_MAX or not self.whole.can_add(member, NAMES_MAX):
            contender.is_alone = True
            raise ConflictError("The transaction does not fit into its group; run it again.")
        self.whole.add(member)
        self._members += 1
        self._bytes += size
        await self.end_turn(contender)
        await self._done.wait()
        if isinstance(self._error, TooLargeError) and self._members > 1:
            contender.is_alone = True
            raise ConflictError(
                "The transaction's group is too large; run it again."
            ) from self._error
        if self._error is not None:
            raise self._error

    async def end_turn(self, contender: Contender) -> None:
        """Pass the turn to the next transaction, or commit if there is none or the group is full.
        The contender's own transaction need not have joined.
        """
        if self._is_committing:
            return
        is_full = self._members >= MEMBERS_MAX or self._bytes >= BYTES_MAX // 2
        if self._members and not is_full and contender.pass_on(self):
            return
        contender.end_group(self)
        await self.commit()

    async def commit_members(self) -> None:
        """Append the record without the transaction that has its turn, because that one is slow. If
        no transaction has joined, only the slow one needs the record, and will append it.
        """
        if self._members:
            await self.commit()

    async def commit(self) -> None:
        """Append the record once, even if the caller is cancelled meanwhile."""
        if self._is_committing:
            await self._done.wait()
            return
        self._is_committing = True
        await _completed(self._commit)

    async def _commit(self) -> None:
        try:
            await self.whole.commit()
        except Exception as error:  # noqa: BLE001, each member raises it
            self._error = error
        except BaseException:
            self._error = AppendOutcomeUnknownError("The process was ending during the commit.")
            raise
        finally:
            self._done.set()


async def _completed(body: Callable[[], Awaitable[Any]]) -> None:
    """Run `body` to its end, even if the caller is cancelled; without an event loop just run it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        await body()
        return
    await asyncio.shield(asyncio.ensure_future(body()))
