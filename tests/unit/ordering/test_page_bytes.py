"""A page of metalog entries is also bounded in bytes: trims are large (ARCHITECTURE 8.3)."""

from __future__ import annotations

from indilog.base.ids import MAX_SEQNUM, Epoch, Instant, NodeId, ViewNumber
from indilog.config import Config, node_config
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import (
    TRIM_FLOORS_MAX,
    Entry,
    Floor,
    Trim,
    encode_entries,
    encode_entry,
)
from indilog.kernel.view import View, view_of
from indilog.roles.role import (
    Effect,
    FrameKind,
    Location,
    Persist,
    Persisted,
    Received,
    Send,
)
from indilog.wire.messages import MetalogEntries, MetalogWanted
from indilog.wire.sequencer_messages import (
    MetalogAppend,
    MetalogStored,
    Seal,
    Sealed,
)
from indilog_ordering.sequencer import Sequencer
from tests.support import metalog_messages
from tests.support.metalog_messages import entries_message

PRIMARY, BACKUP = NodeId("sequencer-0"), NodeId("sequencer-1")
STORAGE = NodeId("storage-0")
T0 = Instant(1000.0)
PAGE_BYTES = 100_000
FLOORS = tuple(Floor(2**64 - 1 - n, MAX_SEQNUM - n, of_log=True) for n in range(TRIM_FLOORS_MAX))
TRIMS = tuple(Trim(n, ViewNumber(1), Epoch(1), n, FLOORS) for n in range(20))
"""Trims of some 20 KB each."""


def sequencer(
    name: NodeId, view: View, *, page_bytes: int = PAGE_BYTES, entries: tuple[Entry, ...] = TRIMS
) -> Sequencer:
    node = Sequencer(name, [view], Config(node=node_config(page_bytes_max=page_bytes)))
    for entry in entries:
        node.recover(FrameKind.METALOG, encode_entry(entry), Location(0, 0, 0))
    return node


def sent(effects: list[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def test_a_reader_gets_all_entries_in_pages_of_so_many_bytes() -> None:
    primary = sequencer(PRIMARY, view_of())
    primary.handle(metalog_messages.started(5), T0)
    heard: list[Entry] = []
    while len(heard) < len(TRIMS):
        last = heard[-1].epoch if heard else Epoch(0)
        wanted = Received(STORAGE, MetalogWanted(len(heard), last), Epoch(1))
        (page,) = sent(primary.handle([wanted], T0))
        assert isinstance(page, MetalogEntries)
        assert len(page.entries) > 1
        assert len(encode_entries(page.entries)) <= PAGE_BYTES
        heard += page.entries
    assert tuple(heard) == TRIMS


def test_an_entry_larger_than_a_page_is_sent_alone() -> None:
    primary = sequencer(PRIMARY, view_of(), page_bytes=1)
    primary.handle(metalog_messages.started(5), T0)
    wanted = Received(STORAGE, MetalogWanted(3, TRIMS[2].epoch), Epoch(1))
    committed = len(TRIMS)
    assert sent(primary.handle([wanted], T0)) == [entries_message(TRIMS[3:4], committed=committed)]


def test_of_many_entries_committed_at_once_the_newest_is_published_so_that_a_gap_is_seen() -> None:
    primary = sequencer(PRIMARY, view_of())
    published = sent(primary.handle(metalog_messages.started(5), T0))
    pages = [message for message in published if isinstance(message, MetalogEntries)]
    assert pages
    for page in pages:
        assert page.entries == TRIMS[-len(page.entries) :]
        assert len(encode_entries(page.entries)) <= PAGE_BYTES


def test_a_backup_gets_all_entries_in_pages_of_so_many_bytes() -> None:
    view = view_of(sequencers=3)
    primary = sequencer(PRIMARY, view)
    primary.handle(metalog_messages.started(5), T0)
    primary.handle([Persisted(len(TRIMS), Location(0, 0, 0))], T0)
    messages: list[object] = []
    for number in (1, 2):
        empty = Sealed(Epoch(5), number, Extent(Epoch(0), 0))
        messages = sent(primary.handle([Received(BACKUP, empty, Epoch(1))], T0))
    length = 0
    while length < len(TRIMS):
        append = next(m for m in messages if isinstance(m, MetalogAppend))
        assert append.start == length
        wanted = TRIMS[length : length + len(append.entries)]
        assert append.entries[: len(wanted)] == wanted
        assert len(encode_entries(append.entries)) <= PAGE_BYTES
        length += len(append.entries)
        stored = MetalogStored(Epoch(5), length, 2)
        messages = sent(primary.handle([Received(BACKUP, stored, Epoch(1))], T0))


def test_a_copy_is_adopted_in_pages_of_so_many_bytes() -> None:
    backup = sequencer(BACKUP, view_of(sequencers=3))
    backup.handle(metalog_messages.started(2), T0)
    asked = Received(PRIMARY, Seal(Epoch(5), 1, 0), Epoch(5))
    (promise,) = (e for e in backup.handle([asked], T0) if isinstance(e, Persist))
    answers = sent(backup.handle([Persisted(promise.token, Location(0, 0, 0))], T0))
    (copy,) = (m for m in answers if isinstance(m, Sealed))
    assert 1 < len(copy.entries) < len(TRIMS)
    assert len(encode_entries(copy.entries)) <= PAGE_BYTES
