"""Checks that a history of transactions is serializable (Adya 1999, "direct serialization graph";
Elle, VLDB 2020, lists of unique values).

The evidence is what clients saw. Every write adds a unique value to an object's list. So a list
that was read shows the writes before the read, and the final list shows the order of all writes.
From this follow the dependencies between transactions. One read the other's write (wr), overwrote
it (ww), or read a value that the other overwrote (rw). Or one ended before the other began (rt). A
cycle means that the transactions have no serial order.

The checker does not use logs, seqnums or the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise
from typing import TypeAlias

Node: TypeAlias = tuple[str, float]
"""A transaction by number, or a point in time."""


@dataclass
class Transaction:
    """A client's view of one transaction.

    Attributes:
        outcome: `committed`, `aborted` or `unknown`.
        began, ended: points in time of one clock that all clients share.
        reads: by object the values in its list before this transaction's own.
        writes: by object the values that it added, in order.
    """

    number: int
    began: int
    outcome: str = "unknown"
    ended: int = -1
    reads: dict[str, Sequence[int]] = field(default_factory=dict)
    writes: dict[str, list[int]] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        """Its node in the graph."""
        return ("T", self.number)


def violations(
    transactions: Sequence[Transaction], final: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return all contradictions to strict serializability; empty: none.

    Args:
        transactions: all that ran.
        final: by object its list after all transactions ended.
    """
    history = _History(transactions, final)
    plain = [*history.lost(), *history.dirty(), *history.torn()]
    return plain or list(history.cycle())


class _History:
    def __init__(
        self, transactions: Sequence[Transaction], final: Mapping[str, Sequence[int]]
    ) -> None:
        self._final = final
        self._writer = {
            value: txn for txn in transactions for values in txn.writes.values() for value in values
        }
        present = {value for values in final.values() for value in values}
        self._counted = [
            txn
            for txn in transactions
            if txn.outcome == "committed"
            or (txn.outcome == "unknown" and not present.isdisjoint(chain(*txn.writes.values())))
        ]
        """Transactions with effect: of those with unknown outcome, the ones whose values are
        there.
        """
        self._all = transactions

    def lost(self) -> Iterator[str]:
        """Committed writes that are missing, repeated or out of order."""
        for txn in self._counted:
            for name, values in txn.writes.items():
                left = [value for value in self._final[name] if value in values]
                if left != values:
                    yield f"lost: {txn.node} wrote {values} to {name}, of which {left} is left"

    def dirty(self) -> Iterator[str]:
        """Values of transactions that did not commit, or of no transaction."""
        counted = {txn.number for txn in self._counted}
        seen = [(name, values, "finally") for name, values in self._final.items()]
        seen += [
            (name, values, f"by {txn.node}")
            for txn in self._counted
            for name, values in txn.reads.items()
        ]
        for name, values, by in seen:
            for value in values:
                writer = self._writer.get(value)
                if writer is None or writer.number not in counted:
                    yield f"dirty: {value} of an aborted transaction was seen in {name} {by}"

    def torn(self) -> Iterator[str]:
        """Reads of a list that never existed between two transactions."""
        for txn in self._counted:
            for name, values in txn.reads.items():
                whole = self._final[name]
                if list(whole[: len(values)]) != list(values):
                    yield f"order: {txn.node} read {values} of {name}, which became {whole}"
                elif 0 < len(values) < len(whole) and (
                    self._writer[values[-1]] is self._writer[whole[len(values)]]
                ):
                    yield f"intermediate: {txn.node} read {values} of {name}"

    def cycle(self) -> Iterator[str]:
        """A cycle in the graph of dependencies, if there is one."""
        edges = dict(self._dependencies()) | dict(self._real_time())
        graph: TopologicalSorter[Node] = TopologicalSorter()
        for before, after in edges:
            graph.add(after, before)
        try:
            graph.prepare()
        except CycleError as error:
            path: list[Node] = error.args[1]
            steps = [
                f"{one} -{edges.get((one, two)) or edges[two, one]}-> {two}"
                for one, two in pairwise(path)
            ]
            yield "cycle: " + ", ".join(steps)

    def _dependencies(self) -> Iterator[tuple[tuple[Node, Node], str]]:
        for name, values in self._final.items():
            for one, two in pairwise(values):
                yield from self._edge(self._writer[one], self._writer[two], f"ww({name})")
        for txn in self._counted:
            for name, values in txn.reads.items():
                if values:
                    yield from self._edge(self._writer[values[-1]], txn, f"wr({name})")
                if len(values) < len(self._final[name]):
                    overwriter = self._writer[self._final[name][len(values)]]
                    yield from self._edge(txn, overwriter, f"rw({name})")

    @staticmethod
    def _edge(
        one: Transaction, two: Transaction, kind: str
    ) -> Iterator[tuple[tuple[Node, Node], str]]:
        if one is not two:
            yield (one.node, two.node), kind

    def _real_time(self) -> Iterator[tuple[tuple[Node, Node], str]]:
        """Order transactions in real time: one that ended before another began precedes it, by a
        chain of points in time.
        """
        moments: set[float] = set()
        for txn in self._counted:
            ended = txn.ended if txn.outcome == "committed" else math.inf
            moments |= {txn.began, ended}
            yield (("moment", txn.began), txn.node), "rt"
            yield (txn.node, ("moment", ended)), "rt"
        for one, two in pairwise(sorted(moments)):
            yield (("moment", one), ("moment", two)), "rt"
