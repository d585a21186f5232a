"""A simulated log that one process at a time appends to, on the storage nodes of
`tests.cells.chain_world`. Its processes take the log from each other.

A storage node loses its disk only if enough other replicas keep what was acknowledged, and no
change of the layout is under way that could leave one of them out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import node_config
from indilog.kernel.cell_layout import CellLayout, owned_layout
from indilog.roles.role import Answer, Received, Send
from indilog_cells import core_events
from indilog_cells.cells import CellsError
from indilog_cells.chain_cells import ChainCells
from indilog_cells.chain_upkeep import ChainUpkeep
from indilog_cells.content import decode
from indilog_cells.layout_changes import LayoutChanges, Place
from indilog_cells.outcomes import AppendedContent, decode_appended, encode_appended
from indilog_cells.owned_cells import DeposedError, Elsewhere, OwnedCells, Tenure
from indilog_cells.owned_upkeep import OwnedUpkeep
from indilog_cells.sequencer import TokenSequencer
from indilog_compute.owner_appends import OwnerAppends, ReceivedAppend
from tests.cells.chain_world import (
    CHECK_US,
    FOLDER,
    NODES,
    REPLACE_S,
    ChainProcess,
    ChainWorld,
    Keeper,
    Net,
    cells_of,
    in_turn,
    new_part,
)
from tests.cells.world import Process

RECORDED_US = 200_000
"""So long after its process crashed a layout may still be recorded."""


class OwnedWorld(ChainWorld):
    """A run of one seed; see `ChainWorld`.

    Attributes:
        copies: replicas of a cell.
        claims: how many tenures began.
        contents_sent: contents that the owner acknowledged to another process.
        tenures_lost: share of the looks for the owner that take its node for one that left.
        window: of `OwnedCells`.
        changing: changes of the layout that are under way.
        changed_us: when the last one ended, or its process crashed.
    """

    def __init__(self, seed: int, **sizes: int) -> None:
        self.copies = [1, 2, 3, 3, 3, 3, 4][seed % 7]
        self.changing = 0
        self.changed_us = 0
        super().__init__(seed, **sizes)
        self.claims = self.contents_sent = 0
        self.tenures_lost = self.random.choice([0.02, 0.3, 0.9])
        self.window = self.random.choice([10, 16, 40])

    def first_layout(self) -> CellLayout:
        return owned_layout(FOLDER, NODES, self.copies)

    def made_process(self, number: int) -> Process:
        return OwnedProcess(self, number)

    def made_keeper(self) -> Keeper:
        return OwnedKeeper(self)

    def _may_lose(self, node: NodeId) -> bool:
        if self.changing or self.now_us < self.changed_us + RECORDED_US:
            return False
        left = [
            each
            for each in self.layout.complete
            if each.node != node and self._has(each.node, each.space)
        ]
        return len(left) > self.layout.lacking

    def faults_at_end(self) -> list[str]:
        """Return what is wrong with the cells of the last layout, and complete `store.first`."""
        found = self.copy_faults[:]
        layout = self.layout
        kept = {
            each: cells_of(self.nodes[each.node].store, each.space) for each in layout.chains[0]
        }
        end = max([*self.store.first, *(p for has, _ in kept.values() for p in has), 0]) + 1
        for position in range(max(floor for _, floor in kept.values()), end):
            contents = {has[position] for has, _ in kept.values() if position in has}
            count = sum(position in kept[each][0] for each in layout.complete)
            if len(contents) > 1:
                found.append(f"cell {position} has {len(contents)} contents")
            elif (seen := self.store.first.get(position)) is None:
                if count:
                    self.store.first[position] = contents.pop()
            elif contents != {seen}:
                found.append(f"cell {position} is lost, or has another content")
            elif count < len(layout.complete) - layout.lacking:
                found.append(f"cell {position} is on {count} replicas only")
        return found


class Changes(LayoutChanges):
    """Changes of the layout, which the world knows of."""

    def __init__(self, net: Net, world: OwnedWorld) -> None:
        super().__init__(net, net, folder=FOLDER, copies=world.copies, available=lambda: NODES)
        self._world = world

    async def change(
        self,
        layout: CellLayout,
        revised: CellLayout,
        *,
        lost: Collection[Place] = (),
        adds: bool = False,
        only_if_better: bool = False,
    ) -> CellLayout | None:
        self._world.changing += 1
        try:
            return await super().change(
                layout, revised, lost=lost, adds=adds, only_if_better=only_if_better
            )
        finally:
            self._world.changing -= 1
            self._world.changed_us = self._world.now_us


SETTINGS = node_config(cell_timeout_s=0.06, resend_s=0.01, resend_s_max=0.03, append_timeout_s=0.6)
_INCARNATION: Final = 1 << 16
"""Requests of an incarnation are numbered from the incarnation times this."""


@dataclass
class OwnedProcess(ChainProcess):
    """A process that lets the owner of the log append, or takes the log from it."""

    upkeep: OwnedUpkeep = field(init=False)
    tokens: TokenSequencer = field(init=False)
    appends: OwnerAppends = field(init=False)
    started: int = 0
    token_after_us: int = 1 << 60
    received: dict[int, ReceivedAppend] = field(default_factory=dict)

    def start(self) -> None:
        self.tokens = TokenSequencer()
        self.appends = OwnerAppends(SETTINGS)
        self.received.clear()
        super().start()
        self.started = self.incarnation
        self.appends.number_from(self.incarnation * _INCARNATION)
        self.upkeep = upkeep_of(self.owned_cells, self.net, self.owned)
        self._check(self.incarnation)
        self._serve(self.appends.take(self._serve))

    @property
    def is_up(self) -> bool:
        return self.started == self.incarnation

    @property
    def node(self) -> NodeId:
        return NodeId(str(self.number))

    @property
    def owned_cells(self) -> OwnedCells:
        assert isinstance(self.cells, OwnedCells)
        return self.cells

    @property
    def sequencer(self) -> TokenSequencer:
        """A sequencer of this process alone, as in a platform: other processes race for cells."""
        return self.tokens

    def _check(self, own: int) -> None:
        """Check the layout and repair what replicas lack, as the owner does, periodically."""
        if own == self.incarnation:
            again = partial(self._check, own)
            self._run(self._care(), lambda _: self.world.after(CHECK_US, again))

    async def _care(self) -> None:
        if self.owned_cells.is_owner:
            await self.upkeep.check()
        await self.owned_cells.repair()

    def made_cells(self) -> ChainCells:
        world = self.owned
        names = itertools.count()

        def new_owner() -> str:
            return f"{self.number}/{self.incarnation}.{next(names)}"

        return OwnedCells(
            self.net,
            self.net,
            Changes(self.net, world),
            new_owner=new_owner,
            may_claim=self._may_claim,
            part_bytes=1 << 20,
            new_part=new_part(),
            window=world.window,
        )

    @property
    def owned(self) -> OwnedWorld:
        assert isinstance(self.world, OwnedWorld)
        return self.world

    def _may_claim(self, owner: str) -> bool:
        number, _, _ = owner.partition("/")
        return number in ("", str(self.number)) or self.world.lost(self.owned.tenures_lost)

    # --- as `CellDriver`

    def _ask_token(self, at_least: int) -> None:
        own = self.incarnation

        def ask() -> None:
            if own == self.incarnation:
                self._run(self.owned_cells.acquire(), partial(self._acquired, at_least))

        self.world.after(self.world.delay_us(), ask)

    def _acquired(self, at_least: int, found: object) -> None:
        if isinstance(found, CellsError):
            self._handle([core_events.TokenFailed()])
        elif isinstance(found, Elsewhere):
            self._handle([core_events.AppendsElsewhere(found.owner)])
        else:
            assert isinstance(found, Tenure)
            begins = found != self.owned_cells.tenure
            if begins:
                self.owned.claims += 1
                self.owned_cells.tenure, self.tokens = found, TokenSequencer()
            self._handle([core_events.TokenGiven(self.tokens.take(at_least), begins)])

    def _fail(self, position: int, is_write: bool, error: CellsError) -> None:
        if not isinstance(error, DeposedError):
            super()._fail(position, is_write, error)
            return
        own = self.incarnation

        def depose() -> None:
            if own == self.incarnation and self.owned_cells.tenure == error.tenure:
                self._handle([core_events.CellDeposed(position)])

        self.world.after(0, depose)

    def _send_content(self, effect: core_events.SendContent) -> None:
        owner, serial, content = effect
        node, _, _ = owner.partition("/")

        def answered(found: object) -> None:
            if isinstance(found, bytes):
                self.owned.contents_sent += 1
                self._handle([core_events.ContentAnswered(serial, decode_appended(found).outcomes)])
                return
            self.owned_cells.give_up_on(owner)
            self._handle([core_events.ContentAnswered(serial, None)])

        self.appends.send(NodeId(node), FOLDER, owner, content, answered)
        self._advance()

    def _serve(self, received: Any) -> None:  # noqa: ANN401 - a list of requests
        """Append the contents of other processes, as `CellDriver.append_content`."""
        for each in received:
            content = decode(each.message.content)
            assert content is not None
            if not self.owned_cells.appends_in(each.message.owner):
                self.appends.answer(each, None)
                continue
            self.tickets += 1
            self.received[self.tickets] = each
            self.core.submit_content(self.tickets, content)
        self._handle([])
        self._advance()
        if received and (more := self.appends.take(self._serve)):
            self._serve(more)

    def _answer_content(self, effect: core_events.ContentApplied) -> None:
        ticket, outcomes = effect
        answer = None if outcomes is None else encode_appended(AppendedContent(0, outcomes))
        self.appends.answer(self.received.pop(ticket), answer)
        self._advance()

    # --- the messages of `OwnerAppends`

    def _advance(self) -> None:
        own = self.incarnation
        self._send_all(self.appends.advance(self._now()))
        self.appends.check_invariants()
        if (deadline := self.appends.deadline()) is not None:
            delay_us = max(1, int(deadline * 1e6) + 1 - self.world.now_us)
            self.world.after(delay_us, lambda: self._advance() if own == self.incarnation else None)

    def _now(self) -> Instant:
        return Instant(self.world.now_us / 1e6)

    def _send_all(self, effects: Sequence[object]) -> None:
        own = self.incarnation

        def answer(effect: Answer) -> None:
            if own == self.incarnation:
                assert callable(effect.waiter)
                effect.waiter(effect.outcome)

        for effect in effects:
            if isinstance(effect, Answer):
                self.world.after(0, partial(answer, effect))
            elif isinstance(effect, Send):
                peer = self.world.processes[int(effect.to)]
                assert isinstance(peer, OwnedProcess)
                event = Received(self.node, effect.message, Epoch(own))
                for _ in range(2 if self.world.lost(0.1) else 1):
                    if not self.world.lost(5 * self.world.faults.request_lost):
                        delay_us = self.world.delay_us() * self.world.random.choice([1, 1, 1, 20])
                        self.world.after(delay_us, partial(peer.receive, event))

    def receive(self, event: Received) -> None:
        """Take a message of another process, unless this one is down."""
        if self.is_up:
            self._send_all(self.appends.on_message(event, self._now()))
            self._advance()


class OwnedKeeper(Keeper):
    """Checks the layout of the log."""

    def made_upkeep(self) -> ChainUpkeep[Any]:
        world = self.world
        assert isinstance(world, OwnedWorld)
        changes = Changes(self.net, world)
        cells = OwnedCells(
            self.net, self.net, changes, new_owner=str, may_claim=lambda _: False,
            part_bytes=1 << 20, new_part=new_part(), window=world.window,
        )  # fmt: skip
        return upkeep_of(cells, self.net, world)


def upkeep_of(cells: OwnedCells, net: Net, world: OwnedWorld) -> OwnedUpkeep:
    """Return the upkeep of the layout for one process."""
    return OwnedUpkeep(
        cells,
        net,
        net,
        Changes(net, world),
        in_turn,
        replace_after_s=REPLACE_S,
        clock=lambda: world.now_us / 1e6,
    )
