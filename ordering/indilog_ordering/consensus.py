"""The consensus core of the ordering tier: a metalog on several sequencers, in the shape of Raft
(Ongaro and Ousterhout 2014; decision 0042).

The core does no input or output: it takes messages and the time, and returns messages and frames.
`Sequencer` calls `Consensus`, which passes messages to its `Member` and its `Leader`.

A *term* is a number from a growing sequence in the metadata store. Each number is given to one
sequencer, the *primary* of the term, so no two primaries share a term. A sequencer may be the
primary of several terms. The *configuration* of a copy consists of the sequencers of the newest
view in this copy, committed or not. A *majority* is more than half of the configuration.

1. **Promise.** A sequencer follows the newest term that it knows. It persists that term before it
   answers, and refuses messages of older terms, also after a restart (Raft 5.1).
2. **Log matching.** An entry carries the term in which it was proposed. A primary proposes only one
   entry at a position. A copy accepts a primary's entries only if its entry directly before them
   has the same term as the primary's entry there. An accepted entry that differs from the copy's
   entry at its position replaces that entry and all later entries. So if two copies have entries of
   the same term at the same position, the copies are equal up to this position (Raft 5.3).
3. **Seal.** A new primary sends `Seal` to all sequencers. When a majority has answered, the primary
   begins a second round. It waits until a majority has answered in both rounds, each node in one
   incarnation. These nodes are the *electors*: at one instant, all of them had promised the term.
   The primary adopts the greatest copy of the electors, by last term and then by length. If no copy
   of an elector is greater than its own, the primary keeps its own copy. If the adopted copy has
   another configuration, the primary repeats this rule with a majority of that configuration.
4. **Commit.** An entry is committed when a majority durably has this entry and also an entry of the
   primary's own term (Raft 5.4.2). The first entry of a term orders no records; it is called the
   *fence*. The majority need not include the primary's own disk.
5. **Learners.** A node that may have lost entries or promises is a *learner*. It writes this fact
   to its disk before any other frame, and counts in no majority. A primary makes the learner a
   *voter* again under two conditions. (a) The learner durably has all entries that the primary had
   at some instant after this primary received a message of the learner's present incarnation. (b)
   After that instant the primary began a round, and a majority without the learner answered in this
   round.
6. **Rounds.** A primary numbers its rounds, and answers repeat the newest number. If a majority has
   answered in a round, no newer primary had electors when the round began. So a tail that was
   committed when the round began is linearizable (Raft 8, ReadIndex).
7. **Changes.** An entry adds or removes at most one sequencer, so majorities before and after the
   entry share a node. Such an entry is proposed only after two entries are committed: an entry of
   the primary's own term, and the entry of the newest view. This rule is Raft 4.1 with its
   correction of 2015 (decision 0053). A node outside the configuration gets entries before it
   joins, and counts in no majority.

*Leader completeness*: if an entry e was committed in term u, every primary of a term v > u adopts a
copy that has e. Let E be the majority that had e, and V the electors of v. Some node X is in both.

Suppose first that X did not lose its disk between its acknowledgement of e and its promise of v.
Then Raft's argument (5.4.3) holds. X acknowledged e before it promised v, because X refuses
messages of u after that promise. So the copy of X ends at e or later. By induction over the terms
between u and v, the greatest copy of V has e.

The second case is a node that lost its disk. Take a learner W that a primary of term t restored.
Let Q be the majority without W that answered, after the loss, in the round of rule 5b. Two claims
suffice:

- *W has every e that it acknowledged before the loss.* There are three cases. If u < t: the
  electors of t and E share a node, which is W before its loss, or another node. So the primary of t
  adopted e, and W has e by 5a. If u = t: the primary had received a message of W's new incarnation.
  W's earlier incarnation acknowledged e before that message, so 5a includes e. If u > t: the
  electors of u had promised u before e was proposed, so before the loss. Some node Y of Q was one
  of these electors. Y would have refused the round of t, because t < u, so this case is impossible.
- *W keeps its promise.* Let W be an elector of v. All electors of v had promised v at one instant,
  and W lost its disk after this instant. Some node Y of Q was also an elector of v. Y answered in
  term t, so t >= v. If Y had lost its disk between promise and answer, the same argument holds for
  Y, which was restored earlier. W followed t when it was restored, so it refuses u < v.

Without the second round of rule 3, the electors need not have promised at one instant. A node could
promise v, lose its disk, be restored by t < v, and acknowledge entries of t that v does not know.

A primary that is a learner is restored by rule 5, too: the second round of rule 3 is then the round
of 5b. A *sole* sequencer is a majority by itself, so each entry on its disk is committed. It needs
no promise, no fence and no round. No other sequencer can restore its disk.

The proof uses that two majorities share a node. This also holds if their configurations differ: by
rules 7 and 3, the configurations of two primaries are equal or differ by one sequencer. Otherwise
the electors of the later primary would include a node that has the fence which the earlier primary
committed before its change. Then the later primary would adopt that change. This is Raft's argument
(dissertation 4.1) for the owner of the adopted copy: the electors are a majority of the
configuration in that copy, and none of them has a greater copy.

There are two assumptions: a sync is durable, and lost frames are detected (decisions 0009, 0022).
Sequencers of one process lose their unsynced frames together, so the nodes of a majority should run
in different processes.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import Config
from indilog.kernel.view import View
from indilog.roles.role import Effect, Ignore, Received
from indilog.wire.sequencer_messages import MetalogAppend, MetalogStored, Seal, Sealed
from indilog_ordering.leader import Leader
from indilog_ordering.member import Member
from indilog_ordering.stored_metalog import StoredMetalog


class Consensus:
    """One sequencer of the core.

    Args:
        node: this node.
        view: the newest view that is known to be installed.
        metalog: the copy here, recovered.
        incarnation: the incarnation of this node.

    Attributes:
        member: the copy and the promise of this node.
        leader: the term that this node leads; None: this node leads no term.
    """

    def __init__(
        self,
        node: NodeId,
        view: View,
        metalog: StoredMetalog,
        incarnation: Epoch,
        config: Config,
    ) -> None:
        self._node = node
        self._config = config
        self.member = Member(metalog, view, incarnation, config)
        self.leader: Leader | None = None

    @property
    def is_outside(self) -> bool:
        """Whether a committed view lacks this node: the node has left, or has not joined yet."""
        member = self.member
        committed = max(member.committed, member.metalog.committed.position)
        lacks = self._node not in member.view.sequencers
        return lacks and member.metalog.view_end <= committed

    def begin(self) -> list[Effect]:
        """Return the first effects after a start."""
        return self.member.begin()

    def lead(self, term: Epoch) -> list[Effect]:
        """Become the primary of a term, which is newer than all terms that are known here."""
        assert term > self.member.term, "a term has one primary, and begins once"
        alone = len(self.member.view.sequencers) == 1
        effects = [] if alone else self.member.lead(term)
        if alone:
            self.member.term = term
        self.leader = Leader(self._node, self.member, term, self._config)
        return effects

    def retire(self) -> bool:
        """End this node's term if a newer one is known; return whether it ended."""
        if self.leader is None or not self.leader.deposed:
            return False
        self.leader = None
        return True

    def on_received(
        self, event: Received, message: Seal | Sealed | MetalogAppend | MetalogStored
    ) -> list[Effect]:
        """Handle a message of another sequencer."""
        leader = self.leader
        match message:
            case Seal():
                return self.member.on_seal(event, message)
            case MetalogAppend():
                return self.member.on_append(event, message)
            case Sealed() | MetalogStored() if leader is None or leader.deposed:
                return [Ignore(event, "an answer to a primary; this node is none")]
            case Sealed():
                return leader.on_sealed(event, message)
            case MetalogStored():
                return leader.on_stored(event, message)

    def advance(self, now: Instant) -> list[Effect]:
        """Answer as a member, and commit as a primary. Proposals follow, then `replicate`."""
        leader = self.leader
        if leader is None or leader.deposed:
            return self.member.advance()
        return leader.advance(now)

    def replicate(self, now: Instant) -> list[Effect]:
        """Send the other sequencers the entries that they lack."""
        return [] if self.leader is None else self.leader.replicate(now)

    def deadline(self) -> Instant | None:
        """When to call `advance` and `replicate` even without messages."""
        return None if self.leader is None else self.leader.deadline()

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        self.member.check_invariants()
        if self.leader is not None:
            self.leader.check_invariants()
