"""The ordering tier under loss, repetition, reordering and restarts has one order
(`tests.support.ordering_tier` describes the check).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from indilog.base.ids import ShardId
from tests.support.ordering_tier import BACKUPS, PRIMARY, VIEW, OrderingTier


def faults(tier: OrderingTier, chance: Random) -> list[Callable[[], None]]:
    """Faults that may occur."""

    def shard() -> ShardId:
        return chance.choice(sorted(VIEW.shards))

    def any_message() -> int:
        return chance.randrange(64)

    return [
        lambda: tier.lose(any_message()),
        lambda: tier.deliver(any_message(), repeat=False),
        lambda: tier.deliver(any_message(), repeat=True),
        lambda: tier.put_off(any_message()),
        tier.lag,
        lambda: tier.crash(PRIMARY, chance.randrange(3)),
        lambda: tier.crash(chance.choice(BACKUPS), chance.randrange(3)),
        lambda: tier.take_over(shard()),
        lambda: tier.wipe_replica(chance.choice(VIEW.storage_nodes)),
        lambda: tier.open_shard(shard(), chance.randrange(2)),
        lambda: tier.store(shard(), chance.randrange(2), chance.randint(1, 4)),
    ]


def work(tier: OrderingTier, chance: Random) -> list[Callable[[], None]]:
    """Operations that run all the time."""
    return [
        lambda: tier.store_everywhere(chance.choice(sorted(VIEW.shards)), chance.randint(1, 4)),
        lambda: tier.report(chance.randrange(3)),
        lambda: tier.deliver_in_order(chance.randint(1, 12)),
        lambda: tier.sync(chance.choice(VIEW.sequencers), chance.randint(1, 3)),
        tier.sync_everywhere,
        lambda: tier.take_checkpoint(chance.choice(VIEW.sequencers)),
        lambda: tier.deliver_late(chance.randrange(64)),
        lambda: tier.wait(chance.choice([0.4, 1.0])),
        tier.ask_tail,
    ]


@given(seed=st.integers(0, 2**32))
@example(seed=727)  # the pause before entries are resent to a backup has doubled
def test_there_is_one_order_despite_loss_repetition_and_restarts(seed: int) -> None:
    """Each seed enables some of the faults, so that each fault also occurs without the others."""
    chance = Random(seed)
    tier = OrderingTier(persisted_early=chance.random() < 0.5)
    goes_wrong = faults(tier, chance)
    goes_wrong = chance.sample(goes_wrong, chance.randint(0, len(goes_wrong)))
    goes_on = work(tier, chance)
    often = chance.choice([0.1, 0.3, 0.6])
    for _ in range(300):
        wrong = goes_wrong and chance.random() < often
        chance.choice(goes_wrong if wrong else goes_on)()
        tier.check()
    tier.heal()
    tier.check()


def restarts(tier: OrderingTier, chance: Random) -> list[Callable[[], None]]:
    """Events that make a primary lose entries that backups have, and delay its old messages."""
    return [
        lambda: tier.store_everywhere(chance.choice(sorted(VIEW.shards)), 1),
        lambda: tier.deliver(chance.randrange(8), repeat=False),
        lambda: tier.deliver_in_order(chance.randint(1, 12)),
        lambda: tier.put_off_entries(chance.randrange(8)),
        lambda: tier.deliver_late(chance.randrange(8)),
        lambda: tier.sync(chance.choice(BACKUPS), chance.randint(1, 3)),
        tier.lag,
        tier.sync_everywhere,
        lambda: tier.take_checkpoint(chance.choice(VIEW.sequencers)),
        lambda: tier.crash(PRIMARY, chance.randrange(2)),
        lambda: tier.crash(chance.choice(BACKUPS), chance.randrange(2)),
    ]


@given(seed=st.integers(0, 2**32))
def test_entries_lost_by_a_crashed_primary_never_mix_with_its_new_proposals(seed: int) -> None:
    chance = Random(seed)
    tier = OrderingTier(persisted_early=chance.random() < 0.5)
    actions = restarts(tier, chance)
    often = [chance.choice([1, 2, 4]) for _ in actions]
    for _ in range(150):
        chance.choices(actions, often)[0]()
        tier.check()
    tier.heal()
    tier.check()
