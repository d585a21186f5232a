"""The client of a log over cells, without I/O: appends, and catching up with other writers.

An append takes a token (a cell), and asks for a write of its content. A cell takes one content. So
if another writer was faster, the items go into a later cell. The core applies all cells in order
(`indilog_cells.state`), and an append is complete when its own cell is applied. So a process that
has read all cells up to the first unwritten one knows every append that was complete before.

The first content of a core *claims* an epoch, greater than all before. Contents of smaller epochs
are void in later cells. So a content that a crashed process wrote takes no effect if it reaches its
cell after the next process's claim. A running core whose content is void writes the items again,
with the new epoch.

A core fills an unwritten cell below an own content with junk after `fill_after_us`: the writer of
that cell has probably crashed. If the outcome of a write is unknown, the core writes the same
content to the same cell again, never to another one, until it knows that the cell holds a content.
So no record is in the log twice.

In a log that has an owner (decision 0096), the core of another process sends its contents to the
owner. The owner writes each into a cell of its own, and the content keeps its writer and serial. So
the sender recognizes it in the cells if no answer arrives. A content whose outcome is unknown is
*unsettled*: its sender appends a barrier in a later tenure, and applies all cells up to it. Each
tenure begins a later epoch, so a content that is not found then is void for ever, and its items are
appended again.

`driver` runs a core: it turns effects into requests, and answers into events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, assert_never

from indilog_cells.content import JUNK, AskTime, Content, End, Item, Records, decode, encode
from indilog_cells.core_events import (
    AppendsElsewhere,
    AskToken,
    CaughtUp,
    CellDeposed,
    CellFailed,
    CellRead,
    CellTaken,
    CellWritten,
    ContentAnswered,
    ContentApplied,
    Effect,
    Event,
    FellBehind,
    ItemApplied,
    ReadCell,
    SendContent,
    TokenFailed,
    TokenGiven,
    WriteCell,
)
from indilog_cells.state import LogState, Outcome, Placed

_RETRY_US: Final = 10_000
_RETRY_US_MAX: Final = 2_000_000
"""Microseconds until a failed request is repeated: `_RETRY_US` after the first failure, doubled
after each further one, up to `_RETRY_US_MAX`. The first pause is short, because a change of a
layout fails requests for some 40 ms.
"""
_TOKEN_RETRY_US: Final = 100_000
"""Microseconds until a token is asked for again, after none was given."""
_LOOKS: Final = 64
"""An unwritten cell below an own content is read at once, and again after 1/`_LOOKS` of
`fill_after_us`; each further pause is twice as long.
"""
_SKIPPED_MAX: Final = 4
"""Cells, at most, that a core leaves to other writers after it lost several cells in succession."""
_OWN: Final = -1
"""The core's own ticket of catching up: before its first append, and after another writer took a
cell in which it had an own content.
"""
_BARRIER: Final = -2
"""The ticket of a barrier, and of catching up with it."""


class CoreLimits(NamedTuple):
    """Limits of a core.

    Attributes:
        cells_in_flight: own cells that may be unfinished at once.
        cell_bytes: largest number of bytes of the items in one cell; a larger item has a cell of
            its own.
        items_waiting: items that may wait for a cell.
        read_ahead: cells that are read at once, at most, while catching up.
        fill_after_us: microseconds after which an unwritten cell below an own content is filled.
        token_after_us: microseconds after which a core without an answer of the sequencer chooses a
            cell itself.
    """

    cells_in_flight: int = 2
    cell_bytes: int = 4 * 1024 * 1024
    items_waiting: int = 65_536
    read_ahead: int = 32
    fill_after_us: int = 1_000_000
    token_after_us: int = 1_000_000


CORE_LIMITS: Final = CoreLimits()
"""The default."""


class _Submitted(NamedTuple):
    ticket: int
    item: Item


class _Received(NamedTuple):
    ticket: int
    content: Content


class _Place(NamedTuple):
    """Where a submitted item is in a content: the number of the item that contains it, and the
    number of records before it there.
    """

    item: int
    offset: int

    def outcome(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of the submitted item, given those of the content's items."""
        outcome = outcomes[self.item]
        if isinstance(outcome, Placed):
            return Placed(outcome.first + self.offset)
        return outcome


def _merged(submitted: Sequence[_Submitted]) -> tuple[list[Item], list[_Place]]:
    """Return the items of a content, and the place of each submitted item among them.

    Consecutive records without conditions become one item.
    """
    items: list[Item] = []
    places: list[_Place] = []
    open_item: Records | None = None
    for _, item in submitted:
        if not isinstance(item, Records) or item.after is not None:
            open_item = None
        elif open_item is not None:
            places.append(_Place(len(items) - 1, len(open_item.data)))
            open_item.tags.extend(item.tags)
            open_item.names.extend(item.names)
            open_item.data.extend(item.data)
            continue
        else:
            item = open_item = Records(  # noqa: PLW2901 - its lists grow, those given do not
                item.time_us, list(item.tags), list(item.names), list(item.data)
            )
        items.append(item)
        places.append(_Place(len(items) - 1, 0))
    return items, places


class _Sent:
    """A content in flight: an own one, or one of another process.

    Attributes:
        received: the content as another process sent it, with its ticket; None: it is an own one.
    """

    __slots__ = (
        "backoff_us", "content", "places", "received", "retry_us", "serial", "submitted", "writer",
    )  # fmt: skip

    def __init__(
        self,
        content: Content,
        submitted: Sequence[_Submitted] = (),
        places: Sequence[_Place] = (),
        *,
        received: _Received | None = None,
    ) -> None:
        self.content = encode(content)
        self.writer, self.serial = content.writer, content.serial
        self.submitted = submitted
        self.places = places
        self.received = received
        self.retry_us: int | None = None
        self.backoff_us = _RETRY_US

    def is_in(self, content: Content) -> bool:
        """Whether a cell with this content holds what was sent."""
        return (content.writer, content.serial) == (self.writer, self.serial)


class Core:
    """Appends to the cells of one log, and applies them.

    Args:
        state: the state to continue from; all cells below its position are applied.
        writer: bytes that no other core has; they name the contents of this core.
        limits: limits of this core.

    Attributes:
        state: the state of the log.
        stamp_us: the time of the next contents, microseconds since 1970; the caller sets it.
    """

    def __init__(self, state: LogState, writer: bytes, limits: CoreLimits = CORE_LIMITS) -> None:
        self.state = state
        self.writer = writer
        self.stamp_us = 0
        self._limits = limits
        self._serial = 0
        self._epoch: int | None = None
        """Epoch of the next contents; None: the next one begins a later epoch than any before."""
        self._waiting: deque[_Submitted] = deque()
        self._received: deque[_Received] = deque()
        """Contents of other processes that are in no cell."""
        self._gave_received = False
        """Whether the last cell was for a content of another process."""
        self._token_until_us: int | None = None
        """When to choose a cell without the sequencer; None: no token is awaited."""
        self._token_again_us: int | None = None
        """When to ask for a token again, after none was given."""
        self._in_flight: dict[int, _Sent] = {}
        self._elsewhere: dict[int, _Sent] = {}
        """Own contents that the owner of the log was asked to append, by serial."""
        self._unsettled: dict[int, _Sent] = {}
        """Own contents that are in some cell, or void for ever, by serial."""
        self._barred: set[int] = set()
        """Unsettled contents that are settled when a core has caught up with the barrier."""
        self._skipped_serial = 0
        """Contents below this serial may be in cells that were not read."""
        self._filling: dict[int, int | None] = {}
        """Cells that are being filled with junk, and when to write the junk again; None: the write
        is in flight.
        """
        self._known: dict[int, Content | None] = {}
        """Contents above the first cell that is not applied; None: junk."""
        self._taken: set[int] = set()
        """Cells that hold a content not read yet."""
        self._reading: dict[int, int] = {}
        """Cells that are being read, and the number of each read."""
        self._reads = 0
        self._ahead = 1
        self._read_again_us: int | None = None
        self._read_backoff_us = _RETRY_US
        self._catching_up: dict[int, int] = {_OWN: 0}
        """Tickets, and the number of reads that were issued before."""
        self._hole = -1
        """The next cell, if it is unwritten below an own content; -1 at first: there is none."""
        self._hole_look_us = 0
        self._hole_pause_us = 0
        self._hole_fill_us = 0
        self._is_behind = False
        self._conflicts = 0
        """Own cells in succession that another writer had taken."""

    # --- calls

    @property
    def waiting(self) -> int:
        """How many items have no outcome and are in no cell."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """How many own cells are unfinished."""
        return len(self._in_flight) + len(self._elsewhere)

    @property
    def has_room(self) -> bool:
        """Whether `submit` may be called."""
        return len(self._waiting) < self._limits.items_waiting

    def submit(self, ticket: int, item: Item) -> None:
        """Append an item; `ItemApplied` gives its outcome. Call `handle` afterwards."""
        assert self.has_room, "the caller asks first"
        if isinstance(item, Records):
            count = len(item.data)
            assert len(item.tags) == len(item.names) == count, "each record has tags and names"
        self._waiting.append(_Submitted(ticket, item))

    def submit_content(self, ticket: int, content: Content) -> None:
        """Append the content of another process, as the owner; `ContentApplied` has the outcomes.
        Call `handle` afterwards.
        """
        self._received.append(_Received(ticket, content))

    def withdraw(self, ticket: int) -> bool:
        """Forget an item; return whether it was in no cell, so that it never takes effect."""
        for submitted in self._waiting:
            if submitted.ticket == ticket:
                self._waiting.remove(submitted)
                return True
        return False

    def withdraw_records(self) -> list[int]:
        """Forget all items with records that are in no cell; return their tickets. These items
        never take effect.
        """
        withdrawn = [each.ticket for each in self._waiting if isinstance(each.item, Records)]
        self._waiting = deque(e for e in self._waiting if not isinstance(e.item, Records))
        return withdrawn

    def catch_up(self, ticket: int) -> None:
        """Apply all appends that are complete now; `CaughtUp` follows when they are applied. Call
        `handle` afterwards.
        """
        assert ticket > _OWN, "the ticket is not that of the core's own catching up"
        assert ticket not in self._catching_up, "each call has its own ticket"
        self._catching_up[ticket] = self._reads

    def abandon(self, ticket: int) -> None:
        """Forget a `catch_up`."""
        self._catching_up.pop(ticket, None)

    def restart(self, state: LogState, now_us: int) -> list[Effect]:
        """Continue from a newer state, and return what to do. Items in own cells below the state's
        position get an unknown outcome.
        """
        assert state.position >= self.state.position, "a checkpoint is newer"
        self.state = state
        self._is_behind = False
        effects: list[Effect] = []
        for position in [each for each in self._in_flight if each < state.position]:
            effects += self._lose(self._in_flight.pop(position))
        self._skipped_serial = self._serial
        for sent in self._unsettled.values():
            effects += self._lose(sent)
        self._unsettled.clear()
        self._known = {p: c for p, c in self._known.items() if p >= state.position}
        self._taken = {p for p in self._taken if p >= state.position}
        self._filling = {p: at for p, at in self._filling.items() if p >= state.position}
        return effects + self.handle([], now_us)

    def handle(self, events: Sequence[Event], now_us: int) -> list[Effect]:
        """Take events; return what to do.

        Args:
            events: what happened.
            now_us: microseconds of a clock that never goes back, from any origin.

        Raises:
            MalformedFrameError: a cell is damaged, so the log cannot be read beyond it.
        """
        effects: list[Effect] = []
        for event in events:
            effects += self._on_event(event, now_us)
        effects += self._advance()
        self._begin_barrier()
        effects += self._repeat(now_us)
        effects += self._repair_hole(now_us)
        effects += self._read_on(now_us)
        effects += self._dispatch(now_us)
        return effects

    def deadline_us(self) -> int | None:
        """When to call `handle` even without events, by the clock of its `now_us`; None: never."""
        times = [sent.retry_us for sent in self._in_flight.values()]
        times += [*self._filling.values(), self._read_again_us]
        times += [self._token_until_us, self._token_again_us]
        if self._hole == self.state.position:
            times.append(self._hole_fill_us)
            if self._hole not in self._reading:
                times.append(self._hole_look_us)
        return min((time for time in times if time is not None), default=None)

    def check_invariants(self) -> None:
        """Check what holds after each `handle`; for tests."""
        position = self.state.position
        assert all(each > position for each in self._known), "known cells are applied at once"
        assert all(each >= position for each in self._taken), "applied cells are forgotten"
        assert all(each >= position for each in self._in_flight), "applied cells have outcomes"
        assert self._known.keys().isdisjoint(self._taken), "a taken cell is not read yet"
        assert self.in_flight <= self._limits.cells_in_flight
        assert 1 <= self._ahead <= self._limits.read_ahead
        own = [sent.serial for sent in self._in_flight.values() if sent.received is None]
        assert all(serial < self._serial for serial in own)
        assert self._epoch is not None or len(self._in_flight) <= 1, "an epoch begins with one cell"
        assert self._elsewhere.keys().isdisjoint(self._unsettled), "an unsettled content has no end"

    # --- events

    def _on_event(self, event: Event, now_us: int) -> list[Effect]:
        match event:
            case TokenGiven(position, begins_tenure):
                ended = self._end_tenure() if begins_tenure else []
                return ended + self._on_token(position)
            case TokenFailed():
                self._token_until_us = None
                self._token_again_us = now_us + _TOKEN_RETRY_US
            case AppendsElsewhere(owner):
                return self._end_tenure() + self._send(owner)
            case CellWritten(position, content):
                self._on_written(position, content)
            case CellTaken(position):
                self._on_taken(position)
            case CellRead(position, content):
                return self._on_read(position, content)
            case CellFailed():
                self._on_failed(event, now_us)
            case CellDeposed(position):
                return self._on_deposed(position)
            case ContentAnswered(serial, outcomes):
                return self._on_answered(serial, outcomes)
            case unreachable:
                assert_never(unreachable)
        return []

    def _on_token(self, position: int) -> list[Effect]:
        is_late, self._token_until_us = self._token_until_us is None, None
        if position < self.state.position or position in self._in_flight:
            return []  # given by a sequencer that knows less; `_dispatch` asks again
        if is_late or not (self._waiting or self._received):
            self._filling[position] = None  # no own content goes there: fill, so that none waits
            return [WriteCell(position, JUNK)]
        assert self.in_flight < self._limits.cells_in_flight, "`_dispatch` asks below it"
        sent = self._in_flight[position] = self._next_content()
        return [WriteCell(position, sent.content)]

    def _next_content(self) -> _Sent:
        """Take items, or the content of another process, for a cell of this core."""
        is_claim = self._epoch is None
        epoch = self.state.epoch + 1 if self._epoch is None else self._epoch
        self._gave_received = bool(self._received) and not (self._waiting and self._gave_received)
        if not self._gave_received:
            return self._own_content(epoch, is_claim=is_claim)
        received = self._received.popleft()
        of = received.content
        content = Content(epoch, is_claim, of.writer, of.serial, self.stamp_us, of.items)
        return _Sent(content, received=received)

    def _own_content(self, epoch: int, *, is_claim: bool) -> _Sent:
        submitted = [self._waiting.popleft()]
        size = submitted[0].item.size_bytes
        while self._waiting:
            size += self._waiting[0].item.size_bytes
            if size > self._limits.cell_bytes:
                break
            submitted.append(self._waiting.popleft())
        items, places = _merged(submitted)
        content = Content(epoch, is_claim, self.writer, self._serial, self.stamp_us, items)
        self._serial += 1
        return _Sent(content, submitted, places)

    # --- logs that have an owner

    def _end_tenure(self) -> list[Effect]:
        """Let the next own content begin a later epoch. What this core has begun as the owner is
        unsettled, because another process may have been the owner since.
        """
        self._epoch = None
        effects: list[Effect] = [ContentApplied(ticket, None) for ticket, _ in self._received]
        self._received.clear()
        for position in list(self._in_flight):
            effects += self._unsettle(self._in_flight.pop(position))
        return effects

    def _send(self, owner: str) -> list[Effect]:
        """Send items to the owner."""
        self._token_until_us = None
        if not self._waiting:
            return []
        sent = self._own_content(0, is_claim=False)  # the owner has the epoch
        self._elsewhere[sent.serial] = sent
        return [SendContent(owner, sent.serial, sent.content)]

    def _on_deposed(self, position: int) -> list[Effect]:
        self._filling.pop(position, None)
        return self._end_tenure() if position in self._in_flight else []

    def _on_answered(self, serial: int, outcomes: Sequence[Outcome] | None) -> list[Effect]:
        if (sent := self._elsewhere.pop(serial, None)) is None:
            return []  # it was found in a cell
        return self._unsettle(sent) if outcomes is None else self._complete(sent, outcomes)

    def _unsettle(self, sent: _Sent) -> list[Effect]:
        """Note that the outcome of a content is unknown, and that it is not written any more."""
        if sent.received is not None or sent.serial < self._skipped_serial:
            return self._lose(sent)
        if any(each.ticket == _BARRIER for each in sent.submitted):
            self._barred.clear()  # another barrier is appended
        self._unsettled[sent.serial] = sent
        return []

    def _lose(self, sent: _Sent) -> list[Effect]:
        """Return that the outcomes of a content stay unknown."""
        if sent.received is not None:
            return [ContentApplied(sent.received.ticket, None)]
        tickets = [each.ticket for each in sent.submitted]
        if _BARRIER in tickets:
            self._barred.clear()
        return [ItemApplied(ticket, None) for ticket in tickets if ticket != _BARRIER]

    def _complete(self, sent: _Sent, outcomes: Sequence[Outcome]) -> list[Effect]:
        """Give the items of a content their outcomes."""
        if sent.received is not None:
            return [ContentApplied(sent.received.ticket, outcomes)]
        effects: list[Effect] = []
        for each, at in zip(sent.submitted, sent.places, strict=True):
            if each.ticket != _BARRIER:
                effects.append(ItemApplied(each.ticket, at.outcome(outcomes)))
            elif self._barred:
                self._catching_up[_BARRIER] = self._reads
        return effects

    def _begin_barrier(self) -> None:
        """Append a barrier, if contents are unsettled."""
        if self._unsettled and not self._barred:
            self._barred = set(self._unsettled)
            self._waiting.appendleft(_Submitted(_BARRIER, AskTime()))

    def _pass_barrier(self) -> None:
        """Append the items of unsettled contents that are in no cell again."""
        for serial in sorted(self._barred & self._unsettled.keys(), reverse=True):
            sent = self._unsettled.pop(serial)
            again = [each for each in sent.submitted if each.ticket != _BARRIER]
            self._waiting.extendleft(reversed(again))
        self._barred.clear()

    # --- the answers of cells

    def _on_written(self, position: int, content: bytes) -> None:
        """Note the content of a cell: an own one, or junk."""
        if position >= self.state.position:
            self._known[position] = decode(content)
        self._filling.pop(position, None)
        if (sent := self._in_flight.get(position)) is not None:
            sent.retry_us = None

    def _on_taken(self, position: int) -> None:
        if position < self.state.position or position in self._known:
            return
        self._taken.add(position)
        if position in self._in_flight:
            self._in_flight[position].retry_us = None
            self._catching_up[_OWN] = self._reads
            self._conflicts += 1

    def _on_read(self, position: int, content: bytes | None) -> list[Effect]:
        number = self._reading.pop(position, None)
        self._read_backoff_us = _RETRY_US
        if content is None:
            return self._on_unwritten(position, number)
        if position < self.state.position or position in self._known:
            return []
        if not content:
            if position > self.state.position or self._is_behind:
                return []  # the next cell is trimmed too, and the read of that cell reports it
            self._is_behind = True
            return [FellBehind()]
        self._known[position] = decode(content)
        self._taken.discard(position)
        self._filling.pop(position, None)
        if (sent := self._in_flight.get(position)) is not None:
            sent.retry_us = None
        self._ahead = min(self._ahead + 1, self._limits.read_ahead)  # doubles with each round
        return []

    def _on_unwritten(self, position: int, number: int | None) -> list[Effect]:
        self._ahead = max(1, min(self._ahead, position - self.state.position))
        if position != self.state.position or number is None:
            return []
        done = [ticket for ticket, before in self._catching_up.items() if before < number]
        for ticket in done:
            del self._catching_up[ticket]
        if _BARRIER in done:
            self._pass_barrier()
        return [CaughtUp(ticket) for ticket in done if ticket > _OWN]

    def _on_failed(self, event: CellFailed, now_us: int) -> None:
        position, is_write = event
        if not is_write:
            self._reading.pop(position, None)
            self._read_again_us = now_us + self._read_backoff_us
            self._read_backoff_us = min(2 * self._read_backoff_us, _RETRY_US_MAX)
        elif (sent := self._in_flight.get(position)) is not None:
            sent.retry_us = now_us + sent.backoff_us
            sent.backoff_us = min(2 * sent.backoff_us, _RETRY_US_MAX)
        elif position in self._filling:
            self._filling[position] = now_us + _RETRY_US_MAX

    # --- what follows

    def _advance(self) -> list[Effect]:
        """Apply the known cells in order."""
        effects: list[Effect] = []
        while (position := self.state.position) in self._known:
            content = self._known.pop(position)
            self._taken.discard(position)
            self._filling.pop(position, None)
            outcomes = self.state.apply(content)
            if (complete := self.state.close_generation()) is not None:
                effects.append(complete)
            if (sent := self._in_flight.pop(position, None)) is not None:
                effects += self._settle(sent, content, outcomes)
            elif content is not None and content.writer == self.writer and outcomes is not None:
                effects += self._recognize(content.serial, outcomes)
        return effects

    def _recognize(self, serial: int, outcomes: Sequence[Outcome]) -> list[Effect]:
        """Settle an own content that is in a cell, although this core did not write that cell."""
        for contents in (self._elsewhere, self._unsettled):
            if (sent := contents.pop(serial, None)) is not None:
                return self._complete(sent, outcomes)
        return []

    def _settle(
        self, sent: _Sent, content: Content | None, outcomes: list[Outcome] | None
    ) -> list[Effect]:
        """Give the items of a cell of this core their outcomes, or put them back."""
        if content is not None and outcomes is not None and sent.is_in(content):
            assert self._epoch in (None, content.epoch), "own contents of earlier epochs are void"
            self._conflicts = 0
            self._epoch = content.epoch
            return self._complete(sent, outcomes)
        effects: list[Effect] = []
        if content is not None and content.writer == self.writer and outcomes is not None:
            effects += self._recognize(content.serial, outcomes)
        if self._epoch is not None:
            self._epoch = self.state.epoch
        if sent.received is None:
            self._waiting.extendleft(reversed(sent.submitted))
        else:
            self._received.appendleft(sent.received)
        return effects

    def _repeat(self, now_us: int) -> list[Effect]:
        """Repeat the writes that failed."""
        effects: list[Effect] = []
        for position, sent in self._in_flight.items():
            if sent.retry_us is not None and sent.retry_us <= now_us:
                sent.retry_us = None
                effects.append(WriteCell(position, sent.content))
        for position, at in self._filling.items():
            if at is not None and at <= now_us:
                self._filling[position] = None
                effects.append(WriteCell(position, JUNK))
        return effects

    def _repair_hole(self, now_us: int) -> list[Effect]:
        """If the next cell is unwritten below an own content, read it repeatedly, and fill it after
        `fill_after_us`: its writer may be slow, or may have crashed.
        """
        position = self.state.position
        if not self._in_flight or position in self._in_flight or position in self._taken:
            self._hole = -1
            return []
        if self._hole != position:
            self._hole, self._hole_fill_us = position, now_us + self._limits.fill_after_us
            self._hole_look_us, self._hole_pause_us = now_us, self._limits.fill_after_us // _LOOKS
        if self._hole_fill_us <= now_us:
            self._hole_fill_us = now_us + self._limits.fill_after_us
            if position not in self._filling:
                self._filling[position] = None
                return [WriteCell(position, JUNK)]
        if self._hole_look_us <= now_us:
            self._hole_look_us = now_us + self._hole_pause_us
            self._hole_pause_us *= 2
            return self._read([position])
        return []

    def _read_on(self, now_us: int) -> list[Effect]:
        """Read cells that other writers took; while a caller is catching up, read the next cells
        too.
        """
        if self._read_again_us is not None and self._read_again_us <= now_us:
            self._read_again_us = None
        if self._is_behind or self._read_again_us is not None:
            return []
        wanted = sorted(self._taken)
        is_own = bool(self._waiting or self._received) and _OWN in self._catching_up
        if is_own or self._catching_up.keys() - {_OWN}:
            start = self.state.position
            wanted += range(start, start + self._ahead)
        return self._read(p for p in wanted if p not in self._known)

    def _read(self, positions: Iterable[int]) -> list[Effect]:
        effects: list[Effect] = []
        for position in positions:
            if position not in self._reading:
                self._reads += 1
                self._reading[position] = self._reads
                effects.append(ReadCell(position))
        return effects

    def _dispatch(self, now_us: int) -> list[Effect]:
        """Ask for a cell if items wait. If the sequencer does not answer in time, take the next
        cell that this core does not know to be written. Without tokens, writers compete for cells.
        """
        at_least = max(self.state.position, max(self._in_flight, default=-1) + 1)
        if self._token_until_us is not None:
            return self._on_token(at_least) if self._token_until_us <= now_us else []
        if self._token_again_us is not None and self._token_again_us > now_us:
            return []
        self._token_again_us = None
        is_full = self.in_flight >= self._limits.cells_in_flight
        if is_full or (self._epoch is None and self._in_flight):
            return []  # an epoch begins with one cell
        if not (self._waiting or self._received):
            return []
        if _OWN in self._catching_up:
            return []  # until the core has caught up, another writer probably has the next cell
        self._token_until_us = now_us + self._limits.token_after_us
        skipped = min(max(0, self._conflicts - 1), _SKIPPED_MAX)
        if self._waiting and isinstance(self._waiting[0].item, End):
            skipped = 0  # others may have stopped, so cells left to them would stay unwritten
        return [AskToken(at_least + skipped)]
