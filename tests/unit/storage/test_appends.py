"""Claims of the append side of a storage node, one each."""

from __future__ import annotations

import pytest

from indilog.base.ids import Epoch, NodeId, ShardId
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind
from indilog.wire.messages import (
    AppendBatch,
    ShardClaim,
    ShardClaimed,
    ShardOpen,
    ShardOpened,
    ShardProgress,
    ShardStored,
)
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Machine,
    batch,
    config_of,
    entries,
    messages,
    small_batches,
)

E1, E2, E3 = Epoch(1), Epoch(2), Epoch(3)


def opened(machine: Machine | None = None, *, epoch: int = 1, start: int = 0) -> Machine:
    """Deliver the claim and the opening of a new writer."""
    machine = machine or Machine()
    machine.tell(ShardClaim(SHARD, Epoch(epoch)))
    machine.tell(ShardOpen(SHARD, Epoch(epoch), start))
    return machine


def test_a_batch_is_reported_when_it_is_durable_and_not_before() -> None:
    machine = opened()
    machine.holding = True
    assert machine.tell(AppendBatch(batch(0, [b"a", b"b"]))) == []
    assert messages(machine.confirm()) == [ShardProgress({SHARD: (E1, 2)})]


def test_all_batches_of_an_iteration_are_one_report_to_the_primary() -> None:
    machine = opened(Machine(view_of(engines=2)))
    one = ShardId(1)
    machine.tell(ShardClaim(one, E3), ShardOpen(one, E3, 0))
    machine.tell(ShardOpen(one, E3, 0))
    sent = machine.tell(
        AppendBatch(batch(0)),
        AppendBatch(batch(0, shard=1, epoch=3)),
        AppendBatch(batch(1, [b"x"] * 5)),
    )
    assert messages(sent, PRIMARY) == [ShardProgress({SHARD: (E1, 6), one: (E3, 1)})]


def test_a_repeated_batch_is_not_stored_again() -> None:
    machine = opened()
    machine.tell(AppendBatch(batch(0)), AppendBatch(batch(1)))
    frames = len(machine.frames)
    sent = machine.tell(AppendBatch(batch(0)), AppendBatch(batch(1)))
    assert messages(sent) == [ShardStored(SHARD, E1, 2)]
    assert len(machine.frames) == frames
    assert machine.node.records == 2


def test_a_batch_after_a_gap_is_answered_with_the_prefix() -> None:
    machine = opened()
    machine.tell(AppendBatch(batch(0)))
    sent = machine.tell(AppendBatch(batch(2)), AppendBatch(batch(3)))
    assert messages(sent, ENGINE) == [ShardStored(SHARD, E1, 1)]
    assert machine.node.records == 1


def test_progress_is_resent_while_records_are_not_ordered() -> None:
    machine = opened(Machine(config=config_of(resend_s=0.5)))
    report = ShardProgress({SHARD: (E1, 1)})
    assert messages(machine.tell(AppendBatch(batch(0)))) == [report]
    assert machine.wait(0.4) == []
    assert report in messages(machine.wait(0.2), PRIMARY)
    machine.tell(entries({0: 1}), sender=PRIMARY)
    assert report not in messages(machine.wait(0.6))
    assert machine.node.deadline() is None or report not in messages(machine.wait(9))


def test_after_a_restart_all_open_shards_are_reported() -> None:
    machine = opened()
    machine.tell(AppendBatch(batch(0)), AppendBatch(batch(1)))
    assert ShardProgress({SHARD: (E1, 2)}) in messages(machine.restarted().started)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not an intact record batch"),
        (batch(0)[:-1] + b"?", "not an intact record batch"),
        (batch(0, [b"x" * 900] * 80), "a batch larger than batch_bytes_max"),
        (batch(0, shard=9), "a batch of a shard that is not kept here, or without records"),
    ],
)
def test_a_malformed_or_foreign_batch_is_ignored(payload: bytes, reason: str) -> None:
    machine = opened(Machine(config=small_batches(67_000)))
    assert machine.tell(AppendBatch(payload)) == []
    assert machine.ignored == [reason]


def test_a_batch_of_the_largest_size_is_stored() -> None:
    machine = Machine(config=small_batches(67_000))
    opened(machine)
    payload = batch(0, [b"x" * (67_000 - len(batch(0, [b""])))])
    assert len(payload) == 67_000
    assert messages(machine.tell(AppendBatch(payload))) == [ShardProgress({SHARD: (E1, 1)})]


def test_a_batch_of_a_writer_that_has_not_opened_the_shard_is_refused() -> None:
    """A4: a replica that lost its disk forgot its writer; the refusal makes it claim again."""
    machine = Machine()
    never = ShardStored(SHARD, Epoch(-1), 0)
    assert messages(machine.tell(AppendBatch(batch(0)))) == [never]
    machine.tell(ShardClaim(SHARD, E1))
    assert messages(machine.tell(AppendBatch(batch(0)))) == [never]
    assert messages(machine.tell(ShardOpen(SHARD, E2, 0))) == [ShardStored(SHARD, E1, 0)]
    machine.holding = True
    machine.tell(ShardOpen(SHARD, E1, 0))
    assert machine.tell(AppendBatch(batch(0))) == []


def test_an_older_writer_is_refused_with_the_newer_epoch() -> None:
    """Thesis 5.5.1: the storage nodes refuse a writer with an older epoch."""
    machine = opened()
    machine.tell(AppendBatch(batch(0)))
    machine.holding = True
    machine.tell(ShardClaim(SHARD, E2), sender=NodeId("engine-1"))
    assert messages(machine.tell(AppendBatch(batch(1)))) == [ShardStored(SHARD, E2, 1)]
    assert machine.node.records == 1


def test_an_older_claim_is_ignored() -> None:
    machine = opened(epoch=2)
    assert machine.tell(ShardClaim(SHARD, E1)) == []
    assert machine.tell(ShardClaim(SHARD, Epoch(-1))) == []
    assert machine.ignored == ["a claim of an older writer"] * 2


def test_a_claim_is_answered_when_durable_with_the_prefix_stored_then() -> None:
    machine = opened()
    machine.holding = True
    machine.tell(AppendBatch(batch(0)))
    claim = ShardClaim(SHARD, E2)
    assert machine.tell(claim) == []
    assert machine.tell(claim) == []
    assert ShardClaimed(SHARD, E2, 1) in messages(machine.confirm())
    assert messages(machine.tell(claim)) == [ShardClaimed(SHARD, E2, 1)]
    assert [kind for kind, _, _ in machine.frames].count(FrameKind.SHARD_STATE) == 3


def test_nothing_is_reported_of_a_shard_between_two_writers() -> None:
    machine = opened()
    machine.tell(AppendBatch(batch(0)))
    machine.tell(ShardClaim(SHARD, E2))
    assert [m for m in messages(machine.wait(60)) if isinstance(m, ShardProgress)] == []


def test_a_takeover_drops_only_unordered_records() -> None:
    machine = opened()
    machine.tell(*[AppendBatch(batch(n)) for n in range(3)])
    machine.tell(entries({0: 1}), sender=PRIMARY)
    machine.tell(ShardClaim(SHARD, E2))
    assert machine.tell(ShardOpen(SHARD, E2, 0)) == []
    assert machine.ignored == ["opening a shard below what is ordered, or not at a batch"]
    sent = machine.tell(ShardOpen(SHARD, E2, 2))
    assert messages(sent) == [ShardOpened(SHARD, E2, 2), ShardProgress({SHARD: (E2, 2)})]
    assert machine.node.records == 2


def test_a_shard_opens_at_the_common_prefix_where_a_batch_begins() -> None:
    machine = opened()
    machine.tell(AppendBatch(batch(0, [b"a", b"b"])))
    machine.tell(ShardClaim(SHARD, E2))
    for start in (1, 3, -1):
        assert machine.tell(ShardOpen(SHARD, E2, start)) == []
    assert ShardOpened(SHARD, E2, 2) in messages(machine.tell(ShardOpen(SHARD, E2, 2)))


def test_opening_again_changes_nothing() -> None:
    machine = opened()
    machine.tell(AppendBatch(batch(0)))
    assert messages(machine.tell(ShardOpen(SHARD, E1, 0))) == [ShardOpened(SHARD, E1, 0)]
    assert machine.node.records == 1
    assert messages(machine.tell(ShardOpen(SHARD, E2, 0))) == [ShardStored(SHARD, E1, 1)]


def test_opening_is_answered_once_it_is_durable() -> None:
    machine = Machine()
    machine.tell(ShardClaim(SHARD, E1))
    machine.holding = True
    assert machine.tell(ShardOpen(SHARD, E1, 0)) == []
    assert machine.tell(ShardOpen(SHARD, E1, 0)) == []
    assert messages(machine.confirm()).count(ShardOpened(SHARD, E1, 0)) == 1


def test_a_batch_on_its_way_to_the_disk_is_dropped_by_a_takeover() -> None:
    machine = opened()
    machine.holding = True
    machine.tell(AppendBatch(batch(0)))
    machine.tell(ShardClaim(SHARD, E2))
    machine.held, late = machine.held[1:], machine.held[:1]
    machine.confirm()
    machine.tell(ShardOpen(SHARD, E2, 0))
    machine.held = late + machine.held
    assert ShardProgress({SHARD: (E2, 0)}) in messages(machine.confirm())
    assert machine.restarted().node.records == 0


def test_records_dropped_by_a_takeover_stay_dropped_after_a_restart() -> None:
    machine = opened()
    machine.tell(*[AppendBatch(batch(n)) for n in range(3)])
    opened(machine, epoch=2, start=1)
    machine.tell(AppendBatch(batch(1, [b"new", b"new"], epoch=2)))
    after = machine.restarted()
    assert after.node.records == 3
    assert after.node.status()["bytes"] == machine.node.status()["bytes"]
    assert messages(after.tell(AppendBatch(batch(3, epoch=1)))) == [ShardStored(SHARD, E2, 3)]
    assert messages(after.tell(AppendBatch(batch(3, epoch=2)))) == [ShardProgress({SHARD: (E2, 4)})]


def test_a_claim_survives_a_restart() -> None:
    machine = opened()
    machine.tell(ShardClaim(SHARD, E2))
    after = machine.restarted()
    assert messages(after.tell(AppendBatch(batch(0)))) == [ShardStored(SHARD, E2, 0)]


def test_messages_about_shards_of_others_are_ignored() -> None:
    machine = Machine()
    assert machine.tell(ShardClaim(ShardId(5), E1), ShardOpen(ShardId(5), E1, 0)) == []
    assert len(machine.ignored) == 2


def test_unordered_batches_are_bounded_in_memory_but_kept_on_disk() -> None:
    machine = opened(Machine(config=config_of(append_pending_bytes_max=1000)))
    for first in range(20):
        machine.tell(AppendBatch(batch(first, [b"x" * 200])))
    appends = machine.node._appends
    assert appends._unordered_bytes <= 1000
    assert machine.node.records == 20
