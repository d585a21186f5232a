"""Sequencers of the consensus core, their disks and the messages between them, as one value.

A `State` is immutable: each node is a pickled `Machine`, so a step costs the copy of one node, and
equal states have equal keys. A step of a node handles one input, gets `Persisted` for each frame
that it writes, and syncs; messages leave. Or the node crashes before the sync: only messages that
promise nothing left, and any prefix of the written frames is kept. Messages stay on their way for
any time; they are delivered in any order, also after restarts of their receiver, or never.

The checks use their own evidence: the frames on the disks, decoded here, and the entries that
primaries called committed in synced steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple

import msgspec

from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber, majority
from indilog.config import Config, node_config
from indilog.kernel.metalog import Entry, NewRecords, NewView, decode_entry
from indilog.kernel.view import View as ClusterView
from indilog.kernel.view import view_of
from indilog.roles.role import Effect, FrameKind, Ignore, Location, Persist, Received, Send
from indilog.wire.sequencer_messages import MetalogAppend, MetalogStored, Seal, Sealed
from indilog_ordering.consensus import Consensus
from indilog_ordering.metalog_state import decode_state
from indilog_ordering.stored_metalog import StoredMetalog

CONFIG: Final = Config(node=node_config(resend_s=1.0, metalog_entries_in_flight_max=2))
CHANGING: Final = Config(node=node_config(resend_s=1.0, metalog_entries_in_flight_max=3))
"""Where sequencers are added and removed: two fences and a change are in flight at once."""
NOW: Final = Instant(0.0)
LATER: Final = Instant(1e6)
NOWHERE: Final = Location(0, 0, 0)

CoreMessage = Seal | Sealed | MetalogAppend | MetalogStored


class ConsensusError(AssertionError):
    """A guarantee of the core is broken."""


class Letter(NamedTuple):
    """A message on its way, from one incarnation of its sender."""

    sender: int
    to: int
    incarnation: int
    payload: bytes
    """The encoded message, so that letters can be compared."""


class Frame(NamedTuple):
    """A frame on a disk."""

    kind: FrameKind
    payload: bytes


class Question(NamedTuple):
    """A tail that was asked for, and how many entries any primary had called committed then."""

    round: int
    committed: int


class Committed(NamedTuple):
    """An entry that a primary of `term` called committed."""

    entry: bytes
    term: int


class Node(NamedTuple):
    """A node between two steps."""

    incarnation: int
    disk: tuple[Frame, ...]
    machine: bytes
    question: Question | None = None
    lost: frozenset[tuple[int, bytes]] = frozenset()
    """Positions and entries that were on disks which were wiped since."""


class Left(NamedTuple):
    """How many steps of each kind may still happen."""

    starts: int
    crashes: int
    wipes: int
    proposals: int
    timeouts: int
    questions: int
    repeats: int
    changes: int = 0
    """Sequencers that are added or removed."""


class State(NamedTuple):
    """All nodes, all messages on their way, and what was committed."""

    nodes: tuple[Node, ...]
    letters: frozenset[Letter]
    committed: tuple[Committed, ...]
    left: Left
    term: int
    voting: int = 0
    """How many of the nodes, the first ones, are sequencers at first; the others may be added."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[CoreMessage]] = msgspec.msgpack.Decoder(CoreMessage)


def names(count: int) -> tuple[NodeId, ...]:
    """Return the names of the nodes."""
    return tuple(NodeId(f"sequencer-{number}") for number in range(count))


class View(NamedTuple):
    """What a primary knows after a step."""

    term: int
    adopted: bool
    committed: int
    entries: tuple[bytes, ...]


class Taken(NamedTuple):
    """The outcome of a step of a node, for any state of the other nodes.

    Attributes:
        early: messages that leave before the sync.
        late: those that leave after it.
        view: of a primary that is not deposed; None: it is none.
        answered: the question whose round is confirmed.
    """

    node: Node
    frames: tuple[Frame, ...]
    early: tuple[Letter, ...]
    late: tuple[Letter, ...]
    view: View | None
    answered: Question | None = None


def kind_of(letter: Letter) -> type[CoreMessage]:
    """Return the kind of message of a letter."""
    return type(_decoder.decode(letter.payload))


@lru_cache
def first_view(voting: int) -> ClusterView:
    """Return the view with which all nodes start."""
    return view_of(sequencers=voting)


def begin(count: int, left: Left, *, spares: int = 0) -> State:
    """Return the state of nodes that start for the first time, none of them a primary; the last
    `spares` are no sequencers yet.
    """
    voting, count = count, count + spares
    known = range(count)
    nodes = tuple(_started(count, number, 1, (), voting=voting, lost=False) for number in known)
    return State(nodes, frozenset(), (), left, 1, voting)


def lead(state: State, number: int) -> State:
    """Let a running node be the primary of a new term."""
    term = state.term + 1
    taken = _leading(len(state.nodes), number, state.nodes[number], term)
    return _after(state._replace(term=term), number, taken)


def restart(state: State, number: int, disk: tuple[Frame, ...], *, lost: bool = False) -> State:
    """Restart a node as a follower."""
    before, incarnation = state.nodes[number], state.term + 1
    count, voting = len(state.nodes), state.voting
    # A node that lost its disk knows the view in the metadata store; others may know an old one.
    installed = [one.entry for one in state.committed if _sequencers_in(one.entry) is not None]
    known = installed[-1] if installed and lost else b""
    node = _started(count, number, incarnation, disk, voting=voting, lost=lost, known=known)
    had = entries_of(before.disk) if lost else ()
    gone = {(entry.position, encoded(entry)) for entry in had}
    node = node._replace(lost=before.lost | gone)
    return _replace(state, number, node)._replace(term=incarnation)


def deliver(
    state: State, letter: Letter, *, crash: int | None = None, repeat: bool = False
) -> State:
    """Deliver a message. `crash`: how many of the frames that follow are kept by a crash."""
    letters = state.letters if repeat else state.letters - {letter}
    number = letter.to
    taken = _delivered(len(state.nodes), number, state.nodes[number], letter)
    return _after(state._replace(letters=letters), number, taken, crash)


def timeout(state: State, number: int) -> State | None:
    """Let the deadline of a node come; None: it has none."""
    taken = _timed_out(len(state.nodes), number, state.nodes[number])
    return None if taken is None else _after(state, number, taken)


def propose(state: State, number: int, *, crash: int | None = None) -> State | None:
    """Let a primary propose an entry; None: it cannot."""
    node, proposal = state.nodes[number], state.left.proposals
    taken = _proposing(len(state.nodes), number, node, proposal)
    return None if taken is None else _after(state, number, taken, crash)


def change(state: State, number: int, changed: int) -> State | None:
    """Let a primary add or remove the sequencer `changed`; None: it cannot."""
    taken = _changing(len(state.nodes), number, state.nodes[number], changed)
    if taken is None:
        return None
    after = _after(state, number, taken)
    # The primary may not know yet that a node lost its disk. The change would then be a further
    # loss, if too few sequencers remain without it.
    return after if all(_may_lose(after, nodes, 0) for nodes in configurations(after)) else None


def ask(state: State, number: int) -> State | None:
    """Ask a primary for the tail; None: it cannot answer."""
    taken = _asked(len(state.nodes), number, state.nodes[number], len(state.committed))
    return None if taken is None else _after(state, number, taken)


# --- a step of a node; equal ones are computed once


_cached: Final = lru_cache(100_000)


@_cached
def _delivered(count: int, number: int, node: Node, letter: Letter) -> Taken:
    message = _decoder.decode(letter.payload)
    event = Received(names(count)[letter.sender], message, Epoch(letter.incarnation))
    core = _machine(node)
    return _taken(count, number, node, core, core.on_received(event, message))


@_cached
def _leading(count: int, number: int, node: Node, term: int) -> Taken:
    core = _machine(node)
    effects = core.lead(Epoch(term))
    return _taken(count, number, node._replace(question=None), core, effects)


@_cached
def _timed_out(count: int, number: int, node: Node) -> Taken | None:
    core = _machine(node)
    return None if core.deadline() is None else _taken(count, number, node, core, [], LATER)


@_cached
def _proposing(count: int, number: int, node: Node, proposal: int) -> Taken | None:
    core = _machine(node)
    leader = core.leader
    if leader is None or not leader.adopted or not leader.has_room:
        return None
    return _taken(count, number, node, core, [leader.append(_entry(core, proposal=proposal))])


@_cached
def _changing(count: int, number: int, node: Node, changed: int) -> Taken | None:
    core = _machine(node)
    leader = core.leader
    if leader is None or leader.deposed or not leader.adopted or not leader.has_room:
        return None
    name = names(count)[changed]
    rest = tuple(one for one in leader.nodes if one != name)
    nodes = rest if name in leader.nodes else (*leader.nodes, name)
    if not leader.can_install(nodes):
        return None
    before, metalog = core.member.view, core.member.metalog
    view = msgspec.structs.replace(
        before, number=ViewNumber(before.number + 1), sequencers=tuple(sorted(nodes))
    )
    entry = NewView(len(metalog), view.number, core.member.term, view)
    return _taken(count, number, node, core, [leader.append(entry)])


@_cached
def _asked(count: int, number: int, node: Node, committed: int) -> Taken | None:
    core = _machine(node)
    if (leader := core.leader) is None or not leader.settled or node.question is not None:
        return None
    asked = node._replace(question=Question(leader.confirm(), committed))
    return _taken(count, number, asked, core, [])


def _entry(core: Consensus, *, proposal: int) -> NewRecords:
    metalog = core.member.metalog
    counts = {ShardId(0): proposal} if proposal else {}
    return NewRecords(len(metalog), ViewNumber(1), core.member.term, counts)


def _taken(
    count: int,
    number: int,
    node: Node,
    core: Consensus,
    effects: list[Effect],
    now: Instant = NOW,
) -> Taken:
    """Complete the step of a node as its role and its shell do."""
    core.retire()
    leader = core.leader
    out = _Out([], [], [])
    while True:
        effects += core.advance(now)
        if leader is not None and leader.adopted and not (leader.deposed or leader.alone):
            has_fence = leader.recovered < len(core.member.metalog)
            if not has_fence:
                effects.append(leader.append(_entry(core, proposal=0)))
            leader.invite(names(count))
        effects += core.replicate(now)
        tokens = _perform(effects, count, number, node.incarnation, out)
        core.check_invariants()
        if not tokens:
            break
        for token in tokens:
            core.member.metalog.on_persisted(token)
        effects = []
    answered, question, view = None, node.question, None
    if leader is not None and not leader.deposed:
        metalog = core.member.metalog
        entries = tuple(map(encoded, metalog.page(0, len(metalog))))
        view = View(core.member.term, leader.adopted, leader.committed, entries)
        if question is not None and leader.confirmed >= question.round:
            answered, question = question, None
    _rest(core)
    done = Node(node.incarnation, (*node.disk, *out.frames), _pickled(core), question, node.lost)
    early, late = tuple(out.early), tuple(out.late)
    return Taken(done, tuple(out.frames), early, late, view, answered)


class _Out(NamedTuple):
    """What leaves a node in a step."""

    frames: list[Frame]
    early: list[Letter]
    late: list[Letter]


def _perform(
    effects: list[Effect], count: int, number: int, incarnation: int, out: _Out
) -> list[int]:
    """Add the messages and frames of effects to `out`; return the tokens of the frames."""
    tokens: list[int] = []
    for effect in effects:
        match effect:
            case Persist(kind, payload, token):
                out.frames.append(Frame(kind, payload))
                tokens.append(token)
            case Send(to, message):
                letter = Letter(
                    number, names(count).index(to), incarnation, _encoder.encode(message)
                )
                (out.late if message.promises else out.early).append(letter)
            case Ignore():
                pass
            case other:
                raise AssertionError(f"the core has no reason for {other}")
    return tokens


def _rest(core: Consensus) -> None:
    """Forget the times of resends, but not that they are due, so that states can be compared."""
    if (leader := core.leader) is None:
        return
    for resend in (leader._seals, *(member.resend for member in leader._members.values())):
        resend._pause_s = resend._base_s
        if resend.due is not None:
            resend.due = Instant(1.0)


@_cached
def _started(
    count: int,
    number: int,
    incarnation: int,
    disk: tuple[Frame, ...],
    *,
    voting: int,
    lost: bool,
    known: bytes = b"",
) -> Node:
    core = _recovered(count, number, incarnation, disk, voting=voting, lost=lost, known=known)
    frames: list[Frame] = []
    for effect in core.begin():
        assert isinstance(effect, Persist)
        frames.append(Frame(effect.kind, effect.payload))
        core.member.metalog.on_persisted(effect.token)
    return Node(incarnation, (*disk, *frames), _pickled(core))


def _recovered(
    count: int,
    number: int,
    incarnation: int,
    disk: tuple[Frame, ...],
    *,
    voting: int,
    lost: bool,
    known: bytes,
) -> Consensus:
    metalog = StoredMetalog(sole=voting == 1, kept=8)
    if lost:
        metalog.doubt()
    for kind, payload in disk:
        metalog.recover(payload, kind)
    metalog.recovered()
    entry = decode_entry(known) if known else None
    view = entry.following if isinstance(entry, NewView) else first_view(voting)
    config = CHANGING if count > voting else CONFIG
    return Consensus(names(count)[number], view, metalog, Epoch(incarnation), config)


def _pickled(core: Consensus) -> bytes:
    config, core._config = core._config, None  # type: ignore[assignment]
    try:
        return pickle.dumps(core, protocol=5)
    finally:
        core._config = config


def _machine(node: Node) -> Consensus:
    core: Consensus = pickle.loads(node.machine)
    is_first = core.member._page_entries == CONFIG.node.ordering.metalog_entries_in_flight_max
    core._config = CONFIG if is_first else CHANGING
    return core


# --- a step of the whole


def _after(state: State, number: int, taken: Taken, crash: int | None = None) -> State:
    """Return the state after a step, and check what holds then.

    Raises:
        ConsensusError: a guarantee is broken.
    """
    if crash is not None:
        disk = state.nodes[number].disk + taken.frames[:crash]
        return restart(state._replace(letters=state.letters.union(taken.early)), number, disk)
    state = _replace(state, number, taken.node)
    state = state._replace(letters=state.letters.union(taken.early, taken.late))
    return _checked(state, taken)


def _replace(state: State, number: int, node: Node) -> State:
    nodes = (*state.nodes[:number], node, *state.nodes[number + 1 :])
    return state._replace(nodes=nodes)


# --- what holds


def _checked(state: State, taken: Taken) -> State:
    """Check the disks, and what the primary that took the step calls committed."""
    metalogs = [entries_of(node.disk) for node in state.nodes]
    if taken.frames:
        _check_log_matching(metalogs)
    if (view := taken.view) is None:
        return state
    committed = list(state.committed)
    configured = configuration(state, view.entries)
    for position, kept in enumerate(committed if view.adopted else ()):
        is_here = position < len(view.entries) and view.entries[position] == kept.entry
        if kept.term <= view.term and not is_here:
            raise ConsensusError(f"the primary lacks the committed entry {position}")
    for position, entry in enumerate(view.entries[: view.committed]):
        if position < len(committed):
            if committed[position].entry != entry:
                raise ConsensusError(f"two entries were committed at {position}")
            continue
        having = sum(
            (position, entry) in state.nodes[number].lost
            or (position < len(metalogs[number]) and encoded(metalogs[number][position]) == entry)
            for number in configured
        )
        if having < majority(configured):
            raise ConsensusError(f"{having} disks have the committed entry {position}")
        committed.append(Committed(entry, view.term))
    if taken.answered is not None and view.committed < taken.answered.committed:
        raise ConsensusError("a tail was answered that is below a committed entry")
    return state._replace(committed=tuple(committed))


def _check_log_matching(metalogs: Sequence[Sequence[Entry]]) -> None:
    """Entries of one term at one position are equal, and so are those before them (Raft 5.3)."""
    for one in metalogs:
        for other in metalogs:
            if one is other:
                continue
            for position in reversed(range(min(len(one), len(other)))):
                if one[position].epoch == other[position].epoch:
                    if one[: position + 1] != other[: position + 1]:
                        raise ConsensusError(f"two copies with one entry at {position} differ")
                    break


def encoded(entry: Entry) -> bytes:
    """Return the bytes of an entry."""
    return _encoder.encode(entry)


@_cached
def entries_of(disk: tuple[Frame, ...]) -> tuple[Entry, ...]:
    """Return the entries that frames add up to."""
    entries: list[Entry] = []
    for kind, payload in disk:
        if kind is FrameKind.METALOG:
            entry = decode_entry(payload)
            entries[entry.position :] = [entry]
        else:
            assert decode_state(payload).base is None, "no entries are folded here"
    return tuple(entries)


def configuration(state: State, entries: Sequence[bytes]) -> tuple[int, ...]:
    """Return the sequencers after these entries, as numbers of nodes."""
    for entry in reversed(entries):
        if (nodes := _sequencers_in(entry)) is not None:
            return tuple(names(len(state.nodes)).index(node) for node in nodes)
    return tuple(range(state.voting))


@_cached
def _sequencers_in(entry: bytes) -> tuple[NodeId, ...] | None:
    decoded = decode_entry(entry)
    return decoded.following.sequencers if isinstance(decoded, NewView) else None


def configurations(state: State) -> set[tuple[int, ...]]:
    """Return the newest configuration of each copy, and those with which a node may have started. A
    primary that lost its copy ends with an error if too few nodes of that configuration have their
    disks.
    """
    copies = [tuple(map(encoded, entries_of(node.disk))) for node in state.nodes]
    committed = tuple(kept.entry for kept in state.committed)
    copies += [committed[:end] for end in range(len(committed) + 1)]
    return {configuration(state, copy) for copy in copies}


@_cached
def is_learner(node: Node) -> bool:
    """Whether the newest state on a disk marks a learner."""
    states = [
        decode_state(frame.payload) for frame in node.disk if frame.kind is not FrameKind.METALOG
    ]
    return bool(states) and states[-1].learner


# --- all next steps


class Step(NamedTuple):
    """Something that may happen next."""

    name: str
    take: Callable[[], State | None]
    """Returns the state that follows; None: it cannot happen now."""
    letter: Letter | None = None
    """The message that the step is about."""

    def shown(self) -> str:
        """Return the step as text."""
        if (letter := self.letter) is None:
            return self.name
        message = _decoder.decode(letter.payload)
        return f"{self.name}: {letter.sender} -> {letter.to} {message}"


def deliveries(state: State) -> Iterator[Step]:
    """Yield the delivery of each message."""
    for letter in sorted(state.letters):
        yield Step("deliver", partial(deliver, state, letter), letter)


def faults(state: State) -> Iterator[Step]:
    """Yield all other steps."""
    left = state.left
    for letter in sorted(state.letters):
        if left.crashes:
            crashed = partial(deliver, _spent(state, crashes=1), letter, crash=0)
            yield Step("crash before the sync that follows", crashed, letter)
        if left.repeats:
            repeated = partial(deliver, _spent(state, repeats=1), letter, repeat=True)
            yield Step("deliver, and keep a copy", repeated, letter)
    for number in range(len(state.nodes)):
        yield from _of_node(state, number)


def _of_node(state: State, number: int) -> Iterator[Step]:
    left, node = state.left, state.nodes[number]
    if left.starts:
        yield Step(f"{number} starts a term", partial(lead, _spent(state, starts=1), number))
    if left.crashes:
        spent = _spent(state, crashes=1)
        yield Step(f"{number} restarts", partial(restart, spent, number, node.disk))
    if left.wipes and _can_lose(state, number):
        spent = _spent(state, wipes=1)
        yield Step(f"{number} is wiped", partial(restart, spent, number, (), lost=True))
    if left.proposals:
        yield Step(f"{number} proposes", partial(propose, _spent(state, proposals=1), number))
        if left.crashes:
            spent = _spent(state, proposals=1, crashes=1)
            yield Step(f"{number} proposes and crashes", partial(propose, spent, number, crash=0))
    for other in range(len(state.nodes)) if left.changes else ():
        spent = _spent(state, changes=1)
        yield Step(f"{number} adds or removes {other}", partial(change, spent, number, other))
    if left.timeouts:
        yield Step(f"{number} resends", partial(timeout, _spent(state, timeouts=1), number))
    if left.questions:
        spent = _spent(state, questions=1)
        yield Step(f"{number} is asked for the tail", partial(ask, spent, number))


def _can_lose(state: State, number: int) -> bool:
    """Whether a node may lose its disk, so that enough sequencers of each configuration stay."""
    if is_learner(state.nodes[number]):
        return True
    return all(_may_lose(state, nodes, number in nodes) for nodes in configurations(state))


def _may_lose(state: State, nodes: tuple[int, ...], more: int) -> bool:
    """Whether a majority of `nodes` has its disk, also after `more` are lost."""
    lost = sum(is_learner(state.nodes[other]) for other in nodes)
    return lost + more <= (len(nodes) - 1) // 2


def steps(state: State) -> Iterator[Step]:
    """Yield all that may happen next."""
    yield from deliveries(state)
    yield from faults(state)


def _spent(state: State, **spent: int) -> State:
    left = {name: getattr(state.left, name) - count for name, count in spent.items()}
    return state._replace(left=state.left._replace(**left))
