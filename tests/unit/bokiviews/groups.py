"""Groups of views as processes of their own see them, and a state machine of a program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import ClassVar, Self, TypeAlias

import msgspec
import pytest

from bokiviews import At, StateMachine, Views
from bokiviews.machine import AnyMachine
from bokiviews.replica import ViewsReplica
from bokiviews.transaction import Transaction
from indilog.base.log import Log


class Deposit(msgspec.Struct, frozen=True, tag="deposit"):
    """Add to an account."""

    account: str
    amount: int


class Move(msgspec.Struct, frozen=True, tag="move"):
    """Move an amount, if the account has it."""

    source: str
    target: str
    amount: int


LedgerCommand: TypeAlias = Deposit | Move


class Ledger(StateMachine[LedgerCommand, bool]):
    """Accounts that are never overdrawn."""

    kind: ClassVar[str] = "ledger"
    command_type: ClassVar[object] = LedgerCommand

    def __init__(self, accounts: dict[str, int] | None = None) -> None:
        self.accounts = accounts or {}
        self.changed_at = 0.0

    def apply(self, command: LedgerCommand, at: At) -> bool:
        self.changed_at = at.time
        match command:
            case Deposit(account, amount):
                self.accounts[account] = self.accounts.get(account, 0) + amount
            case Move(source, target, amount):
                if self.accounts.get(source, 0) < amount:
                    return False
                self.accounts[source] -= amount
                self.accounts[target] = self.accounts.get(target, 0) + amount
        return True

    def snapshot(self) -> object:
        return dict(self.accounts)

    @classmethod
    def restore(cls, content: bytes) -> Self:
        return cls(msgspec.msgpack.decode(content, type=dict[str, int]))


def process(
    log: Log, *, machines: Iterable[type[AnyMachine]] = (), hosts: Iterable[str] | None = None
) -> Views:
    """Return the group of a process that has read nothing of it."""
    views = Views(log, machines=machines, hosts=hosts)
    views._replica = ViewsReplica(log.name, "views", views._replica._hosting)
    return views


@asynccontextmanager
async def refused(error: type[Exception], transaction: Transaction) -> AsyncIterator[Transaction]:
    """Enter a transaction that must end with an error."""
    with pytest.raises(error):
        async with transaction as txn:
            yield txn
