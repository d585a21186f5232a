"""What cannot be read or applied is an error of every read; it is never skipped."""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec
import pytest

from bokiviews import At, MachineFailedError, StateMachine, ViewsVersionError, replica
from bokiviews.records import Change, ChangeList, Command, encode_changes
from indilog.base.errors import DataLossError, TrimmedError
from indilog.testing import MemoryLog
from tests.support.damaged_log import DamagedLogs
from tests.unit.bokiviews.groups import Ledger, process

pytestmark = pytest.mark.asyncio


class Picky(StateMachine[int, int]):
    """A machine with a bug."""

    kind: ClassVar[str] = "picky"
    command_type: ClassVar[object] = int

    def __init__(self) -> None:
        self.total = 0

    def apply(self, command: int, at: At) -> int:
        self.total += 60 // command
        return self.total

    def snapshot(self) -> object:
        return self.total

    @classmethod
    def restore(cls, content: bytes) -> Self:
        state = cls()
        state.total = msgspec.msgpack.decode(content)
        return state


async def test_a_lost_record_is_an_error_of_every_process_that_needs_it() -> None:
    logs = DamagedLogs()
    log = logs.log("objects")
    counter = await process(log).counter("c")
    for _ in range(3):
        await counter.add(1)
    logs.lost = {1}
    for _ in range(2):
        with pytest.raises(DataLossError, match=r"^The group of views 'views' of log 'objects'"):
            await process(log).counter("c")
    assert await counter.value() == 3, "a process that has read the record continues"
    logs.lost.clear()
    assert await (await process(log).counter("c")).value() == 3


async def test_a_lost_record_stops_a_process_that_meets_it_and_a_repair_lets_it_continue() -> None:
    logs = DamagedLogs()
    log = logs.log("objects")
    one, two = await process(log).counter("c"), await process(log).counter("c")
    await one.add(1)
    logs.lost = {0}
    with pytest.raises(DataLossError):
        await two.value()
    with pytest.raises(DataLossError):
        await two.add(1)
    assert two.view == 0
    logs.lost.clear()
    assert await two.value() == 2


async def test_a_log_that_was_trimmed_as_a_whole_is_an_error() -> None:
    log = MemoryLog("objects")
    counter = await process(log).counter("c")
    await counter.add(1)
    await log.trim(await log.tail())
    with pytest.raises(TrimmedError):
        await process(log).counter("c")


async def test_a_lost_checkpoint_is_reported_as_lost_not_as_trimmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica, "CHECKPOINT_EVERY", 4)
    logs = DamagedLogs()
    log = logs.log("objects")
    counter = await process(log).counter("c")
    for _ in range(16):
        await counter.add(1)
    last = await log.read_prev("views:views:checkpoints")
    assert last is not None
    logs.lost = {last.seqnum}
    with pytest.raises(DataLossError, match="cannot be read"):
        await process(log).counter("c")


async def test_a_machine_that_raises_an_error_stops_the_views_until_it_is_corrected() -> None:
    log = MemoryLog("objects")
    views = process(log, machines=[Picky])
    picky, counter = await views.machine("p", Picky), await views.counter("c")
    assert await picky.submit(2) == 30
    with pytest.raises(MachineFailedError, match=r"picky 'p' cannot apply .* at seqnum 1: Zero"):
        await picky.submit(0)
    for _ in range(2):
        with pytest.raises(MachineFailedError):
            await views.sync()
        with pytest.raises(MachineFailedError):
            await counter.add(1)
    with pytest.raises(MachineFailedError):
        await process(log, machines=[Picky]).machine("p", Picky)

    class Corrected(Picky):
        def apply(self, command: int, at: At) -> int:
            return super().apply(command, at) if command else self.total

    corrected = await process(log, machines=[Corrected]).machine("p", Corrected)
    assert corrected.view.total == 30


async def test_no_command_is_applied_again_after_a_machine_has_failed() -> None:
    log = MemoryLog("objects")
    views = process(log, machines=[Picky])
    await views.machine("p", Picky)
    commands = [Command("p", "picky", msgspec.msgpack.encode(number)) for number in (2, 0)]
    changes = ChangeList(tuple(Change((one,)) for one in commands), is_by_full_host=True)
    await log.append(encode_changes(changes), tags=["views:views:changes"])
    for _ in range(3):
        with pytest.raises(MachineFailedError):
            await views.sync()
    machine = views._replica.state.machine("p")
    assert isinstance(machine, Picky)
    assert machine.total == 30


@pytest.mark.parametrize(
    "command", [Command("bank", "ledger", b"\xc1"), Command("m", "map", b"\x91\xa3new")]
)
async def test_a_command_of_a_later_version_is_refused_and_changes_nothing(
    command: Command,
) -> None:
    log = MemoryLog("objects")
    counter = await process(log, machines=[Ledger]).counter("c")
    first = Command("c", "counter", msgspec.msgpack.encode(("add", 1)))
    changes = ChangeList((Change((first,)), Change((command,))), is_by_full_host=True)
    await log.append(encode_changes(changes), tags=["views:views:changes"])
    for _ in range(2):
        with pytest.raises(ViewsVersionError, match="cannot be decoded as a"):
            await counter.value()
    assert counter.view == 0


async def test_a_record_of_another_format_version_is_refused() -> None:
    log = MemoryLog("objects")
    await log.append(b"\xb0V\x02later", tags=["views:views:changes"])
    with pytest.raises(ViewsVersionError, match="upgrade it"):
        await process(log).counter("c")
