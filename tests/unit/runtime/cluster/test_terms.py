"""Terms in the metadata store: who takes one, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from indilog.base.errors import DataDirectoryError, QuorumUnavailableError
from indilog.base.ids import Epoch, NodeId
from indilog.config import node_config
from indilog.roles.role import TermBegun
from indilog.runtime.cluster.cluster_state import EPOCH_KEY
from indilog.runtime.cluster.terms import (
    _TERM_KEY,
    _take,
    next_primary,
    standing_for_primary,
    term_at_start,
    terms_followed,
)
from indilog.runtime.metadata import session, stored_session
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.store import Conflict, MetadataStore, Versioned, Written

A, B, C = SEQUENCERS = tuple(NodeId(f"sequencer-{number}") for number in range(3))
LOST_S = 2.0


def stopped() -> float:
    """Return the time of sessions: they end only when they are closed, however busy the machine
    is.
    """
    return 1000.0


@pytest.fixture(autouse=True)
def _sessions_that_do_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "boot_time_s", stopped)
    monkeypatch.setattr(stored_session, "boot_time_s", stopped)


def opened(directory: Path) -> EmbeddedMetadataStore:
    return EmbeddedMetadataStore(directory / "metadata", node_config(), stopped)


@pytest.mark.parametrize(
    ("lost", "live", "following"),
    [
        (A, {B, C}, B),
        (A, {C}, C),
        (B, {A, C}, C),
        (C, {A, B}, A),
        (A, {A}, A),
        (A, set(), None),
        (NodeId("gone"), {B, C}, B),
    ],
)
def test_the_next_live_sequencer_of_the_view_follows_a_lost_primary(
    lost: NodeId, live: set[NodeId], following: NodeId | None
) -> None:
    assert next_primary(SEQUENCERS, lost, live) == following


@pytest.mark.asyncio
async def test_the_first_sequencer_takes_the_first_term_and_a_named_one_those_after_it(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as store:
        assert await term_at_start(store, SEQUENCERS, [B], Epoch(1)) is None
        first = TermBegun(Epoch(2), A)
        assert await term_at_start(store, SEQUENCERS, [A], Epoch(2)) == first
        assert await term_at_start(store, SEQUENCERS, [B, C], Epoch(3)) == first
        assert await term_at_start(store, SEQUENCERS, SEQUENCERS, Epoch(4)) == TermBegun(
            Epoch(4), A
        )


@pytest.mark.asyncio
async def test_a_term_of_another_release_is_one_clear_sentence(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        await store.compare_and_set("term", b"{}", expected_version=0)
        with pytest.raises(DataDirectoryError, match="another release"):
            await term_at_start(store, SEQUENCERS, [A], Epoch(1))


class Cluster:
    """Sequencers that stand for primary, and the terms that another process learns of."""

    def __init__(self, store: MetadataStore, lost_s: float = LOST_S) -> None:
        self.store = store
        self.lost_s = lost_s
        self.learned: list[TermBegun] = []
        self._standing: dict[NodeId, list[asyncio.Task[None]]] = {}
        """The lives of each sequencer; the keys of one that crashed stay for a while."""
        self.outside: set[NodeId] = set()
        """The sequencers that have left the view."""

    async def start(self, node: NodeId) -> None:
        epoch = Epoch(await self.store.next_sequence(EPOCH_KEY))
        await term_at_start(self.store, SEQUENCERS, [node], epoch)
        up = asyncio.Event()

        async def stand() -> None:
            async with standing_for_primary(
                self.store,
                node,
                lambda: [one for one in SEQUENCERS if one not in self.outside],
                epoch,
                self.lost_s,
                lambda: node in self.outside,
            ):
                up.set()
                await asyncio.Event().wait()

        self._standing.setdefault(node, []).append(asyncio.create_task(stand()))
        await up.wait()

    async def stop(self, node: NodeId) -> None:
        tasks = self._standing.pop(node)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def led_by(self, primary: NodeId, *, above: int = 0) -> int:
        """Wait until a node leads a term above `above`; return the term."""
        async with asyncio.timeout(60):
            while self._last.primary != primary or self._last.term <= above:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self._last.term

    @property
    def _last(self) -> TermBegun:
        return self.learned[-1] if self.learned else TermBegun(Epoch(0), NodeId(""))


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[Cluster]:
    with opened(directory) as store:
        made = Cluster(store)
        async with terms_followed(store, made.learned.append):
            for node in SEQUENCERS:
                await made.start(node)
            yield made
            for node in list(made._standing):
                await made.stop(node)


@pytest.mark.asyncio
async def test_a_term_lasts_while_its_primary_is_live(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        term = await made.led_by(A)
        await made.stop(C)
        await asyncio.sleep(0.3)
        assert made.learned == [TermBegun(Epoch(term), A)]


@pytest.mark.asyncio
async def test_one_sequencer_takes_over_from_each_lost_primary(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await made.led_by(A)
        await made.stop(A)
        await made.led_by(B)
        await made.start(A)
        await made.stop(B)
        await made.led_by(C)
        await made.stop(C)
        await made.led_by(A)
        terms = [term.term for term in made.learned]
        assert len(terms) == 4
        assert terms == sorted(set(terms))


@pytest.mark.asyncio
async def test_a_primary_that_restarts_at_once_keeps_its_place_under_a_new_term(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as made:
        before = await made.led_by(A)
        await made.start(A)
        await made.led_by(A, above=before)
        assert {term.primary for term in made.learned} == {A}


@pytest.mark.asyncio
async def test_a_primary_that_never_starts_is_replaced(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        await term_at_start(store, SEQUENCERS, [A], Epoch(await store.next_sequence(EPOCH_KEY)))
        made = Cluster(store, lost_s=0.3)
        async with terms_followed(store, made.learned.append):
            await made.led_by(A)
            await made.start(B)
            await made.led_by(B)
            await made.stop(B)


class PausedStore(EmbeddedMetadataStore):
    """A store whose user is paused when it has decided to take a term, until `resumed` is set.

    Attributes:
        deciding: set when the user has decided.
        answers: the answers to its writes.
    """

    def __init__(self, store: EmbeddedMetadataStore) -> None:
        self.__dict__ = store.__dict__  # the same store
        self.deciding, self.resumed = asyncio.Event(), asyncio.Event()
        self.answers: asyncio.Queue[object] = asyncio.Queue()

    async def next_sequence(self, name: str) -> int:
        number = await super().next_sequence(name)
        self.deciding.set()
        await self.resumed.wait()
        return number

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        answer = await super().compare_and_set(key, value, expected_version=expected_version)
        await self.answers.put(answer)
        return answer


@pytest.mark.asyncio
async def test_a_paused_sequencer_takes_no_term_after_another_one_did(tmp_path: Path) -> None:
    """A24, for the controller: the node that decides who leads. Its write is refused, although it
    was not notified of the newer term.
    """
    with opened(tmp_path) as store:
        await term_at_start(store, SEQUENCERS, [A], Epoch(await store.next_sequence(EPOCH_KEY)))
        epoch = Epoch(await store.next_sequence(EPOCH_KEY))
        paused = PausedStore(store)
        async with (
            asyncio.timeout(60),
            standing_for_primary(paused, B, lambda: SEQUENCERS, epoch, lost_s=0.3),
        ):
            await paused.deciding.wait()
            newer = TermBegun(Epoch(await store.next_sequence(EPOCH_KEY)), C)
            assert await _take(store, newer, await store.get(_TERM_KEY))
            paused.resumed.set()
            assert isinstance(await paused.answers.get(), Conflict)
            assert await term_at_start(store, SEQUENCERS, [], epoch) == newer


class AwayAtFirst(EmbeddedMetadataStore):
    """A store that cannot be reached a few times."""

    refusals = 3

    async def watch(self, key: str, *, after: int) -> Versioned | None:
        if self.refusals:
            self.refusals -= 1
            raise QuorumUnavailableError("away")
        return await super().watch(key, after=after)


@pytest.mark.asyncio
async def test_terms_are_followed_again_when_the_store_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indilog.runtime.cluster.following.RETRY_S", 0.01)
    learned: list[TermBegun] = []
    with AwayAtFirst(tmp_path / "metadata", node_config()) as store:
        await term_at_start(store, SEQUENCERS, [A], Epoch(1))
        async with terms_followed(store, learned.append), asyncio.timeout(60):
            while not learned:  # noqa: ASYNC110 another task's work
                await asyncio.sleep(0.01)
    assert learned == [TermBegun(Epoch(1), A)]


@pytest.mark.asyncio
async def test_another_sequencer_takes_over_from_a_primary_that_left_the_view(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as made:
        term = await made.led_by(A)
        made.outside.add(A)
        term = await made.led_by(B, above=term)
        await made.stop(B)
        await made.led_by(C, above=term)
