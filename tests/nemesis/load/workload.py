"""All callers of a run: of the log, of transactions, of workflows and of a queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import httpx

from indilog.remote_client import RemoteClient
from tests.nemesis.judge import judged_log
from tests.nemesis.load.flow_load import Orders
from tests.nemesis.load.log_load import LOG, LogSession, follow, scanned
from tests.nemesis.load.queue_load import Mail
from tests.nemesis.load.store_load import Bank
from tests.nemesis.recording import Recorder
from tests.simulation.history import Seen

SESSIONS: Final = 4
TELLERS: Final = 3
CALLERS_OF_QUEUE: Final = 2
SHOWN_S_MAX: Final = 60.0
ENDED_S_MAX: Final = 180.0


class Workload:
    """Callers at the gateways of a cluster.

    Args:
        urls: the gateways.
        https: a client of each.

    Attributes:
        crashes: errors that no caller of the platform expects.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        https: Sequence[httpx.AsyncClient],
        recorder: Recorder,
        seed: int,
    ) -> None:
        self.crashes: list[str] = []
        self._urls, self._token, self._https = urls, token, https
        self._recorder, self._seed = recorder, seed
        self._bank, self._mail, self._orders = Bank(recorder), Mail(recorder), Orders(recorder)
        self._shown: dict[str, list[Seen]] = {f"engine-{n}": [] for n in range(len(urls))}
        self._clients: list[RemoteClient] = []
        self._callers: list[asyncio.Task[None]] = []
        self._late: list[asyncio.Task[None]] = []
        """Consumers and subscriptions: they end after all others."""
        self._ordering: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()

    async def begin(self) -> None:
        """Prepare the workflow, and start all callers."""
        await self._orders.prepare(self._https[0])
        seed = self._seed * 100
        for n in range(SESSIONS):
            caller = LogSession(
                await self._client(n), self._recorder, f"engine-{n % len(self._urls)}", seed + n
            )
            self._callers.append(self._task(caller.live()))
        self._callers += [
            self._task(self._bank.live(await self._client(n), seed + n)) for n in range(TELLERS)
        ]
        for n in range(CALLERS_OF_QUEUE):
            self._callers.append(self._task(self._mail.produce(await self._client(n))))
            self._late.append(self._task(self._mail.consume(await self._client(n))))
        for n, shown in enumerate(self._shown.values()):
            self._late.append(self._task(follow(await self._client(n), shown, self._recorder)))
        self._ordering = [self._task(self._orders.live(http, self._stop)) for http in self._https]

    async def rest(self) -> None:
        """Stop the callers that write, except that running workflows end."""
        self._stop.set()
        await _cancelled(self._callers)

    async def end(self) -> None:
        """Stop all callers; the queue is emptied, and workflows and subscriptions end.

        Raises:
            TimeoutError: a workflow does not end.
        """
        await self.rest()
        async with asyncio.timeout(ENDED_S_MAX):
            await asyncio.gather(*self._ordering)
        await self._mail.emptied(await self._client(0))
        end = await (await self._client(0)).log(LOG).read_prev(fresh=True)
        deadline = time.monotonic() + SHOWN_S_MAX
        while end and any(not s or s[-1].seqnum < end.seqnum for s in self._shown.values()):
            if time.monotonic() > deadline:
                break  # the judge says what is missing
            await asyncio.sleep(0.1)
        await _cancelled(self._late)

    async def works_again(self) -> None:
        """Append and read through each gateway; whatever fails now is a fault of the platform.

        Raises:
            IndilogError: it does not work.
        """
        for n in range(len(self._urls)):
            log = (await self._client(n)).log("after")
            seqnum = await log.append(b"after", tags=["t"])
            record = await log.read_next("t", seqnum)
            assert record is not None
            assert record.seqnum == seqnum
            assert await log.tail() > seqnum

    async def judged(self) -> tuple[list[str], list[Seen]]:
        """Return all violations, and the records of the log."""
        found: list[str] = []
        scans: dict[str, list[Seen]] = {}
        stamps: dict[int, float] = {}
        for n, engine in enumerate(self._shown):
            scans[engine], times = await scanned(await self._client(n))
            stamps |= zip((seen.seqnum for seen in scans[engine]), times, strict=True)
        tail = await (await self._client(0)).log(LOG).tail()
        operations = self._recorder.operations
        found += judged_log(operations, scans, self._shown, stamps, tail)
        found += await self._bank.judged(await self._client(0))
        found += [f"queue: {what}" for what in await self._mail.judged(await self._client(1))]
        found += await self._orders.judged(self._https[1])
        return found, next(iter(scans.values()))

    async def close(self) -> None:
        """End whatever still runs."""
        await _cancelled([*self._callers, *self._late, *self._ordering])
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _client(self, n: int) -> RemoteClient:
        client = RemoteClient(self._urls[n % len(self._urls)], token=self._token)
        self._clients.append(client)
        await client.open()
        return client

    def _task(self, live: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await live
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
                where = traceback.extract_tb(error.__traceback__)[1]
                self.crashes.append(f"crash: {type(error).__name__}: {error} in {where.name}")

        return asyncio.create_task(guarded())


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
