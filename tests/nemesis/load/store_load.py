"""Transfers between accounts in BokiStore: the sum of all balances never changes.

Each transfer also adds a unique value to a list of each account, so that the checker of
`tests.serializability` can order all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

from bokistore import ConflictError, Store, ViewCache
from indilog.base.errors import IndilogError, OutcomeUnknownError
from indilog.remote_client import RemoteClient
from tests.nemesis.recording import Recorder
from tests.serializability.checker import Transaction, violations

LOG: Final = "bank"
ACCOUNTS: Final = 5
PER_EPOCH: Final = 100
"""Transactions on one set of accounts; then another set is used, so that lists stay short."""
PAUSE_S: Final = 0.08


class Bank:
    """The history of all transactions.

    Attributes:
        wrong: sums that are not 0.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.transactions: list[Transaction] = []
        self.wrong: list[str] = []
        self._recorder = recorder
        self._values = count(1)

    def accounts(self, epoch: int | None = None) -> list[str]:
        """Return the accounts of an epoch; None: of the current one."""
        if epoch is None:
            epoch = self.epochs - 1
        return [f"{epoch}:{number}" for number in range(ACCOUNTS)]

    @property
    def epochs(self) -> int:
        """How many epochs there were."""
        return len(self.transactions) // PER_EPOCH + 1

    async def transfer(self, store: Store, rng: random.Random) -> None:
        """Move an amount from one account to another."""
        one, other = rng.sample(self.accounts(), 2)
        amount = rng.randint(1, 100)
        with self._noted("transfer") as txn:
            async with store.transaction() as inside:
                for name, by in ((one, -amount), (other, amount)):
                    account = await inside.get(name)
                    txn.reads[name] = tuple(account.get("l", []))
                    txn.writes[name] = [next(self._values)]
                    account.increment("balance", by)
                    account.push("l", txn.writes[name][0])

    async def audit(self, store: Store) -> None:
        """Read all accounts as of one seqnum."""
        names = self.accounts()
        with self._noted("audit") as txn:
            async with store.snapshot() as view:
                found: dict[str, Any] = {name: await view.get(name) for name in names}
        if txn.outcome == "committed":
            txn.reads = {name: tuple(found[name].get("l", [])) for name in names}
            self.check_sum(found, str(txn.node))

    def check_sum(self, found: dict[str, Any], where: str) -> None:
        """Note a sum that is not 0."""
        total = sum(account.get("balance", 0) for account in found.values())
        if total:
            self.wrong.append(f"sum: the balances of {sorted(found)} sum up to {total} in {where}")

    @contextmanager
    def _noted(self, kind: str) -> Iterator[Transaction]:
        txn = Transaction(len(self.transactions), time.monotonic_ns())
        self.transactions.append(txn)
        try:
            yield txn
            txn.outcome = "committed"
        except ConflictError:
            txn.outcome = "aborted"
        except OutcomeUnknownError:
            txn.outcome = "unknown"
        except IndilogError as error:
            txn.outcome = "aborted" if error.retryable else "unknown"
        txn.ended = time.monotonic_ns()
        self._recorder.count(kind, txn.outcome)

    async def live(self, client: RemoteClient, seed: int) -> None:
        """Run transactions without end."""
        rng, store = random.Random(seed), Store(client.log(LOG), cache=ViewCache())
        while True:
            if rng.random() < 0.2:
                await self.audit(store)
            else:
                await self.transfer(store, rng)
            await asyncio.sleep(rng.uniform(0, 2 * PAUSE_S))

    async def judged(self, client: RemoteClient) -> list[str]:
        """Return all violations, after the load has ended."""
        store = Store(client.log(LOG), cache=ViewCache())
        final: dict[str, tuple[int, ...]] = {}
        for epoch in range(self.epochs):
            found: dict[str, Any] = {name: await store.get(name) for name in self.accounts(epoch)}
            self.check_sum(found, "the end")
            final |= {name: tuple(account.get("l", [])) for name, account in found.items()}
        return self.wrong + violations(self.transactions, final)
