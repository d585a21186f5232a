"""Decides by terms in the metadata store which sequencer is the primary (ARCHITECTURE 11, decision
0046).

The key `term` holds the newest term and its primary. The key changes by compare-and-set only, and
the numbers of terms come from the sequence of epochs. So terms grow, and each term has one primary.

- A starting sequencer takes a new term if the key names this sequencer. If there is no key, the
  first sequencer of the view takes a new term.
- Each sequencer that may take over keeps an ephemeral key in `sequencers/`. When the primary's key
  has vanished, the next sequencer of the view that has a key takes a new term.
- A sequencer that has left the view has no key. So if the primary leaves, another sequencer takes a
  new term.
- Each process watches `term` and notifies its roles.

This module decides only which sequencer is the primary. The sequencers decide which entries the new
primary adopts (`indilog_ordering.consensus`). So a primary that has lost its session, or cannot
reach the store, continues until a newer term begins. Hence the log works while the store is
unavailable. `assembly` and `node_process` call the functions here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NoReturn

import msgspec
import structlog

from indilog.base.errors import IndilogError
from indilog.base.ids import Epoch, NodeId
from indilog.roles.role import TermBegun
from indilog.runtime.cluster.cluster_state import EPOCH_KEY
from indilog.runtime.cluster.following import RETRY_S, followed, running
from indilog.runtime.metadata.store import MetadataSession, MetadataStore, Versioned, Written
from indilog.runtime.metadata.stored_values import decode_stored

_TERM_KEY: Final = "term"
_LIVE: Final = "sequencers/"

_log = structlog.get_logger(__name__)


class _Term(msgspec.Struct, frozen=True):
    term: int
    primary: str


_encoder = msgspec.json.Encoder()


async def term_at_start(
    store: MetadataStore, sequencers: Sequence[NodeId], nodes: Collection[NodeId], epoch: Epoch
) -> TermBegun | None:
    """Return the newest term. If its primary is a node of this process, begin and return a new
    term.

    Args:
        store: the metadata store.
        sequencers: sequencers of the view.
        nodes: nodes of this process.
        epoch: the incarnation of this process; also the number of a new term.

    Returns:
        None if no term has begun yet.
    """
    while True:
        found = await store.get(_TERM_KEY)
        term = None if found is None else _decode(found)
        primary = sequencers[0] if term is None else term.primary
        if primary not in nodes:
            return term
        if await _take(store, TermBegun(epoch, primary), found):
            return TermBegun(epoch, primary)


async def _take(store: MetadataStore, term: TermBegun, before: Versioned | None) -> bool:
    """Set the newest term, unless another term was set meanwhile. Return whether it was set."""
    value = _encoder.encode(_Term(term.term, term.primary))
    version = 0 if before is None else before.version
    answer = await store.compare_and_set(_TERM_KEY, value, expected_version=version)
    return isinstance(answer, Written)


def _decode(found: Versioned) -> TermBegun:
    known = decode_stored(found.value, _Term, "The record of the term")
    return TermBegun(Epoch(known.term), NodeId(known.primary))


def next_primary(
    sequencers: Sequence[NodeId], primary: NodeId, live: Collection[NodeId]
) -> NodeId | None:
    """Return the live sequencer that follows a lost primary in the view; None: none is live."""
    start = sequencers.index(primary) + 1 if primary in sequencers else 0
    candidates = [*sequencers[start:], *sequencers[:start]]
    return next((node for node in candidates if node in live), None)


@asynccontextmanager
async def terms_followed(
    store: MetadataStore, begin_term: Callable[[TermBegun], None]
) -> AsyncIterator[None]:
    """Call `begin_term` for terms that begin while the block runs. Terms that are soon replaced may
    be skipped.
    """
    async with followed(store, _TERM_KEY, lambda found: begin_term(_decode(found))):
        yield


@asynccontextmanager
async def standing_for_primary(
    store: MetadataStore,
    node: NodeId,
    sequencers: Callable[[], Sequence[NodeId]],
    epoch: Epoch,
    lost_s: float,
    is_outside: Callable[[], bool] = lambda: False,
) -> AsyncIterator[None]:
    """While the block runs, let a sequencer take over when the primary is lost.

    Args:
        store: the metadata store.
        node: the sequencer, which is a node of this process.
        sequencers: returns the sequencers of the newest view. If there is only one sequencer,
            nothing is done.
        epoch: incarnation of this process.
        lost_s: seconds without a heartbeat after which a sequencer is lost.
        is_outside: tells whether the sequencer has left, or has not joined yet.
    """
    if len(sequencers()) == 1:
        yield
        return
    async with running(_Candidate(store, node, sequencers, epoch, lost_s, is_outside).run()):
        yield


class _Candidate:
    """A sequencer of this process. If the primary is lost, and this sequencer is the next one in
    the view, this sequencer takes over.
    """

    def __init__(
        self,
        store: MetadataStore,
        node: NodeId,
        sequencers: Callable[[], Sequence[NodeId]],
        epoch: Epoch,
        lost_s: float,
        is_outside: Callable[[], bool],
    ) -> None:
        self._store = store
        self._node = node
        self._sequencers = sequencers
        self._key = f"{_LIVE}{node}.{epoch}"
        """The key of this incarnation. The key of the previous incarnation may still exist."""
        self._lost_s = lost_s
        self._is_outside = is_outside

    async def run(self) -> NoReturn:
        """Keep a session, and watch the keys of the other sequencers."""
        while True:
            if self._is_outside():
                await asyncio.sleep(RETRY_S)
                continue
            session: MetadataSession | None = None
            try:
                session = await self._store.session(self._lost_s)
                await session.create(self._key, b"")
                await self._watch(session)
            except IndilogError as error:
                _log.warning("this sequencer cannot take over for now", reason=str(error))
                await asyncio.sleep(RETRY_S)
            finally:
                if session is not None:
                    with contextlib.suppress(IndilogError):
                        await session.close()

    async def _watch(self, session: MetadataSession) -> None:
        """Take over when the primary is lost. The primary is lost if its key vanished, or was
        absent for `lost_s`. Return when this sequencer has left.
        """
        clock = asyncio.get_running_loop().time
        live, absent_since = frozenset[NodeId](), None
        changes = asyncio.create_task(self._store.watch_directory(_LIVE, after=0))
        try:
            while not self._is_outside():
                before = live
                await asyncio.wait({changes}, timeout=self._lost_s)
                if changes.done():
                    items, revision = changes.result()
                    live = _live_in(items)
                    again = self._store.watch_directory(_LIVE, after=revision)
                    changes = asyncio.create_task(again)
                session.check()
                found = await self._store.get(_TERM_KEY)
                if found is None or (primary := _decode(found).primary) in live:
                    absent_since = None
                    continue
                absent_since = clock() if absent_since is None else absent_since
                is_lost = primary in before or clock() - absent_since >= self._lost_s
                if is_lost and next_primary(self._sequencers(), primary, live) == self._node:
                    await self._take_over(found, primary)
        finally:
            changes.cancel()
            await asyncio.gather(changes, return_exceptions=True)

    async def _take_over(self, before: Versioned, primary: NodeId) -> None:
        """Take a new term, unless another term was set meanwhile. `terms_followed` then notifies
        the roles.
        """
        term = TermBegun(Epoch(await self._store.next_sequence(EPOCH_KEY)), self._node)
        if await _take(self._store, term, before):
            _log.warning("this sequencer takes over", lost=primary, term=term.term)


def _live_in(keys: Iterable[str]) -> frozenset[NodeId]:
    """Return the sequencers to which these keys belong."""
    return frozenset(NodeId(key.removeprefix(_LIVE).rpartition(".")[0]) for key in keys)
