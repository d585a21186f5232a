"""Two searches through the states of a few sequencers: all steps up to a depth, and random walks.

The exhaustive search starts at some *situations*, because an election alone takes a dozen steps.
From each it takes every possible step, in every order, up to a number of steps. It visits equal
states once. A walk takes random steps up to a great depth, with more faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Final, NamedTuple

from indilog.base.errors import DataLossError
from indilog.wire.sequencer_messages import Seal, Sealed
from tests.consensus.world import (
    Left,
    Letter,
    State,
    Step,
    begin,
    change,
    deliver,
    faults,
    kind_of,
    lead,
    propose,
    restart,
    steps,
    timeout,
)

NOTHING: Final = Left(0, 0, 0, 0, 0, 0, 0)
CHANGES: Final = NOTHING._replace(changes=4)


class Found(NamedTuple):
    """A broken guarantee, and the steps that lead to it."""

    what: str
    steps: tuple[str, ...]


class Explored(NamedTuple):
    """The result of a search."""

    states: int
    found: Found | None


# --- situations


def settled(state: State, only: Callable[[Letter], bool] = lambda _: True) -> State:
    """Deliver all messages, or those of one kind, until none is left."""
    while letters := [letter for letter in state.letters if only(letter)]:
        oldest = min(letters, key=lambda letter: (letter.incarnation, letter.payload))
        state = deliver(state, oldest)
    return state


def _between(*numbers: int) -> Callable[[Letter], bool]:
    return lambda letter: letter.sender in numbers and letter.to in numbers


def _seals(*numbers: int) -> Callable[[Letter], bool]:
    """Elect a primary, and deliver none of its entries."""
    between = _between(*numbers)
    return lambda letter: between(letter) and kind_of(letter) in (Seal, Sealed)


def _proposed(state: State, number: int) -> State:
    after = propose(state, number)
    assert after is not None, "it leads"
    return after


def _changed(state: State, number: int, changed: int) -> State:
    after = change(state, number, changed)
    assert after is not None, "it leads, and its last change is committed"
    return after


def _silent(state: State) -> State:
    """Drop all messages on their way."""
    return state._replace(letters=frozenset())


def situations(left: Left) -> Iterator[tuple[str, State]]:
    """Yield the states from which all steps are taken."""
    empty = begin(3, left)
    yield "three nodes start for the first time", empty
    leads = settled(lead(empty, 0))
    yield "a primary has settled", leads
    yield "an entry is on its way", _proposed(leads, 0)
    partly = _silent(settled(_proposed(leads, 0), _between(0, 1)))
    yield "an entry is committed by two of three", partly
    yield "a node that lacks a committed entry starts a term", lead(partly, 2)
    ahead = _silent(_proposed(_proposed(leads, 0), 0))
    other = _silent(settled(lead(ahead, 1), _seals(1, 2)))
    yield "two older primaries have entries that no other has", other
    yield "another starts a term", lead(other, 2)
    again = settled(lead(other, 0), _seals(0, 2))
    yield "one of them replicates its old entries (Raft, Figure 8)", lead(again, 1)
    asked = settled(lead(leads, 1), lambda letter: letter.to == 2)
    yield "a node promised a newer term, whose primary has not heard of it", asked
    wiped = restart(asked, 2, (), lost=True)
    yield "the same, and then it was wiped", wiped
    yield "a node that had a committed entry was wiped", restart(partly, 1, (), lost=True)
    wiped = lead(restart(partly, 1, (), lost=True), 2)
    yield "a node without that entry starts a term", wiped
    yield "the primary was wiped", lead(restart(settled(partly), 0, (), lost=True), 0)


def changes(left: Left) -> Iterator[tuple[str, State]]:
    """Yield states in which sequencers are added and removed."""
    leads = settled(lead(begin(3, left, spares=1), 0))
    yield "a sequencer may be added", leads
    added = _changed(leads, 0, 3)
    yield "a sequencer is being added", added
    partly = _silent(settled(added, _between(0, 1, 3)))
    yield "a sequencer without the addition starts a term", lead(partly, 2)
    yield "the new sequencer starts a term", lead(partly, 3)
    yield "the new sequencer was wiped", restart(settled(added), 3, (), lost=True)
    own = _changed(settled(added), 0, 0)
    yield "the primary is being removed", own
    yield "the primary was removed, and another starts a term", lead(settled(own), 1)
    yield "the removed primary starts a term", lead(_silent(settled(own, _between(0, 1, 2))), 0)
    only = _silent(_changed(leads, 0, 3))
    yield "only an older primary knows of an addition", settled(lead(only, 1), _seals(1, 2))
    down = _silent(_changed(settled(added), 0, 2))
    yield "only an older primary knows of a removal", lead(down, 2)


# --- histories: too long for a search, each for one rule of the core


def _restored_by_an_older_primary() -> None:
    """An elector is wiped, and asks the older primary for what it lost (rule 5b)."""
    state = settled(lead(begin(3, NOTHING), 0))
    state = _silent(settled(lead(state, 1), _between(1, 2)))
    state = restart(state, 2, (), lost=True)
    state = settled(_resent(state, 0), _between(0, 2))
    state = settled(_resent(_proposed(state, 0), 0), _between(0, 2))
    settled(_resent(state, 1))


def _wiped_after_its_promise() -> None:
    """A node answers a new primary, is wiped and restored by the older one, and acknowledges an
    entry there. Only then its first answer arrives (rule 3, the second round).
    """
    state = settled(lead(begin(5, NOTHING), 0))
    state = lead(state, 1)
    state = settled(state, lambda letter: (letter.sender, letter.to) == (1, 2))
    state = restart(state, 2, (), lost=True)
    state = settled(_proposed(state, 0), _between(0, 2, 3, 4))
    state = settled(_resent(state, 0), _between(0, 2, 3, 4))
    before = len(state.committed)
    state = settled(_proposed(state, 0), _between(0, 2, 3))
    assert len(state.committed) > before, "the wiped node counts again"
    state = settled(state, _between(1, 2, 4))
    settled(_resent(state, 1))


def _changed_before_the_fence() -> None:
    """Two primaries change the same configuration; the second one before its fence is committed
    (rule 7; Ongaro's correction of 2015).
    """
    state = settled(lead(begin(4, CHANGES, spares=1), 0))
    state = _silent(_changed(state, 0, 4))
    state = settled(state, _between(0, 4))
    state = settled(lead(state, 1), _seals(1, 2, 3))
    state = settled(state, lambda letter: {letter.sender, letter.to} == {1, 2})
    if (after := change(_silent(state), 1, 0)) is None:
        return
    state = _silent(settled(_resent(after, 1), _between(1, 2)))
    state = settled(_resent(state, 1), _between(1, 2))
    state = settled(lead(_silent(state), 0), _between(0, 3, 4))
    settled(_resent(state, 0), _between(0, 3, 4))


def _changed_twice() -> None:
    """A primary adds two sequencers, of which the first one is not committed (rule 7)."""
    state = settled(lead(begin(3, CHANGES, spares=2), 0))
    state = _silent(_changed(state, 0, 3))
    if (after := change(state, 0, 4)) is None:
        return
    state = settled(_resent(_silent(after), 0), _between(0, 3, 4))
    state = settled(_resent(state, 0), _between(0, 3, 4))
    settled(lead(_silent(state), 1), _between(1, 2))


def _sealed_by_the_old_configuration() -> None:
    """A primary adopts a copy with a newer configuration, whose other sequencers have not promised
    (rule 3).
    """
    state = settled(lead(begin(3, CHANGES, spares=1), 0))
    state = _silent(settled(_changed(state, 0, 3), _between(0, 1, 3)))
    state = settled(_changed(state, 0, 2), _between(0, 1, 3))
    state = settled(lead(_silent(state), 2), _between(1, 2))
    before = len(state.committed)
    state = settled(_resent(_proposed(_silent(state), 0), 0), _between(0, 3))
    assert len(state.committed) > before, "the older primary still has a majority"
    settled(_resent(state, 2))


def _resent(state: State, number: int) -> State:
    """Advance the time to the deadline of a node, if it has one."""
    return timeout(state, number) or state


HISTORIES: Final = {
    "an elector is restored by an older primary": _restored_by_an_older_primary,
    "a node is wiped after its promise": _wiped_after_its_promise,
    "two primaries change the same configuration": _changed_before_the_fence,
    "a primary changes the configuration twice": _changed_twice,
    "an adopted copy has a newer configuration": _sealed_by_the_old_configuration,
}


def happened(name: str) -> Explored:
    """Let a history happen."""
    try:
        HISTORIES[name]()
    except (AssertionError, DataLossError) as error:
        return Explored(1, Found(_said(error), (name,)))
    return Explored(1, None)


# --- searches


def explore(state: State, depth: int, states_max: int) -> Explored:
    """Take all steps from a state, up to `depth` in a row, until `states_max` states were seen."""
    seen: dict[State, tuple[State, Step] | None] = {state: None}
    frontier = [state]
    for _ in range(depth):
        following: list[State] = []
        for one in frontier:
            for step in steps(one):
                try:
                    after = step.take()
                except (AssertionError, DataLossError) as error:
                    return Explored(len(seen), Found(_said(error), _way(seen, one, step)))
                if after is None or after in seen:
                    continue
                seen[after] = one, step
                following.append(after)
                if len(seen) >= states_max:
                    return Explored(len(seen), None)
        frontier = following
    return Explored(len(seen), None)


def _way(
    seen: Mapping[State, tuple[State, Step] | None], state: State, last: Step
) -> tuple[str, ...]:
    """Return the steps that led to a state, and the last one."""
    way = [last]
    while (before := seen[state]) is not None:
        state, step = before
        way.append(step)
    return tuple(step.shown() for step in reversed(way))


def walk(seed: int, length: int = 150, *, nodes: int = 3, spares: int = 0) -> Explored:
    """Take random steps from a random situation. With `spares` nodes that are no sequencers at
    first, sequencers are added and removed.

    Most steps deliver messages, often those of the newest term. Now and then links are cut for a
    while; messages on them stay on their way.
    """
    chance = random.Random(seed)
    left = drawn(chance)
    if spares:
        left = left._replace(changes=chance.randint(1, 6))
    state = begin(nodes, left, spares=spares)
    if nodes == 3 and chance.random() < 0.7:
        prepared = _prepared() if not spares else _prepared_to_change() if spares == 1 else ()
        state = chance.choice(prepared)[1]._replace(left=left) if prepared else state
    nodes += spares
    way: list[str] = []
    faulty = chance.choice([0.05, 0.1, 0.3])
    newest = chance.choice([0.0, 0.5, 0.9])
    cuts = chance.choice([0.0, 0.05, 0.15])
    cut: frozenset[tuple[int, int]] = frozenset()
    for count in range(length):
        if chance.random() < cuts:
            cut = _drawn_cut(chance, nodes)
        letters = [one for one in sorted(state.letters) if (one.sender, one.to) not in cut]
        if letters and chance.random() >= faulty:
            if chance.random() < newest:
                last = max(one.incarnation for one in letters)
                letters = [one for one in letters if one.incarnation == last]
            letter = chance.choice(letters)
            step = Step("deliver", partial(deliver, state, letter), letter)
        elif possible := list(faults(state)):
            step = chance.choice(possible)
        else:
            cut = frozenset()
            continue
        try:
            after = step.take()
        except (AssertionError, DataLossError) as error:
            return Explored(count, Found(_said(error), (*way, step.shown())))
        if after is not None:
            way.append(step.shown())
            state = after
    return Explored(length, None)


def _drawn_cut(chance: random.Random, nodes: int) -> frozenset[tuple[int, int]]:
    """Draw which links are cut: none, all of one node, or some."""
    links = [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    match chance.randrange(3):
        case 0:
            return frozenset()
        case 1:
            alone = chance.randrange(nodes)
            return frozenset(link for link in links if alone in link)
        case _:
            return frozenset(link for link in links if chance.random() < 0.3)


@lru_cache
def _prepared() -> tuple[tuple[str, State], ...]:
    return tuple(situations(NOTHING))


@lru_cache
def _prepared_to_change() -> tuple[tuple[str, State], ...]:
    return tuple(changes(NOTHING))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def drawn(chance: random.Random) -> Left:
    """Draw how many faults of each kind a walk may have."""
    return Left(
        starts=chance.randint(1, 6),
        crashes=chance.choice([0, 1, 4]),
        wipes=chance.choice([0, 1, 3]),
        proposals=chance.randint(1, 6),
        timeouts=chance.choice([0, 10, 30]),
        questions=chance.choice([0, 3]),
        repeats=chance.choice([0, 3]),
    )


BUDGETS: Final = (
    (Left(0, 0, 0, 1, 0, 1, 0), 12),
    (Left(1, 0, 0, 1, 0, 1, 0), 9),
    (Left(1, 0, 1, 1, 1, 0, 0), 7),
    (Left(1, 1, 0, 1, 1, 0, 1), 6),
)
"""What may go wrong in an exhaustive search, and how many steps it takes."""
CHANGE_BUDGETS: Final = (
    (Left(0, 0, 0, 1, 0, 0, 0, 2), 9),
    (Left(1, 0, 0, 0, 1, 0, 0, 1), 8),
    (Left(1, 1, 1, 0, 1, 0, 0, 1), 6),
)
"""The same for searches in which sequencers are added and removed."""


SIZES: Final = ((3, 0), (3, 1), (3, 2), (5, 0), (4, 1), (3, 1), (2, 2))
"""Sequencers of a walk, and nodes that may be added."""


def search(states_max: int, walks: int) -> Iterator[tuple[str, Explored]]:
    """Let all histories happen; search from each situation, up to `states_max` states for each
    budget; then walk.
    """
    for name in HISTORIES:
        yield name, happened(name)
    for left, depth in BUDGETS:
        for name, state in situations(left):
            yield f"{name}; {depth} steps", explore(state, depth, states_max)
    for left, depth in CHANGE_BUDGETS:
        for name, state in changes(left):
            yield f"{name}; {depth} steps", explore(state, depth, states_max)
    for seed in range(walks):
        nodes, spares = SIZES[seed % len(SIZES)]
        yield f"walk {seed}", walk(seed, nodes=nodes, spares=spares)
